"""What a run asks of the devices' memory: slots by a share of it, and what is left for micro-batches."""

import contextlib
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, assign, default
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import bytes_on_device, make_mesh, over
from jaxrl_llm.models.model import describe, load_model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.training import offline
from jaxrl_llm.training.optimizers import build_optimizer
from jaxrl_llm.training.packing.planner import tokens_in
from jaxrl_llm.training.setup import memory, worker
from jaxrl_llm.training.setup import run as run_setup
from jaxrl_llm.training.setup.evaluation import build_evaluations
from jaxrl_llm.training.setup.sources import build_rewards
from jaxrl_llm.training.setup.specs import critic_optimizer_spec, optimizer_spec, rollout_spec
from tests.data.vl_folders import vl_folder

PROMPTS, WIDTH, LONGEST = 4, 16, 24


@pytest.fixture(scope="module")
def model():
    return load_model("embedded:sort")


def engine_of(model, slots=0) -> Engine:
    config = default()
    config.rollout.group_size, config.rollout.max_completion_length, config.rollout.slots = 4, LONGEST, slots
    return Engine(**vars(rollout_spec(config)), net=model.net, eos=(0,))


def held(model, slots: int) -> int:
    """Bytes of the parameters in float32, and of the keys and values of prompts and slots."""
    c = model.net.config
    token = 2 * c.layers * c.kv_heads * c.head_dim * 4
    return bytes_on_device(model.params) + token * (PROMPTS * WIDTH + slots * LONGEST)


@pytest.mark.parametrize(("slots", "given"), [(1, 0), (5, 0), (16, 0), (5, 3)])
def test_slots_by_a_share_of_the_memory(model, slots, given):
    """As many as fit, at most one for each completion, and no more than rollout.slots."""
    mesh, share = make_mesh(devices=jax.devices()[:1]), 0.5
    room = (held(model, slots) + 100) / share
    engine = engine_of(model, given)
    found = memory.with_fitting_slots(engine, model.params, share, room, PROMPTS, WIDTH, mesh)
    assert found.slots == (min(given, slots) if given else slots)
    more = memory.with_fitting_slots(engine, model.params, 1.0, 1e15, PROMPTS, WIDTH, mesh)
    assert more.slots == (given or 16)


@pytest.mark.slow
def test_images_that_are_no_tokens_are_counted(tmp_path):
    """Keys and values of one of each prompt, in the layer of a Llama 3.2 Vision that reads them."""
    model, mesh = describe(vl_folder(tmp_path / "mllama", "mllama")), make_mesh(devices=jax.devices()[:1])
    c, params = model.net.config, over(model.net.shapes(), mesh)
    features, token = 4 * 17, 2 * c.kv_heads * c.head_dim * 4
    images = PROMPTS * features * (token + 1)  # and which of them are seen
    room = bytes_on_device(params) + token * (c.layers - 1) * (PROMPTS * WIDTH + 5 * LONGEST) + images
    for missing, slots in ((0, 5), (1, 4)):
        found = memory.with_fitting_slots(engine_of(model), params, 1.0, room - missing, PROMPTS, WIDTH, mesh)
        assert found.slots == slots


def test_too_little_memory_for_a_slot(model):
    mesh = make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"rollout\.memory_fraction is 0\.25, of .* set it to 0\.5\d or more$"):
        memory.with_fitting_slots(engine_of(model), model.params, 0.25, 2 * held(model, 1) - 9, PROMPTS, WIDTH, mesh)
    with pytest.raises(ConfigError, match="or take shorter rows or fewer prompts"):
        memory.with_fitting_slots(engine_of(model), model.params, 1.0, 9.0, PROMPTS, WIDTH, mesh)


