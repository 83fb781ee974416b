import json
import re

import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.templates import (
    chat_ids,
    continued_ids,
    decode_completion,
    is_conversational,
    render_chat,
    render_prompt,
    template_options,
)
from tests.data.spacing_tokenizer import MARKED, SPACINGS, spacing_tokenizer

USER = [{"role": "user", "content": "hi"}]


def text(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_is_conversational():
    assert is_conversational(USER)
    assert not is_conversational("hi")
    assert not is_conversational([])
    assert not is_conversational(None)
    assert not is_conversational(["hi"])
    assert not is_conversational([{"content": "hi"}])
    assert not is_conversational({"role": "user", "content": "hi"})


def test_plain_prompt_without_bos(tokenizer):
    assert render_prompt(tokenizer, "ab") == [97, 98]


def test_plain_prompt_has_one_bos_and_no_eos(special_tokenizer):
    assert special_tokenizer("ab")["input_ids"] == [261, 97, 98, 257]
    assert render_prompt(special_tokenizer, "ab") == [261, 97, 98]
    assert render_prompt(special_tokenizer, "<|begin|>ab") == [261, 97, 98]
    # An end the user wrote stays.
    assert render_prompt(special_tokenizer, "<|begin|>ab<|end|>") == [261, 97, 98, 257]


def test_chat_prompt_equals_the_template(tokenizer):
    ids = render_prompt(tokenizer, USER)
    assert ids == [259, *b"hi", 257, 260]
    assert ids == tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert all(isinstance(token, int) for token in ids)


def test_chat_prompt_has_one_bos(special_tokenizer):
    special_tokenizer.chat_template = "{{- bos_token -}}" + special_tokenizer.chat_template
    assert render_prompt(special_tokenizer, USER) == [261, 259, *b"hi", 257, 260]


def test_last_assistant_message_is_continued(tokenizer, chatml_tokenizer):
    messages = [*USER, {"role": "assistant", "content": "well"}]
    assert render_prompt(tokenizer, messages) == [259, *b"hi", 257, 260, *b"well"]
    rendered = text(chatml_tokenizer, render_prompt(chatml_tokenizer, messages))
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nwell"


def test_options_and_tools_reach_the_template(tokenizer, tokenizer_folder):
    template = "{{- (tools or []) | length -}}{{- mode | default('none') -}}{{- messages[0].content -}}"
    tokenizer = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=template)
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    assert text(tokenizer, render_prompt(tokenizer, USER)) == "0nonehi"
    assert text(tokenizer, render_prompt(tokenizer, USER, tools=[tool], template_kwargs={"mode": "deep"})) == "1deephi"


def test_keys_of_none_are_left_out(tokenizer, tokenizer_folder):
    template = "{{- messages[0].content -}}{%- if messages[0].name is defined -%}named{%- endif -%}"
    tokenizer = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=template)
    assert text(tokenizer, render_prompt(tokenizer, [{**USER[0], "name": None}])) == "hi"
    assert text(tokenizer, render_prompt(tokenizer, [{**USER[0], "name": "x"}])) == "hinamed"


def test_an_empty_list_of_calls_is_none(tokenizer, tokenizer_folder):
    """Rows and clients write one beside each answer, and templates (Llama 3's, Mistral's) ask for the key alone."""
    template = (
        "{%- for m in messages -%}{%- if m.tool_calls is defined and m.tool_calls is not none -%}CALLS"
        "{%- else -%}<{{ m.content }}>{%- endif -%}{%- endfor -%}"
    )
    tokenizer = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=template)
    answer = {"role": "assistant", "content": "4", "tool_calls": []}
    assert render_chat(tokenizer, [*USER, answer], False) == "<hi><4>"
    with pytest.raises(ConfigError, match="message 1, of the assistant, has no content"):
        render_chat(tokenizer, [*USER, {**answer, "content": None}], False)


CALLS = (
    "{%- for m in messages -%}[{{ m.role }}]{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}{%- set c = c.function if c.function is defined else c -%}WRITTEN{%- endfor -%}"
    "{%- endfor -%}"
)


