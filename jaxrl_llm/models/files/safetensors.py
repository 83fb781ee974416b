"""The safetensors files of a model folder: their tensors, read slice by slice and written shard by shard."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.files import read_json, write_json
from jaxrl_llm.distributed.processes import all_or_none
from jaxrl_llm.distributed.sharding import gathered, parameter_spec, path_name, shardings
from jaxrl_llm.models.adapters.lora import merged_kernel, overlaid, with_shared
from jaxrl_llm.models.files import gptq, quantized
from jaxrl_llm.models.files.pickles import PickleFile
from jaxrl_llm.models.files.scaled import Matrices
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.models.quantize import PARTS, inputs_of_scale, quantize
from jaxrl_llm.models.vision.clipped import BOUNDS

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
FLOATS, INTEGERS = ("F64", "F32", "F16", "BF16"), ("I64", "I32")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
ROWS = 4096  # of a head and an embedding that are compared, at a time
CHUNK = 1 << 16  # numbers whose exponents are looked at, at a time: they stay in the processor's cache
VERL_SHARDS = ("model_world_size_*", "../model_world_size_*", "actor/model_world_size_*")
# Buffers that some checkpoints carry and the network computes itself, and layers for multi-token prediction.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.embeddings\.position_ids$|^mtp\.|^model\.mtp_")


def _open_safetensors(file: Path):
    try:
        return safe_open(file, framework="numpy")
    except FileNotFoundError as error:
        raise ConfigError(f"{file} is missing, though {INDEX} names it.") from error
    except SafetensorError as error:
        raise ConfigError(f"{file} is truncated or no safetensors file: {error}") from error


# The name of a single file, the name of the index of several, and the function that opens one.
KINDS_OF_FILES = ((SINGLE, INDEX, _open_safetensors), (PICKLE, PICKLE_INDEX, PickleFile))


class Stored(NamedTuple):
    """One tensor of the files, or a part of it: its name, its shape there, and its place in the parameters."""

    name: str
    shape: tuple[int, ...]
    transpose: bool
    leaf: str  # path of the parameter
    layer: int | None  # index in a stacked parameter
    dtype: np.dtype  # of the parameter, or int64
    expert: int | None = None  # index in a parameter that is stacked over experts too, or over heads
    full_shape: tuple[int, ...] = ()  # of the tensor in the files, of which this may be a range of rows
    first_row: int = 0
    axis: int = 0  # -1: a range of columns, from number first_row on
    one_expert: bool = False  # an expert of a tensor that is stacked over experts
    every: int = 0  # this is every n-th number of the last dimension, from number first_row on; 0: a range of rows
    as_row: bool = False  # a vector, in the files the only row of a matrix
    first_of: int | None = None  # it has a range of the parameter's rows, from this one on; None: all

    @property
    def at(self) -> tuple[int | slice, ...]:
        """The index of the tensor in a stacked parameter."""
        stacked = tuple(index for index in (self.layer, self.expert) if index is not None)
        return stacked if self.first_of is None else (*stacked, slice(self.first_of, self.first_of + self.shape[0]))


def keys_of(family, config: ModelConfig) -> tuple:
    """The table of tensor names in the files of a net: the family's KEYS, or its `keys(config)` where they differ."""
    return family.keys(config) if hasattr(family, "keys") else family.KEYS


def constants_of(family, config: ModelConfig) -> dict[str, np.ndarray]:
    """The integers by name that files of a net hold beside its parameters, where the family has some."""
    return family.constants(config) if hasattr(family, "constants") else {}


