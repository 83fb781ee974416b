"""Tensors of torch's own checkpoint files (`pytorch_model.bin`), read without torch.

Such a file is a zip archive with a pickle and the raw storages beside it. A pickle can name any function for the reader
to call; the reader here knows only what rebuilds tensors and refuses everything else, so that nothing is executed.
"""

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxrl_llm.config import ConfigError

# What zipfile, zlib and pickle raise for wrong bytes; a pickle of wrong bytes can raise nearly anything.
DAMAGE = (
    zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, struct.error, EOFError, ValueError, LookupError, TypeError,
    AttributeError, ArithmeticError, MemoryError, RuntimeError, OSError,
)  # fmt: skip


class Kind(NamedTuple):
    """The type of the numbers in a storage of PyTorch."""

    dtype: Any
    name: str  # as safetensors calls it


STORAGES = {
    "DoubleStorage": Kind(np.float64, "F64"),
    "FloatStorage": Kind(np.float32, "F32"),
    "HalfStorage": Kind(np.float16, "F16"),
    "BFloat16Storage": Kind(ml_dtypes.bfloat16, "BF16"),
    "LongStorage": Kind(np.int64, "I64"),
    "IntStorage": Kind(np.int32, "I32"),
    "ByteStorage": Kind(np.uint8, "U8"),
    "BoolStorage": Kind(np.bool_, "BOOL"),
}


class Storage(NamedTuple):
    """The numbers that tensors are views of, and their place in the archive."""

    entry: str
    kind: Kind
    size: int  # in numbers


class Tensor(NamedTuple):
    """A tensor that is read when it is indexed; it has the interface of a safetensors slice."""

    file: Path
    archive: zipfile.ZipFile
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def get_shape(self) -> list[int]:
        """The dimensions."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The type of its numbers, by the name that safetensors has for it: BF16, F32, ..."""
        return self.storage.kind.name

    @property
    def end(self) -> int:
        """One more than the last number of the storage that the tensor takes."""
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + (sum((size - 1) * step for size, step in steps) + 1 if all(self.shape) else 0)

    def __getitem__(self, index) -> np.ndarray:
        try:
            storage = np.frombuffer(self.archive.read(self.storage.entry), self.storage.kind.dtype)
        except DAMAGE as error:
            raise ConfigError(f"{self.file} is damaged: {self.storage.entry}: {error}") from error
        # `PickleFile.get_slice` has checked that the view ends within the storage.
        strides = [step * storage.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(storage[self.offset :], self.shape, strides, writeable=False)[index]


class PickleFile:
    """The tensors of one file, with the interface of a safetensors file. A context: it closes the file.

    Raises ConfigError for a file that is damaged, of the format before torch 1.6, or holds anything but tensors.
    """

    def __init__(self, file: Path):
        self.file = file
        try:
            self.archive = zipfile.ZipFile(file)
            (entry,) = (name for name in self.archive.namelist() if name.endswith("/data.pkl"))
            self.folder = entry.rpartition("/")[0]
            order = f"{self.folder}/byteorder"
            if order in self.archive.namelist() and self.archive.read(order) != b"little":
                raise ValueError(f"its bytes are in the order {self.archive.read(order)!r}, supported is little")
            found = _Reader(self, io.BytesIO(self.archive.read(entry))).load()
        except FileNotFoundError as error:
            raise ConfigError(f"{file} is missing, though the index names it.") from error
        except ConfigError:
            raise
        except DAMAGE as error:
            raise ConfigError(f"{file} is damaged, or no checkpoint of torch 1.6 or later: {error}") from error
        named = isinstance(found, dict) and all(
            isinstance(name, str) and isinstance(x, Tensor) for name, x in found.items()
        )
        if not named:
            raise ConfigError(f"{file} must hold tensors by name, as `torch.save(model.state_dict())` writes them.")
        self.tensors: dict[str, Tensor] = found

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self.tensors)

    def get_slice(self, name: str) -> Tensor:
        """The tensor of that name, not read yet; raises ConfigError for one that is larger than its storage."""
        tensor = self.tensors[name]
        if tensor.end > tensor.storage.size:
            raise ConfigError(
                f"{self.file}: tensor {name} of shape {tensor.shape} is larger than its storage: it would take numbers "
                f"up to {tensor.end}, and there are {tensor.storage.size}"
            )
        return tensor

    def __enter__(self) -> "PickleFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.archive.close()


class _Reader(pickle._Unpickler):  # pyright: ignore[reportAttributeAccessIssue]
    """An unpickler of tensors, which refuses everything else by name.

    It is Python's own implementation: the one in C allocates as much memory as a wrong index in a file asks for.
    """

    def __init__(self, owner: PickleFile, data: io.BytesIO):
        super().__init__(data)
        self.owner = owner

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._rebuild
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise ConfigError(
            f"{self.owner.file} asks to run {module}.{name}, and a checkpoint needs tensors alone: it is not read."
        )

    def persistent_load(self, pid: Any) -> Storage:
        _, kind, key, _, size, *_ = pid
        if not (isinstance(kind, Kind) and isinstance(key, str) and _is_count(size)):
            raise ValueError(f"{pid!r:.80} is no storage")
        entry = f"{self.owner.folder}/data/{key}"
        info = self.owner.archive.getinfo(entry)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != size * np.dtype(kind.dtype).itemsize:
            raise ValueError(f"{entry} has {info.file_size} bytes, and should hold {size} numbers of {kind.name}")
        return Storage(entry, kind, size)

    def _rebuild(self, storage, offset: int, shape, stride, *_: Any) -> Tensor:
        shape, stride = tuple(shape), tuple(stride)
        if not (isinstance(storage, Storage) and len(shape) == len(stride)):
            raise ValueError("a tensor has no storage, or not as many strides as dimensions")
        if not all(map(_is_count, (offset, *shape, *stride))):
            raise ValueError(f"a tensor has offset {offset!r}, shape {shape} and strides {stride}")
        return Tensor(self.owner.file, self.owner.archive, storage, offset, shape, stride)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
