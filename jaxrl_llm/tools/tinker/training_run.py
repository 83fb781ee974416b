"""A training run: adapters or all weights, the gradients that clients add up, and the optimizer's steps.

Everything that computes here is called by the thread that owns the devices, a micro-batch at a time, so that rows which
decode wait no longer than that.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.chunked_softmax import chunked_logps
from jaxrl_llm.models.model import Model, add_adapters
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker.losses import LOSSES, THRESHOLDS
from jaxrl_llm.tools.tinker.messages import Datum, GradientAnswer, GradientRequest
from jaxrl_llm.training.update import ADDS_IN_PLACE, add_gradients

ALPHA = 32.0  # of adapters of every rank, as in "LoRA without regret" (thinkingmachines.ai/blog/lora)
SHORTEST = 16  # tokens of a row, padding included; longer ones have a power of two
Moments = optax.ScaleByAdamState  # first and second, in fp32, and the number of steps
# The maps of an MLP; the others are of attention, or of what stands in its place.
MLP = ("gate", "up", "down", "fc1", "fc2")
ADAM = {
    "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed together, and which of a request's they are."""

    rows: list[int]
    lengths: list[int]
    arrays: dict[str, np.ndarray]  # tokens, segments and the loss's inputs, padded: [n,T] or [n,T,K]


def lora_config(rank: int, train_attn: bool = True, train_mlp: bool = True) -> lora.LoraConfig:
    """The adapters that a client asks for.

    Raises BadRequestError for a rank below 1, or for neither attention nor feed-forwards.
    """
    targets = [name for name in lora.TARGETS if (train_mlp if name in MLP else train_attn)]
    if not targets or rank < 1:
        raise BadRequestError("lora_config takes a rank from 1 on, and train_attn or train_mlp")
    return lora.LoraConfig(rank, ALPHA, targets=tuple(targets))


class TrainingRun:
    """Weights that are trained: adapters of `base`, or with `config` None all of its weights, copied in fp32.

    `base` is shared by all runs, and stays as it is.
    """

    def __init__(
        self,
        base: Model,
        config: lora.LoraConfig | None,
        seed: int = 0,
        saved: tuple[Params, Moments | None] | None = None,
    ):
        """The weights, and the moments where there are some, are those of `saved`; without it adapters are drawn from
        `seed`, and all weights are those of the base.
        """
        if config is None:  # in fp32, whatever the type that is served: 16 bits do not move by small steps
            net = dataclasses.replace(base.net.config, remat="block", param_dtype="float32")
            frozen, trained = lora.split(base.params, net.frozen)
        else:
            net = dataclasses.replace(base.net.config, remat="block", lora=config)
            frozen, trained = base.params, {}
        if saved is not None:
            weights, adam = saved
        elif config is None:
            weights, adam = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), trained), None
        else:
            weights, adam = lora.adapters_of(add_adapters(base, config, jax.random.key(seed)).params), None
        changed = base.changed or config is None
        self.model = dataclasses.replace(base, net=Net(net), params=frozen, changed=changed)
        self.config, self.weights, self.adam = config, weights, adam or fresh_moments(weights)
        self.gradients: Params | None = None  # None: there are none since the last step

    def forward_backward(self, request: GradientRequest, tokens_at_once: int) -> "Gradients":
        """The work of a request, in micro-batches of up to `tokens_at_once` tokens. Raises BadRequestError."""
        return Gradients(self, request, tokens_at_once)

    def step(self, settings: Mapping[str, float]) -> dict[str, float]:
        """A step of AdamW (arXiv 1711.05101) along the gradients, which are used up. Returns its metrics.

        Raises BadRequestError where there are none, and ArithmeticError where they are not finite: weights and moments
        stay as they were then.
        """
        if self.gradients is None:
            raise BadRequestError("there are no gradients since the last step: call forward_backward before optim_step")
        chosen = {name: np.float32(value) for name, value in (ADAM | dict(settings)).items()}
        gradients, self.gradients = self.gradients, None
        norm = float(_norm(gradients))
        if not np.isfinite(norm):
            raise ArithmeticError(f"the gradients have the norm {norm}: no step was made, and they are dropped")
        self.weights, self.adam = _adamw(self.weights, self.adam, gradients, np.float32(norm), chosen)
        return {"grad_norm:mean": norm, "learning_rate:mean": float(chosen["learning_rate"])}

    @property
    def lost(self) -> bool:
        """True where a step failed after it had taken the arrays of the run."""
        return any(x.is_deleted() for x in jax.tree.leaves(self.weights))

    def snapshot(self) -> Params:
        """The adapters, copied, as steps write over those of the run; or all weights of the model, of which the queue
        takes a copy of its own.
        """
        return self.whole().params if self.config is None else jax.tree.map(jnp.copy, self.weights)

    def whole(self) -> Model:
        """The model with what is trained in it, for what saves it."""
        return dataclasses.replace(self.model, params=lora.combine(self.model.params, self.weights))

    def restore(self, config: lora.LoraConfig | None, weights: Params, adam: Moments | None) -> None:
        """Takes weights, and moments or none, in place of the run's own. Raises BadRequestError for other shapes."""
        theirs, own = (jax.tree.map(jnp.shape, tree) for tree in (weights, self.weights))
        if theirs != own or getattr(config, "scale", None) != getattr(self.config, "scale", None):
            raise BadRequestError(
                f"these weights are {described(config)}, and those of this run are others, {described(self.config)}: "
                "create a run from the weights"
            )
        self.weights, self.adam = weights, adam or fresh_moments(weights)
        self.gradients = None


