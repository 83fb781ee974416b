"""Agents inside a run: programs with a client of their own, whose calls become the rows that are learned from."""

import functools
import http.client
import itertools
import json
import math
import shutil
import time
import urllib.parse

import jax
import numpy as np
import pyarrow.parquet as parquet
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.algorithms.turn_advantages import compared_in_state, turn_table
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.distributed.own_part import OwnPart
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.environments.agents import Agents, AgentSpec
from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving import running
from jaxrl_llm.training.packing.layout import Sizes, plan
from jaxrl_llm.training.rollouts.agent_rollout import AgentRollout
from tests.models.decoding import trainer_logps

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

WIDTH, C, K = 24, 32, 2


def two_turns(base_url, api_key, task):
    """Asks twice, streams the second answer, and gives a reward by the length of what came."""
    messages, said = [{"role": "user", "content": task["prompt"]}], []
    with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=1000) as client:
        for stream in (False, True):
            reply = client.chat.completions.create(
                model="gpt", messages=messages, max_tokens=8, temperature=0.1, stream=stream
            )
            parts = [chunk.choices[0].delta for chunk in reply if chunk.choices] if stream else None
            text = "".join(part.content or "" for part in parts) if parts else reply.choices[0].message.content
            said.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "least?"}]
    return {"first": len(said[0]), "second": len(said[1]) / 10}


def sometimes(base_url, api_key, reward_url, task):
    """Fails, forks, posts its reward or forgets it, by the task's number."""
    number = task["number"]
    if number == 0:
        raise RuntimeError("zero")
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=1000) as client:
        for prompt in ("sort:21=", "sort:43="):
            client.completions.create(model="any", prompt=prompt, max_tokens=4)
        if number == 1:
            client.post("/reward", cast_to=object, body={"reward": 0.25, "turn": 0})
            client.post("/reward", cast_to=object, body={"reward": 0.5, "turn": 1})
        if number == 2:
            client.completions.create(model="any", prompt="again", max_tokens=4)


@pytest.fixture(scope="module")
def model():
    return jaxrl_llm.load_model("embedded:sort", "float32")


@pytest.fixture
def play(model):
    """`play(agent, tasks) -> (rollout, episodes)`."""
    mesh = make_mesh(devices=jax.devices()[:1])
    engine = Engine(SamplingParams(0.8), K, C, net=model.net, eos=(257,), chunk=8)
    turns = TurnTokenizer(model.tokenizer, (257,), WIDTH)
    opened = []

    def run(agent, tasks, key=0, **settings):
        agents = Agents(AgentSpec(agent, **{"calls": 2, "timeout": 2000} | settings))
        opened.append(agents)
        examples = [{**task, "prompt_ids": model.tokenizer(task["prompt"])["input_ids"]} for task in tasks]
        with jax.set_mesh(mesh):
            rollout, episodes = AgentRollout(agents, engine, turns, mesh, WIDTH, 4, OwnPart.of(mesh, 1))(
                model.params, examples, jax.random.key(key)
            )
        return jax.tree.map(np.asarray, rollout), episodes

    yield run
    for agents in opened:
        agents.close()


def test_calls_are_rows_of_the_policy(model, play):
    tasks = [{"prompt": "sort:4821="}, {"prompt": "sort:99310="}]
    rollout, episodes = play(two_turns, tasks, workers=4)
    logps, _ = trainer_logps(model.net, model.params, Inputs(rollout.tokens, rollout.segments, prompt_width=WIDTH), 0.8)
    np.testing.assert_allclose(np.asarray(logps) * rollout.mask, rollout.sample_logps, atol=1e-4)
    for row, branch in enumerate(found.last for found in episodes.rows):
        text = model.tokenizer.decode(rollout.tokens[row][rollout.segments[row] == 1])
        said = [message["content"] for message in branch.messages]
        assert text.startswith(f"<|user|>{tasks[row // K]['prompt']}<|end|><|assistant|>{said[0]}")
        assert said[1] == "least?"
        assert episodes.rewards[row] == {"first": len(said[0]), "second": len(said[2]) / 10}
        assert rollout.mask[row].sum() == sum(branch.mask) <= 16 and branch.turns == 2
    for turns, length, mask in zip(episodes.turn_records([])[0], rollout.lengths, rollout.mask, strict=True):
        first, last = (turn.end for turn in turns)
        assert mask[WIDTH : WIDTH + first].all() and not mask[WIDTH + first] and last == length
    metrics, totals, columns = episodes.release(len(episodes.rows))
    assert set(totals.values()) == {0.0} and metrics["environment/calls"] == [2.0] * 4
    assert columns["environment/ended"] == ["done"] * 4
    _, results = episodes.finish([task["prompt"] for task in tasks for _ in range(K)], rollout.tokens[:, :0].tolist())
    assert results["environment_reward"] == [sum(reward.values()) for reward in episodes.rewards]
    # Neither the number of agents at once nor their order changes a sample.
    again, _ = play(two_turns, tasks, workers=1)
    np.testing.assert_array_equal(again.tokens, rollout.tokens)
    np.testing.assert_allclose(again.sample_logps, rollout.sample_logps, atol=1e-5)
    assert len({tuple(row) for row in rollout.tokens.tolist()}) == 4


