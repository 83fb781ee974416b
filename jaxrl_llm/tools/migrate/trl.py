"""The rules for TRL: its keys that make one of ours together, and its trainers."""

import math
from collections.abc import Callable

from jaxrl_llm.config.resolve import closest
from jaxrl_llm.tools.migrate import distillation, shared, trl_offline, trl_online, trl_run, trl_settings
from jaxrl_llm.tools.migrate.draft import Draft, Options, RefusedError, Source
from jaxrl_llm.tools.migrate.table import defaults
from jaxrl_llm.tools.migrate.trl_settings import NAMES

VERSIONS = ("1.16", "0.16")  # newest first
BALANCED = ("sft", "dpo", "kto", "grpo", "rloo", "asyncgrpo")  # by the coefficient in the model's config.json


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for a TRL script, command line or file of arguments."""
    trainer = source.trainer
    if not trainer:
        fitting = [name for name, keys in NAMES["telling"].items() if any(key in source.settings for key in keys)]
        if len(fitting) != 1:
            raise RefusedError(
                f"{source.path} does not say which trainer of TRL it is for; add --trainer, one of {', '.join(RULES)}"
            )
        trainer = fitting[0]
    if trainer not in RULES:
        raise RefusedError(
            f"{source.path}: the trainer is {trainer!r}, but known are {', '.join(RULES)}; the closest is "
            f"{closest(trainer, RULES)}: set --trainer"
        )
    version = options.version or VERSIONS[0]
    if version not in VERSIONS:
        raise RefusedError(f"--version is {version!r}, but TRL's are {', '.join(VERSIONS)}")
    if version == "0.16" and trainer != "grpo":
        raise RefusedError(f"--version is 0.16, whose defaults are known for grpo, and the trainer is {trainer}")
    of = "1.10, which still has it" if trainer == "ppo" else version
    title = f"{trainer.upper()}, from FILE of TRL; what that leaves out is as in TRL {of}."
    theirs = defaults("trl", "grpo_0.16" if version == "0.16" else trainer)
    named = {NAMES["aliases"].get(key, key): (key, value) for key, value in source.settings.items()}
    return apply(Draft(source, title, theirs, named), trainer, options)


def apply(draft: Draft, trainer: str, options: Options) -> Draft:
    """Return the draft with everything that TRL's keys say, for one of its trainers."""
    draft.set_direct("trl")
    if draft.values.get("data.packing") and trainer != "sft":
        draft.drop("data.packing")
        draft.used.discard(draft.named("packing"))
        draft.check(
            f"{draft.named('packing')} is for sft here: the rows of other algorithms are packed by batch.packing, "
            "which is auto"
        )
    if draft.get("generation_kwargs") and "rollout.max_completion_length" in draft.values:
        trl_settings.generation(draft)
    trl_settings.model(draft)
    trl_settings.data(draft, trainer)
    launched = NAMES["processes"].get(str(draft.get("accelerate_config")), 0)
    devices = options.devices or int(draft.get("num_processes") or launched)
    if devices:
        draft.use("num_processes", "num_machines", "accelerate_config")
    else:
        draft.check("one device is assumed: TRL counts batches per device, so add --devices=N if there were more")
    if draft.source.library == "trl":
        if draft.sets(key := "max_grad_norm") and draft.get(key) is None:
            draft.set("optimizer.max_grad_norm", 0.0, key)
        if trainer in BALANCED and options.version != "0.16" and not draft.sets(key := "router_aux_loss_coef"):
            draft.set_none("model.router_aux_loss_coef", key)
    updates = (RULES | FORMER)[trainer](draft, trainer, devices or 1)
    trl_run.length(draft, trainer, updates, options)
    if draft.sets("BEMACallback"):
        _average(draft, updates)
    distillation.without_evaluation(draft)
    trl_run.learning_rate(draft, updates)
    return draft


def _average(draft: Draft, updates: int) -> None:
    """Set the moving average of the policy, and a reference that follows it; both count optimizer updates there."""

    def of(name: str, default: float) -> float:
        return draft.first(f"BEMACallback.{name}", default=default)

    every, start = shared.divided(of("update_freq", 400), updates), math.ceil(of("update_after", 0) / updates)
    reason, total = "", draft.values["total_steps"]
    if draft.values.get("model.quantize"):
        reason = "adapters on quantised matrices are not averaged here"
    elif "num_epochs" not in draft.values and start + every > total:
        reason = f"its first update would be after step {start + every} of {total}"
    if reason:
        draft.check(f"BEMACallback is left out: {reason} (average.every)")
        draft.drop(*(key for key in draft.values if key.startswith("average.")))
        return
    draft.set("average.every", every, "BEMACallback", "BEMACallback.update_freq")
    draft.set("average.start", start, "BEMACallback.update_after")
    draft.set("average.multiplier", of("multiplier", 1.0) * updates, "BEMACallback.multiplier")
    if draft.values.get("lora.rank"):
        draft.check("BEMACallback averages adapters there; here the model with the adapters merged (average.every)")
    if not of("update_ref_model", False):
        return
    steps, after = (of(f"ref_model_update_{name}", default) for name, default in (("freq", 400), ("after", 0)))
    keys = ("BEMACallback.update_ref_model", "BEMACallback.ref_model_update_freq")
    draft.set("algorithm.ref_sync_to", "average", keys[0])
    draft.set("algorithm.ref_sync_steps", shared.divided(steps, updates), *keys)
    draft.set("algorithm.ref_sync_after", math.ceil(after / updates), "BEMACallback.ref_model_update_after")
    draft.set("algorithm.ref_mixup_alpha", 1.0, keys[0])
    if draft.values.get("lora.rank"):
        draft.set("lora.reference", "copy")


RULES: dict[str, Callable[[Draft, str, int], int]] = {
    "grpo": trl_online.grpo,
    "gmpo": trl_online.gmpo,
    "asyncgrpo": trl_online.asyncgrpo,
    "rloo": trl_online.rloo,
    "a2po": trl_online.a2po,
    "onlinedpo": trl_online.onlinedpo,
    "ppo": trl_online.ppo,
    **dict.fromkeys(("sft", "dpo", "kto", "orpo", "cpo", "tpo", "reward", "prm"), trl_offline.offline),
    **dict.fromkeys(trl_online.TAUGHT, trl_online.distil),
    "sdpo": trl_online.sdpo,
    "sdft": trl_online.sdft,
}
FORMER = {"ppo_0.11": trl_online.former_ppo}  # trainers that other libraries build on, of which TRL has newer ones
