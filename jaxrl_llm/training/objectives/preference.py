"""The objectives that learn from preferences: pairs of completions, labelled completions, pairs for a reward model.

The losses themselves are in `algorithms.preference_losses`. Here token log-probs become sums per row, losses become a
mixture, and what a loss needs of the whole optimizer batch (KTO's reference point, AOT's order) is measured before it
is split, so that micro-batches change nothing.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import preference_losses
from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.sequence_logps import length_desensitized_logps, sequence_logps, split_pairs, wpo_weights
from jaxrl_llm.config import ConfigDict, ConfigError, default, loss_names
from jaxrl_llm.config.resolve import resolve_with_options
from jaxrl_llm.config.schema import LABELLED
from jaxrl_llm.models.logprobs import TokenStatistics, last_scores, token_logps, token_statistics
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.training.objectives.policy_gradient import Metrics, Objective, Reads


def sft(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, *, lengths=None) -> jax.Array:
    """Returns 0 for each pair: in a mixture `sft` is its likelihood term alone."""
    return jnp.zeros(policy_chosen.shape)


PAIRED = (
    "dpo", "hinge", "ipo", "sigmoid_norm", "exo_pair", "robust", "discopop", "nca_pair", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "cpo", "simpo", "alphapo", "orpo",
)  # fmt: skip
LOSSES = {name: getattr(preference_losses, name) for name in (*PAIRED, *LABELLED)}
LOSSES |= {"sigmoid": preference_losses.dpo, "sft": sft}
COUPLED = ("aot", "aot_unpaired")  # compare the pairs of a batch with each other
AVERAGED = ("simpo", "alphapo", "orpo")  # rewards and log-probs are means over tokens, in the metrics too
# Filled in by the objective, so no options of a loss.
GIVEN = (
    "policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected", "policy", "ref", "labels", "beta", "lengths",
    "kl", "reward_shift",
)  # fmt: skip
# Setting -> the option of a loss function it is; a setting that no loss of the mixture has is refused.
OPTIONS = {
    "label_smoothing": "label_smoothing",
    "f_divergence": "divergence",
    "ipo_normalize": "normalize",
    "discopop_tau": "temperature",
    "bco_running_mean": "reward_shift",
    "simpo_gamma": "gamma",
    "desirable_weight": "desirable_weight",
    "undesirable_weight": "undesirable_weight",
}
LIKELIHOOD = {"sft": 1.0, "orpo": 1.0}  # weight of the chosen completion's likelihood; cpo_alpha in cpo and simpo
WITH_LIKELIHOOD = ("cpo", "simpo", "alphapo")  # log it also where its weight is 0


class Term(NamedTuple):
    """One loss of a mixture: its weight, the function with its options, and the weight of its likelihood term."""

    name: str
    weight: float
    function: Callable[..., jax.Array]
    options: dict[str, object]
    likelihood: float


def terms(config) -> list[Term]:
    """The losses that `algorithm.loss` names, joined by +, with their weights and options.

    Options are the settings of `algorithm`, and those written in brackets, `dpo(label_smoothing=0.1)`, for one loss.
    Raises ConfigError for an unknown name, or an option that is set and that none of them has.
    """
    algorithm, standard = config.algorithm, default().algorithm
    names, specs = loss_names(config), algorithm.loss.split("+")
    weights = algorithm.loss_weights or (1.0,) * len(names)
    found = [_resolve(spec) for spec in specs]
    taken = {option for function, _ in found for option in inspect.signature(function).parameters}
    for setting, option in OPTIONS.items():
        if algorithm[setting] != standard[setting] and option not in taken:
            raise ConfigError(
                f"algorithm.{setting} is {algorithm[setting]}, but algorithm.loss = {algorithm.loss!r} has no such "
                "option: leave it at its default"
            )
    likelihood = LIKELIHOOD | {"cpo": algorithm.cpo_alpha, "simpo": algorithm.cpo_alpha}
    return [
        Term(name, weight, function, _options(algorithm, function) | own, weight * likelihood.get(name, 0.0))
        for name, weight, (function, own) in zip(names, weights, found, strict=True)
    ]


def _resolve(spec: str) -> tuple[Callable[..., jax.Array], dict[str, object]]:
    try:
        return resolve_with_options(spec, LOSSES, GIVEN)
    except ConfigError as error:
        raise ConfigError(f"algorithm.loss: {error}") from error


def _options(algorithm: ConfigDict, function: Callable[..., jax.Array]) -> dict[str, object]:
    """The settings a loss function has, by the names of its arguments."""
    has = inspect.signature(function).parameters
    known = {
        "label_smoothing": algorithm.label_smoothing or None,  # 0 leaves exo_pair, which takes its log, its own
        "divergence": algorithm.f_divergence,
        "alpha": algorithm.f_alpha if "divergence" in has else algorithm.alphapo_alpha,
        "normalize": algorithm.ipo_normalize,
        "temperature": algorithm.discopop_tau,
        "gamma": algorithm.simpo_gamma,
        "desirable_weight": algorithm.desirable_weight,
        "undesirable_weight": algorithm.undesirable_weight,
    }
    return {name: value for name, value in known.items() if name in has and value is not None}


def needs_reference(config) -> bool:
    """True when the objective reads the reference's log-probs."""
    if config.algorithm.name != "preference" or config.algorithm.reference_free:
        return False
    return any(term.name not in (*preference_losses.REFERENCE_FREE, "sft") for term in terms(config))


