"""A run, as the command and as a function: what it leaves, what it refuses, and (slow) that it learns."""

import json
import signal

import jax
import pyarrow.parquet as pq
import pytest

from jaxrl_llm.config import ConfigError, from_json
from jaxrl_llm.config.flags import load_config_file, run
from jaxrl_llm.train import main
from jaxrl_llm.train import train as train_here

METRICS = {
    "step", "time", "loss", "reward", "reward_std", "kl", "entropy", "grad_norm", "lr", "completions/mean_length",
    "completions/clipped_ratio", "clip_ratio/region_mean", "frac_reward_zero_std", "step_time",
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "tokens_per_second",
    "time/rollout", "time/reward", "time/update",
}  # fmt: skip
EVALUATION = {"eval/reward", "eval/accuracy", "eval/greedy_accuracy"}


@pytest.fixture
def train(run_python, root):
    def start(config, *flags, **options):
        return run_python("-m", "jaxrl_llm.train", f"--config={root / 'configs' / config}", *flags, **options)

    return start


def test_what_a_run_leaves(tiny_run):
    """And the command, though it is killed and started again: tests/system/faults/test_kills.py."""
    run = tiny_run.output_dir
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0].keys() >= EVALUATION
    assert all(line.keys() >= METRICS for line in lines[1:])
    assert lines[2].keys() >= EVALUATION
    assert not EVALUATION & lines[1].keys()
    assert lines[1]["sampling/sampling_logp_difference/max"] < 1e-4  # the trainer scores what the sampler drew
    config = from_json((run / "config.json").read_text())
    assert config.output_dir == str(run)
    assert config.total_steps == 2
    table = pq.read_table(run / "completions/completions_00001.parquet")
    assert {"step", "prompt", "completion", "exact_match", "advantage"} <= set(table.column_names)
    assert table.num_rows == config.batch.prompts * config.rollout.group_size
    assert (run / "checkpoints/2").is_dir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (run / "hf" / name).is_file(), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.algorithm.bta=0.1"], "algorithm.beta"),
        (["--config.rollout.temperature=hot"], "rollout.temperature"),
        (["--config.rollout.temperature=-1"], "rollout.temperature"),
        (["--config.model.path=embedded:nothing"], "embedded:sort"),
        (["--config.data.path=task:nothing"], "sort"),
        (["--config.rewards.functions=exact_mach"], "exact_match"),
        (["--config.algorithm.advantage=groop"], "group"),
        (["--config.algorithm.loss=ppo_klip"], "ppo_clip"),
        (["--config.rollout.max_prompt_length=4"], "data.overlong"),
        (["--config.mesh.fsdp=3"], "mesh"),
        (["--config.checkpoint.resume=nowhere/7"], "nowhere/7"),
    ],
)
def test_bad_input_is_one_readable_message(root, tmp_path, monkeypatch, capsys, flags, message):
    config = f"--config={root / 'configs/grpo.py'}:tiny"
    monkeypatch.setattr("sys.argv", ["train", config, f"--config.output_dir={tmp_path / 'run'}", *flags])
    with pytest.raises(SystemExit) as stopped:
        run(main)
    error = capsys.readouterr().err
    assert stopped.value.code == 2, error
    assert error.count("error: ") == 1
    assert message in error
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.slow
def test_a_reward_that_raises_stops_the_run_and_loses_nothing(train, tmp_path):
    (tmp_path / "mine.py").write_text(
        "calls = []\n"
        "def late(completions, **kwargs):\n"
        "    calls.append(1)\n"
        "    return [1 / 0 if len(calls) > 2 and i == 5 else 0.5 * i for i, _ in enumerate(completions)]\n"
    )
    done = train(
        "grpo.py:tiny", "--config.output_dir=run", "--config.rewards.functions=mine.py:late", "--config.eval.every=-1",
        "--config.total_steps=4", "--config.checkpoint.every=1",
    )  # fmt: skip
    assert done.returncode == 2
    assert "late" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run/checkpoints/2").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_main_job_learns(train, tmp_path, seed):
    done = train("grpo.py", "--config.output_dir=run", f"--config.seed={seed}", timeout=1800)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["eval/accuracy"] <= 0.3
    assert lines[-1]["eval/accuracy"] >= 0.85
    assert lines[-1]["eval/greedy_accuracy"] >= 0.95


def test_eight_frames_lead_to_a_loss(root, tmp_path):
    """From the command to the loss of a user's, which raises: main, and what stands in the traceback of train."""
    (tmp_path / "broken.py").write_text("def loss(*arguments, **options):\n    raise ZeroDivisionError\n")
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    config.eval.every, config.algorithm.loss = -1, f"{tmp_path / 'broken.py'}:loss"
    with pytest.raises(ConfigError, match=r"broken\.py:loss raised ZeroDivisionError") as error:
        train_here(config)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    own = (str(root / "jaxrl_llm"), str(tmp_path))
    frames = [frame.name for frame in error.traceback if str(frame.path).startswith(own) and not frame.ishidden(error)]
    # After main; the last calls the user's own function, and names it if it raises.
    assert frames == ["train", "improve", "update", "loss_of", "loss", "policy_objective", "called"]


class Fails:
    """A callback that ends the run in a hook, and notes the bytes of the policy."""

    def __init__(self, hook: str, error: BaseException | None):
        self.error, self.bytes = error, 0
        setattr(self, hook, self.fail)

    def fail(self, moment):
        self.bytes = sum(x.nbytes for x in jax.tree.leaves(moment.model().params))
        if self.error is None:
            signal.raise_signal(signal.SIGINT)
        raise self.error


@pytest.mark.parametrize(
    ("config", "hook", "error"),
    [
        ("dpo.py:tiny", "on_begin", ValueError()),
        pytest.param("grpo.py:tiny", "on_step", None, marks=pytest.mark.slow),
        pytest.param("async_grpo.py:tiny", "on_step", None, marks=pytest.mark.slow),
    ],
)
def test_an_error_that_is_kept_keeps_no_memory(root, tmp_path, config, hook, error):
    """A notebook keeps the newest one, with the frames of the run: the next one would find the devices half full."""
    config = load_config_file(f"{root / 'configs' / config}")
    config.output_dir, config.logging.backends, config.eval.every = str(tmp_path / "run"), ("jsonl",), -1
    callback, before = Fails(hook, error), sum(x.nbytes for x in jax.live_arrays())
    with pytest.raises((ValueError, KeyboardInterrupt)) as kept:
        train_here(config, callbacks=callback)
    assert kept.value.__traceback__ is not None
    assert sum(x.nbytes for x in jax.live_arrays()) - before < callback.bytes / 10
