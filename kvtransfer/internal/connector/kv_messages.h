// What decode and prefill workers tell each other about a load, and its form on the wire.
//
//   decode -> prefill   request    please write the KV of these tokens into these blocks
//                       cancel     stop; tell me when nothing moves any more
//                       probe      are you there? It cannot be delivered where prefill died
//                                  silently
//                       renew      the load may take until then
//   prefill -> decode   done       every block is there and nothing moves any more; with the
//   payload
//                       failed     it will not come, nothing moves any more; with the reason, and
//                                  which blocks have come
//                       cancelled  nothing moves any more
//                       alive      of a probe: a process runs here (older workers do not say so)
//
// Where decode pulls (version 4), the request says so. Cancel then says that decode's reads have
// ended and that none follows, done that all blocks are ready, failed that no more will be; and:
//
//   decode -> prefill   pulled       all is read: the blocks may be used again
//                       renew lease  hold the blocks for so long from now
//   prefill -> decode   offer        how my cache lies, for how long I hold the blocks
//                       ready        these blocks of a layer are computed: read them
//                       lease renewed  by the nth of yours
//
// Messages travel as notifications, in no promised order. A message longer than one notification is
// cut into parts, each with the same header:
//
//   magic(4) version(2) kind(1) zero(1) load(8) total(4) offset(4), then bytes [offset, ...) of the
//   body, which has `total` bytes; every part but the last is kKvPartBytes long
//
// Everything here takes bytes from a peer: any input gives a value or a Status, and memory in
// proportion to the bytes that really came. The functions and classes are free of I/O and threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/kv_layout.h"
#include "kvtransfer/kv_plan.h"
#include "kvtransfer/plans/kv_sides.h"
#include "transport/base/fields.h"
#include "transport/clock.h"
#include "transport/counter.h"
#include "transport/region.h"
#include "transport/transfer.h"

namespace baton::kvtransfer {

inline constexpr uint32_t kKvMagic = 0x764b7442;  // "BtKv"
// Loads that are pushed: layouts of any engine, bytes are counted.
inline constexpr uint16_t kKvVersion = 3;
// Loads that are pulled: requests for them, and what only they need. Who speaks version 3 alone
// answers such a request by a failure that names both versions.
inline constexpr uint16_t kKvPullVersion = 4;
inline constexpr size_t kKvHeaderBytes = 24;
inline constexpr size_t kKvPartBytes = kMaxNotification - kKvHeaderBytes;
// Limit of a request: about three million tokens in blocks of 16.
inline constexpr size_t kMaxKvMessage = 16 << 20;
// Limit of a failure: a bit for each of four million blocks.
inline constexpr size_t kMaxKvFailure = 1 << 20;
// Limit of an offer: a layout and its regions.
inline constexpr size_t kMaxKvOffer = KvLayout::kMaxEncoded + (128 << 10);
// Limit of all other kinds.
inline constexpr size_t kMaxKvReply = 4096;

enum class KvMessageKind : uint8_t {
  kRequest = 1,
  kCancel = 2,
  kDone = 3,
  kFailed = 4,
  kCancelled = 5,
  kProbe = 6,
  kRenew = 7,
  kOffer = 8,
  kReady = 9,
  kPulled = 10,
  kRenewLease = 11,
  kLeaseRenewed = 12,
  kAlive = 13,  // of version 3: of a load that is pushed, too
};
inline constexpr KvMessageKind kLastKvMessageKind = KvMessageKind::kAlive;
// That a message of this kind has, unless it is a request.
constexpr uint16_t kv_version_of(KvMessageKind kind) {
  return kind >= KvMessageKind::kOffer && kind < KvMessageKind::kAlive ? kKvPullVersion
                                                                       : kKvVersion;
}

// One notification: a part of a message, or all of it.
struct KvMessagePart {
  KvMessageKind kind = KvMessageKind::kCancel;
  uint16_t version = 0;
  uint64_t load = 0;   // the decode worker's number for the load, dense from 1 for each peer
  uint32_t total = 0;  // bytes of the whole body
  uint32_t offset = 0;
  std::string_view bytes;  // inside the notification
};

// InvalidArgument for anything but a part as above; FailedPrecondition, with the remedy, for one of
// another version. Kind and load lead the header in every version: they are set even then, so that
// the sender can be told (load 0: not even that could be read).
absl::Status decode_kv_part(std::string_view notification, KvMessagePart& part);

// The part of a message that starts at `offset` of its body, as a notification; `offset` moves past
// it. Reuses the memory of `out`. Call until offset == body.size(), at least once.
void encode_kv_part(KvMessageKind kind, uint64_t load, std::string_view body, size_t& offset,
                    std::string& out, uint16_t version);
inline void encode_kv_part(KvMessageKind kind, uint64_t load, std::string_view body, size_t& offset,
                           std::string& out) {
  encode_kv_part(kind, load, body, offset, out, kv_version_of(kind));
}

// Puts the messages of one peer together again. Parts may come in any order.
class KvAssembler {
 public:
  static constexpr size_t kMaxOpen = 256;                // messages under way
  static constexpr size_t kMaxHeld = 4 * kMaxKvMessage;  // bytes of them

