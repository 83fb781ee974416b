"""Stop strings and guided decoding: the text decides, however tokens cut it."""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, StopStringCriteria
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout.automata import NO_AUTOMATA
from jaxrl_llm.rollout.constraints import Guide, build_automata, token_bytes
from jaxrl_llm.rollout.grammar import build_grammar
from jaxrl_llm.rollout.multi_turn import TurnServer
from jaxrl_llm.rollout.sampling import SamplingParams
from tests.models.decoding import trainer_logps
from tests.rollout.test_engine import CONFIG, ENGINE, generate
from tests.rollout.test_multi_turn import Echo, sample_rows

PIECES = (*"abc", "ab", "bc", "abc", "ca", *'{}":12', '{"', '":', "é", "Ã", "©", " a", " ", "\n")
END, SPECIAL, VOCAB = 21, 22, 29  # ids 23 to 28 are no tokens
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


def byte_level_tokenizer():
    """Pieces of one letter and more; é is a token of two bytes, and Ã and © are its bytes alone."""
    letters = bytes_to_unicode()
    vocab = {}
    for token, piece in enumerate(PIECES):
        text = bytes([{"Ã": 0xC3, "©": 0xA9}[piece]]) if piece in "Ã©" else piece.encode()
        vocab["".join(letters[byte] for byte in text)] = token
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<end>", "additional_special_tokens": ["<special>"]}
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    assert found.convert_tokens_to_ids(["<end>", "<special>"]) == [END, SPECIAL]
    return found


TOKENIZER = byte_level_tokenizer()
NET = Net(CONFIG)
PLAIN = dataclasses.replace(ENGINE, eos=(END,), max_completion_length=16, chunk=5)


@pytest.fixture(scope="module")
def params():
    return jax.jit(NET.init)(jax.random.key(0))


READS = "this needs", "leave it out"
TEXTS = token_bytes(TOKENIZER, VOCAB, *READS)


def text_of(ids) -> str:
    return b"".join(TEXTS[token] or b"" for token in ids).decode(errors="replace")


def constrained(stop=(), eos=(END,), sampling=PLAIN.sampling, **guide):
    automata = build_automata(stop, Guide(**guide), TOKENIZER, VOCAB, eos)
    return dataclasses.replace(PLAIN, automata=automata, eos=eos, sampling=sampling)


def completions(rollout, width):
    return [row[width:][:length].tolist() for row, length in zip(rollout.tokens, rollout.lengths, strict=True)]


def test_bytes_of_tokens():
    assert TEXTS[:6] == [b"a", b"b", b"c", b"ab", b"bc", b"abc"]
    assert TEXTS[15:19] == ["é".encode(), b"\xc3", b"\xa9", b" a"]
    assert TEXTS[END] is TEXTS[SPECIAL] is TEXTS[28] is None
    words = Tokenizer(models.BPE({"▁a": 0, "<0x0A>": 1, "b": 2}, []))
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=words), 4, *READS) == [b" a", b"\n", b"b", None]
    words.decoder = decoders.WordPiece()
    for guide, message in (
        (Guide(), "stop needs .*decodes by WordPiece.*: use stop_token_ids$"),
        (Guide(regex="a"), "structured_regex needs .*decodes by WordPiece.*: leave it out$"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_automata(("a",), guide, PreTrainedTokenizerFast(tokenizer_object=words), 4, (), "")


STOPS = (("ab",), ("bca", "cc"), ("aab", "ab1"), ("é",), ("}",))


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_a_stop_string_is_found_where_transformers_finds_it(stop):
    """In random texts, after each token: the same text is complete, whatever tokens it is cut into."""
    rng = np.random.default_rng(0)
    automaton = build_automata(stop, Guide(), TOKENIZER, VOCAB, (END,)).stop
    criteria = StopStringCriteria(TOKENIZER, list(stop))
    found = 0
    for _ in range(40):
        ids = rng.integers(0, 16, 12)
        state = 0
        for place, token in enumerate(ids):
            entry = int(automaton.step(state, token))
            before, text = (b"".join(TEXTS[token] or b"" for token in ids[:end]) for end in (place, place + 1))
            here = [text.find(x.encode(), max(len(before) - len(x.encode()) + 1, 0)) for x in stop]
            assert (entry < 0) == (max(here) >= 0), (text, before)
            theirs = bool(criteria(torch.tensor([ids[: place + 1].tolist()]), None)[0])
            if stop != ("é",):  # letters of two bytes are unknown there
                assert (entry < 0) == theirs, (text, before)
            found += entry < 0
            state = max(entry, ~entry)
    assert found >= 5


def test_a_special_token_that_a_stop_string_names():
    """It ends a text as it does in transformers; others are no part of a text, which goes on behind them."""
    criteria = StopStringCriteria(TOKENIZER, ["b<special>"])
    for stop, ids, found in (
        (("b<special>",), (3, SPECIAL), True),  # ab, <special>
        (("b<special>",), (0, SPECIAL), False),
        (("<special>", "zz"), (SPECIAL,), True),
        (("ab",), (0, SPECIAL, 1), True),
        (("special", "<"), (0, SPECIAL, END), False),
    ):
        automaton, state = build_automata(stop, Guide(), TOKENIZER, VOCAB, ()).stop, 0
        for token in ids:
            entry = int(automaton.step(state, token))
            state = max(entry, ~entry)
        assert (entry < 0) == found, (stop, ids)
        if stop == ("b<special>",):
            assert bool(criteria(torch.tensor([ids]), None)[0]) == found


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"slots": 4, "speculative_tokens": 2}], ids=str)
def test_a_row_ends_with_the_token_that_completes_a_stop_string(params, changes):
    rollout, width = generate(dataclasses.replace(PLAIN, eos=()), params, PROMPTS)
    endless = completions(rollout, width)
    rollout, _ = generate(dataclasses.replace(constrained(("ab", "c"), eos=()), **changes), params, PROMPTS)
    ended = 0
    for number, (row, longer) in enumerate(zip(completions(rollout, width), endless, strict=True)):
        assert longer[: len(row)] == row
        stops = [place for place in range(16) if re.search("ab|c", text_of(longer[: place + 1]))]
        assert len(row) == (stops[0] + 1 if stops else 16)
        assert rollout.finished[number] == bool(stops)
        ended += bool(stops)
    assert ended > 0
    late, _ = generate(constrained(("ab", "c"), eos=(), sampling=SamplingParams(min_tokens=9)), params, PROMPTS)
    assert late.lengths.min() >= 9


