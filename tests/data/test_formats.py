"""Every data format against texts written by hand from the formats' documentation."""

import json
import re

import pytest

from jaxrl_llm.config import default
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.formats import axolotl_sft, native
from jaxrl_llm.data.formats.lookup import COMMON, LABELS, PAIRS, as_prompt, find
from jaxrl_llm.data.formats.native import thread_messages
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.training.setup.specs import data_spec
from tests.data.format_table import SAMPLES

CHATML_PROMPT = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
LLAMA3_PROMPT = (
    "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
PROMPTS = {"chatml": CHATML_PROMPT, "llama3": LLAMA3_PROMPT}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}
NO_SYSTEM = {"chatml": len("<|im_start|>system\nS<|im_end|>\n"), "llama3": LLAMA3_PROMPT.index("<|eot_id|>") + 10}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


CHATS = {"chosen": [user("Q"), assistant("yes")], "rejected": [user("Q"), assistant("no")]}
PLAIN = {"chosen": "yes", "rejected": "no"}
RESPONSES = {"chosen_response": "yes", "rejected_response": "no"}
PAIR_ROWS = {
    "default": [
        {"prompt": "Q", **PLAIN},
        {"input": "Q", **PLAIN},
        {"question": "Q", **RESPONSES},
        {"instruction": "Q", "prompt": None, **RESPONSES},
    ],
    "argilla": [{"instruction": "Q", **RESPONSES}],
    "icr": [{"input": "Q", **PLAIN}],
    "intel": [{"question": "Q", **PLAIN}],
    "prompt_pairs": [{"prompt": "Q", **PLAIN}],
    "ultra": [{"prompt": "Q", **CHATS}],
}


@pytest.mark.parametrize("family", ["chatml", "llama3"])
@pytest.mark.parametrize("strategy", PAIR_ROWS)
def test_pairs_with_fixed_texts(family, strategy):
    for row in PAIR_ROWS[strategy]:
        for name in (f"{family}.{strategy}", f"dpo.{family}.{strategy}", f"simpo.{family}.{strategy}"):
            made = find(name)({"system": "S", **row})
            assert made["prompt"] == PROMPTS[family]
            assert (made["chosen"], made["rejected"]) == ("yes" + ENDS[family], "no" + ENDS[family])
        for nothing in ({}, {"system": ""}, {"system": None}):
            assert find(f"{family}.{strategy}")({**nothing, **row})["prompt"] == PROMPTS[family][NO_SYSTEM[family] :]
    assert find(family)({"system": "S", "prompt": "Q", **PLAIN})["prompt"] == PROMPTS[family]


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_argilla_chat_has_no_system(family):
    made = find(f"{family}.argilla_chat")({"system": "S", **CHATS})
    assert made["prompt"] == PROMPTS[family][NO_SYSTEM[family] :]
    assert made["chosen"] == "yes" + ENDS[family]


def test_fixed_chat_takes_two_messages():
    longer = {"chosen": [*CHATS["chosen"], user("again")], "rejected": CHATS["rejected"]}
    with pytest.raises(ConfigError, match=r"'chosen' has 3 messages, .* chatml.argilla_chat reads exactly 2"):
        find("chatml.argilla_chat")(longer)


@pytest.mark.parametrize("family", ["chatml", "llama3"])
@pytest.mark.parametrize(
    ("strategy", "column"),
    [("argilla", "instruction"), ("intel", "question"), ("prompt_pairs", "prompt"), ("ultra", "prompt")],
)
def test_labels_with_fixed_texts(family, strategy, column):
    row = {column: "Q", "system": "S", "completion": "yes", "label": False}
    for made in (find(f"{family}.{strategy}", "labels")(row), find(f"kto.{family}.{strategy}", "pairs")(row)):
        assert made["prompt"] == PROMPTS[family]
        assert (made["completion"], made["label"]) == ("yes" + ENDS[family], False)


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_labelled_argilla_chat(family):
    form = find(f"{family}.argilla_chat", "labels")
    documented = {"chosen": [user("Q")], "completion": [assistant("yes")], "label": True}
    published = {"completion": [user("Q"), assistant("yes")], "label": True}
    expected = {"prompt": PROMPTS[family][NO_SYSTEM[family] :], "completion": "yes" + ENDS[family], "label": True}
    assert form(documented) == form(published) == expected


