#!/usr/bin/env bash
# Trains and generates in turn on one set of devices, in the environment that tools/setup_env.sh made:
#
#   tools/switch_topology.sh --run-dir runs/loop --model HF_FOLDER --train-iters 10 ... -- TRAINER FLAGS -- ENGINE FLAGS
#
# tools/switch_topology.py says what it does and takes.
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${LONGSTRAW_VENV:-$root/.venv}/bin/python
[ -x "$python" ] || { echo "switch_topology: $python is missing: run tools/setup_env.sh first" >&2; exit 1; }
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$root/tools/switch_topology.py" "$@"
