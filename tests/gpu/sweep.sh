#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Tries the move kernel with several block sizes and loads in flight on the GPU at hand.
set -eu
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
inc="-I. -I/usr/local/cuda/include"
gcc -std=gnu17 -O2 -D_GNU_SOURCE $inc tests/gpu/gpu_move.c proto/plan.c -o "$out/gpu_move" \
	-L/usr/local/cuda/lib64/stubs -lcuda
echo
first=check
for v in ${VARIANTS:-192:3 128:4 144:4 96:6 64:8 256:2}; do
	t=${v%:*} k=${v#*:}
	nvcc -std=c++17 -arch="${ARCH:-sm_90}" -I. -DKVP_MOVE_THREADS="$t" -DKVP_MOVE_IN_FLIGHT="$k" \
		-cubin -o "$out/m.cubin" kernels/move.cu
	NEAR=1 "$out/gpu_move" "$out/m.cubin" "$t:$k" "$t" $first | grep -v "right$" || true
	"$out/gpu_move" "$out/m.cubin" "$t:$k" "$t" | grep -v "right$" || true
	[ -z "$first" ] || echo "random shapes: all right or see above"
	first=
done
