"""The same step on 1, 2, 4 and 8 simulated devices and on different mesh shapes: same samples, same update."""

import pytest

CHECK = """
import jax, numpy as np
from jaxrl_llm.command_line import load_config_file
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train import _improve
from jaxrl_llm.training.build import build

config = load_config_file({path!r})
config.batch.prompts, config.eval.every = 8, -1
config.optimizer.learning_rate, config.optimizer.eps = 1e-3, 1e-4
config.optimizer.warmup_steps = 0
config.algorithm.beta, config.algorithm.num_iterations = 0.05, 2
config.model.random_init = True
config.model.scan_layers = {scan!r}
config.algorithm.update({settings})
coarse = config.algorithm.dynamic_sampling

def reward(completions, answer, **kwargs):
    if coarse:
        return [float(sum(map(ord, c)) % 13 == 0) for c in completions]
    return [len(set(c) & set(a)) - 0.1 * len(c) for c, a in zip(completions, answer)]

def step(data, fsdp, tensor, microbatch_rows=0):
    config.batch.microbatch_rows = microbatch_rows
    mesh = make_mesh(data, fsdp, tensor, devices=jax.devices()[: data * fsdp * tensor])
    with jax.set_mesh(mesh):
        run = build(config, mesh, rewards=reward)
        before = jax.device_get(run.state.params)
        sizes = {{x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(run.state.opt_state) if x.ndim == 3}}
        for seed in (4, 5) if coarse else (5,):  # what the first leaves in the replay buffer, the second may use
            experience = run.source.next(run.state, jax.random.key(seed))
        if coarse:
            assert float(experience.metrics["rollout/resampled_groups"]) > 0
            assert float(experience.metrics["rollout/replayed_groups"]) > 0
        state, metrics = _improve(config, run, run.state, experience.batch)
        changed = jax.tree.map(lambda a, b: np.abs(a - b).max(), jax.device_get(state.params), before)
        assert min(jax.tree.leaves(changed)) > 0
        return jax.device_get((experience.batch.tokens, state.params)), metrics, sizes

(tokens, params), metrics, whole_sizes = step(1, 1, 1)
for shape in {shapes}:
    (other_tokens, other_params), other_metrics, sizes = step(*shape)
    np.testing.assert_array_equal(tokens, other_tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, other_params)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], other_metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
    if shape[1] * shape[2] > 1:
        assert max(map(np.prod, sizes)) < max(map(np.prod, whole_sizes)), "optimizer moments are not cut"
    print("same", shape)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [[(1, 4, 2), (2, 2, 2, 8)], [(2, 1, 1), (1, 2, 2), (8, 1, 1)]])
def test_every_mesh_gives_the_same_step(run_python, root, shapes):
    code = CHECK.format(path=f"{root / 'configs/grpo.py'}:tiny", shapes=shapes, scan="true", settings={})
    done = run_python("-c", code, devices=8, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same") == len(shapes)


@pytest.mark.slow
def test_unrolled_layers_on_a_mesh(run_python, root):
    code = CHECK.format(path=f"{root / 'configs/grpo.py'}:tiny", shapes=[(2, 2, 2)], scan="false", settings={})
    done = run_python("-c", code, devices=8, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_resampling_and_replay_on_a_mesh(run_python, root):
    settings = {
        "dynamic_sampling": True, "max_sampling_rounds": 2, "replay_groups": 3, "kl_controller": "adaptive",
        "ref_sync_steps": 1, "entropy_controller": "adaptive", "top_entropy_quantile": 0.6, "kl_bias_correction": True,
    }  # fmt: skip
    path = f"{root / 'configs/grpo.py'}:tiny"
    code = CHECK.format(path=path, shapes=[(2, 2, 2), (1, 4, 2, 8)], scan="true", settings=settings)
    done = run_python("-c", code, devices=8, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


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
