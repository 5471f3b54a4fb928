// Layouts and the addresses of their buffers: put together, checked, and on the wire.
//
//   magic(8) version(2) buffers(2) {address(8)} layout, as KvLayout::encode() writes it
//   the first 8 bytes of SHA-256 over all before
#include <openssl/sha.h>

#include <array>
#include <utility>

#include "absl/strings/str_format.h"
#include "kvtransfer/agent_kv.h"
#include "kvtransfer/plans/kv_extents.h"
#include "kvtransfer/plans/kv_placement_body.h"
#include "transport/base/threads/forks.h"
#include "transport/base/wire.h"

namespace baton::kvtransfer {
namespace {

constexpr std::string_view kPlacementMagic = "BATONKVP";
constexpr uint16_t kPlacementVersion = 1;
constexpr size_t kPlacementHead = kPlacementMagic.size() + sizeof kPlacementVersion;
constexpr size_t kPlacementSum = 8;

std::string digest_of(std::string_view bytes) {
  const base::ForkWaits fork_waits(base::ForkWaits::kMoment);  // OpenSSL has locks
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest.data());
  return std::string(reinterpret_cast<const char*>(digest.data()), kPlacementSum);
}

absl::StatusOr<KvBuffer> buffer_of(const Descriptor& where, MemoryKind kind) {
  if (kind != MemoryKind::kDram && kind != MemoryKind::kVram) {
    return absl::InvalidArgumentError("a KV cache must be in host or device memory");
  }
  if (where.device > UINT32_MAX) {
    return absl::InvalidArgumentError(absl::StrFormat("there is no device %u", where.device));
  }
  return KvBuffer{where.bytes, kind == MemoryKind::kVram ? KvDevice::kCuda : KvDevice::kHost,
                  static_cast<uint32_t>(where.device)};
}

}  // namespace

absl::StatusOr<KvPlacement> KvPlacement::of(KvLayout layout, absl::Span<const Descriptor> buffers,
                                            MemoryKind kind) {
  if (buffers.size() != layout.buffers.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u buffers for a layout that has %u: give one for each, in its order",
                        buffers.size(), layout.buffers.size()));
  }
  if (absl::Status status = layout.check(); !status.ok()) return status;
  KvPlacement out;
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].bytes < layout.buffers[i].bytes) {
      return absl::InvalidArgumentError(
          absl::StrFormat("buffer %u has %u bytes, but its contents take %u", i, buffers[i].bytes,
                          layout.buffers[i].bytes));
    }
    absl::StatusOr<KvBuffer> buffer = buffer_of(buffers[i], kind);
    if (!buffer.ok()) return buffer.status();
    layout.buffers[i] = *buffer;
    out.addresses.push_back(buffers[i].address);
  }
  out.layout = std::move(layout);
  if (absl::Status status = out.check(); !status.ok()) return status;
  return out;
}

absl::StatusOr<KvPlacement> KvPlacement::of_addresses(
    KvGroup group, absl::Span<const absl::Span<const uint64_t>> addresses,
    absl::Span<const Descriptor> buffers, MemoryKind kind) {
  if (addresses.size() != group.fields.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "addresses of %u fields for a group that has %u", addresses.size(), group.fields.size()));
  }
  KvLayout layout;
  for (const Descriptor& buffer : buffers) layout.buffers.push_back({buffer.bytes});
  for (size_t f = 0; f < addresses.size(); ++f) {
    KvField& field = group.fields[f];
    field.places.clear();
    const uint64_t extent = extent_of(steps_of(group, field));
    for (const uint64_t address : addresses[f]) {
      // The first that has all of it; else any that has the beginning, for check() to complain of.
      size_t found = buffers.size();
      for (size_t i = 0; i < buffers.size(); ++i) {
        const uint64_t into = address - buffers[i].address;
        if (address < buffers[i].address || into >= buffers[i].bytes) continue;
        const bool whole = extent <= buffers[i].bytes - into;
        if (whole || found == buffers.size()) found = i;
        if (whole) break;
      }
      if (found == buffers.size()) {
        return absl::InvalidArgumentError(
            absl::StrFormat("the %s at %#x is in none of the %u buffers: name all that hold the "
                            "cache",
                            name_of(field.role), address, buffers.size()));
      }
      field.places.push_back({static_cast<uint32_t>(found), address - buffers[found].address});
    }
  }
  layout.groups.push_back(std::move(group));
  return of(std::move(layout), buffers, kind);
}

