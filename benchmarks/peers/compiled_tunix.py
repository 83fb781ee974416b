"""The decode step of Tunix's sampler, compiled for a GPU that need not be there; benchmarks.compiled calls it.

    PYTHON -m benchmarks.peers.compiled_tunix --model=0.6b --device=h100

Tunix's sampler decodes a whole rollout in one loop, of which a turn is a step. Work and shapes are those of a cell of
benchmarks.compiled, in bfloat16: each row has a cache for its prompt and its completion.
"""

import argparse
import importlib.metadata
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tunix.generate import sampler as sampling
from tunix.models.qwen3 import model as qwen3

from benchmarks.compiled import MODELS, SETTINGS
from benchmarks.meter import report
from benchmarks.peers.with_tunix import NEVER, Numbers
from benchmarks.traffic import step_and_rest
from jaxrl_llm.config import default
from jaxrl_llm.distributed.sharding import bytes_on_device
from jaxrl_llm.tools.plan.topology import target, traced_as_on


def make_sampler(model: str, length: int) -> sampling.Sampler:
    """A sampler whose parameters are shapes, with caches of `length` tokens; no token ends a row."""
    sizes = MODELS[model]
    config = qwen3.ModelConfig(
        num_layers=sizes["num_hidden_layers"], vocab_size=sizes["vocab_size"], embed_dim=sizes["hidden_size"],
        hidden_dim=sizes["intermediate_size"], num_heads=sizes["num_attention_heads"], head_dim=sizes["head_dim"],
        num_kv_heads=sizes["num_key_value_heads"], rope_theta=int(sizes["rope_theta"]),
        norm_eps=sizes["rms_norm_eps"], use_tied_embedding=sizes["tie_word_embeddings"], dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
    )  # fmt: skip
    cache = sampling.CacheConfig(
        cache_size=length, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    sampler = sampling.Sampler(nnx.eval_shape(lambda: qwen3.Qwen3(config, rngs=nnx.Rngs(0))), Numbers(), cache)
    sampler.eos_ids = jnp.array(NEVER)  # a call of the sampler would set them
    return sampler


def measured(model: str, device: str) -> dict[str, Any]:
    """One step as in the cells of benchmarks.compiled; its `least` is Tunix's parameters and caches, read once."""
    rows, prompt = SETTINGS["batch.prompts"] * SETTINGS["rollout.group_size"], SETTINGS["rollout.max_prompt_length"]
    length = prompt + SETTINGS["rollout.max_completion_length"]
    devices = target(default(), device, 1)
    if not devices.exact:
        return {"missing": devices.compiler}
    sampler = make_sampler(model, length)

    def begun(prompts: jax.Array, seed: jax.Array):
        return sampler.init_sample_state(
            prompts, total_sampling_steps=length, include_logits=False, forbidden_token_ids=None, temperature=1.0,
            top_p=1.0, top_k=None, seed=seed, beam_size=None,
        )  # fmt: skip

    state = jax.eval_shape(begun, jax.ShapeDtypeStruct((rows, prompt), jnp.int32), jax.random.PRNGKey(0))
    sharding = NamedSharding(devices.mesh, PartitionSpec())
    params, state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (sampler._flattened_transformer_state, state),
    )
    began = time.perf_counter()
    with traced_as_on(devices):
        lowered = sampler._compiled_decode_fn.lower(params, state)
    compiled = lowered.compile(compiler_options=dict(devices.options))
    step, rest = step_and_rest(compiled.as_text())
    return {
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "arguments": bytes_on_device((params, state)),
        "seconds": round(time.perf_counter() - began, 1),
        **step._asdict(),
        "beside": rest.moved,
        "least": bytes_on_device((params, state.cache)),
        "versions": {name: importlib.metadata.version(name) for name in ("google-tunix", "jax")},
    }


def main() -> None:
    """The command line: see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name, sizes in MODELS.items() if sizes["model_type"] == "qwen3"]
    parser.add_argument("--model", choices=known, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    report(measured(options.model, options.device))


if __name__ == "__main__":
    main()