@pytest.mark.parametrize("way", [pytest.param("items", marks=pytest.mark.slow), "id", "messages"])
def test_responses_and_messages_are_rows_as_chats_are(play, way):
    """The same tokens: with all items, those of the answer among them, by the id of the response before, or by the API
    of Anthropic."""

    def agent(base_url, api_key, task):
        by_id = way == "id"
        items, previous, said = [{"role": "user", "content": task["prompt"]}], None, []
        with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=1000) as client:
            for _ in range(2 if way == "messages" else 0):
                reply = client.post("/messages", cast_to=dict, body={"messages": items, "max_tokens": 8})
                said.append("".join(block["text"] for block in reply["content"]))
                items += [{"role": "assistant", "content": reply["content"]}]
                items += [{"role": "user", "content": [{"type": "text", "text": "least?"}]}]
            for stream in (False, True) if way != "messages" else ():
                reply = client.responses.create(model="gpt", input=items, max_output_tokens=8, stream=stream,
                                                previous_response_id=previous, temperature=0.1)  # fmt: skip
                reply = [*reply][-1].response if stream else reply
                said.append(reply.output_text)
                question = {"role": "user", "content": "least?"}
                items = [question] if by_id else [*items, *(item.to_dict() for item in reply.output), question]
                previous = reply.id if by_id else None
        return {"first": len(said[0]), "second": len(said[1]) / 10}

    tasks = [{"prompt": "sort:4821="}, {"prompt": "sort:99310="}]
    chats, _ = play(two_turns, tasks)
    rollout, episodes = play(agent, tasks)
    np.testing.assert_array_equal(rollout.tokens, chats.tokens)
    np.testing.assert_array_equal(rollout.mask, chats.mask)
    np.testing.assert_allclose(rollout.sample_logps, chats.sample_logps, atol=1e-5)
    assert set(episodes.release(4)[1].values()) == {0.0} and [row.last.turns for row in episodes.rows] == [2] * 4


def test_one_client_asks_for_many_sessions(play):
    """At the address without a session, which the model names."""

    def agent(base_url, api_key, session, task):
        url = base_url.replace(f"/session/{session}/", "/session/") if task["shared"] else base_url
        with openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=1000) as client:
            if task["shared"]:
                with pytest.raises(openai.PermissionDeniedError, match="there is no session 'gpt'"):
                    client.completions.create(model="gpt", prompt=task["prompt"])
            model = session if task["shared"] else "gpt"
            text = client.completions.create(model=model, prompt=task["prompt"], max_tokens=4).choices[0].text
        return float(len(text))

    tasks = [{"prompt": "sort:4821="}, {"prompt": "sort:99310="}]
    own, _ = play(agent, [{**task, "shared": False} for task in tasks], calls=1)
    shared, episodes = play(agent, [{**task, "shared": True} for task in tasks], calls=1)
    assert episodes.reasons == [None] * 4
    np.testing.assert_array_equal(shared.tokens, own.tokens)


def test_a_request_that_is_refused_is_no_call(play):
    """A schema too, which is read when its grammar is compiled."""

    def agent(base_url, api_key, task):
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=1000) as client:
            for wrong in ({"extra_body": {"no_field": 1}}, {"response_format": schema}):
                with pytest.raises(openai.BadRequestError):
                    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "1"}], **wrong)
            return float(len(client.completions.create(model="m", prompt=task["prompt"], max_tokens=4).choices[0].text))

    _, episodes = play(agent, [{"prompt": "sort:4821="}], calls=1)
    assert episodes.reasons == [None] * K and [session.calls for session in episodes.sessions] == [1] * K

    def too_long(base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=1000)
        with client, pytest.raises(openai.BadRequestError):
            client.completions.create(model="m", prompt="x" * 500)
        return 1.0

    with pytest.raises(ConfigError, match="no call of the agent was answered; one was refused: the prompt has 500 tok"):
        play(too_long, [{"prompt": "sort:4821="}])


