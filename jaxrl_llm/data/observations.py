"""Prompts and observations of multi-turn rollouts as token ids, which go on exactly where the policy's turn ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.image_rows import ImageText, Tiles
from jaxrl_llm.data.images import has_image_parts
from jaxrl_llm.data.templates import (
    QUESTION,
    continued_ids,
    is_conversational,
    render_chat,
    render_prompt,
    template_options,
    tool_calls,
)
from jaxrl_llm.data.tokenize import PIXELS

TURN, OBSERVATION = "the-turn-of-the-assistant", "the-observation"


@dataclass(frozen=True)
class TurnTokenizer:
    """Tokenizes the prompts and observations of episodes.

    eos: ids that end a turn. max_prompt_length: tokens. template_kwargs: options of the chat template. stops: turns end
    otherwise too, with stop strings or tokens. A row gives its prompt, and its own options in the columns tools and
    chat_template_kwargs.
    """

    tokenizer: Any
    eos: tuple[int, ...]
    max_prompt_length: int
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stops: bool = False

    def prompt_ids(self, row: Mapping[str, Any], prompt: Any, tools: list[Any]) -> list[int]:
        """The ids of `prompt`, which opens the episode of a row and shows tools (JSON schemas).

        Raises ConfigError for a prompt that is too long, plain text where there are tools, messages where turns end
        with stop strings, or an image that the row does not have.
        """
        if self.stops and is_conversational(prompt):
            raise ConfigError(
                "rollout.stop and stop_token_ids end turns otherwise than the chat template does, which goes on behind "
                "the end of text: give environments prompts that are plain text, or leave these settings out"
            )
        options, tiles = self._options(row, tools), row.get(PIXELS)
        images = ImageText.of(tiles, self.tokenizer) if isinstance(tiles, Tiles) else None
        if images is None and is_conversational(prompt):
            _refuse_images("the opening of the episode", prompt)
        options |= {} if images is None else {"expand": images.expand}
        if tools and not is_conversational(prompt):
            raise ConfigError(
                f"tools are shown and answered by the chat template, but the prompt {prompt!r:.200} is plain text: "
                "give prompts that are lists of messages"
            )
        ids = render_prompt(self.tokenizer, prompt, **options)
        if images is not None:
            images.check(ids)
        if not 0 < len(ids) <= self.max_prompt_length:
            raise ConfigError(
                f"the prompt {prompt!r:.200} has {len(ids)} tokens (with the text of environments and tools), but it "
                f"must have 1 to rollout.max_prompt_length = {self.max_prompt_length}"
            )
        return ids

    def observation_ids(
        self,
        row: Mapping[str, Any],
        observation: Any,
        tools: Sequence[Any] = (),
        ended: bool = True,
        images: ImageText | None = None,
    ) -> list[int]:
        """The ids that follow a turn; it `ended` with one of `eos`, or else is ended by the chat template here.

        Where the row's prompt is plain text, an observation is text and these are its ids. Where it is a conversation,
        an observation is messages (text is a user's message); the chat template renders them after a stand-in for the
        turn, and the ids are those of the text behind it, the opening of the next turn included. The policy's own turn
        is never rendered or tokenised again: it stays in the row as it is, thinking included. `images` are those of the
        messages.

        Raises ConfigError: messages after a plain prompt, an image that is not among `images`, or a template that
        refuses the messages or rewrites earlier ones.
        """
        if not is_conversational(row["prompt"]):
            if not isinstance(observation, str):
                raise ConfigError(
                    f"the prompt is plain text, but the observation is {observation!r:.200}; answer with text"
                )
            # Where there are stop strings, a turn ends with one of them, which is ordinary text.
            before = self.eos[:1] if ended and not self.stops else ()
            return continued_ids(self.tokenizer, before or None, observation)
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        if not is_conversational(messages):
            raise ConfigError(f"the observation is {observation!r:.200}; give text, or messages with role and content")
        if images is None:
            _refuse_images("the observation", messages)
        options = self._options(row, tools) | ({} if images is None else {"expand": images.expand})
        try:
            return self._after_turn(list(messages), options, ended)
        except ConfigError:
            if messages[0]["role"] != "tool" or not ended:
                raise
            return self._after_call(list(messages), options)

    def check_turns(self, role: str = "user") -> None:
        """Raise ConfigError unless the chat template goes on after a turn with a message of `role`, and shows it."""
        row = {"prompt": [{"role": "user", "content": QUESTION}]}
        message = {"role": role, "name": "tool", "content": OBSERVATION}
        if OBSERVATION not in self.tokenizer.decode(self.observation_ids(row, [message])):
            raise ConfigError(
                f"the chat template leaves out messages of the role {role!r}; give the tokenizer a chat_template that "
                "shows them"
            )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids, as they are: without the spaces that a clean-up would remove."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _options(self, row: Mapping[str, Any], tools: Sequence[Any]) -> dict[str, Any]:
        """`tools` and `template_kwargs` of `render_chat`: the row's own tools first."""
        options = template_options(row, self.template_kwargs)
        return {**options, "tools": [*(options["tools"] or []), *tools] or None}

    def _rendered(self, messages: Any, options: dict[str, Any], opens_turn: bool = True) -> str:
        return render_chat(self.tokenizer, messages, opens_turn, **options)

    def _after_turn(self, messages: list, options: dict[str, Any], ended: bool) -> list[int]:
        question, turn = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": TURN}
        before = self._rendered([question], options, opens_turn=False)
        text = self._rendered([question, turn, *messages], options)
        # Compared up to the question: a template may end the last message differently from one in the middle.
        if text.count(TURN) != 1 or not text.startswith(before[: before.find(QUESTION) + len(QUESTION)]):
            raise ConfigError(
                "the chat template changes or drops earlier messages when later ones follow, so that a conversation "
                "cannot go on from the tokens that were sampled; give the tokenizer a chat_template that keeps them as "
                "they are"
            )
        ids = continued_ids(self.tokenizer, None, text[text.find(TURN) + len(TURN) :])
        # The policy has sampled the end of its turn itself, before which Llama 2's template writes a space.
        end = next((place for place, token in enumerate(ids) if token in self.eos), -1)
        if ended and end >= 0 and not self.decode(ids[:end], skip_special_tokens=False).strip():
            return ids[end + 1 :]

        def closing(text: str, content: str) -> list[int]:
            """The first token behind the content of the last message."""
            return continued_ids(self.tokenizer, None, text[text.rfind(content) + len(content) :])[:1]

        # gpt-oss ends the last turn with <|return|>, which was sampled, and every other message with <|end|>.
        if ended and ids and ids[:1] == closing(before, QUESTION):
            alone = closing(self._rendered([question, turn], options, opens_turn=False), TURN)
            return ids[1:] if alone and alone[0] in self.eos else ids
        return ids

    def _after_call(self, messages: list, options: dict[str, Any]) -> list[int]:
        """The ids after a turn, for templates that take results of tools only after a message with tool calls
        (Mistral's)."""
        calls = tool_calls({"name": message.get("name", "tool"), "arguments": {}} for message in messages)
        results = [{**message, "tool_call_id": call["id"]} for message, call in zip(messages, calls, strict=True)]
        question, turn = (
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "", "tool_calls": calls},
        )
        before = self._rendered([question, turn], options, opens_turn=False)
        text = self._rendered([question, turn, *results], options)
        ends = [token for token in self.tokenizer.convert_ids_to_tokens(list(self.eos)) if token and token in before]
        kept = max((before.rfind(end) + len(end) for end in ends), default=len(before))
        if not text.startswith(before[:kept]):
            raise ConfigError(
                "the chat template changes earlier messages when results of tools follow; give the tokenizer a "
                "chat_template that keeps them as they are"
            )
        return continued_ids(self.tokenizer, self.eos[:1] if ends else None, text[kept:])


def _refuse_images(name: str, messages: Any) -> None:
    """Raises ConfigError for messages with images, which rows of environments and tools cannot take."""
    if has_image_parts(messages):
        raise ConfigError(
            f"{name} has an image, which rows of environments and tools have in their prompt alone: set "
            'environment.agent="episodes", which takes them, or answer with text'
        )
