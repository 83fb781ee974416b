"""The policy-gradient objective with every option, against formulas over naive full logits."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import policy_losses
from jaxrl_llm.algorithms.batch import Batch, Scalars
from jaxrl_llm.algorithms.losses import Metric, with_metrics
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.training.objectives.objective import Objective
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import update_spec
from jaxrl_llm.training.update import init_state, make_update
from tests.models.decoding import logits_of
from tests.training.objectives.test_policy_gradient import COMPLETION, NET, PARAMS, make_batch, naive_logps

BATCH = make_batch(seed=3, rows=10)
LOGPS = naive_logps(BATCH, 1.0)
# Close enough to the policy for ratios inside and outside of every range.
_noise = np.random.default_rng(4).normal(0, 0.5, (2, *LOGPS.shape))
BATCH = BATCH.replace(
    old_logps=((LOGPS + _noise[0]) * BATCH.mask).astype(np.float32),
    sample_logps=((LOGPS + _noise[0] + 0.5 * _noise[1]) * BATCH.mask).astype(np.float32),
    ref_logps=((LOGPS - 1.5 * _noise[1]) * BATCH.mask).astype(np.float32),
    advantages=(np.where(np.arange(10) % 2, -1.0, 0.7)[:, None] * BATCH.mask).astype(np.float32),
)
MASK, ADVANTAGES = BATCH.mask, BATCH.advantages.astype(np.float64)
RATIO = np.exp(LOGPS - BATCH.old_logps) * MASK
LENGTHS = MASK.sum(1, keepdims=True)
SEQUENCE = np.exp(((LOGPS - BATCH.old_logps) * MASK).sum(1, keepdims=True) / LENGTHS) * MASK
K1 = (LOGPS - BATCH.ref_logps) * MASK
MISMATCH = np.exp(BATCH.old_logps - BATCH.sample_logps) * MASK
ROW_MISMATCH = np.exp(((BATCH.old_logps - BATCH.sample_logps) * MASK).sum(1, keepdims=True)) * MASK
DRIFT = ((BATCH.sample_logps - LOGPS) * MASK).sum(1, keepdims=True) / LENGTHS


def clip(ratio, low=0.2, high=0.2):
    return -np.minimum(ratio * ADVANTAGES, np.clip(ratio, 1 - low, 1 + high) * ADVANTAGES)


def configured(settings: dict):
    config = default()
    config.algorithm.aggregation = "token"
    config.rollout.max_completion_length = COMPLETION
    for name, value in settings.items():
        config.algorithm[name] = value
    return config


def value(settings: dict, batch: Batch):
    objective = objective_of(configured(settings), NET)
    observed = () if objective.observe is None else (objective.observe(PARAMS, batch),)
    loss, metrics = objective.loss(PARAMS, objective.prepare(jax.tree.map(jnp.asarray, batch), *observed))
    return loss, {name: metric.value for name, metric in metrics.items()}


def token_mean(per_token):
    return (per_token * MASK).sum() / MASK.sum()


WITHOUT_KL = {
    "delta": (
        {"loss": "ppo_clip(delta=1.3)"},
        -np.minimum(np.minimum(RATIO, 1.3) * ADVANTAGES, np.clip(RATIO, 0.8, 1.2) * ADVANTAGES),
    ),
    "dual clip": (
        {"loss": "ppo_clip(dual_clip=1.25)"},
        np.where(ADVANTAGES < 0, np.minimum(clip(RATIO), -1.25 * ADVANTAGES), clip(RATIO)),
    ),
    "options of the loss": (
        {"loss": "sapo(temperature_positive=2.0, temperature_negative=3)"},
        -ADVANTAGES * (4 / (t := np.where(ADVANTAGES > 0, 2.0, 3.0))) / (1 + np.exp(-t * (RATIO - 1))),
    ),
    "cispo": ({"loss": "cispo", "epsilon_high": 1.1}, -np.minimum(RATIO, 1.1) * ADVANTAGES * LOGPS),
    "gspo": ({"loss": "gspo", "epsilon_low": 0.01, "epsilon_high": 0.02}, clip(SEQUENCE, 0.01, 0.02)),
    "token sum": ({"aggregation": "token_sum"}, clip(RATIO) * MASK.sum()),
    "token truncate": (
        {"importance_correction": "token_truncate", "importance_max": 1.05, "importance_min": 0.95},
        clip(RATIO) * np.clip(MISMATCH, 0.95, 1.05),
    ),
    "token mask": (
        {"importance_correction": "token_mask", "importance_max": 1.1},
        clip(RATIO) * MISMATCH * (MISMATCH <= 1.1),
    ),
    "sequence truncate": (
        {"importance_correction": "sequence_truncate", "importance_max": 1.2},
        clip(RATIO) * np.minimum(ROW_MISMATCH, 1.2),
    ),
    "sequence mask": (
        {"importance_correction": "sequence_mask", "importance_max": 1.2, "importance_min": 0.6},
        clip(RATIO) * ROW_MISMATCH * ((ROW_MISMATCH >= 0.6) & (ROW_MISMATCH <= 1.2)),
    ),
    "off-policy mask": (
        {"off_policy_mask_threshold": 0.02},
        clip(RATIO) * ((ADVANTAGES >= 0) | (DRIFT <= 0.02)),
    ),
}
TERMS = {  # added to the loss of ppo_clip
    "k1 in the loss": ({"beta": 0.3, "kl": "k1"}, 0.3 * K1),
    "abs": ({"beta": 0.3, "kl": "abs"}, 0.3 * np.abs(K1)),
    "k2": ({"beta": 0.3, "kl": "k2"}, 0.15 * K1**2),
    "k3": ({"beta": 0.3, "kl": "auto"}, 0.3 * (np.exp(-K1) - 1 + K1)),
    "bias-corrected k3": ({"beta": 0.3, "kl_bias_correction": True}, 0.3 * RATIO * (np.exp(-K1) - 1 + K1)),
}


@pytest.mark.parametrize("name", WITHOUT_KL)
def test_policy_terms(name):
    settings, expected = WITHOUT_KL[name]
    got, metrics = value(settings, BATCH.replace(ref_logps=None))
    np.testing.assert_allclose(got, token_mean(expected), rtol=3e-5)
    plain = token_mean(clip(RATIO))
    assert abs(plain - token_mean(expected)) > 1e-3, "the option changed nothing: the case proves nothing"
    assert "kl" not in metrics


@pytest.mark.filterwarnings("ignore:algorithm.kl is k1")
@pytest.mark.parametrize("name", TERMS)
def test_kl_terms(name):
    settings, term = TERMS[name]
    got, metrics = value(settings, BATCH)
    np.testing.assert_allclose(got, token_mean(clip(RATIO) + term), rtol=3e-5)
    np.testing.assert_allclose(metrics["kl"], token_mean(term) / 0.3, rtol=3e-5)


def naive_entropy() -> np.ndarray:
    logits = np.asarray(logits_of(NET, PARAMS, BATCH.inputs.tokens, BATCH.inputs.segments), np.float64)
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(logps) * logps).sum(-1)
    return np.pad(entropy[:, :-1], ((0, 0), (1, 0)))


def test_everything_at_once_in_order():
    """Policy term x off-policy mask x entropy mask x importance weights, then the KL, and the entropy that is kept."""
    entropy = naive_entropy()
    quantile = np.quantile(entropy[MASK > 0], 0.6)
    kept = (ADVANTAGES >= 0) | (DRIFT <= 0.02)
    high = (entropy >= quantile) * MASK
    policy = clip(RATIO) * kept * high * np.minimum(MISMATCH, 1.05)
    bonus = (entropy * high).sum() / high.sum()
    expected = token_mean(policy + 0.3 * (np.exp(-K1) - 1 + K1)) - 0.7 * bonus
    settings = {
        "off_policy_mask_threshold": 0.02,
        "top_entropy_quantile": 0.4,
        "importance_correction": "token_truncate",
        "importance_max": 1.05,
        "beta": 0.3,
        "entropy_coef": 0.7,
    }
    got, metrics = value(settings, BATCH)
    np.testing.assert_allclose(got, expected, rtol=3e-5)
    np.testing.assert_allclose(metrics["entropy"], token_mean(entropy), rtol=3e-5)
    np.testing.assert_allclose(metrics["entropy_kept"], bonus, rtol=3e-5)
    np.testing.assert_allclose(metrics["policy_loss"], expected + 0.7 * bonus, rtol=3e-5)
    np.testing.assert_allclose(metrics["off_policy_masked"], token_mean(1.0 - kept), rtol=1e-5)
    # Coefficients of the batch take the place of the configuration's.
    moved = BATCH.replace(scalars=Scalars(kl_coef=np.float32(0.3), entropy_coef=np.float32(0.7)))
    again, _ = value(settings | {"beta": 9.0, "entropy_coef": 0.0}, moved)
    np.testing.assert_allclose(again, got, rtol=1e-6)


def test_raw_mismatch_is_always_measured():
    for correction, ratio in (("none", MISMATCH), ("token_mask", MISMATCH), ("sequence_mask", ROW_MISMATCH)):
        _, metrics = value({"importance_correction": correction, "importance_max": 1e-3}, BATCH.replace(ref_logps=None))
        live = ratio[MASK > 0]
        for name, expected in (("min", live.min()), ("max", live.max()), ("mean", live.mean())):
            got = metrics[f"sampling/importance_sampling_ratio/{name}"]
            np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=f"{correction} {name}")
        x = np.log(MISMATCH[MASK > 0])
        np.testing.assert_allclose(metrics["rollout_corr/kl"], np.mean(np.exp(x) - 1 - x), rtol=1e-4)


def test_vespo_gets_the_importance_weights():
    settings = {"loss": "vespo", "importance_correction": "token_truncate", "importance_max": 1.2}
    weights = np.minimum(np.where(MASK > 0, MISMATCH, 1.0), 1.2)
    expected, _ = policy_losses.vespo(
        LOGPS * MASK, BATCH.old_logps, ADVANTAGES, mask=MASK, importance_weights=weights.astype(np.float32)
    )
    np.testing.assert_allclose(
        value(settings, BATCH.replace(ref_logps=None))[0], token_mean(np.asarray(expected)), rtol=3e-5
    )


@pytest.mark.parametrize("correction", ["sequence_mask", "geometric_truncate"])
def test_vespo_refuses_the_weight_of_a_row(correction):
    config = default()
    config.algorithm.loss, config.algorithm.importance_correction = "vespo(k_positive=2.5)", correction
    with pytest.raises(ConfigError, match=f"is {correction}, but vespo takes .*: set token_truncate or token_mask"):
        validate(config)


@pytest.mark.parametrize(
    ("loss", "same"),
    [("auto", "gspo"), ("cispo(minimum=0.5)", "cispo(level='sequence', minimum=0.5)"),
     *(pytest.param(*names, marks=pytest.mark.slow) for names in (
         ("ppo_clip(delta=4.0)", "gspo(delta=4.0)"), ("sapo", "sapo(level='sequence')"), ("gspo", "gspo")))],
)  # fmt: skip
def test_importance_sampling_level_is_the_level_of_the_ratio(loss, same):
    """TRL's name for it; where the loss has another ratio, it is refused."""
    batch = BATCH.replace(ref_logps=None)
    asked = value({"loss": loss, "importance_sampling_level": "sequence", "epsilon_high": 1.5}, batch)
    assert float(asked[0]) == float(value({"loss": same, "epsilon_high": 1.5}, batch)[0])
    for wrong, level in (("gspo", "token"), ("rloo", "sequence"), ("cispo(level='sequence')", "token")):
        with pytest.raises(ConfigError, match=f"sampling_level is {level}, but algorithm.loss = {wrong[:5]}"):
            value({"loss": wrong, "importance_sampling_level": level}, batch)


