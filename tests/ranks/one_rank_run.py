"""Start and end of a run, and what the optimizer does to weights, in a world of one rank without torchrun.

Takes a scratch folder. Two runs follow each other in this process, as a notebook would have them.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args, get_tensorboard_writer

from longstraw.patches.device import cuda_means_cpu
from megatron.grpo.arguments import parse_arguments
from megatron.grpo.initialize import initialize, shut_down, write_arguments
from megatron.grpo.model_setup import build_training_model, wrap_model
from megatron.grpo.optimizer import build_optimizer, build_scheduler, gradients_are_finite, step_optimizer

FLAGS = "--model-preset tiny-llama --num-layers 1 --prompt-data p --tokenizer-path t --max-response-length 8 --train-iters 10"


def parse(flags: str):
    return parse_arguments(f"{FLAGS} {flags}".split())[0]


def draw() -> list[float]:
    from megatron.core import tensor_parallel

    with cuda_means_cpu(), tensor_parallel.get_cuda_rng_tracker().fork():
        return [*torch.rand(2).tolist()]


def check_start_and_end(folder: Path) -> None:
    drawn = []
    for _ in range(2):
        args = parse(f"--output-dir {folder}/run --save {folder}/ckpt --save-interval 1 --seed 5")
        groups = initialize(args)
        assert (groups.tp.size(), groups.cp.size(), groups.dp.size()) == (1, 1, 1)
        assert get_args() is args and parallel_state.model_parallel_is_initialized()
        drawn.append([draw(), torch.rand(2).tolist()])
        assert not (folder / "run" / "arguments.json").exists() or drawn[1:], "a run that is refused later leaves none"
        write_arguments(args)
        saved = json.loads((folder / "run" / "arguments.json").read_text())
        assert saved["group_size"] == 8 and saved["num_layers"] == 1 and saved["calculate_per_token_loss"] is True
        # The events are the recorder's: a writer of Megatron's would leave a second, empty run beside them.
        assert get_tensorboard_writer() is None and args.tensorboard_dir == f"{folder}/run/tensorboard"
        shut_down()
        assert not dist.is_initialized()
    assert drawn[0] == drawn[1]


def check_two_runs_at_once(folder: Path) -> None:
    """The second run in the same folder is refused while the first one lives, and not after it was killed."""
    (folder / "held").mkdir()
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)\n" \
           "time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", hold, str(folder / "held" / ".lock")], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    for flags in (f"--output-dir {folder}/held", f"--output-dir {folder}/free --save {folder}/held --save-interval 1",
                  f"--output-dir {folder}/free --weight-sync full --weight-sync-dir {folder}/held"):  # fmt: skip
        try:
            initialize(parse(flags))
        except ValueError as error:
            assert "another run is writing to" in str(error) and "and --weight-sync-dir" in str(error), error
        else:
            raise AssertionError("two runs share a folder")
    other.kill()
    other.wait()
    initialize(parse(f"--output-dir {folder}/held"))
    shut_down()


def train(folder: Path, flags: str, steps: int, gradient=1.0):
    """A run of `steps` steps with constant gradients -> (model, optimizer, learning rates, norms)."""
    args = parse(f"--output-dir {folder}/run {flags}")
    groups = initialize(args)
    model = build_training_model(args, groups)
    before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    ddp = wrap_model(args, model, groups)
    optimizer = build_optimizer(args, ddp, groups)
    scheduler = build_scheduler(args, optimizer)
    rates, norms = [], []
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.main_grad.fill_(gradient)
        assert gradients_are_finite(ddp, groups)
        rates.append(optimizer.param_groups[0]["lr"])
        ok, norm = step_optimizer(optimizer, scheduler)
        assert ok
        norms.append(norm)
        ddp.zero_grad_buffer()
    shut_down()
    return model, before, rates, norms


def check_schedules(folder: Path) -> None:
    """Rates count optimizer steps: linear warmup from --lr-warmup-init, then the decay until --lr-decay-iters."""
    constant = train(folder, "--lr 0.5 --lr-warmup-iters 4", 6)[2]
    assert constant == [0.0, 0.125, 0.25, 0.375, 0.5, 0.5], constant
    linear = train(folder, "--lr 1 --min-lr 0.2 --lr-decay-style linear --lr-decay-iters 4", 6)[2]
    assert all(abs(a - b) < 1e-9 for a, b in zip(linear, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2])), linear
    cosine = train(folder, "--lr 1 --lr-decay-style cosine", 6)[2]
    assert abs(cosine[5] - 0.5) < 1e-9, cosine


def check_adam(folder: Path) -> None:
    """Clipping, decay of matrices only, and torch's own AdamW on the same numbers."""
    model, before, _, norms = train(folder, "--lr 0.01 --weight-decay 0.1 --clip-grad 2 --adam-beta2 0.95", 3, 0.3)
    total = sum(p.numel() for p in model.parameters())
    assert all(abs(norm - 0.3 * total**0.5) < 1e-3 * norm for norm in norms)
    clipped = 0.3 * 2 / (0.3 * total**0.5)
    for name, parameter in model.named_parameters():
        reference = torch.nn.Parameter(before[name].clone())
        decay = 0.1 if reference.dim() > 1 else 0.0
        adam = torch.optim.AdamW([reference], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
        for _ in range(3):
            reference.grad = torch.full_like(reference, clipped)
            adam.step()
        torch.testing.assert_close(parameter.detach(), reference.detach(), rtol=1e-5, atol=1e-6)


def check_bf16(folder: Path) -> None:
    """Steps too small for bf16 add up in the float32 weights: 20 of 1e-4 move a weight of 1."""
    model, before, _, _ = train(folder, "--bf16 --lr 1e-4 --train-iters 40 --clip-grad 0 --weight-decay 0", 40)
    weight = dict(model.named_parameters())["decoder.final_layernorm.weight"]
    assert weight.dtype is torch.bfloat16 and weight.main_grad.dtype is torch.float32
    assert (before["decoder.final_layernorm.weight"] == 1).all()
    torch.testing.assert_close(weight.float(), torch.full_like(weight, 1 - 40e-4).float(), rtol=0, atol=2**-8)
    assert (weight != 1).all()


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for check in (check_start_and_end, check_two_runs_at_once, check_schedules, check_adam, check_bf16):
        check(folder)
        print(f"passed: {check.__name__}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[3]))