def stored_tensors(net: Net, family, table=None) -> list[Stored]:
    """Every tensor of the net's files, in the order of the network; adapters are in files of their own.

    `table` are the keys of another way to store the family's tensors.
    """
    config = net.config
    names = {name.path: (order, name) for order, name in enumerate(table or keys_of(family, config))}
    of_encoder = getattr(config.vision and config.vision.encoder, "stacks", {})
    tensors = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(net.plain.shapes()):
        leaf_path = path_name(path)
        stack, _, rest = leaf_path.partition("/")
        order, name = names[f"layers/{rest}" if stack in config.stacks else leaf_path]  # tables name no other stacks
        numbers = config.stacks.get(stack, range(leaf.shape[0]))  # of the encoder's stacks mostly from 0 on
        numbers = next((own for name, own in of_encoder.items() if leaf_path.startswith(f"{name}/")), numbers)
        layers = list(enumerate(numbers)) if "{layer}" in name.tensor else [(None, None)]
        of_heads, of_experts = "{head}" in name.tensor, "/experts/" in leaf_path
        experts = range(config.experts) if of_experts else range(leaf.shape[1]) if of_heads else [None]
        shape = leaf.shape[(layers[0][0] is not None) + (experts[0] is not None) :]
        shape = shape[::-1] if name.transpose else shape
        size = -(-shape[0] // name.parts) if name.parts else 0  # rows of a part
        parts = list(enumerate(range(0, shape[0], size))) if size else [(None, None)]
        for (index, layer), expert, (part, first) in itertools.product(layers, experts, parts):
            file_name = name.tensor.format(layer=layer, expert=expert, head=expert, part=part)
            own = shape if first is None else (min(size, shape[0] - first), *shape[1:])
            dtype = np.dtype(np.int64) if name.integers else leaf.dtype
            tensor = Stored(file_name, own, name.transpose, leaf_path, index, dtype, first_of=first)
            stacked = of_experts and "{expert}" not in name.tensor and not name.expert_rows
            tensor = tensor._replace(expert=expert, one_expert=stacked)
            # How many are interleaved is counted below.
            tensor = tensor._replace(every=int(name.interleaved), axis=-1 if name.columns else 0)
            tensor = tensor._replace(shape=(1, *shape), as_row=True) if name.as_row else tensor
            leads = leaf_path == "embed/weight" or stack == "vision"
            rank = -1 if leads else config.layers if layer is None else layer
            tensors.append((rank, order, expert or part or 0, tensor))
    # Parameters of one tensor are ranges of its rows or columns, one after another.
    rows: dict[tuple, int] = {}
    ranges = []
    for *_, tensor in sorted(tensors, key=lambda item: item[:3]):
        key = (tensor.name, tensor.one_expert and tensor.expert)
        ranges.append((key, tensor._replace(first_row=rows.get(key, 0))))
        rows[key] = rows.get(key, 0) + (1 if tensor.every or not tensor.shape else tensor.shape[tensor.axis])

    def placed(tensor: Stored, count: int) -> Stored:
        if not tensor.shape:
            return tensor
        full = list(tensor.shape)
        full[-1 if tensor.every else tensor.axis] = count * full[-1] if tensor.every else count
        lead = [config.experts] if tensor.one_expert else []
        return tensor._replace(full_shape=(*lead, *full), every=count if tensor.every else 0)

    return [placed(tensor, rows[key]) for key, tensor in ranges]


def named_as_modules(net: Net, family) -> list[Stored]:
    """The tensors of the net under the names that they have in the family's class of transformers."""
    if hasattr(family, "module_keys"):
        return stored_tensors(net, family, family.module_keys(net.config))
    return stored_tensors(net, family, getattr(family, "MODULE_KEYS", None))


class Files:
    """The open weight files of a folder, and which of them holds each tensor: safetensors, or pickles where allowed.

    `quantization` is the quantization_config of config.json, empty without one.
    """

    def __init__(
        self,
        folder: Path,
        stack: contextlib.ExitStack,
        allow_pickle: bool = False,
        quantization: Mapping[str, Any] | None = None,
    ):
        self.folder = folder
        kinds = KINDS_OF_FILES if allow_pickle else KINDS_OF_FILES[:1]
        present = [kind for kind in kinds if any((folder / name).is_file() for name in kind[:2])]
        if not present:
            raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}{self._advice(allow_pickle)}")
        single, index_name, open_file = present[0]
        # A file of all goes before an index, as in transformers: that may be of shards that were here before.
        index = None if (folder / single).is_file() else read_json(folder / index_name)
        named = {} if index is None else index.get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise ConfigError(f"{folder / index_name} has no weight_map that names the file of each tensor")
        names = sorted(set(named.values())) if index is not None else [single]
        self.where: dict[str, Any] = {}
        files: dict[str, Path] = {}
        for name in names:
            handle = stack.enter_context(open_file(folder / name))
            self.where |= dict.fromkeys(handle.keys(), handle)
            files |= dict.fromkeys(handle.keys(), folder / name)
        held = set(self.where)
        self.packed = (quantization or {}).get("quant_method") in gptq.FORMATS
        self.where = quantized.with_matrices(self.where, files, dict(quantization or {}))
        if lost := sorted(set(named) - held):
            raise ConfigError(f"{folder / index_name} names tensors that no file holds: {some(lost)}.")

    def _advice(self, allow_pickle: bool) -> str:
        if any(next(self.folder.glob(kind), None) for kind in VERL_SHARDS):
            return (
                ". It is of a checkpoint of verl, whose shards verl merges: python -m verl.model_merger merge "
                "--backend=fsdp --local_dir=.../actor --target_dir=FOLDER; name that folder"
            )
        pickles = ", ".join(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in sorted(self.folder.glob(kind)))
        if not pickles:
            return "."
        return f"; pickle files ({pickles}) are not read" + (
            f": only {PICKLE} and {PICKLE_INDEX} are." if allow_pickle else " unless model.allow_pickle is set."
        )

    def stored_tensors(self, net: Net, family) -> list[Stored]:
        """The tensors of the net, under the names of the family that these files use, and in their orientation."""
        others = family.other_keys(net.config) if hasattr(family, "other_keys") else getattr(family, "OTHER_KEYS", ())
        tables = [keys_of(family, net.config), *others]
        ways = [stored_tensors(net, family, table) for table in tables]

        def unlike(tensors: list[Stored]) -> tuple[int, int]:
            here = [tensor for tensor in tensors if tensor.name in self.where]
            shapes = (tuple(self.where[tensor.name].get_slice(tensor.name).get_shape()) for tensor in here)
            misfits = sum(shape != tensor.full_shape for shape, tensor in zip(shapes, here, strict=True))
            return len(tensors) - len(here), misfits

        return ways[0] if len(ways) == 1 else min(ways, key=unlike)

    def check(self, tensors: list[Stored], ignored: set[str]) -> None:
        """Raises ConfigError unless the files hold exactly these tensors, in these shapes, as floats or integers."""
        wanted = {tensor.name: tensor for tensor in tensors}
        if missing := [name for name in wanted if name not in self.where]:
            raise ConfigError(f"{self.folder} lacks tensors that the model needs: {some(missing)}.")
        known = {*wanted, *ignored}
        spare = [name for name in self.where if name not in known and not IGNORED.search(name)]
        # AutoGPTQ gives each matrix a bias: zeros, where the model has none.
        if spare := [name for name in spare if not self._is_zero_bias(name)]:
            raise ConfigError(f"{self.folder} holds tensors that config.json gives no place to: {some(sorted(spare))}.")
        for name, tensor in wanted.items():
            found = self.where[name].get_slice(name)
            if isinstance(found, Matrices) and self.packed and not tensor.transpose:
                raise ConfigError(
                    f"{self.folder}: {name} is stored as [in, out] by this family, of which no matrices in the formats "
                    f"of {' and '.join(gptq.FORMATS)} are read: use the model before it was quantised"
                )
            if tuple(found.get_shape()) != tensor.full_shape:
                raise ConfigError(
                    f"{self.folder}: tensor {name} has shape {tuple(found.get_shape())}, "
                    f"but config.json says {tensor.full_shape}."
                )
            supported = INTEGERS if np.issubdtype(tensor.dtype, np.integer) else FLOATS
            if found.get_dtype() not in supported:
                raise ConfigError(
                    f"{self.folder}: tensor {name} has dtype {found.get_dtype()}, supported are {', '.join(supported)}."
                )

    def check_constants(self, constants: Mapping[str, np.ndarray]) -> None:
        """Raises ConfigError where the files hold other integers than the network computes of config.json."""
        for name, expected in constants.items():
            if name in self.where and not np.array_equal(self.where[name].get_slice(name)[:], expected):
                raise ConfigError(
                    f"{self.folder}: tensor {name} has other numbers than follow from config.json, {expected.tolist()}"
                )

    def _is_zero_bias(self, name: str) -> bool:
        module, is_bias, _ = name.rpartition(".bias")
        if not is_bias or (weight := f"{module}.weight") not in self.where:
            return False
        is_quantized = isinstance(self.where[weight].get_slice(weight), Matrices)
        return is_quantized and not self.where[name].get_slice(name)[:].any()

    def read(self, tensor: Stored, index: tuple[slice, ...], dtype) -> np.ndarray:
        """The slice `index` (in the parameter's orientation) of a tensor, as a fresh array.

        Raises ConfigError for numbers that are not finite.
        """
        index = index[::-1] if tensor.transpose else index
        index = (slice(None), *index) if tensor.as_row else index
        if tensor.every:
            start, stop, _ = index[-1].indices(tensor.shape[-1])
            index = (*index[:-1], slice(start * tensor.every, stop * tensor.every))
        elif tensor.shape:
            start, stop, _ = index[tensor.axis].indices(tensor.shape[tensor.axis])
            own = slice(tensor.first_row + start, tensor.first_row + stop)
            index = (*index[:-1], own) if tensor.axis else (own, *index[1:])
        lead = [slice(tensor.expert, tensor.expert + 1)] if tensor.one_expert and tensor.expert is not None else []
        part = self.where[tensor.name].get_slice(tensor.name)[(*lead, *index)]
        part = part[0] if lead or tensor.as_row else part
        part = part[..., tensor.first_row :: tensor.every] if tensor.every else part
        array = np.array(part.T if tensor.transpose else part, dtype=dtype, order="C")
        if not tensor.leaf.endswith(BOUNDS):  # which may be infinite
            check_finite(array, self.folder, tensor.name)
        return array

    def steps(self, tensors: list[Stored], kind: str, inputs: int) -> "Files | None":
        """The files of the scales in the place of numbers `[out,in]` that model.quantize of that kind keeps, as
        `Matrices.steps` says; None where these tensors have numbers that it rounds."""
        found = copy.copy(self)
        found.where = {}
        for tensor in tensors:
            matrix = self.where[tensor.name].get_slice(tensor.name)
            is_plain = tensor.transpose and not tensor.axis and not tensor.every and isinstance(matrix, Matrices)
            if not is_plain or (steps := matrix.steps(kind, inputs)) is None:
                return None
            found.where[tensor.name] = steps
        return found

    def check_tied(self, embedding: str) -> None:
        """Raises ConfigError where a separate head is stored that is not the embedding, though the two are tied."""
        if (head := self.head_beside(embedding)) is not None:
            raise ConfigError(
                f"{self.folder}: config.json says tie_word_embeddings, but the files hold a {head} with other numbers "
                f"than {embedding}; set tie_word_embeddings to false, or remove the tensor"
            )

    def head_beside(self, embedding: str) -> str | None:
        """The name of a separate head with other numbers than the embedding; None where there is none such."""
        heads = [name for name in HEADS if name in self.where]
        if not heads or embedding not in self.where:
            return None
        head, embed = (self.where[name].get_slice(name) for name in (heads[0], embedding))
        rows = embed.get_shape()[0]
        parts = [np.s_[start : min(start + ROWS, rows), :] for start in range(0, rows, ROWS)]
        same = head.get_shape() == embed.get_shape() and all(np.array_equal(head[part], embed[part]) for part in parts)
        return None if same else heads[0]


