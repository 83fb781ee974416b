"""Export: the folder written from a checkpoint is the model of that step, bit for bit, on any number of devices."""

import dataclasses
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

import jaxrl_llm
from jaxrl_llm.config import ConfigError, to_json
from jaxrl_llm.config.files import write_json
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data.named_templates import with_chat_template
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.setup.models import build_critic, build_model
from jaxrl_llm.training.setup.run_models import load_named
from jaxrl_llm.training.update import State


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_newest_checkpoint_is_the_hf_folder(tiny_run, tmp_path):
    folder = jaxrl_llm.export(tiny_run.output_dir, tmp_path / "exported")
    assert contents(folder) == contents(tiny_run.output_dir / "hf")


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # of the reader that is the oracle
def test_an_earlier_step(tiny_run, tmp_path):
    folder = jaxrl_llm.export(tiny_run.output_dir, tmp_path / "exported", step=1)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        stored = reader.restore(tiny_run.output_dir / "checkpoints" / "1" / "state")
    jax.tree.map(np.testing.assert_array_equal, jaxrl_llm.load_model(folder).params, stored["params"])
    final = load_file(tiny_run.output_dir / "hf" / "model.safetensors")
    earlier = load_file(folder / "model.safetensors")
    assert any(not np.array_equal(earlier[name], final[name]) for name in final)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7 .*there are 1, 2"):
        jaxrl_llm.export(tiny_run.output_dir, tmp_path / "another", step=7)


def test_dtype(tiny_run, tmp_path):
    folder = jaxrl_llm.export(tiny_run.output_dir, tmp_path / "exported", dtype="bfloat16")
    tensors, exact = (
        load_file(folder / "model.safetensors"),
        load_file(tiny_run.output_dir / "hf" / "model.safetensors"),
    )
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, exact[name].astype(tensor.dtype))


def test_exporting_changes_nothing_in_the_run(tiny_run, tmp_path):
    before = {file: file.stat().st_mtime_ns for file in tiny_run.output_dir.rglob("*")}
    jaxrl_llm.export(tiny_run.output_dir, tmp_path / "exported")
    assert {file: file.stat().st_mtime_ns for file in tiny_run.output_dir.rglob("*")} == before


@pytest.mark.parametrize("shared", [False, True])
def test_the_critic_of_a_step(tmp_path, shared):
    config, mesh = jaxrl_llm.default_config(), make_mesh()
    config.algorithm.name, config.model.path, config.critic.shared = "ppo", "embedded:sort", shared
    (tmp_path / "config.json").write_text(to_json(config))
    with jax.set_mesh(mesh), Checkpoints(tmp_path / "checkpoints") as checkpoints:
        policy = build_model(config, mesh)
        critic = build_critic(config, policy, mesh)
        trained, values = (jax.tree.map(lambda x: x * 1.5, model.params) for model in (policy, critic))
        checkpoints.save(4, State(jnp.array(4), trained, (), State(jnp.array(0), values, ())), {})
        checkpoints.wait()
        for of_critic, name in ((True, "critic"), (False, "policy")):
            with pytest.raises(ConfigError, match=f"--adapter: the {name} of .* has no adapters: leave --adapter out"):
                jaxrl_llm.export(tmp_path, tmp_path / "critic", critic=of_critic, adapter=True)
        with pytest.raises(ConfigError, match="--adapter writes float32"):
            jaxrl_llm.export(tmp_path, tmp_path / "critic", adapter=True, dtype="bfloat16")
        folder = jaxrl_llm.export(tmp_path, tmp_path / "critic", critic=True)
    read = jaxrl_llm.load_model(folder, head="score")
    assert read.net.config.head == "score" and not (folder / "README.md").exists()
    expected = {**trained, **values} if shared else values
    jax.tree.map(np.testing.assert_array_equal, read.params, {x: expected[x] for x in expected if x != "head"})


