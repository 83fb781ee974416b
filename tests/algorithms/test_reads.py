"""What each objective reads, by taking its inputs away: the table of docs/algorithms.md, for every registered name."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import (
    advantages,
    distillation,
    policy_losses,
    preference_losses,
    sft_losses,
    step_losses,
    turn_advantages,
)
from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.algorithms.losses import with_metrics
from jaxrl_llm.algorithms.turn_advantages import Turn, turn_table
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.config.resolve import resolve
from jaxrl_llm.models.logprobs import TokenStatistics
from jaxrl_llm.training.objectives.policy_gradient import policy_gradient, policy_objective
from jaxrl_llm.training.setup.objectives import policy_spec

N, T, K = 8, 6, 4
RNG = np.random.default_rng(2)
MASK = np.arange(T) < np.array([3, 4, 5, 6, 2, 6, 4, 5])[:, None]
LOGPS = -RNG.exponential(1.0, (N, T))
START = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _drawn_anew():
    """Each test draws the same numbers, whichever ran before it in its process."""
    RNG.bit_generator.state = START


def table(root) -> dict[tuple[str, str], set[str]]:
    """The rows of the table: (kind, name) -> what it reads."""
    text = (root / "docs" / "algorithms.md").read_text(encoding="utf-8").partition("# What each objective reads")[2]
    found = {}
    for kind, names, reads in re.findall(r"^\| ([a-z ]+) \| (`.*?) \| (.*?) \|$", text, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert (kind, name) not in found, f"{name} stands in two rows"
            found[kind, name] = set(re.findall(r"`(\w+)`", reads))
    return found


def rows_of(table, kind: str) -> dict[str, set[str]]:
    return {name: reads for (group, name), reads in table.items() if group == kind}


def read_by(function, inputs: dict, *, fixed: dict, numbers: tuple[str, ...] = ()) -> set[str]:
    """The inputs whose loss changes what a function gives, or the gradient by its first input.

    Each is exchanged for NaN; integers and booleans, which have none, for others of their kind. numbers: the inputs
    that the function reads as numbers of Python.
    """
    first = next(iter(inputs))

    @functools.partial(jax.jit, static_argnums=1)  # to compile each operation by itself takes three times as long
    def gradient(arrays, numbers):
        def value(x):
            found = function(**{**arrays, **dict(numbers), first: x}, **fixed)
            return jnp.sum(jnp.where(jnp.isnan(found), 12345.0, found)), found

        return jax.grad(value, has_aux=True)(arrays[first])

    def results(values):
        arrays = {name: x for name, x in values.items() if name not in numbers}
        return gradient(arrays, tuple((name, float(values[name])) for name in numbers))

    before, read = results(inputs), set()
    assert all(np.isfinite(x).all() for x in before)
    for name, x in inputs.items():
        after = results({**inputs, name: jax.tree.map(without, x)})
        if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True)):
            read.add(name)
    return read


def without(x):
    x = np.asarray(x)
    if x.dtype == bool:
        return ~x
    return x[::-1] + 1 if np.issubdtype(x.dtype, np.integer) else np.full_like(x, np.nan)


def public(module, ending="") -> dict:
    """The functions of a module by the name that a configuration has for them."""
    found = {name: x for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__}
    return {name.removesuffix(ending): x for name, x in found.items() if name.endswith(ending) and name[0] != "_"}


POLICY = {name: getattr(policy_losses, name) for name in policy_losses.__all__}


def test_policy_losses_by_name_are_losses():
    """The other public names of the module, its helpers, are refused."""
    for name, loss in POLICY.items():
        assert resolve(name, policy_losses) is loss
        arguments = list(inspect.signature(loss).parameters)
        assert arguments[:5] == ["logps", "old_logps", "advantages", "epsilon_low", "epsilon_high"]
        assert "mask" in arguments
    helpers = {name for name in vars(policy_losses) if name[0] != "_"} - POLICY.keys()
    assert {"ClipFractions", "clip_fractions", "value_clip", "kl_cov_tokens"} < helpers
    for name in helpers:
        with pytest.raises(ConfigError, match=f"^unknown name '{name}'; known are a2po, cispo, clip_cov"):
            resolve(name, policy_losses)


def test_the_table_has_every_name(root):
    """No loss, rule or form is missing, none is made up, and a policy loss says whom it compares with by default."""
    rows = table(root)
    rules = {**public(advantages, "_advantages"), **public(turn_advantages, "_advantages")}
    assert rows_of(rows, "policy loss").keys() == POLICY.keys()
    assert rows_of(rows, "advantage").keys() == rules.keys()
    assert rows_of(rows, "preference loss").keys() == preference_losses.LOSSES.keys() - {"sigmoid"}
    assert rows_of(rows, "sft loss").keys() == public(sft_losses).keys()
    assert rows_of(rows, "distillation").keys() == {"advantage", "divergence", "uld"}
    assert rows_of(rows, "critic").keys() == {"value_clip"}
    assert rows_of(rows, "setting").keys() == SETTINGS.keys()
    assert rows_of(rows, "reward model").keys() == {"bradley_terry"}
    assert rows_of(rows, "process reward model").keys() == public(step_losses).keys()


def test_a_module_lists_what_it_has():
    """The tables in their docstrings, where a reader looks for a name."""
    rules = public(advantages, "_advantages")
    for module, names in ((policy_losses, POLICY), (preference_losses, preference_losses.LOSSES), (advantages, rules)):
        listed = set(re.findall(r"\w+", module.__doc__ or ""))
        assert not names.keys() - listed - {"sigmoid"}, module.__name__


@pytest.mark.parametrize("name", sorted(POLICY))
def test_policy_losses_read_what_the_table_says(root, name):
    loss, said = POLICY[name], table(root)["policy loss", name]
    parameters = inspect.signature(loss).parameters
    inputs = {
        "logps": LOGPS,
        "old_logps": LOGPS + RNG.normal(0, 0.6, (N, T)),
        "advantages": RNG.normal(size=N) + 0.5,
        "epsilon_low": np.float32(0.3),
        "epsilon_high": np.float32(1.2 if name == "cispo" else 0.4),
    }
    if "importance_weights" in parameters:
        inputs["importance_weights"] = RNG.uniform(0.5, 2, (N, T))
    fixed = {"mask": MASK}
    if "key" in parameters:
        fixed["key"] = jax.random.key(0)
    numbers = ("epsilon_low", "epsilon_high") if name == "gmpo" else ()
    found = read_by(lambda **x: with_metrics(loss(**x))[0], inputs, fixed=fixed, numbers=numbers)
    assert found >= {"logps", "advantages"}
    declared = getattr(loss, "old_logps", None)
    assert ("old_logps" in found) == (declared != "unread"), "what the loss declares is what it does"
    by_default = {"old_logps": declared if declared in ("sampler", "reference") else "old"}
    assert {by_default.get(x, x) for x in found} - {"logps"} == said


def advantage_inputs() -> dict:
    records = [[Turn(2, 0.3, None), Turn(int(MASK[i].sum()), 0.1 * i, i % 2)] for i in range(N)]
    return {
        "token_rewards": RNG.normal(size=(N, T)),
        "scores": RNG.uniform(0.1, 1.0, N),  # `maxrl` says nothing of groups whose mean is not above 0
        "rewards": RNG.normal(size=(N, 2)),
        "weights": np.array([1.0, 0.5]),
        "values": RNG.normal(size=(N, T)),
        "greedy_scores": RNG.normal(size=N // K),
        "reference_scores": RNG.normal(size=(N, 3)),
        "lengths": MASK.sum(1).astype(np.float32),
        "logit_norms": RNG.uniform(0.1, 1.5, (N, T)),
        "turns": turn_table(records, 2, K, 0)._replace(rewards=RNG.normal(size=(N, 2)).astype(np.float32)),
        "parts": turn_table([[Turn(2, 0.3, "a"), Turn(6, np.nan)] for _ in range(N)], 2, K, 0),
        "roles": np.tile(np.array([[0, 1]]), (N, 1)),
        "baselines": RNG.normal(size=3),
    }


@pytest.mark.parametrize(
    "name", sorted({**public(advantages, "_advantages"), **public(turn_advantages, "_advantages")})
)
def test_advantages_read_what_the_table_says(root, name):
    rules = {**public(advantages, "_advantages"), **public(turn_advantages, "_advantages")}
    parameters = inspect.signature(rules[name]).parameters
    everything = advantage_inputs()
    inputs = {key: x for key, x in everything.items() if key in parameters}
    others = {"mask": MASK, "group_size": K, "scale": "group"}
    fixed = {key: x for key, x in others.items() if key in parameters}
    assert inputs.keys() | fixed.keys() >= {k for k, p in parameters.items() if p.default is p.empty}

    rule = jax.jit(lambda given: rules[name](**given, **fixed))

    def advantages_and_returns(**given):
        result = rule(given)
        parts = result if isinstance(result, tuple) else (result,)
        return np.concatenate([np.nan_to_num(np.asarray(x, np.float64), nan=12345.0).reshape(-1) for x in parts])

    before = advantages_and_returns(**inputs)
    changed = {key: jax.tree.map(without, x) for key, x in inputs.items()}
    found = {key for key in inputs if (advantages_and_returns(**inputs | {key: changed[key]}) != before).any()}
    assert found - {"weights"} == table(root)["advantage", name]


@pytest.mark.parametrize("name", sorted(preference_losses.LOSSES.keys() - {"sigmoid"}))
def test_preference_losses_read_what_the_table_says(root, name):
    """`reference` where the reference's log-probs change the loss, which is what the loss declares."""
    loss, pairs = preference_losses.LOSSES[name], 6
    logps = -RNG.uniform(5, 20, (4, pairs))
    lengths = RNG.integers(3, 9, (2, pairs)).astype(float)
    if loss.rows in ("pair", "triple"):
        keys = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
        inputs = dict(zip(keys, logps, strict=True)) | {"lengths": tuple(lengths)}
        fixed = {"beta": 0.3}
        if "reward_shift" in inspect.signature(loss).parameters:
            inputs["reward_shift"] = np.float32(0.2)
        names = {"policy_chosen": "chosen", "policy_rejected": "rejected"}
    else:
        inputs = {"policy": logps[0], "ref": logps[1], "labels": np.arange(pairs) % 2 == 0, "kl": np.float32(0.3)}
        fixed = {"beta": 0.3}
        names = {"policy": "completion", "ref": "reference", "kl": "mismatched"}
    found = read_by(lambda **x: with_metrics(loss(**x))[0], inputs, fixed=fixed)
    names |= {"ref_chosen": "reference", "ref_rejected": "reference"}
    found = {names.get(x, x) for x in found}
    assert ("reference" in found) == bool(getattr(loss, "reference", False))
    assert found == table(root)["preference loss", name]


