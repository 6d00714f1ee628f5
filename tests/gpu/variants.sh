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

free=-DKVP_MOVE_MIN_BLOCKS=1 # as many registers as the compiler likes
plain 288x2-entry 288 2 -DKVP_MOVE_RUN_FIRST=0
plain 288x2-stream 288 2 -DKVP_MOVE_LOADS=0 -DKVP_MOVE_STORES=0
plain 288x2-ld1 288 2 -DKVP_MOVE_LOADS=1
plain 288x2-ld2 288 2 -DKVP_MOVE_LOADS=2
plain 288x2-ld2-st0 288 2 -DKVP_MOVE_LOADS=2 -DKVP_MOVE_STORES=0
plain 288x2-st0 288 2 -DKVP_MOVE_STORES=0
plain 288x2-st1 288 2 -DKVP_MOVE_STORES=1
plain 288x2-st2 288 2 -DKVP_MOVE_STORES=2
plain 288x1 288 1
plain 288x3 288 3
plain 96x6 96 6 $free
plain 64x9 64 9 $free
plain 144x4 144 4 $free
plain 192x3 192 3
plain 256x3 256 3
plain 384x2 384 2
plain 512x2 512 2
bulk bulk-1-all 1 0
bulk bulk-2x8 2 8

for cubin in "$out"/*.cubin; do # what was one once
	name=$(basename "$cubin" .cubin)
	[[ $names == *" $name "* ]] || rm -f "$cubin"
done
