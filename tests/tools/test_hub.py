"""Pushing to a server that stands for the hub, over real HTTP: what arrives, what is refused, what is never said."""

import importlib
import os
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.tools.cards import hub as module
from tests.tools.hub_server import Hub

command = importlib.import_module("jaxrl_llm.commands.export")


@pytest.fixture
def hub(monkeypatch):
    constants = importlib.import_module("huggingface_hub.constants")
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        yield server


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("---\nlicense: unknown\n---\n\n# card\n")
    return folder


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_new_repository(hub, folder):
    model = contents(folder)
    (folder / "critic").mkdir()
    (folder / "critic" / "model.safetensors").write_bytes(b"values")  # which stays here
    (folder / "critic" / "original").mkdir()
    (folder / "critic" / "original" / "params.json").write_text("{}")
    assert module.push(folder, "me/new", private=True, message="words") == f"{hub.url}/me/new"
    assert hub.repos["me/new"] == {"private": True, "files": model, "commits": ["words"]}
    assert module.push(folder, "team/new") and not hub.repos["team/new"]["private"]


def test_a_name_without_an_owner_is_of_the_tokens_account(hub, folder, monkeypatch):
    hub.tokens["hf_another"] = {"name": "you"}
    module.check("new")
    assert module.push(folder, "new") == f"{hub.url}/me/new"
    with pytest.raises(ConfigError, match="me/new holds a model already"):
        module.check("new")
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert module.push(folder, "new") == f"{hub.url}/you/new"
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    with pytest.raises(ConfigError, match="cannot push to new: the hub does not know the token"):
        module.push(folder, "new")


def test_a_model_that_is_there_is_kept(hub, folder):
    hub.has("me/old", model_safetensors=b"old", notes_md=b"mine", vocab_json=b"{}")
    with pytest.raises(ConfigError, match=r"me/old holds a model already \(model.safetensors\).*--overwrite"):
        module.push(folder, "me/old")
    assert hub.repos["me/old"]["files"]["model.safetensors"] == b"old"
    module.push(folder, "me/old", overwrite=True)
    assert hub.repos["me/old"]["files"] == contents(folder) | {"notes.md": b"mine"}
    assert len(hub.repos["me/old"]["commits"]) == 1


@pytest.mark.parametrize("missing", ["folder", "weights"])
def test_nothing_is_pushed_without_weights(hub, folder, missing):
    """A commit of nothing but deletions would empty the repository."""
    hub.has("me/old", model_safetensors=b"old")
    (folder / "model.safetensors").unlink()
    folder = folder / "gone" if missing == "folder" else folder
    with pytest.raises(ConfigError, match=rf"cannot push to me/old: {folder} holds no weights \(\*.safetensors"):
        module.push(folder, "me/old", overwrite=True)
    assert hub.repos["me/old"] == {"private": False, "files": {"model.safetensors": b"old"}, "commits": []}


def test_a_repository_without_a_model_takes_one(hub, folder):
    hub.has("me/empty", _gitattributes=b"")
    module.push(folder, "me/empty")
    assert hub.repos["me/empty"]["files"] == contents(folder) | {".gitattributes": b""}


def test_what_is_to_be_private_never_gets_public(hub, folder):
    hub.has("me/open")
    with pytest.raises(ConfigError, match="is public, and the model is to be private"):
        module.push(folder, "me/open", private=True)
    assert not hub.repos["me/open"]["commits"]


@pytest.mark.parametrize(
    ("token", "repo", "fails", "words"),
    [
        (None, "me/x", {}, "token that may write in the variable HF_TOKEN"),
        ("hf_nobody_knows_this", "me/x", {}, "does not know the token in HF_TOKEN"),
        ("hf_writer", "you/x", {}, "HF_TOKEN is of me, who is not part of you"),
        ("hf_reader", "me/x", {}, "may only read"),
        ("hf_writer", "me/x", {"/create": 403}, r"may not write there \(said no\)"),
        ("hf_writer", "me/x", {"/commit": 422}, r"the hub answered 422 \(said no\)"),
        ("hf_writer", "me/x", {"/whoami": 418}, "the hub answered 418"),
    ],
)
def test_what_the_hub_refuses(token, repo, fails, words, hub, folder, monkeypatch):
    hub.tokens["hf_reader"] = {"name": "me", "auth": {"accessToken": {"role": "read"}}}
    hub.fails = fails
    monkeypatch.setenv("HF_TOKEN", token or "")

    def check_and_push():
        module.check(repo)
        module.push(folder, repo)

    with pytest.raises(ConfigError, match=words) as error:
        check_and_push()
    assert "\n" not in str(error.value) and (token or "?") not in str(error.value)
    assert not any(repo["files"] for repo in hub.repos.values())


def test_a_network_that_is_away(hub, folder, monkeypatch):
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://localhost:9")
    with pytest.raises(ConfigError, match=r"me/x: the hub could not be reached"):
        module.check("me/x")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE keeps the hub away"):
        module.check("me/x")


# --- the command, and the end of a run ---


