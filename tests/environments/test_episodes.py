"""Episodes with environments and tools, played by a scripted policy: no model, the real tokenizer and templates."""

import asyncio
import copy
import json
import re
import threading
import time

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from jaxrl_llm.algorithms.turn_advantages import Turn
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.entries import environment_options
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.data.templates import chat_ids
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.environments.batch import EpisodeBatch
from jaxrl_llm.environments.episode import Episode
from jaxrl_llm.environments.factory import Environments, EnvironmentSpec, load_environments
from jaxrl_llm.environments.games import SmallestOfEach, SortThenSmallest
from jaxrl_llm.environments.protocol import EpisodeError, Step, checked_step, finite
from jaxrl_llm.models.files.hf import EMBEDDED
from jaxrl_llm.training.setup.objectives import needs_reference
from jaxrl_llm.training.setup.specs import learner_spec
from jaxrl_llm.training.setup.worker import environment_spec
from tests.environments.test_tool_calls import FORMS, MARK, A, B

END = 257
# Like Qwen's: tools in the system message, results of tools as they are.
TEMPLATE = (
    "{%- if tools -%}{%- set names = tools | map(attribute='function') | map(attribute='name') -%}"
    "{{- '<|system|>' + (names | join(',')) + '<|end|>' -}}{%- endif -%}"
    "{%- for m in messages -%}{%- set role = 'user' if m.role == 'tool' else m.role -%}"
    "{{- '<|' + role + '|>' + m.content + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def test_rewards_are_finite_numbers():
    assert [finite(reward) for reward in (1, True, np.float32(0.5), np.ones(1)[0])] == [1.0, 1.0, 0.5, 1.0]
    for reward in ("1", b"1", None, float("nan"), float("-inf"), 10**400, np.ones(2), [1.0], 1j):
        assert finite(reward) is None
        with pytest.raises(EpisodeError, match=r"Game.step returned the reward .* give a finite number"):
            checked_step((None, reward), "Game")


@pytest.fixture(scope="module")
def tokenizer():
    loaded = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    loaded.chat_template = TEMPLATE
    return loaded


def user(text):
    return [{"role": "user", "content": text}]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def environments_of(environment, tools=(), **settings):
    return Environments(EnvironmentSpec(environment, tools, **settings))


def play(tokenizer, environments, rows, turns, group=1, limit=400):
    """(batch, completion ids, completions, columns): row i says `turns[i]`, one after the other, as in the engine."""
    examples = [*map(RowTokenizer("prompts", tokenizer), rows)]
    batch = EpisodeBatch.open(environments, TurnTokenizer(tokenizer, (END,), 300), examples, group)
    ids = [[] for _ in turns]
    scripts = [iter(script) for script in turns]
    waiting = set(range(len(turns)))

    def speak(row):
        text = next(scripts[row], None)
        room = limit - len(ids[row])
        turn = [*chat_ids(tokenizer, text or "..."), END][:room]
        ids[row] += turn
        if turn[-1:] == [END]:
            batch.submit(row, list(ids[row]))
        else:
            waiting.discard(row)

    for row in range(len(turns)):
        speak(row)
    while waiting:
        for row, tokens in batch.poll(wait=True).items():
            if tokens is None or len(ids[row]) + len(tokens) >= limit:
                waiting.discard(row)
            else:
                ids[row] += tokens
                speak(row)
    return (batch, ids, *batch.finish(ids, True))


class Guess:
    """Guess the number; `async` and plain steps, errors and slow rows on demand."""

    closed = 0

    def reset(self, row):
        self.number, self.tries = row["number"], 0
        return row.get("opening")

    def step(self, text):
        self.tries += 1
        if text == "boom":
            raise KeyError("boom")
        if text == "sleep":
            time.sleep(3)
        if text == "nonsense":
            return {"observation": "x"}
        if text == "nan":
            return Step("more", float("nan"))
        if text == "later":
            return self.later()
        guess = int(text)
        if guess == self.number:
            return Step(None, 1.0, True)
        return Step("higher" if guess < self.number else "lower", 0.1, state=guess if guess > 99 else None)

    async def later(self):
        await asyncio.sleep(0.01)
        return Step("later", 0.25)

    def close(self):
        Guess.closed += 1


def test_a_game_of_several_turns(tokenizer):
    Guess.closed = 0
    environments = environments_of(Guess, max_turns=3, timeout=1.0)
    rows = [{"prompt": user("Guess!"), "number": 5, "opening": None} for _ in range(9)]
    turns = [
        ["3", "5"], ["9", "9", "9", "5"], ["5"],
        ["boom"], ["sleep"], ["nonsense"], ["nan"], ["later", "5"], ["3", "boom"],
    ]  # fmt: skip
    batch, ids, completions, columns = play(tokenizer, environments, rows, turns)
    assert columns["environment_reward"] == [1.1, pytest.approx(0.3), 1.0, None, None, None, None, 1.25, None]
    ended = [episode.stop_reason for episode in batch.episodes]
    assert [re.sub(r"py:\d+", "py", reason) for reason in ended[:5]] == [
        "done", "max_turns", "done", f"KeyError: 'boom' ({__file__})", "timeout"
    ]  # fmt: skip
    assert "Guess.step returned {'observation': 'x'}; return Step" in ended[5] and "finite number" in ended[6]
    assert tokenizer.decode(ids[0]) == "3<|end|><|user|>higher<|end|><|assistant|>5<|end|>"
    assert completions[0] == [
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "5"},
    ]
    assert isinstance(columns["environments"][0], Guess)
    turns, most = batch.turn_records([*map(len, ids)])
    assert turns[0] == [Turn(2, 0.1), Turn(len(ids[0]), 1.0, "higher")] and most == 3
    assert [[turn.reward for turn in row] for row in turns[1:5]] == [[0.1] * 3, [1.0], [0.0], [0.0]]
    metrics, totals, table = batch.release(len(batch.rows))
    assert totals["environment/failures"] == 5
    assert metrics["environment/turns"] == [2, 3, 1, 1, 1, 1, 1, 2, 2]
    assert table["environment/ended"] == ended
    assert Guess.closed == 5 and len(environments.idle[None]) == 4  # those that failed are closed at once
    environments.close()
    assert Guess.closed == 9


