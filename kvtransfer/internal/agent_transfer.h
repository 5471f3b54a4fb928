// A transfer of an agent: made, posted, ended, posted again. Its state is the same whatever it
// moves. Here that between two agents: its parts are submitted to the worker as it has room for
// them, then its message; ends cross from the progress thread under a lock of the transfer's own.
// That between memory and files: agent_file_transfer.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvtransfer/agent.h"
#include "kvtransfer/internal/agent_plan.h"

namespace baton::kvtransfer {

class AgentOutbox;

// All calls from any thread.
class AgentTransfer {
 public:
  virtual ~AgentTransfer() = default;
  AgentTransfer(const AgentTransfer&) = delete;
  AgentTransfer& operator=(const AgentTransfer&) = delete;

  const std::string& agent() const { return agent_; }  // with which
  uint64_t epoch() const { return epoch_; }

  // `peer`: the agent's, unless it needs none. post() is called with the agent's lock held.
  virtual bool needs_peer() const = 0;
  virtual absl::Status post(PeerId peer, const std::string_view* message) = 0;
  // Hands the worker parts that it had no room for, if any.
  virtual void feed() = 0;
  AgentTransferState state() const;
  // State and status of one moment: another thread may post it again behind each of two looks.
  AgentOutcome outcome() const;
  absl::StatusOr<AgentTelemetry> telemetry() const;
  virtual void abort() = 0;
  // From now on post() refuses, so that what is quiet stays so.
  void close();
  // Whether it runs and has yet to hand over parts that are of this memory: the worker does not
  // know of those.
  virtual bool awaits(const MemoryRegion& /*region*/) const { return false; }
  // No byte of its local memory is read or written for it any more.
  virtual bool local_free() const { return state() != AgentTransferState::kRunning; }
  // No byte of it moves here, and none there unless moves_at() says so: it was never posted, or has
  // ended.
  virtual bool quiet() const = 0;
  // The peer at which bytes of it may still land if that was lost without a word; generation 0:
  // none. For a write that has ended with its peer.
  virtual PeerId moves_at() const { return {}; }

 protected:
  // `mutex`: of the state, below; `size`: its bytes and descriptors. Neither the mutex nor the
  // clock is used before a call.
  AgentTransfer(std::string agent, uint64_t epoch, std::mutex& mutex, const Clock& clock,
                AgentTelemetry size)
      : telemetry_(size),
        agent_(std::move(agent)),
        epoch_(epoch),
        state_mutex_(mutex),
        clock_(clock) {}

  // Under the mutex, as all that follows.
  absl::Status may_post() const;
  void begin(Time now);
  void end();  // as why_ says

  AgentTransferState state_ = AgentTransferState::kIdle;
  absl::Status why_;          // the first that went wrong
  AgentTelemetry telemetry_;  // of the last post

 private:
  const std::string agent_;
  const uint64_t epoch_;
  std::mutex& state_mutex_;
  const Clock& clock_;
  bool closed_ = false;  // not to be posted again
};

// While holding a transfer's lock, only call functions of the worker that take no lock: the worker
// calls on_end() with its own lock held. Call the outbox's room_came() without the lock.
class AgentWorkerTransfer final : public AgentTransfer,
                                  public std::enable_shared_from_this<AgentWorkerTransfer> {
 public:
  AgentWorkerTransfer(Worker& worker, AgentOutbox& outbox, Op op, AgentPlan plan, std::string agent,
                      uint64_t epoch, std::string_view message);

  bool needs_peer() const override { return true; }
  absl::Status post(PeerId peer, const std::string_view* message) override;
  void feed() override;
  void abort() override;
  bool awaits(const MemoryRegion& region) const override;
  bool local_free() const override;
  bool quiet() const override;
  PeerId moves_at() const override;

 private:
  // What is done when the lock is free.
  struct After {
    ~After();
    std::shared_ptr<AgentWorkerTransfer> freed;
    AgentOutbox& outbox;
    PeerId room;  // where room came for messages of others; generation 0: nowhere
  };
  enum class Room : uint8_t { kNone, kAwaited, kTaken };

  static void on_end(void* context, TransferId id, const absl::Status& status);
  void set_message(std::string_view message);  // locked
  void submit_parts();                         // locked
  bool has_room();                             // locked
  void leave_room();                           // locked
  absl::Status submit(const TransferRequest& request);
  void end_if_over();         // locked
  void settle(After& after);  // locked

  // Parts that the worker has at a time: other transfers need its slots too.
  static constexpr size_t kWindow = 256;

  Worker& worker_;
  AgentOutbox& outbox_;
  const Op op_;
  const AgentPlan plan_;

  mutable std::mutex mutex_;
  std::vector<std::string> frames_;  // of its message
  size_t parts_bytes_ = 0;           // of a message in several
  Room room_ = Room::kNone;          // for these at the other agent
  bool room_came_ = false;           // for others: they are told when the lock is free
  PeerId peer_;
  bool stop_ = false;                          // submit no more
  bool unanswered_ = false;                    // parts ended because the peer was given up
  size_t next_part_ = 0;                       // to be submitted
  size_t next_frame_ = 0;                      // likewise
  size_t open_ = 0;                            // submitted, not ended
  std::vector<TransferId> submitted_;          // of this post
  std::shared_ptr<AgentWorkerTransfer> self_;  // while something is open
};

}  // namespace baton::kvtransfer
