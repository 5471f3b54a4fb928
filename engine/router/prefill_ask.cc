// Posts the question, and looks for kv_transfer_params in the answer.
#include "engine/router/prefill_ask.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine::router {
namespace {

using nlohmann::json;

// An answer of NixlConnector lists all block numbers, so it may be long.
constexpr size_t kLongest = size_t{16} << 20;
constexpr size_t kLongestName = 256;
constexpr int64_t kMostRanks = 1024;

}  // namespace

std::string params_at_prefill(std::string_view transfer) {
  // The parameters that NixlConnector's proxies send.
  json params = {{"do_remote_decode", true},    {"do_remote_prefill", false},
                 {"remote_engine_id", nullptr}, {"remote_block_ids", nullptr},
                 {"remote_host", nullptr},      {"remote_port", nullptr}};
  if (!transfer.empty()) params["transfer_id"] = transfer;
  return params.dump();
}

std::string params_behind(const KvAgent& prefill, std::string_view transfer) {
  return json{{"do_remote_prefill", true},         {"do_remote_decode", false},
              {"transfer_id", transfer},           {"remote_agent", prefill.name},
              {"remote_address", prefill.address}, {"tp_size", prefill.ranks}}
      .dump();
}

std::unique_ptr<PrefillAsk> PrefillAsk::start(Workers& workers, size_t worker, std::string path,
                                              std::vector<http::SharedBytes> body,
                                              http::HttpHeaders headers, Done done) {
  std::unique_ptr<PrefillAsk> ask(new PrefillAsk(workers, worker, std::move(done)));
  http::HttpFetchRequest post;
  post.url = workers.prefill[worker].url;
  post.method = "POST";
  post.path = std::move(path);
  post.body = std::move(body);
  post.headers = std::move(headers);
  post.trust = workers.trust;
  PrefillAsk* const self = ask.get();
  ask->fetch_ = http::HttpFetch::start(
      workers.loop, std::move(post),
      {.on_head = [self](int status, std::string_view) { self->status_ = status; },
       .on_body =
           [self](std::string_view bytes) {
             self->too_long_ |= self->answer_.size() + bytes.size() > kLongest;
             if (!self->too_long_) self->answer_ += bytes;
           },
       .on_end = [self](const absl::Status& status) { self->ended(status); }});
  return ask;
}

void PrefillAsk::ended(const absl::Status& connection) {
  if (connection.ok()) {
    const Done done = done_;  // which may drop this
    return done(params());
  }
  workers_.set_down(workers_.prefill, worker_, "it closed the connection early");
  const Done done = done_;
  done(absl::UnavailableError(connection.message()));
}

absl::StatusOr<std::string> PrefillAsk::params() const {
  if (status_ != 200) {
    return absl::FailedPreconditionError(absl::StrCat("HTTP status ", status_));
  }
  const absl::StatusOr<json> answer = parse_json(answer_, "a prefill worker's answer");
  if (too_long_ || !answer.ok()) {
    return absl::FailedPreconditionError("its answer is not JSON, or too long");
  }
  const json& params = member(*answer, "kv_transfer_params");
  if (!params.is_object()) {
    return absl::FailedPreconditionError("its answer has no kv_transfer_params");
  }
  learn_agent(params);
  return params.dump(-1, ' ', false, json::error_handler_t::replace);
}

// Baton's connectors name their agent: the next prompt need not wait for the answer.
void PrefillAsk::learn_agent(const json& params) const {
  const auto name = string_field(params, "remote_agent", "");
  const auto address = string_field(params, "remote_address", "");
  const auto ranks = int_field(params, "tp_size", 1, kMostRanks, 1);
  if (!name.ok() || !address.ok() || !ranks.ok() || name->size() > kLongestName ||
      address->size() > kLongestName) {
    return;
  }
  workers_.prefill[worker_].agent = {*name, *address, *ranks};
}

}  // namespace baton::engine::router
