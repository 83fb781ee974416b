"""The rules for verl: its keys that make one of ours together."""

import math
import re

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate import distillation, shared, verl_run, verl_tools
from jaxrl_llm.tools.migrate.draft import Draft, Options, RefusedError, Source
from jaxrl_llm.tools.migrate.losses import set_loss, with_options
from jaxrl_llm.tools.migrate.table import defaults, rules

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
PASSES = (R, "actor_rollout_ref.ref")  # that have sizes of their own; here they have the same, the first that is set
PASS_SIZES = ("micro_batch_size_per_gpu", "micro_batch_size", "use_dynamic_bsz", "max_token_len_per_gpu")
CORRECTION = "algorithm.rollout_correction"
VERSIONS = ("0.9", "0.8", "0.3")  # newest first
# Sections and keys of 0.9 by the names that they had before, of every file and of its sft_trainer_engine.yaml.
FORMER = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model.enable": "reward_model.enable",
    f"{A}.megatron.context_parallel_size": f"{A}.ulysses_sequence_parallel_size",
}
# Keys of the optimizers of Torchtitan, VeOmni and Automodel by those of FSDP and Megatron.
FORMER |= {
    f"{at}.{name}": f"{at}.{former}"
    for at in (f"{A}.optim", "optim")
    for name, former in {
        "name": "optimizer",
        "decay_type": "lr_scheduler_type",
        "lr_min": "min_lr",
        "lr_start": "lr_warmup_init",
        "wd_incr_style": "weight_decay_incr_style",
    }.items()
}
FORMER_OF_SFT = {
    "model.path": "model.partial_pretrain",
    "engine.fsdp_size": f"{A}.fsdp_config.fsdp_size",
    "engine.model_dtype": "model.fsdp_config.model_dtype",
    "engine.param_offload": "model.fsdp_config.offload_params",
    "engine.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
    "engine.context_parallel_size": "ulysses_sequence_parallel_size",
    "engine.tensor_model_parallel_size": f"{A}.megatron.tensor_model_parallel_size",
    "engine.expert_model_parallel_size": f"{A}.megatron.expert_model_parallel_size",
    "optim.lr_scheduler_type": "optim.lr_scheduler",
    "model.enable_activation_offload": f"{M}.enable_activation_offload",
    "model.override_config": f"{M}.override_config",
    "model.override_config.": f"{M}.override_config.",
    "checkpoint.save_contents": "trainer.checkpoint.save_contents",
    "checkpoint.load_contents": "trainer.checkpoint.load_contents",
}
OVERLONG = {"error": "error", "left": "truncate_left", "right": "truncate_right", "middle": "truncate_middle"}
# Our loss of a mode, and its options: our name, the key in verl, verl's default.
LOSSES: dict[str, tuple[str, dict[str, tuple[str, float]]]] = {
    "vanilla": ("ppo_clip", {}),
    "gspo": ("gspo_token", {}),
    "gpg": ("reinforce", {}),
    "geo_mean": ("gmpo", {}),
    "cispo": ("cispo", {}),
    "sapo": (
        "sapo",
        {"temperature_positive": (f"{A}.tau_pos", 1.0), "temperature_negative": (f"{A}.tau_neg", 1.05)},
    ),
    "clip_cov": (
        "clip_cov",
        {
            "fraction": (f"{A}.policy_loss.clip_cov_ratio", 2e-4),
            "lower": (f"{A}.policy_loss.clip_cov_lb", 1.0),
            "upper": (f"{A}.policy_loss.clip_cov_ub", 5.0),
        },
    ),
    "kl_cov": (
        "kl_cov",
        {"fraction": (f"{A}.policy_loss.kl_cov_ratio", 2e-4), "kl_coef": (f"{A}.policy_loss.ppo_kl_coef", 0.1)},
    ),
    "dppo_tv": ("dppo_tv", {"maximum": (f"{A}.clip_ratio_c", 20.0)}),
    "dppo_kl": ("dppo_kl", {"maximum": (f"{A}.clip_ratio_c", 20.0)}),
    "dro": ("dro", {"beta": (f"{A}.policy_loss.dro_beta", 0.0)}),
}
MEANS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
    "token-sum": "token_sum",
}
KL = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "full": "full",
}  # fmt: skip


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for a verl YAML or list of overrides."""
    if "data.response_key" in source.settings and not any(key.startswith((R, M, "model.")) for key in source.settings):
        raise RefusedError(_evaluation(source))
    if "data.output_path" in source.settings:
        raise RefusedError(_generation(source))
    if source.settings.get("trainer.val_only"):
        raise RefusedError(
            f"{source.path} evaluates and trains nothing (trainer.val_only). Leave that out, and evaluate with the "
            "result: python -m jaxrl_llm evaluate --config=THE_RESULT"
        )
    version = options.version or VERSIONS[0]
    if version not in VERSIONS:
        raise RefusedError(f"--version is {version!r}, but verl's are {', '.join(VERSIONS)}")
    of_sft = {"model.partial_pretrain", "model.path", "data.messages_key"} & source.settings.keys() or any(
        key.startswith("optim.") for key in source.settings
    )
    trainer = source.trainer or ("sft" if of_sft else "ppo")
    engine = trainer == "sft" and "model.partial_pretrain" not in source.settings
    former = FORMER | (FORMER_OF_SFT if engine else {})
    named = {}
    for key, value in source.settings.items():
        start = next((start for start in former if key == start or (start[-1] == "." and key.startswith(start))), "")
        name = former.get(start, "") + key.removeprefix(start)
        if not start or name not in named:  # verl reads the former name where both are set, as in what hydra writes
            named[name] = (key, value)
    theirs = defaults("verl", "sft_engine" if engine else "sft" if trainer == "sft" else version)
    estimator = source.settings.get("algorithm.adv_estimator", theirs.get("algorithm.adv_estimator"))
    algorithm = "SFT" if trainer == "sft" else "PPO" if estimator == "gae" else estimator
    of = "0.8" if trainer == "sft" and not engine else version  # which had sft_trainer.yaml last
    draft = Draft(source, f"{algorithm}, from FILE of verl; what that leaves out is as in verl {of}.", theirs, named)
    draft.set_direct("verl")
    _data(draft)
    gpus = options.devices or int(draft.get("trainer.nnodes")) * int(draft.get("trainer.n_gpus_per_node"))
    draft.use("trainer.nnodes", "trainer.n_gpus_per_node")
    devices = _model(draft, gpus)
    if trainer == "sft":
        _sft(draft, devices)
    else:
        _online(draft, gpus, devices, version)
    of_megatron = ("engine" if trainer == "sft" else f"{A}.megatron") + ".override_transformer_config"
    if draft.get(key := f"{of_megatron}.fp8"):
        shared.fp8_matmuls(draft, key)
    verl_run.trainer(draft, options)
    verl_run.learning_rate(draft, "optim" if trainer == "sft" else f"{A}.optim")
    return draft


def _evaluation(source: Source) -> str:
    """Return what to run in place of verl's main_eval, which scores given responses."""
    keys = {
        "path": "responses",
        **{key: key for key in ("prompt_key", "response_key", "data_source_key", "reward_model_key")},
    }
    flags = [
        f"--{ours}={source.settings[f'data.{key}']}" for key, ours in keys.items() if f"data.{key}" in source.settings
    ]
    path, name = (source.settings.get(f"custom_reward_function.{key}") for key in ("path", "name"))
    reward = f" --config.rewards.functions={path}:{name or 'compute_score'}" if path else ""
    return (
        f"{source.path} scores responses that are given, and trains nothing. The command for that is `python -m "
        f"jaxrl_llm evaluate {' '.join(flags)}{reward}`, or jaxrl_llm.evaluate_responses in Python"
    )


