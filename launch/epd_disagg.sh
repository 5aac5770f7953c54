#!/usr/bin/env bash
# Encode, prefill and decode apart (E/P/D): encode workers fetch media or load embedding files,
# prefill workers read the embeddings and fill the KV cache, decode workers stream the answer.
#
# usage: [NAME=VALUE...] launch/epd_disagg.sh [--dry-run] [-- WORKER-ARG...]
#
# Environment of this script
#   ENCODE_ENGINE_ARGS, PREFILL_ENGINE_ARGS,
#   DECODE_ENGINE_ARGS                       YAML files of engine arguments
#   ENCODE_ENDPOINT                          where encode workers serve and are called
#                                            (default dyn://dynamo.tensorrt_llm_encode.generate)
#   ENCODE_CUDA_VISIBLE_DEVICES,
#   PREFILL_CUDA_VISIBLE_DEVICES,
#   DECODE_CUDA_VISIBLE_DEVICES              GPUs of a worker, for ENGINE=tensorrt_llm 0; 1; 2 by default,
#                                            and 0; 0,1,2,3; 4,5,6,7 with a MODEL_PATH of your own; `0,1;2,3`
#                                            gives 0,1 to the first worker and 2,3 to the second; empty leaves
#                                            the choice open
#   NUM_ENCODE_WORKERS, NUM_PREFILL_WORKERS,
#   NUM_DECODE_WORKERS                       how many (default 1)
# Without MODEL_PATH it serves Qwen/Qwen2.5-VL-7B-Instruct, whose images TensorRT-LLM encodes in a worker of
# their own. MODEL_PATH=meta-llama/Llama-4-Scout-17B-16E-Instruct takes engine configurations for one node of
# eight H200 GPUs; TensorRT-LLM has no separate encoder for Llama 4, so the encode worker serves embedding
# files there, and prefill encodes images itself.
set -euo pipefail
# shellcheck source=launch/lib/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

scout=engine_configs/llama4/multimodal/llama4-Scout qwen=engine_configs/qwen2.5-vl-7b-instruct
launch_known_model meta-llama/Llama-4-Scout-17B-16E-Instruct multimodal \
    ENCODE_ENGINE_ARGS=$scout/encode.yaml PREFILL_ENGINE_ARGS=$scout/prefill.yaml \
    DECODE_ENGINE_ARGS=$scout/decode.yaml
launch_default_model Qwen/Qwen2.5-VL-7B-Instruct multimodal \
    ENCODE_ENGINE_ARGS=$qwen/encode.yaml PREFILL_ENGINE_ARGS=$qwen/prefill.yaml \
    DECODE_ENGINE_ARGS=$qwen/decode.yaml
if launch_serves Qwen/Qwen2.5-VL-7B-Instruct; then
    launch_default_devices ENCODE=0 PREFILL=1 DECODE=2
fi
launch_default_devices ENCODE=0 PREFILL=0,1,2,3 DECODE=4,5,6,7
launch_main epd_disagg "$@"