  // True when this part completes its message: `body` is then the whole of it. An error means that
  // the peer contradicts itself or sends too much; what it has sent of that message is dropped.
  absl::StatusOr<bool> add(const KvMessagePart& part, std::string& body);

  size_t open() const { return open_.size(); }
  size_t held() const { return held_; }

 private:
  struct Partial {
    uint32_t total = 0;
    size_t received = 0;
    std::vector<std::string> parts;  // empty: not here yet
  };
  using Key = std::pair<uint64_t, KvMessageKind>;
  absl::Status refuse(const Key& key, absl::string_view why);

  absl::flat_hash_map<Key, Partial> open_;
  size_t held_ = 0;
};

absl::Status check_kv_size(size_t bytes);
absl::Status malformed_kv(size_t at);
// For readers; a writer has as many as there are.
void kv_resize(auto& list, size_t count) {
  if constexpr (requires { list.resize(count); }) list.resize(count);
}

// The body of a request.
struct KvLoadRequest {
  uint64_t request = 0;         // the decode engine's own id of it, for timelines
  std::string decode;           // the decode worker's name, for people
  std::string key;              // "": none
  uint32_t loads_of_key = 1;    // that come to this prefill worker
  KvShare share;                // of the heads, that this prefill worker sends
  Time timeout{};               // from now
  std::vector<int32_t> tokens;  // from the start of the sequence
  uint32_t first_token = 0;     // a multiple of each group's block_tokens
  std::vector<uint32_t>
      blocks;       // of the decode worker's cache: where the KV goes, group after group
  KvLayout layout;  // of that cache
  std::vector<KvRemoteBuffer> buffers;  // of the layout; all of one owner
  std::vector<RemoteCounter> counters;  // one per layer: counts bytes that have arrived
  // Decode reads the blocks: no peer writes, so there are neither buffers nor counters.
  bool pull = false;
  Time lease{};  // then: that it asks for

  uint16_t version() const { return pull ? kKvPullVersion : kKvVersion; }

