"""The rules for ms-swift, which trains with TRL: flags of `swift sft`, `pt` and `rlhf` become TRL's, with its own
defaults."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.tools.migrate import shared, trl
from jaxrl_llm.tools.migrate.draft import Draft, Options, RefusedError, Source
from jaxrl_llm.tools.migrate.table import defaults, rules

RULES = rules("ms-swift")
STARTS = re.compile(r"(^|\s|/)swift (sft|pt|rlhf)\b|\bswift/cli/(sft|pt|rlhf)\.py\b")
# What changes what is learned and has no equivalent, while it is on.
ABSENT = (
    "lorap_lr_ratio", "use_galore", "lisa_activated_layers", "multi_turn_scheduler", "new_special_tokens",
    "freeze_parameters", "freeze_parameters_ratio", "trainable_parameters", "target_regex", "target_parameters",
    "enable_channel_loss", "response_prefix", "model_name", "model_author", "reward_model", "teacher_model_server",
    "rlsd", "sdar", "early_stop_interval", "vit_lr", "aligner_lr",
)  # fmt: skip


def trainer_of(words: Sequence[str]) -> str:
    """Return what a command trains: sft, pt, or the value of --rlhf_type."""
    line = " ".join(words)
    match = STARTS.search(line)
    kind = (match[2] or match[3]) if match else "rlhf" if "--rlhf_type" in line else "sft"
    named = re.search(r"--rlhf_type[ =](\w+)", line)
    return (named[1] if named else "dpo") if kind == "rlhf" else kind


def devices_of(variables: Mapping[str, str]) -> int:
    """Return the processes that the variables of a script name, 0 where they name none."""
    each, nodes = (str(variables.get(name, "")) for name in ("NPROC_PER_NODE", "NNODES"))
    return int(each) * (int(nodes) if nodes.isdigit() else 1) if each.isdigit() else 0


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for a command of ms-swift."""
    flags, stages = source.settings, RULES["stages"]
    kind = source.trainer or str(flags.get("rlhf_type", "sft"))
    if kind not in stages:
        raise RefusedError(f"{source.path}: {kind} of ms-swift has no equivalent; there are {', '.join(stages)}")
    if (task := flags.get("task_type", "causal_lm")) not in ("causal_lm", "seq_cls") or (
        task == "seq_cls" and kind != "rm"
    ):
        raise RefusedError(f"{source.path}: task_type is {task}, and models here write text or rate it")
    trainer = stages[kind]
    theirs = {**defaults("trl", trainer), **RULES["defaults"], **RULES.get(kind, {})}
    title = f"{kind}, from FILE of ms-swift; what that leaves out is as in ms-swift."
    devices = options.devices or int(flags.get("num_processes") or 1)
    draft = Draft(source, title, theirs, _translated(flags, kind, devices))
    trl.apply(draft, trainer, options._replace(devices=devices))
    draft.set_direct("ms-swift")
    draft.drop("data.path", "data.split", "data.eval_split")
    _data(draft, flags)
    if kind == "grpo":
        _rewards(draft, flags)
        _group(draft, flags)
    draft.use("rlhf_type", "tuner_type", "train_type", "num_processes", "task_type")
    shared.check_off(draft, flags, ABSENT)
    if flags.get("deepspeed") or flags.get("fsdp"):
        draft.set("mesh.fsdp", -1, "deepspeed", "fsdp")
        draft.set("mesh.data", 1, "deepspeed", "fsdp")
    return draft


def _translated(flags: dict[str, Any], kind: str, devices: int) -> dict[str, tuple[str, Any]]:
    """Return TRL's key -> (ms-swift's flag, value)."""
    named = RULES["names"]
    theirs = {named.get(key, key): (key, value) for key, value in flags.items()}
    for key in ("dataset", "reward_funcs", "reward_weights"):  # set by the rules below
        theirs.pop(key, None)
    theirs["dataset_name"] = ("dataset", "DATA")
    tuner = str(flags.get("tuner_type") or flags.get("train_type") or "lora")
    if tuner == "lora":
        theirs["use_peft"] = ("tuner_type", True)
    theirs.setdefault("learning_rate", ("learning_rate", 1e-5 if tuner == "full" else 1e-4))
    each = int(flags.get("per_device_train_batch_size") or 1)
    if "gradient_accumulation_steps" not in flags:
        steps = 1 if kind == "grpo" else max(1, math.ceil(16 / each / devices))
        theirs["gradient_accumulation_steps"] = ("gradient_accumulation_steps", steps)
    if kind in ("sft", "pt"):
        scale = str(flags.get("loss_scale", "default"))
        theirs["completion_only_loss"] = ("loss_scale", kind == "sft" and not scale.startswith("all"))
    if kind == "grpo" and "max_length" in flags:
        theirs["max_prompt_length"] = theirs.pop("max_length")
    if bits := flags.get("quant_bits"):
        theirs["load_in_8bit" if int(bits) == 8 else "load_in_4bit"] = ("quant_bits", True)
    if kind == "simpo":
        theirs["loss_type"], theirs["cpo_alpha"] = ("rlhf_type", "simpo"), ("cpo_alpha", flags.get("cpo_alpha", 0.0))
    if flags.get("enable_dft_loss"):
        theirs["loss_type"] = ("enable_dft_loss", "dft")
    if (thinks := flags.get("enable_thinking")) is not None:
        theirs["chat_template_kwargs"] = ("enable_thinking", {"enable_thinking": bool(thinks)})
    return theirs


