"""Decode steps and rewards with completions that are sampled over several steps (`rollout.partial_prompts`).

    python -m benchmarks.partial

Prints a table: random parameters in the shape of the embedded model, which end a completion at any token with the same
probability, so that lengths are nearly geometric, and learn to write digits. Counts are means of a training step and
depend on no clock; a decode step is one of the slot grid, whatever its width. Ages and rewards are of the last 8 steps.
"""

import tempfile
from unittest import mock

import jaxrl_llm
from benchmarks.page import table
from jaxrl_llm.data import tasks
from jaxrl_llm.rollout import engine

STEPS = 24
# partial_prompts, partial_tokens, max_wait: with 0 as soon as enough prompts are complete
RUNS = ((0, 0, None), (16, 96, None), (32, 64, None), (16, 255, 0.0))


def digits(completions, **kwargs):
    """The share of each completion that are digits."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def measure(prompts: int, tokens: int, max_wait: float | None) -> tuple[float, float, list[dict[str, float]]]:
    """Decode steps and slots times steps of a training step, and the metrics of all."""
    config = jaxrl_llm.default_config()
    config.model.random_init, config.total_steps, config.batch.prompts = True, STEPS, 16
    config.rollout.group_size, config.rollout.max_prompt_length, config.rollout.max_completion_length = 8, 16, 256
    config.rollout.stop_token_ids = tuple(range(40, 48))
    config.rollout.partial_prompts, config.rollout.partial_tokens = prompts, tokens
    config.rollout.max_wait = max_wait
    config.algorithm.importance_correction, config.algorithm.aggregation = "token_truncate", "token"
    config.optimizer.learning_rate = 1e-3
    config.checkpoint.every, config.eval.every, config.logging.backends = 0, -1, ()
    decode_chunk, counts = engine.decode_chunk, [0, 0]

    def counted(own, params, of_prompts, grid, *rest):
        before, width = int(grid.steps), grid.rows.length.size
        after = decode_chunk(own, params, of_prompts, grid, *rest)
        counts[0] += int(after.steps) - before
        counts[1] += (int(after.steps) - before) * width
        return after

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(engine, "decode_chunk", counted):
        config.output_dir = f"{folder}/run"
        metrics = jaxrl_llm.train(config, tasks.generate("sort", size=256), rewards=digits).metrics
    return counts[0] / STEPS, counts[1] / STEPS, metrics


def main() -> None:
    """Prints the table."""
    names = ("rollout/rounds", "rollout/age", "rollout/age_max", "reward")
    lines = [["partial_prompts", "partial_tokens", "max_wait", "decode steps", "slots x steps", "rounds", "age",
              "oldest", "reward"]]  # fmt: skip
    for prompts, tokens, max_wait in RUNS:
        steps, work, metrics = measure(prompts, tokens, max_wait)
        late = metrics[-8:]
        means = [sum(x.get(name, 0.0) for x in late) / len(late) for name in names]
        own = [str(prompts), str(tokens), "" if max_wait is None else f"{max_wait:g}", f"{steps:.0f}", f"{work:.0f}"]
        lines.append([*own, *(f"{x:.2f}" for x in means)])
    print(table(lines))


if __name__ == "__main__":
    main()
