#!/usr/bin/env bash
# Packs what tests/gpu/graph.sh needs beside PyTorch, for a GPU machine that reaches no package registry: this
# checkout, Dynamo with its runtime, NIXL with UCX, Transformers and what else that machine lacks. Runs here,
# with uv, pip, unzip, strip and xz.
#
# usage: tests/gpu/pack.sh [--python VERSION] [--cuda 12|13] [--have FILE] [--limit MB] OUT
#
#   --python VERSION  that machine's Python (3.12)
#   --cuda 12|13      the CUDA release of its PyTorch (13)
#   --have FILE       what it has already, as `python3 -m pip list --format=freeze` prints it there; without
#                     it, only PyTorch is taken to be there
#   --limit MB        the largest size of a part (58)
#   OUT               folder for part-1.tar.xz, part-2.tar.xz and so on; bring them there and give them to
#                     graph.sh --parts
set -euo pipefail

python=3.12 cuda=13 have=/dev/null limit=58 out=
while (($#)); do
    case $1 in
        --python) python=$2; shift 2 ;;
        --cuda) cuda=$2; shift 2 ;;
        --have) have=$(realpath "$2"); shift 2 ;;
        --limit) limit=$2; shift 2 ;;
        -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) echo "unknown option $1; see --help" >&2; exit 2 ;;
        *) out=$1; shift ;;
    esac
done
[[ -n $out ]] || { echo "name the folder for the parts; see --help" >&2; exit 2; }
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work"/{wheels,runtime,nixl,media,rest,own}

# Which packages: the machine's own versions wherever they satisfy pyproject.toml,
# since uv prefers what its output file names.
grep -E '^[A-Za-z0-9._-]+==' "$have" >"$work/pins" || true
cp "$work/pins" "$work/had"
printf 'pytest-asyncio>=1.2\npytest>=9\nmatplotlib\nrich\n' >"$work/tests.in"
uv pip compile pyproject.toml "$work/tests.in" --extra portable \
    --python-version "$python" --python-platform x86_64-manylinux_2_28 \
    --no-annotate --no-header --no-emit-index-url --no-emit-find-links --quiet \
    --output-file "$work/pins" >/dev/null
normal() { sed 's/ *;.*//; s/+[^=]*$//' "$1" | tr 'A-Z_' 'a-z-' | sort; }
# Left out: PyTorch and its own, which must match that machine's driver; the planner's Kubernetes client;
# video decoding; the NIXL of the other CUDA.
comm -23 <(normal "$work/pins") <(normal "$work/had") |
    grep -vE "^(torch|torchvision|triton|nvidia-.*|cuda-.*|av)==" |
    grep -vE "^(kubernetes|google-auth|oauthlib|requests-oauthlib|durationpy|pyasn1.*)==" |
    grep -vE "^(aisimulate|nixl-cu$((cuda == 13 ? 12 : 13)))==" >"$work/wanted"
echo "packages to bring: $(tr '\n' ' ' <"$work/wanted")"
platforms=()
for glibc in 5 12 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
    "${platforms[@]}" --dest "$work/wheels" --requirement "$work/wanted"

for wheel in "$work"/wheels/*.whl; do
    case $(basename "$wheel") in
        ai_dynamo_runtime-*) place=runtime ;;
        nixl_cu*) place=nixl ;;
        av-*) place=media ;;
        *) place=rest ;;
    esac
    unzip -q -o "$wheel" -d "$work/$place"
done
# Debug symbols are three quarters of the runtime; of NIXL's plugins, UCX is what is used.
strip --strip-all "$work"/runtime/dynamo/_core*.so
rm -rf "$work"/runtime/*.dist-info/sboms "$work"/nixl/nixl_ep* "$work"/nixl/*.data "$work"/nixl/*.scripts
rm -rf "$work"/nixl/nixl_cu*.libs/{ucx/libucx_perftest*,libaws*,libazure*}
find "$work/nixl" -name 'libplugin_*' ! -name '*UCX*' ! -name '*POSIX*' -delete
mkdir "$work/own/checkout"
git ls-files -z components tests launch pyproject.toml | xargs -0 cp --parents -t "$work/own/checkout"

number=0
rm -f "$out"/part-*.tar.xz
for place in runtime nixl media rest own; do
    number=$((number + 1))
    tar c -C "$work/$place" . | xz -T0 -6 >"$work/$place.tar.xz"
    mv "$work/$place.tar.xz" "$out/part-$number.tar.xz"
done
for part in "$out"/part-*.tar.xz; do
    size=$(($(stat -c %s "$part") / 1000000))
    echo "$part: $size MB"
    if ((size >= limit)); then
        echo "it is above the limit of $limit MB; name what that machine has with --have" >&2
        exit 1
    fi
done
