// GIDs: the addresses of a port, and which of them to use towards a peer.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace baton::verbs {

// Two ports can talk when they use addresses of one family. Values are bits: a port has several.
enum class Family : uint8_t {
  kNone = 0,
  kIpv4 = 1,       // RoCEv2 over IPv4
  kIpv6 = 2,       // RoCEv2 over IPv6
  kLinkLocal = 4,  // RoCEv2 over link-local IPv6
  kRoceV1 = 8,
  kInfiniband = 16,
};
Family family_of(const ibv_gid_entry& entry);
const char* name_of(Family family);
uint8_t families_of(absl::Span<const ibv_gid_entry> gids);

struct GidChoice {
  int index = 0;
  ibv_gid gid{};
  Family family = Family::kNone;
  std::string reason;  // for people: why this one
};

// The GID to use: `wanted` if it is not negative, otherwise the best of the families in `allowed`
// (bits of Family), in the order of the enumeration; addresses of loopback and of containers'
// bridges come last. Among equals it takes the one nearest to an address of the peer (`near`): two
// ports may share some of their subnets and not others.
absl::StatusOr<GidChoice> choose_gid(absl::Span<const ibv_gid_entry> gids, int wanted,
                                     uint8_t allowed, absl::Span<const ibv_gid> near = {});

// The best GIDs to offer to a peer, at most `most`, best first.
std::vector<ibv_gid> best_gids(absl::Span<const ibv_gid_entry> gids, size_t most);

// "10.0.0.1" or "fe80::1".
std::string gid_text(const ibv_gid& gid);

// How many leading bits two GIDs share, of the part that names a network: at most 120 of an IPv4
// address (a /24), 64 of an IPv6 one. For pairing ports that are on one subnet.
int shared_prefix(const ibv_gid& a, const ibv_gid& b);
// The most that any two of them share.
int shared_prefix(absl::Span<const ibv_gid> a, absl::Span<const ibv_gid> b);

}  // namespace baton::verbs