def described(config: lora.LoraConfig | None) -> str:
    """The words of messages for what a run trains: its adapters, or all weights."""
    return "all of a model" if config is None else f"adapters of rank {config.rank} of {', '.join(config.targets)}"


class Gradients:
    """A request's micro-batches, and what they have come to."""

    def __init__(self, run: TrainingRun, request: GradientRequest, tokens_at_once: int):
        self.run, self.request = run, request
        self.options = checked_options(request)
        config = run.model.net.config
        rows = checked_data(request, config.vocab_size, config.position_limit)
        self.microbatches = microbatches(rows, tokens_at_once)
        self.sums: Params | None = None
        self.total = 0.0
        self.outputs: list[dict[str, np.ndarray]] = [{} for _ in request.data]

    def compute(self, micro: MicroBatch) -> None:
        """Computes a micro-batch.

        Raises ArithmeticError for log-probs or losses that are not finite.
        """
        run, work = self.run, (self.run.model.net, self.request.loss_fn)
        if self.request.forward_only:
            loss, logps = _losses(*work, run.model.params, run.weights, micro.arrays, self.options)
        else:
            if self.sums is None:
                self.sums = _zeros(run.weights)
            self.sums, loss, logps = _added(*work, run.model.params, run.weights, self.sums, micro.arrays, self.options)
        losses, logps = np.asarray(loss), np.asarray(logps)
        for place, (row, length) in enumerate(zip(micro.rows, micro.lengths, strict=True)):
            own = {"logprobs": logps[place, :length]}
            if self.request.loss_fn == "cross_entropy":
                own["elementwise_loss"] = losses[place, :length]
            if not (np.isfinite(own["logprobs"]).all() and np.isfinite(losses[place, :length]).all()):
                raise ArithmeticError(f"log-probs or losses of datum {row} are not finite")
            self.outputs[row] = own
            self.total += float(losses[place, :length].sum(dtype=np.float64))

    def finish(self) -> GradientAnswer:
        """The answer, when all micro-batches are computed: only now the run has the gradients."""
        if self.sums is not None:
            before = self.run.gradients
            self.run.gradients = self.sums if before is None else _sum(before, self.sums)
        return GradientAnswer(self.outputs, {"loss:sum": self.total})


