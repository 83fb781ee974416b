"""Which matrices of a model folder are stored in few bits, by the quantization_config of its config.json."""

from pathlib import Path
from typing import Any

from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.files import bitsandbytes, block_fp8, compressed_tensors, gptq, mxfp4


def entry_of(hf: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config of config.json, of the whole or of its text part, as Kimi K2.5 has it; empty without."""
    text = hf.get("text_config") or {}
    return hf.get("quantization_config") or text.get("quantization_config") or {}


def check(entry: dict[str, Any]) -> None:
    """Raises ConfigError for a quantization_config of matrices that are not read."""
    method = entry.get("quant_method")
    known = (*gptq.FORMATS, bitsandbytes.METHOD, compressed_tensors.METHOD, *block_fp8.METHODS, mxfp4.METHOD)
    if entry and method not in known:
        supported = f"{', '.join(known)}, and float32, bfloat16 and float16 without a quantization_config"
        refuse("quant_method of quantization_config", method, supported)
    if method == compressed_tensors.METHOD:
        compressed_tensors.check(entry)
    elif method in gptq.FORMATS:
        gptq.check(entry)
    else:
        block_fp8.blocks_of(entry)


def with_matrices(where: dict[str, Any], files: dict[str, Path], entry: dict[str, Any]) -> dict[str, Any]:
    """The files of tensors by name, with matrices in the place of codes, scales and what else belongs to them.

    `files` are the paths, by name. Raises ConfigError for tensors that do not belong together.
    """
    method = entry.get("quant_method")
    if method == bitsandbytes.METHOD:
        return bitsandbytes.with_matrices(where)
    if method == compressed_tensors.METHOD:
        return compressed_tensors.with_matrices(where, files, entry)
    if method in gptq.FORMATS:
        return gptq.with_matrices(where, entry)
    if method == mxfp4.METHOD:
        return mxfp4.with_matrices(where)
    if method in block_fp8.METHODS:
        return block_fp8.with_matrices(where, files, entry)
    return where
