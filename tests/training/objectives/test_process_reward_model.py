"""The objective of process reward models: transformers' loss, and the same by rows, micro-batches and packed rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import load_model
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.packing.planner import TypicalRows, make_packer
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import packing_spec, update_spec
from jaxrl_llm.training.update import init_state, make_update
from tests.models.decoding import logits_of

NET = Net(
    ModelConfig(
        vocab_size=31, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, init_scale=0.3, scan_layers=False,
        head="step",
    )
)  # fmt: skip
LENGTHS = (9, 4, 12, 7, 5, 12)


def config_of(**batch):
    config = default()
    config.algorithm.name, config.batch.prompts, config.batch.packing = "process_reward_model", len(LENGTHS), "false"
    config.optimizer.name, config.optimizer.b1, config.optimizer.learning_rate = "sgd", 0.0, 1.0
    config.optimizer.max_grad_norm = 0.0
    config.batch.update(batch)
    return config


def make_batch(side: str = "right", order=(0, 1, 2, 3, 4, 5)) -> Batch:
    """Rows of several lengths, in which about a third of the tokens end a step; the last token of each row does."""
    draw = np.random.default_rng(0)
    tokens, segments, mask, labels = np.zeros((4, len(LENGTHS), 12))
    for row, length in enumerate(LENGTHS):
        at = slice(0, length) if side == "right" else slice(12 - length, 12)
        tokens[row, at], segments[row, at] = draw.integers(1, 31, length), 1
        mask[row, at] = np.append(draw.random(length - 1) < 0.3, 1)
        labels[row, at] = draw.integers(0, 2, length)
    tokens, segments, mask, labels = (x[np.array(order)] for x in (tokens, segments, mask, labels * mask))
    return Batch(
        Inputs(jnp.asarray(tokens, jnp.int32), jnp.asarray(segments, jnp.int32)),
        mask=jnp.asarray(mask, jnp.float32),
        step_labels=jnp.asarray(labels, jnp.float32),
    )


def updated(config, batch: Batch, packed: bool = False):
    """The parameters after an update, and its metrics."""
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        optimizer, objective = make_optimizer(config), objective_of(config, NET)
        if packed:
            sample = TypicalRows(*map(np.asarray, (batch.inputs.tokens, batch.inputs.segments, batch.mask)))
            batch = make_packer(packing_spec(config), NET.config, mesh, objective.positions, sample)(batch)
            assert batch.inputs.layout.num_microbatches[0] > 1
        update = make_update(objective, optimizer, update_spec(config), mesh)
        state, metrics = update(init_state(NET.init(jax.random.key(1)), optimizer, mesh), batch)
        return state.params, metrics


def test_a_loss_that_wants_numbers_is_refused_before_the_data(tmp_path):
    (tmp_path / "own.py").write_text("def loss(logits, labels):\n    return logits[..., 0] * float(labels.sum())\n")
    config = config_of()
    config.algorithm.loss = f"{tmp_path / 'own.py'}:loss"
    with pytest.raises(ConfigError, match=r"algorithm.loss is .* wants numbers in arrays that JAX traces"):
        objective_of(config, NET)


def test_by_hand(tmp_path):
    """The mean over all steps of the batch, wherever their rows have their padding, and a metric of one's own."""
    (tmp_path / "own.py").write_text(
        "from jaxrl_llm.algorithms.losses import Metric\n"
        "from jaxrl_llm.algorithms.step_losses import step_cross_entropy\n\n\n"
        "def own(logits, labels):\n"
        "    return step_cross_entropy(logits, labels), {'own/log_odds': Metric(logits[..., 1] - logits[..., 0])}\n"
    )
    batch, config = make_batch(), config_of()
    config.algorithm.loss = f"{tmp_path}/own.py:own"
    params, objective = jax.jit(NET.init)(jax.random.key(1)), objective_of(config, NET)
    logits = np.asarray(logits_of(NET, params, batch.inputs.tokens, batch.inputs.segments), np.float64)
    steps, right = np.asarray(batch.mask) > 0, np.asarray(batch.step_labels) > 0
    log_odds = logits[..., 1] - logits[..., 0]
    loss, metrics = jax.jit(objective.loss)(params, objective.prepare(batch))
    metrics = {name: float(metric) for name, metric in metrics.items()}
    expected = np.log1p(np.exp(np.where(right, -log_odds, log_odds)))[steps].mean()
    correct = (log_odds > 0) == right
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(correct[steps].mean())
    assert metrics["accuracy_right"] == pytest.approx(correct[steps & right].mean())
    assert metrics["accuracy_wrong"] == pytest.approx(correct[steps & ~right].mean())
    assert metrics["margin"] == pytest.approx(np.where(right, log_odds, -log_odds)[steps].mean(), rel=1e-4)
    assert metrics["mean_reward"] == pytest.approx((1 / (1 + np.exp(-log_odds)))[steps].mean(), rel=1e-5)
    assert metrics["own/log_odds"] == pytest.approx(log_odds[steps].mean(), rel=1e-4)


