"""The same step on 1, 2, 4 and 8 simulated devices and on different mesh shapes: same samples, same update."""

import json
import shutil

import pytest

from jaxrl_llm.models.files import hf
from tests.training.teachers.test_cross_tokenizer import saved_teacher

CHECK = """
import dataclasses, jax, math, numpy as np, unittest.mock
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.logging.step_log import merge
from jaxrl_llm.training.update import merge_frozen

config = load_config_file({path!r})
config.batch.prompts, config.eval.every = 8, -1
config.optimizer.learning_rate, config.optimizer.eps = 1e-3, 1e-4
config.optimizer.warmup_steps = 0
config.algorithm.beta, config.algorithm.num_iterations = 0.05, 2
config.model.random_init = True
config.model.path = {model!r}
config.model.scan_layers = {scan!r}
config.update_from_flattened_dict({settings})
coarse = config.algorithm.dynamic_sampling

def reward(completions, answer, **kwargs):
    if coarse:
        return [float(sum(map(ord, c)) % 13 == 0) for c in completions]
    return [len(set(c) & set(a)) - 0.1 * len(c) for c, a in zip(completions, answer)]

def by_row(batch):
    # Rows of a prompt share its images in each shard, of which meshes have more or fewer.
    images = batch.inputs.images
    if images is None:
        return batch
    shared = {{"pixels": images.pixels, "features": images.features}}
    own = jax.tree.map(lambda x: x[np.arange(batch.rows) * len(x) // batch.rows, images.source], shared)
    return batch.replace(inputs=batch.inputs.replace(images=dataclasses.replace(images, **own, source=None)))

def step(microbatch_rows=0, rollout="auto", backend="cpu", **sizes):
    config.batch.microbatch_rows, config.rollout.mesh = microbatch_rows, rollout
    mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(mesh):
        run = build(config, mesh, Given(rewards=reward))
        before = jax.device_get(run.state.params)
        sizes = {{x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(run.state.opt_state) if x.ndim == 3}}
        if config.algorithm.entropy_controller == "adaptive":
            run.source.learner.learn({{"entropy": 0.0}})  # as after an update: from then on the bonus applies
        for seed in (4, 5) if coarse else (5,):  # what the first leaves in the replay buffer, the second may use
            experience = run.source.next(merge_frozen(run.state, run.frozen), jax.random.key(seed))
        if coarse:
            assert float(experience.metrics["rollout/resampled_groups"]) > 0
            assert float(experience.metrics["rollout/replayed_groups"]) > 0
            assert float(experience.batch.scalars.entropy_coef) > 0
        with unittest.mock.patch.object(jax, "default_backend", lambda: backend):
            state, updates = improve(run, run.state, experience.batch)
        metrics = merge(updates)
        changed = jax.tree.map(lambda a, b: np.abs(a - b).max(), jax.device_get(state.params), before)
        assert min(jax.tree.leaves(changed)) > 0
        moved = mesh.shape["context"] > 1 or rollout != "auto"
        assert ("reshard" in run.stopwatch.totals) == moved
        # Where rows are packed, each mesh packs them its own way.
        read = by_row(jax.device_get(experience.batch.with_layout(None).replace(scalars=None)))
        return (read.inputs.tokens, read, jax.device_get(state.params)), metrics, sizes

(tokens, read, params), metrics, whole_sizes = step()
if config.teacher.context != "none":
    assert 0 < read.taught.mean() < 1, "all rows are taught, or none: the case proves little"
for shape in {shapes}:
    (other_tokens, other_read, other_params), other_metrics, sizes = step(**shape)
    np.testing.assert_array_equal(tokens, other_tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), read, other_read)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, other_params)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], other_metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
    if math.prod(shape.get(axis, 1) for axis in ("fsdp", "context", "expert", "tensor")) > 1:
        assert max(map(np.prod, sizes)) < max(map(np.prod, whole_sizes)), "optimizer moments are not cut"
    print("same", shape)
"""


SHAPES = [
    [{"fsdp": 4, "tensor": 2, "data": 1}, {"data": 2, "fsdp": 2, "tensor": 2, "microbatch_rows": 8}],
    [{"data": 2}, {"data": 1, "fsdp": 2, "tensor": 2}, {"data": 8}],
    [{"data": 2, "context": 2, "tensor": 2}, {"data": 1, "context": 8}, {"data": 1, "fsdp": 4, "context": 2}],
    [{"data": 1, "fsdp": 4, "tensor": 2, "rollout": "tensor=4"}, {"data": 8, "rollout": "fsdp=2,tensor=2"}],
]
EXPERT_SHAPES = [
    [{"data": 2, "expert": 4}, {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}],
    [{"data": 1, "context": 2, "expert": 2, "tensor": 2}, {"data": 1, "fsdp": 8, "rollout": "expert=4,tensor=2"}],
]


