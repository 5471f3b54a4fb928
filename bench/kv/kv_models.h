// How large the KV cache of a well-known model is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace baton::bench {

struct KvModel {
  const char* name = "";
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;

  // Bytes of K and V of one head of one token, bf16.
  uint32_t head_token_bytes() const { return 2 * head_dim * 2; }
  size_t token_bytes() const { return size_t{layers} * kv_heads * head_token_bytes(); }
};

absl::Span<const KvModel> kv_models();

// InvalidArgument lists the names that are known.
absl::StatusOr<KvModel> find_kv_model(std::string_view name);

}  // namespace baton::bench
