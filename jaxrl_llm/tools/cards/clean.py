"""Settings that may be published: without secrets, and without the folders of the machine they come from."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.secrets import HIDDEN

# An option's name that says its value is a secret: `token`, `api_key`, `hub_token`, but not `max_new_tokens`.
SECRET = r"(?:\w+_)?(?:token|secret|password|passwd|passphrase|credentials?|api_?key|access_?key|private_?key)"
_ASSIGNED = re.compile(rf"\b({SECRET})(\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,)&]+)", re.IGNORECASE)
_NAMED = re.compile(SECRET, re.IGNORECASE)
# The forms of keys that services give out.
_KEYS = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|glpat-|xox[abprs]-|AKIA|AIza|wandb_v1_)[\w-]{8,}|\beyJ[\w-]{10,}\.[\w.-]+")
_USER = re.compile(r"://[^/@\s'\"]+@")
_QUERY = re.compile(r"(\w+://[^\s?'\"]+)\?[^\s'\")]+")
_LETTERS = r"[^\s'\",:;()\[\]{}=/]"
_PATH = re.compile(rf"(?<![\w:/.~*-])(?:~{_LETTERS}*|[A-Za-z]:)?/+(?:{_LETTERS}+/+)*({_LETTERS}+)/*")


def shareable(text: str) -> str:
    """The text without anything that looks like a secret, and with only the last part of absolute paths and those from
    home.

    Secrets are values of options named like one, keys as services write them, user names and queries of addresses.
    """
    text = _USER.sub(f"://{HIDDEN}@", _KEYS.sub(HIDDEN, text))
    text = _ASSIGNED.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}", _QUERY.sub(r"\1", text))
    home = str(Path.home())
    return _PATH.sub(r"\1", text.replace(home, "~") if len(home) > 1 else text)


def shareable_value(value: Any) -> Any:
    """The value of a setting with every text in it `shareable`, and the values of secret names in dictionaries
    hidden."""
    if isinstance(value, str):
        return shareable(value)
    if isinstance(value, Mapping):
        hidden = {name: bool(_NAMED.fullmatch(str(name))) for name in value}
        return {name: HIDDEN if hidden[name] else shareable_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shareable_value(item) for item in value]
    return value


def in_words(value: Any) -> str:
    """The `shareable_value` of a setting, in one line."""
    value = shareable_value(value)
    if isinstance(value, list):
        return ", ".join(item if isinstance(item, str) else json.dumps(item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)
