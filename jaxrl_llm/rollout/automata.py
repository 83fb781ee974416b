"""Automata over tokens, as tables on the devices: they find stop strings, and tell which tokens a guide allows.

A row has one number for each automaton, its state after the text so far; a step reads a row of the table. A turn starts
in state 0, as automata do not read observation tokens.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Automaton(NamedTuple):
    """The transitions of S states by tokens of V, which fall into classes that no state tells apart.

    A transition is the next state; below 0 it is none (a guide's), or ~state where a stop string ends in the token.
    """

    next: Any  # [S, classes]
    classes: Any  # [V]
    allowed: Any = None  # [S, V/32] uint32, a bit for each token that a guide allows, the end of text among them

    def step(self, states, tokens):
        """The transitions of tokens, an array of the shape of the states."""
        return self.next[states, self.classes[tokens]]

    def allows(self, states, vocab: int):
        """Booleans `[..., V]`: the tokens that may follow in these states `[...]`, of a vocabulary of `vocab`."""
        return unpacked(self.allowed[states], vocab)

    def before(self, states, proposed, observed):
        """The states `[G,R,W]` in front of W draws, from those `[G,R]` in front of the first.

        `proposed` `[G,R,W-1]` are the tokens between the draws, some of them `observed`.
        """
        found = [states]
        for number in range(proposed.shape[-1]):
            found.append(self.behind(self.step(found[-1], proposed[..., number]), observed[..., number]))
        return jnp.stack(found, axis=-1)

    @staticmethod
    def behind(transitions, observed):
        """The states that transitions lead to, and 0 behind observed tokens.

        A transition that there is not belongs to a wrong proposal, and where it leads is never read.
        """
        return jnp.where(observed, 0, jnp.maximum(transitions, ~transitions))


def packed(allowed: np.ndarray) -> np.ndarray:
    """Booleans `[V]` as bits of uint32 words `[ceil(V/32)]`, the first token in the lowest bit; see `unpacked`."""
    return np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little").view("<u4")


def unpacked(words, vocab: int):
    """The booleans `[..., V]` that the bits of uint32 words `[..., V/32]` are."""
    bits = words[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab] == 1


class Automata(NamedTuple):
    """The automata of an engine; None is off, and takes no part in any program."""

    stop: Automaton | None = None
    guide: Automaton | None = None


NO_AUTOMATA = Automata()
