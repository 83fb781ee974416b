"""The model card: what the hub reads of it, what it says of a run, and what it keeps to itself."""

import importlib
import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, to_json
from jaxrl_llm.tools.cards.card import evaluations, write_card
from jaxrl_llm.tools.cards.clean import HIDDEN, in_words, shareable
from jaxrl_llm.tools.cards.curves import curves_svg
from jaxrl_llm.tools.cards.origin import base_of, datasets_of
from jaxrl_llm.tools.report.runs import run_of
from jaxrl_llm.training.checkpoint.outputs import check_outputs, given_in_words, given_to, write_given
from jaxrl_llm.training.logging.origin import write_start

LINES = [
    {"step": 0, "time": 1.0, "eval/accuracy": 0.25, "eval/pass@4": 0.5},
    {"step": 1, "time": 2.0, "reward": 0.5, "loss": 1.0},
    {"step": 2, "time": 3.0, "reward": 0.75, "loss": 0.5, "eval/accuracy": 0.75, "eval/pass@4": 1.0},
    {"step": 3, "time": 3.0, "reward": 1.0, "loss": 0.25, "eval/accuracy": 0.875, "eval/pass@4": 1.0},
]


@pytest.fixture
def run(tmp_path):
    """A function that makes the folder of a run with these settings, without training, and an exported folder in it."""

    def make(lines=LINES, adapter=False, **settings) -> Path:
        config = default()
        for name, value in settings.items():
            section, _, leaf = name.replace("__", ".").rpartition(".")
            (config[section] if section else config)[leaf] = value
        folder = tmp_path / "my-run"
        (folder / "hf").mkdir(parents=True)
        (folder / "config.json").write_text(to_json(config))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "hf" / ("adapter_config.json" if adapter else "config.json")).write_text("{}")
        return folder

    return make


def card_of(folder: Path, step=3, **options) -> ModelCard:
    write_card(folder / "hf", folder, step, **options)
    return ModelCard.load(folder / "hf" / "README.md")


# --- of a run that was trained ---


def test_the_card_of_a_trained_model(tiny_run):
    folder = tiny_run.output_dir / "hf"
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.license == "apache-2.0" and card.data.base_model is None
    assert {"jaxrl_llm", "grpo"} <= set(card.data.tags)
    measured = {result.metric_name: result.metric_value for result in card.data.eval_results}
    last = tiny_run.metrics[-1]
    assert measured == pytest.approx({name: last[name] for name in last if name.startswith("eval/")}, rel=1e-5)
    assert {result.dataset_type for result in card.data.eval_results} == {"task:sort"}
    assert "made from `embedded:sort` by 2 steps of grpo" in card.text
    assert "| `rollout.group_size` | `4` |" in card.text
    assert "output_dir" not in card.text and "logging.backends" not in card.text
    assert str(tiny_run.output_dir.parent) not in card.text and "/tmp" not in card.text
    root = ET.parse(folder / "curves.svg").getroot()
    assert root.tag.endswith("svg") and "http" not in (folder / "curves.svg").read_text().replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_exported_earlier_steps_say_so(tiny_run, tmp_path):
    folder = jaxrl_llm.export(tiny_run.output_dir, tmp_path / "first", step=1)
    card = ModelCard.load(folder / "README.md")
    assert "by 1 step of grpo" in card.text
    assert [r.metric_value for r in card.data.eval_results if r.metric_name == "eval/accuracy"] == pytest.approx(
        [tiny_run.metrics[0]["eval/accuracy"]], rel=1e-5
    )


# --- what it says ---


def test_results_are_those_up_to_the_step(run):
    folder = run()
    found = run_of(folder)
    assert evaluations(found, 3) == [
        (0, {"eval/accuracy": 0.25, "eval/pass@4": 0.5}),
        (3, {"eval/accuracy": 0.875, "eval/pass@4": 1.0}),
    ]
    assert [step for step, _ in evaluations(found, 1)] == [0]
    card = card_of(folder, step=2)
    assert "| eval/accuracy | 0.25 | 0.75 |" in card.text and "| Reward (`reward`) | 0.75 |" in card.text
    assert "| metric | step 0 | step 2 |" in card.text


