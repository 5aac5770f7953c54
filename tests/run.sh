#!/usr/bin/env bash
# Everything that has to pass: ruff, mypy, shellcheck and the tests. Sets up .venv first. All of them run even
# when one fails; the exit status is that of the first failure. Arguments go to pytest, which runs two files
# of tests at a time: `-n 4` for more, `-n 0` for one process, as --pdb and -s need it.
#
# usage: tests/run.sh [PYTEST-ARG...]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# shellcheck source=launch/lib/setup.sh
source launch/lib/setup.sh

if [[ ${1-} == --help ]]; then
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
    exit 0
fi
set_up || exit
export PATH=$PWD/.venv/bin:$PATH
# Several processes with torch's default number of threads hinder each other badly.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

status=0
check() {
    echo "== $*"
    "$@" || { local failed=$?; ((status)) || status=$failed; }
}

mapfile -t scripts < <(git ls-files -co --exclude-standard "*.sh" .ci/run tests/cases/run)
check ruff check .
check mypy
check mypy launch/lib/supervise.py
check shellcheck -x "${scripts[@]}"
columns='length > 110 { print FILENAME ":" FNR ": more than 110 columns"; long = 1 } END { exit long }'
check awk "$columns" "${scripts[@]}"
# By whole files, in their order: what a file starts for its tests is started once.
check python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
exit "$status"