def row_sums(config, logps, mask) -> tuple[jax.Array, jax.Array]:
    """Log-prob sums of completions and their lengths, both `[N]`; LD-DPO's sums where `algorithm.ld_alpha` is set."""
    sums, lengths = sequence_logps(logps, mask)
    if config.algorithm.ld_alpha is not None:
        sums = length_desensitized_logps(logps, mask, config.algorithm.ld_alpha)
    return sums, lengths


def preference(config, net: Net) -> Objective:
    """The mean over pairs of the weighted losses, plus the token mean of their likelihood terms.

    Rows are pairs, chosen first; for the losses in `LABELLED` they are labelled rows, in kto each followed by its
    mismatch: the same prompt with the completion of another row.
    """
    algorithm = config.algorithm
    if loss_names(config)[0] not in LABELLED:
        return _paired(config, net, terms(config))
    if algorithm.ld_alpha is not None or algorithm.use_weighting:
        raise ConfigError(f"algorithm.ld_alpha and use_weighting compare pairs, and {algorithm.loss} has none")
    return _labelled(config, net, terms(config)[0])


def _paired(config, net: Net, mixture: list[Term]) -> Objective:
    coupled = [term for term in mixture if term.name in COUPLED]
    separate = [term for term in mixture if term.name not in COUPLED]
    weighting = config.algorithm.use_weighting
    if coupled and weighting:
        raise ConfigError(f"algorithm.use_weighting weighs pairs, but {coupled[0].name} sorts their log-probs apart")

    def observe(params: Params, batch: Batch) -> jax.Array:
        logps, _ = token_logps(net, params, batch.inputs)
        return row_sums(config, logps, batch.mask)[0]

    def prepare(batch: Batch, observed=None) -> Batch:
        valid = (batch.mask > 0).any(axis=1).reshape(-1, 2).all(axis=1)
        tangent = None if observed is None else _tangent(config, coupled, split_pairs(observed), batch, valid)
        return batch.prepare(
            weights=_likelihood_weights(config, mixture, batch),
            row_weights=jnp.repeat(valid / jnp.maximum(valid.sum(), 1), 2),
            token_share=batch.mask / jnp.maximum(batch.mask.sum(), 1.0),
            side_tokens=_side_tokens(batch.mask, jnp.arange(batch.rows) % 2 == 0),
            tangent=tangent,
        )

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        tokens = token_statistics(net, params, batch.inputs, mean_logit=True, squares=weighting)
        logps = tokens.logps
        sums, lengths = row_sums(config, logps, batch.mask)
        reference = _reference(config, batch)
        per_pair = _pair_losses(config, separate, split_pairs(sums), reference, batch, split_pairs(lengths))
        per_token = -batch.prepared.weights * logps
        metrics = _pair_metrics(config, mixture, batch, sums, lengths)
        chosen = jnp.arange(batch.rows) % 2 == 0
        metrics |= _token_metrics(batch, chosen, tokens)
        metrics["mean_token_accuracy"] = (_side_share(batch, chosen) * tokens.is_top).sum()
        if likelihood := sum(term.likelihood for term in mixture):
            metrics["nll_loss"] = per_token.sum() / likelihood
        elif mixture[0].name in WITH_LIKELIHOOD:
            metrics["nll_loss"] = -(_side_share(batch, chosen) * logps).sum()
        if weighting:
            pair = wpo_weights(logps, tokens.log_sum_squares, batch.mask)
            per_pair, per_token = per_pair * pair, per_token * jnp.repeat(pair, 2)[:, None]
        value = _weighted(split_pairs(batch.prepared.row_weights)[0], per_pair) + per_token.sum()
        if batch.prepared.tangent is not None:
            slope, height = batch.prepared.tangent.T
            value += (height + slope * (sums - jax.lax.stop_gradient(sums))).sum()
        return value, metrics

    reads = Reads(unmasked=config.algorithm.orpo_nll_on_prompt and any(term.name == "orpo" for term in mixture))
    return Objective(prepare, loss, observe if coupled else None, reads)


