"""Chat templates: a prompt, plain or conversational, to token ids, and sampled ids back to text or messages.

A tokenizer here is any Hugging Face tokenizer. A chat template writes its own special tokens, so rendered chat text is
always tokenised without adding more; plain text gets the special tokens that the tokenizer puts before a text. Text
that continues a row has the ids that it has within the text of the whole row, merges across its beginning aside.
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from jaxrl_llm.config.resolve import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # of a row, for its chat template
ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")  # the second is OpenAI's name of the first
# The keys of a message that has nothing but its content to show.
BARE = {"role", "content", "name", "id", "weight", "train", "train_end", "train_detail"}
QUESTION = "the-question"  # of the user, in the messages by which a template is tried
log = logging.getLogger(__name__)
Message = Mapping[str, Any]
Prompt = str | Sequence[Message]
_GIVEN_TOOLS: set[str] = set()  # chat templates that were given tools, of which a warning is written once


def is_conversational(prompt: Any) -> bool:
    """True when `prompt` is a non-empty list of messages, each with a role."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(message, Mapping) and message.get("role") is not None for message in prompt)


def render_prompt(
    tokenizer: Any,
    prompt: Prompt,
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    expand: Callable[[str], str] | None = None,
) -> list[int]:
    """The token ids that a completion of `prompt` follows.

    Plain text: the tokenizer's own ids, with the beginning-of-sequence token it adds (once, also when the text already
    opens with it) and without an end-of-sequence token. Messages: the chat template, followed by the opening of the
    assistant's turn; a last message from the assistant is left open and continued.

    Raises ConfigError: neither text nor messages, or the chat template is missing or refuses the messages.
    """
    if isinstance(prompt, str):
        return plain_ids(tokenizer, prompt)
    return chat_ids(tokenizer, render_chat(tokenizer, prompt, True, tools, template_kwargs, expand))


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that opens a row: one beginning-of-sequence token if the tokenizer has it, no end."""
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    # Text that a chat template or a format has rendered may bring its own beginning: two would be out of distribution.
    opened = bool(bos) and text.startswith(bos)
    ids = _ids(tokenizer, text, not opened)
    # Tokenizers like T5's end every text, but a prompt goes on.
    if eos and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(eos):
        ids.pop()
    return ids


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of text that opens a row and already carries its special tokens."""
    return _ids(tokenizer, text, False) if text else []


def continued_ids(tokenizer: Any, before: Sequence[int] | None, text: str) -> list[int]:
    """Token ids of text that follows the ids `before` in a row; None stands for those of ordinary text.

    SentencePiece's tokenizers, and a few of bytes, put a space before a text, some behind special tokens too. A text
    that continues a row has it only where the text of the whole row has it: "4" after "2+2=" is "4" and not "▁4".
    """
    unspaced = _unspaced(tokenizer)
    if not text or unspaced is None or (before is not None and (not before or before[-1] in unspaced.spaced_again)):
        return chat_ids(tokenizer, text)
    encoding = unspaced.backend.encode(text, add_special_tokens=False)
    end = next((index for index, token in enumerate(encoding.ids) if token in unspaced.spaced_again), None)
    if end is None:
        return checked(tokenizer, encoding.ids)
    # What is left begins with a special token, before which no tokenizer puts a space.
    return checked(tokenizer, encoding.ids[:end]) + chat_ids(tokenizer, text[encoding.offsets[end][0] :])


def continued_ends(tokenizer: Any, before: Sequence[int] | None, text: str) -> tuple[list[int], list[int]]:
    """The ids of `continued_ids`, and the place in the text behind each.

    Raises ConfigError for a tokenizer that does not say these places, as those that are written in Python.
    """
    ids, unspaced = continued_ids(tokenizer, before, text), _unspaced(tokenizer)
    backends = [getattr(tokenizer, "backend_tokenizer", None), None if unspaced is None else unspaced.backend]
    for backend in backends:
        encoding = None if backend is None else backend.encode(text, add_special_tokens=False)
        if encoding is not None and encoding.ids == ids:
            return ids, [end for _, end in encoding.offsets]
    raise ConfigError(
        f"a turn is learned in part, but the tokenizer ({type(tokenizer).__name__}) does not say which letters its "
        "tokens are: use one that is made of tokenizer.json, or learn turns whole"
    )


class Unspaced(NamedTuple):
    """The backend of a tokenizer without the space that this puts before a text."""

    backend: "Tokenizer"
    spaced_again: frozenset[int]  # special tokens behind which the tokenizer puts it too


