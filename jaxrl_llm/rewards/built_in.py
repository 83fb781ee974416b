"""`BUILT_IN`: every reward that a configuration can name, and the table of them in docs/rewards.md."""

import inspect
import sys
from typing import Any

from jaxrl_llm.rewards import code, formats, functions, math, puzzles
from jaxrl_llm.rewards.combined import CombinedGrader
from jaxrl_llm.rewards.judge import Judge, PairwiseJudge
from jaxrl_llm.rewards.openai_graders import OpenAIGrader
from jaxrl_llm.rewards.signatures import shorten

BUILT_IN: dict[str, Any] = {
    function.__name__: function
    for function in (
        functions.exact_match,
        functions.target_length,
        functions.boxed_accuracy,
        functions.gsm8k_accuracy,
        math.numeric_answer,
        math.math_accuracy,
        code.code_tests,
        puzzles.reasoning_gym_score,
        formats.json_schema,
        formats.regex_match,
        functions.think_format,
        formats.think_answer_format,
        formats.length_range,
        formats.length_penalty,
        functions.cosine_scaled,
        functions.repetition_penalty,
        functions.soft_overlong,
        functions.environment,
    )
} | {"combined": CombinedGrader, "openai_grader": OpenAIGrader, "judge": Judge, "pairwise_judge": PairwiseJudge}


def table() -> str:
    """A Markdown table of every built-in reward: name, the columns it reads, its options, the first line it says."""
    lines = ["| name | reads | options | gives |", "|---|---|---|---|"]
    for name, reward in BUILT_IN.items():
        parameters = inspect.signature(reward).parameters.values()
        is_class = isinstance(reward, type)
        reads = [p.name for p in parameters if not is_class and p.kind is p.POSITIONAL_OR_KEYWORD]
        options = [p for p in parameters if (is_class or p.kind is p.KEYWORD_ONLY) and p.kind is not p.VAR_KEYWORD]
        shown = [p.name if p.default is p.empty else f"{p.name}={shorten(p.default, 40)}" for p in options]
        says = (inspect.getdoc(reward) or "").split("\n\n")[0].replace("\n", " ")
        cells = (f"`{name}`", ", ".join(f"`{r}`" for r in reads), ", ".join(f"`{o}`" for o in shown), says)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
