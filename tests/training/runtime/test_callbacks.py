"""Callbacks: what they see and when, that they end a run as its last step does, and that a resume changes nothing."""

import json
import shutil
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxrl_llm
from jaxrl_llm.commands.stages import is_finished
from jaxrl_llm.config import ConfigError, default, to_json, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.training.runtime.callbacks import Callbacks, EarlyStopping, load_callbacks

CLOCKS = ("time", "tokens_per_second", "mfu", "step_time")


class Diary:
    """Notes every call, and says "stop" where `stop` has a hook's name and step."""

    def __init__(self, stop=()):
        self.stop, self.notes, self.moments = stop, [], []

    def note(self, hook, moment):
        self.notes.append((hook, moment.step))
        self.moments.append(moment)
        return "stop" if (hook, moment.step) in self.stop else None

    def on_step(self, moment):
        return self.note("on_step", moment)

    def on_evaluate(self, moment):
        return self.note("on_evaluate", moment)

    def on_checkpoint(self, moment):
        return self.note("on_checkpoint", moment)

    def on_end(self, moment):
        self.note("on_end", moment)
        assert (moment.folder / "hf" / "config.json").is_file()

    def get_state(self):
        return [list(note) for note in self.notes]

    def set_state(self, state):
        self.notes = [tuple(note) for note in state]


@pytest.fixture
def config(root, tmp_path):
    config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
    config.output_dir = str(tmp_path / "run")
    config.logging.backends = ("jsonl",)
    config.total_steps, config.eval.every, config.checkpoint.every = 4, 2, 3
    return config


