"""Harmony: its keys, all that its pages name, and their rules. Its defaults are not published."""

from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigDict
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import Draft, Options, Source
from jaxrl_llm.tools.migrate.table import Entry, entry, same

SAMPLES = "prompts there, as completions_per_sample are of a sample; of sft and dpo rows and pairs"

TABLE: tuple[Entry, ...] = (
    entry("dataset", "data.path", "a list of StringThread (or of pairs of them) goes to `train(config, "
          "train_dataset=...)`, or to a file of rows with the column `thread`, or `preferred` and `dispreferred`, "
          "which "
          "the format `harmony` reads"),
    entry("model policy_model", "model.path", "what spawn_train was called on"),
    entry("value_model", "critic.path"),
    entry("grader", "rewards.functions", "a grader object runs unchanged, by name (`file.py:grader`) or in "
          "`train(config, rewards=...)`"),
    entry("CombinedGrader CombinedGrader.graders", "rewards.functions", "`jaxrl_llm.rewards.combined.CombinedGrader`, "
          "or the graders one by one"),
    entry("CombinedGrader.weights", "rewards.weights", "a weighted sum"),
    entry("lr lr_policy", "optimizer.learning_rate", "", same),
    entry("lr_value", "critic.learning_rate", "", same),
    entry("samples_per_batch", "batch.prompts", SAMPLES, same),
    entry("samples_per_mini_batch", "batch.minibatches", "samples_per_batch divided by it"),
    entry("completions_per_sample", "rollout.group_size", "", same),
    entry("max_num_ppo_steps", "total_steps", "the other trainers go over the data set once: `--rows=N`", same),
    entry("max_grad_norm", "optimizer.max_grad_norm", "", same),
    entry("kl_beta", "algorithm.beta algorithm.kl_in_reward", "the pages do not say which KL: of PPO it is in the "
          "reward here (k1), of GRPO in the loss (k3)"),
    entry("beta", "algorithm.beta", "", same),
    entry("SFT PPO GRPO DPO", "algorithm.name algorithm.loss algorithm.advantage", "GRPO's advantage is the reward "
          "minus "
          "the group's mean: `algorithm.scale_rewards=none`"),
    entry("tp world_size", "mesh.tensor", "devices that share each matrix product", same),
    entry("spawn_train ctx client", note="`train(config)` loads the model; there is no server"),
    entry("setup", note="called before the first batch, on the graders of a CombinedGrader too"),
    entry("model.save save_model_safely", note="the model is saved in `output_dir`/hf when the run ends; another run "
          "has "
          "another folder"),
    entry("InputConfig", note="a config file is Python, and any key is a flag: "
          "`--config.optimizer.learning_rate=1e-6`"),
)  # fmt: skip


def convert(source: Source, options: Options) -> tuple[ConfigDict, str]:
    """Our configuration, and the file that makes it."""
    made = draft(source, options)
    return made.finish(), made.text()


def draft(source: Source, options: Options) -> Draft:
    """Our settings for a recipe."""
    title = f"{source.trainer.upper()}, from the recipe {Path(source.path).name} of Harmony."
    made = Draft(source, {}, TABLE, title)
    made.check("Harmony's own defaults are not published: what the recipe does not name has this library's defaults "
               "(python -m jaxrl_llm.train --help)")  # fmt: skip
    made.simple()
    trainer = source.trainer
    _models(made)
    samples, mini = made.get("samples_per_batch"), made.get("samples_per_mini_batch")
    if isinstance(samples, int) and isinstance(mini, int):
        if samples % mini:
            raise ConfigError(f"{source.path}: samples_per_mini_batch = {mini} does not divide samples_per_batch = "
                              f"{samples}")  # fmt: skip
        made.set("batch.minibatches", samples // mini, "samples_per_mini_batch")
    if trainer == "ppo":
        made.set("algorithm.name", "ppo")
        made.set("algorithm.advantage", "ppo")
        made.set("rollout.group_size", 1)
        made.set("algorithm.aggregation", "token")
    elif trainer == "grpo":
        made.set("algorithm.scale_rewards", "none")
    elif trainer == "dpo":
        made.set("algorithm.name", "preference")
        made.set("algorithm.loss", "dpo")
        if "algorithm.beta" not in made.values:
            made.set("algorithm.beta", 0.1)
            made.check("the recipe does not set beta; 0.1 is usual")
    else:
        made.set("algorithm.name", "sft")
    for key in ("name", "advantage", "scale_rewards", "loss"):
        made.origins[f"algorithm.{key}"] = trainer.upper()
    if made.get("kl_beta") is not None:
        made.set("algorithm.beta", float(made.get("kl_beta")), "kl_beta")
        if trainer == "ppo":
            made.set("algorithm.kl_in_reward", float(made.get("kl_beta")) > 0, "kl_beta")
    if "total_steps" not in made.values:
        if not options.rows:
            raise ConfigError(f"{source.path} goes over its data set once, and here a run has a number of steps: add "
                              "--rows=N, the number of rows")  # fmt: skip
        batch = made.values.get("batch.prompts", 32)
        made.set("total_steps", max(1, options.rows // batch))
    return made


def _models(made: Draft) -> None:
    for key, ours in (("model", "model.path"), ("policy_model", "model.path"), ("value_model", "critic.path")):
        value = made.get(key)
        if isinstance(value, str) and not value.startswith("<"):
            made.set(ours, value.rpartition("://")[2], key)
            if "://" in value:
                made.check(f"{key} is {value}: set {ours} to its Hugging Face id or folder")
        elif value is not None:
            made.set(ours, "MODEL", key)
            made.check(f"{key} is {value.strip('<>')}: set {ours}")
    if "model.path" not in made.values:
        made.set("model.path", "MODEL")
        made.check("the recipe names no model: set model.path")
    value = made.get("dataset")
    if isinstance(value, str) and not value.startswith("<"):
        made.set("data.path", value, "dataset")
    else:
        made.set("data.path", "DATA", "dataset")
        made.check("the recipe makes its data set in Python: write its rows to a file for data.path, or call "
                   "train(config, train_dataset=...)")  # fmt: skip
    _graders(made)


def _graders(made: Draft) -> None:
    grader: Any = made.get("grader")
    weights = made.get("CombinedGrader.weights")
    made.use("CombinedGrader.graders", "CombinedGrader.weights")
    if grader is None:
        return
    names = tuple(grader) if isinstance(grader, list) else (grader,)
    made.use("grader")
    if any(":" in name for name in names):
        made.set("rewards.functions", names, "grader")
    else:
        made.set("rewards.functions", ("REWARD",), "grader")
        made.check(f"grader is {', '.join(names)}" + (f" with the weights {weights}" if weights else "") + ", an "
                                                                                                           "object "
                   "that the recipe makes: name it in rewards.functions (file.py:grader), or call train(config, "
                   "rewards=grader)")  # fmt: skip
