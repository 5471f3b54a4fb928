// The control messages between two workers' verbs providers. The same messages travel as SENDs on a
// queue pair and, framed by a 32-bit length, on the control connection.
//
// Every message is a kind (1 byte), a zero, the receive credits that it gives back (2 bytes), and a
// body; at most kMessageBytes in all. Decoding is strict: a message that no correct peer sends is
// an error and closes the connection.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/provider.h"

namespace baton::verbs {

inline constexpr size_t kMessageBytes = 1024;
inline constexpr size_t kHeaderBytes = 4;
inline constexpr size_t kMaxPorts = 16;

enum class Kind : uint8_t {
  kReady = 1,  // first on a new queue pair: the path works
  kArrival,    // the writes before it have landed
  kFragment,   // of a notification that is too long for its kArrival
  kCredit,     // nothing but credits
  kAsk,        // may I use this region?
  kTell,       // yes, and how; or why not
  kForget,     // this region is gone
  kConnect,    // make a queue pair for this rail
  kConnected,  // made; this is mine
  kRefused,    // could not be made
  kDrained,    // my end of this rail broke: this much has come over it
  kGoodbye,    // this rail is closed for good
};

struct Message {
  Kind kind = Kind::kCredit;
  uint16_t credits = 0;
  std::string_view body;
};
absl::StatusOr<Message> decode_message(std::string_view bytes);
// Clears `out` and writes a header to it.
void begin_message(std::string& out, Kind kind, uint16_t credits = 0);
void set_credits(std::string& message, uint16_t credits);

// kArrival. The notification is what came in fragments before, and `notify`.
inline constexpr size_t kArrivalBytes = 4 + 4 + 4 + 8 + 8 + 4 + 2 + 8 + 2;
inline constexpr size_t kMaxArrivalNotify = kMessageBytes - kHeaderBytes - kArrivalBytes;
void encode(std::string& out, const Arrival& arrival);
absl::StatusOr<Arrival> decode_arrival(std::string_view body);

// kFragment: offset (4 bytes) and bytes of a notification.
inline constexpr size_t kMaxFragment = kMessageBytes - kHeaderBytes - 4;

// kAsk and the beginning of kTell, kForget.
struct RegionName {
  uint32_t index = 0;
  uint32_t generation = 0;
  uint64_t key = 0;
  bool operator==(const RegionName&) const = default;
  template <typename H>
  friend H AbslHashValue(H hash, const RegionName& name) {
    return H::combine(std::move(hash), name.index, name.generation, name.key);
  }
};
void encode(std::string& out, const RegionName& name);
absl::StatusOr<RegionName> decode_name(std::string_view body);

struct RegionAnswer {
  RegionName name;
  absl::Status refusal;  // OK: the rest is valid
  uint64_t base = 0;
  uint64_t size = 0;
  Access access = Access::kLocal;
  std::vector<uint32_t> rkeys;  // by the index of the owner's port
};
void encode(std::string& out, const RegionAnswer& answer);
absl::StatusOr<RegionAnswer> decode_answer(std::string_view body);

// One end of a queue pair: kConnect and kConnected.
struct Endpoint {
  uint16_t rail = 0;
  uint16_t rails = 1;
  uint32_t incarnation = 0;  // of the rail: how many queue pairs it has had
  uint8_t port = 0;          // kConnect: index of the port that the other side should use
  uint8_t origin = 0;        // index of the port that this end is on
  bool recovery = false;     // the rail goes on; otherwise it is a new one
  uint8_t mtu = 0;           // ibv_mtu, the most this end can take
  uint8_t family = 0;
  uint8_t rd_atomic = 0;  // reads that this end answers at a time
  uint16_t lid = 0;
  uint16_t receives = 0;  // posted at this end: the other's credits
  uint32_t queue_pair = 0;
  uint32_t sequence = 0;  // number of the first packet this end sends
  bool by_cm = false;     // from older releases: rdma_cm shall join the two ends
  uint16_t cm_port = 0;   // 0
  ibv_gid gid{};
  // 0: the default. One side's value holds for both, because the data of reads travels from the
  // other side.
  uint8_t traffic_class = 0;
  uint8_t service_level = 0;
};
void encode(std::string& out, const Endpoint& endpoint);
absl::StatusOr<Endpoint> decode_endpoint(std::string_view body);

// kRefused (with text), kDrained, kGoodbye.
struct RailNote {
  uint16_t rail = 0;
  uint32_t incarnation = 0;
  uint64_t received = 0;  // kDrained: messages that came over it in all
  bool lost = false;      // kDrained: this end gives the rail up instead of recovering it
  std::string_view text;
};
void encode(std::string& out, const RailNote& note);
absl::StatusOr<RailNote> decode_note(std::string_view body);

// HelloInfo::extra: the ports of a worker.
struct PortOffer {
  uint8_t families = 0;       // bits of Family
  std::vector<ibv_gid> gids;  // the best first
};
// The most GIDs to announce for each of `ports` ports: HelloInfo::extra takes 512 bytes.
constexpr size_t most_gids(size_t ports) {
  const size_t fit = ((512 - 2) / (ports == 0 ? 1 : ports) - 2) / sizeof(ibv_gid);
  return fit < 4 ? fit : 4;
}
static_assert(most_gids(kMaxPorts) == 1);
std::string encode_offers(const std::vector<PortOffer>& offers);
absl::StatusOr<std::vector<PortOffer>> decode_offers(std::string_view extra);

}  // namespace baton::verbs
