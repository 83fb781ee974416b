"""Settings that change when a run goes on: told, kept, or refused."""

import json
import re
import shutil
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, from_json, to_json
from jaxrl_llm.config.schema import BY_NAME, IDENTITY, OF_A_START
from jaxrl_llm.training.checkpoint.outputs import given_to, write_given
from jaxrl_llm.training.checkpoint.settings import (
    HISTORY,
    OF_ARRAYS,
    OF_FROZEN,
    OF_MOMENTS,
    OF_POSITION,
    changed_settings,
    check_changes,
    check_frozen,
    start_record,
)
from tests.models.oracles import VARIANTS


@pytest.fixture
def former(tmp_path):
    config = default()
    start_record(tmp_path, config, {}, None)
    return config


def test_the_settings_of_a_run_are_settings():
    assert set(IDENTITY) | set(OF_A_START) <= set(BY_NAME)
    assert not set(IDENTITY) & set(OF_A_START)


def test_changes_are_told_and_kept(tmp_path, former):
    assert changed_settings(tmp_path, default()) == {}
    config = default()
    config.optimizer.learning_rate, config.total_steps, config.output_dir = 0.5, 200, "elsewhere"
    config.eval.every, config.callbacks = -1, ("early_stopping(metric='reward')",)
    changes = changed_settings(tmp_path, config)
    assert changes["optimizer.learning_rate"] == (1e-6, 0.5)
    assert changes.keys() == {"optimizer.learning_rate", "total_steps", "eval.every", "callbacks"}
    check_changes(tmp_path, changes, ())
    told = start_record(tmp_path, config, changes, 7)
    assert "changed after step 7: optimizer.learning_rate: 1e-06 -> 0.5" in told and len(told) == 4
    assert "changed after step 7: callbacks: (empty) -> early_stopping(metric='reward')" in told
    kept = json.loads((tmp_path / HISTORY / "until_step_00007.json").read_text())
    assert from_json(json.dumps(kept["config"])) == from_json(to_json(former))
    assert kept["changes"]["total_steps"] == [100, 200] and kept["until_step"] == 7
    # A second change at the same step has its own file; a new run forgets them.
    start_record(tmp_path, former, changed_settings(tmp_path, former), 7)
    assert {path.name for path in (tmp_path / HISTORY).iterdir()} == {
        "until_step_00007.json",
        "until_step_00007_2.json",
    }
    assert changed_settings(tmp_path, former) == {}
    start_record(tmp_path, former, {}, None)
    assert not (tmp_path / HISTORY).exists()


def test_the_reference_of_a_run_of_an_earlier_version_stays_what_it_was(tmp_path):
    config = default()
    config.lora.reference = "base"  # the default of then
    start_record(tmp_path, config, {}, None)
    assert changed_settings(tmp_path, default()) == {}
    config.lora.path = "folder"
    start_record(tmp_path, config, {}, None)
    config.lora.reference = "auto"
    changes = changed_settings(tmp_path, config)
    assert changes == {"lora.reference": ("base", "start")}
    with pytest.raises(ConfigError, match=r"lora.reference: base -> start"):
        check_changes(tmp_path, changes, ())


def test_adapters_are_trained_beside_matrices_of_their_storage(tmp_path, former):
    config = default()
    config.model.quantize, config.model.quantize_experts = "nf4", "int8"
    words = r"beside other .*: model.quantize: none -> nf4; model.quantize_experts: same -> int8\. Set them as"
    with pytest.raises(ConfigError, match=words):
        check_frozen(tmp_path, config, OF_FROZEN, ())
    assert check_frozen(tmp_path, config, OF_FROZEN, ("model.quantize", "model.quantize_experts")) == []


def test_moments_of_8_bits_are_not_converted(tmp_path):
    """They are other arrays, so that no checkpoint can be read into them."""
    changes = {"optimizer.moment_dtype": ("float32", "float8")}
    for accepted in ((), ("optimizer.moment_dtype",)):
        with pytest.raises(ConfigError, match=r"moments of other types are not converted to float8, nor back$"):
            check_changes(tmp_path, changes, accepted)


@pytest.mark.parametrize("name", OF_MOMENTS)
def test_moments_of_other_shapes_are_those_of_a_new_optimizer(tmp_path, name):
    assert name in IDENTITY
    for accepted in ((), (name,)):
        words = rf"{name}: 2 -> 4\. .*checkpoint.load=model,extra.*with another {name} moments have other shapes$"
        with pytest.raises(ConfigError, match=words):
            check_changes(tmp_path, {name: (2, 4)}, accepted)


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_other_arrays_are_not_trained_on(tmp_path, name):
    """No checkpoint can be read into them, whatever is accepted."""
    assert name in IDENTITY
    words = rf"{name}: a -> b; seed: 1 -> 2\. Set them back, .*; with another {name} other arrays are .*/hf, or that of"
    with pytest.raises(ConfigError, match=words):
        check_changes(tmp_path, {name: ("a", "b"), "seed": (1, 2)}, ())
    with pytest.raises(ConfigError, match=rf"another one: {name}: a -> b\. Set them back"):
        check_changes(tmp_path, {name: ("a", "b"), "algorithm.loss": (1, 2)}, (name, "algorithm.loss"))


@pytest.mark.parametrize("name", OF_POSITION)
def test_a_position_is_of_one_order(tmp_path, name):
    """The way out that the message names is one: to accept the change was offered, and refused behind it."""
    for accepted in ((), (name,)):
        with pytest.raises(
            ConfigError, match=rf"one: {name}: .*with another {name} its position in the data.*/hf"
        ) as told:
            check_changes(tmp_path, {name: ("a", "b")}, accepted)
        assert "accept_changes" not in str(told.value)


