"""A run of Tunix: GRPOLearner with its own sampler, PeftTrainer and DPOTrainer, on one mesh."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.struct
import jax
import numpy as np
import optax
from transformers import AutoTokenizer
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.sft import peft_trainer, utils
from tunix.sft.dpo import dpo_trainer

from benchmarks.peers.with_tunix import load
from benchmarks.race.contests import HELD_OUT, Row, Settings
from benchmarks.race.record import Record
from benchmarks.task import Task


def run(method: str, folder: str, rows: list[Row], record: Record, s: Settings, seed: int, output: str) -> None:
    """Trains until the level is reached, or for all steps."""
    del output
    texts = AutoTokenizer.from_pretrained(folder)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    warm_up = optax.linear_schedule(0.0, s.learning_rate, 5)
    rate = optax.schedules.join_schedules([warm_up, optax.constant_schedule(s.learning_rate)], [5])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.0))

    def model():
        return load(Task("", "", Path(folder), None), mesh)[0]

    def steps(rows: list[Row]) -> Iterator[tuple[int, list[Row]]]:
        order = np.random.default_rng(seed).permutation(len(rows))
        for step in range(s.steps):
            if record.done():
                return
            yield step, [rows[i] for i in order[step * s.prompts : (step + 1) * s.prompts]]

    with mesh:
        if method == "grpo":
            _grpo(model(), mesh, texts, optimizer, lambda: steps(rows), record, s, seed)
            return
        trainer, batch = (_dpo if method == "dpo" else _sft)(model, texts, optimizer, s)
        trainer.with_training_hooks(_Hooks(record))
        held_out, own = rows[:HELD_OUT], rows[HELD_OUT:]
        trainer.train((batch(chosen) for _, chosen in steps(own)), [batch(held_out)], skip_jit=False)


class _Hooks(peft_trainer.hooks.TrainingHooks):
    """Keeps the losses of evaluations, which are of one batch each."""

    def __init__(self, record: Record):
        self.record = record

    def on_eval_step_end(self, train_ctx, eval_loss):
        self.record.loss(train_ctx.train_steps, eval_loss)

    def _nothing(self, *_, **__):
        pass

    on_train_start = on_train_end = on_train_step_start = on_train_step_end = on_eval_step_start = _nothing


def _grpo(model, mesh, texts, optimizer, steps, record: Record, s: Settings, seed: int) -> None:
    stop, pad = texts.eos_token_id, texts.convert_tokens_to_ids("<|endoftext|>")

    class Tokenizer:
        """The model's own. Tunix finds padding by its id, so that it must be one that no prompt has."""

        def encode(self, text, **_):
            return texts.encode(text, add_special_tokens=False)

        def decode(self, ids, **_):
            return texts.decode(ids, skip_special_tokens=True)

        bos_id, eos_id, pad_id = (staticmethod(lambda i=i: i) for i in (texts.bos_token_id, stop, pad))

    role = rl_cluster.Role
    config = rl_cluster.ClusterConfig(
        role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
        rollout_engine="vanilla", offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer, eval_every_n_steps=10**6, max_steps=s.steps
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=s.tokens, max_prompt_length=s.prompt_tokens,
            kv_cache_size=s.prompt_tokens + s.tokens, temperature=1.0, top_p=1.0, top_k=None, eos_tokens=[stop],
        ),
    )  # fmt: skip
    cluster = rl_cluster.RLCluster(actor=model, reference=None, tokenizer=Tokenizer(), cluster_config=config)
    generate, sampled = cluster.generate, []

    def kept(*arguments, **options):
        found = generate(*arguments, **options)
        sampled[:] = found.tokens
        return found

    def reward(prompts, completions, answer, **_) -> list[Any]:
        del prompts
        return record(completions, answer, sampled)

    def batches():
        for step, chosen in steps():
            config.rollout_config.seed = seed * s.steps + step  # else its sampler draws the same numbers at each step
            asked = [_text(texts, row["prompt"], True) for row in chosen]
            yield {"prompts": np.array(asked), "answer": np.array([row["answer"] for row in chosen])}

    cluster.generate = kept
    algorithm = grpo_learner.GRPOConfig(
        num_generations=s.group, num_iterations=1, beta=0.0, epsilon=0.2, loss_agg_mode="token-mean"
    )
    grpo_learner.GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=reward).train(batches())


def _text(texts, messages: list[dict[str, str]], asks: bool = False) -> str:
    return texts.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)


def _ids(texts, row: Row, name: str) -> tuple[list[int], list[int]]:
    """The tokens of a row's prompt, and those of its answer."""
    prompt = texts.encode(_text(texts, row["prompt"], True), add_special_tokens=False)
    whole = texts.encode(_text(texts, row["prompt"] + row[name]), add_special_tokens=False)
    assert whole[: len(prompt)] == prompt
    return prompt, whole[len(prompt) :]


def _padded(rows: list[list[int]], width: int, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Rows as one array, and the mask of their tokens."""
    pads = [[0] * (width - len(row)) for row in rows]
    ids = [pad + row if left else row + pad for row, pad in zip(rows, pads, strict=True)]
    ones = [[1] * len(row) for row in rows]
    masks = [pad + row if left else row + pad for row, pad in zip(ones, pads, strict=True)]
    return np.array(ids, np.int32), np.array(masks, np.int32)


@flax.struct.dataclass(frozen=True)
class _Rows(peft_trainer.TrainingInput):
    """Rows with the mask of what is learned, `input_mask`, and that of all their tokens."""

    seen: Any = None


def _sft(model, texts, optimizer, s: Settings):
    """The trainer of answers, and what makes a batch of rows."""
    config = peft_trainer.TrainingConfig(eval_every_n_steps=s.every, max_steps=s.steps)

    def inputs(x):
        return {
            "input_tokens": x.input_tokens,
            "input_mask": x.input_mask,
            "positions": utils.build_positions_from_mask(x.seen),
            "attention_mask": utils.make_causal_attn_mask(x.seen),
        }

    def batch(rows: list[Row]):
        pairs = [_ids(texts, row, "completion") for row in rows]
        width = s.prompt_tokens + s.tokens
        ids, seen = _padded([prompt + answer for prompt, answer in pairs], width)
        learned = seen * (np.arange(width) >= np.array([[len(prompt)] for prompt, _ in pairs]))
        return _Rows(input_tokens=ids, input_mask=learned, seen=seen)

    return peft_trainer.PeftTrainer(model(), optimizer, config).with_gen_model_input_fn(inputs), batch


def _dpo(model, texts, optimizer, s: Settings):
    """The trainer of pairs, and what makes a batch of rows."""
    config = dpo_trainer.DPOTrainingConfig(eval_every_n_steps=s.every, max_steps=s.steps, beta=0.1)

    def batch(rows: list[Row]):
        chosen, rejected = ([_ids(texts, row, name) for row in rows] for name in ("chosen", "rejected"))
        prompts = _padded([prompt for prompt, _ in chosen], s.prompt_tokens, left=True)
        answers = [_padded([answer for _, answer in side], s.tokens) for side in (chosen, rejected)]
        names = ("prompt", "chosen", "rejected")
        parts = zip(names, (prompts, *answers), strict=True)
        return dpo_trainer.TrainingInput(
            **{f"{name}_{of}": x for name, pair in parts for of, x in zip(("ids", "mask"), pair, strict=True)}
        )

    trainer = dpo_trainer.DPOTrainer(model=model(), ref_model=model(), optimizer=optimizer, training_config=config)
    return trainer, batch
