"""Advantages, losses, KL terms and corrections against verl 0.9's own functions, on random rows with gaps in the mask.

verl is no dependency of the tests: without it this file is skipped, on CI too. Beside the `dev` extra it needs a folder
with verl and what it imports (ray among them, of which nothing is started):

    pip install --no-deps --target /tmp/verl verl==0.9.1 ray tensordict codetiming omegaconf pyvers orjson
    PYTHONPATH=/tmp/verl python -m pytest tests/parity/test_verl.py

What differs on purpose has a test that says what each of the two gives. Everything is float64, but for constants and
masks that a library holds in float32.
"""

import functools
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import advantages, off_policy, policy_losses
from jaxrl_llm.algorithms.aggregation import loss_weights, whiten
from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.algorithms.kl import AdaptiveKL, kl_estimate
from jaxrl_llm.algorithms.losses import with_metrics
from jaxrl_llm.config import default, validate, with_correction
from jaxrl_llm.config.corrections import PRESETS, settings_of
from jaxrl_llm.models.logprobs import TokenStatistics
from jaxrl_llm.training.logging.metric_names import VERL
from jaxrl_llm.training.objectives.policy_gradient import policy_gradient, policy_objective
from jaxrl_llm.training.setup.objectives import policy_spec

torch = pytest.importorskip("torch")
core = pytest.importorskip("verl.trainer.ppo.core_algos")
corrections = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
configs = pytest.importorskip("verl.workers.config")
algorithm = pytest.importorskip("verl.trainer.config.algorithm")

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore")]

N, T, K, BETA = 12, 9, 4, 0.1
ABSENT = [1, 6, 7]  # rows that no reward applies to here, and that verl never sees: its groups have 3, 2 and 4 rows
PRESENT = np.setdiff1d(np.arange(N), ABSENT)
INDEX = np.arange(N) // K


def double(x):
    return torch.tensor(np.asarray(x), dtype=torch.float64)


def close(ours, theirs, **tolerances):
    np.testing.assert_allclose(ours, theirs, **{"rtol": 1e-6, "atol": 1e-8, **tolerances})


