// The boxes of a plan: the intersection of two groups of fields, coalesced.
#pragma once

#include "absl/status/status.h"
#include "kvtransfer/kv_plan.h"

namespace baton::kvtransfer {

// Fills part.boxes from its groups, layers, heads and unit. FailedPrecondition where the fields
// cannot be moved into each other.
absl::Status make_boxes(const KvLayout& source, const KvLayout& target, KvPart& part);

// The group's field of that role, or nullptr.
const KvField* find_role(const KvGroup& group, KvRole role);

// Joins dimensions whose steps follow each other without a gap at both ends, and orders the rest by
// the target's strides.
void coalesce(KvBoxDims& dims, uint64_t& piece_bytes);

// InvalidArgument where the pages do not hold the tokens (at least one), or are not in the cache.
absl::Status check_kv_pages(const char* side, const KvGroup& group, const KvPages& pages,
                            KvTokens tokens);

// "KV layouts do not match: WHAT is A at the source and B at the target; REMEDY".
absl::Status kv_mismatch(absl::string_view what, absl::string_view source, absl::string_view target,
                         absl::string_view remedy);

}  // namespace baton::kvtransfer
