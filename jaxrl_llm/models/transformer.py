"""One decoder for every family: embedding, scanned or unrolled layers, final norm, language-model or score head.

A `Net` is the static side (configuration, graph); parameters are a plain nested dict of arrays. Everything that
computes is a pure function of both: `net.bind(params).hidden(tokens)`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import constrain, context_shards
from jaxrl_llm.models.layers import Attention, FeedForward, KeyValues, LayerTraits, Linear, RMSNorm, Seen, soft_cap
from jaxrl_llm.models.lora import LoraConfig, has_adapters, has_dropout
from jaxrl_llm.models.model_config import ModelConfig, is_dense, layer_traits, waves_of_long_rows
from jaxrl_llm.models.moe import MixtureOfExperts, Routing

Params = dict[str, Any]

LAYER_INPUT = "layer_input"
_kept = jax.checkpoint_policies
# What the backward pass finds of each layer; the rest it computes again.
REMAT: dict[str, Any] = {
    "block": None,  # its input
    "dots": _kept.dots_with_no_batch_dims_saveable,  # the products with its matrices
    "offload": _kept.save_and_offload_only_these_names(  # its input, which waits in the host's memory
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class Embed(nnx.Module):
    """Token embeddings `[V,D]`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.width)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, config.param_dtype) * config.init_scale)

    def __call__(self, tokens, dtype):
        # Gathering rows of a table cut along its width would make every device rebuild it: cut by vocabulary only.
        return constrain(self.weight[...], "vocab", None)[tokens].astype(dtype)


