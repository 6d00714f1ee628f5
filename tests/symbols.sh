#!/bin/bash
# Compares what libkvpack.so exports with the list in client/libkvpack.sym.
cd "${KVP_TOP:-.}" || exit 1
lib=${KVP_BIN:-build/plain-gcc}/libkvpack.so.1
if [ ! -e client/libkvpack.sym ] || [ ! -e "$lib" ]; then
	echo "no library or no symbol file here"
	exit 77
fi

listed=$(sed 's|/\*.*\*/||; s|local:.*||' client/libkvpack.sym | grep -oE 'kvp[a-z0-9_]*[[:space:]]*;' | tr -d ' ;' | sort)
exported=$(nm -D --defined-only "$lib" | awk '$2 == "T" || $2 == "D" || $2 == "B" || $2 == "R" { sub(/@.*/, "", $3); print $3 }' | sort)
diff <(echo "$listed") <(echo "$exported") >/dev/null && exit 0

echo "listed but not exported (is it declared with default visibility in kvpack.h?):"
comm -23 <(echo "$listed") <(echo "$exported") | sed 's/^/  /'
echo "exported but not listed:"
comm -13 <(echo "$listed") <(echo "$exported") | sed 's/^/  /'
exit 1
