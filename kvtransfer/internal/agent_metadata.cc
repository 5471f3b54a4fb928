// Metadata: magic, version, body, HMAC-SHA256 of all before it.
#include "kvtransfer/internal/agent_metadata.h"

#include <openssl/crypto.h>

#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/base/wire.h"

namespace baton::kvtransfer {
namespace {

constexpr std::string_view kMagic = "BATONAGT";
constexpr size_t kCode = 32;
constexpr size_t kMaxAddress = 4096;
constexpr uint8_t kPartial = 1;

// Told apart from everything else that is signed with the cluster's key.
std::array<uint8_t, kCode> code_of(std::string_view bytes, const ClusterKey& key) {
  std::string text = "agent metadata ";
  text.append(bytes);
  return key.hmac(text);
}

}  // namespace

std::string AgentMetadata::encode(const ClusterKey& key) const {
  std::string out(kMagic);
  put_number(out, kVersion);
  put_number(out, static_cast<uint8_t>(partial ? kPartial : 0));
  out.append(reinterpret_cast<const char*>(uid.bytes.data()), uid.bytes.size());
  put_text(out, name);
  put_text(out, address);
  put_number(out, static_cast<uint32_t>(ranges.size()));
  for (const auto& [where, region] : ranges) {
    put_number(out, where.address);
    put_number(out, where.bytes);
    put_number(out, where.device);
    out.append(region.encode());
  }
  const auto code = code_of(out, key);
  out.append(reinterpret_cast<const char*>(code.data()), code.size());
  return out;
}

absl::StatusOr<AgentMetadata> AgentMetadata::decode(std::string_view bytes, const ClusterKey& key) {
  const size_t head = kMagic.size() + sizeof kVersion;
  if (bytes.size() < head + kCode || bytes.substr(0, kMagic.size()) != kMagic) {
    return absl::DataLossError(absl::StrFormat(
        "these %u bytes are no metadata of an agent: pass on what metadata() returned, unchanged",
        bytes.size()));
  }
  WireReader in(bytes.substr(kMagic.size()));
  const auto version = in.number<uint16_t>();
  if (version != kVersion) {
    return absl::DataLossError(absl::StrFormat(
        "metadata of version %u, but this agent reads version %u: run one version of Baton on both "
        "sides",
        version, kVersion));
  }
  const std::string_view signed_part = bytes.substr(0, bytes.size() - kCode);
  const auto code = code_of(signed_part, key);
  if (CRYPTO_memcmp(code.data(), bytes.data() + signed_part.size(), kCode) != 0) {
    return absl::DataLossError(
        "the metadata is damaged or cut short, or its agent has another cluster key: pass it on "
        "unchanged, and use one key on both sides ($BATON_KEY_FILE)");
  }
  return decode_body(signed_part.substr(head));
}

absl::StatusOr<AgentMetadata> AgentMetadata::decode_body(std::string_view body) {
  WireReader in(body);
  AgentMetadata out;
  const auto flags = in.number<uint8_t>();
  out.partial = flags == kPartial;
  const std::string_view uid = in.take(out.uid.bytes.size());
  if (!uid.empty()) std::memcpy(out.uid.bytes.data(), uid.data(), uid.size());
  out.name = in.text(kMaxAgentName);
  out.address = in.text(kMaxAddress);
  const auto count = in.number<uint32_t>();
  bool good = !in.failed() && flags <= kPartial && !out.name.empty() &&
              (out.partial || !out.address.empty()) && count <= RegionTable::kCapacity;
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
