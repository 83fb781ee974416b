"""Mistakes found in other libraries for online training, each with the test that would have caught it here."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms import policy_losses
from jaxrl_llm.algorithms.advantages import token_rewards
from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.algorithms.kl import kl_estimate
from jaxrl_llm.config import default
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.rewards.functions import soft_overlong
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.reference import start_reference
from jaxrl_llm.training.setup.objectives import needs_reference
from jaxrl_llm.training.setup.specs import reference_spec
from tests.models.decoding import trainer_logps
from tests.training.objectives.test_policy_gradient import NET, PARAMS

EOS = 0  # also what fills up rows: nothing may tell padding by its id
PROMPT, COMPLETION, TEMPERATURE = 3, 6, 0.7


@pytest.fixture(scope="module")
def rollout():
    """32 completions, sampled at another temperature than 1 and from the 12 most likely tokens only."""
    prompts = np.random.default_rng(0).integers(1, 31, (4, PROMPT)).astype(np.int32)
    prompts[1, 0] = EOS  # a padded prompt, and an end-of-text id inside a prompt
    segments = np.ones_like(prompts)
    segments[1, 0] = 0
    prompts[2, 1] = EOS
    sampling = SamplingParams(temperature=TEMPERATURE, top_k=12)
    engine = Engine(sampling, net=NET, group_size=8, max_completion_length=COMPLETION, eos=(EOS,), chunk=4)
    return jax.device_get(engine.generate(PARAMS, prompts, segments, jax.random.key(1)))


def scored(rollout, temperature=TEMPERATURE):
    inputs = Inputs(rollout.tokens, rollout.segments, prompt_width=PROMPT)
    return np.asarray(trainer_logps(NET, PARAMS, inputs, temperature)[0])


def test_fractional_rewards_are_not_cut_to_integers():
    """A buffer of the tokens' integer type turned 0.7 into 0 and 1.9 into 1."""
    mask = np.array([[0, 1, 1], [0, 1, 0]], np.int32)
    np.testing.assert_allclose(token_rewards([0.7, 1.9], mask), [[0, 0, 0.7], [0, 1.9, 0]], rtol=1e-6)
    assert token_rewards(np.array([1, 2]), mask).dtype == jnp.float32


def test_the_end_of_text_is_part_of_the_completion(rollout):
    """An answer that is only the end of text had an empty mask, lost its reward, and did not count as ended."""
    tokens, mask = rollout.tokens[:, PROMPT:], rollout.mask[:, PROMPT:]
    ended = (tokens == EOS) & (mask > 0)
    assert 3 < rollout.finished.sum() < len(tokens)
    np.testing.assert_array_equal(ended.any(axis=1), rollout.finished)
    np.testing.assert_array_equal(mask.sum(axis=1), rollout.lengths)
    for row, length in zip(np.flatnonzero(rollout.finished), rollout.lengths[rollout.finished], strict=True):
        assert tokens[row, length - 1] == EOS
        assert mask[row, length - 1] == 1
    assert 1 in rollout.lengths[rollout.finished], "no answer ended at once: choose another seed"
    rewards = np.asarray(token_rewards(np.ones(len(tokens)), mask))
    np.testing.assert_array_equal(rewards.sum(axis=1), 1)
    np.testing.assert_array_equal(rewards[ended], 1)


def test_padding_is_told_by_segments_and_not_by_its_id(rollout):
    """Where the padding id is that of the end of text, masks of `tokens != pad` lose the end of every completion."""
    logps = scored(rollout)
    ended = (rollout.tokens == EOS) & (rollout.mask > 0)
    assert (logps[ended] < 0).all()
    other = np.where(rollout.segments > 0, rollout.tokens, 17)  # what fills up a row makes no difference
    np.testing.assert_allclose(scored(rollout._replace(tokens=other)), logps, atol=1e-6)


def test_the_sampler_and_the_trainer_agree_at_any_temperature_and_under_filters(rollout):
    """Log-probs at temperature 1 of samples at 0.7, or renormalised over the top k: ratios are off from the start."""
    live = rollout.mask > 0
    np.testing.assert_allclose(scored(rollout)[live], rollout.sample_logps[live], atol=2e-5)
    assert np.abs(scored(rollout, 1.0) - rollout.sample_logps)[live].max() > 0.1
    # So the KL of a policy to itself is 0, which it was not where policy and reference had different temperatures.
    np.testing.assert_allclose(kl_estimate(scored(rollout), rollout.sample_logps, "k3")[live], 0, atol=1e-6)


