"""The report of runs: what is in the page, the page in a real browser, and its pictures."""

import base64
import gzip
import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.commands import report as command
from jaxrl_llm.commands.report import report
from jaxrl_llm.config import ConfigError, default, to_json
from jaxrl_llm.tools.report.groups import GROUPS, OTHER, grouped, unit_of
from jaxrl_llm.tools.report.page import EXPLAINED, HEADLINES, headlines
from jaxrl_llm.tools.report.pictures import smoothed
from jaxrl_llm.tools.report.runs import ReportedRun, differences, read_runs, short_names
from jaxrl_llm.tools.report.samples import chunks_of, picked_files
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.logging.origin import write_start
from jaxrl_llm.training.logging.records import write_completions
from jaxrl_llm.training.setup.records import logging_spec
from tests.tools.headless_browser import Browser, executable

EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> ü 汉 \u2028 \x00"


def write_run(folder: Path, steps: int = 6, rate: float = 1e-6, names: str = "trl", gain=1) -> Path:
    """The folder of a run as training leaves it: rewards of gain * step / 10, a warning at steps 3 and 4."""
    config = default()
    config.logging.backends, config.logging.names = ("jsonl",), names
    config.optimizer.learning_rate, config.output_dir = rate, str(folder)
    with Logger(logging_spec(config), folder) as logger:
        (folder / "config.json").write_text(to_json(config))
        logger.log(0, {"eval/accuracy": 0.25})
        for step in range(1, steps + 1):
            texts = [f"answer {i} of step {step}" for i in range(4)]
            texts[0] = EVIL if step == 2 else texts[0]
            logger.completions(
                step,
                [
                    {"prompt": f"prompt {i // 2}", "completion": text, "exact_match": float(i % 2), "advantage": i / 3}
                    for i, text in enumerate(texts)
                ],
            )
            warnings = {"warning/kl_explosion": 1.0} if step in (3, 4) else {}
            logger.log(
                step,
                {
                    "reward": gain * step / 10,
                    "kl": 0.01 * step,
                    "entropy": 1.0 / step,
                    "sampling/importance_sampling_ratio/mean": 1 + 0.01 * step,
                    "num_tokens": 100 * step,
                    "time/rollout": 3.0,
                    "time/update": 1.0,
                    "loss": float("nan"),
                    **warnings,
                },
            )
    return folder


def unpacked(page: str, kind: str) -> list[dict]:
    found = re.findall(rf'<script type="text/plain" class="{kind}">([A-Za-z0-9+/=]*)</script>', page)
    return [json.loads(gzip.decompress(base64.b64decode(text))) for text in found]


