#!/usr/bin/env bash
# What one GPU of train_2m.sh would hold, exchange and take, from the step's own code: no GPU needed, minutes on 2 cores.
#
#   ./examples/qwen3.6_27b/dry_run_2m.sh [--group-size 64] [--json report.json] [flags of tools/dry_run.py]
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
exec "$here/train_2m.sh" --dry-run --hardware H20 "$@"
