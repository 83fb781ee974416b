"""Completions of a context-free grammar, which no table holds: the host computes the tokens that may follow each row.

The engine then decodes one step at a time, and waits for the host before each. The grammar is followed by llguidance
(MIT, no further packages, one wheel for all Pythons); for what a table holds see constraints.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.rollout.automata import Automaton
from jaxrl_llm.rollout.constraints import setting_text, token_bytes
from jaxrl_llm.rollout.scheduler import IDLE, SlotGrid


class Grammar:
    """A grammar for a model's tokens, of which `eos` end a text: in Lark's syntax, or EBNF as GBNF writes it.

    Raises ConfigError, with the setting's `name`: a grammar that cannot be compiled, a tokenizer whose tokens have no
    bytes, and without the package.
    """

    def __init__(self, text: str, tokenizer: Any, vocab: int, eos: Sequence[int], name: str):
        try:
            from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
            from llguidance.gbnf_to_lark import any_to_lark
        except ImportError as error:
            raise ConfigError(f"{name} needs the package llguidance: pip install jaxrl_llm[structured]") from error
        texts = token_bytes(tokenizer, vocab)
        wrapped = _Tokenizer(texts, eos[0], tokenizer)
        self.tokenizer = LLTokenizer(TokenizerWrapper(wrapped), n_vocab=vocab, eos_token=list(eos))
        try:
            self.text = LLMatcher.grammar_from_lark(any_to_lark(text))
            self.start = LLMatcher(self.tokenizer, self.text)
            problem = self.start.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            raise ConfigError(f"{name} cannot be compiled: {' '.join(problem.split())[:300]}")
        self.forbidden = np.array([text is None or text == b"" for text in texts])
        self.forbidden[list(eos)] = False

    def allowed(self, matcher: Any) -> np.ndarray:
        """The bits `[V/32]` uint32 of the tokens that may follow; raises ConfigError where there are none."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        kept = np.unpackbits(bits, bitorder="little")[: len(self.forbidden)].astype(bool) & ~self.forbidden
        if not kept.any():
            raise ConfigError(
                f"the grammar leaves no token to go on with ({matcher.get_error() or matcher.stop_reason()}): it has "
                "texts that the model's tokens cannot form"
            )
        padded = np.pad(kept, (0, -len(kept) % 32))
        return np.packbits(padded, bitorder="little").view("<u4")


def build_grammar(text: str, tokenizer: Any, vocab: int, eos: Sequence[int], name: str) -> Grammar | None:
    """The grammar of a setting, a file or its text (which has `:` in its rules); None where it is not set."""
    text = setting_text(text, ":" in text, name)
    return Grammar(text, tokenizer, vocab, eos, name) if text else None


class GrammarRows:
    """How far each of `rows` rows of a rollout is in a grammar."""

    def __init__(self, grammar: Grammar, rows: int):
        self.grammar = grammar
        self.matchers: list[Any] = [None] * rows
        self.bits = np.zeros((rows, -(-len(grammar.forbidden) // 32)), np.uint32)
        self.lengths = np.zeros(rows, np.int64)  # tokens that each has been told

    def start(self) -> Automaton:
        """What the first token of every row may be, in the place of a guide's table: one state."""
        return _table(self.grammar.allowed(self.grammar.start)[None], len(self.grammar.forbidden))

    def next(self, grid: SlotGrid, newest, lengths, live) -> Automaton:
        """What the next token of each slot may be: a state for each, in the order of slots.

        newest `[G,R]` is the last token of each row, of so many `lengths`; `live` rows go on. They are asked for after
        each token.
        """
        numbers = grid.numbers(len(self.matchers)).ravel()
        newest, lengths, live = (np.asarray(x).ravel() for x in (newest, lengths, live))
        allowed = np.zeros((len(numbers), self.bits.shape[1]), np.uint32)
        for slot, row in enumerate(numbers):
            if row == IDLE or not live[slot]:
                continue
            if self.lengths[row] < lengths[slot]:
                matcher = self.matchers[row] = self.matchers[row] or self.grammar.start.deep_copy()
                matcher.consume_token(int(newest[slot]))
                self.bits[row], self.lengths[row] = self.grammar.allowed(matcher), lengths[slot]
            allowed[slot] = self.bits[row]
        return _table(allowed, len(self.grammar.forbidden))


def _table(allowed: np.ndarray, vocab: int) -> Automaton:
    """States that allow these tokens; no transition leads anywhere, as the host says the next ones."""
    return Automaton(np.zeros((len(allowed), 1), np.int32), np.zeros(vocab, np.int32), allowed)


class _Tokenizer:
    """The tokens as llguidance reads them."""

    def __init__(self, texts: Sequence[bytes | None], eos: int, tokenizer: Any):
        self.eos_token_id, self.bos_token_id = eos, None
        self.special_token_ids = [token for token, text in enumerate(texts) if not text]
        self.tokens = [text or b"\xff<%d>" % token for token, text in enumerate(texts)]  # \xff is in no text
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
