"""The longest prompt whose step fits a fixed amount of memory, by system, each trial in a process of its own under a limit.

The limit is on private memory (RLIMIT_DATA) above what the process has when its measured step begins, weights and moments
made. Prompts are tried at powers of two from --limit-from, and between the last that fits and the first that does not at
`STEPS` steps of equal ratio. A trial ends by finishing its step or by the allocator's refusal; one that takes too long
ends the search, and the page says that more may fit.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from benchmarks.measurement import Work, measure_in_process
from benchmarks.results import ResultStore
from benchmarks.systems import Setup

STEPS = 4
"""Lengths between a power of two and the next: each 19 % longer than the one before."""


def find_longest(fits: Callable[[int], bool], start: int, end: int) -> int:
    """The longest of start * 2^(n / STEPS) up to `end` that fits, 0 where `start` does not; fits is monotonous.

    fits may raise TimeoutError, which passes through with the longest that fitted so far as its argument.
    """
    length, best = start, 0
    while length <= end and _try(fits, length, best):
        best, length = length, length * 2
    if not best or length > end:
        return best
    low, high = 0, STEPS
    while high - low > 1:
        middle = (low + high) // 2
        candidate = int(best * 2 ** (middle / STEPS))
        if _try(fits, candidate, int(best * 2 ** (low / STEPS))):
            low = middle
        else:
            high = middle
    return int(best * 2 ** (low / STEPS))


def _try(fits, length: int, best: int) -> bool:
    try:
        return fits(length)
    except TimeoutError:
        raise TimeoutError(best) from None


def measure_limits(args: Namespace, store: ResultStore, context, folder: Path) -> None:
    """Search for every system."""
    setup = Setup(model_preset=args.model_preset, chunk_size=args.chunk_size, seed=args.seed)
    settings = {
        "--chunk-size": args.chunk_size, "--seed": args.seed, "--limit-from": args.limit_from, "--limit-to": args.limit_to,
    }
    for system in args.systems:
        key = f"limit/{args.model_preset}.m{args.limit_mib}-g{args.limit_group_size}-r{args.response_length}/{system}"
        command = (
            f"benchmarks/run.sh --parts limit --model-preset {args.model_preset} --systems {system} "
            f"--limit-mib {args.limit_mib} --limit-group-size {args.limit_group_size}"
        )
        store.measure(key, command, lambda: _search(args, store, context, key, setup, folder, system), settings)


def _search(args, store, context, key: str, setup: Setup, folder: Path, system: str) -> dict:
    trials: dict[int, str] = {}

    def fits(length: int) -> bool:
        work = Work(
            kind="fit", setup=setup, folder=folder, system=system, prompt_length=length, group_size=args.limit_group_size,
            response_length=args.response_length, limit_bytes=args.limit_mib * 2**20,
        )
        figures = measure_in_process(context, work, store.path(key, ".log"), args.measurement_seconds)
        trials[length] = figures.get("error", "fits")
        if "longer than" in trials[length]:
            raise TimeoutError
        if trials[length] not in ("fits", "out of memory"):
            raise ChildProcessError(f"a prompt of {length}: {trials[length]}")
        return trials[length] == "fits"

    try:
        longest, searched = find_longest(fits, args.limit_from, args.limit_to), True
    except TimeoutError as ended:
        longest, searched = ended.args[0], False
    except ChildProcessError as failure:
        return {"error": str(failure), "trials": trials}
    at_end = searched and longest * 2 > args.limit_to and all(outcome == "fits" for outcome in trials.values())
    return {"longest_prompt": longest, "more_may_fit": at_end or not searched, "trials": trials}
