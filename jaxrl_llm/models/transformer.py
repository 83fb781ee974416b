"""One decoder for every family: embedding, scanned or unrolled layers, final norm, language-model or score head."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.algorithms.batch import ImageEmbeddings, Images, Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import constrain, context_shards
from jaxrl_llm.models.altup import Streams
from jaxrl_llm.models.block import Block, normed
from jaxrl_llm.models.gated_streams import GatedStreams
from jaxrl_llm.models.hyper_connections import HyperStreams
from jaxrl_llm.models.kernels import grouped_matmul
from jaxrl_llm.models.kernels.fused_attention import BY_SEGMENTS, implementation, is_in_chunks
from jaxrl_llm.models.layers import Embed, Linear, PositionEmbed, RMSNorm, over_rms, soft_cap, stacked
from jaxrl_llm.models.mixers import context_attention
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs, ShownImages
from jaxrl_llm.models.model_config import LayerRun, ModelConfig
from jaxrl_llm.models.moe import Routing
from jaxrl_llm.models.per_layer import PerLayerEmbed
from jaxrl_llm.models.rope import long_row_frequencies
from jaxrl_llm.models.shortcut import ShortcutBlock
from jaxrl_llm.models.vision.tower import Vision, deepened, image_runs, with_images

LAYER_INPUT = "layer_input"
_saved = jax.checkpoint_policies


def _matmul_or_attention(primitive, *arrays, **params) -> bool:
    """True for matmuls with weights, and for kernels that compute attention: their outputs are as small as theirs."""
    attention = primitive.name == "pallas_call" or primitive.name.startswith("dot_product_attention_fwd")
    named = params.get("name") in (grouped_matmul.RESULT, context_attention.RESULT)
    if primitive.name == "dot_general" and arrays[0].dtype.itemsize == 1:  # sums that are scaled to what has the name
        return False
    return attention or named or bool(_saved.dots_with_no_batch_dims_saveable(primitive, *arrays, **params))


# What is saved of each layer for the backward pass, which recomputes the rest.
REMAT: dict[str, Any] = {
    "block": None,  # its input
    "dots": _matmul_or_attention,  # the outputs of its matmuls, and of attention by a kernel
    "offload": _saved.save_and_offload_only_these_names(  # its input, in the host's memory
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class HiddenStepHead(nnx.Module):
    """The step head of Qwen2.5-Math-PRM: a hidden layer with ReLU, as wide as the model, before the two logits."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.hidden = Linear(config.width, config.width, config, rngs, bias=True)
        self.logits = Linear(config.width, 2, config, rngs, bias=True)

    def __call__(self, x):
        return self.logits(jax.nn.relu(self.hidden(x)))


