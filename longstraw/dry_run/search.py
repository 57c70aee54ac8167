"""Which of several ways to run a step holds least, or takes the longest prompt, with as few dry runs as that takes.

A way is what is set beside the flags that were given: flag -> value. Axes are tried one after another, each around the best of
those before it, once: what two axes would give only together is not found. A change is taken where it is worth `WORTH` of the
peak. The longest prompt follows from peaks that grow with it, device and host apart: each length tried is where the line through
the nearest two meets a limit, or the middle where lines do not help.

Left out: how a way is measured (`megatron.grpo.dry_run.fit`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Way = Mapping[str, str | bool]
"""Flag -> value; True for a flag without one, False for a flag to be taken away."""

Axis = Sequence[Way] | Callable[[Way], Sequence[Way]]
"""Settings to try; or, given the best way so far, those beside its own: asked again as long as one of them is better."""

WORTH = 0.005
"""The part of a peak that a change has to save."""

NEAR = 0.01
"""The part of a prompt by which the longest may be missed."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes that a rank may hold; None for as many as it takes."""

    device: int | None = None
    host: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A way and what it came to. refusal: why it cannot be run, in a sentence, or ""."""

    way: Way
    prompt: int
    device: int = 0
    host: int = 0
    seconds: float = 0.0
    refusal: str = ""
    report: dict = field(default_factory=dict, repr=False)

    def load(self, limits: Limits) -> float:
        """The larger part of a limit that is held: above 1 it does not fit. Without limits 0; infinite where it is refused."""
        if self.refusal:
            return float("inf")
        pairs = ((self.device, limits.device), (self.host, limits.host))
        return max((held / limit for held, limit in pairs if limit), default=0.0)


AXES = ("residency", "topology", "chunk", "rank")
"""What can be searched, in the order in which it is: what changes a step's result comes last."""


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """goal: `peak` or `prompt`. over: some of AXES. jobs: dry runs at a time."""

    goal: str
    limits: Limits
    over: tuple[str, ...]
    jobs: int


Measure = Callable[[Sequence[tuple[Way, int]]], list[Tried]]
"""Measures some (way, prompt length), in that order."""


def alternatives(best: Way, axis: Axis) -> list[Way]:
    """The settings of an axis around the best way so far, but those that it has already."""
    found = [{**best, **setting} for setting in (axis(best) if callable(axis) else axis)]
    return [way for way in found if way != best]


def rounds(axis: Axis) -> Iterator[None]:
    """Once for an axis of settings, over and over for one that follows the best: whoever finds nothing better leaves."""
    return iter(lambda: None, 0) if callable(axis) else iter((None,))


def find_smallest(measure: Measure, axes: Sequence[Axis], prompt: int, limits: Limits) -> Tried:
    """The way whose device peak is smallest among those within the limits, if any is; else the host's limit comes first.

    Raises ValueError where every way is refused.
    """
    return _search(measure, axes, prompt, lambda tried: (tried.load(limits) > 1, _excess(tried, limits), tried.device))


def _excess(tried: Tried, limits: Limits) -> float:
    """The part by which the host's limit is exceeded."""
    return max(0.0, tried.load(Limits(host=limits.host)) - 1)


def _search(measure: Measure, axes: Sequence[Axis], prompt: int, cost: Callable[[Tried], tuple]) -> Tried:
    (best,) = measure([({}, prompt)])
    for axis in axes:
        for _ in rounds(axis):
            before, ways = best, alternatives(best.way, axis)
            found = [tried for tried in measure([(way, prompt) for way in ways]) if not tried.refusal]
            for tried in sorted(found, key=cost):
                if best.refusal or _is_worth(cost(tried), cost(best)):
                    best = tried
            if best is before:
                break
    if best.refusal:
        raise ValueError(best.refusal)
    return best


def _is_worth(cost: tuple, best: tuple) -> bool:
    """Whether a cost is lower, by enough of the first part in which they differ."""
    for mine, other in zip(cost, best):
        if mine != other:
            return mine < other - WORTH * abs(other)
    return False


