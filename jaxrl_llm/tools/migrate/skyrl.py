"""The rules for SkyRL: the overrides of its command, `python -m skyrl.train.entrypoints.main_base key=value`."""

import re
from collections.abc import Sequence

from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import Draft, Options, RefusedError, Source, has_experts
from jaxrl_llm.tools.migrate.losses import set_loss, with_options
from jaxrl_llm.tools.migrate.table import rules
from jaxrl_llm.tools.migrate.trees import parsed

RULES = rules("skyrl")
A, P, G = "trainer.algorithm", "trainer.policy", "generator"
# What its commands start, or else the keys that they set.
STARTS = re.compile(
    r"\b(skyrl|skyrl_train|examples)[./][\w./]*\bmain_\w+"
    r"|\btrainer\.(algorithm|policy)\.\w+.*=|\bgenerator\.(sampling_params|inference_engine)\.\w+="
)
ENGINE, MEGATRON = "generator.inference_engine", "trainer.policy.megatron_config"
MEANS = {
    "token_mean": "token",
    "token_mean_legacy": "microbatch_token",
    "sequence_mean": "sequence",
    "seq_mean_token_sum_norm": "constant",
    "prompt_mean": "prompt",
}
# Our loss of a type, and its options with the keys that have their values.
LOSSES: dict[str, tuple[str, dict[str, str]]] = {
    "regular": ("ppo_clip", {}),
    "dual_clip": ("ppo_clip", {"dual_clip": f"{A}.clip_ratio_c"}),
    "gspo": ("gspo_token", {}),
    "cispo": ("cispo", {}),
    "sapo": ("sapo", {"temperature_positive": f"{A}.sapo.tau_pos", "temperature_negative": f"{A}.sapo.tau_neg"}),
    "clip_cov": (
        "clip_cov",
        {
            "fraction": f"{A}.clip_cov.clip_ratio",
            "lower": f"{A}.clip_cov.clip_cov_lb",
            "upper": f"{A}.clip_cov.clip_cov_ub",
        },
    ),
    "kl_cov": ("kl_cov", {"fraction": f"{A}.kl_cov.kl_cov_frac", "kl_coef": f"{A}.kl_cov.ppo_kl_coef"}),
    "rollout_is": ("rollout_is", {}),
    "importance_sampling": ("importance_sampling", {}),
    "dppo": ("dppo", {}),
}
# What changes what is learned and has no setting, unless it has this value; the last is what to do.
ABSENT = {
    f"{A}.advantage_batch_normalize": (False, "algorithm.scale_rewards=batch divides by the batch's deviation"),
    f"{G}.zero_reward_on_non_stop": (False, "algorithm.missing_eos_penalty subtracts from the score of such a row"),
    f"{G}.step_wise_trajectories": (False, "a row is a whole episode here"),
    f"{A}.off_policy_correction.outlier_token_is_threshold_low": (None, "algorithm.rejection has seq_max_k2"),
    f"{A}.off_policy_correction.outlier_token_is_threshold_high": (None, "algorithm.rejection has seq_max_k2"),
    "trainer.update_ref_every_epoch": (False, "algorithm.ref_sync_steps counts steps"),
    "trainer.mtp.enabled": (False, "no drafter is trained"),
    f"{P}.model.fake_int4_qat.enabled": (False, "model.qat trains for int4, of all matrices"),
}


