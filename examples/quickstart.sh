#!/usr/bin/env bash
# The main job in one command: GRPO with the exact gradient on a long-context recall task, 2 ranks, context parallel 2.
#
#   ./examples/quickstart.sh [flags of megatron.grpo.train]
#   SEED=2 ./examples/quickstart.sh          other prompts, other starting weights, other samples
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
seed=${SEED:-1}
made=runs/recall/8-facts-2048-tokens-seed-$seed
output=runs/quickstart

# Prompts of 2,048 tokens with 8 facts among filler words; one question each, and an answer of one value and <eos>.
if [ ! -e "$made/data/tokenizer/tokenizer.json" ]; then
    "$python" examples/recall/make_data.py --output "$made/data" --seed "$seed" --prompt-tokens 2048 --num-facts 8 \
        --num-train 512 --num-eval 128 --vocab-keys 32 --vocab-values 32 --vocab-tokens 96
fi
# The warm start recalls 8 facts from contexts of up to 48 tokens, and loses them over 2,048: there is something left to
# learn. Supervised, through the same engine.
if [ ! -e "$made/warm_start/latest_checkpointed_iteration.txt" ]; then
    "$root/tools/launch.sh" --nproc-per-node 2 examples/recall/warm_start.py --output "$made/warm_start" --seed "$seed"
fi
case " $* " in *" --output-dir"* | *" --dry-run "*) ;; *) rm -rf "$output" ;; esac
exec "$root/tools/launch.sh" --nproc-per-node 2 -m megatron.grpo.train \
    --model-preset tiny-qwen3.6 \
    --context-parallel-size 2 \
    --pretrained-checkpoint "$made/warm_start" \
    --prompt-data "$made/data/train.jsonl" \
    --eval-data "$made/data/eval.jsonl" \
    --tokenizer-path "$made/data/tokenizer" \
    --reward exact_match \
    --semantics exact \
    --prompt-chunk-size 1024 \
    --group-size 8 \
    --responses-per-replay 8 \
    --prompts-per-step 8 \
    --max-response-length 2 \
    --train-iters 24 \
    --eval-interval 8 \
    --eval-samples 128 \
    --lr 1e-3 \
    --lr-warmup-iters 2 \
    --adam-beta2 0.95 \
    --weight-decay 0.0 \
    --seed "$seed" \
    --output-dir "$output" \
    "$@"