@pytest.mark.slow
def test_a_connection_is_kept_between_two_calls(play):
    """For longer than clients keep theirs, most of them 5 seconds: else a call is sent on one that is being ended."""

    def agent(base_url, api_key, task):
        address = urllib.parse.urlsplit(base_url)
        connection = http.client.HTTPConnection(address.netloc, timeout=1000)
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        for seconds in (0, 7):
            time.sleep(seconds)
            body = json.dumps({"prompt": task["prompt"], "max_tokens": 2})
            connection.request("POST", f"{address.path}/completions", body, headers)
            assert connection.getresponse().read()
        connection.close()
        return 1.0

    assert play(agent, [{"prompt": "sort:21="}])[1].reasons == [None] * K


def team(base_url, api_key, task):
    """Two solvers whose answers a third call takes up; solvers are rewarded by themselves, and one forks."""
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=1000) as client:
        answers = []
        for number in range(2):
            opened = client.post("/sub_agents", cast_to=dict, body={"name": "solver", "max_turns": 2})
            with openai.OpenAI(base_url=opened["base_url"], api_key=api_key, timeout=1000) as solver:
                calls = [solver.completions.create(model="any", prompt=task["prompt"], max_tokens=2) for _ in range(2)]
                answers.append(calls[number].choices[0].text)
                solver.post("/reward", cast_to=object, body={"reward": float(len(answers[-1]))})
        last = client.completions.create(model="any", prompt="".join(answers) + "=", max_tokens=2).choices[0].text
    return len(last) / 10


@pytest.mark.slow
def test_sub_agents_are_parts_of_the_row(model, play):
    rollout, episodes = play(team, [{"prompt": "s:21="}], workers=2, calls=5, branches=5)
    again, _ = play(team, [{"prompt": "s:21="}], workers=1, calls=5, branches=5)
    np.testing.assert_array_equal(again.tokens, rollout.tokens)
    assert rollout.segments.max(axis=1).tolist() == [5, 5] and not episodes.failed.any()
    packed = plan(rollout.tokens, rollout.segments, rollout.mask, Sizes(96, 1, K, 1, group_size=K)).microbatch(0)
    for layout, order in ((None, slice(None)), (packed, packed.row_idx[0])):
        inputs = Inputs(rollout.tokens, rollout.segments, layout=layout, prompt_width=WIDTH)
        logps, _ = trainer_logps(model.net, model.params, inputs, 0.8)
        logps = np.asarray(logps) * rollout.mask[order]
        np.testing.assert_allclose(logps, rollout.sample_logps[order], atol=1e-4)
    (parts, _), (metrics, totals, _) = episodes.parts(), episodes.release(len(episodes.rows))
    for row, session in zip(parts, episodes.sessions, strict=True):
        first, second, last = row
        assert [part.state for part in row] == ["solver", "solver", None] and math.isnan(last.reward)
        assert [first.reward, second.reward] == [one.reward for one in session.sub_agents]
        assert first.end < second.end < last.end
    assert metrics["environment/calls"] == [5.0] * 2 and len(metrics["environment/sub_agents/solver"]) == 4
    assert totals["environment/left_out_tokens"] == 0


def proposer(base_url, api_key, task):
    """A problem, and three answers to it that are compared with each other alone."""
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=1000) as client:
        for number in range(3):
            body = {"name": "solver", "compared_in": "session"}
            opened = client.post("/sub_agents", cast_to=dict, body=body)
            with openai.OpenAI(base_url=opened["base_url"], api_key=api_key, timeout=1000) as solver:
                solver.completions.create(model="any", prompt=task["prompt"], max_tokens=2)
                solver.post("/reward", cast_to=object, body={"reward": float(number)})
        client.completions.create(model="any", prompt=task["prompt"], max_tokens=2)
    return 1.0


