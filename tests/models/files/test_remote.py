"""Model folders behind URLs: what is copied and when, what reads it, and what is said where that fails."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.data.named_templates import with_chat_template
from jaxrl_llm.models.adapters import peft
from jaxrl_llm.models.adapters.lora import LoraConfig, parse_targets
from jaxrl_llm.models.files import hf, remote
from jaxrl_llm.models.model import add_adapters, describe, load_adapter, load_model, save_adapter
from jaxrl_llm.tools.cards.origin import base_of

URL = "memory://bucket/models/sort"
SORT = hf.EMBEDDED / "sort"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRL_LLM_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    yield tmp_path / "cache" / "models"
    if store.exists("/bucket"):
        store.rm("/bucket", recursive=True)


def upload(folder: Path, url: str = URL) -> fsspec.AbstractFileSystem:
    fs, path = fsspec.url_to_fs(url)
    for file in folder.iterdir():
        fs.pipe_file(f"{path}/{file.name}", file.read_bytes())
    return fs


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_model_is_copied_once_and_anew_when_it_changes(cache, monkeypatch):
    fs, read = upload(SORT), []
    get_file = fs.get_file
    monkeypatch.setattr(fs, "get_file", lambda *args: (read.append(Path(args[0]).name), get_file(*args))[1])
    fs.pipe_file("/bucket/models/sort/optimizer.pt", b"not asked for")
    fs.pipe_file("/bucket/models/sort/consolidated.safetensors", b"the same once more")
    fs.pipe_file("/bucket/models/sort/onnx/model.json", b"in a folder of its own")
    first = hf.locate(URL)
    assert names(first) == names(SORT) and sorted(read) == sorted(names(SORT))
    assert all((first / name).read_bytes() == (SORT / name).read_bytes() for name in names(SORT))
    assert first.is_relative_to(cache) and first.parent.name.startswith("models-sort-")
    assert hf.locate(f"{URL}/") == first and len(read) == len(names(SORT))
    fs.pipe_file("/bucket/models/sort/README.md", (SORT / "README.md").read_bytes())  # same bytes, another time
    second = hf.locate(URL)
    assert second != first and names(first) == names(SORT)
    assert base_of(URL).license and remote.fetched(URL) == second
    params = [load_model(path).params for path in (URL, "embedded:sort")]
    assert jax.tree.all(jax.tree.map(np.array_equal, *params))


def test_what_needs_no_weights_copies_none(cache):
    upload(SORT)
    assert names(hf.locate(URL, config_only=True)) == {"config.json"}
    assert hf.find_tokenizer(URL).get_vocab() == hf.find_tokenizer("embedded:sort").get_vocab()
    copy = remote.fetched(URL)
    assert copy is not None and "model.safetensors" not in names(copy)


def test_a_copy_that_was_killed_goes_on(cache):
    upload(SORT)
    copy = hf.locate(URL)
    (copy / "tokenizer.json").rename(copy / ".tokenizer.json.partial")
    (copy / "model.safetensors").write_bytes(b"the end is lost")
    assert hf.locate(URL) == copy and names(copy) == names(SORT)
    assert (copy / "model.safetensors").read_bytes() == (SORT / "model.safetensors").read_bytes()


def test_processes_of_a_machine_copy_a_file_once(tmp_path, cache):
    """Each counts what it has read of a folder that answers slowly."""
    code = """
import sys, time
from fsspec.implementations.local import LocalFileSystem
get_file, read = LocalFileSystem.get_file, []
def slow(self, source, target, **kwargs):
    time.sleep(0.1)
    read.append(source)
    return get_file(self, source, target, **kwargs)
