// One socket of several that was lost is called again while the others carry on, by the side that
// had called it. (When all of them are lost, the worker calls the peer again, by every way.)
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/clock.h"
#include "transport/net/acceptor.h"
#include "transport/provider.h"

namespace baton::tcp {

// The sockets that came of one call of a peer, the first of which has met it.
struct CalledSockets {
  net::Acceptor::Dial first;
  HelloInfo peer;
  size_t open = 0;
  Time pause{};         // before the next call
  Time lost = -kNever;  // the last of them that was
};

class Redials {
 public:
  static constexpr Time kFirstPause = std::chrono::milliseconds(10);
  static constexpr Time kLongestPause = std::chrono::seconds(10);
  static constexpr Time kForgotten =
      std::chrono::minutes(1);  // without a loss, pauses are short again

  // `rail` of `sockets` is gone, or did not come up.
  void lost(std::shared_ptr<CalledSockets> sockets, uint16_t rail, Time now);
  // The next one that is to be called by now; its `sockets` are null where there is none.
  struct Due {
    std::shared_ptr<CalledSockets> sockets;
    uint16_t rail = 0;
    Time at{};
    explicit operator bool() const { return sockets != nullptr; }
  };
  Due take(Time now);
  Time next() const;

 private:
  std::vector<Due> waiting_;
};

}  // namespace baton::tcp
