"""Passes of a network over the rows of a batch without gradients: log-probs, distributions, values."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch, Images, Inputs
from jaxrl_llm.distributed.sharding import constrain_rows
from jaxrl_llm.models.chunked_divergences import TopTokens
from jaxrl_llm.models.logprobs import head_inputs, token_logps, token_statistics, token_values, top_tokens
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.training.microbatch import map_microbatches, share_images, shared_features, with_features


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5))
def scored_logps(net: Net, params: Params, inputs: Inputs, temperature: float, rows: int, shards: int) -> jax.Array:
    """Log-probs `[N,T]` without gradients, computed `rows` rows at a time or as the layout says."""
    return _by_microbatch(
        net, params, lambda inputs: token_logps(net, params, inputs, temperature)[0], inputs, rows, shards
    )


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5))
def scored_norms(
    net: Net, params: Params, inputs: Inputs, temperature: float, rows: int, shards: int
) -> tuple[jax.Array, jax.Array]:
    """Log-probs `[N,T]` and `logit_norms` `[N,T]`, the squared norms of their gradients by the logits, in one pass.

    A norm is `1 - 2 p + sum_v p_v^2`, of which the sum is formed a few columns of the head at a time.
    """

    def of_rows(inputs: Inputs):
        tokens = token_statistics(net, params, inputs, temperature, squares=True)
        assert tokens.log_sum_squares is not None
        return tokens.logps, 1.0 - 2.0 * jnp.exp(tokens.logps) + jnp.exp(tokens.log_sum_squares)

    return _by_microbatch(net, params, of_rows, inputs, rows, shards)


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5))
def images_of_rows(net: Net, params: Params, images: Images, group_size: int, encode: bool, shards: int) -> Images:
    """The images of prompts as those of their `group_size` rows each, which share their pixels: each shard of the mesh
    that has rows of a prompt has a copy.

    With `encode` they are encoded here, once for all rows and passes, and rows share features in place of pixels.
    """
    if encode:
        features = net.bind(params).image_features(images)
        images = dataclasses.replace(images, pixels=None, features=features)
    if group_size == 1:
        return images
    rows = group_size * len(images.count)
    run = math.gcd(group_size, rows // shards)
    shared = images.pixels, images.features
    pixels, features = jax.tree.map(lambda x: jnp.repeat(x, group_size // run, axis=0), shared)
    bare = dataclasses.replace(images, pixels=None, features=None)
    of_rows = jax.tree.map(lambda x: constrain_rows(jnp.repeat(x, group_size, axis=0)), bare)
    return share_images(of_rows, pixels, features, rows, shards)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def scored_distributions(net: Net, params: Params, inputs: Inputs, rows: int, shards: int):
    """The distributions of every token without gradients: `head_inputs` `[N,T,D]`, and the head `[D,V]`."""
    hidden = _by_microbatch(net, params, lambda inputs: head_inputs(net, params, inputs), inputs, rows, shards)
    return hidden, net.bind(params).head_kernel().astype(hidden.dtype)


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5, 6, 7))
def scored_top(
    net: Net, params: Params, inputs: Inputs, temperature: float, k: int, vocab: int, rows: int, shards: int
) -> TopTokens:
    """The k likeliest of the first `vocab` tokens where each token is: ids and log-probs `[N,T,k]`, no gradients."""
    return _by_microbatch(
        net, params, lambda inputs: top_tokens(net, params, inputs, temperature, k, vocab), inputs, rows, shards
    )


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def values_before(net: Net, params: Params, inputs: Inputs, rows: int, shards: int) -> jax.Array:
    """A critic's values `[N,T]` without gradients, computed `rows` rows at a time or as the layout says."""
    return _by_microbatch(net, params, lambda inputs: token_values(net, params, inputs), inputs, rows, shards)


def _by_microbatch(
    net: Net, params: Params, function: Callable[[Inputs], Any], inputs: Inputs, rows: int, shards: int
) -> Any:
    """Arrays `[N,...]` that `function` gives of the inputs, `rows` rows at a time or as the layout says; images that
    rows share are encoded once."""
    inputs = with_features(inputs, shared_features(inputs, lambda images: net.bind(params).image_features(images)))
    batch = Batch(inputs, mask=None)
    found = map_microbatches(lambda x: function(x.inputs), batch, batch.rows // rows, shards)
    return jax.tree.map(constrain_rows, found)
