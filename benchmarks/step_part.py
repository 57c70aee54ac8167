"""Step time and peak memory of every system over prompt length and group size, one process a measurement.

At a point the systems take turns, `repeat` rounds of them, so that what else the machine does meets all alike. A system that
would take too long at a point, by what it took at smaller ones, is measured without the meter, or once, or not at all, and the
page says so.
"""

from argparse import Namespace
from pathlib import Path

from benchmarks.measurement import Work, measure_in_process
from benchmarks.points import Point, estimate_seconds, list_points
from benchmarks.results import ResultStore
from benchmarks.systems import Setup


def measure_steps(args: Namespace, store: ResultStore, context, folder: Path) -> None:
    """Measure every point. folder: of the exported weights."""
    setup = Setup(model_preset=args.model_preset, chunk_size=args.chunk_size, seed=args.seed)
    settings = {"--chunk-size": args.chunk_size, "--seed": args.seed}
    known: dict[str, dict[Point, dict]] = {system: {} for system in args.systems}
    for point in list_points(args):
        estimates = {system: estimate_seconds(system, point, known[system]) for system in args.systems}
        for turn in range(args.repeat):
            for system in args.systems:
                estimate, failed = estimates[system], known[system].get(point, {}).get("error")
                if turn and (failed or (estimate or 0) > args.once_over_seconds):
                    continue
                key = f"step/{args.model_preset}.{point.slug}/{system}.{turn}"
                work = Work(
                    kind="step", setup=setup, folder=folder, system=system, prompt_length=point.prompt_length,
                    response_length=point.response_length, group_size=point.group_size,
                    metered=turn == 0 and (estimate or 0) <= args.meter_under_seconds,
                )
                command = (
                    f"benchmarks/run.sh --parts step --model-preset {args.model_preset} --systems {system} "
                    f"--prompt-lengths {point.prompt_length} --group-size {point.group_size} --group-sizes"
                )
                figures = store.measure(key, command, lambda: _measure(args, store, context, key, work, estimate), settings)
                known[system].setdefault(point, figures)


def _measure(args, store, context, key: str, work: Work, estimate: float | None) -> dict:
    if estimate is not None and estimate > args.skip_over_seconds:
        return {"error": f"not run: about {estimate:.0f} s of processor time by the smaller prompts"}
    return measure_in_process(context, work, store.path(key, ".log"), args.measurement_seconds)
