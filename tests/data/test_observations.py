"""Observations as tokens: exactly what the chat template writes after the policy's turn."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.image_rows import ImageReader
from jaxrl_llm.data.named_templates import with_chat_template
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.data.templates import chat_ids, render_chat
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.models.files.hf import remember_images
from tests.data.qwen_vl import qwen_vl_folder
from tests.data.smolvlm import picture
from tests.data.spacing_tokenizer import SPACINGS, spacing_tokenizer

# Mistral's order: results of tools only after a message with calls, and an id in each.
STRICT = (
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "{%- if loop.previtem.role != 'tool' and not loop.previtem.tool_calls -%}"
    "{{ raise_exception('no call') }}{%- endif -%}"
    "{{- '[R]' + m.content + '#' + m.tool_call_id + '[/R]' -}}"
    "{%- elif m.tool_calls -%}{{- '[C]' + m.tool_calls | length | string + '<|end|>' -}}"
    "{%- elif m.role == 'user' -%}{{- '[U]' + m.content + '[/U]' -}}"
    "{%- else -%}{{- m.content + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
)
# Qwen 3's habit: thinking is dropped from all turns but the last.
THINKING = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}"
    "{%- if m.role == 'assistant' and loop.last -%}{{- '(thought)' -}}{%- endif -%}{{- m.content + '<|end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@pytest.fixture
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def observation_ids(tokenizer, observation, prompt=({"role": "user", "content": "2+2?"},), eos=(257,)):
    return TurnTokenizer(tokenizer, eos, 300).observation_ids({"prompt": prompt}, observation)


def check_turns(tokenizer, role="user"):
    TurnTokenizer(tokenizer, (257,), 300).check_turns(role)


def test_text_after_plain_text(tokenizer):
    assert tokenizer.decode(observation_ids(tokenizer, "more=", "2+2?")) == "more="
    with pytest.raises(ConfigError, match="answer with text"):
        observation_ids(tokenizer, [{"role": "user", "content": "x"}], "2+2?")


@pytest.mark.parametrize("spacing", SPACINGS)
def test_observations_get_no_space_from_the_tokenizer(spacing):
    """The row has the ids of its text, behind turns that end with a special token and behind those that do not."""
    tokenizer = spacing_tokenizer(spacing)
    end, whole = tokenizer.eos_token_id, lambda text: chat_ids(tokenizer, text)
    turns = TurnTokenizer(tokenizer, (end,), 300)
    assert whole("2+2=5</s>") + turns.observation_ids({"prompt": "2+2="}, "No, 4=") == whole("2+2=5</s>No, 4=")
    assert whole("2+2=5") + turns.observation_ids({"prompt": "2+2="}, "No=", ended=False) == whole("2+2=5No=")
    stopped = TurnTokenizer(tokenizer, (end,), 300, stops=True)
    assert whole("2+2=5#") + stopped.observation_ids({"prompt": "2+2="}, "No=") == whole("2+2=5#No=")
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"}]
    messages += [{"role": "user", "content": "No."}]
    row, sampled = {"prompt": messages[:1]}, whole(render_chat(tokenizer, messages[:1], True) + "5")
    conversation = whole(render_chat(tokenizer, messages, True))
    assert [*sampled, end, *turns.observation_ids(row, messages[2:])] == conversation
    assert sampled + turns.observation_ids(row, messages[2:], ended=False) == conversation
    tokenizer.chat_template = STRICT.replace("<|end|>", "</s>")
    results = [{"role": "tool", "name": "add", "content": text} for text in ("3", "4")]
    expected = whole("5</s>[R]3#call00000[/R][R]4#call00001[/R]")
    assert [*whole("5</s>"), *turns.observation_ids(row, results)] == expected


def test_images_in_observations_are_refused(tokenizer):
    part = {"type": "image", "image": "a.png"}
    with pytest.raises(ConfigError, match=r'the observation has an image, .* environment.agent="episodes"'):
        observation_ids(tokenizer, [{"role": "tool", "content": [{"type": "text", "text": "seen"}, part]}])
    with pytest.raises(ConfigError, match=r'the opening of the episode has an image, .* environment.agent="episodes"'):
        TurnTokenizer(tokenizer, (257,), 300).prompt_ids({}, [{"role": "user", "content": [part]}], [])


def test_a_prompt_with_images_shows_tools(tmp_path):
    """As of rows with images whose episodes have tools, which are rendered anew."""
    tokenizer = AutoTokenizer.from_pretrained(qwen_vl_folder(tmp_path))
    remember_images(tokenizer, tmp_path)
    tokenizer.chat_template = "{{ tools }}" + tokenizer.chat_template
    tool = {"type": "function", "function": {"name": "a_tool", "parameters": {}}}
    row = RowTokenizer("prompts", tokenizer, images=ImageReader(tokenizer))(
        {"prompt": [{"role": "user", "content": "<image>what?"}], "images": [picture(40, 20)]}
    )
    assert row is not None
    ids = TurnTokenizer(tokenizer, (257,), 300).prompt_ids(row, row["prompt"], [tool])
    shown = tokenizer.decode(ids)
    assert "a_tool" in shown and shown.endswith(tokenizer.decode(row["prompt_ids"]).removeprefix("None"))
    assert shown.count("<|image_pad|>") == 8


def test_messages_go_on_where_the_turn_ended(tokenizer):
    question, turn = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"}
    messages = [{"role": "user", "content": "No."}, {"role": "system", "content": "Again."}]
    sampled = chat_ids(tokenizer, render_chat(tokenizer, [question], True)) + chat_ids(tokenizer, "5<|end|>")
    conversation = chat_ids(tokenizer, render_chat(tokenizer, [question, turn, *messages], True))
    assert sampled + observation_ids(tokenizer, messages) == conversation
    assert observation_ids(tokenizer, "No.") == observation_ids(tokenizer, messages[:1])


def test_a_turn_before_whose_end_the_template_writes_a_space_ends_once():
    """Llama 2's, so that the text behind a turn begins with the space and not with the end that was sampled."""
    tokenizer = with_chat_template(spacing_tokenizer("always"), "llama2")
    question, turn, message = ({"role": role, "content": role} for role in ("user", "assistant", "user"))
    prompt = chat_ids(tokenizer, render_chat(tokenizer, [question], True))
    whole = chat_ids(tokenizer, render_chat(tokenizer, [question, turn, message], True))
    turns = TurnTokenizer(tokenizer, (end := tokenizer.eos_token_id,), 300)
    ids = turns.observation_ids({"prompt": [question]}, [message])
    assert whole[: len(prompt)] == prompt and whole[whole.index(end) + 1 :] == ids
    assert whole[len(prompt) :].count(end) == 1 and end not in ids
    assert end in turns.observation_ids({"prompt": [question]}, [message], ended=False)


