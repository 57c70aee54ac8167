"""Experts under replay: choices recorded and repeated with live gates, padding left behind, nothing beyond the sweep."""

import pytest
import torch

from longstraw.adapters.expert_routing import ReplayMoELayer, RoutingRun, _refuse_other_rules
from longstraw.adapters.registry import find_routers
from longstraw.attention.layout import BlockLayout
from megatron.grpo.model_provider import build_conventional_model
from megatron.grpo.presets import get_preset
from tests.support.dense import compare_gradients
from tests.support.models import Document, dense_of, draw_group, get_pair, one_rank, replay_gradients

GROUP = draw_group(29, (7, 12), 128)


def route(router, logits, run):
    router.run = run
    try:
        return router.routing(logits)
    finally:
        router.run = None


def first_router(name="tiny-qwen3-moe"):
    return find_routers(get_pair(name).model)[0].module


def test_gates_of_replayed_experts_are_live():
    """Logits [3, 2, 1, 0] and the recorded experts {2, 3}: gates 0.731 and 0.269, and a gradient for the logits."""
    logits = torch.tensor([[[3.0, 2.0, 1.0, 0.0, -9.0, -9.0, -9.0, -9.0]]], dtype=torch.float64, requires_grad=True)
    run = RoutingRun(BlockLayout(0, 1), False, recorded=torch.tensor([[2, 3]]))
    gates, chosen = route(first_router(), logits, run)
    assert chosen[0].nonzero().flatten().tolist() == [2, 3]
    torch.testing.assert_close(gates[0, 2:4], torch.tensor([0.731, 0.269], dtype=torch.float64), rtol=0, atol=1e-3)
    gates[0, 2].backward()
    assert logits.grad[0, 0, 2] > 0.1 and logits.grad[0, 0, 3] < -0.1 and not logits.grad[0, 0, :2].any()


def test_without_a_record_the_choice_is_the_routers_own():
    logits = torch.tensor([[[3.0, 2.0, 1.0, 0.0, -9.0, -9.0, -9.0, 4.0]]], dtype=torch.float64)
    run = RoutingRun(BlockLayout(0, 1), False, recorded=None)
    _, chosen = route(first_router(), logits, run)
    assert chosen[0].nonzero().flatten().tolist() == [0, 7] == run.used[0].tolist()


def test_a_second_model_in_the_process_is_untouched():
    """While a router repeats a record, others, of this class and of Megatron's, go on choosing by themselves."""
    pair = get_pair("tiny-qwen3-moe")
    mine, other = (adapter.module for adapter in find_routers(pair.model)[:2])
    megatrons = next(m for m in pair.plain.modules() if type(m).__name__ == "TopKRouter")
    logits = torch.randn(3, 1, 8, dtype=torch.float64)
    alone = [megatrons.routing(logits)[1], route(other, logits, RoutingRun(BlockLayout(0, 3), False, None))[1]]
    mine.run = RoutingRun(BlockLayout(0, 3), False, recorded=torch.tensor([[6, 7]] * 3))
    try:
        mine.routing(logits)
        again = [megatrons.routing(logits)[1], route(other, logits, RoutingRun(BlockLayout(0, 3), False, None))[1]]
    finally:
        mine.run = None
    assert all(torch.equal(a, b) for a, b in zip(alone, again))
    assert mine.router_replay is other.router_replay is megatrons.router_replay is None


def test_padding_goes_to_no_expert():
    """3 tokens on 2 ranks: the second rank has one token and a row of padding, in a batch of 2."""
    layout = BlockLayout(0, 3, ranks=2, rank=1)
    assert (layout.rows, layout.mine) == (2, 1)
    run = RoutingRun(layout, False, None)
    _, chosen = route(first_router(), torch.randn(2, 2, 8, dtype=torch.float64), run)
    assert chosen.sum(1).tolist() == [2, 2, 0, 0] and run.used.shape == (2, 2)


@pytest.mark.parametrize("name, chunk, block", [
    ("tiny-qwen3-moe", 7, 1), ("tiny-glm5.2", 16, 5), ("tiny-deepseek-v3.2", 16, 5),
])
def test_gradient_equals_the_dense_pass(name, chunk, block):
    pair = get_pair(name)
    loss, found = replay_gradients(pair.engine(prompt_chunk_size=chunk, response_block_size=block), GROUP.tree())
    expected_loss, expected = dense_of(pair, GROUP)
    total, single = compare_gradients(found, expected)
    assert total <= 1e-12 and max(single.values()) <= 1e-11 and loss == pytest.approx(expected_loss, rel=1e-12)


class Shaking:
    """Moves the biases of all experts before each replayed block, so that a router left alone would choose otherwise."""

    def __init__(self, engine, monkeypatch, *, recorded: bool):
        self.moved = 0
        original, generator = engine._pass_block, torch.Generator().manual_seed(5)
        routers = find_routers(engine.model)

        def shaken(segment, state, block, *, replay, live):
            if not replay:
                return original(segment, state, block, replay=replay, live=live)
            before = [adapter.module.expert_bias.clone() for adapter in routers]
            for adapter in routers:
                adapter.module.expert_bias += torch.randn(16, generator=generator)
                if not recorded:
                    state.layers[adapter.key].drop(block)
            try:
                return original(segment, state, block, replay=replay, live=live)
            finally:
                self.moved += 1
                for adapter, bias in zip(routers, before):
                    adapter.module.expert_bias.copy_(bias)

        monkeypatch.setattr(engine, "_pass_block", shaken)