def lines(folder):
    """The lines of metrics.jsonl without what a clock measured."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "machine/")) and k not in CLOCKS}
        for line in records
    ]


def assert_same_run(one, other):
    assert lines(one) == lines(other)
    tensors = load_file(other / "hf" / "model.safetensors")
    for name, tensor in load_file(one / "hf" / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)


# --- when they are called, and with what ---


@pytest.mark.slow
def test_order_and_what_is_seen_and_an_early_end(config):
    diary = Diary(stop=[("on_step", 4)])
    config.total_steps, kept = 6, {}

    def look(moment):
        kept[moment.step] = float(jax.tree.leaves(moment.model().params)[0].sum())

    result = jaxrl_llm.train(config, callbacks=[diary, SimpleNamespace(on_step=look)])
    assert diary.notes == [
        ("on_evaluate", 0), ("on_step", 1), ("on_step", 2), ("on_evaluate", 2), ("on_step", 3), ("on_checkpoint", 3),
        ("on_step", 4), ("on_evaluate", 4), ("on_checkpoint", 4), ("on_end", 4),
    ]  # fmt: skip
    first, step, _, evaluated = diary.moments[:4]
    assert {name.partition("/")[0] for name in first.metrics} == {"eval", "time"}
    assert step.metrics["loss"] == result.metrics[1]["loss"] and "eval/loss" not in step.metrics
    assert step.metrics.keys() >= {"entropy", "grad_norm", "mean_token_accuracy", "num_tokens", "step_time"}
    assert evaluated.metrics.keys() >= step.metrics.keys() | {"eval/loss", "eval/mean_token_accuracy"}
    assert evaluated.metrics["eval/loss"] == result.metrics[2]["eval/loss"]
    assert step.config.optimizer.learning_rate == config.optimizer.learning_rate
    assert step.folder == result.output_dir
    step.config.seed = 3
    assert config.seed == 0
    with pytest.raises(TypeError):
        step.metrics["loss"] = 0.0
    assert len(set(kept.values())) == 4
    assert kept[4] == float(jax.tree.leaves(result.model.params)[0].sum())


@pytest.mark.slow
def test_steps_are_saved_and_evaluated_when_a_callback_asks(config):
    """Beside those that are due, and without a trace in the steps after."""

    loss = {}

    class Asks(Diary):
        def on_step_begin(self, moment):
            self.note("on_step_begin", moment)
            assert moment.metrics.get("loss", -1.0) == loss.get(moment.step, -1.0)

        def on_step(self, moment):
            self.note("on_step", moment)
            loss[moment.step] = moment.metrics["loss"]
            return {1: ["evaluate", "save"], 3: "evaluate"}.get(moment.step)

        def on_evaluate(self, moment):
            self.note("on_evaluate", moment)
            return "save" if moment.step in (0, 3) else None

    asks, config.total_steps, config.eval.every = Asks(), 4, 0
    config.checkpoint.every, config.checkpoint.keep = 0, 9
    folder = jaxrl_llm.train(config, callbacks=[asks]).output_dir
    assert asks.notes == [
        ("on_evaluate", 0), ("on_step_begin", 0), ("on_step", 1), ("on_evaluate", 1), ("on_checkpoint", 1),
        ("on_step_begin", 1), ("on_step", 2), ("on_step_begin", 2), ("on_step", 3), ("on_evaluate", 3),
        ("on_checkpoint", 3), ("on_step_begin", 3), ("on_step", 4), ("on_evaluate", 4), ("on_checkpoint", 4),
        ("on_end", 4),
    ]  # fmt: skip
    assert [line["step"] for line in lines(folder) if "eval/loss" in line] == [0, 1, 3, 4]
    assert {int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()} == {1, 3, 4}


@pytest.mark.parametrize(
    ("hook", "answer", "words"),
    [
        ("on_step", "evaluate", "on_step at step 1: it asked for an evaluation, but there is nothing to evaluate"),
        ("on_step", ["save", "stay"], r'it returned \[\'save\', \'stay\'\]; .*"stop" or "save" or "evaluate"'),
        ("on_evaluate", "evaluate", 'it returned \'evaluate\'; on_evaluate returns nothing, or "stop" or "save"'),
        ("on_save", "save", "it returned 'save'; on_save returns nothing, or \"stop\""),
    ],
)
def test_answers_that_cannot_be_granted(hook, answer, words, tmp_path):
    callbacks = Callbacks({"a": SimpleNamespace(**{hook: lambda moment: answer})}, to_json(default()), tmp_path, False)
    with pytest.raises(ConfigError, match=words):
        callbacks(hook, 1, {}, lambda: None)


@pytest.mark.slow
def test_looking_changes_nothing(config, tmp_path):
    jaxrl_llm.train(config)
    config.output_dir = str(tmp_path / "watched")
    jaxrl_llm.train(config, callbacks=[Diary()])
    assert_same_run(tmp_path / "run", tmp_path / "watched")


# --- the end ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "end"), [(("on_step", 1), 1), (("on_evaluate", 2), 2), (("on_checkpoint", 3), 4), (("on_evaluate", 0), 0)]
)
def test_stop_ends_as_a_last_step_does(asked, end, config, tmp_path):
    diary = Diary(stop=[asked])
    config.total_steps = 6
    result = jaxrl_llm.train(config, callbacks=[diary])
    assert diary.notes[-1] == ("on_end", end)
    assert result.metrics[-1]["step"] == end and "eval/loss" in result.metrics[-1]
    if end == 0:
        return
    assert ("on_checkpoint", end) in diary.notes
    exported = jaxrl_llm.export(result.output_dir, tmp_path / "exported", step=end)
    assert (exported / "model.safetensors").read_bytes() == (result.output_dir / "hf/model.safetensors").read_bytes()
    again = Diary()
    jaxrl_llm.train(config, callbacks=[again])  # the same command once more: it stays ended
    assert again.notes == [*diary.notes[:-1], ("on_end", end)]


@pytest.mark.slow
def test_a_changed_callback_continues_the_run(config, capsys):
    config.callbacks = ("early_stopping(metric='loss', patience=1, min_delta=100)",)
    first = jaxrl_llm.train(config).metrics
    assert "nothing is trained" not in "".join(capsys.readouterr())
    assert jaxrl_llm.train(config).metrics == first and first[-1]["step"] == 2
    told = "".join(capsys.readouterr())
    assert "early_stopping(metric='loss', patience=1, min_delta=100) ended the run" in told
    assert "at step 2 of" in told and "leave it out or give it other options to go on" in told
    config.callbacks = ("early_stopping(metric='loss', patience=2, min_delta=100)",)
    assert [line["step"] for line in jaxrl_llm.train(config).metrics[len(first) :]] == [3, 4]


@pytest.mark.slow
@pytest.mark.usefixtures("whole_tasks")
def test_resumed_equals_uninterrupted(config, tmp_path):
    """The patience that was used up before a checkpoint is used up after it."""
    config.total_steps, config.checkpoint.every, config.checkpoint.keep = 8, 1, 9
    config.callbacks = ("early_stopping(metric='eval/loss', mode='max', patience=3)",)  # the loss falls
    whole = jaxrl_llm.train(config).output_dir
    assert lines(whole)[-1]["step"] == 6 and is_finished(config)
    for step in (3, 6):
        part = tmp_path / f"part_{step}"
        shutil.copytree(whole, part)
        shutil.rmtree(part / "hf")
        for later in range(step + 1, 7):
            shutil.rmtree(part / "checkpoints" / str(later))
        config.output_dir = str(part)
        assert not is_finished(config)
        jaxrl_llm.train(config)
        assert_same_run(whole, part)


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("hook", "does", "words"),
    [
        pytest.param(
            "on_step",
            lambda moment: 1 / 0,
            r"Boom, on_step at step 1: ZeroDivisionError: .*test_callbacks.py:\d+",
            marks=pytest.mark.slow,
        ),
        ("on_evaluate", lambda moment: True, 'Boom, on_evaluate at step 0: it returned True; .*"stop"'),
        pytest.param(
            "get_state", lambda: {1, 2}, "Boom, get_state at step 3: TypeError: .*set", marks=pytest.mark.slow
        ),
    ],
)
def test_errors_name_callback_hook_and_step(hook, does, words, config):
    class Boom:
        on_end = staticmethod(lambda moment: None)

    boom = Boom()
    setattr(boom, hook, does)
    with pytest.raises(ConfigError, match=words):
        jaxrl_llm.train(config, callbacks=[boom])


def test_a_missing_metric_is_named():
    moment = SimpleNamespace(metrics={"eval/loss": 1.0, "eval/accuracy": 0.5, "loss": 1.0})
    with pytest.raises(
        ConfigError, match=r"no metric 'eval/acuracy'; the closest is eval/accuracy.*eval/loss"
    ) as error:
        EarlyStopping("eval/acuracy").look(moment)
    assert ", loss" not in str(error.value)


@pytest.mark.parametrize(("metric", "left"), [("eval/loss", 0), ("nll_loss", 0), ("eval/accuracy", 2)])
def test_early_stopping_knows_what_is_better(metric, left):
    """A loss that falls is better; with the largest as best, it would have ended the run."""
    stopping = EarlyStopping(metric, patience=3)
    for value in (3.0, 2.0, 1.0):
        assert stopping.look(SimpleNamespace(metrics={metric: value})) is None
    assert stopping.waited == left and stopping.best == (1.0 if not left else 3.0)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("early_stoping(metric='loss')", "the closest is early_stopping"),
        ("early_stopping(metrics='loss')", "has no option 'metrics'; it takes metric, patience, min_delta, mode"),
        ("early_stopping", "missing a required argument: 'metric'"),
        ("early_stopping(metric='loss', patience=0)", "patience 0"),
        ("early_stopping(metric='loss', mode='least')", "mode 'least'"),
        ("json:loads", "missing a required argument"),
        (
            "collections:UserDict",
            "none of the methods on_begin, on_step_begin, on_step, on_evaluate, on_checkpoint, on_save, on_end",
        ),
    ],
)
def test_specifications_that_lead_to_no_callback(spec, words):
    config = default()
    config.callbacks = (spec,)
    with pytest.raises(ConfigError, match=words):
        load_callbacks(config.callbacks)


class Needs(Diary):
    def __init__(self, every):
        super().__init__(every)


class Leaves(Diary):
    def __init__(self):
        sys.exit(0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Needs, r"callback 'Needs': missing a required argument: 'every'; write Needs\(name=value"),
        (Leaves, r"callback 'Leaves' cannot be made: .* called sys\.exit\(0\), in Leaves\.__init__"),
    ],
)
def test_classes_that_cannot_be_made(given, words):
    with pytest.raises(ConfigError, match=words):
        load_callbacks([given])


def test_evaluations_that_never_come():
    config = default()
    config.callbacks, config.eval.every = ("early_stopping(metric='eval/accuracy')",), 0
    with pytest.raises(ConfigError, match=r"nothing is evaluated while it trains \(eval.every = 0\)"):
        validate(config)
    config.callbacks = ("early_stopping(metric='loss', mode='min')",)
    validate(config)


def test_names_and_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n    def __init__(self, every=1): self.every = every\n    def on_step(self, m): pass\n"
    )
    config = default()
    config.callbacks = (f"{file}:Mine(every=5)", "early_stopping(metric='loss')")
    found = load_callbacks([*config.callbacks, Diary(), Diary()])
    assert list(found) == [*config.callbacks, "Diary", "Diary 2"]
    assert next(iter(found.values())).every == 5


# --- early stopping by hand ---


def steps_until_stop(values, **options):
    callback = EarlyStopping("x", **options)
    for number, value in enumerate(values, 1):
        if callback.look(SimpleNamespace(metrics={} if value is None else {"x": value})) == "stop":
            return number
    return None


@pytest.mark.parametrize(
    ("values", "options", "stop"),
    [
        ([1, 2, 3, 3, 2, 3], {"patience": 3}, 6),
        ([1, 1, 2, 2, 1], {"patience": 2}, 5),
        ([3, 2, 1, 1, 0], {"patience": 2, "mode": "min"}, None),
        ([1.0, 1.05, 1.09, 1.2], {"patience": 2, "min_delta": 0.1}, 3),
        ([1.0, 1.05, 1.2, 1.25], {"patience": 2, "min_delta": 0.1}, None),
        ([float("nan"), float("nan")], {"patience": 2}, 2),
        ([1, float("nan"), 2, 1, 1], {"patience": 2}, 5),
        ([1, None, 1, None, 1], {"patience": 2}, 5),  # a metric that some steps do not have
    ],
)
def test_patience(values, options, stop):
    assert steps_until_stop(values, **options) == stop


def test_it_looks_where_the_metric_comes(tmp_path):
    assert EarlyStopping("eval/loss").on_step is None and EarlyStopping("loss").on_evaluate is None
    record = to_json(default())
    assert not Callbacks({"a": EarlyStopping("eval/loss")}, record, tmp_path).every_step
    assert Callbacks({"a": EarlyStopping("loss", 1, 0.0, "max")}, record, tmp_path).every_step
    assert Callbacks({"a": SimpleNamespace(on_step_begin=print)}, record, tmp_path).every_step