def checked_options(request: GradientRequest) -> dict[str, np.float32]:
    """The options of a loss, with their defaults. Raises BadRequestError for an unknown loss or option."""
    if request.loss_fn not in LOSSES:
        raise BadRequestError(
            f"loss_fn is {request.loss_fn!r:.100}; this server has {', '.join(LOSSES)}; the closest is "
            f"{closest(request.loss_fn[:100], LOSSES)}. Others are forward_backward_custom's, which runs at the client"
        )
    known = LOSSES[request.loss_fn].options
    for name, value in request.options.items():
        if name not in known:
            raise BadRequestError(
                f"loss_fn_config has {name!r:.100}; {request.loss_fn} takes {', '.join(known) or 'none'}"
            )
        if type(value) not in (int, float) or not 0 <= value <= float(np.finfo(np.float32).max):
            raise BadRequestError(f"loss_fn_config.{name} is {value!r:.100}; it takes a number from 0 on")
    chosen = {**known, **request.options}
    low, high = (chosen.get(name, 0.0) for name in THRESHOLDS)
    if low > high:
        raise BadRequestError(f"loss_fn_config.clip_low_threshold is {low:g}, above clip_high_threshold, {high:g}")
    return {name: np.float32(value) for name, value in chosen.items()}


def checked_data(request: GradientRequest, vocabulary: int, positions: int | None = None) -> list[Datum]:
    """The rows of a request with their inputs as arrays of one kind. Raises BadRequestError.

    `positions` are those that the model has learned; None: it takes rows of any length.
    """
    loss, found = LOSSES[request.loss_fn], []
    if not request.data:
        raise BadRequestError("data has no rows")
    for number, datum in enumerate(request.data):
        inputs, where = dict(datum.inputs), f"datum {number}"
        if missing := [name for name in loss.needs if name not in inputs]:
            raise BadRequestError(f"{where} has no {missing[0]} in loss_fn_inputs, which {request.loss_fn} needs")
        if unknown := sorted(set(inputs) - {*loss.needs, *loss.optional}):
            raise BadRequestError(
                f"{where} has {unknown[0]!r:.100} in loss_fn_inputs; {request.loss_fn} takes "
                f"{', '.join((*loss.needs, *loss.optional))}"
            )
        targets = inputs["target_tokens"]
        if request.loss_fn == "cross_entropy":
            inputs.setdefault("weights", np.ones(targets.shape, np.float32))
        if not len(datum.tokens) or len(datum.tokens) != len(targets):
            raise BadRequestError(f"{where} has {len(datum.tokens)} tokens and {len(targets)} target_tokens")
        if positions is not None and len(datum.tokens) > positions:
            raise BadRequestError(f"{where} has {len(datum.tokens)} tokens, but the model has {positions} positions")
        if targets.ndim > (2 if request.loss_fn == "cross_entropy" else 1) or 0 in targets.shape:
            raise BadRequestError(
                f"target_tokens of {where} have the shape {list(targets.shape)}; {request.loss_fn} takes one for each "
                "token" + (", or K" if request.loss_fn == "cross_entropy" else "")
            )
        for name, ids in (("tokens", datum.tokens), ("target_tokens", targets)):
            if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocabulary:
                raise BadRequestError(f"{name} of {where} are no ids below {vocabulary}")
        for name, values in inputs.items():
            if values.shape != targets.shape or not np.isfinite(values).all():
                raise BadRequestError(
                    f"{name} of {where} has the shape {list(values.shape)}, or a number that is not finite; it takes "
                    f"one for each of target_tokens {list(targets.shape)}"
                )
        if found and (odd := sorted(inputs.keys() ^ found[0].inputs.keys())):
            raise BadRequestError(f"either {where} or datum 0 has {odd[0]} in loss_fn_inputs; all rows take the same")
        kinds = {name: np.int32 if name == "target_tokens" else np.float32 for name in inputs}
        found.append(Datum(datum.tokens, {name: values.astype(kinds[name]) for name, values in inputs.items()}))
    return found


