"""Matrices in 8-bit floats with a scale for each block, as DeepSeek-V3 stores them: read, slice by slice, as numbers.

A matrix `[...,out,in]` named `x` is stored as E4M3, and the scales that its blocks are multiplied by as `x_scale_inv`
`[...,out/n,in/m]`. Blocks are of n x m = 128 x 128 numbers as a rule, smaller at the ends (arXiv 2412.19437, section
3.3); of 1 x 32 in MXFP8 (MiniMax-M3; OCP Microscaling Formats 1.0), whose scales are bytes, the exponents of powers of
two (E8M0); or the whole of a matrix is one block (Ministral 3, AutoFP8), and its scale may be a number; or an output is
(fbgemm_fp8). DeepSeek-V4 names the scales of `x.weight` `x.scale`, and has its experts in pairs of 4-bit floats (E2M1),
the lower half of a byte first, with blocks of 1 x 32.
"""

from pathlib import Path
from typing import Any

from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.files.mxfp4 import FP4
from jaxrl_llm.models.files.scaled import Packed, blocked, opener, shape_of

METHODS = ("fp8", "mxfp8", "fbgemm_fp8")  # the quant_method of config.json
STORED, PAIRS = "F8_E4M3", "I8"
SUFFIXES = ("_scale_inv", "_scale")  # the latter of AutoFP8 and fbgemm_fp8
# The ends of names of what belongs to activations and caches, where those are in fp8 too.
BESIDE = ("activation_scale", ".input_scale", ".input_scale_ub", ".k_scale", ".v_scale")


def blocks_of(entry: dict[str, Any]) -> list[tuple[int, int]]:
    """The rows and columns of the blocks that have a scale each, by quantization_config; empty where matrices have one.

    Raises ConfigError for blocks of other than two dimensions.
    """
    block = entry.get("weight_block_size", [128, 128])
    if block is None:
        return []
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        refuse("weight_block_size", block, "two integers from 1, for the rows and columns that have a scale, and null")
    return [(block[0], block[1])]


def with_matrices(where: dict[str, Any], files: dict[str, Path], entry: dict[str, Any]) -> dict[str, Any]:
    """The files of tensors by name, with matrices in the place of each pair of numbers and scales.

    `files` are the paths, by name. Raises ConfigError for scales that are neither of those blocks nor of others that
    divide a matrix evenly.
    """
    found: dict[str, Any] = {name: file for name, file in where.items() if not name.endswith(BESIDE)}
    tensor, usual = opener(where, files), blocks_of(entry)
    said = f"weight_block_size of config.json: {entry.get('weight_block_size')}"
    for name in where:
        named = [name + suffix for suffix in SUFFIXES]
        named += [f"{name.removesuffix('.weight')}.scale"] if name.endswith(".weight") else []
        scales = next((own for own in named if own in where), None)
        dtype = None if scales is None else where[name].get_slice(name).get_dtype()
        if scales is not None and dtype in (STORED, PAIRS):
            del found[scales]
            codes = tensor(name)
            if dtype == PAIRS:
                *outputs, pairs = shape_of(codes)
                codes = Packed(codes, (*outputs, 2 * pairs), FP4)
            found[name] = blocked(name, codes, scales, tensor(scales, exponents=True), usual, said)
    return found
