#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs clang-tidy over one file.
#
# usage: tidy.sh COMPILER-FLAG ... -- FILE
flags=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do flags+=("$1"); shift; done
[ $# = 2 ] || { echo "usage: tidy.sh COMPILER-FLAG ... -- FILE"; exit 2; } >&2
out=$(clang-tidy --quiet "$2" -- "${flags[@]}" 2>/dev/null) && exit 0
grep -A2 -E ': (error|warning): ' <<<"$out" | grep -v ^--
exit 1