def read_command(words: Sequence[str], path: str) -> Source:
    """Return the keys of a command's words `key=value`; the trainer is the name of what it starts."""
    pairs = (word.lstrip("+").partition("=") for word in words)
    settings = {key: parsed(value) for key, sign, value in pairs if sign and key.partition(".")[0] in RULES["sections"]}
    started = next((word for word in words if STARTS.search(word)), "")
    return Source("skyrl", started.removesuffix(".py").rpartition("main_")[2], settings, path)


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for the overrides of a command of SkyRL."""
    if source.trainer in ("sft", "generate"):
        raise RefusedError(f"{source.path}: main_{source.trainer} of SkyRL is not read; its reinforcement learning is")
    kind = str(source.settings.get(f"{A}.advantage_estimator", "grpo"))
    title = f"{kind}, from FILE of SkyRL; what that leaves out is as in SkyRL."
    draft = Draft(source, title, RULES["defaults"])
    draft.set("algorithm.name", "ppo" if kind == "gae" else "grpo", f"{A}.advantage_estimator")
    devices = _model(draft, options)
    _data(draft, options)
    _batch(draft, devices)
    _sampling(draft, source.trainer == "async")
    _advantage(draft, kind)
    _loss(draft)
    _divergence(draft)
    _rewards(draft)
    if source.trainer.startswith("dapo"):
        at = f"{A}.overlong_buffer"
        draft.set("algorithm.overlong_buffer", int(draft.first(f"{at}_len", default=512)), f"{at}_len")
        factor = f"{at}_penalty_factor"
        draft.set("algorithm.overlong_penalty", float(draft.first(factor, default=1.0)), factor)
    _run(draft, options)
    shared.check_absent(draft, ABSENT)
    return draft


def _model(draft: Draft, options: Options) -> int:
    """Set the model, its adapters and the mesh; return the devices that have rows of their own."""
    draft.set("model.path", draft.get(f"{P}.model.path"), f"{P}.model.path")
    draft.set("model.dtype", "bfloat16" if draft.get("trainer.bf16") else "float32", "trainer.bf16")
    draft.set("model.remat", "block" if draft.get(key := "trainer.gradient_checkpointing") else None, key)
    lora = f"{P}.model.lora"
    if rank := int(draft.get(f"{lora}.rank") or 0):
        draft.set("lora.rank", rank, f"{lora}.rank")
        draft.take("lora.alpha", f"{lora}.alpha")
        draft.take("lora.dropout", f"{lora}.dropout")
        targets, left = draft.get(f"{lora}.target_modules"), draft.get(f"{lora}.exclude_modules")
        draft.set("lora.targets", (targets,) if isinstance(targets, str) else tuple(targets), f"{lora}.target_modules")
        draft.set("lora.exclude_modules", (left,) if isinstance(left, str) else left, f"{lora}.exclude_modules")
    draft.use(*(f"{lora}.{name}" for name in ("rank", "alpha", "dropout", "target_modules", "exclude_modules")))
    megatron = draft.get("trainer.strategy") == "megatron"
    draft.use("trainer.strategy")
    if megatron:
        sharing = {
            "mesh.tensor": f"{MEGATRON}.tensor_model_parallel_size",
            "mesh.context": f"{MEGATRON}.context_parallel_size",
            "mesh.expert": f"{MEGATRON}.expert_model_parallel_size",
        }
        if has_experts(str(draft.values["model.path"])):
            draft.set("model.freeze_router", draft.get(key := f"{MEGATRON}.freeze_moe_router"), key)
            if draft.get(key := f"{MEGATRON}.moe_router_load_balancing_type") not in (None, "none"):
                draft.take("model.router_aux_loss_coef", f"{MEGATRON}.moe_aux_loss_coeff", default=0.0)
                draft.use(key)
    else:
        sharing = {"mesh.context": f"{P}.sequence_parallel_size"}
        size = int(draft.get(key := f"{P}.fsdp_config.fsdp_size") or -1)
        draft.set("mesh.fsdp", size, key)
        draft.set("mesh.data", 1 if size < 0 else None, key)
        draft.set("model.offload", draft.get(key := f"{P}.fsdp_config.cpu_offload") or None, key)
    routed = (f"{ENGINE}.enable_return_routed_experts", f"{MEGATRON}.moe_enable_routing_replay")
    if draft.get(routed[0]) and draft.get(routed[1]):
        draft.set("rollout.router_replay", True, *routed)
    keys = [f"trainer.placement.policy_num_{name}" for name in ("gpus_per_node", "nodes")]
    gpus = int(draft.get(keys[0])) * int(draft.get(keys[1]))
    draft.use(*keys)
    if not draft.get(key := "trainer.placement.colocate_all"):
        names = ("num_engines", "tensor_parallel_size", "data_parallel_size")
        count = 1
        for name in names:
            count *= int(draft.get(f"{ENGINE}.{name}") or 1)
        draft.set("rollout.devices", count, key, *(f"{ENGINE}.{name}" for name in names))
    if (tensor := int(draft.get(key := f"{ENGINE}.tensor_parallel_size") or 1)) > 1:
        draft.set("rollout.mesh", f"tensor={tensor}", key)
    draft.use(key)
    return shared.shared_rows(draft, sharing, options.devices or gpus)


def _data(draft: Draft, options: Options) -> None:
    """Set the rows, the function that reads them, and those of evaluations."""
    key = "data.train_data"
    files, held = (list(map(str, shared.listed(draft.get(name)))) for name in (key, "data.val_data"))
    if len(files) > 1:
        draft.set("data.sources", tuple({"path": file, "split": "train"} for file in files), key)
    else:
        draft.set("data.path", files[0], key)
    draft.set("data.format", draft.function("rows", RULES["functions"]["rows"]))
    if len(held) > 1:
        draft.set("eval.sets", tuple({"set": "val", "path": file, "split": "train"} for file in held), "data.val_data")
    else:
        draft.set("data.eval_path", held[0], "data.val_data")
        draft.set("data.eval_split", "train", "data.val_data")
    draft.take("rollout.max_prompt_length", "trainer.max_prompt_length")
    draft.set("data.overlong", "filter", "trainer.max_prompt_length")
    every = int(draft.get("trainer.eval_interval"))
    draft.set("eval.every", every if every > 0 else -1, "trainer.eval_interval")
    if every > 0:
        draft.take("eval.at_start", "trainer.eval_before_train")
        draft.take("eval.samples", f"{G}.eval_n_samples_per_prompt")
        draft.set("eval.greedy", False)
        draft.set("eval.temperature", float(draft.get(f"{G}.eval_sampling_params.temperature")))
        for name in ("temperature", "top_p", "min_p", "top_k"):
            value = draft.get(key := f"{G}.eval_sampling_params.{name}")
            draft.set(f"eval.{name}", max(int(value), 0) if name == "top_k" and value is not None else value, key)
        shared.held_out_rows(draft, options, held if len(held) > 1 else held[0], "train", 0, "data.val_data")


def _batch(draft: Draft, devices: int) -> None:
    """Set the rows of a step, of an update and of a micro-batch."""
    prompts, mini = (int(draft.get(f"trainer.{name}")) for name in ("train_batch_size", "policy_mini_batch_size"))
    group = int(draft.get(f"{G}.n_samples_per_prompt"))
    draft.set("batch.prompts", prompts, "trainer.train_batch_size")
    draft.set("batch.minibatches", max(prompts // mini, 1), "trainer.policy_mini_batch_size")
    draft.set("rollout.group_size", group, f"{G}.n_samples_per_prompt")
    draft.take("algorithm.num_iterations", "trainer.update_epochs_per_batch")
    rows = min(mini, prompts) * group
    each, scored = (f"trainer.micro_{name}_batch_size_per_gpu" for name in ("train", "forward"))
    if (tokens := int(draft.get(key := "trainer.max_tokens_per_microbatch") or -1)) > 0:
        draft.set("batch.microbatch_tokens", tokens * devices * draft.values.get("mesh.context", 1), key)
        draft.use(each, scored)
        return
    shared.microbatch_rows(draft, int(draft.get(each)) * devices, rows, each)
    shared.microbatch_rows(draft, int(draft.get(scored)) * devices, rows, scored, ours="batch.logps_microbatch_rows")


def _sampling(draft: Draft, ahead: bool) -> None:
    """Set the lengths and the sampling, how far it is ahead, and what completions that did not end count.

    `ahead` is of `main_async`, which samples a batch while the one before is trained on.
    """
    at = f"{G}.sampling_params"
    draft.take("rollout.max_completion_length", f"{at}.max_generate_length")
    draft.take("rollout.temperature", f"{at}.temperature")
    draft.take("rollout.top_p", f"{at}.top_p")
    draft.take("rollout.min_p", f"{at}.min_p")
    draft.set("rollout.top_k", max(int(draft.get(f"{at}.top_k")), 0), f"{at}.top_k")
    stops = draft.get(f"{at}.stop")
    draft.set("rollout.stop", (stops,) if isinstance(stops, str) else stops, f"{at}.stop")
    draft.set("algorithm.mask_truncated", draft.get(key := f"{G}.apply_overlong_filtering") or None, key)
    if draft.get(f"{G}.chat_template.source") == "file":
        draft.set("data.chat_template", draft.get(key := f"{G}.chat_template.name_or_path"), key)
    elif name := draft.get(f"{G}.chat_template.name_or_path"):
        draft.check(f"{G}.chat_template.name_or_path = {name} is a template of SkyRL: write it to data.chat_template")
    draft.use(f"{G}.chat_template.source", f"{G}.chat_template.name_or_path")
    shared.set_options(draft, "data.chat_template_kwargs", f"{G}.chat_template_kwargs")
    if (turns := int(draft.get(f"{G}.max_turns"))) > 1:
        draft.set("environment.max_turns", turns, f"{G}.max_turns")
    fully = "trainer.fully_async"
    if draft.get(f"{fully}.enabled") or ahead:
        age = int(draft.get(f"{fully}.max_staleness_steps"))
        draft.set("rollout.staleness", 1, f"{fully}.enabled", f"{fully}.max_staleness_steps")
        if draft.get(f"{fully}.enabled"):
            draft.set("rollout.update_in_flight", True, f"{fully}.enabled")
            shared.one_batch_ahead(
                draft, f"{fully}.max_staleness_steps", age, "one batch ahead, with updates in flight"
            )
        draft.set("algorithm.old_logps", "sampler")


def _advantage(draft: Draft, kind: str) -> None:
    """Set the advantages, and which prompts are left out."""
    gamma, lam = (float(draft.get(f"{A}.{name}")) for name in ("gamma", "lambd"))
    known = {
        "grpo": "group(eps=1e-06)",
        "rloo": "rloo",
        "reinforce++": with_options("reinforce_plus_plus", {"gamma": gamma}),
        "gae": with_options("ppo", {"gamma": gamma, "lam": lam}),
        "maxrl": "maxrl",
    }
    shared.check_known(key := f"{A}.advantage_estimator", kind, known)
    draft.set("algorithm.advantage", known[kind], key, f"{A}.gamma", f"{A}.lambd")
    if kind == "grpo":
        by_std = draft.get(f"{A}.grpo_norm_by_std")
        draft.set("algorithm.scale_rewards", "group" if by_std else "none", f"{A}.grpo_norm_by_std")
    draft.use(f"{A}.grpo_norm_by_std")
    draft.set("algorithm.filter_zero_advantages", draft.get(key := f"{A}.zero_variance_filter") or None, key)
    sampling = draft.get(key := f"{A}.dynamic_sampling.type")
    if sampling == "filter":
        draft.set("algorithm.dynamic_sampling", True, key)
        most = int(draft.get(rounds := f"{A}.dynamic_sampling.max_sample_batches"))
        draft.set("algorithm.max_sampling_rounds", most if most > 0 else 1000, rounds)
    elif sampling:
        draft.check(
            f"{key} = {sampling} puts solved prompts in place of the others: algorithm.dynamic_sampling samples further"
        )
    draft.use(key)
    if kind == "gae":
        draft.set("critic.path", draft.get(key := "trainer.critic.model.path"), key)
        at = "trainer.critic.optimizer_config"
        draft.take("critic.learning_rate", f"{at}.lr")
        draft.set("critic.weight_decay", float(draft.get(f"{at}.weight_decay")), f"{at}.weight_decay")
        draft.set("critic.max_grad_norm", float(draft.get(f"{at}.max_grad_norm")), f"{at}.max_grad_norm")
        if (clip := draft.get(key := f"{A}.value_clip")) is None:
            draft.set_none("critic.epsilon", key)
        else:
            draft.set("critic.epsilon", float(clip), key)
        own, prompts = int(draft.get(key := "trainer.critic_mini_batch_size")), draft.values["batch.prompts"]
        parts = max(prompts // own, 1)
        draft.set("critic.minibatches", parts if parts != draft.values["batch.minibatches"] else None, key)
        draft.use(key)


def _loss(draft: Draft) -> None:
    """Set the policy loss, its mean, the entropy bonus and the correction for the sampler."""
    kind = str(draft.get(key := f"{A}.policy_loss_type"))
    shared.check_known(key, kind, LOSSES)
    loss, options = LOSSES[kind]
    low, high = (float(draft.get(f"{A}.eps_clip_{side}")) for side in ("low", "high"))
    keys = {side: f"{A}.eps_clip_{side}" for side in ("low", "high")}
    if kind == "cispo":
        keys = {side: f"{A}.cispo.cispo_eps_clip_{side}" for side in ("low", "high")}
        low, high = (float(draft.get(name)) for name in keys.values())
        draft.set("algorithm.loss", with_options("cispo", {"minimum": float(f"{1 - low:g}")}), key, keys["low"])
        draft.set("algorithm.epsilon_high", 1 + high, keys["high"])
        if draft.get(anchor := f"{A}.cispo.cispo_anchor") == "rollout":
            draft.set("algorithm.old_logps", "sampler", anchor)
        draft.use(anchor, keys["low"])
    elif kind == "dppo":  # the gradient of the ratio is that of the log-prob times the ratio, which dppo_kl has
        keys = {side: f"{A}.dppo.delta_{side}" for side in ("low", "high")}
        exact = draft.get(variant := f"{A}.dppo.dppo_type") == "binary_kl"
        draft.set("algorithm.loss", "dppo_kl(maximum=1000000000.0)" if exact else "dppo(kl_coef=0.0)", key, variant)
        draft.drop("algorithm.old_logps")  # the sampler's, by definition
    else:
        if kind == "rollout_is":
            draft.drop("algorithm.old_logps")
        given = {option: float(draft.get(name)) for option, name in options.items()}
        if kind in ("clip_cov", "kl_cov"):
            draft.set("algorithm.loss", with_options(loss, given), key, *options.values())
        else:
            set_loss(draft, [(loss, options)], key)
    if kind != "cispo":
        draft.take("algorithm.epsilon_low", keys["low"])
        draft.take("algorithm.epsilon_high", keys["high"])
    draft.use(*options.values(), *keys.values())
    means = str(draft.get(key := f"{A}.loss_reduction"))
    shared.check_known(key, means, MEANS)
    draft.set("algorithm.aggregation", MEANS[means], key)
    longest, whole = draft.get(name := f"{A}.max_seq_len"), draft.values["rollout.max_completion_length"]
    if means == "seq_mean_token_sum_norm" and longest is not None and int(longest) != whole:
        draft.check(
            f"{name} = {longest}, by which SkyRL divides, has no equivalent: constant divides by "
            f"rollout.max_completion_length = {whole}, and gradients are {int(longest) / whole:g} times those there"
        )
    draft.use(name)
    if draft.get(key := f"{A}.use_entropy_loss"):
        draft.take("algorithm.entropy_coef", f"{A}.entropy_loss_coef")
    draft.use(key, f"{A}.entropy_loss_coef")
    at = f"{A}.off_policy_correction"
    if level := draft.get(key := f"{at}.tis_ratio_type"):
        shared.check_known(key, level, ("token", "sequence"))
        draft.set("algorithm.importance_correction", f"{level}_truncate", key)
        draft.take("algorithm.importance_max", f"{at}.{level}_tis_ratio_clip_high")
    elif draft.get(key := f"{A}.use_tis"):
        draft.set("algorithm.importance_correction", "token_truncate", key)
        draft.take("algorithm.importance_max", f"{A}.tis_imp_ratio_cap")
    rejections, bounds = [], []
    metric = draft.get(key := f"{at}.sequence_mask_metric")
    if metric:
        shared.check_known(
            key, metric, names := {"geometric": ("seq_mean_k1", "geo"), "product": ("seq_sum_k1", "product")}
        )
        rejections.append(names[metric][0])
        bounds.append([f"{at}.{names[metric][1]}_mask_{side}" for side in ("low", "high")])
    token = [f"{at}.token_mask_is_threshold_{side}" for side in ("low", "high")]
    if all(draft.get(name) is not None for name in token):
        rejections.append("token_k1")
        bounds.append(token)
    if rejections:
        # Of the sampler's probability over the trainer's, and theirs are of its inverse.
        written = (f"{1 / float(draft.get(high))!r}_{1 / float(draft.get(low))!r}" for low, high in bounds)
        names_of = [name for pair in bounds for name in pair]
        draft.set("algorithm.rejection", ",".join(rejections), key, *names_of)
        draft.set("algorithm.rejection_bounds", ",".join(written), *names_of)
    draft.use(*(name for name in draft.settings if name.startswith(f"{at}.")), f"{A}.use_tis", f"{A}.tis_imp_ratio_cap")


def _divergence(draft: Draft) -> None:
    """Set the KL from the reference, in the loss or in the reward."""
    loss, reward, coef = f"{A}.use_kl_loss", f"{A}.use_kl_in_reward", f"{A}.kl_loss_coef"
    on = draft.get(loss) or draft.get(reward)
    draft.set("algorithm.beta", float(draft.get(coef)) if on else 0.0, coef, loss, reward)
    if on:
        draft.set("algorithm.kl", str(draft.get(key := f"{A}.kl_estimator_type")), key)
    if draft.get(reward):
        draft.set("algorithm.kl_in_reward", True, reward)
        draft.set("algorithm.kl_controller", draft.get(key := f"{A}.kl_ctrl.type"), key)
        if draft.get(key) == "adaptive":
            draft.take("algorithm.kl_target", f"{A}.kl_ctrl.kl_target")
            draft.take("algorithm.kl_horizon", f"{A}.kl_ctrl.horizon")
    elif on and draft.values["algorithm.aggregation"] != "sequence":
        draft.check(
            f"{coef} weighs the mean over each row's tokens there, and over rows then; here the mean of the loss, "
            f"{draft.values['algorithm.aggregation']} (algorithm.aggregation)"
        )
    draft.use(loss, reward, coef, f"{A}.kl_estimator_type", f"{A}.kl_ctrl.type")


def _rewards(draft: Draft) -> None:
    """Set the reward of the environment's class."""
    name = str(draft.get(key := "environment.env_class"))
    functions = {
        "gsm8k": lambda: draft.function("gsm8k", RULES["functions"]["gsm8k"]),
        "aime": lambda: "math_accuracy",
        "lcb": lambda: "code_tests",
    }
    draft.set("rewards.functions", (functions[name]() if name in functions else "REWARD",), key)
    if name not in functions:
        draft.check(
            f"{key} = {name} is an environment of skyrl_gym: write its reward (rewards.functions), or its class as "
            "environment.name (docs/environments.md)"
        )
    elif name != "gsm8k":
        draft.check(
            f"{key} = {name}: {draft.values['rewards.functions'][0]} is written, which may score odd forms else"
        )


