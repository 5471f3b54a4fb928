// A transfer between an agent's cache and another agent's, requantised on its way. Its chunks are
// converted by the agent's converter, and each travels as a transfer between two agents does:
//
//   Op::kWrite  a slot, converted into, sent, free again
//   Op::kRead   a slot, read into, converted from, free again
//
// The processor converts while the converter's thread waits for it; a kernel of a device does while
// that goes on to others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "kvtransfer/internal/agent_kv/agent_converter.h"
#include "kvtransfer/internal/agent_kv/requantise_route.h"
#include "kvtransfer/internal/agent_transfer.h"
#include "kvtransfer/plans/kv_sides.h"

namespace baton::kvtransfer {

// What a transfer moves, and where the two caches lie.
struct RequantiseJob {
  RequantiseJob() = default;
  RequantiseJob(RequantiseJob&&) = default;  // the lists stay where they are
  RequantiseJob& operator=(RequantiseJob&&) = default;
  RequantiseJob(const RequantiseJob&) = delete;
  RequantiseJob& operator=(const RequantiseJob&) = delete;

  std::shared_ptr<const RequantiseRoute> route;
  std::vector<KvLocalBuffer> local;
  std::vector<KvRemoteBuffer> remote;
  std::vector<std::vector<uint32_t>> pages;  // that the two below are of
  std::vector<KvPages> local_pages;          // for each part of the route
  std::vector<KvPages> remote_pages;
  std::vector<RequantiseChunk> chunks;
};

// All states are under the lock of the agent's converter.
class AgentRequantiseTransfer final : public AgentTransfer,
                                      public std::enable_shared_from_this<AgentRequantiseTransfer> {
 public:
  AgentRequantiseTransfer(AgentConverter& converter, AgentConverter::Room& room, RequantiseJob job,
                          std::string agent, uint64_t epoch, std::string_view message);

  bool needs_peer() const override { return true; }
  absl::Status post(PeerId peer, const std::string_view* message) override;
  void feed() override;
  AgentTransferState state() const override;
  AgentOutcome outcome() const override;
  absl::StatusOr<AgentTelemetry> telemetry() const override;
  void abort() override;
  void close() override;
  bool local_free() const override;
  bool quiet() const override;
  PeerId moves_at() const override;

 private:
  friend class AgentConverter;
  using Moving = std::shared_ptr<AgentWorkerTransfer>;
  // A chunk in a slot. Of a write: converted if it moves; of a read: the other way round.
  struct Piece {
    RequantiseChunk chunk;
    uint32_t slot = 0;
    Moving moving;           // null: it waits to be converted,
    bool at_kernel = false;  // or is
    bool waits() const { return moving == nullptr && !at_kernel; }
  };

  // Locked, all of these.
  //
  // Goes one step on; false where nothing can be done before something has ended. Converts with the
  // lock released.
  bool step(std::unique_lock<std::mutex>& lock);
  bool look_at_moves();
  bool look_at_kernel();
  bool convert_one(std::unique_lock<std::mutex>& lock);
  absl::Status begin_kernel(const Piece& piece);  // without the lock
  void converted(std::vector<Piece>::iterator at);
  void give_back(const Piece& piece) { room_.users[piece.slot] = {}; }
  bool begin_piece();
  bool say_message();
  Moving move(AgentPlan plan, std::string_view message);
  void move(Piece& piece);
  // Whether it ended; how goes into why_.
  bool has_ended(const Moving& moving);
  void stop(absl::Status why);
  void end_if_over();
  bool uses(const MemoryRegion& memory) const;
  // Whether there is nothing else to do for it.
  bool waits_for_slot() const {
    return pieces_.empty() && !stop_ && next_chunk_ < job_.chunks.size() &&
           room_.slot_for(agent()) == AgentConverter::kSlots;
  }
  // Its end is a matter of milliseconds; a kernel's is not: other work of the device may be first.
  bool at_processor() const { return converting_ != 0 && room_.kernel == nullptr; }

  AgentConverter& converter_;
  AgentConverter::Room& room_;  // the converter's
  const RequantiseJob job_;
  std::vector<std::byte*> bases_;  // of this agent's buffers
  std::string message_;
  uint64_t bytes_ = 0;

  AgentTransferState state_ = AgentTransferState::kIdle;
  absl::Status why_;
  bool stop_ = false;      // begin nothing more
  bool closed_ = false;    // nor post it again
  size_t converting_ = 0;  // pieces that a thread converts at the moment
  bool said_ = false;      // the message, if there is one
  bool looked_ = false;    // whether the device's memory is still there, since it was posted
  PeerId peer_;
  PeerId moves_at_;
  size_t next_chunk_ = 0;
  std::vector<Piece> pieces_;
  Moving saying_;
  uint64_t descriptors_ = 0;
  Time started_{};
  Time post_duration_{};
  Time ended_{};
};

}  // namespace baton::kvtransfer
