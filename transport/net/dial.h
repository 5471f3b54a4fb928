// An attempt to reach a peer: which of its addresses is called next, for how long, and what their
// answers say of the peer.
//
// A peer names every address that its host has, and not all of them lead to it: a network may be
// down, the host may have moved, and addresses of bridges are the same on every machine, so that
// who calls one reaches himself. Therefore
//   - an address that is silent is left after a quarter of the patience, for the others, and called
//     again when those are through, as long as there is patience;
//   - one that answers, but not to what fills a packet, is called again with smaller segments when
//     no other has answered in full: on a path whose MTU is less than that of the interfaces, and
//     where no router says so by ICMP, large packets vanish;
//   - where the peer answered a question for its address is one of its addresses, whether it knows
//     of it or not: behind NAT or a published port it does not. It is called after those that the
//     peer names, which lead there without a detour if they lead there at all; since it is known to
//     answer, those have a quarter of the time to do so. The peer that is met there is met there
//     alone;
//   - a peer that is called again is called first where it was last met, also when it has not named
//     that address, and only a "no" from there, or from everywhere, is its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "transport/net/endpoint.h"
#include "transport/net/handshake.h"
#include "transport/provider.h"

namespace baton::net {

struct Dial {
  uint64_t session = 0;
  Resume resume = Resume::kNew;
  uint64_t link = 0;   // HelloInfo::link
  HelloInfo expected;  // its uid must match where set
  Handshake::Purpose purpose = Handshake::Purpose::kRail;
  uint16_t rail = 0;  // which connection of the session this is, of how many
  uint16_t rails = 1;
  std::string address;  // as asked for
  std::vector<Endpoint> endpoints;
  size_t next = 0;                        // endpoint to try
  int turned_away = 0;                    // times, by the one tried last
  std::string errors;                     // of those tried
  std::shared_ptr<void> owner = nullptr;  // Acceptor::connect_another()'s
  // Payload of the largest packets, of sizes that are tried in turns. 0: as the MTU of the
  // interfaces allows; then what every network carries over IPv6, and over IPv4.
  static constexpr std::array<uint16_t, 3> kSegments = {0, 1220, 536};
  uint16_t segment() const { return kSegments[narrower_]; }
  bool full_only = false;  // the first of them alone

  // Before the first advance(): where the peer has answered a question.
  void answered_at(const Endpoint& where);
  // Before the first advance(): where the peer was met last.
  void met_at(const Endpoint& where);
  // It is met, at endpoints[next - 1].
  void met();
  // The next endpoint, which is endpoints[next - 1] then; false: there is none left.
  bool advance(Time now, Time patience);
  // Until when that one may be silent; kNever: as long as a handshake may take.
  Time patience_ends(Time now, Time patience) const;
  // It was silent for so long.
  void silent() { any_silent_ = true; }
  // It answered, but not to what fills a packet.
  void narrow();
  // `why` is of the endpoint tried last, if any was.
  void note(const absl::Status& why);
  // When all have failed, what that says of the peer. What a peer that answered said no with;
  // kNotFound: no process listens there; kUnavailable: nothing.
  absl::StatusCode verdict() const;

 private:
  bool guessed() const { return guess_ && next == 1; }
  bool at_answered() const;

  Time until_ = kNever;  // endpoints that are silent are called again; kNever: not begun
  bool any_silent_ = false;
  size_t narrower_ = 0;               // of kSegments
  bool any_narrow_ = false;           // of those tried with that one
  std::vector<size_t> narrow_;        // with which of kSegments each is to be called
  bool again_ = false;                // all endpoints have been tried
  bool guess_ = false;                // the first endpoint is none that the peer has named
  Endpoint met_;                      // size 0: nowhere yet
  Endpoint answered_;                 // an address that it does not name; size 0: none
  std::vector<absl::StatusCode> no_;  // of each endpoint; kOk: none yet
  absl::StatusCode refusal_ = absl::StatusCode::kUnavailable;
  bool its_own_ = false;  // the refusal, for sure
};

}  // namespace baton::net
