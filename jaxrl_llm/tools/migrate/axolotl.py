"""The rules for axolotl, which trains with TRL: its YAML becomes TRL's keys with axolotl's defaults, and these ours."""

import math
import re
from typing import Any

from jaxrl_llm.data.formats.lookup import known
from jaxrl_llm.data.named_templates import TEMPLATES
from jaxrl_llm.tools.migrate import distillation, shared, trl, trl_run
from jaxrl_llm.tools.migrate.draft import IN_FEW_BITS, Draft, Options, RefusedError, Source, has_experts, short
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
    "message_field_training", "message_field_training_detail", "drop_system_message", "field_tools", "field_thinking",
    "template_thinking_key", "split_thinking",
)  # fmt: skip
CHAT_DEFAULTS = {
    "field_messages": "messages", "roles_to_train": ["assistant"], "train_on_eos": "turn", "field_tools": "tools",
    "field_thinking": "reasoning_content", "template_thinking_key": "reasoning_content", "split_thinking": False,
}  # fmt: skip
OVERLONG = {"drop": "filter", "truncate": "truncate_right", "raise": "error"}
OF_STEPS = ("step_separator", "train_on_last_step_only", "max_completion_length")  # said by data sets of steps
ONE_CYCLE = 25.0, 1e4  # of torch: the peak is so many times the first rate, and that so many times the last
KL = {"forward_kl": 0.0, "fkl": 0.0, "reverse_kl": 1.0, "rkl": 1.0}  # teacher.beta of a gkd_divergence
WARMUP_RATIO, WARMUP_MOST = 0.03, 100  # of the steps, where the file sets no warm-up


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for an axolotl YAML."""
    yaml = source.settings
    kind, trainers = yaml.get("rl"), RULES["trainers"]
    if kind is not None and kind not in trainers:  # without it the file would be one of fine-tuning
        raise RefusedError(f"{source.path}: rl is {kind!r}, which has no equivalent; there are {', '.join(trainers)}")
    if yaml.get("kd_trainer") and not yaml.get("kd_online_server_base_url"):
        raise RefusedError(
            f"{source.path}: kd_trainer learns from log-probs of a teacher that are in the rows, and no format reads "
            "them: serve it (kd_online_server_base_url, kd_online_topk), or give its path as teacher.path with "
            "teacher.form=divergence (docs/distillation.md), and migrate the rest without this key"
        )
    models = {"reward_model": "reward", "process_reward_model": "prm", "gkd_trainer": "gkd"}
    trainer = trainers[kind] if kind else next((models[key] for key in models if yaml.get(key)), "sft")
    theirs = {**defaults("trl", trainer), **RULES["defaults"], **RULES["own_defaults"].get(trainer, {})}
    if trainer == "grpo":
        del theirs["max_length"]
    elif trainer == "prm":
        del theirs["max_completion_length"]
    # Those that val_set_size holds out are among them.
    rows, size = shared.all_rows(options, yaml.get("datasets") or ()), float(yaml.get("val_set_size") or 0)
    held = 0 if yaml.get("test_datasets") else math.ceil(rows * size if size < 1 else size)
    # Devices that have rows of their own: context and tensor parallel ones share theirs.
    sharing = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size")
    count = options.devices or int(yaml.get("num_processes") or 0)
    devices = max(count // math.prod(int(yaml.get(key) or 1) for key in sharing), bool(count))
    options = options._replace(rows=max(rows - held, 0), devices=devices)
    title = (
        f"{f'rl: {kind}' if kind else trainer}, from FILE of axolotl; what that leaves out is as in axolotl and TRL."
    )
    draft = Draft(source, title, theirs, _translated(yaml, trainer, kind))
    if "learning_rate" not in yaml:
        draft.check("learning_rate is missing, and axolotl has no default for it: set optimizer.learning_rate")
    trl.apply(draft, trainer, options)
    _rest(draft, yaml, trainer, rows)
    return draft


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
    if loftq := next((key for key in yaml if key.startswith("peft.loftq_config")), None):
        theirs["init_lora_weights"] = (loftq, "loftq")
    if "eval_steps" in yaml:
        theirs.setdefault("eval_strategy", ("eval_steps", "steps"))
    if "save_steps" in yaml:
        theirs["save_strategy"] = ("save_steps", "steps")
    if "train_on_inputs" in yaml or trainer == "sft":
        theirs["completion_only_loss"] = ("train_on_inputs", not yaml.get("train_on_inputs", False))
    if "cosine_min_lr_ratio" in yaml:
        theirs["lr_scheduler_kwargs"] = ("cosine_min_lr_ratio", {"min_lr_rate": yaml["cosine_min_lr_ratio"]})
    if yaml.get("lr_scheduler") == "one_cycle":
        theirs["lr_scheduler_type"] = ("lr_scheduler", "cosine")
    named = yaml.get("datasets") or yaml.get("pretraining_dataset")
    theirs["dataset_name"] = ("datasets", "DATA" if named else None)  # their rows are counted already
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
    _model(draft, yaml)
    _trained(draft, yaml)
    _teacher(draft, yaml, trainer)
    _algorithm(draft, yaml, trainer)
    measured = _data(draft, yaml, trainer, rows)
    _schedule(draft, yaml)
    _rates(draft, yaml)
    _stopping(draft, yaml, trainer, measured)
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if key in yaml:
            draft.set("mesh.context", int(yaml[key]), key)
    if yaml.get("fp8"):
        shared.fp8_matmuls(draft, "fp8")
    shared.tracked(draft, yaml, PROJECTS, RUN_NAMES)
    switches = (f"use_{name}" for name in TRACKERS)
    draft.use("val_set_size", "bf16", "fp8", "rl", "reward_model", "process_reward_model", "adapter", *switches)


def _model(draft: Draft, yaml: dict[str, Any]) -> None:
    """Set how the model is read and stored, and the tokens that are added to it."""
    section = "overrides_of_model_config."
    entries = {key: value for key, value in yaml.items() if key.startswith(section)}
    if entries:
        written = ", ".join(f"{key.removeprefix(section)}={value!r}" for key, value in entries.items())
        draft.set("model.overrides", written, *entries)
    if any(key.partition(".")[0] == "qat" for key in yaml):
        _qat(draft, yaml)
    if yaml.get("tiled_mlp"):
        tokens = int(yaml.get("sequence_len") or 512) * int(yaml.get("micro_batch_size") or 1)
        shards = int(yaml.get("tiled_mlp_num_shards") or 4)
        draft.set("model.mlp_tile_tokens", math.ceil(tokens / shards), "tiled_mlp", "tiled_mlp_num_shards")
    draft.use("tiled_mlp", "tiled_mlp_num_shards")
    if yaml.get("bf16", "auto") and not yaml.get("fp16"):
        draft.set("model.param_dtype", "bfloat16", "bf16")
    if draft.values.get("model.quantize") and has_experts(str(draft.values.get("model.path"))):
        of_experts = "same" if yaml.get("quantize_moe_experts") else "none"
        draft.set("model.quantize_experts", of_experts, "quantize_moe_experts")
    draft.use("quantize_moe_experts")
    if yaml.get("gptq"):
        draft.check(IN_FEW_BITS)
    for key, flag in (("tokens", ""), ("special_tokens.additional_special_tokens", " --special")):
        if added := yaml.get(key):
            draft.use(key)
            draft.check(
                f"{key}: python -m jaxrl_llm add_tokens --model={draft.values.get('model.path')} "
                f"--tokens='{','.join(map(str, added))}'{flag} --output=FOLDER writes the model with those that it "
                "lacks: set model.path to that folder"
            )


def _trained(draft: Draft, yaml: dict[str, Any]) -> None:
    """Set what is trained of the model."""
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
    if count := yaml.get("lisa_n_layers"):
        updates = draft.values.get("batch.minibatches", 1) * draft.values.get("algorithm.num_iterations", 1)
        draft.set("optimizer.lisa_layers", int(count), "lisa_n_layers")
        every = shared.divided(float(yaml.get("lisa_step_interval") or 20), updates)
        draft.set("optimizer.lisa_every", every, "lisa_step_interval")
        draft.use("lisa_layers_attribute")


def _algorithm(draft: Draft, yaml: dict[str, Any], trainer: str) -> None:
    """Set what the algorithm, and the loss, are other than TRL's."""
    if yaml.get("rl"):
        draft.set("algorithm.name", draft.values.get("algorithm.name", "grpo"), "rl")
    if yaml.get(key := "trl.async_prefetch"):
        draft.set("rollout.staleness", int(yaml.get("trl.prefetch_depth") or 1), key, "trl.prefetch_depth")
        if "algorithm.importance_correction" not in draft.values:
            draft.set("algorithm.importance_correction", "token_truncate", key)
            draft.check(f"{key}: rows of an earlier policy are corrected for here, by token_truncate")
    if yaml.get("use_eaft"):
        alpha = float(yaml.get("eaft_alpha") or 1.0)
        options = {"alpha": alpha} if alpha != 1 else {}
        draft.set("algorithm.loss", with_options("eaft", options | {"scale": 1.0}), "use_eaft", "eaft_alpha", "eaft_k")
    draft.use("eaft_alpha", "eaft_k")
    labels = {"reward": 1, "prm": 2}.get(trainer)
    if labels is not None and yaml.get("num_labels", labels) != labels:
        draft.check(f"num_labels = {yaml['num_labels']} has no equivalent: such a model has {labels} here")


