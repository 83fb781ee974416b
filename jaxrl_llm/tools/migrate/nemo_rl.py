"""The rules for NeMo-RL: the YAML of its examples, which builds on its own, with the overrides of a command."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import OURS, Draft, Options, RefusedError, Source, has_experts, renamed
from jaxrl_llm.tools.migrate.losses import set_correction, set_loss, with_options
from jaxrl_llm.tools.migrate.table import rules
from jaxrl_llm.tools.migrate.trees import file_named

RULES = rules("nemo-rl")
KINDS = {"grpo": "grpo", "ppo": "ppo", "distillation": "grpo", "sft": "sft", "dpo": "preference", "rm": "reward_model"}
MEGATRON = "policy.megatron_cfg"
# What changes what is learned and has no setting, unless it has this value; the last is what to do.
ABSENT = {
    "algo.advantage_clip_low": (None, "advantages are not clipped"),
    "algo.advantage_clip_high": (None, "advantages are not clipped"),
    "algo.seq_logprob_error_threshold": (None, "algorithm.rejection leaves rows out by their divergence"),
    "algo.invalid_tool_call_advantage": (None, "a reward function can punish what a completion says"),
    "algo.malformed_thinking_advantage": (None, "a reward function can punish what a completion says"),
    "algo.reward_shaping.stop_properly_penalty_coef": (
        None, "algorithm.missing_eos_penalty subtracts from the reward of a completion that did not end"
    ),
    "algo.stop_at_validation_metric": (None, "a run ends with its steps; early_stopping is one of the callbacks"),
    "policy.draft.enabled": (False, "no drafter is trained"),
    "on_policy_distillation.enabled": (False, "teachers by the names of agents; teacher.path is one teacher"),
    **{
        f"reward_penalties.penalize_{what}": (False, "a reward function can punish what a completion says")
        for what in ("duplicated_reasoning", "empty_final_answer", "unwanted_tokens", "malformed_think_tag")
    },
}  # fmt: skip


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for a YAML of NeMo-RL, or a command with its overrides."""
    sections = [name for name in KINDS if any(key.startswith(f"{name}.") for key in source.settings)]
    if not sections and "eval.metric" in source.settings:
        raise RefusedError(
            f"{source.path} evaluates and trains nothing. The command for that is python -m jaxrl_llm evaluate, with a "
            "config whose model.path is the model, data.eval_path the rows and eval.samples num_tests_per_prompt"
        )
    trainer = source.trainer or next(iter(sections), "grpo")
    if trainer not in KINDS:
        raise RefusedError(f"{source.path}: {trainer} of NeMo-RL has no equivalent; there are {', '.join(KINDS)}")
    if "teachers" in source.settings:
        raise RefusedError(
            f"{source.path}: teachers of other vocabularies rate texts through projection matrices there, which are "
            "none here. One such teacher is algorithm.name=sft with teacher.path, teacher.form=uld and, for gold_loss, "
            "teacher.uld_hybrid=true (docs/distillation.md)"
        )

    def name_of(key: str) -> str:
        return re.sub(rf"^{trainer}\.", "algo.", key).replace(".async_ppo.", ".async_grpo.")

    named = renamed(source.settings, name_of)
    title = f"{trainer.upper()}, from FILE of NeMo-RL; what that leaves out is as in its examples/configs."
    draft = Draft(source, title, RULES[trainer], named)
    for key in RULES[trainer]:
        draft.names.setdefault(key, key.replace("algo.", f"{trainer}.", 1) if key.startswith("algo.") else key)
    draft.set("algorithm.name", KINDS[trainer])
    devices = _model(draft, options)
    online = KINDS[trainer] in ("grpo", "ppo")
    if online:
        _batch(draft, devices)
        _sampling(draft)
    else:
        rows, each = int(draft.get("policy.train_global_batch_size")), 1 if trainer == "sft" else 2
        draft.set("batch.prompts", rows, "policy.train_global_batch_size")
        micro = int(draft.get("policy.train_micro_batch_size")) * devices * each
        shared.microbatch_rows(draft, micro, rows * each, "policy.train_micro_batch_size")
        longest = "policy.max_total_sequence_length"
        draft.take("data.max_length", longest)
        draft.set("data.overlong", "filter", longest)
    _data(draft, trainer, options)
    if trainer in ("grpo", "ppo"):
        _advantage(draft)
        _loss(draft)
    elif trainer == "distillation":
        _distillation(draft)
    elif trainer == "sft":
        draft.set("algorithm.aggregation", "token")
        last = draft.get(key := "algo.only_unmask_final")
        draft.set("data.loss_on", "last_turn" if last else None, key)
        draft.take("data.packing", "policy.sequence_packing.enabled")
    elif trainer == "dpo":
        draft.take("algorithm.beta", "algo.reference_policy_kl_penalty")
        likely, weight = float(draft.get("algo.sft_loss_weight")), float(draft.get("algo.preference_loss_weight"))
        kind = "sigmoid_norm" if draft.get(key := "algo.preference_average_log_probs") else "dpo"
        draft.set("algorithm.loss", f"{kind}+sft" if likely else kind, key, "algo.sft_loss_weight")
        draft.set("algorithm.loss_weights", (weight, likely) if likely else None, "algo.preference_loss_weight")
        if weight != 1 and not likely:
            draft.check(f"dpo.preference_loss_weight = {weight:g} has no part in a loss of one term: it is 1 here")
        if likely:
            there = "completions' means" if draft.get("algo.sft_average_log_probs") else "completions' sums"
            draft.check(f"sft_loss_weight weighs a mean over tokens here, and a mean of {there} there")
        draft.use("algo.preference_loss_weight", "algo.sft_average_log_probs")
    shared.check_absent(draft, ABSENT)
    fp8 = f"{MEGATRON}.fp8_cfg.enabled"
    if draft.get(f"{MEGATRON}.enabled") and draft.get(fp8):
        shared.fp8_matmuls(draft, fp8)
    draft.use(fp8)
    _length(draft, options)
    _rate(draft, "policy", "optimizer")
    if trainer == "ppo":
        _critic(draft)
    _saving(draft, online)
    return draft


