// Who sums in collectives on memory of devices: the CPU or a kernel, with the same bits; which of
// the two is chosen, and what becomes of a call whose device fails while a kernel sums.
#include "absl/strings/str_cat.h"
#include "collectives/executor/device_sums.h"
#include "tests/communicator/group.h"
#include "tests/gpudirect/placed.h"
#include "tests/sanitized.h"
#include "tests/std.h"

namespace baton {
namespace {

using gpudirect::CleanFake;
using gpudirect::CudaMemory;
using gpudirect::InstalledFake;
using testing::HasSubstr;
using testing::Not;

CommunicatorOptions options_of(const std::string& provider, const std::string& sums) {
  CommunicatorOptions options = test_options(provider);
  options.tune = false;
  options.worker.settings = {{"staging.sums", sums}};
  return options;
}

// Small numbers of a type, whose sums and products depend on their order where they are floats; no
// NaN comes of them.
std::vector<std::byte> numbers_of(DataType type, size_t count, int rank) {
  std::mt19937 random(static_cast<uint32_t>(rank) * 8 + static_cast<uint32_t>(type));
  std::vector<std::byte> out(count * size_of(type));
  for (size_t i = 0; i < count; ++i) {
    const float value = 0.5f + static_cast<float>(random() % 1000) * 0.0013f;
    std::byte* const at = out.data() + i * size_of(type);
    if (type == DataType::kF32) {
      std::memcpy(at, &value, 4);
    } else if (type == DataType::kF64) {
      const double wide = value / 3.0;
      std::memcpy(at, &wide, 8);
    } else if (type == DataType::kBF16) {
      std::memcpy(at, reinterpret_cast<const std::byte*>(&value) + 2, 2);
    } else if (type == DataType::kF16) {
      const auto half = static_cast<uint16_t>(0x3800 + random() % 0x600);  // 0.5 to 2
      std::memcpy(at, &half, 2);
    } else if (is_float(type)) {  // of 8 bits, from 0.5 on
      *at = std::byte(0x30 + random() % 16);
    } else {
      const auto whole = static_cast<uint64_t>(random()) << 32 | random();
      std::memcpy(at, &whole, size_of(type));
    }
  }
  return out;
}

struct Shape {
  Collective collective;
  DataType type;
  ReduceOp op;
  bool ordered;
  bool in_place;
  size_t count;
};

// The bits that a rank gets, over the host's memory or the device's.
std::vector<std::byte> result_of(Communicator& comm, InstalledFake* gpu, const Shape& shape) {
  const auto n = static_cast<size_t>(comm.ranks());
  const size_t element = size_of(shape.type);
  const bool blocks = shape.collective == Collective::kReduceScatter;
  const size_t in_bytes = shape.count * element * (blocks ? n : 1);
  const size_t out_bytes = shape.count * element;
  const std::vector<std::byte> sent = numbers_of(shape.type, in_bytes / element, comm.rank());
  std::vector<std::byte> host_in = sent, host_out(out_bytes);
  std::optional<Bytes> there_in, there_out;
  std::byte* in = host_in.data();
  std::byte* out = host_out.data();
  if (gpu != nullptr) {
    // Some elements behind what is aligned.
    there_in.emplace(gpu, sent, shape.count % 3 * element);
    there_out.emplace(gpu, host_out, shape.count % 2 * element);
    in = there_in->data();
    out = there_out->data();
  }
  const size_t own = blocks ? static_cast<size_t>(comm.rank()) * out_bytes : 0;
  if (shape.in_place) out = in + own;
  const std::vector<std::byte> factor = numbers_of(shape.type, 1, 10 + comm.rank());
  const CallOptions options{.ordered = shape.ordered, .factor = factor.data()};
  absl::Status status;
  switch (shape.collective) {
    case Collective::kReduceScatter:
      status = comm.reduce_scatter(in, out, shape.count, shape.type, shape.op, options);
      break;
    case Collective::kReduce:
      status = comm.reduce(in, out, shape.count, shape.type, shape.op, 1, options);
      break;
    default:
      status = comm.all_reduce(in, out, shape.count, shape.type, shape.op, options);
  }
  EXPECT_TRUE(status.ok()) << status;
  if (shape.collective == Collective::kReduce && comm.rank() != 1) return {};
  if (gpu != nullptr) host_in = there_in->get();
  if (shape.in_place)
    return {host_in.begin() + static_cast<ptrdiff_t>(own),
            host_in.begin() + static_cast<ptrdiff_t>(own + out_bytes)};
  EXPECT_EQ(host_in, sent) << "an input has changed";
  return gpu != nullptr ? there_out->get() : host_out;
}

std::string shape_name(const Shape& shape) {
  return absl::StrCat(std::string(name_of(shape.collective)), " of ", shape.count, " ",
                      std::string(name_of(shape.type)), " ", std::string(name_of(shape.op)),
                      shape.ordered ? " ordered" : "", shape.in_place ? " in place" : "");
}

class CollectiveSums : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Over, CollectiveSums, testing::Values("shm", "tcp"),
                         [](const auto& test) { return std::string(test.param); });

// Promise(devices): A collective on device memory has the bits of host memory | steps are combined
//   on either side, one by one
TEST_P(CollectiveSums, EveryTypeAndOperationHasTheHostsBitsBothWays) {
  std::vector<Shape> shapes;
  size_t turn = 0;
  for (const Collective collective :
       {Collective::kAllReduce, Collective::kReduceScatter, Collective::kReduce}) {
    for (int type = 0; type < kDataTypes; ++type) {
      for (int op = 0; op < kReduceOps; ++op, ++turn) {
        if (!combines(static_cast<DataType>(type), static_cast<ReduceOp>(op))) continue;
        for (const bool ordered : {false, true}) {
          shapes.push_back({collective, static_cast<DataType>(type), static_cast<ReduceOp>(op),
                            ordered, turn % 2 == 0, 1 + turn * 7 % 251});
        }
      }
    }
  }
  // More than a piece, and more than a message; less than goes from device to device.
  for (const bool ordered : {false, true}) {
    shapes.push_back(
        {Collective::kAllReduce, DataType::kF32, ReduceOp::kSum, ordered, false, 60'001});
    shapes.push_back(
        {Collective::kReduceScatter, DataType::kBF16, ReduceOp::kAvg, ordered, true, 40'003});
  }
  const auto by_kernel =
      static_cast<size_t>(std::count_if(shapes.begin(), shapes.end(), [](const Shape& shape) {
        return collectives::executor::kernel_combines(shape.type, shape.op);
      }));
  const bool shm = std::string(GetParam()) == "shm";
  for (const std::string sums : {"kernel", "cpus"}) {
    for (int ranks = 2; ranks <= 4; ++ranks) {
      if (ranks != 3 && (sums == "cpus" || !shm)) continue;
      CleanFake gpu({.seed = static_cast<uint64_t>(ranks), .memory_bytes = size_t{1} << 30},
                    with_kernels());
      run_group(ranks, options_of(GetParam(), sums), [&](Communicator& comm) {
        for (size_t i = 0; i < shapes.size(); ++i) {
          // Ordered or not in turns, of each type with each operation.
          if (!tried_together(i / 2 + static_cast<size_t>(ranks), i % 2, 2)) continue;
          const Shape& shape = shapes[i];
          const auto host = result_of(comm, nullptr, shape);
          ASSERT_EQ(result_of(comm, &gpu, shape), host) << ranks << " ranks, " << shape_name(shape);
        }
      });
      const uint64_t launches = gpu.fake().calls_of("cuLaunchKernel");
      if (sums == "kernel") {
        EXPECT_GE(launches, by_kernel / (kSanitized ? 2 : 1))
            << "a sum at least at some rank of each that it combines";
      } else {
        EXPECT_EQ(launches, 0u);
      }
    }
  }
}

// Though a kernel's copies are taken to cost nothing, and any others much.
TEST_P(CollectiveSums, WhatOnlyMovesBytesLaunchesNoKernel) {
  CudaMemory::Options costs = with_kernels();
  costs.table = gpudirect::costs_that_favour(gpudirect::CopyWay::kKernel);
  CleanFake gpu({}, costs);
  run_group(3, options_of(GetParam(), "kernel"), [&](Communicator& comm) {
    constexpr size_t kCount = 30'000;
    const auto n = static_cast<size_t>(comm.ranks());
    const auto rank = static_cast<size_t>(comm.rank());
    const std::vector<std::byte> mine = all_of(kCount, static_cast<uint8_t>(rank + 1));
    Bytes one(&gpu, mine), all(&gpu, all_of(n * kCount, 0)), other(&gpu, all_of(n * kCount, 0));
    const DataType type = DataType::kU8;
    ASSERT_TRUE(comm.all_gather(one.data(), all.data(), kCount, type).ok());
    ASSERT_TRUE(comm.all_to_all(all.data(), other.data(), kCount, type).ok());
    EXPECT_EQ(other.get(), all_of(n * kCount, static_cast<uint8_t>(rank + 1)));
    ASSERT_TRUE(comm.broadcast(one.data(), one.data(), kCount, type, 2).ok());
    EXPECT_EQ(one.get(), all_of(kCount, 3));
    const std::vector<size_t> counts(n, 100), offsets = {7, 9000, 20'000};
    auto work =
        comm.all_to_all_v_async(all.data(), counts, offsets, other.data(), counts, offsets, type);
    ASSERT_TRUE(work.ok() && comm.wait(*work).ok());
    // Blocks of 1,000 and more, the last rank's first, and nothing between them.
    const std::vector<size_t> lengths = {1000, 0, 2000}, starts = {5000, 9, 100};
    other.put(all_of(n * kCount, 0x77));
    work = comm.all_gather_v_async(one.data(), lengths[rank], other.data(), lengths, starts, type);
    ASSERT_TRUE(work.ok() && comm.wait(*work).ok());
    std::vector<std::byte> wanted = all_of(n * kCount, 0x77);
    std::fill_n(wanted.begin() + 5000, 1000, std::byte{3});
    std::fill_n(wanted.begin() + 100, 2000, std::byte{3});
    EXPECT_TRUE(other.get() == wanted);
    one.put(mine);
    ASSERT_TRUE(comm.gather(one.data(), all.data(), kCount, type, 1).ok());
    if (rank == 1) {
      EXPECT_EQ(all.get()[0], std::byte{1});
      EXPECT_EQ(all.get()[n * kCount - 1], std::byte{3});
    }
    ASSERT_TRUE(comm.scatter(all.data(), one.data(), kCount, type, 1).ok());
    EXPECT_EQ(one.get(), mine);
    auto receive = must(comm.receive_async(other.data(), kCount, type, (comm.rank() + 2) % 3));
    ASSERT_TRUE(comm.send(one.data(), kCount, type, (comm.rank() + 1) % 3).ok());
    ASSERT_TRUE(comm.wait(receive).ok());
  });
  EXPECT_GT(gpu.fake().copies(), 0u);
  EXPECT_EQ(gpu.fake().calls_of("cuLaunchKernel"), 0u);
}

// Blocks of other lengths with the device's bytes between them; and the device's input times a
// factor of the rank's, of which the device has no copy.
TEST_P(CollectiveSums, UnevenBlocksAndFactorsAreCombinedRight) {
  CleanFake gpu({}, with_kernels());
  run_group(3, options_of(GetParam(), "kernel"), [&](Communicator& comm) {
    constexpr size_t kFloats = 5000;
    const auto rank = static_cast<size_t>(comm.rank());
    const std::vector<size_t> lengths = {1000, 3, 2000}, starts = {2500, 0, 100};
    Placed<float> in(&gpu, std::vector<float>(kFloats, 1)), out(&gpu, std::vector<float>(kFloats));
    const float factor = static_cast<float>(rank) + 2;
    auto work = must(comm.reduce_scatter_v_async(in.data(), lengths, starts, out.data(),
                                                 DataType::kF32, ReduceOp::kPreMulSum,
                                                 {.ordered = true, .factor = &factor}));
    ASSERT_EQ(comm.wait(work), absl::OkStatus());
    const std::vector<float> got = out.get();
    for (size_t i = 0; i < lengths[rank]; ++i) ASSERT_EQ(got[i], 2 + 3 + 4) << i;
    EXPECT_EQ(in.get(), std::vector<float>(kFloats, 1));
  });
  EXPECT_GT(gpu.fake().calls_of("cuLaunchKernel"), 0u);
}

// A call of one piece, a fold at each of two ranks: the input comes, the other's contribution goes,
// the sum comes, the result goes. What a rank has on its device is not brought there once more.
TEST(CollectiveSumsChosen, WhatIsOnTheDeviceIsTakenThere) {
  CleanFake gpu({}, with_kernels());
  run_group(2, options_of("shm", "kernel"), [&](Communicator& comm) {
    Bytes both(&gpu, all_of(1000, 1));
    const CallOptions options{.ordered = true, .algorithm = Algorithm::kDirect};
    ASSERT_TRUE(sum(comm, both, options).ok());
  });
  EXPECT_EQ(gpu.fake().calls_of("cuLaunchKernel"), 2u);
  EXPECT_EQ(gpu.fake().calls_of("cuMemcpyAsync"), 2 * 4u);
}

// Who sums, what explain() says of it, and whether kernels ran.
struct Chosen {
  const char* said;  // a regular expression
  bool by_kernel = false;
  const char* setting = "kernel";
  double start = 0;  // what a kernel's launch is taken to cost
  size_t count = 5000;
  ReduceOp op = ReduceOp::kSum;
  int ranks = 2;
  bool ordered = true;
  bool has_kernels = true;
};

// Promise(devices): What a device's kernel cannot combine, the CPU does | such types and operations
//   are staged, and explain() says so
TEST(CollectiveSumsChosen, ByCostBySettingAndByWhatTheKernelHas) {
  const Chosen cases[] = {
      {"sums of u8: [1-9][0-9]*, by a kernel of CUDA device 0 .* us, by CPUs", true, "auto", 0,
       20'000},
      {"sums of u8: [1-9][0-9]*, by CPUs .* us, by a kernel of CUDA device 0", false, "auto", 1e9,
       20'000},
      {"\\(staging.sums=kernel\\)", true, "kernel", 1e9},
      {"by CPUs, as staging.sums says", false, "cpus"},
      {.said = "by CPUs: no kernels: nvcc was not found", .has_kernels = false},
      {.said = "by CPUs: the kernel has no and of u8", .op = ReduceOp::kAnd},
      // Large enough to go from device to device.
      {.said = "by CPUs: the kernel has no and of u8", .count = 300'000, .op = ReduceOp::kAnd},
      {.said = "combines 8 vectors at a time, not 9", .count = 500, .ranks = 9},
      // Two at a time, as they come.
      {.said = "by a kernel", .by_kernel = true, .count = 500, .ranks = 9, .ordered = false}};
  for (const Chosen& each : cases) {
    SCOPED_TRACE(each.said);
    CudaMemory::Options memory = with_kernels(each.start);
    if (!each.has_kernels) memory.kernels = {};
    CleanFake gpu({}, memory);
    run_group(each.ranks, options_of("shm", each.setting), [&](Communicator& comm) {
      Bytes both(&gpu, all_of(each.count, 1));
      const CallOptions options{.ordered = each.ordered};
      ASSERT_TRUE(
          comm.all_reduce(both.data(), both.data(), each.count, DataType::kU8, each.op, options)
              .ok());
      const bool sum = each.op == ReduceOp::kSum;
      EXPECT_EQ(both.get(), all_of(each.count, sum ? static_cast<uint8_t>(each.ranks) : 1));
      if (comm.rank() != 0) return;
      EXPECT_THAT(comm.explain(Collective::kAllReduce, each.count, options),
                  testing::ContainsRegex(each.said));
    });
    EXPECT_EQ(gpu.fake().calls_of("cuLaunchKernel") > 0, each.by_kernel);
  }
  const auto wrong = Worker::create({.providers = {"shm"}, .settings = {{"staging.sums", "gpu"}}});
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("auto, cpus or kernel"));
}

// Every call of the driver in turn, from the first collective on and from the second, whose memory
// is there: the collective fails at every rank with the driver's words, or it was a call whose
// error changes nothing. Other communicators of the process go on.
TEST_P(CollectiveSums, AnErrorAtAnyCallEndsItAtEveryRank) {
  constexpr int kPair = 2;
  size_t failed = 0;
  const bool shm = std::string(GetParam()) == "shm";
  constexpr uint64_t kEach = kSanitized ? 3 : 1;
  for (uint64_t k = 2; k <= 160; k += kEach) {
    SCOPED_TRACE(k);
    CleanFake gpu({.seed = k}, with_kernels());
    std::atomic<int> failures{0};
    run_group(kPair, options_of(GetParam(), k % 3 == 0 ? "cpus" : "kernel"),
              [&](Communicator& comm) {
                constexpr size_t kCount = 20'000;
                const auto rank = static_cast<size_t>(comm.rank());
                const std::vector<float> ones(kCount, 1);
                Placed<float> both(&gpu, ones);
                const auto call = [&] {
                  return comm.all_reduce(both.data(), both.data(), kCount, DataType::kF32,
                                         ReduceOp::kSum, {.ordered = k % 4 < 2});
                };
                if (k % 2 == 0) {
                  ASSERT_TRUE(call().ok());
                  both.put(ones);
                }
                ASSERT_TRUE(comm.barrier().ok());
                if (rank == 0) gpu.fake().fail_call_in(k / 2, gpudirect::kNotSupported);
                // A rank that is ahead may have failed before all have heard of the barrier's end.
                absl::Status status = comm.barrier();
                if (status.ok()) status = call();
                if (status.ok()) {
                  EXPECT_EQ(both.get(), std::vector<float>(kCount, kPair));
                  return;
                }
                ++failures;
                EXPECT_THAT(std::string(status.message()), HasSubstr("fake")) << status;
                EXPECT_THAT(std::string(status.message()), Not(HasSubstr("waits for"))) << status;
              });
    failed += failures > 0 ? 1 : 0;
    gpu.fake().fail_call_in(0, gpudirect::kSuccess);
  }
  EXPECT_GT(failed, (shm ? 20u : 4u) / kEach);
}

TEST_P(CollectiveSums, ADeviceLostInASumEndsTheCallAndTheHostsMemoryGoesOn) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    CleanFake gpu({.seed = seed}, with_kernels());
    run_group(2, options_of(GetParam(), "kernel"), [&](Communicator& comm) {
      constexpr size_t kCount = 60'000;
      Bytes both(&gpu, all_of(kCount, 0));
      ASSERT_TRUE(sum(comm, both, {.ordered = true}).ok());
      comm.barrier().IgnoreError();
      if (comm.rank() == 1) gpu.fake().fail_next("cuLaunchKernel", gpudirect::kIllegalAddress);
      comm.barrier().IgnoreError();
      const absl::Status status = sum(comm, both, {.ordered = true});
      EXPECT_FALSE(status.ok());
      // Also who comes to the device when it is lost already.
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("CUDA device 0 is lost to this process: restart the process"))
          << status;
      EXPECT_FALSE(comm.status().ok());
    });
    // The device is lost to all of the process; the host's memory is not.
    run_group(2, options_of(GetParam(), "kernel"), [&](Communicator& comm) {
      std::vector<float> host(1000, 1);
      EXPECT_TRUE(
          comm.all_reduce(host.data(), host.data(), 1000, DataType::kF32, ReduceOp::kSum).ok());
      EXPECT_EQ(host, std::vector<float>(1000, 2));
    });
  }
}

}  // namespace
}  // namespace baton
