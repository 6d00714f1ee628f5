#!/bin/bash
# Runs a command in a QEMU guest (software emulation, so it works anywhere) whose Debian kernel has
# soft RoCE: real verbs, real queue pairs, no card.
#
#   guest.sh [-n NODES] [-t SECONDS] [-m MB] [-s CPUS] [-p] -- COMMAND [ARG...]
#
# The guest sees this machine's files at the same paths, read-only; what it writes is gone with it.
# The command runs as root in the current folder.
#   one node:   rxe0 on dummy0 10.9.0.1; rxe1 and rxe2 on a veth pair, 10.9.1.1 and 10.9.1.2, rxe3 and
#               rxe4 on another, 10.9.3.1 and 10.9.3.2; packets really cross the pairs
#   two nodes:  rxe0 on eth0, 10.9.2.1 and 10.9.2.2; rxe1 on eth1, 10.9.4.1 and 10.9.4.2
# It gets RDMA_NODE, RDMA_NODES, RDMA_DEV, RDMA_IP, RDMA_PEER, RDMA_GID_INDEX, and the folder
# /run/rdma-guest, which guests and host share. A file kill.N made there ends node N like a power cut.
#
# Exit status: the command's (node 0's first); 124 after -t seconds; 125 if the guest or the set-up
# failed; 77 if this machine lacks what the rig needs. -p only prepares the kernel.
set -euo pipefail

nodes=1 limit=150 mem=1024 cpus=2 prepare=
while getopts n:t:m:s:p opt; do
	case $opt in
	n) nodes=$OPTARG ;;
	t) limit=$OPTARG ;;
	m) mem=$OPTARG ;;
	s) cpus=$OPTARG ;;
	p) prepare=1 ;;
	*) exit 125 ;;
	esac
done
shift $((OPTIND - 1))

cache=${RDMA_GUEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rdma-guest}
wanted="virtio_pci virtio_net virtio_console 9p 9pnet_virtio overlay veth dummy sch_netem
crc32_generic rdma_rxe rdma_ucm"

say() { echo "guest: $*" >&2; }
die() { # status text...
	local status=$1
	shift
	say "$*"
	exit "$status"
}

for tool in qemu-system-x86_64 busybox xz dpkg-deb apt-cache rdma; do
	command -v $tool >/dev/null || die 77 "$tool is not installed"
done

# ---- the kernel: fetched once a version, never installed

# Of all modules only what the guest can use.
unpack_package() # deb, folder
{
	local mods=./lib/modules/$release/kernel
	dpkg-deb --fsys-tarfile "$1" | tar -x -C "$2" --wildcards "./boot/vmlinuz-$release" \
		"$mods/drivers/infiniband/core/*" "$mods/drivers/infiniband/sw/rxe/*" \
		"$mods/drivers/virtio/*" "$mods/drivers/net/*.ko" "$mods/drivers/char/virtio_console.ko" \
		"$mods/net/core/*" "$mods/net/9p/*" "$mods/fs/9p/*" "$mods/fs/netfs/*" \
		"$mods/fs/fscache/*" "$mods/fs/overlayfs/*" "$mods/fs/configfs/*" \
		"$mods/net/ipv4/udp_tunnel.ko" "$mods/net/ipv6/ip6_udp_tunnel.ko" \
		"$mods/net/sched/sch_netem.ko" "$mods/crypto/crc32_generic.ko"
}

# QEMU starts an ELF kernel directly (PVH); a bzImage would unpack itself under emulation, slowly.
# Offsets are those of the x86 boot protocol's header.
extract_elf() # vmlinuz, out
{
	local sectors payload bytes
	sectors=$(od -An -tu1 -j 497 -N1 "$1")
	payload=$(od -An -tu4 -j 584 -N4 "$1")
	bytes=$(od -An -tu4 -j 588 -N4 "$1")
	tail -c +$(((sectors + 1) * 512 + payload + 1)) "$1" | head -c $((bytes)) |
		xz -dc --single-stream >"$2" 2>/dev/null || true # bytes that follow the stream
	[ "$(head -c 4 "$2" | tail -c 3)" = ELF ] || die 125 "no ELF kernel in $1"
}

# Copies a module and, before it, what it depends on.
add_module() # name
{
	local need
	[ -z "${added[$1]:-}" ] || return 0
	added[$1]=1
	[ -n "${module[$1]:-}" ] || die 125 "kernel $release has no module $1"
	for need in $(tr '\0' '\n' <"${module[$1]}" | sed -n 's/^depends=//p' | head -1 | tr ',-' ' _'); do
		add_module "$need"
	done
	cp "${module[$1]}" "$work/initrd/modules/$1.ko"
	echo "$1" >>"$work/initrd/modules/order"
}

