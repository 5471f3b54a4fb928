// What an agent says to others, on its way; and messages of the application's that were lost.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "kvtransfer/agent.h"
#include "kvtransfer/internal/agent_messages.h"

namespace baton::kvtransfer {

// All calls from any thread. Must outlive the worker: that ends what is on its way.
class AgentOutbox {
 public:
  explicit AgentOutbox(Worker& worker) : worker_(worker) {}
  AgentOutbox(const AgentOutbox&) = delete;
  AgentOutbox& operator=(const AgentOutbox&) = delete;

  // Agent::notify(). What fails here is not counted as lost.
  absl::Status send_message(std::string_view agent, PeerId peer, std::string_view message);
  // Agents among themselves: who asked asks again.
  absl::Status send(PeerId peer, AgentFrameKind kind, std::string_view payload);

  std::vector<AgentLostMessage> take_lost();
  uint64_t lost() const;  // ever

 private:
  // One message. Freed by the end of its last frame.
  struct Sent {
    AgentOutbox& outbox;
    std::string agent;
    uint64_t number = 0;  // of messages
    std::string bytes;    // the message, behind `skip` others
    size_t skip = 0;
    size_t open = 0;  // frames that have not ended; the rest is guarded by the outbox
    absl::Status why;
    bool refused = false;  // the caller knows
  };
  static void on_end(void* context, TransferId id, const absl::Status& status);
  absl::Status submit(PeerId peer, std::string_view frame, Sent* sent);
  absl::Status submit_all(PeerId peer, absl::Span<const std::string> frames, Sent* sent);
  void ended(Sent& sent, size_t frames, const absl::Status& status, bool refused);

  // Somebody who never asks must not fill the memory: the oldest go.
  static constexpr size_t kMostLost = 1024;

  Worker& worker_;
  std::atomic<uint64_t> messages_{0};
  mutable std::mutex mutex_;
  std::map<uint64_t, AgentLostMessage> lost_;  // by number
  size_t lost_bytes_ = 0;
  uint64_t lost_ever_ = 0;
};

}  // namespace baton::kvtransfer
