#!/usr/bin/env bash
# Makes .venv in this checkout: Python 3.11 or 3.12, the pins of requirements.lock, and this checkout as an
# editable install. Run it, or source it and call `set_up`. When nothing changed it only compares a stamp.
# Set-ups that run at the same time wait for each other. uv is taken from PATH; where it is missing it is
# installed under .venv/uv, and nothing outside the checkout changes.

setup_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
setup_venv=$setup_root/.venv

setup_say() { echo "set-up: $*" >&2; }

# What the environment was made from: the pins, the package's metadata, the build hook,
# and the place the editable install points to.
setup_stamp() {
    (
        cd "$setup_root" &&
            { cat requirements.lock pyproject.toml hatch_build.py && pwd; } | sha256sum | cut -d' ' -f1
    )
}

setup_is_current() {
    [[ -x $setup_venv/bin/python && -f $setup_venv/setup-stamp && $(<"$setup_venv/setup-stamp") == "$1" ]]
}

# Prints a Python for `uv venv`: the first on PATH that runs and is 3.11 or 3.12, else a version,
# which uv looks for or fetches. .venv itself may be on PATH, but it cannot be made from itself.
setup_find_python() {
    local path paths
    mapfile -t paths < <(type -aP python3 python3.12 python3.11)
    for path in "${paths[@]}"; do
        [[ $path != "$setup_venv"/* ]] || continue
        if "$path" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$path"
            return
        fi
    done
    echo 3.12
}

# Prints the path of a uv that runs; installs one under .venv/uv if need be. `--target` is allowed where the
# system's Python is marked as externally managed, and is for a Python that has pip but not the parts that
# make virtual environments.
setup_find_uv() {
    local home=$setup_venv/uv
    if uv --version >/dev/null 2>&1; then
        type -P uv
    elif "$home/bin/uv" --version >/dev/null 2>&1; then
        echo "$home/bin/uv"
    else
        setup_say "installing uv into ${home#"$setup_root"/}"
        rm -rf "$home"
        if python3 -m venv "$home" >/dev/null 2>&1; then
            "$home/bin/python" -m pip install --quiet uv >&2 || return 1
        elif python3 -m pip --version >/dev/null 2>&1; then
            python3 -m pip install --quiet --target "$home" uv >&2 || return 1
        else
            setup_say "needs uv, or a python3 with the venv or pip module" \
                "(on Debian: apt-get install python3-venv)"
            return 1
        fi
        echo "$home/bin/uv"
    fi
}

# uv trusts certificates of its own. Where the system has a store, that one counts,
# as it does for git and pip: it knows the certificate of a company's proxy.
setup_trust_system() {
    local store
    for store in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
        [[ ! -s $store ]] || export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS-1}" UV_NATIVE_TLS="${UV_NATIVE_TLS-1}"
    done
}

setup_install() {
    local uv python
    if ! command -v python3 >/dev/null && ! command -v uv >/dev/null; then
        setup_say "needs python3 or uv on PATH"
        return 1
    fi
    rm -f "$setup_venv/setup-stamp"
    setup_trust_system
    uv=$(setup_find_uv) || { setup_say "could not install uv: is a package index reachable?" && return 1; }
    python=$(setup_find_python)
    setup_say "creating .venv with Python $python"
    "$uv" venv --quiet --allow-existing --python "$python" "$setup_venv" || {
        setup_say "no Python 3.11 or 3.12 was found, and none could be fetched"
        return 1
    }
    setup_say "installing the pinned packages (several GB the first time)"
    "$uv" pip install --python "$setup_venv/bin/python" --no-deps -r "$setup_root/requirements.lock" >&2 || {
        setup_say "packages could not be installed (see above):" \
            "is a package index reachable, and is the disk full?"
        return 1
    }
    setup_say "installing this checkout"
    "$uv" pip install --quiet --python "$setup_venv/bin/python" --no-deps --no-build-isolation \
        --editable "$setup_root" >&2
}

# Makes or updates .venv; prints nothing when it is up to date.
set_up() {
    local stamp lock status=0
    stamp=$(setup_stamp) || return 1
    setup_is_current "$stamp" && return 0
    exec {lock}<"$setup_root/launch/lib"
    flock --nonblock "$lock" || { setup_say "waiting for another set-up of this checkout" && flock "$lock"; }
    if ! setup_is_current "$stamp"; then
        local started=$SECONDS
        if setup_install; then
            echo "$stamp" >"$setup_venv/setup-stamp"
            setup_say "done in $((SECONDS - started)) s"
        else
            status=1
        fi
    fi
    exec {lock}<&-
    return "$status"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    set -euo pipefail
    if [[ ${1-} == --help ]]; then
        sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
        exit 0
    fi
    set_up
    setup_say "$setup_venv is up to date"
fi
