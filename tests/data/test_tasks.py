import re
import zlib

import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import tasks
from jaxrl_llm.data.sources import load


def test_split_is_the_checksum_of_the_prompt():
    # 0xCBF43926 is the published CRC-32 check value of "123456789".
    assert zlib.crc32(b"123456789") == 0xCBF43926
    for prompt in ("sort:1234=", "sort:98765=", "sort:0042=", "anything"):
        expected = {0: "test", 1: "validation"}.get(zlib.crc32(prompt.encode()) % 8, "train")
        assert tasks.split_of(prompt) == expected


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x.endswith("_demos") else ()) for x in sorted(tasks.TASKS)]
)
def test_splits_are_disjoint(name):
    prompts = {
        split: {
            question
            for seed in (0, 1)
            for row in tasks.generate(name, split, 500, seed)
            for question in row.get("questions", [re.split(r",|<\|end\|>", row["prompt"])[-1]])
        }
        for split in tasks.SPLITS
    }
    others = {split: {row["prompt"] for row in tasks.generate("sort", split, 500)} for split in tasks.SPLITS}
    for split in tasks.SPLITS:
        assert all(tasks.split_of(prompt) == split for prompt in prompts[split])
        for other in set(tasks.SPLITS) - {split}:
            assert not prompts[split] & (prompts[other] | others[other])


def test_sort_rows():
    rows = tasks.generate("sort", "train", 3000)
    for row in rows:
        digits = re.fullmatch(r"sort:(\d{4,8})=", row["prompt"]).group(1)
        assert row == {"prompt": row["prompt"], "answer": "".join(sorted(digits))}
    assert len({row["prompt"] for row in rows}) == 3000
    assert {len(row["answer"]) for row in rows} == {4, 5, 6, 7, 8}


def test_rows_depend_on_the_arguments_alone():
    assert tasks.generate("sort", "test", 50, 3) == tasks.generate("sort", "test", 50, 3)
    assert tasks.generate("sort", "test", 50, 3) == tasks.generate("sort", "test", 80, 3)[:50]
    assert tasks.generate("sort", "test", 50, 3) != tasks.generate("sort", "test", 50, 4)
    # Fixed rows: another Python or machine must draw the same ones.
    assert [row["prompt"] for row in tasks.generate("sort", "test", 3)] == PINNED


def test_seeds_of_splits_are_different_numbers():
    seeds = {split: [row["seed"] for row in tasks.generate("seeds", split)] for split in tasks.SPLITS}
    assert len(set().union(*seeds.values())) == sum(tasks.SIZES.values())
    assert tasks.generate("seeds", size=2) == [{"prompt": [{"role": "user", "content": ""}], "seed": n} for n in (0, 1)]
    assert seeds["train"][0] != tasks.generate("seeds", seed=1)[0]["seed"]


PINNED = ["sort:3339687=", "sort:258477=", "sort:38753="]


def test_mistakes_are_of_three_kinds():
    assert tasks.sort_mistakes("sort:4182=") == ["8421", "4182", "2814"]
    assert tasks.sort_mistakes("sort:1234=") == ["4321"]
    assert tasks.sort_mistakes("sort:4321=") == ["4321"]
    assert tasks.sort_mistakes("sort:1221=") == ["2211", "1221"]
    assert tasks.sort_mistakes("sort:1111=") == []


def test_demos_are_wrong_in_six_of_ten():
    rows = tasks.generate("sort_demos", "train", 5000)
    wrong = [row for row in rows if row["completion"] != row["answer"]]
    # 0.6 with a standard error of 0.007.
    assert 0.57 < len(wrong) / 5000 < 0.63
    assert all(row["completion"] in tasks.sort_mistakes(row["prompt"]) for row in wrong)
    kinds = [tasks.sort_mistakes(row["prompt"]).index(row["completion"]) for row in wrong]
    assert set(kinds) == {0, 1, 2}


