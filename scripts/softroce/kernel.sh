# Sourced: finds, downloads and unpacks a kernel with rdma_rxe, and packs the initramfs that boots it.
# Nothing is installed. Sets kernel_release, kernel_image, kernel_modules and initramfs.

readonly kernel_home=$repository/build/softroce/kernel

# The newest kernel that this machine's apt offers, as package names: image, modules, further ones.
kernel_packages() {
  local meta image
  for meta in linux-image-amd64 linux-image-generic; do  # Debian, Ubuntu
    image=$(apt-cache show --no-all-versions "$meta" 2>/dev/null |
      sed -n 's/^Depends:.*\(linux-image-[0-9][^ ,]*\).*/\1/p' | head -n 1)
    [[ -n $image ]] || continue
    printf '%s\n' "$image"
    [[ $meta != linux-image-generic ]] ||
      printf '%s\n' "${image/image/modules}" "${image/image/modules-extra}"
    return
  done
  return 1
}

kernel_is_here() { [[ -s $kernel_home/release && -s $kernel_home/initramfs ]]; }

# Sets the variables; false when there is no kernel yet.
kernel_use() {
  kernel_is_here || return 1
  kernel_release=$(<"$kernel_home/release")
  kernel_image=$kernel_home/root/boot/vmlinuz-$kernel_release
  kernel_modules=$kernel_home/root/lib/modules
  initramfs=$kernel_home/initramfs
  # The initramfs holds a copy of guest_init.
  [[ $initramfs -nt $here/guest_init ]] || pack_initramfs
}

# Downloads it unless it is here. About 70 MB, once.
kernel_fetch() {
  ! kernel_use || return 0
  [[ $(dpkg --print-architecture) == amd64 ]] || die "only machines with amd64 packages are known here."
  local -a packages
  mapfile -t packages < <(kernel_packages)
  [[ ${#packages[@]} -gt 0 ]] || die "apt offers no kernel (linux-image-amd64, linux-image-generic)." \
    "Refresh its lists as root, then try again:  apt-get update"
  say "fetching a kernel: ${packages[*]} (unpacked under build/softroce, not installed)"
  local new=$kernel_home.new.$$ package log=$logs/softroce-kernel.log
  trap 'rm -rf "'"$new"'"' RETURN
  mkdir -p "$new/root" "$kernel_home"
  (cd "$new" && timeout 300 apt-get -q download "${packages[@]}") >"$log" 2>&1 ||
    die "the kernel could not be downloaded:" "$(tail -n 5 "$log")" \
      "As root, and then again:  apt-get update"
  for package in "$new"/*.deb; do dpkg-deb -x "$package" "$new/root"; done
  kernel_release=$(ls "$new/root/lib/modules")
  [[ -n $(find "$new/root/lib/modules" -name 'rdma_rxe.ko*' -print -quit) ]] ||
    die "${packages[0]} has no rdma_rxe."
  depmod -b "$new/root" "$kernel_release"
  rm -rf "$kernel_home"
  rm -f "$new"/*.deb
  mv "$new" "$kernel_home"
  kernel_modules=$kernel_home/root/lib/modules
  initramfs=$kernel_home/initramfs
  pack_initramfs
  printf '%s\n' "$kernel_release" >"$kernel_home/release"
  kernel_use
}

# Busybox, guest_init, and the modules with which it mounts the host's files.
pack_initramfs() {
  local tree=$kernel_home/tree.$$ module file
  rm -rf "$tree"
  mkdir -p "$tree"/{bin,proc,sys,dev,lower,upper,root,run,modules}
  cp "$(command -v busybox)" "$tree/bin/busybox"
  cp "$here/guest_init" "$tree/init"
  chmod 755 "$tree/init"
  for module in 9p 9pnet_virtio virtio_pci overlay; do
    modprobe -d "$kernel_home/root" -S "$kernel_release" --show-depends "$module" || return 1
  done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' | while read -r file; do
    module=$(basename "$file" | sed 's/\.ko.*/.ko/')
    case $file in
      *.zst) zstd -dqc "$file" ;;
      *.xz) xz -dc "$file" ;;
      *) cat "$file" ;;
    esac >"$tree/modules/$module"
    printf '%s\n' "$module" >>"$tree/modules/order"
  done
  (cd "$tree" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1) >"$initramfs.new"
  mv "$initramfs.new" "$initramfs"
  rm -rf "$tree"
}
