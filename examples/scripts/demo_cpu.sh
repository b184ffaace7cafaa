#!/usr/bin/env bash
# GAPO on a Megatron actor, on a machine without a GPU.
#   hardware   2 cores, 18 GiB of memory
#   model      SmolLM2-135M-Instruct, split over 2 pipeline stages (9 heads do not divide by 2)
#   data       small additions and subtractions; `gapo demo` writes both and then runs this script
#   needs      a running Ray with 3 schedulable "GPUs":  ray start --head --num-gpus 3 --num-cpus 7
set -euo pipefail

MODEL=${MODEL:-runs/demo/models/smollm2-135m-instruct}
DATA=${DATA:-runs/demo/data/train.jsonl}
OUTPUT=${OUTPUT:-runs/demo}
SEED=${SEED:-42}
BACKEND=${BACKEND:-megatron} # or deepspeed: the same run on OpenRLHF's own actor
PYTHON=${PYTHON:-python}
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false RAY_DEDUP_LOGS=0
export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 # GiB

if [ "$BACKEND" = megatron ]; then
    BACKEND_FLAGS=(--actor.backend megatron --megatron.pipeline_model_parallel_size 2)
else
    BACKEND_FLAGS=(--actor.backend deepspeed --ds.zero_stage 2 --ds.attn_implementation sdpa)
fi

exec "$PYTHON" -m openrlhf.cli.train_ppo_ray \
    --policy_loss gapo --eps_lo 3e-3 --eps_hi_max 5e-3 \
    --actor.num_gpus_per_node 2 "${BACKEND_FLAGS[@]}" \
    --actor.model_name_or_path "$MODEL" \
    --reward.remote_url "$REPOSITORY/gapo_megatron/rewards/math.py" \
    --data.prompt_dataset "$DATA" --data.input_key input --data.label_key label --data.apply_chat_template \
    --data.max_len 96 --rollout.max_new_tokens 16 --rollout.temperature 1.0 \
    --rollout.batch_size 8 --rollout.n_samples_per_prompt 8 --rollout.micro_batch_size 16 \
    --train.batch_size 32 --train.micro_batch_size 16 --train.max_tokens_per_gpu 640 \
    --algo.advantage.estimator dr_grpo --algo.kl.init_coef 0 \
    --actor.adam.lr 2e-5 --actor.lr_scheduler constant --train.seed "$SEED" \
    --vllm.num_engines 1 --vllm.enforce_eager --vllm.sync_backend gloo \
    --ckpt.output_dir "$OUTPUT/model" --ckpt.path "$OUTPUT/checkpoints"
