"""Sending an exported folder to the Hugging Face hub, in one commit: a repository never holds half of a model.

The token is that of the variable HF_TOKEN, and nothing shows or keeps it.
"""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.config import ConfigDict, ConfigError
from jaxrl_llm.config.files import read_json, write_json
from jaxrl_llm.config.secrets import HIDDEN
from jaxrl_llm.config.version import __version__
from jaxrl_llm.distributed.processes import all_or_none
from jaxrl_llm.models.files.hf import CRITIC, EXPORTED

PUSHED = "pushed.json"  # in the folder of a run: the commit that it has pushed to each repository
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True for the name of a file that one of the patterns describes."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def check(repo: str, private: bool = False, overwrite: bool = False, record: Path | None = None) -> None:
    """Asks the hub whether a model may be pushed to `repo`; creates nothing.

    One whose newest commit is in the file `record`, a run's PUSHED, may be replaced by that run.

    Raises ConfigError: no HF_TOKEN, one that the hub does not know or that may not write there, a hub that cannot be
    reached, a repository that holds a model already (unless `overwrite`), or one that is public where `private` is
    asked for.
    """
    api, repo = _api(), named(repo)
    with _explaining(repo):
        me = api.whoami()
    owner = repo.partition("/")[0]
    owners = [me["name"], *(each["name"] for each in me.get("orgs") or ())]
    if owner not in owners:
        raise ConfigError(
            f"cannot push to {repo}: the token in HF_TOKEN is of {me['name']}, who is not part of {owner}"
        )
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ConfigError(f"cannot push to {repo}: the token in HF_TOKEN may only read; make one that may write")
    _files_there(api, repo, private, overwrite, record)


def push(
    folder: str | Path,
    repo: str,
    private: bool = False,
    overwrite: bool = False,
    message: str = "",
    record: Path | None = None,
) -> str:
    """The address of the repository on the hub, after the files of `folder` have become its newest commit.

    A new repository is made, for you alone with `private`. With `overwrite` the model of an existing one is replaced:
    the new commit keeps its other files, and older commits keep all. A critic in `folder` is left out. The commit is
    noted in `record`, and the one that is there may be replaced, as `check` says. Raises ConfigError as `check` does,
    for a folder without weights, and when the hub refuses: then the repository is as it was.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api, folder, repo = _api(), Path(folder), named(repo)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(folder / CRITIC))
    if not any(matches(path.name, WEIGHTS) for path in paths):
        raise ConfigError(f"cannot push to {repo}: {folder} holds no weights ({', '.join(WEIGHTS)})")
    there = _files_there(api, repo, private, overwrite, record)
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    old = [name for name in there or () if name not in files and matches(name, (*EXPORTED, *WEIGHTS))]
    operations: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    operations += [CommitOperationDelete(name) for name in old]
    with _explaining(repo):
        if there is None:
            api.create_repo(repo, private=private, exist_ok=True)
        commit = api.create_commit(repo, operations, commit_message=message or f"Model of jaxrl_llm {__version__}")
    if record is not None:
        write_json(record, {**_recorded(record), repo: commit.oid})
    return f"{api.endpoint}/{repo}"


def named(repo: str) -> str:
    """OWNER/NAME of a repository: one without an owner is of the token's account. Raises ConfigError as `check`."""
    return repo if "/" in repo else f"{_account(_token(), repo)}/{repo}"


@functools.cache  # asked at the start of a run, for its end
def _account(token: str, repo: str) -> str:
    with _explaining(repo):
        return _api().whoami()["name"]


def check_push(config: ConfigDict) -> None:
    """`check` for `export.push_to_hub`, where that is set; all processes raise what the first finds.

    A run that starts anew (checkpoint.resume is never) has pushed nothing.
    """
    export, record = config.export, Path(config.output_dir) / PUSHED
    if export.push_to_hub is not None:
        with all_or_none():
            if jax.process_index() == 0:
                if config.checkpoint.resume == "never":
                    record.unlink(missing_ok=True)
                check(export.push_to_hub, export.private, export.overwrite, record)


