#!/bin/bash
# Runs clang-tidy over one file. Arguments: compiler flags -- file
flags=()
while [ "$1" != -- ]; do flags+=("$1"); shift; done
out=$(clang-tidy --quiet "$2" -- "${flags[@]}" 2>/dev/null) && exit 0
grep -A2 -E ': (error|warning): ' <<<"$out" | grep -v ^--
exit 1