def test_the_page_holds_all_of_a_run_and_no_text_as_html(tmp_path):
    (path,) = report([write_run(tmp_path / "run")])
    assert path == tmp_path / "run" / "report.html"
    page = path.read_text(encoding="utf-8")
    assert "hacked" not in page and "https://" not in page and "http://" not in page
    (curves,) = unpacked(page, "curves")
    (run,) = curves["runs"]
    assert run["steps"] == [0, 1, 2, 3, 4, 5, 6]
    assert run["metrics"]["reward"] == [None, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert ["Reward", "reward"] in curves["headlines"] and ["Held-out", "eval/accuracy"] in curves["headlines"]
    (piece,) = unpacked(page, "completions")
    assert piece["rows"] == 24
    assert piece["columns"]["step"] == [step for step in range(1, 7) for _ in range(4)]
    texts = [piece["texts"][i] for i in piece["columns"]["completion"]]
    assert texts[4] == EVIL and texts[5] == "answer 1 of step 2"
    assert len(piece["texts"]) == 24 + 2  # each prompt once
    assert piece["columns"]["advantage"][1] == 0.333333


def test_named_sets_have_curves_of_their_own():
    metrics = {
        name: [1.0]
        for name in (
            "reward",
            "eval/easy/accuracy",
            "eval/easy/reward",
            "eval/easy/books/accuracy",
            "eval/hard/loss",
            "eval/rewards/accuracies",
            "loss",
        )
    }
    run = ReportedRun("a", Path("a"), {}, [1], [0.0], metrics)
    held_out = [metric for title, metric in headlines([run]) if title == "Held-out"]
    assert held_out == ["eval/easy/accuracy", "eval/hard/loss"]
    assert [title for title, _ in headlines([run])] == ["Reward", "Held-out", "Held-out", "Loss"]


def test_runs_with_verls_names_are_compared_with_those_of_trls(tmp_path):
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", names="verl", rate=2e-6)])
    assert "critic/score/mean" in (tmp_path / "b" / "metrics.jsonl").read_text()
    assert runs[0].metrics["reward"] == runs[1].metrics["reward"]
    rows = differences(runs)
    found = {row["key"]: (row["default"], row["values"]) for row in rows if row["differs"]}
    assert found == {
        "logging.names": ("trl", ["trl", "verl"]),
        "optimizer.learning_rate": ("1e-06", ["1e-06", "2e-06"]),
    }
    assert {row["key"] for row in rows if not row["differs"]} == {"logging.backends"}


def test_a_run_that_is_still_written_can_be_reported(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    (run,) = read_runs([folder])
    assert run.steps[-1] == 5


def test_values_that_are_no_numbers_are_gaps(tmp_path):
    """The browser reads JSON, which has no NaN: the whole page would stay empty."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "reward": -Infinity, "kl": "high", "lr": 1e-3}\n')
    (page,) = report([tmp_path])
    (data,) = unpacked(page.read_text(encoding="utf-8"), "curves")
    assert data["runs"][0]["metrics"] == {"loss": [None], "reward": [None], "kl": [None], "lr": [0.001]}


def test_names_are_as_long_as_it_takes():
    assert short_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert short_names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]


def test_completions_are_of_evenly_spaced_steps_and_long_texts_lose_their_middle(tmp_path):
    folder = write_run(tmp_path / "run", steps=10)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    talk = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "q", "tool_calls": calls}]
    write_completions(folder / "completions", 10, [{"prompt": talk, "completion": "a" * 90 + "b" * 90, "r": None}])
    picked = picked_files(folder / "completions", 12)
    assert [path.stem[-2:] for path in picked] == ["02", "06", "10"]
    assert picked_files(folder / "completions", 1000)[0].stem == "completions_00001"
    (piece,) = chunks_of(read_runs([folder]), 13, 100)
    assert piece["rows"] == 13
    assert piece["texts"][piece["columns"]["completion"][-1]] == "a" * 50 + "\n… 80 characters left out …\n" + "b" * 50
    called = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert piece["texts"][piece["columns"]["prompt"][-1]] == f"user: p\nassistant: q{called}"
    assert piece["columns"]["r"] == [None] * 13


def test_columns_of_numbers_in_some_steps_are_texts_where_others_have_texts(tmp_path):
    """What a reward logs besides may be numbers in one step, and texts in the next."""
    folder = write_run(tmp_path / "run", steps=1)
    for step, found in ((2, [3, 0.5]), (3, ["x", None]), (4, [7, 0.25])):
        rows = [{"prompt": "p", "completion": "c", "found": cell} for cell in found]
        write_completions(folder / "completions", step, rows)
    (piece,) = chunks_of(read_runs([folder]), 100, 100)
    cells = [None if i is None else piece["texts"][i] for i in piece["columns"]["found"][4:]]
    assert piece["kinds"]["found"] == "text" and cells == ["3.0", "0.5", "x", None, "7.0", "0.25"]


def test_evaluations_have_a_share_of_the_completions(tmp_path):
    folder = write_run(tmp_path / "run", steps=10)
    row = {"prompt": "p", "completion": "held", "evaluation": "greedy", "exact_match": 1.0}
    for step in (0, 5, 10):
        write_completions(folder / "completions", step, [row] * 4, held_out=True)
    (piece,) = chunks_of(read_runs([folder]), 1000, 100)
    names = [None if i is None else piece["texts"][i] for i in piece["columns"]["evaluation"]]
    assert names == [None] * 40 + ["greedy"] * 12
    assert piece["columns"]["step"][-12::4] == [0, 5, 10]
    (piece,) = chunks_of(read_runs([folder]), 20, 100)
    assert piece["rows"] <= 20 and piece["columns"]["step"][-1] == 10
    assert piece["texts"][piece["columns"]["evaluation"][-1]] == "greedy"


def test_thumbnails_are_whole(tmp_path):
    """However short texts are cut; those of one prompt are there once."""
    shown = json.dumps(["data:image/png;base64," + "A" * 400])
    folder = write_run(tmp_path / "run", steps=1)
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    rows = [{"prompt": prompt, "completion": f"{i}", "images": shown if i < 2 else None} for i in range(3)]
    write_completions(folder / "completions", 2, rows)
    (piece,) = chunks_of(read_runs([folder]), 100, 100)
    cells = [None if i is None else piece["texts"][i] for i in piece["columns"]["images"][-3:]]
    assert cells == [shown, shown, None] and piece["texts"].count(shown) == 1
    assert piece["texts"][piece["columns"]["prompt"][-1]] == "user: [image]what?"


def test_the_page_says_where_a_run_comes_from(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "jaxrl_llm.train", "--url=http://me:secret@host/x", "a b"])
    write_start(run, None)
    write_start(run, 3)
    (path,) = report([run])
    (curves,) = unpacked(path.read_text(encoding="utf-8"), "curves")
    first, second = curves["runs"][0]["starts"]
    assert (first["step"], second["step"]) == (0, 3)
    assert first["command"] == "python -m jaxrl_llm.train '--url=http://***@host/x' 'a b'"
    assert first.keys() == {"time", "step", "host", "devices", "folder", "command", "commit", "versions"}
    assert second["versions"].keys() == {"jaxrl_llm", "jax", "jaxlib", "python"} and "1 cpu" in second["devices"]
    write_start(run, None)
    assert len(read_runs([run])[0].starts) == 1, "a run that starts anew has no past"
    (run / "starts.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"starts\.json is not a list of objects"):
        report([run])


def test_metrics_are_in_groups_that_the_docs_explain(root):
    page = (root / "docs/metrics.md").read_text(encoding="utf-8")
    for group in (*GROUPS, OTHER):
        assert f"| {group.title} | {group.explanation} |" in page
    names = {"reward", "rewards/chosen", "rewards/f/mean", "eval/rewards/chosen", "loss", "mine", "critic/loss"}
    found = {group.title: metrics for group, metrics in grouped(names)}
    assert found == {
        "Evaluation": ["eval/rewards/chosen"],
        "Preferences": ["rewards/chosen"],
        "Reward": ["reward", "rewards/f/mean"],
        "Loss and gradient": ["loss"],
        "Critic": ["critic/loss"],
        "Other": ["mine"],
    }
    units = {"time/update": "s", "eval/accuracy": "share", "completions/mean_length": "tokens", "reward": ""}
    assert {name: unit_of(name) for name in units} == units
    assert EXPLAINED.keys() == {title for title, _ in HEADLINES}


def test_a_page_follows_runs_until_they_are_finished(tmp_path, monkeypatch, capsys):
    """It is written with each look, loads itself again while a run goes on, and no more once it is finished."""
    run = write_run(tmp_path / "run", steps=6)
    seen = []

    def sleep(seconds):
        (curves,) = unpacked((run / "report.html").read_text(encoding="utf-8"), "curves")
        seen.append((seconds, curves["reload"], curves["runs"][0]["steps"][-1]))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 99 + len(seen) // 2, "time": 1.0, "reward": 1.0}) + "\n")

    monkeypatch.setattr(command.time, "sleep", sleep)
    command.main([str(run), "--watch=7"])
    assert seen == [(7, 7, 6), (7, 7, 99)]
    (curves,) = unpacked((run / "report.html").read_text(encoding="utf-8"), "curves")
    assert curves["reload"] == 0 and curves["runs"][0]["steps"][-1] == 100
    assert capsys.readouterr().out == f"{run / 'report.html'}  (updated every 7 s; Ctrl-C ends that)\n"
    monkeypatch.setattr(command.time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    other = write_run(tmp_path / "other")
    command.main([str(other), "--watch=7"])
    (curves,) = unpacked((other / "report.html").read_text(encoding="utf-8"), "curves")
    assert curves["reload"] == 0, "a page that nobody writes any more stays as it is"


def test_a_run_that_a_callback_ended_is_finished(tmp_path):
    """Its last step is not that of the configuration; the model is written behind its last line."""
    (tmp_path / "run" / "hf").mkdir(parents=True)
    run, model = write_run(tmp_path / "run", steps=6), tmp_path / "run" / "hf" / "config.json"
    model.touch()
    for later in (1, -1):  # of an earlier end, before the run went on
        time = (run / "metrics.jsonl").stat().st_mtime + later
        os.utime(model, (time, time))
        assert read_runs([run])[0].is_finished == (later > 0)


def test_smoothing_has_no_bias():
    assert smoothed([2.0, 2.0, 2.0], 0.9) == pytest.approx([2.0, 2.0, 2.0])
    assert smoothed([1.0, 4.0], 0.5) == pytest.approx([1.0, 3.0])  # (0.5 * 0.5 * 1 + 0.5 * 4) / 0.75


def test_errors_name_what_is_wrong(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="name a run"):
        report([])
    with pytest.raises(ConfigError, match=r"holds no run: it has no metrics\.jsonl"):
        report([tmp_path])
    run = write_run(tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="named twice"):
        report([run, run])
    with pytest.raises(ConfigError, match="set another --output"):
        report([run], output=run / "config.json" / "report.html")
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json must hold a JSON object"):
        report([tmp_path])
    (run / "completions" / "completions_00001.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"completions_00001\.parquet cannot be read"):
        report([run])
    assert not (run / "report.html").exists() and not list(run.glob(".*.part"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        report([run], png=tmp_path)


@pytest.mark.slow
def test_a_training_run_is_logged_and_reported(tmp_path, run_python, root):
    pytest.importorskip("tensorboardX", reason="pip install tensorboardX")
    config, folder = f"--config={root}/configs/grpo.py:tiny", "--config.output_dir=run"
    done = run_python(
        "-m",
        "jaxrl_llm.train",
        config,
        folder,
        "--config.logging.backends=jsonl,tensorboard",
        "--config.logging.completions_every=1",
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    (path,) = report([tmp_path / "run"])
    page = path.read_text(encoding="utf-8")
    (curves,), (piece,) = unpacked(page, "curves"), unpacked(page, "completions")
    titles = dict(curves["headlines"])
    assert {"Reward", "Held-out", "KL", "Entropy", "Length", "Truncated", "Clip", "Mismatch"} <= titles.keys()
    assert {row["key"] for row in curves["differences"]} >= {"optimizer.learning_rate", "algorithm.beta"}
    assert piece["rows"] == 2 * 16 + 2 * 40  # of two steps, and of the evaluations before and after them
    assert {"exact_match", "advantage", "evaluation"} <= piece["columns"].keys()


def test_the_command_line(tmp_path, run_python):
    """It needs no accelerator, and starts none."""
    run = write_run(tmp_path / "run", steps=1)
    code = """
import sys
from jaxrl_llm.commands.report import main
main(sys.argv[1:])
print(sys.modules["jax"]._src.xla_bridge.backends_are_initialized())
"""
    done = run_python("-c", code, str(run), "--output=page.html", "--smoothing=0.2")
    assert (done.returncode, done.stdout) == (0, "page.html\nFalse\n"), done.stderr
    assert unpacked((tmp_path / "page.html").read_text(encoding="utf-8"), "curves")[0]["smoothing"] == 0.2


def test_the_home_folder_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(write_run(tmp_path / "run", steps=1))
    assert report(["~/run"], output="~/page.html") == [tmp_path / "page.html"]
    assert (tmp_path / "page.html").is_file()


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    runs = [write_run(tmp_path / name, rate=rate) for name, rate in (("a", 1e-6), ("b", 2e-6))]
    paths = report(runs, output=tmp_path / "page.html", png=tmp_path / "pictures")
    names = {path.name for path in paths[1:]}
    assert {"reward.png", "kl.png", "entropy.png", "held-out.png", "curves.png"} <= names
    for path in paths[1:]:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000, path
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").touch()  # before the first step there are no curves
    assert report([tmp_path / "begun"], png=tmp_path / "none") == [tmp_path / "begun" / "report.html"]


# In a browser

SAMPLER = "Sampler against trainer"
needs_browser = pytest.mark.skipif(executable() is None, reason="no Chromium on PATH: apt-get install chromium")
COUNT = "document.getElementById('count').textContent"


def type_into(browser: Browser, selector: str, text: str) -> None:
    """Types the text into an input, as its events tell the page."""
    node = f"document.querySelector({json.dumps(selector)})"
    browser.run(f"{node}.value = {json.dumps(text)}; {node}.dispatchEvent(new Event('input'))")


def first_cells(browser: Browser, column: str, count: int = 3) -> list[str]:
    """What the first rows in sight show in a column."""
    return browser.run(
        f"[...document.querySelectorAll('#rows .row')].slice(0, {count})"
        f".map((row) => row.children[table.names.indexOf({json.dumps(column)})].textContent.trim())"
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser that shows the report of two runs."""
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder / "first"), write_run(folder / "second", steps=9, rate=2e-6, gain=2)]
    (path,) = report(runs, output=folder / "report.html")
    with Browser(folder / "profile") as page:
        page.open(path.as_uri())
        page.wait("document.body && document.body.dataset.ready === 'true'")
        yield page
        assert not page.errors
        assert [url for url in page.requests if not url.startswith(("file:", "blob:", "data:"))] == []


