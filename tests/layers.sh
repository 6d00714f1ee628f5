#!/bin/bash
# Checks from the includes that dependencies point downwards only:
#   proto/   includes proto/ and the public header client/kvpack.h, which includes nothing of ours
#   client/  includes client/ and proto/; kvpackctl (client/ctl*) only the public API and the planner
#   daemon/  includes what proto/ may, kernels/*.h, and daemon/ files of a lower rank (or the same name)
#
# Ranks of daemon/, lowest first; files on one line may include each other. A name with * is a prefix.
ranks="
log inbox config notify files
board table net ring copy admits
sums cuda jobs
gpu*
mover
nic qp rail*
net_verbs* net_ucx*
lane* rx* tx* link
memfd lists
pool pool_guest fence
peer*
room*
core
session* server inspect* turns process
daemon
main
"

cd "${KVP_TOP:-.}" || exit 1
bad=0
error() { echo "$*"; bad=1; }

rank_of() # base name without suffix -> its rank, empty if unknown
{
	local r=0 line name
	while read -r line; do
		[ -n "$line" ] || continue
		r=$((r + 1))
		set -f
		for name in $line; do
			# shellcheck disable=SC2053
			[[ $1 == $name ]] && { echo $r; set +f; return; }
		done
		set +f
	done <<<"$ranks"
}

declare -A rank
for f in daemon/*.[ch]; do
	[ -e "$f" ] || continue
	b=${f#daemon/} b=${b%.*}
	[ -n "${rank[$b]}" ] && continue
	rank[$b]=$(rank_of "$b")
	[ -n "${rank[$b]}" ] || error "$f: unknown file; add $b to the ranks on top of tests/layers.sh"
done

while IFS=: read -r file text; do
	inc=${text#*\"} inc=${inc%%\"*}
	case $file in
	client/kvpack.h) error "$file includes $inc: the public header must stand alone" ;;
	proto/*)
		[[ $inc == proto/* || $inc == client/kvpack.h ]] ||
			error "$file includes $inc: proto/ may include proto/ and client/kvpack.h only"
		;;
	client/ctl*)
		case $inc in
		client/ctl* | client/kvpack.h | proto/plan.h | proto/util.h | proto/limits.h | proto/status.h) ;;
		*) error "$file includes $inc: kvpackctl may use the public API and the planner only" ;;
		esac
		;;
	client/*) [[ $inc == client/* || $inc == proto/* ]] || error "$file includes $inc: client/ may include client/ and proto/ only" ;;
	daemon/*)
		case $inc in
		proto/* | client/kvpack.h | kernels/*.h) ;;
		daemon/*)
			a=${file#daemon/} a=${a%.*} b=${inc#daemon/} b=${b%.*}
			[ -n "${rank[$a]}" ] && [ -n "${rank[$b]}" ] || continue
			[ "$a" = "$b" ] || [ "${rank[$b]}" -le "${rank[$a]}" ] ||
				error "$file includes $inc: $b is above $a"
			;;
		*) error "$file includes $inc: daemon/ may include daemon/, proto/ and client/kvpack.h only" ;;
		esac
		;;
	esac
done < <(grep -HE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' proto/*.[ch] client/*.[ch] daemon/*.[ch] 2>/dev/null)

exit $bad
