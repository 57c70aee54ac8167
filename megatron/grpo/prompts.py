"""Load the prompts of a run: read rows, encode them, check them, drop those over the limit and say so.

A prompt is kept whole or dropped whole, never cut. A row that cannot be used stops the run before it starts, with
its file and row number, since training on what is left would be a different experiment.

Each rank holds all token ids in memory, 4 bytes a token. Left out: streaming, packing, images.
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Optional

from megatron.grpo.prompt_files import Row, describe_columns, find_column, read_rows
from megatron.grpo.tokenizer import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERL_ANSWER_COLUMN = "reward_model.ground_truth"
"""Where verl and DAPO-Math keep the answer; used when `answer` is asked for and the file has only this."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from and in which order they are trained on."""

    prompt_data: Optional[str] = None
    """Training prompts: a .jsonl or .parquet file, a folder of such files, or a Hugging Face dataset folder
    (save_to_disk). Required."""

    eval_data: Optional[str] = None
    """Held-out prompts, in the same formats and columns. Without it no evaluation runs."""

    prompt_column: str = "prompt"
    """Column of the prompt: a string, chat messages (a list of role and content), or a list of token ids. A dotted
    name reaches into a nested column."""

    answer_column: str = "answer"
    """Column of the answer that reward functions receive; dotted names as for --prompt-column. The default also
    finds reward_model.ground_truth, where verl's files keep it. An empty string means that there are no answers."""

    prompt_length_limit: Optional[int] = None
    """Longest prompt in tokens, chat template included. Longer prompts are dropped whole, counted and reported."""

    tokenizer_path: Optional[str] = None
    """Folder of a Hugging Face tokenizer, or a .gguf file that holds one. Required."""

    apply_chat_template: bool = False
    """Encode a string prompt as one user message through the tokenizer's chat template. Chat messages always go
    through it."""

    prompts_per_step: int = 1
    """Prompts in one optimizer step, over all data-parallel ranks."""

    shuffle_prompts: bool = True
    """Visit the prompts in file order instead of a new order in each epoch."""

    prompt_order_seed: int = 0
    """Seed of the order in which prompts are visited."""

    def __post_init__(self) -> None:
        if not self.prompt_data:
            raise ValueError("--prompt-data is required: a .jsonl or .parquet file or a dataset folder")
        if not self.tokenizer_path:
            raise ValueError("--tokenizer-path is required: a Hugging Face tokenizer folder or a .gguf file")
        if not self.prompt_column:
            raise ValueError("--prompt-column must name a column")
        if self.prompts_per_step < 1:
            raise ValueError(f"--prompts-per-step must be at least 1, not {self.prompts_per_step}")
        if self.prompt_length_limit is not None and self.prompt_length_limit < 1:
            raise ValueError(f"--prompt-length-limit must be at least 1, not {self.prompt_length_limit}")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready for the engine."""

    prompt_id: str
    """File name and row number, such as `train.jsonl:17`."""

    token_ids: tuple[int, ...]
    """The whole prompt, chat template included."""

    answer: str
    """What the reward function compares with; an empty string where the data has no answers."""

    extra: dict[str, Any]
    """Every other column of the row, under its own name."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What loading kept and what it dropped. Lengths are in tokens."""

    path: str
    rows: int
    kept: int
    dropped: int
    prompt_length_limit: Optional[int]
    shortest_kept: int
    longest_kept: int
    longest_dropped: int
    answer_column: str

    def __str__(self) -> str:
        lengths = f"{self.shortest_kept:,} to {self.longest_kept:,} tokens"
        answers = f"answers from `{self.answer_column}`" if self.answer_column else "no answers"
        text = f"{self.path}: {self.kept:,} of {self.rows:,} prompts kept, {lengths}, {answers}"
        if self.dropped:
            text += (
                f"; {self.dropped:,} dropped as longer than --prompt-length-limit {self.prompt_length_limit:,} "
                f"(the longest has {self.longest_dropped:,})"
            )
        return text


