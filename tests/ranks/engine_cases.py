"""What the ranks of `test_engine_ranks.py` run: one case is a topology, a model, tokens, and how the engine cuts them.

Pure data: the test reads the names, the ranks run the cases. What one process can show (tests/unit/engine) is not here
again; two ranks show most of the rest, and the cases of four are those that two cannot have: two axes at once, more ranks
than a block has rows, groups of experts smaller than the world.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison with the dense pass. What is left of the world after tp x cp is data parallel; ep is over all of it.

    groups: (prompt length, response lengths) each; a data-parallel replica takes every dp-th of them, or none.
    documents: lengths of documents with a loss of their own, one after another, in place of groups. single_token: only one
    response token of each group has a weight. together: responses replayed at a time. in_one_go: each response scored and
    replayed in one go. live: chunks whose graphs are kept. indexer_loss: coefficient of the loss that trains the indexers of latent attention. change: fields
    of the preset with other values, see `changed`.
    """

    name: str
    ranks: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    preset: str = "tiny-qwen3.6"
    dtype: str = "float64"
    groups: tuple[tuple[int, tuple[int, ...]], ...] = ((43, (5, 17, 1)),)
    documents: tuple[int, ...] = ()
    chunk: int = 16
    block: int = 8
    rows_at_once: int = 4096
    pages: str = "device"
    index_pages: str = "device"
    adjoints: str = "device"
    kept: str = "none"
    selections: str = "none"
    exchange: str = "auto"
    live: int = 0
    semantics: str = "exact"
    together: int = 1
    in_one_go: bool = False
    single_token: bool = False
    indexer_loss: float = 0.0
    vocab_size: int | None = None
    change: tuple[tuple[str, object], ...] = ()

    @property
    def bar(self) -> float:
        """The largest relative error over all parameters together."""
        return 1e-12 if self.dtype == "float64" else 2e-5


def changed(**fields) -> tuple[tuple[str, object], ...]:
    """A `Case.change`."""
    return tuple(sorted(fields.items()))


EIGHT_TOKENS = dict(groups=((3, (5,)),), single_token=True, chunk=2, block=3)
ODD = dict(groups=((157, (1, 1)),), chunk=43, block=8)
EMPTY = dict(groups=((9, (3, 1)),), chunk=2, block=1)
FOUR = ((20, (6, 6, 6, 6)),)
UNEQUAL = ((20, (5, 1)), (33, (2, 6)), (7, (9,)))
HYBRID = changed(num_layers=3, linear_attention_freq=2)
"""Attention between two gated delta nets: the prompt's own attention counts, and the last layer is recurrent."""
TWO_LAYERS = changed(num_layers=2)
GLM = changed(num_layers=3, moe_layer_freq=(0, 1, 1), dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=1)
"""A dense layer and two with experts; the first and the last select, the one between uses the first's."""
DEEPSEEK = changed(num_layers=2, moe_layer_freq=(0, 1))


def _two() -> list[Case]:
    cp2 = Case(name="cp2", ranks=2, cp=2)
    tp2 = Case(name="tp2", ranks=2, tp=2)
    hybrid = replace(cp2, change=HYBRID)
    sequence = replace(tp2, sequence_parallel=True)
    return [
        cp2,
        replace(hybrid, name="cp2, odd prompt and 1-token responses", **ODD),
        replace(hybrid, name="cp2, prompt of 1 token, blocks of 1", groups=((1, (3, 1)),), block=1),
        replace(hybrid, name="cp2, queries passed, host pages, kept outputs, sub-blocks", exchange="queries", pages="host",
                kept="host", rows_at_once=3),
        replace(hybrid, name="cp2, keys passed, batch, host pages, sub-blocks", groups=FOUR, together=2, block=4,
                exchange="keys", pages="host", rows_at_once=3),
        replace(hybrid, name="cp2, keys passed, response only", exchange="keys", semantics="response_only"),
        replace(hybrid, name="cp2, response only", semantics="response_only"),
        replace(hybrid, name="cp2, scored and replayed in one go", in_one_go=True, kept="host"),
        replace(hybrid, name="cp2, graphs of two chunks kept, host pages", live=2, pages="host", adjoints="host", kept="host", chunk=7),
        replace(cp2, name="cp2, documents, tied embeddings", documents=(37, 51, 40), block=16, preset="tiny-llama",
                change=TWO_LAYERS),
        replace(cp2, name="cp2, 8 tokens", **EIGHT_TOKENS),
        tp2,
        replace(tp2, name="tp2, q and k norms", preset="tiny-qwen3", change=TWO_LAYERS),
        replace(sequence, name="tp2, sequence parallel, odd", change=HYBRID, **ODD),
        replace(sequence, name="tp2, sequence parallel, all graphs kept", change=HYBRID, live=99),
        replace(sequence, name="tp2, sequence parallel, tied, padded vocabulary", preset="tiny-llama", vocab_size=101,
                change=TWO_LAYERS),
        Case(name="dp2, a prompt each", ranks=2, groups=((20, (5, 1)), (33, (2, 6))), change=HYBRID),
        Case(name="dp2, a replica without work", ranks=2, groups=((20, (5, 1)),), change=HYBRID),
    ]