@needs_browser
def test_the_page_shows_curves_warnings_times_and_settings(browser):
    assert browser.run("document.title") == "jaxrl_llm: first, second"
    titles = browser.run("[...document.querySelectorAll('#headlines figcaption b')].map((node) => node.textContent)")
    assert titles[:4] == ["Reward", "Held-out", "KL", "Entropy"]
    # Each run leaves pixels of its colour on the canvas of the reward, and none when it is switched off.
    colours = """(() => {
      const canvas = document.querySelector('[data-metric="reward"] canvas');
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      const count = (r, g, b) => {
        let found = 0;
        for (let i = 0; i < data.length; i += 4) {
          const far = Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b);
          if (far < 30 && data[i + 3] > 200) found++;
        }
        return found;
      };
      return [count(37, 99, 235), count(234, 88, 12)];
    })()"""
    browser.wait("document.querySelector('[data-metric=\"reward\"] canvas').width > 300")
    blue, orange = browser.run(colours)
    assert blue > 50 and orange > 50
    browser.run("document.querySelectorAll('#legend button')[0].click()")
    assert browser.run(colours)[0] == 0
    browser.run("document.querySelectorAll('#legend button')[0].click()")
    warnings = browser.run("document.getElementById('warnings').textContent")
    assert "kl_explosion" in warnings and "2 steps: 3–4" in warnings
    phases = browser.run("document.getElementById('phases').textContent")
    assert "rollout 18 s (75 %)" in phases and "update 6.0 s (25 %)" in phases
    settings = browser.run("[...document.querySelectorAll('#settings tr')].map((row) => row.innerText)")
    assert any(re.match(r"optimizer\.learning_rate\s+1e-06\s+1e-06\s+2e-06", row) for row in settings)
    table = browser.run("document.querySelector('#runs table').innerText")
    assert "0.100 → 0.600" in table and "0.200 → 1.800" in table


