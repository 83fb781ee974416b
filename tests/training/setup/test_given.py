"""What `train` is given in Python: taken as it is, or refused by name; and a chain of runs in memory."""

import dataclasses
import itertools
import json
from dataclasses import dataclass, field

import datasets
import jax
import numpy as np
import optax
import pytest
import transformers

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.adapters.lora import has_adapters, parse_targets
from jaxrl_llm.train import Result
from jaxrl_llm.training.setup.given import listed, lora_settings, take

ROWS = [{"prompt": f"sort:{n}=", "answer": "".join(sorted(str(n)))} for n in range(100, 108)]
OBJECTS = dict.fromkeys(
    ("train_dataset", "eval_dataset", "rewards", "environment", "model", "tokenizer", "compute_metrics")
) | {"tools": ()}


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


def one(completions, **columns):
    return [1.0] * len(completions)


def test_none_one_or_several():
    """Tools and callbacks, which a program may hand on as None."""
    assert [listed(x) for x in (None, one, [one], (one, length), [])] == [[], [one], [one], [one, length], []]


@dataclass
class LoraConfig:
    """As PEFT's, as far as it is read."""

    r: int = 8
    target_modules: set[str] | str | None = None
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    task_type: str | None = "CAUSAL_LM"


@pytest.fixture
def config(tmp_path):
    config = jaxrl_llm.default_config()
    config.output_dir, config.total_steps, config.eval.every = str(tmp_path / "run"), 1, -1
    config.rollout.max_completion_length, config.rollout.group_size = 4, 2
    config.rollout.max_prompt_length, config.batch.prompts = 16, 2
    config.checkpoint.every, config.logging.backends = 0, ("jsonl",)
    return config


@pytest.mark.parametrize(
    ("fields", "quantize"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"load_in_4bit": True}, "int4"),
        ({"load_in_8bit": True}, "int8"),
    ],
)
def test_a_quantisation_of_transformers(config, fields, quantize):
    for given in (fields, transformers.BitsAndBytesConfig(**fields)):
        assert take(config, {}, quantization_config=given, **OBJECTS)[0].model.quantize == quantize
    assert config.model.quantize == "none"


def test_a_quantisation_that_is_none(config):
    with pytest.raises(ConfigError, match=r"quantization_config is a transformers .*, but .*: set model.quantize"):
        take(config, {}, quantization_config=transformers.BitsAndBytesConfig(), **OBJECTS)


def leaves(model):
    return [np.asarray(x) for x in jax.tree.leaves(model.params)]


# --- settings and refusals ---

ALIKE = dict.fromkeys(("layers_to_transform", "exclude_modules", "rank_pattern", "alpha_pattern"), ())


def test_fields_of_lora_config():
    made = lora_settings(LoraConfig(4, {"v_proj", "q_proj"}, 32, 0.1, True))
    assert made == {
        "rank": 4,
        "alpha": 32.0,
        "dropout": 0.1,
        "rslora": True,
        "dora": False,
        "init": "kaiming",
        "targets": ("q_proj", "v_proj"),
        "modules_to_save": (),
        "bias": "none",
        **ALIKE,
    }
    assert lora_settings(LoraConfig(target_modules="all-linear"))["targets"] == ("all-linear",)
    assert lora_settings({"r": 2})["alpha"] == 8.0  # PEFT's default, which is not the one here
    assert lora_settings(LoraConfig(use_dora=True))["dora"] is True
    with pytest.raises(ConfigError, match=r"layer_replication .* no counterpart"):
        lora_settings({"r": 2, "layer_replication": [[0, 2], [1, 3]]})


