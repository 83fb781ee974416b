python examples/scripts/ppo/ppo.py --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style \
  --model_name_or_path EleutherAI/pythia-1b-deduped --reward_model_path my/pythia-reward --output_dir ppo-model \
  --num_ppo_epochs 2 --num_mini_batches 2 --learning_rate 3e-6 --per_device_train_batch_size 16 \
  --gradient_accumulation_steps 2 --total_episodes 10000 --missing_eos_penalty 1.0 --sft_model_path EleutherAI/pythia-1b
