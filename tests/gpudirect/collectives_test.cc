// Collectives on memory of devices: the bits that the host's memory gives, whoever has which kind,
// in any order of the copy engines; and a device that fails ends the call at every rank.
#include "tests/communicator/group.h"
#include "tests/gpudirect/placed.h"
#include "tests/std.h"

namespace baton {
namespace {

using gpudirect::CleanFake;
using gpudirect::DevicePointer;
using gpudirect::InstalledFake;
using testing::HasSubstr;

constexpr int kRanks = 3;

using Vector = Placed<float>;

// Sums of these depend on the order in which they are made.
std::vector<float> numbers(int rank, size_t count) {
  std::mt19937 random(static_cast<uint32_t>(rank + 1));
  std::vector<float> out(count);
  for (float& value : out) {
    value = std::ldexp(static_cast<float>(random() % 100003), static_cast<int>(random() % 40) - 20);
  }
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Everything a rank gets out of one round of all collectives.
std::vector<std::vector<float>> round(Communicator& comm, InstalledFake& gpu, bool in_on_device,
                                      bool out_on_device, size_t count) {
  const auto n = static_cast<size_t>(comm.ranks());
  const CallOptions ordered{.ordered = true};
  std::vector<std::vector<float>> out;
  const auto call = [&](size_t in_count, size_t out_count, auto&& run) {
    Vector in(in_on_device ? &gpu : nullptr, numbers(comm.rank(), in_count));
    Vector result(out_on_device ? &gpu : nullptr, std::vector<float>(out_count, -1));
    const absl::Status status = run(in.data(), result.data());
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(same_bits(in.get(), numbers(comm.rank(), in_count))) << "an input has changed";
    out.push_back(result.get());
  };
  const DataType type = DataType::kF32;
  call(count, count, [&](float* in, float* to) {
    return comm.all_reduce(in, to, count, type, ReduceOp::kSum, ordered);
  });
  call(n * count, count, [&](float* in, float* to) {
    return comm.reduce_scatter(in, to, count, type, ReduceOp::kSum, ordered);
  });
  call(count, n * count,
       [&](float* in, float* to) { return comm.all_gather(in, to, count, type); });
  call(count, count, [&](float* in, float* to) { return comm.broadcast(in, to, count, type, 1); });
  call(count, count, [&](float* in, float* to) {
    return comm.reduce(in, to, count, type, ReduceOp::kSum, 2, ordered);
  });
  call(n * count, n * count,
       [&](float* in, float* to) { return comm.all_to_all(in, to, count, type); });
  call(count, count, [&](float* in, float* to) {
    const int rank = comm.rank(), ranks = comm.ranks();
    auto receive = comm.receive_async(to, count, type, (rank + ranks - 1) % ranks);
    if (!receive.ok()) return receive.status();
    absl::Status status = comm.send(in, count, type, (rank + 1) % ranks);
    status.Update(comm.wait(*receive));
    return status;
  });
  // Blocks of other lengths for every rank, with holes between them that nobody writes.
  const size_t room = count + 3;
  call(n * room, n * room, [&](float* in, float* to) {
    std::vector<size_t> sends(n), receives(n), offsets(n);
    for (size_t r = 0; r < n; ++r) {
      sends[r] = (count + static_cast<size_t>(comm.rank())) / (r + 1);
      receives[r] = (count + r) / (static_cast<size_t>(comm.rank()) + 1);
      offsets[r] = r * room;
    }
    auto work = comm.all_to_all_v_async(in, sends, offsets, to, receives, offsets, type);
    return work.ok() ? comm.wait(*work) : work.status();
  });
  // In place: the three shapes of it.
  {
    Vector both(in_on_device ? &gpu : nullptr, numbers(comm.rank(), n * count));
    float* const own = both.data() + static_cast<size_t>(comm.rank()) * count;
    EXPECT_TRUE(
        comm.all_reduce(both.data(), both.data(), n * count, type, ReduceOp::kSum, ordered).ok());
    EXPECT_TRUE(comm.reduce_scatter(both.data(), own, count, type, ReduceOp::kSum, ordered).ok());
    const std::vector<float> scattered = both.get();
    // Only the own part is a result.
    out.emplace_back(scattered.begin() + static_cast<ptrdiff_t>(comm.rank() * count),
                     scattered.begin() + static_cast<ptrdiff_t>((comm.rank() + 1) * count));
    EXPECT_TRUE(comm.all_gather(own, both.data(), count, type).ok());
    out.push_back(both.get());
  }
  return out;
}

class DeviceCollectives : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Over, DeviceCollectives, testing::Values("shm", "tcp"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(DeviceCollectives, GiveTheBitsOfTheHostsMemory) {
  for (const uint64_t seed : {1u, 2u}) {
    CleanFake gpu({.seed = seed, .memory_bytes = size_t{1} << 30});
    run_group(kRanks, test_options(GetParam()), [&](Communicator& comm) {
      for (const size_t count : {size_t{1}, size_t{1000}, size_t{300001}}) {
        if (count > 1000 && seed > 1) continue;
        const auto host = round(comm, gpu, false, false, count);
        const auto device = round(comm, gpu, true, true, count);
        // Some ranks here and some there, and one side of a call each.
        const auto mixed = round(comm, gpu, comm.rank() == 1, comm.rank() != 1, count);
        for (size_t i = 0; i < host.size(); ++i) {
          EXPECT_TRUE(same_bits(device[i], host[i])) << "call " << i << " of " << count;
          EXPECT_TRUE(same_bits(mixed[i], host[i])) << "mixed, call " << i << " of " << count;
        }
      }
      EXPECT_GT(comm.stats().staged_calls, 0u);
      EXPECT_GT(comm.stats().staged_bytes, 0u);
      EXPECT_THAT(comm.routes(), HasSubstr("CUDA device 0: staged through 16 MiB"));
    });
    EXPECT_LE(gpu.fake().largest_copy(), size_t{4} << 20);
  }
}

// Promise(devices): Groups of one endpoint that sum on a device share its pinned memory: one that
//   ends takes nothing from the others | kernels of a second group, after the first has gone
TEST_P(DeviceCollectives, AGroupThatEndsLeavesMemoryPinnedForOthers) {
  CleanFake gpu({.memory_bytes = size_t{1} << 30});
  CommunicatorOptions options = test_options(GetParam());
  options.worker.settings.emplace_back("staging.sums", "kernel");
  run_group(kRanks, options, [&](Communicator& comm) {
    constexpr size_t kCount = 10000;
    const auto sum = [&](Communicator& group) {
      Vector both(&gpu, std::vector<float>(kCount, 1));
      const absl::Status status = group.all_reduce(both.data(), both.data(), kCount, DataType::kF32,
                                                   ReduceOp::kSum, {.algorithm = Algorithm::kRing});
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_EQ(both.get(), std::vector<float>(kCount, kRanks));
    };
    auto first = *comm.split(0, 0), second = *comm.split(0, 0);
    sum(*first);
    sum(*second);
    first.reset();
    sum(*second);
  });
}

TEST(DeviceCollectivesAlone, MemoryThatNoCallCanUse) {
  CleanFake gpu;
  run_group(1, test_options("shm"), [&](Communicator& comm) {
    std::vector<float> host(1000, 1);
    const auto refused = [&](DevicePointer at, size_t count) {
      return std::string(comm.all_reduce(gpudirect::pointer_of<void>(at), host.data(), count,
                                         DataType::kF32, ReduceOp::kSum)
                             .message());
    };
    const DevicePointer managed = gpu.fake().allocate(4096, 0, true);
    EXPECT_THAT(refused(managed, 1000), HasSubstr("managed"));
    gpu.fake().free(managed);
    const DevicePointer parts = gpu.fake().allocate_segments(2, 2 << 20);
    EXPECT_THAT(refused(parts + (2 << 20) - 400, 200), HasSubstr("2 allocations"));
    gpu.fake().free(parts);
    // The host's memory goes on.
    EXPECT_TRUE(
        comm.all_reduce(host.data(), host.data(), 1000, DataType::kF32, ReduceOp::kSum).ok());
    EXPECT_EQ(comm.stats().staged_calls, 0u);
  });
}

}  // namespace
}  // namespace baton
