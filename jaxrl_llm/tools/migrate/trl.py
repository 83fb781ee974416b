"""The rules for TRL: its keys that make one of ours together, and its trainers."""

import json
import math
import re
from collections.abc import Callable

from jaxrl_llm.config.entries import LORA_INIT, lora_init
from jaxrl_llm.config.resolve import ConfigError, closest
from jaxrl_llm.data.sources import READERS
from jaxrl_llm.tools.migrate import distillation, shared, trl_run
from jaxrl_llm.tools.migrate.draft import OURS, Draft, Options, RefusedError, Source, short
from jaxrl_llm.tools.migrate.losses import set_loss, with_options
from jaxrl_llm.tools.migrate.table import defaults, rules

NAMES = rules("trl")["names"]
VERSIONS = ("1.16", "0.16")  # newest first
ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")
REWARD_MODELS = ("reward_model_name_or_path", "reward_model_path", "reward_model")
# Our aggregation of a loss_type of GRPO; the others are token means.
MEANS = {
    "grpo": "sequence",
    "sapo": "sequence",
    "luspo": "sequence_sum",
    "bnpo": "microbatch_token",
    "dr_grpo": "constant",
}

SAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "bad_words", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip
# Entries of generation_kwargs whose value is that of a key of ours.
GENERATION = {name: f"rollout.{name}" for name in SAME} | {
    "stop_strings": "rollout.stop",
    "min_tokens": "rollout.min_completion_length",
    "min_new_tokens": "rollout.min_completion_length",
    "max_tokens": "rollout.max_completion_length",
    "max_new_tokens": "rollout.max_completion_length",
    "structured_outputs.regex": "rollout.structured_regex",
    "structured_outputs.choice": "rollout.structured_choice",
    "structured_outputs.json": "rollout.structured_json",
    "structured_outputs.grammar": "rollout.structured_grammar",
}


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for a TRL script, command line or file of arguments."""
    trainer = source.trainer
    if not trainer:
        fitting = [name for name, keys in NAMES["telling"].items() if any(key in source.settings for key in keys)]
        if len(fitting) != 1:
            raise RefusedError(
                f"{source.path} does not say which trainer of TRL it is for; add --trainer, one of {', '.join(RULES)}"
            )
        trainer = fitting[0]
    if trainer not in RULES:
        raise RefusedError(
            f"{source.path}: the trainer is {trainer!r}, but known are {', '.join(RULES)}; the closest is "
            f"{closest(trainer, RULES)}: set --trainer"
        )
    version = options.version or VERSIONS[0]
    if version not in VERSIONS:
        raise RefusedError(f"--version is {version!r}, but TRL's are {', '.join(VERSIONS)}")
    if version == "0.16" and trainer != "grpo":
        raise RefusedError(f"--version is 0.16, whose defaults are known for grpo, and the trainer is {trainer}")
    of = "1.10, which still has it" if trainer == "ppo" else version
    title = f"{trainer.upper()}, from FILE of TRL; what that leaves out is as in TRL {of}."
    theirs = defaults("trl", "grpo_0.16" if version == "0.16" else trainer)
    named = {NAMES["aliases"].get(key, key): (key, value) for key, value in source.settings.items()}
    return apply(Draft(source, title, theirs, named), trainer, options)


def apply(draft: Draft, trainer: str, options: Options) -> Draft:
    """Return the draft with everything that TRL's keys say, for one of its trainers."""
    draft.set_direct("trl")
    if draft.values.get("data.packing") and trainer != "sft":
        draft.drop("data.packing")
        draft.used.discard(draft.named("packing"))
        draft.check(
            f"{draft.named('packing')} is for sft here: the rows of other algorithms are packed by batch.packing, "
            "which is auto"
        )
    if draft.get("generation_kwargs") and "rollout.max_completion_length" in draft.values:
        _generation(draft, "generation_kwargs")
    _model(draft)
    _data(draft, trainer)
    devices = options.devices or int(draft.get("num_processes") or 0)
    if devices:
        draft.use("num_processes", "num_machines")
    else:
        draft.check("one device is assumed: TRL counts batches per device, so add --devices=N if there were more")
    updates = RULES[trainer](draft, trainer, devices or 1)
    trl_run.length(draft, trainer, updates, options)
    if draft.sets("BEMACallback"):
        _average(draft, updates)
    distillation.without_evaluation(draft)
    trl_run.learning_rate(draft, updates)
    return draft


def _generation(draft: Draft, key: str) -> None:
    """Set how completions are sampled from a dictionary under the names of transformers and of vLLM."""
    values = draft.get(key)
    entries = dict(values) if isinstance(values, dict) else {}
    if not entries:
        draft.check(f"{key} = {short(values)} is no dictionary that the file spells out: set rollout.* as it says")
    for name in ("guided_decoding", "structured_outputs"):
        nested = entries.pop(name, None)
        entries |= (
            {f"structured_outputs.{kind}": value for kind, value in nested.items()} if isinstance(nested, dict) else {}
        )
    for name, value in entries.items():
        ours = GENERATION.get(name)
        if name == "do_sample":
            draft.set("rollout.temperature", None if value else 0.0, key)
        elif name == "logit_bias":
            draft.set("rollout.logit_bias", tuple(f"{token}={bias}" for token, bias in value.items()), key)
        elif ours is None:
            draft.check(f"{key}: {name} = {short(value)} has no equivalent")
        elif OURS[ours].many:
            draft.set(ours, tuple(value) if isinstance(value, list | tuple) else (value,), key)
        elif ours == "rollout.structured_json":
            draft.set(ours, value if isinstance(value, str) else json.dumps(value), key)
        else:
            draft.set(ours, max(value, 0) if name == "top_k" else value, key)


