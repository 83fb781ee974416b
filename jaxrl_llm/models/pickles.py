"""Tensors of torch's own checkpoint files (`pytorch_model.bin`), read without torch.

Such a file is a zip archive with a pickle and the raw storages beside it. A pickle can name any function for the reader
to call; the reader here knows only what rebuilds tensors and refuses everything else, so that nothing is executed.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxrl_llm.config import ConfigError

STORAGES = {
    "DoubleStorage": (np.float64, "F64"),
    "FloatStorage": (np.float32, "F32"),
    "HalfStorage": (np.float16, "F16"),
    "BFloat16Storage": (ml_dtypes.bfloat16, "BF16"),
    "LongStorage": (np.int64, "I64"),
    "IntStorage": (np.int32, "I32"),
    "ByteStorage": (np.uint8, "U8"),
    "BoolStorage": (np.bool_, "BOOL"),
}


class Kind(NamedTuple):
    """The numbers of a storage."""

    dtype: Any
    name: str  # as safetensors calls it


class Tensor(NamedTuple):
    """A tensor that is read when it is indexed; it has the interface of a safetensors slice."""

    archive: zipfile.ZipFile
    entry: str
    kind: Kind
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def get_shape(self) -> list[int]:
        """The dimensions."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The type, in the words of safetensors."""
        return self.kind.name

    def __getitem__(self, index) -> np.ndarray:
        storage = np.frombuffer(self.archive.read(self.entry), self.kind.dtype)
        size = storage.itemsize
        strides = [step * size for step in self.stride]
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
            found = _Reader(self, io.BytesIO(self.archive.read(entry))).load()
        except FileNotFoundError as error:
            raise ConfigError(f"{file} is missing, though the index names it.") from error
        except (zipfile.BadZipFile, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigError(f"{file} is damaged, or no checkpoint of torch 1.6 or later: {error}") from error
        if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
            raise ConfigError(f"{file} must hold tensors by name, as `torch.save(model.state_dict())` writes them.")
        self.tensors: dict[str, Tensor] = found

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self.tensors)

    def get_slice(self, name: str) -> Tensor:
        """The tensor of that name, not read yet."""
        return self.tensors[name]

    def __enter__(self) -> "PickleFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.archive.close()


class _Reader(pickle.Unpickler):
    """Unpickles tensors, and names in its refusal whatever else the file asks for."""

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
            return Kind(*STORAGES[name])
        raise ConfigError(
            f"{self.owner.file} asks to run {module}.{name}, and a checkpoint needs tensors alone: it is not read."
        )

    def persistent_load(self, pid: Any) -> tuple[str, Kind]:
        _, kind, key, *_ = pid
        return f"{self.owner.folder}/data/{key}", kind

    def _rebuild(self, storage, offset: int, shape, stride, *_: Any) -> Tensor:
        entry, kind = storage
        return Tensor(self.owner.archive, entry, kind, offset, tuple(shape), tuple(stride))
