"""Contradictions of teachers, their contexts and their tokenizers."""

from collections.abc import Iterator
from string import Formatter

from jaxrl_llm.config.checks.values import ENVIRONMENTS, changed, how_quantized, met
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.config.schema import OFFLINE, ConfigDict


def check_teacher(config: ConfigDict, online: bool) -> Iterator[str]:
    """Messages for what a run learns of its teachers."""
    teacher = config.teacher
    if teacher.path is None:
        for key, value in changed(config, (f"teacher.{name}" for name in teacher)):
            yield f"{key} is {value!r}, but there is no teacher: set teacher.path, or leave it out"
        if config.algorithm.advantage == "zero":
            yield (
                "algorithm.advantage is 'zero', which learns from no reward, and there is no teacher: set another "
                "rule, or teacher.path"
            )
        return
    name = config.algorithm.name
    if not online and (name != "sft" or teacher.form == "advantage"):
        yield (
            f"teacher.path is {teacher.path!r}, but algorithm.name = {name!r} samples nothing that a teacher could "
            "rate: use grpo or ppo; or sft with teacher.form = divergence, to learn its distributions of given rows"
        )
    if not online and config.algorithm.loss not in ("auto", "nll"):
        yield (
            f"algorithm.loss is {config.algorithm.loss!r}, but with a teacher sft learns its distributions in place of "
            "the rows' tokens: set it to auto"
        )
    if not online and config.algorithm.label_smoothing:
        yield (
            f"algorithm.label_smoothing is {config.algorithm.label_smoothing}, but with a teacher sft learns its "
            "distributions in place of the rows' tokens: set it to 0"
        )
    yield from _uld(config, online)
    if teacher.form == "advantage":
        of_divergence = ("beta", "top_k", "top_of", "tail", "least_logp", "temperature", "on_policy", "importance_max")
        for key, value in changed(config, (f"teacher.{name}" for name in of_divergence)):
            yield (
                f"{key} is {value}, which is of teacher.form = divergence, and teacher.form is {teacher.form}: set the "
                "one, or leave out the other"
            )
    else:
        for key, value in changed(config, ("teacher.position_gamma", "teacher.gamma")):
            yield (
                f"{key} is {value:g}, which weighs the signal of sampled tokens, and teacher.form is {teacher.form}: "
                f"set form to advantage, or {key} to 0"
            )
        of_some = () if teacher.top_k else ("teacher.top_of", "teacher.tail", "teacher.least_logp")
        for key, value in changed(config, of_some):
            yield f"{key} is {value}, but teacher.top_k is 0, all tokens: set it, or leave it out"
    yield from _models(config)
    if split_options(teacher.path)[0] == "self":
        yield from _own_teacher(config)
    yield from _teacher_context(config)
    if teacher.on_policy < 1:
        c = config.algorithm
        others = {
            "algorithm.name": not online or name == "ppo",
            "algorithm.advantage": bool(config.rewards.functions) and c.advantage != "zero",
            "algorithm.beta": c.beta,
            "algorithm.entropy_coef": c.entropy_coef,
            "algorithm.positive_nll_coef": c.positive_nll_coef,
            "algorithm.entropy_controller": c.entropy_controller != "fixed",
            "algorithm.aggregation": c.aggregation == "rollout_token",
            "environment.options": bool(config.environment.options),
        }
        for key, value in met(config, others):
            yield (
                f"teacher.on_policy is {teacher.on_policy:g}, but steps that take given rows have the teacher's "
                f"divergence alone, and {key} is {value!r}: use grpo with advantage = zero, without beta and "
                "entropy_coef, and aggregation = token; or set on_policy to 1"
            )