@pytest.fixture
def rows():
    rng = np.random.default_rng(3)
    mask = (np.arange(T) < rng.integers(3, T + 1, (N, 1))) & (rng.random((N, T)) < 0.85)
    mask[:, 0] = True
    logps = -rng.exponential(1.0, (N, T))
    found = SimpleNamespace(
        mask=mask.astype(float),
        logps=logps,
        old=-np.abs(logps + 0.4 * rng.normal(size=(N, T))),
        ref=-np.abs(logps + 0.4 * rng.normal(size=(N, T))),
        sampled=-np.abs(logps + 0.3 * rng.normal(size=(N, T))),
        advantages=rng.normal(size=(N, 1)) * np.ones((N, T)),
        values=rng.normal(size=(N, T)),
        returns=rng.normal(size=(N, T)),
        rewards=rng.normal(size=(N, 2)),
        greedy=rng.normal(size=N // K),
        sum_pi_squared=rng.uniform(0.1, 0.9, (N, T)),
    )
    found.outcome = found.rewards @ np.array([1.0, 0.5])
    penalty = found.old - found.ref
    found.token_rewards = np.array(advantages.token_rewards(found.outcome, mask, penalty, BETA))
    found.scores = found.token_rewards.sum(1)
    found.norms = 1 - 2 * np.exp(found.old) + found.sum_pi_squared
    return found


# -- advantages --------------------------------------------------------------------------------------------------------


def verl_advantages(rows, name, keep=slice(None), **options):
    """(advantages, returns) `[rows of keep, T]` of verl's estimator."""
    given = {
        "token_level_rewards": double(rows.token_rewards),
        "response_mask": double(rows.mask),
        "values": double(rows.values),
        "reward_baselines": double(np.repeat(rows.greedy, K)),
        "old_log_probs": double(rows.old),
        "sum_pi_squared": double(rows.sum_pi_squared),
        "index": INDEX,
    }
    estimator = core.get_adv_estimator_fn(name)
    takes = inspect.signature(estimator).parameters
    given = {key: x[keep] for key, x in given.items() if key in takes}
    if "config" in takes:
        given["config"] = algorithm.AlgoConfig(gamma=0.97)
    return tuple(x.numpy() for x in estimator(**given | options))


ADVANTAGES = [
    ("grpo", {}, lambda r: advantages.group_advantages(r.scores, K, eps=1e-6)),
    ("grpo", {"norm_adv_by_std_in_grpo": False}, lambda r: advantages.group_advantages(r.scores, K, "none")),
    ("grpo_vectorized", {}, lambda r: advantages.group_advantages(r.scores, K, eps=1e-6)),
    ("rloo", {}, lambda r: advantages.rloo_advantages(r.scores, K)),
    ("rloo_vectorized", {}, lambda r: advantages.rloo_advantages(r.scores, K)),
    ("opo", {}, lambda r: advantages.opo_advantages(r.scores, r.mask.sum(1), K)),
    ("gpg", {}, lambda r: advantages.gpg_advantages(r.scores, K)),
    ("gpg", {"f_norm": 2.0}, lambda r: advantages.gpg_advantages(r.scores, K, f_norm=2.0)),
    ("grpo_passk", {}, lambda r: advantages.passk_advantages(r.scores, K)),
    (
        "grpo_passk",
        {"config": {"norm_adv_by_std_in_grpo": False}},
        lambda r: advantages.passk_advantages(r.scores, K, normalize=False),
    ),
    ("reinforce_plus_plus", {}, lambda r: advantages.reinforce_plus_plus_advantages(r.token_rewards, r.mask, 0.97)),
    (
        "reinforce_plus_plus_baseline",
        {},
        lambda r: advantages.reinforce_plus_plus_baseline_advantages(r.scores, r.mask, K),
    ),
    (
        "gae",
        {"gamma": 0.97, "lam": 0.9},
        lambda r: advantages.ppo_advantages(r.token_rewards, r.values, r.mask, 0.97, 0.9),
    ),
    ("tir_optimal_token_baseline", {}, lambda r: advantages.otb_advantages(r.token_rewards, r.norms, r.mask, K)),
]


def test_every_estimator_of_verl_has_its_test():
    others = {"optimal_token_baseline", "remax", "gdpo"}
    assert {name for name, *_ in ADVANTAGES} | others == core.ADV_ESTIMATOR_REGISTRY.keys()


@pytest.mark.parametrize(("name", "options", "rule"), ADVANTAGES)
def test_advantages(rows, name, options, rule):
    """Rows without a reward have advantage 0 and change nothing for the others."""
    expected = verl_advantages(rows, name, PRESENT, **options)
    rows.scores[ABSENT], rows.mask[ABSENT] = np.nan, 0.0
    found = rule(rows)
    found, returns = found if isinstance(found, tuple) else (found, None)
    found = np.asarray(found).reshape(N, -1) * rows.mask
    mask = rows.mask[PRESENT]
    close(found[PRESENT], expected[0] * mask)
    assert not found[ABSENT].any() and np.abs(expected[0]).max() > 0.1
    if returns is not None:
        close(returns[PRESENT], expected[1] * mask)


LONELY = [
    ("grpo", lambda r: advantages.group_advantages(r.scores, K, eps=1e-6)),
    ("rloo", lambda r: advantages.rloo_advantages(r.scores, K)),
    ("opo", lambda r: advantages.opo_advantages(r.scores, r.mask.sum(1), K)),
    ("gpg", lambda r: advantages.gpg_advantages(r.scores, K)),
]


@pytest.mark.parametrize(("name", "rule"), LONELY)
def test_a_group_of_one_row_is_its_score_in_verl_and_0_here(rows, name, rule):
    """Nothing says whether it is a good score. verl's `rloo_vectorized` has 0 too, and its pass@k refuses the batch."""
    keep = np.arange(K - 1, N)
    expected = verl_advantages(rows, name, keep)[0][0, 0]
    scale = len(keep) if name == "gpg" else 1  # over the number of scores that are not 0, which is the same
    close(expected * scale, rows.scores[keep[0]] * scale)
    close(verl_advantages(rows, "rloo_vectorized", keep)[0][0], 0.0)
    with pytest.raises(ValueError, match="at least 2 samples"):
        verl_advantages(rows, "grpo_passk", keep)
    rows.scores[: K - 1] = np.nan
    assert not np.asarray(rule(rows))[:K].any()


def test_the_constant_beside_a_standard_deviation(rows):
    """It is 1e-4 here and 1e-6 in verl: an advantage of almost equal scores is smaller here."""
    rows.token_rewards *= 1e-4
    scores = rows.token_rewards.sum(1)
    std = np.repeat(scores.reshape(-1, K).std(1, ddof=1), K)
    expected = verl_advantages(rows, "grpo")[0][:, 0]
    found = advantages.group_advantages(scores, K)
    close(found * (std + 1e-4), expected * (std + 1e-6))
    assert (np.abs(found) < 0.9 * np.abs(expected)).all()


def test_equal_scores_leave_no_rounding():
    """In float32 the mean of three scores of 0.9 is not 0.9 in verl; over a std as small, and 1e-6, that is much."""
    scores = np.full(3, 0.9, np.float32)
    expected = core.compute_grpo_outcome_advantage(torch.tensor(scores)[:, None], torch.ones(3, 1), np.zeros(3))[0]
    assert not np.asarray(advantages.group_advantages(scores, 3)).any()
    assert expected.abs().max() > 0.01


def test_gdpo_normalises_rows_here_and_tokens_in_verl(rows):
    """The sum of normalised rewards is the same; rows of more tokens weigh more in verl's last mean and variance."""
    given = {"batch": {"prompts": torch.zeros(N, 0), "attention_mask": torch.tensor(rows.mask > 0)}}
    given["non_tensor_batch"] = {"first": rows.rewards[:, 0], "second": rows.rewards[:, 1]}
    keys = {"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": [1.0, 0.5]}
    expected = verl_advantages(rows, "gdpo", config=algorithm.AlgoConfig(**keys), **given)[0]
    weights = np.array([1.0, 0.5])
    sums = advantages.gdpo_advantages(rows.rewards, weights, K, batch_normalize=False, eps=1e-6)
    close(whiten(np.repeat(sums[:, None], T, 1), rows.mask), expected, atol=1e-6)  # verl's are float32
    found = advantages.gdpo_advantages(rows.rewards, weights, K, eps=1e-6)
    close(found, (sums - sums.mean()) / (sums.std(ddof=1) + 1e-6))
    assert np.abs(found - expected[:, 0]).max() > 0.01


def test_remax_takes_rows_here_and_rewards_to_go_in_verl(rows):
    """The same where the score is all of the reward. A KL in the reward is a row's sum here, and to go in verl."""
    to_go = verl_advantages(rows, "remax")[0]
    rows.token_rewards = np.asarray(advantages.token_rewards(rows.outcome, rows.mask))
    found = np.asarray(advantages.remax_advantages(rows.outcome, rows.greedy))
    close(verl_advantages(rows, "remax")[0] * rows.mask, found[:, None] * rows.mask)
    found = np.asarray(advantages.remax_advantages(rows.scores, rows.greedy))
    close(to_go[:, 0], found)
    assert np.abs((to_go - found[:, None]) * rows.mask).max() > 0.01


def test_optimal_token_baselines(rows):
    """Places are sampled tokens here; in verl's estimator without turns columns, the same where there are no gaps.

    The importance weights by which verl squared multiplies the norms are no argument here.
    """
    with_gaps = verl_advantages(rows, "optimal_token_baseline")[0]
    found = advantages.otb_advantages(rows.token_rewards, rows.norms, rows.mask, K)
    assert np.abs(with_gaps - found).max() > 0.01
    importance = np.exp(rows.old - rows.sampled)
    expected = verl_advantages(rows, "tir_optimal_token_baseline", rollout_is_weights=double(importance))[0]
    close(advantages.otb_advantages(rows.token_rewards, rows.norms * importance**2, rows.mask, K), expected)
    rows.mask = np.sort(rows.mask, axis=1)[:, ::-1].copy()
    rows.token_rewards *= rows.mask
    found = advantages.otb_advantages(rows.token_rewards, rows.norms, rows.mask, K)
    close(found, verl_advantages(rows, "optimal_token_baseline")[0])


def test_rewards_of_tokens_and_the_kl_controller(rows):
    scores = np.asarray(advantages.token_rewards(rows.outcome, rows.mask))
    expected = core.compute_rewards(double(scores), double(rows.old), double(rows.ref), BETA)
    close(rows.token_rewards, expected.numpy() * rows.mask)
    ours, theirs = AdaptiveKL(0.1, target=0.2, horizon=100.0), core.AdaptiveKLController(0.1, 0.2, 100)
    for kl in (0.21, 5.0, 0.01):
        ours = ours.update(kl, N)
        theirs.update(kl, N)
        close(ours.coef, theirs.value)


# -- losses ------------------------------------------------------------------------------------------------------------


def assert_same(ours, theirs, at, scale=1.0):
    """Value and gradient; `scale` times ours is theirs."""
    value, gradient = jax.jit(jax.value_and_grad(ours))(jnp.asarray(at))
    leaf = double(at).requires_grad_()
    loss = theirs(leaf)
    loss.backward()
    close(scale * value, loss.item())
    close(scale * gradient, leaf.grad.numpy())
    assert np.abs(gradient).max() > 1e-4


MODES = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
    "token-sum": "token_sum",
}


