"""Matmuls with quantised matrices, in the compute dtype.

Those of 8 bits are with the codes themselves: a column is scaled behind the sum over its inputs, so that what is read
of the matrix is one byte a number. Those of 4 bits are converted, on GPUs for few rows by the kernel that multiplies.
"""

import functools
import math
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_llm.distributed.sharding import activation_spec, is_sharded, parameter_spec
from jaxrl_llm.models.kernels import cpu_matmul
from jaxrl_llm.models.kernels.fused_attention import has_triton
from jaxrl_llm.models.kernels.grouped_matmul import by_codes, reads_codes
from jaxrl_llm.models.quantize import BYTES, Kernel, as_matrix, dequantize, quantize, scales_of, widened


def matmul(x, kernel: Kernel, kind: str, name: str = "") -> jax.Array:
    """`x @ kernel`, x `[n, in]`, in the dtype of x; the name of the map says how a mesh shards its matrix."""
    if not isinstance(kernel, dict):
        return cpu_matmul.matmul(x, kernel)
    if kind in BYTES:
        return scaled(sums(x, kernel["codes"]), kernel["absmax"], kind).astype(x.dtype)
    by_kernel = jax.default_backend() == "gpu" and has_triton()
    found = _of_codes(x, kernel, kind, name) if by_kernel else None
    return cpu_matmul.matmul(x, dequantize(kernel, kind, x.dtype)) if found is None else found


def _of_codes(x, kernel: dict[str, jax.Array], kind: str, name: str, interpret: bool = False) -> jax.Array | None:
    """`matmul` of few rows by the kernel of GPUs that reads codes of 4 bits, where it serves, or None."""
    codes, scales = kernel["codes"], scales_of(kernel)
    run = functools.partial(_of_one_group, kind=kind, interpret=interpret)
    if x.ndim != 2 or (is_sharded() and not name):
        return None
    if not is_sharded():
        return run(x, codes, scales) if reads_codes(len(x), codes[None], scales[None]) else None
    mesh = jax.sharding.get_abstract_mesh()
    rows = activation_spec(x.shape, "rows", None)[0]
    own_rows = len(x) // math.prod(mesh.shape[axis] for axis in jax.tree.leaves(rows))
    # Codes are gathered along the other axes, as the numbers would be.
    specs = [parameter_spec(f"/{name}/kernel", array.shape, mesh) for array in (codes, scales)]
    of_codes, of_scales = ([axis if axis == "tensor" else None for axis in spec] or [None, None] for spec in specs)
    # Where devices share a block, each has the scales of all.
    if of_codes != of_scales or not reads_codes(own_rows, codes[None], scales[None]):
        return None

    def local(x, codes, scales):
        out = run(x, codes, scales)
        return out if of_codes[0] is None else jax.lax.psum(out, of_codes[0])

    in_specs, out_specs = (P(rows, of_codes[0]), P(*of_codes), P(*of_codes)), P(rows, of_codes[1])
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)(x, codes, scales)


def _of_one_group(x, codes, scales, kind: str, interpret: bool):
    sizes = jnp.full((1,), len(x), jnp.int32)
    return by_codes(x, codes[None], scales[None], sizes, x.dtype, kind, interpret)


def sums(x, codes) -> jax.Array:
    """The products `[n, out]` of x `[n, in]` and codes of 8 bits in fp32, to be `scaled`."""
    return jnp.matmul(x, widened(codes, x.dtype), preferred_element_type=jnp.float32)


def scaled(sums, absmax, kind: str) -> jax.Array:
    """The products with the matrix whose codes gave these `sums`, in fp32."""
    return sums * (absmax / BYTES[kind][1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _frozen_matmul(x, kernel: Kernel, kind: str, name: str) -> jax.Array:
    return matmul(x, kernel, kind, name)


def frozen_matmul(x, kernel: Kernel, kind: str, name: str = "") -> jax.Array:
    """`matmul` with a gradient for x alone.

    The backward pass keeps the kernel as it is stored, and converts it again: autodiff would keep the converted matrix
    of every layer.
    """
    return cast(jax.Array, _frozen_matmul(x, kernel, kind, name))


def _forward(x, kernel: Kernel, kind: str, name: str):
    return matmul(x, kernel, kind, name), kernel


def _backward(kind: str, name: str, kernel: Kernel, gradient):
    dtype = gradient.dtype
    if not isinstance(kernel, dict) or kind not in BYTES:
        return cpu_matmul.matmul_transposed(gradient, as_matrix(kernel, kind, dtype)), None
    gradient = (gradient * kernel["absmax"]).astype(dtype)
    gradient = jnp.matmul(gradient, widened(kernel["codes"], dtype).T, preferred_element_type=jnp.float32)
    return (gradient / BYTES[kind][1]).astype(dtype), None


_frozen_matmul.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def simulated_matmul(x, kernel: jax.Array, kind: str) -> jax.Array:
    """`matmul` with the kernel as `quantize` stores it. Its gradient is that of the stored one, as it is
    (straight-through, arXiv 1308.3432).

    The backward pass quantises again: autodiff would keep a second matrix of every layer.
    """
    return matmul(x, quantize(kernel, kind), kind)


def _simulated_backward(kind: str, kept, gradient):
    x, kernel = kept
    of_x, _ = _backward(kind, "", quantize(kernel, kind), gradient)
    return of_x, cpu_matmul.over_rows(x, gradient).astype(kernel.dtype)


simulated_matmul.defvjp(lambda x, kernel, kind: (simulated_matmul(x, kernel, kind), (x, kernel)), _simulated_backward)
