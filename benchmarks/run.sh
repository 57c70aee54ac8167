#!/usr/bin/env bash
# Measures LongStraw beside the alternatives and writes docs/benchmarks.md. Makes the environments that it needs first.
#
#   benchmarks/run.sh                                     everything; an interrupted run goes on where it was
#   benchmarks/run.sh --parts step --prompt-lengths 2048 8192 --output page.md
#   benchmarks/run.sh --gpu                               at most 8 minutes on one GPU
#   benchmarks/run.sh --help                              every flag
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
case " $* " in
    *" --help "*) [ -x "$python" ] || "$root/tools/setup_env.sh" ;;
    *) "$root/tools/setup_env.sh" ;;
esac
# The part that syncs weights to vLLM has vLLM's environment made; where it cannot be, that part says so in the page.
case " $* " in
    *" --gpu "* | *" --page-only "* | *" --help "*) ;;
    *" --parts "* | *" --parts="*)
        case " $* " in *sync*) "$root/tools/setup_vllm.sh" --cpu || echo "benchmarks: no vLLM environment" >&2 ;; esac ;;
    *) "$root/tools/setup_vllm.sh" --cpu || echo "benchmarks: no vLLM environment" >&2 ;;
esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_COMPILE_DISABLE=1 PYTHONWARNINGS=ignore
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$root/benchmarks/run.py" "$@"
