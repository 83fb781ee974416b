"""Where the thoughts of an answer end and its text begins, in the form of each family of models."""

from collections.abc import Iterable

from jaxrl_llm.environments.tool_calls import THINKING

# What stands between the end of thoughts and the text: of Harmony, the header of a message to the user.
HEADERS = {"<|end|>": "<|start|>assistant<|channel|>final<|message|>"}


def can_think(template: str) -> bool:
    """True where a chat template has thoughts of the model."""
    return any(mark in template for pair in THINKING.items() for mark in pair if mark not in HEADERS)


class Thoughts:
    """The place of the thoughts that an answer begins with in its raw text, which grows; `find` takes all of it.

    start: their first character, None where there are none yet. end: the one behind their last, and behind: the first
    of the text; None while they go on. over: none of it changes any more.
    """

    def __init__(self, prompt: str):
        """`prompt` is the end of the raw prompt, which may have opened them."""
        self._closing = next((end for mark, end in THINKING.items() if prompt.rstrip().endswith(mark)), "")
        self.start = 0 if self._closing else None
        self.end: int | None = None
        self.behind: int | None = None
        self.over = False
        self._searched = 0

    def find(self, text: str) -> None:
        """Looks at what is new in the raw text."""
        if self.start is None:
            begun = text.lstrip()
            mark = next((mark for mark in THINKING if begun.startswith(mark)), None)
            if mark is None:
                self.over = not any(mark.startswith(begun) for mark in THINKING)
                return
            self.start, self._closing = len(text) - len(begun) + len(mark), THINKING[mark]
        if self.end is None:
            at = text.find(self._closing, max(self.start, self._searched))
            self._searched = max(0, len(text) - len(self._closing) + 1)
            if at < 0:
                return
            self.end, self.behind = at, at + len(self._closing)
        header = HEADERS.get(self._closing, "")
        self.over = not header.startswith(text[self.behind :]) or text.endswith(header)
        if self.over and text.startswith(header, self.behind):
            self.behind = (self.behind or 0) + len(header)

    def certain(self, text: str) -> int:
        """The characters of the raw text up to which it is thoughts from their start on, while they go on."""
        return certain_length(text, (self._closing,))


def certain_length(text: str, marks: Iterable[str]) -> int:
    """The characters of a text that grows before the beginning of a mark that it ends with; all where there is none."""
    held = (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
    return len(text) - max(held, default=0)
