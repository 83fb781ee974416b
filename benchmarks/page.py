"""The text of docs/results.md, from the runs that benchmarks/results.py keeps."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

Runs = Mapping[str, Mapping[int, dict[str, Any]]]  # by configuration, then seed
ACCURACY = ("eval/accuracy", "eval/greedy_accuracy")
REWARD = "eval/reward"
EPISODES = 8  # of a step of configs/gigpo.py
# What says of an offline configuration whether it learned.
MEASURES = {
    "sft": ("eval/loss", "eval/mean_token_accuracy"),
    "reward_model": ("eval/loss", "eval/accuracy", "eval/margin"),
    "prm": ("eval/loss", "eval/accuracy", "eval/accuracy_wrong"),
    "preference": ("eval/loss", "eval/rewards/accuracies", "eval/rewards/margins", *ACCURACY),
}


def page(
    runs: Runs,
    online: Iterable[str],
    offline: Iterable[str],
    control: str,
    images: Iterable[str] = (),
    own: Iterable[str] = (),
    further: Iterable[str] = (),
    ahead: Iterable[str] = (),
    taught: str = "",
    credit: Iterable[str] = (),
    spans: Iterable[str] = (),
) -> str:
    """The page; configurations without runs are left out. `own` are those whose teacher is the policy, `taught` has
    another, and `spans` have that as one of another tokenizer."""
    parts = [
        HEAD.format(machines="; ".join(sorted({run["machine"] for group in runs.values() for run in group.values()})))
    ]
    sampled = (ONLINE, online), (FURTHER, further), (AHEAD, ahead)
    parts += [_sampled_part(head, runs, names) for head, names in sampled]
    if taught in runs:
        parts.append(
            TAUGHT.format(
                runs=table(_taught_rows(runs[taught])),
                curve=table(_curve_table("seed", {str(n): run for n, run in sorted(runs[taught].items())})),
            )
        )
    parts += [_sampled_part(SPANS, runs, spans), _sampled_part(SELF, runs, own)]
    if played := [name for name in credit if name in runs]:
        parts.append(CREDIT.format(first=table(_first_rows(runs, played)), curve=table(_median_rows(runs, played))))
    if "grpo" in runs and 0 in runs["grpo"]:
        parts.append("\n## Health of the GRPO run with seed 0\n\n" + table(_health(runs["grpo"][0])))
    if control in runs:
        parts.append(CONTROL.format(control=table(_control_rows(runs[control][0]))))
    parts.append(_sampled_part(IMAGES, runs, images))
    given = [name for name in offline if name in runs]
    if given:
        parts.append(
            "\n## Given data\n" + OFFLINE + "\n" + "\n".join(_offline_part(name, runs[name]) for name in given)
        )
    return "".join(parts)


def table(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def _evaluations(run: dict[str, Any], name: str = ACCURACY[0]) -> list[dict[str, Any]]:
    return [line for line in run["lines"] if name in line]


def _pair(line: dict[str, Any]) -> str:
    return " / ".join(f"{line[name]:.3f}" for name in ACCURACY)


def _seconds(group: Mapping[int, dict[str, Any]]) -> str:
    return f"{sum(run['seconds'] for run in group.values()) / len(group):.0f}"


def _online_rows(runs: Runs, names: list[str]) -> list[list[str]]:
    seeds = sorted({seed for name in names for seed in runs[name]})
    rows = [["config", "steps", "before", *(f"after, seed {seed}" for seed in seeds), "seconds"]]
    for name in names:
        group = runs[name]
        first = next(iter(group.values()))
        after = [_pair(_evaluations(group[seed])[-1]) if seed in group else "" for seed in seeds]
        rows.append([f"`{name}`", str(first["steps"]), _pair(_evaluations(first)[0]), *after, _seconds(group)])
    return rows


def _curves(runs: Runs, names: list[str]) -> list[list[str]]:
    return _curve_table("config", {f"`{name}`": runs[name][0] for name in names if 0 in runs[name]})


def _curve_table(head: str, runs: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """The accuracies of each run by step."""
    curves = {name: {line["step"]: line for line in _evaluations(run)} for name, run in runs.items()}
    steps = sorted({step for curve in curves.values() for step in curve})
    rows = [[head, *map(str, steps)]]
    return rows + [[name, *(_pair(curve[s]) if s in curve else "" for s in steps)] for name, curve in curves.items()]


def _health(run: dict[str, Any]) -> list[list[str]]:
    lines = [line for line in run["lines"] if "reward" in line]
    names = [name for name in lines[0] if name != "step" and not name.startswith("eval/")]
    return [["step", *names], *([str(line["step"]), *(f"{line[name]:.3f}" for name in names)] for line in lines)]


def _control_rows(run: dict[str, Any]) -> list[list[str]]:
    before, after = _evaluations(run)[0], _evaluations(run)[-1]
    head = ["", "before", "after", "steps", "seconds"]
    return [
        head,
        ["SFT on the same demonstrations", _pair(before), _pair(after), str(run["steps"]), _seconds({0: run})],
    ]


def _taught_rows(group: Mapping[int, dict[str, Any]]) -> list[list[str]]:
    """Of each seed both runs, and when each was within 0.02 of what the teacher ended with."""
    rows = [["seed", "GRPO: steps", "accuracy", "within 0.02 after", "CPU seconds",
             "student: steps", "accuracy", "within 0.02 after", "CPU seconds"]]  # fmt: skip
    for seed, run in sorted(group.items()):
        row, level = [str(seed)], _evaluations(run["teacher"])[-1][ACCURACY[0]]
        for side in (run["teacher"], run):
            curve = _evaluations(side)
            reached = next((str(line["step"]) for line in curve if line[ACCURACY[0]] >= level - 0.02), "not reached")
            row += [str(side["steps"]), _pair(curve[-1]), reached, f"{side['cpu_seconds']:.0f}"]
        rows.append(row)
    return rows


def _first_rows(runs: Runs, names: list[str]) -> list[list[str]]:
    """The episodes of each run until its reward was first 0.9, and their medians."""
    seeds = sorted(set.intersection(*(set(runs[name]) for name in names)))
    columns = []
    for name in names:
        column = []
        for seed in seeds:
            lines = _evaluations(runs[name][seed], REWARD)
            column.append(next((EPISODES * x["step"] for x in lines if x[REWARD] >= 0.9), float("inf")))
        columns.append([*column, statistics.median(column)])
    rows = [["seed", *(f"`{name}`" for name in names)]]
    for head, *counts in zip([*map(str, seeds), "median"], *columns, strict=True):
        rows.append([head, *("not reached" if count == float("inf") else f"{count:.0f}" for count in counts)])
    return rows


def _median_rows(runs: Runs, names: list[str]) -> list[list[str]]:
    """The median reward over the seeds, by episodes."""
    steps = [line["step"] for line in _evaluations(next(iter(runs[names[0]].values())), REWARD)]
    rows = [["", *(str(EPISODES * step) for step in steps)]]
    for name in names:
        curves = [_evaluations(run, REWARD) for run in runs[name].values()]
        rows.append(
            [f"`{name}`", *(f"{statistics.median(x[REWARD] for x in at):.3f}" for at in zip(*curves, strict=True))]
        )
    return rows


def _sampled_part(head: str, runs: Runs, names: Iterable[str]) -> str:
    """The accuracies of configurations that sample, after training and on the way; no text where none was run."""
    known = [name for name in names if name in runs]
    tables = table(_online_rows(runs, known)), table(_curves(runs, known))
    return f"{head}\n{tables[0]}\nBy training step, seed 0:\n\n{tables[1]}" if known else ""


def _offline_part(name: str, group: Mapping[int, dict[str, Any]]) -> str:
    measures = MEASURES.get(name, MEASURES["preference"])
    shown = [m for m in measures if any(m in line for line in group[min(group)]["lines"])]
    rows = [["seed", "steps", *(m.removeprefix("eval/") for m in shown), "seconds"]]
    for seed, run in sorted(group.items()):
        lines = _evaluations(run, shown[0])
        changes = [f"{lines[0][m]:.3f} -> {lines[-1][m]:.3f}" for m in shown]
        rows.append([str(seed), str(run["steps"]), *changes, f"{run['seconds']:.0f}"])
    return f"\n### `{name}`\n\n{table(rows)}"


HEAD = """# Results

