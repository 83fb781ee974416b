"""Mixtures of experts: a router sends each token to a few of many feed-forward networks. No token is ever dropped.

Arrays: M tokens, E experts, k experts per token, f channels per expert.
"""

import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import activation_spec, all_gathered, is_sharded, parameter_spec, path_name
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.kernels.fused_attention import has_triton
from jaxrl_llm.models.kernels.grouped_matmul import grouped_matmul
from jaxrl_llm.models.layers import FeedForward, Linear, RMSNorm, gated, soft_cap
from jaxrl_llm.models.quantize import Kernel, as_matrix, check_inputs, quantize

# How the paths of the parameters end that `model.freeze_router` leaves as they are.
ROUTER = ("router/kernel", "router/bias", "mlp/router_scale", "mlp/weight_scale")


class Routing(NamedTuple):
    """Sums over the tokens that are no padding, of one layer or of several: layers add up."""

    counts: jax.Array  # [E] tokens sent to each expert, were it not for a correction of the router
    probabilities: jax.Array  # [E] sums of the router's probabilities
    tokens: jax.Array  # [] number of tokens


def balance_loss(routing: Routing):
    """The load-balancing loss of arXiv 2101.03961, eq. 4 to 6: k when experts are used evenly, up to E.

    `E x sum_e (share of tokens sent to e) x (mean probability of e)`, over the tokens of all layers together, in fp32,
    without those that hash routers send. Probabilities of routers that are no softmax are their scores over the sum of
    these (DeepSeek-V3, arXiv 2412.19437, eq. 19, and Megatron; transformers has the softmax of their logits).
    Its gradient flows through the probabilities. 0 where there are no tokens.
    """
    tokens = jnp.maximum(routing.tokens, 1.0)
    return routing.counts.size * jnp.sum(routing.counts / tokens * (routing.probabilities / tokens))


def one_by_one(logits, chosen, jitter: float) -> jax.Array:
    """The weights `[...,k]` of SparseMixer (arXiv 2409.12136, as it is evaluated) of the chosen experts `[...,k]`.

    Each is the expert's share in a softmax of the logits `[...,E]` that are near the largest one, within twice the
    `jitter` of its size or their own, where the experts before it are left out.
    """
    left, weights = logits, []
    for number in range(chosen.shape[-1]):
        expert = chosen[..., number : number + 1]
        largest = jax.lax.stop_gradient(left.max(-1, keepdims=True))
        far = (largest - left) / jnp.maximum(jnp.abs(logits), largest) > 2 * jitter
        shares = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
        weights.append(jnp.take_along_axis(shares, expert, axis=-1))
        left = jnp.where(jnp.arange(logits.shape[-1]) == expert, -jnp.inf, left)
    return jnp.concatenate(weights, axis=-1)


class Experts(nnx.Module):
    """The stacked feed-forward networks: gate and up `[E,D,f]`, down `[E,f,D]`, and biases where they have some.

    Without `ffn_gate` there is no gate. With an `expert_width` that is their D, other than the model's width. Gate and
    up may have an adapter that is one for both, and down one: the factors of each expert, stacked too.
    """

    def __init__(self, config, rngs: nnx.Rngs):
        width = config.expert_width or config.width
        self.gate = _StackedLinear(width, config.expert_ffn, config, rngs) if config.ffn_gate else None
        self.up = _StackedLinear(width, config.expert_ffn, config, rngs)
        self.down = _StackedLinear(config.expert_ffn, width, config, rngs, "experts.down_proj")
        self.gate_up = _Adapter(width, 2 * config.expert_ffn, config, rngs, "experts.gate_up_proj")
        self.config = config

    def __call__(self, x, weights, chosen):
        """`sum_i weights_i * expert_{chosen_i}(x)` `[...,D]` of tokens x `[...,D]`; weights and chosen `[...,k]`.

        All experts compute each token on CPUs with fewer than four for each that a token uses, where the loop over
        groups takes longer to compile than most runs gain by it, and on GPUs without a kernel for groups.
        """
        backend, few = jax.default_backend(), self.config.experts < 4 * self.config.experts_per_token
        by_all = (backend == "cpu" and few) or (backend == "gpu" and not has_triton())
        return self.compute(dense if by_all else grouped, x, weights, chosen)

    def compute(self, method, x, weights, chosen):
        """As a call, by the method `dense` or `grouped`, on each device for the experts and tokens it has."""
        kernels = Kernels(None, self.up.matrices(x.dtype), self.down.matrices(x.dtype), up_bias=self.up.biases(x.dtype))
        if self.gate is not None:
            kernels = kernels._replace(gate=self.gate.matrices(x.dtype), gate_bias=self.gate.biases(x.dtype))
        if (factors := self.gate_up.factors(x.dtype)) is not None:
            gate_b, up_b = jnp.split(factors[1], 2, axis=-1)
            kernels = kernels._replace(gate_up_a=factors[0], gate_b=gate_b, up_b=up_b)
        if (factors := self.down.factors(x.dtype)) is not None:
            kernels = kernels._replace(down_a=factors[0], down_b=factors[1])
        method = functools.partial(
            method,
            activation=functools.partial(gated, self.config),
            on_inputs=self.config.router_on_inputs,
            kind=self.config.expert_quantize,
        )
        out = across_devices(method, kernels, x, weights, chosen)
        if (bias := self.down.biases(x.dtype)) is not None:  # here, where no device has a share of it only
            out += _shares(weights, chosen, self.config.experts).astype(x.dtype) @ bias
        return out


