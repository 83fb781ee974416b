"""What is said to a policy between its turns, as token ids that go on exactly where its own tokens ended."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.templates import chat_ids, is_conversational, render_chat

QUESTION, TURN, SAID = "the-question", "the-turn-of-the-assistant", "what-is-said"


def observation_ids(
    tokenizer: Any,
    eos: Sequence[int],
    observation: Any,
    conversational: bool,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token ids that follow a turn which ended with one of `eos`.

    Where the prompt is plain text, an observation is text and these are its ids. Where it is a conversation, an
    observation is messages (text is a user's message); the chat template renders them after a stand-in for the turn,
    and the ids are of what follows it, the opening of the next turn included. What the policy wrote is never rendered
    or tokenised again: it stays in the row as it is, thinking included. `options` are `tools` and `template_kwargs`.

    Raises ConfigError: messages after a plain prompt, or a template that refuses them or rewrites what came before.
    """
    if not conversational:
        if not isinstance(observation, str):
            raise ConfigError(f"the prompt is plain text, but the observation is {observation!r}; answer with text")
        return chat_ids(tokenizer, observation)
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    if not is_conversational(messages):
        raise ConfigError(f"the observation is {observation!r}; give text, or messages with role and content")
    question, options = [{"role": "user", "content": QUESTION}], dict(options or {})
    try:
        return _after_turn(tokenizer, eos, question, list(messages), options)
    except ConfigError:
        if messages[0]["role"] != "tool":
            raise
        return _after_call(tokenizer, eos, question, list(messages), options)


def check_turns(
    tokenizer: Any, eos: Sequence[int], options: Mapping[str, Any] | None = None, role: str = "user"
) -> None:
    """Raises ConfigError unless the chat template goes on after a turn with a message of `role`, and shows it."""
    message = {"role": role, "name": "tool", "content": SAID}
    if SAID not in tokenizer.decode(observation_ids(tokenizer, eos, [message], True, options)):
        raise ConfigError(
            f"the chat template leaves out messages of the role {role!r}; give the tokenizer a chat_template that "
            "shows them"
        )


def _after_turn(tokenizer: Any, eos: Sequence[int], question: list, messages: list, options: dict) -> list[int]:
    turn = {"role": "assistant", "content": TURN}
    opening = render_chat(tokenizer, question, False, **options)
    whole = render_chat(tokenizer, [*question, turn, *messages], True, **options)
    if whole.count(TURN) != 1 or not whole.startswith(opening[: opening.find(QUESTION) + len(QUESTION)]):
        raise ConfigError(
            "the chat template changes or drops earlier messages when later ones follow, so that a conversation cannot "
            "go on from the tokens that were sampled; give the tokenizer a chat_template that keeps them as they are"
        )
    return _without_end(chat_ids(tokenizer, whole[whole.find(TURN) + len(TURN) :]), eos)


def _after_call(tokenizer: Any, eos: Sequence[int], question: list, messages: list, options: dict) -> list[int]:
    """The same for templates that take results of tools only after a message with tool calls."""
    calls = [
        {"type": "function", "id": f"call{i:05d}", "function": {"name": message.get("name", "tool"), "arguments": {}}}
        for i, message in enumerate(messages)
    ]
    results = [{**message, "tool_call_id": call["id"]} for message, call in zip(messages, calls, strict=True)]
    asked = [*question, {"role": "assistant", "content": "", "tool_calls": calls}]
    before = render_chat(tokenizer, asked, False, **options)
    whole = render_chat(tokenizer, [*asked, *results], True, **options)
    ends = [token for token in tokenizer.convert_ids_to_tokens(list(eos)) if token and token in before]
    kept = max((before.rfind(end) + len(end) for end in ends), default=len(before))
    if not whole.startswith(before[:kept]):
        raise ConfigError(
            "the chat template changes earlier messages when results of tools follow; give the tokenizer a "
            "chat_template that keeps them as they are"
        )
    return chat_ids(tokenizer, whole[kept:])


def _without_end(ids: list[int], eos: Sequence[int]) -> list[int]:
    """The ids without the end of the turn, which the policy has written itself."""
    return ids[1:] if ids and ids[0] in eos else ids
