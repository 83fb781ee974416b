"""Which turns, ends of turns and letters of a conversation are learned: flags of messages, and axolotl's format."""

import datasets
import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.formats.lookup import find
from tests.data.bpe_tokenizer import bpe_tokenizer
from tests.data.conftest import CHATML
from tests.data.test_tokenize import assistant, learned, tokenized, user

END = "<|im_end|>\n"
TALK = [{"role": "system", "content": "S"}, user("ask"), assistant("say"), user("more"), assistant("done")]


def flagged(**flags):
    """The talk with flags of messages: name=(value of each message)."""
    return [
        {**message, **{name: x[i] for name, x in flags.items() if x[i] is not None}} for i, message in enumerate(TALK)
    ]


@pytest.mark.parametrize(
    ("flags", "loss_on", "expected"),
    [
        ({"train": (None, True, False, None, None)}, "completion", f"ask{END}done{END}"),
        ({"train": (True, True, None, True, None)}, "completion", f"S{END}ask{END}say{END}more{END}done{END}"),
        ({"train": (None, True, None, None, False)}, "last_turn", f"say{END}"),
        ({"train_end": (None, None, False, None, True)}, "completion", f"saydone{END}"),
        ({"train_end": (True,) * 5}, "completion", f"{END}{END}say{END}{END}done{END}"),
        ({"train_end": (True, None, None, None, False)}, "last_turn", "done"),
        (
            {"train": (None, False, None, None, None), "train_end": (None, None, None, None, False)},
            "all",
            f"system\nS{END}<|im_start|>user\n<|im_start|>assistant\nsay{END}<|im_start|>user\nmore{END}"
            "<|im_start|>assistant\ndone",
        ),
    ],
)
def test_messages_say_whether_they_are_learned(chatml_tokenizer, flags, loss_on, expected):
    messages = flagged(**flags)
    rows = [{"messages": messages}]
    for data in (rows, datasets.Dataset.from_list(rows)):
        (row,) = tokenized("completions", data, chatml_tokenizer, loss_on=loss_on)
        assert learned(chatml_tokenizer, **row) == expected
        assert row["ids"] == chatml_tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"]


def spans(*marks):
    return [{"begin_offset": begin, "end_offset": end, "train": train} for begin, end, train in marks]


def test_letters_that_are_learned(chatml_tokenizer):
    """Axolotl's example: the last letter counts, what no span names is not learned, the end is as the turn says."""
    text = "I'm doing very well, thank you!"
    detail = spans((0, 8, False), (9, 18, True), (19, 30, False))
    for flags, end in (({}, END), ({"train_end": False}, "")):
        message = {**assistant(text), "train_detail": detail, **flags}
        (row,) = tokenized("completions", [{"messages": [user("a"), message]}], chatml_tokenizer)
        assert learned(chatml_tokenizer, **row) == text[9:19] + end
    message = {**assistant(text), "train_detail": detail, "train": False}
    (row,) = tokenized("completions", [{"messages": [user("a"), message, assistant("b")]}], chatml_tokenizer)
    assert learned(chatml_tokenizer, **row) == f"b{END}"
    # A template that strips, of letters of several bytes.
    chatml_tokenizer.chat_template = CHATML.replace("message.content", "message.content | trim")
    message = {**assistant("  für π  "), "train_detail": spans((3, 3, True), (6, 6, True))}
    (row,) = tokenized("completions", [{"messages": [user("a"), message]}], chatml_tokenizer)
    assert learned(chatml_tokenizer, **row) == f"üπ{END}"
    # A turn that the prompt has begun, and numbers beyond the content.
    prompt, rest = [user("a"), assistant("I am ")], {**assistant("not well"), "train_detail": spans((-2, 2, True))}
    (row,) = tokenized("completions", [{"prompt": prompt, "completion": [rest]}], chatml_tokenizer)
    assert learned(chatml_tokenizer, **row) == f"not{END}"


def test_a_token_across_a_border_is_not_learned():
    """The space before a word is a letter of its token."""
    tokenizer = bpe_tokenizer(["the cat sat"] * 50, 300)
    words = "the cat sat"
    assert tokenizer.tokenize(words) == ["the", "Ġcat", "Ġsat"]
    for begin, expected in ((0, words), (1, " cat sat"), (3, " cat sat"), (4, " sat"), (7, " sat")):
        message = {**assistant(words), "train_detail": spans((begin, len(words) - 1, True)), "train_end": False}
        (row,) = tokenized("completions", [{"messages": [user("a"), message]}], tokenizer)
        assert learned(tokenizer, **row) == expected
    message["train_detail"] = spans((8, len(words) - 1, True))
    with pytest.raises(ConfigError, match=r"no row is left"):
        tokenized("completions", [{"messages": [user("a"), message]}], tokenizer)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"train": "no"}, "row 0: message 1 has train = 'no'; it is true or false"),
        ({"train_end": 2}, "message 1 has train_end = 2"),
        ({"train_detail": [{"begin_offset": 0}]}, "message 1 has train_detail = .*begin_offset, end_offset"),
        ({"train_detail": spans((0, 1, True)), "content": None}, "message 1 has train_detail"),
    ],
)
def test_flags_that_say_nothing_are_refused(chatml_tokenizer, flags, message):
    with pytest.raises(ConfigError, match=message):
        tokenized("completions", [{"messages": [user("a"), {**assistant("b"), **flags}]}], chatml_tokenizer)


