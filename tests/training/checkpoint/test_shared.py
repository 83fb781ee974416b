"""The folder of checkpoints that all processes of a run share."""

from pathlib import Path

from jaxrl_llm.training.checkpoint import outputs


def test_a_folder_that_was_not_there_when_this_process_looked(monkeypatch, tmp_path):
    """As NFS has it: its clients remember for a minute that a name was not there, unless they make it."""
    folder, made, exists, mkdir = tmp_path / "checkpoints", [], Path.exists, Path.mkdir

    def make(path, **options):
        made.append(path)
        mkdir(path, **options)

    def gather(value):
        """The values of both; what process 0 does happens between."""
        if isinstance(value, str):
            return ["0" * 32, value]
        if value is False:
            mkdir(folder)
            (folder / f".seen_by_all.{'0' * 32}").touch()
            return [True, False]
        return [[True, "first"], value]

    monkeypatch.setattr(outputs.jax, "process_count", lambda: 2)
    monkeypatch.setattr(outputs.jax, "process_index", lambda: 1)
    monkeypatch.setattr(outputs.processes, "gather", gather)
    monkeypatch.setattr(outputs, "SHOWN_SECONDS", 0.0)
    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "exists", lambda path: bool(made) and exists(path))
    outputs.check_shared(folder)
    assert made == [folder]
