#!/bin/bash
# The Python package against real daemons, and a short form of `make parity`.
# Environment: KVP_TOP, KVP_BIN as for the other tests.
cd "${KVP_TOP:-.}" || exit 1
export KVP_TOP=$PWD KVP_BIN=${KVP_BIN:-$PWD/build/plain-gcc}
export KVPACK_LIBRARY=$KVP_BIN/libkvpack.so.1
export UCX_LOG_LEVEL=${UCX_LOG_LEVEL:-error} UCX_WARN_UNUSED_ENV_VARS=n
export OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1

if [ ! -e "$KVP_BIN/kvpackd" ] || [ ! -e "$KVPACK_LIBRARY" ]; then
	echo "no daemon or no library here"
	exit 77
fi
if nm -D "$KVPACK_LIBRARY" | grep -qE ' U __(asan|tsan|ubsan)_'; then
	echo "an interpreter cannot load a library with sanitizers"
	exit 77
fi
if ! /usr/bin/python3 -c 'import numpy, pytest' 2>/dev/null; then
	echo "needs python3-numpy and python3-pytest"
	exit 77
fi

timeout 160 /usr/bin/python3 -m pytest -q -p no:cacheprovider client/python/tests || exit 1
timeout 60 tests/parity/run.sh --quick || exit 1

# With a row out of its place it must say so.
timeout 30 tests/parity/run.sh --fault shift
[ $? = 1 ]
