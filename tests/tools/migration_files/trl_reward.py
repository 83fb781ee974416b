from datasets import load_dataset
from trl import RewardConfig, RewardTrainer

data = load_dataset("trl-lib/ultrafeedback_binarized")
RewardTrainer(
    model="Qwen/Qwen3-0.6B",
    args=RewardConfig(
        output_dir="qwen-reward", center_rewards_coefficient=0.01, max_steps=64, gradient_accumulation_steps=2
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
).train()
