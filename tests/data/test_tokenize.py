import json
import logging
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.formats.lookup import find
from jaxrl_llm.data.length_limit import LimitedTokenizer
from jaxrl_llm.data.loading import token_rows
from jaxrl_llm.data.opening import DataSource
from jaxrl_llm.data.pairs import split_pair
from jaxrl_llm.data.templates import tool_calls
from jaxrl_llm.data.tokenize import LOSS_ON, NOT_LEARNED, RowTokenizer, _tell_of_messages
from tests.data.spacing_tokenizer import SPACINGS, spacing_tokenizer

END = 257
USER, ASSISTANT = 259, 260


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def tokenized(kind, examples, tokenizer, limit=None, overlong="error", **options):
    """The token rows of examples that need no format."""
    tokenize = LimitedTokenizer(RowTokenizer(kind, tokenizer, **options), limit, overlong)
    source = DataSource("", examples, dict, None, None, None)
    rows = [row for row in token_rows(source, kind, tokenize) if row is not None]
    tokenize.report(len(rows))
    return rows


def learned(tokenizer, ids, mask):
    return tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on], skip_special_tokens=False)


def whole(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_keep_the_other_columns(tokenizer):
    data = datasets.Dataset.from_list([{"prompt": "ab", "answer": 1}, {"prompt": "c", "answer": 2}])
    assert tokenized("prompts", data, tokenizer, 8) == [
        {"prompt": "ab", "answer": 1, "prompt_ids": [97, 98]},
        {"prompt": "c", "answer": 2, "prompt_ids": [99]},
    ]


def test_messages_in_a_text_are_noted(tokenizer, caplog):
    """pandas' to_csv writes them as Python shows them, and the run would be trained on the brackets."""
    for text in (json.dumps([user("a")]), str([user("a")]), ' [ {"content": "a"}]', '["role"]', "[{x}]"):
        _tell_of_messages.cache_clear()
        caplog.clear()
        tokenized("prompts", [{"prompt": text}] * 2, tokenizer)
        tokenized("pairs", [{"chosen": f"{text}a", "rejected": f"{text}b"}], tokenizer)
        assert [record.args[0] for record in caplog.records] == (["prompt", "chosen"] if "a" in text else [])


def test_chat_prompts(tokenizer):
    rows = tokenized("prompts", [{"prompt": [user("hi")]}], tokenizer, 8)
    assert rows == [{"prompt": [user("hi")], "prompt_ids": [USER, *b"hi", END, ASSISTANT]}]


@pytest.mark.parametrize(
    ("overlong", "kept"),
    [
        ("truncate_left", b"56789"),
        ("truncate_right", b"01234"),
        # As verl cuts: 5 // 2 tokens from the start, the rest from the end.
        ("truncate_middle", b"01789"),
    ],
)
def test_truncating_long_prompts(tokenizer, caplog, overlong, kept):
    with caplog.at_level(logging.WARNING):
        rows = tokenized("prompts", [{"prompt": "0123456789"}, {"prompt": "12345"}], tokenizer, 5, overlong)
    assert [row["prompt_ids"] for row in rows] == [list(kept), list(b"12345")]
    assert "truncated 1 row with a prompt of more than 5 tokens" in caplog.text


def test_dropping_long_prompts(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        rows = tokenized("prompts", [{"prompt": "123456"}, {"prompt": "12345"}], tokenizer, 5, "filter")
    assert [row["prompt"] for row in rows] == ["12345"]
    assert "dropped 1 row" in caplog.text


def test_long_prompt_error(tokenizer):
    message = (
        "row 1: the prompt has 6 tokens, more than rollout.max_prompt_length=5; raise that or set data.overlong to "
        "filter, truncate_left, truncate_right, truncate_middle"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        tokenized("prompts", [{"prompt": "12345"}, {"prompt": "123456"}], tokenizer, 5)


def test_tools_and_template_options_of_a_row(tokenizer, tokenizer_folder):
    template = "{{- (tools or []) | map(attribute='function.name') | join -}}{{- a | default -}}{{- b | default -}}"
    tokenizer = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=template)
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    row = {"prompt": [user("hi")], "tools": json.dumps(tools), "chat_template_kwargs": {"b": "2", "c": None}}
    others = [{"prompt": [user("hi")], "tools": none, "chat_template_kwargs": none} for none in (None, "", " ")]
    rows = tokenized("prompts", [row, *others], tokenizer, 9, template_kwargs={"a": "1"})
    assert [whole(tokenizer, row["prompt_ids"]) for row in rows] == ["add12", "1", "1", "1"]


def test_prompt_errors(tokenizer):
    with pytest.raises(ConfigError, match=r"no column 'prompt'; it has question, answer; .* data.prompt_key"):
        tokenized("prompts", [{"question": "a", "answer": "b"}], tokenizer, 5)
    with pytest.raises(ConfigError, match="row 1: the prompt '' has no tokens"):
        tokenized("prompts", [{"prompt": "a"}, {"prompt": ""}], tokenizer, 5)
    with pytest.raises(ConfigError, match=r"row 0: a prompt is text or a list of messages .* not None"):
        tokenized("prompts", [{"prompt": None}], tokenizer, 5)
    with pytest.raises(
        ConfigError, match=re.escape("no row is left to train on (1 had a prompt of more than 1 token)")
    ):
        tokenized("prompts", [{"prompt": "ab"}], tokenizer, 1, "filter")
    with pytest.raises(ConfigError, match=r"data.overlong is 'cut'; here it is one of error, filter"):
        tokenized("prompts", [{"prompt": "ab"}], tokenizer, 1, "cut")
    with pytest.raises(ConfigError, match="row 0: the tools column is not JSON"):
        tokenized("prompts", [{"prompt": "ab", "tools": "{"}], tokenizer, 5)


class Slow:
    """A tokenizer that must not be asked for long texts."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **options):
        assert len(text) < 1e6
        return self.tokenizer(text, **options)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("prompts", {"prompt": "9" * 10**7}),
        ("prompts", {"prompt": [user("9" * 10**7)]}),
        ("completions", {"prompt": "a", "completion": "9" * 10**7}),
        ("completions", {"messages": [user("9" * 10**7), assistant("b")]}),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "9" * 10**7}),
    ],
)
def test_a_hopelessly_long_text_is_not_tokenised(tokenizer, kind, row):
    with pytest.raises(ConfigError, match=r"row 0: the (prompt|row) has many times more text than .*=8 tokens hold"):
        tokenized(kind, [row], Slow(tokenizer), 8)
    with pytest.raises(ConfigError, match=r"no row is left to train on \(1 had "):
        tokenized(kind, [row], Slow(tokenizer), 8, "filter")
    spaces = LimitedTokenizer(RowTokenizer("prompts", tokenizer), 8)
    assert not spaces._is_hopeless({"prompt": " " * 10**7}) and not spaces._is_hopeless({"prompt": "9" * 9})


def test_what_is_wrong_with_rows_is_named(tokenizer):
    for wrong in ("[]", [{"content": "a"}], [{"role": None, "content": "a"}], [], ["a"]):
        with pytest.raises(ConfigError, match="row 0: a prompt is text or a list of messages with role and content"):
            tokenized("completions", [{"messages": wrong}], tokenizer, 64)
    for margin in ("nan", float("nan"), float("inf"), "big"):
        pair = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
        with pytest.raises(ConfigError, match=r"row 0: margin is .*; it is a number, by how much chosen is better"):
            tokenized("pairs", [pair], tokenizer, 64)
    with pytest.raises(ConfigError, match=r"row 0: column 'pixels' is 3, but it takes the tiles \[tiles,H,W,C\]"):
        tokenized("prompts", [{"prompt": "a", "pixels": 3}], tokenizer, 64)
    assert tokenized("prompts", [{"prompt": "a", "pixels": None}], tokenizer, 64)
    # Formats are named where they help.
    with pytest.raises(ConfigError, match=r"or these as text$"):
        tokenized("labels", [{"prompt": "a", "completion": "b", "label": "yes"}], tokenizer, 64)
    with pytest.raises(ConfigError, match=r"\(1 have no token to learn, as no turn of the assistant is left in them\)"):
        tokenized("completions", [{"messages": [user("a")]}], tokenizer, 64)
    with pytest.raises(ConfigError, match="row 0: column 'completion' is None in this row"):
        tokenized("completions", [{"prompt": "a", "completion": None}], tokenizer, 64)


# --- completions ------------------------------------------------------------------------------------------------------


def test_text_that_is_no_unicode_is_named(tokenizer, special_tokenizer):
    """Escapes of JSON may leave half of a letter, which tokenizers refuse without a word of where it is."""
    torn = json.loads('"a smile: \\ud83d!"')
    for prompt in (torn, [user(torn)]):
        with pytest.raises(
            ConfigError, match=r"row 0: half of a surrogate pair, which is no Unicode, in .*smile: \\ud83d!"
        ):
            tokenized("prompts", [{"prompt": prompt}], tokenizer)
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        tokenized("completions", [{"prompt": "a", "completion": torn}], special_tokenizer)


def test_a_completion_goes_on_with_a_turn_of_text_alone(chatml_tokenizer):
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    for prompt, completion in (([user("Q"), call], "4"), ([user("Q"), assistant("4")], [call])):
        with pytest.raises(ConfigError, match=r"the content of both is text, not .*NoneType.*; end the prompt before"):
            tokenized("completions", [{"prompt": prompt, "completion": completion}], chatml_tokenizer)


def test_calls_that_the_template_leaves_out_are_not_learned_as_empty_turns(tokenizer, chatml_tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "look"}}]}
    messages = [user("Q"), call, {"role": "tool", "content": "7"}, assistant("A")]
    with pytest.raises(ConfigError, match=r"row 0: message 1 calls 'look', which the chat template does not show"):
        tokenized("completions", [{"messages": messages}], tokenizer)
    assert tokenized("completions", [{"messages": messages}], tokenizer, loss_on="last_turn")
    shown = "(message.tool_calls[0].function.name if message.tool_calls else message.content)"
    chatml_tokenizer.chat_template = chatml_tokenizer.chat_template.replace("message.content", shown)
    (made,) = tokenized("completions", [{"messages": messages}], chatml_tokenizer)
    assert learned(chatml_tokenizer, **made) == "look<|im_end|>\nA<|im_end|>\n"


def test_calls_in_other_forms(chatml_tokenizer):
    """OpenAI's former function_call and role function, and calls as JSON text, as a column of one type needs them."""
    shown = "((message.tool_calls[0].function | tojson) if message.tool_calls else message.content)"
    chatml_tokenizer.chat_template = chatml_tokenizer.chat_template.replace("message.content", shown)
    called = {"name": "look", "arguments": '{"at": 1}'}
    calls = [{"type": "function", "function": called}]
    turn, result = {"role": "assistant", "content": ""}, {"role": "tool", "content": "7"}
    (usual,) = tokenized(
        "completions", [{"messages": [user("Q"), {**turn, "tool_calls": calls}, result]}], chatml_tokenizer
    )
    assert learned(chatml_tokenizer, **usual) == '{"name": "look", "arguments": {"at": 1}}<|im_end|>\n'
    former = {"role": "assistant", "content": None, "function_call": called}
    for messages in (
        [user("Q"), former, {**result, "role": "function", "name": "look"}],
        [user("Q"), {**turn, "tool_calls": json.dumps(calls)}, result],
    ):
        assert tokenized("completions", [{"messages": messages}], chatml_tokenizer) == [usual]
    for text in ("", "[]"):
        messages = [{**user("Q"), "tool_calls": text}, {**turn, "content": "A", "tool_calls": text}]
        (row,) = tokenized("completions", [{"messages": messages}], chatml_tokenizer)
        assert learned(chatml_tokenizer, **row) == "A<|im_end|>\n"
    with pytest.raises(
        ConfigError, match=r"a message has the tool_calls '\[\{'; they are a list of calls, or the JSON"
    ):
        tokenized("completions", [{"messages": [user("Q"), {**turn, "tool_calls": "[{"}]}], chatml_tokenizer)


def test_a_former_function_call_that_the_template_leaves_out_is_no_empty_turn(tokenizer):
    messages = [user("Q"), {**assistant(""), "function_call": {"name": "look", "arguments": "{}"}}]
    with pytest.raises(ConfigError, match=r"row 0: message 1 calls 'look', which the chat template does not show"):
        tokenized("completions", [{"messages": messages}], tokenizer)


def test_plain_completion_has_one_end(tokenizer):
    rows = tokenized(
        "completions", [{"prompt": "ab", "completion": "cd"}, {"prompt": "a", "completion": "b<|end|>"}], tokenizer
    )
    assert rows == [
        {"ids": [97, 98, 99, 100, END], "mask": [0, 0, 1, 1, 1]},
        {"ids": [97, 98, END], "mask": [0, 1, 1]},
    ]


def test_bos_and_end_of_a_row(special_tokenizer):
    rows = tokenized("completions", [{"prompt": "ab", "completion": "cd"}], special_tokenizer)
    assert rows == [{"ids": [261, 97, 98, 99, 100, END], "mask": [0, 0, 0, 1, 1, 1]}]


def test_the_boundary_is_between_the_parts(tokenizer_folder):
    """A tokenizer with the merge b+c would swallow the boundary of "ab" + "cd" if the row were tokenised whole."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "b": 1, "c": 2, "d": 3, "bc": 4, "<end>": 5}
    merging = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocabulary, [("b", "c")])), eos_token="<end>", additional_special_tokens=[]
    )
    assert merging("abcd")["input_ids"] == [0, 4, 3]
    rows = tokenized("completions", [{"prompt": "ab", "completion": "cd"}], merging)
    assert rows == [{"ids": [0, 1, 2, 3, 5], "mask": [0, 0, 1, 1, 1]}]


@pytest.mark.parametrize("prompt", ["ab", "a b ", "b", [user("ab")], [user("a"), assistant("b"), user("b")]])
@pytest.mark.parametrize("completion", ["c", "cb", " c", "bc d"])
def test_a_row_begins_with_the_sampled_prompt(tokenizer_folder, prompt, completion):
    """The prompt's ids in training are those that sampling starts from; tokenised as one text they are not always."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: index for index, letter in enumerate("abcdu :")} | {"bc": 7, "b ": 8, ":c": 9, "<end>": 10}
    backend = Tokenizer(BPE(vocabulary, [("b", "c"), ("b", " "), (":", "c")]))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "removed")
    template = "{%- for m in messages -%}{{- m.role[0] + ':' + m.content -}}{%- endfor -%}"
    template += "{%- if add_generation_prompt -%}{{- 'a:' -}}{%- endif -%}"
    merging = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=template)
    (row,) = tokenized("completions", [{"prompt": prompt, "completion": completion}], merging)
    (asked,) = tokenized("prompts", [{"prompt": prompt}], merging, 99)
    width = len(asked["prompt_ids"])
    assert row["ids"][:width] == asked["prompt_ids"]
    assert row["mask"] == [0] * width + [1] * (len(row["ids"]) - width)
    assert "".join(merging.convert_ids_to_tokens(row["ids"][width:])).removesuffix("<end>") == completion