def push_run(config: ConfigDict) -> None:
    """Pushes the folder hf of the run to `export.push_to_hub`, where that is set; raises ConfigError when it fails."""
    folder, repo, export = Path(config.output_dir), config.export.push_to_hub, config.export
    if repo is None:
        return
    with all_or_none():
        if jax.process_index() == 0:
            try:
                url = push(folder / "hf", repo, export.private, export.overwrite, record=folder / PUSHED)
                print(f"pushed to {url}")
            except ConfigError as error:
                raise ConfigError(
                    f"{error}. The run is complete, and its model is in {folder / 'hf'}; push it with python -m "
                    f"jaxrl_llm export --run={folder} --push_to_hub={repo}"
                ) from error


def push_step(config: ConfigDict, folder: Path, step: int) -> str | None:
    """Push the model of a step, from the first process; returns the error in words, None without one.

    The run goes on all the same: its model is in `folder`, and a later push takes the place of this one.
    """
    export = config.export
    if jax.process_index():
        return None
    try:
        push(folder, export.push_to_hub, export.private, export.overwrite, f"Step {step}")
    except ConfigError as error:
        return f"the model of step {step} was not pushed: {error}; it is in {folder}"
    return None


def _api() -> Any:
    token = _token()
    from huggingface_hub import HfApi  # slow to import

    return HfApi(token=token, library_name="jaxrl_llm", library_version=__version__)


def _token() -> str:
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        raise ConfigError(
            "pushing to the hub needs a token that may write in the variable HF_TOKEN; make one at "
            "https://huggingface.co/settings/tokens"
        )
    return token


def _recorded(record: Path | None) -> dict[str, str]:
    """The commits in the record of a run, by repository; none where there is no record that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return (record and read_json(record)) or {}
    return {}


def _files_there(api: Any, repo: str, private: bool, overwrite: bool, record: Path | None) -> list[str] | None:
    """The files of the repository, None where there is none; raises ConfigError where none may be pushed to it."""
    from huggingface_hub.errors import RepositoryNotFoundError

    with _explaining(repo):
        try:
            info = api.repo_info(repo)
        except RepositoryNotFoundError as error:
            if error.response.status_code == 401:
                raise
            return None
    names = [file.rfilename for file in info.siblings or ()]
    if private and not info.private:
        raise ConfigError(
            f"cannot push to {repo}: it is public, and the model is to be private; change that on the hub"
        )
    held = [name for name in names if matches(name, WEIGHTS)]
    if held and not overwrite and _recorded(record).get(repo) != info.sha:
        raise ConfigError(
            f"{repo} holds a model already ({held[0]}): push to another repository, or replace it with --overwrite "
            "(export.overwrite at the end of a run); its older commits keep it"
        )
    return names


@contextlib.contextmanager
def _explaining(repo: str) -> Iterator[None]:
    """Turns errors of the hub and of the way there into a ConfigError that says what to do."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ConfigError(f"cannot push to {repo}: the variable HF_HUB_OFFLINE keeps the hub away; unset it") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = {
            401: "the hub does not know the token in HF_TOKEN",
            403: "the token in HF_TOKEN may not write there",
        }.get(status, f"the hub answered {status}")
        words = _first_line(error.server_message or "")
        raise ConfigError(f"cannot push to {repo}: {said}{f' ({words})' if words else ''}") from error
    except Exception as error:
        words = f"{type(error).__name__}: {_first_line(str(error))}"
        raise ConfigError(f"cannot push to {repo}: the hub could not be reached, or broke off ({words})") from error


def _first_line(text: str) -> str:
    """The first line of a message, without the token."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    token = os.environ.get("HF_TOKEN", "").strip()
    return line.replace(token, HIDDEN) if token else line
