// What the two processes of one schedule of real faults share, and the plan that both know from its
// seed.
#pragma once

#include "tests/std.h"
#include "transport/counter.h"
#include "transport/region.h"
#include "transport/transfer.h"

namespace baton {

inline constexpr size_t kRealBlock = 64 << 10;  // each transfer has one of its own at either end
inline constexpr size_t kRealTransfers = 24;
inline constexpr size_t kRealHalf = kRealBlock * kRealTransfers;  // sources, then destinations

inline constexpr char kRealPoison = 'p';
inline constexpr char kRealReused = 'r';
inline char real_byte(uint64_t seed, size_t transfer, size_t at) {
  return static_cast<char>((seed * 131 + transfer * 17 + at * 7 + (at >> 8) * 3) & 31);
}

struct RealPlan {
  size_t from = 0;
  Op op = Op::kWrite;
  size_t bytes = 0;
  int timeout_ms = -1;  // none
  size_t target() const { return op == Op::kWrite ? 1 - from : from; }
};

// What became of one transfer: written by the processes, read when they are gone.
struct RealItem {
  std::atomic<int> submitted{0};
  std::atomic<int> cancelled{0};  // asked for
  std::atomic<int> ended{0};      // how often
  std::atomic<int> code{-1};      // absl::StatusCode, from when it has ended
  std::atomic<int> notified{0};
  std::atomic<int> wrong{0};   // bytes of it were missing when it was announced
  std::atomic<int> parted{0};  // the target has disconnected, and uses the block otherwise
  std::atomic<int> frozen{0};  // `at_end` holds what the target had when it ended
  std::atomic<uint64_t> counter{0};
  RemoteCounter remote_counter;
  char words[200] = {};
  char at_end[kRealBlock];
};

struct RealSide {
  std::atomic<int> ready{0};  // address, region and counters are there
  std::atomic<int> began{0};  // the other side is connected
  std::atomic<int> done{0};   // all of its transfers have ended
  std::atomic<int> left{0};   // it has called disconnect()
  std::atomic<int> down{0};   // it has given the other one up
  std::atomic<int> cuts{0};
  std::atomic<int> port{0};  // it is called there
  std::atomic<uint64_t> resumed{0};
  char failure[2000] = {};
  char address[4096] = {};
  RemoteRegion remote;
};

struct RealShared {
  std::atomic<int> finish{0};
  std::atomic<int> killed{0};                   // one of the sides, where the network is the test's
  std::atomic<size_t> allowed{kRealTransfers};  // so many may have been submitted, in their order
  std::array<RealSide, 2> sides;
  std::array<RealItem, kRealTransfers> items;
};

// Where a schedule has a network of its own, whose faults the test makes.
struct RealNetwork {
  bool own = false;
  bool survives = true;  // faults are shorter than a lost peer is called again; else longer
};

// Made before the processes are, and mapped by them and by the test.
class RealSchedule {
 public:
  RealSchedule(std::string provider, uint64_t seed, RealNetwork network = {});
  ~RealSchedule();
  RealSchedule(const RealSchedule&) = delete;
  RealSchedule& operator=(const RealSchedule&) = delete;

  char* block(size_t side, size_t number, bool destination) const {
    return memory[side] + (destination ? kRealHalf : 0) + number * kRealBlock;
  }
  char* destination(size_t number) const { return block(plan[number].target(), number, true); }

  const std::string provider;
  const uint64_t seed;
  const RealNetwork network;
  std::vector<std::pair<std::string, std::string>> settings;
  bool with_file = true;  // the memory is offered to be mapped
  std::array<RealPlan, kRealTransfers> plan;
  RealShared* shared = nullptr;
  std::array<int, 2> files{-1, -1};
  std::array<char*, 2> memory{};
};

// In a process of its own: one side of the schedule, to its end.
void run_real_side(RealSchedule& schedule, size_t side);

}  // namespace baton
