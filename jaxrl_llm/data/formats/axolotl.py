"""axolotl's preference formats.

They write with fixed texts (`chatml.*`, `llama3.*`, `zephyr.nectar`), with the user's (`user_defined.default`), or with
the tokenizer's chat template (`chat_template.*`).

Source: axolotl's documentation (docs/rlhf.qmd), and prompt_strategies/dpo, /kto and /orpo there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data import Row
from jaxrl_llm.data.formats.native import first_column, messages_column, optional_text, text_column
from jaxrl_llm.data.templates import render_chat, template_options


class Template(NamedTuple):
    """The fixed texts around a system text, a user's turn (with the opening of the answer), and an answer.

    They hold no beginning-of-sequence token: the tokenizer writes it, once.
    """

    system: str
    user: str
    answer: str

    def prompt(self, user: str, system: str = "") -> str:
        """The text that an answer follows; the system part only where there is a system text."""
        return (self.system.format(system) if system else "") + self.user.format(user)


class Fields(NamedTuple):
    """The columns of pairs that a strategy reads; with `chat` the answers are the second of two messages."""

    prompt: tuple[str, ...]
    chosen: tuple[str, ...] = ("chosen",)
    rejected: tuple[str, ...] = ("rejected",)
    chat: bool = False


CHATML = Template(
    system="<|im_start|>system\n{}<|im_end|>\n",
    user="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    answer="{}<|im_end|>",
)
LLAMA3 = Template(
    system="<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
    user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    answer="{}<|eot_id|>",
)
ZEPHYR = Template(system="", user="<|system|>\n</s>\n<|user|>\n{}</s>\n<|assistant|>\n", answer="{}")
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3}
ANY_PROMPT = ("prompt", "input", "question", "instruction")
PAIR_FIELDS = {
    "default": Fields(ANY_PROMPT, ("chosen", "chosen_response"), ("rejected", "rejected_response")),
    "argilla": Fields(("instruction",), ("chosen_response",), ("rejected_response",)),
    "argilla_chat": Fields((), chat=True),
    "icr": Fields(("input",)),
    "intel": Fields(("question",)),
    "prompt_pairs": Fields(("prompt",)),
    "ultra": Fields(("prompt",), chat=True),
}
LABEL_PROMPTS = {"argilla": "instruction", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"}
ROLES = {"user": ["user"], "assistant": ["assistant"], "system": ["system"], "tool": ["tool"]}


def fixed_pairs(name: str, template: Template, fields: Fields) -> Callable[[Mapping[str, Any]], Row]:
    """The format `name` of pairs, which makes texts of prompt, chosen and rejected by the fixed words of `template`,
    from the columns that `fields` names."""

    def answer(row: Mapping[str, Any], columns: tuple[str, ...]) -> str:
        if fields.chat:
            return messages_column(row, columns, name, count=2)[1]["content"]
        return text_column(row, columns, name)

    def form(row: Mapping[str, Any]) -> Row:
        if fields.prompt:
            prompt = template.prompt(text_column(row, fields.prompt, name), optional_text(row, "system", name))
        else:
            prompt = template.prompt(messages_column(row, fields.chosen, name, count=2)[0]["content"])
        chosen, rejected = answer(row, fields.chosen), answer(row, fields.rejected)
        return {
            "prompt": prompt,
            "chosen": template.answer.format(chosen),
            "rejected": template.answer.format(rejected),
        }

    return form


def fixed_labels(name: str, template: Template, column: str) -> Callable[[Mapping[str, Any]], Row]:
    """The format `name` of labelled completions to the prompt in `column`, written with fixed texts."""

    def form(row: Mapping[str, Any]) -> Row:
        prompt = template.prompt(text_column(row, (column,), name), optional_text(row, "system", name))
        completion = text_column(row, ("completion",), name)
        return {"prompt": prompt, "completion": template.answer.format(completion)}

    return form


def labelled_chat(name: str, template: Template) -> Callable[[Mapping[str, Any]], Row]:
    """The format `name` of two messages in `completion` or, as documented, the user's in `chosen`."""

    def form(row: Mapping[str, Any]) -> Row:
        messages = messages_column(row, ("completion",), name)
        if len(messages) == 1:
            messages = [*messages_column(row, ("chosen",), name, count=1), *messages]
        else:
            messages = messages_column(row, ("completion",), name, count=2)
        prompt, completion = (message["content"] for message in messages)
        return {"prompt": template.prompt(prompt), "completion": template.answer.format(completion)}

    return form


