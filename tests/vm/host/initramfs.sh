# shellcheck shell=sh
# usage: unshare -m sh initramfs.sh DIR PROGRAM PACKAGING MODULES TOOL
#
# Makes initramfs images with this machine's TOOL (initramfs-tools or dracut) and the package's files for it: DIR/plain.initrd with the
# shipped configuration, DIR/root.initrd with DIR/ubcache.conf. With dracut systemd is the first process in these; DIR/small.initrd is
# without it. The script works in an overlay over this machine's files and does not change them.
set -eu
dir=$1
program=$2
packaging=$3
modules=$4
tool=$5
version=${modules##*/}
mkdir "$dir/over"
mount -t tmpfs tmpfs "$dir/over"
mkdir "$dir/over/upper" "$dir/over/work" "$dir/over/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/over/upper,workdir=$dir/over/work" "$dir/over/root"
cd "$dir/over/root"
for place in proc dev sys; do mount --rbind "/$place" "$place"; done
mount -t tmpfs tmpfs tmp
mkdir -p "lib/modules/$version" boot var/tmp
mount --bind "$modules" "lib/modules/$version"
config=$modules/../../../boot/config-$version
[ ! -e "$config" ] || cp "$config" boot/

# As the package installs them.
install -D -m 755 "$program" usr/bin/ubcache
strip --strip-debug usr/bin/ubcache
install -D -m 644 "$packaging/initramfs/ubcache.conf" etc/ubcache/initramfs.conf
install -D -m 755 "$packaging/initramfs/serve-root" usr/lib/ubcache/serve-root
install -m 644 "$packaging/initramfs/68-ubcache.rules" usr/lib/ubcache/initramfs.rules
mkdir -p usr/lib/udev/rules.d
install -m 644 "$packaging"/udev/*.rules usr/lib/udev/rules.d
case $tool in
    initramfs-tools)
        scripts=usr/share/initramfs-tools
        install -D -m 755 "$packaging/initramfs/hook" "$scripts/hooks/ubcache"
        install -D -m 755 "$packaging/initramfs/local-block" "$scripts/scripts/local-block/ubcache"
        mkdir -p guest/hooks guest/scripts guest/conf.d
        printf '%s\n' MODULES=list BUSYBOX=auto KEYMAP=n COMPRESS=zstd DEVICE= NFSROOT=auto RUNSIZE=10% FSTYPE=auto >guest/initramfs.conf
        printf '%s\n' virtio_blk >guest/modules
        make() {
            chroot . mkinitramfs -d /guest -o "/$1" "$version"
            chroot . lsinitramfs "/$1" >"$dir/$1.list"
        } ;;
    dracut)
        own=usr/lib/dracut
        install -D -m 755 "$packaging/dracut/module-setup.sh" "$own/modules.d/90ubcache/module-setup.sh"
        install -m 755 "$packaging/dracut/serve-root.sh" "$own/modules.d/90ubcache"
        install -D -m 644 "$packaging/dracut/50-ubcache.conf" "$own/dracut.conf.d/50-ubcache.conf"
        # No modules that take long to load and that no machine of the tests has.
        omit='btrfs crypt dm kernel-modules-extra lunmask nvdimm overlay-root qemu resume shutdown terminfo usrmount virtiofs'
        make() { # NAME MODULES: without these; with the drivers of the machines that the tests make, not of this one
            chroot . dracut --quiet --force --no-hostonly --no-hostonly-default-device --no-early-microcode \
                --compress 'zstd -1' --drivers 'virtio_pci virtio_blk ext4' --omit "$omit ${2:-}" "/$1" "$version"
            chroot . lsinitrd "/$1" >"$dir/$1.list"
        } ;;
esac
made() { make "$@" && cp "$1" "$dir/$1"; }
made plain.initrd
cp "$dir/ubcache.conf" etc/ubcache/initramfs.conf
made root.initrd
[ "$tool" = initramfs-tools ] || made small.initrd 'systemd systemd-initrd dracut-systemd'
