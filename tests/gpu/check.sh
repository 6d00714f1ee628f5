#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Checks the daemon's GPU parts on the GPU at hand and prints a short table. Runs in the folder of
# `make KVP_TEST=1 gpu-bundle`, or in a tree after `make KVP_TEST=1 tests`.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
if [ -f "$here/env.sh" ]; then
	. "$here/env.sh"
	bin=$here/bin
else
	bin=${BUILD:-$here/../build/plain-gcc-test}/tests/gpu
fi
bad=0
timeout 180 "$bin/gpu_check" || bad=1
for t in test_lane test_lane_rooms test_lane_fair test_lane_hostile; do
	log=$(timeout 120 "$bin/$t" -j2 2>&1)
	rc=$?
	printf '%-5s %-44s %s\n' "$([ $rc = 0 ] && echo ok || echo FAIL)" "lanes on this GPU: $t" \
		"$(tail -1 <<<"$log")"
	[ $rc = 0 ] || { bad=1; tail -25 <<<"$log"; }
done
exit $bad
