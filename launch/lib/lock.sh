#!/usr/bin/env bash
# Makes requirements.lock again from pyproject.toml: base dependencies, the extra `portable` and the
# group `test`, for Python 3.11 and later on Linux. Plain pins without an index address. Needs uv and
# the network. Arguments go to `uv pip compile`, for instance `--upgrade-package NAME`; without any,
# pins that still fit are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

lock=requirements.lock
new=$(mktemp)
trap 'rm -f "$new" "$new.constraints"' EXIT
[[ -f $lock ]] && grep -v '^#' "$lock" >"$new"
# torch and torchvision stay at the pair that the tests were written with.
printf '%s\n' torch==2.14.1 torchvision==0.29.1 >"$new.constraints"
uv pip compile pyproject.toml --constraints "$new.constraints" --extra portable --group test \
    --universal --python-version 3.11 \
    --no-emit-index-url --no-emit-find-links --no-annotate --no-header --quiet \
    --output-file "$new" "$@" >/dev/null

{
    echo '# Pins for Python 3.11 and 3.12, made by launch/lib/lock.sh.'
    # shellcheck disable=SC2016 # the backquotes are text
    echo '# Install them with `uv pip install --no-deps -r requirements.lock`.'
    echo '# aisimulate is left out on purpose: ai-dynamo asks for it, but the package is a placeholder that'
    echo '# fetches its code from elsewhere, and nothing here imports it. With --no-deps it is not missed.'
    cat "$new"
} >"$lock"
echo "$lock: $(grep -c -v '^#' "$lock") pins"
