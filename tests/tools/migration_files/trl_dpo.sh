#!/bin/bash
# DPO on four GPUs
set -euo pipefail
MODEL=Qwen/Qwen2-0.5B-Instruct
export RUN=runs/qwen-dpo

accelerate launch --config_file multi_gpu.yaml --num_processes 4 trl/scripts/dpo.py \
    --model_name_or_path $MODEL \
    --dataset_name trl-lib/ultrafeedback_binarized --dataset_streaming \
    --learning_rate 5.0e-7 \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --max_steps 1000 --warmup_steps 100 \
    --loss_type sigmoid sft --loss_weights 1.0 0.2 --beta 0.05 \
    --eval_strategy steps --eval_steps 50 \
    --max_length 2048 --no_remove_unused_columns \
    --use_peft --lora_r 32 --lora_alpha 16 --output_dir ${RUN}