GUIDES = {
    "regex": ({"regex": "(ab|c{2,3})+é?1"}, "(ab|c{2,3})+é?1"),
    "choice": ({"choice": ("abc", "a.c", "ca b", "é")}, r"abc|a\.c|ca b|é"),
    "json": ({"json": json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})}, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_guided_rows_follow_their_guide(params, name):
    pytest.importorskip("outlines_core")
    guide, pattern = GUIDES[name]
    engine = constrained(sampling=SamplingParams(0.9, repetition_penalty=1.1, frequency_penalty=0.4), **guide)
    rollout, width = generate(engine, params, PROMPTS)
    texts = [text_of(row) for row in completions(rollout, width)]
    assert len(set(texts)) > 1 and rollout.finished.mean() > 0.5
    for text, row, finished in zip(texts, completions(rollout, width), rollout.finished, strict=True):
        if finished:
            assert row[-1] == END
            assert json.loads(text)["a"] in (1, 2) if pattern is None else re.fullmatch(pattern, text)
    # The trainer's log-probs, over the whole vocabulary; the same rows when they move, and with speculative tokens.
    inputs = Inputs(jnp.asarray(rollout.tokens), jnp.asarray(rollout.segments), prompt_width=width)
    logps, _ = trainer_logps(NET, params, inputs, 0.9)
    np.testing.assert_allclose(rollout.sample_logps, logps * rollout.mask, atol=1e-4)
    other, _ = generate(dataclasses.replace(engine, slots=4, speculative_tokens=2), params, PROMPTS)
    np.testing.assert_array_equal(other.tokens, rollout.tokens)


def test_tables_allow_what_the_pattern_allows():
    """Of every text of up to four tokens: it can go on to a match, by a search among longer texts."""
    pytest.importorskip("outlines_core")
    pattern = "a(bc|b1)?é"
    guide = constrained(regex=pattern).automata.guide
    whole = ["aé".encode(), "abcé".encode(), "ab1é".encode()]
    pending, seen = [(0, b"")], 0
    while pending:
        state, text = pending.pop()
        allowed = np.asarray(guide.allows(np.int32(state), VOCAB))
        for token in range(VOCAB):
            piece = TEXTS[token]
            wanted = text in whole if token == END else bool(piece) and any(x.startswith(text + piece) for x in whole)
            assert allowed[token] == wanted, (text, token)
            if wanted and token != END:
                pending.append((int(guide.step(state, token)), text + piece))
        seen += 1
    assert seen > 12