def test_nectar_chooses_the_best_rank():
    answers = [{"answer": name, "rank": rank} for name, rank in (("c", 3), ("a", 1), ("d", 4), ("b", 2))]
    row = {"prompt": "Q", "answers": answers}
    made = find("zephyr.nectar")(row)
    assert made["prompt"] == "<|system|>\n</s>\n<|user|>\nQ</s>\n<|assistant|>\n"
    assert (made["chosen"], made["rejected"]) == ("a", "b")
    # axolotl's published code takes the last of the ascending ranks, and the one before it.
    made = find("zephyr.nectar(inverted=True)")(row)
    assert (made["chosen"], made["rejected"]) == ("d", "c")
    with pytest.raises(ConfigError, match=r"has 1 answer, but the format zephyr.nectar compares two"):
        find("zephyr.nectar")({"prompt": "Q", "answers": answers[:1]})
    with pytest.raises(ConfigError, match=r"'answers' of the format zephyr.nectar is a list .* and rank, a number"):
        find("zephyr.nectar")({"prompt": "Q", "answers": [*answers, {"answer": "e", "rank": "5"}]})


def test_user_defined_pairs():
    options = {
        "field_prompt": "q",
        "field_system": "s",
        "field_chosen": "good",
        "field_rejected": "bad",
        "prompt_format": "<{system}> {prompt}",
        "chosen_format": "+{chosen}",
        "rejected_format": "-{rejected}",
    }
    row = {"q": "Q{x}", "s": "S", "good": "yes", "bad": "no"}
    expected = {"prompt": "<S> Q{x}", "chosen": "+yes", "rejected": "-no"}
    for form in (find(options), find("user_defined.default", options=options), find("user_defined", options=options)):
        assert {key: form(row)[key] for key in expected} == expected
    assert find(options)({**row, "s": None})["prompt"] == "<> Q{x}"
    blank = dict.fromkeys(("prompt_format", "chosen_format", "field_system")) | {"rejected_format": ""}  # keys of YAML
    assert {**find(options | blank)(row), **row} == {"prompt": "Q{x}", "chosen": "yes", "rejected": "no", **row}
    with pytest.raises(ConfigError, match=re.escape("prompt_format is '{question}', which cannot be filled")):
        find({"prompt_format": "{question}"})({"prompt": "a", **PLAIN})


def test_user_defined_completions():
    """axolotl's custom type of instructions."""
    theirs = {
        "system_prompt": "Be right.", "field_system": "sys", "field_instruction": "ask", "field_output": "say",
        "format": "[INST] {instruction} ({input}) [/INST]", "no_input_format": "[INST] {instruction} [/INST]",
        "system_format": "<<{system}>>",
    }  # fmt: skip
    form = find(theirs, "completions")
    made = form({"ask": "2+2?", "say": "4"})
    assert (made["prompt"], made["completion"]) == ("<<Be right.>>[INST] 2+2? [/INST]", "4")
    made = form({"ask": "Add.", "input": "2+2", "say": "4", "sys": "Brief."})
    assert made["prompt"] == "<<Brief.>>[INST] Add. (2+2) [/INST]"
    made = find("user_defined(format='Q: {instruction} A: ')", "completions")({"instruction": "2+2?", "output": "4"})
    assert (made["prompt"], made["completion"]) == ("Q: 2+2? A: ", "4")
    with pytest.raises(
        ConfigError, match=r"format is '{ask}', which cannot be filled .* it may hold {instruction} and"
    ):
        find("user_defined(format='{ask}')", "completions")({"instruction": "2+2?", "output": "4"})