class Kernels(NamedTuple):
    """The matrices of experts, quantised or not, the biases of their inner channels, and the factors of adapters, with
    the scale in B."""

    gate: Kernel | None  # [E,D,f]
    up: Kernel  # [E,D,f]
    down: Kernel  # [E,f,D]
    gate_bias: jax.Array | None = None  # [E,f]
    up_bias: jax.Array | None = None
    gate_up_a: jax.Array | None = None  # [E,D,r]
    gate_b: jax.Array | None = None  # [E,r,f]
    up_b: jax.Array | None = None
    down_a: jax.Array | None = None  # [E,f,r]
    down_b: jax.Array | None = None  # [E,r,D]

    @property
    def experts(self) -> int:
        """Their number: on a device, of its own."""
        return jax.tree.leaves(self.up)[0].shape[0]


def _shares(weights, chosen, experts: int):
    """The weight of each expert `[...,E]` from those of the chosen ones `[...,k]`."""
    return jnp.einsum("...k,...ke->...e", weights, jax.nn.one_hot(chosen, experts, dtype=weights.dtype))


def dense(kernels: Kernels, x, weights, chosen, activation, on_inputs: bool = False, kind: str = "none"):
    """`[M,D]`, from all experts for all tokens, weighted, or their inputs where `on_inputs`.

    Numbers in `chosen` that are no expert's add nothing. Matrices are quantised as `kind` says.
    """
    share = _shares(weights, chosen, kernels.experts)

    def matmul(x, kernel):
        return _einsum("md,edf->emf" if x.ndim == 2 else "emd,edf->emf", x, kernel, kind)

    gate, up = _gate_and_up(kernels, x, matmul, lambda bias: bias[:, None])
    share = share.T[..., None].astype(x.dtype)
    if on_inputs:
        hidden = activation(None if gate is None else gate * share, up * share)
    else:
        hidden = activation(gate, up) * share
    out = _einsum("emf,efd->md", hidden, kernels.down, kind)
    if kernels.down_a is not None and kernels.down_b is not None:
        out += jnp.einsum("emr,erd->md", hidden @ kernels.down_a, kernels.down_b)
    return out


def _gate_and_up(kernels: Kernels, x, matmul, of_rows) -> tuple[jax.Array | None, jax.Array]:
    """Gate, if there is one, and up of x, by `matmul(x, kernel)` for all experts; `of_rows(bias)` are those of rows."""
    gate = None if kernels.gate is None else matmul(x, kernels.gate)
    up = matmul(x, kernels.up)
    if gate is not None and kernels.gate_up_a is not None and kernels.gate_b is not None and kernels.up_b is not None:
        low = matmul(x, kernels.gate_up_a)
        gate, up = gate + matmul(low, kernels.gate_b), up + matmul(low, kernels.up_b)
    gate = gate if gate is None or kernels.gate_bias is None else gate + of_rows(kernels.gate_bias)
    return gate, up if kernels.up_bias is None else up + of_rows(kernels.up_bias)


