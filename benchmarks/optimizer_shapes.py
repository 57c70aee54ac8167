"""Bytes of gradients and optimizer state of a model that is not built, from the shapes of its matrices.

d rows and k columns of this rank's shard of a matrix, R rank, N ranks that hold the same matrix (data x context
parallelism).

The model is made on torch's meta device, in a world of fake process groups: Megatron's own modules say what one rank of
a tensor, context and expert parallel job holds, and nothing is allocated. Weights are bfloat16, all else float32:

    adam     main_grad, two moments and a float32 weight for each weight: 16 bytes, of which 12 are divided by N under
             --use-distributed-optimizer
    lora     the same for pairs [R, k] and [d, R] of every matrix that is called
    logra    a sketch [d, R], a moment a row, the drawn words of A (1 bit an entry), and for each weight the 16 bits that
             bfloat16 lacks (or a float32 copy), divided by N

`tests/unit/benchmarks` holds this arithmetic to live tensors on a small model. Left out: activations, prompt state.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from longstraw.optim.projection import Projection
from longstraw.patches.lora import is_pair
from longstraw.patches.process_groups import initialize_groups
from longstraw.patches.projections import find_projections
from megatron.grpo.model_provider import build_model
from megatron.grpo.presets import ModelPreset

SIGN_TABLE = 256 * 8
"""Elements of the table that turns words of a Rademacher A into signs; one a matrix and dtype that multiplies."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is cut."""

    tensor_parallel: int = 1
    context_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tensor_parallel * self.context_parallel * self.data_parallel

    def copies(self, expert: bool) -> int:
        """Ranks that hold the same shard."""
        if expert:
            return self.ranks // (self.tensor_parallel * self.expert_parallel)
        return self.context_parallel * self.data_parallel


@dataclass(frozen=True, kw_only=True)
class MatrixShape:
    """One projection matrix of a rank."""

    rows: int
    columns: int
    expert: bool
    called: bool
    """Whether LoRA can give it a pair."""

    @property
    def numel(self) -> int:
        """d k."""
        return self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """What one rank holds: its projection matrices, and the number of all other weights."""

    matrices: tuple[MatrixShape, ...]
    rest: int

    @property
    def numel(self) -> int:
        """All weights of the rank."""
        return self.rest + sum(matrix.numel for matrix in self.matrices)


def read_shapes(model: torch.nn.Module) -> ModelShapes:
    """Those of a model, wherever its weights are; low-rank pairs are not counted."""
    found = find_projections(model)
    matrices = tuple(
        MatrixShape(rows=m.weight.shape[0], columns=m.weight.shape[1], expert=m.expert, called=m.called) for m in found
    )
    total = sum(parameter.numel() for name, parameter in model.named_parameters() if not is_pair(name))
    return ModelShapes(matrices=matrices, rest=total - sum(matrix.numel for matrix in matrices))


def build_shapes(preset: ModelPreset, layout: Layout) -> ModelShapes:
    """Those of a preset under a layout, on rank 0. In a process that has joined no world yet; leaves it in a fake one.

    Raises ValueError where the layout does not cut the model.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    groups = initialize_groups(
        tensor_parallel=layout.tensor_parallel, context_parallel=layout.context_parallel,
        expert_parallel=layout.expert_parallel,
    )
    config = preset.transformer_config(
        use_cpu_initialization=True, perform_initialization=False, params_dtype=torch.bfloat16,
        tensor_model_parallel_size=layout.tensor_parallel, context_parallel_size=layout.context_parallel,
        expert_model_parallel_size=layout.expert_parallel,
    )
    with torch.device("meta"):
        model = build_model(preset, config, groups)
    return read_shapes(model)


def count_adam(shapes: ModelShapes, layout: Layout, *, bf16: bool = True, shared_out: bool = False) -> dict[str, int]:
    """Dense Adam. shared_out: --use-distributed-optimizer. bf16: else float32 weights, which are their own masters."""
    per_weight = 12 if bf16 else 8

    def bytes_of(numel: int, expert: bool) -> int:
        return 4 * numel + -(-per_weight * numel // (layout.copies(expert) if shared_out else 1))

    matrices = sum(bytes_of(matrix.numel, matrix.expert) for matrix in shapes.matrices)
    return {"matrices": matrices, "rest": bytes_of(shapes.rest, False)}


def count_lora(shapes: ModelShapes, rank: int, *, bf16: bool = True) -> dict[str, int]:
    """Adam of low-rank pairs."""
    pairs = sum(rank * (matrix.rows + matrix.columns) for matrix in shapes.matrices if matrix.called)
    return {"matrices": (16 if bf16 else 12) * pairs, "rest": 0}


def count_logra(
    shapes: ModelShapes, layout: Layout, rank: int, *, bf16: bool = True, masters: str = "remainder"
) -> dict[str, int]:
    """LoGRA with RowAdam and a Rademacher A; the rest of the weights frozen. Its parts beside "matrices", their sum.

    masters: "remainder" or "float32", on the device.
    """
    parts = dict.fromkeys(("sketches", "row_moments", "masters", "projections"), 0)
    width = Projection(name="", rank=1, columns=1, seed=0, draw=0).block_columns
    table = (2 + 4 if bf16 else 4) * SIGN_TABLE  # sketches multiply inputs as they are, probes in float32
    for matrix in shapes.matrices:
        parts["sketches"] += 4 * matrix.rows * rank
        parts["row_moments"] += 4 * matrix.rows
        if matrix.called:  # else A is drawn anew for each block
            parts["projections"] += rank * -(-matrix.columns // width) * 8 + table
        if bf16:
            kept = -(-matrix.rows // layout.copies(matrix.expert)) * matrix.columns
            parts["masters"] += kept * (2 if masters == "remainder" else 4)
    return {"matrices": sum(parts.values()), "rest": 0} | parts
