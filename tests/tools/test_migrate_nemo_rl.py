"""Configurations of NeMo-RL become ours: values, what they build on, formulas, two steps of training."""

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.tools.migrate import migrate
from jaxrl_llm.training.advantages import advantage_rule
from tests.tools.migrated_runs import K, N, T, made_rows, our_advantages, our_loss, two_steps

PARENT = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 200, val_period: 20, max_val_samples: 64}
policy:
  model_name: Qwen/Qwen3-0.6B
  tokenizer: {name: "${policy.model_name}", chat_template_kwargs: {enable_thinking: false}}
  train_global_batch_size: 32
  train_micro_batch_size: 2
  max_total_sequence_length: 512
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, activation_checkpointing: true}
  sequence_packing:
    enabled: true
    train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"
  generation: {max_new_tokens: "${policy.max_total_sequence_length}", temperature: 0.9,
    val_temperature: "${.temperature}", vllm_cfg: {tensor_parallel_size: 1}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 4.0e-6, weight_decay: 0.02, betas: [0.9, 0.99], eps: 1e-8}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 20}}
    - {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 180, eta_min: 4.0e-7}}
    - {milestones: [20]}
loss_fn: {reference_policy_kl_penalty: 0.02, reference_policy_kl_type: k3, ratio_clip_min: 0.2, ratio_clip_max: 0.28}
data:
  max_input_seq_length: "${policy.max_total_sequence_length}"
  train: {dataset_name: gsm8k, split_validation_size: 0.1}
cluster: {gpus_per_node: 4, num_nodes: 2}
logger: {wandb_enabled: true, wandb: {project: mine, name: run}}
"""
CHILD = """
defaults: grpo_parent.yaml
grpo: {num_prompts_per_step: 16}
policy: {generation: {top_k: 40}}
checkpointing: {checkpoint_dir: results/here, save_period: 5}
"""
COMMAND = """
NUM=64
uv run examples/run_grpo.py --config child.yaml policy.train_global_batch_size=$NUM ++grpo.seed=7 OTHER
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo_parent.yaml").write_text(PARENT)
    (tmp_path / "child.yaml").write_text(CHILD)


def command(tmp_path, *more, text=COMMAND, **said):
    """The configuration of the command, with further overrides, and the text of its file."""
    (tmp_path / "run.sh").write_text(text.replace("OTHER", " ".join(more)))
    return migrate("run.sh", output="config.py", **said)


def test_a_command_and_the_files_that_it_builds_on(tmp_path):
    config, text = command(tmp_path)
    (tmp_path / "config.py").write_text(text)
    assert load_config_file("config.py").to_dict() == config.to_dict()
    assert (config.model.path, config.model.tokenizer, config.model.remat) == ("Qwen/Qwen3-0.6B", None, "block")
    assert config.data.chat_template_kwargs == "enable_thinking=False"
    # 64 completions are one update of 64; 2 rows of 512 tokens on each of the 4 pairs of devices.
    assert (config.batch.prompts, config.rollout.group_size, config.batch.minibatches) == (16, 4, 1)
    assert (config.batch.microbatch_tokens, config.mesh.tensor, config.mesh.fsdp) == (4096, 2, -1)
    assert (config.rollout.max_prompt_length, config.rollout.max_completion_length) == (512, 512)
    assert (config.rollout.temperature, config.rollout.top_k, config.eval.temperature) == (0.9, 40, 0.9)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.b2, optimizer.weight_decay) == (4e-6, 0.99, 0.02)
    assert (optimizer.warmup_steps, optimizer.warmup_init) == (20, pytest.approx(4e-7))
    assert (optimizer.schedule, optimizer.schedule_steps, optimizer.no_decay) == ("cosine", 200, ())
    assert optimizer.min_lr_ratio == pytest.approx(0.1)
    assert (config.total_steps, config.seed, config.output_dir) == (200, 7, "results/here")
    assert (config.checkpoint.every, config.eval.every, config.eval.prompts, config.eval.fraction) == (5, 20, 64, 0.1)
    assert (config.data.path, config.data.name) == ("openai/gsm8k", "main")
    assert config.rewards.functions == ("math_accuracy",)
    assert (config.logging.project, config.logging.run_name) == ("mine", "run")
    assert (config.algorithm.advantage, config.algorithm.aggregation) == (
        "group(leave_one_out=True, eps=1e-06)",
        "token",
    )
    names = {}
    exec((tmp_path / "config_functions.py").read_text(), names)
    made = names["prompts"]({"question": "1+1?", "answer": "It is 1+1.\n#### 2"})
    assert made["answer"] == "2"
    assert made["prompt"][0]["content"].startswith("Think step-by-step")
    assert "\n1+1?\n" in made["prompt"][0]["content"]
    yaml, _ = migrate("child.yaml", output="config.py")
    assert (yaml.batch.minibatches, yaml.rollout.top_k) == (2, 40)


