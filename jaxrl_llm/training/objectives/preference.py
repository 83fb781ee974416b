"""The objectives that learn from preferences: pairs of completions, or labelled completions.

The losses themselves are in `algorithms.preference_losses`. Here token log-probs become sums per row, losses become a
mixture, and what a loss needs of the whole optimizer batch (KTO's reference point, AOT's order) is measured before it
is split, so that micro-batches change nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import preference_losses
from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metric, Metrics
from jaxrl_llm.algorithms.sequence_logps import sequence_logps, split_pairs, wpo_weights
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.logprobs import TokenStatistics, token_logps, token_statistics
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.training.objectives.objective import (
    Objective,
    Positions,
    checked_loss,
    encoder_of,
    row_metrics,
    row_share,
    share_of,
    side_shares,
    weighted,
)


@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
    """One loss of a mixture: its weight in it, its options, and what it declares (`losses.declare`)."""

    name: str
    weight: float
    function: Callable[..., Any]
    options: Mapping[str, Any]
    rows: str = "pair"
    reference: bool | None = False
    compares_pairs: bool = False
    mean_logps: bool = False
    reward: Callable[..., jax.Array] | None = None
    nll_weight: float | None = None  # None: it has no likelihood term
    nll_on_prompt: bool = False
    running_mean: bool = False


@dataclasses.dataclass(frozen=True)
class PreferenceSpec:
    """Settings of the objective, from `algorithm`, under the same names."""

    losses: tuple[PreferenceLoss, ...]
    beta: float
    reference_free: bool
    ld_alpha: float | None
    use_weighting: bool

    @property
    def rows(self) -> str:
        """The rows of a batch, which hold what each loss reads; see `losses.declare`."""
        return "triple" if any(loss.rows == "triple" for loss in self.losses) else self.losses[0].rows

    @property
    def together(self) -> int:
        """Adjacent rows of a pair: with the gold completion behind it, where a loss reads one, three."""
        return 3 if self.rows == "triple" else 2

    @property
    def needs_reference(self) -> bool:
        """True when a loss reads the reference's log-probs."""
        return not self.reference_free and any(loss.reference for loss in self.losses)


def preference(spec: PreferenceSpec, net: Net) -> Objective:
    """The mean over pairs of the weighted losses, plus the token mean of their likelihood terms.

    Rows are pairs, chosen first, each with its gold completion behind it where a loss reads one; or labelled rows, in
    kto each followed by its mismatch: the same prompt with the completion of another row. Raises ConfigError for
    settings that the losses cannot follow.
    """
    if spec.rows in ("pair", "triple"):
        return _of_pairs(spec, net)
    if spec.ld_alpha is not None or spec.use_weighting:
        raise ConfigError(
            f"algorithm.ld_alpha and use_weighting compare pairs, and {spec.losses[0].name} learns from labels: "
            "leave them at their defaults"
        )
    return _of_labels(spec, net)


def _of_pairs(spec: PreferenceSpec, net: Net) -> Objective:
    together = spec.together
    sorting = [loss for loss in spec.losses if loss.compares_pairs]
    others = [loss for loss in spec.losses if not loss.compares_pairs]
    nll_weight = sum(loss.weight * (loss.nll_weight or 0.0) for loss in spec.losses)
    if sorting and spec.use_weighting:
        raise ConfigError(
            f"algorithm.use_weighting weighs pairs, but {sorting[0].name} sorts their log-probs apart: set it to false"
        )

    def observe(params: Params, batch: Batch) -> jax.Array:
        logps, _ = token_logps(net, params, batch.inputs)
        return sequence_logps(logps, batch.mask, spec.ld_alpha, together)[0]

    def prepare(batch: Batch, observed=None) -> Batch:
        valid = (batch.mask > 0).any(axis=1).reshape(-1, together).all(axis=1)
        sides = (_is_on_side(spec, batch, side)[:, None] for side in (0, 1))
        return batch.prepare(
            weights=_nll_weights(spec, batch),
            row_weights=jnp.repeat(share_of(valid), together),
            token_share=share_of(batch.mask),
            side_share=side_shares(batch.mask, *sides),
            tangent=None if observed is None else _tangent(spec, sorting, observed, batch, valid),
        )

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        tokens = token_statistics(net, params, batch.inputs, mean_logit=True, squares=spec.use_weighting)
        sums, lengths = sequence_logps(tokens.logps, batch.mask, spec.ld_alpha, together)
        pairs, lengths = split_pairs(sums, together), split_pairs(lengths, together)
        share = split_pairs(batch.prepared.row_weights, together)[0]
        reference = _reference(spec, batch)
        per_pair, metrics = _pair_losses(spec, others, pairs, reference, lengths, batch.scalars.reward_shift)
        per_token = -batch.prepared.weights * tokens.logps
        metrics = row_metrics(metrics | _reward_metrics(spec, pairs, reference, lengths), share)
        metrics |= _token_metrics(batch, tokens)
        of_chosen = batch.prepared.side_share[..., 0]
        metrics["mean_token_accuracy"] = Metric((of_chosen * tokens.is_top).sum(), "sum")
        if nll_weight:
            metrics["nll_loss"] = Metric((per_token / nll_weight).sum(), "sum")
        elif spec.losses[0].nll_weight is not None:
            metrics["nll_loss"] = Metric(-(of_chosen * tokens.logps).sum(), "sum")
        # NaN where there are no pairs: there are no such means, and curves have a gap.
        metrics = {name: Metric(x.value + 0.0 * share.sum(), x.reduce) for name, x in metrics.items()}
        if spec.use_weighting:
            pair_weights = wpo_weights(tokens.logps, tokens.log_sum_squares, batch.mask, together)
            per_pair, per_token = per_pair * pair_weights, per_token * jnp.repeat(pair_weights, together)[:, None]
        value = weighted(jnp.nan_to_num(share), per_pair) + per_token.sum()
        if batch.prepared.tangent is not None:
            slope, height = batch.prepared.tangent.T
            value += (height + slope * (sums - jax.lax.stop_gradient(sums))).sum()
        return value, metrics

    on_prompt = any(loss.nll_on_prompt for loss in spec.losses)
    return Objective(prepare, loss, observe if sorting else None, Positions(unmasked=on_prompt), encoder_of(net))


