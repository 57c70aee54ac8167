"""What the ranks of `test_engine_ranks.py` run: one case is a topology, a model, tokens, and how the engine cuts them.

Pure data: the test reads the names, the ranks run the cases.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison with the dense pass. What is left of the world after tp x cp is data parallel; ep is over all of it.

    groups: (prompt length, response lengths) each; a data-parallel replica takes every dp-th of them, or none.
    documents: lengths of documents with a loss of their own, one after another, in place of groups. single_token: only one
    response token of each group has a weight. together: responses replayed at a time. in_one_go: each response scored and
    replayed in one go. indexer_loss: coefficient of the loss that trains the indexers of latent attention.
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
    semantics: str = "exact"
    together: int = 1
    in_one_go: bool = False
    single_token: bool = False
    indexer_loss: float = 0.0
    vocab_size: int | None = None

    @property
    def bar(self) -> float:
        """The largest relative error over all parameters together."""
        return 1e-12 if self.dtype == "float64" else 2e-5


EIGHT_TOKENS = dict(groups=((3, (5,)),), single_token=True, chunk=2, block=3)
ODD = dict(groups=((157, (1, 1)),), chunk=43, block=8)


def _two() -> list[Case]:
    cp2 = Case(name="cp2", ranks=2, cp=2)
    tp2 = Case(name="tp2", ranks=2, tp=2)
    return [
        cp2,
        replace(cp2, name="cp2, odd prompt and 1-token responses", **ODD),
        replace(cp2, name="cp2, prompt of 1 token, blocks of 1", groups=((1, (3, 1)),), block=1),
        replace(cp2, name="cp2, host pages, kept outputs, sub-blocks", pages="host", kept="host", rows_at_once=3),
        replace(cp2, name="cp2, keys passed", exchange="keys", rows_at_once=3),
        replace(cp2, name="cp2, keys passed, batch, host pages", groups=((20, (6, 6, 6, 6)),), together=2, exchange="keys",
                pages="host"),
        replace(cp2, name="cp2, queries passed", exchange="queries"),
        replace(cp2, name="cp2, keys passed, response only", exchange="keys", semantics="response_only"),
        replace(cp2, name="cp2, batch", groups=((20, (6, 6, 6, 6)),), together=2, block=4),
        replace(cp2, name="cp2, scored and replayed in one go", in_one_go=True, kept="host"),
        replace(cp2, name="cp2, documents", documents=(37, 51, 40), block=16),
        replace(cp2, name="cp2, tied embeddings", preset="tiny-llama"),
        replace(cp2, name="cp2, float32", dtype="float32"),
        replace(cp2, name="cp2, response only", semantics="response_only"),
        replace(cp2, name="cp2, 8 tokens", **EIGHT_TOKENS),
        tp2,
        replace(tp2, name="tp2, odd prompt and 1-token responses", **ODD),
        replace(tp2, name="tp2, q and k norms", preset="tiny-qwen3"),
        replace(tp2, name="tp2, padded vocabulary", preset="tiny-llama", vocab_size=101),
        replace(tp2, name="tp2, sequence parallel", sequence_parallel=True),
        replace(tp2, name="tp2, sequence parallel, odd", sequence_parallel=True, **ODD),
        replace(tp2, name="tp2, sequence parallel, tied", sequence_parallel=True, preset="tiny-llama"),
        replace(tp2, name="tp2, sequence parallel, float32", sequence_parallel=True, dtype="float32"),
        Case(name="dp2, a prompt each", ranks=2, groups=((20, (5, 1)), (33, (2, 6)))),
        Case(name="dp2, a replica without work", ranks=2, groups=((20, (5, 1)),)),
    ]


def _four() -> list[Case]:
    cp4 = Case(name="cp4", ranks=4, cp=4)
    both = Case(name="tp2 x cp2", ranks=4, tp=2, cp=2)
    return [
        cp4,
        replace(cp4, name="cp4, odd prompt and 1-token responses", **ODD),
        replace(cp4, name="cp4, chunks of 2: ranks own nothing", groups=((9, (3, 1)),), chunk=2, block=1),
        replace(cp4, name="cp4, keys passed, odd", exchange="keys", **ODD),
        replace(cp4, name="cp4, 8 tokens", **EIGHT_TOKENS),
        Case(name="dp2 x cp2, 8 tokens", ranks=4, cp=2, **EIGHT_TOKENS),
        Case(name="dp4, 8 tokens", ranks=4, **EIGHT_TOKENS),
        both,
        replace(both, name="tp2 x cp2, odd prompt and 1-token responses", **ODD),
        replace(both, name="tp2 x cp2, sequence parallel", sequence_parallel=True),
        replace(both, name="tp2 x cp2, sequence parallel, in one go", sequence_parallel=True, in_one_go=True),
        replace(both, name="tp2 x cp2, sequence parallel, odd", sequence_parallel=True, **ODD),
        replace(both, name="tp2 x cp2, sequence parallel, float32", sequence_parallel=True, dtype="float32"),
        Case(name="dp2 x tp2, a prompt each", ranks=4, tp=2, groups=((20, (5, 1)), (33, (2, 6)))),
        Case(name="dp2 x cp2, a prompt each", ranks=4, cp=2, groups=((20, (5, 1)), (33, (2, 6)))),
    ]


def _experts() -> list[Case]:
    """Experts on 2 and 4 ranks: over context-parallel ranks, over replicas that share them, and over both."""
    two = dict(preset="tiny-qwen3-moe", ranks=2)
    four = dict(preset="tiny-qwen3-moe", ranks=4)
    unequal = dict(groups=((20, (5, 1)), (33, (2, 6)), (7, (9,))))
    cp2 = Case(name="cp2 ep2", cp=2, ep=2, **two)
    cp4 = Case(name="cp4 ep4", cp=4, ep=4, **four)
    spread = Case(name="dp2 x cp2 ep4", cp=2, ep=4, **four, **unequal)
    return [
        Case(name="cp2 ep1", cp=2, **two),
        cp2,
        replace(cp2, name="cp2 ep2, odd prompt and 1-token responses", **ODD),
        replace(cp2, name="cp2 ep2, prompt of 1 token, blocks of 1", groups=((1, (3, 1)),), block=1),
        replace(cp2, name="cp2 ep2, host pages, batch", groups=((20, (6, 6, 6, 6)),), together=2, block=4, pages="host"),
        replace(cp2, name="cp2 ep2, scored and replayed in one go", in_one_go=True),
        replace(cp2, name="cp2 ep2, documents", documents=(37, 51, 40), block=16),
        replace(cp2, name="cp2 ep2, response only", semantics="response_only"),
        Case(name="dp2 ep1", **two, **unequal),
        Case(name="dp2 ep2, replicas of different length", ep=2, **two, **unequal),
        Case(name="dp2 ep2, a replica without work", ep=2, groups=((20, (5, 1)),), **two),
        Case(name="dp2 ep2, in one go", ep=2, in_one_go=True, **two, **unequal),
        Case(name="cp4 ep1", cp=4, **four),
        Case(name="cp4 ep2", cp=4, ep=2, **four),
        cp4,
        replace(cp4, name="cp4 ep4, odd prompt and 1-token responses", **ODD),
        replace(cp4, name="cp4 ep4, chunks of 2: ranks own nothing", groups=((9, (3, 1)),), chunk=2, block=1),
        Case(name="dp2 x cp2 ep2", cp=2, ep=2, **four, **unequal),
        spread,
        replace(spread, name="dp2 x cp2 ep4, a replica without work", groups=((20, (5, 1)),)),
        Case(name="dp4 ep2", ep=2, **four, **unequal),
        *_sparse(),
    ]


def _sparse() -> list[Case]:
    """Latent attention over selected positions and experts, together."""
    cp2 = Case(name="glm, cp2 ep2", preset="tiny-glm5.2", ranks=2, cp=2, ep=2)
    cp4 = Case(name="glm, cp4 ep4", preset="tiny-glm5.2", ranks=4, cp=4, ep=4)
    spread = Case(name="glm, dp2 x cp2 ep4", preset="tiny-glm5.2", ranks=4, cp=2, ep=4, groups=((20, (5, 1)), (33, (2, 6))))
    return [
        cp2,
        replace(cp2, name="glm, cp2 ep2, odd prompt and 1-token responses", **ODD),
        replace(cp2, name="glm, cp2 ep2, host pages, kept outputs, batch", groups=((20, (6, 6, 6, 6)),), together=2, block=4,
                pages="host", kept="host"),
        replace(cp2, name="deepseek, cp2 ep2", preset="tiny-deepseek-v3.2"),
        cp4,
        replace(cp4, name="glm, cp4 ep4, chunks of 2: ranks own nothing", groups=((9, (3, 1)),), chunk=2, block=1),
        spread,
        replace(cp2, name="glm, dp2 ep2, replicas of different length", cp=1, groups=((40, (5, 1)), (7, (2, 30, 4)))),
        replace(cp2, name="glm, dp2 ep2, replicas of different length, indexer trained", cp=1, indexer_loss=0.7,
                groups=((40, (5, 1)), (7, (2, 30, 4)))),
    ]


def _latent() -> list[Case]:
    """Latent attention over selected positions, without experts: prompts around and beyond the 5 selected keys."""
    cases = []
    for ranks in (2, 4):
        cp = Case(name=f"latent, cp{ranks}", preset="small-latent", ranks=ranks, cp=ranks)
        host = dict(pages="host", index_pages="host", kept="host", selections="host")
        cases += [
            cp,
            replace(cp, name=f"{cp.name}, odd prompt and 1-token responses", **ODD),
            replace(cp, name=f"{cp.name}, prompt of 1 token, blocks of 1", groups=((1, (7, 1)),), block=1),
            replace(cp, name=f"{cp.name}, chunks of 2: ranks own nothing", groups=((9, (3, 1)),), chunk=2, block=1),
            replace(cp, name=f"{cp.name}, all state on the host, sub-blocks", rows_at_once=3, **host),
            replace(cp, name=f"{cp.name}, batch, kept selections", groups=((20, (6, 6, 6, 6)),), together=2, block=4,
                    selections="device"),
            replace(cp, name=f"{cp.name}, scored and replayed in one go", in_one_go=True, selections="host"),
            replace(cp, name=f"{cp.name}, documents", documents=(37, 51, 40), block=16),
            replace(cp, name=f"{cp.name}, response only", semantics="response_only"),
        ]
        trained = replace(cp, name=f"{cp.name}, indexer trained", indexer_loss=0.7)
        cases += [
            trained,
            replace(trained, name=f"{trained.name}, odd prompt and 1-token responses", **ODD),
            replace(trained, name=f"{trained.name}, chunks of 2: ranks own nothing", groups=((9, (3, 1)),), chunk=2, block=1),
            replace(trained, name=f"{trained.name}, all state on the host, sub-blocks", rows_at_once=3, adjoints="host", **host),
            replace(trained, name=f"{trained.name}, batch", groups=((20, (6, 6, 6, 6)),), together=4, block=4),
            replace(trained, name=f"{trained.name}, one at a time", groups=((20, (6, 6, 6, 6)),), in_one_go=True),
            replace(trained, name=f"{trained.name}, documents", documents=(37, 51, 40), block=16),
            replace(trained, name=f"{trained.name}, response only", semantics="response_only"),
        ]
    both = Case(name="latent, dp2 x cp2", preset="small-latent", ranks=4, cp=2, groups=((20, (5, 1)), (33, (2, 6))))
    return [*cases, both, replace(both, name="latent, dp4", cp=1),
            replace(both, name="latent, dp2 x cp2, indexer trained", indexer_loss=0.7)]


CASES = {case.name: case for case in (*_two(), *_four())}

EXPERT_CASES = {case.name: case for case in _experts()}
LATENT_CASES = {case.name: case for case in _latent()}
CASE_SETS = {"engine": CASES, "experts": EXPERT_CASES, "latent": LATENT_CASES}
