#!/usr/bin/env bash
# The whole loop on a CPU: vLLM rolls a step out on two ranks and ends, Megatron trains the step on two and ends, and so on.
# The model's 9 attention heads do not divide by two, so each of vLLM's ranks has half of the layers.
#
#   ./examples/smollm2_135m/train_vllm_cpu.sh [flags of tools/switch_topology.sh]
#
# SmolLM2-135M-Instruct on reasoning-gym, as in train_cpu.sh, with LoGRA. Its weights reach the engine in turn as an update
# (after odd steps) and whole (after even ones). Everything lands in runs/smollm2_135m/; a second call goes on with the run in
# loop/. Set-up makes vLLM's environment too (tools/setup_vllm.sh).
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root"
# shellcheck source=examples/smollm2_135m/prepare.sh
. "$root/examples/smollm2_135m/prepare.sh"
"$root/tools/setup_vllm.sh"

switcher=(
    --run-dir "$runs/loop"
    --model "$hf"
    --train-iters 3
    --nproc-per-node 2
    --rollout-pipeline-parallel-size 2
    --weight-sync delta
    --generating-seconds 3600
    --training-seconds 3600
)
trainer=(
    --model-preset smollm2-135m
    --context-parallel-size 2
    --pretrained-checkpoint "$megatron"
    --prompt-data "$data/train.jsonl"
    --tokenizer-path "$hf"
    --reward reasoning_gym
    --semantics exact
    --prompt-chunk-size 1024
    --attention-output-residency host
    --group-size 4
    --responses-per-replay 4
    --prompts-per-step 2
    --max-response-length 16
    --optimizer logra
    --logra-rank 64
    --weight-sync-full-interval 2
)
engine=(
    --dtype float32
    --max-model-len 4096
    --kv-cache-gib 1
)
exec "$root/tools/switch_topology.sh" "${switcher[@]}" "$@" -- "${trainer[@]}" -- "${engine[@]}"
