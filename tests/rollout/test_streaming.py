"""Rows that are streamed as they finish, in several processes; test_engine.py has those of one."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

TWO_PROCESSES = """
import sys
import jax
import numpy as np
process = int(sys.argv[2])
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, process)
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.distributed.sharding import local_rows, make_mesh, rows_to_global, shardings

net = Net(ModelConfig(vocab_size=30, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, init_scale=0.4))
engine = Engine(SamplingParams(), 3, 10, 3, 6, net=net, eos=(5, 6, 7))
prompts = np.random.default_rng(process).integers(0, 30, (2, 6)).astype(np.int32)
mesh, streamed = make_mesh(2), {}
with jax.set_mesh(mesh):
    shapes = jax.eval_shape(net.init, jax.random.key(0))
    params = jax.jit(net.init, out_shardings=shardings(shapes, mesh))(jax.random.key(0))
    rows = rows_to_global((prompts, np.ones_like(prompts)), mesh)
    rollout = engine.generate(params, *rows, jax.random.key(1), on_finished=streamed.__setitem__)
    tokens, lengths = local_rows((rollout.tokens, rollout.lengths))
assert streamed == {row: ids[6 : 6 + n].tolist() for row, (ids, n) in enumerate(zip(tokens, lengths))}, streamed
print(len(streamed), "rows,", len(set(lengths.tolist())) > 1)
"""


@pytest.mark.slow
def test_each_process_streams_its_own_rows(run_python):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_python, "-c", TWO_PROCESSES, str(port), str(index)) for index in range(2)]
        outputs = [run.result() for run in runs]
    for output in outputs:
        assert output.returncode == 0, output.stdout + output.stderr
        assert output.stdout.endswith("6 rows, True\n")
