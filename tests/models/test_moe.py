"""Mixtures of experts: routing, both ways to compute them, the auxiliary loss, frozen routers, tensor layouts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import load_balancing_loss_func as ernie_balance_loss
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import load_model
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.moe import Experts, MixtureOfExperts, Routing, balance_loss, dense, grouped, one_by_one
from jaxrl_llm.models.net import Net, RecordingNet
from tests.models.oracles import make_oracle

CONFIG = ModelConfig(
    vocab_size=31, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=12, init_scale=0.5,
    experts=4, experts_per_token=2, expert_ffn=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def experts():
    return Experts(CONFIG, nnx.Rngs(0))


def routed(tokens: int):
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(3)[:2] for _ in range(tokens)])  # expert 3 gets nothing
    return jnp.asarray(rng.normal(size=(tokens, 8)), jnp.float32), jnp.asarray(rng.random((tokens, 2))), chosen


def by_hand(experts, x, weights, chosen):
    gate, up, down = (np.asarray(part.kernel[...]) for part in (experts.gate, experts.up, experts.down))
    out = np.zeros_like(x)
    for token, one in enumerate(np.asarray(x)):
        for weight, e in zip(weights[token], chosen[token], strict=True):
            inner = one @ gate[e]
            out[token] += weight * ((inner / (1 + np.exp(-inner)) * (one @ up[e])) @ down[e])
    return out


@pytest.mark.parametrize("way", [dense, grouped])
def test_experts_compute_the_weighted_sum(experts, way):
    x, weights, chosen = routed(7)
    found = jax.jit(functools.partial(experts.compute, way))(x, weights, jnp.asarray(chosen))
    np.testing.assert_allclose(found, by_hand(experts, x, weights, chosen), atol=1e-5)


@pytest.mark.parametrize("way", [dense, grouped])
def test_weighted_inputs(way):
    """The sum of what experts make of a token times its weight."""
    experts = Experts(dataclasses.replace(CONFIG, router_on_inputs=True), nnx.Rngs(0))
    x, weights, chosen = routed(7)
    found = jax.jit(functools.partial(experts.compute, way))(x, weights, jnp.asarray(chosen))
    ones = np.ones((7, 1))
    each = (by_hand(experts, x * weights[:, i : i + 1], ones, chosen[:, i : i + 1]) for i in range(2))
    np.testing.assert_allclose(found, sum(each), atol=1e-5)


@pytest.mark.parametrize("way", [dense, grouped])
def test_without_gates(way):
    """The sum of down(relu(up(x))^2) of each token's experts."""
    experts = Experts(dataclasses.replace(CONFIG, ffn_gate=False, activation="relu2"), nnx.Rngs(0))
    x, weights, chosen = routed(7)
    up, down = (np.asarray(part.kernel[...]) for part in (experts.up, experts.down))
    each = np.einsum("mef,efd->med", np.maximum(np.einsum("md,edf->mef", x, up), 0) ** 2, down)
    expected = (np.take_along_axis(each, chosen[..., None], axis=1) * weights[..., None]).sum(1)
    found = jax.jit(functools.partial(experts.compute, way))(x, weights, chosen)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert set(nnx.to_pure_dict(nnx.state(experts))) == {"up", "down"}


def test_experts_narrower_than_the_model():
    """They read a map of the tokens, and another one maps their sum; router and shared expert read the tokens."""
    config = dataclasses.replace(CONFIG, expert_width=5, shared_expert_ffn=3)
    layer = MixtureOfExperts(config, nnx.Rngs(0))
    assert layer.narrow is not None and layer.widen is not None and layer.shared is not None
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)), jnp.float32)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(layer.router(x)), 2)
    routed = by_hand(layer.experts, np.asarray(layer.narrow(x)), weights, chosen)
    expected = routed @ np.asarray(layer.widen.kernel[...]) + layer.shared(x)
    np.testing.assert_allclose(layer(x)[0], expected, atol=1e-5)


def test_zero_experts_give_a_token_as_it_is():
    """Two of them, behind three that compute: each adds the token times its weight, and is counted as others are."""
    config = dataclasses.replace(CONFIG, experts=3, zero_experts=2, experts_per_token=3, router_correction=True)
    layer = MixtureOfExperts(config, nnx.Rngs(0))
    assert layer.router.kernel.shape == (8, 5) and layer.experts.up.kernel.shape[0] == 3
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)), jnp.float32)
    weights, chosen = (np.asarray(a) for a in jax.lax.top_k(jax.nn.softmax(layer.router(x)), 3))
    assert (chosen >= 3).any() and (chosen < 3).any()
    zero = np.where(chosen >= 3, weights, 0).sum(-1, keepdims=True)
    computed = by_hand(layer.experts, np.asarray(x), np.where(chosen < 3, weights, 0), np.minimum(chosen, 2))
    out, found, routing = layer(x, jnp.ones(6))
    np.testing.assert_array_equal(found, chosen)
    np.testing.assert_allclose(out, computed + zero * x, atol=1e-5)
    np.testing.assert_array_equal(routing.counts, np.bincount(chosen.reshape(-1), minlength=5))
    assert routing.probabilities.sum() == pytest.approx(6)