def llama_tokenizer(legacy):
    from transformers import LlamaTokenizer

    tokenizer = spacing_tokenizer("first")
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return LlamaTokenizer(model["vocab"], merges, legacy=legacy, chat_template=tokenizer.chat_template)


TURNS = [user("2"), assistant("4"), user("3"), assistant("5 6")]


@pytest.mark.parametrize("make", [*SPACINGS, True, False])
def test_answers_get_no_space_from_the_tokenizer(make):
    """SentencePiece's tokenizers put one before a text: the first token of an answer would never be sampled."""
    tokenizer = spacing_tokenizer(make) if isinstance(make, str) else llama_tokenizer(make)
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    for prompt, completion in (("2+2=", "4"), ("2+2=", " 4"), ("2+2=\n", "4 5"), ("", "4")):
        (row,) = tokenized("completions", [{"prompt": prompt, "completion": completion}], tokenizer)
        assert row["ids"] == ids(f"{prompt}{completion}</s>")
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    (row,) = tokenized("pairs", [pair], tokenizer)
    assert (row["chosen_ids"], row["rejected_ids"]) == (ids("2+2=4</s>"), ids("2+2=5</s>"))
    (row,) = tokenized("completions", [{"messages": TURNS}], tokenizer)
    assert row["ids"] == ids(tokenizer.apply_chat_template(TURNS, tokenize=False))
    answers = [token for token, on in zip(row["ids"], row["mask"], strict=True) if on]
    assert [token for token in tokenizer.convert_ids_to_tokens(answers) if token[-1] in "456"][:2] == ["4", "5"]
    # What comes after a turn is the beginning of the next turn's prompt.
    (asked,) = tokenized("prompts", [{"prompt": TURNS[:3]}], tokenizer)
    assert row["ids"][: len(asked["prompt_ids"])] == asked["prompt_ids"]


