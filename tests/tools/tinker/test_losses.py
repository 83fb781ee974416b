"""Tinker's losses against torch autograd of the formulas in its documentation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.tools.tinker.losses import LOSSES, THRESHOLDS

torch = pytest.importorskip("torch")
DRAW = np.random.default_rng(0)
ROWS, TOKENS = 6, 9
LENGTHS = np.array([9, 9, 7, 4, 1, 0])  # the last row is padding alone
REAL = np.arange(TOKENS) < LENGTHS[:, None]


def padded(x):
    return np.where(REAL, x, 0.0).astype(np.float32)


LOGPS = padded(-DRAW.exponential(1.0, (ROWS, TOKENS)))
INPUTS = {
    "target_tokens": padded(DRAW.integers(0, 9, (ROWS, TOKENS))),
    "logprobs": padded(LOGPS + DRAW.normal(0.0, 0.7, (ROWS, TOKENS))),
    "advantages": padded(DRAW.normal(size=(ROWS, TOKENS))),
    "weights": padded(DRAW.normal(size=(ROWS, TOKENS))),
    "sequence_ratio_mask": padded(DRAW.choice([0.0, 0.5, 2.0], (ROWS, TOKENS))),
}
INPUTS["sequence_ratio_mask"][:5, 0] = 1.0
ENDS = {"clip_low_threshold": (0.2, 1.0), "clip_high_threshold": (1.0, 2.0)}
BOUNDS = {name: padded(DRAW.uniform(*ends, (ROWS, TOKENS))) for name, ends in ENDS.items()}


# One row of N tokens, as the documentation writes them.


def cross_entropy(lp, weights, **_):
    return -(weights * lp).sum()


def importance_sampling(lp, logprobs, advantages, **_):
    return -(torch.exp(lp - logprobs) * advantages).sum()


def clamp(ratio, low, high):
    return ratio.clamp(min=low).clamp(max=high)  # each a number or a tensor: at once torch takes two of a kind


def clipped(ratio, advantages, low, high):
    return -torch.min(ratio * advantages, clamp(ratio, low, high) * advantages).sum()


def ppo(lp, logprobs, advantages, clip_low_threshold=0.8, clip_high_threshold=1.2, **_):
    return clipped(torch.exp(lp - logprobs), advantages, clip_low_threshold, clip_high_threshold)


def cispo(lp, logprobs, advantages, clip_low_threshold=0.0, clip_high_threshold=4.0, **_):
    ratio = clamp(torch.exp(lp - logprobs), clip_low_threshold, clip_high_threshold)
    return -(ratio.detach() * lp * advantages).sum()


def dro(lp, logprobs, advantages, beta=0.1, **_):
    return -(lp * advantages - 0.5 * beta * (lp - logprobs) ** 2).sum()


def gspo(lp, logprobs, advantages, sequence_ratio_mask, clip_low_threshold=0.8, clip_high_threshold=1.2, **_):
    in_ratio = sequence_ratio_mask != 0
    log_ratio = (lp.detach() - logprobs)[in_ratio].mean()
    ratio = torch.exp(log_ratio + lp - lp.detach())
    return clipped(ratio, advantages, clip_low_threshold, clip_high_threshold)


ORACLES = {f.__name__: f for f in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo)}
OPTIONS = {
    "ppo": ({"clip_low_threshold": 0.5}, {"clip_high_threshold": 1.6}),
    "cispo": ({"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, {"clip_high_threshold": 0.7}),
    "dro": ({"beta": 0.0}, {"beta": 2.5}),
    "gspo": ({"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},),
}
CASES = [(name, options) for name in ORACLES for options in ({}, *OPTIONS.get(name, ()))]


@functools.partial(jax.jit, static_argnums=0)
def own(name, logps, inputs, options):
    """The losses `[N,T]` and the gradient of their sum by the log-probs."""
    of = functools.partial(LOSSES[name].of, inputs=inputs, options={**LOSSES[name].options, **options})
    return of(logps), jax.grad(lambda x: of(x).sum())(logps)


def check(name, inputs, options):
    losses, gradient = own(name, LOGPS, inputs, options)
    assert losses.shape == LOGPS.shape
    values = []
    for row, length in enumerate(LENGTHS[:-1]):
        lp = torch.tensor(LOGPS[row, :length], requires_grad=True)
        given = {key: torch.tensor(x[row, :length]) for key, x in inputs.items()}
        loss = ORACLES[name](lp, **(options | given))
        loss.backward()
        values.append(loss.item())
        np.testing.assert_allclose(gradient[row, :length], lp.grad, rtol=2e-5, atol=1e-6, err_msg=f"row {row}")
    np.testing.assert_allclose(losses.sum(1)[:-1], values, rtol=2e-5, atol=1e-6)
    assert np.abs(np.asarray(gradient)).max() > 0.1
    for found in (losses, gradient):
        assert (np.asarray(found)[~REAL] == 0.0).all()


def test_all_losses_are_compared():
    assert ORACLES.keys() == LOSSES.keys()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_loss_is_that_of_the_documentation(name, options):
    check(name, {key: x for key, x in INPUTS.items() if key in (*LOSSES[name].needs, *LOSSES[name].optional)}, options)


@pytest.mark.parametrize("given", [THRESHOLDS, THRESHOLDS[:1], THRESHOLDS[1:]])
@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_thresholds_of_each_token_take_the_place_of_the_options(name, given):
    inputs = {key: INPUTS[key] for key in LOSSES[name].needs}
    check(name, inputs | {key: BOUNDS[key] for key in given}, {})


def test_distributions_have_a_weight_for_each_target():
    weights = DRAW.normal(size=(2, 3, 4)).astype(np.float32)
    logps = -DRAW.exponential(1.0, (2, 3, 4)).astype(np.float32)
    losses, gradient = own("cross_entropy", logps, {"weights": jnp.asarray(weights)}, {})
    np.testing.assert_allclose(losses, -weights * logps)
    np.testing.assert_allclose(gradient, -weights)