What every configuration of `configs/` reaches on the embedded model, written by `python -m benchmarks.results` from
benchmarks/results/ ({machines}; fp32). Seconds are of the whole command: start, compilation, evaluations, checkpoints
and export. Runs with seed 0, and all of `online_dpo`, shared their two cores with other processes, so their seconds do
not compare algorithms.
"""
ONLINE = """
## Online algorithms on the embedded model and task

`python -m jaxrl_llm.train --config=configs/NAME.py --config.seed=SEED`, all from the same warm start: held-out
accuracy, sampled (four completions a prompt at temperature 1) / greedy, on 256 prompts of the split `test`. Prompts are
assigned to splits by a checksum of their text; `test` was not looked at while settings were chosen (they were tuned on
`validation`). The standard error of a sampled accuracy of 0.95 is about 1 point.
"""
FURTHER = """
## Further objectives

The same with `configs/further.py:NAME`, for 120 steps and with the learning rate of the others. `topr`, `dppo`, `m2po`
and `interpolated` learn from samples two updates old, `dro` and `vespo` make two updates of each batch. `dro` and
`m2po` rise late, as the policy moves most at first; a third of the learning rate gave lower ends.
"""
AHEAD = """
## Asynchronous rollouts

`configs/async_grpo.py` with `rollout.staleness=N`, for 120 steps, without a KL term. In `ahead_N` tokens are weighed by
the ratio of the policy before the step and the sampler (`token_truncate`, at most 2); in `ahead_clipped_N`
`algorithm.old_logps=sampler` clips the ratio of the policy and the sampler. `ahead_in_flight_N` is
`configs/async_grpo.py:in_flight`, weighed as `ahead_N`; here a batch is sampled before the next policy comes, so that
both are the same.
"""
TAUGHT = """
## From a teacher

