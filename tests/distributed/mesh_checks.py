"""Checks on a mesh of several devices. test_sharding.py runs this file in a process with 8 CPU devices."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.batch import Batch, Images, Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import (
    AXES,
    local_rows,
    make_mesh,
    over,
    path_name,
    rollout_mesh,
    row_groups,
    row_shards,
    rows_to_global,
    shardings,
)
from jaxrl_llm.models import chunked_softmax, moe
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.chunked_divergences import AlignedDistributions, UldOptions, chunked_uld
from jaxrl_llm.models.chunked_softmax import chunked_logps
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.files.safetensors import Files
from jaxrl_llm.models.kernels.decode_attention import decode_attention
from jaxrl_llm.models.kernels.fused_attention import splash_attention
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.mixers import compressed_attention, query_blocks
from jaxrl_llm.models.mixers.attention import Attention, KeyValues
from jaxrl_llm.models.model import Model, init_sharded, load_model, save_hf
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.transformer import attention_mask
from jaxrl_llm.rollout import engine as engines
from jaxrl_llm.rollout.assignment import assign
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.resharded import ReshardedEngine
from jaxrl_llm.rollout.sampling import SamplingParams, sample
from jaxrl_llm.rollout.scheduler import Scheduler
from jaxrl_llm.rollout.slots import row_keys
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.microbatch import microbatches_of, rows_at, share_images
from jaxrl_llm.training.packing.planner import TypicalRows
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import update_spec
from jaxrl_llm.training.teachers.cross_tokenizer import at_ends
from jaxrl_llm.training.transformations import scale_by_galore
from jaxrl_llm.training.update import init_state, make_update
from tests.models import test_tiled_mlp as tiled
from tests.models.kernels.test_fused_attention import dense, outputs_and_gradients
from tests.models.mixers import test_query_blocks as chosen
from tests.rollout.test_multi_turn import Echo
from tests.training.packing.test_packed_updates import GROUP, config_of, online_batch, packer_of
from tests.training.packing.test_packed_updates import SHAPE as PACKED

CONFIG = ModelConfig(
    vocab_size=64, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=32, init_scale=0.3, attention_bias=True
)


def mesh_of(data, fsdp, tensor):
    return make_mesh(data, fsdp, tensor, devices=jax.devices()[: data * fsdp * tensor])


@pytest.fixture
def compile_anew(capfd):
    """Compiles a lowered program: it, and the compiler's warnings, which programs from the folder do not bring."""

    def compiled(lowered):
        try:
            jax.config.update("jax_enable_compilation_cache", False)
            reset_cache()  # which asks once whether it is used
            return lowered.compile(), capfd.readouterr().err.lower()
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            reset_cache()

    return compiled


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


def test_parameters_are_initialised_sharded(net, params):
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


def test_an_odd_dimension_is_replicated():
    net = Net(dataclasses.replace(CONFIG, vocab_size=61, head="score"))
    shapes = shard_shapes(over(net.shapes(), mesh_of(1, 4, 2)))
    assert shapes["embed/weight"] == (61, 4)
    assert shapes["score/kernel"] == (4, 1)


def test_moments_are_sharded_like_parameters(net):
    mesh = mesh_of(2, 2, 2)
    params = init_sharded(net, jax.random.key(0), mesh)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = jax.jit(tx.init, out_shardings=shardings(jax.eval_shape(tx.init, params), mesh))(params)
    adam = next(part for part in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(part))
    for moments in (adam.mu, adam.nu):
        assert shard_shapes(moments) == shard_shapes(params)
        assert moments["layers"]["mlp"]["up"]["kernel"].sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert adam.count.sharding.is_fully_replicated


