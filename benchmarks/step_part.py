"""Step time and peak memory of every system over prompt length and group size, one process a measurement.

At a point the systems take turns, `repeat` rounds of them, so that what else the machine does meets all alike. A system that
would take too long at a point, by what it took at smaller ones, is measured without the meter, or once, or not at all, and the
page says so.
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurement import Work, measure_in_process
from benchmarks.results import ResultStore
from benchmarks.systems import LONGSTRAW, PREFIX_GROUPER, Setup

GROWTH = 1.75
"""Exponent of time over prompt length that estimates use: between a linear model and its quadratic attention."""


@dataclass(frozen=True, order=True)
class Point:
    """Sizes of a measurement."""

    prompt_length: int
    group_size: int
    response_length: int

    @property
    def slug(self) -> str:
        """Its part of a key."""
        return f"p{self.prompt_length}-g{self.group_size}-r{self.response_length}"


def parse_slug(slug: str) -> tuple[str, Point]:
    """`tiny-llama.p2048-g8-r128` -> the preset and the point."""
    preset, _, sizes = slug.rpartition(".")
    numbers = [int(part[1:]) for part in sizes.split("-")]
    return preset, Point(*numbers)


def list_points(args: Namespace) -> list[Point]:
    """All prompt lengths at --group-size, all group sizes at --prompt-length, smallest work first."""
    points = {Point(length, args.group_size, args.response_length) for length in args.prompt_lengths}
    points |= {Point(args.prompt_length, group, args.response_length) for group in args.group_sizes}
    return sorted(points, key=lambda point: (point.prompt_length**GROWTH * point.group_size, point))


def estimate_seconds(system: str, point: Point, known: dict[Point, dict]) -> float | None:
    """Processor seconds that a system may take, from the nearest point it was measured at; None from nothing.

    A system that shares the prompt takes as long for a larger group, nearly; the others in proportion.
    """
    shares = system in LONGSTRAW or system in PREFIX_GROUPER
    found = []
    for other, figures in known.items():
        if "cpu_seconds" in figures:
            scale = (point.prompt_length / other.prompt_length) ** GROWTH
            scale *= 1 if shares else point.group_size / other.group_size
            found.append((abs(point.prompt_length - other.prompt_length), figures["cpu_seconds"] * scale))
    return min(found)[1] if found else None


def measure_steps(args: Namespace, store: ResultStore, context, folder: Path) -> None:
    """Measure every point. folder: of the exported weights."""
    setup = Setup(model_preset=args.model_preset, chunk_size=args.chunk_size, seed=args.seed)
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
                figures = store.measure(key, command, lambda: _measure(args, store, context, key, work, estimate))
                known[system].setdefault(point, figures)


def _measure(args, store, context, key: str, work: Work, estimate: float | None) -> dict:
    if estimate is not None and estimate > args.skip_over_seconds:
        return {"error": f"not run: about {estimate:.0f} s of processor time by the smaller prompts"}
    return measure_in_process(context, work, store.path(key, ".log"), args.measurement_seconds)
