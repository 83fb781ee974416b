"""`environment.agent="episodes"`: environments and tools that show images, and the same games as rows of sessions."""

import copy
import itertools
import json
import random
import re
import time
import types
from concurrent.futures import Future

import jax
import numpy as np
import pyarrow.parquet as parquet
import pytest
from PIL import Image

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.algorithms.turn_advantages import turn_table
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.data.image_rows import ImageText
from jaxrl_llm.data.images import ImageLimits
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.data.shapes import drawn
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.own_part import OwnPart
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.environments.agents import Agents, AgentSpec
from jaxrl_llm.environments.batch import EpisodeBatch
from jaxrl_llm.environments.factory import Environments, EnvironmentSpec, load_environments
from jaxrl_llm.environments.protocol import EpisodeError, Step
from jaxrl_llm.models.files.hf import find_tokenizer, remember_images
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.rollouts.agent_rollout import AgentRollout
from jaxrl_llm.training.rollouts.episode_agent import EpisodeAgent
from jaxrl_llm.training.setup.worker import environment_spec
from tests.data.qwen_vl import FOLDERS, qwen_vl_folder
from tests.data.smolvlm import picture, png
from tests.models.decoding import trainer_logps
from tests.training.test_image_data import configured

pytest.importorskip("uvicorn")

K, WIDTH = 2, 400


def user(*content):
    return [{"role": "user", "content": list(content) if len(content) > 1 else content[0]}]


class Scripted:
    """A queue whose policy says `say(the text of the prompt)`, at once and to its end."""

    def __init__(self, tokenizer, eos, say):
        from jaxrl_llm.serving.metrics import Counts

        self.tokenizer, self.eos, self.say = tokenizer, eos, say
        self.counts, self.adapters = Counts(), {}
        self.images: list[int] = []  # of each request

    def submit(self, handles):
        from jaxrl_llm.serving.handles import Tokens

        for handle in handles:
            request = handle.request
            text = self.say(self.tokenizer.decode(request.prompt, skip_special_tokens=False))
            ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.eos][: request.limit]
            self.images.append(0 if request.tiles is None else len(request.tiles.images))
            handle.deliver(Tokens(ids, [-0.5] * len(ids), [], [], "stop" if ids[-1] == self.eos else "length"))

    def cancel(self, handles):
        pass

    def call(self, function):
        called = Future()
        called.set_result(None)
        return called

    release = None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """That of a tiny Qwen2.5-VL, whose template shows tools."""
    folder = qwen_vl_folder(tmp_path_factory.mktemp("qwen"))
    tokenizer = find_tokenizer(str(folder))
    remember_images(tokenizer, folder)
    tokenizer.chat_template = "{% if tools %}{{ tools }}{% endif %}" + tokenizer.chat_template
    return tokenizer


@pytest.fixture
def play(tokenizer):
    """`play(say, prompts, environment, tools) -> (rollout, episodes, queue)`: two episodes of each prompt."""
    from jaxrl_llm.serving.gateway import Gateway

    closing = []

    def run(
        say, prompts, environment=None, tools=(), limits=ImageLimits(), completion=400, row=(), tokenizer=tokenizer,  # noqa: B008
        **settings,
    ):  # fmt: skip
        eos, mesh = tokenizer.eos_token_id, make_mesh(devices=jax.devices()[:1])
        turns = TurnTokenizer(tokenizer, (eos,), WIDTH)
        on_error, seconds = settings.pop("on_error", "end"), settings.pop("agent_timeout", 60.0)
        agent = EpisodeAgent(EnvironmentSpec(environment, tools, **{"timeout": 30.0} | settings), limits)
        spec = agent.spec
        agents = Agents(AgentSpec(agent, spec.workers, seconds, spec.max_turns, on_error=on_error, branches=1))
        queue = Scripted(tokenizer, eos, say)
        gateway = Gateway(queue, turns, len(tokenizer), seconds, limits)
        closing.extend([agents.close, gateway.close])
        net = types.SimpleNamespace(config=types.SimpleNamespace(vision=None))
        engine = types.SimpleNamespace(
            group_size=K, sampling=SamplingParams(), net=net, max_completion_length=completion
        )
        rollout = AgentRollout(agents, engine, turns, mesh, WIDTH, 4, OwnPart.of(mesh, 1), limits, gateway)
        tasks = [
            {"number": number, "prompt": prompt, "prompt_ids": [1], **dict(row)}
            for number, prompt in enumerate(prompts)
        ]
        with jax.set_mesh(mesh):
            made, episodes = rollout({}, tasks, jax.random.key(0))
        return jax.tree.map(np.asarray, made), episodes, queue

    yield run
    for close in closing:
        close()


