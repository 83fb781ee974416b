"""Copying a trained model to a URL: what arrives, what stays there, and what is refused before and after a run."""

import fsspec
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.tools.cards import bucket

URL = "memory://bucket/copied"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRL_LLM_CACHE", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    return folder


def held(fs):
    return {name.removeprefix("/bucket/copied/"): fs.cat_file(name) for name in fs.find("/bucket/copied")}


NEW = {"config.json": b"{}", "model.safetensors": b"weights", "additional_chat_templates/tool.jinja": b"{{ messages }}"}


def test_a_model_that_is_there_is_kept_or_replaced(store, folder):
    bucket.copy(folder, f"{URL}/")
    assert held(store) == NEW
    store.pipe({"/bucket/copied/model-00001-of-00002.safetensors": b"old", "/bucket/copied/notes.md": b"mine"})
    with pytest.raises(ConfigError, match=r"copy_to = '.*it holds a model already \(\S+\).*export.overwrite"):
        bucket.copy(folder, URL)
    bucket.copy(folder, URL, overwrite=True)
    assert held(store) == NEW | {"notes.md": b"mine"}


def test_config_json_arrives_last(store, folder, monkeypatch):
    """A copy that breaks off is no model, whether or not one was there before."""
    bucket.copy(folder, URL)
    put = store.put_file

    def fail(source, target):
        if target.endswith(".safetensors"):
            raise PermissionError("the bucket is full")
        put(source, target)

    monkeypatch.setattr(store, "put_file", fail)
    with pytest.raises(ConfigError, match="cannot be written: PermissionError: the bucket is full"):
        bucket.copy(folder, URL, overwrite=True)
    assert "config.json" not in held(store)
    monkeypatch.setattr(store, "put_file", put)
    bucket.copy(folder, URL)  # what a copy left that broke off may be replaced
    assert held(store) == NEW


def test_a_folder_of_this_machine_is_made(folder, tmp_path):
    bucket.copy(folder, f"file://{tmp_path}/a/new/folder")
    assert {path.name for path in (tmp_path / "a/new/folder").iterdir()} >= {"config.json"}


def test_what_is_refused_before_the_run(store, folder, monkeypatch):
    config = default()
    bucket.check_copy(config)
    config.export.copy_to = URL
    bucket.check_copy(config)
    assert held(store) == {}
    bucket.copy(folder, URL)
    with pytest.raises(ConfigError, match="it holds a model already"):
        bucket.check_copy(config)
    config.export.overwrite = True
    bucket.check_copy(config)
    monkeypatch.setattr(store, "pipe_file", lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match=r"export.copy_to = 'memory://bucket/copied' cannot be written: ZeroDivision"):
        bucket.check_copy(config)


def test_a_copy_that_fails_keeps_the_run(store, folder, tmp_path, monkeypatch, capsys):
    config = default()
    config.output_dir, config.export.copy_to = str(tmp_path), URL
    folder.rename(tmp_path / "hf")
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_file", lambda *_: 1 / 0)
        with pytest.raises(
            ConfigError, match=r"ZeroDivisionError.*The run is complete, and its model is in .*/hf: start"
        ):
            bucket.copy_run(config)
        config.export.push_to_hub = "me/model"  # which a second start finds there
        with pytest.raises(ConfigError, match=r"start the same command again with export\.overwrite, as it was pushed"):
            bucket.copy_run(config)
    bucket.copy_run(config)
    assert held(store) == NEW and capsys.readouterr().out == f"copied to {URL}\n"


@pytest.mark.slow
def test_the_end_of_a_run(store, root, tmp_path, monkeypatch, capsys):
    config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
    config.output_dir, config.total_steps, config.eval.every = str(tmp_path / "run"), 1, -1
    config.logging.backends, config.export.copy_to = ("jsonl",), URL
    with monkeypatch.context() as patch:
        put = store.put_file
        patch.setattr(store, "put_file", lambda source, to: put(source, to) if to.endswith(".safetensors") else 1 / 0)
        with pytest.raises(
            ConfigError, match=r"The run is complete, and its model is in .*run/hf: start the same command again"
        ):
            jaxrl_llm.train(config)
    folder = jaxrl_llm.train(config).output_dir / "hf"  # nothing is left to do but to copy
    assert f"copied to {URL}" in capsys.readouterr().out
    assert held(store) == {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*.*")}
    assert jaxrl_llm.load_model(URL).tokenizer is not None