def test_segments_of_a_text(tokenizer):
    """axolotl's input_output: every segment is tokenised by itself, and nothing is added."""
    segments = [{"label": True, "text": "ab"}, {"label": False, "text": "cd "}, {"label": True, "text": "e<|end|>"}]
    found = find("input_output", "completions", tokenizer)({"segments": segments, "id": 1})
    end = tokenizer.eos_token_id
    assert found["input_ids"] == [97, 98, 99, 100, 32, 101, end] and found["id"] == 1
    assert found["labels"] == [97, 98, -100, -100, -100, 101, end]
    for wrong in ("text", ["text"], [{"text": "a"}], [{"text": "a", "label": 2}]):
        with pytest.raises(ConfigError, match="input_output takes a list of dictionaries with text, and label"):
            find("input_output", "completions", tokenizer)({"segments": wrong})


def test_user_defined_labels():
    form = find({"field_label": "good", "prompt_format": "{system}{prompt}"}, "labels")
    assert form({"prompt": "Q", "completion": "yes", "good": True}) == {
        "good": True,
        "prompt": "Q",
        "completion": "yes",
        "label": True,
    }


# --- chat templates: the expected texts are ChatML's ------------------------------------------------------------------

ASKED = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"


def test_chat_template_default(chatml_tokenizer):
    form = find("chat_template.default", tokenizer=chatml_tokenizer)
    rows = [
        {"messages": [user("Q")], "chosen": assistant("yes"), "rejected": assistant("no")},
        {"messages": "Q", "chosen": "yes", "rejected": "no"},
        {"messages": [user("Q")], **CHATS},
    ]
    for row in rows:
        made = form(row)
        assert (made["prompt"], made["chosen"], made["rejected"]) == (ASKED, "yes<|im_end|>", "no<|im_end|>")
        assert "messages" not in made


def test_chat_template_mappings(chatml_tokenizer):
    options = {
        "field_messages": "talk",
        "field_chosen": "good",
        "field_rejected": "bad",
        "message_property_mappings": {"role": "from", "content": "value"},
        "roles": {"user": ["human", "person"], "assistant": ["gpt"], "system": ["system"]},
    }
    row = {
        "talk": [{"from": "system", "value": "S"}, {"from": "person", "value": "Q"}],
        "good": {"from": "gpt", "value": "yes"},
        "bad": {"from": "gpt", "value": "no"},
    }
    made = find("chat_template.default", tokenizer=chatml_tokenizer, options=options)(row)
    assert (made["prompt"], made["chosen"], made["rejected"]) == (CHATML_PROMPT, "yes<|im_end|>", "no<|im_end|>")
    narrow = {**options, "roles": {"user": ["human"], "assistant": ["gpt"]}}
    form = find("chat_template.default", tokenizer=chatml_tokenizer, options=narrow)
    with pytest.raises(ConfigError, match=r"'talk' has the role 'person'; .* knows human, gpt; set roles"):
        form({**row, "talk": row["talk"][1:]})


def test_other_entries_of_messages_have_other_names_too(chatml_tokenizer):
    chatml_tokenizer.chat_template = (
        "{%- for m in messages -%}[{{ m.role }}:{{ m.content }}{{ m.thinking }}]{%- endfor -%}"
    )
    mapping = {"role": "from", "content": "value", "thinking": "thought"}
    form = find("chat_template.default", "pairs", chatml_tokenizer, {"message_property_mappings": mapping})
    asked = {"from": "user", "value": "Q", "thought": None}
    made = form({"messages": [asked], "chosen": {"from": "assistant", "value": "A", "thought": "B"}, "rejected": "C"})
    assert made["prompt"] == "[user:Q]" and made["chosen"] == "[assistant:AB]"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("alpaca", {"instruction": "Q", "input": float("nan"), "output": "A"}),
        ("chatml.intel", {"question": "Q", "system": 1.0, **PLAIN}),
        ("user_defined.default(prompt_format='{system}{prompt}')", {"prompt": "Q", "system": 1.0, **PLAIN}),
    ],
)
def test_a_text_that_may_be_absent_is_no_number(name, row):
    """A table of pandas has NaN where it has nothing, of which a template would make the text nan."""
    with pytest.raises(ConfigError, match=r"column '(input|system)' is float, but the format .* takes text there"):
        find(name)(row)


