// Metadata: magic, version, number of codes, body, HMAC-SHA256 of all before by each key of the
// sender's.
#include "kvtransfer/metadata/agent_metadata.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/base/wire.h"

namespace baton::kvtransfer {
namespace {

constexpr std::string_view kMagic = "BATONAGT";
constexpr size_t kCode = 32;
constexpr size_t kMaxAddress = 4096;
constexpr uint8_t kPartial = 1;
constexpr uint8_t kWithdrawn = 2;

// Told apart from everything else that is signed with the cluster's key.
std::array<uint8_t, kCode> code_of(std::string_view bytes, const ClusterKey& key, size_t which) {
  std::string text = "agent metadata ";
  text.append(bytes);
  return key.hmac(text, which);
}

// While a cluster changes its key, either side may hold one that the other does not.
bool proved(std::string_view bytes, std::string_view codes, const ClusterKey& key) {
  for (size_t which = 0; which < key.count(); ++which) {
    const auto code = code_of(bytes, key, which);
    for (size_t at = 0; at < codes.size(); at += kCode) {
      if (CRYPTO_memcmp(code.data(), codes.data() + at, kCode) == 0) return true;
    }
  }
  return false;
}

}  // namespace

std::string AgentMetadata::encode(const ClusterKey& key) const {
  std::string out(kMagic);
  base::put_number(out, kVersion);
  base::put_number(out, static_cast<uint8_t>(key.count()));
  base::put_number(out, static_cast<uint8_t>(withdrawn ? kWithdrawn : partial ? kPartial : 0));
  out.append(reinterpret_cast<const char*>(uid.bytes.data()), uid.bytes.size());
  base::put_text(out, name);
  base::put_text(out, address);
  base::put_number(out, static_cast<uint32_t>(ranges.size()));
  for (const auto& [where, region] : ranges) {
    base::put_number(out, where.address);
    base::put_number(out, where.bytes);
    base::put_number(out, where.device);
    out.append(region.encode());
  }
  const size_t body = out.size();
  for (size_t which = 0; which < key.count(); ++which) {
    const auto code = code_of(std::string_view(out).substr(0, body), key, which);
    out.append(reinterpret_cast<const char*>(code.data()), code.size());
  }
  return out;
}

absl::StatusOr<AgentMetadata> AgentMetadata::decode(std::string_view bytes, const ClusterKey& key) {
  constexpr size_t kHead = kMagic.size() + sizeof kVersion + 1;
  if (bytes.size() < kHead + kCode || bytes.substr(0, kMagic.size()) != kMagic) {
    return absl::DataLossError(absl::StrFormat(
        "these %u bytes are not agent metadata: pass on what the other agent gave, unchanged",
        bytes.size()));
  }
  base::WireReader in(bytes.substr(kMagic.size()));
  const auto version = in.number<uint16_t>();
  if (version != kVersion) {
    return absl::DataLossError(absl::StrFormat(
        "metadata of version %u, but this agent reads version %u: run one version of Baton on both "
        "sides",
        version, kVersion));
  }
  const size_t codes = kCode * in.number<uint8_t>();
  const size_t proved_bytes = bytes.size() - std::min(codes, bytes.size());
  if (codes > ClusterKey::kMost * kCode || proved_bytes < kHead ||
      !proved(bytes.substr(0, proved_bytes), bytes.substr(proved_bytes), key)) {
    return absl::DataLossError(
        "the metadata is damaged or cut short, or its agent has another cluster key: pass it on "
        "unchanged, and use one key on both sides ($BATON_KEY_FILE)");
  }
  return decode_body(bytes.substr(kHead, proved_bytes - kHead));
}

absl::StatusOr<AgentMetadata> AgentMetadata::decode_body(std::string_view body) {
  base::WireReader in(body);
  AgentMetadata out;
  const auto flags = in.number<uint8_t>();
  out.partial = flags == kPartial;
  out.withdrawn = flags == kWithdrawn;
  const std::string_view uid = in.take(out.uid.bytes.size());
  if (!uid.empty()) std::memcpy(out.uid.bytes.data(), uid.data(), uid.size());
  out.name = in.text(kMaxAgentName);
  out.address = in.text(kMaxAddress);
  const auto count = in.number<uint32_t>();
  bool good = flags <= kWithdrawn && !out.name.empty() && (out.partial || !out.address.empty()) &&
              count <= RegionTable::kCapacity;
  for (uint32_t i = 0; good && i < count; ++i) {
    Descriptor where;
    where.address = in.number<uint64_t>();
    where.bytes = in.number<uint64_t>();
    where.device = in.number<uint64_t>();
    absl::StatusOr<RemoteRegion> region =
        RemoteRegion::decode(in.take(RemoteRegion::kEncodedBytes));
    good = region.ok() && region->owner == out.uid && region->size == where.bytes &&
           where.address + where.bytes >= where.address;
    if (good) out.ranges.emplace_back(where, *region);
  }
  if (!good || !in.finished()) {
    return absl::DataLossError("the metadata contradicts itself: its agent is broken");
  }
  return out;
}

}  // namespace baton::kvtransfer
