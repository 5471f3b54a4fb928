// What agents tell each other in notifications: the application's messages, whole or in parts, and
// metadata. A frame is a kind and what belongs to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "transport/transfer.h"

namespace baton::kvtransfer {

enum class AgentFrameKind : uint8_t {
  kMessage = 0,     // the application's
  kMetadata = 1,    // of the sender, to be loaded
  kFetch = 2,       // the sender wants the metadata of the agent named here
  kInvalidate = 3,  // the sender takes its metadata back
  kAbandon = 4,     // of the message named here no more parts come
};

// A peer in tables.
inline uint64_t key_of(PeerId peer) { return (uint64_t{peer.generation} << 32) | peer.index; }
inline PeerId peer_of_key(uint64_t key) {
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

// The frames of a message: one where it fits into a notification.
std::vector<std::string> agent_frames(AgentFrameKind kind, std::string_view payload);
// The only one of a message up to kMaxWholeAgentMessage, the usual case.
inline constexpr size_t kMaxWholeAgentMessage = 60'000;
std::string agent_frame(AgentFrameKind kind, std::string_view payload);
// Makes them the frames of another message: what is sent again is not taken for the first one's.
// One that is whole has no number.
void number_anew(std::vector<std::string>& frames);
// What the receiver of the first `parts` parts of a message is told when the others will not come;
// `part`: one of them. 0: what has come is all that comes, whichever parts that are.
std::string abandon_frame(std::string_view part, size_t parts);

struct AgentFrame {
  AgentFrameKind kind = AgentFrameKind::kMessage;
  std::string payload;
};

// Puts messages together again. One for each peer.
class AgentAssembler {
 public:
  // The message that this frame completes, if it does. Fails for a frame that no agent sends, or
  // when more than kMaxHeld bytes of open messages would have to be kept: no agent sends so many.
  static constexpr size_t kMaxHeld = 64 << 20;
  absl::StatusOr<bool> add(std::string_view frame, AgentFrame& out);

 private:
  struct Open {
    AgentFrameKind kind = AgentFrameKind::kMessage;
    std::string payload;
    std::vector<bool> seen;  // by part
    size_t missing = 0;
    bool abandoned = false;  // what is missing is thrown away when it comes
  };
  static constexpr size_t kMaxAbandoned = 4096;  // of which parts are on their way
  absl::StatusOr<bool> abandon(std::string_view what);
  void drop_part(uint64_t number, Open& open);
  absl::flat_hash_map<uint64_t, Open> open_;
  size_t held_ = 0;
  size_t abandoned_ = 0;
};

}  // namespace baton::kvtransfer
