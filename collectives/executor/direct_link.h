// A link between two ranks of one machine that read each other's memory in place.
//
// Sending writes a DirectMessage into our own Outbox for the peer, who polls it: one cache line
// travels for a small message. A large message is a DirectMessage that says where the bytes lie;
// the peer combines straight from there, one pass and no staging, and then raises its `consumed`.
// Bytes that the peer cannot map (the caller's own memory) are first copied into a staging block
// that it can.
//
// A sender whose call ends early raises ControlBlock::ended before its caller may write to the
// source again. The receiver looks at that flag after it has read a message in place, and before it
// believes what it has read.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/executor/control_block.h"
#include "collectives/executor/link.h"
#include "collectives/executor/memory.h"
#include "transport/worker.h"

namespace baton::collectives::executor {

class DirectLink final : public Link {
 public:
  struct Ends {
    Worker& worker;
    Memory& memory;  // ours: staging
    PeerId peer;
    Outbox& out;              // ours, for the peer
    RemoteView peer_regions;  // its RegionTable
    RemoteView peer_control;  // its ControlBlock
    RemoteView peer_out;      // its Outbox for us
    size_t slot_bytes;        // the largest message
  };
  explicit DirectLink(Ends ends);
  ~DirectLink() override;

  uint64_t send(uint32_t lane, const Segments& source, const CallTag& tag) override;
  bool delivered(uint32_t lane, uint64_t number) override;
  bool peek(uint32_t lane, size_t expected, const CallTag& tag, Segments& message,
            absl::Status& error) override;
  bool stray(uint32_t lane, uint64_t sequence) const override;
  bool consume(uint32_t lane) override;
  size_t most_behind() const override { return DirectPacket::kPayload; }
  bool tell(const Packet& packet, absl::Span<const std::byte> behind) override;
  bool hear(Packet& packet, absl::Span<const std::byte>& behind) override;
  void heard() override;
  bool reads() const override { return true; }
  bool show(const std::byte* data, size_t bytes, Place& place) override;
  absl::StatusOr<const std::byte*> look(const Place& place, size_t bytes) override;
  bool looked_well(size_t bytes) override;
  void flush() override;
  bool peer_reads_in_place() const override { return true; }
  std::string route() const override { return "shm, direct"; }

  uint64_t in_place_bytes() const { return in_place_bytes_; }

 private:
  static constexpr uint32_t kMessages = schedules::kMessagesAhead;

  bool room(uint32_t lane);
  void wake();
  std::byte* staging(uint32_t lane, uint64_t number);
  absl::StatusOr<const std::byte*> map(const InPlaceRuns& place, uint64_t length);

  Ends ends_;
  const ControlBlock& theirs_;
  const RegionTable& their_regions_;
  Outbox& out_;
  const Outbox& in_;
  std::array<uint64_t, kLanes> sent_{};
  std::array<uint64_t, kLanes> taken_{};           // consumed by us
  std::array<uint64_t, kLanes> known_consumed_{};  // by the peer, when we last looked
  // Whether the last messages of a lane carried their bytes. Their lines in our outbox say so too,
  // but the peer has those: to look there would cost a message between two cores.
  std::array<std::array<bool, kMessages>, kLanes> inline_{};
  std::array<std::array<Block, kMessages>, kLanes> staging_{};
  uint64_t told_ = 0, heard_ = 0;  // packets
  uint64_t known_heard_ = 0;       // by the peer, when we last looked
  std::vector<RemoteView> views_;  // the peer's regions, by number
  uint64_t in_place_bytes_ = 0;
  // Since the last flush(): something that the peer surely waits for, or may wait for.
  bool dirty_ = false;
  bool consumed_ = false;
};

}  // namespace baton::collectives::executor