def _model(draft: Draft) -> None:
    """Set parameter types, adapters, quantisation and sharding."""
    dtype = shared.init_kwargs(draft, "model_init_kwargs", "model.revision")
    dtype = dtype or draft.get("torch_dtype" if draft.sets("torch_dtype") else "dtype")
    name = shared.type_name(dtype)
    if name not in shared.TYPES.values():
        name = "float32"
        if dtype:
            draft.check(f"the model's dtype is {dtype!r}; its parameters are float32 here (model.param_dtype)")
    keys = [key for key in ("model_init_kwargs", "torch_dtype", "dtype") if draft.sets(key)]
    draft.set("model.param_dtype", name, *keys)
    if draft.get("fp16"):
        draft.set("model.dtype", "bfloat16", "fp16")
        draft.check("fp16: bfloat16 is written; gradients in float16 need loss scaling, which is not here")
    elif draft.get("bf16") is not None:
        draft.set("model.dtype", "bfloat16" if draft.get("bf16") else "float32", "bf16")
    draft.use("bf16", "fp16")
    shared.check_model(draft)
    peft = draft.sets("r") or draft.get("peft_config")
    if peft or draft.get("use_peft"):
        rank, alpha, dropout = (8, 8, 0.0) if peft else (16, 32, 0.05)
        draft.set("lora.rank", draft.first("r", "lora_r", default=rank), "r", "lora_r", "use_peft", "peft_config")
        draft.set("lora.alpha", draft.first("lora_alpha", default=alpha), "lora_alpha")
        draft.set("lora.dropout", draft.first("lora_dropout", default=dropout), "lora_dropout")
        draft.set("lora.rslora", bool(draft.get("use_rslora")), "use_rslora")
        dora, quantized = bool(draft.get("use_dora")), draft.get("load_in_4bit") or draft.get("load_in_8bit")
        draft.set("lora.dora", dora and not quantized, "use_dora")
        if dora and quantized:
            draft.check("use_dora is left out: adapters on quantised matrices are plain LoRA here (lora.dora)")
        start = lora_init(draft.first("init_lora_weights", default=True))
        if LORA_INIT.fullmatch(start):
            draft.set("lora.init", start, "init_lora_weights")
        else:
            draft.check(
                f"{draft.named('init_lora_weights')} = {start!r} has no equivalent; lora.init is kaiming, as by default"
            )
            draft.use("init_lora_weights")
        targets = draft.first("target_modules", "lora_target_modules")
        parameters = draft.first("target_parameters", "lora_target_parameters") or ()
        if targets is None:
            targets, written = ("q_proj", "v_proj"), "q_proj and v_proj, which most have, are"
            if parameters:
                targets, written = (), "none, as for most mixtures of experts, is"
            draft.check(f"PEFT chooses the target modules by architecture; {written} written")
        targets, parameters = ((x,) if isinstance(x, str) else tuple(x) for x in (targets, parameters))
        targets = tuple(name for target in (*targets, *parameters) for name in re.split(r"[,\s]+", target) if name)
        targets = tuple(re.sub(r"^[a-z_]+\.(?=experts\.)", "", name) for name in targets)
        keys = [f"{prefix}target_{kind}" for prefix in ("", "lora_") for kind in ("modules", "parameters")]
        draft.set("lora.targets", targets, *keys)
        if modules := draft.first("modules_to_save", "lora_modules_to_save"):
            modules = (modules,) if isinstance(modules, str) else tuple(modules)
            draft.set("lora.modules_to_save", modules, "modules_to_save", "lora_modules_to_save")
        _modules(draft)
    sharded = [key for key in ("fsdp", "fsdp_config", "deepspeed") if draft.get(key)]
    if sharded:
        draft.set("mesh.fsdp", -1, *sharded)
        draft.set("mesh.data", 1, *sharded)
    if draft.get("load_in_4bit"):
        kind = "nf4" if (draft.get("bnb_4bit_quant_type") or "nf4") == "nf4" else "int4"
        draft.set("model.quantize", kind, "load_in_4bit", "bnb_4bit_quant_type")
    elif draft.get("load_in_8bit"):
        draft.set("model.quantize", "int8", "load_in_8bit")
    if draft.values.get("model.quantize") and "lora.rank" not in draft.values:
        draft.check("a quantised model is trained by adapters: set lora.rank")


