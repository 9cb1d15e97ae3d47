#!/bin/sh
# check_exports.sh LIBRARY PATTERN: fails if LIBRARY exports nothing, or a symbol that does not match PATTERN.
set -eu
symbols=$(nm --dynamic --defined-only --format=posix "$1" | cut -d' ' -f1)
[ -n "$symbols" ] || { echo "$1 exports nothing"; exit 1; }
if printf '%s\n' "$symbols" | grep -v -E "$2"; then
    echo "$1 exports the above; only $2 is meant to be seen"
    exit 1
fi
