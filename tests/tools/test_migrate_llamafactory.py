"""YAML of LLaMA-Factory becomes configurations: values, defaults, data sets, formulas, two steps of training."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.algorithms.losses import with_metrics
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.tools.migrate import migrate
from jaxrl_llm.training.setup.objectives import preference_spec
from tests.tools.migrated_runs import two_steps

YAML = """
model_name_or_path: Qwen/Qwen3-0.6B
stage: STAGE
do_train: true
dataset: DATASET
template: qwen3
cutoff_len: 512
max_samples: 100
output_dir: saves/here
save_steps: 50
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
MORE
"""
INFO = {
    "questions": {"file_name": "questions.json"},
    "talks": {"hf_hub_url": "a/talks", "formatting": "sharegpt", "columns": {"messages": "turns", "system": "told"}},
    "pairs": {
        "file_name": "pairs.json", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "turns", "chosen": "good", "rejected": "bad"},
    },
    "old": {
        "file_name": "old.json",
        "columns": {"prompt": "ask", "query": "more", "response": "say", "history": "past", "system": "told"},
    },
    "ratings": {
        "file_name": "ratings.json", "formatting": "sharegpt", "columns": {"messages": "turns", "kto_tag": "liked"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "calls": {
        "file_name": "calls.json", "formatting": "sharegpt",
        "columns": {"messages": "turns", "tools": "functions", "images": "pictures"},
    },
}  # fmt: skip
USER, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))


def made(stage="sft", dataset="questions", more="", **said):
    """The configuration of a YAML, its text, and the functions that are written beside it."""
    text = YAML.replace("STAGE", stage).replace("DATASET", dataset).replace("MORE", more)
    Path("a.yaml").write_text(text)
    config, text = migrate("a.yaml", output="config.py", devices=2, rows=160, **said)
    names = {}
    exec(Path("config_functions.py").read_text(), names)
    return config, text, names


def test_fine_tuning_by_adapters(tmp_path):
    config, text, names = made(dataset="questions,talks")
    (tmp_path / "config.py").write_text(text)
    assert load_config_file("config.py").to_dict() == config.to_dict()
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (8, 16.0, ("all-linear",))
    assert (config.model.remat, config.model.dtype, config.model.param_dtype) == ("block", "bfloat16", "float32")
    assert (config.batch.prompts, config.batch.microbatch_rows, config.total_steps) == (16, 4, 20)
    assert (config.data.max_length, config.data.loss_on, config.optimizer.schedule) == (512, "completion", "cosine")
    assert config.eval.every == -1
    first, second = config.data.sources
    assert (first["path"], first["split"]) == ("data/questions.json", "train[:100]")
    assert (second["path"], second["format"]) == ("a/talks", "config_functions.py:talks")
    assert names["questions"]({"instruction": "i", "input": "x", "output": "o"}) == {
        "prompt": [{"role": "user", "content": "i\nx"}],
        "completion": [{"role": "assistant", "content": "o"}],
    }
    talk = names["talks"]({"turns": [USER, GPT], "told": "t"})["messages"]
    assert [one["role"] for one in talk] == ["system", "user", "assistant"]
    assert "template = qwen3: the tokenizer's own template is used" in " ".join(text.split())


def test_the_v1_engine_is_refused():
    Path("a.yaml").write_text("model: m\nmodel_class: llm\ntrain_dataset: d.yaml\nlearning_rate: 1.0e-4\n")
    with pytest.raises(ConfigError, match="v1 engine of LLaMA-Factory"):
        migrate("a.yaml")


@pytest.mark.parametrize(
    "more", ["export_dir: out", "infer_backend: huggingface", "finetuning_type: lora\nexport_dir: o"]
)
def test_files_that_merge_or_chat_are_told_what_does_that(more):
    """Their keys are few, and none says that they are LLaMA-Factory's."""
    Path("a.yaml").write_text(f"model_name_or_path: a/b\nadapter_name_or_path: saves/x\ntemplate: qwen3\n{more}\n")
    with pytest.raises(
        ConfigError, match=r"a.yaml trains nothing: .* export merges the adapters of a run, .* chat and"
    ):
        migrate("a.yaml")


