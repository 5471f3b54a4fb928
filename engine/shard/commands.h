// What rank 0 of a tensor-parallel model tells the others, as bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/shard/kv_calls.h"

namespace baton::engine::shard {

enum class CommandKind : uint8_t {
  kStop = 1,  // there will be no more
  kStep,      // make the calls, compute the chunks and send what they complete
  kSync,      // make the calls, then report (Group::exchange())
};

struct Command {
  // As SequenceChunk in engine/model/model.h.
  struct Chunk {
    std::vector<int32_t> tokens;
    int32_t position = 0;
    std::vector<uint32_t> blocks;
    bool wants_logits = false;
    bool wants_all_logits = false;
    bool operator==(const Chunk&) const = default;
  };
  // Blocks of a job that the step completes, in every layer.
  struct Send {
    uint64_t job = 0;
    uint32_t first_block = 0;
    std::vector<uint32_t> blocks;
    bool operator==(const Send&) const = default;
  };

  CommandKind kind = CommandKind::kStop;
  std::vector<KvCall> calls;  // kStep, kSync: in this order
  std::vector<Chunk> chunks;  // kStep
  std::vector<Send> sends;    // kStep

  void encode(std::string& out) const;  // replaces `out`
  // InvalidArgument: bytes that no rank 0 of this version sends. The model checks what is asked of
  // it by itself.
  static absl::StatusOr<Command> decode(std::string_view bytes);
};

}  // namespace baton::engine::shard
