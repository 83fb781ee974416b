"""transformers' callbacks in a run: which hooks are called, when, and with what."""

from types import SimpleNamespace

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, to_json
from jaxrl_llm.training.runtime.callbacks import Callbacks, load_callbacks
from jaxrl_llm.training.runtime.trainer_callbacks import TrainerCallbackHooks


class TrainerCallback:
    """As transformers' own, whose module takes torch: every hook, empty."""

    def on_train_begin(self, args, state, control, **kwargs):
        pass

    def on_step_end(self, args, state, control, **kwargs):
        pass

    def on_epoch_end(self, args, state, control, **kwargs):
        pass


class Diary(TrainerCallback):
    """Notes every call; has the second step evaluated, that and the one before the end saved, and ends the run."""

    def __init__(self):
        self.notes, self.logs = [], []

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        assert processing_class is model.tokenizer
        self.notes.append(("begin", state.global_step, args.max_steps))

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.notes.append(("epoch", state.global_step, round(state.epoch, 2)))

    def on_step_begin(self, args, state, control, **kwargs):
        assert not control.should_save and not control.should_evaluate
        self.notes.append(("step", state.global_step))

    def on_step_end(self, args, state, control, **kwargs):
        self.notes.append(("step ends", state.global_step))
        control.should_save = state.global_step == 3
        control.should_training_stop = state.global_step == 4
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(sorted(logs))

    def on_epoch_end(self, args, state, control, **kwargs):
        self.notes.append(("epoch ends", state.global_step, round(state.epoch, 2)))
        control.should_evaluate = state.global_step == 2

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        assert metrics["eval_loss"] == metrics["eval/loss"]
        self.notes.append(("evaluate", state.global_step))
        control.should_save = True

    def on_save(self, args, state, control, **kwargs):
        self.notes.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **kwargs):
        self.notes.append(("end", state.global_step))


def test_hooks_are_called_in_their_order_and_their_wishes_are_granted(tmp_path):
    """Of 6 rows in batches of 4: two epochs and a part."""
    config = default()
    config.output_dir, config.total_steps, config.eval.every, config.eval.prompts = str(tmp_path / "run"), 6, 0, 4
    config.algorithm.name, config.batch.prompts, config.logging.backends = "sft", 4, ("jsonl",)
    config.checkpoint.every, config.checkpoint.keep = 0, 9
    rows, diary = [{"prompt": "ab", "completion": "c"}] * 6, Diary()
    jaxrl_llm.train(config, rows, rows, callbacks=diary)
    assert diary.notes == [
        ("begin", 0, 6), ("evaluate", 0),
        ("epoch", 0, 0.0), ("step", 0), ("step ends", 1),
        ("step", 1), ("step ends", 2), ("epoch ends", 2, 1.33), ("evaluate", 2), ("save", 2),
        ("epoch", 2, 1.33), ("step", 2), ("step ends", 3), ("epoch ends", 3, 2.0), ("save", 3),
        ("epoch", 3, 2.0), ("step", 3), ("step ends", 4), ("evaluate", 4), ("save", 4), ("epoch ends", 4, 2.67),
        ("end", 4),
    ]  # fmt: skip
    assert "loss" in diary.logs[1]
    saved = (tmp_path / "run" / "checkpoints").iterdir()
    assert {path.name for path in saved if path.name.isdigit()} == {"2", "3", "4"}


def test_the_epoch_goes_on_where_a_run_does(tmp_path):
    class Epochs(TrainerCallback):
        ended = 0

        def on_epoch_end(self, args, state, control, **kwargs):
            self.ended += 1

    def moment(step, epoch):
        return SimpleNamespace(step=step, metrics={"epoch": epoch}, config=default(), folder=tmp_path,
                               model=lambda: SimpleNamespace(tokenizer=None))  # fmt: skip

    first, second, added = (TrainerCallbackHooks(Epochs()) for _ in range(3))
    first.on_begin(moment(0, 0.0))
    first.on_step_begin(moment(0, 0.0))
    first.on_step(moment(1, 1.5))
    second.set_state(first.get_state())
    for hooks in (second, added):  # the latter was not there before, and sees no epoch end but that of step 3
        hooks.on_begin(moment(1, 0.0))
        for step, epoch in ((2, 1.7), (3, 2.0), (4, 2.3)):
            hooks.on_step_begin(moment(step - 1, 0.0))
            hooks.on_step(moment(step, epoch))
    assert (first.callback.ended, second.callback.ended, added.callback.ended) == (1, 1, 1)


