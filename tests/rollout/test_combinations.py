"""Options of sampling in combination: log-probs are the trainer's, so that its ratio is 1 on policy, under each."""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout.constraints import Guide, build_automata
from jaxrl_llm.rollout.sampling import SamplingParams
from tests.models.decoding import trainer_logps
from tests.rollout.test_constraints import END, PLAIN, PROMPTS, TOKENIZER, VOCAB, generate
from tests.rollout.test_engine import CONFIG

NET = Net(CONFIG)
SAMPLING = {
    "temperature": (1.0, 0.0, 0.7),
    "top_p": (1.0, 0.8),
    "top_k": (0, 6),
    "min_p": (0.0, 0.1),
    "repetition_penalty": (1.0, 1.4),
    "frequency_penalty": (0.0, 0.6),
    "presence_penalty": (0.0, 0.4),
    "logit_bias": ((), ((1, 2.0), (5, -1.5))),
    "bad_words": ((), ((3,), (1, 0))),
    "min_tokens": (0, 5),
}
SETTINGS = {
    "eos": ((END,), ()),
    "stop": ((), ("ab", "c")),
    "regex": ("", "(ab|[abc ]){2,9}1?"),
    "speculative_tokens": (0, 2),
    "slots": (0, 4),
    "chunk": (5, 2),
    "group_size": (4, 3),
}
OPTIONS = SAMPLING | SETTINGS


@pytest.fixture(scope="module")
def params():
    return jax.jit(NET.init)(jax.random.key(0))


def fits(options: dict) -> bool:
    """False for what the configuration refuses: a guide, and what may forbid all that it allows."""
    return not (options["regex"] and (options["bad_words"] or options["min_tokens"] or not options["eos"]))


def all_pairs() -> list[dict]:
    """Combinations in which every value of an option meets every value of every other."""
    first = {name: values[0] for name, values in OPTIONS.items()}
    left = [
        ((one, a), (other, b))
        for one, other in itertools.combinations(OPTIONS, 2)
        for a, b in itertools.product(OPTIONS[one], OPTIONS[other])
        if fits(first | {one: a, other: b})
    ]
    draw, found = random.Random(0), []
    while left:
        drawn = [{name: draw.choice(values) for name, values in OPTIONS.items()} | dict(left[0]) for _ in range(300)]
        met = [[pair for pair in left if pair[0] in each.items() and pair[1] in each.items()] for each in drawn]
        best = max((number for number, each in enumerate(drawn) if fits(each)), key=lambda number: len(met[number]))
        found.append(drawn[best])
        left = [pair for pair in left if pair not in met[best]]
    return found


PAIRS = all_pairs()


def test_all_pairs_are_met():
    assert len(PAIRS) < 25 and all(map(fits, PAIRS))
    for one, other in itertools.combinations(OPTIONS, 2):
        met = {(each[one], each[other]) for each in PAIRS}
        never = 1 if "regex" in (one, other) and {one, other} & {"bad_words", "min_tokens", "eos"} else 0
        assert len(met) == len(OPTIONS[one]) * len(OPTIONS[other]) - never


@pytest.mark.slow
@pytest.mark.parametrize("options", PAIRS, ids=range(len(PAIRS)))
def test_rollouts(params, options):
    """Of the engine, whose programs are those of its options."""
    sampling = SamplingParams(**{name: options[name] for name in SAMPLING})
    settings = {name: options[name] for name in SETTINGS if name not in ("stop", "regex")}
    automata = build_automata(options["stop"], Guide(regex=options["regex"]), TOKENIZER, VOCAB, options["eos"])
    engine = dataclasses.replace(PLAIN, sampling=sampling, automata=automata, **settings)
    rollout, width = generate(engine, params, PROMPTS)
    inputs = Inputs(jnp.asarray(rollout.tokens), jnp.asarray(rollout.segments), prompt_width=width)
    logps, _ = trainer_logps(NET, params, inputs, sampling.logps_temperature)
    ratio = np.exp((np.asarray(logps) - rollout.sample_logps) * rollout.mask)
    np.testing.assert_allclose(ratio, 1, atol=1e-4)
    assert rollout.mask.sum() > len(rollout.tokens)
