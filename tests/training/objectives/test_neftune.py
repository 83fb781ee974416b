"""NEFTune: the size of its noise, and that every objective gets it in updates and in nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.objectives.neftune import neftune_noise
from jaxrl_llm.training.setup.objectives import objective_of

SHAPE = {"vocab_size": 31, "width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 24}
LENGTHS = (9, 7, 4, 2)


def batch_of(seeds=None):
    random = np.random.default_rng(1)
    tokens = random.integers(1, 31, (4, 9)).astype(np.int32)
    segments = (np.arange(9) < np.array(LENGTHS)[:, None]).astype(np.int32)
    mask = (segments * (np.arange(9) > 0)).astype(np.float32)
    logps = np.where(mask, -3.0, 0.0).astype(np.float32)
    return Batch(
        Inputs(tokens, segments), mask, seeds=seeds, ref_logps=logps, sample_logps=logps, old_logps=logps,
        advantages=np.array([1.0, -1.0, 0.5, -0.5], np.float32), labels=np.array([1.0, 0.0, 1.0, 0.0], np.float32),
    )  # fmt: skip


def test_noise_has_the_size_of_the_paper_and_comes_from_the_seeds():
    noise = np.asarray(neftune_noise(batch_of(np.array([1, 2, 3, 1], np.uint32)), 16, 5.0))
    sizes = 5.0 / np.sqrt(np.array(LENGTHS) * 16)
    for row, length, size in zip(noise, LENGTHS, sizes, strict=True):
        assert (row[length:] == 0).all()
        assert 0.8 * size < np.abs(row[:length]).max() <= size
        assert abs(row[:length].mean()) < size / 2
    np.testing.assert_allclose(noise[0, :2] / sizes[0], noise[3, :2] / sizes[3], rtol=1e-5)  # the same seed
    assert not np.allclose(noise[0], noise[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loss"),
    [("sft", "nll"), ("preference", "dpo"), ("preference", "kto"), ("reward_model", "auto"), ("grpo", "auto")],
)
def test_every_objective_has_the_noise_in_updates_alone(name, loss):
    """That is: where a batch has seeds, the loss is that of embeddings with `neftune_noise` added by hand."""
    net = Net(ModelConfig(**SHAPE, init_scale=0.3, head="score" if name == "reward_model" else "lm"))
    params, config = jax.jit(net.init)(jax.random.key(0)), default()
    config.algorithm.name, config.algorithm.loss, config.algorithm.beta = name, loss, 0.1
    plain = objective_of(config, net)
    config.algorithm.neftune_alpha = 20.0
    noisy = objective_of(config, net)

    @jax.jit
    def losses(batch):
        observed = None if plain.observe is None else plain.observe(params, batch)
        prepared = plain.prepare(batch) if observed is None else plain.prepare(batch, observed)
        return jnp.stack([objective.loss(params, prepared)[0] for objective in (plain, noisy)])

    seeded, bare = batch_of(np.arange(4, dtype=np.uint32)), batch_of()
    np.testing.assert_array_equal(*losses(bare))  # an evaluation
    without, with_noise = losses(seeded)
    by_hand = losses(bare.replace(inputs=bare.inputs.replace(noise=neftune_noise(seeded, 16, 20.0))))[0]
    np.testing.assert_allclose(with_noise, by_hand, rtol=1e-6)
    assert abs(with_noise - without) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_a_run_with_noise_is_noisy_in_training_alone(root, tmp_path, name):
    def run(folder, **algorithm):
        config = load_config_file(f"{root / 'configs' / name}.py:tiny")
        config.output_dir, config.total_steps = str(tmp_path / folder), 1
        config.eval.every, config.logging.backends = 0, ("jsonl",)
        config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-3, 0
        for key, value in algorithm.items():
            config.algorithm[key] = value
        validate(config)
        return jaxrl_llm.train(config)

    plain, noisy = run("plain"), run("noisy", neftune_alpha=5.0)
    before = [key for key in plain.metrics[0] if key.startswith("eval/")]
    assert before
    for key in before:  # up to rounding: rows with noise are not packed
        np.testing.assert_allclose(noisy.metrics[0][key], plain.metrics[0][key], rtol=1e-5, err_msg=key)
    assert abs(noisy.metrics[1]["grad_norm"] / plain.metrics[1]["grad_norm"] - 1) > 1e-3
    if name == "sft":
        assert run("again", neftune_alpha=5.0).metrics[1]["grad_norm"] == noisy.metrics[1]["grad_norm"]
