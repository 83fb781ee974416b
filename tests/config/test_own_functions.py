"""Losses and advantages of the user's own: their files are run when a run is built, not by a look at its settings."""

import re

import jax
import pytest

from jaxrl_llm.algorithms import policy_losses
from jaxrl_llm.algorithms.preference_losses import LOSSES
from jaxrl_llm.config import ConfigError, default, rows_together, validate
from jaxrl_llm.config.checks.contradictions import check_own_functions
from jaxrl_llm.config.resolve import resolve_with_options
from jaxrl_llm.training.advantages import advantage_rule
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.objectives import POLICY_NAMES, PREFERENCE_NAMES, policy_loss, preference_spec
from jaxrl_llm.training.setup.run import build

LABELLED = """
from pathlib import Path
Path("ran").touch()
def own(chosen, rejected=None):
    return chosen
own.rows = "label"
def taking(ratio, importance_weights):
    return ratio
def scored(rewards, reference_scores):
    return rewards
"""


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(LABELLED)
    return path


def config_of(name: str, loss: str, **settings):
    config = default()
    config.algorithm.name, config.algorithm.loss = name, loss
    if name == "preference":
        config.data.path, config.algorithm.beta = "task:sort_preferences", 0.1
    for key, value in settings.items():
        section, _, leaf = key.partition("__")
        config[section][leaf] = value
    return config


@pytest.mark.parametrize("name", ["grpo", "sft", "preference"])
@pytest.mark.parametrize("loss", ["own.py:own", "gone.py:own", "own.py:gone"])
def test_a_look_runs_no_code_of_the_users(tmp_path, name, loss):
    """Nor does it refuse what only the loss can say: whether 3 rows are whole ones of what stays together."""
    settings = {"batch__prompts": 6, "batch__microbatch_rows": 3} if name == "preference" else {}
    validate(config_of(name, loss, **settings))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("gone.py:own", r"algorithm\.loss: there is no file gone\.py .*the closest is own\.py"),
        ("own.py:owner", r"algorithm\.loss: cannot find 'own\.py:owner': .* it defines own, scored, taking; "),
        ("no_such_module:own", r"algorithm\.loss: cannot find 'no_such_module:own': no module"),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "preference"])
def test_a_loss_that_is_not_found_is_refused_before_anything_is_read(name, loss, message):
    config = config_of(name, loss, model__path="nowhere/at_all")
    validate(config)
    mesh = build_mesh(config)
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match=message):
        build(config, mesh)


def test_what_the_loss_decides_is_checked_when_a_run_is_built(file):
    config = config_of("preference", "own.py:own", batch__prompts=6, batch__microbatch_rows=3)
    assert rows_together(config) == 1
    check_own_functions(config)
    file.write_text(LABELLED.replace('own.rows = "label"', ""))
    assert rows_together(config) == 2
    validate(config)
    with pytest.raises(ConfigError, match=r"batch\.microbatch_rows is 3, .*make it a multiple of 2"):
        check_own_functions(config)
    file.write_text(LABELLED)
    config = config_of("preference", "dpo+own.py:own")
    validate(config)
    with pytest.raises(ConfigError, match=r"but own\.py:own stands alone: it reads other rows"):
        check_own_functions(config)
    config = config_of("grpo", "own.py:taking", algorithm__importance_correction="sequence_truncate")
    validate(config)
    with pytest.raises(ConfigError, match=r"own\.py:taking takes the weights of tokens into its own ratio"):
        check_own_functions(config)


def test_what_an_advantage_decides_is_checked_when_a_run_is_built(tmp_path):
    config = config_of("grpo", "auto", algorithm__advantage="own.py:scored", algorithm__reference_samples=3)
    validate(config)
    assert not (tmp_path / "ran").exists()
    check_own_functions(config)
    config.data.curriculum_easy = 0.9
    validate(config)
    with pytest.raises(ConfigError, match=r"algorithm.advantage is 'own.py:scored', .*data\.curriculum_easy is 0.9"):
        check_own_functions(config)
    config.data.curriculum_easy, config.algorithm.advantage = None, "own.py:own"
    with pytest.raises(ConfigError, match=r"reference_samples is 3, but .* reads no scores of a reference"):
        check_own_functions(config)
    config.algorithm.advantage = "gone.py:own"
    with pytest.raises(ConfigError, match=r"algorithm.advantage: there is no file gone.py"):
        check_own_functions(config)


