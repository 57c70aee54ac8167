#!/usr/bin/env bash
# Qwen3.6-27B at 2,097,152 positions on one node of 8 GPUs of 96 GB: the exact gradient of all projection matrices.
#
#   ./examples/qwen3.6_27b/train_2m.sh               [flags of megatron.grpo.train]
#   ./examples/qwen3.6_27b/train_2m.sh --dry-run     [flags of tools/dry_run.py]    a rank's memory, on any machine
#
# Responses are decoded from the prompt state that the step has captured anyway, whose pages then cross to the device for every
# token of the group: where an engine serves the prompt, --rollout-engine vllm takes that off (docs/rollouts.md).
# `dry_run_2m.sh` beside this gives the figures: 87.4 GB on the device and 106.8 GB on the host of a rank (docs/dry_run.md). A flag given here comes after the script's own and
# wins. Not yet run on GPUs.
#
#   WEIGHTS, TOKENIZER, DATA, OUTPUT     converted weights, Hugging Face folder, prompts, where the run lies (below)
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root"
weights=${WEIGHTS:-weights/qwen3.6-27b}    # from tools/convert_checkpoint.py --hf-to-megatron
tokenizer=${TOKENIZER:-Qwen3.6-27B}
data=${DATA:-prompts.parquet}
output=${OUTPUT:-runs/qwen3.6-27b-2m}

flags=(
    --model-preset qwen3.6-27b
    --bf16                                     # weights and activations, 53.8 GB; sketches accumulate in float32
    --context-parallel-size 8                  # each GPU holds 1/8 of the prompt's state
    --max-position-embeddings 2097152
    --prompt-length-limit 2088960
    --max-response-length 8192

    # The prompt's state lies in host memory, 107 GB a rank, one layer staged at a time.
    --page-residency host
    --recurrent-state-residency host           # of gated delta nets, one a layer and chunk: 6.5 GB
    --adjoint-residency host
    --attention-output-residency host          # the reverse sweep does not redo the quadratic part
    --prompt-chunk-size 6144                   # the live graph: 3.4 GB for each 1,000 tokens of a chunk
    --response-block-size 4096                 # of a response: each block adds to all adjoints on the host once
    --responses-per-replay 1

    --semantics exact
    --group-size 8
    --prompts-per-step 1

    # How the weights move: LoGRA (docs/logra.md); 4 GB of sketches, 6.1 GB of row moments and masters.
    --optimizer logra
    --logra-rank 256
    --kl-budget 2e-4
    --kl-budget-final 2e-5
    --train-iters 100

    --prompt-data "$data"
    --tokenizer-path "$tokenizer"
    --apply-chat-template
    --reward math_verify
    --reward-timeout 20

    --pretrained-checkpoint "$weights"
    --output-dir "$output"
    --save "$output/checkpoints"
    --save-interval 5
    --load "$output/checkpoints"
)
export CUDA_DEVICE_MAX_CONNECTIONS=1
exec "$root/tools/launch.sh" --nproc-per-node 8 --grace-seconds "${GRACE_SECONDS:-240}" \
    -m megatron.grpo.train "${flags[@]}" "$@"
