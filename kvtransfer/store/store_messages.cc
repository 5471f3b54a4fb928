// The four messages on the wire, and their checks.
#include "kvtransfer/store/store_messages.h"

#include <utility>

namespace baton::kvtransfer::store {
namespace {

constexpr uint32_t kMagic = 0x31534b42;  // its bytes spell BKS1

template <typename Message>
absl::StatusOr<StoreMessage> whole(base::FieldReader& in) {
  Message message;
  in(message);
  if (in.finished()) return StoreMessage(std::move(message));
  return absl::DataLossError("a message to or from a KV store has values out of range");
}

template <size_t... kPlaces>
absl::StatusOr<StoreMessage> any_of(size_t place, base::FieldReader in,
                                    std::index_sequence<kPlaces...>) {
  absl::StatusOr<StoreMessage> message = absl::DataLossError(
      "not a message to or from a KV store of this version: run the same Baton at both ends");
  static_cast<void>(
      ((place == kPlaces &&
        (message = whole<std::variant_alternative_t<kPlaces, StoreMessage>>(in), true)) ||
       ...));
  return message;
}

}  // namespace

std::string encode(const StoreMessage& message) {
  std::string out;
  base::FieldWriter wire(out);
  const auto kind = static_cast<uint8_t>(message.index() + 1);
  wire(kMagic, kind);
  std::visit([&](const auto& m) { wire(m); }, message);
  return out;
}

absl::StatusOr<StoreMessage> decode_store_message(std::string_view bytes) {
  base::FieldReader in(bytes);
  uint32_t magic = 0;
  uint8_t kind = 0;
  in(magic, kind);
  if (magic != kMagic || kind == 0) kind = UINT8_MAX;
  return any_of(kind - size_t{1}, in,
                std::make_index_sequence<std::variant_size_v<StoreMessage>>());
}

}  // namespace baton::kvtransfer::store
