#!/usr/bin/env bash
# Disaggregated serving (EP/D): prefill workers fetch and encode media and fill the KV cache,
# decode workers stream the answer.
#
# usage: [NAME=VALUE...] launch/disagg.sh [--dry-run] [-- WORKER-ARG...]
#
# Environment of this script
#   PREFILL_ENGINE_ARGS, DECODE_ENGINE_ARGS    YAML files of engine arguments
#   PREFILL_CUDA_VISIBLE_DEVICES (default 0),
#   DECODE_CUDA_VISIBLE_DEVICES (default 1)    GPUs of a worker; `0,1;2,3` gives 0,1 to the first worker and
#                                              2,3 to the second; empty leaves the choice open; the defaults
#                                              hold for ENGINE=tensorrt_llm only
#   NUM_PREFILL_WORKERS, NUM_DECODE_WORKERS    how many (default 1)
# Without MODEL_PATH it serves the text model Qwen/Qwen3-0.6B;
# with MODEL_PATH, MODALITY is multimodal unless set.
set -euo pipefail
# shellcheck source=launch/lib/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

launch_default_model Qwen/Qwen3-0.6B text \
    PREFILL_ENGINE_ARGS=engine_configs/qwen3/prefill.yaml DECODE_ENGINE_ARGS=engine_configs/qwen3/decode.yaml
launch_default_devices PREFILL=0 DECODE=1
launch_main disagg "$@"
