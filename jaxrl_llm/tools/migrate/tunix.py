"""The rules for Tunix: the YAML and overrides of its command lines, and the classes that its scripts configure.

A file's sections are read under one name each: `model` (model_config, over it actor_model_config), `critic` (of
models), `training`, `optimizer`, `critic_optimizer`, and `algorithm` (grpo_config, agentic_grpo_config, ppo_config).
"""

import ast
import math
import re

from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import Draft, Options, RefusedError, Source, renamed
from jaxrl_llm.tools.migrate.functions import public_functions
from jaxrl_llm.tools.migrate.losses import set_loss
from jaxrl_llm.tools.migrate.table import rules
from jaxrl_llm.tools.migrate.trees import file_named

RULES = rules("tunix")
KINDS = {"grpo": "grpo", "dapo": "grpo", "drgrpo": "grpo", "ppo": "ppo", "sft": "sft", "dpo": "preference"}
ALGORITHMS = ("grpo_config.", "agentic_grpo_config.", "ppo_config.", "dpo_config.")
# A section of a file -> that of the rules; of the two that stand for one, the later counts.
OF_RL = {
    "model_config.": "model.",
    "actor_model_config.": "model.",
    "critic_model_config.": "critic.",
    "rl_training_config.actor_optimizer_config.": "optimizer.",
    "rl_training_config.critic_optimizer_config.": "critic_optimizer.",
    "rl_training_config.": "training.",
    **dict.fromkeys(ALGORITHMS, "algorithm."),
}
OFFLINE = {
    "model_config.": "model.",
    "optimizer_config.": "optimizer.",
    "training_config.": "training.",
    "dpo_config.": "algorithm.",
}
MEANS = {
    "token-mean": "token",
    "sequence-mean-token-mean": "sequence",
    "sequence-mean-token-scale": "constant",
    "seq-mean-token-sum": "sequence_sum",
    "sequence-mean-token-sum-norm": "sequence_sum",
}
KL = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
ADVANTAGES = {"grpo": ("group(eps=1e-06)", "group"), "drgrpo": ("group(eps=1e-06)", "none"), "rloo": ("rloo", None)}
# optax's schedule -> ours, its arguments for the peak, the lowest rate (or its share) and the last step.
SCHEDULES = {
    "warmup_cosine_decay_schedule": ("cosine", "peak_value", "end_value", "decay_steps"),
    "cosine_decay_schedule": ("cosine", "init_value", "alpha", "decay_steps"),
    "linear_schedule": ("linear", "init_value", "end_value", "transition_steps"),
    "warmup_constant_schedule": ("constant", "peak_value", "", ""),
    "constant_schedule": ("constant", "value", "", ""),
}


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for a YAML, the overrides or a script of Tunix."""
    trainer = source.trainer or _trainer(source)
    if trainer not in KINDS:
        raise RefusedError(
            f"{source.path}: the trainer is {trainer!r}, which has no equivalent; there are {', '.join(KINDS)}"
        )
    online, script = KINDS[trainer] in ("grpo", "ppo"), source.path.endswith(".py")
    sections = OF_RL if online else OFFLINE
    order = {start: place for place, start in enumerate((*sections, ""))}  # actor_model_config has the last word
    starts = {key: next((start for start in OF_RL | OFFLINE if key.startswith(start)), "") for key in source.settings}
    told = sorted((key for key in starts if starts[key] in order), key=lambda key: order[starts[key]])
    named = renamed(
        {key: source.settings[key] for key in told},
        lambda key: sections.get(starts[key], "") + key.removeprefix(starts[key]),
    )
    theirs = {f"algorithm.{key}": value for key, value in (RULES["grpo"] | RULES[trainer]).items()}
    theirs |= RULES["classes"] | (RULES["scripts"] if script else RULES["base"])
    if any(key.startswith("agentic_") for key in source.settings):  # base_agentic_config.yaml
        theirs |= RULES["agentic"]
    # One key of its own that a file sets, and nothing of base_config.yaml is left of these sections.
    replaced = {key.partition(".")[0].removeprefix("critic_") for key in named}
    replaced |= {"optimizer", "training"} if online and replaced & {"optimizer", "training"} else set()
    for section in {"optimizer", "training"} - replaced if not script else ():
        theirs |= {f"{section}.{key}": value for key, value in RULES[section].items()}
    draft = Draft(source, f"{trainer.upper()}, from FILE of Tunix; what that leaves out is as in Tunix.", theirs, named)
    starts = {ours.rstrip("."): start for start, ours in reversed(sections.items())}
    starts["algorithm"] = {"ppo": "ppo_config.", "preference": "dpo_config."}.get(KINDS[trainer], "grpo_config.")
    for key in theirs:
        section, _, name = key.partition(".")
        draft.names.setdefault(key, starts[section] + name if section in starts else key)
    draft.set("algorithm.name", KINDS[trainer])
    _model(draft)
    group = int(draft.get("algorithm.num_generations") or 1) if KINDS[trainer] == "grpo" else 1
    updates = _batch(draft, online, group)
    _length(draft, options, online, updates)
    if online:
        _data(draft)
        _sampling(draft, script)
        (_ppo if trainer == "ppo" else _grpo)(draft)
        _rewards(draft, trainer)
    else:
        _offline(draft, trainer)
    _rate(draft, "optimizer", updates)
    _saving(draft, updates)
    return draft


def _trainer(source: Source) -> str:
    """Return the trainer that the sections of a YAML tell."""
    sections = {key.partition(".")[0] for key in source.settings}
    mode = str(source.settings.get("training_mode", "")).removeprefix("agentic_")
    if mode or not sections & {"ppo_config", "grpo_config", "agentic_grpo_config", "rl_training_config"}:
        return mode or "sft"
    return "grpo" if sections & {"grpo_config", "agentic_grpo_config"} or "ppo_config" not in sections else "ppo"


def _model(draft: Draft) -> None:
    """Set the model, its tokenizer, its adapters and the mesh."""
    name = str(draft.get("model.model_id") or "")
    if "/" in name:
        draft.set("model.path", name, "model.model_id")
    elif name:
        draft.check(f"{draft.named('model.model_id')} = {name} is a name of Tunix: set model.path to its id on the hub")
    shared.check_model(draft)
    tokenizer = draft.get(key := "tokenizer_config.tokenizer_path")
    if draft.get("tokenizer_config.tokenizer_type") == "huggingface" and tokenizer and "://" not in tokenizer:
        draft.set("model.tokenizer", tokenizer if tokenizer != name else None, key)
    draft.use("tokenizer_config.tokenizer_type", key)
    for key, ours in (("load_dtype", "model.param_dtype"), ("dtype", "model.dtype")):
        if draft.get(f"model.{key}"):
            draft.set(ours, shared.type_name(draft.get(f"model.{key}")), f"model.{key}")
    remat = draft.get("model.remat_config")
    draft.set("model.remat", {None: None, 1: "none"}.get(remat, "block"), "model.remat_config")
    if rank := draft.get("model.lora_config.rank"):
        draft.set("lora.rank", int(rank), "model.lora_config.rank")
        draft.take("lora.alpha", "model.lora_config.alpha")
        pattern = str(draft.get(key := "model.lora_config.module_path"))
        words = [word for word in re.findall(r"\w+", pattern) if "_" in word]
        modules = [module for word in words for module in RULES["modules"].get(word, [word])]
        draft.set("lora.targets", tuple(dict.fromkeys(modules)), key)
        kind = draft.get(key := "model.lora_config.weight_qtype")
        draft.set("model.quantize", {"float8_e4m3fn": "fp8", "fp8": "fp8"}.get(kind, kind), key)
    sizes = _mesh(draft, "model.mesh")
    for axis, size in sizes.items():
        draft.set(f"mesh.{axis}", size, "model.mesh.shape", "model.mesh.axis_names")
    if sizes and "data" not in sizes:
        draft.set("mesh.data", 1 if -1 in sizes.values() else None, "model.mesh.shape")
    keys = ("rollout_model_config.mesh.shape", "rollout_model_config.mesh.axis_names")
    if apart := _mesh(draft, "rollout_model_config.mesh"):  # devices of its own, also where the sizes are the same
        draft.set("rollout.devices", math.prod(apart.values()), *keys)
        draft.set("rollout.mesh", ",".join(f"{axis}={size}" for axis, size in apart.items()), *keys)
    draft.use(*keys)
    draft.set("model.offload", draft.get("offload_to_cpu"), "offload_to_cpu")
    draft.set("seed", draft.get("model.rng_seed"), "model.rng_seed")


def _mesh(draft: Draft, section: str) -> dict[str, int]:
    """Return the sizes of our axes that a section says, `shape: "(2,4)"` and `axis_names: "('fsdp','tp')"`."""
    given = [draft.get(f"{section}.{key}") for key in ("axis_names", "shape")]
    if not all(given):
        return {}
    names, sizes = (ast.literal_eval(one) if isinstance(one, str) else one for one in given)
    for name in names:
        shared.check_known(f"{draft.named(section)}.axis_names", name, RULES["axes"])
    return {RULES["axes"][name]: int(size) for name, size in zip(names, sizes, strict=True) if size != 1}


def _batch(draft: Draft, online: bool, group: int) -> int:
    """Set the rows of a step, of a minibatch and of a micro-batch; return the optimizer updates of a step."""
    prompts = draft.get("batch_size")
    if prompts is None:
        prompts = int(draft.get("training.mini_batch_size") or 1)
        draft.check(f"the file does not say how many prompts a batch has: set batch.prompts, {prompts} is written")
    prompts = int(prompts)
    if not online:
        accumulated, rows = int(draft.get("training.gradient_accumulation_steps") or 1), prompts
        draft.set("batch.prompts", prompts * accumulated, "batch_size", "training.gradient_accumulation_steps")
        each = 2 if draft.values["algorithm.name"] == "preference" else 1
        shared.microbatch_rows(draft, rows * each, rows * accumulated * each, "training.gradient_accumulation_steps")
        return 1
    mini = int(draft.get(key := "training.mini_batch_size") or prompts)
    alone = draft.get("rollout_engine") in (None, "vanilla") and "rollout.devices" not in draft.values
    if mini < prompts and alone and not any(name.startswith("agentic_") for name in draft.source.settings):
        draft.set("batch.prompts", mini, key, "batch_size")
        draft.set("batch.minibatches", 1, key)
        draft.check(
            f"{draft.named(key)} = {mini}: the sampler of Tunix has the weights of the trainer, and samples for each "
            f"update anew. So the {prompts} prompts of a batch are {prompts // mini} steps here, each of one update"
        )
    else:
        draft.set("batch.prompts", prompts, "batch_size")
        draft.set("batch.minibatches", max(prompts // mini, 1), key)
    if rows := draft.get(key := "training.train_micro_batch_size"):
        shared.microbatch_rows(draft, int(rows) * group, mini * group, key)
    if rows := draft.get(key := "training.compute_logps_micro_batch_size"):
        shared.microbatch_rows(draft, int(rows) * group, mini * group, key, ours="batch.logps_microbatch_rows")
    draft.take("algorithm.num_iterations", "algorithm.num_iterations")
    return draft.values["batch.minibatches"] * draft.values["algorithm.num_iterations"]


def _length(draft: Draft, options: Options, online: bool, updates: int) -> None:
    """Set the rows that are read and the steps of the run, which Tunix counts in updates."""
    keys = ("num_batches", "train_fraction", "num_train_epochs")
    epochs, share = float(draft.get(keys[2]) or 1), float(draft.get(keys[1]) or 1.0)
    rows = int(draft.get(keys[0]) or 0) * int(draft.get("batch_size") or 1)
    if online and rows:  # of the first rows as many as the batches have, and of these a share
        draft.set("data.split", f"train[:{int(rows * share)}]", keys[0], keys[1] if draft.sets(keys[1]) else keys[0])
        rows = int(rows * share)
    elif online and share < 1:
        draft.set("data.split", f"train[:{share:.0%}]", keys[1])
    if online and "data.split" in draft.values:
        draft.check("data.split takes the first rows; Tunix shuffles them first, with the seed 42")
    if most := draft.get("training.max_steps"):
        draft.set("total_steps", shared.divided(int(most), updates), "training.max_steps")
    else:
        rows, prompts = rows or int(options.rows * share), draft.values["batch.prompts"]
        whole = int(draft.get("batch_size") or prompts) if online else prompts
        if (part := prompts / (whole * updates)) < 1:  # Tunix makes as many updates as there are such batches
            draft.check(
                f"{draft.named('training.max_steps')} is not set: Tunix makes one update for each batch of {whole} "
                f"prompts, and so ends after a share of {part:.3g} of the rows. So does the run here"
            )
        shared.epochs(draft, shared.full_batches(rows, prompts), epochs * part, keys[2])
    draft.use(*keys)


def _data(draft: Draft) -> None:
    """Set the prompts of reinforcement learning."""
    draft.set("data.overlong", "filter")
    name, kind = str(draft.get("dataset_name") or ""), draft.get("data_source")
    path, _, config = ("openai/gsm8k", "", "main") if name == "gsm8k" else name.partition(":")
    if draft.get(key := "data_module") or kind is None:
        draft.set("data.path", "DATA", key)
        module = f"{draft.named(key)} = {draft.get(key)}" if draft.get(key) else "the script"
        draft.check(f"{module} makes the rows in Python: write them to a file, and set data.path and data.format")
        return
    if kind == "local":
        draft.set("data.path", draft.get("data_directory"), "data_directory", "data_source")
    else:
        draft.set("data.path", path, "dataset_name", "data_source")
        draft.set("data.name", config or None, "dataset_name")
        if path == RULES["base"]["dataset_name"]:
            draft.check(f"dataset_name is {path}, Tunix's default, which has no questions: set data.path")
    if (split := draft.first("train_split", "split")) and "data.split" not in draft.values:
        draft.set("data.split", split, "train_split", "split")
    if draft.get(key := "apply_chat_template_to_dataset"):
        draft.set("data.format", draft.function("questions", RULES["functions"]["questions"]), key)
    else:
        draft.set("data.prompt_key", draft.first("prompt_key", default="prompts"), "prompt_key", key)


def _sampling(draft: Draft, script: bool) -> None:
    """Set the lengths of prompts and completions, and how these are sampled."""
    at = "rollout_config"
    keys = ([] if script else [f"{at}.total_generation_steps"]) + [f"{at}.max_tokens_to_generate"]
    draft.take("rollout.max_completion_length", *keys)
    draft.take("rollout.max_prompt_length", f"{at}.max_prompt_length")
    draft.take("rollout.temperature", f"{at}.temperature")
    draft.set("rollout.top_p", float(draft.get(f"{at}.top_p") or 1.0), f"{at}.top_p")
    draft.set("rollout.top_k", max(int(draft.get(f"{at}.top_k") or 0), 0), f"{at}.top_k")
    draft.set("rollout.stop_token_ids", draft.get(f"{at}.eos_tokens"), f"{at}.eos_tokens")
    draft.take("rollout.staleness", "algorithm.off_policy_steps", default=0)
    draft.set("eval.every", -1)


def _clipping(draft: Draft) -> None:
    """Set the range of the ratio."""
    for key in ("algorithm.epsilon_low", "algorithm.epsilon_high"):
        draft.take(key, key, "algorithm.epsilon")
    if draft.get(key := "algorithm.kl_clamp_value"):
        draft.check(f"{draft.named(key)} = {draft.get(key)} has no equivalent: the KL of a token is not clamped here")


def _grpo(draft: Draft) -> None:
    """Set the advantages, the loss, its mean and the KL term of GRPO, DAPO and Dr. GRPO."""
    at = "algorithm"
    draft.take("rollout.group_size", f"{at}.num_generations")
    shared.check_known(draft.named(key := f"{at}.advantage_estimator"), kind := draft.get(key), ADVANTAGES)
    draft.set("algorithm.advantage", ADVANTAGES[kind][0], key)
    draft.set("algorithm.scale_rewards", ADVANTAGES[kind][1], key)
    shared.check_known(draft.named(key := f"{at}.loss_agg_mode"), mean := draft.get(key), MEANS)
    draft.set("algorithm.aggregation", MEANS[mean], key)
    _clipping(draft)
    beta = float(draft.get(f"{at}.beta") or 0.0)
    draft.set("algorithm.beta", beta, f"{at}.beta")
    if beta:
        shared.check_known(draft.named(key := f"{at}.kl_loss_mode"), kind := draft.get(key), KL)
        draft.set("algorithm.kl", KL[kind], key)
    draft.use(f"{at}.kl_loss_mode")
    draft.set("algorithm.mask_truncated", draft.get(f"{at}.overlong_filter"), f"{at}.overlong_filter")
    name = {"grpo": "ppo_clip", "gspo-token": "gspo_token"}.get(kind := draft.get(key := f"{at}.loss_algo"))
    shared.check_known(draft.named(key), kind, ("grpo", "gspo-token"))
    recorded, correct = draft.get(f"{at}.use_rollout_logps"), draft.get(f"{at}.sampler_is")
    if correct:
        draft.set("algorithm.importance_correction", "token_truncate", f"{at}.sampler_is")
        draft.take("algorithm.importance_max", f"{at}.sampler_is_threshold")
    if correct or not recorded:
        draft.set("algorithm.old_logps", "trainer", f"{at}.use_rollout_logps", f"{at}.sampler_is")
    elif draft.get("rollout_config.return_logprobs"):
        draft.set("algorithm.old_logps", "sampler", f"{at}.use_rollout_logps", "rollout_config.return_logprobs")
    elif draft.values["batch.minibatches"] > 1 and draft.values["algorithm.num_iterations"] == 1:
        name = "reinforce"
        draft.check(
            "rollout_config.return_logprobs is not set: Tunix then compares each minibatch with the policy itself, a "
            "ratio of 1 that is never clipped, which algorithm.loss = 'reinforce' is. To clip, take ppo_clip"
        )
    draft.use(f"{at}.use_rollout_logps", f"{at}.sampler_is_threshold", "rollout_config.return_logprobs")
    set_loss(draft, [(str(name), {"dual_clip": f"{at}.epsilon_c"})], key)


def _ppo(draft: Draft) -> None:
    """Set the advantages, the losses and the KL penalty of PPO, and its critic."""
    at = "algorithm"
    draft.set("rollout.group_size", 1)
    gamma, lam = (float(draft.get(f"{at}.{key}")) for key in ("gamma", "gae_lambda"))
    draft.set("algorithm.advantage", f"ppo(gamma={gamma}, lam={lam})", f"{at}.gamma", f"{at}.gae_lambda")
    draft.set("algorithm.aggregation", "token")
    _clipping(draft)
    set_loss(draft, [("ppo_clip", {"dual_clip": f"{at}.epsilon_c"})])
    draft.take("algorithm.entropy_coef", f"{at}.entropy_coef", default=0.0)
    beta = float(draft.get(f"{at}.beta") or 0.0)
    draft.set("algorithm.beta", beta, f"{at}.beta")
    if beta:
        draft.set("algorithm.kl_in_reward", True, f"{at}.beta")
        shared.check_known(draft.named(key := f"{at}.kl_method"), kind := draft.get(key), KL)
        draft.set("algorithm.kl", KL[kind], key)
    draft.use(f"{at}.kl_method")
    draft.take("critic.epsilon", f"{at}.clip_range_value")
    draft.check(
        "Tunix's PPO adds rewards to an array of integers, which cuts their fractions off (0.7 is 0), and computes its "
        "log-probs at temperature 1, whatever samples were drawn at; here rewards keep their fractions, and log-probs "
        "are at the temperature"
    )
    if (path := draft.get("critic.model_id")) and path != draft.get("model.model_id"):
        draft.set("critic.path", path, "critic.model_id")
    draft.use("critic.model_id")
    if rank := draft.get("critic.lora_config.rank"):
        draft.set("critic.lora_rank", int(rank), "critic.lora_config.rank")
        draft.take("critic.lora_alpha", "critic.lora_config.alpha")
        draft.use("critic.lora_config.module_path")
    _rate(draft, "critic_optimizer" if draft.get("critic_optimizer.opt_type") else "optimizer", 1, "critic")


def _rewards(draft: Draft, trainer: str) -> None:
    """Set the reward functions: those of a script, or all public ones of each file."""
    given, functions = draft.get(key := "reward_functions") or (), []
    for name in [given] if isinstance(given, str) else given:
        file = name if "/" in name or name.endswith(".py") else f"{name.replace('.', '/')}.py"
        if ":" in name:
            functions.append(name)
            continue
        path = file_named(file, draft.source.path)
        known = ["compute_score"] if draft.get("verl_compatible") else RULES["rewards"].get(file)
        known = known or (public_functions(path) if path else ["REWARD"])
        functions += [f"{path or file}:{function}" for function in known]
        if path is None:
            draft.check(
                f"{draft.named(key)}: {file} is not here: copy it, and see that rewards.functions names its functions"
            )
    buffer = draft.get("algorithm.overlong_buffer") if trainer == "dapo" else None
    if isinstance(buffer, dict) and buffer.get("enable"):
        names = ("max_response_length", "overlong_buffer_length", "overlong_buffer_penalty")
        filled = dict(zip(("LONGEST", "BUFFER", "PENALTY"), (buffer[name] for name in names), strict=True))
        functions.append(draft.function("overlong", RULES["functions"]["overlong"], **filled))
    if functions:
        draft.set("rewards.functions", tuple(functions), key, "algorithm.overlong_buffer", "verl_compatible")
    else:
        draft.set("rewards.functions", ("REWARD",))
        draft.check("the file names no reward functions: set rewards.functions")
    draft.use("verl_compatible")


def _offline(draft: Draft, trainer: str) -> None:
    """Set the rows and the loss of supervised fine-tuning and of preferences."""
    if trainer == "sft":
        draft.set("data.max_length", int(draft.get("max_target_length") or 256), "max_target_length")
        draft.set("data.overlong", "filter")
        name = str(draft.get("dataset_name") or "")
        if name == RULES["base"]["dataset_name"]:
            draft.set("data.path", name, "dataset_name")
            draft.set("data.name", "en-fr", "dataset_name")
            draft.set("data.eval_split", "validation", "dataset_name")
        else:
            draft.set("data.path", "DATA", "dataset_name")
            draft.check(f"dataset_name = {name or 'not set'}: write its rows (src and dst) to a file and set data.path")
        draft.set("data.format", draft.function("translations", RULES["functions"]["translations"]), "dataset_name")
        draft.set("algorithm.aggregation", "token")
    else:
        kind = draft.get("algorithm.algorithm")
        shared.check_known(draft.named("algorithm.algorithm"), kind, ("dpo", "orpo"))
        beta = "algorithm.beta" if kind == "dpo" else "algorithm.lambda_orpo"
        draft.take("algorithm.beta", beta)
        options = {"label_smoothing": "algorithm.label_smoothing"} if kind == "dpo" else {}
        if kind == "orpo" and draft.get("algorithm.label_smoothing"):
            draft.check("label_smoothing of ORPO has no equivalent: its odds ratio is not smoothed here")
        if kind == "orpo" and not draft.get("algorithm.enable_prompt_loss_orpo"):
            draft.set("algorithm.loss", "orpo(nll_on_prompt=False)", "algorithm.enable_prompt_loss_orpo")
        else:
            set_loss(draft, [(kind, options)], "algorithm.algorithm")
        keys = [f"algorithm.max_{part}_length" for part in ("prompt", "response")]
        if all(lengths := [draft.get(key) for key in keys]):
            draft.set("data.max_length", sum(map(int, lengths)), *keys)
        draft.set("data.path", "DATA", "dataset_name")
        draft.check(
            "the script makes the pairs in Python: write them to a file with prompt, chosen and rejected, for data.path"
        )
    draft.set("eval.every", int(draft.get("training.eval_every_n_steps") or -1), "training.eval_every_n_steps")


def _rate(draft: Draft, at: str, updates: int, ours: str = "optimizer") -> None:
    """Set an optimizer, of the policy or the `critic`, from the section `at`, whose steps are updates."""
    policy, kind = ours == "optimizer", str(draft.get(key := f"{at}.schedule_type") or "")
    if kind and (rate := draft.get(given := f"{at}.learning_rate")) is not None:  # which the optimizer takes instead
        if draft.sets(key):
            draft.check(
                f"{draft.named(key)} = {kind} has no effect there, as {draft.named(given)} = {rate} is set too: the "
                f"rate is constant. To follow the schedule, leave {draft.named(given)} out"
            )
        kind = ""
    shape, peak, lowest, last = SCHEDULES.get(kind, ("constant", "learning_rate", "", ""))
    if kind and kind not in SCHEDULES:
        draft.check(f"{draft.named(key)} = {kind} has no equivalent; constant is written")
    rate = draft.get(f"{at}.{peak}")
    draft.set(f"{ours}.learning_rate", None if rate is None else float(rate), f"{at}.{peak}")
    if rate is None:
        draft.check(f"the file does not say {draft.named(f'{at}.{peak}')}: set {ours}.learning_rate")
    draft.set(f"{ours}.schedule", shape, key)
    low = float(draft.get(f"{at}.{lowest}") or 0.0) if lowest else 0.0
    share = low if lowest == "alpha" else low / float(rate) if rate else None
    draft.set(f"{ours}.min_lr_ratio", share, f"{at}.{lowest}")
    warm, total = draft.get(f"{at}.warmup_steps") if "warmup" in kind else 0, draft.values["total_steps"] * updates
    warm = 0.1 * total if "warmup" in kind and not warm else warm
    steps = f"{ours}.warmup_steps" if policy else f"{ours}.lr_warmup_steps"
    draft.set(steps, shared.divided(float(warm), updates) if warm else 0, f"{at}.warmup_steps")
    if policy and warm:
        draft.take("optimizer.warmup_init", f"{at}.init_value", default=0.0)
    if policy and last and (end := draft.get(f"{at}.{last}")):
        draft.set("optimizer.schedule_steps", shared.divided(float(end), updates), f"{at}.{last}")
    name = str(draft.get(f"{at}.opt_type") or "adamw")
    takes = RULES["optax"].get(name.lower(), RULES["optax"]["adamw"])  # arguments of the optimizer, with their defaults
    if policy:
        shared.optimizer(draft, name, f"{at}.opt_type")
    for option, value in takes.items():
        option, _, theirs = option.partition("=")  # momentum is b1 here
        if policy or option != "eps":
            key = f"{at}.{theirs or option}"
            draft.take(f"{ours}.{option}", key, default=value)
    if "weight_decay" not in takes:
        draft.set(f"{ours}.weight_decay", 0.0)
    if not policy:
        draft.set("critic.max_grad_norm", float(draft.get(f"{at}.clip_by_global_norm") or 0.0))
        return
    draft.set("optimizer.no_decay", (), f"{at}.weight_decay")
    norm = draft.get(f"{at}.clip_by_global_norm")
    draft.set("optimizer.max_grad_norm", float(norm or 0.0), f"{at}.clip_by_global_norm")
    if said := draft.get(key := f"{at}.max_grad_norm"):
        draft.use(key)
        draft.check(
            f"{draft.named(key)} = {said} clips nothing there: Tunix's command line gives it to no optimizer. 0, no "
            "clipping, is written for optimizer.max_grad_norm; set it to clip"
        )


def _saving(draft: Draft, updates: int) -> None:
    """Set checkpoints and logs."""
    at = "training.checkpointing_options"
    folder = draft.get(key := "training.checkpoint_root_directory")
    if folder or any(name.endswith(".checkpoint_root_directory") for name in draft.source.settings):  # $RANDOM in it
        draft.set("checkpoint.folder" if "://" in str(folder) else "output_dir", folder, key)
        every = draft.get(key := f"{at}.save_interval_steps")
        draft.set("checkpoint.every", shared.divided(float(every), updates) if every else None, key)
        draft.set("checkpoint.keep", int(draft.get(f"{at}.max_to_keep") or 3), f"{at}.max_to_keep")
        if not every:
            draft.check("Tunix saves every 180 seconds unless save_interval_steps says otherwise: set checkpoint.every")
    else:
        draft.set("checkpoint.every", 0, key)
    at = "training.metrics_logging_options"
    if draft.get(f"{at}.log_dir"):
        draft.set("logging.backends", ("console", "jsonl", "tensorboard"), f"{at}.log_dir")
    draft.set("logging.project", draft.get(f"{at}.project_name") or None, f"{at}.project_name")
    draft.set("logging.run_name", draft.get(f"{at}.run_name") or None, f"{at}.run_name")
