r"""Values of answers as people write them: numbers, exactly, and LaTeX and Markdown in one plain form.

`quantity("$-1,234.50")`, `quantity(r"\dfrac{1}{2}")` and `quantity("5 cm")` hold fractions, never floats: two integers
of any length that differ are different. Every expression here takes time linear in the text.
"""

import re
import unicodedata
from collections import deque
from fractions import Fraction
from typing import NamedTuple

LONGEST = 4000  # digits of a number that is computed with, its powers of ten included; longer ones are text
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

# A comma counts as a thousands separator only (1,234 and 12,34,567): 1,2 is a pair and not the number 12. The point of
# ...5 is one of three.
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2}){1,9},\d{3}(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)"
_TIMES = r"\s?(?:\\times|\\cdot|×|·|\*|x)\s?"
# In this order: one and a half as 1 1/2; a/b; a number with an exponent, times a power of ten, to a power, in millions.
_NUMBER = rf"""(?:
    (?P<whole>\d+)\s(?P<over>\d+)/(?P<under>\d+)
  | (?P<above>{_DIGITS})\s?/\s?(?P<below>[-+]?{_DIGITS})
  | (?P<digits>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d{{1,5}})(?!\d))?
    (?:{_TIMES}10\s?(?:\^|\*\*)\s?\{{?(?P<tens>[-+]?\d{{1,4}})\}}?|(?:\^|\*\*)\{{?(?P<power>[-+]?\d{{1,4}})\}}?)?
    (?:\s(?P<scale>{"|".join(SCALES)})\b)?
)"""
_CURRENCY = r"(?:\\?[$€£¥₹]|(?:USD|EUR|GBP)(?![A-Za-z]))"
NUMBER = re.compile(_NUMBER, re.VERBOSE)
QUANTITY = re.compile(
    rf"(?P<sign>[-+])?\s?{_CURRENCY}?\s?(?P<second>[-+])?{_NUMBER}(?:\s?(?P<percent>\\?%))?(?P<rest>.*)",
    re.VERBOSE | re.DOTALL,
)
# A unit is a known short one, with or without a space before it, or after a space one letter or words of three or more.
# More may follow: what is over or times one letter, as in m/s, but not one letter after another, which are a product.
SHORT_UNITS = (
    "mm|cm|dm|km|nm|ft|in|yd|mi|kg m|kg|mg|lb|lbs|oz|ml|cl|hr|hrs|min|sec|ms|mph|kph|kmh|deg|rad|USD|EUR|GBP|Hz|kHz|"
    "MHz|GHz|kW|kWh|Pa|kPa|mol|KB|MB|GB|Nm|N m"
)
_LETTER, _WORD = "[mgslhLJNKVW]", "[A-Za-z]{3,}"
_RAISED = r"(?![A-Za-z])(?:\s?\^?\{?[23²³]\}?)?"  # the end of a unit, and its power
UNIT = re.compile(
    rf"\s?(?:{_CURRENCY}|°\s?[CF]?|(?:(?:{SHORT_UNITS})|(?<=\s)(?:{_WORD}|{_LETTER})){_RAISED}"
    rf"(?:(?:\s?[/·]\s?(?:{_WORD}|{SHORT_UNITS}|{_LETTER})|\s(?:{_WORD}|{SHORT_UNITS})){_RAISED}){{0,3}})"
)
# Words behind a number that make it another one, or one of several.
NO_UNIT = re.compile(
    r"\b(?:and|not|nor|than|more|less|plus|minus|times|over|under|pairs?|half|halves|thirds?|quarters?|(?:ten|hundred|"
    r"thousand)ths?|percent|mod|sqrt|sin|cos|tan|log|exp|factorial|squared|cubed|googol)\b",
    re.IGNORECASE,
)
# Units that have several names, which `quantity` writes in lower case and without a plural s.
UNIT_NAMES = {
    "degree": "°", "deg": "°", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "meter": "m", "metre": "m", "millimeter": "mm", "centimeter": "cm", "kilometer": "km", "mile": "mi",
    "inche": "in", "inch": "in", "foot": "ft", "feet": "ft", "yard": "yd",
    "gram": "g", "milligram": "mg", "kilogram": "kg", "pound": "lb", "ounce": "oz",
    "liter": "l", "litre": "l", "milliliter": "ml", "squaremeter": "m2", "squarecentimeter": "cm2",
    "squareinch": "in2", "squareinche": "in2", "squarefoot": "ft2", "squarefeet": "ft2", "squaremile": "mi2",
    "cubicmeter": "m3", "cubiccentimeter": "cm3", "cubicinche": "in3", "cubicfeet": "ft3",
    "meterpersecond": "m/s", "kilometerperhour": "km/h", "kmh": "km/h", "kph": "km/h", "mileperhour": "mph",
}  # fmt: skip
HASHES = re.compile(r"####[\s*_`]*(?=[-+−–±(\\$€£¥₹]{0,4}\s?\\?[$€£¥₹]?[-−]?(?:\.?\d|[½⅓⅔¼¾]|d?frac))")
# Behind a number in a sentence: another number after signs alone or after or, and, to; or more of an expression.
SEVERAL = re.compile(r"[^\w(]*\d|\s?[*/^]|\s?(?:\\pi|π|\\sqrt|√)|(?>.*?\b(?:or|and|to)\b).*\d", re.DOTALL)
SIGNS = str.maketrans({"−": "-", "﹣": "-", "－": "-", "＋": "+", "⁄": "/", "％": "%", "\u00a0": " "})
RAISED = re.compile(r"(?<=\d)[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")  # a power in typeset digits
# Names of one thing in answers that are compared as texts. The second backslash of \\, which ends a row, is no space.
NAMES = str.maketrans({"π": r"\pi", "√": r"\sqrt", "∞": r"\infty", "≤": r"\le", "≥": r"\ge", "≠": r"\ne"})
EQUATION = re.compile(r"^\$?\s?[A-Za-z]\s?=([^=]*)$")
_THIN = r"(?:(?<!\\)\\[,;:!\ ]|\\(?:quad|qquad|thinspace)(?![A-Za-z])|[~\u2000-\u200a\u202f\u205f])"