def _is_on_side(spec: PreferenceSpec, batch: Batch, side: int) -> jax.Array:
    """True `[N]` on the rows of a side: 0 chosen, 1 rejected, 2 gold."""
    return jnp.arange(batch.rows) % spec.together == side


def _reference(spec: PreferenceSpec, batch: Batch) -> tuple[jax.Array, jax.Array] | None:
    """Reference log-prob sums of chosen and rejected rows; None where the batch has none."""
    if batch.ref_logps is None:
        return None
    sums, _ = sequence_logps(batch.ref_logps, batch.mask, spec.ld_alpha, spec.together)
    return split_pairs(sums, spec.together)


def _pair_losses(
    spec: PreferenceSpec, mixture: list[PreferenceLoss], pairs, reference, lengths, reward_shift
) -> tuple[jax.Array, Metrics]:
    """The weighted losses `[pairs]` of a mixture, from log-prob sums (chosen, rejected) of policy and reference, and
    the metrics `[pairs]` of its losses."""
    total, metrics = jnp.zeros(pairs[0].shape), {}
    for loss in mixture:
        shift = {"reward_shift": reward_shift} if loss.running_mean and reward_shift is not None else {}
        result = loss.function(
            *pairs, *(reference or (None, None)), spec.beta, lengths=lengths, **loss.options, **shift
        )
        per_pair, own = checked_loss(result, total.shape, "pair")
        total += loss.weight * per_pair
        metrics |= own
    return total, metrics


def _nll_weights(spec: PreferenceSpec, batch: Batch) -> jax.Array:
    """Weights `[N,T]` of the token log-probs of chosen and of gold rows: each loss's weight over the number of its
    tokens."""
    weights = jnp.zeros(batch.mask.shape)
    for loss in spec.losses:
        mask = batch.mask > 0
        if loss.nll_on_prompt:
            real = batch.inputs.segments != 0
            mask = mask.any(axis=1, keepdims=True) & real & (real.cumsum(axis=1) > 1)  # nothing predicts the first
        side = _is_on_side(spec, batch, 2 if loss.rows == "triple" else 0)
        tokens = side[:, None] & mask
        weights += loss.weight * (loss.nll_weight or 0.0) * tokens / jnp.maximum(tokens.sum(), 1)
    return weights


FILL = 2.0**20  # far above every log-prob, and float32 still keeps differences of it exact


def _tangent(spec: PreferenceSpec, sorting: list[PreferenceLoss], sums, batch: Batch, valid) -> jax.Array:
    """Slope and height `[N,2]` of losses that compare pairs with each other, at log-prob sums `[N]`.

    Their sum over the whole batch is `sum(height + slope * change)` to first order in the rows' sums, so each
    micro-batch has its exact share of the gradient. Pairs that are not `valid` sort behind all others.
    """
    pairs = split_pairs(sums, spec.together)
    chosen, rejected = (jnp.where(valid, x, fill) for x, fill in zip(pairs, (2 * FILL, FILL), strict=True))
    reference = _reference(spec, batch)
    if reference is not None:
        reference = jnp.where(valid, reference[0], FILL), jnp.where(valid, reference[1], 0.0)

    def total(chosen, rejected):
        values, _ = _pair_losses(spec, sorting, (chosen, rejected), reference, None, None)
        counted = jnp.arange(valid.size) < valid.sum()
        return jnp.where(counted, values, 0.0).sum() / jnp.maximum(valid.sum(), 1)

    height, slopes = jax.value_and_grad(total, argnums=(0, 1))(chosen, rejected)
    of_gold = [jnp.zeros(chosen.shape)] * (spec.together - 2)
    slope = jnp.stack([*slopes, *of_gold], axis=1).reshape(-1)
    return jnp.stack([slope, jnp.full(slope.shape, height / slope.size)], axis=1)