def test_pefts_own_lora_config():
    peft = pytest.importorskip("peft")
    made = lora_settings(peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert made == {
        "rank": 4,
        "alpha": 16.0,
        "dropout": 0.0,
        "rslora": False,
        "dora": False,
        "init": "kaiming",
        "targets": ("all-linear",),
        "modules_to_save": (),
        "bias": "none",
        **ALIKE,
    }
    for theirs, ours in ((False, "random"), ("pissa_niter_4", "pissa_niter_4"), ("olora", "olora"), (True, "kaiming")):
        assert lora_settings(peft.LoraConfig(init_lora_weights=theirs))["init"] == ours
    assert lora_settings(peft.LoraConfig(modules_to_save=["lm_head"]))["modules_to_save"] == ("lm_head",)
    assert lora_settings(peft.LoraConfig(bias="lora_only"))["bias"] == "lora_only"
    experts = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    assert parse_targets(lora_settings(experts)["targets"]) == ("q", "experts.down_proj")
    with pytest.raises(ConfigError, match=r"target_parameters = .* and no target_modules, .*: give them too, \[\] for"):
        lora_settings(peft.LoraConfig(target_parameters=["experts.gate_up_proj"]))
    single = {"layers_to_transform": [1], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}}
    made = lora_settings(peft.LoraConfig(**single, exclude_modules=["down_proj"]))
    assert {name: made[name] for name in ALIKE} == {
        "layers_to_transform": (1,),
        "exclude_modules": ("down_proj",),
        "rank_pattern": ("q_proj=2",),
        "alpha_pattern": ("layers.1.mlp.up_proj=3",),
    }
    for changes in ({"exclude_modules": ".*down.*"}, {"layers_to_transform": [1], "layers_pattern": "blocks"}):
        with pytest.raises(ConfigError, match="here modules are excluded by a list of the ends of their names"):
            lora_settings(peft.LoraConfig(**changes))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ref_model": "x"}, "ref_model: the reference is"),
        ({"reward": one}, "the closest is rewards"),
        (
            {"dataset_text_field": "body"},
            r"no argument dataset_text_field: .* data.format=\"completion\(field='COLUMN'",
        ),
        ({"formatting_func": one}, r"no argument formatting_func: give the rows that it makes, train_dataset="),
        ({"teacher": "a/b"}, r"no argument teacher: settings are those of its first argument, config.teacher has its"),
        ({"resume_from_checkpoint": True}, r"no argument resume_from_checkpoint: .* config\.checkpoint\.resume = "),
        ({"learning_rate": 1e-4}, r"settings are those of its first argument, config\.optimizer\.learning_rate = "),
        ({"reward_funcs": one, "rewards": one}, "reward_funcs and rewards, which are one argument"),
        ({"model": 3}, "model is 3, but it takes"),
        ({"tokenizer": 3}, "tokenizer .processing_class. is 3"),
        ({"processing_class": object()}, "tokenizer .processing_class. is .*object"),
        ({"optimizers": "adam"}, "optimizers is 'adam'.* optimizer.name"),
        ({"optimizers": (None, 0.1)}, "the schedule of optimizers is 0.1"),
        ({"peft_config": object()}, "lora.rank"),
        ({"compute_metrics": {}}, "compute_metrics is {}"),
        ({"rewards": [one, one], "weights": (1.0,) * 3}, "3 numbers for 2 rewards.functions"),
        ({"rewards": "org/reward-model"}, "model:org/reward-model"),
        ({"rewards": []}, "rewards is empty"),
    ],
)
def test_what_cannot_be_taken_is_named(config, arguments, words):
    config.rewards.weights = arguments.pop("weights", ())
    with pytest.raises(ConfigError, match=words):
        jaxrl_llm.train(config, **{"train_dataset": ROWS, **arguments})


def test_a_configuration_comes_first(config):
    with pytest.raises(ConfigError, match=r"jaxrl_llm\.default_config"):
        jaxrl_llm.train({"total_steps": 1}, ROWS, rewards=one)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"give a model with model=\.\.\."):
        jaxrl_llm.train(jaxrl_llm.load_model("embedded:sort"))


