"""Latent attention with sparse selection: the engine's gradient equals dense autograd of Megatron's own DSAttention.

One process; float64 to 1e-12 over all parameters together. A dense model of four layers (two compute a selection, two use
it); with experts: test_expert_routing.py.
"""

import gc
import itertools
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.adapters import latent_attention
from longstraw.adapters.base import LayerRun, bind
from longstraw.adapters.latent_attention import LatentAttentionAdapter, SharedSelection
from longstraw.attention.layout import BlockLayout
from longstraw.attention.selection import Selection
from longstraw.prompt_state.latents import LatentView
from longstraw.sweep_config import SweepConfig
from longstraw.sweeps import ReplayEngine
from megatron.grpo.model_provider import build_conventional_model, build_model
from tests.support.dense import compare_gradients, constant_prompt, dense_gradients, take_gradients
from tests.support.latent_models import small_latent, small_preset
from tests.support.models import (
    build_pair, dense_of, draw_document, draw_group, get_pair, lift_float64, one_rank, replay_gradients, replay_in_one_go,
)

PLACES = ("device", "host")


def check(pair, group, *, together=1, bar=1e-12, **config):
    loss, found = replay_gradients(pair.engine(**config), group.tree(together=together))
    expected_loss, expected = dense_of(pair, group)
    total, single = compare_gradients(found, expected)
    worst = max(single, key=single.get)
    assert total <= bar and single[worst] <= 10 * bar, (total, worst, single[worst])
    assert abs(loss - expected_loss) <= bar * max(1.0, abs(expected_loss))
    return found


@pytest.mark.parametrize("prompt, chunk, block", [
    (1, 200, 3), (2, 1, 1), (5, 2, 8), (6, 7, 8), (43, 16, 3), (157, 43, 64),
])
def test_any_sizes(prompt, chunk, block):
    """Prompts shorter and longer than the 5 selected keys, blocks on both sides of that."""
    pair = small_latent()
    check(pair, draw_group(prompt, (5, 8, 1), pair.vocab_size), prompt_chunk_size=chunk, response_block_size=block)


@pytest.mark.parametrize("change", [
    dict(dsa_indexer_topk=1000), dict(dsa_indexer_topk=1), dict(num_layers=3), dict(dsa_indexer_topk_freq=1),
    dict(dsa_indexer_rope_interleaved=False), dict(num_layers=5, dsa_indexer_topk_freq=4, dsa_indexer_skip_topk_offset=3),
], ids=str)
def test_other_selections(change):
    """All keys, one key, a last layer that computes, no sharing, the other rotary layout, GLM's own sharing."""
    pair = small_latent(**change)
    check(pair, draw_group(30, (6, 1), pair.vocab_size), prompt_chunk_size=8)


@settings(max_examples=6, deadline=None)
@given(
    prompt=st.integers(1, 40), responses=st.lists(st.integers(1, 9), min_size=1, max_size=3), chunk=st.integers(1, 50),
    block=st.integers(1, 10), rows=st.integers(1, 50), kept=st.sampled_from(["none", *PLACES]),
    selections=st.sampled_from(["none", *PLACES]), pages=st.sampled_from(PLACES), index=st.sampled_from(PLACES),
    adjoints=st.sampled_from(PLACES),
)
def test_random_sizes(prompt, responses, chunk, block, rows, kept, selections, pages, index, adjoints):
    pair = small_latent()
    check(
        pair, draw_group(prompt, tuple(responses), pair.vocab_size), prompt_chunk_size=chunk, response_block_size=block,
        query_rows_at_once=rows, attention_output_residency=kept, selection_residency=selections, page_residency=pages,
        index_page_residency=index, adjoint_residency=adjoints,
    )


def test_responses_replayed_together():
    """Each member of the batch selects for itself, in shared pages of the prompt and in its own."""
    pair = small_latent()
    check(pair, draw_group(20, (9, 9, 9, 9), pair.vocab_size), together=4, response_block_size=4)


