"""Prints what adapters save: bytes that one update step of supervised fine-tuning holds, for whole and adapted models.

    python -m benchmarks.adapters

The model is random, with the shape of a 0.5 B Qwen2 (24 layers, width 896) by default. `live` are parameters, optimizer
state and frozen parameters; `step` is what the compiled update needs besides, by XLA's account. Nothing is trained.
`--shapes` gives the numbers of another shape: width, layers, heads, kv heads, head dim, ffn, vocabulary.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import default
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.adapters.lora import LoraConfig, split
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.objectives.sft import SFTSpec, sft
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import update_spec
from jaxrl_llm.training.update import Frozen, State, make_update

QWEN2_HALF_B = "896,24,14,2,64,4864,151936"
VARIANTS = {
    "whole model, float32": {},
    "LoRA, float32 base": {"lora": LoraConfig(16)},
    "LoRA, bfloat16 base": {"lora": LoraConfig(16), "param_dtype": "bfloat16"},
    "QLoRA, int8": {"lora": LoraConfig(16), "param_dtype": "bfloat16", "quantize": "int8"},
    "QLoRA, nf4": {"lora": LoraConfig(16), "param_dtype": "bfloat16", "quantize": "nf4"},
}


def measure(config: ModelConfig, rows: int, length: int) -> tuple[int, int, int]:
    """Bytes of trained parameters with their optimizer state, of frozen parameters, and of the step besides."""
    net, settings, mesh = Net(config), default(), make_mesh(devices=jax.devices()[:1])
    optimizer = make_optimizer(settings)
    frozen, trained = split(net.shapes())
    state = jax.eval_shape(lambda params: State(jnp.zeros((), jnp.int32), params, optimizer.init(params)), trained)
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = Batch(Inputs(tokens, tokens), mask=jax.ShapeDtypeStruct((rows, length), jnp.float32))
    with jax.set_mesh(mesh):
        update = make_update(sft(SFTSpec(0.0), net), optimizer, update_spec(settings), mesh)
        memory = update.lower(state, batch, Frozen(frozen)).compile().memory_analysis()
    return bytes_of(state), bytes_of(frozen), memory.temp_size_in_bytes


def bytes_of(tree) -> int:
    """Bytes of a tree of shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=QWEN2_HALF_B)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    width, layers, heads, kv_heads, head_dim, ffn, vocabulary = map(int, options.shapes.split(","))
    shape = ModelConfig(
        vocabulary, width, layers, heads, kv_heads, head_dim, ffn, tie_embeddings=True, remat="block",
        dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
    )  # fmt: skip
    print(f"{options.rows} rows of {options.length} tokens, {shape.dtype} on {jax.default_backend()}; GB")
    print("| | trained, with moments | frozen | step | sum |\n|---|---|---|---|---|")
    for name, changes in VARIANTS.items():
        parts = measure(dataclasses.replace(shape, **changes), options.rows, options.length)
        print(f"| {name} | " + " | ".join(f"{part / 1e9:.2f}" for part in (*parts, sum(parts))) + " |")


if __name__ == "__main__":
    main()
