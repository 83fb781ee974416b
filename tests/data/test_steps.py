"""Rows of steps: the tokens of TRL's PRMTrainer, labels, limits, the cache of token rows, and what is refused."""

import dataclasses
from itertools import chain, product

import numpy as np
import pytest

from jaxrl_llm.commands.preview import preview
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.data import loading, opening, tasks
from jaxrl_llm.data.formats.lookup import find
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.training.setup.specs import data_spec

ROW = {"prompt": "2+2+1?", "completions": ["2+2=4", "4+1=6"], "labels": [True, False]}


def as_trl(tokenizer, row, separator="\n", last_only=False):
    """What `PRMTrainer.tokenize_row` of TRL makes of a row: token ids, and labels with -100 where no step ends."""
    prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    end = tokenizer.encode(separator, add_special_tokens=False)
    steps = [tokenizer(step, add_special_tokens=False)["input_ids"] + end for step in row["completions"]]
    labels = [int(label) for label in row["labels"]]
    labels = [-100] * (len(labels) - 1) + labels[-1:] if last_only else labels
    prompt = prompt if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *prompt]
    of_steps = [[-100] * (len(step) - 1) + [label] for step, label in zip(steps, labels, strict=True)]
    return prompt + list(chain(*steps)), [-100] * len(prompt) + list(chain(*of_steps))


def rows_of(tokenizer, rows, **settings):
    config = default()
    config.algorithm.name = "process_reward_model"
    config.data.update(settings)
    spec = data_spec(config)
    return loading.tokenized(spec, opening.open_sources(spec, tokenizer, rows), spec.kind, tokenizer).rows


def labels_of(made):
    return [label if learned else -100 for label, learned in zip(made["step_labels"], made["mask"], strict=True)]


@pytest.mark.parametrize("separator", ["\n", "\n\n", " ки"])
def test_tokens_and_labels_are_those_of_trl(tokenizer, special_tokenizer, separator):
    for each, last_only in product((tokenizer, special_tokenizer), (False, True)):
        loss_on = "last_step" if last_only else "completion"
        (made,) = rows_of(each, [ROW], step_separator=separator, loss_on=loss_on)
        ids, labels = as_trl(each, ROW, separator, last_only)
        assert made["ids"] == ids and labels_of(made) == labels


def test_labels_between_and_conversations(tokenizer):
    graded = {**ROW, "labels": [1, 0.25]}
    (made,) = rows_of(tokenizer, [graded])
    assert [label for label in labels_of(made) if label != -100] == [1.0, 0.25]
    chat = {**ROW, "prompt": [{"role": "user", "content": "2+2+1?"}]}
    (made,) = rows_of(tokenizer, [chat])
    text = tokenizer.decode(made["ids"])
    assert text.endswith("2+2=4\n4+1=6\n") and "user" in text
    assert sum(made["mask"]) == 2 and made["mask"][-1] == 1


def test_long_rows_keep_the_steps_that_are_left(tokenizer):
    length = len(as_trl(tokenizer, ROW)[0])
    cut = {"max_length": length - 1, "overlong": "truncate_right"}
    (made,) = rows_of(tokenizer, [ROW], **cut)
    assert len(made["ids"]) == len(made["step_labels"]) == length - 1 and sum(made["mask"]) == 1
    with pytest.raises(ConfigError, match=r"no row is left to train on .*as no step ends in them"):
        rows_of(tokenizer, [ROW], **cut, loss_on="last_step")
    assert len(rows_of(tokenizer, [ROW, {"prompt": "a", "completions": [], "labels": []}])) == 1


def test_the_same_rows_from_the_cache(tokenizer, tmp_path):
    rows = [{**ROW, "labels": [1, 0.25]}, ROW]
    first, again = (rows_of(tokenizer, rows, cache=str(tmp_path)) for _ in range(2))
    assert first == again and len(list(tmp_path.glob("*.npz"))) == 1
    rows_of(tokenizer, rows, cache=str(tmp_path), step_separator=" ")
    assert len(list(tmp_path.glob("*.npz"))) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [True]}, "with a list labels of as many"),
        ({"labels": [True, 2]}, "or a number between, not '4.1=6' with 2"),
        ({"labels": [True, "no"]}, "with 'no'"),
        ({"completions": ["a", None]}, "not None with False"),
        ({"labels": [True, float("nan")]}, "with nan"),
    ],
)
def test_rows_that_are_none(tokenizer, change, message):
    with pytest.raises(ConfigError, match=f"row 0: .*{message}"):
        rows_of(tokenizer, [{**ROW, **change}])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("process_reward_model", {"loss_on": "all"}, "loss_on is all, .* set it to one of completion, last_step"),
        ("sft", {"loss_on": "last_step"}, "loss_on is last_step, .* one of completion, last_turn, as_shown, all"),
        ("process_reward_model", {"step_separator": ""}, "step_separator is empty, .* or none for a line break"),
        ("process_reward_model", {"step_separator": r"\n\n"}, r"step_separator is \\n\\n, .* write '\\n' on a"),
        ("process_reward_model", {"packing": True}, "data.packing is for sft only"),
    ],
)
def test_settings_that_do_not_go_together(name, settings, message):
    config = default()
    config.algorithm.name = name
    config.data.update(settings)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_other_algorithms_read_one_label(tokenizer):
    for name in ("auto", "stepwise"):
        assert find(name, "steps")(ROW) == ROW
        made = find(name, "labels")(ROW)
        assert (made["prompt"], made["completion"], made["label"]) == ("2+2+1?", "2+2=4\n4+1=6", False)
    with pytest.raises(ConfigError, match="the data has no column 'completions', 'labels'"):
        rows_of(tokenizer, [{"prompt": "a", "completion": "b"}])


def test_the_task():
    rows = tasks.generate("sort_steps", size=200)
    for row in rows:
        steps, labels = row["completions"], row["labels"]
        right = [steps[: n + 1] == list(row["answer"])[: n + 1] for n in range(len(steps))]
        assert labels == right and sorted(steps) == list(row["answer"])
    shares = np.mean([label for row in rows for label in row["labels"]]), np.mean([all(r["labels"]) for r in rows])
    assert 0.5 < shares[0] < 0.8 and 0.2 < shares[1] < 0.7


def test_the_preview(tokenizer):
    config = default()
    config.algorithm.name, config.data.path = "process_reward_model", "task:sort_steps"
    shown = preview(config, rows=1)
    assert "right steps" in shown and "⟦\n⟧" in shown
    spec = dataclasses.replace(data_spec(config), kind="steps")
    assert spec.step_separator == RowTokenizer("steps", tokenizer).step_separator == "\n"
