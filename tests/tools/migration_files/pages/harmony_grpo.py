from adaptive_harmony import InputConfig, recipe_main
from adaptive_harmony.common import GRPO
from my_graders import dataset, grader


class MyConfig(InputConfig):
    lr: float = 2e-6
    kl: float = 0.02


@recipe_main
async def main(config: MyConfig, ctx):
    model = await ctx.client.model("hf://Qwen/Qwen3-0.6B").tp(ctx.world_size).spawn_train("m", 4096)
    await GRPO(dataset, model, grader, 8, lr=config.lr, kl_beta=config.kl, samples_per_batch=8).run()
    await model.save("out")
