// A request inside the engine: its tokens, how many of them are computed, and its blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "engine/serve/cache/block_manager.h"
#include "engine/serve/requests/output_text.h"
#include "engine/serve/requests/request.h"
#include "kvtransfer/kv_connector.h"

namespace baton::engine::serve {

class RemoteLoads;

enum class SequenceState : uint8_t {
  kWaiting,
  kWaitingForRemoteKv,  // a load is open; does not block the queue
  kReady,               // its KV has come; waits for a place in the batch
  kRunning,
  kDone,  // in no list of the scheduler
};

struct Sequence {
  Request request;              // `tokens` has been moved out
  std::vector<int32_t> tokens;  // prompt and output
  size_t prompt_tokens = 0;
  size_t computed = 0;           // tokens, from the start, whose KV is in the blocks
  std::vector<uint32_t> blocks;  // block i holds tokens [16 i, 16 i + 16)
  std::vector<BlockHash> chain;  // of the full blocks of `tokens`, as far as needed yet
  size_t published = 0;          // blocks, from the start, that the prefix cache knows
  SequenceState state = SequenceState::kWaiting;

  kvtransfer::KvRequestId load = 0;  // 0: no load is open
  RemoteLoads* source = nullptr;     // of the load
  size_t load_end = 0;               // it brings the KV of tokens before this one
  uint32_t layers_wanted = 1;        // of the load, before it is worth being computed
  bool local_only = false;           // do not ask a prefill worker or the KV tiers (again)

  uint64_t send = 0;      // of KvRanks: its KV is for another engine; 0: it is not
  bool borrowed = false;  // KV of it is another make's: like ours, and not to the bit

  std::optional<OutputText> text;
  RequestMetrics metrics;
  std::vector<TokenChoice> prompt_choices;  // with sampling.prompt_logprobs, as far as computed

  // Names it in timelines: prefill and decode use one number for a load.
  uint64_t label() const { return request.asked.value_or(load != 0 ? load : request.id); }
  size_t remaining() const { return tokens.size() - computed; }
  // What others computed of the prompt is of no use: its logits are wanted.
  bool wants_prompt() const {
    return request.sampling.prompt_logprobs && prompt_choices.size() < prompt_tokens;
  }
};

}  // namespace baton::engine::serve
