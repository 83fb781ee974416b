import re

import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.templates import decode_completion, is_conversational, render_prompt

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


def test_errors(tokenizer, tokenizer_folder):
    with pytest.raises(ConfigError, match=r"not 7; fix the column or name another with data.prompt_key"):
        render_prompt(tokenizer, 7)
    with pytest.raises(ConfigError, match=re.escape("not []")):
        render_prompt(tokenizer, [])
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