def test_pairs_and_labels():
    for row in tasks.generate("sort_pairs", "train", 500):
        assert row["chosen"] == tasks.sort_answer(row["prompt"]) == row["answer"]
        assert row["rejected"] in tasks.sort_mistakes(row["prompt"])
    rows = tasks.generate("sort_labels", "train", 2000)
    assert all(row["label"] == (row["completion"] == row["answer"]) for row in rows)
    assert 0.45 < sum(row["label"] for row in rows) / 2000 < 0.55


def test_triples():
    rows = tasks.generate("sort_triples", "train", 500)
    for row in rows:
        answer = tasks.sort_answer(row["prompt"])
        assert row["reference"] == answer and row["chosen"] != row["rejected"]
        assert {row["chosen"], row["rejected"]} <= {answer, *tasks.sort_mistakes(row["prompt"])}
        in_place = [sum(map(str.__eq__, row[name], answer)) for name in ("chosen", "rejected")]
        assert in_place[0] >= in_place[1]
    assert 0.3 < sum(row["chosen"] == row["reference"] for row in rows) / 500 < 0.8


def test_shown_answers():
    """Every other prompt has its answer before it, and is answered right; the others are those of sort_demos."""
    rows = tasks.generate("sort_shown", "train", 2000)
    shown = [row for row in rows if not row["prompt"].startswith("sort:")]
    assert all(row["prompt"].split(",")[0] == row["completion"] == row["answer"] for row in shown)
    assert all(tasks.sort_answer(row["prompt"].split(",")[1]) == row["answer"] for row in shown)
    assert 0.45 < len(shown) / 2000 < 0.55
    wrong = sum(row["completion"] != row["answer"] for row in rows) / (2000 - len(shown))
    assert 0.55 < wrong < 0.65


def test_games_of_questions():
    rows = tasks.generate("smallest", "test", 200)
    for row in rows:
        assert row["prompt"] == row["questions"][0] and row["answer"] == min(row["prompt"][:4])
        assert len(row["questions"]) == 10 and all(re.fullmatch(r"\d{4}=", asked) for asked in row["questions"])
    assert len({asked for row in rows for asked in row["questions"]}) > 700  # of 1250 in this split


def test_games_begun():
    """Answers before the last question and the completion are wrong six times in ten, and always of the question."""
    rows, answers = tasks.generate("smallest_demos", "train", 2000), []
    for row in rows:
        *before, last = row["prompt"].split("<|end|>")
        turns = [turn.split("=") for turn in before] + [[last[:-1], row["completion"]]]
        answers += turns
        assert len(turns) <= 10 and all(answer in digits and len(answer) == 1 for digits, answer in turns)
        assert all(tasks.split_of(f"{digits}=") == "train" for digits, _ in turns)
    assert {row["prompt"].count("<|end|>") for row in rows} == set(range(10))
    # 0.6 with a standard error of 0.005.
    assert 0.58 < sum(answer != min(digits) for digits, answer in answers) / len(answers) < 0.62


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("sorts", "train"),
            "no built-in task 'sorts'; known are seeds, shapes, shapes_blank, smallest, smallest_demos, sort, "
            "sort_demos, sort_labels, sort_pairs, sort_shown, sort_steps, sort_triples; the closest is sort",
        ),
        (("sort", "dev"), "no split 'dev'; its splits are train, validation, test"),
        (("sort", "train", 0), "cannot have 0 rows"),
        (("sort", "train", 10**7), "cannot have 10000000 rows"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        tasks.generate(*arguments)


def test_parts_of_splits():
    train, test = (tasks.generate("sort", split) for split in ("train", "test"))
    assert load("task:sort", "train[:10%]+test[-3:]") == train[: len(train) // 10] + test[-3:]
    assert load("task:sort", "train[7:]") == train[7:]
    with pytest.raises(ConfigError, match=r"has no split 'dev'"):
        load("task:sort", "dev[:10%]")
    with pytest.raises(ConfigError, match=r"none in the split 'train\[:0\]'"):
        load("task:sort", "train[:0]")
