"""A run of several processes is the run of one: the same numbers, the same files."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.data import tasks
from jaxrl_llm.models.model import load_model, save_hf

# What depends on the devices: times, and how well their slots are filled.
TIMES = (
    "tokens_per_second", "mfu", "step_time", "rollout/useful_token_fraction", "environment/seconds", "rollout/queue",
)  # fmt: skip
OF_MACHINES = ("time", "machine/", "producer/")


def command(root: Path, name: str, folder: Path, *flags: str) -> list[str]:
    """The command line that trains `configs/<name>.py:tiny` in `folder`."""
    return [
        "-m", "jaxrl_llm.train", f"--config={root}/configs/{name}.py:tiny", f"--config.output_dir={folder}",
        "--config.logging.backends=jsonl", "--config.checkpoint.every=1", *flags,
    ]  # fmt: skip


def same_numbers(one: dict, other: dict, where: str):
    """Both hold the same keys, and numbers that agree as far as sums in another order do."""
    one, other = (
        {k: v for k, v in x.items() if not k.endswith(TIMES) and not k.startswith(OF_MACHINES)} for x in (one, other)
    )
    assert one.keys() == other.keys(), where
    for name, value in one.items():
        if name.endswith("rewards/accuracies") and abs(one[name.replace("accuracies", "margins")]) < 3e-5:
            # The policy is still its reference: rounding alone says which reward of a pair is the larger.
            assert 0 <= other[name] <= 1 and abs(other[name.replace("accuracies", "margins")]) < 3e-5, where
            continue
        if isinstance(value, float) and math.isfinite(value):
            np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=3e-5, err_msg=f"{where} {name}")
        else:
            assert other[name] == value or value != value, f"{where} {name}"


def same_runs(one: Path, other: Path, evaluations: bool = True, weights_differ: float = 3e-5):
    """Both folders hold the same metrics, completions, configuration, model, critic and average."""
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (one, other)]
    if not evaluations:
        lines = [[{k: v for k, v in x.items() if "eval" not in k} for x in run if x["step"]] for run in lines]
    for first, second in zip(*lines, strict=True):
        same_numbers(first, second, f"step {first['step']}")
    kinds = "*" if evaluations else "completions_*"
    for folder, pattern in (("completions", kinds), ("hf", "*"), ("critic", "*"), ("average", "*")):
        names = [sorted(path.name for path in (run / folder).glob(pattern)) for run in (one, other)]
        assert names[0] == names[1]
    for table in (one / "completions").glob(kinds):
        rows = [pq.read_table(run / "completions" / table.name).to_pylist() for run in (one, other)]
        for number, (first, second) in enumerate(zip(*rows, strict=True)):
            same_numbers(first, second, f"{table.name} row {number}")
    configs = [json.loads((run / "config.json").read_text()) for run in (one, other)]
    assert configs[0]["batch"] == configs[1]["batch"] and configs[0]["processes"] == configs[1]["processes"]
    for file in (x for folder in ("hf", "critic", "average") for x in (one / folder).glob("*.safetensors")):
        weights, others = load_file(file), load_file(other / file.relative_to(one))
        assert weights.keys() == others.keys()
        for name, value in weights.items():
            where = f"{file.parent.name} {name}"
            np.testing.assert_allclose(others[name], value, atol=weights_differ, err_msg=where)
    steps = [sorted(path.name for path in (run / "checkpoints").glob("[0-9]*")) for run in (one, other)]
    assert steps[0] == steps[1]


def all_ended_well(ended):
    assert all(process.code == 0 for process in ended), "\n".join(process.err[-3000:] for process in ended)
    assert all(process.out == "" for process in ended[1:])


@pytest.mark.slow
def test_grpo_in_two_processes(root, tiny_run, tmp_path, together):
    flags = ("--config.eval.every=-1",)
    (tmp_path / "run-1").mkdir()
    all_ended_well(together(2, *command(root, "grpo", tmp_path / "run-{new}", *flags)))
    same_runs(tiny_run.output_dir, tmp_path / "run-2", evaluations=False)  # the number is of both
    assert not (tmp_path / "run-3").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo", "sft", "dpo", "clip_cov"])
def test_runs_of_four_processes(root, tiny_run, tmp_path, together, name):
    """clip_cov stands for what picks tokens out of all processes' rows. kl_cov does too, but its penalty, |log ratio|,
    has no derivative where the policy is still the one that sampled: there rounding chooses the sign."""
    one = tiny_run.output_dir
    if name != "grpo":
        one = tmp_path / "one"
        all_ended_well(together(1, *command(root, name, one)))
    all_ended_well(together(4, *command(root, name, tmp_path / "four")))
    same_runs(one, tmp_path / "four")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["grpo_lora", "vision_grpo", "environment", "remax", "reward_model", "prm", "kto", "agent", "self_play"]
)
def test_runs_of_two_processes(root, tmp_path, together, name):
    """What adapters, images, episodes, greedy completions and agents of each process's own rows come to."""
    flags = ("--config.average.every=1", "--config.eval.every=-1")
    all_ended_well(together(1, *command(root, name, tmp_path / "one", *flags)))
    all_ended_well(together(2, *command(root, name, tmp_path / "two", *flags)))
    # Calls of agents are computed with whoever asks at the time, by programs that round differently.
    rounding = 3e-4 if name in ("agent", "self_play") else 3e-5
    same_runs(tmp_path / "one", tmp_path / "two", evaluations=False, weights_differ=rounding)


