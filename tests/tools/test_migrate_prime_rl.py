"""Configurations of prime-rl become ours: values, files over files, formulas, two steps of training."""

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, assign
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.tools.migrate import migrate
from jaxrl_llm.training.optimizers import learning_rate_schedule
from jaxrl_llm.training.setup.specs import optimizer_spec
from tests.tools.migrated_runs import K, N, made_rows, our_advantages, our_loss, two_steps

RL = """
max_steps = 20
seq_len = 2048
[model]
name = "Qwen/Qwen3-0.6B"
[deployment]
num_train_gpus = 4
num_infer_gpus = 2
[monitors.wandb]
project = "reverse"
name = "text"
[run]
name = "first"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
temperature = 0.9
max_completion_tokens = 128
[orchestrator.train.sampling.extra_body]
min_p = 0.05
chat_template_kwargs = { enable_thinking = false }
[[orchestrator.train.source]]
name = "reverse-text"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
[orchestrator.train.source.env.agent.harness]
id = "null"
[orchestrator.eval]
interval = 5
num_examples = 64
skip_first_step = true
[orchestrator.eval.sampling]
temperature = 0.5
[[orchestrator.eval.source]]
env = { taskset = { id = "reverse-text" } }
[trainer.model]
dp_replicate = 2
[trainer.model.lora]
rank = 8
[trainer.optim]
lr = 3e-6
[ckpt]
interval = 10
keep_last = 3
[inference]
MORE
"""
SFT = """
max_steps = 40
[model]
name = "Qwen/Qwen3-0.6B"
[data]
name = "rows.jsonl"
seq_len = 64
batch_size = 8
seed = 3
[optim]
lr = 2e-5
max_norm = "None"
[scheduler]
type = "linear"
warmup_steps = 4
decay_steps = 6
MORE
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rl(tmp_path, more=""):
    """The configuration of the file with further sections, and its text."""
    (tmp_path / "rl.toml").write_text(RL.replace("MORE", more))
    return migrate("rl.toml", output="config.py")


def sft(tmp_path, more=""):
    (tmp_path / "sft.toml").write_text(SFT.replace("MORE", more))
    return migrate("sft.toml", output="config.py")


def written(file, text):
    file.write_text(text)
    return str(file)


def test_a_file_of_rl(tmp_path):
    config, text = rl(tmp_path)
    (tmp_path / "config.py").write_text(text)
    assert load_config_file("config.py").to_dict() == config.to_dict()
    assert "unknown key" not in text and "no known key" not in text
    assert (config.model.path, config.model.tokenizer, config.total_steps) == ("Qwen/Qwen3-0.6B", None, 20)
    assert (config.batch.prompts, config.rollout.group_size) == (8, 16), "128 completions, 16 of each prompt"
    assert (config.rollout.max_prompt_length, config.rollout.max_completion_length) == (2048, 2048)
    assert (config.rollout.temperature, config.rollout.min_p, config.rollout.staleness) == (0.9, 0.05, 1)
    assert config.data.chat_template_kwargs == "enable_thinking=False"
    assert config.data.path == "task:verifiers(taskset='reverse-text')" == config.data.eval_path
    assert config.environment.agent == (
        "verifiers(taskset='reverse-text', env={'agent': {'harness': {'id': 'null'}, 'sampling': {'max_tokens': 128}}})"
    )
    assert config.rewards.functions == ("environment",)
    assert (config.eval.every, config.eval.prompts, config.eval.at_start) == (5, 64, False)
    assert (config.eval.greedy, config.eval.temperature) == (False, 0.5)
    assert (config.mesh.data, config.mesh.fsdp) == (2, -1)
    assert (config.lora.rank, config.lora.alpha, "experts" in config.lora.targets) == (8, 32.0, True)
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (3e-6, 0.01)
    assert (config.checkpoint.every, config.checkpoint.keep, config.output_dir) == (10, 3, "outputs/first")
    assert (config.logging.project, config.logging.run_name) == ("reverse", "text")
    assert "orchestrator.max_off_policy_steps = 8 bounds how far" in text


def test_files_over_files_and_flags_over_both(tmp_path):
    """`@` after a section is a file of that section; numbers count tables."""
    (tmp_path / "base.toml").write_text(RL.replace("MORE", ""))
    (tmp_path / "over.toml").write_text('[orchestrator]\nbatch_size = 64\n[model]\nname = "mine"\n')
    (tmp_path / "trainer.toml").write_text("[optim]\nlr = 1e-4\nweight_decay = 0.0\n")
    (tmp_path / "run.sh").write_text(
        "STEPS=7\nuv run rl @ base.toml @ over.toml --trainer @ trainer.toml --max-steps $STEPS "
        "--trainer.optim.lr=5e-5 "
        "--orchestrator.train.source.0.group-size 8 --trainer.model.lora.target-modules q_proj v_proj "
        "--no-orchestrator.train.filter-zero-advantages --clean\n"
    )
    config, text = migrate("run.sh", output="config.py")
    assert (config.model.path, config.total_steps) == ("mine", 7)
    assert (config.batch.prompts, config.rollout.group_size) == (8, 8), "64 completions, 8 of each prompt"
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (5e-5, 0.0)
    assert (config.lora.targets, config.algorithm.filter_zero_advantages) == (("q_proj", "v_proj"), False)
    assert "trainer.optim.lr" in text
    (tmp_path / "run.sh").write_text("uv run rl @ base.toml @ absent.toml\n")
    assert "absent.toml, which is not there" in migrate("run.sh", output="config.py")[1]


def test_several_tasksets_have_agents_of_their_own(tmp_path):
    config, text = rl(
        tmp_path,
        '[[orchestrator.train.source]]\nratio = 3.0\nenv = { taskset = { id = "wordle", hard = true } }\n'
        'algo = { type = "max_rl" }\n',
    )
    first, second = config.data.sources
    assert (first["path"], first["weight"]) == ("task:verifiers(taskset='reverse-text')", 1.0)
    assert second["path"] == "task:verifiers(taskset={'id': 'wordle', 'hard': True}, agent='wordle')"
    assert second["weight"] == 3.0 and config.environment.agents[0].startswith("wordle=verifiers(taskset={'id': 'word")
    assert "reverse-text" in config.environment.agent
    assert "algo = {'type': 'max_rl'} is of its rows alone" in text


def test_what_is_no_training_is_refused(tmp_path):
    served = '[orchestrator.algo]\ntype = "sft"\nsampling = { source = { name = "m", base_url = "http://m/v1" } }\n'
    with pytest.raises(ConfigError, match=r"algo\.type = sft learns what a served model answers"):
        rl(tmp_path, served)
    (tmp_path / "eval.toml").write_text('model = "m"\n[sampling]\ntemperature = 1.0\n')
    with pytest.raises(ConfigError, match="none of the sections orchestrator, trainer, optim and data"):
        migrate("eval.toml")
    (tmp_path / "broken.toml").write_text("[data\n")
    with pytest.raises(ConfigError, match=r"broken\.toml cannot be read: .*line 1"):
        migrate("broken.toml")
    with pytest.raises(ConfigError, match=r"data\.type = fake are random tokens"):
        migrate(written(tmp_path / "fake.toml", '[data]\ntype = "fake"\n'))


def their_advantages(rows, kind):
    """Of prime-rl's `grpo` and `max_rl`, written out."""
    scores = rows.rewards.reshape(-1, K)
    advantages = scores - scores.mean(1, keepdims=True)
    if kind == "max_rl":
        mean = scores.mean(1, keepdims=True)
        advantages = np.where(mean > 0, advantages / np.where(mean > 0, mean, 1.0), 0.0)
    return advantages.reshape(N, 1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["grpo", "max_rl"])
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ({}, ""),
        ({"low": 0.05, "high": 0.1, "kl": 0.02}, "dppo_mask_low = 0.05\ndppo_mask_high = 0.1\nkl_tau = 0.02\n"),
        ({"ipo": 0.08}, 'type = "ipo"\nipo_threshold = 0.08\n'),
        ({"tau": 0.5}, "adv_tau = 0.5\n"),
    ],
)
def test_loss_and_advantages_are_those_of_prime_rl(tmp_path, kind, loss, said):
    """The sum over tokens that are trained on, by their number; the ratio is with the sampler's log-probs."""
    config, text = rl(tmp_path, f'[orchestrator.algo]\ntype = "{kind}"\n[trainer.loss]\n{said}')
    rows = made_rows()
    rows.rewards = np.abs(rows.rewards)
    rows.sampled = rows.policy + 0.3 * (rows.sampled - rows.policy)
    tau = loss.get("tau", 1.0)
    advantages = tau * np.broadcast_to(their_advantages(rows, kind), rows.mask.shape)
    if kind == "max_rl" and tau != 1:
        assert "loss.adv_tau: max_rl divides by the mean reward" in text and config.rewards.weights == ()
        return
    assert config.rewards.weights == ((tau,) if tau != 1 else ())
    change = rows.policy - rows.sampled
    moved = np.exp(rows.policy) - np.exp(rows.sampled)
    if "ipo" in loss:
        dropped = np.abs(moved) > loss["ipo"]
    else:
        dropped = np.where(advantages > 0, moved > loss.get("high", 0.2), moved < -loss.get("low", 0.2))
    each = -np.where(dropped, 0.0, advantages * np.exp(change)) + loss.get("kl", 1e-3) * change**2
    rows.rewards = tau * rows.rewards  # as weights of rewards
    np.testing.assert_allclose(our_advantages(config, rows).reshape(N, -1)[:, :1], advantages[:, :1], rtol=1e-6)
    np.testing.assert_allclose(
        our_loss(config, rows, old=rows.sampled)[0], (each * rows.mask).sum() / rows.mask.sum(), rtol=1e-6
    )


