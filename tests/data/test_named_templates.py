"""Chat templates by name: the text that each writes, and how it becomes the tokenizer's."""

import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.conversations import conversation
from jaxrl_llm.data.named_templates import TEMPLATES, with_chat_template

CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "R"},
]
WRITTEN = {  # as the models' own templates write it, with <b> and <|end|> as the tokens of begin and end
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<b><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "Q<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>"
    "\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "zephyr": "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nR<|end|>\n<|assistant|>\n",
    "gemma": "<b><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\nR"
    "<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<b>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST] A <|end|><b>[INST] R [/INST]",
    "mistral": "<b>[INST] S\n\nQ [/INST] A<|end|>[INST] R [/INST]",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nR<|end|>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_write_what_their_models_read(name, tokenizer):
    own = with_chat_template(tokenizer, name)
    own.bos_token = "<b>"
    assert own.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == WRITTEN[name]
    ids, mask = conversation(own, CHAT[:3], 0, [], {})  # each rendering extends the one before
    learned = own.decode([i for i, on in zip(ids, mask, strict=True) if on])
    assert learned.strip().startswith("A")
    assert tokenizer.chat_template != own.chat_template


def test_the_end_of_a_turn_becomes_the_end_of_text_where_it_is_one_token(tokenizer, caplog):
    assert with_chat_template(tokenizer, "chatml").eos_token == "<|end|>"
    assert "no single token" in caplog.text
    tokenizer = with_chat_template(tokenizer, "phi3")
    assert tokenizer.eos_token == "<|end|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    assert with_chat_template(tokenizer, "chatml").eos_token == "<|im_end|>"


def test_a_file_a_text_and_neither(tokenizer, tmp_path):
    text = "{{ messages[0]['content'] }}!"
    (tmp_path / "own.jinja").write_text(text)
    for template in (text, str(tmp_path / "own.jinja")):
        own = with_chat_template(tokenizer, template)
        assert own.apply_chat_template(CHAT, tokenize=False) == "S!"
    with pytest.raises(ConfigError, match=r"data.chat_template is 'chatlm', .* the closest is chatml"):
        with_chat_template(tokenizer, "chatlm")
    with pytest.raises(ConfigError, match=r"data.chat_template is '{% if messages %}', no template, by line 1: Unexp"):
        with_chat_template(tokenizer, "{% if messages %}")
    assert with_chat_template(tokenizer, "{{ messages[1].content }}").chat_template  # which one message has not