@pytest.mark.slow
def test_each_process_judges_its_own_rows(root, tmp_path, together):
    """With a judge whose model each loads, on one device and on two."""
    options = "path='embedded:sort', template='{{ prompt[:-1] }}{{ completion }}=', scale=(0, 1e9), on_failure=0"
    flags = ["--config.eval.every=-1", f"--config.rewards.functions=judge({options})"]
    all_ended_well(together(1, *command(root, "grpo", tmp_path / "one", *flags)))
    all_ended_well(together(2, *command(root, "grpo", tmp_path / "two", *flags)))
    same_runs(tmp_path / "one", tmp_path / "two", evaluations=False)
    assert json.loads((tmp_path / "one" / "metrics.jsonl").open().readline())["judge/requests"] > 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "sdpo", "gold"])
def test_teachers_over_processes(root, tmp_path, together, name):
    """Two teachers by row; or the policy as its own, with a context that each process makes for its rows; or one that
    reads the text of the rows, by tokens of its own."""
    flags = ["--config.eval.every=-1"]
    if name == "distill":
        model, other, rows = load_model("embedded:sort"), tmp_path / "other", tmp_path / "rows.jsonl"
        save_hf(dataclasses.replace(model, params=jax.tree.map(lambda x: 1.1 * x, model.params)), other)
        named = [{**row, "teacher": "ab"[number % 2]} for number, row in enumerate(tasks.generate("sort", size=64))]
        rows.write_text("".join(json.dumps(row) + "\n" for row in named))
        flags += [f"--config.data.path={rows}", f"--config.teacher.others=b={other}"]
        flags += ["--config.teacher.form=advantage"]
    all_ended_well(together(1, *command(root, name, tmp_path / "one", *flags)))
    all_ended_well(together(2, *command(root, name, tmp_path / "two", *flags)))
    same_runs(tmp_path / "one", tmp_path / "two", evaluations=False)
    first = json.loads((tmp_path / "one" / "metrics.jsonl").open().readline())
    if name == "gold":
        assert first["teacher/aligned"] > 0.9
    else:
        assert first["teacher/kl"] != 0 if name == "distill" else 0 < first["teacher/taught"] < 1