def _reward_metrics(spec: PreferenceSpec, policy, reference, lengths) -> Metrics:
    """TRL's `rewards/*` and `logps/*` `[pairs]`: a reward is beta times the log-ratio (of means over tokens, where the
    first loss takes those), or times the implicit reward that the loss declares."""
    main = spec.losses[0]
    if reference is None or main.reference is False:
        reference = (0.0, 0.0)
    if main.mean_logps:
        tokens = tuple(jnp.maximum(side, 1.0) for side in lengths)
        policy, reference = jax.tree.map(jnp.divide, (policy, reference), (tokens, tokens))
    (chosen, rejected), (ref_chosen, ref_rejected) = policy, reference
    reward, other = chosen - ref_chosen, rejected - ref_rejected
    if main.reward is not None:
        reward, other = main.reward(chosen, **main.options), main.reward(rejected, **main.options)
    values = {
        "rewards/chosen": spec.beta * reward,
        "rewards/rejected": spec.beta * other,
        "rewards/accuracies": reward > other,
        "rewards/margins": spec.beta * (reward - other),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    return {name: Metric(value) for name, value in values.items()}


def _token_metrics(batch: Batch, tokens: TokenStatistics) -> Metrics:
    """The mean entropy of all tokens, and the mean logit over vocabulary and tokens of either side."""
    assert tokens.mean_logit is not None
    of_chosen, of_rejected = jnp.moveaxis(batch.prepared.side_share, -1, 0)
    values = {
        "entropy": batch.prepared.token_share * tokens.entropy,
        "logits/chosen": of_chosen * tokens.mean_logit,
        "logits/rejected": of_rejected * tokens.mean_logit,
    }
    return {name: Metric(value.sum(), "sum") for name, value in values.items()}


def _of_labels(spec: PreferenceSpec, net: Net) -> Objective:
    (given,) = spec.losses
    mismatched = spec.rows == "label_and_mismatch"

    def observe(params: Params, batch: Batch) -> jax.Array:
        other, tokens = _of_every_other(net, params, batch, 1)
        return sequence_logps(tokens.logps, other.mask)[0]

    def prepare(batch: Batch, observed=None) -> Batch:
        rows = _every_other(batch, 0) if mismatched else batch
        valid, desirable = (rows.mask > 0).any(axis=1), rows.labels > 0
        arrays = {
            "row_weights": row_share(rows.mask),
            "row_side_share": side_shares(valid, desirable, ~desirable),
            "token_share": share_of(rows.mask),
            "side_share": side_shares(rows.mask, desirable[:, None], ~desirable[:, None]),
        }
        if observed is not None:
            reference = _reference_sums(_every_other(batch, 1))
            baseline = preference_losses.kto_kl(observed, 0.0 if reference is None else reference, valid)
            arrays["baseline"] = jnp.full(observed.shape, baseline)
            arrays = {name: jnp.repeat(array, 2, axis=0) for name, array in arrays.items()}
        return batch.prepare(**arrays)

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        if mismatched:
            batch, tokens = _of_every_other(net, params, batch, 0)
        else:
            tokens = token_statistics(net, params, batch.inputs, mean_logit=True)
        sums, _ = sequence_logps(tokens.logps, batch.mask)
        reference = _reference_sums(batch)
        result = given.function(sums, reference, batch.labels, spec.beta, kl=batch.prepared.baseline, **given.options)
        per_row, own = checked_loss(result, sums.shape, "row")
        ratio, weights = sums if reference is None else sums - reference, batch.prepared.row_weights
        metrics = row_metrics(own, weights) | _label_metrics(batch, spec.beta, sums, ratio)
        return given.weight * weighted(weights, per_row), metrics | _token_metrics(batch, tokens)

    return Objective(prepare, loss, observe if mismatched else None, Positions(alternate=mismatched), encoder_of(net))


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


def _reference_sums(batch: Batch) -> jax.Array | None:
    """The reference's log-prob sums `[N]`; None where the batch has none."""
    return None if batch.ref_logps is None else sequence_logps(batch.ref_logps, batch.mask)[0]


def _label_metrics(batch: Batch, beta: float, sums, ratio) -> Metrics:
    """TRL's names; an accurate reward is above the reference point for desirable rows, and not for others.

    Where all rows have one label, there is no mean over the other: it is NaN, and curves have a gap.
    """
    prepared = batch.prepared
    baseline = jnp.zeros(sums.shape) if prepared.baseline is None else prepared.baseline
    values = {"rewards/accuracies": (prepared.row_weights * ((ratio > baseline) == (batch.labels > 0))).sum()}
    if prepared.baseline is not None:
        values["kl"] = (prepared.row_weights * baseline).sum()
    for side, share in zip(("chosen", "rejected"), jnp.moveaxis(prepared.row_side_share, -1, 0), strict=True):
        values |= {f"rewards/{side}": beta * (share * ratio).sum(), f"logps/{side}": (share * sums).sum()}
    values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
    return {name: Metric(value, "sum") for name, value in values.items()}
