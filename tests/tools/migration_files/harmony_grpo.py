from adaptive_harmony import StringThread
from adaptive_harmony.common import GRPO
from my_graders import grader, load_threads


async def main(config, ctx):
    model = (
        await ctx.client.model("model_registry://llama-3.1-8b-instruct").tp(ctx.world_size).spawn_train("policy", 4096)
    )
    dataset: list[StringThread] = load_threads(config)
    await GRPO(
        dataset=dataset,
        model=model,
        grader=grader,
        lr=7.5e-7,
        samples_per_batch=128,
        samples_per_mini_batch=32,
        completions_per_sample=8,
        kl_beta=0.01,
        max_grad_norm=1.0,
    ).run()
    await model.save("my-model")