class Quantity(NamedTuple):
    """A number with what was written behind it: a percent sign, or a unit ("" without one)."""

    value: Fraction
    percent: bool = False
    unit: str = ""

    def matches(self, other: "Quantity", tolerance: Fraction = Fraction(0)) -> bool:
        """True for values that differ by at most `tolerance`, where units do not contradict each other.

        A percent sign is a unit that may be left out, and 0.05 is 5% too.
        """
        one, two = (UNIT_NAMES.get(unit, unit) for unit in (self.unit, other.unit))
        if one and two and one != two:
            return False
        values = [self.value] + ([self.value / 100] if self.percent and not other.percent else [])
        wanted = [other.value] + ([other.value / 100] if other.percent and not self.percent else [])
        return any(abs(value - right) <= tolerance for value in values for right in wanted)


def plain(text: str) -> str:
    r"""LaTeX, Markdown and typeset signs in one plain form, white space as single spaces.

    `\dfrac12` and `\frac{1}{2}` are `1/2`, `0.\overline{3}` is `1/3`, `\text{A}` is `A`, `5\,000` is `5000`, `**5**` is
    `5`, U+2212 is `-`.
    """
    text = RAISED.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[0]), text)
    text = text.translate(SIGNS).replace("{,}", ",")
    text = re.sub(r"(?<![^\s(=:])–(?=[$€£¥]?\.?\d)", "-", text)  # an en dash that can only be a sign
    text = re.sub(r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", _vulgar, text)
    if "\\" in text or "^" in text or "~" in text:
        text = re.sub(r"\\(?:left|right|displaystyle|boldsymbol)(?![A-Za-z])", "", text)
        words = r"text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|operatorname"
        text = re.sub(rf"\\(?:{words})\s?\{{([^{{}}]*)\}}", r" \1 ", text)
        text = re.sub(r"\^\s?(?:\\circ(?![A-Za-z])|\{\s?\\circ\s?\})|\\degree(?![A-Za-z])", "°", text)
        text = re.sub(r"(?<!\\)\\[()\[\]]", "", text)
        numerator = r"(?:\s?\{\s?([-+]?[\d.,]{1,50})\s?\}|\s?(\d))"
        text = re.sub(rf"\\[dtc]?frac{numerator}{numerator}", _fraction, text)
        repeated = r"\\(?:overline|bar|dot)\s?(?:\{\s?(\d{1,50})\s?\}|(\d))(?!\d)"
        text = re.sub(rf"(?<![\d.,])(\d{{0,50}})\.(\d{{0,50}}){repeated}", _repeating, text)
        text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(rf"(?<=\d){_THIN}(?=\d{{3}}(?!\d))", "", text)
    text = re.sub(_THIN, " ", text)
    if re.search(r"\*\*[^*]*\*\*|__|`", text):
        text = re.sub(r"\*\*|__|`", "", text)
    return re.sub(r"(?<=\d) ?per ?cent\b", "%", re.sub(r"\s+", " ", text)).strip()


def _vulgar(match: re.Match[str]) -> str:
    space = " " if match.string[match.start() - 1 : match.start()].isdigit() else ""
    return space + unicodedata.normalize("NFKC", match[0]).replace("⁄", "/")


def _fraction(match: re.Match[str]) -> str:
    space = " " if match.string[match.start() - 1 : match.start()].isdigit() else ""
    return f"{space}{match[1] or match[2]}/{match[3] or match[4]}{_space_before_digit(match)}"


def _repeating(match: re.Match[str]) -> str:
    """The fraction that a repeating decimal is: 0.1666... = (16 - 1) / (10 * 9)."""
    first, period = match[1] + match[2], match[3] or match[4]
    value = Fraction(int(first + period) - int(first or 0), 10 ** len(match[2]) * (10 ** len(period) - 1))
    return f"{value.numerator}/{value.denominator}{_space_before_digit(match)}"


def _space_before_digit(match: re.Match[str]) -> str:
    """A space where a digit follows, which would be one of the denominator; a letter that follows is a factor."""
    return " " if match.string[match.end() : match.end() + 1].isdigit() else ""


def quantity(text: str) -> Quantity | None:
    """The number that a plain text is, with its unit; None for any other text, or one that holds several.

    `12 000` is one number where nothing else stands before it, as `12 3` is two.
    """
    spaced = r"^[-+]?\d{1,3}(?: \d{3})+(?!\d)"
    number, rest = _leading(re.sub(spaced, lambda match: match[0].replace(" ", ""), text))
    rest = rest.removesuffix(".")
    if number is None or (rest.strip() and (not UNIT.fullmatch(rest) or NO_UNIT.search(rest))):
        return None
    unit = re.sub(r"[\s^{}]|(?<=[A-Za-z]{2})s\b", "", rest.replace("²", "2").replace("³", "3"))
    return number._replace(unit=unit.lower())


def leading_quantity(line: str) -> Quantity | None:
    """The number at the start of a line, whatever words follow it; None where other numbers do ("5 or 6")."""
    number, rest = _leading(re.sub(r"\*\*(?!\d)", "", plain(line.replace(r"\$", "$"))).strip("$ "))
    return None if SEVERAL.match(re.split(r"[.!?](?:\s|$)", rest, maxsplit=1)[0]) else number


def _leading(text: str) -> tuple[Quantity | None, str]:
    """The number that a plain text begins with, and the rest of the text."""
    match = QUANTITY.match(text)
    value = None if match is None else _value(match)
    if match is None or value is None or (match["sign"] and match["second"]):
        return None, text
    return Quantity(-value if "-" in (match["sign"], match["second"]) else value, bool(match["percent"])), match["rest"]


def last_number(text: str) -> Quantity | None:
    """The last number of a text.

    None where there is none, or where the last one is only a part of something else: of a version or a date, of a root
    or a power, of "5 or 6" or ±5. Powers and indices of letters (m^2, x_1) are passed over.
    """
    text = plain(text)
    newest = list(deque(NUMBER.finditer(text), maxlen=8))
    while newest:
        match = newest.pop()
        before, after = text[max(match.start() - 12, 0) : match.start()], text[match.end() : match.end() + 8]
        if re.search(r"[A-Za-z]\s?[\^_]\s?\{?[-+]?$", before):
            continue
        tied = (before[-1:].isdigit() and match[0][0] == ".") or re.search(
            r"\d[/.]$|\d{4}-\d{1,2}-$|[\^_]\s?\{?[-+]?$|(?:\\sqrt|√)\s?[({]?$|(?:±|\\pm)\s?$", before
        )
        several = newest and text[newest[-1].end() : match.start()].strip(" ,$\\%").lower() == "or"
        value = _value(match)
        if tied or several or value is None or re.match(r"\.\d|/\d|\s?(?:\\pi|π|\\sqrt|√|\^|\*\*)", after):
            return None
        # A sign stands before a number or its currency; behind a digit, a letter or a bracket it is an operator.
        sign = re.search(r"(^|[^\w)\]}%])-\\?[$€£¥₹]?$|(?:^|[^\w)\]}%])\\?[$€£¥₹]-$|[=(:≈]\s?-\s$", before)
        return Quantity(-value if sign else value, bool(re.match(r"\s?\\?%", after)))
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    """The exact value of a match of NUMBER; None for one that is too long, or none (1/0)."""
    names = ("whole", "over", "under", "above", "below", "digits", "exponent", "tens", "power")
    whole, over, under, above, below, digits, *powers = ((match[name] or "").replace(",", "") for name in names)
    exponent, tens, power = (int(text or default) for text, default in zip(powers, (0, 0, 1), strict=True))
    size = max(len(digits) * abs(power) + abs(exponent + tens), *map(len, (whole, over, under, above, below)))
    if size > LONGEST:
        return None
    try:
        if whole:
            part = Fraction(int(over), int(under))
            return int(whole) + part if part < 1 else None
        if above:
            return Fraction(above) / Fraction(below)
        return Fraction(digits) ** power * Fraction(10) ** (exponent + tens) * SCALES.get(match["scale"], 1)
    except ZeroDivisionError:
        return None


def same(answer: str, wanted: str) -> bool:
    """True for answers that are equal as plain texts without white space and a final full stop, or as quantities.

    `x = 5` is 5 where the other one is no equation, and the choice `(A)` is A.
    """
    answer, wanted = (plain(text.replace(r"\$", "$")).removesuffix(".").strip() for text in (answer, wanted))
    if ("=" in answer) != ("=" in wanted):
        answer, wanted = (EQUATION.sub(r"\1", text).strip() for text in (answer, wanted))
    one, other = (quantity(text.strip("$ ")) for text in (answer, wanted))
    if one is not None and other is not None:
        return one.matches(other)
    answer, wanted = (re.sub(r"^\(([A-Z])\)$", r"\1", squeezed(text)) for text in (answer, wanted))
    return bool(answer) and answer == wanted


def squeezed(text: str) -> str:
    r"""A plain text without dollar signs and white space, except between digits, which are two numbers.

    `\sqrt{2}` is `\sqrt2`, `x_{1}` is `x_1`, and `\leq` and ≤ are `\le`.
    """
    text = re.sub(r"\\([lgn]e)q(?![A-Za-z])", r"\\\1", text.replace("$", "").translate(NAMES))
    return re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"([\^_]|\\sqrt)\s?\{\s?(\w)\s?\}", r"\1\2", text))


