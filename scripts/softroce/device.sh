# Sourced: an RDMA device to test with. One that is here is used as it is; otherwise soft-RoCE over a
# pair of virtual Ethernet devices.

device_names() {  # those with an active port
  local state
  for state in /sys/class/infiniband/*/ports/*/state; do
    ! grep -qs ACTIVE "$state" || echo "$state"
  done | cut -d/ -f5 | sort -u
}

device_made=''
device_make() {
  [[ -z $(device_names) ]] || return 0
  ip link add baton0 type veth peer name baton1
  device_made=yes
  ip link set baton0 mtu 4200 up
  ip link set baton1 mtu 4200 up
  ip addr add 10.99.0.1/24 dev baton0
  rdma link add rxe0 type rxe netdev baton0 || return
  [[ -n $(device_names) ]]
}

device_remove() {
  [[ -n $device_made ]] || return 0
  rdma link delete rxe0 2>/dev/null
  ip link delete baton0 2>/dev/null
}
