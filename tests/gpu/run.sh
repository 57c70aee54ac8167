#!/usr/bin/env bash
# The checks that need a GPU: what is installed, the gradient audit in float32 and bf16, and one timed update. Takes one
# GPU and under five minutes. Without a GPU it says so and exits 0.
#
#   ./tests/gpu/run.sh [folder for the JSON reports, default runs/gpu]
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root" || exit 1
python=${LONGSTRAW_PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
out=${1:-runs/gpu}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "tests/gpu: no GPU here (or no PyTorch that sees one): nothing was run"
    exit 0
fi
mkdir -p "$out"
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} PYTHONWARNINGS=ignore
status=0
"$python" - <<'PY'
import importlib.util
import torch

print("torch", torch.__version__, "on", torch.cuda.get_device_name())
for package in ("flash_attn", "fla", "causal_conv1d", "transformer_engine"):
    print(package, "is" if importlib.util.find_spec(package) else "is not", "installed")
PY

# check NAME LIMIT EXPRESSION COMMAND...: runs a tool that writes $out/NAME.json, and holds EXPRESSION over that report.
check() {
    local name=$1 limit=$2 expression=$3
    shift 3
    if timeout --kill-after=10 "$limit" "$python" "$@" --json "$out/$name.json" >"$out/$name.log" 2>&1 &&
        "$python" - "$out/$name.json" "$name" "$expression" <<'PY'
import json, sys

path, name, expression = sys.argv[1:]
report = json.load(open(path))
short = {key: value for key, value in report.items() if key not in ("parameters", "settings")}
held = eval(expression, {"r": report})
print(f"{name}: {'passed' if held else 'FAILED'} ({expression})\n  {json.dumps(short)}")
sys.exit(not held)
PY
    then return; fi
    echo "$name: FAILED; the end of $out/$name.log:"
    tail -n 15 "$out/$name.log"
    status=1
}

audit=(tools/audit_gradients.py --prompt-length 157 --response-lengths "5,17,1" --chunk-size 43 --block-size 8)
check audit_float64 45 'r["global_relative_error"] <= 1e-12' "${audit[@]}" --dtype float64
check audit_float32 45 'r["global_relative_error"] <= 2e-5' "${audit[@]}" --dtype float32
check audit_float32_host 45 'r["global_relative_error"] <= 2e-5' "${audit[@]}" --dtype float32 \
    --page-residency host --adjoint-residency host --attention-output-residency host
check audit_bf16 45 'r["cosine"] >= 0.99' "${audit[@]}" --dtype bf16
rule=torch
"$python" -c 'import fla' 2>/dev/null && rule=fused
check step_bf16 100 'all("error" not in run for run in r["runs"].values())' benchmarks/step.py --dtype bf16 \
    --prompt-length 8192 --response-length 128 --group-size 8 --chunk-size 2048 --repeat 1 --runs checkpointed,exact --delta-rule $rule

if [ "$status" -eq 0 ]; then echo "tests/gpu: all passed in $SECONDS s"; else echo "tests/gpu: FAILED ($SECONDS s)"; fi
exit "$status"
