"""Runs that train all weights: gradients, steps and folders beside transformers and torch, and beside our trainer."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.models.files.hf import locate
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker import training_run
from jaxrl_llm.tools.tinker.checkpoints import Place, Store
from jaxrl_llm.tools.tinker.messages import Datum
from jaxrl_llm.tools.tinker.training_run import TrainingRun, lora_config
from jaxrl_llm.training.update import ADDS_IN_PLACE
from tests.data.qwen_vl import FOLDERS
from tests.tools.tinker.test_training_run import ROWS, close, computed, copied, same, taken

ADAM = {"learning_rate": 1e-3, "beta2": 0.99, "eps": 1e-2, "weight_decay": 0.1}
HERE = Place("run", "weights", "a")


@pytest.fixture
def run(sorter):
    """All weights of the embedded model."""
    return TrainingRun(sorter, None)


def test_it_starts_as_the_model_and_leaves_it(run, sorter):
    before = copied(sorter.params)
    tokens = np.resize(ROWS[1].tokens, (2, 20))
    assert same(run.whole()(tokens), sorter(tokens))
    computed(run, ROWS)
    run.step(ADAM)
    assert same(sorter.params, before)
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), run.weights, before)
    assert min(jax.tree.leaves(moved)) > 0, "some weights did not move"


@pytest.mark.slow
def test_micro_batches_change_nothing_wherever_they_add_up(run, monkeypatch):
    computed(run, ROWS)
    whole = taken(run)
    computed(run, ROWS, at_once=1)
    close(taken(run), whole)
    monkeypatch.setitem(ADDS_IN_PLACE, "cpu", lambda: False)  # as on one GPU
    training_run._added.clear_cache()
    computed(run, ROWS)
    close(taken(run), whole)
    training_run._added.clear_cache()


@pytest.mark.slow
def test_steps_and_the_folder_are_those_of_transformers_and_torch(run, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(locate("embedded:sort"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-2, weight_decay=0.1)
    for limit in (0.0, 1.0, 0.0):
        total = 0.0
        for row in ROWS:
            logps = torch.log_softmax(oracle(torch.tensor(row.tokens)[None].long()).logits[0], -1)
            targets = torch.tensor(row.inputs["target_tokens"])
            own = logps[torch.arange(len(targets)), targets]
            total = total - (torch.tensor(row.inputs["weights"]) * own).sum()
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), limit or torch.inf).item()
        optimizer.step()
        assert computed(run, ROWS).metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
        assert run.step({**ADAM, "grad_clip_norm": limit})["grad_norm:mean"] == pytest.approx(norm, rel=1e-4)
    Store(tmp_path).save(HERE, run, {})
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "weights" / "a", dtype=torch.float32).state_dict()
    start = AutoModelForCausalLM.from_pretrained(locate("embedded:sort"), dtype=torch.float32).state_dict()
    for name, x in oracle.state_dict().items():
        np.testing.assert_allclose(saved[name].numpy(), x.numpy(), atol=3e-6, err_msg=name)
        assert (saved[name] - start[name]).abs().max() > 1e-4, name


def test_a_saved_run_goes_on_as_if_it_had_not_been(run, sorter, tmp_path):
    for rows in (ROWS[:3], ROWS[3:]):
        computed(run, rows)
        run.step(ADAM)
    store = Store(tmp_path)
    store.save(HERE, run, {})
    config, *saved = store.load(HERE.path, sorter, moments=True)
    assert config is None
    assert same(tuple(saved), (run.weights, run.adam))
    other, again = TrainingRun(sorter, None, saved=tuple(saved)), TrainingRun(sorter, None)
    computed(again, ROWS)
    again.restore(*store.load(HERE.path, sorter, moments=True))
    for each in (run, other, again):
        computed(each, ROWS[2:])
        each.step(ADAM)
    for each in (other, again):
        assert same((each.weights, each.adam), (run.weights, run.adam))
    again.restore(*store.load(HERE.path, sorter))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(again.adam))
    folder = tmp_path / "run" / "weights" / "a"
    assert same(jaxrl_llm.load_model(folder).params, store.load(HERE.path, sorter)[1])
    assert (folder / "tokenizer.json").is_file()
    store.save(HERE._replace(kind="sampler_weights"), run, {})
    sampled, trained = (store.shown(HERE._replace(kind=kind), {"time": ""}) for kind in ("sampler_weights", "weights"))
    assert 2.9 * sampled["size_bytes"] < trained["size_bytes"] < 3.1 * sampled["size_bytes"]


def test_weights_of_another_kind_or_network_are_no_run_s(run, sorter, tmp_path):
    adapters, store = TrainingRun(sorter, lora_config(4), 0), Store(tmp_path)
    with pytest.raises(BadRequestError, match=r"are adapters of rank 4 of q, .*, and those of .* all of a model: "):
        run.restore(adapters.config, adapters.weights, None)
    with pytest.raises(BadRequestError, match=r"are all of a model, and those of .*, adapters of rank 4"):
        adapters.restore(None, run.weights, None)
    store.save(HERE, run, {})
    file = tmp_path / "run" / "weights" / "a" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 256}))
    with pytest.raises(ConfigError, match="a is another network than embedded:sort"):
        store.load(HERE.path, sorter)


@pytest.mark.slow
def test_small_steps_move_weights_that_are_served_in_16_bits(tmp_path):
    model = jaxrl_llm.load_model("embedded:sort", dtype="bfloat16")
    run, store = TrainingRun(model, None), Store(tmp_path)
    assert {x.dtype for x in jax.tree.leaves(run.weights)} == {jnp.dtype("float32")}
    before = copied(run.weights)
    computed(run, ROWS)
    run.step({"learning_rate": 1e-6})
    moved = jax.tree.map(lambda a, b: (np.asarray(a) != b).mean(), run.weights, before)
    assert moved["layers"]["attention"]["q"]["kernel"] > 0.9
    store.save(HERE, run, {})
    _, weights, adam = store.load(HERE.path, model, moments=True)
    assert same((weights, adam), (run.weights, run.adam))


@pytest.mark.slow
def test_a_client_s_loop_is_our_trainer(sorter, tmp_path):
    """Three steps of SFT through `train`, and the same batches with the weights of a mean over tokens."""
    texts = [("sort:312=", "123"), ("sort:97=", "79"), ("sort:4821=", "1248"), ("sort:5=", "5")]
    config = default()
    config.algorithm.name, config.output_dir, config.total_steps = "sft", str(tmp_path / "out"), 3
    config.batch.prompts, config.data.shuffle, config.eval.every = 4, False, -1
    config.optimizer.learning_rate, config.optimizer.schedule, config.optimizer.warmup_steps = 1e-3, "constant", 0
    config.optimizer.b2, config.optimizer.eps, config.optimizer.weight_decay = 0.99, 1e-2, 0.1
    config.optimizer.no_decay, config.optimizer.max_grad_norm, config.logging.backends = (), 1.0, ()
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    jaxrl_llm.train(config, train_dataset=rows)
    expected = jaxrl_llm.load_model(tmp_path / "out" / "hf").params
    run, end, data = TrainingRun(sorter, None), sorter.tokenizer.eos_token_id, []
    for prompt, completion in texts:
        before, after = sorter.tokenizer.encode(prompt), [*sorter.tokenizer.encode(completion), end]
        tokens, learned = np.array(before + after), [0.0] * (len(before) - 1) + [1.0] * len(after)
        data.append((tokens, np.float32(learned)))
    count = sum(learned.sum() for _, learned in data)
    for _ in range(3):
        computed(run, [Datum(x[:-1], {"target_tokens": x[1:], "weights": y / count}) for x, y in data])
        run.step({**ADAM, "grad_clip_norm": 1.0})
    start, moved = sorter.params, 0.0
    for own, other, first in zip(*(jax.tree.leaves(tree) for tree in (run.weights, expected, start)), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
        moved = max(moved, float(np.abs(np.asarray(own) - np.asarray(first)).max()))
    assert moved > 1e-3


@pytest.mark.slow
def test_the_part_that_reads_images_stays_as_it_is(tmp_path):
    model = jaxrl_llm.load_model(FOLDERS["smolvlm"](tmp_path / "model"), init_key=jax.random.key(0))
    run, store = TrainingRun(model, None), Store(tmp_path)
    assert run.weights.keys() == model.params.keys() - {"vision"}
    count = model.net.config.vocab_size
    rows = [Datum(row.tokens % count, {**row.inputs, "target_tokens": row.tokens % count}) for row in ROWS]
    computed(run, rows)
    run.step(ADAM)
    store.save(HERE, run, {})
    _, *saved = store.load(HERE.path, model, moments=True)
    assert same(tuple(saved), (run.weights, run.adam))
    assert same(jaxrl_llm.load_model(tmp_path / "run" / "weights" / "a").params["vision"], model.params["vision"])


ON_A_MESH = """
import pathlib, sys, jax, numpy as np
import jaxrl_llm
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.tools.tinker.checkpoints import Place, Store
from jaxrl_llm.tools.tinker import training_run
from jaxrl_llm.tools.tinker.training_run import TrainingRun
from jaxrl_llm.training.update import ADDS_IN_PLACE
from tests.tools.tinker.test_full_weights import ADAM, ROWS
from tests.tools.tinker.test_training_run import computed, same

