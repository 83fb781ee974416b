"""From the configuration to what a run records of itself: its log, the limits of its health, its checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.config import default, eval_set, flat
from jaxrl_llm.config.entries import best_mode
from jaxrl_llm.config.schema import KEYS, OFFLINE
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.config.tree import spec_of
from jaxrl_llm.data.opening import evaluated_on
from jaxrl_llm.distributed.devices import peak_flops
from jaxrl_llm.training.checkpoint.object_store import path_of
from jaxrl_llm.training.checkpoint.orbax_manager import Keep
from jaxrl_llm.training.logging.health import HealthSpec
from jaxrl_llm.training.logging.logger import LoggingSpec
from jaxrl_llm.training.logging.metric_names import TRL_PPO, MetricNames, verl_names
from jaxrl_llm.training.setup.objectives import old_logps_setting

# The keys that the arguments of `train` take the place of.
GIVEN_KEYS = {
    "train_dataset": "data.path",
    "eval_dataset": "data.eval_path",
    "rewards": "rewards.functions",
    "environment": "environment.name",
    "tools": "environment.tools",
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "optimizer": "optimizer.name",
    "schedule": "optimizer.schedule",
}
# Settings that the console shows even when they have their default.
SHOWN_SETTINGS = (
    "model.path", "data.path", "algorithm.name", "total_steps", "batch.prompts", "rollout.group_size",
    "optimizer.learning_rate", "seed",
)  # fmt: skip


def logging_spec(config, given: Mapping[str, str] = MappingProxyType({})) -> LoggingSpec:
    """The records and the console of a run; `given` says in words what stands in the place of names."""
    c = config.logging
    if config.algorithm.name in OFFLINE:
        progress = ("epoch", "loss", "rewards/accuracies", "accuracy", "grad_norm", "lr", "tokens_per_second")
    else:
        progress = ("epoch", "reward", "kl", "entropy", "completions/mean_length", "tokens_per_second")
    return spec_of(
        LoggingSpec,
        c,
        backends=tuple(c.backends),
        total_steps=config.total_steps,
        progress=progress,
        settings=shown_settings(config, given),
        all_settings=masked(flat(config.to_dict()) | in_place(given)),
        names=metric_names(config),
    )


def in_place(given: Mapping[str, str]) -> dict[str, str]:
    """The keys that objects given in Python take the place of, with the words for these."""
    return {GIVEN_KEYS[name]: words for name, words in given.items() if name in GIVEN_KEYS}


def shown_settings(config, given: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """The settings that the console shows, `{key: text}`: the main ones, and those that differ from their default."""
    defaults, shown = default(), {}
    for key in KEYS:
        section, _, leaf = key.name.rpartition(".")
        value, usual = ((tree[section] if section else tree)[leaf] for tree in (config, defaults))
        applies = section != "rollout" or config.algorithm.name not in OFFLINE
        applies &= key.name != "data.path" or not config.data.sources  # which take its place
        if value != usual or (key.name in SHOWN_SETTINGS and applies):
            shown[key.name] = masked(key.show(value))
    return shown | in_place(given)


def metric_names(config) -> MetricNames:
    """The names of metrics in the records of the run, TRL's or verl's."""
    if config.logging.names == "trl":
        return MetricNames(TRL_PPO if config.algorithm.name == "ppo" else {})
    samples = {"": config.eval.samples}
    for entry in config.eval.sets:
        name, numbers, _ = eval_set(entry)
        samples[name] = numbers.get("samples", samples.get(name, config.eval.samples))
    c = config.algorithm
    paths, _ = evaluated_on(flat(config.to_dict()))
    return verl_names(c.kl_in_reward, c.reward_beta > 0, "+".join(paths) or config.data.path, samples)


def health_spec(config) -> HealthSpec:
    """The limits beyond which a run is warned of, or ended."""
    c, policy = config.watch, config.algorithm.name not in OFFLINE
    older = [f"rollout.{key}" for key in ("staleness", "partial_prompts") if config.rollout[key]]
    if policy and old_logps_setting(config) in ("sampler", "reference"):  # each update measures the policy as it is
        several = (("algorithm", "num_iterations"), ("batch", "minibatches"))
        older += [f"{section}.{key}" for section, key in several if config[section][key] > 1]
    return HealthSpec(policy, c.kl, c.entropy, c.mismatch, config.optimizer.max_skipped_steps, tuple(older))


def peak_of(config, mesh: Mesh) -> float:
    """The operations a second of all devices of a mesh at their peak; 0 where it is not known."""
    tflops = config.logging.peak_tflops
    return mesh.size * (peak_flops(mesh.devices.flat[0]) if tflops is None else tflops * 1e12)


def checkpoint_folder(config, run: str | Path | None = None) -> Any:
    """The folder of a run's checkpoints, local or in a store: `checkpoint.folder`, or else `checkpoints` of `run`, by
    default its output_dir."""
    return path_of(config.checkpoint.folder or Path(run or config.output_dir) / "checkpoints")


def keep_of(config) -> Keep:
    """The rule by which checkpoints of a run are kept, of the settings `checkpoint.keep*` and `best*`."""
    c = config.checkpoint
    return Keep(c.keep, c.keep_every, c.keep_hours, c.best, best_mode(c.best or "", c.best_mode))