def test_environments_are_closed_where_a_run_ends_within_a_rollout(tokenizer):
    Guess.closed = 0
    environments = environments_of(Guess, on_error="stop")
    rows = [{"prompt": user("Guess!"), "number": 5, "opening": None} for _ in range(3)]
    with pytest.raises(EpisodeError, match=r"Guess.step raised KeyError"):
        play(tokenizer, environments, rows, [["3", "5"], ["boom"], ["5"]])
    environments.close()
    assert Guess.closed == 3 and not environments.made
    with pytest.raises(EpisodeError, match="has no method reset"):
        environments_of({"guess": Guess, "wrong": object})
    assert Guess.closed == 4


@pytest.mark.parametrize("timeout", [None, 1.0])
def test_environments_that_have_failed_are_closed_together(timeout, tokenizer, monkeypatch):
    """Those whose servers are gone hold nobody up: neither each other nor, for long, the run."""
    monkeypatch.setattr("jaxrl_llm.environments.factory.CLOSE_SECONDS", 1.0 if timeout is None else 100.0)
    gone, closing = threading.Event(), []

    class Gone(Guess):
        def close(self):
            closing.append(self)
            gone.wait(100)

    class Kept(Guess):
        async def close(self):
            closing.append(asyncio.get_running_loop())

    environments = environments_of({"gone": Gone, "kept": Kept}, timeout=timeout, workers=8)
    rows = [{"prompt": user("Guess!"), "number": 5, "environment": name} for name in ["gone"] * 8 + ["kept"] * 2]
    batch, *_ = play(tokenizer, environments, rows, [["boom"]] * 9 + [["later", "5"]])
    began = time.monotonic()
    batch.release(len(batch.rows))
    assert time.monotonic() - began < 7.0 and len(closing) == 9  # one after the other they take 8
    gone.set()
    environments.close()  # that of the last row
    loops = {closed for closed in closing if not isinstance(closed, Guess)}
    assert len(closing) == 10 and len(loops) == 1, "coroutines share a loop"


def test_environments_are_reused_and_open_prompts(tokenizer):
    made = []

    def make():
        made.append(Guess())
        return made[-1]

    environments = environments_of(make)
    for opening in ("Your turn", user("Your turn")):
        rows = [{"prompt": user("Guess!"), "number": 5, "opening": opening} for _ in range(2)]
        batch, _, completions, _ = play(tokenizer, environments, rows, [["5"]] * 4, group=2)
        assert len(batch.examples) == 2 and len(made) == 4
        shown = "Your turn" if isinstance(opening, str) else "<|user|>Your turn<|end|><|assistant|>"
        assert tokenizer.decode(batch.examples[0]["prompt_ids"]) == shown
        assert completions[0] == ("5" if isinstance(opening, str) else [{"role": "assistant", "content": "5"}])
        batch.release(len(batch.rows))


