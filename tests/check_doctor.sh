#!/bin/bash
# kvpackctl doctor on trees that look like sysfs.
ctl=${KVP_BIN:?}/kvpackctl
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
bad=0

port() # device, state; with a link-local, a RoCE v1 and, if there is a third argument, a v2 address
{
	local p=$dir/class/infiniband/$1/ports/1
	mkdir -p "$p"/{gids,gid_attrs/types,gid_attrs/ndevs,hw_counters} "$dir/class/infiniband/$1/device"
	echo "4: $2" >"$p/state"
	echo Ethernet >"$p/link_layer"
	echo "400 Gb/sec (4X NDR)" >"$p/rate"
	echo 1 >"$dir/class/infiniband/$1/device/numa_node"
	echo fe80:0000:0000:0000:0000:00ff:fe00:0001 >"$p/gids/0"
	echo "RoCE v2" >"$p/gid_attrs/types/0"
	echo 0000:0000:0000:0000:0000:ffff:0a00:0001 >"$p/gids/1"
	echo "IB/RoCE v1" >"$p/gid_attrs/types/1"
	if [ -n "$3" ]; then
		echo "0000:0000:0000:0000:0000:ffff:$3" >"$p/gids/2"
		echo "RoCE v2" >"$p/gid_attrs/types/2"
		echo eth7 >"$p/gid_attrs/ndevs/2"
	fi
	echo 5 >"$p/hw_counters/local_ack_timeout_err"
	echo 2 >"$p/hw_counters/packet_seq_err"
}

expect() # status, pattern in the output...
{
	local want=$1 out rc
	shift
	out=$(ulimit -l unlimited 2>/dev/null; KVP_SYSFS=$dir KVP_PROC=$dir/proc "$ctl" doctor $json 2>&1)
	rc=$?
	[ $rc = "$want" ] || { echo "exit status $rc instead of $want"; bad=1; }
	for pattern in "$@"; do
		grep -qE -- "$pattern" <<<"$out" || { echo "missing: $pattern in:"; echo "$out"; bad=1; }
	done
}

daemon() # pid, name, limit of locked memory
{
	mkdir -p "$dir/proc/$1"
	echo "$2" >"$dir/proc/$1/comm"
	printf '%-26s%-21s%-21s%-10s\n' Limit 'Soft Limit' 'Hard Limit' Units \
		'Max locked memory' "$3" unlimited bytes >"$dir/proc/$1/limits"
}

expect 1 'no RDMA device'
"$ctl" doctor --help | grep -q 'Exits with 1' || { echo "no help"; bad=1; }
port mlx5_0 ACTIVE
expect 1 'mlx5_0 port 1 has no RoCE v2 address'
port mlx5_0 DOWN 0a00:0007
expect 1 'mlx5_0 .*DOWN.*400 Gb' 'mlx5_0 port 1 is DOWN'
port mlx5_0 ACTIVE 0a00:0007
if [ "$(ulimit -l unlimited 2>/dev/null; ulimit -l)" = unlimited ]; then
	expect 0 'mlx5_0 +1 ACTIVE .* 2 10\.0\.0\.7 +eth7 .* 7 +0' 'nothing stands in the way'
	json=--json
	expect 0 '"gid_index":.2' '"address":."10.0.0.7"' '"resends":.7' '"findings":.\[\]'
	json=
	daemon 41 kvpackd unlimited
	daemon 42 kvpackctl 65536
	expect 0 'this shell may lock as much' 'kvpackd, process 41, may lock as much as it wants'
	daemon 43 kvpackd 8388608
	expect 1 'process 43, may lock 8192 KiB' 'process 43, .*LimitMEMLOCK=infinity below \[Service\]'
	json=--json
	expect 1 '"pid":.41' '"memlock":."unlimited"' '"memlock":.8388608'
else
	expect 1 'this shell may lock [0-9]* KiB'
fi
exit $bad
