// What RCCL's host-only tests of RMA name (11 tests, 58 instances: one and two contexts, 4 KiB,
// 64 KiB and 1 MiB), written anew over the plugin file; and its stress.
//
// The provider is the plugin's choice: BATON_NCCL_PROVIDERS, which CMake sets for each.
#include "tests/nccl_rma/rma_rig.h"

namespace baton::nccl {
namespace {

using Rank = RmaRank<RmaV14>;
using Bytes = std::vector<std::byte>;
constexpr size_t kSignalBytes = 64;
constexpr int kInFlight = 16;

class RmaCalls : public testing::TestWithParam<std::tuple<int, size_t>> {
 public:
  static int contexts() { return std::get<0>(GetParam()); }
  static size_t size() { return std::get<1>(GetParam()); }
  template <typename Body>
  void run(Body&& body) {
    run_ranks<RmaV14>("ncclRmaPlugin_v14", 2, contexts(), body);
  }
};

// A put with a signal of `operation`; the word must then be `wanted`.
void put_with_signal(Rank& self, size_t size, uint32_t operation, uint64_t value, uint64_t wanted) {
  Memory memory(self, size);
  if (self.rank == 0) {
    self.finish(self.put_signal(0, 0, memory.source, size, 0, memory.target, 1,
                                {.words = memory.signals, .value = value, .operation = operation}));
  } else {
    EXPECT_EQ(self.wait_word(memory.words, 1), wanted);
    EXPECT_TRUE(filled(memory.to.data(), size, memory.kSeed));  // and needs no barrier
  }
  self.barrier();
  if (self.rank == 0) {
    EXPECT_TRUE(all_are(memory.words.data(), memory.words.size(), std::byte{}));
  }
}
TEST_P(RmaCalls, PutSignalInc) {
  run([](Rank& self) { put_with_signal(self, size(), kSignalInc, 0, 1); });
}
TEST_P(RmaCalls, PutSignalAdd) {
  run([](Rank& self) { put_with_signal(self, size(), kSignalAdd, 42, 42); });
}

TEST_P(RmaCalls, PutSignalAtOffset) {
  run([](Rank& self) {
    const size_t offset = size() / 2;
    constexpr size_t kWord = 64;
    constexpr std::byte kUntouched{0xcc};
    Bytes from(2 * size()), to(2 * size(), kUntouched), words(2 * kSignalBytes, kUntouched);
    fill(from.data() + offset, size(), 0xa5);
    std::memset(words.data() + kWord, 0, sizeof(uint64_t));
    void* const source = self.add(from);
    void* const target = self.add(to);
    void* const signals = self.add(words);
    self.barrier();
    if (self.rank == 0) {
      self.finish(self.put_signal(0, offset, source, size(), offset, target, 1,
                                  {.words = signals, .offset = kWord}));
    } else {
      EXPECT_EQ(self.wait_word(words, 1, kWord), 1u);
      EXPECT_TRUE(filled(to.data() + offset, size(), 0xa5));
      EXPECT_TRUE(all_are(to.data(), offset, kUntouched));
      const size_t end = offset + size();
      EXPECT_TRUE(all_are(to.data() + end, to.size() - end, kUntouched));
      EXPECT_TRUE(all_are(words.data(), kWord, kUntouched));
      EXPECT_TRUE(all_are(words.data() + kWord + 8, words.size() - kWord - 8, kUntouched));
    }
    self.barrier();
  });
}

TEST_P(RmaCalls, FlushAfterGet) {
  run([](Rank& self) {
    Bytes data(size());
    if (self.rank == 1) fill(data.data(), size(), 0x71);
    void* const memory = self.add(data);
    self.barrier();
    if (self.rank == 0) {
      self.finish(self.get(0, 0, memory, size(), 0, memory, 1));
      self.finish(self.flush(0, memory, 1));
      EXPECT_TRUE(filled(data.data(), size(), 0x71));
    }
    self.barrier();
  });
}

// Blocks that rank 0 puts or gets, all at once, on its contexts in turn.
void move_many(Rank& self, int contexts, size_t size, bool puts) {
  Memory memory(self, kInFlight * size);
  const auto seed = [](int rank, unsigned block) {
    return static_cast<unsigned>(50 * rank) + block;
  };
  for (unsigned i = 0; i < kInFlight; ++i) {
    fill(memory.from.data() + i * size, size, seed(self.rank, i));
  }
  self.barrier();
  if (self.rank == 0) {
    std::vector<void*> requests;
    for (size_t i = 0; i < kInFlight; ++i) {
      const int number = static_cast<int>(i) % contexts;
      const size_t at = i * size;
      requests.push_back(puts ? self.put(number, at, memory.source, size, at, memory.target, 1)
                              : self.get(number, at, memory.source, size, at, memory.target, 1));
    }
    for (void* request : requests) self.finish(request);
  }
  self.barrier();
  const int source = puts ? 0 : 1;
  for (unsigned i = 0; i < kInFlight && self.rank != source; ++i) {
    EXPECT_TRUE(filled(memory.to.data() + i * size, size, seed(source, i))) << "block " << i;
  }
}
TEST_P(RmaCalls, ManyPutsInFlight) {
  run([](Rank& self) { move_many(self, contexts(), size(), true); });
}
TEST_P(RmaCalls, ManyGetsInFlight) {
  run([](Rank& self) { move_many(self, contexts(), size(), false); });
}

TEST_P(RmaCalls, PutGetAndPutSignalMixed) {
  run([](Rank& self) {
    Bytes put_from(size()), put_to(size()), got(size()), from(size()), to(size()),
        words(kSignalBytes);
    fill(put_from.data(), size(), 0x10);
    fill(from.data(), size(), 0x30);
    if (self.rank == 1) fill(got.data(), size(), 0x20);
    void* const put_source = self.add(put_from);
    void* const put_target = self.add(put_to);
    void* const both = self.add(got);
    void* const source = self.add(from);
    void* const target = self.add(to);
    void* const signals = self.add(words);
    self.barrier();
    if (self.rank == 0) {
      void* const put = self.put(0, 0, put_source, size(), 0, put_target, 1);
      void* const get = self.get(1 % contexts(), 0, both, size(), 0, both, 1);
      void* const signalled =
          self.put_signal(2 % contexts(), 0, source, size(), 0, target, 1, {.words = signals});
      self.finish(signalled);  // in another order than they began
      self.finish(get);
      self.finish(put);
      EXPECT_TRUE(filled(got.data(), size(), 0x20));
    } else {
      EXPECT_EQ(self.wait_word(words, 1), 1u);
      EXPECT_TRUE(filled(to.data(), size(), 0x30));
    }
    self.barrier();
    if (self.rank == 1) {
      EXPECT_TRUE(filled(put_to.data(), size(), 0x10));
    }
  });
}

std::string size_name(size_t size) {
  return size < 1 << 20 ? std::to_string(size >> 10) + "KiB" : std::to_string(size >> 20) + "MiB";
}
INSTANTIATE_TEST_SUITE_P(ContextsAndSize, RmaCalls,
                         testing::Combine(testing::Values(1, 2),
                                          testing::Values(size_t{4} << 10, size_t{64} << 10,
                                                          size_t{1} << 20)),
                         [](const auto& of) {
                           return "Contexts" + std::to_string(std::get<0>(of.param)) + "_" +
                                  size_name(std::get<1>(of.param));
                         });

class RmaCallsOfOneSize : public testing::TestWithParam<int> {};

TEST_P(RmaCallsOfOneSize, ASignalWithoutBytes) {
  run_ranks<RmaV14>("ncclRmaPlugin_v14", 2, GetParam(), [](Rank& self) {
    Memory memory(self);
    const Rank::Signal signal{.words = memory.signals};
    if (self.rank == 0) {
      self.finish(self.put_signal(0, 0, memory.source, 0, 0, memory.target, 1, signal));
      // As NCCL signals an address of a window's: no memory of a put is named.
      self.finish(self.put_signal(0, 0, nullptr, 0, 0, nullptr, 1, signal));
    } else {
      EXPECT_EQ(self.wait_word(memory.words, 2), 2u);
      EXPECT_TRUE(all_are(memory.to.data(), memory.to.size(), std::byte{}));
    }
    self.barrier();
  });
}

TEST_P(RmaCallsOfOneSize, ASignalThatIsNone) {
  run_ranks<RmaV14>("ncclRmaPlugin_v14", 2, GetParam(), [](Rank& self) {
    Memory memory(self);
    void* request = nullptr;
    EXPECT_EQ(
        self.try_put_signal(0, 0, memory.source, memory.kSize, 0, memory.target, 1 - self.rank,
                            {.words = memory.signals, .value = 1, .operation = 0x99}, &request),
        Result::kInvalidArgument);
    EXPECT_EQ(request, nullptr);
    self.barrier();
  });
}
INSTANTIATE_TEST_SUITE_P(Contexts, RmaCallsOfOneSize, testing::Values(1, 2),
                         [](const auto& of) { return "Contexts" + std::to_string(of.param); });

TEST(RmaStress, TenThousandSignalsInAWindowOf16) {
  run_ranks<RmaV14>("ncclRmaPlugin_v14", 2, 1, [](Rank& self) {
    constexpr size_t kSignals = 10'000;
    constexpr size_t kBytes = 256;
    Memory memory(self, kBytes);
    if (self.rank == 0) {
      std::array<void*, kInFlight> window{};
      for (size_t i = 0; i < kSignals; ++i) {
        void*& place = window[i % kInFlight];
        self.finish(place);
        place = self.put_signal(0, 0, memory.source, kBytes, 0, memory.target, 1,
                                {.words = memory.signals});
      }
      for (void* request : window) self.finish(request);
    } else {
      EXPECT_EQ(self.wait_word(memory.words, kSignals), kSignals);
      EXPECT_TRUE(filled(memory.to.data(), kBytes, memory.kSeed));
    }
    self.barrier();
    if (self.rank == 1) {
      EXPECT_EQ(self.wait_word(memory.words, 0), kSignals);
    }
  });
}

}  // namespace
}  // namespace baton::nccl
