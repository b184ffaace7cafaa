#!/usr/bin/env bash
# GAPO for a 7B model over several nodes. Written for GPUs, not yet run on them.
#   hardware   NODES + ENGINE_NODES nodes of 8 GPUs with 80 GB; tensor parallel stays within a node
#   model      a Llama, Mistral, Qwen2 or Qwen3 model (MODEL, on a path that every node sees)
#   data       JSON lines with `input` and `label` (DATA)
#   needs      on every node requirements/gpu.txt and `gapo patch apply`;
#              on the first:   ray start --head --port 6379
#              on the others:  ray start --address FIRST_NODE:6379
#              then this script, once, on the first node
set -euo pipefail

MODEL=${MODEL:?a Hugging Face folder or name}
DATA=${DATA:?JSON lines with input and label}
NODES=${NODES:-2}               # that train
ENGINE_NODES=${ENGINE_NODES:-2} # that generate
OUTPUT=${OUTPUT:-runs/gapo-7b}
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

exec python -m openrlhf.cli.train_ppo_ray \
    --policy_loss gapo --eps_lo 3e-3 --eps_hi_max 5e-3 \
    --actor.backend megatron --megatron.sequence_parallel \
    --megatron.tensor_model_parallel_size 4 --megatron.pipeline_model_parallel_size 2 \
    --actor.num_nodes "$NODES" --actor.num_gpus_per_node 8 \
    --vllm.num_engines "$((ENGINE_NODES * 4))" --vllm.tensor_parallel_size 2 \
    --actor.model_name_or_path "$MODEL" \
    --reward.remote_url "$REPOSITORY/gapo_megatron/rewards/math.py" \
    --data.prompt_dataset "$DATA" --data.input_key input --data.label_key label --data.apply_chat_template \
    --data.max_len 8192 --rollout.max_new_tokens 7168 --rollout.temperature 1.0 --rollout.top_p 1.0 \
    --rollout.batch_size 256 --rollout.n_samples_per_prompt 8 --rollout.micro_batch_size 8 \
    --train.batch_size 512 --train.micro_batch_size 8 --train.max_tokens_per_gpu 16384 \
    --algo.advantage.estimator dr_grpo --algo.kl.init_coef 0 \
    --actor.adam.lr 1e-6 --actor.adam.weight_decay 0.01 --actor.max_norm 1.0 --actor.lr_scheduler constant \
    --actor.gradient_checkpointing_enable --vllm.enable_prefix_caching --vllm.gpu_memory_utilization 0.85 \
    --ckpt.output_dir "$OUTPUT/model" --ckpt.path "$OUTPUT/checkpoints" --ckpt.save_steps 20
