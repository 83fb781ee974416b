"""Presets of rollout correction, by verl's names: the settings that `algorithm.rollout_correction` stands for."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError, closest, split_options
from jaxrl_llm.config.schema import BY_NAME, ConfigDict


class Preset(NamedTuple):
    """A correction: its weights, its criterion of rejection, and its loss where that compares with the sampler."""

    importance_correction: str = "none"
    rejection: str | None = None
    loss: str | None = None
    options: Mapping[str, Any] = MappingProxyType({})  # with verl's names and defaults


_WEIGHT = {"threshold": 2.0}
_ICEPOP = {"threshold": 5.0, "threshold_lower": 0.5}
_GEOMETRIC, _K3 = {"rs_threshold": "0.999_1.001"}, {"rs_threshold": 0.01}
_BOTH = {"is_threshold": 2.0}

# Those of verl 0.9, RolloutCorrectionConfig.
PRESETS = {
    "disabled": Preset(),
    "decoupled_token_is": Preset("token_truncate", options=_WEIGHT),
    "decoupled_seq_is": Preset("sequence_truncate", options=_WEIGHT),
    "decoupled_token_icepop": Preset("token_mask", options=_ICEPOP),
    "decoupled_seq_is_rs": Preset("sequence_truncate", "seq_sum_k1", None, _BOTH | {"rs_threshold": "0.5_2.0"}),
    "decoupled_geo_rs": Preset("none", "seq_mean_k1", None, _GEOMETRIC),
    "decoupled_geo_rs_seq_tis": Preset("sequence_truncate", "seq_mean_k1", None, _BOTH | _GEOMETRIC),
    "decoupled_geo_rs_token_tis": Preset("token_truncate", "seq_mean_k1", None, _BOTH | _GEOMETRIC),
    "decoupled_k3_rs": Preset("none", "seq_mean_k3", None, _K3),
    "decoupled_k3_rs_seq_tis": Preset("sequence_truncate", "seq_mean_k3", None, _BOTH | _K3),
    "decoupled_k3_rs_token_tis": Preset("token_truncate", "seq_mean_k3", None, _BOTH | _K3),
    "bypass_ppo_clip": Preset("none", None, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": Preset("none", "seq_mean_k1", "ppo_clip", _GEOMETRIC),
    "bypass_ppo_clip_k3_rs": Preset("none", "seq_mean_k3", "ppo_clip", _K3),
    "bypass_pg_is": Preset("sequence_truncate", None, "reinforce", _WEIGHT),
    "bypass_pg_token_icepop": Preset("token_mask", None, "reinforce", _ICEPOP),
    "bypass_pg_geo_rs": Preset("none", "seq_mean_k1", "reinforce", _GEOMETRIC),
    "bypass_pg_geo_rs_seq_tis": Preset("sequence_truncate", "seq_mean_k1", "reinforce", _BOTH | _GEOMETRIC),
    "bypass_pg_geo_rs_token_tis": Preset("token_truncate", "seq_mean_k1", "reinforce", _BOTH | _GEOMETRIC),
}


def settings_of(preset: str) -> dict[str, Any]:
    """The settings of `algorithm`, by name, that a preset stands for: `decoupled_seq_is(threshold=4.0)`.

    Raises ConfigError for an unknown preset or option, or an option that is no number or text.
    """
    name, given = split_options(preset)
    if name not in PRESETS:
        raise ConfigError(
            f"algorithm.rollout_correction is {preset!r}; known are {', '.join(sorted(PRESETS))}; the closest is "
            f"{closest(name, PRESETS)}"
        )
    chosen = PRESETS[name]
    for option, value in given.items():
        if option not in chosen.options:
            raise ConfigError(
                f"algorithm.rollout_correction: {name} has no option {option!r}; it takes "
                f"{', '.join(chosen.options) or 'none'}"
            )
        kinds = (int, float, str) if option == "rs_threshold" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ConfigError(f"algorithm.rollout_correction: {option} of {name} is {value!r}, but takes a number")
    options = {**chosen.options, **given}
    settings = {"importance_correction": chosen.importance_correction, "rejection": chosen.rejection}
    if chosen.importance_correction != "none":
        settings["importance_max"] = float(options["threshold" if "threshold" in options else "is_threshold"])
        settings["importance_min"] = float(options["threshold_lower"]) if "threshold_lower" in options else None
    settings["rejection_bounds"] = str(options["rs_threshold"]) if chosen.rejection else None
    if chosen.loss is not None:
        settings |= {"old_logps": "sampler", "loss": chosen.loss}
    return settings


def with_correction(config: ConfigDict) -> ConfigDict:
    """The configuration with what `algorithm.rollout_correction` stands for written out; itself where that is none.

    A setting at its default is filled in. Raises ConfigError for a preset that cannot be read, and for a setting that
    says something else than the preset.
    """
    preset = config.algorithm.rollout_correction
    if preset is None:
        return config
    filled, settings = config.copy_and_resolve_references(), settings_of(preset)
    for name, value in settings.items():
        key, set_to = BY_NAME[f"algorithm.{name}"], config.algorithm[name]
        if name == "loss" and split_options(set_to)[0] == value:
            continue  # with options of its own
        if set_to not in (key.default, value):
            raise ConfigError(
                f"algorithm.rollout_correction is {preset!r}, by which {name} is {value}, but algorithm.{name} is "
                f"{set_to}: leave one of them out"
            )
        if value is not None:
            key.check(value)
            filled.algorithm[name] = value
    if "old_logps" not in settings and config.algorithm.old_logps == "sampler":
        raise ConfigError(
            f"algorithm.rollout_correction is {preset!r}, which compares with the trainer, but algorithm.old_logps is "
            "sampler: leave that out, or take a preset whose name begins with bypass"
        )
    return filled
