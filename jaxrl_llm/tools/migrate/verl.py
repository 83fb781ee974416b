"""The rules for verl: what several of its keys make together."""

from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigDict
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate import shared, verl_run
from jaxrl_llm.tools.migrate.draft import Draft, Options, Source
from jaxrl_llm.tools.migrate.verl_defaults import SFT, VERSIONS
from jaxrl_llm.tools.migrate.verl_keys import TABLE, A, M, R

OVERLONG = {"error": "error", "left": "truncate_left", "right": "truncate_right", "middle": "truncate_middle"}
MEANS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}


def convert(source: Source, options: Options) -> tuple[ConfigDict, str]:
    """Our configuration, and the file that makes it."""
    made = draft(source, options)
    return made.finish(), made.text()


def draft(source: Source, options: Options) -> Draft:
    """Our settings for a verl YAML or list of overrides."""
    if options.version not in ("", *VERSIONS):
        raise ConfigError(f"--version is {options.version!r}, but verl's are {', '.join(VERSIONS)}")
    trainer = source.trainer or ("sft" if "model.partial_pretrain" in source.given else "ppo")
    version = options.version or next(iter(VERSIONS))
    defaults = SFT if trainer == "sft" else VERSIONS[version]
    which = (
        "SFT" if trainer == "sft" else source.given.get("algorithm.adv_estimator", defaults["algorithm.adv_estimator"])
    )
    which, file = "PPO" if which == "gae" else which, Path(source.path).name
    title = f"{which}, from {file} of verl; what that leaves out is as in verl {version}."
    made = Draft(source, defaults, TABLE, title)
    made.simple()
    _data(made)
    gpus = options.devices or int(made.get("trainer.nnodes")) * int(made.get("trainer.n_gpus_per_node"))
    made.use("trainer.nnodes", "trainer.n_gpus_per_node")
    _mesh(made)
    (_sft if trainer == "sft" else _online)(made, gpus)
    verl_run.trainer(made, options)
    _rate(made, "optim" if trainer == "sft" else f"{A}.optim")
    return made


def _data(made: Draft) -> None:
    files, held_out = made.get("data.train_files"), made.get("data.val_files")
    custom, name = (made.get(f"data.custom_cls.{key}") or made.get(f"custom_cls.{key}") for key in ("path", "name"))
    if custom:
        made.set("data.path", f"{custom}:{name}", *(f"{at}custom_cls.{key}" for at in ("data.", "") for key in
                                                    ("path", "name")))  # fmt: skip
        made.use("data.train_files")
    elif isinstance(files, list) and len(files) > 1:
        made.set("data.sources", tuple({"path": file, "split": "train"} for file in files), "data.train_files")
    else:
        made.set("data.path", files[0] if isinstance(files, list) else files, "data.train_files")
    if isinstance(held_out, list) and len(held_out) > 1:
        sets = tuple({"set": "val", "path": file, "split": "train"} for file in held_out)
        made.set("eval.sets", sets, "data.val_files")
    elif held_out:
        made.set("data.eval_path", held_out[0] if isinstance(held_out, list) else held_out, "data.val_files")
        made.set("data.eval_split", "train", "data.val_files")
    long = OVERLONG.get(str(made.get("data.truncation")), "error")
    made.set("data.overlong", "filter" if made.get("data.filter_overlong_prompts") else long, "data.truncation",
             "data.filter_overlong_prompts")  # fmt: skip
    wanted = [
        key for key in ("return_raw_input_ids", "return_raw_chat", "return_full_prompt") if made.get(f"data.{key}")
    ]
    if wanted:
        made.set(
            "data.format", f"verl({', '.join(f'{key}=True' for key in wanted)})", *(f"data.{key}" for key in wanted)
        )
    made.use(*(f"data.return_{key}" for key in ("raw_input_ids", "raw_chat", "full_prompt")))
    extra = {key.rpartition(".")[2]: value for key, value in made.source.given.items()
             if key.startswith("data.apply_chat_template_kwargs.")}  # fmt: skip
    if extra:
        made.set("data.chat_template_kwargs", ", ".join(f"{key}={value!r}" for key, value in extra.items()),
                 *(f"data.apply_chat_template_kwargs.{key}" for key in extra))  # fmt: skip
    trusts = [key for key in ("data", M, "model") if made.get(f"{key}.trust_remote_code")]
    made.set(
        "model.trust_remote_code", bool(trusts) or None, *(f"{key}.trust_remote_code" for key in ("data", M, "model"))
    )
    remat = made.get(f"{M}.enable_gradient_checkpointing") or made.get("model.enable_gradient_checkpointing")
    offload = made.get(f"{M}.enable_activation_offload")
    made.set("model.remat", "offload" if offload else "block" if remat else "none",
             f"{M}.enable_gradient_checkpointing", f"{M}.enable_activation_offload",
             "model.enable_gradient_checkpointing")  # fmt: skip
    if "model.path" not in made.values:
        made.set("model.path", "MODEL")
        made.check("the file names no model: set model.path")
    if not made.values.get("lora.rank"):
        for key in ("lora.alpha", "lora.targets"):
            made.values.pop(key, None)
    if "lora.path" in made.values:
        made.values.pop("lora.rank", None)


