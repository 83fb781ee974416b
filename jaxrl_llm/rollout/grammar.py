"""Completions of a context-free grammar: without a table, the host computes the tokens that may follow each row.

The engine then decodes one step at a time, and waits for the host before each. The grammar is followed by llguidance
(MIT, no further packages, one wheel for all Pythons); for what a table holds see constraints.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.rollout.automata import Automaton, packed
from jaxrl_llm.rollout.constraints import setting_text, token_bytes
from jaxrl_llm.rollout.scheduler import IDLE, SlotGrid


class Vocabulary:
    """The tokens of a model as llguidance reads them; `eos` end a text.

    Raises ConfigError, with the setting's `name`: a tokenizer whose tokens have no bytes, and without the package.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos: Sequence[int], name: str):
        package = _llguidance(name)
        texts = token_bytes(tokenizer, vocab, f"{name} needs", "leave it out")
        wrapped = package.TokenizerWrapper(_Tokenizer(texts, eos[0], tokenizer))
        self.tokenizer = package.LLTokenizer(wrapped, n_vocab=vocab, eos_token=list(eos))
        forbidden = np.array([text is None or text == b"" for text in texts])
        forbidden[list(eos)] = False
        self.size, self.permitted = vocab, packed(~forbidden)


class Grammar:
    """A compiled grammar in Lark's syntax; raises ConfigError, with the setting's `name`, where that cannot be.

    llguidance computes states as a row comes to them, and bounds what a grammar may cost; `step_fuel` bounds what each
    step in it may.
    """

    def __init__(self, text: str, vocabulary: Vocabulary, name: str, step_fuel: int = 200_000):
        package = _llguidance(name)
        matcher, limits = package.LLMatcher, package.LLParserLimits(step_lexer_fuel=step_fuel)
        self.vocabulary = vocabulary
        self.start = matcher(vocabulary.tokenizer, matcher.grammar_from_lark(text), log_level=0, limits=limits)
        if problem := self.start.get_error():
            raise ConfigError(f"{name} cannot be compiled: {' '.join(problem.split())[:300]}")

    def allowed(self, matcher: Any) -> np.ndarray:
        """The bits `[V/32]` uint32 of the tokens that may follow; raises ConfigError where there are none."""
        bits = np.frombuffer(matcher.compute_bitmask(), "<u4")[: len(self.vocabulary.permitted)]
        bits = bits & self.vocabulary.permitted
        if matcher.is_error():  # whose bits are those of the end
            problem = " ".join(matcher.get_error().split())[:200]
            raise ConfigError(f"the grammar is too large to be followed, or is left ({problem}); give a simpler one")
        if not bits.any():
            raise ConfigError(
                f"the grammar leaves no token to go on with ({matcher.get_error() or matcher.stop_reason()}): it has "
                "texts that the model's tokens cannot form"
            )
        return bits


def build_grammar(text: str, tokenizer: Any, vocab: int, eos: Sequence[int], name: str) -> Grammar | None:
    """The grammar of a setting, a file or its text (which has `:` in its rules); None where it is not set.

    In Lark's syntax, or EBNF as GBNF writes it. Raises ConfigError as `Vocabulary` and `Grammar` do.
    """
    text = setting_text(text, ":" in text, name)
    if not text:
        return None
    vocabulary = Vocabulary(tokenizer, vocab, eos, name)
    return Grammar(as_lark(text, name), vocabulary, name)


def as_lark(text: str, name: str) -> str:
    """A grammar in Lark's syntax, of one in that or in GBNF. Raises ConfigError, with the setting's `name`."""
    _llguidance(name)
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # its errors are of no common type
        raise ConfigError(f"{name} cannot be compiled: {' '.join(str(error).split())[:300]}") from error


def pattern_as_lark(pattern: str, name: str) -> str:
    """A regular expression as a grammar in Lark's syntax. Raises ConfigError, with the setting's `name`."""
    return f"start: /{_llguidance(name).regex_to_lark(pattern)}/"


def _llguidance(name: str) -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(f'{name} needs the package llguidance: pip install "jaxrl_llm[structured]"') from error
    return llguidance


class GrammarRow:
    """The state of a row in a grammar: `bits` `[V/32]` uint32 are the tokens that may follow."""

    def __init__(self, grammar: Grammar):
        self.grammar, self.matcher = grammar, grammar.start.deep_copy()
        self.bits = grammar.allowed(self.matcher)

    def consume(self, tokens: Sequence[int]) -> None:
        """Goes on by tokens, none of which ends the text; raises ConfigError where nothing can follow them."""
        self.matcher.consume_tokens(list(tokens))
        self.bits = self.grammar.allowed(self.matcher)


class GrammarRows:
    """The states in a grammar of the `rows` rows of a rollout."""

    def __init__(self, grammar: Grammar, rows: int):
        self.grammar = grammar
        self.rows: list[GrammarRow | None] = [None] * rows
        self.lengths = np.zeros(rows, np.int64)  # tokens that each has been told

    def start(self) -> Automaton:
        """The tokens that every row may begin with, in the place of a guide's table: one state."""
        return _table(self.grammar.allowed(self.grammar.start)[None], self.grammar.vocabulary.size)

    def next(self, grid: SlotGrid, newest, lengths, live) -> Automaton:
        """The tokens that may come next in each slot: a state for each, in the order of slots.

        newest `[G,R]` is the last token of each row, of so many `lengths`; `live` rows go on. They are asked for after
        each token.
        """
        numbers = grid.numbers(len(self.rows)).ravel()
        newest, lengths, live = (np.asarray(x).ravel() for x in (newest, lengths, live))
        vocabulary = self.grammar.vocabulary
        allowed = np.zeros((len(numbers), len(vocabulary.permitted)), np.uint32)
        for slot, row in enumerate(numbers):
            if row == IDLE or not live[slot]:
                continue
            in_grammar = self.rows[row] = self.rows[row] or GrammarRow(self.grammar)
            if self.lengths[row] < lengths[slot]:
                in_grammar.consume([int(newest[slot])])
                self.lengths[row] = lengths[slot]
            allowed[slot] = in_grammar.bits
        return _table(allowed, vocabulary.size)


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
