"""Callbacks of several processes: the first decides, and where one fails all do."""

import json

import pytest

CODE = """
import jax

class Disagree:
    def on_step(self, moment):
        return "stop" if moment.step == 2 - jax.process_index() else None  # the second asks at step 1

class Fail:
    def on_evaluate(self, moment):
        if jax.process_index() == 1:
            raise RuntimeError("not here")

class Write:
    def on_end(self, moment):
        total = sum(float(abs(x).sum()) for x in jax.tree.leaves(moment.model().params))
        open(f"end_{jax.process_index()}", "w").write(f"{moment.step} {total}")
"""


@pytest.mark.slow
def test_the_first_process_decides(root, tmp_path, together):
    (tmp_path / "mine.py").write_text(CODE)
    ended = together(
        2, "-m", "jaxrl_llm.train", f"--config={root}/configs/sft.py:tiny", "--config.output_dir=run",
        "--config.total_steps=4", "--config.eval.every=-1", "--config.logging.backends=jsonl",
        "--config.callbacks=mine.py:Disagree,mine.py:Write",
    )  # fmt: skip
    assert [process.code for process in ended] == [0, 0], ended[0].err[-2000:] + ended[1].err[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert (tmp_path / "end_0").read_text() == (tmp_path / "end_1").read_text()
    assert (tmp_path / "end_0").read_text().startswith("2 ")
    assert (tmp_path / "run" / "hf" / "README.md").is_file()


@pytest.mark.slow
def test_where_one_fails_all_do(root, tmp_path, together):
    (tmp_path / "mine.py").write_text(CODE)
    ended = together(
        2, "-m", "jaxrl_llm.train", f"--config={root}/configs/sft.py:tiny", "--config.output_dir=run",
        "--config.logging.backends=jsonl", "--config.callbacks=mine.py:Fail",
    )  # fmt: skip
    assert [process.code for process in ended] == [2, 2]
    assert all("the callback mine.py:Fail, on_evaluate at step 0: RuntimeError: not here" in p.err for p in ended)
