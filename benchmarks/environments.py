"""The Python environments that peers run in, made once with pinned versions."""

import subprocess
import sys
from pathlib import Path

from benchmarks.cases import TRL, TUNIX

PINS = {
    TRL: ("trl==1.16.0", "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "accelerate==1.15.0"),
    TUNIX: ("google-tunix==0.1.7", "jax==0.10.2", "flax==0.12.8", "transformers==5.12.1"),
}
PROBES = {TRL: "import trl, torch; print(trl.__version__)", TUNIX: "import tunix, jax"}
MODULES = {TRL: "benchmarks.peers.with_trl", TUNIX: "benchmarks.peers.with_tunix"}


def python_of(library: str, cache: Path, given: Path | None = None) -> Path:
    """The interpreter that has the peer, made under `cache` unless it is `given` or there already.

    Raises OSError, which says what pip said, when it cannot be made.
    """
    if given is not None:
        _check(given, library)
        return given
    folder = cache / library
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        if not python.exists():
            _call([sys.executable, "-m", "venv", str(folder)])
        _call([str(python), "-m", "pip", "install", "-q", *PINS[library]])
        _check(python, library)
        (folder / "done").touch()
    return python


def _check(python: Path, library: str) -> None:
    _call([str(python), "-c", PROBES[library]])


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()[-500:] or f'exit code {done.returncode}'}")
