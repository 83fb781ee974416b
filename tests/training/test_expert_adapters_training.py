"""Training adapters of experts: a whole run, what it leaves, a resumed one, and beside quantised matrices."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, assign, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh, path_name
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.tools.plan.shapes import describe
from tests.training.test_router_replay import write_mixture

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
TOKENS = np.arange(97, 109)[None]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A folder of a random mixture of experts with the tokenizer of the embedded model."""
    folder = write_mixture(tmp_path_factory.mktemp("mixture"), **EXPERTS)
    save_hf(load_model(folder, init_key=jax.random.key(0)), folder.with_name("experts"))
    return folder.with_name("experts")


def tiny(root, folder, model, config: str = "grpo_lora", **changes):
    made = load_config_file(f"{root / 'configs' / config}.py:tiny")
    made.output_dir, made.model.path, made.eval.every = str(folder), str(model), -1
    made.logging.backends, made.optimizer.warmup_steps = ("jsonl",), 0
    made.lora.rank, made.lora.targets = 4, ("all-linear", "experts")
    for name, value in changes.items():
        section, leaf = name.split("__")
        made[section][leaf] = value
    return made


def moves(model, start) -> dict[str, float]:
    """The largest number of each B, which starts from 0, and that the rest is as it was."""
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(model.params), start.params)
    leaves = jax.tree_util.tree_leaves_with_path(lora.adapters_of(model.params))
    return {path_name(path): np.abs(x).max() for path, x in leaves if path[-1].key == "lora_b"}


@pytest.mark.slow
def test_a_run_and_what_it_leaves(root, tmp_path, mixture):
    """The sampler has them merged, PEFT's folder is what was trained, the merged model computes the same."""
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", mixture, checkpoint__every=1))
    for line in result.metrics:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    moved = moves(result.model, load_model(mixture))
    assert {name.split("/", 2)[-1] for name in moved} >= {"experts/gate_up/lora_b", "experts/down/lora_b"}
    assert all(most > 1e-4 for most in moved.values()), moved
    adapted, merged = (load_model(result.output_dir / name) for name in ("adapter", "hf"))
    assert adapted.path == str(mixture)
    jax.tree.map(np.testing.assert_array_equal, adapted.params, result.model.params)
    np.testing.assert_allclose(adapted(TOKENS), merged(TOKENS), atol=1e-4)
    exported = jaxrl_llm.export(result.output_dir, tmp_path / "adapter", adapter=True)
    jax.tree.map(np.testing.assert_array_equal, load_model(exported).params, result.model.params)
    state = result.output_dir / "checkpoints/2/state"
    size = sum(file.stat().st_size for file in state.rglob("*") if file.is_file())
    trained = sum(x.nbytes for x in jax.tree.leaves(lora.split(result.model.params)[1]))
    assert size < 3.5 * trained + 100_000  # adapters and their moments


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_resumed_run_equals_the_undisturbed_one(root, tmp_path, mixture, quantize):
    """Also of packed rows, and on from the folder of the first with a reference that has its adapters."""
    changes = {"batch__packing": "true", "checkpoint__every": 1, "model__quantize": quantize}
    whole = jaxrl_llm.train(tiny(root, tmp_path / "run", mixture, **changes))
    again = tiny(root, tmp_path / "again", mixture, **changes)
    again.checkpoint.resume = str(whole.output_dir / "checkpoints/1")
    jax.tree.map(np.testing.assert_array_equal, jaxrl_llm.train(again).model.params, whole.model.params)
    on = tiny(root, tmp_path / "on", mixture, lora__path=str(whole.output_dir / "adapter"), lora__reference="start")
    on.model.quantize = quantize
    on.lora.rank, on.lora.targets, on.optimizer.learning_rate, on.algorithm.beta = 0, ("all-linear",), 0.0, 0.1
    on.total_steps = 1
    result = jaxrl_llm.train(on)
    jax.tree.map(np.testing.assert_array_equal, result.model.params, whole.model.params)
    assert abs(result.metrics[0]["kl"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [
    ("sft", {"model__quantize": "int8"}), ("grpo_lora", {"model__quantize": "nf4"}),
    ("grpo_lora", {"model__quantize_experts": "mxfp4"}),
    ("dpo", {"optimizer__name": "muon"}),
    ("ppo", {}), ("reward_model", {"lora__targets": ("experts",)}),
])  # fmt: skip
def test_every_kind_of_algorithm_trains_them(root, tmp_path, mixture, name, changes):
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", mixture, name, **changes))
    assert all(np.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in result.metrics)
    config = result.model.net.config
    experts = lora.adapters_of(result.model.params)["layers"]["mlp"]["experts"]
    assert all(np.abs(experts[matrix]["lora_b"]).max() > 1e-5 for matrix in ("gate_up", "down"))
    exported = jaxrl_llm.export(result.output_dir, tmp_path / "adapter", adapter=True)
    found = load_model(exported, quantize=config.quantize, quantize_experts=config.quantize_experts)
    jax.tree.map(np.testing.assert_array_equal, found.params, result.model.params)
    if name == "grpo_lora":
        merged = load_model(result.output_dir / "hf")
        np.testing.assert_allclose(found(TOKENS), merged(TOKENS), atol=1e-4)
        for line in result.metrics:
            assert line["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.slow
def test_beside_quantised_ones(root, tmp_path, mixture):
    """A run by the adapters of experts that stay as they were read, what it leaves, and a plan of it, byte for byte."""
    kinds: dict[str, Any] = {"quantize": "int8", "quantize_experts": "mxfp4"}
    config = tiny(root, tmp_path / "run", mixture, "sft", **{f"model__{name}": kind for name, kind in kinds.items()})
    config.total_steps = 1
    result = jaxrl_llm.train(config)
    moved = moves(result.model, load_model(mixture, **kinds))
    assert all(moved[f"layers/mlp/experts/{matrix}/lora_b"] > 1e-5 for matrix in ("gate_up", "down"))
    adapted = load_model(result.output_dir / "adapter", **kinds)
    jax.tree.map(np.testing.assert_array_equal, adapted.params, result.model.params)
    shapes = describe(config, make_mesh(devices=jax.devices()[:1]), "float32", on_cpu=True)
    frozen = lora.split(result.model.params)[0]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes.frozen.params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), frozen
    )


