"""The plan of a run: exact where it says so, and what it counts in programs is counted right."""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxrl_llm.config import ConfigError, assign, batch_rows, default
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data import shapes
from jaxrl_llm.distributed.devices import DEVICES, named
from jaxrl_llm.distributed.sharding import AXES, bytes_on_device
from jaxrl_llm.models import families
from jaxrl_llm.models.adapters.lora import split
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.kernels.fused_attention import flash_attention, splash_attention
from jaxrl_llm.models.mixers import context_attention
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.tools.plan import hlo
from jaxrl_llm.tools.plan.advice import _changes, advice
from jaxrl_llm.tools.plan.compiler import Compiler, traced_flops
from jaxrl_llm.tools.plan.graders import compile_graders
from jaxrl_llm.tools.plan.planned import describe_for, floors, make_plan, tree_size
from jaxrl_llm.tools.plan.programs import converted_bytes, held_bytes
from jaxrl_llm.tools.plan.sampling import decodes_beside_updates, make_engine, policies_of
from jaxrl_llm.tools.plan.shapes import describe
from jaxrl_llm.tools.plan.split import Split, balances, least_seconds, make_split
from jaxrl_llm.tools.plan.step import Step, images_shape
from jaxrl_llm.tools.plan.text import bytes_text, lines, seconds_text, verdict
from jaxrl_llm.tools.plan.topology import _cuda_folder, _described, slice_shape, target, traced_as_on
from jaxrl_llm.training.reference import start_reference
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.models import build_model
from jaxrl_llm.training.setup.run import build, make_optimizer, sized_critic_updates
from jaxrl_llm.training.setup.sources import build_rewards
from jaxrl_llm.training.setup.specs import reference_spec, update_spec
from jaxrl_llm.training.step import minibatches_of
from jaxrl_llm.training.update import init_state, merge_frozen

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
}
# embedding, 2 x (q, k, v, o, gate, up, down, two norms), last norm
PARAMETERS = 64 * 32 + 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder that holds config.json alone."""
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


def small(folder):
    config = default()
    config.model.path = str(folder)
    config.rollout.max_prompt_length, config.rollout.max_completion_length, config.rollout.group_size = 8, 8, 2
    config.batch.prompts, config.batch.packing, config.algorithm.beta = 4, "false", 0.01
    return config


@pytest.fixture(scope="module")
def planned(folder):
    config = small(folder)
    return make_plan(config, target(config, "h100", 1, simulate=True))


def test_what_is_held_all_the_time_is_exact(planned):
    assert planned.parameters == planned.trained == PARAMETERS
    assert planned.held["parameters, trained"] == planned.held["reference"] == 4 * PARAMETERS
    counts = 4 + 4 + 4  # of the state, of adam and of the schedule
    assert planned.held["optimizer"] == 2 * 4 * PARAMETERS + counts


def test_caches_of_sampling_are_exact(planned):
    tokens = 2 * 2 * 2 * 8 * 2  # keys and values, layers, kv heads, head dim, bytes of bfloat16
    assert planned.sampling["keys and values of prompts"] == 4 * 8 * tokens
    assert planned.sampling["keys and values of completions"] == 4 * 2 * 8 * tokens


@pytest.mark.slow
def test_gradients_of_a_micro_batch_are_planned_as_the_device_holds_them(folder):
    """Beside the sums on a TPU and on one GPU, where CPUs add to these in the backward pass."""
    config = small(folder)
    config.batch.microbatch_rows = 2
    cpu, h100, v5e = (
        make_plan(config, target(config, name, 1, simulate=True), only="update").programs[0].temporaries
        for name in ("cpu", "h100", "v5e")
    )
    assert h100 == v5e > cpu + 4 * PARAMETERS


@pytest.mark.slow
def test_sampling_in_eight_bits_is_planned(folder, planned):
    """A byte for each number of the matrices and of keys and values, which is what decoding reads."""
    config = small(folder)
    config.rollout.weights_dtype, config.rollout.cache_dtype = "int8", "fp8"
    config.model.scan_layers = False  # of the layers that are trained
    with pytest.raises(ConfigError, match=r"rollout.weights_dtype is int8, .* set token_truncate"):
        make_plan(config, target(config, "h100", 1, simulate=True), only="rollout")
    config.algorithm.importance_correction = "token_truncate"
    found = make_plan(config, target(config, "h100", 1, simulate=True), only="rollout")
    matrices = PARAMETERS - 64 * 32 - 5 * 32
    columns = 2 * (32 + 2 * 16 + 32 + 2 * 64 + 32)
    before, own = planned.sampling, found.sampling
    saved = before["the sampler's parameters"] - own["the sampler's parameters"]
    assert saved == 2 * matrices - matrices - 4 * columns
    for name in ("keys and values of prompts", "keys and values of completions"):
        assert own[name] == before[name] // 2
    assert floors(found).reading < floors(planned).reading
    decode = next(x for x in found.programs if x.name == "rollout: decode")
    assert decode.temporaries < 2 * matrices  # not all of them at once, wide


def test_experts_in_four_bits_are_converted_a_layer_at_once():
    """4 experts of 32 x 24 numbers in bfloat16, of which each of two devices has a half; 8 bits are not converted."""
    sizes = {"vocab_size": 64, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64}
    config = ModelConfig(**sizes, experts=4, experts_per_token=2, expert_ffn=24, dtype="bfloat16")
    axes = dict.fromkeys(AXES, 1)
    for kind, expert, expected in (("nf4", 1, 6144), ("mxfp4", 2, 3072), ("int8", 1, 0), ("none", 1, 0)):
        mesh = AbstractMesh(tuple((axes | {"expert": expert}).values()), tuple(axes))
        net = Net(dataclasses.replace(config, quantize_experts=kind))
        assert converted_bytes(net, mesh) == expected, kind

    def temporaries(name, simulated):
        compiler = Compiler(0, 1, simulated, converted=6144)
        compiler.add(name, jax.jit(jnp.sin), (jax.ShapeDtypeStruct((4,), jnp.float32),))
        return compiler.programs[0].temporaries

    exact = temporaries("update", False)
    assert (temporaries("update", True), temporaries("rollout: cast", True)) == (exact + 6144, exact)


def ahead(config, steps):
    config.rollout.staleness, config.algorithm.importance_correction = steps, "token_truncate"
    return config


COPY = 2 * PARAMETERS + 2 * 5 * 32  # bytes, in bfloat16 but for the scales of five norms


@pytest.mark.slow
def test_policies_that_batches_are_sampled_from_ahead_are_planned(folder, planned):
    """One device samples a batch while it trains on another: what it samples with is there then too."""
    config = ahead(small(folder), 2)
    found = make_plan(config, target(config, "h100", 1, simulate=True))
    assert found.held == planned.held | {"policies of batches that wait": 2 * COPY}
    assert found.sampling == {"a copy of the policy": COPY} | planned.sampling
    more = {x.name: x.resident for x in found.programs}
    less = {x.name: x.resident for x in planned.programs}
    assert more["rollout: decode"] == less["rollout: decode"] + 3 * COPY
    assert more["update"] == less["update"] + 2 * COPY + sum(planned.sampling.values())
    advised, before = ({x.change: x for x in advice(plan, compiled=False)} for plan in (found, planned))
    assert advised.pop("--config.rollout.staleness=1").saves == COPY
    slots = "--config.rollout.slots=4"
    assert advised.pop(slots).saves == planned.sampling["keys and values of completions"] // 2
    before.pop(slots)
    more = found.peak.peak - planned.peak.peak
    assert advised == {change: x._replace(peak=x.peak + more) for change, x in before.items()}


@pytest.mark.parametrize("keys", [{}, {"lora.rank": 4}, {"rollout.weights_dtype": "int8"}])
def test_copies_of_the_policy_are_those_of_a_run(keys):
    config, mesh = ahead(default(), 3), build_mesh(default())
    for name, value in keys.items():
        assign(config, name, value)
    with jax.set_mesh(mesh):
        model = build_model(config, mesh)
        engine = make_engine(config, model.net, False)
        frozen, own = split(engine.policy_copy(model.params))
        there, elsewhere = (policies_of(config, engine, model.params, mesh, shared) for shared in (True, False))

    def kinds(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert kinds(there.own) == kinds(elsewhere.own) == kinds(own)
    assert there.frozen == {} and kinds(elsewhere.frozen) == kinds(frozen)
    assert bool(frozen) == ("lora.rank" in keys) and there.waiting == 3
    config.rollout.update_in_flight = True
    assert policies_of(config, engine, model.params, mesh, True).waiting == 1
    config.rollout.processes = 1
    assert policies_of(config, engine, model.params, mesh, False).waiting == 0


def test_several_devices_of_a_process_sample_and_train_in_turn():
    mesh: Any = AbstractMesh((2, 1, 1, 1, 1), AXES)
    alone, together = (SimpleNamespace(mesh=mesh, host=size) for size in (1, 2))
    assert decodes_beside_updates(alone) and not decodes_beside_updates(together)


@pytest.mark.slow
def test_devices_that_only_sample_adapters_hold_the_rest_once(folder):
    config = ahead(small(folder), 2)
    config.rollout.devices, config.lora.rank = 1, 4
    on = target(small(folder), "h100", 1, simulate=True)
    found = make_plan(config, on, only="sampling")
    adapters = bytes_on_device(describe_for(config, on).state.params)
    assert found.held == {
        "the sampler's frozen parameters": 4 * PARAMETERS,
        "policies of batches that wait": 2 * adapters,
    }
    assert found.sampling["a copy of the policy"] == adapters
    decode = next(x for x in found.programs if x.name == "rollout: decode")
    assert decode.resident == 4 * PARAMETERS + 3 * adapters


def test_programs_of_a_step(planned):
    times = {x.name: x.times for x in planned.programs}
    assert times["update"] == times["reference"] == times["rollout: prefill"] == 1
    assert times["rollout: decode"] == 8
    for program in planned.programs:
        assert program.peak >= program.arguments > 0
        assert program.peak >= sum(planned.held.values()), program.name


def test_the_products_of_the_reference_pass_are_counted(planned):
    found = next(x for x in planned.programs if x.name == "reference")
    weights = PARAMETERS - 64 * 32 - 5 * 32
    layers = 2 * 8 * 16 * weights
    attention = 2 * 2 * 2 * 8 * 16 * 16 * 4 * 8  # scores and sums, 2 layers, 8 rows, 4 heads
    head = 2 * 8 * 8 * 32 * 64  # of completions alone
    entropies = 2 * 8 * 8 * 64  # on CPUs their sum over the vocabulary is a product
    assert found.flops == layers + attention + head + entropies
    # One device computes it all, nothing twice, and no entropy, which nobody reads here.
    assert found.compiled_flops == found.flops - entropies


def test_the_report_names_what_matters(planned):
    text = "\n".join(lines(planned, advice(planned, compiled=False)))
    parts = ("parameters, trained", "optimizer", "keys and values", "least time of a step", "fits", "largest")
    for part in (*parts, "8 rows of 16 tokens, 8 of them for the prompt; 8 rows at a time"):
        assert part in text, part
    assert floors(planned).step > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "peak", "said"),
    [
        ("h100", 58e9, False),
        ("h100", 65e9, True),
        ("h100", 79e9, True),
        ("v5p", 90e9, False),
    ],
)
def test_the_verdict_knows_what_jax_takes_of_a_gpu(name, peak, said):
    device, program = named(name), SimpleNamespace(peak=peak, temporaries=0.0, name="update")
    plan: Any = SimpleNamespace(target=SimpleNamespace(device=device, exact=True), peak=program, programs=[program],
                                capacity=0.9 * device.memory)  # fmt: skip
    assert ("of that JAX takes 60 GB unless the run sets XLA_CLIENT_MEM_FRACTION=0.92" in verdict(plan)) == said
    here = device._replace(memory=device.memory - 1)  # what JAX has taken of one at hand
    plan.target.device = here
    assert "JAX takes" not in verdict(plan)


def test_the_report_says_that_images_are_not_counted(planned):
    plan = make_plan(small("embedded:shapes"), target(default(), "h100", 1, simulate=True))
    said = "planned without images: what encodes those of rows, and holds them, comes on top (`plan --image_tokens=N` "
    said += "counts those of N tokens a prompt)"
    assert list(lines(plan))[-1] == said and said not in lines(planned)


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_images_are_planned_as_a_run_has_them(root, tmp_path, vision):
    """The shapes of a real step's images, of which a plan counts the bytes; what encodes them is a program."""
    config = load_config_file(f"{root / 'configs' / 'vision_grpo.py'}:tiny")
    config.output_dir, config.checkpoint.every, config.eval.every = str(tmp_path / "run"), 0, 0
    config.logging.backends, config.model.vision, config.batch.minibatches = (), vision, 2
    on = target(config, "cpu", 1)
    with jax.set_mesh(on.mesh), contextlib.closing(build(config, on.mesh)) as run:
        tokens = shapes.IMAGE_TOKENS
        found = make_plan(run.config, on, image_tokens=tokens)
        state = merge_frozen(run.state, run.frozen)
        batch = run.source.next(state, jax.random.key(0)).batch
        minibatch = minibatches_of(run, batch, (0,), 2, 1)[0]
        described = describe_for(run.config, on)
        step = Step(run.config, described, on, found.widths, tokens)
        for rows, images in ((batch.rows, batch.inputs.images), (minibatch.rows, minibatch.inputs.images)):
            planned = images_shape(step, rows)
            assert jax.tree.map(jnp.shape, planned) == jax.tree.map(jnp.shape, images)
            assert bytes_on_device(planned) == bytes_on_device(images)
    programs = {x.name: x for x in found.programs}
    without = {x.name: x for x in make_plan(config, on).programs}
    prompts, pixels = config.batch.prompts, 24 * 24 * 3 * 4
    of_prompts = prompts * (pixels + 4)
    assert programs["rollout: prefill"].arguments - without["rollout: prefill"].arguments == of_prompts
    assert programs["rollout: prefill"].flops > without["rollout: prefill"].flops
    width, rows = described.net.config.width, batch_rows(config)
    held = prompts * (tokens * width * 4 if vision == "frozen" else pixels) + 8 * rows
    assert programs["update"].arguments - without["update"].arguments == held // 2
    assert (programs["update"].flops == without["update"].flops) == (vision == "frozen")
    assert ("images" in programs) and programs["images"].times == 1


