"""The warnings and the end of a run that was built."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.advantages import advantage_step
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.run import Run, build
from jaxrl_llm.training.setup.specs import advantage_spec
from jaxrl_llm.training.setup.warnings import equal_completions, left_out_prompts, unmatched_names, untrained_policy
from tests.rollout.test_engine import CONFIG


def test_a_critic_that_warms_up_to_the_end_is_told():
    config = default()
    config.total_steps, config.critic.warmup_steps = 3, 3
    assert untrained_policy(config) == []  # grpo has no critic
    config.algorithm.name = "ppo"
    (line,) = untrained_policy(config)
    assert "critic.warmup_steps is 3, and total_steps 3: the critic alone is trained" in line
    config.critic.warmup_steps = 2
    assert untrained_policy(config) == []


def test_names_that_no_parameter_has_are_told():
    config, model = default(), Model(Net(CONFIG), Net(CONFIG).shapes())
    assert unmatched_names(config, model) == []  # though nothing here has a bias
    config.optimizer.no_decay = ("bias", "scale", "weight", "norms")
    (line,) = unmatched_names(config, model)
    assert line.startswith("optimizer.no_decay: norms ends the path of no parameter")
    assert "kernel, scale, weight" in line


def test_dynamic_sampling_tells_what_it_leaves_out():
    config = default()
    config.algorithm.dynamic_sampling = True

    def lines(advantage: str) -> list[str]:
        config.algorithm.advantage = advantage
        return left_out_prompts(config, advantage_step(advantage_spec(config), ("r",)))

    assert all(lines(rule) == [] for rule in ("group", "rloo", "gdpo", "reinforce_plus_plus_baseline"))
    for rule in ("a2po", "remax", "reinforce_plus_plus", "turn"):
        (line,) = lines(rule)
        assert f"algorithm.advantage = {rule!r} would learn from these too: set it to false" in line
    config.algorithm.dynamic_sampling_metric = "acc"  # which says what is alike
    assert lines("remax") == []


@pytest.mark.parametrize(("key", "value"), [("temperature", 0.0), ("top_k", 1), ("min_p", 1.0)])
def test_completions_that_are_all_the_same_are_told(key, value):
    config = default()

    def lines(advantage: str) -> list[str]:
        config.algorithm.advantage = advantage
        return equal_completions(config, advantage_step(advantage_spec(config), ("r",)))

    assert lines("group") == []
    config.rollout[key] = value
    (line,) = lines("group")
    assert f"rollout.{key} is {value:g}, with which the completions of a prompt are the same" in line
    assert lines("reinforce_plus_plus") == []
    config.environment.name = "sort_then_smallest"
    assert lines("group") == []


@pytest.mark.parametrize("failing", ["rewards", "environments"])
def test_both_are_closed_also_where_one_fails(failing):
    closed = []

    def part(name: str) -> Any:
        def close():
            closed.append(name)
            if name == failing:
                raise OSError(name)

        return SimpleNamespace(close=close)

    empty: Any = dict.fromkeys(Run._fields)
    with pytest.raises(OSError, match=failing):
        Run(**empty | {"rewards": part("rewards"), "environments": part("environments")}).close()
    assert closed == ["environments", "rewards"]


def test_what_a_refused_run_has_opened_is_closed():
    class Game:
        made = closed = 0

        def __init__(self):
            Game.made += 1

        def reset(self, row):
            return None

        def step(self, text):
            return None, 1.0, True

        def close(self):
            Game.closed += 1

    config = default()
    config.rewards.functions, config.eval.every, config.batch.prompts = ("environment",), -1, 2
    mesh = build_mesh(config)
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match="compute_metrics is given, but nothing is evaluated"):
        build(config, mesh, Given(environment=Game, compute_metrics=len))
    assert Game.made == Game.closed == 1