def test_matmuls_in_eight_bits(tmp_path):
    """The ratio of the loss is with the sampler's log-probs, which corrects for them."""
    config, text = rl(tmp_path, '[trainer.model.quantization]\ntype = "fp8"\n')
    assert config.model.matmul_dtype == "fp8" and "is left out" not in text
    assert sft(tmp_path, '[model.quantization]\ntype = "mxfp8"\n')[0].model.matmul_dtype == "fp8"


def test_other_algorithms(tmp_path):
    teacher = 'teacher = { name = "big", base_url = "http://there:8001/v1" }\n'
    config, _ = rl(tmp_path, f'[orchestrator.algo]\ntype = "opd"\n{teacher}')
    assert config.teacher.path == "server(url='http://there:8001/v1', model='big')"
    assert (config.algorithm.loss, config.algorithm.advantage, config.teacher.coef) == ("opd", "zero", 1.0)
    assert not config.algorithm.filter_zero_advantages, "the signal is the teacher's"
    config, _ = rl(tmp_path, '[orchestrator.algo]\ntype = "echo"\nroles = { tool = { alpha = 0.2 } }\n')
    assert (config.algorithm.observation_coef, config.algorithm.advantage) == (0.2, "group")
    config, text = rl(tmp_path, '[orchestrator.algo]\ntype = "rae"\ndecay = 0.9\n')
    assert config.algorithm.advantage == "rae(decay=0.9)", text
    config, text = rl(tmp_path, '[orchestrator.algo]\ntype = "grpo"\nlength_penalty = { num_turns_weight = 0.3 }\n')
    assert "length_penalty has no equivalent" in text


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_rates_are_those_of_torch_schedules_there(tmp_path, kind):
    more = "min_lr = 1e-6\n" if kind == "linear" else ""
    config, _ = sft(tmp_path, more)
    if kind == "cosine":
        text = SFT.replace('"linear"', '"cosine"').replace("decay_steps = 6\n", "min_lr = 1e-6\n").replace("MORE", "")
        config, _ = migrate(written(tmp_path / "cosine.toml", text), output="config.py")
    steps, peak, least = np.arange(40), 2e-5, 1e-6
    warm = least + (peak - least) * steps / 4
    if kind == "linear":  # constant, and over the last six steps down to the least
        decay = peak + (least - peak) * (steps - 34) / 5
        theirs = np.where(steps < 4, warm, np.where(steps < 34, peak, decay))
    else:
        decay = least + (peak - least) * (1 + np.cos(np.pi * (steps - 4) / 36)) / 2
        theirs = np.where(steps < 4, warm, decay)
    ours = learning_rate_schedule(optimizer_spec(config))
    np.testing.assert_allclose([float(ours(step)) for step in steps], theirs, rtol=1e-5)


