// Sums by the kernel, part by part: long ones, many at a time, what they are taken to cost, errors.
#include "gpudirect/contract/kernel_sums.h"

#include "collectives/reduce/reduce.h"
#include "tests/gpudirect/fake/with_device.h"
#include "tests/until.h"

namespace baton::gpudirect {
namespace {

using internal::VectorSum;
using Source = VectorSum::Source;

class KernelSumsTest : public WithDevice {
 protected:
  KernelSumsTest() : WithDevice({.seed = 3}) {}
  std::unique_ptr<KernelSums> make(const SumCosts& costs = {}, const CopyTable& copies = {}) {
    return must(KernelSums::create(*device_, *launcher_, copies, costs));
  }
  static absl::Status wait(KernelSums& sums, size_t slot) {
    std::optional<absl::Status> ended;
    until([&] { return (ended = sums.ended(slot)).has_value(); });
    return *ended;
  }
};

std::vector<float> floats(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> out(count);
  for (float& value : out)
    value = std::ldexp(static_cast<float>(random() % 99991), static_cast<int>(random() % 30) - 15);
  return out;
}

std::byte* as_bytes(std::vector<float>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

// Three parts: one of two sources of the host is pinned, and the target; the device's begins
// between two lines.
TEST_F(KernelSumsTest, ALongSumGoesInParts) {
  constexpr size_t kCount = 200'003;
  std::vector<float> loose = floats(kCount, 1), pinned = floats(2 * kCount, 2),
                     there = floats(kCount, 3);
  const DevicePointer at = fake_.allocate(kCount * 4 + 4) + 4;
  std::memcpy(fake_.view(at, kCount * 4), there.data(), kCount * 4);
  auto sums = make();
  ASSERT_TRUE(sums->pin({as_bytes(pinned), pinned.size() * 4}).ok());
  const std::array<Source, 3> sources = {
      {{as_bytes(pinned), false}, {pointer_of<std::byte>(at), true}, {as_bytes(loose), false}}};
  std::vector<float> first(pinned.begin(), pinned.begin() + kCount);
  ASSERT_TRUE(
      sums->begin(0, {.count = kCount, .sources = sources, .target = as_bytes(pinned) + kCount * 4})
          .ok());
  ASSERT_TRUE(wait(*sums, 0).ok());
  std::vector<float> right(kCount);
  collectives::reduce::fold(DataType::kF32, ReduceOp::kSum, right.data(),
                            std::array<const void*, 3>{first.data(), there.data(), loose.data()},
                            kCount);
  EXPECT_EQ(std::memcmp(as_bytes(right), as_bytes(pinned) + kCount * 4, kCount * 4), 0);
  EXPECT_EQ(std::memcmp(as_bytes(first), as_bytes(pinned), kCount * 4), 0)
      << "a source has changed";
  EXPECT_EQ(fake_.calls_of("cuLaunchKernel"), 3u);
  fake_.free(at - 4);
}

TEST_F(KernelSumsTest, TheEndOfThemWaitsForSums) {
  std::vector<float> values = floats(100'000, 1);
  auto sums = make();
  ASSERT_TRUE(sums->begin(0, {}).ok());
  EXPECT_TRUE(wait(*sums, 0).ok()) << "there is nothing to end";
  const std::array<Source, 2> twice = {{{as_bytes(values)}, {as_bytes(values)}}};
  ASSERT_TRUE(
      sums->begin(2, {.count = values.size(), .sources = twice, .target = as_bytes(values)}).ok());
}

TEST_F(KernelSumsTest, AnErrorIsToldAndTheNextSumWorks) {
  auto sums = make();
  std::vector<float> values(100, 1);
  const std::array<Source, 2> twice = {{{as_bytes(values)}, {as_bytes(values)}}};
  const VectorSum sum{.count = values.size(), .sources = twice, .target = as_bytes(values)};
  for (const char* call : {"cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord"}) {
    fake_.fail_next(call, kNotSupported);
    absl::Status status = sums->begin(0, sum);
    if (status.ok()) status = wait(*sums, 0);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("fake")) << call;
  }
  std::fill(values.begin(), values.end(), 1.0f);
  ASSERT_TRUE(sums->begin(0, sum).ok());
  ASSERT_TRUE(wait(*sums, 0).ok());
  EXPECT_EQ(values, std::vector<float>(100, 2));
  fake_.fail_next("cuLaunchKernel", kIllegalAddress);
  EXPECT_FALSE(sums->begin(0, sum).ok() && wait(*sums, 0).ok());
  EXPECT_FALSE(sums->begin(0, sum).ok()) << "the device is lost";
}

// 1 ns a byte to the device, 2 from it, 3 for a copy by the CPU; 100 for a kernel, and a hundredth
// of a nanosecond for each byte.
TEST_F(KernelSumsTest, PriceIsTheSumOfWhatIsDone) {
  CopyTable copies;
  for (const auto& [route, byte] :
       {std::pair{CopyRoute::kToDevice, 1.0}, std::pair{CopyRoute::kToHost, 2.0}}) {
    copies.fill(route, CopyWay::kSingle, [cost = byte](size_t size, size_t count) {
      return cost * static_cast<double>(size * count);
    });
  }
  SumCosts costs{.host_copy = 3};
  costs.start.fill(100);
  costs.byte.fill(0.01);
  auto sums = make(costs, copies);
  std::vector<float> values(4096);
  const auto price = [&](size_t count, const std::vector<Source>& sources, std::byte* target) {
    return sums->seconds({.count = count, .sources = sources, .target = target}) * 1e9;
  };
  constexpr double kBytes = 4 * 1024;
  EXPECT_NEAR(price(1024, {{}, {}}, nullptr), 2 * kBytes + 100 + 0.02 * kBytes + 2 * kBytes, 1);
  EXPECT_NEAR(price(1024, {{nullptr, true}, {}}, nullptr),
              kBytes + 100 + 0.02 * kBytes + 2 * kBytes, 1);
  EXPECT_NEAR(price(1024, {{as_bytes(values)}, {}}, nullptr) - price(1024, {{}, {}}, nullptr),
              3 * kBytes, 1);
  ASSERT_TRUE(sums->pin({as_bytes(values), values.size() * 4}).ok());
  EXPECT_NEAR(price(1024, {{as_bytes(values)}, {}}, as_bytes(values)),
              price(1024, {{}, {}}, nullptr), 1);
  // Two parts: what one launch costs, twice.
  EXPECT_NEAR(price(262144, {{}}, nullptr) - 2 * price(131072, {{}}, nullptr), 0, 1);
  EXPECT_EQ(price(0, {{}}, nullptr), 0);
}

TEST_F(KernelSumsTest, CostsAreMeasuredForEveryType) {
  const auto costs = measure_sums(*device_, *launcher_, 16 << 10, 1);
  ASSERT_TRUE(costs.ok()) << costs.status();
  for (const double start : costs->start) EXPECT_GT(start, 0);
  EXPECT_GT(costs->host_copy, 0);
  EXPECT_EQ(fake_.calls_of("cuLaunchKernel"), 2u * kernels::kSumElements);
}

}  // namespace
}  // namespace baton::gpudirect
