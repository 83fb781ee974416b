"""Configurations of TRL, verl, axolotl and Harmony become ours: values, units, defaults, and what has no equivalent."""

import json
import re
import shutil
import sys
from pathlib import Path

import datasets
import pytest
import torch
import transformers
import yaml
from transformers.training_args import OptimizerNames

import jaxrl_llm
from benchmarks.migrated import judge
from jaxrl_llm.commands.migrate import main
from jaxrl_llm.config import ConfigError, assign, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.config.resolve import resolve
from jaxrl_llm.config.schema import KEYS
from jaxrl_llm.data.formats import lookup as formats
from jaxrl_llm.data.formats.lookup import known
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.models.files.hf import EMBEDDED, load_tokenizer
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.tools.migrate import migrate
from jaxrl_llm.tools.migrate.documentation import page
from jaxrl_llm.tools.migrate.shell import commands
from jaxrl_llm.tools.migrate.table import defaults, find, names, table
from jaxrl_llm.tools.migrate.trees import parsed
from jaxrl_llm.training.advantages import advantage_rule
from jaxrl_llm.training.optimizers import learning_rate_schedule
from jaxrl_llm.training.setup.objectives import policy_loss, preference_spec
from jaxrl_llm.training.setup.specs import optimizer_spec
from tests.tools import migration_keys

FILES = Path(__file__).parent / "migration_files"
TABLES = {name: table(name.lower()) for name in migration_keys.ALL}
OURS = {key.name for key in KEYS}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every test works in a folder of its own, where configs and their functions are written."""
    monkeypatch.chdir(tmp_path)


def made(name, **said):
    """The configuration of a file, and its text; both validated, and the text gives the configuration."""
    config, text = migrate(FILES / name, output="config.py", **said)
    validate(config)
    return config, text


def written(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return file


def values(config, *keys):
    """The values of keys, as a dictionary."""
    found = {}
    for key in keys:
        node = config
        for part in key.split("."):
            node = node[part]
        found[key] = node
    return found


def expect(config, **sections):
    """Compares keys by name: `expect(config, batch={"prompts": 4})`; "" is the top level."""
    wanted = {f"{section}.{key}".lstrip("_."): one for section, keys in sections.items() for key, one in keys.items()}
    assert values(config, *wanted) == wanted


# Every key has its place.


@pytest.mark.parametrize("system", TABLES)
def test_every_key_of_the_pages_is_mapped_or_named_as_not_applicable_with_the_reason(system):
    table = TABLES[system]
    for key in migration_keys.ALL[system]:
        found = find(table, key)
        assert found is not None, key
        assert found.ours or len(found.note) > 10, f"{key} has neither a key of ours nor a reason"


@pytest.mark.parametrize("system", TABLES)
def test_tables_name_keys_that_exist_and_each_of_theirs_once(system):
    listed = names(TABLES[system])
    assert len(listed) == len(set(listed)), sorted({key for key in listed if listed.count(key) > 1})
    for one in TABLES[system]:
        assert set(one.ours.split()) <= OURS, one.keys


def test_the_page_is_what_the_command_prints(capsys):
    main(["--tables"])
    text = (FILES.parent.parent.parent / "docs/migrating.md").read_text(encoding="utf-8")
    assert text == page() == capsys.readouterr().out, "run: python -m jaxrl_llm migrate --tables > docs/migrating.md"
    assert "THIS_FILE" not in text


@pytest.mark.slow
def test_trl_defaults_are_those_of_the_trl_that_is_installed():
    import importlib

    import trl

    classes = {name: getattr(trl, f"{name.upper()}Config") for name in ("grpo", "rloo", "sft", "dpo", "kto")}
    classes["reward"] = trl.RewardConfig
    classes["distillation"] = trl.DistillationConfig
    for name in ("orpo", "cpo", "tpo", "gkd", "gold", "sdpo", "sdft", "gmpo", "a2po"):
        module = importlib.import_module(f"trl.experimental.{name}")
        classes[name] = getattr(module, f"{name.upper()}Config")
    for name in ("async_grpo", "async_distillation", "server_distillation"):
        words = name.replace("grpo", "GRPO").split("_")
        kind = "".join(word if word.isupper() else word.capitalize() for word in words)
        classes[name.replace("_", "")] = getattr(importlib.import_module(f"trl.experimental.{name}"), f"{kind}Config")
    classes["onlinedpo"] = importlib.import_module("trl.experimental.online_dpo").OnlineDPOConfig
    classes["iwopd"] = importlib.import_module("trl.experimental.iw_opd").IWOPDConfig
    # The report goes nowhere by default, the names of optimizers are variants of one, and folders are ours to choose.
    # TRL fills in the servers of teachers as it starts.
    elsewhere = {
        "teacher_server_urls",
        "output_dir",
        "optim",
        "warmup_ratio",
        "dtype",
        "dataset_train_split",
        "dataset_test_split",
        "report_to",
        "log_completions",
    }
    # Unset, these are off or have the same value here; hub_strategy is the end, and project the name of this library.
    alike = """
        activation_offloading assistant_only_loss auto_find_batch_size callbacks cast_lm_head_to_fp32
        dataloader_drop_last dataset_text_field desirable_weight discopop_tau do_eval entropy_coef entropy_coef_delta
        entropy_coef_max entropy_coef_min entropy_target eval_delay eval_on_start f_alpha_divergence_coef
        feedback_template fp16 hub_strategy label_smoothing label_smoothing_factor load_best_model_at_end loss_type
        packing packing_strategy precompute_ref_log_probs project push_to_hub repetition_penalty reprompt_template
        save_only_model shuffle_dataset solution_template top_entropy_quantile train_sampling_strategy
        trust_remote_code undesirable_weight use_adaptive_entropy use_weighting vespo_k_neg vespo_k_pos
        vespo_lambda_neg vespo_lambda_pos
    """
    compared, left_out = 0, set()
    for name, cls in classes.items():
        known = defaults("trl", name)
        theirs = {
            key: field.default_factory() if callable(field.default_factory) else field.default
            for key, field in cls.__dataclass_fields__.items()
        }
        assert known.keys() - theirs.keys() <= elsewhere, name
        for key in theirs.keys() & known.keys() - elsewhere:
            assert theirs[key] == known[key], (name, key)
            compared += 1
        missing = {key for key, value in theirs.items() if value is not None} - known.keys()
        entries = {key: find(TABLES["TRL"], key) for key in missing}
        left_out |= {key for key, entry in entries.items() if entry is None or entry.ours}
    assert compared > 150 and left_out == set(alike.split())


# TRL.


def test_a_grpo_script_of_trl():
    config, text = made("trl_grpo.py", devices=2)
    expect(
        config,
        _={"output_dir": "qwen-grpo", "seed": 42, "total_steps": 200},
        model={"path": "Qwen/Qwen2.5-1.5B-Instruct", "dtype": "bfloat16", "param_dtype": "bfloat16", "remat": "block"},
        lora={"rank": 32, "alpha": 64.0, "dropout": 0.0, "targets": ("all-linear",)},
        data={"path": "openai/gsm8k", "name": "main", "split": "train"},
        rollout={"group_size": 8, "max_completion_length": 384, "temperature": 1.0, "top_k": 0},
        rewards={"weights": (1.0, 0.5)},
        algorithm={
            "aggregation": "token",
            "beta": 0.02,
            "kl_bias_correction": True,
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "importance_correction": "sequence_mask",
            "importance_max": 3.0,
        },
        optimizer={"learning_rate": 2e-6, "schedule": "cosine", "min_lr_ratio": 0.1, "warmup_ratio": 0.05},
        # 4 completions x 2 devices x 4 accumulated = 32 completions = 4 prompts; 8 rows a pass
        batch={"prompts": 4, "minibatches": 1, "microbatch_rows": 8},
        checkpoint={"every": 100},
        eval={"every": -1},
        logging={"completions_every": 5},
    )
    assert config.rewards.functions == ("config_functions.py:reward_digits", "model:my/reward-model")
    assert "frobnicate_steps = 3: an unknown key" in text
    assert "use_vllm = True: there is no second engine" in text
    assert "config.rollout.group_size = 8  # num_generations" in text
    assert "config.algorithm.kl_bias_correction = True  # use_bias_correction_kl, by default" in text


def test_steps_of_trl_are_updates_and_ours_are_rollouts(tmp_path):
    said = {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "reward_funcs": ["r:f"],
        "max_steps": 100,
        "save_steps": 30,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "warmup_steps": 20,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 8,
        "num_iterations": 2,
        "sync_ref_model": True,
        "ref_model_sync_steps": 40,
        "beta": 0.1,
    }
    config, _ = migrate(written(tmp_path, "grpo.json", said), trainer="grpo", devices=4)
    # A rollout has 4 x 4 x 4 = 64 completions, 8 prompts; an update 32 of them; so 2 x 2 = 4 updates a step.
    expect(
        config,
        batch={"prompts": 8, "minibatches": 2, "microbatch_rows": 16},
        _={"total_steps": 25},
        algorithm={"num_iterations": 2, "aggregation": "rollout_token", "ref_sync_steps": 10},
        optimizer={"warmup_steps": 5},
        checkpoint={"every": 8},
        eval={"every": 3},
    )


def test_a_reference_of_pairs_that_follows(tmp_path):
    said = {"dataset_name": "d", "sync_ref_model": True}
    for trainer in ("dpo", "kto"):
        config, _ = migrate(written(tmp_path, "unset.json", said), trainer=trainer)
        expect(config, algorithm={"ref_sync_steps": 512, "ref_mixup_alpha": 0.6})
        config, _ = migrate(written(tmp_path, "set.json", said | {"ref_model_sync_steps": 40}), trainer=trainer)
        expect(config, algorithm={"ref_sync_steps": 40})


@pytest.mark.parametrize(
    ("loss_type", "loss", "of_sequences", "aggregation"),
    [
        ("grpo", "ppo_clip", "gspo", "sequence"),
        ("bnpo", "ppo_clip", "gspo", "microbatch_token"),
        ("dr_grpo", "ppo_clip", "gspo", "constant"),
        ("dapo", "ppo_clip", "gspo", "token"),
        ("cispo", "cispo", "cispo(level='sequence')", "token"),
        ("luspo", "ppo_clip", "gspo", "sequence_sum"),
        ("vespo", "vespo", "vespo", "token"),
        (
            "sapo",
            "sapo(temperature_positive=1.0, temperature_negative=1.05)",
            "sapo(temperature_positive=1.0, temperature_negative=1.05, level='sequence')",
            "sequence",
        ),
    ],
)
def test_loss_types_of_trl(tmp_path, loss_type, loss, of_sequences, aggregation):
    said = {"loss_type": loss_type, "max_steps": 5, "num_generations": 4}
    config, _ = migrate(written(tmp_path, "a.json", {"output_dir": "o", **said}), trainer="grpo", devices=1)
    expect(config, algorithm={"loss": loss, "aggregation": aggregation, "beta": 0.0}, batch={"prompts": 2})
    config, _ = migrate(
        written(tmp_path, "b.json", {"output_dir": "o", **said, "importance_sampling_level": "sequence"}),
        trainer="grpo",
        devices=1,
    )
    expect(config, algorithm={"loss": of_sequences, "aggregation": aggregation})
    assert policy_loss(config).ratio == ("token" if loss_type == "vespo" else "sequence")


def test_numbers_of_vespo(tmp_path):
    said = {"output_dir": "o", "loss_type": "vespo", "max_steps": 5, "vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5}
    config, _ = migrate(written(tmp_path, "a.json", said), trainer="grpo", devices=1)
    expect(config, algorithm={"loss": "vespo(k_positive=1.5, lambda_negative=2.5)"})


def test_vespo_of_trl_with_a_kl_of_sequence_ratios_is_noted(tmp_path):
    said = {"output_dir": "o", "loss_type": "vespo", "importance_sampling_level": "sequence", "max_steps": 5}
    file = written(tmp_path, "a.json", {**said, "beta": 0.04, "num_generations": 4})
    assert "with vespo it is of the KL term alone" in migrate(file, trainer="grpo", devices=1)[1]
    file = written(tmp_path, "b.json", said | {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"})
    config, text = migrate(file, trainer="grpo", devices=1)
    expect(config, algorithm={"loss": "vespo", "importance_correction": "token_mask"})
    assert "vespo refuses weights of rows there and here" in text


def test_dft_of_trl(tmp_path):
    said = {"output_dir": "o", "dataset_name": "d", "max_steps": 5, "loss_type": "dft", "label_smoothing_factor": 0.1}
    config, text = migrate(written(tmp_path, "a.json", said), trainer="sft", devices=1)
    expect(config, algorithm={"name": "sft", "loss": "dft", "label_smoothing": 0.0})
    assert "no equivalent in sft" not in text


def test_the_older_trl_has_other_defaults(tmp_path):
    file = written(tmp_path, "a.json", {"output_dir": "o", "max_steps": 5, "top_p": 0.9})
    old, text = migrate(file, trainer="grpo", devices=1, version="0.16")
    expect(
        old,
        rollout={"temperature": 0.9, "top_k": 50, "max_completion_length": 256, "max_prompt_length": 512, "top_p": 0.9},
        algorithm={"beta": 0.04, "aggregation": "microbatch_token", "kl_bias_correction": False},
        data={"overlong": "truncate_left"},
        model={"dtype": "float32", "remat": "auto"},
    )
    assert "config.rollout.top_k = 50  # top_k, by default" in text
    new, _ = migrate(file, trainer="grpo", devices=1)
    expect(
        new,
        rollout={"temperature": 1.0, "top_k": 0, "max_completion_length": 512},
        algorithm={"beta": 0.0},
        data={"overlong": "error"},
    )
    file = written(tmp_path, "b.json", {"output_dir": "o", "max_steps": 5, "top_k": None})
    assert migrate(file, trainer="grpo", devices=1, version="0.16")[0].rollout.top_k == 0  # None is off, not unset


def test_a_dpo_command_of_trl():
    config, text = made("trl_dpo.sh")
    expect(
        config,
        _={"output_dir": "runs/qwen-dpo", "total_steps": 1000},
        model={"path": "Qwen/Qwen2-0.5B-Instruct"},
        lora={"rank": 32, "alpha": 16.0, "dropout": 0.05, "targets": ("q_proj", "v_proj")},
        data={
            "path": "trl-lib/ultrafeedback_binarized",
            "streaming": True,
            "max_length": 2048,
            "overlong": "truncate_right",
        },
        algorithm={"name": "preference", "loss": "dpo+sft", "loss_weights": (1.0, 0.2), "beta": 0.05},
        optimizer={"learning_rate": 5e-7, "schedule": "linear", "warmup_steps": 100},
        batch={"prompts": 64, "microbatch_rows": 16},  # 2 pairs x 4 devices x 8; a pass has 8 pairs, 16 rows
        eval={"every": 50},
    )
    assert "config_file = 'multi_gpu.yaml': has no part in mesh.fsdp" in text


def test_kto_sft_orpo_reward_and_ppo_of_trl():
    kto, _ = made("trl_kto.yaml", rows=1000, devices=1)
    expect(
        kto,
        _={"total_steps": 63},
        algorithm={"name": "preference", "beta": 0.1, "loss": "kto(desirable_weight=1.33)"},
        optimizer={"warmup_ratio": 0.1, "schedule": "cosine"},
        data={"shuffle": False},
        batch={"prompts": 16, "microbatch_rows": 0},
    )
    sft, text = made("trl_sft.json", rows=100, devices=2)
    expect(
        sft,
        _={"num_epochs": 2.0},  # its rows are packed
        algorithm={"name": "sft", "neftune_alpha": 5.0},
        data={"packing": True, "max_length": 4096, "loss_on": "completion", "overlong": "truncate_right"},
        optimizer={"learning_rate": 2e-5},
        batch={"prompts": 16},
    )
    assert "fp16_opt_level = 'O1': a setting of torch" in text
    orpo, text = made("trl_orpo.sh", devices=1)
    expect(
        orpo,
        algorithm={"loss": "orpo", "beta": 0.2, "loss_weights": ()},
        optimizer={"name": "adamw", "moment_dtype": "float8"},
        batch={"prompts": 4},
        checkpoint={"every": 500, "keep_every": 1},
    )
    assert "moments are not paged here" in " ".join(text.split())
    reward, _ = made("trl_reward.py", devices=1)
    expect(
        reward,
        algorithm={"name": "reward_model", "loss": "bradley_terry(center=0.01)"},
        data={
            "path": "trl-lib/ultrafeedback_binarized",
            "split": "train",
            "eval_split": "test",
            "overlong": "filter",  # RewardTrainer drops long pairs
        },
        optimizer={"learning_rate": 1e-4},
        batch={"prompts": 16, "microbatch_rows": 16},
    )
    ppo, _ = made("trl_ppo.sh", devices=1)
    expect(
        ppo,
        _={"total_steps": 313},
        model={"path": "EleutherAI/pythia-1b", "tokenizer": "EleutherAI/pythia-1b-deduped"},  # as the script has them
        rollout={"group_size": 1, "temperature": 0.7, "max_completion_length": 53},
        algorithm={
            "name": "ppo",
            "advantage": "ppo(gamma=1.0, lam=0.95)",
            "beta": 0.05,
            "kl_in_reward": True,
            "kl": "k1",
            "num_iterations": 2,
            "missing_eos_penalty": 1.0,
            "aggregation": "microbatch_token",
        },
        rewards={"functions": ("model:my/pythia-reward",)},
        critic={"path": "my/pythia-reward", "epsilon": 0.2, "learning_rate": 3e-6, "schedule": "linear"},
        batch={"prompts": 32, "minibatches": 1, "microbatch_rows": 16},  # an update is of 2 passes
    )


def test_ppo_of_trl_counts_batches(tmp_path):
    """Its warm-up, saves and evaluations are in batches, it reads no max_steps, and it clips no gradient."""
    said = {
        "model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "num_ppo_epochs": 4, "num_mini_batches": 2,
        "per_device_train_batch_size": 8, "num_train_epochs": 3, "max_steps": 7, "warmup_steps": 6, "save_steps": 10,
        "eval_strategy": "steps", "eval_steps": 5, "reward_model": "r", "value_model": "v",
    }  # fmt: skip
    config, text = migrate(written(tmp_path, "a.json", said), trainer="ppo", devices=2, rows=100)
    expect(
        config,
        _={"total_steps": 19},  # 300 episodes
        batch={"prompts": 16, "minibatches": 2, "microbatch_rows": 0},
        algorithm={"num_iterations": 4, "aggregation": "token"},
        optimizer={"warmup_steps": 6, "max_grad_norm": 0.0},
        critic={"path": "v", "lr_warmup_steps": 6, "max_grad_norm": 0.0},
        rewards={"functions": ("model:r",)},
        checkpoint={"every": 10},
        eval={"every": 5},
    )
    text = " ".join(text.split())
    assert "max_steps is not read by PPOTrainer" in text and "clips no gradient" in text
    assert "as in TRL 1.10, which still has it." in text
    said |= {"warmup_steps": 0.1, "deepspeed": "z.json", "max_grad_norm": 0.5}
    config, _ = migrate(written(tmp_path, "b.json", said), trainer="ppo", devices=2, rows=100)
    expect(config, optimizer={"max_grad_norm": 0.5}, critic={"lr_warmup_steps": 2, "max_grad_norm": 0.5})


def test_tools_of_trl_have_no_limit_of_turns_or_time(tmp_path):
    script = """
from trl import {trainer}Config, {trainer}Trainer

def add(a: int, b: int) -> int:
    return a + b

args = {trainer}Config(output_dir="o", max_steps=2, max_completion_length=300, {more})
{trainer}Trainer("m", "t", args=args, train_dataset="d", tools=[add])
"""
    for trainer in ("GRPO", "Distillation"):
        file = written(tmp_path, "a.py", script.format(trainer=trainer, more=""))
        config, text = migrate(file, devices=1, output="config.py")
        expect(config, environment={"tools": ("config_functions.py:add",), "max_turns": 300, "timeout": None})
        assert load_config_file(str(written(tmp_path, "config.py", text))).environment.timeout is None
        file = written(tmp_path, "a.py", script.format(trainer=trainer, more="max_tool_calling_iterations=3"))
        expect(migrate(file, devices=1, output="config.py")[0], environment={"max_turns": 4, "timeout": None})
    alone = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["r"], "max_tool_calling_iterations": 3}
    config, _ = migrate(written(tmp_path, "b.json", alone), trainer="grpo", devices=1)
    expect(config, environment={"max_turns": 10, "timeout": 60.0})


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_reward_models_and_functions_of_trl(tmp_path, trainer):
    """Its commands train on both, the model first, and have a punishment with numbers of their own."""
    said = f"trl {trainer} --model_name_or_path m --dataset_name d --max_steps 4 --reward_model_name_or_path org/judge"
    functions = "--reward_funcs accuracy_reward get_soft_overlong_punishment my.rewards.length"
    config, _ = migrate(written(tmp_path, "a.sh", f"{said} {functions}"), devices=1)
    punishment = "soft_overlong(max_length=1280, cache=256)"
    wanted = ("model:org/judge", "math_accuracy", punishment, "my.rewards.length")
    assert config.rewards.functions == wanted
    assert load_rewards((punishment,))
    assert migrate(written(tmp_path, "a.sh", said), devices=1)[0].rewards.functions == ("model:org/judge",)


def test_evaluations_of_trl_sample_as_many_completions_as_training(tmp_path):
    said = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["r"], "num_generations": 16}
    for more, samples in (({}, 16), ({"num_generations_eval": 2}, 2)):
        config, _ = migrate(written(tmp_path, "a.json", said | more), trainer="grpo", devices=2)
        expect(config, eval={"samples": samples})


def test_a_mixture_of_trl(tmp_path):
    Path("one.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 30)
    Path("two.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 50)
    files = ({"path": "json", "data_files": "one.jsonl"}, {"path": "json", "data_files": {"train": "two.jsonl"}})
    said = {
        "model_name_or_path": "m", "learning_rate": 1e-5, "per_device_train_batch_size": 8, "num_train_epochs": 1,
        "test_split_size": 0.1, "eval_strategy": "epoch", "dataset_name": "unread", "dataset_config": "unread",
    }  # fmt: skip
    file = written(tmp_path, "mix.yaml", yaml.safe_dump(said | {"datasets": list(files)}))
    config, _ = migrate(file, trainer="sft", devices=1)
    expect(
        config,
        _={"total_steps": 9},  # 72 rows
        data={
            "sources": (files[0], {"path": "json", "data_files": "two.jsonl", "split": "train"}),
            "name": None,
            "eval_split": None,
        },
        eval={"fraction": 0.1, "every": 9},
    )
    named = [
        {"path": "org/a", "name": "main", "split": "train[:50%]", "columns": ["messages"], "fraction": 0.25},
        {"path": "org/b", "data_dir": "d", "fraction": 0.75},
    ]
    said = {"datasets": named, "streaming": True, "output_dir": "o", "max_steps": 4}
    config, text = migrate(written(tmp_path, "mix.yaml", yaml.safe_dump(said)), trainer="sft", devices=1)
    sources = (
        {"path": "org/a", "name": "main", "split": "train[:50%]", "weight": 0.25},
        {"path": "org/b", "weight": 0.75},
    )
    expect(config, data={"sources": sources, "streaming": True})
    text = " ".join(text.split())
    for noted in ("columns = ['messages'] of org/a", "data_dir = 'd' of org/b", "fraction = 0.75 of org/b"):
        assert f"datasets: {noted}" in text
    typed = {"datasets": [{"path": "org/a", "type": "alpaca"}], "learning_rate": 1e-5, "output_dir": "o"}
    assert "of axolotl" in migrate(written(tmp_path, "typed.yaml", yaml.safe_dump(typed)), devices=1)[1]


def of_mixture(tmp_path, *entries, **more):
    """A file of TRL's sft with a mixture, and its notes."""
    said = {"model_name_or_path": "m", "per_device_train_batch_size": 1, "num_train_epochs": 1, "output_dir": "o"}
    file = written(tmp_path, "mix.yaml", yaml.safe_dump(said | {"datasets": list(entries)} | more))
    config, text = migrate(file, trainer="sft", devices=1)
    return config, " ".join(text.split('"""')[1].split())


def of_file(name, count, **more):
    Path(name).write_text('{"prompt": "a", "completion": "b"}\n' * count)
    return {"path": "json", "data_files": name} | more


def test_an_epoch_of_a_mixture_of_trl_keeps_its_shares(tmp_path):
    """No source is taken twice: trl.scripts.utils.get_dataset."""
    few, many = of_file("few.jsonl", 30, fraction=0.9), of_file("many.jsonl", 500, fraction=0.1)
    config, notes = of_mixture(tmp_path, few, many)
    expect(config, _={"total_steps": 33, "num_epochs": None})
    assert "num_epochs" not in notes
    expect(of_mixture(tmp_path, few, many, test_split_size=0.2)[0], _={"total_steps": 26}, eval={"fraction": 0.2})
    config, _ = of_mixture(tmp_path, few, many | {"fraction": 0.0})
    expect(
        config, _={"total_steps": 30}, data={"sources": ({"path": "json", "data_files": "few.jsonl", "weight": 0.9},)}
    )
    for more in ({"packing": True}, {"datasets": [few, {"path": "org/b", "fraction": 0.1}]}):
        config, notes = of_mixture(tmp_path, few, many, **more)
        assert config.num_epochs == 1.0 and "an epoch there has the rows that fraction leaves" in notes
        assert ("add --rows=N of those" in notes) == ("packing" not in more)