def test_what_is_not_called_is_refused(tmp_path):
    class Updates(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            pass

    class Epochs(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            pass

    with pytest.raises(
        ConfigError, match=r"Updates has on_optimizer_step, which a run does not call; it calls .*on_step_end"
    ):
        load_callbacks([Updates()])
    assert load_callbacks([TrainerCallback]).keys() == {"TrainerCallback"}  # a class is made
    streams = default()
    streams.data.streaming = True
    with pytest.raises(ConfigError, match=r"it has on_epoch_end, but the rows are streamed \(data\.streaming\)"):
        TrainerCallbackHooks(Epochs()).on_begin(SimpleNamespace(step=0, metrics={}, config=streams, folder=tmp_path))


def test_the_moving_average_of_trl_is_a_setting():
    with pytest.raises(ConfigError, match=r"BEMACallback averages parameters of torch, .*: set average\.every=400 in"):
        TrainerCallbackHooks(type("BEMACallback", (TrainerCallback,), {})())


def test_wishes_and_unknown_arguments_are_refused_by_name(tmp_path):
    class Wishes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = True

    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return args.deepspeed

    moment = SimpleNamespace(
        step=1, metrics={}, config=default(), folder=tmp_path, model=lambda: SimpleNamespace(tokenizer=1)
    )
    with pytest.raises(ConfigError, match=r"control\.should_epoch_stop.*control\.should_training_stop"):
        TrainerCallbackHooks(Wishes()).on_step(moment)
    with pytest.raises(AttributeError, match=r"no 'deepspeed' here: .*args\.config"):
        TrainerCallbackHooks(Asks()).on_step(moment)


def test_an_error_names_the_hook_of_transformers(tmp_path):
    class Logs(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            raise OSError("no network")

    record, model = to_json(default()), SimpleNamespace(tokenizer=None)
    callbacks = Callbacks(load_callbacks([Logs()]), record, tmp_path)
    with pytest.raises(ConfigError, match=r"the callback Logs, on_log at step 1: OSError: no network"):
        callbacks("on_step", 1, {"reward": 1.0}, lambda: model)


@pytest.mark.parametrize(("mode", "best"), [("auto", (0.3, 2)), ("max", (0.3, 2)), ("min", (0.1, 1))])
def test_the_best_evaluation_is_kept_and_none_is_nan(tmp_path, mode, best):
    config = default()
    config.checkpoint.best, config.checkpoint.best_mode = "eval/reward", mode
    hooks, resumed = TrainerCallbackHooks(TrainerCallback()), TrainerCallbackHooks(TrainerCallback())
    for step, value in enumerate((float("nan"), 0.1, 0.3, float("nan"), 0.2)):
        hooks.on_evaluate(SimpleNamespace(step=step, metrics={"eval/reward": value}, config=config))
    hooks.on_evaluate(SimpleNamespace(step=5, metrics={"eval/other": 9.0}, config=config))
    resumed.set_state(hooks.get_state())
    for state in (hooks.state, resumed.state):
        assert (state.best_metric, state.best_global_step) == best


def test_transformers_early_stopping():
    pytest.importorskip("torch")
    from transformers import EarlyStoppingCallback

    config = default()
    config.checkpoint.best, config.checkpoint.every, config.eval.every = "eval/reward", 1, 1
    (hooks,) = load_callbacks([EarlyStoppingCallback(early_stopping_patience=2)]).values()

    def evaluated(hooks, step, value):
        moment = SimpleNamespace(step=step, metrics={"eval/reward": value}, config=config,
                                 model=lambda: SimpleNamespace(tokenizer=None))  # fmt: skip
        return hooks.on_evaluate(moment)

    assert [evaluated(hooks, step, value) for step, value in enumerate((0.1, 0.3, 0.2))] == [[]] * 3
    (resumed,) = load_callbacks([EarlyStoppingCallback(early_stopping_patience=2)]).values()
    resumed.set_state(hooks.get_state())
    assert evaluated(resumed, 3, 0.2) == ["stop"]


def test_a_run_that_goes_on_knows_the_log_of_its_earlier_steps(tmp_path):
    hooks = TrainerCallbackHooks(Diary())
    callbacks = Callbacks({"diary": hooks, "other": SimpleNamespace(on_end=print)}, to_json(default()), tmp_path)
    callbacks.recall(
        [{"step": 0, "eval/loss": 3.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "eval/loss": 1.5}]
    )
    assert hooks.state.log_history == [
        {"eval/loss": 3.0, "eval_loss": 3.0, "step": 0},
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.0},
        {"eval/loss": 1.5, "eval_loss": 1.5, "step": 2},
    ]
