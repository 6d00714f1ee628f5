#!/bin/bash
# Runs the checks that need real verbs, and the integration programs over verbs, in a guest with soft
# RoCE. Argument: the beginning of names of checks or programs, for only those. The last line is "N passed, N failed", with ", N skipped" if any: a machine
# that cannot run the guest skips all of it, loudly, and that counts as one.
# Environment: KVP_TOP, KVP_BIN; KVP_TIMEOUT seconds of the whole (900); KVP_BRIEF for a part that takes
# some three minutes.

cd "${KVP_TOP:?}" || exit 1
env="env KVP_TOP=$KVP_TOP KVP_BIN=$KVP_BIN KVP_BRIEF=$KVP_BRIEF UCX_LOG_LEVEL=error"
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT

rc=0
case $1 in
nodes* | rooms*) echo "0 passed, 0 failed" >"$log" ;;
*)
	tests/rxe/guest.sh -m 3072 -t "${KVP_TIMEOUT:-900}" -- $env tests/rxe/suite.sh "$@" | tee "$log"
	rc=${PIPESTATUS[0]}
	;;
esac
if [ $rc = 77 ]; then
	echo "SKIPPED: nothing was run over RDMA verbs, this machine cannot run the guest (see above)"
	echo "0 passed, 0 failed, 1 skipped"
	exit 77
fi
# Two guests: rooms between them while a link goes and comes, then the second is killed.
case $1 in
"" | nodes* | rooms*)
	tests/rxe/guest.sh -n 2 -t 240 -- $env "$KVP_BIN/tests/rxe_checks" ${1:+"$1"} | tee -a "$log"
	two=${PIPESTATUS[0]}
	[ $rc != 0 ] || rc=$two
	;;
esac
case $rc in
0 | 1) ;;
*)
	echo "a guest did not end by itself, status $rc"
	echo "0 passed, 1 failed" >>"$log"
	;;
esac
# One sum of all.
sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed\(, \([0-9]*\) skipped\)\?$/\1 \2 0\4/p' "$log" |
	awk '{ p += $1; f += $2; s += $3 }
		END { printf "%d passed, %d failed%s\n", p, f, s ? ", " s " skipped" : "" }'
exit $rc