@pytest.mark.slow
def test_moments_in_eight_bits_are_sharded_like_parameters(tmp_path):
    """Scales too, where their number divides; on every mesh they are the same numbers, also from a checkpoint."""
    layers = {"q": {"kernel": np.ones((2, 32, 1024), np.float32)}, "down": {"kernel": np.ones((2, 64, 96), np.float32)}}
    params = {"layers": layers}
    optimizer = make_optimizer(config_of("grpo", optimizer__name="adamw", optimizer__moment_dtype="float8"))
    update = jax.jit(lambda *state: optimizer.update(*state)[1], donate_argnums=1)

    def improved(mesh):
        state = init_state(jax.device_put(params, shardings(params, mesh)), optimizer, mesh)
        for number in range(3):
            noise = jax.tree.map(lambda x, n=number: np.sin(np.arange(x.size, dtype="f") + n).reshape(x.shape), params)
            gradients = jax.device_put(noise, shardings(params, mesh))
            state = dataclasses.replace(state, opt_state=update(gradients, state.opt_state, state.params))
        return state

    def parts(state):
        shapes = shard_shapes(next(x for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(x)).nu)
        return [shapes[f"layers/{name}/kernel/{part}"] for name in ("q", "down") for part in ("codes", "scales")]

    meshes = mesh_of(1, 1, 1), mesh_of(2, 2, 2), mesh_of(1, 8, 1)
    whole, in_two, in_eight = states = [improved(mesh) for mesh in meshes]
    assert parts(whole) == [(2, 32, 1024), (2, 32, 8), (2, 64, 96), (2, 64, 1)]
    assert parts(in_two) == [(2, 16, 512), (2, 16, 4), (2, 32, 48), (2, 32, 1)]
    assert parts(in_eight) == [(2, 4, 1024), (2, 4, 8), (2, 8, 96), (2, 8, 1)]
    for state in states[1:]:  # the last bit of a sum may be another, and then a code
        for x, y in zip(jax.tree.leaves(whole.opt_state), jax.tree.leaves(state.opt_state), strict=True):
            assert np.mean(np.abs(np.float32(x) - np.float32(y)) > 1e-6 * np.abs(np.float32(x))) < 1e-3
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, in_two, {}, final=True)
        restored, _ = checkpoints.restore(1, in_eight, meshes[2])
    assert parts(restored) == parts(in_eight)
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state, in_two.opt_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "schedule_free_adamw"},
        {"name": "prodigy"},
        {"name": "came"},
        {"name": "galore_adamw", "galore_rank": 8, "galore_every": 2},
        {"name": "adamw", "lisa_layers": 2, "lisa_every": 2},
    ],
    ids=lambda settings: settings["name"],
)
def test_updates_are_equal_on_every_mesh(settings):
    """Of sums over all of a matrix, of its rows and columns, its singular vectors, and of a few layers of a stack."""
    random = np.random.default_rng(0)
    shapes = {"q": (3, 32, 64), "down": (3, 64, 48)}
    params = {"layers": {name: {"kernel": random.normal(size=shape, scale=0.1)} for name, shape in shapes.items()}}
    params = jax.tree.map(np.float32, {**params, "norm": {"scale": np.ones(32)}})
    gradients = [jax.tree.map(lambda x, n=n: np.sin(x * (90 + n)), params) for n in range(3)]
    changed = {f"optimizer__{name}": value for name, value in settings.items()}
    optimizer = make_optimizer(config_of("grpo", **changed, optimizer__b1=0.9, optimizer__learning_rate=0.01))

    def improved(mesh):
        state = init_state(jax.device_put(params, shardings(params, mesh)), optimizer, mesh)
        now, state = state.params, state.opt_state
        with jax.set_mesh(mesh):
            for given in gradients:
                changes, state = jax.jit(optimizer.update)(jax.device_put(given, shardings(params, mesh)), state, now)
                now = optax.apply_updates(now, changes)
        return now, state

    whole, _ = improved(mesh_of(1, 1, 1))
    for mesh in (mesh_of(2, 2, 2), mesh_of(1, 8, 1)):
        made, state = improved(mesh)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), made, whole)
        cut = [x.sharding.shard_shape(x.shape) != x.shape for x in jax.tree.leaves(state) if x.ndim == 3]
        assert len(cut) >= 2 and all(cut), "moments of matrices are not cut"


@pytest.mark.parametrize("sizes", [(1, 8, 1), pytest.param((1, 4, 2), marks=pytest.mark.slow)], ids=str)
def test_devices_gather_one_gradient_to_decompose_it(sizes):
    """GaLore's singular vectors are of whole matrices; its projections are sums of what each device has."""
    mesh, layers = mesh_of(*sizes), 6
    shapes = {"q": (layers, 64, 256), "o": (layers, 256, 64)}
    params = {"layers": {name: {"kernel": jax.ShapeDtypeStruct(shape, "f")} for name, shape in shapes.items()}}
    optimizer = scale_by_galore(0.9, 0.999, 1e-8, rank=8, every=2, scale=1.0)
    state = jax.eval_shape(optimizer.init, params)
    with jax.set_mesh(mesh):
        placed = (over(params, mesh), over(state, mesh))
        places = (shardings(params, mesh), shardings(state, mesh))
        compiled = jax.jit(optimizer.update, out_shardings=places).lower(*placed).compile()
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", compiled.as_text())
    sizes = [math.prod(map(int, dims.split(","))) for dims in gathered]
    assert 64 * 256 in sizes and max(sizes) == 64 * 256


def is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


@pytest.fixture(scope="module")
def expected(net, params, rows):
    return jax.jit(lambda p: net.bind(p)(*rows))(params)


def test_an_unrolled_net_computes_the_same(net, params, rows, expected):
    mesh = mesh_of(2, 2, 2)
    model = Model(net.unrolled(), jax.device_put(params, shardings(params, mesh)), mesh=mesh)
    np.testing.assert_allclose(model(*rows), expected, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 1), (2, 2, 2)], ids=str)
def test_logits_are_equal_on_every_mesh(net, params, rows, expected, sizes):
    mesh = mesh_of(*sizes)
    placed = jax.device_put(params, shardings(params, mesh))
    np.testing.assert_allclose(Model(net, placed, mesh=mesh)(*rows_to_global(rows, mesh)), expected, atol=1e-5)


def test_more_tensor_shards_than_kv_heads(net, params, rows, expected):
    """2 key/value heads on 8 tensor devices: their activations are replicated, the numbers are the same."""
    mesh = mesh_of(1, 1, 8)
    model = Model(net, jax.device_put(params, shardings(params, mesh)), mesh=mesh)
    np.testing.assert_allclose(model(*rows), expected, atol=1e-5)


LORA = lora.LoraConfig(rank=2, alpha=4.0, targets=("up", "down"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"dtype": "bfloat16"}, (1, 4, 1, 2)),
        ({}, (2, 4)),
        ({}, (1, 4, 1, 1, 2)),
        ({}, (1, 4, 2)),
        ({"lora": LORA}, (2, 2, 1, 2)),
        ({"lora": dataclasses.replace(LORA, dora=True)}, (1, 8)),
        ({"quantize": "nf4"}, (1, 8)),
        ({"qat": "nf4", "dtype": "bfloat16"}, (1, 8)),
    ],
    ids=str,
)
def test_devices_compute_tiles_of_their_own_tokens(fields, sizes):
    """Rows, positions and parameters are sharded; each device adds up its gradients before they are summed."""
    config = dataclasses.replace(tiled.CONFIG, mlp_tile_tokens=2, **fields)
    params, tokens = tiled.drawn(config, 8, 12)
    whole, expected = tiled.loss_and_gradients(dataclasses.replace(config, mlp_tile_tokens=0), params, tokens)
    mesh = make_mesh(*sizes)
    with jax.set_mesh(mesh):
        gradients, logits = tiled.loss_and_gradients(config, jax.device_put(params, shardings(params, mesh)), tokens)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(whole), strict=True)
    half = config.dtype == "bfloat16"
    assert np.abs(logits - expected).max() < (0.2 if half else 1e-5)
    assert max(np.abs(a - b).max() for a, b in pairs if a.dtype == "float32") < (2e-2 if half else 1e-6)


