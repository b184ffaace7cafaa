#!/usr/bin/env bash
# GAPO with the paper's settings on one node. Written for GPUs, not yet run on them.
#   hardware   8 GPUs with 80 GB: 4 train (tensor parallel 2, data parallel 2), 4 generate
#   model      Qwen2.5-Math-1.5B (MODEL: a folder or a hub name)
#   data       JSON lines with `input` and `label` (DATA)
#   needs      requirements/gpu.txt, `gapo patch apply`, and:  ray start --head
set -euo pipefail

MODEL=${MODEL:?a Hugging Face folder or name}
DATA=${DATA:?JSON lines with input and label}
OUTPUT=${OUTPUT:-runs/gapo-1.5b}
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

exec python -m openrlhf.cli.train_ppo_ray \
    --policy_loss gapo --eps_lo 3e-3 --eps_hi_max 5e-3 \
    --actor.backend megatron --megatron.tensor_model_parallel_size 2 --megatron.sequence_parallel \
    --actor.num_nodes 1 --actor.num_gpus_per_node 4 --vllm.num_engines 4 --vllm.tensor_parallel_size 1 \
    --actor.model_name_or_path "$MODEL" \
    --reward.remote_url "$REPOSITORY/gapo_megatron/rewards/math.py" \
    --data.prompt_dataset "$DATA" --data.input_key input --data.label_key label --data.apply_chat_template \
    --data.max_len 4096 --rollout.max_new_tokens 3072 --rollout.temperature 1.0 --rollout.top_p 1.0 \
    --rollout.batch_size 256 --rollout.n_samples_per_prompt 8 --rollout.micro_batch_size 8 \
    --train.batch_size 512 --train.micro_batch_size 8 --train.max_tokens_per_gpu 16384 \
    --algo.advantage.estimator dr_grpo --algo.kl.init_coef 0 \
    --actor.adam.lr 1e-6 --actor.adam.weight_decay 0.01 --actor.max_norm 1.0 --actor.lr_scheduler constant \
    --actor.gradient_checkpointing_enable --vllm.enable_prefix_caching --vllm.gpu_memory_utilization 0.85 \
    --ckpt.output_dir "$OUTPUT/model" --ckpt.path "$OUTPUT/checkpoints" --ckpt.save_steps 20