def test_a_run_without_a_critic_has_none_to_export(tiny_run, tmp_path):
    with pytest.raises(ConfigError, match=r"--critic: the run in .* has none \(algorithm\.name = 'grpo'\)"):
        jaxrl_llm.export(tiny_run.output_dir, tmp_path / "critic", critic=True)
    assert not (tmp_path / "critic").exists()


@pytest.mark.slow
def test_command_on_other_devices(tiny_run, run_python, tmp_path):
    result = run_python(
        "-m", "jaxrl_llm", "export", f"--run={tiny_run.output_dir}/checkpoints/2", "--output=exported", devices=4
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "exported\n", "")
    assert contents(tmp_path / "exported") == contents(tiny_run.output_dir / "hf")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--run is missing"),
        (["--run=x"], "--output is missing"),
        (["--run=nothing", "--output=x"], "nothing is not the folder of a run"),
        (["--run=x", "--outptu=x"], "the closest is --output"),
        (["--run=x/checkpoints/3", "--output=x", "--step=4"], "--step is 4, but --run names the checkpoint of step 3"),
        (["--run=x/checkpoints/3", "--output=x"], "x is not the folder of a run"),
        (["--run=x", "--output=x", "--step=-1"], "step is -1, but it takes an integer >= 0, or none"),
        (["--run=x", "--output=x", "--dtype=int8"], "dtype is 'int8'"),
    ],
)
def test_command_errors(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        importlib.import_module("jaxrl_llm.commands.export").main(arguments)
    assert not list(tmp_path.iterdir())


def test_a_run_without_checkpoints(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no checkpoint in .*checkpoints$"):
        jaxrl_llm.export(tmp_path, tmp_path / "exported")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no checkpoint in .*; its models are .*hf$"):
        jaxrl_llm.export(tmp_path, tmp_path / "exported")
    (tmp_path / "checkpoints").rmdir()
    with pytest.raises(ConfigError, match=r"has no checkpoints: there is no folder .*/checkpoints$"):
        jaxrl_llm.export(tmp_path, tmp_path / "exported")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": []}')  # RUN/hf, say
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no config\.json of one"):
        jaxrl_llm.export(tmp_path, tmp_path / "exported")


def test_a_checkpoint_of_another_model(tiny_run, tmp_path):
    (tmp_path / "checkpoints").symlink_to(tiny_run.output_dir / "checkpoints")
    config = (tiny_run.output_dir / "config.json").read_text()
    other = jaxrl_llm.load_model("embedded:sort", init_key=jax.random.key(0))
    hf = {**other.hf_config, "hidden_size": 48, "head_dim": 12, "intermediate_size": 64}
    (tmp_path / "other").mkdir()
    write_json(tmp_path / "other" / "config.json", hf)
    other.tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "config.json").write_text(config.replace("embedded:sort", str(tmp_path / "other")))
    with pytest.raises(ConfigError, match=r"params/embed/weight is \[320, 96\] there, and is \[320, 48\] here"):
        jaxrl_llm.export(tmp_path, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_output_that_is_no_model_is_kept(tiny_run, tmp_path):
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(ConfigError, match="other files"):
        jaxrl_llm.export(tiny_run.output_dir, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "words"


def test_a_model_that_is_there_is_replaced_when_told_so(tiny_run, tmp_path, monkeypatch):
    folder = jaxrl_llm.export(tiny_run.output_dir, tmp_path / "exported")
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"holds a model already \(config.json\).*--overwrite"):
        jaxrl_llm.export(tiny_run.output_dir, folder, step=1)
    assert contents(folder) == before
    jaxrl_llm.export(tiny_run.output_dir, folder, step=1, overwrite=True)
    assert contents(folder)["model.safetensors"] != before["model.safetensors"]
    (folder / "notes.txt").write_text("words")
    command = importlib.import_module("jaxrl_llm.commands.export")
    monkeypatch.setattr(command, "checkpoint_model", None)  # nothing is read
    with pytest.raises(ConfigError, match=r"other files than an exported model's \(notes.txt\)"):
        jaxrl_llm.export(tiny_run.output_dir, folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "words"


CHAT = [{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}] * 2


@pytest.fixture
def in_memory(tmp_path):
    """A configuration of one step of SFT, and a model whose weights and entries are not those at its path."""
    config = jaxrl_llm.default_config()
    config.algorithm.name, config.data.max_length, config.batch.prompts = "sft", 128, 2
    config.total_steps, config.eval.every, config.checkpoint.every, config.logging.backends = 1, -1, 1, ()
    config.output_dir = str(tmp_path / "run")
    model = jaxrl_llm.load_model("embedded:sort", entries={"rope_theta": 20000.0})
    return config, dataclasses.replace(model, params=jax.tree.map(lambda x: 1.01 * x, model.params))


@pytest.mark.slow
def test_a_model_in_memory_is_exported_once_it_has_a_folder(in_memory, tmp_path):
    """Trained whole, it is described by what the run leaves at its end; the tokenizer too."""
    config, model = in_memory
    tokenizer = with_chat_template(model.tokenizer, "chatml")
    run = jaxrl_llm.train(config, CHAT, model=model, tokenizer=tokenizer).output_dir
    assert contents(jaxrl_llm.export(run, tmp_path / "exported")) == contents(run / "hf")
    served = load_named(str(run), "float32", make_mesh())
    assert served.tokenizer.chat_template == tokenizer.chat_template and served.net.config.rope == model.net.config.rope
    (run / "hf").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"its model and tokenizer in memory.* \(model.path, model.tokenizer\)"):
        jaxrl_llm.export(run, tmp_path / "again")
    with pytest.raises(ConfigError, match=r"was given its model in memory \(embedded:sort, in memory\).*give it again"):
        jaxrl_llm.train(config, CHAT, tokenizer=tokenizer)


@pytest.mark.slow
def test_adapters_of_a_model_in_memory_have_no_base(in_memory, tmp_path):
    """Neither in a checkpoint nor as a PEFT folder."""
    config, model = in_memory
    config.lora.rank, config.lora.targets = 2, ("q_proj",)
    result = jaxrl_llm.train(config, CHAT, model=model)
    run = result.output_dir
    with pytest.raises(ConfigError, match="names no base model: load that, with adapter="):
        jaxrl_llm.load_model(run / "adapter")
    jaxrl_llm.save_adapter(result.model, tmp_path / "adapter")
    assert contents(tmp_path / "adapter")["adapter_config.json"] == contents(run / "adapter")["adapter_config.json"]
    refused = r"adapters of a model that was given in memory.*model\.path"
    with pytest.raises(ConfigError, match=refused):
        jaxrl_llm.export(run, tmp_path / "exported")
    with pytest.raises(ConfigError, match=refused):
        load_named(str(run), "auto", make_mesh())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "trained", "frozen"])
def test_what_the_run_made_of_its_model_is_exported(kind, root, tmp_path):
    """Entries in place of those of config.json, another chat template, and a tower that is trained, or is as it was."""
    if kind == "text":
        config, rows = jaxrl_llm.default_config(), CHAT
        config.algorithm.name, config.data.chat_template, config.data.max_length = "sft", "chatml", 128
        config.model.overrides, config.batch.prompts = "rope_theta=20000.0", 2
    else:
        config, rows = load_config_file(f"{root / 'configs' / 'vision_grpo.py'}:tiny"), None
        config.model.vision = kind
    config.total_steps, config.eval.every, config.checkpoint.every, config.logging.backends = 1, -1, 1, ()
    config.output_dir = str(tmp_path / "run")
    run = jaxrl_llm.train(config, rows).output_dir
    assert contents(jaxrl_llm.export(run, tmp_path / "exported")) == contents(run / "hf")
    served = load_named(str(run), "float32", make_mesh())
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(served.params))
    saved = jaxrl_llm.load_model(run / "hf")
    assert served.net.config.rope == saved.net.config.rope
    assert served.tokenizer.chat_template == saved.tokenizer.chat_template
