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

}  // namespace

WorkerBody::WorkerBody(json body, const http::ApiRequest& request)
    : choices_(static_cast<size_t>(request.best_of)),
      seed_(request.has_seed || request.sampling.temperature > 0
                ? std::optional(request.sampling.seed)
                : std::nullopt) {
  body["stream"] = true;
  body["stream_options"]["include_usage"] = true;
  body["return_token_ids"] = true;
  if (request.best_of > request.n && !request.logprobs) body["logprobs"] = 0;
  for (const char* of_one : {"n", "best_of", "seed", "kv_transfer_params"}) body.erase(of_one);
  if (request.chat) {
    prompts_.assign(1, shared(""));
  } else {
    body.erase("prompt");
    for (const http::ApiPrompt& prompt : request.prompts)
      prompts_.push_back(written_prompt(prompt));
  }
  std::string common = written(body);
  common.pop_back();  // the brace, for more follows
  common_ = shared(std::move(common));
}

std::vector<http::SharedBytes> WorkerBody::of_choice(size_t choice, std::string_view prefill,
                                                     const std::vector<int32_t>& resume) const {
  const json transfer = {{"prefill", prefill}, {"resume_token_ids", resume}};
  std::string own = absl::StrCat(",\"kv_transfer_params\":", written(transfer));
  // Whoever goes on with the stream has to draw the same numbers.
  if (seed_.has_value()) {
    const int of_prompt = static_cast<int>(choice % choices_);
    absl::StrAppend(&own,
                    ",\"seed\":", static_cast<int64_t>(http::seed_of_choice(*seed_, of_prompt)));
  }
  return {common_, prompt(choice), shared(own + "}")};
}

size_t WorkerBody::size(size_t choice) const { return common_->size() + prompt(choice)->size(); }

}  // namespace baton::engine::router