def _modules(draft: Draft) -> None:
    """Set what PEFT's configuration says of single layers and modules."""
    layers, excluded = draft.get("layers_to_transform"), draft.get("exclude_modules")
    draft.set("lora.layers_to_transform", (layers,) if isinstance(layers, int) else layers, "layers_to_transform")
    if draft.get("layers_pattern") not in (None, "layers", ["layers"], ["model.layers"]):
        draft.check("layers_pattern is left out: layers are those of the decoder")
    draft.use("layers_pattern")
    if isinstance(excluded, str):
        draft.check(
            f"exclude_modules = {short(excluded)} is a regular expression of whole names: set lora.exclude_modules to "
            "the ends of the names that it means"
        )
    else:
        draft.set("lora.exclude_modules", excluded, "exclude_modules")
    for key in ("rank_pattern", "alpha_pattern"):
        numbers = draft.get(key) or {}
        draft.set(f"lora.{key}", tuple(f"{name}={number}" for name, number in numbers.items()) or None, key)


def _mixture(draft: Draft) -> None:
    """Set the sources of a mixture, of which the splits, names and streams of a single data set say nothing."""
    draft.drop("data.name", "data.split")
    draft.set("data.streaming", bool(draft.get("streaming")), "streaming")
    entries, sources = draft.get("datasets"), []
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"datasets is {short(entries)}, and not a list of entries with a path each")
    for entry in entries:
        given = {key: value for key, value in entry.items() if value is not None} if isinstance(entry, dict) else {}
        source = {key: given.pop(key) for key in ("path", "name", "split", "data_files") if key in given}
        files, share = source.get("data_files"), given.pop("fraction", None)
        split = str(source.get("split", "train"))
        name = split.partition("[")[0]
        fault = None
        if not isinstance(source.get("path"), str):
            fault = "it names no path"
        elif isinstance(files, dict) and name not in files:
            fault = f"its data_files have no split {name}"
        elif share is not None and not (isinstance(share, int | float) and share >= 0):
            fault = f"its fraction is {short(share)}, and not a number from 0 on"
        if fault:
            draft.check(f"datasets: {short(entry)} is left out: {fault}")
            continue
        if share == 0:  # of whose rows none is taken there either
            continue
        if isinstance(files, dict):
            source["data_files"], source["split"] = files[name], f"train{split.removeprefix(name)}"
        if files and source["path"] not in READERS.values():
            draft.check(f"datasets: data_files of {source['path']} are files in it there; here they are paths, or URLs")
        if share is not None and (draft.values["data.streaming"] or not draft.values.get("data.packing")):
            source["weight"] = float(share)
        if share is not None:
            draft.check(
                f"datasets: fraction = {share} of {source['path']}: its first rows make up this share there; here rows "
                "are drawn by weight in these shares from all of them, and with packing each is taken once"
            )
        for key, value in given.items():
            draft.check(f"datasets: {key} = {short(value)} of {source['path']} has no equivalent")
        sources.append(source)
    draft.set("data.sources", tuple(sources) or None, "datasets")
    if not sources:
        draft.set("data.path", "DATA")
        draft.check("datasets has no entry that is trained on: set data.path")


def _dataset(draft: Draft) -> None:
    """Set the data set, and what is evaluated on."""
    path = draft.first("dataset_name", "train_dataset")
    if isinstance(path, str):
        draft.set("data.path", path, "dataset_name", "train_dataset")
    else:
        draft.set("data.path", "DATA")
        draft.check("the file names no data set: set data.path, or call train(config, train_dataset=...)")
    evaluation = draft.get("eval_dataset")
    if isinstance(evaluation, str) and evaluation != path:
        draft.set("data.eval_path", evaluation, "eval_dataset")
    draft.use("eval_dataset")
    held = draft.get("train_test_split")
    if held is None:
        draft.set("data.eval_split", draft.get("dataset_test_split"), "dataset_test_split", "eval_dataset")
    else:  # no split has the rows that are held out
        draft.use("dataset_test_split")
        draft.set("eval.fraction", held if isinstance(held, float) else None, "train_test_split")


def _data(draft: Draft, trainer: str) -> None:
    """Set the data and what happens to long rows."""
    if draft.get("datasets"):
        _mixture(draft)
    else:
        _dataset(draft)
    sampling = (
        "grpo", "gmpo", "asyncgrpo", "rloo", "distillation", "serverdistillation", "asyncdistillation", "iwopd", "sdpo",
        "sdft",
    )  # fmt: skip
    key = "shuffle_dataset" if trainer in sampling else "train_sampling_strategy"
    draft.set("data.shuffle", draft.get(key) not in (False, "sequential"), key)
    if trainer not in (*sampling, "ppo", "a2po"):
        if trainer in ("reward", "prm"):
            draft.set("data.overlong", "filter" if trainer == "reward" else "truncate_right", "max_length")
        else:
            # GKD's rows, GOLD's and packed ones are cut whatever the mode: at their start, and at their end.
            left = draft.get("truncation_mode") == "keep_end" and not draft.values.get("data.packing")
            side = "truncate_left" if left or trainer in ("gkd", "gold") else "truncate_right"
            draft.set("data.overlong", side, "truncation_mode")
        if draft.get("max_length") is None:
            draft.check("max_length is None, which is no limit; data.max_length is 1024 here")
        else:
            draft.set("data.max_length", int(draft.get("max_length")), "max_length")
    elif draft.get("max_prompt_length"):
        draft.set("rollout.max_prompt_length", int(draft.get("max_prompt_length")), "max_prompt_length")
        draft.set("data.overlong", "truncate_left", "max_prompt_length")
    elif trainer != "iwopd":
        draft.check(
            "TRL has no limit for prompts; here rollout.max_prompt_length is 512 tokens, and a longer prompt stops the "
            "run (data.overlong)"
        )