def _generation(source: Source) -> str:
    """Return what to run in place of verl's main_generation, which writes samples of prompts."""
    names = {
        "model": ("model.path",), "prompts_file": ("data.path", "data.train_files"), "samples": ("data.n_samples", "n"),
        "temperature": ("temperature",), "top_k": ("top_k",), "top_p": ("top_p",),
        "max_new_tokens": ("response_length",), "tensor": ("tensor_model_parallel_size",),
    }  # fmt: skip
    said = {
        flag: value
        for flag, ends in names.items()
        for key, value in source.settings.items()
        if key in ends or key.removeprefix("actor_rollout_ref.").removeprefix("rollout.") in ends
    }
    flags = " ".join(f"--{flag}={value}" for flag, value in said.items())
    return (
        f"{source.path} samples completions of prompts, and trains nothing. The command for that is `python -m "
        f"jaxrl_llm generate {flags} > {source.settings['data.output_path']}`, which writes a line of JSON for each "
        "completion, or jaxrl_llm.generate in Python"
    )


def _data(draft: Draft) -> None:
    """Set the data sets, what happens to long rows, and the columns that rewards read."""
    files, held_out = draft.get("data.train_files"), draft.get("data.val_files")
    custom = [f"{at}custom_cls.{key}" for key in ("path", "name") for at in ("data.", "")]
    path, name = (draft.get(pair[0]) or draft.get(pair[1]) for pair in (custom[:2], custom[2:]))
    if path:
        draft.set("data.path", with_options(f"{path}:{name}", {"data_files": files}), *custom, "data.train_files")
        held_out = with_options(f"{path}:{name}", {"data_files": held_out}) if held_out else None
    elif isinstance(files, list) and len(files) > 1:
        draft.set("data.sources", tuple({"path": file, "split": "train"} for file in files), "data.train_files")
    else:
        draft.set("data.path", files[0] if isinstance(files, list) else files, "data.train_files")
    if isinstance(held_out, list) and len(held_out) > 1:
        sets = tuple({"set": "val", "path": file, "split": "train"} for file in held_out)
        draft.set("eval.sets", sets, "data.val_files")
    elif held_out:
        draft.set("data.eval_path", held_out[0] if isinstance(held_out, list) else held_out, "data.val_files")
        draft.set("data.eval_split", "train", "data.val_files")
    overlong = OVERLONG.get(str(draft.get("data.truncation")), "error")
    overlong = "filter" if draft.get("data.filter_overlong_prompts") else overlong
    draft.set("data.overlong", overlong, "data.truncation", "data.filter_overlong_prompts")
    names = ("return_raw_input_ids", "return_raw_chat", "return_full_prompt")
    columns = {key: True for key in names if draft.get(f"data.{key}")}
    if columns:
        draft.set("data.format", with_options("verl", columns), *(f"data.{key}" for key in columns))
    draft.use(*(f"data.{key}" for key in names))
    most = int(draft.get("data.train_max_samples") or -1)
    if most > 0 and "data.sources" in draft.values:
        draft.check(
            f"data.train_max_samples = {most} counts the rows of all files together; here all are read. Write how many "
            "of each, such as train[:100], as its split in data.sources"
        )
    elif most > 0:
        draft.set("data.split", f"train[:{most}]", "data.train_max_samples")
    draft.use("data.train_max_samples")
    shared.set_options(draft, "data.chat_template_kwargs", "data.apply_chat_template_kwargs")
    shared.set_options(draft, "data.image_processor", "data.mm_processor_kwargs")