def test_episodes_without_room_end(tokenizer):
    environments = environments_of(Guess)
    row, turns = {"prompt": "Guess! ", "number": 5}, [["3", "5"], ["3", "555555"], ["1234567890"]]
    batch, ids, completions, columns = play(tokenizer, environments, [row] * 3, turns, limit=9)
    assert [episode.stop_reason for episode in batch.episodes] == ["length"] * 3
    assert columns["environment_reward"] == [0.1, 0.1, 0.0]
    # `3<end>higher5` would be 9 tokens: no room for the end; a truncated turn is not answered.
    assert completions == ["3higher5", "3higher5", "123456789"] and [len(x) for x in ids] == [9, 9, 9]
    assert batch.turn_records([9] * 3)[0] == [[Turn(2, 0.1), Turn(9, 0.0, "higher")]] * 2 + [[Turn(9, 0.0)]]
    batch, ids, completions, _ = play(
        tokenizer, environments, [{"prompt": user("Guess!"), "number": 5}], [["3", "5"]], limit=9
    )
    assert completions == [[{"role": "assistant", "content": "3"}]] and len(ids[0]) == 2
    assert batch.turn_records([2])[0] == [[Turn(2, 0.1)]]


def test_the_most_frequent_failure_of_a_batch_is_warned_of(tokenizer):
    rows = [{"prompt": "Guess!", "number": 5}] * 4
    batch, *_ = play(tokenizer, environments_of(Guess), rows, [["nonsense"], ["boom"], ["boom"], ["5"]])
    with pytest.warns(UserWarning, match=r"an episode failed, and has no reward \(Guess: KeyError: 'boom'") as warned:
        batch.release(len(rows))
    assert len(warned) == 1


@pytest.mark.filterwarnings("ignore:an episode failed")
def test_batches_of_failures_alone_end_the_run(tokenizer):
    environments, row = environments_of(Guess), {"prompt": "Guess!", "number": 5}

    def released(*turns):
        batch, *_ = play(tokenizer, environments, [row] * len(turns), [[turn] for turn in turns])
        batch.release(len(turns))

    for turns in (["boom"], ["boom"], ["boom", "5"], ["boom"], ["boom"]):
        released(*turns)
    with pytest.raises(EpisodeError, match=r"all episodes of 3 batches in a row failed.*Guess: KeyError: 'boom'"):
        released("boom", "boom")


def test_an_environment_may_change_its_row(tokenizer):
    class Adds(Guess):
        def reset(self, row):
            super().reset(row)
            row["seen"]["by"].append(1)
            row["prompt"].append({"role": "user", "content": str(len(row["seen"]["by"]))})
            return row["prompt"]

    row = {"prompt": user("Guess!"), "number": 5, "seen": {"by": []}}
    batch, *_ = play(tokenizer, environments_of(Adds), [row] * 2, [["5"]] * 2)
    assert [x["prompt"] for x in batch.rows] == [[*user("Guess!"), {"role": "user", "content": "1"}]] * 2
    assert row == {"prompt": user("Guess!"), "number": 5, "seen": {"by": []}}


def test_values_of_gymnasium_are_told_what_they_are_here(tokenizer):
    class Gym(Guess):
        def step(self, text):
            return "more", 1.0, False, False, {}

    batch, *_ = play(tokenizer, environments_of(Gym), [{"prompt": "Guess!", "number": 5}], [["5"]])
    assert "Step(observation, reward, terminated or truncated)" in batch.episodes[0].stop_reason
    row = {"prompt": "Guess!", "number": 5, "opening": ("Guess!", {})}
    with pytest.raises(EpisodeError, match=r"Guess.reset returned \('Guess!', {}\).* the observation alone"):
        play(tokenizer, environments_of(Guess), [row], [["5"]])


def test_an_environment_names_its_state(tokenizer):
    turns = [["100", "5"], ["101", "5"], ["6", "5"]]
    batch, ids, *_ = play(tokenizer, environments_of(Guess), [{"prompt": "Guess!", "number": 5}] * 3, turns)
    assert [row[1].state for row in batch.turn_records([*map(len, ids)])[0]] == [100, 101, "lower"]


