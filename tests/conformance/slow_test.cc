// One gibibyte in one transfer.
#include "tests/conformance/harness.h"

namespace baton {
namespace {

class Gibibyte : public Conformance {
 protected:
  void SetUp() override {
    if (GetParam().slow) bytes_ >>= 3;
    start(bytes_);
  }
  size_t bytes_ = size_t{1} << 30;
};

TEST_P(Gibibyte, BothWays) {
  const CounterId counter = *b_.worker->allocate_counter();
  auto* words = reinterpret_cast<uint64_t*>(a_.data());
  for (size_t i = 0; i < bytes_ / 8; ++i) words[i] = i * 0x9e3779b97f4a7c15;
  TransferRequest r = request(Op::kWrite, a_, b_, 0, bytes_);
  r.counter = b_.worker->remote_counter(counter);
  absl::Status status = run(a_, r);
  ASSERT_TRUE(status.ok()) << status;
  until([&] { return b_.worker->counter_value(counter) == 1; });
  EXPECT_EQ(memcmp(a_.data(), b_.data(), bytes_), 0);
  std::memset(a_.data(), 0, bytes_);
  status = run(a_, request(Op::kRead, a_, b_, 0, bytes_));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(memcmp(a_.data(), b_.data(), bytes_), 0);
}

INSTANTIATE_TEST_SUITE_P(Conformance, Gibibyte, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace baton
