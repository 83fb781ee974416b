"""Prompts that were computed and stay for the next request: system prompts, siblings, earlier turns of a conversation.

A request whose beginning is that of a kept text computes what is behind it alone, by the program that reads observation
tokens. The least recently used texts go when there is no more room.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.mixers.mixer import DecodeInputs
from jaxrl_llm.rollout.engine import READ, Engine, first_tokens
from jaxrl_llm.rollout.sampling import RowSampling
from jaxrl_llm.rollout.slots import Prompts, Rows

LEAST = 64  # tokens of a text that is kept, and of a beginning that is used
MOST = 512  # texts, each of which is compared with every prompt


class Prefix(NamedTuple):
    """A text with the caches of one prompt, padded on the left to `width` tokens."""

    tokens: np.ndarray
    adapter: str
    cache: Any
    width: int

    @property
    def size(self) -> int:
        """Bytes of the caches."""
        return sum(x.nbytes for x in jax.tree.leaves(self.cache))


class PrefixCache:
    """The kept texts, of up to `most_bytes` together."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.bytes = most_bytes, 0
        self._kept: list[Prefix] = []  # the most recently used is the last

    def find(self, prompt: Sequence[int], adapter: str) -> tuple[Prefix, int] | None:
        """The kept text that has most of the prompt's beginning, and so many tokens: at least half of them, not all."""
        tokens, best = np.asarray(prompt, np.int32), (0, -1)
        for number, prefix in enumerate(self._kept):
            if prefix.adapter == adapter:
                best = max(best, (min(_common(prefix.tokens, tokens), len(tokens) - 1), number))
        common, number = best
        if common < max(LEAST, len(tokens) / 2):
            return None
        self._kept.append(self._kept.pop(number))
        return self._kept[-1], common

    def wants(self, tokens: Sequence[int], adapter: str) -> bool:
        """True where a text is worth keeping: long enough, and no beginning of one that is kept."""
        given = np.asarray(tokens, np.int32)
        return bool(self.most_bytes) and len(given) >= LEAST and not any(
            prefix.adapter == adapter and _common(prefix.tokens, given) == len(given) for prefix in self._kept
        )  # fmt: skip

    def add(self, prefix: Prefix) -> None:
        """Keeps a text in the place of its beginnings, and of those that were not used for longest."""
        if prefix.size > self.most_bytes:
            return
        self._kept = [
            other
            for other in self._kept
            if other.adapter != prefix.adapter or _common(other.tokens, prefix.tokens) < len(other.tokens)
        ]
        self._kept.append(prefix)
        self.bytes = sum(other.size for other in self._kept)
        while self.bytes > self.most_bytes or len(self._kept) > MOST:
            self.bytes -= self._kept.pop(0).size

    def forget(self, adapter: str) -> None:
        """Forgets the texts of an adapter, as its weights are others."""
        self._kept = [prefix for prefix in self._kept if prefix.adapter != adapter]
        self.bytes = sum(prefix.size for prefix in self._kept)

    def clear(self) -> None:
        """Forgets all, as their weights are others."""
        self._kept, self.bytes = [], 0


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """The length of the common beginning."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
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
    return first_tokens(engine, whole, prompts, segments, model.logits(hidden[:, 0]), keys, sampling=sampling)
