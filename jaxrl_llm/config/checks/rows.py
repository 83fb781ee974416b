"""Contradictions of given rows, batches, data and evaluations."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.config.checks.values import batch_rows, check_preference_losses, preference_losses, rows_together
from jaxrl_llm.config.entries import eval_set
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.config.schema import OFFLINE, ConfigDict
from jaxrl_llm.config.wording import amount


def check_offline(config: ConfigDict) -> Iterator[str]:
    """Messages for an algorithm that learns from given rows."""
    algorithm, batch, data = config.algorithm, config.batch, config.data
    if batch.microbatch_rows % (together := rows_together(config)):
        yield (
            f"batch.microbatch_rows is {batch.microbatch_rows}, but the rows of a pair stay together, with its gold "
            f"completion where there is one (as do kto's row and its mismatch): make it a multiple of {together}"
        )
    if algorithm.ref_sync_steps and (algorithm.name != "preference" or data.precompute_reference):
        still = "data.precompute_reference reads the reference once, as it starts"
        yield (
            f"algorithm.ref_sync_steps is {algorithm.ref_sync_steps}, but "
            + (still if algorithm.name == "preference" else f"algorithm.name = {algorithm.name!r} has no reference")
            + ": set it to 0"
        )
    if algorithm.name != "preference":
        return
    losses = preference_losses(config)
    yield from check_preference_losses(config)
    alone = [name for name, rows in losses.items() if rows not in ("pair", "triple", None)]
    if len(losses) > 1 and alone:
        yield f"algorithm.loss is {algorithm.loss!r}, but {alone[0]} stands alone: it reads other rows"
    if set(losses.values()) == {"label_and_mismatch"} and batch.prompts < 2 * batch.minibatches:
        yield f"batch.prompts is {batch.prompts}, but kto compares the rows of a minibatch: give each at least 2"
    if set(losses.values()) == {"label_and_mismatch"} and data.precompute_reference:
        yield (
            "data.precompute_reference is true, but kto pairs each prompt with the completion of another row of its "
            "batch, which is not known before: set it to false"
        )


def check_batch(config: ConfigDict, online: bool) -> Iterator[str]:
    """Messages for numbers of rows that do not divide one another."""
    batch, rows = config.batch, batch_rows(config)
    formula, critic_rows = "batch.prompts", config.critic.microbatch_rows
    if online:
        formula += f" x rollout.group_size = {batch.prompts} x {config.rollout.group_size}"
    elif rows_together(config) > 1:
        formula += f" x {rows_together(config)}"
    # The rows of a prompt go into one minibatch: a loss compares those of a pair, and packed rows share their prompt.
    for name, minibatches in (("batch", batch.minibatches), ("critic", config.critic.minibatches or 1)):
        if batch.prompts % minibatches:
            together = f", as the {rows_together(config)} rows of each stay together" if rows > batch.prompts else ""
            yield (
                f"{name}.minibatches is {minibatches}, but it must divide batch.prompts = {batch.prompts}{together}: "
                f"set it to a divisor, or batch.prompts to a multiple of {minibatches}"
            )
    if config.algorithm.name == "preference" and None in preference_losses(config).values():
        return
    minibatch, critics = rows // batch.minibatches, config.critic.minibatches or batch.minibatches
    if critic_rows and batch.prompts % critics == 0 and rows // critics % critic_rows:
        yield (
            f"critic.microbatch_rows is {critic_rows}, but it must divide the {amount(rows // critics, 'row')} of a "
            "minibatch"
        )
    for name in ("microbatch_rows", "logps_microbatch_rows"):
        if batch[name] and minibatch % batch[name]:
            yield (
                f"batch.{name} is {batch[name]}, but it must divide the {amount(minibatch, 'row')} of a minibatch "
                f"({formula}, divided by batch.minibatches = {batch.minibatches})"
            )


def check_data(config: ConfigDict) -> Iterator[str]:
    """Messages for how rows are read, chosen and packed."""
    data, model, name = config.data, config.model, config.algorithm.name
    if data.packing and name != "sft":
        other = "set it to false" if name in OFFLINE else "set it to false (batch.packing packs what is sampled)"
        yield f"data.packing is for sft only, and algorithm.name is {name!r}: {other}"
    if data.packing_strategy != "first_fit" and not data.packing:
        yield f"data.packing_strategy is {data.packing_strategy}, but data.packing is false: set that to true"
    if data.overlong == "split":
        unfit = {
            f"algorithm.name is {name}, whose rows stay whole": name != "sft",
            "teacher.form is uld, which reads a prompt with its answer": config.teacher.form == "uld",
        }
        for reason in (reason for reason, holds in unfit.items() if holds):
            yield f"data.overlong is split, which makes several rows of one, but {reason}: set it to filter"
    steps = name == "process_reward_model"
    allowed = ("completion", "last_step") if steps else ("completion", "last_turn", "as_shown", "all")
    if data.loss_on not in allowed:
        yield f"data.loss_on is {data.loss_on}, and algorithm.name {name!r}: set it to one of {', '.join(allowed)}"
    if data.step_separator == "":
        yield "data.step_separator is empty, but it takes the text that ends a step, or none for a line break"
    elif re.fullmatch(r"(\\[nrt])+", data.step_separator or ""):
        yield (
            f"data.step_separator is {data.step_separator}, backslashes and letters: for a line break write '\\n' on a "
            "command line or, without r before it, in Python"
        )
    easy, hard = data.curriculum_easy, data.curriculum_hard
    for key in (key for key in ("easy", "hard") if data[f"curriculum_{key}"] is not None):
        if data.streaming or name in OFFLINE:
            reason = (
                "streams rows, which come once" if data.streaming else "samples nothing, so that no prompt is solved"
            )
            yield f"data.curriculum_{key} is {data[f'curriculum_{key}']:g}, but this run {reason}: set it to none"
    if easy is not None and hard is not None and hard >= easy:
        yield f"data.curriculum_hard is {hard:g}, but it must be below data.curriculum_easy = {easy:g}"
    split_options(f"model.overrides({model.overrides})")
    split_options(f"data.chat_template_kwargs({data.chat_template_kwargs})")  # raises for options it cannot read
    split_options(f"data.image_processor({data.image_processor})")
    if data.streaming and config.num_epochs is not None:
        yield (
            f"num_epochs is {config.num_epochs}, but data.streaming is true, and streamed rows are not counted: set "
            "total_steps, or data.streaming to false"
        )
    named = (key for key in ("streaming", "eval_path", "eval_split") if data[key])
    if config.eval.fraction and (other := next(named, None)):
        yield (
            f"eval.fraction is {config.eval.fraction}, to hold training rows out, but data.{other} is {data[other]!r}: "
            f"set data.{other} to {'false' if other == 'streaming' else 'none'}, or eval.fraction to 0"
        )
    if config.eval.fraction and config.eval.sets:
        yield f"eval.fraction is {config.eval.fraction}, but eval.sets names what is evaluated on: set one of the two"
    if data.group_by_length:
        others = {
            f"algorithm.name is {name}, which samples its rows": name not in OFFLINE,
            "data.packing is true": data.packing,
            "batch.packing is true": config.batch.packing == "true" or config.batch.microbatch_tokens,
        }
        for reason in (reason for reason, holds in others.items() if holds):
            yield f"data.group_by_length is true, to pad rows less, but {reason}: set it to false"
    for key in ("precompute_reference", "group_by_length", "deduplicate"):
        if data.streaming and data[key]:
            yield f"data.{key} needs all rows before training, and data.streaming is true: set one to false"
    for source in data.sources:
        options = source if isinstance(source, Mapping) else split_options(source)[1]
        yield from _unwritable(f"data.sources has {source!r}", options)
        if data.packing and not data.streaming and options.get("weight") is not None:
            yield (
                "data.sources are mixed by weight, which data.packing would undo: leave the weights out, or set "
                "data.packing to false, or data.streaming to true, which packs blocks of mixed rows"
            )


def _unwritable(source: str, options: Mapping[str, Any]) -> Iterator[str]:
    """A message for the options of a source that config.json cannot hold."""
    try:
        json.dumps(dict(options))
    except TypeError as error:
        yield (
            f"{source}, which cannot be written to a file ({error}): name functions by their file, "
            "path/to/file.py:function, and give data in memory to train(config, train_dataset=...)"
        )


def check_eval(config: ConfigDict, online: bool) -> Iterator[str]:
    """Messages for what is evaluated, and when."""
    measure = config.eval.measure
    if online and measure in ("loss", "both"):
        yield f"eval.measure is {measure}, but {config.algorithm.name} learns from samples: set auto"
    if config.algorithm.name in ("reward_model", "process_reward_model") and measure in ("samples", "both"):
        yield f"eval.measure is {measure}, but a reward model writes nothing: set auto or loss"
    if config.eval.every >= 0 and config.num_epochs is None and config.eval.start > config.total_steps:
        yield (
            f"eval.start is {config.eval.start}, but the run has total_steps = {config.total_steps}: give a smaller "
            "one, or set eval.every to -1"
        )
    for entry in config.eval.sets:
        name, _, options = eval_set(entry)
        yield from _unwritable(f"eval.sets, {name}", options)