# The stages of tokenizers that put a space before a text, with the option that does and the value that does not.
SPACING = {
    "Prepend": ("prepend", ""),
    "Metaspace": ("prepend_scheme", "never"),
    "ByteLevel": ("add_prefix_space", False),
}
_UNSPACED: WeakKeyDictionary[Any, tuple[int, Unspaced | None]] = WeakKeyDictionary()  # with the tokenizer's size


def _unspaced(tokenizer: Any) -> Unspaced | None:
    """The tokenizer without the space that it puts before a text; None where it puts none there."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    size, unspaced = _UNSPACED.get(tokenizer, (0, None))
    if size == len(tokenizer):  # else tokens have been added since
        return unspaced
    stages = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer")}
    try:
        states = {name: json.loads(stage.__getstate__()) for name, stage in stages.items() if stage is not None}
    except Exception:  # a stage that is written in Python has no state
        states = {}
    spacing, unspaced = [stage for state in states.values() for stage in _spacing_stages(state)], None
    if spacing:
        from tokenizers import Tokenizer

        again = {stage["type"] for stage in spacing if stage.get("prepend_scheme") != "first"}
        spaced_again = {
            index
            for index, token in tokenizer.added_tokens_decoder.items()
            # A token that is normalised is found in text that has been given its space.
            if again and not (again == {"Prepend"} and token.normalized)
        }
        for stage in spacing:
            stage.update([SPACING[stage["type"]]])
        state = json.loads(backend.to_str()) | states | {"truncation": None, "padding": None}
        unspaced = Unspaced(Tokenizer.from_str(json.dumps(state)), frozenset(spaced_again))
    _UNSPACED[tokenizer] = len(tokenizer), unspaced
    return unspaced


def _spacing_stages(state: Any) -> list[dict[str, Any]]:
    """The stages that put a space before a text, of a stage of a tokenizer that may be a sequence of others."""
    if state["type"] == "Sequence":
        inner = state.get("normalizers", []) + state.get("pretokenizers", [])
        return [found for stage in inner for found in _spacing_stages(stage)]
    option, without = SPACING.get(state["type"], ("", None))
    return [state] if state.get(option, without) != without else []


def checked(tokenizer: Any, ids: list[int]) -> list[int]:
    """The ids; raises ConfigError for a token of the tokenizer that the model has no embedding of."""
    missing = getattr(tokenizer, "without_embedding", frozenset())  # set when the model is loaded
    if not missing.isdisjoint(ids):
        index = next(index for index in ids if index in missing)
        raise ConfigError(
            f"a text contains {tokenizer.convert_ids_to_tokens(index)}, token {index}, for which the model has no "
            "embedding; remove it from the data"
        )
    return ids


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    return checked(tokenizer, list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]))


def render_chat(
    tokenizer: Any,
    messages: Any,
    add_generation_prompt: bool,
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    expand: Callable[[str], str] | None = None,
) -> str:
    """The text of `messages` in the tokenizer's chat template, after `expand`, which writes the tokens of images.

    With `add_generation_prompt` the text ends where the assistant goes on: after the opening of a new turn, or inside
    the last message when that is the assistant's.

    Raises ConfigError: not a list of messages, no chat template, or a template that refuses them. Warns of a template
    that leaves out the tools.
    """
    if not is_conversational(messages):
        first = messages[0] if isinstance(messages, list) and messages else None
        raise ConfigError(
            f"a prompt is text or a list of messages with role and content, not {messages!r:.200}; "
            + (
                "data.format=\"sharegpt(field='COLUMN')\" reads turns with from and value"
                if isinstance(first, Mapping) and {"from", "value"} <= first.keys()
                else "fix the column or name another with data.prompt_key"
            )
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the data has chat messages but the tokenizer has no chat template; "
            "use an instruction-tuned model, give its tokenizer a chat_template (a run by data.chat_template, such as "
            "chatml), or use plain-text prompts"
        )
    continued = add_generation_prompt and messages[-1]["role"] == "assistant"
    # Arrow storage gives every message the keys of all others, set to None, and templates test for the key alone. Some
    # do so for calls too: of an empty list Mistral's write a call in place of the content, and Llama 3's refuse it.
    present = [
        {k: v for k, v in message.items() if k == "content" or not (v is None or (k == "tool_calls" and v in ([], ())))}
        for message in messages
    ]
    for index, message in enumerate(present):
        # Of these many templates would make the text None.
        if message.get("content") is None and message.keys() <= BARE:
            raise ConfigError(
                f"message {index}, of the {message['role']}, has no content: fill it, or leave out the message or row"
            )
        # Results of tools may be anything, which templates write as JSON.
        content = message.get("content")
        if message["role"] in ROLES[:-1] and not isinstance(content, str | list | tuple | None):
            raise ConfigError(f"message {index} has the content {content!r:.80}; it is text, or a list of parts")
    reads = forms_read(tokenizer)
    present = [_in_form(message, reads) for message in present]
    for role in {str(message["role"]) for message in present}.difference(ROLES):
        _tell_of_role(role, str(tokenizer.chat_template))

    def rendered(tools: list[Any] | None) -> str:
        return tokenizer.apply_chat_template(
            present,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt and not continued,
            continue_final_message=continued,
            **(template_kwargs or {}),
        )

    try:
        text = rendered(tools)
        if tools and (template := str(tokenizer.chat_template)) not in _GIVEN_TOOLS:
            _GIVEN_TOOLS.add(template)
            if text == rendered(None):
                log.warning(
                    "the chat template does not show tools: a model calls those that it knows already, or none; see "
                    "docs/environments.md"
                )
    except Exception as error:
        raise ConfigError(f"the chat template refused the messages {messages!r:.200}: {error}") from error
    return text if expand is None else expand(text)


@functools.lru_cache(64)  # once, and clients of a server may write any
def _tell_of_role(role: str, template: str) -> None:
    """Log a warning about a role that the chat template does not name."""
    if role not in template:
        log.warning(
            "messages have the role %.40r, which the chat template does not name: it may leave them out, or the model "
            "not know it; the usual roles are %s", role, ", ".join(ROLES),
        )  # fmt: skip


def tool_calls(functions: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a turn, as messages have them, of functions with a name and arguments each."""
    return [{"type": "function", "id": f"call{i:05d}", "function": dict(each)} for i, each in enumerate(functions)]