@pytest.mark.parametrize(
    ("loss", "log_ratio"),
    [("rloo", "sum"), ("gspo", "mean"), ("cispo(level='sequence')", "mean"), ("sapo(level='sequence_sum')", "sum"),
     ("sapo", "token")],
)  # fmt: skip
def test_the_kl_term_is_corrected_by_the_ratio_of_the_loss(loss, log_ratio):
    settings = {"loss": loss, "beta": 0.3, "epsilon_high": 5.0}
    tokens = np.log(np.where(MASK > 0, RATIO, 1.0))
    rows = tokens.sum(1, keepdims=True)
    ratio = np.exp({"token": tokens, "sum": rows, "mean": rows / LENGTHS}[log_ratio])
    _, metrics = value(settings | {"kl_bias_correction": True}, BATCH)
    np.testing.assert_allclose(metrics["kl"], token_mean(ratio * (np.exp(-K1) - 1 + K1)), rtol=1e-4)


def test_an_unknown_level_is_refused():
    with pytest.raises(ConfigError, match="level is 'row', but it takes one of token, sequence, sequence_sum"):
        objective_of(configured({"loss": "sapo(level='row')"}), NET)


@pytest.mark.parametrize(
    ("loss", "level"), [("gspo", "sequence"), ("gspo_token", "sequence"), ("luspo", "sequence"), ("rloo", "sum")]
)
def test_clip_ratios_of_sequences(loss, level):
    ratio = SEQUENCE**LENGTHS if level == "sum" else SEQUENCE
    _, metrics = value({"loss": loss, "epsilon_low": 0.05, "epsilon_high": 0.05}, BATCH.replace(ref_logps=None))
    rows = MASK / LENGTHS / len(MASK)  # a whole row is clipped or not: the mean is over rows
    low = ((ratio < 0.95) & (ADVANTAGES < 0)).astype(float)
    high = ((ratio > 1.05) & (ADVANTAGES > 0)).astype(float)
    np.testing.assert_allclose(metrics["clip_ratio/low_mean"], (rows * low).sum(), atol=1e-6)
    np.testing.assert_allclose(metrics["clip_ratio/high_mean"], (rows * high).sum(), atol=1e-6)
    np.testing.assert_allclose(metrics["clip_ratio/region_mean"], (rows * (low + high)).sum(), atol=1e-6)
    assert 0 < float(metrics["clip_ratio/region_mean"]) < 1