def test_images_that_a_plan_has_no_place_for_are_refused(folder):
    on = target(default(), "h100", 1, simulate=True)
    with pytest.raises(ConfigError, match="images of 4 tokens are planned with, but the model reads text alone"):
        make_plan(small(folder), on, image_tokens=4)
    with pytest.raises(ConfigError, match="images of 12 tokens do not fit prompts or rows of 8; raise these"):
        make_plan(small("embedded:shapes"), on, image_tokens=12)


def test_steps_of_epochs_are_not_known(planned):
    config = planned.config.copy_and_resolve_references()
    config.num_epochs = 2.0
    text = "\n".join(lines(planned._replace(config=config)))
    assert "run       2 epochs in steps of 1 update" in text and f"{config.total_steps} steps" not in text


@pytest.mark.slow
def test_the_report_says_how_many_packed_tokens_an_update_takes(folder):
    """On accelerators memory decides, where no key does."""
    config = small(folder)
    config.batch.packing = "true"
    for tokens, part in ((0, "packed, 96 tokens at a time"), (48, "packed, 48 tokens at a time")):
        config.batch.microbatch_tokens = tokens
        found = make_plan(config, target(config, "h100", 1, simulate=True), only="logps")
        assert part in "".join(itertools.islice(lines(found), 4))


