#!/usr/bin/env bash
# Aggregated serving (EPD) over several nodes with Slurm: etcd, NATS and the frontend on the head node, which
# is the first of the allocation, and one srun job for each worker on the others. If the allocation has just
# as many nodes as the workers need, the head node has a worker too. Waits until the model is listed and
# prints `ready: http://HEAD:PORT model=NAME`.
#
# usage: [NAME=VALUE...] launch/multinode/srun_aggregated.sh [--dry-run] [-- WORKER-ARG...]
#
# Environment of this script
#   NUM_NODES      nodes of one worker (default 2; 1 unless ENGINE is tensorrt_llm)
#   NUM_WORKERS    how many workers (default 1)
#   ENGINE_CONFIG  YAML file of engine arguments
# Without MODEL_PATH, or with that model, it serves meta-llama/Llama-4-Maverick-17B-128E-Instruct
# with engine_configs/llama4/multimodal, on two nodes of four GB200.
set -euo pipefail
library=$(dirname "${BASH_SOURCE[0]}")/multinode.sh
[[ -f $library ]] || {
    echo "${0##*/}: sbatch runs a copy of this script, which lacks its library: use sbatch --wrap PATH" >&2
    exit 2
}
# shellcheck source=launch/multinode/multinode.sh
source "$library"

launch_options "$@"
# shellcheck disable=SC2034 # the library reads them by their names
AGG_ENGINE_ARGS=${ENGINE_CONFIG-}
launch_default_model meta-llama/Llama-4-Maverick-17B-128E-Instruct multimodal \
    AGG_ENGINE_ARGS=engine_configs/llama4/multimodal/agg.yaml
nodes=1
[[ ${ENGINE:-tensorrt_llm} != tensorrt_llm ]] || nodes=2
multinode_count NUM_NODES "$nodes"
multinode_count NUM_WORKERS 1
multinode_count NUM_GPUS_PER_NODE 4
multinode_require_single_nodes NUM_NODES

multinode_prepare "$((NUM_NODES * NUM_WORKERS))" \
    "$NUM_WORKERS x $NUM_NODES"
multinode_add_head
multinode_add_workers agg "$NUM_WORKERS" "$NUM_NODES"
multinode_launch
