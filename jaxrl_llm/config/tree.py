"""The configuration tree that `KEYS` (keys.py) describes: how it is made, checked, and written as JSON and as a page.

`ConfigError` and `resolve` come from names.py.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_collections
from ml_collections.config_dict import placeholder

from jaxrl_llm.config.resolve import ConfigError as ConfigError
from jaxrl_llm.config.resolve import closest, split_options
from jaxrl_llm.config.resolve import resolve as resolve
from jaxrl_llm.config.schema import GROUP_ADVANTAGES, KEYS, LABELLED, OFFLINE, SECTIONS

if TYPE_CHECKING:

    class ConfigDict(ml_collections.ConfigDict):
        """The tree as type checkers see it: any attribute, of any type (`check_keys` is what checks it)."""

        def __getattr__(self, attribute: str) -> Any: ...

        def __getitem__(self, key: str) -> Any: ...
else:
    ConfigDict = ml_collections.ConfigDict


_BY_NAME = {key.name: key for key in KEYS}


def default() -> ConfigDict:
    """The default configuration: a locked ConfigDict (values may be changed, keys may not be added)."""
    tree: dict[str, Any] = {}
    for key in KEYS:
        section, _, leaf = key.name.rpartition(".")
        node = tree.setdefault(section, {}) if section else tree
        node[leaf] = placeholder(key.kind) if key.default is None else key.default
    config = ConfigDict(tree)
    config.lock()
    return config


def loss_names(config: ConfigDict) -> list[str]:
    """The names of the losses of `algorithm.loss`, which are joined by +, without their options."""
    return [split_options(part)[0] for part in config.algorithm.loss.split("+")]


def eval_set(entry: Any) -> tuple[str, dict[str, int], dict[str, Any]]:
    """One entry of `eval.sets`: the name of its set, what it says of `prompts` and `samples`, and where its rows are.

    A text is `name=path` or `name=path(split='test', samples=16)`; a dictionary names its set with `set`. Raises
    ConfigError when it has no name, or a number that it does not take.
    """
    if isinstance(entry, str):
        name, _, written = entry.partition("=")
        path, options = split_options(written)
        entry = {"set": name.strip(), "path": path, **options}
    options = dict(entry)
    name = options.pop("set", None)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or not (
        options.get("path") or options.get("data_files")
    ):  # fmt: skip
        raise ConfigError(
            f"eval.sets has {entry!r}, but it takes name=path, where the name is of letters, digits, _, - and ., or a "
            "dictionary with set (the name) and path"
        )
    own = {key: options.pop(key) for key in ("prompts", "samples") if key in options}
    for key, value in own.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"eval.sets: {key} of {name} is {value!r}, but it takes an integer of 1 or more")
    if "split" in options:
        options.setdefault("eval_split", options["split"])
    return name, own, options


def rows_together(config: ConfigDict) -> int:
    """Adjacent rows that stay together: completions of a prompt, the two rows of a pair, kto's row and its mismatch."""
    algorithm = config.algorithm
    if algorithm.name not in OFFLINE:
        return config.rollout.group_size
    single = algorithm.name == "preference" and loss_names(config) == ["apo_zero_unpaired"]
    return 1 if single or algorithm.name == "sft" else 2


def batch_rows(config: ConfigDict) -> int:
    """Rows N of one step: batch.prompts x rollout.group_size, or x rows per data row for offline algorithms."""
    return config.batch.prompts * rows_together(config)


def validate(config: ConfigDict) -> None:
    """Raises ConfigError for the first unknown or missing key, wrong value, or contradiction between keys."""
    check_keys(config)
    _check_together(config)


def check_keys(config: ConfigDict) -> None:
    """Raises ConfigError for the first unknown or missing key, or value that its key does not take."""
    values = _settings(config)
    for name in values:
        if name not in _BY_NAME:
            raise ConfigError(f"there is no key {name}; the closest is {closest(name, _BY_NAME)}")
    for key in KEYS:
        if key.name not in values:
            raise ConfigError(f"the key {key.name} is missing; start from jaxrl_llm.config.default()")
        key.check(values[key.name])


