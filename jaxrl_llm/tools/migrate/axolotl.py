"""The rules for axolotl, which trains with TRL: its YAML becomes TRL's keys with axolotl's defaults, and these ours."""

from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate import shared, trl
from jaxrl_llm.tools.migrate.draft import Draft, Options, Source
from jaxrl_llm.tools.migrate.losses import with_options
from jaxrl_llm.tools.migrate.table import CONVERT, defaults, table

# Keys that axolotl hands to TRL, under the same name or another; those of the section trl have TRL's own names.
SAME = """trust_remote_code gradient_accumulation_steps max_steps learning_rate lr_scheduler_kwargs warmup_steps
    warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm seed output_dir save_steps save_strategy
    save_total_limit eval_steps eval_strategy logging_steps gradient_checkpointing bf16 fp16 simpo_gamma cpo_alpha
    precompute_ref_log_probs center_rewards_coefficient neftune_noise_alpha lora_r lora_alpha lora_dropout load_in_8bit
    load_in_4bit resume_from_checkpoint fsdp fsdp_config deepspeed"""
TRL_NAMES = {name: name for name in SAME.split()} | {
    "base_model": "model_name_or_path",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "dpo_loss_type": "loss_type",
    "dpo_loss_weights": "loss_weights",
    "dpo_label_smoothing": "label_smoothing",
    "dpo_use_weighting": "use_weighting",
    "peft_use_rslora": "use_rslora",
}
DEFAULTS = {
    "output_dir": "model-out",
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "save_strategy": "epoch",
    "save_total_limit": 4,
    "max_length": 512,
    "ref_model_mixup_alpha": 0.9,
    "ref_model_sync_steps": 64,
    "scale_rewards": True,
    "gradient_checkpointing": False,
    "bf16": None,
    "lora_dropout": 0.0,
}
TRAINERS = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "grpo": "grpo", "gdpo": "grpo"}
LOSSES = {"dpo": "sigmoid", "kto": "kto", "ipo": ["ipo"], "simpo": "simpo"}
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
WARMUP_RATIO, WARMUP_MOST = 0.03, 100  # of the steps, where the file sets no warm-up


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for an axolotl YAML."""
    yaml = source.settings
    kind = yaml.get("rl")
    if kind is not None and kind not in TRAINERS:
        raise ConfigError(f"{source.path}: rl is {kind!r}, which has no equivalent; there are {', '.join(TRAINERS)}")
    trainer = TRAINERS[kind] if kind else "reward" if yaml.get("reward_model") else "sft"
    if "learning_rate" not in yaml:
        raise ConfigError(f"{source.path}: learning_rate is missing, and axolotl has no default for it")
    theirs = {**defaults("trl", trainer), **DEFAULTS}
    if trainer == "grpo":
        del theirs["max_length"]
    title = (
        f"{f'rl: {kind}' if kind else trainer}, from FILE of axolotl; what that leaves out is as in axolotl and TRL."
    )
    draft = Draft(source, title, theirs, _translated(yaml, trainer, kind))
    trl.apply(draft, trainer, options)
    _rest(draft, yaml, trainer)
    return draft


def _translated(yaml: dict[str, Any], trainer: str, kind: str | None) -> dict[str, tuple[str, Any]]:
    """Return TRL's key -> (axolotl's key, value)."""
    theirs: dict[str, tuple[str, Any]] = {}
    for key, value in yaml.items():
        name = key.removeprefix("trl.") if key.startswith("trl.") else TRL_NAMES.get(key)
        if name is not None:
            theirs[name] = (key, value)
    for key in ("orpo_alpha", "rl_beta", "trl.beta"):
        if key in yaml:
            theirs["beta"] = (key, yaml[key])
    if kind in LOSSES and ("loss_type" not in theirs or kind in ("ipo", "simpo")):
        theirs["loss_type"] = ("rl", LOSSES[kind])
    if kind == "gdpo":
        theirs.setdefault("multi_objective_aggregation", ("rl", "normalize_then_sum"))
    if kind != "dpo":
        theirs.pop("label_smoothing", None)
    if trainer == "grpo":
        theirs.pop("max_length", None)
    for name in ("desirable_weight", "undesirable_weight"):
        if name in theirs and not theirs[name][1]:
            theirs[name] = (theirs[name][0], 1.0)
    if yaml.get("bf16") in ("auto", "full"):
        theirs["bf16"] = ("bf16", True if yaml["bf16"] == "full" else None)
    if yaml.get("adapter"):
        theirs["use_peft"] = ("adapter", True)
        theirs["lora_target_modules"] = ("lora_target_modules", yaml.get("lora_target_modules"))
        if yaml.get("lora_target_linear"):
            theirs["lora_target_modules"] = ("lora_target_linear", "all-linear")
        if yaml["adapter"] == "qlora":
            theirs.setdefault("load_in_4bit", ("adapter", True))
    if "eval_steps" in yaml:
        theirs.setdefault("eval_strategy", ("eval_steps", "steps"))
    if "save_steps" in yaml:
        theirs["save_strategy"] = ("save_steps", "steps")
    if "train_on_inputs" in yaml or trainer == "sft":
        theirs["completion_only_loss"] = ("train_on_inputs", not yaml.get("train_on_inputs", False))
    if "cosine_min_lr_ratio" in yaml:
        theirs["lr_scheduler_kwargs"] = ("cosine_min_lr_ratio", {"min_lr_rate": yaml["cosine_min_lr_ratio"]})
    dataset = (yaml.get("datasets") or [{}])[0]
    theirs["dataset_name"] = ("datasets", dataset.get("data_files") or dataset.get("path"))
    if yaml.get("hub_model_id"):
        hub = {"push_to_hub": True, "hub_model_id": yaml["hub_model_id"], "hub_private_repo": True}
        theirs |= {key: ("hub_model_id", value) for key, value in hub.items()}
    trackers = [name for name in TRACKERS if yaml.get(f"use_{name}") or yaml.get(TRACKERS[name])]
    if trackers:
        switch = f"use_{trackers[0]}"
        theirs["report_to"] = (switch if switch in yaml else TRACKERS[trackers[0]], trackers)
    return theirs


def _rest(draft: Draft, yaml: dict[str, Any], trainer: str) -> None:
    """Set what has no name in TRL."""
    for entry in table("axolotl"):
        for key in entry.keys:
            if entry.direct and key in yaml:
                draft.set(entry.ours, CONVERT.get(key, lambda value: value)(yaml[key]), key)
    draft.drop("data.path")
    draft.set("data.sources", tuple(_sources(yaml, trainer)) or None, "datasets", "val_set_size")
    tests = yaml.get("test_datasets")
    if tests:
        draft.set("data.eval_path", tests[0].get("data_files") or tests[0].get("path"), "test_datasets")
        draft.set("data.eval_split", tests[0].get("split", "train"), "test_datasets")
        if len(tests) > 1:
            draft.check("test_datasets: the first is evaluated on")
    if not tests and not yaml.get("val_set_size"):
        draft.set("eval.every", -1, "val_set_size")
    elif draft.values.get("eval.every") == -1 and not yaml.get("eval_strategy"):
        draft.set("eval.every", 0, "val_set_size")
    if trainer == "grpo":
        if yaml.get("trl.replay_buffer_size"):
            draft.set("algorithm.replay_groups", int(yaml["trl.replay_buffer_size"]), "replay_buffer_size")
        draft.drop("data.max_length")
        if "sequence_len" in yaml:
            draft.check(
                "sequence_len is not read by grpo: rollout.max_prompt_length and max_completion_length are the limits"
            )
    else:
        strategy = yaml.get("excess_length_strategy", "drop")
        draft.set("data.overlong", OVERLONG.get(strategy, "filter"), "excess_length_strategy")
    if yaml.get("bf16", "auto") and not yaml.get("fp16") and not draft.values.get("model.quantize"):
        draft.set("model.param_dtype", "bfloat16", "bf16")
    shared.tracked(draft, yaml, PROJECTS, RUN_NAMES)
    switches = (f"use_{name}" for name in TRACKERS)
    draft.use("val_set_size", "bf16", "rl", "reward_model", "adapter", "chat_template", *switches)
    if yaml.get("lora_model_dir"):
        draft.set("lora.path", yaml["lora_model_dir"], "lora_model_dir")
        draft.drop("lora.rank", "lora.alpha", "lora.targets", "lora.rslora")
    if yaml.get("rl_adapter_ref_model") and yaml.get("adapter"):
        draft.set("lora.reference", "copy", "rl_adapter_ref_model")
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if key in yaml:
            draft.set("mesh.context", int(yaml[key]), key)
    total = draft.values["total_steps"]
    if not ({"warmup_steps", "warmup_ratio"} & set(yaml)):
        draft.set("optimizer.warmup_steps", min(int(WARMUP_RATIO * total), WARMUP_MOST), "warmup_steps")
    for key, ours in (("saves_per_epoch", "checkpoint.every"), ("evals_per_epoch", "eval.every")):
        if yaml.get(key):
            draft.set(ours, max(1, round(total / (float(yaml.get("num_epochs", 1)) * yaml[key]))), key)
    if patience := yaml.get("early_stopping_patience"):
        metric = (
            {"metric": "eval/reward", "mode": "max"} if trainer == "grpo" else {"metric": "eval/loss", "mode": "min"}
        )
        stopping = with_options("early_stopping", {**metric, "patience": patience})
        if draft.values.get("eval.every", 0) > 0:
            draft.set("callbacks", (stopping,), "early_stopping_patience")
        else:
            draft.use("early_stopping_patience")
            draft.check(
                "early_stopping_patience: nothing is evaluated while it trains; set eval.every, and callbacks to "
                f"({stopping!r},)"
            )
    if yaml.get("chat_template") not in (None, "tokenizer_default"):
        draft.check(
            f"chat_template = {yaml['chat_template']}: the tokenizer's own template is used here; see that it is this "
            "one (python -m jaxrl_llm preview --config=... shows the rows)"
        )


def _sources(yaml: dict[str, Any], trainer: str) -> list[dict[str, Any]]:
    """Return `data.sources` of the datasets; what is held out is a slice of each split."""
    size = float(yaml.get("val_set_size") or 0)
    end = str(int(size))
    if size < 1:  # a fraction; slices are in whole percent
        end = f"{size * 100:g}%" if size * 100 == int(size * 100) else f"{max(1, round(size * 100))}%"
    sources = []
    for dataset in yaml.get("datasets") or ():
        source = {key: value for key, value in dataset.items() if value is not None}
        if trainer == "sft" and source.get("type") == "chat_template":
            del source["type"]
        if size > 0:
            split = source.get("split", "train")
            source |= {"split": f"{split}[{end}:]", "eval_split": f"{split}[:{end}]"}
        sources.append(source)
    return sources
