"""`jaxrl-llm serve`: its process listens, answers, drains on SIGTERM, and refuses what it cannot serve."""

import dataclasses
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.__main__ import main
from jaxrl_llm.commands import serve as module
from jaxrl_llm.commands.serve import merged, served_name
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.adapters.lora import LoraConfig, adapters_of, combine, split
from jaxrl_llm.models.files.weight_versions import Publisher
from jaxrl_llm.models.model import add_adapters, load_model, save_adapter, save_hf
from jaxrl_llm.training.runtime.lock import RunLock
from jaxrl_llm.training.setup.run_models import load_named

pytest.importorskip("uvicorn")


@pytest.fixture
def process(root):
    """Starts `python -m jaxrl_llm serve` with these arguments: the process and its address, when it listens."""
    started = []

    def start(*arguments: str, **environment: str) -> tuple[subprocess.Popen, str]:
        command = [sys.executable, "-m", "jaxrl_llm", "serve", *arguments, "--port=0"]
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        server = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path} | environment
        )
        started.append(server)
        timer = threading.Timer(240, server.kill)
        timer.start()
        for line in server.stderr:
            if found := re.search(r"at (http://\S+)/v1", line):
                timer.cancel()
                return server, found[1]
        raise AssertionError(f"it ended with {server.wait()} and did not listen")

    yield start
    for server in started:
        server.kill()
        server.wait()
        server.stderr.close()


def test_it_answers_and_drains(process, tiny_run, tmp_path):
    """SIGTERM while an answer is under way: this one is given, new ones are not, and the process ends with 0.

    Before that, its weights are replaced by those of a run that trained the same model, and not by those of another;
    then by others, which a patch makes those of the run.
    """
    flags = ("--slots=2", "--max_length=128", "--weight_updates", "--adapter_updates")
    server, url = process("embedded:sort", *flags, JAXRL_LLM_API_KEY="sesame")
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer sesame"}, timeout=240) as web:
        assert web.get("/v1/models").json()["data"][0]["id"] == "embedded:sort"
        body = {"prompt": "sort:4821=", "temperature": 0}
        assert web.post("/v1/completions", json=body).json()["choices"][0]["text"] == "1248"
        (text,) = jaxrl_llm.generate(tiny_run.model, ["x"], 16, seed=2)
        body = {"prompt": "x", "seed": 2}
        assert web.post("/v1/completions", json=body).json()["choices"][0]["text"] != text
        answer = web.post("/update_weights_from_disk", json={"model_path": str(tiny_run.output_dir)})
        assert answer.json()["weight_version"] == 1
        assert web.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
        answer = web.post("/update_weights_from_disk", json={"model_path": str(tiny_run.output_dir / "other")})
        assert answer.status_code == 400 and "other" in answer.json()["error"]["message"]
        policy, publish = tiny_run.model, Publisher(str(tmp_path))
        halved = dataclasses.replace(policy, params=jax.tree.map(lambda x: x / 2, policy.params))
        for version, model in enumerate((halved, policy), start=2):
            path = publish.publish(model, "float32", full_every=2)
            answer = web.post("/update_weights_from_disk", json={"model_path": path})
            assert answer.json()["weight_version"] == version
            found = web.post("/v1/completions", json=body).json()["choices"][0]["text"]
            assert (found == text) == (model is policy)
        assert "weights/changed_share" in publish.metrics
        adapted = add_adapters(policy, LoraConfig(2, 8.0, targets=("q",)), jax.random.key(0))
        moved = jax.tree.map(lambda x: x + 0.1 if x.ndim else x, split(adapted.params)[1])
        adapted = dataclasses.replace(adapted, params=combine(policy.params, moved))
        save_adapter(adapted, tmp_path / "adapter")
        adapter = {"lora_name": "mine", "lora_path": str(tmp_path / "adapter")}
        assert web.post("/v1/load_lora_adapter", json=adapter).status_code == 200
        (other,) = jaxrl_llm.generate(adapted, ["x"], 16, seed=2)
        answer = web.post("/v1/completions", json={**body, "model": "mine"})
        assert answer.json()["choices"][0]["text"] == other != text
        answer = web.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "weight_v000002")})
        assert answer.status_code == 409 and "of version 1, but version 2 of" in answer.json()["error"]["message"]
        with ThreadPoolExecutor() as pool:
            endless = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "n": 128}  # in two slots
            answer = pool.submit(web.post, "/v1/completions", json=endless)
            while "jaxrl_llm_running 2" not in httpx.get(f"{url}/metrics").text:
                time.sleep(0.01)
            server.send_signal(signal.SIGTERM)
            usage = answer.result().json()["usage"]
    assert usage["completion_tokens"] == 30 * 128
    assert server.wait(60) == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