def _check_together(config: ConfigDict) -> None:
    """Raises ConfigError when values that are fine alone contradict each other."""
    algorithm, batch, rewards = config.algorithm, config.batch, config.rewards
    online = algorithm.name not in OFFLINE
    group = config.rollout.group_size
    if online:
        _check_online(config)
    if online and split_options(algorithm.advantage)[0] in GROUP_ADVANTAGES and group < 2:
        raise ConfigError(
            f"rollout.group_size is {group}, but algorithm.advantage = {algorithm.advantage!r} compares the "
            "completions of a prompt with each other: set rollout.group_size to 2 or more"
        )
    rows = batch_rows(config)
    formula = f"batch.prompts x rollout.group_size = {batch.prompts} x {group}" if online else "batch.prompts"
    if not online:
        _check_offline(config)
        formula += " x 2" if rows_together(config) == 2 else ""
    if rows % batch.minibatches:
        raise ConfigError(f"batch.minibatches is {batch.minibatches}, but it must divide the {rows} rows ({formula})")
    minibatch = rows // batch.minibatches
    if batch.microbatch_rows and minibatch % batch.microbatch_rows:
        raise ConfigError(
            f"batch.microbatch_rows is {batch.microbatch_rows}, but it must divide the {minibatch} rows of a minibatch "
            f"({formula}, divided by batch.minibatches = {batch.minibatches})"
        )
    if rewards.weights and len(rewards.weights) != len(rewards.functions):
        raise ConfigError(
            f"rewards.weights has {len(rewards.weights)} numbers for {len(rewards.functions)} rewards.functions: "
            "give one each, or none"
        )
    _check_late_rewards(rewards)
    _check_environment(config)
    if online and not rewards.functions:
        raise ConfigError(f"rewards.functions is empty, but algorithm.name = {algorithm.name!r} needs one or more")
    if online and config.eval.measure in ("loss", "both"):
        raise ConfigError(f"eval.measure is {config.eval.measure}, but {algorithm.name} learns from samples: set auto")
    if algorithm.neftune_alpha and algorithm.name != "sft":
        raise ConfigError(
            f"algorithm.neftune_alpha is {algorithm.neftune_alpha}, but only sft adds noise to its embeddings, and "
            f"algorithm.name is {algorithm.name!r}: set it to 0"
        )
    if algorithm.label_smoothing and algorithm.name != "sft":
        raise ConfigError(
            f"algorithm.label_smoothing is {algorithm.label_smoothing}, but only sft reads it, and algorithm.name is "
            f"{algorithm.name!r}: set it to 0; a preference loss takes it in brackets, "
            f"algorithm.loss='dpo(label_smoothing={algorithm.label_smoothing})'"
        )
    for axis, size in config.mesh.items():
        if size == 0:
            raise ConfigError(f"mesh.{axis} is 0, but it takes 1 or more, or -1 for the devices that the others leave")
    _check_data(config)
    _check_eval(config)
    _check_optimizer(config)
    _check_lora(config)
    _check_checkpoint(config)
    _check_callbacks(config)
    _check_export(config.export)


def _check_eval(config: ConfigDict) -> None:
    """Raises ConfigError when the sets that are evaluated on cannot be read, or cannot be written to a file."""
    for entry in config.eval.sets:
        name, _, options = eval_set(entry)
        _check_written(f"eval.sets, {name}", options)


def _check_checkpoint(config: ConfigDict) -> None:
    """Raises ConfigError when checkpoints cannot be kept as the settings say."""
    checkpoint, every = config.checkpoint, config.eval.every
    if "://" in config.output_dir:
        raise ConfigError(
            f"output_dir is {config.output_dir!r}, but it is a local folder; checkpoints alone go to an object store: "
            "set checkpoint.folder"
        )
    if checkpoint.best and checkpoint.every == 0:
        raise ConfigError(
            f"checkpoint.best is {checkpoint.best!r}, but only the last step is saved: set checkpoint.every"
        )
    if checkpoint.best and checkpoint.best.startswith("eval/") and (every <= 0 or checkpoint.every % every):
        raise ConfigError(
            f"checkpoint.best is {checkpoint.best!r}, but the steps that are saved (checkpoint.every = "
            f"{checkpoint.every}) are not those that are evaluated (eval.every = {every}): make eval.every divide it"
        )


def _check_callbacks(config: ConfigDict) -> None:
    """Raises ConfigError for a callback whose options cannot be read, or that waits for evaluations that never come."""
    for spec in config.callbacks:
        name, options = split_options(spec)
        metric = str(options.get("metric", ""))
        if name == "early_stopping" and metric.startswith("eval/") and config.eval.every <= 0:
            raise ConfigError(
                f"callbacks has {spec!r}, but nothing is evaluated while it trains (eval.every = {config.eval.every}): "
                "set eval.every, or name a metric of every step"
            )


