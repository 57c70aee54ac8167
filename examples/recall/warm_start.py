"""Make the quickstart's warm start: teach a tiny model to recall facts, supervised, through the same engine.

    torchrun --nproc-per-node 2 examples/recall/warm_start.py --output runs/recall/warm_start

Every sequence lists facts and then asks many of them, with a loss on each answer; the number of facts doubles whenever
the answers' accuracy passes a threshold (`recall_task`). The longest context is 48 tokens: the model recalls there, and
less and less the longer the context, which is what RL has to mend. Each rank takes its own sequences; gradients are
summed over ranks as in training.

The gated delta nets do not start at random, but as a memory that looks up a word's successor (`start_as_memory`). With
random convolutions, 385 steps at a batch of 8 had only led from 1 fact to 4.

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
from recall_task import EOS, SPECIALS, RecallVocabulary, advance_num_facts, make_warm_start_sequence

from longstraw.adapters.gated_delta_net import StatefulGatedDeltaNet
from longstraw.patches.device import current_device
from longstraw.patches.finalize_model_grads import finalize_gradients, wrap_for_gradients
from longstraw.patches.process_groups import initialize_groups, seed_model_parallel
from longstraw.segments import Segment
from longstraw.sweep_config import SweepConfig
from longstraw.sweeps import ReplayEngine
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
    add("--batch", type=int, default=16, help="sequences a step, over all ranks")
    add("--learning-rate", type=float, default=3e-3, help="after a warm-up of 20 steps")
    add("--first-facts", type=int, default=2, help="facts a sequence at the start")
    add("--most-facts", type=int, default=8, help="facts a sequence at the end")
    add("--accuracy", type=float, default=0.9, help="at which the facts double")
    add("--last-accuracy", type=float, default=0.97, help="at which training ends, at the most facts")
    add("--filler", type=float, default=2.0, help="filler words for each token of facts, at most")
    add("--questions", type=int, default=24, help="questions a sequence")
    add("--answer-tokens", type=int, default=1, help="values of each key")
    add("--vocab-keys", type=int, default=32, help="as for make_data.py")
    add("--vocab-values", type=int, default=32, help="as for make_data.py")
    add("--vocab-tokens", type=int, default=96, help="as for make_data.py")
    add("--max-steps", type=int, default=800, help="give up after this many")
    return parser.parse_args()


@torch.no_grad()
def start_as_memory(model: torch.nn.Module, seed: int) -> None:
    """Start each gated delta net as a memory of which word follows which: the key of a token is the word before it.

    Queries and keys share one projection; the convolution passes values and queries on as they are and keys one token
    late (the shift of H3: Fu et al. 2023, arXiv 2212.14052), with a tenth of its random weights beside that. `dt_bias`
    is drawn so that decays per token are slow, steps from 0.001 to 0.1, log-uniform, as state-space models start
    (Mamba: Gu and Dao 2023, section 3.6); Megatron starts it at 1, a memory one token long.
    """
    generator = torch.Generator().manual_seed(seed)
    for net in (m for m in model.modules() if isinstance(m, StatefulGatedDeltaNet)):
        queries, keys = slice(0, net.qk_dim_local_tp), slice(net.qk_dim_local_tp, 2 * net.qk_dim_local_tp)
        net.in_proj.weight[keys] = net.in_proj.weight[queries]
        taps = net.conv1d.weight[:, 0].mul_(0.1)  # [channels, kernel]; the last tap is the token itself
        taps[:, -1] += 1.0
        taps[keys, -1] -= 1.0
        taps[keys, -2] += 1.0
        step = torch.empty(net.dt_bias.shape).uniform_(math.log(0.001), math.log(0.1), generator=generator).exp()
        net.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus gives the step back


class Batch:
    """Sequences of one shape as one segment, with the mean loss over all ranks' answer tokens."""

    def __init__(self, sequences, ranks: int):
        ids = torch.tensor([s.token_ids for s in sequences], device=current_device())
        self.mask = torch.tensor([s.loss_mask for s in sequences], device=ids.device)[:, 1:]
        self.values = (self.mask > 0) & (ids[:, 1:] != SPECIALS.index(EOS))
        self.correct = torch.zeros((), device=ids.device)
        self._count = self.mask.sum() * ranks
        self.segment = Segment("warm_start", ids[:, :-1], ids[:, 1:], self.loss)

    def loss(self, logprobs: torch.Tensor, columns: slice) -> torch.Tensor:
        """Cross entropy of the answers, and how many of their values have more than half of the probability."""
        self.correct += ((logprobs.detach() > math.log(0.5)) & self.values[:, columns]).sum()
        return -(logprobs * self.mask[:, columns]).sum() / self._count

    def accuracy(self) -> torch.Tensor:
        """Fraction of the values that the model holds likelier than not, on this rank."""
        return self.correct / self.values.sum()


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
    start_as_memory(model, args.seed)
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
                    answer_tokens=args.answer_tokens,
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
        if num_facts == args.most_facts and average >= args.last_accuracy:
            break
        if num_facts < args.most_facts and average >= args.accuracy:
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
