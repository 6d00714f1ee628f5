#!/bin/busybox sh
# First program of the guest: modules, the host's files as root folder, then setup.sh and the command.
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
export PATH=/bin
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
# napi_tx: a packet counts as sent when the device has it. Where the other guest's link is down, QEMU
# keeps packets for it until it is up again, other than a cable; soft RoCE would wait for them, neither
# sending again nor giving up, and so would who destroys its queue pairs.
for m in $(cat /modules/order); do
	options=
	[ $m != virtio_net ] || options=napi_tx=0
	insmod /modules/$m.ko $options || echo "guest: insmod $m failed"
done

# The host's files change under a running guest only when someone builds meanwhile: cache them.
p9=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o ro,$p9,cache=loose hostroot /lower
mount -t tmpfs rw /rw
mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work root /new
for d in proc sys dev; do mount -o bind /$d /new/$d; done
mount -t devpts pts /new/dev/pts
mount -t tmpfs shm /new/dev/shm
mount -t tmpfs run /new/run
mkdir -p /new/run/rdma-guest
mount -t 9p -o $p9,cache=none share /new/run/rdma-guest

# The console is slow: output goes to its own port.
port=$(ls /dev/vport*p1 | head -1)
chroot /new /bin/sh /run/rdma-guest/start.sh "$(sed 's/.*rdma.node=\([0-9]\).*/\1/' /proc/cmdline)" 2>&1 | cat >"$port"
sync
poweroff -f
