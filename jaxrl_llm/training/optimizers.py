"""The optimizer and its learning rate, from the configuration."""

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.config import ConfigError
from jaxrl_llm.sharding import path_name


def learning_rate_schedule(config) -> optax.Schedule:
    """The learning rate of each optimizer update.

    Warm-up rises linearly from 0 and reaches the peak after `warmup_steps`; the rest falls to `min_lr_ratio` x peak at
    the last update: linear, or cosine `min + (1 - min)(1 + cos(pi p)) / 2`. The counts are training steps times updates
    per step, and as in transformers the first update of a warm-up has rate 0.
    """
    c = config.optimizer
    updates = config.batch.minibatches * config.algorithm.num_iterations
    warmup, total = c.warmup_steps * updates, config.total_steps * updates
    after = max(total - warmup, 1)
    main = {
        "constant": optax.constant_schedule(c.learning_rate),
        "linear": optax.linear_schedule(c.learning_rate, c.learning_rate * c.min_lr_ratio, after),
        "cosine": optax.cosine_decay_schedule(c.learning_rate, after, alpha=c.min_lr_ratio),
    }[c.schedule]
    if not warmup:
        return main
    return optax.join_schedules([optax.linear_schedule(0.0, c.learning_rate, warmup), main], [warmup])


def make_optimizer(config) -> optax.GradientTransformation:
    """Global-norm clipping, then the named optimizer: AdamW (arXiv 1711.05101), with weight decay on matrices only."""
    c = config.optimizer
    if c.name != "adamw":
        raise ConfigError(f"optimizer.name is {c.name!r}; there is adamw")

    def decayed(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: not path_name(path).endswith(("bias", "scale")), params)

    adamw = optax.adamw(
        learning_rate_schedule(config),
        c.b1,
        c.b2,
        c.eps,
        weight_decay=c.weight_decay,
        mask=decayed,
        mu_dtype=jnp.float32,
    )
    return optax.chain(optax.clip_by_global_norm(c.max_grad_norm), adamw) if c.max_grad_norm else adamw