@pytest.mark.parametrize("mode", MODES)
def test_aggregation(rows, mode):
    """A row without tokens counts here, and in verl where it is told how many rows there are, as its workers are."""
    empty, scale = rows.mask.copy(), 1.0
    empty[4] = 0.0
    for mask, batch in ((rows.mask, {}), (empty, {"global_batch_size": N}), (empty, {})):
        if mask is empty and not batch and mode.startswith("seq-"):
            scale = N / (N - 1)
        weights = loss_weights(mask, MODES[mode], max_completion_length=T)
        theirs = functools.partial(core.agg_loss, loss_mask=double(mask), loss_agg_mode=mode, **batch)
        assert_same(functools.partial(jnp.vdot, weights), theirs, rows.returns, scale)


EPSILONS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
COV = {"fraction": 1.0, "lower": 0.1, "upper": 5.0}  # all that there are, as each library draws its own few
TEMPERATURES = {"temperature_positive": 2.0, "temperature_negative": 3.0}
VERL_COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
LOSSES = [
    ("vanilla", {}, "ppo_clip", "token", {"dual_clip": 3.0}),
    ("vanilla", {"clip_ratio_c": 1.5}, "ppo_clip", "token", {"dual_clip": 1.5}),
    ("gspo", {}, "gspo", "sequence", {}),
    ("gspo", {"clip_ratio_low": 0.02, "clip_ratio_high": 0.04}, "gspo_token", "token", {"epsilons": (0.02, 0.04)}),
    ("sapo", {}, "sapo", "sequence", {}),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 3.0}, "sapo", "sequence", TEMPERATURES),
    ("gpg", {}, "reinforce", "token", {}),
    ("cispo", {}, "cispo", "token", {"epsilons": (0.0, 1.28), "minimum": 0.8}),
    ("dppo_tv", {}, "dppo_tv", "token", {"maximum": 3.0}),
    ("dppo_tv", {"clip_ratio_c": 20.0, "clip_ratio_low": 0.05}, "dppo_tv", "token", {"epsilons": (0.05, 0.28)}),
    ("dppo_kl", {}, "dppo_kl", "token", {"maximum": 3.0}),
    ("dppo_kl", {"clip_ratio_c": 20.0, "clip_ratio_low": 0.01}, "dppo_kl", "token", {"epsilons": (0.01, 0.28)}),
    ("geo_mean", {}, "gmpo", "sequence", {}),
    ("geo_mean", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}, "gmpo", "sequence", {"epsilons": (0.1, 0.1)}),
    ("dro", {"dro_beta": 0.3}, "dro", "token", {"beta": 0.3}),
    ("clip_cov", VERL_COV, "clip_cov", "token", COV),
    ("kl_cov", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}, "kl_cov", "token", {"fraction": 0.2, "kl_coef": 0.7}),
]  # fmt: skip