class Transformer(nnx.Module):
    """A decoder-only language model or, with `head="score"`, a model that gives each token one number, or with
    `head="step"` two, the logits of a step that ends there to be wrong and right."""

    record: Callable[[Routing], None] | None = None  # called, while tracing, with the routing of `hidden`

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs)
        small = config.embed_width
        self.embed_norm = RMSNorm(config.width, config, rngs) if config.embed_norm == "norm" else None
        self.positions = PositionEmbed(config, rngs) if config.learned_positions else None
        self.project_in = Linear(small, config.width, config, rngs) if small else None
        # Of 32 bits whatever the others have: a rounded one would turn far positions by other angles.
        zeros = jnp.zeros((config.rotated_size // 2,), jnp.float32)
        self.log_frequencies = nnx.Param(zeros) if config.rope_learned else None
        self.per_layer = PerLayerEmbed(config, rngs) if config.per_layer_width else None
        streams = Streams if config.altup_streams else HyperStreams if config.hyper_streams else None
        streams = GatedStreams if config.hyper_rank else streams
        self.streams = None if streams is None else streams(config, rngs)
        make = ShortcutBlock if config.shortcut_experts else Block
        if config.scan_layers:
            for name, layers in config.stacks.items():
                block = functools.partial(make, config, config.layer_configs[layers[0]])
                setattr(self, name, stacked(block, len(layers), rngs))
        else:
            self.layers = nnx.List([make(config, kind, rngs) for kind in config.layer_configs])
        self.norm = RMSNorm(config.width, config, rngs) if config.final_norm else None
        self.project_out = Linear(config.width, small, config, rngs) if small else None
        self.head = (
            None
            if config.tie_embeddings or config.head != "lm"
            else Linear(config.outer_width, config.vocab_size, config, rngs, config.head_bias)
        )
        # Beside adapters the score head is trained, and like them it is fp32 whatever the type of the frozen rest.
        trained = config if config.lora is None else dataclasses.replace(config, param_dtype="float32")
        if config.head == "step" and config.step_hidden:
            self.score = HiddenStepHead(trained, rngs)
        elif config.head == "step":
            self.score = Linear(config.outer_width, 2, trained, rngs, bias=True)
        else:
            self.score = Linear(config.outer_width, 1, trained, rngs) if config.head == "score" else None
        self.vision = None if config.vision is None else Vision(config.vision, config, rngs)

    def hidden(self, inputs: Inputs):
        """Hidden states `[N,T,D]` after the final norm, in the compute dtype, as the heads read them.

        The rows are computed as they are: a layout is followed by the caller (models/logprobs.py).
        """
        length = inputs.tokens.shape[1]
        inputs = _pad_for_context(inputs)
        mixed, x, images = self._embedded_rows(inputs)
        counted = mixed.segments != 0 if inputs.multiplicity is None else inputs.multiplicity
        replayed = None if inputs.experts is None else _by_run(self.config, inputs.experts)

        def body(block: Block, x, experts, arrays, read):
            return block.apply(x, mixed._replace(**read), counted, experts, arrays)

        x, outputs = self._through_layers(body, x, inputs.tokens, replayed, images)
        routings = [routing for routing in outputs if routing is not None]
        if self.record is not None and routings:
            if self.config.scan_layers:  # each holds the sums of its layers, stacked
                routings = [jax.tree.map(lambda x: x.sum(0), routing) for routing in routings]
            self.record(jax.tree.map(lambda *sums: sum(sums), *routings))
        return self._last(x)[:, :length]

    def prefill(self, tokens, segments, images: Images | None = None):
        """Hidden states `[B,P,D]` of prompts padded on the left, the mixers' caches, a tuple with one per run, and the
        experts `[B,P,L,k]` of each token in the L layers that have some (None: there are none)."""
        inputs = Inputs(tokens, segments, images=images, prompt_width=tokens.shape[1])
        mixed, x, placed = self._embedded_rows(inputs)

        def body(block: Block, x, _, arrays, read):
            return block.prefill(x, mixed._replace(**read), arrays)

        x, outputs = self._through_layers(body, x, tokens, images=placed)
        return self._last(x), *_caches_and_experts(self.config, outputs)

    def decode(self, tokens, inputs: DecodeInputs, prompts, caches):
        """Hidden states `[G,R*W,D]` of each row's next W tokens, the row caches with them, and their experts.

        `prompts` are the caches of `prefill` for the G prompts, `caches` those of `Net.empty_caches` for their rows.
        """

        def body(block: Block, x, layer_caches, arrays, read):
            prompt, cache = layer_caches
            return block.decode(x, inputs._replace(**read, tokens=tokens), prompt, cache, arrays)

        layer_caches = tuple(zip(prompts, caches, strict=True))
        x, outputs = self._through_layers(body, self._embedded(tokens, inputs.positions), tokens, layer_caches)
        return self._last(x), *_caches_and_experts(self.config, outputs)

    def _last(self, x):
        """The hidden states that the heads read, of x `[...,D]` behind the last layer."""
        x = normed(self.norm, x)
        return x if self.project_out is None else self.project_out(x)

    def head_kernel(self):
        """The matrix `[D,V]` from hidden states to logits; a bias is its last row, `[D+1,V]`."""
        kernel, bias = self._head()
        return kernel if bias is None else jnp.concatenate([kernel, bias[None]])

    def _head(self) -> tuple[jax.Array, jax.Array | None]:
        if self.score is not None:
            raise ConfigError("this model has a score head and no language-model head: it gives scores, no logits.")
        if self.head is None:
            return self.embed.weight[...].T, None
        return self.head.kernel[...], None if self.head.bias is None else self.head.bias[...]

    def logits(self, hidden, ids: Sequence[int] | None = None):
        """Logits `[..., V]` in fp32, or those `[..., len(ids)]` of the tokens `ids` alone."""
        chosen = slice(None) if ids is None else jnp.array(ids)
        hidden, (kernel, bias) = self._divided(hidden), self._head()
        kernel = kernel if ids is None else kernel[:, chosen]
        logits = jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
        # Apart from the matrix, which every step of decoding would else copy.
        logits = logits if bias is None else logits + bias[chosen].astype(jnp.float32)
        return soft_cap(logits, self.config.logit_softcap)

    def head_input(self, hidden):
        """Hidden states as their matmul with `head_kernel` takes them: in its dtype, divided as logits are, and behind
        them a 1 where the head has a bias."""
        hidden = self._divided(hidden)
        if not self.config.head_bias:
            return hidden
        return jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)

    def _divided(self, hidden):
        hidden = hidden.astype(jnp.float32) if self.config.fp32_head else hidden
        return hidden if self.config.logit_divisor == 1.0 else hidden / self.config.logit_divisor

    def scores(self, hidden):
        """One number per token `[...]` in fp32, from the score head; from a step head two `[...,2]`.

        Raises ConfigError for a model with another head.
        """
        if self.score is None:
            raise ConfigError('this model has no score head: load it with head="score".')
        scores = self.score(hidden.astype(jnp.float32))
        return scores[..., 0] if self.config.head == "score" else scores

    def __call__(self, tokens, segments=None, positions=None, images: Images | None = None, prompt_width: int = 0):
        """Logits `[N,T,V]` in fp32 (or scores `[N,T]` with the score head, `[N,T,2]` with a step head)."""
        hidden = self.hidden(Inputs(tokens, segments, positions, images=images, prompt_width=prompt_width))
        return self.scores(hidden) if self.score is not None else self.logits(hidden)

    def encode_images(self, tokens, segments, images: Images) -> ImageEmbeddings:
        """The images of rows as embeddings of their image tokens; raises ConfigError for a model without vision."""
        if self.config.vision is not None and self.config.vision.is_read_apart:
            raise ConfigError(
                "rows with images are packed, which this model's layers cannot read: set batch.packing to false"
            )
        features = self.image_features(images)
        assert self.vision is not None
        placed = self.vision.place(tokens, segments, segment_positions(segments), features.shape[-2], images)
        if images.source is None or images.features is None:
            return dataclasses.replace(placed, values=features)
        first = images.source[:, None] * features.shape[2]
        values = features.reshape(len(features), -1, features.shape[-1])
        return dataclasses.replace(placed, values=values, index=jnp.where(placed.index < 0, -1, placed.index + first))

    def image_features(self, images: Images) -> jax.Array:
        """The features `[N,M,(1+E)D]` of the tokens of all tiles, or those that rows share, as `Images.features` has
        them; raises ConfigError for a model without vision."""
        if self.vision is None:
            raise ConfigError(
                "rows have images, but this model reads text alone: leave them out, or use a model that has a vision "
                "part (docs/vision.md)"
            )
        if images.features is not None:
            return images.features
        if images.source is not None:
            images = dataclasses.replace(images, pixels=_of_rows(images.pixels, images.source), source=None)

        def checkpointed(step):
            if self.config.remat == "none":
                return step
            return jax.checkpoint(step, prevent_cse=False, policy=REMAT[self.config.remat])

        return self.vision.encode(images, jnp.dtype(self.config.dtype), checkpointed)

    def _read(self, tokens):
        """The tokens that are looked up in tables: one in the place of all that stand for images and the like."""
        vision = self.config.vision
        if vision is None or not vision.blank_tokens:
            return tokens
        return jnp.where(jnp.isin(tokens, jnp.array(vision.blank_tokens)), vision.blank, tokens)

    def _embedded(self, tokens, positions, noise=None):
        x = constrain(self.embed(self._read(tokens), self.config.dtype), "rows", "positions", None)
        x = x if self.config.embed_scale == 1.0 else x * jnp.asarray(self.config.embed_scale, x.dtype)
        x = x if noise is None else x + noise.astype(x.dtype)
        x = x if self.project_in is None else self.project_in(x)
        x = over_rms(x, self.config.norm_eps).astype(x.dtype) if self.config.embed_norm == "rms" else x
        x = normed(self.embed_norm, x)
        if self.positions is None:
            return x
        return x + constrain(self.positions(positions, x.dtype), "rows", "positions", None)

    def _embedded_rows(self, inputs: Inputs) -> tuple[AttentionInputs, jax.Array, ImageEmbeddings | None]:
        """The layout that mixers read, the embeddings `[N,T,D]`, and the images."""
        tokens, vision = inputs.tokens, self.config.vision
        segments = jnp.ones_like(tokens) if inputs.segments is None else inputs.segments
        positions = segment_positions(segments) if inputs.positions is None else inputs.positions
        images, shown = inputs.images, None
        if vision is not None and vision.is_read_apart:
            shown, images = self._shown(inputs, segments), None
        elif isinstance(images, Images):
            images = self.encode_images(tokens, segments, images)
        layout = _layout(self.config, inputs, segments, positions, images)._replace(shown=shown, tokens=tokens)
        x = self._embedded(tokens, positions, inputs.noise)
        if images is not None:
            x = constrain(with_images(x, images), "rows", "positions", None)
        return layout, x, images

    def _shown(self, inputs: Inputs, segments) -> ShownImages:
        """The images of rows that layers read, none where there are none."""
        if inputs.images is None:
            none = jnp.zeros((len(segments), 0, self.config.width), self.config.dtype)
            return ShownImages(none, jnp.zeros((*segments.shape, 0), bool))
        assert isinstance(inputs.images, Images)
        assert self.vision is not None
        positions, states = segment_positions(segments), self.image_features(inputs.images)
        if inputs.images.source is not None and inputs.images.features is not None:
            states = _of_rows(states, inputs.images.source)
        return ShownImages(states, self.vision.seen(inputs.tokens, segments, positions, inputs.images))

    def _through_layers(
        self, body, x, tokens, caches=None, images: ImageEmbeddings | None = None
    ) -> tuple[jax.Array, tuple]:
        """x after every layer, with the features that `images` add there, and the second results of
        `body(block, x, cache, arrays, read)`, one per run of layers.

        Its third result is what a layer passes on, and `read` what a layer reads of that: fields of its mixer's inputs.
        """
        deep = 0 if images is None else images.values.shape[-1] // self.config.width - 1  # layers that images add to
        stacks = {}
        if self.config.scan_layers:
            stacks = {name: nnx.split(getattr(self, name)) for name in self.config.stacks}
        own = None if self.per_layer is None else self.per_layer(self._read(tokens), x)
        x = x if self.streams is None else self.streams.spread_out(x)
        outputs: list[Any] = []
        passed_on: dict[int | None, Any] = {None: (None, None)}
        for number, run in enumerate(self.config.layer_runs):
            graph, state = stacks[run.stack] if run.scanned else nnx.split(self.layers[run.layers[0]])
            if run.scanned and len(run.layers) < len(self.config.stacks[run.stack]):
                first, last = run.start, run.start + len(run.layers)
                state = jax.tree.map(lambda x, a=first, b=last: jax.lax.slice_in_dim(x, a, b), state)
            arrays, stacked = _layer_arrays(self.config, run)
            if self.log_frequencies is not None and arrays.inv_freq.size:
                arrays = arrays._replace(inv_freq=arrays.inv_freq * jnp.exp(self.log_frequencies[...]))
            read = {"shared": passed_on[run.shares][0], "chosen": passed_on[run.chosen_by][1]}

            def step(x, layer, graph=graph, arrays=arrays, run=run, read=read):
                state, cache, own_arrays, number, own = layer
                x, block = checkpoint_name(x, LAYER_INPUT), nnx.merge(graph, state)
                own_arrays = arrays if own_arrays is None else own_arrays
                streams = None
                if block.altup is not None:
                    streams = block.altup.predicted(x)
                    x = streams[..., 0, :]
                x, out, passed = body(block, x, cache, own_arrays, read)
                x = block.finished(x, own, streams)
                if images is not None and number is not None:
                    added = functools.partial(deepened, images=images, layer=number)
                    x = jax.lax.cond(number < deep, added, lambda x: x, x)
                    x = constrain(x, "rows", "positions", None)
                return x, (out, tuple(part if used else None for part, used in zip(passed, run.passes, strict=True)))

            if self.config.remat != "none":
                # A scan keeps XLA from merging the recomputation with the forward pass; unrolled, a barrier must.
                step = jax.checkpoint(step, prevent_cse=not run.scanned, policy=REMAT[self.config.remat])
            numbers = jnp.array(run.layers if run.scanned else run.layers[0]) if run.layers[0] < deep else None
            of_run = slice(run.layers[0], run.layers[-1] + 1) if run.scanned else run.layers[0]
            layer = (
                state,
                None if caches is None else caches[number],
                arrays if stacked else None,
                numbers,
                None if own is None else own[of_run],
            )
            x, (out, passed) = jax.lax.scan(step, x, layer) if run.scanned else step(x, layer)
            outputs.append(out)
            if any(run.passes):
                passed_on[run.layers[0]] = jax.tree.map(lambda x: x[0], passed) if run.scanned else passed
        return x if self.streams is None else self.streams.gathered(x), tuple(outputs)


def _layout(
    config: ModelConfig, inputs: Inputs, segments, positions, images: ImageEmbeddings | None
) -> AttentionInputs:
    """The tokens that see each other in rows of these segments and positions `[N,T]`, and their rotations."""
    tokens, prefixes, c, runs = inputs.tokens, inputs.prefix_segments, config, None
    if prefixes is not None and not c.shares_prefixes:
        raise ConfigError(
            "rows of a group share a prefix, which this model's layers cannot: set batch.packing to false"
        )
    both_ways = "" if images is None or c.vision is None else c.vision.bidirectional
    if c.sees_prompts:
        in_prompt = inputs.in_prompt
        if in_prompt is None:
            in_prompt = jnp.broadcast_to(jnp.arange(tokens.shape[1]) < inputs.prompt_width, tokens.shape)
        runs = image_runs(jnp.where(in_prompt, 0, -1), segments)
    elif images is not None and both_ways:
        runs = image_runs(images.index, segments)
    length = tokens.shape[1]
    by_mask = prefixes is not None or runs is not None or is_in_chunks(c, length)
    kinds = [kind for kind in c.layer_configs if getattr(kind.mixer, "reads_mask", _always)(c.of(kind), length)]
    # Some kernels read segments, and a mask [N,T,T] only where segments do not say it all.
    kernels = {implementation(c.of(kind), length, by_mask) for kind in kinds}
    if by_mask and "flash" in kernels:
        raise ConfigError(
            f"model.attention = {c.attention!r} reads no mask, which rows that share a prefix (batch.packing), "
            "whose images are seen in both directions or that are longer than a chunk of the attention need: use "
            "'auto', 'cudnn' or 'xla'"
        )
    masked = kernels - {"context"} if by_mask else kernels - {"context", *BY_SEGMENTS}
    mask = attention_mask(segments, prefixes, runs) if masked else None
    sliding_mask = mask if both_ways == "sliding" else None
    mask = mask if sliding_mask is None else attention_mask(segments, prefixes)
    # Of models with axes also where no row has images, so that their caches can be put together.
    rotary, shift = None, jnp.zeros(len(tokens), jnp.int32) if c.rope_axes else None
    if images is not None and images.positions is not None:
        rotary = images.positions[..., jnp.array(c.rope_axes)]
        shift = images.positions.max(axis=(1, 2)) + 1 - (segments != 0).sum(axis=1)
    inv_freq = long_row_frequencies(c.rope, c.rotated_size, segments, positions)
    return AttentionInputs(
        positions, segments, mask, by_mask, runs is None, sliding_mask, runs, inv_freq, rotary, shift,
        prefixes=prefixes,
    )  # fmt: skip


def _always(config: ModelConfig, length: int) -> bool:
    return True


def _by_run(config: ModelConfig, experts) -> tuple:
    """The experts `[N,T,L,k]` of all layers as those of each run: of a scanned one stacked, of a dense one None."""
    parts, first = [], 0
    for run in config.layer_runs:
        if not config.layer_configs[run.layers[0]].experts:
            parts.append(None)
            continue
        part = experts[..., first : first + len(run.layers), :]
        parts.append(jnp.moveaxis(part, -2, 0) if run.scanned else part[..., 0, :])
        first += len(run.layers)
    return tuple(parts)


def _caches_and_experts(config: ModelConfig, outputs: tuple) -> tuple[tuple, jax.Array | None]:
    """The caches of what `Block.prefill` or `decode` gave, one per run, and the experts `[N,T,L,k]` of all layers."""
    caches = tuple(cache for cache, _ in outputs)
    by_layer = [
        jnp.moveaxis(experts, 0, -2) if run.scanned else experts[..., None, :]
        for run, (_, experts) in zip(config.layer_runs, outputs, strict=True)
        if experts is not None
    ]
    return caches, jnp.concatenate(by_layer, axis=-2) if by_layer else None


def _layer_arrays(config: ModelConfig, run: LayerRun) -> tuple[Any, bool]:
    """The mixer's arrays for the layers of a run: those of all alike and False, or stacked and True."""
    kinds = [config.layer_configs[layer] for layer in run.layers]
    each = [kind.mixer.layer_arrays(config.of(kind), kind) for kind in kinds]
    if all(kind == kinds[0] for kind in kinds):
        return each[0], False
    return jax.tree.map(lambda *arrays: np.stack(arrays), *each), True


def _pad_for_context(inputs: Inputs) -> Inputs:
    """The rows, padded so that the context axis of the mesh divides T."""
    extra = -inputs.tokens.shape[1] % context_shards()
    if not extra:
        return inputs
    if inputs.segments is None:  # without segments padding would count as tokens
        inputs = inputs.replace(segments=jnp.ones_like(inputs.tokens))
    images = inputs.images
    padded = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2))), inputs.replace(images=None)
    )
    if isinstance(images, ImageEmbeddings):
        index = jnp.pad(images.index, ((0, 0), (0, extra)), constant_values=-1)
        places = images.positions
        places = None if places is None else jnp.pad(places, ((0, 0), (0, extra), (0, 0)))
        images = dataclasses.replace(images, index=index, positions=places)
    return padded.replace(images=images)


def _of_rows(held, source) -> jax.Array:
    """The arrays `[N,...]` of rows that each read one of the b of `held` `[Z,b,...]` of their shard."""
    index = source.reshape(len(held), -1, *(1,) * (held.ndim - 2))
    return jnp.take_along_axis(held, index, axis=1).reshape(len(source), *held.shape[2:])


def segment_positions(segments):
    """Positions `[N,T]` that count from 0 at the start of every segment; 0 on padding."""
    index = jnp.arange(segments.shape[1])
    starts = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), jnp.diff(segments, axis=1) != 0], axis=1)
    start = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    return jnp.where(segments == 0, 0, index - start)


def attention_mask(segments, prefixes=None, runs=None):
    """`[N,T,T]` (query, key), True: same segment or the query's prefix, no padding, and the key not after the query.

    Tokens of one of the `runs` `[N,T]`, numbered from 1, see what is after them there too.
    """
    same = segments[:, :, None] == segments[:, None, :]
    if prefixes is not None:
        same |= prefixes[:, :, None] == segments[:, None, :]
    seen = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
    if runs is not None:
        seen |= (runs[:, :, None] == runs[:, None, :]) & (runs != 0)[:, None, :]
    return same & seen & (segments != 0)[:, None, :]
