"""Talking to a model: what it is asked, what is shown, and how a conversation ends."""

import copy
import dataclasses
import io
import os
import pty
import select
import subprocess
import sys

import pytest
from PIL import Image
from rich.console import Console

import jaxrl_llm
from jaxrl_llm.commands import chat, generate
from jaxrl_llm.commands.chat import HELP, Speaker, answerer, bucket, converse
from jaxrl_llm.config import ConfigError
from jaxrl_llm.rollout import engine

SETTINGS = {"max_new_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def model():
    return jaxrl_llm.load_model("embedded:sort")


def talk(speakers, *lines, width=100):
    """The output of a conversation, line by line."""
    out = io.StringIO()
    converse(speakers, io.StringIO("".join(f"{line}\n" for line in lines)), Console(file=out, width=width))
    return out.getvalue().splitlines()


def speaker(model, name="m", chat=False, system="", **settings):
    """A speaker of the real model, and the prompts that it is asked."""
    answer, asked = answerer(model, **(SETTINGS | settings)), []

    def remember(prompt, turn):
        asked.append(prompt)
        return answer(prompt, turn)

    return Speaker(name, remember, chat, system), asked


@pytest.fixture(scope="module")
def greedy(model):
    """The answers to two prompts that stand alone, which are those of `generate` (see below)."""
    answer = answerer(model, **SETTINGS)
    return [answer("sort:4821=", 1), answer("sort:31=", 2)]


@pytest.mark.slow
def test_answers_are_those_of_generate(model, greedy):
    assert jaxrl_llm.generate(model, ["sort:4821=", "sort:31="], **SETTINGS) == greedy


def test_without_a_template_each_line_stands_alone(model, greedy):
    one, asked = speaker(model)
    assert talk([one], "sort:4821=", "", "  sort:31=  ") == greedy
    assert asked == ["sort:4821=", "sort:31="]


def test_history_reset_and_quit(model):
    one, asked = speaker(model, chat=True, system="be brief")
    first, second, third = talk([one], "a", "b", "/reset", "c", "/quit", "d")
    opening = {"role": "system", "content": "be brief"}
    assert asked[0] == [opening, {"role": "user", "content": "a"}]
    assert asked[1] == [*asked[0], {"role": "assistant", "content": first}, {"role": "user", "content": "b"}]
    assert asked[2] == [opening, {"role": "user", "content": "c"}]
    answer = answerer(model, **SETTINGS)
    assert [first, second, third] == [answer(prompt, 1).strip() for prompt in asked]


def test_a_mistyped_command_is_not_sent(model):
    one, asked = speaker(model, chat=True)
    *told, _, _ = talk([one], "/rest", "/exit now", "/?", "/etc/hosts?", " /think", "/quit", "b", width=1000)
    assert [line.partition(":")[0] for line in told[:2]] == ["there is no command /rest", "there is no command /exit"]
    assert all(HELP in line and "begins with a space" in line for line in told) and told[2].startswith(HELP)
    assert [message["content"] for message in asked[-1] if message["role"] == "user"] == ["/etc/hosts?", "/think"]


@pytest.mark.slow
def test_turns_draw_their_own_random_numbers(model):
    one, _ = speaker(model, temperature=1.0, seed=3)
    lines = talk([one], "sort:4821=", "sort:4821=", "sort:4821=")
    assert lines[0] == jaxrl_llm.generate(model, ["sort:4821="], 8, seed=3)[0]
    assert len(set(lines)) > 1
    again, _ = speaker(model, temperature=1.0, seed=3)
    assert talk([again], "sort:4821=", "sort:4821=", "sort:4821=") == lines


@pytest.mark.slow
def test_few_programs_are_compiled(model):
    one, _ = speaker(model, chat=True, max_new_tokens=5)
    before = engine.prefill._cache_size()
    talk([one], "a", "bb", "ccc")
    assert engine.prefill._cache_size() == before + 1
    assert [bucket(n) for n in (1, 64, 65, 128, 129, 1000)] == [64, 64, 128, 128, 256, 1024]


def test_a_conversation_that_is_too_long_is_told_and_forgotten(model):
    one, asked = speaker(model, chat=True, max_new_tokens=8)
    first, error, second = talk([one], "a", "x" * 2040, "b", width=1000)
    assert "more than the 2048" in error and HELP in error
    assert [message["content"] for message in asked[-1]] == ["a", first, "b"] and second == second.strip()


def test_a_model_with_scaled_positions_goes_on(model):
    """The limit is the one of generate, serve and training: rotary scaling doubles it here."""
    short = {**model.hf_config, "max_position_embeddings": 64}
    scaled = {**short, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    for entries, most in ((short, 64), (scaled, 128)):
        answer = answerer(dataclasses.replace(model, hf_config=entries), **SETTINGS)
        with pytest.raises(ConfigError, match=f"that is more than the {most}"):
            answer("x" * (most - 7), 1)
    assert isinstance(answer("x" * (most - 8), 1), str)


def test_options_of_the_chat_template(model, monkeypatch, capsys):
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.chat_template = "{{ start }}{{ messages[-1].content }}"
    template = dataclasses.replace(model, tokenizer=tokenizer)
    monkeypatch.setattr(chat, "load_named", lambda *_, **__: template)
    monkeypatch.setattr(sys, "stdin", io.StringIO("4821=\n"))
    chat.main(["--model=m", "--chat_template_kwargs=start='sort:'", "--temperature=0", "--max_new_tokens=8"])
    assert capsys.readouterr().out == f"{answerer(model, **SETTINGS)('sort:4821=', 1)}\n"


def test_images_are_refused_where_they_cannot_be_seen(model, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    for chats, words in ((True, "the model reads text alone"), (False, "is not asked through a chat template")):
        one, _ = speaker(model, chat=chats)
        (error,) = talk([one], f"/image {tmp_path / 'a.png'}", "what?", width=1000)
        assert words in error and "the line is removed" in error


def test_side_by_side(model, greedy):
    one, _ = speaker(model, "before [it]")
    other, asked = speaker(model, "after", chat=True)
    shown = "\n".join(talk([one, other], "sort:4821="))
    assert shown.index("before [it]") < shown.index("after")
    answer = answerer(model, **SETTINGS)(asked[0], 1)
    assert f"│ {greedy[0]} " in shown and f"│ {answer} " in shown and answer != greedy[0]


def test_the_command_reads_standard_input(greedy, monkeypatch, capsys):
    given = b"sort:4821=\n\xff\nsort:31=\n"  # a line that is no UTF-8 is answered too
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
    flags = ["--model=embedded:sort", "--chat=false", "--temperature=0", "--max_new_tokens=8"]
    chat.main(flags)
    shown = capsys.readouterr().out.splitlines()
    assert [shown[0], shown[-1]] == list(greedy) and len(shown) > 2


def test_a_template_is_used_where_there_is_one(model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("sort:4821=\n"))
    chat.main(["--model=embedded:sort", "--temperature=0", "--max_new_tokens=8"])
    expected = answerer(model, **SETTINGS)([{"role": "user", "content": "sort:4821="}], 1)
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt=a"], "unknown flag --prompt"),
        (["--prompts_file=a"], "unknown flag --prompts_file"),
        (["--samples=2"], "unknown flag --samples"),
        (["--chat=false", "--system=a"], "--system is given, but embedded:sort is not asked through"),
        (["--chat=false", "--chat_template_kwargs=a=1"], "--chat_template_kwargs is given, but embedded:sort is not"),
        (["--chat_template_kwargs=thinking"], "cannot read the options of 'chat_template_kwargs.thinking.'"),
        (["--model="], "--model is given twice"),
    ],
)
def test_chat_refuses_flags(flags, words):
    with pytest.raises(ConfigError, match=words):
        chat.main(["--model=embedded:sort", *flags])


def test_chat_needs_a_model():
    with pytest.raises(ConfigError, match="--model is missing"):
        chat.main([])


@pytest.mark.parametrize("flags", [["--interactive"], ["--against=embedded:sort"]])
def test_generate_names_chat(flags):
    with pytest.raises(ConfigError, match=f"^{flags[0].partition('=')[0]} is for conversations.*jaxrl-llm chat$"):
        generate.main(["--model=embedded:sort", "--prompt=a", *flags])


COMMAND = ("-m", "jaxrl_llm", "chat", "--model=embedded:sort", "--chat=false", "--temperature=0")


def until_it_asks(terminal: int, seconds: float = 100) -> bytes:
    """The output up to the next prompt."""
    shown = b""
    while not shown.endswith(b"> "):
        assert select.select([terminal], [], [], seconds)[0], shown
        shown += os.read(terminal, 1024)
    return shown


@pytest.mark.slow
def test_in_a_terminal(root, model):
    """It says who is there, asks for lines, and leaves at the end of the input (Ctrl-D)."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "TERM": "dumb"}
    process = subprocess.Popen([sys.executable, *COMMAND], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = until_it_asks(ours)
    os.write(ours, b"sort:4821=\n")
    shown += until_it_asks(ours)
    os.write(ours, b"\x04")
    assert process.wait(60) == 0
    text = shown.decode()
    assert "embedded:sort, without a chat template" in text and HELP in text and "> " in text
    assert jaxrl_llm.generate(model, ["sort:4821="], temperature=0)[0] in text.split(HELP)[1]
