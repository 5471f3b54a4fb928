// Puts, gets and signals in memory of a device, over the strict fake of its driver: NCCL's signals
// lie there.
#include "plugins/nccl/plugin.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/nccl_rma/rma_rig.h"

namespace baton::nccl {

extern "C" const RmaV16 ncclRmaPlugin_v16;

namespace {

using gpudirect::DevicePointer;
using gpudirect::InstalledFake;
using Rank = RmaRank<RmaV16>;
constexpr size_t kBytes = 3 << 20;  // more than a copy of the processor's takes at a time

std::string pattern(size_t bytes, unsigned seed) {
  std::string out(bytes, '\0');
  fill(reinterpret_cast<std::byte*>(out.data()), bytes, seed);
  return out;
}

// Memory of a device that is registered with a rank.
class Pages {
 public:
  Pages(InstalledFake& gpu, Rank& self, size_t bytes, const std::string& begins_with = "")
      : gpu_(gpu), at_(gpu.fake().allocate(std::max(bytes, 2 * gpudirect::kMiB))) {
    gpu.fake().write(at_, begins_with + std::string(bytes - begins_with.size(), '\0'));
    memory = self.add(reinterpret_cast<void*>(uintptr_t{at_}), bytes, kCudaPointer);
  }
  std::string read(size_t bytes, size_t offset = 0) {
    return gpu_.fake().read(at_ + offset, bytes);
  }
  uint64_t word(size_t offset = 0) {
    uint64_t value = 0;
    std::memcpy(&value, read(sizeof value, offset).data(), sizeof value);
    return value;
  }
  void free() { gpu_.fake().free(at_); }
  void* memory = nullptr;

 private:
  InstalledFake& gpu_;
  const DevicePointer at_;
};

class RmaDevices : public testing::TestWithParam<const char*> {
 public:
  void SetUp() override { setenv("BATON_NCCL_PROVIDERS", GetParam(), 1); }
  void TearDown() override { Plugin::get().reset(); }
  template <typename Body>
  void run(InstalledFake& gpu, Body&& body) {
    run_ranks(ncclRmaPlugin_v16, 2, 1, body);
    gpu.expect_clean();
  }
};
INSTANTIATE_TEST_SUITE_P(Over, RmaDevices, testing::Values("shm", "tcp"),
                         [](const auto& of) { return std::string(of.param); });

// Promise(nccl): Signals in memory of a device are never seen before the bytes of earlier puts |
//   both there, over a strict fake of the driver whose copies run late and in any order, shm and
//   tcp: with the n-th signal the first n puts are whole
TEST_P(RmaDevices, NoSignalOvertakesAPut) {
  constexpr size_t kPuts = 24;
  for (const uint64_t seed : {1u, 2u, 3u, 4u}) {
    InstalledFake gpu({.seed = seed});
    run(gpu, [&](Rank& self) {
      const size_t each = kBytes / kPuts;
      Pages from(gpu, self, kBytes, pattern(kBytes, 7)), to(gpu, self, kBytes),
          words(gpu, self, 64);
      self.barrier();
      std::vector<void*> requests;
      for (size_t i = 0; i < kPuts && self.rank == 0; ++i) {
        // The larger part without a signal, the rest with it.
        requests.push_back(self.put(0, i * each, from.memory, each - 8, i * each, to.memory, 1));
        const size_t rest = (i + 1) * each - 8;
        requests.push_back(self.put_signal(0, rest, from.memory, 8, rest, to.memory, 1,
                                           {.words = words.memory, .offset = 8, .strong = true}));
      }
      for (void* const request : requests) self.finish(request);
      size_t seen = 0;
      const std::string wanted = pattern(kBytes, 7);
      until([&] { return self.rank == 0 || seen == kPuts; },
            [&] {
              self.progress();
              seen = words.word(8);
              EXPECT_LE(seen, kPuts);
              EXPECT_EQ(to.read(seen * each), wanted.substr(0, seen * each)) << "signal " << seen;
            });
      self.barrier();
      self.leave();
      for (Pages* pages : {&from, &to, &words}) pages->free();
    });
  }
}

// Both ranks add to both ranks' words, their own among them, and nothing gets lost.
TEST_P(RmaDevices, WordsOfADeviceCountEverySignal) {
  InstalledFake gpu;
  run(gpu, [&](Rank& self) {
    Pages words(gpu, self, 64);
    self.barrier();
    std::vector<void*> requests;
    for (uint64_t i = 0; i < 200; ++i) {
      requests.push_back(self.put_signal(0, 0, nullptr, 0, 0, nullptr, static_cast<int>(i % 2),
                                         {.words = words.memory,
                                          .offset = 16,
                                          .value = i,
                                          .operation = kSignalAdd,
                                          .strong = i % 3 == 0}));
    }
    for (void* const request : requests) self.finish(request);
    const uint64_t each = self.rank == 0 ? 9'900 : 10'000;
    until([&] { return words.word(16) == 2 * each; }, [&] { self.progress(); });
    EXPECT_EQ(words.word(8), 0u);
    EXPECT_EQ(words.word(24), 0u);
    self.barrier();
    self.leave();
    words.free();
  });
}

// NCCL flushes so, and any other memory of the rank may be the other side.
TEST_P(RmaDevices, ARankPutsToItself) {
  InstalledFake gpu;
  run(gpu, [&](Rank& self) {
    std::vector<std::byte> host(kBytes), back(kBytes);
    fill(host.data(), kBytes, 3);
    Pages from(gpu, self, kBytes, pattern(kBytes, 9)), to(gpu, self, kBytes), words(gpu, self, 64);
    void* const in_host = self.add(host);
    void* const out_host = self.add(back);
    self.barrier();
    const Rank::Signal signal{.words = words.memory};
    self.finish(self.put_signal(0, 0, from.memory, kBytes, 0, to.memory, self.rank, signal));
    EXPECT_EQ(words.word(), 1u);
    EXPECT_EQ(to.read(kBytes), pattern(kBytes, 9));
    self.finish(self.put_signal(0, 1, in_host, 1'000, 5, to.memory, self.rank, signal));
    EXPECT_EQ(words.word(), 2u);
    EXPECT_EQ(to.read(1'000, 5), pattern(1'000, 4));
    self.finish(self.get(0, 0, to.memory, kBytes, 0, out_host, self.rank));
    EXPECT_TRUE(filled(back.data(), 5, 9));
    EXPECT_TRUE(filled(back.data() + 5, 1'000, 4));
    EXPECT_TRUE(filled(back.data() + 1'005, kBytes - 1'005, 9 + 1'005));
    self.barrier();
    self.leave();
    for (Pages* pages : {&from, &to, &words}) pages->free();
  });
}

// A device that fails while a word is added to is an error at both ranks, and no hang.
TEST_P(RmaDevices, ADeviceThatIsLostIsARemoteError) {
  InstalledFake gpu;
  run_ranks(ncclRmaPlugin_v16, 2, 1, [&](Rank& self) {
    Pages words(gpu, self, 64);
    self.barrier();
    if (self.rank == 0) gpu.fake().lose();
    std::vector<void*> requests;
    void* request = nullptr;
    if (self.rank == 0) {
      (void)self.try_put_signal(0, 0, nullptr, 0, 0, nullptr, 1, {.words = words.memory}, &request);
    }
    bool failed = false;
    until([&] { return failed; },
          [&] {
            (void)self.table.progress(self.context);
            EXPECT_EQ(self.table.query_last_error(self.context, &failed), Result::kSuccess);
          });
    self.leave();
  });
}

}  // namespace
}  // namespace baton::nccl
