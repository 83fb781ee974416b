"""Programs that are compiled ahead are those of the first step: nothing is compiled twice."""

import threading
from collections import Counter

import jax
import pytest

from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.environments.games import SortThenSmallest
from jaxrl_llm.train import train
from jaxrl_llm.training import ahead
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.runtime.compiling import EVENT

AHEAD = ("jit(scored_logps)", "jit(update)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch.minibatches": 2, "algorithm.beta": 0.0},
        {"batch.packing": "false", "algorithm.old_logps": "sampler"},
        {"algorithm.old_logps": "interpolated", "algorithm.importance_correction": "token_truncate"},
        {"environment.options": ("sort(beta=0.1, weight=0.5)",), "rollout.max_completion_length": 20},
    ],
    ids=["reference", "minibatches", "sampler", "interpolated", "environments"],
)
def test_the_first_step_finds_its_programs(root, tmp_path, changes):
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.update_from_flattened_dict({"output_dir": str(tmp_path), "total_steps": 1, "eval.every": -1, **changes})
    given = {}
    if config.environment.options:
        config.rewards.functions = ("environment",)
        names = ("sort", "half")
        rows = [{"prompt": f"sort:{1000 + 37 * i}=", "environment": names[i % 2]} for i in range(32)]
        given = {"train_dataset": rows, "environment": dict.fromkeys(names, SortThenSmallest)}
    jax.clear_caches()  # of other tests, which may have compiled the same
    compiled = Counter()

    def listen(event, duration_secs, fun_name="", **_):
        thread = threading.current_thread().name
        if event == EVENT and (fun_name in AHEAD or thread == "compile ahead"):  # which runs no program
            compiled[fun_name, thread] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        train(config, **given)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == {(name, "compile ahead"): 1 for name in AHEAD}


def test_an_error_is_left_to_the_call():
    calls = []

    def fails():
        calls.append("compiled")
        raise ValueError("no memory")

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with ahead.CompiledAhead(iter([fails, fails]), mesh, Stopwatch()) as programs:
        programs.wait()
    assert calls == ["compiled"], "the others wait for what failed"


def test_whoever_leaves_waits_for_one_program():
    """As Ctrl-C does: the others are compiled for nobody."""
    calls, left = [], threading.Event()

    class Left(ahead.CompiledAhead):
        def wait(self):
            left.set()  # the block is left, and waits for its thread
            super().wait()

    def compiles():
        calls.append("compiled")
        assert left.wait(60)

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(KeyboardInterrupt), Left(iter([compiles, compiles]), mesh, Stopwatch()):
        raise KeyboardInterrupt
    assert calls in (["compiled"], [])
