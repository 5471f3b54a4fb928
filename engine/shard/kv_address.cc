// Several addresses as one text.
#include "engine/shard/kv_address.h"

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "transport/address.h"
#include "transport/net/endpoint.h"

namespace baton::engine::shard {
namespace {

constexpr std::string_view kRanks = "baton-ranks";
constexpr std::string_view kVersion = "baton-ranks1:";
constexpr size_t kMaxRanks = 256;

}  // namespace

std::string join_kv_addresses(const std::vector<std::string>& addresses) {
  if (addresses.size() == 1) return addresses[0];
  return std::string(kVersion) + absl::StrJoin(addresses, ",");
}

absl::StatusOr<std::vector<std::string>> split_kv_address(std::string_view text) {
  if (text.substr(0, kRanks.size()) != kRanks) return std::vector<std::string>{std::string(text)};
  if (text.substr(0, kVersion.size()) != kVersion) {
    return absl::InvalidArgumentError(
        "the address of a tensor-parallel server begins with \"baton-ranks1:\" here: run the same "
        "release on both workers");
  }
  std::vector<std::string> addresses =
      absl::StrSplit(std::string(text.substr(kVersion.size())), ',');
  bool good = addresses.size() <= kMaxRanks;
  for (const std::string& address : addresses) good &= !address.empty();
  if (good) return addresses;
  return absl::InvalidArgumentError(
      "\"baton-ranks1:\" is followed by 1 to 256 addresses with commas between them: use what "
      "/v1/baton/address of the prefill server says");
}

absl::Status check_kv_address(std::string_view text) {
  const absl::StatusOr<std::vector<std::string>> addresses = split_kv_address(text);
  if (!addresses.ok()) return addresses.status();
  for (const std::string& address : *addresses) {
    if (net::split_host_port(address).ok() && !absl::StartsWith(address, "baton1:")) continue;
    if (absl::Status status = Address::decode(address).status(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace baton::engine::shard
