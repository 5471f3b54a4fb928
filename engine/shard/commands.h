// What rank 0 of a tensor-parallel model tells the others, as bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/shard/kv_calls.h"
#include "engine/shard/tier_calls.h"

namespace baton::engine::shard {

enum class CommandKind : uint8_t {
  kStop = 1,  // there will be no more
  kStep,      // make the calls, compute the chunks and send what they complete
  kSync,      // make the calls, then send a Report (Group::exchange())
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
  std::vector<KvCall> calls;         // kStep, kSync: in this order
  std::vector<TierCall> tier_calls;  // kStep, kSync: in this order, before the step
  std::vector<Chunk> chunks;         // kStep
  std::vector<Send> sends;           // kStep

  void encode(std::string& out) const;  // replaces `out`
  // InvalidArgument: bytes that no rank 0 of this version sends. The model checks what is asked of
  // it by itself.
  static absl::StatusOr<Command> decode(std::string_view bytes);

 private:
  void encode_step(std::string& out) const;
};

// What a rank has to say, in as many bytes at each.
struct Report {
  static constexpr size_t kBytes = KvReport::kBytes + TierReport::kBytes;

  KvReport kv;
  TierReport tiers;
  bool more() const { return kv.more || tiers.more; }

  // Internal: bytes that no rank of this version sends. Zeros are a rank with nothing to say.
  static absl::StatusOr<Report> decode(std::string_view bytes);
};

}  // namespace baton::engine::shard
