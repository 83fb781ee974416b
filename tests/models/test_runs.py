"""Short GRPO runs of families with parts of their own: what is trained, and transformers on what they export."""

import jax
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

import jaxrl_llm
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.model import load_model
from tests.models.oracles import VARIANTS, oracle_logits


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["apertus1p5_text", "bailing_hybrid", "kolibri1", "hy_v4"])
def test_a_family_is_trained_and_exported(variant, root, tmp_path):
    """Every parameter but corrections, indexers and constants moves, and the sampler's log-probs are the trainer's."""
    own = {"output_vocab_size": 320, "vocab_size": 330} if variant == "apertus1p5_text" else {"vocab_size": 320}
    config = VARIANTS[variant]()
    config = type(config)(**{name: x for name, x in config.to_dict().items() if name != "model_type"} | own)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    made = load_config_file(f"{root / 'configs' / 'grpo'}.py:tiny")
    made.model.path, made.model.tokenizer = str(tmp_path / "model"), "embedded:sort"
    made.output_dir, made.eval.every, made.logging.backends = str(tmp_path / "run"), -1, ("jsonl",)
    made.optimizer.warmup_steps, made.optimizer.weight_decay, made.optimizer.learning_rate = 0, 0.1, 1e-2
    result = jaxrl_llm.train(made)
    folder = result.output_dir / "hf"
    trained = load_model(folder)
    before, after = (
        {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
        for params in (load_model(tmp_path / "model").params, trained.params)
    )
    kept = {name for name, x in after.items() if np.array_equal(x, before[name])}
    assert kept == {name for name in after if name.endswith(("/correction", "/beta", "/eps")) or "/indexer/" in name}
    name = "sampling/sampling_logp_difference/max"
    assert max(abs(line[name]) for line in result.metrics if name in line) < 1e-4
    again, problems = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(problems.values())
    tokens = np.random.default_rng(0).integers(0, 320, (2, 9))
    np.testing.assert_allclose(trained(tokens), oracle_logits(again.eval(), tokens), atol=1e-4)
