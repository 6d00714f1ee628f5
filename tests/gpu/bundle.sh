#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Packs what a bare GPU machine needs to run our programs: binaries, the shared libraries that they need
# beyond the C library, UCX's modules, the Python binding, and tests/gpu. Prints the folder.
#
# usage: bundle.sh BUILD OUT
set -eu
build=$1 out=$2
rm -rf "$out"
mkdir -p "$out"/{bin,lib/ucx,client/python,tests}
cp "$build"/kvpackd "$build"/kvpackctl "$out/bin"
for t in demo bench_transfer bench_gpu replay_gpu replay_gpu_bad replay_gpu_fence replay_gpu_peer replay_soak load bench_fair matrix; do
	[ ! -x "$build/tests/$t" ] || cp "$build/tests/$t" "$out/bin"
done
for t in "$build"/tests/gpu/*; do
	[ ! -f "$t" ] || [ ! -x "$t" ] || cp "$t" "$out/bin"
done
[ ! -d "$build/tests/gpu/variants" ] || cp -r "$build/tests/gpu/variants" "$out"
cp "$build"/libkvpack.so.1 "$out/lib"
cp tests/gpu/*.sh tests/gpu/*.py "$out/tests"
cp -r tests/parity "$out/tests"
cp -r client/python/kvpack client/python/tests "$out/client/python"
modules=$(dirname "$(ldconfig -p | awk '/libucp\.so\.0 / { print $NF; exit }')")/ucx
[ ! -d "$modules" ] || cp -L "$modules"/*.so* "$out/lib/ucx"
# The C library and its parts are the machine's own.
for f in "$out"/bin/* "$out"/lib/ucx/*; do ldd "$f" 2>/dev/null; done |
	awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
	grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|libcuda|ld-linux[^/]*)\.so' |
	while read -r lib; do cp -nL "$lib" "$out/lib"; done
cat > "$out/env.sh" <<'END'
# Source it in the bundle's folder: programs find their libraries, UCX its modules.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export LD_LIBRARY_PATH=$here/lib KVP_BIN=$here/bin KVP_TOP=$here PYTHONPATH=$here/client/python
export KVPACK_LIBRARY=$here/lib/libkvpack.so.1 UCX_MODULE_DIR=$here/lib/ucx PATH=$here/bin:$PATH
END
for run in "check machine check rings replay bad fences peer torch-caching torch-expandable demo sanitizer parity lanes" \
	"bench machine sweep alone triton bench profile"; do
	name=$out/gpu-${run%% *}
	printf '#!/bin/bash\n# The stages of tests/all.sh that %s.\nexec "$(dirname "$0")/tests/all.sh" %s\n' \
		"${run%% *}" "${run#* }" >"$name"
	chmod +x "$name"
done
strip --strip-debug "$out"/bin/* "$out"/lib/*.so* 2>/dev/null || true
find "$out" -name __pycache__ -prune -exec rm -rf {} +
du -sh "$out"