@pytest.mark.parametrize("name", sorted({*IDENTITY} - {*OF_ARRAYS, *OF_MOMENTS, *OF_POSITION}))
def test_what_a_run_is_does_not_change_unasked(tmp_path, name):
    changes = {name: ("a", "b"), "optimizer.learning_rate": (1.0, 2.0)}
    with pytest.raises(ConfigError, match=rf"would go on as another one: {name}: a -> b\. .*accept_changes={name}$"):
        check_changes(tmp_path, changes, ())
    check_changes(tmp_path, changes, (name,))


def test_the_page_names_what_a_run_is(root):
    page = (root / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = page.partition("settings that define a run")[2].partition("Even when accepted")[0]
    found = {
        f"{section}.{name}"
        for section, names in re.findall(r"^\| `(\w+)` \| (.*) \|$", rows, re.MULTILINE)
        for name in names.split(", ")
    }
    assert found | {"seed"} == set(IDENTITY)


def test_every_refused_setting_is_named_at_once(tmp_path):
    changes = {"rollout.group_size": (8, 4), "algorithm.loss": ("auto", "gspo")}
    with pytest.raises(ConfigError, match=r"rollout\.group_size: 8 -> 4; algorithm\.loss: auto -> gspo"):
        check_changes(tmp_path, changes, ())
    with pytest.raises(
        ConfigError, match=r"one: algorithm\.loss: .*accept_changes=rollout\.group_size,algorithm\.loss$"
    ):
        check_changes(tmp_path, changes, ("rollout.group_size",))


def test_experts_stay_as_they_were_before_there_was_a_setting_for_them(tmp_path):
    """A record without it is of experts as numbers, which adapters were trained beside; a dense model has none."""
    config = default()
    config.model.quantize, config.lora.rank = "nf4", 4
    VARIANTS["mixtral"]().save_pretrained(tmp_path / "mixture")
    for path, changes in (
        ("embedded:sort", {}),
        (str(tmp_path / "mixture"), {"model.quantize_experts": ("none", "same")}),
    ):
        config.model.path = path
        record = json.loads(to_json(config))
        del record["model"]["quantize_experts"]
        (tmp_path / "config.json").write_text(json.dumps(record))
        assert changed_settings(tmp_path, config) == changes
    with pytest.raises(ConfigError, match=r"model\.quantize_experts: none -> same\. Set them back"):
        check_changes(tmp_path, changes, ())
    config.model.quantize_experts = "none"
    assert changed_settings(tmp_path, config) == {}


@pytest.mark.parametrize("text", [b"garbage", b"{}\n[", b'{"no_such_key": 1}', b"\xff", b"\0\0", None])
def test_a_record_that_cannot_be_read_is_no_obstacle(tmp_path, former, text):
    """A crash of the machine may leave zeros. The run goes on, and says what was not compared."""
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_bytes(text)
    assert changed_settings(tmp_path, former) == {}
    (line,) = check_frozen(tmp_path, former, OF_FROZEN, ())
    assert line.startswith(f"{tmp_path}/config.json cannot be read")
    (line,) = start_record(tmp_path, former, {}, 7)
    assert line.startswith(f"{tmp_path}/config.json cannot be read")
    assert line.endswith("whether the settings are those that the run had is not checked")
    assert start_record(tmp_path, former, {}, 8) == []
    for words in ("{", "[]", "\0"):
        (tmp_path / "given.json").write_text(words)
        with pytest.raises(ConfigError, match=r"given\.json (is not JSON|must hold a JSON object)"):
            given_to(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("optimizer.learning_rate", "may change without it"), ("algorithm.los", "the closest is algorithm.loss")],
)
def test_only_what_is_refused_can_be_accepted(name, message):
    config = default()
    config.checkpoint.accept_changes = (name,)
    with pytest.raises(ConfigError, match=f"accept_changes names '{name}', which .*{message}"):
        jaxrl_llm.train(config)


def test_in_a_run(tiny_run, tmp_path, capsys):
    run = shutil.copytree(tiny_run.output_dir, tmp_path / "run")
    config = from_json((run / "config.json").read_text())
    config.output_dir, config.rollout.group_size = str(run), 2
    with pytest.raises(ConfigError, match=r"rollout\.group_size: 4 -> 2"):
        jaxrl_llm.train(config)
    config.rollout.group_size, config.optimizer.learning_rate = 4, 0.123
    jaxrl_llm.train(config)
    assert "changed after step 2: optimizer.learning_rate: 0.0003 -> 0.123" in capsys.readouterr().err
    assert (
        json.loads((run / HISTORY / "until_step_00002.json").read_text())["config"]["optimizer"]["learning_rate"]
        == 3e-4
    )
    assert json.loads((run / "config.json").read_text())["optimizer"]["learning_rate"] == 0.123
    assert not (run / ".lock").exists()


def test_a_kill_while_the_settings_are_written_leaves_the_former_ones(tmp_path, former, monkeypatch):
    """Without them the next start could not tell that it is another run."""
    before = (tmp_path / "config.json").read_text()
    write_given(tmp_path, {"model": "embedded:sort, in memory"})
    write = Path.write_text

    def killed(path, text, **options):
        write(path, text[:10], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        start_record(tmp_path, former, {}, 3)
    with pytest.raises(KeyboardInterrupt):
        write_given(tmp_path, {"model": "another, in memory"})
    assert (tmp_path / "config.json").read_text() == before
    assert given_to(tmp_path) == {"model": "embedded:sort, in memory"}
