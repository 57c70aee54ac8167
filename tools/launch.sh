#!/usr/bin/env bash
# Starts a program on several ranks with torchrun, in the environment that tools/setup_env.sh made:
#
#   tools/launch.sh --nproc-per-node 2 -m megatron.grpo.train --model-preset tiny-qwen3.6 ...
#
# tools/launch.py says what it does and takes; call that with another Python (a container's) to do without .venv.
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
[ -x "$python" ] || { echo "launch: $python is missing: run tools/setup_env.sh first" >&2; exit 1; }
exec "$python" "$root/tools/launch.py" "$@"
