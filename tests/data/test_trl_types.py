"""Every type of row of TRL's documentation, against TRL's own rendering."""

import datasets
import pytest

from jaxrl_llm.config import default
from jaxrl_llm.data import loading, opening
from jaxrl_llm.data.formats.lookup import find
from jaxrl_llm.training.setup.specs import data_spec

data_utils = pytest.importorskip("trl.data_utils")


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


ASK, YES, NO = user("What color is the sky?"), assistant("It is blue."), assistant("It is green.")
TALK = [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello"), ASK]
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
TYPES = {
    "prompt only": ("grpo", {"prompt": [ASK]}),
    "prompt with an open answer": ("grpo", {"prompt": [ASK, assistant("It is")]}),
    "tools": ("grpo", {"prompt": [ASK], "tools": [TOOL]}),
    "template options": ("grpo", {"prompt": [ASK], "chat_template_kwargs": {"loud": True}}),
    "prompt and completion": ("sft", {"prompt": TALK, "completion": [YES]}),
    "preference": ("dpo", {"prompt": TALK, "chosen": [YES], "rejected": [NO]}),
    "preference with an implicit prompt": ("dpo", {"chosen": [*TALK, YES], "rejected": [*TALK, NO]}),
    "unpaired": ("kto", {"prompt": TALK, "completion": [YES], "label": True}),
}
TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>tools ' + tools[0].function.name + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def config_of(method):
    config = default()
    config.algorithm.name = {"dpo": "preference", "kto": "preference"}.get(method, method)
    config.algorithm.loss = method if config.algorithm.name == "preference" else "ppo_clip"
    return config


def token_rows(method, rows, tokenizer):
    spec = data_spec(config_of(method))
    sources = opening.open_sources(spec, tokenizer, rows)
    return loading.tokenized(spec, sources, spec.kind, tokenizer).rows


@pytest.mark.parametrize("name", TYPES)
def test_types_are_rendered_as_by_trl(chatml_tokenizer, name):
    chatml_tokenizer.chat_template = TEMPLATE + "{%- if loud -%}!{%- endif -%}"
    method, row = TYPES[name]
    theirs = data_utils.maybe_extract_prompt(dict(row))
    theirs = data_utils.apply_chat_template(theirs, chatml_tokenizer, row.get("tools"))
    # In a table beside other rows, every row has every column.
    both = [row, {**row, "tools": None, "extra": 1}]
    made = token_rows(method, both, chatml_tokenizer)[0]
    columns = {"prompt_ids": ("prompt", None)} if method == "grpo" else {"ids": ("completion", "mask")}
    if method == "dpo":
        columns = {f"{side}_ids": (side, f"{side}_mask") for side in ("chosen", "rejected")}
    for ids, (column, mask) in columns.items():
        if mask is None:
            assert chatml_tokenizer.decode(made[ids]) == theirs["prompt"]
            continue
        parts = {0: [], 1: []}
        for token, learned in zip(made[ids], made[mask], strict=True):
            parts[learned].append(token)
        assert chatml_tokenizer.decode(parts[0]) == theirs["prompt"]
        assert chatml_tokenizer.decode(parts[1]) == theirs[column]


@pytest.mark.parametrize("conversational", [True, False])
def test_pairs_are_unpaired_as_by_trl(chatml_tokenizer, conversational):
    prompt, chosen, rejected = ([ASK], [YES], [NO]) if conversational else ("Sky? ", "Blue.", "Green.")
    pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    theirs = data_utils.unpair_preference_dataset(datasets.Dataset.from_list([pair])).to_list()
    assert token_rows("kto", [pair], chatml_tokenizer) == token_rows("kto", theirs, chatml_tokenizer)


def test_conversations_to_messages_as_by_trl():
    row = {"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]}
    theirs = data_utils.maybe_convert_to_chatml(dict(row))
    made = find("auto", "completions")(row)
    assert made["messages"] == theirs["messages"]


def test_plain_types_of_trl(tokenizer):
    for method, row, text in (
        ("sft", {"text": "The sky is blue."}, "The sky is blue.<|end|>"),
        ("sft", {"prompt": "The sky is", "completion": " blue."}, "The sky is blue.<|end|>"),
        ("kto", {"prompt": "The sky is", "completion": " blue.", "label": False}, "The sky is blue.<|end|>"),
    ):
        (made,) = token_rows(method, [row], tokenizer)
        assert tokenizer.decode(made["ids"]) == text