def nectar(row: Mapping[str, Any], inverted: bool = False) -> Row:
    """`prompt` and ranked `answers`: rank 1, the best, is chosen and the next one rejected.

    `inverted` is axolotl's published reading: the worst answer is chosen and the one before it rejected. Raises
    ConfigError for answers without a rank, and for fewer than two.
    """
    name = "zephyr.nectar"
    prompt = ZEPHYR.prompt(text_column(row, ("prompt",), name))
    _, answers = first_column(row, ("answers",), name)
    good = isinstance(answers, list) and all(
        isinstance(x, Mapping) and "answer" in x and isinstance(x.get("rank"), int | float) for x in answers
    )
    if not good:
        raise ConfigError(
            f"column 'answers' of the format {name} is a list of dictionaries with answer and rank, a number"
        )
    ranked = sorted(answers, key=lambda answer: answer["rank"])[:: -1 if inverted else 1]
    if len(ranked) < 2:
        raise ConfigError(f"column 'answers' has {amount(len(ranked), 'answer')}, but the format {name} compares two")
    return {"prompt": prompt, "chosen": ranked[0]["answer"], "rejected": ranked[1]["answer"]}


def user_defined_pairs(
    row: Mapping[str, Any],
    field_prompt: str = "prompt",
    field_system: str = "system",
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    prompt_format: str = "{prompt}",
    chosen_format: str = "{chosen}",
    rejected_format: str = "{rejected}",
) -> Row:
    """Columns and texts of your own choice; `{system}` is empty where the row has none."""
    name = "user_defined.default"
    prompt = text_column(row, (field_prompt,), name)
    return {
        "prompt": filled(prompt_format, "prompt_format", prompt=prompt, system=optional_text(row, field_system, name)),
        "chosen": filled(chosen_format, "chosen_format", chosen=text_column(row, (field_chosen,), name)),
        "rejected": filled(rejected_format, "rejected_format", rejected=text_column(row, (field_rejected,), name)),
    }


def user_defined_labels(
    row: Mapping[str, Any],
    field_prompt: str = "prompt",
    field_system: str = "system",
    field_completion: str = "completion",
    field_label: str = "label",
    prompt_format: str = "{prompt}",
    completion_format: str = "{completion}",
) -> Row:
    """Columns and texts of your own choice; `{system}` is empty where the row has none."""
    name = "user_defined.default"
    prompt, completion = text_column(row, (field_prompt,), name), text_column(row, (field_completion,), name)
    return {
        "prompt": filled(prompt_format, "prompt_format", prompt=prompt, system=optional_text(row, field_system, name)),
        "completion": filled(completion_format, "completion_format", completion=completion),
        "label": first_column(row, (field_label,), name)[1],
    }


def filled(pattern: str, option: str, **values: str) -> str:
    """The pattern that an option gives with its values; raises ConfigError for one that has others."""
    try:
        return pattern.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{option} is {pattern!r}, which cannot be filled ({error}); it may hold "
            f"{' and '.join('{' + name + '}' for name in values)}, and {{{{ }}}} for braces"
        ) from error