def _online(draft: Draft, devices: int) -> int:
    """Set the batch, clip range, rewards and tools of GRPO and RLOO; return the updates of a step."""
    updates = _groups(draft, devices)
    _rewards(draft)
    _environment(draft)
    if draft.get("multi_objective_aggregation") == "normalize_then_sum":
        draft.set("algorithm.advantage", "gdpo", "multi_objective_aggregation")
    draft.use("multi_objective_aggregation")
    low, high = float(draft.get("epsilon")), draft.get("epsilon_high")
    draft.set("algorithm.epsilon_low", low, "epsilon")
    draft.set("algorithm.epsilon_high", low if high is None else float(high), "epsilon_high", "epsilon")
    draft.set("algorithm.beta", float(draft.get("beta") or 0), "beta")
    _reference_sync(draft, updates)
    return updates


def _reference_sync(draft: Draft, updates: int) -> None:
    """Set how the reference follows the policy, which is counted in optimizer updates there and in steps here."""
    if draft.get("sync_ref_model") and draft.get("beta"):
        steps = shared.divided(draft.get("ref_model_sync_steps"), updates)
        draft.set("algorithm.ref_sync_steps", steps, "sync_ref_model", "ref_model_sync_steps")
        draft.set("algorithm.ref_mixup_alpha", draft.get("ref_model_mixup_alpha"), "ref_model_mixup_alpha")
        if draft.values.get("lora.rank"):
            draft.set("lora.reference", "copy")


def _average(draft: Draft, updates: int) -> None:
    """Set the moving average of the policy, and a reference that follows it; both count optimizer updates there."""

    def of(name: str, default: float) -> float:
        return draft.first(f"BEMACallback.{name}", default=default)

    every, start = shared.divided(of("update_freq", 400), updates), math.ceil(of("update_after", 0) / updates)
    reason, total = "", draft.values["total_steps"]
    if draft.values.get("model.quantize"):
        reason = "adapters on quantised matrices are not averaged here"
    elif "num_epochs" not in draft.values and start + every > total:
        reason = f"its first update would be after step {start + every} of {total}"
    if reason:
        draft.check(f"BEMACallback is left out: {reason} (average.every)")
        draft.drop(*(key for key in draft.values if key.startswith("average.")))
        return
    draft.set("average.every", every, "BEMACallback", "BEMACallback.update_freq")
    draft.set("average.start", start, "BEMACallback.update_after")
    draft.set("average.multiplier", of("multiplier", 1.0) * updates, "BEMACallback.multiplier")
    if draft.values.get("lora.rank"):
        draft.check("BEMACallback averages adapters there; here the model with the adapters merged (average.every)")
    if not of("update_ref_model", False):
        return
    steps, after = (of(f"ref_model_update_{name}", default) for name, default in (("freq", 400), ("after", 0)))
    keys = ("BEMACallback.update_ref_model", "BEMACallback.ref_model_update_freq")
    draft.set("algorithm.ref_sync_to", "average", keys[0])
    draft.set("algorithm.ref_sync_steps", shared.divided(steps, updates), *keys)
    draft.set("algorithm.ref_sync_after", math.ceil(after / updates), "BEMACallback.ref_model_update_after")
    draft.set("algorithm.ref_mixup_alpha", 1.0, keys[0])
    if draft.values.get("lora.rank"):
        draft.set("lora.reference", "copy")