def test_advice_is_computed(planned):
    found = {x.change: x.saves for x in advice(planned, compiled=False)}
    assert found["--config.optimizer.moment_dtype=bfloat16"] == 2 * 2 * PARAMETERS
    wide, scales = 3 * 2 * 32 * 64, 2 * (32 + 32 + 64)  # of the arrays that are not too small: gate, up and down
    assert found["--config.optimizer.moment_dtype=float8"] == 2 * (3 * wide - 4 * scales)
    assert found["--config.model.param_dtype=bfloat16"] == 2 * 2 * PARAMETERS  # of the policy and of the reference
    matrices = [2 * 32 * 32, 2 * 32 * 16, 2 * 32 * 16, 2 * 32 * 32, 2 * 32 * 64, 2 * 32 * 64, 2 * 64 * 32]
    halved = 2 * 4 * sum(matrices) + 2 * 4 * 64 * 32  # policy, reference: norms stay whole
    assert found["--devices=2 --config.mesh.fsdp=2"] == halved


def test_advice_on_a_mesh_can_be_followed_as_it_is_written(planned):
    config, mesh = planned.config.copy_and_resolve_references(), AbstractMesh((2, 1, 1, 1, 1), AXES)
    for data, change in ((-1, "--config.mesh.fsdp=2"), (2, "--config.mesh.fsdp=2 --config.mesh.data=1")):
        config.mesh.data = data
        two = planned._replace(config=config, target=planned.target._replace(mesh=mesh))
        assert change in [text for text, *_ in _changes(two)]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"optimizer.offload": True},
        {"lora.rank": 4},
        {"optimizer.name": "adafactor"},
        pytest.param({"optimizer.moment_dtype": "float8", "optimizer.offload": True}, marks=pytest.mark.slow),
    ],
)
def test_shapes_are_those_of_a_real_run(change):
    config = default()
    for name, value in change.items():
        section, _, leaf = name.partition(".")
        config[section][leaf] = value
    config.algorithm.beta = 0.1
    mesh = build_mesh(config)
    with jax.set_mesh(mesh):
        shapes = describe(config, mesh, "float32", False)
        model = build_model(config, mesh)
        frozen, trainable = split(model.params)
        state = init_state(trainable, make_optimizer(config), mesh, config.optimizer.offload)
        reference = start_reference(reference_spec(config), model.params, model.net.config.lora)
    for found, real in ((shapes.state, state), (shapes.frozen.params, frozen), (shapes.reference, reference)):
        assert jax.tree.structure(found) == jax.tree.structure(real)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(real), strict=True):
            assert (x.shape, x.dtype, x.sharding.memory_kind) == (y.shape, y.dtype, y.sharding.memory_kind)
    assert bytes_on_device(shapes.state) + bytes_on_device(shapes.state, host=True) == sum(
        x.nbytes for x in jax.tree.leaves(state)
    )


def test_a_model_is_planned_as_it_is_read(folder, tmp_path, monkeypatch):
    """With the entries of model.overrides, a family of model.register, and the revision."""
    config, on = small(folder), target(small(folder), "h100", 1, simulate=True)
    config.model.overrides = "num_hidden_layers=1"
    one_layer = tree_size(describe_for(config, on).state.params)
    assert PARAMETERS - one_layer == (PARAMETERS - 65 * 32) / 2
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    (tmp_path / "family.py").write_text("from jaxrl_llm.models.families.llama import *\nMODEL_TYPE = 'mine'\n")
    config.model.register, config.model.overrides = (str(tmp_path / "family.py"),), "model_type='mine'"
    assert tree_size(describe_for(config, on).state.params) == PARAMETERS
    config.model.path, config.model.revision = "owner/name", "v2"
    asked = []
    monkeypatch.setattr(hf, "_download", lambda name, patterns, revision: asked.append((name, revision)) or folder)
    describe_for(config, on)
    assert asked == [("owner/name", "v2")]


@pytest.mark.parametrize(("device", "simulate", "host"), [("h100", True, 8), ("v5e", True, 4), ("cpu", False, None)])
def test_devices_of_a_host(folder, device, simulate, host):
    assert target(small(folder), device, 1, simulate).host == host