def _online(made: Draft, gpus: int) -> None:
    prompts, mini = int(made.get("data.train_batch_size")), int(made.get(f"{A}.ppo_mini_batch_size"))
    group = int(made.get(f"{R}.n"))
    if prompts % mini:
        raise ConfigError(f"{made.source.path}: {A}.ppo_mini_batch_size is {mini}, which does not divide "
                          f"data.train_batch_size = {prompts} (prompts both)")  # fmt: skip
    made.set("batch.minibatches", prompts // mini, f"{A}.ppo_mini_batch_size")
    _micro(made, mini * group, gpus)
    made.set("optimizer.no_decay", (), f"{A}.optim.weight_decay")
    for side in ("low", "high"):
        value, alone = made.get(f"{A}.clip_ratio_{side}"), made.get(f"{A}.clip_ratio")
        made.set(f"algorithm.epsilon_{side}", float(alone if value is None else value), f"{A}.clip_ratio_{side}",
                 *(() if value is not None else (f"{A}.clip_ratio",)))  # fmt: skip
    if made.given(f"{A}.clip_ratio") and f"{A}.clip_ratio" not in made.used:
        made.check(f"{A}.clip_ratio alone has no effect in verl now: clip_ratio_low and clip_ratio_high are read, 0.2 "
                   "unless set. --version=0.3 reads it")  # fmt: skip
    _loss(made)
    _advantage(made)
    _divergence(made)
    _rewards(made)
    if made.get(f"{R}.max_num_seqs") and made.given(f"{R}.max_num_seqs"):
        made.use(f"{R}.max_num_seqs")
        if int(made.get(f"{R}.max_num_seqs")) * gpus < prompts * group:
            made.set("rollout.slots", int(made.get(f"{R}.max_num_seqs")) * gpus, f"{R}.max_num_seqs")
    made.use(f"{R}.prompt_length", f"{R}.response_length")
    if made.get("algorithm.filter_groups.enable"):
        made.set("algorithm.dynamic_sampling", True, "algorithm.filter_groups.enable")
        rounds = int(made.get("algorithm.filter_groups.max_num_gen_batches") or 0)
        made.set("algorithm.max_sampling_rounds", rounds or 1000, "algorithm.filter_groups.max_num_gen_batches")
    correction = made.get("algorithm.rollout_correction.rollout_is")
    if correction:
        key = "algorithm.rollout_correction.rollout_is"
        made.set("algorithm.importance_correction", f"{correction}_truncate", key)
        made.set("algorithm.importance_max", float(made.get(f"{key}_threshold") or 2.0), f"{key}_threshold")
    _precision(made)


def _precision(made: Draft) -> None:
    """Sampling in 8 bits, which is corrected for here."""
    key = f"{R}.quantization"
    kind = made.get(key)
    made.use(key)
    if kind == "fp8":
        made.set("rollout.weights_dtype", "fp8", key)
        if "algorithm.importance_correction" not in made.values:
            made.set("algorithm.importance_correction", "token_truncate", key)
            made.check("verl corrects for samples in fp8 where rollout_correction is set alone; here it must be done")
    elif kind:
        made.check(f"{key} = {kind} has no equivalent: rollout.weights_dtype takes fp8 and int8")


def _micro(made: Draft, minibatch: int, gpus: int) -> None:
    """Rows per pass: those of a GPU times the GPUs."""
    each, whole = made.get(f"{A}.ppo_micro_batch_size_per_gpu"), made.get(f"{A}.ppo_micro_batch_size")
    keys = (f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.ppo_micro_batch_size")
    tokens, longest = (f"{A}.use_dynamic_bsz", f"{A}.ppo_max_token_len_per_gpu")
    if made.get(tokens):
        made.set("batch.microbatch_tokens", int(made.get(longest) or 16384) * gpus, tokens, longest)
        made.use(*keys)
    elif each or whole:
        shared.micro_rows(made, int(each) * gpus if each else int(whole), minibatch, *keys)


def _mesh(made: Draft) -> None:
    """FSDP shares parameters over all devices unless it is told otherwise."""
    key = f"{A}.fsdp_config.fsdp_size"
    size = int(made.get(key) or -1)
    made.set("mesh.fsdp", size, key)
    if size < 0:
        made.set("mesh.data", 1, key)
    share = next((key for key in (f"{A}.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size")
                  if int(made.get(key) or 1) > 1), None)  # fmt: skip
    if share:
        made.set("mesh.context", int(made.get(share)), share)


def _loss(made: Draft) -> None:
    p, mode = f"{A}.policy_loss", made.get(f"{A}.policy_loss.loss_mode")
    low, high = made.values["algorithm.epsilon_low"], made.values["algorithm.epsilon_high"]

    def option(key: str, other: float) -> Any:
        made.use(key)
        value = made.get(key)
        return other if value is None else value

    losses = {
        "vanilla": "ppo_clip",
        "gspo": "gspo_token",
        "gpg": "reinforce",
        "geo_mean": "gmpo",
        "cispo": f"cispo(minimum={1 - low:g})",
        "sapo": f"sapo(temperature_positive={made.get(f'{A}.tau_pos') or 1.0}, "
        f"temperature_negative={made.get(f'{A}.tau_neg') or 1.05})",
        "clip_cov": "clip_cov",
        "kl_cov": "kl_cov",
    }
    if mode not in losses:
        raise ConfigError(f"{made.source.path}: {p}.loss_mode is {mode!r}, which has no equivalent; there are "
                          f"{', '.join(losses)}")  # fmt: skip
    loss = losses[mode]
    if mode == "clip_cov":
        loss = (f"clip_cov(fraction={option(f'{p}.clip_cov_ratio', 2e-4)}, lower={option(f'{p}.clip_cov_lb', 1.0)}, "
                f"upper={option(f'{p}.clip_cov_ub', 5.0)})")  # fmt: skip
    elif mode == "kl_cov":
        loss = (f"kl_cov(fraction={option(f'{p}.kl_cov_ratio', 2e-4)}, "
                f"kl_coef={option(f'{p}.ppo_kl_coef', 0.1)})")  # fmt: skip
    made.set("algorithm.loss", loss, f"{p}.loss_mode")
    made.use(f"{A}.tau_pos", f"{A}.tau_neg")
    if mode == "cispo":
        made.set("algorithm.epsilon_high", 1 + high, f"{A}.clip_ratio_high")
    if mode != "vanilla":
        made.values.pop("algorithm.dual_clip", None)
    means = made.get(f"{A}.loss_agg_mode")
    if means not in MEANS:
        raise ConfigError(f"{made.source.path}: {A}.loss_agg_mode is {means!r}, but there are {', '.join(MEANS)}")
    # verl's gspo takes sequence means whatever is set.
    made.set("algorithm.aggregation", "sequence" if mode == "gspo" else MEANS[means], f"{A}.loss_agg_mode")
    if means == "seq-mean-token-sum-norm":
        made.check("verl's seq-mean-token-sum-norm does not divide by the rows; ours does, so the gradient is smaller "
                   "by "
                   "their number (with Adam and clipping the update is the same)")  # fmt: skip


def _advantage(made: Draft) -> None:
    name, gamma, lam = (made.get(f"algorithm.{key}") for key in ("adv_estimator", "gamma", "lam"))
    gamma = made.source.given.get("algorithm.gemma", gamma)
    known = {
        "gae": f"ppo(gamma={gamma}, lam={lam})",
        "grpo": "group(eps=1e-06)",
        "grpo_vectorized": "group(eps=1e-06)",
        "grpo_passk": "passk",
        "rloo": "rloo",
        "rloo_vectorized": "rloo",
        "reinforce_plus_plus": f"reinforce_plus_plus(gamma={gamma})",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
        "remax": "remax",
        "opo": "opo",
    }
    if name not in known:
        raise ConfigError(f"{made.source.path}: algorithm.adv_estimator is {name!r}, which has no equivalent; there "
                          f"are "
                          f"{', '.join(known)}")  # fmt: skip
    if name == "gae":
        made.set("algorithm.name", "ppo", "algorithm.adv_estimator")
    made.set("algorithm.advantage", known[name], "algorithm.adv_estimator", "algorithm.gamma", "algorithm.gemma",
             "algorithm.lam")  # fmt: skip
    if name in ("grpo", "grpo_vectorized"):
        by = "group" if made.get("algorithm.norm_adv_by_std_in_grpo") else "none"
        made.set("algorithm.scale_rewards", by, "algorithm.norm_adv_by_std_in_grpo")
    if name == "gae":
        warm = int(made.get("trainer.critic_warmup") or 0)
        made.set("critic.warmup_steps", max(warm - 1, 0), "trainer.critic_warmup")
    else:
        for key in [key for key in made.values if key.startswith("critic.")]:
            del made.values[key]
        made.use("trainer.critic_warmup")


def _divergence(made: Draft) -> None:
    made.use(f"{A}.use_kl_loss", "algorithm.use_kl_in_reward")
    in_loss, in_reward = made.get(f"{A}.use_kl_loss"), made.get("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        made.check("verl has a KL in the loss and in the reward; here there is one, and that of the loss is kept")
    if in_loss:
        made.set("algorithm.beta", float(made.get(f"{A}.kl_loss_coef")), f"{A}.use_kl_loss", f"{A}.kl_loss_coef")
        made.set("algorithm.kl", shared.kl_name(made, made.get(f"{A}.kl_loss_type"), f"{A}.kl_loss_type"),
                 f"{A}.kl_loss_type")  # fmt: skip
    elif in_reward:
        c = "algorithm.kl_ctrl"
        made.set("algorithm.beta", float(made.get(f"{c}.kl_coef")), "algorithm.use_kl_in_reward", f"{c}.kl_coef")
        made.set("algorithm.kl_in_reward", True, "algorithm.use_kl_in_reward")
        made.set("algorithm.kl", shared.kl_name(made, made.get("algorithm.kl_penalty"), "algorithm.kl_penalty"),
                 "algorithm.kl_penalty")  # fmt: skip
        made.set("algorithm.kl_controller", made.get(f"{c}.type"), f"{c}.type")
        if made.get(f"{c}.type") == "adaptive":
            made.set("algorithm.kl_target", float(made.get(f"{c}.target_kl")), f"{c}.target_kl")
            made.set("algorithm.kl_horizon", float(made.get(f"{c}.horizon")), f"{c}.horizon")
    else:
        made.set("algorithm.beta", 0.0, f"{A}.use_kl_loss", "algorithm.use_kl_in_reward")


def _rewards(made: Draft) -> None:
    functions: list[str] = []
    path, keys = made.get("custom_reward_function.path"), ["custom_reward_function.path", "custom_reward_function.name"]
    if path:
        given = {key.rpartition(".")[2]: value for key, value in made.source.given.items()
                 if key.startswith("custom_reward_function.reward_kwargs.")}  # fmt: skip
        keys += [f"custom_reward_function.reward_kwargs.{key}" for key in given]
        options = ", ".join(f"{key}={value!r}" for key, value in given.items())
        functions.append(f"{path}:{made.get('custom_reward_function.name')}" + (f"({options})" if options else ""))
    if made.get("reward_model.enable"):
        keys += [f"reward_model.{key}" for key in ("enable", "model.path", "max_length", "micro_batch_size_per_gpu")]
        options = [
            f"{ours}={made.get(f'reward_model.{key}')}"
            for ours, key in (("max_length", "max_length"), ("rows", "micro_batch_size_per_gpu"))
            if made.get(f"reward_model.{key}")
        ]
        functions.append(
            f"model:{made.get('reward_model.model.path')}" + (f"({', '.join(options)})" if options else "")
        )
    made.use("reward_model.enable", "custom_reward_function.name")
    if functions:
        made.set("rewards.functions", tuple(functions), *keys)
    else:
        path = str(made.get("data.train_files")).lower()
        found = "gsm8k_accuracy" if "gsm8k" in path else "math_accuracy" if "math" in path else "exact_match"
        made.set("rewards.functions", (found,))
        made.check(f"the file names no reward function, so verl chooses one by data_source; {found} is written: see "
                   f"that "
                   "it is right (rewards.functions)")  # fmt: skip
    manager = made.get("reward_model.reward_manager")
    if manager == "prime":
        made.set("rewards.workers", 8, "reward_model.reward_manager")
    for at in ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
        if made.get(f"{at}.enable"):
            made.set("algorithm.overlong_buffer", int(made.get(f"{at}.len")), f"{at}.enable", f"{at}.len",
                     "reward_model.reward_manager")  # fmt: skip
            if float(made.get(f"{at}.penalty_factor") or 1.0) != 1.0:
                made.check(f"{at}.penalty_factor is {made.get(f'{at}.penalty_factor')}; the punishment here is at "
                           f"most 1: "
                           "use the reward soft_overlong with a weight")  # fmt: skip
    made.use("reward_model.reward_manager")


def _sft(made: Draft, gpus: int) -> None:
    rows = int(made.get("data.train_batch_size"))
    made.set("algorithm.name", "sft")
    keys = ("data.micro_batch_size_per_gpu", "data.micro_batch_size")
    shared.micro_rows(made, int(made.get(keys[0])) * gpus, rows, *keys)
    made.set("optimizer.no_decay", (), "optim.weight_decay")
    for index, ours in enumerate(("optimizer.b1", "optimizer.b2")):
        made.set(ours, float(made.get("optim.betas")[index]), "optim.betas")
    if made.given("data.response_key") or made.get("data.prompt_key") != "prompt":
        made.check(f"the rows have the columns {made.get('data.prompt_key')} and "
                   f"{made.get('data.response_key') or 'answer'}: name them prompt and completion, or give a format "
                   "(data.format=file.py:function)")  # fmt: skip
        made.values.pop("data.prompt_key", None)
    made.use("data.response_key", "data.multiturn.enable", "data.multiturn.messages_key")


def _rate(made: Draft, at: str) -> None:
    """Warm-up and shape of the learning rate; of Megatron too."""
    kind = next((key for key in ("warmup_style", "lr_scheduler", "lr_decay_style", "lr_scheduler_type")
                 if made.given(f"{at}.{key}")), "lr_scheduler" if at == "optim" else "lr_scheduler_type")  # fmt: skip
    shape = shared.schedule(made, made.get(f"{at}.{kind}"), f"{at}.{kind}")
    steps = made.get(f"{at}.lr_warmup_steps")
    ratios = [f"{at}.lr_warmup_steps_ratio", f"{at}.warmup_steps_ratio"]
    ratio = next((made.source.given[key] for key in ratios if made.given(key)), made.get(ratios[0]))
    if steps is not None and int(steps) >= 0:
        made.set("optimizer.warmup_steps", int(steps), f"{at}.lr_warmup_steps")
    elif ratio:
        made.set("optimizer.warmup_ratio", float(ratio), *ratios)
    made.use(f"{at}.lr_warmup_steps", *ratios)
    if made.get(f"{at}.min_lr"):
        made.set(
            "optimizer.min_lr_ratio", float(made.get(f"{at}.min_lr")) / float(made.get(f"{at}.lr")), f"{at}.min_lr"
        )
    made.use(f"{at}.min_lr")
    if made.given(f"{at}.betas"):
        for index, ours in enumerate(("optimizer.b1", "optimizer.b2")):
            made.set(ours, float(made.get(f"{at}.betas")[index]), f"{at}.betas")
    if made.given(f"{at}.optimizer"):
        shared.optimizer(made, made.get(f"{at}.optimizer"), f"{at}.optimizer")
        made.use(f"{at}.optimizer_impl")
    if shape == "wsd":
        decay = made.get(f"{at}.lr_wsd_decay_steps") or max(1, made.values["total_steps"] // 10)
        made.set("optimizer.decay_steps", int(decay), f"{at}.lr_wsd_decay_steps")
    else:
        made.values.pop("optimizer.decay_shape", None)
    if shape not in ("cosine",):
        made.values.pop("optimizer.cycles", None)