def _data(draft: Draft, flags: dict[str, Any]) -> None:
    """Set the sources, whose names may end in the number of their rows, and what is held out of them."""

    def source(name: str) -> dict[str, Any]:
        path, _, count = str(name).removeprefix("HF::").removeprefix("MS::").partition("#")
        path, _, subset = path.partition(":") if "://" not in path else (path, "", "")
        rows = {"split": f"train[:{int(count)}]" if count.isdigit() else "train"}
        return {"path": path, **rows, **({"name": subset} if subset and subset != "default" else {})}

    def named(key: str) -> list[str]:
        return list(map(str, shared.listed(flags.get(key))))

    sources = [source(name) for name in named("dataset")]
    if any("#" in name for name in named("dataset")):
        draft.check("dataset: ms-swift draws as many rows as stand behind # at random; here the first ones are read")
    if len(sources) == 1:
        for key, value in sources[0].items():
            draft.set(f"data.{key}", value, "dataset")
    else:
        draft.set("data.sources", tuple(sources) or None, "dataset")
    if not sources:
        draft.set("data.path", "DATA")
        draft.check("the command names no dataset: set data.path")
    draft.check(
        "ms-swift finds the columns of rows by itself, and reads names without a path from ModelScope; data.format "
        "says what they are here (python -m jaxrl_llm preview --config=... shows the rows)"
    )
    columns = flags.get("columns")
    if isinstance(columns, dict):
        text = RULES["functions"]["renamed"]
        draft.set("data.format", draft.function("renamed", text, COLUMNS=repr(columns)), "columns")
    share = float(flags.get("split_dataset_ratio") or 0.0)
    if held := named("val_dataset"):
        draft.set("data.eval_path", source(held[0])["path"], "val_dataset")
        draft.set("data.eval_split", "train", "val_dataset")
    elif share:
        draft.set("eval.fraction", share, "split_dataset_ratio")
    if (held or share) and flags.get("eval_steps"):
        draft.take("eval.every", "eval_steps")
    elif not (held or share):
        draft.set("eval.every", -1)
    draft.use("dataset", "val_dataset", "split_dataset_ratio", "columns", "eval_steps", "eval_strategy")
    if system := flags.get("system"):
        if str(system).endswith(".txt"):
            draft.check(f"system = {system} is a file: write its text to data.system_prompt")
        else:
            draft.set("data.system_prompt", str(system), "system")
    if template := flags.get("template"):
        draft.check(f"template = {template}: the tokenizer's own template is used here, or data.chat_template")
    overlong = {"delete": "filter", "left": "truncate_left", "right": "truncate_right", "split": "split"}
    draft.set("data.overlong", overlong.get(str(flags.get("truncation_strategy"))), "truncation_strategy")
    if str(flags.get("loss_scale")) == "last_round":
        draft.set("data.loss_on", "last_turn", "loss_scale")
    draft.use("system", "template", "truncation_strategy", "loss_scale")


def _rewards(draft: Draft, flags: dict[str, Any]) -> None:
    """Set the rewards by their names in ms-swift; those of plugins are yours to write."""
    names = list(map(str, shared.listed(flags.get("reward_funcs"))))
    draft.checks = [text for text in draft.checks if not text.startswith("the file names no reward function")]
    weights = list(map(float, shared.listed(flags.get("reward_weights"))))
    written, kept = [], []
    for place, name in enumerate(names):
        if name == "soft_overlong":
            draft.set("algorithm.overlong_buffer", int(draft.get("soft_cache_length")), "soft_cache_length")
            continue
        kept += weights[place : place + 1]
        if name in RULES["functions"]:
            written.append(draft.function(name, RULES["functions"][name]))
        else:
            written.append(name)
            draft.check(f"reward_funcs: {name} is of a plugin, or of ms-swift: write a function, and name it here")
    draft.set("rewards.functions", tuple(written) or ("REWARD",), "reward_funcs")
    draft.set("rewards.weights", tuple(kept) or None, "reward_weights")
    draft.use("reward_funcs", "external_plugins", "soft_max_length", "soft_cache_length")


def _group(draft: Draft, flags: dict[str, Any]) -> None:
    """Set what ms-swift's GRPO has besides TRL's."""
    stops = flags.get("stop_words")
    draft.set("rollout.stop", (stops,) if isinstance(stops, str) else stops, "stop_words")
    estimator = str(flags.get("advantage_estimator", "grpo"))
    if estimator != "grpo":
        shared.check_known("advantage_estimator", estimator, known := {
            "rloo": "rloo", "reinforce_plus_plus": "reinforce_plus_plus_baseline",
        })  # fmt: skip
        draft.set("algorithm.advantage", known[estimator], "advantage_estimator")
        if draft.values.get("algorithm.beta") and flags.get("kl_in_reward", True):
            draft.set("algorithm.kl_in_reward", True, "kl_in_reward")
            draft.set("algorithm.kl", "k1", "kl_in_reward")
    if flags.get("dynamic_sample"):
        draft.set("algorithm.dynamic_sampling", True, "dynamic_sample")
        draft.set("algorithm.max_sampling_rounds", int(flags.get("max_resample_times") or 3), "max_resample_times")
    if flags.get("overlong_filter"):
        draft.set("algorithm.mask_truncated", True, "overlong_filter")
    draft.use("advantage_estimator", "kl_in_reward", "dynamic_sample", "max_resample_times", "overlong_filter")
