"""Spans of text that two tokenizations share."""

from jaxrl_llm.data.token_spans import NOWHERE, span_ends, span_of_each, token_places


def test_spans_by_hand():
    text = "ab cdé".encode()
    own = token_places(text, [b"a", b"b c", b"d", "é".encode()])
    theirs = token_places(text, [b"ab", b" ", b"cd", b"\xc3", b"\xa9"])
    assert own == [1, 4, 5, 7]
    assert theirs == [2, 3, 5, 6, 7]
    ends = span_ends(own, theirs)
    assert ends == [(2, 2), (3, 4)]
    assert span_of_each(own, [2, 3]) == [0, 0, 0, 1]
    assert span_of_each(theirs, [2, 4]) == [0, 0, 0, 1, 1]


def test_special_tokens_are_in_no_span():
    places = token_places(b"ab", [b"a", None, b"b", None])
    assert places == [1, NOWHERE, 2, NOWHERE]
    assert span_ends(places, token_places(b"ab", [b"ab"])) == [(2, 0)]
    assert span_of_each(places, [2]) == [0, NOWHERE, 0, NOWHERE]


def test_a_space_before_the_text_and_bytes_of_half_a_character():
    assert token_places(b"ab", [b" a", b"b"]) == [1, 2]
    assert token_places(b" ab", [b" a", b"b"]) == [2, 3]
    assert token_places(b"ab", [b" ", b"a", b"b"]) == [0, 1, 2]
    half = b"a" + "\ufffd".encode() + b"b"
    assert token_places(half, [b"a", b"\xc3", b"b"]) == [1, NOWHERE, NOWHERE]
    assert span_ends([1, NOWHERE, NOWHERE], token_places(half, [b"a", "\ufffdb".encode()])) == [(0, 0)]


def test_a_space_that_writes_nothing_belongs_to_the_first_span():
    assert span_ends([0, 1, 2], [1, 2]) == [(1, 0), (2, 1)]
    assert span_of_each([0, 1, 2], [1, 2]) == [0, 0, 1]