def test_what_trained_a_step_and_what_it_trained(run):
    """Whatever writes the card, months later."""
    folder = run(model__trainable=("model.layers.1.",), model__freeze_router=True)
    starts = [
        {"step": 0, "versions": {"jaxrl_llm": "0.1", "jax": "0.2"}},
        {"step": 2, "versions": {"jaxrl_llm": "0.3", "jax": "0.4"}},
    ]
    (folder / "starts.json").write_text(json.dumps(starts))
    early, late = (card_of(folder, step=step).text for step in (2, 3))
    assert "by 2 steps of grpo with jaxrl_llm 0.1." in early and "| versions | jaxrl_llm 0.1, jax 0.2, " in early
    assert "by 3 steps of grpo with jaxrl_llm 0.3." in late and "| versions | jaxrl_llm 0.3, jax 0.4, " in late
    assert "| trained | what `model.trainable` and `model.freeze_router` leave |" in late
    (folder / "hf" / "config.json").write_text('{"vision_config": {}}')
    assert "`model.freeze_router` and `model.vision` leave |" in card_of(folder).text


def test_named_sets_are_told_apart(run):
    line = {"step": 0, "eval/easy/accuracy": 0.5, "eval/hard/accuracy": 0.25, "eval/hard/pass@4": 0.75}
    sets = ("easy=task:sort", {"set": "hard", "path": "openai/gsm8k", "name": "main", "split": "validation"})
    card = card_of(run(lines=[line], eval__sets=sets))
    found = {r.metric_name: (r.dataset_type, r.dataset_split, r.metric_type) for r in card.data.eval_results}
    assert found == {
        "eval/easy/accuracy": ("task:sort", "test", "accuracy"),
        "eval/hard/accuracy": ("openai/gsm8k", "validation", "accuracy"),
        "eval/hard/pass@4": ("openai/gsm8k", "validation", "pass@4"),
    }
    assert "On easy: `task:sort` (split test), hard: `openai/gsm8k` (split validation), held out" in card.text


def test_the_results_of_a_run_on_several_sources_are_of_these(run):
    sources = ("org/a(eval_split='dev')", {"path": "json", "data_files": ["b.jsonl"]})
    assert "On `org/a` (split dev), held out" in card_of(run(data__sources=sources)).text  # the file has no test


def test_a_file_has_one_split(run):
    sets = ("a=b.jsonl", "a=c.jsonl(split='train[:9]')")
    card = card_of(run(lines=[{"step": 0, "eval/a/accuracy": 0.5}], data__path="org/a", eval__sets=sets))
    assert "On a: `b.jsonl, c.jsonl` (split train, train[:9]), held out" in card.text


def test_a_run_without_metrics_has_a_card(run):
    card = card_of(run(lines=[]))
    assert "The run kept no metrics." in card.text and card.data.eval_results is None
    assert "curves.svg" not in card.text


def test_hub_ids_and_their_licence(run, tmp_path, monkeypatch):
    folder = run(model__path="Qwen/Qwen3-0.6B", data__path="openai/gsm8k", data__name="main", algorithm__name="grpo")
    cached = tmp_path / "cache"
    cached.mkdir()
    (cached / "config.json").write_text("{}")
    (cached / "README.md").write_text("---\nlicense: apache-2.0\nlicense_link: https://example.com/LICENSE\n---\n")
    hub = importlib.import_module("huggingface_hub")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda repo, name: str(cached / name))
    card = card_of(folder)
    assert card.data.base_model == "Qwen/Qwen3-0.6B" and card.data.datasets == ["openai/gsm8k"]
    assert card.data.license == "apache-2.0" and "See" not in card.text
    assert "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B)" in card.text
    (cached / "README.md").write_text("---\nlicense: other\nlicense_name: l\nlicense_link: LICENSE\n---\n")
    assert card_of(folder).data.license_link == "https://huggingface.co/Qwen/Qwen3-0.6B"
    (cached / "LICENSE.txt").write_text("words")
    assert card_of(folder).data.license_link == "LICENSE"
    assert (folder / "hf" / "LICENSE").read_text() == "words"
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda repo, name: None)
    assert card_of(folder).data.license == "unknown"


