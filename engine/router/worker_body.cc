// A JSON object written in parts.
#include "engine/router/worker_body.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace baton::engine::router {
namespace {

using nlohmann::json;

http::SharedBytes shared(std::string text) {
  return std::make_shared<const std::string>(std::move(text));
}

std::string written(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

http::SharedBytes written_prompt(const http::ApiPrompt& prompt) {
  return shared(absl::StrCat(",\"prompt\":",
                             prompt.tokens.empty()
                                 ? written(json(prompt.text))
                                 : absl::StrCat("[", absl::StrJoin(prompt.tokens, ","), "]")));
}

// An object without its closing brace, for more follows.
http::SharedBytes written_open(const json& object) {
  std::string text = written(object);
  text.pop_back();
  return shared(std::move(text));
}

// What is of the answer alone, or would be refused with one token: prefill's is thrown away.
json of_prefill(json body) {
  for (const char* of_answer :
       {"stream", "stream_options", "max_completion_tokens", "min_tokens", "logprobs",
        "top_logprobs", "prompt_logprobs", "echo", "return_token_ids"}) {
    body.erase(of_answer);
  }
  body["max_tokens"] = 1;
  return body;
}

}  // namespace

WorkerBody::WorkerBody(json body, const http::ApiRequest& request)
    : choices_(static_cast<size_t>(request.n)),
      seed_(request.has_seed || request.sampling.temperature > 0
                ? std::optional(request.sampling.seed)
                : std::nullopt) {
  if (request.chat) {
    prompts_.push_back(shared(absl::StrCat(",\"messages\":", written(body["messages"]))));
    body.erase("messages");
  } else {
    body.erase("prompt");
    for (const http::ApiPrompt& prompt : request.prompts)
      prompts_.push_back(written_prompt(prompt));
  }
  for (const char* of_one : {"n", "best_of", "seed", "kv_transfer_params"}) body.erase(of_one);
  at_prefill_ = written_open(of_prefill(body));
  body["stream"] = true;
  body["stream_options"]["include_usage"] = true;
  body["return_token_ids"] = true;
  common_ = written_open(body);
}

std::vector<http::SharedBytes> WorkerBody::of_choice(size_t choice, std::string_view prefill,
                                                     const std::vector<int32_t>& resume) const {
  return with_transfer(choice, written({{"prefill", prefill}, {"resume_token_ids", resume}}));
}

std::vector<http::SharedBytes> WorkerBody::behind_prefill(size_t choice,
                                                          std::string_view transfer) const {
  return with_transfer(choice, transfer);
}

std::vector<http::SharedBytes> WorkerBody::at_prefill(size_t choice,
                                                      std::string_view transfer) const {
  return {at_prefill_, prompt(choice),
          shared(absl::StrCat(",\"kv_transfer_params\":", std::string(transfer), "}"))};
}

std::vector<http::SharedBytes> WorkerBody::with_transfer(size_t choice,
                                                         std::string_view transfer) const {
  std::string own = absl::StrCat(",\"kv_transfer_params\":", std::string(transfer));
  // The worker that continues the stream must draw the same random numbers.
  if (seed_.has_value()) {
    const int of_prompt = static_cast<int>(choice % choices_);
    absl::StrAppend(&own,
                    ",\"seed\":", static_cast<int64_t>(http::seed_of_choice(*seed_, of_prompt)));
  }
  return {common_, prompt(choice), shared(own + "}")};
}

size_t WorkerBody::size(size_t choice) const { return common_->size() + prompt(choice)->size(); }

}  // namespace baton::engine::router
