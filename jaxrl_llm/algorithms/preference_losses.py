"""Preference losses, one function each: paired losses `[pairs]`, labelled-row losses `[N]`.

    loss = f(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, lengths=lengths, **options)      # [pairs]

- `policy_*`, `ref_* [pairs]` are log-probs summed over the completion.
- `lengths` is `(chosen_lengths, rejected_lengths)`, each `[pairs]`, the completions' tokens. Every paired loss accepts
  it; those that average over tokens need it and raise ValueError without.
- `ref_*` may be None: the loss is then reference-free, as if the reference gave log-prob 0. Losses that do not declare
  `reference` accept one and do not read it.

By what they read:

    the difference of both log-ratios   dpo, hinge, ipo, sigmoid_norm, exo_pair, robust, discopop
    each log-ratio by itself            nca_pair, bco_pair, sppo_hard, apo_zero, apo_down
    log-ratios in order                 aot, aot_unpaired
    no reference                        cpo, simpo, alphapo, orpo; beside a gold completion tpo, tpo_l
    the likelihood alone                sft, gold_sft
    labelled rows                       kto, apo_zero_unpaired
    scores of a reward model            bradley_terry

Notation: u = policy_chosen - ref_chosen, v = policy_rejected - ref_rejected, d = u - v, logits = beta * d. The caller
takes the mean over pairs and adds any likelihood term, on the chosen completion or on a third, the gold one. All
log-probs are natural logarithms.
"""

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, relu, sigmoid

from jaxrl_llm.algorithms.aggregation import as_float, masked_mean
from jaxrl_llm.algorithms.losses import Metric, Metrics, check_rank, declare

Array = jax.Array

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


def divergence_scores(log_ratios, divergence: str = "reverse_kl", alpha: float = 0.5, largest=80.0) -> Array:
    """Returns f'(exp(log_ratios)), which stands in for the log-ratio in an f-divergence DPO, shifted to 0 at ratio 1.

    `reverse_kl`: u. `forward_kl`: `1 - exp(-u)`. `js_divergence`: `log 2 + log sigmoid(u)`. `alpha_divergence`:
    `(exp((alpha - 1) u) - 1) / (alpha - 1)`, which tends to reverse_kl for alpha -> 1 and is forward_kl for alpha 0.
    Exponents are bounded above by `largest`, as float32 has no number for exp(89). Any shape. Raises ValueError for an
    unknown divergence. Source: f-DPO, arXiv 2309.16240.
    """
    u = as_float(log_ratios)
    if divergence == "reverse_kl" or (divergence == "alpha_divergence" and abs(alpha - 1.0) < 1e-6):
        return u
    if divergence == "js_divergence":
        return jnp.log(2.0) + log_sigmoid(u)
    if divergence in ("forward_kl", "alpha_divergence"):
        alpha = 0.0 if divergence == "forward_kl" else alpha
        return jnp.expm1(jnp.minimum((alpha - 1.0) * u, largest)) / (alpha - 1.0)
    raise ValueError(f"unknown divergence {divergence!r}; choose one of {', '.join(DIVERGENCES)}")


def _log_ratio(policy, ref) -> Array:
    check_rank(1, policy=policy, ref=ref)
    policy = as_float(policy)
    return policy if ref is None else policy - jax.lax.stop_gradient(as_float(ref))


def _log_ratios(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, divergence="reverse_kl", alpha=0.5, largest=80.0
) -> tuple[Array, Array]:
    """Returns u and v `[pairs]`, or the `divergence_scores` of them."""
    u, v = _log_ratio(policy_chosen, ref_chosen), _log_ratio(policy_rejected, ref_rejected)
    return divergence_scores(u, divergence, alpha, largest), divergence_scores(v, divergence, alpha, largest)


