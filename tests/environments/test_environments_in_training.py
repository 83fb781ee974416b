"""Environments inside a run: two steps of the worked example, what they leave in metrics and tables, and learning."""

import copy
import dataclasses
import functools
import json
import math
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pyarrow.parquet as parquet
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.environments.factory import Environments, EnvironmentSpec
from jaxrl_llm.environments.games import SortThenSmallest
from jaxrl_llm.environments.protocol import Step
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.setup.warnings import unread_calls


def tiny(root, tmp_path):
    config = load_config_file(f"{root / 'configs/environment.py'}:tiny")
    config.output_dir, config.logging.backends, config.eval.every = str(tmp_path / "run"), ("jsonl",), -1
    return config


def test_a_template_whose_calls_are_not_read_is_warned_of(root, tmp_path):
    """Where there are tools: every call would end its episode in silence."""

    def tell_time():
        """Tells the time."""

    model, config = jaxrl_llm.load_model("embedded:sort"), tiny(root, tmp_path)
    tools, game = Environments(EnvironmentSpec(None, [tell_time])), Environments(EnvironmentSpec(SortThenSmallest))
    form = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}OPEN{{ c.function | tojson }}CLOSE"
    for opening, closing, warned in (("<tool_call>", "</tool_call>", 0), ("<call>", "</call>", 1)):
        own = copy.copy(model.tokenizer)
        own.chat_template = form.replace("OPEN", opening).replace("CLOSE", closing) + "{% endfor %}{% endfor %}"
        called = dataclasses.replace(model, tokenizer=own)
        warnings = unread_calls(config, called, tools)
        assert len(warnings) == warned and unread_calls(config, called, game) == []
        assert all('\'<call>{"name": "probe_tool"' in each and "docs/environments.md" in each for each in warnings)
    assert unread_calls(config, model, tools) == unread_calls(config, model, None) == []


@pytest.mark.parametrize(
    ("algorithm", "functions", "environment", "message"),
    [
        ("grpo", ("environment",), None, "there is none: set environment.name"),
        ("observation_coef", ("exact_match",), None, "completions have no observation tokens"),
        ("gigpo", ("exact_match",), None, "gives credit to turns or steps, but rows have one turn"),
        ("rae", ("exact_match",), SortThenSmallest, "reads the roles of an agent's sessions, but rows have none"),
        ("sft", ("exact_match",), SortThenSmallest, "algorithm.name = 'sft' samples nothing"),
    ],
)
def test_what_does_not_go_together(root, tmp_path, algorithm, functions, environment, message):
    config = tiny(root, tmp_path)
    config.environment.name, config.rewards.functions = None, functions
    if algorithm == "observation_coef":
        config.algorithm.observation_coef = 0.1
    else:
        config.algorithm["advantage" if algorithm in ("gigpo", "rae") else "name"] = algorithm
    with pytest.raises(ConfigError, match=message):
        jaxrl_llm.train(config, environment=environment)


def test_one_tool_without_a_list(root, tmp_path):
    """As one reward, and one callback, may be given."""
    config = tiny(root, tmp_path)
    config.algorithm.name, config.environment.name = "sft", None
    with pytest.raises(ConfigError, match=r"there is an environment or a tool, .* 'sft' samples nothing"):
        jaxrl_llm.train(config, tools=len)


class Sometimes(SortThenSmallest):
    """Asks on whatever the first answer was, save in rows whose last digit is odd: those fail."""

    made, closed = 0, 0

    def __init__(self):
        super().__init__()
        Sometimes.made += 1

    def reset(self, row):
        self.odd = int(row["prompt"][-2]) % 2
        super().reset(row)

    def step(self, text):
        self.turn += 1
        if self.odd:
            raise RuntimeError("odd")
        return Step("sort:=", 0.5) if self.turn == 1 else Step(None, 0.25 * len(text))

    def close(self):
        Sometimes.closed += 1


NUMBERS = """
import jax.numpy as jnp
from jaxrl_llm.algorithms.turn_advantages import by_turn

def numbers(scores, turns, mask):
    return by_turn(jnp.broadcast_to(jnp.arange(1.0, turns.ends.shape[1] + 1), turns.ends.shape), turns, mask)
"""


