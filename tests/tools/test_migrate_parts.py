"""What axolotl and PEFT say of parts: of a model that is trained in part, single modules, turns of conversations, rows
that are there twice."""

import json

import pytest
import yaml

from jaxrl_llm.tools.migrate import migrate

TREE = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-5, "max_steps": 2}
MAPPING = {"role": "from", "content": "value"}
MORE = {"roles_to_train": ["human"], "train_on_eos": "last", "message_field_training": "train"}


@pytest.fixture
def moved(tmp_path):
    """What `migrate` makes of keys that are written as YAML or JSON, or of a script: the configuration and its text."""

    def move(said, name="a.yaml"):
        file = tmp_path / name
        text = said if isinstance(said, str) else json.dumps(said) if name.endswith("json") else yaml.safe_dump(said)
        file.write_text(text)
        config, text = migrate(file, devices=1)
        return config, " ".join(text.split())

    return move


@pytest.mark.parametrize(
    ("said", "options", "noted"),
    [
        ({"roles_to_train": ["assistant"], "train_on_eos": "turn", "chat_template": "tokenizer_default"}, {}, ""),
        ({"message_property_mappings": {"role": "role", "content": "content"}}, {}, ""),
        ({"message_property_mappings": MAPPING}, {"message_property_mappings": MAPPING}, ""),
        ({"message_field_role": "from", "message_field_content": "value"}, {"message_property_mappings": MAPPING}, ""),
        (MORE | {"train_on_eot": "last"}, MORE, ""),
        ({"roles_to_train": None, "train_on_eos": None}, {"roles_to_train": None, "train_on_eos": None}, ""),
        ({"train_on_eot": "all"}, {}, "train_on_eot = all is left out"),
        ({"split_thinking": True, "field_tools": "f"}, {"split_thinking": True, "field_tools": "f"}, ""),
        ({"split_thinking": False, "field_tools": "tools"}, {}, ""),
    ],
)
def test_conversations_of_axolotl(moved, said, options, noted):
    """Their options are those of the format chat_template; without any, rows are read as they are."""
    config, text = moved(TREE | {"datasets": [{"path": "d", "type": "chat_template", **said}]})
    wanted = {"path": "d", **({"type": "chat_template"} if options else {}), **options}
    assert [dict(source) for source in config.data.sources] == [wanted]
    assert ("datasets: " in text) == bool(noted) and noted in text


def test_saves_and_evaluations_of_an_epoch_are_shares_of_the_steps_rounded_up(moved):
    said = TREE | {"max_steps": 36, "num_epochs": 2, "val_set_size": 0.1, "saves_per_epoch": 1, "evals_per_epoch": 4}
    config, _ = moved(said)
    assert (config.checkpoint.every, config.eval.every) == (18, 5)  # ceil(36 / 8), as transformers' Trainer


def test_parts_of_a_model_and_repeated_rows_of_axolotl(moved):
    patterns = ["^lm_head.weight$", "model.embed_tokens.weight$[:32000]", "model.layers.2[0-9]+."]
    more = {"unfrozen_parameters": patterns, "dataset_exact_deduplication": True}
    config, text = moved(TREE | more)
    assert config.model.trainable == (patterns[0], "model.embed_tokens.weight$", patterns[2])
    assert config.data.deduplicate is True
    assert "names rows of a matrix, ['model.embed_tokens.weight$[:32000]']: it is trained whole here" in text
    config, text = moved(TREE | more | {"adapter": "lora", "lora_r": 8, "peft_layers_to_transform": [0, 1]})
    assert config.model.trainable == () and config.lora.layers_to_transform == (0, 1)
    assert "unfrozen_parameters is left out: adapters are trained" in text


def test_adapters_of_single_modules_of_trl(moved):
    ranks, alphas = {"layers.3.mlp.up_proj": 8}, {"q_proj": 2}
    script = (
        "from trl import SFTConfig, SFTTrainer\nfrom peft import LoraConfig\n"
        "args = SFTConfig(output_dir='o', max_steps=9)\n"
        "peft_config = LoraConfig(r=4, layers_to_transform=3, exclude_modules=['o_proj'],\n"
        f"    rank_pattern={ranks}, alpha_pattern={alphas})\n"
        "trainer = SFTTrainer(model='m', args=args, train_dataset=None, peft_config=peft_config)\ntrainer.train()\n"
    )
    lora = moved(script, "train.py")[0].lora
    assert (lora.rank, lora.layers_to_transform, lora.exclude_modules) == (4, (3,), ("o_proj",))
    assert (lora.rank_pattern, lora.alpha_pattern) == (("layers.3.mlp.up_proj=8",), ("q_proj=2",))
    peft = {"r": 4, "exclude_modules": ".*up.*", "layers_to_transform": [1], "layers_pattern": "blocks"}
    said = {"trainer": "sft", "model_name_or_path": "m", "dataset_name": "d", "max_steps": 9, **peft}
    config, text = moved(said, "a.json")
    assert (config.lora.exclude_modules, config.lora.layers_to_transform) == ((), (1,))
    assert "exclude_modules = '.*up.*' is a regular expression of whole names" in text
    assert "layers_pattern is left out" in text