build_kernel()
{
	local file name
	declare -A module added
	work=$kernel.tmp.$$
	rm -rf "$work"
	mkdir -p "$work/tree" "$work/initrd/modules"
	(cd "$work" && apt-get -qq -o APT::Sandbox::User=root download "$package") ||
		die 77 "cannot download $package"
	unpack_package "$work"/*.deb "$work/tree"
	extract_elf "$work/tree/boot/vmlinuz-$release" "$work/vmlinux"
	while read -r file; do
		name=$(basename "$file" .ko)
		module[${name//-/_}]=$file
	done < <(find "$work/tree/lib" -name '*.ko')
	for name in $wanted; do add_module "$name"; done
	rm -rf "$work"/*.deb "$work/tree" "$kernel"
	mv "$work" "$kernel"
	say "kernel $release ready, $(wc -l <"$kernel/initrd/modules/order") modules"
}

package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-/ { print $2; exit }')
release=${package#linux-image-}
if [ -z "$release" ]; then # without lists from apt, any kernel fetched before will do
	release=$(ls "$cache" 2>/dev/null | grep -v tmp | tail -1)
	[ -n "$release" ] || die 77 "no linux-image-amd64 in apt's lists; apt-get update?"
fi
kernel=$cache/$release
[ -f "$kernel/initrd/modules/order" ] || { mkdir -p "$cache" && build_kernel; }
[ -z "$prepare" ] || exit 0
[ $# -gt 0 ] || die 125 "no command"

# ---- one boot

run=$(mktemp -d "${TMPDIR:-/tmp}/rdma-guest.XXXXXX")
pids=()
cleanup()
{
	local pid
	for pid in "${pids[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
	rm -rf "$run"
}
trap cleanup EXIT
mkdir -p "$run/share" "$run/initrd"
cp -r "$kernel/initrd/." "$run/initrd/"
mkdir -p "$run"/initrd/{bin,proc,sys,dev,lower,rw,new}
cp "$(command -v busybox)" "$run/initrd/bin/busybox"
cp "$(dirname "$0")/init.sh" "$run/initrd/init"
cp "$(dirname "$0")/setup.sh" "$run/share/setup.sh"
chmod +x "$run/initrd/init"
(cd "$run/initrd" && find . | busybox cpio -o -H newc 2>/dev/null) >"$run/initrd.img"
{
	printf 'cd %q\nset -- "$1" %d\n. /run/rdma-guest/setup.sh\n' "$PWD" "$nodes"
	printf '%q ' "$@"
	printf '\necho $? >/run/rdma-guest/status.$1\n'
} >"$run/share/start.sh"

boot() # node
{
	local net=() k
	for k in 0 1; do
		[ "$nodes" = 1 ] || net+=(
			-netdev "dgram,id=n$k,local.type=unix,local.path=$run/net$k.$1,remote.type=unix,remote.path=$run/net$k.$((1 - $1))"
			-device "virtio-net-pci,netdev=n$k,mac=52:54:00:09:0$k:0$(($1 + 1))"
		)
	done
	# The emulator's time stamps are the host's. On a busy host a guest that measures how fast they
	# are is wrong, once by a factor of four, and all its timers with it: it is told.
	local khz
	khz=$(awk '/^cpu MHz/ { printf "tsc_early_khz=%d", $4 * 1000; exit }' /proc/cpuinfo)
	# The CPU flags and clearcpuid leave out what the emulator does slowly. A busy host is too slow for
	# the check of the timer, and without it the kernel would stop.
	qemu-system-x86_64 -nodefaults -no-user-config -display none -no-reboot -machine q35 \
		-accel tcg,thread=multi -cpu max,-erms,-fsrm,-pclmulqdq,-la57,-smap,-smep,-pku \
		-smp "$cpus" -m "$mem" -kernel "$kernel/vmlinux" -initrd "$run/initrd.img" \
		-append "console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable $khz clocksource=tsc mitigations=off nokaslr init_on_alloc=0 lsm= audit=0 clearcpuid=112,297,580 rdma.node=$1" \
		-serial "file:$run/console.$1" -device virtio-serial-pci \
		-chardev "file,id=out,path=$run/out.$1" -device virtserialport,chardev=out,name=out \
		-virtfs local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap \
		-virtfs "local,path=$run/share,mount_tag=share,security_model=none" "${net[@]}" \
		</dev/null >"$run/qemu.$1" 2>&1 &
	pids[$1]=$!
}

alive() { kill -0 "${pids[$1]}" 2>/dev/null; }
end() { kill -9 "${pids[$1]}" 2>/dev/null || true; wait "${pids[$1]}" 2>/dev/null || true; }

for ((i = 0; i < nodes; i++)); do boot $i; done
touch "$run/out.0"
tail -n +1 -f --pid="${pids[0]}" "$run/out.0" &
tail_pid=$!

killed=() late=() deadline=$((SECONDS + limit))
while [ $SECONDS -lt $deadline ]; do
	live=
	for ((i = 0; i < nodes; i++)); do
		alive $i || continue
		live=1
		if [ -e "$run/share/kill.$i" ]; then
			end $i
			killed[i]=1
			rm -f "$run/share/kill.$i"
			: >"$run/share/killed.$i"
		fi
	done
	[ -n "$live" ] || break
	sleep 0.1
done
for ((i = 0; i < nodes; i++)); do
	if alive $i; then
		late[i]=1
		end $i
	fi
done
wait $tail_pid 2>/dev/null || true

status=0
for ((i = 0; i < nodes; i++)); do
	[ $i = 0 ] || sed "s/^/[node $i] /" "$run/out.$i"
	[ -z "${killed[i]:-}" ] || continue
	if [ -s "$run/share/status.$i" ]; then
		s=$(cat "$run/share/status.$i")
	elif [ -n "${late[i]:-}" ]; then
		s=124
		say "node $i had not ended after $limit s"
	else
		s=125
		say "node $i died"
		cat "$run/qemu.$i" >&2
	fi
	case $s in
	124 | 125) tail -n 25 "$run/console.$i" >&2 ;;
	esac
	[ $status != 0 ] || status=$s
done
exit $status