def test_two_steps_with_an_environment(root, tmp_path):
    (tmp_path / "rule.py").write_text(NUMBERS)
    config = tiny(root, tmp_path)
    config.algorithm.advantage = f"{tmp_path / 'rule.py'}:numbers"  # those of the turns, from 1
    config.algorithm.observation_coef = 0.1
    result = jaxrl_llm.train(config, environment=Sometimes)
    for line in result.metrics:
        assert all(math.isfinite(value) for value in line.values())
        assert line["observations/nll"] > 0.1
        assert line["environment/turns"] > 1 and 0 < line["environment/failures"] < 16
        assert line["unscorable_rows"] == line["environment/failures"]
        # Tokens of the environment are in no mask: the trainer scores the sampled ones as the sampler did.
        np.testing.assert_allclose(line["sampling/importance_sampling_ratio/mean"], 1.0, atol=1e-4)
    rows = parquet.read_table(tmp_path / "run/completions/completions_00002.parquet").to_pylist()
    for row in rows:
        if int(row["prompt"][-2]) % 2:
            assert row["environment/ended"].startswith(("RuntimeError: odd (", "length"))
            assert row["environment/turns"] <= 1
        elif row["environment/ended"] == "done":
            _, asked, answer = row["completion"].partition("sort:=")
            assert asked and row["environment"] == 0.5 + 0.25 * len(answer) and row["environment/turns"] == 2
            sizes = np.array([len(row["completion"].partition("sort:=")[0]), len(answer)]) + 1  # with the end of text
            np.testing.assert_allclose(row["advantage"], (sizes * [1, 2]).sum() / sizes.sum(), rtol=1e-5)
    assert Sometimes.closed == Sometimes.made >= 16


GAMES = {"sort": SortThenSmallest, "half": functools.partial(SortThenSmallest, first=0.5)}


def of_two_games(root, folder, *options, **settings):
    """Configuration and rows of two steps, every other prompt of another game."""
    config = tiny(root, folder)
    config.environment.options, config.optimizer.eps, config.optimizer.warmup_steps = options, 1e-5, 0
    config.update_from_flattened_dict(settings)
    rows = [{"prompt": f"sort:{1000 + 37 * i}=", "environment": ("sort", "half")[i % 2]} for i in range(32)]
    return config, rows


def train_on_two_games(*arguments, **settings):
    config, rows = of_two_games(*arguments, **settings)
    return jaxrl_llm.train(config, train_dataset=rows, environment=GAMES)


@pytest.mark.slow
def test_two_environments_with_options_of_their_own(root, tmp_path):
    """The advantages of each in the table are of its own rule, and with options that all rows have anyway nothing
    changes."""
    options = ("sort(advantage='rloo', beta=0.3, weight=0.5)", "half(advantage='reinforce_plus_plus_baseline')")
    result = train_on_two_games(root, tmp_path / "own", *options, **{"algorithm.beta": 0.0})
    for line in result.metrics:
        assert all(math.isfinite(value) for value in line.values())
        assert {"environment/sort/reward", "environment/half/reward"} <= line.keys()
    assert result.metrics[-1]["kl"] > 0  # algorithm.beta is 0, and there is a reference all the same
    table = parquet.read_table(tmp_path / "own/run/completions/completions_00001.parquet").to_pylist()
    checked = 0
    for first in range(0, 16, 4):
        group = table[first : first + 4]
        if len({row["prompt"] for row in group}) == 1 and (int(group[0]["prompt"][5:-1]) - 1000) // 37 % 2 == 0:
            rewards = np.array([row["environment"] for row in group])
            np.testing.assert_allclose(
                [row["advantage"] for row in group], (rewards - rewards.mean()) * 4 / 3, rtol=1e-5, atol=1e-6
            )
            checked += 1
    assert checked
    same = "advantage='group', beta=0.05, weight=1.0"
    plain = train_on_two_games(root, tmp_path / "plain", **{"algorithm.beta": 0.05})
    equal = train_on_two_games(root, tmp_path / "equal", f"sort({same})", f"half({same})", **{"algorithm.beta": 0.05})
    for name in ("loss", "kl", "grad_norm", "reward", "policy_term"):
        np.testing.assert_allclose(equal.metrics[-1][name], plain.metrics[-1][name], rtol=1e-4, atol=1e-6, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), equal.model.params, plain.model.params)
    changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), result.model.params, plain.model.params)
    assert max(jax.tree.leaves(changes)) > 1e-5


