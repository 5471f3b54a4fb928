// What machines and links cost, from rank to rank: encoding, decoding, agreeing.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_format.h"
#include "collectives/prediction/cost_model.h"
#include "transport/base/wire.h"

namespace baton::collectives::prediction {
namespace {

constexpr uint32_t kMagic = 0x32504342;  // "BCP2"
constexpr double kMostSeconds = 1e6;     // more is no measurement

using Field = double& (*)(CostParameters&);
constexpr Field kFields[] = {
    [](CostParameters& p) -> double& { return p.local.alpha; },
    [](CostParameters& p) -> double& { return p.local.beta; },
    [](CostParameters& p) -> double& { return p.remote.alpha; },
    [](CostParameters& p) -> double& { return p.remote.beta; },
    [](CostParameters& p) -> double& { return p.gamma; },
    [](CostParameters& p) -> double& { return p.step; },
    [](CostParameters& p) -> double& { return p.shared_step; },
};

bool is_cost(double seconds) {
  return std::isfinite(seconds) && seconds >= 0 && seconds <= kMostSeconds;
}

// The lower one of the two in the middle: a value that a rank has measured.
template <typename T>
T median(std::vector<T>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

CostParameters agree(absl::Span<const CostParameters> measured) {
  CostParameters agreed;
  std::vector<double> values;
  for (Field field : kFields) {
    values.clear();
    for (CostParameters one : measured) {
      if (is_cost(field(one))) values.push_back(field(one));
    }
    if (!values.empty()) field(agreed) = median(values);
  }
  std::vector<uint32_t> sizes;
  for (const CostParameters& one : measured) {
    if (one.node_size > 0) sizes.push_back(one.node_size);
  }
  if (!sizes.empty()) agreed.node_size = median(sizes);
  return agreed;
}

std::string encode(const CostParameters& parameters) {
  std::string bytes;
  bytes.reserve(kEncodedCostBytes);
  base::put_number(bytes, kMagic);
  base::put_number(bytes, parameters.node_size);
  CostParameters copy = parameters;
  for (Field field : kFields) base::put_number(bytes, std::bit_cast<uint64_t>(field(copy)));
  return bytes;
}

absl::StatusOr<CostParameters> decode_cost_parameters(std::string_view bytes) {
  base::WireReader reader(bytes);
  const auto magic = reader.number<uint32_t>();
  CostParameters parameters;
  parameters.node_size = reader.number<uint32_t>();
  for (Field field : kFields) {
    field(parameters) = std::bit_cast<double>(reader.number<uint64_t>());
  }
  if (!reader.finished() || magic != kMagic) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d bytes are not the encoded costs of a machine: those are %d bytes and begin with BCP2",
        bytes.size(), kEncodedCostBytes));
  }
  return parameters;
}

}  // namespace baton::collectives::prediction
