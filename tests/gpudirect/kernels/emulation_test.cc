// What the emulation of a block refuses, and that it would find a missing barrier.
#include "tests/gpudirect/kernels/emulation.h"

#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/image.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/test.h"

namespace baton::gpudirect::kernels {
namespace {

using ::testing::HasSubstr;

// Copies 64 bytes with one piece whose ends the test has moved.
std::string fault_of(int64_t from_offset, int64_t to_offset, uint64_t bytes) {
  std::vector<Vector16> from(4), to(4);  // aligned as these are
  std::vector<Piece> pieces = {{reinterpret_cast<std::byte*>(from.data()) + from_offset,
                                reinterpret_cast<std::byte*>(to.data()) + to_offset, bytes}};
  EmulatedMemory memory;
  memory.allow(pieces);
  memory.allow(from);
  memory.allow(to, true);
  return run_kernel("baton_copy_pieces", CopyPieces{pieces.data(), 1, 1}, 1, memory).value_or("");
}

TEST(Emulation, AKernelTouchesWhatItIsGivenAndNothingElse) {
  EXPECT_EQ(fault_of(0, 0, 64), "");
  EXPECT_THAT(fault_of(0, 0, 65), HasSubstr("a load of 1 bytes"));
  EXPECT_THAT(fault_of(-16, 0, 64), HasSubstr("a load of 16 bytes"));
  EXPECT_THAT(fault_of(0, 16, 64), HasSubstr("a store of 16 bytes"));
  EXPECT_THAT(fault_of(0, 16, 64), HasSubstr("baton_copy_pieces, block 0"));
}

TEST(Emulation, WhatIsNotAlignedIsAFaultAsOnAGpu) {
  std::vector<float> x(64), y(64);
  EmulatedMemory memory;
  memory.allow(x);
  memory.allow(y, true);
  const auto* odd =
      reinterpret_cast<const float*>(reinterpret_cast<const std::byte*>(x.data()) + 2);
  const RmsNorm arguments{.x = odd, .weight = x.data(), .y = y.data(), .rows = 1, .size = 16};
  EXPECT_THAT(run_kernel("baton_rms_norm", arguments, 1, memory).value_or(""),
              HasSubstr("is not aligned"));
}

// What is wrong with accesses of a block of 64 threads to a shared array, and to one of one.
template <class Function>
std::string race_of(const Function& function, uint64_t seed) {
  EmulatedMemory memory;
  const Launch launch{.blocks = 1, .threads = 64, .seed = seed};
  EmulatedBlock block(memory, launch, 0);
  try {
    function(block, block.shared<uint32_t, 64>(), block.shared<uint32_t, 1>());
  } catch (const KernelFault& fault) {
    return fault.what;
  }
  return "";
}

TEST(Emulation, ARaceShowsWhateverTheOrder) {
  const auto first_puts = [](auto& block, auto* to) {
    return [&block, to](uint32_t thread) {
      if (thread == 0) block.put(to, 1u);
    };
  };
  const auto all_get = [](auto& block, auto* from) {
    return [&block, from](uint32_t) { block.get(from); };
  };
  for (uint64_t seed = 0; seed < 8; ++seed) {
    const auto race = [&](const char* what, const auto& function) {
      EXPECT_THAT(race_of(function, seed), HasSubstr("another thread touches")) << what;
    };
    const auto no_race = [&](const char* what, const auto& function) {
      EXPECT_EQ(race_of(function, seed), "") << what;
    };
    // A word that all read is overwritten, by each thread's own write or by the next round's.
    race("own writes", [&](auto& block, auto* places, auto*) {
      block.each([&](uint32_t thread) {
        block.get(places + 63 - thread);
        block.put(places + thread, thread);
      });
    });
    race("the next round's", [&](auto& block, auto* places, auto*) {
      block.each_warp(all_get(block, places));
      block.each(first_puts(block, places));
    });
    race("behind all threads' read", [&](auto& block, auto* places, auto*) {
      block.get(places);
      block.each(first_puts(block, places));
    });
    no_race("a barrier between them", [&](auto& block, auto* places, auto*) {
      block.each(all_get(block, places));
      block.each(first_puts(block, places));
      block.each(all_get(block, places));
    });
    no_race("the warp's own barrier", [&](auto& block, auto* places, auto*) {
      for (uint32_t round = 0; round < 2; ++round) {
        block.each_warp([&](uint32_t thread) { block.put(places + thread, round); });
        block.each_warp([&](uint32_t thread) { block.get(places + (thread ^ 1)); });
      }
    });
    // Many may add to a word, and none may read it meanwhile.
    no_race("many add", [&](auto& block, auto* places, auto*) {
      block.each([&](uint32_t) { block.add(places, 1u); });
      block.each(all_get(block, places));
    });
    race("one reads while others add", [&](auto& block, auto* places, auto*) {
      block.each([&](uint32_t thread) {
        block.add(places, 1u);
        if (thread == 9) block.get(places);
      });
    });
  }
}

TEST(Emulation, AVariableIsNotReadAndWrittenBetweenTwoBarriers) {
  const auto update = [](auto& block, const auto* from, auto* to) {
    block.each([&](uint32_t thread) {
      if (thread == 0) block.put(to, block.get(from) + 1);
    });
  };
  EXPECT_THAT(race_of([&](auto& block, auto*, auto* one) { update(block, one, one); }, 1),
              HasSubstr("both read and written"));
  EXPECT_EQ(race_of([&](auto& block, auto* places, auto* one) { update(block, places, one); }, 1),
            "");
}

// A block of 64 threads whose first warp copies 64 bytes in four runs.
struct BulkCopies {
  BulkCopies() {
    std::iota(from.begin(), from.end(), 1u);
    memory.allow(from);
    block.each([&](uint32_t thread) {
      if (thread == 0) block.make_arrival(arrival);
    });
  }
  void begin(uint32_t all = 64, uint32_t offset = 0) {
    block.each_free([&](uint32_t thread) {
      if (thread >= 32) return;
      const uint32_t* const run = thread < 4 ? from.data() + thread * 4 : nullptr;
      block.copy_runs(arrival, all, to + thread % 4 * 4 + offset, run, 16);
    });
  }
  bool there() const { return std::memcmp(to, from.data(), 64) == 0; }

