"""The overview of `jaxrl-llm` and `python -m jaxrl_llm.train` without arguments, and how commands are found."""

import importlib
import shutil
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm.__main__ import main
from jaxrl_llm.commands.welcome import COMMANDS, welcome
from jaxrl_llm.config import ConfigError

ROOT = Path(__file__).parent.parent.parent


def test_every_config_and_command_is_named(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    text = welcome()
    for path in (ROOT / "configs").glob("*.py"):
        if "def get_config(" in path.read_text(encoding="utf-8"):
            assert f"  configs/{path.name} " in text
    assert "configs/dpo.py " in text and "DPO: the right answer is chosen, a wrong one rejected" in text
    assert "configs/rlhf.py" not in text, "it has stages, and no get_config"
    for name in COMMANDS:
        assert f"python -m jaxrl_llm {name} " in text
    assert "welcome" not in text
    assert all(len(line) <= 122 for line in text.splitlines())


def test_own_configs_come_first(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").write_text('"""My run.\n\nIt is long."""\n\n\ndef get_config():\n    raise\n')
    (tmp_path / "configs" / "shared.py").write_text("STEPS = 3\n")
    (tmp_path / "configs" / "latin1.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.chdir(tmp_path)
    text = welcome()
    assert "  configs/mine.py " in text and " My run.\n" in text and "shared.py" not in text
    assert "python -m jaxrl_llm.train --config=grpo\n" in text
    assert text.index("configs/mine.py") < text.index("  dapo ")


def test_every_command_is_a_file():
    files = {path.stem for path in (ROOT / "jaxrl_llm" / "commands").glob("*.py")}
    assert files - {"__init__", "welcome", "dry_run"} == set(COMMANDS) - {"train"}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_summaries_are_those_of_the_commands(command):
    module = importlib.import_module("jaxrl_llm.train" if command == "train" else f"jaxrl_llm.commands.{command}")
    assert callable(module.main)
    assert module.__doc__.startswith(COMMANDS[command].rstrip("."))


def test_train_without_arguments_prints_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    importlib.import_module("jaxrl_llm.train").main([])
    printed = capsys.readouterr()
    assert "python -m jaxrl_llm.train --config=" in printed.out and printed.err == ""
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_without_a_command(arguments, capsys):
    main(arguments)
    assert capsys.readouterr().out == welcome()


def test_unknown_command_names_the_closest():
    with pytest.raises(ConfigError, match=r"no command 'evalute'; the closest is evaluate; commands are train, .*chat"):
        main(["evalute"])


def test_commands_take_their_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help=mesh"])
    assert "--config.mesh.tensor=1\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="unknown flag --device_count"):
        main(["plan", "--device_count=8"])


@pytest.mark.slow
@pytest.mark.parametrize("start", [["-m", "jaxrl_llm"], ["-c", "from jaxrl_llm.__main__ import console; console()"]])
def test_errors_end_with_code_2(start, run_python):
    result = run_python(*start, "plan", "--config=dap")
    assert result.returncode == 2
    assert result.stderr.startswith("error: --config is 'dap'") and result.stderr.endswith("the closest is dapo\n")


def test_configs_of_a_wheel_are_found(tmp_path, monkeypatch, run_python):
    """The files as a wheel has them, `configs` inside the package, from an empty folder."""
    wheel, empty = tmp_path / "wheel", tmp_path / "empty"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jaxrl_llm", wheel / "jaxrl_llm", ignore=ignored)
    shutil.copytree(ROOT / "configs", wheel / "jaxrl_llm" / "configs", ignore=ignored)
    empty.mkdir()
    code = f"""
import os, sys
os.chdir({str(empty)!r})
sys.path[:] = [{str(wheel)!r}, *(path for path in sys.path if path not in ("", {str(ROOT)!r}))]
from jaxrl_llm.config.flags import load_flags
config, _ = load_flags(["--config=dapo:tiny"])
print(sys.modules["jaxrl_llm"].__file__, config.output_dir, config.total_steps)
from jaxrl_llm.commands.welcome import welcome
print(welcome())
"""
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == f"{wheel / 'jaxrl_llm' / '__init__.py'} runs/dapo 2"
    assert "--config=grpo\n" in result.stdout and "  dapo " in result.stdout


def test_wheels_hold_the_configs_and_the_command():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.scripts]\njaxrl-llm = "jaxrl_llm.__main__:console"\n' in text
    assert '[tool.hatch.build.targets.wheel.force-include]\n"configs" = "jaxrl_llm/configs"\n' in text


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"jaxrl_llm {jaxrl_llm.__version__}\n"
