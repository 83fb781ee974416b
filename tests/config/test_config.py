"""The configuration tree, its command line, and names to objects: what they accept, and what their errors say."""

import copy
import faulthandler
import importlib
import inspect
import json
import re
import sys
import threading
import types

import numpy as np
import pytest

from jaxrl_llm import __version__
from jaxrl_llm.algorithms import policy_losses, preference_losses
from jaxrl_llm.config import ConfigError, assign, batch_rows, default, from_json, schema, to_json, tree, validate
from jaxrl_llm.config.flags import find_config, help_text, load_flags, load_options, positional, shipped_configs
from jaxrl_llm.config.resolve import closest, import_optional, resolve, split_losses
from jaxrl_llm.config.schema import BY_NAME, FORMER, KEYS, LOSS_OPTIONS, RENAMED, SECTIONS, SYNONYMS
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.training.runtime.watchdog import MARGIN


def changed(**values):
    """The default configuration with `rollout__top_p=0.5` for rollout.top_p."""
    config = default()
    for name, value in values.items():
        tree.assign(config, name.replace("__", "."), value)
    return config


# --- the table and the tree ---


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gpu_memory_utilization", "rollout.memory_fraction"),
        ("log_prob_micro_batch_size_per_gpu", "batch.logps_microbatch_rows"),
        ("group_by_length", "data.group_by_length"),
    ],
)
def test_the_names_of_others_lead_to_the_key(name, key):
    with pytest.raises(ConfigError, match=rf"there is no key rollout\.{name}; the closest is {key}"):
        assign(default(), f"rollout.{name}", 1)


def test_the_names_of_others_are_names_of_keys_here():
    assert set(SYNONYMS.values()) <= set(BY_NAME) and not set(SYNONYMS) & set(BY_NAME)


def test_table_is_consistent():
    resolve = [key.name for key in KEYS]
    assert len(set(resolve)) == len(resolve)
    assert {name.rpartition(".")[0] for name in resolve} == set(SECTIONS)
    for key in KEYS:
        assert key.accepts(key.default), key.name
        assert key.doc.endswith("."), key.name


def test_default_has_every_key_and_is_valid():
    config = default()
    validate(config)
    assert config.is_locked
    assert config.rollout.temperature == 1.0
    assert config.eval.temperature is None
    assert config.logging.backends == ("console", "jsonl")


def test_defaults_are_not_shared():
    one = default()
    one.rollout.temperature = 0.5
    assert default().rollout.temperature == 1.0


def test_default_documentation_is_the_file(root):
    text = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert text == tree.reference(), "run: python -m jaxrl_llm.config > docs/configuration.md"
    assert all(f"`{key.name}`" in text for key in KEYS)


def test_module_prints_the_documentation(run_python):
    result = run_python("-m", "jaxrl_llm.config")
    assert result.returncode == 0
    assert result.stdout == tree.reference()


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        (Setting("a", 1.0, "", float, above=0, maximum=1), "a number > 0 and <= 1"),
        (Setting("a", None, "", int, minimum=1), "an integer >= 1, or none"),
        (Setting("a", 1, "", int, minimum=1, none=True), "an integer >= 1, or none"),
        (Setting("a", ("x",), "", choices=("x", "y")), "a list, each one of x, y"),
        (Setting("a", True, "", bool), "true or false"),
    ],
)
def test_allowed_in_words(key, allowed):
    assert key.allowed == allowed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout.temperature", -0.5),
        ("rollout.repetition_penalty", 0.0),
        ("rollout.presence_penalty", 2.5),
        ("rollout.temperature", float("nan")),
        ("rollout.temperature", float("inf")),
        ("rollout.temperature", "hot"),
        ("rollout.temperature", None),
        ("rollout.top_k", True),
        ("rollout.top_p", 1.5),
        ("rollout.top_k", -1),
        ("rollout.top_k", 2.0),
        ("optimizer.b1", 1.0),
        ("rewards.timeout", 0.0),
        ("model.dtype", "float16"),
        ("algorithm.kl", "k4"),
        ("data.shuffle", 1),
        ("data.path", 3),
        ("logging.backends", ("console", "telegram")),
        ("logging.backends", "console"),
        ("rewards.weights", ("1",)),
    ],
)
def test_validate_refuses_value(name, value):
    config = default()
    section, _, leaf = name.partition(".")
    with config.ignore_type():
        config[section][leaf] = value
    with pytest.raises(ConfigError) as error:
        validate(config)
    key = next(key for key in KEYS if key.name == name)
    assert str(error.value).startswith(f"{name} is ")
    assert key.allowed in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout.temperature", 2),
        ("rollout.top_p", 1.0),
        ("eval.temperature", 4.0),
        ("eval.temperature", None),
        ("rewards.timeout", 3),
        ("eval.every", -1),
        ("mesh.data", -1),
        ("rewards.weights", [2]),
    ],
)
def test_validate_accepts_value(name, value):
    config = default()
    tree.assign(config, name, value)
    validate(config)


@pytest.mark.parametrize(
    "key", [key for key in KEYS if re.search(r"[.;,] none is\b", key.doc, re.IGNORECASE)], ids=lambda key: key.name
)
def test_a_key_takes_none_where_its_text_says_what_that_is(key):
    value = key.parse("none")
    assert value == (None if key.optional else "none")
    config = default()
    tree.assign(config, key.name, value)
    validate(config)
    assert from_json(to_json(config)).to_dict() == config.to_dict()


def test_seconds_are_what_timers_take():
    """Those of Python and of C overflow beyond 9e9 or so: the thread of the watchdog ended with a traceback."""
    names = [key.name for key in KEYS if key.maximum == schema.LONGEST_SECONDS]
    assert {"watch.hang_seconds", "rewards.timeout", "processes.heartbeat_seconds"} < set(names)
    for name in names:
        with pytest.raises(ConfigError, match=rf"{name} is .*1e\+09"):
            validate(changed(**{name.replace(".", "__"): 10**10}))
    assert schema.LONGEST_SECONDS < threading.TIMEOUT_MAX
    faulthandler.dump_traceback_later(schema.LONGEST_SECONDS + MARGIN)
    faulthandler.cancel_dump_traceback_later()


