"""A built wheel installs beside megatron-core without touching it, and what is declared agrees with what is pinned."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
NOT_WHAT_THEY_SEEM = {"apex", "flash-mla", "deep-ep", "deep-gemm"}


def read_requirements(name: str) -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines())
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, filter(None, lines))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built offline from a copy of the sources, in a folder with a space."""
    source = tmp_path_factory.mktemp("source of") / "the project"
    for folder in ("longstraw", "megatron"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-build-isolation", "--no-deps",
                    "-w", source / "built", source], check=True, timeout=200)
    return next((source / "built").glob("*.whl"))


def test_the_wheel_holds_both_packages_and_nothing_of_megatron_core(wheel):
    ours = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    theirs = {str(path) for path in importlib.metadata.files("megatron-core")}
    copied = wheel.parents[1]
    sources = {str(path.relative_to(copied)) for folder in ("longstraw", "megatron")
               for path in (copied / folder).rglob("*") if path.suffix in (".py", ".json")}
    assert ours == sources
    assert not ours & theirs
    assert {name.split("/")[0] for name in ours} == {"longstraw", "megatron"}
    assert {"/".join(name.split("/")[:2]) for name in ours if name.startswith("megatron")} == {"megatron/grpo"}
    assert "megatron/__init__.py" not in ours


def test_the_wheel_works_beside_megatron_core_from_another_folder(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", tmp_path / "site",
                    wheel], check=True, timeout=200)
    program = """
import importlib.util, importlib.metadata, longstraw, longstraw.receipts.receipt, megatron.grpo
print(longstraw.__file__, megatron.grpo.__file__, importlib.util.find_spec("megatron.core").origin, sep="\\n")
assert longstraw.receipts.receipt.read_receipt and importlib.metadata.version("longstraw") == longstraw.__version__
assert (importlib.resources.files("longstraw") / "receipts/receipt.schema.json").is_file()
"""
    # -S keeps this environment's editable install of the sources out of sight.
    path = os.pathsep.join([str(tmp_path / "site"), sysconfig.get_path("purelib")])
    shown = subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
                           check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert shown[0].startswith(str(tmp_path)) and shown[1].startswith(str(tmp_path))
    assert Path(shown[2]).parts[-3:] == ("megatron", "core", "__init__.py") and not shown[2].startswith(str(tmp_path))


def test_every_declared_dependency_is_pinned_inside_its_range():
    declared = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    pinned = read_requirements("base.txt")
    for requirement in declared:
        pin = pinned.pop(canonicalize_name(requirement.name))
        version = re.fullmatch(r"==([\w.]+)", str(pin.specifier)).group(1)
        assert requirement.specifier.contains(version), f"{pin} is outside {requirement}"
    assert set(pinned) == {"setuptools"}, "what is pinned beyond the declared is what builds the project"


@pytest.mark.parametrize("name", ["base.txt", "test.txt", "models.txt", "benchmarks.txt"])
def test_requirements_are_exact_and_are_what_runs_here(name):
    for requirement in read_requirements(name).values():
        assert str(requirement.specifier) == f"=={importlib.metadata.version(requirement.name)}"


def test_the_constraints_cover_what_is_required():
    constraints = read_requirements("constraints.txt")
    for name in ("base.txt", "test.txt"):
        for package, requirement in read_requirements(name).items():
            assert str(constraints[package].specifier) == str(requirement.specifier), package
    assert all(str(constraint.specifier).startswith("==") for constraint in constraints.values())


def test_no_requirement_names_somebody_elses_package_or_an_index():
    for file in (ROOT / "requirements").iterdir():
        assert not NOT_WHAT_THEY_SEEM & set(read_requirements(file.name))
        assert not re.search(r"https?://|^\s*-(i|f)\b|--(extra-)?index-url|--find-links", file.read_text(), re.M)