def test_a_beginning_of_the_row_is_no_token_of_its_text():
    """An answer behind no text opens the row, with the space that the tokenizer puts there."""
    tokenizer = spacing_tokenizer("first")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    rows = tokenized("completions", [{"prompt": "", "completion": "4"}, {"prompt": "2", "completion": "4"}], tokenizer)
    assert [tokenizer.convert_ids_to_tokens(row["ids"]) for row in rows] == [
        ["<s>", "▁4", "</s>"],
        ["<s>", "▁2", "4", "</s>"],
    ]


def test_full_loss_learns_all_but_the_first(tokenizer):
    rows = tokenized("completions", [{"prompt": "ab", "completion": "c"}], tokenizer, loss_on="all")
    assert rows == [{"ids": [97, 98, 99, END], "mask": [0, 1, 1, 1]}]


def test_text_rows_are_learned_whole(tokenizer):
    assert tokenized("completions", [{"text": "ab"}], tokenizer) == [{"ids": [97, 98, END], "mask": [0, 1, 1]}]


def test_an_empty_prompt(tokenizer):
    rows = tokenized("completions", [{"prompt": "", "completion": "ab"}], tokenizer)
    assert rows == [{"ids": [97, 98, END], "mask": [0, 1, 1]}]


def test_chat_completion_equals_the_template(chatml_tokenizer):
    row = {"prompt": [user("hi")], "completion": [assistant("yo")]}
    (made,) = tokenized("completions", [row], chatml_tokenizer)
    expected = chatml_tokenizer.apply_chat_template([user("hi"), assistant("yo")], return_dict=True)["input_ids"]
    assert made["ids"] == expected
    # The template ends a turn itself: no second end is added.
    assert learned(chatml_tokenizer, **made) == "yo<|im_end|>\n"
    assert made["ids"].count(chatml_tokenizer.eos_token_id) == 2


def test_text_completion_of_a_chat_prompt(tokenizer):
    (made,) = tokenized("completions", [{"prompt": [user("hi")], "completion": "yo"}], tokenizer)
    assert made["ids"] == [USER, *b"hi", END, ASSISTANT, *b"yo", END]
    assert made["mask"] == [0, 0, 0, 0, 0, 1, 1, 1]


