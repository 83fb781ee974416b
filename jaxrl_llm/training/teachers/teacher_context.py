"""The context of a teacher besides a row's prompt: a successful completion of the same prompt, or a text.

Policy and teacher score the same sampled tokens; what stands before them differs. So a model can be its own teacher:
with a solution in its context it knows better (SDPO, arXiv 2601.20802; SDFT, arXiv 2601.19897).
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.data.templates import Prompt, render_prompt, template_options
from jaxrl_llm.distributed.processes import all_or_none
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import constrain_rows, rows_to_global
from jaxrl_llm.training.packing.planner import Packer
from jaxrl_llm.training.rollouts.experience import Rollouts

# Those of TRL's SDPOTrainer.
TEMPLATE = "{prompt}{solution}{privileged}\n\nCorrectly solve the original question.\n"
SOLUTION = "\nCorrect solution:\n\n{solution}\n\n"
PRIVILEGED = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{privileged}\n\n"


@dataclasses.dataclass(frozen=True)
class ContextSpec:
    """Settings of a teacher's context, from `teacher`."""

    kind: str  # success, privileged, success_or_privileged or success_and_privileged
    success_threshold: float
    exclude_own: bool  # a row is not shown itself
    remove_thinking: bool
    column: str  # with the privileged text
    group_size: int
    template: str = TEMPLATE  # of {prompt}, and the two below where there are any
    solution_template: str = SOLUTION  # of {solution}
    privileged_template: str = PRIVILEGED  # of {privileged}

    def shown(self, success: int | None, completions: Sequence[Any], privileged: str) -> tuple[str | None, str]:
        """The text that a row is shown: the completion at `success`, or None, and a text, which may be empty."""
        solution = None if success is None or "success" not in self.kind else all_text(completions[success])
        blank = "privileged" not in self.kind or not privileged.strip()
        return solution, "" if blank or (self.kind == "success_or_privileged" and solution is not None) else privileged


class ContextRows(NamedTuple):
    """The rows as the teacher reads them, and which of them it teaches."""

    inputs: Inputs  # [N,width + C]
    taught: jax.Array  # [N] 1 where the teacher was shown something that the policy was not
    metrics: dict[str, jax.Array]
    asked: list[Any]  # the prompt of the teacher for each row of this process that it was shown something of, or None
    prompt_width: int  # of the policy's rows

    def at_tokens(self, x: jax.Array) -> jax.Array:
        """Numbers `[N,width + C,...]` of the teacher's tokens at those of the policy `[N,T,...]`, 0 on its prompts."""
        return _at_tokens(x, self.inputs.prompt_width, self.prompt_width)

    def aligned(self, batch: Batch) -> Batch:
        """The batch with its teacher's distributions at the policy's tokens, and which rows are taught."""
        found = {name: getattr(batch, name) for name in ("teacher_hidden", "teacher_ids", "teacher_top_logps")}
        moved = {name: self.at_tokens(x) for name, x in found.items() if x is not None}
        return batch.replace(taught=self.taught, **moved)


@dataclasses.dataclass(frozen=True)
class TeacherContext:
    """The rows of a teacher with a context: prompts of its own, and behind them the completions of the policy."""

    spec: ContextSpec
    tokenizer: Any
    template_kwargs: Mapping[str, Any]  # data.chat_template_kwargs
    mesh: Mesh
    width: int  # tokens of the longest prompt of the teacher
    prompt_width: int  # and of the policy
    pack: Packer  # of the teacher's rows

    def read(self, rollouts: Rollouts, scores: np.ndarray) -> ContextRows:
        """The teacher's rows of the rollouts, of which `scores` `[n]` are the rewards of this process's.

        A row without a context has its own prompt and is not taught; so has one whose prompt has more than `width`
        tokens with it, of which nothing is cut. Raises ConfigError for a prompt that does not end with the user's turn,
        and where nothing has the privileged column.
        """
        rollout, spec, count, group = rollouts.rollout, self.spec, len(rollouts.prompts), RowGroup.of(self.mesh)
        examples = [example for example in rollouts.examples for _ in range(spec.group_size)]
        with all_or_none():
            solutions = successful_rows(scores, spec.group_size, spec.success_threshold, spec.exclude_own)
            privileged = (
                privileged_texts(spec.column, rollouts, examples)
                if "privileged" in spec.kind and group.leads
                else [""] * count
            )
        privileged = group.shared(privileged)  # a reward function's are known to the leader of the rows alone
        with all_or_none():
            taught, long = np.zeros(count, np.float32), np.zeros(count, np.float32)
            asked: list[Any] = [None] * count
            prompts: list[Sequence[int]] = []
            for row, (prompt, example) in enumerate(zip(rollouts.prompts, examples, strict=True)):
                solution, text = spec.shown(solutions[row], rollouts.completions, privileged[row])
                ids = example["prompt_ids"]
                if solution is not None or text:
                    options = template_options(example, self.template_kwargs)
                    asked[row] = with_context(spec, prompt, solution, text)
                    longer = render_prompt(self.tokenizer, asked[row], **options)
                    taught[row], long[row] = len(longer) <= self.width, len(longer) > self.width
                    ids = longer if taught[row] else ids
                prompts.append(ids)
            padded = pad_prompts(prompts, self.width)
        own_tokens, own_segments = rows_to_global(padded, self.mesh)
        tokens, segments, mask = _behind(
            (own_tokens, own_segments, jnp.zeros_like(own_tokens)),
            (rollout.tokens, rollout.segments, rollout.mask),
            self.prompt_width,
        )
        taught_rows, long_rows = rows_to_global((taught, long), self.mesh)
        metrics = {
            "teacher/taught": taught_rows.mean(),
            "teacher/too_long": long_rows.mean(),
            "teacher/prompt_length": (own_segments > 0).sum(axis=1).mean(),
        }
        layout = self.pack.passing(tokens, segments, mask)
        inputs = Inputs(tokens, segments, layout=layout, prompt_width=self.width)
        return ContextRows(inputs, taught_rows, metrics, asked, self.prompt_width)


