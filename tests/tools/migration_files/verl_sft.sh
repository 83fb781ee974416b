torchrun --standalone --nnodes=1 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer \
    data.train_files=rows.parquet data.val_files=held.parquet \
    data.prompt_key=prompt data.max_length=2048 data.train_batch_size=64 \
    optim.lr=1e-4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \
    model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear \
    trainer.n_gpus_per_node=4 trainer.total_training_steps=100 trainer.logger=console
