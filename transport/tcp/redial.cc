// Lost sockets in the order in which they were lost, and when each is called again.
#include "transport/tcp/redial.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "transport/net/interfaces.h"

namespace baton::tcp {

CalledSockets::CalledSockets(const net::Acceptor::Dial& dial, const HelloInfo& met)
    : first(dial), peer(met), places(dial.rails), resumed(dial.resume != Resume::kNew) {}

std::vector<net::Endpoint> CalledSockets::ways_of(const Paths& paths, size_t number,
                                                  Time now) const {
  std::vector<net::Endpoint> out = paths.ways;
  const auto own = static_cast<ptrdiff_t>(number % out.size());
  std::rotate(out.begin(), out.begin() + own, out.end());
  std::stable_partition(out.begin(), out.end(),
                        [&](const net::Endpoint& way) { return !bad(way, now); });
  return out;
}

void CalledSockets::lost_by(const net::Endpoint& way, bool stalled, Time now) {
  std::erase_if(losses, [&](const Losses& each) { return now - each.last >= Redials::kForgotten; });
  if (losses.empty()) look_pause = Time::zero();  // after a long peace
  auto of = std::find_if(losses.begin(), losses.end(),
                         [&](const Losses& each) { return each.way.same_host(way); });
  if (of == losses.end()) of = losses.insert(losses.end(), {.way = way});
  of->count += stalled ? Redials::kBad : 1;
  of->last = now;
}

bool CalledSockets::bad(const net::Endpoint& way, Time now) const {
  return std::any_of(losses.begin(), losses.end(), [&](const Losses& each) {
    return each.way.same_host(way) && each.count >= Redials::kBad &&
           now - each.last < Redials::kForgotten;
  });
}

void Redials::lost(std::shared_ptr<CalledSockets> sockets, uint16_t rail, Time now) {
  const bool again = sockets->lost != -kNever && now - sockets->lost < kForgotten;
  sockets->pause = again ? std::min(2 * sockets->pause, kLongestPause) : kFirstPause;
  sockets->lost = now;
  const Time at = now + sockets->pause;
  waiting_.push_back({std::move(sockets), rail, at});
}

void Redials::look_later(std::shared_ptr<CalledSockets> sockets, Time now) {
  for (const Due& due : waiting_) {
    if (due.is_look() && due.sockets == sockets) return;
  }
  Time& pause = sockets->look_pause;
  pause = pause == Time::zero() ? kFirstLook : std::min(2 * pause, kLongestLook);
  const Time at = now + pause;
  waiting_.push_back({std::move(sockets), kLook, at});
}

Redials::Due Redials::take(Time now) {
  // The worker calls a peer of which nothing is left.
  std::erase_if(waiting_, [](const Due& due) { return due.sockets->open == 0; });
  const auto due = std::find_if(waiting_.begin(), waiting_.end(),
                                [&](const Due& each) { return each.at <= now; });
  if (due == waiting_.end()) return {};
  Due out = std::move(*due);
  waiting_.erase(due);
  return out;
}

Time Redials::next() const {
  Time next = kNever;
  for (const Due& due : waiting_) next = std::min(next, due.at);
  return next;
}

// Finds which addresses of a peer are reached through which of our NICs.

namespace {

struct Candidate {
  net::Endpoint to;
  std::string interface;
  int64_t speed = 0;
};

using Addresses = std::vector<std::pair<std::string, net::Endpoint>>;

// The interface with this address; empty: none.
std::string_view interface_of(const net::Endpoint& address, const Addresses& own) {
  for (const auto& [interface, each] : own) {
    if (each.same_host(address)) return interface;
  }
  return {};
}

// How fast an interface says that it is, in Mb/s; 0: it does not.
int64_t speed_of(std::string_view interface) {
  const std::string path = "/sys/class/net/" + std::string(interface) + "/speed";
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return 0;
  long value = 0;  // NOLINT(google-runtime-int): as scanned
  if (std::fscanf(file, "%ld", &value) != 1 || value < 0) value = 0;
  std::fclose(file);
  return value;
}

}  // namespace

std::vector<bool> fast_enough(const std::vector<int64_t>& speeds) {
  int64_t fastest = 0;
  for (const int64_t speed : speeds) fastest = std::max(fastest, speed);
  std::vector<bool> out;
  for (const int64_t speed : speeds) out.push_back(fastest == 0 || speed > fastest / 2);
  return out;
}

Paths paths_to(const std::vector<net::Endpoint>& endpoints, const net::Endpoint& met) {
  Paths out{.ways = {met}};
  if (endpoints.size() < 2) return out;
  const Addresses own = net::own_addresses();
  if (!interface_of(met, own).empty()) return out;  // the peer is here
  std::vector<Candidate> ways;
  const auto add = [&](const net::Endpoint& to) {
    if (!interface_of(to, own).empty()) return;
    const std::optional<net::Endpoint> from = net::route_to(to);
    if (!from) {
      out.unrouted = true;
      return;
    }
    const std::string_view interface = interface_of(*from, own);
    const bool known = std::any_of(
        ways.begin(), ways.end(), [&](const Candidate& way) { return way.interface == interface; });
    if (!known) ways.push_back({to, std::string(interface), speed_of(interface)});
  };
  add(met);
  for (const net::Endpoint& each : endpoints) add(each);
  // In the peer's order, wherever it was met: each socket keeps its way from call to call.
  const auto place = [&](const Candidate& way) {
    return std::find_if(endpoints.begin(), endpoints.end(),
                        [&](const net::Endpoint& each) { return each.same_host(way.to); });
  };
  std::stable_sort(ways.begin(), ways.end(),
                   [&](const Candidate& a, const Candidate& b) { return place(a) < place(b); });
  std::vector<int64_t> speeds;
  for (const Candidate& way : ways) speeds.push_back(way.speed);
  const std::vector<bool> fast = fast_enough(speeds);
  if (ways.empty()) return out;
  out.ways.clear();
  for (size_t i = 0; i < ways.size(); ++i) {
    if (fast[i]) out.ways.push_back(ways[i].to);
  }
  return out;
}

}  // namespace baton::tcp
