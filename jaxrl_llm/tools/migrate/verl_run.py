"""The rules for verl's trainer: steps of the run, of checkpoints and evaluations, logs, and the learning rate."""

from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import OURS, Draft, Options


def trainer(draft: Draft, options: Options) -> None:
    """Set what verl's sections trainer and val_kwargs say."""
    if steps := draft.get("trainer.total_training_steps"):
        draft.set("total_steps", int(steps), "trainer.total_training_steps")
    else:
        rows = shared.known_rows(options, draft.get("data.train_files"), "train")
        most = int(draft.get("data.train_max_samples") or -1)
        rows = min(rows, most) if most > 0 else rows
        per_epoch = shared.full_batches(rows, draft.values["batch.prompts"])
        shared.epochs(draft, per_epoch, float(draft.get("trainer.total_epochs")), "trainer.total_epochs")
    names = ("trainer.project_name", "trainer.experiment_name")
    folder = draft.get("trainer.default_local_dir") or "/".join(
        ("checkpoints", *(str(draft.get(key)) for key in names))
    )
    draft.set("output_dir", folder, "trainer.default_local_dir", *names)
    if "://" in str(url := draft.get("trainer.default_hdfs_dir")):
        draft.set("export.copy_to", url, "trainer.default_hdfs_dir")
        draft.set("export.overwrite", True, "trainer.default_hdfs_dir")
    draft.set("checkpoint.every", max(int(draft.get("trainer.save_freq")), 0), "trainer.save_freq")
    at = ("actor_rollout_ref.actor.checkpoint", "trainer.checkpoint")
    names_of = [f"{section}.{name}" for section in at for name in ("save_contents", "contents")]
    if contents := draft.first(*names_of):
        state = ("state",) if "optimizer" in contents else ()
        hf = ("hf",) if "hf_model" in contents or not state else ()
        draft.set("checkpoint.contents", state + hf, *names_of)
    every, before = int(draft.get("trainer.test_freq")), bool(draft.get("trainer.val_before_train"))
    frequency = every if every > 0 else 0 if before else -1
    draft.set("eval.every", frequency, "trainer.test_freq", "trainer.val_before_train")
    if draft.values["eval.every"] >= 0:
        draft.set("eval.at_start", before, "trainer.val_before_train")
        draft.set("eval.at_end", every > 0, "trainer.test_freq")
        keys = ("data.val_files", "data.val_max_samples")
        path, most = (draft.get(key) for key in keys)
        shared.held_out_rows(draft, options, path, "train", int(most or 0), *keys)
    if draft.get("actor_rollout_ref.rollout.val_kwargs.n"):
        _validation(draft, "actor_rollout_ref.rollout.val_kwargs")
    keys = [f"trainer.{key}" for key in ("max_actor_ckpt_to_keep", "max_ckpt_to_keep", "remove_previous_ckpt_in_save")]
    keep = 1 if draft.get(keys[2]) else draft.get(keys[0]) or draft.get(keys[1])
    draft.set("checkpoint.keep", keep, *keys)
    if not keep and draft.values["checkpoint.every"]:
        draft.set("checkpoint.keep_every", 1, keys[0])
    modes = {"disable": "never", "resume_path": draft.get("trainer.resume_from_path")}
    resume = modes.get(str(draft.get("trainer.resume_mode")))
    draft.set("checkpoint.resume", resume, "trainer.resume_mode", "trainer.resume_from_path")
    loads = [f"{section}.load_contents" for section in at]
    load = draft.first(*loads, default="optimizer")
    if "optimizer" not in load and resume != "never":
        draft.set("checkpoint.load", ("model", "extra"), *loads)
    if resume == "never":
        draft.check(
            "trainer.resume_mode is disable: with checkpoint.resume = 'never' each start deletes the checkpoints that "
            "are in output_dir, where verl leaves them. After a crash start with 'auto', or leave it at that"
        )
    shown = int(draft.get("trainer.log_val_generations") or 0)
    ours = "logging.completions_shown" if shown else "logging.completions_every"
    draft.set(ours, shown, "trainer.log_val_generations")
    shared.backends(draft, draft.get("trainer.logger"), "trainer.logger")
    if len(draft.values["logging.backends"]) > 2:
        shared.tracked(draft, {name: draft.get(name) for name in names}, names[:1], names[1:])
    draft.set("logging.names", "verl")


