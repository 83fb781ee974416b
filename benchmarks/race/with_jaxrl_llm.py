"""A run of this library."""

import jaxrl_llm
from benchmarks.race.contests import HELD_OUT, Row, Settings
from benchmarks.race.record import Record


def run(method: str, folder: str, rows: list[Row], record: Record, s: Settings, seed: int, output: str) -> None:
    """Trains until the level is reached, or for all steps."""
    config = jaxrl_llm.default_config()
    config.model.path, config.model.dtype, config.output_dir, config.seed = folder, "float32", output, seed
    config.total_steps, config.batch.prompts = s.steps, s.prompts
    config.optimizer.learning_rate, config.optimizer.b2, config.optimizer.warmup_steps = s.learning_rate, 0.99, 5
    config.checkpoint.every, config.logging.backends = 0, ()

    class Ends:
        """Keeps losses, and ends the run at the level."""

        def on_step(self, _):
            return "stop" if record.done() else None

        def on_evaluate(self, moment):
            record.loss(moment.step, moment.metrics["eval/loss"])
            return "stop" if record.done() else None

    if method == "grpo":
        config.rollout.group_size, config.eval.every = s.group, -1
        config.rollout.max_prompt_length, config.rollout.max_completion_length = s.prompt_tokens, s.tokens
        config.algorithm.aggregation, config.algorithm.beta, config.algorithm.epsilon_high = "token", 0.0, 0.28
        jaxrl_llm.train(config, rows, rewards=record, callbacks=[Ends()])
        return
    config.data.max_length, config.eval.every, config.eval.prompts = s.prompt_tokens + s.tokens, s.every, HELD_OUT
    config.eval.measure = "loss"
    config.algorithm.name = {"sft": "sft", "dpo": "preference"}[method]
    if method == "dpo":
        config.algorithm.loss, config.algorithm.beta = "dpo", 0.1
    jaxrl_llm.train(config, rows[HELD_OUT:], eval_dataset=rows[:HELD_OUT], callbacks=[Ends()])
