#!/usr/bin/env bash
# GLM-5.2's twin for two CPU cores: the same layers small, the same topology on 4 gloo ranks (context and expert parallel 4),
# all state on the host. Whole GRPO steps: rollout, rewards, both replays, one finalization, one optimizer step.
#
#   ./examples/glm5.2/train_tiny_cpu.sh [flags of megatron.grpo.train]
#
# The weights are random: this shows that the machinery runs, not that anything is learnt. A flag given here wins.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root"
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}  # Megatron warns of each optional package that is not here
"$root/tools/setup_env.sh"
python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
data=runs/glm5.2-tiny/data
output=runs/glm5.2-tiny/train
if [ ! -e "$data/tokenizer/tokenizer.json" ]; then
    "$python" examples/recall/make_data.py --output "$data" --prompt-tokens 301 --num-facts 4 --num-train 8 --num-eval 2
fi
rm -rf "$output"
export OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1
exec "$root/tools/launch.sh" --nproc-per-node 4 -m megatron.grpo.train \
    --model-preset tiny-glm5.2 \
    --context-parallel-size 4 \
    --expert-model-parallel-size 4 \
    --page-residency host \
    --index-page-residency host \
    --adjoint-residency host \
    --selection-residency host \
    --prompt-chunk-size 64 \
    --response-block-size 8 \
    --semantics exact \
    --group-size 4 \
    --max-response-length 12 \
    --kl-coefficient 0.01 \
    --train-iters 2 \
    --lr 1e-3 \
    --prompt-data "$data/train.jsonl" \
    --eval-data "$data/eval.jsonl" \
    --eval-samples 2 \
    --tokenizer-path "$data/tokenizer" \
    --reward examples/glm5.2/tiny_reward.py:distinct_words \
    --output-dir "$output" \
    --save "$output/checkpoints" \
    --save-interval 1 \
    "$@"
