"""Training of all weights through Tinker's own SDK, over HTTP."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import requests

import jaxrl_llm
from jaxrl_llm.serving.app import Limits
from jaxrl_llm.tools.tinker import live_runs
from tests.serving.conftest import LONGEST
from tests.serving.test_tinker import BASE, datum, greedy, ids

tinker = pytest.importorskip("tinker")
types = tinker.types
PROMPT = "sort:312="
TEACHING = types.AdamParams(learning_rate=2e-3, beta2=0.95, eps=1e-6)


@pytest.fixture(scope="module")
def training(listening, tmp_path_factory):
    """A server of two runs of all weights and as many samplers, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("runs")
    limits = Limits(LONGEST, requests=64, rows=64)
    return listening(limits=limits, size=16, training=folder, full=(2, 2), prefixes=10**9), folder


@pytest.fixture
def connect(training, monkeypatch):
    """Makes clients of the SDK, whose sessions end with the test."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    found = []

    def new():
        found.append(tinker.ServiceClient(base_url=training[0].url, api_key="tml-any"))
        return found[-1]

    yield new
    for client in found:
        client.close("success").result()


def made(client, **others):
    return client.create_lora_training_client(base_model=BASE, rank=0, **others).result()


def taught(run, word: str, steps: int = 10):
    """Has a run answer `PROMPT` with a word."""
    for _ in range(steps):
        run.forward_backward([datum(PROMPT, word)], "cross_entropy")
        last = run.optim_step(TEACHING)
    last.result()
    return run


def scores(sampler, text: str) -> list[float]:
    """Log-probs of a text's tokens but the first."""
    params = types.SamplingParams(max_tokens=1, temperature=1.0, seed=1)
    asked = types.ModelInput.from_ints(ids(text))
    answer = sampler.sample(asked, num_samples=1, sampling_params=params, include_prompt_logprobs=True).result()
    return answer.prompt_logprobs[1:]


def trained_scores(run, text: str) -> list[float]:
    """The same of the run itself."""
    tokens = ids(text)
    inputs = {"target_tokens": np.array(tokens[1:])}
    row = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    return run.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data


@pytest.mark.slow
def test_what_a_client_teaches_its_samplers_say_and_others_do_not(connect, training):
    openai = pytest.importorskip("openai")
    client = connect()
    run = made(client)
    assert (run.get_info().is_lora, run.get_info().lora_rank) == (False, None)
    taught(run, "333")
    sampler = run.save_weights_and_get_sampling_client().result()
    assert greedy(sampler, PROMPT, 3) == "333"
    np.testing.assert_allclose(trained_scores(run, PROMPT + "333"), scores(sampler, PROMPT + "333"), atol=1e-4)
    assert greedy(client.create_sampling_client(base_model=BASE).result(), PROMPT, 3) == "123"
    path = run.save_weights_for_sampler("final").result().path
    asks = openai.OpenAI(base_url=f"{training[0].url}/v1", api_key="none")
    for name, said in ((path, "333"), ("sorter", "123")):
        answer = asks.completions.create(model=name, prompt=PROMPT, max_tokens=3, temperature=0)
        assert answer.choices[0].text == said
    model = jaxrl_llm.load_model(training[1] / path.removeprefix("tinker://"))
    assert jaxrl_llm.generate(model, [PROMPT], 3, temperature=0.0)[0].startswith("333")


@pytest.mark.slow
def test_a_run_goes_on_from_what_it_saved_bit_for_bit(connect):
    torch = pytest.importorskip("torch")
    client = connect()
    run = made(client)

    def squares(data, logprobs):
        return sum((row[-3:] ** 2).sum() for row in logprobs), {}

    def step(of):
        told = of.forward_backward_custom([datum("sort:97=", "111")], squares).result().metrics["loss:sum"]
        adam = types.AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0)
        return told, of.optim_step(adam).result().metrics["grad_norm:mean"]

    before = trained_scores(run, "sort:97=111")[-3:]
    assert step(run)[0] == pytest.approx(float((torch.tensor(before) ** 2).sum()), rel=1e-5)
    path, saved = run.save_state("here").result().path, trained_scores(run, "sort:97=111")
    other = client.create_training_client_from_state_with_optimizer(path).result()
    assert other.get_info().is_lora is False
    assert [step(run), step(run)] == [step(other), step(other)]
    with pytest.warns(FutureWarning):
        run.load_state(path).result()
    assert trained_scores(run, "sort:97=111") == saved
    adapters = client.create_lora_training_client(base_model=BASE, rank=4).result()
    for of, name in ((adapters, path), (run, adapters.save_state("small").result().path)):
        with (
            pytest.raises(tinker.RequestFailedError, match="one is of adapters, and the other of all weights: create"),
            pytest.warns(FutureWarning),
        ):
            of.load_state(name).result()
    rest = tinker.RestClient(base_url=client._base_url, api_key="tml-any")
    about = rest.get_weights_info_by_tinker_path(path).result()
    assert (about.is_lora, about.lora_rank, about.base_model) == (False, None, BASE)
    assert rest.get_training_run_by_tinker_path(path).result().is_lora is False


