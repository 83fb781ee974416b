"""A run that is killed with SIGKILL and started again equals the uninterrupted one, bit for bit."""

import random
from pathlib import Path

import pytest

from tests.system.faults.campaign import EXPORTS, PHASES, campaign, fate
from tests.system.faults.equality import assert_same_run

VICTIM = str(Path(__file__).parent / "victim.py")


def test_one_kill(tiny_run, run_python, root, tmp_path):
    flags = (f"--config={root}/configs/grpo.py:tiny", "--config.output_dir=run", "--config.checkpoint.every=1")
    killed = run_python(VICTIM, "reward", "2", "0", *flags)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "run/hf").exists()
    done = run_python("-m", "jaxrl_llm.train", *flags)
    assert done.returncode == 0, done.stderr
    for shown in ("settings", "held-out", "time", "files", "run/hf"):
        assert shown in done.stdout
    assert_same_run(tiny_run.output_dir, tmp_path / "run")


@pytest.mark.slow
def test_the_campaign(tmp_path):
    assert campaign(tmp_path, kills=22, seed=1) >= 20


def test_the_campaign_reaches_every_phase():
    phases = [fate(random.Random(0), kill, 24)[0] for kill in range(24)]
    assert set(phases) == {*PHASES, "export"} and phases[-EXPORTS:] == ["export"] * EXPORTS
    assert min(phases.count(phase) for phase in PHASES) >= 3