def test_the_callers_configuration_stays_as_it_is(config):
    before = config.to_dict()
    others = {"reward_funcs": [one, [length]], "environment_factory": dict}
    made, given = take(config, others, LoraConfig(4), **OBJECTS)
    assert config.to_dict() == before
    assert made.rewards.functions == ("one", "length")
    assert made.lora.rank == 4
    assert given.rewards == [one, length] and given.environment is dict


def test_a_stream_is_streamed(config):
    """Endless rows do not go into memory, and what needs all of them is refused."""
    rows = datasets.IterableDataset.from_generator(lambda: (row for _ in itertools.count() for row in ROWS))
    for given in (rows, datasets.IterableDatasetDict(train=rows)):
        made, _ = take(config, {}, **{**OBJECTS, "train_dataset": given})
        assert made.data.streaming
    assert not take(config, {}, **{**OBJECTS, "train_dataset": datasets.Dataset.from_list(ROWS)})[0].data.streaming
    for name, value, words in (
        ("num_epochs", 1.0, "none and total_steps to a number"),
        ("eval.fraction", 0.1, "0.0"),
        ("data.group_by_length", True, "false"),
    ):
        made = config.copy_and_resolve_references()
        made.update_from_flattened_dict({name: value})
        told = rf"{name} is {value}, which needs all rows .* is a stream: set it to {words}, or give a datasets.Dataset"
        with pytest.raises(ConfigError, match=told):
            jaxrl_llm.train(made, rows)
    with pytest.raises(ConfigError, match="a buffer of 1000 rows, which no checkpoint holds"):
        jaxrl_llm.train(config, rows.shuffle(seed=0), rewards=one)


# --- runs ---


@pytest.mark.slow
def test_a_run_of_endless_rows(config):
    rows = datasets.IterableDataset.from_generator(lambda: (row for _ in itertools.count() for row in ROWS))
    config.data.shuffle_buffer = 4
    assert jaxrl_llm.train(config, rows, rewards=one).metrics[-1]["reward"] == 1


def test_a_model_in_memory_and_what_else_is_given(config, tiny_run):
    """Everything at once: the next stage of a run, with objects for names."""
    seen = {}

    def metrics(prediction):
        texts, answers = prediction
        seen["columns"], seen["rewards"] = prediction.columns, prediction.rewards
        seen["sharding"] = jax.numpy.ones(3).sharding  # process 0 alone computes this
        return {"eval_hits": sum(text == answer for text, answer in zip(texts, answers, strict=True))}

    config.eval.every, config.eval.samples, config.eval.greedy, config.eval.prompts = 1, 2, False, 4
    config.rewards.weights, before = (1.0, 0.5), leaves(tiny_run.model)
    schedule = optax.linear_schedule(0.5, 0.0, 4)
    result = jaxrl_llm.train(
        config,
        ROWS,
        ROWS,
        reward_funcs=[length, one],
        model=tiny_run,
        processing_class=tiny_run.model.tokenizer,
        optimizers=(optax.sgd(0.0), schedule),
        compute_metrics=metrics,
    )
    last = result.metrics[-1]
    assert last["reward"] == pytest.approx(last["rewards/length/mean"] + 0.5 * last["rewards/one/mean"], abs=1e-5)
    assert last["lr"] == 0.5
    assert 0 <= last["eval/hits"] <= 8
    assert seen["columns"]["answer"][:3] == [ROWS[0]["answer"]] * 2 + [ROWS[1]["answer"]]
    assert seen["rewards"].shape == (8, 2) and isinstance(seen["sharding"], jax.sharding.SingleDeviceSharding)
    for old, kept, new in zip(before, leaves(tiny_run.model), leaves(result.model), strict=True):
        np.testing.assert_array_equal(old, kept)  # the caller's model is the caller's
        np.testing.assert_array_equal(old, new)  # a rate of 0 moved nothing
    given = json.loads((result.output_dir / "given.json").read_text())
    assert given["model"] == "embedded:sort, in memory"
    assert given["optimizer"] == "an optimizer of optax"
    record = json.loads((result.output_dir / "config.json").read_text())
    assert record["rewards"]["functions"] == ["length", "one"]
    assert (result.output_dir / "completions" / "evaluation_00001.parquet").is_file()


