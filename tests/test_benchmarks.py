"""The benchmarks' own parts, and the profile of training steps."""

import json
import re

import jax
import numpy as np
import pytest

import jaxrl_llm
from benchmarks import folders, limits, marks, meter, peaks, run, scaling, serving, sizes, table
from benchmarks.cases import SHAPES, lengths, prompts, texts, useful_tokens, word, words
from benchmarks.ours import fit
from benchmarks.race import __main__ as race
from benchmarks.race import contests, record
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.models.model import describe
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.runtime import profiler
from jaxrl_llm.training.runtime.profiler import Profiler, phase_table, profiled_steps, steps_here


def test_the_tokenizer_reads_words_as_their_ids(tmp_path):
    model = describe(folders.folder_of("toy", tmp_path))
    rows = texts(20, 30)
    assert all(model.tokenizer(words(row)).input_ids == row.tolist() for row in rows)
    assert model.tokenizer(words(rows[0]) + words(rows[1])).input_ids == [*rows[0], *rows[1]]
    assert word(12) != word(21) and len({word(i) for i in range(49152)}) == 49152


def test_the_model_folder_has_the_shape(tmp_path):
    model = describe(folders.folder_of("toy", tmp_path))
    c = SHAPES["toy"].config
    assert (model.net.config.width, model.net.config.layers) == (c["hidden_size"], c["num_hidden_layers"])
    made = sum(int(np.prod(size)) for size in folders.tensor_shapes(c).values())
    assert made == sum(int(np.prod(x.shape)) for x in jax.tree.leaves(model.params))


def test_lengths_and_prompts():
    shape = SHAPES["smollm2"]
    assert prompts(shape).shape == (4, shape.prompt) and lengths(shape).max() <= shape.longest
    assert useful_tokens("rollout_full", shape) == 4 * 4 * 32
    assert useful_tokens("grpo_geometric", shape) == lengths(shape).sum()


def test_flops_by_hand():
    # A layer of toy: q and o 32x32, k and v 32x16, gate, up and down 32x64; the head is 32x49152.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    assert limits.pass_flops(SHAPES["toy"], 10, 3) == 2 * (2 * layer * 10 + 32 * 49152 * 3)
    assert limits.update_tokens("grpo", SHAPES["toy"]) == (2 * 64 + 32, 32)
    assert limits.update_tokens("dpo", SHAPES["toy"]) == (2 * 64 + 4 * 16, 4 * 16)


def test_the_meter_takes_five_intervals():
    """After one that warms up, whatever it took."""

    def intervals(*seconds, least=None):
        found = meter.Meter(least)
        for one in seconds:
            if found.enough():
                break
            found.rows.append({"seconds": one, "others": 0.0})
        return found.summary()

    found = intervals(9, *[1.0, 2.0, 3.0, 2.5, 1.5, 7.0, 7.0])
    assert found["intervals"] == [1.0, 2.0, 3.0, 2.5, 1.5] and found["seconds"] == 2.0 and found["first"] == 9
    assert intervals(99, *[4.0] * 9)["seconds"] == 4.0
    assert intervals(9, *[4.0] * 9, least=2)["intervals"] == [4.0, 4.0]


def test_a_fit_of_a_line():
    found = fit([(1000 * n, 0.5 + 2.0 * n) for n in (1, 2, 4, 8, 16)])
    assert found["seconds"] == pytest.approx(2.0) and found["fixed"] == pytest.approx(0.5)
    assert found["r2"] == pytest.approx(1.0) and found["power"] == pytest.approx(np.log(32.5 / 2.5) / np.log(16))


def test_the_table_has_ratios_and_names_what_failed():
    tasks = {
        "toy/grpo/jaxrl_llm": {"seconds": 2.0, "first": 9.0, "peak_gb": 1.0, "useful": 0.95, "time/update": 1.0,
                               "time/rollout": 0.5},
        "toy/grpo/trl": {"seconds": 8.0, "peak_gb": 3.0},
        "toy/grpo/tunix": {"error": "not installed: no network"},
        "toy/grpo/limit": {"seconds": 1.0, "time/update": 0.7, "update_flops": 5e12, "matrix_rate": 1e13,
                           "bandwidth": 1e10, "decode_bytes": 4e9},
    }  # fmt: skip
    text = table.text_of({"machine": "a test", "tasks": tasks})
    assert "4.00x (8 s)" in text and "| failed |" in text and "- toy/grpo/tunix: not installed: no network" in text
    assert "| 50% | 0.95 | 1.00 | 3.00 |" in text and "| 80% | 70% | 5 | 50% |" in text