def test_a_mixture_of_trl_holds_out_a_number_of_rows(tmp_path):
    rows, two = of_file("rows.jsonl", 50), of_file("two.jsonl", 150)
    strategy = {"eval_strategy": "steps", "eval_steps": 5}

    def held_out(size, *entries):
        config, notes = of_mixture(tmp_path, *entries, test_split_size=size, **strategy)
        return config.eval.fraction, config.eval.every, "holds nothing out" in notes, config

    assert held_out(20, rows, two)[:3] == (0.1, 5, False)
    *sliced, config = held_out(20, {"path": "org/a"})
    assert sliced == [0.0, 5, False]
    expect(config, data={"sources": ({"path": "org/a", "split": "train[20:]", "eval_split": "train[:20]"},)})
    assert held_out(20, {"path": "org/a"}, {"path": "org/b"})[:3] == (0.0, -1, True)
    assert held_out(50, rows)[:3] == (0.0, -1, True)


def test_an_entry_of_a_mixture_that_cannot_be_read_costs_that_entry(tmp_path):
    parts = {"path": "json", "data_files": {"train": "a.jsonl", "test": ["b.jsonl", "c.jsonl"]}}
    for split, read in (("train[:10%]", ("a.jsonl", "train[:10%]")), ("test", (["b.jsonl", "c.jsonl"], "train"))):
        (source,) = of_mixture(tmp_path, parts | {"split": split})[0].data.sources
        assert (source["data_files"], source["split"]) == read
    for entry, fault in (
        (parts | {"split": "dev"}, "its data_files have no split dev"),
        ("org/b", "it names no path"),
        ({"name": "b"}, "it names no path"),
        ({"path": "org/b", "fraction": "half"}, "its fraction is 'half', and not a number from 0 on"),
        ({"path": "org/b", "fraction": -1}, "its fraction is -1, and not a number from 0 on"),
    ):
        config, notes = of_mixture(tmp_path, entry, {"path": "org/a"})
        assert config.data.sources == ({"path": "org/a"},) and f"is left out: {fault}" in notes
        config, notes = of_mixture(tmp_path, entry)
        assert config.data.path == "DATA" and "datasets has no entry that is trained on: set data.path" in notes
    assert "datasets = 'org/a' is left out: datasets is 'org/a'" in of_mixture(tmp_path, datasets="org/a")[1]


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped", "bfd", None])
def test_packing_strategies_of_trl(tmp_path, strategy):
    said = {"model_name_or_path": "m", "dataset_name": "d", "max_steps": 4, "packing": True}
    said |= {"truncation_mode": "keep_end"} | ({"packing_strategy": strategy} if strategy else {})
    config, text = migrate(written(tmp_path, "a.json", said), trainer="sft", devices=1)
    # bfd cuts the end, whatever the mode
    overlong = "split" if strategy in ("bfd_split", "wrapped") else "truncate_right"
    packed = "wrapped" if strategy == "wrapped" else "first_fit"
    expect(config, data={"packing": True, "packing_strategy": packed, "overlong": overlong})
    assert "packing_strategy" not in text.partition("from jaxrl_llm")[0]


def test_geometric_means_of_trl(tmp_path):
    script = """
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

args = GMPOConfig(output_dir="o", max_steps=6, num_generations=4, beta=0.02, {more}use_vllm=True)
GMPOTrainer("m", "rewards:f", args, train_dataset="d")
"""
    config, text = migrate(written(tmp_path, "a.py", script.format(more="")), devices=2)
    expect(
        config,
        algorithm={
            "loss": "gmpo", "aggregation": "sequence", "epsilon_low": 0.4, "epsilon_high": 0.4, "beta": 0.02,
            "kl_bias_correction": False, "importance_correction": "none",
        },
        batch={"prompts": 4},
    )  # fmt: skip
    assert "does not read it" not in text
    more = "epsilon_high=0.5, loss_type='dr_grpo', off_policy_mask_threshold=0.1, entropy_coef=0.1, "
    config, text = migrate(written(tmp_path, "a.py", script.format(more=more)), devices=2)
    expect(
        config,
        algorithm={"loss": "gmpo", "epsilon_high": 0.5, "entropy_coef": 0.0, "off_policy_mask_threshold": None},
    )
    assert "loss_type, off_policy_mask_threshold, entropy_coef: left out" in " ".join(text.split())


def test_asynchronous_grpo_of_trl(tmp_path):
    script = """
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

args = AsyncGRPOConfig(output_dir="o", num_train_epochs=2, {more})
AsyncGRPOTrainer("m", "rewards:f", args, train_dataset="d")
"""
    more = "gradient_accumulation_steps=4, weight_sync_steps=2, epsilon_high=0.28, token_budget=0"
    config, text = migrate(written(tmp_path, "a.py", script.format(more=more)), devices=2, rows=20)
    expect(
        config,
        _={"total_steps": 5},  # 40 prompts
        rollout={"staleness": 8, "max_completion_length": 2048, "group_size": 8},
        algorithm={
            "loss": "auto", "old_logps": "sampler", "aggregation": "microbatch_token", "epsilon_high": 0.28,
            "scale_rewards": "group", "beta": 0.0,
        },
        batch={"prompts": 8, "minibatches": 1, "microbatch_rows": 16},
        optimizer={"learning_rate": 1e-6, "schedule": "constant"},
        data={"shuffle": False},
    )  # fmt: skip
    assert "an update there has as many completions" not in " ".join(text.split())
    config, text = migrate(written(tmp_path, "a.py", script.format(more="max_staleness=0")), devices=1, rows=20)
    expect(config, rollout={"staleness": 0}, algorithm={"aggregation": "token"})
    assert "an update there has as many completions" in " ".join(text.split())
    flags = "--model_name_or_path m --dataset_name d --max_steps 4 --max_staleness 1"
    config, _ = migrate(written(tmp_path, "a.sh", f"accelerate launch async_grpo.py {flags}"), devices=1)
    expect(config, rollout={"staleness": 1})


def test_teachers_behind_servers_of_trl(tmp_path):
    script = """
from trl.experimental.{module} import {kind}Config, {kind}Trainer

args = {kind}Config(output_dir="o", max_steps=2, per_device_train_batch_size=4, {more})
{kind}Trainer("m", args, train_dataset="d")
"""
    words = {"module": "async_distillation", "kind": "AsyncDistillation"}
    urls = "teacher_server_urls={'math': 'http://h:1', 'code': 'http://h:2'}, max_staleness=2, teacher_top_k=16"
    config, text = migrate(written(tmp_path, "a.py", script.format(**words, more=urls)), devices=2)
    expect(
        config,
        teacher={
            "path": "server(url='http://h:1/v1', model='MODEL')", "form": "divergence", "beta": 0.0, "top_k": 16,
            "tail": True,
        },
        rollout={"staleness": 2, "max_completion_length": 2048},
        algorithm={"old_logps": "sampler", "advantage": "zero", "aggregation": "token"},
        batch={"prompts": 8},
    )  # fmt: skip
    assert "names 2 teachers" in " ".join(text.split())
    words = {"module": "server_distillation", "kind": "ServerDistillation"}
    more = "teacher_model_server_url='http://h:1/', beta=0.5, temperature=0.7"
    config, text = migrate(written(tmp_path, "a.py", script.format(**words, more=more)), devices=2)
    expect(config, teacher={"beta": 0.5, "top_k": 1}, rollout={"temperature": 1.0, "staleness": 0})
    noted = " ".join(text.partition("from jaxrl_llm")[0].split())
    assert "beta = 0.5 is over the teacher's likeliest token" in noted
    assert "temperature = 0.7: servers give log-probs at temperature 1" in noted


def test_rloo_and_cpo_of_trl(tmp_path):
    said = {"output_dir": "o", "max_steps": 5, "normalize_advantages": True, "reward_clip_range": [-1.0, 2.0]}
    rloo, _ = migrate(written(tmp_path, "a.json", said), trainer="rloo", devices=1)
    expect(
        rloo,
        algorithm={
            "advantage": "rloo(normalize=True)",
            "loss": "rloo",
            "beta": 0.05,
            "kl_in_reward": True,
            "aggregation": "sequence",
            "reward_clip": (-1.0, 2.0),
        },
        rollout={"group_size": 2},
        batch={"prompts": 4},
    )
    simpo, _ = migrate(
        written(
            tmp_path,
            "b.json",
            {
                "max_steps": 5,
                "loss_type": "simpo",
                "simpo_gamma": 1.6,
                "beta": 2.0,
                "label_smoothing": 0.1,
                "output_dir": "o",
            },
        ),
        devices=1,
    )
    expect(simpo, algorithm={"loss": "simpo(gamma=1.6, label_smoothing=0.1)", "beta": 2.0})
    hinge, _ = migrate(
        written(tmp_path, "c.json", {"max_steps": 5, "loss_type": "hinge", "output_dir": "o"}), trainer="cpo", devices=1
    )
    expect(hinge, algorithm={"loss": "hinge+sft", "loss_weights": (), "reference_free": True})


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("sigmoid", "cpo(nll_weight=0.5)"),
        ("simpo", "simpo(nll_weight=0.5)"),
        ("hinge", "hinge+sft(nll_weight=0.5)"),
        ("alphapo", "alphapo(alpha=0.0)"),  # TRL sets cpo_alpha to 0 there
    ],
)
def test_the_likelihood_term_of_cpo(tmp_path, kind, loss):
    said = {"max_steps": 5, "loss_type": kind, "cpo_alpha": 0.5, "output_dir": "o"}
    config, _ = migrate(written(tmp_path, "a.json", said), trainer="cpo", devices=1)
    assert config.algorithm.loss == loss
    terms = preference_spec(config).losses
    weights = [term.weight * term.nll_weight for term in terms if term.nll_weight is not None]
    assert weights == [0.0 if kind == "alphapo" else 0.5]


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("simpo", "alphapo(gamma=0.7, alpha=0.5, nll_weight=1.0)"),
        ("alphapo", "alphapo(gamma=0.7, alpha=0.5)"),
        ("sigmoid", "cpo"),
    ],
)
def test_the_alpha_of_cpo(tmp_path, kind, loss):
    """TRL transforms the log-probs of every loss where alpha is not 0, and leaves the likelihood to cpo_alpha."""
    said = {"max_steps": 5, "loss_type": kind, "alpha": 0.5, "simpo_gamma": 0.7, "output_dir": "o"}
    config, text = migrate(written(tmp_path, "a.json", said), trainer="cpo", devices=1)
    assert config.algorithm.loss == loss
    assert ("alpha = 0.5 is left out" in " ".join(text.split())) == (kind == "sigmoid")