  static constexpr size_t kMaxName = 64;
  static constexpr size_t kMaxKey = 256;
  static constexpr uint32_t kMaxRanks = 1024;
  static constexpr Time kMaxTimeout = std::chrono::hours(24);
  // The pages of a group: a part of `blocks`.
  KvPages pages(size_t group) const;
  absl::Status check() const;
  // Whether it pulls, the message's version says.
  static void fields(auto& wire, auto& m) {
    wire(m.request);
    wire.brief(m.decode, kMaxName);
    wire.brief(m.key, kMaxKey);
    wire(m.loads_of_key, m.share, m.timeout);
    if (m.pull) wire(m.lease);
    wire(m.first_token, m.layout);
    const size_t buffers = m.pull ? 0 : m.layout.buffers.size();
    kv_resize(m.buffers, buffers);
    for (auto& buffer : m.buffers) wire(buffer.region, buffer.offset);
    auto counters = static_cast<uint32_t>(m.counters.size());
    wire(counters);
    wire.require(counters == (buffers == 0 ? 0 : m.layout.layers()));
    kv_resize(m.counters, buffers == 0 ? 0 : m.layout.layers());
    for (auto& counter : m.counters) {
      wire(counter.index, counter.generation);
      if constexpr (requires { m.counters.resize(1); }) {
        counter.owner = m.buffers.front().region.owner;
      }
    }
    wire(m.blocks, m.tokens);
  }
};

// The tokens of [first_token, length) that a group keeps, and the blocks that hold them.
KvTokens kept_tokens(const KvGroup& group, uint64_t first_token, uint64_t length);
struct KvBlockRange {
  uint64_t first = 0;
  uint64_t count = 0;
};
KvBlockRange blocks_of(const KvGroup& group, KvTokens tokens);

// The body of a failed message: why, and a bit for each of the load's blocks that has come (bit i %
// 8 of byte i / 8; none: no block has).
std::string encode_kv_failure(const absl::Status& why, std::string_view arrived = {});
// The status told; InvalidArgument for a body that tells none. `arrived` may be null.
absl::Status decode_kv_failure(std::string_view body, std::string* arrived = nullptr);

// The body of a renew message.
struct KvRenewal {
  Time timeout{};  // that a request may have
  absl::Status check() const;
  static void fields(auto& wire, auto& m) { wire(m.timeout); }
};

// The body of an offer.
struct KvOffer {
  Time lease{};                         // granted, from when the request came
  KvLayout layout;                      // of the prefill worker's cache
  std::vector<KvRemoteBuffer> buffers;  // of it; all of one owner
  absl::Status check() const;
  static void fields(auto& wire, auto& m) {
    wire(m.lease, m.layout);
    kv_resize(m.buffers, m.layout.buffers.size());
    for (auto& buffer : m.buffers) wire(buffer.region, buffer.offset);
  }
};

// The body of a ready message: layer `layer` of the prefill worker's, from the sequence's block
// `first_block` on. Whether there are such is for the receiver to check. A load has many of these
// under way, which an assembler could not tell apart: each fits one notification.
struct KvReady {
  static constexpr size_t kMaxBlocks = (kKvPartBytes - 3 * sizeof(uint32_t)) / sizeof(uint32_t);
  uint32_t layer = 0;
  uint32_t first_block = 0;
  std::vector<uint32_t> blocks;  // one at least
  absl::Status check() const;
  static void fields(auto& wire, auto& m) { wire(m.layer, m.first_block, m.blocks); }
};

// The body of a lease's renewal, as asked for and as granted: the nth of the load, and for how
// long.
struct KvLease {
  uint64_t number = 0;
  Time lease{};
  absl::Status check() const;
  static void fields(auto& wire, auto& m) { wire(m.number, m.lease); }
};

// A body as bytes. What fails its check(), or is longer than kMaxKvMessage, is InvalidArgument in
// encode_kv(), as are bytes in decode_kv() that are no such body. Both reuse memory.
template <typename Body>
std::string kv_bytes(const Body& body) {
  std::string out;
  base::FieldWriter wire(out);
  wire(body);
  return out;
}
template <typename Body>
absl::Status encode_kv(const Body& body, std::string& out) {
  if (absl::Status status = body.check(); !status.ok()) return status;
  out.clear();
  base::FieldWriter wire(out);
  wire(body);
  return check_kv_size(out.size());
}
template <typename Body>
absl::Status decode_kv(std::string_view bytes, Body& body) {
  base::FieldReader wire(bytes);
  wire(body);
  if (!wire.why().ok()) return wire.why();
  return wire.finished() ? body.check() : malformed_kv(wire.at());
}

// Which loads of a peer have been heard of: a set of numbers that are dense in the long run. Makes
// a cancel that overtakes its request as good as one that follows it.
class KvSeenLoads {
 public:
  static constexpr size_t kMaxAhead = 4096;
  // False when `load` was there already. ResourceExhausted, and not added, when too many smaller
  // ones are missing.
  absl::StatusOr<bool> add(uint64_t load);

 private:
  uint64_t all_below_ = 1;  // numbers start at 1
  absl::flat_hash_set<uint64_t> ahead_;
};

}  // namespace baton::kvtransfer
