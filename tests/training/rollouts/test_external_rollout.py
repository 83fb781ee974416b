"""External rollouts: both forms of the function, its `trainer`, and the errors."""

import dataclasses
import http.server
import json
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.files.weight_versions import LocalCheckpoint, Publisher
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.rewards.runner import TrainerState
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving.bodies import parse
from jaxrl_llm.training.rollouts.external_rollout import ExternalRollout, load_rollout_function
from jaxrl_llm.training.rollouts.rollout_trainer import RolloutTrainer, TokenizerWithoutTorch
from jaxrl_llm.training.setup import worker
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from tests.models.decoding import trainer_logps

WIDTH, C, K = 16, 10, 2


@pytest.fixture(scope="module")
def model():
    return load_model("embedded:sort", "float32")


@pytest.fixture(scope="module")
def rollout(model):
    """`rollout(function) -> (rollout, columns)`."""
    mesh = make_mesh(devices=jax.devices()[:1])
    engine = Engine(SamplingParams(1.0), K, C, net=model.net, eos=(257,))
    prompts = ["sort:4821=", "sort:99310="]
    examples = [{"prompt": p, "prompt_ids": model.tokenizer(p)["input_ids"]} for p in prompts]

    @jax.jit
    def logps(params, inputs):
        return token_logps(model.net, params, inputs)[0]

    published = {}

    def save(params, path, dtype="", full_every=1, full=False):
        policy = dataclasses.replace(model, params=params)
        if full_every > 1:
            return published.setdefault(path, Publisher(path)).publish(policy, dtype, full_every, full)
        save_hf(policy, path, dtype or None, overwrite=True)
        return path

    def run(function):
        with jax.set_mesh(mesh):
            external = ExternalRollout(function, engine, model.tokenizer, mesh, WIDTH, logps, save)
            made, columns = external(model.params, examples, jax.random.key(0), TrainerState(3, 9))
        return jax.tree.map(np.asarray, made), columns

    return run


def save_nothing(*_):
    raise AssertionError("nothing is saved here")


def policy_logps(model, rollout):
    logps, _ = trainer_logps(model.net, model.params, Inputs(rollout.tokens, rollout.segments, prompt_width=WIDTH))
    return np.asarray(logps) * rollout.mask


@pytest.mark.slow
def test_the_engine_for_a_function(model, rollout):
    """What `trainer.generate` samples comes back as the engine's own rows."""
    seen = {}

    def function(prompts, trainer):
        seen.update(prompts=prompts, args=trainer.args, step=trainer.state.global_step)
        return {**trainer.generate(prompts), "length": list(range(4))}

    made, columns = rollout(function)
    assert seen["prompts"] == ["sort:4821=", "sort:99310="] and seen["step"] == 3
    assert seen["args"].num_generations == K and seen["args"].max_completion_length == C
    assert columns == {"length": [0, 1, 2, 3]}
    assert model.tokenizer.decode(made.tokens[2][made.segments[2] == 1]).startswith("sort:99310=")
    assert (made.mask.sum(1) == made.lengths).all() and made.lengths.min() > 1
    np.testing.assert_allclose(made.sample_logps, policy_logps(model, made), atol=1e-4)


@pytest.mark.slow
def test_a_conversation_that_a_function_holds(model, rollout):
    tokenizer = model.tokenizer

    def function(prompts, trainer):
        first = trainer.generate(prompts)
        said = tokenizer("=")["input_ids"]
        sampled = first["completion_ids"]
        asked = [p + c + said for p, c in zip(first["prompt_ids"], sampled, strict=True)]
        second = trainer.generate(asked, num_generations=1)
        pairs = list(zip(sampled, second["completion_ids"], strict=True))
        logprobs = zip(first["logprobs"], second["logprobs"], strict=True)
        return {
            "prompt_ids": first["prompt_ids"],
            "completion_ids": [a + said + b for a, b in pairs],
            "logprobs": [[*a, 0.0, *b] for a, b in logprobs],
            "env_mask": [[1] * len(a) + [0] + [1] * len(b) for a, b in pairs],
        }

    made, _ = rollout(function)
    observed = (made.mask == 0) & (made.segments == 1)
    observed[:, :WIDTH] = False
    assert (observed.sum(1) <= 1).all() and observed.any() and (made.tokens[observed] == ord("=")).all()
    assert (made.lengths <= C).all()
    np.testing.assert_allclose(made.sample_logps, policy_logps(model, made), atol=1e-4)