def _groups(draft: Draft, devices: int) -> int:
    """Set the batch of an algorithm that samples groups; return the updates of a step."""
    per_device, accumulation = (int(draft.get(key)) for key in ROWS)
    group = int(draft.get("num_generations"))
    size, per_generation = draft.get("generation_batch_size"), draft.get("steps_per_generation")
    rows = int(size) if size else per_device * devices * int(per_generation or accumulation)
    update = per_device * devices * accumulation
    if rows % group or rows % update:
        draft.check(
            f"a generation batch has {rows} completions (per_device_train_batch_size x devices x steps_per_generation, "
            f"with {devices} devices), which {group} of a prompt (num_generations) and {update} of an update do not "
            "divide: --devices is what it ran on"
        )
        update = math.lcm(update, group)
        rows = -(-rows // update) * update
    keys = (*ROWS, "num_generations", "generation_batch_size", "steps_per_generation")
    draft.set("batch.prompts", rows // group, *keys)
    draft.set("batch.minibatches", rows // update, "generation_batch_size", "steps_per_generation")
    shared.microbatch_rows(draft, per_device * devices, update, *ROWS)
    samples = draft.get("num_generations_eval") or group
    draft.set("eval.samples", int(samples), "num_generations_eval", "num_generations")
    return rows // update * int(draft.get("num_iterations") or 1)


def _environment(draft: Draft) -> None:
    """Set tools, environments and a rollout function; turns and the time of a call have no limit of their own there."""
    tools, factory, rollout = (draft.get(key) for key in ("tools", "environment_factory", "rollout_func"))
    draft.set("environment.tools", tools, "tools")
    draft.set("environment.name", factory, "environment_factory")
    draft.set("environment.rollout_func", rollout, "rollout_func")
    if rollout:
        draft.set("algorithm.importance_correction", "token_truncate", "rollout_func")
    if not (tools or factory):
        draft.drop("environment.max_turns")
        return
    if "environment.max_turns" not in draft.values:  # a turn has a token at least
        most = draft.values["rollout.max_completion_length"]
        draft.set("environment.max_turns", most, "max_tool_calling_iterations")
    draft.set_none("environment.timeout", "tools", "environment_factory")


def _rewards(draft: Draft) -> None:
    """Set the reward model, which TRL puts first, and the functions, by our names where they are TRL's own."""
    model, functions = draft.first(*REWARD_MODELS), draft.get("reward_funcs") or ()
    functions = (functions,) if isinstance(functions, str) else functions
    names = (*((f"model:{model}",) if model else ()), *(_reward(draft, name) for name in functions))
    if not names:
        draft.set("rewards.functions", ("REWARD",))
        draft.check("the file names no reward function: set rewards.functions, or call train(config, rewards=...)")
        return
    draft.set("rewards.functions", names, *REWARD_MODELS, "reward_funcs")


def _reward(draft: Draft, name: str) -> str:
    """Return the name of a reward here: TRL's own by ours, a path or hub id as a reward model."""
    plain = name.rpartition(":")[2].rpartition(".")[2]
    if ".py:" in name:
        return name
    return NAMES["rewards"].get(plain) or (f"model:{name}" if "/" in name and ":" not in name else name)


def _grpo(draft: Draft, trainer: str, devices: int) -> int:
    updates = _online(draft, devices)
    kind, beta = draft.get("loss_type"), bool(draft.get("beta"))
    shared.check_known("loss_type", kind, (*MEANS, "dapo", "cispo", "vespo"))
    level = "importance_sampling_level"
    sequence = draft.get(level) == "sequence"
    loss = kind if kind == "vespo" else "gspo" if sequence else "ppo_clip"
    if kind in ("cispo", "sapo"):
        options = {"level": "sequence"} if sequence else {}
        if kind == "sapo":
            keys = {"temperature_positive": "sapo_temperature_pos", "temperature_negative": "sapo_temperature_neg"}
            options = {option: draft.get(key) for option, key in keys.items()} | options
            draft.use(*keys.values())
        loss = with_options(kind, options)
        if sequence:
            draft.check(f"{level} = sequence: {kind} takes the ratio of the row, its paper that of each token")
    elif kind == "vespo" and sequence and beta and draft.get("use_bias_correction_kl"):
        draft.check(f"{level}: with vespo it is of the KL term alone in TRL, whose ratio is that of tokens here")
    signs = {"positive": "pos", "negative": "neg"}
    numbers = {f"{name}_{ours}": f"vespo_{name}_{sign}" for ours, sign in signs.items() for name in ("k", "lambda")}
    set_loss(draft, [(loss, {"delta": "delta", **numbers})], "loss_type", "importance_sampling_level")
    token = "rollout_token" if draft.values["batch.minibatches"] > 1 else "token"
    means = MEANS.get(kind, token)
    if kind == "bnpo" and devices > 1:
        means = "token"  # a micro-batch here is of all devices
        draft.check("loss_type bnpo is a mean over the tokens of each device's micro-batch there, over all tokens here")
    draft.set("algorithm.aggregation", means, "loss_type", "steps_per_generation")
    if beta:
        draft.set("algorithm.kl_bias_correction", bool(draft.get("use_bias_correction_kl")), "use_bias_correction_kl")
    keys = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode")
    if draft.get("use_vllm") and draft.get(keys[0]):
        mode = str(draft.get(keys[1]))
        if kind == "vespo" and mode.startswith("sequence"):
            draft.check(
                f"{keys[1]} = {mode}: vespo refuses weights of rows there and here; those of tokens are written"
            )
            mode = mode.replace("sequence", "token")
        draft.set("algorithm.importance_correction", mode, *keys)
        bounds = ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
        draft.set("algorithm.importance_max", draft.first(*bounds), *bounds)
        low = "vllm_importance_sampling_clip_min"
        draft.set("algorithm.importance_min", draft.get(low), low)
    return updates


def _gmpo(draft: Draft, trainer: str, devices: int) -> int:
    """Set what GRPO's trainer has, with a loss that is its own."""
    updates = _online(draft, devices)
    draft.set("algorithm.loss", "gmpo")
    draft.set("algorithm.aggregation", "sequence")
    unread = (
        "loss_type", "delta", "importance_sampling_level", "use_bias_correction_kl", "off_policy_mask_threshold",
        "entropy_coef", "use_adaptive_entropy", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    )  # fmt: skip
    entropy = [key for key in draft.values if key.startswith("algorithm.entropy_")]
    draft.drop("algorithm.off_policy_mask_threshold", *entropy)
    if given := [key for key in unread if draft.sets(key)]:
        draft.check(f"{', '.join(given)}: left out, as the loss of GMPOTrainer does not read it")
    return updates


def _asyncgrpo(draft: Draft, trainer: str, devices: int) -> int:
    """Set what GRPO's trainer has, with samples of earlier policies, whose log-probs the ratio compares with."""
    updates = _online(draft, devices)
    lag = int(draft.get("max_staleness")) * int(draft.get("weight_sync_steps"))
    draft.set("rollout.staleness", lag, "max_staleness", "weight_sync_steps")
    draft.set("algorithm.old_logps", "sampler")
    several = int(draft.get("gradient_accumulation_steps")) > 1
    draft.set("algorithm.aggregation", "microbatch_token" if several else "token", "gradient_accumulation_steps")
    draft.set("data.shuffle", False)
    draft.check(
        f"a batch here is of the policy {lag} updates before (rollout.staleness); AsyncGRPOTrainer takes what is ready "
        "and at most as old, and divides its advantages by the standard deviation over n, not n - 1"
    )
    budget = draft.get("token_budget")
    draft.use("token_budget")
    if budget is None or budget > 0:
        draft.check(
            "an update there has as many completions as token_budget (by default the server's max_model_len) has room "
            "for: set batch.prompts to the batch/samples_per_step that it logged, over num_generations"
        )
    return updates


def _rloo(draft: Draft, trainer: str, devices: int) -> int:
    updates = _online(draft, devices)
    normalize = {"normalize": True} if draft.get("normalize_advantages") else {}
    draft.set("algorithm.advantage", with_options("rloo", normalize), "normalize_advantages")
    draft.set("algorithm.loss", "rloo")
    draft.set("algorithm.kl_in_reward", float(draft.get("beta")) > 0, "beta")
    return updates


def _a2po(draft: Draft, trainer: str, devices: int) -> int:
    """Set a completion of each prompt, the reference's scores before the first step, and the regression on them."""
    per_device, accumulation = (int(draft.get(key)) for key in ROWS)
    draft.set("batch.prompts", per_device * devices * accumulation, *ROWS)
    shared.microbatch_rows(draft, per_device * devices, per_device * devices * accumulation, *ROWS)
    draft.set("rollout.group_size", 1)
    _rewards(draft)
    draft.set("algorithm.advantage", with_options("a2po", {"beta1": draft.get("beta1")}), "beta1")
    draft.set("algorithm.loss", with_options("a2po", {"beta2": draft.get("beta2")}), "beta2")
    draft.set("algorithm.aggregation", "sequence")
    draft.set("algorithm.reference_samples", int(draft.get("num_value_samples")), "num_value_samples")
    draft.set("algorithm.drop_unsolved", bool(draft.get("filter_all_incorrect")), "filter_all_incorrect")
    if draft.get("filter_all_incorrect") and int(draft.get("max_steps") or -1) <= 0:
        draft.check(
            "num_train_epochs counts the prompts that the reference has solved there, and all here: set total_steps"
        )
    return 1


def _ppo(draft: Draft, trainer: str, devices: int) -> int:
    """Set the batch, the rewards and the critic; return 1, as TRL counts its batches here, not their updates."""
    per_device, accumulation = (int(draft.get(key)) for key in ROWS)
    parts, rows = int(draft.get("num_mini_batches")), per_device * accumulation
    # Each update there is of so many passes of the model, whichever minibatches these belong to.
    passes = parts * math.ceil(accumulation / parts)
    minibatches = max(1, passes // accumulation)
    if minibatches != parts:
        draft.check(
            f"num_mini_batches is {parts}, but PPOTrainer makes an update of gradient_accumulation_steps = "
            f"{accumulation} passes: {minibatches} in each pass over the batch are written (batch.minibatches)"
        )
    policy, name = draft.get("sft_model_path"), draft.get("model_name_or_path")
    if policy is not None and draft.get("model") is None:
        draft.set("model.path", policy, "sft_model_path")
        draft.set("model.tokenizer", None if name == policy else name, "model_name_or_path")
    draft.set("algorithm.name", "ppo")
    draft.set("rollout.group_size", 1)
    draft.set("batch.prompts", rows * devices, *ROWS)
    draft.set("batch.minibatches", minibatches, "num_mini_batches", *ROWS[1:])
    draft.set("batch.shuffle", True)
    passed = min(per_device, max(rows // parts, 1)) * devices
    shared.microbatch_rows(draft, passed, rows * devices // minibatches, *ROWS)
    options = {key: draft.get(key) for key in ("gamma", "lam")}
    options |= {"whiten_rewards": True} if draft.get("whiten_rewards") else {}
    draft.set("algorithm.advantage", with_options("ppo", options), "gamma", "lam", "whiten_rewards")
    draft.set("algorithm.kl_in_reward", float(draft.get("kl_coef")) > 0, "kl_coef")
    draft.set("algorithm.aggregation", "microbatch_token" if accumulation > 1 else "token")
    for side in ("low", "high"):
        draft.set(f"algorithm.epsilon_{side}", float(draft.get("cliprange")), "cliprange")
    draft.set("critic.learning_rate", float(draft.get("learning_rate")), "learning_rate", "vf_coef")
    keys = ("value_model", *REWARD_MODELS)
    draft.set("critic.path", draft.first(*keys), *keys)
    _rewards(draft)
    if draft.get("deepspeed"):
        draft.check("DeepSpeed clips the gradient of policy and critic together; here each has its own norm")
    else:
        draft.set("optimizer.max_grad_norm", 0.0, "max_grad_norm")
        draft.check("PPOTrainer clips no gradient, whatever max_grad_norm is (optimizer.max_grad_norm = 0)")
    if int(draft.get("max_steps") or -1) > 0:
        draft.check("max_steps is not read by PPOTrainer, whose length is total_episodes or num_train_epochs")
    return 1


def _offline(draft: Draft, trainer: str, devices: int) -> int:
    """Set the batch and the loss of SFT, preferences and reward models."""
    per_device, accumulation = (int(draft.get(key)) for key in ROWS)
    draft.set("batch.prompts", per_device * devices * accumulation, *ROWS)
    # A pair, or a labelled row with its mismatch, is two rows; a pair with its gold completion is three.
    rows = 1 if trainer in ("sft", "prm") or draft.get("loss_type") == "apo_zero_unpaired" else 2
    if trainer == "tpo" and draft.get("tpo_alpha"):
        rows = 3
    shared.microbatch_rows(draft, per_device * devices * rows, per_device * devices * accumulation * rows, *ROWS)
    names = {"sft": "sft", "reward": "reward_model", "prm": "process_reward_model"}
    draft.set("algorithm.name", names.get(trainer, "preference"))
    if trainer == "sft":
        _sft(draft)
    elif trainer == "reward":
        set_loss(draft, [("bradley_terry", {"center": "center_rewards_coefficient"})])
    elif trainer == "prm":
        _prm(draft)
    else:
        draft.set("algorithm.beta", float(draft.get("beta")), "beta")
        _preference(draft, trainer)
    if draft.get(key := "group_by_length"):
        if draft.get("packing"):
            draft.use(key)
            draft.check(f"{key} is left out: it saves padding, of which packed rows have none")
        else:
            draft.set("data.group_by_length", True, key)
    _reference_sync(draft, 1)
    return 1


def _sft(draft: Draft) -> None:
    only = draft.get("completion_only_loss") or draft.get("assistant_only_loss")
    draft.set("data.loss_on", "completion" if only else "all", "completion_only_loss", "assistant_only_loss")
    if draft.get("completion_only_loss") is None and not only:
        draft.check(
            "completion_only_loss is unset: TRL then learns all tokens of messages and texts, which is written "
            "(data.loss_on = all), but only the completion where rows have prompt and completion: set completion for "
            "these"
        )
    strategy = draft.get("packing_strategy") or "bfd"
    if strategy != "bfd" and draft.get("packing"):
        draft.check(
            f"packing_strategy = {strategy!r}: rows are packed whole here, best fit first, and what they have over "
            "data.max_length is cut off, as bfd does"
        )
    kind, smoothing = draft.get("loss_type"), "label_smoothing_factor"
    if kind == "dft":  # of which TRL does not smooth the labels
        draft.set("algorithm.loss", "dft", "loss_type")
        draft.use(smoothing)
        return
    if kind not in ("nll", "chunked_nll"):
        draft.check(f"loss_type = {kind!r} has no equivalent in sft")
    draft.use("loss_type")
    draft.set("algorithm.label_smoothing", draft.get(smoothing), smoothing)


def _prm(draft: Draft) -> None:
    """Set the steps of a process reward model."""
    if draft.get(key := "step_separator") != "\n":
        draft.set("data.step_separator", draft.get(key), key)
    draft.use(key)
    last = draft.get("train_on_last_step_only")
    draft.set("data.loss_on", "last_step" if last else "completion", "train_on_last_step_only")
    draft.drop("rollout.max_completion_length")
    if longest := draft.get("max_completion_length"):
        draft.check(
            f"max_completion_length = {longest} cuts the steps of a row apart from its prompt there; here "
            "data.max_length cuts the whole row"
        )


def _preference(draft: Draft, trainer: str) -> None:
    kinds, weights = draft.get("loss_type"), draft.get("loss_weights")
    kinds = list(kinds) if isinstance(kinds, list | tuple) else [kinds]
    if trainer in ("dpo", "cpo"):
        kinds = [trainer if name == "sigmoid" else name for name in kinds]
    elif trainer == "orpo":
        kinds = ["orpo"]
    elif trainer == "tpo":
        kinds = _tpo(draft, str(kinds[0]))
    likely = "alphapo" not in kinds  # TRL leaves its likelihood term out, whatever cpo_alpha is
    if trainer == "cpo" and draft.get("alpha"):
        kinds = ["alphapo" if name == "simpo" else name for name in kinds]
        if "alphapo" not in kinds:
            draft.check(
                f"alpha = {draft.get('alpha')} is left out: it transforms the log-probs of any loss_type there, and of "
                "simpo alone here"
            )
    options = {**NAMES["options"], "alpha": "f_alpha_divergence_coef"}
    if draft.sets(key := "f_divergence_type") and draft.get(key) not in NAMES["divergences"]:
        raise ConfigError(f"{key} is {draft.get(key)!r}, but there are {', '.join(NAMES['divergences'])}")
    rpo = ("rpo_alpha",) if draft.sets("rpo_alpha") else ()
    if trainer == "dpo" and draft.get("rpo_alpha") is not None:
        kinds, weights = [*kinds, "sft"], [*(weights or [1.0] * len(kinds)), float(draft.get("rpo_alpha"))]
    elif trainer == "cpo" and kinds[0] in ("hinge", "ipo"):
        kinds = [kinds[0], "sft"]
        draft.set("algorithm.reference_free", True, "loss_type")
    if draft.get("label_smoothing") and not set(NAMES["smoothed"]) & set(kinds):
        draft.check("label_smoothing is ignored by TRL for this loss; dpo(label_smoothing=...) would be cDPO")
    losses = []
    for name in kinds:
        keys = dict(options)
        if name in NAMES["smoothed"]:
            keys["label_smoothing"] = "label_smoothing"
        if name == "alphapo":
            keys["alpha"] = "alpha"
        if trainer == "cpo" and likely:
            keys["nll_weight"] = "cpo_alpha"
        if trainer == "tpo":
            keys |= {"nll_weight": "tpo_alpha", "gamma": "tpo_l_gamma"}
        losses.append((name, keys))
    set_loss(draft, losses, *(() if trainer == "orpo" else ("loss_type",)), *rpo)
    if weights:
        draft.set("algorithm.loss_weights", tuple(float(weight) for weight in weights), "loss_weights", *rpo)


def _tpo(draft: Draft, kind: str) -> list[str]:
    """Return the losses of a loss_type of TPOTrainer; without its likelihood term it reads no gold completions."""
    named = {"sigmoid": ("cpo", "tpo"), "tpo-l": ("simpo", "tpo_l")}
    shared.check_known("loss_type", kind, (*named, "hinge", "ipo"))
    gold = bool(draft.get("tpo_alpha"))
    if kind in named:
        return [named[kind][gold]]
    draft.set("algorithm.reference_free", True, "loss_type")
    return [kind, "gold_sft"] if gold else [kind]


def _distillation(draft: Draft, trainer: str, devices: int) -> int:
    """Set the batch, the completions of a prompt, the tools and the teacher."""
    per_device, accumulation = (int(draft.get(key)) for key in ROWS)
    grouped = trainer in ("iwopd", "gold")
    group = int(draft.get("num_generations")) if grouped else 1
    keys = (*ROWS, "num_generations", "generation_batch_size") if grouped else ROWS
    draft.set("batch.prompts", per_device * devices * accumulation // group, *keys)
    draft.set("rollout.group_size", group, *keys[2:3])
    shared.microbatch_rows(draft, per_device * devices, per_device * devices * accumulation, *ROWS)
    _environment(draft)
    if trainer not in ("serverdistillation", "asyncdistillation"):
        distillation.of_trl(draft, trainer)
        return 1
    distillation.served_of_trl(draft, trainer)
    if trainer == "asyncdistillation":
        lag = int(draft.get("max_staleness")) * int(draft.get("weight_sync_steps"))
        draft.set("rollout.staleness", lag, "max_staleness", "weight_sync_steps")
        draft.set("algorithm.old_logps", "sampler")
        draft.use("token_budget")
        draft.check(
            f"a batch here is of the policy {lag} updates before (rollout.staleness); AsyncDistillationTrainer takes "
            "what is ready and at most as old, as many rows as token_budget has room for: set batch.prompts by its log"
        )
    return 1


def _sdpo(draft: Draft, trainer: str, devices: int) -> int:
    """Set what GRPO's trainer has, and the policy as its teacher, unless the weight of that is 0."""
    weight = float(draft.get("distillation_weight"))
    updates = _grpo(draft, trainer, devices) if weight < 1 else _online(draft, devices)
    if draft.get("beta"):
        draft.drop("algorithm.beta")
        draft.check("beta is left out: SDPOTrainer takes it and has no KL term")
    if weight:
        distillation.self_of_trl(draft, updates, weight)
    return updates


def _sdft(draft: Draft, trainer: str, devices: int) -> int:
    """Set groups of samples without rewards, and the policy as their teacher."""
    updates = _groups(draft, devices)
    draft.set("rewards.functions", ())
    distillation.self_of_trl(draft, updates, 1.0)
    return updates


RULES: dict[str, Callable[[Draft, str, int], int]] = {
    "grpo": _grpo,
    "gmpo": _gmpo,
    "asyncgrpo": _asyncgrpo,
    "rloo": _rloo,
    "a2po": _a2po,
    "ppo": _ppo,
    **dict.fromkeys(("sft", "dpo", "kto", "orpo", "cpo", "tpo", "reward", "prm"), _offline),
    **dict.fromkeys(("distillation", "serverdistillation", "asyncdistillation", "gkd", "gold", "iwopd"), _distillation),
    "sdpo": _sdpo,
    "sdft": _sdft,
}