@pytest.mark.parametrize(
    ("said", "loss", "rows"),
    [
        ({}, "tpo", 6),
        ({"tpo_alpha": 0.5, "label_smoothing": 0.1}, "tpo(label_smoothing=0.1, nll_weight=0.5)", 6),
        ({"loss_type": "tpo-l", "tpo_l_gamma": 1.5}, "tpo_l(gamma=1.5)", 6),
        ({"loss_type": "hinge", "tpo_alpha": 0.5}, "hinge+gold_sft(nll_weight=0.5)", 6),
        ({"loss_type": "ipo"}, "ipo+gold_sft", 6),
        ({"tpo_alpha": 0.0}, "cpo(nll_weight=0.0)", 4),
        ({"loss_type": "tpo-l", "tpo_alpha": 0.0}, "simpo(nll_weight=0.0)", 4),
        ({"loss_type": "ipo", "tpo_alpha": 0.0}, "ipo", 4),
    ],
)
def test_tpo_of_trl(tmp_path, said, loss, rows):
    """A pass of two triples is six rows; without its likelihood term no gold completion is read."""
    more = {"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "output_dir": "o"}
    config, _ = migrate(written(tmp_path, "a.json", {**said, **more}), trainer="tpo", devices=1)
    expect(
        config,
        algorithm={
            "name": "preference",
            "loss": loss,
            "beta": 0.01,
            "reference_free": said.get("loss_type") in ("hinge", "ipo"),
        },
        optimizer={"learning_rate": 5e-7},
        batch={"prompts": 4, "microbatch_rows": rows},
        data={"max_length": 1024, "overlong": "truncate_right"},
    )


def test_devices_of_axolotls_command(tmp_path):
    """As its page has them: the server on two GPUs, and training on two others."""
    file = (
        "base_model: a/b\nrl: grpo\nlearning_rate: 1e-6\nmax_steps: 5\nmicro_batch_size: 8\ntrl: {num_generations: 4}\n"
    )
    written(tmp_path, "grpo.yaml", file)
    shell = (
        "CUDA_VISIBLE_DEVICES=2,3 axolotl vllm-serve grpo.yaml &\n"
        "CUDA_VISIBLE_DEVICES=0,1 axolotl train grpo.yaml --num-processes 2\n"
    )
    for devices, prompts in ((0, 4), (4, 8)):
        config, text = migrate(written(tmp_path, "a.sh", shell), devices=devices)
        expect(config, batch={"prompts": prompts}, model={"path": "a/b"})
        assert "one device is assumed" not in text


@pytest.mark.parametrize(
    ("end", "pushed", "title", "tags"),
    [
        ("trainer.create_model_card(model_name='mine', dataset_name='d', tags=['a', 'b'])", None, "mine", ("a", "b")),
        ("trainer.create_model_card('mine', 'd', 'a')\ntrainer.push_to_hub()", "out", "mine", ("a",)),
        ("if args.push_to_hub:\n    trainer.push_to_hub()", None, None, ()),
        ("if __name__ == '__main__':\n    trainer.push_to_hub(dataset_name='d')", "out", None, ()),
    ],
)
def test_what_a_script_of_trl_does_with_its_model(tmp_path, end, pushed, title, tags):
    script = (
        "from datasets import load_dataset\nfrom trl import DPOConfig, DPOTrainer\n"
        "args = DPOConfig(output_dir='here/out', max_steps=2)\n"
        "trainer = DPOTrainer(model='a/b', args=args, train_dataset=load_dataset('c/d', split='train'))\n"
        f"trainer.train()\n{end}\n"
    )
    config, _ = migrate(written(tmp_path, "dpo.py", script))
    expect(config, export={"push_to_hub": pushed, "title": title, "tags": tags}, data={"path": "c/d"})


@pytest.mark.parametrize(
    ("given", "said", "callbacks", "noted"),
    [
        (
            "Mine(), Mine(5), Mine(every=6), Theirs()",
            "",
            ("c_functions.py:Mine", "c_functions.py:Mine(every=5)", "c_functions.py:Mine(every=6)", "b:Theirs"),
            "",
        ),
        ("EarlyStoppingCallback(3)", "", (), "nothing is evaluated while it trains"),
        (
            "EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=0.1), mine",
            "eval_strategy='steps', eval_steps=5, metric_for_best_model='eval_loss'",
            (
                "c_functions.py:Mine(every=7)",
                "early_stopping(metric='eval/loss', mode='min', patience=3, min_delta=0.1)",
            ),
            "",
        ),
        ("Mine(len(rows))", "", (), "Mine(len(rows)) is made when the script runs"),
        ("Mine(5, 6)", "", (), "Mine(5, 6) is made when the script runs"),
        ("Theirs(5)", "", (), "Theirs(5) is made when the script runs"),
    ],
)
def test_callbacks_of_a_script(tmp_path, given, said, callbacks, noted):
    script = (
        "from datasets import load_dataset\nfrom transformers import EarlyStoppingCallback\nfrom b import Theirs\n"
        "from trl import DPOConfig, DPOTrainer\n\nclass Mine:\n    def __init__(self, every=1):\n"
        "        self.every = every\n\n    def on_step(self, moment):\n        pass\n\nmine = Mine(every=7)\n"
        f"rows = load_dataset('c/d', split='train')\nargs = DPOConfig(output_dir='o', max_steps=9, {said})\n"
        f"DPOTrainer(model='a/b', args=args, train_dataset=rows, callbacks=[{given}]).train()\n"
    )
    config, text = migrate(written(tmp_path, "c.py", script).name)
    expect(config, _={"callbacks": callbacks})
    assert noted in " ".join(text.split())
    if not noted:
        later = script.replace(").train()", ")").replace("DPOTrainer(model", "trainer = DPOTrainer(model")
        later = later.replace(f", callbacks=[{given}]", "")
        later += "".join(f"trainer.add_callback({one})\n" for one in given.replace("), ", ")\n").split("\n"))
        config, _ = migrate(written(tmp_path, "c.py", later + "trainer.train()\n").name)
        expect(config, _={"callbacks": callbacks})


@pytest.mark.parametrize(
    ("loaded", "given", "tokenizer", "template"),
    [
        ("'a/b'", "", None, None),
        ("'a/b-instruct'", "tokenizer.pad_token = tokenizer.eos_token", "a/b-instruct", None),
        ("NAME", "tokenizer.chat_template = '{{ x }}'", None, "{{ x }}"),
    ],
)
def test_tokenizers_of_a_script(tmp_path, loaded, given, tokenizer, template):
    """A base model is often given the tokenizer of its instruct model, or a template."""
    script = (
        "from datasets import load_dataset\nfrom transformers import AutoTokenizer\n"
        "from trl import SFTConfig, SFTTrainer\nNAME = 'a/b'\n"
        f"tokenizer = AutoTokenizer.from_pretrained({loaded})\n{given}\n"
        "SFTTrainer(model=NAME, args=SFTConfig(max_steps=2), train_dataset=load_dataset('c/d', split='train'), "
        "processing_class=tokenizer).train()\n"
    )
    config, _ = migrate(written(tmp_path, "sft.py", script))
    expect(config, model={"path": "a/b", "tokenizer": tokenizer}, data={"chat_template": template})
    read = written(tmp_path, "sft.py", script.replace("'{{ x }}'", "open('x').read()"))
    assert ("set data.chat_template" in migrate(read)[1]) == bool(template)


@pytest.mark.parametrize(
    ("rows", "split", "noted"),
    [
        ("data.select(range(100))", "train[:100]", None),
        ("data.select(range(N)).shuffle(seed=1)", "train[:9]", None),
        ("data.shuffle(seed=1).select(range(args.n))", "train", "select(range(args.n))"),
        ("data.filter(many()).select(range(100))", "train", "select(range(100)), filter(many())"),
        ("data.select([args.n])", "train", "select([args.n])"),
        ("data.filter(args.ok).map(form)", "train", "filter(args.ok)"),
        ("data.map(args.f).map(form)", "train", "map(args.f)"),
    ],
)
def test_rows_that_a_script_chooses(tmp_path, rows, split, noted):
    script = (
        "from datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\nN = 9\n"
        "def ok(row):\n    return True\n\ndef form(row):\n    return {'text': row['t']}\n\n"
        f"data = load_dataset('c/d', split='train')\nrows = {rows}\n"
        "SFTTrainer(model='a/b', args=SFTConfig(max_steps=2), train_dataset=rows).train()\n"
    )
    config, text = migrate(written(tmp_path, "rows.py", script))
    expect(config, data={"path": "c/d", "split": split})
    found = re.search(r"changes its rows, which is not done here: (.*?) - ", " ".join(text.split()))
    assert (found and found[1]) == noted


def test_a_script_that_is_not_beside_its_command(tmp_path):
    note = "train_grpo.py, which it starts, is not beside it"
    file = written(tmp_path, "a.sh", "accelerate launch train_grpo.py\n")
    assert note in migrate(file)[1]
    written(tmp_path, "train_grpo.py", "from trl import GRPOTrainer\nGRPOTrainer(model='a/b', reward_funcs='c/d')\n")
    assert note not in migrate(file)[1]
    flags = written(tmp_path, "b.sh", "accelerate launch trl/scripts/sft.py --model_name_or_path a/b\n")
    assert "beside it" not in migrate(flags)[1]


@pytest.mark.parametrize(("finds", "rows"), [(False, 8), (True, 0)])
def test_micro_batches_that_fit_are_found_here_too(tmp_path, finds, rows):
    said = {"max_steps": 5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "output_dir": "o"}
    config, text = migrate(
        written(tmp_path, "a.json", {**said, "auto_find_batch_size": finds}), trainer="dpo", devices=1
    )
    expect(config, batch={"prompts": 16, "microbatch_rows": rows})
    assert not finds or "auto_find_batch_size = True: part of batch.microbatch_rows" in text


def test_process_reward_models(tmp_path):
    """Of TRL's script and of axolotl, whose data sets say what steps are."""
    script = (
        "from transformers import AutoModelForTokenClassification\n"
        "from trl.experimental.prm import PRMConfig, PRMTrainer\n"
        "model = AutoModelForTokenClassification.from_pretrained('Qwen/Qwen2-0.5B', num_labels=2)\n"
        "args = PRMConfig(output_dir='out', step_separator='\\n\\n', train_on_last_step_only=True)\n"
        "PRMTrainer(model=model, args=args, train_dataset='trl-lib/math_shepherd').train()\n"
    )
    config, _ = migrate(written(tmp_path, "prm.py", script), devices=1)
    validate(config)
    assert (config.algorithm.name, config.model.path) == ("process_reward_model", "Qwen/Qwen2-0.5B")
    assert (config.data.step_separator, config.data.loss_on) == ("\n\n", "last_step")
    assert (config.data.max_length, config.data.overlong) == (1024, "truncate_right")
    assert config.optimizer.learning_rate == 1e-5
    said = {"step_separator": "\n", "max_completion_length": 600}
    yaml = "base_model: m\nlearning_rate: 1\nprocess_reward_model: true\nnum_labels: 2\nval_set_size: 0.1\n"
    for more, notes in (
        ([], ["max_completion_length = 600 cuts the steps"]),
        ([{"path": "e", "type": "stepwise_supervised", "step_separator": " "}], ["step_separator differs between"]),
    ):
        sources = [{"path": "d", "type": "stepwise_supervised", **said}, *more]
        config, text = migrate(written(tmp_path, "a.yaml", f"{yaml}datasets: {json.dumps(sources)}\n"), devices=1)
        validate(config)
        assert config.algorithm.name == "process_reward_model" and config.data.step_separator is None
        assert config.data.sources == tuple({"path": x["path"], "type": "stepwise"} for x in sources)
        assert all(note in " ".join(text.split()) for note in notes) and "num_labels" not in text.split('"""')[1]


def test_a_loss_that_tpo_of_trl_does_not_have(tmp_path):
    said = {"max_steps": 5, "loss_type": "dpo", "output_dir": "o"}
    config, text = migrate(written(tmp_path, "a.json", said), trainer="tpo", devices=1)
    assert config.algorithm.loss == "tpo"
    assert "loss_type is 'dpo', which has no equivalent; there are sigmoid, tpo-l" in " ".join(text.split())


BEMA = """
from trl import DPOConfig
from trl.experimental.bema_for_ref_model import BEMACallback, DPOTrainer

bema = BEMACallback({}, lag=5)
trainer = DPOTrainer(
    "m", args=DPOConfig("o", max_steps={}), train_dataset=load_dataset("d", split="train"), callbacks=[bema]
)
trainer.train()
"""


def test_the_moving_average_of_trl(tmp_path):
    follows = "update_freq=10, update_ref_model=True, ref_model_update_freq=20, ref_model_update_after=5"
    config, text = migrate(written(tmp_path, "a.py", BEMA.format(follows, 100)), devices=1)
    expect(
        config,
        _={"callbacks": ()},
        average={"every": 10, "start": 0, "lag": 5.0, "multiplier": 1.0, "ema_power": 0.5},
        algorithm={"ref_sync_to": "average", "ref_sync_steps": 20, "ref_sync_after": 5, "ref_mixup_alpha": 1.0},
    )
    assert "made_1" not in text
    config, text = migrate(written(tmp_path, "b.py", BEMA.format("10, 0.7, update_after=20", 100)), devices=1)
    expect(config, average={"every": 10, "ema_power": 0.7, "start": 20}, algorithm={"ref_sync_steps": 0})
    config, text = migrate(written(tmp_path, "c.py", BEMA.format("", 100).replace("(, ", "(")), devices=1)
    expect(config, average={"every": 0, "lag": 10.0})
    assert "BEMACallback is left out: its first update would be after step 400 of 100" in " ".join(text.split())


# verl.


def test_a_grpo_script_of_verl():
    config, text = made("verl_grpo.sh", rows=7473)
    expect(
        config,
        _={"output_dir": "checkpoints/verl_grpo_gsm8k/qwen2_7b", "total_steps": 105},  # 15 x (7473 // 1024)
        model={"path": "Qwen/Qwen2-7B-Instruct", "remat": "block"},
        data={
            "path": "data/gsm8k/train.parquet",
            "eval_path": "data/gsm8k/test.parquet",
            "eval_split": "train",
            "overlong": "filter",
        },
        rollout={"group_size": 5, "max_prompt_length": 512, "max_completion_length": 1024, "top_k": 0},
        rewards={"functions": ("rewards/gsm8k.py:compute_score",)},
        algorithm={
            "name": "grpo",
            "advantage": "group(eps=1e-06)",
            "loss": "ppo_clip(dual_clip=3.0)",
            "aggregation": "token",
            "beta": 0.001,
            "kl": "k3",
            "kl_in_reward": False,
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "offload_reference": True,
        },
        optimizer={"learning_rate": 1e-6, "weight_decay": 0.01, "no_decay": ()},
        batch={"prompts": 1024, "minibatches": 4, "microbatch_rows": 160},  # 20 rows x 8 GPUs, of 256 x 5
        checkpoint={"every": 20, "keep_every": 1},
        eval={
            "every": 5,
            "samples": 1,
            "at_start": True,
            "at_end": True,
            "temperature": 0.0,
            "greedy": False,
            "top_k": None,
            "estimate": "unbiased",
        },
        logging={"names": "verl", "completions_every": 0},
        mesh={"fsdp": -1, "data": 1},
    )
    assert "trainer.made_up = 1: an unknown key" in text
    assert 'config.algorithm.loss = "ppo_clip(dual_clip=3.0)"' in text


def test_a_ppo_yaml_of_verl():
    config, _ = made("verl_ppo.yaml")
    expect(
        config,
        _={"output_dir": "checkpoints/verl_examples/ppo-512", "total_steps": 300},
        data={
            "overlong": "truncate_left",
            "sources": (
                {"path": "math/train.parquet", "split": "train"},
                {"path": "gsm8k/train.parquet", "split": "train"},
            ),
        },
        rollout={"group_size": 1, "temperature": 0.8, "max_completion_length": 512},
        rewards={"functions": ("model:sfairXC/FsfairX-LLaMA3-RM-v0.1(max_length=2048)",)},
        algorithm={
            "name": "ppo",
            "advantage": "ppo(gamma=1.0, lam=0.95)",
            "aggregation": "sequence",
            "beta": 0.01,
            "kl": "k1",
            "kl_in_reward": True,
            "kl_controller": "adaptive",
            "kl_target": 0.2,
            "kl_horizon": 10000.0,
            "num_iterations": 2,
            "entropy_coef": 0.001,
        },
        critic={"path": "deepseek-ai/deepseek-llm-7b-chat", "learning_rate": 9e-6, "epsilon": 0.5, "warmup_steps": 9},
        optimizer={"schedule": "cosine", "warmup_ratio": 0.05, "min_lr_ratio": 0.1},
        batch={"prompts": 512, "minibatches": 4, "microbatch_rows": 32},
        eval={
            "every": 0,
            "samples": 4,
            "at_start": True,
            "at_end": False,
            "temperature": 0.7,
            "top_p": 0.95,
            "greedy": False,
            "estimate": "verl",
            "extremes": True,
        },
    )


VERL = "python -m verl.trainer.main_ppo trainer.total_training_steps=2 actor_rollout_ref.model.path=m "


def from_verl(tmp_path, *overrides):
    return of_verl(tmp_path, *overrides)[0]


def noted_from_verl(tmp_path, *overrides):
    """What to look at first, in one line."""
    return " ".join(of_verl(tmp_path, *overrides)[1].partition("from jaxrl_llm")[0].split())


def of_verl(tmp_path, *overrides, version=""):
    estimator = "" if any("adv_estimator" in x for x in overrides) else "algorithm.adv_estimator=grpo"
    said = f"{VERL} {estimator} {' '.join(overrides)}"
    return migrate(written(tmp_path, "run.sh", said), version=version)


def test_verl_compares_with_the_model_without_the_adapter_that_it_trains_on(tmp_path):
    key = "actor_rollout_ref.model.lora_adapter_path"
    expect(from_verl(tmp_path, f"{key}=adapter"), lora={"path": "adapter", "reference": "base"})
    assert from_verl(tmp_path, "actor_rollout_ref.model.lora_rank=8").lora.reference == "auto"


@pytest.mark.parametrize("mode", ["gspo", "sapo", "geo_mean", "cispo"])
def test_losses_of_verl_that_take_sequence_means(tmp_path, mode):
    config, _ = of_verl(tmp_path, f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}", version="0.8")
    expect(config, algorithm={"aggregation": "token" if mode == "cispo" else "sequence"})


def test_aggregations_that_changed_within_verl(tmp_path):
    gspo, means = "actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "actor_rollout_ref.actor.loss_agg_mode"
    assert "gspo takes token-mean since 0.9" in noted_from_verl(tmp_path, gspo)
    config = from_verl(tmp_path, gspo, f"{means}=seq-mean-token-sum-norm")
    expect(config, algorithm={"aggregation": "constant"})
    assert "gspo" not in noted_from_verl(tmp_path, gspo, f"{means}=seq-mean-token-mean")
    expect(from_verl(tmp_path, f"{means}=token-sum"), algorithm={"aggregation": "token_sum"})
    assert "divides by the rows since 0.8" in noted_from_verl(tmp_path, f"{means}=seq-mean-token-sum-norm")


def test_passk_of_verl_without_its_division(tmp_path):
    passk = ("algorithm.adv_estimator=grpo_passk", "actor_rollout_ref.rollout.n=4")
    expect(from_verl(tmp_path, *passk), algorithm={"advantage": "passk"})
    config = from_verl(tmp_path, *passk, "algorithm.norm_adv_by_std_in_grpo=False")
    expect(config, algorithm={"advantage": "passk(normalize=False)"})


def test_gpg_of_verl(tmp_path):
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"
    config = from_verl(tmp_path, "algorithm.adv_estimator=gpg", "actor_rollout_ref.rollout.n=4", loss)
    expect(config, algorithm={"advantage": "gpg", "loss": "reinforce"})


@pytest.mark.parametrize("mode", ["dppo_tv", "dppo_kl"])
def test_dppo_of_verl_compares_with_the_trainer(tmp_path, mode):
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={mode} actor_rollout_ref.actor.clip_ratio_low=0.15"
    expected = {"loss": f"{mode}(maximum=3.0)", "old_logps": "trainer", "epsilon_low": 0.15, "aggregation": "token"}
    expect(from_verl(tmp_path, loss), algorithm=expected)
    config = from_verl(tmp_path, loss, "actor_rollout_ref.actor.clip_ratio_c=20.0")
    expect(config, algorithm={"loss": f"{mode}(maximum=20.0)"})


def test_dro_of_verl_has_no_default(tmp_path):
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=dro"
    assert "loss_mode = 'dro' is left out" in noted_from_verl(tmp_path, loss)
    config = from_verl(tmp_path, loss, "actor_rollout_ref.actor.policy_loss.dro_beta=0.3")
    expect(config, algorithm={"loss": "dro(beta=0.3)", "old_logps": "auto"})


def test_bypass_mode_of_verl(tmp_path):
    """It compares with the sampler, by ppo_clip or reinforce whatever loss_mode says; only the latter has weights."""
    at, mode = "algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
    bypass = (
        f"{at}.bypass_mode=True {at}.rollout_is=sequence {at}.rollout_rs=seq_mean_k3 {at}.rollout_rs_threshold=0.01"
    )
    config = from_verl(tmp_path, bypass, mode)
    expected = {"loss": "ppo_clip(dual_clip=3.0)", "old_logps": "sampler", "importance_correction": "none"}
    expect(config, algorithm=expected | {"rejection": "seq_mean_k3", "rejection_bounds": "0.01"})
    config = from_verl(tmp_path, bypass, mode, f"{at}.loss_type=reinforce")
    expected = {"loss": "reinforce", "old_logps": "sampler", "importance_correction": "sequence_truncate"}
    expect(config, algorithm=expected | {"importance_max": 2.0, "aggregation": "token"})
    assert f"{at}.loss_type = 'gspo' is left out" in noted_from_verl(tmp_path, bypass, f"{at}.loss_type=gspo")


@pytest.mark.parametrize("written_as", ["RolloutCorrectionConfig.{}", "{}"])
def test_presets_of_verl(tmp_path, written_as):
    at = "algorithm.rollout_correction"
    config = from_verl(tmp_path, f"'{at}={written_as.format('bypass_pg_is(threshold=3.0)')}'")
    expect(config, algorithm={"rollout_correction": "bypass_pg_is(threshold=3.0)", "loss": "reinforce"})
    config = from_verl(tmp_path, f"'{at}={written_as.format('decoupled_geo_rs()')}'")
    expect(config, algorithm={"rollout_correction": "decoupled_geo_rs", "loss": "ppo_clip(dual_clip=3.0)"})


def test_rewards_of_verl_have_a_section_since_0_9(tmp_path):
    at = "reward.reward_kwargs.overlong_buffer_cfg"
    own = "reward.custom_reward_function.path=score.py reward.custom_reward_function.name=score"
    buffer = f"reward.reward_manager.name=dapo +{at}.enable=True +{at}.len=20 +reward.reward_kwargs.max_resp_len=512"
    config, text = of_verl(tmp_path, own, buffer, "reward.num_workers=4")
    expect(config, rewards={"functions": ("score.py:score",)}, algorithm={"overlong_buffer": 20})
    assert "known key" not in text and "max_resp_len = " not in text.partition("from jaxrl_llm")[0]
    judge = "reward.reward_model.enable=True reward.reward_model.model_path=judge"
    expect(from_verl(tmp_path, judge), rewards={"functions": ("model:judge",)})
    asked = of_verl(tmp_path, judge, own)
    expect(asked[0], rewards={"functions": ("score.py:score",)})
    assert "verl serves judge to the reward function" in " ".join(asked[1].split())
    longer = noted_from_verl(tmp_path, own, buffer, "data.max_response_length=600")
    assert "reward.reward_kwargs.max_resp_len = 512: the punishment here ends at" in longer


def test_a_reward_model_of_verl_is_the_one_reward(tmp_path):
    """Before 0.9 its reward managers return rm_scores where a batch has them, and call no function."""
    model = "reward_model.enable=True reward_model.model.path=judge reward_model.micro_batch_size_per_gpu=null"
    config, text = of_verl(tmp_path, model, "custom_reward_function.path=r.py", version="0.8")
    expect(config, rewards={"functions": ("model:judge",)})
    flat = " ".join(text.split())
    assert "custom_reward_function.path is left out: with reward_model.enable verl takes" in flat
    assert "left out" not in noted_from_verl(tmp_path, model)


def test_tools_of_verl(tmp_path):
    """Functions stay as they are; classes and loops of one's own are named; turns and calls have no limit there."""
    tools = "from verl.tools.function_tool import function_tool\n\n\n"
    tools += "@function_tool\ndef search(query: str): ...\n\n\n"
    tools += '@function_tool("calc")\nasync def calculator(x: int): ...\n\n\ndef other(): ...\n'
    file, turns = written(tmp_path, "tools.py", tools), "actor_rollout_ref.rollout.multi_turn"
    config, text = of_verl(tmp_path, f"{turns}.enable=True", f"{turns}.function_tool_path={file}")
    expect(
        config,
        environment={"tools": (f"{file}:search", f"{file}:calculator"), "max_turns": 512, "timeout": None},
    )
    flat = " ".join(text.split())
    assert "calculator have another name or schema there" in flat and "verl answers the first calls of a turn" in flat
    flat = noted_from_verl(tmp_path, f"{turns}.tool_config_path=tools.yaml", f"{turns}.max_assistant_turns=5")
    assert "the tools in tools.yaml are classes of verl" in flat and "no equivalent" not in flat
    absent = noted_from_verl(tmp_path, f"{turns}.function_tool_path=absent.py")
    assert "absent.py is not here: name its functions" in absent
    loop = noted_from_verl(tmp_path, "actor_rollout_ref.rollout.agent.default_agent_loop=mine")
    assert "default_agent_loop = mine: a loop of your own" in loop and "verl answers" not in loop


def test_gdpo_of_verl_names_its_rewards(tmp_path):
    parts = "'algorithm.gdpo_reward_keys=[format,accuracy]' 'algorithm.gdpo_reward_weights=[1,0.5]'"
    own = "custom_reward_function.path=r.py actor_rollout_ref.rollout.n=4"
    config = from_verl(tmp_path, "algorithm.adv_estimator=gdpo", parts, own)
    expect(config, algorithm={"advantage": "gdpo(eps=1e-06)"})
    expect(config, rewards={"functions": ("r.py:format", "r.py:accuracy"), "weights": (1.0, 0.5)})
    assert "adv_estimator = 'gdpo' is left out" in noted_from_verl(tmp_path, "algorithm.adv_estimator=gdpo", own)


def test_groups_of_verl_are_filtered_by_what_it_names(tmp_path):
    keys, own = (
        "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=",
        "custom_reward_function.path=r.py",
    )
    for metric, reward, expected in (("acc", own, "acc"), ("acc", "", None), ("score", own, None)):
        config = from_verl(tmp_path, f"{keys}{metric}", reward, "actor_rollout_ref.rollout.n=4")
        expect(config, algorithm={"dynamic_sampling": True, "dynamic_sampling_metric": expected})


def test_soft_punishment_of_verl(tmp_path):
    buffer = "reward_model.reward_kwargs.overlong_buffer_cfg"
    config = from_verl(tmp_path, f"+{buffer}.enable=True +{buffer}.len=20 +{buffer}.penalty_factor=0.5")
    expect(config, algorithm={"overlong_buffer": 20, "overlong_penalty": 0.5})


def test_no_loss_or_advantage_of_verl_is_left_behind_silently(tmp_path):
    """Every name that verl 0.9 registers gives a configuration, or an error that names it."""
    modes = "vanilla dppo_tv dppo_kl gspo sapo gpg clip_cov kl_cov geo_mean dro cispo bypass_mode"
    for mode in modes.split():
        beta = "actor_rollout_ref.actor.policy_loss.dro_beta=0.1"
        config = from_verl(tmp_path, f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}", beta)
        assert (policy_loss(config).function.__name__ == "ppo_clip") == (mode in ("vanilla", "bypass_mode"))
    estimators = (
        "gae grpo reinforce_plus_plus reinforce_plus_plus_baseline remax rloo opo grpo_passk gpg grpo_vectorized"
    )
    estimators += " rloo_vectorized optimal_token_baseline tir_optimal_token_baseline"
    for name in estimators.split():
        config = from_verl(tmp_path, f"algorithm.adv_estimator={name}", "actor_rollout_ref.rollout.n=4")
        assert (config.algorithm.name == "ppo") == (name == "gae")
        advantage_rule(config.algorithm.advantage)
    mode = noted_from_verl(tmp_path, "actor_rollout_ref.actor.policy_loss.loss_mode=newer")
    assert "loss_mode = 'newer' is left out" in mode and "there are vanilla" in mode
    estimator = noted_from_verl(tmp_path, "algorithm.adv_estimator=newer")
    assert "adv_estimator = 'newer' is left out" in estimator and "there are gae" in estimator


def test_critic_checkpoints_and_subsets_of_verl(tmp_path):
    """The critic's own optimizer and passes, what a checkpoint holds, the first rows, and entries of config.json."""
    config = from_verl(
        tmp_path,
        "algorithm.adv_estimator=gae trainer.n_gpus_per_node=2 critic.optim.weight_decay=0.2 critic.ppo_epochs=3",
        "critic.ppo_micro_batch_size_per_gpu=16 critic.optim.lr_warmup_steps_ratio=0.5 critic.ppo_mini_batch_size=128",
        "actor_rollout_ref.model.lora_rank=8 critic.model.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "data.train_max_samples=100 data.val_max_samples=7 data.chat_template=chatml",
        "actor_rollout_ref.model.override_config.rope_theta=1e6 "
        "actor_rollout_ref.model.override_config.attention_dropout=0.1",
    )
    expect(
        config,
        critic={"weight_decay": 0.2, "num_iterations": 3, "microbatch_rows": 32, "lr_warmup_steps": 1}
        | {"minibatches": 8, "lora_rank": 0, "offload": True, "offload_optimizer": None},
        checkpoint={"contents": ("state", "hf")},
        data={"split": "train[:100]", "chat_template": "chatml"},
        eval={"prompts": 7},
        model={"overrides": "rope_theta=1000000.0"},
    )
    rows = [written(tmp_path, name, '{"prompt": "p", "answer": "a"}\n' * 30) for name in ("a.jsonl", "b.jsonl")]
    few = "trainer.total_training_steps=null data.train_batch_size=8 trainer.total_epochs=2"
    one = from_verl(tmp_path, few, f"data.train_files={rows[0]} data.train_max_samples=20")
    expect(one, _={"total_steps": 4}, data={"split": "train[:20]"})  # two batches of 20 rows, twice
    both = f"data.train_files=[{rows[0]},{rows[1]}] data.train_max_samples=40"
    expect(from_verl(tmp_path, few, both), _={"total_steps": 10}, data={"split": "train"})
    alone = "actor_rollout_ref.actor.checkpoint.save_contents=['model']"
    model_only = from_verl(tmp_path, "algorithm.adv_estimator=gae", alone)
    expect(model_only, checkpoint={"contents": ("hf",)}, critic={"weight_decay": 0.01, "num_iterations": 0})
    loads, every = "actor_rollout_ref.actor.checkpoint.load_contents", ("model", "optimizer", "extra")
    expect(from_verl(tmp_path, f"{loads}=[model,extra]"), checkpoint={"load": ("model", "extra")})
    expect(from_verl(tmp_path, f"{loads}=[model,optimizer]"), checkpoint={"load": every})
    expect(from_verl(tmp_path, f"{loads}=[model] trainer.resume_mode=disable"), checkpoint={"load": every})
    adapters = "critic.model.lora_rank=4 critic.model.target_modules=q_proj critic.ppo_epochs=1"
    judge = "reward_model.enable=True reward_model.model.path=judge reward_model.model.fsdp_config.param_offload=True"
    judge += " reward_model.model.trust_remote_code=True"
    own = from_verl(tmp_path, "algorithm.adv_estimator=gae actor_rollout_ref.actor.ppo_epochs=2", adapters, judge)
    of_own = {"lora_rank": 4, "lora_alpha": 16.0, "lora_targets": ("q_proj",), "num_iterations": 1, "minibatches": 0}
    functions = ("model:judge(offload=True, trust_remote_code=True)",)
    expect(own, critic=of_own, lora={"rank": 0}, rewards={"functions": functions})


def test_the_model_alone_and_the_best_model_of_trl_and_axolotl(tmp_path):
    script = (
        "trl dpo --model_name_or_path m --dataset_name d --max_steps 8 --eval_strategy steps --eval_steps 2 "
        "--save_steps 2 --model_revision v2 --save_only_model True"
    )
    config, _ = migrate(written(tmp_path, "only.sh", script))
    expect(config, model={"revision": "v2"}, checkpoint={"contents": ("hf",)}, export={"best": False})
    config, _ = migrate(written(tmp_path, "best.sh", f"{script} --load_best_model_at_end True"))
    expect(config, checkpoint={"contents": ("state", "hf"), "best": "eval/loss"}, export={"best": True})
    tree = {
        "base_model": "m", "datasets": [{"path": "d", "type": "chatml.intel"}], "rl": "dpo", "learning_rate": 1e-5,
        "max_steps": 2, "tokenizer_config": "t", "revision_of_model": "v2", "save_only_model": True,
        "overrides_of_model_config": {"rope_theta": 10000},
    }  # fmt: skip
    config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)))
    wanted = {"tokenizer": "t", "revision": "v2", "overrides": "rope_theta=10000"}
    expect(config, model=wanted, checkpoint={"contents": ("hf",)})


def test_distillation_on_policy_of_trl(tmp_path):
    script = """
from trl import DistillationConfig, DistillationTrainer

args = DistillationConfig(output_dir="out", max_steps=6, per_device_train_batch_size=4, beta=0.5, eval_strategy="steps",
                          teacher_model_init_kwargs={"dtype": "bfloat16"}, teacher_model_revision="v2")
trainer = DistillationTrainer("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", args, dataset)
trainer.train()
"""
    config, text = migrate(written(tmp_path, "distill.py", script), devices=2)
    expect(
        config,
        model={"path": "Qwen/Qwen3-0.6B"},
        teacher={"path": "Qwen/Qwen3-4B", "revision": "v2", "dtype": "bfloat16", "form": "divergence", "beta": 0.5},
        rollout={"group_size": 1, "max_completion_length": 512, "temperature": 1.0},
        batch={"prompts": 8, "minibatches": 1},
        rewards={"functions": ()},
        algorithm={"name": "grpo", "advantage": "zero", "aggregation": "token", "beta": 0.0},
        eval={"every": -1},
    )
    assert "samples without rewards cannot be graded" in " ".join(text.split())


def test_generalised_knowledge_distillation_of_trl(tmp_path):
    said = "--model_name_or_path m --teacher_model_name_or_path t --dataset_name d --max_steps 4 --packing true"
    config, text = migrate(written(tmp_path, "gkd.sh", f"accelerate launch gkd.py {said} --seq_kd true"), devices=1)
    expect(
        config,
        teacher={"path": "t", "form": "divergence", "beta": 0.5, "on_policy": 0.5, "temperature": 1.0},
        rollout={"max_completion_length": 128, "max_prompt_length": 896, "temperature": 0.9, "group_size": 1},
        data={"max_length": 1024, "packing": False, "overlong": "truncate_left", "loss_on": "last_turn"},
        rewards={"functions": ()},
    )
    assert "seq_kd = True has no equivalent: completions of the teacher are made before" in " ".join(text.split())
    given = migrate(written(tmp_path, "g.sh", f"accelerate launch gkd.py {said} --lmbda 0"), devices=1)[0]
    expect(
        given,
        algorithm={"name": "sft"},
        teacher={"beta": 0.5, "on_policy": 1.0},
        data={"packing": False, "overlong": "truncate_left", "loss_on": "last_turn"},
    )
    samples = migrate(written(tmp_path, "s.sh", f"accelerate launch gkd.py {said} --lmbda 1"), devices=1)[0]
    expect(samples, data={"loss_on": "completion"})


def test_distillation_across_tokenizers_of_trl(tmp_path):
    script = """
from trl.experimental.gold import GOLDConfig, GOLDTrainer

args = GOLDConfig("out", max_steps=4, per_device_train_batch_size=4, num_generations=2, lmbda=1.0{})
trainer = GOLDTrainer("m", "t", args, train_dataset=load_dataset("d", split="train"))
trainer.train()
"""
    uld = ", use_uld_loss=True, uld_use_hybrid_loss=True, uld_crossentropy_weight=0.1, uld_student_temperature=0.8"
    config, text = migrate(written(tmp_path, "gold.py", script.format(uld)), devices=1)
    expect(
        config,
        teacher={
            "path": "t", "form": "uld", "coef": 1.0, "beta": 0.5, "nll_coef": 0.1, "policy_temperature": 0.8,
            "temperature": 1.0, "uld_align": "spans", "uld_skip_eos": True, "uld_hybrid": True,
            "uld_matched_weight": None, "on_policy": 1.0,
        },
        rollout={"max_completion_length": 128, "max_prompt_length": 896, "temperature": 0.9, "top_p": 0.95},
        batch={"prompts": 2},
        algorithm={"name": "grpo", "advantage": "zero", "aggregation": "sequence"},
        optimizer={"learning_rate": 1e-7},
    )  # fmt: skip
    assert "uld_token_merge_strategy is observed, which reads each distribution a token late" in " ".join(text.split())
    assert "cross-entropy of teacher.nll_coef is at rollout.temperature here" in " ".join(text.split())
    weights = ", uld_hybrid_matched_weight=0.3, uld_hybrid_unmatched_weight=0.7, use_extended_uld=False"
    config, _ = migrate(written(tmp_path, "b.py", script.format(uld + weights)), devices=1)
    expect(config, teacher={"uld_matched_weight": 0.3, "uld_unmatched_weight": 0.7, "uld_align": "positions"})
    config, _ = migrate(written(tmp_path, "c.py", script.format("")), devices=1)
    expect(config, teacher={"form": "divergence", "beta": 0.5}, algorithm={"aggregation": "token"})
    config, text = migrate(written(tmp_path, "d.py", script.format(uld).replace("lmbda=1.0", "lmbda=0.0")), devices=1)
    expect(config, algorithm={"name": "sft"}, teacher={"form": "uld"}, data={"loss_on": "last_turn"})
    assert "mean over all spans of a batch here" in text and "rollout.temperature" not in text


def test_self_distillation_of_trl(tmp_path):
    """SDPOTrainer: a weight between 0 and 1 keeps the policy loss, 0 is that alone, and texts have other fields."""
    script = """
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

args = SDPOConfig(output_dir="out", max_steps=6, num_generations=4{more})
trainer = SDPOTrainer("Qwen/Qwen3-0.6B", "rewards:f", args, dataset)
trainer.train()
"""

    def from_trl(more=""):
        return migrate(written(tmp_path, "sdpo.py", script.replace("{more}", more)), devices=2)

    config, _ = from_trl()
    expect(
        config,
        teacher={"path": "self(rate=0.05)", "context": "success", "form": "advantage", "exclude_own": True},
        algorithm={"name": "grpo", "advantage": "zero", "aggregation": "sequence", "beta": 0.0},
        rollout={"group_size": 4, "max_prompt_length": 512, "max_completion_length": 256},
        batch={"prompts": 4, "minibatches": 1},
        optimizer={"learning_rate": 5e-5},
    )
    assert config.teacher.template is config.teacher.max_prompt_length is None
    config, text = from_trl(
        ", distillation_weight=0.8, distillation_mode='topk_logits', distillation_topk=20, distillation_alpha=0.5, "
        "teacher_model_kind='live', include_environment_feedback=True, num_iterations=2, max_reprompt_len=900, "
        "environment_feedback_only_without_solution=True, feedback_template='<{feedback_raw}>', "
        "solution_template='{successful_previous_attempt}!', reprompt_template='{prompt}{solution}{feedback}'"
    )
    expect(
        config,
        teacher={
            "path": "self", "context": "success_or_privileged", "form": "divergence", "top_k": 20, "beta": 0.5,
            "top_of": "policy", "tail": False,
            "coef": 4.0, "importance_max": 2.0, "max_prompt_length": 900, "privileged_template": "<{privileged}>",
            "solution_template": "{solution}!", "template": "{prompt}{solution}{privileged}",
        },
        algorithm={"advantage": "group", "aggregation": "sequence"},
        optimizer={"max_grad_norm": 5.0},  # of a loss that is as much larger
    )  # fmt: skip
    assert "both losses are means over rows" in " ".join(text.split())
    assert "the live teacher is the policy at the start of a step here" in " ".join(text.split())
    alone, _ = from_trl(", distillation_weight=0.0, loss_type='dapo'")
    expect(alone, teacher={"path": None, "context": "none"}, algorithm={"advantage": "group", "aggregation": "token"})
    text = " ".join(from_trl(", use_successful_as_teacher=False")[1].split())
    assert "use_successful_as_teacher = False is left out" in text and "so that the teacher is shown nothing" in text


