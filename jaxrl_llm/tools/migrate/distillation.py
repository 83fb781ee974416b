"""The rules for teachers: those of TRL's trainers, the policy itself among them, and verl's section `distillation`."""

import json
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import Draft
from jaxrl_llm.tools.migrate.losses import with_options

D, L = "distillation", "distillation.distillation_loss"


def of_trl(draft: Draft, trainer: str) -> None:
    """Set the teacher of a TRL trainer, `distillation`, `gkd`, `gold` or `iwopd`, and the samples that it rates."""
    path = draft.get("teacher_model_name_or_path")
    if trainer == "iwopd" and draft.get("use_teacher_server"):
        path = None
        draft.check(
            f"the teacher is behind {draft.get('teacher_model_server_url')}: set teacher.path to server(url=..., "
            "model=...), a server of OpenAI's API with prompt_logprobs, as vllm serve is one (docs/distillation.md)"
        )
    elif not isinstance(path, str):
        draft.check("the file names no teacher: set teacher.path")
    draft.set("teacher.path", path if isinstance(path, str) else "TEACHER", "teacher_model_name_or_path")
    if dtype := shared.init_kwargs(draft, "teacher_model_init_kwargs", "teacher.revision"):
        draft.set("teacher.dtype", shared.type_name(dtype), "teacher_model_init_kwargs")
    objective = ""
    if trainer == "iwopd":
        objective = draft.get("distillation_objective")
        shared.check_known("distillation_objective", objective, ("iw_opd", "jsd"))
    if objective == "iw_opd":
        draft.set("teacher.form", "advantage", "distillation_objective")
        draft.take("teacher.position_gamma", "iw_opd_gamma")
        draft.set("algorithm.loss", "reinforce")
    elif trainer == "gold" and draft.get("use_uld_loss"):
        _uld_of_trl(draft)
    else:
        draft.set("teacher.form", "divergence", *(("distillation_objective",) if objective else ()))
        draft.take("teacher.beta", "beta")
    if trainer == "iwopd":
        room = int(draft.get("max_length") or 1024) - draft.values["rollout.max_completion_length"]
        longest = int(draft.get("max_prompt_length") or room)
        draft.set("rollout.max_prompt_length", longest, "max_prompt_length", "max_length")
        draft.set("data.overlong", "truncate_right", "max_prompt_length")
    if objective == "jsd":
        _likeliest(draft)
    if trainer == "gkd":
        draft.set("teacher.temperature", 1.0)  # that of its samples is another
    if trainer in ("gkd", "gold") or objective == "jsd":
        theirs = f"{trainer.upper()}Trainer"
        draft.check(f"{theirs} is experimental in TRL, which draws a step's kind by Python's random numbers")
        if (share := float(draft.get("lmbda"))) < 1:  # of given rows it learns the last message
            draft.set("data.loss_on", "last_turn")
        if not share:
            draft.set("algorithm.name", "sft", "lmbda")
            if trainer == "iwopd" or (trainer == "gold" and not draft.get("use_uld_loss")):
                draft.take("teacher.temperature", "temperature")
            if draft.values["teacher.form"] == "uld":
                draft.check("sft takes the mean over all spans of a batch here, TRL over rows of the mean of a row's")
            draft.drop(*(key for key in draft.values if key.startswith("rollout.")))
            return
        draft.set("teacher.on_policy", share, "lmbda")
    if trainer in ("gkd", "gold"):
        room = int(draft.get("max_length") or 1024) - draft.values["rollout.max_completion_length"]
        longest = "max_new_tokens" if trainer == "gkd" else "max_completion_length"
        draft.set("rollout.max_prompt_length", max(room, 1), "max_length", longest)
    draft.set("rewards.functions", ())
    draft.set("algorithm.advantage", "zero")
    draft.set("algorithm.aggregation", "sequence" if draft.values["teacher.form"] == "uld" else "token")