def _einsum(dims: str, x, kernel: Kernel, kind: str) -> jax.Array:
    return _stored_einsum(dims, kind, x, kernel) if isinstance(kernel, dict) else jnp.einsum(dims, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _stored_einsum(dims: str, kind: str, x, kernel: Kernel):
    return jnp.einsum(dims, x, as_matrix(kernel, kind, x.dtype))


def _stored_backward(dims: str, kind: str, kernel: Kernel, gradient):
    """The gradient of x, by the matrices converted again: autodiff would keep those of every layer as numbers."""
    of_x, of_kernel, of_out = re.split(",|->", dims)
    return _stored_einsum(f"{of_out},{of_kernel}->{of_x}", kind, gradient, kernel), None


_stored_einsum.defvjp(lambda dims, kind, x, kernel: (_stored_einsum(dims, kind, x, kernel), kernel), _stored_backward)


def grouped(kernels: Kernels, x, weights, chosen, activation, on_inputs: bool = False, kind: str = "none"):
    """As `dense`, from each token's own experts: copies of tokens are sorted by expert and multiplied group by group.

    Copies for no expert's number are zeros behind the last group.
    """
    experts = kernels.experts
    numbers = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1)
    order = jnp.argsort(numbers, stable=True)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    sizes = jnp.bincount(numbers, length=experts + 1)[:experts].astype(jnp.int32)
    matmul = functools.partial(grouped_matmul, sizes=sizes, kind=kind)
    weights = weights[..., None]
    copies = jnp.repeat(x, chosen.shape[-1], axis=0)
    copies = copies * weights.reshape(-1, 1).astype(x.dtype) if on_inputs else copies
    copies = _permuted(copies, order, places)
    gate, up = _gate_and_up(kernels, copies, matmul, lambda bias: bias[jnp.minimum(numbers[order], experts - 1)])
    hidden = activation(gate, up)
    out = matmul(hidden, kernels.down)
    if kernels.down_a is not None and kernels.down_b is not None:
        out += matmul(matmul(hidden, kernels.down_a), kernels.down_b)
    out = _permuted(out, places, order).reshape(*chosen.shape, -1)
    return out.sum(1) if on_inputs else (out * weights).sum(1).astype(x.dtype)


@jax.custom_vjp
def _permuted(x, order, places):
    """The rows of x `[m,...]` in that order; `places` is the order that takes them back.

    Its gradient takes rows too, where that of indexing would add them up, one by one.
    """
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")


_permuted.defvjp(
    lambda x, order, places: (_permuted(x, order, places), (order, places)),
    lambda kept, gradient: (_permuted(gradient, *kept[::-1]), None, None),
)


def across_devices(compute, kernels: Kernels, x, weights, chosen):
    """`compute(kernels, x, weights, chosen)` of tokens x `[...,D]`, on the mesh that is set.

    Each device gets the tokens of its neighbours along `expert` and adds what its own experts (and, along `tensor`, its
    own channels) make of them; the sums go back to the devices the tokens came from. No token is dropped, however
    unevenly they choose.
    """

    def flat(x, weights, chosen):
        return (a.reshape(-1, a.shape[-1]) for a in (x, weights, chosen))

    if not is_sharded():
        return compute(kernels, *flat(x, weights, chosen)).reshape(x.shape)
    mesh: Any = jax.sharding.get_abstract_mesh()
    leaves = (
        "gate/kernel", "up/kernel", "down/kernel", "gate/bias", "up/bias", "gate_up/lora_a", "gate/lora_b",
        "up/lora_b", "down/lora_a", "down/lora_b",
    )  # fmt: skip
    specs = Kernels._make(
        jax.tree_util.tree_map_with_path(
            lambda part, x, leaf=leaf: parameter_spec(f"experts/{leaf}/{path_name(part)}".rstrip("/"), x.shape, mesh), w
        )
        for leaf, w in zip(leaves, kernels, strict=True)
    )
    of_experts, _, of_channels = specs.up["codes"] if isinstance(specs.up, dict) else specs.up
    if isinstance(specs.down, dict) and specs.down["codes"][1] != of_channels:
        raise ConfigError(
            f"mesh.tensor is {mesh.shape['tensor']}, which gives a device an odd number of the experts' channels, but "
            "two quantised to 4 bits share a byte: choose a smaller one, or set model.quantize_experts to int8, or fp8"
        )
    tokens = activation_spec(x.shape, *("rows", "positions")[: x.ndim - 1], *(None,) * max(x.ndim - 2, 1))
    exchanged = "expert" in jax.tree.leaves(tuple(tokens))  # else each device has all tokens
    axes = set().union(*(jax.tree.leaves(tuple(spec)) for spec in jax.tree.leaves((specs, tokens))))

    def varying(array, spec):  # along all axes, as grouped matmuls want it: gradients are summed here, over the others
        return jax.lax.pcast(array, tuple(axes.difference(jax.tree.leaves(tuple(spec)))), to="varying")

    def local(kernels, x, weights, chosen):
        shape = x.shape
        x, weights, chosen = flat(x, weights, chosen)
        kernels = jax.tree.map(
            lambda spec, w: varying(all_gathered(w, spec, ("fsdp", "context")), spec), specs, kernels
        )
        if of_channels is not None and isinstance(kernels.down, dict):
            kernels = kernels._replace(down=_with_own_scales(kernels.down, specs.down, mesh.shape["tensor"]))
        if exchanged:
            x, weights, chosen = (jax.lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x, weights, chosen))
        x, weights, chosen = (varying(a, tokens) for a in (x, weights, chosen))
        if of_experts is not None:  # as numbers among the experts of this device
            chosen -= jax.lax.axis_index("expert") * kernels.experts
        out = compute(kernels, x, weights, chosen)
        if of_channels is not None:
            out = jax.lax.psum(out, "tensor")
        if exchanged:
            out = jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
        elif of_experts is not None:
            out = jax.lax.psum(out, "expert")
        return out.reshape(shape)

    run = jax.shard_map(local, in_specs=(specs, tokens, tokens, tokens), out_specs=tokens)
    return run(kernels, x, weights, chosen)