def test_a_value_takes_the_place_of_what_it_overrides(tmp_path):
    """A null of a section, a section of a null, and a list of a list."""
    (tmp_path / "middle.yaml").write_text(CHILD + "data: {validation: {dataset_name: gsm8k, split: test}}\n")
    child = "defaults: middle.yaml\ndata: {validation: null, train: {split_validation_size: 0}}\n"
    scheduler = """policy: {scheduler: [
      {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 20}},
      {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 1.0, end_factor: 0.25, total_iters: 150}}]}
    """
    (tmp_path / "child.yaml").write_text(child + scheduler)
    config, _ = migrate("child.yaml", output="config.py")
    assert config.eval.every == -1 and config.data.eval_path is None
    optimizer = config.optimizer
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.schedule_steps) == ("linear", 20, 170)
    assert optimizer.min_lr_ratio == 0.25
    again = "defaults: child.yaml\ndata: {validation: {dataset_name: gsm8k, split: test}}\n"
    (tmp_path / "again.yaml").write_text(again)
    config, _ = migrate("again.yaml", output="config.py")
    assert (config.data.eval_path, config.data.eval_split, config.eval.every) == ("openai/gsm8k", "test", 20)


def test_an_epoch_has_the_rows_of_its_split(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"input": "q", "output": "a"}\n' * 640)
    config, _ = command(tmp_path, "data.train.data_path=rows.jsonl", "'data.train.split=train[:64]'")
    assert (config.data.split, config.eval.fraction, config.total_steps) == ("train[:64]", 0.1, 3)  # of 58 rows


def their_advantages(rows, name="grpo", leave_one_out=True, normalize=True):
    """NeMo-RL's calculate_baseline_and_std_per_prompt and estimators (utils.py, advantage_estimator.py), `[N, T]`."""
    result = np.zeros(N)
    for start in range(0, N, K):
        group = rows.rewards[start : start + K]
        for i in range(K):
            others = np.delete(group, i) if leave_one_out and name == "grpo" else group
            result[start + i] = group[i] - others.mean()
            if normalize and name == "grpo" and others.std() > 0:
                result[start + i] /= others.std(ddof=1) + 1e-6
    result = result.reshape(N, 1) * np.ones((N, T))
    if name == "reinforce_plus_plus":
        mean = (result * rows.mask).sum() / rows.mask.sum()
        variance = ((result - mean) ** 2 * rows.mask).sum() / rows.mask.sum()
        result = (result - mean) / np.sqrt(max(variance, 1e-8))
    return result * rows.mask


