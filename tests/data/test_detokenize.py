"""The text of tokens as they come is that of all of them, behind what is before them, and none is held for ever."""

import random

import pytest

from jaxrl_llm.data.detokenize import REPLACEMENT, Detokenizer
from jaxrl_llm.models.files.hf import find_tokenizer
from tests.data.spacing_tokenizer import SPACINGS, spacing_tokenizer


class Counting:
    """A tokenizer that notes how many tokens it has decoded at once."""

    def __init__(self, tokenizer):
        self.tokenizer, self.longest = tokenizer, 0

    def decode(self, ids, **options):
        self.longest = max(self.longest, len(ids))
        return self.tokenizer.decode(ids, **options)


@pytest.fixture(scope="module")
def of_bytes():
    return find_tokenizer("embedded:sort")


def pieces(tokenizer, ids, size=1, before=()):
    detokenizer = Detokenizer(tokenizer, before)
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [detokenizer.add(part, final=number == len(parts)) for number, part in enumerate(parts, 1)]


@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_text_that_goes_on_has_its_space(spacing):
    """Of tokenizers that put one before a text and decode it away; alone it is a text of its own."""
    tokenizer = spacing_tokenizer(spacing)
    prompt = tokenizer.encode("ab c")
    ids = tokenizer.encode("ab c d </s> e")[len(prompt) :]
    behind = tokenizer.decode(prompt + ids, skip_special_tokens=True)[len(tokenizer.decode(prompt)) :]
    assert behind.startswith(" d ") and behind.endswith(" e")
    for size in (1, 3, len(ids)):
        assert "".join(pieces(tokenizer, ids, size, prompt)) == behind
        assert "".join(pieces(tokenizer, ids, size)).startswith("d" if spacing != "bytes" else " d")
    assert "".join(pieces(tokenizer, ids, 1, [0] * 100 + prompt)) == "".join(pieces(tokenizer, ids, 1, prompt))


def test_half_a_character_before_changes_nothing(of_bytes):
    """Token ids may end anywhere; what follows is decoded by itself then."""
    ids = list("é a".encode())
    assert "".join(pieces(of_bytes, ids[1:], 1, [65, *ids[:1]])) == of_bytes.decode(ids[1:])
    assert "".join(pieces(of_bytes, ids[3:], 1, ids[1:3])) == "a"


@pytest.mark.parametrize("size", [1, 3, 8])
def test_bytes_that_are_no_characters_come_too(of_bytes, size):
    """As they come, in steps that do not grow, and the same text as all at once."""
    draw = random.Random(size)
    for _ in range(50):
        characters = ["é", "私", "👍🏽", "a", "\ufffd", *(bytes([draw.randrange(128, 256)]) for _ in range(4))]
        chosen = draw.choices(characters, k=60)
        ids = list(b"".join(x if isinstance(x, bytes) else x.encode() for x in chosen))
        counting = Counting(of_bytes)
        found = pieces(counting, ids, size)
        assert "".join(found) == of_bytes.decode(ids) and counting.longest <= 16 + 2 * size
    for ids in ([0xFF] * 100, list("\ufffd".encode() * 40)):
        found = pieces(of_bytes, ids, size)
        assert len("".join(found[: len(found) // 2])) >= len("".join(found)) // 2 - 16
        assert set("".join(found)) == {REPLACEMENT}


def test_tokens_without_a_text_are_no_burden(of_bytes):
    counting = Counting(of_bytes)
    assert "".join(pieces(counting, [65, *[257] * 500, 66])) == "AB" and counting.longest < 20
