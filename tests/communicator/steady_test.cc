// In the steady state a call costs no heap allocation and no registration.
#include <atomic>

#include "tests/communicator/group.h"
#include "tests/count_allocations.h"

namespace baton {
namespace {

class Steady : public testing::TestWithParam<std::string> {};

// A queue may grow when it is longer than ever before, and when that is, the machine's other work
// decides: so one of several windows must be free of allocations. One per call is in all of them.
constexpr int kWindows = 10;

TEST_P(Steady, CallsAllocateAndRegisterNothing) {
  constexpr size_t kCount = 50000;
  std::atomic<uint64_t> made{0};  // in the last window, by both ranks
  run_group(2, test_options(GetParam()), [&made](Communicator& comm) {
    auto in = comm.allocate(2 * kCount * sizeof(float));
    auto out = comm.allocate(2 * kCount * sizeof(float));
    ASSERT_TRUE(in.ok() && out.ok());
    std::vector<float> plain(kCount, 1);
    auto round = [&] {
      for (size_t count : {size_t{2}, size_t{1000}, kCount}) {
        ASSERT_TRUE(
            comm.all_reduce(in->data, out->data, count, DataType::kF32, ReduceOp::kSum).ok());
        ASSERT_TRUE(
            comm.reduce_scatter(in->data, out->data, count, DataType::kBF16, ReduceOp::kMax).ok());
        ASSERT_TRUE(comm.all_gather(in->data, out->data, count, DataType::kF32).ok());
        ASSERT_TRUE(comm.broadcast(in->data, out->data, count, DataType::kI32, 1).ok());
        ASSERT_TRUE(comm.all_to_all(in->data, out->data, count, DataType::kF32).ok());
        ASSERT_TRUE(
            comm.all_reduce(plain.data(), plain.data(), count, DataType::kF32, ReduceOp::kMax)
                .ok());
      }
      ASSERT_TRUE(comm.barrier().ok());
    };
    for (int warm = 0; warm < 160; ++warm) round();
    const uint64_t registrations = comm.worker().stats().registrations;
    for (int window = 0; window == 0 || (window < kWindows && made > 0); ++window) {
      // Neither rank may begin the next window, or clean up, while the other still counts.
      ASSERT_TRUE(comm.barrier().ok());
      const uint64_t before = allocations.load();
      for (int i = 0; i < 30; ++i) round();
      ASSERT_TRUE(comm.barrier().ok());
      if (comm.rank() == 0) made = allocations.load() - before;
      ASSERT_TRUE(comm.barrier().ok());
    }
    EXPECT_EQ(made, 0u);
    EXPECT_EQ(comm.worker().stats().registrations, registrations);
  });
}

INSTANTIATE_TEST_SUITE_P(Providers, Steady, testing::Values("shm", "tcp"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
