"""Turn a prompt into token ids: the tokenizer, its chat template, and the ids that end a response.

The tokenizer is transformers' own, read from local files only. A response is never re-tokenised: its ids come
from the sampler, and `decode_response` serves the reward functions alone.

Left out: images and tools in chat messages, and training with a template other than the tokenizer's.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a Hugging Face folder or a `.gguf` file (its chat template included).

    Reading a GGUF vocabulary takes some ten seconds; `tokenizer.save_pretrained(folder)` makes a folder that
    loads at once.

    Raises:
        ValueError: the path does not exist, or holds no tokenizer.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"--tokenizer-path {path}: no such folder or .gguf file")
    from transformers import AutoTokenizer

    try:
        if path.suffix == ".gguf":
            from megatron.grpo.conversion.gguf import read_once

            with read_once():
                tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--tokenizer-path {path}: no tokenizer could be read there ({error})") from error
    # The length a tokenizer was published with only makes it warn: prompts are limited by --prompt-length-limit.
    tokenizer.model_max_length = int(1e30)
    return tokenizer


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | Sequence[int] | Sequence[dict[str, Any]],
    *,
    apply_chat_template: bool,
) -> list[int]:
    """Encode one prompt; what it is decides how.

    Chat messages (a list of `{"role", "content"}`) go through the chat template, with the header of the
    assistant's turn at the end. A string goes through it as one user message if `apply_chat_template`, and is
    otherwise encoded as it stands, with the special tokens that the tokenizer adds by itself. A list of integers
    is taken as token ids.

    Raises:
        ValueError: the prompt is empty, of another kind, an id is outside the vocabulary, or a chat template is
            needed and the tokenizer has none.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        if apply_chat_template:
            return _encode_messages(tokenizer, [{"role": "user", "content": prompt}])
        return list(tokenizer(prompt)["input_ids"])
    if not isinstance(prompt, (list, tuple)):
        raise ValueError(f"the prompt is a {type(prompt).__name__}, not a string, chat messages or token ids")
    if not prompt:
        raise ValueError("the prompt is empty")
    if all(isinstance(item, dict) for item in prompt):
        _check_messages(prompt)
        return _encode_messages(tokenizer, prompt)
    if all(type(item) is int for item in prompt):
        outside = [item for item in prompt if not 0 <= item < len(tokenizer)]
        if outside:
            raise ValueError(f"token id {outside[0]} is outside the tokenizer's vocabulary of {len(tokenizer)}")
        return list(prompt)
    raise ValueError("the prompt is a list of neither chat messages nor token ids")


def stop_token_ids(tokenizer: "PreTrainedTokenizerBase", path: str | Path | None = None) -> tuple[int, ...]:
    """The ids that end a response: the tokenizer's end token, and those in `generation_config.json` beside it.

    Chat models often name several there (Qwen3 ends a turn with one id and a document with another).

    Raises:
        ValueError: neither names any.
    """
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    generation_config = None if path is None else Path(path) / "generation_config.json"
    if generation_config is not None and generation_config.exists():
        listed = json.loads(generation_config.read_text()).get("eos_token_id")
        ids.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if not ids:
        raise ValueError("the tokenizer names no end token, so no response could end; set its eos_token")
    return tuple(sorted(ids))


def decode_response(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """The text of a response for reward functions, without special tokens and exactly as spaced."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _encode_messages(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, Any]]) -> list[int]:
    if tokenizer.chat_template is None:
        raise ValueError(
            "chat messages need a chat template and the tokenizer has none; use a string prompt without "
            "--apply-chat-template, or a tokenizer folder with a chat template"
        )
    return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))


def _check_messages(messages: Sequence[dict[str, Any]]) -> None:
    for index, message in enumerate(messages, start=1):
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise ValueError(
                    f"chat message {index} has no text in `{field}`; a message is an object with the strings "
                    "`role` and `content`"
                )
    if not any(message["content"].strip() for message in messages):
        raise ValueError("the prompt is empty: none of its chat messages has any content")