def lowered_update(net, rows, mesh):
    with jax.set_mesh(mesh):
        update = jax.jit(lambda params, *rows: loss_and_gradients(net, params, *rows))
        return update.lower(over(net.shapes(), mesh), *rows_to_global(rows, mesh))


def test_compiled_activations_are_sharded(rows):
    """Each device holds 2 of 8 rows and a shard of heads and channels; nothing has all rows and all channels."""
    net = Net(dataclasses.replace(CONFIG, layers=1, ffn=40, scan_layers=False))
    lowered = lowered_update(net, rows, mesh_of(2, 2, 2))
    constraints = re.findall(r"sharding_constraint .*", lowered.as_text())
    assert any('{"data", "fsdp"}, {}, {"tensor"}' in line and "8x6x40" in line for line in constraints)
    assert any('{"data", "fsdp"}, {}, {"tensor"}' in line and "8x6x2x2x8" in line for line in constraints)
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", lowered.compile().as_text())}
    assert (2, 6, 20) in shapes  # rows / 4, ffn / 2
    assert not {shape for shape in shapes if shape[0] == 48 or (shape[:2] == (8, 6) and len(shape) > 2)}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab", "gathered"), [(512, False), (24, True)])
def test_few_tokens_go_to_the_parts_of_the_vocabulary(vocab, gathered, tied):
    """With fewer tokens than words no device ever has the whole embedding or head; the numbers are those of one."""
    tokens = np.random.default_rng(0).integers(0, 24, (8, 9)).astype(np.int32)
    inputs, mesh = Inputs(tokens, np.ones_like(tokens)), mesh_of(1, 8, 1)
    net = Net(dataclasses.replace(CONFIG, vocab_size=vocab, layers=1, tie_embeddings=tied, scan_layers=False))

    def loss(params, inputs):
        logps, entropy = token_logps(net, params, inputs, 0.7)
        return (logps * np.linspace(-1, 1, 9)).sum() + 0.1 * entropy.sum()

    params = jax.jit(net.init)(jax.random.key(0))
    expected = jax.jit(jax.value_and_grad(loss))(params, inputs)
    with jax.set_mesh(mesh):
        placed, given = jax.device_put(params, shardings(params, mesh)), rows_to_global(inputs, mesh)
        compiled = jax.jit(jax.value_and_grad(loss)).lower(placed, given).compile()
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), compiled(placed, given), expected)
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
    assert bool({(vocab, 16), (16, vocab)} & shapes) == gathered


def test_constraints_without_a_mesh_do_nothing(net, params, rows):
    assert "sharding_constraint" not in jax.jit(lambda p: net.bind(p)(*rows)).lower(params).as_text()


@pytest.mark.parametrize(
    ("sizes", "tied"),
    [
        ((2, 2, 2), True),
        pytest.param((2, 2, 2), False, marks=pytest.mark.slow),
        pytest.param((2, 4, 1), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nothing_is_rematerialized_in_full(rows, compile_anew, sizes, tied):
    """The partitioner warns when it can only replicate an array on all devices to reshard it."""
    net = Net(dataclasses.replace(CONFIG, tie_embeddings=tied))
    _, warnings = compile_anew(lowered_update(net, rows, mesh_of(*sizes)))
    assert "involuntary full rematerialization" not in warnings


def test_the_rematerialization_check_can_fail(compile_anew):
    """An array that goes from sharded rows to sharded columns brings the warning: its absence above means something."""
    mesh = mesh_of(2, 2, 2)
    rows, columns = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((("data", "fsdp"), None), (None, "tensor")))

    def reshard(x):
        x = jax.lax.with_sharding_constraint(jax.lax.sin(x), rows)
        return 2 * jax.lax.with_sharding_constraint(x, columns)

    _, warnings = compile_anew(jax.jit(reshard).lower(jax.ShapeDtypeStruct((8, 8), np.float32, sharding=rows)))
    assert "involuntary full rematerialization" in warnings


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_loading_sharded_equals_loading(net, params, tmp_path, scan_layers):
    save_hf(Model(net, params), tmp_path / "model", max_shard_bytes=4000)
    whole = load_model(tmp_path / "model", scan_layers=scan_layers)
    mesh = mesh_of(2, 2, 2)
    cut = load_model(tmp_path / "model", mesh=mesh, scan_layers=scan_layers)
    assert shard_shapes(cut.params) == shard_shapes(over(cut.net.shapes(), mesh))
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
    with pytest.raises(
        ConfigError, match=r"6 rows do not divide into mesh\.data x mesh\.fsdp x mesh\.expert = 4 parts"
    ):
        rows_to_global(np.zeros((6, 3)), mesh_of(2, 2, 2))


def test_mesh_sizes():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "context": 1, "expert": 1, "tensor": 1}
    found = make_mesh(1, -1, 2, context=2).shape
    assert dict(found) == {"data": 1, "fsdp": 2, "context": 2, "expert": 1, "tensor": 2}
    for sizes in [(3, 1, 1), (-1, 3, 1), (2, 2, 1), (-1, 16, 1), (-1, 1, 1, 3)]:
        with pytest.raises(ConfigError, match="does not use the 8 devices at hand"):
            make_mesh(*sizes)
    for sizes in [(-1, -1, 1), (0, 1, 1), (-2, 1, 1)]:
        with pytest.raises(ConfigError, match="at most one may be -1"):
            make_mesh(*sizes)


@pytest.mark.parametrize(
    ("sizes", "host", "groups"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2, 4),  # each process its own rows
        ({"data": 2, "fsdp": 2, "tensor": 2}, 1, 4),
        ({"data": 1, "fsdp": 2, "tensor": 2, "context": 2}, 4, 2),
        ({"data": 1, "fsdp": 2, "tensor": 2, "context": 2}, 2, 2),
        ({"data": 1, "fsdp": 2, "tensor": 4}, 1, 2),
        ({"data": 1, "tensor": 8}, 4, 1),
        ({"data": 1, "context": 2, "expert": 4}, 4, 1),
        ({"data": 1, "context": 2, "expert": 4}, 2, None),  # processes 0 and 2 the same
        ({"data": 2, "fsdp": 1, "tensor": 4}, 3, None),
    ],
)
def test_processes_that_hold_the_same_rows(sizes, host, groups):
    if groups is not None:
        assert row_groups(make_mesh(**sizes), host) == groups
        return
    with pytest.raises(ConfigError, match="gives processes some rows in common and others not"):
        row_groups(make_mesh(**sizes), host)