def check(run_python, root, shapes, settings=None, scan=True, model="embedded:sort", config="grpo"):
    path = f"{root / 'configs' / config}.py:tiny"
    code = CHECK.format(path=path, shapes=shapes, scan=scan, settings=settings or {}, model=str(model))
    done = run_python("-c", code, devices=8, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same") == len(shapes)


@pytest.mark.slow
@pytest.mark.parametrize("shapes", SHAPES)
def test_every_mesh_gives_the_same_step(run_python, root, shapes):
    check(run_python, root, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("shapes", EXPERT_SHAPES)
def test_experts_on_a_mesh(run_python, root, tmp_path, shapes):
    """With the loss of their router, which is of all devices' tokens together."""
    folder = tmp_path / "experts"
    shutil.copytree(hf.locate("embedded:sort"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    own = json.loads((folder / "config.json").read_text())
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_aux_loss_coef": 0.1}
    experts = own | shape | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(experts))
    check(run_python, root, shapes, model=folder)


@pytest.mark.slow
def test_unrolled_layers_on_a_mesh(run_python, root):
    check(run_python, root, [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "context": 4}], scan=False)


@pytest.mark.slow
def test_adapters_on_a_mesh(run_python, root):
    """Beside quantised matrices, which are cut and moved too."""
    settings = {"lora.rank": 4, "lora.targets": ("all-linear",), "model.quantize": "int8"}
    check(run_python, root, [{"data": 1, "fsdp": 2, "context": 2, "tensor": 2, "rollout": "tensor=2"}], settings)


@pytest.mark.slow
def test_parts_of_a_model_on_a_mesh(run_python, root):
    settings = {"model.trainable": ("model.layers.[12].", "lm_head")}
    shapes = [{"data": 1, "fsdp": 4, "tensor": 2, "rollout": "tensor=4"}, {"data": 2, "context": 2, "tensor": 2}]
    check(run_python, root, shapes, settings)


@pytest.mark.slow
def test_adapters_of_some_layers_on_a_mesh(run_python, root):
    settings = {"lora.rank": 4, "lora.layers_to_transform": (1,), "lora.rank_pattern": ("q_proj=8",)}
    check(run_python, root, [{"data": 2, "fsdp": 2, "tensor": 2}], settings)


@pytest.mark.slow
def test_dora_on_a_mesh(run_python, root):
    """Its lengths are of whole columns, also where the mesh cuts these."""
    settings = {"lora.rank": 4, "lora.dora": True, "lora.modules_to_save": ("embed_tokens", "norm")}
    shapes = [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "context": 2, "tensor": 4}]
    check(run_python, root, shapes, settings)


@pytest.mark.slow
def test_adapters_that_start_from_the_matrices_on_a_mesh(run_python, root):
    """Decompositions are of whole matrices, and what they give is cut as the adapters are."""
    settings = {"lora.rank": 4, "lora.init": "pissa"}
    check(run_python, root, [{"data": 1, "fsdp": 2, "context": 2, "tensor": 2}], settings)


@pytest.mark.slow
def test_packed_rows_on_a_mesh(run_python, root):
    """Also where it cuts them within their documents."""
    shapes = [{"data": 2, "context": 2, "tensor": 2}, {"data": 1, "context": 8}]
    check(run_python, root, shapes, {"batch.packing": "true"})


@pytest.mark.slow
def test_feed_forwards_in_tiles_on_a_mesh(run_python, root):
    """Of rows or packed ones, each device computes some of its own tokens at a time; with tensor all at once."""
    settings = {"model.mlp_tile_tokens": 24, "model.remat": "block"}
    shapes = [{"data": 2, "fsdp": 2, "context": 2}, {"data": 1, "fsdp": 4, "tensor": 2}]
    check(run_python, root, shapes, settings)
    check(run_python, root, shapes[:1], settings | {"batch.packing": "true"})


ADAPTERS = {"lora.rank": 4, "lora.targets": ("all-linear",), "lora.modules_to_save": ("norm",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "scan"), [({"batch.packing": "true"}, True), (ADAPTERS, True), ({"model.remat": "block"}, False)]
)
def test_the_update_of_gpus(run_python, root, settings, scan):
    """Traced as for GPUs, which add gradients in place on a mesh alone, the update is the same; on one and on eight."""
    shapes = [{"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}]
    if settings is not ADAPTERS:  # fsdp alone leaves their largest matrices whole
        shapes.append({"data": 1, "fsdp": 8})
    shapes = [shape | {"microbatch_rows": 16, "backend": "gpu"} for shape in shapes]
    check(run_python, root, shapes, settings, scan=scan)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["false", "true"])
def test_images_on_a_mesh(run_python, root, packing):
    """Tiles go with their rows, and the tower's matrices are cut as the decoder's are."""
    shapes = [{"data": 8}, {"data": 2, "context": 2, "tensor": 2}, {"data": 1, "fsdp": 4, "tensor": 2}]
    settings = {"batch.packing": packing}
    check(run_python, root, shapes, settings, model="embedded:shapes", config="vision_grpo")


@pytest.mark.slow
def test_sampling_in_eight_bits_on_a_mesh(run_python, root):
    """Codes are made where the parameters are, or moved to where they are sampled with."""
    settings = {
        "rollout.weights_dtype": "int8", "rollout.cache_dtype": "fp8", "algorithm.importance_correction": "token_mask",
    }  # fmt: skip
    shapes = [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "fsdp": 4, "tensor": 2, "rollout": "tensor=4"}]
    check(run_python, root, shapes, settings)


@pytest.mark.slow
def test_resampling_and_replay_on_a_mesh(run_python, root):
    settings = {
        "dynamic_sampling": True, "max_sampling_rounds": 2, "replay_groups": 3, "kl_controller": "adaptive",
        "ref_sync_steps": 1, "entropy_controller": "adaptive", "entropy_coef": 0.1, "top_entropy_quantile": 0.6,
        "kl_bias_correction": True, "aggregation": "prompt", "positive_nll_coef": 0.1,
    }  # fmt: skip
    settings = {f"algorithm.{name}": value for name, value in settings.items()}
    shapes = [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "fsdp": 4, "tensor": 2, "microbatch_rows": 8}]
    check(run_python, root, [*shapes, {"data": 2, "context": 2, "expert": 2}], settings)


