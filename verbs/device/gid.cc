// Chooses among the addresses of a port.
#include "verbs/device/gid.h"

#include <arpa/inet.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::verbs {
namespace {

bool ipv4_mapped(const ibv_gid& gid) {
  static constexpr uint8_t kPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kPrefix, sizeof kPrefix) == 0;
}

bool zero(const ibv_gid& gid) {
  return std::all_of(gid.raw, gid.raw + 16, [](uint8_t byte) { return byte == 0; });
}

// Addresses that exist on every machine alike: docker's bridge, loopback.
bool unlikely(const ibv_gid& gid) {
  if (!ipv4_mapped(gid)) return false;
  return gid.raw[12] == 127 || (gid.raw[12] == 172 && gid.raw[13] == 17);
}

// Less is better.
int rank_of(const ibv_gid_entry& entry) {
  return 2 * std::countr_zero(static_cast<uint8_t>(family_of(entry))) + unlikely(entry.gid);
}

}  // namespace

Family family_of(const ibv_gid_entry& entry) {
  if (zero(entry.gid)) return Family::kNone;
  switch (entry.gid_type) {
    case IBV_GID_TYPE_IB:
      return Family::kInfiniband;
    case IBV_GID_TYPE_ROCE_V1:
      return Family::kRoceV1;
    case IBV_GID_TYPE_ROCE_V2:
      break;
    default:
      return Family::kNone;
  }
  if (ipv4_mapped(entry.gid)) return Family::kIpv4;
  const bool link_local = entry.gid.raw[0] == 0xfe && (entry.gid.raw[1] & 0xc0) == 0x80;
  return link_local ? Family::kLinkLocal : Family::kIpv6;
}

const char* name_of(Family family) {
  switch (family) {
    case Family::kNone:
      return "none";
    case Family::kIpv4:
      return "RoCEv2 IPv4";
    case Family::kIpv6:
      return "RoCEv2 IPv6";
    case Family::kLinkLocal:
      return "RoCEv2 link-local";
    case Family::kRoceV1:
      return "RoCEv1";
    case Family::kInfiniband:
      return "InfiniBand";
  }
  return "?";
}

uint8_t families_of(absl::Span<const ibv_gid_entry> gids) {
  uint8_t families = 0;
  for (const ibv_gid_entry& entry : gids) families |= static_cast<uint8_t>(family_of(entry));
  return families;
}

absl::StatusOr<GidChoice> choose_gid(absl::Span<const ibv_gid_entry> gids, int wanted,
                                     uint8_t allowed, absl::Span<const ibv_gid> near) {
  const ibv_gid_entry* best = nullptr;
  std::pair<int, int> best_rank;
  for (const ibv_gid_entry& entry : gids) {
    const Family family = family_of(entry);
    if (wanted >= 0) {
      if (static_cast<int>(entry.gid_index) != wanted || family == Family::kNone) continue;
      return GidChoice{
          wanted, entry.gid, family,
          absl::StrFormat("GID %d (%s %s), as set", wanted, name_of(family), gid_text(entry.gid))};
    }
    if ((static_cast<uint8_t>(family) & allowed) == 0) continue;
    const std::pair rank(rank_of(entry), -shared_prefix({&entry.gid, 1}, near));
    if (best == nullptr || rank < best_rank) {
      best = &entry;
      best_rank = rank;
    }
  }
  if (wanted >= 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "GID index %d is empty or out of range: the port has %u GIDs, see `show_gids` or "
        "/sys/class/infiniband/*/ports/*/gids; leave verbs.gid_index out to choose one",
        wanted, gids.size()));
  }
  if (best == nullptr) {
    return absl::FailedPreconditionError(
        gids.empty() ? "the port has no GID: give its network interface an IP address"
                     : "no GID of this port is of a kind that the peer's port also has: give both "
                       "interfaces an IPv4 address");
  }
  const Family family = family_of(*best);
  return GidChoice{static_cast<int>(best->gid_index), best->gid, family,
                   absl::StrFormat("GID %d (%s %s), the best of %u", best->gid_index,
                                   name_of(family), gid_text(best->gid), gids.size())};
}

std::vector<ibv_gid> best_gids(absl::Span<const ibv_gid_entry> gids, size_t most) {
  std::vector<const ibv_gid_entry*> known;
  for (const ibv_gid_entry& entry : gids) {
    if (family_of(entry) != Family::kNone) known.push_back(&entry);
  }
  std::stable_sort(known.begin(), known.end(),
                   [](auto* a, auto* b) { return rank_of(*a) < rank_of(*b); });
  std::vector<ibv_gid> out;
  for (const ibv_gid_entry* entry : known) {
    const bool told = std::any_of(out.begin(), out.end(), [&](const ibv_gid& gid) {
      return std::memcmp(gid.raw, entry->gid.raw, sizeof gid.raw) == 0;
    });
    if (!told && out.size() < most) out.push_back(entry->gid);
  }
  return out;
}

std::string gid_text(const ibv_gid& gid) {
  char text[INET6_ADDRSTRLEN] = "?";
  const bool v4 = ipv4_mapped(gid);
  inet_ntop(v4 ? AF_INET : AF_INET6, v4 ? gid.raw + 12 : gid.raw, text, sizeof text);
  return text;
}

int shared_prefix(const ibv_gid& a, const ibv_gid& b) {
  const int limit = ipv4_mapped(a) && ipv4_mapped(b) ? 120 : 64;
  for (int bit = 0; bit < limit; ++bit) {
    const uint8_t mask = static_cast<uint8_t>(0x80 >> (bit % 8));
    if ((a.raw[bit / 8] ^ b.raw[bit / 8]) & mask) return bit;
  }
  return limit;
}

int shared_prefix(absl::Span<const ibv_gid> a, absl::Span<const ibv_gid> b) {
  int most = 0;
  for (const ibv_gid& here : a) {
    for (const ibv_gid& there : b) most = std::max(most, shared_prefix(here, there));
  }
  return most;
}

}  // namespace baton::verbs
