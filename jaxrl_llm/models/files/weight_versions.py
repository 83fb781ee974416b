"""Published weights: the versions of a policy's weights in a folder, or behind a URL, which servers take.

    FOLDER/weight_v000001    all weights: a Hugging Face folder
    FOLDER/weight_v000002    a patch: what changed since version 1

A patch holds the changes of tensors as `weight_changes` has them, and is laid out as slime writes it and SGLang's
`/pull_weights` reads it:

- `model.safetensors.index.json` says in its metadata `version`, `base_version`, and what ENCODING has;
- the tensors of its file are of bytes, each by its own name; those without a change are left out;
- the metadata of the file is the checksum of each tensor's new bytes.
"""

import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from weakref import WeakValueDictionary

import fsspec
import jax
import numpy as np
from safetensors.numpy import save_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.files import write_json
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.files.remote import is_url
from jaxrl_llm.models.files.safetensors import INDEX
from jaxrl_llm.models.files.weight_changes import ENCODING, apply, changes
from jaxrl_llm.models.model import Model, file_tensors, save_hf

VERSION = re.compile(r"weight_v(\d{6,})")
PATCH_FILE = "model-00001-of-00001.safetensors"


class PatchError(ConfigError):
    """A patch that does not go on the weights which are held: all weights have to be published."""


class ByteRange(NamedTuple):
    """The bytes of a tensor: in which file, from which byte on, how many."""

    file: Path
    start: int
    size: int


def publisher(folder: str) -> "Publisher":
    """The publisher of a folder or URL: one in a process, as training and evaluations publish there alike."""
    folder = folder.rstrip("/") if is_url(folder) else os.fspath(Path(folder).expanduser().absolute())
    found = _publishers.get(folder)
    if found is None:
        found = _publishers[folder] = Publisher(folder)
    return found


class Publisher:
    """Writes the versions of a policy's weights; the first process remembers what the newest is, in its type.

    metrics: of the newest, `weights/written_share`, its bytes over those of all weights; of a patch besides
    `weights/changed_share`, of the weights.
    """

    def __init__(self, folder: str):
        self.folder, self.metrics = folder, dict[str, float]()
        self._version = self._full_version = 0  # the newest, and the newest of all weights
        self._of: Any = None  # the net and the type that the bytes are of
        self._bytes: dict[str, np.ndarray] = {}  # of each tensor of the newest version

    def publish(self, model: Model, dtype: str, full_every: int, full: bool = False) -> str:
        """Writes the next version in the type `dtype`, or that of the parameters, and returns its path.

        The first version of a process, each `full_every`-th one and a `full` one hold all weights, and earlier versions
        are deleted then; the others are patches of the one before. A run that starts again goes on behind the versions
        that it finds. With several processes all must call.
        """
        first, base, plan = jax.process_index() == 0, self._version, None
        dtype = dtype or model.net.config.param_dtype
        with contextlib.ExitStack() as stack:
            with all_or_none():
                if first:
                    patches = base - self._full_version
                    full |= patches + 1 >= full_every or self._of != (model.net, dtype) or not self._bytes
                    home = self.folder
                    if is_url(home):
                        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrl_llm-"))
                    plan = full, max([base, *self._versions()]) + 1, home
            full, version, home = gather(plan)[0]
            written, metrics = Path(home) / f"weight_v{version:06d}", dict[str, float]()
            held, self._bytes = self._bytes, {}  # none, should anything fail: then the next has all weights
            if full:
                held.clear()  # let go before there is another
                save_hf(model, written, dtype)
                if first:
                    held = {name: np.fromfile(file, np.uint8, size, offset=start)
                            for name, (file, start, size) in _places(written).items()}  # fmt: skip
            else:
                with hf.replacing(written) as partial:
                    metrics["weights/changed_share"] = self._write_patch(partial, model, dtype, held, version, base)
            with all_or_none():
                if first:
                    size, total = sum(x.size for x in _places(written).values()), sum(x.size for x in held.values())
                    metrics["weights/written_share"] = size / total
                    self._finish(written, full, version)
        self._version, self._full_version = version, version if full else self._full_version
        self._of, self._bytes = (model.net, dtype), held
        self.metrics = gather(metrics)[0]
        return f"{self.folder}/{written.name}"

    def _versions(self) -> list[int]:
        """The numbers of the versions that are in the folder."""
        fs, root = fsspec.url_to_fs(self.folder)
        fs.invalidate_cache()  # fsspec keeps listings
        try:
            names = (path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False))
        except FileNotFoundError:
            return []
        return [int(match[1]) for match in map(VERSION.fullmatch, names) if match]

    def _write_patch(
        self, folder: Path, model: Model, dtype: str, held: dict[str, np.ndarray], version: int, base: int
    ) -> float:
        """Writes the patch from the bytes `held` to the model's, which take their place; the share that changed."""
        tensors = file_tensors(model, dtype)
        if jax.process_index() != 0:
            for _ in tensors:  # which all processes gather
                pass
            return 0.0
        arrays, checksums, numbers, changed = dict[str, np.ndarray](), dict[str, str](), 0, 0
        for change in changes(tensors, held):
            held[change.name] = change.new
            numbers, changed = numbers + change.numbers, changed + change.changed
            if change.changed:
                assert change.packed is not None
                arrays[change.name] = np.frombuffer(change.packed, np.uint8)
                checksums[change.name] = change.checksum
        if arrays:
            save_file(arrays, folder / PATCH_FILE, checksums)
        metadata = {"version": f"{version:06d}", "base_version": f"{base:06d}", **ENCODING}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict.fromkeys(arrays, PATCH_FILE)})
        return changed / numbers

    def _finish(self, written: Path, full: bool, version: int) -> None:
        """Uploads a version that belongs behind a URL, and deletes those before one of all weights."""
        fs, root = fsspec.url_to_fs(self.folder)
        if is_url(self.folder):
            fs.makedirs(f"{root}/{written.name}", exist_ok=True)
            files = [path for path in written.rglob("*") if path.is_file()]
            for path in sorted(files, key=lambda path: path.name == INDEX):  # it names the others
                fs.put_file(os.fspath(path), f"{root}/{written.name}/{path.relative_to(written).as_posix()}")
        if full:
            for old in self._versions():
                if old < version:
                    fs.rm(f"{root}/weight_v{old:06d}", recursive=True)