def _model(draft: Draft, gpus: int) -> int:
    """Set the model, its adapters, rematerialisation and the mesh; return the devices that have rows of their own."""
    trusts = [f"{key}.trust_remote_code" for key in ("data", M, "model")]
    draft.set("model.trust_remote_code", any(draft.get(key) for key in trusts) or None, *trusts)
    keys = (f"{M}.enable_gradient_checkpointing", f"{M}.enable_activation_offload")
    keys = (*keys, "model.enable_gradient_checkpointing")
    remat = "block" if draft.get(keys[0]) or draft.get(keys[2]) else "auto"
    draft.set("model.remat", "offload" if draft.get(keys[1]) else remat, *keys)
    entries = shared.below(draft, f"{M}.override_config")
    if isinstance(inner := entries.pop("model_config", None), dict):
        entries |= inner
    entries = {key: value for key, value in entries.items() if not re.search("drop|moe_router", key)}
    if entries:
        written = ", ".join(f"{key}={value!r}" for key, value in entries.items())
        draft.set("model.overrides", written, f"{M}.override_config", f"{M}.override_config.model_config")
        draft.use(*(f"{M}.override_config.{key}" for key in entries))
    shared.check_model(draft)
    for key in (f"{A}.fsdp_config.model_dtype", "model.fsdp_config.model_dtype"):
        if dtype := draft.get(key):
            draft.set("model.param_dtype", shared.type_name(dtype), key)
    for key in (f"{A}.fsdp_config.dtype", "engine.dtype"):
        if draft.sets(key):
            dtype = shared.type_name(draft.get(key))
            draft.set("model.dtype", "bfloat16" if dtype == "float16" else dtype, key)
            if dtype == "float16":
                draft.check(f"{key} = {draft.get(key)}: bfloat16 is written, as there is no loss scaling here")
    if not draft.values.get("lora.rank"):
        draft.drop("lora.alpha", "lora.targets", "lora.exclude_modules")
    for section in (f"{M}.lora", "model.lora"):  # of Megatron
        if draft.get(f"{section}.rank") and not draft.sets(f"{section}.alpha"):
            draft.set("lora.alpha", 32.0, f"{section}.alpha")
    if "lora.path" in draft.values:
        draft.set("lora.reference", "base")  # verl's is the actor without any adapter
        draft.drop("lora.rank", "lora.exclude_modules")
    frozen = draft.get(key := f"{A}.freeze_vision_tower") or "visual" in str(draft.values.get("lora.exclude_modules"))
    if re.search(rules("warnings")["images"], str(draft.values.get("model.path")), re.IGNORECASE):
        kind = "lora" if draft.values.get("lora.rank") or "lora.path" in draft.values else "trained"
        draft.set("model.vision", "frozen" if frozen else kind, key)
    # FSDP shards parameters over all devices unless a size is set.
    key = f"{A}.fsdp_config.fsdp_size"
    size = int(draft.get(key) or -1)
    draft.set("mesh.fsdp", size, key)
    if size < 0:
        draft.set("mesh.data", 1, key)
    contexts = [f"{at}ulysses_sequence_parallel_size" for at in (f"{A}.", "")]
    context = next((key for key in contexts if draft.sets(key)), contexts[0])
    tensor, expert = (f"{A}.megatron.{name}_model_parallel_size" for name in ("tensor", "expert"))
    return shared.shared_rows(draft, {"mesh.context": context, "mesh.tensor": tensor, "mesh.expert": expert}, gpus)


