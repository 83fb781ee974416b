"""Every configuration learns: a short run from the same warm start moves what it is for, on held-out rows."""

import pytest

from benchmarks.results import OFFLINE, ONLINE
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.train import train

STEPS = 40


def run(root, tmp_path, name: str, steps: int, settings=(), **critic):
    config = load_config_file(f"{root / 'configs' / name}.py")
    config.update_from_flattened_dict(dict(settings))
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ()
    config.total_steps, config.checkpoint.every, config.eval.every = steps, 0, 0
    config.optimizer.schedule, config.optimizer.warmup_steps = "constant", min(config.optimizer.warmup_steps, 5)
    config.critic.update(critic)
    result = train(config)
    return result.metrics[0], result.metrics[-1]


def test_the_main_job(root, tmp_path):
    """Accuracy starts at about 0.25 and is about 0.5 after eight steps; its standard error is 0.03.

    As many samples of a prompt as in training are drawn by the same programs.
    """
    measured = {"eval.prompts": 64, "eval.samples": 8, "eval.greedy": False}
    before, after = run(root, tmp_path, "grpo", 8, measured)
    assert after["eval/accuracy"] > before["eval/accuracy"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.usefixtures("whole_tasks")
def test_online(root, tmp_path, name):
    """Held-out accuracy of samples starts at about 0.25; its standard error is 0.014."""
    before, after = run(root, tmp_path, name, STEPS)
    assert after["eval/accuracy"] > before["eval/accuracy"] + 0.1
    assert after["eval/reward"] > before["eval/reward"]


@pytest.mark.slow
@pytest.mark.usefixtures("whole_tasks")
def test_ppo_with_a_critic_on_the_policys_network(root, tmp_path):
    before, after = run(root, tmp_path, "ppo", STEPS, shared=True, coef=1.0, warmup_steps=0)
    assert after["eval/accuracy"] > before["eval/accuracy"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.usefixtures("whole_tasks")
def test_samples_in_eight_bits(root, tmp_path, kind):
    """Matrices, keys and values: the policy that samples is another one, and corrected for."""
    settings = {
        "rollout.weights_dtype": kind, "rollout.cache_dtype": "fp8",
        "algorithm.importance_correction": "token_truncate", "eval.measure": "samples",
    }  # fmt: skip
    before, after = run(root, tmp_path, "grpo", STEPS, settings)
    assert after["eval/accuracy"] > before["eval/accuracy"] + 0.1
    assert 1e-5 < after["rollout_corr/kl"] < 0.02
    assert after["sampling/sampling_logp_difference/mean"] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.usefixtures("whole_tasks")
def test_offline(root, tmp_path, name):
    before, after = run(root, tmp_path, name, 2 * STEPS if name == "prm" else STEPS)
    if name == "sft":
        assert after["eval/loss"] < before["eval/loss"] - 0.03
        assert after["eval/mean_token_accuracy"] > before["eval/mean_token_accuracy"]
    elif name == "reward_model":
        assert after["eval/accuracy"] > max(before["eval/accuracy"] + 0.05, 0.95)
        assert after["eval/margin"] > before["eval/margin"] + 1.0
    elif name == "prm":
        assert after["eval/accuracy"] > 0.7 and after["eval/loss"] < before["eval/loss"] - 0.15
    else:
        assert after["eval/rewards/margins"] > before["eval/rewards/margins"] + 0.01
        assert after["eval/loss"] < before["eval/loss"]
        assert after["eval/rewards/accuracies"] >= max(before["eval/rewards/accuracies"], 0.8)
