"""Paths of checkpoints, local or in an object store; Orbax has no paths for S3, so this module adds them.

Orbax gives paths of Google Cloud Storage to TensorStore's driver for it, and takes every other path for a local folder.
`reach_s3` adds `s3://` to the places where Orbax recognises `gs://`, so that both are written alike: arrays by
TensorStore, in pieces, by every process, and a last file that marks the checkpoint as complete.

AWS's variables name the store: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (MinIO, R2 and others that speak S3),
AWS_REGION or AWS_DEFAULT_REGION, and those of the credentials.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

from etils import epath

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.orbax import ocp

PREFIX = "s3://"
DRIVERS = {"gs": "gcsfs", "s3": "s3fs"}


def path_of(folder: str | Path) -> Any:
    """The absolute path of a folder, local or in an object store.

    Raises ConfigError for a store that cannot be reached with the installed packages.
    """
    if not is_remote(folder):
        return Path(folder).expanduser().absolute()
    check_store(str(folder))
    return epath.Path(folder)


def is_remote(folder: Any) -> bool:
    """True for gs://, s3:// and the like."""
    return "://" in str(folder)


def check_store(path: str) -> None:
    """Prepares Orbax for the store of `path`, and checks that it answers.

    Raises ConfigError when it does not, is no such store, or its package is not installed.
    """
    kind = path.partition("://")[0]
    if kind not in DRIVERS:
        raise ConfigError(f"checkpoints cannot be in {path}; give a folder, gs:// or s3://")
    if importlib.util.find_spec(DRIVERS[kind]) is None:
        raise ConfigError(f"checkpoints in {path} need {DRIVERS[kind]}: pip install {DRIVERS[kind]}")
    if kind == "s3":
        reach_s3()
    try:
        epath.Path(path).exists()
    except Exception as error:  # each store has a family of errors of its own
        raise ConfigError(f"checkpoints cannot be in {path}, which does not answer: {error}") from error


def s3_store(path: str) -> dict[str, Any]:
    """TensorStore's description of the store of `s3://BUCKET/PATH`."""
    bucket, _, key = path.removeprefix(PREFIX).partition("/")
    store: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": key}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        store |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    elif region:
        store |= {"aws_region": region}
    return store


def reach_s3() -> None:
    """Makes Orbax write to and read from `s3://` paths.

    Raises ConfigError when the installed Orbax recognises paths in other places.
    """
    try:
        from orbax.checkpoint._src.path import gcs_utils
        from orbax.checkpoint._src.serialization import tensorstore_utils

        prefixes, gcs_store = gcs_utils._GCS_PATH_PREFIX, gcs_utils.get_kvstore_for_gcs
        normal, remote = tensorstore_utils._normalize_path, tensorstore_utils._use_gcs_driver
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"orbax-checkpoint {ocp.__version__} cannot be taught s3:// ({error}); mount the bucket and give its "
            "folder as checkpoint.folder, or install orbax-checkpoint 0.12"
        ) from error
    if PREFIX in prefixes:
        return
    gcs_utils._GCS_PATH_PREFIX = (*prefixes, PREFIX)
    gcs_utils.get_kvstore_for_gcs = lambda path: s3_store(path) if path.startswith(PREFIX) else gcs_store(path)
    tensorstore_utils._normalize_path = lambda path: normal(path).replace("s3:/", PREFIX, 1)
    tensorstore_utils._use_gcs_driver = lambda path: path.startswith(PREFIX) or remote(path)
