"""A short GRPO run of a family's model, as the tests of several families make one."""

import jax
import numpy as np

import jaxrl_llm
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.model import load_model


def trained_and_kept(root, folder):
    """The names of all parameters of a run with weight decay of the model in `folder` / "model", and of those that it
    left as they were, once the sampler's log-probs were the trainer's; its export is in `folder` / "run" / "hf"."""
    made = load_config_file(f"{root / 'configs' / 'grpo'}.py:tiny")
    made.model.path, made.model.tokenizer = str(folder / "model"), "embedded:sort"
    made.output_dir, made.eval.every, made.logging.backends = str(folder / "run"), -1, ("jsonl",)
    made.optimizer.warmup_steps, made.optimizer.weight_decay, made.optimizer.learning_rate = 0, 0.1, 1e-2
    result = jaxrl_llm.train(made)
    before, after = (
        {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(load_model(own).params)}
        for own in (folder / "model", folder / "run" / "hf")
    )
    name = "sampling/sampling_logp_difference/max"
    assert max(abs(line[name]) for line in result.metrics if name in line) < 1e-4
    return set(after), {name for name, x in after.items() if np.array_equal(x, before[name])}
