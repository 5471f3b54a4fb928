// A question to a prefill worker in vLLM's words: compute this prompt and hand its KV over. The
// router passes the answer to decode unchanged: only the two workers need to understand it.
// Internal to engine/router; everything runs on the loop's thread.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/http/http_fetch.h"
#include "engine/router/workers.h"

namespace baton::engine::router {

// kv_transfer_params for prefill; `transfer`: the name of what is handed over, "" to leave it to
// prefill, as NixlConnector wants it.
std::string params_at_prefill(std::string_view transfer);
// ... and for a decode worker that is asked at the same time: where it will be had.
std::string params_behind(const KvAgent& prefill, std::string_view transfer);

class PrefillAsk {
 public:
  // kv_transfer_params for decode, as JSON. Otherwise nothing is handed over: Unavailable if the
  // worker broke off, FailedPrecondition if it said no, or what decode cannot use.
  using Done = std::function<void(const absl::StatusOr<std::string>& params)>;

  // Asks `worker` of the prefill workers, and takes from its answer what it says of its agent.
  static std::unique_ptr<PrefillAsk> start(Workers& workers, size_t worker, std::string path,
                                           std::vector<http::SharedBytes> body,
                                           http::HttpHeaders headers, Done done);
  // Dropping it ends the question; `done` is not called then.

 private:
  PrefillAsk(Workers& workers, size_t worker, Done done)
      : workers_(workers), worker_(worker), done_(std::move(done)) {}
  void ended(const absl::Status& connection);
  absl::StatusOr<std::string> params() const;
  void learn_agent(const nlohmann::json& params) const;

  Workers& workers_;
  const size_t worker_;
  const Done done_;
  int status_ = 0;
  std::string answer_;
  bool too_long_ = false;
  std::unique_ptr<http::HttpFetch> fetch_;
};

}  // namespace baton::engine::router
