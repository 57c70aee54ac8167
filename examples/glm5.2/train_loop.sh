#!/usr/bin/env bash
# GLM-5.2 on 4 nodes of 8 GPUs, rollouts and training in turn on all 32: vLLM with tensor parallel 8 and pipeline parallel 4, then
# Megatron with context and expert parallel 32. Run it on every node (or by Slurm: train_loop.sbatch beside this):
#
#   NNODES=4 NODE_RANK=<0..3> MASTER_ADDR=<first node> ./examples/glm5.2/train_loop.sh [flags of tools/switch_topology.sh]
#   PLAN=1 ./examples/glm5.2/train_loop.sh      # print every command, run nothing; no GPUs needed
#
# train_32gpu.sh beside this says what the trainer's flags are for and what they take. Here a step's rollouts come from vLLM,
# and its LoGRA update goes back to it: by shape a small part of the weights (benchmarks/weight_sync.py). Every 16th step
# all weights are written, so that an engine that starts need not apply more than 15 updates. Not yet run on GPUs.
#
#   HF, WEIGHTS, DATA, OUTPUT     Hugging Face folder, converted weights, prompts, where the run lies (below)
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root"
hf=${HF:-GLM-5.2}
weights=${WEIGHTS:-weights/glm-5.2}        # from tools/convert_checkpoint.py --hf-to-megatron
data=${DATA:-prompts.parquet}
output=${OUTPUT:-runs/glm-5.2-loop}

if [ "${NNODES:-4}" != 4 ]; then
    echo "train_loop: NNODES=$NNODES: the ranks here (context and expert parallel 32) are those of 4 nodes of 8 GPUs" >&2
    exit 2
elif [ "${PLAN:-0}" = 0 ] && { [ -z "${NODE_RANK:-}" ] || [ -z "${MASTER_ADDR:-}" ]; }; then
    echo "train_loop: set NODE_RANK (0 to 3) and MASTER_ADDR (the first node) on each of the 4 nodes" >&2
    exit 2
fi
switcher=(
    --run-dir "$output"
    --model "$hf"
    --train-iters 100
    --nproc-per-node 8
    --num-nodes 4
    --node-rank "${NODE_RANK:-0}"
    --rendezvous "${MASTER_ADDR:-localhost}"
    --rollout-tensor-parallel-size 8
    --rollout-pipeline-parallel-size 4       # more ranks than a node has GPUs: by Ray
    --weight-sync delta
    --grace-seconds "${GRACE_SECONDS:-240}"
)
[ "${PLAN:-0}" = 0 ] || switcher+=(--plan)

trainer=(
    --model-preset glm-5.2
    --bf16

    # Ranks, and where a prompt's state lies.
    --tensor-model-parallel-size 1
    --context-parallel-size 32
    --expert-model-parallel-size 32
    --page-residency host
    --index-page-residency host
    --adjoint-residency host
    --selection-residency host
    --attention-output-residency none
    --prompt-chunk-size 4096
    --response-block-size 1024
    --query-rows-at-once 64

    # Objective.
    --semantics exact
    --group-size 8
    --responses-per-replay 1
    --prompts-per-step 1
    --max-response-length 8192
    --clip-range-low 0.2
    --clip-range-high 0.28
    --rollout-is token                       # vLLM's kernels are not the trainer's: weigh what differs

    # How the weights move, and how they reach the engine.
    --optimizer logra
    --logra-rank 256
    --logra-master-residency host
    --kl-budget 2e-4
    --kl-budget-final 2e-5
    --kl-probe finite-difference
    --weight-sync-full-interval 16

    # Data and rewards.
    --prompt-data "$data"
    --tokenizer-path "$hf"
    --apply-chat-template
    --prompt-length-limit 2088960
    --reward math_verify
    --reward-timeout 20
    --pretrained-checkpoint "$weights"
)
engine=(
    --max-num-seqs 8
    --max-model-len 2097152
    --gpu-memory-utilization 0.9
)
exec "$root/tools/switch_topology.sh" "${switcher[@]}" "$@" -- "${trainer[@]}" -- "${engine[@]}"
