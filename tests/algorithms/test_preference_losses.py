from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import preference_losses
from jaxrl_llm.algorithms.losses import with_metrics
from jaxrl_llm.algorithms.preference_losses import (
    alphapo,
    aot,
    aot_unpaired,
    apo_zero_unpaired,
    bco_pair,
    bradley_terry,
    cpo,
    discopop,
    divergence_scores,
    dpo,
    exo_pair,
    gold_sft,
    hinge,
    ipo,
    kto,
    kto_kl,
    log1mexp,
    log_odds_ratio,
    orpo,
    robust,
    sigmoid_norm,
    simpo,
    tpo,
    tpo_l,
)

# one pair: chosen -10 against -11 over 4 tokens, rejected -12 against -11.5 over 5
PAIR = tuple(np.array([x]) for x in (-10.0, -12.0, -11.0, -11.5))
LENGTHS = (np.array([4.0]), np.array([5.0]))
BETA = 0.1
PAIRED = ("dpo", "hinge", "ipo", "sigmoid_norm", "exo_pair", "robust", "discopop", "nca_pair", "bco_pair", "sppo_hard")
PAIRED += ("aot", "aot_unpaired", "apo_zero", "apo_down", "cpo", "simpo", "alphapo", "orpo", "tpo", "tpo_l")


def logistic(x):
    return 1 / (1 + np.exp(-x))


def log_logistic(x):
    return -np.logaddexp(0, -x)


@partial(jax.jit, static_argnames=("name", "normalize", "divergence", "alpha", "label_smoothing"))
def call(name, *logps, lengths=LENGTHS, **options):
    """Calls any paired loss by name the way an objective does."""
    return with_metrics(getattr(preference_losses, name)(*logps, BETA, lengths=lengths, **options))[0]


def random_pairs(pairs=6, seed=0):
    rng = np.random.default_rng(seed)
    logps = [-rng.uniform(5, 20, pairs) for _ in range(4)]
    return logps, (rng.integers(3, 9, pairs).astype(float), rng.integers(3, 9, pairs).astype(float))


# -- the worked pair ---------------------------------------------------------------------------------------------------

PUBLISHED = [
    ("dpo", {}, 0.62095705),
    ("robust", {"label_smoothing": 0.1}, 0.60220705),
    ("dpo", {"label_smoothing": 0.1}, 0.63595705),
    ("hinge", {}, 0.85),
    ("ipo", {}, 21.6225),
    ("ipo", {"normalize": False}, 12.25),
    ("exo_pair", {"label_smoothing": 1e-3}, 2.50551656),
    ("nca_pair", {}, 1.35082481),
    ("bco_pair", {}, 1.31285631),
    ("sppo_hard", {}, 36.25),
    ("apo_zero", {}, 0.96252342),
    ("apo_down", {}, 0.98754934),
    ("discopop", {}, 0.84933758),
    ("sigmoid_norm", {}, 0.67580030),
    ("dpo", {"divergence": "forward_kl"}, 0.63115438),
    ("dpo", {"divergence": "js_divergence"}, 0.66065216),
    ("dpo", {"divergence": "alpha_divergence", "alpha": 0.5}, 0.62769095),
]


@pytest.mark.parametrize(("name", "options", "value"), PUBLISHED)
def test_the_worked_pair(x64, name, options, value):
    np.testing.assert_allclose(call(name, *PAIR, **options), [value], atol=6e-9)


