"""The rules for axolotl, which trains with TRL: its YAML becomes TRL's keys with axolotl's defaults, and these ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigDict
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate import shared, trl, trl_keys
from jaxrl_llm.tools.migrate.axolotl_keys import DEFAULTS, TABLE, TRL_NAMES
from jaxrl_llm.tools.migrate.draft import Draft, Options, Source
from jaxrl_llm.tools.migrate.trl_defaults import defaults

TRAINERS = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "grpo": "grpo", "gdpo": "grpo"}
# The trackers, and the key that switches each on beside use_NAME.
TRACKERS = {
    "wandb": "wandb_project",
    "mlflow": "mlflow_experiment_name",
    "tensorboard": "",
    "comet": "comet_project_name",
    "trackio": "trackio_project_name",
    "swanlab": "",
}
PROJECTS = (*filter(None, TRACKERS.values()), "swanlab_project")
RUN_NAMES = ("wandb_name", "mlflow_run_name", "trackio_run_name", "swanlab_experiment_name", "swanlab_run_name")
OVERLONG = {"drop": "filter", "truncate": "truncate_right", "raise": "error"}
WARMUP_SHARE, WARMUP_MOST = 0.03, 100


def convert(source: Source, options: Options) -> tuple[ConfigDict, str]:
    """Our configuration, and the file that makes it."""
    made = draft(source, options)
    return made.finish(), made.text()


def draft(source: Source, options: Options) -> Draft:
    """Our settings for an axolotl YAML."""
    given = {key: value for key, value in _flat(source.given).items() if value is not None}
    kind = given.get("rl")
    if kind is not None and kind not in TRAINERS:
        raise ConfigError(f"{source.path}: rl is {kind!r}, which has no equivalent; there are {', '.join(TRAINERS)}")
    trainer = TRAINERS[kind] if kind else "reward" if given.get("reward_model") else "sft"
    if "learning_rate" not in given:
        raise ConfigError(f"{source.path}: learning_rate is missing, and axolotl has no default for it")
    translated = _translated(given, trainer, kind)
    merged = {**defaults(trainer), **DEFAULTS}
    if trainer == "grpo":
        merged.pop("max_length")
    made = AxolotlDraft(source, given, translated, merged, f"rl: {kind}" if kind else trainer)
    trl.filled(made, trainer, options)
    _rest(made, given, trainer)
    return made


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, those of trl, vllm and the like as `trl.beta`; lists and the dictionaries in them as they are."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and key not in (
            "lr_scheduler_kwargs",
            "gradient_checkpointing_kwargs",
            "fsdp_config",
        ):
            found |= {f"{key}.{name}": one for name, one in value.items()}
        else:
            found[key] = value
    return found


class AxolotlDraft(Draft):
    """A draft that reads TRL's keys, and names axolotl's."""

    def __init__(self, source: Source, given: dict[str, Any], translated: dict[str, tuple[str, Any]],
                 defaults: Mapping[str, Any], what: str):  # fmt: skip
        title = f"{what}, from {Path(source.path).name} of axolotl; what that leaves out is as in axolotl and TRL."
        super().__init__(source._replace(given={key: value for key, (_, value) in translated.items()}), defaults,
                         trl_keys.TABLE, title)  # fmt: skip
        self.yaml, self.theirs = given, {key: name for key, (name, _) in translated.items()}
        self.touched: set[str] = set()

    def set(self, ours: str, value: Any, *theirs: str) -> None:
        super().set(ours, value, *theirs)
        if value is not None:
            said = [self.theirs[key] for key in theirs if key in self.theirs]
            said += [key for key in theirs if key in self.yaml and key not in self.theirs]
            if said:
                self.origins[ours] = ", ".join(dict.fromkeys(said))

    def use(self, *theirs: str) -> None:
        super().use(*theirs)
        self.touched |= {self.theirs.get(key, key) for key in theirs}

    def finish(self) -> ConfigDict:
        inner = self.source, self.table, self.used
        self.source, self.table = self.source._replace(given=self.yaml), TABLE
        self.used = self.touched
        try:
            return super().finish()
        finally:
            self.source, self.table, self.used = inner


def _translated(given: Mapping[str, Any], trainer: str, kind: str | None) -> dict[str, tuple[str, Any]]:
    """TRL's key -> (axolotl's key, value)."""
    found: dict[str, tuple[str, Any]] = {}
    for key, value in given.items():
        if key.startswith("trl."):
            found[key.removeprefix("trl.")] = (key, value)
        elif key in TRL_NAMES:
            found[TRL_NAMES[key]] = (key, value)
    for key in ("orpo_alpha", "rl_beta", "trl.beta"):
        if key in given:
            found["beta"] = (key, given[key])
    if kind in ("dpo", "kto"):
        found.setdefault("loss_type", ("rl", "sigmoid" if kind == "dpo" else kind))
    if kind == "ipo":
        found["loss_type"] = ("rl", ["ipo"])
    if kind == "simpo":
        found["loss_type"] = ("rl", "simpo")
    if kind == "gdpo":
        found.setdefault("multi_objective_aggregation", ("rl", "normalize_then_sum"))
    if kind != "dpo":
        found.pop("label_smoothing", None)
    if trainer == "grpo":
        found.pop("max_length", None)
    for name in ("desirable_weight", "undesirable_weight"):
        if name in found and not found[name][1]:
            found[name] = (found[name][0], 1.0)
    if found.get("bf16", ("", ""))[1] in ("auto", "full"):
        found["bf16"] = ("bf16", True if found["bf16"][1] == "full" else None)
    if given.get("adapter"):
        found["use_peft"] = ("adapter", True)
        found["lora_target_modules"] = _targets(given)
        if given["adapter"] == "qlora":
            found.setdefault("load_in_4bit", ("adapter", True))
    if "eval_steps" in given:
        found.setdefault("eval_strategy", ("eval_steps", "steps"))
    if "save_steps" in given:
        found["save_strategy"] = ("save_steps", "steps")
    if "train_on_inputs" in given or trainer == "sft":
        found["completion_only_loss"] = ("train_on_inputs", not given.get("train_on_inputs", False))
    if "cosine_min_lr_ratio" in given:
        found["lr_scheduler_kwargs"] = ("cosine_min_lr_ratio", {"min_lr_rate": given["cosine_min_lr_ratio"]})
    datasets = given.get("datasets") or [{}]
    found["dataset_name"] = ("datasets", datasets[0].get("data_files") or datasets[0].get("path"))
    if given.get("hub_model_id"):
        found |= {"push_to_hub": ("hub_model_id", True), "hub_model_id": ("hub_model_id", given["hub_model_id"]),
                  "hub_private_repo": ("hub_model_id", True)}  # fmt: skip
    trackers = [name for name in TRACKERS if given.get(f"use_{name}") or given.get(TRACKERS[name])]
    if trackers:
        said = f"use_{trackers[0]}"
        found["report_to"] = (said if said in given else TRACKERS[trackers[0]], trackers)
    return found


def _targets(given: Mapping[str, Any]) -> tuple[str, Any]:
    if given.get("lora_target_linear"):
        return "lora_target_linear", "all-linear"
    return "lora_target_modules", given.get("lora_target_modules")


def _rest(made: AxolotlDraft, given: Mapping[str, Any], trainer: str) -> None:
    """What has no name in TRL."""
    for one in TABLE:
        for key in one.keys:
            if one.convert is not None and key in given:
                made.set(one.ours, one.convert(given[key]), key)
    made.values.pop("data.path", None)
    made.set("data.sources", tuple(_sources(given, trainer)) or None, "datasets", "val_set_size")
    _held_out(made, given)
    if trainer == "grpo":
        _grpo(made, given)
    else:
        strategy = given.get("excess_length_strategy", "drop")
        made.set("data.overlong", OVERLONG.get(strategy, "filter"), "excess_length_strategy")
    if given.get("bf16", "auto") and not given.get("fp16") and not made.values.get("model.quantize"):
        made.set("model.param_dtype", "bfloat16", "bf16")
    shared.tracked(made, given, PROJECTS, RUN_NAMES)
    made.use("bf16", "rl", "reward_model", "adapter", "chat_template", *(f"use_{name}" for name in TRACKERS))
    if given.get("lora_model_dir"):
        made.set("lora.path", given["lora_model_dir"], "lora_model_dir")
        for key in ("rank", "alpha", "targets", "rslora"):
            made.values.pop(f"lora.{key}", None)
    if given.get("rl_adapter_ref_model") and given.get("adapter"):
        made.set("lora.reference", "copy", "rl_adapter_ref_model")
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if key in given:
            made.set("mesh.context", int(given[key]), key)
    total = made.values["total_steps"]
    if not ({"warmup_steps", "warmup_ratio"} & set(given)):
        made.set("optimizer.warmup_steps", min(int(WARMUP_SHARE * total), WARMUP_MOST), "warmup_steps")
    for key, ours in (("saves_per_epoch", "checkpoint.every"), ("evals_per_epoch", "eval.every")):
        if given.get(key):
            made.set(ours, max(1, round(total / (float(given.get("num_epochs", 1)) * given[key]))), key)
    _early_stopping(made, given.get("early_stopping_patience"), trainer)
    if given.get("chat_template") not in (None, "tokenizer_default"):
        made.check(f"chat_template = {given['chat_template']}: the tokenizer's own template is used here; see that it "
                   f"is "
                   "this one (python -m jaxrl_llm preview --config=... shows the rows)")  # fmt: skip


def _early_stopping(made: AxolotlDraft, patience: int | None, trainer: str) -> None:
    watched = "'eval/reward', mode='max'" if trainer == "grpo" else "'eval/loss', mode='min'"
    stopping = f"early_stopping(metric={watched}, patience={patience})"
    if patience and made.values.get("eval.every", 0) > 0:
        made.set("callbacks", (stopping,), "early_stopping_patience")
    elif patience:
        made.check(f"early_stopping_patience: nothing is evaluated while it trains; set eval.every, and callbacks to "
                   f"({stopping!r},)")  # fmt: skip
        made.use("early_stopping_patience")


def _sources(given: Mapping[str, Any], trainer: str) -> list[dict[str, Any]]:
    """`data.sources` of the datasets; a held-out share is a slice of each split."""
    share = float(given.get("val_set_size") or 0)
    found = []
    for dataset in given.get("datasets") or ():
        one = {key: value for key, value in dataset.items() if value is not None}
        if trainer == "sft" and one.get("type") == "chat_template":
            del one["type"]
        if 0 < share < 1:
            split = one.get("split", "train")
            percent = f"{share * 100:g}%" if share * 100 == int(share * 100) else f"{max(1, round(share * 100))}%"
            one |= {"split": f"{split}[{percent}:]", "eval_split": f"{split}[:{percent}]"}
        elif share >= 1:
            split = one.get("split", "train")
            one |= {"split": f"{split}[{int(share)}:]", "eval_split": f"{split}[:{int(share)}]"}
        found.append(one)
    return found


def _held_out(made: AxolotlDraft, given: Mapping[str, Any]) -> None:
    tests = given.get("test_datasets")
    if tests:
        made.set("data.eval_path", tests[0].get("data_files") or tests[0].get("path"), "test_datasets")
        made.set("data.eval_split", tests[0].get("split", "train"), "test_datasets")
        if len(tests) > 1:
            made.check("test_datasets: the first is evaluated on")
    if not tests and not given.get("val_set_size"):
        made.set("eval.every", -1, "val_set_size")
    elif made.values.get("eval.every") == -1 and not given.get("eval_strategy"):
        made.set("eval.every", 0, "val_set_size")
    made.use("val_set_size")


def _grpo(made: AxolotlDraft, given: Mapping[str, Any]) -> None:
    if given.get("trl.replay_buffer_size"):
        made.set("algorithm.replay_groups", int(given["trl.replay_buffer_size"]), "replay_buffer_size")
    made.values.pop("data.max_length", None)
    if "sequence_len" in given:
        made.check(
            "sequence_len is not read by grpo: rollout.max_prompt_length and max_completion_length are the limits"
        )