  std::vector<uint32_t> from = std::vector<uint32_t>(16);
  EmulatedMemory memory;
  Launch launch{.blocks = 1, .threads = 64};
  EmulatedBlock block{memory, launch, 0};
  uint32_t* to = reinterpret_cast<uint32_t*>(block.shared<Vector16, 4>());
  uint64_t* arrival = block.shared<uint64_t, 2>();
};

std::string fault_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const KernelFault& fault) {
    return fault.what;
  }
  return "";
}

TEST(Emulation, CopiesInBulkAreThereOnceAllHaveWaited) {
  BulkCopies copies;
  for (uint32_t use = 0; use < 3; ++use) {
    copies.begin();
    EXPECT_FALSE(copies.there());  // and what was there before is not either
    EXPECT_TRUE(copies.block.copies_wait());
    copies.block.await_arrival(copies.arrival, use);
    EXPECT_TRUE(copies.there());
    EXPECT_FALSE(copies.block.copies_wait());
    copies.block.each([](uint32_t) {});
  }
}

TEST(Emulation, CopiesInBulkToWhereOthersMayReadAreAFault) {
  BulkCopies copies;
  copies.begin();
  copies.block.await_arrival(copies.arrival, 0);
  copies.block.each_warp([](uint32_t) {});
  EXPECT_THAT(fault_of([&] { copies.begin(); }), HasSubstr("no barrier"));
}

TEST(Emulation, AWaitForCopiesInBulkThatWouldNotEndIsAFault) {
  BulkCopies copies;
  const auto await = [&](uint32_t use) {
    return fault_of([&] { copies.block.await_arrival(copies.arrival, use); });
  };
  EXPECT_THAT(await(0), HasSubstr("not begun"));
  copies.begin(80);
  EXPECT_THAT(await(0), HasSubstr("not so many"));
  EXPECT_THAT(fault_of([&] { copies.begin(); }), HasSubstr("last use is not over"));
  BulkCopies again;
  again.begin();
  EXPECT_THAT(fault_of([&] { again.block.await_arrival(again.arrival, 1); }),
              HasSubstr("not begun"));
}

TEST(Image, IsAFatBinaryWhereNvccWas) {
  if (image().empty()) GTEST_SKIP() << "built without nvcc: there are no kernels";
  uint32_t magic = 0;
  std::memcpy(&magic, image().data(), sizeof magic);
  EXPECT_EQ(magic, 0xba55ed50u);  // a fat binary
}

}  // namespace
}  // namespace baton::gpudirect::kernels
