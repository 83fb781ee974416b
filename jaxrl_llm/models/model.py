"""`Model`: a network with its parameters, tokenizer and Hugging Face entries, loaded and saved in one call."""

import contextlib
import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.models import hf
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.models.weights import read_json
from jaxrl_llm.sharding import shardings


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model; calling it gives logits."""

    net: Net
    params: Params
    tokenizer: Any = None
    hf_config: dict[str, Any] | None = None
    generation: dict[str, Any] | None = None  # entries of generation_config.json
    path: str | None = None
    mesh: Mesh | None = None

    def __call__(self, tokens, segments=None, positions=None) -> jax.Array:
        """Logits `[N,T,V]` in fp32 of tokens `[N,T]` (scores `[N,T]` with the score head).

        segments `[N,T]`: 0 is padding, other numbers tell packed documents apart (default: all 1);
        positions `[N,T]`: default counts from 0 in each segment.
        """
        rows = jax.tree.map(jnp.asarray, (tokens, segments, positions), is_leaf=lambda x: isinstance(x, list))
        with jax.set_mesh(self.mesh) if self.mesh is not None else contextlib.nullcontext():
            return _apply(self.net, self.params, *rows)


@functools.partial(jax.jit, static_argnames="net")
def _apply(net: Net, params: Params, tokens, segments, positions):
    return net.bind(params)(tokens, segments, positions)


def load_model(
    path: str | os.PathLike[str],
    dtype: str = "auto",
    param_dtype: str | None = None,
    mesh: Mesh | None = None,
    init_key: jax.Array | None = None,
    **overrides,
) -> Model:
    """The model at `path`: `embedded:<name>`, a local folder or a Hugging Face hub id.

    dtype, of the computation: "auto" is float32 on CPU (where bfloat16 is slower) and bfloat16 on accelerators.
    param_dtype None is that of the computation; training keeps float32 parameters. With `init_key` the parameters are
    drawn at random, and the folder needs no weights. `overrides` are other ModelConfig fields. The tokenizer is None
    when the folder has none. Raises ConfigError; see `hf.locate` and `hf.load`.
    """
    dtype = _compute_dtype(dtype)
    model = describe(path, dtype, param_dtype, **overrides)
    if init_key is None:
        overrides |= {"dtype": dtype, "param_dtype": param_dtype or dtype}
        _, params = hf.load(hf.locate(path), mesh, **overrides)
    else:
        params = model.net.init(init_key) if mesh is None else init_sharded(model.net, init_key, mesh)
    return dataclasses.replace(model, params=params, mesh=mesh)


def describe(path: str | os.PathLike[str], dtype: str = "auto", param_dtype: str | None = None, **overrides) -> Model:
    """The model at `path` with shapes in place of parameters: all that is known without reading weights.

    Arguments and errors as in `load_model`.
    """
    dtype = _compute_dtype(dtype)
    folder = hf.locate(path)
    net = hf.load_net(folder, dtype=dtype, param_dtype=param_dtype or dtype, **overrides)
    tokenizer = hf.load_tokenizer(folder) if hf.has_tokenizer(folder) else None
    generation = read_json(folder / "generation_config.json")
    return Model(net, net.shapes(), tokenizer, hf.read_config(folder), generation, os.fspath(path))


def _compute_dtype(dtype: str) -> str:
    if dtype != "auto":
        return dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def save_hf(model: Model, path: str | os.PathLike[str], dtype: str | None = None, max_shard_bytes: float = 5e9) -> None:
    """Writes the model as a Hugging Face folder that transformers and vLLM load; see `hf.save`.

    A model without generation_config.json gets one that names the tokenizer's end-of-text and padding tokens.
    """
    generation = model.generation
    if generation is None and model.tokenizer is not None:
        generation = {name: getattr(model.tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    hf.save(model.net, model.params, path, model.tokenizer, model.hf_config, generation, dtype, max_shard_bytes)


def init_sharded(net: Net, key: jax.Array, mesh: Mesh) -> Params:
    """Random parameters, each made where it will live: no device ever holds the whole model."""
    return jax.jit(net.init, out_shardings=shardings(net.shapes(), mesh))(key)
