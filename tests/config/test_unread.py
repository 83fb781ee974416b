"""What a run says of settings that it does not read."""

import functools
import inspect
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.algorithms import policy_losses
from jaxrl_llm.config import default
from jaxrl_llm.config.checks.values import ENVIRONMENTS, in_use
from jaxrl_llm.config.schema import BY_NAME
from jaxrl_llm.config.unread import (
    OF_ADAPTERS,
    OF_ALL,
    OF_CRITICS,
    OF_EPISODES,
    OF_GIVEN_ROWS,
    OF_OPTIMIZERS,
    OF_OTHERS,
    OF_PREFERENCES,
    OF_REFERENCES,
    OF_ROLLOUTS,
    OF_SAMPLES,
    OF_SCHEDULES,
    OF_SHARED_CRITICS,
    unread,
)

ROOT = Path(__file__).parents[2]
BETA, ADAPTED = {"algorithm__beta": 0.1}, {"lora__rank": 8}


def told(name: str = "grpo", **settings) -> list[str]:
    config = default()
    config.algorithm.name = name
    for key, value in settings.items():
        section, leaf = key.split("__")
        config[section][leaf] = value
    return read_by(config)


def read_by(config) -> list[str]:
    """What is unread where the configuration names all that there is, and nothing is given in memory."""
    return unread(config, bool(config.lora.rank or config.lora.path), any(True for _ in in_use(config, ENVIRONMENTS)))