def test_messages_learn_every_assistant_turn(chatml_tokenizer):
    messages = [{"role": "system", "content": "S"}, user("a"), assistant("b"), user("c"), assistant("d")]
    (made,) = tokenized("completions", [{"messages": messages}], chatml_tokenizer)
    assert made["ids"] == chatml_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert learned(chatml_tokenizer, **made) == "b<|im_end|>\nd<|im_end|>\n"
    (made,) = tokenized("completions", [{"messages": messages}], chatml_tokenizer, loss_on="all")
    assert sum(made["mask"]) == len(made["ids"]) - 1


@pytest.mark.parametrize("system", ["", "{{- '<|im_start|>system\nBe kind.<|im_end|>\n' -}}"])
def test_the_opening_of_a_first_turn_of_the_assistant_is_not_learned(chatml_tokenizer, system):
    """Nor is the system prompt that the template puts before it."""
    chatml_tokenizer.chat_template = system + chatml_tokenizer.chat_template
    for first in ("hello", "a", "b"):
        messages = [assistant(first), user("c"), assistant("d")]
        (made,) = tokenized("completions", [{"messages": messages}], chatml_tokenizer)
        assert learned(chatml_tokenizer, **made) == f"{first}<|im_end|>\nd<|im_end|>\n"
        assert made["ids"] == chatml_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    (made,) = tokenized("completions", [{"messages": [assistant("hello")]}], chatml_tokenizer)
    assert learned(chatml_tokenizer, **made) == "hello<|im_end|>\n"


def test_a_last_user_message_is_not_learned(chatml_tokenizer):
    messages = [user("a"), assistant("b"), user("c")]
    (made,) = tokenized("completions", [{"messages": messages}], chatml_tokenizer)
    assert learned(chatml_tokenizer, **made) == "b<|im_end|>\n"
    assert whole(chatml_tokenizer, made["ids"]).endswith("<|im_start|>user\nc<|im_end|>\n")


def test_turns_of_a_prompt_are_not_learned(chatml_tokenizer):
    row = {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d"), user("e"), assistant("f")]}
    (made,) = tokenized("completions", [row], chatml_tokenizer)
    assert learned(chatml_tokenizer, **made) == "d<|im_end|>\nf<|im_end|>\n"


def test_a_prompt_that_ends_in_the_answer(chatml_tokenizer):
    row = {"prompt": [user("hi"), assistant("The sky")], "completion": [assistant(" is blue")]}
    (made,) = tokenized("completions", [row], chatml_tokenizer)
    assert learned(chatml_tokenizer, **made) == " is blue<|im_end|>\n"
    answer = [user("hi"), assistant("The sky is blue")]
    assert whole(chatml_tokenizer, made["ids"]) == chatml_tokenizer.apply_chat_template(answer, tokenize=False)


def test_a_template_that_rewrites_the_past(tokenizer, tokenizer_folder):
    rewriting = "{{- messages | length -}}{%- for m in messages -%}{{- m.content -}}{%- endfor -%}"
    tokenizer = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=rewriting)
    with pytest.raises(
        ConfigError, match=r"row 0: the chat template writes the beginning .* differently once message 1"
    ):
        tokenized("completions", [{"messages": [user("a"), assistant("b")]}], tokenizer)


# Qwen3's: the last answer has a block of thoughts, which goes once a question follows. Phi-3's: one more end after all.
THOUGHTFUL = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}"
    "{%- if m.role == 'assistant' and loop.last -%}{{- '<think></think>' -}}{%- endif -%}{{- m.content + '<|end|>' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
CLOSED = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<|end|>\n' -}}{%- endfor -%}"
    "{{- '<|assistant|>' if add_generation_prompt else '<|pad|>' -}}"
)
TALK = [user("a"), assistant("b"), user("c"), assistant("d")]


def with_template(tokenizer, folder, template):
    return type(tokenizer).from_pretrained(folder, chat_template=template)


def test_a_template_that_forgets_thoughts(tokenizer, tokenizer_folder):
    """Every turn cannot be told apart there; the last can, and all tokens need not be."""
    tokenizer = with_template(tokenizer, tokenizer_folder, THOUGHTFUL)
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False)
    (last,) = tokenized("completions", [{"messages": TALK}], tokenizer, loss_on="last_turn")
    assert learned(tokenizer, **last) == "<think></think>d<|end|>" and whole(tokenizer, last["ids"]) == rendered
    (every,) = tokenized("completions", [{"messages": TALK}], tokenizer, loss_on="all")
    assert every == {"ids": last["ids"], "mask": [0] + [1] * (len(last["ids"]) - 1)}
    (shown,) = tokenized("completions", [{"messages": TALK}], tokenizer, loss_on="as_shown")
    assert learned(tokenizer, **shown) == "b<|end|><think></think>d<|end|>" and shown["ids"] == last["ids"]
    turns = r"learn turns as the whole conversation shows them \(data.loss_on=as_shown\), "
    ways = rf"the last turn alone \(data.loss_on=last_turn\), {turns}learn every token \(data.loss_on=all\), set the"
    with pytest.raises(ConfigError, match=f"row 0: .* once message 1 follows, or that message once others do.*{ways}"):
        tokenized("completions", [{"messages": TALK}], tokenizer)
    # Behind the last turn a question follows: what is left is what is shown.
    with pytest.raises(ConfigError, match=rf"told from its prompt; {turns}learn every token"):
        tokenized("completions", [{"messages": TALK[:3]}], tokenizer)
    # Pairs have no such setting.
    pair = {"prompt": TALK[:1], "chosen": [assistant("b"), user("c"), assistant("d")], "rejected": "x"}
    with pytest.raises(ConfigError, match=r"told from its prompt; set the template's options"):
        tokenized("pairs", [{**pair, "rejected": [assistant("x")]}], tokenizer)


def test_a_template_that_ends_the_last_turn_otherwise(tokenizer, tokenizer_folder):
    """A turn has as much of its end as it has there: the marks <|pad|> and <|user|> begin alike."""
    closed = with_template(tokenizer, tokenizer_folder, CLOSED)
    (row,) = tokenized("completions", [{"messages": TALK}], closed)
    assert learned(closed, **row) == "b<|end|>\nd<|end|>\n<|pad|>"
    assert whole(closed, row["ids"]) == closed.apply_chat_template(TALK, tokenize=False)
    (row,) = tokenized("completions", [{"messages": TALK[:3]}], closed)
    assert learned(closed, **row) == "b<|end|>\n"
    # gpt-oss has another mark there, of which nothing is shared.
    middle = "('' if loop.last and m.role == 'assistant' else '<|end|>')"
    other = with_template(tokenizer, tokenizer_folder, CLOSED.replace("'<|end|>\n'", middle))
    (row,) = tokenized("completions", [{"messages": TALK}], other)
    assert learned(other, **row) == "bd<|pad|>"


