#!/bin/sh
# dracut sources this script repeatedly until it finds the root file system.
if ubcache_said=$(/usr/lib/ubcache/serve-root); then
    [ -z "$ubcache_said" ] || info "$ubcache_said"
else
    echo "$ubcache_said" | vwarn
fi
unset ubcache_said