def test_an_answer_found_in_the_template_text(chatml_tokenizer):
    """Cutting at the first occurrence of the content, as axolotl does, would find `s` in `<|im_start|>`."""
    row = {"messages": "Q", "chosen": "s", "rejected": "user"}
    made = find("chat_template.default", tokenizer=chatml_tokenizer)(row)
    assert (made["chosen"], made["rejected"]) == ("s<|im_end|>", "user<|im_end|>")


def test_argilla_chat_of_long_conversations(chatml_tokenizer):
    talk = [user("A"), assistant("B"), user("Q")]
    row = {"chosen": [*talk, assistant("yes")], "rejected": [*talk, assistant("no")]}
    made = find("chat_template.argilla_chat", tokenizer=chatml_tokenizer)(row)
    before = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
    assert made == {"prompt": before + ASKED, "chosen": "yes<|im_end|>", "rejected": "no<|im_end|>"}


def test_argilla_chat_by_other_names(chatml_tokenizer):
    """As axolotl's: columns, the names of role and content, and roles are options, as of chat_template.default."""
    talk = [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}, {"from": "human", "value": "Q"}]
    row = {"good": [*talk, {"from": "gpt", "value": "yes"}], "bad": [*talk, {"from": "gpt", "value": "no"}]}
    options = {
        "field_chosen": "good",
        "field_rejected": "bad",
        "message_property_mappings": {"role": "from", "content": "value"},
        "roles": {"user": ["human"], "assistant": ["gpt"]},
    }
    made = find("chat_template.argilla_chat", tokenizer=chatml_tokenizer, options=options)(row)
    before = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
    assert {name: made[name] for name in ("prompt", "chosen", "rejected")} == {
        "prompt": before + ASKED,
        "chosen": "yes<|im_end|>",
        "rejected": "no<|im_end|>",
    }
    form = find(
        "chat_template.argilla_chat", tokenizer=chatml_tokenizer, options=options | {"roles": {"user": "person"}}
    )
    with pytest.raises(ConfigError, match=r"'good' has the role 'human'; .* knows person; set roles"):
        form(row)


def test_orpo_argilla(chatml_tokenizer):
    form = find("orpo.chat_template.argilla", tokenizer=chatml_tokenizer)
    made = form({"system": "S", **CHATS})
    assert made["prompt"] == CHATML_PROMPT
    # Not stripped, unlike the other formats of chat templates.
    assert (made["chosen"], made["rejected"]) == ("yes<|im_end|>\n", "no<|im_end|>\n")
    assert form({"prompt": "P", **CHATS})["prompt"] == ASKED.replace("Q", "P")
    talk = [user("A"), assistant("B"), user("Q")]
    several = {"prompt": "P", "chosen": [*talk, assistant("yes")], "rejected": [*talk, assistant("no")]}
    # axolotl would write P in the place of A and of Q.
    assert "P" not in form(several)["prompt"]
    with pytest.raises(ConfigError, match=r"'chosen' has 3 messages, .* takes an even number"):
        form({"chosen": talk, "rejected": talk})


def test_no_end_is_added_to_a_rendered_one(chatml_tokenizer):
    """The template ends with a line break after the end of sequence: it has its end."""
    form = find("chat_template.argilla", tokenizer=chatml_tokenizer)
    row = RowTokenizer("pairs", chatml_tokenizer)(form(CHATS))
    assert chatml_tokenizer.decode(row["chosen_ids"]) == ASKED + "yes<|im_end|>\n"


def test_one_bos_before_a_rendered_prompt(special_tokenizer):
    special_tokenizer.chat_template = "{{- '<|begin|>' -}}" + (
        "{%- for m in messages -%}{{- m.role[0] + ':' + m.content + '<|end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- 'a:' -}}{%- endif -%}"
    )
    form = find("chat_template.default", tokenizer=special_tokenizer)
    row = RowTokenizer("pairs", special_tokenizer)(form({"messages": "Q", **PLAIN}))
    assert special_tokenizer.decode(row["chosen_ids"]) == "<|begin|>u:Q<|end|>a:yes<|end|>"
    row = RowTokenizer("pairs", special_tokenizer)(find("llama3")({"prompt": "Q", **PLAIN}))
    assert special_tokenizer.decode(row["chosen_ids"]).count("<|begin|>") == 1