def served(draft: Draft, url: str, *keys: str, model: str | None = None, **options: Any) -> None:
    """Set the teacher that a server at `url` has, its address without /v1; the `keys` say it."""
    url = url.rstrip("/")
    server = {"url": f"{url}/v1", "model": model or "MODEL", **options}
    draft.set("teacher.path", with_options("server", server), *keys)
    if model is None:
        draft.check(f"the teacher is what {url} serves: write its name for MODEL in teacher.path")


def served_of_trl(draft: Draft, trainer: str) -> None:
    """Set the teacher of a TRL trainer, `serverdistillation` or `asyncdistillation`, which asks servers for it."""
    if trainer == "serverdistillation":
        keys = ("teacher_model_server_url", "loss_top_k", "loss_add_tail", "temperature")
        urls = [draft.get(keys[0])]
        draft.use("reverse_kl_top_1_mode")
    else:
        keys = ("teacher_server_urls", "teacher_top_k", "add_tail_bucket", "teacher_temperature")
        given = draft.get(keys[0])
        urls = list((json.loads(given) if isinstance(given, str) else given).values())
    k, beta = int(draft.get(keys[1])), float(draft.get("beta"))
    served(draft, str(urls[0] or "http://localhost:8000"), keys[0])
    if len(urls) > 1:
        draft.check(
            f"{keys[0]} names {len(urls)} teachers, which rate sampled tokens alone here (teacher.form=advantage, "
            f"teacher.others): the first is written"
        )
    draft.set("teacher.form", "divergence")
    draft.set("teacher.beta", beta, "beta")
    draft.set("teacher.top_k", k, keys[1])
    draft.take("teacher.tail", keys[2])
    if beta:
        draft.check(
            f"beta = {beta:g} is over the teacher's likeliest token and the sampled one there; here the divergence is "
            f"over its {k} likeliest: raise teacher.top_k (up to 128)"
        )
    if float(draft.get(keys[3])) != 1:
        draft.set("rollout.temperature", 1.0)
        draft.check(f"{keys[3]} = {draft.get(keys[3])}: servers give log-probs at temperature 1, which is written")
    draft.use(keys[3])
    draft.set("rewards.functions", ())
    draft.set("algorithm.advantage", "zero")
    draft.set("algorithm.aggregation", "token")


def _uld_of_trl(draft: Draft) -> None:
    """Set the distance from a teacher with another tokenizer, of GOLDTrainer."""
    draft.set("teacher.form", "uld", "use_uld_loss")
    numbers = {
        "uld_distillation_weight": "teacher.coef",
        "uld_crossentropy_weight": "teacher.nll_coef",
        "uld_student_temperature": "teacher.policy_temperature",
        "uld_teacher_temperature": "teacher.temperature",
    }
    for key, ours in numbers.items():
        draft.set(ours, float(draft.get(key)), key)
    draft.set("teacher.uld_align", "spans" if draft.get("use_extended_uld") else "positions", "use_extended_uld")
    ends = "uld_skip_student_eos", "uld_skip_teacher_eos"
    skipped = [bool(draft.get(key)) for key in ends]
    draft.set("teacher.uld_skip_eos", any(skipped), *ends)
    if skipped[0] != skipped[1]:
        draft.check(f"{' and '.join(ends)} differ: here the ends of both are a span, or that of neither")
    draft.use("beta", "uld_token_merge_strategy", "uld_use_hybrid_loss")
    strategy = draft.get("uld_token_merge_strategy")
    shared.check_known("uld_token_merge_strategy", strategy, ("observed", "bayesian"))
    if strategy == "observed":
        draft.check(
            "uld_token_merge_strategy is observed, which reads each distribution a token late there: here it is that "
            "of the span's own last token, as in bayesian"
        )
    if draft.get("uld_use_hybrid_loss"):
        draft.set("teacher.uld_hybrid", True, "uld_use_hybrid_loss")
        draft.take("teacher.beta", "beta")
        for name in ("matched_weight", "unmatched_weight"):
            if (weight := draft.get(f"uld_hybrid_{name}")) is not None:
                draft.set(f"teacher.uld_{name}", float(weight), f"uld_hybrid_{name}")
    draft.check(
        "the teacher reads prompts in its own chat template here, and in TRL the text that the student's makes of them"
    )
    if draft.get("uld_crossentropy_weight") and draft.get("lmbda") and float(draft.get("temperature")) != 1:
        draft.check("the cross-entropy of teacher.nll_coef is at rollout.temperature here, and at 1 in TRL")


