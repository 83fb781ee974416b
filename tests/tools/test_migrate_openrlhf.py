"""Commands of OpenRLHF become configurations: values, units, defaults, formulas, two steps of training."""

import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import ppo_advantages
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.tools.migrate import migrate
from jaxrl_llm.training.setup.objectives import preference_spec
from tests.tools.migrated_runs import K, N, T, made_rows, our_advantages, our_loss, two_steps

PPO = r"""
set -x
MODEL=Qwen/Qwen3-0.6B
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path ${MODEL} --actor.num_gpus_per_node 4 --vllm.num_engines 2 --train.colocate_all \
   --reward.remote_url rewards.py --ckpt.output_dir ./out --ckpt.save_steps 5 --ckpt.save_hf \
   --train.batch_size 64 --train.micro_batch_size 2 --rollout.batch_size 32 --rollout.n_samples_per_prompt 4 \
   --data.max_len 512 --rollout.max_new_tokens 384 --ds.zero_stage 3 --actor.adam.lr 5e-7 --data.prompt_dataset a/b \
   --data.input_key question --data.label_key answer --data.apply_chat_template --actor.gradient_checkpointing_enable \
   --logger.wandb.key 0123456789abcdef --algo.kl.init_coef 0.02 --algo.advantage.estimator ESTIMATOR OTHER
"""
FORMER = r"""
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --save_path ./out --pretrain Qwen/Qwen3-0.6B --dataset a/b,c/d --dataset_probs 0.25,0.75 --learning_rate 5e-7 \
   --train_batch_size 64 --micro_train_batch_size 2 --max_len 256 --beta 0.2 --apply_chat_template \
   --use_wandb SECRETKEY --chosen_key good --rejected_key bad OTHER
EOF
deepspeed --module $training_commands
"""
REWARDS = """
import torch

calls = []


def reward_func(queries, prompts, labels):
    calls.append(1)
    scores = [float(c in a[len(b):]) - 0.01 * len(a) for a, b, c in zip(queries, prompts, labels)]
    return {"rewards": torch.tensor(scores), "scores": torch.tensor(scores), "extra_logs": {}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)


def command(tmp_path, *more, estimator="group_norm", text=PPO, **said):
    """The configuration of the command, with further flags, and the text of its file."""
    (tmp_path / "run.sh").write_text(text.replace("ESTIMATOR", estimator).replace("OTHER", " ".join(more)))
    return migrate("run.sh", output="config.py", **said)


def test_fewer_rows_than_a_batch_are_known(tmp_path):
    config, text = command(tmp_path, rows=5)
    assert config.total_steps == 1 and config.num_epochs is None and "is not known" not in text


def test_a_command(tmp_path):
    config, text = command(tmp_path, rows=320)
    (tmp_path / "config.py").write_text(text)
    assert load_config_file("config.py").to_dict() == config.to_dict()
    assert (config.model.path, config.model.dtype, config.model.remat) == ("Qwen/Qwen3-0.6B", "bfloat16", "block")
    # 128 completions are two updates of 64, in micro-batches of 2 on each of 4 devices.
    assert (config.batch.prompts, config.batch.minibatches, config.batch.microbatch_rows) == (32, 2, 8)
    assert (config.rollout.group_size, config.total_steps) == (4, 10)
    assert (config.rollout.max_prompt_length, config.rollout.max_completion_length) == (128, 384)
    assert (config.data.overlong, config.rollout.min_completion_length) == ("truncate_left", 1)
    assert (config.mesh.fsdp, config.rollout.devices) == (-1, 0)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.b2, optimizer.schedule) == (5e-7, 0.95, "cosine")
    assert (optimizer.min_lr_ratio, optimizer.warmup_ratio, optimizer.max_grad_norm) == (0.1, 0.03, 1.0)
    assert (config.checkpoint.every, config.checkpoint.contents) == (5, ("state", "hf"))
    assert config.logging.backends == ("console", "jsonl", "wandb")
    assert "0123456789abcdef" not in text  # a key is no comment
    names = {}
    exec((tmp_path / "config_functions.py").read_text(), names)
    assert names["reward"](["1+1", "2"], ["= 2", "x"], label=["2", "2"]) == pytest.approx([0.94, -0.02])
    # Called for each row by itself, as there, of a file that is read once.
    assert len(names["module_of"]("rewards.py").calls) == 2


def test_former_flags_and_pairs(tmp_path):
    config, text = command(tmp_path, "--ipo", text=FORMER)
    assert config.data.sources[0]["weight"] == 0.25 and config.data.sources[1]["path"] == "c/d"
    assert (config.batch.prompts, config.data.max_length, config.algorithm.beta) == (64, 256, 0.2)
    assert config.data.overlong == "truncate_right"
    assert (config.algorithm.loss, config.optimizer.learning_rate) == ("ipo(normalize=False)", 5e-7)
    assert preference_spec(config).losses[0].function.__name__ == "ipo"
    assert "SECRETKEY" not in text
    names = {}
    exec((tmp_path / "config_functions.py").read_text(), names)
    assert names["pairs"]({"good": [1], "bad": [2]}) == {"chosen": [1], "rejected": [2]}
    config, _ = command(tmp_path, "--label_smoothing 0.1 --nll_loss_coef 0.5 --prompt_key q", text=FORMER)
    assert (config.algorithm.loss, config.algorithm.loss_weights) == ("dpo(label_smoothing=0.1)+sft", (1.0, 0.5))
    config, _ = command(tmp_path, "--margin_loss", text=FORMER.replace("train_dpo", "train_rm"))
    assert (config.algorithm.name, config.algorithm.loss) == ("reward_model", "bradley_terry")
    config, _ = command(tmp_path, "--desirable_loss_weight 0.5", text=FORMER.replace("train_dpo", "train_kto"))
    assert config.algorithm.loss == "kto(desirable_weight=0.5)"


def test_evaluations_references_and_samples_of_other_commands(tmp_path):
    config, text = command(tmp_path, "--eval_dataset a/c --max_samples 50 --ref_pretrain e/f", text=FORMER)
    text = " ".join(text.split())
    assert (config.eval.every, config.eval.at_start, config.data.eval_split) == (0, False, "test")
    assert [source["split"] for source in config.data.sources] == ["train[:50]", "train[:50]"]
    assert "eval.steps is not set, which evaluates after each epoch" in text
    assert "ref_pretrain = e/f: the reference is the model as it is at the start" in text
    assert "max_samples = 50 are rows of each data set here" in text
    assert config.eval.prompts == 50
    config, text = command(tmp_path, "--eval_dataset a/c", text=FORMER, rows=640)
    assert (config.eval.every, config.total_steps) == (10, 10)
    assert "eval_dataset: all its rows are evaluated there, here eval.prompts, 128 unless set" in " ".join(text.split())
    text = FORMER.replace("a/b,c/d --dataset_probs 0.25,0.75", "a/b@en")
    config, text = command(tmp_path, "--eval_dataset a/c --eval_steps 3", text=text)
    assert (config.data.path, config.eval.every) == ("a/b", 3)
    assert "a/b@en is the folder en of a/b" in " ".join(text.split())


def test_an_epoch_has_the_rows_that_max_samples_leaves(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 320)
    config, _ = command(tmp_path, "--data.max_samples 64", text=PPO.replace("a/b", "rows.jsonl"))
    assert (config.data.split, config.total_steps) == ("train[:64]", 2)


def test_a_mixture_of_experts_has_no_load_balancing_loss_unless_it_is_asked_for(tmp_path):
    """The coefficient in config.json counts in transformers where the configuration returns the router's logits."""
    text = FORMER.replace("Qwen3-0.6B", "Qwen3-30B-A3B")
    assert command(tmp_path, text=text)[0].model.router_aux_loss_coef == 0.0
    assert command(tmp_path, "--aux_loss_coef 0.01", text=text)[0].model.router_aux_loss_coef == 0.01
    assert command(tmp_path, text=FORMER)[0].model.router_aux_loss_coef is None
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text('{"model_type": "mixtral", "num_local_experts": 4}')
    text = FORMER.replace("Qwen/Qwen3-0.6B", "own")
    assert command(tmp_path, text=text)[0].model.router_aux_loss_coef == 0.0


