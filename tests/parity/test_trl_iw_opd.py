"""On-policy distillation by sampled tokens: TRL's IW-OPD by its own function, prime-rl's `ref_kl` by its formula."""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.distillation import distilled_advantages, position_weights
from jaxrl_llm.algorithms.policy_losses import opd, ppo_clip, reinforce

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore")]

RNG = np.random.default_rng(0)
N, T, V = 3, 7, 13
LOGITS, TEACHER = 1.5 * RNG.normal(size=(2, N, T, V))
TOKENS = RNG.integers(V, size=(N, T))
MASK = np.arange(T) < np.array([7, 4, 1])[:, None]
ZEROS = np.zeros((N, T))


def logps(logits):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), TOKENS[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("recorded", [True, False], ids=["the sampler's log-probs", "the policy's own"])
def test_iw_opd(gamma, temperature, recorded):
    """The loss, its gradient by the logits, and the mean weight of a token."""
    pytest.importorskip("trl", minversion="1.16")
    from trl.experimental.iw_opd import IWOPDTrainer

    of_sampler = logps(LOGITS / temperature) + 0.1 * RNG.normal(size=(N, T))
    fake = SimpleNamespace(
        temperature=temperature, iw_opd_gamma=gamma, iw_opd_epsilon=1e-8, model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    leaf = torch.tensor(LOGITS, requires_grad=True)
    theirs = IWOPDTrainer._compute_iw_opd_loss(
        fake,
        leaf,
        torch.tensor(TOKENS),
        torch.tensor(np.where(MASK, TOKENS, -100)),
        torch.tensor(np.array(logps(TEACHER / temperature))),
        torch.tensor(np.array(of_sampler)) if recorded else None,
    )
    theirs.backward()
    own, teacher = of_sampler if recorded else logps(LOGITS / temperature), logps(TEACHER / temperature)
    advantages = distilled_advantages(ZEROS, own, teacher, MASK, 1.0, gamma)

    def ours(logits):
        loss = reinforce(logps(logits / temperature), ZEROS, advantages, mask=MASK)
        return (loss_weights(MASK, "token") * loss).sum()

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(LOGITS))
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-6)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-6, atol=1e-9)
    weights = np.asarray(position_weights(own - teacher, MASK, gamma))[MASK]
    np.testing.assert_allclose(weights.mean(), fake._metrics["train"]["iw_opd/mean_weight"][0], rtol=1e-6)

    def clipped(logits):  # on policy the clipped loss has the same gradient
        current = logps(logits / temperature)
        loss, _ = ppo_clip(current, jax.lax.stop_gradient(current), advantages, 0.2, 0.2, mask=MASK)
        return (loss_weights(MASK, "token") * loss).sum()

    np.testing.assert_allclose(jax.grad(clipped)(jnp.asarray(LOGITS)), gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("drift", [0.0, 0.1, 3.0])
def test_ref_kl_of_prime_rl(drift):
    """`opd` with the advantages of a teacher; without drift any importance-weighted loss has the same gradient."""
    of_sampler = np.asarray(logps(LOGITS + drift * RNG.normal(size=LOGITS.shape)))
    of_teacher = np.asarray(logps(TEACHER))
    leaf = torch.tensor(LOGITS, requires_grad=True)
    trainer = torch.log_softmax(leaf, dim=-1).gather(-1, torch.tensor(TOKENS)[..., None])[..., 0]
    sampler, mask = torch.tensor(of_sampler), torch.tensor(MASK)
    change = trainer - sampler
    dropped = trainer.exp() - sampler.exp() < -0.2
    signal = (torch.tensor(of_teacher) - trainer).detach()
    per_token = 1e-3 * mask * change**2 - (mask & ~dropped) * signal * change.exp()
    (theirs := per_token.sum() / mask.sum()).backward()
    advantages = distilled_advantages(ZEROS, of_sampler, of_teacher, MASK)

    def ours(logits, loss=opd):
        return (loss_weights(MASK, "token") * loss(logps(logits), of_sampler, advantages, 0.2, 0.2, mask=MASK)).sum()

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(LOGITS))
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-6)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-6, atol=1e-9)
    assert bool((dropped & mask).any()) == (drift == 3.0), "both kinds of tokens are met"
    if not drift:
        other = jax.grad(lambda x: ours(x, lambda *args, **options: ppo_clip(*args, **options)[0]))(jnp.asarray(LOGITS))
        np.testing.assert_allclose(other, gradient, rtol=1e-8, atol=1e-12)
