"""A model without its numbers, and what its parameters and caches look like.

A `Net` is the static side (configuration, graph); parameters are a plain nested dict of arrays. Everything that
computes is a pure function of both: `net.bind(params).hidden(inputs)`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.adapters.lora import LoraConfig, has_adapters, has_adapters_of, has_dropout, overlaid, with_saved
from jaxrl_llm.models.mixers.mixer import Mixer
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.moe import Routing
from jaxrl_llm.models.transformer import Transformer

Params = dict[str, Any]


@functools.lru_cache(maxsize=64)
def _abstract(config: ModelConfig) -> Transformer:
    """The module with shapes in the place of parameters, traced once for all nets of one configuration."""
    return nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))


@dataclasses.dataclass(frozen=True)
class Net:
    """The static side of a model: `bind(params)` gives the module whose methods compute.

    Parameters are stored with their layers stacked, whether the net scans them or not.
    """

    config: ModelConfig

    @functools.cached_property
    def graph(self):
        """The structure of the module, which parameters are merged into."""
        return nnx.split(_abstract(self.config))[0]

    def bind(self, params: Params) -> Transformer:
        """The module with these parameters (no copy; works under jit).

        Where they hold no adapters it is the base model, and experts or linear maps without any are the base model's;
        where they hold no keys of dropout nothing is dropped.
        """
        net = self if has_dropout(params) else self.without_dropout if has_adapters(params) else self.base
        if net.config.lora is not None and net.config.lora.experts:
            kinds = tuple(experts for experts in (False, True) if has_adapters_of(params, experts))
            net = net if len(kinds) == 2 else net.with_adapters_of(experts=kinds[0])
        params = overlaid(params)
        return nnx.merge(net.graph, params if self.config.scan_layers else unstack(params, self.config))

    @property
    def prompt_axis(self) -> int:
        """The axis of prompts in caches: behind the layers, where these are stacked."""
        return 1 if self.config.scan_layers else 0

    def empty_caches(self, prompts, rows: int, size: int) -> tuple:
        """Row caches with room for `size` tokens, for `rows` rows of each prompt whose caches `prefill` made."""
        return tuple(mixer.empty_cache(cache, rows, size) for mixer, cache in self.with_mixers(prompts))

    def prompt_caches(self, prompts, rows, end, size: int) -> tuple:
        """Prompt caches of `size` tokens: those before the place `end` of prompts with their only rows behind them."""
        pairs = zip(self.with_mixers(prompts), rows, strict=True)
        return tuple(mixer.prompt_cache(prompt, row, end, size) for (mixer, prompt), row in pairs)

    def with_mixers(self, caches) -> list[tuple[type[Mixer], Any]]:
        """The caches of runs of layers, each as a pair with the mixer that made it and reads it."""
        kinds = [self.config.layer_configs[run.layers[0]] for run in self.config.layer_runs]
        return [(kind.mixer, cache) for kind, cache in zip(kinds, caches, strict=True)]

    def shapes(self) -> Params:
        """The parameters as `jax.ShapeDtypeStruct`s: layers stacked, without keys of dropout."""
        _, shapes = nnx.split(_abstract(self.without_dropout.scanned().config))
        return with_saved(nnx.to_pure_dict(shapes), self.config.lora)

    def init(self, key) -> Params:
        """Random parameters: normal(0, init_scale) matrices, zero biases, unit norm scales.

        Adapters are drawn apart, so that the others are those of the net without adapters.
        """
        rngs = nnx.Rngs(params=key, lora=jax.random.fold_in(key, 1))
        params = nnx.to_pure_dict(nnx.state(Transformer(self.without_dropout.scanned().config, rngs), nnx.Param))
        return with_saved(params, self.config.lora)

    @functools.cached_property
    def base(self) -> "Net":
        """The net without adapters."""
        return self if self.config.lora is None else Net(dataclasses.replace(self.config, lora=None))

    @functools.cached_property
    def without_dropout(self) -> "Net":
        """The net whose adapters drop nothing, for evaluation and sampling: parameters without keys of dropout."""
        lora = self.config.lora
        if lora is None or not lora.dropout:
            return self
        return Net(dataclasses.replace(self.config, lora=dataclasses.replace(lora, dropout=0.0)))

    def with_adapters_of(self, experts: bool) -> "Net":
        """The net with adapters of experts alone, or of linear maps alone: the others are merged where their matrices
        are numbers, and those of quantised matrices stay beside them."""
        lora = self.config.lora
        assert lora is not None
        targets = tuple(name for name in lora.targets if (name in lora.experts) == experts)
        return self.with_lora(dataclasses.replace(lora, targets=targets))

    @functools.cached_property
    def plain(self) -> "Net":
        """The net without adapters and with its matrices as numbers: what model files hold."""
        return Net(dataclasses.replace(self.config, lora=None, quantize="none", quantize_experts="same"))

    def with_lora(self, lora: LoraConfig) -> "Net":
        """The net of the same model with the adapters that `lora` describes."""
        return Net(dataclasses.replace(self.config, lora=lora))

    def scanned(self) -> "Net":
        """The net that computes its layers in a `jax.lax.scan`: they are compiled once for all."""
        return Net(dataclasses.replace(self.config, scan_layers=True))

    def unrolled(self) -> "Net":
        """The net that computes its layers one after another, as decoding moves the fewest bytes; its parameters are
        the same."""
        return Net(dataclasses.replace(self.config, scan_layers=False))


def replace_caches(caches: Iterable[tuple[type[Mixer], Any]], replace: Callable[[type[Mixer], Any], Any]) -> tuple:
    """Returns what `replace(mixer, cache)` makes of each layer's cache, which is deleted where that is another one.

    The cache of a layer is deleted before that of the next one is made, so that the devices hold those of one layer
    twice, and not all.
    """
    made = []
    for mixer, cache in caches:
        made.append(jax.block_until_ready(replace(mixer, cache)))
        kept = {id(x) for x in jax.tree.leaves(made[-1])}
        for x in jax.tree.leaves(cache):
            if id(x) not in kept:
                x.delete()
    return tuple(made)


@dataclasses.dataclass(frozen=True)
class RecordingNet(Net):
    """A net whose `hidden` calls `record` once, while it is traced, with the routing of tokens to experts."""

    record: Callable[[Routing], None] = dataclasses.field(compare=False)

    def bind(self, params: Params) -> Transformer:
        model = super().bind(params)
        model.record = self.record
        return model


@jax.custom_vjp
def _apart(stack: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays of a stack. Their gradients are stacked again: those of indices are each padded with zeros to a whole
    stack, and XLA's CPU compiler adds up one for each layer at every element."""
    return tuple(stack[index] for index in range(len(stack)))


