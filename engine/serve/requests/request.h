// What a client asks of the engine, and what it hears back.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/serve/requests/sampling.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"

namespace baton::engine::serve {

enum class FinishReason : uint8_t {
  kStop,    // end-of-text token or a stop string
  kLength,  // max_tokens, or the context is full
  kAbort,
  kError,
};
std::string_view finish_reason_name(FinishReason reason);  // "stop", "length", "abort", "error"

// Points on the engine's clock, and counts. Definitions as in `vllm bench serve`:
// TTFT = first_token - arrival, TPOT = (finish - first_token) / (output_tokens - 1), ITL = every
// gap between tokens.
struct RequestMetrics {
  Time arrival{};
  Time admitted{};     // when it left the queue for the first time; 0: not yet
  Time loading{};      // when the load that runs was begun; 0: none does
  Time kv_wait{};      // how long it waited for KV from elsewhere, in all
  Time first_token{};  // 0 if there was none
  Time last_token{};
  Time finish{};
  std::vector<Time> gaps;  // inter-token latencies
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 0;  // made here; resumed ones are not counted
  uint32_t cached_tokens = 0;  // of the prompt, found in the prefix cache
  uint32_t loaded_tokens = 0;  // of the prompt, whose KV came from a prefill worker
  uint32_t tier_tokens = 0;    // of the prompt, whose KV came from the KV tiers
  uint32_t preemptions = 0;
  absl::Status load_error;  // why the KV had to be computed here after all

  Time queued() const { return admitted == Time{} ? Time{} : admitted - arrival; }
  Time ttft() const { return first_token == Time{} ? Time{} : first_token - arrival; }
  Time tpot() const {
    return output_tokens < 2 ? Time{} : (last_token - first_token) / (output_tokens - 1);
  }
};

// One token, the end, or both at once.
struct OutputEvent {
  uint64_t id = 0;
  bool has_token = false;
  TokenChoice choice;
  std::string text;  // whole characters that this event lets out; may be empty
  bool finished = false;
  FinishReason reason = FinishReason::kStop;
  absl::Status status;                      // not OK with kError and kAbort
  const RequestMetrics* metrics = nullptr;  // with `finished`; valid during the call
  // With the first event, where sampling.prompt_logprobs asked for it: the prompt's tokens. The
  // first one has no log probability. Valid during the call.
  const std::vector<TokenChoice>* prompt = nullptr;
  // With `finished`, of a request whose KV is held for another engine: what that is to be told.
  std::optional<kvtransfer::KvTransfer> handed_over;
};

struct Request {
  uint64_t id = 0;              // unique among the engine's live requests
  std::vector<int32_t> tokens;  // the prompt; at least one
  // Output that the client has already, from a stream that broke off: generation goes on behind it
  // and nothing of it is reported again. Counts towards max_tokens.
  std::vector<int32_t> resume_tokens;
  SamplingParams sampling;
  // A server that can be asked for the prompt's KV (engine/shard/kv_address.h); "": computed here.
  std::string prefill_address;
  // ... or an engine that hands it over by the name of a transfer (engine/handoff/hand_off.h).
  std::optional<kvtransfer::KvTransfer> remote_prefill;
  // The KV of the prompt is for another engine, by this name. Not with one of the two above.
  std::optional<std::string> hand_over;
  // Another engine has asked for that, and calls the request by this number: nothing else of it is
  // wanted, and the engine makes the request itself.
  std::optional<uint64_t> asked;
  // Called on the engine's thread; must not call the engine. The last event has `finished` set.
  std::function<void(const OutputEvent&)> on_event;
};

}  // namespace baton::engine::serve
