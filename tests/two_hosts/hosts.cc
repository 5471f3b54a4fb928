// Namespaces and TUN devices, by the system calls that `ip` makes.
#include "tests/two_hosts/hosts.h"

#include <arpa/inet.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/ipv6.h>
#include <linux/route.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>

#include "absl/strings/str_cat.h"
#include "tests/std.h"

namespace baton {
namespace {

absl::Status unavailable(const char* what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno),
                                             "; run as root (in a container: --privileged)"));
}

ifreq device(size_t wire) {
  ifreq out{};
  std::snprintf(out.ifr_name, sizeof out.ifr_name, "wire%zu", wire);
  return out;
}

void put_address(sockaddr& out, const char* text) {
  auto& in = reinterpret_cast<sockaddr_in&>(out);
  in = {};
  in.sin_family = AF_INET;
  inet_pton(AF_INET, text, &in.sin_addr);
}

bool write_file(const char* path, const std::string& text) {
  const base::UniqueFd file(open(path, O_WRONLY | O_CLOEXEC));
  return file.valid() && write(file.get(), text.data(), text.size()) > 0;
}

// Who is not root becomes so in a user namespace of its own, if the system lets him.
bool become_root() {
  if (geteuid() == 0) return true;
  const std::string uid = std::to_string(getuid()), gid = std::to_string(getgid());
  return unshare(CLONE_NEWUSER) == 0 && write_file("/proc/self/setgroups", "deny") &&
         write_file("/proc/self/uid_map", "0 " + uid + " 1") &&
         write_file("/proc/self/gid_map", "0 " + gid + " 1");
}

}  // namespace

std::string Hosts::address(size_t host, size_t wire, size_t last) {
  return absl::StrCat("10.77.", wire, ".", last != 0 ? last : host + 1);
}

std::string Hosts::address_v6(size_t host, size_t wire, size_t last) {
  return absl::StrCat("fd77:0:0:", wire + 1, "::", last != 0 ? last : host + 1);
}

absl::StatusOr<std::unique_ptr<Hosts>> Hosts::create(size_t wires, uint64_t seed) {
  if (!become_root()) return unavailable("a user namespace cannot be made");
  std::unique_ptr<Hosts> out(new Hosts);
  std::vector<std::array<base::UniqueFd, 2>> ends(wires);
  for (size_t host = 0; host < 2; ++host) {
    absl::Status made;
    // A thread of its own, so that this process stays where it is.
    std::thread([&] { made = out->make_host(host, wires, ends); }).join();
    if (!made.ok()) return made;
  }
  for (size_t wire = 0; wire < wires; ++wire) {
    out->wires_.push_back(
        std::make_unique<Wire>(std::move(ends[wire][0]), std::move(ends[wire][1]), seed + wire));
  }
  return out;
}