def test_on_error_stop(tokenizer):
    environments = environments_of(Guess, timeout=0.2, on_error="stop")
    row = {"prompt": "Guess!", "number": 5}
    with pytest.raises(
        EpisodeError, match=r"Guess.step raised KeyError: 'boom' \(.*py:\d+\), in row 1, turn 2.*on_error=end"
    ):
        play(tokenizer, environments, [row] * 2, [["5"], ["3", "boom"]])
    with pytest.raises(EpisodeError, match=r"Guess.step took more than environment.timeout"):
        play(tokenizer, environments, [row], [["sleep"]])


def test_environments_are_made_at_once_and_within_the_time_limit():
    count, meeting = iter(range(9)), threading.Barrier(3)

    class Slow(Guess):
        def __init__(self):
            super().__init__()
            self.number = next(count)
            if 1 <= self.number <= 3:
                meeting.wait(10.0)  # one of them alone would wait in vain
            elif self.number > 3:
                time.sleep(1.0)

    environments = environments_of(Slow, timeout=0.5)
    episodes = environments.acquire([{}] * 4)
    assert episodes[0].environment.number == 0 and len({episode.environment.number for episode in episodes}) == 4
    with pytest.raises(EpisodeError, match=r"making the environment 'Slow' took more than environment.timeout = 0.5 s"):
        environments.acquire([{}])
    environments.close()


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
def test_observations_that_are_no_unicode(tokenizer, chat):
    """Half of a surrogate pair ends its row as a step that raises does, with a reason that can be written."""

    class Files:
        def reset(self, row): ...

        def step(self, text):
            if text == "raise":
                raise FileNotFoundError("no file \udce9.txt")
            return Step("file \udce9.txt" if text == "odd" else "file")

    row = {"prompt": user("List!") if chat else "List!"}
    turns = [["odd"], ["raise"], ["even"]]
    environments = environments_of(Files, max_turns=2)
    batch, *_, columns = play(tokenizer, environments, [row] * 3, turns)
    said = [episode.stop_reason.encode().decode() for episode in batch.episodes]
    assert said[0].startswith(r"EpisodeError: the observation 'file \udce9.txt' is no text for the tokenizer")
    assert said[1].startswith("FileNotFoundError: no file \ufffd.txt (") and said[2:] == ["max_turns"]
    assert columns["environment_reward"] == [None, None, 0.0]
    with pytest.raises(EpisodeError, match=r"Files.step raised EpisodeError: the observation 'file \\udce9"):
        play(tokenizer, environments_of(Files, on_error="stop"), [row], [["odd"]])


def test_a_reset_that_fails_stops_the_run(tokenizer):
    with pytest.raises(EpisodeError, match=r"Guess.reset raised KeyError: 'number' \(.*py:\d+\), in row 0"):
        play(tokenizer, environments_of(Guess), [{"prompt": "x"}], [["5"]])
    with pytest.raises(EpisodeError, match=r"Guess.reset returned 3; return a prompt"):
        play(tokenizer, environments_of(Guess), [{"prompt": "x", "number": 1, "opening": 3}], [["5"]])
    counter = iter(range(9))

    class Random(Guess):
        def reset(self, row):
            return f"question {next(counter)}"

    with pytest.raises(EpisodeError, match="opens rows of the same prompt differently"):
        play(tokenizer, environments_of(Random), [{"prompt": "x"}], [["5"]] * 2, group=2)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def slow_double(a: int) -> int:
    """Doubles a number.

    Args:
        a: The number.
    """
    await asyncio.sleep(0.01)
    return 2 * a


