# shellcheck shell=bash
# The library of the Slurm scripts: the allocation, containers, one srun job per process, and the start of all
# of them together by launch/lib/supervise.py. Built on launch/lib/launch.sh, which a script must not use for
# anything else after sourcing this.

multinode_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/lib/launch.sh
source "$multinode_folder/../lib/launch.sh"

multinode_run=dynamo-$(hostname -s)-$$    # begins the name of every job step of this run
multinode_environment=()                  # NAME=VALUE for every process, on the nodes
multinode_container=()                    # options of srun for the container
multinode_nodes=()                        # of the allocation
multinode_next=0                          # the first of them that has no worker yet
multinode_root=$launch_root               # this checkout, as the jobs see it
launch_config_finder=multinode_find_config

# Help of these scripts: the comment at the top of the script, and then what they share.
launch_help() {
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
    cat <<'HELP'

Run it inside an allocation (salloc, or sbatch --wrap), on the head node or where its HEAD_NODE_IP is
reachable. Ctrl-C or SIGTERM end what it started and nothing else; the allocation stays.

Options
  --help     this text
  --dry-run  prints the commands, one a line, and ends; outside an allocation with made-up node names
  -- ARG...  further arguments for every worker (python -m dynamo.trtllm --help lists them)

Environment of all multi-node scripts
  IMAGE                     container image (Pyxis); without it the jobs run on the nodes as they are
  MOUNTS                    HOST:CONTAINER pairs with commas between them; this checkout is added when none of
                            them has it
  MODEL_PATH                a directory that every node sees, a Hugging Face name, demo or demo-audio
  SERVED_MODEL_NAME         the name in requests (default: MODEL_PATH)
  MODALITY                  text or multimodal
  ENGINE                    tensorrt_llm (default), transformers or double; only the first can have workers of
                            several nodes
  NUM_GPUS_PER_NODE         ranks of a worker on each of its nodes (TensorRT-LLM; default 4)
  ALLOWED_LOCAL_MEDIA_PATH  directory of embedding and image files that requests may name by file://
  MAX_FILE_SIZE_MB          largest image or embedding file
  HEAD_NODE_IP              address of the head node (default: by Slurm's address of the node)
  ETCD_PORT, NATS_PORT      ports of the services on the head node (default 2379, 4222)
  DYN_HTTP_PORT             port of the frontend (default 8000)
  DYN_HTTP_HOST             address that the frontend listens on (default 0.0.0.0)
  DYN_SYSTEM_PORT           status port of the first worker; each further worker takes the next one
  UCX_*, DYN_* and all other variables are passed on; UCX_* also to rank 0, from which trtllm-llmapi-launch
                            takes them
  DYNAMO_PYTHON             the Python of the jobs (default: .venv of this checkout, else python3;
                            in a container python3)
  SRUN_ARGS                 further options of srun, for instance --gres=gpu:4
  LAUNCH_READY_TIMEOUT_S    longest wait for the model to be listed (default 1800)
  LAUNCH_GRACE_S            time that processes get to end before they are killed (default 15)
Exported to the jobs: HEAD_NODE, HEAD_NODE_IP, ETCD_ENDPOINTS, NATS_SERVER.
Paths of engine configurations may be relative to the current directory or to this checkout, or be paths of
the container.
HELP
}

# The path of a file of the host in the container, by MOUNTS; fails when no mount has it.
multinode_to_container() {
    local path=$1 pair pairs host
    IFS=, read -ra pairs <<<"${MOUNTS-}"
    for pair in "${pairs[@]}"; do
        host=$(realpath -m "${pair%%:*}")
        pair=${pair#*:}
        if [[ $path == "$host" || $path == "${host%/}"/* ]]; then
            echo "${pair%%:*}${path#"${host%/}"}"
            return
        fi
    done
    return 1
}

# The other way round: whether a path of the container is a file that a mount brings.
multinode_is_mounted() {
    local path=$1 pair pairs container
    IFS=, read -ra pairs <<<"${MOUNTS-}"
    for pair in "${pairs[@]}"; do
        container=${pair#*:}
        container=${container%%:*}
        [[ $path != "${container%/}"/* || ! -f ${pair%%:*}${path#"${container%/}"} ]] || return 0
    done
    return 1
}

# Prints an engine configuration's path as the jobs see it.
multinode_find_config() {
    local name=$1 path=$2 found
    if [[ -z ${IMAGE-} ]]; then
        launch_find_config "$name" "$path"
    elif multinode_is_mounted "$path"; then
        echo "$path"
    elif found=$(launch_find_config "$name" "$path" 2>/dev/null); then
        multinode_to_container "$found" ||
            launch_fail "$name: no pair of MOUNTS brings $found into the container"
    elif [[ $path == /* ]]; then
        echo "$path"
    else
        launch_fail "$name: there is no file $path in $launch_root," \
            "and in the container it would need a path from /"
    fi
}

# multinode_count NAME DEFAULT: sets the variable to its default, and refuses what is no count.
multinode_count() {
    [[ -n ${!1-} ]] || printf -v "$1" '%s' "$2"
    [[ ${!1} =~ ^[1-9][0-9]{0,3}$ ]] || launch_fail "$1 must be a whole number of at least 1, not '${!1}'"
}

# multinode_allocation WANTED WHY: sets multinode_nodes and HEAD_NODE from the allocation,
# which must have so many nodes.
multinode_allocation() {
    local wanted=$1 why=$2 index nodelist
    if [[ -z ${SLURM_JOB_ID-} ]]; then
        $launch_dry_run || launch_fail "run this inside an allocation: salloc --nodes=$wanted ${0##*/}"
        echo "${0##*/}: no allocation, so the node names are made up" >&2
        SLURM_JOB_ID=JOB
        for ((index = 1; index <= wanted; index++)); do multinode_nodes+=("node$index"); done
    else
        command -v srun scontrol squeue scancel >/dev/null ||
            launch_fail "Slurm's commands (srun, scontrol, squeue, scancel) are not on PATH"
        nodelist=$(squeue --noheader --jobs="$SLURM_JOB_ID" --states=RUNNING --format=%N 2>/dev/null) ||
            nodelist=
        [[ -n $nodelist ]] || launch_fail "job $SLURM_JOB_ID is not running: make a new allocation"
        mapfile -t multinode_nodes < <(scontrol show hostnames "$nodelist")
    fi
    ((${#multinode_nodes[@]} >= wanted)) ||
        launch_fail "the workers need $wanted nodes ($why), and job $SLURM_JOB_ID has ${#multinode_nodes[@]}"
    HEAD_NODE=${multinode_nodes[0]}
    # With a node to spare the head node is left to the services; otherwise it has a worker as well.
    multinode_next=$((${#multinode_nodes[@]} > wanted ? 1 : 0))
    local idle=$((${#multinode_nodes[@]} - wanted - multinode_next))
    ((idle == 0)) || echo "${0##*/}: $idle of ${#multinode_nodes[@]} nodes stay idle" >&2
}

# Sets HEAD_NODE_IP. A name that this host knows only as loopback is left to the nodes to resolve.
multinode_head_address() {
    [[ -z ${HEAD_NODE_IP-} ]] || return 0
    local address resolved
    if [[ $SLURM_JOB_ID == JOB ]]; then
        HEAD_NODE_IP=$HEAD_NODE
        return
    fi
    address=$(scontrol show node "$HEAD_NODE" | grep -o 'NodeAddr=[^ ]*')
    HEAD_NODE_IP=${address#NodeAddr=}
    resolved=$(getent ahostsv4 "$HEAD_NODE_IP" | sed -n '1s/ .*//p')
    [[ -z $resolved || $resolved == 127.* ]] || HEAD_NODE_IP=$resolved
}

# The container's options, and this checkout's place in it.
multinode_image() {
    [[ -n ${IMAGE-} ]] || return 0
    local mounts=${MOUNTS-}
    if ! multinode_root=$(multinode_to_container "$launch_root"); then
        multinode_root=$launch_root
        mounts=${mounts:+$mounts,}$launch_root:$launch_root
        MOUNTS=$mounts
    fi
    multinode_container=("--container-image=$IMAGE" "--container-mounts=$mounts")
}

# multinode_prepare WANTED WHY: what every job needs; WANTED nodes are for workers.
# The Python of the supervisor, here, is not that of the jobs when those run in a container.
multinode_prepare() {
    local python=${DYNAMO_PYTHON-} setting
    [[ ${DYN_DISCOVERY_BACKEND:-etcd} == etcd ]] ||
        launch_fail "DYN_DISCOVERY_BACKEND must be etcd: the nodes meet there"
    DYN_DISCOVERY_BACKEND=etcd
    [[ -z ${IMAGE-} ]] || DYNAMO_PYTHON=
    launch_require_port ETCD_PORT 1 65535
    launch_require_port NATS_PORT 1 65535
    launch_prepare
    multinode_python=$launch_python
    multinode_image
    [[ -z ${IMAGE-} ]] || launch_python=${python:-python3}
    multinode_allocation "$@"
    multinode_head_address
    export HEAD_NODE HEAD_NODE_IP
    export ETCD_ENDPOINTS=http://$HEAD_NODE_IP:${ETCD_PORT:-2379}
    export NATS_SERVER=nats://$HEAD_NODE_IP:${NATS_PORT:-4222}

    # In the command and not in srun's environment: variables of an image would win over those.
    for setting in "${launch_environment[@]}"; do
        [[ $setting != PYTHONPATH=* || -z ${IMAGE-} ]] || continue
        multinode_environment+=("$setting")
    done
    [[ -z ${IMAGE-} ]] || multinode_environment+=("PYTHONPATH=$multinode_root/components/src")
    multinode_environment+=("HEAD_NODE=$HEAD_NODE" "HEAD_NODE_IP=$HEAD_NODE_IP")
    multinode_environment+=("ETCD_ENDPOINTS=$ETCD_ENDPOINTS" "NATS_SERVER=$NATS_SERVER" PYTHONUNBUFFERED=1)
    launch_environment=()
}

# multinode_add LABEL NODES RANKS MPI WORD...: one job step of RANKS tasks on each
# of NODES (commas between them); WORDs are start.sh's.
multinode_add() {
    local label=$1 nodes=$2 ranks=$3 mpi=$4 names further
    shift 4
    IFS=, read -ra names <<<"$nodes"
    read -ra further <<<"${SRUN_ARGS-}"
    launch_add "$label" srun "--jobid=$SLURM_JOB_ID" "--job-name=$multinode_run-$label" \
        --overlap --export=ALL \
        "--nodelist=$nodes" "--nodes=${#names[@]}" \
        "--ntasks=$((${#names[@]} * ranks))" "--ntasks-per-node=$ranks" "--mpi=$mpi" \
        --label --kill-on-bad-exit=1 --wait=30 "${multinode_container[@]}" "${further[@]}" \
        env "${multinode_environment[@]}" bash "$multinode_root/launch/multinode/start.sh" "$@"
}

# etcd, NATS and the frontend on the head node.
# The services outlive the rest, so that workers can take their leave.
multinode_add_head() {
    local frontend=("$launch_python" -m dynamo.frontend --http-port "$launch_port")
    [[ -z ${DYN_HTTP_HOST-} ]] || frontend+=(--http-host "$DYN_HTTP_HOST")
    # The status port is meant for the workers.
    [[ -z ${DYN_SYSTEM_PORT-} ]] || frontend=(env DYN_SYSTEM_PORT=-1 "${frontend[@]}")
    multinode_add etcd "$HEAD_NODE" 1 none etcd "$launch_python"
    multinode_add nats "$HEAD_NODE" 1 none nats "$launch_python"
    multinode_add frontend "$HEAD_NODE" 1 none process "${frontend[@]}"
    launch_supervision+=(--outlive etcd --outlive nats)
}

# Refuses an engine configuration whose parallelism does not fill the worker's ranks:
# its ranks would wait for each other for ever.
multinode_check_ranks() {
    local role=$1 ranks=$2 variable=${1^^}_ENGINE_ARGS path tensor pipeline
    path=${!variable-}
    [[ -n $path && " ${launch_worker_args[*]} " != *-parallel-size* ]] || return 0
    path=$(launch_find_config "$variable" "$path" 2>/dev/null) || return 0
    tensor=$(sed -n 's/^tensor_parallel_size: *\([0-9]*\).*/\1/p' "$path")
    pipeline=$(sed -n 's/^pipeline_parallel_size: *\([0-9]*\).*/\1/p' "$path")
    tensor=${tensor:-1} pipeline=${pipeline:-1}
    ((tensor * pipeline == ranks)) ||
        launch_fail "$path is for $((tensor * pipeline)) GPUs" \
            "(tensor_parallel_size $tensor, pipeline_parallel_size $pipeline)," \
            "and a $role worker gets $ranks (nodes times NUM_GPUS_PER_NODE)"
}

# multinode_add_workers ROLE WORKERS NODES: so many workers, each of so many nodes.
multinode_add_workers() {
    local role=$1 workers=$2 count=$3 index label nodes command kind=process mpi=none ranks=1 arguments=()
    if [[ $ENGINE == tensorrt_llm ]]; then
        kind=rank mpi=pmix ranks=$NUM_GPUS_PER_NODE arguments=(--gpus-per-node "$NUM_GPUS_PER_NODE")
        multinode_check_ranks "$role" $((count * ranks))
    fi
    launch_worker_command "$role"
    for ((index = 1; index <= workers; index++)); do
        label=$role command=("${launch_command[@]}" "${arguments[@]}" "${launch_worker_args[@]}")
        ((workers == 1)) || label=$role-$index
        launch_check_system_port
        [[ -z ${DYN_SYSTEM_PORT-} ]] || command=(env "DYN_SYSTEM_PORT=$(launch_system_port)" "${command[@]}")
        launch_workers=$((launch_workers + 1))
        printf -v nodes '%s,' "${multinode_nodes[@]:multinode_next:count}"
        multinode_next=$((multinode_next + count))
        multinode_add "$label" "${nodes%,}" "$ranks" "$mpi" "$kind" "${command[@]}"
    done
}

# multinode_require_single_nodes NAME...: counts of nodes per worker.
# Workers of several nodes need MPI, which only TensorRT-LLM uses.
multinode_require_single_nodes() {
    local name
    [[ ${ENGINE:-tensorrt_llm} != tensorrt_llm ]] || return 0
    for name in "$@"; do
        ((${!name} == 1)) ||
            launch_fail "$name must be 1 with ENGINE=$ENGINE:" \
                "only TensorRT-LLM makes one worker of several nodes"
    done
}

# Replaces this shell by the supervisor; with --dry-run prints the commands instead.
multinode_launch() {
    if $launch_dry_run; then
        printf '%s\n' "${launch_lines[@]}"
        exit 0
    fi
    [[ -n ${IMAGE-} ]] || launch_require_dynamo
    exec "$multinode_python" "$launch_root/launch/lib/supervise.py" \
        --url "http://$HEAD_NODE_IP:$launch_port" --model "$(launch_model_name)" \
        --instances "$launch_workers" \
        --ready-timeout "${LAUNCH_READY_TIMEOUT_S:-1800}" --grace "${LAUNCH_GRACE_S:-15}" \
        --stop 4 bash "$multinode_folder/end_steps.sh" "$SLURM_JOB_ID" "$multinode_run" \
        --finally 4 bash "$multinode_folder/end_steps.sh" "$SLURM_JOB_ID" "$multinode_run" \
        "${launch_supervision[@]}" "${launch_commands[@]}"
}
