"""`Transcript`: a conversation as its chat template writes it, and the place of each turn in that text.

No text is searched for: a turn is what the template adds behind the text that the model is given to answer, or what
stays as it is when the content of its message is another.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.data.templates import QUESTION, Message, render_chat

PRIVATE = range(0xE000, 0xF900)  # letters that no text has, by Unicode: for private use


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
    newest: dict[int, str] = field(default_factory=dict)  # the text of `up_to`, for the message that was asked for last

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
            asked = shared(answered, self._other_up_to(index))
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
        other = self._with_other(self.messages, index)
        start = len(shared(self.text, other))
        left = len(self.text) - len(shared_end(self.text, other))
        closing = shared_end(self.up_to(index), self._with_other(self.messages[: index + 1], index))
        # What is before an empty content and behind it may begin alike.
        end = self._closed(max(start, left), closing[max(start - left, 0) :])
        opened = self.text.rfind(self._opening, done, start)
        if index + 1 < len(self.messages):
            following = self._with_other(self.messages, index + 1)
            if end > len(shared(self.text, following)):
                return None
        return start if opened < 0 else opened + len(self._opening), end

    def up_to(self, index: int) -> str:
        """The text of the messages up to `index`, that one included."""
        if index == len(self.messages) - 1:
            return self.text
        if index not in self.newest:
            self.newest.clear()
            self.newest[index] = self._rendered(self.messages[: index + 1])
        return self.newest[index]

    def closing(self, index: int) -> str:
        """The text that the template writes behind the content of message `index` where it is the last."""
        return shared_end(self.up_to(index), self._other_up_to(index))

    def _rendered(self, messages: Sequence[Message]) -> str:
        return render_chat(self.tokenizer, messages, False, **self.options)

    @functools.cached_property
    def _stand_in(self) -> str:
        """A content that has no letter in common with the text, so that both differ from its first to its last one."""
        return next(letter for letter in map(chr, PRIVATE) if letter not in self.text)

    def _other_up_to(self, index: int) -> str:
        """The text up to message `index`, with another content of it and, of the assistant, nothing else."""
        message = self.messages[index]
        plain = {"role": "assistant"} if message["role"] == "assistant" else message
        return self._rendered([*self.messages[:index], {**plain, "content": self._stand_in}])

    def _with_other(self, messages: Sequence[Message], index: int) -> str:
        """The text of messages, with another content of message `index`."""
        return self._rendered(
            [*messages[:index], {**messages[index], "content": self._stand_in}, *messages[index + 1 :]]
        )

    def _closed(self, end: int, closing: str) -> int:
        """The end of a turn whose content ends at `end`, and that the template closes so where it is the last."""
        # What both endings share, in whole special tokens: two may begin with the same letters.
        endings = (closing, self.text[end : end + len(closing)])
        return end + len("".join(shared(*map(self._parts.findall, endings))))

    @functools.cached_property
    def _parts(self) -> re.Pattern[str]:
        """A special token, or a letter."""
        special = sorted(map(re.escape, self.tokenizer.get_added_vocab()), key=len, reverse=True)
        return re.compile("|".join([*special, "."]), re.DOTALL)

    @functools.cached_property
    def _opening(self) -> str:
        """The text that the template writes before a turn of the assistant, asked for one and showing one."""
        question = [{"role": "user", "content": QUESTION}]
        answered = [*question, {"role": "assistant", "content": self._stand_in}]
        closed, asked, shown = (
            render_chat(self.tokenizer, *which, **self.options).partition(QUESTION)[2]
            for which in ((question, False), (question, True), (answered, False))
        )
        return shared(asked, shown).removeprefix(closed)


def shared(*sequences: Any) -> Any:
    """The beginning that the texts, or the lists, share; by halves, as texts are long and slices of them fast to
    compare."""
    first, *others = sequences
    same, most = 0, min(map(len, sequences))
    while same < most:
        end = (same + most + 1) // 2
        if all(first[same:end] == other[same:end] for other in others):
            same = end
        else:
            most = end - 1
    return first[:same]


def shared_end(*texts: str) -> str:
    """The longest text that all of these end with."""
    return shared(*(text[::-1] for text in texts))[::-1]