def own_loss(logps, advantages, epsilon_low):
    return -logps * advantages * epsilon_low


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"data__sources": ("a",), "data__path": "b"},
            "data.sources is set, which .*: data.path has no effect",
        ),
        ({"eval__sets": ("a=b",), "data__eval_path": "c"}, "eval.sets is set, .*: data.eval_path has no effect"),
        ({"data__shuffle_buffer": 9}, "data.streaming is false: data.shuffle_buffer has no effect"),
        ({"data__curriculum_visits": 2}, "no prompt is skipped: data.curriculum_visits has no effect"),
        ({"data__max_length": 9}, "whose rows have rollout.max_prompt_length .*: data.max_length has no effect"),
        ({"lora__alpha": 32.0, "lora__targets": ("q_proj",)}, "there are no adapters .*: lora.alpha, lora.targets has"),
        ({"critic__learning_rate": 1e-4}, "algorithm.name is grpo, which has no critic: critic.learning_rate has no"),
        ({"data__precompute_reference": True}, "which samples its rows: data.precompute_reference"),
        ({"algorithm__ld_alpha": 0.5}, "which compares no pairs: algorithm.ld_alpha"),
        ({"name": "sft", "algorithm__beta": 0.1}, "algorithm.name is sft, which samples no .*: algorithm.beta"),
        ({"name": "preference", "algorithm__epsilon_high": 0.3}, "which samples no .*: algorithm.epsilon_high"),
        ({"optimizer__name": "optax:nadam(b1=0.8)", "optimizer__b1": 0.8}, "takes its options in .*: optimizer.b1 has"),
        ({"optimizer__name": "came", "optimizer__eps": 1e-6}, "has no such number: optimizer.eps has"),
        (
            {"optimizer__name": "adafactor", "optimizer__b1": 0.8, "optimizer__b2": 0.9},
            "r.b1, optimizer.b2 has no effe",
        ),
        ({"name": "ppo", "optimizer__name": "optax:nadam", "critic__weight_decay": 0.1}, ": critic.weight_decay has"),
        ({"name": "reward_model", "algorithm__offload_reference": True}, ": algorithm.offload_reference has no effect"),
        ({"name": "sft", "data__precompute_reference": True}, "no reference: data.precompute_reference has no effect"),
        ({"name": "reward_model", "data__loss_on": "all"}, "reads whole completions: data.loss_on has no effect"),
        (
            {"name": "preference", "algorithm__loss": "orpo", "data__precompute_reference": True},
            "loss is orpo, which reads no reference: data.precompute_reference has no effect",
        ),
        (
            {"name": "preference", "algorithm__reference_free": True, "algorithm__ref_mixup_alpha": 0.5},
            "reference_free is true, .*: algorithm.ref_mixup_alpha has no effect",
        ),
        (
            {"algorithm__offload_reference": True},
            "beta is 0, .* no reference: algorithm.offload_reference has no effect",
        ),
        ({**BETA, "algorithm__ref_mixup_alpha": 0.5}, "never moves: algorithm.ref_mixup_alpha has no effect"),
        (
            {**BETA, **ADAPTED, "algorithm__offload_reference": True},
            "reference is base, .*: algorithm.offload_reference",
        ),
        (
            {"name": "preference", **ADAPTED, "lora__reference": "start", "algorithm__offload_reference": True},
            "reference is start, so that the reference shares .*: algorithm.offload_reference has no effect",
        ),
        (
            {"name": "preference", "data__precompute_reference": True, "algorithm__offload_reference": True},
            "no reference is kept: algorithm.offload_reference has no effect",
        ),
        ({**ADAPTED, "teacher__path": "self(rate=0)", "teacher__offload": True}, "is self.*: teacher.offload has no"),
        (
            {"algorithm__advantage": "rloo(normalize=True)", "algorithm__scale_rewards": "none"},
            r"advantage is rloo\(normalize=True\), whose formula .*: algorithm.scale_rewards has no effect",
        ),
        (
            {"algorithm__loss": "sapo", "algorithm__epsilon_high": 0.3, "algorithm__epsilon_low": 0.3},
            "is sapo, whose formula has no such bound: algorithm.epsilon_high, algorithm.epsilon_low has no",
        ),
        ({"algorithm__loss": "cispo", "algorithm__epsilon_low": 0.3}, "is cispo, .*: algorithm.epsilon_low has no"),
        ({"algorithm__loss": "opd", "algorithm__epsilon_high": 0.3}, "is opd, .*: algorithm.epsilon_high has no"),
        (
            {"algorithm__loss": f"{__file__}:own_loss", "algorithm__epsilon_high": 0.3},
            "own_loss, whose formula has no such bound: algorithm.epsilon_high has no effect",
        ),
        (
            {"name": "preference", "algorithm__loss": "simpo+sft", "algorithm__reference_free": True},
            r"loss is simpo\+sft, which reads no reference: algorithm.reference_free has no effect",
        ),
        ({"algorithm__kl": "k2"}, "there is no reference: algorithm.kl has no effect"),
        ({**BETA, "algorithm__kl_target": 0.2}, "kl_controller is fixed: algorithm.kl_target has no effect"),
        ({"algorithm__entropy_delta": 0.1}, "entropy_controller is fixed: algorithm.entropy_delta has no effect"),
        ({"algorithm__importance_max": 2.0}, "importance_correction is none: algorithm.importance_max has no effect"),
        ({"algorithm__overlong_penalty": 2.0}, "overlong_buffer is 0: algorithm.overlong_penalty has no effect"),
        ({"algorithm__max_sampling_rounds": 3}, "dynamic_sampling is false: algorithm.max_sampling_rounds has no"),
        (
            {"lora__path": "a", "lora__alpha": 32.0, "lora__targets": ("q_proj",)},
            "own: lora.alpha, lora.targets",
        ),
        ({**ADAPTED, "lora__reference": "copy"}, "there is no reference: lora.reference has no effect"),
        ({"name": "sft", **ADAPTED, "lora__reference": "copy"}, "samples no .*: lora.reference has no effect"),
        (
            {"name": "sft", "rollout__staleness": 2, "rollout__devices": 1},
            "rollout.devices, rollout.staleness has",
        ),
        ({"environment__max_turns": 3}, "no environment, tool or agent: environment.max_turns has no effect"),
        ({"environment__agent_timeout": 3.0}, "environment.agent is none: environment.agent_timeout has no effect"),
        ({"optimizer__min_lr_ratio": 0.1}, "optimizer.schedule is constant: optimizer.min_lr_ratio has no effect"),
        (
            {"optimizer__schedule": "linear", "optimizer__cycles": 2.0, "optimizer__decay_shape": "cosine"},
            "schedule is linear: optimizer.cycles, optimizer.decay_shape has no effect",
        ),
        (
            {"name": "ppo", "optimizer__cycles": 2.0},
            "and critic.schedule is constant: optimizer.cycles has",
        ),
        ({"name": "ppo", "critic__min_lr_ratio": 0.1}, "^critic.schedule is constant: critic.min_lr_ratio has no"),
        (
            {"name": "ppo", "critic__shared": True, "critic__learning_rate": 1e-4, "critic__max_grad_norm": 0.5},
            "critic.shared is true, .*: critic.learning_rate, critic.max_grad_norm has no effect",
        ),
        ({"name": "ppo", "critic__coef": 0.5}, "critic.shared is false: critic.coef has no effect"),
        ({"optimizer__weight_decay_shape": "cosine"}, "weight_decay_end is none: optimizer.weight_decay_shape has no"),
        ({"batch__packing": "false", "batch__pack_length": 64}, "batch.packing is false: batch.pack_length has no"),
        ({"checkpoint__best_mode": "min"}, "checkpoint.best is none: checkpoint.best_mode has no effect"),
        ({"logging__profile_process": 1}, "profile_steps is none: logging.profile_process has no effect"),
    ],
)
def test_settings_without_effect_are_named(settings, words):
    (line,) = told(**settings)
    assert re.search(words, line), line