def microbatches(data: Sequence[Datum], tokens: int) -> list[MicroBatch]:
    """The rows by length, in micro-batches of up to `tokens` tokens: sides are powers of two, and programs few."""

    def padded(count: int, least: int = 1) -> int:
        return max(least, 1 << (count - 1).bit_length())

    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row, datum in enumerate(data):
        kind = (padded(len(datum.tokens), SHORTEST), datum.inputs["target_tokens"].shape[1:])
        groups.setdefault(kind, []).append(row)
    found = []
    for (width, tail), rows in sorted(groups.items()):
        most = max(1, tokens // width)
        most = 1 << (most.bit_length() - 1)
        for start in range(0, len(rows), most):
            some = rows[start : start + most]
            shape = (padded(len(some)), width)
            arrays = {"tokens": np.zeros(shape, np.int32), "segments": np.zeros(shape, np.int32)}
            names = data[some[0]].inputs
            arrays |= {name: np.zeros((*shape, *tail), x.dtype) for name, x in names.items()}
            for place, row in enumerate(some):
                length = len(data[row].tokens)
                arrays["tokens"][place, :length] = data[row].tokens
                arrays["segments"][place, :length] = 1
                for name, values in data[row].inputs.items():
                    arrays[name][place, :length] = values
            found.append(MicroBatch(some, [len(data[row].tokens) for row in some], arrays))
    return found


def target_logps(net: Net, params: Params, tokens, segments, targets) -> jax.Array:
    """Log-probs of the targets `[N,T]` or `[N,T,K]`, each behind the tokens up to its own place; 0 on padding."""
    model = net.bind(params)
    hidden, kernel = model.head_input(model.hidden(Inputs(tokens=tokens, segments=segments))), model.head_kernel()

    def of(targets):
        logps, *_ = chunked_logps(hidden, kernel, targets, 1.0, softcap=net.config.logit_softcap)
        return jnp.where(segments != 0, logps, 0.0)

    if targets.ndim == 2:
        return of(targets)
    return jnp.moveaxis(jax.lax.map(of, jnp.moveaxis(targets, -1, 0)), 0, -1)


def _loss(net: Net, name: str, params: Params, weights: Params, arrays, options) -> tuple[jax.Array, Any]:
    inputs = {key: x for key, x in arrays.items() if key not in ("tokens", "segments")}
    logps = target_logps(
        net, lora.combine(params, weights), arrays["tokens"], arrays["segments"], inputs["target_tokens"]
    )
    losses = LOSSES[name].of(logps, inputs, options)
    return losses.sum(), (losses, logps)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses(net: Net, name: str, params: Params, weights: Params, arrays, options):
    return _loss(net, name, params, weights, arrays, options)[1]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _added(net: Net, name: str, params: Params, weights: Params, sums: Params, arrays, options):
    loss_of = functools.partial(_loss, net, name, params, arrays=arrays, options=options)
    if ADDS_IN_PLACE.get(jax.default_backend(), ADDS_IN_PLACE["tpu"])():
        refs = jax.tree.map(jax.new_ref, sums)
        losses, logps = add_gradients(loss_of, weights, refs)
        return jax.tree.map(jax.freeze, refs), losses, logps
    gradients, (losses, logps) = jax.grad(loss_of, has_aux=True)(weights)
    return jax.tree.map(jnp.add, sums, gradients), losses, logps


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _adamw(weights: Params, adam: Moments, gradients: Params, norm, chosen: Mapping[str, Any]) -> tuple[Params, Any]:
    limit = jnp.where(chosen["grad_clip_norm"] > 0, chosen["grad_clip_norm"], jnp.inf)
    gradients = jax.tree.map(lambda x: x * jnp.minimum(1.0, limit / norm), gradients)
    scaled, after = optax.scale_by_adam(chosen["beta1"], chosen["beta2"], chosen["eps"]).update(gradients, adam)
    rate, decay = chosen["learning_rate"], chosen["weight_decay"]
    return jax.tree.map(lambda x, change: x - rate * (change + decay * x), weights, scaled), after


def fresh_moments(weights: Params) -> Moments:
    """The moments before the first step, where the weights are."""
    return Moments(np.zeros((), np.int32), _zeros(weights), _zeros(weights))


def _zeros(weights: Params) -> Params:
    """Zeros in fp32 where the weights are: the compiler would have all of them on every device of a mesh."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32, device=x.sharding), weights)


_norm = jax.jit(optax.tree.norm)
_sum = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
