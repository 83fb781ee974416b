"""The folder of a run: the checks before anything is written to it, and the export of the trained model."""

import contextlib
import itertools
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from safetensors import SafetensorError

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.files import read_json, write_json
from jaxrl_llm.config.resuming import way_on
from jaxrl_llm.config.schema import NEW
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.config.wording import amount
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.processes import AgreedError
from jaxrl_llm.models.adapters import peft
from jaxrl_llm.models.adapters.lora import has_adapters
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.files.safetensors import by_the_first
from jaxrl_llm.models.model import Model, has_peft_adapter, save_adapter, save_hf

GIVEN = "given.json"
SHOWN_SECONDS = 10.0  # within which a file system of several machines shows each what another has written
AVERAGE = "average"  # the folder of the averaged model
UNWRITTEN = (OSError, SafetensorError, AgreedError)  # raised for a model that cannot be written


def numbered(output_dir: str) -> str:
    """The folder whose name has the first free number, from 1, in place of `{new}`: it is made, so that no other run
    takes it. Without `{new}` it is `output_dir`.

    All processes must call it, and get the same. Raises ConfigError when the folder cannot be made.
    """
    if NEW not in output_dir:
        return output_dir
    taken = None
    with processes.all_or_none():
        if jax.process_index() == 0:
            try:
                Path(output_dir).parent.mkdir(parents=True, exist_ok=True)
                for number in itertools.count(1):
                    with contextlib.suppress(FileExistsError):
                        taken = output_dir.replace(NEW, str(number))
                        Path(taken).mkdir()
                        break
            except OSError as error:
                raise ConfigError(f"output_dir {output_dir} cannot be made: {error}; set another") from error
    return processes.gather(taken)[0]


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises ConfigError where the block cannot write a file of a run to its folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be written: {error}; make room, or set another") from error


def check_writable(folder: Path) -> None:
    """Makes the folder of a run; raises ConfigError when nothing can be written to it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))


def check_shared(folder: Path) -> None:
    """Raises AgreedError, in all processes, where `folder` is another one for some of them than for process 0."""
    if jax.process_count() == 1:
        return
    sign = folder / f".seen_by_all.{processes.gather(uuid.uuid4().hex)[0]}"
    if jax.process_index() == 0:
        with contextlib.suppress(OSError):  # `Checkpoints` says why nothing can be written there
            folder.mkdir(parents=True, exist_ok=True)
            sign.touch()
    until = time.monotonic() + SHOWN_SECONDS
    written = processes.gather(sign.exists())[0]
    with contextlib.suppress(OSError):  # NFS forgets by this that the folder was not there, else after a minute
        folder.mkdir(parents=True, exist_ok=True)
    while written and not sign.exists() and time.monotonic() < until:
        time.sleep(0.2)
    seen = processes.gather([sign.exists(), socket.gethostname()])
    if jax.process_index() == 0:
        sign.unlink(missing_ok=True)
    for index, (sees, host) in enumerate(seen):
        if written and not sees:
            raise processes.AgreedError(
                f"what process 0 ({seen[0][1]}) writes to {folder} is not there for process {index} ({host}): all "
                "write their share of a checkpoint. Set output_dir, or checkpoint.folder, to a folder that all "
                "machines share, or checkpoint.folder to a bucket"
            )


def check_outputs(folder: Path, resume: str, goes_on: bool) -> None:
    """Raises ConfigError when the trained models would take the place of files that are not the run's own.

    A run may replace the models in `folder` when it `goes_on` from its own checkpoints, and when `resume`
    (checkpoint.resume) is never.
    """
    models = dict.fromkeys(("hf", hf.CRITIC, AVERAGE), "config.json")
    for name, sign in (models | {"adapter": peft.CONFIG}).items():
        hf.refuse_foreign(folder / name, sign)
    held = "a trained model (hf/)" if (folder / "hf" / "config.json").is_file() else None
    held = held or (f"models of steps ({hf.STEPS}/)" if hf.step_folders(folder) else None)
    if held is not None and not goes_on and resume != "never":
        raise ConfigError(
            f"{folder} holds {held}, and no checkpoint that this run goes on from: choose another output_dir, or "
            "replace what is there with checkpoint.resume=never"
        )


def given_in_words(given: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of `train` that replace names in its configuration, in words."""
    return {
        name: _words(value)
        for name, value in given.items()
        if value is not None and not (isinstance(value, tuple | list) and not value)
    }


