"""Commands of ms-swift become configurations of ours: values, rewards, two steps of training."""

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.tools.migrate import migrate
from tests.tools.migrated_runs import two_steps

GRPO = """
nproc_per_node=4
CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=$nproc_per_node \\
swift rlhf \\
    --rlhf_type grpo \\
    --model Qwen/Qwen2.5-7B \\
    --tuner_type full \\
    --dataset 'mine/data:hard#1000' \\
    --reward_funcs accuracy format soft_overlong \\
    --reward_weights 1.0 0.5 1.0 \\
    --soft_cache_length 64 \\
    --max_length 2048 --max_completion_length 256 \\
    --num_generations 8 \\
    --per_device_train_batch_size 4 \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --system 'Think first.' --max_steps 30 --save_steps 10 \\
    --deepspeed zero3 MORE
"""
SFT = """
swift sft --model Qwen/Qwen3-0.6B --dataset rows.jsonl --max_steps 20 --max_length 64 MORE
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def command(tmp_path, *more, text=GRPO, **said):
    """The configuration of the command with further flags, and the text of its file."""
    (tmp_path / "run.sh").write_text(text.replace("MORE", " ".join(more)))
    return migrate("run.sh", output="config.py", **said)


def test_a_command_of_grpo(tmp_path):
    config, text = command(tmp_path)
    (tmp_path / "config.py").write_text(text)
    assert load_config_file("config.py").to_dict() == config.to_dict()
    assert "no known key" not in text and "is left out" not in text
    assert (config.data.path, config.data.name, config.data.split) == ("mine/data", "hard", "train[:1000]")
    # 4 completions on each of 4 devices, 4 times: 64 completions of 8 prompts.
    assert (config.batch.prompts, config.rollout.group_size, config.batch.microbatch_rows) == (8, 8, 16)
    assert (config.rollout.max_prompt_length, config.rollout.max_completion_length) == (2048, 256)
    assert (config.algorithm.beta, config.algorithm.kl_bias_correction, config.rollout.temperature) == (
        0.04,
        False,
        0.9,
    )
    assert (config.algorithm.loss, config.algorithm.aggregation) == ("ppo_clip", "sequence")
    assert (config.algorithm.overlong_buffer, config.rewards.weights) == (64, (1.0, 0.5))
    assert [name.rpartition(":")[2] for name in config.rewards.functions] == ["accuracy", "format"]
    assert (config.optimizer.learning_rate, config.optimizer.b2, config.optimizer.weight_decay) == (1e-5, 0.95, 0.1)
    assert (config.optimizer.schedule, config.total_steps, config.checkpoint.every) == ("cosine", 30, 10)
    assert (config.mesh.fsdp, config.mesh.data, config.data.system_prompt) == (-1, 1, "Think first.")
    assert config.lora.rank == 0
    names = {}
    exec((tmp_path / "config_functions.py").read_text(), names)
    said = ["<think>t</think> <answer>4</answer>", "<think>t</think> <answer>4</answer> and more", "4"]
    assert names["format"](said) == [1.0, 0.0, 0.0]
    assert names["accuracy"](["so \\boxed{4}", "\\boxed{5}"], ["\\boxed{4}", "\\boxed{4}"]) == [1.0, 0.0]


def test_other_kinds(tmp_path):
    config, _ = command(tmp_path, "--dynamic_sample true --overlong_filter true --advantage_estimator rloo")
    assert (config.algorithm.dynamic_sampling, config.algorithm.max_sampling_rounds) == (True, 3)
    assert (config.algorithm.mask_truncated, config.algorithm.advantage) == (True, "rloo")
    assert (config.algorithm.kl_in_reward, config.algorithm.kl) == (True, "k1"), "as ms-swift where it is not grpo"
    dpo = "swift rlhf --rlhf_type dpo --model m --dataset d.jsonl --max_steps 5 MORE\n"
    config, text = command(tmp_path, "--rpo_alpha 0.1", text=dpo)
    assert (config.algorithm.loss, config.algorithm.loss_weights) == ("dpo+sft", (1.0, 0.1)), text
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (8, 32.0, 0.05)
    assert config.optimizer.learning_rate == 1e-4 and config.batch.prompts == 16, "as many as ms-swift makes of one"
    config, _ = command(tmp_path, text=dpo.replace("dpo", "simpo"))
    assert config.algorithm.loss.startswith("simpo") and config.algorithm.beta == 2.0
    config, text = command(tmp_path, '--columns \'{"answer": "solution"}\' --reward_funcs mine')
    assert config.rewards.functions == ("mine",) and "mine is of a plugin" in text
    names = {}
    exec((tmp_path / "config_functions.py").read_text(), names)
    assert names["renamed"]({"prompt": "p", "answer": "4"}) == {"prompt": "p", "solution": "4"}
    with pytest.raises(ConfigError, match="ppo of ms-swift has no equivalent"):
        command(tmp_path, text=dpo.replace("dpo", "ppo"))
    with pytest.raises(ConfigError, match="task_type is embedding"):
        command(tmp_path, "--task_type embedding", text=SFT)


def test_a_command_of_sft_trains(tmp_path):
    config, _ = command(tmp_path, "--packing true --split_dataset_ratio 0.1", text=SFT)
    assert (config.algorithm.name, config.data.loss_on, config.data.packing) == ("sft", "completion", True)
    assert (config.eval.fraction, config.batch.prompts, config.lora.rank) == (0.1, 16, 8)
    rows = [{"prompt": f"sort:{n}=", "completion": f"{n}"} for n in range(120, 152)]
    metrics = two_steps(config, tmp_path, rows, **{"batch.prompts": 2, "eval.fraction": 0.0})
    assert [np.isfinite(step["loss"]) for step in metrics] == [True, True]