class Look:
    """Says how many shapes there are when it is asked to look: an image of them, and the question again."""

    closed = 0

    def __init__(self):
        self.turn = 0

    def reset(self, row):
        self.turn, self.row = 0, row
        self.image, self.answers = drawn(random.Random(row["number"]))
        return None

    def step(self, text):
        self.turn += 1
        if self.turn == 2:
            return Step(None, float(len(text)), done=True)
        image = Image.fromarray(self.image.astype(np.uint8))
        return Step(user("this: ", image, "how many?"), 0.25)

    def close(self):
        Look.closed += 1


def test_observations_with_images_are_rows(tokenizer, play):
    """The row has the tokens of the images that were drawn, as those of data are, and the turns' rewards."""
    Look.closed = 0
    say = lambda prompt: "12" if "how many?" in prompt else "look"  # noqa: E731
    rollout, episodes, queue = play(say, [user("start"), user("begin")], Look, workers=3)
    assert not episodes.failed.any() and sorted(queue.images) == [0] * 4 + [1] * 4
    assert episodes.rewards == [2.25] * 4
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rows = episodes.image_rows([{"prompt_ids": [1]}] * 4)
    for number, row in enumerate(rows):
        image = Image.fromarray(drawn(random.Random(number // K))[0].astype(np.uint8))
        assert row[PIXELS].read()[0].tobytes() == image.tobytes() and len(row[PIXELS].images) == 1
        shown = ImageText.of(row[PIXELS], tokenizer)
        parts = [{"type": "text", "text": "this: "}, {"type": "image"}, {"type": "text", "text": "how many?"}]
        said = [{"role": "assistant", "content": text} for text in ("look", "12")]
        messages = [*user(("start", "begin")[number // K]), said[0], {"role": "user", "content": parts}, said[1]]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        assert shown.expand(rendered).rstrip() == tokenizer.decode(row["prompt_ids"])
        assert row["prompt_ids"].count(pad) == shown.tokens == 4
    for row, mask in zip(rollout.tokens, rollout.mask, strict=True):
        assert tokenizer.decode(row[mask > 0]) == "look<|im_end|>12<|im_end|>"
    turns = turn_table(*episodes.turn_records(rollout.lengths.tolist()), K, WIDTH)
    assert turns.rewards[:, :2].tolist() == [[0.25, 2.0]] * 4 and np.isnan(turns.rewards[:, 2:]).all()
    _, columns = episodes.finish([user("start")] * 4, [[]] * 4)
    assert columns["environment_reward"] == [2.25] * 4
    completions, _ = episodes.finish([user("start")] * 4, [[]] * 4)
    assert [message["role"] for message in completions[0]] == ["assistant", "user", "assistant"]
    json.dumps(completions)  # without pixels


def test_the_state_of_a_turn_is_the_image_that_it_answers(play):
    """Two images of one size are other states, which advantages that compare turns tell apart; one image is one."""
    count = itertools.count()

    class Other(Look):
        def step(self, text):
            step = super().step(text)
            if step.done:
                return step
            alike = self.row["number"] or next(count)
            return Step(user("this: ", picture(16, 16, alike), "how many?"))

    say = lambda prompt: "12" if "how many?" in prompt else "look"  # noqa: E731
    rollout, episodes, _ = play(say, [user("start"), user("begin")], Other, workers=1)
    states = turn_table(*episodes.turn_records(rollout.lengths.tolist()), K, WIDTH).states
    assert states[:, :2].tolist() == [[0, 1], [0, 11], [0, 1], [0, 1]]  # of 10 turns a row


def test_marks_of_calls_may_be_special_tokens(tokenizer, play):
    """An endpoint leaves such out of its answers, unless it is asked for them."""

    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["<|tool_call_start|>", "<|tool_call_end|>"]})
    remember_images(own, tokenizer.image_folder)
    say = lambda prompt: "five" if "5" in prompt else "<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|>"  # noqa: E731
    _, episodes, _ = play(say, [user("add!")], None, (add,), tokenizer=own)
    said = [[message["content"] for message in row.last.messages] for row in episodes.rows]
    assert said == [["<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|>", "5", "five"]] * 2


def test_tools_that_return_images(play):
    """An image, a list of text and image, or an image that is wrong: the policy sees it, or the error."""

    def draw(what: str):
        """Draws.

        Args:
            what: Whether it is alone.
        """
        if what == "raise":
            raise ValueError("no paper")
        if what == "numbers":
            return [1, 2]
        return picture(16, 16) if what == "alone" else ["a drawing:", picture(16, 8), png(picture(8, 16))]

    def say(prompt):
        called = [what for what in ("alone", "list", "raise", "numbers") if prompt.count(what)]
        last = called[-1]
        seen = {"alone": "<|vision_start|>", "list": "a drawing:", "raise": "no paper", "numbers": "[1, 2]"}[last]
        call = json.dumps({"name": "draw", "arguments": {"what": last}})
        return "I see" if prompt.count(seen) else f"<tool_call>{call}</tool_call>"

    class Rewarded:
        def reset(self, row):
            return None

        def step(self, text):
            return Step(None, float(text == "I see"), done=True)

    prompts = [user("alone"), user("list"), user("raise"), user("numbers")]
    _, episodes, queue = play(say, prompts, Rewarded, (draw,))
    assert episodes.rewards == [1.0] * 8, episodes.reasons
    assert sorted(queue.images) == [0] * 12 + [1, 1, 2, 2]
    roles = [[message["role"] for message in row.last.messages] for row in episodes.rows]
    assert roles == [["assistant", "tool", "assistant"]] * 8
    # Of the engine's own episodes the same tool is refused by name, and its other results are what they were.
    environments = Environments(EnvironmentSpec(None, (draw,)))
    (episode,) = environments.acquire([{}])
    call = '<tool_call>{"name": "draw", "arguments": {"what": "%s"}}</tool_call>'
    assert episode.respond(call % "numbers", call % "numbers").step.observation[0]["content"] == "[1, 2]"
    observed = episode.respond(call % "alone", call % "alone").step.observation
    turns = TurnTokenizer(queue.tokenizer, (queue.eos,), WIDTH)
    with pytest.raises(ConfigError, match=r'has an image, .* set environment.agent="episodes"'):
        turns.observation_ids({"prompt": prompts[0]}, observed)


class Broken(Look):
    """Fails in a way of its own for each prompt."""

    def reset(self, row):
        self.how = row["prompt"][0]["content"]
        if self.how == "reset":
            raise RuntimeError("no game")
        return user(self.how, b"GIF89a") if self.how == "opening" else None

    def step(self, text):
        if self.how == "raises":
            raise KeyError("boom")
        if self.how == "hangs":
            time.sleep(30)
        if self.how == "plain":
            return "no step"
        shown = {"broken": png(picture(16, 16))[:60], "large": picture(65, 16), "missing": {"type": "image"}}
        shown["url"] = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
        return Step(user("see: ", shown[self.how])) if self.how in shown else Step(None, 1.0)

    def get_reward(self):
        if self.how == "no number":
            return "much"
        return None if self.how == "none" else 0.5


FAILURES = {
    "reset": "Broken.reset raised RuntimeError: no game",
    "opening": "Broken shows an image that cannot be read: an image of 6 bytes is no image",
    "raises": "Broken.step raised KeyError: 'boom'",
    "hangs": "Broken.step took more than environment.timeout",
    "plain": "Broken.step raised EpisodeError: Broken.step returned 'no step'",
    "broken": "Broken shows an image that cannot be read: an image is truncated or broken",
    "large": "Broken shows an image that cannot be read: .* has 65 x 16 pixels, and data.image_pixels=1024",
    "missing": "Broken shows an image that cannot be read: an image is a dictionary of type",
    "url": "Broken shows an image that cannot be read: .* is a URL, and data.image_urls=False",
    "no number": "Broken.get_reward returned 'much', not a finite number",
    "none": "the agent gave no reward",
    "fine": "",
}


@pytest.mark.slow
def test_environments_that_fail_are_missing_rewards(play):
    """Each says why, the others go on, and nothing waits for what hangs."""
    Look.closed, began = 0, time.monotonic()
    prompts = [user(how) for how in FAILURES]
    limits, say = ImageLimits(pixels=1024), lambda prompt: "go"
    _, episodes, _ = play(say, prompts, Broken, limits=limits, timeout=2.0, workers=24)
    assert time.monotonic() - began < 20
    for number, (how, message) in enumerate(FAILURES.items()):
        for row in (K * number, K * number + 1):
            assert re.search(message, episodes.reasons[row] or ""), (how, episodes.reasons[row])
            assert episodes.failed[row] == bool(message)
    _, columns = episodes.finish([user("a")] * len(episodes.rows), [[]] * len(episodes.rows))
    assert columns["environment_reward"] == [None] * (len(columns["environment_reward"]) - 2) + [0.5] * 2
    assert episodes.release(len(episodes.rows))[1]["environment/failures"] == len(episodes.rows) - 2
    assert Look.closed >= len(episodes.rows) - 6  # those that failed, save of resets and rewards, which were none
    with pytest.raises(EpisodeError, match=r"2 of the step's 4 agents failed .*Broken.step raised KeyError: 'boom'"):
        play(say, [user("raises"), user("fine")], Broken, on_error="stop")
    with pytest.raises(EpisodeError, match=r"all of the step's 2 agents failed .*environment.agent_timeout = 0.5 s"):
        play(say, [user("hangs")], Broken, timeout=None, agent_timeout=0.5)


def test_bounds_of_rows(play):
    """Images of a whole row are bounded, and an observation that leaves no room ends the episode with its reward."""

    class Endless(Look):
        def step(self, text):
            return Step(user("see: ", picture(16, 16)), 0.5)

    say = lambda prompt: "go"  # noqa: E731
    _, episodes, _ = play(say, [user("a"), user("b")], Endless, limits=ImageLimits(per_row=3), max_turns=4)
    assert episodes.rewards == [2.0] * 4 and [len(row.turns) for row in episodes.rows] == [4] * 4
    with pytest.raises(EpisodeError, match=r"the row has 3 images, more than data.images_per_row=2"):
        play(say, [user("a")], Endless, limits=ImageLimits(per_row=2), max_turns=4)
    rollout, episodes, _ = play(say, [user("a")], Endless, completion=80)
    turns = len(episodes.rows[0].turns)
    assert 1 < turns < 10 and episodes.rewards == [0.5 * turns] * 2 and (rollout.lengths <= 80).all()
    with pytest.raises(EpisodeError, match=r"the prompt has .* tokens, but rows begin with up to 400"):
        play(say, [user("a" * 400)], Endless)
    with pytest.raises(EpisodeError, match="the prompt is plain text, but the observation of Endless is"):
        play(say, ["a"], Endless)


class Game:
    """Asks twice more; its state is the length of what was said, or what it asked."""

    def __init__(self, tells=True):
        self.tells = tells

    def reset(self, row):
        self.turn = 0
        return None

    def step(self, text):
        self.turn += 1
        state = len(text) if self.tells else None
        return Step("sort:=" if self.turn < 3 else None, len(text) / 10, self.turn == 3, state)


def checked_rows(rollout, episodes, turns, width, prompts, spec, completion):
    """The table of turns of rows that are those which `EpisodeBatch` makes of the same turns."""
    (eos,), mask = turns.eos, np.asarray(rollout.mask)
    lengths = np.asarray(rollout.lengths).tolist()
    ids = [
        row[width : width + length].tolist() for row, length in zip(np.asarray(rollout.tokens), lengths, strict=True)
    ]
    batch = EpisodeBatch.open(
        Environments(spec), turns, [{"prompt": prompt, "prompt_ids": [1]} for prompt in prompts], K
    )
    for row, tokens in enumerate(ids):
        sampled = mask[row, width : width + len(tokens)] > 0
        assert sampled[0] and sampled[-1]
        for end in [i + 1 for i in range(len(tokens)) if tokens[i] == eos and sampled[i]]:
            batch.submit(row, tokens[:end])
            observed = batch.poll(wait=True)[row]
            if observed is None or end + len(observed) >= completion:
                assert end == len(tokens)
            else:
                assert tokens[end : end + len(observed)] == observed and not sampled[end : end + len(observed)].any()
    rows = [prompt for prompt in prompts for _ in range(K)]
    own, others = episodes.finish(rows, ids)[1], batch.finish(ids, True)[1]
    np.testing.assert_allclose(own["environment_reward"], others["environment_reward"], rtol=1e-6)
    tables = [turn_table(*played.turn_records(lengths), K, width) for played in (episodes, batch)]
    jax.tree.map(np.testing.assert_array_equal, *tables)
    return tables[0]


@pytest.mark.parametrize(("chat", "completion"), [(False, 200), (False, 22), (True, 200), (True, 62)])
def test_a_game_of_text_is_the_engines_own(tokenizer, play, chat, completion):
    """Tokens, rewards, and turns with their rewards and states; also where the last turn is cut off."""
    count, spec = itertools.count(), EnvironmentSpec(lambda: Game(chat), max_turns=3)
    prompts = [user(text) if chat else text for text in ("what?", "which?")]
    say = lambda prompt: "a" * (next(count) % 5 + 2)  # noqa: E731
    rollout, episodes, _ = play(say, prompts, lambda: Game(chat), completion=completion, max_turns=3, workers=1)
    turns = TurnTokenizer(tokenizer, (tokenizer.eos_token_id,), WIDTH)
    table = checked_rows(rollout, episodes, turns, WIDTH, prompts, spec, completion)
    assert np.isfinite(table.rewards).all() == (completion == 200)
    assert rollout.finished.all() == (completion == 200)


def test_rewards_of_turns_are_on_the_scale_of_their_environment(play):
    """They add up to the reward of the episode."""
    percent = {"percent": lambda: Game(False)}
    _, episodes, _ = play(
        lambda prompt: "aa", ["what?"], percent, reward_scales={"percent": 0.5}, row={"environment": "percent"}
    )
    _, plain, _ = play(lambda prompt: "aa", ["what?"], lambda: Game(False))
    for own, other in zip(*(played.turn_records([400] * K)[0] for played in (episodes, plain)), strict=True):
        assert [turn.reward for turn in own] == pytest.approx([0.5 * turn.reward for turn in other]) and own
    rewards = [sum(turn.reward for turn in own) for own in episodes.turn_records([400] * K)[0]]
    assert episodes.finish(["what?"] * K, [[1]] * K)[1]["environment_reward"] == pytest.approx(rewards)


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_a_game_of_text_has_the_policys_log_probs(chat):
    model = jaxrl_llm.load_model("embedded:sort", "float32")
    mesh, turns = make_mesh(devices=jax.devices()[:1]), TurnTokenizer(model.tokenizer, (257,), 40)
    spec, completion = EnvironmentSpec(lambda: Game(chat), max_turns=3), 24
    agents = Agents(AgentSpec(EpisodeAgent(spec, ImageLimits()), calls=3, timeout=2000, branches=1))
    prompts = [user("sort:4821=") if chat else "sort:4821=", user("sort:21=") if chat else "sort:21="]
    tasks = [{"prompt": prompt, "prompt_ids": turns.prompt_ids({}, prompt, [])} for prompt in prompts]
    engine = Engine(SamplingParams(0.8), K, completion, net=model.net, eos=(257,), chunk=8)
    try:
        with jax.set_mesh(mesh):
            rollout, episodes = AgentRollout(agents, engine, turns, mesh, 40, 4, OwnPart.of(mesh, 1))(
                model.params, tasks, jax.random.key(0)
            )
    finally:
        agents.close()
    assert not episodes.failed.any(), episodes.reasons
    logps, _ = trainer_logps(model.net, model.params, Inputs(rollout.tokens, rollout.segments, prompt_width=40), 0.8)
    np.testing.assert_allclose(np.asarray(logps) * np.asarray(rollout.mask), rollout.sample_logps, atol=1e-4)
    checked_rows(rollout, episodes, turns, 40, prompts, spec, completion)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment.name": None}, "environment.agent is 'episodes', but there is neither an environment nor a tool"),
        ({"environment.rollout_func": "a.py:f"}, "environment.agent and environment.rollout_func are both set"),
        ({"environment.agent": "a.py:run"}, "environment.name are both set, .* or environment.agent='episodes'"),
        ({"rollout.stop": ("x",)}, "rollout.stop is .* the endpoint of environment.agent has not"),
        ({"rollout.partial_prompts": 1}, "rollout.partial_prompts is 1, but environment.name is"),
        ({"algorithm.name": "sft"}, "samples nothing"),
        ({"environment.reward_scale": ("maze=2",)}, "environment.reward_scale names 'maze', but there is one"),
        ({"environment.options": ("maze(weight=2)",)}, "environment.options names 'maze', but there is one"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    config = default()
    config.environment.agent, config.environment.name = "episodes", "sort_then_smallest"
    config.update_from_flattened_dict(settings)
    with pytest.raises(ConfigError, match=message):
        load_environments(environment_spec(validate(config) or config))


def test_the_spec_of_a_configuration():
    config = default()
    config.environment.agent, config.environment.name = "episodes", "sort_then_smallest(first=0.3)"
    config.environment.max_turns, config.data.images_per_row, config.data.image_pixels = 2, 3, 64
    validate(config)
    spec = environment_spec(config)
    assert not hasattr(spec.agent, "environments"), "nothing is open before the data is read"
    agents = Agents(spec)
    assert spec.calls == 2 and spec.agent.limits == ImageLimits(64, 2**25, 3, False)
    (made,) = spec.agent.environments.idle[None]
    made.close = lambda: setattr(made, "first", "closed")
    agents.close()
    assert made.first == "closed"
    config.environment.agents = ("other=no-such-command",)
    spec, closed = environment_spec(config), []
    spec.agent.close = lambda: closed.append(spec.agent.environments)
    with pytest.raises(ConfigError, match="'no-such-command' is no command"):
        Agents(spec)
    assert closed == [spec.agent.environments], "what is open is closed where another agent is refused"
    config.environment.agents = ()
    config.environment.agent = "a.py:run"
    with pytest.raises(EpisodeError, match=r"an environment or tools are given too: .* environment.agent='episodes'"):
        environment_spec(config, Game)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_a_run_learns_from_what_environments_show(tmp_path, family):
    """Two steps of GRPO on two turns, of which the second answers an image: sampled and trained log-probs are one."""
    folder = FOLDERS[family](tmp_path / "model")
    # Random parameters seldom say the end of a turn: letters end it too.
    ends = [find_tokenizer(str(folder)).eos_token_id, *range(97, 104)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    config = configured(folder, tmp_path, **{"rollout.max_completion_length": 320})
    config.environment.agent, config.environment.max_turns = "episodes", 2
    config.rewards.functions, config.environment.on_error = ("environment",), "stop"
    config.algorithm.advantage = "gigpo"
    Look.closed = 0
    rows = [{"number": number, "prompt": user("which?")} for number in range(4)]
    result = jaxrl_llm.train(config, train_dataset=rows, environment=Look)
    for line in result.metrics:
        np.testing.assert_allclose(line["sampling/importance_sampling_ratio/mean"], 1.0, atol=1e-3)
        assert line["environment/failures"] == 0
    table = parquet.read_table(tmp_path / "run/completions/completions_00002.parquet").to_pylist()
    assert len(table) == 8 and {row["environment/ended"] for row in table} == {"done"}
    rewards = [json.loads(row["environment/turn_rewards"]) for row in table]
    assert [len(own) for own in rewards] == [row["environment/turns"] for row in table]
    np.testing.assert_allclose([row["environment"] for row in table], [sum(own) for own in rewards])
    played = [number for number, own in enumerate(rewards) if len(own) == 2]
    assert len(played) > 1 and all(rewards[number][0] == 0.25 for number in played)
    assert all("how many?" in str(table[number]["completion"]) for number in played)
    assert Look.closed > 0
