#!/bin/bash
# Runs the checks that need real verbs, and the integration programs over verbs, in a guest with soft
# RoCE. Argument: the beginning of names of checks or programs, for only those. The last line is "N passed, N failed", with ", N skipped" if any: a machine
# that cannot run the guest skips all of it, loudly, and that counts as one.
# Environment: KVP_TOP, KVP_BIN; KVP_TIMEOUT seconds of the whole (400).

cd "${KVP_TOP:?}" || exit 1
tests/rxe/guest.sh -m 3072 -t "${KVP_TIMEOUT:-400}" -- env KVP_TOP="$KVP_TOP" KVP_BIN="$KVP_BIN" \
	UCX_LOG_LEVEL=error tests/rxe/suite.sh "$@"
rc=$?
case $rc in
77)
	echo "SKIPPED: nothing was run over RDMA verbs, this machine cannot run the guest (see above)"
	echo "0 passed, 0 failed, 1 skipped"
	exit 77
	;;
124 | 125)
	echo "the guest did not end by itself, status $rc"
	echo "0 passed, 1 failed"
	;;
esac
exit $rc
