"""The programs by which a step scores its completions: of reward models, and of judges that the run loads."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config import batch_rows
from jaxrl_llm.distributed.sharding import over, rollout_mesh, row_shards
from jaxrl_llm.rewards.judge import PairwiseJudge
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.tools.plan.compiler import Compiler, ProgramStats
from jaxrl_llm.tools.plan.sampling import ScannedEngine, compares_with_greedy, compile_rollout
from jaxrl_llm.tools.plan.shapes import process_mesh
from jaxrl_llm.tools.plan.step import Step, rows_shape
from jaxrl_llm.training.local_judge import reply_options, sampling_of
from jaxrl_llm.training.reward_models import NARROWEST, label_rows, right_rows, score_rows

PROGRAMS: dict[str, tuple[Any, ...]] = {  # of reward models by their heads, with the labels that each reads
    "score": (score_rows,), "step": (right_rows, 1), "lm": (label_rows, (1, 0)),
}  # fmt: skip


def compile_graders(step: Step, held: int) -> list[ProgramStats]:
    """Return the programs of all graders, on rows of their longest; `held` bytes are on every device meanwhile.

    The devices of a process score the rows that it sampled, a greedy completion of each prompt too where a rule
    compares with it.
    """
    config, target = step.config, step.target
    own, simulated = process_mesh(step.mesh, target.host), not target.exact
    compiler = Compiler(held, own.size, simulated, dict(target.options))
    prompts, group_size = config.batch.prompts, config.rollout.group_size
    for grader in step.shapes.graders:
        of_run = () if grader.offload else grader.params
        if isinstance(grader.judge, PairwiseJudge):
            asked = prompts * math.comb(group_size, 2) * (2 if grader.judge.both_orders else 1)
        else:
            asked = batch_rows(config) + (prompts if compares_with_greedy(config) else 0)
        on = own
        if grader.judge is not None and own.size > 1:
            on = rollout_mesh(own, "auto", grader.net.config.kv_heads, target.host)
        with jax.set_mesh(on):
            params, shards = over(grader.net.shapes(), on), row_shards(on)
            rows = -(-grader.rows // shards) * shards
            calls = math.ceil(asked * own.size / step.mesh.size / rows)
            if grader.judge is not None:
                sampling = sampling_of(reply_options(grader.judge)[0])
                engine = (ScannedEngine if simulated else Engine)(sampling, 1, grader.reply, net=grader.net, eos=(0,))
                compile_rollout(compiler, grader.name, engine, rows, grader.width, params, on, on, calls, of_run)
                continue
            width = NARROWEST
            while width < grader.width:
                width *= 2
            ints = rows_shape(on, (rows, width), jnp.int32)
            program, *labels = PROGRAMS[grader.net.config.head]
            compiler.add(grader.name, program, (*labels, grader.net, params, ints, ints), times=calls, of_run=of_run)
    return compiler.programs
