"""Compare two models on the same prompts, by the share of completions of the first one that are better.

    python -m jaxrl_llm compare --a=runs/grpo --b=embedded:sort --config=configs/grpo.py

Prompts, sampling and rewards are those of `jaxrl_llm.evaluate`. The better of two completions is that with the larger
weighted sum of rewards; `pairwise_judge` among rewards.functions shows a language model both, in both orders. Prints
the share of wins, ties and losses of `a`, and its win rate (a tie is half a win) with a bootstrap interval.
"""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.algorithms.advantages import combine_rewards
from jaxrl_llm.algorithms.sample_statistics import bootstrap_interval, mean_of
from jaxrl_llm.config import ConfigError, validate
from jaxrl_llm.config.flags import file_to_write, load_flags
from jaxrl_llm.config.resolve import naming
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.data.collate import columns_of
from jaxrl_llm.data.templates import chat_ids
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.rewards.judge import shown
from jaxrl_llm.rewards.runner import Rewards, TrainerState, load_rewards
from jaxrl_llm.rewards.signatures import text_of
from jaxrl_llm.training.evaluation.run import completions_of
from jaxrl_llm.training.images import IMAGES, shown_images
from jaxrl_llm.training.logging.console import show, stderr_console, waiting
from jaxrl_llm.training.setup.evaluation import build_evaluations, kept_prompts
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.run_models import build_named, tokenizer_named
from jaxrl_llm.training.setup.sources import build_rewards

FLAGS = (
    Setting("a", "", "The first model: hub id, folder, URL, `embedded:<name>`, or a run: RUN, RUN/checkpoints/STEP."),
    Setting("b", "", "The second model."),
    Setting("tie", 0.0, "Sums of rewards that differ by no more than this are a tie.", float, minimum=0),
    Setting("level", 0.95, "Level of the bootstrap interval over prompts.", float, above=0, below=1),
    Setting("output", "", "JSON file for the numbers, which are also printed."),
    Setting("pairs", "", "JSON lines file for all pairs: prompt, a, b, their scores, and the winner."),
)
SHARES = {"win": "a", "tie": "tie", "loss": "b"}  # the winners of the pairs that they count


class Comparison(NamedTuple):
    """The numbers, by name, and the pairs: `{set, prompt, a, b, score_a, score_b, winner}`."""

    metrics: dict[str, float]
    pairs: list[dict[str, Any]]


def compare(
    config, a: str, b: str, eval_dataset=None, rewards=None, tie: float = 0.0, level: float = 0.95
) -> Comparison:
    """The win rate of the completions of model `a` over those of model `b`, for the same prompts.

    Each model samples `eval.samples` completions of every prompt of the evaluation (see `jaxrl_llm.evaluate`), with its
    own tokenizer; the i-th of one is compared with the i-th of the other. The metrics are `win`, `tie` and `loss`
    (shares of a prompt's graded pairs, averaged over prompts), `win_rate` = win + tie / 2 with `win_rate_low` and
    `win_rate_high`, the means over pairs `reward_a` and `reward_b`, and the same for each named set, `<set>/win_rate`.
    `ungraded` pairs have a completion to which no reward applies. Raises ConfigError on user errors, among them
    tokenizers by which different prompts are left out as too long.
    """
    validate(config)
    for name, path in (("a", a), ("b", b)):
        if not path:
            raise ConfigError(f"--{name} is missing; name two models, --a=RUN --b=embedded:sort")
    for key in ("name", "tools", "rollout_func", "agent"):
        if config.environment[key]:
            raise ConfigError(f"environment.{key} is set, but a comparison is of single completions: leave it out")
    configs = []
    for path in (a, b):
        copy = config.copy_and_resolve_references()
        if path != copy.model.path:
            copy.model.revision = None  # of the model that it is set for
        copy.model.path, copy.model.random_init, copy.eval.greedy = path, False, False
        copy.lora.path, copy.lora.rank, copy.model.trainable, copy.model.frozen = None, 0, (), ()
        configs.append(copy)
    kept_a, kept_b = (kept_prompts(copy, tokenizer_named(copy), eval_dataset) for copy in configs)
    if kept_a != kept_b:
        raise ConfigError(
            f"the tokenizers of {a} and {b} leave out different prompts ({kept_a.count(False)} and "
            f"{kept_b.count(False)} of {len(kept_a)}), and completions of different ones are no pair: raise "
            f"rollout.max_prompt_length, which is {config.rollout.max_prompt_length}, or shorten the prompts"
        )
    mesh = build_mesh(config)
    with jax.set_mesh(mesh), closing(build_rewards(config, rewards)) as grader:
        samples = [_sample(copy, eval_dataset, mesh, grader) for copy in configs]
        pairs = _graded(grader, samples, tie, TrainerState(config.total_steps, config.total_steps))
    names = list(dict.fromkeys(pair["set"] for pair in pairs))
    metrics = _numbers(pairs, level)
    for name in names if len(names) > 1 else ():
        of_set = _numbers([pair for pair in pairs if pair["set"] == name], level)
        metrics |= {f"{name}/{metric}": value for metric, value in of_set.items()}
    return Comparison(metrics, pairs)


class Samples(NamedTuple):
    """The examples, each with the name of its set, a model's completions of each of them, and its tokenizer."""

    examples: list[dict[str, Any]]
    completions: list[list[Any]]
    tokenizer: Any


