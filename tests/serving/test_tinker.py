"""Training runs through Tinker's own SDK, over HTTP."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests

from jaxrl_llm.serving.app import Limits
from jaxrl_llm.tools.tinker import live_runs, samplers, service
from tests.conftest import ROOT
from tests.serving.conftest import LONGEST

tinker = pytest.importorskip("tinker")
types = tinker.types
BASE = "embedded:sort"


@pytest.fixture(scope="module")
def training(listening, tmp_path_factory):
    """A server, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("runs")
    return listening(limits=Limits(LONGEST, requests=64, rows=64), size=16, training=folder), folder


@pytest.fixture
def client(training, monkeypatch):
    """A client of the SDK."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    found = tinker.ServiceClient(base_url=training[0].url, api_key="tml-any")
    yield found
    found.holder.run_coroutine_threadsafe(found.holder._async_cleanup()).result()


def ids(text: str) -> list[int]:
    return list(text.encode())


def datum(prompt: str, completion: str, **others):
    """A row of which the completion is learned."""
    whole = ids(prompt + completion)
    weights = np.float32([0] * (len(ids(prompt)) - 1) + [1] * len(ids(completion)))
    inputs = {"target_tokens": np.array(whole[1:]), **(others or {"weights": weights})}
    return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)


def made(client, rank: int = 4, seed: int = 0, **others):
    return client.create_lora_training_client(base_model=BASE, rank=rank, seed=seed, **others).result()


def greedy(sampler, prompt: str, tokens: int = 4) -> str:
    params = types.SamplingParams(max_tokens=tokens, temperature=0.0)
    answer = sampler.sample(types.ModelInput.from_ints(ids(prompt)), num_samples=1, sampling_params=params).result()
    return bytes(answer.sequences[0].tokens).decode()


@pytest.mark.slow
def test_what_a_client_teaches_its_sampler_says_and_others_do_not(client):
    run, losses = made(client, rank=8), []
    rows = [datum("sort:312=", "333"), datum("sort:21=", "333")]
    for _ in range(16):
        gradients = run.forward_backward(rows, "cross_entropy")
        step = run.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(gradients.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm:mean"] > 0
    assert losses[-1] < 0.1 * losses[0]
    taught = run.save_weights_and_get_sampling_client().result()
    assert greedy(taught, "sort:312=", 3) == "333"
    assert greedy(client.create_sampling_client(base_model=BASE).result(), "sort:312=", 3) == "123"


@pytest.mark.slow
def test_log_probs_of_sampler_and_trainer_are_those_of_one_model(client):
    run = made(client)
    run.forward_backward([datum("sort:312=", "999")], "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    sampler = run.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=5)
    prompt = types.ModelInput.from_ints(ids("sort:312="))
    found = sampler.sample(prompt, num_samples=2, sampling_params=params, include_prompt_logprobs=True).result()
    for row in found.sequences:
        whole = ids("sort:312=") + row.tokens
        asked = types.Datum(
            model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": np.array(whole[1:])}
        )
        answer = run.forward([asked], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        np.testing.assert_allclose(answer[-len(row.tokens) :], row.logprobs, atol=1e-4)
        np.testing.assert_allclose(answer[: len(ids("sort:312=")) - 1], found.prompt_logprobs[1:], atol=1e-4)
    assert found.prompt_logprobs[0] is None


@pytest.mark.slow
def test_a_run_goes_on_from_what_it_saved_bit_for_bit(client, training):
    run = made(client)

    def step(of):
        told = of.forward_backward([datum("sort:97=", "111")], "cross_entropy").result().metrics
        of.optim_step(types.AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)).result()
        return told

    step(run)
    path = run.save_state("here").result().path
    with pytest.raises(tinker.RequestFailedError, match="here exists already"):
        run.save_state("here").result()
    other = client.create_training_client_from_state_with_optimizer(path).result()
    assert [step(run), step(run)] == [step(other), step(other)]
    with pytest.warns(FutureWarning):
        run.load_state_with_optimizer(path).result()
    again = client.create_training_client_from_state(path).result()
    assert step(run) == step(again)  # the same weights
    assert step(run) != step(again)  # and other moments
    folder = training[1] / path.removeprefix("tinker://")
    assert {file.name for file in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    large = made(client, rank=8)
    with (
        pytest.raises(tinker.RequestFailedError, match=r"of rank 4 of .* of rank 8 of .*: create a run"),
        pytest.warns(FutureWarning),
    ):
        large.load_state(path).result()


@pytest.mark.slow
def test_a_loss_of_the_clients_own(client):
    torch = pytest.importorskip("torch")
    run = made(client)
    before = run.forward([datum("sort:312=", "999")], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data

    def squares(data, logprobs):
        return sum((row[-3:] ** 2).sum() for row in logprobs), {}

    told = run.forward_backward_custom([datum("sort:312=", "999")], squares).result().metrics
    assert told["loss:sum"] == pytest.approx(float((torch.tensor(before)[-3:] ** 2).sum()), rel=1e-5)
    run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    after = run.forward([datum("sort:312=", "999")], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert (np.square(after[-3:]).sum()) < np.square(before[-3:]).sum()


@pytest.mark.slow
def test_requests_are_done_in_the_order_of_their_numbers_and_once(training):
    url = f"{training[0].url}/api/v1/"

    def post(name, **body):
        return requests.post(url + name, json=body, timeout=60)

    session = post("create_session", tags=[], user_metadata=None, sdk_version="0.5").json()["session_id"]
    lora = {"rank": 2, "seed": 0}
    asked = post("create_model", session_id=session, model_seq_id=0, base_model=BASE, lora_config=lora).json()
    assert post("retrieve_future", request_id=asked["request_id"]).json()["model_id"] == asked["model_id"]
    row = datum("sort:21=", "12")
    tensors = {name: {"data": x.data, "dtype": x.dtype, "shape": x.shape} for name, x in row.loss_fn_inputs.items()}
    tensors = json.loads(json.dumps(tensors, default=lambda x: x.tolist()))
    data = [
        {"model_input": {"chunks": [{"type": "encoded_text", "tokens": ids("sort:21=1")}]}, "loss_fn_inputs": tensors}
    ]
    run = {"model_id": asked["model_id"]}
    step = post("optim_step", **run, seq_id=2, adam_params={"learning_rate": 1e-3}).json()
    waits = ThreadPoolExecutor(1).submit(post, "retrieve_future", request_id=step["request_id"])
    given = {"data": data, "loss_fn": "cross_entropy"}
    first = post("forward_backward", **run, seq_id=1, forward_backward_input=given).json()
    assert waits.result().json()["metrics"]["grad_norm:mean"] > 0
    told = post("retrieve_future", request_id=first["request_id"]).json()
    assert len(told["loss_fn_outputs"][0]["logprobs"]["data"]) == len(ids("sort:21=1"))
    assert (
        post("optim_step", **run, seq_id=2, adam_params={"learning_rate": 1e-3}).json() == step
    )  # it was lost on the way
    refused = post("optim_step", **run, seq_id=3, adam_params={"learning_rate": 1e-3}).json()
    told = post("retrieve_future", request_id=refused["request_id"]).json()
    assert "no gradients since the last step" in told["error"]
    assert told["category"] == "user"


def test_requests_do_not_wait_for_ever_for_one_that_never_comes(client, training, monkeypatch):
    """As for one that was refused as too large, which the client has counted: the run goes on behind them."""
    monkeypatch.setattr(live_runs, "MISSED", 0.2)
    run = made(client)

    def post(name, **body):
        return requests.post(f"{training[0].url}/api/v1/{name}", json=body, timeout=60).json()

    numbers = (3, 5, 4, 2, None)  # earlier clients give none
    asked = [post("save_weights", model_id=run.model_id, seq_id=number, path=f"at-{number}") for number in numbers]
    assert len({each["request_id"] for each in asked}) == 5
    for each in asked:
        told = post("retrieve_future", request_id=each["request_id"])
        assert "request 1 of this run did not come in 0.2 s, and none behind it was done" in told["error"]
    asked = post("save_weights", model_id=run.model_id, seq_id=7, path="at-7")
    assert post("retrieve_future", request_id=asked["request_id"])["path"].endswith("weights/at-7")
    late = post("save_weights", model_id=run.model_id, seq_id=1, path="at-1")
    assert "seq_id is 1, but the run is at 8" in late["error"]["message"]


@pytest.mark.slow
def test_saved_weights_are_a_model_of_every_endpoint(client, training):
    openai = pytest.importorskip("openai")
    run = made(client, rank=8)
    for _ in range(16):
        run.forward_backward([datum("sort:312=", "333")], "cross_entropy").result()
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = run.save_weights_for_sampler("final").result().path
    assert path in {model["id"] for model in requests.get(f"{training[0].url}/v1/models", timeout=30).json()["data"]}
    asks = openai.OpenAI(base_url=f"{training[0].url}/v1", api_key="none")
    for name, said in ((path, "333"), ("sorter", "123")):
        answer = asks.completions.create(model=name, prompt="sort:312=", max_tokens=3, temperature=0)
        assert answer.choices[0].text == said


@pytest.mark.slow
def test_weights_that_were_let_go_are_read_again(client, training, monkeypatch):
    monkeypatch.setattr(samplers, "MOST_SAMPLERS", 1)
    paths = []
    for word in ("333", "111"):
        run = made(client, rank=8)
        for _ in range(16):
            run.forward_backward([datum("sort:312=", word)], "cross_entropy").result()
            run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        paths.append(run.save_weights_for_sampler(word).result().path)
    for _ in range(2):
        for path, word in zip(paths, ("333", "111"), strict=True):
            assert greedy(client.create_sampling_client(model_path=path).result(), "sort:312=", 3) == word
    assert len(training[0].server.queue.adapters) <= 2


@pytest.mark.slow
def test_runs_of_several_clients_take_turns(client):
    """Two runs at once come to what they come to alone."""
    alone, done = {}, {}
    words = {"one": "333", "two": "111"}

    def trained(into, name):
        run = made(client, seed=7)
        for _ in range(2):
            run.forward_backward([datum("sort:312=", words[name])], "cross_entropy")
            last = run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        into[name] = last.metrics

    for name in words:
        trained(alone, name)
    threads = [threading.Thread(target=trained, args=(done, name)) for name in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == alone
    assert done["one"] != done["two"]


def test_lists_and_deletes(client, training):
    run = made(client, user_metadata={"who": "me"})
    path = run.save_state("listed").result().path
    rest = tinker.RestClient(base_url=training[0].url, api_key="tml-any")
    about = rest.get_training_run(path.removeprefix("tinker://").split("/")[0]).result()
    assert (about.lora_rank, about.user_metadata, about.last_checkpoint.tinker_path) == (4, {"who": "me"}, path)
    assert path in [found.tinker_path for found in rest.list_user_checkpoints().result().checkpoints]
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in [found.tinker_path for found in rest.list_user_checkpoints().result().checkpoints]
    with pytest.raises(tinker.RequestFailedError, match="there are no weights"):
        client.create_training_client_from_state(path).result()


def test_errors_name_what_is_wrong_and_a_run_goes_on_behind_them(client):
    with pytest.raises(tinker.NotFoundError, match="there is no model 'Qwen/Qwen3-8B'; this server has embedded:sort"):
        client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4).result()
    run, row = made(client), datum("sort:1=", "1")
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=3)])
    wrong = {
        "no logprobs in loss_fn_inputs": lambda: run.forward_backward([row], "ppo"),
        "the closest is ppo": lambda: run.forward_backward([row], "pppo"),
        "loss_fn_config has 'clip'": lambda: run.forward_backward([row], "cross_entropy", {"clip": 1.0}),
        "no ids below": lambda: run.forward_backward(
            [datum("sort:1=", "1", target_tokens=np.array([9999] * 7))], "cross_entropy"
        ),
        f"this server's rows have {LONGEST}": lambda: run.forward_backward(
            [datum("sort:1=", "1" * LONGEST)], "cross_entropy"
        ),
        "tokens of text alone": lambda: run.forward_backward(
            [types.Datum(model_input=image, loss_fn_inputs=row.loss_fn_inputs)], "cross_entropy"
        ),
        "learning_rate": lambda: run.optim_step(types.AdamParams(learning_rate=-1.0)),
        "this server has adamw": lambda: run.optim_step(types.DimuonParams(learning_rate=1.0)),
        "ttl_seconds is -5": lambda: run.save_state("short", ttl_seconds=-5),
        "writes weights as they are": lambda: run.save_weights_external("far", age_encryption_recipients=["age1"]),
    }
    for message, call in wrong.items():
        with pytest.raises(tinker.RequestFailedError, match=message):
            call().result(timeout=60)
    run.forward_backward([row], "cross_entropy").result(timeout=60)
    assert run.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=60).metrics["grad_norm:mean"] > 0
    sampler, prompt = client.create_sampling_client(base_model=BASE).result(), types.ModelInput.from_ints([1])
    for message, count, params in (
        ("temperature", 1, {"temperature": -1.0}),
        ("num_samples is 20000; this server takes 1 to 16384", 20000, {}),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message):
            sampler.sample(
                prompt, num_samples=count, sampling_params=types.SamplingParams(max_tokens=2, **params)
            ).result()


def test_bodies_that_the_sdk_never_sends_are_refused_by_name(training):
    """At once, or as the result where a request is answered with its id; however large their numbers are."""
    url = f"{training[0].url}/api/v1/"

    def post(name, **body):
        return requests.post(url + name, json=body, timeout=60)

    session = post("create_session").json()["session_id"]
    prompt, here = {"chunks": [{"tokens": [1]}]}, {"session_id": session}
    base = {"base_model": BASE, "prompt": prompt}
    for name, body, status, message in (
        ("create_sampling_session", {**here, "model_path": 5}, 400, "model_path is 5; it takes the path of saved"),
        ("asample", {"sampling_session_id": ["x"], "prompt": prompt}, 404, "there is no sampling session ['x']"),
        ("asample", {**base, "num_samples": "2"}, 400, "num_samples is '2'; it takes a whole number"),
        ("create_model", {**here, **base, "model_seq_id": -1}, 400, "model_seq_id is -1; it takes 0 to 2147483647"),
        ("load_weights", {**here, "model_seq_id": 10**300, "path": "x"}, 400, "model_seq_id is 1000"),
    ):
        answer = post(name, **body)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text
    many = post("asample", **base, num_samples=10**9).json()
    assert len(many["sample_sequence_ids"]) == 2**14
    for asked, message in (
        (many, "num_samples is 1000000000; this server takes 1 to 16384"),
        (post("asample", model_path=5, prompt=prompt).json(), "model_path is 5; it takes the path of saved"),
        (post("asample", **base, sampling_params=[1]).json(), "sampling_params is [1]; it takes an object"),
        (post("asample", **base, sampling_params={"max_tokens": 0}).json(), "max_tokens"),
        (post("asample", **base, sampling_params={"seed": "1"}).json(), "seed is '1'; it takes a whole number"),
        (post("asample", **base, prompt_logprobs_last_n=-1).json(), "prompt_logprobs_last_n is -1; this server"),
    ):
        told = post("retrieve_future", request_id=asked["request_id"]).json()
        assert message in told["error"] and told["category"] == "user", told
    lora = {"lora_config": {"rank": 1}}
    first = post("create_model", **here, **base, **lora, model_seq_id=7).json()
    assert "error" not in post("retrieve_future", request_id=first["request_id"]).json()
    again = post("load_weights", **here, model_seq_id=7, path=f"tinker://{first['model_id']}/weights/none").json()
    assert "there are no weights" in post("retrieve_future", request_id=again["request_id"]).json()["error"]
    assert post("get_info", model_id=first["model_id"]).json()["lora_rank"] == 1
    post(f"sessions/{session}/finish")


def taught(client, word: str, **others):
    """A run that answers `sort:312=` with a word."""
    run = made(client, rank=8, **others)
    for _ in range(16):
        run.forward_backward([datum("sort:312=", word)], "cross_entropy").result()
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return run


@pytest.mark.slow
def test_weights_that_are_written_over_are_those_that_answer(client):
    run = taught(client, "333")
    path = run.save_state("latest").result().path
    assert greedy(client.create_sampling_client(model_path=path).result(), "sort:312=", 3) == "333"
    for _ in range(16):
        run.forward_backward([datum("sort:312=", "111")], "cross_entropy").result()
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert run.save_state("latest", overwrite=True).result().path == path
    assert greedy(client.create_sampling_client(model_path=path).result(), "sort:312=", 3) == "111"


@pytest.mark.slow
def test_snapshots_of_many_at_once(client, training, monkeypatch):
    """More than are kept: each is there for the sample that it was made for."""
    monkeypatch.setattr(samplers, "MOST_SAMPLERS", 8)
    runs = [made(client, seed=seed) for seed in range(4)]

    def sampled(run):
        for _ in range(4):
            assert len(greedy(run.save_weights_and_get_sampling_client().result(), "sort:21=", 2)) <= 2
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(sampled, runs))
    assert len(training[0].server.queue.adapters) <= 8 + 4


@pytest.mark.slow
def test_more_samples_than_the_queue_takes_at_once(client):
    """Those of one seed differ from each other, whatever part of them they are in, and waiting has no limit."""
    sampler = client.create_sampling_client(base_model=BASE).result()
    params = types.SamplingParams(max_tokens=3, temperature=1.0, seed=1)
    prompt = types.ModelInput.from_ints(ids("sort:4821="))
    found = sampler.sample(prompt, num_samples=140, sampling_params=params).result().sequences
    assert len({row.sequence_id for row in found}) == 140
    first = [tuple(row.tokens) for row in found[:12]]
    assert first != [tuple(row.tokens) for row in found[128:]]
    again = sampler.sample(prompt, num_samples=12, sampling_params=params).result().sequences
    assert [tuple(row.tokens) for row in again] == first


def test_a_sampler_has_the_tokenizer_of_its_model(client):
    run = made(client)
    for tokenizer in (run.get_tokenizer(), run.save_weights_and_get_sampling_client().result().get_tokenizer()):
        assert tokenizer.encode("sort:312=") == ids("sort:312=")


def test_sessions_of_clients_that_left_end(training, monkeypatch):
    """Without a word: they were kept for as long as the server ran, with their runs and samplers."""
    url = f"{training[0].url}/api/v1"
    left, stays = (requests.post(f"{url}/create_session", json={}).json()["session_id"] for _ in range(2))
    asked = {"session_id": left, "sampling_session_seq_id": 0, "base_model": BASE}
    assert requests.post(f"{url}/create_sampling_session", json=asked).status_code == 200
    monkeypatch.setattr(service, "ABANDONED", 1.0)
    time.sleep(1.1)
    assert requests.post(f"{url}/session_heartbeat", json={"session_id": stays}).status_code == 200
    new = requests.post(f"{url}/create_session", json={}).json()["session_id"]
    assert set(requests.get(f"{url}/sessions").json()["sessions"]) == {stays, new}
    assert requests.get(f"{url}/samplers/{left}:sample:0").status_code == 404


def test_a_key_is_asked_for(listening, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    url = listening(api_key="tml-right", training=tmp_path).url
    assert requests.get(f"{url}/api/v1/healthz", headers={"X-API-Key": "tml-right"}, timeout=30).json() == {
        "status": "ok"
    }
    for headers in ({}, {"X-API-Key": "tml-wrong"}):
        assert requests.get(f"{url}/api/v1/healthz", headers=headers, timeout=30).status_code == 401


@pytest.mark.slow
def test_the_loop_of_the_page(training, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tinker.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("TINKER_BASE_URL", training[0].url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    names: dict = {}
    exec(compile(code, "tinker.md", "exec"), names)
    assert names["rewards"].mean() > 0.9 and names["path"] in capsys.readouterr().out