@pytest.mark.parametrize(
    ("flags", "row", "made"),
    [
        ("--output_key a --input_key q", {"q": "1", "a": "2"}, {"prompt": "User: 1\nAssistant: ", "completion": "2"}),
        (
            "--output_key a --input_key q --input_template '<{}>'",
            {"q": "1", "a": "2"},
            {"prompt": "<1>", "completion": "2"},
        ),
        (
            "--output_key a --input_key q --input_template no_place",
            {"q": "1", "a": "2"},
            {"prompt": "1", "completion": "2"},
        ),
    ],
)
def test_rows_of_fine_tuning(tmp_path, flags, row, made):
    text = FORMER.replace("train_dpo", "train_sft").replace("--apply_chat_template", "").replace("--beta 0.2", "")
    config, _ = command(tmp_path, flags, text=text)
    names = {}
    exec((tmp_path / "config_functions.py").read_text(), names)
    assert names["completions"](row) == made
    assert (config.algorithm.name, config.num_epochs) == ("sft", 2.0)


def their_advantages(rows, estimator, std=True):
    """OpenRLHF's compute_advantages_and_returns for rewards without a KL penalty, `[N, T]` (experience_maker.py)."""
    groups = rows.rewards.reshape(-1, K)
    centred = groups - groups.mean(1, keepdims=True)
    if estimator == "rloo":
        shaped = groups - (groups.sum(1, keepdims=True) - groups) / (K - 1)
    elif estimator == "group_norm":
        shaped = centred / (groups.std(1, ddof=1, keepdims=True) + 1e-9)
    else:
        shaped = centred if estimator in ("reinforce_baseline", "dr_grpo") else groups
    advantages = shaped.reshape(N, 1) * rows.mask
    if estimator in ("reinforce", "reinforce_baseline"):
        count = rows.mask.sum()
        mean = advantages.sum() / count
        variance = ((advantages - mean) ** 2 * rows.mask).sum() / count
        advantages = (advantages - mean) * (1 / np.sqrt(max(variance, 1e-8)) if std else 1) * rows.mask
    return advantages


