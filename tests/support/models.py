"""Models for the engine's tests: one process's world, pairs of a conventional and a stateful model, and token trees.

A pair is built once per process and reused; its gradients are taken away after each use.
"""

import functools
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from longstraw.patches.float64 import lift_float64
from longstraw.patches.process_groups import initialize_groups, single_rank_groups
from longstraw.segments import Segment, grow_group
from longstraw.sweep_config import SweepConfig
from longstraw.sweeps import ReplayEngine
from megatron.grpo.model_provider import build_conventional_model, build_model
from megatron.grpo.presets import ModelPreset, get_preset
from megatron.grpo.sharding import shard_parameter, whole_name
from tests.support.dense import Sequence, dense_gradients, take_gradients


@functools.cache
def one_rank() -> ProcessGroupCollection:
    """The gloo world of this process alone, joined once."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        return ProcessGroupCollection.use_mpu_process_groups()
    return initialize_groups()


@dataclass(frozen=True)
class ModelPair:
    """A conventional float64 model and a stateful one of the same weights (rounded to `dtype` on both sides)."""

    preset: ModelPreset
    plain: torch.nn.Module
    model: torch.nn.Module
    vocab_size: int

    def engine(self, *, temperature: float = 1.0, **config) -> ReplayEngine:
        """An engine over the stateful model; config: SweepConfig's fields, with small chunks unless given."""
        config = dict(prompt_chunk_size=16, response_block_size=8) | config
        return ReplayEngine(self.model, SweepConfig(**config), vocab_size=self.vocab_size, temperature=temperature)


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Random values for every parameter, none at a value where its gradient would be special (norms at 1, A_log at 0)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            if "norm" in name or name.endswith("dt_bias"):
                parameter += 0.2 * noise
            elif name.endswith("A_log"):
                parameter.copy_(-1.0 + 0.3 * noise)  # decays slow enough for a state to live through a chunk
            elif name.endswith("conv1d.weight"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):  # far enough from 0 to decide which experts are chosen
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))


def build_pair(
    preset: ModelPreset, dtype: torch.dtype, groups: ProcessGroupCollection, *, sequence_parallel: bool = False,
    padded_vocab_size: int | None = None, seed: int = 1, indexer_loss: float = 0.0,
) -> ModelPair:
    """A pair on these groups; the conventional model is whole on every rank.

    indexer_loss: the coefficient of the stateful model's loss of its sparse indexer.
    """
    model_parallel_cuda_manual_seed(seed)
    router = {"moe_router_dtype": "fp64"} if preset.has_experts else {}
    plain_config = preset.transformer_config(use_cpu_initialization=True, **router)
    plain = build_conventional_model(
        preset, plain_config, single_rank_groups(groups), flash=False, padded_vocab_size=padded_vocab_size
    ).double()
    draw_weights(plain, seed)
    config = preset.transformer_config(
        use_cpu_initialization=True, tensor_model_parallel_size=groups.tp.size(),
        context_parallel_size=groups.cp.size(), expert_model_parallel_size=groups.ep.size(),
        sequence_parallel=sequence_parallel, **(router if dtype is torch.float64 else {}),
        **(dict(dsa_indexer_loss_coeff=indexer_loss, dsa_indexer_use_sparse_loss=True) if indexer_loss else {}),
    )
    model = build_model(preset, config, groups, padded_vocab_size=padded_vocab_size).to(dtype)
    pair = ModelPair(preset, plain, model, preset.vocab_size)
    copy_weights(pair, groups)
    return pair


@torch.no_grad()
def copy_weights(pair: ModelPair, groups: ProcessGroupCollection) -> None:
    """Round the conventional model's weights to the stateful model's dtype and copy them over, shard by shard."""
    whole = dict(pair.plain.named_parameters())
    for parameter in whole.values():
        parameter.copy_(parameter.to(next(pair.model.parameters()).dtype))
    for name, parameter in pair.model.named_parameters():
        source = whole[whole_name(name, pair.preset.num_experts, groups.ep.rank(), groups.ep.size())]
        parameter.copy_(shard_parameter(name, source, pair.preset, groups.tp.rank(), groups.tp.size()))
    biases = dict(pair.plain.named_buffers())
    for name, buffer in pair.model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(biases[name])


@functools.cache
def get_pair(preset_name: str, dtype: torch.dtype = torch.float64) -> ModelPair:
    """The pair of a preset in this process alone, built once."""
    return build_pair(get_preset(preset_name), dtype, one_rank())


@functools.cache
def get_small_hybrid(num_layers: int = 4, linear_attention_freq: int = 2) -> ModelPair:
    """A hybrid a quarter of tiny-qwen3.6's width, in float64, for tests over many sizes."""
    preset = replace(
        get_preset("tiny-qwen3.6"), name="small-hybrid", num_layers=num_layers, hidden_size=32, ffn_hidden_size=48,
        num_attention_heads=2, num_query_groups=1, kv_channels=16, linear_attention_freq=linear_attention_freq,
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, vocab_size=32,
    )
    return build_pair(preset, torch.float64, one_rank())


