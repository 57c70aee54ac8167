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
"$root/tools/setup_env.sh"
python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
data=runs/recall/data
warm_start=runs/recall/warm_start
output=runs/quickstart

# Prompts of 1,024 tokens with 24 facts among filler words; one question each, and an answer of one value and <eos>.
if [ ! -e "$data/tokenizer/tokenizer.json" ]; then
    "$python" examples/recall/make_data.py --output "$data" --prompt-tokens 1024 --num-facts 24 --num-train 512 --num-eval 64
fi
# The warm start knows recall from short contexts only: supervised, through the same engine.
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
    --prompts-per-step 4 \
    --max-response-length 3 \
    --train-iters 40 \
    --eval-interval 20 \
    --eval-samples 64 \
    --lr 1e-3 \
    --lr-warmup-iters 2 \
    --weight-decay 0.0 \
    --output-dir "$output" \
    "$@"
