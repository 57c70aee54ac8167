"""--fit: which chunk size, residency, parallel sizes and LoGRA rank hold least, or take the longest prompt under limits.

Each way is a dry run with some flags beside those that were given, in a process of its own. Ways that the training program
refuses are shown as refused. The peaks are those of a dry run: leave room for what it cannot see (docs/dry_run.md).
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longstraw.dry_run.search import Axis, FitSettings, Tried, Way, find_longest, find_smallest
from megatron.grpo.arguments import ArgumentErrors
from megatron.grpo.dry_run.apart import run_apart
from megatron.grpo.dry_run.flags import DryRun, parse_dry_run
from megatron.grpo.dry_run.one_step import judge, report_step
from megatron.grpo.dry_run.run import RunSettings
from megatron.grpo.run_config import TrainConfig

SMALLEST_CHUNK, SMALLEST_RANK = 64, 8


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The winner, everything that was tried, and whether the winner is within the limits."""

    best: Tried
    tried: tuple[Tried, ...]
    fits: bool


def make_axes(dry: DryRun, over: Sequence[str]) -> list[Axis]:
    """The settings to try, axis by axis; those that are in force already are not among them."""
    args, sweeps, axes = dry.args, dry.config.sweeps, []
    if "residency" in over:
        axes += _residencies(args, dry.config)
    if "topology" in over:
        axes.append(_topologies(args))
    if "chunk" in over:
        axes.append(lambda best: _chunks(best, sweeps.prompt_chunk_size, dry.settings.lengths.prompt))
    if "rank" in over and args.optimizer == "logra" and dry.config.logra.update_direction == "sketch":
        ranks = [dry.config.logra.logra_rank // 4, dry.config.logra.logra_rank // 2]
        axes.append([{"--logra-rank": str(rank)} for rank in ranks if rank >= SMALLEST_RANK])
    return [axis for axis in axes if axis]


def _chunks(best: Way, given: int, prompt: int) -> list[Way]:
    """A quarter, a half and twice the best chunk size so far, but the given one, which is the way without a flag."""
    size = int(best.get("--prompt-chunk-size", given))
    sizes = [tokens for tokens in (size // 4, size // 2, size * 2) if SMALLEST_CHUNK <= tokens < 2 * prompt and tokens != given]
    return [{"--prompt-chunk-size": str(tokens)} for tokens in sizes]


def _residencies(args: Namespace, config: TrainConfig) -> list[list[Way]]:
    sweeps, places = config.sweeps, {"--page-residency": ("device", "host")}
    if sweeps.semantics == "exact":
        places |= {"--adjoint-residency": ("device", "host"), "--attention-output-residency": ("none", "device", "host")}
    if args.experimental_attention_variant == "gated_delta_net":
        places["--recurrent-state-residency"] = ("device", "host")
    if args.experimental_attention_variant == "dsa":
        places["--index-page-residency"] = ("device", "host")
        if sweeps.semantics == "exact":
            places["--selection-residency"] = ("none", "device", "host")
    if args.optimizer == "logra" and args.bf16 and config.logra.logra_masters != "none":
        places["--logra-master-residency"] = ("device", "host")
    found = []
    for flag, values in places.items():
        name = flag.removeprefix("--").replace("-", "_")
        given = getattr(config.logra if name.startswith("logra") else sweeps, name)
        found.append([{flag: value} for value in values if value != given])
    return found


def _topologies(args: Namespace) -> list[Way]:
    """Tensor x context parallel sizes of the same product."""
    tp, cp, found = args.tensor_model_parallel_size, args.context_parallel_size, []
    for size in range(1, tp * cp + 1):
        if tp * cp % size == 0 and size != tp:
            found.append({
                "--tensor-model-parallel-size": str(size), "--context-parallel-size": str(tp * cp // size),
                "--sequence-parallel": size > 1,
            })
    return found


def with_way(argv: Sequence[str], way: Way) -> list[str]:
    """A command line with a way's flags in place of its own."""
    left, words = [], list(argv)
    while words:
        word = words.pop(0)
        if word.split("=")[0] not in way:
            left.append(word)
        elif isinstance(way[word.split("=")[0]], str) and "=" not in word and words:
            words.pop(0)
    return [*left, *show_way(way)]


def show_way(way: Way) -> list[str]:
    """A way's flags as words of a command line."""
    return [word for flag, value in way.items() if value is not False for word in ((flag,) if value is True else (flag, value))]


def find_fit(dry: DryRun, fit: FitSettings, report_progress: Callable[[str], None]) -> Fit:
    """Search from the flags of a parsed command line.

    Raises ValueError in one sentence where every way is refused, or where nothing fits.
    """
    known: dict[tuple, Tried] = {}

    def measure(pairs: Sequence[tuple[Way, int]]) -> list[Tried]:
        keys = [(tuple(way.items()), length) for way, length in pairs]
        missing = [(pair, key) for pair, key in zip(pairs, keys) if key not in known]
        if missing:
            report_progress(f"{len(known)} dry runs done, now {len(missing)} more, {fit.jobs} at a time")
        for (_, key), tried in zip(missing, run_apart(lambda item: _try(dry, *item[0]), missing, jobs=fit.jobs)):
            known[key] = tried
        return [known[key] for key in keys]

    axes, prompt = make_axes(dry, fit.over), dry.settings.lengths.prompt
    if fit.goal == "peak":
        best = find_smallest(measure, axes, prompt, fit.limits)
    else:
        longest = dry.args.max_position_embeddings - dry.settings.lengths.response
        unit = min(dry.config.sweeps.prompt_chunk_size, longest)
        best = find_longest(measure, axes, start=prompt, longest=longest, limits=fit.limits, unit=unit)
    found = Fit(best=best, tried=tuple(known.values()), fits=best.load(fit.limits) <= 1)
    if not found.fits:
        raise ValueError(_describe_misfit(found, fit))
    return found


def _try(dry: DryRun, way: Way, prompt: int) -> Tried:
    try:
        argv = with_way(dry.argv, {**way, "--prompt-length-limit": str(prompt)})  # what a run needs to take the prompt
        one = parse_dry_run([*argv, *_own_flags(dry.settings), "--prompt-length", str(prompt)])
    except ArgumentErrors as errors:
        return Tried(way=way, prompt=prompt, refusal="; ".join(errors.sentences))
    except ValueError as error:
        return Tried(way=way, prompt=prompt, refusal=str(error))
    report = report_step(one)
    report |= judge(report["peak_bytes"], dry.limits)
    peak = report["peak_bytes"]
    seconds = report["seconds"][dry.hardware]["estimate"] if "seconds" in report else 0.0
    return Tried(way=way, prompt=prompt, device=peak["device"], host=peak["host"], seconds=seconds, report=report)


def _own_flags(settings: RunSettings) -> list[str]:
    """The dry run's own flags that give these settings again, but the prompt's length and the rank."""
    return [
        "--ranks", str(settings.ranks), "--response-length", str(settings.lengths.response),
        "--machine", "gpu" if settings.gpu else "cpu", *(["--every-block"] if settings.every_block else []),
        *([] if settings.decodes else ["--rollout-elsewhere"]),
    ]


def _describe_misfit(found: Fit, fit: FitSettings) -> str:
    best, limits = found.best, fit.limits
    wanted = [
        f"{flag} {limit / 1e9:.6g}GB" for flag, limit in (("--device-memory", limits.device), ("--host-memory", limits.host)) if limit
    ]
    run = sum(not tried.refusal for tried in found.tried)
    return (
        f"nothing fits into {' and '.join(wanted)}: of {run} dry runs the best holds {best.device / 1e9:.6g} GB on the device and "
        f"{best.host / 1e9:.6g} GB on the host of a rank, at a prompt of {best.prompt} tokens"
        + (f" with {' '.join(show_way(best.way))}" if best.way else "")
    )


def tabulate_fit(found: Fit, fit: FitSettings, hardware: str) -> list[list[str]]:
    """Rows for people: a heading, each way tried, the winner marked."""
    rows = [["", "prompt", "device GB", "host GB", f"estimate on {hardware}", "flags beside the given ones, or why not"]]
    for tried in found.tried:
        mark = "*" if tried is found.best else "" if tried.load(fit.limits) <= 1 else "-"
        figures = ["-"] * 3 if tried.refusal else [
            f"{tried.device / 1e9:.6g}", f"{tried.host / 1e9:.6g}", f"{tried.seconds:,.4g} s" if tried.seconds else "-"
        ]
        flags = " ".join(show_way(tried.way)) or "(none)"
        rows.append([mark, f"{tried.prompt:,}", *figures, f"{flags}: {tried.refusal}" if tried.refusal else flags])
    return rows


def describe_fit(found: Fit, fit: FitSettings) -> dict:
    """The same as plain JSON values, with the winner's whole report."""
    return {
        "goal": fit.goal, "limits": {"device": fit.limits.device, "host": fit.limits.host},
        "tried": [
            {
                "flags": show_way(tried.way), "prompt_length": tried.prompt, "refusal": tried.refusal,
                "peak_bytes": {"device": tried.device, "host": tried.host},
            }
            for tried in found.tried
        ],
        "winner": {"flags": show_way(found.best.way), "prompt_length": found.best.prompt, "report": found.best.report},
    }
