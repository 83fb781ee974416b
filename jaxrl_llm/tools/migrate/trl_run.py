"""The rules for TRL that every trainer shares: steps of the run, of checkpoints and logs, and the learning rate."""

import math

from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import Draft, Options, short
from jaxrl_llm.tools.migrate.shared import first_of

PROJECTS = ("project", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "SWANLAB_PROJECT", "TRACKIO_PROJECT")


def _steps_per_epoch(trainer: str, rows: int, batch: int) -> int:
    """0 where the rows are not known. A last batch that is not full is dropped by GRPO and RLOO alone."""
    return max(1, rows // batch if trainer in ("grpo", "rloo") else math.ceil(rows / batch)) if rows else 0


def length(made: Draft, trainer: str, updates: int, options: Options) -> None:
    """Steps of the run, of checkpoints, evaluations and logged completions."""
    epochs, most = made.get("num_train_epochs"), int(made.get("max_steps") or -1)
    batch = made.values["batch.prompts"]
    rows = shared.known_rows(options, made.values.get("data.path"), made.get("dataset_train_split"))
    per_epoch = _steps_per_epoch(trainer, rows, batch)
    if made.get("total_episodes"):
        made.set("total_steps", shared.divided(int(made.get("total_episodes")), batch), "total_episodes")
    elif most > 0:
        made.set("total_steps", shared.divided(most, updates), "max_steps")
    else:
        if not rows:
            shared.rows_missing(made, made.values.get("data.path"), epochs, "num_train_epochs")
        made.set("total_steps", max(1, math.ceil(per_epoch * epochs)), "num_train_epochs")
    total = made.values["total_steps"]
    due = {"save": ("checkpoint.every", 0), "eval": ("eval.every", -1)}
    for what, (ours, never) in due.items():
        key, steps = f"{what}_strategy", f"{what}_steps"
        strategy = first_of(made, "no", "evaluation_strategy", key) if what == "eval" else made.get(key)
        every = made.get(steps) or made.get("logging_steps")
        if strategy == "no":
            made.set(ours, never, key)
        elif strategy == "epoch":
            made.set(ours, per_epoch or total, key)
            if not per_epoch:
                made.check(f"{key} is epoch, and the rows are not known: add --rows=N, or set {ours}")
        else:
            every = every * total if every < 1 else every / updates
            made.set(ours, max(1, math.ceil(every)), steps, key)
    made.use("evaluation_strategy", "eval_steps", "save_steps", "do_eval", "eval_on_start")
    if made.values["eval.every"] >= 0:
        made.set("eval.at_start", bool(made.get("eval_on_start")), "eval_on_start")
    _kept(made)
    _pushed(made)
    if made.get("log_completions"):
        made.set("logging.completions_every", shared.divided(made.get("logging_steps"), updates), "log_completions",
                 "logging_steps")  # fmt: skip
        made.set("logging.completions_shown", made.get("num_completions_to_print"), "num_completions_to_print")
    else:
        made.set("logging.completions_every", 0, "log_completions")
    made.use("logging_steps")
    shared.backends(made, made.get("report_to"), "report_to")
    shared.tracked(made, made.source.given, PROJECTS, ("run_name", "WANDB_NAME"))
    if isinstance(made.get("resume_from_checkpoint"), str):
        made.set("checkpoint.resume", made.get("resume_from_checkpoint"), "resume_from_checkpoint")
    made.use("resume_from_checkpoint")
    made.set("seed", int(made.get("seed")), "seed")
    made.use("data_seed")


def _pushed(made: Draft) -> None:
    """Where the trained model is uploaded to."""
    if not made.get("push_to_hub"):
        return
    name = first_of(made, "", "hub_model_id", "push_to_hub_model_id")
    if "/" in name:
        made.set("export.push_to_hub", name, "push_to_hub", "hub_model_id", "push_to_hub_model_id")
    else:
        made.check("push_to_hub without an owner's name goes to the account of the token: set export.push_to_hub to "
                   "OWNER/NAME")  # fmt: skip
    made.set("export.private", bool(made.get("hub_private_repo")), "hub_private_repo")
    made.use("push_to_hub", "hub_model_id", "push_to_hub_model_id")


def _kept(made: Draft) -> None:
    """Which checkpoints stay."""
    if made.get("save_total_limit") is None and made.values["checkpoint.every"]:
        made.set("checkpoint.keep_every", 1, "save_total_limit")
    metric = made.get("metric_for_best_model") or ("loss" if made.get("load_best_model_at_end") else None)
    if metric:
        keys = ("load_best_model_at_end", "metric_for_best_model")
        name = str(metric).removeprefix("eval_").removeprefix("eval/")
        name = "reward" if name == "loss" and "rollout.group_size" in made.values else name  # samples have no loss
        greater = made.get("greater_is_better")
        made.set("checkpoint.best", f"eval/{name}", *keys)
        greater = not name.endswith("loss") if greater is None else greater
        made.set("checkpoint.best_mode", "max" if greater else "min", "greater_is_better", *keys)
        made.check(
            "the best checkpoint is kept, and hf is the model of the last step: jaxrl_llm.export writes the best"
        )


def learning_rate(made: Draft, updates: int) -> None:
    """Writes the schedule, the warm-up and the optimizer."""
    kind = shared.schedule(made, made.get("lr_scheduler_type"), "lr_scheduler_type")
    extra = made.get("lr_scheduler_kwargs") or {}
    peak = float(made.get("learning_rate"))
    keys = {"min_lr_rate": ("optimizer.min_lr_ratio", 1.0), "min_lr_ratio": ("optimizer.min_lr_ratio", 1.0),
            "min_lr": ("optimizer.min_lr_ratio", 1 / peak), "num_cycles": ("optimizer.cycles", 1.0)}  # fmt: skip
    for name, value in extra.items() if isinstance(extra, dict) else ():
        if name in keys:
            ours, factor = keys[name]
            made.set(ours, float(value) * factor, "lr_scheduler_kwargs")
        elif name == "num_decay_steps":
            made.set("optimizer.decay_steps", shared.divided(value, updates), "lr_scheduler_kwargs")
        else:
            made.check(f"lr_scheduler_kwargs: {name} = {short(value)} has no equivalent")
    made.use("lr_scheduler_kwargs")
    if kind == "wsd" and "optimizer.decay_steps" not in made.values:
        made.set("optimizer.decay_steps", max(1, made.values["total_steps"] // 10), "lr_scheduler_type")
        made.check("the last tenth of the steps is the decay of wsd: set optimizer.decay_steps")
    steps, ratio = made.get("warmup_steps") or 0, made.get("warmup_ratio") or 0.0
    if steps and float(steps) >= 1:
        made.set("optimizer.warmup_steps", min(shared.divided(float(steps), updates), made.values["total_steps"]),
                 "warmup_steps")  # fmt: skip
    elif ratio or steps:
        made.set("optimizer.warmup_ratio", float(ratio or steps), "warmup_ratio", "warmup_steps")
    made.use("warmup_steps", "warmup_ratio", "adafactor")
    shared.optimizer(made, "adafactor" if made.get("adafactor") else made.get("optim"), "optim")
    if "critic.learning_rate" in made.values and kind != "wsd":
        made.set("critic.schedule", kind, "lr_scheduler_type")
        made.set("critic.max_grad_norm", float(made.get("max_grad_norm")), "max_grad_norm")
