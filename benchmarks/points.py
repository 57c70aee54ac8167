"""Names of the systems that are compared, the sizes that they are compared at, and what a step will take by smaller ones.

Imports nothing that is slow to import: the page is made from these and from results.
"""

from argparse import Namespace
from dataclasses import dataclass

LONGSTRAW = ("exact", "exact_live", "response_only")
MEGATRON = (*LONGSTRAW, "conventional", "checkpointed")
TRL = ("trl", "trl_checkpointed")
PREFIX_GROUPER = ("prefix_grouper", "prefix_grouper_checkpointed")
SYSTEMS = (*MEGATRON, *TRL, *PREFIX_GROUPER)

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
