"""Every online configuration runs two steps, with finite metrics under the names that dashboards know."""

import itertools
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from tests.system.test_configs_offline import METRICS as OFFLINE

# The metrics a configuration shows besides those that all have; one that starts with a minus must not be there.
CONFIGS = {
    "grpo": ("kl", "clip_ratio/region_mean"),
    "async_grpo": ("kl", "rollout/age", "producer/reward"),
    "async_grpo:in_flight": ("kl", "rollout/age_max", "rollout/row_policies", "rollout/policies"),
    "dr_grpo": ("-kl", "clip_ratio/region_mean"),
    "dapo": ("rollout/resampled_groups", "reward_shaping", "clip_ratio/high_mean"),
    "gspo": ("clip_ratio/low_mean", "clip_ratio/high_mean"),
    "cispo": ("cispo_clip_ratio", "-clip_ratio/region_mean"),
    "sapo": ("-clip_ratio/region_mean",),
    "gdpo": ("rewards/exact_match/std", "rewards/same_digits/mean"),
    "rloo": ("kl", "clip_ratio/region_mean"),
    "reinforce_plus_plus": ("kl",),
    "reinforce_plus_plus_baseline": ("kl",),
    "gmpo": ("clip_ratio/region_mean", "-kl"),
    "remax": ("kl",),
    "a2po": ("-kl", "-clip_ratio/region_mean", "reward_reference", "a2po/implicit_reward", "ratio/kl"),
    "online_dpo": ("-kl", "pairs/count", "rewards/accuracies", "logps/chosen"),
    "opo": ("-kl",),
    "passk": ("-kl", "clip_ratio/region_mean"),
    "clip_cov": ("-kl", "clip_ratio/region_mean"),
    "kl_cov": ("-kl", "-clip_ratio/region_mean"),
    "distill": ("teacher/divergence", "-teacher/kl", "-kl"),
    "gold": ("teacher/divergence", "teacher/aligned", "teacher/too_long", "-kl"),
    "sdpo": ("teacher/divergence", "teacher/taught", "teacher/prompt_length", "-kl"),
    "sdft": ("teacher/divergence", "teacher/taught", "teacher/too_long", "-kl"),
    "further:maxrl": ("-kl", "clip_ratio/region_mean"),
    "further:pkpo": ("-kl", "clip_ratio/region_mean"),
    "further:otb": ("-kl", "clip_ratio/region_mean"),
    "further:gpg": ("-kl", "-clip_ratio/region_mean"),
    "further:topr": ("-kl", "-clip_ratio/region_mean", "rollout/age"),
    "further:dppo": ("-kl", "-clip_ratio/region_mean", "rollout/age"),
    "further:prime_ipo": ("-kl", "-clip_ratio/region_mean", "rollout/age"),
    "further:rollout_is": ("-kl", "clip_ratio/region_mean", "-clip_ratio/low_mean", "rollout/age"),
    "further:positive_nll": ("-kl", "clip_ratio/region_mean", "positive_nll"),
    "further:dro": ("-kl", "-clip_ratio/region_mean", "ratio/kl"),
    "further:vespo": ("-kl", "-clip_ratio/region_mean", "vespo/phi_seq_mean"),
    "further:m2po": ("-kl", "m2po/masked", "rollout/age"),
    "further:interpolated": ("-kl", "clip_ratio/region_mean", "rollout/age", "rollout/proximal_share"),
    "environment": ("kl", "environment/turns", "environment/failures", "-tools/call_frequency"),
    "gigpo": ("-kl", "turns/reward", "turns/shared_states", "environment/turns"),
    "agent": ("kl", "environment/turns", "environment/calls", "environment/failures", "environment/branches"),
    "ppo": ("kl", "critic/loss", "critic/explained_variance", "critic/grad_norm", "returns/mean"),
    "grpo_lora": ("kl", "clip_ratio/region_mean"),
    "vision_grpo": ("-kl", "clip_ratio/region_mean"),
    "self_play": ("-kl", "environment/branches", "environment/sub_agents/first", "baselines/first"),
}
# Each has a test of its formulas; this one has all the parts that a run is made of, and `tiny_run` is one of GRPO.
QUICK = ("ppo",)
ELSEWHERE = {
    "rlhf": "tests/commands/test_stages.py", "relora": "tests/commands/test_stages.py",
    "sft_tiny": "tests/docs/test_docs_commands.py",
}  # fmt: skip
EVERYWHERE = (
    "loss", "reward", "entropy", "unscorable_rows", "frac_reward_zero_std", "completions/clipped_ratio",
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max", "rollout_corr/kl",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CONFIGS])
def test_two_steps(root, tmp_path, name):
    file, _, form = name.partition(":")
    config = load_config_file(f"{root / 'configs' / file}.py:{form and f'{form},'}tiny")
    config.output_dir = str(tmp_path / "run")
    config.eval.every = -1
    config.logging.backends = ("jsonl",)
    result = jaxrl_llm.train(config)
    assert [line["step"] for line in result.metrics] == [1, 2]
    for line in result.metrics:
        ended = line["completions/clipped_ratio"] < 1  # some of them, which alone have a terminated length
        paired = line.get("pairs/count", 1) > 0  # without a pair there are no means over pairs
        finite = [
            name for name in line if (ended or "terminated_length" not in name) and (paired or name in EVERYWHERE)
        ]
        assert all(math.isfinite(line[metric]) for metric in finite if paired or metric != "entropy")
        assert paired or all(math.isnan(line[name]) for name in ("entropy", "rewards/chosen", "logits/rejected"))
        # All of the loss, which compares with no sampler.
        alone = bool({"teacher/divergence", "pairs/count"} & {*CONFIGS[name]})
        expected = {x for x in EVERYWHERE if not (alone and x.startswith(("sampling/", "rollout_corr/")))}
        assert expected <= line.keys()
        for metric in CONFIGS[name]:
            assert (metric.removeprefix("-") in line) is not metric.startswith("-"), metric
        # The trainer scores what the sampler drew: the very same numbers, up to rounding.
        if line.get("rollout/age") or alone:
            continue  # of another policy, or not measured
        np.testing.assert_allclose(line["sampling/importance_sampling_ratio/mean"], 1.0, atol=1e-4)
    assert (tmp_path / "run/hf/model.safetensors").is_file()


def test_forms_of_further_are_run_and_known_by_name(root):
    known = ", ".join(name.partition(":")[2] for name in CONFIGS if name.startswith("further:"))
    with pytest.raises(ConfigError, match=f"has no form 'grpo'; it has {known}, each"):
        load_config_file(f"{root / 'configs' / 'further.py'}:grpo")


def test_every_config_is_run(root):
    assert set(QUICK) <= CONFIGS.keys()
    run = {name.partition(":")[0] for name in CONFIGS} | OFFLINE.keys() | ELSEWHERE.keys()
    assert run == {path.stem for path in (root / "configs").glob("*.py")}
    for name, path in ELSEWHERE.items():
        assert f"configs/{name}.py" in (root / path).read_text(encoding="utf-8")


def tiny(root, folder, **settings):
    config = load_config_file(f"{root / 'configs/grpo.py'}:tiny")
    config.output_dir, config.eval.every, config.logging.backends = str(folder / "run"), -1, ("jsonl",)
    config.algorithm.update(settings)
    return config


@pytest.mark.slow
def test_dynamic_sampling_stops_when_nothing_can_be_learned(root, tmp_path):
    calls = []

    def always_right(completions, **columns):
        calls.append(len(completions))
        return [1.0] * len(completions)

    config = tiny(root, tmp_path, dynamic_sampling=True, max_sampling_rounds=3)
    with pytest.raises(ConfigError, match=r"after 3 rounds of sampling.*of 4 prompts of 4.*max_sampling_rounds"):
        jaxrl_llm.train(config, rewards=always_right)
    assert calls == [16, 16, 16]


@pytest.mark.slow
def test_dynamic_sampling_trains_on_groups_that_differ(root, tmp_path):
    """Groups of even prompts are flat: they are replaced by others, and every row of the batch is of an odd prompt."""
    seen = []

    def odd(prompts, completions, **columns):
        seen.extend(prompts)
        return [i % 2 if int(p[5]) % 2 else 0 for i, p in enumerate(prompts)]

    config = tiny(root, tmp_path, dynamic_sampling=True, max_sampling_rounds=20)
    config.total_steps = 1
    result = jaxrl_llm.train(config, rewards=odd)
    assert result.metrics[0]["frac_reward_zero_std"] == 0
    assert result.metrics[0]["rollout/resampled_groups"] > 0
    table = pq.read_table(tmp_path / "run/completions/completions_00001.parquet").to_pylist()
    assert len(table) == 16
    assert all(int(row["prompt"][5]) % 2 for row in table)
    assert all(row["odd"] == i % 2 and row["advantage"] * (2 * row["odd"] - 1) > 0 for i, row in enumerate(table))
    assert len(set(seen)) > 4


@pytest.mark.slow
def test_dynamic_sampling_by_a_value_beside_the_score(root, tmp_path):
    """verl's `filter_groups.metric=acc`: groups that are all wrong are alike, whatever credit their rows get."""
    flips, credit = itertools.cycle([True, False]), itertools.count()

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        odd = int(ground_truth) % 2 == 1
        return {"score": next(credit) / 100, "acc": odd and next(flips), "why": "because"}

    config = tiny(root, tmp_path, dynamic_sampling=True, dynamic_sampling_metric="acc", max_sampling_rounds=20)
    config.total_steps = 1
    rows = [
        {"prompt": f"sort:{n}1=", "data_source": "x", "reward_model": {"ground_truth": str(n)}} for n in range(1, 9)
    ]
    jaxrl_llm.train(config, rows, rewards=compute_score)
    table = pq.read_table(tmp_path / "run/completions/completions_00001.parquet").to_pylist()
    assert len(table) == 16
    assert all(int(row["prompt"][5]) % 2 for row in table)
    messages = {"accuracy": "reward functions log .*compute_score/acc", "why": "a column of other things than numbers"}
    for metric, message in messages.items():
        config.algorithm.dynamic_sampling_metric, config.checkpoint.resume = metric, "never"
        with pytest.raises(ConfigError, match=f"algorithm.dynamic_sampling_metric is '{metric}', .*{message}"):
            jaxrl_llm.train(config, rows, rewards=compute_score)
    config.algorithm.dynamic_sampling = False
    with pytest.raises(ConfigError, match=r"which is read with algorithm.dynamic_sampling alone"):
        jaxrl_llm.train(config, rows, rewards=compute_score)


def test_samples_of_another_precision_must_be_corrected_for(root, tmp_path):
    config = tiny(root, tmp_path)
    config.rollout.weights_dtype = "int8"
    with pytest.raises(ConfigError, match=r"rollout.weights_dtype is int8, .* set token_truncate"):
        jaxrl_llm.train(config)


@pytest.mark.slow
def test_old_log_probs_are_the_trainers_where_another_precision_samples(root, tmp_path):
    """One update: its ratios are 1, and the difference to the sampler is what is corrected for."""
    config = tiny(root, tmp_path, importance_correction="token_truncate")
    config.rollout.weights_dtype, config.total_steps = "int8", 1
    line = jaxrl_llm.train(config).metrics[0]
    assert line["ratio/kl"] == line["clip_ratio/region_mean"] == 0
    low, high = (line[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "max"))
    assert low < 0.999 < 1.001 < high
    assert 0 < line["rollout_corr/kl"] < 0.02


@pytest.mark.slow
def test_remax_with_an_entropy_that_is_held_up(root, tmp_path):
    """The greedy baseline, bias-corrected KL to a reference that follows, and an adaptive entropy bonus, together."""
    config = tiny(
        root, tmp_path, advantage="remax", kl_bias_correction=True, ref_sync_steps=1, entropy_controller="adaptive",
        entropy_target=9.0, off_policy_mask_threshold=0.5, top_entropy_quantile=0.5,
        importance_correction="sequence_mask",
    )  # fmt: skip
    config.algorithm.num_iterations = 2
    lines = jaxrl_llm.train(config).metrics
    assert [line["entropy_coef"] for line in lines] == [0.0, pytest.approx(0.005)]
    assert all(math.isfinite(value) for line in lines for value in line.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_in_reward": True}, r"algorithm\.kl_in_reward is True, but algorithm\.beta is 0"),
        ({"kl_controller": "adaptive"}, r"algorithm\.kl_controller is adaptive, but algorithm\.beta is 0"),
        ({"ref_sync_steps": 4}, r"algorithm\.ref_sync_steps is 4, but algorithm\.beta is 0"),
        ({"beta": 0.1, "kl_in_reward": True, "kl_bias_correction": True}, "is for a KL term in the loss"),
        ({"importance_min": 3.0}, r"importance_min is 3\.0, but importance_max = 3\.0 must be larger"),
        ({"entropy_controller": "adaptive", "entropy_coef": 2.0}, r"entropy_coef is 2\.0, outside"),
        ({"overlong_buffer": 300}, r"overlong_buffer is 300, longer than rollout\.max_completion_length = 256"),
        ({"advantage": "rloo(normalize=True)", "group_size": 1}, "compares the completions of a prompt"),
        ({"advantage": "reinforce_plus_plus", "replay_groups": 2, "group_size": 1}, "always scores like itself"),
        ({"advantage": "rloo(True)"}, "cannot read the options"),
        ({"name": "ppo", "advantage": "ppo", "replay_groups": 2}, "ppo's critic gives values for this step's rows"),
    ],
)
def test_contradictions_are_refused(settings, message):
    config = default()
    config.rollout.group_size = settings.pop("group_size", 4)
    config.algorithm.update(settings)
    with pytest.raises(ConfigError, match=message):
        validate(config)
