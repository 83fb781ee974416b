"""One task in Tunix: its vanilla sampler, GRPO learner, DPO and fine-tuning trainers."""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate import sampler as sampling

from benchmarks import task
from benchmarks.cases import BETA, is_geometric, lengths, pairs, prompts, reward, texts
from benchmarks.meter import Meter, report
from benchmarks.task import Task

STEPS = 100  # at most; the meter ends a run
NEVER = (-1,)  # no token ends a row


class Numbers:
    """A tokenizer whose texts are ids: a prompt keeps its length (an adapter of transformers would add a token)."""

    def encode(self, text, **_):
        """Ids of a text of numbers."""
        return [int(x) for x in str(text).split()]

    def decode(self, ids, **_):
        """The numbers, as a text."""
        return " ".join(map(str, ids))

    def bos_id(self):
        """Padding, which the sampler puts before prompts that do not begin with it."""
        return 0

    def eos_id(self):
        """The end of text."""
        return 2

    def pad_id(self):
        """Padding."""
        return 0


def load(job: Task, mesh):
    """The model, and its configuration, which Tunix does not read from config.json."""
    config = json.loads((job.folder / "config.json").read_text())
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    sizes = {
        "num_layers": config["num_hidden_layers"], "vocab_size": config["vocab_size"],
        "embed_dim": config["hidden_size"], "hidden_dim": config["intermediate_size"],
        "num_heads": config["num_attention_heads"], "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"], "rope_theta": int(theta),
        "norm_eps": config["rms_norm_eps"],
    }  # fmt: skip
    if config["model_type"] == "qwen2":
        from tunix.models.qwen2 import model, params

        shape = model.ModelConfig(**sizes, use_tied_embedding=True)
    elif config["model_type"] != "llama":
        sys.exit(f"{config['model_type']} is not measured in Tunix")
    else:
        from tunix.models.llama3 import model, params

        # Its llama does not hand rope_theta on; without this the model is another one.
        if not isinstance(model.apply_rope, functools.partial):
            model.apply_rope = functools.partial(model.apply_rope, rope_theta=int(theta))
        shape = model.ModelConfig(**sizes, weight_tying=True)
    with mesh:
        return params.create_model_from_safe_tensors(str(job.folder), shape, mesh, dtype=jnp.dtype(task.dtype())), shape


class Stopping(sampling.Sampler):
    """A sampler whose rows end at their own lengths."""

    def stop_at(self, stops: np.ndarray, prompt: int):
        """The sampler itself, with these lengths behind prompts of `prompt` tokens."""
        self.stops, self.prompt = jnp.asarray(stops), prompt
        return self

    def _sample(self, logits, eos, cache, sampler_state):
        state = super()._sample(logits=logits, eos=eos, cache=cache, sampler_state=sampler_state)
        return dataclasses.replace(state, done=state.done | ((state.decoding_step + 1 - self.prompt) >= self.stops))


def asked(job: Task) -> list[str]:
    """The prompts, as `Numbers` reads them."""
    return [" ".join(map(str, row)) for row in prompts(job.shape)]


def rollout(job: Task, mesh, meter: Meter) -> None:
    """Completions of one batch of prompts."""
    shape = job.shape
    model, config = load(job, mesh)
    geometric = is_geometric(job.case)
    longest = int(lengths(shape).max()) if geometric else shape.new
    cache = sampling.CacheConfig(
        cache_size=shape.prompt + longest, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )  # fmt: skip
    sampler = (Stopping if geometric else sampling.Sampler)(model, Numbers(), cache)
    if geometric:
        sampler.stop_at(lengths(shape), shape.prompt)
    texts = [text for text in asked(job) for _ in range(shape.group)]

    def sample() -> None:
        with mesh:
            sampler(
                texts, max_generation_steps=longest, max_prompt_length=shape.prompt, temperature=1.0, top_p=1.0,
                top_k=None, seed=len(meter.rows), eos_tokens=list(NEVER),
            )  # fmt: skip

    meter.measure(sample)


