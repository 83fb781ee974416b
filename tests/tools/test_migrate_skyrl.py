"""Commands of SkyRL become configurations of ours: values, formulas, two steps of training."""

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.tools.migrate import migrate
from tests.tools.migrated_runs import K, N, made_rows, our_advantages, our_loss, two_steps

COMMAND = """
: "${DATA_DIR:="$HOME/data/gsm8k"}"
NUM_GPUS=4
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \\
  data.train_data="['$DATA_DIR/train.parquet']" \\
  data.val_data="['$DATA_DIR/validation.parquet']" \\
  trainer.algorithm.advantage_estimator="grpo" \\
  trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct" \\
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \\
  generator.inference_engine.num_engines=$NUM_GPUS \\
  trainer.max_training_steps=30 \\
  trainer.train_batch_size=1024 \\
  trainer.policy_mini_batch_size=256 \\
  trainer.micro_train_batch_size_per_gpu=64 \\
  trainer.micro_forward_batch_size_per_gpu=32 \\
  trainer.ckpt_interval=10 \\
  generator.sampling_params.max_generate_length=256 \\
  generator.eval_sampling_params.top_k=20 \\
  trainer.policy.optimizer_config.lr=2.0e-6 \\
  trainer.policy.optimizer_config.num_warmup_steps=12 \\
  generator.n_samples_per_prompt=5 \\
  trainer.logger="wandb" \\
  trainer.project_name="gsm8k" \\
  trainer.ckpt_path="ckpts/here" \\
  MORE
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def command(tmp_path, *more, text=COMMAND, **said):
    """The configuration of the command with further overrides, and the text of its file."""
    (tmp_path / "run.sh").write_text(text.replace("MORE", " ".join(more)))
    return migrate("run.sh", output="config.py", **said)


def test_a_command(tmp_path):
    config, text = command(tmp_path)
    (tmp_path / "config.py").write_text(text)
    assert load_config_file("config.py").to_dict() == config.to_dict()
    assert "unknown key" not in text and "is left out" not in text
    assert (config.model.path, config.model.dtype, config.model.remat) == (
        "Qwen/Qwen2.5-1.5B-Instruct", "bfloat16", "block",
    )  # fmt: skip
    assert config.data.path.endswith("data/gsm8k/train.parquet") and config.data.eval_split == "train"
    assert (config.batch.prompts, config.batch.minibatches, config.rollout.group_size) == (1024, 4, 5)
    # 256 prompts of 5 completions are an update; 64 and 32 rows on each of 4 devices.
    assert (config.batch.microbatch_rows, config.batch.logps_microbatch_rows) == (256, 128)
    assert (config.rollout.max_prompt_length, config.rollout.max_completion_length) == (512, 256)
    assert (config.eval.every, config.eval.at_start, config.eval.temperature, config.eval.top_k) == (5, True, 0.0, 20)
    assert (config.algorithm.advantage, config.algorithm.scale_rewards) == ("group(eps=1e-06)", "group")
    assert (config.algorithm.beta, config.algorithm.kl, config.algorithm.aggregation) == (0.001, "k3", "token")
    assert (config.optimizer.learning_rate, config.optimizer.no_decay) == (2e-6, ())
    assert config.optimizer.warmup_steps == 3, "12 updates, of which a batch makes 4"
    assert (config.total_steps, config.seed, config.output_dir) == (30, 42, "ckpts/here")
    assert (config.checkpoint.every, config.checkpoint.keep_every) == (10, 1), "all are kept there"
    assert (config.logging.project, config.logging.backends) == ("gsm8k", ("console", "jsonl", "wandb"))
    names = {}
    exec((tmp_path / "config_functions.py").read_text(), names)
    row = names["rows"]({"prompt": [{"role": "user", "content": "q"}], "reward_spec": {"ground_truth": "1234"}})
    assert row["answer"] == "1234" and row["prompt"][0]["content"] == "q"
    said = ["#### 1,234", [{"role": "assistant", "content": "so #### 1234 #### 5"}], "1234", "#### 1234.0", "####1234"]
    assert names["gsm8k"](said, ["1234"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_other_settings(tmp_path):
    config, text = command(
        tmp_path, "trainer.strategy=megatron trainer.policy.megatron_config.tensor_model_parallel_size=2",
        "trainer.placement.colocate_all=false trainer.policy.model.lora.rank=32 generator.max_turns=4",
        "trainer.algorithm.dynamic_sampling.type=filter trainer.algorithm.zero_variance_filter=true",
        "trainer.algorithm.use_kl_loss=false environment.env_class=search trainer.max_tokens_per_microbatch=4096",
    )  # fmt: skip
    assert (config.mesh.tensor, config.rollout.devices, config.lora.rank, config.lora.alpha) == (2, 4, 32, 16.0)
    assert (config.algorithm.dynamic_sampling, config.algorithm.max_sampling_rounds) == (True, 30)
    assert (config.algorithm.filter_zero_advantages, config.algorithm.beta) == (True, 0.0)
    assert config.batch.microbatch_tokens == 8192, "of two pairs of devices"
    assert config.rewards.functions == ("REWARD",) and "env_class = search is an environment of skyrl_gym" in text
    config, text = command(tmp_path, "trainer.algorithm.advantage_estimator=gae trainer.critic.model.path=m")
    assert (config.algorithm.name, config.algorithm.advantage) == ("ppo", "ppo(gamma=1.0, lam=1.0)")
    assert (config.critic.path, config.critic.learning_rate, config.critic.epsilon) == ("m", 5e-6, 0.2)
    dapo = COMMAND.replace("skyrl.train.entrypoints.main_base", "examples.train.algorithms.dapo.main_dapo")
    config, _ = command(tmp_path, "trainer.algorithm.overlong_buffer_len=64", text=dapo)
    assert (config.algorithm.overlong_buffer, config.algorithm.overlong_penalty) == (64, 1.0)
    ahead = COMMAND.replace("skyrl.train.entrypoints.main_base", "examples.train.async.main_async")
    config, _ = command(tmp_path, text=ahead)
    assert (config.rollout.staleness, config.algorithm.old_logps) == (1, "sampler")


def test_what_is_not_read(tmp_path):
    with pytest.raises(ConfigError, match="main_sft of SkyRL is not read"):
        command(tmp_path, text="python -m skyrl.train.main_sft trainer.policy.model.path=m\n")
    other = "bash scripts/base.sh trainer.algorithm.policy_loss_type=gspo trainer.seed=7 MORE\n"
    assert "the command starts scripts/base.sh, which is not there" in " ".join(
        command(tmp_path, text=other)[1].split()
    )
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "base.sh").write_text(COMMAND.replace("MORE", "trainer.seed=3 $@"))
    (tmp_path / "scripts" / "run.sh").write_text(other.replace("MORE", ""))
    config, text = migrate("scripts/run.sh", output="config.py")  # the other lies in a folder above, as from its root
    assert (config.algorithm.loss, config.seed, config.batch.prompts) == (
        "gspo_token",
        7,
        1024,
    ) and "not there" not in text
    text = command(tmp_path, "trainer.algorithm.advantage_estimator=mine trainer.policy.model.pth=x")[1]
    assert "'mine', which has no equivalent" in " ".join(text.split())
    assert "trainer.policy.model.pth is no known key; the closest is trainer.policy.model.path" in " ".join(
        text.split()
    )
    assert "trainer.mtp.enabled = True has no equivalent" in command(tmp_path, "trainer.mtp.enabled=true")[1]


def their_advantages(rows, kind):
    scores = rows.rewards.reshape(-1, K)
    centred = scores - scores.mean(1, keepdims=True)
    if kind == "grpo":
        centred = centred / (scores.std(1, ddof=1, keepdims=True) + 1e-6)
    elif kind == "rloo":
        centred = centred * K / (K - 1)
    elif kind == "reinforce++":
        whole = np.repeat(rows.rewards[:, None], rows.mask.shape[1], 1)
        mean = (whole * rows.mask).sum() / rows.mask.sum()
        count = rows.mask.sum()
        variance = ((whole - mean) ** 2 * rows.mask).sum() / count * count / (count - 1)
        return (whole - mean) / np.sqrt(variance + 1e-8)
    return centred.reshape(N, 1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce++", "plain"])
def test_advantages_are_those_of_skyrl(tmp_path, kind):
    by_std = "trainer.algorithm.grpo_norm_by_std=false" if kind == "plain" else ""
    estimator = "grpo" if kind == "plain" else kind
    config, _ = command(tmp_path, f"trainer.algorithm.advantage_estimator={estimator} {by_std}")
    rows = made_rows()
    ours = our_advantages(config, rows).reshape(N, -1) * rows.mask
    np.testing.assert_allclose(ours, their_advantages(rows, kind) * rows.mask, rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("means", ["token_mean", "sequence_mean", "prompt_mean"])
@pytest.mark.parametrize("kind", ["regular", "dual_clip", "gspo", "cispo", "sapo", "rollout_is", "dppo", "dppo_kl"])
def test_losses_are_those_of_skyrl(tmp_path, kind, means):
    """Value, or of a loss that here has the ratio as a weight the gradient, by SkyRL's formulas written out."""
    said = "dppo trainer.algorithm.dppo.dppo_type=binary_kl" if kind == "dppo_kl" else kind
    config, _ = command(
        tmp_path, f"trainer.algorithm.policy_loss_type={said} trainer.algorithm.loss_reduction={means}",
        f"trainer.algorithm.use_kl_loss=false trainer.algorithm.eps_clip_high=0.28 generator.n_samples_per_prompt={K}",
    )  # fmt: skip
    rows = made_rows()
    by_sampler = kind in ("rollout_is", "dppo", "dppo_kl")
    old = rows.sampled if by_sampler else rows.old
    a = np.broadcast_to(their_advantages(rows, "grpo"), rows.mask.shape)
    ratio = np.exp(rows.policy - old)
    clipped = np.clip(ratio, 0.8, 1.28)
    moved = np.exp(rows.policy) - np.exp(old)
    if kind in ("regular", "dual_clip"):
        each = np.maximum(-a * ratio, -a * clipped)
        each = np.where(a < 0, np.minimum(each, -3.0 * a), each) if kind == "dual_clip" else each
    elif kind == "gspo":
        whole = np.exp(((rows.policy - old) * rows.mask).sum(1, keepdims=True) / rows.mask.sum(1, keepdims=True))
        each = np.maximum(-a * whole, -a * np.clip(whole, 0.8, 1.28))
    elif kind == "cispo":
        each = -a * np.clip(ratio, 0.0, 5.0) * rows.policy
    elif kind == "sapo":
        tau = np.where(a > 0, 1.0, 1.05)
        each = -a * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    elif kind == "rollout_is":
        each = -a * np.where((ratio > 0.8) & (ratio < 1.28), ratio, 0.0) * rows.policy
    else:
        p, q = np.exp(rows.policy), np.exp(old)
        kl = q * (old - rows.policy) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
        far_up, far_down = (moved > 0.2, moved < -0.2) if kind == "dppo" else (
            (moved > 0) & (kl > 0.2), (moved < 0) & (kl > 0.2)
        )  # fmt: skip
        each = -a * ratio * np.where(np.where(a > 0, far_up, far_down), 0.0, 1.0)
    weights = {
        "token_mean": rows.mask / rows.mask.sum(),
        "sequence_mean": rows.mask / rows.mask.sum(1, keepdims=True) / N,
        "prompt_mean": rows.mask / np.repeat(rows.mask.reshape(-1, K, rows.mask.shape[1]).sum((1, 2)), K)[:, None] / 2,
    }[means]
    value, gradient = our_loss(config, rows, old=old)
    if kind == "dppo_kl":  # whose ratio is a weight of the log-prob here
        np.testing.assert_allclose(gradient, each * weights, rtol=1e-6, atol=1e-12)
    else:
        np.testing.assert_allclose(value, (each * weights).sum(), rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["token", "sequence", "geometric", "token_mask"])