def test_a_content_that_the_template_rewrites(chatml_tokenizer):
    chatml_tokenizer.chat_template = CHATML.replace("message.content", "message.content | upper")
    message = {**assistant("bcd"), "train_detail": spans((0, 1, True))}
    with pytest.raises(ConfigError, match=r"message 1 says which letters are learned .* writes its content otherwise"):
        tokenized("completions", [{"messages": [user("a"), message]}], chatml_tokenizer)


# --- axolotl's format -------------------------------------------------------------------------------------------------


def chat(tokenizer, row, **options):
    """The learned text of a row in axolotl's format."""
    example = find("chat_template", "completions", options=options)(row)
    (made,) = tokenized("completions", [example], tokenizer)
    return learned(tokenizer, **made)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, f"say{END}done{END}"),
        ({"roles_to_train": ["human"]}, f"ask{END}more{END}"),
        ({"roles_to_train": "human", "roles": {"user": "human", "assistant": ["gpt"]}}, f"ask{END}more{END}"),
        ({"roles_to_train": ["user", "assistant"], "train_on_eos": "last"}, f"asksaymoredone{END}"),
        ({"train_on_eos": "all"}, f"{END}{END}say{END}{END}done{END}"),
        ({"train_on_eos": "none"}, "saydone"),
        ({"roles_to_train": None, "train_on_eos": None}, f"done{END}"),
        ({"roles_to_train": [], "message_field_training": "train"}, f"more{END}"),
        ({"message_field_training": "train"}, f"more{END}done{END}"),
    ],
)
def test_turns_of_axolotls_format(chatml_tokenizer, options, expected):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns: list[dict] = [{"from": names[x["role"]], "value": x["content"]} for x in TALK]
    turns[2]["train"], turns[3]["train"] = False, True
    mapping = {"message_property_mappings": {"role": "from", "content": "value"}, "field_messages": "conversations"}
    assert chat(chatml_tokenizer, {"conversations": turns}, **mapping, **options) == expected


def test_parts_of_axolotls_format(chatml_tokenizer):
    """The example of its page: what is masked within an answer, by offsets and by parts of the content."""
    detail = spans((0, 8, False), (9, 18, True), (19, 30, False))
    row = {"messages": [user("a"), {**assistant("I'm doing very well, thank you!"), "letters": detail}]}
    options = {"roles_to_train": [], "message_field_training_detail": "letters"}
    assert chat(chatml_tokenizer, row, **options) == f" very well{END}"
    parts = [{"type": "text", "text": "Let me think...", "train": False}, {"type": "text", "text": " It is 4."}]
    row = {"messages": [user("a"), assistant(parts), user("b"), assistant("c")]}
    assert chat(chatml_tokenizer, row) == f" It is 4.{END}c{END}"
    parts[1]["weight"], parts[0]["train"] = 0, True
    assert chat(chatml_tokenizer, row, train_on_eos="none") == "Let me think...c"
    row = {"system": "S", "messages": [user("a"), assistant("b")]}
    example = find("chat_template", "completions")(row)
    assert [x["role"] for x in example["messages"]] == ["system", "user", "assistant"]
    example = find("chat_template(drop_system_message=True)", "completions")(row)
    assert [x["role"] for x in example["messages"]] == ["user", "assistant"]


def test_thoughts_and_tools_of_axolotls_format():
    """Under the names that the options give, or within the content."""
    form = find(
        "chat_template(field_tools='functions', field_thinking='why', template_thinking_key='thinking', "
        "split_thinking=True)", "completions",
    )  # fmt: skip
    contents = {
        "<think>\nhm\n</think>\n\nyes": "yes",
        "<reasoning>hm</reasoning>yes": "yes",
        "<|begin_of_thought|>hm<|end_of_thought|>\n<|begin_of_solution|>\nyes\n<|end_of_solution|>": "yes",
        "<think>hm</think>": "",
    }
    for content, said in contents.items():
        made = form({"messages": [user("<think>a</think>b"), assistant(content)], "functions": [{"name": "f"}]})
        ask, answer = made["messages"]
        assert (ask["content"], answer["content"], answer["thinking"]) == ("<think>a</think>b", said, "hm")
        assert made["tools"] == [{"name": "f"}]
    made = form({"messages": [user("a"), {**assistant("b"), "why": "hm"}]})
    assert made["messages"][1] == {"role": "assistant", "content": "b", "thinking": "hm", "train": True}
    whole = find("chat_template", "completions")({"messages": [user("a"), assistant("<think>hm</think>b")]})
    assert whole["messages"][1]["content"] == "<think>hm</think>b" and "tools" not in whole


def test_what_axolotls_format_refuses():
    form = find("chat_template", "completions")
    with pytest.raises(ConfigError, match=r"holds .* but the format chat_template takes messages with 'role'"):
        form({"messages": [{"from": "gpt", "value": "a"}]})
    with pytest.raises(ConfigError, match=r"train_on_eos is 'first'; the format chat_template takes turn, all, last"):
        find("chat_template(train_on_eos='first')", "completions")({"messages": [user("a")]})
    with pytest.raises(ConfigError, match=r"a content has the part"):
        form({"messages": [assistant([{"type": "image", "train": True}])]})
    with pytest.raises(ConfigError, match=r"has no option 'roles_trained'"):
        find("chat_template(roles_trained=['user'])", "completions")
