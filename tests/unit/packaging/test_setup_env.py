"""tools/setup_env.sh on a small project of its own, offline: made once, checked fast, repaired, safe when run twice.

The project has the real setup files and script, and requirement files that name tiny packages made here.
"""

import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)
TOOLS = ("bash awk cat cut date dirname flock head ls mkdir mktemp mv rm sha256sum sleep sort tail touch env").split()


def make_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """A package that holds one empty module."""
    info = f"{name}-{version}.dist-info"
    files = {f"{name}.py": "", f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
                 f"Requires-Dist: {requires}\n" if requires else ""),
             f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)


def repack_setuptools(folder: Path) -> str:
    """This environment's setuptools as a wheel again, so that nothing is downloaded; returns its version."""
    setuptools = importlib.metadata.distribution("setuptools")
    with zipfile.ZipFile(folder / f"setuptools-{setuptools.version}-py3-none-any.whl", "w") as wheel:
        for path in setuptools.files:
            if path.suffix != ".pyc" and path.parts[0] != ".." and path.name not in ("INSTALLER", "REQUESTED"):
                wheel.write(path.locate(), str(path))
    return setuptools.version


class Project:
    """A small project in a folder with spaces, and how its script is run."""

    def __init__(self, folder: Path):
        self.root, self.wheels, self.home = folder / "a small project", folder / "wheels", folder / "home"
        for made in (self.wheels, self.home, self.root / "tools", self.root / "longstraw", self.root / "requirements"):
            made.mkdir(parents=True)
        for file in ("setup.py", "pyproject.toml", "LICENSE", "tools/setup_env.sh", "tools/find_python.sh",
                     "longstraw/__init__.py"):
            shutil.copy(ROOT / file, self.root / file)
        (self.root / "README.md").write_text("small\n")
        make_wheel(self.wheels, "tinybase", "1.0")
        make_wheel(self.wheels, "tinybase", "1.1")
        make_wheel(self.wheels, "tinytest", "1.0")
        for name in ("tinymodel", "tinyrival"):
            make_wheel(self.wheels, name, "1.0", requires="a-package-that-must-never-be-asked-for")
        self.setuptools = repack_setuptools(self.wheels)
        self.require("1.0")

    def require(self, tinybase: str) -> None:
        for name, text in {"base.txt": f"# what runs\nsetuptools=={self.setuptools}\ntinybase=={tinybase}   # tiny\n",
                           "test.txt": "tinytest==1.0\n", "models.txt": "tinymodel==1.0\n", "benchmarks.txt": "tinyrival==1.0\n",
                           "constraints.txt": ""}.items():
            (self.root / "requirements" / name).write_text(text)

    @property
    def python(self) -> Path:
        return self.root / ".venv/bin/python"

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen:
        return subprocess.Popen(
            [self.root / "tools/setup_env.sh", *arguments], cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull,
                 "PIP_FIND_LINKS": self.wheels.as_uri(), "LONGSTRAW_PYTHON": BASE_PYTHON} | environ)

    def run(self, *arguments: str, **environ: str) -> tuple[int, str]:
        process = self.start(*arguments, **environ)
        shown, _ = process.communicate(timeout=250)
        return process.returncode, shown

    def ask(self, code: str) -> str:
        return subprocess.run([self.python, "-c", code], cwd="/", check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Project:
    """A project whose environment two runs made at once."""
    project = Project(tmp_path_factory.mktemp("set up"))
    runs = [project.start() for _ in range(2)]
    shown = [run.communicate(timeout=250)[0] for run in runs]
    if [run.returncode for run in runs] != [0, 0]:
        pytest.fail("\n".join(shown))
    assert sum("making" in text for text in shown) == 1, shown
    assert sum("waiting for it" in text for text in shown) == 1, shown
    assert all("is ready (Python 3.12" in text for text in shown)
    return project


def version_of(project: Project, name: str) -> str:
    return project.ask(f"import importlib.metadata as m; print(m.version('{name}'))")


def test_the_environment_holds_the_pins_and_the_project(made):
    assert [version_of(made, name) for name in ("tinybase", "tinytest", "tinymodel", "tinyrival")] == ["1.0"] * 4
    assert Path(made.ask("import longstraw; print(longstraw.__file__)")) == made.root / "longstraw/__init__.py"


def test_a_second_run_takes_less_than_a_second(made):
    """Of processor time, so that a busy machine is not taken for a slow script."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    status, shown = made.run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert status == 0 and shown.endswith(".venv is up to date\n") and shown.count("\n") == 1
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_a_missing_package_is_put_back(made):
    subprocess.run([made.python, "-m", "pip", "uninstall", "-qqy", "tinytest", "tinymodel"], check=True)
    status, shown = made.run()
    assert status == 0 and "bringing" in shown
    assert version_of(made, "tinytest") == version_of(made, "tinymodel") == "1.0"


def test_a_failed_install_is_reported_and_the_next_run_goes_on_with_a_moved_pin(made):
    (made.root / "requirements/test.txt").write_text("tinytest==9.9\n")
    status, shown = made.run()
    assert status == 1 and "pip could not install" in shown and "tinytest" in shown
    made.require("1.1")
    status, shown = made.run()
    assert status == 0 and "bringing" in shown and version_of(made, "tinybase") == "1.1"
    assert made.run()[1].endswith("is up to date\n")


def test_an_environment_whose_python_is_gone_is_made_anew(made):
    made.python.unlink()
    made.python.symlink_to("/nowhere/python3.12")
    status, shown = made.run()
    assert status == 0 and "making" in shown
    assert version_of(made, "tinytest") == "1.0"


def test_no_folder_of_others_is_touched(made, tmp_path):
    """Neither one that no set-up made, nor an environment that serves another checkout, whole or cut short."""
    own = tmp_path / "documents"
    own.mkdir()
    (own / "thesis.tex").write_text("years of work")
    status, shown = made.run(LONGSTRAW_VENV=str(own))
    assert status == 1 and "was not made by this script, so nothing in it is touched: let LONGSTRAW_VENV name a" in shown
    other = Project(tmp_path / "other")
    for cut_short in (False, True):
        if cut_short:
            (made.root / ".venv/longstraw-stamp").unlink()
        status, shown = other.run(LONGSTRAW_VENV=str(made.root / ".venv"))
        assert status == 1 and f"is the environment of {made.root}, so nothing in it is touched" in shown
    assert made.run()[0] == 0 and version_of(made, "tinytest") == "1.0"
    assert [file.name for file in own.iterdir()] == ["thesis.tex"]


def test_an_environment_elsewhere_is_made_in_an_empty_folder_and_kept(made, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert made.run(LONGSTRAW_VENV=str(elsewhere))[0] == 0
    (elsewhere / "longstraw-stamp").unlink()
    status, shown = made.run(LONGSTRAW_VENV=str(elsewhere))
    assert status == 0 and "bringing" in shown


def test_an_environment_that_was_moved_is_not_repaired(made):
    """Its scripts name the place where it was made; the stamp does too. A new one needs an interpreter: here there is none."""
    assert made.run(LONGSTRAW_PYTHON="/nowhere/python") == (0, f"setup_env: {made.root}/.venv is up to date\n")
    made.root = made.root.rename(made.root.with_name("the moved project"))
    status, shown = made.run(LONGSTRAW_PYTHON="/nowhere/python")
    assert status == 1 and "cannot be used" in shown and "bringing" not in shown
    assert made.python.exists(), "nothing is removed before there is something to replace it with"


@pytest.fixture
def machine(tmp_path):
    """A project on a machine with nothing on PATH but small tools, and a way to put programs there."""
    project = Project(tmp_path)
    project.path = tmp_path / "bin"
    project.path.mkdir()
    for tool in TOOLS:
        (project.path / tool).symlink_to(shutil.which(tool))

    def put(name: str, script: str, folder: Path = project.path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!{project.path}/bash\n{script}\n")
        (folder / name).chmod(0o755)
        return folder / name

    project.put = put
    return project


def find_python(project: Project, **environ: str) -> tuple[int, str]:
    status, shown = project.run("--print-python", PATH=str(project.path), **{"LONGSTRAW_PYTHON": "", **environ})
    return status, shown.strip().splitlines()[-1] if status == 0 else shown


def test_a_python_on_path_is_taken_and_its_base_is_named(machine):
    machine.put("python3.12", f'exec "{sys.executable}" "$@"')
    assert find_python(machine) == (0, BASE_PYTHON)


def test_a_shim_that_cannot_run_is_passed_over_for_pyenvs_versions(machine):
    machine.put("python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    machine.put("python3", f'exec "{BASE_PYTHON}" "$@"', machine.home / ".pyenv/versions/3.11.9/bin")
    machine.put("python3.12", f'exec "{BASE_PYTHON}" "$@"', machine.home / ".pyenv/versions/3.12.4/bin")
    assert find_python(machine) == (0, BASE_PYTHON)
    elsewhere = machine.home / "elsewhere"
    (machine.home / ".pyenv").rename(elsewhere)
    assert find_python(machine)[0] == 1
    machine.put("pyenv", f'[ "$1" = root ] && echo "{elsewhere}"')
    assert find_python(machine) == (0, BASE_PYTHON)


@pytest.mark.parametrize("already", [True, False])
def test_uv_finds_or_installs_one(machine, already):
    there = machine.home / "installed"
    if already:
        there.touch()
    machine.put("uv", f'''case "$*" in
    "python find --system 3.12") [ -e "{there}" ] && echo "{BASE_PYTHON}" ;;
    "python install 3.12") touch "{there}" ;;
    *) exit 9 ;;
esac''', machine.home / ".local/bin")
    assert find_python(machine) == (0, BASE_PYTHON)


def test_without_any_the_reasons_are_listed(machine):
    machine.put("python3.12", "echo broken >&2; exit 1")
    machine.put("python3", "echo 'is Python 3.11' >&2; exit 1")
    status, shown = find_python(machine)
    assert status == 1 and "no usable Python 3.12" in shown and "LONGSTRAW_PYTHON" in shown
    assert "bin/python3.12 broken" in shown and "bin/python3 is Python 3.11" in shown


def test_a_named_python_that_cannot_be_used_is_refused_and_nothing_changes(machine):
    machine.put("python3.12", f'exec "{BASE_PYTHON}" "$@"')
    status, shown = machine.run(PATH=str(machine.path), LONGSTRAW_PYTHON="/nowhere/python")
    assert status == 1 and "LONGSTRAW_PYTHON is set to an interpreter that cannot be used" in shown
    assert not (machine.root / ".venv").exists()


def test_an_unknown_argument_is_refused(machine):
    status, shown = machine.run("--help-me")
    assert status == 1 and "unknown argument --help-me" in shown
