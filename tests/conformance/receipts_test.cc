// Transfers that landed, and whose target knows, but not their sender, when the better provider is
// unplugged: the target uses the memory for something else at once, the transfers end as done over
// what is left or the next connection, and nothing is written again.
#include "tests/conformance/pluggable.h"
#include "tests/usable_provider.h"
#ifdef BATON_TEST_VERBS
#include "tests/verbs/fake/fake_verbs.h"
#include "verbs/provider.h"
#endif

namespace baton {
namespace {

constexpr size_t kTransfers = 20;
constexpr size_t kBytes = 48 << 10;
constexpr std::byte kReused{0xcc};
constexpr const char* kLast = "no more";

std::byte pattern(size_t transfer, size_t at) {
  return std::byte((transfer * 17 + at * 7 + (at >> 8) * 3) & 127);
}

class HeldBack : public PluggedPair {
 protected:
  HeldBack() { settings_ = {{"peer.redial_ms", "600000"}, {"peer.failback_ms", "0"}}; }
  void start(Side& side, const std::string& name, const ProviderFactory& better,
             const std::string& other) {
    PluggedPair::start(side, name, better, other, kTransfers * kBytes);
  }
  void meet() {
    PluggedPair::meet();
    // The region is known from here on.
    const TransferId first = submit(0);
    until([&] { return ended(*a_.worker->state(first)) && heard_ == 1; });
    ASSERT_TRUE(a_.worker->status(first).ok()) << a_.worker->status(first);
    std::fill_n(b_.block.data, kTransfers * kBytes, std::byte{0});
    heard_ = 0;
  }
  TransferId submit(size_t number) {
    const size_t at = number * kBytes;
    for (size_t i = 0; i < kBytes; ++i) a_.block.data[at + i] = pattern(number, i);
    const std::string notify = std::to_string(number);
    TransferRequest request = write(at, kBytes);
    request.notify = notify;
    return a_.worker->submit(request).value();
  }
  void submit_all() {
    for (size_t i = 0; i < kTransfers; ++i) ids_[i] = submit(i);
  }
  // The target is told, and needs the block for something else.
  void hear() override {
    while (b_.worker->next_notification(notification_)) {
      if (notification_.payload == kLast) continue;
      const size_t number = std::stoul(notification_.payload);
      std::byte* const block = b_.block.data + number * kBytes;
      for (size_t i = 0; i < kBytes; ++i) {
        if (block[i] != pattern(number, i)) FAIL() << "byte " << i << " of " << number;
      }
      std::fill_n(block, kBytes, kReused);
      ++heard_;
    }
  }
  void expect_none_has_ended() {
    for (const TransferId id : ids_) EXPECT_FALSE(ended(*a_.worker->state(id)));
  }
  // All end as done, by what the target says; `route`: over that.
  void expect_receipts(const std::string& route) {
    const WorkerStats before = a_.worker->stats();
    until([&] {
      return std::all_of(ids_.begin(), ids_.end(),
                         [&](TransferId id) { return ended(*a_.worker->state(id)); });
    });
    for (const TransferId id : ids_) {
      EXPECT_TRUE(a_.worker->status(id).ok()) << a_.worker->status(id);
    }
    // What had been repeated would come before this.
    const TransferId last = *a_.worker->notify(peer_, kLast);
    until([&] { return ended(*a_.worker->state(last)); });
    EXPECT_THAT(a_.worker->explain(peer_), testing::HasSubstr("b: " + route));
    EXPECT_EQ(std::count(b_.block.data, b_.block.data + kTransfers * kBytes, kReused),
              static_cast<ptrdiff_t>(kTransfers * kBytes))
        << "bytes landed in memory that had been reused";
    EXPECT_EQ(b_.worker->counter_value(counter_), kTransfers + 1);
    const WorkerStats after = a_.worker->stats();
    EXPECT_EQ(after.receipts - before.receipts, kTransfers);
    EXPECT_EQ(after.slices_moved, before.slices_moved);
  }

  std::array<TransferId, kTransfers> ids_;
  Notification notification_;
  size_t heard_ = 0;
};

// The better provider, and the one that takes over; none: it is plugged in again.
class Unplugged : public HeldBack,
                  public testing::WithParamInterface<std::pair<std::string, std::string>> {
 protected:
  void start(const std::string& better, const std::string& other) {
    for (const std::string& each : {better, other}) {
      if (each.empty()) continue;
      if (const std::string why = why_unusable(each); !why.empty()) GTEST_SKIP() << why;
    }
    HeldBack::start(a_, "a", Pluggable::factory(registered(better), at_a_), other);
    HeldBack::start(b_, "b", Pluggable::factory(registered(better), at_b_), other);
    meet();
    if (std::string route = a_.worker->explain(peer_); route.rfind("b: " + better, 0) != 0) {
      GTEST_SKIP() << route;
    }
  }
  Pluggable::Cable at_a_, at_b_;
};

TEST_P(Unplugged, WhatLandedAndWasNotAcknowledgedIsNotWrittenAgain) {
  const auto& [better, other] = GetParam();
  start(better, other);
  if (IsSkipped()) return;
  at_a_.deaf = true;
  submit_all();
  until([&] { return heard_ == kTransfers; });
  expect_none_has_ended();
  at_a_.in = at_b_.in = false;
  until([&] { return a_.worker->stats().peers_lost > 0; });
  at_a_.deaf = false;
  at_a_.in = at_b_.in = other.empty();
  expect_receipts(other.empty() ? better : other);
}

INSTANTIATE_TEST_SUITE_P(Receipts, Unplugged,
                         testing::Values(std::pair("shm", "tcp"), std::pair("shm", ""),
                                         std::pair("tcp", "ucx"), std::pair("ucx", ""),
                                         std::pair("tcp", "")),
                         [](const auto& of) {
                           return of.param.first + "To" +
                                  (of.param.second.empty() ? "Itself" : of.param.second);
                         });

#ifdef BATON_TEST_VERBS
// The adapters have moved everything, and the target has seen it; what the sender's adapter wrote
// into its completion queue is lost with that.
TEST_F(HeldBack, OverVerbsWhatLandedIsNotWrittenAgain) {
  FakeVerbs fake{{.devices = 1, .bytes_per_poll = 1024}};
  settings_.emplace_back("verbs.stall_ms", "600000");
  settings_.emplace_back("verbs.port_grace_ms", "1");
  start(a_, "a", verbs::verbs_over(fake.api()), "tcp");
  start(b_, "b", verbs::verbs_over(fake.api()), "tcp");
  meet();
  submit_all();
  // The adapters move when they are polled: a little is under way when all is posted.
  for (int i = 0; i < 3; ++i) a_.worker->progress();
  until([&] { return heard_ == kTransfers; }, /*with_a=*/false);
  expect_none_has_ended();
  fake.break_completion_queues(0);
  fake.set_port(0, false);
  expect_receipts("tcp");
  for (Side* side : {&a_, &b_}) side->end();
  EXPECT_THAT(fake.violations(), testing::IsEmpty());
}
#endif

}  // namespace
}  // namespace baton
