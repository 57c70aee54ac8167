"""What `tools/audit_gradients.py` refuses before it starts a rank, and where it writes its report."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.audit_gradients import parse_arguments  # noqa: E402


@pytest.mark.parametrize(
    "bad, sentence",
    [
        ("--response-lengths a", "--response-lengths a are not whole numbers"),
        ("--response-lengths 3,,4", "--response-lengths 3,,4 are not whole numbers"),
        ("--response-lengths 3,0", "each of --response-lengths is at least 1, not 0"),
        ("--prompt-length 0", "--prompt-length is at least 1, not 0"),
        ("--chunk-size 0", "--chunk-size is at least 1, not 0"),
        ("--block-size -1", "--block-size is at least 1, not -1"),
        ("--query-rows-at-once 0", "--query-rows-at-once is at least 1, not 0"),
        ("--context-parallel-size 0", "--context-parallel-size is at least 1, not 0"),
        ("--expert-model-parallel-size 0", "--expert-model-parallel-size is at least 1, not 0"),
        ("--seed 1180591620717411303424", "--seed lies between 0 and 2^63 - 1"),
        ("--json no-such-folder/report.json", "there is no folder no-such-folder"),
        ("--json .", "--json . is a folder"),
        ("--model-preset none", "--model-preset none is not known"),
        ("--selection-residency disk", "--selection-residency"),
    ],
)
def test_refused_in_a_sentence(bad, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(bad.split())
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_what_is_asked_for_comes_back(tmp_path):
    path = str(tmp_path / "report.json")
    args = parse_arguments(
        ["--response-lengths", "3,1", "--index-page-residency", "host", "--selection-residency", "host", "--json", path]
    )
    assert args.response_lengths == [3, 1] and args.json == path
    assert (args.index_page_residency, args.selection_residency) == ("host", "host")