def test_texts_get_the_log_probs_of_the_policy(model, rollout):
    def math_rollout(model, processing_class, prompts, generation_config=None):
        assert [sorted(prompt) for prompt in prompts] == [["prompt"]] * 4 and prompts[0] == prompts[1] != prompts[2]
        inputs = processing_class(prompts[0]["prompt"], return_tensors="pt").to(model.device)
        ids = model.generate(**inputs, max_new_tokens=2, generation_config=generation_config)
        assert ids.shape[0] == 1 and 0 < ids.shape[1] - inputs.input_ids.shape[1] <= 2
        assert isinstance(processing_class.decode(ids[0][inputs.input_ids.shape[1] :]), str)
        assert generation_config.max_new_tokens == C
        return ["1248", "4821<|end|>", "01399", "far too long to fit"]  # an end of its own stays the only one

    made, columns = rollout(math_rollout)
    assert columns == {} and made.lengths.tolist() == [5, 5, 6, C] and made.finished.tolist() == [True] * 3 + [False]
    assert model.tokenizer.decode(made.tokens[0, WIDTH : WIDTH + 5]) == "1248<|end|>"
    np.testing.assert_allclose(made.sample_logps, policy_logps(model, made), atol=1e-5)
    assert made.sample_logps[0].sum() > made.sample_logps[1].sum()  # the right answer is likelier


def test_log_probs_are_computed_a_micro_batch_at_a_time(model, monkeypatch):
    """Those that a function does not return; an evaluation may have a number of rows that they do not divide."""
    config, asked, mesh = default(), [], make_mesh(devices=jax.devices()[:1])
    config.batch.prompts, config.rollout.group_size, config.batch.microbatch_rows = 4, 2, 4
    monkeypatch.setattr(worker, "scored_logps", lambda *arguments: asked.append(arguments[4]))
    setup = worker.Setup(config, mesh, model, None, None, None)
    external = worker.external_rollout(setup, print, types.SimpleNamespace(net=model.net), WIDTH)
    for rows in (8, 6):
        tokens = np.zeros((rows, WIDTH + C), np.int32)
        external.policy_logps(model.params, Inputs(tokens, tokens))
    assert asked == [4, 2]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_a_batch_is_no_prompt(model, side):
    asked = []

    def generate(ids, count):
        asked.extend(ids)
        return [[7], [8, 9]], []

    tokenizer = TokenizerWithoutTorch(model.tokenizer)
    trainer = RolloutTrainer(generate, tokenizer, {"num_generations": 1}, None, save_nothing)
    prompts = ["sort:4821=", "sort:21="]
    inputs = tokenizer(prompts, padding=True, padding_side=side, return_tensors="pt")
    rows = trainer.generate(**inputs)
    assert asked == [model.tokenizer(prompt)["input_ids"] for prompt in prompts]
    width = inputs["input_ids"].shape[1]
    assert (rows[:, :width] == inputs["input_ids"]).all() and rows[1, width:].tolist() == [8, 9]