def test_tools(tokenizer):
    environments = environments_of(None, [add, slow_double], max_tool_calls=3)
    turns = [
        [call("add", a=1, b=2), "3"],
        [call("add", a=1, b=2) + call("slow_double", a=4), "11"],
        ["No tool needed."],
        [call("sub", a=1), call("add", a=1), call("add", a=1, b="x"), "?"],
        ["<tool_call>{oops</tool_call>", "sorry"],
        [call("add", a=1, b=2)] * 4,
    ]
    batch, ids, completions, columns = play(tokenizer, environments, [{"prompt": user("1+2?")}] * 6, turns)
    assert tokenizer.decode(batch.examples[0]["prompt_ids"]).startswith("<|system|>add,slow_double<|end|><|user|>1+2?")
    results = [[m["content"] for m in completion if m["role"] == "tool"] for completion in completions]
    assert results[:3] == [["3"], ["3", "8"], []]
    assert "there is no tool 'sub'; there are add, slow_double" in results[3][0]
    assert "missing a required argument: 'b'" in results[3][1] and "TypeError" in results[3][2]
    assert "is not JSON" in results[4][0] and results[5] == ["3"] * 3
    assert [episode.stop_reason for episode in batch.episodes] == ["answered"] * 5 + ["max_tool_calls"]
    assert completions[1][-1] == {"role": "assistant", "content": "11"}
    called = [[c["function"]["arguments"] for c in m.get("tool_calls", [])] for m in completions[1]]
    assert called == [[{"a": 1, "b": 2}, {"a": 4}], [], [], []] and completions[1][0]["content"] == ""
    assert completions[4][0] == {"role": "assistant", "content": "<tool_call>{oops</tool_call>"}
    assert "<|user|>3<|end|><|user|>8<|end|><|assistant|>11<|end|>" in tokenizer.decode(ids[1])
    metrics, _, _ = batch.release(len(batch.rows))
    assert metrics["tools/call_frequency"] == [1, 2, 0, 3, 1, 3]
    assert sum(metrics["tools/failure_frequency"]) == 4 and len(metrics["tools/failure_frequency"]) == 10
    assert columns["environment_reward"] == [0.0] * 6


def test_functions_of_a_turn_run_together_and_methods_in_turn():
    """Results stand in the order of the calls; an environment's methods, which share its state, keep theirs."""
    both, asked, busy = threading.Barrier(2), [], threading.Lock()

    def meet(a: int) -> int:
        """Waits for another call.

        Args:
            a: A number.
        """
        both.wait(timeout=60)
        if a == 1:
            raise ValueError("odd")
        return a

    class Shop:
        def reset(self, **columns):
            pass

        def buy(self, what: str) -> str:
            """Buys.

            Args:
                what: A thing.
            """
            assert busy.acquire(blocking=False), "two calls at once"
            asked.append(what)
            time.sleep(0.01)
            busy.release()
            return f"bought {what}"

    (episode,) = environments_of(Shop, [meet]).acquire([{}])
    calls = [call("buy", what="a"), call("meet", a=1), call("buy", what="b"), call("meet", a=2), call("buy", what="c")]
    turn = episode.respond("", "".join(calls))
    said = [message["content"] for message in turn.step.observation]
    assert said == ["bought a", '{"error": "ValueError: odd"}', "bought b", "2", "bought c"]
    assert asked == ["a", "b", "c"] and (turn.calls, turn.failed_calls) == (5, 1)
    many = episode.respond("", call("meet", a=2) * 20)
    assert [message["content"] for message in many.step.observation] == ["2"] * 20


def find_all(text: str, count: int, nothing: str | None, listed: list, nested: dict):
    """Finds it.

    Args:
        text: What.
        count: How many.
        nothing: Nothing.
        listed: A list.
        nested: An object.
    """
    return [text, count, nothing, listed, nested]


def tell_time():
    """Tells the time."""
    return "noon"


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
def test_calls_of_every_form_are_answered(tokenizer, special):
    """With values of the types of the tools, whether marks are special tokens or text; so is what is malformed."""
    own = copy.deepcopy(tokenizer)
    if special:
        marks = {mark for text in FORMS.values() for mark in MARK.findall(text)}
        own.add_special_tokens({"additional_special_tokens": sorted(marks)})
    rows, turns = [{"prompt": user("?")}] * (len(FORMS) + 2), [[text, "done"] for text in FORMS.values()]
    turns += [["<|tool_call_start|>[find_all(1)]<|tool_call_end|>", "done"], ["<tool_call>find_all<arg_key>", "done"]]
    batch, _, completions, _ = play(own, environments_of(None, [find_all, tell_time]), rows, turns, limit=4000)
    for form, episode, messages in zip(FORMS, batch.episodes, completions, strict=False):
        assert (episode.stop_reason, episode.calls, episode.failed_calls) == ("answered", 2, 0), form
        assert [tuple(call["function"].values()) for call in messages[0]["tool_calls"]] == [A, B], form
        assert messages[0]["content"] == "" and messages[3]["content"] == "done"
        told = [message["content"] for message in messages[1:3]]
        assert told == ['["a, b", 2, null, [true, "x"], {"k": 1.5}]', "noon"], form
    for episode, messages in zip(batch.episodes[-2:], completions[-2:], strict=True):
        assert (episode.stop_reason, episode.calls, episode.failed_calls) == ("answered", 1, 1)
        assert '"error": "the call ' in messages[1]["content"]


