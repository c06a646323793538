# shellcheck shell=sh
# usage: unshare -m sh initramfs.sh DIR PROGRAM PACKAGING MODULES
#
# Makes two initramfs with this machine's initramfs-tools and the package's hook: DIR/plain.initrd with the configuration as it is
# shipped, DIR/root.initrd with DIR/ubcache.conf. Both in an overlay over this machine's files, which stay as they are.
set -eu
dir=$1
program=$2
packaging=$3
modules=$4
version=${modules##*/}
mkdir "$dir/over"
mount -t tmpfs tmpfs "$dir/over"
mkdir "$dir/over/upper" "$dir/over/work" "$dir/over/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/over/upper,workdir=$dir/over/work" "$dir/over/root"
cd "$dir/over/root"
for place in proc dev sys; do mount --rbind "/$place" "$place"; done
mount -t tmpfs tmpfs tmp
mkdir -p "lib/modules/$version" boot
mount --bind "$modules" "lib/modules/$version"
config=$modules/../../../boot/config-$version
[ ! -e "$config" ] || cp "$config" boot/

# As the package installs them.
tools=usr/share/initramfs-tools
install -D -m 755 "$program" usr/bin/ubcache
strip --strip-debug usr/bin/ubcache
install -D -m 755 "$packaging/initramfs/hook" "$tools/hooks/ubcache"
install -D -m 755 "$packaging/initramfs/local-block" "$tools/scripts/local-block/ubcache"
install -D -m 644 "$packaging/initramfs/ubcache.conf" etc/ubcache/initramfs.conf
mkdir -p usr/lib/udev/rules.d
install -m 644 "$packaging"/udev/*.rules usr/lib/udev/rules.d

mkdir -p guest/hooks guest/scripts guest/conf.d
printf '%s\n' MODULES=list BUSYBOX=auto KEYMAP=n COMPRESS=zstd DEVICE= NFSROOT=auto RUNSIZE=10% FSTYPE=auto >guest/initramfs.conf
printf '%s\n' virtio_blk >guest/modules
make() {
    chroot . mkinitramfs -d /guest -o "/$1" "$version"
    cp "$1" "$dir/$1"
    chroot . lsinitramfs "/$1" >"$dir/$1.list"
}
make plain.initrd
cp "$dir/ubcache.conf" etc/ubcache/initramfs.conf
make root.initrd