def test_sub_agents_that_are_compared_in_their_session(play):
    """As the solvers of prime-rl's hierarchical_grpo: reward minus the mean of those on the same problem."""
    _, episodes = play(proposer, [{"prompt": "s:21="}], workers=2, calls=5, branches=5)
    (parts, most), roles = episodes.parts(), episodes.roles()
    table = turn_table(parts, most, K, 0)
    for row in range(K):
        table.rewards[row, :3] += 10 * row  # problems that differ in difficulty
    compared = np.asarray(compared_in_state(table.rewards, table.states, K, "none"))
    np.testing.assert_allclose(compared[:, :3], [[-1.0, 0.0, 1.0]] * K, atol=1e-5)
    assert roles == [["solver"] * 3 + ["agent"]] * K


@functools.cache
def wins(pile: int) -> bool:
    """Whether who moves next can take the last stone, by trying all games."""
    return any(not wins(pile - take) for take in (1, 2, 3) if take <= pile)


@pytest.mark.slow
def test_a_game_of_two_is_played_and_judged(root, model, play):
    """The moves of both players, put together again from their sessions, are a game with this winner."""
    tasks = [{"prompt": f"sort:{'7' * digits}="} for digits in (4, 6, 8)]
    _, episodes = play(f"{root / 'configs/agents/taking_game.py'}:run", tasks * 4, workers=4, calls=6, branches=6)
    longest, wrong = 0, 0
    for row, (session, reward) in enumerate(zip(episodes.sessions, episodes.rewards, strict=True)):
        first, second = session.sub_agents
        assert (first.role, second.role) == ("first", "second") and not session.branches
        calls = [
            [model.tokenizer.decode(x.prompt_ids + x.completion_ids) for x in one.branches] for one in (first, second)
        ]
        played = [said for both in itertools.zip_longest(*calls) for said in both if said is not None]
        pile, mover, legal, kept = tasks[row // K % 3]["prompt"].count("7") - 2, 0, [], []
        for said in played:
            assert pile and all(legal) and said.startswith(f"sort:{'123'[:pile]}{pile}=")
            move = said.partition("=")[2].removesuffix("<|end|>")
            legal.append(move in ("1", "2", "3")[:pile])
            if wins(pile):
                kept.append(legal[-1] and not wins(pile - int(move)))
            mover, pile = 1 - mover, pile - int(move) if legal[-1] else pile
        assert pile == 0 or not legal[-1]
        won = mover if not legal[-1] else 1 - mover
        assert [first.reward, second.reward] == ([1.0, -1.0] if won == 0 else [-1.0, 1.0])
        assert reward == {"optimal": np.mean(kept or [1.0]), "legal": np.mean(legal)}
        longest, wrong = max(longest, len(played)), wrong + (not legal[-1])
    assert longest > 2 and wrong
    assert [part.state for part in episodes.parts()[0][0]] in (["first"], ["first", "second"])


def test_a_turn_that_two_branches_begin_with_is_learned_from_once(play):
    def forks(base_url, api_key, task):
        with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=1000) as client:
            first = client.completions.create(model="any", prompt=task["prompt"], max_tokens=3).choices[0].text
            for more in ("a", "b"):
                client.completions.create(model="any", prompt=task["prompt"] + first + more, max_tokens=2)
        return 1.0

    rollout, episodes = play(forks, [{"prompt": "s:21="}], calls=3)
    for row, session, mask in zip(episodes.rows, episodes.sessions, rollout.mask, strict=True):
        assert row.segments[-1] == 2 and len(row.turns) == 3
        assert (
            mask.sum()
            == sum(row.mask)
            == session.sampled
            == sum(sum(x.mask) for x in session.branches) - 2 * sum(session.branches[0].mask)
        )


@pytest.mark.slow
def test_choices_of_a_call_are_turns_of_the_row(play):
    """A session whose every call asks for several choices has more turns than calls: credit to turns has room."""

    def chooses(base_url, api_key, task):
        with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=1000) as client:
            reply = client.completions.create(model="any", prompt=task["prompt"], max_tokens=2, n=3)
        return float(len(reply.choices))

    rollout, episodes = play(chooses, [{"prompt": "s:21="}], calls=1)
    table = turn_table(*episodes.turn_records(rollout.lengths.tolist()), K, WIDTH)
    ends = WIDTH + np.array([[turn.end for turn in row.turns] for row in episodes.rows])
    np.testing.assert_array_equal(np.sort(table.ends, axis=1)[:, :3], ends)


