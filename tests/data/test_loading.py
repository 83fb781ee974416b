"""Sources, formats and tokenising together, as the configuration asks for them."""

import json
import math
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest

from jaxrl_llm.config import default, from_json, to_json, validate
from jaxrl_llm.config.flags import load_flags
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import cache, loading, opening
from jaxrl_llm.data.formats.lookup import fitting
from jaxrl_llm.data.length_limit import LimitedTokenizer
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.training.setup.specs import data_spec

ORCA = [{"question": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(4)]
ULTRA = [{"prompt": f"p{i}", "chosen": "ja", "rejected": "nein"} for i in range(3)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    write_rows("orca.jsonl", ORCA)
    write_rows("ultra.jsonl", ULTRA)
    return tmp_path


def write_rows(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def config_of(name="preference", **data):
    config = default()
    config.algorithm.name, config.algorithm.loss, config.algorithm.beta = name, "dpo", 0.1
    if name == "grpo":
        config.algorithm.loss = "ppo_clip"
    config.data.update({"path": "orca.jsonl", **data})
    validate(config)
    return config


def tokens_of(config, tokenizer, prompts=False, **options):
    spec = data_spec(config)
    sources = opening.open_sources(spec, tokenizer, **options)
    return loading.tokenized(
        spec, loading.as_prompts(sources) if prompts else sources, "prompts" if prompts else spec.kind, tokenizer
    )


def stream_of(config, tokenizer, dataset=None, **changes):
    spec = replace(data_spec(config), streaming=True, **changes)
    return loading.stream(spec, opening.open_sources(spec, tokenizer, dataset), spec.kind, tokenizer)


def texts(rows, tokenizer, column="chosen_ids"):
    return [tokenizer.decode(row[column]) for row in rows]


@pytest.mark.parametrize(
    ("name", "loss", "kind"),
    [
        ("grpo", "ppo_clip", "prompts"),
        ("ppo", "ppo_clip", "prompts"),
        ("sft", "nll", "completions"),
        ("reward_model", "bradley_terry", "pairs"),
        ("preference", "dpo", "pairs"),
        ("preference", "kto", "labels"),
        ("preference", "apo_zero_unpaired", "labels"),
    ],
)
def test_the_kind_of_data_of_an_algorithm(name, loss, kind):
    config = default()
    config.algorithm.name, config.algorithm.loss = name, loss
    assert data_spec(config).kind == kind


def test_axolotls_datasets_are_sources(tokenizer):
    section = [
        {"path": "orca.jsonl", "split": "train", "type": "chatml.intel"},
        {
            "ds_type": "json",
            "data_files": ["ultra.jsonl"],
            "split": "train",
            "type": {"field_prompt": "prompt", "prompt_format": "Q: {prompt} A: "},
        },
    ]
    tokens = tokens_of(config_of(sources=section), tokenizer)
    assert tokens.shares is None
    found = texts(tokens.rows, tokenizer)
    assert found[0] == "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\nyes<|im_end|><|end|>"
    assert found[4:] == [f"Q: p{i} A: ja<|end|>" for i in range(3)]


def test_a_source_names_its_own_columns(folder, tokenizer):
    (folder / "asked.csv").write_text("prompt\na\n")
    (folder / "other.jsonl").write_text('{"question": "b", "prompt": "no"}\n')
    flag = "--config.data.sources=asked.csv,other.jsonl(prompt_key='question',weight=2)"
    made = tokens_of(load_flags([flag]).config, tokenizer)
    assert [row["prompt"] for row in made.rows] == ["a", "b"]
    assert made.shares == [(1, 1.0), (1, 2.0)]
    config = config_of("grpo", sources=("asked.csv(prompt_key='prompt')", "other.jsonl"), prompt_key="question")
    assert [row["prompt"] for row in tokens_of(config, tokenizer).rows] == ["a", "b"]
    (folder / "answers.jsonl").write_text('{"ask": "q", "say": "yes", "good": true}\n')
    config = config_of(sources=("answers.jsonl(prompt_key='ask',completion_key='say',label_key='good')",))
    config.algorithm.loss = "kto"
    (row,) = tokens_of(config, tokenizer).rows
    assert row["label"]
    with pytest.raises(ConfigError, match=r"asked.csv row 0: .* no column 'ask', which prompt_key .* has prompt"):
        tokens_of(config_of("grpo", sources=("asked.csv(prompt_key='ask')",)), tokenizer)
    with pytest.raises(ConfigError, match=r"prompt_key of 'asked.csv' is 3; it is the name of a column"):
        tokens_of(config_of("grpo", sources=("asked.csv(prompt_key=3)",)), tokenizer)


def test_prompts_of_all_sources_have_the_same_columns(tokenizer):
    """What rewards are given does not depend on the sources that a batch has rows of.

    Nor where they are streamed: a batch of rows with other columns than the one before would end the run.
    """
    write_rows("code.jsonl", [{"prompt": "c", "tests": "assert True"}])
    write_rows("math.jsonl", [{"prompt": "m", "answer": 1}])
    config = config_of("grpo", sources=("code.jsonl", "math.jsonl"), shuffle=False)
    rows = tokens_of(config, tokenizer).rows
    assert [(row["prompt"], row["tests"], row["answer"]) for row in rows] == [
        ("c", "assert True", None),
        ("m", None, 1),
    ]
    assert next(stream_of(config, tokenizer, batch_size=2, shuffle_buffer=2)) == rows


def test_streaming_logs_what_is_dropped(tokenizer, caplog):
    """Each time that twice as many rows have been read: a stream has no end to do it at."""
    rows = [{"prompt": "p", "completion": "c" * (1 + 9 * (i % 2))} for i in range(8)]
    write_rows("rows.jsonl", rows)
    config = config_of("sft", path="rows.jsonl", overlong="filter", max_length=5, shuffle=False)
    stream = stream_of(config, tokenizer, batch_size=4, shuffle_buffer=4)
    [next(stream) for _ in range(4)]
    stream.get_state()
    reports = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert reports[:3] == [f"dropped {n // 2} rows with more than 5 tokens, of {n}" for n in (4, 8, 16)]


def test_a_format_may_change_the_row_that_it_is_given(tokenizer):
    """Rows in memory are read more than once: to see what they have, as prompts, as examples."""
    Path("own.py").write_text(
        "def form(row):\n"
        "    row['messages'].append({'role': 'assistant', 'content': row.pop('answer')})\n"
        "    return row\n"
    )
    rows = [{"messages": [user("q")], "answer": "a"}]
    config = config_of("sft", format="own.py:form")
    sources = opening.open_sources(data_spec(config), tokenizer, rows)
    assert loading.is_learnable("completions", sources)
    made = loading.tokenized(data_spec(config), sources, "completions", tokenizer).rows
    assert made == tokens_of(config_of("sft"), tokenizer, dataset=[{"messages": [user("q"), assistant("a")]}]).rows
    assert sources[0].rows == rows == [{"messages": [user("q")], "answer": "a"}]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_pair_without_one_of_its_answers_is_named(tokenizer, streaming):
    write_rows("halves.jsonl", [{"prompt": "q", "chosen": "yes"}])
    config = config_of(path="halves.jsonl")
    config.algorithm.loss = "kto"
    with pytest.raises(ConfigError, match=r"halves.jsonl row 0: .*column 'rejected' is None; it takes text or a list"):
        next(stream_of(config, tokenizer, batch_size=1)) if streaming else tokens_of(config, tokenizer)


def test_streamed_text_that_is_no_unicode_is_named(tokenizer):
    rows = datasets.IterableDataset.from_generator(lambda: iter([{"prompt": "\ud83d"}]))
    with pytest.raises(ConfigError, match=r"row 0: half of a surrogate pair"):
        next(stream_of(config_of("grpo"), tokenizer, rows, batch_size=1))


def test_long_rows_are_split(tokenizer, caplog):
    """In memory and streamed; nothing is lost, and prompts of evaluations are not split."""
    write_rows("rows.jsonl", [{"text": "abcdefg"}, {"text": "hi"}, {"prompt": "pq", "completion": "rstu"}])
    config = config_of("sft", path="rows.jsonl", overlong="split", max_length=4, shuffle=False)
    rows = tokens_of(config, tokenizer).rows
    whole = tokens_of(config_of("sft", path="rows.jsonl"), tokenizer).rows
    for name in ("ids", "mask"):
        pieces = [list(row[name]) for row in rows]
        assert [token for piece in pieces for token in piece] == [token for row in whole for token in row[name]]
        assert [len(piece) for piece in pieces] == [4, len(whole[0]["ids"]) - 4, len(whole[1]["ids"]), 4, 3]
    assert "split 2 rows with more than 4 tokens, of 3" in caplog.text
    assert next(stream_of(config, tokenizer, batch_size=5, shuffle_buffer=3)) == rows
    with pytest.raises(ConfigError, match=r"the prompt has 4 tokens, more than rollout.max_prompt_length=2"):
        LimitedTokenizer(RowTokenizer("prompts", tokenizer), 2, "split")({"prompt": "pqrs"})
    assert "pieces" not in caplog.text
    with pytest.raises(ConfigError, match="and images, which are in one piece: raise that"):
        LimitedTokenizer(RowTokenizer("completions", tokenizer), 4, "split").apply_limit({**whole[0], "pixels": None})
    with pytest.raises(
        ConfigError, match=r"overlong is split, .* algorithm\.name is preference, whose rows stay whole"
    ):
        config_of("preference", overlong="split")


@pytest.mark.parametrize("streaming", [False, True])
def test_pieces_without_a_learned_token_are_dropped(tokenizer, caplog, streaming):
    """But not where the next piece sees them, in wrapped packing."""
    rows = [{"prompt": "abcdefghi", "completion": "jklm"}, {"prompt": "abcd", "completion": ""}]  # which is its end
    config = config_of("sft", overlong="split", max_length=4, shuffle=False)

    def split(**changes):
        if streaming:
            source = datasets.Dataset.from_list(rows).to_iterable_dataset()
            return next(stream_of(config, tokenizer, source, batch_size=2, shuffle_buffer=2, **changes))
        spec = replace(data_spec(config), **changes)
        return loading.tokenized(spec, opening.open_sources(spec, tokenizer, rows), spec.kind, tokenizer).rows

    made = split()
    assert [row["mask"] for row in made] == [[0, 1, 1, 1], [1, 1]]
    assert [tokenizer.decode(row["ids"]) for row in made] == ["ijkl", "m<|end|>"]
    assert streaming or "dropped 4 pieces" in caplog.text
    assert [row["mask"] for row in split(wrapped=True)][:2] == [[0, 0, 0, 0]] * 2
    if not streaming:
        rows[:] = rows[1:]
        with pytest.raises(ConfigError, match=r"no row is left to train on .*2 pieces of them have no token to learn"):
            split()


def test_a_part_of_rows_given_in_python(tokenizer):
    rows = [{"prompt": f"p{i}"} for i in range(10)]
    for data in (rows, datasets.Dataset.from_list(rows), datasets.DatasetDict(train=datasets.Dataset.from_list(rows))):
        for split, kept in (("train[:20%]", [0, 1]), ("train[8:]+train[:1]", [8, 9, 0]), ("train", range(10))):
            made = tokens_of(config_of("grpo", split=split), tokenizer, dataset=data)
            assert [row["prompt"] for row in made.rows] == [f"p{i}" for i in kept]
        config = config_of("grpo", split="train[8:]", deduplicate=True)
        (source,) = opening.open_sources(data_spec(config), tokenizer, data)
        assert isinstance(data, dict) or source.location(1) == "row 9"
    assert len(tokens_of(config_of("grpo", split="other[5:]"), tokenizer, dataset=rows).rows) == 5, "of any name"
    for split, message in (
        ("train+test", r"the split is 'train\+test', but rows given in Python are one: give a DatasetDict"),
        ("train[:3%]", "the data has 10 rows, and none in the split 'train.:3%.'"),
        ("train[:x]", "cannot load the data: .*train.:x."),
    ):
        with pytest.raises(ConfigError, match=message):
            tokens_of(config_of("grpo", split=split), tokenizer, dataset=rows)
    with pytest.raises(ConfigError, match="rows are streamed and not counted"):
        stream_of(
            config_of("grpo", split="train[:3]"), tokenizer, datasets.Dataset.from_list(rows).to_iterable_dataset()
        )


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("name", "row", "changed"),
    [
        ("sft", {"prompt": "q", "messages": [user("q"), assistant("a")]}, ["messages"]),  # UltraChat's
        ("sft", {"prompt": [user("q")], "messages": [user("q"), assistant("a")]}, ["messages"]),
        ("sft", {"prompt": [user("q")], "completion": [assistant("a")]}, ["prompt"]),
        (  # UltraFeedback's
            "preference",
            {"prompt": "q", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
            ["chosen", "rejected"],
        ),
        ("preference", {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}, ["prompt"]),
        ("preference", {"prompt": [user("q")], "chosen": "a", "rejected": "b"}, ["prompt"]),
        (
            "preference",
            {"prompt": [user("q")], "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
            ["prompt", "chosen", "rejected"],
        ),
        ("grpo", {"prompt": [user("q")], "chosen": [user("q"), assistant("a")]}, ["prompt"]),
        ("grpo", {"messages": [user("q"), assistant("a")]}, ["prompt"]),
    ],
)
def test_a_system_prompt_comes_before_what_is_read(tokenizer, name, row, changed):
    """Whatever else a row holds: a text `prompt` beside conversations is not what such data begins with."""
    (plain,), (prompted,) = (
        opening.open_sources(data_spec(config_of(name, system_prompt=system)), tokenizer, [row])
        for system in (None, "Be brief.")
    )
    made, example = plain.form(plain.rows[0]), prompted.form(prompted.rows[0])
    assert example == {**made, **{column: [SYSTEM, *made[column]] for column in changed}}
    (tokens,) = tokens_of(config_of(name, system_prompt="Be brief."), tokenizer, dataset=[row]).rows
    for column in tokens.keys() & {"ids", "chosen_ids", "rejected_ids", "prompt_ids"}:
        assert tokenizer.decode(tokens[column]).startswith("<|system|>Be brief.<|end|><|user|>q<|end|><|assistant|>")


def test_a_system_prompt_comes_before_a_gold_completion_too(tokenizer):
    config = config_of("preference", system_prompt="Be brief.")
    config.algorithm.loss = "tpo"
    row = {name: [user("q"), assistant(name)] for name in ("chosen", "rejected", "reference")}
    (tokens,) = tokens_of(config, tokenizer, dataset=[row]).rows
    for name in row:
        text = f"<|system|>Be brief.<|end|><|user|>q<|end|><|assistant|>{name}"
        assert tokenizer.decode(tokens[f"{name}_ids"]).startswith(text)


@pytest.mark.parametrize(
    ("name", "row", "column"),
    [
        ("sft", {"messages": None, "prompt": "q", "completion": "a"}, "prompt"),
        ("sft", {"text": "q"}, "text"),
        ("sft", {"input_ids": [97]}, "input_ids"),
        ("preference", {"chosen": "qa", "rejected": "qb"}, "chosen"),
        ("grpo", {"prompt": "q", "messages": [user("q"), assistant("a")]}, "prompt"),
    ],
)
def test_a_system_prompt_is_for_conversations(tokenizer, name, row, column):
    with pytest.raises(ConfigError, match=rf"the row begins with .* \(its {column}\), which is none"):
        tokens_of(config_of(name, system_prompt="Be brief."), tokenizer, dataset=[row])


def test_the_prompts_of_pairs_are_those_that_are_learned(tokenizer):
    """A text beside whole conversations, as in UltraFeedback, is read by neither training nor its evaluation."""
    turns = [SYSTEM, user("q")]
    row = {"prompt": "q", "chosen": [*turns, assistant("a")], "rejected": [*turns, assistant("b")]}
    (pair,) = tokens_of(config_of(), tokenizer, dataset=[row]).rows
    (asked,) = tokens_of(config_of(), tokenizer, dataset=[row], prompts=True).rows
    assert asked["prompt_ids"] == pair["chosen_ids"][: pair["chosen_mask"].index(1)]
    assert asked["prompt"] == turns
    (asked,) = tokens_of(config_of("grpo"), tokenizer, dataset=[row]).rows
    assert asked["prompt"] == "q"
    row = {"prompt": "q", "messages": [*turns, assistant("a")]}  # as in UltraChat
    (learned,) = tokens_of(config_of("sft"), tokenizer, dataset=[row]).rows
    (asked,) = tokens_of(config_of("sft"), tokenizer, dataset=[row], prompts=True).rows
    assert asked["prompt_ids"] == learned["ids"][: learned["mask"].index(1)]
    (asked,) = tokens_of(config_of("grpo"), tokenizer, dataset=[row]).rows
    assert asked["prompt"] == "q"


def test_sources_as_flags_and_in_json(tokenizer):
    flag = "--config.data.sources=orca.jsonl(format='chatml.intel',weight=3),ultra.jsonl"
    others = [f"--config.algorithm.{value}" for value in ("name=preference", "loss=dpo", "beta=1")]
    config = load_flags([flag, *others]).config
    assert config.data.sources == ("orca.jsonl(format='chatml.intel',weight=3)", "ultra.jsonl")
    assert tokens_of(config, tokenizer).shares == [(4, 3.0), (3, 1.0)]
    config.data.sources = ({"path": "orca.jsonl", "type": "chatml.intel"},)
    again = from_json(to_json(config))
    assert [dict(source) for source in again.data.sources] == [{"path": "orca.jsonl", "type": "chatml.intel"}]


def test_a_file_type_in_place_of_the_path(folder, tokenizer):
    (folder / "rows.txt").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
    for source in ({"path": "json", "data_files": "rows.txt"}, {"ds_type": "json", "data_files": ["rows.txt"]}):
        assert texts(tokens_of(config_of(sources=[source]), tokenizer).rows, tokenizer) == ["pa<|end|>"]


def test_options_beside_the_path(tokenizer):
    source = {"path": "orca.jsonl", "type": "user_defined.default", "field_prompt": "question"}
    assert texts(tokens_of(config_of(sources=[source]), tokenizer).rows, tokenizer)[0] == "q0yes<|end|>"
    with pytest.raises(ConfigError, match=r"data.sources, orca.jsonl: .* has no option 'splitt'.* closest is split"):
        tokens_of(config_of(sources=[{"path": "orca.jsonl", "type": "chatml.intel", "splitt": "train"}]), tokenizer)
    with pytest.raises(ConfigError, match=r"which names no data; give it a path or data_files"):
        tokens_of(config_of(sources=[{"type": "chatml"}]), tokenizer)
    for weight in (0, math.nan, math.inf, True):
        with pytest.raises(ConfigError, match=rf"the weight of 'orca.jsonl' is {weight}; it is a number above 0"):
            tokens_of(config_of(sources=[{"path": "orca.jsonl", "weight": weight}]), tokenizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": (3,)}, r"data.sources is \(3,\), but it takes a list, each a path or a dictionary"),
        ({"sources": ({"path": "a", "format": len},)}, "cannot be written to a file .* name functions by their file"),
        ({"sources": ("a(weight=2)",), "packing": True}, "mixed by weight, which data.packing would undo"),
        ({"streaming": True, "precompute_reference": True}, "data.precompute_reference needs all rows before"),
        ({"streaming": True, "deduplicate": True}, "data.deduplicate needs all rows before"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ConfigError, match=message):
        config_of("sft", **settings)


def test_a_mixture_keeps_weights_and_resumes():
    examples = [f"a{i}" for i in range(10)] + [f"b{i}" for i in range(4)]
    make = lambda **more: Pipeline(examples, 8, seed=1, shares=[(10, 1.0), (4, 3.0)], **more)  # noqa: E731
    pipeline = make()
    seen = [one for _ in range(10) for one in next(pipeline)]
    assert Counter(one[0] for one in seen) == {"a": 20, "b": 60}
    # Each source has its own epochs: nothing is skipped, nothing comes twice before all have come.
    first = [one for one in seen if one[0] == "a"][:10]
    assert sorted(first) == examples[:10]
    again = make()
    again.set_state(json.loads(json.dumps(pipeline.get_state())))
    rest = [next(pipeline) for _ in range(5)]
    assert [next(again) for _ in range(5)] == rest
    halves = [make(process_index=index, process_count=2) for index in (0, 1)]
    assert [one for half in halves for one in next(half)] == seen[:8]
    with pytest.raises(ConfigError, match=r"belongs to shares="):
        Pipeline(examples, 8, seed=1, shares=[(10, 1.0), (4, 2.0)]).set_state(pipeline.get_state())


def test_errors_name_file_row_and_columns(folder, tokenizer):
    with pytest.raises(ConfigError, match=re.escape("orca.jsonl row 0: the format chatml.icr looks for 'input'; the")):
        tokens_of(config_of(format="chatml.icr"), tokenizer)
    rows = [*ULTRA, {"prompt": "p", "chosen": None, "rejected": "b"}]
    write_rows("holes.jsonl", rows)
    with pytest.raises(ConfigError, match=r"holes.jsonl row 3: column 'chosen' is None; it takes text or a list"):
        tokens_of(config_of(path="holes.jsonl"), tokenizer)
    code = "def form(row):\n    return {'prompt': row['answer' if row['question'] == 'q2' else 'question']}\n"
    (folder / "own.py").write_text(code)
    with pytest.raises(ConfigError, match=r"orca.jsonl row 2: the format failed: KeyError: 'answer'"):
        tokens_of(config_of("grpo", format="own.py:form"), tokenizer)
    (folder / "none.py").write_text("def form(row):\n    return {'prompt': row['answer']}\n")
    with pytest.raises(ConfigError, match=r"orca.jsonl row 0: the format failed: KeyError: 'answer'"):
        stream_of(config_of("grpo", format="none.py:form"), tokenizer)
    fits = re.escape("formats that read this row (data.format): chatml.default, chatml.intel, llama3.default, ")
    with pytest.raises(ConfigError, match=rf"row 0: .* share no beginning to be the prompt; .*; {fits}"):
        tokens_of(config_of(), tokenizer)
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert fitting(pair, "pairs") and not fitting(pair, "triples"), "no format makes a gold completion of a pair"
    with pytest.raises(ConfigError, match=r"data.format: unknown data format 'chatm' for pairs"):
        tokens_of(config_of(format="chatm"), tokenizer)


def test_prompts_of_any_format(tokenizer):
    config = config_of(format="chatml.intel")
    tokens = tokens_of(config, tokenizer, prompts=True)
    assert texts(tokens.rows, tokenizer, "prompt_ids")[1].endswith("q1<|im_end|>\n<|im_start|>assistant\n")
    assert tokens.rows[0]["chosen"] == "yes<|im_end|>"


def test_kto_reads_pairs_as_two_rows(tokenizer):
    config = config_of(format="dpo.chatml.intel")
    config.algorithm.loss = "kto"
    rows = tokens_of(config, tokenizer).rows
    assert [row["label"] for row in rows[:4]] == [True, False, True, False]
    assert tokenizer.decode(rows[1]["ids"]).endswith("no<|im_end|><|end|>")


def test_held_out_rows(tokenizer):
    orca = "orca.jsonl(eval_split='train', format='chatml.intel')"  # four rows; ultra.jsonl has three
    config = config_of(sources=[orca, "ultra.jsonl(eval_split='train')"])
    spec = data_spec(config)
    sources = loading.first_rows(opening.open_sources(spec, tokenizer, held_out=True), 5)
    assert [len(source.rows) for source in sources] == [3, 2]
    in_memory = loading.tokenized(spec, sources, "pairs", tokenizer).rows
    spec = replace(spec, streaming=True)
    sources = loading.first_rows(opening.open_sources(spec, tokenizer, held_out=True), 5)
    assert isinstance(sources[0].rows, datasets.IterableDataset)
    assert loading.tokenized(spec, sources, "pairs", tokenizer).rows == in_memory
    spec = replace(spec, streaming=False, eval_path="ultra.jsonl", eval_split="train")
    assert [source.name for source in opening.open_sources(spec, tokenizer, held_out=True)] == ["ultra.jsonl"]


def test_a_file_to_evaluate_on_needs_no_split(folder, tokenizer):
    """It has one. Data that is trained on is left out all the same, as are splits that are asked for."""
    config = config_of(eval_path="ultra.jsonl")
    held_out = lambda config: opening.open_sources(data_spec(config), tokenizer, held_out=True)  # noqa: E731
    assert [len(source.rows) for source in held_out(config)] == [3]
    datasets.DatasetDict(dev=datasets.Dataset.from_list(ULTRA)).save_to_disk(folder / "saved")
    config.data.eval_path = "saved"
    assert [len(source.rows) for source in held_out(config)] == [3]
    parts = opening.open_sources(data_spec(config), tokenizer, held_out=True, named=[{"path": "ultra.jsonl"}])
    assert [len(part.rows) for part in parts] == [3]
    config.data.eval_path = None
    assert held_out(config) == held_out(config_of(sources=("orca.jsonl", "ultra.jsonl"))) == []
    for settings in ({"eval_path": "ultra.jsonl", "eval_split": "test"}, {"eval_path": "orca.jsonl"}):
        with pytest.raises(ConfigError, match=r"is one file and has only the split 'train', not 'test'"):
            held_out(config_of(**settings))


def test_the_configuration_is_that_of_the_data_that_is_trained_on(folder, tokenizer):
    (folder / "own.py").write_text("def rows(name, split):\n    return [{'prompt': str(name)}]\n")
    for paths, name in (
        ({"path": "own.py:rows"}, "main"),
        ({"path": "own.py:rows", "eval_path": "own.py:rows"}, "main"),
        ({"path": "orca.jsonl", "eval_path": "own.py:rows"}, "None"),
    ):
        config = config_of("grpo", **paths)
        config.data.name = "main"
        (source,) = opening.open_sources(data_spec(config), tokenizer, held_out=True)
        assert source.rows == [{"prompt": name}]


def test_template_options_of_the_config(tokenizer, tokenizer_folder):
    template = "{%- for m in messages -%}{{- m.content -}}{%- endfor -%}{{- mood | default('') -}}"
    tokenizer = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=template)
    given = [{"prompt": [{"role": "user", "content": "hi"}]}]
    config = config_of("grpo", chat_template_kwargs="mood='!', enable_thinking=False")
    assert texts(tokens_of(config, tokenizer, dataset=given).rows, tokenizer, "prompt_ids") == ["hi!"]
    with pytest.raises(ConfigError, match=r"cannot read the options"):
        config_of(chat_template_kwargs="mood")


def test_a_format_of_another_model_is_noted(tokenizer, chatml_tokenizer, caplog):
    tokens_of(config_of(format="chatml.intel"), chatml_tokenizer)
    assert "no single token" not in caplog.text
    tokens_of(config_of(format="dpo.chatml.intel"), tokenizer)
    assert "writes <|im_end|>, which is no single token of this tokenizer" in caplog.text


def test_in_memory_threads_and_preferences(tokenizer):
    thread = [("user", "Q"), ("assistant", "yes")]
    config = config_of("sft")
    (row,) = tokens_of(config, tokenizer, dataset=[thread]).rows
    assert tokenizer.decode(row["ids"]) == "<|user|>Q<|end|><|assistant|>yes<|end|>"
    pair = (thread, [("user", "Q"), ("assistant", "no")])
    (row,) = tokens_of(config_of(), tokenizer, dataset=[pair]).rows
    assert tokenizer.decode(row["rejected_ids"]) == "<|user|>Q<|end|><|assistant|>no<|end|>"
    (row,) = tokens_of(config_of("grpo"), tokenizer, dataset=[thread[:1]]).rows
    assert tokenizer.decode(row["prompt_ids"]) == "<|user|>Q<|end|><|assistant|>"


def test_threads_keep_order_and_errors(tokenizer):
    given = [{"prompt": "p" * (i % 7 + 1), "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(600)]
    one, four = (config_of(workers=workers, max_length=11, overlong="filter") for workers in (1, 4))
    assert tokens_of(one, tokenizer, dataset=given).rows == tokens_of(four, tokenizer, dataset=given).rows
    given[411]["chosen"] = None
    for config in (one, four):
        with pytest.raises(ConfigError, match=r"^row 411: column 'chosen' is None"):
            tokens_of(config, tokenizer, dataset=given)


def test_streaming_gives_the_same_rows(tokenizer):
    config = config_of(sources=["orca.jsonl(format='user_defined(field_prompt=\"question\")')"], shuffle=False)
    in_memory = tokens_of(config, tokenizer).rows
    spec = replace(data_spec(config), streaming=True, shuffle_buffer=3, batch_size=2)
    sources = opening.open_sources(spec, tokenizer)
    # Looking at the first row takes nothing away.
    assert loading.columns(sources[0]).keys() >= {"prompt", "chosen", "rejected"}
    stream = loading.stream(spec, sources, "pairs", tokenizer)
    assert [row for _ in range(4) for row in next(stream)] == in_memory * 2
    state = stream.get_state()
    rest = [next(stream) for _ in range(3)]
    again = stream_of(config, tokenizer, shuffle_buffer=3, batch_size=2)
    again.set_state(json.loads(json.dumps(state)))
    assert [next(again) for _ in range(3)] == rest


def test_shuffled_streams_that_can_be_resumed(tokenizer):
    """Of shuffled files the state says all; the rows in a buffer are in no state."""
    rows = datasets.Dataset.from_list([{"prompt": "p", "completion": str(i)} for i in range(12)])
    plain = rows.to_iterable_dataset(num_shards=4)
    spec = replace(data_spec(config_of("sft", shuffle=False)), streaming=True, batch_size=2, shuffle_buffer=3)

    def begun(given):
        return loading.stream(spec, opening.open_sources(spec, tokenizer, given), "completions", tokenizer)

    stream, in_order = begun(plain.shuffle(seed=1, buffer_size=1)), begun(plain)
    assert [next(stream) for _ in range(2)] != [next(in_order) for _ in range(2)]
    state = json.loads(json.dumps(stream.get_state()))
    rest = [next(stream) for _ in range(4)]
    again = begun(plain.shuffle(seed=1, buffer_size=1))
    again.set_state(state)
    assert [next(again) for _ in range(4)] == rest
    shuffled = plain.shuffle(seed=1, buffer_size=5)
    for given in (
        shuffled,
        shuffled.map(lambda row: row).skip(1),
        datasets.concatenate_datasets([plain, shuffled]),
        datasets.interleave_datasets([plain, shuffled]),
    ):
        with pytest.raises(ConfigError, match=r"a buffer of 5 rows, .*: leave this to data.shuffle_buffer"):
            begun(given)
    held_out = opening.open_sources(spec, tokenizer, shuffled, held_out=True)  # of which nothing is resumed
    assert len(list(loading.first_rows(held_out, 3)[0].rows)) == 3


def test_a_function_that_gives_a_stream_needs_streaming(folder, tokenizer):
    (folder / "mine.py").write_text(
        "import datasets\n"
        "def rows():\n"
        "    made = [{'prompt': 'p', 'completion': 'c'}]\n"
        "    return datasets.Dataset.from_list(made).to_iterable_dataset()\n"
    )
    config = config_of("sft", path="mine.py:rows")
    with pytest.raises(ConfigError, match=r"mine.py:rows gives a stream .*: set data.streaming to true"):
        tokens_of(config, tokenizer)
    stream = stream_of(config, tokenizer, batch_size=1, shuffle_buffer=1)
    assert tokenizer.decode(next(stream)[0]["ids"][:2]) == "pc"


@pytest.mark.parametrize("streaming", [False, True])
def test_streaming_without_weights_takes_every_row_once(tokenizer, streaming):
    for name, count in (("few", 2), ("many", 18)):
        write_rows(f"{name}.jsonl", [{"prompt": name[0], "completion": str(i)} for i in range(count)])
    config = config_of("sft", sources=("few.jsonl", "many.jsonl"), shuffle=False, shuffle_buffer=20)
    made = next(stream_of(config, tokenizer, batch_size=20)) if streaming else tokens_of(config, tokenizer).rows
    assert [tokenizer.decode(row["ids"][:1]) for row in made] == ["f"] * 2 + ["m"] * 18
    mixed = next(stream_of(config, tokenizer, batch_size=20, sources=("few.jsonl(weight=1)", "many.jsonl")))
    assert Counter(tokenizer.decode(row["ids"][:1]) for row in mixed) == {"f": 10, "m": 10}


def calling(name, argument):
    """A conversation whose answer calls a tool."""
    properties = {argument: {"type": "string"}}
    tool = {"name": name, "description": "", "parameters": {"type": "object", "properties": properties}}
    call = {"type": "function", "function": {"name": name, "arguments": {argument: "x"}}}
    messages = [{"role": "user", "content": "w?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    options = {"modes": {argument: 1}}
    return {"messages": messages, "tools": [{"type": "function", "function": tool}], "chat_template_kwargs": options}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["list", "table", "parquet", "jsonl"])
def test_keys_of_other_rows_are_not_shown(folder, tokenizer, tokenizer_folder, kind, streaming):
    """Arrow storage gives every object the keys of all others at its place."""
    template = (
        "{{ tools | tojson }}{{ modes | tojson }}{%- for m in messages -%}[{{ m.role }}]{{ m.content or '' }}"
        "{%- for c in m.tool_calls or [] -%}{{ c.function.arguments | tojson }}{%- endfor -%}<|end|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
    )
    tokenizer = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=template)
    rows = [calling("a", "city"), calling("b", "unit")]
    datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    write_rows("rows.jsonl", rows)
    given = {"list": rows, "table": datasets.Dataset.from_list(rows)}.get(kind)
    config = config_of("sft", path=f"rows.{kind}", shuffle=False, shuffle_buffer=2)
    if streaming:
        made = next(stream_of(config, tokenizer, given, batch_size=2))
    else:
        made = tokens_of(config, tokenizer, dataset=given).rows
    for row, argument in zip(made, ("city", "unit"), strict=True):
        text = tokenizer.decode(row["ids"])
        assert "null" not in text
        assert f'"properties": {{"{argument}": {{"type": "string"}}}}' in text
        assert text.endswith(f'{{"{argument}": 1}}[user]w?<|end|>[assistant]{{"{argument}": "x"}}<|end|>')


def test_keys_of_none_in_a_list_are_kept(tokenizer, tokenizer_folder):
    template = "{%- for m in messages -%}{{- m.calls | tojson -}}{%- endfor -%}"
    tokenizer = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=template)
    rows = [{"prompt": [{"role": "user", "content": "a", "calls": [{"unit": None}]}]}]
    (row,) = tokens_of(config_of("grpo"), tokenizer, dataset=rows).rows
    assert tokenizer.decode(row["prompt_ids"]) == '[{"unit": null}]'


# --- the cache --------------------------------------------------------------------------------------------------------


def refuse(*_, **__):
    raise AssertionError("tokenised again")


@pytest.mark.parametrize("name", ["preference", "sft", "grpo"])
def test_the_second_run_reads_the_cache(folder, tokenizer, monkeypatch, name):
    formats = {"preference": "chatml.intel", "sft": "own.py:form", "grpo": "own.py:form"}
    (folder / "own.py").write_text("def form(row):\n    return {'prompt': row['question'], 'completion': 'c' * 9}\n")
    limits = {"overlong": "filter", "cache": str(folder / "tokens")}
    config = config_of(name, format=formats[name], **limits)
    first = tokens_of(config, tokenizer)
    (file,) = (folder / "tokens").iterdir()
    monkeypatch.setattr(LimitedTokenizer, "token_row", refuse)
    again = tokens_of(config, tokenizer)
    assert again.rows == first.rows
    assert again.reports[0].read == first.reports[0].read > 0
    # Everything that changes the rows changes the file.
    others = [{"max_length": 7}, {"overlong": "truncate_left"}, {"chat_template_kwargs": "a=1"}]
    for other in others[1:] if name == "grpo" else others:
        with pytest.raises(AssertionError, match=r"tokenised again"):
            tokens_of(config_of(name, format=formats[name], **{**limits, **other}), tokenizer)
    if name != "preference":
        (folder / "own.py").write_text("def form(row):\n    return {'prompt': row['question'], 'completion': 'd'}\n")
        with pytest.raises(AssertionError, match=r"tokenised again"):
            tokens_of(config, tokenizer)
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    (folder / "own.py").write_text("def form(row):\n    return {'prompt': row['question'], 'completion': 'c' * 9}\n")
    kept = file.read_bytes()
    for damaged in (b"broken", kept[:-40], kept[: len(kept) // 2], kept.replace(b"counts", b"counst"), b""):
        file.write_bytes(damaged)
        assert tokens_of(config, tokenizer).rows == first.rows
        with np.load(file) as mended:
            assert mended["counts"][0] == first.reports[0].read


def test_the_cache_keeps_what_was_truncated_of_labelled_rows(tokenizer, tmp_path):
    tokenize = LimitedTokenizer(RowTokenizer("labels", tokenizer), 8, "truncate_right")
    answers = [("1", True), ("123456789", False), ("12", True), ("1" * 30, True)]
    rows = [tokenize({"prompt": "sort=", "completion": text, "label": label}) for text, label in answers]
    assert [len(row.get("rest_ids", ())) for row in rows] == [0, 7, 0, 8] and rows[1]["rest_mask"] == [1] * 7
    cache.save(tmp_path / "rows.npz", tokenize, list(enumerate(rows)))
    again = LimitedTokenizer(RowTokenizer("labels", tokenizer), 8, "truncate_right")
    assert cache.load(tmp_path / "rows.npz", again, []) == rows


@pytest.mark.parametrize(("form", "kept"), [("chatml.intel", True), ("own.py:form", False)])
def test_rows_of_a_format_of_the_users_own_are_not_kept_unasked(folder, tokenizer, monkeypatch, form, kept):
    """What it imports may change while its file does not."""
    monkeypatch.setenv("JAXRL_LLM_CACHE", str(folder / "auto"))
    monkeypatch.setattr(cache, "LARGE", 1)
    (folder / "own.py").write_text("def form(row):\n    return {**row, 'prompt': row['question']}\n")
    tokens_of(config_of(format=form), tokenizer)
    assert (folder / "auto").is_dir() == kept


def test_rows_for_a_teacher_with_another_tokenizer_keep_their_prompt(folder, tokenizer, chatml_tokenizer, monkeypatch):
    """In the cache they have none, and get it from the data again; of messages the last one is the completion."""
    (folder / "own.py").write_text(
        "def form(row):\n    return {'prompt': row['question'], 'completion': 'c', 'tools': None}\n"
        "def chat(row):\n"
        "    texts = [('user', row['question']), ('assistant', 'a'), ('user', 'b'), ('assistant', 'c')]\n"
        "    return {'messages': [{'role': role, 'content': text} for role, text in texts]}\n"
        "def plain(row):\n    return {'text': row['question']}\n"
    )
    config = config_of("sft", format="own.py:form", cache=str(folder / "tokens"))
    without = tokens_of(config, tokenizer).rows
    config.teacher.form = "uld"
    first = tokens_of(config, tokenizer)
    assert [row["ids"] for row in first.rows] == [row["ids"] for row in without]
    assert all(set(row) == {"ids", "mask", "prompt", "tools"} for row in first.rows)
    assert tokenizer.decode(first.rows[0]["ids"]).startswith(first.rows[0]["prompt"])
    monkeypatch.setattr(LimitedTokenizer, "token_row", refuse)
    assert tokens_of(config, tokenizer).rows == first.rows
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    config.data.format = "own.py:chat"
    row = tokens_of(config, chatml_tokenizer).rows[0]
    assert [message["content"] for message in row["prompt"]][1:] == ["a", "b"]
    learned = [token for token, on in zip(row["ids"], row["mask"], strict=True) if on]
    assert chatml_tokenizer.decode(learned).startswith("c")
    config.data.format = "own.py:plain"
    with pytest.raises(ConfigError, match=r"a teacher with another tokenizer \(teacher.form = uld\) reads prompt and"):
        tokens_of(config, tokenizer)


def test_cache_files_differ_by_their_inputs(folder, tokenizer, chatml_tokenizer):
    spec = data_spec(config_of())
    first, second = (loading.limited_tokenizer(spec, "pairs", one) for one in (tokenizer, chatml_tokenizer))
    tables = [datasets.Dataset.from_list(rows) for rows in (ULTRA, ULTRA[:2], ULTRA)]
    key = ("auto", {}, "pairs")
    files = [cache.file_of("x", table, key, b"", first) for table in tables]
    assert files[0] == files[2] != files[1]
    others = [("x", key, b"", second), ("x", key, b"code", first), ("x", ("auto", {}, "labels"), b"", first)]
    for setting, *rest in others:
        assert cache.file_of(setting, tables[0], *rest) not in (None, files[0])
    rows = [[dict(row) for row in table] for table in tables]
    files = [cache.file_of("x", each, key, b"", first) for each in rows]
    assert files[0] == files[2] != files[1]
    assert cache.file_of("x", [{"prompt": refuse, "own": lambda: None}], key, b"", first) is None
    for setting, code in (("auto", b""), ("none", b""), ("x", None)):
        assert cache.file_of(setting, tables[0], key, code, first) is None


def test_several_readers_share_one_cache(folder, tokenizer):
    config = config_of(format="chatml.intel", cache=str(folder / "tokens"))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: tokens_of(config, tokenizer).rows, range(8)))
    assert all(rows == found[0] for rows in found)
    assert [file.suffix for file in (folder / "tokens").iterdir()] == [".npz"]


def test_a_cache_that_cannot_be_written(folder, tokenizer, monkeypatch, caplog):
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write token rows to data.cache = 'file'"):
        tokens_of(config_of(format="chatml.intel", cache="file"), tokenizer)
    # Of one that nobody asked for, as in a home that is read-only, this is no reason to stop.
    monkeypatch.setenv("JAXRL_LLM_CACHE", "file")
    monkeypatch.setattr(cache, "LARGE", 1)
    assert len(tokens_of(config_of(format="chatml.intel"), tokenizer).rows) == 4
    assert "cannot write token rows to data.cache = 'file'" in caplog.text
