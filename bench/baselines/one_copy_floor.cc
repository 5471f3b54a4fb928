// The one-copy floor: two threads that add straight from each other's vectors, and a flag between.
#include "bench/baselines/one_copy_floor.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "absl/status/status.h"
#include "bench/report/child_process.h"
#include "collectives/reduce/reduce.h"
#include "hwy/base.h"
#include "hwy/cache_control.h"
#include "transport/clock.h"

namespace baton::bench {
namespace {

// How far a side has come. On a cache line of its own.
struct alignas(128) Flag {
  std::atomic<uint64_t> steps{0};
};

struct Side {
  std::vector<float> in;
  std::vector<float> out;
  std::vector<double> us;
  Flag flag;
};

void run(Side& own, Side& peer, bool first, int iterations, int warmup) {
  const size_t count = own.in.size();
  const size_t half = count / 2;
  // The first side owns the first half.
  const size_t begin = first ? 0 : half, length = first ? half : count - half;
  const size_t other = first ? half : 0, other_length = count - length;
  uint64_t step = 0;
  const auto meet = [&] {
    own.flag.steps.store(++step, std::memory_order_release);
    while (peer.flag.steps.load(std::memory_order_acquire) < step) hwy::Pause();
  };
  const auto now = [] {
    return std::chrono::duration<double, std::micro>(Clock::steady().now()).count();
  };
  meet();
  double from = now();
  for (int i = -warmup; i < iterations; ++i) {
    collectives::reduce::reduce(DataType::kF32, ReduceOp::kSum, own.out.data() + begin,
                                own.in.data() + begin, peer.in.data() + begin, length);
    meet();
    std::memcpy(own.out.data() + other, peer.out.data() + other, other_length * sizeof(float));
    meet();  // before either side writes again what the other may still read
    const double to = now();
    if (i >= 0) own.us[static_cast<size_t>(i)] = to - from;
    from = to;
  }
}

}  // namespace

absl::StatusOr<std::vector<double>> one_copy_loop(size_t bytes, int iterations, int warmup) {
  const std::vector<int>& cpus = allowed_cpus();
  if (cpus.size() < 2) return absl::UnavailableError("the one-copy loop needs two cores");
  std::array<Side, 2> sides;
  for (Side& side : sides) {
    side.in.assign(bytes / sizeof(float), 1);
    side.out.assign(bytes / sizeof(float), 0);
    side.us.resize(static_cast<size_t>(iterations));
  }
  // Threads take a while to get to their cores.
  warmup = std::max(warmup, 20);
  const auto body = [&](size_t i) {
    pin_to(cpus[i]);
    run(sides[i], sides[1 - i], i == 0, iterations, warmup);
  };
  std::thread first(body, 0), second(body, 1);
  first.join();
  second.join();
  std::vector<double> us(static_cast<size_t>(iterations));
  for (size_t i = 0; i < us.size(); ++i) us[i] = (sides[0].us[i] + sides[1].us[i]) / 2;
  return us;
}

}  // namespace baton::bench