def their_loss(
    rows, advantages, *, beta=0.02, kind="k3", low=0.2, high=0.28, dual=None, by="token", token=True, weights=None
):
    """NeMo-RL's ClippedPGLossFn (loss_functions.py) and its gradient by the log-probs, for one batch."""
    log_ratio, lengths = rows.policy - rows.old, rows.mask.sum(1, keepdims=True)
    if by == "sequence":
        log_ratio = (log_ratio * rows.mask).sum(1, keepdims=True) / lengths * np.ones((N, T))
    ratio = np.exp(log_ratio)
    clamped = np.clip(ratio, 1 - low, 1 + high)
    if by == "cispo":
        loss = -advantages * clamped * rows.policy
    elif by == "reinforce":
        loss = -advantages * rows.policy
    else:
        loss = np.maximum(-advantages * ratio, -advantages * clamped)
    if dual is not None:
        loss = np.where(advantages < 0, np.minimum(loss, -advantages * dual), loss)
    loss = loss if weights is None else loss * weights
    change = rows.reference - rows.policy
    kl = {"k1": -change, "k2": change**2 / 2, "k3": np.exp(change) - 1 - change}[kind]
    loss = (loss + beta * kl) * rows.mask
    return loss.sum() / rows.mask.sum() if token else (loss.sum(1) / lengths[:, 0]).mean()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("overrides", "advantage"),
    [
        ("", {}),
        ("grpo.use_leave_one_out_baseline=false", {"leave_one_out": False}),
        ("grpo.normalize_rewards=false", {"normalize": False}),
        (
            "grpo.normalize_rewards=false grpo.use_leave_one_out_baseline=false",
            {"normalize": False, "leave_one_out": False},
        ),
        ("grpo.adv_estimator.name=reinforce_plus_plus", {"name": "reinforce_plus_plus"}),
    ],
)
def test_the_advantages_are_those_of_nemo_rl(tmp_path, overrides, advantage):
    config, _ = command(tmp_path, overrides)
    rows = made_rows()
    ours = our_advantages(config, rows).reshape(N, -1) * rows.mask
    np.testing.assert_allclose(ours, their_advantages(rows, **advantage), rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("overrides", "loss"),
    [
        ("loss_fn.reference_policy_kl_penalty=0", {"beta": 0.0}),
        ("loss_fn.reference_policy_kl_penalty=0 loss_fn.token_level_loss=false", {"beta": 0.0, "token": False}),
        ("loss_fn.reference_policy_kl_penalty=0 loss_fn.ratio_clip_c=2.0", {"beta": 0.0, "dual": 2.0}),
        ("loss_fn.reference_policy_kl_penalty=0 loss_fn.use_cispo=true", {"beta": 0.0, "by": "cispo"}),
        ("loss_fn.reference_policy_kl_penalty=0 loss_fn.disable_ppo_ratio=true", {"beta": 0.0, "by": "reinforce"}),
        (
            "loss_fn.reference_policy_kl_penalty=0 loss_fn.sequence_level_importance_ratios=true "
            "loss_fn.token_level_loss=false",
            {"beta": 0.0, "by": "sequence", "token": False},
        ),
    ],
)
def test_the_loss_is_that_of_nemo_rl(tmp_path, overrides, loss):
    config, _ = command(tmp_path, overrides)
    rows = made_rows()
    np.testing.assert_allclose(our_loss(config, rows)[0], their_loss(rows, their_advantages(rows), **loss), rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("error:algorithm.kl is k1")  # its gradient is not 0 here
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_term_has_the_gradient_of_its_sample_as_in_nemo_rl(tmp_path, kind):
    """On policy, with `exp(x - stop(x))` before the estimate: its gradient is that of the estimate and the estimate."""
    config, _ = command(tmp_path, f"loss_fn.reference_policy_kl_type={kind}")
    rows = made_rows()
    value, gradient = our_loss(config, rows, old=rows.policy)
    rows.old = rows.policy
    advantages = their_advantages(rows)
    np.testing.assert_allclose(value, their_loss(rows, advantages, kind=kind), rtol=1e-6)
    change = rows.reference - rows.policy
    estimate = {"k1": -change, "k2": change**2 / 2, "k3": np.exp(change) - 1 - change}[kind]
    slope = {"k1": np.ones((N, T)), "k2": -change, "k3": 1 - np.exp(change)}[kind]
    theirs = (-advantages + 0.02 * (slope + estimate)) * rows.mask / rows.mask.sum()
    np.testing.assert_allclose(gradient, theirs, rtol=1e-6, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["null", "tis", "icepop", "seq-mask-tis"])
def test_the_corrections_are_those_of_nemo_rl(tmp_path, kind):
    at = "loss_fn.truncated_importance_sampling"
    bounds = "" if kind == "null" else f"{at}_ratio=2.0 {at}_ratio_min=0.6"
    config, _ = command(
        tmp_path, "loss_fn.use_importance_sampling_correction=true loss_fn.reference_policy_kl_penalty=0",
        f"{at}_type={kind} {bounds}",
    )  # fmt: skip
    rows = made_rows()
    weights = np.exp(rows.old - rows.sampled)
    if kind == "tis":
        weights = np.clip(weights, 0.6, 2.0)
    elif kind == "icepop":
        weights = np.where((weights >= 0.6) & (weights <= 2.0), weights, 0.0)
    elif kind == "seq-mask-tis":
        whole = np.exp(((rows.old - rows.sampled) * rows.mask).sum(1) / rows.mask.sum(1))
        weights = weights * ((whole >= 0.6) & (whole <= 2.0))[:, None]
    theirs = their_loss(rows, their_advantages(rows), beta=0.0, weights=weights)
    np.testing.assert_allclose(our_loss(config, rows)[0], theirs, rtol=1e-6)


OFFLINE = """
KIND: {SETTINGS max_num_steps: 30, val_period: 5}
policy: {model_name: Qwen/Qwen3-0.6B, train_global_batch_size: 16, train_micro_batch_size: 2,
  max_total_sequence_length: 64}
data: {train: {data_path: rows.jsonl, input_key: question, output_key: answer}, default: {prompt_file: null}}
MORE
"""


def offline(tmp_path, kind, settings="", more=""):
    text = OFFLINE.replace("KIND", kind).replace("SETTINGS", settings).replace("MORE", more)
    (tmp_path / "a.yaml").write_text(text)
    return migrate("a.yaml", output="config.py")


def test_evaluations_are_refused(tmp_path):
    """A configuration of GRPO came of them."""
    (tmp_path / "a.yaml").write_text(
        "eval: {metric: pass@k, num_tests_per_prompt: 4}\ngeneration: {model_name: m}\ncluster: {gpus_per_node: 1}\n"
    )
    with pytest.raises(ConfigError, match="evaluates and trains nothing"):
        migrate(str(tmp_path / "a.yaml"), system="nemo-rl")


def test_teachers_of_other_vocabularies_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"projection matrices .* teacher\.form=uld"):
        offline(tmp_path, "distillation", more="teachers: [{model_name: m, projection_matrix_path: p.pt}]")


