"""The teachers of a run, built from its configuration, and what makes their rows where they read others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import naming, split_options
from jaxrl_llm.models.model import Model, check_positions, check_same_vocabulary, load_model
from jaxrl_llm.training.objectives.objective import Positions
from jaxrl_llm.training.packing.planner import PackingSpec, TypicalRows, make_packer
from jaxrl_llm.training.reference import Reference, start_reference
from jaxrl_llm.training.setup import specs
from jaxrl_llm.training.setup.agreed import check_same_model
from jaxrl_llm.training.setup.worker import eos_ids
from jaxrl_llm.training.teachers.cross_tokenizer import CrossTokenizer
from jaxrl_llm.training.teachers.served_teacher import ServedTeacher, Server
from jaxrl_llm.training.teachers.teacher import SelfTeacher, Teacher
from jaxrl_llm.training.teachers.teacher_context import TeacherContext


def online_teacher(
    config, model: Model, mesh: Mesh, width: int, sample_of: Callable[[int, int], TypicalRows]
) -> tuple[
    Teacher | ServedTeacher | SelfTeacher | None,
    TeacherContext | CrossTokenizer | None,
    dict[str, Teacher | ServedTeacher],
]:
    """The teacher, what makes its rows of the policy's with prompts of up to `width` tokens, and the other teachers by
    their value.

    `sample_of` makes rows of a width of prompts and a length of completions. The first is None without a teacher, the
    second where it reads the policy's rows.
    """
    longest, shown, context = config.rollout.max_completion_length, specs.context_spec(config), None
    length, cause = width + longest, "the longest prompt and rollout.max_completion_length"
    # Nothing is asked of the packed rows of a pass over the teacher's own but to be cheap.
    packed = replace(
        specs.packing_spec(config),
        packing="false" if config.batch.packing == "false" else "auto",
        pack_length=0,
        microbatch_tokens=0,
        group_size=config.rollout.group_size,
    )
    if shown is not None:
        own_width = specs.context_width(config, width)
        length = own_width + longest
        cause = "the longest prompt of the teacher (teacher.max_prompt_length) and rollout.max_completion_length"
        context = TeacherContext(
            shown, model.tokenizer, specs.data_spec(config).template_kwargs, mesh, own_width, width,
            make_packer(packed, model.net.config, mesh, Positions(), sample_of(own_width, longest)),
        )  # fmt: skip

    def teacher_of(other: str | None = None) -> Any:
        return build_teacher(config, model, mesh, length, cause, other)

    if specs.is_own_teacher(config):
        check_positions(model, length, cause)
        _check_top(config.teacher.top_k, model, config.teacher.path)
        settings, lora, copy = specs.self_reference(config), model.net.config.lora, None
        if settings is not None:
            copy = Reference(start_reference(settings, model.params, lora), settings, lora, name="teacher")
        teacher = SelfTeacher(specs.teacher_spec(config), model.net, mesh, copy)
    elif config.teacher.form == "uld":
        teacher, context = cross_tokenizer(config, model, mesh, width, longest, packed, sample_of)
    else:
        teacher = teacher_of()
    return teacher, context, {entry.partition("=")[0]: teacher_of(entry) for entry in config.teacher.others}


def cross_tokenizer(
    config,
    model: Model,
    mesh: Mesh,
    prompt_width: int,
    completion_length: int,
    packed: PackingSpec,
    sample_of: Callable[[int, int], TypicalRows | None],
) -> tuple[Teacher | None, CrossTokenizer | None]:
    """A teacher with another tokenizer, for prompts and completions of up to so many tokens; (None, None) without one.

    Its rows are `packed` with sizes for a sample of them, of which `sample_of` is given the width and the length.
    """
    if config.teacher.path is None:
        return None, None
    width, longest = specs.cross_tokenizer_widths(config, prompt_width, completion_length)
    cause = "teacher.max_prompt_length and max_completion_length, twice as many as the policy has unless they are set"
    teacher = build_teacher(config, model, mesh, width + longest, cause)
    assert isinstance(teacher, Teacher)  # a server is refused by config/checks/
    packer = make_packer(packed, teacher.net.config, mesh, Positions(), sample_of(width, longest))
    settings = specs.cross_tokenizer_spec(config)
    return teacher, CrossTokenizer.of(settings, model, teacher, eos_ids(model), width, longest, packer)


def build_teacher(
    config, policy: Model, mesh: Mesh, length: int, cause: str, other: str | None = None
) -> Teacher | ServedTeacher | None:
    """The teacher of the configuration, or of an entry `other` of teacher.others, for rows of up to `length` tokens; or
    None without one.

    Raises ConfigError for a model that has no head for tokens, too few positions for rows of that
    length, which `cause` explains, or another vocabulary that is not asked for, and for more likeliest tokens than it
    has.
    """
    c, own = config.teacher, config.model
    key, path, revision = "teacher.path", c.path, c.revision
    if other is not None:
        value, _, path = other.partition("=")
        key, revision = f"teacher.others, {value}", None
    if path is None:
        return None
    name, options = split_options(path)
    if name == "server":
        try:
            return ServedTeacher(specs.teacher_spec(config), Server(**options), mesh, key)
        except TypeError as error:
            raise ConfigError(
                f"{key} = {path!r}: {error}; write server(url='http://localhost:8000/v1', model='m'), with "
                "timeout and api_key (a variable's name) where they differ"
            ) from None
    if path.startswith(("http://", "https://")) and path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"{key} = {path!r} is the address of a server: write server(url={path!r}, model='ITS_MODEL')")
    with naming(f"the teacher, of {key}"):
        check_same_model(path, revision, own.allow_pickle)
        model = load_model(
            path, own.dtype if c.dtype == "auto" else c.dtype, mesh=mesh, allow_pickle=own.allow_pickle,
            trust_remote_code=own.trust_remote_code, revision=revision, head="lm", quantize=c.quantize,
        )  # fmt: skip
    if model.tokenizer is None:
        raise ConfigError(f"{key} = {path!r} has no tokenizer, by which its vocabulary could be compared")
    if c.form != "uld":
        check_same_vocabulary(policy, model, f"{key} = {path!r}:", ", or set teacher.form to uld")
    check_positions(model, length, cause)
    _check_top(c.top_k, model, path)
    return Teacher.of(specs.teacher_spec(config), model, mesh, policy.net.config.vocab_size)


def _check_top(top_k: int, model: Model, path: str) -> None:
    """Raises ConfigError unless a teacher has more tokens than its likeliest ones that are asked for."""
    if top_k >= model.net.config.vocab_size:
        raise ConfigError(
            f"teacher.top_k is {top_k}, but {path} has {model.net.config.vocab_size} tokens: 0 is all of them"
        )
