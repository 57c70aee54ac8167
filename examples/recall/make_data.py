"""Write the recall task's prompts and tokenizer: train.jsonl, eval.jsonl and tokenizer/ in one folder.

    python examples/recall/make_data.py --output runs/recall/data --prompt-tokens 1024 --num-facts 24

Row columns: `prompt` and `answer` (text), `fact_depth` (where the asked fact stands, from 0 to 1), `num_facts`.
Train and eval draw from streams of their own: more rows of one do not change the other.
"""

import argparse
import json
from pathlib import Path
from random import Random

from recall_task import RecallVocabulary, make_recall_prompt, save_tokenizer, to_text


def make_rows(
    vocabulary: RecallVocabulary,
    *,
    split: str,
    count: int,
    seed: int,
    num_facts: int,
    prompt_tokens: int,
    answer_tokens: int,
) -> list[dict]:
    """The rows of one split, each drawn from (seed, split, row) alone."""
    rows = []
    for index in range(count):
        rng = Random(f"recall/{seed}/{split}/{index}")
        prompt = make_recall_prompt(
            rng, vocabulary, num_facts=num_facts, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens
        )
        rows.append(
            {
                "prompt": to_text(vocabulary, prompt.token_ids),
                "answer": to_text(vocabulary, prompt.answer_ids),
                "fact_depth": round(prompt.fact_depth, 4),
                "num_facts": num_facts,
            }
        )
    return rows


def write_data(
    output: Path,
    *,
    vocabulary: RecallVocabulary,
    num_train: int,
    num_eval: int,
    seed: int,
    num_facts: int,
    prompt_tokens: int,
    answer_tokens: int,
) -> None:
    """Write train.jsonl, eval.jsonl and the tokenizer folder under `output`.

    Raises:
        ValueError: the numbers do not fit together (see `recall_task`).
    """
    output.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", num_train), ("eval", num_eval)):
        rows = make_rows(
            vocabulary,
            split=split,
            count=count,
            seed=seed,
            num_facts=num_facts,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
        )
        (output / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_tokenizer(vocabulary, output / "tokenizer")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--num-facts", type=int, default=24, help="facts in each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="length of each prompt, question included")
    parser.add_argument("--answer-tokens", type=int, default=1, help="values of each key, 1 to 3 say")
    parser.add_argument("--num-train", type=int, default=512, help="training prompts")
    parser.add_argument("--num-eval", type=int, default=64, help="held-out prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of both splits")
    parser.add_argument("--vocab-keys", type=int, default=48, help="keys in the vocabulary")
    parser.add_argument("--vocab-values", type=int, default=48, help="values in the vocabulary")
    parser.add_argument("--vocab-tokens", type=int, default=128, help="the whole vocabulary; the rest is filler")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments()
    try:
        vocabulary = RecallVocabulary(
            num_keys=options.vocab_keys, num_values=options.vocab_values, num_tokens=options.vocab_tokens
        )
        write_data(
            options.output,
            vocabulary=vocabulary,
            num_train=options.num_train,
            num_eval=options.num_eval,
            seed=options.seed,
            num_facts=options.num_facts,
            prompt_tokens=options.prompt_tokens,
            answer_tokens=options.answer_tokens,
        )
    except ValueError as error:
        raise SystemExit(f"make_data.py: {error}") from error
    print(
        f"{options.output}: {options.num_train} training and {options.num_eval} held-out prompts of "
        f"{options.prompt_tokens} tokens with {options.num_facts} facts; tokenizer of {options.vocab_tokens} words"
    )


if __name__ == "__main__":
    main()
