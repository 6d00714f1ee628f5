# Network and RDMA devices of a guest; sourced by what guest.sh makes it run. $1 node, $2 nodes.
export RDMA_NODE=$1 RDMA_NODES=$2 RDMA_DEV=rxe0 RDMA_GID_INDEX=1 HOME=/root
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# rxe names no packet type in UD completions, so UCX's check of destination GIDs drops every UD
# packet; and it takes retry count 7 as for ever.
export UCX_UD_VERBS_ETH_DGID_CHECK=n UCX_RC_VERBS_RETRY_COUNT=3 UCX_WARN_UNUSED_ENV_VARS=n
ulimit -l unlimited

# An MTU of 4200 gives the RDMA device one of 4096.
rxe_on() # rdma device, net device, address
{
	ip link set "$2" up mtu 4200
	ip addr add "$3/24" dev "$2"
	rdma link add "$1" type rxe netdev "$2"
}

ip link set lo up
if [ "$2" = 1 ]; then
	export RDMA_IP=10.9.0.1 RDMA_PEER=10.9.0.1
	rxe_on rxe0 dummy0 $RDMA_IP
	echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
	pref=10
	for i in 1 3; do # pairs veth1-veth2 and veth3-veth4 with 10.9.1.x and 10.9.3.x
		k=$((i + 1))
		ip link add veth$i type veth peer name veth$k
		rxe_on rxe$i veth$i 10.9.$i.1
		rxe_on rxe$k veth$k 10.9.$i.2
		for dev in veth$i veth$k; do
			echo 1 >/proc/sys/net/ipv4/conf/$dev/accept_local
			echo 0 >/proc/sys/net/ipv4/conf/$dev/rp_filter
			ip rule add pref $pref iif $dev lookup local
			pref=$((pref + 1))
		done
		# What one end sends to the other's address leaves by the wire, not by the local table.
		ip rule add pref $((pref + 10)) iif lo to 10.9.$i.1 lookup main
		ip rule add pref $((pref + 11)) iif lo to 10.9.$i.2 lookup main
		ip route add 10.9.$i.2/32 dev veth$i src 10.9.$i.1
		ip route add 10.9.$i.1/32 dev veth$k src 10.9.$i.2
	done
	ip rule add pref 100 lookup local
	ip rule del pref 0
else
	export RDMA_IP=10.9.2.$((RDMA_NODE + 1)) RDMA_PEER=10.9.2.$((2 - RDMA_NODE))
	rxe_on rxe0 eth0 $RDMA_IP
	rxe_on rxe1 eth1 10.9.4.$((RDMA_NODE + 1))
fi

# GID 1 is the one made from the IPv4 address; it comes a moment later.
tries=0
until { grep -q ffff /sys/class/infiniband/rxe0/ports/1/gids/1 &&
	grep -q ffff /sys/class/infiniband/rxe1/ports/1/gids/1; } || [ $tries -ge 50 ]; do
	tries=$((tries + 1))
	sleep 0.1
done
