"""axolotl's preference formats with fixed texts: `chatml.*`, `llama3.*`, `zephyr.nectar`, `user_defined.default`.

Source: axolotl's RLHF documentation (docs/rlhf.qmd) and prompt_strategies/dpo.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.formats import columns
from jaxrl_llm.data.formats.templates import TEMPLATES, ZEPHYR, Template

Row = Mapping[str, Any]
ANY_PROMPT = ("prompt", "input", "question", "instruction")


class Fields(NamedTuple):
    """The columns a strategy reads; `chat` reads the answers as the second of two messages."""

    prompt: tuple[str, ...]
    chosen: tuple[str, ...] = ("chosen",)
    rejected: tuple[str, ...] = ("rejected",)
    chat: bool = False


STRATEGIES = {
    "default": Fields(ANY_PROMPT, ("chosen", "chosen_response"), ("rejected", "rejected_response")),
    "argilla": Fields(("instruction",), ("chosen_response",), ("rejected_response",)),
    "argilla_chat": Fields((), chat=True),
    "icr": Fields(("input",)),
    "intel": Fields(("question",)),
    "prompt_pairs": Fields(("prompt",)),
    "ultra": Fields(("prompt",), chat=True),
}


def _strategy(name: str, template: Template, fields: Fields) -> Callable[[Row], dict[str, Any]]:
    def answer(row: Row, wanted: tuple[str, ...]) -> str:
        if fields.chat:
            return columns.messages(row, wanted, name, count=2)[1]["content"]
        return columns.text(row, wanted, name)

    def form(row: Row) -> dict[str, Any]:
        if fields.prompt:
            prompt = template.prompt(columns.text(row, fields.prompt, name), row.get("system"))
        else:
            prompt = template.prompt(columns.messages(row, fields.chosen, name, count=2)[0]["content"])
        chosen, rejected = answer(row, fields.chosen), answer(row, fields.rejected)
        return {
            "prompt": prompt,
            "chosen": template.completion(chosen),
            "rejected": template.completion(rejected),
        }

    return form


def nectar(row: Row, inverted: bool = False) -> dict[str, Any]:
    """`prompt` and ranked `answers`: rank 1, the best, is chosen and the next one rejected.

    `inverted` is axolotl's published reading: the worst answer is chosen and the one before it rejected.
    """
    name = "zephyr.nectar"
    prompt = ZEPHYR.prompt(columns.text(row, ("prompt",), name))
    _, answers = columns.first(row, ("answers",), name)
    good = isinstance(answers, list) and all(isinstance(x, Mapping) and {"answer", "rank"} <= set(x) for x in answers)
    if not good:
        raise ConfigError(f"column 'answers' of the format {name} is a list of dictionaries with answer and rank")
    ranked = sorted(answers, key=lambda answer: answer["rank"])[:: -1 if inverted else 1]
    if len(ranked) < 2:
        raise ConfigError(f"column 'answers' has {len(ranked)} answers, but the format {name} compares two")
    return {"prompt": prompt, "chosen": ranked[0]["answer"], "rejected": ranked[1]["answer"]}


def user_defined(
    row: Row,
    field_prompt: str = "prompt",
    field_system: str = "system",
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    prompt_format: str = "{prompt}",
    chosen_format: str = "{chosen}",
    rejected_format: str = "{rejected}",
) -> dict[str, Any]:
    """Columns and texts of your own choice; `{system}` is empty where the row has none."""
    name = "user_defined.default"
    prompt = columns.text(row, (field_prompt,), name)
    return {
        "prompt": fill(prompt_format, "prompt_format", prompt=prompt, system=row.get(field_system) or ""),
        "chosen": fill(chosen_format, "chosen_format", chosen=columns.text(row, (field_chosen,), name)),
        "rejected": fill(rejected_format, "rejected_format", rejected=columns.text(row, (field_rejected,), name)),
    }


def fill(pattern: str, option: str, **values: str) -> str:
    """The pattern with its `{names}` filled in; raises ConfigError for one that is not known."""
    try:
        return pattern.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{option} is {pattern!r}, which cannot be filled ({error}); it may hold "
            f"{' and '.join('{' + name + '}' for name in values)}, and {{{{ }}}} for braces"
        ) from error


FORMATS: dict[str, Callable[..., dict[str, Any]]] = {
    **{
        f"{family}.{strategy}": _strategy(f"{family}.{strategy}", template, fields)
        for family, template in TEMPLATES.items()
        for strategy, fields in STRATEGIES.items()
    },
    **{family: _strategy(family, template, STRATEGIES["default"]) for family, template in TEMPLATES.items()},
    "zephyr.nectar": nectar,
    "user_defined.default": user_defined,
    "user_defined": user_defined,
}