def _check_export(export: ConfigDict) -> None:
    """Raises ConfigError for a repository that cannot be one, or settings of one where there is none."""
    repo = export.push_to_hub
    if repo is None and (export.private or export.overwrite):
        which = "private" if export.private else "overwrite"
        raise ConfigError(f"export.{which} is true, but nothing is pushed: set export.push_to_hub, or it to false")
    if repo is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", repo):
        raise ConfigError(f"export.push_to_hub is {repo!r}, but it takes a repository of the hub: OWNER/NAME")


def _check_lora(config: ConfigDict) -> None:
    """Raises ConfigError when the settings of adapters contradict each other."""
    lora, algorithm = config.lora, config.algorithm
    if lora.path is not None and lora.rank:
        raise ConfigError(f"lora.rank is {lora.rank}, but the adapter of lora.path has a rank already: set rank to 0")
    if not (lora.rank or lora.path):
        return
    if algorithm.ref_sync_steps and lora.reference == "base":
        raise ConfigError(
            f"algorithm.ref_sync_steps is {algorithm.ref_sync_steps}, but lora.reference = 'base' never moves: set "
            "start (with ref_mixup_alpha 1) or copy"
        )
    if algorithm.ref_sync_steps and lora.reference == "start" and algorithm.ref_mixup_alpha < 1:
        raise ConfigError(
            f"algorithm.ref_mixup_alpha is {algorithm.ref_mixup_alpha}, but a mean of adapters is no mean of what they "
            "compute: set lora.reference to copy, or ref_mixup_alpha to 1"
        )
    if lora.reference == "copy" and config.model.quantize != "none":
        raise ConfigError(
            f"lora.reference is copy, but the matrices are quantised (model.quantize = {config.model.quantize!r}) and "
            "adapters are not merged into them: set base or start"
        )


def _check_environment(config: ConfigDict) -> None:
    """Raises ConfigError when the settings of environments contradict each other."""
    c, algorithm = config.environment, config.algorithm
    named = [f"environment.{key}" for key in ("name", "tools", "rollout_func") if c[key]]
    if named and algorithm.name in OFFLINE:
        raise ConfigError(f"{named[0]} is set, but algorithm.name = {algorithm.name!r} samples nothing: leave it out")
    if c.rollout_func is None:
        return
    if len(named) > 1:
        raise ConfigError(
            f"environment.rollout_func and {named[0]} are both set, but a rollout function holds its own "
            "conversations: set one"
        )
    if algorithm.importance_correction == "none" and algorithm.old_logps != "sampler":
        raise ConfigError(
            "algorithm.importance_correction is none, but environment.rollout_func may sample with another policy than "
            "the one that is trained: set token_truncate"
        )


def _check_late_rewards(rewards: ConfigDict) -> None:
    """Raises ConfigError for a rewards.on_timeout that says nothing, or that nothing can come to."""
    if rewards.on_timeout == "stop":
        return
    if rewards.timeout is None:
        raise ConfigError(f"rewards.on_timeout is {rewards.on_timeout!r}, but nothing is late: set rewards.timeout")
    try:
        finite = rewards.on_timeout == "none" or math.isfinite(float(rewards.on_timeout))
    except ValueError:
        finite = False
    if not finite:
        raise ConfigError(f"rewards.on_timeout is {rewards.on_timeout!r}, but it takes stop, none or a number")


def _check_optimizer(config: ConfigDict) -> None:
    """Raises ConfigError when the learning rate's settings contradict each other."""
    c = config.optimizer
    if c.warmup_steps > config.total_steps:
        raise ConfigError(f"optimizer.warmup_steps is {c.warmup_steps}, more than total_steps = {config.total_steps}")
    if c.warmup_steps and c.warmup_ratio:
        raise ConfigError(
            f"optimizer.warmup_steps is {c.warmup_steps} and warmup_ratio {c.warmup_ratio}: they say the same, set one"
        )
    if (c.schedule == "wsd") != (c.decay_steps > 0) or c.decay_steps > config.total_steps:
        raise ConfigError(
            f"optimizer.decay_steps is {c.decay_steps} with schedule {c.schedule}: wsd takes 1 to total_steps = "
            f"{config.total_steps}, the others 0"
        )