def test_self_distillation_fine_tuning_of_trl(tmp_path):
    said = "--model_name_or_path m --dataset_name d --max_steps 4 --num_loss_tokens_to_skip 3"
    config, text = migrate(written(tmp_path, "sdft.sh", f"accelerate launch sdft.py {said}"), devices=1)
    expect(
        config,
        teacher={
            "path": "self(rate=0)", "context": "privileged", "form": "divergence", "beta": 0.5, "top_k": 100,
            "template": "{prompt}\n\n{privileged}", "privileged_template": "{privileged}", "max_prompt_length": 512,
            "privileged_column": "privileged_context",
        },
        rewards={"functions": ()},
        algorithm={"advantage": "zero", "aggregation": "sequence"},
        rollout={"group_size": 8},
        eval={"every": -1},
    )  # fmt: skip
    assert "num_loss_tokens_to_skip = 3 has no equivalent: every sampled token" in " ".join(text.split())


def test_online_dpo_of_trl(tmp_path):
    script = """
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

def reward(prompts, completions, **kwargs):
    return [float(len(completion) > 3) for completion in completions]

args = OnlineDPOConfig(output_dir="out", max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                       missing_eos_penalty=1.0, beta=[0.2, 0.1], loss_type="ipo")
trainer = OnlineDPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=reward, args=args, train_dataset=dataset)
trainer.train()
"""
    config, text = migrate(written(tmp_path, "online.py", script), devices=2)
    expect(
        config,
        _={"total_steps": 6},
        algorithm={
            "name": "online_preference", "loss": "ipo(normalize=False)", "beta": 0.2, "missing_eos_penalty": 1.0,
        },
        rollout={"group_size": 2, "max_completion_length": 64, "temperature": 0.9},
        batch={"prompts": 16, "minibatches": 1, "microbatch_rows": 16},
        optimizer={"learning_rate": 5e-7},
    )  # fmt: skip
    assert config.rewards.functions[0].endswith("online_functions.py:reward")
    assert "one for each epoch there: the first is written" in " ".join(text.split())
    said = "--model_name_or_path m --dataset_name d --reward_model_path r/m --max_new_tokens 32"
    config, _ = migrate(written(tmp_path, "dpo.sh", f"accelerate launch dpo.py {said}"), devices=1, trainer="onlinedpo")
    expect(config, algorithm={"loss": "dpo", "beta": 0.1}, rollout={"max_completion_length": 32})
    assert config.rewards.functions == ("model:r/m",)


def test_optimal_advantage_regression_of_trl(tmp_path):
    script = """
from trl.experimental.a2po import A2POConfig, A2POTrainer

def reward(prompts, completions, **kwargs):
    return [float(len(completion) > 3) for completion in completions]

args = A2POConfig(output_dir="out", max_steps=6, per_device_train_batch_size=4, beta2=0.01, num_value_samples=16,
                  max_completion_length=64)
trainer = A2POTrainer("Qwen/Qwen3-0.6B", reward, args=args, train_dataset=dataset)
trainer.train()
"""
    config, text = migrate(written(tmp_path, "a2po.py", script), devices=2)
    expect(
        config,
        algorithm={
            "advantage": "a2po(beta1=0.5)", "loss": "a2po(beta2=0.01)", "aggregation": "sequence", "beta": 0.0,
            "reference_samples": 16, "drop_unsolved": True,
        },
        rollout={"group_size": 1, "max_prompt_length": 512, "max_completion_length": 64, "temperature": 1.0},
        data={"overlong": "truncate_left"},
        batch={"prompts": 8, "minibatches": 1},
        optimizer={"learning_rate": 5e-5},
    )  # fmt: skip
    assert config.rewards.functions[0].endswith("a2po_functions.py:reward") and "num_train_epochs counts" not in text
    said = "--model_name_or_path m --dataset_name d --reward_funcs r:f --filter_all_incorrect false"
    config, _ = migrate(written(tmp_path, "regress.sh", f"accelerate launch run_a2po.py {said}"), devices=1)
    expect(config, algorithm={"drop_unsolved": False, "reference_samples": 8}, _={"num_epochs": 3.0})
    said = "--model_name_or_path m --dataset_name d --reward_funcs r:f"
    _, text = migrate(written(tmp_path, "regress.sh", f"accelerate launch run_a2po.py {said}"), devices=1)
    assert "num_train_epochs counts the prompts that the reference has solved" in " ".join(text.split())


def test_importance_weighted_distillation_of_trl(tmp_path):
    """Its own objective, and the divergences that it has besides: those of other trainers where tokens agree."""
    script = """
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

args = IWOPDConfig(output_dir="out", max_steps=6, per_device_train_batch_size=4, num_generations=2{more})
trainer = IWOPDTrainer("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", args, train_dataset=dataset)
trainer.train()
"""

    def from_trl(more=""):
        return migrate(written(tmp_path, "train.py", script.replace("{more}", more)), devices=2)

    config, _ = from_trl()
    expect(
        config,
        teacher={"path": "Qwen/Qwen3-4B", "form": "advantage", "position_gamma": 0.5, "on_policy": 1.0},
        algorithm={"name": "grpo", "advantage": "zero", "loss": "reinforce", "aggregation": "token"},
        rollout={
            "group_size": 2, "max_prompt_length": 512, "max_completion_length": 512, "top_p": 0.95, "temperature": 1.0,
        },
        batch={"prompts": 4, "minibatches": 1},
        data={"overlong": "truncate_right"},
        rewards={"functions": ()},
        eval={"every": -1},
        optimizer={"learning_rate": 1e-6},
    )  # fmt: skip
    expect(from_trl(", iw_opd_gamma=0.0")[0], teacher={"position_gamma": 0.0})
    jsd = ", distillation_objective='jsd'"
    config, text = from_trl(jsd)
    expect(config, teacher={"form": "divergence", "beta": 1.0, "top_k": 0, "position_gamma": 0.0})
    assert "compares the sampled token with all others there" in " ".join(text.split())
    config, _ = from_trl(f"{jsd}, beta=0.0, loss_top_k=8, loss_add_tail=False, lmbda=0.5, temperature=0.8")
    expect(config, teacher={"beta": 0.0, "top_k": 8, "top_of": "teacher", "tail": False, "on_policy": 0.5})
    config, _ = from_trl(f"{jsd}, loss_top_k=8")
    expect(config, teacher={"beta": 1.0, "top_k": 8, "top_of": "policy", "tail": True})
    config, text = from_trl(f"{jsd}, beta=0.5, loss_top_k=8")
    expect(config, teacher={"beta": 0.5, "top_k": 0})
    assert "is over the likeliest tokens of both models there" in " ".join(text.split())
    config, _ = from_trl(f"{jsd}, lmbda=0.0, loss_top_k=0, temperature=0.8")
    expect(config, algorithm={"name": "sft"}, teacher={"temperature": 0.8, "beta": 1.0}, data={"loss_on": "last_turn"})
    config, text = from_trl(", use_teacher_server=True, teacher_model_server_url='http://t:8000'")
    expect(config, teacher={"path": "TEACHER"})
    assert "the teacher is behind http://t:8000" in " ".join(text.split())


def test_teachers_of_verl(tmp_path):
    at = "distillation.distillation_loss"
    one = "distillation.enabled=true distillation.teacher_models.teacher_model.model_path=t"
    topk = f"{at}.loss_mode=forward_kl_topk {at}.topk=16 {at}.use_task_rewards=false {at}.log_prob_min_clamp=-10"
    config = from_verl(tmp_path, "algorithm.adv_estimator=gae actor_rollout_ref.actor.use_kl_loss=true", one, topk)
    expect(
        config,
        teacher={"path": "t", "form": "divergence", "beta": 0.0, "top_k": 16, "coef": 1.0, "least_logp": -10.0},
        algorithm={"name": "grpo", "advantage": "zero", "beta": 0.0},
    )
    two = (
        "distillation.enabled=true +distillation.teacher_models.a.model_path=ta "
        "+distillation.teacher_models.a.key=gsm8k +distillation.teacher_models.b.model_path=tb "
        "+distillation.teacher_models.b.key=math "
        f"{at}.loss_mode=k1 {at}.use_policy_gradient=true {at}.distillation_loss_coef=0.5"
    )
    config = from_verl(tmp_path, "actor_rollout_ref.rollout.n=4", two)
    teacher = {"path": "ta", "others": ("math=tb",), "column": "data_source", "form": "advantage", "coef": 0.5}
    expect(config, teacher=teacher, algorithm={"advantage": "group(eps=1e-06)"})
    config = from_verl(tmp_path, one, f"{at}.use_task_rewards=false")  # k3, its default
    expect(config, teacher={"form": "divergence", "beta": 0.0, "top_k": 0})
    expect(from_verl(tmp_path, "distillation.enabled=false"), teacher={"path": None})


def test_a_data_set_class_of_verl(tmp_path):
    said = "data.train_files=t.parquet data.custom_cls.path=own.py data.custom_cls.name=Own data.val_files=v.parquet"
    data = {"path": "own.py:Own(data_files='t.parquet')", "eval_path": "own.py:Own(data_files='v.parquet')"}
    expect(from_verl(tmp_path, said), data=data)


def test_pushes_of_trl_at_saves(tmp_path):
    said = "trl sft --model_name_or_path m --dataset_name d --max_steps 9 --push_to_hub --hub_model_id me/m --tags a"
    config, _ = migrate(written(tmp_path, "a.sh", f"{said} --hub_strategy every_save"))
    wanted = {"push_to_hub": "me/m", "strategy": "every_save", "overwrite": True, "tags": ("a",)}
    expect(config, export=wanted, checkpoint={"contents": ("state", "hf")})
    config, text = migrate(written(tmp_path, "a.sh", f"{said} --hub_strategy all_checkpoints"))
    expect(config, export=wanted)
    assert "its optimizer not" in " ".join(text.split())
    config, _ = migrate(written(tmp_path, "a.sh", f"{said} --hub_strategy end"))
    expect(config, export={"strategy": "end", "overwrite": False}, checkpoint={"contents": ("state",)})


def test_test_datasets_of_axolotl(tmp_path):
    """One that is only a path is data.eval_path; with types, or several, they are one set, as axolotl joins them."""

    def evaluated(tests, **more):
        tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 10, **more}
        tree |= {"test_datasets": tests, "early_stopping_patience": 2, "eval_steps": 5, "save_steps": 5}
        tree |= {"load_best_model_at_end": True}
        config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)), devices=1)
        stopping = f"early_stopping(metric='{config.checkpoint.best}', mode='min', patience=2)"
        assert config.callbacks == (stopping,)
        return (config.data.eval_path, config.data.eval_split, config.eval.sets, config.checkpoint.best), text

    plain, _ = evaluated([{"path": "e", "type": "chat_template"}])
    assert plain == ("e", None, (), "eval/loss")  # of several splits test is taken, by both
    typed = {"path": "e", "split": "dev", "type": "chatml.intel"}
    pairs, _ = evaluated([typed], rl="dpo")
    assert pairs == (None, None, ({"set": "test", **typed},), "eval/test/loss")
    several, text = evaluated([{"path": "e"}, {"path": "f", "name": "main"}], rl="dpo")
    entries = ({"set": "test", "path": "e"}, {"set": "test", "path": "f", "name": "main"})
    assert several[2] == tuple(entry | {"split": "train"} for entry in entries)
    assert "the first is" not in text
    _, text = evaluated([{"path": "e", "type": "nowhere"}], rl="dpo")
    assert "test_datasets: the type nowhere has no format here" in " ".join(text.split())


@pytest.mark.parametrize("rl", ["grpo", "dpo"])
def test_packing_of_axolotl_is_of_sft_alone(tmp_path, rl):
    tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 2, "rl": rl}
    tree |= {"sample_packing": True, "micro_batch_size": 4, "trl": {"num_generations": 4, "reward_funcs": ["r.right"]}}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)), devices=1)
    expect(config, data={"packing": False}, batch={"packing": "auto"})
    flat = " ".join(text.replace("#", "").split())
    assert "the rows of other algorithms are packed by batch.packing, which is auto" in flat
    assert "sample_packing = True: has no part in data.packing" in flat and "is left out" not in flat


def test_what_is_new_in_axolotl(tmp_path):
    """0.19 passes TRL's entropy bonus and the bounds of its correction on; a trainer of one's own is noted."""
    said = (
        "base_model: Qwen/Qwen3-0.6B\nrl: grpo\nlearning_rate: 1.0e-6\nmax_steps: 2\ndatasets: [{path: d}]\n"
        "trainer_cls: mine.Trainer\nple_cpu_offload: true\n"
        "trl: {reward_funcs: [r.f], num_generations: 4, use_vllm: true, "
        "vllm_importance_sampling_correction: true, vllm_importance_sampling_clip_max: 2.5, "
        "vllm_importance_sampling_clip_min: 0.4, use_adaptive_entropy: true, entropy_target: 0.3, entropy_coef: 0.01, "
        "log_multimodal: false}\n"
    )
    config, text = migrate(written(tmp_path, "a.yaml", said), devices=4)
    entropy = {"entropy_coef": 0.01, "entropy_controller": "adaptive", "entropy_target": 0.3}
    expect(config, algorithm={**entropy, "importance_max": 2.5, "importance_min": 0.4})
    assert "known key" not in text
    assert "trainer_cls = 'mine.Trainer' has no equivalent" in text


def test_rollouts_ahead_of_axolotl(tmp_path):
    trl = {"async_prefetch": True, "num_generations": 4, "reward_funcs": ["r.right"]}
    tree = {
        "base_model": "m",
        "datasets": [{"path": "d"}],
        "rl": "grpo",
        "learning_rate": 1e-5,
        "max_steps": 2,
        "trl": trl,
    }
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)))
    expect(config, rollout={"staleness": 1}, algorithm={"importance_correction": "token_truncate"})
    assert "corrected for here" in " ".join(text.split())
    tree["trl"] = {**trl, "prefetch_depth": 3, "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)))
    expect(config, rollout={"staleness": 3}, algorithm={"importance_correction": "token_mask"})


def test_dora_of_trl_and_axolotl(tmp_path):
    said = "trl sft --model_name_or_path m --dataset_name d --max_steps 9 --use_peft --use_dora True"
    expect(migrate(written(tmp_path, "a.sh", said))[0], lora={"rank": 16, "dora": True})
    config, text = migrate(written(tmp_path, "a.sh", f"{said} --load_in_4bit True"))
    expect(config, lora={"dora": False}, model={"quantize": "nf4"})
    assert "use_dora is left out" in " ".join(text.split())
    tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 2, "adapter": "lora"}
    tree |= {"lora_r": 8, "peft_use_dora": True, "lora_modules_to_save": ["embed_tokens", "lm_head"]}
    wanted = {"rank": 8, "dora": True, "modules_to_save": ("embed_tokens", "lm_head")}
    expect(migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)))[0], lora=wanted)
    tree["peft_use_dora"] = False
    _, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"peft_init_lora_weights": "eva"})))
    assert "peft_init_lora_weights = 'eva' has no equivalent; lora.init is kaiming" in " ".join(text.split())
    for theirs, ours in (("pissa_niter_16", "pissa_niter_16"), (False, "random"), (True, "kaiming")):
        config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"peft_init_lora_weights": theirs})))
        expect(config, lora={"init": ours})
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"peft_init_lora_weights": "loftq"})))
    expect(config, lora={"init": "loftq"}, model={"quantize": "nf4"})
    nested = tree | {"peft": {"loftq_config": {"loftq_bits": 4}}, "rl": "orpo"}
    config, others = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(nested)))
    expect(config, lora={"init": "loftq"}, model={"quantize": "nf4"}, algorithm={"name": "preference"})
    assert "no known key" not in others
    assert "rl = 'orpo'" not in others
    assert "peft_init_lora_weights = 'loftq': the matrices are nf4" in " ".join(text.split())
    said = f"{said} --lora_modules_to_save lm_head"
    expect(migrate(written(tmp_path, "a.sh", said))[0], lora={"modules_to_save": ("lm_head",)})


def test_sampling_of_verl_is_no_training(tmp_path):
    """main_generation writes completions: a configuration of fine-tuning came of it."""
    said = (
        "python3 -m verl.trainer.main_generation data.path=test.parquet data.n_samples=2 data.output_path=out.parquet "
        "model.path=org/m +model.trust_remote_code=True rollout.temperature=0.7 rollout.response_length=64"
    )
    command = "--model=org/m --prompts_file=test.parquet --samples=2 --temperature=0.7 --max_new_tokens=64 > out"
    with pytest.raises(ConfigError, match=re.escape(f"python -m jaxrl_llm generate {command}")):
        migrate(written(tmp_path, "a.sh", said))


def test_a_token_budget_of_verl_with_sequence_parallelism(tmp_path):
    """The tokens of a GPU, times the GPUs: those that share rows have their budgets together."""
    actor = "actor_rollout_ref.actor"
    said = f"{actor}.use_dynamic_bsz=True {actor}.ppo_max_token_len_per_gpu=8192"
    group = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=2"
    config = from_verl(tmp_path, group, said, f"{actor}.ulysses_sequence_parallel_size=2")
    expect(config, mesh={"context": 2}, batch={"microbatch_rows": 0, "microbatch_tokens": 16384})


def test_warm_up_and_weight_decay_of_megatron(tmp_path):
    optim = "actor_rollout_ref.actor.optim"
    said = f"{optim}.lr_warmup_init=1e-7 {optim}.lr_warmup_steps=2 {optim}.weight_decay_incr_style=cosine"
    config = from_verl(tmp_path, said)
    expect(config, optimizer={"warmup_init": 1e-7, "weight_decay_shape": "cosine", "weight_decay_end": None})


SCHEDULES = {
    "cosine_with_restarts": ({}, 1.0),
    "cosine_with_restarts twice": ({"num_cycles": 2}, 2.0),
    "polynomial": ({}, 0.5),
    "polynomial of power two": ({"power": 2.0, "lr_end": 1e-5}, 0.5),
    "cosine_with_min_lr": ({"min_lr": 2e-5}, 0.5),
    "warmup_stable_decay": ({"num_decay_steps": 6}, 0.5),
    "warmup_stable_decay by root": ({"num_decay_steps": 6, "decay_type": "1-sqrt", "min_lr_ratio": 0.2}, 0.5),
    "warmup_stable_decay early": ({"num_decay_steps": 4, "decay_type": "linear", "num_stable_steps": 6}, 0.5),
    "constant": ({}, 0.5),
}


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize("case", SCHEDULES)
def test_schedules_of_transformers(tmp_path, case):
    """The learning rates of the run are those that transformers' own schedule gives."""
    name, (options, cycles) = case.partition(" ")[0], SCHEDULES[case]
    said = "trl sft --model_name_or_path m --dataset_name d --max_steps 20 --learning_rate 1e-4 --warmup_steps 4"
    said += f" --lr_scheduler_type {name} --lr_scheduler_kwargs '{json.dumps(options)}'"
    said = said.replace("warmup_steps 4", "warmup_ratio 0.2") if case.endswith("early") else said
    config, text = migrate(written(tmp_path, "a.sh", said), devices=1)
    assert "lr_scheduler" not in text.partition("from jaxrl_llm")[0]
    expect(config, optimizer={"cycles": cycles})
    ours = learning_rate_schedule(optimizer_spec(config))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    theirs = transformers.get_scheduler(name, optimizer, 4, 20, scheduler_specific_kwargs=options)
    for step in range(20):
        assert float(ours(step)) == pytest.approx(theirs.get_last_lr()[0], rel=1e-5, abs=1e-11), step
        optimizer.step()
        theirs.step()


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize(
    ("name", "options"), [("cosine", {}), ("warmup_stable_decay", {"num_decay_steps": 2, "min_lr_ratio": 0.2})]
)
def test_a_warm_up_longer_than_the_run(tmp_path, name, options):
    """In transformers the rate does not reach its peak; here a warm-up ends with the run at the latest."""
    said = {"output_dir": "o", "model_name_or_path": "m", "learning_rate": 1e-4, "warmup_steps": 16, "max_steps": 4}
    said |= {"lr_scheduler_type": name, "lr_scheduler_kwargs": options}
    config, text = migrate(written(tmp_path, "a.json", said), trainer="sft", devices=1)
    assert "warmup_steps = 16 is longer than the run" in " ".join(text.partition("from jaxrl_llm")[0].split())
    ours = learning_rate_schedule(optimizer_spec(config))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    theirs = transformers.get_scheduler(name, optimizer, 16, 4, scheduler_specific_kwargs=options)
    for step in range(4):
        assert float(ours(step)) == pytest.approx(theirs.get_last_lr()[0], rel=1e-5, abs=1e-11), step
        optimizer.step()
        theirs.step()
    epochs = said | {"max_steps": -1, "warmup_steps": 5000}  # of rows whose number is not known
    config, _ = migrate(written(tmp_path, "b.json", epochs), trainer="sft", devices=1)
    expect(config, optimizer={"warmup_steps": 5000, "learning_rate": 1e-4})


def test_the_half_wave_of_a_stable_schedule_is_the_only_one(tmp_path):
    options = {"num_decay_steps": 2, "num_cycles": 1.0}
    said = {"output_dir": "o", "max_steps": 9, "lr_scheduler_type": "warmup_stable_decay"}
    _, text = migrate(written(tmp_path, "a.json", said | {"lr_scheduler_kwargs": options}), trainer="sft")
    assert "num_cycles = 1.0 has no equivalent in wsd" in " ".join(text.partition("from jaxrl_llm")[0].split())


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("reduce_lr_on_plateau", "has no equivalent: no schedule here follows the evaluations; constant is written"),
        ("cosine_warmup_with_min_lr", "is one update ahead of cosine"),
        ("step_decay", "has no equivalent; linear is written"),
        ("one_cycle", "whose warm-up is linear here"),
    ],
)
def test_schedules_that_are_not_here_are_noted_at_the_top(tmp_path, kind, note):
    tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 2, "lr_scheduler": kind}
    _, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)))
    assert note in " ".join(text.partition("from jaxrl_llm")[0].split())


@pytest.mark.parametrize("kind", ["constant", "reduce_lr_on_plateau", "greedy", "constant_with_warmup"])
def test_schedules_of_transformers_without_a_warm_up(tmp_path, kind):
    warms_up = kind == "constant_with_warmup"
    said = {"output_dir": "o", "max_steps": 50, "lr_scheduler_type": kind, "warmup_ratio": 0.1}
    config, text = migrate(written(tmp_path, "a.json", said), trainer="grpo", devices=1)
    expect(config, optimizer={"schedule": "constant", "warmup_steps": 0, "warmup_ratio": 0.1 * warms_up})
    assert ("warmup_ratio = 0.1: has no part in optimizer.warmup_ratio" in text) != warms_up
    tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 50}
    config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"lr_scheduler": kind})), devices=1)
    expect(config, optimizer={"schedule": "constant", "warmup_steps": warms_up, "warmup_ratio": 0.0})


def test_optimizers_of_transformers(tmp_path):
    """Those that are ours but for how they are computed and stored, and of the others that they are not here."""
    ours = "adafactor|lion|sgd|ademamix|schedule_free_adamw|galore_adamw"
    stored = r"(galore_)?adamw_.*|(paged_)?(adamw|lion|ademamix)_\d+bit"
    same = re.compile(rf"({stored}|adafactor|sgd|ademamix|schedule_free_adamw|galore_adamw)$")
    for name in (one.value for one in OptimizerNames):
        file = written(tmp_path, "a.json", {"output_dir": "o", "dataset_name": "d", "max_steps": 5, "optim": name})
        config, text = migrate(file, trainer="sft", devices=1)
        noted = f"optim = '{name}' has no equivalent; {config.optimizer.name} is written" in " ".join(text.split())
        assert noted != bool(same.match(name)), name
        assert config.optimizer.name in (*re.findall(ours, name), "adamw")[0]
        in_bits = bool(same.match(name) and re.search("[48]bit|fp8", name))
        assert config.optimizer.moment_dtype == ("float8" if in_bits else "float32"), name
        assert ("not from the table of bitsandbytes" in " ".join(text.split())) == in_bits
    mixed = {"optim": "ademamix_8bit", "optim_args": "beta3=0.999, alpha=8,t_alpha=10,t_beta3=20"}
    config, text = migrate(written(tmp_path, "a.json", {"output_dir": "o", "max_steps": 50, **mixed}), trainer="sft")
    expect(config, optimizer={"name": "ademamix", "b3": 0.999, "mixing": 8.0, "mixing_steps": 20, "b2": 0.999})
    assert "t_alpha and t_beta3 are one number here" in " ".join(text.split())
    tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 50}
    tree |= {"optimizer": "ademamix", "optim_args": {"beta3": 0.99}}
    expect(migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)))[0], optimizer={"name": "ademamix", "b3": 0.99})
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"optimizer": "adopt_adamw"})))
    expect(config, optimizer={"name": "adopt", "b3": 0.9999})
    assert "optim_args" in text.partition("from jaxrl_llm")[0]
    more = {"optim": "galore_adamw", "optim_target_modules": ["q_proj"], "optim_args": "rank=64, update_proj_gap=50"}
    config, text = migrate(written(tmp_path, "a.json", {"output_dir": "o", "max_steps": 5, **more}), trainer="sft")
    expect(config, optimizer={"name": "galore_adamw", "galore_rank": 64, "galore_every": 50, "galore_scale": 0.25})
    assert " ".join(text.split()).count("galore_adamw is for all matrices of the layers") == 2  # first, and by its key
    rising = {"output_dir": "o", "max_steps": 50, "optim": "schedule_free_adamw", "warmup_steps": 10}
    for scheduler in ("constant", "linear"):  # of which transformers warms up the second alone, this optimizer both
        file = written(tmp_path, "a.json", rising | {"lr_scheduler_type": scheduler})
        config, text = migrate(file, trainer="sft")
        expect(config, optimizer={"schedule": scheduler, "warmup_steps": 10})
        assert ("warms up there by itself and by the schedule" in " ".join(text.split())) == (scheduler == "linear")
    more |= {"optim": "apollo_adamw", "optim_args": None}
    _, text = migrate(written(tmp_path, "a.json", {"output_dir": "o", "max_steps": 5, **more}), trainer="sft")
    assert "APOLLO is not here" in " ".join(text.partition("from jaxrl_llm")[0].split())