def test_a_document_of_its_own():
    pair = small_latent()
    document = draw_document(41, pair.vocab_size)
    _, found = replay_gradients(pair.engine(response_block_size=8, selection_residency="host"), document.tree())
    with lift_float64():
        _, expected = dense_gradients(pair.plain, document.sequences())
    assert compare_gradients(found, expected)[0] <= 1e-12


def test_scored_and_replayed_in_one_go():
    pair = small_latent()
    group = draw_group(30, (9, 1), pair.vocab_size)
    engine = pair.engine(selection_residency="device", response_block_size=4)
    with lift_float64():
        replay_in_one_go(engine, group.tree())
    assert compare_gradients(take_gradients(engine.model), dense_of(pair, group)[1])[0] <= 1e-12


def test_float32():
    pair = build_pair(small_preset(), torch.float32, one_rank())
    check(pair, draw_group(43, (9, 1), pair.vocab_size, seed=1), bar=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_engine_is_as_precise_as_conventional_training(dtype):
    """Error against float64 at most twice that of Megatron's DSAttention in the same dtype; all keys selected, since in
    low precision another selection would be another function."""
    pair = build_pair(small_preset(dsa_indexer_topk=1000), dtype, one_rank())
    group = draw_group(61, (9, 4), pair.vocab_size)
    _, found = replay_gradients(pair.engine(), group.tree())
    conventional = build_conventional_model(
        pair.preset, pair.preset.transformer_config(use_cpu_initialization=True), one_rank(), flash=True
    ).to(dtype)
    conventional.load_state_dict(pair.plain.state_dict())
    _, plain = dense_gradients(conventional, group.sequences())
    oracle = dense_of(pair, group)[1]
    assert compare_gradients(found, oracle)[0] <= 2 * compare_gradients(plain, oracle)[0]


def test_every_residency_gives_the_same_bits():
    """But for adjoints on the host, which a block adds to in one sum instead of row by row: the same to rounding."""
    pair = small_latent()
    group, results = draw_group(14, (7, 1), pair.vocab_size), []
    for kept, selections, place in itertools.product(("none", "host"), ("none", *PLACES), PLACES):
        engine = pair.engine(
            prompt_chunk_size=8, page_residency=place, index_page_residency=place, attention_output_residency=kept,
            selection_residency=selections,
        )
        results.append(replay_gradients(engine, group.tree()))
    for loss, grads in results:
        assert loss == results[0][0] and all(torch.equal(grads[name], results[0][1][name]) for name in grads)
    _, grads = replay_gradients(pair.engine(prompt_chunk_size=8, adjoint_residency="host"), group.tree())
    assert compare_gradients(grads, results[0][1])[0] < 1e-15


@pytest.mark.parametrize("preset, prompt", [(None, 1), (None, 30), ("tiny-glm5.2", 30)])
def test_response_only(preset, prompt):
    pair = small_latent() if preset is None else get_pair(preset)
    group = draw_group(prompt, (6, 6), pair.vocab_size)
    _, found = replay_gradients(pair.engine(semantics="response_only", response_block_size=4), group.tree(together=2))
    with lift_float64(), constant_prompt(pair.plain, prompt - 1):
        _, expected = dense_gradients(pair.plain, group.sequences(), vocab_size=pair.vocab_size)
    assert compare_gradients(found, expected)[0] <= 1e-12


def entries_during_replay(pair, group, **config):
    """The ledger's entries whenever a response's loss is taken."""
    engine, tree, seen = pair.engine(prompt_chunk_size=8, response_block_size=4, **config), group.tree(), []
    for child in tree.children:
        child.loss = lambda logprobs, columns, loss=child.loss: seen.append(engine.ledger.entries()) or loss(logprobs, columns)
    replay_gradients(engine, tree)
    assert engine.ledger.entries() == [], "state outlives the sweep"
    return seen


def test_the_ledger_says_what_is_where():
    """Each class of pages has a residency of its own; only layers 1 and 3 have index pages and selections."""
    pair = small_latent()
    places = dict(page_residency="host", index_page_residency="device", adjoint_residency="host", selection_residency="host")
    for entries in entries_during_replay(pair, draw_group(30, (7,), pair.vocab_size), **places):
        prompt = [e for e in entries if e.segment == "prompt" and e.kind != "staged"]
        assert {e.kind: e.residency for e in prompt} == {
            "latent_pages": "host", "latent_adjoint": "host", "index_pages": "device", "selection": "host",
        }
        layers = {kind: {e.layer_number for e in prompt if e.kind == kind} for kind in ("latent_pages", "index_pages")}
        assert layers == {"latent_pages": {1, 2, 3, 4}, "index_pages": {1, 3}}
        assert {e.layer_number for e in prompt if e.kind == "selection"} == {1, 3}
        assert all(e.bytes == 29 * 20 * 8 for e in prompt if e.kind in ("latent_pages", "latent_adjoint"))
        assert all(e.bytes == 29 * 8 * 8 for e in prompt if e.kind == "index_pages")
        # chunks of 8 tokens end at 8, 16, 24 and 29, all after the first 5: at most 5 keys a query, 4 bytes each
        assert all(e.rows == 29 and e.bytes <= 29 * 2 * 5 * 4 for e in prompt if e.kind == "selection")
        assert len({e.layer_number for e in entries if e.kind == "staged"}) <= 2


def test_a_constant_prompt_has_no_adjoint():
    pair = small_latent()
    for entries in entries_during_replay(pair, draw_group(30, (7,), pair.vocab_size), semantics="response_only"):
        assert not [e for e in entries if e.segment == "prompt" and e.kind == "latent_adjoint"]


def test_selections_are_made_once_where_they_are_kept(monkeypatch):
    """Two computing layers: a block of the prompt or the response selects once a layer, in the reverse sweep only if it must."""
    pair, calls = small_latent(), []
    original = latent_attention.select
    monkeypatch.setattr(latent_attention, "select", lambda *args: calls.append(args[-1].layout.start) or original(*args))
    group = draw_group(25, (8,), pair.vocab_size)
    counts = {}
    for place in ("none", "host"):
        calls.clear()
        replay_gradients(pair.engine(prompt_chunk_size=8, response_block_size=4, selection_residency=place), group.tree())
        counts[place] = len(calls)
    # a prompt of 3 chunks (the last layer of a prompt does not attend, but it does not compute either) and 2 blocks of
    # the response, the second of which is run once
    assert counts == {"none": 2 * (3 + 3 + 1 + 2), "host": 2 * (3 + 1 + 1)}


def test_nothing_is_left_on_the_config_or_the_modules():
    """IndexShare's holder of Megatron would hang on the config for ever."""
    pair = small_latent()
    engine = pair.engine()
    rotaries = [a.module.indexer.rotary_pos_emb for a in engine.adapters if a.computes]
    replay_gradients(engine, draw_group(20, (6,), pair.vocab_size).tree())
    assert not [name for name in vars(pair.model.config) if name.startswith("_dsa")]
    assert all(adapter.module.run is None for adapter in engine.adapters)
    assert [a.module.indexer.rotary_pos_emb for a in engine.adapters if a.computes] == rotaries


@pytest.mark.parametrize("kept", ["none", "host"])
def test_no_graph_and_no_run_survives_a_sweep(kept):
    """By reference counting alone: a cycle through an autograd node would leak every block."""
    pair = small_latent()
    engine = pair.engine(response_block_size=4, attention_output_residency=kept, selection_residency=kept)
    group = draw_group(20, (6, 1), pair.vocab_size)

    def live():
        found = gc.get_objects()
        return len([o for o in found if issubclass(type(o), (LayerRun, SharedSelection, Selection))]), len(
            [o for o in found if issubclass(type(o), torch.Tensor) and o.grad_fn is not None]
        )

    gc.collect()
    gc.disable()
    try:
        before = live()
        replay_gradients(engine, group.tree())
        assert live() == before and before[0] == 0
    finally:
        gc.enable()


def test_rotary_rows_are_the_blocks_own():
    """A chunk at offset 12 of 16 over two ranks: the second rank's rows are 14 and 15, for attention and indexer."""
    pair = small_latent()
    adapter = pair.engine().adapters[0]
    attention = pair.model.decoder.layers[0].self_attention
    tables = [owner.rotary_pos_emb for owner in (attention, adapter.module.indexer)]
    run = LayerRun()
    run.layout = BlockLayout(12, 4, ranks=2, rank=1)
    with bind([adapter], {adapter.key: run}):
        for owner, table in zip((attention, adapter.module.indexer), tables):
            rows = owner.rotary_pos_emb.get_rotary_seq_len(None, None, torch.empty(2, 1, 1), pair.model.config)
            found = owner.rotary_pos_emb(rows, packed_seq=False)
            assert torch.equal(found, table.get_emb(16)[14:16])
    assert [attention.rotary_pos_emb, adapter.module.indexer.rotary_pos_emb] == tables


def test_the_indexer_is_frozen():
    pair = small_latent()
    indexer = {name: p for name, p in pair.model.named_parameters() if ".indexer." in name}
    assert len(indexer) == 2 * 5 and not any(p.requires_grad for p in indexer.values())


def drop_adjoints(patch):
    nowhere = torch.zeros(1, 100, 20, dtype=torch.float64)
    patch.setattr(LatentView, "adjoint", lambda view: nullcontext(nowhere[:, : view.rows]))


def drop_roots(patch):
    patch.setattr(LatentAttentionAdapter, "replay_roots", lambda self, run, segment, block: [])


def select_first_keys(patch):
    """Each query takes the earliest keys that this rank has, not the best."""

    def first(q, weights, k, geometry):
        rows = torch.arange(5, dtype=torch.int32).expand(len(q), q.shape[2], 5)
        sources = [rows[..., : min(5, pages.rows)] for pages in geometry.history] + [rows[..., :0]]
        return Selection((tuple(sources),)) if geometry.layout.start else original(q, weights, k, geometry)

    original = latent_attention.select
    patch.setattr(latent_attention, "select", first)


def share_nothing(patch):
    """Layers that use a selection attend to all keys instead."""
    original = LatentAttentionAdapter.restore

    def restore(self, *args, **kwargs):
        run = original(self, *args, **kwargs)
        if not self.computes:
            run.shared = None
        return run

    patch.setattr(LatentAttentionAdapter, "restore", restore)


def start_rotary_at_zero(patch):
    patch.setattr(
        latent_attention.BlockRotary, "forward", lambda self, rows, **_: self.inner.get_emb(rows, offset=0)
    )


KV_DOWN = "decoder.layers.{}.self_attention.linear_kv_down_proj.weight"


@pytest.mark.parametrize("break_it, layer", [
    (drop_adjoints, 3), (drop_roots, 3), (select_first_keys, 0), (share_nothing, 1), (start_rotary_at_zero, 0),
], ids=lambda x: getattr(x, "__name__", None))
def test_the_comparison_sees_it(monkeypatch, break_it, layer):
    """Break one step at a time: the parameters of the latents must show it."""
    pair = small_latent()
    group = draw_group(43, (5, 1), pair.vocab_size)
    with monkeypatch.context() as patch:
        break_it(patch)
        _, found = replay_gradients(pair.engine(), group.tree())
    total, single = compare_gradients(found, dense_of(pair, group)[1])
    assert total > 1e-4 and single[KV_DOWN.format(layer)] > 1e-3, (total, single[KV_DOWN.format(layer)])


def test_the_conventional_model_is_refused():
    pair = small_latent()
    with pytest.raises(ValueError, match="layer 1 has DSAttention as the core of its latent attention: build the model"):
        ReplayEngine(pair.plain, SweepConfig(), vocab_size=32)


@pytest.mark.parametrize("change, message", [
    (dict(rope_type="yarn"), "--rope-type yarn is not supported with latent attention"),
    (dict(dsa_indexer_loss_coeff=0.1), "--dsa-indexer-loss-coeff 0.1 needs --dsa-indexer-use-sparse-loss"),
    (dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"]), "--recompute-granularity selective"),
])
def test_unsupported_settings_are_refused(change, message):
    preset = small_preset()
    config = preset.transformer_config(use_cpu_initialization=True, **change)
    with pytest.raises(ValueError, match=message):
        build_model(preset, config, one_rank())


