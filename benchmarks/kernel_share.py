"""What part of a system's step is spent in which operation, by torch's profiler: what limits it.

    .venv/bin/python benchmarks/kernel_share.py --systems exact prefix_grouper --prompt-length 8192

Each system takes a short step first, then the profiled one, in a process of its own. The profiler itself takes some time; compare
systems by benchmarks/run.sh, and parts of one step by this.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def profile_step(system: str, model_preset: str, folder: str, prompt_length: int, group_size: int, response_length: int, rows: int):
    """Print a system's step: processor seconds, attention's part, and the operations that took most."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.systems import Setup, draw_centred, run_steps, with_warm_up

    setup = Setup(model_preset=model_preset)
    batch = draw_centred(setup, prompt_length, response_length, group_size)

    @contextmanager
    def around(number: int):
        with nullcontext() if number == 0 else profile(activities=[ProfilerActivity.CPU]) as profiler:
            started = time.process_time()
            yield
            spent = time.process_time() - started
        if number:
            events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
            attention = sum(event.self_cpu_time_total for event in events if "attention" in event.key) / 1e6
            print(f"{system}: {spent:.2f} processor seconds, of them in attention's kernels {attention:.2f} ({attention / spent:.0%})")
            for event in events[:rows]:
                print(f"    {event.self_cpu_time_total / 1e6:8.3f} s  {event.count:6d} calls  {event.key}")

    run_steps(system, setup, Path(folder), with_warm_up(batch, 1), around)


def main(argv: list[str] | None = None) -> int:
    """The command line program; returns the exit code."""
    from benchmarks.points import SYSTEMS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--systems", nargs="+", choices=SYSTEMS, default=["exact", "prefix_grouper"], help="which are profiled")
    add("--model-preset", default="tiny-llama", help="see megatron/grpo/presets/")
    add("--prompt-length", type=int, default=8192, help="tokens")
    add("--group-size", type=int, default=8, help="responses")
    add("--response-length", type=int, default=128, help="tokens of each")
    add("--rows", type=int, default=12, help="operations shown")
    args = parser.parse_args(argv)
    import torch.multiprocessing as multiprocessing

    from benchmarks.systems import Setup, export_weights_of

    context = multiprocessing.get_context("spawn")
    sizes = (args.prompt_length, args.group_size, args.response_length, args.rows)
    with tempfile.TemporaryDirectory() as folder:
        steps = [(export_weights_of, (Setup(model_preset=args.model_preset), Path(folder)))]
        steps += [(profile_step, (system, args.model_preset, folder, *sizes)) for system in args.systems]
        for function, arguments in steps:
            process = context.Process(target=function, args=arguments)
            process.start()
            process.join()
            if process.exitcode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
