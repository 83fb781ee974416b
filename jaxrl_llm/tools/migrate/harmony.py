"""The rules for Harmony, whose own defaults are not published."""

from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import OURS, Draft, Options, Source


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for a recipe."""
    trainer = source.trainer
    draft = Draft(source, f"{trainer.upper()}, from the recipe FILE of Harmony.", {})
    draft.check(
        "Harmony's own defaults are not published: what the recipe does not name has this library's defaults "
        "(python -m jaxrl_llm.train --help)"
    )
    draft.set_direct("harmony")
    for key, ours in (("model", "model.path"), ("policy_model", "model.path"), ("value_model", "critic.path")):
        value = draft.get(key)
        if isinstance(value, str) and not value.startswith("<"):
            draft.set(ours, value.rpartition("://")[2], key)
            if "://" in value and not value.startswith("hf://"):
                draft.check(f"{key} is {value}: set {ours} to its Hugging Face id or folder")
        elif value is not None:
            draft.set(ours, "MODEL", key)
            draft.check(f"{key} is {value.strip('<>')}: set {ours}")
    if "model.path" not in draft.values:
        draft.set("model.path", "MODEL")
        draft.check("the recipe names no model: set model.path")
    value = draft.get("dataset")
    if isinstance(value, str) and not value.startswith("<"):
        draft.set("data.path", value, "dataset")
    else:
        draft.set("data.path", "DATA", "dataset")
        draft.check(
            "the recipe makes its data set in Python: write its rows to a file for data.path, or call train(config, "
            "train_dataset=...)"
        )
    _graders(draft)
    if draft.get("tp") is not None:
        draft.take("mesh.tensor", "tp")
        if int(draft.get("tp")) < 0:
            draft.set("mesh.data", 1, "tp")
            draft.check(
                "tp is ctx.world_size, all devices, which mesh.tensor = -1 takes, at the speed of the network between "
                "machines: on several set mesh.tensor to the devices of one, and mesh.data or mesh.fsdp to -1"
            )
    samples, mini = draft.get("samples_per_batch"), draft.get("samples_per_mini_batch")
    if isinstance(samples, int) and isinstance(mini, int):
        if samples % mini:
            raise ConfigError(f"samples_per_mini_batch = {mini} does not divide samples_per_batch = {samples}")
        draft.set("batch.minibatches", samples // mini, "samples_per_mini_batch")
    if trainer == "ppo":
        draft.set("algorithm.name", "ppo")
        draft.set("algorithm.advantage", "ppo")
        draft.set("rollout.group_size", 1)
        draft.set("algorithm.aggregation", "token")
    elif trainer == "grpo":
        draft.set("algorithm.scale_rewards", "none")
    elif trainer == "dpo":
        draft.set("algorithm.name", "preference")
        draft.set("algorithm.loss", "dpo")
        if "algorithm.beta" not in draft.values:
            draft.set("algorithm.beta", 0.1)
            draft.check("the recipe does not set beta; 0.1 is usual")
    else:
        draft.set("algorithm.name", "sft")
    for key in ("name", "advantage", "scale_rewards", "loss"):
        draft.origins[f"algorithm.{key}"] = trainer.upper()
    if draft.get("kl_beta") is not None:
        draft.take("algorithm.beta", "kl_beta")
        if trainer == "ppo":
            draft.set("algorithm.kl_in_reward", float(draft.get("kl_beta")) > 0, "kl_beta")
    if "total_steps" not in draft.values:
        draft.values.setdefault("batch.prompts", OURS["batch.prompts"].default)
        draft.origins.setdefault("batch.prompts", "")
        rows = shared.known_rows(options, draft.values["data.path"], "train")
        per_epoch = shared.full_batches(rows, draft.values["batch.prompts"])
        shared.epochs(draft, per_epoch, 1, "passes over the data set")
        draft.origins["total_steps"] = "one pass over the data set"
    return draft


def _graders(draft: Draft) -> None:
    """Set the reward functions: graders that have a name."""
    grader: Any = draft.get("grader")
    weights = draft.get("CombinedGrader.weights")
    draft.use("CombinedGrader.graders", "CombinedGrader.weights")
    if grader is None:
        return
    names = tuple(grader) if isinstance(grader, list) else (grader,)
    if any(":" in name for name in names):
        draft.set("rewards.functions", names, "grader")
        return
    draft.set("rewards.functions", ("REWARD",), "grader")
    weighted = f" with the weights {weights}" if weights else ""
    draft.check(
        f"grader is {', '.join(names)}{weighted}, an object that the recipe makes: name it in rewards.functions "
        "(file.py:grader), or call train(config, rewards=grader)"
    )