@pytest.mark.slow
def test_a_server_that_does_not_wait_for_its_answers_ends_them(process, tmp_path):
    """With an error, and itself with 0, although its devices are busy at the time: they compile for the first rows."""
    server, url = process("embedded:sort", "--drain=0", JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "n": 128}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=240)
        while "jaxrl_llm_waiting 0" in httpx.get(f"{url}/metrics").text:
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 503
    assert answer.result().json()["error"]["message"] == "the server is stopping"
    assert server.wait(240) == 0


@pytest.mark.slow
def test_a_client_of_tinker_goes_on_after_a_restart(process, tmp_path, monkeypatch):
    """With all weights and their moments, bit for bit, and a sampler of them at a time."""
    tinker = pytest.importorskip("tinker")
    from tests.serving.test_tinker import datum

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    flags = ("--slots=4", "--max_length=128", f"--tinker={tmp_path}", "--full_samplers=1")

    def step(run):
        gradients = run.forward_backward([datum("sort:97=", "111")], "cross_entropy").result().metrics
        return gradients, run.optim_step(tinker.types.AdamParams(learning_rate=1e-3)).result().metrics

    server, url = process("embedded:sort", *flags)
    client = tinker.ServiceClient(base_url=url, api_key="tml-any")
    run = client.create_lora_training_client(base_model="embedded:sort", rank=0).result()
    step(run)
    path = run.save_state("state").result().path
    expected = [step(run), step(run)]
    client.close("success").result()
    server.kill()
    _, url = process("embedded:sort", *flags)
    client = tinker.ServiceClient(base_url=url, api_key="tml-any")
    run = client.create_training_client_from_state_with_optimizer(path).result()
    assert [step(run), step(run)] == expected
    for _ in range(16):
        step(run)
        sampler = run.save_weights_and_get_sampling_client().result()
    prompt = tinker.types.ModelInput.from_ints(list(b"sort:97="))
    greedy = tinker.types.SamplingParams(max_tokens=3, temperature=0.0)
    (row,) = sampler.sample(prompt, num_samples=1, sampling_params=greedy).result().sequences
    assert bytes(row.tokens) == b"111"
    client.close("success").result()


@pytest.mark.slow
def test_weights_are_held_once(monkeypatch):
    """What was read of a file goes when the decoding form is made of it, at the start and when weights are replaced.

    A network is the same whether its layers are scanned or not: how a run computes them is its own matter.
    """
    read, alive = [], []

    def load(path, dtype, mesh, trust_remote_code=False):
        model = load_model(path, dtype, mesh=mesh, scan_layers=bool(read))
        read.append([weakref.ref(x) for x in jax.tree.leaves(model.params["layers"])])
        return model

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def ask():
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as web:
            for _ in range(1200):
                time.sleep(0.1)
                try:
                    web.get("/health")
                    break
                except httpx.TransportError:
                    continue
            try:
                answer = web.post("/update_weights_from_disk", json={"model_path": "embedded:sort"})
                gc.collect()
                alive.extend(sum(ref() is not None for ref in refs) for refs in read)
                return answer
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "load_named", load)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        main(["serve", "embedded:sort", f"--port={port}", "--slots=1", "--max_length=64", "--weight_updates"])
        assert answer.result().json()["success"], answer.result().text
    assert alive == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("full_every", [1, 2])
def test_a_run_samples_from_another_process(process, root, tmp_path, full_every):
    """It pushes its policy before each rollout: rows are on policy, though another process sampled them.

    All of it each time, or what changed in the second.
    """
    _, url = process("embedded:sort", "--name=policy", "--slots=4", "--max_length=128", "--weight_updates")
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    weights = str(tmp_path / "policy")
    options = f"weights={weights!r}, weights_dtype='bfloat16', full_every={full_every}, timeout=240"
    config.environment.rollout_func = f"server(url={url + '/v1'!r}, model='policy', {options})"
    config.model.param_dtype = "bfloat16"  # the trainer has the very weights that are served
    config.algorithm.importance_correction = "token_truncate"
    config.output_dir, config.logging.backends, config.total_steps = str(tmp_path / "run"), ("jsonl",), 3
    config.eval.every = -1  # evaluations push what they measure too
    jaxrl_llm.train(config)
    assert httpx.get(f"{url}/server_info").json()["weight_version"] == 3
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    name = "sampling/sampling_logp_difference/max"
    found = [row[name] for row in rows if name in row]
    assert len(found) == 3 and 0 < max(found) < 1e-3
    assert ["weights/changed_share" in row for row in rows if name in row] == [False, full_every == 2, False]


