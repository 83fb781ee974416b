"""Faults of a run in two processes: one is preempted, one is killed, a checkpoint is damaged."""

import signal

import pytest

from tests.system.faults.equality import assert_same_run
from tests.system.processes.conftest import finish, start, wait_for_lines


def command(root, name, steps=12):
    flags = (f"total_steps={steps}", "eval.every=-1", "checkpoint.every=4", f"output_dir={name}")
    words = [f"--config.{flag}" for flag in flags]
    return ("-m", "jaxrl_llm.train", f"--config={root / 'configs/grpo.py'}:tiny", *words)


@pytest.mark.slow
def test_two_processes_survive_three_faults(root, tmp_path):
    whole = finish(start(2, tmp_path, command(root, "whole")), 200)
    assert [process.code for process in whole] == [0, 0], whole[0].err
    run = tmp_path / "run"

    processes = start(2, tmp_path, command(root, "run"))
    wait_for_lines(run / "metrics.jsonl", 2, processes)
    processes[1].send_signal(signal.SIGTERM)  # one of them; both leave after the same step
    ended = finish(processes, 120)
    assert [process.code for process in ended] == [143, 143], ended[0].err
    left = max(int(path.name) for path in (run / "checkpoints").iterdir())
    assert 2 <= left < 12

    processes = start(2, tmp_path, command(root, "run"))
    wait_for_lines(run / "metrics.jsonl", left + 2, processes)
    processes[1].send_signal(signal.SIGKILL)
    ended = finish(processes, 120)
    assert ended[1].code == -9 and ended[0].code != 0

    newest = max((path for path in (run / "checkpoints").iterdir() if path.name.isdigit()), key=lambda p: int(p.name))
    if len(list((run / "checkpoints").glob("[0-9]*"))) > 1:
        path = max(newest.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
        path.write_bytes(path.read_bytes()[:-1])
    ended = finish(start(2, tmp_path, command(root, "run")), 200)
    assert [process.code for process in ended] == [0, 0], ended[0].err
    assert_same_run(tmp_path / "whole", run)

    alone = finish(start(1, tmp_path, command(root, "run", 14), [{"JAXRL_PROCESS_COUNT": "1"}]), 200)
    assert alone[0].code == 0 and "going on after step 12" in alone[0].out, alone[0].err  # another number of processes
