#!/bin/sh
# Install the exporter as a systemd service, from this repository or from the package named in VRAMLEDGER_PACKAGE
# (a wheel with the agent's beside it, or "vramledger==1.2.3"). Run it again to update; "--uninstall" removes the program and its units, and says what
# it keeps; "--purge" removes that too.
#
# Each version has a directory of its own, and $root is a link to one of them. An update installs beside the old version and
# then replaces the link in one rename: a command that starts meanwhile (a prolog of Slurm, a check) is one version or the
# other, and an update that fails changes nothing.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=/opt/vramledger
units=/etc/systemd/system
linked=
for name in vramledger vramledger-agent; do
    linked="$linked bin/$name share/man/man1/$name.1 share/bash-completion/completions/$name share/zsh/site-functions/_$name"
done

fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || fail "needs root: sudo $0"
command -v systemctl >/dev/null || fail "this host has no systemd; see deploy/README.md for other ways"
running() { [ -d /run/systemd/system ]; } # false in a chroot or an image build

case ${1:-} in
--uninstall | --purge)
    if running; then systemctl disable --now vramledger-report.timer vramledger.socket vramledger.service 2>/dev/null || true; fi
    rm -rf "$root" "$root".[0-9]* "$root.lock" "$units/vramledger.service" "$units/vramledger.socket" "$units/vramledger-report.service" "$units/vramledger-report.timer" /run/vramledger /etc/sysusers.d/vramledger.conf /etc/tmpfiles.d/vramledger.conf
    for file in $linked; do rm -f "/usr/local/$file"; done
    if running; then systemctl daemon-reload; fi
    if [ "$1" = --purge ]; then
        rm -rf /var/lib/vramledger /etc/default/vramledger "$units"/vramledger*.d /var/lib/systemd/timers/stamp-vramledger-report.timer
        if command -v userdel >/dev/null && id vramledger >/dev/null 2>&1; then userdel vramledger; fi
        exit 0
    fi
    for kept in /var/lib/vramledger /etc/default/vramledger "$units"/vramledger*.d; do
        if [ -e "$kept" ]; then printf 'kept: %s\n' "$kept"; fi
    done
    printf 'kept: the user vramledger. /var/lib/vramledger has who held which memory; --purge removes all of this\n'
    exit 0
    ;;
'') ;;
*) fail "unknown argument $1; it takes none, --uninstall or --purge" ;;
esac

# Python would import from the folder in which we were started, and from PYTHONPATH: -I keeps it from both. The
# programs that it starts itself have a folder of root's.
package=${VRAMLEDGER_PACKAGE:-$here/../..}
case $package in
/*) ;;
*/* | *.whl) package=$PWD/$package ;;
esac
set -- "$package"
case $package in
/*.whl)
    # The agent's of this version and owner, and no other wheel: the folder may be /tmp, where anybody puts what pip prefers.
    agent=${package%/*}/vramledger_agent-${package##*/vramledger-}
    if [ "$(stat -c %u "$agent" 2>&1)" = "$(stat -Lc %u "$package")" ]; then set -- "$agent" "$package"; fi
    ;;
/*) set -- "$package/exporter/agent" "$package" ;;
esac
python=$(command -v -- "${PYTHON:-python3}") || fail "there is no ${PYTHON:-python3}; name another in PYTHON=..."
case $python in /*) ;; *) python=$PWD/$python ;; esac
cd /
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP
"$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "needs Python 3.10 or newer; name one in PYTHON=..."
"$python" -I -m venv --help >/dev/null 2>&1 && "$python" -I -c 'import ensurepip' 2>/dev/null ||
    fail "$python cannot make virtual environments; apt-get install python3-venv"

exec 9>"$root.lock"
flock -n 9 || fail "another installation runs"
version=$root.$(date +%s).$$
trap '[ "$(readlink "$root")" = "${version##*/}" ] || rm -rf "$version" "$version.link"' EXIT
"$python" -I -m venv "$version"
"$version/bin/python" -I -m pip install --quiet --upgrade --disable-pip-version-check "$@"
"$version/bin/vramledger" --version >/dev/null || fail "$package does not start here; nothing was changed"
old=$(readlink "$root" || true)
ln -s "${version##*/}" "$version.link"
# Where an older installer has run, $root is itself the environment: no rename puts a link in the place of a directory.
if [ -d "$root" ] && [ -z "$old" ]; then
    old=${root##*/}.0
    rm -rf "$root.0"
    mv -T "$root" "$root.0"
fi
mv -T "$version.link" "$root"
# What runs now may still import from the version before; only older ones are removed.
for each in "$root".[0-9]*; do
    case ${each##*/} in "${version##*/}" | "$old") ;; *) rm -rf "$each" ;; esac
done
for file in $linked; do
    mkdir -p "/usr/local/${file%/*}"
    ln -sf "$root/$file" "/usr/local/$file"
done

install -Dm 644 "$here/vramledger.sysusers" /etc/sysusers.d/vramledger.conf
install -Dm 644 "$here/vramledger.tmpfiles" /etc/tmpfiles.d/vramledger.conf
install -Dm 644 "$here/vramledger.service" "$units/vramledger.service"
install -Dm 644 "$here/vramledger.socket" "$units/vramledger.socket"
install -Dm 644 "$here/vramledger-report.service" "$units/vramledger-report.service"
install -Dm 644 "$here/vramledger-report.timer" "$units/vramledger-report.timer"
[ -e /etc/default/vramledger ] || install -Dm 644 /dev/stdin /etc/default/vramledger <<-DEFAULTS
	# Flags of the exporter, as 'vramledger serve --help' lists them.
	VRAMLEDGER_FLAGS=""
DEFAULTS
systemd-sysusers vramledger.conf
systemd-tmpfiles --create vramledger.conf

if running; then
    systemctl daemon-reload
    systemctl enable --quiet vramledger.service
    # --uninstall keeps the flags and disables the socket; systemd starts no socket beside a service that runs.
    socket() {
        if ! grep -q '^[^#]*--web\.systemd-socket' /etc/default/vramledger || systemctl is-active --quiet vramledger.socket; then return; fi
        systemctl stop vramledger.service && systemctl enable --quiet --now vramledger.socket
    }
    if ! { socket && systemctl restart vramledger.service; }; then
        journalctl --unit=vramledger.service --unit=vramledger.socket --lines=5 --no-pager --output=cat >&2 || true
        fail "the files are installed, but the service did not start; its last lines are above, and systemd tries again"
    fi
    port=$(sed -n 's/^VRAMLEDGER_FLAGS=.*--web\.listen-address=[^ "]*:\([0-9]*\).*/\1/p' /etc/default/vramledger)
    printf 'vramledger runs: http://localhost:%s/  (what it cannot see here: vramledger doctor)\n' "${port:-10839}"
else
    printf 'vramledger is installed; systemd does not run here, so nothing was started\n'
fi