def test_micro_batches_of_a_critic_are_its_own(root):
    config = load_config_file(str(root / "configs" / "ppo.py"))
    updates = update_spec(config)
    assert sized_critic_updates(config, dataclasses.replace(updates, microbatch_rows=64)).microbatch_rows == 64
    config.critic.microbatch_rows = 16
    assert sized_critic_updates(config, dataclasses.replace(updates, microbatch_rows=64)).microbatch_rows == 16


@pytest.mark.parametrize("rank", [0, 4])
def test_offloaded_parameters_are_on_the_host(rank):
    config = default()
    config.lora.rank = rank
    mesh = build_mesh(config)
    with jax.set_mesh(mesh):
        held = describe(config, mesh, "float32", False)
        config.model.offload = True
        shapes = describe(config, mesh, "float32", False)
    parameters = held.state.params, held.frozen
    assert bytes_on_device((shapes.state.params, shapes.frozen)) == 0
    assert bytes_on_device((shapes.state, shapes.frozen), host=True) == bytes_on_device(parameters)
    assert bytes_on_device(shapes.state) == bytes_on_device(held.state) - bytes_on_device(held.state.params)


def test_what_a_reference_shares_with_an_offloaded_model_comes_to_the_device(folder):
    config = small(folder)
    config.lora.rank, config.model.offload = 4, True
    found = make_plan(config, target(config, "h100", 1, simulate=True), only="logps")
    reference = next(x for x in found.programs if x.name == "reference")
    assert reference.resident == sum(found.held.values()) and reference.arguments > 4 * PARAMETERS


def test_teachers_are_held_and_rate_every_row(folder):
    config = small(folder)
    config.teacher.path, config.teacher.others = str(folder), (f"math={folder}",)
    found = make_plan(config, target(config, "h100", 1, simulate=True), only="logps")
    assert found.held["teachers"] == 2 * 2 * PARAMETERS  # two of them, in bfloat16
    flops = {x.name: x.flops for x in found.programs}
    assert flops["teacher"] == flops["teacher math"] == flops["reference"]
    config.teacher.offload = True
    shapes = describe_for(config, target(config, "h100", 1, simulate=True))
    teachers = [teacher.params for teacher in shapes.teachers.values()]
    assert (bytes_on_device(teachers), bytes_on_device(teachers, host=True)) == (0, 2 * 2 * PARAMETERS)
    config.teacher.path, config.teacher.others = "server(url='http://localhost:8000/v1', model='m')", ()
    assert not describe_for(config, target(config, "h100", 1, simulate=True)).teachers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_a_teacher_with_another_tokenizer_reads_longer_rows(folder, name):
    config = small(folder)
    config.algorithm.name, config.teacher.path, config.teacher.form = name, str(folder), "uld"
    config.teacher.uld_hybrid = True
    programs = {x.name: x.flops for x in make_plan(config, target(config, "h100", 1, simulate=True)).programs}
    assert programs["the teacher's spans"] > 0
    if name == "grpo":
        assert 1.5 * programs["reference"] < programs["teacher"] < 3 * programs["reference"]  # 32 tokens a row for 16


def test_the_policy_as_its_teacher_holds_its_copy_and_reads_longer_rows(folder):
    config = small(folder)
    config.teacher.path, config.teacher.context, config.teacher.max_prompt_length = "self", "success", 24
    on = target(config, "h100", 1, simulate=True)
    found = make_plan(config, on, only="logps")
    assert not found.held.get("teachers")
    flops = {x.name: x.flops for x in found.programs}
    assert 1.5 * flops["reference"] < flops["teacher"] < 3 * flops["reference"]  # 32 tokens a row for 16
    config.teacher.path = "self(rate=0.05)"
    held = make_plan(config, on, only="logps").held
    assert held["teachers"] == held["reference"] > 0
    config.teacher.offload = True
    assert bytes_on_device(describe_for(config, on).teachers[""].own) == 0


@pytest.mark.slow
def test_what_scores_completions_is_held_and_runs(folder):
    """Of the 8 completions of a step; two judges share a model."""
    config, on = small(folder), target(small(folder), "h100", 1, simulate=True)
    reward_model = f"model:{folder}(rows=3)"
    judge = f"judge(path='{folder}', max_length=40, parameters={{'max_tokens': 5}})"
    config.rewards.functions = (reward_model, judge, f"pairwise_judge(path='{folder}')", "exact_match")
    scored = 2 * (PARAMETERS + 32)  # bytes, of bfloat16, with the score head
    shapes = describe_for(config, on)
    assert [bytes_on_device(x.own) for x in shapes.graders] == [scored, 2 * PARAMETERS, 0]
    assert (shapes.graders[2].width, shapes.graders[2].reply) == (512, 512)  # as many positions as the model has
    assert held_bytes(shapes, "sampling") == scored + 2 * PARAMETERS
    assert held_bytes(shapes) == held_bytes(describe_for(small(folder), on)) + scored + 2 * PARAMETERS
    with traced_as_on(on):
        shapes = shapes._replace(graders=shapes.graders[:2])
        found = {x.name: x for x in compile_graders(Step(config, shapes, on, (8, 16)), held_bytes(shapes))}
    assert found[f"reward model {folder.name}"].times == 3
    decode = found["judge judge: decode"]
    assert (found["judge judge: prefill"].times, decode.times) == (1, 5)
    assert decode.parameters_read == 2 * PARAMETERS
    assert decode.caches_read == (40 + 5) * 32 * 2 * 2 * 2 * 8 * 2
    assert all(x.peak >= held_bytes(shapes) for x in found.values())
    config.rewards.functions = (f"model:{folder}(offload=True)",)
    offloaded = describe_for(config, on)
    assert held_bytes(offloaded, "sampling") == 0 and bytes_on_device(offloaded.graders[0].own, host=True) == scored


@pytest.mark.slow
def test_what_scores_completions_is_in_the_report(folder):
    config = small(folder)
    config.rewards.functions = (f"pairwise_judge(path='{folder}', max_length=24, rows=2)", f"model:{folder}")
    found = make_plan(config, target(config, "h100", 1, simulate=True), only="sampling")
    assert found.held == {"reward models and judges": 2 * (2 * PARAMETERS + 32)}
    decode = next(x for x in found.programs if x.name == "judge pairwise_judge: decode")
    assert decode.times == 24 * 4  # 4 prompts of 2 completions, in both orders
    text = "\n".join(lines(found))
    assert "  reward models and judges" in text and "judge pairwise_judge: decode" in text


