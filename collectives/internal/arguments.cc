// Checking the arguments of calls.
#include "collectives/internal/arguments.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_format.h"

namespace baton::collectives::internal {
namespace {

bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

absl::Status refuse(Collective collective, std::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %s", std::string(name_of(collective)), std::string(why)));
}

absl::Status check_pointer(Collective collective, const char* name, const void* pointer,
                           size_t count, size_t element) {
  if (count == 0) return absl::OkStatus();
  if (pointer == nullptr) return refuse(collective, absl::StrFormat("%s is null", name));
  if (reinterpret_cast<uintptr_t>(pointer) % element != 0) {
    return refuse(collective, absl::StrFormat("%s (%p) is not aligned to its elements of %u bytes",
                                              name, pointer, element));
  }
  return absl::OkStatus();
}

absl::Status check_request(const Request& request, uint32_t rank, uint32_t ranks, bool& in_place) {
  const Collective what = request.collective;
  in_place = false;
  if (what == Collective::kBarrier) return absl::OkStatus();
  if (static_cast<int>(request.type) >= kDataTypes) return refuse(what, "unknown element type");
  if (static_cast<int>(request.op) >= kReduceOps) return refuse(what, "unknown operation");
  const auto root = static_cast<uint32_t>(request.root);
  if (request.root < 0 || root >= ranks) {
    return refuse(what,
                  absl::StrFormat("root %d is not a rank: there are %u", request.root, ranks));
  }
  const size_t element = size_of(request.type);
  const bool all_in = what == Collective::kReduceScatter || what == Collective::kAllToAll;
  const bool all_out = what == Collective::kAllGather || what == Collective::kAllToAll;
  if (request.count > SIZE_MAX / 4 / ranks / element) {
    return refuse(what, absl::StrFormat("a count of %u is too large", request.count));
  }
  const bool reads = what != Collective::kBroadcast || root == rank;
  const bool writes = what != Collective::kReduce || root == rank;
  const size_t in_count = reads ? request.count * (all_in ? ranks : 1) : 0;
  const size_t out_count = writes ? request.count * (all_out ? ranks : 1) : 0;
  if (absl::Status s = check_pointer(what, "in", request.in, in_count, element); !s.ok()) return s;
  if (absl::Status s = check_pointer(what, "out", request.out, out_count, element); !s.ok()) {
    return s;
  }
  const auto* in = static_cast<const std::byte*>(request.in);
  const auto* out = static_cast<const std::byte*>(request.out);
  const size_t block = request.count * element;
  if (!overlap(in, in_count * element, out, out_count * element)) return absl::OkStatus();
  const std::byte* in_own = what == Collective::kReduceScatter ? in + rank * block : in;
  const std::byte* out_own = what == Collective::kAllGather ? out + rank * block : out;
  in_place = in_own == out_own && what != Collective::kAllToAll;
  if (in_place) return absl::OkStatus();
  return refuse(what, what == Collective::kAllToAll
                          ? "in and out overlap: give it two buffers"
                          : "in and out overlap, but are not what in place means (the same "
                            "pointer; the rank's own part of the larger buffer)");
}

absl::Status check_point_to_point(bool sends, const void* data, size_t count, DataType type,
                                  int other, uint32_t rank, uint32_t ranks) {
  const Collective what = Collective::kSendReceive;
  if (static_cast<int>(type) >= kDataTypes) return refuse(what, "unknown element type");
  const bool any = !sends && other == kAnyRank && ranks > 1;
  if (!any && (other < 0 || static_cast<uint32_t>(other) >= ranks ||
               static_cast<uint32_t>(other) == rank)) {
    return refuse(what, absl::StrFormat("rank %d is not another rank: there are %u, this is %u",
                                        other, ranks, rank));
  }
  return check_pointer(what, sends ? "in" : "out", data, count, size_of(type));
}

absl::Status check_all_to_all_v(const void* in, const Blocks& send, const void* out,
                                const Blocks& receive, DataType type, uint32_t rank,
                                uint32_t ranks) {
  const Collective what = Collective::kAllToAll;
  if (static_cast<int>(type) >= kDataTypes) return refuse(what, "unknown element type");
  for (const auto& list : {send.counts, send.offsets, receive.counts, receive.offsets}) {
    if (list.size() == ranks) continue;
    return refuse(what, absl::StrFormat("counts and offsets must have one entry for each of %u "
                                        "ranks, one has %u",
                                        ranks, list.size()));
  }
  const size_t element = size_of(type);
  if (send.counts[rank] != receive.counts[rank]) {
    return refuse(what, absl::StrFormat("rank %u sends %u elements to itself and receives %u", rank,
                                        send.counts[rank], receive.counts[rank]));
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    if (absl::Status s = check_pointer(what, "in", in, send.counts[r], element); !s.ok()) return s;
    if (absl::Status s = check_pointer(what, "out", out, receive.counts[r], element); !s.ok()) {
      return s;
    }
  }
  return absl::OkStatus();
}

}  // namespace baton::collectives::internal