def _models(config: ConfigDict) -> Iterator[str]:
    """Messages for the models of several teachers, and for those that a server holds."""
    teacher = config.teacher
    paths = {"teacher.path": teacher.path}
    for entry in teacher.others:
        value, _, path = entry.partition("=")
        if not value or not path:
            yield f"teacher.others has {entry!r}, but it takes VALUE=PATH, `math=runs/math/hf`"
        if (key := f"teacher.others, {value}") in paths:
            yield f"teacher.others has {value!r} twice: give each teacher a value of its own"
        paths[key] = path
        if split_options(path)[0] == "self":
            yield f"teacher.others has {entry!r}, but the policy as its own teacher is teacher.path alone: name a model"
    if teacher.others and teacher.form != "advantage":
        yield (
            f"teacher.others is {tuple(teacher.others)}, but teacher.form = {teacher.form} reads the distributions of "
            "one teacher: set form to advantage, or leave others out"
        )
    if split_options(teacher.path)[0] == "server":
        unfit = {
            "teacher.dtype": teacher.dtype != "auto",
            "teacher.quantize": teacher.quantize != "none",
            "teacher.offload": teacher.offload,
            "teacher.revision": teacher.revision is not None,
            "teacher.form": teacher.form == "uld",
            "teacher.top_k": teacher.form == "divergence" and not teacher.top_k,
            "teacher.top_of": teacher.top_of != "teacher",
        }
        for key, value in met(config, unfit):
            yield (
                f"{key} is {value!r}, but teacher.path is a server, which holds the model itself and gives log-probs "
                "of likeliest tokens at most: leave it out, or set teacher.top_k (up to 128)"
            )
    sampling = teacher.temperature or config.rollout.temperature or 1.0
    served = [key for key, path in paths.items() if split_options(path)[0] == "server"]
    if served and sampling != 1.0:
        yield (
            f"rollout.temperature (or teacher.temperature) is {sampling:g}, but the server of {served[0]} gives "
            "log-probs at temperature 1: set it to 1, or name a folder"
        )


def _uld(config: ConfigDict, online: bool) -> Iterator[str]:
    """Messages for a teacher with another tokenizer, and for its settings with another form."""
    teacher, c = config.teacher, config.algorithm
    weights = "teacher.uld_matched_weight", "teacher.uld_unmatched_weight"
    if teacher.form != "uld":
        of_uld = (
            "uld_align", "uld_skip_eos", "uld_hybrid", "policy_temperature", "nll_coef", "max_completion_length",
        )  # fmt: skip
        for key, value in changed(config, (*(f"teacher.{name}" for name in of_uld), *weights)):
            yield (
                f"{key} is {value!r}, which is of teacher.form = uld, and teacher.form is {teacher.form}: set the one, "
                "or leave out the other"
            )
        return
    of_divergence = (f"teacher.{name}" for name in ("top_k", "top_of", "tail", "least_logp", "importance_max", "limit"))
    for key, value in changed(config, of_divergence):
        yield (
            f"{key} is {value}, which is of teacher.form = divergence, and teacher.form is uld, which compares the "
            "whole distributions of two vocabularies: leave it out, or set form to divergence"
        )
    if not teacher.uld_hybrid:
        for key, value in changed(config, ("teacher.beta", *weights)):
            yield (
                f"{key} is {value}, but teacher.uld_hybrid is false, so that no token is compared with itself: set it "
                "to true, or leave the former out"
            )
    elif (teacher.uld_matched_weight is None) != (teacher.uld_unmatched_weight is None):
        yield (
            f"{weights[0]} is {teacher.uld_matched_weight} and {weights[1]} is {teacher.uld_unmatched_weight}: set "
            "both, or neither for the share of the teacher's vocabulary that is in both"
        )
    conflicts = {
        "teacher.context": teacher.context != "none",
        "algorithm.replay_groups": c.replay_groups,
        "algorithm.aggregation": online and c.aggregation == "rollout_token",
        "data.packing": not online and config.data.packing,
        "data.loss_on": (not online or teacher.on_policy < 1) and config.data.loss_on == "all",
        "rollout.staleness": online and config.rollout.staleness,
        "rollout.processes": online and config.rollout.processes,
    }
    for key, value in (*met(config, conflicts), *(changed(config, ENVIRONMENTS) if online else ())):
        yield (
            f"teacher.form is uld, but {key} is {value!r}: a teacher with another tokenizer reads the text of one "
            "sampled or given answer behind a prompt, in this step, and its spans are counted anew; leave out one of "
            "the two"
        )
    if teacher.nll_coef:
        others = {
            "algorithm.name": c.name == "ppo",
            "rewards.functions": online and bool(config.rewards.functions) and c.advantage != "zero",
            "algorithm.loss": online and c.loss not in ("auto", "ppo_clip"),
            "algorithm.beta": online and c.beta,
            "algorithm.entropy_coef": online and c.entropy_coef,
            "algorithm.positive_nll_coef": online and c.positive_nll_coef,
            "algorithm.entropy_controller": online and c.entropy_controller != "fixed",
        }
        for key, value in met(config, others):
            yield (
                f"teacher.nll_coef is {teacher.nll_coef:g}, but {key} is {value!r}, so that the loss has a term of the "
                "policy gradient: set advantage to zero and leave out beta and entropy_coef, or set nll_coef to 0"
            )


