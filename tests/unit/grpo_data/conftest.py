"""A small tokenizer with a chat template, shared by the data tests."""

import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def word_tokenizer_folder(tmp_path_factory):
    """A word-level tokenizer with a chat template, saved as Hugging Face saves one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "<system>", "<user>", "<assistant>", *(f"w{index}" for index in range(20))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def word_tokenizer(word_tokenizer_folder):
    from megatron.grpo.tokenizer import load_tokenizer

    return load_tokenizer(word_tokenizer_folder)
