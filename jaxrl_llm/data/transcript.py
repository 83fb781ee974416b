"""`Transcript`: a conversation as its chat template writes it, and the place of each turn in that text.

No text is searched for: a turn is what the template adds behind the text that the model is given to answer, or what
stays as it is when the content of its message is another.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jaxrl_llm.data.templates import QUESTION, Message, render_chat

STAND_INS = ("a", "b")  # contents without a common beginning or end


@dataclass(frozen=True)
class Transcript:
    """A conversation whose message `first` answers `prompt`, which may end inside it, under the template's `options`.

    A place is (start, end) in `text`.
    """

    tokenizer: Any
    messages: Sequence[Message]
    first: int
    prompt: Any
    options: Mapping[str, Any]

    @functools.cached_property
    def text(self) -> str:
        """The whole conversation; raises ConfigError for what is no list of messages."""
        return self._rendered(self.messages)

    def place(self, index: int) -> tuple[int, int] | None:
        """The place of the turn of message `index`, None where the template writes it, or what comes before it,
        otherwise once more messages follow."""
        before = self.prompt if index == self.first else self.messages[:index]
        answered = self.up_to(index)
        answers = self.messages[index]["role"] == "assistant"
        if answers and before and (index == self.first or before[-1]["role"] != "assistant"):
            asked = render_chat(self.tokenizer, before, True, **self.options)
        else:
            # Templates cannot be asked for the opening of such a turn: it is what turns share.
            asked = shared(answered, *self._others(index))
        if not self.text.startswith(asked):
            return None
        if self.text.startswith(answered):
            return (len(asked), len(answered)) if len(asked) <= len(answered) else None
        closing = self.closing(index)
        end = len(answered) - len(closing)
        if end < len(asked) or not self.text.startswith(answered[:end]):
            return None
        return len(asked), self._closed(end, closing)

    def shown_place(self, index: int, done: int) -> tuple[int, int] | None:
        """The place of the turn of message `index` where the whole text has it, from `done` on; None where other turns
        are within."""
        texts, ends = self._whole_with_other(index), self.messages[: index + 1]
        start = len(shared(*texts))
        left = len(self.text) - len(shared_end(*texts))
        contents = (ends, *([*ends[:-1], {**ends[-1], "content": word}] for word in STAND_INS))
        closing = shared_end(*map(self._rendered, contents))
        # What is before an empty content and behind it may begin alike.
        end = self._closed(max(start, left), closing[max(start - left, 0) :])
        opened = self.text.rfind(self._opening, done, start)
        if index + 1 < len(self.messages) and end > len(shared(*self._whole_with_other(index + 1))):
            return None
        return start if opened < 0 else opened + len(self._opening), end

    def up_to(self, index: int) -> str:
        """The text of the messages up to `index`, that one included."""
        return self.text if index == len(self.messages) - 1 else self._rendered(self.messages[: index + 1])

    def closing(self, index: int) -> str:
        """What the template writes behind the content of message `index` where it is the last."""
        return shared_end(self.up_to(index), *self._others(index))

    def _rendered(self, messages: Sequence[Message]) -> str:
        return render_chat(self.tokenizer, messages, False, **self.options)

    def _others(self, index: int) -> list[str]:
        """The text up to message `index`, with two other contents of it."""
        message = self.messages[index]
        plain = {"role": "assistant"} if message["role"] == "assistant" else message
        return [self._rendered([*self.messages[:index], {**plain, "content": word}]) for word in STAND_INS]

    def _whole_with_other(self, index: int) -> list[str]:
        """The whole text, and those with two other contents of message `index`."""
        before, message, after = self.messages[:index], self.messages[index], self.messages[index + 1 :]
        stand_ins = ([*before, {**message, "content": word}, *after] for word in STAND_INS)
        return [self.text, *map(self._rendered, stand_ins)]

    def _closed(self, end: int, closing: str) -> int:
        """The end of a turn whose content ends at `end`, and that the template closes so where it is the last."""
        # What both endings share, in whole special tokens: two may begin with the same letters.
        special = sorted(map(re.escape, self.tokenizer.get_added_vocab()), key=len, reverse=True)
        parts = re.compile("|".join([*special, "."]), re.DOTALL)
        endings = (closing, self.text[end : end + len(closing)])
        return end + len("".join(shared(*map(parts.findall, endings))))

    @functools.cached_property
    def _opening(self) -> str:
        """What the template writes before a turn of the assistant, asked for one and showing one."""
        question = [{"role": "user", "content": QUESTION}]
        answered = ([*question, {"role": "assistant", "content": word}] for word in STAND_INS)
        closed, asked, *shown = (
            render_chat(self.tokenizer, *which, **self.options).partition(QUESTION)[2]
            for which in ((question, False), (question, True), *((messages, False) for messages in answered))
        )
        return shared(asked, *shown).removeprefix(closed)


def shared(*sequences: Any) -> Any:
    """What the texts, or the lists, all begin with."""
    return sequences[0][: sum(1 for _ in takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False)))]


def shared_end(*texts: str) -> str:
    """What the texts all end with."""
    return shared(*(text[::-1] for text in texts))[::-1]