def test_the_mesh_that_samples(monkeypatch):
    home = make_mesh(1, 2, 2, context=2)
    assert dict(rollout_mesh(home).shape) == {"data": 1, "fsdp": 4, "context": 1, "expert": 1, "tensor": 2}
    assert rollout_mesh(make_mesh(2, 2, 2)) == make_mesh(2, 2, 2)
    assert dict(rollout_mesh(home, "tensor=4").shape) == {"data": 2, "fsdp": 1, "context": 1, "expert": 1, "tensor": 4}
    assert rollout_mesh(home, "data=1, tensor=-1").shape["tensor"] == 8
    assert rollout_mesh(home, "tensor=4").devices.ravel().tolist() == home.devices.ravel().tolist()
    assert rollout_mesh(home, "auto", kv_heads=4) == rollout_mesh(home)  # on CPUs
    on_hosts = rollout_mesh(make_mesh(1, 8), "auto", kv_heads=8, host=4)  # on CPUs that stand in for accelerators
    assert (on_hosts.shape["data"], on_hosts.shape["tensor"]) == (2, 4)
    assert rollout_mesh(make_mesh(1, 8), "tensor=8", host=4).shape["tensor"] == 8  # where it is asked for
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    for sizes, kv_heads, expected in [
        ({"fsdp": 8}, 8, {"tensor": 8}),
        ({"fsdp": 8}, 6, {"data": 4, "tensor": 2}),
        ({"fsdp": 2, "context": 2, "expert": 2}, 8, {"expert": 2, "tensor": 4}),
        ({"data": 4, "tensor": 2}, 8, {"data": 4, "tensor": 2}),  # nothing is gathered as it is
    ]:
        shape = rollout_mesh(make_mesh(**{"data": 1} | sizes), "auto", kv_heads).shape
        assert {name: size for name, size in shape.items() if size > 1} == expected
    monkeypatch.undo()
    for text, words in [
        ("tensor=3", "rollout.mesh data=-1, .*tensor=3 does not use the 8 devices"),
        ("tensor", "takes sizes of axes, such as"),
        ("model=8", "names 'model', but a mesh has the axes"),
        ("context=2", "has a context axis"),
    ]:
        with pytest.raises(ConfigError, match=words):
            rollout_mesh(home, text)


def test_experts_that_do_not_divide_are_refused():
    net = Net(dataclasses.replace(EXPERTS, experts=6))
    with pytest.raises(ConfigError, match=r"mesh\.expert is 4, but it must divide the model's 6 experts"):
        init_sharded(net, jax.random.key(0), make_mesh(2, expert=4))


def test_parameters_are_sharded_by_all_but_data():
    """By fsdp, context and expert together where tensor does not shard; experts are apart."""
    shapes = shard_shapes(over(Net(EXPERTS).shapes(), make_mesh(1, 2, context=2, expert=2)))
    assert shapes["embed/weight"] == (72, 4)
    assert shapes["layers/attention/q/kernel"] == (2, 4, 64)
    assert shapes["layers/mlp/router/kernel"] == (2, 4, 8)
    assert shapes["layers/mlp/experts/gate/kernel"] == (2, 4, 8, 24)
    assert shapes["layers/mlp/experts/down/kernel"] == (2, 4, 24, 8)


DENSE = dataclasses.replace(CONFIG, vocab_size=72, width=32, heads=8, kv_heads=4, ffn=48, qk_norm="head")
EXPERTS = dataclasses.replace(DENSE, experts=8, experts_per_token=2, expert_ffn=24)
LAYOUTS = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES)) if math.prod(sizes) == 8]
EVERY_PAIR = [(2, 2, 2, 1, 1), (2, 1, 1, 2, 2), (1, 2, 2, 2, 1), (1, 2, 2, 1, 2)]  # of axes is in one of them


def cases(quick: dict) -> list:
    """Every layout for every model; those that are not quick are marked slow."""
    return [
        pytest.param(
            model, dict(zip(AXES, sizes, strict=True)), marks=() if sizes in quick[model] else pytest.mark.slow,
            id=f"{model}-{'x'.join(map(str, sizes))}",
        )
        for model in ("dense", "experts")
        for sizes in LAYOUTS
    ]  # fmt: skip


