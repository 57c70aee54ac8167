"""The tree keeps its layout rules, and each rule sees the breach it is there for."""

from pathlib import Path

import pytest
from layout_rules import LAYERS, check_imports, check_lengths, check_namespace, check_paths, find_layer, list_imports

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("check", [check_imports, check_namespace, check_lengths, check_paths])
def test_the_tree_keeps_its_rules(check):
    assert check(ROOT) == []


def test_there_is_something_to_check():
    checked = {find_layer(f"longstraw.{path.stem}") for path in (ROOT / "longstraw").iterdir()} - {None}
    assert len(checked) >= 5 and sum(map(len, LAYERS)) == len(set().union(*LAYERS))


@pytest.fixture
def tree(tmp_path):
    """Writes a file of a tree that is otherwise in order; returns the tree."""
    def write(path: str, text: str) -> Path:
        for name, content in (("longstraw/__init__.py", ""), ("megatron/grpo/__init__.py", ""), (path, text)):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        return tmp_path

    return write


@pytest.mark.parametrize("path, text, breach", [
    ("longstraw/attention/paged.py", "import megatron.core", "longstraw.attention imports megatron.core; only"),
    ("longstraw/objectives/losses.py", "def f():\n    from megatron.core import x", "only ['longstraw.adapters'"),
    ("longstraw/optim/adam.py", "import importlib\nimportlib.import_module('megatron.core.optimizer')", "optim imports megatron"),
    ("longstraw/sweeps.py", "import megatron.core", "longstraw.sweeps imports megatron.core; only"),
    ("longstraw/receipts/plots.py", "from megatron.training import x", "longstraw.receipts imports megatron.training.x"),
    ("tools/audit.py", "from megatron import core", "tools imports megatron.core; only"),
    ("longstraw/attention/paged.py", "from longstraw.adapters import base", "longstraw.adapters.base, which lies above it"),
    ("longstraw/attention/paged.py", "from ..adapters.base import x", "longstraw.adapters.base.x, which lies above it"),
    ("longstraw/attention/__init__.py", "from ..sweeps import x", "longstraw.sweeps.x, which lies above it"),
    ("longstraw/prompt_state/pages.py", "from longstraw import sweeps", "longstraw.sweeps, which lies above it"),
    ("longstraw/adapters/base.py", "import longstraw.transaction", "longstraw.transaction, which lies above it"),
    ("longstraw/receipts/plots.py", "import megatron.grpo.train", "megatron.grpo.train, which lies above it"),
    ("longstraw/__init__.py", "import longstraw.segments", "longstraw imports longstraw.segments, which lies above it"),
    ("longstraw/__init__.py", "import rich", "longstraw imports rich"),
    ("longstraw/helpers/misc.py", "", "longstraw.helpers.misc is in no layer"),
    ("longstraw/sweeps.py", "from longstraw.helpers import x", "longstraw.helpers.x, which is in no layer"),
    ("megatron/other/x.py", "", "megatron.other.x is in no layer"),
    ("longstraw/attention/paged.py", "import transformers", "a package that this layer may not use"),
    ("megatron/grpo/train.py", "import apex", "megatron.grpo imports apex, a package that this layer may not use"),
    ("longstraw/attention/paged.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import megatron.core", "only"),
])
def test_a_forbidden_import_is_seen(tree, path, text, breach):
    found = check_imports(tree(path, text))
    assert len(found) == 1 and breach in found[0], found


@pytest.mark.parametrize("path, text", [
    ("longstraw/attention/paged.py", "import math\nimport torch\nfrom .exchange import x\nfrom longstraw.segments import s"),
    ("longstraw/adapters/gqa.py", "from megatron.core.transformer import x\nimport longstraw.patches.device"),
    ("longstraw/receipts/collect.py", "import longstraw\nfrom longstraw import __version__\nimport rich"),
    ("megatron/grpo/train.py", "import megatron.training\nfrom longstraw.sweeps import x\nimport transformers"),
    ("tools/audit.py", "from longstraw.sweeps import x\nimport megatron.grpo.presets"),
])
def test_an_allowed_import_is_let_through(tree, path, text):
    assert check_imports(tree(path, text)) == []


def test_programs_import_their_neighbours(tree):
    tree("tools/launch_rank.py", "")
    assert check_imports(tree("tools/launch.py", "import launch_rank")) == []
    assert check_imports(tree("tools/launch.py", "import stranger"))


def test_relative_imports_are_resolved(tmp_path):
    (tmp_path / "module.py").write_text("from . import a\nfrom .b import c\nfrom .. import d")
    assert [name for _, name in list_imports(tmp_path / "module.py", "x.y.module")] == ["x.y.a", "x.y.b.c", "x.d"]


@pytest.mark.parametrize("path", ["megatron/__init__.py", "megatron/core/extra.py", "megatron/training/extra.py"])
def test_a_path_of_megatron_core_is_seen(tree, path):
    assert any("megatron-core" in breach for breach in check_namespace(tree(path, "")))


def test_a_long_file_is_seen(tree):
    assert check_lengths(tree("tools/long.py", "x = 1\n" * 500)) == []
    assert check_lengths(tree("tools/long.py", "x = 1\n" * 501)) == ["tools/long.py has 501 lines, more than 500"]


@pytest.mark.parametrize("line", ["cd /wo" "rk/main", 'open("/ro' 'ot/x")', "see /tmp/pl" "an/CONTRACT.md", "/ho" "me/me/x",
                                  "at /wo" "rk"])
def test_a_path_of_one_machine_is_seen(tree, line):
    assert len(check_paths(tree("README.md", f"fine\n{line}\n"))) == 1


@pytest.mark.parametrize("line", ["runs/work/x", "the/root/of", "$HOME/.pyenv", "/tmp/x", "a/work/b", "~/work/x", "/workspace/x"])
def test_other_paths_are_let_through(tree, line):
    assert check_paths(tree("README.md", line)) == []
