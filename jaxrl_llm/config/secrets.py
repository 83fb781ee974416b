"""Texts without the secrets of addresses, for files, logs and messages."""

import re
from typing import Any

HIDDEN = "***"
# Whatever stands before the @ of an address, and the values of parameters that are named like secrets. Alone it is no
# secret in the addresses of these stores: a container, or a user.
_USER = re.compile(r"([\w+.-]*)://([^/\s'\"<>]*)@")
NAMED = ("abfs", "abfss", "wasb", "wasbs", "hdfs", "webhdfs", "sftp", "ssh", "smb", "ftp")
_PARAMETER = re.compile(
    r"([?&;][\w.-]*(?:key|token|secret|password|passwd|pwd|auth|signature|sig|credential|code)[\w.-]*=)[^&;\s'\"#<>]+",
    re.IGNORECASE,
)


def _without_user(found: re.Match[str]) -> str:
    scheme, user = found.groups()
    return found[0] if scheme.lower() in NAMED and ":" not in user else f"{scheme}://{HIDDEN}@"


def masked(value: Any) -> Any:
    """A text, or texts in lists and dictionaries, with `***` for user and password in `scheme://user:password@host`,
    and for the values of `?key=...`, `&access_token=...` and the like."""
    if isinstance(value, str):
        return _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(_without_user, value)) if "://" in value else value
    if isinstance(value, dict):
        return {key: masked(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(masked(each) for each in value)
    return value
