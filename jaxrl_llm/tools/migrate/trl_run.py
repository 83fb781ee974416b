"""The rules for TRL that every trainer shares: steps of the run, of checkpoints and logs, and the learning rate."""

import math
from pathlib import Path

from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import Draft, Options, short
from jaxrl_llm.tools.migrate.losses import with_options

# Options of transformers' schedules that are not ours where they are not set.
TRANSFORMERS = {
    "cosine_with_restarts": {"num_cycles": 1},
    "polynomial": {"lr_end": 1e-7},
    "wsd": {"decay_type": "cosine"},
}
UNWARMED = ("constant", "reduce_lr_on_plateau", "greedy")  # of transformers: without a warm-up, whatever is set
# Of an epoch a last batch that is not full.
DROPPING = ("ppo_0.11", "grpo", "gmpo", "rloo", "distillation", "serverdistillation", "gold", "iwopd", "sdpo", "sdft")
COUNTING = ("ppo", "asyncgrpo")  # prompts, in batches that may reach into the next epoch
PROJECTS = ("project", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "SWANLAB_PROJECT", "TRACKIO_PROJECT")


def length(draft: Draft, trainer: str, updates: int, options: Options) -> None:
    """Set the steps of the run, of checkpoints, evaluations and logged completions; `updates` are those of a step."""
    epochs, most = draft.get("num_train_epochs"), int(draft.get("max_steps") or -1)
    batch, sources = draft.values["batch.prompts"], draft.values.get("data.sources", ())
    counts = [
        shared.known_rows(options, one.get("data_files") or one["path"], one.get("split") or "train")
        for one in sources or ({"path": draft.values.get("data.path"), "split": draft.get("dataset_train_split")},)
    ]
    rows = options.rows or (sum(counts) if all(counts) else 0)
    weights = [one.get("weight") for one in sources]
    if rows and not options.rows and weights and all(weights):  # what keeps the shares and takes no row twice
        least = min(count / weight for count, weight in zip(counts, weights, strict=True))
        rows = sum(round(weight * least) for weight in weights)
    size, held = draft.get("test_split_size") if sources else None, draft.get("train_test_split")
    evaluated = shared.hold_out(draft, size, "test_split_size", sources, rows) if size else not isinstance(held, str)
    if draft.values.get("data.packing"):  # of packed rows, whose number follows from the tokens
        rows = 0
    if rows and (share := draft.values.get("eval.fraction")):
        rows = max(rows - max(round(rows * share), 1), 1)
    unknown, way_out = shared.unknown_rows(draft)
    per_epoch = max(1, rows // batch if trainer in DROPPING else math.ceil(rows / batch)) if rows else 0
    if rows and draft.get("dataloader_drop_last") and trainer not in (*DROPPING, *COUNTING):
        passes = int(draft.get("gradient_accumulation_steps"))  # of the model in an update; each has rows of its own
        per_epoch = max(1, math.ceil(rows * passes // batch / passes))
        draft.use("dataloader_drop_last")
    episodes = draft.get("total_episodes") or (int(float(epochs) * rows) if trainer in COUNTING else 0)
    if most > 0 and trainer != "ppo":  # which does not read it
        draft.set("total_steps", shared.divided(most, updates), "max_steps")
    elif episodes:
        draft.set("total_steps", shared.divided(int(episodes), batch), "total_episodes", "num_train_epochs")
    else:
        shared.epochs(draft, per_epoch, float(epochs), "num_train_epochs")
        if not per_epoch and any(isinstance(one, dict) and one.get("fraction") for one in draft.get("datasets") or ()):
            draft.check(
                "an epoch there has the rows that fraction leaves of the data sets, but num_epochs counts all of them: "
                f"set total_steps{way_out and f'{way_out} of those that it leaves'}"
            )
    total = draft.values["total_steps"]
    for name, ours, never in (("save", "checkpoint.every", 0), ("eval", "eval.every", -1)):
        key, steps = f"{name}_strategy", f"{name}_steps"
        strategy = draft.first("evaluation_strategy", key, default="no") if name == "eval" else draft.get(key)
        every = draft.get(steps) or draft.get("logging_steps")
        if strategy == "no":
            draft.set(ours, never, key)
        elif strategy == "epoch":
            draft.set(ours, per_epoch or total, key)
            if not per_epoch:
                draft.check(f"{key} is epoch, and {unknown}: set {ours}{way_out}")
        else:
            every = every * total if every < 1 else every / updates
            draft.set(ours, max(1, math.ceil(every)), steps, key)
    if draft.get("save_strategy") == "best":
        draft.set("checkpoint.every", max(draft.values["eval.every"], 0), "save_strategy")
        draft.check("save_strategy is best: each evaluation is saved here, of which the best and the newest stay")
    if (delay := float(draft.get("eval_delay") or 0)) and draft.values["eval.every"] > 0:
        by_epoch = draft.first("evaluation_strategy", "eval_strategy", default="no") == "epoch"
        draft.set("eval.start", math.ceil(delay * (per_epoch or total) if by_epoch else delay / updates), "eval_delay")
    draft.use("eval_delay", "evaluation_strategy", "eval_steps", "save_steps", "do_eval", "eval_on_start")
    if draft.values["eval.every"] >= 0:
        draft.take("eval.at_start", "eval_on_start")
    _saved(draft)
    if not evaluated:
        draft.set("eval.every", -1, "train_test_split", "test_split_size")
        draft.drop("eval.at_start", "eval.start", "checkpoint.best", "checkpoint.best_mode", "export.best")
    _callbacks(draft)
    if isinstance(held, str):
        draft.check(
            f"{held} holds out rows that are no share here, so all rows are trained on and none evaluated (eval.every "
            "= -1): set eval.fraction, and eval.every"
        )
    if draft.get("log_completions"):
        steps = "log_completions_steps" if trainer in ("iwopd", "gold") else "logging_steps"
        every = shared.divided(draft.get(steps), updates)
        draft.set("logging.completions_every", every, "log_completions", steps)
        draft.set("logging.completions_shown", draft.get("num_completions_to_print"), "num_completions_to_print")
    else:
        draft.set("logging.completions_every", 0, "log_completions")
    shared.backends(draft, draft.get("report_to"), "report_to")
    shared.tracked(draft, draft.settings, PROJECTS, ("run_name", "WANDB_NAME"))
    if isinstance(draft.get("resume_from_checkpoint"), str):
        draft.set("checkpoint.resume", draft.get("resume_from_checkpoint"), "resume_from_checkpoint")
    draft.take("seed", "seed")
    draft.use("resume_from_checkpoint", "logging_steps", "data_seed")


def _saved(draft: Draft) -> None:
    """Set which checkpoints stay, and where the trained model is uploaded to."""
    limited = draft.get("save_total_limit") is not None or draft.get("save_strategy") == "best"
    if not limited and draft.values["checkpoint.every"]:
        draft.set("checkpoint.keep_every", 1, "save_total_limit")
    metric = draft.get("metric_for_best_model") or ("loss" if draft.get("load_best_model_at_end") else None)
    if metric:
        keys = ("load_best_model_at_end", "metric_for_best_model")
        name = str(metric).removeprefix("eval_").removeprefix("eval/")
        for known in (one["set"] for one in draft.values.get("eval.sets", ())):
            name = f"{known}/{name[len(known) + 1 :]}" if name.startswith(f"{known}_") else name
        name = "reward" if name == "loss" and "rollout.group_size" in draft.values else name  # samples have no loss
        greater = draft.first("greater_is_better", default=not name.endswith("loss"))
        draft.set("checkpoint.best", f"eval/{name}", *keys)
        draft.set("checkpoint.best_mode", "max" if greater else "min", "greater_is_better", *keys)
        draft.take("export.best", "load_best_model_at_end")
    if draft.get("save_only_model"):
        draft.set("checkpoint.contents", ("hf",), "save_only_model")
        if "checkpoint.best" in draft.values:
            draft.set("checkpoint.contents", ("state", "hf"), "save_only_model")
    draft.use("save_only_model", "hub_strategy")
    tags = draft.get("tags")
    draft.set("export.tags", (tags,) if isinstance(tags, str) else tags and tuple(tags), "tags")
    title = draft.get("model_name")
    draft.set("export.title", title if isinstance(title, str) else None, "model_name")
    if draft.get("push_to_hub"):
        keys = ("push_to_hub", "hub_model_id", "push_to_hub_model_id")
        name = draft.first(*keys[1:], default=Path(draft.values.get("output_dir", "")).name)
        if name:
            draft.set("export.push_to_hub", name, *keys)
            if (strategy := draft.get("hub_strategy")) not in (None, "end"):
                contents = draft.values.get("checkpoint.contents", ("state",))
                draft.set("export.strategy", "every_save", "hub_strategy")
                draft.set("export.overwrite", True, "hub_strategy")
                draft.set("checkpoint.contents", tuple(dict.fromkeys((*contents, "hf"))), "hub_strategy")
                if strategy != "every_save":
                    draft.check(f"hub_strategy is {strategy}: each checkpoint's model is pushed, its optimizer not")
        else:
            draft.check("push_to_hub: neither hub_model_id nor output_dir names a repository: set export.push_to_hub")
        draft.take("export.private", "hub_private_repo")
        draft.use(*keys)


def _callbacks(draft: Draft) -> None:
    """Set the script's own callbacks, and early stopping by the metric of the best checkpoint."""
    given, stopping = draft.get("callbacks") or (), "early_stopping_patience"
    named: list[str] = [given] if isinstance(given, str) else list(given)
    if draft.sets(stopping):
        metric, mode = draft.values.get("checkpoint.best", "eval/loss"), draft.values.get("checkpoint.best_mode", "min")
        options = {"metric": metric, "mode": mode, "patience": int(draft.get(stopping))}
        least = draft.get("early_stopping_threshold")
        named.append(with_options("early_stopping", options | ({"min_delta": float(least)} if least else {})))
        if draft.values["eval.every"] <= 0:
            draft.check(f"{stopping}: nothing is evaluated while it trains; set eval.every, and callbacks to {named!r}")
            named.pop()
    draft.set("callbacks", tuple(named) or None, "callbacks", stopping, "early_stopping_threshold")


def learning_rate(draft: Draft, updates: int) -> None:
    """Set the schedule, the warm-up and the optimizer; `updates` are those of a step."""
    scheduler = str(draft.get("lr_scheduler_type"))
    kind = shared.schedule(draft, scheduler, "lr_scheduler_type")
    if scheduler == "cosine_warmup_with_min_lr":
        draft.check(f"{draft.named('lr_scheduler_type')} = {scheduler!r} is one update ahead of cosine throughout")
    given, peak = draft.get("lr_scheduler_kwargs") or {}, float(draft.get("learning_rate"))
    if not isinstance(given, dict):
        draft.check(
            f"lr_scheduler_kwargs = {short(given)} is no dictionary that the file spells out: set optimizer.* by it"
        )
        given = {}
    keys = {
        "min_lr_rate": ("optimizer.min_lr_ratio", 1.0),
        "min_lr_ratio": ("optimizer.min_lr_ratio", 1.0),
        "min_lr": ("optimizer.min_lr_ratio", 1 / peak),
        "lr_end": ("optimizer.min_lr_ratio", 1 / peak),
        "num_cycles": ("optimizer.cycles", 1.0),
        "power": ("optimizer.power", 1.0),
    }
    more = TRANSFORMERS.get(kind, {}) | given
    for name, value in more.items():
        if name == "num_cycles" and kind == "wsd":  # which decays by half a wave here
            if value != 0.5:
                draft.check(f"lr_scheduler_kwargs: {name} = {short(value)} has no equivalent in wsd")
        elif name in keys:
            ours, factor = keys[name]
            draft.set(ours, float(value) * factor, "lr_scheduler_kwargs")
        elif name == "num_decay_steps":
            draft.set("optimizer.decay_steps", shared.divided(value, updates), "lr_scheduler_kwargs")
        elif name == "num_stable_steps":
            draft.set("optimizer.stable_steps", shared.divided(value, updates) if value else 0, "lr_scheduler_kwargs")
        elif name == "decay_type":
            draft.set("optimizer.decay_shape", value, "lr_scheduler_kwargs")
        elif (name, value) != ("warmup_type", "linear"):
            draft.check(f"lr_scheduler_kwargs: {name} = {short(value)} has no equivalent")
    if kind == "wsd" and "optimizer.decay_steps" not in draft.values:
        draft.set("optimizer.decay_steps", max(1, draft.values["total_steps"] // 10), "lr_scheduler_type")
        draft.check("the last tenth of the steps is the decay of wsd: set optimizer.decay_steps")
    steps, ratio = float(draft.get("warmup_steps") or 0), draft.get("warmup_ratio") or 0.0
    # This one rises by itself, under any schedule, in a number of steps and not in a share of them.
    rises = steps >= 1 and "schedule_free_adamw" in str(draft.get("optim"))
    if scheduler in UNWARMED and not rises:
        steps = ratio = 0
    elif steps >= 1:
        warmup, total = shared.divided(steps, updates), draft.values["total_steps"]
        if "num_epochs" not in draft.values and warmup > total:
            share, lowest = total * updates / steps, more.get("min_lr_ratio", 0.0) if kind == "wsd" else 0.0
            reached = peak * (lowest + (1 - lowest) * share)
            for ours in {"optimizer.learning_rate", "critic.learning_rate"} & draft.values.keys():
                draft.set(ours, reached, "learning_rate", "warmup_steps")
            draft.check(
                f"{draft.named('warmup_steps')} = {steps:g} is longer than the run, and a warm-up here is not: "
                f"optimizer.learning_rate is {reached:.3g}, which the rate has reached at the end of the run there"
            )
            warmup = total
        draft.set("optimizer.warmup_steps", warmup, "warmup_steps")
    elif ratio or steps:  # warmup_steps below 1 is a ratio too
        draft.set("optimizer.warmup_ratio", float(ratio or steps), "warmup_ratio", "warmup_steps")
    if kind == "wsd" and (lowest := draft.values.get("optimizer.min_lr_ratio")) and (steps or ratio):
        draft.set("optimizer.warmup_init", lowest * peak, "lr_scheduler_kwargs")  # as there
    draft.use("lr_scheduler_kwargs", "adafactor")
    if scheduler not in UNWARMED:
        draft.use("warmup_steps", "warmup_ratio")
        if rises:
            draft.check(
                f"{draft.named('optim')} = schedule_free_adamw warms up there by itself and by the schedule: in those "
                "steps the rate is the square of the share that it is here"
            )
    own = draft.get("adafactor")
    shared.optimizer(draft, "adafactor" if own else draft.get("optim"), "adafactor" if own else "optim")
    if draft.values["optimizer.name"] == "ademamix":
        shared.slow_moment(draft, "optim_args", updates)
    elif draft.values["optimizer.name"] == "galore_adamw":
        shared.projection(draft, "optim_args", updates)
    elif arguments := draft.get("optim_args"):
        draft.check(f"optim_args = {short(arguments)}: arguments of an optimizer of torch are not read")
    if "critic.learning_rate" in draft.values:
        draft.set("critic.schedule", kind, "lr_scheduler_type")
        draft.set("critic.max_grad_norm", draft.values["optimizer.max_grad_norm"], "max_grad_norm")
        share = draft.values.get("optimizer.warmup_ratio", 0.0)
        warmup = draft.values.get("optimizer.warmup_steps") or math.ceil(share * draft.values["total_steps"])
        draft.set("critic.lr_warmup_steps", warmup or None, "warmup_steps", "warmup_ratio")