def test_a_turn_whose_last_end_is_another_ends_once(tokenizer):
    """gpt-oss': the last turn ends with the token that is sampled, and other messages with one that is not."""
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content -}}"
        "{{- '<|end|>' if loop.last and m.role == 'assistant' else '<|pad|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    assert tokenizer.decode(observation_ids(tokenizer, "No.")) == "<|user|>No.<|pad|><|assistant|>"
    # Where nothing ends other messages, what is behind the turn is the opening of the next.
    tokenizer.chat_template = tokenizer.chat_template.replace("<|pad|>", "")
    assert tokenizer.decode(observation_ids(tokenizer, "No.")) == "<|user|>No.<|assistant|>"


def test_a_template_that_drops_thinking_goes_on(tokenizer):
    tokenizer.chat_template = THINKING
    ids = observation_ids(tokenizer, "No.")
    assert tokenizer.decode(ids) == "\n<|user|>No.<|end|>\n<|assistant|>"


def test_results_of_tools_after_a_call(tokenizer):
    tokenizer.chat_template = STRICT
    messages = [{"role": "tool", "name": "add", "content": text} for text in ("3", "4")]
    assert tokenizer.decode(observation_ids(tokenizer, messages)) == "[R]3#call00000[/R][R]4#call00001[/R]"


def test_templates_that_rewrite_are_refused(tokenizer):
    tokenizer.chat_template = "{{- messages[-1].content -}}"
    with pytest.raises(ConfigError, match="changes or drops earlier messages"):
        check_turns(tokenizer)
    tokenizer.chat_template = "{{- messages | length -}}{%- for m in messages -%}{{- m.content -}}{%- endfor -%}"
    with pytest.raises(ConfigError, match="changes or drops earlier messages"):
        check_turns(tokenizer)
    tokenizer.chat_template = STRICT.replace("'[R]' + m.content", "'[R]'")
    check_turns(tokenizer)
    with pytest.raises(ConfigError, match="leaves out messages of the role 'tool'"):
        check_turns(tokenizer, role="tool")
    with pytest.raises(ConfigError, match="give text, or messages"):
        observation_ids(tokenizer, 7)


QWEN = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
RESULTS = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in ("3", "4"))


@pytest.mark.parametrize(
    ("name", "eos", "user", "tool"),
    [
        ("qwen2_5", "<|im_end|>", QWEN.format("No."), QWEN.format(RESULTS)),
        ("qwen3", "<|im_end|>", QWEN.format("No."), QWEN.format(RESULTS)),
        (
            "llama3_1",
            "<|eot_id|>",
            LLAMA.format("user", "No."),
            LLAMA.format("ipython", '"3"') + LLAMA.format("ipython", '"4"'),
        ),
    ],
)
def test_templates_of_model_families(tokenizer, name, eos, user, tool):
    """Templates that models are published with, which trl carries."""
    folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    tokenizer.add_special_tokens({"eos_token": eos})
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
    ends = LLAMA.format("assistant", "").removesuffix("<|eot_id|>") if name == "llama3_1" else ""
    results = [{"role": "tool", "name": "add", "content": text} for text in ("3", "4")]
    for observation, expected in (("No.", user), (results, tool)):
        ids = observation_ids(tokenizer, observation, eos=(tokenizer.eos_token_id,))
        assert tokenizer.decode(ids) == expected + ends
