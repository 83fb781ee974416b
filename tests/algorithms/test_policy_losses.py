from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import policy_losses
from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.losses import with_metrics
from jaxrl_llm.algorithms.policy_losses import clip_fractions, value_clip


def value_of(name):
    """The loss of that name without its metrics."""
    return lambda *arguments, **options: with_metrics(getattr(policy_losses, name)(*arguments, **options))[0]


dppo_kl, dppo_tv, dro, m2po, topr = map(value_of, ("dppo_kl", "dppo_tv", "dro", "m2po", "topr"))
a2po, opd, ipo, rollout_is = map(value_of, ("a2po", "opd", "ipo", "rollout_is"))
cispo, clip_cov, dppo, gmpo, gspo, gspo_token, kl_cov, luspo, ppo_clip, reinforce, rloo, sapo, vespo = map(
    value_of,
    ("cispo", "clip_cov", "dppo", "gmpo", "gspo", "gspo_token", "kl_cov", "luspo", "ppo_clip", "reinforce", "rloo",
     "sapo", "vespo"),
)  # fmt: skip

# one row of three tokens: ratios 1.2214, 0.6065, 1
LOGPS, OLD = np.array([[-1.0, -2.0, -0.5]]), np.array([[-1.2, -1.5, -0.5]])
RATIO = np.exp(LOGPS - OLD)
ONES = np.ones((1, 3))
LOSSES = ("ppo_clip", "gspo", "gspo_token", "luspo", "rloo", "gmpo", "cispo", "sapo", "reinforce", "vespo", "dppo")
LOSSES += ("clip_cov", "kl_cov", "dppo_kl", "dppo_tv", "dro", "m2po", "topr", "a2po", "opd")
LOSSES += ("importance_sampling", "ipo", "rollout_is")
SEQUENCE_LEVEL = ("gspo", "luspo", "rloo", "gmpo", "a2po")


@partial(jax.jit, static_argnums=0)
def call(name, logps, old, advantages, mask):
    """Calls any loss by name the way an objective does."""
    options = {"key": jax.random.key(0)} if name == "clip_cov" else {}
    epsilon_high = 5.0 if name == "cispo" else 0.2
    return value_of(name)(logps, old, advantages, 0.2, epsilon_high, mask=mask, **options)


@partial(jax.jit, static_argnums=0)
def gradient(name, logps, old, advantages, mask, weights):
    return jax.grad(lambda x: (weights * call(name, x, old, advantages, mask)).sum())(logps)


def random_batch(rows=6, tokens=9, seed=0):
    rng = np.random.default_rng(seed)
    logps = -rng.exponential(1.0, (rows, tokens))
    old = logps + 0.3 * rng.normal(size=(rows, tokens))
    mask = rng.random((rows, tokens)) < 0.7
    mask[:, 0] = True
    return logps, old, rng.normal(size=rows), mask


# -- values ------------------------------------------------------------------------------------------------------------


def test_a2po_by_hand(x64):
    """The square of a row's implicit reward minus its advantage, on each of its tokens; what is masked has no part."""
    loss, metrics = policy_losses.a2po(LOGPS, OLD, np.array([0.75]), mask=ONES, beta2=0.1)
    expected = (0.1 * (0.2 - 0.5 + 0.0) - 0.75) ** 2
    np.testing.assert_allclose(loss, np.full((1, 3), expected), rtol=1e-12)
    np.testing.assert_allclose(metrics["a2po/implicit_reward"].value, np.full((1, 3), -0.03), rtol=1e-9)
    two = np.array([[1.0, 0.0, 1.0]])
    far = np.array([[-1.0, -np.inf, -0.5]])
    np.testing.assert_allclose(a2po(far, OLD, np.array([0.75]), mask=two, beta2=0.1), (0.1 * 0.2 - 0.75) ** 2)
    slope = jax.grad(lambda x: (a2po(x, OLD, np.array([0.75]), mask=ONES, beta2=0.1) / 3).sum())(jnp.asarray(LOGPS))
    np.testing.assert_allclose(slope, np.full((1, 3), 2 * 0.1 * (-0.03 - 0.75)), rtol=1e-9)


