"""The kill campaign: one run is killed again and again, in every phase, and must equal the one that never was.

    python tests/system/faults/campaign.py --folder=/tmp/campaign --kills=21 --seed=0

Each life of the run ends with SIGKILL at a random moment of a phase: while it starts, samples, scores, updates,
evaluates, saves or exports. The same command is started again until the run ends by itself. Then everything but the
clocks must be equal: metrics.jsonl, the tables of completions, the last checkpoint (parameters, optimizer, replay,
controllers, data position) and the exported model, bit for bit.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.system.faults.equality import assert_same_run

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
REWARDS = """
def right_start(completions, answer, **kwargs):
    return [float(c[:2] == w[:2]) for c, w in zip(completions, answer)]
"""
STEPS = 60
# What a run may carry from step to step is all in use: adaptive coefficients, a moving reference, replay, minibatches.
ARGUMENTS = (
    f"total_steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=2", "eval.every=5", "eval.prompts=4",
    "eval.samples=2", "batch.minibatches=2", "batch.shuffle=true", "optimizer.learning_rate=1e-3",
    "rewards.functions=rewards.py:right_start", "algorithm.beta=0.05", "algorithm.kl_controller=adaptive",
    "algorithm.kl_horizon=20", "algorithm.ref_sync_steps=3", "algorithm.entropy_controller=adaptive",
    "algorithm.entropy_target=5", "algorithm.dynamic_sampling=true", "algorithm.max_sampling_rounds=2",
    "algorithm.replay_groups=3", "logging.completions_every=0",
)  # fmt: skip
# The phase, and the seconds into it within which the kill comes: a little more than it takes.
PHASES = {
    "start": 9.0, "rollout": 0.1, "reward": 0.01, "logps": 0.05, "update": 0.1, "evaluation": 0.2, "checkpoint": 0.15,
}  # fmt: skip
EXPORTS = 3


def command(name: str, *before: str) -> list[str]:
    """The command line of the run `name`, after the words of `before`."""
    flags = [f"--config.{argument}" for argument in (*ARGUMENTS, f"output_dir={name}")]
    return [sys.executable, *(before or ("-m", "jaxrl_llm.train")), f"--config={ROOT / 'configs/grpo.py'}:tiny", *flags]


def fate(chance: random.Random, kill: int, kills: int) -> tuple[str, int, float]:
    """The phase, its how-manieth entry, and the seconds into it, of a kill; the last ones are of the export."""
    if kill >= kills - EXPORTS:
        return "export", 1, chance.uniform(0, 0.15)
    phase = list(PHASES)[kill % len(PHASES)]
    entry = 1 if phase in ("start", "evaluation") else chance.randint(1, 5)
    return phase, entry, chance.uniform(0, PHASES[phase])


def campaign(folder: Path, kills: int, seed: int) -> int:
    """The number of lives that ended in a kill, after the run has proved equal to the uninterrupted one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    chance, killed = random.Random(seed), 0
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def live(words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=folder, env=environment, text=True, capture_output=True, check=False)

    whole = live(command("whole"))
    assert whole.returncode == 0, whole.stderr
    for kill in range(kills):
        phase, entry, seconds = fate(chance, kill, kills)
        began = time.monotonic()
        ended = live(command("killed", str(HERE / "victim.py"), phase, str(entry), f"{seconds:.4f}"))
        assert ended.returncode in (0, -9), ended.stderr  # 0: it was through before the kill came
        killed += ended.returncode == -9
        metrics = folder / "killed/metrics.jsonl"
        steps = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        print(
            f"kill {kill + 1}: {phase} {entry} + {seconds:.3f} s, ended with {ended.returncode} after {steps} lines "
            f"and {time.monotonic() - began:.1f} s", flush=True,
        )  # fmt: skip
    last = live(command("killed"))
    assert last.returncode == 0, last.stderr
    assert_same_run(folder / "whole", folder / "killed")
    return killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    killed = campaign(flags.folder, flags.kills, flags.seed)
    print(f"{killed} kills; the run equals the uninterrupted one")


if __name__ == "__main__":
    main()
