"""The table of all formats in docs/data.md: a row for every format, and the columns that it becomes.

`python tests/data/format_table.py` writes the table anew. Formats that write with a chat template use that of the
embedded model: `<|role|>content<|end|>`. A `llama3` format stands beside the `chatml` one that reads the same rows, and
is checked to differ in its marks alone.
"""

import json
import re
from pathlib import Path

from transformers import AutoTokenizer

from jaxrl_llm.data import Row
from jaxrl_llm.data.formats.lookup import find
from jaxrl_llm.data.tokenize import TEXTS
from jaxrl_llm.models.files.hf import EMBEDDED

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
MARKS = ("<!-- formats -->\n", "<!-- end of formats -->")
COLUMNS = (*TEXTS, "label", "margin", "ground_truth", "answer")
OF_STEPS, OF_TOKENS = ("prompt", "completions", "labels"), ("input_ids", "labels")  # which other formats do not make


def _user(text: str) -> Row:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


ASK, YES, NO = _user("2+2?"), _assistant("4"), _assistant("5")
CHATS = {"chosen": [ASK, YES], "rejected": [ASK, NO]}
ANSWERS = {"chosen": "4", "rejected": "5"}
RESPONSES = {"chosen_response": "4", "rejected_response": "5"}
LABELLED = {"completion": "4", "label": True}

_PAIRS: dict[str, Row] = {
    "": {"system": "Add.", "prompt": "2+2?", **ANSWERS},
    ".default": {"system": "Add.", "instruction": "2+2?", **RESPONSES},
    ".argilla": {"system": "Add.", "instruction": "2+2?", **RESPONSES},
    ".argilla_chat": CHATS,
    ".icr": {"system": "Add.", "input": "2+2?", **ANSWERS},
    ".intel": {"system": "Add.", "question": "2+2?", **ANSWERS},
    ".prompt_pairs": {"system": "Add.", "prompt": "2+2?", **ANSWERS},
    ".ultra": {"system": "Add.", "prompt": "2+2?", **CHATS},
}
_LABELS: dict[str, Row] = {
    ".argilla": {"system": "Add.", "instruction": "2+2?", **LABELLED},
    ".argilla_chat": {"completion": [ASK, YES], "label": True},
    ".intel": {"system": "Add.", "question": "2+2?", **LABELLED},
    ".prompt_pairs": {"system": "Add.", "prompt": "2+2?", **LABELLED},
    ".ultra": {"system": "Add.", "prompt": "2+2?", **LABELLED},
}