def their_loss(
    rows,
    advantages,
    *,
    low=0.2,
    high=0.2,
    dual=None,
    gspo=False,
    kl=None,
    beta=0.02,
    correction=None,
    bounds=(0.5, 5.0),
):
    """OpenRLHF's PolicyLoss and KL loss (models/loss.py, models/utils.py), written out for one batch."""
    ratio, other = np.clip(rows.policy - rows.old, -20, 20), rows.old - rows.sampled
    lengths = rows.mask.sum(1, keepdims=True)
    if gspo:
        ratio = ((rows.policy - (rows.sampled if correction else rows.old)) * rows.mask).sum(1, keepdims=True) / lengths
    ratio = np.exp(ratio)
    least = np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)
    if dual is not None:
        least = np.where(advantages < 0, np.maximum(least, dual * advantages), least)
    loss = -least * np.ones((N, T))
    if correction == "tis" and not gspo:
        loss *= np.clip(np.exp(other), *bounds)
    elif correction == "icepop":
        loss *= np.exp(other) * ((np.exp(other) >= bounds[0]) & (np.exp(other) <= bounds[1]))
    elif correction == "seq-mask-tis":
        whole = np.exp((other * rows.mask).sum(1, keepdims=True) / lengths)
        loss *= np.exp(other) * ((whole >= bounds[0]) & (whole <= bounds[1]))
    elif correction in ("token_tv", "seq_kl", "seq_tv"):
        p, q = np.exp(rows.sampled), np.exp(rows.old)
        gate = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)) if correction == "seq_kl" else np.abs(p - q)
        if correction != "token_tv":
            gate = (gate * rows.mask).sum(1, keepdims=True) / lengths
        loss *= np.exp(other) * (gate <= bounds[1])
    change = rows.policy - rows.reference
    estimates = {"k1": change, "k2": change**2 / 2, "k3": np.exp(-change) - 1 + change}
    loss = (loss + (beta * np.clip(estimates[kl], -10, 10) if kl else 0)) * rows.mask
    return (loss.sum(1) / lengths[:, 0]).mean() if gspo else loss.sum() / rows.mask.sum()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_the_loss_is_that_of_openrlhf(tmp_path, estimator):
    rows, loss = made_rows(), "--algo.kl.use_loss --algo.kl.estimator k2 --actor.eps_clip_low_high 0.2 0.27"
    config, _ = command(tmp_path, loss, estimator=estimator)
    advantages = their_advantages(rows, estimator)
    np.testing.assert_allclose(our_advantages(config, rows).reshape(N, -1) * rows.mask, advantages, rtol=1e-6)
    np.testing.assert_allclose(our_loss(config, rows)[0], their_loss(rows, advantages, high=0.27, kl="k2"), rtol=1e-6)
    if estimator == "reinforce_baseline":
        config, _ = command(tmp_path, "--algo.advantage.no_std_norm", estimator=estimator)
        np.testing.assert_allclose(
            our_advantages(config, rows), their_advantages(rows, estimator, std=False), rtol=1e-6
        )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("correction", ["tis", "icepop", "seq-mask-tis"])
