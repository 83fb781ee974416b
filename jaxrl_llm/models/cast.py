"""The net of the sampler: the trainer's in another type, or with its matrices in 8 bits."""

import dataclasses

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.quantize import BYTES
from jaxrl_llm.models.transformer import Net


def in_precision(net: Net, weights_dtype: str | None) -> Net:
    """The net that computes with matrices of `weights_dtype`: a type, int8 or fp8 (`quantize`); None is the net itself.

    The matrices of the layers are in 8 bits, those of experts excepted; matmuls run in the net's own type. Of a net
    that is trained for matrices in fewer bits they are in these. Raises ConfigError for 8 bits where the net's matrices
    are in other ones.
    """
    config = net.config
    if config.qat != "none":
        if weights_dtype in BYTES and weights_dtype != config.qat:
            raise ConfigError(
                f"rollout.weights_dtype is {weights_dtype}, but model.qat trains for matrices in {config.qat}, which "
                "are sampled with: set rollout.weights_dtype to auto"
            )
        config = dataclasses.replace(config, quantize=config.qat, qat="none")
        return in_precision(Net(config), weights_dtype)
    if weights_dtype is None:
        return net
    if weights_dtype not in BYTES:
        # Attention by kernels of GPUs is for 16 bits.
        by_kernel = config.attention in ("cudnn", "flash")
        attention = "auto" if by_kernel and weights_dtype == "float32" else config.attention
        return in_precision(Net(dataclasses.replace(config, dtype=weights_dtype, attention=attention)), None)
    if config.quantize not in ("none", weights_dtype):
        raise ConfigError(
            f"rollout.weights_dtype is {weights_dtype}, but model.quantize has the matrices in {config.quantize} "
            "already, and they are sampled with as they are: set rollout.weights_dtype to auto"
        )
    return Net(dataclasses.replace(config, quantize=weights_dtype))


def draws_from_another(sampler: Net, trainer: Net) -> bool:
    """True when the sampler's numbers have fewer bits than the trainer's, so that it draws from another policy."""
    sampled, trained = sampler.config, trainer.config
    stored = trained.quantize if trained.qat == "none" else trained.qat
    return sampled.quantize != stored or (sampled.dtype != trained.dtype and sampled.dtype != "float32")
