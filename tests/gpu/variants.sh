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

compile() # name source defines...
{
	local name=$1 source=$2
	shift 2
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

run=-DKVP_MOVE_RUN_FIRST=1
plain 96x6-run 96 6 $run
plain 192x3 192 3
plain 192x3-run 192 3 $run
plain 288x2 288 2
plain 144x4 144 4
plain 64x9 64 9
plain 576x1 576 1
plain 96x3 96 3
plain 96x6-ld1 96 6 -DKVP_MOVE_LOADS=1
plain 96x6-ld2 96 6 -DKVP_MOVE_LOADS=2
plain 96x6-st1 96 6 -DKVP_MOVE_STORES=1
plain 96x6-st2 96 6 -DKVP_MOVE_STORES=2
plain 96x6-ld2-st1 96 6 -DKVP_MOVE_LOADS=2 -DKVP_MOVE_STORES=1
plain 96x6-min16 96 6 -DKVP_MOVE_MIN_BLOCKS=16
plain 192x3-ld2-st1 192 3 -DKVP_MOVE_LOADS=2 -DKVP_MOVE_STORES=1
bulk bulk-1-all 1 0
bulk bulk-2-all 2 0
bulk bulk-2x8 2 8
bulk bulk-3x6 3 6
bulk bulk-6x3 6 3
bulk bulk-4x5 4 5
bulk bulk-1x20 1 20