# --- native rows ------------------------------------------------------------------------------------------------------


def test_auto_leaves_trl_rows_as_they_are():
    for row in ({"prompt": "a", "answer": 1}, {"prompt": "a", "completion": "b"}, CHATS, {"messages": [user("a")]}):
        assert find("auto", "pairs")(row) == row


def test_auto_reads_conversations_that_are_json_text():
    """As tables hold them whose messages have different keys, such as calls of tools."""
    talk = [user("Q"), assistant("yes")]
    text = json.dumps(talk)
    assert find("auto", "completions")({"messages": text, "prompt": "UltraChat's"})["messages"] == talk
    assert find("auto", "prompts")({"messages": text})["prompt"] == talk[:1]
    turns = json.dumps([{"from": "human", "value": "Q"}, {"from": "gpt", "value": "yes"}])
    assert find("auto", "completions")({"conversations": turns})["messages"] == talk
    # Columns that a prompt is beside are for rewards, and what is no JSON is refused where messages are read.
    for row in ({"prompt": "Q", "messages": text}, {"prompt": "Q", "conversations": "hello"}, {"messages": "hello"}):
        assert find("auto", "prompts")(row) == row


def test_auto_prompts_of_messages_and_pairs():
    form = find("auto", "prompts")
    talk = [user("A"), assistant("B"), user("Q")]
    assert form({"messages": talk})["prompt"] == talk
    assert form({"messages": [*talk, assistant("yes")]})["prompt"] == talk
    assert form({"messages": [*talk, assistant("yes")]})["completion"] == [assistant("yes")]
    assert form(CHATS)["prompt"] == [user("Q")]
    assert as_prompt(find("auto", "pairs"), "pairs")(CHATS)["prompt"] == [user("Q")]


def test_every_format_gives_prompts():
    """Also where it is named: `data.format=sharegpt` gave messages alone, which no online run could read."""
    talk = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "yes"}]
    made = find("sharegpt", "prompts")({"conversations": talk})
    assert (made["prompt"], made["completion"]) == ([user("Q")], [assistant("yes")])
    assert as_prompt(find("passthrough"), "pairs")(CHATS)["prompt"] == [user("Q")]
    pair = {"preferred": [["user", "Q"], ["assistant", "yes"]], "dispreferred": [["user", "Q"], ["assistant", "no"]]}
    assert as_prompt(find("harmony"), "pairs")(pair)["prompt"] == [user("Q")]
    own = as_prompt(find(lambda row: {"messages": [user(row["q"])]}, "completions"), "completions")
    assert own({"q": "Q", "prompt": "text"}) == {"q": "Q", "messages": [user("Q")], "prompt": [user("Q")]}
    assert "prompt" not in find("chat_template", "completions")({"messages": [user("Q"), assistant("yes")]})


def test_prompts_may_have_columns_of_steps():
    row = {"prompt": "Q", "completions": ["a", "b"], "labels": [0.5, 0.25]}
    assert find("auto", "prompts")(row) == row


def test_verl(chatml_tokenizer):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [user("Q")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    }
    made = find("verl", "prompts", chatml_tokenizer)(row)
    assert made == {**row, "ground_truth": "4", "answer": "4"}
    assert find("auto", "prompts", chatml_tokenizer)(row) == made
    options = "verl(return_raw_chat=True, return_full_prompt=True, return_raw_input_ids=True)"
    made = find(options, "prompts", chatml_tokenizer)(row)
    assert (made["raw_prompt"], made["full_prompts"]) == ([user("Q")], ASKED)
    assert made["raw_prompt_ids"] == list(b"Q")
    with pytest.raises(ConfigError, match=r"'reward_model' of the format verl is a dictionary with ground_truth"):
        find("verl")({"prompt": [user("Q")], "reward_model": {"style": "model"}})


