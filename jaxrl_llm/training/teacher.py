"""The teacher of a run: a model of any size and family, which the policy learns from by its log-probs of tokens."""

import dataclasses

import jax
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.distributed.sharding import on_device, on_host, row_shards
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.training.passes import scored_logps


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher with the tokens of the policy. Its parameters may be in the host's memory."""

    net: Net
    params: Params
    mesh: Mesh

    @classmethod
    def of(cls, model: Model, mesh: Mesh, offload: bool = False) -> "Teacher":
        """The teacher that a model is; with `offload` its parameters visit the device for each pass."""
        return cls(model.net, on_host(model.params) if offload else model.params, mesh)

    def logps(self, inputs: Inputs, temperature: float, rows: int) -> jax.Array:
        """Log-probs `[N,T]` of the tokens, by one forward pass, `rows` rows at a time or as the layout says."""
        return scored_logps(self.net, on_device(self.params), inputs, temperature, rows, row_shards(self.mesh))