def _per_token(chosen, rejected, lengths) -> tuple[Array, Array]:
    """Returns the sums `[pairs]` of chosen and rejected completions divided by their lengths."""
    check_rank(1, policy_chosen=chosen, policy_rejected=rejected)
    if lengths is None:
        raise ValueError("this loss averages over tokens; pass lengths=(chosen_lengths, rejected_lengths)")
    chosen_lengths, rejected_lengths = (jnp.maximum(as_float(x), 1.0) for x in lengths)
    return as_float(chosen) / chosen_lengths, as_float(rejected) / rejected_lengths


def _smoothed(logits: Array, label_smoothing) -> Array:
    """Returns `-(1 - e) log sigmoid(logits) - e log sigmoid(-logits)` of e = label_smoothing."""
    if isinstance(label_smoothing, (int, float)) and not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is the chance that a label is flipped, from 0 to 1; got {label_smoothing}")
    return -(1.0 - label_smoothing) * log_sigmoid(logits) - label_smoothing * log_sigmoid(-logits)


@declare(rows="pair", reference=True)
def dpo(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None,
    label_smoothing=0.0, divergence="reverse_kl", alpha=0.5,
) -> Array:  # fmt: skip
    """Returns `-log sigmoid(beta d)`, `[pairs]` (TRL's `sigmoid`).

    `label_smoothing=e`, the chance that a label is flipped, gives conservative DPO:
    `-(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)`. `divergence` replaces u and v, see `divergence_scores`.
    Source: DPO, arXiv 2305.18290; cDPO, Mitchell (2023).
    """
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, divergence, alpha)
    return _smoothed(beta * (u - v), label_smoothing)


@declare(rows="pair", reference=True)
def hinge(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None,
    divergence="reverse_kl", alpha=0.5,
) -> Array:  # fmt: skip
    """Returns `max(0, 1 - beta d)`, `[pairs]`. Source: SLiC, arXiv 2305.10425, on DPO's scores as RSO, 2309.06657."""
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, divergence, alpha)
    return relu(1.0 - beta * (u - v))


@declare(rows="pair", reference=True)
def ipo(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None,
    normalize=True, divergence="reverse_kl", alpha=0.5,
) -> Array:  # fmt: skip
    """Returns `(u / len_chosen - v / len_rejected - 1 / (2 beta))^2`, `[pairs]`.

    `normalize=False` keeps the sums, `(d - 1 / (2 beta))^2`, which is how the paper writes it; its authors averaged
    over tokens. Exponents of a divergence are bounded by 40, as scores are squared. Source: IPO, arXiv 2310.12036.
    """
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, divergence, alpha, 40.0)
    if normalize:
        u, v = _per_token(u, v, lengths)
    return jnp.square(u - v - 1.0 / (2.0 * beta))


@declare(rows="pair", reference=True)
def sigmoid_norm(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None,
    label_smoothing=0.0, divergence="reverse_kl", alpha=0.5,
) -> Array:  # fmt: skip
    """Returns `-log sigmoid(beta (u / len_chosen - v / len_rejected))`, `[pairs]`: length-normalised DPO.

    `label_smoothing` as `dpo`. Source: Tulu 3, arXiv 2411.15124.
    """
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, divergence, alpha)
    u, v = _per_token(u, v, lengths)
    return _smoothed(beta * (u - v), label_smoothing)


@declare(rows="pair", reference=True)
def exo_pair(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None,
    label_smoothing=1e-3, divergence="reverse_kl", alpha=0.5,
) -> Array:  # fmt: skip
    """Returns the reverse KL from the policy's preference to the smoothed label, `[pairs]`.

    Formula, q = sigmoid(beta d), e = label_smoothing: `q (log q - log(1 - e)) + (1 - q) (log(1 - q) - log e)`. Raises
    ValueError unless 0 < label_smoothing < 1. Source: EXO, arXiv 2402.00856, eq. 16.
    """
    if isinstance(label_smoothing, (int, float)) and not 0 < label_smoothing < 1:
        raise ValueError(f"exo_pair takes the log of label_smoothing, which must lie in (0, 1); got {label_smoothing}")
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, divergence, alpha)
    logits = beta * (u - v)
    win = sigmoid(logits) * (log_sigmoid(logits) - jnp.log1p(-as_float(label_smoothing)))
    return win + sigmoid(-logits) * (log_sigmoid(-logits) - jnp.log(as_float(label_smoothing)))