def test_line_breaks_on_a_command_line():
    """As in JSON; a config file has them as Python writes them, and other texts stay as they are."""
    for name in ("rollout.stop", "data.step_separator"):
        key = BY_NAME[name]
        for text, value in ((r"\n\n", "\n\n"), (r"\nUser:", "\nUser:"), (r"\\n\boxed", r"\n\boxed"), ("a\n", "a\n")):
            parsed = (value,) if key.many else value
            assert key.parse(text) == key.parse(key.show(parsed)) == parsed
            assert "\n" not in key.show(parsed)
    assert BY_NAME["data.system_prompt"].parse(r"\n") == r"\n"


def test_lists_whose_items_have_commas_are_json_on_a_command_line():
    key = BY_NAME["rollout.stop"]
    for text, value in (
        (r'[",", "x"]', (",", "x")),
        (r'["\n, ", "\\"]', ("\n, ", "\\")),
        ("[a, b]", ("[a, b]",)),  # no JSON
        ("[1]", ("[1]",)),  # JSON of something else
        ('["x"]', ("x",)),
        ("[]", ()),
        ("()", ()),
        ("", ()),
        ("a,b", ("a", "b")),
    ):
        assert key.parse(text) == value
    for value in (
        (",",),
        ("a,b", "c"),
        ('["x"]',),
        ("[]",),
        ("()",),
        ("",),
        ("[", "]"),
        ("", ""),
        ("", "x"),
        ("\n", "a,"),
    ):
        assert key.parse(key.show(value)) == value
    assert BY_NAME["rollout.stop_token_ids"].parse("[3, 4]") == (3, 4)
    with pytest.raises(ConfigError, match=r"rollout.stop_token_ids is \('\[\"a\"\]',\), but it takes a list"):
        BY_NAME["rollout.stop_token_ids"].parse('["a"]')
    (entry,) = BY_NAME["eval.sets"].parse('[{"set": "a", "path": "x,y.jsonl"}]')
    assert entry == {"set": "a", "path": "x,y.jsonl"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("algorithm.name", "DPO", "process_reward_model; losses of pairs and labels, as dpo, are preference"),
        ("algorithm.name", "GRPO", "; the closest is grpo"),
        ("model.dtype", "bf16", "one of auto, float32, bfloat16; the closest is bfloat16"),
        ("logging.backends", "console,wandbb", "trackio; the closest is wandb"),
        ("model.remat", "quickly", "one of auto, none, block, dots, offload"),
    ],
)
def test_a_value_that_is_no_choice_is_told_what_may_be_meant(key, value, message):
    with pytest.raises(ConfigError, match=f"{re.escape(message)}($| with)"):
        BY_NAME[key].parse(value)


@pytest.mark.parametrize("key", ["model.path", "data.path", "teacher.path", "lora.path", "data.split", "data.format"])
def test_texts_of_unset_variables_are_refused(key):
    config = default()
    for value in ("", " "):
        assign(config, key, value)
        with pytest.raises(ConfigError, match=rf"{key} is empty \(is it an unset variable of the shell\?\), but it ta"):
            validate(config)


def test_a_system_message_may_be_empty():
    config = default()
    config.data.system_prompt = ""
    validate(config)


def test_validate_names_unknown_and_missing_keys():
    config = default()
    with config.unlocked():
        config.rollout.temprature = 1.0
    with pytest.raises(ConfigError, match=r"no key rollout\.temprature; the closest is rollout\.temperature"):
        validate(config)
    config = default()
    with config.unlocked():
        del config.mesh
    with pytest.raises(ConfigError, match=r"mesh\.data is missing"):
        validate(config)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rollout__group_size": 1}, ["rollout.group_size is 1", "algorithm.advantage", "2 or more"]),
        ({"batch__minibatches": 7}, ["batch.minibatches is 7", "batch.prompts = 32", "the 8 rows of each"]),
        # 12 rows divide into two, but not without a cut through the second group.
        (
            {"batch__prompts": 3, "rollout__group_size": 4, "batch__minibatches": 2},
            ["batch.minibatches is 2", "batch.prompts = 3, as the 4 rows of each stay together", "a multiple of 2"],
        ),
        ({"batch__minibatches": 4, "batch__microbatch_rows": 24}, ["microbatch_rows is 24", "64 rows of a minibatch"]),
        ({"rewards__weights": (1.0, 2.0)}, ["rewards.weights has 2", "1 rewards.functions"]),
        ({"rewards__functions": ()}, ["rewards.functions is empty", "grpo"]),
        ({"mesh__data": 0}, ["mesh.data is 0", "-1"]),
        ({"algorithm__name": "sft", "batch__minibatches": 64}, ["must divide batch.prompts = 32: set it to a divisor"]),
    ],
)
def test_validate_refuses_contradictions(values, words):
    with pytest.raises(ConfigError) as error:
        validate(changed(**values))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"rollout__group_size": 1, "algorithm__advantage": "gae"},
        {"rollout__group_size": 1, "algorithm__name": "sft"},
        {"batch__minibatches": 4, "batch__microbatch_rows": 16},
        {"rewards__functions": (), "algorithm__name": "sft"},
    ],
)
def test_validate_accepts_what_only_looks_contradictory(values):
    validate(changed(**values))


def test_batch_rows():
    assert batch_rows(default()) == 256
    assert batch_rows(changed(algorithm__name="sft")) == 32


# --- JSON ---