@pytest.mark.parametrize("template", [None, CLOSED])
def test_turns_of_the_assistant_in_a_row(tokenizer, tokenizer_folder, template):
    """The first has its end, and the opening of the second is not learned."""
    if template is not None:
        tokenizer = with_template(tokenizer, tokenizer_folder, template)
    messages = [user("a"), assistant("b"), assistant("c"), user("d"), assistant("e")]
    (row,) = tokenized("completions", [{"messages": messages}], tokenizer)
    end = "<|end|>" if template is None else "<|end|>\n"
    assert learned(tokenizer, **row) == f"b{end}c{end}e{end}" + ("<|pad|>" if template else "")
    assert whole(tokenizer, row["ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)


# What can be learned with TRL's copies of chat templates: every turn, the last of them, or what the whole text shows.
OF_TRL = {
    "completion": ("llama3", "phi3", "gemma3", "gemma4", "lfm2", "gptoss", "glm4moe", "qwen2_5", "qwen3_instruct_2507"),
    "last_turn": ("qwen3", "qwen3_5_think"),
    "as_shown": ("deepseekv3", "deepseek_r1_distill", "nemotron_3_nano"),
}


@pytest.mark.parametrize(("able", "name"), [(able, name) for able, names in OF_TRL.items() for name in names])
def test_templates_of_models(tokenizer, tokenizer_folder, able, name):
    """A setting that an error names works."""
    trl = pytest.importorskip("trl")
    file = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("not in this version of TRL")
    tokenizer = with_template(tokenizer, tokenizer_folder, file.read_text())
    tokenizer.bos_token = "<|pad|>"
    talk = [user("ask1"), assistant("say1"), user("ask2"), assistant("say2")]
    rendered = tokenizer.apply_chat_template(talk, tokenize=False)
    ways = tuple(way for way in LOSS_ON if way != "last_step")  # which is of rows of steps
    refused, works = ways[: ways.index(able)], ways[ways.index(able) :]
    for loss_on in refused:
        with pytest.raises(ConfigError) as caught:
            tokenized("completions", [{"messages": talk}], tokenizer, loss_on=loss_on)
        assert [way for way in ways if f"data.loss_on={way}" in str(caught.value)] == list(works)
    for loss_on in works:
        (row,) = tokenized("completions", [{"messages": talk}], tokenizer, loss_on=loss_on)
        assert whole(tokenizer, row["ids"]) == rendered + tokenizer.eos_token * (name == "glm4moe")
        words = re.findall(r"say\d|ask\d", learned(tokenizer, **row))
        of = {"completion": ["say1", "say2"], "as_shown": ["say1", "say2"], "last_turn": ["say2"]}
        assert words == of.get(loss_on, words) and "say2" in words


# By copy of TRL: what opens a turn for the model, which the template writes of a turn without thoughts too.
OPENINGS = {"deepseek_r1_distill": "<｜Assistant｜>", "nemotron_3_nano": "<think>", "qwen3": ""}


@pytest.mark.parametrize("name", OPENINGS)
@pytest.mark.parametrize("kind", ["plain", "thoughts", "tools"])
def test_turns_as_shown_are_those_of_trl(tokenizer, tokenizer_folder, name, kind):
    """TRL learns the turns that its training templates mark, which `as_shown` finds without marks."""
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    file = folder / f"{name}_training.jinja"
    if not file.is_file():
        pytest.skip("not in this version of TRL")
    tokenizer = with_template(tokenizer, tokenizer_folder, file.read_text())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<｜end▁of▁sentence｜>", "<|im_end|>"]})
    call = {"role": "assistant", "content": "", "tool_calls": tool_calls([{"name": "f", "arguments": {"a": 1}}])}
    talk = {
        "plain": [user("ask"), assistant("say"), user("more"), assistant("done")],
        "thoughts": [user("ask"), assistant("<think>\nhm\n</think>\n\nsay"), user("more"), assistant("done")],
        "tools": [user("ask"), call, {"role": "tool", "name": "f", "content": "2"}, assistant("say"), user("more")],
    }[kind]
    if kind != "plain" and name == "deepseek_r1_distill":
        pytest.skip("which shows no calls, and thoughts in TRL's copy alone")
    made = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    theirs = learned(tokenizer, made["input_ids"], made["assistant_masks"])
    (row,) = tokenized("completions", [{"messages": talk}], tokenizer, loss_on="as_shown")
    assert row["ids"] == made["input_ids"]
    assert learned(tokenizer, **row) == theirs.replace(OPENINGS[name], "") and "say" in theirs


def test_turns_as_shown_are_learned_whole(chatml_tokenizer):
    message = {**assistant("say"), "train_end": False}
    with pytest.raises(ConfigError, match=r"message 1 says which part of it is learned .* data.loss_on=as_shown"):
        tokenized("completions", [{"messages": [user("a"), message]}], chatml_tokenizer, loss_on="as_shown")


def test_a_conversation_without_an_end_gets_one(tokenizer, tokenizer_folder):
    """GLM-4.5's turns end where the next one begins: the last would never end."""
    endless = "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content -}}{%- endfor -%}"
    endless += "{{- '<|assistant|>' if add_generation_prompt -}}"
    tokenizer = with_template(tokenizer, tokenizer_folder, endless)
    (row,) = tokenized("completions", [{"messages": TALK}], tokenizer)
    assert learned(tokenizer, **row) == f"bd{tokenizer.eos_token}"
    (pair,) = tokenized("pairs", [{"prompt": TALK[:1], "chosen": TALK[1:2], "rejected": [assistant("x")]}], tokenizer)
    assert learned(tokenizer, pair["rejected_ids"], pair["rejected_mask"]) == f"x{tokenizer.eos_token}"
    (asked,) = tokenized("completions", [{"messages": TALK[:3]}], tokenizer)
    assert learned(tokenizer, **asked) == "b" and asked["ids"][-1] != tokenizer.eos_token_id


def test_a_message_of_weight_0_is_not_learned(chatml_tokenizer):
    """As in OpenAI's files."""
    turns = [user("a"), {**assistant("b"), "weight": 0}, user("c"), {**assistant("d"), "weight": 1}]
    (row,) = tokenized("completions", [{"messages": turns}], chatml_tokenizer)
    assert learned(chatml_tokenizer, **row) == "d<|im_end|>\n"
    (row,) = tokenized("completions", datasets.Dataset.from_list([{"messages": turns}]), chatml_tokenizer)
    assert learned(chatml_tokenizer, **row) == "d<|im_end|>\n"
    (row,) = tokenized("completions", [{"messages": turns}], chatml_tokenizer, loss_on="all")
    text = chatml_tokenizer.apply_chat_template(turns, tokenize=False)
    assert learned(chatml_tokenizer, **row) == text.removeprefix("<|im_start|>").replace("b<|im_end|>\n", "")
    last = [*turns[2:], user("e"), {**assistant("f"), "weight": 0}]
    (row,) = tokenized("completions", [{"messages": last}], chatml_tokenizer, loss_on="last_turn")
    assert learned(chatml_tokenizer, **row) == "d<|im_end|>\n"
    with pytest.raises(ConfigError, match=r"row 0: message 1 has the weight 0\.5; it is 0, where the turn is not"):
        tokenized("completions", [{"messages": [user("a"), {**assistant("b"), "weight": 0.5}]}], chatml_tokenizer)


def test_columns_of_none_are_absent(tokenizer):
    data = datasets.Dataset.from_list([{"messages": None, "prompt": "a", "completion": "b", "tools": None}])
    assert tokenized("completions", data, tokenizer) == [{"ids": [97, 98, END], "mask": [0, 1, 1]}]


def test_completion_length_rules(tokenizer, caplog):
    data = [
        {"prompt": "ab", "completion": "cdef"},
        {"prompt": "abcd", "completion": "e"},
        {"prompt": "a", "completion": "b"},
    ]
    with pytest.raises(
        ConfigError, match=r"row 0: the row has 7 tokens, more than data.max_length=4; .* to filter, truncate_left, "
    ):
        tokenized("completions", data, tokenizer, 4)
    with caplog.at_level(logging.WARNING):
        assert [len(row["ids"]) for row in tokenized("completions", data, tokenizer, 4, "filter")] == [3]
        cut = tokenized("completions", data, tokenizer, 4, "truncate_right")
    # The prompt of the second row fills all four tokens: nothing is left to learn, so it goes.
    assert cut == [{"ids": [97, 98, 99, 100], "mask": [0, 0, 1, 1]}, {"ids": [97, 98, END], "mask": [0, 1, 1]}]
    assert "dropped 2 rows with more than 4 tokens" in caplog.text
    assert "dropped 1 row in which no token is learned" in caplog.text
    assert "truncated 2 rows with more than 4 tokens" in caplog.text
    assert len(tokenized("completions", data, tokenizer, 7)) == 3


@pytest.mark.parametrize(
    ("overlong", "kept"), [("truncate_left", b"2bcd"), ("truncate_right", b"01 2"), ("truncate_middle", b"01cd")]
)
def test_truncation_keeps_masks_aligned(tokenizer, overlong, kept):
    (row,) = tokenized("completions", [{"prompt": "01 2", "completion": "bcd<|end|>"}], tokenizer, 5, overlong)
    text = tokenizer.decode(row["ids"])
    assert text.replace("<|end|>", "").encode() in (kept, kept[1:], b"01 2b")
    learned_text = learned(tokenizer, **row).replace("<|end|>", "")
    assert learned_text == "".join(letter for letter in text.replace("<|end|>", "") if letter in "bcd")
    assert row["mask"][0] == 0


def test_rows_of_token_ids(tokenizer):
    """Those of TRL's and axolotl's pre-tokenised data; nothing is added to them."""
    rows = [
        {"input_ids": [97, 98, 99], **dict.fromkeys((*NOT_LEARNED, "attention_mask"))},
        {"input_ids": [97, 98, 99], "labels": [-100, -100, 99]},
        {"input_ids": [97, 98, 99, 100], "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]},
        {"input_ids": [0, 97, 98, 0], "attention_mask": [0, 1, 1, 0], "labels": [-100, 97, 98, -100]},
    ]
    expected = [
        {"ids": [97, 98, 99], "mask": [0, 1, 1]},
        {"ids": [97, 98, 99], "mask": [0, 0, 1]},
        {"ids": [97, 98, 99, 100], "mask": [0, 1, 0, 1]},
        {"ids": [97, 98], "mask": [0, 1]},
    ]
    assert tokenized("completions", rows, tokenizer) == expected
    assert tokenized("completions", datasets.Dataset.from_list(rows), tokenizer) == expected
    arrays = [{name: None if value is None else np.array(value) for name, value in row.items()} for row in rows]
    assert tokenized("completions", arrays, tokenizer) == expected
    assert tokenized("completions", rows[:1], tokenizer, 2, "truncate_right") == [{"ids": [97, 98], "mask": [0, 1]}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [97, 999999]}, r"input_ids has 999999; the tokens of the tokenizer are 0 to \d+"),
        ({"input_ids": [-1, 97]}, "input_ids has -1"),
        ({"input_ids": ["a"]}, "input_ids has 'a'"),
        ({"input_ids": 97}, "input_ids is 97; the row is token ids .* it is a list of numbers"),
        ({"input_ids": [97], "labels": 3}, "labels is 3; the row is token ids .* it is a list of numbers"),
        ({"input_ids": [97], "attention_mask": "1"}, "attention_mask is '1'; "),
        ({"input_ids": [97, 98], "labels": [98]}, "labels has 1 value for 2 input_ids"),
        ({"input_ids": [97, 98], "labels": [98, -100]}, "labels has 98 at the place of the token 97; it is that, or -"),
        ({"input_ids": [97, 98], "loss_mask": [0, 1]}, "a loss_mask, which speaks of .* give labels"),
        ({"input_ids": [97, 98], "seq_lengths": [1, 1]}, "it is packed: give rows of one text each"),
    ],
)
def test_wrong_rows_of_token_ids(tokenizer, row, message):
    with pytest.raises(ConfigError, match=f"row 0: .*{message}"):
        tokenized("completions", [row], tokenizer)