def test_an_environment_may_take_special_tokens(tokenizer):
    """As that of verifiers does, which looks for calls itself."""

    class Raw:
        takes_raw = True

        def reset(self, row):
            return None

        def step(self, text, raw):
            return Step(None, float((text, raw) == ("5", "5<|end|>")), done=True)

    *_, columns = play(tokenizer, environments_of(Raw), [{"prompt": "x"}], [["5"]])
    assert columns["environment_reward"] == [1.0]


def test_tools_need_messages(tokenizer):
    with pytest.raises(ConfigError, match="give prompts that are lists of messages"):
        play(tokenizer, environments_of(None, [add]), [{"prompt": "1+2?"}], [["3"]])


class Counter:
    """As TRL has it: `reset` with the row's columns, public methods as tools, the reward its own."""

    def __init__(self):
        self.count = 0

    def reset(self, start, **row):
        self.count = start
        return f" Start at {start}."

    def add_one(self, times: int) -> str:
        """Counts up.

        Args:
            times: How often.
        """
        self.count += times
        return f"now {self.count}"

    def get_reward(self):
        return None if self.count < 0 else self.count / 10


def test_environments_of_trl(tokenizer):
    rows = [{"prompt": user("Count!"), "start": start} for start in (2, 4, -1)]
    turns = [[call("add_one", times=1), "done"], ["done"], ["done"]]
    batch, _, completions, columns = play(tokenizer, environments_of(Counter), rows, turns)
    assert columns["environment_reward"] == [0.3, 0.4, None]
    assert tokenizer.decode(batch.examples[1]["prompt_ids"]) == (
        "<|system|>add_one<|end|><|user|>Count! Start at 4.<|end|><|assistant|>"
    )
    assert completions[0][1]["content"] == "now 3"


def test_an_opening_of_text_and_images():
    """TRL's environments may add a list of parts to the last message; a list of anything else is refused."""
    asked = [{"role": "user", "content": "Look:"}]
    picture = Image.new("RGB", (2, 2))
    episode = Episode(Counter(), {}, "Counter", 2)
    part = {"type": "image", "image": picture}
    for opening in ([part, "What?"], [picture, {"type": "text", "text": "What?"}]):
        assert episode.opening_prompt(asked, opening)[-1]["content"] == [
            {"type": "text", "text": "Look:"}, part, {"type": "text", "text": "What?"},
        ]  # fmt: skip
    blank = [{"role": "user", "content": ""}]
    assert episode.opening_prompt(blank, ["What?"])[-1]["content"] == [{"type": "text", "text": "What?"}]
    assert asked == [{"role": "user", "content": "Look:"}]
    for opening in ([1, 2], [{"content": "x"}], {"type": "text"}):
        with pytest.raises(EpisodeError, match=r"Counter.reset returned .*; return a prompt"):
            episode.opening_prompt(asked, opening)


def test_several_environments_by_column(tokenizer):
    environments = environments_of({"count": Counter, "guess": Guess}, [add])
    rows = [
        {"prompt": user("Count!"), "environment": "count", "start": 2, "number": 0},
        {"prompt": user("Guess!"), "environment": "guess", "start": 0, "number": 5},
    ]
    batch, _, _, columns = play(tokenizer, environments, rows, [["done"], ["3", "5"]])
    assert columns["environment_reward"] == [0.2, 1.1]
    metrics, totals, _ = batch.release(len(batch.rows))
    assert metrics["environment/count/reward"] == [0.2] and metrics["environment/guess/reward"] == [1.1]
    assert metrics["environment/guess/turns"] == [2.0] and metrics["environment/turns"] == [1.0, 2.0]
    assert totals["environment/count/episodes"] == totals["environment/guess/episodes"] == 1.0
    assert totals["environment/guess/failures"] == totals["environment/failures"] == 0.0
    prompts = [tokenizer.decode(example["prompt_ids"]) for example in batch.examples]
    assert prompts[0].startswith("<|system|>add,add_one<") and prompts[1].startswith("<|system|>add<")
    with pytest.raises(
        EpisodeError, match=r"column environment is 'gues'; there are count, guess; the closest is guess"
    ):
        play(tokenizer, environments, [{**rows[0], "environment": "gues"}], [["done"]])


