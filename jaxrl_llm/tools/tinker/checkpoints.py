"""The folder that training runs are saved in: `RUN/weights/NAME` to go on from, `RUN/sampler_weights/NAME` to sample,
`RUN/external_weights/NAME` for other libraries.

Each is an adapter folder of PEFT or, of a run of all weights, a model folder of Hugging Face, which every library
loads, with `checkpoint.json` in it and, of `weights`, the optimizer's moments. Clients name them
`tinker://RUN/weights/NAME`.
"""

import datetime
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.files import read_json, write_json
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.adapters.peft import is_adapter
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import Model, load_adapter, save_adapter, save_hf
from jaxrl_llm.models.net import Params
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker.training_run import Moments, TrainingRun

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:\-]{0,255}")
INFO, MOMENTS = "checkpoint.json", "moments"  # a folder: vLLM reads every file of tensors beside config.json


class Place(NamedTuple):
    """The run, the kind and the name of a checkpoint, which its path names."""

    run: str
    kind: str
    name: str

    @property
    def path(self) -> str:
        """The path of the checkpoint as clients write it, `tinker://RUN/KIND/NAME`."""
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


def place_of(path: Any) -> Place:
    """The place of `tinker://RUN/weights/NAME`. Raises BadRequestError."""
    parts = path.removeprefix(SCHEME).split("/") if isinstance(path, str) and path.startswith(SCHEME) else []
    if len(parts) != 3 or not RUN.fullmatch(parts[0]) or parts[1] not in KINDS or not NAME.fullmatch(parts[2]):
        raise BadRequestError(
            f"path is {path!r:.200}; it takes {SCHEME}RUN/weights/NAME or another of {', '.join(KINDS)}"
        )
    return Place(*parts)


