"""Steps a second with rewards that take time, in turns and with rollouts that are made ahead (`rollout.staleness`).

    python -m benchmarks.asynchronous

Prints a table: the embedded model and task of configs/grpo.py with rewards that sleep, for as
long as the rest of a step takes (1), for twice as long (2), or for none and twice in turn (0 and 2). Seconds are means
of the steps after those that compile.
"""

import itertools
import tempfile
import time

import jaxrl_llm
from benchmarks.page import table
from jaxrl_llm.data import tasks

AHEAD, SKIPPED, STEPS = (0, 1, 2), 4, 16
PAUSES = {"1": (1.0,), "2": (2.0,), "0 and 2": (0.0, 2.0)}  # in steps without a pause


def seconds(staleness: int, pauses: tuple[float, ...]) -> float:
    """Mean seconds of a step whose rewards sleep for `pauses` seconds in turn."""
    config = jaxrl_llm.default_config()
    config.total_steps, config.batch.prompts, config.algorithm.num_iterations = SKIPPED + STEPS, 32, 2
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 16, 10
    config.rollout.staleness, config.algorithm.importance_correction = staleness, "token_truncate"
    config.checkpoint.every, config.eval.every, config.logging.backends = 0, -1, ()
    lengths = itertools.cycle(pauses)

    def slow(completions, **kwargs):
        time.sleep(next(lengths))
        return [float(len(set(completion))) for completion in completions]

    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = f"{folder}/run"
        steps = jaxrl_llm.train(config, tasks.generate("sort", size=256), rewards=slow).metrics[SKIPPED:]
    return sum(step["step_time"] for step in steps) / len(steps)


def main() -> None:
    """Prints the table."""
    alone = seconds(0, (0.0,))
    lines = [["a reward takes, in steps without it", *(f"seconds with staleness {n}" for n in AHEAD), "gain of 1"]]
    for name, factors in PAUSES.items():
        measured = [seconds(n, tuple(factor * alone for factor in factors)) for n in AHEAD]
        lines.append([name, *(f"{x:.2f}" for x in measured), f"{measured[0] / measured[1]:.2f}x"])
    print(table(lines))


if __name__ == "__main__":
    main()
