"""The net of the sampler, the trainer's in another type or with its matrices in 8 bits, and its parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.adapters.lora import merge
from jaxrl_llm.models.layers import XIELU_NUMBERS
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net, Params, unstack
from jaxrl_llm.models.quantize import BYTES, PARTS, quantized_as


def in_precision(net: Net, weights_dtype: str | None) -> Net:
    """The net that computes with matrices of `weights_dtype`: a type, int8 or fp8 (`quantize`); None is the net itself.

    The matrices of the layers are in 8 bits, those of experts too unless this is a TPU; matmuls run in the net's own
    type, also where training has their operands in 8 bits (`matmul_dtype`), into which each step of decoding would
    convert the matrices. Of a net that is trained for matrices in fewer bits they are in these. Raises ConfigError for
    8 bits where the net's matrices are in other ones.
    """
    config = net.config
    if config.matmul_dtype != "auto":
        return in_precision(Net(dataclasses.replace(config, matmul_dtype="auto")), weights_dtype)
    if config.qat != "none":
        if weights_dtype in BYTES and weights_dtype != config.qat:
            raise ConfigError(
                f"rollout.weights_dtype is {weights_dtype}, but model.qat trains for matrices in {config.qat}, which "
                "are sampled with: set rollout.weights_dtype to auto"
            )
        return in_precision(Net(_stored(config)), None if weights_dtype in BYTES else weights_dtype)
    if weights_dtype is None:
        return net
    if weights_dtype not in BYTES:
        # Attention by kernels of GPUs is for 16 bits.
        by_kernel = config.attention in ("cudnn", "flash")
        attention = "auto" if by_kernel and weights_dtype == "float32" else config.attention
        return in_precision(Net(dataclasses.replace(config, dtype=weights_dtype, attention=attention)), None)
    if {config.quantize, config.expert_quantize} - {"none", weights_dtype}:
        raise ConfigError(
            f"rollout.weights_dtype is {weights_dtype}, but {config.quantize_setting} has the matrices in "
            f"{config.quantized} already, and they are sampled with as they are: set rollout.weights_dtype to auto"
        )
    # XLA's kernel for groups on TPUs reads no codes: each step would write and read the experts converted.
    stay = jax.default_backend() == "tpu" and config.experts > 0 and config.expert_quantize == "none"
    return Net(dataclasses.replace(config, quantize=weights_dtype, quantize_experts="none" if stay else "same"))


def draws_from_another(sampler: Net, trainer: Net) -> bool:
    """True when the sampler's numbers have fewer bits than the trainer's, or those of the trainer's products have, so
    that it draws from another policy."""
    sampled, trained = sampler.config, _stored(trainer.config)
    if sampled.matmul_dtype != trained.matmul_dtype:
        return True
    return sampled.quantized != trained.quantized or (sampled.dtype != trained.dtype and sampled.dtype != "float32")


def _stored(config: ModelConfig) -> ModelConfig:
    """The configuration with matrices as the network computes with them: trained for fewer bits, in these."""
    if config.qat == "none":
        return config
    return dataclasses.replace(config, quantize=config.qat, qat="none")


@functools.partial(jax.jit, static_argnames="decoder")
def decoding_params(params: Params, decoder: Net) -> Params:
    """The parameters in the type they are computed in, so that a step reads no more than it must, adapters merged.

    What the trainer computes with in fp32 stays as it is, as a rounded number would make sampler and trainer differ:
    scales of norms, decays of recurrent mixers, biases of convolutions, attention sinks, the weights of indexers' heads
    and of hyper-connections, learned rotary frequencies, routers in fp32 and their corrections, and the head where
    logits are formed in fp32. Matrices of 8 bits are made of the merged ones; those that are quantised already stay as
    they are, beside their adapters.
    """
    params = merge(params, decoder.config.lora)
    if decoder.config.quantized != "none":
        params = quantized_as(params, decoder.base.shapes(), decoder.config.quantized_at)
    params = _in_decoding_dtype(params, decoder)
    return params if decoder.config.scan_layers else unstack(params, decoder.config)


@functools.partial(jax.jit, static_argnames="decoder")
def copied_to_decode(params: Params, decoder: Net) -> Params:
    """A copy in the types of `decoding_params`, of parameters without adapters or matrices in fewer bits."""
    return jax.tree.map(jnp.copy, _in_decoding_dtype(params, decoder))


def _in_decoding_dtype(params: Params, decoder: Net) -> Params:
    config = decoder.config
    kept = ("scale", "shift", "log_decay", "log_rates", "step_bias", "skip", "conv_bias", "conv/bias", "sinks")
    kept += ("weights/proj/kernel", "indexer/proj/kernel", "indexer/places", "log_frequencies")
    kept += ("mlp/table", "position_bias")
    kept += ("correction", "position/weight", *PARTS)
    kept += tuple(f"activation/{name}" for name in XIELU_NUMBERS)
    if config.router_in_fp32:
        kept += ("router/kernel", "router/bias")
    if config.fp32_head:
        kept += ("embed/weight",) if config.tie_embeddings else ("head/kernel", "head/bias")

    def leaf(path, x):
        return x if path_name(path).endswith(kept) else x.astype(config.dtype)

    return jax.tree_util.tree_map_with_path(leaf, params)
