// Lost sockets in the order in which they were lost, and when each is called again.
#include "transport/tcp/redial.h"

#include <algorithm>
#include <utility>

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

}  // namespace baton::tcp
