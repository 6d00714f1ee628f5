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
	ip link add veth1 type veth peer name veth2
	for i in 1 2; do
		rxe_on rxe$i veth$i 10.9.1.$i
		echo 1 >/proc/sys/net/ipv4/conf/veth$i/accept_local
		echo 0 >/proc/sys/net/ipv4/conf/veth$i/rp_filter
	done
	echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
	# What one end sends to the other's address leaves by the wire, not by the local table.
	ip rule add pref 10 iif veth1 lookup local
	ip rule add pref 11 iif veth2 lookup local
	ip rule add pref 20 iif lo to 10.9.1.1 lookup main
	ip rule add pref 21 iif lo to 10.9.1.2 lookup main
	ip rule add pref 100 lookup local
	ip rule del pref 0
	ip route add 10.9.1.2/32 dev veth1 src 10.9.1.1
	ip route add 10.9.1.1/32 dev veth2 src 10.9.1.2
else
	export RDMA_IP=10.9.2.$((RDMA_NODE + 1)) RDMA_PEER=10.9.2.$((2 - RDMA_NODE))
	rxe_on rxe0 eth0 $RDMA_IP
fi

# GID 1 is the one made from the IPv4 address; it comes a moment later.
tries=0
until grep -q ffff /sys/class/infiniband/rxe0/ports/1/gids/1 || [ $tries -ge 50 ]; do
	tries=$((tries + 1))
	sleep 0.1
done
