"""The first stage of A*-PO in several processes: the scores of one, and the run of one."""

import json

import pytest

from jaxrl_llm.data import tasks
from tests.system.processes.test_runs import all_ended_well, command, same_runs


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2)])
def test_two_processes_score_prompts_as_one_does(root, tmp_path, together, data, tensor):
    """The last batch of the stage is not full, and is filled up with what nobody grades. With tensor both processes
    hold all rows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in tasks.generate("sort", size=25)), encoding="utf-8")
    flags = (
        f"--config.data.path={rows}", "--config.eval.every=-1", "--config.algorithm.reference_samples=2",
        "--config.algorithm.loss=a2po(beta2=0.1)", f"--config.mesh.data={data}", f"--config.mesh.tensor={tensor}",
    )  # fmt: skip
    for count in (1, 2):
        all_ended_well(together(count, *command(root, "a2po", tmp_path / str(count), *flags), devices=2 // count))
    same_runs(tmp_path / "1", tmp_path / "2", evaluations=False)
    one, two = ((tmp_path / name / "reference_scores.jsonl").read_text(encoding="utf-8") for name in "12")
    assert one == two and len(one.splitlines()) == 25