@pytest.mark.parametrize(
    ("written", "arguments", "expected"),
    [
        ("{{ c.arguments | tojson }}", '{"a":[1]}', '{"a": [1]}'),  # Hermes, Qwen2.5, Llama 3
        ("{% for k, v in c.arguments | items %}{{ k }}={{ v }}{% endfor %}", '{"a":[1]}', "a=[1]"),  # Qwen3-Coder
        ("{{ c.arguments | tojson }}", "", "{}"),
        ("{{ c.arguments | tojson }}", "{oops", '"{oops"'),
        ("{{ c.arguments | tojson }}", "[1]", '"[1]"'),
        ("{{ '<' + c.arguments + '>' }}", '{"a":[1]}', '<{"a":[1]}>'),  # DeepSeek takes texts alone
        ("{{ '<' + c.arguments + '>' }}", {"a": [1]}, '<{"a": [1]}>'),
        ("{{ c.arguments }}", '{"a":[1]}', '{"a":[1]}'),
        ("{{ c.arguments }}", {"a": [1]}, '{"a": [1]}'),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_arguments_of_calls_as_json_text(tokenizer, tokenizer_folder, written, arguments, expected, nested):
    """Text is what OpenAI's clients write there, and what columns of one type hold."""
    tokenizer = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=CALLS.replace("WRITTEN", written))
    function = {"name": "f", "arguments": arguments}
    call = {"type": "function", "function": function} if nested else function
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render_chat(tokenizer, messages, False) == f"[user]hi[assistant]{expected}"
    assert function["arguments"] == arguments


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ m.content }}", "one two"),
        ("{{ m.content | trim }}", "one two"),  # Llama 3
        ("{{ m.content + '.' }}", "one two."),  # Qwen2.5
        ("{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | length }} parts{% endif %}", "one two"),
        (
            "{% if m.content is string %}{{ m.content }}"
            "{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}",
            "(one )(two)",
        ),
    ],
)
def test_contents_of_text_parts(tokenizer, tokenizer_folder, written, expected):
    template = "{%- for m in messages -%}" + written + "{%- endfor -%}"
    tokenizer = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=template)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render_chat(tokenizer, [{"role": "user", "content": parts}], False) == expected


def test_contents_that_the_template_would_write_as_python_are_refused(chatml_tokenizer):
    """`| trim`, of Llama 3's, makes text of anything: None, [{'type': ...}]."""
    chatml_tokenizer.chat_template = "{%- for m in messages -%}<{{ m.role }}>{{ m.content | trim }}{%- endfor -%}"

    def rendered(message):
        return render_chat(chatml_tokenizer, [{"role": "user", "content": "a"}, message], False)

    for message in ({"role": "assistant", "content": None}, {"role": "user", "name": "x"}):
        with pytest.raises(ConfigError, match=f"message 1, of the {message['role']}, has no content"):
            rendered(message)
    for content in (4, {"parts": ["a"]}):
        with pytest.raises(ConfigError, match=r"message 1 has the content .*; it is text, or a list of parts"):
            rendered({"role": "assistant", "content": content})
    text = {"type": "text", "text": "b"}
    with pytest.raises(ConfigError, match=r"has the part .*refusal.*, but the chat template reads texts alone"):
        rendered({"role": "assistant", "content": [text, {"type": "refusal", "refusal": "no"}]})
    assert rendered({"role": "assistant", "content": [text, text]}) == "<user>a<assistant>bb"
    assert rendered({"role": "tool", "content": [1, 2]}) == "<user>a<tool>[1, 2]"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert rendered({"role": "assistant", "content": None, "tool_calls": [call]}).startswith("<user>a<assistant>")


def test_a_role_that_the_template_does_not_name_is_told_once(chatml_tokenizer, caplog):
    for _ in range(2):
        render_chat(chatml_tokenizer, [{"role": "visitor", "content": "hi"}, {"role": "tool", "content": "4"}], True)
    (record,) = caplog.records
    assert "the role 'visitor', which the chat template does not name" in record.getMessage()


def test_tools_that_the_template_does_not_show_are_told_once(tokenizer, tokenizer_folder, caplog):
    tools = [{"type": "function", "function": {"name": "add"}}]
    for shown, warnings in (("{{ tools[0].function.name if tools }}", 0), ("", 1)):
        template = shown + "{%- for m in messages -%}tools: {{ m.content }}{%- endfor -%}"
        asked = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=template)
        for _ in range(2):
            render_chat(asked, [{"role": "user", "content": "hi"}], False, tools)
        assert sum("does not show tools" in record.getMessage() for record in caplog.records) == warnings


