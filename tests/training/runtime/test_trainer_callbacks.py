"""transformers' callbacks in a run: which hooks are called, when, and with what."""

from types import SimpleNamespace

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.training.runtime.callbacks import load_callbacks
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
    def __init__(self):
        self.notes, self.logs = [], []

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        assert processing_class is model.tokenizer
        self.notes.append(("begin", state.global_step, args.max_steps))

    def on_step_end(self, args, state, control, **kwargs):
        self.notes.append(("step", state.global_step))
        control.should_training_stop = state.global_step == 2
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(sorted(logs))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        assert metrics["eval_loss"] == metrics["eval/loss"]
        self.notes.append(("evaluate", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.notes.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **kwargs):
        self.notes.append(("end", state.global_step))


def test_hooks_are_called_in_their_order_and_may_end_the_run(tmp_path):
    config = default()
    config.output_dir, config.total_steps, config.eval.every, config.eval.prompts = str(tmp_path / "run"), 5, 2, 4
    config.algorithm.name, config.batch.prompts, config.logging.backends = "sft", 2, ("jsonl",)
    config.checkpoint.every = 0
    rows, diary = [{"prompt": "ab", "completion": "c"}] * 4, Diary()
    jaxrl_llm.train(config, rows, rows, callbacks=diary)
    assert diary.notes == [
        ("begin", 0, 5), ("evaluate", 0), ("step", 1), ("step", 2), ("evaluate", 2), ("save", 2), ("end", 2),
    ]  # fmt: skip
    assert "loss" in diary.logs[1]


def test_what_is_not_called_is_refused():
    class Epochs(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            pass

    with pytest.raises(
        ConfigError, match=r"Epochs has on_epoch_end, which a run does not call; it calls .*on_step_end"
    ):
        load_callbacks([Epochs()])
    assert load_callbacks([TrainerCallback]).keys() == {"TrainerCallback"}  # a class is made


def test_wishes_and_unknown_arguments_are_refused_by_name(tmp_path):
    class Wishes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = True

    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return args.deepspeed

    moment = SimpleNamespace(
        step=1, metrics={}, config=default(), folder=tmp_path, model=lambda: SimpleNamespace(tokenizer=1)
    )
    with pytest.raises(ConfigError, match=r"control\.should_save.*checkpoint\.every"):
        TrainerCallbackHooks(Wishes()).on_step(moment)
    with pytest.raises(AttributeError, match=r"no 'deepspeed' here: .*args\.config"):
        TrainerCallbackHooks(Asks()).on_step(moment)


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

    assert [evaluated(hooks, step, value) for step, value in enumerate((0.1, 0.3, 0.2))] == [None] * 3
    (resumed,) = load_callbacks([EarlyStoppingCallback(early_stopping_patience=2)]).values()
    resumed.set_state(hooks.get_state())
    assert evaluated(resumed, 3, 0.2) == "stop"