def test_both_ways_have_the_same_gradients(experts):
    x, weights, chosen = routed(7)
    graph, state = nnx.split(experts)

    def gradients(way):
        def loss(state, x, weights):
            return (nnx.merge(graph, state).compute(way, x, weights, jnp.asarray(chosen)) ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(state, x, weights)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradients(dense), gradients(grouped))


def test_top_k_weights_sum_to_one_only_where_normalised():
    """With the outputs of all experts alike, the output is the sum of the weights."""
    for normalize in (True, False):
        layer = MixtureOfExperts(dataclasses.replace(CONFIG, normalize_top_k=normalize), nnx.Rngs(0))
        for part in (layer.experts.gate, layer.experts.up, layer.experts.down):
            part.kernel[...] = jnp.broadcast_to(part.kernel[...][:1], part.kernel[...].shape)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)), jnp.float32)
        probabilities = jax.nn.softmax(x @ layer.router.kernel[...])
        total = np.ones(5) if normalize else np.sort(probabilities)[:, -2:].sum(-1)
        one = by_hand(layer.experts, x, np.ones((5, 1)), np.zeros((5, 1), int))
        np.testing.assert_allclose(layer(x)[0], one * total[:, None], atol=1e-5)


def test_balance_loss_by_hand():
    """Even use gives k; all tokens to the same k experts, which the router is sure of, gives E."""
    even = Routing(jnp.full(4, 5.0), jnp.full(4, 2.5), jnp.array(10.0))
    assert balance_loss(even) == pytest.approx(2.0)
    same = Routing(jnp.array([10.0, 10.0, 0, 0]), jnp.array([5.0, 5.0, 0, 0]), jnp.array(10.0))
    assert balance_loss(same) == pytest.approx(4.0)
    assert balance_loss(Routing(jnp.zeros(4), jnp.zeros(4), jnp.array(0.0))) == 0.0


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_balance_loss_equals_transformers_and_sees_no_padding(scan_layers):
    net = Net(dataclasses.replace(CONFIG, scan_layers=scan_layers))
    params = jax.jit(net.init)(jax.random.key(0))
    rng = np.random.default_rng(1)
    tokens, segments = rng.integers(0, 31, (2, 6)), np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 2, 2, 0]])

    def loss(params, tokens):
        found = []
        RecordingNet(net.config, found.append).bind(params).hidden(Inputs(tokens, jnp.asarray(segments)))
        (routing,) = found
        return balance_loss(routing), routing

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, routing), gradients = run(params, jnp.asarray(tokens))
    assert routing.tokens == 2 * (segments > 0).sum()  # of two layers
    assert routing.counts.sum() == 2 * routing.tokens
    assert np.abs(gradients["layers"]["mlp"]["router"]["kernel"]).min(axis=(1, 2)).max() > 0
    others = jnp.where(segments > 0, tokens, 30)
    assert run(params, others)[0][0] == pytest.approx(float(value), rel=1e-6)

    @jax.jit
    def router_logits(params):
        model, logits = net.unrolled().bind(params), []
        for block in model.layers:
            route = block.mlp._route
            block.mlp._route = lambda x, route=route: logits.append(route(x)) or logits[-1]
        model.hidden(Inputs(jnp.asarray(tokens), jnp.asarray(segments)))
        return logits

    logits = router_logits(params)
    of_layers = tuple(torch.tensor(np.asarray(x)).reshape(-1, 4) for x in logits)
    expected = load_balancing_loss_func(of_layers, 4, 2, attention_mask=torch.tensor(segments > 0))
    assert float(value) == pytest.approx(float(expected), rel=1e-5)


def test_a_corrections_choices_do_not_count_in_the_balance_loss():
    """Of ERNIE 4.5, whose loss in transformers counts the experts that the router prefers by itself."""
    config = dataclasses.replace(CONFIG, router_correction=True)
    module = MixtureOfExperts(config, nnx.Rngs(0))
    module.correction[...] = jnp.array([1.0, 0.0, 0.0, 0.0])
    x, counted = jax.random.normal(jax.random.key(1), (3, 5, config.width)), jnp.ones((3, 5)).at[0, :2].set(0)
    _, chosen, routing = jax.jit(lambda x: module(x, counted))(x)
    assert (np.asarray(chosen) == 0).any(-1).all() and float(routing.counts[0]) < float(routing.tokens) == 13
    expected = ernie_balance_loss(
        (torch.tensor(np.asarray(module.router(x))).reshape(-1, 4),), 4, 2, torch.tensor(np.asarray(counted))
    )
    assert float(balance_loss(routing)) == pytest.approx(float(expected), rel=1e-6)


def test_probabilities_of_sigmoids_are_shares_in_the_balance_loss():
    """DeepSeek-V3's eq. 17 to 20, by hand; a softmax of the logits, as in transformers, is another number."""
    module = MixtureOfExperts(dataclasses.replace(CONFIG, router_sigmoid=True), nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 6, CONFIG.width))
    _, _, routing = jax.jit(lambda x: module(x, jnp.ones((1, 6))))(x)
    scores = 1 / (1 + np.exp(-np.asarray(module.router(x), np.float64)[0]))
    sent = np.zeros(4)
    np.add.at(sent, np.argsort(scores, axis=-1)[:, -2:], 1 / 6)
    expected = 4 * sent @ (scores / scores.sum(-1, keepdims=True)).mean(0)
    assert float(balance_loss(routing)) == pytest.approx(expected, rel=1e-5)