@declare(rows="pair", reference=True)
def robust(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None,
    label_smoothing=0.0, divergence="reverse_kl", alpha=0.5,
) -> Array:  # fmt: skip
    """Returns DPO's loss corrected for labels flipped with probability e = label_smoothing, unbiased, `[pairs]`.

    Formula: `(-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e)`. Raises ValueError unless
    0 <= e < 0.5. Source: robust DPO, arXiv 2403.00409.
    """
    if isinstance(label_smoothing, (int, float)) and not 0 <= label_smoothing < 0.5:
        raise ValueError(f"robust needs a label_smoothing (flip probability) in [0, 0.5); got {label_smoothing}")
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, divergence, alpha)
    logits = beta * (u - v)
    kept, flipped = -(1.0 - label_smoothing) * log_sigmoid(logits), -label_smoothing * log_sigmoid(-logits)
    return (kept - flipped) / (1.0 - 2.0 * label_smoothing)


@declare(rows="pair", reference=True)
def discopop(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None,
    temperature=0.05, divergence="reverse_kl", alpha=0.5,
) -> Array:  # fmt: skip
    """Returns the log-ratio modulated loss `[pairs]`: a blend of the logistic and the exponential loss.

    Formula, m = sigmoid(beta d / temperature): `-(1 - m) log sigmoid(beta d) + m exp(-beta d)`. Raises ValueError
    unless temperature > 0. Source: DiscoPOP, arXiv 2406.08414, eq. 5.
    """
    if isinstance(temperature, (int, float)) and temperature <= 0:
        raise ValueError(f"discopop divides by temperature, which must be above 0; got {temperature}")
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, divergence, alpha)
    logits = beta * (u - v)
    # In one exponential: far below 0 the second term is 0 times infinity otherwise.
    exponential = jnp.exp(log_sigmoid(logits / temperature) - logits)
    return -sigmoid(-logits / temperature) * log_sigmoid(logits) + exponential


@declare(rows="pair", reference=True)
def nca_pair(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None) -> Array:
    """Returns `-log sigmoid(beta u) - log sigmoid(-beta u) / 2 - log sigmoid(-beta v) / 2`, `[pairs]`.

    Source: NCA, arXiv 2402.05369.
    """
    u, v = (beta * x for x in _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected))
    return -log_sigmoid(u) - 0.5 * log_sigmoid(-u) - 0.5 * log_sigmoid(-v)


@declare(rows="pair", reference=True, options={"running_mean": False})
def bco_pair(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None, reward_shift=0.0
) -> Array:
    """Returns `-log sigmoid(beta u - shift) - log sigmoid(-(beta v - shift))`, `[pairs]`.

    `reward_shift` is the running mean of all rewards beta u, beta v seen so far (`RunningMean`), as in the paper; 0
    leaves it out. Source: BCO, arXiv 2404.04656.
    """
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return -log_sigmoid(beta * u - reward_shift) - log_sigmoid(reward_shift - beta * v)


@declare(rows="pair", reference=True)
def sppo_hard(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None) -> Array:
    """Returns `(u - 1 / (2 beta))^2 + (v + 1 / (2 beta))^2`, `[pairs]`: SPPO with win probabilities 1 and 0.

    Source: SPPO, arXiv 2405.00675, eq. 4.7.
    """
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return jnp.square(u - 0.5 / beta) + jnp.square(v + 0.5 / beta)


@declare(rows="pair", reference=True, compares_pairs=True)
def aot(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None, label_smoothing=0.0
) -> Array:
    """Returns the smoothed DPO loss between sorted policy margins and sorted reference margins, `[pairs]`.

    The margins `policy_chosen - policy_rejected` and `ref_chosen - ref_rejected` are sorted on their own over the pairs
    given, then subtracted rank by rank, so the value depends on which pairs are given together.
    Source: AOT, arXiv 2406.05882.
    """
    margins = jnp.sort(as_float(policy_chosen) - as_float(policy_rejected))
    if ref_chosen is not None:
        margins -= jnp.sort(jax.lax.stop_gradient(as_float(ref_chosen) - as_float(ref_rejected)))
    return _smoothed(beta * margins, label_smoothing)


