// One socket of several that was lost is called again while the others carry on, by the side that
// had called it: first by its own way (paths.h), then by the others. One that has come up by
// another way than its own is moved back when its own answers again. (When all of them are lost,
// the worker calls the peer again, by every way.) A way that answers and then carries nothing, as
// where large packets vanish, is called after the others, and moved back to with pauses that grow.
// Where no way carries large packets, sockets with small segments do (net/dial.h); they, too, are
// not where they belong, and moved when a call with full packets is answered.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/clock.h"
#include "transport/net/acceptor.h"
#include "transport/net/endpoint.h"
#include "transport/provider.h"

namespace baton::tcp {

// The ways to a peer: its addresses that are reached by different NICs of this host. The sockets of
// a session are spread over them.
//
// A host with several NICs names an address of each. The kernel's table of routes says by which of
// ours packets to such an address leave, so no user need say which network is which. Of the
// addresses behind one of our NICs one is enough. Left out are
//   - addresses that this host has too, as those of bridges: who calls them reaches himself;
//   - NICs half as fast as the fastest or slower (a network for management beside the fabric), and
//     where any NIC says how fast it is, those that do not (tunnels).
// What is left out is still called where none of the ways answers.

struct Paths {
  std::vector<net::Endpoint> ways;  // one at least
  bool unrouted = false;            // to another address of the peer there is no way at present
};

// `endpoints`: all that may be the peer's. `met`: the one of them where it was met; this is taken
// before others behind the same NIC, and is the only way where no NIC leads to any.
Paths paths_to(const std::vector<net::Endpoint>& endpoints, const net::Endpoint& met);

// Selects NICs by speed in Mb/s; 0: the speed is not known.
std::vector<bool> fast_enough(const std::vector<int64_t>& speeds);

class TcpRail;

// The sockets that came of one call of a peer, the first of which has met it.
struct CalledSockets {
  CalledSockets(const net::Acceptor::Dial& dial, const HelloInfo& met);

  Paths paths() const { return paths_to(first.endpoints, first.endpoints[first.next - 1]); }
  // The endpoint of socket `number`'s own path.
  static const net::Endpoint& way_of(const Paths& paths, size_t number) {
    return paths.ways[number % paths.ways.size()];
  }
  // All ways, that one first; behind the others those that have lost sockets again and again.
  std::vector<net::Endpoint> ways_of(const Paths& paths, size_t number, Time now) const;
  // A socket was lost by this way; or stalled there, which is as bad as two.
  void lost_by(const net::Endpoint& way, bool stalled, Time now);
  bool bad(const net::Endpoint& way, Time now) const;
  // Whether there may be ways that are closed at present.
  bool lacks(const Paths& paths) const {
    return paths.ways.size() < most_ways || (resumed && paths.unrouted);
  }

  net::Acceptor::Dial first;
  HelloInfo peer;
  struct Place {
    TcpRail* rail = nullptr;  // null: lost, or not up yet
    net::Endpoint at;         // where it was met
    bool narrow = false;      // large packets vanish there
  };
  std::vector<Place> places;  // by number
  struct Losses {
    net::Endpoint way;
    int count = 0;
    Time last{};
  };
  std::vector<Losses> losses;  // of ways that have had some
  size_t most_ways = 1;        // that there were
  const bool resumed;          // a way may have been lost before this call
  size_t open = 0;
  Time pause{};         // before the next call
  Time lost = -kNever;  // the last of them that was
  Time look_pause{};    // before the next look at who is where; zero: the shortest
};

class Redials {
 public:
  static constexpr Time kFirstPause = std::chrono::milliseconds(10);
  static constexpr Time kLongestPause = std::chrono::seconds(10);
  static constexpr Time kForgotten =
      std::chrono::minutes(1);  // without a loss, pauses are short again
  static constexpr Time kFirstLook = std::chrono::seconds(1);
  static constexpr Time kLongestLook = std::chrono::minutes(1);

  static constexpr int kBad = 2;  // losses by one way, the last of them not forgotten

  // `rail` of `sockets` is gone, or did not come up.
  void lost(std::shared_ptr<CalledSockets> sockets, uint16_t rail, Time now);
  // A socket is not where it belongs: to be looked after, with pauses that grow.
  void look_later(std::shared_ptr<CalledSockets> sockets, Time now);
  // The next one that is to be called by now, or the sockets that are to be looked at; its
  // `sockets` are null where there is none.
  struct Due {
    std::shared_ptr<CalledSockets> sockets;
    uint16_t rail = 0;  // kLook: none
    Time at{};
    explicit operator bool() const { return sockets != nullptr; }
    bool is_look() const { return rail == kLook; }
  };
  static constexpr uint16_t kLook = UINT16_MAX;
  Due take(Time now);
  Time next() const;

 private:
  std::vector<Due> waiting_;
};

}  // namespace baton::tcp