def chat_default(
    row: Mapping[str, Any],
    tokenizer: Any = None,
    field_messages: str = "messages",
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    message_property_mappings: Mapping[str, str] | None = None,
    roles: Mapping[str, Sequence[str]] | None = None,
) -> Row:
    """A conversation (or a text: one user message) and two answers: texts, messages, or the last of several.

    `message_property_mappings` maps role, content and others to the names they have in the messages; `roles` lists, for
    each role of the chat template, its names there. Both completions end without trailing white space. Raises
    ConfigError where there are no messages.
    """
    name = "chat_template.default"
    message = _reader(name, message_property_mappings, roles or ROLES)

    def answer(column: str) -> Row:
        _, value = first_column(row, (column,), name)
        if isinstance(value, str):
            return {"role": "assistant", "content": value}
        return message(value[-1] if isinstance(value, list) and value else value, column)

    _, value = first_column(row, (field_messages,), name)
    if isinstance(value, str):
        prompt = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value:
        prompt = [message(turn, field_messages) for turn in value]
    else:
        raise ConfigError(f"column {field_messages!r} is {value!r:.80}, but the format {name} takes messages there")
    return _stripped(rendered(row, tokenizer, prompt, answer(field_chosen), answer(field_rejected), name))


def argilla_chat(
    row: Mapping[str, Any],
    tokenizer: Any = None,
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    message_property_mappings: Mapping[str, str] | None = None,
    roles: Mapping[str, Sequence[str]] | None = None,
) -> Row:
    """Two conversations: the prompt is all of `field_chosen` but its last message.

    `message_property_mappings` and `roles` are as in `chat_default`; without roles those of messages stay.
    """
    name = "chat_template.argilla_chat"
    columns, message = (field_chosen, field_rejected), _reader(name, message_property_mappings, roles)
    if message_property_mappings or roles:
        given = {column: first_column(row, (column,), name)[1] for column in columns}
        row = {**row, **{column: [message(turn, column) for turn in listed(turns)] for column, turns in given.items()}}
    chosen, rejected = _conversations(row, name, columns)
    return _stripped(rendered(row, tokenizer, chosen[:-1], chosen[-1], rejected[-1], name))


def _reader(
    name: str, mappings: Mapping[str, str] | None, roles: Mapping[str, Sequence[str]] | None
) -> Callable[[Any, str], Row]:
    """The function that reads the message of an entry of a column, by the names of its parts and of `roles` there."""
    keys = {"role": "role", "content": "content", **(mappings or {})}
    targets = {source: target for target, sources in (roles or {}).items() for source in listed(sources)}

    def message(value: Any, column: str) -> Row:
        if not isinstance(value, Mapping) or not {keys["role"], keys["content"]} <= set(value):
            raise ConfigError(
                f"column {column!r} holds {value!r:.80}, but the format {name} takes messages with "
                f"{keys['role']!r} and {keys['content']!r} there; set message_property_mappings"
            )
        role = value[keys["role"]]
        if roles and (not isinstance(role, str) or role not in targets):
            raise ConfigError(
                f"column {column!r} has the role {role!r}; the format {name} knows {', '.join(targets)}; set roles, "
                "such as {'user': ['human']}"
            )
        return {**renamed(value, keys), "role": targets.get(role, role), "content": value[keys["content"]]}

    return message


def argilla(row: Mapping[str, Any], tokenizer: Any = None) -> Row:
    """Two conversations of turn and answer, with `system` before them where the row has it (ORPO).

    A `prompt` column takes the place of the user's message when there is only one. Raises ConfigError for a
    conversation that does not end with an answer.
    """
    name = "chat_template.argilla"
    chosen, rejected = _conversations(row, name)
    for column, conversation in (("chosen", chosen), ("rejected", rejected)):
        if len(conversation) % 2:
            raise ConfigError(
                f"column {column!r} has {amount(len(conversation), 'message')}, but the format {name} takes an even "
                "number: user and assistant in turn"
            )
    prompt = chosen[:-1]
    if len(prompt) == 1 and isinstance(row.get("prompt"), str):
        prompt = [{"role": "user", "content": row["prompt"]}]
    return rendered(row, tokenizer, [*_system(row, name), *prompt], chosen[-1], rejected[-1], name)


