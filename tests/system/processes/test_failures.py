"""When one process fails, all end, soon, with its message; nobody waits for a process that is gone."""

import os
import re
import signal
import time

import pytest

from tests.system.faults.equality import assert_same_run, metrics
from tests.system.processes.conftest import finish, free_port, start, wait_for_lines
from tests.system.processes.test_runs import command

# A command of this package: it joins, and then process 1 (or whichever argv names) does what argv says.
SCRIPT = """
import os, sys, time
from jaxrl_llm.config.flags import run

def main(argv):
    what, who = argv[0], int(argv[1])
    own = int(os.environ.get("JAXRL_PROCESS_INDEX", os.environ.get("SLURM_PROCID", 0)))
    from jaxrl_llm.distributed import processes
    from jaxrl_llm.config import ConfigError, default
    config = default()
    config.processes.rendezvous_seconds, config.processes.heartbeat_seconds = 20, 10
    if what == "differ" and own == who:
        config.batch.prompts = 8
    if what == "missing":
        config.processes.rendezvous_seconds = 3
    if what == "missing" and own == who:
        os._exit(0)
    processes.join(config)
    import jax
    from jax.experimental import multihost_utils
    from jaxrl_llm.training.runtime.preemption import Notices
    print(processes.gather({"index": jax.process_index(), "text": "x" * own}), jax.process_count(), flush=True)
    count = jax.process_count()
    assert [processes.most(number * (own + 1)) for number in range(5)] == [number * count for number in range(5)]
    processes._waits.clear()
    time.sleep(2.0 * (own == 0))
    processes.gather(None)
    assert [x["of"] for x in processes.of_each({"of": own})] == [own]
    processes.gather(None)
    time.sleep(own)
    told = processes.of_each({"of": 9})
    assert len(told) == (1 if own else count)
    if what == "agree" and not own:
        assert [x["of"] for x in told] == [0, 1] and told[0]["waited"] + 1 < told[1]["waited"], told
    if what == "agree":
        compiled = []
        jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
        assert all(processes.gather("x" * (length + own))[own] == "x" * (length + own) for length in range(0, 9000, 99))
        print(sum("backend_compile" in name for name in compiled), "programs", flush=True)
        processes.AT_ONCE = 3000  # what is longer comes in pieces
        assert processes.gather("x" * 2999 + str(own) * 4000) == ["x" * 2999 + str(of) * 4000 for of in range(count)]
    if what == "agree":
        # A signal to one process is an answer to all: where steps overlap a step later, as none waits for its update.
        gather, gathered = multihost_utils.process_allgather, []
        multihost_utils.process_allgather = gathered.append
        for overlaps, answers in ((False, [False, True, True]), (True, [False, False, True])):
            with Notices() as notices:
                for step, answer in enumerate(answers, 1):
                    notices.signal = 15 if step > 1 and own else None
                    assert notices.reached(step, overlaps) == answer, (overlaps, step)
        multihost_utils.process_allgather = gather
        assert not gathered
    with processes.reporting():
        with processes.all_or_none():
            if own == who and what == "agree":
                raise ConfigError("a row has no answer; give it one")
        if own == who and what == "config":
            raise ConfigError("a row has no answer; give it one")
        if what == "alike":
            if own == who:  # it leaves before its listener looks again
                processes._groups[0].finished.set()
                processes._groups[0].listener.join()
            processes.gather(None)
            raise ConfigError("a row has no answer; give it one")
        if own == who and what == "bug":
            raise KeyError("answer")
        if own == who and what == "kill":
            os.kill(os.getpid(), 9)
        processes.gather(None)
        processes.gather(own)

run(main)
"""


def script(what: str, who: int) -> list[str]:
    return ["-c", SCRIPT, what, str(who)]


