"""axolotl's KTO formats: `chatml.*`, `llama3.*` and `user_defined.default` of rows with one completion and a `label`.

Source: axolotl's RLHF documentation (docs/rlhf.qmd) and prompt_strategies/kto.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.data.formats import columns
from jaxrl_llm.data.formats.pairs import fill
from jaxrl_llm.data.formats.templates import TEMPLATES, Template

Row = Mapping[str, Any]
PROMPTS = {"argilla": "instruction", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"}


def _strategy(name: str, template: Template, prompt: str) -> Callable[[Row], dict[str, Any]]:
    def form(row: Row) -> dict[str, Any]:
        return {
            "prompt": template.prompt(columns.text(row, (prompt,), name), row.get("system")),
            "completion": template.completion(columns.text(row, ("completion",), name)),
        }

    return form


def _argilla_chat(name: str, template: Template) -> Callable[[Row], dict[str, Any]]:
    def form(row: Row) -> dict[str, Any]:
        """Both messages in `completion`, or the user's in `chosen` and the assistant's in `completion`."""
        answer = columns.messages(row, ("completion",), name)
        if len(answer) == 1:
            answer = [*columns.messages(row, ("chosen",), name, count=1), *answer]
        else:
            answer = columns.messages(row, ("completion",), name, count=2)
        return {
            "prompt": template.prompt(answer[0]["content"]),
            "completion": template.completion(answer[1]["content"]),
        }

    return form


def user_defined(
    row: Row,
    field_prompt: str = "prompt",
    field_system: str = "system",
    field_completion: str = "completion",
    field_label: str = "label",
    prompt_format: str = "{prompt}",
    completion_format: str = "{completion}",
) -> dict[str, Any]:
    """Columns and texts of your own choice; `{system}` is empty where the row has none."""
    name = "user_defined.default"
    prompt, completion = columns.text(row, (field_prompt,), name), columns.text(row, (field_completion,), name)
    return {
        "prompt": fill(prompt_format, "prompt_format", prompt=prompt, system=row.get(field_system) or ""),
        "completion": fill(completion_format, "completion_format", completion=completion),
        "label": columns.first(row, (field_label,), name)[1],
    }


FORMATS: dict[str, Callable[..., dict[str, Any]]] = {
    **{
        f"{family}.{strategy}": _strategy(f"{family}.{strategy}", template, prompt)
        for family, template in TEMPLATES.items()
        for strategy, prompt in PROMPTS.items()
    },
    **{
        f"{family}.argilla_chat": _argilla_chat(f"{family}.argilla_chat", template)
        for family, template in TEMPLATES.items()
    },
    "user_defined.default": user_defined,
    "user_defined": user_defined,
}