@pytest.mark.slow
def test_runs_of_two_clients_and_an_adapter_take_turns(connect):
    """Each comes to what it comes to alone."""
    words, alone, done = {"one": "333", "two": "111"}, {}, {}

    def trained(into, name, client):
        run = taught(made(client), words[name], 3)
        sampler = run.save_weights_and_get_sampling_client().result()
        into[name] = [*trained_scores(run, PROMPT + "333"), *scores(sampler, PROMPT + "333")]

    for name in words:
        client = connect()
        trained(alone, name, client)
        client.close("success").result()
    adapters = connect().create_lora_training_client(base_model=BASE, rank=4, seed=0).result()
    threads = [threading.Thread(target=trained, args=(done, name, connect())) for name in words]
    for thread in threads:
        thread.start()
    taught(adapters, "222", 3)
    for thread in threads:
        thread.join()
    assert done.keys() == alone.keys()
    for name, found in done.items():
        np.testing.assert_allclose(found, alone[name], atol=1e-5)
    assert abs(done["one"][-1] - done["two"][-1]) > 0.1


def test_there_is_room_for_so_many_runs(connect, monkeypatch, training):
    first, second = connect(), connect()
    made(first), made(second)
    third = connect()
    message = (
        "as many runs of all weights are trained as may be, 2: unload one, or finish its session, or start the server"
    )
    with pytest.raises(tinker.RequestFailedError, match=message):
        made(third)
    assert third.create_lora_training_client(base_model=BASE, rank=1).result().get_info().is_lora
    first.close("success").result()
    made(third)
    monkeypatch.setattr(live_runs, "FORGOTTEN_FULL", -1.0)  # everybody is silent
    made(connect())


@pytest.mark.slow
def test_snapshots_go_and_saved_weights_are_read_again(connect, training):
    client, queue = connect(), training[0].server.queue
    run = taught(made(client), "333")

    def kept():
        return [name for name, (config, _) in queue.adapters.items() if config is None]

    path = run.save_weights_for_sampler("kept").result().path
    named = run.create_sampling_client(path).result()
    text = PROMPT + "333" * 20  # long enough for its keys and values to be kept
    sampling = types.SamplingParams(max_tokens=1, temperature=0.0)
    before = scores(named, text)
    snapshots = [run.save_weights_and_get_sampling_client().result() for _ in range(3)]
    assert len(kept()) == 2 and path not in kept()
    with pytest.raises(tinker.RequestFailedError, match="or 2 of all weights: save weights by a name"):
        scores(snapshots[0], PROMPT)
    assert scores(named, text) == before
    assert scores(snapshots[2], text) == pytest.approx(before, abs=1e-5)
    taught(run, "111")
    for _ in range(2):
        run.save_weights_and_get_sampling_client().result()
    assert path not in kept()
    again = run.save_state("kept").result().path  # another path; that of the sampler is written over by hand
    rest = tinker.RestClient(base_url=training[0].url, api_key="tml-any")
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert run.save_weights_for_sampler("kept").result().path == path
    assert greedy(named, PROMPT, 3) == "111"
    np.testing.assert_allclose(scores(named, text), trained_scores(run, text), atol=1e-4)
    asked = types.ModelInput.from_ints(ids(text))
    (row,) = named.sample(asked, num_samples=1, sampling_params=sampling).result().sequences
    expected = trained_scores(run, text + bytes(row.tokens).decode())[-1]
    assert row.logprobs[0] == pytest.approx(expected, abs=1e-4)  # nothing was kept of the earlier weights
    assert greedy(run.create_sampling_client(again).result(), PROMPT, 3) == "111"
    run.save_weights_and_get_sampling_client().result()
    assert len(kept()) == 2
    client.close("success").result()
    assert kept() == [again]  # a session's snapshots end with it