absl::Status KvPlacement::append(const KvPlacement& other) {
  KvPlacement all = *this;
  const auto first = static_cast<uint32_t>(all.layout.buffers.size());
  all.layout.buffers.insert(all.layout.buffers.end(), other.layout.buffers.begin(),
                            other.layout.buffers.end());
  all.addresses.insert(all.addresses.end(), other.addresses.begin(), other.addresses.end());
  for (KvGroup group : other.layout.groups) {
    for (KvField& field : group.fields) {
      for (KvPlace& place : field.places) place.buffer += first;
    }
    all.layout.groups.push_back(std::move(group));
  }
  if (absl::Status status = all.check(); !status.ok()) return status;
  *this = std::move(all);
  return absl::OkStatus();
}

absl::Status KvPlacement::check() const {
  if (absl::Status status = layout.check(); !status.ok()) return status;
  if (addresses.size() != layout.buffers.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%u addresses for the %u buffers of a KV layout", addresses.size(), layout.buffers.size()));
  }
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (addresses[i] + layout.buffers[i].bytes >= addresses[i]) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("buffer %u of a KV layout, %u bytes at %#x, is outside memory", i,
                        layout.buffers[i].bytes, addresses[i]));
  }
  return check_overlaps(layout, addresses);
}

std::string KvPlacement::encode() const {
  std::string out(kPlacementMagic);
  base::put_number(out, kPlacementVersion);
  base::put_number(out, static_cast<uint16_t>(addresses.size()));
  for (const uint64_t address : addresses) base::put_number(out, address);
  out += layout.encode();
  return out + digest_of(out);
}

absl::StatusOr<KvPlacement> KvPlacement::decode(std::string_view bytes) {
  if (bytes.size() < kPlacementHead + kPlacementSum ||
      bytes.substr(0, kPlacementMagic.size()) != kPlacementMagic) {
    return absl::DataLossError(absl::StrFormat(
        "these %u bytes are not a KV layout: pass on what the other side encoded, unchanged",
        bytes.size()));
  }
  base::WireReader in(bytes.substr(kPlacementMagic.size()));
  const auto version = in.number<uint16_t>();
  if (version != kPlacementVersion) {
    return absl::DataLossError(
        absl::StrFormat("a KV layout of version %u, but this side reads version %u: run one "
                        "version of Baton on both "
                        "sides",
                        version, kPlacementVersion));
  }
  const std::string_view body = bytes.substr(0, bytes.size() - kPlacementSum);
  if (digest_of(body) != bytes.substr(body.size())) {
    return absl::DataLossError(
        "the KV layout is damaged or cut short: pass on what the other side encoded, unchanged");
  }
  return decode_placement_body(body.substr(kPlacementHead));
}

absl::StatusOr<KvPlacement> decode_placement_body(std::string_view body) {
  base::WireReader in(body);
  KvPlacement out;
  const auto count = in.number<uint16_t>();
  for (uint16_t i = 0; i < count && !in.failed(); ++i) {
    out.addresses.push_back(in.number<uint64_t>());
  }
  absl::Status good = absl::DataLossError("it is cut short");
  if (!in.failed()) {
    absl::StatusOr<KvLayout> layout =
        KvLayout::decode(body.substr(sizeof count + out.addresses.size() * sizeof(uint64_t)));
    good = layout.status();
    if (good.ok()) {
      out.layout = *std::move(layout);
      good = out.check();
    }
  }
  if (good.ok()) return out;
  return absl::DataLossError(
      absl::StrFormat("the KV layout contradicts itself: %s", good.message()));
}

}  // namespace baton::kvtransfer
