"""Sparse latent attention of a whole sequence, by the naive forms, and the same sequence block by block over pages.

`LatentCase` draws a sequence; `oracle` differentiates the naive form; `walk` runs the forward sweep over the blocks and
the reverse sweep back, as the engine would, on this rank of any number. Pages here are plain tensors: those of the engine
are `longstraw.prompt_state`'s.

B batch, H query heads, I index heads, S tokens, D latent key width, V value width, E index dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from longstraw.attention.indexer_loss import IndexerLossGeometry, MainAttention, differentiate_indexer
from longstraw.attention.latent import attend_latents, latent_attention
from longstraw.attention.layout import BlockLayout
from longstraw.attention.naive_sparse import naive_indexer_loss, naive_scores, naive_selection, naive_sparse_attention
from longstraw.attention.selection import Selection, SelectionGeometry, select, select_everything
from longstraw.attention.sparse import LatentGeometry

HEADS, INDEX_HEADS, WIDTH, VALUES, INDEX_DIM, SCALE = 3, 2, 10, 7, 6, 0.4


@dataclass
class TensorPages:
    """Rows kept in one growing tensor: latents [B, N, D] with adjoints, or index keys [B, N, E] with positions."""

    tensor: torch.Tensor
    at: torch.Tensor
    rank: int = 0
    rows_of_ranks: tuple[int, ...] = ()
    constant: bool = False
    grad: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.tensor.shape[1]

    @property
    def batch(self) -> int:
        return self.tensor.shape[0]

    def read(self) -> torch.Tensor:
        return self.tensor

    def positions(self) -> torch.Tensor:
        return self.at

    @contextmanager
    def adjoint(self) -> Iterator[torch.Tensor | None]:
        yield None if self.constant else self.grad


@dataclass(frozen=True)
class LatentCase:
    """A sequence of `shared` tokens of batch 1 followed by `own` tokens of `batch`, all differentiated.

    quantum: scores are whole multiples of it, so that many tie (None: they are what they are).
    """

    shared: int
    own: int
    batch: int = 1
    top_k: int = 4
    relu: bool = True
    quantum: float | None = None
    seed: int = 0
    drawn: dict = field(default_factory=dict, compare=False, repr=False)

    def draw(self) -> dict[str, torch.Tensor]:
        """q [B, H, S, D], latents [B, S, D], index q [B, I, S, E], weights [B, I, S], index k [B, S, E], do [B, H, S, V],
        row_weights [B, S].

        The first `shared` tokens are the same for all the batch, but for do and row_weights.
        """
        if self.drawn:
            return self.drawn
        generator = torch.Generator().manual_seed(self.seed)
        total = self.shared + self.own
        shapes = {
            "q": (HEADS, total, WIDTH), "latents": (total, WIDTH), "index_q": (INDEX_HEADS, total, INDEX_DIM),
            "weights": (INDEX_HEADS, total), "index_k": (total, INDEX_DIM), "do": (HEADS, total, VALUES),
            "row_weights": (total,),
        }
        for name, shape in shapes.items():
            x = torch.randn(self.batch, *shape, generator=generator, dtype=torch.float64)
            if self.quantum and name in ("index_q", "weights", "index_k"):
                x = (x / self.quantum).round()  # whole numbers: their products and sums are exact in any order
            token_dim = 1 if name in ("latents", "index_k") else 2
            if name == "row_weights":
                x = (x.abs() - 0.3).relu()  # some rows have no weight
                x[1:, : self.shared] = 0
            elif name != "do":
                x.narrow(token_dim, 0, self.shared).copy_(x[:1].narrow(token_dim, 0, self.shared).clone())
            else:
                x[1:, :, : self.shared] = 0  # the shared tokens' outputs are read once
            self.drawn[name] = x
        return self.drawn

    def mask(self) -> torch.Tensor:
        """What each query selects: [B, S, S], by the naive form."""
        t, at = self.draw(), torch.arange(self.shared + self.own)
        return naive_selection(naive_scores(t["index_q"], t["weights"], t["index_k"], self.relu), at, at, self.top_k)

    def oracle(self) -> dict[str, torch.Tensor]:
        """Output, log-sum-exp, the gradients of q and latents, and those of the indexer's loss (in the shared tokens they are
        to be summed over the batch)."""
        t = self.draw()
        q, latents = (t[name].clone().requires_grad_() for name in ("q", "latents"))
        o, lse = naive_sparse_attention(q, latents, self.mask(), VALUES, SCALE)
        o.backward(t["do"])
        indexer = [t[name].clone().requires_grad_() for name in ("index_q", "weights", "index_k")]
        loss = naive_indexer_loss(naive_scores(*indexer, self.relu), q, latents, self.mask(), t["row_weights"], SCALE)
        loss.backward()
        grads = dict(zip(("dindex_q", "dweights", "dindex_k"), (x.grad for x in indexer)))
        return {"o": o.detach(), "lse": lse.detach(), "dq": q.grad, "dlatents": latents.grad, "loss": loss.detach()} | grads


@dataclass(frozen=True)
class Walk:
    """How a case is cut: blocks of `block` tokens over the layout's ranks, and what is kept for the reverse sweep.

    indexer: the reverse sweep also differentiates the indexer's loss.
    """

    block: int
    rows_at_once: int = 4096
    elements_at_once: int = 2**24
    keys_at_once: int = 8192
    scores_at_once: int = 2**24
    dense: bool = False
    kept: bool = False
    reselect: bool = False
    exchange: str = "auto"
    indexer: bool = False


def walk(case: LatentCase, cut: Walk, plan: list[list[BlockLayout]]) -> Iterator[tuple[str, torch.Tensor, slice, bool]]:
    """Run the case over this rank's pages, forward and back; yields (name, this rank's values, token columns, shared).

    plan: the blocks of the shared tokens and of the own ones. Values have the token dim that `LatentCase.draw` gives them.
    """
    t = case.draw()
    segments: list[tuple[TensorPages, TensorPages]] = []
    passed = []
    for index, layouts in enumerate(plan):
        batch = 1 if index == 0 else case.batch
        segments.append(_empty_pages(batch, t))
        for layout in layouts:
            history = [(_freeze(a, layout), _freeze(b, layout)) for a, b in segments]
            run = _forward_block(case, cut, layout, batch, history)
            passed.append((index, layout, batch, history, run))
            yield "o", run["o"][:, :, : layout.mine], _columns(layout), index == 0
            yield "lse", run["lse"][:, :, : layout.mine], _columns(layout), index == 0
            _append(segments[-1], run, layout)
    loss = torch.zeros((), dtype=torch.float64)
    for pages in (pages for pair in segments for pages in pair):
        pages.grad = torch.zeros_like(pages.tensor)
    for index, layout, batch, history, run in reversed(passed):
        before = history[-1][0].rows
        pages = segments[index][0]
        for frozen_pair, live_pair in zip(history, segments):
            for frozen, live in zip(frozen_pair, live_pair):
                frozen.grad = live.grad[:, : frozen.rows]
        block = {name: run[name].detach().clone().requires_grad_() for name in ("q", "latents")}
        selection = run["selection"] if not cut.reselect else _select(case, cut, layout, run, history)
        assert selection is None or all(map(torch.equal, selection.tensors(), run["selection"].tensors()))
        geometry = _geometry(cut, layout, history)
        kept = (run["o"], run["lse"]) if cut.kept else None
        o = latent_attention(block["q"], block["latents"], selection, geometry, kept)
        do = _rows(t["do"][:batch], 2, layout)
        do[:, :, layout.mine :] = 0
        torch.autograd.backward([o, block["latents"]], [do, pages.grad[:, before : before + layout.mine].clone()])
        yield "dq", block["q"].grad[:, :, : layout.mine], _columns(layout), index == 0
        yield "dlatents", block["latents"].grad, _columns(layout), index == 0
        if cut.indexer:
            found = _differentiate_indexer(case, cut, layout, run, history, batch)
            loss += found.loss
            yield "dindex_q", found.q[:, :, : layout.mine], _columns(layout), index == 0
            yield "dweights", found.weights[:, :, : layout.mine], _columns(layout), index == 0
            own = segments[index][1].grad[:, before : before + layout.mine]
            yield "dindex_k", found.k + own, _columns(layout), index == 0
    if cut.indexer:
        layout = plan[-1][0]
        if layout.ranks > 1:
            torch.distributed.all_reduce(loss, group=layout.group)
        yield "loss", loss, None, False


def check_walk(case: LatentCase, cut: Walk, plan: list[list[BlockLayout]]) -> None:
    """Assert that everything `walk` yields equals the oracle's."""
    expected = case.oracle()
    token_dim = {"o": 2, "lse": 2, "dq": 2, "dlatents": 1, "dindex_q": 2, "dweights": 2, "dindex_k": 1}
    for name, found, columns, shared in walk(case, cut, plan):
        if name == "loss":
            torch.testing.assert_close(found, expected["loss"], rtol=1e-11, atol=1e-12)
            continue
        whole = expected[name].narrow(token_dim[name], columns.start, columns.stop - columns.start)
        if shared:
            whole = whole.sum(0, keepdim=True) if name.startswith("d") else whole[:1]
        torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12, msg=lambda m: f"{name} {columns}: {m}")


