#!/usr/bin/env bash
# The main job in one command: GRPO with the exact gradient on a long-context recall task, 2 ranks, context parallel 2.
#
#   ./examples/quickstart.sh [flags of megatron.grpo.train]
#
# Sets up the environment, makes the data and the warm start where they are missing, trains, and leaves metrics.jsonl,
# tensorboard/, run.png and receipt.json in runs/quickstart/ (a second run starts over there). A flag given here comes
# after the script's own and wins.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}  # Megatron warns of each optional package that is not here
"$root/tools/setup_env.sh"
python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
data=runs/recall/data
warm_start=runs/recall/warm_start
output=runs/quickstart

# Prompts of 512 tokens with 4 facts among filler words; one question each, and an answer of one value and <eos>.
if [ ! -e "$data/tokenizer/tokenizer.json" ]; then
    "$python" examples/recall/make_data.py --output "$data" --prompt-tokens 512 --num-facts 4 --num-train 512 \
        --num-eval 64 --vocab-keys 16 --vocab-values 16 --vocab-tokens 48
fi
# The warm start knows recall from contexts of up to 56 tokens only, and hesitates in half of its answers, which the
# verifier does not take: there is something left to learn. Supervised, through the same engine.
if [ ! -e "$warm_start/latest_checkpointed_iteration.txt" ]; then
    "$root/tools/launch.sh" --nproc-per-node 2 examples/recall/warm_start.py --output "$warm_start"
fi
rm -rf "$output"
exec "$root/tools/launch.sh" --nproc-per-node 2 -m megatron.grpo.train \
    --model-preset tiny-qwen3.6 \
    --context-parallel-size 2 \
    --pretrained-checkpoint "$warm_start" \
    --prompt-data "$data/train.jsonl" \
    --eval-data "$data/eval.jsonl" \
    --tokenizer-path "$data/tokenizer" \
    --reward exact_match \
    --semantics exact \
    --prompt-chunk-size 256 \
    --group-size 8 \
    --responses-per-replay 8 \
    --prompts-per-step 8 \
    --max-response-length 3 \
    --train-iters 30 \
    --eval-interval 10 \
    --eval-samples 64 \
    --lr 5e-4 \
    --lr-warmup-iters 2 \
    --weight-decay 0.0 \
    --output-dir "$output" \
    "$@"