@declare(rows="pair", reference=True, compares_pairs=True)
def aot_unpaired(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None, label_smoothing=0.0
) -> Array:
    """Returns the smoothed DPO loss between sorted u and sorted v, `[pairs]`; see `aot` for the sorting.

    Source: AOT, arXiv 2406.05882.
    """
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return _smoothed(beta * (jnp.sort(u) - jnp.sort(v)), label_smoothing)


@declare(rows="pair", reference=True)
def apo_zero(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None) -> Array:
    """Returns `1 - sigmoid(beta u) + sigmoid(beta v)`, `[pairs]`: raises the chosen, lowers the rejected.

    Source: APO, arXiv 2408.06266, eq. 7.
    """
    u, v = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return sigmoid(-beta * u) + sigmoid(beta * v)


@declare(rows="pair", reference=True)
def apo_down(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, *, lengths=None) -> Array:
    """Returns `sigmoid(beta u) + 1 - sigmoid(beta d)`, `[pairs]`: lowers both, the rejected more.

    Source: APO, arXiv 2408.06266, eq. 8.
    """
    u, v = (beta * x for x in _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected))
    return sigmoid(u) + sigmoid(v - u)


@declare(rows="pair", options={"nll_weight": 1.0})
def cpo(
    policy_chosen, policy_rejected, ref_chosen=None, ref_rejected=None, beta=0.1, *, lengths=None, label_smoothing=0.0
) -> Array:
    """Returns `-log sigmoid(beta (policy_chosen - policy_rejected))`, `[pairs]`; no reference is read.

    The paper adds the negative log-likelihood of the chosen completion; the caller adds it with weight `nll_weight`, 1
    by default as in TRL (`cpo_alpha`). `label_smoothing` as `dpo`. Source: CPO, arXiv 2401.08417.
    """
    return _smoothed(beta * (as_float(policy_chosen) - as_float(policy_rejected)), label_smoothing)


@declare(rows="pair", mean_logps=True, options={"nll_weight": 1.0})
def simpo(
    policy_chosen, policy_rejected, ref_chosen=None, ref_rejected=None, beta=2.0, *, lengths=None,
    gamma=0.5, label_smoothing=0.0,
) -> Array:  # fmt: skip
    """Returns `-log sigmoid(beta (p_chosen - p_rejected) - gamma)`, p the mean log-prob per token, `[pairs]`.

    `gamma` is the target margin itself, not its ratio to beta; the default is TRL's, the paper has beta 2 to 2.5 and
    gamma / beta near 0.5. No reference is read. `label_smoothing` as `dpo`. Source: SimPO, arXiv 2405.14734.
    """
    chosen, rejected = _per_token(policy_chosen, policy_rejected, lengths)
    return _smoothed(beta * (chosen - rejected) - gamma, label_smoothing)


def alpha_reward(logps, alpha=0.25, **options) -> Array:
    """Returns `(1 - p^-alpha) / alpha` of mean log-probs per token, log p; log p itself where alpha is 0.

    Exponents are bounded above by 80, as those of `divergence_scores`. Other options of `alphapo` are accepted and not
    read.
    """
    logps = as_float(logps)
    return logps if alpha == 0 else -jnp.expm1(jnp.minimum(-alpha * logps, 80.0)) / alpha


@declare(rows="pair", mean_logps=True, options={"nll_weight": 0.0}, reward=alpha_reward)
def alphapo(
    policy_chosen, policy_rejected, ref_chosen=None, ref_rejected=None, beta=2.0, *, lengths=None,
    gamma=0.5, alpha=0.25, label_smoothing=0.0,
) -> Array:  # fmt: skip
    """Returns `-log sigmoid(beta (r_chosen - r_rejected) - gamma)` with `r = (1 - p^-alpha) / alpha`, `[pairs]`.

    p is the geometric mean probability per token; alpha -> 0 is SimPO. No reference is read. `gamma` and
    `label_smoothing` as `simpo`. Source: AlphaPO, arXiv 2501.03884.
    """
    chosen, rejected = _per_token(policy_chosen, policy_rejected, lengths)
    difference = alpha_reward(chosen, alpha) - alpha_reward(rejected, alpha)
    return _smoothed(beta * difference - gamma, label_smoothing)


