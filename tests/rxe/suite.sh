#!/bin/sh
# In the guest: the checks, then the integration programs with their data over verbs. The last line
# is the sum. $1: beginnings of names, for only those: of checks, or of programs. KVP_PART: cm, verbs,
# direct, faults or ucx, for only that part of it.
cd "$KVP_TOP" || exit 1
passed=0 failed=0 skipped=0
log=/tmp/rxe-suite.log

count() # passed, failed, skipped
{
	passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

part=verbs # what follows belongs to it
wanted()
{
	[ -z "$KVP_PART" ] || [ "$KVP_PART" = "$part" ] || return 1
	[ -z "$1" ] || case $2 in "$1"*) ;; *) false ;; esac
}

# A program whose transport the environment chooses. over: what it runs over, for the output.
net=verbs over=verbs
program() # seconds, name, arguments...
{
	limit=$(($1 * ${KVP_SLOW:-1})) name=$2
	shift 2
	[ -x "$KVP_BIN/tests/$name" ] || return 0
	from=$(date +%s%N)
	KVP_TEST_NET=$net timeout -k 2 "$limit" "$KVP_BIN/tests/$name" "$@" >$log 2>&1 </dev/null
	rc=$?
	ms=$((($(date +%s%N) - from) / 1000000))
	sum=$(grep -a 'Synthesis: Tested:' $log | tail -1 | tr -dc '0-9 ')
	if [ -n "$sum" ]; then
		set -- $sum # tested, passing
		count "$2" $(($1 - $2)) 0
		what="$2 of $1"
	else
		what=
		[ $rc = 0 ] && count 1 0 0
	fi
	if [ $rc = 0 ]; then
		echo "ok   over $over: $name $what, $ms ms"
		case $name in bench_*) sed 's/^/    /' $log ;; esac
		return
	fi
	[ -n "$sum" ] || count 0 1 0
	echo "FAIL over $over: $name, status $rc, $ms ms"
	tail -40 $log | sed 's/^/    /'
}

# Those that hold what is in a landing slot, or on its way out of one. All others leave data.mode as it
# is by default: pieces are written directly, and land where that cannot be.
landing() # name
{
	export KVP_TEST_MODE=landing
	over="verbs, landing"
	program 120 "$1"
	unset KVP_TEST_MODE
	over=verbs
}

checks() # beginnings of names
{
	"$KVP_BIN/tests/rxe_checks" "$@" >$log 2>&1
	rc=$?
	grep -v '^[0-9]* passed, ' $log
	count $(tail -1 $log | tr -dc '0-9 ' | awk '{ print $1 + 0, $2 + 0, $3 + 0 }')
	[ $rc -le 1 ] || count 0 1 0
}
# KVP_BRIEF: what CI has time for.
if [ -n "$KVP_BRIEF" ]; then
	checks net: "rails: both" "rails: a link goes silent"
	for name in test_lane test_lane_hostile demo; do program 120 $name; done
	for name in test_lane_rooms replay_faults_kill; do landing $name; done
	net=ucx over="UCX, rc_verbs"
	program 120 test_lane
	echo "$passed passed, $failed failed$([ $skipped = 0 ] || echo ", $skipped skipped")"
	[ $failed = 0 ]
	exit
fi
# The net and rails checks with connections made by librdmacm. Before the others: where links were down for
# seconds, as after those, its first connection takes more than the five that a check waits.
part=cm
cm()
{
	over="verbs, connect = rdma_cm"
	export KVP_TEST_CONNECT=rdma_cm
	echo "connections by librdmacm:"
	checks net: rails:
	program 120 demo
	unset KVP_TEST_CONNECT
	over=verbs
}
! wanted "$1" cm || cm
part=verbs
! wanted "" || checks ${1:+"$1"}

# What kvpackctl says of the devices that the checks used.
doctor()
{
	if "$KVP_BIN/kvpackctl" doctor >$log && grep -q 'rxe2 .*ACTIVE .* 10\.9\.1\.2 .*veth2' $log; then
		echo "ok   doctor"
		count 1 0 0
	else
		echo "FAIL doctor"
		count 0 1 0
	fi
	sed 's/^/    /' $log
}
! wanted "$1" doctor || doctor

for name in test_lane test_lane_fair test_lane_hostile demo replay_sglang replay_vllm \
	replay_faults_abort; do
	! wanted "$1" $name || program 120 $name
done
for name in test_lane_rooms replay_faults_kill; do
	! wanted "$1" $name || landing $name
done

# Over two rails, of which one comes and goes meanwhile.
flap()
{
	while :; do
		sleep 1
		ip link set veth3 down
		sleep 1
		ip link set veth3 up
		ip route replace 10.9.3.2/32 dev veth3 src 10.9.3.1
		sleep 2
	done
}
rails()
{
	over="two rails, one of them failing"
	export KVP_TEST_RAILS=2
	flap &
	flap=$!
	program 120 replay_sglang
	kill $flap
	wait $flap 2>/dev/null
	ip link set veth3 up
	ip route replace 10.9.3.2/32 dev veth3 src 10.9.3.1
	unset KVP_TEST_RAILS
	over=verbs
}
! wanted "$1" rails || rails
! wanted "$1" bench_verbs || program 60 bench_verbs rxe0

# What kills, stops and restarts engines and daemons.
part=faults
faults()
{
	for name in replay_failures replay_faults_drain replay_faults_restart replay_hot; do
		program 120 $name
	done
	landing replay_faults_stop
}
! wanted "$1" faults || faults

# The same over reliable connections that UCX makes.
part=ucx
ucx()
{
	net=ucx over="UCX, rc_verbs"
	for name in test_lane test_lane_rooms demo replay_sglang replay_vllm replay_faults_abort \
		replay_faults_kill replay_faults_restart replay_hot; do
		program 180 $name
	done
	net=verbs over=verbs
}
! wanted "$1" ucx || ucx

# Straight into the pools, and where that cannot be the room fails.
part=direct
direct()
{
	over="verbs, direct"
	export KVP_TEST_MODE=direct
	for name in test_lane test_lane_rooms replay_sglang replay_faults_abort; do
		program 120 $name
	done
	program 120 replay_faults_kill grant gather send landed complete
	unset KVP_TEST_MODE
	over=verbs
}
! wanted "$1" direct || direct
echo "$passed passed, $failed failed$([ $skipped = 0 ] || echo ", $skipped skipped")"
[ $failed = 0 ]