def grpo(job: Task, mesh, meter: Meter) -> None:
    """GRPO steps: an interval reaches from one call of `generate` to the next."""
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    shape, beta = job.shape, BETA[job.case]
    model, _ = load(job, mesh)
    reference = load(job, mesh)[0] if beta else None
    role = rl_cluster.Role
    config = rl_cluster.ClusterConfig(
        role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(1e-6), eval_every_n_steps=10**6, max_steps=STEPS
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=shape.new, max_prompt_length=shape.prompt, kv_cache_size=shape.prompt + shape.new,
            temperature=1.0, top_p=1.0, top_k=None, eos_tokens=list(NEVER),
        ),
    )  # fmt: skip
    cluster = rl_cluster.RLCluster(actor=model, reference=reference, tokenizer=Numbers(), cluster_config=config)
    generate, begun = cluster.generate, []

    def timed(*arguments, **options):
        jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        if begun:
            meter.stop()
        begun.append(True)
        meter.start()
        return generate(*arguments, **options)

    def odd_share(prompts, completions, **_) -> list[float]:
        return [reward([int(x) for x in text.split()]) for text in completions]

    cluster.generate = timed
    algorithm = grpo_learner.GRPOConfig(num_generations=shape.group, num_iterations=1, beta=beta)
    learner = grpo_learner.GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=odd_share)

    def batches():
        for _ in range(STEPS):
            if meter.rows and meter.enough():
                return
            yield {"prompts": np.array(asked(job))}

    with mesh:
        learner.train(batches())
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    meter.stop()


def offline(job: Task, mesh, meter: Meter) -> None:
    """DPO or SFT steps: an interval reaches from the end of one step to the end of the next."""
    model, _ = load(job, mesh)
    trainer, example = (_dpo if job.case == "dpo" else _sft)(job, mesh, model)
    make, begun = trainer.jit_train_and_eval_step, []

    def patched(*arguments, **options):
        step, evaluate = make(*arguments, **options)

        def timed(*given, **more):
            if not begun:
                meter.start()
                begun.append(True)
            found = step(*given, **more)
            jax.block_until_ready((jax.tree.leaves(found), jax.tree.leaves(nnx.state(model))))
            meter.stop()
            meter.start()
            return found

        timed.jitted_fn = step.func.jitted_fn
        return functools.partial(timed), evaluate

    trainer.jit_train_and_eval_step = patched

    def batches():
        for _ in range(STEPS):
            if meter.rows and meter.enough():
                return
            yield example

    with mesh:
        trainer.train(batches(), skip_jit=False)


def _dpo(job: Task, mesh, model):
    from tunix.sft.dpo import dpo_trainer

    shape = job.shape
    prompt, chosen, rejected = pairs(shape)
    ones = np.ones(chosen.shape, np.int32)
    example = dpo_trainer.TrainingInput(
        prompt_ids=prompt, prompt_mask=np.ones(prompt.shape, np.int32), chosen_ids=chosen, chosen_mask=ones,
        rejected_ids=rejected, rejected_mask=ones,
    )  # fmt: skip
    config = dpo_trainer.DPOTrainingConfig(eval_every_n_steps=10**6, max_steps=STEPS)
    reference = load(job, mesh)[0]
    trainer = dpo_trainer.DPOTrainer(
        model=model, ref_model=reference, optimizer=optax.adamw(1e-6), training_config=config
    )
    return trainer, example


def _sft(job: Task, mesh, model):
    from tunix.sft import peft_trainer, utils

    del mesh
    tokens = texts(job.shape.rows, job.shape.row)
    example = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))
    config = peft_trainer.TrainingConfig(eval_every_n_steps=10**6, max_steps=STEPS)

    def inputs(x):
        return {
            "input_tokens": x.input_tokens,
            "input_mask": x.input_mask,
            "positions": utils.build_positions_from_mask(x.input_mask),
            "attention_mask": utils.make_causal_attn_mask(x.input_mask),
        }

    return peft_trainer.PeftTrainer(model, optax.adamw(1e-6), config).with_gen_model_input_fn(inputs), example


def main(argv: list[str]) -> None:
    """The command line: one task."""
    job = task.read(argv)
    if job.shape.lora:
        sys.exit("adapters are not measured in Tunix")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    meter = Meter(least=job.least, peak=task.jax_peak_gb)
    if job.case.startswith("rollout"):
        rollout(job, mesh, meter)
    elif job.case in ("dpo", "sft"):
        offline(job, mesh, meter)
    else:
        grpo(job, mesh, meter)
    report(meter.summary())


if __name__ == "__main__":
    main(sys.argv[1:])
