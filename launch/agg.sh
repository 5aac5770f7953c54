#!/usr/bin/env bash
# Aggregated serving (EPD): the frontend and one kind of worker, which fetches media, encodes and answers.
#
# usage: [NAME=VALUE...] launch/agg.sh [--dry-run] [-- WORKER-ARG...]
#
# Environment of this script
#   AGG_ENGINE_ARGS           YAML file of engine arguments
#   AGG_CUDA_VISIBLE_DEVICES  GPUs of the worker; `0,1;2,3` gives 0,1 to the first worker and 2,3 to the
#                             second
#   NUM_AGG_WORKERS           how many workers (default 1)
# Without MODEL_PATH it serves the text model Qwen/Qwen3-0.6B;
# with MODEL_PATH, MODALITY is multimodal unless set.
set -euo pipefail
# shellcheck source=launch/lib/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

launch_default_model Qwen/Qwen3-0.6B text AGG_ENGINE_ARGS=engine_configs/qwen3/agg.yaml
launch_main agg "$@"