@pytest.mark.slow
def test_parameters_sharded_over_processes(root, tiny_run, tmp_path, together):
    cut = ("--config.mesh.fsdp=2", "--config.mesh.data=1")
    profiled = ("--config.logging.profile_steps=2", "--config.logging.profile_process=1")
    all_ended_well(together(2, *command(root, "grpo", tmp_path / "two", *cut, *profiled)))
    same_runs(tiny_run.output_dir, tmp_path / "two")
    assert "rollout" in (tmp_path / "two" / "profile" / "phases.txt").read_text()
    last = json.loads((tmp_path / "two" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["machine/slowest_process"] in (0, 1) and last["machine/waited_seconds"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on(root, tmp_path, together, before, after):
    """A run that lost its last step is the run that did not, in whatever number of processes it goes on."""
    flags = ("--config.eval.every=-1",)
    whole, part = tmp_path / "whole", tmp_path / "part"
    all_ended_well(together(before, *command(root, "grpo", whole, *flags)))
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "2")
    shutil.rmtree(part / "hf")
    all_ended_well(together(after, *command(root, "grpo", part, *flags)))
    same_runs(whole, part)


def responses(folder: Path) -> tuple[str, ...]:
    """The arguments that grade a file of three rows."""
    given = (("1", ["1", "2"], "a"), ("2", ["1"], "b"), ("3", ["3", "3", "1"], "b"))
    names = ("answer", "responses", "data_source")
    rows = [{"prompt": "?", **dict(zip(names, row, strict=True))} for row in given]
    (folder / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--responses={folder / 'responses.jsonl'}", "--config.eval.answer=number"


@pytest.mark.slow
def test_the_other_commands(root, tiny_run, tmp_path, together):
    """Evaluation, generation and export of two processes print and write what those of one do, once."""
    config = f"--config={root}/configs/grpo.py:tiny"
    model = f"--config.model.path={tiny_run.output_dir}/hf"
    numbers = []
    for count in (1, 2):
        output = tmp_path / f"{count}.json"
        ended = together(count, "-m", "jaxrl_llm", "evaluate", config, model, f"--output={output}")
        all_ended_well(ended)
        assert "greedy_accuracy" in ended[0].out
        numbers.append(json.loads(output.read_text())["metrics"])
    same_numbers(*numbers, "evaluate")
    numbers = []
    sets = "--config.eval.sets=x=task:sort(prompts=5),y=task:sort(prompts=3,samples=2)"
    flags = (sets, "--config.eval.answer=text", "--config.eval.interval=0.9", "--config.eval.extremes")
    for count in (1, 2):
        output = tmp_path / f"compared_{count}.json"
        one, other = f"--a={tiny_run.output_dir}/hf", "--b=embedded:sort"
        all_ended_well(together(count, "-m", "jaxrl_llm", "compare", config, one, other, sets, f"--output={output}"))
        numbers.append(json.loads(output.read_text()))
        all_ended_well(together(count, "-m", "jaxrl_llm", "evaluate", config, model, *flags, f"--output={output}"))
        numbers[-1] |= json.loads(output.read_text())["metrics"]
        all_ended_well(together(count, "-m", "jaxrl_llm", "evaluate", *responses(tmp_path), f"--output={output}"))
        numbers[-1] |= {f"responses/{name}": x for name, x in json.loads(output.read_text())["metrics"].items()}
    assert {"y/win_rate_low", "x/maj@4", "y/best@2", "responses/b/accuracy"} <= numbers[0].keys()
    assert numbers[0].keys() == numbers[1].keys()
    same_numbers(*({name: x for name, x in found.items() if name not in ("a", "b")} for found in numbers), "sets")
    generate = (
        "-m",
        "jaxrl_llm",
        "generate",
        f"--model={tiny_run.output_dir}/hf",
        "--prompt=sort:4821=",
        "--samples=3",
    )
    texts = [together(count, *generate) for count in (1, 2)]
    all_ended_well(texts[1])
    assert texts[0][0].out == texts[1][0].out and texts[0][0].out.count("\n") == 3
    export = ("-m", "jaxrl_llm", "export", f"--run={tiny_run.output_dir}", f"--output={tmp_path / 'exported'}")
    all_ended_well(together(2, *export))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, value in load_file(tiny_run.output_dir / "hf" / "model.safetensors").items():
        np.testing.assert_array_equal(exported[name], value)


STAGES = """
from jaxrl_llm.config import default

def get_stages(folder):
    config = default()
    config.algorithm.name, config.data.path, config.eval.every = "sft", {rows!r}, -1
    config.total_steps, config.batch.prompts, config.logging.backends = 1, 2, ("jsonl",)
    config.checkpoint.folder = {checkpoints!r}
    return {{"sft": config}}
"""
# On a machine with a disk of its own.
APART = """
import os
from jaxrl_llm.commands.stages import main
from jaxrl_llm.config.flags import run
os.makedirs(os.environ["JAXRL_PROCESS_INDEX"], exist_ok=True)
os.chdir(os.environ["JAXRL_PROCESS_INDEX"])
run(main)
"""


@pytest.mark.slow
def test_stages_whose_models_are_on_one_machine(tmp_path, together):
    """All skip a stage that is finished, though the first process alone has its model and its record."""
    rows, file = tmp_path / "rows.jsonl", tmp_path / "stages.py"
    rows.write_text(4 * (json.dumps({"prompt": "sort:21=", "completion": "12"}) + "\n"))
    file.write_text(STAGES.format(rows=str(rows), checkpoints=str(tmp_path / "checkpoints")))
    for lines in (1, 1):
        all_ended_well(together(2, "-c", APART, f"--stages={file}", "--output_dir=runs", timeout=120))
        assert len((tmp_path / "0/runs/sft/metrics.jsonl").read_text().splitlines()) == lines
        assert not (tmp_path / "1/runs/sft/hf").exists()


@pytest.mark.slow
def test_what_reward_functions_log_in_evaluations(root, tmp_path, together):
    """Of each prompt once: with 3 prompts, 2 at a time, the second process has nothing in the last batch to grade."""
    (tmp_path / "mine.py").write_text(
        "def score(answer, log_metric, log_total, **columns):\n"
        "    sizes = [len(text) for text in answer]\n"
        "    log_metric('mine/size', sum(sizes) / len(sizes))\n"
        "    log_total('mine/paid', len(sizes))\n"
        "    return [{'score': size, 'pred': size, 'even': size % 2 == 0} for size in sizes]\n"
    )
    flags = ("batch.prompts=2", "rollout.group_size=2", "eval.samples=2", "eval.prompts=3")
    flags += (f"rewards.functions={tmp_path}/mine.py:score",)
    numbers = []
    for count in (1, 2):
        output, config = tmp_path / f"{count}.json", f"--config={root}/configs/grpo.py:tiny"
        given = (f"--config.{flag}" for flag in flags)
        all_ended_well(together(count, "-m", "jaxrl_llm", "evaluate", config, *given, f"--output={output}"))
        numbers.append(json.loads(output.read_text())["metrics"])
    same_numbers(*numbers, "evaluate")
    found = numbers[1]
    assert found["mine/size"] == found["rewards/score/mean"] == found["reward"] and found["mine/paid"] == 3 * 2 + 3
    assert 0 < found["rewards/score/even"] < 1 and "maj@2" in found


WARNS = """
import logging, warnings
from jaxrl_llm.config import default
from jaxrl_llm.distributed import processes
processes.join()
from jaxrl_llm.training.logging.logger import Logger, LoggingSpec
from jaxrl_llm.training.logging.step_log import StepLog
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.setup.records import health_spec

with Logger(LoggingSpec(("jsonl",)), "run") as logger:
    log = StepLog(health_spec(default()), lambda metrics: None, Stopwatch(), logger, {})
    log.warn(["a warning of the run"])
logging.getLogger("jaxrl_llm.data.opening").warning("a warning of the data")
warnings.warn_explicit("a warning of the model", UserWarning, "hf.py", 1, "jaxrl_llm.models.files.hf")
warnings.warn_explicit("a warning of own rows", UserWarning, "call.py", 1, "jaxrl_llm.rewards.call")
processes.end(0)
"""


@pytest.mark.slow
def test_what_is_the_same_in_all_processes_is_warned_of_once(together):
    ended = together(2, "-c", WARNS)
    all_ended_well(ended)
    for index, whats in enumerate([("the run", "the data", "the model", "own rows"), ("own rows",)]):
        found = [
            what
            for what in ("the run", "the data", "the model", "own rows")
            if f"a warning of {what}" in ended[index].err
        ]
        assert found == [*whats]