def test_clip_ratios_of_cispo_gmpo_and_dual_clip():
    batch = BATCH.replace(ref_logps=None)
    _, metrics = value({"loss": "cispo", "epsilon_high": 1.1}, batch)
    np.testing.assert_allclose(metrics["cispo_clip_ratio"], token_mean((RATIO > 1.1) & (ADVANTAGES > 0)), rtol=1e-5)
    _, metrics = value({"loss": "gmpo", "epsilon_low": 0.3, "epsilon_high": 0.3}, batch)
    log_ratio = np.log(np.where(MASK > 0, RATIO, 1.0))
    outside = np.where(ADVANTAGES > 0, log_ratio > 0.3, log_ratio < -0.3)
    np.testing.assert_allclose(metrics["clip_ratio/region_mean"], token_mean(outside), rtol=1e-5)
    _, metrics = value({"loss": "ppo_clip(dual_clip=1.25)"}, batch)
    np.testing.assert_allclose(
        metrics["clip_ratio/dual_mean"], token_mean((RATIO > 1.25) & (ADVANTAGES < 0)), rtol=1e-5
    )


def test_the_entropy_mask_is_of_the_whole_batch():
    objective = objective_of(configured({"top_entropy_quantile": 0.3}), NET)
    assert objective.observe is not None
    observed = objective.observe(PARAMS, BATCH)
    prepared = objective.prepare(jax.tree.map(jnp.asarray, BATCH), observed)
    loss = jax.jit(objective.loss)
    parts = [loss(PARAMS, prepared.take(np.arange(start, start + 5)))[0] for start in (0, 5)]
    entropy = naive_entropy()
    keep = entropy >= np.quantile(entropy[MASK > 0], 0.7)
    np.testing.assert_allclose(
        sum(parts), value({"beta": 0.0}, BATCH.replace(ref_logps=None).prepare(keep=keep))[0], rtol=1e-5
    )
    np.testing.assert_array_equal(prepared.prepared.keep, keep * MASK)


