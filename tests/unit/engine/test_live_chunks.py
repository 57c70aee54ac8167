"""Graphs of a prompt's last chunks that are kept instead of made again: the same exact gradient, by fewer passes."""

from collections import Counter

import pytest
import torch

from longstraw.attention import paged
from longstraw.sweep_config import SweepConfig
from longstraw.sweeps import ReplayEngine
from tests.support.dense import compare_gradients
from tests.support.latent_models import small_preset
from tests.support.models import build_pair, dense_of, draw_group, get_pair, get_small_hybrid, one_rank, replay_gradients


def count_passes(monkeypatch) -> Counter:
    """(is of the prompt, with a graph) -> passes of blocks."""
    passes: Counter = Counter()
    plain = ReplayEngine._run_block

    def run_block(self, segment, state, block, *, replay, live=False):
        passes[segment.captures_only, replay] += 1
        return plain(self, segment, state, block, replay=replay, live=live)

    monkeypatch.setattr(ReplayEngine, "_run_block", run_block)
    return passes


def latent_pair(indexer_loss: float):
    return build_pair(small_preset(), torch.float64, one_rank(), indexer_loss=indexer_loss)


PAIRS = {
    "hybrid": get_small_hybrid, "hybrid that ends in a gated delta net": lambda: get_small_hybrid(num_layers=3),
    "tied embeddings": lambda: get_pair("tiny-llama"), "experts": lambda: get_pair("tiny-qwen3-moe"),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("prompt, chunk, live", [(43, 7, 3), (33, 16, 100), (1, 4, 2), (2, 4, 1)])
def test_the_gradient_is_exact_and_live_chunks_run_once(monkeypatch, kind, prompt, chunk, live):
    pair = PAIRS[kind]()
    group, passes = draw_group(prompt, (5, 9, 1), pair.vocab_size), count_passes(monkeypatch)
    engine = pair.engine(
        prompt_chunk_size=chunk, live_chunks=live, page_residency="host", adjoint_residency="host", attention_output_residency="host"
    )
    loss, found = replay_gradients(engine, group.tree())
    expected_loss, expected = dense_of(pair, group)
    assert compare_gradients(found, expected)[0] <= 1e-12 and abs(loss - expected_loss) <= 1e-12 * max(1.0, abs(expected_loss))
    blocks = -(-(prompt - 1) // chunk)
    assert passes[True, True] == blocks and passes[True, False] == max(0, blocks - live)
    assert engine.ledger.entries() == [], "nothing outlives the replay"


@pytest.mark.parametrize("indexer_loss", [0.0, 0.3], ids=["frozen", "trained"])
@pytest.mark.parametrize("live, selections, chunk", [(2, "host", 16), (99, "none", 4)])
def test_latents_selections_and_indexers(live, selections, chunk, indexer_loss):
    """Index keys of a chunk whose graph is kept go to the pages, also where its own block selects everything, and get their
    gradient where they are trained."""
    pair = latent_pair(indexer_loss)
    group = draw_group(2 * chunk + 9, (5, 9, 1), pair.vocab_size)
    kept, again = (
        replay_gradients(pair.engine(prompt_chunk_size=chunk, live_chunks=count, selection_residency=selections), group.tree())
        for count in (live, 0)
    )
    assert compare_gradients(kept[1], again[1])[0] <= 1e-12 and kept[0] == pytest.approx(again[0], rel=1e-12)
    trained = any("indexer" in name and gradient.abs().max() > 0 for name, gradient in kept[1].items())
    assert trained == bool(indexer_loss)


def test_attention_of_live_chunks_is_computed_once(monkeypatch):
    pair, calls, plain = get_pair("tiny-llama"), [], paged.attend
    monkeypatch.setattr(paged, "attend", lambda q, k, v, geometry: calls.append(q.shape[2]) or plain(q, k, v, geometry))
    group = draw_group(65, (3,), pair.vocab_size)
    replay_gradients(pair.engine(prompt_chunk_size=16, live_chunks=4, response_block_size=8), group.tree())
    layers = pair.model.config.num_layers
    assert calls.count(16) == 4 * (layers - 1), "the last layer of a prompt's block only leaves its keys"


@pytest.mark.parametrize("config, sentence", [
    (dict(live_chunks=-1), "--live-chunks is at least 0, not -1"),
    (dict(live_chunks=1, semantics="response_only"), "--live-chunks 1 keeps graphs of the prompt, which --semantics response_only"),
])
def test_what_cannot_be_is_refused(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        SweepConfig(**config)


def test_replicas_that_share_experts_are_refused():
    from megatron.grpo.arguments import ArgumentErrors, Machine, parse_arguments

    flags = "--model-preset tiny-qwen3-moe --prompt-data d --tokenizer-path t --train-iters 1 --expert-model-parallel-size 2 --live-chunks 1"
    with pytest.raises(ArgumentErrors, match="--live-chunks 1: replicas that share experts"):
        parse_arguments(flags.split(), Machine(cuda=False, fused_adam=False, world_size=2))
