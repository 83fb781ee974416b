"""Learning rates of single parameters: named as in torch, updated as by PEFT's LoRA+, in whole runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.families import llama
from jaxrl_llm.models.model import add_adapters, load_model, named_rate_factors
from jaxrl_llm.models.rate_factors import rate_factors
from jaxrl_llm.training.optimizers import build_optimizer, with_rate_factors
from jaxrl_llm.training.setup.specs import optimizer_spec
from tests.training.objectives.test_policy_gradient import NET


def test_factors_are_found_by_names_of_parts():
    layers = NET.config.layers
    found = rate_factors(NET, llama, ("layers.1.mlp=3", "embed_tokens|lm_head=0.1", "down_proj=2", "norm=0.5"))
    of_second = tuple([1.0, 3.0] + [1.0] * (layers - 2))
    assert found["layers/mlp/gate/kernel"] == of_second
    assert found["layers/mlp/down/kernel"] == (2.0, *of_second[1:2], *[2.0] * (layers - 2))  # the first that fits
    assert found["embed/weight"] == (0.1,)
    assert found["norm/scale"] == (0.5,)
    assert "layers/attention/q/kernel" not in found
    with pytest.raises(ConfigError, match="names 'lora_B', which is in the name of no parameter that is trained"):
        rate_factors(NET, llama, ("lora_B=16",))
    with pytest.raises(ConfigError, match="no regular expression"):
        rate_factors(NET, llama, ("(=16",))


def test_adapters_have_the_names_of_peft():
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = add_adapters(load_model("embedded:sort", mesh=mesh), LoraConfig(2, 4.0), jax.random.key(0), ("norm",))
    found = named_rate_factors(model, ("lora_B=16", "q_proj.lora_A=0.5", "model.norm=2"))
    assert {path.rpartition("/")[2] for path, x in found.items() if x == (16.0,)} == {"lora_b"}
    assert [path for path, x in found.items() if x == (0.5,)] == ["layers/attention/q/lora_a"]
    assert [path for path, x in found.items() if x == (2.0,)] == ["saved/norm/scale"]


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "lion", "sgd"])
def test_an_update_is_that_of_another_learning_rate(name):
    """Weight decay included; the state is the same."""
    config = default()
    config.optimizer.name, config.optimizer.weight_decay, config.optimizer.no_decay = name, 0.1, ()
    config.optimizer.learning_rate, config.optimizer.max_grad_norm = 0.01, 0.0
    random = np.random.default_rng(0)
    params = {"layers": {"q": {"kernel": jnp.array(random.normal(size=(2, 4, 6)), jnp.float32)}}}
    gradients = jax.tree.map(jnp.cos, params)
    plain = build_optimizer(optimizer_spec(config))
    scaled = with_rate_factors(plain, {"layers/q/kernel": (3.0, 1.0)})
    config.optimizer.learning_rate = 0.03
    larger = build_optimizer(optimizer_spec(config))
    changes = [each.update(gradients, each.init(params), params) for each in (plain, larger, scaled)]
    usual, tripled, got = (x["layers"]["q"]["kernel"] for x, _ in changes)
    np.testing.assert_allclose(got, jnp.stack([tripled[0], usual[1]]), rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, changes[0][1], changes[2][1])


def test_lora_plus_is_that_of_peft():
    """PEFT's optimizer, over several updates with weight decay, on the same factors and gradients."""
    torch.manual_seed(0)
    net = peft.get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False)), peft.LoraConfig(r=2, target_modules=["0"])
    )
    theirs = create_loraplus_optimizer(
        net, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16, loraplus_weight_decay=0.1, betas=(0.9, 0.999)
    )
    tensors = {name: x for name, x in net.named_parameters() if "lora_" in name}
    params = {
        "lora_a" if "lora_A" in name else "lora_b": jnp.array(x.detach().numpy().T) for name, x in tensors.items()
    }
    config = default()
    config.optimizer.learning_rate, config.optimizer.weight_decay = 0.01, 0.1
    config.optimizer.max_grad_norm = 0.0
    ours = with_rate_factors(build_optimizer(optimizer_spec(config)), {"lora_b": (16.0,)})
    state = ours.init(params)
    for step in range(4):
        gradients = {name: jnp.cos(x * (3 + step)) for name, x in params.items()}
        for x in tensors.values():
            x.grad = torch.cos(x.detach() * (3 + step))
        changes, state = ours.update(gradients, state, params)
        params = optax.apply_updates(params, changes)
        theirs.step()
    for name, x in tensors.items():
        own = params["lora_a" if "lora_A" in name else "lora_b"]
        np.testing.assert_allclose(own, x.detach().numpy().T, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_a_run_has_them(tmp_path):
    """A step of SGD from B = 0, where A has no gradient: B is 16 rates of a gradient whose norm is the metric's."""
    config = default()
    config.algorithm.name, config.optimizer.name, config.optimizer.learning_rate = "sft", "sgd", 0.01
    config.optimizer.max_grad_norm, config.lora.rank, config.total_steps, config.eval.every = 0.0, 2, 1, -1
    config.batch.prompts, config.output_dir, config.optimizer.rate_factors = 4, str(tmp_path / "run"), ("lora_B=16",)
    result = jaxrl_llm.train(config, train_dataset=[{"prompt": "2 1", "completion": "1 2"}] * 4)
    leaves = jax.tree_util.tree_leaves_with_path(result.model.params)
    moved = np.concatenate([np.ravel(x) for path, x in leaves if path[-1].key == "lora_b"])
    (line,) = result.metrics
    assert line["grad_norm"] > 0.1
    assert np.linalg.norm(moved) == pytest.approx(16 * 0.01 * line["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("entry", ["lora_B", "lora_B=0", "=2", "lora_B=inf", "lora_B=x"])
def test_entries_of_another_form_are_refused(entry):
    config = default()
    config.optimizer.rate_factors = (entry,)
    with pytest.raises(ConfigError, match="it takes PATTERN=FACTOR"):
        validate(config)
