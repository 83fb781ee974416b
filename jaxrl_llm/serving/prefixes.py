"""Prompts that were computed and stay for the next request: system prompts, siblings, earlier turns of a conversation.

A request whose beginning is that of a kept text computes what is behind it alone, by the program that reads observation
tokens. The least recently used texts go when there is no more room.
"""

import bisect
import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.mixers.mixer import DecodeInputs
from jaxrl_llm.rollout.engine import READ, Engine, first_tokens
from jaxrl_llm.rollout.sampling import RowSampling
from jaxrl_llm.rollout.slots import Prompts, Rows

ID = 4  # bytes of a token, an int32
LEAST = 64  # tokens of a text that is kept, and of a beginning that is used


class Prefix(NamedTuple):
    """A text with the caches of one prompt, padded on the left to `width` tokens."""

    tokens: np.ndarray  # int32
    adapter: str
    cache: Any
    width: int

    @property
    def size(self) -> int:
        """The bytes that the caches take on the devices."""
        return sum(x.nbytes for x in jax.tree.leaves(self.cache))


class PrefixCache:
    """The kept texts, of up to `most_bytes` together, none of them the beginning of another.

    In the order of texts those that have most of a prompt's beginning stand beside its place: however many are kept,
    two are compared with it.
    """

    def __init__(self, most_bytes: int):
        self.most_bytes, self.bytes = most_bytes, 0
        self._kept: OrderedDict[tuple[str, bytes], Prefix] = OrderedDict()  # the most recently used is the last
        self._order: list[tuple[str, bytes]] = []  # their keys

    def find(self, prompt: Sequence[int], adapter: str) -> tuple[Prefix, int] | None:
        """The kept text that has most of the prompt's beginning, and so many tokens: at least half of them, not all."""
        key = adapter, np.asarray(prompt, np.int32).tobytes()
        at = bisect.bisect_left(self._order, key)
        beside = [near for near in self._order[max(at - 1, 0) : at + 1] if near[0] == adapter]
        common, found = max(((_common(near[1], key[1]), near) for near in beside), default=(0, key))
        common = min(common, len(prompt) - 1)
        if common < max(LEAST, len(prompt) / 2):
            return None
        self._kept.move_to_end(found)
        return self._kept[found], common

    def wants(self, tokens: Sequence[int], adapter: str) -> bool:
        """True where a text is worth keeping: long enough, and no beginning of one that is kept."""
        key = adapter, np.asarray(tokens, np.int32).tobytes()
        at = bisect.bisect_left(self._order, key)
        goes_on = any(near[0] == adapter and near[1].startswith(key[1]) for near in self._order[at : at + 1])
        return bool(self.most_bytes) and len(tokens) >= LEAST and not goes_on

    def add(self, prefix: Prefix) -> None:
        """Keeps a text that is wanted, in the place of its beginning, and of those that were not used for longest."""
        if prefix.size > self.most_bytes:
            return
        key = prefix.adapter, prefix.tokens.tobytes()
        at = bisect.bisect_left(self._order, key)
        for near in self._order[max(at - 1, 0) : at]:
            if near[0] == prefix.adapter and key[1].startswith(near[1]):
                self._let_go(near)
        bisect.insort(self._order, key)
        self._kept[key] = prefix
        self.bytes += prefix.size
        while self.bytes > self.most_bytes:
            self._let_go(next(iter(self._kept)))

    def forget(self, adapter: str | None = None) -> None:
        """Forgets the texts of an adapter, or all, as the weights are others."""
        for key in [key for key in self._order if adapter in (None, key[0])]:
            self._let_go(key)

    def _let_go(self, key: tuple[str, bytes]) -> None:
        self.bytes -= self._kept.pop(key).size
        del self._order[bisect.bisect_left(self._order, key)]


def _common(one: bytes, other: bytes) -> int:
    """The tokens of the common beginning of two texts."""
    size = min(len(one), len(other)) // ID
    differ = np.frombuffer(one, np.int32, size) != np.frombuffer(other, np.int32, size)
    return int(differ.argmax()) if differ.any() else size


@functools.partial(jax.jit, static_argnames=("engine", "size"))
def kept_cache(engine: Engine, prompts: Any, rows: Any, place, row, end, size: int) -> Any:
    """Caches of `size` tokens, those that end before `end`: of the prompt at `place`, or of its row `row` too."""
    axis = engine.decoder.prompt_axis
    prompts, rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, place, 1, axis), (prompts, rows))
    rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis + 1), rows)
    return engine.decoder.prompt_caches(prompts, rows, end, size)


@functools.partial(jax.jit, static_argnames=("engine", "width"))
def resume(
    engine: Engine, params, cache, held, common, suffix, prompts, segments, keys, sampling: RowSampling, width: int
) -> tuple[Prompts, Rows]:
    """`prefill` of one prompt `[1,P]`, of which the first `common` tokens are those of a kept text.

    `cache` are the kept caches, of `held` tokens and of `width`; `suffix` `[1,C]` are the tokens behind the common
    ones, padded on the right.
    """
    model, count = engine.decoder.bind(params), (segments != 0).sum() - common
    begin = engine.decoder.prompt_caches(cache, tuple(None for _ in cache), width - held + common, width)
    mask = (jnp.arange(width) >= width - common)[None]
    rows = engine.decoder.empty_caches(begin, 1, suffix.shape[1])

    def read(number, state):
        rows, start = state[0], number * READ
        tokens = jax.lax.dynamic_slice_in_dim(suffix, start, READ, 1)
        inputs = DecodeInputs((common + start + jnp.arange(READ))[None], mask, jnp.full((1, 1), start))
        hidden, rows, _ = model.decode(tokens, inputs, begin, rows)
        return rows, jax.lax.dynamic_slice_in_dim(hidden, jnp.clip(count - 1 - start, 0, READ - 1), 1, 1)

    hidden = jnp.zeros((1, 1, engine.net.config.outer_width), engine.decoder.config.dtype)
    rows, hidden = jax.lax.fori_loop(0, (count + READ - 1) // READ, read, (rows, hidden))
    whole = engine.decoder.prompt_caches(begin, rows, width + count, prompts.shape[1])
    return first_tokens(engine, whole, prompts, segments, model.logits(hidden[:, 0]), keys, sampling)