def _likeliest(draft: Draft) -> None:
    """Set which tokens a divergence of IWOPDTrainer is over; all of them where its own choice has no equivalent."""
    k, beta, mode = int(draft.get("loss_top_k")), float(draft.get("beta")), draft.get("reverse_kl_top_1_mode")
    if k == 1 and beta > 0 and mode == "sampled":
        draft.check(
            "loss_top_k = 1 with reverse_kl_top_1_mode = sampled compares the sampled token with all others there, "
            "which is not here: the divergence of the whole distributions is written (teacher.top_k = 0)"
        )
    elif k and 0 < beta < 1:
        draft.check(
            f"loss_top_k = {k} with beta = {beta:g} is over the likeliest tokens of both models there, which is "
            "not here: the divergence of the whole distributions is written (teacher.top_k = 0)"
        )
    elif k:
        draft.set("teacher.top_k", k, "loss_top_k")
        draft.set("teacher.top_of", "policy" if beta else "teacher", "beta", "reverse_kl_top_1_mode")
        draft.take("teacher.tail", "loss_add_tail")


def self_of_trl(draft: Draft, updates: int, weight: float) -> None:
    """Set the policy as its own teacher, of TRL's SDPOTrainer or SDFTTrainer, with the weight of its loss."""
    kind, rate = draft.get("teacher_model_kind"), float(draft.get("teacher_update_rate"))
    every = shared.divided(draft.get("teacher_sync_steps"), updates)
    paths = {
        "live": "self",
        "base": "self(rate=0)",
        "ema": f"self(rate={rate:g}{'' if every == 1 else f', every={every}'})",
    }
    shared.check_known("teacher_model_kind", kind, paths)
    draft.set("teacher.path", paths[kind], "teacher_model_kind", "teacher_update_rate", "teacher_sync_steps")
    if kind == "live" and updates > 1:
        draft.check("the live teacher is the policy at the start of a step here, at that of each update in TRL")
    mode, whole = draft.get("distillation_mode"), {"full_logits", "topk_logits"}
    shared.check_known("distillation_mode", mode, ("full_logits", "sampled_token", "topk_logits"))
    draft.set("teacher.form", "divergence" if mode in whole else "advantage", "distillation_mode")
    draft.use("distillation_alpha", "distillation_is_clip")
    if mode in whole:
        draft.take("teacher.beta", "distillation_alpha")
        draft.set("teacher.importance_max", draft.get("distillation_is_clip"), "distillation_is_clip")
    elif updates > 1:
        draft.check("distillation_is_clip: the ratio of later updates is clipped by the policy loss here (epsilon)")
    if mode == "topk_logits":
        draft.set("teacher.top_k", draft.get("distillation_topk"), "distillation_topk", "distillation_mode")
        draft.set("teacher.top_of", "policy", "distillation_mode")
        draft.take("teacher.tail", "distillation_add_tail")
    if weight == 1:
        draft.set("algorithm.advantage", "zero", "distillation_weight")
    else:
        draft.set("teacher.coef", round(weight / (1 - weight), 9), "distillation_weight")
        # The sum of both is as much larger here, and so is the norm that leaves it as it is.
        norm = round(float(draft.get("max_grad_norm")) / (1 - weight), 9)
        draft.set("optimizer.max_grad_norm", norm, "max_grad_norm", "distillation_weight")
        if draft.values["algorithm.aggregation"] != "sequence":
            draft.check("loss_type: both losses are means over rows of their tokens' means here, as TRL's distillation")
    draft.set("algorithm.aggregation", "sequence")
    _context_of_trl(draft)


