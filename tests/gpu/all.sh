#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Everything that a machine with a GPU can check and measure, in less than nine minutes. Runs in the
# folder of `make KVP_TEST=1 gpu-bundle`. Each stage has a time of its own; one that fails does not
# keep the next from running. Prints the essence of each, and leaves the rest in $OUT.
#
# usage: all.sh [STAGE ...]     (none: all)
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
. "$here/env.sh"
export UCX_LOG_LEVEL=error UCX_WARN_UNUSED_ENV_VARS=n PYTHONDONTWRITEBYTECODE=1
export PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
export OUT=${OUT:-$(mktemp -d)}
out=$OUT
python=${PYTHON:-python3}
only=" $* "
limit=${LIMIT:-535} # seconds, all together
results=()

# Runs a command with so many seconds; shows the lines of its output that match, at most `lines`.
stage() # name seconds lines pattern command...
{
	local name=$1 secs=$2 lines=$3 pattern=$4 from=$SECONDS rc
	shift 4
	[ "$only" = "  " ] || [[ $only == *" $name "* ]] || return 0
	((secs = secs < limit - SECONDS ? secs : limit - SECONDS))
	if ((secs < 5)); then
		results+=("$name: no time left")
		return 0
	fi
	timeout -k 3 "$secs" "$@" >"$out/$name.log" 2>&1 </dev/null
	rc=$?
	results+=("$name: rc $rc, $((SECONDS - from)) s")
	echo "== $name: rc $rc, $((SECONDS - from)) s"
	grep -E "$pattern" "$out/$name.log" | tail -n "$lines" | cut -c1-200
	[ $rc = 0 ] || { echo "-- the end of its output:"; tail -n 8 "$out/$name.log" | cut -c1-300; }
}

machine()
{
	nvidia-smi --query-gpu=name,driver_version,clocks.max.mem,clocks.sm,memory.used --format=csv,noheader
	for tool in nvcc ncu nsys compute-sanitizer; do
		echo "$tool: $(command -v $tool || echo not there)"
	done
	"$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
	kvpackd --version
	nproc
}

used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader; }

sanitized() # both memory checkers that matter, on random tables
{
	command -v compute-sanitizer || { echo "compute-sanitizer: not there"; return 0; }
	compute-sanitizer --tool memcheck --error-exitcode 9 gpu_check 40 &&
		compute-sanitizer --tool racecheck --error-exitcode 9 gpu_check 10 &&
		compute-sanitizer --tool initcheck --error-exitcode 9 gpu_check 10
}

profiled() # what gathers read and write, and how near the memory is to its peak
{
	command -v ncu || { echo "ncu: not there"; return 0; }
	ncu --kernel-name regex:kvp_move --cache-control none --clock-control none --csv --metrics \
		dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed \
		gpu_sweep once "$here"/variants/288x2-run.cubin >"$OUT/profile.csv" &&
		"$python" - "$OUT/profile.csv" <<'END'
import csv, sys
lines = open(sys.argv[1]).read().splitlines()
shapes = [line for line in lines if line.endswith(" launches")]
rows = {}
for row in csv.DictReader(line for line in lines if line.startswith('"')):
    rows.setdefault(int(row["ID"]), {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
ids = iter(sorted(rows))
for shape in shapes:
    own = [rows[next(ids)] for _ in range(int(shape.split(",")[-1].split()[0]))]
    total = lambda name: sum(row[name] for row in own)
    peak = sum(row["dram__throughput.avg.pct_of_peak_sustained_elapsed"] for row in own) / len(own)
    print(f"{shape}: read {total('dram__bytes_read.sum') / 1e6:.2f} MB, written "
          f"{total('dram__bytes_write.sum') / 1e6:.2f} MB, {total('gpu__time_duration.sum') / 1e3:.1f} us, {peak:.1f} % of the memory's peak")
END
}

lanes() # more than once: what depends on time does not show each time
{
	local bad=0 t i
	for i in 1 2 3; do
		for t in test_lane test_lane_rooms test_lane_fair test_lane_hostile; do
			timeout 40 "$here/bin/$t" -j2 >"$out/$t.$i.log" 2>&1 || bad=1
			echo "lanes on this GPU, $i: $t: $(tail -1 "$out/$t.$i.log")"
		done
	done
	return $bad
}

# timeout(1) runs programs: this one again, for a function.
case ${1-} in
:*)
	"${1#:}"
	exit
	;;
esac
self=$here/tests/${0##*/}
before=$(used)
stage machine 30 12 . "$self" :machine
stage check 70 40 . gpu_check
stage rings 90 60 '^(ok|FAIL|[0-9]+ )' gpu_rings
stage sweep 110 40 . gpu_sweep "$here"/variants/*.cubin
stage alone 60 20 . gpu_sweep alone "$here"/variants/288x2-run.cubin
stage replay 110 30 . replay_gpu
stage bad 30 12 . replay_gpu_bad
stage fences 40 20 . replay_gpu_fence
[ "$(nvidia-smi -L | wc -l)" -lt 2 ] || stage peer 60 12 . replay_gpu_peer
stage torch-caching 60 12 . "$python" "$here/tests/torch_check.py" caching
stage torch-expandable 60 12 . "$python" "$here/tests/torch_check.py" expandable
stage triton 70 12 . "$python" "$here/tests/triton_base.py" 60
stage bench 100 50 . bench_gpu
stage demo 45 12 '^(kvpack|node|host|local|times|packing|checked|FAILED)' demo
stage sanitizer 60 8 'ERROR SUMMARY|RACECHECK|ok|FAIL|not there' "$self" :sanitized
stage parity 60 4 'requests in|FAIL' "$python" "$here/tests/parity/parity.py" --quick --place cuda
stage profile 40 40 . "$self" :profiled
stage lanes 100 14 . "$self" :lanes
echo "== GPU memory in use before: $before, after: $(used)"
printf '%s\n' "${results[@]}" | tee "$out/results.txt"
! grep -qE 'rc [1-9]|no time left' "$out/results.txt"
