"""Parameters that several processes have parts of, copied to the host."""

import pytest

SCRIPT = """
import jax, numpy as np
from jaxrl_llm.distributed import processes
processes.join()
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.training.rollouts import rollout_files

compiled, mesh = [], make_mesh(data=1, fsdp=2)
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
with jax.set_mesh(mesh):
    model = load_model("embedded:sort", mesh=mesh)
    save_hf(model, "model")
    compiled.clear()
    save_hf(model, "again")
    print(sum("backend_compile" in name for name in compiled), "programs")
    arrays = rollout_files.policy_on_host(model.params)
    rollout_files.AT_ONCE = 0
    in_turn = rollout_files.policy_on_host(model.params)
    jax.tree.map(np.testing.assert_array_equal, arrays, in_turn)
    if jax.process_index() == 0:
        whole = load_model("again").params
        for path, x in jax.tree_util.tree_leaves_with_path(whole):
            np.testing.assert_array_equal(in_turn[jax.tree_util.keystr(path)], x)
    print(len(in_turn), "arrays")
processes.end(0)
"""


@pytest.mark.slow
def test_the_first_process_has_all_of_them(together):
    """The file's tensors by programs that are kept, and the arrays of a policy at once or layer by layer."""
    ended = together(2, "-c", SCRIPT)
    assert [process.code for process in ended] == [0, 0], ended[0].err + ended[1].err
    assert [process.out.splitlines() for process in ended] == [
        ["0 programs", "12 arrays"],
        ["0 programs", "0 arrays"],
    ]