@needs_browser
def test_a_phone_shows_all_without_scrolling_sideways(browser, tmp_path):
    browser.send(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 780, "deviceScaleFactor": 1, "mobile": True}
    )
    browser.run("dispatchEvent(new Event('resize'))")
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [360, 360]
    outside = (
        "[...document.querySelectorAll('main *, header *')].filter((node) => !node.closest('#table')"
        " && node.getBoundingClientRect().right > 361).map((node) => node.outerHTML.slice(0, 80))"
    )
    assert browser.run(outside) == []
    settings = "document.querySelector('#settings td:last-child').getBoundingClientRect()"
    assert browser.run(f"{settings}.right <= 360 && {settings}.width > 0"), "the run's own value is in sight"
    assert browser.run("getComputedStyle(document.querySelector('header')).position") == "static"
    browser.send("Emulation.clearDeviceMetricsOverride")
    browser.run("dispatchEvent(new Event('resize'))")


@needs_browser
def test_all_metrics_are_grouped_and_what_never_changes_is_a_line(browser):
    groups = browser.run("[...document.querySelectorAll('#all summary b')].map((node) => node.textContent)")
    assert groups == ["Evaluation", "Health", "Reward", "Loss and gradient", "Policy", SAMPLER, "Speed"]
    words = browser.run("[...document.querySelectorAll('#all span[data-metric]')].map((node) => node.textContent)")
    assert "time/rollout 3" in words and not any(word.startswith("reward") for word in words)
    type_into(browser, "#metric", "time/")
    browser.wait("document.querySelector('#all figure[data-metric=\"reward\"]').hidden")
    assert browser.run("!document.querySelector('#all span[data-metric=\"time/rollout\"]').hidden")
    type_into(browser, "#metric", "")
    assert "not recorded" in browser.run("document.getElementById('origin').textContent")


