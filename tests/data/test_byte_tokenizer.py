import json
import random

import pytest
from transformers import AutoTokenizer

from tests.data.byte_tokenizer import build_byte_tokenizer


def test_ids_are_bytes_then_special_tokens(tokenizer):
    assert tokenizer("AZ é")["input_ids"] == [0x41, 0x5A, 0x20, 0xC3, 0xA9]
    assert len(tokenizer) == 261
    specials = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    assert tokenizer.convert_tokens_to_ids(specials) == [256, 257, 258, 259, 260]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token) == (256, 257, None)


@pytest.mark.parametrize(
    "text", ["sort:4821=", " leading", "two  spaces\n\n\ttab ", "don't 's", "Ä→你好🎉", "\x00\x7f\u00ad", "a ,b ."]
)
def test_text_comes_back_unchanged(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_random_text_comes_back_unchanged(tokenizer):
    draw = random.Random(0)
    characters = [*range(0xD800), *range(0xE000, 0x110000)]
    for _ in range(200):
        text = "".join(map(chr, draw.choices(characters, k=20)))
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_in_text_are_one_id(tokenizer):
    ids = tokenizer("a<|end|>b")["input_ids"]
    assert ids == [97, 257, 98]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|system|>S<|end|><|user|>U<|end|><|assistant|>A<|end|>"
    opened = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert opened == "<|system|>S<|end|><|user|>U<|end|><|assistant|>"


def test_saving_and_loading_keeps_everything(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "Ä <|user|> x"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert again.eos_token_id == 257


def test_the_same_files_every_time(tmp_path):
    first, second = (build_byte_tokenizer(tmp_path / name) for name in "ab")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
        json.loads((first / name).read_text())
