"""What a run reads before it has a model: tokenizer, prompts, and their order.

Left out: where the order stands (checkpoints and rollout stores say that).
"""

from dataclasses import dataclass

import torch.distributed as dist

from megatron.grpo.prompt_order import PromptOrder
from megatron.grpo.prompts import PromptDataset, load_prompts
from megatron.grpo.tokenizer import load_tokenizer, stop_token_ids


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything that a run reads, equal on every rank; `order` moves on with the steps."""

    tokenizer: object
    stop_ids: frozenset[int]
    train_prompts: PromptDataset
    eval_prompts: PromptDataset | list
    """An empty list without --eval-data."""
    order: PromptOrder

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, held-out ones included."""
        return max(prompts.report.longest_kept for prompts in (self.train_prompts, self.eval_prompts) if len(prompts))


def load_run_data(args, config) -> RunData:
    """Read what --tokenizer-path, --prompt-data and --eval-data name; rank 0 reports it.

    Raises ValueError where the tokenizer does not fit the model, a prompt leaves no room to answer, or there are too few.
    """
    tokenizer = load_tokenizer(config.data.tokenizer_path)
    if len(tokenizer) > args.vocab_size:
        raise ValueError(
            f"--tokenizer-path {config.data.tokenizer_path} has {len(tokenizer)} tokens, more than the {args.vocab_size} of "
            f"--model-preset {args.model_preset}: give --vocab-size {len(tokenizer)} or more"
        )
    train_prompts, eval_prompts = (
        _load_prompts(path, config, tokenizer, args.max_position_embeddings)
        for path in (config.data.prompt_data, config.data.eval_data)
    )
    if config.data.prompts_per_step > len(train_prompts):
        raise ValueError(
            f"--prompts-per-step {config.data.prompts_per_step} is more than the {len(train_prompts)} prompts of "
            f"--prompt-data {config.data.prompt_data}"
        )
    order = PromptOrder(
        len(train_prompts), seed=config.data.prompt_order_seed, shuffle=config.data.shuffle_prompts,
        fingerprint=train_prompts.fingerprint,
    )
    return RunData(
        tokenizer=tokenizer, stop_ids=frozenset(stop_token_ids(tokenizer, config.data.tokenizer_path)),
        train_prompts=train_prompts, eval_prompts=eval_prompts, order=order,
    )


def _load_prompts(path: str | None, config, tokenizer, max_positions: int) -> PromptDataset | list:
    prompts = load_prompts(path, config.data, tokenizer) if path else []
    if path and dist.get_rank() == 0:
        print(prompts.report, flush=True)
    if path and prompts.report.longest_kept + config.sampling.max_response_length > max_positions:
        raise ValueError(
            f"{path}: a prompt of {prompts.report.longest_kept} tokens and --max-response-length "
            f"{config.sampling.max_response_length} exceed --max-position-embeddings {max_positions}: "
            "set --prompt-length-limit"
        )
    return prompts