@pytest.mark.slow
def test_a_chain_of_adapters_in_memory(config, tmp_path, capsys):
    """Adapters are trained on where no rank is asked for, and merged where new ones are."""
    config.algorithm.name, config.optimizer.learning_rate = "sft", 0.1
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
    first = jaxrl_llm.train(config, rows, model="embedded:sort", peft_config=LoraConfig(2, "all-linear"))
    config.output_dir = str(tmp_path / "on")
    capsys.readouterr()
    on = jaxrl_llm.train(config, rows, model=first.model)
    assert "there are no adapters" not in " ".join(capsys.readouterr().out.split())
    assert on.model.net.config.lora.rank == 2
    assert json.loads((on.output_dir / "config.json").read_text())["lora"]["reference"] == "start"
    before, after = (x.params["layers"]["attention"]["q"] for x in (first.model, on.model))
    np.testing.assert_array_equal(before["kernel"], after["kernel"])
    assert np.abs(after["lora_b"] - before["lora_b"]).max() > 0
    config.output_dir, config.lora.rank, config.total_steps = str(tmp_path / "anew"), 3, 0
    anew = jaxrl_llm.train(config, rows, model=first)
    assert has_adapters(anew.model.params)
    assert anew.model.params["layers"]["attention"]["q"]["lora_a"].shape[-1] == 3
    ids = anew.model.tokenizer([rows[0]["prompt"]])["input_ids"]
    np.testing.assert_allclose(anew.model(ids), first.model(ids), atol=1e-4)


def test_a_reward_model_in_memory(config, tmp_path):
    policy = jaxrl_llm.load_model("embedded:sort")
    with pytest.raises(ConfigError, match="has no score head"):
        jaxrl_llm.train(config, ROWS, rewards=policy)
    scorer = jaxrl_llm.load_model("embedded:sort", head="score")
    config.total_steps = 0
    result = Result(scorer, [{"step": 1}], tmp_path)
    assert take(config, {}, **{**OBJECTS, "rewards": [result, one]})[1].rewards == [scorer, one]
    jaxrl_llm.save_hf(scorer, tmp_path / "rm")
    from jaxrl_llm.training.reward_models import with_reward_models

    here, there, bare = with_reward_models([scorer, f"model:{tmp_path / 'rm'}", str(tmp_path / "rm")])
    batch = [row["prompt"] for row in ROWS[:2]], ["12", "3"]
    assert here(*batch) == there(*batch) == bare(*batch)


def test_a_model_of_transformers(config):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    settings = LlamaConfig(vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                           num_attention_heads=2, pad_token_id=256, num_labels=1)  # fmt: skip
    theirs = LlamaForCausalLM(settings)
    made, given = take(config, {}, **{**OBJECTS, "model": theirs})
    assert made.model.path == "LlamaForCausalLM"
    ids = [[1, 2, 3]]
    with torch.no_grad():
        wanted = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(given.model(ids), wanted, atol=1e-4)
    with pytest.raises(ConfigError, match=r"give the name model:FOLDER"):
        take(config, {}, **{**OBJECTS, "rewards": LlamaForSequenceClassification(settings)})


def test_a_model_of_other_bits_is_refused(config):
    model = jaxrl_llm.load_model("embedded:sort")
    config.model.quantize, config.lora.rank = "nf4", 2
    with pytest.raises(ConfigError, match=r"model\.quantize is nf4, but embedded:sort in memory stores"):
        jaxrl_llm.train(config, ROWS, rewards=one, model=model)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        jaxrl_llm.train(config, ROWS, rewards=one, model=dataclasses.replace(model, tokenizer=None))
