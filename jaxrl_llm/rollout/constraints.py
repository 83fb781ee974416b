"""Constraints on completions, from texts of the configuration to tokens; host side.

Stop strings and guides become automata over bytes, and these, with the bytes of each token, automata over tokens: a
stop string is found and a guide is kept to however the text is cut into tokens. Guides are compiled by outlines-core
(Apache 2.0, no further packages, wheels for each Python and system; the DFA is that of Rust's regex-automata).
"""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxrl_llm.config import ConfigError
from jaxrl_llm.rollout.automata import NO_AUTOMATA, Automata, Automaton, packed

MOST_TRANSITIONS = 1 << 28  # states x tokens of an automaton: 32 MB of bits, some seconds of work
TOKENS_AT_ONCE = 4096
DEAD = -1
MARK = "\0"  # of the end: a letter that no text has
# What outlines-core keeps of a JSON schema; it passes over other keywords without a word.
KEYWORDS = {
    *("type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems"),
    *("enum", "const", "anyOf", "pattern", "format", "minLength", "maxLength", "$ref", "$defs", "definitions"),
    *("title", "description", "default", "examples", "$schema", "$id", "$comment"),
}


def setting_text(value: str, is_text: bool, name: str) -> str:
    """The text of a setting that is a file or its text; raises ConfigError for a file that cannot be read."""
    if is_text or not value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {' '.join(str(error).split())[:300]}") from error


class Guide(NamedTuple):
    """The form of completions: a regular expression, texts to choose from, or values of a JSON schema."""

    regex: str = ""
    choice: tuple[str, ...] = ()
    json: str = ""

    @classmethod
    def of(cls, regex: str, choice: Sequence[str], schema: str, prefix: str = "rollout.") -> "Guide":
        """The guide of three settings; a schema is a file, or its text. Raises ConfigError for a missing file."""
        text = setting_text(schema, schema.lstrip().startswith("{"), f"{prefix}structured_json")
        return cls(regex, tuple(choice), text)


class ByteAutomaton(NamedTuple):
    """Transitions of S states by bytes; state 0 is the first."""

    next: np.ndarray  # [S,256] DEAD where there is none
    found: np.ndarray  # [S,256] True where a stop string ends
    final: np.ndarray  # [S] True where a text may end


