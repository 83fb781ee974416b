"""The rules for OpenRLHF: the flags of its commands, of 0.11 and, by the names that they had, of those before."""

import math
from typing import Any

from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import Draft, Options, RefusedError, Source, renamed
from jaxrl_llm.tools.migrate.losses import set_correction, set_loss, with_options
from jaxrl_llm.tools.migrate.table import rules

RULES = rules("openrlhf")
KINDS = {"ppo": "grpo", "sft": "sft", "dpo": "preference", "kto": "preference", "rm": "reward_model"}
OPTIMIZER = ("adam.", "muon.", "optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
RATES = {"adam.lr": "learning_rate", "adam.weight_decay": "weight_decay", "max_norm": "max_grad_norm"}
# Our advantages, whether they are divided by the group's standard deviation, and whether all tokens are whitened.
ADVANTAGES = {
    "gae": ("ppo", None, True),
    "reinforce": ("reinforce_plus_plus", None, True),
    "reinforce_baseline": ("reinforce_plus_plus_baseline", None, True),
    "rloo": ("rloo", None, False),
    "group_norm": ("group(eps=1e-09)", "group", False),
    "dr_grpo": ("group", "none", False),
}


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for the flags of a command of OpenRLHF."""
    trainer = source.trainer
    if trainer not in KINDS:
        raise RefusedError(
            f"{source.path}: the command is train_{trainer or '?'}, which has no equivalent; there are train_ppo_ray, "
            "train_sft, train_dpo, train_rm and train_kto"
        )

    def name_of(key: str) -> str:
        name = RULES["former"].get(key, key)
        rest = name.removeprefix("actor.")  # the optimizer of other commands has no prefix, and their model has model.
        return name if name == rest else rest if rest.startswith(OPTIMIZER) else f"model.{rest}"

    named = renamed(source.settings, name_of)
    _, kind = named.get("algo.advantage.estimator", ("", "gae")) if trainer == "ppo" else ("", trainer)
    kind = "ppo" if kind == "gae" else kind
    title = f"{str(kind).upper()}, from FILE of OpenRLHF; what that leaves out is as in OpenRLHF 0.11."
    draft = Draft(source, title, RULES[trainer], named)
    for key in RULES[trainer] if trainer == "ppo" else ():  # what belongs to the actor is named after it there
        if key.startswith(OPTIMIZER):
            draft.names.setdefault(key, f"actor.{key}")
        elif key.startswith("model."):
            draft.names.setdefault(key, f"actor.{key.removeprefix('model.')}")
    draft.set("algorithm.name", "ppo" if draft.get("algo.advantage.estimator") == "gae" else KINDS[trainer])
    devices = _model(draft, options)
    if trainer == "ppo":
        _online(draft, devices)
        _prompts(draft)
        _rewards(draft)
    else:
        _offline(draft, trainer, devices)
    if path := draft.get("eval.dataset"):
        split = draft.get("eval.split")
        draft.set("data.eval_path", path, "eval.dataset")
        draft.set("data.eval_split", split, "eval.split")
        most = int(float(draft.get("data.max_samples"))) if draft.sets("data.max_samples") else 0
        shared.held_out_rows(draft, options, path, split, most, "eval.dataset")
        if trainer == "ppo":
            draft.take("eval.temperature", "eval.temperature")
            draft.take("eval.samples", "eval.n_samples_per_prompt")
            draft.set("eval.greedy", False, "eval.n_samples_per_prompt")
    rows = shared.known_rows(options, draft.values.get("data.path"), draft.values.get("data.split", "train"))
    per_epoch = shared.full_batches(rows, draft.values["batch.prompts"])
    epochs = "train.num_episodes" if trainer == "ppo" else "train.max_epochs"
    shared.epochs(draft, per_epoch, float(draft.get(epochs)), epochs)
    _rate(draft)
    _saving(draft, trainer, per_epoch)
    return draft


def _model(draft: Draft, options: Options) -> int:
    """Set the model, its adapters and the mesh; return the devices that have rows of their own."""
    draft.set("model.path", draft.get("model.model_name_or_path"), "model.model_name_or_path")
    shared.check_model(draft)
    draft.set("model.dtype", "bfloat16", "ds.param_dtype")
    if draft.get("ds.param_dtype") == "fp16":
        draft.check(
            "ds.param_dtype = fp16: bfloat16 is written; gradients in float16 need loss scaling, which is not here"
        )
    remat = draft.get(key := "model.gradient_checkpointing_enable")
    draft.set("model.remat", "block" if remat else None, key)
    draft.set("model.quantize", "nf4" if draft.get(key := "ds.load_in_4bit") else None, key)
    if rank := int(draft.get("ds.lora.rank")):
        draft.set("lora.rank", rank, "ds.lora.rank")
        draft.take("lora.alpha", "ds.lora.alpha")
        draft.take("lora.dropout", "ds.lora.dropout")
        targets = draft.get("ds.lora.target_modules")
        draft.set("lora.targets", (targets,) if isinstance(targets, str) else tuple(targets), "ds.lora.target_modules")
    if coef := draft.get("model.aux_loss_coef"):
        draft.set("model.router_aux_loss_coef", float(coef), "model.aux_loss_coef")
    if int(draft.get("ds.zero_stage")) == 3:
        draft.set("mesh.fsdp", -1, "ds.zero_stage")
        draft.set("mesh.data", 1, "ds.zero_stage")
    draft.use("ds.zero_stage")
    keys = ("model.num_nodes", "model.num_gpus_per_node")
    count = options.devices or int(draft.get(keys[0]) or 1) * int(draft.get(keys[1]) or 1)
    draft.use(*keys)
    draft.set("optimizer.offload", draft.get("ds.adam_offload"), "ds.adam_offload")
    draft.take("seed", "train.seed")
    if draft.get("train.enable_ema"):
        draft.check("train.enable_ema has no equivalent: the moving average here is bias-corrected (average.every)")
    sharing = {"mesh.context": "ds.ring_attn_size", "mesh.tensor": "ds.tensor_parallel_size"}
    return shared.shared_rows(draft, sharing, count)


def _online(draft: Draft, devices: int) -> None:
    """Set the batch, the advantages, the losses and the sampling."""
    prompts, group = int(draft.get("rollout.batch_size")), int(draft.get("rollout.n_samples_per_prompt"))
    rows, passes = int(draft.get("train.batch_size")), int(draft.get("train.max_epochs"))
    draft.set("batch.prompts", prompts, "rollout.batch_size")
    draft.set("rollout.group_size", group, "rollout.n_samples_per_prompt")
    minibatches = max(prompts * group // rows, 1)
    if prompts * group % minibatches:
        minibatches = max(size for size in range(1, minibatches + 1) if prompts * group % size == 0)
    if minibatches * rows != prompts * group:
        draft.check(
            f"{draft.named('train.batch_size')} = {rows} rows do not divide the {prompts * group} of a step: "
            f"batch.minibatches = {minibatches}, of {prompts * group // minibatches} rows, is written"
        )
    draft.set("batch.minibatches", minibatches, "train.batch_size")
    draft.set("algorithm.num_iterations", passes, "train.max_epochs")
    draft.set("batch.shuffle", True)
    if draft.get("train.dynamic_batch_enable"):
        tokens = int(draft.get("train.max_tokens_per_gpu")) * devices
        draft.set("batch.microbatch_tokens", tokens, "train.max_tokens_per_gpu", "train.dynamic_batch_enable")
        if most := draft.get("rollout.max_tokens_per_gpu"):
            draft.set("batch.logps_microbatch_tokens", int(most) * devices, "rollout.max_tokens_per_gpu")
    else:
        each = int(draft.get("train.micro_batch_size")) * devices
        shared.microbatch_rows(draft, each, prompts * group // minibatches, "train.micro_batch_size")
    draft.use("train.micro_batch_size", "train.max_tokens_per_gpu", "rollout.micro_batch_size")
    _advantage(draft, group)
    _loss(draft)
    _divergence(draft)
    _sampling(draft)


def _advantage(draft: Draft, group: int) -> None:
    """Set the advantages, and the critic of gae."""
    at = "algo.advantage"
    shared.check_known(draft.named(key := f"{at}.estimator"), name := draft.get(key), ADVANTAGES)
    ours, scale, whitened = ADVANTAGES[name]
    options = {"gamma": float(draft.get(f"{at}.gamma"))} if name in ("gae", "reinforce") else {}
    options |= {"lam": float(draft.get(f"{at}.lambd"))} if name == "gae" else {}
    options |= {"ddof": 0} if whitened else {}
    options |= {"divide": False} if whitened and draft.get(f"{at}.no_std_norm") else {}
    keys = [f"{at}.gamma", f"{at}.lambd"] if name == "gae" else [f"{at}.gamma"] if name == "reinforce" else []
    draft.set("algorithm.advantage", with_options(ours, options), key, *keys, f"{at}.no_std_norm")
    draft.set("algorithm.scale_rewards", scale, key)
    draft.use(f"{at}.gamma", f"{at}.lambd", f"{at}.no_std_norm")
    if group == 1 and name not in ("gae", "reinforce"):
        draft.set("rollout.group_size", 2, "rollout.n_samples_per_prompt")
        draft.check(
            f"{name} compares completions of a prompt, of which there is one: rollout.group_size = 2 is written"
        )
    clip = draft.get("reward.clip_range")
    if name in ("gae", "reinforce"):
        draft.set("algorithm.reward_clip", tuple(map(float, clip)), "reward.clip_range")
    elif draft.sets("reward.clip_range"):
        draft.check(
            f"reward.clip_range is left out: it clips what {name} makes of the rewards there, and rewards alone here"
        )
    if name != "gae":
        return
    path = draft.get("critic.model_name_or_path")
    if path is None and not draft.get("reward.remote_url") and not draft.get("train.agent_func_path"):
        path = str(draft.get("reward.model_name_or_path") or "").split(",")[0] or None
    draft.set("critic.path", path if path != draft.values["model.path"] else None, "critic.model_name_or_path")
    draft.take("critic.epsilon", "critic.value_clip")
    # The first step has the number 0, and the actor learns in those whose number is above freezing_steps.
    draft.set("critic.warmup_steps", max(int(draft.get("critic.freezing_steps")) + 1, 0), "critic.freezing_steps")


def _loss(draft: Draft) -> None:
    """Set the policy loss, its mean, and how it corrects for the sampler."""
    pair = draft.get("model.eps_clip_low_high") or [draft.get("model.eps_clip")] * 2
    for side, value in zip(("low", "high"), pair, strict=True):
        draft.set(f"algorithm.epsilon_{side}", float(value), "model.eps_clip_low_high", "model.eps_clip")
    shared.check_known(draft.named(key := "model.policy_loss_type"), kind := draft.get(key), ("ppo", "gspo"))
    set_loss(draft, [("gspo" if kind == "gspo" else "ppo_clip", {"dual_clip": "model.dual_clip"})], key)
    draft.use("model.dual_clip")
    rows = kind == "gspo" or draft.get("model.loss_agg_mode") == "seq-mean-token-mean"
    draft.set("algorithm.aggregation", "sequence" if rows else "token", key, "model.loss_agg_mode")
    draft.take("algorithm.entropy_coef", "model.entropy_coef", default=0.0)
    at = "algo.advantage.is_correction"
    keys = [f"{at}_{name}" for name in ("level", "mode", "gating", "threshold", "type", "enable")]
    draft.use(*keys)
    level, mode, gating, bounds, scheme, enable = map(draft.get, keys)
    if not enable and level == "off":
        return
    if kind == "gspo":  # whose ratio is then to the sampler
        draft.set("algorithm.old_logps", "sampler", *keys)
        return
    if not enable:  # by scheme up to 0.11.0
        scheme = "tis" if mode == "clip" else "seq-mask-tis" if level == "seq" else "icepop"
    *low, high = bounds if isinstance(bounds, list) else [bounds]
    if enable or gating == "ratio":
        set_correction(draft, scheme, (low[0] if low else 0.0, high), keys[4], *keys[:4], keys[5])
        return
    set_correction(draft, None, (None, None), *keys[:3])  # a divergence leaves out, and what is left has its ratio
    shared.check_known(draft.named(keys[2]), gating, gates := {"binary_kl": "kl", "tv": "tv"})
    unit = "seq_mean" if level == "seq" else "token"
    draft.set("algorithm.rejection", f"{unit}_{gates[gating]}", *keys[:3])
    draft.set("algorithm.rejection_bounds", repr(float(high)), keys[3])


def _divergence(draft: Draft) -> None:
    """Set the KL term in the loss, or the penalty in the rewards."""
    beta, in_loss = float(draft.get("algo.kl.init_coef")), bool(draft.get("algo.kl.use_loss"))
    draft.set("algorithm.beta", beta, "algo.kl.init_coef")
    draft.use("algo.kl.use_loss", "algo.kl.estimator", "algo.kl.horizon")
    if not beta:
        return
    exact = in_loss and draft.get("algo.kl.unbiased_gradient")
    kind = "k2" if exact else str(draft.get("algo.kl.estimator"))
    draft.set("algorithm.kl", kind, "algo.kl.estimator", "algo.kl.unbiased_gradient")
    if exact and draft.values["batch.minibatches"] * draft.values["algorithm.num_iterations"] > 1:
        draft.check(
            "algo.kl.unbiased_gradient: the gradient is that of k2, which OpenRLHF multiplies by the ratio, cut at 10: "
            "the same in the first update of a batch"
        )
    if in_loss and draft.values["algorithm.aggregation"] == "sequence":
        draft.check("the KL term is a mean over all tokens there; here it has the aggregation of the policy's loss")
    draft.set("algorithm.kl_in_reward", not in_loss, "algo.kl.use_loss")
    name = draft.get("algo.advantage.estimator")
    if not in_loss and name not in ("gae", "reinforce"):
        draft.check(
            f"the KL penalty is in the rewards: OpenRLHF takes it off {name}'s advantage, to go at each token, after "
            "the baseline; here it is taken off the score before. algorithm.kl_in_reward = False with k2 is close to it"
        )
    if target := draft.get("algo.kl.target"):
        draft.set("algorithm.kl_controller", "adaptive", "algo.kl.target")
        draft.set("algorithm.kl_target", float(target), "algo.kl.target")
        draft.take("algorithm.kl_horizon", "algo.kl.horizon")


def _sampling(draft: Draft) -> None:
    """Set the lengths, the sampling, and who samples."""
    longest, most = draft.get("data.max_len"), draft.get("rollout.max_new_tokens")
    prompt = draft.get("prompt_max_len")
    if most is None:
        most = int(longest) // 2
        draft.check(
            f"rollout.max_new_tokens is not set: prompts and completions have data.max_len = {longest} tokens together "
            "there; here half of them each: set rollout.max_prompt_length and max_completion_length"
        )
    draft.set("rollout.max_completion_length", int(most), "rollout.max_new_tokens", "data.max_len")
    if prompt is None:
        prompt = max(int(longest) - int(most), 1)
    draft.set("rollout.max_prompt_length", int(prompt), "prompt_max_len", "data.max_len")
    draft.set("rollout.min_completion_length", 1)  # min_tokens of its SamplingParams
    draft.take("rollout.temperature", "rollout.temperature")
    draft.take("rollout.top_p", "rollout.top_p")
    engines, tensor = int(draft.get("vllm.num_engines") or 0), int(draft.get("vllm.tensor_parallel_size") or 1)
    keys = ("vllm.num_engines", "vllm.tensor_parallel_size")
    if engines and not draft.get("train.colocate_all"):
        draft.set("rollout.devices", engines * tensor, *keys)
    if engines and tensor > 1:
        draft.set("rollout.mesh", f"tensor={tensor}", keys[1])
    draft.use(*keys, "train.colocate_all")
    if draft.get("train.async_enable"):
        waiting = int(draft.get(key := "train.async_queue_size") or 1)
        draft.set("rollout.staleness", waiting, "train.async_enable", key)
        draft.set("rollout.update_in_flight", draft.get(partial := "train.partial_rollout_enable"), partial)
        with_sampler = draft.values.get("algorithm.old_logps") == "sampler"
        if not with_sampler and "algorithm.importance_correction" not in draft.values:
            draft.set("algorithm.importance_correction", "token_truncate", "train.async_enable")
            draft.check("train.async_enable: rows of an earlier policy are corrected for here, by token_truncate")
    if draft.get("algo.dynamic_filtering_enable"):
        draft.set("algorithm.dynamic_sampling", True, "algo.dynamic_filtering_enable")
        draft.set("algorithm.max_sampling_rounds", 1000, "algo.dynamic_filtering_enable")
        if (between := draft.first("algo.dynamic_filtering_range", default=[0, 1])) != [0, 1]:
            draft.check(
                f"algo.dynamic_filtering_range = {between}: prompts whose mean reward is not between these are left "
                "out there; here those whose rewards are all equal"
            )
        draft.use("algo.dynamic_filtering_range")


def _paths(draft: Draft, key: str, weights: str, split: str) -> None:
    """Set the rows to train on: one path, or several with their weights, each without those behind max_samples."""
    paths, shares = (str(draft.get(name) or "").split(",") for name in (key, weights))
    taken, most = str(draft.get(split) or "train"), int(float(draft.get("data.max_samples") or 1e8))
    taken = f"{taken}[:{most}]" if draft.sets("data.max_samples") and most < 1e6 else taken
    sources: list[dict[str, Any]] = []
    for path in paths:
        path, _, folder = (part.strip() for part in path.partition("@"))
        sources.append({"path": path, "split": taken})
        if folder:
            draft.check(f"{draft.named(key)}: {path}@{folder} is the folder {folder} of {path}; here all of it is read")
    if len(sources) > 1:
        for one, share in zip(sources, shares, strict=True) if any(shares) else ():
            one["weight"] = float(share)
        draft.set("data.sources", tuple(sources), key, weights, split, "data.max_samples")
        if "[" in taken:
            draft.check(
                f"{draft.named('data.max_samples')} = {most} are rows of each data set here, and there of all of them"
            )
    else:
        draft.set("data.path", sources[0]["path"] or "DATA", key)
        draft.set("data.split", taken, split, "data.max_samples")
        if not paths[0]:
            draft.check(f"the command names no rows ({key}): set data.path")
    draft.use(weights, split, "data.max_samples")


def _prompts(draft: Draft) -> None:
    """Set the prompts and the function that reads them."""
    _paths(draft, "data.prompt_dataset", "data.prompt_probs", "data.prompt_split")
    # Long prompts lose their start; before 0.10, whose flag has a limit of their own, their end.
    draft.set("data.overlong", "truncate_right" if draft.sets("prompt_max_len") else "truncate_left", "data.max_len")
    chat = draft.get("data.apply_chat_template")
    label = draft.get("data.label_key")
    body = RULES["functions"]["given_chat" if chat else "given_text"].rstrip()
    text, answer = RULES["functions"]["prompts"].replace("LABELLED", body), f'row["{label}"]' if label else '""'
    given, template = draft.get("data.input_key"), repr(_template(draft))
    keys = [f"data.{key}" for key in ("input_key", "label_key", "apply_chat_template", "input_template")]
    draft.set("data.format", draft.function("prompts", text, INPUT=given, TEMPLATE=template, LABEL=answer), *keys)


def _template(draft: Draft) -> str:
    """Return the text that rows are filled into; one without `{}` is passed over, as there."""
    template = str(draft.get("data.input_template") or "{}")
    return template if "{}" in template else "{}"


def _rewards(draft: Draft) -> None:
    """Set the reward functions: a file with reward_func, or reward models."""
    urls, models = (str(draft.get(f"reward.{key}") or "").split(",") for key in ("remote_url", "model_name_or_path"))
    agent, functions = draft.get("train.agent_func_path"), []
    if agent:
        draft.check(
            f"{draft.named('train.agent_func_path')} = {agent}: an agent is an environment here (docs/environments.md) "
            "or a program that talks to the endpoint (docs/agents.md), which gives the reward: set these"
        )
        draft.use("train.agent_func_path")
    elif urls[0].endswith(".py"):
        functions.append(draft.function("reward", RULES["functions"]["reward"], FILE=urls[0]))
    elif any(urls):
        draft.check(
            f"{draft.named('reward.remote_url')} = {', '.join(urls)}: a reward function of your own asks a server here"
        )
    else:
        functions = [f"model:{path}" for path in models if path]
    draft.set("rewards.functions", tuple(functions) or ("REWARD",), "reward.remote_url", "reward.model_name_or_path")
    if not functions:
        draft.check("the command names no rewards that are here: set rewards.functions")
    if draft.get(key := "reward.normalize_enable"):
        draft.use(key)
        draft.check(f"{draft.named(key)} has no equivalent: rewards are not divided by a running deviation")
    if (length := draft.get("reward.overlong_buffer_len")) is not None:
        draft.set("algorithm.overlong_buffer", int(length), "reward.overlong_buffer_len")
        draft.take("algorithm.overlong_penalty", "reward.overlong_penalty_factor")
    draft.use("reward.overlong_penalty_factor")
    if (factor := draft.get(key := "reward.stop_properly_penalty_coef")) is not None:
        draft.use(key)
        draft.check(
            f"{draft.named(key)} = {factor} multiplies (below 0: replaces) the reward of a completion that did not "
            "end; here algorithm.missing_eos_penalty subtracts from it, and algorithm.mask_truncated leaves it out"
        )


def _offline(draft: Draft, trainer: str, devices: int) -> None:
    """Set the batch, the rows and the loss of the other commands."""
    rows, each = int(draft.get("train.batch_size")), 2 if trainer in ("dpo", "rm", "kto") else 1
    draft.set("batch.prompts", rows, "train.batch_size")
    micro = int(draft.get(key := "train.micro_batch_size")) * devices * each
    shared.microbatch_rows(draft, micro, rows * each, key)
    _paths(draft, "data.dataset", "data.dataset_probs", "data.dataset_split")
    draft.take("data.max_length", "data.max_len")
    draft.set("data.overlong", "truncate_right", "data.max_len")
    draft.set("data.chat_template", draft.get("data.tokenizer_chat_template"), "data.tokenizer_chat_template")
    if trainer == "sft":
        draft.take("data.packing", "ds.packing_samples")
        draft.set("algorithm.aggregation", "token")
    elif trainer == "rm":
        shared.check_known(draft.named(key := "model.loss_type"), draft.get(key), ("sigmoid", "logexp"))
        draft.set("algorithm.loss", "bradley_terry", key)
    else:
        draft.take("algorithm.beta", "model.beta")
        reference = draft.get(key := "ref.model_name_or_path")
        if reference not in (None, draft.values["model.path"]):
            draft.use(key)
            draft.check(f"{draft.named(key)} = {reference}: the reference is the model as it is at the start here")
        if trainer == "kto":
            weights = {"desirable_weight": "model.desirable_weight", "undesirable_weight": "model.undesirable_weight"}
            set_loss(draft, [("kto", weights)])
        else:
            ipo, likely = draft.get("model.ipo_enable"), float(draft.get("model.nll_loss_coef") or 0.0)
            smoothed = float(draft.get("model.label_smoothing"))
            name = with_options("dpo", {"label_smoothing": smoothed} if smoothed else {})
            name = "ipo(normalize=False)" if ipo else name
            keys = ("model.ipo_enable", "model.label_smoothing", "model.nll_loss_coef")
            draft.set("algorithm.loss", f"{name}+sft" if likely else name, *keys)
            if likely:
                draft.set("algorithm.loss_weights", (1.0, likely), "model.nll_loss_coef")
                draft.check("model.nll_loss_coef: the likelihood is a mean over tokens here, over completions there")
    _rows(draft, trainer)


def _rows(draft: Draft, trainer: str) -> None:
    """Set the function that reads a row as OpenRLHF does."""
    chat, template = draft.get("data.apply_chat_template"), repr(_template(draft))
    given, answer, label = (draft.get(f"data.{key}_key") for key in ("input", "output", "label"))
    labelled = f', "label": row["{label}"]' if trainer == "kto" else ""
    columns = ("prompt", "chosen", "rejected") if trainer in ("dpo", "rm") else ("input", "output", "label")
    keys = [*(f"data.{name}_key" for name in columns), "data.apply_chat_template", "data.input_template"]
    if trainer in ("dpo", "rm"):
        names = {"CHOSEN": draft.get("data.chosen_key"), "REJECTED": draft.get("data.rejected_key")}
        prompt = draft.get("data.prompt_key")
        names["PROMPT_KEY"] = str(bool(prompt))
        names["PROMPT"] = f'row["{prompt}"]' if chat else f'{template}.format(row["{prompt}"])'
        names["MARGIN"] = ', "margin": row["margin"]' if draft.get("model.margin_loss_enable") else ""
        function = draft.function("pairs", RULES["functions"]["pairs"], **names)
        draft.set("data.format", function, *keys, "model.margin_loss_enable")
        return
    if draft.get("model.pretrain_mode_enable"):
        draft.set("data.loss_on", "all", "model.pretrain_mode_enable")
        draft.set("data.format", f"completion(field={given!r})", "data.input_key")
    elif draft.get("data.multiturn"):
        function = with_options("chat_template", {"field_messages": given})
        draft.set("data.format", function, "data.multiturn", "data.input_key")
    else:
        rows = f'row["{given}"], row["{answer}"]' if answer else f'row["{given}"][:-1], row["{given}"][-1:]'
        filled = {"ROWS": rows, "INPUT": given, "OUTPUT": answer or given, "TEMPLATE": template, "LABELLED": labelled}
        text = RULES["functions"]["completions_chat" if chat else "completions_text"]
        draft.set("data.format", draft.function("completions", text, **filled), *keys)
    draft.use(*keys)


def _rate(draft: Draft) -> None:
    """Set the optimizer and the learning rate, and those of the critic of gae."""
    draft.take("optimizer.eps", "adam.eps")
    draft.take("optimizer.warmup_ratio", "lr_warmup_ratio")
    sections = {"": "optimizer"} | ({"critic.": "critic"} if draft.values["algorithm.name"] == "ppo" else {})
    for at, ours in sections.items():
        for theirs, name in RATES.items():
            draft.take(f"{ours}.{name}", f"{at}{theirs}")
        shared.betas(draft, f"{at}adam.betas", ours)
        name = str(draft.get(key := f"{at}lr_scheduler"))
        shared.schedule(draft, name, key, f"{ours}.schedule")
        lowest = float(draft.get(f"{at}min_lr_ratio")) if "min_lr" in name else 0.0
        draft.set(f"{ours}.min_lr_ratio", lowest, f"{at}min_lr_ratio")
    if "critic." in sections:
        warm = float(draft.get("critic.lr_warmup_ratio")) * draft.values["total_steps"]
        draft.set("critic.lr_warmup_steps", math.ceil(warm), "critic.lr_warmup_ratio")
        if draft.get("critic.optim") == "muon":
            draft.check("critic.optim = muon has no equivalent: the whole critic has adamw, at critic.adam.lr")
    if draft.get("optim") == "muon":
        draft.set("optimizer.name", "muon", "optim")
        draft.take("optimizer.learning_rate", "muon.lr")
        draft.check(
            f"optim = muon: {draft.named('muon.lr')} is the rate of all parameters here; those that are no matrices of "
            f"layers have {draft.named('adam.lr')} = {draft.get('adam.lr')} there (optimizer.rate_factors)"
        )
    draft.use("optim", "muon.lr")


def _saving(draft: Draft, trainer: str, per_epoch: int) -> None:
    """Set checkpoints, evaluations and logs; `per_epoch` are the steps of a pass over the rows, or 0."""
    draft.set("output_dir", draft.get("ckpt.output_dir"), "ckpt.output_dir")
    every = max(int(draft.get("ckpt.save_steps")), 0)
    draft.set("checkpoint.every", every, "ckpt.save_steps")
    draft.take("checkpoint.keep", "ckpt.max_num")
    if every and draft.get("ckpt.save_hf"):
        draft.set("checkpoint.contents", ("state", "hf"), "ckpt.save_hf")
    draft.use("ckpt.save_hf")
    every = int(draft.get("eval.steps"))
    if every < 0 and trainer != "ppo":  # after each epoch; train_ppo_ray does not evaluate then
        every = per_epoch
        if draft.get("eval.dataset") and not per_epoch:
            draft.check(
                "eval.steps is not set, which evaluates after each epoch; here it is at the end: set eval.every"
            )
    draft.set("eval.every", every if draft.get("eval.dataset") else -1, "eval.steps", "eval.dataset")
    draft.set("eval.at_start", False if draft.values["eval.every"] >= 0 else None)
    kinds = {"wandb": "logger.wandb.key", "tensorboard": "logger.tensorboard_dir"}
    backends = [name for name, key in kinds.items() if draft.get(key)]
    draft.set("logging.backends", ("console", "jsonl", *backends), *kinds.values())
    if backends:
        draft.set("logging.project", draft.get("logger.wandb.project"), "logger.wandb.project")
        draft.set("logging.run_name", draft.get("logger.wandb.run_name"), "logger.wandb.run_name")
