"""The ranks of `test_engine_ranks.py`: every case of one world size, one after another, results to a JSON file.

Models go through DDP and gradient finalization, as in training; every rank compares the whole, unsharded gradients with
the dense pass. The dense passes are shared out over the ranks.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from longstraw.adapters.decoder import last_token_logits
from longstraw.patches.device import cuda_means_cpu
from longstraw.patches.finalize_model_grads import finalize_gradients
from longstraw.patches.float64 import lift_float64
from longstraw.patches.process_groups import initialize_groups
from megatron.grpo.presets import get_preset
from megatron.grpo.sharding import gather_gradients
from tests.ranks.engine_cases import CASE_SETS, Case
from tests.support import models
from tests.support.dense import compare_gradients, constant_prompt, dense_gradients
from tests.support.indexer import dense_with_indexer
from tests.support.latent_models import small_preset
from tests.support.ranks import fork_ranks


def preset_of(case: Case):
    preset = small_preset() if case.preset == "small-latent" else get_preset(case.preset)
    changes = dict(case.change) if case.vocab_size is None else dict(case.change, vocab_size=case.vocab_size)
    return replace(preset, **changes)


def draw_groups(case: Case) -> list[models.Group | models.Document]:
    if case.documents:
        return [models.draw_document(length, preset_of(case).vocab_size) for length in case.documents]
    groups = [
        models.draw_group(prompt, responses, preset_of(case).vocab_size, seed)
        for seed, (prompt, responses) in enumerate(case.groups)
    ]
    if not case.single_token:
        return groups
    one = [torch.zeros_like(w) for w in groups[0].weights]
    one[0][2] = 1.0
    return [replace(groups[0], weights=tuple(one))]


def build(case: Case, groups):
    """The pair and DDP around its stateful model."""
    padded = None if case.vocab_size is None else 128
    pair = models.build_pair(
        preset_of(case), getattr(torch, case.dtype), groups, sequence_parallel=case.sequence_parallel,
        padded_vocab_size=padded, indexer_loss=case.indexer_loss,
    )
    for parameter in pair.plain.parameters():  # Megatron draws by tensor-parallel rank
        dist.broadcast(parameter.data, 0)
    models.copy_weights(pair, groups)
    with cuda_means_cpu():
        ddp = DistributedDataParallel(
            pair.model.config, DistributedDataParallelConfig(overlap_grad_reduce=False), pair.model, pg_collection=groups
        )
    return pair, ddp


def open_engine(case: Case, pair):
    return pair.engine(
        semantics=case.semantics, prompt_chunk_size=case.chunk, response_block_size=case.block, page_residency=case.pages,
        attention_output_residency=case.kept, query_rows_at_once=case.rows_at_once,
        attention_exchange=case.exchange, index_page_residency=case.index_pages, selection_residency=case.selections,
        adjoint_residency=case.adjoints, recurrent_state_residency=case.pages, live_chunks=case.live,
    )


def engine_result(case: Case, pair, ddp, groups, token_groups):
    """Global loss, whole gradients of all replicas' groups, and the log-probabilities that the first loss saw."""
    engine, seen = open_engine(case, pair), {}
    ddp.zero_grad_buffer()
    loss = torch.zeros((), dtype=torch.float64)
    with ddp.no_sync():
        for group in token_groups[groups.dp.rank() :: groups.dp.size()]:
            tree = group.tree(together=case.together)
            if group is token_groups[0]:
                watch_loss(tree.children[0] if tree.children else tree, seen)
            loss += models.replay_in_one_go(engine, tree)[0] if case.in_one_go else engine.replay(tree)
        engine.finish_phase()
    finalize_gradients(ddp, engine.adapters, groups)
    dist.all_reduce(loss, group=groups.dp_cp)
    return loss.item(), gather_gradients(pair.model, pair.preset, groups), seen


def watch_loss(segment, seen: dict):
    original = segment.loss

    def loss(logprobs, columns):
        seen[columns.start, columns.stop] = logprobs.detach().clone()
        return original(logprobs, columns)

    segment.loss = loss


