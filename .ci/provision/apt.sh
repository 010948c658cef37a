# Sourced by its neighbours: packages of Debian and Ubuntu, with root's rights and without.
# shellcheck shell=bash
cache=$PWD/.cache

say() { printf '==> %s\n' "$*" >&2; }

# Run a command as root, or fail: we are root, or sudo asks for no password.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo -n "$@" 2>/dev/null
    fi
}

# Install packages on the system, where we may. Only for packages that start no service.
system_install() {
    command -v apt-get >/dev/null && as_root true || return 1
    say "installing on the system: $*"
    local options=(-qq -o DPkg::Lock::Timeout=120 -o Acquire::http::Timeout=30)
    # One source that cannot be reached is no reason to stop: what is missing then shows in the install.
    as_root apt-get "${options[@]}" update >&2 || true
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get "${options[@]}" install -y --no-install-recommends "$@" >"$cache/apt.log" 2>&1 ||
        { tail -n 3 "$cache/apt.log" >&2; return 1; }
}

# apt-get with its lists and archives under .cache, which needs no rights and changes nothing on the system.
private_apt() {
    mkdir -p "$cache/apt/lists/partial" "$cache/apt/archives/partial"
    apt-get -qq -o Dir::State="$cache/apt" -o Dir::State::status=/var/lib/dpkg/status \
        -o Dir::Cache="$cache/apt" -o Dir::Log="$cache/apt" \
        -o Debug::NoLocking=true -o APT::Sandbox::User=root -o Acquire::Languages=none \
        -o Acquire::http::Timeout=30 "$@" >"$cache/apt/log" 2>&1 ||
        { tail -n 3 "$cache/apt/log" >&2; return 1; }
}

updated= # the lists are, by this script
# Fetch one package and lay its files out under .cache/tools/unpacked. "--with-dependencies" after its name
# fetches what the system lacks of those, too.
unpack() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    say "fetching $1 into .cache/tools"
    rm -rf "$cache/apt/archives"
    [ -n "$updated" ] || private_apt update || true
    updated=yes
    if [ "${2:-}" = --with-dependencies ]; then
        private_apt install -y --no-install-recommends --download-only "$1" || return 1
    else
        (mkdir -p "$cache/apt/archives" && cd "$cache/apt/archives" && private_apt download "$1") || return 1
    fi
    mkdir -p "$cache/tools/unpacked"
    local package
    for package in "$cache"/apt/archives/*.deb; do
        dpkg -x "$package" "$cache/tools/unpacked" || return 1
    done
    rm -rf "$cache/apt/archives"
}
