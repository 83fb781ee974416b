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
from jaxrl_llm.config import LABELLED, ConfigError, default, resolve
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.policy import token_logps, token_logps_and_squares
from jaxrl_llm.training.objectives import Metrics, Objective

PAIRED = (
    "dpo", "hinge", "ipo", "sigmoid_norm", "exo_pair", "robust", "discopop", "nca_pair", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "cpo", "simpo", "alphapo", "orpo",
)  # fmt: skip
LOSSES = {name: getattr(preference_losses, name) for name in (*PAIRED, *LABELLED)}
COUPLED = ("aot", "aot_unpaired")  # compare the pairs of a batch with each other
AVERAGED = ("simpo", "alphapo", "orpo")  # rewards and log-probs are means over tokens, in the metrics too
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


class Term(NamedTuple):
    """One loss of a mixture: its weight, the function of pairs (None for `sft`), and its likelihood term's weight."""

    name: str
    weight: float
    function: Callable[..., jax.Array] | None
    options: dict[str, object]
    likelihood: float


def terms(config) -> list[Term]:
    """The losses that `algorithm.loss` names, joined by +, with their weights and options.

    Raises ConfigError for an unknown name, or an option that is set and that none of them has.
    """
    algorithm, standard = config.algorithm, default().algorithm
    names = algorithm.loss.split("+")
    weights = algorithm.loss_weights or (1.0,) * len(names)
    functions = {name: None if name == "sft" else _resolve(name) for name in names}
    taken = {option for function in functions.values() if function for option in inspect.signature(function).parameters}
    for setting, option in OPTIONS.items():
        if algorithm[setting] != standard[setting] and option not in taken:
            raise ConfigError(
                f"algorithm.{setting} is {algorithm[setting]}, but algorithm.loss = {algorithm.loss!r} has no such "
                "option: leave it at its default"
            )
    likelihood = LIKELIHOOD | {"cpo": algorithm.cpo_alpha, "simpo": algorithm.cpo_alpha}
    return [
        Term(name, weight, functions[name], _options(algorithm, functions[name]), weight * likelihood.get(name, 0.0))
        for name, weight in zip(names, weights, strict=True)
    ]


def _resolve(name: str) -> Callable[..., jax.Array]:
    try:
        return resolve(name, {"sigmoid": preference_losses.dpo, "sft": None, **LOSSES})
    except ConfigError as error:
        raise ConfigError(f"algorithm.loss: {error}") from error


def _options(algorithm, function: Callable[..., jax.Array] | None) -> dict[str, object]:
    """The settings a loss function has, by the names of its arguments."""
    if function is None:
        return {}
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
    return any(term.function and term.name not in preference_losses.REFERENCE_FREE for term in terms(config))


def row_sums(config, logps, mask) -> tuple[jax.Array, jax.Array]:
    """Log-prob sums of completions and their lengths, both `[N]`; LD-DPO's sums where `algorithm.ld_alpha` is set."""
    sums, lengths = sequence_logps(logps, mask)
    if config.algorithm.ld_alpha is not None:
        sums = length_desensitized_logps(logps, mask, config.algorithm.ld_alpha)
    return sums, lengths


def preference(config, net: Net) -> Objective:
    """The mean over pairs of the weighted preference losses, plus the token mean of likelihood terms.

    Rows are pairs, chosen first, or for the losses in `LABELLED` rows with labels (kto: each followed by its mismatch).
    """
    algorithm = config.algorithm
    if algorithm.loss in LABELLED:
        if algorithm.ld_alpha is not None or algorithm.use_weighting:
            raise ConfigError(f"algorithm.ld_alpha and use_weighting compare pairs, and {algorithm.loss} has none")
        return _labelled(config, net, terms(config)[0])
    return _paired(config, net, terms(config))


def _paired(config, net: Net, mixture: list[Term]) -> Objective:
    algorithm = config.algorithm
    coupled = [term for term in mixture if term.name in COUPLED]
    separate = [term for term in mixture if term.function and term.name not in COUPLED]
    if coupled and algorithm.use_weighting:
        raise ConfigError(f"algorithm.use_weighting weighs pairs, but {coupled[0].name} sorts their log-probs apart")
    mean = jnp.array([term.name in AVERAGED for term in mixture]).any()

    def reference(batch: Batch) -> tuple[jax.Array | None, jax.Array | None]:
        return (None, None) if batch.ref_logps is None else split_pairs(row_sums(config, batch.ref_logps, batch.mask)[0])

    def values(group: list[Term], chosen, rejected, ref, lengths, baseline) -> jax.Array:
        total = jnp.zeros(chosen.shape)
        for term in group:
            shift = {"reward_shift": split_pairs(baseline)[0]} if term.name == "bco_pair" and baseline is not None else {}
            total += term.weight * term.function(
                chosen, rejected, *ref, algorithm.beta, lengths=lengths, **term.options, **shift
            )
        return total

    def observe(params: Params, batch: Batch) -> jax.Array:
        logps, _ = token_logps(net, params, batch.tokens, batch.segments)
        return row_sums(config, logps, batch.mask)[0]

    def prepare(batch: Batch, observed=None) -> Batch:
        valid = (batch.mask > 0).any(axis=1).reshape(-1, 2).all(axis=1)
        batch = batch.replace(
            weights=_likelihood_weights(config, mixture, batch),
            row_weights=jnp.repeat(valid / jnp.maximum(valid.sum(), 1), 2),
            token_share=batch.mask / jnp.maximum(batch.mask.sum(), 1.0),
        )
        if observed is None:
            return batch
        value = lambda *sums: values(coupled, *sums, lengths=None, baseline=None)  # noqa: E731
        return batch.replace(tangent=_tangent(value, split_pairs(observed), reference(batch), valid))

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        squares = None
        if algorithm.use_weighting:
            logps, entropy, squares = token_logps_and_squares(net, params, batch.tokens, batch.segments)
        else:
            logps, entropy = token_logps(net, params, batch.tokens, batch.segments)
        sums, lengths = row_sums(config, logps, batch.mask)
        ref, pair_weights = reference(batch), split_pairs(batch.row_weights)[0]
        per_pair = values(separate, *split_pairs(sums), ref, split_pairs(lengths), batch.baseline)
        per_token = -batch.weights * logps
        metrics = _pair_metrics(config, mixture, batch, sums, lengths, ref)
        metrics["entropy"] = (batch.token_share * entropy).sum()
        if likelihood := sum(term.likelihood for term in mixture):
            metrics["nll_loss"] = per_token.sum() / likelihood
        if squares is not None:
            pair = wpo_weights(logps, squares, batch.mask)
            per_pair, per_token = per_pair * pair, per_token * jnp.repeat(pair, 2)[:, None]
        value = (pair_weights * per_pair).sum() + per_token.sum()
        if batch.tangent is not None:
            slope, height = batch.tangent.T
            value += (height + slope * (sums - jax.lax.stop_gradient(sums))).sum()
        return value, metrics

    return Objective(prepare, loss, observe if coupled else None)