def test_json_round_trip():
    config = changed(
        eval__temperature=4.0,
        rewards__functions=("a", "b"),
        rewards__weights=(1.0, 0.5),
        algorithm__dynamic_sampling=True,
    )
    again = from_json(to_json(config))
    assert again.to_dict() == config.to_dict()
    assert again.rewards.functions == ("a", "b")
    assert again.is_locked


def test_json_without_a_key_has_its_default():
    assert from_json('{"seed": 3}').to_dict() == changed(seed=3).to_dict()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["not JSON"]),
        ("[]", ["JSON object", "list"]),
        ('{"sed": 3}', ["no key sed", "seed"]),
        ('{"rollout": 3}', ["no key rollout"]),
        ('{"rollout": {"top_k": "x"}}', ["rollout.top_k is 'x'", "an integer >= 0"]),
    ],
)
def test_json_errors(text, words):
    with pytest.raises(ConfigError) as error:
        from_json(text)
    assert all(word in str(error.value) for word in words), str(error.value)


# --- the command line ---


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--config.rollout.temperature=0.8"], "rollout.temperature", 0.8),
        (["--config.rollout.temperature", "1"], "rollout.temperature", 1.0),
        (["--config.eval.temperature=4"], "eval.temperature", 4.0),
        (["--config.eval.temperature=none"], "eval.temperature", None),
        (["--config.data.name=main"], "data.name", "main"),
        (["--config.rewards.timeout=2.5"], "rewards.timeout", 2.5),
        (["--config.logging.backends=console"], "logging.backends", ("console",)),
        (["--config.logging.backends=jsonl,console"], "logging.backends", ("jsonl", "console")),
        (["--config.logging.backends="], "logging.backends", ()),
        (["--config.rewards.weights=0.5"], "rewards.weights", (0.5,)),
        (["--config.algorithm.dynamic_sampling"], "algorithm.dynamic_sampling", True),
        (["--config.data.shuffle=false", "--config.seed=1"], "data.shuffle", False),
        (["--config.eval.every", "-1"], "eval.every", -1),
        (["--config.output_dir=runs/a=b"], "output_dir", "runs/a=b"),
        (["--config.optimizer.learning_rate=1e-5"], "optimizer.learning_rate", 1e-5),
    ],
)
def test_override(arguments, name, value):
    config = load_flags(arguments).config
    got = config[name] if "." not in name else config[name.partition(".")[0]][name.partition(".")[2]]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.rollout.temprature=1"], ["--config.rollout.temprature", "--config.rollout.temperature"]),
        (["--config.temperature=1"], ["closest is --config.rollout.temperature"]),
        (["--config.foo.bar=1"], ["unknown flag --config.foo.bar", "closest is --config."]),
        (["--temperature=1"], ["closest is --config.rollout.temperature"]),
        (["--config.rollout.temperature=hot"], ["rollout.temperature is 'hot'", "a number >= 0"]),
        (["--config.rollout.top_k=1.5"], ["rollout.top_k is '1.5'", "an integer >= 0"]),
        (["--config.data.shuffle=maybe"], ["data.shuffle is 'maybe'", "true or false"]),
        (["--config.algorithm.kl=k9"], ["'k9'", "k3, k1, abs, k2"]),
        (["--config.rollout.top_p=none"], ["rollout.top_p is 'none'"]),
        (["--config.seed"], ["--config.seed has no value"]),
        (["--config.seed", "--config.data.packing"], ["--config.seed has no value"]),
        (["--config.seed=1", "--config.seed=2"], ["--config.seed is given twice", "'1'", "'2'"]),
        (["grpo"], ["unexpected argument 'grpo'", "--config=grpo"]),
        (["optimizer.b2=0.9"], ["unexpected argument 'optimizer.b2=0.9'", "--config.optimizer.b2=0.9"]),
        (["-config=grpo"], ["unexpected argument '-config=grpo'", "such as --config=grpo"]),
        (["--config.rollout.group_size=1"], ["rollout.group_size is 1"]),
        (["--config=runs/a/config.json"], ["a run has left no such file: name its output_dir"]),
        (["--config=rlhf"], ["has no function get_config", "python -m jaxrl_llm stages --stages=rlhf"]),
        (["--config=axolotl.yaml"], ["--config is 'axolotl.yaml'", "migrate axolotl.yaml --output=my_config.py"]),
        (["--config=configs/grp"], ["configs/grp", "a Python file", "shipped one: a2po, agent", "closest is grpo"]),
        (["--config.rollout.draft_tokens=2"], ["rollout.draft_tokens is now rollout.speculative_tokens"]),
        (["--config.processes.meet_seconds", "2"], ["meet_seconds is now processes.rendezvous_seconds"]),
        (["--rollout.draft_tokens=2"], ["unknown flag --rollout.draft_tokens; the closest is --config."]),
        (["--help=optimiser"], ["no section 'optimiser'", "closest is optimizer", "run, model, lora", "or all"]),
        (["--help", "optimizer.name"], ["no section 'optimizer.name'", "closest is optimizer"]),
    ],
)
def test_command_line_errors(arguments, words):
    with pytest.raises(ConfigError) as error:
        load_flags(arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_run_is_a_configuration(tmp_path, monkeypatch):
    config = default()
    config.output_dir, config.rollout.temperature = "moved/since", 0.7
    config.checkpoint.resume = "never"  # with which it would be deleted
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    (run / "config.json").write_text(to_json(config))
    for spec in (str(run), f"{run}/config.json"):
        assert load_flags([f"--config={spec}", "--config.seed=5"]).config.rollout.temperature == 0.7
    (run / "given.json").write_text('{"rewards": "exact"}')
    with pytest.warns(UserWarning, match=r"lacks what the run was given in Python: rewards"):
        found = load_flags([f"--config={run}"]).config
    assert (found.output_dir, found.checkpoint.resume) == (str(run), "auto")
    monkeypatch.chdir(tmp_path / "runs")
    (tmp_path / "runs/grpo").mkdir()
    (tmp_path / "runs/grpo/config.json").write_text(to_json(config))
    assert load_flags(["--config=grpo"]).config.rollout.temperature == 1.0  # the shipped one
    assert load_flags(["--config=./grpo"]).config.rollout.temperature == 0.7
    (run / "hf").mkdir()
    (run / "hf/config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"config.json is no run's: name the output_dir of a run"):
        load_flags([f"--config={run}/hf"])


def test_own_options():
    options = (Setting("steps", 3, "Steps.", int, minimum=1), Setting("prompt", None, "Prompt."))
    assert load_flags([], options=options).options == {"steps": 3, "prompt": None}
    assert load_flags(["--prompt", "a b", "--steps=4"], options=options).options == {"steps": 4, "prompt": "a b"}
    with pytest.raises(ConfigError, match="steps is 0, but it takes an integer >= 1"):
        load_flags(["--steps=0"], options=options)


CONFIG_FILE = """from jaxrl_llm.config import default

def get_config(size="large"):
    config = default()
    config.rewards.functions = ["exact_match", "think_format"]
    config.batch.prompts = 4 if size == "tiny" else 64
    return config
"""


def write(folder, body, name="my.py"):
    path = folder / name
    path.write_text(body, encoding="utf-8")
    return path


def test_config_file_with_and_without_argument(tmp_path, monkeypatch):
    path = write(tmp_path, CONFIG_FILE)
    assert load_flags([f"--config={path}"]).config.batch.prompts == 64
    config = load_flags(["--config.seed=5", "--config", f"{path}:tiny"]).config
    assert (config.batch.prompts, config.seed) == (4, 5)
    assert config.rewards.functions == ("exact_match", "think_format")
    monkeypatch.chdir(tmp_path)
    assert load_flags(["--config=my.py"]).config.batch.prompts == 64


def test_edited_config_file_is_read_again(tmp_path):
    path = write(tmp_path, CONFIG_FILE)
    assert load_flags([f"--config={path}"]).config.batch.prompts == 64
    write(tmp_path, CONFIG_FILE.replace("64", "16"))
    assert load_flags([f"--config={path}"]).config.batch.prompts == 16


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x = 1\n", ["my.py has no function get_config"]),
        ("def get_config():\n    return 3\n", ["returned int", "default()"]),
        ("def get_config(size):\n    return size\n", ["get_config(size)", "missing"]),
        ("def get_config(:\n", ["my.py:1", "SyntaxError"]),
        ("import nothing_like_this\n", ["my.py:1", "nothing_like_this"]),
        ("def get_config():\n    return 1 / 0\n", ["my.py:2", "ZeroDivisionError"]),
        ("def get_config():\n    c = default()\n    c.rollout.top_x = 1\n    return c\n", ["my.py:4", "rollout.top_"]),
        ("def get_config():\n    c = default()\n    c.algoritm.beta = 1\n", ["my.py:4", "algoritm", "is algorithm"]),
        (
            "def get_config():\n    c = default()\n    c.rollout.top_k = 'many'\n    return c\n",
            ["my.py:4", "rollout.top_k is 'many', but it takes an integer >= 0"],
        ),
        (
            "def get_config():\n    c = default()\n    c.rollout.top_k = -4\n    return c\n",
            ["rollout.top_k is -4", "an integer >= 0"],
        ),
        (
            "import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict()\n",
            ["output_dir is missing"],
        ),
    ],
)
def test_config_file_errors(tmp_path, body, words):
    needs_import = "default()" in body
    path = write(tmp_path, ("from jaxrl_llm.config import default\n" if needs_import else "") + body)
    with pytest.raises(ConfigError) as error:
        load_flags([f"--config={path}"])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_config_file_with_unwanted_argument(tmp_path):
    path = write(tmp_path, "def get_config():\n    return 3\n")
    with pytest.raises(ConfigError, match=r"defines get_config\(\): too many"):
        load_flags([f"--config={path}:tiny"])