_apart.defvjp(lambda stack: (_apart(stack), None), lambda _, gradients: (jnp.stack(gradients),))


def unstack(params: Params, config: ModelConfig) -> Params:
    """The parameters with one dict a layer in place of stacked layers; unchanged when they are so already."""
    if 0 in params.get("layers", {}):
        return params
    layers: dict[int, Params] = {}
    for name, numbers in config.stacks.items():
        leaves, structure = jax.tree.flatten(params[name])
        apart = [_apart(x) if jnp.issubdtype(x.dtype, jnp.floating) else [x[i] for i in range(len(x))] for x in leaves]
        layers |= zip(numbers, map(structure.unflatten, zip(*apart, strict=True)), strict=True)
    others = {name: x for name, x in params.items() if name not in config.stacks}
    return {**others, "layers": {layer: layers[layer] for layer in sorted(layers)}}


def restacked(params: Params, config: ModelConfig, other: ModelConfig) -> Params:
    """The parameters of a net of `config` with their layers stacked as those of `other` are, which groups them
    differently."""
    if config.stacks == other.stacks:
        return params
    layers = unstack(params, config)["layers"]
    others = {name: x for name, x in params.items() if name not in config.stacks}
    stacks = other.stacks.items()
    return others | {name: jax.tree.map(lambda *x: jnp.stack(x), *(layers[i] for i in own)) for name, own in stacks}