def _check_online(config: ConfigDict) -> None:
    """Raises ConfigError when the settings of an online algorithm contradict each other."""
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.beta == 0:
        off = {"kl_in_reward": False, "kl_bias_correction": False, "kl_controller": "fixed", "ref_sync_steps": 0}
        for key, value in off.items():
            if algorithm[key] != value:
                raise ConfigError(
                    f"algorithm.{key} is {algorithm[key]}, but algorithm.beta is 0 and there is no KL term: set beta, "
                    f"or {key} to {value}"
                )
    if algorithm.kl_bias_correction and algorithm.kl_in_reward:
        raise ConfigError(
            "algorithm.kl_bias_correction is for a KL term in the loss: set it or algorithm.kl_in_reward to false"
        )
    if algorithm.old_logps == "sampler" and algorithm.importance_correction != "none":
        raise ConfigError(
            f"algorithm.importance_correction is {algorithm.importance_correction}, but with algorithm.old_logps = "
            "sampler the ratio compares with the sampler already, and the correction would be 1 everywhere: set one of "
            "them to none or auto"
        )
    if algorithm.importance_min is not None and algorithm.importance_min >= algorithm.importance_max:
        raise ConfigError(
            f"algorithm.importance_min is {algorithm.importance_min}, but importance_max = {algorithm.importance_max} "
            "must be larger"
        )
    if not algorithm.entropy_coef_min <= algorithm.entropy_coef <= algorithm.entropy_coef_max and (
        algorithm.entropy_controller == "adaptive"
    ):
        raise ConfigError(
            f"algorithm.entropy_coef is {algorithm.entropy_coef}, outside entropy_coef_min = "
            f"{algorithm.entropy_coef_min} to entropy_coef_max = {algorithm.entropy_coef_max}"
        )
    if algorithm.overlong_buffer > rollout.max_completion_length:
        raise ConfigError(
            f"algorithm.overlong_buffer is {algorithm.overlong_buffer}, longer than rollout.max_completion_length = "
            f"{rollout.max_completion_length}"
        )
    clip = algorithm.reward_clip
    if clip and not (len(clip) == 2 and clip[0] < clip[1]):
        raise ConfigError(
            f"algorithm.reward_clip is {tuple(clip)}: give the smallest and the largest score, or nothing"
        )
    critic = config.critic
    if critic.shared and (critic.path is not None or critic.warmup_steps):
        raise ConfigError(
            f"critic.path is {critic.path} and critic.warmup_steps {critic.warmup_steps}, but critic.shared is true: "
            "the critic is part of the policy's own network and learns with it; set path to none and warmup_steps to 0"
        )
    if algorithm.replay_groups and algorithm.name == "ppo":
        raise ConfigError(
            f"algorithm.replay_groups is {algorithm.replay_groups}, but ppo's critic gives values for this step's rows "
            "only: set it to 0"
        )
    if (algorithm.dynamic_sampling or algorithm.replay_groups) and rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size is {rollout.group_size}, and a single completion always scores like itself: "
            "algorithm.dynamic_sampling and replay_groups need 2 or more"
        )


def _check_data(config: ConfigDict) -> None:
    """Raises ConfigError when the settings of the data contradict each other, or cannot be read."""
    data = config.data
    split_options(f"data.chat_template_kwargs({data.chat_template_kwargs})")
    for key in ("packing", "precompute_reference"):
        if data.streaming and data[key]:
            raise ConfigError(
                f"data.{key} needs all rows before training, and data.streaming is true: set one to false"
            )
    weights = []
    for source in data.sources:
        options = source if isinstance(source, Mapping) else split_options(source)[1]
        weights.append(options.get("weight"))
        _check_written(f"data.sources has {source!r}", options)
    if data.packing and any(weight is not None for weight in weights):
        raise ConfigError(
            "data.sources are mixed by weight, which data.packing would undo: leave the weights out, or set "
            "data.packing to false"
        )


