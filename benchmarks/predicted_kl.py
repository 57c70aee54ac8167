"""Predicted against measured KL of LoGRA steps, on the training program's own objects: one rank, one replayed group.

    python benchmarks/predicted_kl.py --model-preset tiny-qwen3.6 --logra-rank 16 --json -

A prompt of random tokens and responses that the policy samples are replayed, so that every sketch holds a step's
gradient. Then, in float64 and in float32:

    q                 by forward mode, by finite differences at several probe steps, and by those of the program, whose
                      step is shortened until it is inside the smallest delta
    predicted KL      delta itself: the step is alpha eta D with alpha = sqrt(delta / q), q by forward mode
    measured KL       at the same contexts, after the weights have taken that step, with the prompt's state held
                      (--kl-probe-scope response); kappa is measured over predicted
    measured, full    the same with the prompt captured again at the moved weights

With --checkpoint, --prompt-data and --tokenizer-path these are a trained policy's steps on real prompts, one a seed.

The weights are put back between steps. Exit code 0 means that it was measured; it never judges.
"""

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.live_step import LiveStep, open_model, open_update  # noqa: E402
from longstraw.optim.optimizer import Logra  # noqa: E402
from longstraw.optim.step_control import choose_alpha, differences_within, predicted_kl, rate_from_kl  # noqa: E402
from longstraw.patches.float64 import lift_float64  # noqa: E402
from longstraw.transaction.group import PromptGroup  # noqa: E402
from longstraw.transaction.kl_probe import KlProbe  # noqa: E402
from megatron.grpo.presets import get_preset  # noqa: E402
from megatron.grpo.prompts import DataConfig, load_prompts  # noqa: E402
from megatron.grpo.quiet_logs import quiet_logs  # noqa: E402
from megatron.grpo.tokenizer import load_tokenizer  # noqa: E402
from tools.tool_flags import check_at_least_1, check_report_path, check_seed  # noqa: E402
from tools.tool_reports import write_report  # noqa: E402

DTYPES = {"float64": torch.float64, "float32": torch.float32}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The script's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-preset", default="tiny-qwen3.6", help="architecture, of layers that forward mode goes through")
    add("--logra-rank", type=int, default=16, help="rank of the sketches")
    add("--update-rule", choices=("sgd", "rowadam"), default="rowadam", help="what makes the direction")
    add("--deltas", type=float, nargs="+", default=[1e-5, 1e-4, 1e-3], help="KL budgets")
    add("--probe-steps", type=float, nargs="+", default=[0.5, 0.05], help="alphas of the finite differences")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of weights and activations")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of weights and tokens; a measurement each")
    add("--prompt-length", type=int, default=256, help="tokens of the prompt")
    add("--response-length", type=int, default=64, help="tokens of each response")
    add("--group-size", type=int, default=4, help="responses, all of them probed")
    add("--checkpoint", metavar="DIR", help="a saved run's weights, instead of random ones")
    add("--prompt-data", metavar="FILE", help="prompts as of the training program: seed n takes the n-th, whole")
    add("--tokenizer-path", metavar="DIR", help="of --prompt-data")
    add("--json", default="-", metavar="PATH", help="where the report goes; - is standard output")
    args = parser.parse_args(argv)
    check_at_least_1(parser, args, ("logra_rank", "prompt_length", "response_length"))
    for seed in args.seeds:
        check_seed(parser, seed)
    check_report_path(parser, args.json)
    if args.group_size < 2:
        parser.error("--group-size is at least 2: responses are compared")
    if (args.prompt_data is None) != (args.tokenizer_path is None):
        parser.error("--prompt-data and --tokenizer-path go together")
    for name in ("deltas", "probe_steps"):
        if not all(0.0 < value < float("inf") for value in getattr(args, name)):
            parser.error(f"--{name.replace('_', '-')} must be above 0 and finite")
    try:
        preset = get_preset(args.model_preset)
    except ValueError as unknown:
        parser.error(str(unknown))
    if preset.has_experts or preset.multi_latent_attention:
        parser.error(f"--model-preset {preset.name}: forward mode does not go through its experts or latent attention")
    return args


def measure(args: argparse.Namespace, dtype: str, seed: int) -> dict:
    """One group's figures."""
    flags = (
        f"--model-preset {args.model_preset} --optimizer logra --logra-rank {args.logra_rank} --update-rule "
        f"{args.update_rule} --group-size {args.group_size} --max-response-length {args.response_length} "
        f"--kl-probe-responses {args.group_size} --prompt-chunk-size 64"
    )
    with lift_float64() if dtype == "float64" else contextlib.nullcontext():
        live = open_update(open_model(flags, dtype=DTYPES[dtype], seed=seed, checkpoint=args.checkpoint))
        group = live.sample_group(prompt_length=args.prompt_length, seed=seed, prompt=read_prompt(args, seed))
        live.accumulate(1, group)
        live.update.logra.reduce()
        return probe_step(args, live, group)


