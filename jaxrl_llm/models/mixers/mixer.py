"""The protocol of a layer's mixer, which moves information between the tokens of a row, and of its cache.

A decoder layer is a mixer and a feed-forward, or one of the two. A mixer owns its cache: the transformer and the
sampling engine pass caches on as pytrees and never look into them. A new kind of layer is a class with this protocol in
a file of its own, named by a family in `ModelConfig.mixers`.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The kind of one layer: its parts and how far it sees. Hashable; equal kinds compute alike."""

    mixer: type["Mixer"]
    rope: Rope | None = None  # None: no rotary positions
    window: int | None = None  # a token sees this many, itself included; None: all before it
    experts: bool = False  # a mixture of experts; False: a dense feed-forward
    bare: bool = False  # no feed-forward behind the mixer
    shares: int | None = None  # the layer whose keys and values it reads; None: its own
    chosen_by: int | None = None  # the layer whose choice of tokens it attends to; None: its own, or to all
    ngrams: int | None = None  # its index among the layers that add embeddings of n-grams; None: it adds none
    fields: tuple[tuple[str, Any], ...] = ()  # of the ModelConfig, which differ in this layer


class ShownImages(NamedTuple):
    """The features of the images of rows that are no tokens, and which of them each token sees."""

    states: jax.Array  # [N,M,D]; M is 0 where no row has an image
    seen: jax.Array  # [N,T,M]


class AttentionInputs(NamedTuple):
    """The layout of the rows that a mixer reads, the same for every layer."""

    positions: jax.Array  # [N,T]
    segments: jax.Array  # [N,T] 0 is padding
    mask: jax.Array | None  # [N,T,T] (query, key) True where seen; None where no layer reads one
    by_mask: bool = False  # a token sees more, or less, than its segment up to itself
    causal: bool = True  # no token sees one behind it
    sliding_mask: jax.Array | None = None  # of the layers with a window, where it says more than the window
    runs: jax.Array | None = None  # [N,T] from 1, of tokens that see each other; 0: in none
    inv_freq: jax.Array | None = None  # [N,T,r/2] rotary frequencies of each token, where they depend on its row
    rotary: jax.Array | None = None  # [N,T,r/2] position of each frequency, where positions have several axes
    shift: jax.Array | None = None  # [N] added to the positions of tokens behind a prompt, where they have several axes
    shared: Any = None  # what the layer's `LayerConfig.shares` passes on
    chosen: Any = None  # what its `LayerConfig.chosen_by` has chosen
    shown: ShownImages | None = None  # of models that have layers which read images
    tokens: jax.Array | None = None  # [N,T] which layers read that add embeddings of n-grams, and hash routers
    prefixes: jax.Array | None = None  # [N,T] a segment that a token sees besides its own; None: none


class DecodeInputs(NamedTuple):
    """Places of the next W tokens of each row: R rows of each of G prompts, the tokens of a row adjacent."""

    positions: jax.Array  # [G,R*W]
    prompt_mask: jax.Array  # [G,P] False on padding
    length: jax.Array  # [G,R] tokens in the row's cache before the first of the W
    shared: Any = None  # what the layer's `LayerConfig.shares` passes on
    chosen: Any = None  # what its `LayerConfig.chosen_by` has chosen
    tokens: jax.Array | None = None  # [G,R*W] as in `AttentionInputs`


class Passing(NamedTuple):
    """A cache, and what else the layer and others get of a mixer."""

    cache: Any
    passed: Any  # on to the layers that read the keys and values of this one, in place of its caches
    gate: jax.Array | None = None  # [..., 1] times the outputs of the feed-forward; of no size: the layer adds nothing
    chosen: Any = None  # the tokens that this layer attends to, which others are to attend to too

    @classmethod
    def of(cls, cache, caches) -> "Passing":
        """The results of a mixer beside its outputs, a Passing or a cache, as a Passing; of a cache the `caches` are
        passed on."""
        return cache if isinstance(cache, Passing) else cls(cache, caches)


