// The flight recorder: the last events of a communicator, always on, dumped when a call fails.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/types.h"
#include "transport/clock.h"

namespace baton::collectives::executor {

struct FlightEvent {
  enum class Kind : uint8_t {
    kCallBegin,  // bytes: of the call
    kCallEnd,    // status: absl code
    kSend,       // a chunk handed to the link
    kReceive,    // a chunk combined or copied
    kPeerLost,
    kAbort,
  };
  Time at{};
  Kind kind = Kind::kCallBegin;
  Collective collective = Collective::kAllReduce;
  uint8_t lane = 0;
  uint8_t status = 0;
  uint32_t peer = UINT32_MAX;  // UINT32_MAX: none
  uint64_t sequence = 0;       // of the call
  uint32_t piece = 0;          // chunk number
  uint32_t step = 0;           // of the program
  uint64_t bytes = 0;
};

// A ring of the last `capacity` events, rounded up to a power of two. record() is wait-free and
// allocates nothing; one thread at a time may call it. Any thread may read meanwhile, and gets
// whole events, at worst without the oldest.
class FlightRecorder {
 public:
  explicit FlightRecorder(uint32_t rank = 0, size_t capacity = 4096);
  ~FlightRecorder();
  void set_rank(uint32_t rank) { rank_.store(rank, std::memory_order_relaxed); }
  void record(const FlightEvent& event);
  std::vector<FlightEvent> events() const;  // oldest first
  // One line per event: "12.345678 rank 1 send   all_reduce #17 chunk 3 step 2 -> rank 0 512.0
  // KiB".
  std::string text() const;
  // {"rank": r, "events": [...]}: one object per rank.
  std::string to_json() const;

 private:
  struct Slot;
  std::atomic<uint32_t> rank_;
  const size_t capacity_;
  std::atomic<uint64_t> next_{0};
  struct Free {
    void operator()(Slot* slots) const;
  };
  std::unique_ptr<Slot[], Free> slots_;  // zeroed by the kernel: unused ones take no memory
};

// The file of one rank of a group. $BATON_FLIGHT_RECORDER gives everything before ".<rank>.json";
// "none" is no file (empty path). Without it: baton-flight-<user id>-<group> in the directory for
// temporary files, so that each group keeps its latest failure and no more.
std::string flight_path(const std::string& group, uint32_t rank);

// Writes the recorder's JSON, readable to this user only; never through a link that another user
// may have put there. Says what was done, for the end of an error message: "; its last events are
// in FILE", why they are not, or nothing where they are not wanted.
std::string dump_flight_record(const FlightRecorder& recorder, const std::string& path);

}  // namespace baton::collectives::executor