@pytest.fixture(scope="module")
def batch():
    """Rows of padding, of two documents, and of a length that neither 4 nor 8 divides."""
    rng = np.random.default_rng(1)
    segments = np.ones((8, 14), np.int32)
    segments[2, :3], segments[3, -2:], segments[4, 5:] = 0, 0, 2
    tokens, weights = rng.integers(0, 72, segments.shape).astype(np.int32), rng.normal(size=segments.shape)
    return tokens, segments, weights.astype(np.float32)


def update_of(net, params, tokens, segments, weights):
    def loss(params):
        logps, entropy = token_logps(net, params, Inputs(tokens, segments))
        return (weights * logps + 0.1 * entropy).sum() / 50, logps

    return jax.value_and_grad(loss, has_aux=True)(params)


class Found(dict):
    """The results of a function of names, made once for each."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def __missing__(self, name):
        self[name] = self.make(name)
        return self[name]


@pytest.fixture(scope="module")
def on_one_device(batch):
    """The parameters of both models, and their update of the batch."""

    def make(name):
        own = Net({"dense": DENSE, "experts": EXPERTS}[name])
        params = jax.jit(own.init)(jax.random.key(0))
        return own, params, jax.jit(update_of, static_argnums=0)(own, params, *batch)

    return Found(make)


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


@pytest.mark.parametrize(("model", "sizes"), cases({"dense": [], "experts": EVERY_PAIR[2:3]}))
def test_the_update_of_one_device(model, sizes, on_one_device, batch, compile_anew):
    """Loss, log-probs and every gradient; nothing is replicated in full, and no matrix gathered along `tensor`."""
    own, params, expected = on_one_device[model]
    mesh = make_mesh(**sizes)
    placed = jax.device_put(params, shardings(params, mesh))
    with jax.set_mesh(mesh):
        rows = rows_to_global(batch, mesh)
        compiled, warnings = compile_anew(jax.jit(update_of, static_argnums=0).lower(own, placed, *rows))
        found = compiled(placed, *rows)
    assert_close(found, expected)
    assert "involuntary full rematerialization" not in warnings
    text = compiled.as_text()
    gathered = set(re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text))
    if sizes["tensor"] in (2, 4):
        assert not gathered & {"32,64", "64,32", "32,48", "48,32", "8,32,24", "8,24,32", "72,32", "32,72"}
    exchanges = len(re.findall(r" all-to-all\(.*f32|f32.* all-to-all\(", text))
    if sizes["context"] > 1 and 4 % (sizes["tensor"] * sizes["context"]) == 0:
        assert exchanges >= 8  # queries, keys, values and outputs, there and back


@pytest.mark.parametrize(
    ("sizes", "masked"), [((2, 2, 2, 1), False), pytest.param((1, 2, 1, 2), True, marks=pytest.mark.slow)]
)
def test_fused_attention_of_a_mesh(sizes, masked):
    """Each device computes its rows and heads, which the context axis shards where it divides them."""
    segments = np.repeat([[0, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0]], 4, axis=0)
    mask, rng = attention_mask(segments), np.random.default_rng(0)
    arrays = [rng.normal(size=(8, 6, *shape)).astype(np.float32) for shape in ((2, 2, 8), (2, 8), (2, 8))]
    expected = outputs_and_gradients(functools.partial(dense, mask, None), *arrays, segments != 0)
    mesh = make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)])
    splash = functools.partial(splash_attention, segments=segments, mask=mask if masked else None, interpret=True)
    with jax.set_mesh(mesh):
        found = outputs_and_gradients(splash, *rows_to_global((*arrays, segments != 0), mesh))
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "pay"), [((1, 2, 2, 2), True), ((1, 2, 1, 4), False)], ids=["copies", "mask"])
@pytest.mark.parametrize("name", chosen.CONFIGS)
def test_chosen_tokens_of_a_mesh(name, sizes, pay, monkeypatch):
    """Blocks of queries have tokens of every shard of the positions; heads that the mesh divides have complete rows."""
    net, (tokens, segments) = Net(chosen.CONFIGS[name]), chosen.rows(44)
    params, mesh = jax.jit(net.init)(jax.random.key(0)), make_mesh(*sizes)
    expected = chosen.logits_and_gradients(net, params, tokens, segments)
    for module in chosen.MODULES:
        monkeypatch.setattr(module, "copies_pay", lambda *_: pay)
    monkeypatch.setattr(compressed_attention, "SMALLEST_BLOCK", 4)
    monkeypatch.setattr(query_blocks, "BLOCK_BYTES", 1)  # blocks of eight
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(params, mesh))
        found = chosen.logits_and_gradients(net, placed, tokens, segments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-3), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sinks", "latents"])
def test_decode_attention_of_a_mesh(kind):
    """Each device computes its rows, and its heads of queries where all of these read one head of latents."""
    rng, keys = np.random.default_rng(0), 2 if kind == "sinks" else 1
    shapes = ((4, 2, keys, 1, 4, 24), *[(4, keys, 8, 24)] * keys, *[(4, 2, keys, 8, 24)] * keys)
    q, *stored = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    own = {"sinks": {"sinks": rng.normal(size=(2, 4)).astype(np.float32)}, "latents": {"latent": 16}}[kind]
    attend = jax.jit(functools.partial(decode_attention, interpret=True), static_argnames="latent")
    arrays = (q, stored[:keys], stored[keys:], np.arange(4), np.arange(8).reshape(4, 2))
    expected = attend(*arrays, **own)
    with jax.set_mesh(make_mesh(2, tensor=2, devices=jax.devices()[:4])):
        assert_close(attend(*arrays, **own), expected)


def test_tokens_are_drawn_where_their_logits_are(monkeypatch):
    """As on GPUs: devices that share the vocabulary send each other sums of blocks, and no logits."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rng, mesh = np.random.default_rng(0), make_mesh(2, tensor=4)
    logits, uniforms = rng.normal(size=(64, 1200)).astype(np.float32) * 3, rng.random(64).astype(np.float32)
    draw = jax.jit(functools.partial(sample, sampling=SamplingParams(0.7)))
    expected = draw(logits, uniforms)
    draw.clear_cache()
    with jax.set_mesh(mesh):
        placed = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data", "tensor")))
        assert_close(draw(placed, uniforms), expected)
        text = draw.lower(placed, uniforms).compile().as_text()
    gathered = [math.prod(map(int, x.split(","))) for x in re.findall(r"f32\[([\d,]+)\]\S* all-gather", text)]
    assert 0 < max(gathered) <= 32 * 4 * 3, gathered  # of 3 blocks of each device