def trained(tensor, name, in_place):
    ADDS_IN_PLACE["cpu"] = lambda: in_place
    training_run._added.clear_cache()
    mesh = make_mesh(tensor=tensor, devices=jax.devices()[:tensor])
    with jax.set_mesh(mesh):
        model = jaxrl_llm.load_model("embedded:sort", mesh=mesh)
        run = TrainingRun(model, None)
        shards = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(run.weights)]
        losses = []
        for rows in (ROWS[:4], ROWS[4:]):
            losses.append(computed(run, rows, at_once=16).metrics["loss:sum"])
            for tree in (run.weights, run.gradients, run.adam.mu, run.adam.nu):
                assert [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(tree)] == shards
            losses.append(run.step(ADAM)["grad_norm:mean"])
        store, place = Store(pathlib.Path(sys.argv[1])), Place("run", "weights", name)
        engine = Engine(SamplingParams(), 1, 16, 4, net=model.net, eos=())
        decoding = engine.decoding_params(engine.policy_copy(run.whole().params))
        store.save(place, run, {})
    _, *saved = store.load(place.path, model, moments=True)  # by a thread of its own, which has no mesh
    assert same(tuple(saved), (run.weights, run.adam))
    assert [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(saved[0])] == shards
    largest = [max(np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
               for tree in (run.weights, run.adam, decoding)]
    return losses, jax.device_get(run.weights), largest

losses, weights, largest = trained(1, "one", True)
for in_place in (True, False):  # on TPUs they add up otherwise
    other_losses, other_weights, other_largest = trained(2, str(in_place), in_place)
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), weights, other_weights)
    assert all(2 * own == one for own, one in zip(other_largest, largest)), (largest, other_largest)
print("same")
"""


@pytest.mark.slow
def test_a_mesh_of_tensors_changes_nothing(run_python, tmp_path):
    done = run_python("-c", ON_A_MESH, str(tmp_path / "store"), devices=2)
    assert done.stdout.endswith("same\n"), done.stderr[-3000:]