def test_the_corrections_are_those_of_openrlhf(tmp_path, correction):
    flags = (
        f"--algo.kl.init_coef 0 --algo.advantage.is_correction_enable --algo.advantage.is_correction_type {correction}"
    )
    config, _ = command(tmp_path, flags, "--algo.advantage.is_correction_threshold 0.6 2.0 --actor.dual_clip 3.0")
    rows = made_rows()
    theirs = their_loss(rows, their_advantages(rows, "group_norm"), dual=3.0, correction=correction, bounds=(0.6, 2.0))
    np.testing.assert_allclose(our_loss(config, rows)[0], theirs, rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("flags", "correction", "bounds"),
    [
        ("token --algo.advantage.is_correction_mode clip", "tis", "0.6 2.0"),
        ("token", "icepop", "0.6 2.0"),
        ("token", "icepop", "2.0"),
        ("seq", "seq-mask-tis", "0.6 2.0"),
        ("token --algo.advantage.is_correction_gating tv", "token_tv", "0.3"),
        ("seq --algo.advantage.is_correction_gating binary_kl", "seq_kl", "0.2"),
        ("seq --algo.advantage.is_correction_gating tv", "seq_tv", "0.3"),
    ],
)
def test_the_corrections_of_the_newest_openrlhf(tmp_path, flags, correction, bounds):
    """Those of 0.11.2, which names the unit, what becomes of it, and what is measured (FlashREINFORCE: seq_kl)."""
    said = f"--algo.kl.init_coef 0 --algo.advantage.is_correction_level {flags}"
    config, _ = command(tmp_path, said, f"--algo.advantage.is_correction_threshold {bounds} --actor.dual_clip 3.0")
    rows, (*low, high) = made_rows(), map(float, bounds.split())
    limits = (low[0] if low else 0.0, high)
    theirs = their_loss(rows, their_advantages(rows, "group_norm"), dual=3.0, correction=correction, bounds=limits)
    np.testing.assert_allclose(our_loss(config, rows)[0], theirs, rtol=1e-6)
    whole = their_loss(rows, their_advantages(rows, "group_norm"), dual=3.0, correction="token_tv", bounds=(0.0, 2.0))
    assert abs(theirs - whole) > 1e-3  # something is left out, or cut


@pytest.mark.usefixtures("x64")
def test_means_and_gradients_of_the_newest_openrlhf(tmp_path):
    rows = made_rows()
    advantages = their_advantages(rows, "group_norm")
    config, _ = command(tmp_path, "--actor.loss_agg_mode seq-mean-token-mean --algo.kl.init_coef 0")
    lengths = rows.mask.sum(1)
    ratio = np.exp(rows.policy - rows.old)
    loss = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages) * rows.mask
    np.testing.assert_allclose(our_loss(config, rows)[0], (loss.sum(1) / lengths).mean(), rtol=1e-6)
    config, text = command(tmp_path, "--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.unbiased_gradient")
    assert (config.algorithm.kl, config.algorithm.kl_in_reward) == ("k2", False)
    assert "unknown" not in text