def test_missing_config_file_names_a_neighbour(tmp_path):
    write(tmp_path, CONFIG_FILE, "grpo.py")
    with pytest.raises(ConfigError, match=r"no file .*grp\.py .*the closest is .*grpo\.py"):
        load_flags([f"--config={tmp_path / 'grp.py'}"])


def help_of(capsys, *arguments, load=load_flags):
    """The output of `--help` for a command with one flag of its own; it must end with code 0."""
    with pytest.raises(SystemExit) as end:
        load(list(arguments), "Train it.", [Setting("steps", 3, "Steps.", int)])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_lists_own_flags_and_sections(capsys):
    text = help_of(capsys, "--config.seed=1", "--help")
    assert text == help_text("Train it.", [Setting("steps", 3, "Steps.", int)])
    assert text.startswith("Train it.\n")
    assert "  --config=FILE.py[:ARGUMENT]\n" in text and "  --steps=3\n      Steps. Takes an integer.\n" in text
    assert not any(f"--config.{key.name}=" in text for key in KEYS)
    lines = text.splitlines()
    for section in SECTIONS:
        assert sum(line.startswith(f"  {section or 'run'} ") for line in lines) == 1, section
    assert help_of(capsys, "-h") == text
    assert len(lines) < 40


@pytest.mark.parametrize("section", SECTIONS)
def test_help_of_a_section_has_its_keys(section, capsys):
    text = help_of(capsys, f"--help={section or 'run'}")
    assert help_of(capsys, "--help", section or "run") == text
    flat = " ".join(text.split())
    assert " ".join(SECTIONS[section].split()) in flat
    for key in KEYS:
        own = key.name.rpartition(".")[0] == section
        assert (f"--config.{key.name}={key.show(key.default)}\n" in text) == own, key.name
        assert not own or " ".join(key.doc.split()) in flat
    assert "--steps" not in text