def _four() -> list[Case]:
    cp4 = Case(name="cp4", ranks=4, cp=4, change=HYBRID)
    both = Case(name="tp2 x cp2", ranks=4, tp=2, cp=2)
    sequence = replace(both, sequence_parallel=True, change=HYBRID)
    each = dict(groups=((20, (5, 1)), (33, (2, 6))), change=HYBRID)
    return [
        replace(cp4, name="cp4, odd prompt and 1-token responses", **ODD),
        replace(cp4, name="cp4, chunks of 2: ranks own nothing", **EMPTY),
        replace(cp4, name="cp4, keys passed, odd", exchange="keys", **ODD),
        Case(name="cp4, 8 tokens", ranks=4, cp=4, **EIGHT_TOKENS),
        Case(name="dp2 x cp2, 8 tokens", ranks=4, cp=2, **EIGHT_TOKENS),
        Case(name="dp4, 8 tokens", ranks=4, **EIGHT_TOKENS),
        both,
        replace(sequence, name="tp2 x cp2, sequence parallel, odd", **ODD),
        replace(sequence, name="tp2 x cp2, sequence parallel, float32, in one go", dtype="float32", in_one_go=True),
        Case(name="dp2 x tp2, a prompt each", ranks=4, tp=2, **each),
        Case(name="dp2 x cp2, a prompt each", ranks=4, cp=2, **each),
    ]


def _experts() -> list[Case]:
    """Experts on 2 and 4 ranks: over context-parallel ranks, over replicas that share them, and over both."""
    two = dict(preset="tiny-qwen3-moe", change=TWO_LAYERS, ranks=2)
    four = two | dict(ranks=4)
    cp2 = Case(name="cp2 ep2", cp=2, ep=2, **two)
    cp4 = Case(name="cp4 ep4", cp=4, ep=4, **four)
    return [
        Case(name="cp2 ep1", cp=2, **two),
        replace(cp2, name="cp2 ep2, odd prompt and 1-token responses", **ODD),
        replace(cp2, name="cp2 ep2, prompt of 1 token, blocks of 1", groups=((1, (3, 1)),), block=1),
        replace(cp2, name="cp2 ep2, host pages, batch", groups=FOUR, together=2, block=4, pages="host"),
        replace(cp2, name="cp2 ep2, scored and replayed in one go", in_one_go=True),
        replace(cp2, name="cp2 ep2, graphs of two chunks kept", live=2),
        replace(cp2, name="cp2 ep2, documents", documents=(37, 51, 40), block=16),
        replace(cp2, name="cp2 ep2, response only", semantics="response_only"),
        Case(name="dp2 ep1", groups=UNEQUAL, **two),
        Case(name="dp2 ep2, replicas of different length", ep=2, groups=UNEQUAL, **two),
        Case(name="dp2 ep2, a replica without work", ep=2, groups=((20, (5, 1)),), **two),
        Case(name="dp2 ep2, in one go", ep=2, in_one_go=True, groups=UNEQUAL, **two),
        Case(name="cp4 ep2", cp=4, ep=2, **four),
        replace(cp4, name="cp4 ep4, odd prompt and 1-token responses", **ODD),
        replace(cp4, name="cp4 ep4, chunks of 2: ranks own nothing", **EMPTY),
        Case(name="dp2 x cp2 ep2", cp=2, ep=2, groups=UNEQUAL, **four),
        Case(name="dp2 x cp2 ep4", cp=2, ep=4, groups=UNEQUAL, **four),
        Case(name="dp2 x cp2 ep4, a replica without work", cp=2, ep=4, groups=((20, (5, 1)),), **four),
        Case(name="dp4 ep2", ep=2, groups=UNEQUAL, **four),
        *_sparse(),
    ]