def _online(draft: Draft, gpus: int, devices: int, version: str) -> None:
    """Set everything about reinforcement learning: batch, loss, advantages, KL, rewards and sampling.

    `devices` of the `gpus` have rows of their own.
    """
    prompts, mini = int(draft.get("data.train_batch_size")), int(draft.get(f"{A}.ppo_mini_batch_size"))
    group = int(draft.get(f"{R}.n"))
    if prompts % mini:
        fitting = max(size for size in range(1, min(mini, prompts) + 1) if prompts % size == 0)
        draft.check(
            f"{A}.ppo_mini_batch_size is {mini}, which does not divide data.train_batch_size = {prompts} (prompts "
            f"both): {fitting} is taken"
        )
        mini = fitting
    draft.set("batch.minibatches", prompts // mini, f"{A}.ppo_mini_batch_size")
    _microbatches(draft, devices, mini * group)
    draft.set("optimizer.no_decay", (), f"{A}.optim.weight_decay")
    for side in ("low", "high"):
        key, both = f"{A}.clip_ratio_{side}", f"{A}.clip_ratio"
        keys = (key, both) if draft.sets(key) else (both, key)
        draft.take(f"algorithm.epsilon_{side}", *keys)
    sides = [draft.sets(f"{A}.clip_ratio_{side}") for side in ("low", "high")]
    if draft.sets(f"{A}.clip_ratio") and not all(sides) and f"{A}.clip_ratio_low" in draft.defaults:
        draft.check(f"{A}.clip_ratio is written; verl itself reads clip_ratio_low and clip_ratio_high alone by now")
    if preset := draft.get(CORRECTION):  # a call of RolloutCorrectionConfig, or its name
        name = str(preset).removeprefix("RolloutCorrectionConfig.").removesuffix("()")
        draft.set(CORRECTION, name, CORRECTION)
    _loss(draft, version)
    _advantage(draft, devices, mini * group)
    _divergence(draft)
    _rewards(draft)
    verl_tools.tools(draft)
    if draft.get("distillation.enabled"):
        distillation.of_verl(draft)
    _sampling(draft, gpus, prompts * group)
    if draft.get(key := "algorithm.filter_groups.enable"):
        draft.set("algorithm.dynamic_sampling", True, key)
        key = "algorithm.filter_groups.max_num_gen_batches"
        draft.set("algorithm.max_sampling_rounds", int(draft.get(key) or 0) or 1000, key)
        metric = draft.get(key := "algorithm.filter_groups.metric")
        # The scores of verl's own functions are flat where their `acc` is.
        if metric not in (None, "score", "seq_reward", "seq_final_reward") and draft.get("custom_reward_function.path"):
            draft.set("algorithm.dynamic_sampling_metric", metric, key)
    _correction(draft)


def _microbatches(draft: Draft, devices: int, rows: int) -> None:
    """Set the micro-batches of minibatches of so many rows, and of the passes before the update.

    Rows are counted there for GPUs that share them, all those of a row together, and tokens for each GPU of a row.
    """
    each_gpu = devices * draft.values.get("mesh.context", 1)
    sizes = (f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.ppo_micro_batch_size")
    tokens = (f"{A}.use_dynamic_bsz", f"{A}.ppo_max_token_len_per_gpu")
    each, total = (draft.get(key) for key in sizes)
    if draft.get(tokens[0]):
        draft.set("batch.microbatch_tokens", int(draft.get(tokens[1]) or 16384) * each_gpu, *tokens)
        draft.use(*sizes)
    elif each or total:
        shared.microbatch_rows(draft, int(each) * devices if each else int(total), rows, *sizes)
    keys = (f"{M}.tiled_mlp.enabled", f"{M}.tiled_mlp.num_shards")
    length = sum(int(draft.get(f"data.max_{part}_length")) for part in ("prompt", "response"))
    if draft.get(keys[0]):
        at_once = int(draft.get(tokens[1]) or 16384) if draft.get(tokens[0]) else length * int(each or 1)
        draft.set("model.mlp_tile_tokens", math.ceil(at_once / int(draft.get(keys[1]) or 4)), *keys)
    draft.use(*keys)
    for keys in ([f"{part}.log_prob_{key}" for key in PASS_SIZES] for part in PASSES):
        each, total, dynamic, most = (draft.get(key) for key in keys)
        draft.use(*keys)
        if dynamic and most and "batch.logps_microbatch_tokens" not in draft.values:
            draft.set("batch.logps_microbatch_tokens", int(most) * each_gpu, keys[3])
        elif not dynamic and (each or total) and "batch.logps_microbatch_rows" not in draft.values:
            size, key = (int(each) * devices, keys[0]) if each else (int(total), keys[1])
            shared.microbatch_rows(draft, size, rows, key, ours="batch.logps_microbatch_rows")


def _correction(draft: Draft) -> None:
    """Set how rows are weighted, and which are left out, for the difference between sampler and trainer."""
    correction = draft.get(key := f"{CORRECTION}.rollout_is")
    if correction and draft.get(f"{CORRECTION}.bypass_mode") and draft.values["algorithm.loss"] != "reinforce":
        draft.check(f"{key} is {correction}, which verl measures and does not apply with bypass_mode and ppo_clip")
        draft.use(key, f"{key}_threshold", f"{key}_batch_normalize")
    elif correction:
        # One number cuts the weights, `low_high` sets those outside to 0 (IcePop).
        *low, high = str(draft.get(f"{key}_threshold") or 2.0).split("_")
        draft.set("algorithm.importance_correction", f"{correction}_{'mask' if low else 'truncate'}", key)
        draft.set("algorithm.importance_max", float(high), f"{key}_threshold")
        draft.set("algorithm.importance_min", float(low[0]) if low else None, f"{key}_threshold")
        normalize = f"{key}_batch_normalize"
        draft.set("algorithm.importance_normalize", draft.get(normalize), normalize)
    if criteria := draft.get(key := f"{CORRECTION}.rollout_rs"):
        draft.set("algorithm.rejection", criteria, key)
        bounds = draft.get(f"{key}_threshold")
        draft.set("algorithm.rejection_bounds", None if bounds is None else str(bounds), f"{key}_threshold")


def _sampling(draft: Draft, gpus: int, rows: int) -> None:
    """Set how so many rows a step are sampled, by which devices and in which types."""
    if draft.sets(key := f"{R}.do_sample"):
        draft.set("rollout.temperature", None if draft.get(key) else 0.0, key)
    if draft.sets(key := f"{R}.max_num_seqs") and draft.get(key):
        draft.use(key)
        slots = int(draft.get(key)) * gpus
        if slots < rows:
            draft.set("rollout.slots", slots, key)
    draft.use(f"{R}.prompt_length", f"{R}.response_length")
    if draft.sets(key := f"{R}.dtype"):
        dtype = {"half": "float16", "float": "float32"}.get(str(draft.get(key))) or shared.type_name(draft.get(key))
        draft.set("rollout.weights_dtype", dtype, key)
        if dtype == "bfloat16" and "model.dtype" not in draft.values:
            draft.set("model.dtype", dtype, key)
    if int(draft.get(key := f"{R}.tensor_model_parallel_size") or 1) > 1:
        draft.set("rollout.mesh", f"tensor={int(draft.get(key))}", key)
        draft.check(f"{key} = {draft.get(key)}: rollout.mesh needs a multiple of so many devices; auto needs none")
    if mode := draft.get(key := f"{A}.router_replay.mode"):
        draft.use(key)
        if mode == "R3":
            draft.set("rollout.router_replay", True, key)
        elif mode != "disabled":
            draft.check(f"{key} = {mode} has no equivalent: rollout.router_replay takes the sampler's experts, R3")
    kind = draft.get(key := f"{R}.quantization")
    draft.use(key)
    if kind == "fp8":
        draft.set("rollout.weights_dtype", "fp8", key)
        if "algorithm.importance_correction" not in draft.values:
            draft.set("algorithm.importance_correction", "token_truncate", key)
            draft.check("verl corrects for samples in fp8 where rollout_correction is set alone; here it must be done")
    elif kind:
        draft.check(f"{key} = {kind} has no equivalent: rollout.weights_dtype takes fp8 and int8")


def _loss(draft: Draft, version: str) -> None:
    """Set the policy loss with its options, and the aggregation of that version."""
    section, mode = f"{A}.policy_loss", draft.get(f"{A}.policy_loss.loss_mode")
    low, high = draft.values["algorithm.epsilon_low"], draft.values["algorithm.epsilon_high"]
    # Bypass mode has losses of its own, whatever loss_mode says.
    preset = str(draft.values.get(CORRECTION, ""))
    if draft.get(f"{CORRECTION}.bypass_mode") or preset.startswith("bypass_") or mode == "bypass_mode":
        kind = draft.get(f"{CORRECTION}.loss_type") or ("reinforce" if preset.startswith("bypass_pg") else "ppo_clip")
        mode = {"ppo_clip": "vanilla", "reinforce": "gpg"}.get(str(kind))
        if mode is None:
            raise ConfigError(f"{CORRECTION}.loss_type is {kind!r}, but verl has ppo_clip and reinforce")
        draft.set("algorithm.old_logps", "sampler", f"{CORRECTION}.bypass_mode")
        draft.use(f"{CORRECTION}.loss_type")
    elif mode in ("dppo_tv", "dppo_kl"):  # which compare with the sampler unless told otherwise
        draft.set("algorithm.old_logps", "trainer", f"{section}.loss_mode")
    shared.check_known(f"{section}.loss_mode", mode, LOSSES)
    if mode == "dro" and not float(draft.get(f"{section}.dro_beta") or 0) > 0:
        raise ConfigError(f"{section}.loss_mode is dro, for which verl wants {section}.dro_beta above 0: set it")
    loss, keys = LOSSES[mode]
    options = {option: draft.first(key, default=default) for option, (key, default) in keys.items()}
    draft.use(f"{A}.tau_pos", f"{A}.tau_neg", *(key for key, _ in keys.values()))
    if mode == "cispo":
        options = {"minimum": float(f"{1 - low:g}")}
        draft.set("algorithm.epsilon_high", 1 + high, f"{A}.clip_ratio_high")
    if mode == "vanilla":
        set_loss(draft, [(loss, {"dual_clip": f"{A}.clip_ratio_c"})], f"{section}.loss_mode")
    else:
        draft.set("algorithm.loss", with_options(loss, options), f"{section}.loss_mode")
    means = draft.get(f"{A}.loss_agg_mode")
    shared.check_known(f"{A}.loss_agg_mode", means, MEANS)
    # These take sequence means in verl, whatever is set.
    sequences = mode in ("sapo", "geo_mean") or (mode == "gspo" and version != "0.9")
    draft.set("algorithm.aggregation", "sequence" if sequences else MEANS[means], f"{A}.loss_agg_mode")
    if means == "seq-mean-token-sum-norm":
        factor, longest = draft.get(key := f"{A}.loss_scale_factor"), draft.values["rollout.max_completion_length"]
        if factor is not None and int(factor) != longest:
            draft.check(
                f"{key} = {factor}, by which verl divides, has no equivalent: constant divides by "
                f"rollout.max_completion_length = {longest}, and gradients, which optimizer.max_grad_norm bounds, are "
                f"{int(factor) / longest:g} times those there"
            )
        draft.check(
            "verl's seq-mean-token-sum-norm divides by the rows since 0.8, as ours does; against a run of an older one "
            "the gradient is smaller by their number (with Adam and clipping the update is the same)"
        )
    if mode == "gspo" and version == "0.9" and means != "seq-mean-token-mean":
        draft.check(
            f"verl's gspo takes {means} since 0.9, as loss_agg_mode says, and sequence means up to 0.8, as its paper: "
            "--version=0.8 writes these"
        )


def _advantage(draft: Draft, devices: int, minibatch: int) -> None:
    """Set the advantages, and the critic where there is one; a minibatch has so many rows."""
    name, gamma, lam = (draft.get(f"algorithm.{key}") for key in ("adv_estimator", "gamma", "lam"))
    gamma = draft.settings.get("algorithm.gemma", gamma)
    by_std = draft.get("algorithm.norm_adv_by_std_in_grpo")
    known = {
        "gae": with_options("ppo", {"gamma": gamma, "lam": lam}),
        "grpo": "group(eps=1e-06)",
        "grpo_vectorized": "group(eps=1e-06)",
        "grpo_passk": "passk" if by_std else "passk(normalize=False)",
        "rloo": "rloo",
        "rloo_vectorized": "rloo",
        "reinforce_plus_plus": with_options("reinforce_plus_plus", {"gamma": gamma}),
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
        "remax": "remax",
        "opo": "opo",
        "gpg": "gpg",
        "gdpo": "gdpo(eps=1e-06)",
        "optimal_token_baseline": "otb",
        "tir_optimal_token_baseline": "otb",
    }
    shared.check_known("algorithm.adv_estimator", name, known)
    if name == "gae":
        draft.set("algorithm.name", "ppo", "algorithm.adv_estimator")
    keys = (f"algorithm.{key}" for key in ("adv_estimator", "gamma", "gemma", "lam"))
    draft.set("algorithm.advantage", known[name], *keys)
    if draft.get(f"{R}.n") == 1 and name not in ("gae", "reinforce_plus_plus", "remax"):
        draft.set("rollout.group_size", 2, f"{R}.n")
        draft.check(
            f"{R}.n is 1, of which verl's {name} takes the reward itself for the advantage; here it compares "
            "completions of a prompt, and rollout.group_size = 2 is written"
        )
    if name in ("grpo", "grpo_vectorized"):
        draft.set("algorithm.scale_rewards", "group" if by_std else "none", "algorithm.norm_adv_by_std_in_grpo")
    elif name == "grpo_passk":
        draft.use("algorithm.norm_adv_by_std_in_grpo")
    if name == "gae":
        warmup = int(draft.get("trainer.critic_warmup") or 0)
        draft.set("critic.warmup_steps", max(warmup - 1, 0), "trainer.critic_warmup")
        _critic(draft, devices, minibatch)
    else:
        draft.drop(*[key for key in draft.values if key.startswith("critic.")])
        draft.use("trainer.critic_warmup")


def _critic(draft: Draft, devices: int, minibatch: int) -> None:
    """Set the passes, the minibatches and the adapters of the critic."""
    passes, policy = int(draft.get("critic.ppo_epochs") or 0), int(draft.get(f"{A}.ppo_epochs"))
    if passes and passes != policy:
        draft.set("critic.num_iterations", passes, "critic.ppo_epochs")
    prompts, group = int(draft.get("data.train_batch_size")), int(draft.get(f"{R}.n"))
    own = int(draft.get("critic.ppo_mini_batch_size") or 0)
    if own and prompts % own:
        draft.check(
            f"critic.ppo_mini_batch_size is {own}, which does not divide data.train_batch_size = {prompts} (prompts "
            "both): that of the policy is taken"
        )
    elif own and own * group != minibatch:
        draft.set("critic.minibatches", prompts // own, "critic.ppo_mini_batch_size")
        minibatch = own * group
    rank = int(draft.get("critic.model.lora_rank") or 0)
    if rank or draft.values.get("lora.rank"):  # a critic has adapters there only where it is given some
        draft.set("critic.lora_rank", rank, "critic.model.lora_rank")
    if rank:
        draft.take("critic.lora_alpha", "critic.model.lora_alpha")
        targets = draft.get(key := "critic.model.target_modules")
        draft.set("critic.lora_targets", (targets,) if isinstance(targets, str) else targets, key)
    rows = ("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size")
    each, total = (draft.get(key) for key in rows)
    if (each or total) and not draft.values.get("batch.microbatch_tokens"):
        shared.microbatch_rows(
            draft, int(each) * devices if each else int(total), minibatch, *rows, ours="critic.microbatch_rows"
        )
    adapters = (f"critic.model.{name}" for name in ("lora_rank", "lora_alpha", "target_modules"))
    draft.use("critic.ppo_epochs", "critic.ppo_mini_batch_size", *adapters, *rows)


def _divergence(draft: Draft) -> None:
    """Set the KL from the reference, in the loss, in the reward, or in both."""
    loss, reward, control = f"{A}.use_kl_loss", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl"
    draft.use(loss, reward)

    def estimator(key: str) -> str:
        shared.check_known(key, name := str(draft.get(key)).removesuffix("+"), KL)
        return KL[name]

    in_loss = draft.get(loss) and float(draft.get(f"{A}.kl_loss_coef")) > 0
    in_reward = draft.get(reward) and float(draft.get(f"{control}.kl_coef")) > 0
    if in_loss:
        draft.set("algorithm.beta", float(draft.get(f"{A}.kl_loss_coef")), loss, f"{A}.kl_loss_coef")
        kl = estimator(key := f"{A}.kl_loss_type")
        draft.set("algorithm.kl", "k2" if str(draft.get(key)).endswith("+") else kl, key)  # `k3+` has k2's gradient
    if in_reward:
        beta, kl = ("reward_beta", "reward_kl") if in_loss else ("beta", "kl")
        draft.set(f"algorithm.{beta}", float(draft.get(f"{control}.kl_coef")), reward, f"{control}.kl_coef")
        name = estimator("algorithm.kl_penalty")
        if name == "full":
            draft.check(
                "algorithm.kl_penalty is full, which verl names and does not compute (NotImplementedError). Here the "
                "sum over the vocabulary is a term of the loss alone; the reward gets k1"
            )
            name = "k1"
        draft.set(f"algorithm.{kl}", name, "algorithm.kl_penalty")
        if not in_loss:
            draft.set("algorithm.kl_in_reward", True, reward)
        draft.set("algorithm.kl_controller", draft.get(f"{control}.type"), f"{control}.type")
        if draft.get(f"{control}.type") == "adaptive":
            draft.take("algorithm.kl_target", f"{control}.target_kl")
            draft.take("algorithm.kl_horizon", f"{control}.horizon")
    elif not in_loss:
        draft.set("algorithm.beta", 0.0, loss, reward)


def _rewards(draft: Draft) -> None:
    """Set the reward function and the reward model; a guess from the data set's name where neither is set."""
    functions, keys = [], ["custom_reward_function.path", "custom_reward_function.name"]
    parts = []  # of the dictionary that the function returns, which gdpo reads one by one
    if draft.get("algorithm.adv_estimator") == "gdpo":
        parts, weights = draft.get("algorithm.gdpo_reward_keys"), draft.get("algorithm.gdpo_reward_weights")
        if not parts:
            raise ConfigError("algorithm.adv_estimator is gdpo, but algorithm.gdpo_reward_keys names no rewards")
        draft.set("rewards.weights", [float(x) for x in weights] if weights else None, "algorithm.gdpo_reward_weights")
        keys.append("algorithm.gdpo_reward_keys")
        draft.check(
            f"verl's gdpo reads {', '.join(parts)} from the dictionary that one reward function returns; here each is "
            "a function of its own: write those that rewards.functions names"
        )
    if path := draft.get("custom_reward_function.path"):
        options = shared.below(draft, "custom_reward_function.reward_kwargs")
        keys += [f"custom_reward_function.reward_kwargs.{key}" for key in options]
        names = parts or [draft.get("custom_reward_function.name")]
        functions += [with_options(f"{path}:{name}", options) for name in names]
    elif parts:
        functions += parts
    if draft.get("reward_model.enable") and path and draft.named("reward_model.enable") != "reward_model.enable":
        draft.use("reward_model.enable", "reward_model.model.path")
        draft.check(
            f"verl serves {draft.get('reward_model.model.path')} to the reward function, which asks it; here python -m "
            f"jaxrl_llm serve does: give {path} its address"
        )
    elif draft.get("reward_model.enable"):
        if path:
            draft.check(
                f"{draft.named('custom_reward_function.path')} is left out: with reward_model.enable verl takes the "
                "model's scores and calls no function. For the sum of both name it in rewards.functions too"
            )
        names = {"max_length": "reward_model.max_length", "rows": "reward_model.micro_batch_size_per_gpu"}
        functions, keys = [], ["reward_model.enable", "reward_model.model.path", *names.values()]
        options = {name: draft.get(key) for name, key in names.items() if draft.get(key)}
        for name, below in {"offload": "fsdp_config.param_offload", "trust_remote_code": "trust_remote_code"}.items():
            if draft.get(key := f"reward_model.model.{below}"):
                options[name] = True
                keys.append(key)
        functions.append(with_options(f"model:{draft.get('reward_model.model.path')}", options))
    draft.use("reward_model.enable", "custom_reward_function.name")
    if functions:
        draft.set("rewards.functions", tuple(functions), *keys)
    else:
        files = str(draft.get("data.train_files")).lower()
        guess = "gsm8k_accuracy" if "gsm8k" in files else "math_accuracy" if "math" in files else "exact_match"
        if "gsm8k" in files and len(draft.values.get("data.sources", ())) > 1:
            guess = draft.function("by_data_source", rules("verl")["functions"]["by_data_source"])
        draft.set("rewards.functions", (guess,))
        draft.check(
            f"the file names no reward function, so verl chooses one by data_source; {guess} is written: see that it "
            "is right (rewards.functions)"
        )
    manager = "reward_model.reward_manager"
    if draft.get(manager) == "prime":
        draft.set("rewards.workers", 8, manager)
    for at in ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
        if draft.get(f"{at}.enable"):
            length = int(draft.get(f"{at}.len"))
            draft.set("algorithm.overlong_buffer", length, f"{at}.enable", f"{at}.len", manager)
            factor = draft.get(f"{at}.penalty_factor")
            draft.set("algorithm.overlong_penalty", 1.0 if factor is None else float(factor), f"{at}.penalty_factor")
            shared.check_punished_length(draft, "reward_model.reward_kwargs.max_resp_len")
    draft.use(manager)


def _sft(draft: Draft, devices: int) -> None:
    """Set the batch, the optimizer and the columns of SFT."""
    rows = int(draft.get("data.train_batch_size"))
    draft.set("algorithm.name", "sft")
    keys = ("data.micro_batch_size_per_gpu", "data.micro_batch_size")
    if draft.get("data.use_dynamic_bsz"):
        most = int(draft.get("data.max_token_len_per_gpu")) * devices * draft.values.get("mesh.context", 1)
        draft.set("batch.microbatch_tokens", most, "data.max_token_len_per_gpu", "data.use_dynamic_bsz", *keys)
    else:
        shared.microbatch_rows(draft, int(draft.get(keys[0])) * devices, rows, *keys)
    draft.use("data.use_dynamic_bsz", "data.max_token_len_per_gpu")
    draft.set("optimizer.no_decay", (), "optim.weight_decay")
    shared.betas(draft, "optim.betas")
    draft.drop("data.prompt_key")
    messages = draft.get("data.messages_key")
    if messages or draft.get("data.multiturn.enable"):
        if messages not in (None, "messages"):
            draft.set("data.format", with_options("chat_template", {"field_messages": messages}), "data.messages_key")
        draft.use("data.multiturn.enable", "data.multiturn.messages_key", "data.messages_key")
        if isinstance(thinks := draft.get(key := "data.enable_thinking_default"), bool):
            given = draft.values.get("data.chat_template_kwargs")
            written = ", ".join(filter(None, (given, f"enable_thinking={thinks}")))
            draft.set("data.chat_template_kwargs", written, key, "data.apply_chat_template_kwargs")
        return
    names = ("data.prompt_key", "data.response_key", "data.prompt_dict_keys", "data.response_dict_keys")
    columns = []
    for key, inner, unset in ((names[0], names[2], "question"), (names[1], names[3], "answer")):
        path = [draft.first(key, default=unset), *(draft.get(inner) or ())]
        columns.append("".join(f'["{name}"]' for name in path))
    given = shared.below(draft, "data.apply_chat_template_kwargs")
    options = "".join(f", {name}={value!r}" for name, value in given.items())
    text = rules("verl")["functions"]["columns"]
    function = draft.function("columns", text, PROMPT=columns[0], RESPONSE=columns[1], OPTIONS=options)
    draft.set("data.format", function, *names)
