"""Adapters as further models: each answers as the merged model does, whoever else is served."""

import dataclasses
import functools
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import pytest

import jaxrl_llm
from jaxrl_llm.__main__ import main
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.adapters.lora import LoraConfig, combine, parse_targets, split
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import add_adapters, load_adapter, save_adapter
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving.grid import RowRequest
from jaxrl_llm.serving.handles import Handle

pytest.importorskip("starlette")
CONFIGS = {
    "poet": LoraConfig(2, 8.0, targets=("q", "v")),
    "clerk": LoraConfig(4, 4.0, targets=("o", "gate", "up", "down"), dora=True),
}


@pytest.fixture(scope="module")
def folders(sorter, tmp_path_factory):
    """PEFT folders of adapters that change what the model says, and the adapted models; one trained norms whole."""
    found = {}
    for number, (name, config) in enumerate(CONFIGS.items()):
        adapted = add_adapters(sorter, config, jax.random.key(number), ["norm"] if config.dora else ())
        moved = jax.tree.map(lambda x: x + 0.02 if x.ndim else x, split(adapted.params)[1])
        adapted = dataclasses.replace(adapted, params=combine(sorter.params, moved))
        folder = tmp_path_factory.mktemp("adapters") / name
        save_adapter(adapted, folder)
        found[name] = (folder, adapted)
    return found


@pytest.fixture(scope="module")
def serving(listening, folders, sorter):
    return listening(adapters={name: load_adapter(sorter, folder) for name, (folder, _) in folders.items()})


@pytest.mark.slow
def test_each_model_answers_as_alone(serving, folders, sorter):
    """Requests of three models, mixed: texts are those of `generate` with the merged adapter."""
    models = {"sorter": sorter, **{name: adapted for name, (_, adapted) in folders.items()}}
    prompts = ["sort:4821=", "x"]
    expected = {name: jaxrl_llm.generate(model, prompts, 10, seed=3) for name, model in models.items()}
    assert len(set(map(tuple, expected.values()))) == 3
    with httpx.Client(base_url=serving.url, timeout=240) as web:

        def one(name: str) -> list[str]:
            body = {"model": name, "prompt": prompts, "max_tokens": 10, "seed": 3}
            return [choice["text"] for choice in web.post("/v1/completions", json=body).json()["choices"]]

        with ThreadPoolExecutor(9) as pool:
            names = [*models] * 3
            assert list(pool.map(one, names)) == [expected[name] for name in names]
        listed = {model["id"]: model["parent"] for model in web.get("/v1/models").json()["data"]}
        assert listed == {"sorter": None, "poet": "sorter", "clerk": "sorter"}
        assert web.get("/v1/models/poet").json()["id"] == "poet"
        answer = web.post("/v1/completions", json={"model": "pirate", "prompt": "x"})
        assert answer.status_code == 404 and "sorter, poet, clerk" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_adapters_come_and_go(listening, folders, sorter):
    """Loaded, replaced in place and unloaded by vLLM's endpoints, each with what `generate` says with it."""
    body = {"prompt": "sort:4821=", "max_tokens": 10, "seed": 3}
    expected = {name: jaxrl_llm.generate(model, ["sort:4821="], 10, seed=3)[0] for name, (_, model) in folders.items()}
    running = listening(load_adapter=functools.partial(load_adapter, dataclasses.replace(sorter, params={})))
    with httpx.Client(base_url=running.url, timeout=240) as web:

        def ask(endpoint: str, status: int, **body) -> httpx.Response:
            answer = web.post(f"/v1/{endpoint}", json=body)
            assert answer.status_code == status, answer.text
            return answer

        def load(folder: str, status: int = 200, **more) -> httpx.Response:
            return ask("load_lora_adapter", status, lora_name="mine", lora_path=str(folders[folder][0]), **more)

        def listed() -> list[str]:
            return [model["id"] for model in web.get("/v1/models").json()["data"]]

        ask("completions", 404, model="mine", **body)
        assert load("poet").text == "Success: LoRA adapter 'mine' added successfully."
        assert ask("completions", 200, model="mine", **body).json()["choices"][0]["text"] == expected["poet"]
        assert "load_inplace" in load("clerk", 400).json()["error"]["message"]
        load("clerk", load_inplace=True)
        assert ask("completions", 200, model="mine", **body).json()["choices"][0]["text"] == expected["clerk"]
        assert listed() == ["sorter", "mine"]
        endless = {"model": "mine", "prompt": "x", "max_tokens": 110, "ignore_eos": True, "n": 128, "stream": True}
        with web.stream("POST", "/v1/completions", json=endless) as reply:
            next(reply.iter_lines())
            ask("unload_lora_adapter", 409, lora_name="mine")
        while web.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 409:
            time.sleep(0.01)
        assert listed() == ["sorter"]
        ask("completions", 404, model="mine", **body)
        ask("unload_lora_adapter", 404, lora_name="mine")
        for path in ("/nowhere", ["/nowhere"]):
            ask("load_lora_adapter", 400, lora_name="mine", lora_path=path)
        ask("load_lora_adapter", 400, lora_name="sorter", lora_path=str(folders["poet"][0]))
        ask("load_lora_adapter", 400, lora_name="mine", path="x")


