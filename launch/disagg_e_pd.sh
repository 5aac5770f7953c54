#!/usr/bin/env bash
# Encoding apart (E/PD): encode workers fetch media or load embedding files,
# aggregated workers read the embeddings and answer.
#
# usage: [NAME=VALUE...] launch/disagg_e_pd.sh [--dry-run] [-- WORKER-ARG...]
#
# Environment of this script
#   ENCODE_ENGINE_ARGS, AGG_ENGINE_ARGS      YAML files of engine arguments
#   ENCODE_ENDPOINT                          where encode workers serve and are called
#                                            (default dyn://dynamo.tensorrt_llm_encode.generate)
#   ENCODE_CUDA_VISIBLE_DEVICES (default 0),
#   AGG_CUDA_VISIBLE_DEVICES (default 1)     GPUs of a worker; `0,1;2,3` gives 0,1 to the first worker and
#                                            2,3 to the second; empty leaves the choice open; the defaults
#                                            hold for ENGINE=tensorrt_llm only
#   NUM_ENCODE_WORKERS, NUM_AGG_WORKERS      how many (default 1)
# Without MODEL_PATH it serves Qwen/Qwen2.5-VL-7B-Instruct.
set -euo pipefail
# shellcheck source=launch/lib/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

launch_default_model Qwen/Qwen2.5-VL-7B-Instruct multimodal \
    ENCODE_ENGINE_ARGS=engine_configs/qwen2.5-vl-7b-instruct/encode.yaml \
    AGG_ENGINE_ARGS=engine_configs/qwen2.5-vl-7b-instruct/agg.yaml
launch_default_devices ENCODE=0 AGG=1
launch_main disagg_e_pd "$@"