def test_token_ids_say_themselves_what_is_learned(tokenizer):
    with pytest.raises(ConfigError, match=r"data.loss_on is all, but the row is token ids, whose labels say it"):
        tokenized("completions", [{"input_ids": [97, 98]}], tokenizer, loss_on="all")
    with pytest.raises(ConfigError, match="has no column 'prompt'; it has input_ids; which are read for sft alone"):
        tokenized("prompts", [{"input_ids": [97, 98]}], tokenizer)


def test_only_the_last_turn_is_learned(chatml_tokenizer):
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    (made,) = tokenized("completions", [{"messages": messages}], chatml_tokenizer, loss_on="last_turn")
    assert learned(chatml_tokenizer, **made) == "d<|im_end|>\n"
    (every,) = tokenized("completions", [{"messages": messages}], chatml_tokenizer)
    assert made["ids"] == every["ids"]


def test_completion_errors(tokenizer):
    with pytest.raises(
        ConfigError, match=r"row 0: the row has the columns question, answer; .* reads prompt and completion"
    ):
        tokenized("completions", [{"question": "a", "answer": "b"}], tokenizer)
    with pytest.raises(ConfigError, match="row 0: the prompt is str and the completion list"):
        tokenized("completions", [{"prompt": "a", "completion": [assistant("b")]}], tokenizer)
    with pytest.raises(ConfigError, match=r"data.overlong is 'cut_left'; here it is one of"):
        tokenized("completions", [{"prompt": "a", "completion": "b"}], tokenizer, 1, "cut_left")
    with pytest.raises(ConfigError, match=r"data.loss_on is 'answer'"):
        tokenized("completions", [{"prompt": "a", "completion": "b"}], tokenizer, loss_on="answer")
    with pytest.raises(ConfigError, match="no row is left"):
        tokenized("completions", [], tokenizer)