def bradley_terry(row: Mapping[str, Any], tokenizer: Any = None) -> Row:
    """`input`, with `system` before it where the row has it, and two answers, in the tokenizer's chat template."""
    name = "bradley_terry.chat_template"
    prompt = [*_system(row, name), {"role": "user", "content": text_column(row, ("input",), name)}]
    chosen, rejected = (
        {"role": "assistant", "content": text_column(row, (column,), name)} for column in ("chosen", "rejected")
    )
    return rendered(row, tokenizer, prompt, chosen, rejected, name)


def _system(row: Mapping[str, Any], name: str) -> list[Row]:
    """The system message of a row, where it has one."""
    system = optional_text(row, "system", name)
    return [{"role": "system", "content": system}] if system else []


def rendered(row: Mapping[str, Any], tokenizer: Any, prompt: list[Any], chosen: Any, rejected: Any, name: str) -> Row:
    """The texts of a prompt and of two answers to it, each a message, in the tokenizer's chat template.

    The prompt is the conversation with the opening of the answer. A completion is what the template adds to that text
    when the answer follows, never found by searching for its content.

    Raises ConfigError: no tokenizer, or a template that rewrites the prompt once an answer follows.
    """
    if tokenizer is None:
        raise ConfigError(f"the format {name} writes with the tokenizer's chat template, and there is none here")
    options = template_options(row)
    texts = {"prompt": render_chat(tokenizer, prompt, True, **options)}
    for column, answer in (("chosen", chosen), ("rejected", rejected)):
        text = render_chat(tokenizer, [*prompt, answer], False, **options)
        if not text.startswith(texts["prompt"]):
            raise ConfigError(
                f"the chat template writes the prompt differently once the answer of {column!r} follows, so the format "
                f"{name} cannot tell them apart; give a template that only appends"
            )
        texts[column] = text[len(texts["prompt"]) :]
    return texts


def _conversations(
    row: Mapping[str, Any], name: str, columns: tuple[str, str] = ("chosen", "rejected")
) -> tuple[list[Any], list[Any]]:
    chosen, rejected = (messages_column(row, (column,), name) for column in columns)
    if len(chosen) < 2:
        raise ConfigError(
            f"column {columns[0]!r} has {amount(len(chosen), 'message')}, but the format {name} takes prompt and answer"
        )
    return chosen, rejected


def _stripped(texts: Row) -> Row:
    return {**texts, "chosen": texts["chosen"].rstrip(), "rejected": texts["rejected"].rstrip()}


def renamed(turn: Mapping[str, Any], keys: Mapping[str, str]) -> Row:
    """The message of a turn, which has the names `keys` for the entries of messages."""
    others = {key: x for key, x in turn.items() if key not in keys.values()}
    return others | {key: turn[source] for key, source in keys.items() if turn.get(source) is not None}


def listed(names: str | Sequence[str]) -> Sequence[str]:
    """The names as a sequence: a text is one name that stands alone."""
    return [names] if isinstance(names, str) else names


PAIRS: dict[str, Callable[..., Row]] = {
    **{
        f"{family}.{strategy}": fixed_pairs(f"{family}.{strategy}", template, fields)
        for family, template in TEMPLATES.items()
        for strategy, fields in PAIR_FIELDS.items()
    },
    **{family: fixed_pairs(family, template, PAIR_FIELDS["default"]) for family, template in TEMPLATES.items()},
    "zephyr.nectar": nectar,
    "user_defined.default": user_defined_pairs,
    "user_defined": user_defined_pairs,
    "chat_template.default": chat_default,
    "chat_template": chat_default,
    "chat_template.argilla_chat": argilla_chat,
    "chat_template.argilla": argilla,
    "bradley_terry.chat_template": bradley_terry,
}
LABELS: dict[str, Callable[..., Row]] = {
    **{
        f"{family}.{strategy}": fixed_labels(f"{family}.{strategy}", template, column)
        for family, template in TEMPLATES.items()
        for strategy, column in LABEL_PROMPTS.items()
    },
    **{
        f"{family}.argilla_chat": labelled_chat(f"{family}.argilla_chat", template)
        for family, template in TEMPLATES.items()
    },
    "user_defined.default": user_defined_labels,
    "user_defined": user_defined_labels,
}
