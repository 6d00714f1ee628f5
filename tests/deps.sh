#!/bin/bash
# Installs the Debian packages that build and tests need, only those that are missing.
# Arguments: none for all, `base` for what `make all` alone needs, `rdma` for base and the guest of
# `make check-rdma`.

base="gcc make pkg-config libc6-dev libuv1-dev libprotobuf-c-dev protobuf-c-compiler libucx-dev
libinih-dev uthash-dev libcjson-dev libxxhash-dev libibverbs-dev librdmacm-dev"
tests="libcriterion-dev clang clang-format clang-tidy cppcheck libclang-rt-14-dev valgrind
python3 python3-numpy python3-pytest python3-pip python3-setuptools python3-wheel mypy iproute2"

rdma="qemu-system-x86 busybox-static xz-utils iproute2 ibverbs-providers"

case $1 in
base) want=$base ;;
rdma) want="$base $rdma" ;;
*) want="$base $tests" ;;
esac

if ! command -v dpkg-query >/dev/null; then
	echo "deps: this is not Debian; make sure that you have: $(echo $want)" >&2
	exit 0
fi

have=" $(dpkg-query -W -f '${db:Status-Status} ${Package}\n' $want 2>/dev/null |
	sed -n 's/^installed //p' | tr '\n' ' ')"
missing=
for p in $want; do
	case $have in
	*" $p "*) ;;
	*) missing="$missing $p" ;;
	esac
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" != 0 ]; then
	if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
		as_root="sudo -n"
	else
		echo "deps: missing packages, and no rights to install them. As root:" >&2
		echo "  apt-get install$missing" >&2
		exit 1
	fi
fi

echo "deps: installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt="$as_root apt-get -qq -o DPkg::Lock::Timeout=300"
$apt update >/dev/null && $apt install -y --no-install-recommends $missing >/dev/null || {
	echo "deps: apt-get failed; by hand: apt-get install$missing" >&2
	exit 1
}