def allowed_texts(guide: dict, longest: int = 4) -> set[str]:
    """The texts of a, b and c that may end."""
    automaton, found, pending = constrained(**guide).automata.guide, set(), [(0, "")]
    while pending:
        state, text = pending.pop()
        allowed = np.asarray(automaton.allows(np.int32(state), VOCAB))
        found |= {text} if allowed[END] else set()
        letters = [token for token in range(3) if allowed[token] and len(text) < longest]
        pending += [(int(automaton.step(state, token)), text + "abc"[token]) for token in letters]
    return found


def test_a_guide_allows_what_matches_as_a_whole():
    """Whatever a search would prefer: every choice, also one that another begins with."""
    pytest.importorskip("outlines_core")
    texts = {"".join(letters) for size in range(5) for letters in itertools.product("abc", repeat=size)}
    for pattern in ("a|ab|abc", "(a|ab)(c|bcb?)?", "a*?b??", "(ab|a)+?c?", "^ab?$", "^a|b$", "a?|cc", "[ab]{1,3}"):
        assert allowed_texts({"regex": pattern}) == {text for text in texts if re.fullmatch(pattern, text)}, pattern
    assert allowed_texts({"choice": ("a", "ab", "cab")}) == {"a", "ab", "cab"}
    numbers = constrained(json=json.dumps({"enum": [1, 12, "a", "a:2"]})).automata.guide
    for text in ("1", "12", '"a"', '"a:2"'):
        state = 0
        for letter in text:
            state = int(numbers.step(state, TEXTS.index(letter.encode())))
        assert np.asarray(numbers.allows(np.int32(state), VOCAB))[END], text
    with pytest.raises(ConfigError, match="allows no text that the model's tokens can form"):
        constrained(regex="a\\$")  # the letter, which is no token
    for pattern, anchor in (("a$|b", r"\$"), ("b|(^a)", r"\^"), ("\\Aa", r"\\A"), (r"\\\\|a\z|b", r"\\z")):
        with pytest.raises(ConfigError, match=f"rollout.structured_regex has {anchor} in a pattern"):
            constrained(regex=pattern)
    with pytest.raises(ConfigError, match=r"rollout.structured_json has \^ in a pattern"):
        constrained(json='{"type": "string", "pattern": "^a+"}')
    assert allowed_texts({"regex": r"[^]^$\]1]|\^?a\$?"}, 1) == {"a", "b", "c"}


@pytest.mark.slow
def test_each_turn_is_guided(params):
    pytest.importorskip("outlines_core")
    server: TurnServer = Echo(words=2)
    engine = constrained(regex="(a|bc){1,3}")
    settings = {"eos": (END,), "automata": engine.automata}
    rollout = sample_rows(params, server, chunk=4, **settings)
    other = sample_rows(params, Echo(words=2, slow=(1, 3)), chunk=24, speculative_tokens=2, **settings)
    np.testing.assert_array_equal(rollout.tokens, other.tokens)
    turns = 0
    for row, mask in zip(rollout.tokens, rollout.mask, strict=True):
        turn = []
        for token, sampled in zip(row, mask, strict=True):
            if sampled:
                turn.append(token)
                if token == END:
                    assert re.fullmatch("(a|bc){1,3}", text_of(turn))
                    turn, turns = [], turns + 1
    assert turns > 12


def test_what_cannot_be_compiled_is_refused():
    pytest.importorskip("outlines_core")
    for arguments, message in (
        ({"stop": ("",)}, r"rollout.stop has an empty text"),
        ({"regex": "(?=a)b"}, "rollout.structured_regex cannot be compiled"),
        ({"regex": "xyz"}, "rollout.structured_regex allows no text that the model's tokens can form"),
        ({"json": '{"items": {"maximum": 9}}'}, "^rollout.structured_json has the keyword 'maximum', which becomes no"),
        ({"json": '{"type": "object'}, "rollout.structured_json cannot be compiled"),
    ):
        with pytest.raises(ConfigError, match=message):
            constrained(**arguments)
    with pytest.raises(ConfigError, match=r"rollout.structured_json cannot be read: .*no_file.json"):
        Guide.of("", (), "no_file.json")
    with pytest.raises(ConfigError, match=r"rollout.structured_regex has \d+ states, with the model's 300000 tokens"):
        build_automata((), Guide(regex="[abc]{2000}"), TOKENIZER, 300_000, (END,))
    assert constrained().automata == NO_AUTOMATA