def _model(draft: Draft, options: Options) -> int:
    """Set the model, its adapters and the mesh; return the devices that have rows of their own."""
    draft.set("model.path", draft.get("policy.model_name"), "policy.model_name")
    shared.check_model(draft)
    if (tokenizer := draft.get(key := "policy.tokenizer.name")) != draft.values["model.path"]:
        draft.set("model.tokenizer", tokenizer, key)
    draft.set("data.chat_template", draft.get(template := "policy.tokenizer.chat_template"), template)
    draft.use(key)
    shared.set_options(draft, "data.chat_template_kwargs", "policy.tokenizer.chat_template_kwargs")
    shared.set_options(draft, "model.overrides", "policy.hf_config_overrides")
    dtype = shared.type_name(draft.get("policy.precision"))
    draft.set("model.dtype", "bfloat16" if dtype == "float16" else dtype, "policy.precision")
    megatron = bool(draft.get(f"{MEGATRON}.enabled"))
    at = MEGATRON if megatron else "policy.dtensor_cfg"
    draft.use(f"{MEGATRON}.enabled", "policy.dtensor_cfg.enabled")
    remat = draft.get(f"{at}.activation_checkpointing")
    draft.set("model.remat", "block" if remat else None, f"{at}.activation_checkpointing")
    draft.set("model.offload", draft.get("policy.dtensor_cfg.cpu_offload") or None, "policy.dtensor_cfg.cpu_offload")
    lora = f"{MEGATRON}.peft" if megatron else "policy.dtensor_cfg.lora_cfg"
    if draft.get(f"{lora}.enabled"):
        draft.set("lora.rank", int(draft.first(f"{lora}.dim", default=8)), f"{lora}.enabled", f"{lora}.dim")
        draft.take("lora.alpha", f"{lora}.alpha", default=32)
        draft.take("lora.dropout", f"{lora}.dropout", default=0.0)
        targets = draft.get(f"{lora}.target_modules")
        whole = not targets or draft.get(f"{lora}.match_all_linear")
        draft.set("lora.targets", ("all-linear",) if whole else tuple(targets))
        draft.set("lora.exclude_modules", tuple(draft.get(f"{lora}.exclude_modules") or ()), f"{lora}.exclude_modules")
        draft.use(f"{lora}.target_modules", f"{lora}.match_all_linear")
    prefix = "tensor_model_parallel_size" if megatron else "tensor_parallel_size"
    sharing = {"mesh.tensor": f"{at}.{prefix}", "mesh.context": f"{at}.context_parallel_size"}
    if megatron:
        sharing["mesh.expert"] = f"{at}.expert_model_parallel_size"
        if int(draft.get(f"{at}.pipeline_model_parallel_size") or 1) > 1:
            draft.check("pipeline_model_parallel_size: stages of layers are no axis here: mesh.fsdp shards them")
    else:
        draft.set("mesh.fsdp", -1, "policy.dtensor_cfg.enabled")
        draft.set("mesh.data", 1, "policy.dtensor_cfg.enabled")
    keys = ("cluster.gpus_per_node", "cluster.num_nodes")
    count = options.devices or int(draft.get(keys[0])) * int(draft.get(keys[1]))
    draft.use(*keys)
    if megatron and has_experts(str(draft.values["model.path"])):
        draft.set("model.freeze_router", draft.get(f"{at}.freeze_moe_router"), f"{at}.freeze_moe_router")
        if draft.get(key := f"{at}.moe_router_load_balancing_type") not in (None, "none"):  # by the model's coefficient
            draft.set_none("model.router_aux_loss_coef", key)
    return shared.shared_rows(draft, sharing, count)