def _data(draft: Draft, yaml: dict[str, Any], trainer: str, rows: int) -> str:
    """Set the rows that are trained and evaluated on, and how they are read; return how the names of the metrics of
    evaluation begin."""
    draft.drop("data.path")
    measured = "eval/"
    sources, tests = (
        [_source(draft, dataset, trainer, key) for dataset in yaml.get(key) or ()]
        for key in ("datasets", "test_datasets")
    )
    texts = yaml.get("pretraining_dataset") or []
    for text in texts if isinstance(texts, list) else [texts]:
        text = {"path": text} if isinstance(text, str) else text
        source = {name: text[name] for name in ("path", "name", "split", "data_files") if text.get(name)}
        column = text.get("text_column") or "text"
        read = source | {"type": "completion", "field": column}
        sources.append(_source(draft, read, trainer, "pretraining_dataset"))
        if text.get("skip"):
            draft.check(f"pretraining_dataset: skip = {text['skip']} is left out: streamed rows are read from row 0 on")
    if texts:
        draft.set("data.streaming", True, "pretraining_dataset")
        draft.set("data.loss_on", "all", "pretraining_dataset")
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
    if yaml.get("curriculum_sampling"):
        draft.set("data.shuffle", False, "curriculum_sampling")
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
    return measured


def _schedule(draft: Draft, yaml: dict[str, Any]) -> None:
    """Set warmup and schedule, and how often is saved and evaluated."""
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
    if yaml.get("adam_beta3") and draft.values["optimizer.name"] == "came":
        draft.set("optimizer.b3", float(yaml["adam_beta3"]), "adam_beta3")
    for key, ours in (("saves_per_epoch", "checkpoint.every"), ("evals_per_epoch", "eval.every")):
        if yaml.get(key) and draft.values[ours] != -1:
            share = 1.0 / (yaml[key] * float(yaml.get("num_epochs") or 1))  # which Trainer makes steps of, rounded up
            draft.set(ours, math.ceil(total * min(share, 1.0)), key)