def test_workers_of_ray_are_the_devices():
    """And what is of Ray and of profilers is named as such, not as unknown."""
    more = "ray_num_workers: 4\nray_storage_path: r\nfp8: true\nprofiler_wait_steps: 2"
    Path("a.yaml").write_text(YAML.replace("STAGE", "sft").replace("DATASET", "questions").replace("MORE", more))
    config, text = migrate("a.yaml", output="config.py", rows=160)
    assert config.batch.prompts == 2 * 4 * 4
    assert "known key" not in text and config.model.matmul_dtype == "fp8"
    assert migrate("a.yaml", output="config.py", rows=160, devices=2)[0].batch.prompts == 2 * 4 * 2


def test_other_rows_and_stages():
    _, _, names = made(dataset="old")
    row = names["old"]({"ask": "i", "more": "", "say": "o", "past": [["p", "r"]], "told": None})
    assert [one["content"] for one in row["messages"]] == ["p", "r", "i", "o"]  # the answers of the past are learned
    config, _, names = made("kto", "ratings", "kto_chosen_weight: 0.5")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert names["ratings"]({"turns": turns, "liked": True}) == {
        "prompt": turns[:1],
        "completion": turns[1:],
        "label": True,
    }
    assert config.algorithm.loss == "kto(desirable_weight=0.5)"
    assert config.data.shuffle and not made("kto", "ratings", "disable_shuffling: true")[0].data.shuffle
    config, _, names = made("dpo", "pairs", "finetuning_type: full\npref_ftx: 0.3\ndeepspeed: z3.json")
    row = names["pairs"]({"turns": [USER], "good": GPT, "bad": {"from": "gpt", "value": "b"}})
    assert row["chosen"] == [{"role": "assistant", "content": "a"}] and row["prompt"][0]["content"] == "q"
    assert (config.lora.rank, config.mesh.fsdp, config.algorithm.loss_weights) == (0, -1, (1.0, 0.3))
    assert (config.algorithm.name, config.batch.microbatch_rows) == ("preference", 8)
    config, _, _ = made("rm", "pairs", "quantization_bit: 4\nlora_target: q_proj,v_proj\nlora_alpha: 4")
    assert (config.algorithm.name, config.model.quantize) == ("reward_model", "nf4")
    assert (config.lora.targets, config.lora.alpha) == (("q_proj", "v_proj"), 4.0)
    config, _, names = made("pt", more="val_size: 0.1\nuse_swanlab: true")
    assert names["questions"]({"instruction": "text"}) == {"text": "text"}
    assert (config.data.loss_on, config.data.packing, config.eval.fraction) == ("all", True, 0.1)
    assert config.logging.backends == ("console", "jsonl", "swanlab")


def test_rows_with_calls_of_tools_and_images():
    _, _, names = made(dataset="calls")
    call, tool = {"name": "add", "arguments": {"a": 1}}, {"name": "add", "parameters": {"type": "object"}}
    turns = [USER, {"from": "function_call", "value": json.dumps(call)}, {"from": "observation", "value": "2"}, GPT]
    row = {"turns": turns, "functions": json.dumps([tool]), "pictures": ["a.png"]}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    assert names["calls"](row) == {
        "messages": [
            {"role": "user", "content": "q"}, asked, {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "a"},
        ],
        "tools": [{"type": "function", "function": tool}],
        "images": ["a.png"],
    }  # fmt: skip
    assert names["calls"]({**row, "turns": [USER, GPT], "functions": ""})["tools"] == []
    several = {"from": "function_call", "value": json.dumps([call, call])}
    assert len(names["calls"]({**row, "turns": [USER, several]})["messages"][1]["tool_calls"]) == 2


