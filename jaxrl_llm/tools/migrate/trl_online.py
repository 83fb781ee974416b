"""The trainers of TRL that sample: groups of completions with rewards, PPO's, and those that a teacher rates."""

import math

from jaxrl_llm.config.wording import amount
from jaxrl_llm.tools.migrate import distillation, shared
from jaxrl_llm.tools.migrate.draft import Draft
from jaxrl_llm.tools.migrate.losses import set_loss, with_options
from jaxrl_llm.tools.migrate.trl_settings import NAMES, ROWS, batch, reference_sync

TAUGHT = ("distillation", "serverdistillation", "asyncdistillation", "gkd", "gold", "iwopd")  # by a teacher
REWARD_MODELS = ("reward_model_name_or_path", "reward_model_path", "reward_model")
# Our aggregation of a loss_type of GRPO; the others are token means.
MEANS = {
    "grpo": "sequence",
    "sapo": "sequence",
    "luspo": "sequence_sum",
    "bnpo": "microbatch_token",
    "dr_grpo": "constant",
}


def grpo(draft: Draft, trainer: str, devices: int) -> int:
    """Set the loss, its means and the correction of what another engine has sampled; return the updates of a step."""
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
    if draft.get("use_adaptive_entropy") and updates > 1:
        delta = updates * draft.first("entropy_coef_delta", default=0.005)
        draft.set("algorithm.entropy_delta", round(delta, 9), "entropy_coef_delta", "use_adaptive_entropy")
        draft.check(f"the entropy coefficient changes after each of the {updates} updates there, once in a step here")
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
        draft.take("algorithm.kl_bias_correction", "use_bias_correction_kl")
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
        draft.set("algorithm.importance_max", draft.first(*bounds, default=1e9), *bounds)  # None is no bound there
        low = "vllm_importance_sampling_clip_min"
        draft.set("algorithm.importance_min", draft.get(low), low)
    return updates


def gmpo(draft: Draft, trainer: str, devices: int) -> int:
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


def asyncgrpo(draft: Draft, trainer: str, devices: int) -> int:
    """Set what GRPO's trainer has, with samples of earlier policies, whose log-probs the ratio compares with."""
    updates = _online(draft, devices)
    _staleness(
        draft,
        "AsyncGRPOTrainer takes what is ready and at most as old, and divides its advantages by the standard deviation "
        "over n, not n - 1",
    )
    several = int(draft.get("gradient_accumulation_steps")) > 1
    draft.set("algorithm.aggregation", "microbatch_token" if several else "token", "gradient_accumulation_steps")
    draft.set("data.shuffle", False)
    budget = draft.get("token_budget")
    if budget is None or budget > 0:
        draft.check(
            "an update there has as many completions as token_budget (by default the server's max_model_len) has room "
            "for: set batch.prompts to the batch/samples_per_step that it logged, over num_generations"
        )
    return updates


def rloo(draft: Draft, trainer: str, devices: int) -> int:
    """Set what GRPO's trainer has, with the advantage and the loss of RLOO; return the updates of a step."""
    updates = _online(draft, devices)
    normalize = {"normalize": True} if draft.get("normalize_advantages") else {}
    draft.set("algorithm.advantage", with_options("rloo", normalize), "normalize_advantages")
    draft.set("algorithm.loss", "rloo")
    draft.set("algorithm.kl_in_reward", float(draft.get("beta")) > 0, "beta")
    return updates


def a2po(draft: Draft, trainer: str, devices: int) -> int:
    """Set a completion of each prompt, the reference's scores before the first step, and the regression on them."""
    batch(draft, devices)
    draft.set("rollout.group_size", 1)
    _rewards(draft)
    draft.set("algorithm.advantage", with_options("a2po", {"beta1": draft.get("beta1")}), "beta1")
    draft.set("algorithm.loss", with_options("a2po", {"beta2": draft.get("beta2")}), "beta2")
    draft.set("algorithm.aggregation", "sequence")
    draft.take("algorithm.reference_samples", "num_value_samples")
    draft.take("algorithm.drop_unsolved", "filter_all_incorrect")
    if draft.get("filter_all_incorrect") and int(draft.get("max_steps") or -1) <= 0:
        draft.check(
            "num_train_epochs counts the prompts that the reference has solved there, and all here: set total_steps"
        )
    return 1


