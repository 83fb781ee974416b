"""Checkpoints in buckets; S3 is the one store that TensorStore can write to and Orbax has no path for.

Orbax gives paths of Google Cloud Storage to TensorStore's driver for it, and takes every other path for a local folder.
`reach_s3` puts `s3://` beside `gs://` where Orbax asks that question, so that both are written alike: arrays by
TensorStore, in parts, by every process, and a file at the end that says that the checkpoint is complete.

The variables of AWS name the store: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (MinIO, R2 and others that speak S3),
AWS_REGION or AWS_DEFAULT_REGION, and what the credentials are taken from.
"""

import importlib.util
import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from jaxrl_llm.config import ConfigError

PREFIX = "s3://"
DRIVERS = {"gs": "gcsfs", "s3": "s3fs"}


def check_store(path: str) -> None:
    """Makes Orbax ready for the store of `path`, and looks whether it answers.

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
    """What TensorStore calls the store of `s3://BUCKET/PATH`."""
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
    """Lets Orbax write to and read from `s3://` paths, from now on.

    Raises ConfigError when the installed Orbax asks elsewhere where a path leads.
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
