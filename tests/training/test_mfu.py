"""The metric mfu: which passes of an update count, and the share that real runs record."""

import dataclasses
import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.flops import matmul_parameters, row_flops
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.step import update_flops

POLICY = Net(ModelConfig(vocab_size=50, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=20))
CRITIC = Net(dataclasses.replace(POLICY.config, layers=1, head="score"))
SEGMENTS = jnp.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])


def flops_of(step: int = 0, critic=None, warm: int = 0, alternate: bool = False, shared: bool = False):
    """In passes of the policy and of the critic over all rows, of updates of two iterations."""
    run = SimpleNamespace(
        model=SimpleNamespace(net=POLICY),
        critic=None if critic is None and not shared else SimpleNamespace(net=CRITIC),
        critic_alone=None if critic is None else SimpleNamespace(passes=critic[0], apart=critic[1], warmup_steps=warm),
        batch=SimpleNamespace(num_iterations=2),
        pack=SimpleNamespace(positions=SimpleNamespace(alternate=alternate)),
        config=SimpleNamespace(critic=SimpleNamespace(shared=shared)),
    )
    return float(update_flops(run, step, Batch(Inputs(SEGMENTS, SEGMENTS), mask=SEGMENTS)))  # pyright: ignore


def test_every_pass_over_a_batch_counts():
    policy, critic = (float(sum(x.sum() for x in row_flops(net, SEGMENTS))) for net in (POLICY, CRITIC))
    assert flops_of() == flops_of(shared=True) == 2 * policy
    assert flops_of(critic=(3, False)) == pytest.approx(2 * policy + 5 * critic)
    assert flops_of(critic=(1, True)) == pytest.approx(2 * policy + critic)
    assert flops_of(step=4, critic=(0, False), warm=5) == pytest.approx(2 * critic)
    assert flops_of(step=5, critic=(0, False), warm=5) == pytest.approx(2 * policy + 2 * critic)


def test_of_rows_that_are_only_read_the_forward_pass_counts():
    forward, backward = row_flops(POLICY, SEGMENTS)
    assert flops_of(alternate=True) == pytest.approx(2 * float(forward.sum() + backward[0] + backward[2]))


def test_a_peak_is_a_positive_number():
    config = default()
    config.logging.peak_tflops = 0.0
    with pytest.raises(ConfigError, match=r"logging.peak_tflops is 0.0, but it takes a number > 0, or none"):
        validate(config)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft_tiny", "grpo"])
def test_a_run_records_its_share_of_the_peak(root, tmp_path, recipe):
    """By the seconds of a step where steps overlap, and of the update where a batch is sampled in between."""
    config = load_config_file(f"{root / 'configs'}/{recipe}.py:tiny")
    config.output_dir = str(tmp_path)
    config.logging.backends, config.logging.names = ("jsonl",), "verl"
    config.logging.peak_tflops = 0.5
    config.eval.every = -1
    result = jaxrl_llm.train(config)
    net = result.model.net.config
    per_token = 6 * sum(matmul_parameters(result.model.net))
    longest = config.rollout.max_prompt_length + config.rollout.max_completion_length
    mixing = 3 * 4 * net.layers * net.heads * net.head_dim * (longest + 1)
    for step in [x for x in result.metrics if x["step"] > 0]:
        tokens = step["step_tokens"]
        seconds = tokens / step["tokens_per_second"] if recipe == "sft_tiny" else step["time/update"]
        assert per_token < step["mfu"] * 0.5e12 * seconds / tokens < per_token + mixing
    recorded = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["perf/mfu/actor"] for x in recorded if x["step"]] == [x["mfu"] for x in result.metrics if x["step"]]
