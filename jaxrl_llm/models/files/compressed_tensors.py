"""Matrices in the formats of compressed-tensors, which llm-compressor writes: read, slice by slice, as numbers.

A matrix `[out,in]` named `x.weight` is stored as codes and scales `x.weight_scale`: one, of outputs `[out,1]`, of
groups of inputs `[out,in/group]` or of blocks `[out/n,in/m]`. Codes are, by format,

- int-quantized, float-quantized, naive-quantized: integers or E4M3, named `x.weight`;
- pack-quantized: `x.weight_packed` `[out,in/k]`, k integers in a word of 32 bits, the smallest as 0, of a matrix of
  the shape `x.weight_shape`;
- nvfp4-pack-quantized: `x.weight_packed` `[out,in/2]`, two E2M1 in a byte, the first in the lower half; their scales
  are E4M3, over a number `x.weight_global_scale`;
- mxfp4-pack-quantized, mxfp8-quantized: E2M1 or E4M3 in the same way, whose scales are exponents of powers of two.

Zero points `x.weight_zero_point` have the shape of scales, or are packed as codes are, but along outputs.
`x.weight_g_idx` [in] is the group of each input, where activations ordered them. What files hold of activations and
caches in few bits has no use where these are numbers.
"""

from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.files.mxfp4 import FP4
from jaxrl_llm.models.files.scaled import Packed, blocked, check_parts, opener, shape_of

METHOD = "compressed-tensors"  # the quant_method of config.json
FORMATS = (
    "dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized", "mxfp8-quantized",
    "naive-quantized", "nvfp4-pack-quantized", "pack-quantized",
)  # fmt: skip
BITS = (2, 4, 8)  # of packed integers
# How names end that have no place in the model, of matrices and of activations and caches.
OF_MATRICES = ("packed", "shape", "scale", "global_scale", "zero_point", "g_idx")
OF_OTHERS = ("scale", "global_scale", "zero_point", "g_idx")
BESIDE = {f"weight_{end}" for end in OF_MATRICES} | {
    f"{part}_{end}" for part in ("input", "output", "q", "k", "v") for end in OF_OTHERS
}


def check(entry: dict[str, Any]) -> None:
    """Raises ConfigError for a quantization_config of matrices that are stored in another way, or are other ones."""
    if not isinstance(groups := entry.get("config_groups") or {}, dict):
        refuse("config_groups of quantization_config", groups, "an object")
    for owner in (entry, *_groups(entry)):
        if owner.get("format") not in (None, *FORMATS):
            refuse("format of quantization_config", owner["format"], ", ".join(FORMATS))
    if (sparse := (entry.get("sparsity_config") or {}).get("format")) not in (None, "dense"):
        refuse("format of sparsity_config in quantization_config", sparse, "dense")
    if rotated := (entry.get("transform_config") or {}).get("config_groups"):
        refuse("transform_config of quantization_config", sorted(rotated), "none, as activations are not rotated")


def _groups(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The config_groups that say how their matrices are quantised; others are a name for it, and have only targets."""
    groups = (entry.get("config_groups") or {}).values()
    return [group for group in groups if isinstance(group, dict) and isinstance(group.get("weights"), dict)]


def with_matrices(where: dict[str, Any], files: dict[str, Path], entry: dict[str, Any]) -> dict[str, Any]:
    """The files of tensors by name, with matrices in the place of what is stored for them. `files` are the paths.

    Raises ConfigError where a tensor is missing or of a shape that does not go with the others'.
    """
    found = {name: file for name, file in where.items() if name.rpartition(".")[2] not in BESIDE}
    tensor = opener(where, files)
    settings = [group["weights"] for group in _groups(entry)]
    usual = [(1, size) for weights in settings if (size := weights.get("group_size") or 0) > 0]
    blocks = [block for weights in settings if (block := weights.get("block_structure"))]
    split = (block.split("x") if isinstance(block, str) else block for block in blocks)
    usual += [(int(rows), int(columns)) for rows, columns in split]
    said = f"group_size and block_structure of config.json: {usual}"
    is_ordered = bool(settings) and all(weights.get("actorder") in ("group", "dynamic", True) for weights in settings)

    for name in where:
        module, _, part = name.rpartition(".")
        matrix, dtype = f"{module}.weight", where[name].get_slice(name).get_dtype()
        is_plain = part == "weight" and dtype in ("I8", "F8_E4M3") and f"{matrix}_scale" in where
        if part != "weight_packed" and not is_plain:
            continue
        needed = ["scale", *(["shape"] if dtype == "I32" else []), *(["g_idx"] if is_ordered else [])]
        check_parts(matrix, [f"{matrix}_{end}" for end in needed], where)
        codes, scales = tensor(name), tensor(f"{matrix}_scale", exponents=True)
        zeros = tensor(f"{matrix}_zero_point") if f"{matrix}_zero_point" in where else None
        if dtype == "I32":
            shape = [int(size) for size in tensor(f"{matrix}_shape")]
            levels = _levels(name, shape_of(codes), shape)
            codes = Packed(codes, shape, levels)
            if zeros is not None and shape_of(zeros) != shape_of(scales):
                zeros = Packed(zeros, (shape[0], shape_of(scales)[-1]), levels, axis=0)
        elif not is_plain:
            over = tensor(f"{matrix}_global_scale") if f"{matrix}_global_scale" in where else 1
            outputs, pairs = shape_of(codes)
            codes = Packed(codes, (outputs, 2 * pairs), FP4 / np.float32(over))
        order = f"{matrix}_g_idx"
        groups = tensor(order) if order in where else None
        groups = None if groups is not None and (groups < 0).all() else groups  # -1 where inputs are in order
        found[matrix] = blocked(matrix, codes, f"{matrix}_scale", scales, usual, said, zeros, order, groups)
    return found


def _levels(name: str, words: tuple[int, ...], shape: list[int]) -> np.ndarray:
    """The integers that packed codes stand for, of as many bits as a matrix of that shape needs to fill those words."""
    for bits in BITS:
        if len(shape) == 2 and words == (shape[0], -(-shape[1] * bits // 32)):
            return np.arange(2**bits, dtype=np.float32) - 2 ** (bits - 1)
    raise ConfigError(
        f"tensor {name} has shape {words}, which {name.removesuffix('packed')}shape = {shape} has with neither "
        f"{' nor '.join(map(str, BITS))} bits for a number"
    )
