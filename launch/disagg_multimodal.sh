#!/usr/bin/env bash
# Disaggregated serving of a vision-language model (EP/D): as launch/disagg.sh,
# with Qwen2-VL-7B-Instruct unless MODEL_PATH is set.
#
# usage: [NAME=VALUE...] launch/disagg_multimodal.sh [--dry-run] [-- WORKER-ARG...]
#
# Environment of this script
#   PREFILL_ENGINE_ARGS, DECODE_ENGINE_ARGS    YAML files of engine arguments
#   PREFILL_CUDA_VISIBLE_DEVICES (default 0),
#   DECODE_CUDA_VISIBLE_DEVICES (default 1)    GPUs of a worker; `0,1;2,3` gives 0,1 to the first worker and
#                                              2,3 to the second; empty leaves the choice open; the defaults
#                                              hold for ENGINE=tensorrt_llm only
#   NUM_PREFILL_WORKERS, NUM_DECODE_WORKERS    how many (default 1)
set -euo pipefail
# shellcheck source=launch/lib/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

launch_default_model Qwen/Qwen2-VL-7B-Instruct multimodal \
    PREFILL_ENGINE_ARGS=engine_configs/qwen2-vl-7b-instruct/prefill.yaml \
    DECODE_ENGINE_ARGS=engine_configs/qwen2-vl-7b-instruct/decode.yaml
launch_default_devices PREFILL=0 DECODE=1
launch_main disagg "$@"
