// Interfaces as the kernel lists them, and its table of routes.
#include "transport/net/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "transport/base/unique_fd.h"

namespace baton::net {
namespace {

// The number of addresses that fit into a worker's introduction (kMaxHelloAddress).
constexpr size_t kMostAdvertised = 8;
constexpr size_t kMostAdvertisedText = 160;

// Bridges of containers and VMs have the same addresses everywhere.
bool is_bridge(std::string_view interface) {
  for (std::string_view bridge : {"docker", "br-", "virbr", "veth", "cni", "flannel", "cali"}) {
    if (interface.starts_with(bridge)) return true;
  }
  return false;
}

// An address of an interface that is up, and how likely others are to come by it.
struct Advertised {
  std::string text;
  std::string interface;
  bool bridge = false, idle = false;  // idle: nothing is plugged in
  size_t number = 0;                  // of those of its interface and family
  bool ipv6 = false;

  // Each interface comes once before any comes twice: of many addresses only some are told.
  auto unlikeliness() const { return std::tuple(bridge, idle, number, ipv6); }
};

// For the IP families.
Endpoint endpoint_of(const ifaddrs& interface) {
  Endpoint e;
  e.size = interface.ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::memcpy(&e.storage, interface.ifa_addr, e.size);
  return e;
}

bool is_any_v4(const Endpoint& e) {
  return e.storage.ss_family == AF_INET &&
         reinterpret_cast<const sockaddr_in&>(e.storage).sin_addr.s_addr == INADDR_ANY;
}
bool is_any_v6(const Endpoint& e) {
  return e.storage.ss_family == AF_INET6 &&
         IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(e.storage).sin6_addr);
}

// For a host without a network, or with link-local addresses alone: those say nothing elsewhere.
std::string loopback_at_port_of(const Endpoint& at, bool ipv6) {
  return absl::StrCat(ipv6 ? "[::1]:" : "127.0.0.1:", at.port());
}

}  // namespace

std::string advertised(int listener) {
  const Endpoint at = local_of(listener);
  const bool any6 = is_any_v6(at);
  if (!any6 && !is_any_v4(at)) return at.with_scope(0).text();
  std::vector<Advertised> found;
  bool loopback_v4 = false;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) == 0) {
    for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
      if (i->ifa_addr == nullptr || !(i->ifa_flags & IFF_UP)) continue;
      const int family = i->ifa_addr->sa_family;
      if (family != AF_INET && !(family == AF_INET6 && any6)) continue;
      const Endpoint e = endpoint_of(*i).at_port_of(at);
      loopback_v4 |= family == AF_INET && e.loopback();
      if (e.loopback() || e.link_local()) continue;
      Advertised one{.text = e.text(),
                     .interface = i->ifa_name,
                     .bridge = is_bridge(i->ifa_name),
                     .idle = (i->ifa_flags & IFF_RUNNING) == 0,
                     .ipv6 = family == AF_INET6};
      one.number = static_cast<size_t>(
          std::count_if(found.begin(), found.end(), [&](const Advertised& other) {
            return other.interface == one.interface && other.ipv6 == one.ipv6;
          }));
      found.push_back(std::move(one));
    }
    freeifaddrs(list);
  }
  if (found.empty()) return loopback_at_port_of(at, any6 && !loopback_v4);
  std::stable_sort(found.begin(), found.end(), [](const Advertised& a, const Advertised& b) {
    return a.unlikeliness() < b.unlikeliness();
  });
  std::string out;
  for (size_t i = 0; i < std::min(found.size(), kMostAdvertised); ++i) {
    if (i > 0 && out.size() + 1 + found[i].text.size() > kMostAdvertisedText) break;
    absl::StrAppend(&out, i > 0 ? "," : "", found[i].text);
  }
  return out;
}

absl::StatusOr<std::string> advertised_as(const std::string& option, int listener, bool own_port) {
  const Endpoint at = local_of(listener);
  const char* const variable = at.loopback() ? nullptr : std::getenv("BATON_ADVERTISE");
  const bool by_option = !option.empty();
  const std::string told = by_option || variable == nullptr ? option : variable;
  if (told.empty()) return advertised(listener);
  const std::string said =
      absl::StrCat(by_option ? "advertise \"" : "BATON_ADVERTISE=\"", told, "\"");
  std::vector<std::string> found;
  for (const auto part : absl::StrSplit(told, ',')) {
    const std::string one(part);
    const bool with_port = split_host_port(one).ok();
    const bool bare_v6 = one.find(':') != std::string::npos && !one.starts_with('[');
    const std::string port = absl::StrCat(":", at.port());
    auto places = resolve(with_port ? one
                          : bare_v6 ? absl::StrCat("[", one, "]", port)
                                    : one + port);
    if (!places.ok()) {
      return absl::Status(places.status().code(),
                          absl::StrCat(said, ": ", places.status().message(),
                                       "; write host or host:port, as others reach this worker"));
    }
    for (const Endpoint& place : *places) {
      const std::string text = (own_port ? place.at_port_of(at) : place).with_scope(0).text();
      if (std::find(found.begin(), found.end(), text) == found.end()) found.push_back(text);
    }
  }
  const std::string all = absl::StrJoin(found, ",");
  if (found.size() > kMostAdvertised || all.size() > kMostAdvertisedText) {
    return absl::InvalidArgumentError(
        absl::StrCat(said, ": these are ", found.size(), " addresses (", all,
                     "), too many to tell a peer; name at most ", kMostAdvertised, " in ",
                     kMostAdvertisedText, " letters"));
  }
  return all;
}

std::vector<Endpoint> on_interfaces(const Endpoint& at, const Endpoint* called) {
  if (at.storage.ss_family != AF_INET6 || !at.link_local() || at.scope() != 0) return {at};
  if (called != nullptr && called->scope() != 0 && called->same_host(at)) {
    return {at.with_scope(called->scope())};
  }
  std::vector<Endpoint> out;
  for (const auto& each_own : own_addresses()) {
    const Endpoint& own = each_own.second;
    if (own.scope() == 0 || !own.link_local()) continue;
    const bool known = std::any_of(
        out.begin(), out.end(), [&](const Endpoint& each) { return each.scope() == own.scope(); });
    if (!known) out.push_back(at.with_scope(own.scope()));
  }
  return out;
}

std::optional<Endpoint> route_to(const Endpoint& to) {
  // No packet is sent.
  const base::UniqueFd probe(::socket(to.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe.valid() ||
      ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&to.storage), to.size) != 0)
    return std::nullopt;
  const Endpoint from = local_of(probe.get());
  if (from.size == 0) return std::nullopt;
  return from;
}

std::vector<std::pair<std::string, Endpoint>> own_addresses() {
  std::vector<std::pair<std::string, Endpoint>> out;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return out;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    out.emplace_back(i->ifa_name, endpoint_of(*i));
  }
  freeifaddrs(list);
  return out;
}

}  // namespace baton::net
