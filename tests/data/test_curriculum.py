"""Prompts that are passed over by their success rate: pools, revisits, resumed runs, several processes."""

import json
import math

import jax
import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data import tasks
from jaxrl_llm.data.curriculum import Curriculum, CurriculumSpec
from jaxrl_llm.data.pipeline import Pipeline

PROMPTS = [f"p{index}" for index in range(10)]
SPEC = CurriculumSpec(easy=0.9, hard=0.0, revisit=0.0, visits=1, decay=0.5)
# The first four are always solved, the last three never, the others half of the time.
SUCCESS = {name: 1.0 if index < 4 else 0.0 if index >= 7 else 0.5 for index, name in enumerate(PROMPTS)}


def curriculum(spec=SPEC, batch_size=5, **options):
    return Curriculum(PROMPTS, batch_size, spec, seed=3, **options)


def run(made: Curriculum, batches: int) -> list[list[str]]:
    taken = []
    for _ in range(batches):
        taken.append(next(made))
        made.observe([SUCCESS[name] for name in taken[-1]])
    return taken


def test_until_something_is_known_the_order_is_that_of_the_pipeline():
    assert run(curriculum(), 2) == [next(pipeline) for pipeline in [Pipeline(PROMPTS, 5, seed=3)] for _ in range(2)]


def test_prompts_that_are_always_or_never_solved_are_passed_over():
    made = curriculum()
    run(made, 2)
    assert [made.pool(index) for index in range(10)] == ["easy"] * 4 + ["normal"] * 3 + ["hard"] * 3
    assert made.metrics() == {
        "prompts/easy": 0.4, "prompts/hard": 0.3, "prompts/success_rate": 0.55, "prompts/passed_over": 0.0,
    }  # fmt: skip
    later = run(made, 6)
    assert {name for batch in later for name in batch} == {"p4", "p5", "p6"}
    assert made.metrics()["prompts/passed_over"] > 6
    assert made.epochs == pytest.approx(1.0 + 30 / 3, abs=1.5)  # of 10 turns 3 are taken


def test_one_side_alone():
    made = curriculum(CurriculumSpec(easy=0.9, hard=None, revisit=0.0, visits=1, decay=0.5))
    run(made, 2)
    assert {name for batch in run(made, 6) for name in batch} == set(PROMPTS[4:])


def test_the_rate_runs():
    made = Curriculum(["a"], 1, CurriculumSpec(easy=0.8, hard=None, revisit=0.0, visits=3, decay=0.5))
    rates = []
    for success in (0.0, 1.0, math.nan, 1.0, 1.0):
        next(made)
        made.observe([success])
        rates.append((made.metrics()["prompts/success_rate"], made.pool(0)))
    assert rates == [(0.0, "normal"), (0.5, "normal"), (0.5, "normal"), (0.75, "normal"), (0.875, "easy")]


def test_prompts_are_revisited_and_come_back():
    made = curriculum(CurriculumSpec(easy=0.9, hard=None, revisit=0.3, visits=1, decay=0.5))
    run(made, 2)
    later = [name for batch in run(made, 40) for name in batch]
    counts = {name: later.count(name) for name in PROMPTS}
    easy, others = (np.mean([counts[name] for name in names]) for names in (PROMPTS[:4], PROMPTS[4:]))
    assert 0.15 < easy / others < 0.5
    for _ in range(10):
        made.observe([0.0 if name == "p0" else SUCCESS[name] for name in next(made)])
    assert made.pool(0) == "normal"


def test_where_all_are_passed_over_an_epoch_s_first_are_taken():
    made = Curriculum(PROMPTS[:4], 3, SPEC)
    assert all(len(batch) == 3 for batch in run(made, 6))


@pytest.mark.parametrize("done", [0, 3, 7])
def test_resume_anywhere_gives_the_same_rest(done):
    spec = CurriculumSpec(easy=0.9, hard=0.0, revisit=0.4, visits=2, decay=0.3)
    made = curriculum(spec)
    run(made, done)
    state = json.loads(json.dumps(made.get_state()))
    again = curriculum(spec)
    run(again, 2)
    again.set_state(state)
    assert run(again, 9) == run(made, 9)
    assert again.get_state() == made.get_state()


def test_it_starts_from_a_run_without_and_the_other_way():
    plain = Pipeline(PROMPTS, 5, seed=3)
    next(plain)
    made = curriculum()
    made.set_state(plain.get_state())
    assert next(made) == next(plain)
    plain.set_state(made.get_state())


def test_processes_take_their_shares_of_the_same_batches():
    spec = CurriculumSpec(easy=0.9, hard=0.0, revisit=0.4, visits=1, decay=0.5)
    whole = curriculum(spec, 6)
    parts = [curriculum(spec, 6, process_index=index, process_count=2) for index in range(2)]
    for _ in range(8):
        batch = next(whole)
        assert [name for part in parts for name in next(part)] == batch
        for each in (whole, *parts):
            each.observe([SUCCESS[name] for name in batch])


def test_sources_by_weight():
    made = curriculum(batch_size=4, shares=[(5, 1.0), (5, 3.0)])
    assert sum(PROMPTS.index(name) >= 5 for name in next(made)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hard": 0.5, "easy": 0.4}, r"data.curriculum_hard is 0.5, but it must be below"),
        ({"easy": 0.9, "streaming": True}, r"data.curriculum_easy is 0.9, but this run streams rows"),
        ({"hard": 0.0, "name": "sft"}, r"data.curriculum_hard is 0, but this run samples nothing"),
    ],
)
def test_contradictions_are_refused(changes, message):
    config = default()
    keys = {"streaming": "data.streaming", "name": "algorithm.name"}
    config.update_from_flattened_dict({keys.get(name, f"data.curriculum_{name}"): x for name, x in changes.items()})
    with pytest.raises(ConfigError, match=message):
        validate(config)


@pytest.mark.slow
def test_a_run_passes_prompts_over_and_resumes(root, tmp_path):
    def run(name, **changes):
        config = load_config_file(f"{root / 'configs/grpo.py'}:tiny")
        config.output_dir, config.eval.every, config.logging.backends = str(tmp_path / name), -1, ("jsonl",)
        config.total_steps, config.checkpoint.every, config.optimizer.warmup_steps = 3, 1, 0
        config.data.curriculum_easy, config.data.curriculum_hard = 0.5, 0.0
        config.batch.prompts = 4
        config.update_from_flattened_dict(changes)
        reward = lambda completions, **_: [float(len(text) % 2) for text in completions]  # noqa: E731
        return train(config, train_dataset=tasks.generate("sort", size=6), rewards=reward)

    whole = run("whole")
    last = whole.metrics[-1]
    assert last["prompts/easy"] + last["prompts/hard"] > 0
    assert last["prompts/passed_over"] > 0
    again = run("again", **{"checkpoint.resume": str(whole.output_dir / "checkpoints/2")})
    assert [again.metrics[-1][name] for name in ("loss", "reward", "prompts/success_rate", "prompts/passed_over")] == [
        last[name] for name in ("loss", "reward", "prompts/success_rate", "prompts/passed_over")
    ]
    jax.tree.map(np.testing.assert_array_equal, whole.model.params, again.model.params)
