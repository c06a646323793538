#!/bin/sh
# dracut reads this into its shell again and again until the root file system is found.
if ubcache_said=$(/usr/lib/ubcache/serve-root); then
    [ -z "$ubcache_said" ] || info "$ubcache_said"
else
    echo "$ubcache_said" | vwarn
fi
unset ubcache_said
