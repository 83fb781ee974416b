"""Runs whose data comes from several sources in several formats, whole and streamed, resumed and evaluated."""

import json

import datasets
import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data import tasks
from jaxrl_llm.training.setup.data import tokenizer_of


@pytest.fixture
def config(root, tmp_path, monkeypatch):
    """Two steps of DPO on pairs of two files, as axolotl's `datasets` says it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = tasks.generate("sort_pairs", size=24)
    chats = [
        {
            "messages": [{"role": "user", "content": row["prompt"]}],
            "chosen": row["chosen"],
            "rejected": {"role": "assistant", "content": row["rejected"]},
        }
        for row in rows
    ]
    plain = [{"question": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in rows]
    for name, lines in (("chats", chats), ("plain", plain)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {"field_prompt": "question", "field_chosen": "good", "field_rejected": "bad"}
    config = load_config_file(f"{root / 'configs' / 'dpo.py'}:tiny")
    config.data.sources = (
        {"path": str(tmp_path / "chats.jsonl"), "type": "chat_template.default", "eval_split": "train"},
        {"path": str(tmp_path / "plain.jsonl"), "type": fields, "weight": 3, "eval_split": "train"},
    )
    config.output_dir = str(tmp_path / "run")
    config.logging.backends = ("jsonl",)
    config.checkpoint.every, config.eval.measure, config.rollout.max_prompt_length = 1, "loss", 24
    config.data.max_length = 40
    return config


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_training_on_axolotls_datasets(config, streaming):
    config.data.streaming = streaming
    result = train(config)
    assert [row["step"] for row in result.metrics] == [0, 1, 2]
    assert all(np.isfinite(row["loss"]) for row in result.metrics[1:])
    # Six held-out rows, three of each source.
    assert np.isfinite(result.metrics[-1]["eval/loss"])


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_resumed_run_sees_the_same_rows(config, tmp_path, streaming):
    config.data.streaming, config.data.shuffle_buffer = streaming, 5
    config.total_steps, config.optimizer.schedule, config.eval.every = 4, "constant", -1
    straight = train(config).metrics
    config.output_dir, config.total_steps = str(tmp_path / "again"), 2
    train(config)
    config.total_steps = 4
    resumed = train(config).metrics
    assert [row["loss"] for row in resumed] == [row["loss"] for row in straight]
    assert [row["num_tokens"] for row in resumed] == [row["num_tokens"] for row in straight]


@pytest.mark.slow
def test_online_training_streams_verl_rows(root, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {
            "data_source": "sort",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(tasks.generate("sort", size=24))
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.data.path = str(tmp_path / "run"), str(tmp_path / "train.parquet")
    config.data.eval_split, config.data.streaming, config.rollout.max_prompt_length = "train", True, 24
    config.logging.backends = ("jsonl",)
    result = train(config)
    assert np.isfinite(result.metrics[-1]["eval/reward"])


@pytest.mark.slow
def test_streamed_rows_are_packed_as_those_in_memory(root, tmp_path, monkeypatch):
    """In their own order and in one block; weights of sources, refused in memory, are kept. A resumed run goes on."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    lines = [json.dumps({"text": row["prompt"] + row["chosen"]}) for row in tasks.generate("sort_pairs", size=24)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
    config.data.path, config.data.packing, config.data.shuffle = str(tmp_path / "texts.jsonl"), True, False
    config.data.max_length, config.data.loss_on, config.eval.every = 64, "all", -1
    config.batch.prompts, config.total_steps, config.logging.backends = 2, 3, ("jsonl",)
    config.checkpoint.every, config.optimizer.schedule = 1, "constant"
    config.output_dir = str(tmp_path / "memory")
    whole = train(config).metrics
    config.data.streaming, config.output_dir = True, str(tmp_path / "streamed")
    config.data.sources, config.total_steps = ({"path": config.data.path, "weight": 2},), 2
    train(config)
    config.total_steps = 3
    streamed = train(config).metrics  # of the earlier start too
    assert [row["loss"] for row in streamed] == [row["loss"] for row in whole]


@pytest.mark.slow
def test_training_on_turns_as_shown(root, tmp_path):
    """A template that drops thoughts of earlier turns, as Qwen3's: each turn is in the loss."""
    template = (
        "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}"
        "{%- if m.role == 'assistant' and loop.last -%}{{- '<think></think>' -}}{%- endif -%}"
        "{{- m.content + '<|end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    turns = [("user", "ask"), ("assistant", "say"), ("user", "more"), ("assistant", "done")]
    messages = [{"role": role, "content": content} for role, content in turns]
    config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
    config.data.chat_template, config.output_dir, config.total_steps = template, str(tmp_path / "run"), 1
    config.eval.every, config.logging.backends = -1, ("jsonl",)
    with pytest.raises(ConfigError, match=r"data.loss_on=as_shown"):
        train(config, train_dataset=[{"messages": messages}] * 8)
    config.data.loss_on = "as_shown"
    row = train(config, train_dataset=[{"messages": messages}] * 8).metrics[-1]
    assert np.isfinite(row["loss"]) and row["step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_token_ids_are_trained_on_as_their_texts_are(root, tmp_path, monkeypatch, streaming):
    """Of axolotl's segments, of its pre-tokenised rows, and of its custom type of instructions."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
    config.total_steps, config.batch.prompts, config.logging.backends = 2, 4, ("jsonl",)
    config.eval.every, config.data.shuffle, config.data.streaming = -1, False, streaming
    tokenizer = tokenizer_of(config)
    texts = [(row["prompt"], row["answer"]) for row in tasks.generate("sort", size=8)]
    end = tokenizer.eos_token
    ids = [[tokenizer(text, add_special_tokens=False)["input_ids"] for text in (ask, say + end)] for ask, say in texts]
    formats = {
        "auto": [{"prompt": ask, "completion": say} for ask, say in texts],
        "user_defined": [{"ask": ask, "say": say} for ask, say in texts],
        "input_output": [
            {"segments": [{"text": ask, "label": False}, {"text": say + end, "label": True}]} for ask, say in texts
        ],
        None: [{"input_ids": ask + say, "labels": [-100] * len(ask) + say} for ask, say in ids],
    }
    losses = {}
    for name, rows in formats.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        custom = {"field_instruction": "ask", "field_output": "say", "format": "{instruction}"}
        kind = {"type": custom if name == "user_defined" else name} if name else {}
        config.data.sources, config.output_dir = ({"path": str(file), **kind},), str(tmp_path / f"run-{name}")
        losses[name] = [row["loss"] for row in train(config).metrics if row["step"]]
    assert len(losses["auto"]) == 2 and all(each == losses["auto"] for each in losses.values()), losses