def _sparse() -> list[Case]:
    """Latent attention over selected positions and experts, together."""
    cp2 = Case(name="glm, cp2 ep2", preset="tiny-glm5.2", change=GLM, ranks=2, cp=2, ep=2)
    cp4 = replace(cp2, name="glm, cp4 ep4", ranks=4, cp=4, ep=4)
    return [
        replace(cp2, name="glm, cp2 ep2, odd prompt and 1-token responses", **ODD),
        replace(cp2, name="glm, cp2 ep2, host pages, kept outputs, batch", groups=FOUR, together=2, block=4, pages="host",
                kept="host"),
        replace(cp2, name="deepseek, cp2 ep2", preset="tiny-deepseek-v3.2", change=DEEPSEEK),
        replace(cp2, name="glm, dp2 ep2, replicas of different length, indexer trained", cp=1, indexer_loss=0.7,
                groups=((40, (5, 1)), (7, (2, 30, 4)))),
        replace(cp4, name="glm, cp4 ep4, chunks of 2: ranks own nothing", **EMPTY),
        replace(cp4, name="glm, dp2 x cp2 ep4", cp=2, groups=((20, (5, 1)), (33, (2, 6)))),
    ]


def _latent() -> list[Case]:
    """Latent attention over selected positions, without experts: prompts around and beyond the 5 selected keys.

    With a trained indexer everything of a frozen one happens too; the frozen one's own paths have four cases.
    """
    cp2 = Case(name="latent, cp2", preset="small-latent", change=changed(num_layers=3), ranks=2, cp=2)
    host = dict(pages="host", index_pages="host", kept="host", selections="host", rows_at_once=3)
    trained = replace(cp2, name="latent, cp2, indexer trained", indexer_loss=0.7)
    cp4 = replace(cp2, name="latent, cp4", ranks=4, cp=4)
    trained4 = replace(cp4, name="latent, cp4, indexer trained", indexer_loss=0.7)
    return [
        replace(cp2, name=f"{cp2.name}, odd prompt and 1-token responses", **ODD),
        replace(cp2, name=f"{cp2.name}, batch, all state on the host, sub-blocks", groups=FOUR, together=2, block=4, **host),
        replace(cp2, name=f"{cp2.name}, scored and replayed in one go", in_one_go=True, selections="device"),
        replace(cp2, name=f"{cp2.name}, response only", semantics="response_only"),
        replace(trained, name=f"{trained.name}, odd prompt and 1-token responses", **ODD),
        replace(trained, name=f"{trained.name}, prompt of 1 token, blocks of 1", groups=((1, (7, 1)),), block=1),
        replace(trained, name=f"{trained.name}, chunks of 2: ranks own nothing", **EMPTY),
        replace(trained, name=f"{trained.name}, all state on the host, sub-blocks", adjoints="host", **host),
        replace(trained, name=f"{trained.name}, graphs of two chunks kept", live=2, selections="host"),
        replace(trained, name=f"{trained.name}, batch", groups=FOUR, together=4, block=4),
        replace(trained, name=f"{trained.name}, one at a time", groups=FOUR, in_one_go=True),
        replace(trained, name=f"{trained.name}, documents", documents=(37, 51, 40), block=16),
        replace(trained, name=f"{trained.name}, response only", semantics="response_only"),
        replace(cp4, name=f"{cp4.name}, chunks of 2: ranks own nothing", **EMPTY),
        replace(trained4, name=f"{trained4.name}, odd prompt and 1-token responses", **ODD),
        replace(trained4, name=f"{trained4.name}, chunks of 2: ranks own nothing", **EMPTY),
        replace(trained4, name="latent, dp2 x cp2, indexer trained", cp=2, groups=((20, (5, 1)), (33, (2, 6)))),
    ]


CASES = {case.name: case for case in (*_two(), *_four())}

EXPERT_CASES = {case.name: case for case in _experts()}
LATENT_CASES = {case.name: case for case in _latent()}
CASE_SETS = {"engine": CASES, "experts": EXPERT_CASES, "latent": LATENT_CASES}