class Store:
    """The checkpoints in a folder, `ROOT/RUN/KIND/NAME`, which one server at a time writes."""

    def __init__(self, root: Path, check: Callable[[], None] | None = None):
        """Deletes what a server that was killed left half written, and brings back what it had moved away for that.

        `check` is called before anything is saved, and raises where the folder is another server's by now.
        """
        self.root, self._check = root, check or (lambda: None)
        for left in list(root.glob("*/*/.*")):
            hf.put_right(left.with_name(left.stem.removeprefix(".")))

    def _folder(self, place: Place) -> Path:
        return self.root.joinpath(*place)

    def _read(self, place: Place) -> dict[str, Any] | None:
        """The entries beside a checkpoint, None where there is none; one whose time is over is deleted."""
        found = read_json(self._folder(place) / INFO)
        ends = None if found is None else found.get("expires_at")
        if ends is None or datetime.datetime.fromisoformat(ends) > _now():
            return found
        shutil.rmtree(self._folder(place), ignore_errors=True)
        return None

    def save(self, place: Place, run: TrainingRun, info: dict[str, Any], overwrite: bool = False) -> str:
        """Writes what a run trains and, of `weights`, its moments; complete or not at all. Returns the time of it.

        Raises BadRequestError for a name that is taken.
        """
        self._check()
        if not NAME.fullmatch(place.name):
            raise BadRequestError(f"the name of weights is {place.name!r:.200}; it takes letters, digits and _ . -")
        folder = self._folder(place)
        if self._read(place) is not None and not overwrite:
            raise BadRequestError(f"{place.path} exists already; give another name, or overwrite=True")
        time = _now().isoformat()
        with hf.replacing(folder) as partial:
            if run.config is not None:
                save_adapter(run.whole(), partial)
            else:  # in fp32, as they are trained and sampled from; elsewhere in the type that the model came in
                external, entries = place.kind == "external_weights", run.model.hf_config or {}
                save_hf(run.whole(), partial, entries.get("dtype", entries.get("torch_dtype")) if external else None)
            if place.kind == "weights":
                (partial / MOMENTS).mkdir()
                for file, name, x in _moments(partial, run.adam):  # one at a time, as they are twice the weights
                    save_file({name: np.asarray(x)}, file)
            write_json(partial / INFO, {"time": time, **info})
        return time

    def load(self, path: Any, base: Model, moments: bool = False) -> tuple[LoraConfig | None, Params, Moments | None]:
        """The adapters that `path` names, or with None all weights that are trained, in fp32; and, where they are asked
        for, the optimizer's moments.

        Raises BadRequestError where there are none, or others meanwhile, and ConfigError for those of another model.
        """
        written = self.info(path)["time"]
        folder = self._folder(place_of(path))
        if moments and not (folder / MOMENTS).is_dir():
            raise BadRequestError(
                f"{path} was saved to sample from, and has no optimizer state; load its weights alone"
            )
        if is_adapter(folder):
            config, weights = load_adapter(base, folder)
        else:
            config, own = None, base.net.config
            if hf.load_net(folder, dtype=own.dtype, param_dtype=own.param_dtype).shapes() != base.net.shapes():
                raise ConfigError(f"{path} is another network than {base.path}")
            _, params = hf.load(folder, base.mesh, own.dtype, "float32")
            _, weights = lora.split(params, own.frozen)
        adam = None
        if moments:
            like, leaves = Moments(np.zeros((), np.int32), weights, weights), []
            for file, name, x in _moments(folder, like):
                stored = load_file(file)[name]
                leaves.append(jax.device_put(stored, x.sharding) if isinstance(x, jax.Array) else stored)
            adam = jax.tree.unflatten(jax.tree.structure(like), leaves)
        if self.info(path)["time"] != written:
            raise BadRequestError(f"{path} was written over while it was read; load it again")
        return config, weights, adam

    def info(self, path: Any) -> dict[str, Any]:
        """The entries beside a checkpoint. Raises BadRequestError where there is none."""
        found = self._read(place_of(path))
        if found is None:
            raise BadRequestError(f"there are no weights {path}", 404)
        return found

    def files(self, path: Any) -> dict[str, Path]:
        """The files of a checkpoint by their names in its folder. Raises BadRequestError where there is none."""
        self.info(path)
        folder = self._folder(place_of(path))
        found = (file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / INFO)
        return {file.relative_to(folder).as_posix(): file for file in found}

    def set_expiry(self, path: Any, ends: str | None) -> None:
        """Let a checkpoint end at another time, or never. Raises BadRequestError where there is none."""
        info, file = self.info(path), self._folder(place_of(path)) / INFO
        write_json(file, {**info, "expires_at": ends})

    def delete(self, path: Any) -> None:
        """Deletes a checkpoint. Raises BadRequestError where there is none."""
        self.info(path)
        shutil.rmtree(self._folder(place_of(path)))

    def all(self, run: str = "") -> list[tuple[Place, dict[str, Any]]]:
        """All checkpoints of a run, or of all, with what was written beside them; the newest one last.

        Those whose time is over are deleted.
        """
        places = (Place(*file.parent.relative_to(self.root).parts) for file in self.root.glob(f"*/*/*/{INFO}"))
        wanted = (place for place in places if NAME.fullmatch(place.name) and run in ("", place.run))
        found = [(place, info) for place in wanted if (info := self._read(place)) is not None]
        return sorted(found, key=lambda each: each[1]["time"])

    def shown(self, place: Place, info: dict[str, Any]) -> dict[str, Any]:
        """The facts of a checkpoint that clients are given, by the names of Tinker's API."""
        size = sum(file.stat().st_size for file in self._folder(place).rglob("*") if file.is_file())
        return {
            "checkpoint_id": f"{place.kind}/{place.name}", "checkpoint_type": KINDS[place.kind], "time": info["time"],
            "tinker_path": place.path, "size_bytes": size, "public": False,
            "user_metadata": info.get("user_metadata"), "expires_at": info.get("expires_at"),
        }  # fmt: skip


def expiry(seconds: Any) -> str | None:
    """The time at which a checkpoint ends, of `ttl_seconds`. Raises BadRequestError."""
    if seconds is None:
        return None
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not 1 <= seconds < 2**31:
        raise BadRequestError(f"ttl_seconds is {seconds!r:.100}; it takes seconds, up to {2**31 - 1}, or none")
    return (_now() + datetime.timedelta(seconds=seconds)).isoformat()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _moments(folder: Path, adam: Moments) -> Iterator[tuple[Path, str, jax.Array]]:
    """The file of each array of the moments, its name there, and the array."""
    for number, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(adam)):
        yield folder / MOMENTS / f"{number:04d}.safetensors", path_name(path), x