def test_developers_are_the_system_where_the_template_has_none(chatml_tokenizer, tokenizer, tokenizer_folder):
    """OpenAI's rows and clients write the role developer."""
    messages = [{"role": "developer", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    as_system = [{**messages[0], "role": "system"}, messages[1]]
    assert render_chat(chatml_tokenizer, messages, True) == render_chat(chatml_tokenizer, as_system, True)
    template = "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}{% endfor %}"
    own = type(tokenizer).from_pretrained(tokenizer_folder, chat_template=template)
    assert render_chat(own, messages, False) == "Duser"


@pytest.mark.parametrize("spacing", SPACINGS)
def test_the_middle_of_a_row_is_that_of_the_whole_text(spacing):
    tokenizer = spacing_tokenizer(spacing)
    texts = ["4", " 4", "a b", "4</s>", "4</s>b", "4</s> b", "\nc</s>\nd", "</s>", "</s>e"]
    # With a normaliser that puts the space, the library finds such a token only behind one.
    texts += [] if spacing == "prepend" else [f"4{MARKED}b", f"{MARKED}b", f"4</s>{MARKED}b"]
    for before in ("a", "a b=", "a</s>", "</s>", "a\n", f"a{MARKED}", f"a {MARKED}"):
        ids = chat_ids(tokenizer, before)
        for text in texts:
            assert ids + continued_ids(tokenizer, ids, text) == chat_ids(tokenizer, before + text), (before, text)
            assert continued_ids(tokenizer, [], text) == chat_ids(tokenizer, text)
            if not before.endswith(("</s>", MARKED)):
                assert continued_ids(tokenizer, None, text) == continued_ids(tokenizer, ids, text)


def test_added_tokens_and_missing_embeddings_are_seen():
    tokenizer = spacing_tokenizer("always")
    assert continued_ids(tokenizer, None, "4") == [tokenizer.convert_tokens_to_ids("4")]
    tokenizer.add_tokens("<new>")
    ids = chat_ids(tokenizer, "a<new>")
    assert ids + continued_ids(tokenizer, ids, "<new>b") == chat_ids(tokenizer, "a<new><new>b")
    tokenizer.without_embedding = frozenset(tokenizer.convert_tokens_to_ids(["4"]))
    with pytest.raises(ConfigError, match=r"a text contains 4, token .*, for which the model has no embedding"):
        continued_ids(tokenizer, None, "4")


def test_tokenizers_without_spaces_are_asked_as_they_are(tokenizer, special_tokenizer, monkeypatch):
    for one in (tokenizer, special_tokenizer):
        assert continued_ids(one, [97], "4 5<|end|>") == [*b"4 5", 257]
        monkeypatch.setattr(type(one.backend_tokenizer), "to_str", lambda *_: pytest.fail("copied"))
        assert continued_ids(one, [257], " 4") == list(b" 4")


def test_options_as_json_text():
    tools, options = [{"type": "function", "function": {"name": "f"}}], {"a": 1, "b": None}
    row = {"tools": json.dumps(tools), "chat_template_kwargs": json.dumps(options)}
    assert template_options(row, {"c": 2}) == {"tools": tools, "template_kwargs": {"a": 1, "c": 2}}
    with pytest.raises(ConfigError, match="the chat_template_kwargs column is not JSON"):
        template_options({"chat_template_kwargs": "{a: 1}"})
    with pytest.raises(ConfigError, match=r"the chat_template_kwargs column is \['a'\]; it takes an object"):
        template_options({"chat_template_kwargs": '["a"]'})


def test_errors(tokenizer, tokenizer_folder):
    with pytest.raises(ConfigError, match=r"not 7; fix the column or name another with data.prompt_key"):
        render_prompt(tokenizer, 7)
    with pytest.raises(ConfigError, match=re.escape("not []")):
        render_prompt(tokenizer, [])
    with pytest.raises(ConfigError, match=re.escape("data.format=\"sharegpt(field='COLUMN')\"")):
        render_chat(tokenizer, [{"from": "human", "value": "hi"}], add_generation_prompt=False)
    strict = type(tokenizer).from_pretrained(tokenizer_folder, chat_template="{{- raise_exception('only users') -}}")
    with pytest.raises(ConfigError, match=r"refused the messages .*hi.*: only users"):
        render_prompt(strict, USER)
    strict.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        render_prompt(strict, USER)


def test_decoding_drops_special_tokens_only(tokenizer):
    ids = [*b" don 't  stop .", 257, 256]
    assert decode_completion(tokenizer, ids, False) == " don 't  stop ."
    assert decode_completion(tokenizer, ids, True) == [{"role": "assistant", "content": " don 't  stop ."}]
    assert decode_completion(tokenizer, [], False) == ""
