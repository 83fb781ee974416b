"""Command lines and scripts of Tunix become configurations: values, units, defaults, formulas, two steps."""

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.tools.migrate import migrate
from tests.tools.migrated_runs import K, N, T, made_rows, our_advantages, our_loss, two_steps

GSM8K = """
model_config: {model_name: qwen3-1.7b-base, model_id: Qwen/Qwen3-1.7B-Base, model_source: huggingface, rng_seed: 42}
actor_model_config:
  lora_config: {rank: 64, alpha: 32.0, module_path: ".*q_einsum|.*kv_einsum|.*gate_proj|.*attn_vec_einsum"}
  mesh: {shape: "(2,4)", axis_names: "('fsdp','tp')"}
rollout_model_config: {mesh: null, same_mesh_as: actor}
tokenizer_config: {tokenizer_type: huggingface, tokenizer_path: Qwen/Qwen3-1.7B-Base, add_bos: false}
dataset_name: gsm8k
rl_training_config:
  actor_optimizer_config: {opt_type: adamw, schedule_type: warmup_cosine_decay_schedule, peak_value: 3e-6,
    init_value: 0.0, end_value: 3e-7, b1: 0.9, b2: 0.99, weight_decay: 0.1, max_grad_norm: 0.1}
  eval_every_n_steps: 10
  mini_batch_size: 4
  train_micro_batch_size: 2
  checkpoint_root_directory: /tmp/tunix
  checkpointing_options: {save_interval_steps: 500, max_to_keep: 4}
rollout_config: {total_generation_steps: 512, max_prompt_length: 128, temperature: 0.9, top_p: 1.0, top_k: null,
  eos_tokens: [1, 106], return_logprobs: true}
grpo_config: {num_generations: 4, beta: 0.08, epsilon: 0.2}
reward_functions: [rewards.py]
"""
COMMAND = r"""
num_batches=${num_batches:-100}
max_steps_float=$(awk "BEGIN {print $num_batches * 2 * 0.5}")
max_steps=$(printf "%.0f" "$max_steps_float")
python3 -m tunix.cli.grpo_main tunix/cli/base_config.yaml override_config_file=gsm8k.yaml batch_size=8 \
  num_batches=$num_batches train_fraction=0.5 rl_training_config.max_steps=$max_steps \
  rl_training_config.actor_optimizer_config.warmup_steps=$(awk "BEGIN {printf \"%.0f\", 0.1 * $max_steps}") \
  rl_training_config.actor_optimizer_config.decay_steps=$max_steps OTHER "$@"
"""
REWARDS = """
def right(prompts, completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions)]


def _inner():
    pass


def brief(prompts, completions, **columns):
    return [-0.01 * len(c) for c in completions]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)


def command(tmp_path, *more, yaml=GSM8K):
    """The configuration of the command, with further words, and the text of its file."""
    (tmp_path / "gsm8k.yaml").write_text(yaml)
    (tmp_path / "run.sh").write_text(COMMAND.replace("OTHER", " ".join(more)))
    return migrate("run.sh", output="config.py")


def written(tmp_path, text, **said):
    (tmp_path / "a.py").write_text(text)
    return migrate("a.py", output="config.py", **said)


def test_a_command_line(tmp_path):
    config, text = command(tmp_path)
    (tmp_path / "config.py").write_text(text)
    assert load_config_file("config.py").to_dict() == config.to_dict()
    assert (config.model.path, config.model.tokenizer, config.seed) == ("Qwen/Qwen3-1.7B-Base", None, 42)
    assert (config.lora.rank, config.lora.alpha) == (64, 32.0)
    assert config.lora.targets == ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj")
    assert (config.mesh.fsdp, config.mesh.tensor) == (2, 4)
    # The sampler has the trainer's weights, so each update of 4 of the 8 prompts has samples of its own policy.
    assert (config.batch.prompts, config.batch.minibatches, config.batch.microbatch_rows) == (4, 1, 8)
    assert "the 8 prompts of a batch are 2 steps here" in " ".join(text.split())
    assert (config.total_steps, config.checkpoint.every, config.checkpoint.keep) == (100, 500, 4)
    optimizer = config.optimizer
    assert (optimizer.schedule, optimizer.schedule_steps, optimizer.warmup_steps) == ("cosine", 100, 10)
    assert (optimizer.learning_rate, optimizer.min_lr_ratio) == (3e-6, pytest.approx(0.1))
    assert (optimizer.b2, optimizer.weight_decay, optimizer.no_decay) == (0.99, 0.1, ())
    # The command line of Tunix gives max_grad_norm to no optimizer.
    assert optimizer.max_grad_norm == 0.0
    assert "max_grad_norm = 0.1 clips nothing there" in " ".join(text.split())
    assert (config.data.path, config.data.name, config.data.split) == ("openai/gsm8k", "main", "train[:400]")
    assert (config.rollout.temperature, config.rollout.top_k, config.rollout.stop_token_ids) == (0.9, 0, (1, 106))
    assert (config.algorithm.old_logps, config.algorithm.kl) == ("sampler", "k1")
    assert config.rewards.functions == ("rewards.py:brief", "rewards.py:right")
    assert config.output_dir == "/tmp/tunix"


def test_a_sampler_of_its_own_serves_all_updates_of_a_batch(tmp_path):
    config, _ = command(tmp_path, "rollout_engine=vllm")
    assert (config.batch.prompts, config.batch.minibatches, config.batch.microbatch_rows) == (8, 2, 8)
    # Tunix counts updates: 100 are 50 steps, 500 are 250.
    assert (config.total_steps, config.checkpoint.every, config.rollout.devices) == (50, 250, 0)
    mesh = "rollout_model_config.mesh"
    config, _ = command(tmp_path, f"{mesh}.shape=\"(2,4)\" {mesh}.axis_names=\"('fsdp','tp')\"")
    assert (config.batch.minibatches, config.rollout.devices, config.rollout.mesh) == (2, 8, "fsdp=2,tensor=4")


def test_without_max_steps_a_batch_of_rows_is_one_update(tmp_path):
    (tmp_path / "a.yaml").write_text(GSM8K + "batch_size: 8\nnum_batches: 50\n")
    config, text = migrate("a.yaml", output="config.py")
    assert (config.batch.prompts, config.total_steps) == (4, 50)
    assert "ends after a share of 0.5 of the rows" in " ".join(text.split())
    (tmp_path / "a.yaml").write_text(GSM8K + "batch_size: 8\nrollout_engine: vllm\n")
    assert migrate("a.yaml", output="config.py")[0].num_epochs == 0.5


def test_the_rate_that_optax_gets(tmp_path):
    """Tunix gives learning_rate to the optimizer, where it is set, and the schedule otherwise; and no optimizer an
    argument that it does not have.
    """
    at = "rl_training_config.actor_optimizer_config"
    config, text = command(tmp_path, f"{at}.learning_rate=2e-6 {at}.opt_type=adam")
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps) == (2e-6, "constant", 0)
    assert (optimizer.name, optimizer.b2, optimizer.weight_decay) == ("adamw", 0.99, 0.0)
    assert "warmup_cosine_decay_schedule has no effect there" in " ".join(text.split())
    optimizer = command(tmp_path, f"{at}.opt_type=sgd {at}.momentum=0.5")[0].optimizer
    assert (optimizer.name, optimizer.b1, optimizer.weight_decay) == ("sgd", 0.5, 0.0)


def test_what_is_left_out_is_as_in_its_base_config_unless_the_section_is_replaced(tmp_path):
    config, _ = migrate(
        written_yaml(tmp_path, "model_config: {model_id: a/b}\ngrpo_config: {num_generations: 3}\nbatch_size: 4\n")
    )
    assert (config.optimizer.learning_rate, config.optimizer.b2, config.total_steps) == (1e-5, 0.99, 10)
    assert (config.optimizer.schedule, config.optimizer.warmup_steps) == ("constant", 0)
    assert (config.rollout.top_k, config.algorithm.beta, config.rollout.max_completion_length) == (50, 0.08, 768)
    text = (
        "grpo_config: {num_generations: 3}\nrl_training_config: {max_steps: 7, actor_optimizer_config: {value: 1e-6, "
    )
    config, _ = migrate(written_yaml(tmp_path, text + "opt_type: lion, schedule_type: constant_schedule}}\n"))
    assert (config.optimizer.name, config.optimizer.learning_rate, config.optimizer.b2) == ("lion", 1e-6, 0.99)
    assert (config.optimizer.weight_decay, config.checkpoint.every, config.total_steps) == (1e-3, 0, 7)


def written_yaml(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    return tmp_path / "a.yaml"


SCRIPT = """
import optax
from tunix.rl import rl_cluster
from tunix.rl.grpo.CLASS_learner import NAMEConfig, NAMELearner
from transformers import AutoTokenizer

