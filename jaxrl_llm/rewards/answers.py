r"""Extractors of a completion's answer, which majority voting counts: `boxed`, `number`, `hashes`, `text`.

Each takes a text and returns the answer, None where there is none; `"path/to/file.py:function"` names another one.
"""

import re

from jaxrl_llm.rewards.functions import after_hashes, boxed_content
from jaxrl_llm.rewards.math import PLAIN_NUMBER

__all__ = ["boxed", "hashes", "number", "text"]


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, without white space and dollar signs."""
    return re.sub(r"[\s$]", "", boxed_content(text)).removesuffix(".") or None


def number(text: str) -> str | None:
    """The last number, in a form in which `1,000.0` and `1000` are equal."""
    numbers = PLAIN_NUMBER.findall(text)
    return None if not numbers else f"{float(numbers[-1].replace(',', '')):.12g}"


def hashes(text: str) -> str | None:
    """The number after the last `####`, in the form of `number`."""
    return number(after_hashes(text).replace("$", ""))


def text(text: str) -> str | None:
    """The whole completion, without white space around it."""
    return text.strip() or None
