// In the steady state a transfer costs no registration and no heap allocation, on either side. This
// program counts every allocation it makes.
#include "tests/conformance/harness.h"
#include "tests/count_allocations.h"

namespace baton {
namespace {

class Allocations : public Conformance {
 protected:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kPages = 256;

  void SetUp() override {
    Conformance::SetUp();
    if (HasFatalFailure() || IsSkipped()) return;
    for (uint32_t i = 0; i < kPages; ++i) pages_.push_back((i * 37) % kPages);
    counter_ = *b_.worker->allocate_counter();
    all_ended_ = [this] {
      while (b_.worker->next_notification(got_)) ++received_;
      while (a_.worker->next_notification(got_)) ++received_;
      for (const auto& [side, id] : open_) {
        if (!ended(*side, id)) return false;
      }
      return received_ >= expected_;
    };
    open_.reserve(16);
  }

  // Transfers of every kind, under way together; true if all went well.
  bool round() {
    open_.clear();
    for (Op op : {Op::kWrite, Op::kRead}) {
      TransferRequest r = request(op, a_, b_, 0, 0);
      r.local_layout = Layout::paged(a_.offset(0), pages_, kPage, kPage);
      r.remote_layout = Layout::paged(b_.offset(0), pages_, kPage, kPage).repeated(1, 0);
      if (op == Op::kWrite) {
        r.counter = b_.worker->remote_counter(counter_);
        r.notify = "layer 7 of request 1234";
        ++expected_;
      }
      add(a_, r);
      add(a_, request(op, a_, b_, 2 << 20, 1 << 20));
      add(b_, request(op, b_, a_, 4 << 20, 100'000));
    }
    for (Side* side : {&a_, &b_}) {
      auto id = side->worker->notify(side->peer, std::string_view(payload_, sizeof payload_));
      if (!id.ok()) return false;
      open_.emplace_back(side, *id);
      ++expected_;
    }
    until(all_ended_);
    bool good = true;
    for (const auto& [side, id] : open_) {
      good &= side->worker->status(id).ok();
      good &= side->worker->release(id).ok();
    }
    return good;
  }
  void add(Side& side, const TransferRequest& r) {
    auto id = side.worker->submit(r);
    if (id.ok()) open_.emplace_back(&side, *id);
  }

  char payload_[kInlineNotification] = {'x'};
  std::vector<uint32_t> pages_;
  CounterId counter_;
  std::function<bool()> all_ended_;
  std::vector<std::pair<Side*, TransferId>> open_;
  Notification got_;
  size_t received_ = 0;
  size_t expected_ = 0;
};

TEST_P(Allocations, NoneInTheSteadyState) {
  if (GetParam().decorated) GTEST_SKIP() << "a timeline records, so it allocates";
  const int count = rounds(200);
  // Until every place of every queue has held the largest message once.
  const int warm = std::max(count, 100);
  for (int i = 0; i < warm; ++i) ASSERT_TRUE(round());
  const uint64_t registered = a_.worker->stats().registrations + b_.worker->stats().registrations;
  // A queue may grow when it is longer than ever before, and when that is, the kernel decides: so
  // one of several windows must be free of allocations. One per transfer is in all of them.
  constexpr int kWindows = 10;
  uint64_t made = 1;
  int windows = 0;
  for (bool good = true; made > 0 && windows < kWindows; ++windows) {
    const uint64_t before = allocations.load();
    for (int i = 0; i < count; ++i) good &= round();
    made = allocations.load() - before;
    ASSERT_TRUE(good);
  }
  EXPECT_EQ(made, 0u) << "in " << 8 * count << " transfers";
  EXPECT_EQ(a_.worker->stats().registrations + b_.worker->stats().registrations, registered);
  EXPECT_EQ(b_.worker->counter_value(counter_), static_cast<uint64_t>(warm + windows * count));
}

TEST_P(Allocations, NoneForThirtyTwoThousandPages) {
  constexpr size_t kMany = 32'000;
  constexpr size_t kSmall = 128;
  std::vector<uint32_t> from(kMany);
  for (uint32_t i = 0; i < kMany; ++i) from[i] = (i * 7919) % kMany;
  fill(a_.data(), kMany * kSmall, 1);
  TransferRequest r = request(Op::kWrite, a_, b_, 0, 0);
  r.local_layout = Layout::paged(a_.offset(0), from, kSmall, kSmall);
  r.remote_layout = Layout::paged(b_.offset(0), from, kSmall, kSmall);
  ASSERT_TRUE(run(a_, r).ok());
  const uint64_t before = allocations.load();
  const auto id = a_.worker->submit(r);
  const uint64_t made = allocations.load() - before;
  ASSERT_TRUE(id.ok());
  EXPECT_EQ(made, 0u);
  EXPECT_TRUE(finish(a_, *id).ok());
  EXPECT_EQ(memcmp(a_.data(), b_.data(), kMany * kSmall), 0);
}

TEST_P(Allocations, TheCounterCounts) {
  const uint64_t before = allocations.load();
  void* volatile block = malloc(3);
  free(block);
  EXPECT_GT(allocations.load(), before);
}

INSTANTIATE_TEST_SUITE_P(Conformance, Allocations, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace baton
