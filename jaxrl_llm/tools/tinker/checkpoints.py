"""The folder that training runs are saved in: `RUN/weights/NAME` to go on from, `RUN/sampler_weights/NAME` to sample.

Each is an adapter folder of PEFT, which every library loads, with `checkpoint.json` in it and, of `weights`, the
optimizer's moments. Clients name them `tinker://RUN/weights/NAME`.
"""

import datetime
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.hf import replacing
from jaxrl_llm.models.lora import LoraConfig
from jaxrl_llm.models.model import Model, load_adapter, save_adapter
from jaxrl_llm.models.safetensors import read_json, write_json
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker.training_run import Moments, TrainingRun, fresh_moments

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:\-]{0,255}")
INFO, MOMENTS = "checkpoint.json", "moments.safetensors"


class Place(NamedTuple):
    """Which checkpoint a path names."""

    run: str
    kind: str
    name: str

    @property
    def path(self) -> str:
        """As clients write it."""
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


def place_of(path: Any) -> Place:
    """The place of `tinker://RUN/weights/NAME`. Raises BadRequestError."""
    parts = path.removeprefix(SCHEME).split("/") if isinstance(path, str) and path.startswith(SCHEME) else []
    if len(parts) != 3 or not RUN.fullmatch(parts[0]) or parts[1] not in KINDS or not NAME.fullmatch(parts[2]):
        raise BadRequestError(
            f"path is {path!r:.200}; it takes {SCHEME}RUN/weights/NAME or {SCHEME}RUN/sampler_weights/NAME"
        )
    return Place(*parts)


class Store:
    """Checkpoints in a folder."""

    def __init__(self, root: Path):
        self.root = root

    def _folder(self, place: Place) -> Path:
        return self.root.joinpath(*place)

    def _read(self, place: Place) -> dict[str, Any] | None:
        """What was written beside a checkpoint, None where there is none; one whose time is over is deleted."""
        found = read_json(self._folder(place) / INFO)
        ends = None if found is None else found.get("expires_at")
        if ends is None or datetime.datetime.fromisoformat(ends) > _now():
            return found
        shutil.rmtree(self._folder(place), ignore_errors=True)
        return None

    def save(self, place: Place, run: TrainingRun, info: dict[str, Any], overwrite: bool = False) -> str:
        """Writes a run's adapters and, of `weights`, its moments; complete or not at all. Returns the time of it.

        Raises BadRequestError for a name that is taken.
        """
        if not NAME.fullmatch(place.name):
            raise BadRequestError(f"the name of weights is {place.name!r:.200}; it takes letters, digits and _ . -")
        folder = self._folder(place)
        if self._read(place) is not None and not overwrite:
            raise BadRequestError(f"{place.path} exists already; give another name, or overwrite=True")
        time = _now().isoformat()
        with replacing(folder) as partial:
            save_adapter(run.whole(), partial)
            if place.kind == "weights":
                save_file({name: np.asarray(x) for name, x in _named(run.adam)}, partial / MOMENTS)
            write_json(partial / INFO, {"time": time, **info})
        return time

    def load(self, path: Any, base: Model, moments: bool = False) -> tuple[LoraConfig, Params, Moments | None]:
        """The adapters that `path` names and, where they are asked for, the optimizer's moments.

        Raises BadRequestError where there are none, and ConfigError for those of another model.
        """
        self.info(path)
        folder = self._folder(place_of(path))
        config, adapters = load_adapter(base, folder)
        if not moments:
            return config, adapters, None
        if not (folder / MOMENTS).is_file():
            raise BadRequestError(
                f"{path} was saved to sample from, and has no optimizer state; load its weights alone"
            )
        stored, empty = load_file(folder / MOMENTS), fresh_moments(adapters)
        leaves = [
            jax.device_put(stored[name], x.sharding) if isinstance(x, jax.Array) else stored[name]
            for name, x in _named(empty)
        ]
        return config, adapters, jax.tree.unflatten(jax.tree.structure(empty), leaves)

    def info(self, path: Any) -> dict[str, Any]:
        """What was written beside a checkpoint. Raises BadRequestError where there is none."""
        found = self._read(place_of(path))
        if found is None:
            raise BadRequestError(f"there are no weights {path}", 404)
        return found

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
        """A checkpoint as clients read it."""
        size = sum(file.stat().st_size for file in self._folder(place).iterdir())
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


def _named(adam: Moments) -> list[tuple[str, jax.Array]]:
    return [(path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(adam)]
