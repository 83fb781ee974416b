"""The rules for TRL: what several of its keys, or a trainer, make together."""

from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigDict
from jaxrl_llm.config.resolve import ConfigError, closest
from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate import trl_run as run
from jaxrl_llm.tools.migrate.draft import Draft, Options, Source
from jaxrl_llm.tools.migrate.shared import first_of
from jaxrl_llm.tools.migrate.table import Entry
from jaxrl_llm.tools.migrate.trl_defaults import TRAINERS, VERSIONS, defaults
from jaxrl_llm.tools.migrate.trl_keys import TABLE

DEVICES = ("num_processes", "num_machines")
ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")
PAIRS = ("dpo", "orpo", "cpo", "reward")
TYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16",
         "fp16": "float16"}  # fmt: skip
# TRL's own reward functions, by the names of ours.
REWARDS = {"accuracy_reward": "math_accuracy", "think_format_reward": "think_format"}
# Keys that only one trainer has.
TELLING = {
    "grpo": ("num_generations", "scale_rewards", "multi_objective_aggregation"),
    "ppo": ("num_ppo_epochs", "cliprange", "reward_model_path"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "cpo": ("simpo_gamma", "cpo_alpha"),
    "reward": ("center_rewards_coefficient",),
    "dpo": ("f_divergence_type", "ld_alpha", "use_weighting", "precompute_ref_log_probs"),
    "sft": ("packing", "completion_only_loss", "assistant_only_loss"),
}


def draft(source: Source, options: Options) -> Draft:
    """Our settings for a TRL script, command line or file of arguments."""
    trainer = source.trainer or _guess(source)
    if trainer not in TRAINERS:
        raise ConfigError(f"{source.path}: the trainer is {trainer!r}, but known are {', '.join(TRAINERS)}; the "
                          f"closest is {closest(trainer, TRAINERS)}: set --trainer")  # fmt: skip
    if options.version not in ("", *VERSIONS):
        raise ConfigError(f"--version is {options.version!r}, but TRL's are {', '.join(VERSIONS)}")
    if options.version == "0.16" and trainer != "grpo":
        raise ConfigError(f"--version is 0.16, whose defaults are known for grpo, and the trainer is {trainer}")
    version = options.version or next(iter(VERSIONS))
    title = f"{trainer.upper()}, from {Path(source.path).name} of TRL; what that leaves out is as in TRL {version}."
    return filled(Draft(source, defaults(trainer, version), TABLE, title), trainer, options)


def _guess(source: Source) -> str:
    found = [name for name, keys in TELLING.items() if any(key in source.given for key in keys)]
    if len(found) != 1:
        raise ConfigError(f"{source.path} does not say which trainer of TRL it is for; add --trainer, one of "
                          f"{', '.join(TRAINERS)}")  # fmt: skip
    return found[0]


def filled(made: Draft, trainer: str, options: Options) -> Draft:
    """The draft with everything that TRL's keys say, for one of its trainers."""
    made.simple()
    _model(made)
    _data(made, trainer)
    devices = _devices(made, options)
    updates = RULES[trainer](made, trainer, devices)
    run.length(made, trainer, updates, options)
    run.learning_rate(made, updates)
    if trainer != "sft" and trainer not in ("dpo", "cpo"):
        made.values.pop("algorithm.label_smoothing", None)
    return made


def _devices(made: Draft, options: Options) -> int:
    given = made.get("num_processes")
    if options.devices:
        made.use(*DEVICES)
        return options.devices
    if given:
        made.use(*DEVICES)
        return int(given)
    made.check("one device is assumed: TRL counts batches per device, so add --devices=N if there were more")
    return 1


def _model(made: Draft) -> None:
    options = made.get("model_init_kwargs") or {}
    named = options.get("dtype", options.get("torch_dtype")) if isinstance(options, dict) else None
    given = named or (made.get("torch_dtype") if made.given("torch_dtype") else made.get("dtype"))
    dtype = TYPES.get(str(given).removeprefix("torch."), "float32")
    if given and str(given).removeprefix("torch.") not in TYPES:
        made.check(f"the model's dtype is {given!r}; its parameters are float32 here (model.param_dtype)")
    made.set("model.param_dtype", dtype, *(key for key in ("model_init_kwargs", "torch_dtype", "dtype") if
                                           made.given(key)))  # fmt: skip
    if made.get("fp16"):
        made.set("model.dtype", "float16", "fp16")
    elif made.get("bf16") is not None:
        made.set("model.dtype", "bfloat16" if made.get("bf16") else "float32", "bf16")
    made.use("bf16", "fp16")
    if "model.path" not in made.values:
        made.set("model.path", "MODEL")
        made.check("the file names no model: set model.path")
    _adapters(made)
    sharded = [key for key in ("fsdp", "fsdp_config", "deepspeed") if made.get(key)]
    if sharded:
        made.set("mesh.fsdp", -1, *sharded)
        made.set("mesh.data", 1, *sharded)
    if made.get("load_in_4bit"):
        kind = made.get("bnb_4bit_quant_type") or "nf4"
        made.set("model.quantize", "nf4" if kind == "nf4" else "int4", "load_in_4bit", "bnb_4bit_quant_type")
    elif made.get("load_in_8bit"):
        made.set("model.quantize", "int8", "load_in_8bit")
    if made.values.get("model.quantize") and "lora.rank" not in made.values:
        made.check("a quantised model is trained by adapters: set lora.rank")


def _adapters(made: Draft) -> None:
    peft = made.given("r") or made.given("peft_config")
    if not (peft or made.get("use_peft")):
        return
    rank, alpha, dropout = (8, 8, 0.0) if peft else (16, 32, 0.05)
    made.set("lora.rank", first_of(made, rank, "r", "lora_r"), "r", "lora_r", "use_peft", "peft_config")
    made.set("lora.alpha", first_of(made, alpha, "lora_alpha"), "lora_alpha")
    made.set("lora.dropout", first_of(made, dropout, "lora_dropout"), "lora_dropout")
    made.set("lora.rslora", bool(made.get("use_rslora")), "use_rslora")
    targets = first_of(made, None, "target_modules", "lora_target_modules")
    if targets is None:
        targets = ("q_proj", "v_proj")
        made.check("PEFT chooses the target modules by architecture; q_proj and v_proj, which most have, are written")
    made.set("lora.targets", (targets,) if isinstance(targets, str) else tuple(targets), "target_modules",
             "lora_target_modules")  # fmt: skip


def _data(made: Draft, trainer: str) -> None:
    path = first_of(made, None, "dataset_name", "train_dataset")
    if isinstance(path, str):
        made.set("data.path", path, "dataset_name", "train_dataset")
    else:
        made.set("data.path", "DATA")
        made.check("the file names no data set: set data.path, or call train(config, train_dataset=...)")
    evaluation = made.get("eval_dataset")
    if isinstance(evaluation, str) and evaluation != path:
        made.set("data.eval_path", evaluation, "eval_dataset")
    made.use("eval_dataset")
    key = "shuffle_dataset" if trainer in ("grpo", "rloo") else "train_sampling_strategy"
    made.set("data.shuffle", made.get(key) not in (False, "sequential"), key)
    made.set("data.eval_split", made.get("dataset_test_split"), "dataset_test_split", "eval_dataset")
    if made.get("max_prompt_length") and trainer in ("grpo", "rloo", "ppo"):
        made.set("rollout.max_prompt_length", int(made.get("max_prompt_length")), "max_prompt_length")
        made.set("data.overlong", "truncate_left", "max_prompt_length")
    elif trainer in ("grpo", "rloo", "ppo"):
        made.check("TRL has no limit for prompts; here rollout.max_prompt_length is 512 tokens, and a longer prompt "
                   "stops the run (data.overlong)")  # fmt: skip
    else:
        _offline_length(made)


def _offline_length(made: Draft) -> None:
    side = "truncate_left" if made.get("truncation_mode") == "keep_end" else "truncate_right"
    made.set("data.overlong", side, "truncation_mode")
    if made.get("max_length") is None:
        made.check("max_length is None, which is no limit; data.max_length is 1024 here")
    else:
        made.set("data.max_length", int(made.get("max_length")), "max_length")


def _online(made: Draft, trainer: str, devices: int) -> int:
    """The batch of GRPO and RLOO; the updates of a step."""
    per_device, accumulation = (int(made.get(key)) for key in ROWS)
    group = int(made.get("num_generations"))
    size, per_generation = made.get("generation_batch_size"), made.get("steps_per_generation")
    rows = int(size) if size else per_device * devices * int(per_generation or accumulation)
    update = per_device * devices * accumulation
    if rows % group or rows % update:
        raise ConfigError(
            f"{made.source.path}: a generation batch has {rows} completions (per_device_train_batch_size x devices x "
            f"steps_per_generation, with {devices} devices), which {group} of a prompt (num_generations) and {update} "
            "of an update do not divide; set --devices to what it ran on"
        )
    keys = (*ROWS, "num_generations", "generation_batch_size", "steps_per_generation")
    made.set("batch.prompts", rows // group, *keys)
    made.set("batch.minibatches", rows // update, "generation_batch_size", "steps_per_generation")
    shared.micro_rows(made, per_device * devices, update, *ROWS)
    _rewards(made)
    return rows // update * int(made.get("num_iterations"))


def _rewards(made: Draft) -> None:
    functions = first_of(made, None, "reward_funcs", "reward_model_path")
    if isinstance(functions, str):
        functions = (functions if made.given("reward_funcs") else f"model:{functions}",)
    if not functions:
        made.set("rewards.functions", ("REWARD",))
        made.check("the file names no reward function: set rewards.functions, or call train(config, rewards=...)")
        return
    functions = tuple(REWARDS.get(name.rpartition(":")[2].rpartition(".")[2], name) for name in functions)
    made.set("rewards.functions", functions, "reward_funcs", "reward_model_path")
    if any(".py:" in name for name in functions):
        made.check("naming a function by its file imports the file: move reward functions out of a script that trains "
                   "when it is imported")  # fmt: skip


def _clip(made: Draft) -> None:
    low = float(made.get("epsilon"))
    high = made.get("epsilon_high")
    made.set("algorithm.epsilon_low", low, "epsilon")
    made.set("algorithm.epsilon_high", low if high is None else float(high), "epsilon_high", "epsilon")


def _reference(made: Draft, updates: int) -> None:
    if made.get("sync_ref_model") and made.get("beta"):
        made.set("algorithm.ref_sync_steps", shared.divided(made.get("ref_model_sync_steps"), updates),
                 "sync_ref_model", "ref_model_sync_steps")  # fmt: skip
        made.set("algorithm.ref_mixup_alpha", made.get("ref_model_mixup_alpha"), "ref_model_mixup_alpha")
        if made.values.get("lora.rank"):
            made.set("lora.reference", "copy")


def _grpo(made: Draft, trainer: str, devices: int) -> int:
    updates = _online(made, trainer, devices)
    made.set("algorithm.beta", float(made.get("beta")), "beta")
    _clip(made)
    kind, sequence = made.get("loss_type"), made.get("importance_sampling_level") == "sequence"
    loss = kind if kind in ("cispo", "luspo", "vespo") else "gspo" if sequence else "ppo_clip"
    if kind == "sapo":
        loss = (f"sapo(temperature_positive={made.get('sapo_temperature_pos')}, "
                f"temperature_negative={made.get('sapo_temperature_neg')})")  # fmt: skip
        made.use("sapo_temperature_pos", "sapo_temperature_neg")
    several = made.values["batch.minibatches"] > 1
    means = {"grpo": "sequence", "sapo": "sequence", "luspo": "sequence", "bnpo": "microbatch_token",
             "dr_grpo": "constant"}  # fmt: skip
    if kind not in (*means, "dapo", "cispo", "vespo"):
        raise ConfigError(f"{made.source.path}: loss_type is {kind!r}, which has no equivalent; there are "
                          f"{', '.join(means)}, dapo, cispo, vespo")  # fmt: skip
    made.set("algorithm.loss", loss, "loss_type", "importance_sampling_level")
    mean = means.get(kind, "rollout_token" if several else "token")
    made.set("algorithm.aggregation", mean, "loss_type", "steps_per_generation")
    if kind == "bnpo" and devices > 1:
        made.check("bnpo is a mean over each device's micro-batch there, over that of all devices here")
    if made.get("multi_objective_aggregation") == "normalize_then_sum":
        made.set("algorithm.advantage", "gdpo", "multi_objective_aggregation")
    made.use("multi_objective_aggregation")
    _corrections(made)
    _reference(made, updates)
    if not made.get("beta"):
        made.values.pop("algorithm.kl_bias_correction", None)
    return updates


def _corrections(made: Draft) -> None:
    keys = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode")
    if made.get("beta"):
        made.set("algorithm.kl_bias_correction", bool(made.get("use_bias_correction_kl")), "use_bias_correction_kl")
    if made.get("use_vllm") and made.get(keys[0]):
        made.set("algorithm.importance_correction", made.get(keys[1]), *keys)
        most = first_of(made, None, "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
        made.set("algorithm.importance_max", most, "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
        made.set("algorithm.importance_min", made.get("vllm_importance_sampling_clip_min"),
                 "vllm_importance_sampling_clip_min")  # fmt: skip
    for key, ours in (("tools", "environment.tools"), ("environment_factory", "environment.name"),
                      ("rollout_func", "environment.rollout_func")):  # fmt: skip
        value = made.get(key)
        if value is not None:
            made.set(ours, tuple(value) if isinstance(value, list | tuple) else value, key)
    if made.get("rollout_func") and not made.values.get("algorithm.importance_correction"):
        made.set("algorithm.importance_correction", "token_truncate", "rollout_func")
    if not (made.get("tools") or made.get("environment_factory")):
        made.values.pop("environment.max_turns", None)


def _rloo(made: Draft, trainer: str, devices: int) -> int:
    updates = _online(made, trainer, devices)
    made.set("algorithm.advantage", "rloo(normalize=True)" if made.get("normalize_advantages") else "rloo",
             "normalize_advantages")  # fmt: skip
    made.set("algorithm.loss", "rloo")
    beta = float(made.get("beta"))
    made.set("algorithm.beta", beta, "beta")
    made.set("algorithm.kl_in_reward", beta > 0, "beta")
    _clip(made)
    _reference(made, updates)
    return updates


def _ppo(made: Draft, trainer: str, devices: int) -> int:
    per_device, accumulation = (int(made.get(key)) for key in ROWS)
    minibatches = int(made.get("num_mini_batches"))
    made.set("algorithm.name", "ppo")
    made.set("rollout.group_size", 1)
    made.set("batch.prompts", per_device * devices * accumulation * minibatches, *ROWS, "num_mini_batches")
    made.set("batch.minibatches", minibatches, "num_mini_batches")
    made.set("batch.shuffle", True)
    shared.micro_rows(made, per_device * devices, per_device * devices * accumulation, *ROWS)
    whiten = ", whiten_rewards=True" if made.get("whiten_rewards") else ""
    made.set("algorithm.advantage", f"ppo(gamma={made.get('gamma')}, lam={made.get('lam')}{whiten})", "gamma", "lam",
             "whiten_rewards")  # fmt: skip
    made.set("algorithm.kl_in_reward", float(made.get("kl_coef")) > 0, "kl_coef")
    made.set("algorithm.aggregation", "microbatch_token" if accumulation > 1 else "token")
    for side in ("low", "high"):
        made.set(f"algorithm.epsilon_{side}", float(made.get("cliprange")), "cliprange")
    made.set("critic.learning_rate", float(made.get("learning_rate")), "learning_rate", "vf_coef")
    if made.get("reward_model_path"):
        made.set("critic.path", made.get("reward_model_path"), "reward_model_path")
    _rewards(made)
    made.check("TRL clips the gradient of policy and critic together; here each has its own norm")
    return minibatches * int(made.get("num_ppo_epochs"))


def _offline(made: Draft, trainer: str, devices: int) -> int:
    """The batch and the loss of SFT, preferences and reward models."""
    per_device, accumulation = (int(made.get(key)) for key in ROWS)
    made.set("batch.prompts", per_device * devices * accumulation, *ROWS)
    single = trainer == "sft" or made.get("loss_type") == "apo_zero_unpaired"
    together = 1 if single else 2
    shared.micro_rows(made, per_device * devices * together, per_device * devices * accumulation * together, *ROWS)
    made.set("algorithm.name", {"sft": "sft", "reward": "reward_model"}.get(trainer, "preference"))
    if trainer == "sft":
        _sft(made)
    elif trainer != "reward":
        made.set("algorithm.beta", float(made.get("beta")), "beta")
        _preference(made, trainer)
    if made.get("sync_ref_model"):
        made.check("sync_ref_model: the reference of a preference loss does not move here")
    return 1


def _sft(made: Draft) -> None:
    only = made.get("completion_only_loss") or made.get("assistant_only_loss")
    made.set("data.loss_on", "completion" if only else "all", "completion_only_loss", "assistant_only_loss")
    if made.get("completion_only_loss") is None and not only:
        made.check("completion_only_loss is unset: TRL then learns all tokens of messages and texts, which is written "
                   "(data.loss_on = all), but only the completion where rows have prompt and completion: set "
                   "completion "
                   "for these")  # fmt: skip
    if made.get("loss_type") not in ("nll", "chunked_nll"):
        made.check(f"loss_type = {made.get('loss_type')!r} has no equivalent in sft")
    made.use("loss_type")
    made.set("algorithm.label_smoothing", made.get("label_smoothing_factor"), "label_smoothing_factor")


def _preference(made: Draft, trainer: str) -> None:
    kind, weights = made.get("loss_type"), made.get("loss_weights")
    rpo = ("rpo_alpha",) if made.given("rpo_alpha") else ()
    kinds = kind if isinstance(kind, list | tuple) else [kind]
    if trainer == "dpo":
        kinds = ["dpo" if name == "sigmoid" else name for name in kinds]
        if made.get("rpo_alpha") is not None:
            kinds, weights = [*kinds, "sft"], [*(weights or [1.0] * len(kinds)), float(made.get("rpo_alpha"))]
    elif trainer == "cpo":
        kinds = ["cpo" if name == "sigmoid" else name for name in kinds]
        if kinds[0] in ("hinge", "ipo"):
            weights, kinds = [1.0, float(made.get("cpo_alpha"))], [kinds[0], "sft"]
            made.set("algorithm.reference_free", True, "loss_type")
        if kinds == ["alphapo"]:
            made.set("algorithm.alphapo_alpha", float(made.get("alpha")), "alpha")
    elif trainer == "orpo":
        kinds = ["orpo"]
    made.set("algorithm.loss", "+".join(kinds), *(() if trainer == "orpo" else ("loss_type",)), *rpo)
    if weights:
        made.set("algorithm.loss_weights", tuple(float(weight) for weight in weights), "loss_weights", *rpo)
    smoothing = made.get("label_smoothing")
    reads = {"robust", "exo_pair", "aot", "aot_unpaired", "cpo", "simpo", "alphapo"} & set(kinds)
    if smoothing and reads:
        made.set("algorithm.label_smoothing", float(smoothing), "label_smoothing")
    elif smoothing:
        made.check("label_smoothing is ignored by TRL for this loss; algorithm.label_smoothing would make dpo cDPO")


RULES: dict[str, Any] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "ppo": _ppo,
    **dict.fromkeys(("sft", "dpo", "kto", "orpo", "cpo", "reward"), _offline),
}


def convert(source: Source, options: Options) -> tuple[ConfigDict, str]:
    """Our configuration, and the file that makes it."""
    made = draft(source, options)
    return made.finish(), made.text()


def table() -> tuple[Entry, ...]:
    """Every key of TRL."""
    return TABLE