def called_turn(
    tokenizer: Any,
    functions: Sequence[Mapping[str, Any]],
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str | None:
    """The text of a turn that calls `functions`, each with name and arguments, as the chat template writes it.

    It has the tokens that end it, and no opening. None for a template that refuses such a turn or does not show it.
    """
    question = {"role": "user", "content": QUESTION}
    turn = {"role": "assistant", "content": "", "tool_calls": tool_calls(functions)}
    try:
        before, text = (
            render_chat(tokenizer, messages, len(messages) == 1, tools, template_kwargs).partition(QUESTION)[2]
            for messages in ([question], [question, turn])
        )
    except ConfigError:
        return None
    # The opening may open thinking, of which this turn has none.
    text = text.removeprefix(re.split("<(?:seed:)?think>", before)[0])
    return text if all(each["name"] in text for each in functions) else None


class FormsRead(NamedTuple):
    """The forms of a message, as data has them, that a chat template reads."""

    texts: bool  # contents that are text
    parts: bool  # contents that are lists of parts
    objects: bool  # arguments of calls that are objects
    json_texts: bool  # arguments of calls that are JSON text, as OpenAI writes them
    developers: bool  # messages of the role developer, OpenAI's name of system
    functions: bool  # messages of the role function, OpenAI's earlier name of tool


_FORMS_READ: dict[str, FormsRead] = {}  # by chat template


def forms_read(tokenizer: Any) -> FormsRead:
    """The forms that the tokenizer's chat template reads, tried with a message of each."""
    template = str(tokenizer.chat_template)
    if template not in _FORMS_READ:
        text, parts = ([{"role": "user", "content": x}] for x in ("probe", [{"type": "text", "text": "probe"}]))

        def called(arguments: Any) -> list[Any]:
            calls = tool_calls([{"name": "f", "arguments": arguments}])
            return [*text, {"role": "assistant", "content": "", "tool_calls": calls}]

        def reads(messages: list[Any], word: str, quoted: str) -> bool:
            try:
                shown = tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception:  # a template may ask for other messages than these
                return False
            return word in shown and quoted not in shown  # which stands in what Python writes of a list or dictionary

        _FORMS_READ[template] = FormsRead(
            texts=reads(text, "probe", "'probe'"),
            parts=reads(parts, "probe", "'probe'"),
            objects=reads(called({"argument": 1}), "argument", "'argument'"),
            json_texts=reads(called('{"argument": 1}'), '{"argument": 1}', "'argument'"),
            developers="developer" in template,
            functions=re.search(r"role\W+function\b", template) is not None,  # as of ['role'] == 'function'
        )
    return _FORMS_READ[template]


def calls_of(message: Message) -> Any:
    """The calls of a message: those of `tool_calls`, which may be JSON text, or OpenAI's earlier `function_call`.

    Raises ConfigError for text that is no JSON of a list.
    """
    calls = message.get("tool_calls")
    if not calls and isinstance(function := message.get("function_call"), Mapping):
        return tool_calls([function])
    if not isinstance(calls, str):
        return calls
    try:
        read = json.loads(calls) if calls.strip() else []
    except ValueError:
        read = None
    if not isinstance(read, list):
        raise ConfigError(
            f"a message has the tool_calls {calls!r:.80}; they are a list of calls, or the JSON text of one"
        )
    return read


def _in_form(message: dict[str, Any], reads: FormsRead) -> dict[str, Any]:
    """The message in the forms that its chat template reads, where it is known to read these and not those it has.

    Texts become a part, and parts that are all texts one text. Arguments of calls that are JSON text, as OpenAI writes
    them and columns of one type need them, become objects: a template would write them as a text within the call. Where
    a template reads JSON text alone, as DeepSeek's, objects become that. The role developer is system to a template
    that does not name it: it would leave the message out, or show a role that no model knows; so is OpenAI's earlier
    role function that of a tool.

    Raises ConfigError for a part that is no text where the template reads none: it would write Python's text of it.
    """
    if message["role"] == "developer" and not reads.developers:
        message = {**message, "role": "system"}
    if message["role"] == "function" and not reads.functions:
        message = {**message, "role": "tool"}
    content = message.get("content")
    if isinstance(content, str) and reads.parts and not reads.texts:
        message = {**message, "content": [{"type": "text", "text": content}]}
    elif isinstance(content, list) and reads.texts and not reads.parts:
        others = [part for part in content if not _is_text_part(part)]
        if not others:
            message = {**message, "content": "".join(part["text"] for part in content)}
        elif message["role"] != "tool":  # whose results may be any list
            raise ConfigError(
                f"a content has the part {others[0]!r:.80}, but the chat template reads texts alone: leave it out, or "
                "name a template that reads it (data.chat_template)"
            )
    calls = calls_of(message)
    if isinstance(calls, list | tuple) and calls:
        read = reads.objects or reads.json_texts
        calls = [_with_arguments(call, reads.objects) if read else call for call in calls]
        return {**message, "tool_calls": calls}
    if calls or "tool_calls" not in message:
        return message
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _with_arguments(call: Any, as_object: bool) -> Any:
    """The call with an object as its arguments, where they are the JSON text of one; or with the text of an object."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None  # templates take either
    arguments = inner.get("arguments") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(arguments, str if as_object else Mapping):
        return call
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
            if not isinstance(arguments, Mapping):
                return call
        else:
            arguments = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return call
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def template_options(row: Mapping[str, Any], template_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`tools` and `template_kwargs` of `render_chat`, from the columns tools and chat_template_kwargs of a row.

    Either may be JSON text; blank text is none. Raises ConfigError for text that is no JSON, and for
    chat_template_kwargs that are no object.
    """
    columns = {name: row.get(name) for name in TEMPLATE_COLUMNS}
    for name, value in columns.items():
        if isinstance(value, str):
            try:
                columns[name] = json.loads(value) if value.strip() else None
            except json.JSONDecodeError as error:
                raise ConfigError(f"the {name} column is not JSON: {error}") from error
    tools, row_kwargs = (columns[name] or None for name in TEMPLATE_COLUMNS)
    if not isinstance(row_kwargs or {}, Mapping):
        raise ConfigError(
            f"the chat_template_kwargs column is {row_kwargs!r:.80}; it takes an object of the template's variables, "
            'such as {"enable_thinking": false}, or the JSON text of one'
        )
    present = {key: value for key, value in (row_kwargs or {}).items() if value is not None}
    return {"tools": tools, "template_kwargs": {**(template_kwargs or {}), **present}}


def without_absent_keys(example: Mapping[str, Any]) -> dict[str, Any]:
    """A row or example from Arrow storage with what its messages, tools and template options hold as it was written.

    Arrow gives every object the keys of all others at its place, set to None, and a template would show those of other
    rows' tools. Nothing tells them from keys that were written as null, which go too. `render_chat` sees to the keys of
    messages themselves.
    """
    made = dict(example)
    for name, value in example.items():
        if name in TEMPLATE_COLUMNS:
            made[name] = _without_none(value)
        elif is_conversational(value):
            made[name] = [{key: _without_none(held) for key, held in message.items()} for message in value]
    return made


def _without_none(value: Any) -> Any:
    """The value without the keys of None, in it and in all that it holds."""
    if isinstance(value, Mapping):
        return {key: _without_none(held) for key, held in value.items() if held is not None}
    return [_without_none(held) for held in value] if isinstance(value, list | tuple) else value


def decode_completion(tokenizer: Any, ids: Sequence[int], conversational: bool) -> str | list[dict[str, str]]:
    """The text of sampled token ids without special tokens; as one assistant message when `conversational`."""
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [{"role": "assistant", "content": text}] if conversational else text