_publishers: WeakValueDictionary[str, Publisher] = WeakValueDictionary()


class LocalCheckpoint:
    """A copy of published weights on this machine, to which their patches are applied: what a server reads."""

    def __init__(self):
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._held: tuple[str, int] | None = None  # where the weights in it are from, and their version

    def take(self, path: str) -> str:
        """The folder of a model to read in place of `path`, a folder or URL: the path itself unless it is a version.

        Raises PatchError where it is a patch of other weights than those that were taken last, and ConfigError where it
        is encoded in another way.
        """
        source, _, name = path.rstrip("/").rpartition("/")
        if (match := VERSION.fullmatch(name)) is None:
            self._held = None
            return path
        fs, root = fsspec.url_to_fs(path)
        try:
            index = json.loads(fs.cat_file(f"{root}/{INDEX}"))
        except FileNotFoundError:  # all weights in one file
            index = {}
        metadata = index.get("metadata", {})
        if "delta_encoding" in metadata:
            if unknown := {key: metadata.get(key) for key, known in ENCODING.items() if metadata.get(key) != known}:
                raise ConfigError(f"{masked(path)} is a patch with {unknown}; what can be read is {ENCODING}")
            base = (source, int(metadata["base_version"]))
            if self._folder is None or self._held != base:
                holds = "no version" if self._held is None else f"version {self._held[1]} of {masked(self._held[0])}"
                raise PatchError(
                    f"{masked(path)} is a patch of version {base[1]}, but {holds} is held here: publish all weights"
                )
            self._held = None  # until it has been applied whole
            _apply(Path(self._folder.name), path, index["weight_map"])
        else:
            self.clear()  # before there is another: two might be too many
            self._folder = tempfile.TemporaryDirectory(prefix="jaxrl_llm-weights-")
            for file in fs.ls(root, detail=True):
                if file["type"] == "file":
                    fs.get_file(file["name"], f"{self._folder.name}/{file['name'].rpartition('/')[2]}")
        self._held = (source, int(match[1]))
        return self._folder.name

    def clear(self) -> None:
        """Deletes the copy."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = self._held = None


def _apply(folder: Path, path: str, weight_map: dict[str, str]) -> None:
    """Applies the patch at `path` to a model's folder; raises PatchError where it does not fit the weights there."""
    fs, root = fsspec.url_to_fs(path)
    places = _places(folder)
    try:
        for file in sorted(set(weight_map.values())):
            data = memoryview(fs.cat_file(f"{root}/{file}"))
            checksums, tensors = _header(io.BytesIO(data))
            if set(tensors) != {name for name, at in weight_map.items() if at == file}:
                raise ValueError(f"{file} has other tensors than its index names")
            found = []
            for name, (start, size) in tensors.items():
                held = np.memmap(places[name].file, np.uint8, "r+", places[name].start, (places[name].size,))
                found.append((name, data[start : start + size], checksums.get(name, ""), held))
            apply(found)
    except Exception as error:  # half of it may be applied
        raise PatchError(f"the patch {masked(path)} does not fit the weights that it names ({error})") from error


def _places(folder: Path) -> dict[str, ByteRange]:
    """The place of each tensor in the files of a model's folder."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            found |= {name: ByteRange(file, *place) for name, place in _header(stream)[1].items()}
    return found


def _header(stream: BinaryIO) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """The metadata of a safetensors file, and the first byte and the size of each tensor."""
    length = int.from_bytes(stream.read(8), "little")
    tensors = json.loads(stream.read(length))
    metadata = tensors.pop("__metadata__", {})
    ranges = {name: tensor["data_offsets"] for name, tensor in tensors.items()}
    return metadata, {name: (8 + length + first, end - first) for name, (first, end) in ranges.items()}
