#!/bin/sh
# Install the exporter as a systemd service, from this repository or from the package named in VRAMLEDGER_PACKAGE
# (a wheel, or "vramledger==1.2.3"). Run it again to update; "--uninstall" removes what it installed, and keeps
# /etc/default/vramledger.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=/opt/vramledger
units=/etc/systemd/system
share="share/man/man1/vramledger.1 share/bash-completion/completions/vramledger share/zsh/site-functions/_vramledger"

fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || fail "needs root: sudo $0"
command -v systemctl >/dev/null || fail "this host has no systemd; see deploy/README.md for other ways"
running() { [ -d /run/systemd/system ]; } # false in a chroot or an image build

case ${1:-} in
--uninstall)
    if running; then systemctl disable --now vramledger.socket vramledger.service 2>/dev/null || true; fi
    rm -rf "$root" "$units/vramledger.service" "$units/vramledger.socket" /run/vramledger /etc/sysusers.d/vramledger.conf /etc/tmpfiles.d/vramledger.conf
    for file in bin/vramledger $share; do rm -f "/usr/local/$file"; done
    if running; then systemctl daemon-reload; fi
    exit 0
    ;;
'') ;;
*) fail "unknown argument $1; it takes none, or --uninstall" ;;
esac

# Python would import from the folder in which we were started, and from PYTHONPATH: -I keeps it from both. The
# programs that it starts itself have a folder of root's.
package=${VRAMLEDGER_PACKAGE:-$here/../..}
case $package in
/*) ;;
*/* | *.whl) package=$PWD/$package ;;
esac
python=$(command -v -- "${PYTHON:-python3}") || fail "there is no ${PYTHON:-python3}; name another in PYTHON=..."
case $python in /*) ;; *) python=$PWD/$python ;; esac
cd /
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP
"$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "needs Python 3.10 or newer; name one in PYTHON=..."
"$python" -I -m venv --help >/dev/null 2>&1 && "$python" -I -c 'import ensurepip' 2>/dev/null ||
    fail "$python cannot make virtual environments; apt-get install python3-venv"

"$python" -I -m venv "$root"
"$root/bin/python" -I -m pip install --quiet --upgrade --disable-pip-version-check "$package"
for file in bin/vramledger $share; do
    mkdir -p "/usr/local/${file%/*}"
    ln -sf "$root/$file" "/usr/local/$file"
done

install -Dm 644 "$here/vramledger.sysusers" /etc/sysusers.d/vramledger.conf
install -Dm 644 "$here/vramledger.tmpfiles" /etc/tmpfiles.d/vramledger.conf
install -Dm 644 "$here/vramledger.service" "$units/vramledger.service"
install -Dm 644 "$here/vramledger.socket" "$units/vramledger.socket"
[ -e /etc/default/vramledger ] || install -Dm 644 /dev/stdin /etc/default/vramledger <<-DEFAULTS
	# Flags of the exporter, as 'vramledger serve --help' lists them.
	VRAMLEDGER_FLAGS=""
DEFAULTS
systemd-sysusers vramledger.conf
systemd-tmpfiles --create vramledger.conf

if running; then
    systemctl daemon-reload
    systemctl enable --quiet vramledger.service
    systemctl restart vramledger.service
    printf 'vramledger runs: http://localhost:10839/  (what it cannot see here: vramledger doctor)\n'
else
    printf 'vramledger is installed; systemd does not run here, so nothing was started\n'
fi
