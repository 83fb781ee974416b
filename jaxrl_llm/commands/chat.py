"""Talk to a model, or to two side by side.

    python -m jaxrl_llm chat --model=runs/grpo/hf
    python -m jaxrl_llm chat --model=runs/grpo/hf --against=embedded:sort

Reads lines, from a terminal or a pipe, and answers each. Lines are messages of a conversation where the model has a
chat template; without one (or with --chat=false) each line is a prompt of its own. `--against` shows the answers of two
models side by side. `/image FILE` shows the model an image: it stands before the text of the next line. A line that
begins with a space is sent though its first word looks like a command.
"""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrl_llm.commands.generate import (
    CONVERSATION,
    MODEL,
    SAMPLING,
    completion_text,
    engine_of,
    prompt_rows,
    sample_ids,
)
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.data.images import ImageLimits, read_image
from jaxrl_llm.data.templates import Prompt
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import Model
from jaxrl_llm.serving.grid import bucket
from jaxrl_llm.training.setup.run_models import load_named

HELP = "/image FILE shows an image, /reset starts a new conversation, /quit or the end of the input leaves"

FLAGS = (
    *MODEL,
    Setting("against", "", "A second model, whose answers are shown on the left."),
    Setting("chat", None, "Send lines as messages, in the chat template; none is true where the model has one.", bool),
    *CONVERSATION,
    *SAMPLING,
)


@dataclass
class Speaker:
    """A model in a conversation: `answer(prompt, turn)` returns the text that follows a prompt.

    With `chat` a prompt is all messages so far; without, each text stands alone.
    """

    name: str
    answer: Callable[[Any, int], str]
    chat: bool
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def reset(self) -> None:
        """Starts a new conversation."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str, turn: int, images: Sequence[Path] = ()) -> str:
        """The answer to a user's text behind images; an error of `answer` leaves the conversation as it was."""
        if not self.chat:
            if images:
                raise ConfigError(f"{self.name} is not asked through a chat template, so its lines have no images")
            return self.answer(text, turn)
        parts = [{"type": "image", "image": str(image)} for image in images]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        messages = [*self.messages, {"role": "user", "content": content}]
        answer = self.answer(messages, turn)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


def converse(speakers: Sequence[Speaker], read: TextIO | None = None, console: Console | None = None) -> None:
    """Reads a line at a time and shows the answer of each speaker, until /quit or the end of the input.

    In a terminal it greets, prompts, and lets lines be edited; through a pipe it prints nothing but the answers. A line
    without an answer (the conversation is too long, or Ctrl-C) is reported and removed from the conversation.
    """
    console = console or Console(highlight=False, soft_wrap=len(speakers) == 1)
    terminal = read is None and sys.stdin.isatty()
    for speaker in speakers:
        speaker.reset()
        if terminal:
            kind = (
                "" if speaker.chat else ", without a chat template: each line stands alone, and the model continues it"
            )
            console.print(f"{speaker.name}{kind}", markup=False)
    if terminal:
        console.print(HELP, markup=False)
    turn, images = 0, list[Path]()
    for line in _typed_lines() if terminal else read or sys.stdin:
        text = line.strip()
        command = "" if line.startswith(" ") else text.partition(" ")[0]
        if command == "/quit":
            return
        if command == "/reset":
            for speaker in speakers:
                speaker.reset()
            images = []
        elif command == "/image":
            file = Path(text.removeprefix("/image").strip()).expanduser().absolute()
            try:
                read_image(file, ImageLimits())
                images.append(file)
            except ConfigError as error:
                console.print(f"error: {error}", markup=False)
        elif re.fullmatch(r"/[\w?]+", command):  # which a path, /etc/hosts, is not
            unknown = "" if command in ("/help", "/?") else f"there is no command {command}: "
            console.print(f"{unknown}{HELP}; a line that begins with a space is sent as it is", markup=False)
        elif text:
            turn += 1
            _show_answers(speakers, text, images, turn, console, terminal)
            images = []


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        __import__("readline")  # input() then edits lines and has a history
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ")


def _show_answers(
    speakers: Sequence[Speaker], text: str, images: list[Path], turn: int, console: Console, terminal: bool
) -> None:
    before = [list(speaker.messages) for speaker in speakers]
    try:
        answers = [speaker.say(text, turn, images) for speaker in speakers]
    except (ConfigError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and not terminal:
            raise
        # One of two speakers may have answered already: both go back, so that they have the same messages.
        for speaker, messages in zip(speakers, before, strict=True):
            speaker.messages = messages
        reason = "stopped" if isinstance(error, KeyboardInterrupt) else f"error: {error}"
        console.print(f"{reason}; the line is removed from the conversation ({HELP})", markup=False)
        return
    if len(speakers) == 1:
        console.print(answers[0], markup=False)
        return
    table = Table(expand=True)
    for speaker in speakers:
        table.add_column(Text(speaker.name), ratio=1, overflow="fold")
    table.add_row(*map(Text, answers))
    console.print(table)


def answerer(
    model: Model, template_kwargs: Mapping[str, Any] | None = None, **settings: Any
) -> Callable[[Prompt, int], str]:
    """A function (prompt, turn) that returns the text after a prompt; the settings are those of `generate`.

    Turns count from 1 and draw their own random numbers. The chat template gets `template_kwargs`. Prompts are padded
    to the widths of `bucket`: a conversation compiles one program for each width and not one for each turn. The
    function raises ConfigError for a prompt that is with its completion longer than the model's positions.
    """
    engine, seed = engine_of(model, settings), settings.get("seed", 0)
    max_new_tokens, positions = engine.max_completion_length, model.max_positions

    def answer(prompt: Prompt, turn: int) -> str:
        (asked,) = prompt_rows(model, [prompt], columns=[{"chat_template_kwargs": template_kwargs}])
        ids = asked["prompt_ids"]
        width = bucket(len(ids))
        if positions is not None and len(ids) + max_new_tokens > positions:
            raise ConfigError(
                f"the conversation has {len(ids)} tokens; with --max_new_tokens={max_new_tokens} that is more than the "
                f"{positions} that {model.path} was made for"
            )
        width = width if positions is None else min(width, positions - max_new_tokens)
        (row,) = sample_ids(model, engine, [ids], seed, width, turn - 1, [asked.get(PIXELS)])
        return completion_text(model, prompt, ids, row)

    return answer


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    options = load_options(argv, __doc__ or "", FLAGS)
    processes.join()
    keep_compiled()
    if not options["model"]:
        raise ConfigError("--model is missing; write --model=PATH, such as embedded:sort or RUN")
    if jax.process_count() > 1:
        raise ConfigError("chat is for one process: start it once, with --tensor for several devices")
    speakers, kwargs = [], split_options(f"chat_template_kwargs({options['chat_template_kwargs']})")[1]
    for path in filter(None, (options["against"], options["model"])):  # the one before training on the left
        mesh, trusts = make_mesh(tensor=options["tensor"]), options["trust_remote_code"]
        model = load_named(path, options["dtype"], mesh=mesh, trust_remote_code=trusts)
        has_template = bool(getattr(model.tokenizer, "chat_template", None))
        chat = has_template if options["chat"] is None else options["chat"]
        given = [flag.name for flag in CONVERSATION if options[flag.name]]
        if given and not chat:
            raise ConfigError(f"--{given[0]} is given, but {path} is not asked through a chat template: leave it out")
        answer = answerer(model, kwargs, **{setting.name: options[setting.name] for setting in SAMPLING})
        speakers.append(Speaker(path, answer, chat, options["system"]))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a line that is no UTF-8 would end the conversation
    converse(speakers)
