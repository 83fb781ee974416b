"""Settings of sampling as a run has them."""

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.training.logging.step_log import merge
from jaxrl_llm.training.moments import updates_made
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.setup.specs import critic_optimizer_spec, optimizer_spec
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.update import merge_frozen


@pytest.mark.slow
def test_completions_that_go_past_the_end_of_text(tmp_path):
    config = jaxrl_llm.default_config()
    config.output_dir, config.total_steps, config.eval.every = str(tmp_path / "run"), 1, -1
    config.rollout.max_completion_length, config.rollout.ignore_eos = 12, True
    config.rollout.max_prompt_length, config.batch.prompts, config.rollout.group_size = 16, 2, 2
    config.logging.backends = ("jsonl",)
    rows = [{"prompt": "sort:312=", "answer": "123"}] * 2  # which the model ends after a few tokens
    record = jaxrl_llm.train(config, rows).metrics[-1]
    assert record["completions/min_length"] == record["completions/max_length"] == 12
    config.algorithm.mask_truncated = True
    with pytest.raises(ConfigError, match=r"rollout\.ignore_eos is true, .* algorithm\.mask_truncated is True"):
        jaxrl_llm.train(config, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("minibatches", "made", "rates"),
    # Three passes of two minibatches in each of two steps. The joint pass is the last of the three: updates 4 and 5 of
    # 6 in the first step, of 12 over which the rate rises.
    [(0, 12, [4 / 12, 5 / 12, 10 / 12, 11 / 12]),
     # Passes of one minibatch, all before the policy's.
     (1, 6, [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])],
    ids=["the policy's minibatches", "its own"],
)  # fmt: skip
def test_the_critics_own_passes_rate_and_sizes(minibatches, made, rates, tmp_path):
    config = jaxrl_llm.default_config()
    config.algorithm.name, config.algorithm.advantage, config.batch.packing = "ppo", "ppo", "false"
    config.output_dir, config.total_steps, config.eval.every = str(tmp_path / "run"), 2, -1
    config.rollout.max_completion_length, config.rollout.group_size, config.rollout.max_prompt_length = 4, 1, 16
    config.batch.prompts, config.batch.minibatches, config.logging.backends = 4, 2, ("jsonl",)
    config.critic.num_iterations, config.critic.lr_warmup_steps, config.critic.microbatch_rows = 3, 2, 1
    config.critic.weight_decay, config.optimizer.weight_decay = 0.2, 0.1
    config.critic.minibatches = minibatches
    rows = [{"prompt": "sort:312=", "answer": "123"}] * 4
    mesh = build_mesh(config)
    with jax.set_mesh(mesh):
        run = build(config, mesh, Given(rows))
        state, updates = run.state, []
        for step in (1, 2):
            key = jax.random.fold_in(jax.random.key(0), step)
            batch = run.source.next(merge_frozen(state, run.frozen), key).batch
            state, metrics = improve(run, state, batch)
            updates += metrics
    assert int(updates_made(state.opt_state)) == 4
    assert int(updates_made(state.critic.opt_state)) == made
    found = [float(metrics["critic/lr"].value) for metrics in updates if "critic/lr" in metrics]
    np.testing.assert_allclose(found, config.critic.learning_rate * np.array(rates), rtol=1e-6)
    assert sum("lr" in metrics for metrics in updates) == 4
    assert {"lr", "critic/lr", "critic/loss", "loss"} <= merge(updates).keys()
    assert [critic_optimizer_spec(config).weight_decay, optimizer_spec(config).weight_decay] == [0.2, 0.1]
    config.critic.num_iterations, config.critic.microbatch_rows = 0, 3
    with pytest.raises(ConfigError, match=r"critic\.microbatch_rows is 3, but it must divide the [24] rows"):
        jaxrl_llm.train(config, rows)
