"""Steps of completions as turns: where their tokens end, in texts of several bytes, and a run of GRPO that has them."""

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.turn_advantages import BEYOND
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.hf import EMBEDDED, load_tokenizer
from jaxrl_llm.rollout.constraints import token_bytes
from jaxrl_llm.training.reward_models import ProcessRewardModel
from jaxrl_llm.training.step_credit import StepCredit


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EMBEDDED / "sort")


def test_where_steps_end(tokenizer):
    """By tokens, which are bytes here; the last step has the end of the text, and those over the limit are joined."""
    credit = StepCredit("prm", token_bytes(tokenizer, 320), 3)
    end = tokenizer.eos_token_id
    texts = ["\u00e9\nbb\n\nc", "a\nb\nc\nd\n", "none"]
    ids = [[*tokenizer(text)["input_ids"], end] for text in texts]
    steps = [[(2, 0.5), (6, 0.25), (7, 1.0)], [(2, 1.0), (4, 2.0), (6, 3.0), (8, 4.0)], []]
    completions = [texts[0], [{"role": "assistant", "content": texts[1]}], texts[2]]
    table = credit.table({"prm/steps": steps}, completions, ids, 3, 10)
    assert table.ends.tolist() == [[13, 17, 19], [12, 14, 19], [15, BEYOND, BEYOND]]
    np.testing.assert_array_equal(table.rewards, [[0.5, 0.25, 1.0], [1.0, 2.0, 7.0], [0.0, np.nan, np.nan]])
    assert table.states.tolist()[0] == [0, 1, 2] and table.states[1, 0] == table.states[0, 0]
    assert credit.table({}, completions, ids, 3, 10).ends[:, 0].tolist() == [10 + len(row) for row in ids]


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