def test_clip_cov_draws_with_batch_seeds():
    settings = {"loss": "clip_cov(lower=-1e9, upper=1e9, fraction=0.3)"}
    batch = BATCH.replace(ref_logps=None)
    losses = [float(value(settings, batch.replace(seeds=np.full(10, seed, np.uint32)))[0]) for seed in (7, 8, 7)]
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("loss", ["clip_cov(lower=-1e9, upper=1e9, fraction=0.3)", "kl_cov(fraction=0.3)"])
def test_selected_tokens_are_of_the_batch(loss):
    objective = objective_of(configured({"loss": loss}), NET)
    batch = jax.tree.map(jnp.asarray, BATCH.replace(ref_logps=None, seeds=np.full(10, 3, np.uint32)))
    assert objective.observe is not None
    prepared = objective.prepare(batch, objective.observe(PARAMS, batch))
    assert int(prepared.prepared.selected.sum()) == int(0.3 * MASK.sum())
    loss_of = jax.jit(objective.loss)
    parts = [loss_of(PARAMS, prepared.take(np.arange(start, start + 5)))[0] for start in (0, 5)]
    function = getattr(policy_losses, loss.partition("(")[0])
    options = {"fraction": 0.3} | (
        {"key": jax.random.key(3), "lower": -1e9, "upper": 1e9} if loss.startswith("clip") else {}
    )
    expected, _ = with_metrics(function(LOGPS * MASK, BATCH.old_logps, ADVANTAGES, 0.2, 0.2, mask=MASK, **options))
    np.testing.assert_allclose(sum(parts), token_mean(np.asarray(expected)), rtol=3e-5)


