"""`Algorithm` and `BatchSpec`: the data and models that an algorithm needs, and the rows that its steps compute."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """The facts of `algorithm.name` and `algorithm.loss` that a run depends on."""

    data: str  # kind of rows: prompts, completions, pairs, triples, labels or steps
    group_size: int  # adjacent rows that stay together: completions of a prompt, a pair, kto's row and its mismatch
    together: int  # those of them that no micro-batch splits: of completions one, or a pair where pairs are compared
    online: bool  # samples its completions
    needs_reference: bool  # the objective reads the reference's log-probs
    has_critic: bool

    @property
    def mismatched(self) -> bool:
        """True where each labelled row is followed by its prompt with the completion of another row (kto)."""
        return self.data == "labels" and self.group_size == 2


@dataclass(frozen=True)
class BatchSpec:
    """The rows of a step, and how they are split into updates and forward passes."""

    prompts: int  # of given data its examples: rows, pairs, or groups of packed rows
    group_size: int
    minibatches: int
    microbatch_rows: int
    num_iterations: int
    shuffle: bool
    seed: int
    logps_microbatch_rows: int = 0

    @property
    def rows(self) -> int:
        """The number of rows N of a step."""
        return self.prompts * self.group_size

    @property
    def forward_rows(self) -> int:
        """Rows of one pass without gradients: by default a micro-batch, or a minibatch where it is not split."""
        return self.logps_microbatch_rows or self.microbatch_rows or self.rows // self.minibatches