def _context_of_trl(draft: Draft) -> None:
    """Set what the teacher is shown, and the texts around it."""
    if "teacher_prompt_template" in draft.defaults:
        draft.set("teacher.context", "privileged")
        template = str(draft.get("teacher_prompt_template")).replace("{privileged_context}", "{privileged}")
        draft.set("teacher.template", template, "teacher_prompt_template")
        draft.set("teacher.privileged_template", "{privileged}")
        limit = draft.get("max_prompt_length")
        draft.set("teacher.max_prompt_length", int(limit or 2048), "max_prompt_length")
        draft.check(
            f"teacher.max_prompt_length is {int(limit or 2048)} tokens, with the privileged text: a row that has more "
            "is not taught here, where TRL cuts its beginning off"
        )
        return
    successes, feedback = draft.get("use_successful_as_teacher"), draft.get("include_environment_feedback")
    keys = ("use_successful_as_teacher", "include_environment_feedback", "environment_feedback_only_without_solution")
    if not (successes or feedback):
        raise ConfigError(
            "use_successful_as_teacher and include_environment_feedback are False, so that the teacher is shown nothing"
        )
    joined = "success_or_privileged" if draft.get(keys[2]) else "success_and_privileged"
    context = joined if successes and feedback else "success" if successes else "privileged"
    draft.set("teacher.context", context, *keys)
    limit = "max_reprompt_len"
    if feedback or draft.sets(limit):
        draft.take("teacher.max_prompt_length", limit)
        draft.check(f"{limit}: a row whose prompt for the teacher is longer is not taught here; TRL cuts its beginning")
    texts = {"reprompt_template": "teacher.template"}
    if successes:
        draft.set("teacher.success_threshold", draft.get("success_reward_threshold"), "success_reward_threshold")
        draft.set("teacher.exclude_own", draft.get("dont_reprompt_on_self_success"), "dont_reprompt_on_self_success")
        removes = "remove_thinking_from_demonstration"
        draft.set("teacher.remove_thinking", draft.get(removes), removes)
        texts["solution_template"] = "teacher.solution_template"
    if feedback:
        texts["feedback_template"] = "teacher.privileged_template"
    fields = {
        "{successful_previous_attempt}": "{solution}",
        "{feedback}": "{privileged}",
        "{feedback_raw}": "{privileged}",
    }
    for key, ours in texts.items():
        if draft.sets(key):
            text = str(draft.get(key))
            for theirs, own in fields.items():
                text = text.replace(theirs, own)
            draft.set(ours, text, key)


def without_evaluation(draft: Draft) -> None:
    """Switch evaluations off where samples have no reward that could grade them."""
    if draft.values.get("rewards.functions") != ():
        return
    if draft.values["eval.every"] >= 0:
        draft.check(
            "samples without rewards cannot be graded, so there is no evaluation (eval.every=-1): to have one, name "
            "rewards.functions and set algorithm.advantage to zero, with which they are not learned from"
        )
    draft.set("eval.every", -1, "eval_strategy", "eval_steps")
    draft.drop("eval.at_start", "eval.start", "eval.samples")


