"""LoGRA over the stateful model of a pair, in this process alone, without the training program's flags."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from longstraw.objectives.config import ObjectiveConfig
from longstraw.optim.config import LograConfig
from longstraw.optim.optimizer import Logra, RankGroups, open_sketch_buffers
from longstraw.optim.projection import Projection
from longstraw.optim.sketch import WeightSketch
from longstraw.optim.updated_weight import Placement, UpdatedWeight
from longstraw.patches.projections import find_projections, restore_product
from longstraw.patches.updated_model import UpdatedModel
from longstraw.rollout.protocol import Sample
from longstraw.transaction.group import PromptGroup
from longstraw.transaction.kl_probe import KlProbe
from longstraw.transaction.step import Step
from tests.support.models import Group, ModelPair


@dataclass(frozen=True)
class SketchedPair:
    """A pair whose stateful model is under LoGRA while `sketched` is open."""

    pair: ModelPair
    config: LograConfig
    logra: Logra
    model: UpdatedModel

    def probe(self, together: int = 1, **config) -> KlProbe:
        """A probe of the direction that was prepared; together: responses in one pass."""
        step = Step(
            self.pair.engine(**config), ObjectiveConfig(group_size=2), dp=dist.group.WORLD, responses_together=together
        )
        return KlProbe(step, self.config, self.model.moved, dist.group.WORLD)


@contextmanager
def sketched(pair: ModelPair, config: LograConfig):
    """The pair with sketches in its stateful model; afterwards the model is as before, weights included."""
    matrices = find_projections(pair.model)
    before = {n: (p.detach().clone(), p.requires_grad) for n, p in pair.model.named_parameters()}
    dtype = torch.promote_types(matrices[0].weight.dtype, torch.float32)
    shapes = [("expert" if m.expert else m.split, m.weight.shape[0], config.logra_rank) for m in matrices]
    buffers, views = open_sketch_buffers(shapes, dtype, torch.device("cpu"))
    weights = []
    for matrix, view in zip(matrices, views):
        columns = matrix.weight.shape[1]
        weight = UpdatedWeight(
            name=matrix.name, weight=matrix.weight, rule=config.update_rule, placement=Placement(columns=columns)
        )
        projection = Projection(
            name=matrix.name, rank=config.logra_rank, columns=columns, seed=config.logra_seed, draw=0,
            kind=config.logra_projection,
        )
        weight.sketch = WeightSketch(projection=projection, sketch=view, columns=columns)
        weights.append(weight)
    for parameter in pair.model.parameters():
        parameter.requires_grad_(False)
    model = UpdatedModel(pair.model, list(zip(matrices, weights)))
    hooks = model.attach()
    try:
        logra = Logra(config, [(w, m.expert) for w, m in zip(weights, matrices)], buffers, RankGroups())
        yield SketchedPair(pair, config, logra, model)
    finally:
        for hook in hooks:
            hook.remove()
        for matrix in matrices:
            restore_product(matrix)
        with torch.no_grad():
            for name, parameter in pair.model.named_parameters():
                parameter.copy_(before[name][0])
                parameter.requires_grad_(before[name][1])
                parameter.grad = None


def prompt_group(group: Group) -> PromptGroup:
    """A group of tokens as a step has it."""
    samples = [
        Sample(
            prompt_id="p", token_ids=tuple(r.tolist()), logprobs=(0.0,) * len(r), finish_reason="stop", weight_version=0
        )
        for r in group.responses
    ]
    return PromptGroup("p", group.prompt, samples)
