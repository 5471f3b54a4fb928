# Sourced: two machines with two RDMA rails between them, and a third network that stays up. One sends
# (a), one is the target (b); faults are injected into both. See tests/softroce.

# The job of either machine. $role, $board, and $only are set in front of it.
readonly two_job='
number=1; [[ $role == a ]] || number=2
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,rw,cache=none board "$board"
index=0
for name in control rail0 rail1; do
  for device in /sys/class/net/*; do
    [[ $(<"$device/address") == 52:54:00:99:0$number:0$index ]] || continue
    ip link set "${device##*/}" name "$name"
    ip addr add "10.99.1$index.$number/24" dev "$name"
    [[ $name == control ]] || ip link set "$name" mtu 4200
    ip link set "$name" up
  done
  index=$((index + 1))
done
rdma link add rxe0 type rxe netdev rail0 && rdma link add rxe1 type rxe netdev rail1 || exit 1
faults=$PWD/build/release/tests/softroce/softroce_faults
target_start() {
  if [[ -s $board/pid ]]; then
    kill -KILL "$(<"$board/pid")" 2>/dev/null
    while kill -0 "$(<"$board/pid")" 2>/dev/null; do sleep 0.02; done
  fi
  rm -f "$board/pid" "$board/offer"
  "$faults" target "$board" "10.99.10.$number" >>"$board/target.log" 2>&1 &
  disown  # or the shell would tell everybody that it was killed
}
if [[ $role == b ]]; then  # the agent: does what the board says
  touch "$board/ready"
  until [[ -e $board/end ]]; do
    [[ -s $board/do ]] || { read -rt 0.02 <> <(:); continue; }
    command=$(<"$board/do")
    rm -f "$board/do"
    eval "$command" >>"$board/agent.log" 2>&1
    echo $? >"$board/do.done.new"
    mv "$board/do.done.new" "$board/do.done"
  done
  [[ ! -s $board/pid ]] || kill -KILL "$(<"$board/pid")"
  exit 0
fi
until [[ -e $board/ready ]]; do sleep 0.1; done
for name in $("$faults" list); do
  [[ -z $only || $name =~ $only ]] || continue
  before=$SECONDS
  timeout --kill-after=5 100 "$faults" sender "$board" 10.99.10.1 "$name" >"$board/row" 2>>"$board/sender.log" ||
    { [[ -s $board/row ]] || printf "{\"case\":\"%s\"}\n" "$name" >"$board/row"; }
  cat "$board/row" >>"$board/rows.jsonl"
  echo "  $name: $((SECONDS - before)) s, $(sed -n "s/.*\"verdict\":\"\([^\"]*\)\".*/\1/p" "$board/row")"
done
touch "$board/end"
'

two_machines() {
  kernel_fetch
  say "booting two machines with two rails between them (Linux $kernel_release, QEMU, software emulation)"
  local begin=$SECONDS role status=0 link
  board=$(mktemp -d "$repository/build/softroce/board.XXXXXX")
  local -a nets
  for role in b a; do
    shares[$role]=$(machine_prepare "$role" "role=$role board=$board only=${only@Q}$two_job")
    nets=(-virtfs "local,path=$board,mount_tag=board,security_model=none")
    for link in 0 1 2; do
      nets+=(-netdev "stream,id=n$link,addr.type=unix,addr.path=net$link,server=$([[ $role == a ]] && echo off || echo on)"
        -device "virtio-net-pci,netdev=n$link,romfile=,mac=52:54:00:99:0$([[ $role == a ]] && echo 1 || echo 2):0$link")
    done
    (
      cd "$board" || exit
      machine_run "${shares[$role]}" "${seconds:-360}" "$logs/softroce-two-$role.console.log" "${nets[@]}"
    ) &
    machines[$role]=$!
    for link in 0 1 2; do
      until [[ -S $board/net$link ]] || ! kill -0 "${machines[b]}" 2>/dev/null; do sleep 0.1; done
    done
  done
  # The sender asks for a power cut.
  while kill -0 "${machines[a]}" 2>/dev/null; do
    if [[ -s $board/poweroff ]]; then
      rm -f "$board/poweroff"
      touch "${shares[b]}/cut"
      kill -KILL "$(<"${shares[b]}/qemu.pid")"
      echo 0 >"$board/poweroff.done.new"
      mv "$board/poweroff.done.new" "$board/poweroff.done"
    fi
    sleep 0.02
  done
  wait "${machines[a]}" || status=$?
  touch "$board/end"
  wait "${machines[b]}" 2>/dev/null || true
  machines=()
  local file
  for file in rows.jsonl target.log sender.log agent.log; do
    [[ ! -e $board/$file ]] || cp "$board/$file" "$logs/softroce-two-$file"
  done
  if [[ -s $board/rows.jsonl ]]; then
    "$repository/build/release/tests/softroce/softroce_faults" table <"$board/rows.jsonl" || status=1
  else
    status=1
  fi
  say "$((SECONDS - begin)) s; logs: build/logs/softroce-two-*"
  return "$status"
}