def _check_written(what: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for the options of a source that config.json cannot hold."""
    try:
        json.dumps(dict(options))
    except TypeError as error:
        raise ConfigError(
            f"{what}, which cannot be written to a file ({error}): name functions by their file, "
            "path/to/file.py:function, and give data in memory to train(config, train_dataset=...)"
        ) from error


def _check_offline(config: ConfigDict) -> None:
    """Raises ConfigError when the settings of an offline algorithm contradict each other."""
    algorithm, batch, data, together = config.algorithm, config.batch, config.data, rows_together(config)
    if together == 2 and batch.prompts % batch.minibatches:
        raise ConfigError(
            f"batch.minibatches is {batch.minibatches}, but it must divide batch.prompts = {batch.prompts}: a pair "
            "stays together"
        )
    if batch.microbatch_rows % together:
        raise ConfigError(
            f"batch.microbatch_rows is {batch.microbatch_rows}, but the two rows of a pair stay together (as do kto's "
            "row and its mismatch): make it even"
        )
    if data.packing and algorithm.name != "sft":
        raise ConfigError(f"data.packing is for sft only, and algorithm.name is {algorithm.name!r}: set it to false")
    if algorithm.name == "reward_model" and config.eval.measure in ("samples", "both"):
        raise ConfigError(f"eval.measure is {config.eval.measure}, but a reward model writes nothing: set auto or loss")
    if algorithm.name != "preference":
        return
    losses = loss_names(config)
    if algorithm.beta == 0:
        raise ConfigError("algorithm.beta is 0, but preference losses need one above 0: 0.1 is usual, 2 for simpo")
    if algorithm.loss_weights and len(algorithm.loss_weights) != len(losses):
        raise ConfigError(
            f"algorithm.loss_weights has {len(algorithm.loss_weights)} numbers for the {len(losses)} losses of "
            f"algorithm.loss = {algorithm.loss!r}: give one each, or none"
        )
    if len(losses) > 1 and (found := set(losses) & set(LABELLED)):
        raise ConfigError(f"algorithm.loss is {algorithm.loss!r}, but {found.pop()} stands alone: it reads other rows")
    if losses == ["kto"] and batch.prompts < 2 * batch.minibatches:
        raise ConfigError(
            f"batch.prompts is {batch.prompts}, but kto compares the rows of a minibatch: give each at least 2"
        )
    if losses == ["kto"] and data.precompute_reference:
        raise ConfigError(
            "data.precompute_reference is true, but kto pairs each prompt with the completion of another row of its "
            "batch, which is not known before: set it to false"
        )


def to_json(config: ConfigDict) -> str:
    """The configuration as JSON text, one key a line; `from_json` gives it back."""
    return json.dumps(config.to_dict(), indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> ConfigDict:
    """The configuration `to_json` wrote; keys that the text lacks have their default.

    Raises ConfigError for text that is no JSON object, an unknown key or a wrong value.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the configuration is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"the configuration must be a JSON object, but is a {type(tree).__name__}")
    config = default()
    for name, value in _settings(tree).items():
        assign(config, name, value)
    validate(config)
    return config


def flat(tree: Mapping[str, Any] | ConfigDict, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by their full names, `{"optimizer.learning_rate": 1e-6}`; an empty dictionary
    is a leaf."""
    found: dict[str, Any] = {}
    for name in tree:
        value = tree[name]
        if isinstance(value, Mapping | ConfigDict) and len(value):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _settings(tree: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """The leaves of the tree, without sections that are empty."""
    return {name: x for name, x in flat(tree).items() if not isinstance(x, Mapping | ConfigDict)}


def assign(config: ConfigDict, name: str, value: Any) -> None:
    """Sets the key with the full name `name`; raises ConfigError for an unknown key or a value it does not take."""
    if name not in _BY_NAME:
        raise ConfigError(f"there is no key {name}; the closest is {closest(name, _BY_NAME)}")
    _BY_NAME[name].check(value)
    section, _, leaf = name.rpartition(".")
    (config[section] if section else config)[leaf] = value


def reference() -> str:
    """The text of docs/configuration.md: one table per section, every key with default, allowed values and meaning."""
    parts = [
        "# Configuration\n\n"
        "Every key, its default and what it takes. A config file (see `configs/`) starts from "
        "`jaxrl_llm.config.default()` and changes some; the command line changes more: "
        "`--config.rollout.temperature=0.8`. This page is written by `python -m jaxrl_llm.config`.\n"
    ]
    for section, meaning in SECTIONS.items():
        parts.append(f"\n## {section or 'Top level'}\n\n{meaning}\n\n")
        parts.append("| key | default | allowed | meaning |\n|---|---|---|---|\n")
        for key in KEYS:
            if key.name.rpartition(".")[0] == section:
                cells = (f"`{key.name}`", f"`{key.show(key.default)}`", key.allowed, key.doc)
                parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)