def _columns(layout: BlockLayout) -> slice:
    return slice(layout.start + layout.first, layout.start + layout.first + layout.mine)


def _rows(x: torch.Tensor, dim: int, layout: BlockLayout) -> torch.Tensor:
    """This rank's rows of a whole sequence, zeros after its end."""
    end = [x.new_zeros(*x.shape[:dim], layout.ranks * layout.rows, *x.shape[dim + 1 :])]
    return torch.cat([x, *end], dim).narrow(dim, layout.start + layout.slot * layout.rows, layout.rows).clone()


def _empty_pages(batch: int, t: dict[str, torch.Tensor]) -> tuple[TensorPages, TensorPages]:
    nowhere = torch.empty(0, dtype=torch.int64)
    return tuple(TensorPages(t[name].new_empty(batch, 0, t[name].shape[-1]), nowhere) for name in ("latents", "index_k"))


def _freeze(pages: TensorPages, layout: BlockLayout) -> TensorPages:
    """A view of the pages as they are now."""
    rows = torch.zeros(layout.ranks, dtype=torch.int64)
    rows[layout.rank] = pages.rows
    if layout.ranks > 1:
        torch.distributed.all_reduce(rows, group=layout.group)
    return TensorPages(pages.tensor, pages.at, layout.rank, tuple(rows.tolist()))