def test_a_peer_that_cannot_be_installed_is_reported_and_a_run_goes_on(tmp_path, capsys):
    store = tmp_path / "performance.json"
    store.write_text(json.dumps({"tasks": {"toy/sft/jaxrl_llm": {"seconds": 1.0, "first": 2.0, "peak_gb": 0.5},
                                           "toy/sft/limit": {"seconds": 0.5}}}))  # fmt: skip
    none = str(tmp_path / "no" / "python")
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "python").write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    (tmp_path / "no" / "python").chmod(0o755)
    arguments = ["--models=toy", "--cases=sft", "--peers=trl", f"--trl-python={none}", f"--environments={tmp_path}"]
    run.main([*arguments, f"--results={store}"])
    found = json.loads(store.read_text())["tasks"]
    assert found["toy/sft/jaxrl_llm"]["seconds"] == 1.0  # was there, and was not measured again
    assert "no such module" in found["toy/sft/trl"]["error"] and "no such module" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_of_one_case(tmp_path):
    arguments = ["--models=toy", "--cases=grpo,rollout_geometric", "--peers=", "--intervals=1"]
    run.main([*arguments, f"--environments={tmp_path}", f"--results={tmp_path / 'performance.json'}"])
    text = (tmp_path / "performance.md").read_text()
    assert "GRPO step, beta 0" in text and "Not measured" not in text


def test_steps_to_profile():
    assert profiled_steps(None) is None and profiled_steps("4") == (4, 4) and profiled_steps("3-5") == (3, 5)
    for wrong in ("", "0", "5-3", "a", "3,5"):
        with pytest.raises(ConfigError, match=r"logging\.profile_steps"):
            profiled_steps(wrong)


def test_the_process_that_is_profiled(monkeypatch):
    assert steps_here("3-5", 0) == (3, 5) and steps_here(None, 7) is None
    with pytest.raises(ConfigError, match=r"logging\.profile_process is 1, but the run has 1 process,"):
        steps_here("4", 1)
    monkeypatch.setattr(profiler.jax, "process_count", lambda: 2)
    assert steps_here("4", 1) is None
    monkeypatch.setattr(profiler.jax, "process_index", lambda: 1)
    assert steps_here("4", 1) == (4, 4) and steps_here("4", 0) is None


def test_steps_that_cannot_be_read_are_refused_before_anything_is_loaded(tmp_path):
    config = default()
    config.output_dir, config.model.path = str(tmp_path / "run"), str(tmp_path / "none")
    config.logging.profile_steps = "a"
    with pytest.raises(ConfigError, match=r"logging\.profile_steps is 'a'"):
        jaxrl_llm.train(config)
    assert not (tmp_path / "run").exists()


def test_phases_by_hand():
    text = phase_table({"rollout": 3.0, "update": 6.0, "data": 0.0}, 10.0, 3, 5)
    rows = [line.split() for line in text.splitlines()[2:]]
    assert rows == [
        ["update", "6.000", "2.000", "60.0%"], ["rollout", "3.000", "1.000", "30.0%"],
        ["other", "1.000", "0.333", "10.0%"], ["all", "10.000", "3.333", "100.0%"],
    ]  # fmt: skip


@pytest.mark.slow
def test_a_profile_of_a_step(tmp_path):
    watch, shown = Stopwatch(), []
    with Profiler((2, 2), tmp_path, watch, shown.append) as profiler:
        for step in (1, 2, 3):
            profiler.begin(step)
            with watch("update"):
                np.linalg.norm(np.ones((200, 200)))
            profiler.end(step)
    (text,) = shown
    assert (tmp_path / "profile" / "phases.txt").read_text() in text and "update" in text
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_tables_are_put_between_their_marks(tmp_path):
    page = tmp_path / "page.md"
    begin, end = "<!-- peaks: written by python -m benchmarks.peaks -->", "<!-- end of peaks -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    case = {"held": 1e6, "planned": 4e6, "measured": 7e6, "process": 1e6, "kept": 1e6}
    found = peaks.table({"a run": case})
    for _ in range(2):
        marks.put(page, "peaks", found)
    assert page.read_text() == f"before\n{begin}\n{found}{end}\nafter\n"
    assert found.endswith("| a run | 1 | 4 | 7 | 1 | 1 | 1.25 |\n")
    for module, name in ((peaks, "peaks"), (scaling, "scaling")):
        assert module.PAGE.read_text().count(f"<!-- end of {name} -->") == 1


PLAN = """programs of a step, on each device (temporaries at most: they are those of the CPU compiler):
  program         times  resident  arguments  results  temporaries     peak   FLOPs  sends
  rollout: decode   512    7.9 GB    1.44 GB     88 B       861 MB  10.2 GB  68.9 B    0 B
  update              1   1.98 GB    5.93 GB    612 B      6.22 GB  14.1 GB   180 T    0 B

least time of a step: 456 ms
  matmuls  99 GB 99 GB 99 GB 99 GB 99 GB 99 GB
"""


