#!/bin/bash
# Runs test programs, two at a time, and sums their results. The last line is
# "N passed, N failed" with ", N skipped" if any; the exit status says whether all passed.
# A test_* program is a Criterion runner and counts its tests; anything else counts as one test:
# exit status 0 passed, 77 skipped, other failed.
# Environment: KVP_TOP, KVP_BIN (for the programs), KVP_TIMEOUT seconds each (300),
# KVP_WRAP a command to run them under, KVP_JOBS at once (2), KVP_SHOW=1 to see what they print.

# The runner itself was aborted by LeakSanitizer, and no test had a complaint before.
runner_leaks() # log exit-status
{
	[ "$2" = 134 ] && sed -n '/Synthesis: Tested:/,$p' "$1" | grep -q LeakSanitizer &&
		! sed '/Synthesis: Tested:/,$d' "$1" | grep -aqE 'Sanitizer|runtime error|^\[WARN\]'
}

run_one() # program -> line in the results file, text on stdout
{
	local prog=$1 name=${1##*/} log=$out/${1##*/}.log args=() rc passed=0 failed=0 skipped=0 from=$EPOCHREALTIME
	local wrap=$KVP_WRAP
	case $name in
	fuzz_*) [ ! -d "tests/corpus/${name#fuzz_}" ] || args=("tests/corpus/${name#fuzz_}") ;;
	*.sh) wrap= ;;
	esac
	{ timeout -k 5 "${KVP_TIMEOUT:-300}" $wrap "$prog" "${args[@]}" >"$log" 2>&1 </dev/null; } 2>/dev/null
	rc=$?
	local sum=$(grep -a 'Synthesis: Tested:' "$log" | tail -1 | tr -dc '0-9 ')
	if [ -n "$sum" ] && [ "${name#test_}" != "$name" ]; then
		set -- $sum # tested passing failing crashing
		passed=$2 failed=$(($1 - $2))
		# Criterion's runner leaks a little of its own at times, after its tests have ended.
		[ $rc = 0 ] || [ $failed != 0 ] || runner_leaks "$log" $rc || failed=1
	else
		case $rc in
		0) passed=1 ;;
		77) skipped=1 ;;
		*) failed=1 ;;
		esac
	fi
	echo "$passed $failed $skipped" >>"$out/results"

	local secs=$(printf '%d.%01d' $(((${EPOCHREALTIME/./} - ${from/./}) / 1000000)) \
		$(((${EPOCHREALTIME/./} - ${from/./}) / 100000 % 10)))
	if [ $failed != 0 ]; then
		{
			echo "FAIL $name: $passed passed, $failed failed, exit status $rc, ${secs} s"
			grep -av '^\[\(RUN \|PASS\)' "$log" | tail -60 | sed 's/^/    /'
		} >"$log.fail"
		cat "$log.fail"
	elif [ $skipped != 0 ]; then
		echo "skip $name: $(tail -1 "$log")"
	else
		echo "ok   $name: $passed, ${secs} s"
		[ -z "$KVP_SHOW" ] || cat "$log"
	fi
}

cd "${KVP_TOP:?}" || exit 1
out=$KVP_BIN/results
rm -rf "$out"
mkdir -p "$out"
: >"$out/results"

export UCX_LOG_LEVEL=${UCX_LOG_LEVEL:-error} UCX_WARN_UNUSED_ENV_VARS=n
export ASAN_OPTIONS=abort_on_error=1:${ASAN_OPTIONS}
export UBSAN_OPTIONS=print_stacktrace=1:${UBSAN_OPTIONS}
# UCX writes its hooks over the code of munmap(), where TSan has to hear what memory is new.
case $KVP_BIN in *thread*) export UCX_MEM_MMAP_HOOK_MODE=none ;; esac
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1$([ -e tests/tsan.supp ] && echo ":suppressions=$KVP_TOP/tests/tsan.supp"):${TSAN_OPTIONS}

for prog in "$@"; do
	while [ "$(jobs -rp | wc -l)" -ge "${KVP_JOBS:-2}" ]; do wait -n; done
	run_one "$prog" &
done
wait

awk '{ p += $1; f += $2; s += $3 }
	END { printf "%d passed, %d failed%s\n", p, f, s ? ", " s " skipped" : ""; exit f > 0 }' "$out/results"
