"""Divergences of a teacher against TRL's own: GKDTrainer's, the chunked kernel of DistillationTrainer, SDPO's top k.

All in float64 but the kernel, which computes in float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.distillation import generalized_jsd, with_tail, without_tail
from jaxrl_llm.models.chunked_divergences import Distributions, chunked_divergence

torch = pytest.importorskip("torch")
pytest.importorskip("trl", minversion="1.16")

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore")]

RNG = np.random.default_rng(0)
STUDENT, TEACHER = 2.0 * RNG.normal(size=(2, 3, 7, 31))
WEIGHTS = RNG.normal(size=(3, 7))
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def assert_same(ours, theirs):
    """The values of a divergence by token, and its weighted gradient by the student's logits."""
    (_, value), gradient = jax.value_and_grad(lambda x: ((WEIGHTS * ours(x)).sum(), ours(x)), has_aux=True)(
        jnp.asarray(STUDENT)
    )
    leaf = torch.tensor(STUDENT, requires_grad=True)
    expected = theirs(leaf)
    (torch.tensor(WEIGHTS) * expected).sum().backward()
    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-6, atol=1e-9)
    assert np.abs(value).max() > 1e-3


def log_probs(logits, temperature=1.0):
    return jax.nn.log_softmax(logits / temperature)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", BETAS)
def test_gkd(beta, temperature):
    from trl.experimental.gkd import GKDTrainer

    def theirs(logits):
        teacher = torch.tensor(TEACHER)
        loss = GKDTrainer.generalized_jsd_loss
        return loss(logits, teacher, beta=beta, temperature=temperature, reduction="none").sum(-1)

    def ours(logits):
        return generalized_jsd(log_probs(logits, temperature), log_probs(TEACHER, temperature), beta)

    assert_same(ours, theirs)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("k", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_likeliest_tokens_of_the_student(beta, k, tail):
    """With an entry for the rest, or of these tokens alone."""
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

    def theirs(logits):
        return compute_topk_self_distillation_loss(
            logits, torch.tensor(TEACHER), distillation_topk=k, distillation_alpha=beta, distillation_add_tail=tail
        )

    def ours(logits):
        ids = jax.lax.top_k(logits, k)[1]
        both = (jnp.take_along_axis(log_probs(x), ids, axis=-1) for x in (logits, TEACHER))
        return generalized_jsd(*map(with_tail if tail else without_tail, both), beta)

    assert_same(ours, theirs)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_kernel_of_the_distillation_trainer(beta):
    """From hidden states and heads, in float32: values, and gradients by the student's hidden states and head."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    rng = np.random.default_rng(1)
    hidden, other = (rng.normal(size=(4, 6, d)).astype(np.float32) for d in (16, 8))
    heads = [0.5 * rng.normal(size=(d, 31)).astype(np.float32) for d in (16, 8)]
    weights = rng.normal(size=(4, 6)).astype(np.float32)

    def ours(hidden, kernel):
        teacher = Distributions(jnp.asarray(other), jnp.asarray(heads[1]))
        divergence = chunked_divergence(hidden, kernel, teacher, 0.7, beta, 2.0)
        return (weights * divergence).sum(), divergence

    with jax.enable_x64(False):
        (_, value), gradients = jax.value_and_grad(ours, (0, 1), has_aux=True)(
            jnp.asarray(hidden), jnp.asarray(heads[0])
        )
    leaves = [torch.tensor(x, requires_grad=True) for x in (hidden.reshape(24, 16), heads[0].T.copy())]
    expected, _ = ChunkedDivergenceFunction.apply(
        *leaves, None, torch.tensor(other.reshape(24, 8)), torch.tensor(heads[1].T.copy()), None, beta, 0.7, 1.0, 2.0
    )
    (torch.tensor(weights.reshape(-1)) * expected).sum().backward()
    np.testing.assert_allclose(value.reshape(-1), expected.detach().numpy(), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradients[0].reshape(24, 16), leaves[0].grad.numpy(), rtol=2e-5, atol=3e-6)
    np.testing.assert_allclose(gradients[1].T, leaves[1].grad.numpy(), rtol=2e-5, atol=3e-6)
