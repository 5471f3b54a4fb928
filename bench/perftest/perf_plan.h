// What the two sides of a test agree on, and the messages in which they do.
//
// The client tells everything, the server follows, as dialogue.h has it.
//
//   client -> server                                  server -> client
//   {"do":"plan","speaks":3,"plan":P,"ends":E}        {"ok":true,"ends":E,"memory":TEXT}
//   {"do":"run","run":R}                              {"ok":true}
//   {"do":"end","sent":n}                             {"ok":true,"received":n,...}
//   {"do":"bye"}                                      (none)
//
// E is {"region":HEX,"offset":n,"unseen":BOOL,"counter":HEX,"credits":HEX}: memory and counters of
// the side that sends it; unseen: no CPU looks at that memory. While the server works for a client
// else it answers {"wait":TEXT} first, and goes on when it is free. An error comes as
// {"error":TEXT}.
//
// A send test is two-sided: the receiver has so many receives open, each message takes one and
// lands in the buffer whose turn it is, and raises "counter". What the receiver's program has taken
// in it tells by raising "credits" of the sender, which sends no more than there are receives. Over
// verbs a message is one write with an immediate, which uses up a receive of the queue pair as a
// SEND does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "bench/report/report.h"
#include "transport/clock.h"

namespace baton::bench {

// Version of the messages above. Raise it when a change must be known to the other side.
inline constexpr uint64_t kPerfProtocol = 3;

struct PerfTest {
  enum class Verb : uint8_t { kWrite, kRead, kSend };
  Verb verb = Verb::kWrite;
  bool latency = false;
  bool operator==(const PerfTest&) const = default;

  std::string name() const;  // "write_bw"
  static std::optional<PerfTest> named(std::string_view name);
};

// The test of one connection: everything that a client asks for and a server checks.
struct PerfPlan {
  static constexpr size_t kMaxDepth = 15000;
  static constexpr size_t kMaxReceives = 8192;
  static constexpr size_t kMaxArea = size_t{16} << 30;
  static constexpr size_t kStep = 64;  // messages begin at multiples of it

  PerfTest test;
  bool bidirectional = false;
  bool events = false;     // sleep until something happens, instead of polling
  bool immediate = false;  // a counter signals arrival, instead of seen in the last byte
  bool verify = true;
  bool cold = false;      // the area is larger than the caches: sweep them before each run
  size_t depth = 128;     // messages under way at a time
  size_t post_list = 1;   // messages submitted together
  size_t receives = 512;  // send_bw: messages that may be sent before the receiver has taken them
  size_t area = 4096;     // bytes a side sends from, and as many that it receives into

  // Distinct places in an area for messages of this size; at least 1 where size <= area.
  size_t slots(size_t size) const { return area / stride(size); }
  static size_t stride(size_t size) { return (size + kStep - 1) / kStep * kStep; }

  Json to_json() const;
  static absl::StatusOr<PerfPlan> from_json(const Json& json);
};

// One row of the table.
struct PerfRun {
  size_t size = 0;
  uint64_t iterations = 0;  // 0: by time
  double seconds = 0;       // by time: in all
  double margin = 0;        // by time: seconds at either end that do not count
  uint64_t seed = 0;

  Time length() const { return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)); }
  Time unmeasured() const { return std::chrono::nanoseconds(static_cast<int64_t>(margin * 1e9)); }

  Json to_json() const;
  static absl::StatusOr<PerfRun> from_json(const Json& json, const PerfPlan& plan);
};

}  // namespace baton::bench
