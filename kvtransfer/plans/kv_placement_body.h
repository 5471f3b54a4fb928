// What lies in an encoded KvPlacement between its version and its digest: for the fuzz harness,
// whom the digest would keep from it.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "kvtransfer/agent_kv.h"

namespace baton::kvtransfer {

// DataLoss, or what passes check().
absl::StatusOr<KvPlacement> decode_placement_body(std::string_view body);

}  // namespace baton::kvtransfer