def _weighted(weights, values) -> jax.Array:
    """`sum(weights * values)` without reading rows of weight 0: those that fill up a batch may be no number."""
    return (weights * jnp.where(weights > 0, values, 0.0)).sum()


def _reference(config, batch: Batch) -> tuple[jax.Array, jax.Array] | None:
    """Reference log-prob sums of chosen and rejected rows; None where the batch has none."""
    if batch.ref_logps is None:
        return None
    return split_pairs(row_sums(config, batch.ref_logps, batch.mask)[0])


def _pair_losses(config, mixture: list[Term], pairs, reference, batch: Batch, lengths) -> jax.Array:
    """The weighted losses `[pairs]` of a mixture, from log-prob sums (chosen, rejected) of policy and reference."""
    total = jnp.zeros(pairs[0].shape)
    for term in mixture:
        shift = {}
        if term.name == "bco_pair" and batch.scalars.reward_shift is not None:
            shift["reward_shift"] = batch.scalars.reward_shift
        total += term.weight * term.function(
            *pairs, *(reference or (None, None)), config.algorithm.beta, lengths=lengths, **term.options, **shift
        )
    return total


def _likelihood_weights(config, mixture: list[Term], batch: Batch) -> jax.Array:
    """Weights `[N,T]` of the chosen rows' token log-probs: each term's weight over the number of its tokens."""
    chosen = (jnp.arange(batch.rows) % 2 == 0)[:, None]
    weights = jnp.zeros(batch.mask.shape)
    for term in mixture:
        mask = batch.mask > 0
        if term.name == "orpo" and config.algorithm.orpo_nll_on_prompt:
            first = jnp.arange(mask.shape[1]) == 0
            mask = mask.any(axis=1, keepdims=True) & (batch.inputs.segments != 0) & ~first
        tokens = chosen & mask
        weights += term.likelihood * tokens / jnp.maximum(tokens.sum(), 1)
    return weights


FILL = 2.0**20  # far above every log-prob, and float32 still keeps differences of it exact


def _tangent(config, coupled: list[Term], pairs, batch: Batch, valid) -> jax.Array:
    """Slope and height `[N,2]` of losses that compare pairs with each other, at log-prob sums (chosen, rejected).

    Their sum over the whole batch is `sum(height + slope * change)` to first order in the rows' sums, so each
    micro-batch has its exact share of the gradient. Pairs that are not `valid` sort behind all others.
    """
    chosen, rejected = (jnp.where(valid, x, fill) for x, fill in zip(pairs, (2 * FILL, FILL), strict=True))
    reference = _reference(config, batch)
    if reference is not None:
        reference = jnp.where(valid, reference[0], FILL), jnp.where(valid, reference[1], 0.0)

    def total(chosen, rejected):
        values = _pair_losses(config, coupled, (chosen, rejected), reference, batch, lengths=None)
        counted = jnp.arange(valid.size) < valid.sum()
        return jnp.where(counted, values, 0.0).sum() / jnp.maximum(valid.sum(), 1)

    height, slopes = jax.value_and_grad(total, argnums=(0, 1))(chosen, rejected)
    slope = jnp.stack(slopes, axis=1).reshape(-1)
    return jnp.stack([slope, jnp.full(slope.shape, height / slope.size)], axis=1)


