"""Examples as token ids and loss masks, by parts: what is asked and what is answered are tokenised apart.

So a boundary is where it is when the model samples, whatever the tokenizer would merge, and no text is searched for.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.chat import chat_ids, is_conversational, plain_ids, render_chat

Ids = list[int]


def completion_row(
    example: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any], last_turn: bool = False
) -> tuple[Ids, Ids]:
    """(ids, mask) of a row of supervised fine-tuning: prompt and completion, messages, or text."""
    given = {name for name, value in example.items() if value is not None}
    if "messages" in given:
        return conversation(tokenizer, example["messages"], 0, [], options, last_turn)
    if {"prompt", "completion"} <= given:
        return prompt_and_completion(tokenizer, example["prompt"], example["completion"], options, last_turn)
    if "text" in given:
        if not isinstance(example["text"], str):
            raise ConfigError(f"column 'text' is {type(example['text']).__name__}, but it takes text")
        ids = ended(tokenizer, plain_ids(tokenizer, example["text"]), example["text"])
        return ids, [1] * len(ids)
    raise ConfigError(
        f"the row has the columns {', '.join(example)}; supervised fine-tuning reads prompt and completion, "
        "or messages, or text; rename them, or name their format with data.format"
    )


def prompt_and_completion(
    tokenizer: Any, prompt: Any, completion: Any, options: Mapping[str, Any], last_turn: bool = False
) -> tuple[Ids, Ids]:
    """(ids, mask) of a prompt and its completion, the mask 1 on what the completion adds."""
    if is_conversational(prompt):
        completion = _as_messages(completion)
        if not is_conversational(completion):
            raise ConfigError(f"the prompt has messages but the completion is {completion!r}; give text or messages")
        first = len(prompt)
        messages = [*prompt, *completion]
        if prompt[-1]["role"] == completion[0]["role"] == "assistant":
            first -= 1
            joined = prompt[-1]["content"] + completion[0]["content"]
            messages = [*prompt[:-1], {**completion[0], "content": joined}, *completion[1:]]
        return conversation(tokenizer, messages, first, prompt, options, last_turn)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ConfigError(
            f"the prompt is {type(prompt).__name__} and the completion {type(completion).__name__}; "
            "give both as text or both as messages"
        )
    before = plain_ids(tokenizer, prompt)
    after = ended(tokenizer, chat_ids(tokenizer, completion), completion)
    return before + after, [0] * len(before) + [1] * len(after)


def conversation(
    tokenizer: Any, messages: Any, first: int, prompt: Any, options: Mapping[str, Any], last_turn: bool = False
) -> tuple[Ids, Ids]:
    """(ids, mask) of a conversation, the mask 1 on the assistant's turns from message `first` on, or on the last only.

    A turn's part is what the template adds after the text the model is given to answer: for message `first` that is
    `prompt` (which may end inside it), for later ones the messages before.
    """
    whole = render_chat(tokenizer, messages, False, **options)
    turns = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    ids: Ids = []
    mask: Ids = []
    done = ""
    for index in turns:
        before = prompt if index == first else messages[:index]
        asked = render_chat(tokenizer, before, True, **options) if before else done
        answered = render_chat(tokenizer, messages[: index + 1], False, **options)
        if not (asked.startswith(done) and answered.startswith(asked) and whole.startswith(answered)):
            raise ConfigError(
                f"the chat template writes the beginning of the conversation differently once message {index} follows, "
                "so the answer cannot be told from its prompt; set the template's options (chat_template_kwargs) or "
                "give a template that only appends"
            )
        learned = int(not last_turn or index == turns[-1])
        for part, on in ((asked[len(done) :], 0), (answered[len(asked) :], learned)):
            part_ids = chat_ids(tokenizer, part)
            ids += part_ids
            mask += [on] * len(part_ids)
        done = answered
    rest = chat_ids(tokenizer, whole[len(done) :])
    return ids + rest, mask + [0] * len(rest)


def split_pair(example: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of a preference row.

    Without a prompt of the same kind (both text, or both messages) it is the longest common beginning of the two: whole
    messages, or characters up to but not including a last space.

    Raises ConfigError: nothing in common, or completions that do not differ.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    prompt = example.get("prompt")
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, str) and not is_conversational(value):
            raise ConfigError(
                f"column {name!r} is {value!r:.80}; it takes text or a list of messages with role and content"
            )
    if prompt is not None and isinstance(prompt, str) == isinstance(chosen, str) == isinstance(rejected, str):
        return prompt, chosen, rejected
    if prompt is not None and is_conversational(prompt) and isinstance(chosen, str) and isinstance(rejected, str):
        return prompt, _as_messages(chosen), _as_messages(rejected)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    if shared == 0:
        raise ConfigError("chosen and rejected share no beginning to be the prompt; add a prompt column")
    if chosen == rejected or not (isinstance(chosen, str) or (chosen[shared:] and rejected[shared:])):
        raise ConfigError(
            "chosen and rejected are the same, or one only begins the other; drop the row or add a prompt"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def learnable(mask: Ids) -> Ids:
    """The mask without its first token, which nothing before it predicts."""
    return [0, *mask[1:]] if mask else mask


def ended(tokenizer: Any, ids: Ids, text: str) -> Ids:
    """The ids with an end-of-sequence token at the end, unless the text has its own (white space after it aside)."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("the tokenizer has no end-of-sequence token, so a completion cannot end; set its eos_token")
    closed = bool(ids) and (ids[-1] == end or text.rstrip().endswith(tokenizer.eos_token))
    return ids if closed else [*ids, end]


def _as_messages(completion: Any) -> Any:
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