def test_harmony():
    thread = [["user", "Q"], ["assistant", "yes"]]
    messages = [user("Q"), assistant("yes")]
    assert find("harmony")({"thread": thread})["messages"] == messages
    assert find("harmony(field='turns')")({"turns": messages})["messages"] == messages
    with_metadata = {"thread": {"turns": thread, "metadata": {"answer": "4"}}}
    assert find("auto", "completions")(with_metadata)["answer"] == "4"
    pair = {"preferred": thread, "dispreferred": [thread[0], ["assistant", "no"]]}
    assert {key: find("auto")(pair)[key] for key in CHATS} == CHATS
    with pytest.raises(ConfigError, match=r"a turn is \(role, text\)"):
        thread_messages([["user", "Q", "more"]])


def test_openai_fine_tuning_rows():
    """Preferences with the tools that they have, and the prompts of reinforcement fine-tuning with their columns."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    asked = {"messages": [user("Q")], "tools": [tool], "parallel_tool_calls": True}
    row = {"input": asked, "preferred_output": [assistant("yes")], "non_preferred_output": [assistant("no")]}
    pair = {"prompt": [user("Q")], "chosen": [assistant("yes")], "rejected": [assistant("no")]}
    assert find("auto")(row) == {**row, **pair, "tools": [tool]} == find("openai_preference")(row)
    assert find("auto", "labels")({**row, "input": {"messages": [user("Q")], "tools": []}}).keys() == {*row, *pair}
    for wrong, problem in (
        ({"input": "Q"}, "column 'input' is 'Q', but the format openai_preference takes a dictionary with messages"),
        ({"input": {"tools": []}}, "openai_preference looks for 'messages'; the row has tools"),
        ({"preferred_output": "yes"}, "column 'preferred_output' is str, but the format openai_preference takes a"),
        ({"non_preferred_output": None}, "looks for 'non_preferred_output'; the row has"),
    ):
        with pytest.raises(ConfigError, match=problem):
            find("auto")({**row, **wrong})
    made = find("auto", "prompts")({"messages": [user("Q")], "reference_answer": {"n": 4}})
    assert (made["prompt"], made["reference_answer"]) == ([user("Q")], {"n": 4})


def test_sharegpt_and_stepwise():
    talk = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "yes"}]
    made = find("auto", "completions")({"conversations": talk, "id": 7})
    assert (made["messages"], made["id"]) == ([user("Q"), assistant("yes")], 7)
    steps = {"prompt": "Q", "completions": ["a", "b"], "labels": [True, False]}
    made = find("auto", "labels")(steps)
    assert (made["prompt"], made["completion"], made["label"]) == ("Q", "a\nb", False)
    for wrong in ({"labels": [True, "no"]}, {"labels": [[], True]}, {"completions": ["a", None]}):
        with pytest.raises(ConfigError, match="stepwise takes steps of text, each with a label that is true or false"):
            find("auto", "labels")({**steps, **wrong})


# --- names and functions of one's own ---------------------------------------------------------------------------------


def test_sharegpt_reads_turns_of_both_kinds_in_a_table():
    """Arrow gives each turn the keys of all others, as None."""
    turns = [{"from": "human", "value": "a", "role": None}, {"from": None, "role": "assistant", "content": "b"}]
    assert [(x["role"], x["content"]) for x in find("sharegpt")({"conversations": turns})["messages"]] == [
        ("user", "a"),
        ("assistant", "b"),
    ]


def test_sharegpt_with_tools_and_a_system_text():
    """As LLaMA-Factory has them."""
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [
        {"from": "human", "value": "1?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    row = {"conversations": turns, "system": "Add.", "tools": "[]"}
    system, ask, called, result, answer = find("auto", "completions")(row)["messages"]
    assert (system["content"], ask["role"], result["role"], answer["content"]) == ("Add.", "user", "tool", "two")
    assert called["role"] == "assistant" and [each["function"] for each in called["tool_calls"]] == [call]
    turns[1]["value"] = json.dumps([call, call])
    assert len(find("sharegpt")(row)["messages"][2]["tool_calls"]) == 2
    turns.insert(0, {"from": "system", "value": "Own."})
    assert [x["content"] for x in find("sharegpt")(row)["messages"] if x["role"] == "system"] == ["Own."]
    for wrong in ("look", "[]", '{"name": "a"}', "[1]"):
        turns[2]["value"] = wrong
        with pytest.raises(ConfigError, match=r"the function_call .* takes JSON with name and arguments there"):
            find("sharegpt")(row)


def test_sharegpt_with_other_names_of_roles_and_with_answers():
    """Collections have answers of several services; LLaMA-Factory's have pairs and ratings."""
    names = ["human", "GPT", "User", "chatgpt", "tool", "bing", "ipython", "model"]
    turns = [{"from": name, "value": name} for name in names]
    roles = [message["role"] for message in find("auto", "completions")({"conversations": turns})["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant", "ipython", "assistant"]
    ask, yes, no = ({"from": name, "value": text} for name, text in (("human", "Q"), ("gpt", "yes"), ("gpt", "no")))
    row = {"conversations": [ask], "chosen": yes, "rejected": no, "system": "S"}
    made = find("auto", "pairs")(row)
    assert made["prompt"] == [{"role": "system", "content": "S"}, user("Q")]
    assert (made["chosen"], made["rejected"]) == ([assistant("yes")], [assistant("no")])
    made = find("auto", "labels")({"conversations": [ask, yes], "kto_tag": False})
    assert (made["prompt"], made["completion"], made["label"]) == ([user("Q")], [assistant("yes")], False)
    with pytest.raises(ConfigError, match=r"column 'chosen' holds 'yes', but the format sharegpt takes from and value"):
        find("sharegpt", "pairs")({**row, "chosen": "yes"})


def test_a_system_text_that_nothing_reads_is_told(caplog):
    native._tell_of_system.cache_clear()
    for row in ({"prompt": "Q", "system": " "}, {"conversations": [{"from": "human", "value": "Q"}], "system": "S"}):
        find("auto", "prompts")(row)
    assert not caplog.text
    for row in ({"prompt": "Q", **PLAIN, "system": "S"}, {"messages": [user("Q")], "system": "S"}):
        assert find("auto", "pairs")(row) == row
    assert caplog.text.count("a column 'system', which is no part of the prompts") == 1


def test_rows_of_llamafactory(caplog):
    row = {"instruction": "Q", "input": "more", "output": "yes", "system": "S", "history": [["q", "r"]]}
    opening = [{"role": "system", "content": "S"}, user("q"), assistant("r"), user("Q\nmore")]
    assert find("llamafactory", "completions")(row)["messages"] == [*opening, assistant("yes")]
    assert find("llamafactory", "prompts")(row)["prompt"] == opening
    assert "messages" not in find("llamafactory", "prompts")(row)
    made = find("llamafactory(field_label='liked')", "labels")({**row, "liked": True})
    assert (made["prompt"], made["completion"], made["label"]) == (opening, [assistant("yes")], True)
    made = find("llamafactory(prompt='ask', query='text')", "pairs")({"ask": "Q", "text": "", **PLAIN})
    assert (made["prompt"], made["chosen"], made["rejected"]) == ([user("Q")], [assistant("yes")], [assistant("no")])
    with pytest.raises(ConfigError, match=r"column 'history' is .* the format llamafactory takes lists of two texts"):
        find("llamafactory", "completions")({**row, "history": ["q", "r", "s"]})
    axolotl_sft._tell_of_unread.cache_clear()
    find("alpaca", "completions")(row)
    assert "alpaca does not read the column 'system'" in caplog.text and "'history'" in caplog.text


def test_every_format_has_a_row_in_the_table(tokenizer):
    shown = {(kind == "labels", spec.partition("(")[0]) for kind, spec, _ in SAMPLES}
    assert {(False, name) for name in PAIRS} | {(True, name) for name in LABELS} <= shown
    assert set(COMMON) <= {name for _, name in shown}
    for kind, spec, row in SAMPLES:
        made = find(spec, kind, tokenizer)(row)
        assert made.keys() & {"prompt", "messages", "chosen", "text", "input_ids"}


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown data format 'chatml.intl' for pairs; known are .* the closest is"):
        find("chatml.intl")
    with pytest.raises(ConfigError, match=r"the closest is chatml.intel"):
        find("chatml.intl")
    with pytest.raises(ConfigError, match=r"unknown data format 'sharegtp' .* the closest is sharegpt"):
        find("sharegtp")
    with pytest.raises(ConfigError, match=r"zephyr.nectar has no option 'inverse'; it takes inverted"):
        find("zephyr.nectar(inverse=True)")


def test_missing_columns_are_named():
    with pytest.raises(ConfigError, match=r"chatml.intel looks for 'question'; the row has prompt, chosen, x \(none\)"):
        find("chatml.intel")({"prompt": "Q", "chosen": "a", "x": None})
    with pytest.raises(ConfigError, match=r"column 'chosen' is list, but the format chatml.intel takes text"):
        find("chatml.intel")({"question": "Q", **CHATS})
    with pytest.raises(ConfigError, match=r"column 'chosen' is str, but the format chatml.ultra takes a list of mess"):
        find("chatml.ultra")({"prompt": "Q", **PLAIN})


OWN = """
def direct(row, tokenizer=None, prefix=""):
    return {"prompt": prefix + row["question"], "has": tokenizer is not None}

def transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        label = example["answer"].split("####")[-1].strip().replace(",", "")
        return {"prompt": [{"role": "user", "content": example["question"]},], "answer": label}
    return transform_fn, {"remove_columns": ["question"]}

def alone(cfg):
    return lambda example: {"prompt": cfg.field + cfg["field"], "unset": cfg.nothing}

def everything(cfg):
    return (lambda example: {"prompt": "P"}), {"remove_columns": "__all__"}

def wrong(row):
    return "text"

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_formats.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "my_package_formats.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    return tmp_path


def test_a_factory_reads_the_settings_of_the_run(own):
    """By axolotl's names; options take their place, and what is not set is None."""
    config = default()
    config.algorithm.name, config.algorithm.loss, config.data.max_length = "preference", "ipo", 77
    (own / "cfg.py").write_text(
        "def made(cfg):\n    return lambda row: {'prompt': f'{cfg.sequence_len} {cfg[\"rl\"]} {cfg[\"x\"]}'}\n"
    )
    settings = data_spec(config).settings
    assert find("cfg.py:made", settings=settings)({})["prompt"] == "77 ipo None"
    assert find("cfg.py:made(rl='y')", settings=settings)({})["prompt"] == "77 y None"


def test_functions_from_a_file(own):
    row = {"question": "1+1?", "answer": "it is\n#### 1,002", "text": "dropped", "kept": 1}
    assert find("my_formats.py:direct")(row) == {
        "question": "1+1?",
        "answer": row["answer"],
        "kept": 1,
        "prompt": "1+1?",
        "has": False,
    }
    assert find("my_formats.py:direct(prefix='Q: ')", tokenizer=object())(row)["prompt"] == "Q: 1+1?"
    # axolotl's name and shape, from its documentation.
    made = find("my_formats.transform")(row)
    assert made == {"prompt": [user("1+1?")], "answer": "1002", "kept": 1}
    made = find("my_package_formats:alone", options={"field": "f"})(row)
    assert (made["prompt"], made["unset"]) == ("ff", None)
    assert find("my_package_formats.everything")(row) == {"prompt": "P"}


def test_functions_that_are_wrong(own):
    with pytest.raises(ConfigError, match=r"my_package_formats:wrong returned str; it must return a dictionary"):
        find("my_package_formats:wrong")({"a": 1})
    with pytest.raises(ConfigError, match=r"my_formats.py:direct has no option 'suffix'; it takes prefix"):
        find("my_formats.py:direct(suffix='x')")
    with pytest.raises(ConfigError, match=r"has no 'dirct'.*the closest is direct"):
        find("my_formats.py:dirct")
    with pytest.raises(ConfigError, match=r"'my_package_formats:number' is int"):
        find("my_package_formats:number")
