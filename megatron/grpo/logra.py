"""`--optimizer logra`: which weights are under LoGRA, where their shards lie, and what a checkpoint keeps of it.

Projection matrices are updated by LoGRA; every other weight is frozen, or trained by Megatron's Adam (--logra-train-rest).

    choose_trained(args, config, model)              before DDP: what takes a gradient buffer
    optimizer = build_logra(args, config, ddp, groups)

`LograOptimizer` stands where Megatron's optimizer does for schedules and checkpoints. A checkpoint holds row moments whole
(so that they fit any parallel size), Adam's moments and float32 masters under the weights' own layout, the number of steps
and the mismatch average; A is a function of the seed and never saved.

Left out: the step itself (`megatron.grpo.logra_update`).
"""

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from longstraw.optim.config import LograConfig
from longstraw.optim.master_rows import MasterRows
from longstraw.optim.optimizer import Logra, RankGroups, open_sketch_buffers
from longstraw.optim.projection import Projection
from longstraw.optim.sketch import WeightSketch
from longstraw.optim.updated_weight import AdamRates, Placement, UpdatedWeight
from longstraw.patches.projections import ProjectionMatrix, find_projections
from longstraw.patches.updated_model import UpdatedModel
from megatron.grpo.arguments import resolve_preset
from megatron.grpo.optimizer import build_optimizer, fit_loaded_state
from megatron.grpo.sharding import is_expert, shard_parameter, unshard_parameter, whole_name


def choose_trained(args: Namespace, config: LograConfig, model: torch.nn.Module) -> None:
    """Set `requires_grad` of every weight as DDP has to see it: it keeps a gradient buffer for what asks for one."""
    matrices = {id(matrix.weight) for matrix in find_projections(model)}
    for parameter in model.parameters():
        if id(parameter) in matrices:
            parameter.requires_grad_(config.update_direction == "dense")
        elif not config.logra_train_rest:
            parameter.requires_grad_(False)


