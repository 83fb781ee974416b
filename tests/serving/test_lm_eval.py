"""lm-eval asks the endpoint as it is: tasks of generated answers, of choices by their log-probs, and chats."""

import json

import numpy as np
import pytest

import jaxrl_llm

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("starlette")
pytestmark = pytest.mark.slow

ROWS = [("4821", "1248"), ("907", "079"), ("33", "33"), ("5", "5"), ("61728", "12678"), ("2910", "0129")]
GENERATED = """
task: sorted
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOSEN = """
task: chosen
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_target: 0
target_delimiter: ""
doc_to_choice: "{{[answer, wrong]}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def evaluated(running, sorter, tmp_path_factory):
    """`evaluated(task, model="local-completions", path="completions")`: what lm-eval found, and each row's answer."""
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("lm_eval")
    rows = [{"prompt": f"sort:{digits}=", "answer": right, "wrong": right[::-1]} for digits, right in ROWS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in {"sorted": GENERATED, "chosen": CHOSEN}.items():
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(folder / "rows.jsonl")))
    jaxrl_llm.save_hf(sorter, folder / "model")
    tasks = TaskManager(include_path=str(folder), include_defaults=False)

    def run(task: str, model: str = "local-completions", path: str = "completions", **options):
        arguments = {
            "model": "sorter",
            "base_url": f"{running.url}/v1/{path}",
            "tokenizer": str(folder / "model"),
            "num_concurrent": 4,
            "max_length": 128,
        }
        found = lm_eval.simple_evaluate(model, arguments, [task], batch_size=1, task_manager=tasks, **options)
        samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        return found["results"][task], [sample["resps"] for sample in samples]

    return run


def test_generated_answers(evaluated, sorter):
    """Each answer is that of `generate`, greedily."""
    results, answers = evaluated("sorted")
    texts = jaxrl_llm.generate(sorter, [f"sort:{digits}=" for digits, _ in ROWS], 8, temperature=0.0)
    assert [answer for ((answer,),) in answers] == texts
    right = np.mean([text == row[1] for text, row in zip(texts, ROWS, strict=True)])
    assert results["exact_match,none"] == pytest.approx(right) and 0.3 < right < 1


def test_choices_by_their_log_probs(evaluated, sorter):
    """The sum of each choice's log-probs is that of the model, and so is which one it would have said itself."""
    results, answers = evaluated("chosen")
    best = []
    for (digits, right), pair in zip(ROWS, answers, strict=True):
        sums = []
        for text, ((logp, is_greedy),) in zip((right, right[::-1]), pair, strict=True):
            prompt, choice = (sorter.tokenizer(x)["input_ids"] for x in (f"sort:{digits}=", text))
            logits = np.asarray(sorter(np.asarray([prompt + choice])), np.float64)[0, len(prompt) - 1 : -1]
            logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            sums.append(logps[range(len(choice)), choice].sum())
            assert float(logp) == pytest.approx(sums[-1], abs=1e-3)
            assert str(is_greedy) == str(bool((logits.argmax(-1) == choice).all()))
        best.append(sums[0] >= sums[1])
    assert results["acc,none"] == pytest.approx(np.mean(best)) and np.mean(best) > 0.5


def test_chats(evaluated, sorter):
    """In the model's chat template, which the server applies."""
    _, answers = evaluated("sorted", "local-chat-completions", "chat/completions", apply_chat_template=True)
    prompts = [[{"role": "user", "content": f"sort:{digits}="}] for digits, _ in ROWS]
    texts = jaxrl_llm.generate(sorter, prompts, 8, temperature=0.0)
    assert [answer for ((answer,),) in answers] == texts
