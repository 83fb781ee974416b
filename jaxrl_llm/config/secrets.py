"""Texts without the secrets of addresses, for files, logs and messages."""

import re
from typing import Any

HIDDEN = "***"
# Whatever stands before the @ of an address, and the values of parameters that are named like secrets.
_USER = re.compile(r"(://)[^/\s'\"<>]*@")
_PARAMETER = re.compile(
    r"([?&;][\w.-]*(?:key|token|secret|password|passwd|pwd|auth|signature|sig|credential|code)[\w.-]*=)[^&;\s'\"#<>]+",
    re.IGNORECASE,
)


def masked(value: Any) -> Any:
    """A text, or texts in lists and dictionaries, with `***` for user and password in `scheme://user:password@host`,
    and for the values of `?key=...`, `&access_token=...` and the like."""
    if isinstance(value, str):
        return _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", value)) if "://" in value else value
    if isinstance(value, dict):
        return {key: masked(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(masked(each) for each in value)
    return value
