"""Whether an answer has thoughts, and where they end and its text begins, in the form of each family of models."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.environments.tool_calls import THINKING
from jaxrl_llm.serving.errors import BadRequestError

# What stands between the end of thoughts and the text: of Harmony, the header of a message to the user.
HEADERS = {"<|end|>": "<|start|>assistant<|channel|>final<|message|>"}
# As chat templates have them.
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def template_of(tokenizer: Any) -> str:
    """The chat template of a tokenizer, empty where it has none."""
    return str(getattr(tokenizer, "chat_template", None) or "")


def can_think(template: str) -> bool:
    """True where a chat template has the marks between which a model writes its thoughts."""
    return any(mark in template for pair in THINKING.items() for mark in pair if mark not in HEADERS)


def tell_template(chat: dict[str, Any], thinks: bool | None, effort: str | None) -> None:
    """Let the chat template think or not, and with an effort, where it can; the request's own options stay."""
    # `enable_thinking` of Qwen 3, GLM and Gemma 4, `thinking` of DeepSeek V3.1 and Granite, the effort of gpt-oss.
    options = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    options |= {} if effort is None else {"reasoning_effort": effort}
    given = chat.get("chat_template_kwargs") or {}  # null is none
    if options and isinstance(given, Mapping):  # another is refused with the chat
        chat["chat_template_kwargs"] = options | dict(given)


def tell_effort(chat: dict[str, Any], effort: Any, template: str, field: str, given: Any, others: str = "") -> None:
    """Let the chat template think as an effort says; `none` is not at all, and None says nothing.

    Raises BadRequestError, on the `field` whose value is `given` and which takes `others` too, for an effort that there
    is not, or of a template without thoughts.
    """
    if effort not in (None, "none", *EFFORTS):
        raise BadRequestError(f"{field} is {given!r:.100}; it takes {others}none, {', '.join(EFFORTS)}", param=field)
    if effort not in (None, "none") and not can_think(template):
        raise BadRequestError(
            f"{field} is {given!r:.100}, but the model's chat template has no thoughts: leave it out",
            code="unsupported",
            param=field,
        )
    tell_template(chat, None if effort is None else effort != "none", EFFORTS.get(str(effort)))


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
        """Looks for the marks of thoughts in what is new of the raw text; `text` is all of it so far."""
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
