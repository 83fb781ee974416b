"""Steps of completions as turns: where their tokens end, in texts of several bytes, and a run of GRPO that has them."""

import functools
import re

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.turn_advantages import BEYOND
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.files.hf import EMBEDDED, load_tokenizer
from jaxrl_llm.models.model import add_adapters, save_adapter
from jaxrl_llm.rewards.runner import Graded, Logged
from jaxrl_llm.rewards.signatures import RewardError
from jaxrl_llm.rollout.constraints import token_bytes
from jaxrl_llm.training.reward_models import ProcessRewardModel, with_reward_models
from jaxrl_llm.training.setup import sources
from jaxrl_llm.training.setup.worker import Setup
from jaxrl_llm.training.step_credit import StepCredit


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EMBEDDED / "sort")


def graded(rows=3, **columns) -> Graded:
    named = {name.replace("_", "/"): values for name, values in columns.items()}
    return Graded(np.zeros((rows, 1), np.float32), Logged({}, {}, named))


def test_where_steps_end(tokenizer):
    """By tokens, which are bytes here; the last step has the end of the text, and those over the limit are joined."""
    credit = StepCredit("prm", token_bytes(tokenizer, 320, "steps need", "leave them out"), 3)
    end = tokenizer.eos_token_id
    texts = ["\u00e9\nbb\n\nc", "a\nb\nc\nd\n", "none"]
    ids = [[*tokenizer(text)["input_ids"], end] for text in texts]
    steps = [[(2, 0.5), (6, 0.25), (7, 1.0)], [(2, 1.0), (4, 2.0), (6, 3.0), (8, 4.0)], []]
    completions = [texts[0], [{"role": "assistant", "content": texts[1]}], texts[2]]
    table = credit.table(graded(prm_steps=steps), completions, ids, 3, 10)
    assert table.ends.tolist() == [[13, 17, 19], [12, 14, 19], [15, BEYOND, BEYOND]]
    np.testing.assert_array_equal(table.rewards, [[0.5, 0.25, 1.0], [1.0, 2.0, 7.0], [0.0, np.nan, np.nan]])
    assert table.states.tolist()[0] == [0, 1, 2] and table.states[1, 0] == table.states[0, 0]
    late = graded()._replace(logged=Logged({}, {"rewards/prm/timeouts": 3.0}, {}))
    for none in (late, graded()._replace(rewards=np.full((3, 1), np.nan, np.float32))):
        assert credit.table(none, completions, ids, 3, 10).ends[:, 0].tolist() == [10 + len(row) for row in ids]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "logs none: it calls log_extra('prm/steps', values)"),
        ({"prm_steps": [[(2, 1.0), (2, 1.0)]]}, "logs the steps [(2, 1.0), (2, 1.0)]"),
        ({"prm_steps": [[(2, float("nan"))]]}, "logs the steps [(2, nan)]"),
        ({"prm_steps": [[1.0, 0.5]]}, "logs the steps [1.0, 0.5]"),
    ],
)
def test_steps_that_are_none(columns, message):
    with pytest.raises(RewardError, match=re.escape(message)):
        StepCredit("prm", (), 3).table(graded(1, **columns), ["abc"], [[]], 1, 0)


def test_whose_steps_are_followed():
    """Those of the one function that counts, also of one with options; never silently of one of several."""

    def letters(completions, scale=1.0, **_):
        return [scale * len(text) for text in completions]

    letters.gives_steps = True
    config = default()
    config.algorithm.advantage = "process"

    def followed(*rewards, weights=()):
        config.rewards.weights = weights
        made = sources.build_rewards(config, rewards)
        return sources._advantages(Setup(config, None, None, made, None, None)).of_turns

    assert followed("exact_match", functools.partial(letters, scale=2.0)) == "letters"
    assert followed(letters, letters, weights=(0.0, 1.0)) == "letters_2"
    assert followed(letters, weights=(0.0,)) == followed("exact_match") == "environment"
    with pytest.raises(ConfigError, match="steps of one reward, but letters and letters_2 have their own"):
        followed(letters, letters)
    config.algorithm.advantage = "group"
    assert followed(letters, letters) == "letters"


def test_two_of_one_path_log_their_steps_apart():
    model = jaxrl_llm.load_model("embedded:sort", head="step")
    rewards = [ProcessRewardModel(model, rows=2, aggregation=name) for name in ("min", "sum")]
    made = sources.build_rewards(default(), rewards)
    columns = made.submit(["sort:21="], ["1\n2"], [[1]], {}).result().logged.columns
    assert columns.keys() == {"process_reward_model/steps", "process_reward_model_2/steps"}
    with pytest.raises(ConfigError, match="in memory has no step head: give one of a process_reward_model run"):
        ProcessRewardModel(jaxrl_llm.load_model("embedded:sort"))