def test_what_scores_completions_is_planned_as_it_is_loaded(tmp_path):
    config, mesh = default(), build_mesh(default())
    config.rewards.functions = ("judge(path='embedded:sort', max_length=64)", f"model:{tmp_path}")
    with jax.set_mesh(mesh):
        model = load_model("embedded:sort", head="score")
        save_hf(model, tmp_path, overwrite=True)
        judge, reward = describe(config, mesh, "float32", True).graders
        loaded = build_rewards(config).functions
    assert judge.width == judge.reply == 64 and judge.name == "judge judge"
    for found, real in ((judge.params, loaded[0].judge.endpoint.model.params), (reward.params, loaded[1].model.params)):
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (found, real)]
        assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_greedy_completions_that_others_are_compared_with_are_sampled_too(folder):
    config, on = small(folder), target(small(folder), "h100", 1, simulate=True)
    config.algorithm.advantage, config.algorithm.loss = "remax", "reinforce"
    config.algorithm.aggregation = "sequence"
    found = {x.name: x for x in make_plan(config, on, only="rollout").programs}
    sampled, greedy = found["rollout: decode"], found["greedy rollout: decode"]
    assert (sampled.times, greedy.times) == (8, 8) and greedy.parameters_read == sampled.parameters_read
    token = 2 * 2 * 2 * 8 * 2
    assert (sampled.caches_read, greedy.caches_read) == (4 * (8 + 2 * 8) * token, 4 * (8 + 8) * token)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 4])
def test_distributions_of_a_teacher_are_arguments_of_the_update(folder, top_k):
    config = small(folder)
    on = target(config, "h100", 1, simulate=True)
    before = make_plan(config, on, only="update").programs[0].arguments
    config.teacher.path, config.teacher.form, config.teacher.top_k = str(folder), "divergence", top_k
    rows, width, vocab, size = 8, 16, 64, 32
    whole = 2 * (rows * width * size + size * vocab)  # what its head reads, and the head, in bfloat16
    likeliest = (4 + 4) * rows * width * top_k  # ids and log-probs
    assert make_plan(config, on, only="update").programs[0].arguments - before == (likeliest if top_k else whole)


@pytest.mark.parametrize("name", ["dpo", "ppo", "grpo_lora"])
def test_held_bytes_of_other_algorithms(name, root):
    config = load_config_file(str(root / "configs" / f"{name}.py"))
    on = target(config, "h100", 1)
    shapes = describe_for(config, on)
    parameters, trained = (
        sum(x.size for x in jax.tree.leaves(tree)) for tree in (shapes.net.plain.shapes(), shapes.state.params)
    )
    frozen = parameters if trained != parameters and name == "grpo_lora" else 0
    # parameters and two moments, then the reference, or the critic (a head less) with its own moments
    copies = {"dpo": 4, "ppo": 7, "grpo_lora": 3}[name]
    assert held_bytes(shapes) == pytest.approx(4 * (frozen + copies * trained), rel=0.05)


def test_a_replay_buffer_is_held_by_every_device(folder):
    config = small(folder)
    without, width = held_bytes(describe_for(config, on := target(config, "h100", 1))), 16
    config.algorithm.replay_groups = 100
    for mesh in (None, AbstractMesh((2, 1, 1, 1, 1), AXES)):
        shapes = describe_for(config, on, mesh)
        # Tokens and segments, and four numbers of each token; a priority of each group.
        assert bytes_on_device(shapes.replay) == 4 * (6 * 100 * config.rollout.group_size * width + 100)
    assert held_bytes(describe_for(config, on)) - without == bytes_on_device(shapes.replay)


@pytest.mark.slow
def test_a_critic_with_passes_of_its_own_is_planned(folder, root):
    """Its updates are programs of their own, as often as training makes them, and leave the policy's without it."""
    config = small(folder)
    config.algorithm.name, config.algorithm.advantage = "ppo", "ppo"
    on = target(config, "h100", 1, simulate=True)
    (joint,) = make_plan(config, on, only="update").programs
    config.critic.num_iterations = 3
    more = {x.name: x for x in make_plan(config, on, only="update").programs}
    assert [(name, x.times) for name, x in more.items()] == [("update", 1), ("update of the critic", 2)]
    assert more["update"].flops == joint.flops
    config.critic.minibatches = 2
    apart = {x.name: x for x in make_plan(config, on, only="update").programs}
    assert apart["update of the critic"].times == 6
    assert apart["update"].flops < 0.9 * joint.flops


def test_unknown_devices_and_meshes_that_do_not_fit(folder):
    with pytest.raises(ConfigError, match=r"h200.*the closest is h100"):
        named("h10")
    config = small(folder)
    config.mesh.fsdp = 3
    with pytest.raises(ConfigError, match="mesh"):
        target(config, "h100", 1)
    with pytest.raises(ConfigError, match="process of its own"):
        target(config, "h100", 5)
    config.mesh.fsdp, config.model.path = 1, str(folder.parent)
    with pytest.raises(ConfigError, match=r"config\.json"):
        make_plan(config, target(config, "h100", 1, simulate=True))


def test_the_whole_of_a_split_run_is_no_plan(folder):
    config = small(folder)
    plan = target(config, "h100", 1, simulate=True)
    for key in ("devices", "processes"):
        config = small(folder)
        config.rollout[key] = 1
        with pytest.raises(ConfigError, match=rf"rollout\.{key} is 1: this is a plan of devices that do all"):
            make_plan(config, plan)


def test_processes_that_only_sample_need_their_number(folder):
    config = small(folder)
    config.rollout.processes = 1
    for count in (None, 1, 3):
        config.processes.count = count
        with pytest.raises(ConfigError, match=rf"--devices=4 are not those of processes\.count={count}"):
            make_split(config, "h100", 4, simulate=True)
    config.rollout.processes, config.rollout.devices = 0, 4
    with pytest.raises(ConfigError, match=r"rollout\.devices is 4, but it takes fewer than --devices=4"):
        make_split(config, "h100", 4, simulate=True)


def test_a_split_is_one_that_training_takes_on_as_many_hosts(folder):
    config = small(folder)
    config.rollout.devices = 40
    hosts = r"of 16 hosts of 4: set it to 0, processes\.count=16 and rollout\.processes=10"
    with pytest.raises(ConfigError, match=rf"rollout\.devices is 40, .*--devices=64 of v6e are {hosts}"):
        make_split(config, "v6e", 64, simulate=True)
    config.rollout.devices, config.rollout.processes, config.processes.count = 0, 1, 2
    with pytest.raises(ConfigError, match=r"processes\.count is 2, of 32 devices each.* set it to 16 or more"):
        make_split(config, "v6e", 64, simulate=True)


@pytest.mark.parametrize(
    ("device", "count", "host"), [("h100", 64, 8), ("v6e", 64, 4), ("v6e", 8, 8), ("v5p", 8, 4), ("cpu", 4, 4)]
)
def test_devices_of_each_host(device, count, host):
    assert named(device).host(count) == host


