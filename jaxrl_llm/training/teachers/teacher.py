"""The teacher of a run: a model of any size and family, which the policy learns from by its log-probs of tokens."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.distributed.sharding import on_device, on_host, row_shards
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.training.passes import scored_distributions, scored_logps, scored_top
from jaxrl_llm.training.reference import Reference
from jaxrl_llm.training.update import State


@dataclasses.dataclass(frozen=True)
class TeacherSpec:
    """Settings of a teacher, from `teacher`."""

    divergence: bool  # its distributions are in the loss, and not its log-probs of sampled tokens in the advantages
    temperature: float
    top_k: int  # of the distributions; 0: the whole vocabulary
    offload: bool  # its parameters wait in the host's memory between passes
    column: str  # of the data, which names another teacher


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher, by the tokens that it is given. Its parameters may be in the host's memory."""

    spec: TeacherSpec
    net: Net
    params: Params
    mesh: Mesh
    vocab: int  # tokens that the policy's head has
    tokenizer: Any = None

    @classmethod
    def of(cls, spec: TeacherSpec, model: Model, mesh: Mesh, vocab: int) -> "Teacher":
        """The teacher that a model is; with `offload` its parameters visit the device for each pass."""
        params = on_host(model.params) if spec.offload else model.params
        return cls(spec, model.net, params, mesh, vocab, model.tokenizer)

    def logps(self, inputs: Inputs, rows: int) -> jax.Array:
        """Log-probs `[N,T]` of the tokens, by one forward pass, `rows` rows at a time or as the layout says."""
        params, temperature = on_device(self.params), self.spec.temperature
        return scored_logps(self.net, params, inputs, temperature, rows, row_shards(self.mesh))

    def with_distributions(self, batch: Batch, inputs: Inputs, rows: int) -> Batch:
        """The batch with the teacher's distributions of its tokens: the whole, or their likeliest tokens."""
        params, shards, spec = on_device(self.params), row_shards(self.mesh), self.spec
        if spec.top_k:
            vocab = min(self.vocab, self.net.config.vocab_size)
            top = scored_top(self.net, params, inputs, spec.temperature, spec.top_k, vocab, rows, shards)
            return batch.replace(teacher_ids=top.ids, teacher_top_logps=top.logps)
        hidden, head = scored_distributions(self.net, params, inputs, rows, shards)
        cap = self.net.config.logit_softcap
        scalars = dataclasses.replace(
            batch.scalars, teacher_head=head, teacher_softcap=None if cap is None else np.float32(cap)
        )
        return batch.replace(teacher_hidden=hidden, scalars=scalars)


@dataclasses.dataclass
class SelfTeacher:
    """The policy as its own teacher: as it is in each step, or a copy of its start that may follow it."""

    spec: TeacherSpec
    net: Net
    mesh: Mesh
    copy: Reference | None  # None: the policy as it is

    def at(self, state: State) -> Teacher:
        """The teacher of the step that starts from `state`, for which a copy that follows the policy moves."""
        if self.copy is not None:
            self.copy.sync(state)
        params = state.params if self.copy is None else self.copy.params
        return Teacher(self.spec, self.net, params, self.mesh, self.net.config.vocab_size)

    def arrays(self) -> dict[str, Any]:
        """The trees of arrays that a checkpoint holds, by name: the copy, if it follows the policy."""
        return {} if self.copy is None else self.copy.arrays()

    def restore(self, arrays: dict[str, Any]) -> None:
        """Take up the trees of `arrays`; without them the copy stays as the run started."""
        if self.copy is not None:
            self.copy.restore(arrays)
