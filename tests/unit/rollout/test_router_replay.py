"""Router replay: routes recorded while decoding are repeated in the replay, forward and reverse, with live gates."""

import dataclasses
import re

import pytest
import torch

from longstraw.objectives.config import ObjectiveConfig
from longstraw.patches.float64 import lift_float64
from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.resident import decode_group
from longstraw.rollout.routes import RoutedExperts, RouteShape, check_routes
from longstraw.segments import prompt_segment
from longstraw.transaction.group import PromptGroup
from longstraw.transaction.step import Step
from tests.support.dense import compare_gradients, take_gradients
from tests.support.models import draw_group, get_pair, one_rank

NAME = "tiny-qwen3-moe"


@pytest.fixture
def sampled():
    """A group decoded by the resident engine, with its routes."""
    pair = get_pair(NAME)
    engine, prompt = pair.engine(prompt_chunk_size=5, response_block_size=3), draw_group(3, (4,), pair.vocab_size).prompt
    with lift_float64():
        state = engine.forward_sweep(prompt_segment(prompt), None)[0]
        samples = decode_group(
            engine, prompt, state, group_size=3, config=SamplingConfig(max_response_length=5),
            stop_ids=frozenset(range(0, pair.vocab_size, 3)), generator=torch.Generator().manual_seed(1),
            record_routes=True,
        )
    group = PromptGroup("p", prompt, samples, kept=[True] * 3, rewards=[0.0] * 3, advantages=[0.8, -1.1, 0.3])
    return pair, engine, group


def shape_of(engine) -> RouteShape:
    one = engine.routers[0].module
    return RouteShape(layers=tuple(r.layer_number for r in engine.routers), num_experts=one.num_experts, topk=one.topk)


def replay(pair, engine, group, *, routed, together=1):
    step = Step(engine, ObjectiveConfig(), dp=one_rank().dp, responses_together=together, replays_routes=routed)
    pair.model.zero_grad()
    with lift_float64():
        result = step.replay([group], step.count_terms([group]))
    scores, group.old_logprobs, group.mismatch = group.old_logprobs, None, None
    return result.loss, take_gradients(pair.model), scores


def test_a_record_survives_plain_values():
    experts = torch.tensor([[[3, 1], [0, 300]], [[2, 5], [7, 6]]])
    routes = RoutedExperts.from_tensor(experts, [2, 4])
    assert routes.to_tensor().tolist() == [[[1, 3], [0, 300]], [[2, 5], [6, 7]]]
    assert routes == RoutedExperts(layers=(2, 4), topk=2, data=routes.data) and len(routes.data) == 16


def test_every_row_of_a_response_has_its_experts(sampled):
    _, engine, group = sampled
    assert len({len(sample.token_ids) for sample in group.samples}) > 1, "responses of one length test less"
    for sample in group.samples:
        assert check_routes(sample, shape_of(engine)) == ""
        assert sample.routes.to_tensor().shape[0] == len(sample.token_ids)


def test_repeating_the_routers_own_choice_changes_no_bit(sampled):
    pair, engine, group = sampled
    (loss, grads, scores), (own_loss, own_grads, own_scores) = (
        replay(pair, engine, group, routed=routed) for routed in (True, False)
    )
    assert loss == own_loss and all(torch.equal(a, b) for a, b in zip(scores, own_scores))
    assert all(torch.equal(grads[name], own_grads[name]) for name in grads)


@pytest.mark.parametrize("together", [1, 3])
def test_other_experts_are_what_the_record_says(sampled, together, monkeypatch):
    """A sampler that went to other experts is followed; so is its gradient, checked against a router that is forced."""
    pair, engine, group = sampled
    own_scores = replay(pair, engine, group, routed=False)[2]
    shape = shape_of(engine)
    moved = []
    for sample in group.samples:
        experts = (sample.routes.to_tensor() + 1) % shape.num_experts
        moved.append(dataclasses.replace(sample, routes=RoutedExperts.from_tensor(experts, shape.layers)))
    group.samples = moved
    loss, grads, scores = replay(pair, engine, group, routed=True, together=together)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(scores, own_scores))

    # the same by hand: the rows' experts are put into the record of each forward pass as the router makes it
    group.samples = [dataclasses.replace(sample, routes=None) for sample in moved]
    pending = [sample.routes.to_tensor() for sample in moved]
    for router in engine.routers:
        original, place = router.restore, shape.layers.index(router.layer_number)

        def restore(segment, block, policy, *, replay, stop_here, live, original=original, place=place):
            run = original(segment, block, policy, replay=replay, stop_here=stop_here, live=live)
            if segment.name.startswith("response") and run.recorded is None:
                at = segment.plan[block].start - segment.start
                run.recorded = pending[int(segment.name[8:])][at : at + segment.plan[block].length, place]
            return run

        monkeypatch.setattr(router, "restore", restore)
    by_hand = replay(pair, engine, group, routed=False)
    assert by_hand[0] == pytest.approx(loss, rel=1e-12)
    assert compare_gradients(grads, by_hand[1])[0] <= 1e-12
    assert any(name.endswith("router.weight") and grads[name].abs().max() > 0 for name in grads)


def test_the_reference_chooses_for_itself(sampled):
    """Scores without `routed` are the model's own, also of samples that carry routes."""
    pair, engine, group = sampled
    experts = (group.samples[0].routes.to_tensor() + 1) % shape_of(engine).num_experts
    routes = RoutedExperts.from_tensor(experts, shape_of(engine).layers)
    step = Step(engine, ObjectiveConfig(), dp=one_rank().dp, replays_routes=True)
    with lift_float64():
        group.state = step.capture(group.prompt)
        plain = step.score(group)
        group.samples[0] = dataclasses.replace(group.samples[0], routes=routes)
        assert torch.equal(step.score(group)[0], plain[0]) and not torch.equal(step.score(group, routed=True)[0], plain[0])


@pytest.mark.parametrize("spoil, clause", [
    (lambda s: dataclasses.replace(s, routes=None), "comes without the experts"),
    (lambda s: dataclasses.replace(s, routes=dataclasses.replace(s.routes, layers=(1, 3))), r"of layers \[1, 3\], and the"),
    (lambda s: dataclasses.replace(s, routes=dataclasses.replace(s.routes, topk=4)), "through 4 experts"),
    (lambda s: dataclasses.replace(s, token_ids=(*s.token_ids, 1)), "tokens and routes of"),
    (lambda s: dataclasses.replace(s, routes=dataclasses.replace(s.routes, data=s.routes.data[:-1])), "tokens and routes of"),
    (lambda s: with_experts(s, 9), "was sent to expert 9, and the model has 8"),
    (lambda s: with_experts(s, 2), "was sent to one expert twice"),
])  # fmt: skip
def test_routes_that_are_not_the_models_are_named(sampled, spoil, clause):
    _, engine, group = sampled
    assert re.search(clause, check_routes(spoil(group.samples[0]), shape_of(engine)))


def with_experts(sample, number: int):
    """The sample with all rows sent to expert `number`, K times."""
    experts = torch.full_like(sample.routes.to_tensor(), number)
    return dataclasses.replace(sample, routes=RoutedExperts.from_tensor(experts, sample.routes.layers))