@needs_browser
def test_completions_are_searched_filtered_and_sorted(browser):
    assert browser.run(COUNT).startswith("60 completions · mean exact_match 0.500")
    type_into(browser, "#search", "OF STEP 7")
    browser.wait(f"{COUNT}.startsWith('4 of 60')")
    assert first_cells(browser, "run") == ["second"] * 3
    type_into(browser, "#search", "/answer [13] of step [12]$/")
    browser.wait(f"{COUNT}.startsWith('8 of 60')")
    type_into(browser, "#search", "")
    type_into(browser, '[data-filter="step"]', "5..6")
    type_into(browser, '[data-filter="exact_match"]', ">0.5")
    type_into(browser, '[data-filter="prompt"]', "prompt 1")
    browser.wait(f"{COUNT} === '4 of 60 completions · mean exact_match 1'")
    type_into(browser, '[data-filter="step"]', "five")
    browser.wait("document.querySelector('[data-filter=\"step\"]').classList.contains('bad')")
    browser.run("document.getElementById('clear').click()")
    assert browser.run(COUNT).startswith("60 completions")
    browser.run("document.querySelector('[data-sort=\"advantage\"]').click()")
    assert first_cells(browser, "advantage") == ["0"] * 3
    browser.run("document.querySelector('[data-sort=\"advantage\"]').click()")
    assert first_cells(browser, "advantage") == ["1"] * 3
    browser.run("document.querySelector('[data-sort=\"advantage\"]').click()")
    assert first_cells(browser, "step") == ["1"] * 3


