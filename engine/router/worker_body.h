// The bodies that the router posts to workers for a client's request. The part that all choices
// share is written once, however many choices and retries there are. Internal to engine/router.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/http/http_fetch.h"
#include "engine/http/openai/openai_request.h"

namespace baton::engine::router {

// Immutable.
class WorkerBody {
 public:
  // `body` is the client's request, `request` the same parsed. Takes as long as the body is: not
  // for the loop's thread.
  WorkerBody(nlohmann::json body, const http::ApiRequest& request);

  // For a worker that goes on with a choice behind `resume`; `prefill` may be empty. The parts are
  // shared, but for the last, which is as long as `resume` is.
  std::vector<http::SharedBytes> of_choice(size_t choice, std::string_view prefill,
                                           const std::vector<int32_t>& resume) const;
  // For a worker that fetches the prompt's KV from another engine, as `transfer`,
  // kv_transfer_params in JSON, tells it; before its first token.
  std::vector<http::SharedBytes> behind_prefill(size_t choice, std::string_view transfer) const;
  // For a worker that computes the prompt for another engine and hands its KV over: one token, no
  // stream. `transfer` as above.
  std::vector<http::SharedBytes> at_prefill(size_t choice, std::string_view transfer) const;
  // Approximate bytes of a choice before its first token.
  size_t size(size_t choice) const;

 private:
  const http::SharedBytes& prompt(size_t choice) const { return prompts_[choice / choices_]; }
  std::vector<http::SharedBytes> with_transfer(size_t choice, std::string_view transfer) const;

  const size_t choices_;                // of each prompt
  const std::optional<uint64_t> seed_;  // a greedy request needs none
  http::SharedBytes common_;
  http::SharedBytes at_prefill_;            // instead of it
  std::vector<http::SharedBytes> prompts_;  // or a chat's messages
};

}  // namespace baton::engine::router