@pytest.mark.parametrize("count", [pytest.param(13, marks=pytest.mark.slow), 9])
def test_log_probs_of_columns_that_devices_share(count):
    """Devices share the columns of each chunk, and of the parts of the last one, of rows of any length."""
    rng = np.random.default_rng(0)
    hidden, kernel, weights = (rng.normal(size=size).astype(np.float32) for size in ((4, 13, 8), (8, 32), (4, 13)))
    targets = rng.integers(0, 32, (4, 13))
    weights[:, count:] = 0.0

    def loss(hidden, kernel, targets, weights):
        return (weights * chunked_logps(hidden, kernel, targets, 1.0, smoothing=0.1, count=np.int32(count))[0]).sum()

    arrays, gradients = (hidden, kernel, targets, weights), jax.jit(jax.value_and_grad(loss, (0, 1)))
    expected = gradients(*arrays)
    with jax.set_mesh(make_mesh(2, context=2, devices=jax.devices()[:4])):
        assert_close(gradients(*arrays), expected)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 2, 2, 2)], ids=str)
def test_the_distance_from_another_vocabulary(sizes, monkeypatch):
    """Sorted and matched over vocabularies that devices share, as on one: value and gradients, in several chunks."""
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", 3 * 8 * 24)
    rng = np.random.default_rng(0)
    hidden, kernel, other, head = (rng.normal(size=x).astype("f") for x in ((8, 8, 16), (16, 24), (8, 12, 8), (8, 40)))
    tokens, last = (rng.integers(low, high, size=(8, n)) for low, high, n in ((0, 40, 12), (4, 12, 8)))
    ends, matches = np.where(rng.random((8, 12)) < 0.3, 5, -1), np.full(24, -1)
    matches[:15] = rng.permutation(40)[:15]
    prefix, weights = -rng.exponential(size=(8, 8)).astype("f"), rng.random((8, 8)).astype("f")

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def total(hidden, kernel, prefix):
        aligned, earlier = at_ends(other, head, tokens, ends, last, 4, 1.3, None)
        teachers = (AlignedDistributions(aligned, head, earlier, None, known) for known in (None, matches))
        options = UldOptions(0.8, 1.3, beta=0.5)
        return sum((weights * chunked_uld(hidden, kernel, prefix, teacher, options)).sum() for teacher in teachers)

    expected = total(hidden, kernel, prefix)
    total.clear_cache()
    with jax.set_mesh(make_mesh(*sizes)):
        assert_close(total(hidden, kernel, prefix), expected)


