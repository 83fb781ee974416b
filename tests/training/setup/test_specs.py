"""Settings of sampling as a run has them."""

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError


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