def find_longest(
    measure: Measure, axes: Sequence[Axis], *, start: int, longest: int, limits: Limits, unit: int
) -> Tried:
    """The way that takes the longest prompt within the limits, at that length, a multiple of `unit` tokens and at most
    `longest`.

    start: the first length tried. Raises ValueError where every way is refused; its result may not fit.
    """

    def grow(tried: Tried) -> Tried:
        return find_length(lambda length: measure([(tried.way, length)])[0], tried, longest=longest, limits=limits, unit=unit)

    best = grow(_search(measure, [], start, lambda tried: (tried.load(limits),)))
    for axis in axes:
        for _ in rounds(axis):
            if best.prompt == longest and best.load(limits) <= 1:
                return best
            found = measure([(way, best.prompt) for way in alternatives(best.way, axis)])
            lowest = min(found, key=lambda tried: tried.load(limits), default=best)
            if not lowest.load(limits) < (1 - WORTH) * best.load(limits):
                break
            grown = grow(lowest)
            fits = grown.load(limits) <= 1
            if not (fits > (best.load(limits) <= 1) or grown.prompt > best.prompt or not fits):
                break
            best = grown
    return best


def find_length(
    measure: Callable[[int], Tried], first: Tried, *, longest: int, limits: Limits, unit: int
) -> Tried:
    """The longest prompt that fits, where `first` is one of them or not; the shortest, one unit, where none fits.

    A try that leaves more than half of the lengths between what fits and what does not is followed by one in their middle:
    peaks whose growth changes on the way (another phase becomes the largest) end as surely as even ones.
    """
    known, halve = [first], False
    while (length := _next_length(known, longest=longest, limits=limits, unit=unit, halve=halve)) is not None:
        before = _bracket(known, limits)
        known = sorted([*known, measure(length)], key=lambda tried: tried.prompt)
        after = _bracket(known, limits)
        halve = before is not None and after > before / 2
    fitting = [tried for tried in known if tried.load(limits) <= 1]
    return fitting[-1] if fitting else known[0]


def _bracket(known: Sequence[Tried], limits: Limits) -> int | None:
    """Tokens between the longest that fits and the shortest that does not; None before there are both."""
    fitting, beyond = _part(known, limits)
    return beyond[0].prompt - fitting[-1].prompt if fitting and beyond else None


def _part(known: Sequence[Tried], limits: Limits) -> tuple[list[Tried], list[Tried]]:
    """Those that fit and those that do not, by length; where a longer one fits and a shorter one does not, the first that does
    not ends what fits."""
    beyond = [tried for tried in known if tried.load(limits) > 1]
    fitting = [tried for tried in known if tried.load(limits) <= 1 and not (beyond and tried.prompt > beyond[0].prompt)]
    return fitting, beyond


def _next_length(known: Sequence[Tried], *, longest: int, limits: Limits, unit: int, halve: bool) -> int | None:
    """Where to look next: longer than what fits and shorter than what does not; None where nothing is left to find.

    known: by length. halve: in the middle of what is left.
    """
    fitting, beyond = _part(known, limits)
    if not fitting:
        return unit if known[0].prompt > unit else None
    if _is_long_enough(fitting, beyond, limits, longest):
        return None
    least = (fitting[-1].prompt // unit + 1) * unit
    most = (beyond[0].prompt - 1) // unit * unit if beyond else longest
    if least > most:
        return longest if not beyond and fitting[-1].prompt < longest else None
    if beyond and (halve or beyond[0].refusal):
        length = (fitting[-1].prompt + beyond[0].prompt) // 2 // unit * unit
    elif beyond or len(fitting) > 1:
        first, second = (fitting[-1], beyond[0]) if beyond else fitting[-2:]
        length = _meet_limits(first, second, limits, longest)
        # a little short of the line, so that what is found fits
        length = int(min(length, longest) * (1 - WORTH / 4)) // unit * unit if length < longest else longest
    else:
        length = 2 * fitting[-1].prompt if fitting[-1].load(limits) else longest
    return min(max(length, least), most)


def _is_long_enough(fitting: Sequence[Tried], beyond: Sequence[Tried], limits: Limits, longest: int) -> bool:
    """Whether no more than a part `NEAR` can be left to find: by what does not fit, or by the line through the longest two that do,
    which lies below peaks that grow ever faster."""
    best, nearest = fitting[-1], NEAR * fitting[-1].prompt
    if beyond and beyond[0].prompt - best.prompt <= nearest:
        return True
    return len(fitting) > 1 and _meet_limits(fitting[-2], best, limits, longest) - best.prompt <= nearest < longest - best.prompt


def _meet_limits(first: Tried, second: Tried, limits: Limits, longest: int) -> float:
    """The length at which the line through two tries first meets a limit, each part of memory by its own line; at most `longest`."""
    lengths = [float(longest)]
    for held, other, limit in ((first.device, second.device, limits.device), (first.host, second.host, limits.host)):
        slope = (other - held) / (second.prompt - first.prompt)
        if limit and slope > 0:
            lengths.append(first.prompt + (limit - held) / slope)
    return min(lengths)
