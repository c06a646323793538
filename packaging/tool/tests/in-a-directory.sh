# shellcheck shell=sh
# usage: in-a-directory.sh DIR PACKAGE LINKS: installs the packages with DIR as the root directory, uses their files, removes them.
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin
root=$1/root
package=$2
links=$3
fine() { echo "$1: fine"; }
# The file has a line with the pattern.
has() {
    grep -q "$2" "$1" || {
        echo "expected $2 in $1, found:"
        cat "$1"
        exit 1
    }
}

mkdir -p "$root/var/lib/dpkg/info" "$root/var/lib/dpkg/updates" "$root/run"
# The dependencies of the package are installed.
for needed in libc6 libgcc-s1; do
    dpkg-query --status $needed
    echo
    : >"$root/var/lib/dpkg/info/$needed:$(dpkg --print-architecture).list"
done >"$root/var/lib/dpkg/status"
package_manager() { dpkg --root="$root" --force-not-root --force-script-chrootless --log=/dev/null "$@"; }
package_manager --install "$package" >"$1/install.log" 2>&1 || { cat "$1/install.log"; exit 1; }
ubcache=$root/usr/bin/ubcache
"$ubcache" --version
fine installed

for unit in ubcache.service ubcache-volume@data.service ubcache-register@sdx.service; do
    systemd-analyze verify --root="$root" --man=no "$unit"
done >"$1/verify.log" 2>&1 || true
# The directory has no programs of the system.
if grep ubcache "$1/verify.log" | grep -v 'Command /s\?bin/[a-z]* is not executable'; then exit 1; fi
fine units

bash -c ". '$root/usr/share/bash-completion/completions/ubcache' && complete -p ubcache" >/dev/null
grep -q '#compdef ubcache' "$root/usr/share/zsh/vendor-completions/_ubcache"
grep -q 'complete -c ubcache' "$root/usr/share/fish/vendor_completions.d/ubcache.fish"
fine completions

zcat "$root/usr/share/man/man8/ubcache-make.8.gz" >"$1/make.8"
for section in TH SH\ EXAMPLES SH\ FILES 'SH "SEE ALSO"'; do grep -q "^.$section" "$1/make.8"; done
zcat "$root/usr/share/man/man5/ubcache.toml.5.gz" | grep -q '^.TH ubcache.toml 5'
fine manual

# The devices are files; the configuration is the installed one with other paths.
cd "$1"
truncate -s 64M cache
truncate -s 256M disk
"$ubcache" make --writeback -C cache -B disk --label data >/dev/null
config=$root/etc/ubcache/ubcache.toml
sed -i "s|^#exports = .*|exports = [\"nbd=$1/data.sock\"]|" "$config"
grep -q '^exports' "$config"
grep -q '^sysfs_view = "/run/ubcache/sys"' "$config"
sed -i "s|^sysfs_view = .*|sysfs_view = \"$1/sys\"|" "$config"
socket=$root/run/control.sock
with() { "$ubcache" "$@" --socket "$socket"; }
if with wait --timeout 0 data 2>wait.log; then exit 1; fi
has wait.log 'was not served within 0 seconds: no daemon runs'
"$ubcache" daemon --config "$config" --socket "$socket" --state-dir "$root/var/lib/ubcache" >daemon.log 2>&1 &
daemon=$!
trap 'kill -9 $daemon 2>/dev/null || true; umount -l "$1/sys" 2>/dev/null || true' EXIT
# The daemon may still be starting.
if with wait --timeout 5 nothing 2>wait.log; then exit 1; fi
has wait.log 'there is no volume or set nothing'
with register cache disk
with wait --timeout 60 data
with status >status.log
has status.log data
with set data writeback_percent=20 >/dev/null
with get data writeback_percent >get.log
has get.log 20
# The sysfs view, if FUSE is available.
if grep -q 'the sysfs view is not available' daemon.log; then
    [ ! -w /dev/fuse ] || [ "$(id -u)" != 0 ]
else
    grep -q 20 sys/block/bcache0/bcache/writeback_percent
fi
fine served
kill -TERM $daemon
wait $daemon || { cat daemon.log; exit 1; }
"$ubcache" check cache disk >/dev/null
fine stopped

package_manager --install "$links" >"$1/links.log" 2>&1 || { cat "$1/links.log"; exit 1; }
truncate -s 64M named
"$root/usr/sbin/make-bcache" -C named | grep -q '^Set UUID:'
"$root/usr/sbin/bcache-super-show" named | grep -q 'cache device'
"$root/usr/sbin/bcache" version >/dev/null
"$root/usr/lib/udev/probe-bcache" named | grep -q 'TYPE="bcache"'
package_manager --remove ubcache-bcache-tools >/dev/null
[ ! -e "$root/usr/sbin/make-bcache" ]
fine links

package_manager --remove ubcache >/dev/null
[ ! -e "$ubcache" ] && [ -e "$config" ] && [ ! -e "$root/usr/lib/systemd/system/ubcache.service" ]
fine removed
package_manager --purge ubcache >/dev/null
[ ! -e "$root/etc/ubcache" ] && [ ! -e "$root/var/lib/ubcache" ]
# The devices have not changed.
[ "$(stat -c %s cache disk | tr '\n' ' ')" = '67108864 268435456 ' ]
fine purged
