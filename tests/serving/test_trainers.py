"""What TRL and axolotl ask of a rollout server, TRL's own client among the askers, and weights that are replaced."""

import json

import httpx
import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.templates import render_prompt
from jaxrl_llm.models.files.weight_versions import PatchError

pytest.importorskip("starlette")
PROMPTS = ["sort:4821=", "sort:90817="]
CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]


@pytest.fixture
def trl_client(running, monkeypatch):
    """The client that `vllm_mode="server"` uses; without vLLM, of which it only needs the weights' NCCL group."""
    module = pytest.importorskip("trl.generation.vllm_client")
    monkeypatch.setattr(module, "is_vllm_available", lambda *_, **__: True)
    return module.VLLMClient(base_url=running.url)


def likely(sorter, prompt_ids, ids, temperature: float):
    """Log-probs `[len(ids), V]` of the network at the places of a completion."""
    row = np.asarray([prompt_ids + ids])
    logits = np.asarray(sorter(row))[0, len(prompt_ids) - 1 : row.shape[1] - 1].astype(np.float64) / temperature
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("chat", "logprobs"),
    [
        pytest.param(False, 0, marks=pytest.mark.slow, id="generate-0"),
        pytest.param(False, 3, id="generate-3"),
        pytest.param(True, 0, id="chat-0"),
        pytest.param(True, 3, marks=pytest.mark.slow, id="chat-3"),
    ],
)
def test_trls_client_samples(trl_client, sorter, chat, logprobs):
    """Ids and log-probs that TRL's trainer gets are those of the network at the sampling temperature."""
    settings = {"n": 2, "temperature": 0.8, "top_p": 0.95, "max_tokens": 6, "logprobs": logprobs}
    settings["generation_kwargs"] = {"seed": 4}
    if chat:
        found = trl_client.chat(CHATS, **settings)
    else:
        found = trl_client.generate([render_prompt(sorter.tokenizer, prompt) for prompt in PROMPTS], **settings)
    prompts = CHATS if chat else PROMPTS
    assert found["prompt_ids"] == [render_prompt(sorter.tokenizer, prompt) for prompt in prompts]
    assert len(found["completion_ids"]) == 4
    for number, ids in enumerate(found["completion_ids"]):
        logps = likely(sorter, found["prompt_ids"][number // 2], ids, 0.8)
        for place, index in enumerate(ids):
            near, near_ids = found["logprobs"][number][place], found["logprob_token_ids"][number][place]
            assert index in near_ids and len(near) in ((1,) if logprobs == 0 else (3, 4))
            np.testing.assert_allclose(near, logps[place][near_ids], atol=1e-4)
            assert near == sorted(near, reverse=True)


def test_trls_client_scores_a_students_rows(trl_client, sorter):
    """Distillation of TRL: log-probs of given rows, of a teacher that is served."""
    rows = [render_prompt(sorter.tokenizer, text) for text in ("sort:4821=1248", "sort:90817=019")]
    found = trl_client.get_sequence_logprobs(rows, [10, 11], top_logprobs=5, temperature=0.5)
    for row, length, own, top in zip(rows, (10, 11), found["actual_logprobs"], found["logprobs"], strict=True):
        logps = likely(sorter, row[:length], row[length:], 0.5)
        np.testing.assert_allclose(np.ravel(own), logps[range(len(own)), row[length:]], atol=1e-4)
        np.testing.assert_allclose(top, -np.sort(-logps)[:, :5], atol=1e-4)


def test_trls_client_learns_that_weights_come_by_files(trl_client):
    with pytest.raises(RuntimeError, match="no weight-transfer engine"):
        trl_client.init_communicator()
    assert trl_client.get_world_size() == 1
    trl_client.reset_prefix_cache()


@pytest.mark.parametrize(
    ("chat", "nested"),
    [
        pytest.param(False, False, marks=pytest.mark.slow, id="generate, before 1.0"),
        pytest.param(False, True, id="generate, 1.0"),
        pytest.param(True, False, marks=pytest.mark.slow, id="chat, before 1.0"),
        pytest.param(True, True, marks=pytest.mark.slow, id="chat, 1.0"),
    ],
)
def test_the_endpoints_of_earlier_versions(running, sorter, chat, nested):
    """`/generate/` and `/chat/`, with the bodies that those clients send."""
    body = {"n": 2, "repetition_penalty": 1.0, "temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    body |= {"max_tokens": 5, "guided_decoding_regex": None, "generation_kwargs": {"seed": 3}, "images": None}
    body |= {"logprobs": 2, "truncate_prompt_tokens": None, "structured_outputs_regex": None} if nested else {}
    body |= {"messages": CHATS} if chat else {"prompts": PROMPTS}
    answer = httpx.post(f"{running.url}/{'chat' if chat else 'generate'}/", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    prompts = [render_prompt(sorter.tokenizer, prompt) for prompt in (CHATS if chat else PROMPTS)]
    assert found["prompt_ids"] == prompts
    settings = {"temperature": 0.8, "samples": 2, "seed": 3}
    texts = jaxrl_llm.generate(sorter, CHATS if chat else PROMPTS, 5, **settings)
    decoded = [sorter.tokenizer.decode(ids, skip_special_tokens=True) for ids in found["completion_ids"]]
    assert decoded == [text for group in texts for text in group]
    for number, ids in enumerate(found["completion_ids"]):
        logps = likely(sorter, prompts[number // 2], ids, 0.8)[range(len(ids)), ids]
        if nested:
            places = zip(found["logprobs"][number], found["logprob_token_ids"][number], ids, strict=True)
            given = [near[near_ids.index(index)] for near, near_ids, index in places]
        else:
            given = found["logprobs"][number]
        np.testing.assert_allclose(given, logps, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate/", {"prompts": []}, 400),
        ("/generate/", {"prompts": PROMPTS, "images": ["x", "y"]}, 400),
        ("/generate/", {"prompts": PROMPTS, "guided_decoding_regex": "(a"}, 400),
        ("/generate/", {"prompts": PROMPTS, "repetition_penalty": 0}, 400),
        ("/generate/", {"prompts": PROMPTS, "generation_kwargs": [1]}, 400),
        ("/chat/", {"messages": "hello"}, 400),
        ("/init_communicator/", {"host": "x", "port": 1, "world_size": 2}, 501),
        ("/update_named_param/", {}, 501),
        ("/update_weights", {}, 501),
        ("/update_weights_from_disk", {"model_path": "x"}, 403),
        ("/update_weights_from_disk", {"model_path": "x", "load_format": "dummy"}, 400),
    ],
)
def test_what_is_refused(running, path, body, status):
    answer = httpx.post(f"{running.url}{path}", json=body)
    assert answer.status_code == status and answer.json()["error"]["message"], answer.text


def test_weights_are_replaced_while_rows_go_on(listening, sorter):
    """A row under way keeps its tokens and goes on; the next request is sampled by the new weights."""

    def load(path):
        if path != "half":
            raise ConfigError(f"there is no {path}")
        return jax.tree.map(lambda x: x * 0.5, sorter.params)

    running = listening(load=load)
    body = {"prompt": "sort:4821=", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    with httpx.Client(base_url=running.url, timeout=60) as web:
        before = web.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
        for path in ("other", "", None):
            assert web.post("/update_weights_from_disk", json={"model_path": path}).status_code == 400
        answer = web.post("/update_weights_from_disk", json={"model_path": "half", "flush_cache": True}).json()
        assert answer["success"] is True and answer["weight_version"] == 1
        assert web.get("/server_info").json()["weight_version"] == 1
        after = web.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert len(before) == len(after) == 8 and before != after


def test_a_patch_of_other_weights_is_a_conflict(listening):
    """By the status and the code a trainer sees that all weights have to come."""

    def load(path):
        raise PatchError(f"{path} is a patch of others")

    reply = httpx.post(f"{listening(load=load).url}/update_weights_from_disk", json={"model_path": "x"})
    assert reply.status_code == 409 and reply.json()["error"]["code"] == "wrong_base"
    assert reply.json()["error"]["message"] == "x is a patch of others"


def test_an_answer_names_the_weights_it_was_sampled_with(listening, sorter):
    """The oldest and the newest, where they were replaced meanwhile."""
    running = listening(load=lambda path: sorter.params)
    body = {"prompt": "x", "max_tokens": 110, "ignore_eos": True, "n": 64, "stream": True}
    versions: set[tuple[int, int]] = set()
    with (
        httpx.Client(base_url=running.url, timeout=60) as web,
        web.stream("POST", "/v1/completions", json=body) as reply,
    ):
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if not versions:
                assert web.post("/update_weights_from_disk", json={"model_path": "same"}).status_code == 200
            versions.add((event["weight_version"], event["newest_weight_version"]))
            if versions >= {(0, 0), (0, 1)}:
                break
    assert versions == {(0, 0), (0, 1)}