def _append(pages: tuple[TensorPages, TensorPages], run: dict, layout: BlockLayout) -> None:
    at = torch.arange(_columns(layout).start, _columns(layout).stop)
    for page, name in zip(pages, ("latents", "index_k")):
        page.tensor, page.at = torch.cat([page.tensor, run[name]], 1), torch.cat([page.at, at])


def _geometry(cut: Walk, layout: BlockLayout, history) -> LatentGeometry:
    return LatentGeometry(
        layout, SCALE, VALUES, cut.rows_at_once, tuple(latents for latents, _ in history), cut.elements_at_once, cut.exchange
    )


def _select(case: LatentCase, cut: Walk, layout: BlockLayout, run: dict, history) -> Selection:
    geometry = SelectionGeometry(
        layout, case.top_k, case.relu, cut.rows_at_once, tuple(index for _, index in history), cut.keys_at_once,
        cut.scores_at_once,
    )
    return select(run["index_q"], run["weights"], run["index_k"], geometry)


def _differentiate_indexer(case: LatentCase, cut: Walk, layout: BlockLayout, run: dict, history, batch: int):
    latents, index = (tuple(pages) for pages in zip(*history))
    selection = run["selection"]
    if selection is None:
        selection = select_everything(layout, cut.rows_at_once, index, batch, torch.device("cpu"))
    geometry = IndexerLossGeometry(layout, SCALE, case.relu, cut.rows_at_once, latents, index, cut.elements_at_once)
    row_weights = _rows(case.draw()["row_weights"][:batch], 1, layout)
    row_weights[:, layout.mine :] = 0
    main = MainAttention(run["q"], run["latents"], run["lse"])
    return differentiate_indexer(
        run["index_q"], run["weights"], run["index_k"], main, row_weights, selection, geometry
    )


def _forward_block(case: LatentCase, cut: Walk, layout: BlockLayout, batch: int, history) -> dict:
    t, own = case.draw(), _columns(layout)
    run = {name: _rows(t[name][:batch], 2, layout) for name in ("q", "index_q", "weights")}
    run |= {name: t[name][:batch, own].clone() for name in ("latents", "index_k")}
    run["selection"] = None if cut.dense else _select(case, cut, layout, run, history)
    run["o"], run["lse"] = attend_latents(run["q"], run["latents"], run["selection"], _geometry(cut, layout, history))
    assert run["o"].isfinite().all()
    return run
