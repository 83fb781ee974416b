"""Gains of speculation (`rollout.speculative_tokens`) on texts that repeat their prompts and on texts that do not.

    python -m benchmarks.speculation MODEL   # a folder or hub id of an instruct model; 4 minutes on two CPU cores

Prints the table of docs/performance.md. Seconds are medians of three rollouts after one that compiles.
"""

import dataclasses
import sys

import jax
import numpy as np

from benchmarks.meter import Meter
from benchmarks.page import table
from jaxrl_llm.models.model import load_model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams

TEXT = (
    "The old lighthouse keeper climbed the stairs every evening to light the lamp. The old lighthouse keeper wrote "
    "down the weather, the wind and the ships that he saw. In winter the storms were so strong that the windows shook."
)
ASKED = {
    "repeat a text": f"Repeat this text word for word:\n\n{TEXT}",
    "tell a story": "Tell a story about a lighthouse keeper in winter.",
}
ROWS, NEW, TURNS = (1, 8), 64, 3
PROPOSALS = (0, 3)


def main(model_path: str) -> None:
    """Prints the table."""
    model = load_model(model_path, "float32")
    eos = (model.tokenizer.eos_token_id,)
    lines = [["asked to", "rows", *(f"seconds with {n} proposals" for n in PROPOSALS), "tokens a step"]]
    for what, asked in ASKED.items():
        message = [{"role": "user", "content": asked}]
        prompt = model.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        for rows in ROWS:
            engine = Engine(SamplingParams(), rows, NEW, net=model.net, eos=eos, chunk=NEW)
            found = [
                seconds(dataclasses.replace(engine, speculative_tokens=n), model.params, prompt) for n in PROPOSALS
            ]
            lines.append([what, str(rows), *(f"{x:.2f}" for x, _ in found), f"{found[-1][1]:.2f}"])
    print(table(lines))


def seconds(engine: Engine, params, prompt: list[int]) -> tuple[float, float]:
    """Of a rollout, and the tokens that each decode step of a row gave."""
    tokens, meter = np.asarray([prompt], np.int32), Meter(TURNS)
    rollout = meter.measure(
        lambda: jax.block_until_ready(engine.generate(params, tokens, np.ones_like(tokens), jax.random.key(0)))
    )
    return meter.summary()["seconds"], float((rollout.lengths - 1).sum() / rollout.steps.sum())


if __name__ == "__main__":
    main(*sys.argv[1:])
