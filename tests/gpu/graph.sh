#!/usr/bin/env bash
# The whole graph on one NVIDIA GPU: the tests of this folder, then a random model of Qwen2-VL-7B's shape
# served in every topology and measured through Dynamo's frontend. Writes RESULTS.md, results.png,
# results.json and the logs. Takes about 9 minutes.
#
# usage: tests/gpu/graph.sh [--parts DIR] [--site DIR] [--work DIR] [--only unpack|tests|serving]
#                           [--topologies LIST] [OUT]
#
#   --parts DIR  parts that tests/gpu/pack.sh made, for a machine without a package registry; they go to
#                --site. On a machine where the project and the extra `portable` are installed, leave it out
#   --site DIR   where the parts are unpacked (WORK/site)
#   --work DIR   for the model, 17 GB, kept for the next run (TMPDIR/gpu-graph)
#   --only WHAT  one step; `unpack` may be called once for each part, for machines that take them in turns
#   --topologies LIST  the topologies to measure, for instance "agg epd_disagg" (all)
#   OUT          where the results go (WORK/results)
#
# Needs: python3 with PyTorch for that GPU, matplotlib, 80 GB of GPU memory, 17 GB of disk.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
parts='' site='' work=${TMPDIR:-/tmp}/gpu-graph only='' topologies=() out=''
while (($#)); do
    case $1 in
        --parts) parts=$2; shift 2 ;;
        --site) site=$2; shift 2 ;;
        --work) work=$2; shift 2 ;;
        --only) only=$2; shift 2 ;;
        --topologies) read -ra topologies <<<"$2"; shift 2 ;;
        -h | --help) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) echo "unknown option $1; see --help" >&2; exit 2 ;;
        *) out=$1; shift ;;
    esac
done
site=${site:-$work/site} out=${out:-$work/results}
mkdir -p "$work" "$out"

wants() { [[ -z $only || $only == "$1" ]]; }

if wants unpack && [[ -n $parts ]]; then
    mkdir -p "$site"
    for part in "$parts"/part-*.tar.xz; do
        tar xJf "$part" -C "$site"
        echo "unpacked $(basename "$part")"
    done
fi
[[ $only == unpack ]] && exit 0

# The packed checkout goes first, else the one that this script lies in.
root=$(dirname "$(dirname "$here")")
if [[ -d $site/checkout ]]; then
    root=$site/checkout
    export PYTHONPATH=$root/components/src:$site
else
    export PYTHONPATH=$root/components/src
fi
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
cd "$root"

failed=0
if wants tests; then
    # Warnings are errors where the locked versions are installed; this machine may have others.
    python3 -m pytest \
        tests/gpu/test_portable_cuda.py tests/gpu/test_transfer_cuda.py tests/gpu/test_topologies_cuda.py \
        -W ignore -p no:cacheprovider -q --tb=short 2>&1 | tee "$out/tests.log" || failed=1
    tail -n 1 "$out/tests.log" >"$out/tests.txt"
fi
if wants serving; then
    [[ -f $work/model/config.json && -n $(find "$work/model" -name '*.index.json') ]] ||
        python3 tests/gpu/model.py "$work/model"
    python3 tests/gpu/serving.py "$work/model" "$out/results.json" "${topologies[@]}" 2>&1 |
        tee "$out/serving.log"
    [[ -f $out/tests.txt ]] || echo "not run" >"$out/tests.txt"
    python3 tests/gpu/results.py "$out/results.json" "$out/tests.txt" "$out"
    echo "results: $out/RESULTS.md"
fi
exit "$failed"
