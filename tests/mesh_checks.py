"""What must hold on a mesh of several devices. test_sharding.py runs this file in a process with 8 CPU devices."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models import hf, transformer
from jaxrl_llm.models.model import Model, init_sharded, load_model, save_hf
from jaxrl_llm.models.transformer import ModelConfig, Net
from jaxrl_llm.models.weights import Files
from jaxrl_llm.sharding import constrain, local_rows, make_mesh, path_name, row_shards, rows_to_global, shardings

CONFIG = ModelConfig(
    vocab_size=64, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=32, init_scale=0.3, attention_bias=True
)


def mesh_of(data, fsdp, tensor):
    return make_mesh(data, fsdp, tensor, devices=jax.devices()[: data * fsdp * tensor])


@pytest.fixture(scope="module")
def net():
    return Net(CONFIG)


@pytest.fixture(scope="module")
def params(net):
    return jax.jit(net.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    segments = np.ones((8, 6), np.int32)
    segments[2, :3] = 0
    return rng.integers(0, 64, (8, 6)).astype(np.int32), segments


def loss_and_gradients(net, params, tokens, segments):
    def loss(params):
        return (jax.nn.log_softmax(net.bind(params)(tokens, segments)) ** 2).mean()

    return jax.value_and_grad(loss)(params)


def shard_shapes(tree):
    return {path_name(path): x.sharding.shard_shape(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def test_there_are_eight_devices():
    assert jax.device_count() == 8


def test_parameters_are_made_cut(net, params):
    made = init_sharded(net, jax.random.key(0), mesh_of(2, 2, 2))
    assert shard_shapes(made) == {
        "embed/weight": (32, 8),
        "head/kernel": (8, 32),
        "norm/scale": (16,),
        "layers/input_norm/scale": (2, 16),
        "layers/post_attention_norm/scale": (2, 16),
        "layers/attention/q/kernel": (2, 8, 16),
        "layers/attention/k/kernel": (2, 8, 8),
        "layers/attention/v/kernel": (2, 8, 8),
        "layers/attention/o/kernel": (2, 16, 8),
        "layers/attention/q/bias": (2, 16),
        "layers/attention/k/bias": (2, 8),
        "layers/attention/v/bias": (2, 8),
        "layers/mlp/gate/kernel": (2, 8, 16),
        "layers/mlp/up/kernel": (2, 8, 16),
        "layers/mlp/down/kernel": (2, 16, 8),
    }
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), made, params)


def test_a_dimension_that_does_not_divide_stays_whole():
    net = Net(dataclasses.replace(CONFIG, vocab_size=61, head="score"))
    shapes = shard_shapes(init_sharded(net, jax.random.key(0), mesh_of(1, 4, 2)))
    assert shapes["embed/weight"] == (61, 4)
    assert shapes["score/kernel"] == (4, 1)


def test_optimizer_moments_are_cut_like_their_parameters(net):
    mesh = mesh_of(2, 2, 2)
    params = init_sharded(net, jax.random.key(0), mesh)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = jax.jit(tx.init, out_shardings=shardings(jax.eval_shape(tx.init, params), mesh))(params)
    adam = next(part for part in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(part))
    for moments in (adam.mu, adam.nu):
        assert shard_shapes(moments) == shard_shapes(params)
        assert moments["layers"]["mlp"]["up"]["kernel"].sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert adam.count.sharding.is_fully_replicated


def is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


@pytest.fixture(scope="module")
def expected(net, params, rows):
    return jax.jit(lambda p: net.bind(p)(*rows))(params), jax.jit(lambda p: loss_and_gradients(net, p, *rows))(params)


def test_an_unrolled_net_computes_the_same(net, params, rows, expected):
    mesh = mesh_of(2, 2, 2)
    model = Model(net.unrolled(), jax.device_put(params, shardings(params, mesh)), mesh=mesh)
    np.testing.assert_allclose(model(*rows), expected[0], atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 4), (2, 4, 1), (2, 2, 2)], ids=str)
def test_logits_are_equal_on_every_mesh(net, params, rows, expected, sizes):
    mesh = mesh_of(*sizes)
    placed = jax.device_put(params, shardings(params, mesh))
    np.testing.assert_allclose(Model(net, placed, mesh=mesh)(*rows_to_global(rows, mesh)), expected[0], atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_gradients_are_equal_on_every_mesh(net, params, rows, expected, sizes):
    mesh = mesh_of(*sizes)
    placed = jax.device_put(params, shardings(params, mesh))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda p, *r: loss_and_gradients(net, p, *r))(placed, *rows_to_global(rows, mesh))
    np.testing.assert_allclose(found[0], expected[1][0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), found[1], expected[1][1])


def test_more_kv_head_cuts_than_kv_heads(net, params, rows, expected):
    """2 key/value heads on 8 tensor devices: their activations stay whole, the numbers are the same."""
    mesh = mesh_of(1, 1, 8)
    model = Model(net, jax.device_put(params, shardings(params, mesh)), mesh=mesh)
    np.testing.assert_allclose(model(*rows), expected[0], atol=1e-5)


def compiled_text(net, params, rows, mesh):
    placed = jax.device_put(params, shardings(params, mesh))
    with jax.set_mesh(mesh):
        lowered = jax.jit(lambda p, *r: loss_and_gradients(net, p, *r)).lower(placed, *rows_to_global(rows, mesh))
        return lowered.as_text(), lowered.compile().as_text()


def test_activations_are_cut_in_the_compiled_program(rows):
    """Each device holds 2 of 8 rows and a cut of heads and channels; nothing has all rows and all channels."""
    net = Net(dataclasses.replace(CONFIG, layers=1, ffn=40, scan_layers=False))
    params = jax.jit(net.init)(jax.random.key(0))
    lowered, compiled = compiled_text(net, params, rows, mesh_of(2, 2, 2))
    constraints = re.findall(r"sharding_constraint .*", lowered)
    assert any('{"data", "fsdp"}, {}, {"tensor"}' in line and "8x6x40" in line for line in constraints)
    assert any('{"data", "fsdp"}, {}, {"tensor"}' in line and "8x6x2x2x8" in line for line in constraints)
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", compiled)}
    assert (2, 6, 20) in shapes  # rows / 4, ffn / 2
    assert not {shape for shape in shapes if shape[0] == 48 or (shape[:2] == (8, 6) and len(shape) > 2)}


def test_constraints_without_a_mesh_do_nothing(net, params, rows):
    assert "sharding_constraint" not in jax.jit(lambda p: net.bind(p)(*rows)).lower(params).as_text()


@pytest.mark.parametrize(("sizes", "tied"), [((2, 2, 2), False), ((2, 2, 2), True), ((2, 4, 1), True)], ids=str)
def test_nothing_is_rematerialized_in_full(params, rows, capfd, sizes, tied):
    """The partitioner warns when it can only repeat an array on all devices to cut it another way."""
    net = Net(dataclasses.replace(CONFIG, tie_embeddings=tied))
    params = {name: x for name, x in params.items() if not (tied and name == "head")}
    compiled_text(net, params, rows, mesh_of(*sizes))
    assert "involuntary full rematerialization" not in capfd.readouterr().err.lower()


def test_the_rematerialization_check_can_fail(net, params, rows, capfd, monkeypatch):
    """Without the constraint on the embedding table the warning comes, so its absence above means something."""
    monkeypatch.setattr(transformer, "constrain", lambda x, *dims: x if "vocab" in dims else constrain(x, *dims))
    compiled_text(net, params, rows, mesh_of(2, 2, 2))
    assert "involuntary full rematerialization" in capfd.readouterr().err.lower()


@pytest.mark.parametrize("scan_layers", [True, False])
def test_loading_cut_equals_loading_whole(net, params, tmp_path, scan_layers):
    save_hf(Model(net, params), tmp_path / "model", max_shard_bytes=4000)
    whole = load_model(tmp_path / "model", scan_layers=scan_layers)
    mesh = mesh_of(2, 2, 2)
    cut = load_model(tmp_path / "model", mesh=mesh, scan_layers=scan_layers)
    assert shard_shapes(cut.params) == shard_shapes(init_sharded(cut.net, jax.random.key(0), mesh))
    jax.tree.map(np.testing.assert_array_equal, cut.params, whole.params)
    save_hf(cut, tmp_path / "from_mesh")
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "from_mesh")[1], params)


def test_a_device_reads_only_its_own_part(net, params, tmp_path, monkeypatch):
    save_hf(Model(net, params), tmp_path / "model")
    read = {}

    whole_read = Files.read

    def counting(self, tensor, index, dtype):
        part = whole_read(self, tensor, index, dtype)
        read[tensor.name] = read.get(tensor.name, 0) + part.size
        return part

    monkeypatch.setattr(Files, "read", counting)
    hf.load(tmp_path / "model", mesh_of(1, 4, 2))
    assert read["model.layers.1.mlp.up_proj.weight"] == 16 * 32  # 8 devices read an eighth each
    assert read["lm_head.weight"] == 16 * 64


def test_a_new_score_head_is_placed_on_the_mesh(net, params, tmp_path):
    save_hf(Model(net, params), tmp_path / "model")
    cut, whole = (hf.load(tmp_path / "model", mesh, head="score", seed=3)[1] for mesh in (mesh_of(2, 4, 1), None))
    assert shard_shapes(cut)["score/kernel"] == (4, 1)
    np.testing.assert_array_equal(cut["score"]["kernel"], whole["score"]["kernel"])


def test_rows_go_round(rows):
    mesh = mesh_of(2, 2, 2)
    assert row_shards(mesh) == 4
    tokens, segments = rows_to_global(rows, mesh)
    assert tokens.sharding.shard_shape(tokens.shape) == (2, 6)
    for found, given in zip(local_rows((tokens, segments)), rows, strict=True):
        np.testing.assert_array_equal(found, given)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"6 rows do not divide into mesh\.data x mesh\.fsdp = 4 parts"):
        rows_to_global(np.zeros((6, 3)), mesh_of(2, 2, 2))


def test_mesh_sizes():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(2, -1, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    for sizes in [(3, 1, 1), (-1, 3, 1), (2, 2, 1), (-1, 16, 1)]:
        with pytest.raises(ConfigError, match="does not use the 8 devices at hand"):
            make_mesh(*sizes)
    for sizes in [(-1, -1, 1), (0, 1, 1), (-2, 1, 1)]:
        with pytest.raises(ConfigError, match="at most one may be -1"):
            make_mesh(*sizes)
