#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Rings in a GPU's memory on the GPU at hand, in the folder of `make KVP_TEST=1 gpu-bundle`: a line
# for each check. With the folder of a UCX that has CUDA (libucp.so.0 and the others, its modules in
# ucx/), landing between two daemons runs over it, too, also with rings on the device.
#
# usage: rings.sh [FOLDER]
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
. "$here/env.sh"
export UCX_LOG_LEVEL=${UCX_LOG_LEVEL:-error} UCX_WARN_UNUSED_ENV_VARS=n
bad=0
timeout 150 gpu_rings || bad=1
if [ -n "${1-}" ]; then
	with=$(cd "$1" && pwd)
	echo "with the UCX of $with"
	KVP_TEST_DEVICE=1 LD_LIBRARY_PATH=$with:$LD_LIBRARY_PATH UCX_MODULE_DIR=$with/ucx \
		timeout 100 gpu_rings "landing between two daemons" || bad=1
fi
exit $bad
