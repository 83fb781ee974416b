"""One decoder for every family: embedding, scanned or unrolled layers, final norm, language-model or score head.

A `Net` is the static side (configuration, graph); parameters are a plain nested dict of arrays. Everything that
computes is a pure function of both: `net.bind(params).hidden(tokens)`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.layers import Attention, FeedForward, KeyValues, Linear, RMSNorm
from jaxrl_llm.sharding import constrain

Params = dict[str, Any]


class RopeScaling(NamedTuple):
    """llama3 rope scaling (arXiv 2407.21783): long waves are slowed by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Hashable, so that it is a static argument of jitted functions."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head: str = "lm"  # or "score": one number a token, for reward models and critics
    init_scale: float = 0.02
    dtype: str = "float32"  # of the computation
    param_dtype: str = "float32"
    remat: str = "none"  # or "block": keep only each layer's input for the backward pass
    scan_layers: bool = True  # False: a program per layer, slower to compile and, on CPU, up to twice as fast to run


class Embed(nnx.Module):
    """Token embeddings `[V,D]`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.width)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, config.param_dtype) * config.init_scale)

    def __call__(self, tokens, dtype):
        # Gathering rows of a table cut along its width would make every device rebuild it: cut by vocabulary only.
        return constrain(self.weight[...], "vocab", None)[tokens].astype(dtype)


class Block(nnx.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config.width, config, rngs)
        self.attention = Attention(config, rngs)
        self.post_attention_norm = RMSNorm(config.width, config, rngs)
        self.mlp = FeedForward(config, rngs)

    def _feed_forward(self, x):
        return constrain(x + self.mlp(self.post_attention_norm(x)), "rows", None, None)

    def __call__(self, x, positions, mask) -> tuple[jax.Array, KeyValues]:
        out, cache = self.attention(self.input_norm(x), positions, mask)
        return self._feed_forward(constrain(x + out, "rows", None, None)), cache

    def decode(self, x, positions, prompt, prompt_mask, rows, length) -> tuple[jax.Array, KeyValues]:
        out, rows = self.attention.decode(self.input_norm(x), positions, prompt, prompt_mask, rows, length)
        return self._feed_forward(x + out), rows


class Transformer(nnx.Module):
    """A decoder-only language model or, with `head="score"`, a scorer of tokens."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs)
        if config.scan_layers:
            make = nnx.split_rngs(splits=config.layers)(nnx.vmap(lambda r: Block(config, r), in_axes=0, out_axes=0))
            self.layers = make(rngs)
        else:
            self.layers = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, config, rngs)
        self.head = (
            None
            if config.tie_embeddings or config.head == "score"
            else Linear(config.width, config.vocab_size, config, rngs)
        )
        self.score = Linear(config.width, 1, config, rngs) if config.head == "score" else None

    def hidden(self, tokens, segments=None, positions=None):
        """Hidden states `[N,T,D]` after the final norm, in the compute dtype.

        tokens `[N,T]`; segments `[N,T]`: 0 is padding, other numbers tell packed documents apart (default: all 1);
        positions `[N,T]`: default counts from 0 in each segment.
        """
        return self._forward(tokens, segments, positions)[0]

    def prefill(self, tokens, segments):
        """Hidden states `[B,P,D]` and, per layer, the keys and values `[B,J,P,d]` of prompts padded on the left."""
        return self._forward(tokens, segments, None, keep_cache=True)

    def decode(self, tokens, positions, prompt, prompt_mask, rows, length):
        """Hidden states `[G,R,D]` of one token a row, and the row caches with it; see `Attention.decode`."""
        x = constrain(self.embed(tokens, self.config.dtype), "rows", None, None)

        def body(block, x, caches):
            return block.decode(x, positions, caches[0], prompt_mask, caches[1], length)

        x, rows = self._through_layers(body, x, (prompt, rows))
        return self.norm(x), rows

    def head_kernel(self):
        """The matrix `[D,V]` from hidden states to logits."""
        if self.score is not None:
            raise ConfigError("this model has a score head and no language-model head: it gives scores, no logits.")
        return self.embed.weight[...].T if self.head is None else self.head.kernel[...]

    def logits(self, hidden):
        """Logits `[..., V]` in fp32."""
        kernel = self.head_kernel().astype(hidden.dtype)
        return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)

    def scores(self, hidden):
        """One number a token `[...]` in fp32, from the score head."""
        if self.score is None:
            raise ConfigError('this model has no score head: load it with head="score".')
        return self.score(hidden.astype(jnp.float32))[..., 0]

    def __call__(self, tokens, segments=None, positions=None):
        """Logits `[N,T,V]` in fp32 (or scores `[N,T]` with the score head)."""
        hidden = self.hidden(tokens, segments, positions)
        return self.scores(hidden) if self.score is not None else self.logits(hidden)

    def _forward(self, tokens, segments, positions, keep_cache: bool = False):
        segments = jnp.ones_like(tokens) if segments is None else segments
        positions = segment_positions(segments) if positions is None else positions
        mask = attention_mask(segments)
        x = constrain(self.embed(tokens, self.config.dtype), "rows", None, None)

        def body(block, x, _):
            x, cache = block(x, positions, mask)
            return x, cache if keep_cache else None

        x, caches = self._through_layers(body, x, None)
        return self.norm(x), caches

    def _through_layers(self, body, x, caches):
        """x after every layer, and what each layer returned: stacked when scanned, a list when unrolled."""
        scanned = self.config.scan_layers
        parts = [nnx.split(part) for part in (self.layers if isinstance(self.layers, nnx.List) else [self.layers])]
        graph = parts[0][0]

        def step(x, layer):
            return body(nnx.merge(graph, layer[0]), x, layer[1])

        if self.config.remat == "block":
            step = jax.checkpoint(step, prevent_cse=not scanned)
        if scanned:
            return jax.lax.scan(step, x, (parts[0][1], caches))
        outputs = []
        for number, (_, state) in enumerate(parts):
            x, out = step(x, (state, _of_layer(caches, number)))
            outputs.append(out)
        return x, outputs


