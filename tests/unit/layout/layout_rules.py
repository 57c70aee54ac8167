"""The rules that the tree keeps, as functions from a folder to a list of sentences, one for each breach.

Imports are read from the syntax tree, wherever they stand: in functions, under `if TYPE_CHECKING`, as literal arguments
of `import_module`. Left out: names that are computed at run time.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS = (
    {"longstraw.prompt_state", "longstraw.attention", "longstraw.objectives", "longstraw.optim", "longstraw.segments",
     "longstraw.memory_meter", "longstraw.memory_scopes", "longstraw.durable_files", "longstraw.exchanges"},
    {"longstraw.sweeps", "longstraw.sweep_config", "longstraw.adapters", "longstraw.patches"},
    {"longstraw.transaction", "longstraw.rollout", "longstraw.receipts", "longstraw.dry_run"},
    {"megatron.grpo"},
    {"tools", "examples", "benchmarks"},
)
"""Lowest first. A package imports from its own layer and from those below it. A new package is entered here first."""

MAY_IMPORT_MEGATRON = {"longstraw.adapters", "longstraw.patches", "megatron.grpo"}

KERNEL_PACKAGES = {"torch", "triton", "numpy", "einops", "flash_attn", "fla"}
"""What the lowest layer may use besides the standard library."""

OTHER_PACKAGES = KERNEL_PACKAGES | {
    "transformers", "tokenizers", "safetensors", "sentencepiece", "jinja2", "gguf", "datasets", "pyarrow", "math_verify",
    "huggingface_hub", "reasoning_gym", "rich", "matplotlib", "tensorboard", "psutil", "packaging", "transformer_engine", "wandb", "vllm", "trl", "prefix_grouper"}
"""What the other layers may use: each is pinned in requirements/ or an optional extra."""

SOURCE_FOLDERS = ("longstraw", "megatron", "tools", "examples", "benchmarks")
LONGEST_FILE = 500
# Written in parts, so that this file keeps its own rule.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:" + "|".join(("work", "root", "tmp/plan", r"home/\w+")) + r")(?=[/\s\"'`:,;)]|$)")


def list_files(root: Path) -> list[Path]:
    """Files that are, or would be, under version control."""
    listing = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root,
                             capture_output=True, text=True)
    if listing.returncode == 0:
        return [root / name for name in listing.stdout.split("\0") if name and (root / name).is_file()]
    return [path for path in sorted(root.rglob("*")) if path.is_file()
            and not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts[:-1])]


def module_of(path: Path, root: Path) -> str:
    """longstraw/attention/paged.py -> longstraw.attention.paged; a package's __init__.py is the package."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def list_imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports; `from a import b` gives a.b."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [*package.split(".")[:len(package.split(".")) - node.level + 1], node.module])) \
                if node.level else node.module
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def find_layer(name: str) -> tuple[int, str] | None:
    """(number, package) of the layer that a dotted name belongs to."""
    for number, packages in enumerate(LAYERS):
        for package in packages:
            if name == package or name.startswith(package + "."):
                return number, package
    return None


def check_imports(root: Path) -> list[str]:
    """Breaches of the dependency direction, and imports of packages that no rule knows."""
    breaches = []
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            module = module_of(path, root)
            if module == "longstraw":
                own = (-1, "longstraw")
            elif (own := find_layer(module)) is None:
                breaches.append(f"{path.relative_to(root)}: {module} is in no layer; enter its package in LAYERS")
                continue
            siblings = {other.stem for other in path.parent.iterdir()}
            for line, name in list_imports(path, module):
                if breach := judge_import(own, name, siblings):
                    breaches.append(f"{path.relative_to(root)}:{line}: {breach}")
    return breaches


def judge_import(own: tuple[int, str], name: str, siblings: set[str]) -> str | None:
    """What is wrong with a package of layer `own` importing `name`, if anything."""
    layer, package = own
    top = name.split(".")[0]
    if top in sys.stdlib_module_names or name == "longstraw.__version__" or name == "longstraw":
        return None
    if (target := find_layer(name)) is not None:
        return f"{package} imports {name}, which lies above it" if target[0] > layer else None
    if top == "megatron":
        return None if package in MAY_IMPORT_MEGATRON else f"{package} imports {name}; only {sorted(MAY_IMPORT_MEGATRON)} may"
    if top == "longstraw":
        return f"{package} imports {name}, which is in no layer; enter its package in LAYERS"
    if package in LAYERS[-1] and top in siblings:
        return None  # programs import their neighbours by bare name
    allowed = KERNEL_PACKAGES if layer <= 0 else OTHER_PACKAGES
    return None if top in allowed else f"{package} imports {name}, a package that this layer may not use"


def check_namespace(root: Path) -> list[str]:
    """megatron/ is shared with megatron-core: it holds grpo and nothing else, and no __init__.py."""
    return [f"{path.relative_to(root)} would hide or overlay the installed megatron-core"
            for path in sorted((root / "megatron").iterdir()) if path.name not in ("grpo", "__pycache__")]


def check_lengths(root: Path) -> list[str]:
    """Files that hold more than one idea can."""
    breaches = []
    for path in list_files(root):
        if path.suffix in (".py", ".sh", ".md"):
            lines = len(path.read_text().splitlines())
            if lines > LONGEST_FILE:
                breaches.append(f"{path.relative_to(root)} has {lines} lines, more than {LONGEST_FILE}")
    return breaches


def check_paths(root: Path) -> list[str]:
    """Absolute paths of somebody's machine."""
    breaches = []
    for path in list_files(root):
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a picture or a weight file
        for number, line in enumerate(text.splitlines(), start=1):
            if found := MACHINE_PATH.search(line):
                breaches.append(f"{path.relative_to(root)}:{number}: names {found.group()}, a path of one machine")
    return breaches
