"""Which weights a version is of, beyond its number: what they started as, and everything that has moved them since.

    lineage = open_lineage(args, config, model, groups, resumed)
    digest = lineage.digest(groups)                  of a step's rollouts, before they are trained on
    lineage.advance(number, digest, rates)           once the step is committed

The first value is a checksum of the whole weights. Each step hashes into it the rollouts that it was trained on (tokens,
log-probabilities, rewards, which take part, recorded routes), the flags and rates that an update depends on, and, of
low-rank pairs, what they began as. So a trainer knows the value for the cost of hashing token ids, at any parallel sizes,
at which weights differ in their last bits and are the same run's all the same; weights are read once, at the start, and
never again: a checkpoint keeps the value. Rollout stores and weight versions carry it, and whoever reads them compares.

Left out: the reference policy beyond its coefficient and estimator, and versions of libraries and hardware.
"""

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from longstraw.patches.lora import is_pair
from longstraw.receipts.collect import checksum_tensors, join_checksums
from longstraw.rollout.weight_folder import join_tensor_checksums
from longstraw.transaction.group import PromptGroup
from megatron.grpo.arguments import resolve_preset
from megatron.grpo.checkpointing import ResumedRun
from megatron.grpo.presets import ModelPreset
from megatron.grpo.run_config import TrainConfig
from megatron.grpo.sharding import is_expert, partition_dim, unshard_parameter, whole_name
from megatron.grpo.whole_weights import merged

STATE = "weight_lineage"
"""Its place among the values that a checkpoint keeps for the program."""

_OPTIMIZER_FLAGS = (
    "optimizer", "bf16", "adam_beta1", "adam_beta2", "adam_eps", "apply_wd_to_qk_layernorm", "clip_grad", "dsa_indexer_loss_coeff",
    "dsa_indexer_use_sparse_loss",
)
_OVER_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_NOT_OF_THE_UPDATE = {
    "objective": ("logprob_chunk_tokens", "group_filter_retries"),
    "logra": ("logra_cosine_of", "logra_delta_dir", "logra_masters", "logra_master_residency"),
}
"""Fields that change where or how something is computed, or what is sampled, which rollouts show by themselves."""


class WeightLineage:
    """See the module. Equal on every rank.

    value: of the weights as they are. origin: of those before step 1; None where a checkpoint does not say. start: what an
    update depends on beside the weights that began: pairs, and an optimizer that was not loaded. flags: a digest.
    """

    def __init__(self, *, value: str, origin: str | None, start: str, flags: str, dp: dist.ProcessGroup):
        self.value, self.origin, self.start, self.flags, self.dp = value, origin, start, flags, dp

    def state_dict(self) -> dict[str, str | None]:
        """What a checkpoint keeps."""
        return {"value": self.value, "origin": self.origin, "start": self.start}

    def digest(self, groups: Sequence[PromptGroup]) -> str:
        """Of a step's scored groups, over all replicas and in whatever order. Collective over data parallel."""
        gathered: list = [None] * self.dp.size()
        dist.all_gather_object(gathered, [hash_group(group) for group in groups], group=self.dp)
        return join_checksums(sorted(one for part in gathered for one in part))

    def advance(self, number: int, rollouts: str, rates: Iterable[tuple[float, float]]) -> None:
        """The weights are those after step `number`. rates: learning rate and weight decay of the optimizer's groups.

        Collective over the world: rank 0's rates count.
        """
        told = [sorted(set(rates))]
        dist.broadcast_object_list(told, src=0)
        self.value = join_checksums([self.value, self.start, self.flags, rollouts, json.dumps([number, told[0]])])


def open_lineage(
    args: Namespace, config: TrainConfig, model: torch.nn.Module, groups, resumed: ResumedRun | None
) -> WeightLineage | None:
    """Of a run whose weights are loaded. Collective.

    None where the run neither has one from its checkpoint nor shares its weights or rollouts with anybody.
    """
    flags, goes_on = hash_flags(args, config), resumed is not None and resumed.iteration > 0
    saved = resumed.extra.get(STATE) if goes_on else None
    if saved is None:
        shares = config.rollouts.rollout_store or config.rollouts.rollouts_from or config.rollouts.rollout_engine != "resident"
        if not shares and config.weight_sync.weight_sync == "none":
            return None
        value = checksum_whole(model, resolve_preset(args), groups)
        saved = {"value": value, "origin": None if goes_on else value, "start": _checksum_pairs(model)}
    if goes_on and args.no_load_optim:
        saved = saved | {"start": join_checksums([saved["start"], f"no optimizer state at step {resumed.iteration}"])}
    return WeightLineage(**saved, flags=flags, dp=groups.dp)