def _run(draft: Draft, options: Options) -> None:
    """Set the steps, the optimizer, checkpoints and logs."""
    draft.take("seed", "trainer.seed")
    prompts = draft.values["batch.prompts"]
    rows = shared.known_rows(options, draft.get("data.train_data"), "train")
    most, count = draft.get("trainer.max_training_steps"), float(draft.get("trainer.epochs"))
    per_epoch = shared.full_batches(rows, prompts)
    if most and not (per_epoch and per_epoch * count < int(most)):
        draft.set("total_steps", int(most), "trainer.max_training_steps")
        draft.use("trainer.epochs")
    else:
        shared.epochs(draft, per_epoch, count, "trainer.epochs")
    at = f"{P}.optimizer_config"
    draft.take("optimizer.learning_rate", f"{at}.lr")
    draft.take("optimizer.weight_decay", f"{at}.weight_decay")
    draft.take("optimizer.max_grad_norm", f"{at}.max_grad_norm")
    draft.set("optimizer.no_decay", (), f"{at}.weight_decay")
    shared.betas(draft, f"{at}.adam_betas")
    kind = str(draft.get(f"{at}.scheduler")).removesuffix("_with_warmup")
    shared.schedule(draft, kind, f"{at}.scheduler")
    updates = draft.values["batch.minibatches"] * draft.values["algorithm.num_iterations"]
    warm = int(draft.get(f"{at}.num_warmup_steps"))
    draft.set("optimizer.warmup_steps", shared.divided(warm, updates) if warm else None, f"{at}.num_warmup_steps")
    draft.set("output_dir", draft.get("trainer.ckpt_path"), "trainer.ckpt_path")
    draft.set("checkpoint.every", max(int(draft.get("trainer.ckpt_interval")), 0), "trainer.ckpt_interval")
    keep = int(draft.get("trainer.max_ckpts_to_keep"))
    draft.set("checkpoint.keep", keep if keep > 0 else None, "trainer.max_ckpts_to_keep")
    draft.set("checkpoint.keep_every", None if keep > 0 else 1, "trainer.max_ckpts_to_keep")
    if int(draft.get("trainer.hf_save_interval")) > 0:
        draft.set("checkpoint.contents", ("state", "hf"), "trainer.hf_save_interval")
    mode = str(draft.source.settings.get("trainer.resume_mode", "latest"))
    if mode == "from_path":
        draft.set("checkpoint.resume", draft.get("trainer.resume_path"), "trainer.resume_mode", "trainer.resume_path")
    elif mode != "latest":
        draft.check(
            "trainer.resume_mode is none: a run goes on from the checkpoints in its output_dir, and "
            "checkpoint.resume = 'never' deletes them first; give a new run a new output_dir"
        )
    draft.use("trainer.resume_mode", "trainer.resume_path")
    shared.backends(draft, draft.get("trainer.logger"), "trainer.logger")
    names = ("trainer.project_name", "trainer.run_name")
    if len(draft.values["logging.backends"]) > 2:
        shared.tracked(draft, {name: draft.get(name) for name in names}, names[:1], names[1:])
    draft.use(*names)
