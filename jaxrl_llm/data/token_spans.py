"""Spans of a text that two tokenizers both end with a token."""

from collections.abc import Sequence

NOWHERE = -1  # the place of a token that is not in the text


def token_places(text: bytes, pieces: Sequence[bytes | None]) -> list[int]:
    """The number of bytes of `text` that each token and those before it write, by the bytes of each token.

    NOWHERE for special tokens (None), which write nothing, and from the first token on that writes something else, as
    where half a character was decoded as another one. A space that the first token has before the text is left out.
    """
    places, end = [], 0
    for number, piece in enumerate(pieces):
        if piece is None:
            places.append(NOWHERE)
            continue
        if not end and piece.startswith(b" ") and not text.startswith(b" "):
            piece = piece[1:]
        if text[end : end + len(piece)] != piece:
            return places + [NOWHERE] * (len(pieces) - number)
        end += len(piece)
        places.append(end)
    return places


def span_ends(places: Sequence[int], others: Sequence[int]) -> list[tuple[int, int]]:
    """The last token of each span in either tokenization, of the places of `token_places`.

    Spans are the shortest that both tokenizations end: at each place in the text that a token of either ends at.
    """
    theirs = {place: token for token, place in enumerate(others)}
    own = {place: token for token, place in enumerate(places)}
    return [(token, theirs[place]) for place, token in own.items() if place > 0 and place in theirs]


def span_of_each(places: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The number of the span that each token is in, by the last tokens of all spans; NOWHERE for those in none."""
    spans, number = [NOWHERE] * len(places), 0
    for token, place in enumerate(places):
        if number == len(ends):
            break
        if place != NOWHERE:
            spans[token] = number
        number += token == ends[number]
    return spans