def actor(mode, **settings):
    """verl's configuration of an actor; what is no setting of it is one of its policy loss."""
    fields = inspect.signature(configs.ActorConfig).parameters
    policy = {key: settings.pop(key) for key in list(settings) if key not in fields}
    policy = configs.PolicyLossConfig(loss_mode=mode, **policy)
    fixed = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    return configs.ActorConfig(**fixed, policy_loss=policy, **EPSILONS | settings)


def verl_loss(rows, mode, config, aggregation="token-mean", weights=None, mask=None):
    arguments = (double(rows.advantages), double(rows.mask if mask is None else mask), aggregation, config, weights)
    return lambda leaf: core.get_policy_loss_fn(mode)(double(rows.old), leaf, *arguments)[0]


def our_loss(rows, name, aggregation, epsilons=(0.2, 0.28), factor=1.0, **options):
    weights = loss_weights(rows.mask, aggregation)
    if name == "clip_cov":
        options["key"] = jax.random.key(0)

    def loss(logps):
        found = getattr(policy_losses, name)(logps, rows.old, rows.advantages, *epsilons, mask=rows.mask, **options)
        return (weights * with_metrics(found)[0] * factor).sum()

    return loss


def test_every_loss_of_verl_has_its_test():
    assert {mode for mode, *_ in LOSSES} | {"bypass_mode"} == core.POLICY_LOSS_REGISTRY.keys()