GOOD = {"prompt_ids": [[1]] * 4, "completion_ids": [[2, 3]] * 4, "logprobs": [[-1.0, -1.0]] * 4}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "must return a dictionary with prompt_ids, completion_ids, logprobs; it returned None"),
        ({"prompt_ids": []}, "must return a dictionary"),
        ({**GOOD, "logprobs": [[-1.0]] * 4}, "row 0 has 2 completion_ids, 1 logprobs and 2 in env_mask"),
        ({**GOOD, "env_mask": [[1, 1]] * 3}, r"returned 3 env_mask, but there are 4 rows: rollout.group_size"),
        ({**GOOD, "env_mask": [[1, 0.5]] * 4}, "returned 0.5 in env_mask of row 0; it takes 1 for tokens of the"),
        ({**GOOD, "env_mask": [[1, 2]] * 4}, "returned 2 in env_mask of row 0"),
        ({**GOOD, "logprobs": None}, "must return a dictionary with prompt_ids, completion_ids, logprobs"),
        ({**GOOD, "logprobs": [[-1.0, None]] * 4}, r"\[\[-1.0, None\].* as logprobs, which are no lists of numbers"),
        ({**GOOD, "completion_ids": ["ab"] * 4}, "as completion_ids, which are no lists of numbers"),
        ({**GOOD, "score": 3.0}, "must return lists with an entry for each row"),
        (
            {**GOOD, "prompt_ids": [[1] * 17] * 4},
            "of 17 to 17 tokens, but they have 1 to rollout.max_prompt_length = 16",
        ),
        ({**GOOD, "logprobs": [[-1.0, float("inf")]] * 4}, "logprobs that are not finite"),
        ({**GOOD, "logprobs": [[0.9, 0.5]] * 4}, "returned 0.9 in logprobs of row 0; log-probs are at most 0"),
        (
            {**GOOD, "completion_ids": [[2, 3], [2, -1]] * 2},
            "returned token -1 in completion_ids of row 1, but the model's tokens are 0 to 319",
        ),
        ({**GOOD, "prompt_ids": [[1], [1], [320], [1]]}, "token 320 in prompt_ids of row 2"),
    ],
)
def test_what_a_function_may_not_return(rollout, said, message):
    with pytest.raises(ConfigError, match=message):
        rollout(lambda prompts, trainer: said)


