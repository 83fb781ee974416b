"""Every online configuration runs two steps, with finite metrics under the names that dashboards know."""

import math

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.command_line import load_config_file

# The metrics a configuration shows besides those that all have; one that starts with a minus must not be there.
CONFIGS = {
    "grpo": ("kl", "clip_ratio/region_mean"),
    "dr_grpo": ("-kl", "clip_ratio/region_mean"),
    "dapo": ("rollout/resampled_groups", "reward_shaping", "clip_ratio/high_mean"),
    "gspo": ("clip_ratio/low_mean", "clip_ratio/high_mean"),
    "cispo": ("cispo_clip_ratio", "-clip_ratio/region_mean"),
    "sapo": ("-clip_ratio/region_mean",),
    "gdpo": ("rewards/exact_match/std", "rewards/same_digits/mean"),
    "rloo": ("kl", "clip_ratio/region_mean"),
    "reinforce_plus_plus": ("kl",),
    "reinforce_plus_plus_baseline": ("kl",),
}
EVERYWHERE = (
    "loss", "reward", "entropy", "unscorable_rows", "frac_reward_zero_std", "completions/clipped_ratio",
    "sampling/logp_difference/mean", "sampling/logp_difference/max", "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/max", "rollout_corr/kl",
)  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_two_steps(root, tmp_path, name):
    config = load_config_file(f"{root / 'configs' / name}.py:tiny")
    config.output_dir = str(tmp_path / "run")
    config.eval.every = -1
    config.logging.backends = ("jsonl",)
    result = jaxrl_llm.train(config)
    assert [line["step"] for line in result.metrics] == [1, 2]
    for line in result.metrics:
        assert all(math.isfinite(value) for value in line.values())
        assert set(EVERYWHERE) <= line.keys()
        for metric in CONFIGS[name]:
            assert (metric.removeprefix("-") in line) is not metric.startswith("-"), metric
        # The trainer scores what the sampler drew: the very same numbers, up to rounding.
        np.testing.assert_allclose(line["sampling/importance_sampling_ratio/mean"], 1.0, atol=1e-4)
    assert (tmp_path / "run/hf/model.safetensors").is_file()
