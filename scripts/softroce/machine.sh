# Sourced: starts one QEMU machine for one job, and says how that ended.
#
# A machine has a share: a folder under build/softroce that both sides see at the same path. In it:
# `job` (bash, run in the guest), `settings`, and what the guest leaves behind: `up` when it has
# started, `status` when the job has ended, and any file of the job.

# machine_prepare NAME JOB: makes the share, and says where it is. JOB is the text of a script.
machine_prepare() {
  local name=$1 share
  mkdir -p "$repository/build/softroce"
  share=$(mktemp -d "$repository/build/softroce/$name.XXXXXX")
  printf '%s\n' "$share" >"$share/where"
  cp "$here/guest" "$share/guest"
  printf '%s\n' "$2" >"$share/job"
  printf '%s=%q\n' release "$kernel_release" modules "$kernel_modules" repository "$repository" \
    name "$name" >"$share/settings"
  printf '%s\n' "$share"
}

# machine_run SHARE SECONDS CONSOLE [QEMU options...]: the job's output is this function's; returns
# when the machine is gone: the job's exit status, or 125 when the guest did not say one.
machine_run() {
  local share=$1 seconds=$2 console=$3 memory=${memory:-2048} status=0
  shift 3
  local -a qemu=(qemu-system-x86_64 -nodefaults -no-user-config -no-reboot -display none
    -pidfile "$share/qemu.pid"
    -machine q35 -accel tcg,thread=multi -cpu max -smp 2 -m "$memory"
    -kernel "$kernel_image" -initrd "$initramfs"
    # The last three keep a guest alive whose host is so busy that clocks look broken.
    -append "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check tsc=reliable nowatchdog"
    -serial "file:$console"
    -virtfs "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
    -virtfs "local,path=$share,mount_tag=share,security_model=none"
    -device virtio-rng-pci
    -device virtio-serial-pci -chardev "file,id=out,path=$share/output"
    -device virtserialport,chardev=out "$@")
  mkfifo "$share/output"
  cat "$share/output" &  # until QEMU is gone
  local reader=$!
  # Nothing outlives this shell: QEMU ends with `timeout`, and that with its parent.
  setpriv --pdeathsig TERM timeout --kill-after=5 "$seconds" "${qemu[@]}" </dev/null \
    2>"$console.qemu" &
  machine_pid=$!
  echo "$machine_pid" >"$share/pid"
  { wait "$machine_pid" || status=$?; } 2>/dev/null
  : 1<>"$share/output"  # were it never opened, the reader would wait for ever
  wait "$reader"
  [[ ! -s $share/status ]] || return "$(<"$share/status")"
  [[ ! -e $share/cut ]] || return 0  # its power was meant to be cut
  {
    if ((status == 124 || status == 137)); then
      printf 'the machine did not finish within %d s' "$seconds"
    else
      printf 'the machine ended by itself (QEMU: %d)' "$status"
    fi
    [[ -e $share/up ]] && printf ', after it had started; ' || printf ', before it had started; '
    printf 'the end of %s:\n' "$console"
    tail -n 3 "$console.qemu"
    tail -n 15 "$console" | tr -d '\r'
  } >&2
  return 125
}
