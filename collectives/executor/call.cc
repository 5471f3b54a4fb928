// Naming calls for people, and comparing them by fingerprint.
#include "collectives/executor/call.h"

#include <array>
#include <cstring>

#include "absl/strings/str_format.h"

namespace baton::collectives::executor {

uint32_t CallDescriptor::fingerprint() const {
  std::array<uint64_t, sizeof(CallDescriptor) / sizeof(uint64_t)> words;
  std::memcpy(words.data(), this, sizeof *this);
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (uint64_t word : words) {
    hash = (hash ^ word) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  return static_cast<uint32_t>(hash) | 1;
}

std::string CallDescriptor::to_string() const {
  const auto what = static_cast<Collective>(collective);
  const std::string elements(name_of(static_cast<DataType>(type)));
  if (of_v != 0 && what == Collective::kAllToAll) {  // counts are each rank's own
    return absl::StrFormat("all_to_all_v #%u of %s", sequence, elements);
  }
  std::string out =
      absl::StrFormat("%s%s #%u", std::string(name_of(what)),
                      of_v != 0 && what != Collective::kSendReceive ? "_v" : "", sequence);
  if (what == Collective::kBarrier) return out;
  absl::StrAppendFormat(&out, " of %u %s", count, elements);
  if (what == Collective::kSendReceive) {
    if (of_v != 0) absl::StrAppendFormat(&out, " within all_to_all_v #%u", whole());
    return out;
  }
  if (what == Collective::kAllReduce || what == Collective::kReduceScatter ||
      what == Collective::kReduce) {
    absl::StrAppendFormat(&out, " (%s)", std::string(name_of(static_cast<ReduceOp>(op))));
  }
  if (of_v != 0) absl::StrAppendFormat(&out, " in blocks of lengths [%08x]", lengths());
  if (schedules::rooted(what)) {
    absl::StrAppendFormat(&out, ", root %u", root);
  }
  absl::StrAppendFormat(&out, ", %s%s", std::string(name_of(static_cast<Algorithm>(algorithm))),
                        ordered != 0 ? ", ordered" : "");
  return out;
}

}  // namespace baton::collectives::executor