@declare(rows="triple", options={"nll_weight": 1.0})
def tpo(
    policy_chosen, policy_rejected, ref_chosen=None, ref_rejected=None, beta=0.01, *, lengths=None, label_smoothing=0.0
) -> Array:
    """Returns `-log sigmoid(beta (policy_chosen - policy_rejected))`, `[pairs]`; no reference is read.

    TPO's loss is this plus the negative log-likelihood of a gold completion of the same prompt, which the caller adds
    with weight `nll_weight` (TRL's `tpo_alpha`). `label_smoothing` as `dpo`. Source: TPO, arXiv 2405.16681.
    """
    return cpo(policy_chosen, policy_rejected, beta=beta, label_smoothing=label_smoothing)


@declare(rows="triple", mean_logps=True, options={"nll_weight": 1.0})
def tpo_l(
    policy_chosen, policy_rejected, ref_chosen=None, ref_rejected=None, beta=0.01, *, lengths=None,
    gamma=0.5, label_smoothing=0.0,
) -> Array:  # fmt: skip
    """Returns `-log sigmoid(beta (p_chosen - p_rejected) - gamma)`, p the mean log-prob per token, `[pairs]`.

    TPO-L, SimPO's loss beside the likelihood term of `tpo`; `gamma` is the target margin itself, TRL's `tpo_l_gamma`.
    No reference is read. `label_smoothing` as `dpo`. Source: TPO, arXiv 2405.16681.
    """
    return simpo(
        policy_chosen, policy_rejected, beta=beta, lengths=lengths, gamma=gamma, label_smoothing=label_smoothing
    )


@declare(rows="pair", reference=None, options={"nll_weight": 1.0})
def sft(policy_chosen, policy_rejected, ref_chosen=None, ref_rejected=None, beta=0.1, *, lengths=None) -> Array:
    """Returns 0 for each pair: `sft` is the negative log-likelihood that the caller adds, and nothing else."""
    return jnp.zeros(jnp.shape(policy_chosen))


@declare(rows="triple", reference=None, options={"nll_weight": 1.0})
def gold_sft(policy_chosen, policy_rejected, ref_chosen=None, ref_rejected=None, beta=0.1, *, lengths=None) -> Array:
    """Returns 0 for each pair, as `sft`; the likelihood that the caller adds is that of the gold completion.

    Beside another loss, `hinge+gold_sft`, it makes TPO of that, arXiv 2405.16681.
    """
    return sft(policy_chosen, policy_rejected)


def log1mexp(x) -> Array:
    """Returns `log(1 - exp(x))` for x < 0, accurate near 0 and far from it."""
    x = as_float(x)
    near = x > -jnp.log(2.0)
    return jnp.where(near, jnp.log(-jnp.expm1(jnp.where(near, x, -1.0))), jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))


def log_odds_ratio(policy_chosen, policy_rejected, lengths) -> Array:
    """Returns ORPO's log odds ratio `[pairs]`, `(a - b) - (log(1 - e^a) - log(1 - e^b))` of mean log-probs a and b.

    Finite also where a completion is so certain that its log-prob is rounded to 0: 1 - e^a is at least 2^-24.
    """
    chosen, rejected = _per_token(policy_chosen, policy_rejected, lengths)
    odds = [log1mexp(jnp.minimum(x, -(2.0**-24))) for x in (chosen, rejected)]
    return (chosen - rejected) - (odds[0] - odds[1])