def test_a_server_that_dies_samples_anew(rollout, monkeypatch, tmp_path):
    """It has the weights that it was started with until it gets the policy again; one that dies each time is told."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    losses = []

    def dying(answer):
        if answer["choices"] and losses:
            raise losses.pop()  # no reply: the connection ends
        return answer if answer["choices"] else {"success": True}

    with Server(dying) as server:
        server.http.handle_error = lambda *of_request: None
        losses.append(ConnectionError())
        made, _ = rollout(served(server, weights=str(tmp_path / "weights")))
        paths = [path.rpartition("/")[2] for path, _ in server.bodies]
        first = paths.index("update_weights_from_disk", 1)  # after which every prompt is sampled
        assert made.finished.all() and not losses
        assert paths[0] == paths[first] == "update_weights_from_disk" and paths.count(paths[0]) == 2
        assert paths[first + 1 :] == ["completions"] * 2 and "completions" in paths[1:first]
        losses += [ConnectionError()] * 6
        with pytest.raises(ConfigError, match=r"did not answer to the end.*in 3 tries of a rollout"):
            rollout(served(server))


def test_errors_of_functions(rollout):
    with pytest.raises(ConfigError, match="rollout_func raised ZeroDivisionError"):
        rollout(lambda prompts, trainer: 1 / 0)
    with pytest.raises(ConfigError, match=r"rollout_func raised LeftError: it called sys.exit\(0\)"):
        rollout(lambda prompts, trainer: sys.exit(0))
    with pytest.raises(ConfigError, match="must return a list of 4 texts"):
        rollout(lambda model, processing_class, prompts, generation_config: ["a"])
    with pytest.raises(ConfigError, match="generate got temperature; how the policy is sampled"):
        rollout(lambda prompts, trainer: trainer.generate(prompts, temperature=0.5))


class Server:
    """Answers as vLLM's completions do, or as `change` has it."""

    def __init__(self, change=lambda answer: answer, status=200):
        bodies, self.asked = [], []  # of POST: paths and bodies; of GET: paths and keys
        self.bodies = bodies
        self.status, self.info, self.models, outer = status, None, None, self
        self.refusals = []  # statuses of the next answers that are no samples

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append((self.path, self.headers["Authorization"]))
                found = outer.models if self.path.endswith("/models") else outer.info
                self.send_response(404 if found is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                bodies.append((self.path, body))
                choices = [
                    {"token_ids": [50 + i, 257], "logprobs": {"token_logprobs": [-0.5, -0.25]}}
                    for i in range(body.get("n", 0))
                ]
                data = json.dumps(change({"choices": choices})).encode()
                self.send_response(outer.refusals.pop(0) if outer.refusals and "n" not in body else outer.status)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()


def served(server, **options):
    options = "".join(f", {key}={value!r}" for key, value in options.items())
    return load_rollout_function(f"server(url={server.url!r}, model='m'{options})")


def test_a_server_samples(rollout, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        made, _ = rollout(served(server))
    assert made.tokens[:, WIDTH : WIDTH + 2].tolist() == [[50, 257], [51, 257]] * 2 and made.finished.all()
    assert made.sample_logps[:, WIDTH : WIDTH + 2].tolist() == [[-0.5, -0.25]] * 4
    path, body = server.bodies[0]
    assert path == "/v1/completions" and body["n"] == K and body["max_tokens"] == C and body["return_token_ids"] is True


UNSET = {  # vLLM would take what is left out from its model's generation_config.json
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, {}),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.3,
             "frequency_penalty": 0.2, "presence_penalty": 0.4,
             "logit_bias": ("52=-5",), "bad_words": ("11",), "min_completion_length": 1, "stop": ("12",),
             "stop_token_ids": (55,), "ignore_eos": True},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.3,
             "frequency_penalty": 0.2, "presence_penalty": 0.4,
             "logit_bias": {"52": -5.0}, "bad_words": ["11"], "min_tokens": 1, "stop": ["12"], "stop_token_ids": [55],
             "ignore_eos": True},
        ),
        ({"structured_choice": ("12", "13")}, {"structured_outputs": {"choice": ["12", "13"]}}),
    ],
    ids=["none", "sampling", "guide"],
)  # fmt: skip
def test_a_server_is_asked_for_what_the_run_samples_by(settings, asked, model, monkeypatch):
    """In fields that `jaxrl-llm serve` reads as the same settings; and a stop string ends a row as one of ours does."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    if "structured_choice" in settings:
        pytest.importorskip("outlines_core")
        pytest.importorskip("llguidance")
    config = default()
    config.rollout.update({**settings, "max_prompt_length": WIDTH, "max_completion_length": C, "group_size": K})
    config.batch.prompts, config.eval.every = 1, -1
    config.algorithm.importance_correction = "token_truncate"
    mesh = make_mesh(devices=jax.devices()[:1])

    def change(answer):
        for number, choice in enumerate(answer["choices"]):
            choice["token_ids"] = [49, 50 + number]  # 12 and 13
        return answer

    with Server(change) as server, jax.set_mesh(mesh):
        server.info = told("processed_logprobs")
        config.environment.rollout_func = f"server(url={server.url!r}, model='m')"
        worker = build(config, mesh, Given([{"prompt": "sort:4821=", "answer": "1248"}])).source.producer.worker
        example = {"prompt": "sort:4821=", "prompt_ids": model.tokenizer("sort:4821=")["input_ids"]}
        made, _ = worker.external(model.params, [example], jax.random.key(0), TrainerState(3, 9))
    assert np.asarray(made.finished).tolist() == [bool(config.rollout.stop), False]
    ((_, body),) = server.bodies
    always = {"model", "prompt", "n", "max_tokens", "logprobs", "return_token_ids"}
    assert {name: value for name, value in body.items() if name not in always} == UNSET | asked
    read = parse(body, False, model.tokenizer, ["m"], (257,), 64, 320, 16)
    assert read.sampling == worker.engine.sampling and set(read.ends) == set(worker.engine.eos)
    assert read.stop == config.rollout.stop and (read.guide is not None) == ("structured_outputs" in asked)


def told(mode):
    """As vLLM and `jaxrl-llm serve` answer /server_info."""
    return {"vllm_config": {"model_config": {"logprobs_mode": mode}}}


@pytest.mark.parametrize(
    ("temperature", "info", "options", "message"),
    [
        (0.7, told("raw_logprobs"), {}, "/v1 gives raw_logprobs, .*temperature = 0.7: start vLLM with"),
        (0.7, told("raw_logprobs"), {"processed_logprobs": True}, "gives raw_logprobs"),  # what it says counts
        (0.7, told("processed_logits"), {}, "gives processed_logits"),
        (0.7, None, {}, r"/server_info\S* answered 404 without .* add processed_logprobs=True to server"),
        (0.7, {"vllm_config": "model='m'"}, {}, r"/server_info\S* answered 200 without"),  # before config_format
        (0.7, [1], {}, r"/server_info\S* answered 200 without"),
        (0.7, told("processed_logprobs"), {}, None),
        (0.7, None, {"processed_logprobs": True}, None),
        (1.0, told("raw_logprobs"), {}, None),  # all the same at temperature 1, which is that of greedy log-probs too
        (0.0, None, {}, None),
    ],
)
def test_log_probs_of_a_server_are_at_the_temperature(temperature, info, options, message, model, monkeypatch):
    """vLLM's are at temperature 1 unless it was started otherwise; the trainer's are not."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    settings = {**UNSET, "num_generations": K, "max_completion_length": C, "temperature": temperature}
    trainer = RolloutTrainer(lambda ids, count: ([], []), model.tokenizer, settings, None, save_nothing)
    with Server() as server:
        server.info = info
        if message is None:
            assert len(served(server, **options)(["a"], trainer)["logprobs"]) == K
        else:
            with pytest.raises(ConfigError, match=message):
                served(server, **options)(["a"], trainer)
            assert not server.bodies, "nothing is sampled"
    asked = [("/server_info?config_format=json", "Bearer secret")]
    assert server.asked == (asked if temperature == 0.7 else [])


