// Fuzzes the counting of arrivals, whose numbers all come from a peer: any sequence of them is
// counted or refused within bounded memory, and a transfer that comes twice never counts twice,
// unless more of its slot than are remembered have come since.

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "tests/std.h"
#include "transport/base/wire.h"
#include "transport/internal/tables/arrivals.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  baton::base::WireReader in({reinterpret_cast<const char*>(data), size});
  baton::internal::Arrivals arrivals;
  absl::flat_hash_set<std::pair<uint32_t, uint32_t>> completed;  // by slot and generation
  absl::flat_hash_map<uint32_t, uint32_t> newest;                // generation, by slot
  for (int step = 0; step < 4096; ++step) {
    baton::Arrival arrival;
    arrival.transfer.slot = in.number<uint8_t>();
    arrival.transfer.generation = 1 + in.number<uint8_t>();
    arrival.slice = in.number<uint16_t>();
    arrival.slice_bytes = in.number<uint64_t>();
    arrival.total_bytes = in.number<uint64_t>();
    arrival.notify = in.text(16);
    if (in.failed()) return 0;
    const auto complete = arrivals.add(arrival);
    if (arrivals.open() > baton::internal::Arrivals::kMaxOpen) std::abort();
    if (!complete.ok()) return 0;  // the worker drops a peer that contradicts itself
    if (!complete->now) continue;
    const auto [slot, generation] = arrival.transfer;
    const bool remembered = newest[slot] < generation + baton::internal::Arrivals::kRemembered;
    if (!completed.emplace(slot, generation).second && remembered) std::abort();
    if (!arrivals.has(arrival.transfer, arrival.slice) && remembered) std::abort();
    newest[slot] = std::max(newest[slot], generation);
  }
  return 0;
}
