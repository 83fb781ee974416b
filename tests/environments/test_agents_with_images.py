"""Agents that send images: their sessions' rows have them, in order, where sampling and training compute the same."""

import base64
import io

import httpx
import jax
import numpy as np
import pytest
from PIL import Image

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.data.image_rows import ImageReader
from jaxrl_llm.data.images import data_url
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.data.tokenize import PIXELS, RowTokenizer
from jaxrl_llm.distributed.own_part import OwnPart
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.environments.agents import Agents, AgentSpec
from jaxrl_llm.models.model import load_model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.images import prompt_images
from jaxrl_llm.training.rollouts.agent_rollout import AgentRollout
from jaxrl_llm.training.setup.worker import eos_ids
from tests.data.qwen_vl import FOLDERS
from tests.data.smolvlm import picture
from tests.data.vl_folders import with_open_gates
from tests.models.decoding import trainer_logps
from tests.training.test_image_data import configured, verl_rows

pytest.importorskip("uvicorn")

WIDTH, C, K = 128, 224, 2
EVIDENCE = picture(24, 24, 7)


def image_of(url):
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def looking(base_url, api_key, task):
    """Asks the task, shows another image behind the answer, and then asks something else about that."""
    shown = {"type": "image_url", "image_url": {"url": data_url(EVIDENCE)}}
    messages = list(task["prompt"])

    def ask():
        body = {"model": "any", "messages": messages, "max_tokens": 6}
        headers = {"Authorization": f"Bearer {api_key}"}
        reply = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=1000)
        return reply.raise_for_status().json()["choices"][0]["message"]["content"]

    said = [ask()]
    messages += [{"role": "assistant", "content": said[0]}, {"role": "user", "content": [shown]}]
    said.append(ask())
    messages[:] = [{"role": "user", "content": [shown, {"type": "text", "text": "what?"}]}]
    said.append(ask())
    return float(len("".join(said)))


@pytest.fixture(scope="module", params=["qwen3_vl", "smolvlm", "mllama"])
def model(request, tmp_path_factory):
    folder = FOLDERS[request.param](tmp_path_factory.mktemp("model") / request.param)
    return with_open_gates(load_model(folder, init_key=jax.random.key(0)))


@pytest.mark.slow
def test_images_of_calls_are_those_of_the_row(model):
    """Log-probs of the rows, of both branches, with two and three images: those of the sampler."""
    mesh, eos = make_mesh(devices=jax.devices()[:1]), eos_ids(model)
    engine = Engine(SamplingParams(1.0), K, C, net=model.net, eos=eos, chunk=8)
    tokenize = RowTokenizer("prompts", model.tokenizer, images=ImageReader(model.tokenizer))
    rows = [tokenize({"prompt": row["prompt"], "images": row["images"]}) for row in verl_rows()[:2]]
    tasks = [row for row in rows if row is not None]
    given = []
    agents = Agents(AgentSpec(lambda base_url, api_key, task: given.append(task) or looking(base_url, api_key, task),
                              calls=3, timeout=2000))  # fmt: skip
    try:
        with jax.set_mesh(mesh):
            worker = AgentRollout(
                agents, engine, TurnTokenizer(model.tokenizer, eos, WIDTH), mesh, WIDTH, 4, OwnPart.of(mesh, 1)
            )
            rollout, episodes = worker(model.params, tasks, jax.random.key(0))
    finally:
        agents.close()
    assert not episodes.failed.any(), episodes.reasons
    assert sorted(len(task["images"]) for task in given) == [1, 1, 2, 2]
    assert all(PIXELS not in task and image_of(task["images"][0]).size in {(40, 20), (16, 16)} for task in given)
    found = episodes.image_rows([task for task in tasks for _ in range(K)])
    # The images of the task, the evidence behind them, and again in a branch of its own.
    assert [len(row[PIXELS].images) for row in found] == [3, 3, 4, 4]
    assert np.asarray(rollout.segments).max(axis=1).tolist() == [2] * 4
    images = jax.tree.map(jax.numpy.asarray, prompt_images(found, model.net.config.vision))
    inputs = Inputs(rollout.tokens, rollout.segments, images=images, prompt_width=WIDTH)
    logps, _ = trainer_logps(model.net, model.params, inputs, 1.0)
    mask = np.asarray(rollout.mask)
    np.testing.assert_allclose(np.asarray(logps) * mask, np.asarray(rollout.sample_logps), atol=1e-4)
    assert (mask.sum(axis=1) > 3).all()


@pytest.mark.slow
def test_a_run_learns_from_agents_that_see(tmp_path):
    """Two steps of GRPO on rows with one image, two and none; the second is resumed."""
    folder = FOLDERS["qwen3_vl"](tmp_path / "model")
    config = configured(folder, tmp_path, **{"rollout.max_completion_length": C, "checkpoint.every": 1})
    config.environment.agent, config.rewards.functions = f"{__file__}:looking", ("environment",)
    config.environment.on_error, config.total_steps, config.optimizer.learning_rate = "stop", 1, 1e-3
    first = jaxrl_llm.train(config, train_dataset=verl_rows())
    config.total_steps = 2
    second = jaxrl_llm.train(config, train_dataset=verl_rows())
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), first.model.params, second.model.params)
    assert all(jax.tree.leaves(moved["vision"]["encoder"]["merger"]))
