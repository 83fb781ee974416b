r"""Extractors of a completion's answer, which majority voting counts: `boxed`, `number`, `hashes`, `text`.

Each takes a text and returns the answer, None where there is none; `"path/to/file.py:function"` names another one.
"""

from jaxrl_llm.rewards.values import (
    Quantity,
    after_hashes,
    boxed_content,
    last_number,
    leading_quantity,
    plain,
    quantity,
    squeezed,
)

__all__ = ["boxed", "hashes", "number", "text"]


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` in plain form; a number in the form of `number`."""
    content = plain(boxed_content(text).replace(r"\$", "$")).strip("$ ")
    return _shown(quantity(content)) or squeezed(content).removesuffix(".") or None


def number(text: str) -> str | None:
    """The last number, in a form in which `1,000.0` and `1000` are equal, and integers of any length differ."""
    return _shown(last_number(text))


def hashes(text: str) -> str | None:
    """The number after the last `####`, in the form of `number`."""
    return _shown(leading_quantity(after_hashes(text)))


def _shown(number: Quantity | None) -> str | None:
    if number is None:
        return None
    value = number.value
    return str(value) if value.denominator == 1 or abs(value) > 1e300 else f"{float(value):.12g}"


def text(text: str) -> str | None:
    """The whole completion, without white space around it."""
    return text.strip() or None