# In each process other rows, another model and another folder, though all are of one name.
FILES = """
import os, sys
from pathlib import Path
from jaxrl_llm.config import default
from jaxrl_llm.config.flags import run
from jaxrl_llm.training.checkpoint import outputs
from jaxrl_llm.data.opening import DataSource
from jaxrl_llm.training.setup.agreed import check_same_model, check_same_rows, check_same_streams

def main(argv):
    from jaxrl_llm.distributed import processes
    processes.join(default())
    import jax
    own = jax.process_index()
    outputs.SHOWN_SECONDS = 0.1
    rows = [{"prompt_ids": [number, 2]} for number in range(5000)]
    for name, text in (("same", b"{}"), ("other", b"{}" + bytes([own]))):
        Path(f"{own}/{name}").mkdir(parents=True)
        Path(f"{own}/{name}/config.json").write_bytes(b"{}")
        Path(f"{own}/{name}/model.safetensors").write_bytes(text)
    os.chdir(str(own))
    checks = (
        lambda: check_same_rows("rows", "prompts", rows),
        lambda: check_same_model("same", None, False),
        lambda: outputs.check_shared(Path(argv[0])),
        lambda: check_same_rows("rows", "prompts", rows[own:]),
        lambda: check_same_rows("rows", "prompts", rows[:-2] + [{"prompt_ids": [1, 2 + own]}] * 2),
        lambda: check_same_model("other", None, False),
        lambda: outputs.check_shared(Path("checkpoints").absolute()),
        lambda: check_same_streams([DataSource("a", [{"own": own}], dict, None, None, None)]),
    )
    for number, check in enumerate(checks):
        try:
            check()
        except processes.AgreedError as error:
            print(number, error)

run(main)
"""


@pytest.mark.slow
def test_files_of_each_machine_that_differ(together, tmp_path):
    """Processes that read or write other files of one name are told which, before they compute anything of them."""
    ended = together(2, "-c", FILES, str(tmp_path / "shared"))
    assert [process.code for process in ended] == [0, 0], ended[0].err + ended[1].err
    assert [line.partition(" ")[0] for line in ended[0].out.splitlines()] == list("34567"), ended[0].out
    words = (
        "the number of rows is 4999 there, 5000 here; the checksum of rows is",
        "): the checksum of rows is",
        "model.safetensors of other is '3 bytes,",
        "checkpoints is not there for process 1 (",
        "the checksum of the first 16 rows of a is",
    )
    assert all(x in line for x, line in zip(words, ended[0].out.splitlines(), strict=True)), ended[0].out
    assert not list((tmp_path / "shared").iterdir())


def errors(ended) -> list[list[str]]:
    """The error lines of each process."""
    return [[line for line in process.err.splitlines() if line.startswith("error: ")] for process in ended]


def test_processes_join_and_agree_on_a_failure(together):
    ended = together(2, *script("agree", 1))
    assert [process.code for process in ended] == [2, 2], ended[0].err + ended[1].err
    expected = "[{'index': 0, 'text': ''}, {'index': 1, 'text': 'x'}] 2"
    for first, last in (process.out.splitlines() for process in ended):
        assert first == expected
        assert int(last.removesuffix(" programs")) < 10, "what is gathered is compiled for each length"
    for (line,) in errors(ended):
        assert line.startswith("error: process 1 (") and line.endswith("): a row has no answer; give it one")
    assert "Traceback" not in ended[0].err + ended[1].err


@pytest.mark.slow
def test_processes_that_fail_alike_are_not_taken_for_lost(together):
    """Where each finds the same fault by itself, the one that is slower does not wait for an answer of the other."""
    ended = together(2, *script("alike", 1))
    assert [process.code for process in ended] == [2, 2], ended[0].err + ended[1].err
    assert all(len(lines) == 1 and "a row has no answer" in lines[0] for lines in errors(ended)), errors(ended)


@pytest.mark.slow
def test_an_error_elsewhere_ends_the_others(together):
    began = time.monotonic()
    ended = together(2, *script("bug", 0))
    assert time.monotonic() - began < 60
    assert [process.code for process in ended] == [1, 1]
    for lines in errors(ended):
        assert len(lines) == 1 and lines[0].startswith("error: process 0 (") and "KeyError: 'answer'" in lines[0]
    assert "Traceback" in ended[0].err and "Traceback" not in ended[1].err


@pytest.mark.slow
def test_nothing_fails(together):
    ended = together(3, *script("nothing", 0))
    assert [process.code for process in ended] == [0, 0, 0], ended[0].err
    assert errors(ended) == [[], [], []]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 2])