@pytest.mark.parametrize(
    ("name", "signature", "called"),
    [
        ("grpo", "logps, old_logps, advantages", r"advantages, epsilon_low, epsilon_high, mask=...\), and too many"),
        ("grpo", "logps, old_logps, advantages, low, high", "mask=.*and got an unexpected keyword argument 'mask'"),
        ("grpo", "*terms, key, importance_weights, **others", None),
        ("preference", "chosen, rejected, beta", r"policy_chosen, .*, beta, lengths=...\), and too many positional"),
        ("preference", "policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, **others", None),
    ],
)
def test_a_loss_that_takes_other_arguments_is_refused_before_it_is_called(file, name, signature, called):
    """A run would load its model and sample before the loss is first called."""
    file.write_text(f"def own({signature}):\n    raise AssertionError\n")
    loss_of = policy_loss if name == "grpo" else preference_spec
    if called is None:
        assert loss_of(config_of(name, "own.py:own"))
        return
    with pytest.raises(ConfigError, match=rf"algorithm.loss is 'own.py:own', but it is called as loss\(.*{called}"):
        loss_of(config_of(name, "own.py:own"))


def test_a_loss_that_computes_with_a_reference_says_that_it_reads_one(file):
    """It would be given None, of which the error of its own arithmetic says nothing."""
    code = "def own(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, lengths):\n    return {}\n"
    file.write_text(code.format("policy_chosen - ref_chosen"))
    with pytest.raises(
        ConfigError, match=r"computes with the log-probs of a reference, .*: write own.reference = True"
    ):
        preference_spec(config_of("preference", "own.py:own"))
    assert preference_spec(config_of("preference", "own.py:own+dpo")).needs_reference
    file.write_text(code.format("policy_chosen - ref_chosen") + "own.reference = True\n")
    assert preference_spec(config_of("preference", "own.py:own")).needs_reference
    file.write_text(code.format("policy_chosen if ref_chosen is None else ref_chosen"))
    assert not preference_spec(config_of("preference", "own.py:own")).needs_reference


@pytest.mark.parametrize(
    ("name", "loss", "message"),
    [
        ("preference", "rpo", "algorithm.loss: 'rpo' is called otherwise here: write dpo\\+sft"),
        ("preference", "KTO_pair", "write kto, which reads a pair as a desirable and an undesirable row"),
        ("preference", "bco(running_mean=True)", "write bco_pair"),
        ("preference", "SPPO_HARD", "the closest is sppo_hard"),
        ("preference", "gpg", "unknown name 'gpg'; known are"),
        ("grpo", "geo_mean", "algorithm.loss: 'geo_mean' is called otherwise here: write gmpo"),
    ],
)
def test_names_of_other_libraries_lead_to_the_loss(name, loss, message):
    with pytest.raises(ConfigError, match=message):
        (policy_loss if name == "grpo" else preference_spec)(config_of(name, loss))
    known = {**LOSSES, **vars(policy_losses)}
    assert not known.keys() & {*POLICY_NAMES, *PREFERENCE_NAMES} and "dpo" in known


def test_named_losses_are_checked_at_a_look():
    config = config_of("preference", "dpo", batch__prompts=6, batch__microbatch_rows=3)
    with pytest.raises(ConfigError, match=r"make it a multiple of 2"):
        validate(config)
    check_own_functions(config)


def test_options_are_read_as_what_their_defaults_are(file):
    file.write_text("def own(logps, flag=True, scale=1.0, count=2, name='x', other=None):\n    return logps\n")
    own, defaults = f"{file}:own", {"flag": True, "scale": 1.0, "count": 2, "name": "x", "other": None}
    for written, read in (
        ("flag='False', scale='0.5', count='3'", {"flag": False, "scale": 0.5, "count": 3}),
        ("flag=false, scale='-2', other=none", {"flag": False, "scale": -2, "other": None}),
        ("flag='false', name='False', other='1'", {"flag": False, "name": "False", "other": "1"}),
        ("flag='maybe', count='0.5', scale=[true, 1]", {"flag": "maybe", "count": "0.5", "scale": [True, 1]}),
    ):
        function, options = resolve_with_options(f"{own}({written})", {}, reserved=("logps",))
        assert options == read and function.__defaults__ == tuple(defaults.values())
        assert all(type(options[name]) is type(value) for name, value in read.items())
    # Python would read the last one alone of two, and the brackets behind others.
    for written in ("flag=maybe", "count=1, count=2", "count=1)(scale=2", "**{'count': 1}"):
        with pytest.raises(ConfigError, match=r"cannot read the options of .*; write name.*, each of them once"):
            resolve_with_options(f"{own}({written})", {})


def test_a_text_is_no_number_of_a_built_in_function():
    """As in rloo(normalize='False'), which would be true."""
    for written, message in (
        ("rloo(normalize='False')", "rloo: normalize is 'False', a text, but it takes true or false: write it unquote"),
        ("group(eps='1e-6')", "group: eps is '1e-6', a text, but it takes a number: write it unquoted"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            advantage_rule(written)
    assert advantage_rule("rloo(normalize=false)")[1] == {"normalize": False}
