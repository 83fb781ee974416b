"""Matrices in the formats of GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978): read, slice by slice, as numbers.

A matrix `[out,in]` named `x.weight` is stored as `x.qweight`, k codes in a word of 32 bits, and, for each output and
group of inputs, a scale `x.scales` `[in/group,out]` and a zero point `x.qzeros` `[in/group,out/k]`:
value = (code - zero) * scale.

Of GPTQ, codes are of 2, 4 or 8 bits, and `qweight` is `[in/k,out]`. `x.g_idx` [in] is the group of each input, in any
order with desc_act. Of zero points one less is stored, but not in the format gptq_v2. Of AWQ, codes are of 4 bits,
`qweight` is `[in,out/k]` in the order of the kernel gemm, and groups are of inputs next to each other.
"""

import functools
from typing import Any

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families.entries import computed, refuse
from jaxrl_llm.models.files.scaled import Packed, Transposed, blocked, check_parts

BITS = (2, 4, 8)
FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of 8 outputs in a word, as the kernel gemm has them


def check(entry: dict[str, Any]) -> None:
    """Raises ConfigError for a quantization_config of matrices that are stored in another way."""
    method = entry["quant_method"]
    bits = BITS if method == "gptq" else (4,)
    if entry.get("bits", 4) not in bits:
        refuse(f"bits of quantization_config, of {method},", entry["bits"], ", ".join(map(str, bits)))
    for name, given in _formats(entry).items():
        if given not in FORMATS[method]:
            refuse(f"{name} of quantization_config, of {method},", entry[name], ", ".join(FORMATS[method]))
    computed(entry, {"is_marlin_format": False, "pack_dtype": "int32"}, "quantization_config.")
    if entry.get("backend") == "llm-awq":
        refuse("quantization_config.backend", "llm-awq", "autoawq")


def _formats(entry: dict[str, Any]) -> dict[str, str]:
    """The names of the format that a quantization_config has, by GPTQModel's, AutoGPTQ's and AutoAWQ's word for it."""
    names = ("format", "checkpoint_format", "version")
    return {name: str(entry[name]).lower() for name in names if entry.get(name) is not None}


def with_matrices(where: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The files of tensors by name, with matrices in the place of codes, scales, zero points and groups.

    Raises ConfigError where one of these is missing or of a shape that does not go with the others'.
    """
    found = dict(where)
    is_gptq = entry["quant_method"] == "gptq"
    allowed = BITS if is_gptq else (4,)
    size = entry.get("group_size")
    # In format v1, a word is less by one for each of its zero points, with a borrow where one of them is 0.
    is_less = is_gptq and "gptq_v2" not in _formats(entry).values()
    for name in where:
        module = name.removesuffix("qweight")
        if module == name:
            continue
        matrix, order = f"{module}weight", f"{module}g_idx"
        parts = [name, f"{module}scales", f"{module}qzeros"]
        check_parts(matrix, [*parts, *([order] if entry.get("desc_act") else [])], where)
        codes, scales, zeros = (Transposed(found.pop(part).get_slice(part)) for part in parts)
        outputs, count = [*scales.get_shape(), 0][:2]
        # Some layers may have other bits than config.json says.
        bits = next((n for n in allowed if zeros.get_shape() == [outputs * n // 32, count]), 0)
        inputs = codes.get_shape()[-1] * 32 // bits if is_gptq and bits else codes.get_shape()[-1]
        of_codes = [outputs, inputs * bits // 32] if is_gptq else [outputs * bits // 32, inputs]
        if not bits or codes.get_shape() != of_codes or {codes.get_dtype(), zeros.get_dtype()} != {"I32"}:
            shapes = ", ".join(f"{part.get_dtype()} {part.get_shape()[::-1]}" for part in (codes, scales, zeros))
            raise ConfigError(
                f"tensors {', '.join(parts)} are {shapes}, which is no matrix of {' or '.join(map(str, allowed))} bits "
                "in words of 32"
            )
        packed = functools.partial(
            Packed, levels=np.arange(2**bits, dtype=np.float32), places=None if is_gptq else PLACES
        )
        found[matrix] = blocked(
            matrix,
            packed(codes, (outputs, inputs), axis=int(is_gptq)),
            parts[1],
            scales,
            [(1, size)] if isinstance(size, int) and size > 0 else [],
            f"group_size of config.json: {size}",
            packed(zeros, (outputs, count), axis=0, added=(2**32 - 1) // (2**bits - 1) if is_less else 0),
            order,
            found.pop(order).get_tensor(order) if order in where else None,
        )
    return found
