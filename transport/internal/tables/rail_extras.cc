// Attaches a message's number to an absl::Status, and reads it back.
#include "transport/internal/tables/rail_extras.h"

#include <string>

#include "absl/strings/cord.h"
#include "transport/base/wire.h"

namespace baton::internal {
namespace {
constexpr const char* kOrdinal = "baton/ordinal";
}  // namespace

void set_ordinal(absl::Status& status, Ordinal ordinal) {
  std::string bytes;
  base::put_number(bytes, ordinal.epoch);
  base::put_number(bytes, ordinal.number);
  status.SetPayload(kOrdinal, absl::Cord(bytes));
}

std::optional<Ordinal> ordinal_of(const absl::Status& status) {
  const auto payload = status.GetPayload(kOrdinal);
  if (!payload.has_value()) return std::nullopt;
  const std::string bytes(*payload);
  base::WireReader in(bytes);
  const auto epoch = in.number<uint32_t>();
  return Ordinal{epoch, in.number<uint32_t>()};
}

}  // namespace baton::internal
