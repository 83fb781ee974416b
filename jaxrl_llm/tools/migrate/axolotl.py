"""The rules for axolotl, which trains with TRL: its YAML becomes TRL's keys with axolotl's defaults, and these ours."""

import math
import re
from typing import Any

from jaxrl_llm.data.formats.lookup import known
from jaxrl_llm.data.named_templates import TEMPLATES
from jaxrl_llm.tools.migrate import shared, trl, trl_run
from jaxrl_llm.tools.migrate.draft import Draft, Options, RefusedError, Source, short
from jaxrl_llm.tools.migrate.losses import with_options
from jaxrl_llm.tools.migrate.table import CONVERT, defaults, rules, table

RULES = rules("axolotl")
TRACKERS = RULES["trackers"]
PROJECTS = (*filter(None, TRACKERS.values()), "swanlab_project")
RUN_NAMES = ("wandb_name", "mlflow_run_name", "trackio_run_name", "swanlab_experiment_name", "swanlab_run_name")
FEWER_BITS = {"int8": "int8", "int4": "int4", **dict.fromkeys(("fp8", "float8", "float8_e4m3fn"), "fp8")}
ROWS = r"\[\d*(:\d*)?\]$"  # of a matrix, behind a pattern
CHAT = (  # options of the format chat_template
    "field_messages", "field_system", "message_property_mappings", "roles", "roles_to_train", "train_on_eos",
    "message_field_training", "message_field_training_detail", "drop_system_message",
)  # fmt: skip
OVERLONG = {"drop": "filter", "truncate": "truncate_right", "raise": "error"}
OF_STEPS = ("step_separator", "train_on_last_step_only", "max_completion_length")  # said by data sets of steps
WARMUP_RATIO, WARMUP_MOST = 0.03, 100  # of the steps, where the file sets no warm-up


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for an axolotl YAML."""
    yaml = source.settings
    kind, trainers = yaml.get("rl"), RULES["trainers"]
    if kind is not None and kind not in trainers:  # without it the file would be one of fine-tuning
        raise RefusedError(f"{source.path}: rl is {kind!r}, which has no equivalent; there are {', '.join(trainers)}")
    for key in ("gkd_trainer", "kd_trainer"):
        if yaml.get(key):
            raise RefusedError(
                f"{source.path}: {key} distils a teacher, which is not migrated from axolotl: see docs/distillation.md "
                "(teacher.path, teacher.form=divergence, teacher.beta), and migrate the rest without this key"
            )
    models = {"reward_model": "reward", "process_reward_model": "prm"}
    trainer = trainers[kind] if kind else next((models[key] for key in models if yaml.get(key)), "sft")
    theirs = {**defaults("trl", trainer), **RULES["defaults"]}
    if trainer == "grpo":
        del theirs["max_length"]
    elif trainer == "prm":
        del theirs["max_completion_length"]
    rows, size = _rows(yaml, options), float(yaml.get("val_set_size") or 0)
    held = 0 if yaml.get("test_datasets") else math.ceil(rows * size if size < 1 else size)
    options = options._replace(rows=max(rows - held, 0), devices=_replicas(yaml, options))
    title = (
        f"{f'rl: {kind}' if kind else trainer}, from FILE of axolotl; what that leaves out is as in axolotl and TRL."
    )
    draft = Draft(source, title, theirs, _translated(yaml, trainer, kind))
    if "learning_rate" not in yaml:
        draft.check("learning_rate is missing, and axolotl has no default for it: set optimizer.learning_rate")
    trl.apply(draft, trainer, options)
    _rest(draft, yaml, trainer, rows)
    return draft


def _rows(yaml: dict[str, Any], options: Options) -> int:
    """Return the rows of all data sets, those that val_set_size holds out among them; 0 where they are unknown."""
    counts = [
        shared.known_rows(options, one.get("data_files") or one.get("path"), one.get("split") or "train")
        for one in yaml.get("datasets") or ()
    ]
    return options.rows or (sum(counts) if all(counts) else 0)


def _replicas(yaml: dict[str, Any], options: Options) -> int:
    """Return the devices that have rows of their own: context and tensor parallel ones share theirs."""
    sizes = (yaml.get(key) for key in ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size"))
    return max(options.devices // math.prod(int(size or 1) for size in sizes), bool(options.devices))


def _translated(yaml: dict[str, Any], trainer: str, kind: str | None) -> dict[str, tuple[str, Any]]:
    """Return TRL's key -> (axolotl's key, value)."""
    theirs: dict[str, tuple[str, Any]] = {}
    for key, value in yaml.items():
        name = key.removeprefix("trl.") if key.startswith("trl.") else RULES["names"].get(key)
        if name is not None:
            theirs[name] = (key, value)
    if "batch_size" in yaml and "gradient_accumulation_steps" not in yaml:
        accumulated = max(1, int(yaml["batch_size"]) // int(yaml.get("micro_batch_size") or 1))
        theirs["gradient_accumulation_steps"] = ("batch_size", accumulated)
    for key in ("orpo_alpha", "rl_beta", "trl.beta"):
        if key in yaml:
            theirs["beta"] = (key, yaml[key])
    if kind in (losses := RULES["losses"]) and ("loss_type" not in theirs or kind in ("ipo", "simpo")):
        theirs["loss_type"] = ("rl", losses[kind])
    if kind == "gdpo":
        theirs.setdefault("multi_objective_aggregation", ("rl", "normalize_then_sum"))
    if kind != "dpo":
        theirs.pop("label_smoothing", None)
    if trainer == "grpo":
        theirs.pop("max_length", None)
    for name in ("desirable_weight", "undesirable_weight"):
        if name in theirs and not theirs[name][1]:
            theirs[name] = (theirs[name][0], 1.0)
    if trainer == "prm":
        first = next(iter(yaml.get("datasets") or ()), {})
        theirs |= {name: ("datasets", first[name]) for name in OF_STEPS if first.get(name)}
    if yaml.get("bf16") in ("auto", "full"):
        theirs["bf16"] = ("bf16", True if yaml["bf16"] == "full" else None)
    if yaml.get("adapter"):
        theirs["use_peft"] = ("adapter", True)
        theirs["lora_target_modules"] = ("lora_target_modules", yaml.get("lora_target_modules"))
        theirs["lora_target_parameters"] = ("lora_target_parameters", yaml.get("lora_target_parameters"))
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
    theirs["dataset_name"] = ("datasets", "DATA" if yaml.get("datasets") else None)  # their rows are counted already
    if yaml.get("hub_model_id"):
        hub = {"push_to_hub": True, "hub_model_id": yaml["hub_model_id"], "hub_private_repo": True}
        theirs |= {key: ("hub_model_id", value) for key, value in hub.items()}
    trackers = [name for name in TRACKERS if yaml.get(f"use_{name}") or yaml.get(TRACKERS[name])]
    if trackers:
        switch = f"use_{trackers[0]}"
        theirs["report_to"] = (switch if switch in yaml else TRACKERS[trackers[0]], trackers)
    return theirs


def _rest(draft: Draft, yaml: dict[str, Any], trainer: str, rows: int) -> None:
    """Set what has no name in TRL; `rows` are those of all data sets, 0 where they are unknown."""
    for entry in table("axolotl"):
        for key in entry.keys:
            if entry.direct and key in yaml:
                draft.set(entry.ours, CONVERT.get(key, lambda value: value)(yaml[key]), key)
    if yaml.get(key := "trl.async_prefetch"):
        draft.set("rollout.staleness", int(yaml.get("trl.prefetch_depth") or 1), key, "trl.prefetch_depth")
        if "algorithm.importance_correction" not in draft.values:
            draft.set("algorithm.importance_correction", "token_truncate", key)
            draft.check(f"{key}: rows of an earlier policy are corrected for here, by token_truncate")
    section = "overrides_of_model_config."
    entries = {key: value for key, value in yaml.items() if key.startswith(section)}
    if entries:
        written = ", ".join(f"{key.removeprefix(section)}={value!r}" for key, value in entries.items())
        draft.set("model.overrides", written, *entries)
    if any(key.partition(".")[0] == "qat" for key in yaml):
        _qat(draft, yaml)
    draft.drop("data.path")
    measured = "eval/"
    sources, tests = (
        [_source(draft, dataset, trainer, key) for dataset in yaml.get(key) or ()]
        for key in ("datasets", "test_datasets")
    )
    if yaml.get("val_set_size") and sources:
        if yaml.get("test_datasets"):
            draft.check(f"val_set_size = {yaml['val_set_size']} holds nothing out: test_datasets are evaluated on")
        else:
            shared.hold_out(draft, yaml["val_set_size"], "val_set_size", sources, rows)
    draft.set("data.sources", tuple(sources) or None, "datasets")
    if tests or "eval.fraction" in draft.values:
        draft.drop("data.eval_split")
    if yaml.get("rl"):  # takes this split where none is named, and sft the split test
        tests = [source | {"split": source.get("split", "train")} for source in tests]
    if len(tests) == 1 and tests[0].keys() <= {"path", "data_files", "split"}:
        draft.set("data.eval_path", tests[0].get("data_files") or tests[0].get("path"), "test_datasets")
        draft.set("data.eval_split", tests[0].get("split"), "test_datasets")
    elif tests:  # which axolotl joins to one
        draft.set("eval.sets", tuple({"set": "test", **source} for source in tests), "test_datasets")
        measured = "eval/test/"
        if best := draft.values.get("checkpoint.best"):
            draft.values["checkpoint.best"] = best.replace("eval/", measured, 1)
    if not (tests or "eval.fraction" in draft.values or any("eval_split" in one for one in sources)):
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
    if yaml.get("bf16", "auto") and not yaml.get("fp16"):
        draft.set("model.param_dtype", "bfloat16", "bf16")
    shared.tracked(draft, yaml, PROJECTS, RUN_NAMES)
    switches = (f"use_{name}" for name in TRACKERS)
    draft.use("val_set_size", "bf16", "rl", "reward_model", "process_reward_model", "adapter", *switches)
    labels = {"reward": 1, "prm": 2}.get(trainer)
    if labels is not None and yaml.get("num_labels", labels) != labels:
        draft.check(f"num_labels = {yaml['num_labels']} has no equivalent: such a model has {labels} here")
    if yaml.get("lora_model_dir"):
        draft.set("lora.path", yaml["lora_model_dir"], "lora_model_dir")
        draft.drop("lora.rank", "lora.alpha", "lora.targets", "lora.rslora")
    if patterns := yaml.get("unfrozen_parameters"):
        if yaml.get("adapter"):
            draft.check("unfrozen_parameters is left out: adapters are trained, and lora.modules_to_save beside them")
        else:
            whole = tuple(re.sub(ROWS, "", pattern) for pattern in patterns)
            if changed := [pattern for pattern in patterns if re.search(ROWS, pattern)]:
                draft.check(f"unfrozen_parameters names rows of a matrix, {short(changed)}: it is trained whole here")
            draft.set("model.trainable", whole, "unfrozen_parameters")
    if yaml.get("rl_adapter_ref_model") and yaml.get("adapter"):
        draft.set("lora.reference", "copy", "rl_adapter_ref_model")
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if key in yaml:
            draft.set("mesh.context", int(yaml[key]), key)
    total = draft.values["total_steps"]
    unset = not ({"warmup_steps", "warmup_ratio"} & set(yaml)) and yaml.get("lr_scheduler") not in trl_run.UNWARMED
    if held := yaml.get("cosine_constant_lr_ratio"):
        if draft.values["optimizer.schedule"] != "cosine" or not yaml.get("cosine_min_lr_ratio"):
            draft.check("cosine_constant_lr_ratio is read by axolotl beside cosine and cosine_min_lr_ratio alone")
        elif "num_epochs" in draft.values:
            draft.check(
                f"cosine_constant_lr_ratio = {held}: set optimizer.schedule_steps to this share of the run's steps"
            )
        else:
            draft.set("optimizer.schedule_steps", max(1, int(held * total)), "cosine_constant_lr_ratio")
    if unset and "num_epochs" in draft.values:  # the steps are not known, but what share of them it is
        draft.set("optimizer.warmup_ratio", WARMUP_RATIO, "warmup_ratio")
        draft.check(
            f"axolotl warms up for at most {WARMUP_MOST} steps: set optimizer.warmup_steps to that, in place of "
            f"warmup_ratio, where the run has more than {WARMUP_MOST / WARMUP_RATIO:.0f} steps"
        )
    elif unset:
        draft.set("optimizer.warmup_steps", min(int(WARMUP_RATIO * total), WARMUP_MOST), "warmup_steps")
    for key, ours in (("saves_per_epoch", "checkpoint.every"), ("evals_per_epoch", "eval.every")):
        if yaml.get(key) and draft.values[ours] != -1:
            draft.set(ours, max(1, round(total / (float(yaml.get("num_epochs", 1)) * yaml[key]))), key)
    if patience := yaml.get("early_stopping_patience"):
        metric, mode = ("reward", "max") if trainer == "grpo" else ("loss", "min")
        options = {"metric": f"{measured}{metric}", "mode": mode, "patience": patience}
        stopping = with_options("early_stopping", options)
        if draft.values.get("eval.every", 0) > 0:
            draft.set("callbacks", (stopping,), "early_stopping_patience")
        else:
            draft.use("early_stopping_patience")
            draft.check(
                "early_stopping_patience: nothing is evaluated while it trains; set eval.every, and callbacks to "
                f"({stopping!r},)"
            )
    template, text = yaml.get("chat_template"), yaml.get("chat_template_jinja")
    if template == "jinja" and text:
        draft.set("data.chat_template", text, "chat_template_jinja", "chat_template")
    elif str(template).removesuffix("_v1") in TEMPLATES:
        draft.set("data.chat_template", str(template).removesuffix("_v1"), "chat_template")
    elif template not in (None, "tokenizer_default"):
        draft.check(
            f"chat_template = {template}: the tokenizer's own template is used here; see that it is this one (python "
            "-m jaxrl_llm preview --config=... shows the rows), or name another with data.chat_template"
        )


def _qat(draft: Draft, yaml: dict[str, Any]) -> None:
    """Set the matrices in fewer bits that a model is trained for, as far as they are here."""
    of = {key.removeprefix("qat."): value for key, value in yaml.items() if key.startswith("qat.")}
    kind = FEWER_BITS.get(str(of.get("weight_dtype", "int8")))
    if kind is None:
        draft.check(f"qat: weights in {of['weight_dtype']} are not here, and the result is another model (model.qat)")
        return
    draft.set("model.qat", kind, "qat", "qat.weight_dtype")
    group = "of each column" if kind != "int4" else "of 64 inputs of a column"
    draft.check(f"qat: {kind} has a scale {group} here (group_size is {of.get('group_size', 32)} there)")
    for name in ("activation_dtype", "quantize_embedding", "fake_quant_after_n_steps"):
        if of.get(name):
            draft.check(
                f"qat.{name} = {of[name]} is left out: the matrices alone are quantised, from the first step on"
            )


def _chat(draft: Draft, source: dict[str, Any], dataset: dict[str, Any], key: str) -> None:
    """Give a data set of conversations the format chat_template, unless its rows are read so without one."""
    names = {name: value for name in ("role", "content") if (value := source.pop(f"message_field_{name}", None))}
    names |= source.pop("message_property_mappings", None) or {}
    ends, turns = source.pop("train_on_eot", None), source.get("train_on_eos", "turn")
    if ends not in (None, turns):
        draft.check(
            f"{key}: train_on_eot = {ends} is left out: what ends a turn is learned as train_on_eos says, {turns}"
        )
    if source.get("chat_template") == "tokenizer_default":
        del source["chat_template"]
    for name, usual in (("field_messages", "messages"), ("roles_to_train", ["assistant"]), ("train_on_eos", "turn")):
        if source.get(name) == usual:
            del source[name]
    # With neither, the last message alone is learned.
    unset = {name: None for name in ("roles_to_train", "train_on_eos") if name in dataset and dataset[name] is None}
    source |= {"message_property_mappings": names} if any(name != x for name, x in names.items()) else {}
    source |= unset if len(unset) == 2 else {}
    if any(name in source for name in CHAT):
        source["type"] = "chat_template"


def _source(draft: Draft, dataset: dict[str, Any], trainer: str, key: str) -> dict[str, Any]:
    """Return a data set of `key` with the name of its format as here; what has none is noted."""
    source = {name: value for name, value in dataset.items() if value is not None}
    kind = source.get("type")
    if trainer == "sft" and (kind in (None, "chat_template", "completion") or isinstance(kind, dict)):
        if isinstance(kind, dict):
            draft.check(f"{key}: the type {short(kind)} has no format for sft; write a function row -> dict")
        source.pop("type", None)
        if kind != "completion":
            _chat(draft, source, dataset, key)
        elif source.get("field") == "text":  # the column that is read
            del source["field"]
        plain = ("path", "name", "split", "ds_type", "data_files", *(("type", *CHAT) if "type" in source else ()))
        for name in [name for name in source if name not in plain]:
            draft.check(f"{key}: {name} = {short(source.pop(name))} has no equivalent for sft")
        return source
    if trainer == "prm":
        kind = source["type"] = {"stepwise_supervised": "stepwise"}.get(str(kind), kind)
        for name in OF_STEPS:
            if source.pop(name, defaults("trl", trainer).get(name)) != draft.get(name):
                draft.check(f"{key}: {name} differs between them, and is the same for all rows here")
    plain = str(kind).split(".", 1)
    names = known({"sft": "completions", "kto": "labels"}.get(trainer, "pairs"))
    theirs = isinstance(kind, str) and (len(plain) == 1 or plain[0] in RULES["formats"])  # no module of the user's
    if theirs and kind not in names and plain[-1] not in names:
        draft.check(
            f"{key}: the type {kind} has no format here; name one of docs/data.md, or a function row -> dict (type: "
            "file.py:function)"
        )
    return source
