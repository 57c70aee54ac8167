"""Whether the host has room for a prompt's state, asked before any of it is allocated.

What a prompt's state will hold is known from shapes alone: adapters list it as ledger entries (`foresee`). Ranks of one
host share its memory. The refusal names the bytes of each kind and the flag that moves or removes it.

Left out: device memory, which allocators fragment; the state of responses, which is one response's at a time.
"""

from collections import defaultdict
from collections.abc import Iterable

from longstraw.prompt_state.ledger import LedgerEntry

_RELIEF = {
    "kv_pages": "--page-residency device",
    "latent_pages": "--page-residency device",
    "routing": "--page-residency device",
    "recurrent_state": "--recurrent-state-residency device",
    "conv_state": "--recurrent-state-residency device",
    "index_pages": "--index-page-residency device",
    "kv_adjoint": "--adjoint-residency device",
    "latent_adjoint": "--adjoint-residency device",
    "index_adjoint": "--adjoint-residency device",
    "attention_output": "--attention-output-residency none",
    "selection": "--selection-residency none",
}
"""The flag that takes each kind of state off the host."""

_GIB = 2**30


def explain_shortage(entries: Iterable[LedgerEntry], *, tokens: int, free: int, ranks: int) -> str:
    """One sentence where `ranks` ranks of one host, with these entries each, need more than `free` bytes; "" if they fit.

    tokens: of the prompt, for the sentence.
    """
    host: dict[str, int] = defaultdict(int)
    for entry in entries:
        if entry.residency == "host":
            host[entry.kind] += entry.bytes
    needed = ranks * sum(host.values())
    if needed <= free:
        return ""
    kinds = sorted(host.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{ranks * size / _GIB:.2f} GiB {kind} ({_RELIEF[kind]} takes them off the host)" for kind, size in kinds)
    return (
        f"a prompt of {tokens} tokens needs {needed / _GIB:.2f} GiB of host memory for its state on the {ranks} ranks of this "
        f"host, of which {free / _GIB:.2f} GiB are free: {parts}; more ranks of --context-parallel-size or a smaller "
        "--prompt-length-limit need less of each"
    )