class Mixer(Protocol):
    """An `nnx.Module` that is made as `mixer(config, rngs)`, with a cache of its own.

    `arrays` are this layer's `layer_arrays`. A cache is any pytree of arrays `[G, ...]` for prompts and `[G, R, ...]`
    for rows; other dimensions may be sharded. Rows may leave, move and come back between decode steps. A step may be
    repeated, and the next one may begin anywhere behind the first token of this one: speculative tokens may prove
    wrong. So the output of `decode` for a token must not depend on values that an earlier call stored at its place or
    behind it; a recurrent mixer keeps the states it may have to go back to. Training leaves the parameters as they are
    whose paths are in `untrained`, where a mixer has it. One that attends to some of the tokens before has what
    `query_blocks.ChoosesTokens` says. The caches of prompts begin with what is of their padding, but for the fields
    that are named in `own_first`, where a mixer has that.
    """

    path: str  # of its parameters in the layer: layers/<path>/...
    # Whether a token may see a prefix of another segment (packed rows), as by a mask it can; so the cache of a text has
    # those of all its beginnings, where a recurrent one has only that of its end.
    shares_prefixes: bool

    def __init__(self, config: Any, rngs: Any): ...

    @staticmethod
    def layer_arrays(config: Any, layer: LayerConfig) -> Any:
        """A pytree of the numbers in which layers with this mixer differ besides their parameters; they are stacked."""
        ...

    @staticmethod
    def flops(config: Any, tokens, pairs) -> Any:
        """The operations of the forward pass besides the linear maps; numbers, or arrays of rows.

        They are of so many tokens, which see `pairs` tokens in all, themselves included.
        """
        ...

    def prefill(self, x, inputs: AttentionInputs, arrays) -> tuple[jax.Array, Any]:
        """Outputs `[N,T,D]` of x `[N,T,D]`, and the caches of rows that are prompts, padded on the left.

        Where other layers share this one's, they read these caches (of `decode`, the prompt's and the row's). A
        `Passing` in their place says otherwise.
        """
        ...

    def decode(self, x, inputs: DecodeInputs, prompt, cache, arrays) -> tuple[jax.Array, Any]:
        """Outputs `[G,R*W,D]` of the next tokens x `[G,R*W,D]`, and the row caches with these tokens in them."""
        ...

    @staticmethod
    def empty_cache(prompt, rows: int, size: int) -> Any:
        """Caches with room for `size` tokens, for `rows` rows of each prompt; caches of layers may be stacked."""
        ...

    @staticmethod
    def grow_cache(cache, size: int) -> Any:
        """The row caches with room for `size` tokens; caches of layers may be stacked."""
        ...

    @staticmethod
    def prompt_cache(prompt, row, end, size: int) -> Any:
        """Prompt caches of `size` tokens: those before the place `end` of prompts with their only rows behind them.

        `row` None: of the prompts alone. Caches of layers may be stacked. It is asked of mixers that share prefixes.
        """
        ...


class Cacheless:
    """The caches of a mixer that has none for rows."""

    @staticmethod
    def empty_cache(prompt, rows: int, size: int) -> tuple[()]:
        """No row caches."""
        return ()

    @staticmethod
    def grow_cache(cache, size: int) -> tuple[()]:
        """No row caches, whatever the size."""
        return ()

    @staticmethod
    def prompt_cache(prompt, row, end, size: int) -> Any:
        """No prompt caches."""
        return ()


class NoMixer(Cacheless, nnx.Module):
    """The mixer of a layer that is a feed-forward alone: it adds nothing, and its caches are empty."""

    path = "feed_forward"  # of the stack of such layers; it has no parameters
    shares_prefixes = True

    def __init__(self, config, rngs: nnx.Rngs):
        pass

    @staticmethod
    def layer_arrays(config, layer: LayerConfig) -> tuple:
        """No arrays: layers differ in their parameters alone."""
        return ()

    @staticmethod
    def flops(config, tokens, pairs):
        """Zeros: there is nothing to compute."""
        return 0.0 * tokens

    def prefill(self, x, inputs: AttentionInputs, arrays) -> tuple[jax.Array, tuple]:
        """Zeros in the shape of x, and an empty cache."""
        return jnp.zeros_like(x), ()

    def decode(self, x, inputs: DecodeInputs, prompt, cache, arrays) -> tuple[jax.Array, tuple]:
        """Zeros in the shape of x, and an empty cache."""
        return jnp.zeros_like(x), ()