SETTINGS = {
    "beta": {"beta": 0.1},
    "kl_bias_correction": {"beta": 0.1, "kl_bias_correction": True},
    "entropy_coef": {"entropy_coef": 0.1},
    "importance_correction": {"importance_correction": "token_mask", "importance_min": 0.7, "importance_max": 1.5},
    "importance_normalize": {"importance_correction": "token_truncate", "importance_normalize": True},
    "rejection": {"rejection": "token_k1,seq_max_k2", "rejection_bounds": "0.5_2.0,4.0"},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.05},
    "old_logps": {"old_logps": "sampler", "importance_correction": "token_truncate", "importance_max": 1.1},
}


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_settings_read_what_the_table_says(root, setting):
    """Besides the loss `reinforce`, which reads advantages alone."""
    config = default()
    config.algorithm.update({"loss": "reinforce", **SETTINGS[setting]})
    spec = policy_spec(config)
    # Half of the rows moved towards the sampler and half away from it, so that every mask keeps some and drops some.
    sampled = LOGPS + np.where(np.arange(N) % 2, 0.3, -0.3)[:, None] * RNG.uniform(0.5, 2, (N, T))
    inputs = {
        "logps": LOGPS,
        "advantages": np.where(np.arange(N)[:, None] % 3, -1.0, 1.0) * RNG.uniform(0.5, 1, (N, T)),
        "old_logps": LOGPS + RNG.normal(0, 0.1, (N, T)),
        "sample_logps": sampled,
        "ref_logps": LOGPS + RNG.normal(0, 0.5, (N, T)) if spec.beta else np.zeros((N, T)),
    }

    def objective(logps, **fields):
        if not spec.beta:
            del fields["ref_logps"]
        batch = Batch(Inputs(np.zeros((N, T), np.int32)), mask=MASK.astype(np.float32), **fields)
        observed = (logps, logps) if spec.importance_normalize else None
        tokens = TokenStatistics(logps, -logps, logps)
        return policy_objective(spec, tokens, policy_gradient(spec, None).prepare(batch, observed))[0]

    names = {"old_logps": "old", "sample_logps": "sampler", "ref_logps": "reference"}
    found = {names.get(x, x) for x in read_by(objective, inputs, fixed={})}
    assert found - {"logps", "advantages"} == table(root)["setting", setting]
    assert found >= {"logps", "advantages"}


