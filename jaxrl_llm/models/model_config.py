"""The shape of a decoder: a frozen `ModelConfig`, and the kinds of layers that follow from it.

Layers are a tuple of kinds (`layer_configs`). Layers whose parameters have the same shapes are stacked (`stacks`), and
consecutive layers of one stack are a run that one program computes in a scan (`layer_runs`).
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.mixers.attention import Attention, SharedAttention
from jaxrl_llm.models.mixers.mixer import LayerConfig, Mixer
from jaxrl_llm.models.ngrams import NGramConfig
from jaxrl_llm.models.rope import Rope
from jaxrl_llm.models.vision.tower import VisionConfig

DEFAULT_ROPE = Rope()


class LayerRun(NamedTuple):
    """Consecutive layers that one program computes: in a scan over their stacked parameters, or a single one."""

    layers: tuple[int, ...]
    stack: str
    start: int  # index of the first in its stack
    scanned: bool
    shares: int | None = None  # the layer whose keys and values they read
    chosen_by: int | None = None  # the layer whose choice of tokens they attend to
    passes: tuple[bool, bool] = (False, False)  # whether others read its only layer's keys and values, and its choice


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Hashable, so that it is a static argument of jitted functions."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float = 1e-6
    activation: str = "silu"  # one of layers.ACTIVATIONS, or "xielu" of dense feed-forwards
    ffn_gate: bool = True  # feed-forwards multiply up by the activation of a gate; False: it is the activation of up
    ffn_scales: tuple[float, ...] = (1.0, 1.0)  # of dense feed-forwards' gates before the activation, and outputs
    ffn_sparsity: float = 0.0  # share of gates that are 0 where they are normally distributed: all but the largest
    sparse_layers: tuple[int, ...] = ()  # the layers where they are
    # On the inputs of mixer and feed-forward ("pre"), on their outputs ("post"), on both ("both"), or on the sums of
    # hidden states and outputs ("sum").
    norms: str = "pre"
    norm_offset: float = 0.0  # added to the scale of every norm
    norm_centred: bool = False  # norms subtract the mean first, as layer norms do
    norm_bias: bool = False  # of every norm
    norm_scale: bool = True  # False: norms have none
    final_norm: bool = True  # False: none behind the last layer
    # Feed-forwards read what the mixers of their layers read, through its norm ("shared") or one of their own ("own").
    parallel_ffn: str = ""
    unpredicted: int = 0  # rows of the embedding behind the vocabulary, of tokens that are read and never sampled
    embed_width: int = 0  # of embedding and head, with a map to the width and one back; 0: the width
    learned_positions: int = 0  # rows of a table that is added to the embeddings; 0: none
    first_position: int = 0  # the row of a document's first token
    embed_scale: float = 1.0
    embed_norm: str = ""  # embeddings are divided by their rms ("rms"), or go through a norm of their own ("norm")
    residual_scale: float = 1.0  # times what mixer and feed-forward add
    rope: Rope = DEFAULT_ROPE
    local_rope: Rope | None = None  # of the sliding layers; None: the same
    rotary_fraction: float = 1.0  # of each head's dimensions, the first ones
    rotary_head_dim: int = 0  # dimensions that are rotated; 0: as rotary_fraction says
    rope_axes: tuple[int, ...] = ()  # of each rotary frequency: 0 time, 1 height, 2 width of images; (): time alone
    rope_interleaved: bool = False  # neighbouring dimensions are rotated together, not those of two halves
    rope_reversed: bool = False  # by negative angles
    rope_learned: bool = False  # each frequency is multiplied by the exponential of a number, in fp32
    unrotated_layers: tuple[int, ...] = ()
    unrotated_fields: tuple[tuple[str, Any], ...] = ()  # of these layers, where theirs are others
    sliding_window: int | None = None  # tokens that a sliding layer sees, the current one included
    sliding_layers: tuple[int, ...] = ()
    sliding_chunks: bool = False  # a sliding layer sees what is in the token's own chunk of `sliding_window` positions
    query_scale: float | None = None  # of attention scores; None: head_dim ** -0.5
    key_scale: float = 1.0  # of keys, and so of the scores too
    value_scale: float = 1.0
    alibi: float = 0.0  # scores fall with distance, see attention.linear_biases; 0: they do not
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_divisor: float = 1.0
    tie_embeddings: bool = False
    head_bias: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    # One map for queries, keys and values: all of one after another ("blocks"), or those of each key/value head
    # together ("heads"); "": three maps.
    joint_qkv: str = ""
    qkv_clip: float | None = None  # queries, keys and values are clipped to +- that, before norms and rotation
    query_rank: int = 0  # of latent attention, as the next one; 0: queries come from the hidden states themselves
    latent_size: int = 0
    latent_norm_eps: float | None = 1e-6  # of the norms of latents; None: that of all norms
    latent_scales: tuple[float, float] = (1.0, 1.0)  # of queries, and of latents behind their norm
    latent_sources: tuple[int, ...] = ()  # of each layer, the one whose latents it reads; (): its own
    value_head_dim: int = 0  # of other attention too; 0: head_dim
    index_heads: int = 0  # of sparse attention, as the next four; see sparse_attention.Indexer
    index_head_dim: int = 0
    index_top: int = 0  # tokens that a token attends to, at most
    index_pool: int = 0  # tokens that are rated together and chosen whole; see pooled_latents.py
    index_block: int = 0  # tokens of a block that is chosen whole, as the next one; see block_attention.py
    index_local: int = 0  # blocks that are always chosen, the latest ones
    shared_indexers: tuple[int, ...] = ()  # the layers that attend to what the latest layer with an indexer has chosen
    index_interleaved: bool = False  # the indexer rotates neighbouring dimensions together
    index_rotates_last: bool = False  # and the last dimensions, not the first
    index_norm_eps: float | None = 1e-6  # of its norms; None: norm_eps
    heavy_ratio: int = 0  # tokens of an entry of heavily compressed attention; see compressed_attention.py
    sparse_ratio: int = 0  # tokens of a window of compressed sparse attention, whose `index_top` counts entries
    output_groups: int = 0  # of heads, whose outputs a map makes `output_rank` numbers of; of this attention alone
    output_rank: int = 0
    # The heads' outputs are multiplied by the sigmoids of numbers: as many, which come with the queries ("queries") or
    # from a map of their own ("numbers"), or from such a map one for each head ("heads").
    attention_gate: str = ""
    attention_gate_softplus: bool = False  # the softplus takes the place of the sigmoid
    attention_sinks: bool = False  # each head has a number that joins the softmax of its scores, and no value
    mlp_bias: bool = False
    # Norms of queries and keys: of each head, before it is rotated ("head") or behind ("rotated"), or with a scale of
    # its own ("heads"), or over all heads at once ("whole").
    qk_norm: str = ""
    qk_rms: bool = False  # rotated queries and keys are divided by their rms
    query_growth: float = 0.0  # of unrotated queries with the log of their position
    query_growth_every: int = 0  # positions in one unit of that log
    query_growth_rotated: bool = False  # of all queries, and from the position itself on, not the one behind it
    query_growth_learned: bool = False  # of each head of latent attention, see latent_attention.QueryGrowth
    value_norm: bool = False  # of each head, without a scale
    keys_as_values: bool = False  # as they are before norms and rotation
    full_fields: tuple[tuple[str, Any], ...] = ()  # of the layers without a window, where theirs are others
    shared_layers: int = 0  # number of last layers, which read the keys and values of the latest layer of their kind
    shared_ffn: int = 0  # of these layers; 0: ffn
    layer_scale: bool = False  # the hidden states after each layer are multiplied by a number, which is not trained
    per_layer_width: int = 0  # numbers per token of which each layer adds a map, see per_layer.py; 0: none
    per_layer_vocab: int = 0
    ngrams: NGramConfig | None = None  # embeddings of n-grams that some layers add; None: none do
    altup_streams: int = 0  # of hidden states, see altup.py; 0: one, as they are
    hyper_streams: int = 0  # of hidden states, as the next four, see hyper_connections.py; 0: one, as they are
    hyper_sinkhorn: int = 0  # steps that make the matrix which mixes them doubly stochastic; 0: they are not mixed
    hyper_scale: float = 2.0  # of what a stream takes of outputs, at most
    hyper_eps: float = 1e-6
    hyper_head: str = "sum"  # the last hidden states are a weighted sum of the streams, or their "mean"
    hyper_rank: int = 0  # of the gates by which streams are read and written, see gated_streams.py; 0: as above
    laurel_rank: int = 0  # of a map whose outputs are a residual beside attention, see altup.Laurel; 0: none
    delta_key_heads: int = 0  # of gated delta nets and Mamba (groups), as the next four; see delta_net.GatedDeltaNet
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_conv: int = 0  # tokens that are convolved, the current one included
    delta_negative: bool = False  # betas reach 2, and eigenvalues of the update -1 (arXiv 2411.12537)
    delta_sigmoid: bool = False  # their gates are sigmoids, whatever those of their class are
    delta_floor: float | None = None  # of the log decays of Kimi delta attention; None: they have none
    delta_norms: str = ""  # `norms` of the layers with other mixers than attention; "": those of all
    conv_size: int = 0  # tokens that a short convolution sees, the current one included; see short_conv.ShortConv
    conv_bias: bool = False  # of short convolutions, and of those in Mamba
    state_bias: bool = False  # of the maps before and behind Mamba
    step_rank: int = 0  # of the map that makes the steps of Mamba-1, as the next one; see mamba1.py
    state_norm_eps: float | None = None  # its keys, queries and what makes steps are divided by their rms; None: not
    time_step_limit: tuple[float, float] = (0.0, math.inf)  # of Mamba-2, as the next two
    mamba_norm: bool = True  # of its gated outputs
    mamba_scales: tuple[float, ...] = ()  # of its gates, values, keys, queries and steps; (): 1
    parallel_scales: tuple[float, ...] = ()  # of what attention reads and gives, and Mamba-2; see AttentionAndMamba
    experts: int = 0  # 0: every layer is dense
    zero_experts: int = 0  # behind these, experts that give a token's hidden states as they are
    experts_per_token: int = 0
    expert_ffn: int = 0
    expert_bias: bool = False  # of experts and router
    router_softcap: float | None = None  # of logits
    router_jitter: float | None = None  # experts are weighted one after another; see moe.one_by_one
    router_sigmoid: bool = False  # each expert's probability by itself; False: a softmax
    router_softplus: bool = False  # it is the root of the logit's softplus
    router_correction: bool = False  # experts are chosen by probability plus a number each has, weighted without it
    router_corrects_logits: bool = False  # the number is added to the expert's logit
    router_fp32: bool = False  # its matrix is stored with 32 bits too
    router_groups: int = 1  # groups of experts, of which a token uses `router_top_groups`
    router_top_groups: int = 1
    router_group_best: int = 2  # experts of a group, the best ones, by which it is rated
    routed_scale: float = 1.0  # of what the chosen experts add
    router_on_inputs: bool = False  # the chosen experts' inputs are weighted, not their outputs; without expert_bias
    swiglu_limit: float | None = None  # of gate and up of experts; see layers.gated
    swiglu_alpha: float = 1.702
    swiglu_offset: float = 1.0  # added to up
    expert_clip: float = 0.0  # of gates of experts behind their activation, and of up; 0: they are not clipped
    ffn_clip: float = 0.0  # of those of other feed-forwards
    layer_clips: tuple[tuple[float, float], ...] = ()  # both, of each layer; (): those
    swiglu_everywhere: bool = False  # those of dense feed-forwards and shared experts too
    normalize_top_k: bool = False
    top_k_epsilon: float = 0.0  # added to the sum that the chosen weights are divided by
    shortcut_experts: bool = False  # layers have two halves, and experts beside both; see shortcut.ShortcutBlock
    experts_beside: bool = False  # layers have a dense feed-forward and experts; see moe.ExpertsBeside
    shared_expert_ffn: int = 0  # channels of an expert that every token uses; 0: none
    shared_expert_gate: bool = False  # its output is multiplied by one number per token
    shared_expert_scale: float = 1.0  # of its output
    expert_width: int = 0  # numbers that the chosen experts read and write, mapped from and to the width; 0: the width
    dense_layers: tuple[int, ...] = ()  # the layers without experts, where others have them
    hash_layers: tuple[int, ...] = ()  # the layers where a table has the experts of each token of the vocabulary
    bare_layers: tuple[int, ...] = ()  # the layers without a feed-forward
    router_aux_loss_coef: float = 0.0
    freeze_router: bool = False
    head: str = "lm"  # or "score": one number per token, for reward models and critics; "step": two, for those of steps
    step_hidden: bool = False  # a step head has a hidden layer
    vision: VisionConfig | None = None  # what encodes images; None: the model reads text alone
    vision_training: str = "frozen"  # or "trained", or "lora": by the adapters of its own linear maps
    mixers: tuple[type[Mixer], ...] = ()  # of each layer; (): attention in all of them
    init_scale: float = 0.02
    dtype: str = "float32"  # of the computation
    param_dtype: str = "float32"
    fp32_head: bool = False  # form logits in fp32, whatever the dtype of the computation
    attention: str = "auto"  # of whole rows: xla, cudnn, flash, splash; see fused_attention.implementation
    remat: str = "none"  # or one of transformer.REMAT: what is saved for the backward pass; the rest is recomputed
    mlp_tile_tokens: int = 0  # a feed-forward is computed of so many tokens of a device at a time; 0: of all
    lora: LoraConfig | None = None
    layer_groups: tuple[int, ...] = ()  # of each layer: those of a group are trained alike; (): all are
    frozen_leaves: tuple[str, ...] = ()  # paths of parameters that are not trained, see trained.py
    lora_names: tuple[tuple[str, str], ...] = ()  # of maps that are other `lora.TARGETS` than their names say
    quantize: str = "none"  # of the layers' linear maps, which are then frozen: one of quantize.KINDS
    quantize_experts: str = "same"  # of the matrices of experts: as `quantize` says, or another of them
    qat: str = "none"  # the linear maps compute with their matrices as they would be, quantised so, and are trained
    matmul_dtype: str = "auto"  # of the operands of the layers' linear maps: that of the computation, fp8 or int8
    scan_layers: bool = True  # False: each layer is compiled, as decoding wants it

    @property
    def router_in_fp32(self) -> bool:
        """True where routers compute with 32 bits whatever the rest does, as in transformers."""
        of_scores = self.router_sigmoid or self.router_softplus or self.router_correction
        return self.router_fp32 or of_scores or self.router_group_best == 1

    @property
    def routed_experts(self) -> int:
        """Those that a router chooses among."""
        return self.experts + self.zero_experts

    @property
    def expert_qat(self) -> str:
        """The kind that the matrices of experts are trained for."""
        return self.qat if self.quantize_experts == "same" else "none"

    @property
    def expert_quantize(self) -> str:
        """The kind in which the matrices of experts are quantised, of quantize.KINDS; `none` where there are no
        experts."""
        own = self.quantize if self.quantize_experts == "same" else self.quantize_experts
        return own if self.experts else "none"

    def quantized_at(self, path: str) -> str:
        """The kind in which the kernel at a path in the parameters is quantised."""
        return self.expert_quantize if "/experts/" in path else self.quantize

    @property
    def quantized(self) -> str:
        """The kind in which the layers' linear maps are quantised, and experts where that differs: `nf4`, `nf4 (experts
        none)`, `nf4 (experts alone)` of experts beside maps that are not; `none` where neither are."""
        own = self.expert_quantize if self.experts else self.quantize
        if own == self.quantize:
            return own
        return f"{own} (experts alone)" if self.quantize == "none" else f"{self.quantize} (experts {own})"

    @property
    def quantize_setting(self) -> str:
        """The setting by which matrices are quantised, where any are: that of experts where these are alone."""
        return "model.quantize_experts" if self.quantize == "none" else "model.quantize"

    @property
    def outer_width(self) -> int:
        """Numbers of an embedding, and of a hidden state as the heads read it."""
        return self.embed_width or self.width

    @property
    def embeddings(self) -> int:
        """Rows of the embedding: tokens that can be read."""
        return self.vocab_size + self.unpredicted

    @property
    def position_limit(self) -> int | None:
        """Tokens of the longest document that the table of learned positions has rows for; None without a table."""
        return self.learned_positions - self.first_position if self.learned_positions else None

    @property
    def value_size(self) -> int:
        """Numbers of each head's values."""
        return self.value_head_dim or self.head_dim

    @property
    def rotated_size(self) -> int:
        """Dimensions of each head that are rotated."""
        return self.rotary_head_dim or int(self.head_dim * self.rotary_fraction)

    @functools.cached_property
    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """The kind of each layer: its mixer, window, rotary positions and whatever else differs between layers."""
        first, ngrams = self.layers - self.shared_layers, () if self.ngrams is None else self.ngrams.layers

        def kind(layer: int) -> LayerConfig:
            slides, shares, chosen_by = layer in self.sliding_layers, None, None
            fields: dict[str, Any] = {} if slides else dict(self.full_fields)
            fields |= dict(self.unrotated_fields) if layer in self.unrotated_layers else {}
            if layer >= first:
                shares = max(other for other in range(first) if (other in self.sliding_layers) == slides)
                fields |= {"ffn": self.shared_ffn} if self.shared_ffn else {}
            if layer in self.shared_indexers:
                chosen_by = max(other for other in range(layer) if other not in self.shared_indexers)
            if self.latent_sources and self.latent_sources[layer] != layer:
                shares = self.latent_sources[layer]
            if self.sparse_layers and layer not in self.sparse_layers:
                fields["ffn_sparsity"] = 0.0
            if self.layer_clips:
                fields |= dict(zip(("expert_clip", "ffn_clip"), self.layer_clips[layer], strict=True))
            if self.hash_layers:
                hashed = layer in self.hash_layers
                fields |= {"router_correction": False} if hashed else {"hash_layers": ()}
            if self.lora is not None and self.lora.groups:
                fields["lora"] = self.lora.of_group(self.layer_groups[layer] if self.layer_groups else 0)
            rope = self.local_rope if slides and self.local_rope is not None else self.rope
            mixer = self.mixers[layer] if self.mixers else Attention if shares is None else SharedAttention
            fields |= {"norms": self.delta_norms} if self.delta_norms and not issubclass(mixer, Attention) else {}
            return LayerConfig(
                mixer=mixer,
                rope=None if layer in self.unrotated_layers else rope,
                window=self.sliding_window if slides else None,
                experts=bool(self.experts) and layer not in (*self.dense_layers, *self.bare_layers),
                bare=layer in self.bare_layers,
                shares=shares,
                chosen_by=chosen_by,
                ngrams=ngrams.index(layer) if layer in ngrams else None,
                fields=tuple(fields.items()),
            )

        return tuple(kind(layer) for layer in range(self.layers))

    def of(self, layer: LayerConfig) -> "ModelConfig":
        """This configuration with the fields that the layer has of its own, `LayerConfig.fields`."""
        return dataclasses.replace(self, **dict(layer.fields)) if layer.fields else self

    def adapted_in(self, path: str) -> "ModelConfig":
        """The configuration of a layer, as the part of it at that path has it: with that part's adapters."""
        if self.lora is None or not self.lora.groups:
            return self
        return dataclasses.replace(self, lora=self.lora.of_group(0, path))

    @functools.cached_property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """The layers that are stacked in the parameters of each name, the stack `layers` first.

        Layers of a stack have the same mixer and the same kind of feed-forward. Most are in `layers`. In `dense_layers`
        are those without experts, where others have some, and in `bare_layers` those without a feed-forward; in
        `<path>_layers` those with another mixer than attention; in `full_layers` those without a window, where they
        have `full_fields`; in `shared_layers` and `shared_full_layers` those that read the keys and values of others,
        in `shared_latent_layers` those without an indexer, where others have one, and in `reading_latent_layers` those
        that read the latents of others. `unrotated_` is before the names of those without rotary positions, where they
        have `unrotated_fields`.
        `clipped1_` and so on are before the names of those whose `layer_clips` are others than those of most.
        `sparse_` is before the names of those with an `ffn_sparsity` that others lack, `hash_` of those whose experts
        are in a table, `ngrams0_` and so on of each layer that adds n-grams (whose tables have other sizes), and
        `group1_` and so on of those that other groups of layers have (`layer_groups`).
        """
        found: dict[str, tuple[int, ...]] = {}
        counts = collections.Counter(self.layer_clips)
        clips = sorted(counts, key=lambda clip: (-counts[clip], clip))
        for layer, kind in enumerate(self.layer_configs):
            name = "layers" if kind.mixer.path == Attention.path else f"{kind.mixer.path}_layers"
            name = f"full_{name}" if self.full_fields and kind.window is None else name
            name = f"unrotated_{name}" if self.unrotated_fields and kind.rope is None else name
            if kind.shares is not None:
                name = f"{'reading' if self.latent_sources else 'shared'}_{name}"
            name = name if kind.chosen_by is None else f"shared_{name}"
            name = f"sparse_{name}" if layer in self.sparse_layers and len(self.sparse_layers) < self.layers else name
            name = name if kind.ngrams is None else f"ngrams{kind.ngrams}_{name}"
            name = f"hash_{name}" if layer in self.hash_layers else name
            if number := clips.index(self.layer_clips[layer]) if self.layer_clips else 0:
                name = f"clipped{number}_{name}"
            if kind.bare:
                name = f"bare_{name}"
            elif self.experts and not kind.experts:
                name = f"dense_{name}"
            group = self.layer_groups[layer] if self.layer_groups else 0
            name = f"group{group}_{name}" if group else name
            found[name] = (*found.get(name, ()), layer)
        return dict(sorted(found.items(), key=lambda stack: stack[0] != "layers"))

    @functools.cached_property
    def layer_runs(self) -> tuple[LayerRun, ...]:
        """The runs of layers in order: of one layer each unless layers are scanned."""
        stack_of = {layer: name for name, layers in self.stacks.items() for layer in layers}
        start = {layer: index for layers in self.stacks.values() for index, layer in enumerate(layers)}
        reads = [(kind.shares, kind.chosen_by) for kind in self.layer_configs]
        shared, chosen = (set(layers) for layers in zip(*reads, strict=True))

        def kind_of_run(layer: int):
            alone = not self.scan_layers or layer in shared | chosen
            return stack_of[layer], reads[layer], layer if alone else None

        groups = [tuple(layers) for _, layers in itertools.groupby(range(self.layers), kind_of_run)]

        def run(layers: tuple[int, ...]) -> LayerRun:
            first = layers[0]
            passes = (first in shared, first in chosen)
            return LayerRun(layers, stack_of[first], start[first], self.scan_layers, *reads[first], passes)

        return tuple(map(run, groups))

    def grouped(self, kinds: Iterable[Hashable]) -> "ModelConfig":
        """The configuration whose layers are in one group where their `kinds` are equal, one of each layer."""
        numbers: dict[Hashable, int] = {}
        groups = tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds)
        return dataclasses.replace(self, layer_groups=groups if any(groups) else ())

    @property
    def frozen(self) -> tuple[str, ...]:
        """The parts of the parameters, and the paths of single ones, that training leaves as they are, whatever it
        trains of the others."""
        vision = ("vision",) if self.vision is not None and self.vision_training == "frozen" else ()
        mixers = {name: self.layer_configs[layers[0]].mixer for name, layers in self.stacks.items()}
        kept = [f"{name}/{x.path}/{leaf}" for name, x in mixers.items() for leaf in getattr(x, "untrained", ())]
        tables = [f"{name}/mlp/table" for name, layers in self.stacks.items() if layers[0] in self.hash_layers]
        return (*vision, *kept, *tables, *self.frozen_leaves)

    @property
    def shares_prefixes(self) -> bool:
        """True where the tokens of a row may see a prefix of another segment, as packed rows of a group do."""
        return not self.sees_prompts and all(kind.mixer.shares_prefixes for kind in self.layer_configs)

    @property
    def sees_prompts(self) -> bool:
        """True where the tokens of a prompt see those behind them in it."""
        return self.vision is not None and self.vision.bidirectional == "prompt"
