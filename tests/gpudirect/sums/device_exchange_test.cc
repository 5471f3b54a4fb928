// all_reduce from device to device (collectives/devices/device_exchange.h): the bits of the host's
// memory, whoever has which kind of memory, in whatever order calls overlap; nothing is staged.
#include "absl/strings/str_cat.h"
#include "tests/communicator/group.h"
#include "tests/fails_with.h"
#include "tests/gpudirect/placed.h"
#include "tests/sanitized.h"
#include "tests/std.h"
#include "tests/until.h"

namespace baton {
namespace {

using gpudirect::InstalledFake;
using testing::HasSubstr;

struct Gpu : gpudirect::CleanFake {
  explicit Gpu(uint64_t seed)
      : CleanFake({.seed = seed, .memory_bytes = size_t{1} << 30}, with_kernels()) {}
};

CommunicatorOptions exchange_options(const std::string& sums = "auto") {
  CommunicatorOptions options = test_options("shm");
  options.tune = false;
  options.worker.settings = {{"staging.sums", sums}, {"staging.ring_mib", "16"}};
  return options;
}

// Floats whose sums depend on their order.
std::vector<std::byte> floats_of(int rank, size_t bytes) {
  std::mt19937 random(static_cast<uint32_t>(rank) + 1);
  std::vector<float> values((bytes + 3) / 4);
  for (float& value : values) value = 0.5f + static_cast<float>(random() % 100'003) * 0.0013f;
  std::vector<std::byte> out(bytes);
  std::memcpy(out.data(), values.data(), bytes);
  return out;
}

// What a rank gets, and whether its input was left alone.
std::vector<std::byte> reduced(Communicator& comm, InstalledFake* gpu, size_t bytes, DataType type,
                               ReduceOp op, bool in_place) {
  const std::vector<std::byte> sent = floats_of(comm.rank(), bytes);
  Bytes in(gpu, sent), out(gpu, std::vector<std::byte>(bytes));
  std::byte* const to = in_place ? in.data() : out.data();
  EXPECT_EQ(comm.all_reduce(in.data(), to, bytes / size_of(type), type, op,
                            {.ordered = true, .factor = sent.data()}),
            absl::OkStatus());
  if (in_place) return in.get();
  EXPECT_EQ(in.get(), sent) << "an input has changed";
  return out.get();
}

TEST(DeviceExchange, HasTheHostsBitsAndTouchesNoMemoryOfTheHosts) {
  for (int ranks = 2; ranks <= 4; ++ranks) {
    Gpu gpu(static_cast<uint64_t>(ranks));
    run_group(ranks, exchange_options(), [&](Communicator& comm) {
      // The least; odd ones; several pieces, of which the last parts are short or empty.
      std::vector<size_t> sizes = {size_t{256} << 10, 300'004, 1'000'012};
      if (ranks == 3) sizes.push_back((size_t{33} << 20) + 4);
      for (size_t i = 0; i < sizes.size(); ++i) {
        const size_t bytes = sizes[i];
        for (const bool in_place : {false, true}) {
          if (!tried_together(i + static_cast<size_t>(ranks), in_place ? 1 : 0, 2)) continue;
          const uint64_t before = comm.stats().staged_bytes;
          const auto host = reduced(comm, nullptr, bytes, DataType::kF32, ReduceOp::kSum, in_place);
          ASSERT_TRUE(reduced(comm, &gpu, bytes, DataType::kF32, ReduceOp::kSum, in_place) == host)
              << ranks << " ranks, " << bytes << " bytes";
          EXPECT_EQ(comm.stats().staged_bytes, before);
        }
      }
      EXPECT_THAT(comm.explain(Collective::kAllReduce, 1'000'012, {.ordered = true}),
                  HasSubstr("sums of f32: 1, by a kernel of CUDA device 0, from device to device"));
    });
  }
}

TEST(DeviceExchange, EveryTypeAndOperation) {
  Gpu gpu(5);
  run_group(3, exchange_options(), [&](Communicator& comm) {
    for (int type = 0; type < kDataTypes; ++type) {
      for (int op = 0; op < kReduceOps; ++op) {
        const auto element = static_cast<DataType>(type);
        const auto how = static_cast<ReduceOp>(op);
        // Of floats read as other floats some are no numbers, whose bits are nobody's.
        if ((is_float(element) && element != DataType::kF32) || !combines(element, how)) continue;
        constexpr size_t kBytes = 262'144 + 4096;
        const auto host = reduced(comm, nullptr, kBytes, element, how, false);
        ASSERT_TRUE(reduced(comm, &gpu, kBytes, element, how, false) == host)
            << std::string(name_of(element)) << " " << std::string(name_of(how));
      }
    }
  });
}

// Each call is decided by itself: only where all ranks have it on devices it goes that way.
TEST(DeviceExchange, RanksWithOtherMemoryHaveTheSameBits) {
  Gpu gpu(7);
  std::atomic<uint64_t> staged{0};
  run_group(3, exchange_options(), [&](Communicator& comm) {
    constexpr size_t kBytes = 1 << 20;
    const auto host = reduced(comm, nullptr, kBytes, DataType::kF32, ReduceOp::kSum, false);
    for (int turn = 0; turn < 16; ++turn) {
      const bool on_device = turn == 0 || turn == 7 || (turn >> (comm.rank() % 3) & 1) != 0;
      ASSERT_TRUE(reduced(comm, on_device ? &gpu : nullptr, kBytes, DataType::kF32, ReduceOp::kSum,
                          turn % 5 == 0) == host)
          << turn;
    }
    staged += comm.stats().staged_bytes;
  });
  EXPECT_GT(staged.load(), 0u);
}

// Calls of both kinds at once, large and small, begun in one go: they end in order, each with its
// own bytes.
TEST(DeviceExchange, CallsOverlap) {
  Gpu gpu(9);
  run_group(2, exchange_options(), [&](Communicator& comm) {
    struct Call {
      std::unique_ptr<Bytes> in, out;
      Work work;
      uint8_t value = 0;
    };
    const auto rank = static_cast<size_t>(comm.rank());
    for (int round = 0; round < 2; ++round) {
      std::vector<Call> calls(12);
      for (size_t i = 0; i < calls.size(); ++i) {
        const size_t bytes = i % 4 == 3 ? 64 : (i + 1) * 270'000;
        const bool on_device = (i + rank * static_cast<size_t>(round)) % 3 != 0;
        calls[i].value = static_cast<uint8_t>(3 * i + rank);
        InstalledFake* const where = on_device ? &gpu : nullptr;
        calls[i].in = std::make_unique<Bytes>(where, all_of(bytes, calls[i].value));
        calls[i].out = std::make_unique<Bytes>(where, std::vector<std::byte>(bytes));
        auto work = comm.all_reduce_async(calls[i].in->data(), calls[i].out->data(), bytes,
                                          DataType::kU8, ReduceOp::kSum);
        ASSERT_TRUE(work.ok()) << work.status();
        calls[i].work = *work;
      }
      for (size_t i = calls.size(); i-- > 0;) {
        ASSERT_EQ(comm.wait(calls[i].work), absl::OkStatus());
      }
      for (size_t i = 0; i < calls.size(); ++i) {
        const std::vector<std::byte> got = calls[i].out->get();
        ASSERT_TRUE(got == std::vector<std::byte>(got.size(), std::byte(6 * i + 1))) << i;
      }
    }
  });
}

TEST(DeviceExchange, NotWhereASettingOrAnAlgorithmSaysSo) {
  for (const bool by_setting : {true, false}) {
    Gpu gpu(11);
    run_group(2, exchange_options(by_setting ? "cpus" : "auto"), [&](Communicator& comm) {
      constexpr size_t kBytes = 1 << 20;
      Bytes both(&gpu, all_of(kBytes, 1));
      CallOptions options{.ordered = true};
      if (!by_setting) options.algorithm = Algorithm::kDirect;
      ASSERT_TRUE(sum(comm, both, options).ok());
      EXPECT_TRUE(both.get() == all_of(kBytes, 2));
      EXPECT_EQ(comm.stats().staged_bytes, 2 * kBytes);
    });
    if (by_setting) {
      EXPECT_EQ(gpu.fake().calls_of("cuLaunchKernel"), 0u);
    }
  }
}

TEST(DeviceExchange, RanksThatCallSomethingElseHearOfIt) {
  Gpu gpu(13);
  run_group(2, exchange_options(), [&](Communicator& comm) {
    constexpr size_t kBytes = 1 << 20;
    Bytes both(&gpu, all_of(comm.rank() == 0 ? kBytes : kBytes / 2, 1));
    EXPECT_THAT(sum(comm, both),
                fails_with(Code::kInvalidArgument, {"ranks disagree about call #1"}));
  });
}

TEST(DeviceExchange, ARankThatDoesNotComeIsNamed) {
  Gpu gpu(15);
  std::atomic<bool> over{false};
  run_group(2, exchange_options(), [&](Communicator& comm) {
    if (comm.rank() == 1) {
      until([&] { return over.load(); }, [&] { comm.progress(); });
      return;
    }
    Bytes both(&gpu, all_of(1 << 20, 0));
    EXPECT_THAT(sum(comm, both, {.timeout = std::chrono::milliseconds(300)}),
                fails_with(Code::kDeadlineExceeded, {"rank 1", "has not made this call"}));
    over = true;
  });
}

// Communicators know nothing of each other, nor do the threads that drive them.
TEST(DeviceExchange, TwoGroupsAtOnce) {
  Gpu gpu(17);
  std::vector<std::thread> groups;
  for (int group = 0; group < 2; ++group) {
    groups.emplace_back([&gpu, group] {
      run_group(2, exchange_options(), [&](Communicator& comm) {
        for (size_t round = 0; round < 4; ++round) {
          const size_t bytes = 300'000 + round * 100'000 + static_cast<size_t>(group);
          const auto value = static_cast<uint8_t>(group + 1);
          Bytes both(&gpu, all_of(bytes, value));
          ASSERT_EQ(sum(comm, both), absl::OkStatus());
          ASSERT_TRUE(both.get() == all_of(bytes, static_cast<uint8_t>(2 * value)));
        }
      });
    });
  }
  for (std::thread& group : groups) group.join();
}

// Calls of the driver in turn: the collective fails at every rank with the driver's words, or
// it was one whose error changes nothing.
TEST(DeviceExchange, AnErrorAtAnyCallEndsItAtEveryRank) {
  std::atomic<size_t> failed{0};
  for (uint64_t k = 1; k <= 120; k += 5) {
    SCOPED_TRACE(k);
    Gpu gpu(k);
    run_group(2, exchange_options(), [&](Communicator& comm) {
      constexpr size_t kBytes = 600'000;
      Bytes first(&gpu, all_of(kBytes, 1)), second(&gpu, all_of(kBytes, 1));
      ASSERT_TRUE(sum(comm, first).ok());
      ASSERT_TRUE(comm.barrier().ok());
      // By turns a failure, and a device that is lost.
      if (comm.rank() == 0) {
        gpu.fake().fail_call_in(k, k % 2 == 0 ? gpudirect::kAssert : gpudirect::kNotSupported);
      }
      absl::Status status = comm.barrier();
      if (status.ok()) status = sum(comm, second);
      if (status.ok()) {
        EXPECT_TRUE(second.get() == all_of(kBytes, 2));
        return;
      }
      if (comm.rank() == 0) ++failed;
      EXPECT_THAT(text(status), testing::AnyOf(HasSubstr("fake"), HasSubstr("is lost"),
                                               HasSubstr("LAUNCH_FAILED")))
          << status;
    });
    gpu.fake().fail_call_in(0, gpudirect::kSuccess);
  }
  EXPECT_GT(failed.load(), 4u);
}

}  // namespace
}  // namespace baton