BETA = 0.04
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")


def right(prompts, completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions)]


rows = source.batch(16)
optimizer = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(optax.schedules.warmup_cosine_decay_schedule(0.0, 2e-6, 4, 40), b2=0.95)
)
cluster = rl_cluster.ClusterConfig(
    role_to_mesh={}, rollout_engine="vanilla", offload_to_cpu=False,
    training_config=rl_cluster.RLTrainingConfig(actor_optimizer=optimizer, eval_every_n_steps=5, max_steps=40),
    rollout_config=base_rollout.RolloutConfig(max_tokens_to_generate=96, max_prompt_length=64, return_logprobs=LOGPS),
)
config = NAMEConfig(num_generations=4, OPTIONS)
NAMELearner(rl_engine=cluster, reward_fns=[right], algo_config=config).train(rows)
"""


def script(tmp_path, name="GRPO", options="beta=BETA", logps="True"):
    text = (
        SCRIPT.replace("CLASS", name.lower()).replace("NAME", name).replace("OPTIONS", options).replace("LOGPS", logps)
    )
    return written(tmp_path, text)


def test_a_script(tmp_path):
    config, text = script(tmp_path)
    assert config.model.path == "Qwen/Qwen3-0.6B"
    assert (config.batch.prompts, config.total_steps, config.rollout.group_size) == (16, 40, 4)
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps, config.optimizer.b2) == (2e-6, 4, 0.95)
    assert (config.optimizer.max_grad_norm, config.optimizer.schedule_steps) == (0.5, 40)
    assert (config.rollout.max_completion_length, config.algorithm.beta) == (96, 0.04)
    assert config.rewards.functions == ("config_functions.py:right",)
    assert "def right" in (tmp_path / "config_functions.py").read_text()
    assert "the script makes the rows in Python" in text


def test_dapo_measures_long_completions_in_characters(tmp_path):
    buffer = "dict(enable=True, overlong_buffer_length=4, overlong_buffer_penalty=0.5, max_response_length=10)"
    config, _ = script(tmp_path, "DAPO", f"overlong_buffer={buffer}")
    assert (config.algorithm.aggregation, config.algorithm.epsilon_high, config.algorithm.beta) == ("token", 0.28, 0.0)
    assert config.rewards.functions == ("config_functions.py:right", "config_functions.py:overlong")
    names = {}
    exec((tmp_path / "config_functions.py").read_text(), names)
    assert names["overlong"](["x" * 6, "x" * 8, "x" * 10]) == [0.0, -0.25, -0.5]


def test_without_log_probs_of_the_sampler_nothing_is_clipped(tmp_path):
    """Tunix's ratio is then that of the policy to itself; one update of a batch has that ratio here too."""
    config, _ = command(tmp_path, "rollout_config.return_logprobs=false rollout_engine=vllm")
    assert config.algorithm.loss == "reinforce"
    config, _ = command(tmp_path, "rollout_config.return_logprobs=false")
    assert config.algorithm.loss == "ppo_clip"


