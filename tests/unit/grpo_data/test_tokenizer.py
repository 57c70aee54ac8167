import json

import pytest

from megatron.grpo.tokenizer import decode_response, encode_prompt, load_tokenizer, stop_token_ids


def encode(tokenizer, prompt, apply_chat_template=False):
    return tokenizer.convert_ids_to_tokens(encode_prompt(tokenizer, prompt, apply_chat_template=apply_chat_template))


def test_the_kind_of_prompt_decides(word_tokenizer):
    assert encode(word_tokenizer, "w1 w2") == ["w1", "w2"]
    templated = ["<user>", "w1", "w2", "</s>", "<assistant>"]
    assert encode(word_tokenizer, "w1 w2", apply_chat_template=True) == templated
    for apply in (False, True):
        assert encode(word_tokenizer, [{"role": "user", "content": "w1 w2"}], apply) == templated
        assert encode_prompt(word_tokenizer, [5, 7, 0], apply_chat_template=apply) == [5, 7, 0]
    messages = [{"role": "system", "content": "w3"}, {"role": "user", "content": "w1"}]
    assert encode(word_tokenizer, messages) == ["<system>", "w3", "</s>", "<user>", "w1", "</s>", "<assistant>"]


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ([], "empty"),
        ([{"role": "user", "content": " "}], "empty"),
        ([{"role": "user"}], "chat message 1 has no text in `content`"),
        ([{"role": "user", "content": "w1"}, {"content": "w1"}], "chat message 2 has no text in `role`"),
        ([{"role": "user", "content": [{"type": "image"}]}], "chat message 1 has no text in `content`"),
        ([1, 2, 25], "token id 25 is outside the tokenizer's vocabulary of 25"),
        ([-1], "token id -1 is outside"),
        ([1, "w1"], "neither chat messages nor token ids"),
        ([True], "neither chat messages nor token ids"),
        (3, "is a int, not a string"),
        ({"role": "user"}, "is a dict, not a string"),
    ],
)
def test_prompts_that_cannot_be_encoded(word_tokenizer, prompt, sentence):
    with pytest.raises(ValueError, match=sentence):
        encode_prompt(word_tokenizer, prompt, apply_chat_template=False)


def test_chat_messages_need_a_template(word_tokenizer_folder):
    tokenizer = load_tokenizer(word_tokenizer_folder)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="need a chat template and the tokenizer has none"):
        encode_prompt(tokenizer, "w1", apply_chat_template=True)


def test_paths_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="--tokenizer-path .*missing: no such folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(ValueError, match="no tokenizer could be read there"):
        load_tokenizer(tmp_path)


def test_stop_ids_come_from_the_tokenizer_and_the_generation_config(word_tokenizer, tmp_path):
    assert stop_token_ids(word_tokenizer) == (1,)
    assert stop_token_ids(word_tokenizer, tmp_path) == (1,)
    for listed, expected in (([7, 3], (1, 3, 7)), (9, (1, 9)), (None, (1,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
        assert stop_token_ids(word_tokenizer, tmp_path) == expected


def test_a_tokenizer_without_an_end_token_is_refused(word_tokenizer_folder):
    tokenizer = load_tokenizer(word_tokenizer_folder)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="names no end token"):
        stop_token_ids(tokenizer)


def test_responses_are_decoded_without_special_tokens(word_tokenizer):
    assert decode_response(word_tokenizer, [5, 6, 1]) == "w0 w1"
    assert decode_response(word_tokenizer, ()) == ""