@torch.no_grad()
def checksum_whole(model: torch.nn.Module, preset: ModelPreset, groups) -> str:
    """Of the weights that the model computes with, whole and by their names on one rank. Collective.

    The same at any parallel sizes: shards are put together tensor by tensor, and padded vocabulary is left out. It is over
    the model's own tensors, since not every model has a form in Hugging Face's.
    """
    tp, ep, read, found = groups.tp, groups.ep, merged(model), {}
    state = model.state_dict(keep_vars=True)
    names = [name for name in state if not (is_pair(name) or name.endswith("_extra_state"))]
    for index, name in enumerate(names):
        whole = read(name, state[name])
        if tp.size() > 1 and partition_dim(name) is not None and not is_expert(name):
            shards = [torch.empty_like(whole) for _ in range(tp.size())]
            dist.all_gather(shards, whole.contiguous(), group=tp)
            whole = unshard_parameter(name, shards, preset)
        if name in _OVER_VOCABULARY:
            whole = whole[: preset.vocab_size]
        if is_expert(name) or index % dist.get_world_size() == dist.get_rank():  # ranks share out what all of them hold
            known = whole_name(name, preset.num_experts, ep.rank(), ep.size())
            found[known] = checksum_tensors([(known, whole)])
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return join_tensor_checksums({name: checksum for part in gathered for name, checksum in part.items()})


def hash_flags(args: Namespace, config: TrainConfig) -> str:
    """Of everything on the command line that an update depends on, but the rates, which a schedule gives step by step."""
    logra = config.logra
    told: dict = {name: getattr(args, name) for name in _OPTIMIZER_FLAGS}
    told |= {"semantics": config.sweeps.semantics, "mask_truncated": config.run.mask_truncated}
    told |= {"routes": config.rollouts.rollout_router_replay, "mismatch": asdict(config.mismatch)}
    parts = {"objective": config.objective} | ({"logra": logra} if args.optimizer == "logra" else {})
    if config.lora.lora_rank:
        parts["lora"] = config.lora
    for name, part in parts.items():
        left_out = _NOT_OF_THE_UPDATE.get(name, ())
        told[name] = {field: value for field, value in asdict(part).items() if field not in left_out}
    if args.optimizer == "logra" and logra.kl_budget_schedule != "constant" and logra.kl_budget_steps is None:
        told["budget_steps"] = args.train_iters
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def hash_group(group: PromptGroup) -> str:
    """Of one scored group: what of it an update depends on."""
    digest = hashlib.sha256()
    told = [group.prompt_id, group.prompt[0].tolist(), group.rewards, group.scored, group.kept]
    told += [[sample.token_ids, sample.logprobs, sample.finish_reason] for sample in group.samples]
    digest.update(json.dumps(told).encode())
    for sample in group.samples:
        if sample.routes is not None:
            digest.update(json.dumps([sample.routes.layers, sample.routes.topk]).encode() + sample.routes.data)
    return digest.hexdigest()


def list_rates(optimizer) -> list[tuple[float, float]]:
    """(learning rate, weight decay) of each of an optimizer's groups, as the next step has them."""
    return [(group["lr"], group.get("weight_decay", 0.0)) for group in optimizer.param_groups]


def short(lineage: str) -> str:
    """As a message shows it."""
    return lineage.removeprefix("sha256:")[:12]


def _checksum_pairs(model: torch.nn.Module) -> str:
    """Of the low-rank pairs, the same whichever ranks hold copies of them; tensor parallelism cuts them, and tells."""
    gathered: list = [None] * dist.get_world_size()
    own = checksum_tensors((name, weight.data) for name, weight in model.named_parameters() if is_pair(name))
    dist.all_gather_object(gathered, own)
    return join_checksums(sorted(set(gathered)))