def check_scores(case: Case, pair, group, seen):
    """The forward sweep's log-probabilities: equal on every rank, the dense model's, and the replay's to the bit."""
    engine, tree = open_engine(case, pair), group.tree(together=case.together)
    state, nothing = (engine.forward_sweep(tree, None) if tree.children else (None, None))
    assert nothing is None
    scored = tree.children[0] if tree.children else tree
    _, logprobs = engine.forward_sweep(scored, state)
    for (start, stop), values in seen.items():
        if case.ep > case.cp:  # another replica's tokens shared the experts' matrices, and may be others each time
            torch.testing.assert_close(values, logprobs[:, start:stop], rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(values, logprobs[:, start:stop]), "the first ratio is not exactly 1"
    again = engine.open_segment(scored, state)
    for block in range(len(again.plan)):
        hidden = engine.run_forward(scored, again, block)
    logits = last_token_logits(pair.model, hidden, again.plan[-1], pair.vocab_size)
    tokens, length = group.sequences()[0].tokens, scored.length
    ids, targets = tokens[:, :-1], tokens[0, 1:]
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        dense = pair.plain(ids, None, mask)[0, -length:, : pair.vocab_size].double()
    expected = dense.log_softmax(-1).gather(1, targets[-length:, None])[:, 0]
    bar = dict(rtol=1e-10, atol=1e-10) if case.dtype == "float64" else dict(rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logprobs[0].double(), expected, **bar)
    torch.testing.assert_close(logits[0].double(), dense[-1], **bar)
    for value in (logprobs, logits):
        first = value.clone()
        if case.ep > case.cp:
            dist.broadcast(first, group_src=0, group=pair.model.pg_collection.tp_cp)
        else:
            dist.broadcast(first, 0)
        assert torch.equal(first, value), "ranks disagree"


def dense_pass(case: Case, pair, sequence, constant: int):
    """Loss and gradients of one sequence; with the indexer's loss where the case has one."""
    if not case.indexer_loss:
        return dense_gradients(pair.plain, [sequence], vocab_size=pair.vocab_size)
    loss, _, grads = dense_with_indexer(
        pair.plain, [sequence], case.indexer_loss, constant=constant, vocab_size=pair.vocab_size
    )
    return loss, grads


_references: dict[tuple, tuple[float, dict]] = {}


def reference_of(case: Case, pair, token_groups):
    """The dense loss and gradients, computed once per model and tokens; sequences are shared out over the ranks."""
    key = (pair.preset, case.dtype, case.groups, case.documents, case.single_token, case.semantics, case.indexer_loss)
    if key not in _references:
        constant = case.semantics == "response_only"
        share = [
            (group, sequence) for group in token_groups for sequence in group.sequences()
        ][dist.get_rank() :: dist.get_world_size()]
        total, grads = torch.zeros((), dtype=torch.float64), {n: torch.zeros_like(p) for n, p in pair.plain.named_parameters()}
        for group, sequence in share:
            prompt = group.prompt.shape[1] - 1 if constant else 0
            with constant_prompt(pair.plain, prompt):
                loss, found = dense_pass(case, pair, sequence, prompt)
            total += loss
            for name, grad in found.items():
                grads[name] += grad
        for tensor in (total, *grads.values()):
            dist.all_reduce(tensor)
        _references[key] = (total.item(), grads)
    return _references[key]


def run_case(case: Case, groups, built: dict) -> dict:
    with lift_float64():
        model = (preset_of(case), case.dtype, case.sequence_parallel, case.indexer_loss)
        if model not in built:
            built[model] = build(case, groups)
        pair, ddp = built[model]
        token_groups = draw_groups(case)
        loss, found, seen = engine_result(case, pair, ddp, groups, token_groups)
        expected_loss, expected = reference_of(case, pair, token_groups)
        check_scores(case, pair, token_groups[0], seen)
    total, single = compare_gradients(found, expected)
    worst = torch.tensor([total, *single.values()], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {
        "global": worst[0].item(), "parameters": dict(zip(single, worst[1:].tolist())), "loss": loss,
        "reference_loss": expected_loss,
    }


def main(rank, ranks, arguments):
    results, topology, groups, built = {}, None, None, {}
    for case in sorted((c for c in CASE_SETS[arguments[1]].values() if c.ranks == ranks), key=lambda c: (c.tp, c.cp, c.ep, c.sequence_parallel)):
        if topology != (case.tp, case.cp, case.ep):
            parallel_state.destroy_model_parallel()
            topology, built = (case.tp, case.cp, case.ep), {}
            groups = initialize_groups(tensor_parallel=case.tp, context_parallel=case.cp, expert_parallel=case.ep)
        results[case.name] = run_case(case, groups, built)
        if rank == 0:
            print(case.name, results[case.name]["global"], flush=True)
    if rank == 0:
        Path(arguments[0]).write_text(json.dumps(results))


if __name__ == "__main__":
    fork_ranks(main)
