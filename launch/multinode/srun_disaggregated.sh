#!/usr/bin/env bash
# Disaggregated serving (EP/D) over several nodes with Slurm: etcd, NATS and the frontend on the head node,
# which is the first of the allocation, and one srun job for each prefill and each decode worker on the
# others. If the allocation has just as many nodes as the workers need, the head node has a worker too. Waits
# until the model is listed and prints `ready: http://HEAD:PORT model=NAME`.
#
# usage: [NAME=VALUE...] launch/multinode/srun_disaggregated.sh [--dry-run] [-- WORKER-ARG...]
#
# Environment of this script
#   NUM_PREFILL_NODES, NUM_DECODE_NODES              nodes of one worker
#                                                    (default 2; 1 unless ENGINE is tensorrt_llm)
#   NUM_PREFILL_WORKERS, NUM_DECODE_WORKERS          how many workers (default 1)
#   PREFILL_ENGINE_CONFIG, DECODE_ENGINE_CONFIG      YAML files of engine arguments
# Without MODEL_PATH, or with that model, it serves meta-llama/Llama-4-Maverick-17B-128E-Instruct
# with engine_configs/llama4/multimodal, on two nodes of four GB200 for each worker.
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
PREFILL_ENGINE_ARGS=${PREFILL_ENGINE_CONFIG-} DECODE_ENGINE_ARGS=${DECODE_ENGINE_CONFIG-}
launch_default_model meta-llama/Llama-4-Maverick-17B-128E-Instruct multimodal \
    PREFILL_ENGINE_ARGS=engine_configs/llama4/multimodal/prefill.yaml \
    DECODE_ENGINE_ARGS=engine_configs/llama4/multimodal/decode.yaml
nodes=1
[[ ${ENGINE:-tensorrt_llm} != tensorrt_llm ]] || nodes=2
multinode_count NUM_PREFILL_NODES "$nodes"
multinode_count NUM_DECODE_NODES "$nodes"
multinode_count NUM_PREFILL_WORKERS 1
multinode_count NUM_DECODE_WORKERS 1
multinode_count NUM_GPUS_PER_NODE 4
multinode_require_single_nodes NUM_PREFILL_NODES NUM_DECODE_NODES

multinode_prepare "$((NUM_PREFILL_NODES * NUM_PREFILL_WORKERS + NUM_DECODE_NODES * NUM_DECODE_WORKERS))" \
    "$NUM_PREFILL_WORKERS prefill x $NUM_PREFILL_NODES + $NUM_DECODE_WORKERS decode x $NUM_DECODE_NODES"
multinode_add_head
multinode_add_workers prefill "$NUM_PREFILL_WORKERS" "$NUM_PREFILL_NODES"
multinode_add_workers decode "$NUM_DECODE_WORKERS" "$NUM_DECODE_NODES"
multinode_launch