def test_export_pushes_what_it_writes(hub, tiny_run, tmp_path, capsys):
    command.main([f"--run={tiny_run.output_dir}", "--push_to_hub=me/sorter", "--private"])
    assert capsys.readouterr().out == f"{hub.url}/me/sorter\n"
    pushed = hub.repos["me/sorter"]
    assert pushed["private"] and pushed["commits"] == ["run, by jaxrl_llm"]
    own = contents(tiny_run.output_dir / "hf")
    card = pushed["files"].pop("README.md").decode()
    assert pushed["files"].keys() == own.keys() - {"README.md"}
    for name in ("model.safetensors", "config.json", "tokenizer.json", "curves.svg"):
        assert pushed["files"][name] == own[name], name
    assert card.startswith("---\n") and "# sorter" in card and 'from_pretrained("me/sorter")' in card
    assert not (tiny_run.output_dir / command.PUSHED).exists()
    with pytest.raises(ConfigError, match="holds a model already"):
        command.main([f"--run={tiny_run.output_dir}", "--push_to_hub=me/sorter", f"--output={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run=x", "--push_to_hub=me/x"], "x is not the folder of a run"),
        (["--run=x", "--output=y", "--private"], "--private is of a repository"),
    ],
)
def test_command_errors(arguments, words, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        command.main(arguments)
    assert not hub.seen and not os.listdir(tmp_path)  # noqa: PTH208


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"push_to_hub": "me/mine/too"}, "takes a repository of the hub: OWNER/NAME, or NAME of the token's account"),
        ({"private": True}, "export.private is true, but nothing is pushed"),
        ({"overwrite": True}, "export.overwrite is true, but nothing is pushed or copied"),
        ({"copy_to": "/mnt/models"}, "export.copy_to is '/mnt/models', but it takes the URL of a folder"),
        ({"strategy": "every_save"}, "export.push_to_hub does not go with it: name a repository"),
        ({"strategy": "every_save", "push_to_hub": "me/m"}, "checkpoint.contents does not go with it: let it have hf"),
    ],
)
def test_configurations_that_push_nowhere(keys, words):
    config = default()
    config.export.update(keys)
    with pytest.raises(ConfigError, match=words):
        validate(config)


@pytest.fixture
def config(root, tmp_path):
    config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
    config.output_dir, config.total_steps, config.eval.every = str(tmp_path / "run"), 1, -1
    config.logging.backends, config.export.push_to_hub = ("jsonl",), "me/mine"
    return config


@pytest.mark.slow
def test_the_end_of_a_run(hub, config, capsys):
    folder = jaxrl_llm.train(config).output_dir
    assert hub.repos["me/mine"]["files"] == contents(folder / "hf")
    assert b'from_pretrained("me/mine")' in hub.repos["me/mine"]["files"]["README.md"]
    assert f"pushed to {hub.url}/me/mine" in capsys.readouterr().out
    assert [line["step"] for line in jaxrl_llm.train(config).metrics] == [1]  # as a job manager starts it again


def test_a_run_may_replace_what_it_has_pushed_itself(hub, config, folder):
    """As when a job manager starts a finished run again; not where others have pushed since, or a new run begins."""
    run = Path(config.output_dir)
    run.mkdir()
    folder.rename(run / "hf")
    config.export.push_to_hub = "mine"
    for count in (1, 2):
        module.check_push(config)
        module.push_run(config)
        assert len(hub.repos["me/mine"]["commits"]) == count
    hub.repos["me/mine"]["commits"].append("by hand")
    with pytest.raises(ConfigError, match="holds a model already"):
        module.check_push(config)
    hub.repos["me/mine"]["commits"].pop()
    module.check_push(config)
    config.checkpoint.resume = "never"
    with pytest.raises(ConfigError, match="holds a model already"):
        module.check_push(config)


def test_a_push_at_each_checkpoint(hub, config, capsys):
    """The second step's push fails, which is a warning; the end pushes the last model."""
    config.total_steps, config.checkpoint.every, config.checkpoint.contents = 3, 1, ("hf",)
    config.export.strategy, config.export.overwrite, config.export.push_to_hub = "every_save", True, "mine"

    class Away:
        def on_save(self, info):
            hub.fails = {"/commit": 500} if info.step == 1 else {}

    result = jaxrl_llm.train(config, callbacks=[Away()])
    commits, files = (hub.repos["me/mine"][name] for name in ("commits", "files"))
    assert commits[0] == "Step 1" and len(commits) == 2
    assert files["model.safetensors"] == (result.output_dir / "hf/model.safetensors").read_bytes()
    assert b'from_pretrained("me/mine")' in files["README.md"]
    assert "the model of step 2 was not pushed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_push_that_fails_keeps_the_run(hub, config, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ConfigError, match="does not know the token"):
        jaxrl_llm.train(config)
    assert not (tmp_path / "run" / "checkpoints" / "1").exists()  # it is known before the first step
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    hub.fails = {"/commit": 422}
    with pytest.raises(ConfigError, match=r"answered 422.*The run is complete.*jaxrl_llm.export --run="):
        jaxrl_llm.train(config)
    hub.fails = {}
    command.main([f"--run={tmp_path / 'run'}", "--push_to_hub=me/mine"])
    assert hub.repos["me/mine"]["files"]["model.safetensors"]
