"""What one rank of a training step would hold, exchange and take, from the step's own code, on a machine without GPUs.

    .venv/bin/python tools/dry_run.py --model-preset qwen3.6-27b --bf16 --context-parallel-size 8 \\
        --prompt-length 2088960 --response-length 8192 --group-size 8 --optimizer logra ... --json report.json

Flags are the training program's, with the same refusals, and those below. A training script with --dry-run at its end does
the same. docs/dry_run.md says what is counted, and what a dry run cannot see.

    .venv/bin/python tools/dry_run.py ... --device-memory 92GB              # whether the step fits
    .venv/bin/python tools/dry_run.py ... --fit --host-memory 192GB         # the flags whose device peak is smallest
    .venv/bin/python tools/dry_run.py ... --fit prompt --device-memory 92GB # and those that take the longest prompt

Exit codes: 0, 1 where the step, or everything that --fit tries, does not fit, or 2 where flags are refused.
"""

import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# What Megatron finds missing here, at import, says nothing of the machine that the step is for.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.(core|training)")

from megatron.grpo.dry_run.program import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(description=__doc__))
