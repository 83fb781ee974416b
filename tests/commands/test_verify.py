"""The exactness report: what it compares, and that it sees what depends on how a step is computed."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.commands import verify as command
from jaxrl_llm.commands.verify import EQUAL, Made, _compared, _of_router, _variants, verify
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.training.update import Frozen, State


@pytest.fixture
def config(root, tmp_path):
    made = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    made.output_dir, made.eval.every = str(tmp_path / "run"), 0
    return made


def made(params, tokens=((1, 2), (3, 4)), norm=2.0):
    return Made(np.array(tokens), {"grad_norm": norm}, {"w": np.array(params, np.float32)})


def test_updates_are_compared_by_their_length():
    start = {"w": np.zeros(2, np.float32)}
    assert _compared("again", start, made([3, 4]), made([3, 4]))[1:] == ("equal", EQUAL, 0.0)
    far = _compared("far", start, made([3, 4]), made([3, 4.5], tokens=((1, 2), (3, 5)), norm=2.5))
    assert far.samples == "1 of 2 rows differ" and far.difference == pytest.approx(0.1)
    assert far.update == "differs by 1.0e-01 of its length, the gradient's norm by 2.5e-01"
    still = _compared("still", start, made([0, 0]), made([0, 0]))
    assert still.difference is None and still.update.startswith("no parameter moves")


def test_a_difference_that_is_the_routers_loss_is_named():
    start, net = {"w": np.zeros(2, np.float32)}, SimpleNamespace(experts=4, router_aux_loss_coef=0.01)
    named = ", by definition: the router's loss is of each micro-batch by itself"
    assert _of_router(net, {"batch.microbatch_rows": 2}) == _of_router(net, {"batch.packing": "true"}) == named
    assert _of_router(net, {"mesh.data": 2}) == "" and _of_router(net, {"rollout.slots": 2}) == ""
    for other in (
        SimpleNamespace(experts=0, router_aux_loss_coef=0.01),
        SimpleNamespace(experts=4, router_aux_loss_coef=0),
    ):
        assert _of_router(other, {"batch.microbatch_rows": 2}) == ""
    assert _compared("far", start, made([3, 4]), made([3, 4.5]), named).update.endswith(f"by 0.0e+00{named}")
    assert _compared("same", start, made([3, 4]), made([3, 4]), named).update == EQUAL


def test_parameters_that_move_without_a_gradient():
    """By weight decay, where all completions of a prompt score alike."""
    start = {"w": np.zeros(2, np.float32)}
    found = _compared("far", start, made([3, 4], norm=0.0), made([3, 4.5], norm=0.0))
    assert found.update == "differs by 1.0e-01 of its length, the gradient's norm by 0.0e+00"


def test_metrics_are_of_the_first_update_that_has_them(monkeypatch):
    """A critic with minibatches of its own makes its updates before those of the policy, whose metrics they lack."""
    made = [{"critic/grad_norm": 7.0}, {"critic/grad_norm": 8.0}, {"grad_norm": 2.0}, {"grad_norm": 3.0}]
    monkeypatch.setattr(command, "improve", lambda run, state, batch: (state, made))
    batch = SimpleNamespace(inputs=SimpleNamespace(tokens=np.zeros((2, 3), np.int32)))
    source = SimpleNamespace(next=lambda state, key: SimpleNamespace(batch=batch))
    state, averaged = State(np.int32(1), {"w": np.zeros(2, np.float32)}, ()), []
    average = SimpleNamespace(update=lambda step, params: averaged.append((step, [*params])))
    run = SimpleNamespace(source=source, frozen=Frozen(), average=average)
    found, _ = command._step(default(), run, state)
    assert found.metrics == {"critic/grad_norm": 7.0, "grad_norm": 2.0}
    assert averaged == [(1, ["w"])], "a reference may follow it"


@pytest.mark.parametrize(
    ("algorithm", "prompts", "expected"),
    [("sft", 8, "micro-batches of 4 rows for 8"), ("sft", 5, "micro-batches of 1 row for 5"),
     ("sft", 9, "micro-batches of 3 rows for 9"), ("preference", 5, "micro-batches of 2 rows for 10"),
     ("preference", 1, None), ("sft", 1, None)],
)  # fmt: skip
def test_smaller_micro_batches_divide_a_minibatch(algorithm, prompts, expected):
    config = default()
    config.algorithm.name, config.batch.prompts = algorithm, prompts
    found = [name for name, _ in _variants(config, run_of()) if name.startswith("micro-batches")]
    assert found == ([] if expected is None else [expected])


def run_of(experts=0, devices=1):
    """What is asked of a run for the other ways to compute its step."""
    return SimpleNamespace(
        algorithm=SimpleNamespace(online=False),
        pack=SimpleNamespace(sizes=None),
        mesh=SimpleNamespace(size=devices, shape=dict.fromkeys(("data", "fsdp", "context", "expert", "tensor"), 1)),
        model=SimpleNamespace(net=SimpleNamespace(config=SimpleNamespace(experts=experts))),
    )


@pytest.mark.parametrize("experts", [0, 4])
def test_experts_have_a_mesh_of_their_own(experts):
    """Of the two devices that train: others, which only sample, are in no mesh."""
    found = {name: sizes for name, sizes in _variants(default(), run_of(experts, 2)) if name.startswith("mesh")}
    axes = ["data", "fsdp", "tensor", "context", *(["expert"] if experts else [])]
    assert [*found] == [f"mesh of {axis} 2" for axis in axes]
    assert all(sorted(sizes.values()) == [1, 1, 1, 1, 2] for sizes in found.values())


def test_a_run_of_epochs_has_no_warm_up_and_no_decay(config, monkeypatch):
    """Its steps are counted with the rows, and the settings then checked again."""

    class Reached(Exception):  # noqa: N818
        pass

    def reached(changed):
        changed.num_epochs = None
        changed.algorithm.name = "ppo"  # whose critic has a schedule too
        validate(changed)
        raise Reached

    monkeypatch.setattr(command, "_run", reached)
    c = config.optimizer
    config.num_epochs, c.schedule, c.decay_steps, c.warmup_steps, c.warmup_init = 1.0, "wsd", 5, 2, 1e-6
    c.schedule_steps, config.critic.schedule, config.critic.lr_warmup_steps = 20, "polynomial", 3
    with pytest.raises(Reached):
        verify(config)


def test_it_runs_in_one_process_and_in_step(config, monkeypatch):
    for name in ("partial_prompts", "processes", "staleness"):
        config.rollout[name] = 1
        with pytest.raises(ConfigError, match=rf"rollout.{name} is 1.*--config.rollout.{name}=0"):
            verify(config)
        config.rollout[name] = 0
    monkeypatch.setattr(command.jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="runs in one process"):
        verify(config)


def test_it_joins_the_others_of_a_cluster(root, monkeypatch):
    """Which it then refuses: each would verify a run of its own, and print a report."""
    monkeypatch.setenv("JAXRL_PROCESS_COUNT", "2")
    with pytest.raises(ConfigError, match=r"processes\.coordinator is missing"):
        command.main([f"--config={root}/configs/grpo.py:tiny"])


@pytest.mark.slow
def test_a_step_does_not_depend_on_how_it_is_computed(root, tmp_path, capsys):
    output = tmp_path / "report.json"
    run = f"--config.output_dir={tmp_path / 'run'}"
    command.main([f"--config={root / 'configs' / 'grpo.py'}:tiny", run, f"--output={output}"])
    report = json.loads(output.read_text())
    assert 0 <= report["logp_difference_mean"] <= report["logp_difference_max"] <= 1e-4
    checks = {check["name"]: check for check in report["checks"]}
    assert all(check["samples"] == "equal" for check in checks.values())
    for name in ("the same again", "step 2, resumed after step 1", "8 decode slots for 16"):
        assert checks[name]["update"] == EQUAL, name
    assert checks["micro-batches of 8 rows for 16"]["difference"] <= 1e-3
    assert 0 < checks["rows not packed"]["difference"] <= 1e-3
    text = capsys.readouterr().out
    assert all(name in text for name in checks) and "nats apart" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_rewards_that_draw_lots_are_seen(config, tmp_path):
    (tmp_path / "lots.py").write_text(
        "import random\n\ndef lots(completions, **columns):\n    return [random.random() for _ in completions]\n"
    )
    config.rewards.functions = (f"{tmp_path / 'lots.py'}:lots",)
    random.seed(0)
    checks = {check.name: check for check in verify(config).checks}
    assert checks["the same again"].samples == "equal" and checks["the same again"].difference > 0.1
