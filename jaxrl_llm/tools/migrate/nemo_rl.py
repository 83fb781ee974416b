"""The rules for NeMo-RL: the YAML of its examples, which builds on its own, with the overrides of a command."""

import re
from pathlib import Path
from typing import Any

from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import OPEN, Draft, Options, RefusedError, Source
from jaxrl_llm.tools.migrate.losses import set_loss, with_options
from jaxrl_llm.tools.migrate.table import rules

RULES = rules("nemo-rl")
KINDS = {"grpo": "grpo", "distillation": "grpo", "sft": "sft", "dpo": "preference", "rm": "reward_model"}
MEGATRON = "policy.megatron_cfg"
CLAMPS = {"loss_fn.kl_input_clamp_value": 20.0, "loss_fn.kl_output_clamp_value": 10.0}
# What changes what is learned and has no setting, unless it has this value; the last is what to do.
ABSENT = {
    "algo.advantage_clip_low": (None, "advantages are not clipped"),
    "algo.advantage_clip_high": (None, "advantages are not clipped"),
    "algo.seq_logprob_error_threshold": (None, "algorithm.rejection leaves rows out by their divergence"),
    "algo.invalid_tool_call_advantage": (None, "a reward function can punish what a completion says"),
    "algo.malformed_thinking_advantage": (None, "a reward function can punish what a completion says"),
    "algo.reward_scaling.enabled": (False, "scale the rewards in their function, or by rewards.weights"),
    "algo.reward_shaping.stop_properly_penalty_coef": (
        None, "algorithm.missing_eos_penalty subtracts from the reward of a completion that did not end"
    ),
    "algo.preference_average_log_probs": (False, "dpo takes sums of log-probs here"),
    "policy.draft.enabled": (False, "no drafter is trained"),
}  # fmt: skip


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for a YAML of NeMo-RL, or a command with its overrides."""
    sections = [name for name in (*KINDS, "ppo") if any(key.startswith(f"{name}.") for key in source.settings)]
    trainer = source.trainer or next(iter(sections), "grpo")
    if trainer not in KINDS:
        raise RefusedError(f"{source.path}: {trainer} of NeMo-RL has no equivalent; there are {', '.join(KINDS)}")
    named: dict[str, tuple[str, Any]] = {}
    for key, value in source.settings.items():
        name = f"algo.{key.removeprefix(f'{trainer}.')}" if key.startswith(f"{trainer}.") else key
        if not OPEN.search(str(value)):
            named[name] = (key, value)
    title = f"{trainer.upper()}, from FILE of NeMo-RL; what that leaves out is as in its examples/configs."
    draft = Draft(source, title, RULES[trainer], named)
    for key in RULES[trainer]:
        draft.names.setdefault(key, key.replace("algo.", f"{trainer}.", 1) if key.startswith("algo.") else key)
    draft.companion = options.companion
    draft.set("algorithm.name", KINDS[trainer])
    devices = _model(draft, options)
    online = trainer in ("grpo", "distillation")
    if online:
        _batch(draft, devices)
        _sampling(draft)
    else:
        rows, each = int(draft.get("policy.train_global_batch_size")), 1 if trainer == "sft" else 2
        draft.set("batch.prompts", rows, "policy.train_global_batch_size")
        micro = int(draft.get("policy.train_micro_batch_size")) * devices * each
        shared.microbatch_rows(draft, micro, rows * each, "policy.train_micro_batch_size")
        draft.set(
            "data.max_length", int(draft.get("policy.max_total_sequence_length")), "policy.max_total_sequence_length"
        )
    _data(draft, trainer)
    if trainer == "grpo":
        _advantage(draft)
        _loss(draft)
    elif trainer == "distillation":
        _distillation(draft)
    elif trainer == "sft":
        draft.set("algorithm.aggregation", "token")
        draft.set(
            "data.loss_on", "last_turn" if draft.get("algo.only_unmask_final") else None, "algo.only_unmask_final"
        )
        draft.set("data.packing", bool(draft.get("policy.sequence_packing.enabled")), "policy.sequence_packing.enabled")
    elif trainer == "dpo":
        draft.set(
            "algorithm.beta", float(draft.get("algo.reference_policy_kl_penalty")), "algo.reference_policy_kl_penalty"
        )
        likely, weight = float(draft.get("algo.sft_loss_weight")), float(draft.get("algo.preference_loss_weight"))
        draft.set("algorithm.loss", "dpo+sft" if likely else "dpo", "algo.sft_loss_weight")
        draft.set("algorithm.loss_weights", (weight, likely) if likely else None, "algo.preference_loss_weight")
        if likely:
            draft.check(
                "sft_loss_weight weighs a mean of log-probs over tokens here, and sums of them there, by default"
            )
        draft.use("algo.preference_loss_weight", "algo.sft_average_log_probs")
    for key, (harmless, why) in ABSENT.items():
        if draft.get(key) not in (None, harmless):
            draft.check(f"{draft.named(key)} = {draft.get(key)} has no equivalent: {why}")
        draft.use(key)
    _length(draft, options)
    _rate(draft)
    _saving(draft, online)
    return draft


def _model(draft: Draft, options: Options) -> int:
    """Set the model, its adapters and the mesh; return the devices that have rows of their own."""
    draft.set("model.path", draft.get("policy.model_name"), "policy.model_name")
    shared.check_model(draft)
    tokenizer = draft.get("policy.tokenizer.name")
    draft.set(
        "model.tokenizer", tokenizer if tokenizer != draft.values["model.path"] else None, "policy.tokenizer.name"
    )
    draft.set("data.chat_template", draft.get("policy.tokenizer.chat_template"), "policy.tokenizer.chat_template")
    given = {k: v for k, v in draft.settings.items() if k.startswith(start := "policy.tokenizer.chat_template_kwargs.")}
    written = ", ".join(f"{key.removeprefix(start)}={value!r}" for key, value in given.items())
    draft.set("data.chat_template_kwargs", written or None, *given)
    overrides = {k: v for k, v in draft.settings.items() if k.startswith(start := "policy.hf_config_overrides.")}
    written = ", ".join(f"{key.removeprefix(start)}={value!r}" for key, value in overrides.items())
    draft.set("model.overrides", written or None, *overrides)
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
        draft.set("lora.alpha", float(draft.first(f"{lora}.alpha", default=32)), f"{lora}.alpha")
        draft.set("lora.dropout", float(draft.first(f"{lora}.dropout", default=0.0)), f"{lora}.dropout")
        targets = draft.get(f"{lora}.target_modules")
        draft.set(
            "lora.targets", tuple(targets) if targets and not draft.get(f"{lora}.match_all_linear") else ("all-linear",)
        )
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
    draft.use(*keys, *sharing.values())
    for ours, key in sharing.items():
        if (size := int(draft.get(key) or 1)) > 1:
            draft.set(ours, size, key)
            count = count // size if ours != "mesh.expert" else count
    return max(count, 1)


def _batch(draft: Draft, devices: int) -> None:
    """Set the rows of a step, of an update and of a micro-batch."""
    prompts, group = int(draft.get("algo.num_prompts_per_step")), int(draft.get("algo.num_generations_per_prompt"))
    rows = int(draft.get(key := "policy.train_global_batch_size"))
    draft.set("batch.prompts", prompts, "algo.num_prompts_per_step")
    draft.set("rollout.group_size", group, "algo.num_generations_per_prompt")
    minibatches = max(prompts * group // rows, 1)
    draft.set("batch.minibatches", minibatches, key)
    each = "policy.train_micro_batch_size"
    packed = next(
        (f"policy.{kind}" for kind in ("sequence_packing", "dynamic_batching") if draft.get(f"policy.{kind}.enabled")),
        "",
    )
    if packed:
        length = int(draft.get("policy.max_total_sequence_length"))
        tokens = draft.first(f"{packed}.train_mb_tokens", default=length * int(draft.get(each)))
        draft.set(
            "batch.microbatch_tokens", int(tokens) * devices, f"{packed}.enabled", f"{packed}.train_mb_tokens", each
        )
    else:
        shared.microbatch_rows(draft, int(draft.get(each)) * devices, prompts * group // minibatches, each)
    for kind in ("sequence_packing", "dynamic_batching"):
        draft.use(*(f"policy.{kind}.{name}" for name in ("enabled", "train_mb_tokens", "logprob_mb_tokens")))
    draft.use(each, "policy.logprob_batch_size")


def _sampling(draft: Draft) -> None:
    """Set the lengths, the sampling, and who samples."""
    at, whole = "policy.generation", int(draft.get("policy.max_total_sequence_length"))
    most = int(draft.first(f"{at}.max_new_tokens", default=whole))
    draft.set("rollout.max_completion_length", most, f"{at}.max_new_tokens", "policy.max_total_sequence_length")
    longest = int(draft.first("data.max_input_seq_length", default=whole))
    draft.set("rollout.max_prompt_length", longest, "data.max_input_seq_length", "policy.max_total_sequence_length")
    draft.set("data.overlong", "filter", "data.max_input_seq_length")
    draft.set("rollout.temperature", float(draft.get(f"{at}.temperature")), f"{at}.temperature")
    draft.set("rollout.top_p", float(draft.get(f"{at}.top_p")), f"{at}.top_p")
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


def _data(draft: Draft, trainer: str) -> None:
    """Set the rows, the function that reads them, and the rewards that their environment gives."""
    at = "data.train"
    if isinstance(draft.get("data.train"), list):
        draft.set("data.path", "DATA", "data.train")
        draft.check("data.train is a list of data sets: write them in data.sources, each with its path and split")
        return
    path, name = draft.get(f"{at}.data_path"), str(draft.get(f"{at}.dataset_name") or "")
    known = RULES["datasets"].get(name)
    columns = [draft.first(f"{at}.{key}_key", f"data.default.{key}_key", default=key) for key in ("input", "output")]
    keys = [f"{at}.{key}" for key in ("data_path", "dataset_name", "input_key", "output_key", "split", "subset")]
    if path:
        draft.set("data.path", path, keys[0])
        draft.set("data.split", draft.get(keys[4]), keys[4])
        draft.set("data.name", draft.get(keys[5]), keys[5])
    elif known:
        draft.set("data.path", known[0], keys[1])
        draft.set("data.split", draft.first(keys[4], default=known[1]), keys[4], keys[1])
        columns = known[2:]
    else:
        draft.set("data.path", "DATA", keys[1])
        draft.check(
            f"{draft.named(keys[1])} = {name} is a class of NeMo-RL: set data.path to its rows, and see data.format"
        )
    draft.use(*keys)
    draft.set("data.shuffle", bool(draft.get("data.shuffle")), "data.shuffle")
    if share := float(draft.get(f"{at}.split_validation_size") or 0):
        draft.set("eval.fraction", share, f"{at}.split_validation_size")
    elif validation := draft.get("data.validation.data_path"):
        draft.set("data.eval_path", validation, "data.validation.data_path")
        draft.set("data.eval_split", draft.get("data.validation.split"), "data.validation.split")
    elif other := draft.get("data.validation.dataset_name"):
        draft.check(f"data.validation.dataset_name = {other}: set data.eval_path and data.eval_split to its rows")
        draft.use("data.validation.dataset_name", "data.validation.split")
    if trainer in ("dpo", "rm"):
        draft.check(
            "data sets of pairs are classes of NeMo-RL: rows need prompt, chosen and rejected here (docs/data.md)"
        )
        return
    filled = {"INPUT": repr(columns[0]), "OUTPUT": repr(columns[1])}
    if trainer != "sft":
        texts = [
            _text(draft, draft.first(f"{at}.{kind}", f"data.default.{kind}"))
            for kind in ("prompt_file", "system_prompt_file")
        ]
        system = f'[{{"role": "system", "content": {texts[1]!r}}}, ] + ' if texts[1] else ""
        filled |= {"TEMPLATE": repr(texts[0]), "SYSTEM": system}
        _rewards(draft, at)
    text = RULES["functions"]["completions" if trainer == "sft" else "prompts"]
    draft.functions.append(re.sub("INPUT|OUTPUT|TEMPLATE|SYSTEM", lambda word: filled[word[0]], text))
    which = "completions" if trainer == "sft" else "prompts"
    draft.set(
        "data.format", f"{draft.companion}:{which}", "data.default.prompt_file", f"{at}.input_key", f"{at}.output_key"
    )


def _text(draft: Draft, file: Any) -> str | None:
    """Return the text of a prompt file, or that of the one that comes with NeMo-RL by this name."""
    if not file:
        return None
    found = next((path for path in (Path(file), Path(draft.source.path).parent / file) if path.is_file()), None)
    if found is None and file not in RULES["prompts"]:
        draft.check(f"the prompt file {file} is not here: write its text to PROMPT in {draft.companion}")
    return found.read_text(encoding="utf-8") if found else RULES["prompts"].get(file)


def _rewards(draft: Draft, at: str) -> None:
    """Set the rewards of the environment that the rows name."""
    name = str(draft.first(f"{at}.env_name", "data.default.env_name", default="math"))
    draft.set(
        "rewards.functions",
        ("math_accuracy",) if name == "math" else ("REWARD",),
        "data.default.env_name",
        f"{at}.env_name",
    )
    if name != "math":
        draft.check(
            f"env_name is {name}, an environment of NeMo-RL: write its reward (rewards.functions), or environment"
        )


def _advantage(draft: Draft) -> None:
    """Set the advantages, and which completions and prompts are left out."""
    at = "algo.adv_estimator"
    normalize, leave = (
        draft.first(f"{at}.{key}", f"algo.{key}") for key in ("normalize_rewards", "use_leave_one_out_baseline")
    )
    options = {"leave_one_out": True, "eps": 1e-6} if leave else {"eps": 1e-6}
    whitened = {"ddof": 0}
    known = {
        "grpo": with_options("group", options) if normalize or not leave else "rloo",
        "gdpo": with_options("gdpo", options),
        "reinforce_plus_plus": with_options(
            "reinforce_plus_plus_baseline" if draft.get(f"{at}.minus_baseline") else "reinforce_plus_plus", whitened
        ),
    }
    shared.check_known(draft.named(key := f"{at}.name"), name := draft.get(key), known)
    keys = [
        f"{at}.normalize_rewards",
        f"{at}.use_leave_one_out_baseline",
        "algo.normalize_rewards",
        "algo.use_leave_one_out_baseline",
    ]
    draft.set("algorithm.advantage", known[name], key, *keys, f"{at}.minus_baseline")
    if name == "grpo" and known[name] != "rloo":
        draft.set("algorithm.scale_rewards", "group" if normalize else "none", *keys)
    draft.set("rewards.weights", draft.get(f"{at}.reward_weights"), f"{at}.reward_weights")
    draft.use(*keys, f"{at}.minus_baseline")
    draft.set("algorithm.mask_truncated", draft.get("algo.overlong_filtering"), "algo.overlong_filtering")
    if draft.get("algo.use_dynamic_sampling"):
        draft.set("algorithm.dynamic_sampling", True, "algo.use_dynamic_sampling")
        most = "algo.dynamic_sampling_max_gen_batches"
        draft.set("algorithm.max_sampling_rounds", int(draft.get(most)), most)
    draft.use("algo.dynamic_sampling_max_gen_batches")
    shaping = "algo.reward_shaping"
    if draft.get(f"{shaping}.enabled"):
        draft.set(
            "algorithm.overlong_buffer",
            int(draft.get(f"{shaping}.overlong_buffer_length")),
            f"{shaping}.overlong_buffer_length",
        )
        draft.set(
            "algorithm.overlong_penalty",
            float(draft.get(f"{shaping}.overlong_buffer_penalty")),
            f"{shaping}.overlong_buffer_penalty",
        )
    draft.use(
        *(
            f"{shaping}.{name}"
            for name in ("enabled", "overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
        )
    )


def _loss(draft: Draft) -> None:
    """Set the policy loss, its mean, the KL term and the correction for the sampler."""
    at = "loss_fn"
    low, high = (float(draft.get(f"{at}.ratio_clip_{side}")) for side in ("min", "max"))
    draft.set("algorithm.epsilon_low", low, f"{at}.ratio_clip_min")
    draft.set("algorithm.epsilon_high", high, f"{at}.ratio_clip_max")
    tokens, rows = draft.get(f"{at}.token_level_loss"), draft.get(f"{at}.sequence_level_importance_ratios")
    draft.set("algorithm.aggregation", "token" if tokens else "sequence", f"{at}.token_level_loss")
    kinds = [
        f"{at}.{name}"
        for name in ("disable_ppo_ratio", "use_cispo", "sequence_level_importance_ratios", "force_on_policy_ratio")
    ]
    if draft.get(kinds[0]):
        draft.set("algorithm.loss", "reinforce", kinds[0])
    elif draft.get(kinds[1]):
        draft.set("algorithm.loss", with_options("cispo", {"minimum": float(f"{1 - low:g}")}), kinds[1])
        draft.set("algorithm.epsilon_high", 1 + high, f"{at}.ratio_clip_max")
    else:
        set_loss(
            draft,
            [("gspo" if rows else "ppo_clip", {"dual_clip": f"{at}.ratio_clip_c"})],
            kinds[2] if rows else f"{at}.ratio_clip_c",
        )
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
    draft.use(
        *CLAMPS, f"{at}.reference_policy_kl_type", f"{at}.use_kl_in_reward", f"{at}.use_on_policy_kl_approximation"
    )
    if beta:
        draft.set("algorithm.kl", str(draft.get(f"{at}.reference_policy_kl_type")), f"{at}.reference_policy_kl_type")
        if draft.get(f"{at}.use_kl_in_reward"):
            draft.set("algorithm.kl_in_reward", True, f"{at}.use_kl_in_reward")
            draft.check(
                "use_kl_in_reward: NeMo-RL takes the KL of a token off its own advantage; here it is off the score"
            )
        else:  # the gradient of the estimate's expectation has that of the sampled token's probability
            draft.set("algorithm.kl_bias_correction", True, f"{at}.use_on_policy_kl_approximation")
            if draft.values["batch.minibatches"] > 1 and not draft.get(f"{at}.use_on_policy_kl_approximation"):
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
    level = "sequence" if rows else "token"
    draft.set(
        "algorithm.importance_correction", f"{level}_{'mask' if kind == 'icepop' else 'truncate'}", keys[0], keys[1]
    )
    if kind is None:
        draft.set("algorithm.importance_max", 1e9, keys[0])
        return
    shared.check_known(keys[1], kind, ("tis", "icepop", "seq-mask-tis"))
    if kind == "seq-mask-tis":
        filled = {"DUAL": repr(draft.get("loss_fn.ratio_clip_c")), "LOW": repr(float(low)), "HIGH": repr(float(high))}
        text = rules("openrlhf")["functions"]["seq_mask_tis"]
        draft.functions.append(re.sub(r"\b(DUAL|LOW|HIGH)\b", lambda word: filled[word[0]], text))
        draft.set("algorithm.loss", f"{draft.companion}:seq_mask_tis", keys[1], keys[2], keys[3])
        draft.set("algorithm.importance_max", 1e9, keys[1])
        return
    draft.set("algorithm.importance_max", float(high), keys[2])
    draft.set("algorithm.importance_min", None if low is None else float(low), keys[3])


def _distillation(draft: Draft) -> None:
    """Set the teacher, and the divergence from it."""
    draft.set("teacher.path", draft.get("teacher.model_name"), "teacher.model_name")
    draft.set("teacher.form", "divergence")
    draft.set("teacher.top_k", int(draft.get("algo.topk_logits_k")), "algo.topk_logits_k")
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
    """Set the steps of the run: the smaller of its steps and its epochs."""
    most, epochs = int(draft.get("algo.max_num_steps")), float(draft.get("algo.max_num_epochs") or 1)
    rows = shared.known_rows(options, draft.values["data.path"], "train")
    rows -= int(rows * draft.values.get("eval.fraction", 0.0))
    per_epoch = rows // draft.values["batch.prompts"]
    if (rows and (most < 0 or per_epoch * epochs < most)) or not 0 < most < 100_000:
        shared.epochs(draft, per_epoch, epochs, "algo.max_num_epochs")
    else:
        draft.set("total_steps", most, "algo.max_num_steps")
    draft.use("algo.max_num_steps", "algo.max_num_epochs")


def _rate(draft: Draft) -> None:
    """Set the optimizer and the learning rate, of torch or of Megatron."""
    draft.set("seed", int(draft.get("algo.seed")), "algo.seed")
    draft.set("optimizer.max_grad_norm", float(draft.get("policy.max_grad_norm") or 0.0), "policy.max_grad_norm")
    draft.set("optimizer.no_decay", ())
    if draft.get(f"{MEGATRON}.enabled"):
        at, of = f"{MEGATRON}.optimizer", f"{MEGATRON}.scheduler"
        rate = float(draft.get(f"{at}.lr"))
        draft.set("optimizer.learning_rate", rate, f"{at}.lr")
        draft.set("optimizer.weight_decay", float(draft.get(f"{at}.weight_decay")), f"{at}.weight_decay")
        for name, key in (("b1", "adam_beta1"), ("b2", "adam_beta2"), ("eps", "adam_eps")):
            draft.set(f"optimizer.{name}", float(draft.get(f"{at}.{key}")), f"{at}.{key}")
        name = shared.schedule(draft, draft.get(f"{of}.lr_decay_style"), f"{of}.lr_decay_style")
        warm = int(draft.get(f"{of}.lr_warmup_iters"))
        draft.set("optimizer.warmup_steps", min(warm, draft.values["total_steps"]), f"{of}.lr_warmup_iters")
        draft.set(
            "optimizer.warmup_init", float(draft.get(f"{of}.lr_warmup_init")) if warm else None, f"{of}.lr_warmup_init"
        )
        if name != "constant":
            draft.set("optimizer.min_lr_ratio", float(draft.get(f"{at}.min_lr")) / rate, f"{at}.min_lr")
            draft.set("optimizer.schedule_steps", int(draft.get(f"{of}.lr_decay_iters")), f"{of}.lr_decay_iters")
        draft.use(f"{at}.min_lr", f"{of}.lr_decay_iters")
        return
    at = "policy.optimizer.kwargs"
    rate = float(draft.get(f"{at}.lr"))
    draft.set("optimizer.learning_rate", rate, f"{at}.lr")
    draft.set("optimizer.weight_decay", float(draft.get(f"{at}.weight_decay") or 0.0), f"{at}.weight_decay")
    shared.betas(draft, f"{at}.betas")
    draft.set("optimizer.eps", float(draft.get(f"{at}.eps")), f"{at}.eps")
    shared.optimizer(draft, draft.get("policy.optimizer.name"), "policy.optimizer.name")
    given = draft.get(key := "policy.scheduler") or ()
    if not given and "policy.scheduler.name" in draft.settings:
        start = "policy.scheduler.kwargs."
        inner = {name.removeprefix(start): value for name, value in draft.settings.items() if name.startswith(start)}
        given = [{"name": draft.get("policy.scheduler.name"), "kwargs": inner}]
        draft.use("policy.scheduler.name", *(f"{start}{name}" for name in inner))
    warm, total = 0, draft.values["total_steps"]
    for one in given:
        name, inner = str(one.get("name", "")).rpartition(".")[2], one.get("kwargs") or {}
        if name == "LinearLR" and float(inner.get("start_factor", 1 / 3)) < 1:
            warm = int(inner.get("total_iters", 5))
            draft.set("optimizer.warmup_steps", min(warm, total), key)
            draft.set("optimizer.warmup_init", rate * float(inner.get("start_factor", 1 / 3)), key)
        elif name == "CosineAnnealingLR":
            draft.set("optimizer.schedule", "cosine", key)
            draft.set("optimizer.schedule_steps", warm + int(inner["T_max"]), key)
            draft.set("optimizer.min_lr_ratio", float(inner.get("eta_min", 0.0)) / rate, key)
        elif name not in ("ConstantLR", ""):
            draft.check(f"policy.scheduler: {name} has no equivalent; the rate is constant from there")
    draft.use(key)


def _saving(draft: Draft, online: bool) -> None:
    """Set checkpoints, evaluations and logs."""
    at = "checkpointing"
    draft.set("output_dir", draft.get(f"{at}.checkpoint_dir"), f"{at}.checkpoint_dir")
    every = int(draft.get(f"{at}.save_period")) if draft.get(f"{at}.enabled") else 0
    draft.set("checkpoint.every", every, f"{at}.save_period", f"{at}.enabled")
    metric = str(draft.get(f"{at}.metric_name") or "")
    draft.set("checkpoint.keep", int(draft.get(f"{at}.keep_top_k") or 1), f"{at}.keep_top_k")
    if metric:
        draft.check(
            f"{at}.metric_name = {metric}: the newest checkpoints are kept here; checkpoint.best keeps the best by one"
        )
        draft.use(f"{at}.metric_name", f"{at}.higher_is_better")
    evaluated = "eval.fraction" in draft.values or "data.eval_path" in draft.values
    period = int(draft.get("algo.val_period"))
    draft.set("eval.every", period if period > 0 and evaluated else -1, "algo.val_period")
    draft.set("eval.at_start", bool(draft.get("algo.val_at_start")), "algo.val_at_start")
    draft.set("eval.at_end", bool(draft.get("algo.val_at_end")), "algo.val_at_end")
    if online:
        draft.set("eval.prompts", int(draft.get("algo.max_val_samples")), "algo.max_val_samples")
        samples = "algo.val_num_generations_per_prompt"
        draft.set("eval.samples", int(draft.first(samples, default=1)), samples)
        draft.set("eval.greedy", False, samples)
        for name in ("temperature", "top_p", "top_k"):
            draft.set(f"eval.{name}", draft.get(f"policy.generation.val_{name}"), f"policy.generation.val_{name}")
    backends = [name for name in ("wandb", "tensorboard", "mlflow", "swanlab") if draft.get(f"logger.{name}_enabled")]
    draft.set("logging.backends", ("console", "jsonl", *backends), *(f"logger.{name}_enabled" for name in backends))
    if backends:
        kinds = {
            "wandb": ("project", "name"),
            "swanlab": ("project", "name"),
            "mlflow": ("experiment_name", "run_name"),
        }
        said = [(f"logger.{name}.{x}", f"logger.{name}.{y}") for name, (x, y) in kinds.items() if name in backends]
        shared.tracked(draft, draft.settings, [project for project, _ in said], [name for _, name in said])