class Block(nnx.Module):
    """A decoder layer: attention, then a dense feed-forward part or a mixture of experts."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dense: bool):
        def norm(*kinds: str):
            return RMSNorm(config.width, config, rngs) if config.norms in kinds else None

        self.input_norm = norm("pre", "both")
        self.attention = Attention(config, rngs)
        self.attention_out_norm = norm("post", "both")
        self.post_attention_norm = norm("pre", "both")
        self.mlp = FeedForward(config, rngs) if dense else MixtureOfExperts(config, rngs)
        self.mlp_out_norm = norm("post", "both")

    def _feed_forward(self, x, attended, real=None) -> tuple[jax.Array, Routing | None]:
        x = constrain(x + _normed(self.attention_out_norm, attended), "rows", "positions", None)
        out, routing = _normed(self.post_attention_norm, x), None
        if isinstance(self.mlp, MixtureOfExperts):
            out, routing = self.mlp(out, real)
        else:
            out = self.mlp(out)
        return constrain(x + _normed(self.mlp_out_norm, out), "rows", "positions", None), routing

    def __call__(self, x, positions, seen: Seen, real, traits) -> tuple[jax.Array, KeyValues, Routing | None]:
        out, cache = self.attention(_normed(self.input_norm, x), positions, seen, traits)
        x, routing = self._feed_forward(x, out, real)
        return x, cache, routing

    def decode(self, x, positions, prompt, prompt_mask, rows, length, traits) -> tuple[jax.Array, KeyValues]:
        normed = _normed(self.input_norm, x)
        out, rows = self.attention.decode(normed, positions, prompt, prompt_mask, rows, length, traits)
        return self._feed_forward(x, out)[0], rows


def _normed(norm: RMSNorm | None, x):
    return x if norm is None else norm(x)


class Run(NamedTuple):
    """Layers that one program computes, one after another: `count` of them in a scan, or a single one (None)."""

    graph: Any
    state: Any
    traits: LayerTraits  # of each, stacked; or of all alike
    alike: bool
    count: int | None


class Transformer(nnx.Module):
    """A decoder-only language model or, with `head="score"`, a scorer of tokens."""

    record: Callable[[Routing], None] | None = None  # told, while tracing, how `hidden` routes tokens to experts

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs)
        if config.scan_layers:
            all_dense = not config.experts
            self.layers = _stacked_blocks(config, rngs, config.layers - len(config.dense_layers), all_dense)
            self.dense_layers = _stacked_blocks(config, rngs, len(config.dense_layers), True)
        else:
            self.layers = nnx.List([Block(config, rngs, is_dense(config, n)) for n in range(config.layers)])
        self.norm = RMSNorm(config.width, config, rngs)
        self.head = (
            None
            if config.tie_embeddings or config.head == "score"
            else Linear(config.width, config.vocab_size, config, rngs)
        )
        # Beside adapters the score head is trained, and like them it is fp32 whatever the type of the frozen rest.
        trained = config if config.lora is None else dataclasses.replace(config, param_dtype="float32")
        self.score = Linear(config.width, 1, trained, rngs) if config.head == "score" else None

    def hidden(self, inputs: Inputs):
        """Hidden states `[N,T,D]` after the final norm, in the compute dtype.

        The rows are computed as they are: a layout is followed by the caller (models/logprobs.py).
        """
        length = inputs.tokens.shape[1]
        x, _, routing = self._forward(_for_context(inputs))
        if self.record is not None and routing is not None:
            self.record(routing)
        return x[:, :length]

    def prefill(self, tokens, segments):
        """Hidden states `[B,P,D]` and, per layer, the keys and values `[B,J,P,d]` of prompts padded on the left."""
        return self._forward(Inputs(tokens, segments), keep_cache=True)[:2]

    def decode(self, tokens, positions, prompt, prompt_mask, rows, length):
        """Hidden states `[G,R*W,D]` of each row's next W tokens, and the row caches with them: `Attention.decode`."""
        x = self._embedded(tokens)

        def body(block, x, caches, traits):
            return block.decode(x, positions, caches[0], prompt_mask, caches[1], length, traits)

        x, rows = self._through_layers(body, x, (prompt, rows))
        return self.norm(x), rows

    def head_kernel(self):
        """The matrix `[D,V]` from hidden states to logits."""
        if self.score is not None:
            raise ConfigError("this model has a score head and no language-model head: it gives scores, no logits.")
        return self.embed.weight[...].T if self.head is None else self.head.kernel[...]

    def logits(self, hidden):
        """Logits `[..., V]` in fp32."""
        hidden = self.head_input(hidden)
        logits = jnp.matmul(hidden, self.head_kernel().astype(hidden.dtype), preferred_element_type=jnp.float32)
        return soft_cap(logits, self.config.logit_softcap)

    def head_input(self, hidden):
        """Hidden states in the dtype that their product with `head_kernel` is computed in."""
        return hidden.astype(jnp.float32) if self.config.fp32_head else hidden

    def scores(self, hidden):
        """One number a token `[...]` in fp32, from the score head."""
        if self.score is None:
            raise ConfigError('this model has no score head: load it with head="score".')
        return self.score(hidden.astype(jnp.float32))[..., 0]

    def __call__(self, tokens, segments=None, positions=None):
        """Logits `[N,T,V]` in fp32 (or scores `[N,T]` with the score head)."""
        hidden = self.hidden(Inputs(tokens, segments, positions))
        return self.scores(hidden) if self.score is not None else self.logits(hidden)

    def _embedded(self, tokens):
        x = constrain(self.embed(tokens, self.config.dtype), "rows", "positions", None)
        return x if self.config.embed_scale == 1.0 else x * jnp.asarray(self.config.embed_scale, x.dtype)

    def _forward(self, inputs: Inputs, keep_cache: bool = False):
        tokens, noise, prefixes = inputs.tokens, inputs.noise, inputs.prefix_segments
        segments = jnp.ones_like(tokens) if inputs.segments is None else inputs.segments
        positions = segment_positions(segments) if inputs.positions is None else inputs.positions
        by_segments = self.config.attention == "splash" and prefixes is None
        seen = Seen(segments, None if by_segments else attention_mask(segments, prefixes))
        real = segments != 0 if inputs.multiplicity is None else inputs.multiplicity
        waves = waves_of_long_rows(self.config, segments, positions)

        def body(block, x, _, traits):
            if waves is not None:
                traits = traits._replace(waves=jnp.where(traits.waves == 0, 0.0, waves))
            x, cache, routing = block(x, positions, seen, real, traits)
            return x, (cache if keep_cache else None, routing)

        x = self._embedded(tokens)
        x, found = self._through_layers(body, x if noise is None else x + noise.astype(x.dtype), None)
        caches = [cache for cache, _ in found] if isinstance(found, list) else found[0]
        routings = [routing for _, routing in (found if isinstance(found, list) else [found]) if routing is not None]
        return self.norm(x), caches, _added(routings, self.config.scan_layers) if routings else None

    def _through_layers(self, body, x, caches):
        """x after every layer, and what each run of layers returned: of one run its own, of several a list."""
        runs = self._runs()
        whole = len(runs) == 1 and runs[0].count is not None
        outputs = []
        for number, run in enumerate(runs):

            def step(x, layer, run=run):
                state, cache, traits = layer
                x = checkpoint_name(x, LAYER_INPUT)
                return body(nnx.merge(run.graph, state), x, cache, run.traits if run.alike else traits)

            if self.config.remat != "none":
                step = jax.checkpoint(step, prevent_cse=run.count is None, policy=REMAT[self.config.remat])
            own = caches if whole else _of_layer(caches, number)
            layers = (run.state, own, None if run.alike else run.traits)
            x, out = step(x, layers) if run.count is None else jax.lax.scan(step, x, layers)
            outputs.append(out)
        return x, outputs[0] if whole else outputs

    def _runs(self) -> list[Run]:
        c = self.config
        traits = layer_traits(c)
        if isinstance(self.layers, nnx.List):
            return [Run(*nnx.split(self.layers[n]), traits[n], True, None) for n in range(c.layers)]
        stacks = {dense: nnx.split(self.dense_layers if c.experts and dense else self.layers) for dense in _kinds(c)}
        runs, used = [], dict.fromkeys(stacks, 0)
        for dense, numbers in itertools.groupby(range(c.layers), lambda n: is_dense(c, n)):
            own = [traits[n] for n in numbers]
            graph, state = stacks[dense]
            part = slice(used[dense], used[dense] + len(own))
            used[dense] = part.stop
            if len(own) < _stack_size(state):
                state = jax.tree.map(lambda x, part=part: x[part], state)
            runs.append(Run(graph, state, *_stacked(own), len(own)))
        return runs


