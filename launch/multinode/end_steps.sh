#!/usr/bin/env bash
# Ends job steps that one run of a multi-node script started.
# Other steps of the job, and the job itself, stay.
#
# usage: end_steps.sh JOB RUN LABEL...  asks the steps of these processes to end, by SIGTERM to their tasks.
#                                       srun itself must not get that signal: it kills its tasks at once.
#        end_steps.sh JOB RUN           ends all steps of the run, and returns when none of them is left
set -euo pipefail
job=$1 run=$2
shift 2

# Prints the ids of the steps whose names a pattern matches. A job that is gone has none.
find_steps() {
    { squeue --noheader --steps --jobs="$job" --format='%i %j' 2>/dev/null || true; } |
        while read -r id name; do
            # shellcheck disable=SC2053 # it is a pattern
            [[ $name != $1 ]] || echo "$id"
        done
}

# A step may have ended since it was listed, so failures do not count.
if (($#)); then
    for label in "$@"; do
        mapfile -t steps < <(find_steps "$run-$label")
        ((${#steps[@]} == 0)) || scancel --signal=TERM "${steps[@]}" 2>/dev/null || true
    done
    exit 0
fi

deadline=$((SECONDS + 60))
mapfile -t steps < <(find_steps "$run-*")
while ((${#steps[@]})); do
    ((SECONDS < deadline)) || { echo "launch: job steps ${steps[*]} do not end" >&2 && exit 1; }
    scancel "${steps[@]}" 2>/dev/null || true
    sleep 0.2
    mapfile -t steps < <(find_steps "$run-*")
done
