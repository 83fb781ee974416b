"""What `python -m jaxrl_llm.train` says to a person who gives it nothing."""

from pathlib import Path

from jaxrl_llm.commands.welcome import welcome

ROOT = Path(__file__).parent.parent.parent


def test_every_configuration_and_command_is_named(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    text = welcome()
    for path in (ROOT / "configs").glob("*.py"):
        if "def get_config(" in path.read_text(encoding="utf-8"):
            assert f"  configs/{path.name} " in text
    assert "configs/dpo.py " in text and "DPO: the right answer is chosen, a wrong one rejected" in text
    assert "configs/rlhf.py" not in text, "it has stages, and no get_config"
    for name in ("generate", "evaluate", "export", "stages", "preview", "plan", "migrate", "report"):
        assert f"python -m jaxrl_llm {name} " in text
    assert "welcome" not in text
    assert all(len(line) <= 122 for line in text.splitlines())


def test_own_configurations_come_first(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").write_text('"""My run. It is long."""\n\n\ndef get_config():\n    raise\n')
    (tmp_path / "configs" / "shared.py").write_text("STEPS = 3\n")
    monkeypatch.chdir(tmp_path)
    text = welcome()
    assert "  configs/mine.py  My run\n" in text and "shared.py" not in text
    assert "python -m jaxrl_llm.train --config.output_dir=runs/first\n" in text


def test_train_without_arguments_prints_it_and_writes_nothing(run_python, tmp_path):
    result = run_python("-m", "jaxrl_llm.train")
    assert (result.returncode, result.stderr) == (0, "")
    assert "python -m jaxrl_llm.train --config=" in result.stdout
    assert not [*tmp_path.iterdir()]
