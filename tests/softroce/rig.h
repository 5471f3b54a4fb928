// What the fault cases need of the rig: the other machine's shell, the rails' packet counters, and
// how late this machine's clock ticks.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/std.h"
#include "transport/clock.h"

namespace baton::softroce {

// Runs a shell command here. Internal if its exit status is not 0.
absl::Status run_here(const std::string& command);

// A folder that both machines share, whatever happens to the network between them.
class Board {
 public:
  explicit Board(std::string path) : path_(std::move(path)) {}
  // The other machine's agent runs `command`; returns when it has.
  absl::Status run_there(const std::string& command) const;
  // The other machine loses its power; returns when it has.
  absl::Status power_off_there() const;
  absl::StatusOr<std::string> read(const std::string& name, Time patience) const;
  absl::Status write(const std::string& name, const std::string& text) const;  // atomically

 private:
  absl::Status ask(const std::string& name, const std::string& text) const;
  std::string path_;
};

// Packets that each RDMA device has sent.
std::vector<uint64_t> packets_sent();
// Each rail's part of what was sent between two readings, in per cent.
std::vector<int> shares(const std::vector<uint64_t>& before, const std::vector<uint64_t>& after);

// Sleeps again and again and notes how late it wakes: an emulated machine with a busy host runs in
// fits, and whatever it measures is late by as much.
class Lateness {
 public:
  Lateness();
  ~Lateness();
  // How much longer than asked for the sleeps took since begin(): at least 1.
  void begin();
  double factor() const;

 private:
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> asked_ns_{0};
  std::atomic<int64_t> took_ns_{0};
  std::thread thread_;
};

// A steady clock, since an arbitrary start.
Time now();
inline double ms(Time t) { return std::chrono::duration<double, std::milli>(t).count(); }

}  // namespace baton::softroce
