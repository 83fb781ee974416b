"""The compilation cache: a second start of a command compiles nothing that the first one has compiled."""

import hashlib
import os
from pathlib import Path

import jax

from jaxrl_llm.config.resolve import ConfigError

FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def keep_compiled(where: str = "auto") -> Path | None:
    """Stores compiled programs in a folder and reads them from it; returns the folder, None for no cache.

    `where` is auto, none or a folder. auto is $JAX_COMPILATION_CACHE_DIR, or jaxrl_llm/compiled in $XDG_CACHE_HOME
    (~/.cache), and there a folder for each kind of processor: programs may not run on another. JAX's own variables
    (JAX_ENABLE_COMPILATION_CACHE, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS) hold where they are set. Raises
    ConfigError for a folder that cannot be made.
    """
    if where == "none":
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    folder = _folder(where)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if where == "auto" and FOLDER_VARIABLE not in os.environ:
            return None  # no home that can be written, as in some containers; the user named no folder
        raise ConfigError(
            f"compilation_cache: {folder} cannot be made: {error.strerror}; name another folder, or none"
        ) from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def _folder(where: str) -> Path:
    if where != "auto":
        return Path(where).expanduser()
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "jaxrl_llm" / "compiled" / _processor()


def _processor() -> str:
    """A name of this machine's processor and its instruction sets."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [" ".join(os.uname()[3:])]
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))} or lines[:1])
    return hashlib.sha256("\n".join(features).encode()).hexdigest()[:12]
