"""Presets of rollout correction: what each one sets, and what they refuse."""

import json

import pytest

from jaxrl_llm.config import ConfigError, default, validate, with_correction
from jaxrl_llm.config.corrections import PRESETS, settings_of
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.train import train

# verl 0.9, the constructors of RolloutCorrectionConfig: rollout_is and its threshold, rollout_rs and its threshold,
# loss_type in bypass mode.
VERL = {
    "disabled": (None, 2.0, None, None, None),
    "decoupled_token_is": ("token", 2.0, None, None, None),
    "decoupled_seq_is": ("sequence", 2.0, None, None, None),
    "decoupled_token_icepop": ("token", "0.5_5.0", None, None, None),
    "decoupled_seq_is_rs": ("sequence", 2.0, "seq_sum_k1", "0.5_2.0", None),
    "decoupled_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", None),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001", None),
    "decoupled_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001", None),
    "decoupled_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, None),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, "seq_mean_k3", 0.01, None),
    "decoupled_k3_rs_token_tis": ("token", 2.0, "seq_mean_k3", 0.01, None),
    "bypass_ppo_clip": (None, 2.0, None, None, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, "ppo_clip"),
    "bypass_pg_is": ("sequence", 2.0, None, None, "reinforce"),
    "bypass_pg_token_icepop": ("token", "0.5_5.0", None, None, "reinforce"),
    "bypass_pg_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001", "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001", "reinforce"),
}


def of(preset, **algorithm):
    config = default()
    config.algorithm.rollout_correction = preset
    config.algorithm.update(algorithm)
    return config


@pytest.mark.parametrize("name", sorted(VERL | dict(PRESETS)))
def test_a_preset_sets_what_verl_sets(name):
    weights, threshold, criterion, bound, loss = VERL[name]
    config = of(name)
    validate(config)
    algorithm = with_correction(config).algorithm
    low, _, high = str(threshold).rpartition("_")
    mode = "none" if weights is None else f"{weights}_{'mask' if low else 'truncate'}"
    assert algorithm.importance_correction == mode
    if weights is not None:
        assert (algorithm.importance_min, algorithm.importance_max) == (float(low) if low else None, float(high))
    assert algorithm.rejection == criterion
    assert algorithm.rejection_bounds == (None if bound is None else str(bound))
    assert (algorithm.old_logps, algorithm.loss) == ("auto", "auto") if loss is None else ("sampler", loss)
    again = with_correction(with_correction(config))
    assert again.to_dict() == with_correction(config).to_dict(), "what is written out is no contradiction"
    assert config.algorithm.importance_correction == "none", "the configuration itself stays"


def test_options_and_settings_beside_a_preset():
    assert settings_of("decoupled_token_icepop(threshold=4, threshold_lower=0.25)") == {
        "importance_correction": "token_mask",
        "importance_max": 4.0,
        "importance_min": 0.25,
        "rejection": None,
        "rejection_bounds": None,
    }
    found = settings_of("decoupled_k3_rs_seq_tis(is_threshold=3.5, rs_threshold=0.1)")
    assert found["importance_max"] == 3.5 and found["rejection_bounds"] == "0.1"
    config = with_correction(of("bypass_ppo_clip", loss="ppo_clip(dual_clip=3.0)", importance_max=7.0))
    assert config.algorithm.loss == "ppo_clip(dual_clip=3.0)" and config.algorithm.importance_max == 7.0
    plain = default()
    assert with_correction(plain) is plain


@pytest.mark.parametrize(
    ("preset", "others", "message"),
    [
        ("decoupled_seq_iss", {}, "the closest is decoupled_seq_is"),
        ("decoupled_geo_rs(threshold=2.0)", {}, "decoupled_geo_rs has no option 'threshold'; it takes rs_threshold"),
        ("disabled(threshold=2.0)", {}, "no option 'threshold'; it takes none"),
        ("decoupled_seq_is(threshold='2')", {}, "threshold of decoupled_seq_is is '2', but takes a number"),
        ("decoupled_seq_is(threshold=-1.0)", {}, r"algorithm\.importance_max is -1\.0"),
        ("decoupled_token_icepop(threshold=0.4)", {}, "importance_min is 0.5, but importance_max = 0.4"),
        (
            "decoupled_seq_is",
            {"importance_correction": "token_mask"},
            "importance_correction is sequence_truncate, but",
        ),
        ("decoupled_geo_rs", {"importance_correction": "token_mask"}, "importance_correction is none, but algorithm"),
        ("decoupled_token_is", {"importance_max": 5.0}, "importance_max is 2.0, but algorithm.importance_max is 5.0"),
        ("decoupled_token_is", {"old_logps": "sampler"}, "compares with the trainer, but algorithm.old_logps is samp"),
        ("bypass_pg_is", {"old_logps": "trainer"}, "old_logps is sampler, but algorithm.old_logps is trainer"),
        ("bypass_pg_is", {"loss": "cispo"}, "loss is reinforce, but algorithm.loss is cispo: leave one of them out"),
    ],
)
def test_what_a_preset_refuses(preset, others, message):
    with pytest.raises(ConfigError, match=message):
        validate(of(preset, **others))


@pytest.mark.slow
def test_a_run_with_a_preset_goes_on(tmp_path, root):
    """What the preset set stands in config.json, and the same command is no change of it."""
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.eval.every, config.total_steps = str(tmp_path), -1, 1
    config.algorithm.rollout_correction, config.rollout.staleness = "bypass_pg_is(threshold=1.5)", 1
    train(config)
    config.total_steps = 2
    train(config)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2], "the second run goes on where the first one ended"
    written = json.loads((tmp_path / "config.json").read_text())["algorithm"]
    expected = ("sampler", "reinforce", "sequence_truncate", 1.5)
    names = ("old_logps", "loss", "importance_correction", "importance_max")
    assert tuple(written[name] for name in names) == expected
    assert config.algorithm.loss == "auto", "the caller's configuration stays as it was"