def test_help_all_names_every_key(capsys):
    text = help_of(capsys, "--help=all", "--config.seed=1")
    assert text.startswith("Train it.\n")
    assert "--steps=3\n" in text
    assert all(f"--config.{key.name}={key.show(key.default)}\n" in text for key in KEYS)
    flat = " ".join(text.split())
    assert all(" ".join(key.doc.split()) in flat for key in KEYS)


def test_help_without_a_configuration(capsys):
    text = help_of(capsys, "--help", load=load_options)
    assert text == "Train it.\n\n  --steps=3\n      Steps. Takes an integer.\n"
    assert help_of(capsys, "--help=all", load=load_options) == text
    with pytest.raises(ConfigError, match=r"--help has no section 'optimizer'.*sections are none, or all"):
        load_options(["--help=optimizer"], "", [])


def test_words_stand_anywhere_among_flags():
    options = [Setting("steps", 3, "Steps.", int), Setting("quick", False, "Quickly.", bool)]
    for argv, words in (
        (["a", "--steps", "4", "b", "--quick=true"], ["a", "b"]),
        (["--steps=4", "--quick", "a"], ["a"]),
        (["--quick", "true", "a", "--steps", "4"], ["a"]),
        (["--steps", "-4", "a"], ["a"]),
        (["--steps", "--quick"], []),
        (["-h", "steps"], []),
    ):
        found, flags = positional(argv, options)
        assert found == words and flags == [x for x in argv if x not in words]
    flags = positional(["--quick", "a", "--steps", "4"], options)[1]
    assert load_options(flags, "", options) == {"steps": 4, "quick": True}


# --- shipped config files ---


def test_shipped_configs_are_found_by_name(tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    assert shipped_configs()["grpo"] == root / "configs" / "grpo.py"
    assert load_flags(["--config=grpo"]).config.output_dir == "runs/grpo"
    config = load_flags(["--config", "dapo:tiny", "--config.seed=3"]).config  # it imports grpo.py beside it
    assert (config.output_dir, config.total_steps, config.seed) == ("runs/dapo", 2, 3)


@pytest.mark.parametrize("folder", [".", "configs"])
def test_a_local_file_wins(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir(exist_ok=True)
    write(tmp_path / folder, CONFIG_FILE, "grpo.py")
    assert load_flags(["--config=grpo:tiny"]).config.batch.prompts == 4
    assert load_flags(["--config=grpo"]).config.batch.prompts == 64
    assert find_config("dapo")[0] == shipped_configs()["dapo"]


def test_unknown_names_list_the_shipped_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_flags(["--config=grop:tiny"])
    message = str(error.value)
    assert message.startswith("--config is 'grop:tiny'") and message.endswith("; the closest is grpo")
    assert all(f" {name}," in message or f" {name};" in message for name in shipped_configs())
    for path in ("other/dpo.py", "configs/dqo.py"):
        with pytest.raises(ConfigError, match=rf"^there is no file {path}"):
            load_flags([f"--config={path}"])


def test_a_shipped_config_is_found_by_the_path_that_pages_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"^there is no file configs/dpo\.py here; this is the shipped --config=dpo$"):
        assert load_flags(["--config=configs/dpo.py:tiny"]).config.output_dir == "runs/dpo"
    with pytest.warns(UserWarning, match=r"this is the shipped --stages=rlhf$"):
        assert find_config("configs/rlhf.py", "--stages") == (shipped_configs()["rlhf"], None)
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs", CONFIG_FILE, "dpo.py")
    assert load_flags(["--config=configs/dpo.py"]).config.batch.prompts == 64


# --- keys of earlier versions ---


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("per_device_train_batch_size", "batch.prompts"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("critic.lr", "critic.learning_rate"),
        ("batch.micro_batch_size", "batch.microbatch_rows"),
        ("algorithm.epsilon", "algorithm.epsilon_low"),
        ("algorithm.kl_coef", "algorithm.beta"),
        ("rollout.n", "rollout.group_size"),
    ],
)
def test_unknown_keys_are_refused_in_python(name, meant):
    """In one line, as on the command line: scripts and notebooks set attributes or items of the tree."""
    section, _, leaf = name.rpartition(".")
    config = default()
    node = config[section] if section else config
    for attempt in (lambda: setattr(node, leaf, 4), lambda: node.update({leaf: 4})):
        with pytest.raises(ConfigError) as error:
            attempt()
        assert str(error.value) == f"there is no key {name}; the closest is {meant}"


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda c: c.optimzer.learning_rate, "there is no section optimzer; the closest is optimizer"),
        (lambda c: c.optimizer.lr, "there is no key optimizer.lr; the closest is optimizer.learning_rate"),
        (lambda c: c.total_step, "there is no key total_step; the closest is total_steps"),
    ],
)
def test_unknown_names_that_are_read_in_python(read, words):
    """As those that are set; to `hasattr` and `getattr` they are attributes that are not there."""
    config = default()
    with pytest.raises(ConfigError) as error:
        read(config)
    assert str(error.value) == words
    assert not hasattr(config, "optimzer") and getattr(config.optimizer, "lr", 3) == 3
    assert copy.deepcopy(config).optimizer.learning_rate == config.optimizer.learning_rate


def test_one_completion_of_a_prompt_has_no_group():
    """For ppo the way out is the advantage of its critic, not more completions."""
    config = default()
    config.rollout.group_size = 1
    for name, way_out in (("grpo", "set rollout.group_size to 2 or more"), ("ppo", "set algorithm.advantage to ppo, ")):
        config.algorithm.name = name
        with pytest.raises(ConfigError, match=f"'group' compares the completions .* with each other: {way_out}"):
            validate(config)
    config.algorithm.advantage = "ppo"
    validate(config)