@pytest.mark.parametrize(
    "settings",
    [
        {"lora__rank": 8, "lora__alpha": 32.0},
        {"lora__path": "folder", "lora__reference": "copy", **BETA},
        {"data__sources": ("a",), "data__split": "b", "data__streaming": True, "data__shuffle_buffer": 9},
        {"data__curriculum_hard": 0.1, "data__curriculum_visits": 2, "data__eval_path": "a"},
        {"name": "sft", "data__max_length": 9},
        {"data__format": "own.py:form", "data__max_length": 9},
        {"name": "ppo", "critic__learning_rate": 1e-4},
        {"name": "ppo", "critic__shared": True, "critic__coef": 0.5, "critic__epsilon": 0.1},
        {"name": "ppo", "critic__schedule": "cosine", "optimizer__cycles": 1.0, "optimizer__min_lr_ratio": 0.1},
        {"optimizer__schedule": "wsd", "optimizer__decay_shape": "cosine"},
        {"environment__name": "a", "environment__max_turns": 3},
        {"environment__agent": "a.py:f", "environment__agent_timeout": 3.0, "environment__workers": 2},
        {"optimizer__name": "optax:nadam", "optimizer__max_grad_norm": 0.5},
        {"optimizer__name": "lion", "optimizer__b1": 0.95},
        {**BETA, "algorithm__offload_reference": True},
        {"environment__options": ("a(beta=0.1)",), "algorithm__offload_reference": True},
        {**BETA, **ADAPTED, "lora__reference": "copy", "algorithm__offload_reference": True},
        {**BETA, "algorithm__ref_sync_steps": 2, "algorithm__ref_mixup_alpha": 0.5},
        {"teacher__path": "self(rate=0)", "teacher__offload": True},
        {**ADAPTED, "teacher__path": "self(rate=0.05)", "teacher__offload": True},
        {**ADAPTED, "teacher__path": "folder", "teacher__offload": True},
        {"teacher__on_policy": 0.5, "data__loss_on": "all"},
        {"algorithm__epsilon_low": 0.1, "algorithm__epsilon_high": 0.3},
        {"algorithm__loss": "cispo", "algorithm__epsilon_high": 5.0},
        {"algorithm__loss": f"{__file__}:own_loss", "algorithm__epsilon_low": 0.3},
        {**BETA, "algorithm__kl": "k2", "algorithm__kl_controller": "adaptive", "algorithm__kl_target": 0.2},
        {"algorithm__dynamic_sampling": True, "algorithm__max_sampling_rounds": 3},
        {"algorithm__advantage": "gigpo", "algorithm__scale_rewards": "none"},
        {"algorithm__advantage": "rules.py:own_advantages", "algorithm__scale_rewards": "none"},
        {"algorithm__advantage": "opo", "algorithm__scale_rewards": "none", "environment__agent": "a.py:f"},  # of parts
        {"name": "preference", "algorithm__beta": 0.3, "algorithm__ld_alpha": 0.5, "data__precompute_reference": True},
        {"name": "preference", "algorithm__loss": "simpo+dpo", "algorithm__reference_free": True},
        {"name": "sft", "algorithm__loss": "dft", "data__loss_on": "all", "algorithm__neftune_alpha": 5.0},
    ],
)
def test_settings_that_are_read_are_not(settings):
    assert told(**settings) == []


def test_what_is_given_in_memory_reads_its_settings():
    """A model with adapters, whose reference `train` sets itself, and an environment."""
    config = default()
    config.lora.dropout, config.lora.reference, config.environment.max_turns = 0.1, "start", 3
    assert unread(config, adapted=True, plays=True) == []
    config.lora.alpha = 32.0
    (line,) = unread(config, adapted=True, plays=True)
    assert "trained on have such of their own: lora.alpha has no effect" in line


def test_no_configuration_that_ships_has_a_setting_without_effect():
    paths = sorted(path for path in (ROOT / "configs").rglob("*.py") if not path.name.startswith("_"))
    made = {path: runpy.run_path(str(path)).get("get_config") for path in paths}
    assert sum(make is not None for make in made.values()) > 30
    assert {path.name: lines for path, make in made.items() if make is not None and (lines := read_by(make()))} == {}
    further = runpy.run_path(str(ROOT / "configs" / "further.py"))
    assert {form: lines for form in further["FORMS"] if (lines := read_by(further["get_config"](form)))} == {}


def test_the_names_are_those_of_settings():
    groups = (OF_ADAPTERS, OF_GIVEN_ROWS, OF_REFERENCES, OF_PREFERENCES, OF_ALL, OF_OPTIMIZERS, OF_CRITICS)
    groups += (OF_SHARED_CRITICS, OF_ROLLOUTS, OF_EPISODES, OF_SCHEDULES)
    groups += tuple((key, *others) for key, _, others in (*OF_OTHERS, *OF_SAMPLES))
    assert {name for group in groups for name in group} <= BY_NAME.keys()


def test_losses_read_the_epsilons_that_they_do_not_declare_unread():
    """By whether any operation takes them."""
    rows = jnp.zeros((2, 3))
    for name in policy_losses.__all__:
        loss = getattr(policy_losses, name)
        options = {"mask": rows + 1, "key": jax.random.key(0), "epsilon_low": 0.2, "epsilon_high": 2.0}
        options = {key: x for key, x in options.items() if key in inspect.signature(loss).parameters}
        for key in ("epsilon_low", "epsilon_high"):
            try:
                call = functools.partial(loss, rows, rows, rows, **options)
                found = jax.make_jaxpr(lambda x, call=call, key=key: call(**{key: x}))(1.5).jaxpr
                reads = any(x is found.invars[0] for equation in found.eqns for x in equation.invars)
            except jax.errors.ConcretizationTypeError:  # read as a number
                reads = True
            assert reads != (key in getattr(loss, "unread", ())), (name, key)