def test_a_plan_counts_them(root, tmp_path, mixture):
    """r (2 D + 3 f) numbers of each expert of each layer, and two moments of each."""
    config = tiny(root, tmp_path, mixture, lora__targets=("experts",))
    shapes = describe(config, make_mesh(devices=jax.devices()[:1]), "float32", on_cpu=True)
    c = shapes.net.config
    trained = 4 * (2 * c.width + 3 * c.expert_ffn) * c.experts * c.layers
    assert sum(x.size for x in jax.tree.leaves(shapes.state.params)) == trained
    assert sum(x.size for x in jax.tree.leaves(shapes.state.opt_state) if x.ndim) == 2 * trained


def test_contradictions_are_refused():
    for changes, message in (
        ({"lora.dora": True}, r"lora.dora is true, but lora.targets names experts.down_proj, and adapters of experts "),
        ({"lora.dropout": 0.1}, r"lora.dropout is 0.1, but lora.targets names experts.down_proj.*: set it to 0, or "),
        ({"lora.reference": "copy"}, r"lora.reference is copy, .*\(model.quantize_experts = 'mxfp4'\)"),
        ({"average.every": 1}, r"average.every is 1, but .*\(model.quantize_experts = 'mxfp4'\), and a mean of"),
        ({"lora.rank": 0, "model.qat": "int4"}, r"model.qat is int4, .* but model.quantize_experts is mxfp4, with whi"),
    ):
        config = default()
        config.lora.rank, config.lora.targets = 2, ("q", "experts.down_proj")
        config.model.quantize_experts = "mxfp4"
        for name, value in changes.items():
            assign(config, name, value)
        with pytest.raises(ConfigError, match=message):
            validate(config)