def test_sizes_are_read_from_a_plan():
    """The largest peak, and the largest without temporaries, which is another program's."""
    assert sizes.planned(PLAN) == pytest.approx((10.2 - 0.861, 14.1))
    with pytest.raises(ValueError, match="no programs"):
        sizes.planned("error: there is no model")


def test_the_smallest_device():
    assert sizes.devices_for({"1": [5.9, 10.9]}) == "16 GB (6 to 11)"
    assert sizes.devices_for({"1": [15.7, 46.9]}) == "24 GB to 80 GB (16 to 47)"
    assert sizes.devices_for({"1": [30.4, 90.7], "2": [15.0, 50.0]}) == "48 GB to 2 x 80 GB (30 to 91)"
    assert sizes.devices_for({"2": [45.7, 88.9], "4": [23.0, 53.2]}) == "2 x 80 GB to 4 x 80 GB (46 to 89)"
    assert sizes.devices_for({"8": [60.0, 90.0]}) == "8 x 80 GB to more (60 to 90)"


def test_the_page_of_sizes_has_what_was_planned(tmp_path):
    """And its models have as many parameters as their names say."""
    page = tmp_path / "page.md"
    page.write_text(sizes.PAGE.read_text())
    marks.put(page, "sizes", sizes.tables(json.loads(sizes.STORE.read_text())))
    assert page.read_text() == sizes.PAGE.read_text()
    assert [round(sizes.parameters(name), 1) for name in sizes.MODELS] == [0.5, 1.5, 7.6, 14.8]


@pytest.mark.slow
def test_the_benchmark_of_serving(capfd):
    """Every answer under load is the one that comes alone, and the ratios are of one run."""
    pytest.importorskip("uvicorn")
    serving.main(["embedded:sort", "--requests=60", "--clients=12", "--slots=8", "--prompt=64", "--longest=32"])
    numbers = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert numbers["different_alone"] == numbers["exit"] == 0
    assert numbers["memory_mib_2"] < 1.1 * numbers["memory_mib_1"]
    assert 0 < numbers["p50"] <= numbers["p95"]
    own = numbers["engine_tokens_per_second"]
    assert numbers["server_ratio"] == pytest.approx(numbers["tokens_per_second"] / own, abs=2e-3)


def test_a_level_is_reached_by_the_mean_of_some_steps():
    lines = [{"reward": reward, "seconds": float(step)} for step, reward in enumerate((0, 1, 0, 1, 1, 1, 1, 1))]
    assert record.reached(lines, 0.8) == {"reward": 1, "seconds": 5.0, "step": 6}
    assert record.reached(lines[:5], 0.8) is None and record.reached(lines[:4], 0.0) is None


def test_a_loss_reaches_its_level_from_above():
    lines = [{"loss": loss, "step": 5 * i} for i, loss in enumerate((0.9, 0.4, 0.3, 0.35))]
    assert record.reached(lines, 0.3) == {"loss": 0.3, "step": 10} and record.reached(lines, 0.2) is None


@pytest.mark.parametrize("task", [name for name, contest in contests.CONTESTS.items() if contest.reward])
def test_the_answers_of_a_race_are_worth_one(task):
    if task == "chain_sum":
        pytest.importorskip("reasoning_gym")
    contest = contests.CONTESTS[task]
    rows = contest.rows(0)
    assert rows == contest.rows(0) != contest.rows(1)
    assert {contest.reward(f" {row['answer']} ", row["answer"]) for row in rows} == {1.0}
    assert contest.reward("no", rows[0]["answer"]) < 0.5


def test_a_working_of_a_race_ends_with_the_answer():
    """Whose sums are right; the answer alone is what is rejected."""
    problems = contests.CONTESTS["sums"].rows(0)
    for problem, learned, pair in zip(problems, contests.working(0), contests.preferring(0), strict=False):
        text = learned["completion"][0]["content"]
        assert pair["chosen"] == learned["completion"] and pair["prompt"] == learned["prompt"]
        assert contests.last_number(text, problem["answer"]) == 1.0
        assert pair["rejected"][0]["content"] == f"The answer is {problem['answer']}."
        assert all(eval(left) == int(right) for left, right in re.findall(r"([\d+ ]+) = (\d+)", text))


@pytest.mark.slow
def test_both_libraries_run_a_race(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(race, "STORE", tmp_path / "race")
    race.main(["--steps=1", "--seeds=0"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "-0" in line] == ["sort-jaxrl_llm-0", "sort-trl-0"]
    assert sum("'tokens'" in line for line in lines) == 2 and not (tmp_path / "race").exists()