def test_a_configuration_error_of_one_process(together, who):
    ended = together(3, *script("config", who))
    assert [process.code for process in ended] == [2, 2, 2]
    assert all(len(lines) == 1 and f"process {who} (" in lines[0] for lines in errors(ended))


@pytest.mark.slow
def test_configurations_that_differ(together):
    ended = together(2, *script("differ", 1))
    assert [process.code for process in ended] == [2, 2]
    for (line,) in errors(ended):
        assert "process 1 (" in line and "batch.prompts is 8 there, 32 here" in line


@pytest.mark.slow
def test_a_process_that_never_comes(together):
    ended = together(3, *script("missing", 1))
    assert [process.code for process in ended] == [1, 0, 1]  # a job manager starts them again
    lines = errors(ended)
    assert lines[0] == lines[2] and "2 of 3 processes have met" in lines[0][0] and "missing: 1;" in lines[0][0]


@pytest.mark.slow
def test_a_process_that_is_killed(together):
    began = time.monotonic()
    ended = together(3, *script("kill", 1))
    assert time.monotonic() - began < 60
    assert [process.code for process in ended] == [1, -9, 1], ended[0].err  # it may be started again
    assert "process 1 (" in errors(ended)[0][0] and "it was killed, or its machine is lost" in errors(ended)[0][0]


@pytest.mark.slow
def test_the_coordinator_is_killed(together):
    ended = together(2, *script("kill", 0))
    assert ended[0].code == -9 and ended[1].code != 0
    assert "coordination service" in ended[1].err  # JAX's own words


