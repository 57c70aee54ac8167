"""How the sweeps cut segments, where state lives, and what the gradient means: the flags of `longstraw.sweeps`."""

from dataclasses import dataclass
from typing import Literal, get_args

from longstraw.attention.geometry import Exchange
from longstraw.prompt_state.kept import KeptResidency
from longstraw.prompt_state.residency import Residency

Semantics = Literal["exact", "response_only"]


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """How segments are cut, where their state lives, and what the gradient means."""

    semantics: Semantics = "exact"
    """What the gradient is: `exact`, the full gradient; `response_only`, the prompt state as a constant."""

    prompt_chunk_size: int = 4096
    """Tokens of the prompt per chunk: the live graph of the prompt's reverse sweep is one chunk of this size."""

    response_block_size: int = 1024
    """Tokens of a response per block: the live graph of a replay is one block of this size."""

    page_residency: Residency = "device"
    """Where keys and values (or latents) of earlier tokens live: `device`, or `host` (pinned, staged one layer ahead)."""

    recurrent_state_residency: Residency = "device"
    """Where the boundary states of a prompt's gated delta net layers live, one a layer and chunk: `device` or `host`. With long
    prompts and small chunks they are the largest thing on the device that could be elsewhere."""

    index_page_residency: Residency = "device"
    """Where the index keys of sparse attention live, which select among the latents: `device` or `host`."""

    adjoint_residency: Residency = "device"
    """Where the gradients of those keys and values (or latents) accumulate: `device` or `host`."""

    attention_output_residency: KeptResidency = "none"
    """Keep the prompt's attention outputs and log-sum-exps for the reverse sweep on `host` or `device`, so that it does
    not redo the quadratic part; `none` recomputes. Both are exact."""

    selection_residency: KeptResidency = "none"
    """Keep what sparse attention selected for the reverse sweep on `host` or `device`, so that it does not score all keys
    again; `none` selects again. Both are exact."""

    live_chunks: int = 0
    """Chunks at the prompt's end whose graphs are kept from the forward sweep, so that the reverse sweep does not run them again:
    activations of so many chunks more, so many forwards fewer. Exact; 0 keeps none."""

    query_rows_at_once: int = 4096
    """Rows per rank that are gathered over context parallel at a time (of queries or keys); bounds the buffer."""

    attention_exchange: Exchange = "auto"
    """What full attention passes between context-parallel ranks: `queries`, `keys` (with their values), or `auto`, what
    moves fewer bytes, block by block. The same result to rounding."""

    logprob_chunk_tokens: int = 1024
    """Tokens of the vocabulary projection at a time: no float32 [tokens, vocabulary] tensor is larger than this."""

    def __post_init__(self):
        for name in ("prompt_chunk_size", "response_block_size", "query_rows_at_once", "logprob_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is at least 1, not {getattr(self, name)}")
        if self.live_chunks < 0:
            raise ValueError(f"--live-chunks is at least 0, not {self.live_chunks}")
        if self.live_chunks and self.semantics == "response_only":
            raise ValueError(f"--live-chunks {self.live_chunks} keeps graphs of the prompt, which --semantics response_only never reads")
        for names, places in (
            (("page_residency", "recurrent_state_residency", "index_page_residency", "adjoint_residency"), get_args(Residency)),
            (("attention_output_residency", "selection_residency"), get_args(KeptResidency)),
        ):
            for name in names:
                if getattr(self, name) not in places:
                    raise ValueError(f"--{name.replace('_', '-')} is one of {', '.join(places)}, not {getattr(self, name)}")