@pytest.mark.parametrize("recorded, exact", [(True, True), (False, False)])
def test_the_record_decides_and_not_the_bias_of_the_moment(monkeypatch, recorded, exact):
    """Biases moved between the sweeps change nothing; without the record (the control) they do."""
    pair = get_pair("tiny-glm5.2")
    engine, plain = pair.engine(), pair.engine()
    shaking = Shaking(engine, monkeypatch, recorded=recorded)
    found, expected = gradients_of_a_document(engine), gradients_of_a_document(plain)
    assert shaking.moved and (compare_gradients(found, expected)[0] < 1e-12) is exact


def gradients_of_a_document(engine):
    """Of a document whose last block, which runs once and so has no record, has no weight in the loss."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(32, generator=generator, dtype=torch.float64)
    weights[24:] = 0.0
    document = Document(torch.randint(128, (1, 33), generator=generator), weights)
    return replay_gradients(engine, document.tree())[1]


@pytest.mark.parametrize("residency", ["device", "host"])
def test_the_ledger_knows_the_record_and_the_block_that_is_done_drops_it(residency):
    pair = get_pair("tiny-glm5.2")
    engine = pair.engine(prompt_chunk_size=8, page_residency=residency)
    tree = GROUP.tree()
    state, _ = engine.forward_sweep(tree, None)
    entries = [e for e in engine.ledger.entries() if e.kind == "routing"]
    # 28 tokens x 4 experts x 1 byte; the last layer stops once its state is captured, and the first is dense
    assert [(e.layer_number, e.rows, e.bytes, e.residency) for e in entries] == [
        (layer, 28, 28 * 4, residency) for layer in range(2, 8)
    ]
    engine.prepare_adjoints(state)
    engine.reverse_sweep(tree, state)
    engine.model.zero_grad()
    assert not [e for e in engine.ledger.entries() if e.kind == "routing"]


def test_biases_and_counts_stay_as_they_are():
    pair = get_pair("tiny-glm5.2")
    modules = [adapter.module for adapter in find_routers(pair.model)]
    before = [module.expert_bias.clone() for module in modules]
    replay_gradients(pair.engine(), GROUP.tree())
    assert all(torch.equal(module.expert_bias, bias) and bias.any() for module, bias in zip(modules, before))
    assert not any(module.local_tokens_per_expert.any() for module in modules)


def test_nothing_of_a_block_is_left_in_the_layers():
    """Routers are unbound, and dispatchers hold no gates: through their graph a block's pages would stay alive."""
    pair = get_pair("tiny-qwen3-moe")
    replay_gradients(pair.engine(), GROUP.tree())
    layers = [m for m in pair.model.modules() if isinstance(m, ReplayMoELayer)]
    assert len(layers) == 4
    for layer in layers:
        assert layer.router.run is layer.router.router_replay is None
        held = [v for v in vars(layer.token_dispatcher).values() if isinstance(v, torch.Tensor)]
        assert not any(tensor.requires_grad for tensor in held)


def test_experts_of_a_conventional_model_are_refused():
    preset, groups = get_preset("tiny-qwen3-moe"), one_rank()
    config = preset.transformer_config(use_cpu_initialization=True)
    model = build_conventional_model(preset, config, groups, flash=False)
    with pytest.raises(ValueError, match=r"experts of layers \[1, 2, 3, 4\] have no router that records its choices"):
        find_routers(model)


@pytest.mark.parametrize("change, sentence", [
    (dict(moe_router_load_balancing_type="sinkhorn"), "--moe-router-load-balancing-type sinkhorn is not supported"),
    (dict(moe_router_load_balancing_type="aux_loss"), "--moe-router-load-balancing-type aux_loss is not supported"),
    (dict(moe_router_fusion=True), "--moe-router-fusion True is not supported"),
    (dict(moe_expert_capacity_factor=1.0), "--moe-expert-capacity-factor 1.0 is not supported"),
    (dict(moe_z_loss_coeff=0.1), "--moe-z-loss-coeff 0.1 is not supported"),
    (dict(moe_permute_fusion=True), "--moe-permute-fusion True is not supported"),
    (dict(moe_token_dispatcher_type="allgather"), "--moe-token-dispatcher-type allgather is not supported"),
    (dict(moe_shared_expert_overlap=True), "--moe-shared-expert-overlap True is not supported"),
    (dict(recompute_granularity="selective", recompute_modules=["moe"]), "--recompute-modules other than mlp"),
])
def test_what_would_choose_anew_or_drop_tokens_is_refused(change, sentence):
    config = get_preset("tiny-qwen3-moe").transformer_config()
    _refuse_other_rules(config)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=sentence):
        _refuse_other_rules(config)