def _own_teacher(config: ConfigDict) -> Iterator[str]:
    """Messages for a teacher that is the policy itself."""
    teacher, options = config.teacher, split_options(config.teacher.path)[1]
    rate, every = options.get("rate", 1.0), options.get("every", 1)
    valid = set(options) <= {"rate", "every"} and isinstance(rate, int | float) and isinstance(every, int)
    if not valid or not 0 <= rate <= 1 or every < 1:
        yield (
            f"teacher.path is {teacher.path!r}, but the policy as its own teacher is self(rate=0.05, every=1), "
            "with a rate from 0 (as it started) to 1 (as it is) and every 1 or more steps"
        )
    if (quantized := how_quantized(config)) and rate not in (0, 1):
        yield (
            f"teacher.path is {teacher.path!r}, a mean of whole models, but the matrices are quantised "
            f"({quantized}) and adapters are not merged into them: set rate to 0, or to 1"
        )
    if teacher.context == "none":
        yield (
            f"teacher.path is {teacher.path!r}, and teacher.context is none, so that the policy would learn from "
            "itself what it knows: set teacher.context, success or privileged, or another path"
        )
    of_a_model = {
        "teacher.dtype": teacher.dtype != "auto",
        "teacher.quantize": teacher.quantize != "none",
        "teacher.revision": teacher.revision is not None,
        "teacher.offload": teacher.offload and (rate, every) == (1, 1),
    }
    for key, value in met(config, of_a_model):
        yield (
            f"{key} is {value!r}, but teacher.path is {teacher.path!r}, which has the policy's own parameters: "
            "leave it out"
        )


def _teacher_context(config: ConfigDict) -> Iterator[str]:
    """Messages for what a teacher is shown besides the prompt."""
    teacher, context = config.teacher, config.teacher.context
    if context == "none":
        of_context = (
            "success_threshold", "exclude_own", "remove_thinking", "privileged_column", "template",
            "solution_template", "privileged_template", *(() if teacher.form == "uld" else ("max_prompt_length",)),
        )  # fmt: skip
        for key, value in changed(config, (f"teacher.{name}" for name in of_context)):
            yield (
                f"{key} is {value!r}, but teacher.context is none, so that the teacher is shown the prompt alone: set "
                "teacher.context, or leave it out"
            )
        return
    conflicts = {
        "algorithm.name": config.algorithm.name in OFFLINE,
        "algorithm.replay_groups": bool(config.algorithm.replay_groups) and teacher.form == "divergence",
        "teacher.others": bool(teacher.others),
        "teacher.on_policy": teacher.on_policy < 1,
    }
    for key, value in (*met(config, conflicts), *changed(config, ENVIRONMENTS)):
        yield (
            f"teacher.context is {context}, but {key} is {value!r}: a context is of one sampled answer to a prompt of "
            "this step, and of one teacher; leave out one of the two"
        )
    if "success" in context and not config.rewards.functions:
        yield (
            f"teacher.context is {context}, but rewards.functions is empty, so that no completion is a success: name "
            "one, or set teacher.context to privileged"
        )
    if "success" in context and teacher.exclude_own and config.rollout.group_size < 2:
        yield (
            f"teacher.context is {context}, but rollout.group_size is {config.rollout.group_size}, so that there is no "
            "other completion of a prompt: set it to 2 or more"
        )
    if "privileged" in context and teacher.max_prompt_length is None:
        yield (
            f"teacher.context is {context}, and teacher.max_prompt_length is none: privileged texts may have any "
            "length, so set it to the tokens of the longest prompt with its text"
        )
    yield from _templates(config)


def _templates(config: ConfigDict) -> Iterator[str]:
    """Messages for the texts that show a teacher its context, and for settings of a context that is not shown."""
    teacher, context = config.teacher, config.teacher.context
    parts = {
        "solution": ("success", ("solution_template", "success_threshold", "exclude_own", "remove_thinking")),
        "privileged": ("privileged", ("privileged_template", "privileged_column")),
    }
    shown = {part for part, (word, _) in parts.items() if word in context}
    unread = (f"teacher.{name}" for part in parts.keys() - shown for name in parts[part][1])
    for key, value in changed(config, unread):
        yield (
            f"{key} is {value!r}, which teacher.context = {context} does not read: leave it out, or set another context"
        )
    templates = {"template": {"prompt", *shown}} | {f"{part}_template": {part} for part in shown}
    for key, needed in templates.items():
        text, allowed = teacher[key], needed | (parts.keys() if key == "template" else set())
        try:
            fields = None if text is None else {field for _, field, _, _ in Formatter().parse(text)} - {None}
        except ValueError:
            fields = set()
        if fields is not None and not needed <= fields <= allowed:
            yield (
                f"teacher.{key} is {text!r}, but it takes a text with "
                f"{' and '.join(f'{{{field}}}' for field in sorted(needed))}, and other braces doubled"
            )