def test_rows_that_val_size_holds_out(tmp_path):
    (tmp_path / "data/questions.json").write_text(json.dumps([{"instruction": "i", "output": "o"}] * 80))
    config, _, _ = made(dataset="questions,talks", more="val_size: 16")  # of 160 rows
    assert (config.eval.fraction, config.total_steps) == (0.1, 18)
    _, text = migrate("a.yaml", output="config.py", devices=2)
    assert "val_size = 16 holds nothing out: how many rows there are in all is not known" in " ".join(text.split())
    made(more="val_size: 0.3")
    config, _ = migrate("a.yaml", output="config.py", devices=2)  # of the 80 rows that the file has, 56
    assert (config.eval.fraction, config.total_steps) == (0.3, 8)


def test_a_command_with_overrides(tmp_path):
    made()
    (tmp_path / "run.sh").write_text("llamafactory-cli train a.yaml learning_rate=3e-5 lora_rank=32\n")
    config, _ = migrate("run.sh", output="other.py")
    assert (config.optimizer.learning_rate, config.lora.rank, config.lora.alpha) == (3e-5, 32, 64.0)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("started", ["llamafactory-cli train", "CUDA_VISIBLE_DEVICES=0 python src/train_bash.py"])
def test_a_command_with_flags(tmp_path, started):
    """As LLaMA Board shows it."""
    flags = "--stage dpo --do_train True --model_name_or_path a/b --dataset pairs --finetuning_type lora --lora_rank 16"
    more = "--pref_beta 2e-1 --lora_target q_proj,v_proj --output_dir out --plot_loss --report_to none --max_steps 7"
    (tmp_path / "run.sh").write_text(f"{started} \\\n    {flags} \\\n    {more}\n")
    config, text = migrate("run.sh", output="config.py")
    assert (config.algorithm.name, config.algorithm.beta, config.total_steps) == ("preference", 0.2, 7)
    assert (config.model.path, config.lora.rank, config.lora.targets) == ("a/b", 16, ("q_proj", "v_proj"))
    assert config.data.sources[0]["path"] == "data/pairs.json" and "no known key" not in text


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "orpo", "simpo"])
def test_the_losses_of_pairs_are_those_of_llamafactory(kind):
    """compute_preference_loss of its DPO trainer, written out; ipo, orpo and simpo read means over tokens there."""
    config, _, _ = made("dpo", "pairs", f"pref_loss: {kind}\npref_beta: 0.2\nsimpo_gamma: 0.4")
    rng = np.random.default_rng(0)
    chosen, rejected, ref_chosen, ref_rejected = -rng.uniform(1, 9, (4, 5))
    lengths = rng.integers(3, 9, (2, 5))
    loss = preference_spec(config).losses[0]
    ours, _ = with_metrics(
        loss.function(
            chosen, rejected, ref_chosen, ref_rejected, preference_spec(config).beta, lengths=lengths, **loss.options
        )
    )
    ratio = (chosen - ref_chosen) - (rejected - ref_rejected)
    a, b = chosen / lengths[0], rejected / lengths[1]
    means = (chosen - ref_chosen) / lengths[0] - (rejected - ref_rejected) / lengths[1]
    odds = (a - b) - (np.log1p(-np.exp(a)) - np.log1p(-np.exp(b)))
    theirs = {
        "sigmoid": np.log1p(np.exp(-0.2 * ratio)),
        "hinge": np.maximum(1 - 0.2 * ratio, 0),
        "ipo": (means - 1 / (2 * 0.2)) ** 2,
        "orpo": 0.2 * np.log1p(np.exp(-odds)),  # beside the likelihood
        "simpo": np.log1p(np.exp(-0.2 * ((a - b) - 0.4 / 0.2))),
    }[kind]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)  # ipo is the square of a small difference, in float32
    assert loss.nll_weight == {"orpo": 1.0, "simpo": 0.0}.get(kind)
    assert not loss.nll_on_prompt