def test_experts_that_a_hash_chooses_have_no_part_in_the_balance_loss():
    module = MixtureOfExperts(dataclasses.replace(CONFIG, hash_layers=(0,)), nnx.Rngs(0))
    x, tokens = jax.random.normal(jax.random.key(1), (1, 6, CONFIG.width)), jnp.arange(6)[None]
    _, _, routing = jax.jit(lambda x: module(x, jnp.ones((1, 6)), tokens=tokens))(x)
    assert float(routing.tokens) == 0 == float(balance_loss(routing)) and not routing.probabilities.any()


def test_a_frozen_router_gets_no_gradient():
    frozen = Net(dataclasses.replace(CONFIG, freeze_router=True))
    params = jax.jit(frozen.init)(jax.random.key(0))
    tokens = jnp.arange(12).reshape(2, 6)
    loss = jax.jit(lambda net, p: (net.bind(p)(tokens) ** 2).sum(), static_argnums=0)
    gradients = jax.grad(loss, argnums=1)(frozen, params)
    assert not gradients["layers"]["mlp"]["router"]["kernel"].any()
    assert gradients["layers"]["mlp"]["experts"]["up"]["kernel"].any()
    np.testing.assert_array_equal(loss(frozen, params), loss(Net(CONFIG), params))


def test_corrections_keep_their_bits(tmp_path):
    """A router's corrections are fp32 in 16-bit nets and files, as in transformers."""
    oracle = make_oracle("deepseek_v3")
    oracle.save_pretrained(tmp_path / "exact")
    expected = oracle.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"].numpy()
    model = load_model(tmp_path / "exact", param_dtype="bfloat16")
    np.testing.assert_array_equal(model.params["latent_layers"]["mlp"]["correction"][0], expected)
    hf.save(model.net, model.params, tmp_path / "half", hf_config=model.hf_config, dtype="bfloat16")
    written = load_file(tmp_path / "half" / "model.safetensors")
    assert {name for name, x in written.items() if x.dtype == np.float32} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    }
    np.testing.assert_array_equal(written["model.layers.1.mlp.gate.e_score_correction_bias"], expected)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="bfloat16")
    found = again.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(found.numpy(), expected)


def stack_experts(tensors, block: str, gate: str, up: str, down: str):
    """The tensors as some tools write them: the experts of a layer stacked, gate and up in one."""
    found, parts = {}, {}
    for name, x in tensors.items():
        start, inside, rest = name.partition(".experts.")
        if not inside:
            found[name.replace(f".{block}.", ".mlp.")] = x
            continue
        number, part, _ = rest.split(".")
        parts.setdefault(start.replace(f".{block}", ".mlp"), {}).setdefault(part, {})[int(number)] = x
    for start, own in parts.items():
        stacks = {part: np.stack([x[number] for number in sorted(x)]) for part, x in own.items()}
        found[f"{start}.experts.gate_up_proj"] = np.concatenate([stacks[gate], stacks[up]], axis=1)
        found[f"{start}.experts.down_proj"] = stacks[down]
    return found


@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral"])
def test_stacked_experts_are_read_too(variant, tmp_path):
    make_oracle(variant).save_pretrained(tmp_path)
    _, expected = hf.load(tmp_path)
    names = ("mlp", "gate_proj", "up_proj", "down_proj")
    names = ("block_sparse_moe", "w1", "w3", "w2") if variant == "mixtral" else names
    save_file(stack_experts(load_file(tmp_path / "model.safetensors"), *names), tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[1], expected)


def test_experts_weighted_one_by_one_equal_sparsemixer():
    """Phi-3.5-MoE's weights and their gradient, as transformers evaluates them; by hand, of experts near and far."""
    rng = np.random.default_rng(0)
    logits, factors = rng.normal(size=(40, 6)).astype(np.float32), rng.normal(size=(40, 2)).astype(np.float32)
    logits[0], logits[1] = [1.0, 0.9, 0.1, 0.0, 0.0, -1.0], 0.0  # of zeros all are near
    tensor = torch.tensor(logits, requires_grad=True)
    expected, order = sparsemixer(tensor, jitter_eps=0.1, training=False)
    (expected * torch.tensor(factors)).sum().backward()
    chosen = jnp.asarray(order.numpy())

    def weighted(logits):
        weights = one_by_one(logits, chosen, 0.1)
        return (weights * factors).sum(), weights

    gradient, found = jax.grad(weighted, has_aux=True)(jnp.asarray(logits))
    np.testing.assert_allclose(found, expected.detach(), atol=1e-6)
    np.testing.assert_allclose(gradient, tensor.grad, atol=1e-6)
    np.testing.assert_allclose(found[0], [1 / (1 + np.exp(-0.1)), 1.0], atol=1e-6)