def test_optimizers_of_axolotl(tmp_path):
    """CAME with its third decay; an average is not kept in 16 bits, but adapters beside 16 bits have one."""
    tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 50, "bf16": True}
    came = tree | {"optimizer": "came_pytorch", "adam_beta3": 0.99}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(came)))
    expect(config, optimizer={"name": "came", "b3": 0.99}, model={"param_dtype": "bfloat16"})
    assert "has no equivalent" not in text
    average = tree | {"optimizer": "schedule_free_adamw", "lr_scheduler": "constant"}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(average)))
    expect(config, optimizer={"name": "schedule_free_adamw"}, model={"param_dtype": "float32"})
    assert "its average is not kept in 16 bits" in " ".join(text.split())
    adapted = average | {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
    config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(adapted)))
    expect(config, optimizer={"name": "schedule_free_adamw"}, model={"param_dtype": "bfloat16"})
    sampled = tree | {"lisa_n_layers": 4, "lisa_step_interval": 10, "lisa_layers_attribute": "model.layers"}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(sampled)))
    expect(config, optimizer={"name": "adamw", "lisa_layers": 4, "lisa_every": 10})


@pytest.mark.parametrize("name", ["AdamW", "adam", "torch.optim.AdamW", "_AdamW", "AdamW8bit", "FusedAdam", "muon"])
def test_optimizers_of_verl_by_class(tmp_path, name):
    at = "actor_rollout_ref.actor.optim.optimizer"
    expect(from_verl(tmp_path, f"{at}={name}"), optimizer={"name": "muon" if "muon" in name else "adamw"})
    assert f"{at} = '{name}' has no equivalent" not in noted_from_verl(tmp_path, f"{at}={name}")
    assert "has no equivalent; adamw is written" in noted_from_verl(tmp_path, f"{at}=NAdam")
    assert "adds the weight decay to the gradient" in noted_from_verl(tmp_path, f"{at}=Adam")


def test_a_cosine_of_axolotl_that_ends_early(tmp_path):
    tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 50}
    more = {"cosine_min_lr_ratio": 0.1, "cosine_constant_lr_ratio": 0.5}
    config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | more)))
    expect(config, optimizer={"schedule": "cosine", "min_lr_ratio": 0.1, "schedule_steps": 25, "warmup_steps": 1})
    _, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"cosine_constant_lr_ratio": 0.5})))
    assert "cosine_constant_lr_ratio is read by axolotl beside cosine and cosine_min_lr_ratio alone" in " ".join(
        text.split()
    )
    config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"lr_scheduler": "constant"})))
    expect(config, optimizer={"schedule": "constant", "warmup_steps": 0})  # of transformers', which has no warm-up


def test_a_decay_of_megatron_that_ends_before_the_run(tmp_path):
    optim = "actor_rollout_ref.actor.optim"
    said = f"{optim}.lr_decay_style=linear {optim}.lr_decay_steps=2 {optim}.lr_warmup_steps_ratio=0.5"
    expect(from_verl(tmp_path, said), optimizer={"schedule": "linear", "schedule_steps": 2, "warmup_steps": 1})
    wsd = f"{optim}.lr_decay_style=WSD {optim}.lr_wsd_decay_steps=2"
    expect(from_verl(tmp_path, wsd), optimizer={"schedule": "wsd", "decay_steps": 2, "decay_shape": "exponential"})
    for theirs, ours in (("minus_sqrt", "1-sqrt"), ("constant", "constant")):
        expect(from_verl(tmp_path, wsd, f"{optim}.lr_wsd_decay_style={theirs}"), optimizer={"decay_shape": ours})
    noted = noted_from_verl(tmp_path, f"{optim}.lr_decay_style=inverse-square-root {optim}.lr_decay_steps=2")
    assert "lr_decay_steps = 2: inverse_sqrt has no end here" in noted
    unread = from_verl(tmp_path, f"{optim}.lr_decay_style=linear {optim}.lr_warmup_steps=0 {optim}.lr_warmup_init=1e-7")
    expect(unread, optimizer={"warmup_steps": 0, "warmup_init": 0.0})


@pytest.mark.parametrize("warm", [0, 4])
def test_an_inverse_square_root_of_megatron_falls_from_its_warm_up(tmp_path, warm):
    """Its formula, the peak times sqrt(max(w, 1) / max(step, 1)) of w steps of warm-up, also without any."""
    optim = "actor_rollout_ref.actor.optim"
    said = f"{optim}.lr_decay_style=inverse-square-root {optim}.lr=2e-6 {optim}.lr_warmup_steps={warm}"
    spec = optimizer_spec(from_verl(tmp_path, said, "trainer.total_training_steps=20"))
    rates = [float(learning_rate_schedule(spec)(step * spec.updates_per_step)) for step in range(warm, 12)]
    expected = [2e-6 * (max(warm, 1) / max(step, 1)) ** 0.5 for step in range(warm, 12)]
    assert rates == pytest.approx(expected, rel=1e-5)


def test_the_critic_of_verl_has_a_schedule_of_its_own(tmp_path):
    gae, policy, critic = "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.optim", "critic.optim"
    said = f"{policy}.betas=[0.8,0.9] {policy}.min_lr_ratio=0.1 {policy}.lr_scheduler_type=cosine"
    expect(from_verl(tmp_path, gae, said), critic={"b1": 0.9, "b2": 0.999, "min_lr_ratio": 0.0})
    own = f"{critic}.betas=[0.7,0.95] {critic}.lr_decay_style=WSD {critic}.lr_wsd_decay_steps=1 {critic}.min_lr=5e-6"
    config = from_verl(tmp_path, gae, said, own, f"{critic}.lr=1e-5")
    expect(config, critic={"b1": 0.7, "b2": 0.95, "schedule": "wsd", "min_lr_ratio": 0.5}, optimizer={"decay_steps": 1})
    noted = noted_from_verl(tmp_path, gae, said, f"{critic}.lr_scheduler_type=cosine {critic}.num_cycles=2")
    assert "critic.optim.num_cycles is 2 and the policy's None: both schedules have the policy's here" in noted
    noted = noted_from_verl(tmp_path, gae, f"{policy}.lr_decay_style=linear {policy}.lr_decay_steps=2")
    assert "lr_decay_steps is" not in noted  # of a critic whose rate is constant


def test_training_for_weights_in_other_bits(tmp_path):
    tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 2}
    tree["qat"] = {"activation_dtype": "int8", "weight_dtype": "nvfp4"}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
    assert any("weights in nvfp4 are not here" in note for note in judge(tmp_path, "a.yaml", tmp_path).notes)
    noted = noted_from_verl(tmp_path, "actor_rollout_ref.actor.fsdp_config.qat.enable=True")
    assert "its numbers are NVFP4" in noted
    assert "NVFP4" not in noted_from_verl(tmp_path, "actor_rollout_ref.actor.megatron.qat.enable=False")


def test_matmuls_in_fp8_of_verl(tmp_path):
    fp8 = "+actor_rollout_ref.actor.megatron.override_transformer_config.fp8=hybrid"
    found = {"model": {"matmul_dtype": "fp8"}, "algorithm": {"importance_correction": "token_truncate"}}
    expect(from_verl(tmp_path, fp8), **found)
    chosen = {"algorithm": {"importance_correction": "sequence_truncate"}}
    expect(from_verl(tmp_path, fp8, "algorithm.rollout_correction.rollout_is=sequence"), **(found | chosen))


def test_runs_of_verl_that_start_anew_each_time(tmp_path):
    expect(from_verl(tmp_path, "trainer.resume_mode=disable"), checkpoint={"resume": "never"})
    noted = noted_from_verl(tmp_path, "trainer.resume_mode=disable")
    assert "each start deletes the checkpoints that are in output_dir" in noted


def test_a_folder_of_verl_behind_a_url(tmp_path):
    url = "hdfs://user/verl/gsm8k"
    expect(from_verl(tmp_path, f"trainer.default_hdfs_dir={url}"), export={"copy_to": url, "overwrite": True})
    expect(from_verl(tmp_path, "trainer.default_hdfs_dir=~/gsm8k"), export={"copy_to": None, "overwrite": False})


def test_a_mixture_of_experts_of_axolotl_in_four_bits(tmp_path):
    tree = {"base_model": "mistralai/Mixtral-8x7B-v0.1", "datasets": [{"path": "d"}], "learning_rate": 1e-5}
    tree |= {"max_steps": 2, "adapter": "qlora", "load_in_4bit": True, "lora_r": 8}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)))
    expect(config, model={"quantize": "nf4", "quantize_experts": "none", "param_dtype": "bfloat16"})
    assert "the matrices of experts, most of" in " ".join(text.partition("from jaxrl_llm")[0].split())
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"quantize_moe_experts": True})))
    expect(config, model={"quantize": "nf4", "quantize_experts": "same"})
    assert "of experts" not in text.partition("from jaxrl_llm")[0]
    tree["base_model"] = "mistralai/Mistral-7B-v0.1"
    assert "of experts" not in migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)))[1]


def test_models_in_few_bits(tmp_path):
    """As GPTQ and AWQ have stored them, which are read as numbers."""
    tree = {"base_model": "a/b-GPTQ", "gptq": True, "gptq_disable_exllama": True, "adapter": "lora", "lora_r": 8}
    tree |= {"datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 2}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)))
    expect(config, model={"path": "a/b-GPTQ", "quantize": "none"}, lora={"rank": 8})
    assert "set model.quantize to hold them in few bits" in " ".join(text.split())
    assert "gptq = True: config.json of the model says how it is stored" in text
    script = (
        "from datasets import load_dataset\nfrom transformers import AutoModelForCausalLM, AwqConfig\n"
        "from trl import SFTConfig, SFTTrainer\n"
        "model = AutoModelForCausalLM.from_pretrained('a/b-AWQ', quantization_config=AwqConfig(bits=4))\n"
        "SFTTrainer(model, args=SFTConfig(max_steps=2), train_dataset=load_dataset('c/d', split='train')).train()\n"
    )
    config, text = migrate(written(tmp_path, "sft.py", script))
    expect(config, model={"path": "a/b-AWQ", "quantize": "none"})
    assert "set model.quantize to hold them in few bits" in " ".join(text.split())
    assert "no known key" not in text


def test_evaluations_of_trl_that_start_late(tmp_path):
    said = "trl sft --model_name_or_path m --dataset_name d --max_steps 90 --eval_delay "
    config, _ = migrate(written(tmp_path, "a.sh", f"{said}30 --eval_strategy steps --eval_steps 10"))
    expect(config, eval={"every": 10, "start": 30})
    config, _ = migrate(written(tmp_path, "a.sh", f"{said}1.5 --eval_strategy epoch"), rows=80)  # 10 updates an epoch
    expect(config, eval={"every": 10, "start": 15})


def test_trl_saves_what_is_best(tmp_path):
    said = "trl sft --model_name_or_path m --dataset_name d --max_steps 90 --save_strategy best --save_steps 7 "
    said += "--eval_strategy steps --eval_steps 10 --metric_for_best_model eval_loss"
    config, text = migrate(written(tmp_path, "a.sh", said))
    expect(config, checkpoint={"every": 10, "keep_every": 0, "best": "eval/loss", "best_mode": "min"})
    assert "of which the best and the newest stay" in " ".join(text.split())


def test_a_kl_of_verl_in_loss_and_reward(tmp_path):
    both = ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True")
    coefs = ("actor_rollout_ref.actor.kl_loss_coef=0.002", "algorithm.kl_ctrl.kl_coef=0.05")
    config = from_verl(tmp_path, *both, *coefs, "algorithm.kl_penalty=abs")
    expect(
        config,
        algorithm={"beta": 0.002, "kl": "k3", "reward_beta": 0.05, "reward_kl": "abs", "kl_in_reward": False},
    )
    config = from_verl(tmp_path, *both, "actor_rollout_ref.actor.kl_loss_coef=0", coefs[1])
    expect(config, algorithm={"beta": 0.05, "kl": "k1", "reward_beta": 0.0, "kl_in_reward": True})
    config = from_verl(tmp_path, *both, coefs[0], "algorithm.kl_ctrl.kl_coef=0", "algorithm.kl_ctrl.type=adaptive")
    expect(config, algorithm={"beta": 0.002, "reward_beta": 0.0, "kl_in_reward": False, "kl_controller": "fixed"})
    expect(from_verl(tmp_path, both[0], "actor_rollout_ref.actor.kl_loss_type=full"), algorithm={"kl": "full"})
    said = f"{VERL} algorithm.adv_estimator=grpo {both[1]} algorithm.kl_penalty=full"
    config, text = migrate(written(tmp_path, "full.sh", said))
    assert "kl_penalty is full, which verl names and does not compute" in " ".join(text.replace("#", "").split())
    expect(config, algorithm={"kl": "k1", "kl_in_reward": True})


def test_sizes_of_passes_and_of_the_sampler_of_verl(tmp_path):
    """Those of the log-probs, of all GPUs, and the share of memory; the sampler's come before the reference's."""
    rollout, gpus = "actor_rollout_ref.rollout", "algorithm.adv_estimator=grpo trainer.n_gpus_per_node=2"
    size, of_reference = (
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size=4",
    )
    many = "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=4"
    config = from_verl(tmp_path, many, gpus, size, of_reference, f"{rollout}.gpu_memory_utilization=0.4")
    expect(config, batch={"logps_microbatch_rows": 16}, rollout={"memory_fraction": 0.4})
    assert from_verl(tmp_path, many, gpus, of_reference).batch.logps_microbatch_rows == 4
    tokens = f"{rollout}.log_prob_use_dynamic_bsz=True {rollout}.log_prob_max_token_len_per_gpu=9000 {size}"
    config = from_verl(tmp_path, many, gpus, tokens)
    expect(config, batch={"logps_microbatch_tokens": 18000, "logps_microbatch_rows": 0})


def test_rows_of_like_length_of_trl(tmp_path):
    keys = {"model_name_or_path": "m", "dataset_name": "d", "group_by_length": True, "max_steps": 3}
    config, _ = migrate(written(tmp_path, "plain.json", keys), trainer="sft", devices=1)
    assert config.data.group_by_length
    validate(config)
    config, text = migrate(written(tmp_path, "packed.json", keys | {"packing": True}), trainer="sft", devices=1)
    assert not config.data.group_by_length and "group_by_length is left out" in " ".join(text.split())
    yaml = (FILES / "axolotl_dpo.yaml").read_text(encoding="utf-8") + "\ngroup_by_length: true\n"
    assert migrate(written(tmp_path, "dpo.yaml", yaml), rows=900)[0].data.group_by_length


def test_samples_in_fp8_of_verl(tmp_path):
    """Are corrected for, as they must be here; another kind has no equivalent."""
    said = (
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m trainer.total_training_steps=2 "
        "custom_reward_function.path=r.py actor_rollout_ref.rollout.quantization="
    )
    config, text = migrate(written(tmp_path, "run.sh", said + "fp8"))
    assert config.rollout.weights_dtype == "fp8" and config.algorithm.importance_correction == "token_truncate"
    assert "here it must be done" in " ".join(text.split())
    config, _ = migrate(written(tmp_path, "is.sh", f"{said}fp8 algorithm.rollout_correction.rollout_is=sequence"))
    assert config.algorithm.importance_correction == "sequence_truncate"
    said_too = "rollout_is=token R.rollout_is_threshold=0.5_5.0 R.rollout_is_batch_normalize=True R.rollout_rs="
    said_too = f"{said_too}seq_mean_k1 R.rollout_rs_threshold=0.999_1.001".replace(
        "R.", "algorithm.rollout_correction."
    )
    said_too = f"algorithm.rollout_correction.{said_too}"
    config, _ = migrate(written(tmp_path, "rs.sh", f"{said}fp8 {said_too}"))
    expect(
        config,
        algorithm={
            "importance_correction": "token_mask",
            "importance_min": 0.5,
            "importance_max": 5.0,
            "importance_normalize": True,
            "rejection": "seq_mean_k1",
            "rejection_bounds": "0.999_1.001",
        },
    )
    config, text = migrate(written(tmp_path, "other.sh", said + "torchao"))
    assert config.rollout.weights_dtype == "auto" and "takes fp8 and int8" in " ".join(text.split())


def test_sft_of_verl():
    config, _ = made("verl_sft.sh")
    expect(
        config,
        algorithm={"name": "sft"},
        lora={"rank": 32},
        data={"path": "rows.parquet", "max_length": 2048},
        optimizer={"learning_rate": 1e-4, "b2": 0.95, "weight_decay": 0.01, "warmup_ratio": 0.1, "schedule": "cosine"},
        batch={"prompts": 64, "microbatch_rows": 16},
        _={"total_steps": 100},
    )


def test_rows_of_verls_sft(tmp_path):
    """SFTDataset's tokens: the prompt by the template, and the answer as it is with an end, whose turn has thoughts."""
    said = "model: {partial_pretrain: a/b}\ndata: {prompt_key: extra, prompt_dict_keys: [q], response_key: a, "
    said += "apply_chat_template_kwargs: {mark: PROMPT}}\ntrainer: {total_training_steps: 1}\n"
    config, _ = migrate(written(tmp_path, "sft.yaml", said))
    tokenizer = load_tokenizer(EMBEDDED / "sort")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ mark }}{{ m.role }}\n{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}"
        "\n{% endfor %}{{ 'assistant\n' if add_generation_prompt }}"
    )
    made = formats.find(config.data.format, "completions", tokenizer)({"extra": {"q": "2+2?"}, "a": "4"})
    row = RowTokenizer("completions", tokenizer)(made)
    parts = [
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("PROMPTuser\n2+2?\nassistant\n", f"4{tokenizer.eos_token}")
    ]
    assert row["ids"] == parts[0] + parts[1]
    assert row["mask"] == [0] * len(parts[0]) + [1] * len(parts[1])


def test_wsd_of_verls_sft(tmp_path):
    """Behind a warm-up of 10 steps 90 are left: int(0.9 * 90) = 81 have the peak, and 9 are a half wave."""
    said = (FILES / "verl_sft.sh").read_text().strip() + " optim.lr_scheduler=wsd"
    config, _ = migrate(written(tmp_path, "a.sh", said))
    wanted = {"schedule": "wsd", "warmup_ratio": 0.1, "decay_steps": 9, "decay_shape": "cosine", "min_lr_ratio": 0.0}
    expect(config, optimizer=wanted)


def test_sft_of_verl_by_its_engines(tmp_path):
    said = (
        "torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer model.path=Qwen/Qwen2.5-0.5B engine=fsdp "
        "engine.ulysses_sequence_parallel_size=2 data.messages_key=turns data.max_token_len_per_gpu=2048 "
        "optim.lr=1e-5 optim.lr_scheduler_type=cosine optim.min_lr_ratio=0.1 trainer.total_training_steps=3 "
        "data.enable_thinking_default=False model.lora_rank=32\n"
    )
    config, text = migrate(written(tmp_path, "run.sh", said))
    expect(
        config,
        algorithm={"name": "sft"},
        model={"path": "Qwen/Qwen2.5-0.5B", "remat": "block"},
        lora={"rank": 32, "alpha": 16.0},
        data={"format": "chat_template(field_messages='turns')", "chat_template_kwargs": "enable_thinking=False"},
        optimizer={"learning_rate": 1e-5, "b2": 0.999, "schedule": "cosine", "min_lr_ratio": 0.1, "weight_decay": 0.01},
        batch={"prompts": 256, "microbatch_tokens": 4096},
        mesh={"context": 2},
        _={"total_steps": 3, "seed": 1},
    )
    assert "known key" not in text
    plain, _ = migrate(written(tmp_path, "plain.sh", said.replace("data.messages_key=turns", "")))
    expect(plain, data={"format": "auto"}, model={"path": "Qwen/Qwen2.5-0.5B"})


def test_sft_of_verl_without_a_model(tmp_path):
    """sft_trainer_engine.yaml as it is: its model is in another file."""
    said = (
        "data: {messages_key: messages, train_batch_size: 64}\noptim: {lr: 1e-5}\ntrainer: {total_training_steps: 2}\n"
    )
    config, text = migrate(written(tmp_path, "sft.yaml", said), system="verl")
    expect(config, algorithm={"name": "sft"}, batch={"prompts": 64}, optimizer={"learning_rate": 1e-5})
    assert "the file names no model" in text


def test_the_model_section_of_verls_sft(tmp_path):
    """sft_trainer_engine.yaml takes its model from hf_model.yaml, as actor_rollout_ref.model does."""
    said = (
        "torchrun -m verl.trainer.sft_trainer model.path=m model.tokenizer_path=t model.custom_chat_template=chatml "
        "model.lora.rank=4 model.lora.dropout=0.1 model.exclude_modules=down_proj model.enable_activation_offload=True "
        "model.override_config.rope_theta=10000.0 model.hf_config_path=null model.use_fused_kernels=False "
        "optim.lr=1e-5 optim.warmup_style=cosine optim.eps=1e-6 checkpoint.save_contents=[model,optimizer,hf_model] "
        "trainer.profile_interval=[-1,-1] trainer.total_training_steps=3\n"
    )
    config, text = migrate(written(tmp_path, "run.sh", said))
    expect(
        config,
        model={"tokenizer": "t", "remat": "offload", "overrides": "rope_theta=10000.0"},
        data={"chat_template": "chatml"},
        lora={"rank": 4, "alpha": 32.0, "dropout": 0.1, "exclude_modules": ("down_proj",)},  # 32 of Megatron's adapters
        optimizer={"schedule": "cosine", "eps": 1e-6},
        checkpoint={"contents": ("state", "hf")},
    )
    assert "known key" not in text
    plain, _ = migrate(written(tmp_path, "plain.sh", said.replace("model.lora.rank=4", "model.lora_rank=4")))
    assert plain.lora.alpha == 16.0


def test_a_key_of_verl_by_both_its_names(tmp_path):
    """As in the config.yaml that hydra writes, where verl reads the former name."""
    keys = ("custom_reward_function.path=r.py", "custom_reward_function.name=mine")
    default = "reward.custom_reward_function.name=compute_score"
    for said in ((*keys, default), (default, *keys)):
        config = from_verl(tmp_path, " ".join(said))
        assert config.rewards.functions == ("r.py:mine",)


def test_estimators_of_verl_with_the_gradient_of_k2(tmp_path):
    """`k3+` has the value of k3 and, in the loss, the gradient of k2."""
    in_loss = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl+"
    assert from_verl(tmp_path, in_loss).algorithm.kl == "k2"
    in_reward = from_verl(tmp_path, "algorithm.use_kl_in_reward=True algorithm.kl_penalty=k3+").algorithm
    assert (in_reward.kl, in_reward.kl_in_reward) == ("k3", True)


def test_the_divisor_of_verls_constant_aggregation(tmp_path):
    said = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm data.max_response_length=100"
    factor = "actor_rollout_ref.actor.loss_scale_factor"
    assert "divides by rollout.max_completion_length = 100" in noted_from_verl(tmp_path, f"{said} {factor}=400")
    assert "which optimizer.max_grad_norm bounds, are 4 times" in noted_from_verl(tmp_path, f"{said} {factor}=400")
    assert factor not in noted_from_verl(tmp_path, f"{said} {factor}=100")


def test_evaluations_of_verl_have_filters_of_their_own(tmp_path):
    """Those of training are off in them unless val_kwargs says otherwise."""
    rollout = "actor_rollout_ref.rollout"
    said = f"{rollout}.top_p=0.9 {rollout}.top_k=50"
    said += f" {rollout}.val_kwargs.do_sample=True {rollout}.val_kwargs.temperature=1"
    config = from_verl(tmp_path, said)
    expect(config, rollout={"top_p": 0.9, "top_k": 50}, eval={"temperature": 1.0, "top_p": 1.0, "top_k": 0})
    expect(from_verl(tmp_path, f"{said} {rollout}.val_kwargs.top_k=20"), eval={"top_p": 1.0, "top_k": 20})
    expect(from_verl(tmp_path), eval={"top_p": None, "top_k": None})