def _of_layer(caches, number: int):
    """One layer's part of caches that are stacked over layers, or lists of them."""
    return jax.tree.map(lambda cache: cache[number], caches, is_leaf=lambda x: isinstance(x, list))


def segment_positions(segments):
    """Positions `[N,T]` that count from 0 at the start of every segment; 0 on padding."""
    index = jnp.arange(segments.shape[1])
    starts = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), jnp.diff(segments, axis=1) != 0], axis=1)
    start = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    return jnp.where(segments == 0, 0, index - start)


def attention_mask(segments):
    """`[N,T,T]` (query, key): same segment, no padding, and the key not after the query."""
    same = segments[:, :, None] == segments[:, None, :]
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
        """The module with these parameters (no copy; works under jit)."""
        return nnx.merge(self.graph, params if self.config.scan_layers else unstack(params))

    def shapes(self) -> Params:
        """The parameters as ShapeDtypeStructs."""
        return nnx.to_pure_dict(nnx.split(self.scanned().abstract)[1])

    def init(self, key) -> Params:
        """Random parameters: normal(0, init_scale) matrices, zero biases, unit norm scales."""
        return nnx.to_pure_dict(nnx.state(Transformer(self.scanned().config, nnx.Rngs(key)), nnx.Param))

    def scanned(self) -> "Net":
        """The same model computing its layers in a scan."""
        return Net(dataclasses.replace(self.config, scan_layers=True))

    def unrolled(self) -> "Net":
        """The same model computing its layers one after another."""
        return Net(dataclasses.replace(self.config, scan_layers=False))


def unstack(params: Params) -> Params:
    """The parameters with one dict a layer instead of stacked layers; unchanged when they are so already."""
    layers = params["layers"]
    if 0 in layers:
        return params
    count = jax.tree.leaves(layers)[0].shape[0]
    return {**params, "layers": {number: _of_layer(layers, number) for number in range(count)}}