def test_environments_have_a_reward_scale_each(tokenizer):
    """A failed episode stays without a reward, and metrics show what the environment gave."""
    known = {"guess": Guess, "percent": Guess}
    environments = environments_of(known, reward_scales={"percent": 0.5})
    rows = [{"prompt": "x", "environment": name, "number": 5} for name in ("guess", "percent", "percent")]
    batch, _, _, columns = play(tokenizer, environments, rows, [["3", "5"], ["5"], ["boom"]])
    assert columns["environment_reward"] == [1.1, 0.5, None]
    turns = [[turn.reward for turn in own] for own in batch.turn_records([400] * 3)[0]]
    assert turns[:2] == [[0.1, 1.0], [0.5]]  # the sum of which is the episode's
    metrics, totals, _ = batch.release(len(batch.rows))
    assert metrics["environment/percent/reward"] == [1.0]
    assert (totals["environment/percent/failures"], totals["environment/guess/failures"]) == (1.0, 0.0)
    with pytest.raises(EpisodeError, match=r"reward_scale names 'gues', but there are guess, percent; .* is guess"):
        environments_of(known, reward_scales={"gues": 2.0})
    with pytest.raises(EpisodeError, match=r"names 'guess', but there is one environment.*: set rewards.weights"):
        environments_of(Guess, reward_scales={"guess": 2.0})


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (("maze=0.1",), "there is no environment: set environment.name"),
        (("maze",), "has 'maze', but it takes NAME=NUMBER"),
        (("maze=0",), "has 'maze=0', but it takes NAME=NUMBER, an environment and a number above 0"),
        (("maze=1", "maze=2"), "has 'maze' twice"),
    ],
)
def test_reward_scales_that_cannot_be_applied(scale, message):
    config = default()
    config.environment.reward_scale = scale
    with pytest.raises(ConfigError, match=message):
        environment_spec(config)


def test_options_name_environments_that_there_are():
    known = {"guess": Guess, "percent": Guess}
    assert environments_of(known, with_options=("percent",)).routed
    with pytest.raises(EpisodeError, match=r"options names 'gues', but there are guess, percent; .* is guess"):
        environments_of(known, with_options=("gues",))
    with pytest.raises(EpisodeError, match=r"options names 'guess', but there is one.*: set algorithm.advantage and"):
        environments_of(Guess, with_options=("guess",))


def test_environment_options_are_read():
    written = ("maze(advantage='rloo(normalize=True)', beta=0.02)", "sort(weight=2)")
    read = {"maze": {"advantage": "rloo(normalize=True)", "beta": 0.02}, "sort": {"weight": 2}}
    assert environment_options(written) == read
    config = default()
    config.environment.options, config.algorithm.beta = written, 0.5
    validate(config)
    spec = learner_spec(config)
    assert spec.kl_weights == {None: 0.5, "maze": 0.02} and spec.loss_weights == {None: 1.0, "sort": 2.0}
    config.environment.options = ()
    assert learner_spec(config).kl_weights == learner_spec(config).loss_weights == {}


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ("maze", {}, "has 'maze', but it takes NAME"),
        ("maze()", {}, r"has 'maze\(\)', but it takes NAME"),
        ("maze(0.1)", {}, "cannot read the options"),
        ("maze(wieght=2)", {}, "maze has 'wieght', but its options are advantage, beta, weight; the closest is weight"),
        ("maze(beta=-0.1)", {}, "beta of maze is -0.1, but it takes a number of 0 or more"),
        ("maze(weight=-1)", {}, "weight of maze is -1, but it takes a number of 0 or more"),
        ("maze(weight=1e999)", {}, "weight of maze is inf"),
        ("maze(weight=True)", {}, "weight of maze is True"),
        ("maze(advantage=1)", {}, "advantage of maze is 1, but it takes a name"),
        ("maze(beta=0.1)", {"algorithm.kl_in_reward": True, "algorithm.beta": 0.1}, "algorithm.kl_in_reward is true"),
        ("maze(beta=0.1)", {"algorithm.kl_controller": "adaptive", "algorithm.beta": 0.1}, "kl_controller is adaptive"),
        ("maze(beta=0.0)", {"algorithm.kl_bias_correction": True}, "algorithm.beta is 0 and there is no KL term"),
        ("maze(advantage='rloo')", {"rollout.group_size": 1, "algorithm.advantage": "zero"}, "advantage of maze = 'rl"),
        ("maze(weight=2)", {"algorithm.name": "sft"}, "algorithm.name = 'sft' samples nothing"),
        ("maze(weight=2)", {"environment.agent": "agents.py:run"}, "agents are no environments with names"),
        ("maze(weight=2)", {}, "there is no environment: set environment.name"),
    ],
)
def test_options_that_cannot_be_applied(options, settings, message):
    config = default()
    config.update_from_flattened_dict({"environment.options": (options,), **settings})

    def read():
        validate(config)
        environment_spec(config)

    with pytest.raises(ConfigError, match=message):
        read()


