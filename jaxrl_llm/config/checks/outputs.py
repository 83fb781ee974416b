"""Contradictions of checkpoints and exports."""

import re
from collections.abc import Iterator
from pathlib import PurePath

from jaxrl_llm.config.resolve import closest, split_options
from jaxrl_llm.config.schema import BY_NAME, IDENTITY, NEW, ConfigDict


def check_checkpoint(config: ConfigDict) -> Iterator[str]:
    """Messages for the folder of a run, and for what is saved and loaded there."""
    checkpoint, best, every = config.checkpoint, config.checkpoint.best, config.eval.every
    if not config.output_dir.strip():
        yield (
            "output_dir is empty (is it an unset variable of the shell?), but it takes a folder; the current one is "
            "written '.'"
        )
    for name in checkpoint.accept_changes:
        if name not in IDENTITY:
            unknown = f"is no setting; the closest is {closest(name, IDENTITY)}"
            fault = "may change without it: leave it out" if name in BY_NAME else unknown
            yield f"checkpoint.accept_changes names {name!r}, which {fault}"
    if NEW in config.output_dir:
        if config.output_dir.count(NEW) > 1 or NEW not in PurePath(config.output_dir).name:
            yield f"output_dir is {config.output_dir!r}, but it takes {NEW} once, in its last part: runs/grpo-{NEW}"
        for key, shared in (("checkpoint.folder", checkpoint.folder), ("rollout.processes", config.rollout.processes)):
            if shared:
                yield f"output_dir is {config.output_dir!r}, but {key} = {shared} needs a folder that is known: name it"
    if "://" in config.output_dir:
        yield (
            f"output_dir is {config.output_dir!r}, but it is a local folder; checkpoints alone go to an object store: "
            "set checkpoint.folder"
        )
    if not checkpoint.contents:
        yield "checkpoint.contents is empty, but it takes state, hf, or both"
    load = {*checkpoint.load}
    if load not in ({"model", "optimizer", "extra"}, {"model", "extra"}, {"model"}):
        yield (
            f"checkpoint.load is {','.join(checkpoint.load)!r}, but it takes model,optimizer,extra (all of a "
            "checkpoint), model,extra (with a new optimizer) or model (the weights alone, at step 0)"
        )
    elif (checkpoint.resume == "never" and len(load) < 3) or (checkpoint.resume == "auto" and len(load) == 1):
        yield (
            f"checkpoint.load is {','.join(checkpoint.load)}, but checkpoint.resume is {checkpoint.resume}, which "
            "names no checkpoint to load from: set it to RUN/checkpoints/STEP"
        )
    if best and "state" not in checkpoint.contents:
        yield (
            f"checkpoint.best is {best!r}, but checkpoint.contents is {','.join(checkpoint.contents)}, and the best of "
            "the states is kept: add state"
        )
    if config.export.best and not best:
        yield "export.best is true, but no metric says which checkpoint is best: set checkpoint.best"
    if best and best.startswith("eval_"):
        yield f"checkpoint.best is {best!r}, as transformers names it; here it is {best.replace('eval_', 'eval/', 1)}"
    if best and checkpoint.every == 0:
        yield f"checkpoint.best is {best!r}, but only the last step is saved: set checkpoint.every"
    if best and best.startswith("eval/") and (every <= 0 or checkpoint.every % every):
        yield (
            f"checkpoint.best is {best!r}, but the steps that are saved (checkpoint.every = {checkpoint.every}) are "
            f"not those that are evaluated (eval.every = {every}): make eval.every divide it"
        )
    for spec in config.callbacks:
        name, options = split_options(spec)
        if name == "early_stopping" and str(options.get("metric", "")).startswith("eval/") and every <= 0:
            yield (
                f"callbacks has {spec!r}, but nothing is evaluated while it trains (eval.every = {every}): set "
                "eval.every, or name a metric of every step"
            )


def check_export(export: ConfigDict, checkpoint: ConfigDict) -> Iterator[str]:
    """Messages for where the trained model goes."""
    repo = export.push_to_hub
    if repo is None and export.private:
        yield "export.private is true, but nothing is pushed: set export.push_to_hub, or it to false"
    if repo is None and export.copy_to is None and export.overwrite:
        yield (
            "export.overwrite is true, but nothing is pushed or copied: set export.push_to_hub or export.copy_to, or "
            "it to false"
        )
    if export.copy_to is not None and not re.match(r"\w[\w+.-]*://.", export.copy_to):
        yield (
            f"export.copy_to is {export.copy_to!r}, but it takes the URL of a folder, gs://bucket/model; a folder of "
            "this machine is written by jaxrl-llm export --output"
        )
    if export.strategy == "every_save":
        needed = {
            "export.push_to_hub": (repo is not None, "name a repository"),
            "checkpoint.contents": ("hf" in checkpoint.contents, "let it have hf, the model that is pushed"),
            "export.overwrite": (export.overwrite, "set it to true, as each push replaces the one before"),
        }
        for key, (is_set, way_out) in needed.items():
            if not is_set:
                yield f"export.strategy is every_save, but {key} does not go with it: {way_out}, or set strategy to end"
    if export.title is not None and not export.title.strip():
        yield "export.title is empty, but it takes the title of the model card, or none"
    if not all(tag.strip() for tag in export.tags):
        yield f"export.tags has an empty tag: {tuple(export.tags)}"
    if repo is not None and not re.fullmatch(r"([A-Za-z0-9][\w.-]*/)?[\w.-]+", repo):
        yield (
            f"export.push_to_hub is {repo!r}, but it takes a repository of the hub: OWNER/NAME, or NAME of the token's "
            "account"
        )