def boxed_content(text: str) -> str:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`, its braces balanced; empty when there is none.

    `\boxed 5` holds what follows, one number, letter or command.
    """
    opened: list[int] = []  # where the braces that are open begin, -1 for one that is not a box's
    last, content = -1, ""
    for token in re.finditer(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(\{)?|\\(?!\\(?:boxed|fbox)).|[{}]", text, re.DOTALL):
        if token[0] == "{":
            opened.append(-1)
        elif token[0] == "}":
            start = opened.pop() if opened else -1
            if start > last:
                last, content = start, text[start : token.start()]
        elif token[1]:
            opened.append(token.end())
        elif token[0].startswith((r"\boxed", r"\fbox")):
            bare = re.compile(r"[-+]?\d[\d.,]*(?<=\d)|[A-Za-z](?![A-Za-z])|\\[A-Za-z]+").match(text, token.end())
            if bare:
                last, content = token.end(), bare[0]
    return content


def after_hashes(text: str) -> str:
    """The rest of the line after the last `####` that a number follows; empty when there is none."""
    start = text.rfind("####")
    while start >= 0:
        if found := HASHES.match(text, start):
            end = text.find("\n", found.end())
            return text[found.end() : end if end >= 0 else len(text)]
        start = text.rfind("####", 0, start)
    return ""