def test_agents_that_fail(model, play):
    tasks = [{"prompt": "sort:1=", "number": number} for number in range(4)]
    rollout, episodes = play(sometimes, tasks)
    assert episodes.failed.tolist() == [True, True, False, False, True, True, True, True]
    assert episodes.reasons[0].startswith("RuntimeError: zero (") and "made its 2 calls" in episodes.reasons[4]
    assert episodes.reasons[6] == "the agent gave no reward" and episodes.rewards[2] == 0.75
    records, most = episodes.turn_records(rollout.lengths.tolist())
    assert most == 2 + 8 - 1 and records[0] == [] and [turn.reward for turn in records[2]] == [0.25, 0.5]
    assert rollout.mask[:2].sum() == 0 and (rollout.lengths[:2] == 1).all()
    metrics, totals, columns = episodes.release(len(episodes.rows))
    assert totals["environment/failures"] == 6 and totals["environment/left_out_tokens"] == 0
    assert metrics["environment/branches"] == [0.0, 0.0, *[2.0] * 6]
    assert columns["environment/turn_rewards"][2] == [0.25, 0.5] and columns["environment/turns"][2] == 2
    # Both calls are in the row, and neither sees the other.
    text = rollout.tokens[2].tolist()
    assert text[:WIDTH][-8:] == list(b"sort:21=") and (rollout.segments[2, :WIDTH] > 0).sum() == 8
    first, last = (turn.end for turn in records[2])
    assert text[WIDTH + first :][:8] == list(b"sort:43=") and rollout.lengths[2] == last
    assert rollout.segments[2, WIDTH:][:last].tolist() == [1] * first + [2] * (last - first)
    assert rollout.mask[2, WIDTH:][:last].tolist() == [1] * first + [0] * 8 + [1] * (last - first - 8)
    logps, _ = trainer_logps(model.net, model.params, Inputs(rollout.tokens, rollout.segments, prompt_width=WIDTH), 0.8)
    np.testing.assert_allclose(np.asarray(logps) * rollout.mask, rollout.sample_logps, atol=1e-4)
    # The last call's alone, where there is room for no other.
    rollout, episodes = play(sometimes, tasks[1:2], branches=1)
    assert rollout.tokens[0].tolist()[:WIDTH][-8:] == list(b"sort:43=") and rollout.segments.max() == 1
    assert episodes.release(len(episodes.rows))[1]["environment/left_out_tokens"] > 0
    with pytest.raises(
        ConfigError, match=r"all of the step's 2 agents failed .*; the first: RuntimeError: zero \(.*py:\d+\)"
    ):
        play(sometimes, tasks[:1])
    with pytest.raises(
        ConfigError, match=r"2 of the step's 4 agents failed .*; the first: RuntimeError: zero \(.*py:\d+\)"
    ):
        play(sometimes, tasks[:2], on_error="stop")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (1, r"no memory for a first completion \(JaxRuntimeError: RESOURCE_"),
        (2, r"(1 completion|[2-4] completions) of agents could not be sampled,"),
    ],
)
def test_completions_without_memory_end_the_step(play, monkeypatch, number, message):
    """They are no failure of an agent, without which a step goes on. The first one is of no agent: it compiles before
    their time, and that of their clients, runs."""
    true, calls, before = running.decode_chunk, [], []

    def limited(*args):
        calls.append(args)
        if len(calls) != number:
            return true(*args)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    def agent(base_url, api_key, task):
        before.append(len(calls))
        return two_turns(base_url, api_key, task)

    monkeypatch.setattr(running, "decode_chunk", limited)
    with pytest.raises(EpisodeError, match=message + r".* set fewer rollout\.slots"):
        play(agent, [{"prompt": "sort:4821="}, {"prompt": "sort:99310="}])
    assert len(before) == (0 if number == 1 else 2 * K) and all(before)


ASKS_FOR_RESPONSES = """
from openai import OpenAI

def run(base_url, api_key, task):
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        first = client.responses.create(model="any", input=task["prompt"], instructions="sort", max_output_tokens=6)
        then = client.responses.create(model="any", input="again", instructions="sort", previous_response_id=first.id,
                                       max_output_tokens=6)
    return float(len(first.output_text) > len(then.output_text))
"""


