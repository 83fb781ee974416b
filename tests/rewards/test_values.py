"""Numbers and answers as people write them, and texts of a megabyte that a model may write."""

import time

import pytest

from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.formats import think_answer_format
from jaxrl_llm.rewards.functions import boxed_accuracy, exact_match, gsm8k_accuracy, think_format
from jaxrl_llm.rewards.math import numeric_answer
from jaxrl_llm.rewards.replies import json_objects
from jaxrl_llm.rewards.signatures import RewardError
from jaxrl_llm.rewards.values import quantity

RIGHT = {
    numeric_answer: [
        ("10-5", "5"), ("x = -5", "-5"), ("x = - 5", "-5"), ("\u22125", "-5"), ("\u20135", "-5"), ("+5", "5"),
        (r"\frac{1}{2}", "0.5"), (r"$-\frac{3}{4}$", "-0.75"), (r"1\frac{1}{2}", "1.5"), ("1 1/2", "3/2"),
        ("2½", "2.5"), (r"0.\overline{3}", "1/3"), (r"-0.1\bar 6", "-1/6"),
        ("50%", "50"), ("50%", "0.5"), (r"50\%", "50"), ("-$5", "-5"), ("$-5", "-5"), ("**-5**", "-5"), ("5 m^2", "5"),
        ("10^5", "100000"), (r"3 \times 10^8", "3e8"), ("3 × 10^{-2}", "0.03"), ("12,34,567", "1234567"),
        ("1.5 million dollars", "1500000"), ("$1{,}000$", "1000"), ("x_1 = 3", "3"), ("2**3", "8"), ("`7`.", "7"),
        ("10⁵", "100000"), ("2 × 10⁻³", "0.002"), ("So it is...5", "5"), ("so .5", "0.5"), ("...5...", "5"),
    ],
    boxed_accuracy: [
        (rf"so \boxed{{{box}}}.", answer) for box, answer in [
            ("\u22125", "-5"), ("+5", "5"), (r"5\%", "5"), (r"5\%", "5%"), (r"50\%", "0.5"), (r"\$5", "5"),
            ("5 cm", "5"), (r"\frac{1}{2}\text{ m}", "0.5"),
            ("5 percent", "5%"), ("5 per cent", "0.05"), (r"5\text{ percent}", r"5\%"),
            ("60 degrees", r"60^\circ"), ("5 meters", "5 m"),
            ("2 hrs", "2 hours"), (r"7 \text{ square feet}", r"7\text{ ft}^2"), ("5 seconds", "5 s"),
            ("3 meters per second", "3 m/s"), ("5 m/s²", "5 m/s^2"), ("5 cm²", "5 cm2"),
            ("5 kg m/s", "5"), ("5 N m", "5 Nm"), (r"5\text{ cm}^2", "5"), (r"5\,\text{cm}", "5 cm"),
            ("5 km/h", "5"), ("x = 5", "5"),
            ("x = 5", "x=5"), (r"\text{A}", "A"), (r"\textbf{(A)}", "A"), (r"\tfrac{1}{2}", "1/2"), (r"\frac12", "0.5"),
            (r"10\frac{1}{2}", "10.5"), ("**5**", "5"), (r"90^{\circ}", "90"), (r"\left(1,2\right)", "(1,2)"),
            (r"\dfrac{\pi}{2}", r"\frac{\pi}{2}"), ("5 million", "5000000"), (r"5\,000", "5000"),
            (r"\{1,2\}", r"\{1, 2\}"), (r"0.\overline{142857}", "1/7"), ("12 000", "12000"),
            ("-1 234 567 m", "-1234567"), ("5", "x = 5"), ("10⁶", "1000000"),
            ("2π", r"2\pi"), ("3√2", r"3\sqrt{2}"), ("x ≤ 5", r"x \leq 5"),
            (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt 3}{2}"), (r"101_{2}", "101_2"), (r"x \neq y", r"x\ne y"),
            (r"\begin{pmatrix}1\\2\\3\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \\ 3 \end{pmatrix}"),
        ]
    ] + [(r"\fbox{5}", "5"), (r"\boxed 5 then", "5"), (r"\\boxed{5}", "5"), (r"\boxed{\boxed{5}}", "5")],
    gsm8k_accuracy: [
        (f"#### {line}", answer) for line, answer in [
            ("+5", "5"), ("\u22125", "-5"), ("-$5", "-5"), ("5 apples", "5"), ("1/2", "0.5"), ("5%", "5"), ("5!", "5"),
            ("5. It took 3 days", "5"), ("**$5**", "5"), (r"\$5", "5"), (r"\(5\)", "5"), ("`5`", "5"),
            ("5\n#### 6", "6"),
        ]
    ],
}  # fmt: skip
WRONG = {
    numeric_answer: [
        ("10 - 5", "-5"), ("10-5", "-5"), ("1/2", "2"), (r"\frac{1}{2}", "2"), ("v2.0.3", "0.3"), ("1/2/2020", "2020"),
        ("5 or 6", "6"), ("±5", "5"), (r"\pm 5", "5"), (r"\sqrt{2}", "2"), (r"2\pi", "2"), ("10^5", "5"), ("1/0", "0"),
        ("9" * 5000, "5"), ("1e99999", "5"), ("nan", "5"), ("1_1", "2"), ("2024-01-05", "5"), ("5²", "5"),
    ],
    boxed_accuracy: [
        (rf"so \boxed{{{box}}}.", answer) for box, answer in [
            ("5 cm", "5 m"), ("5 ms", "5 m"), ("5 s", "5 m"), ("5 degrees", "5 m"), ("5 percent of 20", "5"),
            (r"\frac{1}{2}", r"\frac{1}{2}mgh"), (r"\frac12 m g h", "1/2"),
            (r"0.\overline{3}h", "1/3"), (r"\frac{1}{2}5", "1/2"),
            ("5 or 6", "5"), ("5, 6", "5"), (r"\pm 5", "5"), ("5x", "5"), ("5 x", "5"), ("y=5", "x=5"),
            ("1,2", "12"), ("1 2", "12"), ("1 2345", "12345"), (r"0.\dot{1}4\dot{2}", "1/9"),
            ("5 dozen", "5"), ("5 hundredths", "5"), ("0.3333", "1/3"), ("2.0.3", "2"),
            ("12345678901234567", "12345678901234568"), ("5 - 3", "5"), ("", ""),
            ("y = 5", "x = 5"), ("5", "x = 6"), (r"\sqrt{23}", r"\sqrt{2}3"), (r"x_{12}", "x_1"),
            (r"x \le 5", r"x \ge 5"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        ]
    ] + [("5", "5")],
    gsm8k_accuracy: [
        (f"#### {line}", answer) for line, answer in [
            ("5 or 6", "5"), ("5 and 6", "5"), ("5, 6", "5"), ("5-6", "5"), ("5/6", "5"), ("1/2", "1"), ("±5", "5"),
            ("5 to 6", "5"), ("5+3", "5"), ("5\n#### 6", "5"), ("5 or maybe 6", "5"),
            ("12345678901234567", "12345678901234568"),
        ]
    ],
    exact_match: [("", ""), (" \n", "")],
}  # fmt: skip


@pytest.mark.parametrize(("cases", "reward"), [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_answers_as_people_write_them(cases, reward):
    found = [
        (function.__name__, completion[:50], answer)
        for function, rows in cases.items()
        for completion, answer in rows
        if function([completion], [answer]) != [reward]
    ]
    assert not found


def test_tolerance():
    assert numeric_answer(["12345678901234567"], ["12345678901234568"]) == [1.0]
    assert numeric_answer(["12345678901234567"], ["12345678901234568"], tolerance=0.0) == [0.0]
    for tolerance in (-1.0, float("inf"), float("nan")):
        with pytest.raises(RewardError, match="numeric_answer: tolerance is"):
            numeric_answer(["1"], ["1"], tolerance=tolerance)


def test_votes_are_counted_by_value():
    assert answers.boxed(r"\boxed{1,000.0}") == answers.number("so 1000") == answers.hashes("#### $1,000") == "1000"
    assert answers.number("12345678901234567") != answers.number("12345678901234568")
    assert answers.boxed(r"\boxed{1 2}") == "1 2" and answers.boxed(r"\boxed{x + 1}") == "x+1"
    assert answers.number("1/3") == "0.333333333333" and answers.number("none") is None
    assert quantity("9" * 4001) is None and quantity("9" * 3999) is not None


@pytest.mark.parametrize(
    "piece",
    [r"\boxed{", "{", "}", "1,", "11,111,", "1,11,", "#### ", "####", "1 ", "1/", "9", r"\frac{1}{", r"\text{", "**",
     " ", "\\", "$", "x^", r"1\,", "5 or ", "or ", "<think>", "</think>", "1 1/2 "],
)  # fmt: skip
def test_long_texts_take_linear_time(piece):
    text, began = piece * (50_000 // len(piece)), time.monotonic()
    for function in (numeric_answer, boxed_accuracy, gsm8k_accuracy):
        assert function([text, "#### 1" + text, rf"\boxed{{{text}}}"], ["42"] * 3) == [0.0] * 3
    assert think_format([text]) == think_answer_format([text]) == [0.0]
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("piece", ['{"a":', "{", '{"a":1,', "[", '{"'])
def test_the_search_for_json_objects_ends(piece):
    began = time.monotonic()
    assert list(json_objects(piece * (200_000 // len(piece)))) == []
    assert time.monotonic() - began < 10
    assert list(json_objects(piece * 100 + ' {"b": 2}'))[-1:] == [{"b": 2}]
