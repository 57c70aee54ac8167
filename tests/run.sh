#!/usr/bin/env bash
# Runs the tests. Makes the environment first; needs nothing else.
#
#   ./tests/run.sh                         everything: single-process tests, then those that start ranks, three files at a time
#   ./tests/run.sh tests/unit/optim        some of it; every argument is pytest's
#   ./tests/run.sh -k launch -x
#
# LONGSTRAW_TEST_SECONDS bounds the whole run (default 4200), LONGSTRAW_TEST_WORKERS the first part's processes.
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/tools/setup_env.sh" || exit 1
python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
export OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # nproc obeys OpenMP's variables
workers=${LONGSTRAW_TEST_WORKERS:-$((cores < 4 ? cores + 1 : 5))}  # one more than cores: some tests wait for processes
budget=${LONGSTRAW_TEST_SECONDS:-4200}
scratch=$(mktemp -d)
setup=
trap '[ -z "$setup" ] || kill "$setup" 2>/dev/null; rm -rf -- "$scratch"' EXIT
export LONGSTRAW_TEST_COUNTS=$scratch/counts
: >"$LONGSTRAW_TEST_COUNTS"
status=0

# Runs the tests that the expression $1 marks, with the arguments after it. pytest's status 5 means that nothing was
# selected, which one part may say of itself; that nothing ran at all is judged at the end.
run_part() {
    local expression=$1 left=$((budget - SECONDS)) part=0
    shift
    [ "$left" -gt 0 ] || { echo "tests: no time left for '$expression' (LONGSTRAW_TEST_SECONDS=$budget)" >&2; status=124; return; }
    (cd "$root" && timeout --kill-after=15 "$left" "$python" -m pytest -q --durations=10 -m "$expression" "$@") || part=$?
    [ "$part" -eq 124 ] && echo "tests: stopped after $budget s (LONGSTRAW_TEST_SECONDS)" >&2
    [ "$part" -eq 0 ] || [ "$part" -eq 5 ] || status=$part
}

# The real vLLM has an environment of its own, which takes minutes to make once: it is made while other tests run. Where it
# cannot be made, the tests skip themselves and say so. Paths of other tests alone need none.
case " $* " in
    *" tests/vllm"*) vllm=yes ;;
    *" tests/"*) vllm=no ;;
    *) vllm=yes ;;
esac
if [ "$vllm" = yes ]; then
    nice -n 10 timeout --kill-after=15 "${LONGSTRAW_VLLM_SETUP_SECONDS:-1800}" "$root/tools/setup_vllm.sh" --cpu \
        >"$scratch/setup_vllm" 2>&1 &
    setup=$!
fi

run_part "not ranks and not vllm" -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
# Three launches at a time, the longest first (tests/conftest.py): ranks wait for each other, and then the others compute.
[ "$status" -eq 2 ] || run_part "ranks" -n $((workers < 3 ? workers : 3)) --dist loadfile --no-loadscope-reorder "$@"
if [ "$vllm" = yes ]; then
    wait "$setup" || echo "tests: vLLM's environment could not be made: tests/vllm IS NOT RUN" >&2
    setup=
    cat "$scratch/setup_vllm" >&2
    [ "$status" -eq 2 ] || run_part "vllm" -n 0 "$@"
fi

"$python" -I - "$LONGSTRAW_TEST_COUNTS" "$SECONDS" <<'PY' || status=$((status ? status : 5))
import json, sys

parts = [json.loads(line) for line in open(sys.argv[1])]
passed, failed, errors, skipped = (sum(part[kind] for part in parts) for kind in ("passed", "failed", "error", "skipped"))
print(f"tests: {sys.argv[2]} s" + ("" if passed + failed + errors else ", and no test ran"))
print(f"{passed} passed, {failed + errors} failed, {skipped} skipped", flush=True)
sys.exit(0 if passed + failed + errors else 5)
PY
exit "$status"