@pytest.mark.slow
def test_a_run_within_a_share_of_the_memory(root, tmp_path, monkeypatch, tiny_run):
    """It samples what it samples with all slots: bit for bit the same metrics, by more decode steps."""
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.logging.backends, config.total_steps = str(tmp_path / "run"), ("jsonl",), 1
    config.rollout.memory_fraction, config.eval.every = 0.5, 0
    c = load_model(config.model.path).net.config
    token = 2 * c.layers * c.kv_heads * c.head_dim * 4
    used, real = [], memory.with_fitting_slots

    def watched(engine, params, share, total, prompts, width, mesh):
        tokens = prompts * width + 9.5 * config.rollout.max_completion_length
        total = 2 * (bytes_on_device(params) + token * tokens)
        used.append(real(engine, params, share, total, prompts, width, mesh))
        return used[-1]

    monkeypatch.setattr(worker, "with_fitting_slots", watched)
    metrics = jaxrl_llm.train(config).metrics, tiny_run.metrics
    found, before = (next(record for record in records if "loss" in record) for records in metrics)
    assert used[-1].slots == 9
    for name in ("loss", "reward", "grad_norm", "completions/mean_length"):
        assert found[name] == before[name]


def test_the_memory_is_that_of_the_devices_of_a_mesh():
    """Not of the process's others, which train; of other processes, which do not tell, as much as of this one."""

    def mesh_of(*of_processes: int):
        devices = [
            SimpleNamespace(platform="gpu", process_index=index, memory_stats=lambda: {"bytes_limit": 100})
            for index in of_processes
        ]
        return SimpleNamespace(devices=np.array(devices, object).reshape(1, -1))

    assert memory.device_memory(mesh_of(0, 0)) == 200  # pyright: ignore
    assert memory.device_memory(mesh_of(0, 0, 1, 1)) == 400  # pyright: ignore
    machine = memory.device_memory(make_mesh(devices=jax.devices()[:1]))
    assert memory.device_memory(make_mesh(devices=jax.devices()[:2])) == machine


def test_evaluations_count_the_prompts_that_they_sample_at_once(model, monkeypatch):
    """As many as give a step's rows: more than a step's prompts, where each has fewer samples."""
    config, counts = default(), []
    config.rollout.memory_fraction, config.rollout.group_size, config.batch.prompts = 0.5, 8, 4
    config.eval.samples, config.eval.prompts = 4, 6

    def watched(engine, params, share, total, prompts, *others):
        counts.append((engine.group_size, prompts))
        return engine

    monkeypatch.setattr(worker, "with_fitting_slots", watched)
    mesh, rewards = make_mesh(devices=jax.devices()[:1]), [lambda completions, **_: [0.0] * len(completions)]
    with contextlib.closing(build_rewards(config, rewards)) as grader:
        build_evaluations(config, model, grader, None, mesh)
        config.eval.prompts = 40
        build_evaluations(config, model, grader, None, mesh)
    assert counts == [(1, 6), (4, 6), (1, 8), (4, 8)]


def test_what_a_run_leaves_free(model, monkeypatch):
    """A device's memory without parameters, gradients and moments, and with a copy of the reference."""
    config, size, mesh = default(), bytes_on_device(model.params), make_mesh(devices=jax.devices()[:1])

    def room(critic=None) -> float | None:
        optimizer = build_optimizer(optimizer_spec(config))
        of_critic = None if critic is None else build_optimizer(critic_optimizer_spec(config))
        return memory.microbatch_room(config, model, critic, optimizer, of_critic, mesh)

    assert room() is None  # a CPU does not tell
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 10 * size})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config.algorithm.beta = 0.0
    counts = 64  # bytes of the numbers of updates, at most

    def is_left(sizes: float) -> bool:
        return -counts <= room() - sizes * size <= 0

    assert is_left(10 - 4)
    # Of schedule_free_adamw the point of the gradients besides.
    for name, moments in (
        ("lion", 1), ("sgd", 1), ("ademamix", 3), ("adopt", 2), ("schedule_free_adamw", 3), ("prodigy", 4)
    ):  # fmt: skip
        config.optimizer.name = name
        assert is_left(10 - 2 - moments), name
    config.optimizer.name = "adafactor"  # which keeps sums of rows and columns
    assert 10 - 2 - 0.1 < room() / size < 10 - 2
    config.optimizer.name, config.optimizer.b1 = "sgd", 0.0
    assert is_left(10 - 2)
    config.optimizer.name, config.optimizer.b1 = "adamw", 0.9
    config.optimizer.moment_dtype, config.algorithm.beta = "bfloat16", 0.1
    assert is_left(10 - 4)
    config.optimizer.moment_dtype = "float8"
    assert (10 - 3 - 0.55) * size < room() < (10 - 3 - 0.5) * size  # with a scale for each block
    config.optimizer.offload = True
    assert is_left(10 - 3)
    critic, config.optimizer.moment_dtype = model, "float32"
    assert -counts <= room(critic) - (10 - 3 - 2) * size <= 0
    config.critic.offload_optimizer = False
    assert -counts <= room(critic) - (10 - 3 - 4) * size <= 0