def test_what_is_not_here_is_said():
    more = "use_badam: true\nfinetuning_type: freeze\npacking: true\nfrobnicate: 3\nfreeze_trainable_layers: 3"
    _, text, _ = made(dataset="questions,unknown", more=more)
    text = " ".join(text.split())
    for said in (
        "use_badam = True has no equivalent",
        "name the parameters that are trained in model.trainable",
        "packed rows attend to each other there unless neat_packing is on",
        "dataset unknown is an entry of data/dataset_info.json",
        "frobnicate is no known key",
    ):
        assert said in text, said
    _, text, _ = made("dpo", "pairs", "pref_loss: kto_pair")
    assert "pref_loss = 'kto_pair' is left out" in " ".join(text.split())
    with pytest.raises(ConfigError, match="stage is 'rl', which has no equivalent; there are pt, sft, rm, ppo, dpo, k"):
        made("rl")


def test_ppo():
    """As of TRL's former PPOTrainer: batches of ppo_buffer_size updates, and a value head on the policy."""
    more = "reward_model: org/rm\nreward_model_type: full\nppo_buffer_size: 2\nppo_target: 3.0\nmax_new_tokens: 100"
    config, text, names = made("ppo", "questions,talks", more)
    assert names["questions"]({"instruction": "i", "output": "o"}) == {"prompt": [{"role": "user", "content": "i"}]}
    assert names["talks"]({"turns": [USER, GPT]}) == {"prompt": [{"role": "user", "content": "q"}]}
    algorithm, rollout = config.algorithm, config.rollout
    assert (algorithm.name, algorithm.advantage, algorithm.beta) == ("ppo", "ppo(gamma=1.0, lam=0.95)", 0.2)
    assert (algorithm.kl_controller, algorithm.kl_target, algorithm.kl_in_reward) == ("adaptive", 0.03, True)
    assert (config.batch.prompts, config.batch.minibatches, config.batch.microbatch_rows) == (32, 2, 4)
    assert (algorithm.num_iterations, config.total_steps) == (4, 10)  # twice 160 // 32
    assert (rollout.max_prompt_length, rollout.max_completion_length, rollout.group_size) == (512, 100, 1)
    assert (rollout.temperature, rollout.top_p, rollout.top_k, config.data.overlong) == (
        0.95,
        0.7,
        50,
        "truncate_right",
    )
    assert (config.critic.shared, config.critic.coef, config.critic.epsilon) == (True, 0.1, 0.2)
    assert config.rewards.functions == ("model:org/rm",) and config.optimizer.max_grad_norm == 1.0
    assert "value_head.safetensors" in text and "known key" not in text
    more = "reward_model: http://localhost:8000\nreward_model_type: api\nmax_steps: 7\nppo_score_norm: true"
    config, text, _ = made("ppo", more=more)
    assert (config.rewards.functions, config.total_steps) == (("REWARD",), 7)
    assert "is a server" in text and "ppo_score_norm has no equivalent" in text


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "dpo", "ppo"])
def test_two_steps_of_training(tmp_path, stage):
    asked = [{"instruction": f"{i} 2", "input": "", "output": f"2 {i}"} for i in range(8)]
    rows = {
        "sft": asked, "ppo": asked,
        "dpo": [{"turns": [{"from": "human", "value": f"{i}"}], "good": GPT, "bad": USER} for i in range(8)],
    }[stage]  # fmt: skip
    dataset = "pairs" if stage == "dpo" else "questions"
    config, _, _ = made(stage, dataset)
    (tmp_path / f"data/{dataset}.json").write_text(json.dumps(rows))
    (source,) = config.data.sources
    settings = {"data.path": "task:sort", "data.sources": (source,), "data.max_length": 128, "batch.prompts": 4}
    if stage == "ppo":
        (tmp_path / "score.py").write_text(
            "def score(completions, **_):\n    return [len(x[0]['content']) for x in completions]\n"
        )
        settings["rewards.functions"] = (f"{tmp_path}/score.py:score",)
    history = two_steps(config, tmp_path, rows, **settings, **{"model.dtype": "auto", "optimizer.warmup_ratio": 0.0})
    assert len(history) == 2
    assert all(np.isfinite(step["loss"]) for step in history)
