#!/bin/sh
# Become a small machine: a copy-on-write view of this one, with a systemd of its own as first
# process. Runs in fresh namespaces (namespace.py), so that nothing here is seen outside or stays.
# usage: namespace.sh FOLDER CHECKOUT PATH...
#   FOLDER    has out/ (for results), root/ and over/ (mount points), agent and its unit
#   CHECKOUT  is seen as /lab/checkout, its tests/lab/inside and zenlaunch in /lab/src too
#   PATH...   what every user in it may read, whatever its mode here
# Leaves FOLDER/allowed where this machine allows it; a failure after that is a fault of ours.
set -eu
folder=$1 checkout=$2
shift 2
root=$folder/root
mount --make-rprivate /
# The upper layer must not lie below the lower one: a file system of its own.
mount -t tmpfs upper "$folder/over"
mkdir "$folder/over/upper" "$folder/over/work"
mount -t overlay -o "lowerdir=/,upperdir=$folder/over/upper,workdir=$folder/over/work" \
    overlay "$root"
mount -t proc proc "$root/proc"
# The kernel is this machine's own: its settings are not for a guest to change.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs -o mode=755 dev "$root/dev"
for node in null zero full random urandom tty; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
: >"$folder/allowed"

ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for n in 0 1 2; do ln -s "fd/$n" "$root/dev/$(echo stdin stdout stderr | cut -d' ' -f$((n + 1)))"; done

mkdir -p "$root/lab/out" "$root/lab/checkout" "$root/lab/src/inside" "$root/lab/src/zenlaunch"
mount --bind "$folder/out" "$root/lab/out"
# From the copy-on-write view: what is changed below belongs to it.
mount --bind "$root$checkout" "$root/lab/checkout"
mount --bind "$checkout/tests/lab/inside" "$root/lab/src/inside"
mount --bind "$checkout/zenlaunch" "$root/lab/src/zenlaunch"
cp "$folder/agent" "$root/lab/agent"
cp "$folder/zenlaunch" "$root/usr/local/bin/zenlaunch"
for path; do chmod a+rX "$root$path"; done

# None of this machine's own services: what is enabled here, what sets hardware up, what cleans /tmp.
rm -rf "$root/etc/systemd/system"
mkdir -p "$root/etc/systemd/system"
cp "$folder/lab.target" "$folder/lab-agent.service" "$root/etc/systemd/system"
for unit in systemd-udevd.service systemd-udev-trigger.service systemd-udevd-control.socket \
    systemd-udevd-kernel.socket systemd-journald-audit.socket systemd-modules-load.service \
    systemd-remount-fs.service systemd-random-seed.service systemd-binfmt.service \
    systemd-tmpfiles-setup-dev.service systemd-tmpfiles-setup.service \
    dev-hugepages.mount dev-mqueue.mount \
    sys-fs-fuse-connections.mount sys-kernel-config.mount sys-kernel-debug.mount \
    sys-kernel-tracing.mount; do
    ln -s /dev/null "$root/etc/systemd/system/$unit"
done
: >"$root/etc/fstab"
cd "$root"
pivot_root . mnt
umount -l /mnt
exec env -i container=lab PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    setpriv --bounding-set=-sys_module,-sys_time \
    /lib/systemd/systemd --unit=lab.target --log-target=journal
