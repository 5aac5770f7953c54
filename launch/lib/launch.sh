# shellcheck shell=bash
# The library of the launch scripts: options, environment, one function per kind of process, and the start of
# a whole topology. A script sources it, sets the defaults of its models, and calls
# `launch_main TOPOLOGY "$@"`. Processes are collected first, so that --dry-run prints exactly what would run;
# launch/lib/supervise.py then runs them together.

launch_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
launch_dry_run=false
launch_worker_args=()    # after `--`, for every worker
launch_commands=()       # the processes, in the form that supervise.py takes
launch_lines=()          # the same, quoted for a shell
launch_environment=()    # NAME=VALUE for every process
launch_supervision=()    # further options of supervise.py
launch_command=()        # the worker that launch_worker_command made last
launch_config_finder=launch_find_config
launch_workers=0

launch_fail() {
    echo "${0##*/}: $*" >&2
    exit 2
}

# The comment at the top of the script, which is its help, and then the environment that all scripts share.
launch_help() {
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
    cat <<'HELP'

Options
  --help     this text
  --dry-run  prints the commands, one a line with their environment, and ends
  -- ARG...  further arguments for every worker (python -m dynamo.trtllm --help lists them)

Environment of all scripts
  MODEL_PATH                a directory, a Hugging Face name, demo or demo-audio
  SERVED_MODEL_NAME         the name in requests (default: MODEL_PATH)
  MODALITY                  text or multimodal
  ENGINE                    tensorrt_llm (default), transformers or double
  ALLOWED_LOCAL_MEDIA_PATH  directory of embedding and image files that requests may name by file://
  MAX_FILE_SIZE_MB          largest image or embedding file
  DYN_HTTP_PORT             port of the frontend (default 8000; 0 takes a free one)
  DYN_HTTP_HOST             address of the frontend (default 0.0.0.0)
  DYN_DISCOVERY_BACKEND     file (default, in a directory of its own; the processes then listen on loopback
                            only), etcd, kubernetes or mem
  DYN_SYSTEM_PORT           status port of the first worker; each further worker takes the next one
  DYN_REQUEST_PLANE and all other variables of Dynamo are passed on as they are
  DYNAMO_PYTHON             the Python to use (default: .venv of this checkout, else python3)
  LAUNCH_READY_TIMEOUT_S    longest wait for the model to be listed (default 1800)
  LAUNCH_GRACE_S            time that processes get to end before they are killed (default 15)
Paths of engine configurations may be relative to the current directory or to this checkout.
HELP
}

# Reads the options that all scripts have; anything else is an error.
launch_options() {
    while (($#)); do
        case $1 in
            --help | -h) launch_help && exit 0 ;;
            --dry-run) launch_dry_run=true ;;
            --) shift && launch_worker_args=("$@") && return ;;
            *)
                launch_fail "unknown option $1" \
                    "(--help lists the options; arguments for the workers go after --)"
                ;;
        esac
        shift
    done
}

# launch_default_model NAME MODALITY [VARIABLE=FILE...]: what is served when MODEL_PATH is not set. The engine
# configurations belong to that model and to TensorRT-LLM, so they are not taken with another one. Any other
# model is multimodal unless MODALITY says text.
launch_default_model() {
    MODEL_PATH=${MODEL_PATH:-$1}
    launch_known_model "$@"
    MODALITY=${MODALITY:-multimodal}
}

# launch_known_model NAME MODALITY [VARIABLE=FILE...]: what goes with a model,
# by its Hugging Face name or in a directory named like it.
launch_known_model() {
    local modality=$2 setting variable
    launch_serves "$1" || return 0
    shift 2
    MODALITY=${MODALITY:-$modality}
    [[ ${ENGINE:-tensorrt_llm} == tensorrt_llm ]] || return 0
    for setting in "$@"; do
        variable=${setting%%=*}
        [[ -n ${!variable-} ]] || printf -v "$variable" '%s' "${setting#*=}"
    done
}