def test_a_server_gets_the_policy_first(rollout, model, monkeypatch, tmp_path):
    """Each rollout saves it, lets the server take it, and refuses rows of other weights than those."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    taken = []

    def change(answer):
        if answer["choices"]:
            return {**answer, "weight_version": len(taken) - late, "newest_weight_version": len(taken) + early}
        loaded = load_model(tmp_path / "policy", "float32")
        assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), loaded.params, model.params))
        taken.append(loaded)
        return {"success": good, "weight_version": len(taken)}

    late, early, good = 0, 0, True
    with Server(change) as server:
        function = served(server, weights=str(tmp_path / "policy"))
        for _ in range(2):
            made, _ = rollout(function)
            assert made.finished.all()
        path, body = server.bodies[0]
        assert path == "/update_weights_from_disk" and body == {"model_path": str(tmp_path / "policy")}
        assert [path for path, _ in server.bodies].count(path) == len(taken) == 2
        late = 1
        with pytest.raises(
            ConfigError, match="sampled with version 2 of its weights, but those of the policy are version 3"
        ):
            rollout(function)
        late, early = 0, 1  # replaced while the rows were sampled
        with pytest.raises(ConfigError, match="sampled with version 5"):
            rollout(function)
        good = False
        with pytest.raises(ConfigError, match="did not take the weights"):
            rollout(function)


def test_vllm_reads_the_policy_again_first(rollout, model, monkeypatch, tmp_path):
    """A stub of its endpoints: the policy is in its folder when it is told to, and prefixes are forgotten."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    read = []

    def change(answer):
        if not answer["choices"]:
            read.append(load_model(tmp_path / "policy", "float32").params)
            return {"results": [None]}
        return answer

    with Server(change) as server:
        function = served(server, weights=str(tmp_path / "policy"), vllm=True)
        made, _ = rollout(function)
        assert made.finished.all() and jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), read[0], model.params))
        told = [("/collective_rpc", {"method": "reload_weights"}), ("/reset_prefix_cache", {})]
        assert server.bodies[:2] == told and {path for path, _ in server.bodies[2:]} == {"/v1/completions"}
        server.status = 500
        with pytest.raises(ConfigError, match="collective_rpc answered 500"):
            rollout(function)
        with pytest.raises(ConfigError, match="has no weights"):
            served(server, vllm=True)


