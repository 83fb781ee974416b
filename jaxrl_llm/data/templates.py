"""Chat templates: a prompt, plain or conversational, to token ids, and sampled ids back to text or messages.

A tokenizer here is any Hugging Face tokenizer. A chat template writes its own special tokens, so rendered chat text is
always tokenised without adding more; plain text gets the special tokens that the tokenizer puts before a text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.config.resolve import ConfigError

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


def is_conversational(prompt: Any) -> bool:
    """True when `prompt` is a non-empty list of messages, each with a role."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in prompt)


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
    """Token ids of text that already carries its special tokens, or of the middle of a row."""
    return _ids(tokenizer, text, False) if text else []


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    ids = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    missing = getattr(tokenizer, "without_embedding", frozenset())  # set when the model is loaded
    if not missing.isdisjoint(ids):
        index = next(index for index in ids if index in missing)
        raise ConfigError(
            f"a text contains {tokenizer.convert_ids_to_tokens(index)}, token {index}, for which the model has no "
            "embedding; remove it from the data"
        )
    return ids


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

    Raises ConfigError: not a list of messages, no chat template, or a template that refuses them.
    """
    if not is_conversational(messages):
        raise ConfigError(
            f"a prompt is text or a list of messages with role and content, not {messages!r:.200}; "
            "fix the column or name another with data.prompt_key"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the data has chat messages but the tokenizer has no chat template; "
            "use an instruction-tuned model, give its tokenizer a chat_template, or use plain-text prompts"
        )
    continued = add_generation_prompt and messages[-1]["role"] == "assistant"
    # Arrow storage gives every message the keys of all others, set to None, and templates test for the key alone.
    present = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in messages]
    if _reads_parts_alone(tokenizer):
        present = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message["content"], str)
            else message
            for message in present
        ]
    try:
        text = tokenizer.apply_chat_template(
            present,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt and not continued,
            continue_final_message=continued,
            **(template_kwargs or {}),
        )
    except Exception as error:
        raise ConfigError(f"the chat template refused the messages {messages!r:.200}: {error}") from error
    return text if expand is None else expand(text)


def _reads_parts_alone(tokenizer: Any) -> bool:
    """True for a chat template that loses a content which is text, as those of some models with images do."""
    template = str(tokenizer.chat_template)
    if template not in _PARTS_ALONE:
        word = "probe"
        try:
            found = [
                word in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
                for content in (word, [{"type": "text", "text": word}])
            ]
        except Exception:  # a template may ask for more than a message
            found = [True]
        _PARTS_ALONE[template] = found == [False, True]
    return _PARTS_ALONE[template]


_PARTS_ALONE: dict[str, bool] = {}  # by chat template


def template_options(row: Mapping[str, Any], template_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`tools` and `template_kwargs` of `render_chat`, from the columns tools and chat_template_kwargs of a row.

    Raises ConfigError for tools written as text that is no JSON.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ConfigError(f"the tools column is not JSON: {error}") from error
    row_kwargs = {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
    return {"tools": tools or None, "template_kwargs": {**(template_kwargs or {}), **row_kwargs}}


def decode_completion(tokenizer: Any, ids: Sequence[int], conversational: bool) -> str | list[dict[str, str]]:
    """The text of sampled token ids without special tokens; as one assistant message when `conversational`."""
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [{"role": "assistant", "content": text}] if conversational else text
