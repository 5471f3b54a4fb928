// Checking the arguments of calls.
#include "collectives/internal/arguments.h"

#include <algorithm>
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

absl::Status check_waited_for(Collective collective, const CallOptions& options) {
  if (options.group.sequence == 0 && !options.detached) return absl::OkStatus();
  return refuse(collective,
                "a blocking call cannot be detached or in a group: begin it with the function "
                "that ends in _async");
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

size_t extent(const Blocks& blocks) {
  size_t end = 0;
  for (size_t r = 0; r < blocks.counts.size(); ++r) {
    if (blocks.counts[r] > 0) end = std::max(end, blocks.offsets[r] + blocks.counts[r]);
  }
  return end;
}

size_t in_elements(const Request& request, uint32_t rank, uint32_t ranks) {
  const bool at_root = static_cast<uint32_t>(request.root) == rank;
  switch (request.collective) {
    case Collective::kBarrier:
      return 0;
    case Collective::kBroadcast:
      return at_root ? request.count : 0;
    case Collective::kScatter:
      return at_root ? request.count * ranks : 0;
    case Collective::kReduceScatter:
      return request.uneven ? extent(request.blocks) : request.count * ranks;
    case Collective::kAllToAll:
      return request.count * ranks;
    default:
      return request.count;
  }
}

size_t out_elements(const Request& request, uint32_t rank, uint32_t ranks) {
  const bool at_root = static_cast<uint32_t>(request.root) == rank;
  switch (request.collective) {
    case Collective::kBarrier:
      return 0;
    case Collective::kReduce:
      return at_root ? request.count : 0;
    case Collective::kGather:
      return at_root ? request.count * ranks : 0;
    case Collective::kAllGather:
      return request.uneven ? extent(request.blocks) : request.count * ranks;
    case Collective::kAllToAll:
      return request.count * ranks;
    default:
      return request.count;
  }
}

namespace {

absl::Status check_combination(const Request& request) {
  const Collective what = request.collective;
  if (static_cast<int>(request.op) >= kReduceOps) return refuse(what, "unknown operation");
  if (!combines(request.type, request.op)) {
    return refuse(what, absl::StrFormat("%s have no %s: %s", std::string(name_of(request.type)),
                                        std::string(name_of(request.op)),
                                        request.type == DataType::kBool
                                            ? "use sum, prod, min, max, and, or or xor"
                                            : "and, or and xor are of integers and bool"));
  }
  if (request.op == ReduceOp::kPreMulSum && request.options->factor == nullptr) {
    return refuse(what, "premulsum without CallOptions::factor, which must point to one element");
  }
  return absl::OkStatus();
}

absl::Status check_blocks(const Request& request, uint32_t rank, uint32_t ranks) {
  const Collective what = request.collective;
  const Blocks& blocks = request.blocks;
  if (blocks.counts.size() != ranks || blocks.offsets.size() != ranks) {
    return refuse(what, absl::StrFormat("%u counts and %u offsets: give one of each for each of "
                                        "the %u ranks",
                                        blocks.counts.size(), blocks.offsets.size(), ranks));
  }
  const size_t most = SIZE_MAX / 4 / ranks / size_of(request.type);
  for (uint32_t r = 0; r < ranks; ++r) {
    if (blocks.counts[r] <= most && blocks.offsets[r] <= most) continue;
    return refuse(what, absl::StrFormat("the block of rank %u, %u elements at %u, is too large", r,
                                        blocks.counts[r], blocks.offsets[r]));
  }
  if (request.count == blocks.counts[rank]) return absl::OkStatus();
  return refuse(what, absl::StrFormat("rank %u names %u elements, and a count of %u in the list",
                                      rank, request.count, blocks.counts[rank]));
}

// All but the pointers.
absl::Status check_kind(const Request& request, uint32_t rank, uint32_t ranks) {
  const Collective what = request.collective;
  if (static_cast<int>(request.type) >= kDataTypes) return refuse(what, "unknown element type");
  if (request.reduces()) {
    if (absl::Status s = check_combination(request); !s.ok()) return s;
  }
  if (request.root < 0 || static_cast<uint32_t>(request.root) >= ranks) {
    return refuse(what,
                  absl::StrFormat("root %d is not a rank: there are %u", request.root, ranks));
  }
  if (request.uneven) return check_blocks(request, rank, ranks);
  if (request.count > SIZE_MAX / 4 / ranks / size_of(request.type)) {
    return refuse(what, absl::StrFormat("a count of %u is too large", request.count));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status check_request(const Request& request, uint32_t rank, uint32_t ranks, bool& in_place,
                           Extents& extents, bool known) {
  const Collective what = request.collective;
  in_place = false;
  if (what == Collective::kBarrier) return absl::OkStatus();
  if (!known) {
    if (absl::Status s = check_kind(request, rank, ranks); !s.ok()) return s;
    extents = {in_elements(request, rank, ranks), out_elements(request, rank, ranks)};
  }
  const size_t element = size_of(request.type);
  const size_t in_count = extents.in, out_count = extents.out;
  if (absl::Status s = check_pointer(what, "in", request.in, in_count, element); !s.ok()) return s;
  if (absl::Status s = check_pointer(what, "out", request.out, out_count, element); !s.ok()) {
    return s;
  }
  const auto* in = static_cast<const std::byte*>(request.in);
  const auto* out = static_cast<const std::byte*>(request.out);
  if (!overlap(in, in_count * element, out, out_count * element)) return absl::OkStatus();
  const size_t own = request.uneven ? request.blocks.offsets[rank] : rank * request.count;
  const bool all_in = what == Collective::kReduceScatter || what == Collective::kScatter;
  const bool all_out = what == Collective::kAllGather || what == Collective::kGather;
  const std::byte* in_own = all_in ? in + own * element : in;
  const std::byte* out_own = all_out ? out + own * element : out;
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
  if (count > SIZE_MAX / 4 / size_of(type)) {
    return refuse(what, absl::StrFormat("a count of %u is too large", count));
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
  const size_t most = SIZE_MAX / 4 / ranks / element;
  for (uint32_t r = 0; r < ranks; ++r) {
    if (std::max({send.counts[r], send.offsets[r], receive.counts[r], receive.offsets[r]}) > most) {
      return refuse(what, absl::StrFormat("a block to or from rank %u is too large", r));
    }
    if (absl::Status s = check_pointer(what, "in", in, send.counts[r], element); !s.ok()) return s;
    if (absl::Status s = check_pointer(what, "out", out, receive.counts[r], element); !s.ok()) {
      return s;
    }
  }
  return absl::OkStatus();
}

}  // namespace baton::collectives::internal
