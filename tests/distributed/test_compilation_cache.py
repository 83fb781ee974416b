"""Compiled programs are kept: where, and that a second start of a command compiles nothing."""

import json

import jax
import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.distributed import compilation_cache
from jaxrl_llm.distributed.compilation_cache import keep_compiled

COUNTED = """
import atexit, collections, json, runpy, sys
from jax import monitoring
counts = collections.Counter()
monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
atexit.register(lambda: print("COUNTS", json.dumps(counts)))
sys.argv[0] = "train"
runpy.run_module("jaxrl_llm.train", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(autouse=True)
def settings():
    """JAX's settings as they were, after the test."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_where_programs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    assert keep_compiled() == tmp_path / "own" and (tmp_path / "own").is_dir()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    folder = keep_compiled()
    assert folder is not None and folder.parent == tmp_path / "caches" / "jaxrl_llm" / "compiled" and folder.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert keep_compiled(str(tmp_path / "named")) == tmp_path / "named"
    assert keep_compiled("none") is None and jax.config.jax_compilation_cache_dir is None


def test_processors_that_differ_do_not_share(monkeypatch, tmp_path):
    monkeypatch.setattr(compilation_cache, "Path", lambda name: tmp_path / name.lstrip("/"))
    (tmp_path / "proc").mkdir()
    names = set()
    for flags in ("avx2", "avx2 avx512f", "avx2 avx512f"):
        (tmp_path / "proc" / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\nprocessor : 1\nflags : {flags}\n")
        names.add(compilation_cache._processor())
    assert len(names) == 2


def test_folders_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compilation_cache: .*file/under cannot be made: .*; name another folder"):
        keep_compiled(str(tmp_path / "file" / "under"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert keep_compiled() is None


@pytest.mark.slow
def test_a_second_start_compiles_nothing(root, tmp_path, monkeypatch, run_python):
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "kept"))

    def start(number):
        done = run_python(
            "-c", COUNTED, f"--config={root / 'configs' / 'grpo.py'}:tiny", f"--config.output_dir={number}"
        )
        assert done.returncode == 0, done.stderr
        [line] = [line for line in done.stdout.splitlines() if line.startswith("COUNTS ")]
        return json.loads(line.removeprefix("COUNTS "))

    first, second = start(1), start(2)
    assert first["cache_misses"] > 10
    assert second.get("cache_misses", 0) == 0
    assert second["cache_hits"] == second["compile_requests_use_cache"]
