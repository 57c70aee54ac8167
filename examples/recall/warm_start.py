"""Make the quickstart's warm start: teach a tiny model to recall facts, supervised, through the same engine.

    torchrun --nproc-per-node 2 examples/recall/warm_start.py --output runs/recall/warm_start

Every sequence lists facts and then asks many of them, with a loss on each answer; the number of facts doubles whenever
the answers' accuracy passes a threshold (`recall_task`). Training stops on contexts shorter than the RL prompts, so that
there is something left to learn. Each rank takes its own sequences; gradients are summed over ranks as in training.

Left out: schedules beyond a linear warm-up, held-out evaluation (the RL run measures that), resuming.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from recall_task import RecallVocabulary, advance_num_facts, make_warm_start_sequence

from longstraw.patches.device import current_device
from longstraw.patches.finalize_model_grads import finalize_gradients, wrap_for_gradients
from longstraw.patches.process_groups import initialize_groups, seed_model_parallel
from longstraw.segments import Segment
from longstraw.sweeps import ReplayEngine, SweepConfig
from megatron.grpo.checkpointing import save_weights
from megatron.grpo.model_provider import build_model, pad_vocab_size, synchronize_parameters
from megatron.grpo.presets import get_preset
from megatron.grpo.quiet_logs import quiet_logs


def parse_arguments() -> argparse.Namespace:
    """The script's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of the checkpoint")
    add("--model-preset", default="tiny-qwen3.6", help="architecture")
    add("--seed", type=int, default=0, help="of weights and sequences")
    add("--batch", type=int, default=32, help="sequences a step, over all ranks")
    add("--learning-rate", type=float, default=3e-3, help="after a warm-up of 20 steps")
    add("--first-facts", type=int, default=1, help="facts a sequence at the start")
    add("--most-facts", type=int, default=4, help="facts a sequence at the end")
    add("--accuracy", type=float, default=0.96, help="at which the facts double, and training ends at the most facts")
    add("--filler", type=float, default=6.0, help="filler words for each token of facts, at most")
    add("--questions", type=int, default=16, help="questions a sequence")
    add("--hesitations", type=int, default=8, help="of these answers begin with a filler word, which no verifier takes")
    add("--answer-tokens", type=int, default=1, help="values of each key")
    add("--vocab-keys", type=int, default=16, help="as for make_data.py")
    add("--vocab-values", type=int, default=16, help="as for make_data.py")
    add("--vocab-tokens", type=int, default=48, help="as for make_data.py")
    add("--max-steps", type=int, default=800, help="give up after this many")
    return parser.parse_args()


def lengthen_memory(model: torch.nn.Module, seed: int) -> None:
    """Draw the gated delta nets' `dt_bias` so that decays per token are slow: steps from 0.001 to 0.1, log-uniform.

    As state-space models start (Mamba, Gu and Dao 2023, section 3.6). Megatron starts at 1, whose memory is a token long.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.exp(torch.empty(parameter.shape).uniform_(math.log(0.001), math.log(0.1), generator=generator))
            parameter.data.copy_(step + torch.log(-torch.expm1(-step)))  # softplus gives the step back


class Batch:
    """Sequences of one shape as one segment, with the mean loss over all ranks' answer tokens."""

    def __init__(self, sequences, ranks: int):
        ids = torch.tensor([s.token_ids for s in sequences], device=current_device())
        self.mask = torch.tensor([s.loss_mask for s in sequences], device=ids.device)[:, 1:]
        self.settled = torch.tensor([s.settled_mask for s in sequences], device=ids.device)[:, 1:]
        self.correct = torch.zeros((), device=ids.device)
        self._count = self.mask.sum() * ranks
        self.segment = Segment("warm_start", ids[:, :-1], ids[:, 1:], self.loss)

    def loss(self, logprobs: torch.Tensor, columns: slice) -> torch.Tensor:
        """Cross entropy of the answers, and how many of them have more than half of the probability."""
        mask = self.mask[:, columns]
        self.correct += ((logprobs.detach() > -0.693) & (self.settled[:, columns] > 0)).sum()
        return -(logprobs * mask).sum() / self._count

    def accuracy(self) -> torch.Tensor:
        """Fraction of the settled answer tokens that the model holds likelier than not, on this rank."""
        return self.correct / self.settled.sum()


def main() -> None:
    """Train and save."""
    args = parse_arguments()
    quiet_logs()
    groups = initialize_groups()
    seed_model_parallel(args.seed)
    torch.manual_seed(args.seed)
    preset = get_preset(args.model_preset)
    vocabulary = RecallVocabulary(
        num_keys=args.vocab_keys, num_values=args.vocab_values, num_tokens=args.vocab_tokens
    )
    config = preset.transformer_config(use_cpu_initialization=True)
    padded = pad_vocab_size(preset.vocab_size, 128, 1)
    model = build_model(preset, config, groups, padded_vocab_size=padded).to(current_device())
    lengthen_memory(model, args.seed)
    synchronize_parameters(model, dist.group.WORLD)
    ddp = wrap_for_gradients(model, groups)
    engine = ReplayEngine(model, SweepConfig(response_block_size=1 << 20), vocab_size=preset.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    ranks, rng = dist.get_world_size(), Random(f"warm_start/{args.seed}/{dist.get_rank()}")
    shape_rng = Random(f"warm_start/{args.seed}/shapes")  # the same on every rank
    num_facts, average, started = args.first_facts, 0.0, time.time()
    for step in range(1, args.max_steps + 1):
        context = int(num_facts * (1 + args.answer_tokens) * (1 + args.filler * shape_rng.random()))
        batch = Batch(
            [
                make_warm_start_sequence(
                    rng, vocabulary, num_facts=num_facts, context_tokens=context, num_questions=args.questions,
                    answer_tokens=args.answer_tokens, num_hesitations=args.hesitations,
                )
                for _ in range(args.batch // ranks)
            ],
            ranks,
        )
        with ddp.no_sync():
            loss = engine.replay(batch.segment)
        finalize_gradients(ddp, engine.adapters, groups)
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, step / 20)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ddp.zero_grad_buffer()
        figures = torch.stack([torch.tensor(loss), batch.accuracy().cpu() / ranks])
        dist.all_reduce(figures)
        average = 0.8 * average + 0.2 * figures[1].item()
        if dist.get_rank() == 0 and (step % 25 == 0 or step == 1):
            print(
                f"step {step}: {num_facts} facts in {context} tokens, loss {figures[0]:.3f}, accuracy {average:.3f}, "
                f"{time.time() - started:.0f} s", flush=True,
            )
        if average >= args.accuracy:
            if num_facts == args.most_facts:
                break
            num_facts, average = advance_num_facts(num_facts, 1.0, most=args.most_facts), 0.0
    else:
        raise SystemExit(f"warm_start.py: {num_facts} facts are not learnt after {args.max_steps} steps")
    path = save_weights(args.output, model, groups, vocab_size=preset.vocab_size)
    if dist.get_rank() == 0:
        print(f"{num_facts} facts learnt in {step} steps and {time.time() - started:.0f} s: {path}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