@functools.partial(jax.jit, static_argnums=2)
def _behind(prompts: Any, rows: Any, prompt_width: int) -> Any:
    """The arrays `[N,width]` of prompts, and behind them what `rows` `[N,T]` have behind theirs."""

    def joined(own, row):
        return constrain_rows(jnp.concatenate([own.astype(row.dtype), row[:, prompt_width:]], axis=1))

    return jax.tree.map(joined, prompts, rows)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _at_tokens(x, width: int, prompt_width: int) -> jax.Array:
    return constrain_rows(jnp.pad(x[:, width:], ((0, 0), (prompt_width, 0), *((0, 0),) * (x.ndim - 2))))


def successful_rows(scores: np.ndarray, group_size: int, threshold: float, exclude_own: bool) -> list[int | None]:
    """The first row of each row's group whose score `[n]` is at least `threshold`, itself aside with `exclude_own`,
    or None where there is none. NaN is no success.
    """
    success = scores >= threshold
    found: list[int | None] = []
    for row in range(len(scores)):
        first = row - row % group_size
        others = (other for other in range(first, first + group_size) if not (exclude_own and other == row))
        found.append(next((other for other in others if success[other]), None))
    return found


def privileged_texts(column: str, rollouts: Rollouts, examples: Sequence[Row]) -> list[str]:
    """The text of the column for each row, logged by a reward function or else of the data; "" where it is None.

    Raises ConfigError where neither has that column.
    """
    logged = rollouts.logged.columns.get(column)
    if logged is None and not any(column in example for example in examples):
        raise ConfigError(
            f"teacher.privileged_column is {column!r}, but neither do rows have that column nor does a reward function "
            f"log it: rows have {', '.join(examples[0])}"
        )
    values = [example.get(column) for example in examples] if logged is None else logged
    return ["" if value is None else all_text(value) for value in values]


def all_text(value: Any) -> str:
    """A text, or those of messages, one a line; anything else as it is printed."""
    if isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], Mapping):
        return "\n".join(filter(None, (_content(message) for message in value)))
    return value if isinstance(value, str) else str(value)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content if part.get("type") == "text")


def with_context(spec: ContextSpec, prompt: Prompt, solution: str | None, privileged: str) -> Prompt:
    """The prompt with these in it: text, or messages with another last turn of the user.

    Raises ConfigError for messages that end with another's turn.
    """
    if solution is not None and spec.remove_thinking:
        solution = re.sub(r"<think>.*?</think>", "", solution, flags=re.DOTALL).strip()
    parts = {
        "solution": "" if solution is None else spec.solution_template.format(solution=solution),
        "privileged": spec.privileged_template.format(privileged=privileged) if privileged else "",
    }
    if isinstance(prompt, str):
        return spec.template.format(prompt=prompt, **parts)
    last = prompt[-1]
    if last["role"] != "user":
        raise ConfigError(
            f"teacher.context is {spec.kind}, which is written into the last turn of the user, but a prompt ends with "
            f"a message of role {last['role']!r}: end prompts with the user's message, or set teacher.context to none"
        )
    return [*prompt[:-1], {**last, "content": spec.template.format(prompt=_content(last), **parts)}]
