// Queue pairs: one end of a reliable connection over one simulated link, with the semantics of a
// verbs RC queue pair and none of the leniency of soft-RoCE.
//
//   - Work requests complete in the order they were posted. At the target nothing has an order:
//     packets and whole messages may overtake each other.
//   - Lost packets are sent again after a timeout. The responder's record of what it has is taken
//     as known to the sender (selective repeat). When `retry_count` timeouts in a row bring no
//     progress the queue pair breaks.
//   - An access that the target refuses breaks the queue pair: its own request completes with the
//     reason, the others are flushed, in order.
//   - What an adapter would refuse at the door is refused, and recorded in SimFabric::violations():
//     posting beyond the depth or to a broken queue pair, messages above the limit, memory that is
//     not registered, atomics that are not aligned to 8 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "tests/sim/fabric/wire.h"
#include "transport/base/ring.h"
#include "transport/provider.h"

namespace baton::sim {

// One work request: bytes [begin, end) of a transfer, or an atomic addition.
struct WorkRequest {
  enum class Op : uint8_t { kWrite, kRead, kAdd };
  uint64_t id = 0;  // comes back in the completion
  Op op = Op::kWrite;
  const TransferDescriptor* transfer = nullptr;  // outlives the request
  uint32_t slice = 0;                            // told to the target with a write
  size_t begin = 0;
  size_t end = 0;
  uint64_t atomic_offset = 0;  // kAdd: of an aligned 8-byte word in transfer->remote
  uint64_t atomic_amount = 0;
};

// Why a queue pair broke.
enum class Break : uint8_t {
  kRefused,       // the target refused an access: recover() makes it usable again
  kPeerRecovers,  // the other end called recover(): it will be ready soon
  kLost,          // the other end is out of reach: for good
};

// Who a queue pair reports to. Called at the simulated moment, from inside the fabric.
class QueuePairOwner {
 public:
  virtual ~QueuePairOwner() = default;
  // A request is finished. `flushed`: it was not executed, or no side knows whether it was, because
  // the queue pair broke for another reason.
  virtual void completed(uint64_t id, const absl::Status& status, bool flushed) = 0;
  // Target side: a write is in memory. The arrival's notification is valid during the call.
  virtual void landed(const Arrival& arrival) = 0;
  // The queue pair broke; all its requests have completed.
  virtual void broken(const absl::Status& cause, Break how) = 0;
  // The queue pair may be posted to again.
  virtual void recovered() = 0;
};

class QueuePair {
 public:
  // The two ends name each other with join(). `regions` is the table of this end's worker.
  QueuePair(SimNetwork& network, size_t node, size_t peer_node, size_t rail, RegionTable& regions,
            QueuePairOwner& owner);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;
  static void join(QueuePair& a, QueuePair& b);

  // Refuses with a status, and a violation, what an adapter would refuse.
  absl::Status post(const WorkRequest& request);
  uint32_t outstanding() const { return static_cast<uint32_t>(next_ - first_); }
  bool ready() const { return ready_; }

  // Breaks for good: completes everything outstanding as flushed, then calls broken(cause, kLost).
  void fail(const absl::Status& cause) { fail(kNone, cause, Break::kLost); }
  // Connects both ends of a broken connection anew, as a provider does after a remote access error:
  // the other end is broken as well, and a round trip later both are ready.
  void recover();

  QueuePairOwner& owner() const { return owner_; }
  uint32_t id() const { return id_; }
  uint32_t peer() const { return peer_; }

  // --- for the fabric ---
  bool reachable() const;  // both nodes live, the link is up
  bool next_packet(bool responder, SimPacket& packet, size_t& bytes);
  void transmitted();
  void receive(const SimPacket& packet);
  void on_timer();

 private:
  static constexpr uint64_t kNone = ~uint64_t{0};
  // A set of packet numbers; keeps its memory.
  struct PacketSet {
    std::vector<uint64_t> words;
    uint32_t count = 0;
    void reset(uint32_t packets) {
      words.assign((packets + 63) / 64, 0);
      count = 0;
    }
    bool has(uint32_t i) const { return (words[i / 64] >> (i % 64)) & 1; }
    void add(uint32_t i) {
      words[i / 64] |= uint64_t{1} << (i % 64);
      ++count;
    }
  };
  // A message this end requested, until it completes.
  struct Outgoing {
    WorkRequest request;
    uint32_t packets = 1;
    uint32_t next = 0;  // packet to send
    bool acknowledged = false;
    PacketSet received;  // of a read's response
  };
  // A message that the other end requested, kept until its slot is needed for a later one.
  struct Incoming {
    uint64_t message = kNone;
    bool executed = false;
    bool responding = false;
    uint32_t next = 0;  // packet of a read's response to send
    absl::Status refusal;
    PacketSet received;
  };

  absl::Status acceptable(const WorkRequest& request) const;
  Outgoing& out(uint64_t message) { return outgoing_[message % outgoing_.size()]; }
  Incoming& in(uint64_t message) { return incoming_[message % incoming_.size()]; }
  // The other end's message, if it is still waiting for it.
  Outgoing* request_of_peer(const SimPacket& packet);
  size_t packet_bytes(const Outgoing& message, uint32_t index) const;
  SimPacket packet(SimPacket::Kind kind, uint64_t message, uint32_t index) const;
  void offer(bool responder);
  bool next_request(SimPacket& packet, size_t& bytes);
  bool next_response(SimPacket& packet, size_t& bytes);
  void acknowledge(uint64_t message);
  void refused(uint64_t message);
  bool executed(uint64_t number);
  void fail(uint64_t culprit, const absl::Status& cause, Break how);
  Time timeout() const;
  void arm_timer();
  uint64_t progress() const;
  void reset(uint32_t epoch);

  // Responder's side (responder.cc).
  void execute(const SimPacket& packet, Outgoing& message);
  void execute_write(const SimPacket& packet, const Outgoing& message, Incoming& incoming);
  void execute_add(const SimPacket& packet, const Outgoing& message, Incoming& incoming);
  void take_response(const SimPacket& packet);
  absl::Status check_remote(const WorkRequest& request, size_t begin, size_t end);
  absl::Status copy(const WorkRequest& request, size_t begin, size_t end, RegionTable& remote);

  SimNetwork& network_;
  const size_t node_;
  const size_t peer_node_;
  const size_t rail_;
  SimLinkState& link_;
  SimWire& wire_;
  RegionTable& regions_;
  QueuePairOwner& owner_;
  const uint32_t id_;
  uint32_t peer_ = 0;
  uint32_t epoch_ = 1;
  bool ready_ = true;
  bool dead_ = false;  // never ready again

  std::vector<Outgoing> outgoing_;  // by message number modulo depth
  uint64_t first_ = 0;              // oldest that has not completed
  uint64_t send_ = 0;               // next to send packets of
  uint64_t next_ = 0;               // number of the next request
  std::vector<Incoming> incoming_;
  base::Ring<uint64_t> reads_;        // messages whose responses are being sent
  bool offered_[2] = {false, false};  // requester, responder: waiting for the wire

  bool timer_armed_ = false;
  Time last_activity_{};
  uint32_t retries_ = 0;
  uint64_t progress_at_timeout_ = 0;
  uint64_t packets_taken_ = 0;  // new to this end, in either role
};

}  // namespace baton::sim