def _for_context(inputs: Inputs) -> Inputs:
    """The rows, padded so that the context axis of the mesh divides T."""
    extra = -inputs.tokens.shape[1] % context_shards()
    if not extra:
        return inputs
    if inputs.segments is None:  # padding must be told from tokens
        inputs = inputs.replace(segments=jnp.ones_like(inputs.tokens))
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2))), inputs)


def _kinds(config: ModelConfig) -> set[bool]:
    return {is_dense(config, layer) for layer in range(config.layers)}


def _stacked_blocks(config: ModelConfig, rngs: nnx.Rngs, count: int, dense: bool) -> Block | None:
    make = nnx.vmap(lambda r: Block(config, r, dense), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=count)(make)(rngs) if count else None


def _stack_size(state) -> int:
    return jax.tree.leaves(state)[0].shape[0]


def _added(routings: list[Routing], stacked: bool) -> Routing:
    """The sum over layers, which each run has `stacked` or has one of."""
    if stacked:
        routings = [jax.tree.map(lambda x: x.sum(0), routing) for routing in routings]
    return jax.tree.map(lambda *parts: sum(parts), *routings)


def _stacked(traits: list[LayerTraits]) -> tuple[LayerTraits, bool]:
    """The traits of the layers of a run: (those of all alike, True) or (stacked, False)."""
    first = traits[0]
    if all(np.array_equal(one.waves, first.waves) and one[1:] == first[1:] for one in traits):
        return first, True
    return jax.tree.map(lambda *parts: np.stack(parts), *traits), False


def _of_layer(caches, number: int):
    """One layer's part of caches that are stacked over layers, or lists of them."""
    return jax.tree.map(lambda cache: cache[number], caches, is_leaf=lambda x: isinstance(x, list))


def _each_layer(stacked) -> list[Any]:
    """The layers of parameters that are stacked over them."""
    parts = jax.tree.map(lambda x: _parts(x) if jnp.issubdtype(x.dtype, jnp.inexact) else [*x], stacked)
    is_parts = lambda x: isinstance(x, list)  # noqa: E731
    return [jax.tree.map(lambda x, n=n: x[n], parts, is_leaf=is_parts) for n in range(_stack_size(stacked))]


@jax.custom_vjp
def _parts(x):
    """The entries of an array along its first axis, whose gradients are stacked: slices would have them padded and
    added up."""
    return [x[n] for n in range(len(x))]


_parts.defvjp(lambda x: (_parts(x), None), lambda _, gradients: (jnp.stack(gradients),))