def test_types_of_verls_engines(tmp_path):
    """They change what is learned: of the parameters, of the computation and of Adam's moments."""
    at, optim = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.actor.optim"
    config = from_verl(tmp_path, f"{at}.model_dtype=bf16 {at}.dtype=float32 actor_rollout_ref.rollout.dtype=bfloat16")
    expect(config, model={"param_dtype": "bfloat16", "dtype": "float32"}, rollout={"weights_dtype": "bfloat16"})
    assert from_verl(tmp_path, f"{at}.dtype=fp16").model.dtype == "bfloat16"
    both = f"{optim}.exp_avg_dtype=bf16 {optim}.exp_avg_sq_dtype=bf16"
    assert from_verl(tmp_path, both).optimizer.moment_dtype == "bfloat16"
    noted = noted_from_verl(tmp_path, f"{optim}.exp_avg_dtype=bf16")
    assert "exp_avg_sq_dtype differ: both moments are in float32" in noted


def test_parallelism_of_megatron_in_verl(tmp_path):
    """16 GPUs in groups of 4 that share their rows, 2 of which share each row's tokens: 12 rows at most, of 1024."""
    at, sizes = "actor_rollout_ref.actor.megatron", "trainer.nnodes=2 actor_rollout_ref.rollout.n=4"
    shared = f"{at}.tensor_model_parallel_size=2 {at}.context_parallel_size=2 {at}.expert_model_parallel_size=4"
    rows = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"
    config = from_verl(tmp_path, shared, sizes, rows)
    expect(config, mesh={"tensor": 2, "context": 2, "expert": 4, "fsdp": -1}, batch={"microbatch_rows": 8})
    tokens = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000"
    assert from_verl(tmp_path, shared, sizes, tokens).batch.microbatch_tokens == 8 * 1000
    sft = "torchrun -m verl.trainer.sft_trainer model.path=m trainer.n_gpus_per_node=8 trainer.total_training_steps=2"
    said = f"{sft} engine=megatron engine.tensor_model_parallel_size=4\n"
    expect(migrate(written(tmp_path, "sft.sh", said))[0], mesh={"tensor": 4}, batch={"microbatch_tokens": 2 * 8192})


def test_verl_that_only_evaluates_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trains nothing .*jaxrl_llm evaluate --config"):
        from_verl(tmp_path, "trainer.val_only=True")


def test_optimizers_of_verls_engines(tmp_path):
    """Megatron, Torchtitan, VeOmni and Automodel have words of their own for the same numbers."""
    at = "actor_rollout_ref.actor.optim."
    base = (
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m algorithm.adv_estimator=rloo "
        f"actor_rollout_ref.rollout.n=4 trainer.total_training_steps=40 {at}lr=1e-4 {at}lr_warmup_steps=4 "
    )

    def optimizer(words):
        config, text = migrate(written(tmp_path, "run.sh", base + words.replace("AT.", at) + "\n"))
        assert "known key" not in text
        return config.optimizer, " ".join(text.split())

    found, _ = optimizer("AT.name=Adafactor AT.decay_type=linear AT.min_lr_factor=0.1 AT.eps=1e-7")
    assert (found.name, found.schedule, found.min_lr_ratio, found.eps) == ("adafactor", "linear", 0.1, 1e-7)
    words = "AT.lr_scheduler_type=cosine AT.lr_min=1e-5 AT.lr_start=2e-6 AT.lr_decay_ratio=0.5"
    found, _ = optimizer(words)
    assert (found.schedule, found.warmup_init, found.schedule_steps) == ("cosine", 2e-6, 20)
    assert found.min_lr_ratio == pytest.approx(0.1)
    found, text = optimizer(f"{words} trainer.total_training_steps=null")  # of epochs of rows that nobody has counted
    assert found.schedule_steps == 0
    assert "lr_decay_ratio = 0.5: set optimizer.schedule_steps to that share of the steps" in text
    for pair in ("[0.8,0.9]", "\"'[0.8,0.9]'\""):  # also quoted once more, within the words of a variable
        found, _ = optimizer(f"AT.betas={pair}")
        assert (found.b1, found.b2) == (0.8, 0.9)
    found, _ = optimizer("AT.lr_scheduler_type=cosine AT.init_lr_ratio=0.1 AT.wd_incr_style=cosine")
    assert found.warmup_init == pytest.approx(1e-5)
    assert found.weight_decay_shape == "cosine"
    found, text = optimizer("AT.optimizer=muon AT.muon_momentum=0.9 AT.muon_match_adamw_update_rms=True")
    assert found.name == "muon"
    assert "updates of matrices have the root mean square 0.2 here" in text


def test_clip_ratio_of_verl_beside_both_sides_is_not_read(tmp_path):
    at = "actor_rollout_ref.actor.clip_ratio"
    said = f"{at}=0.2 {at}_low=0.1 {at}_high=0.3"
    config = from_verl(tmp_path, said).algorithm
    assert (config.epsilon_low, config.epsilon_high) == (0.1, 0.3)
    assert "clip_ratio is written" not in noted_from_verl(tmp_path, said)


def test_clip_ratio_of_verl_is_what_clips(tmp_path):
    said = (
        "python -m verl.trainer.main_ppo actor_rollout_ref.actor.clip_ratio=0.3 trainer.total_training_steps=2 "
        "actor_rollout_ref.model.path=m algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=4\n"
    )
    new, text = migrate(written(tmp_path, "run.sh", said))
    assert (new.algorithm.epsilon_low, new.algorithm.epsilon_high) == (0.3, 0.3)
    assert "verl itself reads clip_ratio_low and clip_ratio_high alone" in " ".join(text.split())
    old, _ = migrate(tmp_path / "run.sh", version="0.3")
    expect(
        old,
        algorithm={"epsilon_low": 0.3, "epsilon_high": 0.3, "advantage": "rloo", "loss": "ppo_clip(dual_clip=3.0)"},
        eval={"every": 2},
        batch={"prompts": 1024},
    )


# axolotl.


def test_dpo_of_axolotl():
    config, text = made("axolotl_dpo.yaml", devices=1)
    expect(
        config,
        _={"output_dir": "./outputs/dpo", "total_steps": 1000},
        model={"path": "meta-llama/Meta-Llama-3-8B-Instruct", "quantize": "nf4", "remat": "block"},
        lora={"rank": 32, "alpha": 16.0, "dropout": 0.05, "targets": ("all-linear",)},
        data={"max_length": 4096, "overlong": "filter", "packing": False},
        algorithm={"name": "preference", "loss": "dpo", "beta": 0.2},
        optimizer={"learning_rate": 2e-5, "schedule": "cosine", "warmup_steps": 30},  # unset: 3 % of 1000
        batch={"prompts": 8, "microbatch_rows": 4},
        checkpoint={"every": 200, "keep": 4},
        eval={"every": 100},
    )
    assert config.data.sources == (
        {"path": "Intel/orca_dpo_pairs", "split": "train", "type": "llama3.intel"},
        {
            "ds_type": "json",
            "data_files": ["mine.jsonl"],
            "split": "train",
            "type": {"field_prompt": "ask", "field_chosen": "good", "field_rejected": "bad"},
        },
    )
    expect(config, data={"eval_split": None}, eval={"fraction": 0.05})
    assert "flash_attention = True: kernels and torch settings" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_rows_that_axolotl_holds_out(tmp_path):
    """val_set_size is a share of all rows, or a number of them all."""
    few, many = (
        str(written(tmp_path, f"{count}.jsonl", count * (json.dumps({"prompt": "a", "completion": "b"}) + "\n")))
        for count in (50, 150)
    )

    def held_out(size, *paths, rows=0, **more):
        sets = [{"path": path} for path in paths]
        tree = {"base_model": "m", "datasets": sets, "learning_rate": 1e-5, "max_steps": 10, "val_set_size": size}
        file = written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"eval_steps": 5} | more))
        config, text = migrate(file, devices=1, rows=rows)
        validate(config)
        splits = [(one.get("split"), one.get("eval_split")) for one in config.data.sources]
        notes = re.findall("val_set_size = .* holds nothing out[^-]*", " ".join(text.split('"""')[1].split()))
        return config.eval.fraction, config.eval.every, splits, notes

    whole = [(None, None)]
    for share in (0.005, 0.025, 0.5):
        assert held_out(share, "d", "e") == (share, 5, 2 * whole, [])
    assert held_out(20, few, many) == (0.1, 5, 2 * whole, [])
    assert held_out(20, "d", rows=100) == (0.2, 5, whole, [])
    assert held_out(2000, "d") == (0.0, 5, [("train[2000:]", "train[:2000]")], [])
    for paths, more, words in (
        ([few], {}, "there are 50 rows in all. To evaluate, set eval.fraction"),
        (["d", few], {}, "how many rows there are in all is not known"),
        (["d"], {"datasets": [{"path": "d", "split": "train[:9%]"}]}, "how many rows there are in all is not known"),
        (["d"], {"streaming": True}, "streamed rows are not counted. To evaluate, set data.eval_path"),
    ):
        fraction, every, splits, (note,) = held_out(2000, *paths, **more)
        assert (fraction, every, {evaluated for _, evaluated in splits}) == (0.0, -1, {None}) and words in note
    tested = held_out(0.1, "d", test_datasets=[{"path": "t"}])
    assert tested[:3] == (0.0, 5, whole) and "test_datasets are evaluated on" in tested[3][0]


def test_epochs_of_axolotl_count_the_rows_of_all_data_sets(tmp_path):
    rows = str(written(tmp_path, "rows.jsonl", 40 * (json.dumps({"prompt": "a", "completion": "b"}) + "\n")))

    def steps(*paths, **more):
        tree = {"base_model": "m", "datasets": [{"path": path} for path in paths], "learning_rate": 1e-5}
        config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump({**tree, "num_epochs": 1, **more})), devices=1)
        return config.total_steps, config.num_epochs

    assert steps(rows) == (40, None)
    assert steps(rows, rows, val_set_size=0.25) == (60, None)
    assert steps(rows, rows, val_set_size=0.25, test_datasets=[{"path": "t"}]) == (80, None)
    assert steps(rows, "d")[1] == 1.0  # not the steps of the one that is here


def test_kto_and_grpo_of_axolotl():
    kto, _ = made("axolotl_kto.yaml", rows=800, devices=1)
    expect(
        kto,
        _={"total_steps": 100},
        algorithm={"loss": "kto(desirable_weight=0.5)", "beta": 0.1},
        data={"max_length": 512, "shuffle": False},
        optimizer={"warmup_steps": 3, "schedule": "cosine"},
        model={"param_dtype": "bfloat16"},
        checkpoint={"every": 100, "keep": 4},
        eval={"every": -1},
    )
    gdpo, text = made("axolotl_grpo.yaml", devices=2)
    expect(
        gdpo,
        _={"seed": 7, "total_steps": 250},
        algorithm={
            "advantage": "gdpo",
            "beta": 0.001,
            "aggregation": "token",
            "ref_sync_steps": 64,
            "ref_mixup_alpha": 0.9,
            "importance_correction": "sequence_mask",
        },
        rollout={"group_size": 4, "max_completion_length": 256, "repetition_penalty": 1.1},
        rewards={"functions": ("rewards.format_reward", "rewards.correctness_reward"), "weights": (1.0, 2.0)},
        batch={"prompts": 8, "microbatch_rows": 8},
        data={"sources": ({"path": "openai/gsm8k", "name": "main", "type": "rewards.oai_gsm8k_transform"},)},
    )
    assert "repetition_penalty" in text and "has no equivalent" not in text


def test_sampling_of_trl_verl_and_axolotl(tmp_path):
    """generation_kwargs under the names of transformers and vLLM, patterns, and greedy training."""
    keys = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["r"], "num_generations": 4}
    said = {
        **{"presence_penalty": 0.5, "stop": "</s>", "stop_token_ids": [3], "min_new_tokens": 4, "bad_words": ["no"]},
        **{"logit_bias": {"7": -2.5}, "do_sample": False, "best_of": 2},
    }
    file = written(tmp_path, "one.json", keys | {"repetition_penalty": 1.2, "generation_kwargs": said})
    config, text = migrate(file, trainer="grpo", devices=1)
    expect(
        config,
        rollout={
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "stop": ("</s>",),
            "stop_token_ids": (3,),
            "min_completion_length": 4,
            "logit_bias": ("7=-2.5",),
            "bad_words": ("no",),
            "temperature": 0.0,
        },
    )
    assert "generation_kwargs: best_of = 2 has no equivalent" in text
    schema = {"structured_outputs": {"json": {"type": "integer"}}}
    config, _ = migrate(written(tmp_path, "two.json", keys | {"generation_kwargs": schema}), trainer="grpo", devices=1)
    assert config.rollout.structured_json == '{"type": "integer"}'
    pattern = written(tmp_path, "three.json", keys | {"vllm_structured_outputs_regex": "[ab]{3}"})
    assert migrate(pattern, trainer="grpo", devices=1)[0].rollout.structured_regex == "[ab]{3}"
    axolotl = (FILES / "axolotl_grpo.yaml").read_text(encoding="utf-8")
    more = "trl:\n  generation_kwargs: {frequency_penalty: 0.2}\n  vllm_guided_decoding_regex: 'a+'\n"
    file = written(tmp_path, "four.yaml", axolotl.replace("trl:\n", more))
    expect(migrate(file, devices=2)[0], rollout={"frequency_penalty": 0.2, "structured_regex": "a+"})
    assert from_verl(tmp_path, "actor_rollout_ref.rollout.do_sample=False").rollout.temperature == 0


@pytest.mark.parametrize(
    ("rl", "loss", "beta"),
    [("ipo", "ipo", 0.1), ("orpo", "orpo", 0.3), ("simpo", "simpo", 0.1), (None, "", 0.0)],
)
def test_other_methods_of_axolotl(tmp_path, rl, loss, beta):
    text = f"base_model: m\nlearning_rate: 1e-5\nmax_steps: 10\ndatasets: [{{path: d}}]\n{f'rl: {rl}' if rl else ''}\n"
    config, _ = migrate(written(tmp_path, "a.yml", text + ("orpo_alpha: 0.3\n" if rl == "orpo" else "")), devices=1)
    if rl is None:
        expect(config, algorithm={"name": "sft"}, data={"loss_on": "completion", "max_length": 512})
    else:
        expect(config, algorithm={"name": "preference", "loss": loss, "beta": beta})


def test_texts_of_axolotl_and_unknown_keys(tmp_path):
    text = "base_model: m\nlearning_rate: 1e-5\nmax_steps: 2\ndatasets: [{path: d, type: completion, field: text}]\n"
    extra = "include_tokens_per_second: true\nzzzz_zzzz: 1\nlearning_rat: 1\n"
    config, made_of = migrate(written(tmp_path, "a.yml", text + extra), devices=1)
    assert config.data.sources == ({"path": "d", "type": "completion"},)
    assert "- zzzz_zzzz is no known key; the closest is " in made_of
    assert "include" not in made_of.partition('"""\n\nfrom')[0]
    assert "- learning_rat is no known key; the closest is learning_rate\n" in made_of


def test_teachers_of_axolotl(tmp_path):
    tree = {"base_model": "m", "learning_rate": 1e-5, "max_steps": 4, "sequence_len": 1024, "micro_batch_size": 8}
    tree |= {"datasets": [{"path": "d", "type": "chat_template"}]}
    gkd = {"gkd_trainer": True, "gkd_teacher": "t", "gkd_max_new_tokens": 256, "gkd_top_k": 20, "gkd_seq_kd": True}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | gkd)), devices=1)
    expect(
        config,
        teacher={"path": "t", "form": "divergence", "beta": 1.0, "on_policy": 1.0, "temperature": 0.9},
        rollout={"max_completion_length": 256, "max_prompt_length": 768, "temperature": 0.9, "top_k": 20},
        batch={"prompts": 8},
        rewards={"functions": ()},
        data={"sources": ({"path": "d"},)},
    )
    assert "gkd_seq_kd is left out" in text and "no known key" not in text
    given = {"gkd_lmbda": 0, "gkd_divergence": "fkl", "gkd_temperature": 2.0, "gkd_seq_kd": False}
    config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | gkd | given)), devices=1)
    expect(config, algorithm={"name": "sft"}, teacher={"path": "t", "beta": 0.0, "temperature": 2.0})
    online = {"kd_trainer": True, "kd_online_server_base_url": "http://h:8000/", "kd_online_topk": 64, "kd_alpha": 0.9}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | online | {"kd_ce_alpha": 0.1})), devices=1)
    expect(
        config,
        algorithm={"name": "sft"},
        teacher={
            "path": "server(url='http://h:8000/v1', model='MODEL')", "form": "divergence", "beta": 0.0, "coef": 0.9,
            "top_k": 64, "tail": False,
        },
    )  # fmt: skip
    assert "kd_ce_alpha = 0.1 is left out" in text and "no known key" not in text


def test_a_text_column_of_another_name_of_axolotl(tmp_path):
    text = "base_model: m\nlearning_rate: 1e-5\nmax_steps: 2\ndatasets: [{path: d, type: completion, field: body}]\n"
    config, _ = migrate(written(tmp_path, "a.yml", text), devices=1)
    assert config.data.sources == ({"path": "d", "type": "completion", "field": "body"},)
    form = formats.find("completion", "completions", options={"field": "body"})
    assert form({"body": "words", "text": "other"})["text"] == "words"


def test_learning_rates_of_parts_of_axolotl(tmp_path):
    tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 2e-5, "max_steps": 100}
    groups = [{"name": "a", "modules": ["q_proj", "mlp.up"], "lr": 1e-5}]
    config, text = migrate(
        written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"lr_groups": groups, "embedding_lr": 2e-6})), devices=1
    )
    expect(config, optimizer={"rate_factors": ("embed_tokens|lm_head=0.1", "q_proj|mlp\\.up=0.5")})
    assert "no known key" not in text
    plus = {"adapter": "lora", "lora_r": 8, "loraplus_lr_ratio": 16, "weight_decay": 0.1, "lr_scheduler": "rex"}
    config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | plus)), devices=1)
    expect(config, optimizer={"rate_factors": ("lora_B=16",), "weight_decay": 0.0, "schedule": "rex"})
    cycle = {"lr_scheduler": "one_cycle", "use_eaft": True, "eaft_alpha": 2.0, "curriculum_sampling": True}
    config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | cycle)), devices=1)
    expect(config, optimizer={"schedule": "cosine", "warmup_steps": 3}, data={"shuffle": False})
    assert config.algorithm.loss == "eaft(alpha=2.0, scale=1.0)"
    assert config.optimizer.warmup_init == pytest.approx(2e-5 / 25)
    assert config.optimizer.min_lr_ratio == pytest.approx(4e-6)


def test_new_tokens_of_axolotl(tmp_path):
    tree = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 2e-5, "max_steps": 100}
    tree |= {"tokens": ["<|im_start|>", "<|im_end|>"], "special_tokens": {"eos_token": "<|im_end|>"}}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)), devices=1)
    expect(config, model={"eos_token": "<|im_end|>"})
    noted = " ".join(text.partition("from jaxrl_llm")[0].split())
    assert "add_tokens --model=m --tokens='<|im_start|>,<|im_end|>' --output=FOLDER" in noted


def test_pretraining_of_axolotl(tmp_path):
    text = {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT", "type": "pretrain", "text_column": "text"}
    tree = {"base_model": "m", "pretraining_dataset": [text], "learning_rate": 5e-4, "max_steps": 10}
    tree |= {"sample_packing": True, "streaming_multipack_buffer_size": 1000, "reinit_weights": True}
    config, made_of = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)), devices=1)
    sources = ({"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT", "type": "completion"},)
    expect(config, data={"sources": sources, "streaming": True, "packing": True, "loss_on": "all"})
    expect(config, data={"shuffle_buffer": 1000}, model={"random_init": True})
    assert "no known key" not in made_of and "names no data set" not in made_of
    config, _ = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree | {"pretraining_dataset": text})), devices=1)
    expect(config, data={"sources": sources})


def test_a_folder_says_whether_its_model_is_here(tmp_path):
    said = {"model_name_or_path": str(EMBEDDED / "sort"), "dataset_name": "d", "trainer": "dpo", "max_steps": 1}
    assert "model.path is" not in migrate(written(tmp_path, "a.yaml", yaml.safe_dump(said)), devices=1)[1]
    written(tmp_path, "config.json", {"model_type": "bert"})
    _, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(said | {"model_name_or_path": "."})), devices=1)
    assert "- model.path is .: model_type 'bert' is not supported" in text


def test_what_public_examples_often_have(tmp_path):
    """Alpaca's rows, streams and names with commas are taken over, and what there is needs no look."""
    tree = {
        "base_model": "openai/gpt-oss-20b", "datasets": [{"path": "d", "type": "alpaca"}], "learning_rate": 1e-5,
        "max_steps": 2, "streaming": True, "bfloat16": True, "activation_offloading": True, "save_strategy": "no",
    }  # fmt: skip
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)), devices=1)
    assert config.data.streaming and config.data.sources[0]["type"] == "alpaca"
    assert "Look at this first" not in text
    tree |= {"reward_model": True, "num_labels": 1, "datasets": [{"path": "d", "type": "chatml.intel"}]}
    assert "Look at this first" not in migrate(written(tmp_path, "r.yaml", yaml.safe_dump(tree)), devices=1)[1]
    tree["datasets"] = [{"path": "d", "type": "bradley_terry.chat_template"}]
    config, text = migrate(written(tmp_path, "b.yaml", yaml.safe_dump(tree)), devices=1)
    assert "Look at this first" not in text
    assert config.data.sources[0]["type"] in known("pairs")
    tree["base_model"] = "zai-org/GLM-4.1V-9B-Thinking"
    assert "Thinking reads images" in migrate(written(tmp_path, "v.yaml", yaml.safe_dump(tree)), devices=1)[1]
    said = {"model_name_or_path": "m", "dataset_name": "d", "trainer": "dpo", "max_steps": 1, "use_peft": True}
    said |= {"lora_target_modules": ["q_proj,", "v_proj"], "chat_template": "{{ messages }}"}
    config, _ = migrate(written(tmp_path, "t.yaml", yaml.safe_dump(said)), devices=1)
    expect(config, lora={"targets": ("q_proj", "v_proj")}, data={"chat_template": "{{ messages }}"})


def test_bounds_that_a_trl_script_takes_away(tmp_path):
    """None is no clipping there, where the defaults have some."""
    none = {"max_grad_norm": None, "use_vllm": True, "vllm_importance_sampling_clip_max": None}
    said = {"output_dir": "o", "max_steps": 4, "model_name_or_path": "m", **none}
    config, _ = migrate(written(tmp_path, "a.json", said), trainer="grpo", devices=1)
    expect(config, optimizer={"max_grad_norm": 0.0}, algorithm={"importance_max": 1e9})
    config, _ = migrate(written(tmp_path, "a.json", {"output_dir": "o", "use_vllm": True}), trainer="grpo", devices=1)
    expect(config, optimizer={"max_grad_norm": 1.0}, algorithm={"importance_max": 3.0})


def test_the_load_balancing_loss_of_trl(tmp_path):
    """TRL 1.16 takes the coefficient of config.json in the trainers that have a key for it, else none."""

    def coefficient(trainer, **more):
        said = {"output_dir": "o", "model_name_or_path": "Qwen/Qwen3-30B-A3B", "max_steps": 4}
        version = more.pop("version", "")
        config, _ = migrate(written(tmp_path, "a.json", said | more), trainer=trainer, devices=1, version=version)
        return config.model.router_aux_loss_coef

    assert [coefficient(trainer) for trainer in ("sft", "dpo", "kto", "grpo", "rloo", "asyncgrpo")] == [None] * 6
    assert [coefficient(trainer) for trainer in ("reward", "cpo", "tpo", "gmpo", "onlinedpo")] == [0.0] * 5
    assert coefficient("grpo", version="0.16") == 0.0
    assert coefficient("sft", router_aux_loss_coef=0.01) == 0.01
    assert coefficient("dpo", router_aux_loss_coef=0.0) == 0.0
    assert coefficient("cpo", model_init_kwargs={"output_router_logits": True}) is None


def test_parameters_that_are_matrices_of_experts(tmp_path):
    """PEFT's target_parameters, of TRL's arguments, a LoraConfig in a script, and axolotl; a router has no adapter."""
    parameters = ["mlp.experts.gate_up_proj", "feed_forward.experts.down_proj"]
    said = {"model_name_or_path": "m", "dataset_name": "d", "trainer": "sft", "max_steps": 1, "use_peft": True}
    said |= {"lora_target_modules": ["q_proj"], "lora_dropout": 0.0, "lora_target_parameters": parameters}
    config, text = migrate(written(tmp_path, "t.yaml", yaml.safe_dump(said)), devices=1)
    expect(config, lora={"targets": ("q_proj", "experts.gate_up_proj", "experts.down_proj")})
    assert "no modules with adapters" not in text
    del said["lora_target_modules"]
    config, text = migrate(written(tmp_path, "t.yaml", yaml.safe_dump(said)), devices=1)
    expect(config, lora={"targets": ("experts.gate_up_proj", "experts.down_proj")})
    assert "by architecture; none, as for most mixtures of experts, is written" in text
    script = (
        "from peft import LoraConfig\nfrom trl import SFTConfig, SFTTrainer\n"
        "lora = LoraConfig(r=8, target_modules='all-linear', target_parameters=['mlp.experts.down_proj'])\n"
        "SFTTrainer(model='m', args=SFTConfig(max_steps=1), train_dataset='d', peft_config=lora)\n"
    )
    config, _ = migrate(written(tmp_path, "s.py", script), devices=1)
    expect(config, lora={"targets": ("all-linear", "experts.down_proj"), "rank": 8})
    tree = {"base_model": "m", "learning_rate": 1, "adapter": "lora", "lora_r": 4, "lora_target_linear": True}
    tree |= {"lora_target_parameters": [*parameters, "mlp.gate.weight"], "datasets": [{"path": "d"}], "max_steps": 1}
    config, text = migrate(written(tmp_path, "a.yaml", yaml.safe_dump(tree)), devices=1)
    expect(config, lora={"targets": ("all-linear", "experts.gate_up_proj", "experts.down_proj")})
    assert "lora.targets: mlp.gate.weight are no modules with adapters here" in text


