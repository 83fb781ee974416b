"""Inspect asks the endpoint as it is: a task of generated answers, of chats."""

import pytest

import jaxrl_llm

inspect_ai = pytest.importorskip("inspect_ai")
pytest.importorskip("starlette")

ROWS = [("4821", "1248"), ("907", "079"), ("33", "33"), ("5", "5"), ("61728", "12678"), ("2910", "0129")]


@pytest.mark.slow
def test_a_task_of_chats(running, sorter, tmp_path):
    """Each answer is that of `generate`, greedily, and the score is of these."""
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import exact
    from inspect_ai.solver import generate

    rows = [Sample(input=f"sort:{digits}=", target=right) for digits, right in ROWS]
    task = inspect_ai.Task(dataset=rows, solver=generate(), scorer=exact())
    asked = GenerateConfig(temperature=0, max_tokens=8, max_retries=0, timeout=600)
    model = get_model("openai-api/here/sorter", base_url=f"{running.url}/v1", api_key="none", config=asked)
    (log,) = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    prompts = [[{"role": "user", "content": row.input}] for row in rows]
    texts = jaxrl_llm.generate(sorter, prompts, 8, temperature=0.0)
    found = [sample.output.completion for sample in sorted(log.samples, key=lambda sample: sample.id)]
    assert found == texts
    right = sum(text == answer for text, (_, answer) in zip(texts, ROWS, strict=True)) / len(ROWS)
    assert log.results.scores[0].metrics["mean"].value == pytest.approx(right)
    assert all(sample.output.usage.output_tokens > 0 for sample in log.samples)