def test_a_tokenizer_without_an_end(tokenizer, tokenizer_folder):
    endless = type(tokenizer).from_pretrained(tokenizer_folder)
    endless.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        tokenized("completions", [{"prompt": "a", "completion": "b"}], endless)


# --- pairs and labels -------------------------------------------------------------------------------------------------


def test_plain_pairs(special_tokenizer):
    rows = tokenized("pairs", [{"prompt": "ab", "chosen": "c", "rejected": "de", "margin": 2}], special_tokenizer)
    assert rows == [
        {
            "chosen_ids": [261, 97, 98, 99, END],
            "chosen_mask": [0, 0, 0, 1, 1],
            "rejected_ids": [261, 97, 98, 100, 101, END],
            "rejected_mask": [0, 0, 0, 1, 1, 1],
            "margin": 2.0,
        }
    ]


def test_chat_pairs(chatml_tokenizer):
    prompt, chosen, rejected = [user("hi")], [assistant("yes")], [assistant("no")]
    explicit = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    implicit = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    # A text prompt beside whole conversations, as in UltraFeedback: the conversations say more.
    mixed = {"prompt": "hi", **implicit}
    text = {"prompt": prompt, "chosen": "yes", "rejected": "no"}
    rows = tokenized("pairs", [explicit, implicit, mixed, text], chatml_tokenizer)
    assert all(row == rows[0] for row in rows)
    assert learned(chatml_tokenizer, rows[0]["chosen_ids"], rows[0]["chosen_mask"]) == "yes<|im_end|>\n"
    assert learned(chatml_tokenizer, rows[0]["rejected_ids"], rows[0]["rejected_mask"]) == "no<|im_end|>\n"


@pytest.mark.parametrize("margin", ["slightly", [1], ""])
def test_a_margin_is_a_number(tokenizer, margin):
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (row,) = tokenized("pairs", [{**pair, "margin": "0.5"}], tokenizer)
    assert row["margin"] == 0.5
    with pytest.raises(ConfigError, match=rf"row 1: margin is {re.escape(repr(margin))}; it is a number, by how much"):
        tokenized("pairs", [pair, {**pair, "margin": margin}], tokenizer)


def test_rows_of_a_pair_share_the_prompt_ids(tokenizer):
    (row,) = tokenized("pairs", [{"chosen": "The sky is blue.", "rejected": "The sky is green."}], tokenizer)
    width = row["chosen_mask"].index(1)
    assert width == row["rejected_mask"].index(1) == len("The sky is")
    assert row["chosen_ids"][:width] == row["rejected_ids"][:width]


@pytest.mark.parametrize(
    "example",
    [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": "The sky is blue.", "rejected": "The sky is black."},
        {"chosen": "a b c", "rejected": "a b d"},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
        {
            "chosen": [user("a"), assistant("b"), user("c"), assistant("d")],
            "rejected": [user("a"), assistant("b"), user("c"), assistant("e")],
        },
    ],
)
def test_the_implicit_prompt_is_that_of_trl(example):
    data_utils = pytest.importorskip("trl.data_utils")
    theirs = data_utils.extract_prompt(example)
    assert split_pair(example) == (theirs["prompt"], theirs["chosen"], theirs["rejected"])


def test_a_completion_that_continues_the_other(tokenizer):
    prompt, chosen, rejected = split_pair({"chosen": "ab", "rejected": "abc"})
    assert (prompt, chosen, rejected) == ("ab", "", "c")
    (row,) = tokenized("pairs", [{"chosen": "ab", "rejected": "abc"}], tokenizer)
    assert row["chosen_ids"] == [97, 98, END]
    assert row["rejected_ids"] == [97, 98, 99, END]