def test_a_server_gets_what_changed(rollout, model, monkeypatch, tmp_path):
    """After all weights patches of them; where one is refused, as by a server that was started anew, all weights."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    weights, local, taken = str(tmp_path / "policy"), LocalCheckpoint(), []

    def change(answer):
        if answer["choices"]:
            return answer
        path = server.bodies[-1][1]["model_path"]
        if not server.refusals:
            taken.append((path.rpartition("/")[2], load_model(local.take(path), "float32")))
        return {"success": True, "weight_version": len(taken)}

    with Server(change) as server:
        function = served(server, weights=weights, weights_dtype="bfloat16", full_every=3)
        for step in range(5):
            server.refusals = [409] if step == 2 else []
            made, _ = rollout(function)
            assert made.finished.all()
        numbers = [int(name.removeprefix("weight_v")) for name, _ in taken]
        # Version 3 is refused, so 4 has all weights; 5 and 6 are patches of it.
        assert numbers == [1, 2, 4, 5, 6]
        server.refusals = [409, 409]
        with pytest.raises(ConfigError, match="update_weights_from_disk answered 409"):
            rollout(function)
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["weight_v000008"]
    rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), model.params)
    for _, loaded in taken:
        assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), loaded.params, rounded))


PUBLISHING = """
from pathlib import Path

from jaxrl_llm.models.files.weight_versions import LocalCheckpoint

here, local = Path(__file__).parent, LocalCheckpoint()

def publishing(prompts, trainer):
    taken = trainer.publish_weights(f"{here}/policy", local.take, "bfloat16", full_every=9)
    expected = trainer.publish_weights(f"{here}/expected", str, "bfloat16")
    files = [Path(folder, "model.safetensors").read_bytes() for folder in (taken, expected)]
    assert files[0] == files[1]
    return trainer.generate(prompts)
