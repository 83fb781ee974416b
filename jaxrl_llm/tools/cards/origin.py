"""The origin of a model, as far as this machine knows it: the base's public name and licence, and public data sets."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.data.opening import source_options
from jaxrl_llm.models.files.hf import EMBEDDED
from jaxrl_llm.models.files.remote import fetched, is_url

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
LICENSE_KEYS = ("license", "license_name", "license_link")
LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
TAG = "jaxrl_llm"


class Base(NamedTuple):
    """The model that training started from.

    `name` is what to call it, `hub_id` its public address (None: unknown), `license` what its card says under
    LICENSE_KEYS (empty: unknown), and `text` the file of its licence.
    """

    name: str
    hub_id: str | None
    license: Mapping[str, str]
    text: Path | None


def base_of(path: str, start: Path | None = None) -> Base:
    """The Base of `model.path`, from files of this machine alone; `start` is the folder that a run was started in.

    A local folder is called by its last part. One that this library has exported stands for the model of the hub that
    its card names. The licence is that of the card (README.md), or the file LICENSE, or unknown.
    """
    place = (start or Path()) / Path(path).expanduser()
    folder = _folder_of(path, place)
    local = not HUB_ID.fullmatch(path) or place.is_dir()
    card = _front_matter(folder) if folder is not None else {}
    hub_id = path if not local and HUB_ID.fullmatch(path) else None
    if local and TAG in (card.get("tags") or ()):
        named = card.get("base_model")
        first = named[0] if isinstance(named, list) and named else named
        hub_id = first if isinstance(first, str) and HUB_ID.fullmatch(first) else None
    text = next((folder / name for name in LICENSE_FILES if (folder / name).is_file()), None) if folder else None
    licence = {key: str(card[key]) for key in LICENSE_KEYS if card.get(key)}
    if licence.get("license", "unknown") == "unknown" and text is not None:
        lines = (line.strip(" #*=\t") for line in text.read_text(encoding="utf-8", errors="replace").splitlines())
        title = next((line for line in lines if line), "see LICENSE")[:80]
        licence = {"license": "other", "license_name": title, "license_link": "LICENSE"}
    if "://" not in licence.get("license_link", "://"):  # relative to the base's own folder
        licence["license_link"] = "LICENSE" if text is not None else f"https://huggingface.co/{hub_id or path}"
    name = Path(path).name if local and not path.startswith("embedded:") else path
    return Base(name, hub_id, {} if licence.get("license") == "unknown" else licence, text)


def datasets_of(settings: Mapping[str, Any], start: Path | None = None) -> list[str]:
    """The hub ids among the data sets that a run with these settings, by full key, was trained on, `start` as above."""
    here = start or Path()
    sources = [source_options(source) for source in settings.get("data.sources") or ()]
    paths = [str(source.get("path", "")) for source in sources] or [str(settings.get("data.path", ""))]
    return list(dict.fromkeys(path for path in paths if HUB_ID.fullmatch(path) and not (here / path).exists()))


def _folder_of(path: str, place: Path) -> Path | None:
    """The folder of the model on this machine, of a path of its own at `place`; None where it has none."""
    if path.startswith("embedded:"):
        return EMBEDDED / path.removeprefix("embedded:")
    if is_url(path):
        return fetched(path)
    if place.is_dir():
        return place
    if not HUB_ID.fullmatch(path):
        return None
    from huggingface_hub import try_to_load_from_cache  # slow to import, and of no use for local folders

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _front_matter(folder: Path) -> dict[str, Any]:
    """The entries of the folder's model card, none where it has no card that can be read."""
    import yaml
    from huggingface_hub import metadata_load

    try:
        found = metadata_load(folder / "README.md") if (folder / "README.md").is_file() else None
    except (ValueError, OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