def test_former_keys_have_a_replacement():
    """A key with the same meaning, or an option of losses that has the default of the key."""
    assert not set(FORMER) & set(BY_NAME)
    assert set(RENAMED.values()) <= set(BY_NAME)
    for former_default, option, losses in LOSS_OPTIONS.values():
        for name in losses:
            loss = (
                preference_losses.LOSSES.get(name)  # first, as two losses are called ipo
                or getattr(policy_losses, name, None)
                or getattr(preference_losses, name)
            )
            parameters = inspect.signature(loss).parameters
            assert former_default == (parameters[option].default if option in parameters else loss.options[option]), (
                name
            )


def test_former_keys_are_read():
    """As what stands for them now; other names are unknown as before."""
    config = default()
    config.processes.rendezvous_seconds = 120
    assert (config.processes.meet_seconds, config["processes"]["meet_seconds"]) == (120, 120)
    assert (config.algorithm.simpo_gamma, config.algorithm.delta) == (0.5, None)
    config.algorithm.loss = "sft+simpo(gamma=1.2)"
    assert (config.algorithm.simpo_gamma, config.algorithm.cpo_alpha) == (1.2, 1.0)
    assert not {"meet_seconds", "simpo_gamma"} & {*config.processes, *config.algorithm}
    for section, name in (("rollout", "meet_seconds"), ("optimizer", "simpo_gamma"), ("algorithm", "gamma")):
        with pytest.raises(AttributeError):
            getattr(config[section], name)


@pytest.mark.parametrize(
    ("section", "leaf", "words"),
    [
        ("rollout", "draft_tokens", "rollout.draft_tokens is now rollout.speculative_tokens"),
        ("algorithm", "delta", "there is no key algorithm.delta any more: write algorithm.loss='ppo_clip(delta=...)'"),
    ],
)
def test_former_keys_are_refused(section, leaf, words, tmp_path):
    """On the command line, in a config file, in a tree with more keys, and by `assign`."""
    body = f"def get_config():\n    c = default()\n    c.{section}.{leaf} = 3\n    return c\n"
    path = write(tmp_path, "from jaxrl_llm.config import default\n" + body)
    config = default()
    with config.unlocked():
        config[section][leaf] = 3
    attempts = [
        lambda: load_flags([f"--config.{section}.{leaf}=3"]),
        lambda: load_flags([f"--config={path}"]),
        lambda: validate(config),
        lambda: tree.assign(default(), f"{section}.{leaf}", 3),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError) as error:
            attempt()
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("former", "loss"),
    [
        ({"delta": None, "cpo_alpha": 1.0}, "auto"),
        ({"delta": 4.0}, "ppo_clip(delta=4.0)"),
        ({"delta": 4.0, "loss": "cispo"}, "cispo"),  # it took no delta
        (
            {"name": "preference", "beta": 2.0, "loss": "simpo", "simpo_gamma": 5.0, "cpo_alpha": 0.0},
            "simpo(gamma=5.0, nll_weight=0.0)",
        ),
        (
            {"name": "preference", "beta": 0.1, "loss": "ipo+sft", "loss_weights": [1.0, 1.0], "ipo_normalize": False},
            "ipo(normalize=False)+sft",
        ),
        (
            {"name": "reward_model", "loss": "ppo_clip", "center_rewards_coefficient": 0.01},
            "bradley_terry(center=0.01)",
        ),
        ({"name": "reward_model", "loss": "ppo_clip", "center_rewards_coefficient": 0.0}, "auto"),
    ],
)
def test_json_of_earlier_versions_is_read(former, loss):
    """An option that was a key goes to the loss of the run, if it takes it; else it had no effect."""
    config = from_json(json.dumps({"algorithm": former}))
    assert config.algorithm.loss == loss
    assert from_json(to_json(config)).to_dict() == config.to_dict()


def test_json_with_renamed_keys_is_read():
    assert from_json('{"rollout": {"draft_tokens": 3}}').rollout.speculative_tokens == 3
    with pytest.raises(ConfigError, match=r"rollout\.speculative_tokens is 'x'"):
        from_json('{"rollout": {"draft_tokens": "x"}}')


# --- the end of a command ---


PROGRAM = """
import sys
from jaxrl_llm.config.flags import load_flags, run

def main(argv):
    print(load_flags(argv).config.seed)

run(main)
"""


def test_run_prints_user_errors_without_traceback(run_python):
    bad = run_python("-c", PROGRAM, "--config.sed=1")
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert bad.stderr == "error: unknown flag --config.sed; the closest is --config.seed; see --help\n"
    good = run_python("-c", PROGRAM, "--config.seed=7")
    assert (good.returncode, good.stdout) == (0, "7\n")


def test_run_keeps_the_traceback_of_other_errors_in_a_file(run_python, tmp_path):
    result = run_python("-c", "from jaxrl_llm.config.flags import run\nrun(lambda argv: 1 / 0)", "--seed=3")
    file = tmp_path / "jaxrl_llm_error.txt"
    assert result.returncode == 1
    assert result.stderr == f"error: ZeroDivisionError: division by zero\nThe full traceback is in {file}\n"
    text = file.read_text()
    assert "'--seed=3'" in text.splitlines()[0] and f"jaxrl_llm {__version__}, Python" in text
    assert "Traceback (most recent call last)" in text and text.endswith("ZeroDivisionError: division by zero\n")


def test_run_keeps_it_in_the_folder_of_the_run(run_python, tmp_path):
    (tmp_path / "mine").mkdir()
    code = "from jaxrl_llm.config.flags import load_flags, run\nrun(lambda argv: load_flags(argv).config.seed / 0)"
    result = run_python("-c", code, "--config.output_dir=mine")
    assert result.returncode == 1
    assert result.stderr.endswith(f"The full traceback is in {tmp_path / 'mine' / 'error.txt'}\n")
    assert "ZeroDivisionError" in (tmp_path / "mine" / "error.txt").read_text()


