"""Contradictions between settings that are valid alone: a message for each, with the way out."""

import itertools
from collections.abc import Iterator

from jaxrl_llm.config.checks.outputs import check_checkpoint, check_export
from jaxrl_llm.config.checks.rewards import check_environment, check_rewards
from jaxrl_llm.config.checks.rows import check_batch, check_data, check_eval, check_offline
from jaxrl_llm.config.checks.sampling import check_arrivals, check_online, check_partial, check_ways_to_sample
from jaxrl_llm.config.checks.teacher import check_teacher
from jaxrl_llm.config.checks.trained import check_average, check_lora, check_optimizer
from jaxrl_llm.config.checks.values import advantages_of, looks
from jaxrl_llm.config.resolve import ConfigError, is_own, split_losses, split_options
from jaxrl_llm.config.schema import KEYS, OFFLINE, ConfigDict

# Texts that may be empty, as a system message, which keeps a chat template from its own; of the last three other
# messages speak.
MAY_BE_EMPTY = (
    "data.system_prompt", "logging.project", "logging.run_name", "data.step_separator", "export.title", "output_dir",
)  # fmt: skip


def check_own_functions(config: ConfigDict) -> None:
    """Raises ConfigError for a loss or advantage of the user's own that is not found, or contradicts other settings.

    It is for when a run is built: `contradictions_at_a_look` runs no code of the user's.
    """
    written = [*split_losses(config.algorithm.loss), *advantages_of(config).values()]
    if any(is_own(split_options(name)[0]) for name in written):
        for message in contradictions(config):
            raise ConfigError(message)


def contradictions_at_a_look(config: ConfigDict) -> list[str]:
    """The first message of `contradictions` that no code of the user's decides, if there is one."""
    token = looks.set(True)
    try:
        return list(itertools.islice(contradictions(config), 1))
    finally:
        looks.reset(token)


def _empty_texts(config: ConfigDict) -> Iterator[str]:
    """Messages for texts without a letter: an empty path is the current folder, and other names are of nothing."""
    for key in KEYS:
        section, _, name = key.name.rpartition(".")
        is_text = key.kind is str and not (key.many or key.choices or key.escapes or key.default == "")
        value = (config[section] if section else config)[name]
        if is_text and key.name not in MAY_BE_EMPTY and isinstance(value, str) and not value.strip():
            what = "a name or a folder" if name.endswith("path") else key.allowed.removesuffix(", or none")
            none = ", or none" if key.optional else ""
            yield f"{key.name} is empty (is it an unset variable of the shell?), but it takes {what}{none}"


def contradictions(config: ConfigDict) -> Iterator[str]:
    """A message for each contradiction between keys, computed on demand: `validate` raises the first one.

    Later checks may assume that the earlier ones passed. A text that cannot be read raises ConfigError itself.
    """
    algorithm = config.algorithm
    online = algorithm.name not in OFFLINE
    yield from _empty_texts(config)
    if online:
        yield from check_online(config)
    else:
        yield from check_offline(config)
    yield from check_batch(config, online)
    yield from check_rewards(config, online)
    yield from check_teacher(config, online)
    if online:
        yield from check_ways_to_sample(config)
        yield from check_partial(config)
        yield from check_arrivals(config)
    yield from check_environment(config)
    yield from check_data(config)
    yield from check_eval(config, online)
    yield from check_optimizer(config)
    yield from check_lora(config)
    yield from check_average(config)
    yield from check_checkpoint(config)
    yield from check_export(config.export, config.checkpoint)
    if algorithm.label_smoothing and algorithm.name != "sft":
        yield (
            f"algorithm.label_smoothing is {algorithm.label_smoothing}, but only sft reads it, and algorithm.name is "
            f"{algorithm.name!r}: set it to 0; a preference loss takes it in brackets, "
            f"algorithm.loss='dpo(label_smoothing={algorithm.label_smoothing})'"
        )
    for axis, size in config.mesh.items():
        if size == 0:
            yield f"mesh.{axis} is 0, but it takes 1 or more, or -1 for the devices that the others leave"