def test_a_licence_file_goes_along_and_is_not_guessed_at(run, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "LICENSE").write_text("\n   Modified MIT License\n\nPermission is granted, but ...\n")
    folder = run(model__path=str(base))
    card = card_of(folder)
    assert (card.data.license, card.data.license_name, card.data.license_link) == (
        "other",
        "Modified MIT License",
        "LICENSE",
    )
    assert (folder / "hf" / "LICENSE").read_bytes() == (base / "LICENSE").read_bytes()
    assert "the local model `base`" in card.text and str(tmp_path) not in card.text


def test_a_model_made_from_ones_own_export_names_the_ancestor(run, tmp_path):
    base = tmp_path / "sft" / "hf"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (base / "README.md").write_text("---\nbase_model: meta/llama\ntags: [jaxrl_llm]\nlicense: llama3\n---\n")
    found = base_of(str(base))
    assert (found.name, found.hub_id, dict(found.license)) == ("hf", "meta/llama", {"license": "llama3"})
    (base / "README.md").write_text("---\nbase_model: meta/llama\n---\n")
    assert base_of(str(base)).hub_id is None  # somebody else's model: that is its ancestor, and not where it is
    (base / "README.md").write_text("---\nno: [yaml\n---\n")
    assert base_of(str(base)).license == {}


def test_relative_paths_count_from_where_the_run_was_started(run, tmp_path, monkeypatch):
    """A reward that changes the folder, or an export from another one, made them names of the hub."""
    (tmp_path / "models" / "base").mkdir(parents=True)
    (tmp_path / "models" / "base" / "config.json").write_text("{}")
    folder = run(model__path="models/base", data__path="models/base")
    monkeypatch.chdir(tmp_path)
    write_start(folder, None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    card = card_of(folder)
    assert card.data.base_model is None and card.data.datasets is None
    assert "the local model `base`" in card.text and str(tmp_path) not in card.text
    (folder / "starts.json").write_text(json.dumps([{"time": "2026-01-01 00:00:00+00:00"}]))  # of an earlier version
    assert card_of(folder).data.base_model == "models/base"


def test_data_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("")
    sources = ["a/b(split='train')", {"path": "c/d", "weight": 2}, "data/mine", "task:sort", "/home/x/y.jsonl"]
    assert datasets_of({"data.sources": sources, "data.path": "e/f"}) == ["a/b", "c/d"]
    assert datasets_of({"data.sources": [], "data.path": "e/f"}) == ["e/f"]


def test_an_adapter(run):
    folder = run(adapter=True, model__path="me/base", lora__rank=8)
    card = card_of(folder)
    assert card.data.library_name == "peft" and "lora" in card.data.tags
    assert card.data.to_dict()["base_model_relation"] == "adapter"
    assert "AutoPeftModelForCausalLM" in card.text and "adapters of rank 8" in card.text


def test_an_adapter_of_a_model_in_memory_names_none_of_the_hub(run):
    folder = run(adapter=True, model__path="me/base", lora__rank=8)
    (folder / "given.json").write_text('{"model": "me/base, in memory"}')
    card = card_of(folder)
    assert card.data.base_model is None and "AutoPeftModelForCausalLM" not in card.text
    assert "The model that it adapts was given in memory and kept nowhere" in card.text


def test_a_title_and_tags_of_ones_own(run):
    card = card_of(run(), repo="me/sorter", title="Sorter: the third", tags=("maths", "grpo"))
    assert card.data.tags == ["jaxrl_llm", "grpo", "maths"] and "# Sorter: the third\n" in card.text


def test_a_reward_model(run):
    card = card_of(run(algorithm__name="reward_model"), repo="me/judge")
    assert card.data.pipeline_tag == "text-classification"
    assert "# judge" in card.text and "AutoModelForSequenceClassification" in card.text


def test_a_process_reward_model(run):
    card = card_of(run(algorithm__name="process_reward_model"), repo="me/steps")
    assert card.data.pipeline_tag == "token-classification" and "A process reward model, made" in card.text
    assert "AutoModelForTokenClassification" in card.text


def test_what_was_given_in_memory(run):
    def my_reward():
        pass

    folder = run(data__path="openai/gsm8k")
    given = {"train_dataset": [{"prompt": "a"}] * 3, "eval_dataset": None, "rewards": [my_reward], "tools": ()}
    write_given(folder, given_in_words(given))
    assert given_to(folder) == {"train_dataset": "3 rows in memory", "rewards": "my_reward"}
    card = card_of(folder)
    assert "| data | `3 rows in memory` |" in card.text and "| rewards | `my_reward` |" in card.text
    assert card.data.datasets is None
    write_given(folder, given_in_words({"train_dataset": None}))
    assert given_to(folder) == {}


# --- what it keeps to itself ---


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/work/data.jsonl", "data.jsonl"),
        ("~/models/base", "base"),
        (f"{Path.home()}/x y/file.py:f", "x y/file.py:f"),
        ("C:/Users/ann/x.json", "x.json"),
        (
            "judge(url='http://ann:pw@host:8000/v1', template='/home/ann/t.txt')",
            f"judge(url='http://{HIDDEN}@host:8000/v1', template='t.txt')",
        ),
        ("judge(api_key='abc', model='m')", f"judge(api_key={HIDDEN}, model='m')"),
        ("a(hub_token=abc, max_new_tokens=5)", f"a(hub_token={HIDDEN}, max_new_tokens=5)"),
        ("key hf_abcdefgh1234 and sk-proj-abcdefgh", f"key {HIDDEN} and {HIDDEN}"),
        ("https://host/file.parquet?sig=abc&x=1", "https://host/file.parquet"),
        ("openai/gsm8k", "openai/gsm8k"),
        ("rewards/mine.py:score(a=1/2)", "rewards/mine.py:score(a=1/2)"),
        ("task:sort", "task:sort"),
    ],
)
def test_what_strangers_see(text, shown):
    assert shareable(text) == shown