def test_halves_and_their_balance(planned):
    """By hand: what scales with the devices and what stays, in one process and in files."""
    device = planned.target.device
    (decode,) = (x for x in planned.programs if x.name == "rollout: decode")
    mesh = AbstractMesh((2, 1, 1, 1, 1), AXES)
    slow = planned._replace(
        programs=[decode._replace(flops=0.0, times=10.0, collectives=[], parameters_read=3e12, caches_read=6e12)],
        target=planned.target._replace(mesh=mesh),
    )
    assert least_seconds(slow) == pytest.approx(10 * 9e12 / device.bandwidth)
    assert least_seconds(slow, 0.5) == pytest.approx(10 * 6e12 / device.bandwidth)
    numbers = {"flops": 8e15, "times": 1.0, "collectives": [], "parameters_read": 0, "caches_read": 0}
    update = decode._replace(name="update", **numbers)
    training = planned._replace(programs=[update], target=slow.target, sampling={})
    assert least_seconds(training, 2.0) == pytest.approx(16e15 / device.flops)
    found = balances(Split(training, slow, 1, in_files=False))
    assert [x.sampling_devices for x in found] == [2, 3]  # 8 rows do not divide over three devices
    assert found[1].training == pytest.approx(2 * found[0].training)
    thirds = training._replace(config=small(planned.config.model.path))
    thirds.config.batch.prompts = 6
    found = balances(Split(thirds, slow, 1, in_files=False))
    assert [x.sampling_devices for x in found] == [1, 2, 3]
    assert found[0].sampling == pytest.approx(10 * 15e12 / device.bandwidth)
    found = balances(Split(training, slow, 1, in_files=True))
    assert [(x.training_devices, x.sampling_devices) for x in found] == [(2, 2)]
    assert balances(Split(training, slow, 2, in_files=True))[1].sampling == pytest.approx(found[0].sampling / 2)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["devices=4", "processes=1"])
def test_the_command_plans_both_halves(folder, run_python, flag):
    found = plan_of_eight(folder, run_python, f"--config.rollout.{flag}", "--config.processes.count=2", "--simulate")
    assert "4 x h100, mesh data 4" in found and "== the devices that only sample: " in found
    training, _, sampling = found.partition("== the devices that only sample")
    assert "update" in training and "rollout: decode" not in training
    assert "rollout: decode" in sampling and "\n  optimizer" in training and "\n  optimizer" not in sampling
    assert "as planned, 4 train and 4 sample" in sampling and "in turns, all 8" in sampling


def test_device_rates_are_complete():
    for device in DEVICES:
        assert device.memory > 1e9 and device.flops > 1e14 and device.bandwidth > 1e11 and device.interconnect > 1e11
        assert (device.topology is None) == (device.network > 0)


@pytest.mark.parametrize(
    ("count", "axes", "sides"), [(4, 2, (2, 2)), (8, 2, (4, 2)), (8, 3, (2, 2, 2)), (256, 2, (16, 16))]
)
def test_slices_of_chips(count, axes, sides):
    assert slice_shape(count, axes) == sides


def test_numbers_in_words():
    assert [bytes_text(0), bytes_text(999), bytes_text(1.5e9), bytes_text(2e15)] == ["0 B", "999 B", "1.5 GB", "2 PB"]
    assert [seconds_text(0.0123), seconds_text(5), seconds_text(600)] == ["12.3 ms", "5 s", "10 min"]


def test_traced_products_in_loops():
    a, b = jnp.ones((4, 8)), jnp.ones((8, 8))

    def f(a, b, n):
        a, _ = jax.lax.scan(lambda x, _: (x @ b, None), a, length=5)
        return jax.lax.fori_loop(0, n, lambda _, x: x @ b, a)

    traced = jax.jit(f).trace(a, b, 3).jaxpr
    one = 2 * 4 * 8 * 8
    assert traced_flops(traced) == 6 * one
    assert traced_flops(traced, (3.0,)) == 8 * one


def test_traced_products_of_a_kernel_on_a_mesh():
    """Of each device's part; half of the blocks of the grid, 2 by 2 of them here."""
    rows, heads, length, size = 3, 2, 1024, 8
    q, kv = jnp.zeros((rows, length, 1, heads, size)), jnp.zeros((rows, length, 1, size))
    attend = functools.partial(splash_attention, segments=jnp.ones((rows, length), int), interpret=True)
    on_mesh = jax.shard_map(attend, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        traced = jax.jit(on_mesh).trace(q, kv, kv).jaxpr
    assert traced_flops(traced) == rows * heads * 2 * length * length * size


def test_traced_products_of_a_kernel_that_loops():
    """Two matmuls of causal attention, and seven of its gradients."""
    rows, heads, length, size = 2, 2, 1024, 8
    q, kv = jnp.zeros((rows, length, 1, heads, size)), jnp.zeros((rows, length, 1, size))
    attend = functools.partial(flash_attention, segments=jnp.ones((rows, length), int), interpret=True)
    one = rows * heads * length * length * size
    assert traced_flops(jax.jit(attend).trace(q, kv, kv).jaxpr) == 2 * one
    assert traced_flops(jax.jit(jax.grad(lambda q: attend(q, kv, kv).sum())).trace(q).jaxpr) == 9 * one


def test_loops_over_blocks_of_keys_have_their_number(monkeypatch):
    """As traced and as compiled: 4 blocks of keys, on average, for each of 8 of queries; two matmuls, then five."""
    heads, length, size, block = 2, 1024, 8, 128
    monkeypatch.setattr(context_attention, "SCORES", heads * block**2)
    q, kv = jnp.zeros((1, length, 1, heads, size)), jnp.zeros((1, length, 1, size))
    index, segments = jnp.arange(length)[None], jnp.ones((1, length), int)
    places = context_attention.Places(index, segments, index)

    def loss(q, kv):
        return context_attention.context_attention(q, kv, kv, places, None).sum()

    one = 8 * 4 * 2 * block**2 * heads * size
    for function, matmuls in ((loss, 2), (jax.grad(loss, (0, 1)), 7)):
        traced = jax.jit(function).trace(q, kv)
        assert traced_flops(traced.jaxpr, (3.0,)) == matmuls * one
        assert hlo.Module(traced.lower().compile().as_text(), (3.0,)).matmul_flops() == matmuls * one


PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (state: (s32[], f32[8,8], f32[8,8])) -> (s32[], f32[8,8], f32[8,8]) {
  %state = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %number = s32[] get-tuple-element(%state), index=0
  %total = f32[8,8]{1,0} get-tuple-element(%state), index=1
  %shard = f32[8,8]{1,0} get-tuple-element(%state), index=2
  %whole = f32[32,8]{1,0} all-gather(%shard), replica_groups=[1,4]<=[4], dimensions={0}
  %product = f32[8,8]{1,0} dot(%whole, %whole), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %reduced = f32[8,8]{1,0} all-reduce(%product), replica_groups={{0,1},{2,3}}, to_apply=%add
  %more = f32[8,8]{1,0} add(%total, %reduced)
  %one = s32[] constant(1)
  %next = s32[] add(%number, %one)
  ROOT %out = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%next, %more, %shard)
}

