"""Rollouts from the captured prompt state: a group's responses decoded together, one token a block.

The prompt is not run again: the group is a segment of batch G that follows the prompt's state, as a response does in a
replay. Every rank of tensor and context parallelism sees the same logits and draws with the same generator, so all have
the same tokens. When half of the responses have stopped, the others go on in a smaller batch.

Left out: speculative decoding, continuous batching over prompts.

G responses of a group, V vocabulary.
"""

import torch

from longstraw.adapters.decoder import last_token_logits
from longstraw.attention.exchange import gather_rows
from longstraw.patches.device import current_device
from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.protocol import Sample
from longstraw.rollout.routes import RoutedExperts
from longstraw.rollout.sampling import sample_tokens
from longstraw.segments import Segment, SegmentState
from longstraw.sweeps import ReplayEngine


@torch.no_grad()
def decode_group(
    engine: ReplayEngine, prompt: torch.Tensor, state: SegmentState, *, group_size: int, config: SamplingConfig,
    stop_ids: frozenset[int], generator: torch.Generator, prompt_id: str = "", weight_version: int = 0,
    num_tokens: int | None = None, record_routes: bool = False,
) -> list[Sample]:
    """Sample `group_size` responses to a prompt [1, P] from its captured state; the state is left as it was.

    num_tokens: ids from here on are not sampled (a model may have more rows than its tokenizer has tokens). generator: on
    the CPU, in the same state on every rank of tensor and context parallelism. record_routes: the samples say to which
    experts their rows went.
    """
    inputs = prompt.new_zeros(group_size, config.max_response_length)
    inputs[:, 0] = prompt[0, -1]
    segment = Segment("rollout", inputs, block_size=1)
    decoding = engine.open_segment(segment, state)
    drafts = [_Draft() for _ in range(group_size)]
    routers = engine.routers if record_routes else []
    layers = [adapter.layer_number for adapter in routers]
    active = list(range(group_size))  # the drafts that the rows of the batch belong to
    for position in range(config.max_response_length):
        hidden = engine.run_forward(segment, decoding, position)
        routes = _gather_routes(routers, decoding, position) if routers else [None] * len(active)
        engine.forget_block(decoding, position)
        logits = last_token_logits(engine.model, hidden, decoding.plan[position], engine.vocab_size)
        if num_tokens is not None:
            logits[:, num_tokens:] = -torch.inf
        # one row of numbers per response, stopped or not: a response does not depend on when others stop
        uniform_rows = sample_tokens(_spread(logits, active, group_size), config, generator)
        tokens = uniform_rows.token_ids[active].tolist()
        logprobs = uniform_rows.sampling_logprobs[active].tolist()
        for row, draft in enumerate(active):
            drafts[draft].add(tokens[row], logprobs[row], routes[row], stop_ids)
        running = [row for row, draft in enumerate(active) if not drafts[draft].stopped]
        if not running:
            break
        if position + 1 < config.max_response_length:
            segment.inputs[:, position + 1] = torch.tensor(tokens, device=prompt.device)
        if 2 * len(running) <= len(active):
            _select_rows(engine, segment, decoding, running)
            active = [active[row] for row in running]
    return [draft.finish(prompt_id, weight_version, layers) for draft in drafts]


def _gather_routes(routers: list, decoding: SegmentState, position: int) -> torch.Tensor:
    """The experts [b, L, K] that the block of one token went to, on every rank: its owner knows them. Collective over CP."""
    layout, batch = decoding.plan[position], decoding.batch
    device = current_device()
    own = torch.stack([decoding.layers[router.key].read(position, device) for router in routers], 1)  # [mine * b, L, K]
    rows = own.view(layout.mine, batch, *own.shape[1:]).transpose(0, 1).flatten(2)  # [b, mine, L * K]
    padded = torch.nn.functional.pad(rows, (0, 0, 0, layout.rows - layout.mine))
    return gather_rows(padded[:, None], layout)[:, 0, 0].unflatten(1, own.shape[1:]).cpu()


def _spread(logits: torch.Tensor, active: list[int], group_size: int) -> torch.Tensor:
    """Logits of the running rows [b, V] at their places among all [G, V]; the others' rows are uniform."""
    if len(active) == group_size:
        return logits
    spread = logits.new_zeros(group_size, logits.shape[1])
    spread[active] = logits
    return spread


def _select_rows(engine: ReplayEngine, segment: Segment, decoding: SegmentState, rows: list[int]) -> None:
    """Let the given rows go on as a smaller batch."""
    index = torch.tensor(rows, device=segment.inputs.device)
    segment.inputs = segment.inputs.index_select(0, index)
    decoding.batch = len(rows)
    for adapter in engine.adapters:
        adapter.select_batch(decoding, index)


class _Draft:
    """A response while it grows."""

    def __init__(self):
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.routes: list[torch.Tensor] = []
        self.stopped = False

    def add(self, token: int, logprob: float, routes: torch.Tensor | None, stop_ids: frozenset[int]) -> None:
        """Append a token, and the experts [L, K] of the row that predicted it, unless the response has ended."""
        if not self.stopped:
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            if routes is not None:
                self.routes.append(routes)
            self.stopped = token in stop_ids

    def finish(self, prompt_id: str, weight_version: int, layers: list[int]) -> Sample:
        """The response as a sample."""
        return Sample(
            prompt_id=prompt_id, token_ids=tuple(self.token_ids), logprobs=tuple(self.logprobs),
            finish_reason="stop" if self.stopped else "length", weight_version=weight_version,
            routes=RoutedExperts.from_tensor(torch.stack(self.routes), layers) if self.routes else None,
        )