@pytest.mark.parametrize(("mode", "settings", "name", "aggregation", "options"), LOSSES)
def test_policy_losses(rows, mode, settings, name, aggregation, options):
    """Here the aggregation is a setting beside each; verl's sapo and geo_mean have their own, whatever is set."""
    theirs = {ours: mode for mode, ours in MODES.items()}[aggregation]
    expected = verl_loss(rows, mode, actor(mode, **settings), theirs)
    assert_same(our_loss(rows, name, aggregation, **options), expected, rows.logps)


def test_bounds_of_log_ratios(rows):
    """A token's, 20, makes no difference where the loss bounds the ratio; verl's gspo bounds that of a row to 10."""
    rows.old[::3, 1] += 25.0
    rows.old[1::3, 1] -= 25.0
    for mode, settings, name, aggregation, options in LOSSES:
        if mode in ("vanilla", "cispo", "dppo_tv", "dppo_kl"):
            expected = verl_loss(rows, mode, actor(mode, **settings))
            assert_same(our_loss(rows, name, aggregation, **options), expected, rows.logps)
    rows.old, rows.advantages = rows.logps - 12.0, -np.ones((N, T))
    close(verl_loss(rows, "gspo", actor("gspo"))(double(rows.logps)), np.exp(10.0))
    close(our_loss(rows, "gspo", "sequence")(rows.logps), np.exp(12.0))


def test_weights_of_samples_in_geo_mean_are_a_rows_own_here_and_their_geometric_mean_in_verl(rows):
    weights = np.exp(rows.old - rows.sampled)
    mean = np.exp((np.log(weights) * rows.mask).sum(1, keepdims=True) / rows.mask.sum(1, keepdims=True))
    expected = verl_loss(rows, "geo_mean", actor("geo_mean"), weights=double(weights))
    assert_same(our_loss(rows, "gmpo", "sequence", factor=mean), expected, rows.logps)
    tokens = our_loss(rows, "gmpo", "sequence", factor=weights)(rows.logps)
    assert abs(tokens - expected(double(rows.logps)).item()) > 1e-3


@pytest.mark.parametrize("epsilon", [0.2, 0.5, 100.0])
def test_value_loss(rows, epsilon):
    weights = loss_weights(rows.mask, "token")
    old, returns, mask = rows.ref, rows.returns, double(rows.mask)
    assert_same(
        lambda values: (weights * policy_losses.value_clip(values, old, returns, epsilon)).sum(),
        lambda values: core.compute_value_loss(values, double(returns), double(old), mask, epsilon)[0],
        rows.logps,
    )


KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


