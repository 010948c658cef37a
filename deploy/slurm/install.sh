#!/bin/bash
# Install the scripts into /etc/slurm/vramledger, or into the directory that is given, and the settings beside it. Run it again
# to update; "--uninstall" before the directory removes the scripts, and says what it leaves. The old version is replaced in one rename, so that no job is judged by half of each.
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd)
uninstall=
if [ "${1:-}" = --uninstall ]; then uninstall=1; shift; fi
target=${1:-/etc/slurm/vramledger}

fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "needs root: sudo $0"
[ -L "$target" ] || [ ! -e "$target" ] || fail "$target is there, and was not made by this script; move it away"

if [ "$uninstall" ]; then
    config=${target%/*}/slurm.conf
    # slurmd drains a node whose prolog is not there.
    if grep -qs "^[^#]*=$target/" "$config"; then fail "$config still names $target; take Prolog, Epilog and HealthCheckProgram out, and run scontrol reconfigure"; fi
    rm -rf "$target" "$target".*.*
    printf 'removed %s; kept: %s, and /run/vramledger-slurm until the next boot\n' "$target" "${target%/*}/vramledger.conf"
    exit 0
fi
version=$target.$(date +%s).$$
mkdir -p "$version"
for script in hook prolog epilog health; do install -m 755 "$here/$script.sh" "$version/"; done
[ -e "${target%/*}/vramledger.conf" ] || install -m 644 "$here/vramledger.conf" "${target%/*}/vramledger.conf"

old=$(readlink "$target" || true)
ln -s "${version##*/}" "$version.link"
mv -T "$version.link" "$target"
# A hook that has begun reads its own file to the end; only the one before the last is removed.
for each in "$target".*.*; do
    case ${each##*/} in "${version##*/}" | "$old") ;; *) rm -rf "$each" ;; esac
done
printf 'installed in %s; settings: %s\n' "$target" "${target%/*}/vramledger.conf"
# With the PATH of the hooks. Without the program no GPU is judged, and every prolog says that it cannot tell.
# shellcheck disable=SC1091
program=$(. "${target%/*}/vramledger.conf" && printf %s "${VRAMLEDGER:-vramledger}")
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin command -v -- "$program" >/dev/null ||
    printf 'install.sh: there is no %s on this node: install it (deploy/systemd), or name it with VRAMLEDGER= in the settings\n' "$program" >&2
