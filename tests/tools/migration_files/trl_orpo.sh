trl orpo --model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name trl-lib/ultrafeedback_binarized \
  --beta 0.2 --max_steps 300 --per_device_train_batch_size=4 --optim paged_adamw_8bit
