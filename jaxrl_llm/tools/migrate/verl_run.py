"""The rules for verl's trainer: steps of the run, of checkpoints and evaluations, how these sample, and the logs."""

from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import Draft, Options
from jaxrl_llm.tools.migrate.verl_keys import R


def trainer(made: Draft, options: Options) -> None:
    """Writes what verl's sections trainer and val_kwargs say."""
    steps = made.get("trainer.total_training_steps")
    if not steps:
        files = made.get("data.train_files")
        rows = shared.known_rows(options, files, "train")
        if not rows:
            shared.rows_missing(made, files, float(made.get("trainer.total_epochs")), "trainer.total_epochs")
        steps = max(1, rows // made.values["batch.prompts"]) * int(made.get("trainer.total_epochs"))
    made.set("total_steps", int(steps), "trainer.total_training_steps", "trainer.total_epochs")
    folder = made.get("trainer.default_local_dir") or (
        f"checkpoints/{made.get('trainer.project_name')}/{made.get('trainer.experiment_name')}")  # fmt: skip
    made.set("output_dir", folder, "trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")
    made.set("checkpoint.every", max(int(made.get("trainer.save_freq")), 0), "trainer.save_freq")
    every, before = int(made.get("trainer.test_freq")), bool(made.get("trainer.val_before_train"))
    made.set("eval.every", every if every > 0 else 0 if before else -1, "trainer.test_freq", "trainer.val_before_train")
    if made.values["eval.every"] >= 0:
        made.set("eval.at_start", before, "trainer.val_before_train")
        made.set("eval.at_end", every > 0, "trainer.test_freq")
    if made.get(f"{R}.val_kwargs.n"):
        _validation(made)
    keep = made.get("trainer.max_actor_ckpt_to_keep") or made.get("trainer.max_ckpt_to_keep")
    keep = 1 if made.get("trainer.remove_previous_ckpt_in_save") else keep
    made.set("checkpoint.keep", keep, "trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep",
             "trainer.remove_previous_ckpt_in_save")  # fmt: skip
    if not keep and made.values["checkpoint.every"]:
        made.set("checkpoint.keep_every", 1, "trainer.max_actor_ckpt_to_keep")
    mode = made.get("trainer.resume_mode")
    resume = {"disable": "never", "resume_path": made.get("trainer.resume_from_path")}.get(str(mode))
    made.set("checkpoint.resume", resume, "trainer.resume_mode", "trainer.resume_from_path")
    shown = int(made.get("trainer.log_val_generations") or 0)
    made.set(
        "logging.completions_every" if not shown else "logging.completions_shown", shown, "trainer.log_val_generations"
    )
    shared.backends(made, made.get("trainer.logger"), "trainer.logger")
    names = ("trainer.project_name", "trainer.experiment_name")
    if len(made.values["logging.backends"]) > 2:
        shared.tracked(made, {name: made.get(name) for name in names}, names[:1], names[1:])
    made.set("logging.names", "verl")


def _validation(made: Draft) -> None:
    """How an evaluation of reinforcement learning samples."""
    at = f"{R}.val_kwargs"
    sampled = made.get(f"{at}.do_sample")
    made.set("eval.temperature", float(made.get(f"{at}.temperature")) if sampled else 0.0, f"{at}.do_sample",
             f"{at}.temperature")  # fmt: skip
    made.set("eval.greedy", False, f"{at}.do_sample")
    if made.given(f"{at}.top_p"):
        made.set("eval.top_p", float(made.get(f"{at}.top_p")), f"{at}.top_p")
    if made.given(f"{at}.top_k"):
        made.set("eval.top_k", max(int(made.get(f"{at}.top_k")), 0), f"{at}.top_k")
    if int(made.get(f"{at}.n")) > 1:
        made.set("eval.estimate", "verl", f"{at}.n")
        made.set("eval.extremes", True, f"{at}.n")
