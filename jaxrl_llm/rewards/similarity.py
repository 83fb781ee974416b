"""Similarities of two texts, 0 to 1, as OpenAI's grader `text_similarity` names them: each `f(text, reference)`.

Words are runs of letters and digits. Each punctuation mark is a word of its own to `bleu` and `gleu`, which tell upper
from lower case; ROUGE does neither, as the package rouge-score.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any


def fuzzy_match(text: str, reference: str) -> float:
    """2 lcs / (|text| + |reference|) in characters, lcs their longest common subsequence: `ratio` of rapidfuzz."""
    total = len(text) + len(reference)
    return 2 * longest_common_subsequence(text, reference) / total if total else 1.0


def bleu(text: str, reference: str) -> float:
    """BLEU of n-grams up to 4 (Papineni et al., 2002), not smoothed: 0 where no four words in a row agree.

    exp(min(0, 1 - |reference| / |text|)) (p_1 p_2 p_3 p_4)^(1/4), p_n the share of the text's n-grams that the
    reference has, each counted as often as it is there at most.
    """
    given, wanted = _marked_words(text), _marked_words(reference)
    product = 1.0
    for n in range(1, 5):
        grams = ngrams(given, n)
        product *= (grams & ngrams(wanted, n)).total() / max(grams.total(), 1)
    return math.exp(min(0.0, 1 - len(wanted) / len(given))) * product**0.25 if product else 0.0


def gleu(text: str, reference: str) -> float:
    """Google's BLEU (arXiv:1609.08144): of all n-grams up to 4, the smaller one of precision and recall."""
    given, wanted = _marked_words(text), _marked_words(reference)
    grams, of_reference = (sum((ngrams(words, n) for n in range(1, 5)), Counter()) for words in (given, wanted))
    return (grams & of_reference).total() / max(grams.total(), of_reference.total(), 1)


def rouge_n(text: str, reference: str, n: int) -> float:
    """ROUGE-N (Lin, 2004): the harmonic mean of precision and recall of n-grams."""
    grams, of_reference = ngrams(_words(text), n), ngrams(_words(reference), n)
    return 2 * (grams & of_reference).total() / max(grams.total() + of_reference.total(), 1)


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L (Lin, 2004): the harmonic mean of precision and recall of the longest common subsequence of words."""
    given, wanted = _words(text), _words(reference)
    return 2 * longest_common_subsequence(given, wanted) / max(len(given) + len(wanted), 1)


METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    **{f"rouge_{n}": functools.partial(rouge_n, n=n) for n in range(1, 6)},
    "rouge_l": rouge_l,
}


def ngrams(words: Sequence[Any], n: int) -> Counter[tuple[Any, ...]]:
    """The count of each n-gram, a tuple of n neighbours, in `words`, which may be token ids."""
    return Counter(zip(*(words[start:] for start in range(n)), strict=False))


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence; its table's rows are the bits of one integer (Hyyrö, 2004)."""
    places: dict[str, int] = {}
    for index, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << index
    every = row = (1 << len(first)) - 1  # a zero is a step of the lengths
    for item in second:
        matched = row & places.get(item, 0)
        row = ((row + matched) | (row - matched)) & every
    return len(first) - row.bit_count()


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _marked_words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)
