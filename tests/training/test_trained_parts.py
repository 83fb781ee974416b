"""Training parts of a model: gradients, moments and weight decay of these alone, names as in torch, whole runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.commands.serve import merged
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh, path_name
from jaxrl_llm.models import model
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.adapters.peft_patterns import AdapterPatterns
from jaxrl_llm.models.families import llama
from jaxrl_llm.models.files.safetensors import named_as_modules
from jaxrl_llm.models.model import add_adapters, load_model
from jaxrl_llm.models.net import restacked
from jaxrl_llm.models.trained import Trained
from jaxrl_llm.tools.plan.shapes import describe
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import update_spec
from jaxrl_llm.training.update import Frozen, init_state, make_update
from tests.models.conftest import make_oracle
from tests.training.objectives.test_policy_gradient import NET, PARAMS, make_batch

MESH = make_mesh(devices=jax.devices()[:1])
BATCH = jax.tree.map(jnp.asarray, make_batch(rows=8))
PARTS = Trained(("model.layers.1.", "lm_head"), ("model.layers.1.mlp.down",))
PART = PARTS.grouped(NET, llama)


def by_name(net, params):
    """The tensors of a tree by their names, of those parameters that the tree has."""
    leaves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    return {x.name: leaves[x.leaf][x.at] for x in named_as_modules(net, llama) if x.leaf in leaves}


def test_only_the_named_parameters_are_trained():
    """Their gradients are those in the whole model; the others hold no moments and do not decay."""
    config = default()
    config.optimizer.weight_decay, config.optimizer.max_grad_norm = 0.1, 0.0
    objective = objective_of(config, NET)
    batch = objective.prepare(BATCH)
    gradients = by_name(NET, jax.jit(jax.grad(lambda params: objective.loss(params, batch)[0]))(PARAMS))
    params = restacked(PARAMS, NET.config, PART.config)
    before = by_name(PART, params)
    with jax.set_mesh(MESH):
        frozen, trainable = lora.split(params, PART.config.frozen)
        optimizer = make_optimizer(config)
        state = init_state(jax.tree.map(jnp.copy, trainable), optimizer, MESH)
        update = make_update(objective_of(config, PART), optimizer, update_spec(config), MESH)
        program = update.lower(state, BATCH, Frozen(frozen)).compile()
        state, metrics = program(state, BATCH, Frozen(frozen))
    trained = {name for name in gradients if re.match("model.layers.1|lm_head", name) and "down" not in name}
    after = by_name(PART, state.params)
    assert set(after) == trained
    assert all(np.abs(x - before[name]).max() > 0 for name, x in after.items())
    moment = by_name(PART, next(x.mu for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(x)))
    for name in trained:
        np.testing.assert_allclose(moment[name], (1 - config.optimizer.b1) * gradients[name], atol=1e-6, err_msg=name)
    norm = sum(np.sum(np.square(gradients[name])) for name in trained) ** 0.5
    np.testing.assert_allclose(metrics["grad_norm"].value, norm, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, by_name(PART, frozen), {x: before[x] for x in before.keys() - trained})
    count, moments = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (state.params, state.opt_state))
    assert 2 * count <= moments <= 2 * count + 4
    # No array of the program has the shape of a gradient of what is frozen.
    arrays = re.findall(r"= f32\[([\d,]+)\]\S* (?:dot|fusion|add)\(", program.as_text())
    assert not {tuple(map(int, x.split(","))) for x in arrays} & {(2, 16, 24), (2, 24, 16), (2, 16, 16), (1, 24, 16)}


def is_adam(x):
    return hasattr(x, "mu")


PATTERNS = [
    (["^lm_head.weight$", "model.layers.1."], []),
    ([], ["model.layers.[0-9]+.mlp", "model.embed_tokens.weight$"]),
    (["model.layers.*.self_attn.[qk]_proj"], ["model.layers.1.self_attn.q_proj"]),
]


def test_names_are_those_of_torch_with_requires_grad(tmp_path):
    """As axolotl freezes: a dot is a dot, and a pattern begins where a name does."""
    oracle = make_oracle("llama")
    oracle.save_pretrained(tmp_path)
    for trainable, frozen in PATTERNS:
        for name, parameter in oracle.named_parameters():
            on, off = (
                any(re.match(re.sub(r"\.(?!\*)", r"\\.", pattern), name) for pattern in patterns)
                for patterns in (trainable, frozen)
            )
            parameter.requires_grad_((on or not trainable) and not off)
        net = model.describe(tmp_path, trained=Trained(tuple(trainable), tuple(frozen))).net
        _, trained = lora.split(net.shapes(), net.config.frozen)
        leaves = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)}
        found = {tensor.name for tensor in named_as_modules(net, llama) if tensor.leaf in leaves}
        assert found == {name for name, parameter in oracle.named_parameters() if parameter.requires_grad}


def test_experts_are_trained_together(tmp_path):
    make_oracle("qwen3_moe").save_pretrained(tmp_path)
    router = Trained(("model.layers.2.mlp.gate.",))
    with pytest.raises(ConfigError, match=r"freeze_router is true: nothing is left to train, as these are routers"):
        model.describe(tmp_path, trained=router, freeze_router=True)
    net = model.describe(tmp_path, trained=router).net
    _, trained = lora.split(net.shapes(), net.config.frozen)
    ((path, router),) = jax.tree_util.tree_leaves_with_path(trained)
    assert path_name(path).endswith("_layers/mlp/router/kernel") and len(router) == 1
    with pytest.raises(ConfigError, match=r"tell model.layers.0.mlp.experts.1.gate_proj.weight, .* from others that"):
        model.describe(tmp_path, trained=Trained(("model.layers.0.mlp.experts.1.",)))


def test_patterns_that_cannot_be_are_refused():
    cases = {
        "model.trainable names 'model.layer.1', with which no parameter of this model begins": ("model.layer.1",),
        "some rows of a matrix, but matrices are trained whole": ("model.embed_tokens.weight$[:32000]",),
        "model.trainable names '.lm_head', which is no regular expression": ("(lm_head",),
    }
    for message, patterns in cases.items():
        with pytest.raises(ConfigError, match=message):
            model.describe("embedded:sort", trained=Trained(patterns))
    with pytest.raises(ConfigError, match=r"model.frozen model, lm_head: nothing is left to train"):
        model.describe("embedded:sort", trained=Trained((), ("model", "lm_head")))
    config = default()
    config.model.trainable, config.lora.rank = ("lm_head",), 4
    with pytest.raises(ConfigError, match=r"model.trainable is lm_head, but adapters are trained"):
        validate(config)
    config.model.trainable, config.lora.rank, config.lora.exclude_modules = (), 0, ("q_proj",)
    with pytest.raises(ConfigError, match=r"lora.exclude_modules is q_proj, but there are no adapters"):
        validate(config)
    config.lora.path = "folder"
    with pytest.raises(ConfigError, match=r"lora.exclude_modules is q_proj, but the adapter of lora.path says this"):
        validate(config)


def test_what_is_served_is_a_model_that_is_trained_whole():
    """So that weights of any run of it can take its place."""
    base = load_model("embedded:sort")
    part = load_model("embedded:sort", trained=Trained(("model.layers.1.",)))
    adapted = add_adapters(base, LoraConfig(2), jax.random.key(0), (), AdapterPatterns(layers_to_transform=(1,)))
    for other in (part, adapted):
        assert other.net.config.layer_groups == (0, 1, 0) and merged(other).net == base.net
        jax.tree.map(np.testing.assert_array_equal, merged(other).params, base.params)


def tiny(root, folder, config: str = "sft", **changes):
    made = load_config_file(f"{root / 'configs' / config}.py:tiny")
    made.output_dir, made.eval.every, made.logging.backends = str(folder), -1, ("jsonl",)
    made.model.trainable = ("model.layers.[12].", "model.norm")
    made.optimizer.warmup_steps, made.checkpoint.every = 0, 1
    for name, value in changes.items():
        section, leaf = name.split("__")
        made[section][leaf] = value
    return made


def is_trained(name: str) -> bool:
    return re.match(r"model\.layers\.[12]\.|model\.norm", name) is not None


@pytest.mark.slow
@pytest.mark.parametrize("config", ["sft", "grpo", "dpo", "ppo", "reward_model"])
def test_a_run_that_trains_parts(root, tmp_path, config):
    """What is frozen stays bit for bit, in the model that is written and of a checkpoint; a resumed run equals it."""
    made = tiny(root, tmp_path / "run", config)
    result = jaxrl_llm.train(made)
    base, written = load_model("embedded:sort"), load_model(result.output_dir / "hf")
    names = {x.name: x for x in named_as_modules(written.net, llama)}
    before, after = by_name(base.net, base.params), by_name(written.net, written.params)
    assert set(after) == set(names)
    for name, x in after.items():
        if is_trained(name):
            assert np.abs(x - before[name]).max() > 0, name
        elif name != "score.weight":
            np.testing.assert_array_equal(x, before[name], err_msg=name)
    size = sum(x.stat().st_size for x in (result.output_dir / "checkpoints/2/state").rglob("*") if x.is_file())
    whole = sum(x.nbytes for x in jax.tree.leaves(base.params))
    assert config == "ppo" or size < 3 * whole * 0.8  # of parameters and moments
    again = tiny(root, tmp_path / "again", config, checkpoint__resume=str(result.output_dir / "checkpoints/1"))
    resumed = jaxrl_llm.train(again)
    assert [line["step"] for line in resumed.metrics] == [2]
    jax.tree.map(np.testing.assert_array_equal, resumed.model.params, result.model.params)
    exported = load_model(jaxrl_llm.export(result.output_dir, tmp_path / "hf"))
    jax.tree.map(np.testing.assert_array_equal, exported.params, written.params)


@pytest.mark.slow
def test_a_model_in_memory_is_trained_in_parts_and_whole_again(root, tmp_path):
    first = jaxrl_llm.train(tiny(root, tmp_path / "one"))
    assert first.model.net.config.layer_groups == (0, 1, 1)
    second = jaxrl_llm.train(tiny(root, tmp_path / "two", model__trainable=()), model=first.model)
    assert second.model.net.config.layer_groups == ()
    third = jaxrl_llm.train(tiny(root, tmp_path / "three", optimizer__learning_rate=0.0), model=second.model)
    whole, part = (by_name(x.net, x.params) for x in (second.model, third.model))
    jax.tree.map(np.testing.assert_array_equal, part, whole)


def test_a_plan_counts_what_is_trained(root):
    made = tiny(root, "runs/x")
    with jax.set_mesh(MESH):
        part = describe(made, MESH, "float32", on_cpu=True)
        made.model.trainable = ()
        whole = describe(made, MESH, "float32", on_cpu=True)
    count = lambda *trees: sum(x.size for x in jax.tree.leaves(trees))  # noqa: E731
    frozen = count(part.frozen.params)
    assert frozen > 0 and count(part.state.params) == count(whole.state.params) - frozen
    assert count(part.state.opt_state) == count(whole.state.opt_state) - 2 * frozen
