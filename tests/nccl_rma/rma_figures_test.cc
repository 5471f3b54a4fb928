// What a put with a signal takes, printed and not judged: 8 bytes, two ranks of one process, each
// on a thread. The goals over shm: 2 us one way, a million in a second. BATON_RMA_SIGNALS=300000
// takes longer and says more.
#include "tests/nccl_rma/rma_rig.h"
#include "tests/seeds.h"

namespace baton::nccl {
namespace {

using Timed = RmaRank<RmaV16>;
using Steady = std::chrono::steady_clock;

double microseconds(Steady::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

// Half of a round trip: each signals when it sees the other's.
void ping_pong(Timed& self, void* memory, void* signals, const std::vector<std::byte>& words) {
  const uint64_t rounds = number_of("BATON_RMA_SIGNALS", 5000) / 5;
  std::vector<double> times;
  for (uint64_t round = 1; round <= rounds; ++round) {
    const auto start = Steady::now();
    void* const request = self.rank == 0 || self.wait_word(words, round) > 0
                              ? self.put_signal(0, 0, memory, 8, 8, memory, 1 - self.rank,
                                                {.words = signals, .strong = true})
                              : nullptr;
    if (self.rank == 0) self.wait_word(words, round);
    times.push_back(microseconds(Steady::now() - start) / 2);
    self.finish(request);
  }
  if (self.rank != 0) return;
  std::sort(times.begin(), times.end());
  std::printf("put + signal of 8 B: p50 %.2f us, p99 %.2f us\n", times[rounds / 2],
              times[rounds * 99 / 100]);
}

void stream(Timed& self, void* memory, void* signals, const std::vector<std::byte>& words,
            uint64_t before, int in_flight) {
  const uint64_t count = number_of("BATON_RMA_SIGNALS", 5000);
  self.barrier();
  const auto start = Steady::now();
  if (self.rank == 0) {
    std::vector<void*> window(static_cast<size_t>(in_flight));
    for (uint64_t i = 0; i < count; ++i) {
      void*& place = window[i % window.size()];
      self.finish(place);
      place = self.put_signal(0, 0, memory, 8, 8, memory, 1, {.words = signals, .strong = true});
    }
    for (void* request : window) self.finish(request);
  } else {
    self.wait_word(words, before + count);
    const double seconds = microseconds(Steady::now() - start) / 1e6;
    std::printf("%d in flight: %.2f million signals/s\n", in_flight,
                static_cast<double>(count) / seconds / 1e6);
  }
  self.barrier();
}

TEST(RmaFigures, PutAndSignal) {
  run_ranks<RmaV16>("ncclRmaPlugin_v16", 2, 1, [](Timed& self) {
    std::vector<std::byte> data(4096), words(64);
    void* const memory = self.add(data);
    void* const signals = self.add(words);
    self.barrier();
    ping_pong(self, memory, signals, words);
    for (const int in_flight : {1, 16, 256}) {
      stream(self, memory, signals, words, self.wait_word(words, 0), in_flight);
    }
  });
}

}  // namespace
}  // namespace baton::nccl
