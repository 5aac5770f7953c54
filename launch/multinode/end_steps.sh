#!/usr/bin/env bash
# Ends the job steps that one run of a multi-node script started, and returns when none of them is left. Other steps of the job, and
# the job itself, stay.
#
# usage: end_steps.sh JOB RUN    RUN begins the names of the steps
set -euo pipefail
job=$1 run=$2
deadline=$((SECONDS + 60))

# A job that is gone has no steps.
steps() {
    { squeue --noheader --steps --jobs="$job" --format='%i %j' 2>/dev/null || true; } |
        while read -r id name; do
            [[ $name != "$run"-* ]] || echo "$id"
        done
}

mapfile -t left < <(steps)
while ((${#left[@]})); do
    if ((SECONDS >= deadline)); then
        echo "launch: job steps ${left[*]} do not end" >&2
        exit 1
    fi
    # A step may have ended since it was listed.
    scancel "${left[@]}" 2>/dev/null || true
    sleep 0.2
    mapfile -t left < <(steps)
done
