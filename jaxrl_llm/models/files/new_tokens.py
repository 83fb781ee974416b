"""Tokens that a model and its tokenizer did not have: rows for them in the embedding and the head."""

import copy
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from tokenizers import AddedToken

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.adapters.lora import has_adapters
from jaxrl_llm.models.model import Model, check_loaded, check_tokenizer
from jaxrl_llm.models.net import Net

OWN_TABLES = "vocab_size_per_layer_input"  # of config.json: each layer has an embedding of its own


def with_tokens(model: Model, tokens: Sequence[str], special: bool = False) -> Model:
    """The model with `tokens` in its vocabulary, each one id wherever it stands in a text.

    Those that are `special` are left out of decoded completions, as marks of turns are; rewards and stop strings see
    the others. Their rows of the embedding and of the head are the mean of those of the tokens before: they say
    nothing yet, and change no other token's probability by much. The vocabulary grows where it has no rows left behind
    the tokenizer's ids. Raises ConfigError: no tokens, one that is empty or there already, and a model with adapters,
    with tokens that are never sampled, whose layers have embeddings or experts of each token, or embeddings of n-grams
    where the vocabulary would grow.
    """
    check_loaded(model, "with_tokens")
    check_tokenizer(model)
    if has_adapters(model.params):
        raise ConfigError(f"{model.path} has adapters: merge them first (save_hf), and give the result new tokens")
    hf_config = copy.deepcopy(dict(model.hf_config or {}))
    if any(OWN_TABLES in entries for entries in (hf_config, hf_config.get("text_config") or {})):
        raise ConfigError(f"{model.path}: its layers have embeddings of their own, which cannot be given new tokens")
    if model.net.config.hash_layers:
        raise ConfigError(
            f"{model.path}: some layers have a table with the experts of each token, which says none for new tokens"
        )
    if model.net.config.unpredicted:
        raise ConfigError(
            f"{model.path}: the ids behind its vocabulary are of tokens that are never sampled, as that of images, and "
            "new ones would have these"
        )
    tokenizer = copy.deepcopy(model.tokenizer)
    known = tokenizer.get_vocab()
    there = [token for token in tokens if token in known]
    if there or not tokens or "" in tokens:
        which = f"{there[0]!r} is a token of {model.path} already (id {known[there[0]]})" if there else "none is named"
        which = "one is empty" if "" in tokens else which
        raise ConfigError(f"tokens: {which}: name those that are to be added, and no others")
    count = max(known.values()) + 1
    made = [AddedToken(token, special=special, normalized=False) for token in tokens]
    tokenizer.add_tokens(made, special_tokens=special)
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    if min(ids) < count:  # of a vocabulary with gaps
        raise ConfigError(f"{model.path}: its tokenizer gives {tokens[0]!r} the id {ids[0]}, which another token has")
    config = model.net.config
    size = max(*ids, config.vocab_size - 1) + 1
    if config.ngrams is not None and size > config.vocab_size:
        raise ConfigError(
            f"{model.path}: its layers have embeddings of n-grams, whose rows follow from the size of the vocabulary, "
            f"{config.vocab_size}: with {len(tokens)} more tokens than its tokenizer has it would need {size}"
        )
    net = Net(dataclasses.replace(config, vocab_size=size))
    wider = Net(dataclasses.replace(config, vocab_size=config.vocab_size + 1)).shapes()
    shapes = {path_name(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(wider)}

    def with_rows(path, x):
        axes = [
            axis for axis, (old, new) in enumerate(zip(x.shape, shapes[path_name(path)], strict=True)) if old != new
        ]
        if not axes:
            return x
        rows = jnp.moveaxis(x, axes[0], 0)
        mean = rows[:count].astype(jnp.float32).mean(axis=0).astype(x.dtype)
        rows = jnp.concatenate([rows, jnp.broadcast_to(mean, (size - len(rows), *mean.shape))])
        return jnp.moveaxis(rows.at[jnp.array(ids)].set(mean), 0, axes[0])

    params = jax.jit(lambda params: jax.tree_util.tree_map_with_path(with_rows, params))(model.params)
    for entries in (hf_config, hf_config.get("text_config") or {}):
        if "vocab_size" in entries:
            entries["vocab_size"] = size
    return dataclasses.replace(
        model, net=net, params=params, tokenizer=tokenizer, hf_config=hf_config or None, changed=True
    )