@pytest.mark.slow
def test_a_run_of_an_agent_that_asks_for_responses(root, tmp_path):
    (tmp_path / "asks.py").write_text(ASKS_FOR_RESPONSES)
    settings = {"environment.agent": f"{tmp_path}/asks.py:run", "rollout.max_completion_length": 40}
    settings |= {"rollout.max_prompt_length": 60}
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", **settings))
    for line in result.metrics:
        np.testing.assert_allclose(line["sampling/importance_sampling_ratio/mean"], 1.0, atol=1e-4)
        assert line["environment/turns"] == line["environment/calls"] == 2 and line["environment/branches"] == 1
        assert line["environment/retokenised_tokens"] == line["environment/failures"] == 0


def tiny(root, folder, **settings):
    config = load_config_file(f"{root / 'configs/agent.py'}:tiny")
    config.output_dir, config.logging.backends, config.eval.every = str(folder), ("jsonl",), -1
    config.update_from_flattened_dict(settings)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_was_killed_goes_on(root, tmp_path, staleness):
    """Two steps, or one and after a new start the other: the same rows, and the same parameters.

    With a batch that is made while the one before is trained on, the checkpoint has the sessions of the next.
    """
    settings = {"checkpoint.every": 1, "rollout.staleness": staleness, "optimizer.learning_rate": 1e-2}
    settings["algorithm.importance_correction"] = "token_truncate" if staleness else "none"
    whole = jaxrl_llm.train(tiny(root, tmp_path / "whole", **settings))
    for line in whole.metrics:
        assert all(math.isfinite(value) for value in line.values())
        np.testing.assert_allclose(line["sampling/importance_sampling_ratio/mean"], 1.0, atol=1e-4)
        assert line["environment/retokenised_tokens"] == line["environment/failures"] == 0
    assert [line.get("rollout/age") for line in whole.metrics] == ([0, 1] if staleness else [None, None])
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints/2")
    shutil.rmtree(tmp_path / "cut/completions")
    resumed = jaxrl_llm.train(tiny(root, tmp_path / "cut", **settings))
    tables = [parquet.read_table(tmp_path / run / "completions/completions_00002.parquet") for run in ("whole", "cut")]
    assert tables[0].column("completion").to_pylist() == tables[1].column("completion").to_pylist()
    jax.tree.map(np.testing.assert_array_equal, whole.model.params, resumed.model.params)


@pytest.mark.slow
def test_baselines_of_games_and_roles_go_on(root, tmp_path):
    """Of a run that is started again behind its first step, and of two games, one of which the rows name."""
    game = f"{root / 'configs/agents/taking_game.py'}:run"
    rows = [{"prompt": f"sort:{'7' * (4 + n % 5)}=", "agent": (None, "other")[n % 2]} for n in range(32)]
    (tmp_path / "games.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(folder):
        config = load_config_file(f"{root / 'configs/self_play.py'}:tiny")
        config.output_dir, config.logging.backends, config.eval.every = str(folder), ("jsonl",), -1
        config.data.path, config.environment.agents = str(tmp_path / "games.jsonl"), (f"other={game}",)
        config.checkpoint.every = 1
        return jaxrl_llm.train(config)

    whole = run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints/2")
    shutil.rmtree(tmp_path / "cut/completions")
    resumed = run(tmp_path / "cut")
    known = [{name: x for name, x in line.items() if name.startswith("baselines/")} for line in whole.metrics]
    assert known[1].keys() == {f"baselines/{game}{role}" for game in ("", "other/") for role in ("first", "second")}
    assert all(0 < abs(x) < 1 and x != known[0].get(name) for name, x in known[1].items())
    assert {name: x for name, x in resumed.metrics[-1].items() if name in known[1]} == known[1]
    jax.tree.map(np.testing.assert_array_equal, whole.model.params, resumed.model.params)


@pytest.mark.slow
def test_the_worked_example_learns(root, tmp_path):
    config = load_config_file(str(root / "configs/agent.py"))
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    config.eval.every, config.eval.prompts, config.checkpoint.every = 0, 64, 0
    config.total_steps = 50  # of its 220
    result = jaxrl_llm.train(config)
    assert result.metrics[0]["eval/accuracy"] < 0.15 and result.metrics[0]["eval/greedy_accuracy"] < 0.4
    assert result.metrics[-1]["eval/accuracy"] > 0.55 and result.metrics[-1]["eval/greedy_accuracy"] > 0.85
    assert all(line["environment/retokenised_tokens"] == 0 for line in result.metrics[1:])
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line).get("environment/failures", 0) == 0 for line in lines)