@pytest.mark.parametrize("straight_through", ["", "+"])
@pytest.mark.parametrize("kind", KL)
def test_kl(rows, kind, straight_through):
    """Values, and gradients that weigh each token differently; with + the gradient is that of k2."""
    rows.ref[0, 0] = rows.logps[0, 0]
    of, name, factors = {"kind": KL[kind], "k2_gradient": bool(straight_through)}, kind + straight_through, rows.values
    close(kl_estimate(rows.logps, rows.ref, **of), core.kl_penalty(double(rows.logps), double(rows.ref), name))
    assert_same(
        lambda logps: (kl_estimate(logps, rows.ref, **of) * factors).sum(),
        lambda logps: (core.kl_penalty(logps, double(rows.ref), name) * double(factors)).sum(),
        rows.logps,
    )


def test_kl_far_away():
    """verl's k3 has no gradient above 10 nats and stays there; here it is as it is, with or without a bound of k1."""
    far = np.array([[-4.0, 4.0, -25.0]])
    close(core.kl_penalty(double(far), double(0 * far), "k3"), [[10.0, np.expm1(-4.0) + 4.0, 10.0]])
    close(kl_estimate(far, 0 * far, "k3"), np.expm1(-far) + far)
    close(kl_estimate(far, 0 * far, "k3", log_ratio_clamp=20.0)[0, 2], np.expm1(20.0) - 20.0)
    with pytest.raises(NotImplementedError):
        core.kl_penalty(double(far), double(far), "full")


# -- samples of another policy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("threshold", ["1.2", "0.5_1.8"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(rows, level, threshold, normalize):
    """On sampled tokens; elsewhere they are 0 in verl, where no loss reads them."""
    mask, log_ratio = double(rows.mask), double(rows.old - rows.sampled)
    expected, _ = corrections.compute_rollout_correction_weights(log_ratio, mask, level, threshold, normalize)
    low, _, high = threshold.rpartition("_")
    mode, bounds = f"{level}_{'mask' if low else 'truncate'}", (float(high), float(low) if low else None)
    weights, _ = off_policy.importance_correction(rows.old, rows.sampled, rows.mask, mode, *bounds)
    if normalize:
        weights /= off_policy.mean_weight(weights, rows.mask, mode)
    close(weights * rows.mask, expected)
    assert len(np.unique(expected)) > 3


CRITERIA = [
    (name, "0.8_1.3" if name.endswith("k1") else "0.3" if "sum" in name else "0.1")
    for name in sorted(corrections.SUPPORTED_ROLLOUT_RS_OPTIONS)
]
CRITERIA += [("token_k1", "1.5"), ("token_k2,seq_mean_k1", "0.2,0.9_1.2"), ("seq_max_k2,token_k3", "0.4")]


@pytest.mark.parametrize(("names", "bounds"), CRITERIA)
def test_rejection(rows, names, bounds):
    mask, log_ratio = double(rows.mask), double(rows.old - rows.sampled)
    expected, _ = corrections.compute_rollout_rejection_mask(log_ratio, mask, names, bounds)
    criteria = off_policy.rejection_criteria(names, bounds)
    found = off_policy.rejection_mask(rows.old, rows.sampled, rows.mask, criteria)
    assert np.array_equal(found * rows.mask, expected)
    assert 0 < expected.sum() < rows.mask.sum()


def test_every_criterion_and_preset_of_verl_is_here():
    assert set(off_policy.CRITERIA) >= corrections.SUPPORTED_ROLLOUT_RS_OPTIONS
    made = algorithm.RolloutCorrectionConfig
    constructors = {name: x for name, x in vars(made).items() if isinstance(x, classmethod)}
    assert constructors.keys() == PRESETS.keys()
    for name, preset in PRESETS.items():
        parameters = inspect.signature(getattr(made, name)).parameters
        assert preset.options == {key: parameter.default for key, parameter in parameters.items()}, name


