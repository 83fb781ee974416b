"""The loop of `python -m jaxrl_llm generate --interactive`: a person asks, one model answers, or two side by side."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrl_llm.config import ConfigError

HELP = "/reset forgets what was said, /quit or the end of the input leaves"
SMALLEST = 64  # tokens of the narrowest prompt a program is compiled for; wider ones double


@dataclass
class Speaker:
    """A model in a conversation: `answer(prompt, turn)` gives the text that follows a prompt.

    With `chat` a prompt is all messages so far; without, each text stands alone.
    """

    name: str
    answer: Callable[[Any, int], str]
    chat: bool
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        """Forgets what was said."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str, turn: int) -> str:
        """The answer to a text of the user's; raises what `answer` raises, and then remembers nothing of it."""
        if not self.chat:
            return self.answer(text, turn)
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = self.answer(asked, turn)
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer


def converse(speakers: Sequence[Speaker], read: TextIO | None = None, console: Console | None = None) -> None:
    """Reads a line at a time and shows what each speaker answers, until /quit or the end of the input.

    In a terminal lines are edited and asked for; through a pipe nothing but the answers is written. A line that cannot
    be answered (the conversation is too long) is told of and forgotten.
    """
    console = console or Console(highlight=False, soft_wrap=len(speakers) == 1)
    asks = read is None and sys.stdin.isatty()
    if asks:
        _greet(speakers, console)
    for speaker in speakers:
        speaker.reset()
    turn = 0
    for line in _lines(read or sys.stdin, asks):
        text = line.strip()
        if text == "/quit":
            return
        if text == "/reset":
            for speaker in speakers:
                speaker.reset()
        elif text.startswith("/") and text.partition(" ")[0] in ("/help", "/exit", "/?"):
            console.print(HELP, markup=False)
        elif text:
            turn += 1
            _answer(speakers, text, turn, console, asks)


def bucket(length: int) -> int:
    """The width that a prompt of so many tokens is padded to: 64, 128, 256, ... so that few programs are compiled."""
    return max(SMALLEST, 1 << (length - 1).bit_length())


def _answer(speakers: Sequence[Speaker], text: str, turn: int, console: Console, asks: bool) -> None:
    before = [list(speaker.messages) for speaker in speakers]
    try:
        answers = [speaker.say(text, turn) for speaker in speakers]
    except (ConfigError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and not asks:
            raise
        for speaker, messages in zip(speakers, before, strict=True):
            speaker.messages = messages
        said = "stopped" if isinstance(error, KeyboardInterrupt) else f"error: {error}"
        console.print(f"{said}; what you wrote is forgotten ({HELP})", markup=False)
        return
    if len(speakers) == 1:
        console.print(answers[0], markup=False)
        return
    table = Table(expand=True)
    for speaker in speakers:
        table.add_column(Text(speaker.name), ratio=1, overflow="fold")
    table.add_row(*map(Text, answers))
    console.print(table)


def _greet(speakers: Sequence[Speaker], console: Console) -> None:
    for speaker in speakers:
        kind = "" if speaker.chat else ", without a chat template: each line stands alone, and it goes on from there"
        console.print(f"{speaker.name}{kind}", markup=False)
    console.print(HELP, markup=False)


def _lines(read: TextIO, asks: bool) -> Iterator[str]:
    if not asks:
        yield from read
        return
    with contextlib.suppress(ImportError):
        __import__("readline")  # which makes input() remember and edit lines
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ")


def check_alone() -> None:
    """Raises ConfigError in a run of several processes, where only one has a person."""
    if jax.process_count() > 1:
        raise ConfigError("--interactive is for one process: start it once, with --tensor for several devices")
