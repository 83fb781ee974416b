"""Meshes whose `tensor` or `context` spans processes: those that hold the same rows are as one process with them."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jaxrl_llm.data import tasks
from tests.system.processes.test_runs import all_ended_well, command, same_runs

TENSOR = ("--config.mesh.data=1", "--config.mesh.tensor=2")
CONTEXT = ("--config.mesh.data=1", "--config.mesh.context=2")
# Two groups of two processes.
GROUPS = ("--config.mesh.data=2", "--config.mesh.tensor=2")

# Each process has loaded its model; that of the leader is asked.
JUDGE = "judge(path='embedded:sort', template='{{ prompt[:-1] }}{{ completion }}=', scale=(0, 1e9), on_failure=0)"

REWARDS = """
import os, random, time

def score(completions, answer, log_metric, log_extra, log_total, **columns):
    "Differs from process to process, and tells which of them it was called in."
    log_total('mine/calls', 1)
    log_metric('mine/rows', len(completions))
    log_extra('process', [int(os.environ.get('JAXRL_PROCESS_INDEX', 0))] * len(completions))
    log_extra('chance', [random.SystemRandom().random() for _ in completions])
    return [random.SystemRandom().random() for _ in completions]

async def of_row(completions, answer, **columns):
    return [len(completions[0]) / 10 + (completions[0] == answer[0])]
of_row.by_row = True

def by_half(completions, prompts, **columns):
    "Prompts of an even number of characters are flat."
    rows = [(row % 4 if len(prompt) % 2 else 1.0, row % 2 * (len(prompt) % 2)) for row, prompt in enumerate(prompts)]
    return [{'score': score, 'odd': odd} for score, odd in rows]

def failing(completions, **columns):
    raise RuntimeError(f"not in process {os.environ['JAXRL_PROCESS_INDEX']}")

def by_chance(row, **options):
    return {**row, 'prompt': f"{random.SystemRandom().randint(10, 99)}{row['prompt']}"}