@needs_browser
def test_texts_are_shown_as_they_are_and_opened_in_full(browser):
    type_into(browser, "#search", "hacked")
    browser.wait(f"{COUNT}.startsWith('2 of 60')")
    browser.run("document.querySelector('#rows .row').click()")
    assert browser.run("document.querySelectorAll('#detail pre')[1].textContent") == EVIL
    assert browser.run("window.hacked === undefined && document.images.length === 0")
    browser.run("[...document.querySelectorAll('#detail button')][0].click()")
    assert first_cells(browser, "prompt", 2) == ["prompt 0"] * 2
    browser.run("document.getElementById('clear').click()")


@needs_browser
def test_the_completions_of_a_prompt_of_several_lines(tmp_path):
    """An input has one line, and would lose the border between them."""
    config, folder = default(), write_run(tmp_path / "run", steps=1)
    config.logging.backends = ("jsonl",)
    with Logger(logging_spec(config), folder) as logger:
        prompts = ("/a? (b)\n\\c", "/a? (b)\n\\c", "/a? (b)\n\\c and more")
        logger.completions(2, [{"prompt": prompt, "completion": "x", "advantage": 0.0} for prompt in prompts])
    (path,) = report([folder])
    with Browser(tmp_path / "profile") as page:
        page.open(path.as_uri())
        page.wait("document.body && document.body.dataset.ready === 'true'")
        type_into(page, "#search", "(b)")
        page.wait(f"{COUNT}.startsWith('3 of 7')")
        page.run("document.querySelector('#rows .row').click()")
        page.run("[...document.querySelectorAll('#detail button')][0].click()")
        page.wait(f"{COUNT}.startsWith('2 of 7')")