def _stopping(draft: Draft, yaml: dict[str, Any], trainer: str, measured: str) -> None:
    """Set early stopping, by a metric of evaluation whose name begins as `measured`."""
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


def _rates(draft: Draft, yaml: dict[str, Any]) -> None:
    """Set the learning rates of single parameters, and the ends of one_cycle."""
    peak, entries, keys = float(draft.get("learning_rate")), [], []
    if ratio := yaml.get("loraplus_lr_ratio"):  # whose optimizer has no other groups, and no weight decay
        entries, keys = [f"lora_B={float(ratio):g}"], ["loraplus_lr_ratio"]
        draft.set("optimizer.weight_decay", 0.0, "loraplus_lr_ratio")
    else:
        if scale := yaml.get("embedding_lr_scale"):
            entries.append(f"{shared.EMBEDDINGS}={float(scale):g}")
            keys.append("embedding_lr_scale")
        elif rate := yaml.get("embedding_lr"):
            entries.append(f"{shared.EMBEDDINGS}={float(rate) / peak:g}")
            keys.append("embedding_lr")
        for group in yaml.get("lr_groups") or ():
            entries.append(f"{'|'.join(map(re.escape, group['modules']))}={float(group['lr']) / peak:g}")
            keys.append("lr_groups")
    draft.set("optimizer.rate_factors", tuple(entries) or None, *dict.fromkeys(keys))
    draft.use("embedding_lr_scale", "embedding_lr", "lr_groups", "loraplus_lr_embedding")
    if yaml.get("lr_scheduler") == "one_cycle":
        first, last = ONE_CYCLE
        options = yaml.get("lr_scheduler_kwargs") or {}
        first = float(options.get("div_factor", first))
        if draft.values.get("optimizer.warmup_steps") or draft.values.get("optimizer.warmup_ratio"):
            draft.set("optimizer.warmup_init", peak / first, "lr_scheduler")
        lowest = 1 / (first * float(options.get("final_div_factor", last)))
        draft.set("optimizer.min_lr_ratio", lowest, "lr_scheduler")
        draft.check("lr_scheduler is one_cycle: cosine is written, whose warm-up is linear here and a half wave there")


