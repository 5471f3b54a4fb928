// One transfer of an agent under way: its parts are submitted to the worker as it has room for
// them, then its message. Ends cross from the progress thread under a lock of the transfer's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "kvtransfer/agent.h"
#include "kvtransfer/internal/agent_plan.h"

namespace baton::kvtransfer {

// All calls from any thread. Of the worker, only calls that take no lock are made with the lock of
// a transfer held: the worker calls on_end() with its own.
class AgentTransfer : public std::enable_shared_from_this<AgentTransfer> {
 public:
  AgentTransfer(Worker& worker, Op op, AgentPlan plan, std::string agent, uint64_t epoch,
                std::string_view message);

  const std::string& agent() const { return agent_; }
  uint64_t epoch() const { return epoch_; }

  absl::Status post(PeerId peer, const std::string_view* message);
  // Hands the worker parts that it had no room for, if any.
  void feed();
  AgentTransferState state() const;
  absl::Status status() const;
  absl::StatusOr<AgentTelemetry> telemetry() const;
  void abort();
  // No byte of it moves: it was never posted, or has ended.
  bool quiet() const;

 private:
  static void on_end(void* context, TransferId id, const absl::Status& status);
  void submit_parts();  // locked
  absl::Status submit(const TransferRequest& request);
  void end_if_over();  // locked

  // Parts that the worker has at a time: other transfers need its slots too.
  static constexpr size_t kWindow = 256;

  Worker& worker_;
  const Op op_;
  const AgentPlan plan_;
  const std::string agent_;
  const uint64_t epoch_;

  mutable std::mutex mutex_;
  std::vector<std::string> frames_;  // of its message
  PeerId peer_;
  AgentTransferState state_ = AgentTransferState::kIdle;
  absl::Status why_;                   // the first that went wrong
  bool stop_ = false;                  // submit no more
  size_t next_part_ = 0;               // to be submitted
  size_t next_frame_ = 0;              // likewise
  size_t open_ = 0;                    // submitted, not ended
  std::vector<TransferId> submitted_;  // of this post
  Time started_{};
  Time post_duration_{};
  Time ended_{};
  std::shared_ptr<AgentTransfer> self_;  // while something is open
};

}  // namespace baton::kvtransfer