class LograOptimizer:
    """LoGRA of the projection matrices and, where asked, Adam of the rest.

    mismatch: moving average of the KL between rollout and trainer; None before the first measurement.
    """

    def __init__(
        self, logra: Logra, updated_model: UpdatedModel, rest: MegatronOptimizer | None, rates: dict, preset, groups
    ):
        self.logra, self.updated_model, self.rest, self.preset, self.groups = logra, updated_model, rest, preset, groups
        self.mismatch: float | None = None
        self.rates = rates | {"lr": 0.0, "wd_mult": 1.0, "lr_mult": 1.0}

    @property
    def param_groups(self) -> list[dict]:
        """What the schedules set the rate of: the matrices first, then Adam's groups."""
        return [self.rates, *([] if self.rest is None else self.rest.param_groups)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what Adam's step left; the sketches start anew with `Logra.restart`."""
        self.logra.forget()
        if self.rest is not None:
            self.rest.zero_grad(set_to_none=set_to_none)

    def reload_model_params(self) -> None:
        """The weights were loaded: masters start from them."""
        for _, weight in self.updated_model.pairs:
            if weight.masters is not None:
                weight.masters.reset(weight.weight.data)
        if self.rest is not None:
            self.rest.reload_model_params()

    def sharded_state_dict(self, weights: dict, *, is_loading: bool = False, metadata: dict | None = None) -> dict:
        """What a checkpoint keeps, under `weights`' layout (the model's sharded weights). Collective."""
        state: dict[str, Any] = {
            "logra": {"steps_taken": self.logra.steps_taken, "mismatch": self.mismatch},
            "logra_rows": {}, "logra_matrices": {},
        }
        for matrix, weight in self.updated_model.pairs:
            if weight.moment is not None:
                state["logra_rows"][weight.name] = self._whole_rows(matrix, weight)
            layout = weights[matrix.name]
            held = dict(zip(("exp_avg", "exp_avg_sq"), weight.moments or ()))
            if weight.masters is not None:
                held["master"] = weight.masters.whole(weight.weight.data)
            for kind, tensor in held.items():
                key = f"{weight.name}.{kind}"
                state["logra_matrices"][key] = make_sharded_optimizer_tensor(layout, tensor, f"optimizer.logra.{kind}")
        if self.rest is not None:
            state["rest"] = self.rest.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
        return state

    def _whole_rows(self, matrix: ProjectionMatrix, weight: UpdatedWeight) -> ShardedTensor:
        """The row moments of the whole weight, in the order of its rows at TP 1."""
        moment, tp = weight.moment[:, None], self.groups.tp
        if matrix.split == "rows" and tp.size() > 1 and not matrix.expert:
            shards = [torch.empty_like(moment) for _ in range(tp.size())]
            dist.all_gather(shards, moment.contiguous(), group=tp)
            moment = unshard_parameter(matrix.name, shards, self.preset)
        copy = self.groups.expt_dp.rank() if matrix.expert else dist.get_rank()
        return ShardedTensor.from_rank_offsets(f"optimizer.logra.rows.{weight.name}", moment[:, 0].clone(), replica_id=copy)

    def load_state_dict(self, state: dict) -> None:
        """Take what `dist_checkpointing.load` filled into `sharded_state_dict`. Collective."""
        self.logra.steps_taken, self.mismatch = state["logra"]["steps_taken"], state["logra"]["mismatch"]
        for matrix, weight in self.updated_model.pairs:
            if weight.moment is not None:
                whole = state["logra_rows"][weight.name][:, None]
                if matrix.split == "rows" and not matrix.expert:
                    tp = self.groups.tp
                    whole = shard_parameter(matrix.name, whole, self.preset, tp.rank(), tp.size())
                weight.moment.copy_(whole[:, 0])
            for kind, tensor in zip(("exp_avg", "exp_avg_sq"), weight.moments or ()):
                tensor.copy_(state["logra_matrices"][f"{weight.name}.{kind}"])
            if weight.masters is not None:
                weight.masters.load(weight.weight.data, state["logra_matrices"][f"{weight.name}.master"])
        if self.rest is not None:
            self.rest.load_state_dict(state["rest"])

    def fit_loaded_state(self, loaded: dict, *, keep_rates: bool) -> dict:
        """As `megatron.grpo.optimizer.fit_loaded_state`, for the part that is Adam's."""
        if self.rest is not None:
            loaded["rest"] = fit_loaded_state(self.rest, loaded["rest"], keep_rates=keep_rates)
        return loaded


def build_logra(args: Namespace, config: LograConfig, ddp, groups: ProcessGroupCollection) -> LograOptimizer:
    """LoGRA over the matrices of a DDP-wrapped model, attached to its linears.

    Raises ValueError where a matrix cannot be sketched at --logra-rank, naming it.
    """
    model, preset = ddp.module, resolve_preset(args)
    matrices = find_projections(model)
    sketched = config.update_direction == "sketch"
    rest = _build_rest(args, config, ddp, groups, matrices)
    weights = [_open_weight(args, config, matrix, model.config, groups) for matrix in matrices]
    buffers: dict[str, torch.Tensor] = {}
    if sketched:
        projections = [_projection(config, weight) for weight in weights]  # refuses a rank before anything is allocated
        shapes = [(_kind(m), m.weight.shape[0], config.logra_rank) for m in matrices]
        wide = torch.promote_types(matrices[0].weight.dtype, torch.float32)
        buffers, views = open_sketch_buffers(shapes, wide, matrices[0].weight.device)
        for weight, projection, view in zip(weights, projections, views):
            weight.sketch = WeightSketch(
                projection=projection, sketch=view, columns=weight.weight.shape[1],
                column_start=weight.placement.column_start,
            )
        _watch_cosine(config, weights, groups)
    ranks = RankGroups(
        copies=groups.dp_cp, expert_copies=groups.expt_dp, tp=groups.tp, experts=groups.tp_ep, world=dist.group.WORLD
    )
    logra = Logra(config, list(zip(weights, (m.expert for m in matrices))), buffers, ranks)
    updated = UpdatedModel(model, list(zip(matrices, weights)))
    updated.attach()
    return LograOptimizer(logra, updated, rest, {"max_lr": args.lr, "min_lr": args.min_lr}, preset, groups)


def _watch_cosine(config: LograConfig, weights: list[UpdatedWeight], groups) -> None:
    """Raises ValueError, naming some matrices, where none has the name of --logra-cosine-of."""
    if config.logra_cosine_of is None:
        return
    if is_expert(config.logra_cosine_of) and groups.ep.size() > 1:
        raise ValueError(
            f"--logra-cosine-of {config.logra_cosine_of} is an expert's, which under --expert-model-parallel-size "
            f"{groups.ep.size()} only some ranks hold"
        )
    found = [weight for weight in weights if weight.name == config.logra_cosine_of]
    if not found:
        names = ", ".join(weight.name for weight in weights[:3])
        raise ValueError(f"--logra-cosine-of {config.logra_cosine_of} is no sketched matrix; there are {names} and others")
    found[0].sketch.keep_dense()


def _kind(matrix: ProjectionMatrix) -> str:
    """Whose sketches it is summed with."""
    return "expert" if matrix.expert else matrix.split


def _open_weight(args, config: LograConfig, matrix: ProjectionMatrix, model_config, groups) -> UpdatedWeight:
    tp = groups.expt_tp if matrix.expert else groups.tp
    ways, rank = (tp.size(), tp.rank()) if matrix.split == "columns" else (1, 0)
    columns = matrix.weight.shape[1]
    masters = None
    if matrix.weight.dtype == torch.bfloat16:
        masters = MasterRows(
            matrix.weight.data, kind=config.logra_masters, residency=config.logra_master_residency,
            group=groups.expt_dp if matrix.expert else groups.dp_cp,
        )
    return UpdatedWeight(
        name=whole_name(matrix.name, model_config.num_moe_experts, groups.ep.rank(), groups.ep.size()),
        weight=matrix.weight, rule=config.update_rule, beta2=config.logra_beta2, masters=masters,
        placement=Placement(columns=columns * ways, column_start=columns * rank, split=matrix.split, tp=tp),
        adam=AdamRates(beta1=args.adam_beta1, beta2=args.adam_beta2, eps=args.adam_eps),
    )


def _projection(config: LograConfig, weight: UpdatedWeight) -> Projection:
    return Projection(
        name=weight.name, rank=config.logra_rank, columns=weight.placement.columns, seed=config.logra_seed, draw=0,
        kind=config.logra_projection,
    )


def _build_rest(args, config, ddp, groups, matrices: list[ProjectionMatrix]) -> MegatronOptimizer | None:
    """Adam of everything that takes a gradient besides the matrices; None where nothing does."""
    if not config.logra_train_rest:
        return None
    asked = [matrix.weight.requires_grad for matrix in matrices]
    try:  # Megatron's optimizer takes every weight that asks for a gradient
        for matrix in matrices:
            matrix.weight.requires_grad_(False)
        return build_optimizer(args, ddp, groups)
    finally:
        for matrix, before in zip(matrices, asked):
            matrix.weight.requires_grad_(before)
