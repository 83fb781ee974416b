"""Training a mixture of experts: the auxiliary loss of its routers, its metric, and routers that stay as they are."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError, assign, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import load_model
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.moe import balance_loss
from jaxrl_llm.models.net import Net, RecordingNet
from jaxrl_llm.training.objectives.router import with_router_loss
from jaxrl_llm.training.objectives.sft import SFTSpec, sft
from jaxrl_llm.training.setup.models import build_critic, build_model, check_trainable
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.warnings import experts_left_out

CONFIG = ModelConfig(
    vocab_size=320, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, init_scale=0.3, qk_norm="head",
    experts=4, experts_per_token=2, expert_ffn=12, router_aux_loss_coef=0.5,
)  # fmt: skip


def plain_sft(net):
    return sft(SFTSpec(0.0), net)


@pytest.fixture(scope="module")
def net():
    return Net(CONFIG)


@pytest.fixture(scope="module")
def params(net):
    return jax.jit(net.init)(jax.random.key(0))


def rows():
    rng = np.random.default_rng(0)
    segments = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1] * 6, [0, 1, 1, 1, 1, 1]], np.int32)
    mask = jnp.asarray((segments > 0) & (np.arange(6) > 2), jnp.float32)
    return Batch(Inputs(jnp.asarray(rng.integers(0, 320, (4, 6))), jnp.asarray(segments)), mask)


def test_the_objective_adds_the_auxiliary_loss(net, params):
    """One forward pass gives both: the value and gradient are those of the two losses added up by hand."""
    plain, with_router = plain_sft(net), with_router_loss(plain_sft, net)

    def by_hand(params, batch):
        found = []
        RecordingNet(CONFIG, found.append).bind(params).hidden(batch.inputs)
        return plain.loss(params, batch)[0] + 0.5 * balance_loss(found[0])

    batch = with_router.prepare(rows())
    (value, metrics), gradients = jax.jit(jax.value_and_grad(with_router.loss, has_aux=True))(params, batch)
    expected, expected_gradients = jax.jit(jax.value_and_grad(by_hand))(params, plain.prepare(rows()))
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert 1.9 < float(metrics["aux_loss"]) < 4.0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients, expected_gradients)


def test_microbatches_weigh_by_their_tokens(net, params):
    objective = with_router_loss(plain_sft, net)
    batch = objective.prepare(rows())
    loss = jax.jit(objective.loss)
    halves = (slice(0, 2), slice(2, 4))
    parts = [float(loss(params, batch.take(half))[1]["aux_loss"]) for half in halves]
    alone = [float(loss(params, objective.prepare(rows().take(half)))[1]["aux_loss"]) for half in halves]
    np.testing.assert_allclose(parts, [alone[0] * 8 / 19, alone[1] * 11 / 19], rtol=1e-6)


def test_a_dense_model_has_no_routers():
    dense = Net(ModelConfig(vocab_size=8, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8))
    assert with_router_loss(lambda net: "objective", dense) == "objective"
    for key, value in (("router_aux_loss_coef", 0.1), ("freeze_router", True), ("quantize_experts", "nf4")):
        config = default()
        config.model[key] = value
        with pytest.raises(ConfigError, match="embedded:sort has no experts"):
            objective_of(config, dense)


def write_model(net, params, folder, root):
    """A folder of the model with the tokenizer of the embedded one."""
    hf.save(net, params, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "jaxrl_llm/models/embedded/sort" / name, folder / name)


@pytest.mark.slow
def test_a_critic_without_adapters_has_no_quantised_experts(net, params, tmp_path, root):
    """One of critic.path may be dense: what is quantised is known when it is read."""
    write_model(net, params, tmp_path / "mixture", root)
    config = load_config_file(f"{root / 'configs/ppo.py'}:tiny")
    config.critic.shared, config.critic.lora_rank, config.lora.rank = False, 0, 2
    config.model.quantize_experts, config.critic.warmup_steps = "mxfp4", 0
    with pytest.raises(ConfigError, match=r"critic.lora_rank is 0, but model.quantize_experts = 'mxfp4', and quant"):
        validate(config)
    config.critic.path = "embedded:sort"
    validate(config)
    mesh = make_mesh(devices=jax.devices()[:1])
    policy = load_model("embedded:sort")
    with jax.set_mesh(mesh):
        assert build_critic(config, policy, mesh).net.config.quantized == "none"
        config.critic.path = str(tmp_path / "mixture")
        with pytest.raises(ConfigError, match=r"critic.path = .*mixture' is read as mxfp4 \(experts alone\), and "):
            build_critic(config, policy, mesh)
    config.critic.path, config.model.quantize = "embedded:sort", "nf4"
    with pytest.raises(ConfigError, match=r"critic.lora_rank is 0, but model.quantize = 'nf4'"):
        validate(config)


@pytest.mark.slow
def test_experts_that_fewer_bits_and_adapters_leave_out_are_named_at_the_start(
    net, params, tmp_path, root, monkeypatch
):
    """With their bytes: 2 layers x 4 experts x 3 matrices of 16 x 12 numbers are 18,432 bytes in float32."""
    write_model(net, params, tmp_path / "model", root)
    mesh = make_mesh(devices=jax.devices()[:1])

    def configured(algorithm, **settings):
        config = load_config_file(f"{root / 'configs' / algorithm}.py:tiny")
        config.model.path, config.eval.every = str(tmp_path / "model"), -1
        for name, value in settings.items():
            assign(config, name.replace("__", "."), value)
        return config

    def warnings(**settings):
        config = configured("sft", **settings)
        with jax.set_mesh(mesh):
            return " ".join(experts_left_out(config, build_model(config, mesh)))

    assert warnings() == warnings(lora__rank=2, lora__targets=("q", "v")) == ""
    assert warnings(lora__rank=2, lora__targets=("all-linear", "experts")) == ""
    assert "lora.targets: experts have no adapters and are not trained: 1.84e-05 of" in warnings(lora__rank=2)
    left = {"model__quantize": "int8", "model__quantize_experts": "none"}
    said = warnings(lora__rank=2, lora__targets=("q",), **left)
    assert "model.quantize_experts is none, which leaves the experts as they are: 1.84e-05 of" in said
    assert "model.param_dtype=bfloat16 halves them" in said
    said = warnings(model__matmul_dtype="int8")
    assert "model.matmul_dtype = 'int8' leaves the matmuls of experts in float32: 1.84e-05 of" in said
    half = warnings(lora__rank=2, model__param_dtype="bfloat16", **left)
    assert "as they are: 9.22e-06 of" in half and "halves them" not in half
    assert warnings(lora__rank=2, lora__targets=("q",), model__quantize="int8") == ""
    config = configured("sft", model__quantize_experts="nf4")
    with jax.set_mesh(mesh):
        model = build_model(config, mesh)
    with pytest.raises(ConfigError, match=r"model.quantize_experts is nf4 \(experts alone\), and quantised mat"):
        check_trainable(config, model)
    for settings in ({"model__qat": "int8"}, {}):  # the sampler has the experts in 8 bits too
        config = configured("grpo", rollout__weights_dtype="int8", **settings)
        with jax.set_mesh(mesh):
            model = build_model(config, mesh)
        assert experts_left_out(config, model) == []
    with monkeypatch.context() as on_tpu:
        on_tpu.setattr(jax, "default_backend", lambda: "tpu")  # there it has not
        (line,) = experts_left_out(config, model)
    assert "rollout.weights_dtype = 'int8' leaves the experts in float32: 1.84e-05 GB" in line


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_training_from_the_configuration(net, params, tmp_path, root, frozen):
    """A folder in, a folder out: the auxiliary loss is logged, falls, and a frozen router comes back bit for bit."""
    write_model(net, params, tmp_path / "model", root)
    config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
    config.output_dir, config.model.path = str(tmp_path / "run"), str(tmp_path / "model")
    config.total_steps, config.eval.every, config.batch.microbatch_rows = 8, -1, 2
    config.optimizer.learning_rate, config.optimizer.weight_decay, config.optimizer.schedule = 1e-2, 0.1, "constant"
    config.model.router_aux_loss_coef, config.model.freeze_router = 1.0, frozen
    config.logging.backends = ("jsonl",)
    jaxrl_llm.train(config)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["aux_loss"] for line in lines if "aux_loss" in line]
    assert len(losses) == 8
    trained = load_model(tmp_path / "run/hf")
    assert trained.net.config.router_aux_loss_coef == 1.0
    before, after = (x["layers"]["mlp"]["router"]["kernel"] for x in (params, trained.params))
    if frozen:
        np.testing.assert_array_equal(before, after)
    else:
        assert losses[-1] < losses[0]
        assert np.abs(before - after).max() > 1e-3


@pytest.mark.slow
def test_grpo_trains_a_mixture_of_experts(net, params, tmp_path, root):
    """Sampling, scoring and learning with experts."""
    write_model(net, params, tmp_path / "model", root)
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.model.path = str(tmp_path / "run"), str(tmp_path / "model")
    config.logging.backends = ("jsonl",)
    jaxrl_llm.train(config)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "aux_loss" in line]
    assert len(measured) == config.total_steps
    assert all(np.isfinite(line["loss"]) and line["aux_loss"] > 1.5 for line in measured)