@pytest.mark.slow
def test_slurm_is_joined_as_jax_reads_it(together):
    job = os.getpid() % 4096
    variables = {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    environment = [variables | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    ended = together(2, *script("nothing", 0), environment=environment)
    assert [process.code for process in ended] == [0, 0], ended[0].err + ended[1].err
    assert all(process.out.endswith(" 2\n") for process in ended)


@pytest.mark.slow
def test_slurm_without_the_other_task(together):
    variables = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    (ended,) = together(1, *script("missing", 5), environment=[variables | {"SLURM_PROCID": "0"}])
    assert ended.code == 1
    assert "did not all meet within 3 s (processes.rendezvous_seconds), as Slurm describes it" in ended.err


REWARD = """
import jax

def score(completions, **kwargs):
    if jax.process_index() == 1:
        raise ValueError("no key for the judge")
    return [0.0] * len(completions)
"""


@pytest.mark.slow
def test_a_reward_fails_in_one_process(root, tmp_path, together):
    (tmp_path / "mine.py").write_text(REWARD)
    flags = ("--config.eval.every=-1", f"--config.rewards.functions={tmp_path / 'mine.py'}:score")
    ended = together(2, *command(root, "grpo", tmp_path / "run", *flags))
    assert [process.code for process in ended] == [2, 2], ended[0].err
    for (line,) in errors(ended):
        assert line.startswith("error: process 1 (") and "no key for the judge" in line


@pytest.mark.slow
def test_data_that_one_process_cannot_read(root, tmp_path):
    rows = '{"prompt": "sort:21=", "answer": "12"}\n' * 8
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
        (folder / "rows.jsonl").write_text(rows if folder.name == "0" else "no JSON")
    flags = ("--config.eval.every=-1", "--config.data.path=rows.jsonl")
    arguments = command(root, "grpo", tmp_path / "run", *flags)
    port, processes = free_port(), []
    for index, folder in enumerate(folders):
        place = {
            "JAXRL_COORDINATOR": f"localhost:{port}",
            "JAXRL_PROCESS_COUNT": "2",
            "JAXRL_PROCESS_INDEX": str(index),
        }
        processes += start(1, folder, arguments, [place])
    ended = finish(processes, 200)
    assert [process.code for process in ended] == [2, 2], ended[0].err
    assert all("error: process 1 (" in process.err and "rows.jsonl" in process.err for process in ended)


@pytest.mark.slow
def test_a_training_process_that_is_killed(root, tmp_path):
    """In the middle of a run, from outside, as the kernel does to one that takes too much memory."""
    arguments = command(root, "grpo", tmp_path / "run", "--config.eval.every=-1", "--config.total_steps=100000")
    processes = start(2, tmp_path, arguments)
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 2, processes)
    processes[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    ended = finish(processes, 120)
    assert time.monotonic() - began < 60
    assert ended[0].code != 0 and ended[1].code == -9
    assert "process 1 (" in ended[0].err and "it was killed" in ended[0].err


# The command of `train`, in process 1 without room for its share of a checkpoint.
NO_ROOM = """
import os, resource, signal
from jaxrl_llm.config.flags import run
from jaxrl_llm.train import main

if os.environ["JAXRL_PROCESS_INDEX"] == "1":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
run(main)
"""


@pytest.mark.slow
def test_one_process_cannot_write_its_share_of_a_checkpoint(root, tmp_path, together):
    """All end at the next save, where process 0 would wait for that share for twenty minutes."""
    flags = ("--config.eval.every=-1", "--config.mesh.data=1", "--config.mesh.fsdp=2")
    ended = together(2, "-c", NO_ROOM, *command(root, "grpo", tmp_path / "run", *flags)[2:], timeout=250)
    assert [process.code for process in ended] == [1, 1], ended[0].err
    for (line,) in errors(ended):
        assert line.startswith("error: process 1 (") and "the checkpoint of step 1 could not be written" in line


FULL = """
import errno, jax
from jaxrl_llm.models.files import safetensors

save_file = safetensors.save_file

def no_room(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")

class Full:
    def on_step_begin(self, moment):
        full = jax.process_index() == 0 and moment.step != 1
        safetensors.save_file = no_room if full else save_file
"""


@pytest.mark.slow
def test_a_model_that_the_first_process_cannot_write_is_an_error_in_all(root, tmp_path):
    """That of a step is left out, and of the last one the state is saved, where models alone are kept."""
    (tmp_path / "full.py").write_text(FULL)
    flags = ("total_steps=3", "eval.every=-1", "checkpoint.contents=hf", "callbacks=full.py:Full()")
    run = command(root, "grpo", tmp_path / "run", *(f"--config.{flag}" for flag in flags))
    first, second = finish(start(2, tmp_path, run), 180)
    assert first.code == second.code == 2, first.err + second.err
    assert "the model of step 1 could not be written" in first.err and "The run goes on without it" in first.err
    last = "the newest checkpoint is of step 3, in .*; when there is room start the same command again"
    assert re.search(f"No space left on device; {last}", first.err), first.err
    assert [path.name for path in (tmp_path / "run/hf_steps").iterdir()] == ["00002"]
    assert [ended.code for ended in finish(start(2, tmp_path, run), 180)] == [0, 0]
    assert (tmp_path / "run/hf/model.safetensors").is_file()


LEAVES = """
import os, signal, jax

def exact(completions, answer, trainer_state, **columns):
    if trainer_state.global_step == 2 and jax.process_index() == 1 and not os.path.exists("told"):
        open("told", "w").close()
        os.kill(os.getpid(), signal.SIGTERM)  # in the first batch of the evaluation after step 2
    return [float(a == b) for a, b in zip(completions, answer)]
"""


@pytest.mark.slow
def test_an_evaluation_is_broken_off_in_all_processes_and_made_by_the_next_start(root, tmp_path):
    (tmp_path / "leaves.py").write_text(LEAVES)

    def run(name):
        flags = ("total_steps=3", "eval.every=2", "checkpoint.every=0", "rewards.functions=leaves.py:exact",
                 f"output_dir={tmp_path / name}", "logging.backends=jsonl")  # fmt: skip
        config = f"--config={root}/configs/grpo.py:tiny"
        return finish(
            start(2, tmp_path, ["-m", "jaxrl_llm.train", config, *(f"--config.{flag}" for flag in flags)]), 180
        )

    first = run("run")
    assert [ended.code for ended in first] == [143, 143], first[0].err + first[1].err
    assert "after step 2 of 3" in first[0].err and "the newest checkpoint is of step 2" in first[0].err
    assert "eval/reward" not in metrics(tmp_path / "run/metrics.jsonl")[-1]
    assert [ended.code for ended in run("run")] == [ended.code for ended in run("whole")] == [0, 0]
    assert_same_run(tmp_path / "whole", tmp_path / "run")
