"""The shape of a decoder, and in what its layers differ from each other."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.layers import LayerTraits
from jaxrl_llm.models.lora import LoraConfig
from jaxrl_llm.models.rope import Rope, dynamic_frequencies, frequencies

DEFAULT_ROPE = Rope()
NO_WINDOW = 2**30  # of a layer that sees everything, among layers that do not


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
    activation: str = "silu"  # one of layers.ACTIVATIONS
    norms: str = "pre"  # of what attention and feed-forward read ("pre"), of what they add ("post"), or "both"
    norm_offset: float = 0.0  # added to the scale of every norm
    embed_scale: float = 1.0
    rope: Rope = DEFAULT_ROPE
    local_rope: Rope | None = None  # of the sliding layers, where it is another
    rotary_fraction: float = 1.0  # of each head's dimensions, the first ones
    unrotated_layers: tuple[int, ...] = ()
    sliding_window: int | None = None  # how many tokens a sliding layer sees, the current one included
    sliding_layers: tuple[int, ...] = ()
    query_scale: float | None = None  # of attention scores; None: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False  # over all heads at once, not each
    experts: int = 0  # 0: every layer is dense
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalize_top_k: bool = False
    dense_layers: tuple[int, ...] = ()  # the layers without experts, where others have them
    router_aux_loss_coef: float = 0.0
    freeze_router: bool = False
    head: str = "lm"  # or "score": one number a token, for reward models and critics
    init_scale: float = 0.02
    dtype: str = "float32"  # of the computation
    param_dtype: str = "float32"
    fp32_head: bool = False  # form logits in fp32, whatever the dtype of the computation
    attention: str = "xla"  # over given rows: or cudnn, on GPUs; or splash, on TPUs
    remat: str = "none"  # or one of transformer.REMAT: what the backward pass finds, and what it computes again
    lora: LoraConfig | None = None
    quantize: str = "none"  # of the layers' linear maps, which are then frozen: one of quantize.KINDS
    scan_layers: bool = True  # False: a program per layer, slower to compile and, on CPU, up to twice as fast to run


def is_dense(config: ModelConfig, layer: int) -> bool:
    """True for a layer without experts."""
    return not config.experts or layer in config.dense_layers


def layer_traits(config: ModelConfig) -> list[LayerTraits]:
    """The traits of each layer; windows are None where no layer has one."""
    size = rotated_size(config)

    def traits(layer: int) -> LayerTraits:
        slides = layer in config.sliding_layers
        rope = config.local_rope if slides and config.local_rope is not None else config.rope
        window = (config.sliding_window if slides else NO_WINDOW) if config.sliding_layers else None
        if layer in config.unrotated_layers:
            return LayerTraits(np.zeros(size // 2, np.float32), 1.0, window)
        return LayerTraits(frequencies(rope, size), rope.attention_factor, window)

    return [traits(layer) for layer in range(config.layers)]


def rotated_size(config: ModelConfig) -> int:
    """How many of each head's dimensions are rotated."""
    return int(config.head_dim * config.rotary_fraction)


def waves_of_long_rows(config: ModelConfig, segments, positions):
    """Frequencies `[N,T,r/2]` of each token's own document where dynamic scaling may change them, else None."""
    if config.rope.kind != "dynamic" or segments.shape[1] <= config.rope.original_max_positions:
        return None
    same = segments[:, :, None] == segments[:, None, :]
    lengths = jnp.where(same, positions[:, None, :], 0).max(-1) + 1
    return dynamic_frequencies(config.rope, rotated_size(config), lengths)
