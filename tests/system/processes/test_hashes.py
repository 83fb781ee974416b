"""Checkpoints of several processes: each hashes the files that it has written."""

import json
import shutil

import pytest

from jaxrl_llm.training.checkpoint import checksums

SCRIPT = """
import jax, numpy as np
from jaxrl_llm.distributed import processes
processes.join()
from jaxrl_llm.distributed.sharding import make_mesh, rows_to_global
from jaxrl_llm.training.checkpoint import checksums
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.update import State

hashed, hashes = [], checksums._hashes
checksums._hashes = lambda folder, names: (hashed.extend(names := list(names)), hashes(folder, names))[1]
mesh = make_mesh(data=1, fsdp=2)
with jax.set_mesh(mesh), Checkpoints("checkpoints") as checkpoints:
    array = rows_to_global(np.arange(2 * 4096, dtype=np.float32).reshape(2, -1), mesh)
    state = State(rows_to_global(np.zeros(1, np.int32), mesh), {"q": {"kernel": array}}, ())
    checkpoints.save(1, state, {}, {"reference": {"q": array}}, final=True)
    print(any("ocdbt.process_0/" in x for x in hashed), any("ocdbt.process_1/" in x for x in hashed))
    print(checkpoints.damage(1))
    checksums.damage = lambda *_: "torn" if jax.process_index() else None
    print(checkpoints.damage(1))
processes.end(0)
"""


@pytest.mark.slow
def test_each_process_hashes_its_own_files(together, tmp_path):
    ended = together(2, "-c", SCRIPT)
    assert [process.code for process in ended] == [0, 0], ended[0].err + ended[1].err
    torn = "torn (as process 1 reads it)"
    expected = [["True False", "None", torn], ["False True", "None", torn]]
    assert [process.out.splitlines() for process in ended] == expected
    step = tmp_path / "checkpoints" / "1"
    names = {path.relative_to(step).as_posix() for path in step.glob("*/**/*") if path.is_file()}
    assert json.loads((step / checksums.HASHES).read_text()).keys() == names
    assert {name.split("/")[0] for name in names if "ocdbt.process_1/" in name} == {"state", "reference"}
    (own,) = (step / "state" / "ocdbt.process_1" / "d").iterdir()
    data = bytearray(own.read_bytes())
    data[len(data) // 2] ^= 1
    own.write_bytes(data)
    assert f"the content of {own} has changed" in (checksums.damage(step) or "")


def test_hashes_of_processes_are_gathered(tmp_path):
    """What a file system does not show yet, or another length of a file, is hashed by the first process."""
    part = tmp_path / "state"
    for number in range(3):
        (part / f"ocdbt.process_{number}").mkdir(parents=True)
        (part / f"ocdbt.process_{number}" / "data").write_text("as it was")
        checksums.write_own_hashes(part, number)
    (part / "manifest").write_text("of all")
    (part / ".hashes_0.json").write_text('{"ocdbt')
    (part / "ocdbt.process_1" / "data").write_text("and as it is")
    shutil.copytree(tmp_path, tmp_path.with_name("alone"))
    for file in tmp_path.with_name("alone").glob("*/.hashes*"):
        file.unlink()
    for folder in (tmp_path, tmp_path.with_name("alone")):
        checksums.write_hashes(folder)
    assert (tmp_path / checksums.HASHES).read_text() == (tmp_path.with_name("alone") / checksums.HASHES).read_text()
    assert checksums.damage(tmp_path) is None and not [*part.glob(".*")]
