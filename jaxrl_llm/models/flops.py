"""Model FLOPs: the operations that a forward and a backward pass over rows need, whatever a program makes of them.

The count of arXiv 2204.02311 (appendix B): matmuls alone, and each once, so that what is recomputed does not count.
With N_f and N_t the parameters that a token is multiplied with, frozen and trained, a token takes

    forward   2 (N_f + N_t) + mixing
    backward  2 N_f + 4 N_t + 2 mixing

which are the 6 N of full fine-tuning, and 4 N of what is frozen beside adapters; layers below the first one in which
something is trained have no backward pass. N counts the k experts that a token goes to and the head, and no embedding,
which is looked up. Of k experts of which some compute nothing it counts the share that experts which compute have in
all. `mixing` is what mixers do besides: of attention, 2 H (d_k + d_v) for each token that a token sees, itself
included, and so half of the T^2 pairs of a row. Where tokens are chosen, attention is to those alone, and the forward
pass rates those before.
"""

import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.adapters.lora import SAVED, split
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.models.transformer import segment_positions

MATRICES = ("kernel", "lora_a", "lora_b", "start_a", "start_b")


class RowFlops(NamedTuple):
    """Model FLOPs of each row: of its forward pass, and of the backward pass to what is trained."""

    forward: jax.Array  # [N]
    backward: jax.Array  # [N]


def row_flops(net: Net, segments: jax.Array) -> RowFlops:
    """Model FLOPs `[N]`, in fp32, of one pass over rows of `segments` `[N,T]`, each row by itself.

    Every token counts, also in a prompt that rows share, and so does its place in the head, read or not. What encodes
    images is left out.
    """
    real, places = segments != 0, segment_positions(segments)

    def total(numbers) -> jax.Array:
        return jnp.where(real, numbers, 0).sum(axis=1, dtype=jnp.float32)

    def pairs(window: int | None) -> jax.Array:
        if window is None:
            return total(places + 1)
        return total(places % window + 1 if net.config.sliding_chunks else jnp.minimum(places + 1, window))

    tokens, (frozen, trained), first = total(1), matmul_parameters(net), _first_trained_layer(net)
    mixing = {below: jnp.zeros(len(segments), jnp.float32) for below in (True, False)}
    rating = 0.0  # of the tokens that are chosen from, which has no backward pass
    kinds = ((kind, layer < first) for layer, kind in enumerate(net.config.layer_configs))
    for (kind, below), count in collections.Counter(kinds).items():
        mixer: Any = kind.mixer
        config, seen = net.config.of(kind), pairs(kind.window)
        if hasattr(mixer, "rating") and not mixer.reads_mask(config, segments.shape[1]):
            rating += count * mixer.rating(config, tokens, seen)
            seen = total(mixer.attended(config, places))
        mixing[below] += count * mixer.flops(config, tokens, seen)
    forward = 2.0 * (frozen + trained) * tokens + mixing[True] + mixing[False] + rating
    passed, _ = matmul_parameters(net, first)
    return RowFlops(forward, (2.0 * (frozen - passed) + 4.0 * trained) * tokens + 2.0 * mixing[False])


def matmul_parameters(net: Net, below: int | None = None) -> tuple[float, float]:
    """The parameters that each token is multiplied with: those that are frozen, and those that are trained.

    With `below` they are those of the layers below that one alone.
    """
    config = net.config
    head = "embed/weight" if config.tie_embeddings and config.head == "lm" else None

    def numbers(params: Params) -> dict[str, float]:
        found = {}
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            name = path_name(path).removeprefix(f"{SAVED}/")
            if (name.rpartition("/")[2] in MATRICES or name == head) and not name.startswith("vision/"):
                used = config.experts_per_token / config.routed_experts if "/experts/" in name else 1.0
                layers = config.stacks.get(name.partition("/")[0], ())
                if below is not None:
                    used *= sum(layer < below for layer in layers) / max(len(layers), 1)
                found[name] = used * x.size
        return found

    frozen, trained = map(numbers, _split(net))
    return sum(size for name, size in frozen.items() if name not in trained), sum(trained.values())


def _first_trained_layer(net: Net) -> int:
    """The first layer in which something is trained, or that something is trained before; their number: none."""
    config, first = net.config, net.config.layers
    for path, _ in jax.tree_util.tree_leaves_with_path(_split(net)[1]):
        part = path_name(path).removeprefix(f"{SAVED}/").partition("/")[0]
        behind = (config.layers,) if part in ("norm", "project_out", "head", "score") else (0,)
        first = min(first, *config.stacks.get(part, behind))
    return first


def _split(net: Net) -> tuple[Params, Params]:
    numbers = Net(dataclasses.replace(net.config, quantize="none", quantize_experts="same"))
    return split(numbers.shapes(), net.config.frozen)