def test_an_environment_has_one_entry_of_options():
    with pytest.raises(ConfigError, match=r"environment\.options has 'maze' twice"):
        environment_options(("maze(beta=1)", "maze(weight=2)"))


def test_options_of_an_environment_may_need_the_reference_alone():
    config = default()
    config.environment.options = ("maze(beta=0.0)", "sort(beta=0.1)")
    config.algorithm.kl_bias_correction, config.algorithm.ref_sync_steps = True, 5
    validate(config)
    assert needs_reference(config) and needs_reference(config, ("maze", "sort"))
    config.environment.options = ("maze(beta=0.0)", "sort(beta=0)")
    assert not needs_reference(config)
    config.algorithm.beta = 0.1
    assert needs_reference(config) and needs_reference(config, ("maze", "sort", "third"))
    assert not needs_reference(config, ("maze", "sort"))
    config.algorithm.reward_beta = 0.1
    assert needs_reference(config, ("maze", "sort"))


def test_the_built_in_game():
    game = SortThenSmallest(first=0.25)
    game.reset({"prompt": "sort:4821="})
    assert game.step("1248") == Step("sort:=", 0.25) and game.step("1") == Step(None, 0.75, True)
    game.reset({"prompt": "sort:4821="})
    assert game.step("1284") == Step(None, 0.0, True)
    with pytest.raises(EpisodeError, match=r"set data.path to task:sort"):
        game.reset({"prompt": "1+1="})


def test_a_game_of_questions():
    """Each right answer earns its share, a wrong one nothing; the questions are the same."""
    game = SmallestOfEach()
    for _ in range(2):
        game.reset({"prompt": "4821=", "questions": ["4821=", "9909=", "7553=", "6868="]})
        assert game.step("1") == Step("9909=", 0.25) and game.step("9") == Step("7553=", 0.0)
        assert game.step("33") == Step("6868=", 0.0) and game.step("6") == Step(None, 0.25, True)
    for row in ({"prompt": "4821="}, {"prompt": "sort:4821=", "questions": ["4821="]}):
        with pytest.raises(EpisodeError, match=r"set data.path to task:smallest"):
            game.reset(row)


def described(text: str):
    """Nothing about the argument."""


class Nothing:
    pass


class OnlyReset:
    def reset(self, row): ...


class Gymnasium:
    def reset(self, *, seed=None, options=None): ...

    def step(self, action): ...


class StepsAlone:
    def reset(self, row): ...

    def step(self): ...


@pytest.mark.parametrize(
    ("environment", "tools", "message"),
    [
        ("sort_then_smalest", (), "unknown name 'sort_then_smalest'; known are .*sort_then_smallest"),
        ("sort_then_smallest(frist=1)", (), "has no option 'frist'"),
        (Nothing, (), "has no method reset"),
        (OnlyReset, (), "neither a method step nor other public methods"),
        (Gymnasium, (), r"a method reset that cannot be called with row \(too many .*: write reset\(self, row\)"),
        (StepsAlone, (), r"a method step that cannot be called with text .*: write step\(self, text\)"),
        (None, (described,), "the tool 'described' cannot be described"),
        (None, (add, add), "two tools named 'add'"),
        (None, ("no_such_module:add",), "no module 'no_such_module'"),
        ({}, (), "an empty dictionary: name at least one"),
        (3, (), "the environment is a int, but each episode has one of its own: give the class, or a function"),
    ],
)
def test_what_cannot_be_used_is_named(environment, tools, message):
    with pytest.raises(ConfigError, match=message):
        load_environments(environment_spec(default(), environment, tools))


def test_names_in_the_configuration(tmp_path):
    written = "BOTH = {'a': SortThenSmallest, 'b': 'sort_then_smallest(first=0.2)'}"
    (tmp_path / "mine.py").write_text(f"from jaxrl_llm.environments.games import SortThenSmallest\n{written}\n")
    config = default()
    config.environment.name = f"{tmp_path / 'mine.py'}:BOTH"
    environments = load_environments(environment_spec(config))
    assert environments.acquire([{"environment": "b"}])[0].environment.first == 0.2
    config.environment.name = "sort_then_smallest(first=0.3)"
    assert load_environments(environment_spec(config)).acquire([{}])[0].environment.first == 0.3
    config.environment.name = None
    assert load_environments(environment_spec(config)) is None