def test_the_others_read_what_the_table_says(root):
    said = table(root)
    for name, loss in public(sft_losses).items():
        arrays = {"logps": LOGPS} | ({"entropy": 1.0 - LOGPS} if name == "eaft" else {})
        assert read_by(loss, arrays, fixed={}) == said["sft loss", name] == arrays.keys()
    values = {"values": LOGPS, "old_values": LOGPS + RNG.normal(size=(N, T)), "returns": RNG.normal(size=(N, T))}
    assert read_by(policy_losses.value_clip, values, fixed={"epsilon": 0.2}) == said["critic", "value_clip"]
    assert "old_values" not in read_by(policy_losses.value_clip, values, fixed={"epsilon": None})
    scores = {name: RNG.normal(size=N) for name in ("chosen_scores", "rejected_scores", "margin")}
    assert read_by(preference_losses.bradley_terry, scores, fixed={}) == said["reward model", "bradley_terry"]
    steps = {"logits": RNG.normal(size=(N, T, 2)), "labels": RNG.random((N, T))}
    for name, loss in public(step_losses).items():
        assert read_by(loss, steps, fixed={}) == said["process reward model", name]
    terms = {"advantages": RNG.normal(size=(N, T)), "logps": LOGPS, "teacher_logps": LOGPS - 0.5}
    found = read_by(distillation.distilled_advantages, terms, fixed={"mask": MASK})
    names = {"logps": "sampler", "teacher_logps": "teacher"}
    assert {names.get(x, x) for x in found} == said["distillation", "advantage"]
    both = {
        "log_probs": np.log(RNG.dirichlet(np.ones(5), N)),
        "teacher_log_probs": np.log(RNG.dirichlet(np.ones(5), N)),
    }
    names = {"log_probs": "policy", "teacher_log_probs": "teacher"}
    for beta in (0.0, 0.5, 1.0):
        found = read_by(distillation.generalized_jsd, both, fixed={"beta": beta})
        assert {names[x] for x in found} == said["distillation", "divergence"]
    shares = {"probs": RNG.dirichlet(np.ones(5), N), "teacher_probs": RNG.dirichlet(np.ones(7), N)}
    names = {"probs": "policy", "teacher_probs": "teacher"}
    assert {names[x] for x in read_by(distillation.sorted_distance, shares, fixed={})} == said["distillation", "uld"]