def test_a_pair_goes_together(tokenizer, caplog):
    data = [{"prompt": "ab", "chosen": "c", "rejected": "d" * 9}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    with pytest.raises(ConfigError, match=r"row 0: the row has 12 tokens, more than data.max_length=5"):
        tokenized("pairs", data, tokenizer, 5)
    assert [row["chosen_ids"] for row in tokenized("pairs", data, tokenizer, 5, "filter")] == [[97, 98, END]]
    cut = tokenized("pairs", data, tokenizer, 5, "truncate_right")
    assert cut[0]["chosen_ids"] == [97, 98, 99, END]
    assert cut[0]["rejected_ids"] == [97, 98, 100, 100, 100]
    assert cut[0]["rejected_mask"] == [0, 0, 1, 1, 1]


def test_pairs_that_prefer_nothing_are_counted(tokenizer, caplog):
    """One is the same from the start, another once both are truncated, and the third differs."""
    data = [
        {"prompt": "ab", "chosen": "c", "rejected": "c"},
        {"prompt": "ab", "chosen": "cdef", "rejected": "cdeg"},
        {"prompt": "ab", "chosen": "c", "rejected": "d"},
    ]
    with caplog.at_level(logging.WARNING):
        assert len(tokenized("pairs", data, tokenizer, 5, "truncate_right")) == 3
    assert "tokens are the same in 2 pairs of 3: nothing is preferred" in caplog.text
    caplog.clear()
    assert tokenized("pairs", data[2:], tokenizer) and "preferred" not in caplog.text


def test_pair_errors(tokenizer):
    with pytest.raises(ConfigError, match="row 0: the data has no column 'rejected'; it has prompt, chosen"):
        tokenized("pairs", [{"prompt": "a", "chosen": "b"}], tokenizer)
    with pytest.raises(ConfigError, match="row 0: chosen and rejected share no beginning"):
        tokenized("pairs", [{"chosen": "a", "rejected": "b"}], tokenizer)
    same = [user("a"), assistant("b")]
    with pytest.raises(ConfigError, match="row 0: chosen and rejected are the same"):
        tokenized("pairs", [{"chosen": same, "rejected": same}], tokenizer)
    with pytest.raises(ConfigError, match="row 0: the prompt is the text 'a', but chosen and rejected are messages"):
        tokenized("pairs", [{"prompt": "a", "chosen": [assistant("b")], "rejected": [assistant("c")]}], tokenizer)


def test_roles_that_are_not_the_assistants(tokenizer, caplog):
    """Such rows were dropped, as having no turn to learn, which a reader of a log may not see."""
    talk = [user("a"), {"role": "model", "content": "b"}]
    with pytest.raises(ConfigError, match=r"row 1: no message is of the assistant, .* the role 'model' is none of"):
        tokenized("completions", [{"messages": [user("a"), assistant("b")]}, {"messages": talk}], tokenizer)
    named = find("chat_template(roles={'assistant': ['model']})", "completions")({"messages": talk})
    (row,) = tokenized("completions", [named], tokenizer)
    (usual,) = tokenized("completions", [{"messages": [user("a"), assistant("b")]}], tokenizer)
    assert row == usual
    assert len(tokenized("completions", [{"messages": talk}], tokenizer, loss_on="all")) == 1
    rows = [{"messages": [user("a")]}, {"messages": [user("a"), assistant("b")]}]
    assert tokenized("completions", rows, tokenizer) == [usual] and "dropped 1 row in which" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"talk": [user("a"), assistant("b")]}, r"set data.format=\"chat_template\(field_messages='talk'\)\", which"),
        (
            {"talk": [{"from": "human", "value": "a"}]},
            r"set data.format=\"sharegpt\(field='talk'\)\", which reads talk",
        ),
        (
            {"question": "a", "answer": "b"},
            "or name them with data.prompt_key and data.completion_key, or their format",
        ),
    ],
)
def test_columns_of_other_names_lead_to_the_setting(tokenizer, row, message):
    with pytest.raises(ConfigError, match=message):
        tokenized("completions", [row], tokenizer)


def test_a_prompt_that_both_conversations_begin_with_is_there_once(chatml_tokenizer):
    prompt = [{"role": "system", "content": "s"}, user("q")]
    sides = {"chosen": [assistant("yes")], "rejected": [assistant("no"), user("r"), assistant("t")]}
    (expected,) = tokenized("pairs", [{"prompt": prompt, **sides}], chatml_tokenizer)
    whole = {name: [*prompt, *answers] for name, answers in sides.items()}
    assert tokenized("pairs", [{"prompt": prompt, **whole}], chatml_tokenizer) == [expected]
    # One of them alone is an answer that asks again.
    (again,) = tokenized("pairs", [{"prompt": prompt, **sides, "chosen": whole["chosen"]}], chatml_tokenizer)
    assert len(again["chosen_ids"]) > len(expected["chosen_ids"])


def test_triples(tokenizer):
    """The gold completion goes on from the pair's prompt, given or not, as text and as messages."""
    for data in (
        {"prompt": "ab", "chosen": "c", "rejected": "d", "reference": "ef"},
        {"chosen": "ab c", "rejected": "ab d", "reference": "ab ef"},
    ):
        (row,) = tokenized("triples", [data], tokenizer)
        prompt = row["chosen_mask"].index(1)
        assert row["reference_ids"][:prompt] == row["chosen_ids"][:prompt] == row["rejected_ids"][:prompt]
        assert tokenizer.decode(row["reference_ids"][prompt:-1]).strip() == "ef" and row["reference_ids"][-1] == END
        assert row["reference_mask"] == [0] * prompt + [1] * (len(row["reference_ids"]) - prompt)
    assert "reference_ids" not in tokenized("pairs", [data], tokenizer)[0]


def test_triples_of_messages(chatml_tokenizer):
    asked = [user("a")]
    triple = {"chosen": assistant("b"), "rejected": assistant("c"), "reference": assistant("d")}
    (explicit,) = tokenized("triples", [{"prompt": asked, **{k: [x] for k, x in triple.items()}}], chatml_tokenizer)
    (implicit,) = tokenized("triples", [{k: [*asked, x] for k, x in triple.items()}], chatml_tokenizer)
    as_text = {"prompt": asked, **{k: x["content"] for k, x in triple.items()}}
    assert explicit == implicit == tokenized("triples", [as_text], chatml_tokenizer)[0]
    assert learned(chatml_tokenizer, explicit["reference_ids"], explicit["reference_mask"]) == "d<|im_end|>\n"


def test_triple_errors(tokenizer):
    pair = {"chosen": "ab c", "rejected": "ab d"}
    with pytest.raises(ConfigError, match="row 0: the data has no column 'reference'; it has chosen, rejected"):
        tokenized("triples", [pair], tokenizer)
    with pytest.raises(ConfigError, match="column 'reference' is None; it is the gold completion"):
        tokenized("triples", [pair | {"reference": None}], tokenizer)
    with pytest.raises(ConfigError, match="column 'reference' does not go on from the prompt, 'ab', which chosen"):
        tokenized("triples", [pair | {"reference": "ef"}], tokenizer)
    long = pair | {"reference": "ab" + "e" * 9}
    assert tokenized("triples", [long, pair | {"reference": "ab e"}], tokenizer, 8, "filter")[0]["reference_ids"]


def test_labels(tokenizer):
    data = datasets.Dataset.from_list(
        [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "c", "completion": "d", "label": False}]
    )
    assert tokenized("labels", data, tokenizer) == [
        {"ids": [97, 98, END], "mask": [0, 1, 1], "label": True},
        {"ids": [99, 100, END], "mask": [0, 1, 1], "label": False},
    ]


@pytest.mark.parametrize("label", ["yes", None, 2, 0.5])
def test_a_label_is_true_or_false(tokenizer, label):
    with pytest.raises(ConfigError, match=r"row 0: label is .*; it is true"):
        tokenized("labels", [{"prompt": "a", "completion": "b", "label": label}], tokenizer)