def test_values_that_a_script_formats_and_cannot_have(moved):
    script = (
        "from trl import SFTConfig, SFTTrainer\nmodel, lr, digits = 'a/b', 2e-5, 3\n"
        "args = SFTConfig(output_dir=f'{model.split(\"/\")[-1]}-{lr:.1e}-{7:0{digits}d}', learning_rate=lr,\n"
        "    max_steps=9, run_name=f'{lr:d}', logging_steps=int(float('inf')), seed='{0.x}'.format(1))\n"
        "SFTTrainer(model=model, args=args, train_dataset=None).train()\n"
    )
    config, text = moved(script, "train.py")
    assert (config.output_dir, config.logging.run_name, config.seed) == ("b-2.0e-05-007", None, 42)
    assert "run_name = f'{lr:d}' is known only when the script runs" in text
    assert "logging_steps = int(float('inf')) is known only when the script runs" in text


@pytest.mark.parametrize(
    ("said", "kind", "noted"),
    [
        ({"weight_dtype": "int4", "group_size": 64}, "int4", "qat: int4 has a scale of 64 inputs of a column here"),
        ({"activation_dtype": "int8"}, "int8", "qat.activation_dtype = int8 is left out: the matrices alone"),
        ({"weight_dtype": "nvfp4"}, "none", "weights in nvfp4 are not here, and the result is another model"),
    ],
)
def test_quantisation_aware_training_of_axolotl(moved, said, kind, noted):
    config, text = moved(TREE | {"qat": said})
    assert config.model.qat == kind and noted in text


def test_matmuls_in_fp8(moved):
    """Of samples, whose matmuls are in another type here, with a correction."""
    config, text = moved(TREE | {"fp8": True, "fp8_enable_fsdp_float8_all_gather": True})
    assert (config.model.matmul_dtype, config.algorithm.importance_correction) == ("fp8", "none")
    assert "known key" not in text and moved(TREE | {"fp8": False})[0].model.matmul_dtype == "auto"
    config, text = moved(TREE | {"fp8": True, "rl": "grpo", "trl": {"reward_funcs": ["r.f"], "num_generations": 2}})
    assert (config.model.matmul_dtype, config.algorithm.importance_correction) == ("fp8", "token_truncate")
    assert "fp8: samples are drawn with matmuls in model.dtype here" in text


def test_modules_without_adapters_of_verl(moved):
    model = "actor_rollout_ref.model"
    said = (
        f"python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.total_training_steps=2 {model}.path=m "
    )
    config, _ = moved(f"{said} {model}.lora_rank=8 {model}.exclude_modules=['lm_head','down_proj']", "run.sh")
    assert (config.lora.rank, config.lora.exclude_modules) == (8, ("lm_head", "down_proj"))
    assert moved(f"{said} {model}.exclude_modules=down_proj", "run.sh")[0].lora.exclude_modules == ()


def test_tiles_of_feed_forwards(moved):
    """Tokens of a micro-batch on a device, over the shards: axolotl's, and verl's by rows or by tokens."""
    said = TREE | {"sequence_len": 8192, "micro_batch_size": 2, "tiled_mlp": True, "tiled_mlp_num_shards": 8}
    assert moved(said)[0].model.mlp_tile_tokens == 2048
    assert moved(said | {"tiled_mlp": False})[0].model.mlp_tile_tokens == 0
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    said = (
        f"python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.total_training_steps=2 {model}.path=m "
        f"data.max_prompt_length=1024 data.max_response_length=7168 {model}.tiled_mlp.enabled=True"
    )
    assert moved(f"{said} {actor}.ppo_micro_batch_size_per_gpu=2", "run.sh")[0].model.mlp_tile_tokens == 4096
    dynamic = f"{said} {actor}.use_dynamic_bsz=True {actor}.ppo_max_token_len_per_gpu=24576"
    assert moved(f"{dynamic} {model}.tiled_mlp.num_shards=8", "run.sh")[0].model.mlp_tile_tokens == 3072
