#!/bin/sh
# Install the Debian packages that are named, or say which are missing when not root.
# usage: debian_packages.sh PACKAGE...
set -eu
missing=
for package in "$@"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null; then
    echo "please install (this is no Debian or Ubuntu):$missing" >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "please install as root: apt-get install$missing" >&2
    exit 1
fi
# On a fresh machine another apt (unattended upgrades) often holds the lock for a minute.
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of words
apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends $missing >/dev/null 2>&1 && exit 0
apt-get update -qq >/dev/null
# shellcheck disable=SC2086
apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends $missing >/dev/null
