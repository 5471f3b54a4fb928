// One gibibyte in one transfer.
#include <set>
#include <string_view>

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

// As many regions as a worker holds: transfers to and from the last of them.
class ManyRegions : public Conformance {};

TEST_P(ManyRegions, TheLastOneIsReachedAsTheFirst) {
  constexpr size_t kEach = 4096;
  std::vector<MemoryRegion> held[2];
  Side* const sides[2] = {&a_, &b_};
  for (size_t i = 0; i < 2; ++i) {
    absl::StatusOr<MemoryRegion> region = MemoryRegion{};
    while (true) {
      std::byte* const where = sides[i]->data() + held[i].size() % 256 * kEach;
      region = sides[i]->worker->register_memory(where, kEach);
      if (!region.ok()) break;
      held[i].push_back(*region);
    }
    EXPECT_TRUE(absl::IsResourceExhausted(region.status())) << region.status();
    EXPECT_THAT(std::string(region.status().message()), testing::HasSubstr("use a MemoryPool"));
    EXPECT_GT(held[i].size(), 65'000u);
  }
  for (const Op op : {Op::kWrite, Op::kRead}) {
    for (const size_t back : {size_t{1}, size_t{2}, held[0].size() / 2}) {
      const MemoryRegion& here = held[0][held[0].size() - back];
      const MemoryRegion& there = held[1][held[1].size() - back];
      fill(a_.data(), 256 * kEach, back);
      fill(b_.data(), 256 * kEach, back + 10);
      TransferRequest request{.op = op,
                              .peer = a_.peer,
                              .local = here,
                              .local_layout = Layout::contiguous(0, kEach),
                              .remote = *b_.worker->remote_region(there),
                              .remote_layout = Layout::contiguous(0, kEach)};
      ASSERT_TRUE(run(a_, request).ok());
      EXPECT_EQ(memcmp(here.base, there.base, kEach), 0);
    }
  }
  // One is given back: its name is stale at the peer, and its row serves another.
  const RemoteRegion old = *b_.worker->remote_region(held[1].back());
  ASSERT_TRUE(b_.worker->deregister_memory(held[1].back()).ok());
  TransferRequest late{.op = Op::kWrite,
                       .peer = a_.peer,
                       .local = held[0].back(),
                       .local_layout = Layout::contiguous(0, kEach),
                       .remote = old,
                       .remote_layout = Layout::contiguous(0, kEach)};
  EXPECT_FALSE(run(a_, late).ok());
  auto next = b_.worker->register_memory(b_.data(), kEach).value();
  late.remote = *b_.worker->remote_region(next);
  EXPECT_TRUE(run(a_, late).ok());
}

// Ten seconds each: a provider registers memory alike, whatever its settings are.
std::vector<Variant> one_of_each_provider() {
  std::vector<Variant> variants = all_variants();
  std::set<std::string_view> seen;
  std::erase_if(variants, [&](const Variant& each) { return !seen.insert(each.provider).second; });
  return variants;
}

INSTANTIATE_TEST_SUITE_P(Conformance, ManyRegions, testing::ValuesIn(one_of_each_provider()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace baton
