#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Compiles the variants of the move kernel that tests/gpu/gpu_sweep.c compares, for the H100's and
# H200's architecture. What is newer than its sources stays.
#
# usage: variants.sh OUT
set -eu
cd "$(dirname "$0")/../.."
out=$1 arch=${ARCH:-sm_90}
mkdir -p "$out"

names=" "
compile() # name source defines...
{
	local name=$1 source=$2
	shift 2
	names+="$name "
	[ "$out/$name.cubin" -nt "$source" ] && [ "$out/$name.cubin" -nt kernels/move.h ] &&
		[ "$out/$name.cubin" -nt "$0" ] && return
	nvcc -std=c++17 -O3 -I. -ccbin gcc -arch="$arch" "$@" -cubin -o "$out/$name.cubin" "$source"
}

plain() { # name threads in-flight defines...
	compile "$1" kernels/move.cu -DKVP_MOVE_THREADS="$2" -DKVP_MOVE_IN_FLIGHT="$3" "${@:4}"
}

bulk() { # name stages blocks
	compile "$1" tests/gpu/move_bulk.cu -DBULK_STAGES="$2" -DBULK_BLOCKS="$3"
}

# The daemon has 288x2, and goes through the pieces first only between pools.
plain 288x2-run 288 2 -DKVP_MOVE_ORDER=1
plain 288x2-entry 288 2 -DKVP_MOVE_ORDER=0
plain 288x2-whole 288 2 -DKVP_MOVE_WHOLE=1
plain 288x2-sectors 288 2 -DKVP_MOVE_WHOLE=0
plain 288x2-st0 288 2 -DKVP_MOVE_STORES=0
plain 288x1 288 1
plain 192x3 192 3
bulk bulk-2x8 2 8

for cubin in "$out"/*.cubin; do # what was one once
	name=$(basename "$cubin" .cubin)
	[[ $names == *" $name "* ]] || rm -f "$cubin"
done
