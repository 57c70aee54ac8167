"""What the rank scripts share: a run's parts built from flags, and gradients that are the same at every topology."""

import contextlib
import logging

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from longstraw.patches.process_groups import initialize_groups
from megatron.grpo.arguments import parse_arguments, resolve_preset
from megatron.grpo.initialize import seed_everything
from megatron.grpo.model_setup import build_training_model, wrap_model
from megatron.grpo.optimizer import build_optimizer, build_scheduler, optimizer_state, step_optimizer
from megatron.grpo.random_states import derive_seed
from megatron.grpo.sharding import gather_experts, shard_parameter, unshard_parameter, whole_name

logging.getLogger("megatron").setLevel(logging.ERROR)
_topologies: dict[tuple[int, int, int], tuple[dict, object]] = {}


def switch_topology(tp: int, cp: int, ep: int = 1):
    """Groups of these sizes as Megatron's current ones, made once each: a gloo group keeps threads as long as it lives."""
    def is_state(name: str) -> bool:
        return name.startswith("_") and name.isupper()

    if (tp, cp, ep) not in _topologies:
        parallel_state.destroy_model_parallel()
        groups = initialize_groups(tensor_parallel=tp, context_parallel=cp, expert_parallel=ep)
        _topologies[tp, cp, ep] = ({k: v for k, v in vars(parallel_state).items() if is_state(k)}, groups)
    state, groups = _topologies[tp, cp, ep]
    vars(parallel_state).update(state)
    return groups


class TrainingState:
    """Model, optimizer and schedules of one topology, driven by made-up gradients instead of a replay."""

    def __init__(self, flags: str, tp: int = 1, cp: int = 1, seed: int = 1, ep: int = 1):
        self.args, self.config = parse_arguments(
            "--prompt-data p --tokenizer-path t --train-iters 20 --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 2 "
            f"--tensor-model-parallel-size {tp} --context-parallel-size {cp} --seed {seed} "
            f"--expert-model-parallel-size {ep} {flags}".split()
        )
        self.groups = switch_topology(tp, cp, ep)
        seed_everything(seed)
        self.preset = resolve_preset(self.args)
        self.model = build_training_model(self.args, self.groups)
        self.ddp = wrap_model(self.args, self.model, self.groups)
        self.optimizer = build_optimizer(self.args, self.ddp, self.groups)
        self.scheduler = build_scheduler(self.args, self.optimizer)

    def whole_shapes(self) -> dict[str, torch.Size]:
        return {name: weight.shape for name, weight in self.whole_weights().items()}

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Every parameter, put together over tensor parallelism."""
        return self.gather({name: p.data for name, p in self.model.named_parameters()})

    def gather(self, shards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        whole = {}
        for name, shard in shards.items():
            parts = [torch.empty_like(shard) for _ in range(self.groups.tp.size())]
            dist.all_gather(parts, shard.contiguous(), group=self.groups.tp)
            whole[name] = unshard_parameter(name, parts, self.preset).clone()
        return gather_experts(whole, self.preset, self.groups.ep)

    def set_gradients(self, step: int) -> None:
        """Gradients that depend on the step and the parameter alone."""
        shapes, ep = self.whole_shapes(), self.groups.ep
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            of_all = whole_name(name, self.preset.num_experts, ep.rank(), ep.size())
            generator = torch.Generator().manual_seed(derive_seed(step, of_all))
            whole = torch.randn(shapes[of_all], generator=generator) * 0.1
            shard = shard_parameter(name, whole, self.preset, self.groups.tp.rank(), self.groups.tp.size())
            parameter.main_grad.copy_(shard)

    def train(self, first: int, last: int) -> list[float]:
        """Steps first..last; returns the gradients' norms."""
        norms = []
        for step in range(first, last + 1):
            self.set_gradients(step)
            ok, norm = step_optimizer(self.optimizer, self.scheduler)
            assert ok
            self.ddp.zero_grad_buffer()
            norms.append(norm)
        return norms

    def adam_state(self) -> list[torch.Tensor]:
        """Moments and step counts, in the optimizer's order."""
        state = optimizer_state(self.optimizer)
        return [
            value.clone()
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            for _, value in sorted(state[parameter].items())
        ]


def assert_same(found, wanted) -> None:
    """Bit for bit, for mappings and lists of tensors."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(found[name], wanted[name]), name
    else:
        assert len(found) == len(wanted)
        for index, (f, w) in enumerate(zip(found, wanted)):
            assert torch.equal(f, w), index


@contextlib.contextmanager
def refused(*fragments: str):
    """A block that raises ValueError, in one sentence with these fragments, on every rank alike."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        assert "\n" not in text, text
        for fragment in fragments:
            assert fragment in text, f"{fragment!r} is not in: {text}"
        texts = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        assert len(set(texts)) == 1, texts
    else:
        raise AssertionError("was not refused")