ON_A_MESH = """
import dataclasses, jax, numpy as np
from jaxrl_llm.distributed.sharding import make_mesh, rows_to_global, shardings
from jaxrl_llm.rollout.sampling import SamplingParams
from tests.rollout.test_constraints import BRACKETS, END, NET, TOKENIZER, VOCAB, build_grammar, constrained

prompts = np.random.default_rng(0).integers(0, 20, (4, 6)).astype(np.int32)
segments = np.ones((4, 6), np.int32)
segments[1, :3] = 0
mesh, key, params = make_mesh(2, 2, 2), jax.random.key(1), jax.jit(NET.init)(jax.random.key(0))
sampling = SamplingParams(
    0.9, repetition_penalty=1.2, presence_penalty=0.3, logit_bias=((3, 0.7),), bad_words=((0, 1), (2,)), min_tokens=3
)
guide = {"regex": "(ab|c{2,3}|1)+"}
grammar = build_grammar(BRACKETS, TOKENIZER, VOCAB, (END,), "grammar")
for engine in (
    dataclasses.replace(constrained(("cb",)), grammar=grammar),
    constrained(("ab", "2a"), sampling=sampling),
    constrained(("ab1",), sampling=dataclasses.replace(sampling, bad_words=(), min_tokens=0), **guide),
):
    engine = dataclasses.replace(engine, group_size=2, chunk=4, slots=4)
    if engine.grammar is None:
        engine = dataclasses.replace(engine, speculative_tokens=1)
    one = engine.generate(params, prompts, segments, key)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(params, mesh))
        many = engine.generate(placed, *rows_to_global((prompts, segments), mesh), key)
    assert len(many.tokens.sharding.device_set) == 8
    for name in ("tokens", "segments", "mask", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(many, name), getattr(one, name), err_msg=name)
    np.testing.assert_allclose(many.sample_logps, one.sample_logps, atol=1e-5)
print("same")
"""


@pytest.mark.slow
def test_the_same_tokens_on_eight_devices(run_python):
    pytest.importorskip("outlines_core")
    done = run_python("-c", ON_A_MESH, devices=8)
    assert done.returncode == 0 and done.stdout.strip() == "same", done.stdout + done.stderr


BRACKETS = 'start: "a" start "b" | "c" | "é"'  # as many a as b: no pattern says that


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"slots": 4}], ids=str)
def test_rows_follow_a_grammar(params, changes):
    pytest.importorskip("llguidance")
    grammar = build_grammar(BRACKETS, TOKENIZER, VOCAB, (END,), "grammar")
    engine = dataclasses.replace(PLAIN, grammar=grammar, sampling=SamplingParams(0.9, presence_penalty=0.2), **changes)
    rollout, width = generate(engine, params, PROMPTS)
    depths = set()
    for row, finished in zip(completions(rollout, width), rollout.finished, strict=True):
        match = re.fullmatch("(a*)(c|é)(b*)", text_of(row)) if finished else re.match("a*", text_of(row))
        assert match is not None
        if finished:
            assert len(match[1]) == len(match[3]) and row[-1] == END
            depths.add(len(match[1]))
    assert len(depths) > 1
    inputs = Inputs(jnp.asarray(rollout.tokens), jnp.asarray(rollout.segments), prompt_width=width)
    logps, _ = trainer_logps(NET, params, inputs, 0.9)
    np.testing.assert_allclose(rollout.sample_logps, logps * rollout.mask, atol=1e-4)


def test_grammars_that_cannot_be_followed(params, tmp_path):
    pytest.importorskip("llguidance")
    file = tmp_path / "rules.lark"
    file.write_text(BRACKETS)
    grammar = build_grammar(str(file), TOKENIZER, VOCAB, (END,), "grammar")
    assert grammar is not None and build_grammar("", None, VOCAB, (END,), "grammar") is None
    assert grammar.allowed(grammar.start).tolist() == [1 << 0 | 1 << 2 | 1 << 15 | 1 << 16]  # a, c, é, its byte
    gbnf = build_grammar('root ::= "a" root "b" | "c"', TOKENIZER, VOCAB, (END,), "grammar")
    assert gbnf is not None and gbnf.allowed(gbnf.start).tolist() == [1 << 0 | 1 << 2]
    for text, message in (("start: missing", "grammar cannot be compiled"), ("no.lark", "grammar cannot be read")):
        with pytest.raises(ConfigError, match=message):
            build_grammar(text, TOKENIZER, VOCAB, (END,), "grammar")
    with pytest.raises(ConfigError, match=r"structured_grammar\) is not followed with rollout.speculative_tokens"):
        generate(dataclasses.replace(PLAIN, grammar=grammar, speculative_tokens=2), params, PROMPTS)
