#!/bin/bash
# Module for dracut: puts ubcache into the initramfs if /etc/ubcache/initramfs.conf names the devices of a set, so that the root
# file system can be on a volume of that set. With --add ubcache dracut includes the module also without that file, for devices that
# the kernel's command line names.

check() {
    local UBCACHE_CACHE=
    require_binaries /usr/bin/ubcache || return 1
    # shellcheck source=/dev/null
    [[ ! -r ${dracutsysrootdir-}/etc/ubcache/initramfs.conf ]] || . "${dracutsysrootdir-}/etc/ubcache/initramfs.conf"
    [[ $UBCACHE_CACHE ]] || return 255
}

depends() {
    echo rootfs-block udev-rules
}

installkernel() {
    hostonly='' instmods ublk_drv
}

install() {
    inst_multiple /usr/bin/ubcache mkdir modprobe sleep
    inst_script /usr/lib/ubcache/serve-root
    inst_multiple -o /etc/ubcache/initramfs.conf
    inst_rules 69-ubcache-volumes.rules
    inst_simple /usr/lib/ubcache/initramfs.rules /usr/lib/udev/rules.d/68-ubcache.rules
    # shellcheck disable=SC2154 # dracut's
    inst_hook initqueue/settled 50 "$moddir/serve-root.sh"
    dracut_need_initqueue
}