def test_second_moments_are_of_the_batch():
    """However the optimizer batch is cut, the tokens that m2po leaves out are those of the whole."""
    settings = {"loss": "m2po(threshold=0.08)", "old_logps": "sampler"}
    objective = objective_of(configured(settings), NET)
    batch = jax.tree.map(jnp.asarray, BATCH.replace(ref_logps=None, old_logps=BATCH.sample_logps))
    assert objective.observe is not None
    prepared = objective.prepare(batch, objective.observe(PARAMS, batch))
    loss_of = jax.jit(objective.loss)
    parts = [loss_of(PARAMS, prepared.take(np.arange(start, start + 5))) for start in (0, 5)]
    whole = policy_losses.m2po(LOGPS * MASK, BATCH.sample_logps, ADVANTAGES, mask=MASK, threshold=0.08)
    of_parts = [
        policy_losses.m2po_tokens(
            *(x[i : i + 5] for x in (LOGPS * MASK, BATCH.sample_logps, ADVANTAGES)),
            mask=MASK[i : i + 5],
            threshold=0.08,
        )
        for i in (0, 5)
    ]
    out = np.asarray(prepared.prepared.selected)
    assert 0 < out.sum() < MASK.sum() and (np.concatenate(of_parts) != out).any()
    np.testing.assert_allclose(sum(loss for loss, _ in parts), token_mean(np.asarray(whole[0])), rtol=3e-5)
    masked = sum(float(metrics["m2po/masked"].value) for _, metrics in parts)
    np.testing.assert_allclose(masked, out.sum() / MASK.sum(), rtol=1e-5)


def test_seeds_move_on_with_every_update():
    def loss(params, batch):
        return params["x"] * 0.0, {"seed": Metric(batch.seeds[0].astype(jnp.float32), "sum")}

    config, mesh = default(), make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(config)
        state = init_state({"x": jnp.ones(())}, optimizer, mesh)
        update = make_update(Objective(lambda batch: batch, loss), optimizer, update_spec(config), mesh)
        seeds = []
        for _ in range(3):
            state, metrics = update(state, BATCH.replace(seeds=np.full(10, 5, np.uint32)))
            seeds.append(float(metrics["seed"].value))
    assert seeds == [5, 6, 7]


def test_k1_in_the_loss_warns():
    with pytest.warns(UserWarning, match="expected gradient of this term is 0"):
        objective_of(configured({"beta": 0.1, "kl": "k1"}), NET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective_of(configured({"beta": 0.1, "kl_in_reward": True}), NET)
        objective_of(configured({"beta": 0.1}), NET)
        objective_of(configured({"kl": "k1"}), NET)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "sapo(temperature=2.0)"}, r"sapo has no option 'temperature'; it takes temperature_positive"),
        ({"loss": "sapo(mask=1)"}, "sapo has no option 'mask'"),
        ({"loss": "sapo(2.0)"}, "cannot read the options"),
        ({"loss": "gspo(dual_clip=3.0)"}, "gspo has no option 'dual_clip'"),
        ({"loss": "ppo_clip(dual_clip=0.5)"}, r"is 'ppo_clip\(dual_clip=0.5\)': dual_clip .* must exceed 1; got 0.5"),
        ({"loss": "vespo(k_positive=None)"}, "vespo.* but an option takes a value of another type"),
        ({"loss": "ppo_clap"}, "the closest is ppo_clip"),
        ({"loss": "dapo"}, "algorithm.loss is 'dapo', .* write ppo_clip, and choose that by algorithm.aggregation"),
    ],
)
def test_wrong_losses_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        objective_of(configured(settings), NET)