def onlinedpo(draft: Draft, trainer: str, devices: int) -> int:
    """Set two completions of each prompt, and the loss of the pair that their rewards make of them."""
    draft.set("algorithm.name", "online_preference")
    batch(draft, devices, 2)
    draft.set("rollout.group_size", 2)
    _rewards(draft)
    betas, kind = draft.get("beta"), draft.get("loss_type")
    betas = betas if isinstance(betas, list | tuple) else [betas]
    draft.set("algorithm.beta", float(betas[0]), "beta")
    if len(betas) > 1:
        draft.check(f"beta is {list(betas)}, one for each epoch there: the first is written, for all (algorithm.beta)")
    shared.check_known("loss_type", kind, ("sigmoid", "ipo"))
    draft.set("algorithm.loss", "ipo(normalize=False)" if kind == "ipo" else "dpo", "loss_type")
    draft.use("max_length")
    if draft.sets("max_length"):
        draft.check("max_length cuts the beginning of a prompt and its completion there: set rollout.max_prompt_length")
    draft.check(
        "prompts whose two completions score alike are left out here; OnlineDPOTrainer takes the first for the better"
    )
    return 1


def ppo(draft: Draft, trainer: str, devices: int) -> int:
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
    draft.set("batch.prompts", rows * devices, *ROWS)
    draft.set("batch.minibatches", minibatches, "num_mini_batches", *ROWS[1:])
    passed = min(per_device, max(rows // parts, 1)) * devices
    shared.microbatch_rows(draft, passed, rows * devices // minibatches, *ROWS)
    _proximal(draft)
    draft.set("critic.learning_rate", float(draft.get("learning_rate")), "learning_rate", "vf_coef")
    keys = ("value_model", *REWARD_MODELS)
    draft.set("critic.path", draft.first(*keys), *keys)
    if draft.get("deepspeed"):
        draft.check("DeepSpeed clips the gradient of policy and critic together; here each has its own norm")
    else:
        draft.set("optimizer.max_grad_norm", 0.0, "max_grad_norm")
        draft.check("PPOTrainer clips no gradient, whatever max_grad_norm is (optimizer.max_grad_norm = 0)")
    if int(draft.get("max_steps") or -1) > 0:
        draft.check("max_steps is not read by PPOTrainer, whose length is total_episodes or num_train_epochs")
    return 1


def former_ppo(draft: Draft, trainer: str, devices: int) -> int:
    """Set what PPOTrainer of TRL up to 0.11 has: batches of several updates, a critic that is a head of the policy, and
    a weight of the KL that follows it; return 1, as it counts its batches."""
    per_device, accumulation = (int(draft.get(key)) for key in ROWS)
    minibatches, update = int(draft.get("num_mini_batches")), per_device * accumulation * devices
    draft.set("batch.prompts", update * minibatches, *ROWS, "num_mini_batches")
    draft.set("batch.minibatches", minibatches, "num_mini_batches")
    shared.microbatch_rows(draft, per_device * devices, update, *ROWS)
    _proximal(draft)
    draft.set("critic.shared", True)
    draft.take("critic.coef", "vf_coef")
    longest, target = draft.values["rollout.max_completion_length"], float(draft.get("ppo_target"))
    draft.set("algorithm.kl_controller", "adaptive", "ppo_target")
    draft.set("algorithm.kl_target", target / longest, "ppo_target")
    draft.check(
        f"ppo_target = {target:g} is the KL of a whole completion, and algorithm.kl_target that of a "
        f"token: it is written for completions of {longest} tokens, the longest; divide by their mean length"
    )
    draft.check("log-probs are those of temperature 1 there, whatever the samples' is; here they have that of these")
    return 1


def _proximal(draft: Draft) -> None:
    """Set the advantages, the loss and the rewards of PPO."""
    draft.set("algorithm.name", "ppo")
    draft.set("rollout.group_size", 1)
    draft.set("batch.shuffle", True)
    options = {key: draft.get(key) for key in ("gamma", "lam")}
    options |= {"whiten_rewards": True} if draft.get("whiten_rewards") else {}
    draft.set("algorithm.advantage", with_options("ppo", options), "gamma", "lam", "whiten_rewards")
    draft.set("algorithm.kl_in_reward", float(draft.get("kl_coef")) > 0, "kl_coef")
    several = int(draft.get("gradient_accumulation_steps")) > 1
    draft.set("algorithm.aggregation", "microbatch_token" if several else "token")
    for side in ("low", "high"):
        draft.take(f"algorithm.epsilon_{side}", "cliprange")
    _rewards(draft)


def distil(draft: Draft, trainer: str, devices: int) -> int:
    """Set the batch, the completions of a prompt, the tools and the teacher."""
    batch(draft, devices)
    draft.set("rollout.group_size", 1)
    if trainer in ("iwopd", "gold"):  # whose rows are completions
        group = int(draft.get("num_generations"))
        keys = (*ROWS, "num_generations", "generation_batch_size")
        draft.set("batch.prompts", draft.values["batch.prompts"] // group, *keys)
        draft.set("rollout.group_size", group, "num_generations")
    _environment(draft)
    if trainer not in ("serverdistillation", "asyncdistillation"):
        distillation.of_trl(draft, trainer)
        return 1
    distillation.served_of_trl(draft, trainer)
    if trainer == "asyncdistillation":
        _staleness(
            draft,
            "AsyncDistillationTrainer takes what is ready and at most as old, as many rows as token_budget has room "
            "for: set batch.prompts by its log",
        )
    return 1


def _staleness(draft: Draft, differs: str) -> None:
    """Set how old the policy of a batch is, and note how the batches there differ."""
    lag = int(draft.get("max_staleness")) * int(draft.get("weight_sync_steps"))
    draft.set("rollout.staleness", lag, "max_staleness", "weight_sync_steps")
    draft.set("algorithm.old_logps", "sampler")
    draft.use("token_budget")
    draft.check(f"a batch here is of the policy {amount(lag, 'update')} before (rollout.staleness); {differs}")


def sdpo(draft: Draft, trainer: str, devices: int) -> int:
    """Set what GRPO's trainer has, and the policy as its teacher, unless the weight of that is 0."""
    weight = float(draft.get("distillation_weight"))
    updates = grpo(draft, trainer, devices) if weight < 1 else _online(draft, devices)
    if draft.get("beta"):
        draft.drop("algorithm.beta")
        draft.check("beta is left out: SDPOTrainer takes it and has no KL term")
    if weight:
        distillation.self_of_trl(draft, updates, weight)
    return updates


def sdft(draft: Draft, trainer: str, devices: int) -> int:
    """Set groups of samples without rewards, and the policy as their teacher."""
    updates = _groups(draft, devices)
    draft.set("rewards.functions", ())
    distillation.self_of_trl(draft, updates, 1.0)
    return updates


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
    draft.take("algorithm.beta", "beta", default=0.0)
    reference_sync(draft, updates)
    return updates


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
    names = (*((f"model:{model}",) if model else ()), *map(_reward, functions))
    if draft.get(own := "environment_factory.get_reward"):
        names, weights = (*names, "environment"), draft.values.get("rewards.weights")
        draft.set("rewards.weights", weights and (*weights, 1.0), "reward_weights", own)
    if not names:
        draft.set("rewards.functions", ("REWARD",))
        draft.check("the file names no reward function: set rewards.functions, or call train(config, rewards=...)")
        return
    draft.set("rewards.functions", names, *REWARD_MODELS, "reward_funcs", own)


def _reward(name: str) -> str:
    """Return the name of a reward here: TRL's own by ours, a path or hub id as a reward model."""
    if ".py:" in name:
        return name
    plain = name.rpartition(":")[2].rpartition(".")[2]
    return NAMES["rewards"].get(plain) or (f"model:{name}" if "/" in name and ":" not in name else name)