def test_other_algorithms(tmp_path):
    config, _ = offline(tmp_path, "dpo", "reference_policy_kl_penalty: 0.1, sft_loss_weight: 0.5,")
    assert (config.algorithm.name, config.algorithm.loss, config.algorithm.beta) == ("preference", "dpo+sft", 0.1)
    assert (config.algorithm.loss_weights, config.batch.prompts) == ((1.0, 0.5), 16)
    assert (config.batch.microbatch_rows, config.optimizer.eps, config.optimizer.warmup_steps) == (4, 1e-5, 20)
    config, text = offline(tmp_path, "dpo", "preference_average_log_probs: true, sft_loss_weight: 0.5,")
    assert config.algorithm.loss == "sigmoid_norm+sft" and "no equivalent" not in text
    config, _ = offline(tmp_path, "sft")
    assert (config.algorithm.name, config.data.max_length, config.total_steps) == ("sft", 64, 30)
    config, _ = offline(tmp_path, "rm")
    assert config.algorithm.name == "reward_model"
    assert (config.data.overlong, config.logging.project) == ("filter", "rm-dev")
    assert config.data.chat_template.startswith("{{- bos_token }}")
    config, _ = offline(tmp_path, "rm", more="policy.megatron_cfg: {enabled: true}")
    assert (config.mesh.tensor, config.optimizer.learning_rate, config.optimizer.b2) == (2, 2e-6, 0.98)
    teacher = "teacher: {model_name: Qwen/Qwen3-4B}\nloss_fn: {kl_type: reverse}"
    config, _ = offline(tmp_path, "distillation", "topk_logits_k: 8,", teacher)
    assert (config.teacher.path, config.teacher.form, config.teacher.beta) == ("Qwen/Qwen3-4B", "divergence", 1.0)
    assert (config.teacher.top_k, config.algorithm.advantage) == (8, "zero")
    assert (config.mesh.tensor, config.mesh.context, config.model.remat) == (2, 2, "block")


GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("good", "bad"))
ASKED = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("kind", "data", "row", "made"),
    [
        (
            "dpo", "data_path: a, prompt_key: p", {"p": "q", "chosen": "good", "rejected": "bad"},
            {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        ),
        (
            "rm", "data_path: a",
            {"context": ASKED, "completions": [{"rank": 1, "completion": BAD}, {"rank": 0, "completion": GOOD}]},
            {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        ),
        (
            "dpo", "dataset_name: HelpSteer3",
            {"context": "q", "response1": "bad", "response2": "good", "overall_preference": 2},
            {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        ),
        (
            "dpo", "dataset_name: Tulu3Preference", {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
            {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        ),
        (
            "sft", "dataset_name: squad", {"context": "c", "question": "q", "answers": {"text": ["good", "x"]}},
            {"messages": [{"role": "system", "content": "c"}, *ASKED, *GOOD]},
        ),
        ("sft", "data_path: a, prompt_file: p.txt", {"input": "1", "output": "good"}, {"messages": ASKED + GOOD}),
        ("sft", "dataset_name: tulu3_sft_mixture", {"messages": ASKED + GOOD}, {"messages": ASKED + GOOD}),
    ],
)  # fmt: skip
def test_rows_of_nemo_rl(tmp_path, kind, data, row, made):
    (tmp_path / "p.txt").write_text("q")  # a prompt without a place for the question
    (tmp_path / "a.yaml").write_text(
        f"{kind}: {{max_num_steps: 3}}\npolicy: {{train_global_batch_size: 4}}\ndata: {{train: {{{data}}}}}\n"
    )
    config, _ = migrate("a.yaml", output="config.py")
    names = {}
    exec((tmp_path / "config_functions.py").read_text(), names)
    assert names[config.data.format.rpartition(":")[2]](row) == made


def test_evaluations_of_nemo_rl(tmp_path):
    text = "sft: {max_num_steps: 30, val_start_at: 20}\npolicy: {model_name: a/b}\ncheckpointing: {keep_top_k: null}\n"
    (tmp_path / "a.yaml").write_text(text)
    config, _ = migrate("a.yaml", output="config.py")
    assert (config.data.path, config.data.eval_path, config.data.eval_split) == (
        "rajpurkar/squad",
        "rajpurkar/squad",
        "validation",
    )
    assert (config.eval.every, config.eval.start, config.checkpoint.keep_every) == (10, 20, 1)
    (tmp_path / "a.yaml").write_text(text + "data: {validation: null}\n")
    assert migrate("a.yaml", output="config.py")[0].eval.every == -1
    config, _ = command(tmp_path, "data.train.split_validation_size=64")
    assert (config.data.split, config.data.eval_split) == ("train[64:]", "train[:64]")
    assert config.eval.every == 20
    more = "grpo.async_grpo.enabled=true grpo.max_num_epochs=3 grpo.max_num_steps=500 grpo.max_val_samples=null"
    config, text = command(tmp_path, more, "on_policy_distillation.enabled=true", rows=1600)
    assert config.total_steps == 90  # it goes once over the rows that are not held out
    assert "on_policy_distillation.enabled = True has no equivalent" in " ".join(text.split())
    text = "ppo: {async_ppo: {enabled: true}, max_num_epochs: -1, max_num_steps: 500}\npolicy: {model_name: a/b}\n"
    (tmp_path / "a.yaml").write_text(text)
    assert migrate("a.yaml", output="config.py", rows=640)[0].total_steps == 500


def test_experts_and_reward_models_of_nemo_rl(tmp_path):
    at, model = "policy.megatron_cfg", "policy.model_name=Qwen/Qwen3-30B-A3B policy.tokenizer.name=Qwen/Qwen3-30B-A3B"
    config, _ = command(tmp_path, model)
    assert (config.model.freeze_router, config.model.router_aux_loss_coef) == (False, 0.0)
    config, _ = command(tmp_path, model, f"{at}.enabled=true")
    assert (config.model.freeze_router, config.model.router_aux_loss_coef) == (True, 0.0)
    config, _ = command(tmp_path, model, f"{at}.enabled=true {at}.moe_router_load_balancing_type=aux_loss")
    assert config.model.router_aux_loss_coef is None
    fp8 = f"{at}.fp8_cfg.enabled=true {at}.fp8_cfg.fp8=hybrid {at}.fp8_cfg.fp8_recipe=tensorwise"
    config, text = command(tmp_path, f"{at}.enabled=true {fp8}")
    assert (config.model.matmul_dtype, config.algorithm.importance_correction) == ("fp8", "token_truncate")
    assert "known key" not in text and command(tmp_path, fp8)[0].model.matmul_dtype == "auto"
    assert command(tmp_path, f"{at}.enabled=true")[0].model.freeze_router is False  # of a model without experts
    config, _ = command(tmp_path, "data.default.env_name=reward_model env.reward_model.model_name=a/r")
    assert config.rewards.functions == ("model:a/r",)
    config, text = command(tmp_path, "grpo.reward_shaping.enabled=true grpo.reward_shaping.max_response_length=300")
    assert "max_response_length = 300" in " ".join(text.split())


def test_megatron_and_asynchronous_rollouts(tmp_path):
    at = "policy.megatron_cfg"
    config, _ = command(
        tmp_path, f"{at}.enabled=true {at}.optimizer.lr=2e-6 {at}.optimizer.min_lr=2e-7",
        f"{at}.tensor_model_parallel_size=4",
        f"{at}.scheduler.lr_decay_style=cosine {at}.scheduler.lr_decay_iters=150 {at}.scheduler.lr_warmup_iters=10",
        "grpo.async_grpo.enabled=true grpo.async_grpo.in_flight_weight_updates=true",
        "loss_fn.use_importance_sampling_correction=true policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=2",
    )  # fmt: skip
    optimizer = config.optimizer
    assert (config.mesh.tensor, config.mesh.fsdp, optimizer.learning_rate) == (4, 1, 2e-6)
    assert (optimizer.schedule, optimizer.schedule_steps, optimizer.warmup_steps) == ("cosine", 150, 10)
    assert (config.rollout.staleness, config.rollout.update_in_flight, config.rollout.devices) == (1, True, 2)
    assert (config.algorithm.importance_correction, config.algorithm.importance_max) == ("token_truncate", 1e9)


def test_what_is_not_here_is_said(tmp_path):
    _, text = command(
        tmp_path, "grpo.reward_scaling.enabled=true grpo.advantage_clip_low=-5.0 grpo.frob=1 frob.nicate=2",
        "data.default.env_name=sliding_puzzle loss_fn.use_kl_in_reward=true",
    )  # fmt: skip
    text = " ".join(text.split())
    for said in (
        "grpo.reward_scaling.enabled: scale the rewards in their function",
        "grpo.advantage_clip_low = -5.0 has no equivalent",
        "frob.nicate is no known key",
        "grpo.frob is no known key",
        "env_name is sliding_puzzle, an environment of NeMo-RL",
        "use_kl_in_reward: NeMo-RL takes the KL of a token off its own advantage",
    ):
        assert said in text, said
    _, text = command(tmp_path, "grpo.adv_estimator.name=newest")
    assert "grpo.adv_estimator.name = 'newest' is left out" in " ".join(text.split())
    with pytest.raises(ConfigError, match="kto of NeMo-RL has no equivalent; there are grpo, ppo, distillation, sft"):
        command(tmp_path, trainer="kto")


PPO = """
ppo: {num_prompts_per_step: 4, num_generations_per_prompt: 2, max_num_steps: 20, ppo_epochs: 2,
  policy_training_start_step: 3, adv_estimator: {gae_lambda: 0.9, ADVANTAGE}, reward_shaping: {enabled: false}}
policy: {model_name: Qwen/Qwen3-0.6B, train_global_batch_size: 4, max_total_sequence_length: 64,
  scheduler: [{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 8}}]}
value: {model_name: a/value, train_global_batch_size: 8, optimizer: {kwargs: {lr: 3.0e-6}}, max_grad_norm: 0.8}
data: {train: {data_path: rows.jsonl, input_key: question, output_key: answer}, default: {prompt_file: null}}
"""


def ppo(tmp_path, advantage="gae_gamma: 1"):
    (tmp_path / "a.yaml").write_text(PPO.replace("ADVANTAGE", advantage))
    return migrate("a.yaml", output="config.py")


def test_ppo_of_nemo_rl(tmp_path):
    config, _ = ppo(tmp_path)
    algorithm, critic = config.algorithm, config.critic
    assert (algorithm.name, algorithm.advantage) == ("ppo", "ppo(gamma=1.0, lam=0.9)")
    assert (algorithm.loss, algorithm.epsilon_high, algorithm.beta) == ("ppo_clip(dual_clip=10.0)", 0.28, 0.0)
    assert (config.batch.minibatches, algorithm.num_iterations, critic.minibatches) == (2, 2, 1)
    # Of a loss times 0.4 the norm 0.8 is that of 2 without the factor.
    assert (critic.path, critic.learning_rate, critic.epsilon, critic.max_grad_norm) == ("a/value", 3e-6, 0.2, 2.0)
    assert (critic.warmup_steps, config.optimizer.warmup_steps) == (3, 4)  # 8 passes are 4 steps
    names = {}
    exec((tmp_path / "config_functions.py").read_text(), names)
    assert names["scaled"]([r"\boxed{2}", r"\boxed{3}"], ["2", "2"]) == [1.0, -1.0]
    for said, ours in (
        ("gae_lambda_value: 1.0", "ppo(gamma=1.0, lam=0.9, lam_critic=1.0)"),
        ("length_adaptive_alpha: 0.05, gae_lambda_value: 1.0", "vapo(gamma=1.0, alpha=0.05, lam_critic=1.0)"),
        ("gae_gamma: 0.5, normalize_advantages: false", "ppo(gamma=0.5, lam=0.9, whiten_advantages=False)"),
    ):
        assert ppo(tmp_path, said)[0].algorithm.advantage == ours


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("advantage", ["gae_lambda_value: 1.0", "length_adaptive_alpha: 0.4, gae_lambda_value: 0.7"])
def test_gae_of_nemo_rl(tmp_path, advantage):
    """GeneralizedAdvantageEstimator.compute_advantage, written out (advantage_estimator.py)."""
    rule, options = advantage_rule(ppo(tmp_path, advantage)[0].algorithm.advantage)
    rng, mask = np.random.default_rng(0), made_rows().mask
    rewards, values = rng.normal(size=(N, T)) * mask, rng.normal(size=(N, T))
    length = mask.sum(1)
    adapted = np.clip(1 - 1 / np.maximum(0.4 * length, 1), 0, 1)
    decays = (adapted, 0.7) if "adaptive" in advantage else (0.9 * np.ones(N), 1.0)
    made = []
    for lam in decays:
        following, last, result = np.zeros(N), np.zeros(N), np.zeros((N, T))
        for t in reversed(range(T)):
            new, m = rewards[:, t] + following - values[:, t] + lam * last, mask[:, t]
            following, last = values[:, t] * m + (1 - m) * following, new * m + (1 - m) * last
            result[:, t] = last
        made.append(result)
    mean, count = (made[0] * mask).sum() / mask.sum(), mask.sum()
    variance = ((made[0] - mean) ** 2 * mask).sum() / count * count / (count - 1)
    theirs = (made[0] - mean) / np.sqrt(variance + 1e-8) * mask
    ours = rule(rewards, values, mask, **options)
    np.testing.assert_allclose(ours[0], theirs, rtol=1e-6)
    np.testing.assert_allclose(ours[1], (made[1] + values) * mask, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "ppo", "distillation", "sft", "dpo"])
def test_two_steps_of_training(tmp_path, kind):
    small = {"batch.prompts": 4, "model.dtype": "auto", "rollout.max_prompt_length": 64, "eval.fraction": 0.0}
    rows = [{"question": f"{i} 2 1", "answer": f"{i}"} for i in range(8)]
    if kind == "grpo":
        config, _ = command(tmp_path, "data.default.prompt_file=null")
    elif kind == "ppo":
        config, _ = ppo(tmp_path)
        small |= {"critic.path": None, "critic.warmup_steps": 1}
    elif kind == "dpo":
        rows = [{"prompt": f"{i}", "chosen": "1 2", "rejected": "2 1"} for i in range(8)]
        config, _ = offline(tmp_path, kind)
    else:
        config, _ = offline(tmp_path, kind, more="loss_fn: {kl_type: forward}" if kind == "distillation" else "")
    small["data.chat_template"] = None
    small |= {"batch.minibatches": 1, "teacher.path": "embedded:sort"} if kind == "distillation" else {}
    history = two_steps(config, tmp_path, rows, **small)
    assert len(history) == 2
    trained = history[1:] if kind == "ppo" else history  # its first step trains the critic alone
    assert all(np.isfinite(step["loss"]) for step in trained)


def test_scripts_of_others_that_are_called_alike_are_none_of_nemo_rl(tmp_path):
    text = "accelerate launch examples/run_sft.py --config a.yaml --model_name_or_path a/b --dataset_name c/d\n"
    (tmp_path / "run.sh").write_text(text)
    config, text = migrate("run.sh", output="config.py")
    assert (config.model.path, config.data.path) == ("a/b", "c/d")
    assert "of TRL" in text


def test_correct_completions_of_nemo_rl(tmp_path):
    """Its likelihood term is taken over, and what it calls correct is said."""
    config, text = command(tmp_path, "loss_fn.positive_example_nll_weight=0.1")
    assert config.algorithm.positive_nll_coef == 0.1
    assert "whose reward is above 0 are correct there" in " ".join(text.replace("#", "").split())
    assert "are correct there" not in command(tmp_path)[1]
