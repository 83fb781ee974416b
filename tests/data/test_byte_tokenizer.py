"""The tokenizer of the embedded models."""

import random


def test_ids_are_bytes_then_special_tokens(tokenizer):
    assert tokenizer("AZ é")["input_ids"] == [0x41, 0x5A, 0x20, 0xC3, 0xA9]
    assert len(tokenizer) == 261
    specials = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    assert tokenizer.convert_tokens_to_ids(specials) == [256, 257, 258, 259, 260]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token) == (256, 257, None)
    assert tokenizer("a<|end|>b")["input_ids"] == [97, 257, 98]
    assert tokenizer.decode([97, 257, 98], skip_special_tokens=True) == "ab"


def test_text_comes_back_unchanged(tokenizer):
    draw, letters = random.Random(0), [*range(0xD800), *range(0xE000, 0x110000)]
    drawn = ["".join(map(chr, draw.choices(letters, k=20))) for _ in range(200)]
    for text in (" leading", "two  spaces\n\n\ttab ", "don't 's", "Ä→你好🎉", "\x00\x7f\u00ad", "a ,b .", *drawn):
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_chat_template(tokenizer):
    messages = [{"role": role, "content": role[0].upper()} for role in ("system", "user", "assistant")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|system|>S<|end|><|user|>U<|end|><|assistant|>A<|end|>"
    opened = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert opened == "<|system|>S<|end|><|user|>U<|end|><|assistant|>"