def _with_own_scales(kernel: dict[str, jax.Array], specs: Any, devices: int) -> dict[str, jax.Array]:
    """A quantised kernel whose inputs are sharded along `tensor`, with the scales of the own inputs of this device.

    Where devices do not divide the blocks, each has the scales of all. A block that belongs to two of them becomes
    smaller ones.
    """
    name = next(part for part in kernel if part != "codes")
    scales, own = kernel[name], 2 * kernel["codes"].shape[-2]
    if specs[name][1] is not None:
        return kernel
    block = own * devices // scales.shape[-2]
    size = math.gcd(block, own)
    scales = jnp.repeat(scales, block // size, axis=-2)
    first = jax.lax.axis_index("tensor") * (own // size)
    return kernel | {name: jax.lax.dynamic_slice_in_dim(scales, first, own // size, axis=-2)}


class _Adapter(nnx.Module):
    """The factors of the adapter of stacked matrices `[E,in,out]`, where `name` is among the targets."""

    def __init__(self, d_in: int, d_out: int, config, rngs: nnx.Rngs, name: str = ""):
        self.lora = adapter = config.lora if config.lora is not None and name in config.lora.targets else None
        self.lora_a = nnx.Param(lora.init_a(rngs.lora(), config.experts, d_in, adapter.rank)) if adapter else None
        self.lora_b = nnx.Param(jnp.zeros((config.experts, adapter.rank, d_out), jnp.float32)) if adapter else None

    def factors(self, dtype) -> tuple[jax.Array, jax.Array] | None:
        """A `[E,in,r]` and B `[E,r,out]`, which has the scale in it; None without an adapter."""
        if self.lora is None or self.lora_a is None or self.lora_b is None:
            return None
        return self.lora_a[...].astype(dtype), (self.lora_b[...] * self.lora.scale).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _as_stored(kernel: jax.Array, kind: str, dtype) -> jax.Array:
    """The kernels in `dtype` as few bits store them, and the gradient of those (straight-through, arXiv 1308.3432)."""
    return as_matrix(quantize(kernel, kind), kind, dtype)


_as_stored.defvjp(
    lambda kernel, kind, dtype: (_as_stored(kernel, kind, dtype), jnp.zeros((), kernel.dtype)),
    lambda kind, dtype, like, gradient: (gradient.astype(like.dtype),),
)


class _StackedLinear(_Adapter):
    """Stacked matrices `[E,in,out]`, with biases where experts have some and an adapter where `name` is a target."""

    def __init__(self, d_in: int, d_out: int, config, rngs: nnx.Rngs, name: str = ""):
        super().__init__(d_in, d_out, config, rngs, name)
        shape, kind, self.qat = (config.experts, d_in, d_out), config.expert_quantize, config.expert_qat
        check_inputs(d_in, self.qat, "model.qat")
        kernel = jax.random.normal(rngs.params(), shape, config.param_dtype) * config.init_scale
        stored = kernel if kind == "none" else quantize(kernel, kind)
        self.kernel = nnx.Dict(jax.tree.map(nnx.Param, stored)) if isinstance(stored, dict) else nnx.Param(stored)
        self.bias = nnx.Param(jnp.zeros((config.experts, d_out), config.param_dtype)) if config.expert_bias else None

    def matrices(self, dtype) -> Kernel:
        """The matrices in `dtype`, or as they are quantised."""
        if isinstance(self.kernel, nnx.Param) and self.qat != "none":
            return _as_stored(self.kernel[...], self.qat, dtype)
        if isinstance(self.kernel, nnx.Param):
            return self.kernel[...].astype(dtype)
        return {name: array[...] for name, array in self.kernel.items()}

    def biases(self, dtype) -> jax.Array | None:
        """The biases `[E,out]`, None without any."""
        return None if self.bias is None else self.bias[...].astype(dtype)


class MixtureOfExperts(nnx.Module):
    """A feed-forward layer of E experts, of which each token uses the k with the largest router probabilities.

    Their outputs (with `router_on_inputs` their inputs) are weighted by the probabilities, which sum to 1 over the
    chosen ones with `normalize_top_k`. Every token may use one more, the shared expert (arXiv 2401.06066), times the
    sigmoid of its gate where that has one. With an `expert_width` a map makes the experts' inputs of that size, and
    another one takes their weighted sum back to the width; the router and the shared expert read the tokens themselves.
    The last of them may be zero-computation experts (arXiv 2410.07348), which give the tokens themselves.
    """

    def __init__(self, config, rngs: nnx.Rngs):
        self.config = config
        stored = dataclasses.replace(config, param_dtype="float32") if config.router_fp32 else config
        self.router = Linear(config.width, config.routed_experts, stored, rngs, config.expert_bias)
        # Of 32 bits whatever the others have, as in transformers: rounded numbers would choose other experts.
        zeros = jnp.zeros((config.routed_experts,), jnp.float32)
        self.correction = nnx.Param(zeros) if config.router_correction else None
        # As numbers too: whoever takes gradients, moments and casts of parameters needs to know of no other kind.
        table = jnp.zeros((config.embeddings, config.experts_per_token), jnp.float32)
        self.table = nnx.Param(table) if config.hash_layers else None
        self.experts = Experts(config, rngs)
        self.shared = FeedForward(config, rngs, config.shared_expert_ffn) if config.shared_expert_ffn else None
        self.shared_gate = Linear(config.width, 1, config, rngs) if config.shared_expert_gate else None
        inner = config.expert_width
        self.narrow = Linear(config.width, inner, config, rngs, config.mlp_bias, "narrow") if inner else None
        self.widen = Linear(inner, config.width, config, rngs, config.mlp_bias, "widen") if inner else None

    def __call__(self, x, counted=None, replayed=None, tokens=None):
        """Output `[...,D]` of x `[...,D]`, the experts `[...,k]` of each token and, where `counted` `[...]` says how
        often tokens count, the `Routing`. Routers that choose by the `tokens` `[...]` alone read these.

        Tokens go to the experts `replayed` `[...,k]` where these are not negative, weighted by this router all the
        same: rollout routing replay (R3), arXiv 2510.11370.
        """
        c = self.config
        logits = self._route(x.astype(jnp.float32) if c.router_in_fp32 else x).astype(jnp.float32)
        logits = soft_cap(logits, c.router_softcap)
        probabilities = jax.nn.sigmoid(logits) if c.router_sigmoid else jax.nn.softmax(logits, axis=-1)
        if c.router_softplus:  # of which the root has no gradient at 0
            probabilities = jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), 1e-30))
        # Of sigmoids many may be rounded to 1.
        by_logits = c.router_corrects_logits or (c.router_sigmoid and self.correction is None)
        ranks = logits if by_logits else probabilities
        if self.table is None:
            chosen = self._chosen(ranks)
        else:  # a hash of the token (arXiv 2106.04426)
            assert tokens is not None
            chosen = jax.lax.stop_gradient(self.table[...])[tokens].astype(jnp.int32)
        if replayed is not None:
            chosen = jnp.where(replayed < 0, chosen, replayed.astype(chosen.dtype))
        if c.router_jitter is None:
            weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
        else:
            weights = one_by_one(logits, chosen, c.router_jitter)
        if c.router_sigmoid or c.router_softplus:
            probabilities /= probabilities.sum(-1, keepdims=True)  # as the loss that balances experts takes them
        if c.normalize_top_k:
            weights = weights / (weights.sum(-1, keepdims=True) + c.top_k_epsilon)
        weights = weights if c.routed_scale == 1.0 else weights * c.routed_scale
        x, weights = self._inputs(x, weights, chosen)
        if self.narrow is None or self.widen is None:
            out = self.experts(x, weights, chosen)
        else:
            out = self.widen(self.experts(self.narrow(x), weights, chosen))
        if c.zero_experts:
            out += x * jnp.where(chosen >= c.experts, weights, 0.0).sum(-1, keepdims=True).astype(x.dtype)
        if self.shared is not None:
            shared = self.shared(x)
            shared = shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared
            out += shared if c.shared_expert_scale == 1.0 else shared * c.shared_expert_scale
        if counted is None:
            return out, chosen, None
        preferred = chosen
        if self.correction is not None:  # as transformers and DeepSeek-V3 (arXiv 2412.19437, eq. 18) count them
            preferred = jax.lax.top_k(jax.lax.stop_gradient(probabilities), c.experts_per_token)[1]
        live = counted[..., None].astype(jnp.float32)
        if self.table is not None:  # whose choices no loss can even out: such layers have no part in one
            live = jnp.zeros_like(live)
        count = c.routed_experts
        used = (jax.nn.one_hot(preferred, count, dtype=jnp.float32) * live[..., None]).reshape(-1, count).sum(0)
        return out, chosen, Routing(used, (probabilities * live).reshape(-1, count).sum(0), live.sum())

    def _inputs(self, x, weights, chosen):
        """The inputs of the experts, made of x, and the weights of the chosen ones."""
        return x, weights

    def _chosen(self, ranks):
        """The experts `[...,k]` of the best groups, where a group is as good as its best experts together."""
        c = self.config
        ranks = jax.lax.stop_gradient(ranks)
        if self.correction is not None:
            ranks += jax.lax.stop_gradient(self.correction[...])
        if c.router_groups > 1:
            groups = ranks.reshape(*ranks.shape[:-1], c.router_groups, -1)
            best = jax.lax.top_k(jax.lax.top_k(groups, c.router_group_best)[0].sum(-1), c.router_top_groups)[1]
            allowed = jax.nn.one_hot(best, c.router_groups, dtype=bool).any(-2)
            ranks = jnp.where(allowed[..., None], groups, -jnp.inf).reshape(ranks.shape)
        return jax.lax.top_k(ranks, c.experts_per_token)[1]

    def _route(self, x):
        if not self.config.freeze_router:
            return self.router(x)
        logits = x @ jax.lax.stop_gradient(self.router.kernel[...]).astype(x.dtype)
        bias = self.router.bias
        return logits if bias is None else logits + jax.lax.stop_gradient(bias[...]).astype(x.dtype)


class ExpertsBeside(MixtureOfExperts):
    """Experts beside a dense feed-forward (Gemma 4): both read the hidden states `[...,D]` through norms of their own,
    and each output has a norm. The router reads them in a third way, and weights have a factor for each expert."""

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.dense = FeedForward(config, rngs)
        self.dense_norm, self.dense_out_norm, self.experts_norm, self.experts_out_norm = (
            RMSNorm(config.width, config, rngs) for _ in range(4)
        )
        self.router_norm = RMSNorm(config.width, config, rngs, scaled=False)
        self.router_scale = nnx.Param(jnp.ones((config.width,), config.param_dtype))
        self.weight_scale = nnx.Param(jnp.ones((config.experts,), config.param_dtype))

    def __call__(self, x, counted=None, replayed=None, tokens=None):
        """As a `MixtureOfExperts` returns them, of x before any norm."""
        out, chosen, routing = super().__call__(x, counted, replayed, tokens)
        return self.experts_out_norm(out) + self.dense_out_norm(self.dense(self.dense_norm(x))), chosen, routing

    def _inputs(self, x, weights, chosen):
        return self.experts_norm(x), weights * self._of_router(self.weight_scale, weights.dtype)[chosen]

    def _route(self, x):
        return super()._route(self.router_norm(x) * self._of_router(self.router_scale, x.dtype) * x.shape[-1] ** -0.5)

    def _of_router(self, scale: nnx.Param, dtype):
        return (jax.lax.stop_gradient(scale[...]) if self.config.freeze_router else scale[...]).astype(dtype)