@needs_browser
def test_a_click_on_a_curve_shows_the_completions_of_that_step(browser):
    x, y, width = browser.run(
        "(() => { scrollTo(0, 0); const box = document.querySelector('[data-metric=\"reward\"] .plot')"
        ".getBoundingClientRect(); return [box.x, box.y, box.width]; })()"
    )
    place = {"x": x + width - 9, "y": y + 60, "button": "left", "clickCount": 1}
    browser.send("Input.dispatchMouseEvent", {"type": "mouseMoved", **place})
    tip = browser.wait("!document.getElementById('tip').hidden && document.getElementById('tip').textContent")
    assert tip.startswith("reward") and "secondstep 91.800 (smoothed 1." in tip
    assert "firstnone: it ended at step 6" in tip and "0.600" not in tip, "a run that ended has no value there"
    for kind in ("mousePressed", "mouseReleased"):
        browser.send("Input.dispatchMouseEvent", {"type": kind, **place})
    browser.wait(f"{COUNT}.includes(' of 60')")
    assert set(first_cells(browser, "step")) == {"9"}
    browser.run("document.getElementById('clear').click()")


@needs_browser
@pytest.mark.slow
def test_a_hundred_thousand_completions_stay_usable(tmp_path):
    folder, random = write_run(tmp_path / "run", steps=1), np.random.default_rng(0)
    words = [f"word{i}" for i in range(5000)]
    for step in range(1, 101):
        texts = [" ".join(words[i] for i in row) for row in random.integers(0, 5000, (1000, 40))]
        rows = [
            {"prompt": f"question {step} {i // 8}", "completion": text, "exact_match": float(i % 2), "score": i / 7}
            for i, text in enumerate(texts)
        ]
        write_completions(folder / "completions", step, rows)
    began = time.monotonic()
    (path,) = report([folder])
    times = {"write": time.monotonic() - began}
    with Browser(tmp_path / "profile") as page:
        began = time.monotonic()
        page.open(path.as_uri())
        page.wait("document.body && document.body.dataset.ready === 'true'", 120)
        times["open"] = time.monotonic() - began
        assert page.run(COUNT).startswith("100,000 completions")
        for name, action in (
            ("search", "byId('search').value = 'word77 '; filter()"),
            ("sort", "sortBy('score')"),
            ("sort texts", "sortBy('completion')"),
            ("scroll", "byId('table').scrollTop = 1e6; drawRows()"),
        ):
            took = f"(() => {{ const start = performance.now(); {action}; return performance.now() - start; }})()"
            times[name] = page.run(took) / 1e3
            page.run("byId('search').value = ''; filter()")
        assert page.run("document.querySelectorAll('#rows .row').length") < 80
    print({name: round(value, 2) for name, value in times.items()}, f"{path.stat().st_size / 1e6:.1f} MB")
    assert times["open"] < 60 and max(times[name] for name in ("search", "sort", "scroll")) < 2