@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 4}, {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
@pytest.mark.slow
def test_the_update_with_grouped_products(sizes, on_one_device, batch, monkeypatch):
    """As on accelerators: each device multiplies the tokens of its own experts only."""
    monkeypatch.setattr(moe, "dense", moe.grouped)
    own, params, expected = on_one_device["experts"]
    mesh = make_mesh(**sizes)
    placed = jax.device_put(params, shardings(params, mesh))
    with jax.set_mesh(mesh):
        found = jax.jit(update_of, static_argnums=0)(own, placed, *rows_to_global(batch, mesh))
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dense", "grouped"])
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "expert": 2, "tensor": 2}, {"context": 2, "expert": 4}], ids=str)
def test_adapters_of_experts_are_those_of_one_device(sizes, way, batch, monkeypatch):
    """Sharded as the matrices they belong to; log-probs, gradients, and what is merged for the sampler."""
    monkeypatch.setattr(moe, "dense", getattr(moe, way))
    config = lora.LoraConfig(4, targets=lora.parse_targets(["q", "experts"]))
    net = Net(dataclasses.replace(EXPERTS, lora=config))
    params = jax.tree.map(lambda x: x + 0.02, jax.jit(net.init)(jax.random.key(0)))

    def update(params, batch):
        (tokens, segments, weights), (frozen, adapters) = batch, lora.split(params)

        def loss(adapters):
            logps, _ = token_logps(net, lora.combine(frozen, adapters), Inputs(tokens, segments))
            return (weights * logps).sum() / 50, logps

        return jax.value_and_grad(loss, has_aux=True)(adapters)

    expected = jax.jit(update)(params, batch)
    mesh = make_mesh(1, **sizes)
    placed = jax.device_put(params, shardings(params, mesh))
    parts = shard_shapes(placed["layers"]["mlp"]["experts"])
    fsdp, tensor, own = (sizes.get(axis, 1) for axis in ("fsdp", "tensor", "expert"))
    inner = 32 // fsdp // sizes.get("context", 1)
    assert parts["gate_up/lora_a"] == (2, 8 // own, inner, 4)
    assert parts["gate_up/lora_b"] == (2, 8 // own, 4, 48 // tensor)
    assert parts["down/lora_a"] == (2, 8 // own, 24 // tensor, 4)
    assert parts["down/lora_b"] == (2, 8 // own, 4, inner)
    with jax.set_mesh(mesh):
        assert_close(jax.jit(update)(placed, rows_to_global(batch, mesh)), expected)
        merged = jax.jit(lambda params: lora.merge(params, config))(placed)
    assert_close(merged, lora.merge(params, config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way", "channels"), [("int8", "grouped", 128), ("nf4", "dense", 24), ("mxfp4", "grouped", 128)]
)
def test_quantised_experts_are_those_of_one_device(kind, way, channels, batch, monkeypatch):
    """Codes sharded as the matrices, scales too where they divide; the gradient of what is before them."""
    monkeypatch.setattr(moe, "dense", getattr(moe, way))
    net = Net(dataclasses.replace(EXPERTS, expert_ffn=channels, quantize_experts=kind))
    params = jax.jit(net.init)(jax.random.key(0))

    def update(embed, params, batch):
        tokens, segments, weights = batch

        def loss(embed):
            logps, _ = token_logps(net, {**params, "embed": embed}, Inputs(tokens, segments))
            return (weights * logps).sum() / 50, logps

        return jax.value_and_grad(loss, has_aux=True)(embed)

    expected = jax.jit(update)(params["embed"], params, batch)
    mesh = make_mesh(1, 2, expert=2, tensor=2)
    placed = jax.device_put(params, shardings(params, mesh))
    parts, packed = shard_shapes(placed["layers"]["mlp"]["experts"]), 1 if kind == "int8" else 2
    assert parts["gate/kernel/codes"] == (2, 4, 16 // packed, channels // 2)
    assert parts["down/kernel/codes"] == (2, 4, channels // 2 // packed, 16)
    scales = {"int8": 1, "nf4": 3, "mxfp4": 2}[kind]  # 3 of 8 inputs: the device's own 12 begin within the second
    assert parts[f"down/kernel/{'scales' if kind == 'mxfp4' else 'absmax'}"] == (2, 4, scales, 16)
    with jax.set_mesh(mesh):
        assert_close(jax.jit(update)(placed["embed"], placed, rows_to_global(batch, mesh)), expected)


@pytest.fixture(scope="module")
def samples(on_one_device):
    """Six prompts, and what each model samples for them on one device."""
    rng = np.random.default_rng(0)
    prompts, segments = rng.integers(0, 72, (6, 6)).astype(np.int32), np.ones((6, 6), np.int32)
    segments[1, :3] = 0

    def make(name):
        own, params, _ = on_one_device[name]
        engine = Engine(SamplingParams(temperature=0.9), 3, 9, net=own, eos=(5, 6), chunk=9)
        return engine, engine.generate(params, prompts, segments, jax.random.key(1))

    return (prompts, segments), Found(make)


@pytest.mark.parametrize(("model", "sizes"), cases({"dense": [], "experts": [(2, 1, 1, 2, 2)]}))
def test_the_samples_of_one_device(model, sizes, on_one_device, samples):
    """Token for token, from parameters that lie as they do in training; six rows fill up what they do not divide."""
    check_samples(model, make_mesh(1, 2, 2, context=2), sizes, on_one_device, samples)


def check_samples(model, home, sizes, on_one_device, samples):
    _, params, _ = on_one_device[model]
    prompts, (engine, expected) = samples[0], samples[1][model]
    text = (
        None if sizes is None else ",".join(f"{axis}={n}" for axis, n in sizes.items() if axis != "context" and n > 1)
    )
    if sizes is not None and sizes["context"] > 1:
        pytest.skip("completions are sampled one position at a time")
    watch = Stopwatch()
    own = ReshardedEngine(**vars(engine), mesh=rollout_mesh(home, text), train_mesh=home, watch=watch)
    placed = jax.device_put(params, shardings(params, home))
    with jax.set_mesh(home):
        key = jax.device_put(jax.random.key(1), NamedSharding(home, PartitionSpec()))  # as those of training lie
        found = own.generate(placed, *rows_to_global(prompts, home), key)
    for name in ("tokens", "segments", "mask", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.sample_logps, expected.sample_logps, atol=1e-5)
    assert found.tokens.sharding.mesh == home
    assert watch.totals["reshard"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_the_samples_of_a_mesh_with_context(model, on_one_device, samples):
    """Its context part of fsdp: parameters stay where they are."""
    check_samples(model, make_mesh(1, 2, context=4), None, on_one_device, samples)
    _, params, _ = on_one_device[model]
    home = make_mesh(1, 2, context=4)
    places, others = shardings(params, home), shardings(params, rollout_mesh(home))
    for x, place, other in zip(*map(jax.tree.leaves, (params, places, others)), strict=True):
        assert place.devices_indices_map(x.shape) == other.devices_indices_map(x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 2, 2), (2, 1, 1, 4)], ids=str)
def test_packed_updates_on_every_mesh(sizes):
    """Each row shard packs its own rows, which the context axis splits; all make the same number of steps."""
    config, rows = config_of("grpo", algorithm__beta=0.1, batch__microbatch_tokens=80), online_batch()
    batch = jax.tree.map(lambda x: np.concatenate([x, x[:GROUP]]), rows)
    found = []
    for mesh, packs in ((mesh_of(1, 1, 1), False), (make_mesh(*sizes), True)):
        with jax.set_mesh(mesh):
            optimizer, objective = make_optimizer(config), objective_of(config, Net(PACKED))
            params = Net(PACKED).init(jax.random.key(0))
            state = init_state(jax.device_put(params, shardings(params, mesh)), optimizer, mesh)
            own = rows_to_global(batch, mesh)
            if packs:
                arrays = (batch.inputs.tokens, batch.inputs.segments, batch.mask)
                shard = TypicalRows(*(x[: len(x) // row_shards(mesh)] for x in arrays))
                own = packer_of(config, PACKED, mesh, objective, shard)(own)
                assert own.inputs.layout.row_idx.sharding.shard_shape(own.inputs.layout.row_idx.shape)[0] == 1
            state, metrics = make_update(objective, optimizer, update_spec(config), mesh)(state, own)
            found.append(jax.device_get((state.params, metrics)))
    (params, metrics), (packed, packed_metrics) = found
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), packed, params)
    for name in metrics:
        np.testing.assert_allclose(packed_metrics[name], metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_rows_are_written_where_they_are(net, params):
    """Devices that hold all parameters send nothing while they decode, but whether rows are left."""
    engine, mesh = Engine(SamplingParams(), 3, 9, net=net, eos=(5, 6), chunk=4), make_mesh()
    prompts = np.ones((8, 6), np.int32)
    with jax.set_mesh(mesh):
        whole = engine.decoding_params(jax.device_put(params, NamedSharding(mesh, PartitionSpec())))
        keys = row_keys(jax.random.key(0), np.uint32(0), 24)
        bank, rows = engines.prefill(engine, whole, *rows_to_global((prompts, prompts), mesh), keys)
        grid = Scheduler(1, 3, 8, 3).grid
        seated = assign(engine.decoder, bank, rows, keys, grid, 4)
        decode = engines.decode_chunk.lower(engine, whole, *seated, 4)
        read = engines.read_observations.lower(engine, whole, *seated, np.zeros((8, 2), np.int32), 4)
    for lowered in (decode, read):
        compiled = lowered.compile().as_text()
        sent = re.findall(r"= (\S+) (?:all-\w+|collective-permute|reduce-scatter)\(", compiled)
        assert set(sent) <= {"s32[]"}


@pytest.mark.slow
def test_the_conversations_of_one_device(net, params, monkeypatch):
    """Observation tokens are read on the devices of their rows and heads."""
    monkeypatch.setattr(engines, "MIN_TOKENS", 2)
    prompts, key = np.random.default_rng(3).integers(0, 64, (4, 6)).astype(np.int32), jax.random.key(2)
    segments, mesh = np.ones((4, 6), np.int32), make_mesh(2, 2, 2)
    engine = Engine(SamplingParams(), 3, 24, net=net, eos=tuple(range(12)), chunk=4, slots=8)
    expected = engine.generate(params, prompts, segments, key, turn_server=Echo(words=9))
    reads, decodes = engines.read_observations._cache_size(), engines.decode_chunk._cache_size()
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(params, mesh))
        found = engine.generate(placed, *rows_to_global((prompts, segments), mesh), key, turn_server=Echo(words=9))
    assert engines.read_observations._cache_size() > reads and engines.decode_chunk._cache_size() > decodes
    for name in ("tokens", "segments", "mask", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.sample_logps, expected.sample_logps, atol=1e-5)


def test_empty_row_caches_are_sharded():
    """On every device the shard of its own rows and heads, from the start: full caches would not fit."""
    mesh = make_mesh(data=1, fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        prompts = jax.device_put(
            np.ones((3, 8, 2, 5, 4), np.float32), jax.NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
        )
        rows = jax.jit(lambda k: Attention.empty_cache(KeyValues(k, k), 2, 16))(prompts)
    assert rows.k.shape == (3, 8, 2, 2, 4, 16) and rows.k.addressable_shards[0].data.shape == (3, 2, 2, 1, 4, 16)
    assert rows.v.shape == (3, 8, 2, 2, 16, 4) and rows.v.addressable_shards[0].data.shape == (3, 2, 2, 1, 16, 4)


def test_rows_share_the_images_of_their_prompt():
    """As often as shards of the mesh have rows of it, in a batch and in minibatches, whose groups are shuffled."""
    mesh, shards, prompts, size = make_mesh(4, devices=jax.devices()[:4]), 4, 4, 6
    features = np.tile(np.arange(prompts, dtype=np.float32)[:, None, None], (2, 3))
    rows = prompts * size
    names = np.repeat(np.arange(prompts), size)

    def check(batch, expected, held):
        images = batch.inputs.images
        assert images.features.shape == (shards, held, 2, 3) and images.pixels is None
        own = np.asarray(images.features)[np.arange(batch.rows) // (batch.rows // shards), images.source]
        np.testing.assert_array_equal(own, np.broadcast_to(expected[:, None, None], own.shape))
        np.testing.assert_array_equal(np.asarray(batch.inputs.tokens)[:, 0], expected)
        split = jax.jit(lambda batch: [microbatches_of(batch, 3, shards).take(number) for number in range(3)])
        for one in split(batch):
            own = np.asarray(one.inputs.images.features)[np.arange(one.rows) // (one.rows // shards), images_of(one)]
            np.testing.assert_array_equal(own[:, 0, 0], np.asarray(one.inputs.tokens)[:, 0])

    def images_of(batch):
        return np.asarray(batch.inputs.images.source)

    with jax.set_mesh(mesh):
        images = Images(None, jnp.ones(rows, jnp.int32))
        images = share_images(images, None, features, rows, shards)
        batch = Batch(Inputs(jnp.asarray(names)[:, None], images=images), None)
        check(batch, names, 1)
        order = np.array([2, 0])[:, None] * size + np.arange(size)
        check(jax.jit(rows_at, static_argnums=(2, 3))(batch, order.reshape(-1), size, mesh), np.repeat([2, 0], size), 1)
        order = np.array([2, 3, 1])[:, None] * size + np.arange(size)[:4]  # as two of six were left out
        check(jax.jit(rows_at, static_argnums=(2, 3))(batch, order.reshape(-1), 4, mesh), np.repeat([2, 3, 1], 4), 3)
