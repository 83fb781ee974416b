"""transformers' TrainerCallback as a callback of a run: its hooks are called with what they know of a trainer."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from jaxrl_llm.config import ConfigDict, ConfigError
from jaxrl_llm.training.runtime.moment import STOP, Moment

CALLED = ("on_init_end", "on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")
NOT_CALLED = (
    "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step",
    "on_prediction_step", "on_predict", "on_push_begin",
)  # fmt: skip


def is_trainer_callback(callback: Any) -> bool:
    """True for a TrainerCallback of transformers, without importing it, and for an object with its hooks."""
    return any(base.__name__ == "TrainerCallback" for base in type(callback).__mro__) or (
        not any(hasattr(callback, name) for name in ("on_step", "on_checkpoint", "on_end"))
        and any(hasattr(callback, name) for name in ("on_train_begin", "on_step_end", "on_log", "on_train_end"))
    )


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
        self.greater_is_better = config.checkpoint.best_mode == "max"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the args of a callback have no {name!r} here: the settings of the run are args.config, and others are "
            f"{', '.join(vars(self))}"
        )


class TrainerCallbackHooks:
    """A callback that calls the hooks of a TrainerCallback, `on_step_end(args, state, control, model=..., ...)`.

    `control.should_training_stop` ends the run. The names of evaluations' metrics are there as `eval/reward` and as
    `eval_reward`. Raises ConfigError for one with hooks that nothing here corresponds to.
    """

    def __init__(self, callback: Any):
        self.callback = callback
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

    def _call(self, hook: str, moment: Moment, **more: Any) -> str | None:
        import jax  # here, as the module is read by commands that compute nothing

        if self.args is None:
            self.args = Arguments(moment.config)
        state = self.state
        state.global_step, state.max_steps = moment.step, self.args.max_steps
        state.num_train_epochs = self.args.num_train_epochs
        state.is_world_process_zero = state.is_local_process_zero = jax.process_index() == 0
        if self._overrides(hook):
            model = moment.model()
            given = {"model": model, "processing_class": model.tokenizer, "tokenizer": model.tokenizer, **more}
            control = getattr(self.callback, hook)(self.args, state, self.control, **given)
            self.control = self.control if control is None else control
        for wish in ("should_save", "should_evaluate"):
            if getattr(self.control, wish, False):
                raise ConfigError(
                    f"it set control.{wish}, but a run saves and evaluates when checkpoint.every and eval.every say so"
                )
        return STOP if self.control.should_training_stop else None

    def on_begin(self, moment: Moment) -> str | None:
        """on_init_end and on_train_begin."""
        self._call("on_init_end", moment)
        return self._call("on_train_begin", moment)

    def on_step(self, moment: Moment) -> str | None:
        """on_step_end, and on_log with the metrics of the step as logs."""
        self._call("on_step_end", moment)
        return self._log(moment, dict(moment.metrics))

    def on_evaluate(self, moment: Moment) -> str | None:
        """on_evaluate with the metrics of the evaluation, and on_log."""
        metrics = {name: value for name, value in moment.metrics.items() if name.startswith("eval/")}
        metrics |= {f"eval_{name.removeprefix('eval/')}": value for name, value in metrics.items()}
        self._call("on_evaluate", moment, metrics=metrics)
        self._remember_best(metrics, moment.step)
        return self._log(moment, metrics)

    def _log(self, moment: Moment, logs: dict[str, float]) -> str | None:
        self.state.log_history.append({**logs, "step": moment.step})
        return self._call("on_log", moment, logs=logs)

    def _remember_best(self, metrics: Mapping[str, float], step: int) -> None:
        assert self.args is not None
        value = metrics.get(self.args.metric_for_best_model or "")
        best = self.state.best_metric
        if value is not None and (best is None or ((value > best) == self.args.greater_is_better and value != best)):
            self.state.best_metric, self.state.best_global_step = value, step

    def on_save(self, moment: Moment) -> str | None:
        """on_save, once the state of the step is saved."""
        return self._call("on_save", moment)

    def on_end(self, moment: Moment) -> str | None:
        """on_train_end."""
        self._call("on_train_end", moment)
        return None

    def get_state(self) -> dict[str, Any]:
        """The best metric, and the attributes that the callback exports, as transformers' own state of callbacks."""
        exported = self.callback.state() if callable(getattr(self.callback, "state", None)) else {}
        return {"best_metric": self.state.best_metric, "attributes": exported.get("attributes", {})}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from the state that `get_state` returned."""
        self.state.best_metric = state["best_metric"]
        for name, value in state["attributes"].items():
            setattr(self.callback, name, value)