@declare(rows="pair", mean_logps=True, options={"nll_weight": 1.0, "nll_on_prompt": True})
def orpo(
    policy_chosen, policy_rejected, ref_chosen=None, ref_rejected=None, beta=0.1, *, lengths=None
) -> tuple[Array, Metrics]:
    """Returns the odds-ratio term `-beta log sigmoid(log_odds_ratio)`, `[pairs]`, and the odds as metrics.

    ORPO's loss is this plus the negative log-likelihood of the chosen completion, which the caller adds (`nll_weight`;
    `nll_on_prompt`: of its prompt too, as in TRL); beta is the paper's lambda. No reference is read.
    Source: ORPO, arXiv 2403.07691.
    """
    odds = log_odds_ratio(policy_chosen, policy_rejected, lengths)
    return -beta * log_sigmoid(odds), {"log_odds_chosen": Metric(odds), "log_odds_ratio": Metric(log_sigmoid(odds))}


def bradley_terry(chosen_scores, rejected_scores, margin=None, center=0.0) -> Array:
    """Returns the reward model's loss `[pairs]`.

    Formula: `-log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2` of the two scores.
    Shapes: all `[pairs]`; `margin` is optional and per pair. `center` pulls the sum of a pair's scores to 0; 0.01 is
    usual. Source: arXiv 2203.02155; margin, Llama 2, arXiv 2307.09288; centering, arXiv 2312.09244.
    """
    chosen, rejected = as_float(chosen_scores), as_float(rejected_scores)
    difference = chosen - rejected if margin is None else chosen - rejected - as_float(margin)
    return -log_sigmoid(difference) + center * jnp.square(chosen + rejected)


def kto_kl(policy_logps, ref_logps, row_mask=None) -> Array:
    """Returns KTO's reference point z, a scalar without gradient: `max(0, mean(policy - ref))` over mismatched rows.

    Shapes: `policy_logps, ref_logps [N]`, log-prob sums of completions under the prompts of other rows (TRL pairs each
    prompt with the completion of the previous row); `row_mask [N]` leaves rows out. Source: KTO, arXiv 2402.01306.
    """
    drift = as_float(policy_logps) - as_float(ref_logps)
    mean = masked_mean(drift, jnp.ones(drift.shape) if row_mask is None else row_mask)
    return jax.lax.stop_gradient(jnp.maximum(mean, 0.0))


@declare(rows="label_and_mismatch", reference=True)
def kto(policy, ref, labels, beta=0.1, *, kl, desirable_weight=1.0, undesirable_weight=1.0) -> Array:
    """Returns `w (1 - sigmoid(beta (u - z)))` for desirable and `w (1 - sigmoid(beta (z - u)))` for other rows, `[N]`.

    Shapes: `policy, ref [N]` log-prob sums, u their difference; `labels [N]` true for desirable rows; `kl` the scalar z
    of `kto_kl`. The mean over rows divides by their number, not by the weights. The paper wants
    desirable_weight * n_desirable / (undesirable_weight * n_undesirable) within [1, 4/3]. Source: KTO, arXiv
    2402.01306.
    """
    u = _log_ratio(policy, ref)
    labels = jnp.asarray(labels) > 0
    sign = jnp.where(labels, 1.0, -1.0)
    weight = jnp.where(labels, desirable_weight, undesirable_weight)
    return weight * sigmoid(sign * beta * (jax.lax.stop_gradient(as_float(kl)) - u))


@declare(rows="label", reference=True)
def apo_zero_unpaired(policy, ref, labels, beta=0.1, *, kl=None, desirable_weight=1.0, undesirable_weight=1.0) -> Array:
    """Returns KTO's loss with the reference point 0, `[N]`; `kl` is accepted and not read.

    Formula: `w (1 - sigmoid(beta u))` for desirable and `w sigmoid(beta u)` for other rows. Source: APO, arXiv
    2408.06266.
    """
    return kto(
        policy, ref, labels, beta, kl=0.0, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )


# The losses by the names that `algorithm.loss` knows; `sigmoid` is TRL's name of dpo.
LOSSES = {name: loss for name, loss in vars().items() if hasattr(loss, "rows")} | {"sigmoid": dpo}
