"""Options of sampling in training: completions are as asked, and the ratio of trainer and sampler is 1 on policy."""

import re

import pytest

import jaxrl_llm
from jaxrl_llm.commands import generate
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.schema import KEYS, SAMPLING_OPTIONS
from jaxrl_llm.serving import bodies
from jaxrl_llm.training import local_judge

PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3}
OPTIONS = {
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.2},
    "penalties": {"temperature": 0.8, "top_k": 40, **PENALTIES},
    "words": {"bad_words": ("12", "3"), "logit_bias": ("52=4", "53=-3.5"), "min_completion_length": 5},
    "stop": {"stop": ("2", "77"), "stop_token_ids": (55,), "ignore_eos": True},
    "choice": {"temperature": 0.7, "structured_choice": ("1234", "17", "no")},
    "guided": {"structured_regex": "[2-9]{3}x?", **PENALTIES, "stop": ("44",), "speculative_tokens": 2, "slots": 4},
    "grammar": {"structured_grammar": 'start: "1" start "2" | "3"', "min_p": 0.01, "slots": 4},
    "together": {"temperature": 1.3, "top_p": 0.9, **PENALTIES, "bad_words": ("12", "3"), "speculative_tokens": 2},
}
ROWS = [{"prompt": "sort:3124=", "answer": "1234"}, {"prompt": "sort:71=", "answer": "17"}] * 2


def small_config(folder, **options):
    config = jaxrl_llm.default_config()
    config.output_dir, config.total_steps, config.eval.every = str(folder / "run"), 1, -1
    config.rollout.max_prompt_length, config.batch.prompts, config.rollout.group_size = 16, 2, 4
    config.rollout.max_completion_length, config.logging.backends = 8, ("jsonl",)
    config.algorithm.old_logps = "trainer"
    for name, value in options.items():
        config.rollout[name] = value
    return config


def train(config):
    """The completions of the first step, and its metrics."""
    seen = []

    def length(completion_ids, completions, **_):
        seen.extend(completions)
        return [float(len(ids)) for ids in completion_ids]

    record = jaxrl_llm.train(config, ROWS, rewards=[length]).metrics[-1]
    return seen, record


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_ratio_is_1_on_policy(tmp_path, options):
    completions, record = train(small_config(tmp_path, **options))
    for which in ("min", "max"):
        assert record[f"sampling/importance_sampling_ratio/{which}"] == pytest.approx(1, abs=1e-4)
    assert record["sampling/sampling_logp_difference/max"] < 1e-4
    assert len(completions) == 8
    if options.get("bad_words"):
        assert not [text for text in completions if "12" in text or "3" in text]
    for text in completions:
        if "structured_regex" in options:
            assert re.fullmatch("[2-9]{3}x?", text) or re.fullmatch("[2-9]?44", text)
        if "structured_grammar" in options:
            match = re.fullmatch("(1*)(3?)(2*)", text)
            assert match and (len(text) == 8 or len(match[1]) == len(match[3]))
        if "structured_choice" in options:
            assert text in options["structured_choice"]
        if name := options.get("stop"):
            assert not any(stop in text[:-1] for stop in name)
    assert record["completions/min_length"] >= options.get("min_completion_length", 1)
    if options.get("temperature") == 0:
        assert record["frac_reward_zero_std"] == 1 and len(set(completions)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1e-4}, "rollout.temperature is 0.0001, but it takes a number >= 0.001, or 0"),
        ({"min_completion_length": 9}, "rollout.min_completion_length is 9, more than rollout.max_completion_length"),
        ({"logit_bias": ("5:1",)}, "rollout.logit_bias has '5:1', but it takes ID=BIAS"),
        ({"logit_bias": ("5=inf",)}, "rollout.logit_bias has '5=inf', but it takes ID=BIAS"),
        ({"logit_bias": ("5=1e39",)}, "rollout.logit_bias has '5=1e39', but it takes ID=BIAS"),  # infinite in float32
        ({"logit_bias": ("5=1", "5=2")}, "rollout.logit_bias has token 5 twice"),
        ({"logit_bias": ("5000=1",)}, "rollout.logit_bias has token 5000, but the model's tokens are 0 to"),
        ({"stop_token_ids": (5000,)}, "rollout.stop_token_ids has token 5000, but the model's tokens are 0 to"),
        ({"stop": ("",)}, "rollout.stop has an empty text"),
        (
            {"structured_regex": "a", "bad_words": ("a",)},
            "rollout.structured_regex is 'a', and rollout.bad_words = .* may",
        ),
        (
            {"structured_choice": ("a",), "ignore_eos": True},
            "rollout.ignore_eos = True may forbid all",
        ),
        (
            {"structured_regex": "a", "structured_choice": ("b",)},
            "rollout.structured_regex and rollout.str.* are set",
        ),
        ({"structured_grammar": "start: (", "speculative_tokens": 1}, "structured_grammar is set, which the host foll"),
        ({"structured_grammar": "start: ("}, "rollout.structured_grammar cannot be compiled"),
        ({"structured_regex": "(a"}, "rollout.structured_regex cannot be compiled"),
        ({"bad_words": (" ",)}, "rollout.bad_words has ' ', which has no tokens"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        jaxrl_llm.train(small_config(tmp_path, **options), ROWS)


def test_greedy_completions_cannot_be_told_apart(tmp_path):
    config = small_config(tmp_path, temperature=0.0)
    config.algorithm.dynamic_sampling = True
    with pytest.raises(ConfigError, match="0, with which the completions of a prompt are the same"):
        jaxrl_llm.train(config, ROWS)


def test_bounds_are_the_same_wherever_an_option_is_set():
    """Of a run, its evaluations, the commands and a judge; those of requests differ where their file says why.

    A run's temperature is 0 or one that its log-probs can be computed at.
    """
    places = [generate.SAMPLING, local_judge.SAMPLING, bodies.SETTINGS.values()]
    places += [[key for key in KEYS if key.name.startswith(prefix)] for prefix in ("rollout.", "eval.")]
    own = set()
    for place in places:
        for setting in place:
            kind, bounds = SAMPLING_OPTIONS.get(setting.name.rpartition(".")[2], (None, {}))
            found = {name: getattr(setting, name) for name in ("minimum", "maximum", "above", "below", "besides")}
            if kind is not None and {name: x for name, x in found.items() if x is not None} != bounds:
                own.add(setting.name)
            assert kind in (None, setting.kind)
    assert own == {"rollout.temperature", "top_k", "min_tokens"}