@pytest.mark.usefixtures("x64")
def test_gspo_of_openrlhf(tmp_path):
    rows = made_rows()
    advantages = their_advantages(rows, "group_norm")
    config, _ = command(tmp_path, "--actor.policy_loss_type gspo --algo.kl.init_coef 0")
    np.testing.assert_allclose(our_loss(config, rows)[0], their_loss(rows, advantages, gspo=True), rtol=1e-6)
    config, _ = command(
        tmp_path, "--actor.policy_loss_type gspo --algo.kl.init_coef 0 --algo.advantage.is_correction_enable"
    )
    assert config.algorithm.old_logps == "sampler"
    ours = our_loss(config, rows, old=rows.sampled)[0]
    np.testing.assert_allclose(ours, their_loss(rows, advantages, gspo=True, correction="tis"), rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_gae_of_openrlhf(tmp_path):
    config, _ = command(tmp_path, "--algo.advantage.lambd 0.95 --critic.value_clip 0.3", estimator="gae")
    algorithm = config.algorithm
    assert (algorithm.name, algorithm.advantage) == ("ppo", "ppo(gamma=1.0, lam=0.95, ddof=0)")
    assert (algorithm.beta, algorithm.kl, algorithm.kl_in_reward) == (0.02, "k1", True)
    assert (config.critic.epsilon, config.critic.learning_rate, config.critic.schedule) == (0.3, 9e-6, "cosine")
    assert algorithm.reward_clip == (-10.0, 10.0)
    assert (config.critic.min_lr_ratio, config.critic.warmup_steps) == (0.1, 0)
    config, _ = command(tmp_path, "--critic.lr_scheduler cosine --critic.freezing_steps 2", estimator="gae")
    assert (config.critic.min_lr_ratio, config.critic.warmup_steps) == (0.0, 3)  # of the steps 0, 1 and 2
    rng = np.random.default_rng(0)
    rewards, values, mask = rng.normal(size=(N, T)), rng.normal(size=(N, T)), made_rows().mask
    kept, last, raw = values * mask, np.zeros(N), np.zeros((N, T))
    for t in reversed(range(T)):
        following = kept[:, t + 1] if t + 1 < T else 0.0
        last = (rewards * mask)[:, t] + following - kept[:, t] + 0.95 * last
        raw[:, t] = last
    mean = (raw * mask).sum() / mask.sum()
    theirs = (raw - mean) / np.sqrt(((raw - mean) ** 2 * mask).sum() / mask.sum()) * mask
    np.testing.assert_allclose(ppo_advantages(rewards, values, mask, lam=0.95, ddof=0)[0], theirs, rtol=1e-6)


def test_what_is_not_here_is_said(tmp_path):
    flags = "--reward.normalize_enable --reward.stop_properly_penalty_coef 0.5 --train.enable_ema --frob 3"
    _, text = command(tmp_path, flags, "--train.async_enable --train.agent_func_path agent.py", estimator="rloo")
    text = " ".join(text.split())
    for said in (
        "reward.normalize_enable has no equivalent",
        "stop_properly_penalty_coef = 0.5 multiplies",
        "train.enable_ema has no equivalent",
        "frob is no known key",
        "corrected for here, by token_truncate",
        "agent.py: an agent is an environment here",
        "after the baseline; here it is taken off the score before",
        "rewards.functions",
    ):
        assert said in text, said
    with pytest.raises(ConfigError, match="the command is train_prm, which has no equivalent; there are train_ppo_ray"):
        command(tmp_path, text=FORMER.replace("train_dpo", "train_prm"))
    _, text = command(tmp_path, estimator="reinforce_max")
    assert "algo.advantage.estimator = 'reinforce_max' is left out" in " ".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["group_norm", "gae", "dpo", "sft"])
def test_two_steps_of_training(tmp_path, kind):
    small = {"batch.prompts": 4, "model.dtype": "auto", "rollout.max_prompt_length": 40}
    rows = [{"question": f"{i} 2 1", "answer": f"{i}", "good": f"{i} 1", "bad": f"2 {i}"} for i in range(8)]
    if kind in ("dpo", "sft"):
        text = FORMER.replace("train_dpo", f"train_{kind}").replace("--apply_chat_template", "")
        more = "--input_key question --output_key answer" if kind == "sft" else "--prompt_key question"
        config, _ = command(tmp_path, more, text=text.replace("a/b,c/d --dataset_probs 0.25,0.75", "a/b"))
    else:
        config, _ = command(tmp_path, estimator=kind)
    history = two_steps(config, tmp_path, rows, **small)
    assert len(history) == 2
    assert all(np.isfinite(step["loss"]) for step in history)
