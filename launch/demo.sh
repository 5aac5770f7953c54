#!/usr/bin/env bash
# Sets up .venv, starts a demo model on the portable engine behind Dynamo's frontend, asks one question about
# a picture, a clip or a sound, prints the answer, and ends what it started. Needs python3 and git only; the
# first run downloads packages.
#
# usage: launch/demo.sh [option...] [-- WORKER-ARG...]
#
# Options of this script
#   --topology NAME       agg (default), disagg, disagg_e_pd or epd_disagg
#   --image PATH_OR_URL   the image (default: a drawn one)
#   --video [PATH_OR_URL] asks about a clip instead (default: a drawn one), and shows its frames as a picture
#                         beside the answer
#   --audio [PATH_OR_URL] asks about a sound instead (default: a synthesised one), which the audio demo model
#                         hears, and shows its waveform as a picture beside the answer
#   --prompt TEXT         the question (default: Describe the image, the video or the sound)
#   --keep                goes on serving, and prints a line for curl
# The models, their names and the engine are fixed; the port is a free one unless DYN_HTTP_PORT is set;
# DYNAMO_PYTHON is used as it is, without a set-up. Workers may fetch from loopback and private addresses here
# (DYN_MM_ALLOW_INTERNAL=1), because the image is served from this machine.
set -euo pipefail
# shellcheck source=launch/lib/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"
# shellcheck source=launch/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"

demo_started=$EPOCHREALTIME
demo_topology=agg
demo_model=demo
demo_question=()
demo_others=()
while (($#)); do
    case $1 in
        --topology | --image | --prompt)
            (($# > 1)) || launch_fail "$1 needs a value"
            if [[ $1 == --topology ]]; then demo_topology=$2; else demo_question+=("$1" "$2"); fi
            if [[ $1 == --image && ! -f $2 && ! $2 =~ ^(https?|data): ]]; then
                launch_fail "--image: there is no file $2"
            fi
            shift
            ;;
        --video | --audio)
            demo_question+=("$1")
            [[ $1 == --video ]] || demo_model=demo-audio
            if (($# > 1)) && [[ $2 != -* ]]; then
                [[ -f $2 || $2 =~ ^(https?|data): ]] || launch_fail "$1: there is no file $2"
                demo_question+=("$2") && shift
            fi
            ;;
        --keep) demo_question+=("$1") ;;
        --) demo_others+=("$@") && break ;;
        *) demo_others+=("$1") ;;
    esac
    shift
done
launch_options "${demo_others[@]}"
[[ $demo_topology =~ ^(agg|disagg|disagg_e_pd|epd_disagg)$ ]] ||
    launch_fail "there is no topology $demo_topology: choose agg, disagg, disagg_e_pd or epd_disagg"

unset AGG_ENGINE_ARGS PREFILL_ENGINE_ARGS DECODE_ENGINE_ARGS ENCODE_ENGINE_ARGS ENCODE_ENDPOINT
MODEL_PATH=$demo_model SERVED_MODEL_NAME=$demo_model MODALITY=multimodal ENGINE=transformers
DYN_HTTP_PORT=${DYN_HTTP_PORT:-0} DYN_HTTP_HOST=127.0.0.1
launch_environment+=(DYN_MM_ALLOW_INTERNAL=1)
launch_environment+=(DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="${DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS:-0}")

$launch_dry_run || [[ -n ${DYNAMO_PYTHON-} ]] || set_up
launch_prepare
launch_topology "$demo_topology"
if ! $launch_dry_run; then
    launch_supervision+=(--since "$demo_started")
    launch_supervision+=(--log "$(mktemp "${TMPDIR:-/tmp}/dynamo-trtllm-demo-XXXXXX.log")")
fi
launch_then "$launch_python" -m dynamo.trtllm.demo.ask \
    --url "http://127.0.0.1:$launch_port" --model "$demo_model" "${demo_question[@]}"
launch_run