"""


@pytest.fixture
def mine(tmp_path):
    """The path of a file with the functions above."""
    (tmp_path / "mine.py").write_text(REWARDS)
    return f"{tmp_path}/mine.py"


@pytest.fixture
def run(root, tmp_path, together):
    """`run(processes, devices of each, name, configuration, *flags)` trains in a folder of that name."""

    def made(count, devices, name, configuration, *flags):
        folder = tmp_path / name
        return folder, together(count, *command(root, configuration, folder, *flags), devices=devices)

    return made


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def check(run, processes: int, devices: int, configuration: str, *flags: str):
    """A run of so many processes is the run of one with as many devices: metrics, completions, model."""
    one, ended = run(1, processes * devices, "one", configuration, *flags)
    all_ended_well(ended)
    several, ended = run(processes, devices, "several", configuration, *flags)
    all_ended_well(ended)
    same_runs(one, several)
    return one, several


@pytest.mark.slow
def test_rows_of_two_processes(run):
    """No sum has another order than in one process with the same mesh."""
    one, several = check(run, 2, 1, "grpo", *TENSOR, "--config.total_steps=1", "--config.eval.every=-1")
    for name in ("reward", "loss", "grad_norm"):
        assert [line.get(name) for line in lines(one)] == [line.get(name) for line in lines(several)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "configuration", "flags"),
    [
        (2, 1, "grpo", TENSOR),
        (2, 1, "grpo", CONTEXT),
        (2, 2, "grpo", ("--config.mesh.data=1", "--config.mesh.tensor=4")),
        (2, 2, "grpo", ("--config.mesh.data=1", "--config.mesh.tensor=2", "--config.mesh.context=2")),
        (4, 1, "ppo", GROUPS),
        (2, 1, "sft", TENSOR),
        (4, 1, "sft", (*GROUPS, "--config.batch.packing=true")),
        (2, 1, "dpo", CONTEXT),
        (4, 1, "dpo", ("--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.mesh.context=2")),
        (2, 1, "distill", TENSOR),
        (4, 1, "sdpo", GROUPS),
        (2, 1, "vision_grpo", TENSOR),
        (2, 1, "grpo_lora", TENSOR),
        (2, 1, "remax", TENSOR),
        (2, 1, "reward_model", TENSOR),
        (2, 1, "prm", CONTEXT),
        (2, 1, "gold", TENSOR),
        (2, 1, "dpo", (*TENSOR, "--config.average.every=1", "--config.algorithm.ref_sync_to=average",
                       "--config.algorithm.ref_sync_steps=1")),
        (2, 1, "grpo", (*TENSOR, f"--config.rewards.functions={JUDGE}", "--config.eval.every=-1")),
        (4, 1, "environment", GROUPS),
        (2, 1, "gigpo", (*CONTEXT, "--config.rollout.mesh=tensor=2")),
        # Rows of a process on one of the meshes, and of two on the other.
        (2, 1, "grpo", (*TENSOR, "--config.rollout.mesh=data=2")),
        (2, 1, "grpo", ("--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.rollout.mesh=tensor=2")),
    ],
)  # fmt: skip
def test_runs_whose_rows_are_shared(run, processes, devices, configuration, flags):
    check(run, processes, devices, configuration, *flags)


@pytest.mark.slow
def test_leaders_grade_alone(run, mine):
    """Rewards of chance are those of the leader in all of its group, and count once."""
    flags = (*GROUPS, f"--config.rewards.functions={mine}:score", "--config.eval.samples=2")
    folder, ended = run(4, 1, "run", "grpo", *flags)
    all_ended_well(ended)
    first, *steps = lines(folder)
    assert first["eval/mine/rows"] > 0
    for line in steps:
        assert line["mine/calls"] == 2 and line["sampling/sampling_logp_difference/max"] < 1e-3
    for table in (folder / "completions").glob("completions_*"):
        rows = pq.read_table(table).to_pylist()
        assert {row["process"] for row in rows} == {0, 2} and len({row["chance"] for row in rows}) == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (4, (*GROUPS, "--config.rewards.functions={mine}:of_row", "--config.rollout.slots=8")),
        (4, (*GROUPS, "--config.data.curriculum_hard=0.1")),
        # In one group: each fills up with its own prompts.
        (2, (*TENSOR, "--config.rewards.functions={mine}:by_half", "--config.algorithm.dynamic_sampling=true",
             "--config.algorithm.replay_groups=4")),
        (2, (*TENSOR, "--config.rewards.functions={mine}:by_half", "--config.algorithm.dynamic_sampling=true",
             "--config.algorithm.replay_groups=4", "--config.algorithm.dynamic_sampling_metric=odd")),
    ],
    ids=["rows", "curriculum", "dynamic", "metric"],
)  # fmt: skip
def test_what_is_decided_by_rewards(run, mine, processes, flags):
    one, _ = check(run, processes, 1, "grpo", "--config.eval.every=-1", *(flag.format(mine=mine) for flag in flags))
    if "--config.algorithm.dynamic_sampling=true" in flags:
        assert sum(line["rollout/resampled_groups"] for line in lines(one) if line["step"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 1), (2, 1))])
def test_a_run_goes_on(run, before, after):
    """In as many processes, or in another number of them."""
    flags = (*TENSOR, "--config.eval.every=-1")
    whole, ended = run(*before, "whole", "grpo", *flags)
    all_ended_well(ended)
    part = whole.with_name("part")
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "2")
    shutil.rmtree(part / "hf")
    all_ended_well(run(*after, "part", "grpo", *flags)[1])
    same_runs(whole, part)
    assert [line["loss"] for line in lines(whole)[1:]] == [line["loss"] for line in lines(part)[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("first", [2, 1])
def test_a_run_goes_on_without_its_row_group(run, first):
    """Two processes that hold the same rows, and one on one device, or the other way; the average goes along."""
    meshes, flags = {2: TENSOR, 1: ()}, ("--config.eval.every=-1", "--config.average.every=1")
    whole, ended = run(first, 1, "whole", "grpo", *meshes[first], *flags)
    all_ended_well(ended)
    part = whole.with_name("part")
    shutil.copytree(whole, part)
    for folder in ("checkpoints/2", "hf", "average"):
        shutil.rmtree(part / folder)
    all_ended_well(run(3 - first, 1, "part", "grpo", *meshes[3 - first], *flags)[1])
    same_runs(whole, part)


@pytest.mark.slow
def test_generation(together):
    command_line = ["generate", "--model=embedded:sort", "--prompt=sort:4821=", "--samples=3", "--tensor=2"]
    one, two = (together(count, "-m", "jaxrl_llm", *command_line, devices=2 // count) for count in (1, 2))
    all_ended_well(one)
    all_ended_well(two)
    assert one[0].out == two[0].out and one[0].out.count("\n") == 3


@pytest.mark.slow
def test_an_error_of_a_leader_ends_all(run, mine):
    _, ended = run(2, 1, "run", "grpo", *TENSOR, f"--config.rewards.functions={mine}:failing")
    assert [process.code for process in ended] == [2, 2], ended
    assert all("process 0 (" in process.err and "not in process 0" in process.err for process in ended), ended


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_other_data_of_a_process_ends_all(run, mine, streams):
    """Before the first step or, of rows that are streamed, before their batch is computed."""
    rows = Path(mine).with_name("rows.jsonl")
    rows.write_text("".join(json.dumps(row) + "\n" for row in tasks.generate("sort", size=64)))
    flags = (
        f"--config.data.path={rows}",
        f"--config.data.format={mine}:by_chance",
        f"--config.data.streaming={streams}",
    )
    _, ended = run(2, 1, "run", "grpo", *TENSOR, *flags, "--config.eval.every=-1")
    assert [process.code for process in ended] == [2, 2], ended
    words = "the checksum of rows of the data is"
    if streams:
        words = "processes 0 and 1 hold the same rows of the mesh, but have read different data"
    assert all(words in process.err for process in ended), ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "flags", "words"),
    [
        (3, ("--config.mesh.data=3", "--config.mesh.tensor=2"), "gives processes some rows in common and others"),
        (1, (*TENSOR, "--config.environment.rollout_func=mine.py:score",
             "--config.algorithm.importance_correction=token_truncate"), "rollout_func is set, but mesh.context x"),
        (1, (*CONTEXT, "--config.environment.name=sort_then_smallest"), "in 1 group while they train, and in 2 while"),
    ],
)  # fmt: skip
def test_what_is_refused(run, mine, devices, flags, words):
    _, ended = run(2, devices, "run", "grpo", *flags)
    assert [process.code for process in ended] == [2, 2], ended
    assert all(words in process.err for process in ended), ended