def head_is_embedding(folder: Path, quantization: Mapping[str, Any]) -> bool | None:
    """True where the safetensors in a folder hold no head, or one that is the embedding; None where there are none.

    `quantization` is that of `Files`.
    """
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return None
    with contextlib.ExitStack() as stack:
        files = Files(folder, stack, quantization=quantization)
        embedding = next((name for name in files.where if name.endswith("embed_tokens.weight")), "")
        return files.head_beside(embedding) is None


def all_finite(x: np.ndarray) -> bool:
    """True when no number is NaN or infinite; one pass over the memory, without a copy of its size."""
    x = x.reshape(-1)
    if x.dtype.itemsize == 2:  # bfloat16 and float16: all bits of the exponent set
        exponent = 0x7F80 if x.dtype != np.float16 else 0x7C00
        bits = x.view(np.uint16)
        return all(np.bitwise_and(bits[i : i + CHUNK], 0x7FFF).max() < exponent for i in range(0, bits.size, CHUNK))
    with np.errstate(all="ignore"):
        # A sum is finite unless a term is not, or it overflows: then each number is looked at.
        return bool(np.isfinite(x.sum()) or np.isfinite(x).all())


def check_finite(x: np.ndarray, folder: Path, name: str) -> None:
    """Raises ConfigError, naming the tensor, when a number of it is NaN or infinite."""
    if not all_finite(x):
        bad = x[~np.isfinite(x)]
        raise ConfigError(
            f"{folder}: tensor {name} has {bad.size} numbers of {x.size} that are not finite ({float(bad[0])}, ...): "
            "the file is damaged, or the training that wrote it had diverged"
        )