BOUNDS = {"threshold": 1.2, "threshold_lower": 0.8, "is_threshold": 1.3}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(rows, name):
    """The loss of a preset and its gradient, as the objective of a run has it and as verl's trainer does.

    What is rejected counts in the denominators here and, as its workers say how many tokens there are, in verl's bypass
    mode; elsewhere verl takes the mean over what is left.
    """
    options = {key: BOUNDS.get(key, "0.9_1.3") for key in PRESETS[name].options}
    if "k3" in name:
        options["rs_threshold"] = 0.05
    config, made = default(), getattr(algorithm.RolloutCorrectionConfig, name)(**options)
    config.algorithm.update({"epsilon_high": 0.28, "aggregation": "token"})
    written = ", ".join(f"{key}={value!r}" for key, value in options.items())
    config.algorithm.rollout_correction = f"{name}({written})" if options else name
    if made.loss_type == "ppo_clip":
        config.algorithm.loss = "ppo_clip(dual_clip=3.0)"
    validate(config)
    spec = policy_spec(with_correction(config))
    fields = {"mask": rows.mask, "advantages": rows.advantages, "sample_logps": rows.sampled, "old_logps": rows.old}
    if made.bypass_mode:
        fields["old_logps"] = rows.sampled
    batch = policy_gradient(spec, None).prepare(Batch(Inputs(np.zeros((N, T), np.int32)), **fields))

    def ours(logps):
        return policy_objective(spec, TokenStatistics(logps, -logps, logps), batch)[0]

    tokens, mask, scale = rows.mask.sum(), double(rows.mask), 1.0
    if made.bypass_mode:
        rows.old = rows.sampled
        given = actor("bypass_mode", rollout_correction=made, global_batch_info={"batch_num_tokens": tokens})
        theirs = verl_loss(rows, "bypass_mode", given)
    else:
        settings = {key: made.get(key) for key in ("rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")}
        weights, mask, _ = corrections.compute_rollout_correction_and_rejection_mask(
            double(rows.old), double(rows.sampled), mask, made.rollout_is, **settings
        )
        weights, scale = weights and weights.batch["rollout_is_weights"], tokens / mask.sum().item()
        theirs = verl_loss(rows, "vanilla", actor("vanilla"), weights=weights, mask=mask)
    assert_same(ours, theirs, rows.logps, scale)
    assert (scale > 1) == (made.rollout_rs is not None and not made.bypass_mode)
    if made.rollout_rs is not None:
        assert settings_of(config.algorithm.rollout_correction)["rejection_bounds"] == str(made.rollout_rs_threshold)


METRICS = {
    "rollout_corr/kl": "k3_kl",
    "rollout_corr/k1_kl": "kl",
    "rollout_corr/chi2_token": "chi2_token",
    "rollout_corr/chi2_sequence": "chi2_seq",
    "rollout_corr/weight": "rollout_is_mean",
    "rollout_corr/fraction_high": "rollout_is_ratio_fraction_high",
    "rollout_corr/fraction_low": "rollout_is_ratio_fraction_low",
    "rollout_corr/rejected": "rollout_rs_masked_fraction",
}


def test_metrics(rows):
    """Of clips under verl's names, and of corrections under names that are ours."""
    config = default()
    config.algorithm.update({"loss": "ppo_clip(dual_clip=1.3)", "epsilon_high": 0.28, "importance_min": 0.8})
    config.algorithm.update({"importance_correction": "token_mask", "importance_max": 1.3})
    config.algorithm.update({"rejection": "token_k2", "rejection_bounds": "0.1"})
    spec = policy_spec(config)
    fields = {"mask": rows.mask, "advantages": rows.advantages, "sample_logps": rows.sampled, "old_logps": rows.old}
    batch = policy_gradient(spec, None).prepare(Batch(Inputs(np.zeros((N, T), np.int32)), **fields))
    _, found = policy_objective(spec, TokenStatistics(*map(jnp.asarray, [rows.logps] * 3)), batch)
    _, _, expected = corrections.compute_rollout_correction_and_rejection_mask(
        double(rows.old), double(rows.sampled), double(rows.mask), "token", "0.8_1.3", False, "token_k2", 0.1
    )
    expected = {ours: expected[f"rollout_corr/{theirs}"] for ours, theirs in METRICS.items()}
    arguments = (double(rows.old), double(rows.logps), double(rows.advantages), double(rows.mask), "token-mean")
    clips = core.compute_policy_loss_vanilla(*arguments, actor("vanilla", clip_ratio_c=1.3))[1]
    expected |= {name: clips[VERL[name]] for name in VERL if VERL[name] in clips}
    assert len(expected) == len(METRICS) + 3 and all(expected.values())
    for name, value in expected.items():
        close(found[name].value, value, err_msg=name)
