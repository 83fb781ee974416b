"""The objectives against numbers computed by hand, without the model's help where that is possible."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Batch, Inputs, Scalars
from jaxrl_llm.algorithms.losses import Metric
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.models.logprobs import TokenStatistics
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.objectives import policy_gradient
from jaxrl_llm.training.objectives.objective import token_metrics, weigh
from jaxrl_llm.training.passes import scored_distributions
from jaxrl_llm.training.setup.objectives import objective_of, policy_spec
from tests.models.decoding import logits_of

NET = Net(ModelConfig(vocab_size=31, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, init_scale=0.3))
PARAMS = jax.jit(NET.init)(jax.random.key(0))
PROMPT, COMPLETION = 3, 4
BY_THE_RATIO = ("ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "reinforce", "rloo", "gmpo", "luspo", "vespo")


def make_batch(seed: int = 0, rows: int = 4) -> Batch:
    draw = np.random.default_rng(seed)
    width = PROMPT + COMPLETION
    mask = np.zeros((rows, width), np.float32)
    for row, length in enumerate(draw.integers(1, COMPLETION + 1, rows)):
        mask[row, PROMPT : PROMPT + length] = 1
    segments = np.where(np.arange(width) < PROMPT, 1, mask).astype(np.int32)
    return Batch(
        Inputs(draw.integers(0, 31, (rows, width)).astype(np.int32), segments, prompt_width=PROMPT),
        mask=mask,
        sample_logps=(draw.normal(-2, 0.3, mask.shape) * mask).astype(np.float32),
        old_logps=(draw.normal(-3, 0.5, mask.shape) * mask).astype(np.float32),
        ref_logps=(draw.normal(-3, 0.5, mask.shape) * mask).astype(np.float32),
        advantages=(draw.normal(size=(rows, 1)) * mask).astype(np.float32),
    )


def naive_logps(batch: Batch, temperature: float) -> np.ndarray:
    """log p(token t | tokens before t), from full logits in float64."""
    logits = np.asarray(logits_of(NET, PARAMS, batch.inputs.tokens, batch.inputs.segments), np.float64) / temperature
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    out = np.zeros(batch.inputs.tokens.shape)
    for row, t in np.ndindex(*batch.inputs.tokens.shape):
        if t > 0:
            out[row, t] = logps[row, t - 1, batch.inputs.tokens[row, t]]
    return out


def value(config, batch: Batch):
    objective = objective_of(config, NET)
    return jax.jit(objective.loss)(PARAMS, objective.prepare(batch))


@pytest.mark.parametrize(
    ("aggregation", "beta", "temperature"), [("sequence", 0.04, 1.0), ("token", 0.1, 0.7), ("constant", 0.0, 1.3)]
)
def test_grpo_loss_is_the_formula(aggregation, beta, temperature):
    config = default()
    config.algorithm.aggregation, config.algorithm.beta = aggregation, beta
    config.rollout.temperature, config.rollout.max_completion_length = temperature, COMPLETION
    config.algorithm.epsilon_high = 0.28
    batch = make_batch()
    batch = batch if beta else batch.replace(ref_logps=None)
    logps, mask, advantages = naive_logps(batch, temperature), batch.mask, batch.advantages
    ratio = np.exp(logps - batch.old_logps)
    loss = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
    if beta:
        k1 = logps - batch.ref_logps
        loss = loss + beta * (np.exp(-k1) - 1 + k1)
    lengths = mask.sum(1)
    expected = {
        "sequence": np.mean((loss * mask).sum(1) / lengths),
        "token": (loss * mask).sum() / mask.sum(),
        "constant": (loss * mask).sum() / (len(mask) * COMPLETION),
    }[aggregation]
    got, metrics = value(config, batch)
    np.testing.assert_allclose(got, expected, rtol=2e-5)
    if beta:
        np.testing.assert_allclose(metrics["kl"], ((np.exp(-k1) - 1 + k1) * mask).sum() / mask.sum(), rtol=2e-5)
    difference = np.abs(batch.old_logps - batch.sample_logps)[mask > 0]
    np.testing.assert_allclose(metrics["sampling/sampling_logp_difference/mean"], difference.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["sampling/sampling_logp_difference/max"], difference.max(), rtol=1e-5)


@pytest.mark.slow
def test_the_full_kl_is_that_of_the_networks_logits():
    """By the log-probs of the whole vocabulary; on policy, where the slopes of the policy loss are known, and off."""
    config, batch = default(), make_batch().replace(ref_logps=None)
    config.algorithm.aggregation, config.algorithm.kl, config.algorithm.beta = "token", "full", 0.3
    reference = jax.jit(NET.init)(jax.random.key(1))
    tokens, segments = batch.inputs.tokens, batch.inputs.segments
    logps = [jax.nn.log_softmax(logits_of(NET, params, tokens, segments)) for params in (PARAMS, reference)]
    kl = jnp.pad((jnp.exp(logps[0]) * (logps[0] - logps[1])).sum(-1)[:, :-1], ((0, 0), (1, 0)))
    expected = float((kl * batch.mask).sum() / batch.mask.sum())
    hidden, head = scored_distributions(NET, reference, batch.inputs, 2, 1)
    for old_logps in (batch.old_logps, None):
        one = batch.replace(old_logps=old_logps)
        both = one.replace(ref_hidden=hidden, scalars=Scalars(ref_head=head))
        objective = objective_of(config, NET)

        @jax.jit
        @jax.grad
        def slope(params, batch, objective=objective):
            return objective.loss(params, objective.prepare(batch))[0]

        @jax.jit
        @jax.grad
        def kl_term(params):
            found = jax.nn.log_softmax(NET.bind(params)(tokens, segments))
            by_token = (jnp.exp(found) * (found - logps[1])).sum(-1)[:, :-1]
            return 0.3 * (by_token * batch.mask[:, 1:]).sum() / batch.mask.sum()

        assert float(value(config, both)[1]["kl"]) == pytest.approx(expected, rel=1e-5)
        gradient = jax.tree.map(jnp.subtract, slope(PARAMS, both), slope(PARAMS, one))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), gradient, kl_term(PARAMS))


@pytest.mark.parametrize(("beta", "on_policy"), [(0.1, True), pytest.param(0.0, False, marks=pytest.mark.slow)])
def test_correct_completions_are_learned_by_their_likelihood(beta, on_policy):
    """With and without slopes that are known before the log-probs are; none of a batch that has no correct one."""
    batch = make_batch()
    batch = batch.replace(old_logps=None) if on_policy else batch
    batch = batch if beta else batch.replace(ref_logps=None)
    positive = np.arange(batch.rows, dtype=np.float32) % 2

    def gradient_with(coefficient):
        config = default()
        config.algorithm.beta, config.algorithm.positive_nll_coef = beta, coefficient
        objective = objective_of(config, NET)
        run = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))
        return lambda batch: run(PARAMS, objective.prepare(batch))

    (plain, metrics), without = gradient_with(0.0)(batch)
    assert "positive_nll" not in metrics
    gradient = gradient_with(0.5)
    (total, metrics), together = gradient(batch.replace(positive=positive))
    share = batch.mask * positive[:, None] / (batch.mask * positive[:, None]).sum()

    def likelihood(params):
        found = jax.nn.log_softmax(NET.bind(params)(batch.inputs.tokens, batch.inputs.segments))
        logps = jnp.take_along_axis(found[:, :-1], jnp.asarray(batch.inputs.tokens)[:, 1:, None], axis=2)[..., 0]
        return -(share[:, 1:] * logps).sum()

    error, alone = jax.jit(jax.value_and_grad(likelihood))(PARAMS)
    np.testing.assert_allclose(metrics["positive_nll"].value, error, rtol=1e-5)
    np.testing.assert_allclose(total, plain + 0.5 * error, rtol=1e-5)
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, b + 0.5 * c, atol=1e-5), together, without, alone)
    (total, metrics), together = gradient(batch.replace(positive=0 * positive))
    assert np.isnan(metrics["positive_nll"].value)
    np.testing.assert_allclose(total, plain, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), together, without)


def test_without_old_logps_the_ratio_is_one_and_the_gradient_is_that_of_reinforce():
    config = default()
    batch = make_batch().replace(old_logps=None, ref_logps=None)
    objective = objective_of(config, NET)
    prepared = objective.prepare(batch)
    (loss, metrics), gradient = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))(PARAMS, prepared)
    lengths = batch.mask.sum(1, keepdims=True)
    np.testing.assert_allclose(loss, -np.mean((batch.advantages * batch.mask / lengths).sum(1)), rtol=1e-5)
    assert float(metrics["clip_ratio/region_mean"]) == 0
    config.algorithm.loss = "reinforce"
    reinforce = objective_of(config, NET)
    expected = jax.jit(jax.grad(lambda p: reinforce.loss(p, prepared)[0]))(PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), gradient, expected)


def test_entropy_bonus_lowers_the_loss_by_the_mean_entropy():
    config, batch = default(), make_batch()
    plain, metrics = value(config, batch)
    config.algorithm.entropy_coef, config.algorithm.aggregation = 0.5, "token"
    config_plain = default()
    config_plain.algorithm.aggregation = "token"
    without, _ = value(config_plain, batch)
    with_bonus, _ = value(config, batch)
    np.testing.assert_allclose(without - with_bonus, 0.5 * float(metrics["entropy"]), rtol=1e-5)
    assert plain != without


# With and without slopes that are known before the log-probs are.
@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_observation_tokens_are_predicted(beta):
    config = default()
    config.algorithm.beta = beta
    batch = make_batch().replace(old_logps=None)
    observed = np.zeros_like(batch.mask)
    observed[:2, PROMPT] = 1
    mask = batch.mask * (1 - observed)
    batch = jax.tree.map(jnp.asarray, batch.replace(mask=mask, ref_logps=batch.ref_logps * mask if beta else None))

    def gradient(batch):
        objective = objective_of(config, NET)
        return jax.jit(jax.value_and_grad(objective.loss, has_aux=True))(PARAMS, objective.prepare(batch))

    (plain, metrics), without = gradient(batch)
    assert "observations/nll" not in metrics
    config.algorithm.observation_coef = 0.5
    (total, metrics), together = gradient(batch.replace(observed=jnp.asarray(observed)))
    error = -(naive_logps(batch, 1.0) * observed).sum() / observed.sum()
    np.testing.assert_allclose(metrics["observations/nll"].value, error, rtol=1e-5)
    np.testing.assert_allclose(total, plain + 0.5 * error, rtol=1e-5)

    def cross_entropy(params):
        logps = jax.nn.log_softmax(NET.bind(params)(batch.inputs.tokens, batch.inputs.segments))
        return -logps[jnp.arange(2), PROMPT - 1, batch.inputs.tokens[:2, PROMPT]].mean()

    alone = jax.jit(jax.grad(cross_entropy))(PARAMS)
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, b + 0.5 * c, atol=1e-5), together, without, alone)


def test_masked_columns_do_not_matter():
    config, batch = default(), make_batch()
    loss, _ = value(config, batch)
    noise = np.where(batch.mask > 0, 0.0, 7.0).astype(np.float32)
    changed = batch.replace(
        inputs=batch.inputs.replace(tokens=np.where(batch.inputs.segments > 0, batch.inputs.tokens, 5)),
        sample_logps=batch.sample_logps + noise,
        old_logps=batch.old_logps + noise,
        ref_logps=batch.ref_logps - noise,
    )
    np.testing.assert_array_equal(loss, value(config, changed)[0])


def test_sft_loss_is_the_token_mean_of_the_cross_entropy():
    config = default()
    config.algorithm.name = "sft"
    batch = make_batch()
    logps = naive_logps(batch, 1.0)
    np.testing.assert_allclose(value(config, batch)[0], -(logps * batch.mask).sum() / batch.mask.sum(), rtol=1e-5)


def test_an_option_the_loss_does_not_have_is_refused():
    config = default()
    config.algorithm.loss = "reinforce(dual_clip=3.0)"
    with pytest.raises(ConfigError, match=r"algorithm\.loss: reinforce has no option 'dual_clip'"):
        objective_of(config, NET)


@pytest.mark.parametrize(
    "loss",
    [pytest.param(x, marks=() if x == "ppo_clip" else pytest.mark.slow) for x in BY_THE_RATIO],
)
def test_known_slopes_are_the_gradient(loss, monkeypatch):
    """On-policy, the gradient that is formed along with the log-probs is the one of the loss in terms of them."""
    config = default()
    config.algorithm.loss, config.algorithm.beta = loss, 0.1
    config.algorithm.epsilon_high = 5.0 if loss == "cispo" else 0.28
    batch = jax.tree.map(jnp.asarray, make_batch().replace(old_logps=None))

    def gradient():
        objective = objective_of(config, NET)
        return jax.jit(jax.value_and_grad(objective.loss, has_aux=True))(PARAMS, objective.prepare(batch))

    (value, metrics), known = gradient()
    monkeypatch.setattr(policy_gradient, "known_slopes", lambda spec, batch: None)
    (expected, others), gradients = gradient()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), known, gradients)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(known)) > 1e-3
    for name in others:
        np.testing.assert_allclose(metrics[name], others[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "changes",
    [{"entropy_coef": 0.1}, {"importance_correction": "token_truncate"}, {"off_policy_mask_threshold": 1.0},
     {"loss": "dppo"}],
)  # fmt: skip
def test_slopes_are_not_known_where_log_probs_enter(changes):
    config = default()
    config.algorithm.beta = 0.0
    batch = make_batch().replace(old_logps=None, ref_logps=None)
    prepared = objective_of(config, NET).prepare(batch)
    assert known_slopes(config, prepared) is not None
    assert known_slopes(config, prepared.replace(old_logps=batch.mask)) is None
    config.algorithm.update(changes)
    assert known_slopes(config, prepared) is None


def known_slopes(config, batch: Batch):
    spec = policy_spec(config)
    return policy_gradient.known_slopes(spec, batch) if policy_gradient.reads_ratio_alone(spec.loss) else None


OWN_LOSSES = """
import numpy
import jax
import jax.numpy as jnp
from jaxrl_llm.algorithms.losses import Metric

