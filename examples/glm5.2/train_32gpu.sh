#!/usr/bin/env bash
# GLM-5.2 on 4 nodes of 8 GPUs: context and expert parallel 32, prompt state in host memory. Run it on every node:
#
#   NNODES=4 NODE_RANK=<0..3> MASTER_ADDR=<first node> MASTER_PORT=29500 ./examples/glm5.2/train_32gpu.sh
#   DRY=1 ./examples/glm5.2/train_32gpu.sh      # print what the flags resolve to, on any machine, without GPUs
#   ./examples/glm5.2/train_32gpu.sh --dry-run  # a rank's memory, exchanges and time, on any machine (docs/dry_run.md)
#
# A flag given here comes after the script's own and wins. `train.sbatch` beside this runs it by Slurm.
#
# Not yet run on GPUs. By shape, a rank holds 40 billion parameters (its 8 of 256 experts in 75 layers: 22.6; attention,
# dense and shared layers, which every rank has: 15.6; embedding and output: 1.9): 80 GB in bf16. Full-parameter training
# with Adam needs 160 GB of float32 gradients beside them, more than any one GPU has, so the projection matrices move by
# LoGRA: by shape 58 GB a rank of sketches, row moments and masters at rank 256 (benchmarks/optimizer_memory.py), of which the
# masters lie on the host. Everything else is frozen. In a dry run at 2,097,152 positions the largest rank holds 102.2 GB, so GPUs
# of 96 GB do not have room for this (docs/dry_run.md).
#
#   WEIGHTS, TOKENIZER, DATA, OUTPUT     converted weights, Hugging Face folder, prompts, where the run lies (below)
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root"
weights=${WEIGHTS:-weights/glm-5.2}        # from tools/convert_checkpoint.py --hf-to-megatron
tokenizer=${TOKENIZER:-GLM-5.2}            # Hugging Face folder
data=${DATA:-prompts.parquet}
output=${OUTPUT:-runs/glm-5.2}

flags=(
    --model-preset glm-5.2
    --bf16                                   # weights and activations; gradients accumulate in float32

    # Ranks. Each GPU holds 1/32 of a prompt's state and 8 of the 256 experts; dense layers are whole on every rank.
    --tensor-model-parallel-size 1           # latent attention and experts run without tensor parallelism
    --context-parallel-size 32
    --expert-model-parallel-size 32          # over the same ranks as context parallelism

    # Prompt state: on the host, one layer staged at a time while the one before it computes. At 2,097,152 tokens a rank
    # has 65,536 of them: latents 5.9 GB and their float32 gradients 11.8 GB, index keys 0.35 GB, selections about 11 GB.
    --page-residency host
    --index-page-residency host
    --adjoint-residency host
    --selection-residency host               # keep what was selected: scoring 2M keys again costs 8 times the attention
    --attention-output-residency none        # absorbed outputs are 64 x 512 numbers a token and layer: recomputed instead

    # What is gathered at a time.
    --prompt-chunk-size 4096                 # tokens of a prompt in one live graph
    --response-block-size 1024               # tokens of a response in one live graph
    --query-rows-at-once 64                  # rows a rank whose queries are gathered; bounds the exchange buffers

    # Objective.
    --semantics exact
    --group-size 8
    --responses-per-replay 1
    --prompts-per-step 1
    --max-response-length 8192
    --clip-range-low 0.2
    --clip-range-high 0.28

    # How the weights move: LoGRA (docs/logra.md).
    --optimizer logra
    --logra-rank 256
    --logra-master-residency host
    --kl-budget 2e-4                         # nats a token that one step may move the policy by, at the start ...
    --kl-budget-final 2e-5                   # ... and at the end
    --kl-probe finite-difference             # forward mode does not go through experts
    --train-iters 100

    # Data and rewards.
    --prompt-data "$data"
    --tokenizer-path "$tokenizer"
    --apply-chat-template
    --prompt-length-limit 2088960            # longer prompts are counted and left out, never cut
    --reward math_verify
    --reward-timeout 20

    # Weights and outputs.
    --pretrained-checkpoint "$weights"
    --output-dir "$output"
    --save "$output/checkpoints"
    --save-interval 5
    --load "$output/checkpoints"             # continues where an earlier run was stopped
)

if [ "${DRY:-0}" != 0 ]; then
    python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
    [ -x "$python" ] || "$root/tools/setup_env.sh"
    PYTHONPATH=$root exec "$python" -W ignore tools/show_configuration.py --ranks 32 "${flags[@]}" "$@"
fi
export CUDA_DEVICE_MAX_CONNECTIONS=1
[[ " $* " != *" --dry-run "* ]] || export NNODES=${NNODES:-4}
exec "$root/tools/launch.sh" --nproc-per-node 8 --grace-seconds "${GRACE_SECONDS:-240}" \
    -m megatron.grpo.train "${flags[@]}" "$@"