def test_an_adapter_brings_its_head(tmp_path):
    model = add_adapters(jaxrl_llm.load_model("embedded:sort", head="step"), LoraConfig(2), jax.random.key(0))
    save_adapter(model, tmp_path / "prm")
    prompts, completions = ["sort:21="], ["1\n2"]
    expected = ProcessRewardModel(model, rows=1)(prompts, completions)
    assert with_reward_models(f"prm:{tmp_path / 'prm'}(rows=1)")(prompts, completions) == pytest.approx(expected)


def test_parts_of_a_reward_sum_to_it():
    model = jaxrl_llm.load_model("embedded:sort", head="step")
    prompts, completions, logged = ["sort:21="] * 2, ["1\n\n2\n", " "], {}
    for aggregation in ("sum", "mean", "min"):
        reward = ProcessRewardModel(model, aggregation=aggregation)
        scores = reward(prompts, completions, log_extra=logged.__setitem__)
        (first, second), none = logged["process_reward_model/steps"]
        assert none == [] and (first[0], second[0]) == (2, 5)
        assert reward.gives_steps == (aggregation != "min")
        if reward.gives_steps:
            assert scores == [pytest.approx(first[1] + second[1]), 0.0]


def test_rules_of_turns_need_steps(root, tmp_path):
    config = load_config_file(f"{root / 'configs/grpo.py'}:tiny")
    config.output_dir, config.algorithm.advantage = str(tmp_path), "process"
    with pytest.raises(ConfigError, match=r"'process', which gives credit to turns or steps, .* prm:PATH"):
        jaxrl_llm.train(config)


@pytest.mark.slow
def test_a_run_with_process_supervision(root, tmp_path):
    """Steps of one letter: advantages fall along a row of right letters, and are the same in a step; resumed too."""

    def letters(completions, log_extra, **_):
        log_extra("letters/steps", [[(n + 1, float(x == "1")) for n, x in enumerate(text)] for text in completions])
        return [float(text.count("1")) for text in completions]

    letters.gives_steps = True

    def trained(folder, steps, **changes):
        config = load_config_file(f"{root / 'configs/grpo.py'}:tiny")
        config.output_dir, config.eval.every, config.logging.backends = str(tmp_path / folder), -1, ("jsonl",)
        config.algorithm.advantage, config.total_steps, config.optimizer.schedule = "process", steps, "constant"
        config.optimizer.warmup_steps = 1
        config.update_from_flattened_dict(changes)
        return jaxrl_llm.train(config, rewards=letters)

    whole = trained("whole", 2)
    assert all(line["turns/reward"] > 0 and line["reward"] > line["turns/reward"] for line in whole.metrics)
    trained("halves", 1)
    assert trained("halves", 2).metrics[-1]["loss"] == whole.metrics[-1]["loss"]
    queued = trained(
        "queued",
        2,
        **{
            "rollout.staleness": 1,
            "algorithm.dynamic_sampling": True,
            "algorithm.importance_correction": "token_truncate",
        },
    )
    assert all(np.isfinite(line["loss"]) for line in queued.metrics)


@pytest.mark.slow
def test_a_run_of_ppo_with_the_rewards_of_steps(root, tmp_path):
    """Of rewards that stand where they are given, returns fall along a row; on its last token they stand in all."""

    def letters(completions, log_extra, **_):
        log_extra("letters/steps", [[(n + 1, float(x == "1")) for n, x in enumerate(text)] for text in completions])
        return [float(text.count("1")) for text in completions]

    letters.gives_steps = True
    returns = {}
    for advantage in ("ppo(lam=1.0)", "turn_ppo(lam=1.0)"):
        config = load_config_file(f"{root / 'configs/ppo.py'}:tiny")
        config.output_dir, config.eval.every, config.logging.backends = str(tmp_path / advantage[:3]), -1, ("jsonl",)
        config.algorithm.advantage, config.algorithm.beta, config.total_steps = advantage, 0.0, 1
        config.algorithm.kl_in_reward = False
        returns[advantage] = jaxrl_llm.train(config, rewards=letters).metrics[0]["returns/mean"]
    assert 0 < returns["turn_ppo(lam=1.0)"] < 0.9 * returns["ppo(lam=1.0)"]
