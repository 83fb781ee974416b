"""Warnings about the health of a run."""

import math

import pytest

from jaxrl_llm.config import default, validate
from jaxrl_llm.training.logging.health import REPEAT_EVERY, HealthWarnings, health_warnings
from jaxrl_llm.training.setup.records import health_spec

HEALTHY = {
    "loss": 0.1, "grad_norm": 0.5, "reward": 0.4, "reward_std": 0.5, "unscorable_rows": 0.0, "kl": 0.3,
    "ratio/kl": 0.01, "entropy": 0.5, "sampling/sampling_logp_difference/mean": 0.01,
}  # fmt: skip
DIFFERENCE = "sampling/sampling_logp_difference/mean"


def names(algorithm="grpo", off=None, **changed):
    config = default()
    config.algorithm.name = algorithm
    if off:
        config.watch[off] = None
        validate(config)
    return set(health_warnings(health_spec(config), HEALTHY | changed))


def test_a_healthy_step_has_none():
    assert names() == set()
    assert health_warnings(health_spec(default()), {}) == {}


@pytest.mark.parametrize(
    ("metric", "value", "name"),
    [
        ("loss", math.nan, "nonfinite_loss"),
        ("loss", -math.inf, "nonfinite_loss"),
        ("reward", math.nan, "nonfinite_reward"),
        ("unscorable_rows", 3.0, "unscorable_rows"),
        ("kl", 1.5, "kl_explosion"),
        ("kl", math.inf, "kl_explosion"),
        ("entropy", 0.001, "entropy_collapse"),
        (DIFFERENCE, 0.2, "sampler_mismatch"),
    ],
)
def test_each_has_its_name(metric, value, name):
    assert names(**{metric: value}) == {name}


def test_a_reward_that_is_always_0_is_named():
    """A solved task, whose rewards are alike too, is left alone, and so is a step that a teacher gives a gradient."""
    nothing = {"reward": 0.0, "reward_std": 0.0, "grad_norm": 0.0}
    assert names(**nothing) == {"zero_reward"}
    assert names(**nothing | {"grad_norm": 6e-8}) == {"zero_reward"}  # what rounding gives where policies are alike
    assert all(names(**nothing | {name: 1.0}) == set() for name in nothing)


def test_advantages_that_are_no_numbers_are_named():
    nan = {"loss": math.nan, "advantages/mean": math.nan}
    assert "algorithm.advantage" in health_warnings(health_spec(default()), HEALTHY | nan)["nonfinite_loss"]
    assert "algorithm.advantage" not in health_warnings(health_spec(default()), {"loss": math.nan})["nonfinite_loss"]


def test_a_mismatch_of_older_policies_is_no_matter_of_types():
    config = default()
    advice = lambda: health_warnings(health_spec(config), {DIFFERENCE: 0.2})["sampler_mismatch"]  # noqa: E731
    assert advice().endswith("use model.dtype=float32, or set algorithm.importance_correction")
    for key in ("staleness", "partial_prompts"):
        config = default()
        config.algorithm.importance_correction, config.rollout[key] = "token_truncate", 1
        assert advice().endswith(f"sampling and training: lower optimizer.learning_rate or rollout.{key}")


def test_limits_are_settings_and_none_is_off():
    assert (
        names(off="kl", kl=9.0)
        == names(off="entropy", entropy=0.0)
        == names(off="mismatch", **{DIFFERENCE: 9})
        == set()
    )


def test_ratio_kl_counts_without_a_reference():
    config = default()
    assert set(health_warnings(health_spec(config), {"ratio/kl": 2.0})) == {"kl_explosion"}
    assert health_warnings(health_spec(config), {"ratio/kl": 2.0, "kl": 0.1}) == {}


def test_offline_algorithms_have_other_scales():
    assert names("preference", kl=50.0, entropy=0.0) == set()
    assert names("sft", loss=math.nan) == {"nonfinite_loss"}


def test_a_warning_is_shown_again_seldom():
    health, warnings = HealthWarnings(), {"kl_explosion": "far"}
    shown = [step for step in range(1, 2 * REPEAT_EVERY + 2) if health.due(step, warnings)]
    assert shown == [1, 1 + REPEAT_EVERY, 1 + 2 * REPEAT_EVERY]
    assert health.due(500, {}) == []
    assert health.due(501, warnings) == ["step 501: warning/kl_explosion: far"]  # a new one