class PromptDataset(Sequence[Prompt]):
    """Prompts in file order; `PromptOrder` decides in which order they are visited."""

    def __init__(self, prompts: Sequence[Prompt], report: LoadReport) -> None:
        # A tuple of Python integers takes some 36 bytes a token, which adds up over prompts of a million tokens.
        self._token_ids = [array("i", prompt.token_ids) for prompt in prompts]
        self._prompts = [replace(prompt, token_ids=()) for prompt in prompts]
        self.report = report
        """What was kept and dropped."""
        self.fingerprint = _fingerprint(self._prompts, self._token_ids)
        """Changes whenever a prompt's tokens or answer, or the prompts' number or order, change."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index):  # Sequence's signature: an int gives a Prompt, a slice a list of them
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return replace(self._prompts[index], token_ids=tuple(self._token_ids[index]))


def load_prompts(path: str, config: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> PromptDataset:
    """Load all prompts at `path` (`config.prompt_data` or `config.eval_data`).

    Args:
        path: file or folder, see `prompt_files.read_rows`.
        config: column names, the length limit and the use of the chat template.
        tokenizer: from `tokenizer.load_tokenizer`.

    Raises:
        ValueError: a column is missing, a prompt is empty or cannot be encoded, an answer is null, either holds half of
            a surrogate pair (each with file and row), there are no rows, or every prompt is over the limit.
    """
    limit = config.prompt_length_limit
    prompts: list[Prompt] = []
    dropped_lengths: list[int] = []
    answer_column = None
    for row in read_rows(path):
        if answer_column is None:
            answer_column = _choose_answer_column(row, config)
        prompt = _load_prompt(row, config, answer_column, tokenizer)
        if limit is not None and len(prompt.token_ids) > limit:
            dropped_lengths.append(len(prompt.token_ids))
        else:
            prompts.append(prompt)
    if answer_column is None:
        raise ValueError(f"{path}: no rows")
    if not prompts:
        raise ValueError(
            f"{path}: all {len(dropped_lengths)} prompts are longer than --prompt-length-limit {limit} "
            f"(the shortest has {min(dropped_lengths)} tokens)"
        )
    lengths = [len(prompt.token_ids) for prompt in prompts]
    report = LoadReport(
        path=str(path),
        rows=len(prompts) + len(dropped_lengths),
        kept=len(prompts),
        dropped=len(dropped_lengths),
        prompt_length_limit=limit,
        shortest_kept=min(lengths),
        longest_kept=max(lengths),
        longest_dropped=max(dropped_lengths, default=0),
        answer_column=answer_column,
    )
    return PromptDataset(prompts, report)


def _choose_answer_column(row: Row, config: DataConfig) -> str:
    """The answer column of the whole file, settled on its first row."""
    if config.answer_column == "answer" and not find_column(row.columns, "answer")[0]:
        if find_column(row.columns, VERL_ANSWER_COLUMN)[0]:
            return VERL_ANSWER_COLUMN
    return config.answer_column


def _load_prompt(row: Row, config: DataConfig, answer_column: str, tokenizer: "PreTrainedTokenizerBase") -> Prompt:
    text = _require_column(row, config.prompt_column, "--prompt-column")
    answer = _require_column(row, answer_column, "--answer-column") if answer_column else ""
    if isinstance(text, str) or (isinstance(text, list) and any(isinstance(item, dict) for item in text)):
        _refuse_half_pairs(row, config.prompt_column, text)
    try:
        token_ids = encode_prompt(tokenizer, text, apply_chat_template=config.apply_chat_template)
    except ValueError as error:
        raise ValueError(
            f"{row.place}, column `{config.prompt_column}`: {error} (columns: {describe_columns(row.columns)})"
        ) from error
    if not token_ids:
        raise ValueError(f"{row.place}, column `{config.prompt_column}`: the prompt has no tokens")
    answer = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    _refuse_half_pairs(row, answer_column, answer)
    extra = {name: value for name, value in row.columns.items() if name not in (config.prompt_column, answer_column)}
    return Prompt(
        prompt_id=f"{row.source.name}:{row.number}",
        token_ids=tuple(token_ids),
        answer=answer,
        extra=extra,
    )


def _refuse_half_pairs(row: Row, name: str, value: Any) -> None:
    """Half of a surrogate pair, which JSON may hold (`"\\ud800"`), is no character: it has no UTF-8 and no tokens."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{row.place}, column `{name}`: holds half of a surrogate pair, \\u{ord(text[error.start]):04x}, which is "
            "no character"
        ) from error


def _require_column(row: Row, name: str, flag: str) -> Any:
    found, value = find_column(row.columns, name)
    if not found:
        raise ValueError(
            f"{row.place}: no column `{name}` ({flag}); the columns there are: {describe_columns(row.columns)}"
        )
    if value is None:
        raise ValueError(
            f"{row.place}: column `{name}` ({flag}) is null; the columns there are: {describe_columns(row.columns)}"
        )
    return value


def _fingerprint(prompts: Sequence[Prompt], token_ids: Sequence[array]) -> str:
    digest = sha256()
    for prompt, ids in zip(prompts, token_ids, strict=True):
        for part in (ids.tobytes(), prompt.answer.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()[:16]