def test_values_of_settings():
    assert in_words({"path": "/home/ann/a.json", "token": "x", "weight": 2}) == (
        '{"path": "a.json", "token": "***", "weight": 2}'
    )
    assert in_words(["/a/b", "c"]) == "b, c" and in_words(True) == "true" and in_words(None) == "null"


def test_no_home_and_no_secret_in_a_card(run):
    judge = "judge(url='http://u:secretpass@h/v1', model='m', key='sk-verysecret1')"
    folder = run(
        model__path=str(Path.home() / "models" / "base"),
        data__path=str(Path.home() / "data" / "x.jsonl"),
        rewards__functions=(judge,),
        checkpoint__folder="/secret/place",
    )
    text = card_of(folder).content
    for word in (str(Path.home()) + "/", "secretpass", "sk-very", "/secret", str(folder.parent)):
        assert word not in text, word
    assert "| data | `x.jsonl` |" in text


# --- curves, and folders that are not to be lost ---


def test_curves_hold_the_points_up_to_the_step(run):
    lines = [{"step": step, "reward": float(step), "a<b": 1.0} for step in range(1, 2001)]
    folder = run(lines=lines)
    svg = curves_svg(run_of(folder), 1000)
    assert "step 1000" in svg and "step 2000" not in svg and ">1e+03<" in svg
    assert len(svg) < 40_000
    ET.fromstring(svg)
    (folder / "metrics.jsonl").unlink()
    assert curves_svg(run_of(folder), 5) == ""


def test_a_model_that_is_no_part_of_the_run_is_kept(tiny_run, tmp_path):
    config = default()
    config.output_dir = str(tmp_path / "run")
    check_outputs(Path(config.output_dir), config.checkpoint.resume, goes_on=False)
    shutil.copytree(tiny_run.output_dir / "hf", tmp_path / "run" / "hf")
    check_outputs(Path(config.output_dir), config.checkpoint.resume, goes_on=True)
    with pytest.raises(ConfigError, match=r"holds a trained model \(hf/\), and no checkpoint"):
        check_outputs(Path(config.output_dir), config.checkpoint.resume, goes_on=False)
    config.checkpoint.resume = "never"
    check_outputs(Path(config.output_dir), config.checkpoint.resume, goes_on=False)
    (tmp_path / "run" / "hf" / "thesis.tex").write_text("words")
    with pytest.raises(ConfigError, match=r"other files than an exported model's \(thesis.tex\)"):
        check_outputs(Path(config.output_dir), config.checkpoint.resume, goes_on=True)
