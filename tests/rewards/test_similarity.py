"""Similarities of texts, against values of rouge-score's and NLTK's documentation and against counting by hand."""

import random

import pytest

from jaxrl_llm.rewards.similarity import METRICS, longest_common_subsequence, rouge_n

FOX, DOG = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."
ACTION = "It is a guide to action which ensures that the military always obeys the commands of the party"
PARTY = "It is a guide to action that ensures that the military will forever heed Party commands"


@pytest.mark.parametrize(
    ("metric", "text", "reference", "value"),
    [
        ("rouge_1", DOG, FOX, 12 / 17),  # rouge-score: precision 0.75, recall 0.6666
        ("rouge_l", DOG, FOX, 10 / 17),  # rouge-score: precision 0.625, recall 0.5555
        ("rouge_2", DOG, FOX, 4 / 15),
        ("bleu", ACTION, PARTY, (11 / 18 * 8 / 17 * 6 / 16 * 4 / 15) ** 0.25),  # by hand
        ("gleu", ACTION, PARTY, 29 / 66),  # NLTK: 0.4393
        ("fuzzy_match", "this is a test", "this is a test!", 28 / 29),  # rapidfuzz: 96.55
        ("fuzzy_match", "kitten", "sitting", 8 / 13),
        ("fuzzy_match", "", "", 1.0),
        ("bleu", "two words", "two words", 0.0),
        ("rouge_1", "Привет, мир", "мир", 2 / 3),
        ("rouge_3", "a b", "a b", 0.0),
    ],
)
def test_values(metric, text, reference, value):
    assert METRICS[metric](text, reference) == pytest.approx(value, abs=1e-9)


def test_a_text_is_itself_and_nothing_is_like_nothing():
    for name, metric in METRICS.items():
        assert metric(ACTION, ACTION) == 1.0 and 0.0 <= metric(DOG, FOX) < 1.0
        assert metric("", FOX) == metric(FOX, "") == 0.0, name
    assert rouge_n("a a a", "a", 1) == 0.5  # each as often as the other has it


def test_the_longest_common_subsequence_is_that_of_the_table():
    draw = random.Random(0)
    for _ in range(200):
        first, second = ("".join(draw.choices(letters, k=draw.randrange(20))) for letters in ("abc", "abcd"))
        table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
        for i, x in enumerate(first):
            for j, y in enumerate(second):
                table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
        assert longest_common_subsequence(first, second) == table[-1][-1]