def test_a_file_of_sft_trains(tmp_path):
    config, text = sft(tmp_path)
    assert "unknown key" not in text and "no known key" not in text
    assert (config.algorithm.name, config.data.max_length, config.data.packing) == ("sft", 64, True)
    assert (config.batch.prompts, config.seed, config.optimizer.max_grad_norm) == (8, 3, 0.0)
    metrics = two_steps(
        config, tmp_path, [{"prompt": f"sort:{n}=", "completion": f"{n}"} for n in range(120, 152)],
        **{"optimizer.schedule": "constant", "optimizer.decay_steps": 0, "batch.prompts": 2},
    )  # fmt: skip
    assert [np.isfinite(step["loss"]) for step in metrics] == [True, True]


def test_a_file_of_rl_trains(tmp_path):
    """With a reward in place of the taskset, whose package is not here."""
    config, _ = rl(tmp_path)
    for key in ("environment.agent", "data.eval_path"):
        assign(config, key, None)
    metrics = two_steps(
        config, tmp_path, [{"prompt": f"sort:{n}=", "answer": f"{n}"} for n in range(120, 136)],
        **{"rewards.functions": ("exact_match",), "rollout.group_size": 4, "batch.prompts": 2, "rollout.min_p": 0.0,
           "data.chat_template_kwargs": "", "lora.targets": ("q_proj",), "rollout.staleness": 0,
           "rollout.mesh": None},
    )  # fmt: skip
    assert [np.isfinite(step["loss"]) for step in metrics] == [True, True]