def test_corrections_are_those_of_skyrl(tmp_path, kind):
    at = "trainer.algorithm.off_policy_correction"
    said = {
        "token": f"{at}.tis_ratio_type=token {at}.token_tis_ratio_clip_high=1.2",
        "sequence": f"{at}.tis_ratio_type=sequence {at}.sequence_tis_ratio_clip_high=1.5",
        "geometric": f"{at}.sequence_mask_metric=geometric {at}.geo_mask_low=0.8 {at}.geo_mask_high=1.3",
        "token_mask": f"{at}.token_mask_is_threshold_low=0.6 {at}.token_mask_is_threshold_high=1.6",
    }[kind]
    config, _ = command(tmp_path, said, "trainer.algorithm.use_kl_loss=false")
    rows = made_rows()
    change = rows.old - rows.sampled
    mean = (change * rows.mask).sum(1, keepdims=True) / rows.mask.sum(1, keepdims=True)
    if kind == "token":
        weights = np.minimum(np.exp(change), 1.2)
    elif kind == "sequence":
        weights = np.minimum(np.exp((change * rows.mask).sum(1, keepdims=True)), 1.5)
    elif kind == "geometric":
        weights = (np.exp(mean) >= 0.8) & (np.exp(mean) <= 1.3)
        assert 0 < weights.sum() < N
    else:
        weights = (np.exp(change) >= 0.6) & (np.exp(change) <= 1.6)
    a, ratio = their_advantages(rows, "grpo"), np.exp(rows.policy - rows.old)
    each = np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.2)) * weights * rows.mask
    np.testing.assert_allclose(our_loss(config, rows)[0], each.sum() / rows.mask.sum(), rtol=1e-6)


def test_a_command_trains(tmp_path):
    config, _ = command(tmp_path)
    rows = [
        {"prompt": f"sort:{n}=", "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": str(n)}}
        for n in range(120, 136)
    ]
    metrics = two_steps(
        config, tmp_path, rows,
        **{"rollout.group_size": 4, "batch.prompts": 2, "batch.minibatches": 2, "batch.logps_microbatch_rows": 0},
    )  # fmt: skip
    assert [np.isfinite(step["loss"]) for step in metrics] == [True, True]