def test_the_home_folder_in_output_dir(run_python, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "mine").mkdir(parents=True)
    code = "from jaxrl_llm.config.flags import load_flags, run\nrun(lambda argv: print(load_flags(argv).config.%s))"
    done = run_python("-c", code % "output_dir", "--config.output_dir=~/mine")
    assert done.stdout == f"{tmp_path / 'home' / 'mine'}\n"
    assert run_python("-c", code % "seed / 0", "--config.output_dir=~/mine").returncode == 1
    assert (tmp_path / "home" / "mine" / "error.txt").is_file()


def test_run_tells_what_is_noted_on_an_error_but_not_by_jax(run_python, tmp_path):
    code = """
import jax
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import run

def fails(x):
    error = {}("no")
    error.add_note("but why")
    raise error

run(lambda argv: jax.jit(fails)(1.0))
"""
    for name, status, message in (("ConfigError", 2, "no"), ("ValueError", 1, "ValueError: no")):
        done = run_python("-c", code.format(name))
        assert done.returncode == status
        assert done.stderr.splitlines()[0] == f"error: {message}; but why"
        assert "JAX" not in done.stderr
    assert "JAX_TRACEBACK_FILTERING" in (tmp_path / "jaxrl_llm_error.txt").read_text()  # where it belongs


def test_run_shows_a_traceback_that_cannot_be_kept(run_python, tmp_path):
    (tmp_path / "jaxrl_llm_error.txt").mkdir()
    result = run_python("-c", "from jaxrl_llm.config.flags import run\nrun(lambda argv: 1 / 0)")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "it could not be written to jaxrl_llm_error.txt" in result.stderr


def test_ctrl_c_is_no_bug(run_python, tmp_path):
    code = "from jaxrl_llm.config.flags import run\ndef main(argv):\n    raise KeyboardInterrupt\nrun(main)"
    result = run_python("-c", code)
    assert result.returncode == 130
    assert result.stderr.startswith("error: stopped by Ctrl-C") and not [*tmp_path.iterdir()]


def test_ctrl_c_ends_a_command_of_jax_at_once(run_python):
    """Where a program of JAX is under way the end of the interpreter aborts: the code was then that of a crash."""
    lines = (
        "import atexit, os",
        "from jaxrl_llm.config.flags import run",
        "import jaxrl_llm.distributed.processes",
        "def main(argv):",
        "    atexit.register(os.abort)",
        "    raise KeyboardInterrupt",
        "run(main)",
    )
    result = run_python("-c", "\n".join(lines))
    assert result.returncode == 130 and "stopped by Ctrl-C" in result.stderr


# --- resolve ---


def test_resolve_known_names():
    assert resolve("closest", "jaxrl_llm.config.resolve") is closest
    assert resolve("closest", importlib.import_module("jaxrl_llm.config.resolve")) is closest
    assert resolve("a", {"a": 3}) == 3
    assert resolve(len, {}) is len


def test_resolve_hides_imported_and_private_names():
    for name in ("Path", "_ratio"):
        with pytest.raises(ConfigError, match="unknown name"):
            resolve(name, "jaxrl_llm.config.resolve")


def test_resolve_prefers_dunder_all():
    module = types.ModuleType("made_up")
    module.__all__ = ["listed"]
    module.listed = len
    module.other = len
    assert resolve("listed", module) is len
    with pytest.raises(ConfigError, match="known are listed; the closest is listed"):
        resolve("other", module)


def test_resolve_module_and_dotted_names():
    assert resolve("json:dumps", {}) is json.dumps
    assert resolve("json.dumps", {}) is json.dumps
    assert resolve("jaxrl_llm.config.resolve:closest", {}) is closest


def test_resolve_file(tmp_path, monkeypatch):
    body = "from dataclasses import dataclass\n@dataclass\nclass Answer:\n    value: int\ndef grade(x):\n    return x\n"
    path = write(tmp_path, body)
    grade = resolve(f"{path}:grade", {})
    assert grade(3) == 3
    assert resolve(f"{path}:grade", {}) is grade, "the same content is executed once"
    assert resolve(f"{path}:Answer", {})(3).value == 3
    monkeypatch.chdir(tmp_path)
    assert resolve("my.py:grade", {})(4) == 4
    write(tmp_path, body.replace("return x", "return -x"))
    assert resolve("my.py:grade", {})(4) == -4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exact_mach", ["'exact_mach'", "known are boxed, exact_match", "closest is exact_match", "module:function"]),
        ("my.py", ["unknown name 'my.py'", "path/to/file.py:function"]),
        ("nothing_here:f", ["'nothing_here:f'", "no module 'nothing_here'", "path/to/file.py:function"]),
        ("nothing_here.f", ["no module 'nothing_here'"]),
        ("json:dump_all", ["no 'dump_all'", "dumps", "the closest is dump"]),
        ("missing.py:f", ["no file missing.py"]),
        ("my.py:grde", ["my.py has no 'grde'", "the closest is grade"]),
        ("folder:grade", ["the module folder has no 'grade'"]),
        ("sys:grade", ["the module sys has no 'grade'"]),
        ("broken.py:f", ["broken.py:2", "ZeroDivisionError"]),
        ("needs:f", ["importing 'needs'", "no_such_dependency"]),
        ("fails:f", ["importing 'fails'", "ZeroDivisionError"]),
    ],
)
def test_resolve_errors(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, "def grade(x):\n    return x\n")
    (tmp_path / "folder").mkdir()
    write(tmp_path, "\n1 / 0\n", "broken.py")
    write(tmp_path, "import no_such_dependency\n", "needs.py")
    write(tmp_path, "1 / 0\n", "fails.py")
    with pytest.raises(ConfigError) as error:
        resolve(name, {"exact_match": len, "boxed": len})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_closest_looks_at_the_last_part_too():
    assert closest("bta", ["batch", "algorithm.beta"]) == "algorithm.beta"
    assert closest("rollout.top_q", ["data.top", "rollout.top_p"]) == "rollout.top_p"