%condition (state: (s32[], f32[8,8], f32[8,8])) -> pred[] {
  %state.1 = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %limit = s32[] constant(10)
  %number.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] compare(%number.1, %limit), direction=LT
}

ENTRY %main (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%zero, %p, %p)
  %loop = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %result = f32[8,8]{1,0} get-tuple-element(%loop), index=1
}
"""


EXCHANGE = """\
HloModule exchange, is_scheduled=true, num_partitions=4

ENTRY %main (a: bf16[4,256]) -> bf16[4,256] {
  %a = bf16[4,256]{1,0} parameter(0)
  %start = ((bf16[4,256]{1,0}), bf16[4,256]{1,0}) all-to-all-start(%a), replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %done = bf16[4,256]{1,0} all-to-all-done(%start)
}
"""


def test_what_is_started_counts_once():
    """Its shape holds operands and results; that of a sum, as GPUs start it, its results alone."""
    assert hlo.Module(EXCHANGE).collectives() == [hlo.Collective("all-to-all", 4, 1, 2048, 0.75 * 2048)]
    text = EXCHANGE.replace("all-to-all", "all-reduce").replace(
        "((bf16[4,256]{1,0}), bf16[4,256]{1,0})", "bf16[4,256]{1,0}"
    )
    assert hlo.Module(text).collectives() == [hlo.Collective("all-reduce", 4, 1, 2048, 2 * 0.75 * 2048)]


def test_collectives_in_a_loop():
    module = hlo.Module(PROGRAM)
    gathered, reduced = module.collectives()
    assert gathered == hlo.Collective("all-gather", 4, 10, 10 * 32 * 8 * 4, 10 * 0.75 * 32 * 8 * 4)
    # Every turn's result is only added up: the sum is reduced once, behind the loop.
    assert reduced == hlo.Collective("all-reduce", 2, 1, 8 * 8 * 4, 8 * 8 * 4)
    assert module.matmul_flops() == 10 * 2 * 32 * 8 * 8
    assert [x.shape for x in module.largest(2)] == ["f32[32,8]", "f32[8,8]"]


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{}", 8),
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("[2,4]<=[8]", 4),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['axis_0'=1,'axis_1'=8] {'axis_1'}", 8),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", 4),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", 4),
        ("mesh['a'=8] {'a':(2)4}", 4),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", 2),
    ],
)
def test_groups_of_collectives(groups, size):
    """However long the first line of the program is, which names all its arguments."""
    header = f"HloModule jit_f, entry_computation_layout={{({'f32[8,8], ' * 1000})}}, num_partitions=8\n"
    text = PROGRAM.replace("replica_groups=[1,4]<=[4]", f"replica_groups={groups}")
    gathered = hlo.Module(header + text.partition("\n")[2]).collectives()[0]
    assert gathered.group == size and gathered.sent == 10 * (size - 1) / size * 32 * 8 * 4


def test_bfloat16_numbers_that_a_cpu_exchanges_as_float32():
    fusion = """%widening (x: f32[8,8]) -> f32[8,8] {
  %x.1 = f32[8,8]{1,0} parameter(0)
  %narrow.1 = bf16[8,8]{1,0} convert(%x.1)
  %wide.1 = f32[8,8]{1,0} convert(%narrow.1)
  ROOT %turned.1 = f32[8,8]{0,1} copy(%wide.1)
}