# launch_serves NAME: whether MODEL_PATH is that model.
launch_serves() {
    local path=${MODEL_PATH-}
    path=${path%/}
    [[ ${path##*/} == "${1##*/}" ]]
}

# launch_default_devices ROLE=GPUS...: GPUs of roles whose variable is not set,
# for TensorRT-LLM, whose workers cannot share one.
launch_default_devices() {
    local setting variable
    [[ ${ENGINE:-tensorrt_llm} == tensorrt_llm ]] || return 0
    for setting in "$@"; do
        variable=${setting%%=*}_CUDA_VISIBLE_DEVICES
        [[ -n ${!variable+set} ]] || printf -v "$variable" '%s' "${setting#*=}"
    done
}

launch_find_python() {
    if [[ -n ${DYNAMO_PYTHON-} ]]; then
        launch_python=$DYNAMO_PYTHON
    elif [[ -x $launch_root/.venv/bin/python ]]; then
        launch_python=$launch_root/.venv/bin/python
    else
        launch_python=python3
    fi
}

launch_require_dynamo() {
    local search='import importlib.util, sys; sys.exit(importlib.util.find_spec("dynamo.frontend") is None)'
    "$launch_python" -c "$search" 2>/dev/null ||
        launch_fail "$launch_python has no Dynamo:" \
            "run launch/lib/setup.sh, which makes .venv here, or set DYNAMO_PYTHON"
}

# Prints the path of an engine configuration. The guide writes paths from the root of Dynamo's repository
# (examples/backends/trtllm/engine_configs/...); here the same files are in engine_configs/.
launch_find_config() {
    local name=$1 path=$2 candidate
    for candidate in "$path" "$launch_root/$path" "$launch_root/engine_configs/${path##*engine_configs/}"; do
        if [[ -f $candidate ]]; then
            realpath "$candidate"
            return
        fi
    done
    launch_fail "$name: there is no file $path, neither here nor in $launch_root"
}

# launch_add LABEL [NAME=VALUE...] COMMAND ARG...
launch_add() {
    local label=$1 line
    shift
    set -- "${launch_environment[@]}" "$@"
    printf -v line '%q ' "$@"
    launch_lines+=("${line% }")
    launch_commands+=(--start "$label" "$#" "$@")
}

launch_add_frontend() {
    local command=("$launch_python" -m dynamo.frontend --http-port "$launch_port")
    [[ -z ${DYN_HTTP_HOST-} ]] || command+=(--http-host "$DYN_HTTP_HOST")
    # Without this the frontend would take the status port that is meant for the first worker.
    [[ -z ${DYN_SYSTEM_PORT-} ]] || command=(DYN_SYSTEM_PORT=-1 "${command[@]}")
    launch_add frontend "${command[@]}"
}

# launch_worker_command ROLE: sets launch_command to a worker of the role, with what its variables say.
launch_worker_command() {
    local role=$1 config
    local config_variable=${role^^}_ENGINE_ARGS
    launch_command=("$launch_python" -m dynamo.trtllm --model-path "$MODEL_PATH" --engine "$ENGINE")

    [[ -z ${SERVED_MODEL_NAME-} ]] || launch_command+=(--served-model-name "$SERVED_MODEL_NAME")
    [[ -z ${MODALITY-} ]] || launch_command+=(--modality "$MODALITY")
    [[ $role == agg ]] || launch_command+=(--disaggregation-mode "$role")
    if [[ $role == encode ]]; then
        launch_command+=(--endpoint "$ENCODE_ENDPOINT")
    elif [[ $role != decode && -n ${ENCODE_ENDPOINT-} ]]; then
        launch_command+=(--encode-endpoint "$ENCODE_ENDPOINT")
    fi
    if [[ -n ${!config_variable-} ]]; then
        config=$("$launch_config_finder" "$config_variable" "${!config_variable}") || exit
        launch_command+=(--extra-engine-args "$config")
    fi
    if [[ $role != decode ]]; then
        [[ -z ${ALLOWED_LOCAL_MEDIA_PATH-} ]] ||
            launch_command+=(--allowed-local-media-path "$ALLOWED_LOCAL_MEDIA_PATH")
        [[ -z ${MAX_FILE_SIZE_MB-} ]] || launch_command+=(--max-file-size-mb "$MAX_FILE_SIZE_MB")
    fi
}

# launch_add_worker ROLE INDEX COUNT: one worker of a role.
launch_add_worker() {
    local role=$1 index=$2 count=$3 label=$1 environment=() devices
    local devices_variable=${role^^}_CUDA_VISIBLE_DEVICES
    ((count == 1)) || label=$role-$index
    if [[ ${!devices_variable-} =~ [^[:space:]] ]]; then
        IFS=';' read -ra devices <<<"${!devices_variable}"
        [[ -n ${devices[(index - 1) % ${#devices[@]}]} ]] ||
            launch_fail "$devices_variable names no GPUs for $label:" \
                "write 0,1 or '0,1;2,3', or leave it empty"
        environment+=("CUDA_VISIBLE_DEVICES=${devices[(index - 1) % ${#devices[@]}]}")
    fi
    launch_check_system_port
    [[ -z ${DYN_SYSTEM_PORT-} ]] || environment+=("DYN_SYSTEM_PORT=$(launch_system_port)")
    launch_workers=$((launch_workers + 1))
    launch_worker_command "$role"
    launch_add "$label" "${environment[@]}" "${launch_command[@]}" "${launch_worker_args[@]}"
}

# 0 and -1 mean a port of the system's choice and none: they are the same for every worker.
launch_system_port() {
    local first=${DYN_SYSTEM_PORT:-0}
    echo $((first > 0 ? first + launch_workers : first))
}

launch_check_system_port() {
    (($(launch_system_port) <= 32767)) ||
        launch_fail "DYN_SYSTEM_PORT must leave a port up to 32767 to each of the workers," \
            "not '$DYN_SYSTEM_PORT'"
}

# launch_add_workers ROLE COUNT_VARIABLE
launch_add_workers() {
    local role=$1 count=${!2-1} index
    [[ $count =~ ^[1-9][0-9]{0,3}$ ]] || launch_fail "$2 must be a whole number of at least 1, not '$count'"
    for ((index = 1; index <= count; index++)); do
        launch_add_worker "$role" "$index" "$count"
    done
}

# launch_require_port NAME LEAST MOST: refuses a variable that is set to no port.
# Kubernetes sets NAME_PORT=tcp://... for a service NAME.
launch_require_port() {
    local name=$1 least=$2 most=$3 value=${!1-} none='' advice=''
    [[ -n $value ]] || return 0
    if [[ $value =~ ^(0|-?[1-9][0-9]{0,4})$ ]] && ((value >= least && value <= most)); then return 0; fi
    ((least >= 0)) || none=', or -1 for none'
    [[ $value != tcp://* ]] || advice=' (Kubernetes sets it so for a service of that name: set it yourself)'
    launch_fail "$name must be a port number from $((least > 0 ? least : 0)) to $most$none," \
        "not '$value'$advice"
}

launch_require_seconds() {
    local value=${!1-}
    [[ -z $value || $value =~ ^[0-9]+(\.[0-9]+)?$ ]] ||
        launch_fail "$1 must be a number of seconds, not '$value'"
}

# What every process needs, before the first is added.
launch_prepare() {
    ENGINE=${ENGINE:-tensorrt_llm}
    [[ -n ${MODEL_PATH-} ]] || launch_fail "MODEL_PATH is empty: set it to a model"
    launch_find_python
    launch_require_port DYN_HTTP_PORT 0 65535
    launch_require_port DYN_SYSTEM_PORT -1 32767
    launch_require_port DYN_TCP_RPC_PORT 0 65535
    launch_require_port DYN_TCP_RESPONSE_STREAM_PORT 0 65535
    launch_require_seconds LAUNCH_READY_TIMEOUT_S
    launch_require_seconds LAUNCH_GRACE_S
    launch_port=${DYN_HTTP_PORT:-8000}
    if ((launch_port == 0)); then
        local free='import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
        launch_port=$("$launch_python" -c "$free" 2>/dev/null) ||
            launch_fail "$launch_python cannot be run:" \
                "run launch/lib/setup.sh, which makes .venv here, or set DYNAMO_PYTHON"
    fi

    # .venv has this checkout's package; another Python, for instance of a container, may have ai-dynamo only.
    if [[ $launch_python != "$launch_root/.venv/bin/python" ]]; then
        launch_environment+=("PYTHONPATH=$launch_root/components/src${PYTHONPATH:+:$PYTHONPATH}")
    fi
    launch_environment+=("DYN_DISCOVERY_BACKEND=${DYN_DISCOVERY_BACKEND:-file}")
    # An error before the first token keeps its HTTP status when the frontend waits this long for that token.
    launch_environment+=("DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS=${DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS:-60000}")
    # A request whose worker died goes on with another one; Dynamo's own default is to fail it.
    launch_environment+=("DYN_MIGRATION_LIMIT=${DYN_MIGRATION_LIMIT:-3}")
    # glibc keeps freed memory in an arena for each thread, by default eight times as many as there are cores.
    launch_environment+=("MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-2}")
    if [[ $ENGINE != tensorrt_llm ]]; then
        # Several processes with torch's default number of threads hinder each other badly.
        launch_environment+=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}")
    fi
    if [[ ${DYN_DISCOVERY_BACKEND:-file} == file && -z ${DYN_FILE_KV-} ]]; then
        launch_supervision+=(--temporary DYN_FILE_KV)
        # All processes are on this machine then, and what they say to each other asks for no password.
        launch_environment+=("DYN_TCP_RPC_HOST=${DYN_TCP_RPC_HOST:-127.0.0.1}")
        launch_environment+=("DYN_TCP_RESPONSE_STREAM_HOST=${DYN_TCP_RESPONSE_STREAM_HOST:-127.0.0.1}")
        launch_environment+=("DYN_EVENT_PLANE_HOST=${DYN_EVENT_PLANE_HOST:-127.0.0.1}")
    fi
}

# The processes of a topology. An ENCODE_ENDPOINT left over from another
# topology must not make a worker wait for an encoder.
launch_topology() {
    local topology=$1
    if [[ $topology == disagg_e_pd || $topology == epd_disagg ]]; then
        ENCODE_ENDPOINT=${ENCODE_ENDPOINT:-dyn://${DYN_NAMESPACE:-dynamo}.tensorrt_llm_encode.generate}
    elif [[ -n ${ENCODE_ENDPOINT-} ]]; then
        launch_environment+=(ENCODE_ENDPOINT=)
        ENCODE_ENDPOINT=
    fi
    launch_add_frontend
    case $topology in
        agg) launch_add_workers agg NUM_AGG_WORKERS ;;
        disagg)
            launch_add_workers prefill NUM_PREFILL_WORKERS
            launch_add_workers decode NUM_DECODE_WORKERS
            ;;
        disagg_e_pd) launch_add_workers encode NUM_ENCODE_WORKERS && launch_add_workers agg NUM_AGG_WORKERS ;;
        epd_disagg)
            launch_add_workers encode NUM_ENCODE_WORKERS
            launch_add_workers prefill NUM_PREFILL_WORKERS
            launch_add_workers decode NUM_DECODE_WORKERS
            ;;
    esac
}

# The first of the names under which the model is served: requests use it, and the wait is for it.
launch_model_name() {
    local name=${SERVED_MODEL_NAME:-$MODEL_PATH} word previous=
    for word in "${launch_worker_args[@]}"; do
        [[ $previous != --served-model-name ]] || name=$word
        [[ $word != --served-model-name=* ]] || name=${word#*=}
        previous=$word
    done
    name=${name//,/ }
    read -r name _ <<<"$name"
    echo "$name"
}

# launch_then COMMAND ARG...: runs when the model is listed; its end ends everything.
launch_then() {
    local line
    set -- "${launch_environment[@]}" "$@"
    printf -v line '%q ' "$@"
    launch_lines+=("${line% }")
    launch_commands+=(--then "$#" "$@")
}

# Replaces this shell by the supervisor of what was added; with --dry-run prints it instead.
launch_run() {
    if $launch_dry_run; then
        printf '%s\n' "${launch_lines[@]}"
        exit 0
    fi
    launch_require_dynamo
    exec "$launch_python" "$launch_root/launch/lib/supervise.py" \
        --url "http://127.0.0.1:$launch_port" --model "$(launch_model_name)" --instances "$launch_workers" \
        --ready-timeout "${LAUNCH_READY_TIMEOUT_S:-1800}" --grace "${LAUNCH_GRACE_S:-15}" \
        "${launch_supervision[@]}" "${launch_commands[@]}"
}

launch_main() {
    local topology=$1
    shift
    launch_options "$@"
    launch_prepare
    launch_topology "$topology"
    launch_run
}