def test_the_worked_pair_to_the_last_digit(x64):
    u, v, b = 1.0, -0.5, BETA
    d = u - v
    m, q, e = logistic(b * d / 0.05), logistic(b * d), 1e-3
    exo = q * (log_logistic(b * d) - np.log1p(-e)) + (1 - q) * (log_logistic(-b * d) - np.log(e))
    expected = {
        "dpo": -log_logistic(b * d),
        "hinge": 1 - b * d,
        "ipo": (u / 4 - v / 5 - 5) ** 2,
        "sigmoid_norm": -log_logistic(b * (u / 4 - v / 5)),
        "exo_pair": exo,
        "nca_pair": -log_logistic(b * u) - 0.5 * log_logistic(-b * u) - 0.5 * log_logistic(-b * v),
        "bco_pair": -log_logistic(b * u) - log_logistic(-b * v),
        "sppo_hard": (u - 5) ** 2 + (v + 5) ** 2,
        "apo_zero": 1 - logistic(b * u) + logistic(b * v),
        "apo_down": logistic(b * u) + 1 - logistic(b * d),
        "discopop": -log_logistic(b * d) * (1 - m) + np.exp(-b * d) * m,
        "aot": -log_logistic(b * d),
        "aot_unpaired": -log_logistic(b * d),
        "cpo": -log_logistic(b * 2.0),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(call(name, *PAIR), [value], rtol=1e-12, err_msg=name)


def test_reference_free_family(x64):
    chosen, rejected = PAIR[:2]
    a, b = -10 / 4, -12 / 5
    value = simpo(chosen, rejected, beta=0.1, gamma=0.5, lengths=LENGTHS)
    np.testing.assert_allclose(value, [0.98031332], atol=6e-9)
    np.testing.assert_allclose(value, -log_logistic(0.1 * (a - b - 0.5 / 0.1)), rtol=1e-12)
    paper = simpo(chosen, rejected, beta=2.0, gamma=1.0, lengths=LENGTHS)
    np.testing.assert_allclose(paper, -log_logistic(2 * (a - b - 0.5)), rtol=1e-12)
    np.testing.assert_allclose(cpo(chosen, rejected, beta=0.1), -log_logistic(0.1 * 2.0), rtol=1e-12)
    odds = (a - b) - (np.log1p(-np.exp(a)) - np.log1p(-np.exp(b)))
    np.testing.assert_allclose(log_odds_ratio(chosen, rejected, LENGTHS), odds, rtol=1e-12)
    np.testing.assert_allclose(orpo(chosen, rejected, lengths=LENGTHS)[0], -0.1 * log_logistic(odds), rtol=1e-12)
    reward = [(1 - np.exp(p) ** -0.3) / 0.3 for p in (a, b)]
    value = alphapo(chosen, rejected, beta=1.5, gamma=0.4, alpha=0.3, lengths=LENGTHS)
    np.testing.assert_allclose(value, -log_logistic(1.5 * (reward[0] - reward[1]) - 0.4), rtol=1e-12)
    np.testing.assert_allclose(tpo(chosen, rejected, beta=0.1), -log_logistic(0.1 * 2.0), rtol=1e-12)
    smoothed = tpo(chosen, rejected, beta=0.1, label_smoothing=0.2)
    np.testing.assert_allclose(smoothed, -0.8 * log_logistic(0.2) - 0.2 * log_logistic(-0.2), rtol=1e-12)
    value = tpo_l(chosen, rejected, beta=2.0, gamma=1.0, lengths=LENGTHS)
    np.testing.assert_allclose(value, -log_logistic(2 * (a - b) - 1.0), rtol=1e-12)
    np.testing.assert_array_equal(gold_sft(chosen, rejected), [0.0])


def test_alphapo_tends_to_simpo(x64):
    logps, lengths = random_pairs()
    limit = simpo(*logps, lengths=lengths)
    np.testing.assert_allclose(alphapo(*logps, alpha=1e-9, lengths=lengths), limit, rtol=1e-6)
    np.testing.assert_array_equal(alphapo(*logps, alpha=0.0, lengths=lengths), limit)


# -- properties --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRED)
def test_the_loss_falls_when_the_rejected_becomes_less_likely(x64, name):
    policy_chosen, policy_rejected, ref_chosen, ref_rejected = PAIR
    gradient = jax.grad(lambda x: call(name, policy_chosen, x, ref_chosen, ref_rejected).sum())(policy_rejected)
    assert float(gradient[0]) > 0


@pytest.mark.parametrize("name", PAIRED)
def test_no_gradient_reaches_the_reference(name):
    logps, lengths = random_pairs()
    function = lambda c, r: call(name, logps[0], logps[1], c, r, lengths=lengths).sum()  # noqa: E731
    for gradient in jax.grad(function, argnums=(0, 1))(*logps[2:]):
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("name", PAIRED)
def test_no_reference_is_a_reference_of_zero(x64, name):
    logps, lengths = random_pairs()
    free = call(name, logps[0], logps[1], None, None, lengths=lengths)
    zeros = np.zeros_like(logps[0])
    np.testing.assert_allclose(free, call(name, logps[0], logps[1], zeros, zeros, lengths=lengths), rtol=1e-12)


@pytest.mark.parametrize("name", ["simpo", "cpo", "alphapo", "orpo", "tpo", "tpo_l"])
def test_reference_free_losses_do_not_read_the_reference(name):
    logps, lengths = random_pairs()
    with_reference = call(name, *logps, lengths=lengths)
    np.testing.assert_array_equal(with_reference, call(name, *logps[:2], None, None, lengths=lengths))


@pytest.mark.parametrize("name", [name for name in PAIRED if not name.startswith("aot")])
def test_pairs_do_not_see_each_other(x64, name):
    logps, lengths = random_pairs()
    whole = np.asarray(call(name, *logps, lengths=lengths))
    for i in range(len(whole)):
        one = call(name, *(x[i : i + 1] for x in logps), lengths=tuple(x[i : i + 1] for x in lengths))
        np.testing.assert_allclose(one, whole[i : i + 1], rtol=1e-12)


@pytest.mark.parametrize("name", PAIRED)
def test_half_precision_inputs_are_computed_in_float32(name):
    logps, lengths = random_pairs()
    low = [jnp.asarray(x, "bfloat16") for x in logps]
    result = call(name, *low, lengths=lengths)
    assert result.dtype == jnp.float32
    wide = call(name, *(np.asarray(x, np.float32) for x in low), lengths=lengths)
    np.testing.assert_allclose(result, wide, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ipo", "sigmoid_norm", "simpo", "alphapo", "orpo", "tpo_l"])
def test_losses_that_average_ask_for_lengths(name):
    with pytest.raises(ValueError, match="averages over tokens; pass lengths="):
        call(name, *PAIR, lengths=None)


def test_aot_compares_sorted_margins(x64):
    logps, lengths = random_pairs()
    policy, ref = np.sort(logps[0] - logps[1]), np.sort(logps[2] - logps[3])
    d = policy - ref
    expected = -0.9 * log_logistic(BETA * d) - 0.1 * log_logistic(-BETA * d)
    np.testing.assert_allclose(aot(*logps, BETA, lengths=lengths, label_smoothing=0.1), expected, rtol=1e-12)
    d = np.sort(logps[0] - logps[2]) - np.sort(logps[1] - logps[3])
    expected = -0.9 * log_logistic(BETA * d) - 0.1 * log_logistic(-BETA * d)
    np.testing.assert_allclose(aot_unpaired(*logps, BETA, label_smoothing=0.1), expected, rtol=1e-12)
    mixed = [x[::-1] for x in logps]
    np.testing.assert_allclose(aot(*mixed, BETA), aot(*logps, BETA), rtol=1e-12)


def test_robust_is_unbiased_under_flipped_labels(x64):
    policy_chosen, policy_rejected, ref_chosen, ref_rejected = random_pairs()[0]
    e = 0.2
    kept = robust(policy_chosen, policy_rejected, ref_chosen, ref_rejected, BETA, label_smoothing=e)
    flipped = robust(policy_rejected, policy_chosen, ref_rejected, ref_chosen, BETA, label_smoothing=e)
    clean = dpo(policy_chosen, policy_rejected, ref_chosen, ref_rejected, BETA)
    np.testing.assert_allclose((1 - e) * kept + e * flipped, clean, rtol=1e-10)


def test_exo_is_the_kl_to_the_smoothed_label(x64):
    q, e = logistic(0.15), 0.05
    expected = q * np.log(q / (1 - e)) + (1 - q) * np.log((1 - q) / e)
    np.testing.assert_allclose(exo_pair(*PAIR, BETA, label_smoothing=e), [expected], rtol=1e-10)


@pytest.mark.parametrize(
    ("function", "value"), [(exo_pair, 0.0), (exo_pair, 1.0), (robust, 0.5), (robust, -0.1), (dpo, 1.5), (aot, -0.1)]
)
def test_label_smoothing_out_of_range(function, value):
    with pytest.raises(ValueError, match=f"got {value}"):
        function(*PAIR, BETA, label_smoothing=value)


def test_hinge_stops_at_the_margin():
    np.testing.assert_array_equal(hinge([100.0], [-100.0], [0.0], [0.0], BETA), [0.0])


def test_discopop_temperature(x64):
    l, m = 0.15, logistic(0.15 / 0.5)  # noqa: E741
    expected = -log_logistic(l) * (1 - m) + np.exp(-l) * m
    np.testing.assert_allclose(discopop(*PAIR, BETA, temperature=0.5), [expected], rtol=1e-12)


def test_bco_reward_shift(x64):
    expected = -log_logistic(0.1 - 0.3) - log_logistic(-(-0.05 - 0.3))
    np.testing.assert_allclose(bco_pair(*PAIR, BETA, reward_shift=0.3), [expected], rtol=1e-12)


def test_an_objective_mixing_dpo_and_ipo_normalises_only_ipo(x64):
    logps, lengths = random_pairs()
    np.testing.assert_array_equal(dpo(*logps, BETA, lengths=lengths), dpo(*logps, BETA))
    assert (np.asarray(ipo(*logps, BETA, lengths=lengths)) != np.asarray(ipo(*logps, BETA, normalize=False))).all()


# -- divergences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"])
def test_divergence_scores_are_zero_at_ratio_one_with_slope_and_rise(x64, divergence):
    u = np.linspace(-3, 3, 13)
    scores = np.asarray(divergence_scores(u, divergence))
    np.testing.assert_allclose(scores[6], 0, atol=1e-15)
    assert (np.diff(scores) > 0).all()
    slope = jax.grad(lambda x: divergence_scores(x, divergence))(0.0)
    assert float(slope) == pytest.approx(0.5 if divergence == "js_divergence" else 1.0)


def test_alpha_divergence_tends_to_reverse_kl(x64):
    u = np.linspace(-3, 3, 13)
    np.testing.assert_allclose(divergence_scores(u, "alpha_divergence", 1 + 1e-5), u, rtol=1e-4, atol=1e-12)
    np.testing.assert_array_equal(divergence_scores(u, "alpha_divergence", 1.0), u)


def test_losses_far_from_the_reference_are_numbers():
    """Log-ratios of long completions pass 89, beyond which float32 has no exponential."""
    far = np.array([-1e4, -200.0, 200.0], np.float32)
    for divergence in ("forward_kl", "alpha_divergence"):
        assert np.isfinite(divergence_scores(far, divergence)).all()
        slopes = jax.grad(lambda c, r: dpo(c, r, 0 * c, 0 * r, BETA, divergence=divergence).sum(), (0, 1))  # noqa: B023
        assert np.isfinite(slopes(0.1 * far, 2 * far)).all() and np.isfinite(slopes(2 * far, 0.1 * far)).all()
        lengths = jnp.full(3, 20.0), jnp.full(3, 30.0)
        squared = jax.value_and_grad(
            lambda c, r: ipo(c, r, 0 * c, 0 * r, BETA, lengths=lengths, divergence=divergence).sum(),  # noqa: B023
            (0, 1),
        )
        for pair in ((np.float32([-50.0, -95.0, 1.0]), far), (far, np.float32([-50.0, -39.0, -95.0]))):
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(squared(*pair)))
    value, slope = jax.vmap(jax.value_and_grad(lambda x: discopop(x[None], -x[None], None, None, 1.0)[0]))(far)
    np.testing.assert_allclose(value, [2e4, 400.0, 0.0], rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(slope, [-2.0, -2.0, 0.0], rtol=1e-6, atol=1e-30)
    unlikely = jax.value_and_grad(lambda c, r: alphapo(c, r, lengths=(c * 0 + 1, r * 0 + 1), alpha=1.0).sum(), (0, 1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(unlikely(np.float32([-100.0]), np.float32([-95.0]))))


def test_unknown_divergence():
    with pytest.raises(ValueError, match="unknown divergence 'kl'; choose one of reverse_kl"):
        divergence_scores(0.0, "kl")


def test_sigmoid_norm_centres_the_divergence_before_dividing_by_length(x64):
    scores = np.log(2) + log_logistic(np.array([1.0, -0.5]))
    expected = -log_logistic(BETA * (scores[0] / 4 - scores[1] / 5))
    result = sigmoid_norm(*PAIR, BETA, lengths=LENGTHS, divergence="js_divergence")
    np.testing.assert_allclose(result, [expected], rtol=1e-12)


# -- labelled rows and reward models -----------------------------------------------------------------------------------


def test_kto_by_hand(x64):
    policy, labels = np.array([0.4, -0.2, 0.3]), np.array([1, 1, 0])
    kl = kto_kl(np.array([0.05, 0.20, -0.10]), np.zeros(3))
    np.testing.assert_allclose(kl, 0.05, rtol=1e-12)
    losses = kto(policy, np.zeros(3), labels, 0.1, kl=kl)
    expected = [1 - logistic(0.1 * 0.35), 1 - logistic(0.1 * -0.25), 1 - logistic(0.1 * -0.25)]
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    weighted = kto(policy, np.zeros(3), labels, 0.1, kl=kl, desirable_weight=0.0, undesirable_weight=2.0)
    np.testing.assert_allclose(weighted, np.array(expected) * [0, 0, 2], rtol=1e-12)


def test_kto_kl_is_not_negative_and_carries_no_gradient():
    assert float(kto_kl(np.array([-1.0, -2.0]), np.zeros(2))) == 0
    assert float(kto_kl(np.array([3.0, -99.0]), np.zeros(2), np.array([1, 0]))) == 3
    np.testing.assert_array_equal(jax.grad(lambda x: kto_kl(x, np.zeros(2)))(np.array([1.0, 2.0])), 0.0)


def test_kto_pushes_labels_apart():
    gradient = jax.grad(lambda x: kto(x, np.zeros(2), np.array([True, False]), kl=0.1).sum())(np.zeros(2))
    assert float(gradient[0]) < 0 < float(gradient[1])


def test_apo_zero_unpaired(x64):
    losses = apo_zero_unpaired(np.array([0.4, 0.3]), np.zeros(2), np.array([1, 0]), 0.1, kl=99.0)
    np.testing.assert_allclose(losses, [1 - logistic(0.04), logistic(0.03)], rtol=1e-12)


def test_bradley_terry_by_hand(x64):
    chosen, rejected = np.array([1.0, 0.0]), np.array([0.5, 2.0])
    np.testing.assert_allclose(bradley_terry(chosen, rejected), -log_logistic(chosen - rejected), rtol=1e-12)
    expected = -log_logistic(chosen - rejected - [0.2, 0.0]) + 0.01 * np.array([2.25, 4.0])
    np.testing.assert_allclose(bradley_terry(chosen, rejected, np.array([0.2, 0.0]), 0.01), expected, rtol=1e-12)


def test_log1mexp_is_accurate_at_both_ends(x64):
    x = np.array([-1e-12, -0.5, -0.7, -40.0])
    expected = [np.log(1e-12), np.log1p(-np.exp(-0.5)), np.log1p(-np.exp(-0.7)), -np.exp(-40.0)]
    np.testing.assert_allclose(log1mexp(x), expected, rtol=1e-9)
    assert np.isfinite(jax.vmap(jax.grad(log1mexp))(x)).all()


def test_orpo_of_a_completion_that_is_certain():
    """In float32 log-probs near 0 are rounded to 0, or even above it."""
    lengths = (jnp.ones(1), jnp.ones(1))
    for certain in (0.0, 1e-7, -1e-8):
        for sign in (0, 1):
            pair = [jnp.array([certain]), jnp.array([-3.0])][:: 1 - 2 * sign]
            values = jax.value_and_grad(lambda c, r: orpo(c, r, lengths=lengths)[0].sum(), argnums=(0, 1))(*pair)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(values))