LocalFileSystem.get_file = slow
from jaxrl_llm.models.files.remote import fetch
print("ready", flush=True)
sys.stdin.readline()
print(fetch(sys.argv[1], ["*.json", "*.safetensors"], "model path"), len(read), flush=True)
"""
    arguments = [sys.executable, "-c", code, f"file://{SORT}"]
    started = [subprocess.Popen(arguments, stdin=-1, stdout=-1, text=True) for _ in range(3)]
    for process in started:
        process.stdout.readline()
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate()[0].split() for process in started]
    assert len({folder for folder, _ in said}) == 1 and sorted(int(count) for _, count in said) == [0, 0, 4]
    assert names(Path(said[0][0])) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_an_adapter_behind_a_url(tmp_path, cache):
    """The model that it names is behind one too."""
    upload(SORT)
    model = load_model(URL)
    assert model.path == URL
    adapted = add_adapters(model, LoraConfig(2, 4.0, 0.0, parse_targets(["q_proj"])), jax.random.key(0))
    save_adapter(adapted, tmp_path / "adapter")
    upload(tmp_path / "adapter", "memory://bucket/adapter")
    loaded = load_model("memory://bucket/adapter")
    assert loaded.path == URL and loaded.net.config.lora.rank == 2 and loaded.tokenizer is not None
    assert not peft.is_adapter(URL) and describe(URL, adapter="memory://bucket/adapter").net == loaded.net
    config, params = load_adapter(model, "memory://bucket/adapter")
    assert config.rank == 2
    assert jax.tree.all(jax.tree.map(np.array_equal, params, load_adapter(model, tmp_path / "adapter")[1]))


def test_a_chat_template_behind_a_url(tmp_path, cache):
    tokenizer = hf.find_tokenizer("embedded:sort")
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    tokenizer.save_pretrained(tmp_path / "other")
    upload(tmp_path / "other", "memory://bucket/other")
    own = with_chat_template(hf.find_tokenizer("embedded:sort"), "memory://bucket/other", hf.find_tokenizer)
    assert own.chat_template == tokenizer.chat_template


def test_urls_that_cannot_be_read(tmp_path, cache, monkeypatch):
    config = default()
    config.model.path = config.model.tokenizer = config.lora.path = "hdfs://host/model"
    validate(config)
    with pytest.raises(
        ConfigError, match=r"^model path 'memory://bucket/nothing' cannot be copied .*FileNotFoundError"
    ):
        load_model("memory://bucket/nothing")
    with pytest.raises(ConfigError, match=r"^adapter 'memory://bucket/nothing' cannot be copied"):
        load_model("embedded:sort", adapter="memory://bucket/nothing")
    with pytest.raises(ConfigError, match=r"^model.tokenizer = 'memory://bucket/nothing' cannot be copied"):
        hf.find_tokenizer("memory://bucket/nothing", setting="model.tokenizer")
    with pytest.raises(ConfigError, match=r"model path 'abc://b/m' .*: ValueError: Protocol not known: abc"):
        hf.locate("abc://b/m")
    with pytest.raises(ConfigError, match=r"https://\*\*\*@localhost:9/m"):
        hf.locate("https://me:secret@localhost:9/m")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"gs://b/m.*install gcsfs"):
        hf.locate("gs://b/m")
    fs = upload(SORT)
    with pytest.raises(ConfigError, match=r"model.revision is 'v1', but memory://.* is a folder"):
        hf.locate(URL, revision="v1")
    with pytest.raises(ConfigError, match="there is no such folder, or it holds no files"):
        hf.locate(f"{URL}/config.json")
    fs.pipe_file("/bucket/other/notes.md", b"no model")
    with pytest.raises(ConfigError, match=r"model path 'memory://bucket/other' has no config.json"):
        hf.locate("memory://bucket/other")
    with pytest.raises(ConfigError, match=r"model.tokenizer = 'memory://bucket/other' has no tokenizer files"):
        hf.find_tokenizer("memory://bucket/other", setting="model.tokenizer")
    fs.rm("/bucket/models/sort/config.json")
    with pytest.raises(ConfigError, match=f"model path '{URL}' has no config.json"):
        hf.locate(URL)
    fs.pipe_file("/bucket/models/sort/config.json", json.dumps({"output_dir": "runs/x"}).encode())
    with pytest.raises(ConfigError, match=f"{URL} is the folder of a run.*: give {URL}/hf"):
        hf.locate(URL)
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("JAXRL_LLM_CACHE", str(file))
    with pytest.raises(ConfigError, match=r"cannot be copied to .*file/models/.*JAXRL_LLM_CACHE"):
        hf.locate(URL)


def test_an_error_of_a_store_is_one_line(cache, monkeypatch):
    def ls(*_, **__):
        raise OSError("libhdfs is not there\nnor there")

    monkeypatch.setattr(fsspec.filesystem("memory"), "ls", ls)
    with pytest.raises(ConfigError, match=r"OSError: libhdfs is not there\. Check the URL"):
        hf.locate(URL)


@pytest.mark.parametrize(("change", "says"), [("short", "config.json came with 1 of"), ("new", "changed while")])
def test_a_folder_that_changes_while_it_is_copied(change, says, cache, monkeypatch):
    fs = upload(SORT)
    get_file = fs.get_file

    def interfere(source: str, target: str) -> None:
        get_file(source, target)
        if change == "short" and source.endswith("config.json"):
            Path(target).write_bytes(b"{")
        elif change == "new":
            fs.pipe_file(
                "/bucket/models/sort/model.safetensors", bytes(fs.size("/bucket/models/sort/model.safetensors"))
            )

    monkeypatch.setattr(fs, "get_file", interfere)
    with pytest.raises(ConfigError, match=says):
        hf.locate(URL)


def test_a_store_that_tells_too_little_or_too_much(cache, monkeypatch):
    fs = upload(SORT)
    listed = fs.ls

    def ls(path: str, detail: bool = True):
        read = np.random.default_rng().random()  # sftp and smb call it time, beside mtime
        times = {"accessTime": read, "time": read, "mtime": 1.0, "lease": object()}
        folder = {"name": f"{path}/", "type": "file", "size": 0}
        return [folder, *({**entry, **times, "type": "other"} for entry in listed(path, detail=True))]

    monkeypatch.setattr(fs, "ls", ls)
    assert hf.locate(URL) == hf.locate(URL)
    monkeypatch.setattr(fs, "ls", lambda path, detail: [{**entry, "size": None} for entry in listed(path, detail)])
    with pytest.raises(ConfigError, match=r"the size of .* is not listed"):
        hf.locate(URL)
    shutil.rmtree(cache)
    assert remote.fetched(URL) is None
