#!/usr/bin/env bash
# The quickstart by Adam and by LoGRA at rank 16, three seeds each, and their reward curves in one picture.
#
#   ./examples/recall/compare_optimizers.sh [flags of megatron.grpo.train, for both]
#   SEEDS="1 2" ./examples/recall/compare_optimizers.sh
#
# Runs lie in runs/compare/OPTIMIZER-SEED; one that has a receipt is not run again. About 7 minutes a run by Adam and 8 by
# LoGRA on 2 free cores. The picture is runs/compare/rewards.png.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
compared=$root/runs/compare
# The largest steps at first, small ones at the end: what random projections add to a step averages out over many, and a
# falling budget ends where little of it is left. Eight prompts a step, so q is of all eight. The rest (embeddings, norms,
# convolutions) is Adam's in both.
logra=(--optimizer logra --logra-rank 16 --logra-train-rest --logra-update-ratio 1e-2 --kl-budget 0.6 --kl-budget-final 0.05
    --kl-alpha-max 3 --kl-probe-responses 16 --kl-probe-prompts 8)
curves=()
for seed in ${SEEDS:-1 2 3}; do
    for optimizer in adam logra; do
        output=$compared/$optimizer-$seed flags=()
        [ "$optimizer" = adam ] || flags=("${logra[@]}")
        [ -e "$output/receipt.json" ] || SEED=$seed "$root/examples/quickstart.sh" "${flags[@]}" --output-dir "$output" "$@"
        curves+=("$optimizer=$output")
    done
done
"$python" "$root/tools/plot_rewards.py" "${curves[@]}" --output "$compared/rewards.png"
