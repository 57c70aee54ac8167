#!/usr/bin/env bash
# One exact GRPO step on a prompt of 1,048,576 tokens, on a machine of 2 cores: a small hybrid of 4 gated delta net layers and
# one of full attention, random weights, 2 ranks, context parallel 2. The full attention is the fourth layer of five: in a last
# layer a prompt needs keys and values only, and nothing quadratic would be left.
#
#   ./examples/million_tokens_cpu.sh                    1,048,576 tokens: some 45 minutes on 2 free cores
#   TOKENS=65536 ./examples/million_tokens_cpu.sh       the same at another length
#
# The policy is untrained: the step is here to be weighed (receipts/step-000001.json: seconds by phase, who held which state,
# peak memory), not to learn. Every token of the prompt is attended to and its gradient is exact; attention alone is some
# 5.5e11 pairs of tokens, forward once (its outputs are kept) and backward once. Ranks and rewards may wait long for one another:
# the processors may be shared. A flag given here comes after the script's own and wins.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
"$root/tools/setup_env.sh"
python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
tokens=${TOKENS:-1048576}
made=runs/recall/24-facts-$tokens-tokens
if [ ! -e "$made/tokenizer/tokenizer.json" ]; then
    "$python" examples/recall/make_data.py --output "$made" --seed 1 --prompt-tokens "$tokens" --num-facts 24 \
        --num-train 1 --num-eval 1 --vocab-keys 32 --vocab-values 32 --vocab-tokens 96
fi
exec "$root/tools/launch.sh" --nproc-per-node 2 -m megatron.grpo.train \
    --model-preset tiny-qwen3.6 --num-layers 5 \
    --num-attention-heads 1 --num-query-groups 1 --kv-channels 16 \
    --max-position-embeddings $((tokens + 64)) \
    --context-parallel-size 2 \
    --prompt-data "$made/train.jsonl" \
    --tokenizer-path "$made/tokenizer" \
    --reward examples/glm5.2/tiny_reward.py:distinct_words \
    --semantics exact \
    --prompt-chunk-size 16384 --query-rows-at-once 8192 \
    --page-residency device --adjoint-residency device --attention-output-residency device \
    --group-size 8 --responses-per-replay 8 --prompts-per-step 1 --max-response-length 32 \
    --distributed-timeout-minutes 600 --reward-timeout 600 \
    --train-iters 1 \
    --lr 1e-4 --weight-decay 0.0 \
    --output-dir "runs/tokens-$tokens" \
    "$@"