def some(names: list[str]) -> str:
    """The first five names and how many more there are, for an error message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_params(net: Net, files: Files, tensors: list[Stored], mesh: Mesh | None, seed: int) -> Params:
    """The net's parameters without adapters, read leaf by leaf, and quantised leaf by leaf where the net is.

    Warns of matrices in few bits that are rounded once more for that.
    """
    parts: dict[str, list[Stored]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.leaf, []).append(tensor)
    shapes = net.plain.shapes()
    placed = shardings(shapes, mesh) if mesh is not None else jax.tree.map(lambda _: None, shapes)
    quantized, rounded_again = quantized_kernels(net, mesh), list[str]()

    def leaf(path, x, sharding):
        if (name := path_name(path)) not in parts:
            value = jax.random.normal(jax.random.key(seed), x.shape, x.dtype) * net.config.init_scale
            value = jnp.zeros_like(value) if name.endswith("/bias") else value
            return value if sharding is None else jax.device_put(value, sharding)
        if name in quantized:
            return in_fewer_bits(name, x)
        return read(parts[name], x.shape, x.dtype, sharding)

    def read(tensors: list[Stored], shape: tuple[int, ...], dtype, sharding, files=files) -> jax.Array:
        if sharding is None:
            return jnp.asarray(_read_leaf(files, tensors, (slice(None),) * len(shape), dtype))
        return jax.make_array_from_callback(shape, sharding, lambda i: _read_leaf(files, tensors, i, dtype))

    def in_fewer_bits(name: str, x) -> dict[str, jax.Array]:
        """A kernel, quantised layer by layer: of experts those of all layers are most of a model, as numbers."""
        kind = net.config.quantized_at(name)
        as_stored = functools.partial(quantize, kind=kind)
        shapes, of_layer = jax.eval_shape(as_stored, x), (1, *x.shape[1:])
        sharding = None if mesh is None else NamedSharding(mesh, parameter_spec(name, of_layer, mesh))

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=quantized[name])
        def put(stored, layer, number, steps):
            return jax.tree.map(lambda x, own: x.at[number].set(own[0]), stored, as_stored(layer, steps=steps))

        stored = jax.jit(lambda: jax.tree.map(jnp.zeros_like, shapes), out_shardings=quantized[name])()
        for number in range(x.shape[0]):
            own = [tensor for tensor in parts[name] if tensor.layer == number]
            scales = files.steps(own, kind, inputs_of_scale(kind, x.shape[-2]))
            if scales is None:
                slices = ((tensor.name, files.where[tensor.name].get_slice(tensor.name)) for tensor in own)
                rounded_again.extend(name for name, matrix in slices if isinstance(matrix, Matrices))
            steps = None if scales is None else read(own, of_layer, jnp.float32, sharding, scales)
            stored = jax.block_until_ready(put(stored, read(own, of_layer, x.dtype, sharding), number, steps))
        return stored

    params = jax.tree_util.tree_map_with_path(leaf, shapes, placed)
    if rounded_again:
        warnings.warn(
            f"matrices that {files.folder} has in few bits are rounded once more, to be held in "
            f"{net.config.quantized}: {some(rounded_again)}. docs/models.md says which kinds keep every number",
            stacklevel=2,
        )
    return params


def quantized_kernels(net: Net, mesh: Mesh | None) -> dict[str, Any]:
    """The path of every kernel that the net quantises, and the shardings of its parts, None without a mesh."""
    found: dict[str, Any] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(net.base.shapes()):
        kernel, _, part = path_name(path).rpartition("/")
        if part in PARTS:
            place = None if mesh is None else NamedSharding(mesh, parameter_spec(path_name(path), x.shape, mesh))
            found.setdefault(kernel, {})[part] = place
    return {kernel: None if mesh is None else parts for kernel, parts in found.items()}


def _read_leaf(files: Files, tensors: list[Stored], index, dtype) -> np.ndarray:
    """The slice `index` of a parameter, whose layers (and experts in each) are `tensors` where it is stacked."""
    if tensors[0].layer is None:
        return files.read(tensors[0], index, dtype)
    if tensors[0].first_of is not None:
        layers = [list(own) for _, own in itertools.groupby(tensors, lambda tensor: tensor.layer)]
        return np.stack([_read_rows(files, own, index[1:], dtype) for own in layers[index[0]]])
    if tensors[0].expert is None:
        return np.stack([files.read(tensor, index[1:], dtype) for tensor in tensors[index[0]]])
    layers = [list(own) for _, own in itertools.groupby(tensors, lambda tensor: tensor.layer)]
    parts = [[files.read(tensor, index[2:], dtype) for tensor in own[index[1]]] for own in layers[index[0]]]
    return np.stack([np.stack(own) for own in parts])


def _read_rows(files: Files, tensors: list[Stored], index, dtype) -> np.ndarray:
    """The slice `index` of a layer of a parameter of which each of these tensors has a range of rows."""
    total = sum(tensor.shape[0] for tensor in tensors)
    start, stop, _ = index[0].indices(total)
    found = []
    for tensor in tensors:
        assert tensor.first_of is not None
        own = slice(max(start - tensor.first_of, 0), min(stop - tensor.first_of, tensor.shape[0]))
        if own.start < own.stop:
            found.append(files.read(tensor, (own, *index[1:]), dtype))
    return np.concatenate(found)


def write(folder: Path, net: Net, family, params: Params, dtype: str, max_shard_bytes: float) -> None:
    """Writes the parameters in safetensors files up to `max_shard_bytes`; of many processes, the first writes.

    The last one has the family's constants too. `dtype` is that of the parameters, but of those that are fp32 in any
    net. Adapters are merged, and quantised kernels dequantised, one tensor at a time.
    """
    leaves, whole = _leaves(overlaid(params)), _whole(net, family, dtype)
    shards: list[list[list[Stored]]] = [[]]
    size = 0
    for parts in whole:  # one that is larger than a file may be has its own
        if shards[-1] and size + _bytes(parts) > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(parts)
        size += _bytes(parts)
    constants = constants_of(family, net.config)
    count, weight_map = len(shards), dict[str, str]()
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        arrays = {parts[0].name: _joined(parts, leaves, net) for parts in shard}
        arrays |= constants if number == count else {}
        weight_map |= dict.fromkeys(arrays, file)
        with by_the_first():
            if jax.process_index() == 0:
                save_file(arrays, folder / file, metadata={"format": "pt"})
    if count > 1 and jax.process_index() == 0:
        total = sum(map(_bytes, whole)) + sum(x.nbytes for x in constants.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


@contextlib.contextmanager
def by_the_first() -> Iterator[None]:
    """Guards what process 0 writes of files that all make: one that cannot be written is an error in all, AgreedError.

    With one process the error itself is raised.
    """
    with all_or_none():
        try:
            yield
        except (OSError, SafetensorError) as error:
            if jax.process_count() == 1:
                raise
            raise ConfigError(str(error)) from error


def file_tensors(net: Net, family, params: Params, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that `write` writes, by name, one after another on the host; every process must take all of them."""
    leaves = _leaves(overlaid(params))
    for parts in _whole(net, family, dtype):
        yield parts[0].name, _joined(parts, leaves, net)