def write_given(folder: Path, words: Mapping[str, str]) -> None:
    """Writes given.json: the arguments of `train` that replace names in its configuration, in words."""
    if words:
        write_json(folder / GIVEN, words)
    else:
        (folder / GIVEN).unlink(missing_ok=True)


def given_to(run: Path) -> dict[str, str]:
    """The content of given.json in a run's folder, or nothing without that file; raises ConfigError for no JSON."""
    return read_json(run / GIVEN) or {}


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Model):
        return f"{masked(value.path) or 'a model'}, in memory"
    if isinstance(value, optax.GradientTransformation):
        return "an optimizer of optax"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if isinstance(value, Mapping):
        return ", ".join(map(str, value))
    if isinstance(value, tuple | list) and not isinstance(value[0], Mapping):
        return ", ".join(map(_words, value))
    return f"{amount(len(value), 'row')} in memory" if hasattr(value, "__len__") else type(value).__name__


def discard_exports(folder: Path, step: int | None) -> None:
    """Deletes the models of steps after `step` in `folder/hf_steps`, of all when it is None, as a run starts there.

    A line on standard error says so before it happens. Raises ConfigError when one cannot be deleted.
    """
    for remains in [*(folder / hf.STEPS).glob(".*-*")]:
        hf.put_right(remains.with_name(remains.name.split(".")[1]))
    later = {number: path for number, path in hf.step_folders(folder).items() if step is None or number > step}
    if not later:
        return
    print(
        f"warning: deleting the models of steps {', '.join(map(str, later))} in {folder / hf.STEPS}, as the run starts "
        f"{'anew' if step is None else f'after step {step}'}: in another output_dir they stay",
        file=sys.stderr,
        flush=True,
    )
    try:
        for path in later.values():
            shutil.rmtree(path)
    except OSError as error:
        raise ConfigError(f"an abandoned model cannot be deleted: {error}; do so, or set another output_dir") from error


def export_step(folder: Path, step: int, model: Model, critic: Model | None, keep: int) -> Path:
    """The folder `folder/hf_steps/STEP`, to which the model of a step is written; of others the `keep` - 1 newest stay.

    The critic goes to `critic` in it. Raises ConfigError when it cannot be written.
    """
    written = folder / hf.STEPS / f"{step:05d}"
    try:
        if jax.process_index() == 0:
            shutil.rmtree(written / hf.CRITIC, ignore_errors=True)  # which a model does not replace
        save_hf(model, written, overwrite=True)
        if critic is not None:
            save_hf(critic, written / hf.CRITIC, overwrite=True)
        with by_the_first():
            others = [path for path in hf.step_folders(folder).values() if path != written]
            for old in others[: max(0, len(others) + 1 - keep)] if jax.process_index() == 0 else ():
                shutil.rmtree(old)
    except UNWRITTEN as error:
        text = f"the model of step {step} could not be written to {written.parent}: {error}; make room"
        raise _as(error, text) from error
    return written


def export_run(
    folder: Path,
    saved: Callable[[], str],
    model: Model,
    critic: Model | None,
    note: Callable[[str], None],
    averaged: Model | None = None,
) -> None:
    """Writes the trained model to `folder/hf`, its adapters to `folder/adapter`, the critic to `folder/critic` and
    `averaged`, the model with averaged parameters, to `folder/average`.

    `saved` says which checkpoint an error can point to, `note` shows a line. Raises ConfigError when a folder cannot be
    written.
    """
    try:
        save_hf(model, folder / "hf", overwrite=True)
        if has_peft_adapter(model):
            save_adapter(model, folder / "adapter")
            if model.changed:
                note("adapter/ names no base model, for it was given in memory or drawn at random; hf/ is whole")
        elif has_adapters(model.params):
            note("hf/ has the adapters merged; this family's fused tensors leave no PEFT folder")
        if critic is not None:
            save_hf(critic, folder / hf.CRITIC, overwrite=True)
        if averaged is not None:
            save_hf(averaged, folder / AVERAGE, overwrite=True)
    except UNWRITTEN as error:
        told = f"the trained model could not be written to {folder}: {error}; {saved()}; when there is room {way_on()}"
        raise _as(error, told) from error


def _as(error: Exception, text: str) -> ConfigError:
    """The error in other words; one that all processes raise stays one."""
    return AgreedError(text) if isinstance(error, AgreedError) else ConfigError(text)
