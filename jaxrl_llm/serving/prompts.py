"""The prompts of requests as token ids: texts, token ids, and the messages of a chat with their images."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.image_rows import ImageReader, Tiles
from jaxrl_llm.data.templates import is_conversational
from jaxrl_llm.serving.errors import BadRequestError

TOKEN_CHARACTERS = 128  # as the longest tokens have, which are white space


def text_prompts(
    body: Mapping[str, Any],
    vocabulary: int,
    render: Callable[..., list[int]],
    reader: ImageReader | None,
    most: int,
    longest: int,
) -> tuple[list[str | None], list[list[int]]]:
    """The prompts of a text completion, a text or token ids or a list of up to `most` such: texts, None of ids; ids.

    Raises BadRequestError for prompts of another form, for too many, and for ids beyond the vocabulary.
    """
    prompt = body.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) or (prompt and is_list(prompt, int)) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise BadRequestError("prompt takes a text, token ids, or a list of texts or of token ids", param="prompt")
    if len(prompts) > most:
        raise BadRequestError(
            f"prompt has {len(prompts)} prompts, and with n completions of each up to {most} are taken", param="prompt"
        )
    rows = []
    for each in prompts:
        if not isinstance(each, str) and not (is_list(each, int) and all(0 <= index < vocabulary for index in each)):
            raise BadRequestError(f"prompt has {each!r:.100}, which is no text and no list of ids below {vocabulary}",
                                  param="prompt")  # fmt: skip
        if isinstance(each, str):
            _check_characters(len(each), longest, "prompt")
        try:
            rows.append(render(each) if isinstance(each, str) else each)
            if reader is not None:
                reader.check_none(rows[-1])
        except ConfigError as error:
            raise BadRequestError(str(error), param="prompt") from None
    return [each if isinstance(each, str) else None for each in prompts], rows


def chat_prompt(
    body: Mapping[str, Any], tokenizer: Any, render: Callable[..., list[int]], reader: ImageReader | None, longest: int
) -> tuple[list[int], Tiles | None]:
    """The token ids of the messages in the model's chat template, and the tiles of the images that `reader` reads.

    Raises BadRequestError for messages or template variables of another form, and for what the template refuses.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not is_conversational(messages):
        raise BadRequestError(
            "messages takes a list of messages, each an object with role and content", param="messages"
        )
    tools = body.get("tools") or None
    options = body.get("chat_template_kwargs") or {}
    # Arguments of the renderer itself: who asks must not change how the text becomes tokens.
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    if not isinstance(options, Mapping) or reserved & set(options):
        wrong = sorted(reserved & set(options)) if isinstance(options, Mapping) else [repr(options)[:100]]
        raise BadRequestError(
            f"chat_template_kwargs takes an object of the template's own variables, not {', '.join(wrong)}",
            param="chat_template_kwargs",
        )
    try:
        # With tool_choice none the model sees them still, as with vLLM: the answer is not searched for calls.
        read = [_message(message, reader is not None) for message in messages]
        texts = [message["content"] for message in read if isinstance(message["content"], str)]
        _check_characters(sum(map(len, texts)), longest, "messages")
        if reader is None:
            return render(read, tools, options), None
        rendered, images = reader.read({"messages": read}, ("messages",))
        if images is None:
            ids = render(read, tools, options)
            reader.check_none(ids)
            return ids, None
        ids = render(rendered["messages"], tools, options, images)
        images.check(ids)
        return ids, images.tiles
    except ConfigError as error:
        raise BadRequestError(str(error), param="messages") from None


def _image_part(part: Any) -> Any:
    """A part `image_url` as one of an image; other parts as they are.

    Raises BadRequestError for an image that is not in the request itself: a server reads no files of its machine for
    those who ask, and fetches nothing.
    """
    if not isinstance(part, Mapping) or part.get("type") not in ("image_url", "image"):
        return part
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise BadRequestError(
            f"messages has the image_url {url!r:.100}; send the image itself, as data:image/png;base64,...",
            param="messages",
        )
    return {"type": "image", "image": url}


def _message(message: Mapping[str, Any], sees: bool) -> dict[str, Any]:
    """A message as chat templates read it: parts of text joined, the arguments of calls as objects.

    Where the model `sees` images, a content with some stays in parts.
    """
    role, content = message["role"], message.get("content")
    if not isinstance(role, str):
        raise BadRequestError(f"messages has the role {role!r:.100}, which is no text", param="messages")
    if isinstance(content, list):
        content = [_image_part(part) if sees else part for part in content]
    if isinstance(content, list) and not any(
        isinstance(part, Mapping) and part.get("type") == "image" for part in content
    ):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise BadRequestError(f"messages has a part {kind!r:.100}; this model reads text", param="messages")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str | list):
        raise BadRequestError(f"messages has the content {content!r:.100}, which is no text", param="messages")
    if content is None and not message.get("tool_calls"):
        raise BadRequestError("messages has one without content", param="messages")
    # A turn of calls alone has null, as OpenAI writes it, which templates that add texts together would fail on.
    read: dict[str, Any] = {**message, "role": role, "content": "" if content is None else content}
    if calls := message.get("tool_calls"):
        read["tool_calls"] = []
        for call in calls if isinstance(calls, list) else [None]:
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                raise BadRequestError("tool_calls takes a list of calls with function", param="messages")
            assert isinstance(call, Mapping)
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments or "{}")
                    json.dumps(arguments, ensure_ascii=False).encode()  # as the body: no tokenizer takes half a pair
                except (ValueError, RecursionError):
                    raise BadRequestError(
                        "tool_calls has arguments that are no JSON of Unicode text", param="messages"
                    ) from None
            read["tool_calls"].append({**call, "function": {**function, "arguments": arguments}})
    return read


def _check_characters(count: int, longest: int, param: str) -> None:
    """Refuses a text that is far too long before it is tokenised, which takes seconds a megabyte."""
    if count > (most := longest * TOKEN_CHARACTERS):
        raise BadRequestError(
            f"{param} has {count} characters; this model's rows have {longest} tokens, and up to {most} characters are "
            "taken",
            code="context_length_exceeded",
            param=param,
        )


def is_list(value: Any, kind: type) -> bool:
    """True for a list of values of the kind; true and false are no numbers."""
    return isinstance(value, list) and all(isinstance(x, kind) and not isinstance(x, bool) for x in value)