def _sample(config, eval_dataset: Any, mesh, grader: Rewards) -> Samples:
    """The completions of the model of `config`, once it is known that the prompts have the columns the grader reads."""
    with closing(load_rewards(_ungraded)) as nothing:
        model = build_named(config, mesh, head="lm")
        evaluations = build_evaluations(config, model, nothing, eval_dataset, mesh)
        for evaluation in evaluations:
            columns = set().union(*evaluation.examples)
            if PIXELS not in columns:
                with naming(f"for the comparison{f' on {evaluation.name}' if evaluation.name else ''}"):
                    grader.check_columns(sorted(columns - {"prompt_ids"}))
        key = jax.random.key(config.seed)
        completions = [
            completions for evaluation in evaluations for completions in completions_of(evaluation, model.params, key)
        ]
    examples = [{**example, "set": evaluation.name} for evaluation in evaluations for example in evaluation.examples]
    return Samples(examples, completions, model.tokenizer)


def _ungraded(completions: Sequence[Any], **columns: Any) -> list[None]:
    """A reward function without rewards: completions are graded once both models have sampled."""
    return [None] * len(completions)


def _graded(grader: Rewards, samples: Sequence[Samples], tie: float, state: TrainerState) -> list[dict[str, Any]]:
    """All pairs with their scores and winners. Process 0 grades; all processes get the same."""
    examples = samples[0].examples
    matches = [
        (index, both)
        for index, completions in enumerate(zip(*(sample.completions for sample in samples), strict=True))
        for both in zip(*completions, strict=True)
    ]
    scores: list[list[float]] | None = None
    with all_or_none():
        if jax.process_index() == 0:
            scores = _scores(grader, examples, matches, [sample.tokenizer for sample in samples], state).tolist()
    pairs = []
    for (index, (a, b)), (score_a, score_b) in zip(matches, gather(scores)[0], strict=True):
        known = np.isfinite(score_a) and np.isfinite(score_b)
        winner = "tie" if abs(score_a - score_b) <= tie else "a" if score_a > score_b else "b"
        pairs.append(
            {
                "set": examples[index]["set"],
                "row": index,
                "prompt": shown(examples[index]["prompt"]),
                "a": text_of(a),
                "b": text_of(b),
                "score_a": score_a if known else None,
                "score_b": score_b if known else None,
                "winner": winner if known else None,
            }
        )
    return pairs


def _scores(
    grader: Rewards,
    examples: list[dict[str, Any]],
    matches: list[tuple[int, Any]],
    tokenizers: Sequence[Any],
    state: TrainerState,
) -> np.ndarray:
    """The weighted sums `[pairs, 2]`.

    A reward function is called with the two completions of each pair in adjacent rows, and with one pair of a prompt at
    a time: a function that compares the rows of one of `prompt_numbers` thus never compares a model with itself.
    """
    scores, seen, rounds = np.zeros((len(matches), 2)), Counter(), {}
    for number, (index, _) in enumerate(matches):
        rounds.setdefault(seen[index], []).append(number)
        seen[index] += 1
    for numbers in rounds.values():
        asked = [examples[matches[number][0]] for number in numbers]
        rows = [example for example in asked for _ in range(2)]
        columns = columns_of(rows, ("prompt", "prompt_ids", PIXELS, "set"))  # each set may have some of its own
        images = shown_images(asked, 2)
        columns |= {} if images is None else {IMAGES: images[0]}
        completions = [completion for number in numbers for completion in matches[number][1]]
        ids = [chat_ids(tokenizers[row % 2], text_of(completion)) for row, completion in enumerate(completions)]
        prompts, prompt_numbers = [row["prompt"] for row in rows], [row // 2 for row in range(len(rows))]
        rewards = grader.submit(prompts, completions, ids, columns, state, prompt_numbers).result().rewards
        scores[numbers] = np.asarray(combine_rewards(rewards, grader.weights)).reshape(-1, 2)
    return scores


def _numbers(pairs: list[dict[str, Any]], level: float) -> dict[str, float]:
    """The metrics of some pairs, see `compare`."""
    graded = [pair for pair in pairs if pair["winner"] is not None]
    by_prompt: dict[int, list[str]] = {}
    for pair in graded:
        by_prompt.setdefault(pair["row"], []).append(pair["winner"])
    shares = {name: [w.count(winner) / len(w) for w in by_prompt.values()] for name, winner in SHARES.items()}
    win_rates = [win + tie / 2 for win, tie in zip(shares["win"], shares["tie"], strict=True)]
    low, high = bootstrap_interval(win_rates, level)
    return {
        "prompts": len({pair["row"] for pair in pairs}),
        "pairs": len(pairs),
        "ungraded": len(pairs) - len(graded),
        **{name: mean_of(of_prompts) for name, of_prompts in shares.items()},
        "win_rate": mean_of(win_rates),
        "win_rate_low": low,
        "win_rate_high": high,
        "reward_a": mean_of([pair["score_a"] for pair in graded]),
        "reward_b": mean_of([pair["score_b"] for pair in graded]),
    }


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    config, options = load_flags(argv, __doc__ or "", FLAGS)
    processes.join(config)
    keep_compiled(config.compilation_cache)
    output, pairs = (file_to_write(name, options[name]) for name in ("output", "pairs"))
    with waiting(f"comparing {options['a']} with {options['b']}", stderr_console(), lines=False):
        comparison = compare(config, options["a"], options["b"], tie=options["tie"], level=options["level"])
    if jax.process_index() > 0:
        return
    rows = {"a": options["a"], "b": options["b"], **comparison.metrics}
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name.ljust(width)}  {value if isinstance(value, str) else show(value)}")
    if output is not None:
        numbers = {name: None if value != value else value for name, value in rows.items()}
        output.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    if pairs is not None:
        lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in comparison.pairs]
        pairs.write_text("".join(lines), encoding="utf-8")
