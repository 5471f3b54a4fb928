// How much of a transfer was hidden behind computation, from an exported timeline.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::engine::demo {

struct Overlap {
  double transfer_us = 0;  // during which KV was on its way
  double hidden_us = 0;    // of that, while the sending process computed
  double compute_us = 0;
  uint64_t bytes = 0;
  size_t requests = 0;

  double hidden_share() const { return transfer_us > 0 ? hidden_us / transfer_us : 0; }
  double gb_per_second() const {
    return transfer_us > 0 ? static_cast<double>(bytes) / transfer_us * 1e-3 : 0;
  }
};

// Reads Perfetto (Chrome trace event) JSON: complete events ("ph": "X") of category "transfer" and
// "compute". Time counts as transfer while at least one transfer span of a request is open, and as
// hidden while the same process also has a compute span open for the same request. Requests are
// taken one by one and added up. InvalidArgument if the text is no such timeline.
absl::StatusOr<Overlap> measure_overlap(std::string_view json);

}  // namespace baton::engine::demo