def test_adapters_stay_without_the_flag(running):
    answer = httpx.post(f"{running.url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "y"})
    assert answer.status_code == 403 and "--adapter_updates" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_adapters_of_experts_answer_as_alone(listening, sorter, tmp_path):
    """Of a mixture of random matrices, whose base answers beside them."""
    config = dataclasses.replace(sorter.net.config, qk_norm="head", experts=4, experts_per_token=2, expert_ffn=32)
    hf.save(Net(config), Net(config).init(jax.random.key(0)), tmp_path / "base", sorter.tokenizer)
    base = jaxrl_llm.load_model(tmp_path / "base")
    adapted = add_adapters(base, LoraConfig(2, 8.0, targets=parse_targets(["experts"])), jax.random.key(1))
    moved = jax.tree.map(lambda x: x + 0.1, split(adapted.params)[1])
    adapted = dataclasses.replace(adapted, params=combine(base.params, moved))
    save_adapter(adapted, tmp_path / "adapter")
    running = listening(model=base, adapters={"adapted": load_adapter(base, tmp_path / "adapter")})
    texts = []
    with httpx.Client(base_url=running.url, timeout=240) as web:
        for name, model in (("adapted", adapted), ("sorter", base)):
            body = {"model": name, "prompt": ["sort:4821="], "max_tokens": 10, "seed": 3}
            texts.append([choice["text"] for choice in web.post("/v1/completions", json=body).json()["choices"]])
            assert texts[-1] == jaxrl_llm.generate(model, ["sort:4821="], 10, seed=3)
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_no_model_waits_for_more_than_a_turn_of_another(serving):
    """A row of another adapter is answered before rows that were asked for later, however many these are."""
    order, done = [], threading.Event()

    def row(name: str, number: int) -> Handle:
        def deliver(tokens) -> None:
            if tokens.finish_reason is not None:
                order.append((name, number))
                if len(order) == 41:
                    done.set()

        return Handle(RowRequest([65], 8, SamplingParams(), (), number, adapter=name), deliver)

    first = [row("poet", number) for number in range(20)]
    other, later = row("clerk", 0), [row("poet", number) for number in range(20, 40)]
    for handle in (*first, other, *later):
        serving.server.queue.submit([handle])
    assert done.wait(120)
    assert order.index(("clerk", 0)) < min(order.index(("poet", number)) for number in range(24, 40))
    assert sorted(order) == sorted([("clerk", 0), *(("poet", number) for number in range(40))])


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("poet", "--lora has 'poet'; it takes NAME=FOLDER"),
        ("embedded:sort=x", "--lora has 'embedded:sort=x'"),
        ("a=/nowhere", "/nowhere has no adapter_config.json"),
    ],
)
def test_adapters_that_are_refused(lora, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(["serve", "embedded:sort", f"--lora={lora}"])