@pytest.mark.slow
def test_a_run_is_served_by_its_checkpoint(tiny_run, tmp_path):
    """The folder of a run and that of its last checkpoint give the tokens of its model folder."""
    mesh = make_mesh()
    run = tiny_run.output_dir
    for path, expected in ((run, run / "hf"), (run / "checkpoints" / "2", run / "hf")):
        served, exported = load_named(str(path), "auto", mesh), load_model(expected)
        texts = jaxrl_llm.generate(exported, ["sort:4821=", "x"], 8)
        assert jaxrl_llm.generate(served, ["sort:4821=", "x"], 8) == texts
    first = load_named(str(run / "checkpoints" / "1"), "auto", mesh)
    leaves = [model.params["embed"]["weight"] for model in (first, served)]
    assert (leaves[0] != leaves[1]).any()
    assert served_name(str(run)) == served_name(str(run / "hf")) == run.name
    assert served_name("embedded:sort") == "embedded:sort" and served_name("org/model-7b") == "model-7b"
    assert served_name(str(run / "checkpoints" / "2")) == f"{run.name}-2"
    with pytest.raises(ConfigError, match="there is no checkpoint of step 7"):
        load_named(str(run / "checkpoints" / "7"), "auto", mesh)
    apart = tmp_path / "apart"  # a run whose checkpoint.folder is elsewhere
    apart.mkdir()
    record = json.loads((run / "config.json").read_text())
    record["checkpoint"]["folder"] = str(run / "checkpoints")
    (apart / "config.json").write_text(json.dumps(record))
    leaves = [model.params["embed"]["weight"] for model in (load_named(str(apart), "auto", mesh), served)]
    assert (leaves[0] == leaves[1]).all()


def test_a_reward_model_is_not_served(tmp_path):
    save_hf(load_model("embedded:sort", head="score"), tmp_path / "rm")
    with pytest.raises(ConfigError, match=r"is a reward model, .* text: rewards.functions=model:.*rm scores with it"):
        load_named(str(tmp_path / "rm"), "auto", make_mesh())


def test_adapters_are_merged():
    """A model with adapters becomes one of the served net, whose parameters a server can replace."""
    model = load_model("embedded:sort")
    adapted = add_adapters(model, LoraConfig(4, 8.0, targets=("q", "v")), jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.01 if x.ndim else x, adapters_of(adapted.params))
    adapted = dataclasses.replace(adapted, params=combine(model.params, params))
    plain = merged(adapted)
    assert plain.net == model.net and jax.tree.structure(plain.params) == jax.tree.structure(model.params)
    tokens = np.arange(40, 60)[None]
    np.testing.assert_allclose(plain(tokens), adapted(tokens), atol=1e-3)
    assert np.abs(np.asarray(plain(tokens)) - np.asarray(model(tokens))).max() > 0.1
    assert merged(model) is model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the model is missing"),
        (["embedded:sort", "--max_length=4000"], "has positions for 2048"),
        (["--weight_updates", "--port", "8000", "embedded:sort", "--max_length=4000"], "has positions for 2048"),
        (["embedded:sort", "--port=8000", "other"], "--model is given twice"),
        (["embedded:sort", "--tensor=64"], "--tensor is 64, and this machine has 1 device"),
        (["embedded:sort", "--tinker=runs", "--weight_updates"], "what runs adapt must stay as it is"),
        (["embedded:sort", f"--tinker={__file__}/runs"], "but no folder can be made there: Not a directory"),
        (["embedded:sort", "--full_runs=2"], "--full_runs is for the runs of --tinker=FOLDER, which is not given"),
        (["embedded:sort", "--tinker=runs", "--full_runs=3"], "--full_samplers is 2, below --full_runs, 3: each run"),
        (["embedded:sort", "--host=203.0.113.1"], "cannot listen on 203.0.113.1:8000"),
        (["embedded:sort", "--slot=4"], "the closest is --slots"),
        (["embedded:sort", "--slots=0"], "slots is 0"),
    ],
)
def test_what_cannot_be_served(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(["serve", *arguments])


def test_a_folder_of_runs_is_for_one_server(tmp_path):
    """What one left half written is another's work under way. A lock that is left goes with its process."""
    words = rf"--tinker {tmp_path} is in use by another server, process {os.getpid()} on .*; wait for it, stop it"
    with RunLock(tmp_path), pytest.raises(ConfigError, match=words):
        main(["serve", "embedded:sort", f"--tinker={tmp_path}"])
    with pytest.raises(ConfigError, match="has positions for 2048"):
        main(["serve", "embedded:sort", f"--tinker={tmp_path}", "--max_length=4000"])
    assert not list(tmp_path.iterdir())


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r'pip install "jaxrl_llm\[serve\]"'):
        main(["serve", "embedded:sort"])