@pytest.mark.slow
def test_samplers_wait_for_room(connect, training):
    """Of six at once, of which two are kept at a time, each answers with its own weights."""
    run, paths, text = made(connect()), {}, PROMPT + "333"

    def sampled(path):
        sampler = run.create_sampling_client(path).result()
        return [scores(sampler, text) for _ in range(4)]

    for _ in range(2):  # the second time others are written over those that are loaded
        for word in ("333", "111", "222", "123", "321", "132"):
            path = taught(run, word, 3).save_state(word, overwrite=True).result().path
            paths[path] = trained_scores(run, text)
        with ThreadPoolExecutor(6) as pool:
            for expected, found in zip(paths.values(), pool.map(sampled, paths), strict=True):
                np.testing.assert_allclose(found, [expected] * 4, atol=1e-4)
        assert len({round(x[-1], 3) for x in paths.values()}) == 6
    full = [name for name, (config, _) in training[0].server.queue.adapters.items() if config is None]
    assert len(full) == 2


@pytest.mark.slow
def test_weights_are_downloaded_by_the_command_of_the_sdk(listening, tmp_path, monkeypatch):
    """As a folder that other libraries load, from a server that asks for a key."""
    running = pytest.importorskip("click.testing").CliRunner()
    from tinker.cli.__main__ import main_cli

    url = listening(api_key="tml-right", training=tmp_path / "runs", full=(2, 2)).url
    for name, value in (("TELEMETRY", "0"), ("BASE_URL", url), ("API_KEY", "tml-right")):
        monkeypatch.setenv(f"TINKER_{name}", value)
    client = tinker.ServiceClient()
    adapters = client.create_lora_training_client(base_model=BASE, rank=2).result()
    run = taught(made(client), "333", 2)
    paths = [run.save_weights_external("out").result().path, run.save_state("state").result().path]
    paths.append(adapters.save_weights_external("small").result().path)
    for path in paths:
        done = running.invoke(main_cli, ["checkpoint", "download", path, "--output", str(tmp_path)])
        assert done.exit_code == 0, done.output
    full, state, small = (tmp_path / path.removeprefix("tinker://").replace("/", "_") for path in paths)
    assert {file.name for file in small.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    for folder in (full, state):
        files = {file.name for file in folder.iterdir()}
        assert files >= {"config.json", "model.safetensors", "tokenizer.json"} and "moments" not in files
        logits = jaxrl_llm.load_model(folder)(np.array([ids(PROMPT + "33")]))
        logps = np.asarray(jax.nn.log_softmax(logits[0, :-1]))[np.arange(10), ids(PROMPT + "33")[1:]]
        np.testing.assert_allclose(logps, trained_scores(run, PROMPT + "33"), atol=1e-4)
    rest = tinker.RestClient()
    kinds = [found.checkpoint_type for found in rest.list_user_checkpoints().result().checkpoints]
    assert sorted(kinds) == ["external", "external", "training"]  # the command's own is deleted
    file = rest.get_external_weights_urls(paths[0]).result().urls["config.json"]
    other = file.replace("config.json", "model.safetensors")
    assert requests.get(file, timeout=30).json()["model_type"] == "llama"
    for wrong in (file.split("?")[0], other, file[:-1], file.replace("ends=", "ends=9"), f"{url}/v1/models?ends=1"):
        assert requests.get(wrong, timeout=30).status_code == 401
    rest.set_checkpoint_ttl_from_tinker_path(paths[0], 1).result()
    time.sleep(1.1)
    assert requests.get(file, timeout=30).status_code == 404
    client.close("success").result()


def test_what_is_refused(connect, listening, tmp_path, training):
    client = connect()
    for rank, others, message in (
        (-1, {}, "rank is -1; it takes 1 to 16384, or 0 for all weights"),
        (0, {"train_mlp": False}, "rank is 0, for all weights, and train_mlp is false: give a rank"),
        (0, {"train_unembed": False}, "train_unembed is false"),
    ):
        with pytest.raises(tinker.BadRequestError, match=message):
            client.create_lora_training_client(base_model=BASE, rank=rank, **others).result()
    url = listening(training=tmp_path, full=(0, 1)).url
    alone = tinker.ServiceClient(base_url=url, api_key="tml-any")
    with pytest.raises(tinker.RequestFailedError, match="this server trains adapters alone: give a rank from 1 on, or"):
        made(alone)
    alone.close("success").result()


def test_a_request_without_lora_config_is_for_all_weights(training):
    url = f"{training[0].url}/api/v1/"

    def post(name, **body):
        return requests.post(url + name, json=body, timeout=60).json()

    session = post("create_session", tags=[], user_metadata=None, sdk_version="0.38")["session_id"]
    asked = post("create_model", session_id=session, model_seq_id=0, base_model=BASE, lora_config=None)
    while (found := post("retrieve_future", request_id=asked["request_id"])).get("type") == "try_again":
        time.sleep(0.1)
    assert post("get_info", model_id=found["model_id"])["is_lora"] is False
    post(f"sessions/{session}/finish")
