// The table of models, from their config.json: layers, key-value heads, head size.
#include "bench/kv/kv_models.h"

#include <array>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/base/nearest_name.h"

namespace baton::bench {

absl::Span<const KvModel> kv_models() {
  static constexpr std::array kModels = {
      KvModel{"kjv", 4, 3, 32},
      KvModel{"qwen3-0.6b", 28, 8, 128},
      KvModel{"qwen3-8b", 36, 8, 128},
      KvModel{"qwen3-32b", 64, 8, 128},
      KvModel{"qwen3-235b", 94, 4, 128},
      KvModel{"mistral-7b", 32, 8, 128},
      KvModel{"llama3-8b", 32, 8, 128},
      KvModel{"llama3-70b", 80, 8, 128},
      KvModel{"llama3-405b", 126, 8, 128},
      KvModel{"gpt-oss-20b", 24, 8, 64},
      KvModel{"gpt-oss-120b", 36, 8, 64},
  };
  return kModels;
}

absl::StatusOr<KvModel> find_kv_model(std::string_view name) {
  std::vector<std::string> known;
  for (const KvModel& model : kv_models()) {
    if (name == model.name) return model;
    known.emplace_back(model.name);
  }
  return absl::InvalidArgumentError(absl::StrFormat("there is no model \"%s\"%s (known: %s)", name,
                                                    base::did_you_mean(name, known),
                                                    absl::StrJoin(known, ", ")));
}

}  // namespace baton::bench