def test_opd_by_hand(x64):
    """The signal is of the policy as it is, and a token that fell too far is left out, whatever its sign."""
    advantages = np.array([[0.5, 0.5, -0.3]])
    fell = np.exp(LOGPS) - np.exp(OLD)
    assert fell[0, 0] > 0 > fell[0, 1] > -0.2
    squares = 1e-3 * np.square(LOGPS - OLD)
    signal = advantages - (LOGPS - OLD)
    np.testing.assert_allclose(opd(LOGPS, OLD, advantages, mask=ONES), -signal * RATIO + squares, rtol=1e-12)
    kept = np.array([[1.0, 0.0, 1.0]])
    for second in (0.5, -0.5):
        advantages[0, 1] = second
        signal = advantages - (LOGPS - OLD)
        found = opd(LOGPS, OLD, advantages, 0.08, mask=ONES)
        np.testing.assert_allclose(found, -kept * signal * RATIO + squares, rtol=1e-12)
    slope = jax.grad(lambda x: opd(x, OLD, advantages, mask=ONES).sum())(jnp.asarray(LOGPS))
    np.testing.assert_allclose(slope, -signal * RATIO + 2e-3 * (LOGPS - OLD), rtol=1e-9)


def test_ppo_clip_by_hand(x64):
    # A = 1: clipped above at 1.2, never below; A = -1: the reverse
    np.testing.assert_allclose(ppo_clip(LOGPS, OLD, [1.0], 0.2, 0.2), [[-1.2, -RATIO[0, 1], -1]], rtol=1e-12)
    np.testing.assert_allclose(ppo_clip(LOGPS, OLD, [-1.0], 0.2, 0.2), [[RATIO[0, 0], 0.8, 1]], rtol=1e-12)


def test_clip_higher(x64):
    np.testing.assert_allclose(ppo_clip(LOGPS, OLD, [1.0], 0.2, 0.28)[0, 0], -RATIO[0, 0], rtol=1e-12)


def test_dual_clip_bounds_bad_samples_only(x64):
    log5 = np.log([[5.0]])
    zero = np.zeros((1, 1))
    np.testing.assert_allclose(ppo_clip(log5, zero, [-1.0], 0.2, 0.2), [[5.0]], rtol=1e-12)
    np.testing.assert_allclose(ppo_clip(log5, zero, [-1.0], 0.2, 0.2, dual_clip=3.0), [[3.0]], rtol=1e-12)
    np.testing.assert_allclose(ppo_clip(log5, zero, [1.0], 0.2, 0.2, dual_clip=3.0), [[-1.2]], rtol=1e-12)
    with pytest.raises(ValueError, match=r"must exceed 1; got 1\.0"):
        ppo_clip(log5, zero, [1.0], 0.2, 0.2, dual_clip=1.0)


def test_delta_bounds_the_unclipped_branch(x64):
    log5, zero = np.log([[5.0]]), np.zeros((1, 1))
    np.testing.assert_allclose(ppo_clip(log5, zero, [-1.0], 0.2, 0.2, delta=4.0), [[4.0]], rtol=1e-12)
    np.testing.assert_allclose(ppo_clip(log5, zero, [1.0], 0.2, 0.2, delta=4.0), [[-1.2]], rtol=1e-12)
    assert float(jax.grad(lambda x: ppo_clip(x, zero, [-1.0], 0.2, 0.2, delta=4.0).sum())(log5)[0, 0]) == 0


def test_gspo_by_hand(x64):
    ratio = np.exp((0.2 - 0.5 + 0.0) / 3)  # 0.904837, inside the range
    np.testing.assert_allclose(gspo(LOGPS, OLD, [1.0], 0.2, 0.2, mask=ONES), -ratio * ONES, rtol=1e-12)
    np.testing.assert_allclose(gspo(LOGPS, OLD, [-1.0], 0.2, 0.2, mask=ONES), ratio * ONES, rtol=1e-12)
    np.testing.assert_allclose(gspo(LOGPS, OLD, [-1.0], 0.05, 0.05, mask=ONES), 0.95 * ONES, rtol=1e-12)


def test_cispo_by_hand(x64):
    for advantage in (1.0, -1.0):
        expected = -np.minimum(RATIO, 5.0) * advantage * LOGPS
        np.testing.assert_allclose(cispo(LOGPS, OLD, [advantage], 0.2, 5.0), expected, rtol=1e-12)
        two_sided = -np.clip(RATIO, 0.8, 1.2) * advantage * LOGPS
        np.testing.assert_allclose(cispo(LOGPS, OLD, [advantage], 0.2, 1.2, minimum=0.8), two_sided, rtol=1e-12)


@pytest.mark.parametrize("cap", [0.2, 1.0])
def test_cispo_warns_of_a_clip_range_in_place_of_a_cap(x64, cap):
    with pytest.warns(UserWarning, match=f"cap of the ratio itself: {cap} caps"):
        loss = cispo(LOGPS, OLD, [1.0], 0.2, cap)
    np.testing.assert_allclose(loss, -np.minimum(RATIO, cap) * LOGPS, rtol=1e-12)


