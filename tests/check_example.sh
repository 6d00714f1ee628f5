#!/bin/bash
# The example in README.md compiles as C99 against the shared library alone and runs against a daemon.
cd "${KVP_TOP:-.}" || exit 1
bin=${KVP_BIN:-build/plain-gcc}
case $bin in *address* | *thread*) echo "a sanitizer's library needs a program built with it"; exit 77 ;; esac

dir=$(mktemp -d) || exit 1
trap 'kill $daemon 2>/dev/null; wait; rm -rf "$dir"' EXIT
sed -n '/^```c$/,/^```$/p' README.md | sed '1d;$d' >"$dir/example.c"
[ -s "$dir/example.c" ] || { echo "README.md: no example"; exit 1; }
${CC:-cc} -std=c99 -Wall -Wextra -Werror -Iclient -o "$dir/example" "$dir/example.c" \
	-L"$bin" -Wl,-rpath,"$(cd "$bin" && pwd)" -lkvpack || exit 1
printf '[client]\nsocket = %s/sock\nmode = 0600\ngroup =\n' "$dir" >"$dir/conf"
"$bin/kvpackd" --config "$dir/conf" 2>"$dir/log" &
daemon=$!
for _ in $(seq 200); do
	[ -S "$dir/sock" ] && break
	sleep 0.05
done
KVPACK_SOCKET=$dir/sock timeout 20 "$dir/example" && exit 0
cat "$dir/log"
exit 1
