// What an agent says to others, on its way; and messages of the application's that were lost.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/internal/agent_messages.h"
#include "kvtransfer/internal/agent_transfer.h"

namespace baton::kvtransfer {

// All calls from any thread. Must outlive the worker: that ends what is on its way.
class AgentOutbox {
 public:
  explicit AgentOutbox(Worker& worker) : worker_(worker) {}
  AgentOutbox(const AgentOutbox&) = delete;
  AgentOutbox& operator=(const AgentOutbox&) = delete;

  // Agent::notify(). What fails here is not counted as lost. A message in parts waits, for 10 s at
  // most, until those before it leave room for it at the other agent, which keeps parts of so many
  // bytes and no more; then, and when a part finds no room here, it is ResourceExhausted.
  absl::Status send_message(std::string_view agent, PeerId peer, std::string_view message);
  // Agents among themselves: who asked asks again, so that no caller waits. ResourceExhausted where
  // there is no room.
  absl::Status send(PeerId peer, AgentFrameKind kind, std::string_view payload);
  // Whether metadata, or a question for it, is on its way to this peer.
  bool is_sending(PeerId peer, AgentFrameKind kind) const;

  // A transfer's message in parts. Called with its lock held, but for room_came().
  //
  // Takes room for it at the other agent, until give_back() or abandon(). False: there is none, or
  // others wait for it. They get it in the order in which they asked: `who` is fed when there is.
  bool reserve(PeerId peer, size_t bytes, const std::shared_ptr<AgentTransfer>& who);
  void leave_line(PeerId peer, const AgentTransfer& who);
  void give_back(PeerId peer, size_t bytes);
  // The other agent may have some of its parts, `part` is one of them, and no more come. The room
  // is given back when it knows.
  void abandon(PeerId peer, std::string_view part, size_t bytes);
  // After these, when the lock is free: waiters are told.
  void room_came(PeerId peer);
  // Sends the control messages that found no transfer slot before, if any.
  void flush_control_messages();

  std::vector<AgentLostMessage> take_lost();
  uint64_t lost() const;  // ever

 private:
  // One message. Freed by the end of its last frame.
  struct Sent {
    AgentOutbox& outbox;
    PeerId peer;
    std::string agent;
    uint64_t number = 0;  // of messages; 0: not the application's, no caller is told of its loss
    std::string bytes;    // the message, behind `skip` others
    size_t skip = 0;
    size_t parts_bytes = 0;  // that the other agent may have to keep until all of them are there
    size_t open = 0;         // frames that have not ended; the rest is guarded by the outbox
    absl::Status why;
    bool refused = false;  // the caller knows
    AgentFrameKind kind = AgentFrameKind::kMessage;
  };
  // What another agent may have to keep of messages that come in parts.
  struct Parts {
    size_t bytes = 0;
    // Words that no more parts of a message come, which found no room here yet.
    std::vector<std::unique_ptr<Sent>> unsaid;
    // Transfers whose messages wait for room: in turn, or a large one would wait behind small ones
    // for ever.
    struct Waits {
      const AgentTransfer* who;
      std::weak_ptr<AgentTransfer> transfer;
    };
    std::deque<Waits> line;
    bool feeding = false;    // a thread does it, for all that find room
    bool room_came = false;  // since it looked last
  };
  static void on_end(void* context, TransferId id, const absl::Status& status);
  absl::Status submit(PeerId peer, std::string_view frame, Sent* sent);
  absl::Status submit_part(std::string_view frame, Sent& sent, Time patience);
  absl::Status send_parts(AgentFrameKind kind, std::string_view payload, std::unique_ptr<Sent> sent,
                          Time patience);
  bool reserve(PeerId peer, size_t bytes);
  bool take_room(Parts& parts, size_t bytes);  // locked
  absl::Status wait_for_room(PeerId peer, size_t bytes, Time patience);
  void give_back_locked(PeerId peer, size_t bytes);
  void forget_if_unused(PeerId peer);  // locked
  void feed_line(PeerId peer);
  void abandon(Sent& sent, std::string_view part, size_t parts);
  void send_later(std::unique_ptr<Sent> word);  // locked
  void ended(Sent& sent, size_t frames, const absl::Status& status, bool refused);
  void note_end(Sent& sent);  // locked

  // A caller that never asks must not fill the memory: the oldest go.
  static constexpr size_t kMostLost = 1024;

  Worker& worker_;
  std::atomic<uint64_t> messages_{0};
  std::atomic<size_t> unsaid_{0};  // words, of all peers
  mutable std::mutex mutex_;
  absl::flat_hash_map<uint64_t, Parts> parts_;  // by peer
  // Metadata and questions for it that have not ended, by peer.
  absl::flat_hash_map<std::pair<uint64_t, AgentFrameKind>, size_t> sending_;
  std::map<uint64_t, AgentLostMessage> lost_;  // by number
  size_t lost_bytes_ = 0;
  uint64_t lost_ever_ = 0;
};

}  // namespace baton::kvtransfer