absl::Status Hosts::make_host(size_t host, size_t wires,
                              std::vector<std::array<base::UniqueFd, 2>>& ends) {
  if (unshare(CLONE_NEWNET) != 0) return unavailable("a network namespace cannot be made");
  hosts_[host].space.reset(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
  hosts_[host].control.reset(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  hosts_[host].control_v6.reset(socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq loopback{};
  std::strcpy(loopback.ifr_name, "lo");
  loopback.ifr_flags = IFF_UP;
  ask(host, SIOCSIFFLAGS, &loopback);
  for (size_t wire = 0; wire < wires; ++wire) {
    base::UniqueFd end(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
    if (!end.valid()) return unavailable("/dev/net/tun cannot be opened");
    ifreq tun = device(wire);
    tun.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (ioctl(end.get(), TUNSETIFF, &tun) != 0) return unavailable("no TUN device can be made");
    ends[wire][host] = std::move(end);
    set_address(host, wire, address(host, wire));
    set_link(host, wire, true);
  }
  return absl::OkStatus();
}

void Hosts::enter(size_t host) const {
  if (setns(hosts_[host].space.get(), CLONE_NEWNET) != 0) std::abort();
}

void Hosts::become(size_t host) const {
  enter(host);
  // UCX reads /sys/class/net, which is that of whoever mounted it. Without the right to do so it
  // finds no device, and says so.
  if (unshare(CLONE_NEWNS) == 0 && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0) {
    (void)!mount("sysfs", "/sys", "sysfs", 0, nullptr);
  }
}

void Hosts::ask(size_t host, unsigned long request, void* argument) const {
  if (ioctl(hosts_[host].control.get(), request, argument) != 0) {
    std::perror("a network device of the test");
    std::abort();
  }
}

void Hosts::set_link(size_t host, size_t wire, bool up) {
  ifreq it = device(wire);
  ask(host, SIOCGIFFLAGS, &it);
  it.ifr_flags = static_cast<short>(up ? it.ifr_flags | IFF_UP : it.ifr_flags & ~IFF_UP);
  ask(host, SIOCSIFFLAGS, &it);
}

void Hosts::set_mtu(size_t host, size_t wire, int bytes) {
  ifreq it = device(wire);
  it.ifr_mtu = bytes;
  ask(host, SIOCSIFMTU, &it);
}

void Hosts::set_address(size_t host, size_t wire, const std::string& address) {
  ifreq it = device(wire);
  put_address(it.ifr_addr, address.c_str());
  ask(host, SIOCSIFADDR, &it);
  put_address(it.ifr_netmask, "255.255.255.0");
  ask(host, SIOCSIFNETMASK, &it);
}

void Hosts::remove_address(size_t host, size_t wire) {
  ifreq it = device(wire);
  put_address(it.ifr_addr, "0.0.0.0");
  ask(host, SIOCSIFADDR, &it);
}

in6_ifreq Hosts::request_v6(size_t host, size_t wire, const std::string& address) const {
  ifreq it = device(wire);
  ask(host, SIOCGIFINDEX, &it);
  in6_ifreq out{};
  out.ifr6_ifindex = it.ifr_ifindex;
  out.ifr6_prefixlen = 64;
  inet_pton(AF_INET6, address.c_str(), &out.ifr6_addr);
  return out;
}

bool Hosts::add_address_v6(size_t host, size_t wire, const std::string& address) {
  in6_ifreq it = request_v6(host, wire, address);
  return ioctl(hosts_[host].control_v6.get(), SIOCSIFADDR, &it) == 0;
}

void Hosts::remove_address_v6(size_t host, size_t wire, const std::string& address) {
  in6_ifreq it = request_v6(host, wire, address);
  if (ioctl(hosts_[host].control_v6.get(), SIOCDIFADDR, &it) != 0) std::abort();
}

void Hosts::set_route(size_t host, size_t wire, bool there) {
  rtentry route{};
  put_address(route.rt_dst, address(0, wire, 0).c_str());
  reinterpret_cast<sockaddr_in&>(route.rt_dst).sin_addr.s_addr &= htonl(0xffffff00);
  put_address(route.rt_genmask, "255.255.255.0");
  route.rt_flags = RTF_UP;
  ifreq it = device(wire);
  route.rt_dev = it.ifr_name;
  ask(host, there ? SIOCADDRT : SIOCDELRT, &route);
}

void Hosts::move(Time span) {
  std::vector<pollfd> ends;
  for (const auto& wire : wires_) {
    for (size_t end = 0; end < 2; ++end) ends.push_back({wire->fd(end), POLLIN, 0});
  }
  const Time until = Clock::steady().now() + span;
  for (Time now = Clock::steady().now();; now = Clock::steady().now()) {
    Time next = until;
    for (const auto& wire : wires_) {
      wire->deliver(now);
      next = std::min(next, wire->next());
    }
    if (now >= until) return;
    const int64_t pause = std::max<int64_t>((next - now).count(), 0);
    const timespec timeout{pause / 1'000'000'000, pause % 1'000'000'000};
    if (ppoll(ends.data(), ends.size(), &timeout, nullptr) <= 0) continue;
    now = Clock::steady().now();
    for (size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].revents != 0) wires_[i / 2]->take(i % 2, now);
    }
  }
}

}  // namespace baton