def test_a_capped_weight_takes_no_gradient():
    """CISPO without stop-gradient on its weight is another objective."""
    old, advantages = jnp.array([[-1.0, -2.0]]), jnp.array([1.0])
    gradient = jax.grad(lambda x: policy_losses.cispo(x, old, advantages, 0.2, 5.0)[0].sum())(old + 0.5)
    np.testing.assert_allclose(gradient, -np.exp(0.5) * np.ones((1, 2)), rtol=1e-5)


def test_k1_in_the_loss_does_not_regularise():
    """Its expected gradient is 0 whatever the reference, where that of k2 is the gradient of the KL."""
    logits, reference = jnp.array([0.3, -0.5, 1.0]), jax.nn.log_softmax(jnp.array([1.0, 0.0, -1.0]))

    def expected_loss(logits, kind):
        logps = jax.nn.log_softmax(logits)
        draws = jax.lax.stop_gradient(jnp.exp(logps))  # every outcome, by its probability: the mean over samples
        return (draws * kl_estimate(logps, reference, kind)).sum()

    def true_kl(logits):
        logps = jax.nn.log_softmax(logits)
        return (jnp.exp(logps) * (logps - reference)).sum()

    np.testing.assert_allclose(jax.grad(expected_loss)(logits, "k1"), 0, atol=1e-6)
    np.testing.assert_allclose(jax.grad(expected_loss)(logits, "k2"), jax.grad(true_kl)(logits), rtol=1e-5)


def tiny(root, folder, **algorithm):
    config = load_config_file(f"{root / 'configs/grpo.py'}:tiny")
    config.output_dir, config.eval.every, config.logging.backends = str(folder / "run"), -1, ("jsonl",)
    config.optimizer.warmup_steps, config.optimizer.schedule = 0, "constant"
    config.logging.completions_every = 1
    config.algorithm.update(algorithm)
    return config


@pytest.mark.slow
def test_ratios_are_against_the_policy_that_sampled_and_clipping_acts(root, tmp_path):
    """Old log-probs that were never supplied made the ratio 1 and the clip idle; stale ones were those of step 0."""
    config = tiny(root, tmp_path, num_iterations=2)
    config.total_steps, config.optimizer.learning_rate = 3, 3e-3
    lines = jaxrl_llm.train(config).metrics
    for line in lines:
        # The policy has moved far since step 0, but never from the policy that sampled to the one of old_logps.
        assert line["sampling/sampling_logp_difference/max"] < 1e-3
    assert max(line["clip_ratio/region_mean"] for line in lines) > 0.01


@pytest.mark.slow
def test_every_step_and_every_row_draws_its_own_numbers(root, tmp_path):
    """A constant seed gave the same random numbers at every step: the same policy wrote the same completions again."""
    rows = [{"prompt": "sort:31524=", "answer": "12345"}] * 4
    config = tiny(root, tmp_path)
    config.optimizer.learning_rate = 0.0
    jaxrl_llm.train(config, train_dataset=rows)
    steps = [pq.read_table(tmp_path / f"run/completions/completions_0000{s}.parquet") for s in (1, 2)]
    texts = [[row["completion"] for row in step.to_pylist()] for step in steps]
    assert texts[0] != texts[1]
    assert len(set(texts[0])) > 4  # 16 rows of one prompt
    assert texts[0][:4] != texts[0][4:8]


def test_lengths_are_counted_in_tokens():
    """A punishment of long completions by their characters, against a limit in tokens."""
    punished = soft_overlong(completion_ids=[[5], [5] * 8], completions=["x" * 100, "y"], max_length=8, cache=4)
    assert punished == [0.0, -1.0]


def test_without_beta_there_is_no_reference():
    """A missing beta that was not 0 computed log-probs of a reference which the loss did not read."""
    config, params = default(), {"x": jnp.ones(2)}
    assert not needs_reference(config)
    config.algorithm.beta = 0.1
    assert needs_reference(config)
    reference = start_reference(reference_spec(config), params)
    assert reference["x"].unsafe_buffer_pointer() != params["x"].unsafe_buffer_pointer()  # updates donate those


def test_accumulated_batches_weigh_every_token_the_same():
    """A token mean of each micro-batch, then of those means, gives the tokens of short rows more weight."""
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], np.float32)
    for mode in ("token", "rollout_token"):
        weights = loss_weights(mask, mode, token_count=np.full(2, 5.0))
        np.testing.assert_allclose(weights, mask / 5, rtol=1e-6)
    by_part = loss_weights(mask, "microbatch_token", microbatch_rows=1)
    np.testing.assert_allclose(by_part, mask / np.array([[8.0], [2.0]]), rtol=1e-6)