`configs/distill.py`, whose teacher is what `configs/grpo.py` makes with the same seed. Both start from the same model,
and a step of both has 256 completions; GRPO makes one update of them, the student twelve, without rewards
([why](distillation.md#how-many-steps-it-takes)). "Within 0.02" is of the sampled accuracy that the teacher ended with,
measured every 25 steps of GRPO and every 3 of the student. CPU seconds are of the whole command, evaluations included.

{runs}
The student by training step:

{curve}
Settings of the student were compared on `test`, and the number of updates a step on `validation`, so neither split is
untouched.
"""
SPANS = """
## From a teacher, by spans of text

`configs/gold.py`, with the same teacher and as many updates. The teacher reads the text of the completions, as if it
had another tokenizer; here it has the same, so that each token is a span.
"""
SELF = """
## The policy as its own teacher

`configs/sdpo.py` and `configs/sdft.py`, from the model that `configs/sdpo.py:start` makes with the same seed: it has
learned from the same demonstrations (six in ten of them wrong), and to copy an answer that precedes the question.
Rewards only choose the sample that the teacher is shown (SDPO).
"""
CREDIT = """
## Credit for turns

`python -m benchmarks.results credit_grpo credit_gigpo credit_turn --seeds=0,1,2,3,4`: `configs/gigpo.py`, a game of ten
turns with a reward each, in which no answer changes a later question. `credit_gigpo` has
`algorithm.advantage="gigpo(gamma=0.0)"`, `credit_grpo` `group` and `credit_turn` `turn(gamma=0.0)`; all else is the
same, the start (`configs/gigpo.py:start`, seed 0) included. Episodes, eight a step, until the mean reward (the share of
right answers) first reaches 0.9 on 64 games of the split `test`, two samples each, measured every 32 episodes:

{first}
The learning rate, 3e-4, is the better one for GRPO of two (seed 0, on `validation`): there `group`, `gigpo` (gamma
0.95) and `turn(gamma=0.0)` took 352, 288 and 224 episodes, and at 1e-3 `group` did not reach the level in 640 and the
others took 160. With 32 episodes a step and 1e-3 they took 480, 640 and 320: credit for turns pays where a step has few
episodes.

Reward by episodes, medians of the seeds:

{curve}"""
CONTROL = """
## Control: the time of a GRPO run spent on more supervised fine-tuning

The shipped model goes on with the demonstrations it was made from (six in ten of them wrong):

{control}
Samples stay about as mixed as the demonstrations. Reinforcement removes the wrong behaviours; it does not teach the
model to sort, which the warm start can do sometimes.
"""
IMAGES = """
## Images

`python -m jaxrl_llm.train --config=configs/vision_grpo.py`: the colour, the number or the place of drawn shapes,
answered by a SmolVLM of 0.14 M parameters that starts from random ones ([vision](vision.md)). `vision_grpo_blank` is
the control `configs/vision_grpo.py:blank`: the same questions and answers, and grey images. One in four is chance.
"""
OFFLINE = """
Held-out rows of the split `validation`, before -> after; accuracy is that of sampled and of greedy completions.
"""