def test_sapo_by_hand(x64):
    for advantage, tau in ((1.0, 1.0), (-1.0, 1.05)):
        expected = -advantage * (4 / tau) / (1 + np.exp(-tau * (RATIO - 1)))
        np.testing.assert_allclose(sapo(LOGPS, OLD, [advantage]), expected, rtol=1e-12)


def test_rloo_uses_the_whole_sequence_ratio(x64):
    ratio = np.exp(0.2 - 0.5)
    np.testing.assert_allclose(rloo(LOGPS, OLD, [1.0], 0.2, 0.2, mask=ONES), -ratio * ONES, rtol=1e-12)
    np.testing.assert_allclose(rloo(LOGPS, OLD, [-1.0], 0.2, 0.2, mask=ONES), 0.8 * ONES, rtol=1e-12)


@pytest.mark.parametrize(("loss", "options"), [(rloo, {}), (sapo, {"level": "sequence_sum"})], ids=["rloo", "sapo"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("moved", [0.5, -0.5])
def test_the_ratio_of_a_long_row_stays_finite(loss, options, advantage, moved):
    """The log-ratios of 200 tokens sum up to 100, of which the exp is infinite in float32."""
    old, mask = jnp.full((1, 200), -2.0), jnp.ones((1, 200))

    def total(logps):
        return loss(logps, old, jnp.full(1, advantage), 0.2, 0.2, mask=mask, **options).sum()

    value, slope = jax.value_and_grad(total)(old + moved)
    assert jnp.isfinite(value) and jnp.isfinite(slope).all()
    assert advantage or value == 0
    np.testing.assert_array_equal(slope, 0)


def test_the_ratio_of_a_token_stays_finite():
    """exp(200) is infinite in float32: its slope is 0 * inf where the clip takes the token out, and where A is 0."""
    old, logps = jnp.full((3, 2), -200.0), jnp.full((3, 2), -0.1)
    options = {"dppo": {"epsilon_low": 1.0, "epsilon_high": 1.0}, "opd": {"kl_coef": 0.0}, "m2po": {"threshold": 1e9}}
    options["ipo"] = {"threshold": 1.0}
    names = ("ppo_clip", "gspo", "gspo_token", "gmpo", "kl_cov", "dppo", "opd", "m2po", "ipo", "importance_sampling")

    @jax.jit
    def found(logps):
        def total(name, logps):
            ranges = {"epsilon_low": 0.2, "epsilon_high": 0.2} | options.get(name, {})
            return value_of(name)(logps, old, jnp.array([1.0, 0.0, -1.0]), mask=jnp.ones((3, 2)), **ranges).sum()

        return {name: jax.value_and_grad(partial(total, name))(logps) for name in names}

    for name, (value, slope) in found(logps).items():
        assert jnp.isfinite(value) and jnp.isfinite(slope).all(), name


def test_gmpo_clips_one_side_of_the_log_ratio(x64):
    up = np.exp((0.1 - 0.5 + 0) / 3)  # 0.2 clipped to 0.1, -0.5 left alone
    down = np.exp((0.2 - 0.1 + 0) / 3)  # -0.5 clipped to -0.1, 0.2 left alone
    np.testing.assert_allclose(gmpo(LOGPS, OLD, [1.0], 0.1, 0.1, mask=ONES), -up * ONES, rtol=1e-12)
    np.testing.assert_allclose(gmpo(LOGPS, OLD, [-1.0], 0.1, 0.1, mask=ONES), down * ONES, rtol=1e-12)


@pytest.mark.parametrize(
    ("advantage", "low", "high", "clipped"),
    [
        (1.0, 0.1, 0.1, {"high": [1, 0, 0], "low": [0, 0, 0]}),
        (1.0, 0.1, 0.21, {"high": [0, 0, 0], "low": [0, 0, 0]}),
        (-1.0, 0.45, 0.1, {"high": [0, 0, 0], "low": [0, 1, 0]}),  # log-ratio -0.5, ratio 0.61: within 1 - 0.45
        (-1.0, 0.55, 0.1, {"high": [0, 0, 0], "low": [0, 0, 0]}),
    ],
)
def test_gmpo_counts_log_ratios_that_are_clipped(x64, advantage, low, high, clipped):
    _, metrics = policy_losses.gmpo(LOGPS, OLD, [advantage], low, high, mask=ONES)
    for side, tokens in clipped.items():
        np.testing.assert_array_equal(metrics[f"clip_ratio/{side}_mean"].value, [tokens])


def test_luspo_is_gspo_times_length_and_gspo_under_sequence_sums(x64):
    logps, old, advantages, mask = random_batch()
    token = gspo(logps, old, advantages, 0.2, 0.2, mask=mask)
    scaled = luspo(logps, old, advantages, 0.2, 0.2, mask=mask)
    np.testing.assert_allclose(scaled, token * mask.sum(1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(
        (loss_weights(mask, "sequence") * scaled).sum(), (loss_weights(mask, "sequence_sum") * token).sum(), rtol=1e-6
    )


@pytest.mark.parametrize("level", ["sequence", "sequence_sum"])
def test_cispo_and_sapo_of_whole_rows_by_hand(x64, level):
    ratio = np.exp((-0.3 / 3) if level == "sequence" else -0.3)  # log-ratios 0.2, -0.5, 0
    np.testing.assert_allclose(cispo(LOGPS, OLD, [2.0], 0.2, 5.0, mask=ONES, level=level), -2 * ratio * LOGPS)
    expected = 2 * (4 / 1.05) / (1 + np.exp(-1.05 * (ratio - 1)))
    np.testing.assert_allclose(sapo(LOGPS, OLD, [-2.0], mask=ONES, level=level), np.full((1, 3), expected))


def test_an_unknown_level_and_one_without_a_mask():
    with pytest.raises(ValueError, match=r"levels of a ratio are 'token', .*; got 'row'"):
        sapo(LOGPS, OLD, [1.0], mask=ONES, level="row")
    with pytest.raises(ValueError, match="together with a mask; got 'sequence'"):
        sapo(LOGPS, OLD, [1.0], level="sequence")


def test_vespo_by_hand(x64):
    w = np.exp(-0.3)
    for advantage, k, lam in ((1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)):
        phi = np.exp(lam) * w**k * np.exp(-lam * w)
        loss, metrics = policy_losses.vespo(LOGPS, OLD, [advantage], mask=ONES)
        np.testing.assert_allclose(loss, -phi * advantage * LOGPS, rtol=1e-12)
        np.testing.assert_allclose(metrics["vespo/phi_seq_mean"].value, phi * ONES, rtol=1e-12)
    np.testing.assert_allclose(vespo(OLD, OLD, [1.0], mask=ONES), -OLD, rtol=1e-12)
    corrected = 0.5 * w  # log w gains log 0.5
    phi = np.exp(3.0) * corrected**2 * np.exp(-3.0 * corrected)
    for weights in (np.array([[0.5, 1.0, 1.0]]), np.array([[0.5]])):
        result = vespo(LOGPS, OLD, [1.0], mask=ONES, importance_weights=weights)
        np.testing.assert_allclose(result, -phi * LOGPS, rtol=1e-12)


def test_dppo_drops_tokens_by_probability_and_not_by_ratio(x64):
    new, old = np.log([[0.9, 0.02, 0.5]]), np.log([[0.6, 0.01, 0.6]])
    ratio, penalty = np.exp(new - old), 1e-3 * (new - old) ** 2
    # the ratio 2 of the rare token is kept; +0.3 in probability is dropped where A > 0
    np.testing.assert_allclose(dppo(new, old, [1.0]), -ratio * [[0, 1, 1]] + penalty, rtol=1e-12)
    np.testing.assert_allclose(dppo(new, old, [-1.0]), ratio + penalty, rtol=1e-12)
    np.testing.assert_allclose(dppo(new, old, [-1.0], 0.05), ratio * [[1, 1, 0]] + penalty, rtol=1e-12)


def test_ipo_drops_tokens_in_both_directions(x64):
    """prime-rl's `ipo_loss_fn`, written out: the mask is symmetric, the gradient goes through the ratio."""
    new, old = np.log([[0.9, 0.02, 0.45]]), np.log([[0.6, 0.01, 0.6]])
    ratio, keep = np.exp(new - old), np.array([[0, 1, 0]])  # +0.3, +0.01, -0.15
    for advantage in (2.0, -2.0):
        expected = -advantage * ratio * keep + 1e-3 * (new - old) ** 2
        np.testing.assert_allclose(ipo(new, old, [advantage]), expected, rtol=1e-12)
        slope = jax.grad(lambda x, a=advantage: ipo(x, old, [a], threshold=0.2).sum())(new)
        expected = -advantage * ratio * [[0, 1, 1]] + 2e-3 * (new - old)
        np.testing.assert_allclose(slope, expected, rtol=1e-12)


@pytest.mark.parametrize("loss", [ipo, m2po])
def test_a_negative_threshold_would_leave_nothing(loss):
    with pytest.raises(ValueError, match=r"leaves out every token below a threshold of 0; got -0\.1"):
        loss(LOGPS, OLD, [1.0], mask=ONES, threshold=-0.1)


def test_rollout_is_drops_tokens_outside_the_range_whatever_the_advantage(x64):
    logps, old = np.array([[-1.0, -2.0, -0.5, -0.7]]), np.array([[-1.25, -1.5, -0.5, -0.8]])
    ratio, keep = np.exp(logps - old), np.array([[0, 0, 1, 1]])  # 1.28, 0.61, 1, 1.11
    for advantage in (2.0, -2.0):
        loss, metrics = policy_losses.rollout_is(logps, old, [advantage], 0.3, 0.2, mask=np.ones((1, 4)))
        np.testing.assert_allclose(loss, -advantage * ratio * keep * logps, rtol=1e-12)
        np.testing.assert_array_equal(metrics["clip_ratio/region_mean"].value, 1 - keep)
        slope = jax.grad(lambda x, a=advantage: rollout_is(x, old, [a], 0.3, 0.2).sum())(logps)
        np.testing.assert_allclose(slope, -advantage * ratio * keep, rtol=1e-12)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_verls_forms_of_dppo(x64, advantage):
    rng = np.random.default_rng(0)
    new, old = np.log(rng.uniform(0.001, 0.999, (2, 4, 30)))
    p, q, ratio = np.exp(new), np.exp(old), np.exp(np.clip(new - old, -20, 20))
    tv = p - q <= 0.3 if advantage > 0 else p - q >= -0.1
    kl = q * (old - new) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
    kl = (kl <= 0.3) | (p <= q) if advantage > 0 else (kl <= 0.1) | (p >= q)
    for loss, keep in ((dppo_tv, tv), (dppo_kl, kl)):
        assert keep.any() and not keep.all()
        gradient = jax.grad(lambda x, loss=loss: loss(x, old, [advantage] * 4, 0.1, 0.3, maximum=5.0).sum())(new)
        expected = -advantage * np.minimum(ratio, 5) * keep
        np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(loss(new, old, [advantage] * 4, 0.1, 0.3, maximum=5.0), expected * new, rtol=1e-9)


def test_dro(x64):
    expected = -(2 * LOGPS - 0.15 * np.square(LOGPS - OLD))
    np.testing.assert_allclose(dro(LOGPS, OLD, [2.0], beta=0.3), expected, rtol=1e-12)


def test_topr_tapers_bad_rows_alone(x64):
    # log-ratios 0.2, -0.5, 0: the row's ratio is exp(-0.3), and exp(0.2) without its second token
    mask = np.array([[1, 0, 1]])
    np.testing.assert_allclose(topr(LOGPS, OLD, [2.0], mask=ONES), -2 * LOGPS, rtol=1e-12)
    np.testing.assert_allclose(topr(LOGPS, OLD, [-2.0], mask=ONES), 2 * np.exp(-0.3) * LOGPS, rtol=1e-12)
    np.testing.assert_allclose(topr(LOGPS, OLD, [-2.0], mask=mask)[:, ::2], 2 * LOGPS[:, ::2], rtol=1e-12)
    gradient = jax.grad(lambda x: topr(x, OLD, [-2.0], mask=ONES).sum())(LOGPS)
    np.testing.assert_allclose(gradient, 2 * np.exp(-0.3) * ONES, rtol=1e-12)


def test_reinforce():
    np.testing.assert_allclose(reinforce(LOGPS, OLD, [2.0]), -2 * LOGPS, rtol=1e-6)


def test_value_clip_by_hand():
    values, old, returns = np.array([[1.0, 3.0, 0.0]]), np.array([[1.0, 1.0, 1.0]]), np.array([[2.0, 4.0, 0.0]])
    # clipped to 1, 1.5, 0.5: errors max(1, 1), max(1, 6.25), max(0, 0.25)
    np.testing.assert_allclose(value_clip(values, old, returns, 0.5), [[0.5, 3.125, 0.125]])
    np.testing.assert_allclose(value_clip(values, old, returns), [[0.5, 0.5, 0.0]])


# -- covariance selection ----------------------------------------------------------------------------------------------


def covariances(logps, advantages, mask):
    per_token = np.broadcast_to(advantages[:, None], logps.shape)
    return (per_token - per_token[mask].mean()) * (logps - logps[mask].mean())


def test_kl_cov_penalises_the_tokens_of_highest_covariance(x64):
    logps, old, advantages, mask = random_batch(8, 50)
    result = np.asarray(kl_cov(logps, old, advantages, mask=mask, fraction=0.05, kl_coef=2.0))
    extra = result + np.exp(logps - old) * advantages[:, None]
    terms = np.where(mask, covariances(logps, advantages, mask), -np.inf)
    count = int(0.05 * mask.sum())
    chosen = terms >= np.sort(terms.reshape(-1))[-count]
    np.testing.assert_allclose((extra * mask), np.where(chosen, 2.0 * abs(logps - old), 0), atol=1e-12)
    # at least one token, however small the fraction
    few = (
        np.asarray(kl_cov(logps, old, advantages, mask=mask, fraction=1e-9)) + np.exp(logps - old) * advantages[:, None]
    )
    assert (abs(few * mask) > 1e-12).sum() == 1


def test_m2po_by_hand(x64):
    # (log r)^2 are 0.04, 0.25 and 0: their mean is 0.0967, and 0.02 without the second token
    for threshold, kept in ((0.1, [1, 1, 1]), (0.02, [1, 0, 1]), (0.019, [0, 0, 1]), (0.0, [0, 0, 1])):
        expected = -2.0 * RATIO * kept
        np.testing.assert_allclose(m2po(LOGPS, OLD, [2.0], mask=ONES, threshold=threshold), expected, rtol=1e-12)
    # the token that is not sampled counts in no mean
    mask = np.array([[1, 1, 0]])
    result = m2po(LOGPS, OLD, [2.0], mask=mask, threshold=0.1)
    np.testing.assert_allclose(result[0, :2], [-2.0 * RATIO[0, 0], 0.0], rtol=1e-12)


@pytest.mark.parametrize("threshold", [1e-6, 0.01, 0.04, 0.08, 10.0])
def test_m2po_leaves_out_the_fewest(x64, threshold):
    """The largest squares go one by one until the mean of the rest is bounded."""
    logps, old, advantages, mask = random_batch(8, 50)
    squares = np.square(logps - old)
    left = sorted(squares[mask])
    while left and np.mean(left) > threshold:
        left.pop()
    out = np.asarray(policy_losses.m2po_tokens(logps, old, advantages, mask=mask, threshold=threshold))
    np.testing.assert_allclose(np.sort(squares[mask & ~out]), left)
    assert not (out & ~mask).any()
    loss, metrics = policy_losses.m2po(logps, old, advantages, mask=mask, threshold=threshold)
    expected = np.where(out, 0.0, -np.exp(logps - old) * advantages[:, None])
    np.testing.assert_allclose(np.asarray(loss)[mask], expected[mask], rtol=1e-12)
    np.testing.assert_array_equal(metrics["m2po/masked"].value, out)
    apart = [policy_losses.m2po(*(x[i : i + 4] for x in (logps, old, advantages)), mask=mask[i : i + 4],
                                selected=out[i : i + 4])[0] for i in (0, 4)]  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(apart), loss)


def test_m2po_drops_tokens_that_nobody_scored(x64):
    old = np.where([[0, 1, 0]], np.nan, OLD)
    gradient = jax.grad(lambda x: m2po(x, old, [2.0], mask=ONES, threshold=1.0).sum())(LOGPS)
    np.testing.assert_allclose(gradient, -2.0 * RATIO * [[1, 0, 1]], rtol=1e-12)


def test_clip_cov_drops_a_random_few_inside_the_band(x64):
    logps, old, advantages, mask = random_batch(8, 50, seed=1)
    options = {"mask": mask, "fraction": 0.02, "lower": 0.1, "upper": 2.0}
    plain = np.asarray(ppo_clip(logps, old, advantages, 0.2, 0.2, mask=mask))
    terms = covariances(logps, advantages, mask)
    ratio = np.exp(logps - old)
    free = plain <= -ratio * advantages[:, None] + 1e-12
    band = mask & (terms > 0.1) & (terms < 2.0) & free
    count = int(0.02 * mask.sum())
    assert band.sum() > 2 * count > 2
    draws = set()
    for seed in range(5):
        result = np.asarray(clip_cov(logps, old, advantages, 0.2, 0.2, key=jax.random.key(seed), **options))
        dropped = mask & (result != plain)
        assert dropped.sum() == count
        assert (dropped <= band).all()
        assert (result[dropped] == 0).all()
        draws.add(dropped.tobytes())
    assert len(draws) > 1
    few = options | {"lower": float(np.sort(terms[band])[-2]) - 1e-9, "upper": 1e9, "fraction": 0.5}
    result = np.asarray(clip_cov(logps, old, advantages, 0.2, 0.2, key=jax.random.key(0), **few))
    assert 1 <= (mask & (result != plain)).sum() <= 2 + (mask & (terms >= 2.0)).sum()


def test_clip_cov_drops_nothing_outside_the_band(x64):
    logps, old, advantages, mask = random_batch()
    result = clip_cov(logps, old, advantages, 0.2, 0.2, mask=mask, key=jax.random.key(0), lower=1e6, upper=1e7)
    np.testing.assert_allclose(result, ppo_clip(logps, old, advantages, 0.2, 0.2, mask=mask), rtol=1e-12)


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_cispo_has_no_gradient_through_the_weight(x64):
    result = jax.grad(lambda x: cispo(x, OLD, [1.5], 0.2, 1.1).sum())(LOGPS)
    np.testing.assert_allclose(result, -np.minimum(RATIO, 1.1) * 1.5, rtol=1e-12)


def test_clipped_tokens_have_no_gradient_under_ppo_and_keep_one_under_cispo(x64):
    clipped = jax.grad(lambda x: ppo_clip(x, OLD, [1.0], 0.2, 0.2).sum())(LOGPS)
    np.testing.assert_allclose(clipped, [[0, -RATIO[0, 1], -1]], rtol=1e-12)


def test_vespo_has_no_gradient_through_the_weight(x64):
    w = np.exp(-0.3)
    phi = np.exp(3.0) * w**2 * np.exp(-3.0 * w)
    np.testing.assert_allclose(
        jax.grad(lambda x: vespo(x, OLD, [1.0], mask=ONES).sum())(LOGPS), -phi * ONES, rtol=1e-12
    )


def test_sapo_gradient_is_one_at_ratio_one_and_shrinks_away_from_it(x64):
    slope = jax.vmap(jax.grad(lambda x: -sapo(x[None, None], np.zeros((1, 1)), [1.0])[0, 0]))
    at = np.asarray(slope(jnp.log(jnp.array([0.3, 1.0, 3.0]))))
    np.testing.assert_allclose(at[1], 1.0, rtol=1e-12)  # 4 * sigmoid'(0) * r
    assert at[0] < 1
    assert at[2] < 3


@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_gspo_token_equals_gspo_in_value_and_gradient(x64, advantage):
    logps, old, _, mask = random_batch(4)
    advantages = np.full(4, advantage)
    weights = loss_weights(mask, "sequence")
    np.testing.assert_allclose(
        gspo_token(logps, old, advantages, 0.1, 0.1, mask=mask), gspo(logps, old, advantages, 0.1, 0.1, mask=mask)
    )
    np.testing.assert_allclose(
        gradient("gspo_token", logps, old, advantages, mask, weights),
        gradient("gspo", logps, old, advantages, mask, weights),
        rtol=1e-6,
        atol=1e-9,
    )


def test_gspo_token_scales_each_token_by_its_own_advantage(x64):
    old = np.zeros((1, 2))
    result = jax.grad(lambda x: gspo_token(x, old, [[1.0, 3.0]], 0.2, 0.2, mask=np.ones((1, 2))).sum())(old)
    np.testing.assert_allclose(result, [[-1.0, -3.0]])


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("rloo", "luspo", "clip_cov", "a2po")])
def test_on_policy_every_loss_has_the_policy_gradient(x64, name):
    logps, _, advantages, mask = random_batch()
    weights = np.asarray(loss_weights(mask, "sequence"), np.float64)
    expected = -weights * advantages[:, None]
    np.testing.assert_allclose(gradient(name, logps, logps, advantages, mask, weights), expected, rtol=1e-6, atol=1e-12)


def test_on_policy_rloo_has_the_gradient_of_the_whole_sequence(x64):
    logps, _, advantages, mask = random_batch()
    weights = np.asarray(loss_weights(mask, "sequence"), np.float64)
    expected = -np.where(mask, advantages[:, None], 0.0) / len(mask)
    np.testing.assert_allclose(gradient("rloo", logps, logps, advantages, mask, weights), expected, rtol=1e-6)
    np.testing.assert_allclose(gradient("luspo", logps, logps, advantages, mask, weights), expected, rtol=1e-6)


# -- what all losses share ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_padding_is_never_read(x64, name):
    logps, old, advantages, mask = random_batch()
    weights = np.asarray(loss_weights(mask, "sequence"), np.float64)
    junk_logps, junk_old = np.where(mask, logps, 1e4), np.where(mask, old, np.nan)
    plain = np.asarray(call(name, logps, old, advantages, mask))
    junk = np.asarray(call(name, junk_logps, junk_old, advantages, mask))
    np.testing.assert_allclose(junk[mask], plain[mask], rtol=1e-12)
    assert np.isfinite(junk).all()
    gradients = np.asarray(gradient(name, junk_logps, junk_old, advantages, mask, weights))
    np.testing.assert_allclose(gradients, gradient(name, logps, old, advantages, mask, weights), rtol=1e-12, atol=1e-15)
    assert (gradients[~mask] == 0).all()


@pytest.mark.parametrize("name", SEQUENCE_LEVEL)
def test_sequence_losses_hold_one_number_per_row(x64, name):
    logps, old, advantages, mask = random_batch()
    result = np.asarray(call(name, logps, old, advantages, mask))
    np.testing.assert_allclose(result, result[:, :1] * np.ones_like(logps), rtol=1e-12)
    np.testing.assert_allclose((loss_weights(mask, "sequence") * result).sum(), result[:, 0].mean(), rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_row_advantages_equal_token_advantages(x64, name):
    logps, old, advantages, mask = random_batch()
    wide = np.broadcast_to(advantages[:, None], logps.shape)
    np.testing.assert_allclose(call(name, logps, old, wide, mask), call(name, logps, old, advantages, mask), rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_reaches_old_logps_or_advantages(x64, name):
    logps, old, advantages, mask = random_batch()
    gradients = jax.jit(jax.grad(lambda o, a: call(name, logps, o, a, mask).sum(), argnums=(0, 1)))(old, advantages)
    for each in gradients:
        np.testing.assert_array_equal(each, 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_clip_ranges_may_be_traced(name):
    logps, old, advantages, mask = random_batch()
    options = {"key": jax.random.key(0)} if name == "clip_cov" else {}
    loss = partial(getattr(policy_losses, name), mask=mask, **options)
    jax.eval_shape(loss, logps, old, advantages, 0.2, 0.2)


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_inputs_give_float32(name):
    logps, old, advantages, mask = random_batch()
    result = call(name, *(jnp.asarray(x, "bfloat16") for x in (logps, old, advantages)), mask)
    assert result.dtype == jnp.float32
    assert result.shape == logps.shape


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("clip_cov", "kl_cov", "m2po")])
def test_rows_do_not_see_each_other(x64, name):
    logps, old, advantages, mask = random_batch()
    whole = np.asarray(call(name, logps, old, advantages, mask))
    parts = [
        np.asarray(call(name, logps[i : i + 2], old[i : i + 2], advantages[i : i + 2], mask[i : i + 2]))
        for i in (0, 2, 4)
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-12)


# -- clip statistics ---------------------------------------------------------------------------------------------------


def test_clip_fractions_count_violations_by_the_sign_of_the_advantage():
    good = clip_fractions(LOGPS, OLD, [1.0], 0.2, 0.2)
    np.testing.assert_array_equal(good.low, [[0, 0, 0]])
    np.testing.assert_array_equal(good.high, [[1, 0, 0]])
    bad = clip_fractions(LOGPS, OLD, [-1.0], 0.2, 0.2)
    np.testing.assert_array_equal(bad.low, [[0, 1, 0]])
    np.testing.assert_array_equal(bad.high, [[0, 0, 0]])


def test_region_is_where_the_clipped_branch_is_the_larger_loss(x64):
    logps, old, advantages, _ = random_batch(20, 30)
    ratio = np.exp(logps - old)
    branch = -advantages[:, None] * np.clip(ratio, 0.8, 1.2) > -advantages[:, None] * ratio
    region = np.asarray(clip_fractions(logps, old, advantages, 0.2, 0.2).region)
    np.testing.assert_array_equal(region, branch)
    assert 0.1 < region.mean() < 0.9


def test_sequence_level_clip_fractions():
    result = clip_fractions(LOGPS, OLD, [-1.0], 0.05, 0.05, mask=ONES, level="sequence")
    np.testing.assert_array_equal(result.low, ONES)
    # the mean of the log-ratios is -0.1, their sum -0.3
    assert not clip_fractions(LOGPS, OLD, [-1.0], 0.2, 0.2, mask=ONES, level="sequence").low.any()
    result = clip_fractions(LOGPS, OLD, [-1.0], 0.2, 0.2, mask=ONES, level="sequence_sum")
    np.testing.assert_array_equal(result.low, ONES)
    with pytest.raises(ValueError, match="'sequence_sum' together with a mask"):
        clip_fractions(LOGPS, OLD, [-1.0], 0.05, 0.05, level="sequence")


def test_dual_clip_fraction():
    log5, zero = np.log([[5.0]]), np.zeros((1, 1))
    assert float(clip_fractions(log5, zero, [-1.0], 0.2, 0.2, dual_clip=3.0).dual[0, 0]) == 1
    assert float(clip_fractions(log5, zero, [1.0], 0.2, 0.2, dual_clip=3.0).dual[0, 0]) == 0
