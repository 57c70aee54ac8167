"""The recall task: facts scattered through a long prompt, a question at its end, a short answer.

One grammar over a small vocabulary serves the supervised warm start and the RL prompts:

    w07 k31 v12 w02 w02 k05 v40 w19 ...   facts (a key, then its values) among filler words
    <ask> k31                             a question ends the prompt
    v12 <eos>                             the response

A warm-start sequence goes on with further questions instead of ending: `<ask> k05 v40 <eos> <ask> k31 v12 <eos> ...`,
with a loss on every answer and its <eos>. Asked once a sequence, a small model learns nothing for a thousand steps;
asked 24 times it learns recall within a few hundred.

No torch here: sequences are lists of token ids. Left out: facts that change, and questions over several facts.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNK, EOS, ASK = "<pad>", "<unk>", "<eos>", "<ask>"
SPECIALS = (PAD, UNK, EOS, ASK)
"""The first ids of the vocabulary, in this order. <ask> is an ordinary word: decoding shows it."""


@dataclass(frozen=True, kw_only=True)
class RecallVocabulary:
    """Words of the task; ids run over specials, then keys, then values, then filler words."""

    num_keys: int = 48
    num_values: int = 48
    num_tokens: int = 128
    """Size of the whole vocabulary; what keys, values and specials leave are filler words."""

    def __post_init__(self) -> None:
        if self.num_keys < 1 or self.num_values < 2:
            raise ValueError(
                f"recall needs at least 1 key and 2 values, not {self.num_keys} (--vocab-keys) and {self.num_values} "
                "(--vocab-values)"
            )
        if self.num_fillers < 1:
            raise ValueError(
                f"--vocab-tokens {self.num_tokens} leaves no filler word beside {len(SPECIALS)} specials, "
                f"{self.num_keys} keys (--vocab-keys) and {self.num_values} values (--vocab-values)"
            )

    @property
    def num_fillers(self) -> int:
        """Number of filler words."""
        return self.num_tokens - len(SPECIALS) - self.num_keys - self.num_values

    @property
    def words(self) -> list[str]:
        """All words, a word's index being its token id."""
        groups = (("k", self.num_keys), ("v", self.num_values), ("w", self.num_fillers))
        numbered = (f"{letter}{index:0{len(str(size - 1))}d}" for letter, size in groups for index in range(size))
        return [*SPECIALS, *numbered]

    def key_id(self, index: int) -> int:
        """Token id of a key."""
        return len(SPECIALS) + index

    def value_id(self, index: int) -> int:
        """Token id of a value."""
        return self.key_id(self.num_keys) + index

    def filler_id(self, index: int) -> int:
        """Token id of a filler word."""
        return self.value_id(self.num_values) + index


@dataclass(frozen=True, kw_only=True)
class RecallPrompt:
    """One RL prompt with its answer, as token ids."""

    token_ids: list[int]
    """Facts and filler, then `<ask> key`."""

    answer_ids: list[int]
    """The values to recall, without <eos>."""

    fact_depth: float
    """Where the asked fact begins, as a fraction of the prompt: 0 is its start, 1 its end."""


@dataclass(frozen=True, kw_only=True)
class WarmStartSequence:
    """One supervised sequence. The engine takes it as a prompt without loss and a response with loss."""

    token_ids: list[int]
    """Facts and filler, then all questions with their answers."""

    loss_mask: list[int]
    """1 where the token is an answer or its <eos>, to be predicted from the tokens before it; as long as token_ids."""

    prompt_length: int
    """Tokens up to and including the first asked key; the first answer begins there."""


def make_recall_prompt(
    rng: Random, vocabulary: RecallVocabulary, *, num_facts: int, prompt_tokens: int, answer_tokens: int = 1
) -> RecallPrompt:
    """Draw one prompt of exactly `prompt_tokens` tokens, the question included.

    Raises:
        ValueError: the facts need more keys or more tokens than there are.
    """
    context, facts = _scatter_facts(rng, vocabulary, num_facts, prompt_tokens - 2, answer_tokens)
    key, values, start = rng.choice(facts)
    ask = vocabulary.words.index(ASK)
    return RecallPrompt(token_ids=[*context, ask, key], answer_ids=values, fact_depth=start / prompt_tokens)


