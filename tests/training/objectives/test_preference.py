"""The preference objectives and the reward model's: values from full logits, micro-batches, mixtures, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import preference_losses
from jaxrl_llm.algorithms.batch import Batch, Inputs, Scalars
from jaxrl_llm.algorithms.losses import with_metrics
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.logprobs import token_statistics
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.microbatch import microbatches_of
from jaxrl_llm.training.setup.objectives import needs_reference, objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import update_spec
from jaxrl_llm.training.update import _prepare, init_state, make_measure, make_update
from tests.models.decoding import logits_of

SHAPE = {"vocab_size": 29, "width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 24}
NET = Net(ModelConfig(**SHAPE, init_scale=0.3, scan_layers=False))
PARAMS, REFERENCE = (jax.jit(NET.init)(jax.random.key(seed)) for seed in (0, 1))
PAIRED = sorted(name for name, loss in preference_losses.LOSSES.items() if loss.rows == "pair")


def log_sigmoid(x):
    return -np.log1p(np.exp(-np.asarray(x, np.float64)))


@functools.cache
def make_batch(rows: int = 8, labels: bool = False) -> Batch:
    """Rows in pairs: the rows of a pair have a prompt of 3 tokens in common and 1 to 5 own ones."""
    draw = np.random.default_rng(rows)
    width, prompt = 8, 3
    tokens = draw.integers(0, 29, (rows, width)).astype(np.int32)
    tokens[1::2, :prompt] = tokens[0::2, :prompt]
    mask = np.zeros((rows, width), np.float32)
    for row, length in enumerate(draw.integers(1, 6, rows)):
        mask[row, prompt : prompt + length] = 1
    segments = np.where(np.arange(width) < prompt, 1, mask).astype(np.int32)
    ref = naive_logps(REFERENCE, tokens, segments).astype(np.float32)
    batch = Batch(Inputs(tokens, segments), mask=mask, ref_logps=ref)
    return batch.replace(labels=np.repeat(np.arange(rows // 2) % 2, 2).astype(np.float32)) if labels else batch


def naive_logits(params, tokens, segments):
    """log p(v | tokens before t) of every token v, from full logits in float64, `[N,T,V]`; 0 for the first token."""
    logits = np.asarray(logits_of(NET, params, tokens, segments), np.float64)
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.concatenate([np.zeros_like(logps[:, :1]), logps[:, :-1]], axis=1)


def naive_logps(params, tokens, segments):
    logps = np.take_along_axis(naive_logits(params, tokens, segments), tokens[..., None], axis=-1)[..., 0]
    return np.where(segments > 0, logps, 0.0)


@functools.cache
def policy_logps(rows: int = 8):
    batch = make_batch(rows)
    return naive_logps(PARAMS, batch.inputs.tokens, batch.inputs.segments)


def config_of(loss: str = "dpo", **settings):
    config = default()
    config.algorithm.name, config.algorithm.loss, config.algorithm.beta = "preference", loss, 0.3
    for name, value in settings.items():
        config.algorithm[name] = value
    return config


def evaluate(config, batch: Batch, net: Net = NET, params=PARAMS):
    """(loss, metrics) of the batch as one micro-batch."""
    objective = objective_of(config, net)

    def measured(params, batch):
        return objective.loss(params, _prepare(objective, params, batch, 1, 1))

    if batch.labels is not None:
        return jax.jit(measured)(params, batch)
    with jax.disable_jit():  # rows in pairs have the operations of one another, which takes less than a program each
        return measured(params, batch)


def sums_of(rows: int = 8):
    batch = make_batch(rows)
    policy, ref = (np.where(batch.mask > 0, x, 0.0).sum(1) for x in (policy_logps(rows), batch.ref_logps))
    return policy, ref, batch.mask.sum(1)


# --- values ---


def hand_computed():
    policy, ref, lengths = sums_of()
    batch = make_batch()
    u, v = (policy - ref)[0::2], (policy - ref)[1::2]
    c, r, c_len, r_len = policy[0::2], policy[1::2], lengths[0::2], lengths[1::2]
    nll = -(policy_logps() * batch.mask)[0::2].sum() / c_len.sum()
    whole = (batch.inputs.segments > 0) & (np.arange(8) > 0)
    whole_nll = -(policy_logps() * whole)[0::2].sum() / whole[0::2].sum()
    a, b = c / c_len, r / r_len
    odds = (a - b) - (np.log(1 - np.exp(a)) - np.log(1 - np.exp(b)))
    return {
        "dpo": -log_sigmoid(0.3 * (u - v)).mean(),
        "ipo": ((u / c_len - v / r_len - 1 / 0.6) ** 2).mean(),
        "cpo": -log_sigmoid(0.3 * (c - r)).mean() + nll,
        "simpo": -log_sigmoid(0.3 * (a - b) - 0.5).mean() + nll,
        "orpo": whole_nll - 0.3 * log_sigmoid(odds).mean(),
        "sft": nll,
        "dpo+sft": -log_sigmoid(0.3 * (u - v)).mean() + nll,
        "aot": -log_sigmoid(0.3 * (np.sort(c - r) - np.sort(ref[0::2] - ref[1::2]))).mean(),
        "aot_unpaired": -log_sigmoid(0.3 * (np.sort(u) - np.sort(v))).mean(),
    }


@pytest.mark.parametrize("loss", ["dpo", "ipo", "cpo", "simpo", "orpo", "sft", "dpo+sft", "aot", "aot_unpaired"])
def test_loss_is_the_formula(loss):
    np.testing.assert_allclose(evaluate(config_of(loss), make_batch())[0], hand_computed()[loss], rtol=2e-5)


@pytest.mark.parametrize("loss", [pytest.param(x, marks=() if x == "orpo" else pytest.mark.slow) for x in PAIRED])
def test_every_paired_loss_is_the_mean_of_its_function_and_has_a_gradient(loss):
    config, batch = config_of(loss), make_batch()
    objective = objective_of(config, NET)

    def loss_of(params):
        return objective.loss(params, _prepare(objective, PARAMS, batch, 1, 1))

    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(PARAMS)
    policy, ref, lengths = sums_of()
    arguments = (policy[0::2], policy[1::2], ref[0::2], ref[1::2], 0.3)
    result = preference_losses.LOSSES[loss](*arguments, lengths=(lengths[0::2], lengths[1::2]))
    expected = with_metrics(result)[0].mean()
    likelihood = 0.0 if loss == "alphapo" else float(metrics.get("nll_loss", 0.0))  # logged there with weight 0
    np.testing.assert_allclose(value - likelihood, expected, rtol=5e-5, atol=1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((metrics, gradient)))
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) > 1e-4


def test_mixture_adds_weighted_losses():
    """MPO (arXiv 2411.10442): preference, quality and likelihood."""
    config = config_of("dpo+bco_pair+sft", loss_weights=(0.8, 0.2, 1.0))
    parts = [evaluate(config_of(name), make_batch())[0] for name in ("dpo", "bco_pair", "sft")]
    np.testing.assert_allclose(evaluate(config, make_batch())[0], np.dot((0.8, 0.2, 1.0), parts), rtol=1e-5)


def test_a_mixture_with_a_sorted_loss():
    config = config_of("aot+ipo+sft", loss_weights=(0.5, 2.0, 0.1))
    parts = [evaluate(config_of(name), make_batch())[0] for name in ("aot", "ipo", "sft")]
    np.testing.assert_allclose(evaluate(config, make_batch())[0], np.dot((0.5, 2.0, 0.1), parts), rtol=1e-5)


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("dpo(label_smoothing=0.2)", {"label_smoothing": 0.2}),
        ("hinge(divergence='alpha_divergence', alpha=0.3)", {"divergence": "alpha_divergence", "alpha": 0.3}),
        ("ipo(normalize=False)", {"normalize": False}),
        ("simpo(gamma=1.2, nll_weight=0.0)", {"gamma": 1.2}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("dpo(divergence='forward_kl')", {"divergence": "forward_kl"}),
                ("discopop(temperature=0.5)", {"temperature": 0.5}),
                ("exo_pair(label_smoothing=0.1)", {"label_smoothing": 0.1}),
                ("alphapo(gamma=0.1, alpha=0.7)", {"gamma": 0.1, "alpha": 0.7}),
            )
        ),
    ],
)
def test_options_in_brackets_reach_the_loss(written, options):
    loss = written.partition("(")[0]
    policy, ref, lengths = sums_of()
    arguments = (policy[0::2], policy[1::2], ref[0::2], ref[1::2], 0.3)
    expected = preference_losses.LOSSES[loss](*arguments, lengths=(lengths[0::2], lengths[1::2]), **options).mean()
    got, _ = evaluate(config_of(written), make_batch())
    np.testing.assert_allclose(got, expected, rtol=5e-5)
    changes_with_settings = abs(float(got - evaluate(config_of(loss), make_batch())[0]))
    assert changes_with_settings > 1e-5


def test_options_in_brackets_are_of_one_loss():
    config = config_of("dpo(label_smoothing=0.2)+ipo+robust", loss_weights=(1.0, 0.5, 2.0))
    parts = [evaluate(config_of(name), make_batch())[0] for name in ("dpo(label_smoothing=0.2)", "ipo", "robust")]
    np.testing.assert_allclose(evaluate(config, make_batch())[0], np.dot((1.0, 0.5, 2.0), parts), rtol=1e-5)


def test_reference_free_is_a_reference_of_zeros():
    batch = make_batch()
    free, _ = evaluate(config_of("dpo", reference_free=True), batch.replace(ref_logps=None))
    np.testing.assert_allclose(free, evaluate(config_of("dpo"), batch.replace(ref_logps=0 * batch.ref_logps))[0])
    assert needs_reference(config_of("dpo")) and not needs_reference(config_of("dpo", reference_free=True))
    for loss in ("simpo", "cpo", "orpo", "alphapo", "sft", "cpo+sft"):
        assert not needs_reference(config_of(loss)), loss
    assert needs_reference(config_of("cpo+dpo"))


def test_ld_dpo_weighs_the_tail():
    batch = make_batch()
    policy, ref = policy_logps(), batch.ref_logps
    sums = []
    for logps in (policy, ref):
        row_sums = np.zeros(8)
        for row in range(8):
            shared = int(min(batch.mask[row - row % 2].sum(), batch.mask[row - row % 2 + 1].sum()))
            own = logps[row][batch.mask[row] > 0]
            row_sums[row] = own[:shared].sum() + 0.25 * own[shared:].sum()
        sums.append(row_sums)
    ratio = sums[0] - sums[1]
    expected = -log_sigmoid(0.3 * (ratio[0::2] - ratio[1::2])).mean()
    np.testing.assert_allclose(evaluate(config_of("dpo", ld_alpha=0.25), batch)[0], expected, rtol=2e-5)


def test_wpo_weighs_pairs_by_their_likelihood():
    batch = make_batch()
    full = naive_logits(PARAMS, batch.inputs.tokens, batch.inputs.segments)
    squares = np.log((np.exp(full) ** 2).sum(-1))
    got = token_statistics(NET, PARAMS, jax.tree.map(jnp.asarray, batch.inputs), squares=True).log_sum_squares
    np.testing.assert_allclose(np.asarray(got)[batch.mask > 0], squares[batch.mask > 0], rtol=1e-5)
    aligned = np.where(batch.mask > 0, policy_logps() - squares, 0.0).sum(1) / batch.mask.sum(1)
    weights = np.exp(aligned[0::2] + aligned[1::2])
    policy, ref, _ = sums_of()
    u = policy - ref
    expected = (weights * -log_sigmoid(0.3 * (u[0::2] - u[1::2]))).mean()
    np.testing.assert_allclose(evaluate(config_of("dpo", use_weighting=True), batch)[0], expected, rtol=5e-5)


def test_bco_reads_its_shift_from_the_batch():
    batch = make_batch()
    policy, ref, _ = sums_of()
    u = 0.3 * (policy - ref)
    expected = (-log_sigmoid(u[0::2] - 0.4) - log_sigmoid(0.4 - u[1::2])).mean()
    shifted = batch.replace(scalars=Scalars(reward_shift=np.float32(0.4)))
    np.testing.assert_allclose(evaluate(config_of("bco_pair(running_mean=True)"), shifted)[0], expected, rtol=2e-5)


# --- labelled rows ---


def test_kto_is_the_formula():
    batch = make_batch(labels=True)
    policy, ref, _ = sums_of()
    lift = np.float32(2.0 + max(0.0, -(policy - ref)[1::2].mean()))  # so that the reference point is above 0
    ref_logps = batch.ref_logps.copy()
    ref_logps[1::2, 3] -= lift
    value, metrics = evaluate(config_of("kto(desirable_weight=1.5)"), batch.replace(ref_logps=ref_logps))
    u, labels = (policy - ref)[0::2], batch.labels[0::2] > 0
    z = (policy - ref)[1::2].mean() + lift
    sign = np.where(labels, 1.0, -1.0)
    losses = np.where(labels, 1.5, 1.0) * (1 - 1 / (1 + np.exp(-0.3 * sign * (u - z))))
    np.testing.assert_allclose(value, losses.mean(), rtol=2e-5)
    np.testing.assert_allclose(metrics["kl"], z, rtol=2e-5)
    np.testing.assert_allclose(metrics["rewards/chosen"], 0.3 * u[labels].mean(), rtol=2e-4)
    np.testing.assert_allclose(metrics["rewards/margins"], 0.3 * (u[labels].mean() - u[~labels].mean()), rtol=2e-4)
    np.testing.assert_allclose(metrics["rewards/accuracies"], ((u > z) == labels).mean())


def test_apo_zero_unpaired_reads_every_row():
    batch = make_batch(labels=True).replace(labels=np.array([1, 0, 0, 1, 1, 0, 1, 0], np.float32))
    policy, ref, _ = sums_of()
    u = 0.3 * (policy - ref)
    sigmoid = 1 / (1 + np.exp(-u))
    value, metrics = evaluate(config_of("apo_zero_unpaired"), batch)
    np.testing.assert_allclose(value, np.where(batch.labels > 0, 1 - sigmoid, sigmoid).mean(), rtol=2e-5)
    half, _ = evaluate(config_of("apo_zero_unpaired", loss_weights=(0.5,)), batch)
    np.testing.assert_allclose(half, 0.5 * value, rtol=1e-6)
    np.testing.assert_allclose(metrics["rewards/rejected"], u[batch.labels == 0].mean(), rtol=2e-4)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_a_label_that_no_row_has_is_no_number_in_metrics(loss):
    batch = make_batch(labels=True)
    _, metrics = evaluate(config_of(loss), batch.replace(labels=np.ones_like(batch.labels)))
    gaps = {name for name, value in metrics.items() if np.isnan(value)}
    assert gaps == {"rewards/rejected", "logps/rejected", "logits/rejected", "rewards/margins"}


# --- metrics ---


def test_pair_metrics():
    policy, ref, _ = sums_of()
    u = 0.3 * (policy - ref)
    _, metrics = evaluate(config_of("ipo"), make_batch())
    np.testing.assert_allclose(metrics["rewards/chosen"], u[0::2].mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["rewards/margins"], (u[0::2] - u[1::2]).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["rewards/accuracies"], (u[0::2] > u[1::2]).mean())
    np.testing.assert_allclose(metrics["logps/rejected"], policy[1::2].mean(), rtol=1e-5)
    entropies = -(
        np.exp(full := naive_logits(PARAMS, make_batch().inputs.tokens, make_batch().inputs.segments)) * full
    ).sum(-1)
    np.testing.assert_allclose(metrics["entropy"], entropies[make_batch().mask > 0].mean(), rtol=1e-4)


def test_orpo_metrics_are_means_over_tokens():
    policy, _, lengths = sums_of()
    mean = policy / lengths
    _, metrics = evaluate(config_of("orpo(nll_on_prompt=False)"), make_batch().replace(ref_logps=None))
    np.testing.assert_allclose(metrics["logps/chosen"], mean[0::2].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["nll_loss"], -policy[0::2].sum() / lengths[0::2].sum(), rtol=1e-5)
    odds = preference_losses.log_odds_ratio(policy[0::2], policy[1::2], (lengths[0::2], lengths[1::2]))
    np.testing.assert_allclose(metrics["log_odds_chosen"], odds.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["log_odds_ratio"], log_sigmoid(odds).mean(), rtol=1e-4)


def test_rewards_of_means_compare_with_means_of_the_reference(tmp_path):
    (tmp_path / "own.py").write_text(
        "from jaxrl_llm.algorithms.losses import declare\n\n\n"
        "@declare(reference=True, mean_logps=True)\n"
        "def own(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, *, lengths):\n"
        "    return 0.0 * policy_chosen\n"
    )
    policy, ref, lengths = sums_of()
    u = 0.3 * (policy - ref) / lengths
    _, metrics = evaluate(config_of(f"{tmp_path}/own.py:own"), make_batch())
    np.testing.assert_allclose(metrics["rewards/chosen"], u[0::2].mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["rewards/margins"], (u[0::2] - u[1::2]).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["logps/rejected"], (policy / lengths)[1::2].mean(), rtol=1e-5)


def test_metrics_of_a_loss_are_reduced_as_it_says(tmp_path):
    (tmp_path / "own.py").write_text(
        "from jaxrl_llm.algorithms.losses import Metric, declare\n\n\n"
        "def numbers(x):\n"
        "    names = ('mean', 'sum', 'max', 'min')\n"
        "    return {f'own/{name}': Metric(x, name) for name in names} | {'own/one': Metric(0 * x[0] + 3.0)}\n\n\n"
        "@declare(reference=True)\n"
        "def pairs(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, *, lengths):\n"
        "    return policy_rejected, numbers(policy_chosen)\n\n\n"
        "@declare(rows='label')\n"
        "def labels(policy, ref, labels, beta, *, kl):\n"
        "    return policy, numbers(policy)\n\n\n"
        "def mean(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, *, lengths):\n"
        "    return policy_rejected.mean()\n"
    )
    policy, _, _ = sums_of()
    blank = make_batch().mask * (np.arange(8) < 6)[:, None]  # the last pair fills up the batch
    for name, rows, labels in (("pairs", slice(0, 6, 2), False), ("labels", slice(0, 6), True)):
        batch = make_batch(labels=labels).replace(mask=blank)
        _, metrics = evaluate(config_of(f"{tmp_path}/own.py:{name}"), batch)
        for reduce in ("mean", "sum", "max", "min"):
            expected = getattr(policy[rows], reduce)()
            np.testing.assert_allclose(metrics[f"own/{reduce}"], expected, rtol=1e-5, err_msg=f"{name} {reduce}")
        np.testing.assert_allclose(metrics["own/one"], 3.0, rtol=1e-6)
    with pytest.raises(ConfigError, match=r"algorithm\.loss returns .* one number for each pair, \(4,\)"):
        evaluate(config_of(f"{tmp_path}/own.py:mean"), make_batch())


# --- reward model ---

SCORE_NET = Net(ModelConfig(**SHAPE, init_scale=0.3, scan_layers=False, head="score"))
SCORE_PARAMS = SCORE_NET.init(jax.random.key(2))


@pytest.mark.slow
def test_a_loss_of_scores_with_metrics(tmp_path):
    (tmp_path / "own.py").write_text(
        "from jaxrl_llm.algorithms.losses import Metric\n\n\n"
        "def own(chosen, rejected, margin, share=1.0):\n"
        "    return share * (rejected - chosen), {'own/most': Metric(chosen - rejected, 'max')}\n"
    )
    config = config_of(f"{tmp_path}/own.py:own(share=2.0)")
    config.algorithm.name = "reward_model"
    blank = make_batch().mask * (np.arange(8) < 6)[:, None]
    value, metrics = evaluate(config, make_batch().replace(ref_logps=None, mask=blank), SCORE_NET, SCORE_PARAMS)
    np.testing.assert_allclose(value, -2.0 * float(metrics["margin"]), rtol=1e-5)
    assert float(metrics["margin"]) < float(metrics["own/most"]) < 100.0


@pytest.mark.slow
def test_reward_model_scores_the_last_token():
    config = default()
    config.algorithm.name, config.algorithm.loss = "reward_model", "bradley_terry(center=0.1)"
    batch = make_batch().replace(ref_logps=None)
    margins = np.repeat(np.linspace(0, 1, 4), 2).astype(np.float32)
    value, metrics = evaluate(config, batch.replace(margins=margins), SCORE_NET, SCORE_PARAMS)
    scores = np.zeros(8)
    for row in range(8):
        length = int(batch.inputs.segments[row].sum())
        scores[row] = SCORE_NET.bind(SCORE_PARAMS)(jnp.asarray(batch.inputs.tokens[row : row + 1, :length]))[0, -1]
    chosen, rejected = scores[0::2], scores[1::2]
    expected = -log_sigmoid(chosen - rejected - margins[0::2]) + 0.1 * (chosen + rejected) ** 2
    np.testing.assert_allclose(value, expected.mean(), rtol=2e-5)
    np.testing.assert_allclose(metrics["margin"], (chosen - rejected).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["accuracy"], (chosen > rejected).mean())
    np.testing.assert_allclose(
        [metrics["min_reward"], metrics["mean_reward"], metrics["max_reward"]],
        [scores.min(), scores.mean(), scores.max()], rtol=1e-4, atol=1e-6,
    )  # fmt: skip


# --- micro-batches ---


def learning(loss: str):
    """The configuration of a preference loss, or of a reward model."""
    config = config_of("auto" if loss == "reward_model" else loss)
    if loss == "reward_model":
        config.algorithm.name = "reward_model"
    return config


def mesh_of_one():
    return make_mesh(devices=jax.devices()[:1])


def one_update(config, batch, net=NET):
    config.optimizer.learning_rate, config.optimizer.eps = 1e-3, 1e-4
    mesh = mesh_of_one()
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(config)
        state = init_state(net.init(jax.random.key(0)), optimizer, mesh)
        update = make_update(objective_of(config, net), optimizer, update_spec(config), mesh)
        state, metrics = update(state, jax.tree.map(jnp.asarray, batch))
    return state.params, metrics


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo+sft", "kto", "aot+aot_unpaired", "reward_model"])
def test_micro_batches_change_nothing(loss):
    batch = make_batch(labels=loss == "kto")
    found = []
    for rows in (0, 2):
        config = learning(loss)
        config.batch.microbatch_rows = rows
        if loss == "reward_model":
            found.append(one_update(config, batch.replace(ref_logps=None), SCORE_NET))
        else:
            found.append(one_update(config, batch))
    (whole, metrics), (parts, part_metrics) = found
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts, whole)
    for name in metrics:
        np.testing.assert_allclose(part_metrics[name], metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_the_gradient_of_a_sorted_loss_is_that_of_the_whole_batch(loss):
    batch = make_batch()
    ref = np.where(batch.mask > 0, batch.ref_logps, 0.0).sum(1)
    objective = objective_of(config_of(loss), NET)
    prepared = _prepare(objective, PARAMS, batch, 2, 1)

    def direct(params):
        sums = objective.observe(params, batch)
        return preference_losses.LOSSES[loss](sums[0::2], sums[1::2], ref[0::2], ref[1::2], 0.3).mean()

    def in_parts(params):
        micro = microbatches_of(prepared, 2, 1)
        return sum(objective.loss(params, micro.take(number))[0] for number in range(2))

    expected, got = (jax.jit(jax.value_and_grad(f))(PARAMS) for f in (direct, in_parts))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got[1], expected[1])


OTHERS = [pytest.param(x, marks=pytest.mark.slow) for x in ("dpo+sft", "orpo", "aot", "aot_unpaired", "reward_model")]


@pytest.mark.parametrize("loss", ["kto", *OTHERS])
def test_rows_that_fill_up_a_batch_do_not_count(loss):
    """Held-out rows are measured in parts of one size; the last one is filled up with rows whose mask is empty."""
    batch = make_batch(6, labels=loss == "kto")
    blank = jax.tree.map(lambda x: x[-2:], batch).replace(mask=np.zeros((2, 8), np.float32))
    filled = jax.tree.map(lambda x, y: np.concatenate([x, y]), batch, blank)
    net, params = (SCORE_NET, SCORE_PARAMS) if loss == "reward_model" else (NET, PARAMS)
    objective = objective_of(learning(loss), net)
    mesh = mesh_of_one()
    with jax.set_mesh(mesh):
        expected = make_measure(objective, 6, mesh)(params, batch)
        got = make_measure(objective, 4, mesh)(params, filled)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


# --- triples ---


@functools.cache
def make_triples(triples: int = 4) -> Batch:
    """Pairs as those of `make_batch`, each with a gold completion of the same prompt behind it."""
    pairs, rows = make_batch(2 * triples), 3 * triples
    draw, width, prompt = np.random.default_rng(rows), 8, 3

    def between(x, gold):
        return np.concatenate([np.reshape(x, (triples, 2, width)), gold[:, None]], axis=1).reshape(rows, width)

    tokens = draw.integers(0, 29, (triples, width)).astype(np.int32)
    tokens[:, :prompt] = pairs.inputs.tokens[0::2, :prompt]
    ends = prompt + draw.integers(1, 6, (triples, 1))
    mask = ((np.arange(width) >= prompt) & (np.arange(width) < ends)).astype(np.float32)
    tokens, mask = between(pairs.inputs.tokens, tokens), between(pairs.mask, mask)
    segments = np.where(np.arange(width) < prompt, 1, mask).astype(np.int32)
    ref = naive_logps(REFERENCE, tokens, segments).astype(np.float32)
    return Batch(Inputs(tokens, segments), mask=mask, ref_logps=ref)


def gold_nll(batch: Batch):
    logps = naive_logps(PARAMS, batch.inputs.tokens, batch.inputs.segments)
    return -(logps * batch.mask)[2::3].sum() / batch.mask[2::3].sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "of_pairs", "settings"),
    [
        ("tpo", "cpo(nll_weight=0.0)", {}),
        ("tpo_l(gamma=0.7)", "simpo(gamma=0.7, nll_weight=0.0)", {}),
        ("gold_sft", None, {}),
        ("hinge+gold_sft", "hinge", {"reference_free": True}),
        ("dpo+gold_sft", "dpo", {"ld_alpha": 0.3}),
        ("aot+gold_sft", "aot", {}),
        ("orpo+gold_sft(nll_weight=1.0)", "orpo", {}),
    ],
)
def test_a_loss_of_triples_is_that_of_the_pairs_and_the_gold_likelihood(loss, of_pairs, settings):
    """The value and every metric of the pairs; `entropy` is of the gold completions too."""
    batch = make_triples()
    value, metrics = evaluate(config_of(loss, **settings), batch)
    expected, of_pair = gold_nll(batch), {}
    if of_pairs is not None:
        of_pair_value, of_pair = evaluate(config_of(of_pairs, **settings), make_batch())
        expected += of_pair_value
    np.testing.assert_allclose(value, expected, rtol=2e-5)
    for name in of_pair.keys() - {"entropy", "nll_loss"}:
        np.testing.assert_allclose(metrics[name], of_pair[name], rtol=1e-5, atol=1e-6, err_msg=name)
    if of_pairs != "orpo":  # whose own likelihood term is in that metric
        np.testing.assert_allclose(metrics["nll_loss"], gold_nll(batch), rtol=2e-5)
    entropies = naive_logits(PARAMS, batch.inputs.tokens, batch.inputs.segments)
    entropies = -(np.exp(entropies) * entropies).sum(-1)
    np.testing.assert_allclose(metrics["entropy"], entropies[batch.mask > 0].mean(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["tpo(nll_weight=0.5)", "tpo_l", "aot+gold_sft"])
def test_micro_batches_of_triples_change_nothing(loss):
    found = []
    for rows in (0, 3):
        config = config_of(loss)
        config.batch.microbatch_rows = rows
        found.append(one_update(config, make_triples()))
    (whole, metrics), (parts, part_metrics) = found
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts, whole)
    for name in metrics:
        np.testing.assert_allclose(part_metrics[name], metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "together"), [("tpo", 3), ("orpo", 2)])
def test_padding_on_the_left_and_order_change_no_loss(loss, together):
    batch, order = make_triples() if together == 3 else make_batch(), np.array([2, 0, 3, 1])
    expected, metrics = evaluate(config_of(loss), batch)
    rows = (order[:, None] * together + np.arange(together)).reshape(-1)
    moved = batch.take(rows)
    ends = np.asarray(moved.inputs.segments).sum(1)
    shift = (np.arange(8)[None] - (8 - ends)[:, None]) % 8
    moved = moved.map_rows(lambda x: np.take_along_axis(np.asarray(x), shift, axis=1))
    value, other = evaluate(config_of(loss), moved)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name in metrics:
        np.testing.assert_allclose(other[name], metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)


# --- refusals ---


@pytest.mark.parametrize(
    ("loss", "settings", "words"),
    [
        ("simpo(divergence='forward_kl')", {}, ["algorithm.loss", "simpo has no option 'divergence'", "nll_weight"]),
        ("hinge(label_smoothing=0.1)", {}, ["hinge has no option 'label_smoothing'"]),
        ("dpo+ipq", {}, ["algorithm.loss", "'ipq'", "the closest is ipo"]),
        ("ppo_clip", {}, ["algorithm.loss", "'ppo_clip'", "dpo"]),
        ("dpo(gamma=1)", {}, ["algorithm.loss", "dpo has no option 'gamma'", "label_smoothing"]),
        ("dpo(beta=1)", {}, ["no option 'beta'"]),
        ("dpo(divergence='kl')", {}, ["algorithm.loss is", "unknown divergence 'kl'"]),
        ("sft+robust(label_smoothing=0.5)", {}, ["algorithm.loss is 'robust(label_smoothing=0.5)'", "[0, 0.5)"]),
        ("discopop(temperature=0)", {}, ["algorithm.loss is", "above 0; got 0"]),
        ("kto(desirable_weight='2')", {}, ["algorithm.loss: kto: desirable_weight", "takes a number"]),
        ("cpo(nll_weight='1')", {}, ["algorithm.loss: cpo: nll_weight", "takes a number"]),
        ("orpo(nll_on_prompt='False')", {}, ["algorithm.loss: orpo: nll_on_prompt", "takes true or false"]),
        ("kto", {"ld_alpha": 0.5}, ["ld_alpha", "kto learns from labels"]),
        ("aot", {"use_weighting": True}, ["use_weighting", "aot"]),
        ("tpo(nll_weight=0.0)", {}, ["tpo reads gold completions (the column reference)", "write cpo(nll_weight=0)"]),
        ("dpo+gold_sft", {"loss_weights": (1.0, 0.0)}, ["gold_sft reads gold completions", "leave gold_sft out"]),
    ],
)
def test_settings_that_a_loss_does_not_have_are_refused(loss, settings, words):
    with pytest.raises(ConfigError) as error:
        objective_of(config_of(loss, **settings), NET)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm.beta": 0.0}, ["algorithm.beta is 0"]),
        ({"batch.microbatch_rows": 1}, ["batch.microbatch_rows is 1", "a multiple of 2"]),
        ({"batch.minibatches": 64}, ["batch.minibatches is 64", "batch.prompts = 32"]),
        ({"data.packing": True}, ["data.packing", "preference"]),
        ({"algorithm.loss": "kto+dpo"}, ["kto stands alone"]),
        ({"algorithm.loss": "kto+gold_sft"}, ["kto stands alone"]),
        ({"algorithm.loss": "tpo", "batch.microbatch_rows": 4}, ["batch.microbatch_rows is 4", "a multiple of 3"]),
        ({"algorithm.loss_weights": (1.0, 2.0)}, ["2 numbers for the 1 losses"]),
        ({"algorithm.loss": "kto", "batch.minibatches": 32}, ["at least 2"]),
        ({"algorithm.loss": "kto", "data.precompute_reference": True}, ["precompute_reference", "kto"]),
        ({"algorithm.name": "reward_model", "eval.measure": "both"}, ["eval.measure", "reward model"]),
        ({"algorithm.name": "grpo", "eval.measure": "loss"}, ["eval.measure", "samples"]),
    ],
)
def test_contradictions_are_refused(changes, words):
    config = config_of("dpo")
    for name, value in changes.items():
        section, leaf = name.split(".")
        config[section][leaf] = value
    with pytest.raises(ConfigError) as error:
        validate(config)
    assert all(word in str(error.value) for word in words), str(error.value)
