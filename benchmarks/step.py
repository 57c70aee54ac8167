"""Time and memory of one GRPO update, four ways, on the same model and tokens.

    conventional    full-sequence autograd, one sequence of prompt + response per response
    checkpointed    the same with activation checkpointing of every layer (Megatron's recompute full/uniform/1)
    exact           LongStraw with the exact gradient
    response_only   LongStraw with the prompt state as a constant: not the same gradient

Each runs in a process of its own, one after the other: `--repeat` timed updates, and one more under a meter that counts
tensor storages. An update is: forward, loss, backward, Adam step; `benchmarks/updates.py`
says what is held equal. `exact` also times its prompt alone: forward, recomputation and backward, without any response.

    python benchmarks/step.py --prompt-length 8192 --response-length 128 --group-size 8 --json -

All processes get the same number of compute threads (`--threads`, times the ranks for the runs without ranks). `seconds`
and `cpu_seconds` (of all threads and ranks: steadier on a busy machine) are those of the fastest repeat. `peak_bytes` is
the peak of live tensor storage over the model's own (weights, gradients, Adam moments), of the rank with most.
Exit code 0 means that every run asked for was measured; a run that was not has an `error`. It never judges.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from longstraw.patches.world_sizes import find_misfits  # noqa: E402
from megatron.grpo.presets import check_divisible, get_preset  # noqa: E402
from tools.tool_flags import check_at_least_1, check_report_path, check_seed  # noqa: E402
from tools.tool_reports import write_report  # noqa: E402

RUNS = ("conventional", "checkpointed", "exact", "response_only")
DTYPES = ("float64", "float32", "bf16")
_RANK = "LONGSTRAW_BENCHMARK_RANK"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-preset", default="tiny-qwen3.6", help="architecture; see megatron/grpo/presets/")
    add("--prompt-length", type=int, default=8192, help="tokens of the prompt")
    add("--response-length", type=int, default=128, help="tokens of each response")
    add("--group-size", type=int, default=8, help="responses")
    add("--chunk-size", type=int, default=1024, help="tokens of the prompt per chunk")
    add("--block-size", type=int, default=1024, help="tokens of a response per block")
    add("--responses-per-replay", type=int, default=4, help="responses that share a forward and a backward")
    add("--attention-output-residency", choices=("none", "host", "device"), default="host",
        help="where the forward sweep's attention outputs are kept; none recomputes them")  # fmt: skip
    add("--page-residency", choices=("device", "host"), default="device", help="as in training")
    add("--adjoint-residency", choices=("device", "host"), default="device", help="as in training")
    add("--recurrent-state-residency", choices=("device", "host"), default="device", help="as in training")
    add("--index-page-residency", choices=("device", "host"), default="device", help="as in training")
    add("--selection-residency", choices=("none", "host", "device"), default="host",
        help="where the forward sweep's selections of sparse attention are kept; none selects again")  # fmt: skip
    add("--live-chunks", type=int, default=0, help="of exact: chunks at the prompt's end whose graphs are kept instead of made again")
    add("--context-parallel-size", type=int, default=1, help="ranks of the two LongStraw runs")
    add("--expert-model-parallel-size", type=int, default=1, help="of these ranks, those that share the experts")
    add("--delta-rule", choices=("torch", "fused"), default="torch",
        help="kernel of gated delta net layers, in all runs: ours in torch, or flash-linear-attention's (on a GPU)")  # fmt: skip
    add("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
    add("--runs", default=",".join(RUNS), help="which, comma-separated")
    add("--measure", choices=("both", "time", "memory"), default="both", help="timed updates, the metered one, or both")
    add("--repeat", type=int, default=2, help="timed updates")
    add("--prompt-only", action=argparse.BooleanOptionalAction, default=True, help="time the prompt of exact alone as well")
    add("--threads", type=int, default=1, help="compute threads a rank")
    add("--seed", type=int, default=1, help="of weights and tokens")
    add("--json", default="-", metavar="PATH", help="where the report goes; - is standard output")
    args = parser.parse_args(argv)
    args.runs = args.runs.split(",")
    unknown = [run for run in args.runs if run not in RUNS]
    if unknown:
        parser.error(f"--runs {','.join(unknown)} is not known; known are {','.join(RUNS)}")
    check_at_least_1(parser, args, (
        "prompt_length", "response_length", "group_size", "responses_per_replay", "context_parallel_size",
        "expert_model_parallel_size", "chunk_size", "block_size", "repeat", "threads",
    ))  # fmt: skip
    if args.live_chunks < 0:
        parser.error(f"--live-chunks is at least 0, not {args.live_chunks}")
    check_seed(parser, args.seed)
    check_report_path(parser, args.json)
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    sizes = argparse.Namespace(tensor_model_parallel_size=1, context_parallel_size=cp, expert_model_parallel_size=ep)
    try:
        check_divisible(get_preset(args.model_preset), sizes)
    except ValueError as unfit:
        parser.error(str(unfit))
    for misfit in find_misfits(cp, tensor_parallel=1, context_parallel=cp, expert_parallel=ep):
        parser.error(misfit)
    if args.prompt_length < 2:
        parser.error("--prompt-length is at least 2: the prompt's last token starts the responses")
    return args


# --- One run, in its own process -------------------------------------------------------------------------------------


def build_update(args, run: str):
    """(update, model) of a run, on the current device."""
    import torch

    from benchmarks.updates import ConventionalUpdate, LongStrawUpdate
    from longstraw.patches.device import current_device
    from longstraw.patches.process_groups import initialize_groups, seed_model_parallel
    from longstraw.sweep_config import SweepConfig
    from longstraw.sweeps import ReplayEngine
    from megatron.grpo.model_provider import build_conventional_model, build_model, synchronize_parameters

    conventional = run in ("conventional", "checkpointed")
    cp, ep = (1, 1) if conventional else (args.context_parallel_size, args.expert_model_parallel_size)
    groups = initialize_groups(context_parallel=cp, expert_parallel=ep)
    seed_model_parallel(args.seed)
    preset = get_preset(args.model_preset)
    settings = dict(use_cpu_initialization=True, context_parallel_size=cp, expert_model_parallel_size=ep)
    if args.delta_rule == "fused":
        settings["deterministic_mode"] = False
    if run == "checkpointed":
        settings |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    config = preset.transformer_config(**settings)
    dtype = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    if conventional:
        model = build_conventional_model(preset, config, groups, flash=True).to(current_device(), dtype)
        return ConventionalUpdate(model, preset.vocab_size), model
    model = build_model(preset, config, groups).to(current_device(), dtype)
    synchronize_parameters(model, groups.cp, groups.expt_dp)
    sweep = SweepConfig(
        semantics=run, prompt_chunk_size=args.chunk_size, response_block_size=args.block_size,
        page_residency=args.page_residency, adjoint_residency=args.adjoint_residency,
        recurrent_state_residency=args.recurrent_state_residency,
        attention_output_residency=args.attention_output_residency,
        index_page_residency=args.index_page_residency, selection_residency=args.selection_residency,
        live_chunks=args.live_chunks if run == "exact" else 0,
    )
    engine = ReplayEngine(model, sweep, vocab_size=preset.vocab_size)
    return LongStrawUpdate(engine, args.responses_per_replay), model


def time_fastest(work, repeat: int) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process) of the fastest of `repeat` calls, each judged by itself."""
    import torch

    walls, cpus = [], []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def measure(args, run: str) -> dict:
    """One run's figures on this rank."""
    import torch

    from benchmarks.updates import draw_batch
    from longstraw.memory_meter import StorageMeter, read_peak_rss_bytes
    from longstraw.patches.device import current_device

    update, model = build_update(args, run)
    batch = draw_batch(
        args.prompt_length, args.response_length, args.group_size, get_preset(args.model_preset).vocab_size, args.seed,
        current_device(),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)

    def step(batch):
        update.accumulate(batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(batch.cut(min(args.prompt_length, 512), 1))  # makes gradients, moments and thread pools
    figures = {"tokens": update.tokens(batch)}
    if args.measure != "memory":
        figures["seconds"], figures["cpu_seconds"] = time_fastest(lambda: step(batch), args.repeat)
        if run == "exact" and args.prompt_only:
            prompt_only = time_fastest(lambda: update.accumulate_prompt_only(batch), args.repeat)
            figures["prompt_only_seconds"], figures["prompt_only_cpu_seconds"] = prompt_only
            optimizer.zero_grad(set_to_none=False)
    if args.measure != "time":
        with StorageMeter() as meter:
            step(batch)
        figures["peak_bytes"] = meter.peak_bytes
    if torch.cuda.is_available():
        figures["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return figures | {"peak_rss_bytes": read_peak_rss_bytes()}


def run_rank(args) -> None:
    """Join the ranks of one run, measure, and leave the figures where the parent reads them."""
    import torch
    import torch.distributed as dist

    run, rank, ranks, folder = json.loads(os.environ[_RANK])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/{run}.store", rank=rank, world_size=ranks)
    figures = measure(args, run)
    (Path(folder) / f"{run}.{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


# --- The parent ------------------------------------------------------------------------------------------------------


def launch(args, run: str, argv: list[str], folder: str) -> dict:
    """Start a run's ranks, wait for all, and put their figures together; `error` where a rank failed."""
    ranks = 1 if run in ("conventional", "checkpointed") else args.context_parallel_size
    threads = args.threads * (args.context_parallel_size if ranks == 1 else 1)
    processes = []
    try:
        for rank in range(ranks):
            environment = os.environ | {
                _RANK: json.dumps([run, rank, ranks, folder]), "OMP_NUM_THREADS": str(threads),
                "TORCH_COMPILE_DISABLE": "1", "PYTHONWARNINGS": "ignore", "LOCAL_RANK": str(rank),
            }  # fmt: skip
            command = [sys.executable, str(Path(__file__).resolve()), *argv]
            processes.append(subprocess.Popen(command, env=environment, stdout=sys.stderr))
        return _collect(run, processes, folder)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _collect(run: str, processes: list[subprocess.Popen], folder: str) -> dict:
    while any(process.poll() is None for process in processes):
        if any(process.poll() not in (None, 0) for process in processes):
            break
        time.sleep(0.1)
    failed = [process.returncode for process in processes if process.poll() not in (None, 0)]
    if failed:
        killed = failed[0] == -signal.SIGKILL
        reason = "killed: most likely out of memory" if killed else f"exit code {failed[0]}; see standard error"
        return {"error": f"{run} could not be measured ({reason})"}
    found = [json.loads((Path(folder) / f"{run}.{rank}.json").read_text()) for rank in range(len(processes))]
    summed = ("cpu_seconds", "prompt_only_cpu_seconds")
    return {key: (sum if key in summed else max)(figures[key] for figures in found) for key in found[0]}


def compute_ratios(runs: dict[str, dict]) -> dict[str, float]:
    """Every measured run over `exact`, and `exact` over its prompt alone, as far as they were measured."""
    exact, ratios = runs.get("exact", {}), {}
    for name, figures in runs.items():
        for key in ("seconds", "cpu_seconds", "peak_bytes"):
            if name != "exact" and key in figures and key in exact:
                ratios[f"{name}_over_exact_{key}"] = figures[key] / exact[key]
    if "prompt_only_seconds" in exact:
        ratios["exact_over_prompt_only"] = exact["seconds"] / exact["prompt_only_seconds"]
        ratios["exact_over_prompt_only_cpu"] = exact["cpu_seconds"] / exact["prompt_only_cpu_seconds"]
    return ratios


def main() -> int:
    """Launch the runs, or be a rank of one."""
    args = parse_arguments()
    if _RANK in os.environ:
        run_rank(args)
        return 0
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for run in args.runs:
            runs[run] = launch(args, run, sys.argv[1:], folder)
            print(f"{run}: {json.dumps(runs[run])}", file=sys.stderr, flush=True)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    write_report({"settings": settings, "runs": runs, "ratios": compute_ratios(runs)}, args.json)
    return int(any("error" in figures for figures in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
