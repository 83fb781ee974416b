"""Rollout functions of several processes: each is called for its own prompts, and samples by programs of all."""

import json
from pathlib import Path

import pytest

from jaxrl_llm.models.files.weight_versions import LocalCheckpoint
from tests.system.processes.test_runs import all_ended_well, command, same_runs
from tests.training.rollouts.test_external_rollout import Server

CODE = """
import jax, os

def plain(prompts, trainer):
    return trainer.generate(prompts)

def uneven(prompts, trainer):
    first = trainer.generate(prompts)
    for call in range(3 * jax.process_index()):  # of other widths, numbers of prompts and of completions
        ids = [first["prompt_ids"][0] * 5 ** call] * (call + 1)
        asked = trainer.generate(ids, num_generations=2 * call + 1)
        assert asked["prompt_ids"] == [row for row in ids for _ in range(2 * call + 1)]
        assert len(asked["completion_ids"]) == len(asked["logprobs"]) == (call + 1) * (2 * call + 1)
    return first

def late(prompts, trainer):
    # What a process asks for is its own, whatever others ask for in the same round.
    if jax.process_index() == 1:
        ids = trainer.tokenize(prompts)
        trainer.generate([row * 9 for row in ids], num_generations=5)
        assert trainer.save_model("policy", lambda: os.listdir("policy")).count("model.safetensors") == 1
    made = [trainer.generate([prompt]) for prompt in prompts]
    return {name: [row for part in made for row in part[name]] for name in made[0]}

def texts(model, processing_class, prompts, generation_config):
    asked = [prompt["prompt"] for prompt in prompts[:: generation_config.num_generations]]
    rows = model.generate(asked)["completion_ids"] if jax.process_index() == 0 else [[49, 50]] * len(prompts)
    return [processing_class.decode(row, skip_special_tokens=True) for row in rows]

def failing(prompts, trainer):
    if jax.process_index() == 1:
        raise RuntimeError("not here")
    for _ in range(3):
        try:
            made = trainer.generate(prompts)
        except Exception:
            pass
    return None
"""


@pytest.fixture
def flags(tmp_path):
    """`flags(function)` makes a run of two steps sample with it."""
    (tmp_path / "mine.py").write_text(CODE)

    def made(function):
        return (
            f"--config.environment.rollout_func={function}", "--config.eval.every=-1",
            "--config.algorithm.importance_correction=token_truncate",
        )  # fmt: skip

    return made


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_several_processes_sample_what_one_does(root, tmp_path, together, flags):
    """And calls of one process alone change nothing for the others."""
    all_ended_well(together(1, *command(root, "grpo", tmp_path / "one", *flags("mine.py:plain"))))
    all_ended_well(together(2, *command(root, "grpo", tmp_path / "two", *flags("mine.py:uneven"))))
    same_runs(tmp_path / "one", tmp_path / "two", evaluations=False)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["late", "texts"])
def test_each_process_asks_for_what_it_likes(root, tmp_path, together, flags, function):
    """The log-probs of what it gets are the policy's, and it gets them in the order of its prompts."""
    all_ended_well(together(2, *command(root, "grpo", tmp_path / "run", *flags(f"mine.py:{function}"))))
    for line in lines(tmp_path / "run"):
        assert line["sampling/sampling_logp_difference/max"] < 1e-3, line


@pytest.mark.slow
def test_where_a_function_fails_all_processes_end(root, tmp_path, together, flags):
    ended = together(2, *command(root, "grpo", tmp_path / "run", *flags("mine.py:failing")), timeout=120)
    assert [process.code for process in ended] == [2, 2]
    words = "environment.rollout_func raised RuntimeError: not here (mine.py:"
    assert all("process 1 (" in process.err and words in process.err for process in ended), ended


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ", weights_dtype='bfloat16', full_every=9"], ids=["all", "changes"])
def test_the_first_process_pushes_the_weights(root, tmp_path, together, flags, monkeypatch, options):
    """Once a rollout, before any process samples: all of them, or what changed."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    pushes, local = [], LocalCheckpoint()

    def change(answer):
        if not answer["choices"]:
            path = server.bodies[-1][1]["model_path"]
            pushes.append((path, (Path(local.take(path)) / "model.safetensors").stat().st_mtime_ns))
            return {"success": True, "weight_version": len(pushes)}
        return {**answer, "weight_version": len(pushes), "newest_weight_version": len(pushes)}

    with Server(change) as server:
        function = f"server(url={server.url!r}, model='m', weights={str(tmp_path / 'policy')!r}{options})"
        all_ended_well(together(2, *command(root, "grpo", tmp_path / "run", *flags(function))))
    assert len(pushes) == len(set(pushes)) == len(lines(tmp_path / "run"))
    assert ["weights/changed_share" in line for line in lines(tmp_path / "run")] == [False, bool(options)]
