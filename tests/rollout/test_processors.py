"""Logits processors: the numbers of transformers and vLLM on the same logits, in rows however they run."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.model import load_model
from jaxrl_llm.rollout.constraints import bad_word_ids, check_tokens
from jaxrl_llm.rollout.processors import processed_logits
from jaxrl_llm.rollout.sampling import SamplingParams, sample
from jaxrl_llm.rollout.slots import Prompts, Rows
from tests.models.decoding import trainer_logps
from tests.rollout.test_engine import ENGINE, EOS, NET, completions, generate
from tests.rollout.test_multi_turn import Echo, sample_rows

VOCAB, PROMPT, COMPLETION, WIDTH = 29, 5, 9, 3
BAD_WORDS = ((4,), (2, 3), (1, 1), (5, 6, 7), (0, 1, 2, 3, 4, 5, 6))
PROCESSORS = {
    "bias": {"logit_bias": ((3, 1.5), (11, -2.0), (0, 4.0))},
    "repetition": {"repetition_penalty": 1.3},
    "encouraged": {"repetition_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.6},
    "presence": {"presence_penalty": -0.9},
    "words": {"bad_words": BAD_WORDS},
    "shortest": {"min_tokens": 4},
}
PROCESSORS["all"] = {name: value for options in PROCESSORS.values() for name, value in options.items()}
EVERY = pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)


@pytest.fixture(scope="module")
def params():
    return jax.jit(NET.init)(jax.random.key(0))


def state(seed: int = 0):
    """Four prompts of 0 to 3 padding tokens with two rows each, of any lengths, and proposed tokens."""
    rng = np.random.default_rng(seed)
    shape = (4, 2)
    prompts = rng.integers(0, 8, (4, PROMPT)).astype(np.int32)
    mask = np.arange(PROMPT) >= np.arange(4)[:, None]
    tokens = rng.integers(0, 8, (*shape, COMPLETION)).astype(np.int32)  # few of them, so that they repeat
    length = rng.integers(0, COMPLETION - WIDTH + 1, shape).astype(np.int32)
    tokens[0, 0, :2], length[0, 0] = (5, 6), 2  # token 7 would complete a sequence
    observed = rng.random(tokens.shape) < 0.2
    rows = Rows(
        tokens, np.zeros(tokens.shape, np.float32), observed, length, length, np.full(shape, 9), np.zeros(shape, bool)
    )
    proposed = rng.integers(0, 8, (*shape, WIDTH - 1)).astype(np.int32)
    logits = rng.normal(size=(*shape, WIDTH, VOCAB)).astype(np.float32) * 3
    return jax.tree.map(jnp.asarray, (logits, Prompts(None, prompts, mask), rows, proposed))


def expected_logits(sampling: SamplingParams, logits, prompt: list[int], text: list[int], sampled: list[int]):
    """transformers' processors, and the formulas of vLLM's documentation for the two that it has not."""
    ids = torch.tensor([prompt + text])
    before, behind = LogitsProcessorList(), LogitsProcessorList()
    if sampling.logit_bias:
        before.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias}))
    if sampling.repetition_penalty != 1:
        before.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.bad_words:
        behind.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    if sampling.min_tokens:
        behind.append(MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_tokens, list(EOS), device="cpu"))
    scores = before(ids, torch.tensor(logits)[None])
    counts = np.bincount(np.array(sampled, int), minlength=VOCAB)
    scores -= torch.tensor(sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0))
    return behind(ids, scores)[0].numpy()


@EVERY
def test_the_logits_are_those_of_transformers(options):
    sampling = SamplingParams(**options)
    assert sampling.processes and not SamplingParams(0.7, top_p=0.9).processes
    logits, prompts, rows, proposed = state()
    found = jax.jit(processed_logits, static_argnums=(1, 5))(logits, sampling, prompts, rows, proposed, EOS)
    changed = 0
    for g, r, w in np.ndindex(*logits.shape[:-1]):
        length = int(rows.length[g, r])
        prompt = prompts.tokens[g][prompts.mask[g]].tolist()
        text = rows.tokens[g, r, :length].tolist() + proposed[g, r, :w].tolist()
        is_observed = rows.observed[g, r, : length + w].tolist()
        sampled = [token for token, other in zip(text, is_observed, strict=True) if not other]
        wanted = expected_logits(sampling, np.asarray(logits[g, r, w]), prompt, text, sampled)
        np.testing.assert_allclose(found[g, r, w], wanted, atol=1e-5)
        changed += not np.array_equal(wanted, logits[g, r, w])
    assert changed > 8  # the processors had something to do


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_drawn_of_the_processed_logits_and_log_probs_of_the_policys(temperature):
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(64, VOCAB)), jnp.float32)
    processed = jnp.where(jnp.arange(VOCAB) % 2 == 0, logits * 2, -jnp.inf)
    sampling, uniforms = SamplingParams(temperature), jax.random.uniform(jax.random.key(0), (64,))
    tokens, logps = sample(logits, uniforms, sampling, processed)
    np.testing.assert_array_equal(tokens, sample(processed, uniforms, sampling)[0])
    assert (tokens % 2 == 0).all()
    policy = jax.nn.log_softmax(logits / (temperature or 1.0))
    np.testing.assert_allclose(logps, policy[np.arange(64), tokens], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("options", [pytest.param(x, id=name) for name, x in PROCESSORS.items()])
def test_a_row_depends_neither_on_slots_nor_on_speculation(params, options, temperature):
    """Rows that move between slots, and tokens that are proposed, under every processor: the same samples."""
    sampling = SamplingParams(temperature, **options)
    engine = dataclasses.replace(ENGINE, sampling=sampling, chunk=5)
    rollout, width = generate(engine, params)
    slots = dataclasses.replace(engine, slots=4, speculative_tokens=2)
    other, _ = generate(slots, params)
    np.testing.assert_array_equal(other.tokens, rollout.tokens)
    np.testing.assert_allclose(other.sample_logps, rollout.sample_logps, atol=1e-5)
    inputs = Inputs(jnp.asarray(rollout.tokens), jnp.asarray(rollout.segments), prompt_width=width)
    logps, _ = trainer_logps(NET, params, inputs, sampling.logps_temperature)
    np.testing.assert_allclose(rollout.sample_logps, logps * rollout.mask, atol=1e-4)


def test_what_processors_are_for(params):
    """A forbidden pair is in no row, and no row ends before its shortest length."""
    plain = completions(ENGINE, params)
    pairs = tuple({pair for row in plain for pair in itertools.pairwise(row)})[:40]
    rows = completions(dataclasses.replace(ENGINE, sampling=SamplingParams(bad_words=pairs, min_tokens=6)), params)
    assert not {pair for row in rows for pair in itertools.pairwise(row)} & set(pairs)
    assert min(map(len, plain)) < 6
    assert min(map(len, rows)) >= 6 and any(row[-1] in EOS for row in rows)


@pytest.mark.slow
def test_observations_are_no_samples(params):
    """A turn server's tokens count for the repetition penalty and not for the other two."""
    rollout = sample_rows(params, Echo(), sampling=SamplingParams(presence_penalty=0.7, repetition_penalty=1.2))
    other = sample_rows(
        params, Echo(), sampling=SamplingParams(presence_penalty=0.7, repetition_penalty=1.2), speculative_tokens=2
    )
    np.testing.assert_array_equal(rollout.tokens, other.tokens)


def test_bad_words_as_token_ids():
    tokenizer = load_model("embedded:sort").tokenizer
    assert bad_word_ids("words", ("ab", "c", "ab"), tokenizer) == ((97, 98), (99,))
    assert bad_word_ids("words", (), None) == ()
    with pytest.raises(ConfigError, match="words has ' ', which has no tokens"):
        bad_word_ids("words", (" ",), tokenizer)
    with pytest.raises(ConfigError, match="no tokenizer"):
        bad_word_ids("words", ("a",), None)
    with pytest.raises(ConfigError, match="bias has token 29, but the model's tokens are 0 to 28"):
        check_tokens("bias", (3, 29), 29)
