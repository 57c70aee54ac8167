"""The page's smaller parts, from results: longest prompts, context parallelism, optimizer memory, weight sync, GPU."""

import json
from statistics import median


def _mega(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


def write_limits(records: dict[str, dict]) -> list[str]:
    """Longest prompts, a row a system."""
    lines = ["| model | limit above weights | G | system | longest prompt | tried |", "|---|---|---|---|---|---|"]
    for key, record in records.items():
        if not key.startswith("limit/"):
            continue
        _, slug, system = key.split("/")
        preset, _, sizes = slug.rpartition(".")
        limit, group, _ = (part[1:] for part in sizes.split("-"))
        figures = record["figures"]
        if "error" in figures:
            shown, tried = figures["error"], ""
        else:
            shown = f"{figures['longest_prompt']:,}" + (" or more" if figures["more_may_fit"] else "")
            tried = ", ".join(f"{int(length):,}" for length in figures["trials"])
        lines.append(f"| {preset} | {limit} MiB | {group} | {system} | {shown} | {tried} |")
    return _or_not_measured(lines)


def write_context_parallel(records: dict[str, dict]) -> list[str]:
    """Seconds, processor seconds and peak bytes of two ranks over one, round by round."""
    found: dict[str, dict[tuple[int, int], dict]] = {}
    for key, record in records.items():
        if key.startswith("cp/"):
            _, slug, run = key.split("/")
            ranks, _, turn = run.partition(".")
            exact = record["figures"].get("runs", {}).get("exact", {"error": record["figures"].get("error", "no result")})
            found.setdefault(slug, {})[int(ranks), int(turn)] = exact
    lines = ["| model and sizes | quantity | CP 1 | CP 2 | CP 1 / CP 2 |", "|---|---|---|---|---|"]
    names = {"seconds": "wall seconds", "cpu_seconds": "processor seconds of all ranks", "peak_bytes": "peak bytes of a rank"}
    for slug, runs in found.items():
        for quantity, name in names.items():
            turns = [turn for ranks, turn in runs if ranks == 1 and _has(runs, turn, quantity)]
            if turns:
                one, two = ([runs[ranks, turn][quantity] for turn in turns] for ranks in (1, 2))
                ratios = [a / b for a, b in zip(one, two)]
                spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
                show = _mega if quantity == "peak_bytes" else "{:.2f} s".format
                lines.append(f"| {slug} | {name} | {show(median(one))} | {show(median(two))} | {median(ratios):.2f}{spread} |")
    return _or_not_measured(lines)


def _has(runs, turn: int, quantity: str) -> bool:
    return all(quantity in runs.get((ranks, turn), {}) for ranks in (1, 2))


def write_optimizers(records: dict[str, dict]) -> list[str]:
    """Bytes of gradients and optimizer by optimizer, measured and by shape."""
    record = records.get("optimizer/memory")
    if record is None:
        return ["Not measured.", ""]
    report = record["figures"]
    if "error" in report:
        return [f"Not measured: {report['error']}.", ""]
    lines = ["| model | optimizer | gradients + optimizer on matrices | on the rest | matrices / LoGRA's |", "|---|---|---|---|---|"]
    name = f"{report['settings']['model_preset']}, float32 (measured)"
    for model, optimizers in {name: _measured_bytes(report["measured"]), **_shape_bytes(report["by_shape"])}.items():
        base = next((found["matrices"] for kind, found in optimizers.items() if kind.startswith("logra") and "matrices" in found), None)
        for kind, found in optimizers.items():
            if "error" in found:
                lines.append(f"| {model} | {kind} | {found['error']} | | |")
            else:
                ratio = f"{found['matrices'] / base:.2f}" if base else ""
                lines.append(f"| {model} | {kind} | {_mega(found['matrices'])} | {_mega(found['rest'])} | {ratio} |")
    return _or_not_measured(lines)


def _measured_bytes(measured: dict[str, dict]) -> dict[str, dict]:
    return {
        kind: found if "error" in found else {"matrices": found["matrices_bytes"], "rest": found["rest_bytes"]}
        for kind, found in measured.items()
    }


def _shape_bytes(shapes: dict[str, dict]) -> dict[str, dict]:
    """By the model and the ranks that its published run has."""
    return {
        f"{model} (by shape, rank 0 of {found['layout']['ranks']})": found["bytes"]
        for model, found in shapes.items() if "error" not in found
    }


def write_sync(records: dict[str, dict]) -> list[str]:
    """Bytes and seconds of each kind of sync, measured and by shape."""
    lines = ["| model | kind | bytes | full / this | written in | loaded in |", "|---|---|---|---|---|---|"]
    for key, record in records.items():
        if not key.startswith("sync/"):
            continue
        report = record["figures"]
        if "error" in report:
            return [f"Not measured: {report['error']}.", ""]
        name = f"{report['settings']['model_preset']} (measured)"
        for model, kinds in ({name: report["measured"]} | report["by_shape"]).items():
            for kind in ("full", "delta", "lora"):
                if kind in kinds:
                    found = kinds[kind]
                    seconds = [f"{found[what]:.2f} s" if what in found else "" for what in ("write_seconds", "sync_seconds")]
                    lines.append(f"| {model} | {kind} | {_mega(found['bytes'])} | {found['full_over_this']:.1f} | {' | '.join(seconds)} |")
    return _or_not_measured(lines)


def write_gpu(records: dict[str, dict]) -> list[str]:
    """The results of --gpu."""
    found = {key: record["figures"] for key, record in records.items() if key.startswith("gpu/")}
    if not found:
        return ["Not yet run on a GPU: `benchmarks/run.sh --gpu`.", ""]
    lines = ["| measurement | figures |", "|---|---|"]
    for key, figures in found.items():
        shown = ", ".join(f"{name} {_plain(value)}" for name, value in figures.items())
        lines.append(f"| {key.removeprefix('gpu/')} | {shown} |")
    return [*lines, ""]


def _plain(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def _or_not_measured(lines: list[str]) -> list[str]:
    return [*lines, ""] if len(lines) > 2 else ["Not measured.", ""]