def of_verl(draft: Draft) -> None:
    """Set the teachers of verl's section `distillation`, and take back what its loss does without."""
    prefix = f"{D}.teacher_models."
    found = [key.removeprefix(prefix).partition(".")[0] for key in draft.settings if key.startswith(prefix)]
    names = [name for name in dict.fromkeys(found) if draft.get(f"{prefix}{name}.model_path")]
    if len(names) > 1 and "teacher_model" in names:
        names.remove("teacher_model")
        draft.check(f"{prefix}teacher_model is left out, as verl does where other teachers are named")
    if not names:
        draft.check(f"{D} names no teacher: set teacher.path")
    paths = [str(draft.get(f"{prefix}{name}.model_path")) for name in names] or ["TEACHER"]
    draft.set("teacher.path", paths[0], f"{D}.enabled", *(f"{prefix}{name}.model_path" for name in names[:1]))
    draft.use(*(f"{prefix}{name}.key" for name in names))
    _loss(draft)
    if len(names) > 1 and draft.values["teacher.form"] == "divergence":
        draft.check(f"several teachers rate sampled tokens alone here (teacher.form=advantage): {paths[0]} is written")
    elif len(names) > 1:
        others = tuple(f"{draft.get(f'{prefix}{name}.key')}={path}" for name, path in zip(names, paths, strict=True))
        keys = [f"{prefix}{name}.{last}" for name in names[1:] for last in ("model_path", "key")]
        draft.set("teacher.others", others[1:], *keys)
        draft.set("teacher.column", draft.first(f"{D}.teacher_key", default="data_source"), f"{D}.teacher_key")
        draft.check("teacher.path rates the rows of all keys that teacher.others does not name; verl refuses these")
    if (limit := draft.get(f"{L}.loss_max_clamp")) is not None:
        draft.set("teacher.limit", float(limit), f"{L}.loss_max_clamp")
    if (lowest := draft.get(f"{L}.log_prob_min_clamp")) is not None and "teacher.top_k" in draft.values:
        draft.set("teacher.least_logp", float(lowest), f"{L}.log_prob_min_clamp")


def _loss(draft: Draft) -> None:
    """Set the form of the teacher's term, and whether rewards are learned from beside it."""
    mode = draft.first(f"{L}.loss_mode", default="k3")
    keys = (f"{L}.loss_mode", f"{L}.use_policy_gradient")
    whole = {"forward_kl_topk": 0.0, "k3": 0.0, "low_var_kl": 0.0, "k2": 1.0, "mse": 1.0}
    rewarded = draft.first(f"{L}.use_task_rewards", default=True)
    if draft.get(f"{L}.use_policy_gradient"):
        draft.set("teacher.form", "advantage", *keys)
        if mode not in ("k1", "kl"):
            draft.check(f"{L}.loss_mode is {mode}: advantages take the difference of the log-probs here, verl's k1")
        if rewarded:
            draft.check(
                "verl adds a clipped loss of the teacher's advantages to that of the rewards'; here one loss has the "
                "sum of both, which is the same where no ratio is clipped"
            )
    elif mode not in whole:
        raise ConfigError(
            f"{L}.loss_mode is {mode!r}, which has no equivalent without {L}.use_policy_gradient; there are "
            f"{', '.join(whole)}"
        )
    else:
        draft.set("teacher.form", "divergence", *keys)
        draft.set("teacher.beta", whole[mode], f"{L}.loss_mode")
        if mode == "forward_kl_topk":
            draft.take("teacher.top_k", f"{L}.topk", default=32)
        else:
            kind = "KL(policy || teacher)" if whole[mode] else "KL(teacher || policy)"
            draft.check(
                f"{L}.loss_mode is {mode}, whose gradient on samples is an estimate of that of {kind}; here it is that "
                "of the whole distributions (teacher.form=divergence)"
            )
    if rewarded:
        draft.take("teacher.coef", f"{L}.distillation_loss_coef", default=1.0)
        return
    draft.set("algorithm.advantage", "zero", f"{L}.use_task_rewards")
    unread = ("name", "beta", "kl", "kl_in_reward", "reward_beta", "reward_kl", "kl_controller", "entropy_coef")
    draft.drop(*(f"algorithm.{key}" for key in (*unread, "kl_target", "kl_horizon", "dynamic_sampling")))
    draft.drop(*[key for key in draft.values if key.startswith("critic.")])
