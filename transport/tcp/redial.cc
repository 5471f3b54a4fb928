// Lost sockets in the order in which they were lost, and when each is called again.
#include "transport/tcp/redial.h"

#include <algorithm>
#include <utility>

namespace baton::tcp {

void Redials::lost(std::shared_ptr<CalledSockets> sockets, uint16_t rail, Time now) {
  const bool again = sockets->lost != -kNever && now - sockets->lost < kForgotten;
  sockets->pause = again ? std::min(2 * sockets->pause, kLongestPause) : kFirstPause;
  sockets->lost = now;
  const Time at = now + sockets->pause;
  waiting_.push_back({std::move(sockets), rail, at});
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