def read_prompt(args: argparse.Namespace, seed: int) -> torch.Tensor | None:
    """The seed's prompt [1, P] of --prompt-data."""
    if args.prompt_data is None:
        return None
    prompts = load_prompts(args.prompt_data, DataConfig(prompt_data=args.prompt_data, tokenizer_path=args.tokenizer_path),
                           load_tokenizer(args.tokenizer_path))  # fmt: skip
    return torch.tensor([prompts[seed % len(prompts)].token_ids])


def probe_step(args: argparse.Namespace, live: LiveStep, group: PromptGroup) -> dict:
    """q by both ways, and the KL of each budget's step, of the direction that the sketches make."""
    logra, probe = live.update.logra, live.update.probe
    direction = logra.prepare()
    eta, base = direction.eta, probe.open([group], direction.eta)
    rate = probe.measure_rate(base, [group], eta, budget=max(args.deltas))
    differences = {}
    for size in args.probe_steps:
        other = change_probe(probe, kl_probe="finite-difference", kl_probe_step=size)
        opened = other.open([group], eta)
        ahead, behind = (other.measure_kl(opened, [group], sign * size * eta) for sign in (1, -1))
        differences[size] = rate_from_kl(ahead, behind, size)
    other = change_probe(probe, kl_probe="finite-difference")
    within = other.measure_rate(other.open([group], eta), [group], eta, budget=min(args.deltas))
    steps = []
    for delta in args.deltas:
        alpha = choose_alpha(rate, delta, alpha_max=1e9)
        with step_taken(logra, alpha * eta):
            measured = probe.measure_kl(base, [group])
        predicted = predicted_kl(rate, alpha)
        steps.append({
            "delta": delta, "alpha": alpha, "kl_predicted": predicted, "kl_measured": measured,
            "kappa": measured / predicted,
            "update_ratio": alpha * eta * direction.direction_norm / direction.weight_norm,
        })  # fmt: skip
    full = change_probe(probe, kl_probe="finite-difference", kl_probe_scope="full", kl_probe_step=args.probe_steps[-1])
    base = full.open([group], eta)  # gives up the prompt's state
    for step in steps:
        step["kl_measured_full"] = full.measure_kl(base, [group], step["alpha"] * eta)
    return {
        "contexts": base.contexts, "eta": eta, "rate_jvp": rate,
        "rate_finite_difference": {str(size): value for size, value in differences.items()},
        "rate_finite_difference_over_jvp": {str(size): value / rate for size, value in differences.items()},
        "rate_by_program": within, "rate_by_program_over_jvp": within / rate,
        "rate_full": full.measure_rate(base, [group], eta, budget=max(args.deltas)), "steps": steps,
    }


def change_probe(probe: KlProbe, **changes) -> KlProbe:
    """A probe of the same step under other settings."""
    return KlProbe(probe.step, replace(probe.config, **changes), probe.moved, probe.sum_group)


@contextlib.contextmanager
def step_taken(logra: Logra, step: float):
    """While inside, the weights have taken a step of the prepared direction; afterwards all is as before."""
    before = [(weight, weight.weight.detach().clone(), weight.moment) for weight in logra.weights]
    count = logra.steps_taken
    logra.apply(step)
    try:
        yield
    finally:
        for weight, values, moment in before:
            weight.weight.data.copy_(values)
            weight.moment = moment
        logra.steps_taken = count
        logra.prepare()


def make_table(found: list[dict]) -> str:
    """The measured steps as lines of a Markdown table."""
    heads = ("dtype", "seed", "delta", "alpha", "measured KL", "kappa", "measured, full", "q by difference / by jvp")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in found:
        ratios = ", ".join(f"{ratio:.4f} at {size}" for size, ratio in one["rate_finite_difference_over_jvp"].items())
        ratios += f", {one['rate_by_program_over_jvp']:.4f} as the program does"
        lines += [
            f"| {one['dtype']} | {one['seed']} | {step['delta']:.0e} | {step['alpha']:.4g} | "
            f"{step['kl_measured']:.4e} | {step['kappa']:.4f} | {step['kl_measured_full']:.4e} | {ratios} |"
            for step in one["steps"]
        ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line program; returns the exit code."""
    args = parse_arguments(argv)
    quiet_logs()
    found = [
        {"dtype": dtype, "seed": seed} | measure(args, dtype, seed) for dtype in args.dtypes for seed in args.seeds
    ]
    print(make_table(found), file=sys.stderr, flush=True)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    write_report({"settings": settings, "measured": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