OWN = """
from jaxrl_llm.config import default

def get_config():
    config = default()
    with config.unlocked():
        config.my_length, config.names, config.mine = 20, ("a",), {"rate": 0.5, "note": None}
    config.rollout.max_completion_length = config.get_oneway_ref("my_length") * 2
    return config
"""


def test_parameters_of_a_config_file_are_flags(tmp_path):
    spec = f"--config={write(tmp_path, OWN)}"
    config = load_flags([spec]).config
    assert (config.my_length, config.rollout.max_completion_length) == (20, 40)
    config = load_flags(
        ["--config.my_length=30", spec, "--config.names=b,c", "--config.mine.rate", "1", "--config.mine.note=x"]
    ).config
    assert (config.my_length, config.names, config.mine.rate, config.mine.note) == (30, ("b", "c"), 1.0, "x")
    assert config.rollout.max_completion_length == 60  # what is computed of it follows
    again = from_json(to_json(config))
    assert again.to_dict() == config.to_dict()
    for flag, words in (("my_length=hot", "my_length is 'hot', but it takes an integer"), ("my_lenght=3", "my_length")):
        with pytest.raises(ConfigError, match=words):
            load_flags([spec, f"--config.{flag}"])
    with pytest.raises(ConfigError, match=r"unknown flag --config\.my_length"):
        load_flags(["--config.my_length=30"])
    bad = write(tmp_path, OWN.replace('("a",)', "default"))
    with pytest.raises(ConfigError, match=r"the parameter names of the config file is <function"):
        load_flags([f"--config={bad}"])


def test_numbers_of_numpy_are_numbers():
    config = default()
    config.total_steps, config.optimizer.learning_rate = np.int64(7), np.float32(0.5)
    config.rewards.weights, config.data.streaming = (np.float64(1.0),), np.bool_(True)
    found = (config.total_steps, config.optimizer.learning_rate, config.rewards.weights, config.data.streaming)
    assert found == (7, 0.5, (1.0,), True)
    assert all(type(x) in (int, float, tuple, bool) for x in found)
    assign(config, "batch.prompts", np.int32(4))
    assert json.loads(to_json(config))["batch"]["prompts"] == 4
    with pytest.raises(ConfigError, match=r"model\.path is .*, a folder or a hub id; .* is given to train"):
        config.model.path = object()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("learning_rate", "optimizer.learning_rate"), ("num_train_epochs", "num_epochs"),
        ("num_generations", "rollout.group_size"), ("per_device_train_batch_size", "batch.prompts"),
        ("config.max_steps", "total_steps"), ("max_grad_norm", "optimizer.max_grad_norm"), ("beta", "algorithm.beta"),
        ("group_by_length", "data.group_by_length"), ("gpu_memory_utilization", "rollout.memory_fraction"),
        ("log_prob_micro_batch_size_per_gpu", "batch.logps_microbatch_rows"),
        ("config.rollout.temprature", "rollout.temperature"), ("max_new_tokens", "rollout.max_completion_length"),
    ],
)  # fmt: skip
def test_flags_of_other_libraries_lead_to_the_key(name, key):
    with pytest.raises(ConfigError, match=rf"the closest is --config\.{re.escape(key)};"):
        load_flags([f"--{name}=1"])


def test_a_form_that_a_configuration_has_not_is_refused():
    """`sft:tyny` would be the whole experiment."""
    with pytest.raises(ConfigError, match=r"no form 'tyny'; it has tiny: write --config=NAME"):
        load_flags(["--config=sft:tyny"])
    with pytest.raises(ConfigError, match="no form 'foo'; it has tiny"):
        load_flags(["--config=gspo:foo"])
    assert load_flags(["--config=vision_grpo:blank"]).config.data.path == "task:shapes_blank"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "PackageNotFoundError: No package metadata was found for nobodys"),
        ("", "ModuleNotFoundError: No module named 'nobodys.v1'"),
        ("import of_nobody_else", "ModuleNotFoundError: No module named 'of_nobody_else'"),
        ("raise SystemExit(3)", "LeftError: it called sys.exit"),
    ],
)
def test_an_optional_package_that_is_another_or_broken(tmp_path, monkeypatch, content, fault):
    """A folder of its name; or one that has its version, but not its module, or fails."""
    (tmp_path / "nobodys").mkdir()
    if content is not None:
        (tmp_path / "nobodys" / "__init__.py").write_text(content)
        (tmp_path / "nobodys-9.dist-info").mkdir()
        (tmp_path / "nobodys-9.dist-info" / "METADATA").write_text("Name: nobodys\nVersion: 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    place = f"{tmp_path / 'nobodys'}.* is another of that name, which is to be renamed, or is broken"
    with pytest.raises(ConfigError, match=rf"^x needs the package nobodys, but {place} \({fault}.*pip install"):
        import_optional("nobodys.v1", "0.4", "x")
    sys.modules.pop("nobodys", None)


def test_a_plus_within_brackets_joins_no_losses():
    assert split_losses("dpo(beta=1e+1, x=(1, 2))+sft+mine.py:f(y=1e+2)") == [
        "dpo(beta=1e+1, x=(1, 2))", "sft", "mine.py:f(y=1e+2)",
    ]  # fmt: skip
    config = default()
    config.algorithm.name, config.algorithm.beta, config.algorithm.loss = "preference", 0.1, "alphapo(alpha=1e+1)+sft"
    validate(config)


def test_a_configuration_is_made_without_a_search_for_closest_keys(monkeypatch):
    """Each search reads all keys; one for every section made `default` take 0.2 s, before 0.004."""
    monkeypatch.setattr(schema, "unknown_key", lambda name: pytest.fail(f"{name} was looked for"))
    validate(default())