def _pair_metrics(config, mixture: list[Term], batch: Batch, sums, lengths) -> Metrics:
    """TRL's `rewards/*` and `logps/*`: a reward is beta times the log-ratio (its mean over tokens in `AVERAGED`), or
    times what alphapo makes of it."""
    main = mixture[0].name
    share = split_pairs(batch.prepared.row_weights)[0]
    logps = sums / jnp.maximum(lengths, 1.0) if main in AVERAGED else sums
    chosen, rejected = split_pairs(logps)
    reference = _reference(config, batch)
    if reference is None or main in preference_losses.REFERENCE_FREE:
        reference = (0.0, 0.0)
    reward, other = chosen - reference[0], rejected - reference[1]
    if main == "alphapo":
        alpha = mixture[0].options["alpha"]
        reward, other = (preference_losses.alpha_reward(mean, alpha) for mean in (chosen, rejected))
    measured = {
        "rewards/chosen": config.algorithm.beta * reward,
        "rewards/rejected": config.algorithm.beta * other,
        "rewards/accuracies": reward > other,
        "rewards/margins": config.algorithm.beta * (reward - other),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    if any(term.name == "orpo" for term in mixture):
        odds = preference_losses.log_odds_ratio(*split_pairs(sums), split_pairs(lengths))
        measured |= {"log_odds_chosen": odds, "log_odds_ratio": jax.nn.log_sigmoid(odds)}
    return {name: _weighted(share, value) for name, value in measured.items()}


def _side_tokens(mask, chosen) -> jax.Array:
    """The tokens `[N]` of all rows that are on the same side, chosen or not, as each row."""
    lengths = mask.sum(axis=1)
    return jnp.where(chosen, (lengths * chosen).sum(), (lengths * ~chosen).sum())


def _side_share(batch: Batch, side) -> jax.Array:
    """Each token's share `[N,T]` in a mean over the tokens of the rows on one side, in the whole optimizer batch."""
    return batch.mask * (side / jnp.maximum(batch.prepared.side_tokens, 1.0))[:, None]


def _token_metrics(batch: Batch, chosen, tokens: TokenStatistics) -> Metrics:
    """The mean entropy of all tokens, and the mean logit over vocabulary and tokens of either side."""
    assert tokens.mean_logit is not None
    sides = {"logits/chosen": chosen, "logits/rejected": ~chosen}
    found = {name: (_side_share(batch, side) * tokens.mean_logit).sum() for name, side in sides.items()}
    return {"entropy": (batch.prepared.token_share * tokens.entropy).sum(), **found}


def _labelled(config, net: Net, term: Term) -> Objective:
    beta, mismatched = config.algorithm.beta, term.name == "kto"

    def own(batch: Batch) -> Batch:
        return _every_other(batch, 0) if mismatched else batch

    def observe(params: Params, batch: Batch) -> jax.Array:
        other, tokens = _of_every_other(net, params, batch, 1)
        return sequence_logps(tokens.logps, other.mask)[0]

    def prepare(batch: Batch, observed=None) -> Batch:
        rows = own(batch)
        valid, desirable = (rows.mask > 0).any(axis=1), rows.labels > 0
        alike = jnp.where(desirable, (valid & desirable).sum(), (valid & ~desirable).sum())
        arrays = {"row_weights": valid / jnp.maximum(valid.sum(), 1), "row_share": valid / jnp.maximum(alike, 1)}
        arrays["side_tokens"] = _side_tokens(rows.mask, desirable)
        if observed is not None:
            reference = _sums(_every_other(batch, 1), jnp.zeros(observed.shape))
            arrays["baseline"] = jnp.full(observed.shape, preference_losses.kto_kl(observed, reference, valid))
            arrays = {name: jnp.repeat(array, 2) for name, array in arrays.items()}
        return batch.prepare(token_share=batch.mask / jnp.maximum(rows.mask.sum(), 1.0), **arrays)

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        if mismatched:
            batch, tokens = _of_every_other(net, params, batch, 0)
        else:
            tokens = token_statistics(net, params, batch.inputs, mean_logit=True)
        sums, _ = sequence_logps(tokens.logps, batch.mask)
        reference = _sums(batch, None)
        per_row = term.function(sums, reference, batch.labels, beta, kl=batch.prepared.baseline, **term.options)
        ratio = sums if reference is None else sums - reference
        metrics = _label_metrics(batch, beta, sums, ratio)
        metrics |= _token_metrics(batch, batch.labels > 0, tokens)
        return (batch.prepared.row_weights * per_row).sum(), metrics

    return Objective(prepare, loss, observe if mismatched else None, Reads(alternate=mismatched))


def _every_other(batch: Batch, first: int) -> Batch:
    """The rows `first`, `first` + 2, ... (a reshape, so that rows stay on their devices)."""
    return batch.map_rows(lambda x: x.reshape(-1, 2, *x.shape[1:])[:, first])


def _of_every_other(net: Net, params: Params, batch: Batch, first: int) -> tuple[Batch, TokenStatistics]:
    """The rows `first`, `first` + 2, ... and their statistics `[N/2,T]`; a layout reads those alone."""
    rows = _every_other(batch, first)
    if batch.inputs.layout is None:
        return rows, token_statistics(net, params, rows.inputs, mean_logit=True)
    tokens = token_statistics(net, params, batch.inputs, mean_logit=True)
    return rows, jax.tree.map(lambda x: x.reshape(-1, 2, x.shape[-1])[:, first], tokens)


def _sums(batch: Batch, otherwise):
    """The reference's log-prob sums `[N]`, `otherwise` where the batch has none."""
    return otherwise if batch.ref_logps is None else sequence_logps(batch.ref_logps, batch.mask)[0]


def _label_metrics(batch: Batch, beta: float, sums, ratio) -> Metrics:
    """TRL's names; an accurate reward is above the reference point for desirable rows, and not for others."""
    point = jnp.zeros(sums.shape) if batch.prepared.baseline is None else batch.prepared.baseline
    desirable = batch.labels > 0
    metrics = {"rewards/accuracies": (batch.prepared.row_weights * ((ratio > point) == desirable)).sum()}
    if batch.prepared.baseline is not None:
        metrics["kl"] = (batch.prepared.row_weights * point).sum()
    for name, rows in (("chosen", desirable), ("rejected", ~desirable)):
        share = batch.prepared.row_share * rows
        metrics |= {f"rewards/{name}": beta * (share * ratio).sum(), f"logps/{name}": (share * sums).sum()}
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics


def reward_model(config, net: Net) -> Objective:
    """The Bradley-Terry loss of the scores of a pair's last tokens, its mean over pairs; `net` has a score head."""
    center = config.algorithm.center_rewards_coefficient

    def prepare(batch: Batch) -> Batch:
        valid = (batch.mask > 0).any(axis=1).reshape(-1, 2).all(axis=1)
        return batch.prepare(row_weights=jnp.repeat(valid / jnp.maximum(valid.sum(), 1), 2))

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        scores = last_scores(net, params, batch.inputs)
        chosen, rejected = split_pairs(scores)
        share = split_pairs(batch.prepared.row_weights)[0]
        margins = None if batch.margins is None else split_pairs(batch.margins)[0]
        per_pair = preference_losses.bradley_terry(chosen, rejected, margins, center)
        counted = batch.prepared.row_weights > 0
        metrics = {
            "accuracy": (share * (chosen > rejected)).sum(),
            "margin": (share * (chosen - rejected)).sum(),
            "mean_reward": (batch.prepared.row_weights * scores).sum() / 2,
            "min_reward": jnp.where(counted, scores, jnp.inf).min(),
            "max_reward": jnp.where(counted, scores, -jnp.inf).max(),
        }
        return (share * per_pair).sum(), metrics

    return Objective(prepare, loss, reads=Reads(last=True))
