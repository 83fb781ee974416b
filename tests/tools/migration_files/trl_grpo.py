import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


def reward_digits(completions, answer, **kwargs):
    return [float(wanted in completion) for completion, wanted in zip(completions, answer, strict=True)]


def main():
    dataset = load_dataset("openai/gsm8k", "main", split="train")
    args = GRPOConfig(
        output_dir="qwen-grpo",
        learning_rate=2e-6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=384,
        max_steps=200,
        warmup_ratio=0.05,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        beta=0.02,
        epsilon_high=0.28,
        reward_weights=[1.0, 0.5],
        use_vllm=True,
        vllm_mode="colocate",
        bf16=True,
        logging_steps=5,
        log_completions=True,
        save_steps=100,
        report_to="wandb",
        model_init_kwargs={"dtype": torch.bfloat16},
        dataloader_drop_last=True,
        frobnicate_steps=3,
    )
    trainer = GRPOTrainer(
        model=MODEL,
        args=args,
        reward_funcs=[reward_digits, "my/reward-model"],
        train_dataset=dataset,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
