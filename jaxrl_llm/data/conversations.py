"""Prompts with their completions, and conversations, as token ids with a loss mask that is 1 where a token is learned.

Prompt and completion are tokenised apart, so that their boundary is where it is when the model samples, whatever the
tokenizer would merge across it, and no text is searched for.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.templates import (
    ROLES,
    Message,
    calls_of,
    continued_ends,
    continued_ids,
    is_conversational,
    plain_ids,
)
from jaxrl_llm.data.transcript import Transcript

Ids = list[int]


def prompt_and_completion(
    tokenizer: Any, prompt: Any, completion: Any, options: Mapping[str, Any], loss_on: str | None = None
) -> tuple[Ids, Ids]:
    """(ids, mask) of a prompt and its completion, the mask 1 on what the completion adds, or as `loss_on` says.

    Raises ConfigError unless both are text, or the prompt is messages and the completion text or messages.
    """
    if is_conversational(prompt):
        completion = as_messages(completion)
        messages = joined(prompt, completion)
        return conversation(tokenizer, messages, len(messages) - len(completion), prompt, options, loss_on)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ConfigError(
            f"the prompt is {type(prompt).__name__} and the completion {type(completion).__name__}; "
            "give both as text or both as messages"
        )
    prompt_ids = plain_ids(tokenizer, prompt)
    # Behind no text an answer opens the row, whatever special token stands before it.
    completion_ids = continued_ids(tokenizer, prompt_ids if prompt else [], completion)
    completion_ids = ended(tokenizer, completion_ids, completion)
    return prompt_ids + completion_ids, [int(loss_on == "all")] * len(prompt_ids) + [1] * len(completion_ids)


def with_steps(
    tokenizer: Any, prompt_ids: Ids, steps: Sequence[str], separator: str, between: str = ""
) -> tuple[Ids, Ids]:
    """(ids, ends) of the ids of a prompt and the steps behind it, `separator` behind each, where it ends, and `between`
    before the next one.

    Steps and separators are tokenised apart, so that no token reaches over the end of a step, as in TRL.
    """
    ids, ends = list(prompt_ids), []
    for number, step in enumerate(steps):
        for text in (between if number else "", step, separator):
            ids += continued_ids(tokenizer, ids, text)
        ends.append(len(ids) - 1)
    return ids, ends


def conversation(
    tokenizer: Any, messages: Any, first: int, prompt: Any, options: Mapping[str, Any], loss_on: str | None = None
) -> tuple[Ids, Ids]:
    """(ids, mask) of a conversation, the mask 1 on the turns from message `first` on that are learned.

    These are the assistant's, with `loss_on` "last_turn" the last of them only, with "all" everything. A message may
    say of its own turn, whoever's it is, whether it is learned (`train`; of the assistant also `weight`, 0 or 1, as in
    OpenAI's files), whether what ends it is (`train_end`), and which letters of its content are, counted from 0 and the
    last included (`train_detail`, axolotl's list of begin_offset, end_offset and train). A token is learned where all
    of its letters are.

    A turn is what the template adds after the text that the model is given to answer: for message `first` that is
    `prompt` (which may end inside it), for later ones the messages before; after none, or the assistant's own, or where
    another's turn is learned, it is what the template writes before any content. A turn that the template ends
    otherwise once messages follow has as much of its end as both have. With "as_shown" a turn that the template writes
    otherwise once messages follow, or than the model would be asked for, is what the whole text has behind the opening
    of such turns. A last turn behind which the template writes nothing, as GLM-4.5's, gets the end of a text: the model
    would not learn to stop.

    Raises ConfigError for what a message cannot say of its turn, for a learned turn whose calls the template does not
    show, for unknown roles where no turn is the assistant's, and where the template renders a turn that has to be
    found, or what comes before it, differently once others follow: with "all" none has to be, and with "as_shown" that
    is what is asked for.
    """
    # What is no list of messages is refused where it is rendered.
    own = [_turn_flags(index, message) for index, message in enumerate(messages if is_conversational(messages) else ())]
    transcript = Transcript(tokenizer, messages, first, prompt, options)
    rendered, turns = transcript.text, []
    counted = range(0 if loss_on == "all" else first, len(messages))
    for index in counted:
        usual = loss_on == "all" or messages[index]["role"] == "assistant"
        if usual if own[index].train is None else own[index].train:
            turns.append(index)
    roles = {str(message["role"]) for message in messages[first:]}
    if not turns and "assistant" not in roles and (others := sorted(roles.difference(ROLES))):
        raise ConfigError(
            f"no message is of the assistant, whose turns are learned: the role {others[0]!r} is none of "
            f'{", ".join(ROLES)}. Rename it, or name it with data.format, such as "chat_template(roles='
            f"{{'assistant': [{others[0]!r}]}})\" for a column messages"
        )
    if loss_on == "last_turn":
        counted = turns = turns[-1:]
    for index in turns:
        # A template that knows of no calls writes an empty turn, which would be learned.
        if hidden := [name for name in _called(messages[index]) if name not in rendered]:
            raise ConfigError(
                f"message {index} calls {hidden[0]!r}, which the chat template does not show: name a template that "
                "shows tool_calls (data.chat_template), or drop the row"
            )
    in_part = {i for i in counted if own[i].end not in (None, i in turns) or (i in turns and own[i].detail)}
    if in_part and loss_on == "as_shown":
        raise ConfigError(
            f"message {min(in_part)} says which part of it is learned (train_end, train_detail), but with "
            "data.loss_on=as_shown turns are learned whole: leave that out, or set data.loss_on to completion"
        )
    # The turns to find in the text: these, and those that have this in the mask, all else the opposite.
    on = int(loss_on != "all")
    sought = sorted(in_part | (set(turns) if on else set(counted) - set(turns)))
    ids: Ids = []
    mask: Ids = []
    done = 0
    for index in (*sought, None):
        found = (len(rendered), len(rendered)) if index is None else transcript.place(index)
        if index is not None and loss_on == "as_shown" and (found is None or found[0] < done):
            found = transcript.shown_place(index, done)
        # A turn's tokens must be those that sampling would make.
        if found is None or found[0] < done:
            before_last = loss_on == "completion" and index not in turns[-1:]
            ways = _ways_out(loss_on, before_last and any(map(transcript.place, turns[-1:])))
            raise ConfigError(
                f"the chat template writes the beginning of the conversation differently once message {index} follows, "
                f"or that message once others do, so the answer cannot be told from its prompt; {ways}"
            )
        ids += (text_ids := continued_ids(tokenizer, ids, rendered[done : found[0]]))
        mask += [1 - on] * len(text_ids)
        text, done = rendered[found[0] : found[1]], found[1]
        if index is None or index not in in_part:
            ids += (text_ids := continued_ids(tokenizer, ids, text))
            mask += [on] * len(text_ids)
            continue
        text_ids, ends = continued_ends(tokenizer, ids, text)
        ids += text_ids
        letters = _learned_letters(transcript, index, *found, own[index], index in turns)
        # The space before a word, which tokenizers may leave out of its letters, is the word's; of a letter of several
        # tokens the others are as the first.
        for start, end in zip([0, *ends], ends, strict=False):
            mask.append(int(all(letters[start:end])) if end > start or not mask else mask[-1])
    last = len(messages) - 1
    if last in turns and own[last].end is not False:
        # Each row would be rendered twice more, for a quarter of its time: most templates end in another letter.
        content = messages[last].get("content") if messages[last].keys() <= {"role", "content"} else None
        closed = isinstance(content, str) and not rendered.endswith((content[-1:], content.strip()[-1:]))
        if not closed and not transcript.closing(last):
            ids, mask = ended(tokenizer, ids, rendered), [*mask, 1]
    return ids, mask[: len(ids)]


def _learned_letters(
    transcript: Transcript, index: int, start: int, end: int, flags: "TurnFlags", is_learned: bool
) -> list[bool]:
    """Of each letter of the turn of message `index`, at (start, end) of the text, whether it is learned.

    Raises ConfigError where the template writes otherwise the content whose letters `flags.detail` counts.
    """
    message, answered = transcript.messages[index], transcript.up_to(index)
    behind = len(answered) - len(transcript.closing(index)) - start  # the content
    learned = [is_learned and not flags.detail] * behind
    for span in flags.detail if is_learned else ():
        content = message["content"]
        shown = next((x for x in (content, content.strip()) if answered[: behind + start].endswith(x)), None)
        if shown is None:
            raise ConfigError(
                f"message {index} says which letters are learned (train_detail), but the chat template writes its "
                "content otherwise: learn the turn whole, or name a template that leaves it as it is"
            )
        # Its own letters are behind those that the prompt has begun the turn with.
        continues = index == transcript.first and len(transcript.prompt) > index
        begun = len(transcript.prompt[index]["content"]) if continues else 0
        stripped = len(content) - len(content.lstrip()) if shown != content else 0
        for letter in range(max(span["begin_offset"], 0), span["end_offset"] + 1):
            at = behind - len(shown) - stripped + begun + letter
            if max(behind - len(shown), 0) <= at < behind:
                learned[at] = bool(span["train"])
    return [*learned, *[is_learned if flags.end is None else flags.end] * (end - start - behind)]


def _ways_out(loss_on: str | None, last_is_found: bool) -> str:
    """The settings, as the end of a message, with which a turn that the template writes otherwise is found or need not
    be."""
    ways = []
    if loss_on in ("completion", "last_turn"):
        ways = ["learn the last turn alone (data.loss_on=last_turn)"] * last_is_found
        ways += ["learn turns as the whole conversation shows them (data.loss_on=as_shown)"]
        ways += ["learn every token (data.loss_on=all)"]
    ways += ["set the template's options (data.chat_template_kwargs)", "name a template that only appends"]
    return f"{', '.join(ways[:-1])} or {ways[-1]} (data.chat_template)"


def _called(message: Message) -> list[str]:
    """The names of the functions that a message calls."""
    inner = [call.get("function", call) for call in calls_of(message) or () if isinstance(call, Mapping)]
    return [call["name"] for call in inner if isinstance(call, Mapping) and isinstance(call.get("name"), str)]


class TurnFlags(NamedTuple):
    """The words of a message on its own turn: whether it is learned, and its end; None where it says nothing."""

    train: bool | None
    end: bool | None
    detail: Sequence[Mapping[str, Any]]  # letters of the content, with whether they are; empty: as the turn is


def _turn_flags(index: int, message: Message) -> TurnFlags:
    """The flags that message `index` gives its own turn; raises ConfigError for what it cannot say."""
    weight = message.get("weight") if message["role"] == "assistant" else None
    if weight not in (None, 0, 1):
        raise ConfigError(
            f"message {index} has the weight {weight!r:.80}; it is 0, where the turn is not learned, or 1"
        )
    for name in ("train", "train_end"):
        if message.get(name) not in (None, False, True):
            raise ConfigError(f"message {index} has {name} = {message[name]!r:.80}; it is true or false")
    detail = message.get("train_detail") or ()
    whole = isinstance(detail, list | tuple) and all(
        isinstance(span, Mapping)
        and all(isinstance(span.get(name), int) for name in ("begin_offset", "end_offset"))
        and span.get("train") in (False, True)
        for span in detail
    )
    if not whole or (detail and not isinstance(message.get("content"), str)):
        raise ConfigError(
            f"message {index} has train_detail = {detail!r:.80}; it is a list of objects with begin_offset, end_offset "
            "(numbers of letters of the content, which is text) and train (true or false)"
        )
    train, end = (None if message.get(name) is None else bool(message[name]) for name in ("train", "train_end"))
    if train is None:
        train = None if weight is None and not detail else bool(weight is None or weight)
    return TurnFlags(train, end, detail)


def joined(prompt: Sequence[Message], completion: Any) -> list[Message]:
    """The messages of a prompt and its completion; the first of this goes on with the last of the prompt where both are
    the assistant's: the template must see one message, not two.

    Raises ConfigError for a completion that is no list of messages, and for contents that cannot be joined.
    """
    if not is_conversational(completion):
        raise ConfigError(f"the prompt has messages but the completion is {completion!r}; give text or messages")
    if not prompt[-1]["role"] == completion[0]["role"] == "assistant":
        return [*prompt, *completion]
    parts: list[Any] = [message.get("content") for message in (prompt[-1], completion[0])]
    if not all(isinstance(part, str) for part in parts):
        raise ConfigError(
            "the completion goes on with the assistant's turn that ends the prompt, so the content of both is "
            f"text, not {' and '.join(type(part).__name__ for part in parts)}; end the prompt before that turn"
        )
    return [*prompt[:-1], {**completion[0], "content": "".join(parts)}, *completion[1:]]


def as_messages(completion: Any) -> Any:
    """A completion that is text as one message of the assistant; anything else as it is."""
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def ended(tokenizer: Any, ids: Ids, text: str) -> Ids:
    """The ids with an end-of-sequence token at the end, unless the text has its own (white space after it aside).

    Raises ConfigError for a tokenizer without an end-of-sequence token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("the tokenizer has no end-of-sequence token, so a completion cannot end; set its eos_token")
    closed = bool(ids) and (ids[-1] == end or text.rstrip().endswith(tokenizer.eos_token))
    return ids if closed else [*ids, end]
