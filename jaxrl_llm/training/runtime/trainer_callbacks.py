"""transformers' TrainerCallback as a callback of a run: its hooks are called with what they know of a trainer."""

import math
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from jaxrl_llm.config import ConfigDict, ConfigError
from jaxrl_llm.config.entries import best_mode
from jaxrl_llm.training.runtime.moment import EVALUATE, SAVE, STOP, Moment

EPOCHS = ("on_epoch_begin", "on_epoch_end")
CALLED = (
    "on_init_end", "on_train_begin", *EPOCHS, "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save",
    "on_train_end",
)  # fmt: skip
NOT_CALLED = (
    "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_prediction_step", "on_predict", "on_push_begin",
)  # fmt: skip


def is_trainer_callback(callback: Any) -> bool:
    """True for a TrainerCallback of transformers, without importing it, and for an object with its hooks."""
    return any(base.__name__ == "TrainerCallback" for base in type(callback).__mro__) or (
        not any(hasattr(callback, name) for name in ("on_step", "on_checkpoint", "on_end"))
        and any(hasattr(callback, name) for name in ("on_train_begin", "on_step_end", "on_log", "on_train_end"))
    )


def _evaluated(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an evaluation among `metrics`, as `eval/reward` and as `eval_reward`."""
    own = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    return own | {f"eval_{name.removeprefix('eval/')}": value for name, value in own.items()}


class Arguments:
    """The arguments of a trainer that a run has: `output_dir`, `max_steps`, `learning_rate`, ...; `config` is all."""

    def __init__(self, config: ConfigDict):
        best = config.checkpoint.best
        self.config = config
        self.output_dir = config.output_dir
        self.max_steps = config.total_steps
        self.num_train_epochs = config.num_epochs
        self.learning_rate = config.optimizer.learning_rate
        self.weight_decay = config.optimizer.weight_decay
        self.per_device_train_batch_size = config.batch.prompts
        self.seed = config.seed
        self.run_name = config.logging.run_name
        self.logging_steps = 1
        self.logging_dir = config.output_dir
        self.eval_steps = config.eval.every
        self.eval_strategy = "steps" if config.eval.every > 0 else "no"
        self.save_steps = config.checkpoint.every
        self.save_strategy = "steps"
        self.report_to = list(config.logging.backends)
        self.load_best_model_at_end = best is not None
        self.metric_for_best_model = None if best is None else best.replace("eval/", "eval_")
        self.greater_is_better = best_mode(best or "", config.checkpoint.best_mode) == "max"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the args of a callback have no {name!r} here: the settings of the run are args.config, and others are "
            f"{', '.join(vars(self))}"
        )


class TrainerCallbackHooks:
    """A callback that calls the hooks of a TrainerCallback, `on_step_end(args, state, control, model=..., ...)`.

    `control.should_training_stop` ends the run, `should_save` and `should_evaluate` have the step saved and evaluated.
    `state.epoch` counts the passes over the data. The names of evaluations' metrics are there as `eval/reward` and as
    `eval_reward`. Raises ConfigError for one with hooks that nothing here corresponds to, and for TRL's
    BEMACallback.
    """

    def __init__(self, callback: Any):
        self.callback = callback
        self.calling = ""  # the last hook of the callback's own that was called
        self.in_epoch = False  # between on_epoch_begin and on_epoch_end
        self.joins = False  # a run that goes on, whose epoch its first step tells
        self.args: Arguments | None = None
        self.control = SimpleNamespace(
            should_training_stop=False, should_epoch_stop=False, should_save=False, should_evaluate=False,
            should_log=False,
        )  # fmt: skip
        self.state = SimpleNamespace(
            global_step=0, max_steps=0, epoch=None, log_history=[], best_metric=None, best_global_step=None,
            best_model_checkpoint=None, is_world_process_zero=True, is_local_process_zero=True, num_train_epochs=0,
            is_hyper_param_search=False, trial_name=None, trial_params=None,
        )  # fmt: skip
        if any(base.__name__ == "BEMACallback" for base in type(callback).__mro__):
            raise ConfigError(
                "the callback BEMACallback averages parameters of torch, and there are none: set average.every=400 in "
                "its place (python -m jaxrl_llm migrate writes its options)"
            )
        own = [name for name in NOT_CALLED if self._overrides(name)]
        if own:
            raise ConfigError(
                f"the callback {type(callback).__name__} has {', '.join(own)}, which a run does not call; it calls "
                f"{', '.join(CALLED)}; see docs/callbacks.md for its own, on_step and others"
            )

    def _overrides(self, name: str) -> bool:
        """True when the callback's class defines the hook, and not only transformers' empty one."""
        for base in type(self.callback).__mro__:
            if name in vars(base):
                return base.__name__ != "TrainerCallback"
        return name in getattr(self.callback, "__dict__", {})

    def _call(self, hook: str, moment: Moment, **more: Any) -> None:
        import jax  # here, as the module is read by commands that compute nothing

        if self.args is None:
            self.args = Arguments(moment.config)
        state = self.state
        state.global_step, state.max_steps = moment.step, self.args.max_steps
        state.num_train_epochs = self.args.num_train_epochs
        state.is_world_process_zero = state.is_local_process_zero = jax.process_index() == 0
        self.calling = hook
        if self._overrides(hook):
            model = moment.model()
            given = {"model": model, "processing_class": model.tokenizer, "tokenizer": model.tokenizer, **more}
            control = getattr(self.callback, hook)(self.args, state, self.control, **given)
            self.control = self.control if control is None else control
        if self.control.should_epoch_stop:
            raise ConfigError(
                "it set control.should_epoch_stop, but no epoch is cut short: set control.should_training_stop, which "
                "ends the run"
            )

    def _wishes(self, *wishes: str) -> list[str]:
        """The answer of a hook: what control asks for, of the wishes that this hook can have."""
        control = self.control
        asked = {STOP: control.should_training_stop, SAVE: control.should_save, EVALUATE: control.should_evaluate}
        return [wish for wish in wishes if asked[wish]]

    def on_begin(self, moment: Moment) -> list[str]:
        """on_init_end and on_train_begin."""
        own = [name for name in EPOCHS if self._overrides(name)]
        if own and moment.config.data.streaming:
            raise ConfigError(
                f"it has {', '.join(own)}, but the rows are streamed (data.streaming), and nobody knows where an epoch "
                "of them ends: count state.global_step"
            )
        if not moment.config.data.streaming and self.state.epoch is None:
            self.state.epoch, self.joins = 0.0, moment.step > 0
        self._call("on_init_end", moment)
        self._call("on_train_begin", moment)
        return self._wishes(STOP)

    def on_step_begin(self, moment: Moment) -> list[str]:
        """on_epoch_begin, where the step is the first of an epoch or of this start, and on_step_begin."""
        if not self.in_epoch and self.state.epoch is not None:
            self._call("on_epoch_begin", moment)
            self.in_epoch = True
        self.control.should_save = self.control.should_evaluate = False  # transformers forgets them here too
        self._call("on_step_begin", moment)
        return self._wishes(STOP)

    def on_step(self, moment: Moment) -> list[str]:
        """on_step_end, on_log with the metrics of the step as logs, and on_epoch_end where it ends an epoch."""
        before, self.state.epoch = self.state.epoch, moment.metrics.get("epoch", self.state.epoch)
        before, self.joins = self.state.epoch if self.joins else before, False
        self._call("on_step_end", moment)
        self._log(moment, dict(moment.metrics))
        if self.in_epoch and int(self.state.epoch) > int(before):
            self._end_epoch(moment)
        return self._wishes(STOP, SAVE, EVALUATE)

    def _end_epoch(self, moment: Moment) -> None:
        self._call("on_epoch_end", moment)
        self.in_epoch = False

    def on_evaluate(self, moment: Moment) -> list[str]:
        """on_evaluate with the metrics of the evaluation, and on_log."""
        self.control.should_evaluate = False
        metrics = _evaluated(moment.metrics)
        self._call("on_evaluate", moment, metrics=metrics)
        assert self.args is not None
        value, best = metrics.get(self.args.metric_for_best_model or "", math.nan), self.state.best_metric
        if best is None:
            best = -math.inf if self.args.greater_is_better else math.inf
        if value > best if self.args.greater_is_better else value < best:  # of NaN neither
            self.state.best_metric, self.state.best_global_step = value, moment.step
        self._log(moment, metrics)
        return self._wishes(STOP, SAVE)

    def recall(self, lines: Iterable[Mapping[str, float]]) -> None:
        """Begins `state.log_history` with the metrics of earlier steps, a line each, and those of their evaluations."""
        for line in lines:
            logs = {name: value for name, value in line.items() if not name.startswith("eval/")}
            entries = [logs] if len(logs) > 1 else []  # before the first step there is nothing but an evaluation
            if evaluated := _evaluated(line):
                entries.append({**evaluated, "step": line["step"]})
            self.state.log_history += entries

    def _log(self, moment: Moment, logs: dict[str, float]) -> None:
        self.state.log_history.append({**logs, "step": moment.step})
        self._call("on_log", moment, logs=logs)

    def on_save(self, moment: Moment) -> list[str]:
        """on_save, once the state of the step is saved."""
        self.control.should_save = False
        self._call("on_save", moment)
        return self._wishes(STOP)

    def on_end(self, moment: Moment) -> None:
        """on_epoch_end, where the run ends within an epoch, and on_train_end."""
        if self.in_epoch:
            self._end_epoch(moment)
        self._call("on_train_end", moment)

    def get_state(self) -> dict[str, Any]:
        """The epoch, the best metric and its step, and the attributes that the callback exports, as transformers' own
        state."""
        exported = self.callback.state() if callable(getattr(self.callback, "state", None)) else {}
        own = {name: getattr(self.state, name) for name in ("epoch", "best_metric", "best_global_step")}
        return {**own, "attributes": exported.get("attributes", {})}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from the state that `get_state` returned."""
        self.state.epoch, self.state.best_metric = state.get("epoch"), state["best_metric"]
        self.state.best_global_step = state.get("best_global_step")
        for name, value in state["attributes"].items():
            setattr(self.callback, name, value)
