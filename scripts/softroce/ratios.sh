# Sourced: Baton's perftest-shaped commands against perftest's own, in turns, over the same device.

# The GID that RoCEv2 over IPv4 has, as `ib_* -x` wants it; the device's first where there is none.
gid_index() {
  local device=$1 index
  for index in $(ls "/sys/class/infiniband/$device/ports/1/gid_attrs/types" | sort -n); do
    grep -qs v2 "/sys/class/infiniband/$device/ports/1/gid_attrs/types/$index" || continue
    [[ $(<"/sys/class/infiniband/$device/ports/1/gids/$index") != 0000:0000:0000:0000:0000:ffff:* ]] ||
      { echo "$index" && return; }
  done
  echo 0
}

listening() {
  local tries
  for ((tries = 0; tries < 100; ++tries)); do
    [[ -z $(ss -Hltn "sport = :$1") ]] || return 0
    sleep 0.1
  done
}

port=18600
# measure PROGRAM COLUMN ARGUMENTS...: starts a server, then a client; $measured is one column of its row.
measure() {
  local column=$2 server status=0
  local -a program
  read -ra program <<<"$1"
  shift 2
  port=$((port + 1))  # the last one may be in TIME_WAIT still
  program+=(-p "$port")
  timeout 60 "${program[@]}" "$@" >/dev/null 2>"$work/server" &
  server=$!
  listening "$port"
  timeout 60 "${program[@]}" "$@" 127.0.0.1 >"$work/client" 2>&1 || status=$?
  kill "$server" 2>/dev/null
  wait "$server" 2>/dev/null
  ((status == 0)) || { tail -n 5 "$work/client" "$work/server" >&2 && return 1; }
  measured=$(awk -v column="$column" '$1 ~ /^[0-9]+$/ && NF > 3 {value = $column} END {print value}' \
    "$work/client")
  [[ -n $measured ]]
}

median() { sort -g | awk '{v[NR] = $1} END {print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2}'; }

# row ROUNDS COMMAND ARGUMENTS...: a line of the table.
row() {
  local rounds=$1 command=$2 column=4 unit=Gb/s round theirs=() ours=()
  shift 2
  [[ $command != *_lat ]] || column=5 unit=us
  local -a flags=(-d "$device" -x "$gid" -F --report_gbits "$@")
  [[ $command != *_lat ]] || flags=(-d "$device" -x "$gid" -F "$@")
  for ((round = 0; round < rounds; ++round)); do
    measure "ib_$command" $column "${flags[@]}" || return
    theirs+=("$measured")
    measure "build/release/baton $command" $column "${flags[@]}" || return
    ours+=("$measured")
  done
  print_row "$command $*" "$unit"
}

ratios_begin() {
  device=$(device_names | head -n 1)
  gid=$(gid_index "$device")
  work=$(mktemp -d)
  printf '  %-32s %10s %10s %-5s %7s\n' "over $device, GID $gid" perftest baton '' ratio
}

# print_row WHAT UNIT: the medians of theirs[] and ours[], and their ratio.
print_row() {
  local a b
  a=$(printf '%s\n' "${theirs[@]}" | median)
  b=$(printf '%s\n' "${ours[@]}" | median)
  printf '  %-32s %10s %10s %-5s %7.3f\n' "$1" "$a" "$b" "$2" \
    "$(awk "BEGIN {print ${b:-0} / (${a:-0} + 1e-12)}")"
}

# Scattered pages of 16 KiB against contiguous messages of that size, as many under way.
row_kv() {
  local rounds=$1 round server theirs=() ours=()
  for ((round = 0; round < rounds; ++round)); do
    measure ib_write_bw 4 -d "$device" -x "$gid" -F --report_gbits -s 16384 -t 256 -n 2560 || return
    theirs+=("$measured")
    port=$((port + 1))
    timeout 60 build/release/baton kv_bw --provider verbs --listen "127.0.0.1:$port" --once \
      >"$work/server" 2>&1 &
    server=$!
    listening "$port"
    timeout 60 build/release/baton kv_bw --provider verbs --pages 1024 --page-bytes 16K --iters 6 \
      --json "$work/kv" "127.0.0.1:$port" >"$work/client" 2>&1 ||
      { tail -n 5 "$work/client" "$work/server" >&2 && kill "$server" && return 1; }
    wait "$server"
    ours+=("$(sed -n 's/.*"GB_per_s":\([0-9.]*\).*/\1/p' "$work/kv" | head -n 1 | awk '{print 8 * $1}')")
  done
  print_row 'kv_bw 1024 x 16 KiB, ib_write_bw' Gb/s
}

ratios_bench() {
  local rounds=${1:-3} device gid work status=0 verb
  ratios_begin
  for verb in write_bw read_bw; do
    row "$rounds" $verb -s 65536 -n 1000 -q 1 || status=1
    row "$rounds" $verb -s 65536 -n 300 -q 4 || status=1
    row "$rounds" $verb -s 1048576 -n 80 -q 1 || status=1
    row "$rounds" $verb -s 1048576 -n 30 -q 4 || status=1
  done
  row "$rounds" write_lat -s 8 -n 5000 || status=1
  row_kv "$rounds" || status=1
  rm -rf "$work"
  return "$status"
}

ratios_quick() {
  command -v ib_write_bw >/dev/null || { echo '  skipped: perftest is not installed' && return; }
  local device gid work status=0
  ratios_begin
  row 1 write_bw -s 65536 -n 600 || status=1
  row 1 read_bw -s 65536 -n 600 || status=1
  row 1 write_lat -s 8 -n 3000 || status=1
  rm -rf "$work"
  return "$status"
}
