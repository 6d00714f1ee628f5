#!/bin/bash
# Runs parity.py with the programs of this build. Arguments go to it.
# Environment: KVP_TOP, KVP_BIN as for the other tests; PYTHON, an interpreter with torch for --place cuda.
cd "${KVP_TOP:-$(dirname "$0")/../..}" || exit 1
export KVP_BIN=${KVP_BIN:-$PWD/build/plain-gcc}
export KVPACK_LIBRARY=${KVPACK_LIBRARY:-$KVP_BIN/libkvpack.so.1} OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
export UCX_LOG_LEVEL=${UCX_LOG_LEVEL:-error} UCX_WARN_UNUSED_ENV_VARS=n
exec "${PYTHON:-/usr/bin/python3}" tests/parity/parity.py "$@"
