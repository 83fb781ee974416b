"""Numbers and their nouns, as messages have them."""


def amount(number: int | str, noun: str, plural: str = "") -> str:
    """Return `1 row` or `8 rows`; `plural` is that of a noun which takes more than an s, `number` may be formatted."""
    return f"{number} {noun if str(number) == '1' else plural or f'{noun}s'}"