"""


@pytest.mark.slow
def test_a_run_sends_a_fraction_of_its_weights(tmp_path, root):
    """Five steps of AdamW: patches give the policy of each bit for bit, and few of its weights change in 16 bits."""
    (tmp_path / "mine.py").write_text(PUBLISHING)
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.environment.rollout_func = f"{tmp_path / 'mine.py'}:publishing"
    config.algorithm.importance_correction = "token_truncate"
    config.output_dir, config.logging.backends, config.total_steps = str(tmp_path / "run"), ("jsonl",), 5
    config.optimizer.learning_rate, config.eval.every, config.checkpoint.every = 1e-6, -1, 0
    config.optimizer.warmup_steps = 0
    jaxrl_llm.train(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    written, changed = ([row.get(f"weights/{name}_share") for row in rows] for name in ("written", "changed"))
    assert written[0] == 1 and changed[0] is None
    assert all(0 < share < 0.05 for share in changed[1:]) and all(0 < share < 0.1 for share in written[1:])


def test_sglang_brings_the_versions_together_itself(rollout, monkeypatch, tmp_path):
    """A stub of its endpoints: each version is pulled, then its own folder is read."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(lambda answer: answer if answer["choices"] else {"success": True}) as server:
        weights = str(tmp_path / "policy")
        options = {"weights_dtype": "bfloat16", "full_every": 9, "local_checkpoint": "/nvme/policy"}
        function = served(server, weights=weights, **options)
        for refusals in ([], [], [400]):
            server.refusals = refusals
            rollout(function)
    asked = [(path, body) for path, body in server.bodies if not path.endswith("completions")]
    pulls = [
        {"local_checkpoint_dir": "/nvme/policy", "source_dir": weights, "target_version": number}
        for number in (1, 2, 3, 4)
    ]
    reads = ("/update_weights_from_disk", {"model_path": "/nvme/policy"})
    assert [body for path, body in asked if path == "/pull_weights"] == pulls
    assert [path for path, _ in asked].count("/update_weights_from_disk") == 3 and asked[1] == asked[-1] == reads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full_every": 4}, "has no weights to send, but weights_dtype, full_every or local_checkpoint"),
        ({"weights": "p", "weights_dtype": "int8"}, "weights_dtype='int8'. is not one of float32, bfloat16, float16"),
        ({"weights": "p", "full_every": 0}, "full_every=0. must be at least 1"),
        ({"weights": "p", "full_every": 4}, "in float32 nearly all do in each step: add weights_dtype='bfloat16'"),
        ({"weights": "p", "full_every": 4, "weights_dtype": "float32"}, "add weights_dtype='bfloat16'"),
        (
            {"weights": "p", "full_every": 4, "weights_dtype": "bfloat16", "vllm": True},
            r"vllm=True. reads the folder it was started on, not the versions in p .*leave full_every out",
        ),
        ({"weights": "gs://b/p", "vllm": True}, "not the versions in gs://b/p"),
        ({"weights": "p", "local_checkpoint": "q"}, "weights is p and full_every is 1: set it above 1"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        served(types.SimpleNamespace(url="http://127.0.0.1:9/v1"), **options)


SETTINGS = {**UNSET, "num_generations": K, "max_completion_length": C}


@pytest.mark.parametrize(
    ("owner", "constraints", "asked"),
    [
        ("sglang", {"structured_outputs": {"regex": "[0-9]+"}}, {"regex": "[0-9]+"}),
        ("sglang", {"structured_outputs": {"json": '{"type": "object"}'}}, {"json_schema": '{"type": "object"}'}),
        (
            "sglang",
            {"structured_outputs": {"choice": ('a"b', "c\\d\n", "é")}},
            {"ebnf": r'root ::= "a\"b" | "c\\d\n" | "é"'},
        ),
        (
            "sglang",
            {"stop": ("x",), "min_tokens": 2},
            {"stop": ["x"], "min_tokens": 2},
        ),  # which it knows by these names
        ("vllm", {"bad_words": ("x",)}, {"bad_words": ["x"]}),
        (None, {"structured_outputs": {"grammar": "start: A"}}, {"structured_outputs": {"grammar": "start: A"}}),
    ],
)
def test_a_server_is_asked_in_the_names_that_it_knows(owner, constraints, asked, model, monkeypatch):
    """SGLang passes over fields that it does not know, vLLM's of structured outputs among them."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    settings = {**SETTINGS, **constraints}
    trainer = RolloutTrainer(lambda ids, count: ([], []), model.tokenizer, settings, None, save_nothing)
    with Server() as server:
        server.models = None if owner is None else {"data": [{"id": "m", "owned_by": owner}]}
        served(server)(["a"], trainer)
    ((_, body),) = server.bodies
    always = {"model", "prompt", "n", "max_tokens", "logprobs", "return_token_ids", *UNSET}
    assert {name: value for name, value in body.items() if name not in always} == asked
    assert len(server.asked) == (not asked.keys() <= {"stop", "min_tokens"})


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"bad_words": ("x",)}, "/v1 is SGLang's, which knows no bad_words: leave rollout.bad_words out"),
        ({"structured_outputs": {"grammar": "start: A"}}, "does not read the syntax of rollout.structured_grammar"),
    ],
)
def test_what_sglang_does_not_know_is_refused(constraints, message, model, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    settings = {**SETTINGS, **constraints}
    trainer = RolloutTrainer(lambda ids, count: ([], []), model.tokenizer, settings, None, save_nothing)
    with Server() as server:
        server.models = {"data": [{"id": "m", "owned_by": "sglang"}]}
        with pytest.raises(ConfigError, match=message):
            served(server)(["a"], trainer)
    assert not server.bodies


def test_a_server_that_fails_is_named(rollout, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with monkeypatch.context() as patch, Server(status=500) as server:
        patch.setattr("jaxrl_llm.environments.server.time.sleep", lambda seconds: None)
        with pytest.raises(ConfigError, match="answered 500"):
            rollout(served(server))
    strip = lambda answer: {"choices": [{**c, "token_ids": None} for c in answer["choices"]]}  # noqa: E731
    with Server(strip) as server, pytest.raises(ConfigError, match=r"returned no token_ids.*return_token_ids"):
        rollout(served(server))
    for change in (lambda answer: [1], lambda answer: {"choices": [1, 2]}, lambda answer: {"choices": None}):
        with Server(change) as server, pytest.raises(ConfigError, match="answered without a list of choices"):
            rollout(served(server))
    with Server(lambda answer: "x" * 3_000_000) as server, pytest.raises(ConfigError, match="the reply has more than"):
        rollout(served(server))
    away = types.SimpleNamespace(url="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match=r"was not there within 0\.5 seconds.*start the server"):
        rollout(served(away, wait_for_server=0.5))


def test_an_error_of_one_prompt_waits_for_no_other(rollout, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    calls, over = [], threading.Event()

    def change(answer):
        calls.append(answer)
        if len(calls) == 3:  # of the second rollout
            over.wait(60)
        return answer if len(calls) < 4 else {}

    with Server(change) as server:
        function = served(server)
        rollout(function)
        began = time.monotonic()
        with pytest.raises(ConfigError, match="answered without a list of choices"):
            rollout(function)
        assert time.monotonic() - began < 30
        over.set()


def test_a_server_that_comes_up_is_waited_for(rollout, monkeypatch):
    """First nothing listens, then a proxy says that nothing is there; and again where a server that was there goes."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("jaxrl_llm.environments.server.time.sleep", lambda seconds: None)
    late, refusals = Server(status=503), []
    port = late.http.server_port
    late.http.server_close()

    def warned(text, *values):
        refusals.append(str(values))
        if len(refusals) == 2:  # now something listens
            late.http = http.server.ThreadingHTTPServer(("127.0.0.1", port), late.http.RequestHandlerClass)
            threading.Thread(target=late.http.serve_forever, args=(0.01,), daemon=True).start()
        if len(refusals) == 4:
            late.status = 200

    monkeypatch.setattr("jaxrl_llm.environments.server.log.warning", warned)
    function = served(late)
    made, _ = rollout(function)
    assert made.finished.all() and ["Connect" in text for text in refusals] == [True, True, False, False]
    late.status, refusals[:] = 503, [""] * 2
    made, _ = rollout(function)
    assert made.finished.all() and len(refusals) == 4 and late.status == 200
    late.status = 503
    with pytest.raises(ConfigError, match="answered 503"):
        rollout(served(late, wait_for_server=0))
    late.http.shutdown()
    late.http.server_close()


def test_what_follows_a_save_may_not_ask_for_another(rollout, tmp_path):
    """It would wait for itself; the function samples on after the error."""
    refused = []

    def function(prompts, trainer):
        for then in (lambda: trainer.generate(prompts), lambda: trainer.save_model(tmp_path / "other")):
            with pytest.raises(ConfigError, match=r"within save_model, .* call it after save_model has returned"):
                trainer.save_model(tmp_path / "policy", then)
            refused.append(then)
        return trainer.generate(prompts)

    thread = threading.Thread(target=rollout, args=(function,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and len(refused) == 2
    assert (tmp_path / "policy" / "config.json").is_file() and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"name": "sort_then_smallest", "rollout_func": "m:f"},
            "environment.rollout_func and environment.name are both set",
        ),
        ({"rollout_func": "m:f"}, "importance_correction is none, but environment.rollout_func"),
        (
            {"rollout_func": "server(url='http://localhost:8000/v1', model='m')", "rollout.logit_bias": ("7=-200",)},
            r"logit_bias adds -200 to token 7, but the server of environment\.rollout_func takes -100 to 100",
        ),
        ({"max_turns": 0}, "environment.max_turns is 0"),
        ({"on_error": "skip"}, "environment.on_error is 'skip'"),
    ],
)
def test_contradictions(values, message):
    config = default()
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        config[section or "environment"][leaf] = value
    with pytest.raises(ConfigError, match=message):
        validate(config)
    config = default()
    config.algorithm.name, config.environment.name = "sft", "sort_then_smallest"
    with pytest.raises(ConfigError, match="samples nothing"):
        validate(config)
