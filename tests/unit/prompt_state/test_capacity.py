"""Host memory too small for a prompt's state is one sentence, with the bytes and the flags that reduce them."""

from longstraw.prompt_state.capacity import explain_shortage
from longstraw.prompt_state.ledger import LedgerEntry
from longstraw.receipts.host import read_free_host_bytes

GIB = 2**30
ENTRIES = [
    LedgerEntry("latent_pages", "prompt", 1, 0, 9, 3 * GIB, "host"), LedgerEntry("latent_pages", "prompt", 2, 0, 9, GIB, "host"),
    LedgerEntry("latent_adjoint", "prompt", 1, 0, 9, 8 * GIB, "host"), LedgerEntry("index_pages", "prompt", 1, 0, 9, GIB, "device"),
    LedgerEntry("selection", "prompt", 1, 0, 9, GIB // 2, "host"),
]  # fmt: skip


def test_what_fits_is_not_mentioned():
    assert explain_shortage(ENTRIES, tokens=1000, free=25 * GIB, ranks=2) == ""
    assert explain_shortage([], tokens=1000, free=0, ranks=8) == ""


def test_a_shortage_names_bytes_and_flags():
    text = explain_shortage(ENTRIES, tokens=2_097_152, free=24 * GIB, ranks=2)
    assert "2097152 tokens needs 25.00 GiB" in text and "2 ranks" in text and "24.00 GiB are free" in text
    assert "16.00 GiB latent_adjoint (--adjoint-residency device" in text
    assert "8.00 GiB latent_pages (--page-residency device" in text
    assert "1.00 GiB selection (--selection-residency none" in text
    assert "index_pages" not in text and "\n" not in text
    assert "--context-parallel-size" in text and "--prompt-length-limit" in text


def test_this_host_has_some_memory_free():
    assert 2**20 < read_free_host_bytes() < 2**50
