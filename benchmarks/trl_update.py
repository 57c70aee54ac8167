"""GRPO steps of TRL 1.16's own `GRPOTrainer`, on prompts and completions that are given to it.

The trainer is theirs, whole: its data loader, its scoring of rewards, its advantages, loss, gradient accumulation and
optimizer step. Two of its hooks put our tokens and advantages in: `rollout_func` returns the batch's completions where it
would have generated some (so generation costs nothing, as in the other systems), and the reward function returns the
batch's advantages, which `scale_rewards="none"` leaves as they are but for their mean. `draw_batch` tokens of equal length
need no padding. Settings that differ from its defaults are in `make_config`, each because the CPU or equal terms ask for it.

A micro-batch is one sequence, as many a step as the group has: the least memory that it can do with. Its old
log-probabilities are its new ones, detached (one update a batch), so it scores nothing twice. Its head's workspace is cut to
the vocabulary where that is smaller than the width it is made for: untouched memory that no real model would show.

On a CPU its head scores every position of a sequence, on a GPU the completion's alone. Left out: generation, a reference model (beta is 0), logging, clipping of gradients.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from benchmarks.transformers_model import load_model
from benchmarks.updates import Batch


def make_config(
    group_size: int, response_length: int, steps: int, folder: str, *, checkpointed: bool, learning_rate: float
) -> GRPOConfig:
    """The trainer's settings. checkpointed: its default, recomputation of every layer; off is faster and takes more."""
    return GRPOConfig(
        output_dir=folder, max_steps=steps, learning_rate=learning_rate, lr_scheduler_type="constant", optim="adamw_torch",
        weight_decay=0.0, max_grad_norm=0.0, per_device_train_batch_size=1, gradient_accumulation_steps=group_size,
        num_generations=group_size, max_completion_length=response_length, scale_rewards="none", loss_type="dapo", beta=0.0,
        gradient_checkpointing=checkpointed, bf16=False, use_cpu=not torch.cuda.is_available(), shuffle_dataset=False,
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
    )


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A word for each token id: the trainer decodes completions for reward functions."""
    words = {f"<{token}>": token for token in range(vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<0>")))
    tokenizer.pad_token, tokenizer.eos_token = "<0>", "<1>"
    return tokenizer


class _Hooks(TrainerCallback):
    """Enters `around()` at a step's start and leaves it at its end; shows the gradient to `see_gradient`."""

    def __init__(self, around: Callable[[int], AbstractContextManager], see_gradient):
        self.around, self.see_gradient, self.open = around, see_gradient, None

    def on_step_begin(self, args, state, control, **_):
        self.open = self.around(state.global_step)
        self.open.__enter__()

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if self.see_gradient is not None:
            self.see_gradient(model)

    def on_step_end(self, args, state, control, **_):
        self.open.__exit__(None, None, None)


class TrlTraining:
    """Some steps of the trainer."""

    def __init__(self, folder, *, checkpointed: bool = False, learning_rate: float = 1e-6):
        self.model = load_model(folder)
        self.settings = {"checkpointed": checkpointed, "learning_rate": learning_rate}
        width = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE  # an AttributeError here: this TRL is not the one that was checked
        trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = min(width, self.model.config.vocab_size)

    def train(self, batches: list[Batch], around, scratch: str, *, see_gradient=None) -> GRPOTrainer:
        """One optimizer step a batch, all of one group size, each inside `around(number)`, numbers from 0.

        scratch: the trainer's output folder. see_gradient: called with the model when a step's gradient is complete.
        """
        group, tokens = batches[0].responses.shape
        step = iter(batches)
        current: list[Batch] = []

        def give_completions(prompts, trainer) -> dict:
            current[:] = [next(step)]
            batch = current[0]
            return {
                "prompt_ids": [batch.prompt[0].tolist()] * group, "completion_ids": batch.responses.tolist(),
                "logprobs": torch.zeros(group, tokens).tolist(), "given_reward": batch.advantages.tolist(),
            }

        def read_reward(prompts, completions, given_reward, **_) -> list[float]:
            return given_reward

        trainer = GRPOTrainer(
            model=self.model, reward_funcs=read_reward, rollout_func=give_completions,
            args=make_config(group, tokens, len(batches), scratch, **self.settings),
            train_dataset=Dataset.from_dict({"prompt": ["<0>"] * len(batches)}),
            processing_class=make_tokenizer(self.model.config.vocab_size), callbacks=[_Hooks(around, see_gradient)],
        )
        trainer.train()
        return trainer