@dataclass(frozen=True)
class Group:
    """A prompt [1, P], responses [R] each, and a weight per response token: what one GRPO step sees."""

    prompt: torch.Tensor
    responses: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]

    def tree(self, *, together: int = 1) -> Segment:
        """The group as the engine's tree, `together` responses (of equal length) replayed at a time."""
        batches = [slice(i, i + together) for i in range(0, len(self.responses), together)]
        responses = [torch.stack(self.responses[batch]) for batch in batches]
        losses = [weighted_loss(torch.stack(self.weights[batch])) for batch in batches]
        tree = grow_group(self.prompt, responses, losses)
        for child, batch in zip(tree.children, batches):
            child.row_weights = torch.stack(self.weights[batch]).abs()
        return tree

    def sequences(self) -> list[Sequence]:
        """The group as whole sequences for the dense pass."""
        before = torch.zeros(self.prompt.shape[1] - 1, dtype=torch.float64)
        return [
            Sequence(torch.cat([self.prompt, response[None]], 1), torch.cat([before, weight]))
            for response, weight in zip(self.responses, self.weights)
        ]


@dataclass(frozen=True)
class Document:
    """Tokens [1, S] with a loss on each but the first: one segment that follows nothing."""

    tokens: torch.Tensor
    weights: torch.Tensor

    def tree(self, *, together: int = 1) -> Segment:
        """One segment with a loss."""
        loss, row_weights = weighted_loss(self.weights[None]), self.weights[None].abs()
        return Segment("document", self.tokens[:, :-1], self.tokens[:, 1:], loss, row_weights=row_weights)

    def sequences(self) -> list[Sequence]:
        """The document as it is."""
        return [Sequence(self.tokens, self.weights)]


def draw_document(length: int, vocab_size: int) -> Document:
    """Random tokens and weights."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(vocab_size, (1, length), generator=generator)
    return Document(tokens, torch.randn(length - 1, generator=generator, dtype=torch.float64) / length)


def weighted_loss(weights: torch.Tensor):
    """The engine's loss of a segment [B, S]: the weighted sum of negative log-probabilities."""
    return lambda logprobs, columns: -(logprobs * weights[:, columns].to(logprobs.dtype)).sum()


def draw_group(prompt_length: int, response_lengths: tuple[int, ...], vocab_size: int, seed: int = 0) -> Group:
    """Random tokens and weights."""
    generator = torch.Generator().manual_seed(1000 * seed + 31 * prompt_length + sum(response_lengths))
    prompt = torch.randint(vocab_size, (1, prompt_length), generator=generator)
    responses = tuple(torch.randint(vocab_size, (n,), generator=generator) for n in response_lengths)
    scale = 1 / sum(response_lengths)
    weights = tuple(torch.randn(n, generator=generator, dtype=torch.float64) * scale for n in response_lengths)
    return Group(prompt, responses, weights)


def replay_gradients(engine: ReplayEngine, tree: Segment) -> tuple[float, dict[str, torch.Tensor]]:
    """The engine's loss and gradients of a tree, in this process alone, with float32 islands lifted in float64."""
    engine.model.zero_grad()
    with lift_float64():
        loss = engine.replay(tree)
    return loss, take_gradients(engine.model)


def replay_in_one_go(engine: ReplayEngine, tree: Segment) -> tuple[float, list[torch.Tensor]]:
    """As `engine.replay`, with each response scored and replayed in one go; also the log-probabilities of each."""
    constant = engine.config.semantics == "response_only"
    state, loss, scored = engine.capture_boundaries(tree, None, constant=constant), 0.0, []
    if not constant:
        engine.prepare_adjoints(state)
    for child in tree.children:
        # the loss that the tree was given, made only once the log-probabilities are there
        block_loss, child.loss = child.loss, None
        loss += engine.score_and_replay(child, state, lambda logprobs: scored.append(logprobs) or block_loss)
    return (loss if constant else loss + engine.reverse_sweep(tree, state)), scored


_dense: dict[tuple, tuple[float, dict[str, torch.Tensor]]] = {}


def dense_of(pair: ModelPair, group: Group, **options) -> tuple[float, dict[str, torch.Tensor]]:
    """`dense_gradients` of a group, remembered: the reference does not depend on how the engine cuts it."""
    tokens = tuple(map(tuple, [group.prompt[0].tolist(), *(r.tolist() for r in group.responses)]))
    key = (id(pair), tokens, *sorted(options.items()))
    if key not in _dense:
        with lift_float64():
            _dense[key] = dense_gradients(pair.plain, group.sequences(), vocab_size=pair.vocab_size, **options)
    return _dense[key]