def test_a_rollout_function_of_axolotl(tmp_path):
    text = (
        "base_model: m\nlearning_rate: 1e-5\nmax_steps: 10\nrl: grpo\ndatasets: [{path: d, type: math_env.t}]\n"
        "micro_batch_size: 4\ntrl: {num_generations: 4, rollout_func: math_env.solve, "
        "reward_funcs: [math_env.r]}\n"
    )
    config, _ = migrate(written(tmp_path, "a.yaml", text), devices=1)
    expect(
        config, environment={"rollout_func": "math_env.solve"}, algorithm={"importance_correction": "token_truncate"}
    )


# Harmony.


def test_a_recipe_of_harmony():
    config, text = made("harmony_grpo.py", rows=1280)
    expect(
        config,
        _={"total_steps": 10},
        batch={"prompts": 128, "minibatches": 4},
        rollout={"group_size": 8},
        algorithm={"scale_rewards": "none", "beta": 0.01, "name": "grpo"},
        optimizer={"learning_rate": 7.5e-7},
        rewards={"functions": ("my_graders:grader",)},
        model={"path": "llama-3.1-8b-instruct"},
    )
    assert "Harmony's own defaults are not published" in text


def test_all_devices_of_harmony(tmp_path):
    script = "from adaptive_harmony.common import DPO\nmodel = ctx.model('m').tp(ctx.world_size)\n"
    script += "DPO(dataset='pairs.jsonl', model=model.spawn(), lr=1e-6, samples_per_batch=8, beta=0.3)\n"
    for size, noted in (("ctx.world_size", True), ("2", False)):
        file = written(tmp_path, "a.py", script.replace("ctx.world_size", size))
        config, text = migrate(file, rows=80)
        assert config.mesh.tensor == (-1 if noted else 2)
        assert ("on several set mesh.tensor to the devices of one" in " ".join(text.split())) == noted


def test_ppo_and_dpo_of_harmony(tmp_path):
    ppo = """
from adaptive_harmony.common import PPO
trainer = PPO(dataset=threads(), policy_model=policy, value_model=value, grader=CombinedGrader(graders=[a]),
              lr_policy=1e-6, lr_value=2e-6, kl_beta=0.05, samples_per_batch=64, samples_per_mini_batch=16,
              max_num_ppo_steps=40)
"""
    config, text = migrate(written(tmp_path, "ppo.py", ppo))
    expect(
        config,
        _={"total_steps": 40},
        algorithm={"name": "ppo", "beta": 0.05, "kl_in_reward": True},
        critic={"learning_rate": 2e-6},
        batch={"prompts": 64, "minibatches": 4},
        model={"path": "MODEL"},
        rewards={"functions": ("REWARD",)},
        rollout={"group_size": 1},
    )
    assert "grader is CombinedGrader(graders=[a])" in " ".join(text.split())
    dpo = "from adaptive_harmony.common import DPO\n"
    dpo += "DPO(dataset='pairs.jsonl', model='m', lr=1e-6, samples_per_batch=8, beta=0.3)\n"
    config, _ = migrate(written(tmp_path, "dpo.py", dpo), rows=80)
    expect(config, _={"total_steps": 10}, algorithm={"loss": "dpo", "beta": 0.3}, data={"path": "pairs.jsonl"})


# What is written, and what is refused.


@pytest.mark.parametrize("name", sorted(file.name for file in FILES.iterdir() if file.is_file()))
def test_the_file_that_is_written_makes_the_configuration(name, tmp_path):
    config, text = made(name, rows=5000, devices=2 if "grpo" in name and "verl" not in name else 0)
    file = written(tmp_path, "config.py", text)
    assert load_config_file(str(file)).to_dict() == config.to_dict()
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize("name", sorted(file.name for file in FILES.iterdir() if file.is_file()))
def test_nothing_is_dropped(name):
    """Every key that a file sets stands in the result: beside a setting, in a comment, or in what to look at."""
    from jaxrl_llm.tools.migrate.reading import read

    given = read(str(FILES / name)).settings
    _, text = made(name, rows=5000, devices=2 if "grpo" in name and "verl" not in name else 0)
    # Parts of one meaning, told by another key: the adapter's kind, the number of devices, PEFT's class.
    silent = """use_peft num_processes trainer.n_gpus_per_node trainer.nnodes val_set_size adapter load_in_4bit bf16
        actor_rollout_ref.actor.use_kl_loss algorithm.use_kl_in_reward custom_reward_function.name logging_steps"""
    given = set(given) - set(silent.split())
    missing = [
        key
        for key in given
        if f"{key} =" not in text
        and f"# {key}" not in text
        and f", {key}" not in text
        and f"{key}:" not in text
        and f"{key} is" not in text
    ]
    assert not missing, text


def test_nothing_of_a_script_is_run(tmp_path):
    canary = tmp_path / "canary"
    text = (
        f"open({str(canary)!r}, 'w').write('ran')\nfrom trl import GRPOConfig\n"
        "GRPOConfig(output_dir='o', max_steps=2, beta=__import__('os').getpid())\n"
    )
    _, made_text = migrate(written(tmp_path, "a.py", text), devices=1)
    assert not canary.exists()
    assert "beta = __import__('os').getpid() is known only when the script runs" in " ".join(made_text.split())
    evil = "!!python/object/apply:os.system ['true']"
    with pytest.raises(ConfigError, match="cannot be read"):
        migrate(written(tmp_path, "a.yaml", f"base_model: {evil}\n"))


@pytest.mark.parametrize(
    ("name", "text", "said", "message"),
    [
        ("a.json", {"output_dir": "o", "max_steps": 2}, {}, "which trainer of TRL"),
        ("a.json", {"output_dir": "o", "max_steps": 2}, {"trainer": "grop"}, "the closest is grpo"),
        ("a.json", {"what": 1}, {}, "say which with --system"),
        ("a.json", "[1]", {}, "not a dictionary"),
        ("a.sh", "echo hello\n", {}, "has 0 commands that train"),
        (
            "a.sh",
            "trl vllm-serve --model a/b --tensor_parallel_size 8\n",
            {},
            "-m jaxrl_llm serve --model=a/b` does that",
        ),
        ("a.sh", "axolotl vllm-serve a.yaml\n", {}, "trains nothing: `python -m jaxrl_llm serve --model=FOLDER`"),
        ("a.py", "print(1)\n", {}, "calls no trainer: those that are, are GRPOTrainer"),
        ("a.py", "from trl import XPOTrainer\nXPOTrainer(model='m')\n", {}, "calls XPOTrainer, which is not"),
        ("a.py", "print(\n", {}, "is no Python"),
        ("a.sh", "X='never ends\n", {}, "does not end"),
        ("a.json", {"max_steps": 2, "output_dir": "o", "desirable_weight": 1}, {"version": "0.16"}, "known for grpo"),
        ("a.ini", "a = 1\n", {}, "no .yaml, .json, .toml, .py, .ipynb or .sh file"),
        ("a.toml", "a = 1\n", {}, "none of the sections orchestrator, trainer, optim and data"),
        ("a.ipynb", {"nbformat": 4}, {}, "is no notebook: KeyError"),
        # Of other libraries, whose keys, flags and classes look like those of TRL and verl.
        ("a.sh", "python -m slime.train.main actor.model.path=m data.train_data=d\n", {}, "none of verl's"),
        ("a.yaml", "rl: bco\nbase_model: m\n", {}, "rl is 'bco', which has no equivalent; there are dpo"),
        ("a.yaml", "kd_trainer: true\nbase_model: m\n", {}, "log-probs of a teacher that are in the rows"),
        (
            "a.yaml",
            "data: {path: said.parquet, response_key: responses}\ncustom_reward_function: {path: r.py, name: f}\n",
            {},
            "evaluate --responses=said.parquet --response_key=responses --config.rewards.functions=r.py:f",
        ),
    ],
)
def test_files_that_cannot_be_migrated_are_refused_with_the_fix(tmp_path, name, text, said, message):
    with pytest.raises(ConfigError, match=message):
        migrate(written(tmp_path, name, text), **said)


VERL_IMAGES = """
data: {train_files: rows.parquet, image_key: photos}
actor_rollout_ref: {model: {path: HuggingFaceTB/SmolVLM-256M-Instruct}}
"""


def test_verl_trains_the_vision_part_unless_it_is_frozen(tmp_path):
    at, path = "actor_rollout_ref", "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct"
    assert from_verl(tmp_path, path).model.vision == "trained"
    assert from_verl(tmp_path, path, f"{at}.actor.freeze_vision_tower=True").model.vision == "frozen"
    assert from_verl(tmp_path, path, f"{at}.model.lora_rank=8").model.vision == "lora"
    text = [f"{at}.model.lora_rank=8", f"{at}.model.exclude_modules='.*visual.*'"]
    assert from_verl(tmp_path, path, *text).model.vision == "frozen"
    assert "reads images" not in noted_from_verl(tmp_path, path)
    assert from_verl(tmp_path).model.vision == "frozen"  # of a model of text


@pytest.mark.parametrize(("name", "key"), [("photos", "photos"), ("images", "auto")])
def test_the_images_are_read_as_in_verl(tmp_path, name, key):
    text = VERL_IMAGES.replace("photos", f"{name}, mm_processor_kwargs: {{min_pixels: 3136, max_pixels: 401408}}")
    data = migrate(written(tmp_path, "v.yaml", text), devices=1)[0].data
    assert (data.image_key, data.image_processor) == (key, "min_pixels=3136, max_pixels=401408")


@pytest.mark.parametrize(
    ("name", "text", "said", "notes"),
    [
        (
            "a.json",
            {"output_dir": "o", "num_train_epochs": 2},
            {"trainer": "sft"},
            ["num_train_epochs = 2", "--rows=N"],
        ),
        ("a.json", {"num_generations": 3, "max_steps": 2, "output_dir": "o"}, {}, ["3 of a prompt", "--devices"]),
        ("a.json", {"loss_type": "gruppo", "max_steps": 2, "output_dir": "o"}, {"trainer": "grpo"}, ["gruppo"]),
        ("a.yaml", "rl: dpo\nbase_model: m\n", {}, ["learning_rate is missing"]),
        ("a.json", {"max_steps": "many", "output_dir": "o"}, {"trainer": "sft"}, ["max_steps = 'many' is left out"]),
        (
            "a.json",
            {"max_steps": 2, "learning_rate": -1.0, "output_dir": "o"},
            {"trainer": "sft"},
            ["learning_rate = -1"],
        ),
        (
            "a.json",
            {"max_steps": "x", "learning_rate": "y", "beta": "z", "output_dir": "o"},
            {"trainer": "dpo"},
            ["max_steps = 'x' is", "learning_rate = 'y' is", "beta = 'z' is"],
        ),
        ("a.sh", f"{VERL}algorithm.adv_estimator=grop\n", {}, ["adv_estimator = 'grop' is left out"]),
        ("a.sh", f"{VERL}actor_rollout_ref.actor.ppo_mini_batch_size=300\n", {}, ["does not divide", "256 is taken"]),
        (
            "a.sh",
            f"{VERL}data.train_batch_size=$SIZE trainer.default_local_dir=$1\n",
            {},
            ["$SIZE' is left out", "what $1 is"],
        ),
        (
            "a.yaml",
            "base_model: tiiuae/falcon-rw-7b\nlearning_rate: 1\ndatasets: [{path: d}]\n",
            {},
            ["falcon-rw-7b: see that"],
        ),
        (
            "a.yaml",
            "base_model: allenai/Molmo-7B\nlearning_rate: 1\ndatasets: [{path: d}]\n",
            {},
            ["models that read images"],
        ),
        (
            "a.yaml",
            "base_model: m\nlearning_rate: 1\nprocess_reward_model: true\nnum_labels: 3\n",
            {},
            ["num_labels = 3 has no equivalent: such a model has 2 here"],
        ),
        (
            "a.yaml",
            "base_model: m\nlearning_rate: 1\nadapter: lora\nlora_target_modules: 'model.layers.*(q|k)_proj'\n",
            {},
            ["lora.targets", "all-linear is written"],
        ),
        (
            "a.yaml",
            "base_model: m\nlearning_rate: 1\nval_set_size: 9\ndatasets: [{path: d, split: 'train[:1%]'}]\n",
            {},
            ["val_set_size = 9 holds nothing out"],
        ),
    ],
)
def test_a_key_that_cannot_be_taken_over_is_noted_at_the_top(tmp_path, name, text, said, notes):
    """And the rest becomes a valid configuration."""
    config, made_text = migrate(written(tmp_path, name, text), **said)
    validate(config)
    head = " ".join(made_text.split('"""')[1].split())
    assert "Look at this first" in head
    for note in notes:
        assert note in head, head


def test_rows_are_counted_in_a_file_that_is_here(tmp_path):
    rows = written(
        tmp_path, "rows.jsonl", "".join(json.dumps({"prompt": "a", "completion": "b"}) + "\n" for _ in range(20))
    )
    said = {"output_dir": "o", "dataset_name": str(rows), "num_train_epochs": 2, "per_device_train_batch_size": 8}
    config, _ = migrate(written(tmp_path, "a.json", said), trainer="sft", devices=1)
    assert config.total_steps == 6  # 20 rows are three batches of at most 8
    full = said | {"dataloader_drop_last": True}
    config, text = migrate(written(tmp_path, "b.json", full), trainer="sft", devices=1)
    assert config.total_steps == 4 and "dataloader_drop_last = True: part of total_steps" in text
    accumulated = full | {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    config, _ = migrate(written(tmp_path, "c.json", accumulated), trainer="sft", devices=2)
    assert config.total_steps == 2  # of three passes of six rows


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("trainer", ["distillation", "gold", "iwopd", "gkd"])
def test_an_epoch_of_a_taught_trainer_of_trl(tmp_path, trainer, accumulated):
    """Of 11 rows all but GKDTrainer leave out those that fill no batch: the updates are what TRL 1.16 counts."""
    said = {"output_dir": "o", "model": "m", "teacher_model": "t", "num_train_epochs": 2}
    said |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulated}
    config, _ = migrate(written(tmp_path, "a.json", said), trainer=trainer, devices=1, rows=11)
    assert config.total_steps == {1: 10, 2: 4}[accumulated] + 2 * (trainer == "gkd")


def test_the_steps_of_packed_rows_are_counted_by_the_run(tmp_path):
    """A batch is of packed rows: steps of as many rows would be many epochs."""
    row = json.dumps({"prompt": "a", "completion": "b"}) + "\n"
    rows = str(written(tmp_path, "rows.jsonl", 200 * row))
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trl = {"output_dir": "o", "dataset_name": rows, "num_train_epochs": 1, "packing": True, **sizes}
    datasets = f"base_model: m\nlearning_rate: 1\ndatasets: [{{path: {rows}, ds_type: json}}]\n"
    axolotl = f"{datasets}sample_packing: true\nnum_epochs: 1\nmicro_batch_size: 2\ngradient_accumulation_steps: 2\n"
    for name, text in (("a.json", trl | {"save_strategy": "epoch"}), ("a.yaml", axolotl)):
        for said in ({}, {"rows": 200}):
            config, made_text = migrate(written(tmp_path, name, text), trainer="sft", devices=1, **said)
            head = " ".join(made_text.split('"""')[1].split())
            assert (config.data.packing, config.batch.prompts, config.num_epochs) == (True, 4, 1.0)
            assert "= 1, and the number of packed rows is known only" in head and "--rows" not in head
    assert (config.optimizer.warmup_steps, config.optimizer.warmup_ratio) == (0, 0.03)  # axolotl's share of the steps
    assert migrate(written(tmp_path, "b.json", trl | {"max_steps": 7}), trainer="sft", devices=1)[0].num_epochs is None
    unpacked = migrate(written(tmp_path, "c.json", trl | {"packing": False}), trainer="sft", devices=1)[0]
    assert (unpacked.total_steps, unpacked.num_epochs) == (50, None)


def test_the_home_folder_in_paths_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    output = tmp_path / "home" / "mine.py"
    main([str(FILES / "trl_kto.yaml"), "--rows=100", "--devices=1", "--output=~/mine.py"])
    assert output.is_file() and f"wrote {output}; its first lines" in capsys.readouterr().out
    main([str(FILES / "trl_grpo.py"), "--devices=1", "--output=~/grpo.py"])
    functions = tmp_path / "home" / "grpo_functions.py"
    assert functions.is_file() and f"/grpo.py and {functions}, the functions that " in capsys.readouterr().out
    (tmp_path / "home" / "s.py").write_text(FILES.joinpath("trl_grpo.py").read_text())
    migrate("~/s.py", devices=1)
    assert (tmp_path / "home" / "s_functions.py").is_file() and not (tmp_path / "~").exists()
    assert load_config_file("~/mine").algorithm.name == "preference"  # a name without .py, as --config takes it


def test_command_line(tmp_path, capsys):
    output = tmp_path / "mine.py"
    main([str(FILES / "trl_kto.yaml"), "--rows=100", "--devices=1", f"--output={output}"])
    assert f"--config={output}" in output.read_text()
    assert load_config_file(str(output)).algorithm.loss == "kto(desirable_weight=1.33)"
    with pytest.raises(ConfigError, match="is there already"):
        main([str(FILES / "trl_kto.yaml"), "--rows=100", "--devices=1", f"--output={output}"])
    with pytest.raises(ConfigError, match=r"name it mine\.py"):
        main([str(FILES / "trl_kto.yaml"), "--rows=100", "--devices=1", f"--output={tmp_path / 'mine'}"])
    with pytest.raises(ConfigError, match="give one file"):
        main([])
    capsys.readouterr()
    main([str(FILES / "trl_orpo.sh"), "--devices=1"])
    assert "def get_config" in capsys.readouterr().out


def test_variables_arrays_and_sums_of_a_shell_script(tmp_path):
    script = """
# python -m verl.trainer.main_ppo data.train_batch_size=1
prompts=$((8 * 2))
answer=${ANSWER:-$((1024 * 2))}
LIST="
algorithm.adv_estimator=grpo
"
DATA=(
    data.train_batch_size=${prompts}  # prompts
    data.max_prompt_length=$((prompts + 4))
)
echo python -m verl.trainer.main_ppo
python3 -m verl.trainer.main_ppo "${DATA[@]}" $LIST data.max_response_length=$answer actor_rollout_ref.model.path=m \\
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4 trainer.total_training_steps=3 "$@"
"""
    config, _ = migrate(written(tmp_path, "run.sh", script))
    expect(
        config,
        batch={"prompts": 16, "minibatches": 2},
        algorithm={"advantage": "group(eps=1e-06)"},
        rollout={"max_prompt_length": 20, "max_completion_length": 2048, "group_size": 4},
    )


def test_expansions_of_a_shell_script(tmp_path):
    """Nested defaults, parts of names, outputs of commands; what the script does not say stays and is noted."""
    script = r"""
B=${B:-"/base"}; A=${A:-"${B}/models/Qwen3-0.6B"}
NAME=$(basename "$A" -0.6B)_${A##*/}  # it's a comment
FILES="['$B/a.parquet', '${B%/}/b.parquet']"
N=(1 2 3); SIZE=$(((8 + 8) / 4))
if [ -z "$1" ]; then GPUS=2; fi
cat <<END
don't read this
END
srun --nodes=2 python -m verl.trainer.main_ppo actor_rollout_ref.model.path="$A" trainer.experiment_name=$NAME \
    data.train_files="$FILES" trainer.project_name=${2:-mine} trainer.default_local_dir=$B/$(date +%s)/$3 \
    trainer.n_gpus_per_node=$GPUS trainer.total_training_steps=${N[1]} \
    actor_rollout_ref.rollout.n=$SIZE "$@" 2>&1 | tee log
"""
    config, text = migrate(written(tmp_path, "run.sh", script))
    expect(
        config,
        _={"total_steps": 2, "output_dir": "/base/$(date +%s)/$3"},
        model={"path": "/base/models/Qwen3-0.6B"},
        rollout={"group_size": 4},
        data={"sources": tuple({"path": f"/base/{name}.parquet", "split": "train"} for name in "ab")},
    )
    flat = " ".join(text.split())
    assert "does not say what $(date +%s), $3 is" in flat and "Qwen3_Qwen3-0.6B" in flat and '"mine"' in flat


def test_sums_of_a_shell_script_are_rounded_towards_zero():
    """As bash has it, where the quotient of Python is -4 and its rest 1."""
    (words,) = commands("echo $((-7 / 2)) $((7 / -2)) $((-7 / -2)) $((-7 % 2)) $((7 % -2)) $((1 / 0))", "run.sh")
    assert words[1:] == ["-3", "-3", "3", "-1", "1", "$((1 / 0))"]


def test_the_folder_of_a_shell_script(tmp_path):
    """Scripts find what is beside them by their own path."""
    script = r"""
ROOT=$(cd -- "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null 2>&1 && pwd)
HERE="$(cd $(dirname $0); pwd)"
TOP=$(cd "$(git rev-parse --show-toplevel)" && pwd)
python -m verl.trainer.main_ppo actor_rollout_ref.model.path=$ROOT/m data.train_files=$HERE/a.parquet \
    trainer.default_local_dir=$TOP/out trainer.experiment_name=$(basename $0 .sh) trainer.total_training_steps=2
"""
    (tmp_path / "scripts").mkdir()
    config, text = migrate(written(tmp_path / "scripts", "run.sh", script))
    expect(config, model={"path": f"{tmp_path}/m"}, data={"path": f"{tmp_path}/scripts/a.parquet"})
    flat = " ".join(text.split())
    assert "does not say what $(cd" in flat and "does not say what $(dirname" not in flat


def test_a_group_of_one_in_verl_becomes_two(tmp_path):
    """It has a valid equivalent neither as a group nor as PPO, which leaving the estimator out would mean."""
    script = (
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=org/m "
        "data.train_files=a.parquet trainer.total_training_steps=2 actor_rollout_ref.rollout.n=1\n"
    )
    config, text = migrate(written(tmp_path, "run.sh", script))
    expect(config, algorithm={"name": "grpo", "advantage": "group(eps=1e-06)"}, rollout={"group_size": 2})
    assert "rollout.n is 1, of which verl's grpo takes the reward itself" in " ".join(text.split())


def test_two_keys_with_a_sum_that_the_script_does_not_tell(tmp_path):
    """Both are left out and named, with the sum as it is written."""
    script = """
TOKENS=$(((1024 + 512) / SP))
python -m verl.trainer.main_ppo actor_rollout_ref.model.path=org/m data.train_files=a.parquet \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${TOKENS} \\
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=${TOKENS} trainer.total_training_steps=2
"""
    config, text = migrate(written(tmp_path, "run.sh", script))
    assert config.total_steps == 2
    for key in ("actor.ppo_max_token_len_per_gpu", "ref.log_prob_max_token_len_per_gpu"):
        assert f"actor_rollout_ref.{key} = '$(((1024 + 512) / SP))' is left out:" in " ".join(text.split())


SCRIPT = """
from dataclasses import dataclass, field
from trl import DPOConfig, DPOTrainer, SFTTrainer

@dataclass
class Arguments:
    model: str = "Qwen/Qwen3-0.6B"
    rate: float = field(default=3e-6)

arguments = HfArgumentParser(Arguments).parse_args_into_dataclasses()[0]
train, test = load_dataset("json", split=["train", "test"], data_files={"train": "a.jsonl", "test": "b.jsonl"})

def pairs(row):
    return {"prompt": TEMPLATE.format(row["q"]), "chosen": row["a"], "rejected": row["b"]}

TEMPLATE = "Q: {}"
train = train.map(pairs)
config = DPOConfig(f"out/{arguments.model.split('/')[-1]}", learning_rate=arguments.rate, max_steps=4 * 2)
config.beta = 0.3
DPOTrainer(arguments.model, None, config, None, train, peft_config=None).train()
"""


def test_a_script_is_read_without_running_it(tmp_path):
    """Defaults of its parser, f-strings, later assignments, arguments by position, and the function of its rows."""
    config, text = migrate(written(tmp_path, "dpo.py", SCRIPT))
    expect(
        config,
        _={"output_dir": "out/Qwen3-0.6B", "total_steps": 8},
        model={"path": "Qwen/Qwen3-0.6B"},
        optimizer={"learning_rate": 3e-6},
        algorithm={"beta": 0.3, "loss": "dpo"},
        lora={"rank": 0},
        data={"path": "a.jsonl", "format": f"{tmp_path}/dpo_functions.py:pairs"},
    )
    assert "as its parser has them by default: model, rate" in text
    row = {"q": "1", "a": "2", "b": "3"}
    assert resolve(config.data.format, {})(row) == {"prompt": "Q: 1", "chosen": "2", "rejected": "3"}