# (what it is for, format as written, row)
SAMPLES: list[tuple[str, str, Row]] = [
    ("prompts", "auto", {"prompt": [ASK], "answer": "4"}),
    ("completions", "auto", {"messages": [ASK, YES]}),
    ("pairs", "auto", {"prompt": "2+2? ", **ANSWERS}),
    ("labels", "auto", {"prompt": "2+2? ", **LABELLED}),
    ("pairs", "passthrough", CHATS),
    (
        "prompts",
        "verl",
        {"data_source": "sums", "prompt": [ASK], "reward_model": {"style": "rule", "ground_truth": "4"}},
    ),
    ("completions", "harmony", {"thread": [["user", "2+2?"], ["assistant", "4"]]}),
    (
        "pairs",
        "harmony",
        {
            "preferred": [["user", "2+2?"], ["assistant", "4"]],
            "dispreferred": [["user", "2+2?"], ["assistant", "5"]],
        },
    ),
    (
        "completions",
        "sharegpt",
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
    ),
    (
        "pairs",
        "sharegpt",
        {
            "conversations": [{"from": "human", "value": "2+2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
    ),
    (
        "labels",
        "sharegpt",
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "kto_tag": True},
    ),
    (
        "pairs",
        "openai_preference",
        {"input": {"messages": [ASK], "tools": []}, "preferred_output": [YES], "non_preferred_output": [NO]},
    ),
    ("labels", "stepwise", {"prompt": "1+1+2?", "completions": ["1+1=2", "2+2=4"], "labels": [True, True]}),
    ("steps", "stepwise", {"prompt": "1+1+2?", "completions": ["1+1=2", "2+2=5"], "labels": [True, False]}),
    *(("pairs", f"{family}{name}", row) for family in ("chatml", "llama3") for name, row in _PAIRS.items()),
    (
        "pairs",
        "zephyr.nectar",
        {"prompt": "2+2?", "answers": [{"answer": "5", "rank": 2}, {"answer": "4", "rank": 1}]},
    ),
    ("pairs", "chat_template", {"messages": "2+2?", **ANSWERS}),
    ("pairs", "chat_template.default", {"messages": [ASK], "chosen": YES, "rejected": NO}),
    ("pairs", "chat_template.argilla_chat", CHATS),
    ("pairs", "chat_template.argilla", {"system": "Add.", **CHATS}),
    ("pairs", "bradley_terry.chat_template", {"system": "Add.", "input": "2+2?", **ANSWERS}),
    (
        "completions",
        "chat_template(roles_to_train=['assistant', 'tool'], message_field_training='learn')",
        {"messages": [ASK, {**YES, "learn": False}, {"role": "tool", "content": "4"}]},
    ),
    ("completions", "completion(field='body')", {"body": "2+2=4"}),
    (
        "completions",
        "input_output",
        {"segments": [{"label": False, "text": "2+2="}, {"label": True, "text": "4<|end|>"}]},
    ),
    (
        "completions",
        "user_defined(field_output='answer', format='[INST] {instruction} [/INST] ')",
        {"instruction": "2+2?", "answer": "4"},
    ),
    ("completions", "alpaca", {"instruction": "Add.", "input": "2+2", "output": "4"}),
    ("completions", "alpaca", {"instruction": "Add 2 and 2.", "input": "", "output": "4"}),
    (
        "completions",
        "llamafactory",
        {"instruction": "Add.", "input": "2+2", "output": "4", "system": "Be brief.", "history": [["1+1?", "2"]]},
    ),
    ("pairs", "llamafactory", {"instruction": "2+2?", **ANSWERS}),
    ("labels", "llamafactory", {"instruction": "2+2?", "output": "4", "kto_tag": True}),
    ("pairs", "user_defined", {"system": "Add.", "prompt": "2+2?", **ANSWERS}),
    (
        "pairs",
        "user_defined.default(field_prompt='ask', prompt_format='[INST] {system} {prompt} [/INST]', "
        "chosen_format=' {chosen}', rejected_format=' {rejected}')",
        {"system": "Add.", "ask": "2+2?", **ANSWERS},
    ),
    *(("labels", f"{family}{name}", row) for family in ("chatml", "llama3") for name, row in _LABELS.items()),
    ("labels", "user_defined", {"system": "Add.", "prompt": "2+2?", **LABELLED}),
    (
        "labels",
        "user_defined.default(field_label='good', prompt_format='Q: {prompt} A:', completion_format=' {completion}')",
        {"prompt": "2+2?", "completion": "4", "good": True},
    ),
]


def table() -> str:
    """The table as Markdown: the kind of data, the format as written, a row, and the columns it becomes."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    lines = ["| for | format | a row | becomes |", "|---|---|---|---|"]
    for kind, spec, row in SAMPLES:
        if spec.startswith("llama3"):
            continue  # in the row of the chatml format
        example = find(spec, kind, tokenizer)(row)
        names = OF_STEPS if kind == "steps" else OF_TOKENS if "input_ids" in example else COLUMNS
        columns = {name: example[name] for name in names if name in example}
        specs = [spec]
        if spec.startswith("chatml"):
            specs.append("llama3" + spec.removeprefix("chatml"))
            other = find(specs[1], kind, tokenizer)(row)
            assert {name: other[name] for name in names if name in other} == {
                name: _with_marks_of_llama3(value) for name, value in columns.items()
            }, specs[1]
        becomes = "<br>".join(f"{name}: {_code(_json(value))}" for name, value in columns.items())
        lines.append(f"| {kind} | {', '.join(map(_code, specs))} | {_code(_json(row))} | {becomes} |")
    return "\n".join(lines) + "\n"


def _with_marks_of_llama3(value: object) -> object:
    if not isinstance(value, str):
        return value
    opened = re.sub(r"<\|im_start\|>(\w+)\n", r"<|start_header_id|>\1<|end_header_id|>\n\n", value)
    return re.sub(r"<\|im_end\|>\n?", "<|eot_id|>", opened)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + rest.partition(MARKS[1])[2], encoding="utf-8")