@pytest.mark.slow
def test_options_of_environments_in_a_run_that_goes_on(root, tmp_path):
    """The checkpoint has rollouts that were made ahead and a replay buffer, with what their rows' environments say."""
    options = ("sort(advantage='gigpo', beta=0.3, weight=0.5)", "half(advantage='gdpo')")
    settings = {
        "rollout.staleness": 1, "algorithm.old_logps": "sampler", "algorithm.replay_groups": 4, "checkpoint.every": 1,
        "checkpoint.keep": 3,
    }  # fmt: skip
    whole = train_on_two_games(root, tmp_path / "whole", *options, **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/run/checkpoints/2")
    shutil.rmtree(tmp_path / "cut/run/completions")
    resumed = train_on_two_games(root, tmp_path / "cut", *options, **settings)
    jax.tree.map(np.testing.assert_array_equal, whole.model.params, resumed.model.params)


@pytest.mark.parametrize(
    ("beta", "options", "is_there"),
    [
        (0.1, ("sort(beta=0.0)", "half(beta=0)"), False),
        (0.1, ("sort(beta=0.0)",), True),
        (0.0, ("sort(beta=0.1)",), True),
        (0.0, ("sort(weight=2.0)",), False),
    ],
)
def test_there_is_a_reference_where_an_environment_reads_it(root, tmp_path, beta, options, is_there):
    config, rows = of_two_games(root, tmp_path, *options, **{"algorithm.beta": beta})
    mesh = build_mesh(config)
    with jax.set_mesh(mesh):
        learner = build(config, mesh, Given(rows, environment=GAMES)).source.learner
        fields = learner.weights_of_rows(["sort"] * 16)
    assert (learner.reference is not None) == is_there
    assert ("kl_weight" in fields) == is_there and ("loss_weight" in fields) == ("weight" in options[0])


def test_options_of_unknown_environments_are_refused(root, tmp_path):
    with pytest.raises(ConfigError, match=r"environment\.options names 'sorts', but there are sort, half"):
        train_on_two_games(root, tmp_path, "sorts(weight=2.0)")


def test_credit_across_observations():
    """GAE and REINFORCE++ carry over the masked tokens of an observation as if they were not there."""
    from jaxrl_llm.algorithms.advantages import gae, reinforce_plus_plus_advantages

    draw = np.random.default_rng(0)
    rewards, values = draw.normal(size=(2, 3, 9)).astype(np.float32)
    mask = np.tile(np.float32([0, 1, 1, 0, 0, 0, 1, 1, 0]), (3, 1))
    kept = mask[0] > 0
    advantages, returns = gae(rewards * mask, values * mask, mask, 0.9, 0.8)
    without = gae(rewards[:, kept], values[:, kept], np.ones((3, 4), np.float32), 0.9, 0.8)
    np.testing.assert_allclose(np.asarray(advantages)[:, kept], without[0], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(returns)[:, kept], without[1], rtol=1e-5)
    noisy = gae(rewards * mask + 7 * (1 - mask) * draw.normal(size=mask.shape), values, mask, 0.9, 0.8)[0]
    np.testing.assert_allclose(np.asarray(noisy)[:, kept], without[0], rtol=1e-4, atol=1e-5)
    spread = reinforce_plus_plus_advantages(rewards * mask, mask, 0.9)
    dense = reinforce_plus_plus_advantages(rewards[:, kept], np.ones((3, 4), np.float32), 0.9)
    np.testing.assert_allclose(np.asarray(spread)[:, kept], dense, rtol=1e-5)


@pytest.mark.slow
def test_observation_tokens_of_packed_rows(root, tmp_path):
    values = []
    for packing in ("false", "true"):
        config = tiny(root, tmp_path / packing)
        config.total_steps, config.batch.packing, config.algorithm.observation_coef = 1, packing, 0.1
        line = jaxrl_llm.train(config, environment=Sometimes).metrics[-1]
        values.append([line["observations/nll"], line["loss"], line["grad_norm"]])
    np.testing.assert_allclose(*values, rtol=1e-4)


ROLLOUT_FUNCTION = """
def sample(prompts, trainer):
    return {**trainer.generate(prompts), "words": ["x"] * (len(prompts) * trainer.num_generations)}

def sorts(model, processing_class, prompts, generation_config):
    return ["".join(sorted(prompt["prompt"][5:-1])) for prompt in prompts]

def says(model, processing_class, prompts, generation_config, word=""):
    return [word if list(prompt) == ["messages"] else "" for prompt in prompts]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accuracy"), [("sample", None), ("sorts", 1.0)])
def test_a_run_with_a_rollout_function(root, tmp_path, name, accuracy):
    (tmp_path / "mine.py").write_text(ROLLOUT_FUNCTION)
    config = tiny(root, tmp_path)
    config.environment.name, config.environment.rollout_func = None, f"{tmp_path / 'mine.py'}:{name}"
    config.algorithm.importance_correction, config.rewards.functions = "token_truncate", ("exact_match",)
    result = jaxrl_llm.train(config)
    for line in result.metrics:
        assert all(math.isfinite(value) for value in line.values())
        np.testing.assert_allclose(line["sampling/importance_sampling_ratio/mean"], 1.0, atol=1e-4)
        assert accuracy is None or line["reward"] == accuracy


@pytest.mark.slow
def test_rewards_get_the_texts_of_a_rollout_function(root, tmp_path):
    """As axolotl's page reads them, where completions of messages are messages otherwise."""
    (tmp_path / "mine.py").write_text(ROLLOUT_FUNCTION)
    config = tiny(root, tmp_path)
    config.environment.name, config.environment.rollout_func = None, f"{tmp_path / 'mine.py'}:says(word='12')"
    config.algorithm.importance_correction, config.data.chat_template = "token_truncate", "chatml"
    config.rollout.max_prompt_length = 64

    def is_right(completions, **_):
        return [float(text == "12") for text in completions]

    rows = [{"prompt": [{"role": "user", "content": "sort:21="}]}] * 8
    assert jaxrl_llm.train(config, rows, rewards=is_right).metrics[-1]["reward"] == 1.0


@pytest.mark.slow
def test_the_worked_example_learns(root, tmp_path):
    config = load_config_file(str(root / "configs/environment.py"))
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    config.eval.every, config.eval.prompts, config.checkpoint.every = 0, 64, 0
    result = jaxrl_llm.train(config)
    assert result.metrics[0]["eval/accuracy"] < 0.15
    assert result.metrics[-1]["eval/accuracy"] > 0.5


TWO_PROCESSES = """
import sys
import jax
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
import jaxrl_llm
from jaxrl_llm.config.flags import load_config_file
config = load_config_file(sys.argv[3])
config.output_dir, config.logging.backends, config.eval.every = sys.argv[4], ("jsonl",), -1
config.total_steps = 1
line = jaxrl_llm.train(config).metrics[-1]
print([line[name] for name in ("reward", "environment/turns", "environment/failures", "loss")])
"""


@pytest.mark.slow
def test_processes_share_the_conversations(root, tmp_path, run_python):
    """Each process plays its own rows; a run of two is the run of one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    name = f"{root / 'configs/environment.py'}:tiny"
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(run_python, "-c", TWO_PROCESSES, str(port), str(i), name, str(tmp_path / "two")) for i in (0, 1)
        ]
    outputs = [run.result() for run in runs]
    assert all(output.returncode == 0 for output in outputs), outputs[0].stderr + outputs[1].stderr
    shown = [json.loads(output.stdout.splitlines()[-1]) for output in outputs]
    config = tiny(root, tmp_path)
    config.total_steps = 1
    line = jaxrl_llm.train(config).metrics[-1]
    assert shown[0] == shown[1]
    alone = [line[name] for name in ("reward", "environment/turns", "environment/failures", "loss")]
    np.testing.assert_allclose(shown[0], alone, atol=1e-4)