def segment_positions(segments):
    """Positions `[N,T]` that count from 0 at the start of every segment; 0 on padding."""
    index = jnp.arange(segments.shape[1])
    starts = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), jnp.diff(segments, axis=1) != 0], axis=1)
    start = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    return jnp.where(segments == 0, 0, index - start)


def attention_mask(segments, prefixes=None):
    """`[N,T,T]` (query, key): same segment or the query's prefix, no padding, and the key not after the query."""
    same = segments[:, :, None] == segments[:, None, :]
    if prefixes is not None:
        same |= prefixes[:, :, None] == segments[:, None, :]
    causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
    return same & causal & (segments != 0)[:, None, :]


@dataclasses.dataclass(frozen=True)
class Net:
    """The static side of a model: `bind(params)` gives the module whose methods compute.

    Parameters are stored with their layers stacked, whether the net scans them or not.
    """

    config: ModelConfig

    @functools.cached_property
    def abstract(self) -> Transformer:
        return nnx.eval_shape(lambda: Transformer(self.config, nnx.Rngs(0)))

    @functools.cached_property
    def graph(self):
        return nnx.split(self.abstract)[0]

    def bind(self, params: Params) -> Transformer:
        """The module with these parameters (no copy; works under jit).

        Where they hold no adapters it is the base model; where they hold no keys of dropout nothing is dropped.
        """
        net = self if has_dropout(params) else self.steady if has_adapters(params) else self.base
        return nnx.merge(net.graph, params if self.config.scan_layers else unstack(params, self.config.dense_layers))

    def shapes(self) -> Params:
        """The parameters as ShapeDtypeStructs."""
        return nnx.to_pure_dict(nnx.split(self.steady.scanned().abstract)[1])

    def init(self, key) -> Params:
        """Random parameters: normal(0, init_scale) matrices, zero biases, unit norm scales.

        Adapters are drawn apart, so that the others are those of the net without adapters.
        """
        rngs = nnx.Rngs(params=key, lora=jax.random.fold_in(key, 1))
        return nnx.to_pure_dict(nnx.state(Transformer(self.steady.scanned().config, rngs), nnx.Param))

    @functools.cached_property
    def base(self) -> "Net":
        """The net without adapters."""
        return self if self.config.lora is None else Net(dataclasses.replace(self.config, lora=None))

    @functools.cached_property
    def steady(self) -> "Net":
        """The net without dropout."""
        lora = self.config.lora
        if lora is None or not lora.dropout:
            return self
        return Net(dataclasses.replace(self.config, lora=dataclasses.replace(lora, dropout=0.0)))

    @functools.cached_property
    def plain(self) -> "Net":
        """The net without adapters and with its matrices as numbers: what model files hold."""
        return Net(dataclasses.replace(self.config, lora=None, quantize="none"))

    def with_lora(self, lora: LoraConfig) -> "Net":
        """The same model with these adapters."""
        return Net(dataclasses.replace(self.config, lora=lora))

    def scanned(self) -> "Net":
        """The same model computing its layers in a scan."""
        return Net(dataclasses.replace(self.config, scan_layers=True))

    def unrolled(self) -> "Net":
        """The same model computing its layers one after another."""
        return Net(dataclasses.replace(self.config, scan_layers=False))


@dataclasses.dataclass(frozen=True)
class RecordingNet(Net):
    """A net that tells `record`, while it is traced, how tokens were routed to experts: `hidden` calls it once."""

    record: Callable[[Routing], None] = dataclasses.field(compare=False)

    def bind(self, params: Params) -> Transformer:
        model = super().bind(params)
        model.record = self.record
        return model


def unstack(params: Params, dense_layers: tuple[int, ...] = ()) -> Params:
    """The parameters with one dict a layer instead of stacked layers; unchanged when they are so already.

    `dense_layers` are the numbers of the layers that are stacked apart, those without experts among others with them.
    """
    layers = params["layers"]
    if 0 in layers:
        return params
    dense = params.get("dense_layers")
    sparse = iter(_each_layer(layers))
    others = iter(_each_layer(dense) if dense_layers else ())
    count = _stack_size(layers) + len(dense_layers)
    parts = {number: next(others if number in dense_layers else sparse) for number in range(count)}
    return {**{name: x for name, x in params.items() if name != "dense_layers"}, "layers": parts}