%body ("""
    text = PROGRAM.replace("%body (", fusion, 1).replace(
        "  %whole = ", "  %own = f32[8,8]{0,1} fusion(%shard), kind=kLoop, calls=%widening\n  %whole = "
    )
    gathered = hlo.Module(text.replace("all-gather(%shard)", "all-gather(%own)")).collectives()[0]
    assert gathered.bytes == 10 * 32 * 8 * 2
    assert hlo.Module(text).collectives()[0].bytes == 10 * 32 * 8 * 4


CUTTING = """%cutting (x: f32[8,8], n: s32[]) -> f32[4,8] {
  %x.2 = f32[8,8]{1,0} parameter(0)
  %n.2 = s32[] parameter(1)
  %narrow.2 = bf16[8,8]{1,0} convert(%x.2)
  ROOT %cut.2 = bf16[4,8]{1,0} dynamic-slice(%narrow.2, %n.2, %n.2), dynamic_slice_sizes={4,8}
}

%body ("""


def test_a_sum_of_which_each_device_needs_a_slice():
    """It is scattered, and as bfloat16 where it is read as that; one that is read whole too is sent to all."""
    text = PROGRAM.replace("%body (", CUTTING, 1).replace("%more = f32[8,8]{1,0} add(%total, %reduced)", "%more = {}")
    used = "bf16[4,8]{1,0} fusion(%reduced, %number), kind=kLoop, calls=%cutting"
    found = [x for x in hlo.Module(text.replace("{}", used, 1)).collectives() if x.kind != "all-gather"]
    assert found == [hlo.Collective("reduce-scatter", 2, 10, 10 * 8 * 8 * 2 / 2, 10 * 8 * 8 * 2 / 2)]
    both = f"{used}\n  %also = f32[8,8]{{1,0}} copy(%reduced)"
    found = [x for x in hlo.Module(text.replace("{}", both, 1)).collectives() if x.kind != "all-gather"]
    assert found == [hlo.Collective("all-reduce", 2, 10, 10 * 8 * 8 * 4, 10 * 8 * 8 * 4)]


def test_an_all_reduce_that_the_loop_needs_counts_every_turn():
    text = PROGRAM.replace("tuple(%next, %more, %shard)", "tuple(%next, %more, %reduced)")
    assert {x.kind: x.count for x in hlo.Module(text).collectives()} == {"all-gather": 10, "all-reduce": 10}


def plan_command(folder, run_python, *flags):
    """The command, in a process whose number of devices is not given by XLA_FLAGS."""
    small = (f"--config.model.path={folder}", "--config.batch.prompts=8", "--config.rollout.group_size=2")
    arguments = (*small, "--config.rollout.max_completion_length=8", *flags)
    return run_python(
        "-c",
        "import os, sys\n"
        "os.environ['XLA_FLAGS'] = '--xla_backend_optimization_level=0'\n"
        f"sys.argv = ['plan', *{arguments!r}]\n"
        "from jaxrl_llm.config.flags import run\n"
        "from jaxrl_llm.commands.plan import main; run(main)\n",
    )


def plan_of_eight(folder, run_python, *flags) -> str:
    """Its report for eight devices."""
    done = plan_command(folder, run_python, "--devices=8", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_command_plans_for_many_devices(folder, run_python):
    found = plan_of_eight(folder, run_python, "--config.mesh.fsdp=8", "--device=h200", "--simulate")
    assert "8 x h200, mesh data 1 x fsdp 8" in found
    assert "all-gather over 8" in found and "fits: at most" in found
    assert "all-reduce over 2" in found  # decoding has tensor in the place of fsdp, as GPUs have: two key/value heads


@pytest.mark.slow
def test_a_dry_run_writes_nothing(tmp_path, root, run_python):
    config = f"--config={root / 'configs' / 'grpo.py'}:tiny"
    done = run_python("-m", "jaxrl_llm.train", config, "--dry_run", f"--config.output_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    for part in ("example 0", "parameters, trained", "2 steps would take about", "first step"):
        assert part in done.stdout, part
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_dry_run_plans_both_halves(root, run_python):
    config = f"--config={root / 'configs' / 'async_grpo.py'}:tiny"
    done = run_python("-m", "jaxrl_llm.train", config, "--dry_run", "--config.rollout.devices=1", devices=2)
    assert done.returncode == 0, done.stderr
    training, _, sampling = done.stdout.partition("== the devices that only sample: 1 ==")
    assert "update" in training and "rollout: decode" not in training
    assert "rollout: decode" in sampling and "a copy of the policy" in sampling
    assert "policies of batches that wait" in sampling and "2 steps would take about" in sampling


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--device=h100", "--devices=24", "--config.mesh.tensor=12", "--config.mesh.data=2"),
        ("--device=v6e", "--devices=12", "--config.mesh.data=1", "--config.mesh.tensor=12",
         "--config.rollout.mesh=tensor=6"),
        ("--device=v6e", "--devices=16", "--config.mesh.tensor=6", "--config.mesh.data=2", "--config=async_grpo",
         "--config.rollout.processes=1", "--config.processes.count=4"),
    ],
)  # fmt: skip
def test_hosts_of_a_plan_hold_all_of_their_rows_together_or_none(folder, run_python, flags):
    done = plan_command(folder, run_python, "--simulate", *flags)
    assert done.returncode == 2 and "gives processes some rows in common and others not" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_the_tpu_compiler_plans(folder):
    config = small(folder)
    found = make_plan(config, target(config, "v5e", 1))
    assert found.target.compiler == "TPU compiler"
    assert found.peak.temporaries > 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_the_tpu_compiler_plans_for_two_hosts(folder, run_python):
    """Rows belong to hosts in their order, however the wires run: the mesh that samples keeps them there too."""
    mesh = ("--config.mesh.fsdp=2", "--config.mesh.tensor=4", "--config.rollout.mesh=tensor=4")
    found = plan_of_eight(folder, run_python, *mesh, "--device=v5p")
    assert "mesh data 1 x fsdp 2 x context 1 x expert 1 x tensor 4; compiled by the TPU compiler" in found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
@pytest.mark.parametrize("packing", ["false", "true"])
def test_the_tpu_compiler_plans_splash_attention(folder, packing):
    """Without scores, of rows that are long enough for them to be most of the temporaries."""
    config = small(folder)
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 1024, 512
    config.batch.packing = packing

    def temporaries(attention):
        config.model.attention = attention
        found = make_plan(config, target(config, "v5e", 1))
        assert (found.target.compiler, found.note) == ("TPU compiler", "")
        return next(x.temporaries for x in found.programs if x.name == "update")

    by_splash = temporaries("splash")
    assert by_splash < 0.7 * temporaries("xla")
    assert temporaries("auto") == by_splash  # traced as on a TPU


@pytest.mark.slow
@pytest.mark.skipif(not _cuda_folder(), reason="the GPU compiler is not installed: pip install '.[plan-cuda]'")
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize("case", ["grpo", "int8", "lora", "ppo", "dpo"])
def test_what_simulated_devices_need_is_at_most_what_the_gpu_compiler_says(folder, case):
    """In the same arguments and results; that compiler's peak is what it reports, program by program."""
    config = small(folder)
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 256, 256
    config.lora.rank = 4 if case == "lora" else 0
    config.algorithm.name = case if case in ("ppo", "dpo") else "grpo"
    if case == "int8":
        config.rollout.weights_dtype, config.algorithm.importance_correction = "int8", "token_truncate"
    exact, simulated = (make_plan(config, target(config, "h100", 1, simulate)) for simulate in (False, True))
    assert (exact.target.compiler, exact.target.exact, simulated.target.exact) == ("GPU compiler", True, False)
    assert [x.name for x in exact.programs] == [x.name for x in simulated.programs]
    for own, other in zip(exact.programs, simulated.programs, strict=True):
        assert own.arguments == other.arguments, own.name
    assert exact.peak.peak <= 1.02 * simulated.peak.peak
    update = next(x for x in exact.programs if x.name == "update")
    assert update.flops == pytest.approx(next(x for x in simulated.programs if x.name == "update").flops, rel=0.2)


def test_a_gpu_is_described_to_its_compiler_in_full():
    text = _described(named("a100"), named("a100").gpu)
    assert "cuda_compute_capability { major: 8 minor: 0 }" in text
    assert "shared_memory_per_block_optin: 166912" in text  # 163 KiB: NVIDIA's guide of compute capability 8.0
    assert 'device_description_str: "NVIDIA A100"' in text


def test_a_cuda_compiler_alone_is_no_compiler_for_jax(tmp_path, monkeypatch):
    """Other wheels bring it too, and a plugin that was removed, or another one, leaves the folder of plugins."""
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    (tmp_path / "cuda_nvcc").mkdir()
    assert _cuda_folder() == {}
    (tmp_path / "xla_cuda12").mkdir()
    assert _cuda_folder() == {"xla_gpu_cuda_data_dir": str(tmp_path / "cuda_nvcc")}


def test_attention_that_simulated_devices_lack_is_planned_without(folder):
    config = small(folder)
    config.model.attention = "cudnn"
    found = make_plan(config, target(config, "h100", 1, simulate=True), only="logps")
    assert found.note.endswith("simulated devices have no cudnn")
    assert "planned with model.attention=xla, which needs more" in "\n".join(lines(found, []))
    with pytest.raises(ConfigError, match="'cudnn': it runs on NVIDIA GPUs, and this is a cpu"):
        make_plan(config, target(config, "cpu", 1), only="logps")