def bad_word_ids(name: str, words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token ids of each of the `words` of the setting `name`: at the start of a text, and behind a space.

    The second only where the space changes the first token and adds none, as in vLLM. Another tokenization of the same
    text is not forbidden. Raises ConfigError for a word without tokens, and without a tokenizer.
    """
    if words and tokenizer is None:
        raise ConfigError(f"{name} is {tuple(words)}, but the model has no tokenizer to read it with")
    sequences: list[tuple[int, ...]] = []
    for word in words:
        alone, behind = (tuple(tokenizer.encode(lead + word.lstrip(), add_special_tokens=False)) for lead in ("", " "))
        if not word.strip() or not alone:
            raise ConfigError(f"{name} has {word!r}, which has no tokens of its own: give words")
        sequences.append(alone)
        if behind[0] != alone[0] and len(behind) == len(alone):
            sequences.append(behind)
    return tuple(dict.fromkeys(sequences))


def check_tokens(name: str, ids: Sequence[int], vocab: int) -> None:
    """Raises ConfigError where the setting `name` has a token that is not among the model's `vocab`."""
    for token in ids:
        if not 0 <= token < vocab:
            raise ConfigError(f"{name} has token {token}, but the model's tokens are 0 to {vocab - 1}")


@functools.lru_cache(maxsize=4)  # a run's samplers of training and evaluation have the same
def build_automata(
    stop: tuple[str, ...], guide: Guide, tokenizer: Any, vocab: int, eos: tuple[int, ...], prefix: str = "rollout."
) -> Automata:
    """The automata of stop strings and of a guide for `vocab` tokens, of which `eos` end a text.

    `prefix` begins the settings' names in messages. Raises ConfigError: an empty stop string, a tokenizer whose tokens
    have no bytes, and a guide that cannot be compiled, is too large or has no text.
    """
    if "" in stop:
        raise ConfigError(f"{prefix}stop has an empty text, which ends every completion before it begins: leave it out")
    names = [f"{prefix}structured_{name}" for name, value in guide._asdict().items() if value]
    if not stop and not names:
        return NO_AUTOMATA
    ways = (f"{names[0]} needs", "leave it out") if names else (f"{prefix}stop needs", f"use {prefix}stop_token_ids")
    texts = token_bytes(tokenizer, vocab, *ways)
    automata = NO_AUTOMATA
    if stop:
        # A special token writes nothing, and leaves a text as it is; but a stop string may name it, as <|im_end|>.
        named = {
            token: entry.content.encode()
            for token, entry in tokenizer.added_tokens_decoder.items()
            if any(entry.content in text for text in stop)
        }
        searched = [named.get(token, b"") if text is None else text for token, text in enumerate(texts)]
        automata = Automata(stop=_of_tokens(stop_strings(stop), searched, f"{prefix}stop"))
    if names:
        automata = automata._replace(guide=guided(guide_bytes(guide, names[0]), texts, eos, names[0]))
    return automata


def token_bytes(tokenizer: Any, vocab: int, reader: str, instead: str) -> list[bytes | None]:
    """The bytes that each of `vocab` tokens adds to a text; None for special tokens, and for ids without a token.

    Raises ConfigError, in which `reader` needs them and one may do something `instead`, for tokenizers other than
    byte-level BPE, and those with ▁ for a space (with byte fallback).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = {} if backend is None else json.loads(backend.to_str())["decoder"] or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
    if not kinds & {"ByteLevel", "Metaspace", "ByteFallback"}:
        raise ConfigError(
            f"{reader} the bytes of each token, which the tokenizer does not tell (it decodes by "
            f"{', '.join(sorted(kinds)) or 'its own code'}): {instead}"
        )
    of_letter = {letter: byte for byte, letter in bytes_to_unicode().items()}
    special = set(tokenizer.all_special_ids)
    added = {token: entry.content for token, entry in tokenizer.added_tokens_decoder.items()}
    special |= {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    texts: list[bytes | None] = [None] * vocab
    for piece, token in tokenizer.get_vocab().items():
        if token >= vocab or token in special:
            continue
        if token in added:
            texts[token] = added[token].encode()
        elif "ByteLevel" in kinds:
            texts[token] = bytes(of_letter[letter] for letter in piece) if set(piece) <= set(of_letter) else None
        elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            texts[token] = bytes([int(piece[3:5], 16)])
        else:
            texts[token] = piece.replace("▁", " ").encode()
    return texts


def stop_strings(strings: Sequence[str]) -> ByteAutomaton:
    """The automaton that finds any of the strings in a text (Aho and Corasick, 1975); its states are beginnings."""
    patterns = [text.encode() for text in strings]
    beginnings = sorted({text[:size] for text in patterns for size in range(len(text))}, key=len)
    number = {text: state for state, text in enumerate(beginnings)}
    following = np.zeros((len(beginnings), 256), np.int32)
    found = np.zeros(following.shape, bool)
    for state, beginning in enumerate(beginnings):
        if state:  # where a byte leads no further, it goes on as the longest beginning that this one ends with
            end = next(number[beginning[i:]] for i in range(1, len(beginning) + 1) if beginning[i:] in number)
            following[state], found[state] = following[end], found[end]
        for pattern in patterns:
            if pattern.startswith(beginning) and pattern != beginning:
                longer = pattern[: len(beginning) + 1]
                found[state, longer[-1]] |= longer == pattern
                if longer in number:
                    following[state, longer[-1]] = number[longer]
    return ByteAutomaton(following, found, np.ones(len(beginnings), bool))


@functools.lru_cache(maxsize=16)
def guide_bytes(guide: Guide, name: str) -> ByteAutomaton:
    """The automaton of a guide over bytes, of all texts that match as a whole, as `re.fullmatch` has them.

    Raises ConfigError, with `name`, where it cannot be compiled.
    """
    try:
        from outlines_core import Index, Vocabulary, json_schema
    except ImportError as error:
        raise ConfigError(f'{name} needs the package outlines-core: pip install "jaxrl_llm[structured]"') from error
    try:
        pattern = re.sub(r"^\^|(?<!\\)((?:\\\\)*)\$\Z", r"\1", guide.regex)  # around a whole text they say nothing
        if guide.choice:  # letters by their code points: nothing in them is read as a pattern
            pattern = "|".join("".join(f"\\x{{{ord(letter):x}}}" for letter in text) for text in guide.choice)
        if guide.json:
            check_keywords(json.loads(guide.json), name)
            pattern = json_schema.build_regex_from_schema(guide.json)
        # Anchors elsewhere: not the same letters in escapes and classes.
        if anchor := re.search(r"\\[Az]|[\^$]", re.sub(r"\\[^Az]|\[\^?\]?(?:\\.|[^]\\])*\]", "", pattern)):
            raise ConfigError(
                f"{name} has {anchor[0]} in a pattern, but a text matches it as a whole: leave it out, or escape it "
                "where the letter is meant"
            )
        end = 256  # a token behind those that stand for bytes
        # Alone, the pattern would be left at the first match that it prefers: of yes|yes please at yes.
        index = Index(f"(?:{pattern}){MARK}", Vocabulary(end, {bytes([byte]): [byte] for byte in range(256)}))
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name} cannot be compiled: {' '.join(str(error).split())[:300]}") from error
    transitions, matched = index.get_transitions(), index.get_final_states()
    number = {index.get_initial_state(): 0}
    for state in (order := list(number)):  # which grows: what the mark leads to is behind the text
        for other in transitions.get(state, {}).values():
            if other not in number and other not in matched:
                number[other] = len(order)
                order.append(other)
    following, final = np.full((len(order), 256), DEAD, np.int32), np.zeros(len(order), bool)
    for state, own in number.items():
        row = transitions.get(state, {})
        final[own] = row.get(ord(MARK)) in matched
        for byte, other in row.items():
            following[own, byte] = number.get(other, DEAD)
    return ByteAutomaton(following, np.zeros(following.shape, bool), final)


def check_keywords(schema: Any, name: str) -> None:
    """Raises ConfigError, with the setting's `name`, for a keyword of a JSON schema that its pattern would not keep."""
    if isinstance(schema, list):
        for one in schema:
            check_keywords(one, name)
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword not in KEYWORDS:
            raise ConfigError(
                f"{name} has the keyword {keyword!r}, which becomes no pattern: leave it out, or set "
                "structured_grammar to 'start: %json {...}' with the schema in it"
            )
        if keyword in ("properties", "$defs", "definitions"):
            value = list(value.values())
        if keyword not in ("enum", "const", "default", "examples"):
            check_keywords(value, name)


def guided(automaton: ByteAutomaton, texts: Sequence[bytes | None], eos: Sequence[int], name: str) -> Automaton:
    """The automaton over tokens: those after which the text can still be completed, and the end where it may end.

    Raises ConfigError, with the setting's `name`, where the tokens form no such text.
    """
    texts = [None if text == b"" else text for text in texts]  # tokens that say nothing would never come to an end
    tokens = _of_tokens(automaton, texts, name)
    completes, before = automaton.final.copy(), None
    while before is None or (before != completes).any():  # backwards from final states
        before = completes
        completes = completes | ((tokens.next != DEAD) & completes[tokens.next]).any(-1)
    if not completes[0]:
        raise ConfigError(f"{name} allows no text that the model's tokens can form")
    following = np.where(completes[tokens.next], tokens.next, DEAD)
    # A class more, of the tokens that end the text.
    following = np.concatenate([following, np.where(automaton.final, 0, DEAD)[:, None].astype(np.int32)], axis=1)
    classes = tokens.classes.copy()
    classes[list(eos)] = following.shape[1] - 1
    return Automaton(following, classes, np.stack([packed(row[classes] != DEAD) for row in following]))


def _of_tokens(automaton: ByteAutomaton, texts: Sequence[bytes | None], name: str) -> Automaton:
    """The automaton over tokens with these bytes; None leads nowhere. Raises ConfigError where it is too large."""
    states = len(automaton.next)
    if states * len(texts) > MOST_TRANSITIONS:
        raise ConfigError(
            f"{name} has {states} states, with the model's {len(texts)} tokens {states * len(texts):,} transitions, "
            f"more than {MOST_TRANSITIONS:,}: make it simpler, with fewer and smaller bounds of repetition, or write "
            "it as structured_grammar"
        )
    # A row more, of the state from which nothing leads anywhere.
    following = np.concatenate([automaton.next, np.full((1, 256), DEAD, np.int32)])
    found = np.concatenate([automaton.found, np.zeros((1, 256), bool)])
    columns: dict[bytes, int] = {}
    kept, classes = [], np.zeros(len(texts), np.int32)
    order = sorted(range(len(texts)), key=lambda token: len(texts[token] or b""))
    for start in range(0, len(order), TOKENS_AT_ONCE):
        some = order[start : start + TOKENS_AT_ONCE]
        lengths = np.array([len(texts[token] or b"") for token in some])
        data = np.zeros((len(some), max(lengths.max(), 1)), np.uint8)
        for row, token in zip(data, some, strict=True):
            text = texts[token] or b""
            row[: len(text)] = np.frombuffer(text, np.uint8)
        reached = np.broadcast_to(np.arange(states, dtype=np.int32)[:, None], (states, len(some))).copy()
        reached[:, [texts[token] is None for token in some]] = DEAD
        ends = np.zeros(reached.shape, bool)
        for place in range(lengths.max()):
            active = np.searchsorted(lengths, place, side="right")  # the tokens from there on are longer
            states_now, bytes_now = reached[:, active:], data[active:, place]
            ends[:, active:] |= found[states_now, bytes_now]
            reached[:, active:] = following[states_now, bytes_now]
        transitions = np.where(ends, ~reached, reached).T
        for token, column in zip(some, np.ascontiguousarray(transitions), strict=True):
            key = column.tobytes()
            if key not in columns:
                columns[key] = len(kept)
                kept.append(column)
            classes[token] = columns[key]
    return Automaton(np.stack(kept, axis=1), classes)
