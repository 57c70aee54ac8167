#!/usr/bin/env bash
# Qwen3.6-27B, rollouts and training in turn on the same GPUs. One node of 8:
#
#   ./examples/qwen3.6_27b/train_loop.sh [flags of tools/switch_topology.sh]
#   PLAN=1 ./examples/qwen3.6_27b/train_loop.sh      # print every command, run nothing; no GPUs needed
#
# Several nodes of 8, on each of them (or by Slurm: train_loop.sbatch beside this):
#
#   NNODES=4 NODE_RANK=<0..3> MASTER_ADDR=<first node> ./examples/qwen3.6_27b/train_loop.sh
#
# vLLM serves with tensor parallel 8 on the first node; Megatron trains with tensor parallel 4 (which must divide the model's 4
# key-value heads), context parallel 2 on one node and 4 on several, and data parallel over the rest. Not yet run on GPUs.
# One engine serves whatever the number of nodes: the GPUs of the others idle while it samples. More of them sample with an
# engine over Ray (--rollout-tensor-parallel-size 8 --rollout-pipeline-parallel-size 4), at a pipeline's latency a token.
#
#   HF, WEIGHTS, DATA, OUTPUT     Hugging Face folder, converted weights, prompts, where the run lies (below)
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root"
hf=${HF:-Qwen3.6-27B}
weights=${WEIGHTS:-weights/qwen3.6-27b}    # from tools/convert_checkpoint.py --hf-to-megatron --tensor-model-parallel-size 4
data=${DATA:-prompts.parquet}
output=${OUTPUT:-runs/qwen3.6-27b}
nodes=${NNODES:-1}

if ! [[ $nodes =~ ^(1|[0-9]*[02468])$ ]] || [ "$nodes" -lt 1 ]; then
    echo "train_loop: NNODES=$nodes: the ranks here are those of 1 node of 8 GPUs, or of an even number of them" >&2
    exit 2
elif [ "$nodes" != 1 ] && [ "${PLAN:-0}" = 0 ] && { [ -z "${NODE_RANK:-}" ] || [ -z "${MASTER_ADDR:-}" ]; }; then
    echo "train_loop: NNODES=$nodes: set NODE_RANK (0 to $((nodes - 1))) and MASTER_ADDR (the first node) on each node" >&2
    exit 2
fi
switcher=(
    --run-dir "$output"
    --model "$hf"
    --train-iters 100
    --nproc-per-node 8
    --num-nodes "$nodes"
    --rollout-tensor-parallel-size 8
    --weight-sync full
    --grace-seconds "${GRACE_SECONDS:-240}"
)
[ "$nodes" = 1 ] || switcher+=(--node-rank "${NODE_RANK:-0}" --rendezvous "${MASTER_ADDR:-localhost}")
[ "${PLAN:-0}" = 0 ] || switcher+=(--plan)

trainer=(
    --model-preset qwen3.6-27b
    --bf16
    --use-distributed-optimizer
    --tensor-model-parallel-size 4
    --context-parallel-size "$((nodes == 1 ? 2 : 4))"
    --sequence-parallel
    --pretrained-checkpoint "$weights"
    --tokenizer-path "$hf"
    --apply-chat-template
    --prompt-data "$data"
    --reward math_verify
    --reward-timeout 20

    # The prompt's state in host memory, one layer staged at a time.
    --page-residency host
    --adjoint-residency host
    --recurrent-state-residency host
    --attention-output-residency host

    --semantics exact
    --group-size 8
    --prompts-per-step "$((nodes == 1 ? 1 : nodes / 2))"   # one a replica
    --max-response-length 2048
    --rollout-is token                       # vLLM's kernels are not the trainer's: weigh what differs
    --lr 1e-6
)
engine=(
    --max-num-seqs 16
    --gpu-memory-utilization 0.9
)
exec "$root/tools/switch_topology.sh" "${switcher[@]}" "$@" -- "${trainer[@]}" -- "${engine[@]}"