def _batch(draft: Draft, devices: int) -> None:
    """Set the rows of a step, of an update and of a micro-batch."""
    prompts, group = int(draft.get("algo.num_prompts_per_step")), int(draft.get("algo.num_generations_per_prompt"))
    rows = int(draft.get(key := "policy.train_global_batch_size"))
    draft.set("batch.prompts", prompts, "algo.num_prompts_per_step")
    draft.set("rollout.group_size", group, "algo.num_generations_per_prompt")
    minibatches = max(prompts * group // rows, 1)
    draft.set("batch.minibatches", minibatches, key)
    draft.set("algorithm.num_iterations", draft.get("algo.ppo_epochs"), "algo.ppo_epochs")
    each = "policy.train_micro_batch_size"
    kinds = ("policy.sequence_packing", "policy.dynamic_batching")
    if packed := next((kind for kind in kinds if draft.get(f"{kind}.enabled")), ""):
        length = int(draft.get("policy.max_total_sequence_length"))
        tokens = draft.first(f"{packed}.train_mb_tokens", default=length * int(draft.get(each)))
        keys = (f"{packed}.enabled", f"{packed}.train_mb_tokens", each)
        draft.set("batch.microbatch_tokens", int(tokens) * devices, *keys)
    else:
        shared.microbatch_rows(draft, int(draft.get(each)) * devices, prompts * group // minibatches, each)
    options = (f"{kind}.{name}" for kind in kinds for name in ("enabled", "train_mb_tokens", "logprob_mb_tokens"))
    draft.use(*options, each, "policy.logprob_batch_size")


def _sampling(draft: Draft) -> None:
    """Set the lengths, the sampling, and who samples."""
    at, whole = "policy.generation", int(draft.get("policy.max_total_sequence_length"))
    most = int(draft.first(f"{at}.max_new_tokens", default=whole))
    draft.set("rollout.max_completion_length", most, f"{at}.max_new_tokens", "policy.max_total_sequence_length")
    longest = int(draft.first("data.max_input_seq_length", default=whole))
    draft.set("rollout.max_prompt_length", longest, "data.max_input_seq_length", "policy.max_total_sequence_length")
    draft.set("data.overlong", "filter", "data.max_input_seq_length")
    draft.take("rollout.temperature", f"{at}.temperature")
    draft.take("rollout.top_p", f"{at}.top_p")
    draft.set("rollout.top_k", max(int(draft.get(f"{at}.top_k") or 0), 0), f"{at}.top_k")
    draft.set("rollout.stop_token_ids", draft.get(f"{at}.stop_token_ids"), f"{at}.stop_token_ids")
    draft.set("rollout.stop", draft.get(f"{at}.stop_strings"), f"{at}.stop_strings")
    tensor = int(draft.get(f"{at}.vllm_cfg.tensor_parallel_size") or 1)
    if tensor > 1:
        draft.set("rollout.mesh", f"tensor={tensor}", f"{at}.vllm_cfg.tensor_parallel_size")
    draft.use(f"{at}.vllm_cfg.tensor_parallel_size", f"{at}.colocated.enabled")
    if not draft.get(f"{at}.colocated.enabled"):
        keys = [f"{at}.colocated.resources.{name}" for name in ("gpus_per_node", "num_nodes")]
        each = int(draft.first(keys[0], "cluster.gpus_per_node"))
        draft.set("rollout.devices", each * int(draft.first(keys[1], default=1)), *keys, f"{at}.colocated.enabled")
    if draft.get("algo.async_grpo.enabled"):
        age = "algo.async_grpo.max_trajectory_age_steps"
        draft.set("rollout.staleness", int(draft.get(age)), age, "algo.async_grpo.enabled")
        flight = "algo.async_grpo.in_flight_weight_updates"
        draft.set("rollout.update_in_flight", draft.get(flight), flight)
    draft.use("algo.async_grpo.enabled", "algo.async_grpo.max_trajectory_age_steps")


def _data(draft: Draft, trainer: str, options: Options) -> None:
    """Set the rows, the function that reads them, and the rewards that their environment gives."""
    at, pairs = "data.train", trainer in ("dpo", "rm")
    if isinstance(draft.get(at), list):
        draft.set("data.path", "DATA", at)
        draft.check("data.train is a list of data sets: write them in data.sources, each with its path and split")
        return
    path, name = draft.get(f"{at}.data_path"), str(draft.get(f"{at}.dataset_name") or "")
    known = {} if path else RULES["pairs" if pairs else "datasets"].get(name)
    key = f"{at}.data_path" if path else f"{at}.dataset_name"
    draft.set("data.path", path or (known or {}).get("path", "DATA"), key)
    if known is None:
        draft.check(
            f"{draft.named(key)} = {name} is a class of NeMo-RL: set data.path to its rows, and see data.format"
        )
    known = known or {}
    draft.set("data.name", draft.first(f"{at}.subset", default=known.get("name")), f"{at}.subset")
    draft.take("data.shuffle", "data.shuffle")
    split = draft.first(f"{at}.split", default=known.get("split", "train"))
    source = {"path": draft.values["data.path"], "split": split}
    given = [key for key in draft.settings if key.startswith("data.validation.")]
    other = None if draft.sets("data.validation") and not given else draft.get("data.validation.dataset_name")
    if share := float(draft.get(f"{at}.split_validation_size") or 0):
        rows = shared.known_rows(options, source["path"], source["split"])
        shared.hold_out(draft, share, f"{at}.split_validation_size", [source], rows)
        draft.set("data.eval_split", source.get("eval_split"), f"{at}.split_validation_size")
    elif validation := draft.get("data.validation.data_path"):
        draft.set("data.eval_path", validation, "data.validation.data_path")
        draft.set("data.eval_split", draft.get("data.validation.split"), "data.validation.split")
    elif other and known and other == name:
        draft.set("data.eval_path", source["path"], "data.validation.dataset_name")
        draft.set("data.eval_split", draft.get("data.validation.split"), "data.validation.split")
    elif other:
        draft.check(f"data.validation.dataset_name = {other}: set data.eval_path and data.eval_split to its rows")
        draft.use("data.validation.dataset_name", "data.validation.split")
    draft.set("data.split", source["split"], f"{at}.split")
    draft.use(f"{at}.data_path", f"{at}.dataset_name")
    _format(draft, trainer, known)
    if not pairs and trainer != "sft":
        _rewards(draft, at)


def _format(draft: Draft, trainer: str, known: Mapping[str, str]) -> None:
    """Set the function that reads a row as NeMo-RL does: of its data set `known`, or of a file with columns."""
    at, kind = "data.train", {"dpo": "pairs", "rm": "pairs", "sft": "completions"}.get(trainer, "prompts")
    names = RULES["columns"][kind]  # by default
    columns = {f"{at}.{name}_key": f"data.default.{name}_key" for name in names}
    row = [f"row[{draft.first(*keys, default=name)!r}]" for keys, name in zip(columns.items(), names, strict=True)]
    files = {f"{at}.{name}": f"data.default.{name}" for name in RULES["files"][kind]}
    prompt, system = [*(_text(draft, draft.first(*keys)) for keys in files.items()), None, None][:2]
    messages = f'{{"role": "user", "content": {known.get("question", row[0])}}}, '
    messages += f'{{"role": "assistant", "content": {known.get("answer", row[1])}}}'
    if "context" in known:
        messages = f'{{"role": "system", "content": {known["context"]}}}, {messages}'
    told = "" if "question" in known else 'row["messages"] if "messages" in row else '
    filled = {
        "MESSAGES": f"{told}[{messages}]",
        "TEMPLATE": repr(prompt),
        "SYSTEM": f'[{{"role": "system", "content": {system!r}}}] + ' if system else "",
        **dict(zip(("ASKED", "CHOSEN", "REJECTED"), row, strict=False)),
    }
    keys = [key for pair in (columns | files).items() for key in pair]
    draft.set("data.format", draft.function(kind, RULES["functions"][known.get("function", kind)], **filled), *keys)
    draft.use(*keys)


def _text(draft: Draft, file: Any) -> str | None:
    """Return the text of a prompt file, or that of the one that comes with NeMo-RL by this name."""
    if not file:
        return None
    found = file_named(file, draft.source.path)
    if found is None and file not in RULES["prompts"]:
        draft.check(f"the prompt file {file} is not here: write its text to PROMPT in {draft.source.companion}")
    return found.read_text(encoding="utf-8") if found else RULES["prompts"].get(file)


def _rewards(draft: Draft, at: str) -> None:
    """Set the rewards of the environment that the rows name."""
    keys = (f"{at}.env_name", "data.default.env_name")
    name = str(draft.first(*keys))
    model = draft.get("env.reward_model.model_name") if name == "reward_model" else None
    known = {"math": "math_accuracy", "reward_model": f"model:{model}" if model else None}.get(name)
    bounds = [f"algo.reward_scaling.{key}" for key in ("source_min", "source_max", "target_min", "target_max")]
    if draft.get(key := "algo.reward_scaling.enabled"):
        if name == "math":
            numbers = (float(draft.get(bound)) for bound in bounds)
            filled = dict(zip(("LOW", "HIGH", "LEAST", "MOST"), numbers, strict=True))
            known = draft.function("scaled", RULES["functions"]["scaled"], **filled)
        else:
            draft.check(f"{draft.named(key)}: scale the rewards in their function, from {bounds[0]} on")
    draft.use(key, *bounds)
    draft.set("rewards.functions", (known or "REWARD",), *keys, "env.reward_model.model_name")
    if known is None:
        draft.check(
            f"env_name is {name}, an environment of NeMo-RL: write its reward (rewards.functions), or environment"
        )


def _advantage(draft: Draft) -> None:
    """Set the advantages, and which completions and prompts are left out."""
    at = "algo.adv_estimator"
    names = ("normalize_rewards", "use_leave_one_out_baseline")
    normalize, leave = (draft.first(f"{at}.{name}", f"algo.{name}") for name in names)
    options = {"leave_one_out": True, "eps": 1e-6} if leave else {"eps": 1e-6}
    whitened = "reinforce_plus_plus_baseline" if draft.get(f"{at}.minus_baseline") else "reinforce_plus_plus"
    known = {
        "grpo": with_options("group", options) if normalize or not leave else "rloo",
        "gdpo": with_options("gdpo", options),
        "gae": _gae(draft),
        "raw_reward": "raw_reward",
        "reinforce_plus_plus": f"{whitened}(ddof=0)",
    }
    shared.check_known(draft.named(key := f"{at}.name"), name := draft.get(key), known)
    keys = [f"{section}.{option}" for section in (at, "algo") for option in names]
    draft.set("algorithm.advantage", known[name], key, *keys, f"{at}.minus_baseline")
    if name == "grpo" and known[name] != "rloo":
        draft.set("algorithm.scale_rewards", "group" if normalize else "none", *keys)
    draft.set("rewards.weights", draft.get(f"{at}.reward_weights"), f"{at}.reward_weights")
    draft.use(*keys, f"{at}.minus_baseline")
    draft.set("algorithm.mask_truncated", draft.get("algo.overlong_filtering"), "algo.overlong_filtering")
    if draft.get("algo.use_dynamic_sampling"):
        draft.set("algorithm.dynamic_sampling", True, "algo.use_dynamic_sampling")
        most = "algo.dynamic_sampling_max_gen_batches"
        draft.take("algorithm.max_sampling_rounds", most)
    draft.use("algo.dynamic_sampling_max_gen_batches")
    shaping = "algo.reward_shaping"
    if draft.get(f"{shaping}.enabled"):
        draft.take("algorithm.overlong_buffer", f"{shaping}.overlong_buffer_length")
        draft.take("algorithm.overlong_penalty", f"{shaping}.overlong_buffer_penalty")
        shared.check_punished_length(draft, f"{shaping}.max_response_length")
    names = ("enabled", "overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
    draft.use(*(f"{shaping}.{name}" for name in names))


def _gae(draft: Draft) -> str:
    """Return the advantages of PPO: with a decay of the critic's own, or for each row one by its length, as VAPO."""
    at = "algo.adv_estimator"
    lam, critic = (f"gae_lambda_{name}" for name in ("policy", "value"))
    options = {"gamma": float(draft.first(f"{at}.gae_gamma", default=1.0))}
    alpha = float(draft.get(f"{at}.length_adaptive_alpha") or 0.0)
    of_policy, of_critic = (
        float(draft.first(f"{at}.{name}", f"{at}.gae_lambda", default=0.95)) for name in (lam, critic)
    )
    options |= {"alpha": alpha} if alpha else {"lam": of_policy}
    options |= {"lam_critic": of_critic} if alpha or of_policy != of_critic else {}
    options |= {} if draft.first(f"{at}.normalize_advantages", default=True) else {"whiten_advantages": False}
    names = ("gae_gamma", "gae_lambda", lam, critic, "length_adaptive_alpha", "normalize_advantages")
    draft.use(*(f"{at}.{name}" for name in names))
    return with_options("vapo" if alpha else "ppo", options)


def _loss(draft: Draft) -> None:
    """Set the policy loss, its mean, the KL term and the correction for the sampler."""
    at = "loss_fn"
    low, high = (float(draft.get(f"{at}.ratio_clip_{side}")) for side in ("min", "max"))
    draft.set("algorithm.epsilon_low", low, f"{at}.ratio_clip_min")
    draft.set("algorithm.epsilon_high", high, f"{at}.ratio_clip_max")
    tokens, rows = draft.get(f"{at}.token_level_loss"), draft.get(f"{at}.sequence_level_importance_ratios")
    draft.set("algorithm.aggregation", "token" if tokens else "sequence", f"{at}.token_level_loss")
    names = ("disable_ppo_ratio", "use_cispo", "sequence_level_importance_ratios", "force_on_policy_ratio")
    kinds = [f"{at}.{name}" for name in names]
    if draft.get(kinds[0]):
        draft.set("algorithm.loss", "reinforce", kinds[0])
    elif draft.get(kinds[1]):
        draft.set("algorithm.loss", with_options("cispo", {"minimum": float(f"{1 - low:g}")}), kinds[1])
        draft.set("algorithm.epsilon_high", 1 + high, f"{at}.ratio_clip_max")
    else:
        dual = f"{at}.ratio_clip_c"
        set_loss(draft, [("gspo" if rows else "ppo_clip", {"dual_clip": dual})], kinds[2] if rows else dual)
    draft.use(*kinds)
    weight = float(draft.get(key := f"{at}.positive_example_nll_weight"))
    draft.set("algorithm.positive_nll_coef", weight, key)
    if weight:
        draft.check(
            f"{draft.named(key)} = {weight:g}: completions whose reward is above 0 are correct there, here those whose "
            "first reward is at least eval.correct_at, 1.0"
        )
    beta = float(draft.get(f"{at}.reference_policy_kl_penalty"))
    draft.set("algorithm.beta", beta, f"{at}.reference_policy_kl_penalty")
    unread = ("reference_policy_kl_type", "use_kl_in_reward", "use_on_policy_kl_approximation")
    draft.use(*(f"{at}.{name}" for name in (*unread, "kl_input_clamp_value", "kl_output_clamp_value")))
    if beta:
        draft.set("algorithm.kl", str(draft.get(f"{at}.reference_policy_kl_type")), f"{at}.reference_policy_kl_type")
        if draft.get(f"{at}.use_kl_in_reward"):
            draft.set("algorithm.kl_in_reward", True, f"{at}.use_kl_in_reward")
            if draft.values["algorithm.name"] != "ppo":
                draft.check(
                    "use_kl_in_reward: NeMo-RL takes the KL of a token off its own advantage; here it is off the score"
                )
        else:  # the gradient of the estimate's expectation has that of the sampled token's probability
            draft.set("algorithm.kl_bias_correction", True, f"{at}.use_on_policy_kl_approximation")
            updates = draft.values["batch.minibatches"] * draft.values.get("algorithm.num_iterations", 1)
            if updates > 1 and not draft.get(f"{at}.use_on_policy_kl_approximation"):
                draft.check(
                    "the KL term is multiplied by the ratio here (algorithm.kl_bias_correction), and in NeMo-RL by 1 "
                    "with the ratio's gradient: the same in the first update of a batch"
                )
    _correction(draft, rows)


def _correction(draft: Draft, rows: Any) -> None:
    """Set the weights for the difference between sampler and trainer; of whole rows where the ratio is."""
    at = "loss_fn.truncated_importance_sampling"
    keys = ("loss_fn.use_importance_sampling_correction", f"{at}_type", f"{at}_ratio", f"{at}_ratio_min")
    draft.use(*keys)
    if not draft.get(keys[0]):
        return
    kind, high, low = (draft.get(key) for key in keys[1:])
    set_correction(draft, kind, (low, high), *keys[1:], keys[0], level="sequence" if rows else "token")


def _distillation(draft: Draft) -> None:
    """Set the teacher, and the divergence from it."""
    draft.set("teacher.path", draft.get("teacher.model_name"), "teacher.model_name")
    draft.set("teacher.form", "divergence")
    draft.take("teacher.top_k", "algo.topk_logits_k")
    kind = draft.get(key := "loss_fn.kl_type")
    shared.check_known(key, kind, betas := {"forward": 0.0, "reverse": 1.0, "mixed": 0.5})
    draft.set("teacher.beta", betas[kind], key, "loss_fn.mixed_kl_weight")
    if kind == "mixed":
        draft.check(
            "loss_fn.kl_type = mixed is a sum of both divergences there; between 0 and 1 teacher.beta is the "
            "generalised Jensen-Shannon divergence, and 0.5 is written: 0 is forward, 1 reverse"
        )
    draft.check(
        "NeMo-RL sums over the teacher's likeliest tokens alone; here the others are one more entry (teacher.tail), "
        "without which the distributions are of these tokens"
    )
    draft.use("loss_fn.mixed_kl_weight", "loss_fn.zero_outside_topk")
    draft.set("algorithm.advantage", "zero")
    draft.set("algorithm.beta", 0.0)
    draft.set("algorithm.aggregation", "token")


def _length(draft: Draft, options: Options) -> None:
    """Set the seed and the steps of the run: the smaller of its steps and its epochs.

    The collector of asynchronous GRPO goes once over the rows, that of PPO on and on.
    """
    draft.take("seed", "algo.seed")
    most, epochs = int(draft.get("algo.max_num_steps")), float(draft.get("algo.max_num_epochs") or 1)
    if draft.get("algo.async_grpo.enabled"):
        epochs = math.inf if draft.values["algorithm.name"] == "ppo" else 1.0
    rows = shared.known_rows(options, draft.values["data.path"], draft.values.get("data.split", "train"))
    rows -= int(rows * draft.values.get("eval.fraction", 0.0))
    per_epoch = shared.full_batches(rows, draft.values["batch.prompts"])
    if math.isfinite(epochs) and ((rows and (most < 0 or per_epoch * epochs < most)) or not 0 < most < 100_000):
        shared.epochs(draft, per_epoch, epochs, "algo.max_num_epochs")
    else:
        draft.set("total_steps", most, "algo.max_num_steps")
    draft.use("algo.max_num_steps", "algo.max_num_epochs")


def _rate(draft: Draft, section: str, ours: str) -> None:
    """Set the optimizer of the policy, or of the section value our `critic`, and its rate, of torch or of Megatron.

    Their schedules count passes over a batch, and ours steps.
    """
    passes, total = draft.values.get("algorithm.num_iterations", 1), draft.values["total_steps"]

    def put(name: str, value: Any, key: str) -> None:
        """Set a key of the section `ours`; the critic's rate has no others than these."""
        name = f"{ours}.{'lr_warmup_steps' if ours == 'critic' and name == 'warmup_steps' else name}"
        if name in OURS:
            draft.set(name, value, key)
        draft.use(key)

    draft.set("optimizer.no_decay", ())
    if ours == "optimizer":
        draft.take("optimizer.max_grad_norm", "policy.max_grad_norm", default=0.0)
    if draft.get(f"{section}.megatron_cfg.enabled"):
        at, of = f"{section}.megatron_cfg.optimizer", f"{section}.megatron_cfg.scheduler"
        rate = float(draft.get(f"{at}.lr"))
        names = {"lr": "learning_rate", "adam_beta1": "b1", "adam_beta2": "b2", "adam_eps": "eps"}
        for key, name in {**names, "weight_decay": "weight_decay"}.items():
            put(name, float(draft.get(f"{at}.{key}")), f"{at}.{key}")
        if ours == "optimizer" and (kind := draft.first(f"{at}.optimizer", default="adam")) != "adam":
            shared.optimizer(draft, kind, f"{at}.optimizer")
        if (style := draft.get(f"{of}.weight_decay_incr_style")) in ("linear", "cosine"):
            put("weight_decay", float(draft.get(f"{of}.start_weight_decay")), f"{of}.start_weight_decay")
            put("weight_decay_end", float(draft.get(f"{of}.end_weight_decay")), f"{of}.end_weight_decay")
            put("weight_decay_shape", style, f"{of}.weight_decay_incr_style")
        name = shared.schedule(draft, draft.get(f"{of}.lr_decay_style"), f"{of}.lr_decay_style", f"{ours}.schedule")
        warm = math.ceil(int(draft.get(f"{of}.lr_warmup_iters")) / passes)
        first = float(draft.get(f"{of}.lr_warmup_init")) if warm else None
        if name == "inverse_sqrt" and not warm and ours == "optimizer":
            # Megatron's falls from the first step then, and ours, which is transformers', over 10,000 updates.
            warm, first = 1, rate
        put("warmup_steps", min(warm, total), f"{of}.lr_warmup_iters")
        put("warmup_init", first, f"{of}.lr_warmup_init")
        if name != "constant":
            put("min_lr_ratio", float(draft.get(f"{at}.min_lr")) / rate, f"{at}.min_lr")
            last = shared.divided(int(draft.get(key := f"{of}.lr_decay_iters")), passes)
            put("schedule_steps", last, key)
        draft.use(f"{at}.min_lr", f"{of}.lr_decay_iters")
        return
    at = f"{section}.optimizer.kwargs"
    rate = float(draft.get(f"{at}.lr"))
    put("learning_rate", rate, f"{at}.lr")
    put("weight_decay", float(draft.get(f"{at}.weight_decay") or 0.0), f"{at}.weight_decay")
    shared.betas(draft, f"{at}.betas", ours)
    put("eps", float(draft.get(f"{at}.eps")), f"{at}.eps")
    if ours == "optimizer":
        shared.optimizer(draft, draft.get(key := f"{section}.optimizer.name"), key)
    given = draft.get(key := f"{section}.scheduler") or ()
    if not given and f"{key}.name" in draft.settings:
        given = [{"name": draft.get(f"{key}.name"), "kwargs": (inner := shared.below(draft, f"{key}.kwargs"))}]
        draft.use(f"{key}.name", *(f"{key}.kwargs.{name}" for name in inner))
    warm = 0
    for one in given:
        name, inner = str(one.get("name", "")).rpartition(".")[2], one.get("kwargs") or {}
        if name == "LinearLR" and float(inner.get("start_factor", 1 / 3)) < 1:
            warm = int(inner.get("total_iters", 5))
            put("warmup_steps", min(math.ceil(warm / passes), total), key)
            put("warmup_init", rate * float(inner.get("start_factor", 1 / 3)), key)
        elif name == "LinearLR":
            put("schedule", "linear", key)
            put("schedule_steps", shared.divided(warm + int(inner.get("total_iters", 5)), passes), key)
            put("min_lr_ratio", float(inner.get("end_factor", 1.0)), key)
        elif name == "CosineAnnealingLR":
            put("schedule", "cosine", key)
            put("schedule_steps", shared.divided(warm + int(inner["T_max"]), passes), key)
            put("min_lr_ratio", float(inner.get("eta_min", 0.0)) / rate, key)
        elif name not in ("ConstantLR", ""):
            draft.check(f"{key}: {name} has no equivalent; the rate is constant from there")
    draft.use(key)


def _critic(draft: Draft) -> None:
    """Set the critic of PPO: its model, its loss and its optimizer."""
    path = draft.get(key := "value.model_name")
    draft.set("critic.path", path if path != draft.values["model.path"] else None, key)
    reach, scale = draft.get(key := "value_loss_fn.cliprange"), float(draft.first("value_loss_fn.scale", default=1.0))
    if reach:
        draft.set("critic.epsilon", float(reach), key)
    else:
        draft.set_none("critic.epsilon", key)
    # A factor of the loss changes nothing but where its gradient is clipped, as Adam divides by it.
    norm = float(draft.get(key := "value.max_grad_norm") or 0.0) / scale
    draft.set("critic.max_grad_norm", norm, key, "value_loss_fn.scale")
    draft.take("critic.warmup_steps", "algo.policy_training_start_step", default=0)
    rows = draft.values["batch.prompts"] * draft.values["rollout.group_size"]
    own = int(draft.first(key := "value.train_global_batch_size", "policy.train_global_batch_size"))
    parts = max(rows // own, 1)
    draft.set("critic.minibatches", parts if parts != draft.values["batch.minibatches"] else None, key)
    lora = f"value.{'megatron_cfg.peft' if draft.get('value.megatron_cfg.enabled') else 'dtensor_cfg.lora_cfg'}"
    keys = [f"{lora}.{name}" for name in ("enabled", "dim", "alpha")]
    rank = int(draft.first(keys[1], default=8)) if draft.get(keys[0]) else 0
    if rank or draft.values.get("lora.rank"):
        draft.set("critic.lora_rank", rank, *keys[:2])
    draft.set("critic.lora_alpha", float(draft.first(keys[2], default=32)) if rank else None, keys[2])
    draft.use(*keys)
    _rate(draft, "value", "critic")


def _saving(draft: Draft, online: bool) -> None:
    """Set checkpoints, evaluations and logs."""
    at = "checkpointing"
    draft.set("output_dir", draft.get(f"{at}.checkpoint_dir"), f"{at}.checkpoint_dir")
    every = int(draft.first(f"{at}.save_period", "algo.val_period")) if draft.get(f"{at}.enabled") else 0
    draft.set("checkpoint.every", every, f"{at}.save_period", f"{at}.enabled")
    metric = str(draft.get(f"{at}.metric_name") or "")
    draft.set("checkpoint.keep", draft.get(f"{at}.keep_top_k"), f"{at}.keep_top_k")
    draft.set("checkpoint.keep_every", None if draft.get(f"{at}.keep_top_k") else 1, f"{at}.keep_top_k")  # all
    if metric:
        draft.check(
            f"{at}.metric_name = {metric}: the newest checkpoints are kept here; checkpoint.best keeps the best by one"
        )
        draft.use(f"{at}.metric_name", f"{at}.higher_is_better")
    evaluated = not {"eval.fraction", "data.eval_path", "data.eval_split"}.isdisjoint(draft.values)
    period = int(draft.get("algo.val_period"))
    draft.set("eval.every", period if period > 0 and evaluated else -1, "algo.val_period")
    draft.set("eval.start", max(int(draft.get("algo.val_start_at") or 0), 0), "algo.val_start_at")
    draft.take("eval.at_start", "algo.val_at_start")
    draft.take("eval.at_end", "algo.val_at_end")
    if online:
        most = draft.get(key := "algo.max_val_samples")
        draft.set("eval.prompts", most and int(most), key)
        if most is None and evaluated:
            draft.check(f"{draft.named(key)} = null evaluates all rows: set eval.prompts to their number")
        samples = "algo.val_num_generations_per_prompt"
        draft.take("eval.samples", samples, default=1)
        draft.set("eval.greedy", False, samples)
        for name in ("temperature", "top_p", "top_k"):
            draft.set(f"eval.{name}", draft.get(f"policy.generation.val_{name}"), f"policy.generation.val_{name}")
    backends = [name for name in ("wandb", "tensorboard", "mlflow", "swanlab") if draft.get(f"logger.{name}_enabled")]
    draft.set("logging.backends", ("console", "jsonl", *backends), *(f"logger.{name}_enabled" for name in backends))
    if backends:
        kinds = {**dict.fromkeys(("wandb", "swanlab"), ("project", "name")), "mlflow": ("experiment_name", "run_name")}
        said = [(f"logger.{name}.{x}", f"logger.{name}.{y}") for name, (x, y) in kinds.items() if name in backends]
        told = {**draft.defaults, **draft.settings}
        shared.tracked(draft, told, [project for project, _ in said], [name for _, name in said])
