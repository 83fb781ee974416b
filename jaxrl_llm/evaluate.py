"""Measure a model on held-out prompts.

    python -m jaxrl_llm.evaluate --config=configs/grpo.py --config.model.path=runs/grpo/hf

Prompts, rewards and sampling are those of the configuration: `data.eval_path` (or `data.path`) and `data.eval_split`,
`rewards`, `rollout`, and `eval.prompts`, `eval.samples` and `eval.correct_at`. Prints accuracy of samples and of the
greedy completion, reward, and pass@k.
"""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import processes
from jaxrl_llm.command_line import load_flags, run
from jaxrl_llm.compiled import keep_compiled
from jaxrl_llm.config import ConfigError, validate
from jaxrl_llm.environments.factory import load_environments
from jaxrl_llm.keys import Key
from jaxrl_llm.training.build import build_evaluation, build_mesh, build_model, build_rewards
from jaxrl_llm.training.console import show

FLAGS = (Key("output", "", "JSON file to write the numbers to, besides printing them."),)


def evaluate(config, eval_dataset=None, rewards=None, environment=None, tools=()) -> dict[str, float]:
    """The `eval/*` metrics of `config.model` on held-out prompts; see `jaxrl_llm.training.evaluation.Evaluation`.

    eval_dataset (a `datasets.Dataset` or a list of dicts) takes the place of `data.eval_path`, and rewards (a function
    or a list of them) that of `rewards.functions`; environment and tools are as in `train`. The numbers
    are those that training with the same configuration reports for the same parameters. Raises ConfigError for anything
    the user can mend.
    """
    return _measure(config, eval_dataset, rewards, environment, tools)[1]


def _measure(config, eval_dataset=None, rewards=None, environment=None, tools=()) -> tuple[int, dict[str, float]]:
    """How many prompts there were, and the metrics."""
    validate(config)
    mesh = build_mesh(config)
    with jax.set_mesh(mesh), contextlib.closing(build_rewards(config, rewards)) as grader:
        model = build_model(config, mesh)
        environments = load_environments(config, environment, tools)
        with contextlib.ExitStack() as stack:
            if environments is not None:
                stack.callback(environments.close)
            evaluation = build_evaluation(config, model, grader, eval_dataset, mesh, environments)
            return len(evaluation.examples), evaluation(model.params, jax.random.key(config.seed))


def _report(config, prompts: int, metrics: dict[str, float]) -> dict[str, Any]:
    """What `--output` holds: what was measured, and the metrics by name without `eval/`, null where not finite."""
    return {
        "model": config.model.path,
        "data": config.data.eval_path or config.data.path,
        "split": config.data.eval_split,
        "prompts": prompts,
        "samples": config.eval.samples,
        "temperature": config.rollout.temperature,
        "metrics": {name[5:]: value if math.isfinite(value) else None for name, value in metrics.items()},
    }


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    config, options = load_flags(argv, __doc__ or "", FLAGS)
    processes.join(config)
    keep_compiled(config.compilation_cache)
    output = Path(options["output"]).expanduser() if options["output"] else None
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {output.parent}; make it first")
    found = _report(config, *_measure(config))
    if jax.process_index() > 0:
        return
    rows = {name: value for name, value in found.items() if name != "metrics"} | found["metrics"]
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name.ljust(width)}  {value if isinstance(value, str) else show(value)}")
    if output is not None:
        output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
