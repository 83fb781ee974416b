"""Settings of sampling as a run has them."""

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.training.optimizers import updates_made
from jaxrl_llm.training.setup.run import build, build_mesh
from jaxrl_llm.training.setup.specs import critic_optimizer_spec, optimizer_spec
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.update import merge_frozen


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


def test_the_critics_own_passes_rate_and_sizes(tmp_path):
    config = jaxrl_llm.default_config()
    config.algorithm.name, config.algorithm.advantage, config.batch.packing = "ppo", "ppo", "false"
    config.output_dir, config.total_steps, config.eval.every = str(tmp_path / "run"), 2, -1
    config.rollout.max_completion_length, config.rollout.group_size, config.rollout.max_prompt_length = 4, 1, 16
    config.batch.prompts, config.batch.minibatches, config.logging.backends = 4, 2, ("jsonl",)
    config.critic.num_iterations, config.critic.lr_warmup_steps, config.critic.microbatch_rows = 3, 2, 1
    config.critic.weight_decay, config.optimizer.weight_decay = 0.2, 0.1
    rows = [{"prompt": "sort:312=", "answer": "123"}] * 4
    mesh = build_mesh(config)
    with jax.set_mesh(mesh):
        run = build(config, mesh, rows)
        state, updates = run.state, []
        for step in (1, 2):
            key = jax.random.fold_in(jax.random.key(0), step)
            batch = run.source.next(merge_frozen(state, run.frozen), key).batch
            state, made = improve(run, state, batch)
            updates += made
    assert int(updates_made(state.opt_state)) == 4
    assert int(updates_made(state.critic.opt_state)) == 12  # three passes of two minibatches in each of two steps
    # The joint pass is the last of the three: updates 4 and 5 of 6 in the first step, of 12 over which the rate rises.
    rates = [float(metrics["critic/lr"].value) for metrics in updates]
    np.testing.assert_allclose(rates, [config.critic.learning_rate * n / 12 for n in (4, 5, 10, 11)], rtol=1e-6)
    assert [critic_optimizer_spec(config).weight_decay, optimizer_spec(config).weight_decay] == [0.2, 0.1]
    config.critic.num_iterations, config.algorithm.num_iterations = 1, 2
    with pytest.raises(ConfigError, match=r"critic\.num_iterations is 1, less than algorithm\.num_iterations = 2"):
        jaxrl_llm.train(config, rows)
    config.critic.num_iterations, config.critic.microbatch_rows = 0, 3
    with pytest.raises(ConfigError, match=r"critic\.microbatch_rows is 3, but it must divide the 2 rows"):
        jaxrl_llm.train(config, rows)
