"""Rotary positions: the inverse frequencies under each scaling, and the rotation of queries and keys."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import ConfigError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


class Rope(NamedTuple):
    """Rotary positions (arXiv 2104.09864) of base `theta`, scaled to longer rows as `kind` says.

    linear: all frequencies divided by `factor` (arXiv 2306.15595). dynamic: rows longer than `original_max_positions`
    have a larger base, which depends on their length. llama3: low frequencies divided, high ones kept (arXiv
    2407.21783). yarn: the same, between two numbers of turns, and cosines and sines times `attention_factor` (arXiv
    2309.00071). longrope: each frequency divided by a number of its own, of `long_factors` in rows longer than
    `original_max_positions` and of `short_factors` in others, and cosines and sines times `attention_factor` (arXiv
    2402.13753). proportional: the highest frequencies alone, that `fraction` of all, divided by `factor`; dimensions of
    the others are not rotated.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # longrope too
    truncate: bool = True
    mscale_all_dim: float = 0.0  # of attention scores, where the layer takes them; see latent_attention.score_scale
    fraction: float = 1.0  # proportional
    short_factors: tuple[float, ...] = ()  # longrope, one of each frequency
    long_factors: tuple[float, ...] = ()

    @property
    def changes_beyond(self) -> int | None:
        """The length of rows beyond which every token is rotated by how long its row is; None where none is."""
        changes = self.kind == "dynamic" or (self.kind == "longrope" and self.short_factors != self.long_factors)
        return self.original_max_positions if changes else None


def frequencies(rope: Rope, size: int) -> np.ndarray:
    """Inverse frequencies `[size/2]` in fp32, of `size` rotated dimensions; those of short rows where rows differ."""
    inv_freq = (1.0 / rope.theta ** (np.arange(0, size, 2, dtype=np.float32) / size)).astype(np.float32)
    if rope.kind == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.kind == "longrope":
        inv_freq = inv_freq / np.array(rope.short_factors, np.float32)
    elif rope.kind == "proportional":
        rotated = np.arange(size // 2) < int(rope.fraction * size // 2)
        inv_freq = np.where(rotated, inv_freq / rope.factor, 0.0)
    elif rope.kind == "llama3":
        above = rope.original_max_positions * inv_freq / (2 * math.pi) - rope.low_freq_factor
        width = rope.high_freq_factor - rope.low_freq_factor
        kept = np.clip(above / width, 0.0, 1.0) if width else np.where(above > 0, 1.0, 0.0)  # a step in Llama 4 Scout
        inv_freq = _between(inv_freq, rope.factor, kept)
    elif rope.kind == "yarn":
        inv_freq = _between(inv_freq, rope.factor, 1 - _yarn_ramp(rope, size))
    return inv_freq.astype(np.float32)


def _between(inv_freq, factor: float, kept):
    """Frequencies divided by `factor` where `kept` is 0, as they are where it is 1."""
    return (1 - kept) * inv_freq / factor + kept * inv_freq


def _yarn_ramp(rope: Rope, size: int) -> np.ndarray:
    """0 for frequencies of more than `beta_fast` turns in the original length, 1 below `beta_slow`, linear between."""

    def dimension(turns: float) -> float:
        return size * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 * (low == high)  # as in transformers: no division by 0
    return np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)


def dynamic_frequencies(rope: Rope, size: int, lengths):
    """Inverse frequencies `[..., size/2]` of dynamic scaling and longrope, for rows of `lengths` `[...]` tokens.

    Of dynamic scaling the base is theta x (factor x length / original - (factor - 1)) ** (size / (size - 2)), for rows
    longer than that.
    """
    original = rope.original_max_positions
    if rope.kind == "longrope":
        short, long = frequencies(rope, size), frequencies(rope._replace(short_factors=rope.long_factors), size)
        return jnp.where(lengths[..., None] > original, long, short)
    longer = rope.factor * jnp.maximum(lengths, original) / original - (rope.factor - 1)
    theta = rope.theta * longer ** (size / (size - 2))
    return 1.0 / theta[..., None] ** (np.arange(0, size, 2, dtype=np.float32) / size)


def long_row_frequencies(rope: Rope, size: int, segments, positions):
    """Inverse frequencies `[N,T,size/2]` of each token's own document; None unless its length may change them."""
    if rope.changes_beyond is None or segments.shape[1] <= rope.changes_beyond:
        return None
    same = segments[:, :, None] == segments[:, None, :]
    lengths = jnp.where(same, positions[:, None, :], 0).max(-1) + 1
    return dynamic_frequencies(rope, size, lengths)


def check_length(rope: Rope, length: int) -> None:
    """Raises ConfigError where rows of up to `length` tokens cannot be sampled one token at a time.

    With dynamic scaling and longrope the positions of all earlier tokens change as a row grows beyond the original
    length.
    """
    if rope.changes_beyond is not None and length > rope.changes_beyond:
        other = {
            "longrope": "the numbers of its long_factor as its short_factor too, with which rows of every length "
            "are rotated alike, as vLLM does"
        }.get(rope.kind, "rope_type yarn or linear")
        raise ConfigError(
            f"rope_type {rope.kind} rotates every token anew as a row grows beyond {rope.changes_beyond} tokens: "
            f"rows of up to {length} cannot be sampled: use shorter ones (rollout.max_prompt_length, "
            f"rollout.max_completion_length), or {other} in config.json (model.overrides)"
        )


def rotate(x, positions, inv_freq, scale=1.0, interleaved: bool = False):
    """x `[..., t, h, d]` rotated at positions `[..., t]`: its first r dimensions, as two halves; the others stay.

    Positions `[..., t, r/2]` are those of each frequency. inv_freq is `[r/2]`, or `[..., t, r/2]` with a set for each
    token; a frequency of 0 rotates nothing. With `interleaved` neighbours are rotated together: dimensions 2i and
    2i + 1, not i and i + r/2. The rotated dimensions are multiplied by `scale`. Angles, cosines and sines are fp32.
    """
    size = 2 * inv_freq.shape[-1]
    if not size:
        return x
    positions = positions if positions.ndim == x.ndim - 1 else positions[..., None]
    angles = (positions.astype(jnp.float32) * inv_freq)[..., None, :]
    cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    rotated = x[..., :size].astype(jnp.float32)
    x1, x2 = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else jnp.split(rotated, 2, axis=-1)
    rotated = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    if interleaved:
        rotated = [jnp.stack(rotated, axis=-1).reshape(*x.shape[:-1], size)]
    rest = [x[..., size:].astype(jnp.float32)] if size < x.shape[-1] else []
    return jnp.concatenate(rotated + rest, axis=-1).astype(x.dtype)