def theirs(rows, mode, *, low=0.2, high=0.2, beta=0.0, kl="kl", dual=None, gspo=False, weights=None, scale=True):
    """Tunix's grpo_loss_fn with its compute_advantages, written out for one batch (algo_core.py, common.py)."""
    groups = rows.rewards.reshape(-1, K)
    spread = groups.std(axis=1, ddof=1, keepdims=True) + 1e-6 if scale else 1.0
    advantages = ((groups - groups.mean(axis=1, keepdims=True)) / spread).reshape(N, 1)
    ratio = np.clip(rows.policy - rows.old, -20, 20)
    if gspo:
        ratio = (ratio * rows.mask).sum(1, keepdims=True) / rows.mask.sum(1, keepdims=True)
    ratio = np.exp(ratio)
    loss = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 1 - low, 1 + high)) * np.ones((N, T))
    if dual is not None:
        loss = np.where(advantages < 0, np.minimum(-dual * advantages, loss), loss)
    loss = loss if weights is None else loss * weights
    change = rows.policy - rows.reference
    estimates = {"kl": change, "mse_kl": change**2 / 2, "low_var_kl": np.exp(-change) + change - 1}
    loss, lengths = (loss + beta * estimates[kl]) * rows.mask, rows.mask.sum(1)
    return {
        "token-mean": loss.sum() / lengths.sum(),
        "sequence-mean-token-mean": (loss.sum(1) / lengths).mean(),
        "sequence-mean-token-scale": (loss.sum(1) / 512).mean(),
        "seq-mean-token-sum": loss.sum(1).mean(),
    }[mode]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "mode", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-scale", "seq-mean-token-sum"]
)
@pytest.mark.parametrize("kl", ["kl", "mse_kl", "low_var_kl"])
def test_the_loss_is_that_of_tunix(tmp_path, mode, kl):
    config, _ = command(tmp_path, f"grpo_config.loss_agg_mode={mode}", f"grpo_config.kl_loss_mode={kl}")
    rows = made_rows()
    np.testing.assert_allclose(our_loss(config, rows)[0], theirs(rows, mode, beta=0.08, kl=kl), rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_other_losses_are_those_of_tunix(tmp_path):
    rows, mean = made_rows(), "sequence-mean-token-mean"
    config, _ = command(tmp_path, "grpo_config.loss_algo=gspo-token", "grpo_config.beta=0.0")
    np.testing.assert_allclose(our_loss(config, rows)[0], theirs(rows, mean, gspo=True), rtol=1e-6)
    config, _ = command(tmp_path, "grpo_config.epsilon_c=1.2", "grpo_config.epsilon_high=0.3", "grpo_config.beta=0.0")
    np.testing.assert_allclose(our_loss(config, rows)[0], theirs(rows, mean, high=0.3, dual=1.2), rtol=1e-6)
    config, _ = command(tmp_path, "grpo_config.sampler_is=token", "grpo_config.beta=null")
    assert config.algorithm.old_logps == "trainer"
    weights = np.minimum(np.exp(rows.old - rows.sampled), 2.0)
    np.testing.assert_allclose(our_loss(config, rows)[0], theirs(rows, mean, weights=weights), rtol=1e-6)
    config, _ = command(tmp_path, "grpo_config.advantage_estimator=drgrpo", "grpo_config.beta=0.0")
    np.testing.assert_allclose(our_loss(config, rows)[0], theirs(rows, mean, scale=False), rtol=1e-6)
    config, _ = command(tmp_path, "grpo_config.advantage_estimator=rloo")
    groups = rows.rewards.reshape(-1, K)
    others = (groups.sum(1, keepdims=True) - groups) / (K - 1)
    np.testing.assert_allclose(our_advantages(config, rows), (groups - others).reshape(-1), rtol=1e-6)


PPO = """
model_config: {model_id: Qwen/Qwen3-0.6B}
batch_size: 4
rl_training_config:
  max_steps: 20
  actor_optimizer_config: {opt_type: adamw, schedule_type: constant_schedule, value: 1e-6}
  critic_optimizer_config: {opt_type: adamw, schedule_type: constant_schedule, value: 1e-5}
ppo_config: {gamma: 1.0, gae_lambda: 0.9, beta: 0.05, epsilon: 0.1, entropy_coef: 0.01, clip_range_value: 0.3}
reward_functions: [rewards.py]
"""


def test_ppo(tmp_path):
    config, text = migrate(written_yaml(tmp_path, PPO))
    algorithm = config.algorithm
    assert (algorithm.name, algorithm.advantage) == ("ppo", "ppo(gamma=1.0, lam=0.9)")
    assert (algorithm.beta, algorithm.kl_in_reward, algorithm.kl) == (0.05, True, "k3")
    assert (algorithm.epsilon_low, algorithm.epsilon_high, algorithm.entropy_coef) == (0.1, 0.1, 0.01)
    assert (config.critic.learning_rate, config.critic.epsilon, config.critic.max_grad_norm) == (1e-5, 0.3, 0.0)
    assert "integers, which cuts their fractions off" in " ".join(text.split())


def test_preferences_and_fine_tuning(tmp_path):
    script = (
        "import optax\nfrom tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig\n"
        "config = DPOTrainingConfig(algorithm='{0}', beta=0.2, lambda_orpo=0.3, max_steps=9, eval_every_n_steps=3, "
        "label_smoothing={1}, gradient_accumulation_steps=4)\n"
        "DPOTrainer(model, ref, optax.sgd(1e-3), config).train(source.batch(2))\n"
    )
    config, _ = written(tmp_path, script.format("dpo", 0.1))
    assert (config.algorithm.loss, config.algorithm.beta) == ("dpo(label_smoothing=0.1)", 0.2)
    assert (config.batch.prompts, config.batch.microbatch_rows, config.total_steps) == (8, 4, 9)
    assert (config.optimizer.name, config.optimizer.learning_rate, config.optimizer.max_grad_norm) == ("sgd", 1e-3, 0.0)
    config, _ = written(tmp_path, script.format("orpo", 0.0))
    assert (config.algorithm.loss, config.algorithm.beta) == ("orpo", 0.3)
    text = (
        "python -m tunix.cli.peft_main base_config.yaml training_config.max_steps=5 batch_size=2 max_target_length=64\n"
    )
    (tmp_path / "run.sh").write_text(text)
    config, _ = migrate("run.sh", output="config.py")
    assert (config.algorithm.name, config.data.path, config.data.eval_split) == (
        "sft",
        "Helsinki-NLP/opus-100",
        "validation",
    )
    assert (config.data.max_length, config.data.overlong, config.total_steps) == (64, "filter", 5)


def test_what_is_not_here_is_said(tmp_path):
    _, text = command(
        tmp_path, "grpo_config.kl_clamp_value=1000.0", "env_class_path=my.envs.Maze", "model_config.mesh.colour=red",
        "rl_training_config.actor_optimizer_config.frobnicate=1", "num_frobs=2",
    )  # fmt: skip
    text = " ".join(text.replace("# ", "").split())
    assert "kl_clamp_value = 1000.0 has no equivalent" in text
    assert "env_class_path = 'my.envs.Maze' has no equivalent: agents and environments are objects" in text
    assert "num_frobs is no known key" in text
    _, text = command(tmp_path, "grpo_config.loss_agg_mode=mean")
    assert "loss_agg_mode = 'mean' is left out" in " ".join(text.split())
    (tmp_path / "a.py").write_text("import tunix\nprint(1)\n")
    with pytest.raises(ConfigError, match="configures no trainer of Tunix"):
        migrate("a.py")
    with pytest.raises(ConfigError, match="the trainer is 'kto', which has no equivalent; there are grpo"):
        migrate(written_yaml(tmp_path, GSM8K), trainer="kto")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "ppo", "sft"])
def test_two_steps_of_training(tmp_path, kind):
    small = {"batch.prompts": 4, "lora.rank": 2, "rewards.functions": (f"{tmp_path}/rewards.py:brief",)}
    if kind == "sft":
        (tmp_path / "run.sh").write_text("python -m tunix.cli.peft_main base_config.yaml batch_size=4\n")
        config, _ = migrate("run.sh", output="config.py")
        rows = [{"translation": {"en": f"{i} 2 1", "fr": f"1 2 {i}"}} for i in range(8)]
    elif kind == "ppo":
        config, _ = migrate(written_yaml(tmp_path, PPO), output="config.py")
        rows = [{"prompt": f"{i} 2 1", "answer": f"{i}"} for i in range(8)]
        small |= {"data.format": "auto", "rollout.max_prompt_length": 24}
    else:
        config, _ = command(tmp_path)
        rows = [{"question": f"{i} 2 1", "answer": f"sum #### {i}"} for i in range(8)]
    history = two_steps(config, tmp_path, rows, **small)
    assert len(history) == 2
    assert all(np.isfinite(step["loss"]) for step in history)
