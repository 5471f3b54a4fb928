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

port=18600
# measure PROGRAM COLUMN ARGUMENTS...: starts a server, then a client; $measured is one column of its row.
measure() {
  local column=$2 server status=0 tries
  local -a program
  read -ra program <<<"$1"
  shift 2
  port=$((port + 1))  # the last one may be in TIME_WAIT still
  program+=(-p "$port")
  timeout 60 "${program[@]}" "$@" >/dev/null 2>"$work/server" &
  server=$!
  for ((tries = 0; tries < 100; ++tries)); do
    [[ -z $(ss -Hltn "sport = :$port") ]] || break
    sleep 0.1
  done
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
  local a b
  a=$(printf '%s\n' "${theirs[@]}" | median)
  b=$(printf '%s\n' "${ours[@]}" | median)
  printf '  %-32s %10s %10s %-5s %7.3f\n' "$command $*" "$a" "$b" "$unit" \
    "$(awk "BEGIN {print ${b:-0} / (${a:-0} + 1e-12)}")"
}

ratios_begin() {
  device=$(device_names | head -n 1)
  gid=$(gid_index "$device")
  work=$(mktemp -d)
  printf '  %-32s %10s %10s %-5s %7s\n' "over $device, GID $gid" perftest baton '' ratio
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
