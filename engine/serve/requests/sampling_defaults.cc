// A checkpoint's own defaults, as generation_config.json has them.
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/serve/requests/sampling.h"

namespace baton::engine::serve {

absl::StatusOr<SamplingDefaults> SamplingDefaults::parse(std::string_view generation_config) {
  const auto json = parse_json(generation_config, "generation_config.json");
  if (!json.ok()) return json.status();
  SamplingDefaults defaults;
  absl::Status status;
  const auto number = [&](const char* key, double low, double high, double* out) {
    const absl::StatusOr<double> value = number_field(*json, key, low, high, *out);
    status.Update(value.status());
    if (value.ok()) *out = *value;
  };
  number("temperature", 0, 100, &defaults.temperature);
  number("top_p", 0, 1, &defaults.top_p);
  number("min_p", 0, 1, &defaults.min_p);
  number("repetition_penalty", 0, 100, &defaults.repetition_penalty);
  const absl::StatusOr<int64_t> top_k = int_field(*json, "top_k", -1, INT32_MAX, 0);
  status.Update(top_k.status());
  if (top_k.ok() && *top_k > 0) defaults.top_k = static_cast<int>(*top_k);
  const absl::StatusOr<int64_t> limit = int_field(*json, "max_new_tokens", 1, INT32_MAX, 0);
  status.Update(limit.status());
  if (limit.ok() && *limit > 0) defaults.max_tokens = static_cast<int>(*limit);
  SamplingParams params;
  defaults.apply(&params);
  status.Update(params.validate());
  if (status.ok()) return defaults;
  return absl::InvalidArgumentError(absl::StrCat("generation_config.json: ", status.message()));
}

void SamplingDefaults::apply(SamplingParams* params) const {
  params->temperature = temperature;
  params->top_k = top_k;
  params->top_p = top_p;
  params->min_p = min_p;
  params->repetition_penalty = repetition_penalty;
  if (max_tokens.has_value()) params->max_tokens = *max_tokens;
}

}  // namespace baton::engine::serve
