"""The script of `test_dry_run.py` and `test_dry_run_program.py`: a real step's measured memory, the same step's dry run, and the
program itself.

    dry_run_ranks.py measure RANKS RENDEZVOUS OUTPUT FLAGS...      one process a rank
    dry_run_ranks.py dry OUTPUT FLAGS...
    dry_run_ranks.py program EXIT_CODE FLAGS...
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.grpo.dry_run.flags import parse_dry_run
from megatron.grpo.dry_run.one_step import report_step
from megatron.grpo.dry_run.program import main
from megatron.grpo.quiet_logs import quiet_logs
from tests.support.ranks import fork_ranks


def measure(rank: int, ranks: int, arguments: list[str]) -> None:
    """The step for real, on each rank."""
    quiet_logs()
    output, *flags = arguments
    report = report_step(parse_dry_run([*flags, "--measure", "--even-choices", "--ranks", str(ranks)]))
    if rank == 0:
        Path(output).write_text(json.dumps(report))


def dry(output: str, *flags: str) -> None:
    """Its dry run."""
    quiet_logs()
    Path(output).write_text(json.dumps(report_step(parse_dry_run([*flags, "--machine", "cpu"]))))


def program(exit_code: str, *flags: str) -> None:
    """The command line program; its exit code goes to a file."""
    Path(exit_code).write_text(str(main(flags)))


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    if kind == "measure":
        fork_ranks(measure)
    else:
        {"dry": dry, "program": program}[kind](*sys.argv[1:])