def _validation(draft: Draft, at: str) -> None:
    """Set how an evaluation of reinforcement learning samples."""
    temperature = float(draft.get(f"{at}.temperature")) if draft.get(f"{at}.do_sample") else 0.0
    draft.set("eval.temperature", temperature, f"{at}.do_sample", f"{at}.temperature")
    draft.set("eval.greedy", False, f"{at}.do_sample")
    # Unset, they are off there, and those of training here.
    top_p, top_k = float(draft.first(f"{at}.top_p", default=1.0)), int(draft.first(f"{at}.top_k", default=-1))
    for name, value, off in (("top_p", top_p, 1.0), ("top_k", max(top_k, 0), 0)):
        if draft.sets(f"{at}.{name}") or draft.values.get(f"rollout.{name}", off) != value:
            draft.set(f"eval.{name}", value, f"{at}.{name}")
    if int(draft.get(f"{at}.n")) > 1:
        draft.set("eval.estimate", "verl", f"{at}.n")
        draft.set("eval.extremes", True, f"{at}.n")


def learning_rate(draft: Draft, at: str) -> None:
    """Set the warm-up and the shape of the learning rate from the section `at`; of Megatron too."""
    shapes = {at: _shape(draft, at, "optimizer.schedule")}
    if draft.values.get("algorithm.name") == "ppo":
        shapes["critic.optim"] = _critic(draft, at, shapes[at])
    end = int(draft.get(f"{at}.lr_decay_steps") or 0)
    if end > 0 and shapes[at] == "inverse_sqrt":
        draft.check(f"{at}.lr_decay_steps = {end}: inverse_sqrt has no end here; there min_lr follows")
    elif end > 0 and shapes[at] != "constant":
        draft.set("optimizer.schedule_steps", end, f"{at}.lr_decay_steps")
    if (share := float(draft.get(f"{at}.lr_decay_ratio") or 1)) < 1:
        if "num_epochs" in draft.values:
            draft.check(
                f"{at}.lr_decay_ratio = {share:g}: set optimizer.schedule_steps to that share of the steps, which only "
                "the run knows; as it is written, the learning rate falls to the end of the run"
            )
        else:
            draft.set("optimizer.schedule_steps", int(share * draft.values["total_steps"]), f"{at}.lr_decay_ratio")
    steps = draft.get(f"{at}.lr_warmup_steps")
    ratios = [f"{at}.lr_warmup_steps_ratio", f"{at}.warmup_steps_ratio"]
    ratio = next((draft.settings[key] for key in ratios if draft.sets(key)), draft.get(ratios[0]))
    if steps is not None and int(steps) >= 0:
        draft.set("optimizer.warmup_steps", int(steps), f"{at}.lr_warmup_steps")
    elif ratio and end > 0:  # of which Megatron takes the share
        draft.set("optimizer.warmup_steps", int(float(ratio) * end), *ratios, f"{at}.lr_decay_steps")
    elif ratio:
        draft.set("optimizer.warmup_ratio", float(ratio), *ratios)
    first = float(draft.get(f"{at}.lr_warmup_init") or 0)
    first = first or float(draft.get(f"{at}.init_lr_ratio") or 0) * float(draft.get(f"{at}.lr"))
    warms = any(draft.values.get(f"optimizer.warmup_{unit}") for unit in ("steps", "ratio"))
    if first and warms:
        draft.set("optimizer.warmup_init", first, f"{at}.lr_warmup_init", f"{at}.init_lr_ratio")
    elif shapes[at] == "inverse_sqrt" and not warms:
        # Megatron's falls from the first step then, and ours, which is transformers', over 10,000 updates.
        draft.set("optimizer.warmup_steps", 1, f"{at}.lr_decay_style")
        draft.set("optimizer.warmup_init", float(draft.get(f"{at}.lr")), f"{at}.lr_decay_style")
    style = draft.get(f"{at}.weight_decay_incr_style")
    if style in ("linear", "cosine"):
        draft.set("optimizer.weight_decay_shape", style, f"{at}.weight_decay_incr_style")
    draft.use(f"{at}.lr_warmup_init", f"{at}.init_lr_ratio", f"{at}.weight_decay_incr_style", f"{at}.lr_decay_ratio")
    lowest = draft.get(f"{at}.min_lr")
    if lowest:
        draft.set("optimizer.min_lr_ratio", float(lowest) / float(draft.get(f"{at}.lr")), f"{at}.min_lr")
    draft.use(f"{at}.lr_warmup_steps", *ratios, f"{at}.min_lr")
    if draft.sets(f"{at}.betas"):
        shared.betas(draft, f"{at}.betas")
    kept = [f"{at}.{name}" for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    types = {shared.type_name(draft.first(key, default="float32")) for key in kept}
    if types == {"bfloat16"}:
        draft.set("optimizer.moment_dtype", "bfloat16", *kept)
    elif len(types) > 1:
        draft.check(f"{kept[0]} and {kept[1]} differ: both moments are in float32, one of optimizer.moment_dtype")
    draft.use(*kept)
    if draft.sets(f"{at}.optimizer"):
        shared.optimizer(draft, draft.get(f"{at}.optimizer"), f"{at}.optimizer")
        draft.use(f"{at}.optimizer_impl")
        if str(draft.get(f"{at}.optimizer")).lower() == "muon":
            draft.check(
                f"{at}.optimizer is muon: updates of matrices have the root mean square 0.2 here, as AdamW's, and "
                f"Nesterov's momentum; in Megatron {at}.muon_extra_scale_factor, 1 unless set, and none. "
                "optimizer.rate_factors gives matrices a rate of their own"
            )
    if (section := next((name for name, shape in shapes.items() if shape == "wsd"), None)) is not None:
        total = draft.values["total_steps"]
        if draft.sets(key := f"{section}.lr_scheduler"):  # of sft_trainer.yaml: the last tenth of what follows warm-up
            share = draft.values.get("optimizer.warmup_ratio", 0.0)
            rest = total - draft.values.get("optimizer.warmup_steps", int(share * total))
            draft.set("optimizer.decay_steps", max(1, rest - int(0.9 * rest)), key)
            draft.set("optimizer.decay_shape", "cosine", key)
        else:
            decay = draft.get(f"{section}.lr_wsd_decay_steps") or max(1, (end or total) // 10)
            draft.set("optimizer.decay_steps", int(decay), f"{section}.lr_wsd_decay_steps")
            style = draft.first(f"{section}.lr_wsd_decay_style", default="exponential")
            style = "1-sqrt" if style == "minus_sqrt" else style
            draft.set("optimizer.decay_shape", style, f"{section}.lr_wsd_decay_style")
    if shapes[at] != "cosine":
        draft.drop("optimizer.cycles")


def _shape(draft: Draft, at: str, ours: str) -> str:
    """Set and return the schedule of the section `at`; constant, verl's own of reinforcement learning, by default."""
    names = ("warmup_style", "lr_scheduler", "lr_decay_style", "lr_scheduler_type")
    usual = "lr_scheduler" if at == "optim" else "lr_scheduler_type"
    key = next((f"{at}.{name}" for name in names if draft.sets(f"{at}.{name}")), f"{at}.{usual}")
    return shared.schedule(draft, draft.first(key, default="constant"), key, ours)


def _critic(draft: Draft, policy: str, policy_shape: str) -> str:
    """Set and return the schedule of the critic, with its lowest rate and its betas: there they are not the policy's.

    `policy` is the section of the policy's optimizer, and `policy_shape` its schedule.
    """
    at = "critic.optim"
    shape = _shape(draft, at, "critic.schedule")
    keys = [f"{at}.{name}" for name in ("lr_warmup_steps", "lr_warmup_steps_ratio")]
    steps, ratio = draft.get(keys[0]), draft.get(keys[1])
    steps = (
        int(steps) if steps is not None and int(steps) >= 0 else int(float(ratio or 0) * draft.values["total_steps"])
    )
    draft.set("critic.lr_warmup_steps", steps or None, *keys)
    for name, peak in (("min_lr_ratio", 1.0), ("min_lr", float(draft.get(f"{at}.lr")))):
        if draft.sets(f"{at}.{name}") or draft.sets(f"{policy}.{name}"):
            draft.set("critic.min_lr_ratio", float(draft.get(f"{at}.{name}") or 0) / peak, f"{at}.{name}")
    if draft.sets(f"{at}.betas"):
        shared.betas(draft, f"{at}.betas", "critic")
    elif draft.sets(f"{policy}.betas"):
        draft.set("critic.b1", OURS["optimizer.b1"].default)
        draft.set("critic.b2", OURS["optimizer.b2"].default)
    shared_here = [] if shape in ("constant", "inverse_sqrt") else ["lr_decay_steps"]
    if shape == "cosine":
        shared_here.append("num_cycles")
    elif shape == policy_shape == "wsd":
        shared_here += ["lr_wsd_decay_steps", "lr_wsd_decay_style"]
    for name in shared_here:
        own, other = draft.get(f"{at}.{name}"), draft.get(f"{policy}.{name}")
        if own != other:
            draft.check(f"{at}.{name} is {own} and the policy's {other}: both schedules have the policy's here")
    return shape
