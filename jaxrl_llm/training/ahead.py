"""The learner's programs, compiled while the first evaluation and the first rollout sample.

Rows of the same shapes and shardings stand for the batch that is not there yet. Compiling fills the caches of the
jitted functions, in which the first step then finds its programs. Nothing is computed with them: over several devices
a program that starts here could meet the rollout's in another order on each (see distributed/turns.py).
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
from jax.sharding import Mesh

from jaxrl_llm.distributed.sharding import row_shards, rows_to_global
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.online import OnlineSource
from jaxrl_llm.training.packing.planner import typical_rollouts
from jaxrl_llm.training.passes import scored_logps, scored_norms
from jaxrl_llm.training.setup.run import Run
from jaxrl_llm.training.teachers.teacher import Teacher
from jaxrl_llm.training.update import merge_frozen


def compilations(run: Run) -> Iterator[Callable[[], object]]:
    """Functions that compile a program each, in the order in which a step needs them.

    There are none for what is not known to have these shardings: several processes, a critic, a replay buffer, a full
    KL, a teacher's distributions or context, rows that may have images, replayed experts, offline batches.
    """
    source, mesh, size = run.source, run.mesh, run.batch.rows // run.batch.minibatches
    if jax.process_count() > 1 or not isinstance(source, OnlineSource):
        return
    learner, engine, teacher = source.learner, source.producer.worker.engine, source.learner.teacher
    spec, reference = learner.spec, learner.reference
    if learner.critic is not None or learner.replay is not None or spec.full_kl:
        return
    if learner.net.config.vision is not None or engine.record_experts:
        return
    if teacher is not None and (teacher.spec.divergence or learner.context is not None):
        return
    shape = engine.group_size, learner.prompt_width, engine.max_completion_length
    inputs = rows_to_global(learner.inputs(*typical_rollouts(run.batch.rows, *shape)[:3]), mesh)

    def logps(params, net: Net = learner.net, program: Any = scored_logps) -> Callable[[], object]:
        arguments = (inputs, spec.temperature, run.batch.forward_rows, row_shards(mesh))
        return lambda: program.lower(net, jax.tree.map(on_device, params), *arguments).compile()

    def on_device(x: jax.Array) -> jax.ShapeDtypeStruct:
        """The shape of an array that is moved to the device, where it may be in the host's memory now."""
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind("device"))

    if learner.advantages.asks_for("logit_norms"):
        yield logps(merge_frozen(run.state, run.frozen).params, program=scored_norms)
    elif spec.old_logps == "trainer":
        yield logps(merge_frozen(run.state, run.frozen).params)
    if reference is not None:
        yield logps(reference.params)
    if isinstance(teacher, Teacher):
        yield logps(teacher.params, teacher.net)
    minibatch = learner.like(*typical_rollouts(size, *shape)[:3])
    scalars, update = learner.scalars(minibatch), cast(Any, run.update)
    minibatch = rows_to_global(run.pack.of_rows(size)(minibatch), mesh).replace(scalars=scalars)
    yield lambda: update.lower(run.state, minibatch, run.frozen).compile()


class CompiledAhead:
    """A context manager that compiles in a thread. Call `wait` before the first of the programs is called.

    What is waited counts in `watch` as the phase compile. An error is dropped: the call meets it again, in its place.
    Whoever leaves it earlier waits for the program that is being compiled, and no further one is.
    """

    def __init__(self, functions: Iterator[Callable[[], object]], mesh: Mesh, watch: Stopwatch):
        self._functions, self._mesh, self._watch = functions, mesh, watch
        self._thread = threading.Thread(target=self._compile, name="compile ahead")
        self._left = False

    def __enter__(self) -> "CompiledAhead":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        self.wait()

    def wait(self) -> None:
        """Wait until all is compiled."""
        if self._thread.is_alive():
            with self._watch("compile"):
                self._thread.join()

    def _compile(self) -> None:
        with jax.set_mesh(self._mesh):
            try:
                for function in self._functions:
                    if self._left:
                        return
                    function()
            except Exception:
                return
