"""The page's part on step time, peak memory and the bars, from results.

Ratios are of a system to `exact` in the same round, so that both met the same machine; a cell is their median, with the
smallest and the largest in brackets. Left out: any judgement of ratios that were measured once.
"""

from collections import defaultdict
from statistics import median

from benchmarks.points import LONGSTRAW, SYSTEMS, Point, parse_slug

QUANTITIES = {
    "cpu_seconds": "Processor seconds of a step",
    "seconds": "Wall seconds of a step",
    "rss_bytes": "Peak resident memory of a step above its start",
    "tensor_bytes": "Peak of tensor storages of a step",
}
"""What a step's results hold."""

BARS = (
    ("trl", "time", 6.0), ("trl", "memory", 2.0), ("prefix_grouper", "time", 1.5), ("prefix_grouper", "memory", 1.0),
)  # fmt: skip
"""(system, what, how many times that of exact it has to be at least; for memory: more than)."""

BAR_SIZES = (8192, 8)
"""Prompt and group of the bars."""

Steps = dict[tuple[str, Point], dict[str, dict[int, dict]]]
"""(preset, point) -> system -> round -> figures."""


def collect_steps(records: dict[str, dict]) -> Steps:
    """The results of the part step."""
    found: Steps = defaultdict(lambda: defaultdict(dict))
    for key, record in records.items():
        if key.startswith("step/"):
            _, slug, run = key.split("/")
            system, _, turn = run.rpartition(".")
            found[parse_slug(slug)][system][int(turn)] = record["figures"]
    return {place: found[place] for place in sorted(found)}


def list_ratios(systems: dict[str, dict[int, dict]], system: str, quantity: str, base: str = "exact") -> list[float]:
    """A system's figure over that of `base`, for each round that has both."""
    theirs, ours = systems.get(system, {}), systems.get(base, {})
    turns = sorted(turn for turn in theirs if quantity in theirs[turn] and quantity in ours.get(turn, {}))
    return [theirs[turn][quantity] / ours[turn][quantity] for turn in turns]


def show_ratios(ratios: list[float]) -> str:
    """`9.8 (9.5 to 10.1)`; a single one says so."""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} (once)"
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def show_amount(quantity: str, values: list[float]) -> str:
    """Seconds or MB, the median."""
    value = median(values)
    return f"{value / 1e6:.0f} MB" if quantity.endswith("bytes") else f"{value:.2f} s"


def _cell(systems, system: str, quantity: str) -> str:
    turns = systems.get(system, {})
    values = [figures[quantity] for figures in turns.values() if quantity in figures]
    if not values:
        errors = {figures["error"].split(":")[0] for figures in turns.values() if "error" in figures}
        return "; ".join(sorted(errors)) or "not measured"
    if system == "exact":
        return show_amount(quantity, values)
    ratios = list_ratios(systems, system, quantity)
    return show_ratios(ratios) if ratios else show_amount(quantity, values)


def write_step_tables(steps: Steps) -> list[str]:
    """A table for each quantity: exact in seconds or MB, every other system as a multiple of it."""
    names = [name for name in SYSTEMS if any(name in systems for systems in steps.values())]
    lines: list[str] = []
    for quantity, title in QUANTITIES.items():
        lines += [f"### {title}", "", "| model | prompt | G | " + " | ".join(names) + " |", "|---" * (len(names) + 3) + "|"]
        for (preset, point), systems in steps.items():
            cells = [_cell(systems, name, quantity) for name in names]
            lines.append(f"| {preset} | {point.prompt_length:,} | {point.group_size} | " + " | ".join(cells) + " |")
        lines += [""]
    return lines


def judge_bars(steps: Steps) -> list[tuple[str, str, str, float, bool, str]]:
    """(bar, quantity, setting, median ratio to exact, whether it is reached, the ratios shown) at the bars' sizes.

    Each bar is judged against the system with and without recomputation, and by each way of measuring.
    """
    found = []
    for (_, point), systems in steps.items():
        if (point.prompt_length, point.group_size) != BAR_SIZES:
            continue
        for system, what, least in BARS:
            for setting in (system, f"{system}_checkpointed"):
                for quantity in ("cpu_seconds", "seconds") if what == "time" else ("rss_bytes", "tensor_bytes"):
                    ratios = list_ratios(systems, setting, quantity)
                    if ratios:
                        reached = median(ratios) >= least if what == "time" else median(ratios) > least
                        found.append((_name_bar(system, what, least), quantity, setting, median(ratios), reached, show_ratios(ratios)))
    return found


def _name_bar(system: str, what: str, least: float) -> str:
    if what == "time":
        return f"at least {least:g} times faster than {system}"
    return f"under half the peak memory of {system}" if least == 2 else f"a lower peak than {system}"


def write_bars(steps: Steps) -> list[str]:
    """The table of the bars."""
    judged = judge_bars(steps)
    if not judged:
        return [f"Not measured yet: prompt {BAR_SIZES[0]:,}, G {BAR_SIZES[1]}.", ""]
    preset, point = next(place for place in steps if (place[1].prompt_length, place[1].group_size) == BAR_SIZES)
    lines = [f"At a prompt of {point.prompt_length:,} tokens, G {point.group_size}, on {preset}; other sizes are in the tables below.", ""]
    lines += ["| exact is to be | by | against | times exact | reached |", "|---|---|---|---|---|"]
    for bar, quantity, setting, _, reached, shown in judged:
        lines.append(f"| {bar} | {QUANTITIES[quantity].lower()} | {setting} | {shown} | {'yes' if reached else '**no**'} |")
    return [*lines, ""]


def write_losses(steps: Steps) -> list[str]:
    """Where another system is faster or takes less than exact, in a sentence each."""
    lines = []
    for (preset, point), systems in steps.items():
        for quantity, title in QUANTITIES.items():
            better = []
            for system in systems:
                ratios = list_ratios(systems, system, quantity)
                if system not in LONGSTRAW and ratios and median(ratios) < 1:
                    better.append(f"{system} ({median(ratios):.2f})")
            if better:
                where = f"{preset}, prompt {point.prompt_length:,}, G {point.group_size}"
                lines.append(f"- {where}: {title.lower()}: {', '.join(better)}")
    return [*(lines or ["- nowhere at the sizes measured"]), ""]