def clipped(logps, old_logps, advantages, epsilon_low, epsilon_high, mask=None):
    ratio = jnp.exp(jnp.where(mask > 0, logps - old_logps, 0.0))
    bounded = jnp.clip(ratio, 1 - epsilon_low, 1 + epsilon_high)
    loss = -jnp.minimum(ratio * advantages, bounded * advantages)
    return loss, {"own/clipped": Metric((ratio != bounded) * 1.0)}

def plain(logps, old_logps, advantages, epsilon_low, epsilon_high, mask=None):
    return -jnp.exp(logps - old_logps) * advantages

def mean(logps, old_logps, advantages, epsilon_low, epsilon_high, mask=None):
    return plain(logps, old_logps, advantages, epsilon_low, epsilon_high).mean()

def by_likelihood(logps, old_logps, advantages, epsilon_low, epsilon_high, mask=None):
    return -jnp.exp(logps - old_logps) * advantages * (jax.lax.stop_gradient(logps) > -3)


def of_numbers(logps, old_logps, advantages, epsilon_low, epsilon_high, *, mask):
    return -advantages * numpy.exp(logps - old_logps)


def failing(logps, old_logps, advantages, epsilon_low, epsilon_high, *, mask):
    raise KeyError("oops")
"""


def test_a_loss_of_ones_own(tmp_path):
    """It gets the gradient that is formed along with the log-probs where it may, and logs its own metrics alone."""
    (tmp_path / "own.py").write_text(OWN_LOSSES)
    batch = jax.tree.map(jnp.asarray, make_batch().replace(old_logps=None, ref_logps=None))
    found = {}
    for name in ("ppo_clip", "clipped", "plain", "by_likelihood"):
        config = default()
        config.algorithm.loss = name if name == "ppo_clip" else f"{tmp_path / 'own.py'}:{name}"
        objective = objective_of(config, NET)
        assert policy_gradient.reads_ratio_alone(policy_spec(config).loss) == (name != "by_likelihood")
        computes = jax.jit if "clip" in name else lambda loss: functools.partial(jax.eval_shape, loss)
        found[name] = computes(jax.value_and_grad(objective.loss, has_aux=True))(PARAMS, objective.prepare(batch))
    config.algorithm.loss = f"{tmp_path / 'own.py'}:mean"
    with pytest.raises(ConfigError, match=r"loss returns .* the shape \(\), but it must return one .* token, \(4, 7\)"):
        jax.eval_shape(objective_of(config, NET).loss, PARAMS, objective.prepare(batch))
    config.algorithm.loss = f"{tmp_path / 'own.py'}:failing"
    with pytest.raises(ConfigError, match=r"own\.py:failing raised KeyError: 'oops' \(.*own\.py:\d+\)"):
        jax.eval_shape(objective_of(config, NET).loss, PARAMS, objective.prepare(batch))
    config.algorithm.loss = f"{tmp_path / 'own.py'}:of_numbers"
    with pytest.raises(ConfigError, match=r"algorithm.loss is .*own\.py:of_numbers'.* compute with jax.numpy"):
        objective_of(config, NET)
    (value, metrics), gradient = found["clipped"]
    (expected, _), expected_gradient = found["ppo_clip"]
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    # Up to rounding: they are two programs.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), gradient, expected_gradient)
    assert float(metrics["own/clipped"]) == 0 and not any(name.startswith("clip_ratio") for name in metrics)
    assert not any("clip" in name for name in found["plain"][0][1])


def test_metrics_of_tokens_rows_and_batches():
    """Square, so that a row's numbers could be taken for a column's; a row without tokens is in no mean and extreme."""
    mask = jnp.float32([[0, 0, 0], [1, 1, 0], [1, 1, 1]])
    batch = weigh(Batch(Inputs(jnp.zeros((3, 3), jnp.int32)), mask), mask / 5).prepare(
        row_weights=jnp.float32([0, 0.5, 0.5])
    )
    tokens, rows = jnp.float32([[-7, 99, 7], [2, 3, -9], [4, 5, 6]]), jnp.float32([50.0, 1.0, 2.0])
    found = token_metrics(
        {
            **{f"tokens/{name}": Metric(tokens, name) for name in ("mean", "min", "max")},
            **{f"rows/{name}": Metric(rows, name) for name in ("mean", "row_mean", "min", "max", "sum")},
            **{f"batch/{name}": Metric(jnp.float32(3.0), name) for name in ("mean", "row_mean", "min", "max", "sum")},
        },
        batch,
    )
    assert {name: pytest.approx(float(metric)) for name, metric in found.items()} == {
        **{"tokens/mean": 4, "tokens/min": 2, "tokens/max": 6},
        **{"rows/mean": 8 / 5, "rows/row_mean": 1.5, "rows/min": 1, "rows/max": 2, "rows/sum": 53},
        **{f"batch/{name}": 3 for name in ("mean", "row_mean", "min", "max", "sum")},
    }


def test_rejected_tokens_and_normalised_weights():
    """The policy term is `w / mean(w) x keep` of the uncorrected one, and what is rejected keeps its denominator."""
    config, batch = default(), make_batch()
    config.algorithm.update({"beta": 0.0, "loss": "reinforce"})
    plain = policy_gradient.policy_gradient(policy_spec(config), NET)
    mask, ratio = batch.mask > 0, np.exp(batch.old_logps - batch.sample_logps)
    weights = np.minimum(ratio, 0.8)
    config.algorithm.update(
        {"importance_correction": "token_truncate", "importance_max": 0.8, "importance_normalize": True,
         "rejection": "token_k1", "rejection_bounds": "0.2_3.0"}
    )  # fmt: skip
    objective = objective_of(config, NET)
    inside = (1 / ratio >= 0.2) & (1 / ratio <= 3)
    assert (mask & inside).any() and (mask & ~inside).any()
    prepared = objective.prepare(batch)
    scaled = batch.replace(advantages=batch.advantages * weights / weights[mask].mean() * inside)
    expected, _ = jax.jit(plain.loss)(PARAMS, plain.prepare(scaled))
    loss, metrics = jax.jit(objective.loss)(PARAMS, prepared)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    values = {name: float(metric) for name, metric in metrics.items() if name.startswith("rollout_corr/")}
    wanted = {
        "rejected": (~inside)[mask].mean(),
        "k1_kl": -np.log(ratio)[mask].mean(),
        "chi2_token": (ratio**2)[mask].mean() - 1,
        "chi2_sequence": np.mean([row[kept].prod() ** 2 for row, kept in zip(ratio, mask, strict=True)]) - 1,
        "weight": weights[mask].mean(),
        "weight_squared": (weights**2)[mask].mean(),
        "fraction_high": (ratio > 0.8)[mask].mean(),
        "fraction_low": 0.0,
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(values[f"rollout_corr/{name}"], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_rows_that_fill_up_a_micro_batch_add_nothing():
    """Packed micro-batches are filled up with rows that are 0 in every array, weights of the whole batch among them."""
    config, batch = default(), jax.tree.map(jnp.asarray, make_batch())
    config.algorithm.update(
        {"beta": 0.1, "kl_bias_correction": True, "entropy_coef": 0.1, "importance_correction": "token_truncate",
         "importance_normalize": True, "rejection": "seq_mean_k1", "rejection_bounds": "0.1_10.0",
         "off_policy_mask_threshold": 0.1}
    )  # fmt: skip
    spec, prepared = policy_spec(config), objective_of(config, NET).prepare(batch)
    filled = prepared.map_rows(lambda x: jnp.concatenate([x, jnp.zeros_like(x[:2])]))

    def value(logps, batch):
        return policy_gradient.policy_objective(spec, TokenStatistics(logps, -logps, -logps), batch)

    @jax.jit
    def found(logps):
        of_both = ((logps, prepared), (jnp.concatenate([logps, jnp.zeros_like(logps[:2])]), filled))
        return [jax.value_and_grad(value, has_aux=True)(*each) for each in of_both]

    (rows, slopes), (more, slopes_of_more) = found(batch.old_logps + 0.1 * batch.mask)
    np.testing.assert_allclose(more[0], rows[0], rtol=1e-5)
    np.testing.assert_allclose(slopes_of_more[:4], slopes, rtol=1e-5)
    np.testing.assert_array_equal(slopes_of_more[4:], 0)
    for name, metric in rows[1].items():
        np.testing.assert_allclose(more[1][name].value, metric.value, rtol=1e-5, err_msg=name)


def test_tokens_outside_the_mask_may_have_any_probability():
    """exp(100) is infinite in float32: what an environment wrote may be far less likely than to the reference."""
    config, batch = default(), jax.tree.map(jnp.asarray, make_batch())
    config.algorithm.update({"beta": 0.1, "kl_bias_correction": True})
    spec, prepared = policy_spec(config), objective_of(config, NET).prepare(batch)

    @jax.jit
    def found(elsewhere):
        def value(logps):
            return policy_gradient.policy_objective(spec, TokenStatistics(logps, -logps, -logps), prepared)[0]

        return jax.value_and_grad(value)(jnp.where(batch.mask > 0, batch.old_logps + 0.1, elsewhere))

    jax.tree.map(np.testing.assert_array_equal, found(-100.0), found(-1.0))


def test_a_policy_far_from_the_sampler_has_finite_metrics():
    config, batch = default(), make_batch()
    config.algorithm.update({"importance_correction": "sequence_mask"})
    batch = batch.replace(ref_logps=None, sample_logps=batch.sample_logps - 100.0, old_logps=batch.old_logps - 100.0)
    batch = batch.replace(sample_logps=batch.sample_logps - 100.0 * batch.mask)
    loss, metrics = value(config, batch)
    assert np.isfinite([loss, *(metric.value for metric in metrics.values())]).all()
    np.testing.assert_allclose(metrics["ratio/mean"], np.exp(20.0), rtol=1e-5)


def test_rejection_against_the_sampler_reads_the_policy_itself():
    config, batch = default(), make_batch()
    config.algorithm.update(
        {"beta": 0.0, "old_logps": "sampler", "rejection": "token_k1", "rejection_bounds": "0.5_2.0"}
    )
    objective = objective_of(config, NET)
    prepared = objective.prepare(batch.replace(old_logps=batch.sample_logps))
    _, metrics = jax.jit(objective.loss)(PARAMS, prepared)
    change = naive_logps(batch, config.rollout.temperature)[batch.mask > 0] - batch.sample_logps[batch.mask > 0]
    outside = (np.abs(change) > np.log(2)).mean()
    assert outside > 0
    np.testing.assert_allclose(metrics["rollout_corr/rejected"], outside, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rejection": "token_k9", "rejection_bounds": "1"},
            "algorithm.rejection is 'token_k9': the criterion 'token_k9'",
        )
    ],
)
def test_wrong_rejection_names_its_key(changes, message):
    config = default()
    config.algorithm.update(changes)
    with pytest.raises(ConfigError, match=message):
        policy_spec(config)


def test_a_loss_without_a_public_formula_is_refused():
    config = default()
    config.algorithm.loss = "stable_reinforce"
    with pytest.raises(ConfigError, match="whose formula is not public"):
        policy_spec(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregation", "on_policy"),
    list(itertools.product(("sequence", "token", "constant"), (False, True))),
)
def test_rows_with_weights_of_their_own_are_as_batches_alone(aggregation, on_policy):
    """The loss and its gradient are the sums over environments, each alone with its beta, times its weight and its
    share of the rows, or of the tokens."""
    config = default()
    config.algorithm.aggregation, config.rollout.max_completion_length = aggregation, COMPLETION
    if aggregation == "token" and not on_policy:
        config.algorithm.entropy_coef = config.algorithm.observation_coef = 0.3
    batch, shown = make_batch(rows=6), np.zeros((6, PROMPT + COMPLETION), np.float32)
    shown[:, 1] = 1
    batch = batch.replace(old_logps=None) if on_policy else batch
    batch = batch.replace(observed=shown) if config.algorithm.observation_coef else batch
    rows, betas, factors = (np.array([1, 0, 0, 1, 1, 0], bool), (0.2, 0.0), (0.25, 3.0))
    mixed = batch.replace(
        kl_weight=np.where(rows, *betas).astype(np.float32), loss_weight=np.where(rows, *factors).astype(np.float32)
    )

    def loss_of(batch, beta=0.7):  # which no row has
        config.algorithm.beta = beta
        objective = objective_of(config, NET)
        prepared = objective.prepare(batch)
        (value, _), gradient = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))(PARAMS, prepared)
        return value, gradient

    total, gradient = 0.0, jax.tree.map(jnp.zeros_like, PARAMS)
    for own, beta, factor in zip((rows, ~rows), betas, factors, strict=True):
        share = batch.mask[own].sum() / batch.mask.sum() if aggregation == "token" else own.sum() / len(own)
        value, slope = loss_of(batch.take(own), beta)
        if config.algorithm.observation_coef:  # whose mean is over observation tokens, one a row
            config.algorithm.observation_coef *= 0.5 / share
            value, slope = loss_of(batch.take(own), beta)
            config.algorithm.observation_coef = 0.3
        total += factor * share * value
        gradient = jax.tree.map(lambda a, b, c=factor * share: a + c * b, gradient, slope)
    value, slope = loss_of(mixed)
    np.testing.assert_allclose(value, total, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), slope, gradient)
    order = np.array([4, 2, 0, 5, 1, 3])
    moved, slope_of_moved = loss_of(mixed.take(order))
    np.testing.assert_allclose(moved, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), slope_of_moved, slope)


@pytest.mark.parametrize("loss", ["gspo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("ppo_clip", "cispo"))])
def test_equal_weights_of_rows_are_those_of_all(loss):
    config, batch = default(), make_batch()
    config.algorithm.beta, config.algorithm.loss, config.rollout.max_completion_length = 0.05, loss, COMPLETION
    weighed = batch.replace(kl_weight=np.full(4, 0.05, np.float32), loss_weight=np.ones(4, np.float32))
    assert float(value(config, weighed)[0]) == float(value(config, batch)[0])
