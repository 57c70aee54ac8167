"""Segments: spans of tokens that follow a parent, and the state that each leaves.

A prompt is a segment without loss, a response one with loss; a prefix that only some responses share is a segment
between them. `Segment` is the work to do; `SegmentState` is what running it leaves behind for the segments that follow.

A prompt segment stops one token short of the prompt, and each response begins with that token, which predicts the
response's first: see `grow_group`.

B batch, S tokens of the segment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from longstraw.attention.layout import BlockLayout

BlockLoss = Callable[[torch.Tensor, slice], torch.Tensor]
"""Loss of one block: (log-probabilities [B, M] of the M tokens that this rank owns, their columns in the segment) -> a
scalar with gradient. The sum over blocks and ranks is the segment's loss: a normaliser is in the weights already."""


@dataclass(eq=False)
class Segment:
    """inputs [B, S] (S may be 0); targets [B, S] and loss, or neither; children follow the last input.

    row_weights: [B, S], what each row weighs in losses that layers add (the indexer's): the weight of its target's loss.
    Wanted by a model with such a loss, in a segment with targets.

    routes: layer number -> the experts [B, S, K] that its rows go to, where the router is not to choose.

    captures_only: nothing but the state is wanted of it, so its last layer stops there. block_size: of its blocks, where
    it is not the config's.
    """

    name: str
    inputs: torch.Tensor
    targets: torch.Tensor | None = None
    loss: BlockLoss | None = None
    children: list["Segment"] = field(default_factory=list)
    captures_only: bool = False
    block_size: int | None = None
    row_weights: torch.Tensor | None = None
    routes: dict[int, torch.Tensor] | None = None

    def __post_init__(self):
        if self.inputs.dim() != 2:
            raise ValueError(f"segment {self.name}: inputs are [batch, tokens], not {tuple(self.inputs.shape)}")
        if self.targets is not None and self.targets.shape != self.inputs.shape:
            raise ValueError(f"segment {self.name}: {tuple(self.targets.shape)} targets for {tuple(self.inputs.shape)} inputs")
        if self.row_weights is not None and self.row_weights.shape != self.inputs.shape:
            raise ValueError(
                f"segment {self.name}: row weights {tuple(self.row_weights.shape)} for {tuple(self.inputs.shape)} inputs"
            )

    @property
    def length(self) -> int:
        """Tokens of the segment."""
        return self.inputs.shape[1]


@dataclass(eq=False)
class SegmentState:
    """What a segment's sweep has left, layer by layer: pages of attention layers, boundary states of GDN layers, routing.

    parent: the state that the segment follows. plan: its blocks. layers: the adapter's key -> its state.
    constant: later segments treat this state as a constant (`response_only`): they add nothing to its adjoints.
    predicts: the segment has targets. row_weights, routes: the segment's. live: graphs of its last blocks that the forward sweep
    kept, block -> (hidden, runs); None where it keeps none. outlives: the reverse sweep leaves what later
    segments read of it (pages, end states); only adjoints are used up.
    """

    name: str
    parent: "SegmentState | None"
    plan: list[BlockLayout]
    batch: int
    start: int
    layers: dict[object, object] = field(default_factory=dict)
    constant: bool = False
    predicts: bool = False
    row_weights: torch.Tensor | None = None
    routes: dict[int, torch.Tensor] | None = None
    outlives: bool = False
    live: dict[int, tuple] | None = None
    _positions: torch.Tensor | None = None

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.plan[-1].start + self.plan[-1].length if self.plan else self.start

    def rows_before(self, block: int) -> int:
        """Tokens that this rank owns in the blocks before `block`."""
        return sum(layout.mine for layout in self.plan[:block])

    @property
    def padded_rows(self) -> int:
        """Rows that each rank runs in all blocks, padding included."""
        return sum(layout.rows for layout in self.plan)

    def rows_of_ranks_before(self, block: int) -> tuple[int, ...]:
        """Tokens that each rank owns in the blocks before `block`."""
        ranks = self.plan[0].ranks if self.plan else 1
        return tuple(sum(layout.tokens_of(rank) for layout in self.plan[:block]) for rank in range(ranks))

    def own_positions(self, device: torch.device) -> torch.Tensor:
        """Positions [N] (int64, ascending) of all tokens that this rank owns in the segment: those of its pages' rows."""
        if self._positions is None:
            firsts = [layout.start + layout.first for layout in self.plan]
            spans = [torch.arange(at, at + layout.mine) for at, layout in zip(firsts, self.plan)]
            self._positions = torch.cat([torch.empty(0, dtype=torch.int64), *spans]).to(device)
        return self._positions

    def ancestors(self) -> list["SegmentState"]:
        """The states that this segment follows, the root first."""
        return [] if self.parent is None else [*self.parent.ancestors(), self.parent]


def cut_columns(state: SegmentState, block: int) -> slice:
    """The columns of the segment's [B, S] tensors that lie in a block."""
    layout = state.plan[block]
    at = layout.start - state.start
    return slice(at, at + layout.length)


def own_columns(state: SegmentState, block: int) -> slice:
    """The columns of the segment's [B, S] tensors that this rank owns in a block."""
    layout = state.plan[block]
    at = layout.start - state.start + layout.first
    return slice(at, at + layout.mine)


def grow_group(prompt: torch.Tensor, responses: list[torch.Tensor], losses: list[BlockLoss]) -> Segment:
    """The tree of one prompt [1, P] and responses [B, R] each (B responses replayed together): root and leaves.

    Raises ValueError for an empty prompt or response.
    """
    if prompt.shape[1] == 0 or any(r.shape[1] == 0 for r in responses):
        raise ValueError("a prompt and a response have at least 1 token")
    root = prompt_segment(prompt)
    for index, (response, loss) in enumerate(zip(responses, losses, strict=True)):
        root.children.append(response_segment(f"response{index}", prompt, response, loss))
    return root


def prompt_segment(prompt: torch.Tensor) -> Segment:
    """The segment of a prompt [1, P]: all but its last token, without loss."""
    return Segment("prompt", prompt[:, :-1], captures_only=True)


def response_segment(name: str, prompt: torch.Tensor, response: torch.Tensor, loss: BlockLoss | None = None) -> Segment:
    """The segment of B responses [B, R] to a prompt [1, P]: it begins with the prompt's last token."""
    last = prompt[:, -1:].expand(response.shape[0], 1)
    return Segment(name, torch.cat([last, response[:, :-1]], 1), response, loss)
