"""Model FLOPs by hand, against PyTorch's counter on transformers' models, and against the compiler's cost analysis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.adapters.peft_patterns import AdapterPatterns, with_patterns
from jaxrl_llm.models.families import llama
from jaxrl_llm.models.flops import matmul_parameters, row_flops
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.delta_net import GatedDeltaNet
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.mixers.mamba2 import Mamba2
from jaxrl_llm.models.mixers.mixer import NoMixer
from jaxrl_llm.models.mixers.parallel import AttentionAndMamba
from jaxrl_llm.models.mixers.short_conv import ShortConv
from jaxrl_llm.models.model import describe
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.trained import Trained
from tests.models.oracles import VARIANTS

DENSE = {"vocab_size": 50, "width": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 20}
ROW_FLOPS = jax.jit(row_flops, static_argnums=0)
LAYER = 16 * (4 + 2 + 2) * 6 + 4 * 6 * 16 + 3 * 16 * 20  # q, k, v, o; gate, up, down
HEAD = 16 * 50


def total(net: Net, segments) -> float:
    forward, backward = ROW_FLOPS(net, jnp.asarray(segments))
    return float((forward + backward).sum())


def unseen(net: Net, rows: int, length: int) -> float:
    """The FLOPs, forward and backward, of pairs that no token sees and that a program computes all the same."""
    found = 0.0
    for kind in net.config.layer_configs:
        window = kind.window or length
        pairs = sum(length - min(place + 1, window) for place in range(length))
        found += 3 * float(kind.mixer.flops(net.config.of(kind), 0, rows * pairs))
    return found


def test_by_hand():
    """Two documents of 3 and 2 tokens: 9 pairs of a token and one that it sees, 8 within a window of two."""
    net = Net(ModelConfig(**DENSE, sliding_window=2, sliding_layers=(0,)))
    assert matmul_parameters(net) == (0, 3 * LAYER + HEAD)
    forward, backward = ROW_FLOPS(net, jnp.array([[1, 1, 1, 2, 2, 0], [0, 0, 0, 0, 0, 0]]))
    mixing = 4 * 4 * 6 * (2 * 9 + 8)
    assert forward.tolist() == [2 * (3 * LAYER + HEAD) * 5 + mixing, 0]
    assert backward.tolist() == [4 * (3 * LAYER + HEAD) * 5 + 2 * mixing, 0]


def test_chunks_and_tied_embeddings_and_scores():
    """A token of a chunk of two sees itself and the one before it in its chunk."""
    chunks = {"sliding_window": 2, "sliding_layers": (0, 1, 2), "sliding_chunks": True}
    net = Net(ModelConfig(**DENSE, **chunks, tie_embeddings=True))
    forward, _ = ROW_FLOPS(net, jnp.ones((1, 5), int))
    assert forward.tolist() == [2 * (3 * LAYER + HEAD) * 5 + 3 * 4 * 4 * 6 * (1 + 2 + 1 + 2 + 1)]
    assert matmul_parameters(Net(ModelConfig(**DENSE, head="score"))) == (0, 3 * LAYER + 16)


def test_where_tokens_lie_does_not_matter():
    net = Net(ModelConfig(**DENSE))
    left, right = np.zeros((2, 2, 9), int)
    for row, length in enumerate((7, 4)):
        left[row, -length:], right[row, :length] = 1, 1
    packed = np.array([[1] * 7 + [2] * 4 + [0] * 2])
    assert total(net, left) == total(net, right) == pytest.approx(total(net, packed), rel=1e-6)


def test_adapters_leave_the_rest_frozen():
    """4 N of what is frozen, 6 N of adapters, and of what is trained whole beside them."""
    lora = LoraConfig(rank=2, targets=("q", "down"), saved=("head/kernel",))
    net = Net(ModelConfig(**DENSE)).with_lora(lora)
    adapters = 3 * (2 * (16 + 24) + 2 * (20 + 16))
    assert matmul_parameters(net) == (3 * LAYER, adapters + HEAD)
    forward, backward = ROW_FLOPS(net, jnp.ones((1, 1), int))
    mixing = 3 * 4 * 4 * 6
    assert forward.tolist() == [2 * (3 * LAYER + adapters + HEAD) + mixing]
    assert backward.tolist() == [2 * 3 * LAYER + 4 * (adapters + HEAD) + 2 * mixing]
    quantized = Net(ModelConfig(**DENSE, quantize="nf4")).with_lora(lora)
    assert matmul_parameters(quantized) == matmul_parameters(net)


def test_layers_below_what_is_trained_have_no_backward_pass():
    whole, mixing = Net(ModelConfig(**DENSE)), 4 * 4 * 6
    net = Trained(("model.layers.2.", "lm_head")).grouped(whole, llama)
    assert matmul_parameters(net) == (2 * LAYER, LAYER + HEAD)
    forward, backward = ROW_FLOPS(net, jnp.ones((1, 1), int))
    assert forward.tolist() == [2 * (3 * LAYER + HEAD) + 3 * mixing]
    assert backward.tolist() == [4 * (LAYER + HEAD) + 2 * mixing]
    lora = LoraConfig(rank=2, targets=("q",))
    net = with_patterns(whole.with_lora(lora), llama, AdapterPatterns(layers_to_transform=(1,)))
    _, backward = ROW_FLOPS(net, jnp.ones((1, 1), int))
    assert backward.tolist() == [2 * (2 * LAYER + HEAD) + 4 * 2 * (16 + 24) + 2 * 2 * mixing]
    net = Trained(("model.embed_tokens",)).grouped(whole, llama)
    assert ROW_FLOPS(net, jnp.ones((1, 1), int))[1].tolist() == [2 * (3 * LAYER + HEAD) + 2 * 3 * mixing]


def test_of_experts_those_that_are_used():
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffn": 5, "shared_expert_ffn": 4}
    net = Net(ModelConfig(**DENSE, **experts, dense_layers=(1,)))
    attention = LAYER - 3 * 16 * 20
    sparse = attention + 16 * 8 + 2 * 3 * 16 * 5 + 3 * 16 * 4
    assert matmul_parameters(net) == (0, 2 * sparse + LAYER + HEAD)


def test_mixers_by_hand():
    """Scores and values of each pair, and products with a state of 3 by 7 numbers in each of 4 heads."""
    c = ModelConfig(**DENSE, value_head_dim=5, delta_value_heads=4, delta_key_dim=3, delta_value_dim=7, conv_size=3)
    assert Attention.flops(ModelConfig(**DENSE), 10, 30) == 2 * 30 * 4 * (6 + 6)
    assert Attention.flops(c, 10, 30) == 2 * 30 * 4 * (6 + 5)
    assert LatentAttention.flops(c, 10, 30) == 2 * 30 * 4 * (6 + 5)
    assert GatedDeltaNet.flops(c, 10, 30) == 10 * 4 * 3 * (2 * 3 * 7)
    assert Mamba2.flops(c, 10, 30) == 10 * 4 * 2 * (2 * 3 * 7)
    assert ShortConv.flops(c, 10, 30) == 10 * 16 * 2 * 3
    assert AttentionAndMamba.flops(c, 10, 30) == Attention.flops(c, 10, 30) + Mamba2.flops(c, 10, 30)
    assert NoMixer.flops(c, 10, 30) == 0


@pytest.mark.parametrize(
    "variant",
    [
        "deepseek_v3",
        "gemma4_text",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen3", "gemma2", "qwen2_moe", "longcat_flash-plain")),
    ],
)
def test_as_pytorch_counts_them(variant, tmp_path):
    """A forward and a backward pass of transformers' model, whose attention computes all pairs of a row."""
    config, rows, length = VARIANTS[variant](), 2, 24
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    config.save_pretrained(tmp_path)
    tokens = torch.randint(0, config.vocab_size, (rows, length))
    with FlopCounterMode(display=False) as counter:
        oracle(tokens, use_cache=False).logits.sum().backward()
    net = describe(tmp_path).net
    counted = total(net, np.ones((rows, length), int)) + unseen(net, rows, length)
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-6)


WIDE = {"vocab_size": 512, "width": 256, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 768}
LATENT = {"kv_heads": 8, "query_rank": 64, "latent_size": 64, "value_head_dim": 48, "rotary_head_dim": 16}


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="dense", marks=pytest.mark.slow),
        pytest.param(
            {"experts": 2, "experts_per_token": 2, "expert_ffn": 384, "shared_expert_ffn": 128},
            id="experts",
            marks=pytest.mark.slow,
        ),
        pytest.param({**LATENT, "mixers": (LatentAttention,) * 2, "tie_embeddings": True}, id="latent"),
    ],
)
def test_as_the_compiler_counts_them(shape):
    """A program that recomputes nothing; less than a hundredth of its arithmetic is besides matmuls."""
    net = Net(ModelConfig(**WIDE | shape, scan_layers=False))
    rows, length = 2, 64
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def loss(params, tokens):
        return jax.nn.log_softmax(net.bind(params)(tokens)).mean()

    compiled = jax.jit(jax.grad(loss)).lower(net.shapes(), tokens).compile()
    counted = compiled.cost_analysis()["flops"]
    assert total(net, np.ones((rows, length), int)) + unseen(net, rows, length) == pytest.approx(counted, rel=0.01)