def test_data_on_the_disk(tmp_path):
    """What save_to_disk wrote, whose rows are counted, and files that Dataset reads."""
    rows = datasets.Dataset.from_list([{"text": "a"}] * 12)
    datasets.DatasetDict({"train": rows, "test": rows.select(range(2))}).save_to_disk("saved")
    config, text = of_split(tmp_path, 'ds = load_from_disk("saved")')
    expect(config, data={"path": "saved", "split": "train", "eval_split": "test"})
    assert "Look at this first" in text and "is known only when" not in text
    config, _ = migrate(written(tmp_path, "s.json", {"dataset_name": "saved", "num_train_epochs": 2}), trainer="sft")
    assert config.total_steps == 4  # 2 epochs of 12 rows, 8 of them a step
    read = 'Dataset.from_json("a.jsonl")'
    config, _ = of_split(tmp_path, "", read, "None")
    expect(config, data={"path": "a.jsonl"})


SPLIT = """
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ROWS
args = SFTConfig(output_dir="o", max_steps=9, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True)
SFTTrainer(model="Qwen/Qwen3-0.6B", args=args, train_dataset=TRAIN, eval_dataset=TEST)
"""


def of_split(tmp_path, rows, train='ds["train"]', test='ds["test"]'):
    script = SPLIT.replace("ROWS", rows).replace("TRAIN", train).replace("TEST", test)
    config, text = migrate(written(tmp_path, "split.py", script))
    return config, " ".join(text.split())


@pytest.mark.parametrize(
    ("rows", "share", "split"),
    [
        ('ds = load_dataset("d", split="train").train_test_split(test_size=0.1)', 0.1, "train"),
        ('ds = load_dataset("d")["some"].shuffle(seed=1)\nds = ds.train_test_split(0.2, seed=1)', 0.2, "some"),
        ('ds = load_dataset("d", split="train").train_test_split(train_size=0.9)', 0.1, "train"),
        ('ds = load_dataset("d", split="train").train_test_split()', 0.25, "train"),
        (
            'ds = load_dataset("d", split="train").train_test_split(test_size=0.5)\n'
            'ds = ds["train"].train_test_split(test_size=0.5)',
            0.75,
            "train",
        ),
    ],
)
def test_rows_that_a_script_holds_out(tmp_path, rows, share, split):
    config, text = of_split(tmp_path, rows)
    expect(
        config,
        eval={"fraction": share, "every": 3},
        data={"path": "d", "split": split, "eval_split": None, "eval_path": None},
    )
    assert "train_test_split" not in text.partition("import")[0]  # nothing to look at


def test_rows_that_a_script_holds_out_under_names_of_their_own(tmp_path):
    rows = 'ds = load_dataset("d").train_test_split(test_size=0.1)\nlearn, test = ds["train"], ds["test"]'
    config, _ = of_split(tmp_path, rows, "learn", "test")
    expect(config, eval={"fraction": 0.1}, data={"path": "d", "eval_split": None})
    config, _ = of_split(tmp_path, f"{rows}\nhalves = test.train_test_split(test_size=0.5)", "learn", 'halves["train"]')
    expect(config, eval={"fraction": 0.1}, data={"path": "d", "eval_split": None})
    config, _ = of_split(tmp_path, "ds = make().train_test_split(test_size=0.1)")
    expect(config, eval={"fraction": 0.1}, data={"path": "DATA", "eval_split": None})


@pytest.mark.parametrize("size", ["test_size=200", "test_size=many()", "200, shuffle=False"])
def test_rows_held_out_by_their_number_are_noted(tmp_path, size):
    config, text = of_split(tmp_path, f'ds = load_dataset("d", split="train").train_test_split({size})')
    expect(config, eval={"fraction": 0.0, "every": -1}, data={"eval_split": None}, checkpoint={"best": None})
    assert f"- train_test_split({size}) holds out rows that are no share here" in text.partition("import")[0]


def test_a_part_of_the_rows_and_other_data_to_evaluate_on(tmp_path):
    part = 'ds = load_dataset("d", split="train").train_test_split(test_size=0.1)'
    config, text = of_split(tmp_path, part, 'ds["test"]', "None")
    expect(config, eval={"fraction": 0.0}, data={"path": "d", "split": "train"})
    assert "train_dataset: the script changes its rows, which is not done here: train_test_split(test_size=0.1)" in text
    config, text = of_split(tmp_path, part, test='load_dataset("e", split="val")')
    expect(config, eval={"fraction": 0.0}, data={"eval_path": "e", "eval_split": "val"})
    assert "train_test_split is not done: all rows are trained on, and e is evaluated on" in text
    both = 'ds = load_dataset("d")\npart = ds["train"].train_test_split(test_size=0.1)'
    for train, test in (('part["train"]', 'ds["test"]'), ('part["train"]', 'ds["test"].train_test_split(0.5)["test"]')):
        config, text = of_split(tmp_path, both, train, test)
        expect(config, eval={"fraction": 0.0, "every": 3}, data={"path": "d", "eval_path": None, "eval_split": "test"})
        assert "is not done: all rows are trained on, and the split test of d is evaluated on" in text


def test_held_out_rows_are_not_counted_in_an_epoch(tmp_path):
    rows = 'ds = load_dataset("d", split="train").train_test_split(test_size=0.5)'
    script = SPLIT.replace("ROWS", rows).replace("TRAIN", 'ds["train"]').replace("TEST", 'ds["test"]')
    script = script.replace("max_steps=9", "num_train_epochs=1")
    config, _ = migrate(written(tmp_path, "split.py", script), rows=160)
    assert config.total_steps == 80 // config.batch.prompts


def test_the_command_in_the_text_of_a_script_says_its_arguments(tmp_path):
    script = r"""'''
# trains well
accelerate launch \
    sft.py \
    --model_name_or_path Qwen/Qwen3-0.6B --dataset_name org/rows \
    --learning_rate 2.0e-5 --max_steps 7
'''
script_args, training_args, model_args = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
data = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
SFTTrainer(model=model_args.model_name_or_path, args=training_args, train_dataset=data[script_args.dataset_train_split])
"""
    config, text = migrate(written(tmp_path, "sft.py", script))
    expect(config, _={"total_steps": 7}, model={"path": "Qwen/Qwen3-0.6B"}, data={"path": "org/rows", "name": None})
    assert "those of the first command in its text" in text and "known only when" not in text


@pytest.mark.parametrize("name", ["axolotl_dpo.yaml", "axolotl_grpo.yaml", "trl_sft.json", "verl_ppo.yaml"])
def test_no_value_stops_a_migration(name):
    """Each key in turn has a value of another kind: it is named, and the rest is migrated. What rl is decides all."""
    tree = yaml.safe_load((FILES / name).read_text(encoding="utf-8"))

    def leaves(node):
        for key, value in node.items():
            yield from leaves(value) if isinstance(value, dict) else [(node, key)]

    for node, key in [leaf for leaf in leaves(tree) if leaf[1] != "rl"]:
        kept, node[key] = node[key], "junk"
        Path("odd.yaml").write_text(yaml.safe_dump(tree))
        assert key in migrate("odd.yaml", trainer="sft" if "sft" in name else "", output="config.py")[1]
        node[key] = kept


def test_values_on_command_lines():
    texts = ("1e-6", "5.0e-7", "None", "true", "3", "[1, 2]", "cosine", "a: b: c")
    assert [parsed(text) for text in texts] == [1e-6, 5e-7, None, True, 3, [1, 2], "cosine", "a: b: c"]


# Evaluation, callbacks, the hub.


def test_evaluations_callbacks_and_the_hub(tmp_path):
    said = {"output_dir": "o", "max_steps": 50, "num_generations": 4, "eval_strategy": "steps", "eval_steps": 10}
    trl, _ = migrate(
        written(tmp_path, "a.json", {**said, "push_to_hub": True, "hub_model_id": "me/mine", "hub_private_repo": True}),
        trainer="grpo",
        devices=1,
    )
    expect(trl, eval={"every": 10, "at_start": False}, export={"push_to_hub": "me/mine", "private": True})
    trl, text = migrate(
        written(tmp_path, "b.json", {**said, "eval_on_start": True, "push_to_hub": True}), trainer="grpo", devices=1
    )
    expect(trl, eval={"at_start": True}, export={"push_to_hub": "o"})  # of the account of the token, as there

    verl = (
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m trainer.total_training_steps=2 "
        "actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=grpo data.val_files='[a.parquet,b.parquet]' "
        "trainer.val_before_train=False trainer.test_freq=1\n"
    )
    config, _ = migrate(written(tmp_path, "run.sh", verl))
    expect(
        config,
        eval={
            "every": 1,
            "at_start": False,
            "at_end": True,
            "temperature": 0.0,
            "sets": (
                {"set": "val", "path": "a.parquet", "split": "train"},
                {"set": "val", "path": "b.parquet", "split": "train"},
            ),
        },
    )

    yaml = (
        "base_model: m\nlearning_rate: 1e-5\nmax_steps: 10\ndatasets: [{path: d}]\nval_set_size: 0.1\n"
        "early_stopping_patience: 2\nhub_model_id: me/mine\n"
    )
    config, text = migrate(written(tmp_path, "a.yml", yaml + "rl: dpo\n"), devices=1)
    assert config.callbacks == () and "set eval.every, and callbacks to" in " ".join(text.split())
    config, _ = migrate(written(tmp_path, "b.yml", yaml + "rl: dpo\neval_steps: 5\n"), devices=1)
    stopping = "early_stopping(metric='eval/loss', mode='min', patience=2)"
    expect(config, _={"callbacks": (stopping,)}, export={"push_to_hub": "me/mine", "private": True})


# Trackers.


def test_trackers_projects_and_names_of_runs(tmp_path):
    """Where metrics go, under which project, and as which run: of TRL, its scripts' variables, verl and axolotl."""

    def logging(file, **said):
        config, text = migrate(file, devices=1, **said)
        return (config.logging.backends[2:], config.logging.project, config.logging.run_name), text

    said = {"output_dir": "o", "max_steps": 5, "num_generations": 4}
    trl = {**said, "report_to": ["wandb", "comet_ml"], "run_name": "first", "project": "mine"}
    found, text = logging(written(tmp_path, "a.json", trl), trainer="grpo")
    assert found == (("wandb",), "mine", "first")
    assert "there is no logging backend comet_ml" in " ".join(text.split())
    found, text = logging(written(tmp_path, "b.json", {**said, "report_to": "all"}), trainer="grpo")
    assert found == ((), "jaxrl_llm", None) and "name the trackers in logging.backends" in " ".join(text.split())

    shell = (
        "export WANDB_PROJECT='maths'\n# export WANDB_NAME=old\nTRACKIO_PROJECT=maths WANDB_MODE=offline "
        "trl dpo --model_name_or_path m --dataset_name d --max_steps 3 --report_to wandb trackio --output_dir o\n"
    )
    found, text = logging(written(tmp_path, "run.sh", shell))
    assert found == (("wandb", "trackio"), "maths", None)
    assert "WANDB_MODE = 'offline': where a tracker keeps its runs" in " ".join(text.replace("#", "").split())
    script = (
        "import os\nfrom trl import DPOConfig\nos.environ['WANDB_PROJECT'] = 'one'\n"
        'os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", "two")\n'
        "args = DPOConfig(output_dir='o', max_steps=3, report_to=['wandb', 'mlflow'], run_name='r')\n"
    )
    found, text = logging(written(tmp_path, "run.py", script))
    assert found == (("wandb", "mlflow"), "one", "r")
    assert "MLFLOW_EXPERIMENT_NAME = two: a run has one name" in " ".join(text.split())

    verl = (
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m trainer.total_training_steps=2 "
        "actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=grpo trainer.experiment_name=e "
    )
    found, _ = logging(written(tmp_path, "verl.sh", verl + 'trainer.logger=\'["console","file","swanlab"]\'\n'))
    assert found == (("swanlab",), "verl_examples", "e")
    assert logging(written(tmp_path, "none.sh", verl + "trainer.logger=console\n"))[0] == ((), "jaxrl_llm", None)

    yaml = "base_model: m\nlearning_rate: 1e-5\nmax_steps: 10\ndatasets: [{path: d}]\nrl: dpo\n"
    more = "wandb_project: w\nwandb_name: n\nwandb_entity: team\nuse_tensorboard: true\nmlflow_experiment_name: x\n"
    found, text = logging(written(tmp_path, "a.yml", yaml + more))
    assert found == (("wandb", "mlflow", "tensorboard"), "w", "n")
    flat = " ".join(text.replace("#", "").split())
    assert "wandb_entity = 'team': where and how a tracker keeps" in flat and "without effect" not in flat
    assert 'config.logging.run_name = "n" wandb_name' in flat
    found, text = logging(written(tmp_path, "b.yml", yaml + "use_comet: true\ncomet_project_name: c\n"))
    assert found == ((), "c", None) and "there is no logging backend comet" in " ".join(text.split())


# The examples of the libraries' pages.

PAGES = FILES / "pages"
AXOLOTL = list(yaml.safe_load_all((PAGES / "axolotl.yaml").read_text(encoding="utf-8")))
BASE = {"base_model": "m", "learning_rate": 1e-4, "micro_batch_size": 8, "max_steps": 2, "sequence_len": 128}
TINY = {
    "total_steps": 2,
    "model.path": "embedded:sort",
    "model.dtype": "float32",
    "model.param_dtype": "float32",
    "data.max_length": 128,
    "rollout.max_prompt_length": 64,
    "rollout.max_completion_length": 8,
    "rollout.group_size": 2,
    "batch.prompts": 4,
    "batch.minibatches": 1,
    "batch.microbatch_rows": 0,
    "batch.logps_microbatch_rows": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.warmup_ratio": 0.0,
    "eval.every": -1,
    "checkpoint.every": 0,
    "logging.backends": ("jsonl",),
}


def rows_file(**columns):
    """A file of rows of the sorting task, with other columns as given; a column of None is left out."""
    known = {"prompt": "sort:21=", "question": "sort:21=", "answer": "12", "chosen": "12", "rejected": "21", **columns}
    rows = [{key: value for key, value in known.items() if value is not None}] * 8
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "rows.jsonl"


def trains(config, **settings):
    """Two steps of a configuration, with the embedded model and small sizes."""
    for key, value in (TINY | {key.replace("__", "."): value for key, value in settings.items()}).items():
        assign(config, key, value)
    return [line["step"] for line in jaxrl_llm.train(config).metrics] == [1, 2]


def said(role, text):
    """A message."""
    return {"role": role, "content": text}


def answers(**columns):
    """Columns of two answers, each a conversation."""
    return {name: [said("user", "q"), said("assistant", text)] for name, text in columns.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "columns", "keys"),
    [
        (0, {"system": "S"}, {}),
        (
            1,
            {"messages": [said("user", "q")], "chosen": said("assistant", "a"), "rejected": said("assistant", "b")},
            {},
        ),
        (2, {"system": "S"}, {}),
        (3, {}, {"datasets": [{"type": "chatml.prompt_pairs"}]}),
        (4, answers(chosen="12", rejected="21"), {}),
        (5, {"completion": "12", "label": True, "chosen": None, "rejected": None}, {}),
        (6, {"completion": "12", "label": True, "chosen": None, "rejected": None}, {}),
        (7, {}, {"trl": {"reward_funcs": ["rewards.rand_reward_func"]}}),
        (8, {}, {}),
        (10, {}, {"rl": "grpo", "datasets": [{}], "trl": {"reward_funcs": ["exact_match"]}}),
        (11, {"answers": "12"}, {}),
        (12, {}, {"datasets": [{}], "trl": {"reward_funcs": ["exact_match", "target_length"]}}),
        (13, {}, {"datasets": [{}], "trl": {"reward_funcs": ["exact_match"]}}),
        (14, {}, {"datasets": [{"type": "chatml.prompt_pairs"}]}),
        (15, {"system": "S"}, {"rl": "dpo"}),
        (
            16,
            {},
            {"rl": "dpo", "adapter": "lora", "lora_target_linear": True, "datasets": [{"type": "chatml.prompt_pairs"}]},
        ),
    ],
)
def test_examples_of_axolotl_train(number, columns, keys, monkeypatch):
    shutil.copy(PAGES / "rewards.py", "rewards.py")
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    tree = {**BASE, **AXOLOTL[number], **keys}
    if "trl" in keys:
        tree["trl"] = {**AXOLOTL[number].get("trl", {}), **keys["trl"]}
    sets = tree.get("datasets") or [{}]
    tree["datasets"] = [{key: value for key, value in one.items() if key != "name"} for one in sets]
    for one in tree["datasets"]:
        one |= {"data_files": [rows_file(**columns)]} if "data_files" in one else {"path": rows_file(**columns)}
    Path("page.yaml").write_text(yaml.safe_dump(tree))
    config, _ = migrate("page.yaml")
    assert trains(config, mesh__context=1, algorithm__importance_correction="none")


def test_scripts_of_trl(monkeypatch):
    """The quick start and the script for 72B on a cluster, with the defaults of their page."""
    config, text = migrate(PAGES / "train_grpo.py", version="0.16", devices=8, output="quick.py")
    expect(
        config,
        _={"output_dir": "Qwen2-0.5B-GRPO", "total_steps": 100},
        model={"path": "Qwen/Qwen2-0.5B-Instruct"},
        data={"path": "trl-lib/tldr", "split": "train"},
        rollout={"group_size": 8, "temperature": 0.9, "max_completion_length": 256},
        rewards={"functions": ("quick_functions.py:reward_len",)},
        algorithm={"beta": 0.04, "aggregation": "token"},
        batch={"prompts": 8},
    )
    assert "add --rows=N" in text and "trl" not in Path("quick_functions.py").read_text()
    assert load_rewards("quick_functions.py:reward_len")(["p"], ["x" * 18], [[1]], {}).tolist() == [[-2.0]]
    config, text = migrate(PAGES / "cluster/job.sh", version="0.16", rows=116722, output="job.py")
    expect(
        config,
        model={"path": "Qwen/Qwen2.5-72B", "dtype": "bfloat16", "remat": "block"},
        rewards={"functions": ("job_functions.py:reward_num_unique_chars",)},
        batch={"prompts": 16},  # 4 completions x 32 devices / 8
    )
    assert "nodelist" not in text and "vllm_server_host = ''" in text


def test_a_recipe_of_harmony_with_arguments_by_position_and_by_default():
    config, _ = migrate(PAGES / "harmony_grpo.py")
    expect(
        config,
        model={"path": "Qwen/Qwen3-0.6B"},
        optimizer={"learning_rate": 2e-6},
        algorithm={"beta": 0.02, "scale_rewards": "none"},
        rollout={"group_size": 8},
        mesh={"tensor": -1, "data": 1},
    )


def test_files_of_verl(tmp_path):
    config, text = migrate(PAGES / "verl_ppo.yaml", rows=7473, version="0.3")
    expect(
        config,
        batch={"prompts": 1024, "minibatches": 4},
        algorithm={"epsilon_low": 0.2, "epsilon_high": 0.2},
        rollout={
            "max_prompt_length": 512,
            "max_completion_length": 512,
            "weights_dtype": "bfloat16",
            "mesh": "tensor=2",
        },
        eval={"every": 2},
        _={"total_steps": 30 * (7473 // 1024)},
    )
    assert "lr_decay_steps" not in text
    tree = yaml.safe_load((PAGES / "verl_sft.yaml").read_text())
    tree["data"] = {"train_files": rows_file(), "train_batch_size": 4, "max_length": 64, "response_key": "answer"}
    config, _ = migrate(written(tmp_path, "sft.yaml", yaml.safe_dump(tree)), output="sft.py")
    expect(config, _={"total_steps": 8}, data={"format": "sft_functions.py:columns"}, optimizer={"schedule": "cosine"})
    with pytest.raises(ConfigError, match="jaxrl_llm evaluate --responses=/tmp/math_Qwen2"):
        migrate(PAGES / "verl_evaluation.yaml")


def test_the_configuration_that_a_command_of_verl_names(tmp_path):
    """Its keys come first, overrides on top; it is found beside the script, and what it builds on is named."""
    (tmp_path / "config").mkdir()
    tree = {
        "hydra": {"searchpath": ["file://verl"]},
        "defaults": ["ppo_trainer", "mine", "_self_"],
        "data": {"max_prompt_length": 100, "max_response_length": 50},
        "actor_rollout_ref": {"rollout": {"multi_turn": {"enable": True, "max_assistant_turns": 5}}},
    }
    written(tmp_path, "config/turns.yaml", tree)
    script = (
        f"{VERL}algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 data.max_response_length=60 "
        "--config-path=$(pwd)/config --config-name turns\n"
    )
    config, text = migrate(written(tmp_path, "run.sh", script), output=tmp_path / "config.py")
    assert (config.rollout.max_prompt_length, config.rollout.max_completion_length) == (100, 60)
    assert config.environment.max_turns == 5
    assert "turns.yaml builds on mine, which is not read" in " ".join(text.split()) and "config-name" not in text
    _, text = migrate(written(tmp_path, "run.sh", script.replace("name turns", "name other")))
    assert "--config-name = 'other' has no equivalent" in text


def test_a_mixture_of_verl_is_rewarded_by_data_source(tmp_path):
    script = (
        f"{VERL}algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 data.train_files=\"['gsm8k/a','math/a']\"\n"
    )
    config, _ = migrate(written(tmp_path, "run.sh", script), output="mixed.py")
    assert config.rewards.functions == ("mixed_functions.py:by_data_source",)
    columns = {"answer": ["4", "4"], "data_source": ["openai/gsm8k", "math"]}
    got = load_rewards(config.rewards.functions[0])(["p"] * 2, ["#### 4", "\\boxed{4}"], [[1]] * 2, columns)
    assert got.tolist() == [[1.0], [1.0]]
    _, text = migrate(tmp_path / "run.sh", output=tmp_path / f"{'long' * 20}.py")  # of no key, and of several lines
    assert "\n    config.rewards.functions = (\n" in text and "    # \n" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "version", "rewards"),
    [
        ("train_grpo.py", "0.16", {}),
        ("cluster/job.sh", "0.16", {}),
        ("harmony_grpo.py", "", {"rewards__functions": ("exact_match",)}),
        ("verl_ppo.yaml", "0.3", {"rewards__functions": ("exact_match",)}),
        ("verl_sft.yaml", "", {}),
    ],
)
def test_examples_of_the_other_pages_train(name, version, rewards):
    config, _ = migrate(PAGES / name, rows=1000, output="page.py", version=version)
    data = {"data__path": rows_file(), "data__sources": (), "data__name": None, "data__eval_path": None}
    mesh = {"mesh__fsdp": 1, "mesh__tensor": 1, "mesh__data": -1, "rollout__mesh": "auto"}
    assert trains(config, **data, **mesh, **rewards, rollout__weights_dtype="auto", critic__path=None)


@pytest.mark.slow
def test_a_migrated_run_trains(tmp_path, monkeypatch):
    """TRL's arguments, with the model, data and sizes of the embedded one, train two steps."""
    said = {
        "model_name_or_path": "embedded:sort",
        "dataset_name": "task:sort",
        "reward_funcs": ["exact_match"],
        "output_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_prompt_length": 16,
        "beta": 0.1,
        "gradient_accumulation_steps": 2,
        "epsilon_high": 0.28,
        "learning_rate": 1e-4,
    }
    _, text = migrate(written(tmp_path, "grpo.json", said), trainer="grpo", devices=1)
    result = jaxrl_llm.train(load_config_file(str(written(tmp_path, "config.py", text))))
    assert [line["step"] for line in result.metrics] == [1, 2]
    assert result.metrics[-1]["kl"] >= 0
    assert default().batch.prompts != 4
    assert (tmp_path / "run/hf/model.safetensors").is_file()


def test_what_a_model_of_trl_is_loaded_with(tmp_path):
    """Its revision and dtype are taken; the rest, and float16, are noted; a token is not written."""
    made = {"revision": "v2", "dtype": "bfloat16", "attn_implementation": "sdpa", "device_map": "auto"}
    made |= {"token": "hf_inner"}
    said = {"model_init_kwargs": made, "fp16": True, "adafactor": True, "hub_token": "hf_secret", "max_steps": 5}
    file = written(tmp_path, "config.yaml", yaml.safe_dump({"output_dir": "o", "model_name_or_path": "m"} | said))
    config, text = migrate(file, trainer="grpo", devices=1)
    expect(config, model={"revision": "v2", "param_dtype": "bfloat16", "dtype": "bfloat16"})
    flat = " ".join(text.split())
    assert "attn_implementation = 'sdpa' is of torch" in flat and "device_map = 'auto' has no equivalent" in flat
    assert "fp16: bfloat16 is written" in flat and "hf_secret" not in text and "hub_token = ***" in flat
    assert "hf_inner" not in text and "token = *** has no equivalent" in flat
    loaded = 'AutoModelForCausalLM.from_pretrained("m", token="hf_outer", use_auth_token="hf_older")'
    made = f'GRPOTrainer(model={loaded}, args=GRPOConfig(output_dir="o", pad_token="<p>"), train_dataset="d")'
    _, text = migrate(written(tmp_path, "train.py", f"from trl import GRPOConfig, GRPOTrainer\n{made}.train()"))
    assert "hf_o" not in text and "# - token = ***: " in text and "pad_token = '<p>'" in text
    assert 'config.optimizer.name = "adafactor" # adafactor' in flat
