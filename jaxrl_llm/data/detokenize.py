"""Token ids as text: of completions, which go on with their prompts, and of tokens that come one after the other."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what decoders write for a character whose bytes have not all come
LONGEST_CHARACTER = 4  # tokens, one for each byte
TOKENS_BEFORE = 8  # of a prompt, with which its completion is decoded


class Detokenizer:
    """The text of tokens as they come behind those `before`, on which spaces and half characters depend.

    Decoders of SentencePiece's kind leave out the space that a text begins with, so a text that goes on with another is
    decoded behind the end of that.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        # Tokens whose text was given, and those whose text was not.
        self._known, self._new = list(before[-TOKENS_BEFORE:]), list[int]()
        while REPLACEMENT in self._decode(self._known):  # half a character, which the next bytes would change
            del self._known[0]

    def add(self, ids: Sequence[int], final: bool) -> str:
        """The text of further tokens, and of earlier ones, as far as it is settled; `final`: all of it."""
        self._new += ids
        known, text, end = self._decode(self._known), self._decode(self._known + self._new), len(self._new)
        if not final and (text.endswith(REPLACEMENT) or len(text) <= len(known)):
            if end <= LONGEST_CHARACTER:
                return ""
            # Of so many tokens only the last character can still become another one.
            counts = range(end - 1, end - 1 - LONGEST_CHARACTER, -1)
            parts = ((count, self._decode(self._known + self._new[:count])) for count in counts)
            settled = ((count, part) for count, part in parts if len(part) < len(text) and text.startswith(part))
            end, text = next(settled, (end, text))
        self._known, self._new = self._new[:end], self._new[end:]
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)
