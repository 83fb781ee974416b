"""Measure a model on held-out prompts, or the responses in a file.

    python -m jaxrl_llm evaluate --config=configs/grpo.py --config.model.path=runs/grpo
    python -m jaxrl_llm evaluate --responses=responses.parquet --config.rewards.functions=my_score.py

Prompts, rewards and sampling are those of the configuration: `data.eval_path` (or `data.path`) and `data.eval_split`,
or `eval.sets`; `rewards`; `rollout`; and the samples and statistics of `eval`. Prints accuracy of samples and of the
greedy completion, reward, and pass@k; of each set, and of each data source. With --responses no model is loaded: each
row of the file has the responses to a prompt (a text, or a list of them) and the columns that the rewards read.
"""

import contextlib
import json
import math
from typing import Any

import jax

from jaxrl_llm.config import ConfigError, flat, validate
from jaxrl_llm.config.flags import file_to_write, load_flags
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.data.opening import evaluated_on
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.environments.factory import load_environments
from jaxrl_llm.rewards.runner import TrainerState
from jaxrl_llm.training.evaluation.responses import grade, read_responses, tokenizer_for
from jaxrl_llm.training.evaluation.run import Evaluations
from jaxrl_llm.training.logging.console import show, stderr_console, waiting
from jaxrl_llm.training.setup.evaluation import build_evaluations, eval_metrics
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.run_models import build_named
from jaxrl_llm.training.setup.sources import build_rewards
from jaxrl_llm.training.setup.worker import environment_spec

FLAGS = (
    Setting("output", "", "JSON file for the numbers, which are also printed."),
    Setting("responses", "", "File of responses to grade instead of sampling: .parquet, .jsonl, .json or .csv."),
    Setting("response_key", "responses", "Column of responses in that file."),
    Setting("prompt_key", "prompt", "Column of prompts in that file."),
    Setting("data_source_key", "data_source", "Column with the source of a row in that file."),
    Setting("reward_model_key", "reward_model", "Column with the ground_truth in that file, as verl has it."),
)


def evaluate(config, eval_dataset=None, rewards=None, environment=None, tools=()) -> dict[str, float]:
    """The `eval/*` metrics of `config.model` on held-out prompts; see `jaxrl_llm.training.evaluation.run.Evaluation`.

    `model.path` may also name a run (its newest checkpoint) or one of its checkpoints, RUN/checkpoints/STEP.
    eval_dataset (a `datasets.Dataset`, a list of dicts, or a dictionary of such by the names of sets) takes the place
    of `eval.sets` and `data.eval_path`, and rewards (a function or a list of them) that of `rewards.functions`;
    environment and tools are as in `train`. The numbers are those that training with the same configuration reports for
    the same parameters at its end: `trainer_state` of reward functions is that of the last step. Raises ConfigError on
    user errors.
    """
    return _measure(config, eval_dataset, rewards, environment, tools)[1]


def evaluate_responses(
    config,
    responses: Any,
    rewards=None,
    response_key: str = "responses",
    prompt_key: str = "prompt",
    data_source_key: str = "data_source",
    reward_model_key: str = "reward_model",
) -> dict[str, float]:
    """The `eval/*` metrics of existing responses, by the rewards of the configuration.

    responses is a file (.parquet, .jsonl, .json, .csv), a `datasets.Dataset` or a list of dicts; a row has a prompt's
    responses, a text or a list of them. `eval/reward` is the mean of the means of rows, as verl's `main_eval` has it.
    Raises ConfigError on user errors.
    """
    keys = {
        "responses": response_key,
        "prompt": prompt_key,
        "data_source": data_source_key,
        "reward_model": reward_model_key,
    }
    return _grade(config, responses, rewards, keys)[1]


def _measure(config, eval_dataset=None, rewards=None, environment=None, tools=()) -> tuple[Any, dict[str, float]]:
    """The number of prompts (of each set, by name, where sets have names), and the metrics."""
    validate(config)
    mesh = build_mesh(config)
    with jax.set_mesh(mesh), contextlib.closing(build_rewards(config, rewards)) as grader:
        model = build_named(config, mesh)
        environments = load_environments(environment_spec(config, environment, tools))
        with contextlib.ExitStack() as stack:
            if environments is not None:
                stack.callback(environments.close)
            evaluations = build_evaluations(config, model, grader, eval_dataset, mesh, environments)
            counts = {evaluation.name: len(evaluation.examples) for evaluation in evaluations}
            key, state = jax.random.key(config.seed), TrainerState(config.total_steps, config.total_steps)
            return counts.get("", counts), Evaluations(evaluations)(model.params, key, state=state)


def _grade(config, responses: Any, rewards: Any, keys: dict[str, str]) -> tuple[int, dict[str, float]]:
    """The number of rows, and the metrics."""
    validate(config)
    metrics = eval_metrics(config)
    with contextlib.closing(build_rewards(config, rewards)) as grader:
        tokenizer = tokenizer_for(config.model.path, config.model.trust_remote_code, grader)
        answered = read_responses(responses, keys, config.data.format, tokenizer)
        state = TrainerState(config.total_steps, config.total_steps)
        return len(answered), grade(grader, answered, metrics, tokenizer, state)


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    config, options = load_flags(argv, __doc__ or "", FLAGS)
    processes.join(config)
    keep_compiled(config.compilation_cache)
    output = file_to_write("output", options["output"])
    if options["responses"]:
        keys = {"responses": options["response_key"], "prompt": options["prompt_key"]}
        keys |= {name: options[f"{name}_key"] for name in ("data_source", "reward_model")}
        rows, metrics = _grade(config, options["responses"], None, keys)
        report = {"responses": options["responses"], "prompts": rows}
    elif changed := [flag.name for flag in FLAGS if flag.name.endswith("_key") and options[flag.name] != flag.default]:
        raise ConfigError(f"--{changed[0]} is of a file of responses: name it with --responses=FILE")
    else:
        with waiting(f"evaluating {config.model.path}; the first time programs are compiled", stderr_console(), False):
            prompts, metrics = _measure(config)
        report = {"model": config.model.path}
        if isinstance(prompts, dict):
            report["sets"] = prompts
        else:
            paths, split = evaluated_on(flat(config))
            report |= {"data": ", ".join(paths)} | ({"split": split} if split else {}) | {"prompts": prompts}
        temperature = config.eval.temperature
        report["samples"] = config.eval.samples
        report["temperature"] = config.rollout.temperature if temperature is None else temperature
    if jax.process_index() > 0:
        return
    # Names without `eval/`, and null for NaN and infinities, which JSON does not have.
    numbers = {name[5:]: value if math.isfinite(value) else None for name, value in metrics.items()}
    table = report | numbers
    width = max(map(len, table))
    for name, value in table.items():
        print(f"{name.ljust(width)}  {value if isinstance(value, str) else show(value)}")
    if output is not None:
        output.write_text(json.dumps({**report, "metrics": numbers}, indent=2) + "\n", encoding="utf-8")