TEACHERS = {
    "another model's log-probs": {"teacher.path": "embedded:sort", "teacher.coef": 0.5},
    "its distributions": {"teacher.path": "embedded:sort", "teacher.form": "divergence"},
    "the policy, shown a success": {
        "teacher.path": "self(rate=0)", "teacher.form": "divergence", "teacher.beta": 0.5, "teacher.context": "success",
        "teacher.success_threshold": -0.55, "teacher.template": "{solution}{prompt}",
        "teacher.solution_template": "{solution},", "teacher.importance_max": 2.0,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TEACHERS)
def test_teachers_on_a_mesh(run_python, root, name):
    """With a context the teacher's rows are others than the policy's, longer, and made on the host."""
    shapes = [{"data": 8}, {"data": 2, "context": 2, "tensor": 2}, {"data": 1, "fsdp": 4, "tensor": 2}]
    packed = {"batch.packing": "true"} if "success" in name else {}
    check(run_python, root, shapes, {**TEACHERS[name], **packed})


@pytest.mark.slow
def test_a_teacher_with_another_tokenizer_on_a_mesh(run_python, root, tmp_path):
    """Its vocabulary is sorted, whole, whichever devices have parts of it; digits alone, that spans have several."""
    shapes = [{"data": 8}, {"data": 2, "context": 2, "tensor": 2}, {"data": 1, "fsdp": 4, "tensor": 2}]
    settings = {"teacher.path": saved_teacher(tmp_path / "hf", 1.0), "teacher.form": "uld", "teacher.uld_hybrid": True}
    settings |= {"teacher.beta": 0.5, "rollout.structured_regex": "[0-9]{4,8}", "batch.packing": "true"}
    check(run_python, root, shapes, settings)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused(run_python, root):
    flags = [
        "--config.batch.prompts=3",
        "--config.rollout.group_size=2",
        "--config.output_dir=out",
        "--config.mesh.fsdp=4",
    ]
    done = run_python("-m", "jaxrl_llm.train", f"--config={root / 'configs/grpo.py'}:tiny", *flags, devices=8)
    assert done.returncode == 2
    assert "6 rows does not divide" in done.stderr
    assert "Traceback" not in done.stderr