def _whole(net: Net, family, dtype: str) -> list[list[Stored]]:
    """The tensors that are written, in the order of the network, each as its parts."""
    whole: dict[str, list[Stored]] = {}
    for tensor in stored_tensors(Net(dataclasses.replace(net.config, param_dtype=dtype)), family):
        whole.setdefault(tensor.name, []).append(tensor)
    return list(whole.values())


def _joined(parts: list[Stored], leaves: Mapping[str, Any], net: Net) -> np.ndarray:
    """A tensor of the files from its parts: ranges of rows or columns, or numbers in turn, of each expert where it has
    all."""

    def on_host(part: Stored) -> np.ndarray:
        """One part, in the orientation and dtype of the files."""
        x = jax.tree.map(lambda x: x[part.at], leaves[part.leaf])
        if isinstance(x, dict):
            lora = net.config.lora
            x = merged_kernel(x, lora and lora.at(part.leaf.split("/")[:-1]), net.config.quantized_at(part.leaf))
        x = gathered(x).astype(part.dtype)
        x = x[None] if part.as_row else x
        return np.asarray(x.T if part.transpose else x, order="C")

    arrays = list(map(on_host, parts))
    stacked = parts[0].one_expert
    if stacked:  # the experts of a parameter are next to each other
        experts = parts[0].full_shape[0]
        arrays = [np.stack(arrays[first : first + experts]) for first in range(0, len(arrays), experts)]
    if len(arrays) == 1:
        return arrays[0]
    if parts[0].every:
        return np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)
    return np.concatenate(arrays, axis=parts[0].axis or int(stacked))


def _leaves(params: Params, path: str = "") -> dict[str, Any]:
    """The parameters by path; where a kernel is quantised or has an adapter, its linear map's dict by the kernel's."""
    found: dict[str, Any] = {}
    params = with_shared(params)
    whole = "lora_a" in params or isinstance(params.get("kernel"), dict)
    for name, value in params.items():
        if whole and name == "kernel":
            found[f"{path}kernel"] = params
        else:
            found |= _leaves(value, f"{path}{name}/") if isinstance(value, dict) else {f"{path}{name}": value}
    return found


def _bytes(parts: list[Stored]) -> int:
    return int(np.prod(parts[0].full_shape)) * parts[0].dtype.itemsize
