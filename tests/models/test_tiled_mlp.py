"""The feed-forward of some tokens at a time: the same numbers, fewer activations; on meshes in mesh_checks.py."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net

CONFIG = ModelConfig(
    vocab_size=31, width=64, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=128, remat="block", init_scale=0.3,
    attention_bias=True, mlp_bias=True,
)  # fmt: skip
ADAPTER = LoraConfig(rank=2, alpha=4.0, targets=("up", "down"))


def loss_and_gradients(config, params, tokens):
    def loss(params):
        logits = Net(config).bind(params)(tokens, jnp.ones_like(tokens))
        return (jax.nn.log_softmax(logits) ** 2).mean(), logits

    return jax.jit(jax.grad(loss, has_aux=True, allow_int=True))(params)


def drawn(config, rows=4, length=12):
    params = jax.jit(Net(config).init)(jax.random.key(0))
    filled = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(1), x.shape, x.dtype) * 0.1 if x.dtype == jnp.float32 else x, params
    )
    return filled, jnp.asarray(np.random.default_rng(0).integers(0, 31, (rows, length)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"mlp_tile_tokens": 16},
        {"mlp_tile_tokens": 20},  # the last tile has eight tokens
        {"mlp_tile_tokens": 16, "lora": ADAPTER},
        {"mlp_tile_tokens": 7, "remat": "none", "scan_layers": False},
        {"mlp_tile_tokens": 16, "remat": "dots"},
        {"mlp_tile_tokens": 20, "lora": ADAPTER, "quantize": "nf4"},
        {"mlp_tile_tokens": 16, "ffn_gate": False, "activation": "xielu"},
    ],
)
def test_tiles_change_nothing(fields):
    config = dataclasses.replace(CONFIG, **fields)
    params, tokens = drawn(config)
    gradients, logits = loss_and_gradients(config, params, tokens)
    whole, expected = loss_and_gradients(dataclasses.replace(config, mlp_tile_tokens=0), params, tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    jax.tree.map(lambda a, b: a.dtype == jnp.float32 and np.testing.assert_allclose(a, b, atol=1e-6), gradients, whole)


@pytest.mark.slow
def test_activations_of_one_tile_exist_at_a_time():
    config = dataclasses.replace(CONFIG, layers=1, ffn=2048)
    params, tokens = drawn(config, 4, 512)

    def temporaries(tile):
        net = Net(dataclasses.replace(config, mlp_tile_tokens=tile))
        loss = lambda params: net.bind(params)(tokens, jnp.ones_like(tokens)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes

    activations = tokens.size * config.ffn * 4
    assert temporaries(0) - temporaries(256) > 2 * activations


@pytest.mark.slow
def test_a_run_in_tiles_learns_the_same(run_python, root, tmp_path):
    command = ("-m", "jaxrl_llm.train", f"--config={root}/configs/sft_tiny.py", "--config.total_steps=3")
    losses = []
    for tile in (0, 100):
        folder = tmp_path / str(tile)
        settings = (f"--config.output_dir={folder}", f"--config.model.mlp_tile_tokens={tile}")
        result = run_python(*command, *settings, "--config.model.remat=block", "--config.eval.every=-1")
        assert result.returncode == 0, result.stderr[-3000:]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert len(losses[0]) == 3
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