@pytest.mark.slow
def test_the_update_is_the_same_however_rows_lie():
    """In micro-batches, in another order with padding on the left, and packed."""
    params, metrics = updated(config_of(), make_batch())
    ways = {
        "micro-batches": updated(config_of(microbatch_rows=2), make_batch("left", (3, 1, 5, 0, 4, 2))),
        "packed": updated(config_of(packing="true", microbatch_tokens=14, pack_length=14), make_batch(), packed=True),
    }
    for way, (other, other_metrics) in ways.items():
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6, err_msg=way), other, params)
        for name in metrics:
            np.testing.assert_allclose(other_metrics[name], metrics[name], rtol=2e-5, atol=1e-6, err_msg=name)


def test_loss_and_gradient_are_those_of_transformers(tmp_path):
    """A token classifier of theirs with -100 where no step ends, which TRL's PRMTrainer trains."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForTokenClassification, Qwen2Config

    shape = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_labels": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    torch.manual_seed(0)
    oracle = AutoModelForTokenClassification.from_config(Qwen2Config(**shape, **heads)).eval()
    oracle.save_pretrained(tmp_path)
    model, batch = load_model(tmp_path), make_batch()
    tokens, segments, mask, labels = (
        torch.tensor(np.asarray(x), dtype=torch.long)
        for x in (batch.inputs.tokens, batch.inputs.segments, batch.mask, batch.step_labels)
    )
    theirs = oracle(tokens, attention_mask=segments, labels=torch.where(mask > 0, labels, -100))
    theirs.loss.backward()
    objective = objective_of(config_of(), model.net)
    prepared = objective.prepare(batch)
    (loss, _), gradient = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))(model.params, prepared)
    np.testing.assert_allclose(loss, theirs.loss.item(), rtol=2e-5)
    np.testing.assert_allclose(gradient["score"]["kernel"], oracle.score.weight.grad.T, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(gradient["score"]["bias"], oracle.score.bias.grad, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(
        gradient["norm"]["scale"], oracle.model.norm.weight.grad, rtol=1e-3, atol=1e-5
    )  # through the network


@pytest.mark.slow
def test_a_loss_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jaxrl_llm.algorithms.step_losses import step_cross_entropy\n\n\n"
        "def scaled(logits, labels, factor=1.0):\n    return factor * step_cross_entropy(logits, labels)\n"
    )
    config, batch = config_of(), make_batch()
    objective = objective_of(config, NET)
    params = jax.jit(NET.init)(jax.random.key(1))
    whole, _ = objective.loss(params, objective.prepare(batch))
    config.algorithm.loss = f"{tmp_path / 'mine.py'}:scaled(factor=3.0)"
    own = objective_of(config, NET)
    assert float(own.loss(params, own.prepare(batch))[0]) == pytest.approx(3 * float(whole), rel=1e-5)
    config.algorithm.loss = "bradley_terry"
    with pytest.raises(ConfigError, match=r"algorithm.loss: unknown name 'bradley_terry'.*step_cross_entropy"):
        objective_of(config, NET)
