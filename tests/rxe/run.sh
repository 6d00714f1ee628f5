#!/bin/bash
# Runs the checks that need real verbs, and the integration programs over verbs, in a guest with soft
# RoCE. Argument: the beginning of names of checks or programs, for only those. The last line is "N passed, N failed", with ", N skipped" if any: a machine
# that cannot run the guest skips all of it, loudly, and that counts as one.
# Environment: KVP_TOP, KVP_BIN; KVP_TIMEOUT seconds of each guest (900); KVP_BRIEF for a part that takes
# some three minutes; KVP_SLOW: how many times slower than a quiet one
# the machine may be before a deadline of a test passes (3: an emulator feels it when others use the processors).

cd "${KVP_TOP:?}" || exit 1
env="env KVP_TOP=$KVP_TOP KVP_BIN=$KVP_BIN KVP_BRIEF=$KVP_BRIEF KVP_SLOW=${KVP_SLOW:-3} UCX_LOG_LEVEL=error"
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT

rc=0
guest() # arguments of guest.sh
{
	local status
	tests/rxe/guest.sh "$@" | tee -a "$log"
	status=${PIPESTATUS[0]}
	case $status in
	0 | 77) ;;
	1) [ $rc != 0 ] || rc=1 ;; # the sum says it
	*)
		echo "a guest did not end by itself, status $status"
		echo "0 passed, 1 failed" >>"$log"
		rc=$status
		;;
	esac
	return "$status"
}
suite() # part, arguments...
{
	local name=$1 from=$SECONDS status
	shift
	guest -m 3072 -t "${KVP_TIMEOUT:-900}" -- $env KVP_PART="$name" tests/rxe/suite.sh "$@"
	status=$?
	echo "---- $name: $((SECONDS - from)) s"
	return $status
}

# Parts in guests of their own: one that hangs takes no others with it, and each begins with links that
# were never down.
case $1 in
nodes* | rooms*) parts= ;;
"") parts="cm verbs direct faults ucx" ;;
cm | direct | faults | ucx) parts=$1 ;;
*) parts=verbs ;;
esac
[ -z "$KVP_BRIEF" ] || parts=brief
for name in $parts; do
	suite $name "$@"
	if [ $? = 77 ]; then
		echo "SKIPPED: nothing was run over RDMA verbs, this machine cannot run the guest (see above)"
		echo "0 passed, 0 failed, 1 skipped"
		exit 77
	fi
done
# Two guests: rooms between them while a link goes and comes, then the second is killed.
case $1 in
"" | nodes* | rooms*) guest -n 2 -t 400 -- $env "$KVP_BIN/tests/rxe_checks" ${1:+"$1"} ;;
esac
# One sum of all.
sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed\(, \([0-9]*\) skipped\)\?$/\1 \2 0\4/p' "$log" |
	awk '{ p += $1; f += $2; s += $3 }
		END { printf "%d passed, %d failed%s\n", p, f, s ? ", " s " skipped" : "" }'
exit $rc