def make_warm_start_sequence(
    rng: Random,
    vocabulary: RecallVocabulary,
    *,
    num_facts: int,
    context_tokens: int,
    num_questions: int = 24,
    answer_tokens: int = 1,
) -> WarmStartSequence:
    """Draw one supervised sequence of `context_tokens + num_questions * (3 + answer_tokens)` tokens.

    Every fact is asked before any is asked again.

    Args:
        rng: source of randomness.
        vocabulary: the words.
        num_facts: facts in the context; double it as the model learns (`advance_num_facts`).
        context_tokens: facts and filler. `num_facts * (1 + answer_tokens)` leaves no room for filler.
        num_questions: questions after the context.
        answer_tokens: values of each key.

    Raises:
        ValueError: the facts need more keys or more tokens than there are, or there is no question.
    """
    if num_questions < 1:
        raise ValueError(f"a warm-start sequence needs at least one question, not {num_questions}")
    context, facts = _scatter_facts(rng, vocabulary, num_facts, context_tokens, answer_tokens)
    ask, eos = vocabulary.words.index(ASK), vocabulary.words.index(EOS)
    asked = [fact for _ in range(-(-num_questions // num_facts)) for fact in rng.sample(facts, num_facts)]
    token_ids, loss_mask = list(context), [0] * len(context)
    for key, values, _ in asked[:num_questions]:
        token_ids += [ask, key, *values, eos]
        loss_mask += [0, 0, *[1] * len(values), 1]
    return WarmStartSequence(token_ids=token_ids, loss_mask=loss_mask, prompt_length=context_tokens + 2)


def advance_num_facts(num_facts: int, accuracy: float, *, most: int, threshold: float = 0.95) -> int:
    """The curriculum: twice as many facts, at most `most`, once the answers' accuracy reaches `threshold`."""
    return min(most, 2 * num_facts) if accuracy >= threshold else num_facts


def build_tokenizer(vocabulary: RecallVocabulary) -> "PreTrainedTokenizerFast":
    """A word-level tokenizer: words are separated by single spaces, and nothing is added around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = models.WordLevel({word: index for index, word in enumerate(vocabulary.words)}, unk_token=UNK)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def to_text(vocabulary: RecallVocabulary, token_ids: list[int]) -> str:
    """Token ids as the text that the tokenizer turns back into them."""
    words = vocabulary.words
    return " ".join(words[token_id] for token_id in token_ids)


def _scatter_facts(
    rng: Random, vocabulary: RecallVocabulary, num_facts: int, context_tokens: int, answer_tokens: int
) -> tuple[list[int], list[tuple[int, list[int], int]]]:
    """Filler of `context_tokens` tokens with facts at random places, each key once.

    Returns:
        (token ids, facts as (key id, value ids, position of the key) in order of position).
    """
    if answer_tokens < 1:
        raise ValueError(f"--answer-tokens must be at least 1, not {answer_tokens}")
    if not 1 <= num_facts <= vocabulary.num_keys:
        raise ValueError(
            f"--num-facts {num_facts} must be from 1 to --vocab-keys {vocabulary.num_keys}: each key is used once"
        )
    num_filler = context_tokens - num_facts * (1 + answer_tokens)
    if num_filler < 0:
        raise ValueError(
            f"{num_facts} facts (--num-facts) of {1 + answer_tokens} tokens do not fit into a context of "
            f"{context_tokens} tokens (--prompt-tokens less the question)"
        )
    keys = rng.sample(range(vocabulary.num_keys), num_facts)
    # Each fact takes one slot among the filler words: a sorted sample of slots is a uniform scattering.
    slots = sorted(rng.sample(range(num_filler + num_facts), num_facts))
    token_ids: list[int] = []
    facts: list[tuple[int, list[int], int]] = []
    for slot in range(num_filler + num_facts):
        if len(facts) < num_facts and slots[len(facts)] == slot:
            key = vocabulary.key_id(keys[len(facts)])
            values = [vocabulary.value_id(rng.randrange(vocabulary.num_values)) for _ in range(answer_tokens)]
            facts.append((key, values, len(token_ids)))
            token_ids += [key, *values]
        else:
            token_ids.append(vocabulary.filler_id(rng.randrange(vocabulary.num_fillers)))
    return token_ids, facts


def save_tokenizer(vocabulary: RecallVocabulary, folder: Path) -> None:
    """Write the tokenizer where `AutoTokenizer.from_pretrained(folder)` finds it."""
    build_tokenizer(vocabulary).save_pretrained(folder)