def _teacher(draft: Draft, yaml: dict[str, Any], trainer: str) -> None:
    """Set what the plugins of distillation have otherwise than TRL's GKDTrainer, or beside it."""
    if trainer == "gkd":
        draft.set("teacher.temperature", float(draft.get("temperature")), "gkd_temperature")
        if (kind := yaml.get("gkd_divergence")) not in (None, "jsd", "generalized_jsd"):
            shared.check_known("gkd_divergence", kind, tuple(KL))
            draft.set("teacher.beta", KL[kind], "gkd_divergence")
        draft.use("gkd_trainer", "gkd_divergence")
        if k := yaml.get("gkd_top_k"):
            draft.set("rollout.top_k", int(k), "gkd_top_k")
        if yaml.get("gkd_seq_kd"):
            draft.check("gkd_seq_kd is left out: sample the teacher's completions first, python -m jaxrl_llm generate")
        draft.check("of rows with several answers the last one is sampled and learned here, and in axolotl the first")
    if not yaml.get("kd_trainer"):
        return
    seconds = yaml.get("kd_online_timeout")
    distillation.served(
        draft, str(yaml["kd_online_server_base_url"]), "kd_trainer", "kd_online_server_base_url",
        "kd_online_server_model", "kd_online_timeout", model=yaml.get("kd_online_server_model") or None,
        **({"timeout": float(seconds)} if seconds else {}),
    )  # fmt: skip
    draft.set("teacher.form", "divergence", "kd_trainer")
    draft.set("teacher.beta", float(yaml.get("kd_beta") or 0.0), "kd_beta")
    draft.set("teacher.coef", 1.0 if yaml.get("kd_alpha") is None else float(yaml["kd_alpha"]), "kd_alpha")
    draft.set("teacher.top_k", int(yaml.get("kd_online_topk") or 64), "kd_online_topk")
    draft.set("teacher.tail", False, "kd_normalize_topk")
    draft.use("kd_temperature", "kd_temperature_min", "kd_ce_alpha", "kd_online_server", "kd_online_max_new_tokens",
              "kd_compiled_kernel")  # fmt: skip
    if yaml.get("kd_online_server", "vllm") != "vllm":
        draft.check(f"kd_online_server is {yaml['kd_online_server']}: the teacher is asked as vLLM is, serve it so")
    if yaml.get("kd_ce_alpha"):
        draft.check(f"kd_ce_alpha = {yaml['kd_ce_alpha']} is left out: the divergence takes the place of cross-entropy")
    if float(yaml.get("kd_temperature") or 1) != 1 or yaml.get("kd_temperature_min"):
        draft.check("kd_temperature is left out: a server gives log-probs at temperature 1, and they are compared so")
    if yaml.get("kd_normalize_topk") is False:
        draft.check("kd_normalize_topk is left out: distributions here are of a token among the likeliest ones")


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
    for name, usual in CHAT_DEFAULTS.items():
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
    if trainer in ("sft", "gkd") and kind in (None, "chat_template", "completion"):
        if kind != "completion":  # which is read as that, whatever other columns there are
            source.pop("type", None)
            _chat(draft, source, dataset, key)
        elif source.get("field") == "text":
            del source["field"]
        typed = ("type", "field", *CHAT) if "type" in source else ()
        plain = ("path", "name", "split", "ds_type", "data_files", *typed)
        for name in [name for name in source if name not in plain]:
            draft.check(f"{key}: {name} = {short(source.pop(name))} has no equivalent for sft")
        return source
    if trainer == "prm":
        kind = source["type"] = {"stepwise_supervised": "stepwise"}.get(str(kind), kind)
        for name in OF_STEPS:
            if source.pop(name, defaults("trl", trainer).get(name)) != draft.get(name):
                draft.check(f"{key}: {name} differs between them, and is the same for all rows here")
    plain = str(kind).split(".", 1)
    names = known({"sft": "completions", "gkd": "completions", "kto": "labels"}.get(trainer, "pairs"))
    theirs = isinstance(kind, str) and (len(plain) == 1 or plain[0] in RULES["formats"])  # no module of the user's
    if theirs and kind not in names and plain[-1] not in names:
        draft.check(
            f"{key}: the type {kind} has no format here; name one of docs/data.md, or a function row -> dict (type: "
            "file.py:function)"
        )
    return source