def test_a_reference_that_is_read_before_the_first_step_takes_no_room_of_updates(model, monkeypatch):
    config, size, mesh = default(), bytes_on_device(model.params), make_mesh(devices=jax.devices()[:1])
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 10 * size})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config.algorithm.name, config.algorithm.loss = "preference", "dpo"
    optimizer = build_optimizer(optimizer_spec(config))
    kept = memory.microbatch_room(config, model, None, optimizer, None, mesh)
    config.data.precompute_reference = True
    assert memory.microbatch_room(config, model, None, optimizer, None, mesh) == kept + size


@pytest.mark.parametrize("path", ["task:sort", pytest.param("task:sort_pairs", marks=pytest.mark.slow)])
def test_passes_without_gradients_take_the_rows_that_memory_has_room_for(model, monkeypatch, path):
    """Of a batch that is not packed, whose update is split by what a device has left."""
    config, mesh, sizes = default(), make_mesh(devices=jax.devices()[:1]), []
    config.data.path, config.batch.packing, config.eval.every, config.batch.prompts = path, "false", -1, 8
    if path == "task:sort_pairs":
        config.algorithm.name, config.algorithm.loss = "preference", "dpo"
        config.algorithm.beta, config.data.eval_split, config.eval.every = 0.1, "validation", 0
        config.data.precompute_reference = True
    scored = []
    monkeypatch.setattr(offline, "with_reference", lambda batch, *given: scored.append(batch) or given[2])
    for room in (None, 1.0):
        monkeypatch.setattr(run_setup, "microbatch_room", lambda *_, room=room: room)
        with jax.set_mesh(mesh), contextlib.closing(run_setup.build(config, mesh)) as run:
            own = run.source.learner.batch if path == "task:sort" else run.source.batch
            assert own == run.batch and scored[-1:] in ([], [own])
            sizes.append(own.forward_rows)
            if run.evaluation is not None:
                assert all(evaluation.rows == own.forward_rows for evaluation in run.evaluation.sets)
    assert sizes == ([64, 1] if path == "task:sort" else [16, 2])
    assert len(scored) == (0 if path == "task:sort" else 2)


def test_rows_of_a_micro_batch_that_are_not_packed(model):
    """The most that fit, of those that divide the minibatch into whole shares of the shards."""
    net, width = model.net.config, 100
    rooms = [2.0**n for n in range(16, 40)]
    found = [memory.fitting_rows(room, net, 24, width, multiple=4, shards=2) for room in rooms]
    assert found == sorted(found) and set(found) == {4, 8, 12, 24}
    for room, rows in zip(rooms, found, strict=True):
        assert rows == 4 or rows // 2 * width <= tokens_in(room, net, gradients=True)
    assert memory.fitting_rows(None, net, 24, width, 4, 2) == 0
    balanced = dataclasses.replace(net, experts=4, experts_per_token=2, expert_ffn=8, router_aux_loss_coef=0.1)
    assert memory.fitting_rows(1e6, balanced, 24, width, 4, 2) == 0


@pytest.mark.parametrize("key", run_setup.OFFLOADS)
def test_offloading_needs_memory_of_the_host(monkeypatch, key):
    config = default()
    assign(config, key, True)
    assert run_setup.offloaded(default(), None, None) == (None, None)
    monkeypatch.setattr(run_setup, "has_host_memory", lambda: False)
    with pytest.raises(ConfigError, match=f"{key} is true, but the memory of a cpu here has no part in the host's"):
        run_setup.offloaded(config, None, None)
