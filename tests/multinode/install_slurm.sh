#!/usr/bin/env bash
# Installs what the multi-node tests need: Debian's slurmctld, slurmd, slurm-client, munge and PMIx. Does
# nothing when they are there. Nothing is started: the tests start their own daemons, in a folder of their
# own. Needs root and apt-get.
set -euo pipefail

policy=/usr/sbin/policy-rc.d
for program in slurmctld slurmd srun munged; do
    PATH=$PATH:/usr/sbin type -P "$program" >/dev/null || missing=true
done
compgen -G "/usr/lib/*/pmix2/lib/libpmix.so" >/dev/null || missing=true
[[ ${missing-} ]] || exit 0

if [[ ! -e $policy ]]; then
    # 101 is how this file forbids the packages to start their services.
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# The pmix plugin loads libpmix.so by its unversioned name, which is in the development package.
apt-get install -qq --yes --no-install-recommends slurmctld slurmd slurm-client munge libpmix-dev >/dev/null
