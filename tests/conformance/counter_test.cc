// Counters say that bytes are there, exactly once; notifications arrive, exactly once.
#include "tests/conformance/harness.h"

namespace baton {
namespace {

using Counters = Conformance;
using Notifications = Conformance;

TEST_P(Counters, VisibleOnlyAfterEveryByte) {
  const CounterId counter = *b_.worker->allocate_counter();
  const std::byte* there = b_.data();
  std::mt19937_64 random(1);
  uint64_t expected = 0;
  for (int round = 0; round < 20; ++round) {
    const size_t bytes = 1 + random() % (4 << 20);
    std::memset(a_.data(), round + 1, bytes);
    TransferRequest r = request(Op::kWrite, a_, b_, 0, bytes);
    r.counter = b_.worker->remote_counter(counter);
    r.increment = static_cast<uint64_t>(round) + 1;
    const TransferId id = submit(a_, r);
    // Looked at after every step: the moment it moves, all bytes are there.
    until([&] { return b_.worker->counter_value(counter) != expected; });
    expected += static_cast<uint64_t>(round) + 1;
    ASSERT_EQ(b_.worker->counter_value(counter), expected);
    ASSERT_TRUE(holds(there, bytes, std::byte(round + 1))) << bytes;
    ASSERT_TRUE(finish(a_, id).ok());
  }
}

TEST_P(Counters, OneThatCannotHoldAnIncrementIsNotAskedTo) {
  const CounterId counter = *b_.worker->allocate_counter();
  TransferRequest r = request(Op::kWrite, a_, b_, 0, 100);
  r.counter = b_.worker->remote_counter(counter);
  r.increment = CounterTable::kMaxValue + 1;
  EXPECT_TRUE(absl::IsInvalidArgument(a_.worker->submit(r).status()));
  r.increment = CounterTable::kMaxValue;
  const TransferId id = submit(a_, r);
  until([&] { return b_.worker->counter_value(counter) == CounterTable::kMaxValue; });
  EXPECT_TRUE(finish(a_, id).ok());
}

TEST_P(Counters, TheSumOfManyTransfersIsExact) {
  std::vector<CounterId> counters(3);
  for (CounterId& counter : counters) counter = *b_.worker->allocate_counter();
  std::mt19937_64 random(2);
  std::vector<uint64_t> expected(counters.size());
  std::vector<TransferId> open;
  for (int i = 0; i < 3000; ++i) {
    const size_t which = random() % counters.size();
    const size_t sizes[] = {0, 1 + random() % 2000, 1 + random() % 20'000, 300'000};
    TransferRequest r =
        request(Op::kWrite, a_, b_, random() % 1000, sizes[i % 50 == 0 ? 3 : i % 3]);
    r.counter = b_.worker->remote_counter(counters[which]);
    r.increment = 1 + random() % 1000;
    expected[which] += r.increment;
    open.push_back(submit(a_, r));
    if (open.size() == 200) {
      for (TransferId id : open) ASSERT_TRUE(finish(a_, id).ok());
      open.clear();
    }
  }
  for (TransferId id : open) ASSERT_TRUE(finish(a_, id).ok());
  settle();
  for (size_t i = 0; i < counters.size(); ++i) {
    EXPECT_EQ(b_.worker->counter_value(counters[i]), expected[i]);
  }
}

TEST_P(Counters, IncrementsForAFreedCounterChangeNothing) {
  // But one, all are in use: the word of that is used again at once, the hard case.
  for (size_t i = 1; i < CounterTable::kCapacity; ++i) {
    ASSERT_TRUE(b_.worker->allocate_counter().ok());
  }
  const CounterId old = *b_.worker->allocate_counter();
  const RemoteCounter stale = b_.worker->remote_counter(old);
  ASSERT_TRUE(b_.worker->free_counter(old).ok());
  EXPECT_EQ(b_.worker->free_counter(old).code(), absl::StatusCode::kNotFound);
  const CounterId fresh = *b_.worker->allocate_counter();
  EXPECT_EQ(fresh.index, old.index);
  TransferRequest r = request(Op::kWrite, a_, b_, 0, 1000);
  r.counter = stale;
  EXPECT_TRUE(run(a_, r).ok());
  settle();
  EXPECT_EQ(b_.worker->counter_value(fresh), 0u);
  EXPECT_EQ(b_.worker->counter_value(old), 0u);
  r.counter = b_.worker->remote_counter(fresh);
  EXPECT_TRUE(run(a_, r).ok());
  settle();
  EXPECT_EQ(b_.worker->counter_value(fresh), 1u);
}

TEST_P(Counters, CountersOfAnotherWorkerAreRefused) {
  const CounterId own = *a_.worker->allocate_counter();
  TransferRequest r = request(Op::kWrite, a_, b_, 0, 1000);
  r.counter = a_.worker->remote_counter(own);
  const absl::Status status = run(a_, r);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(a_.worker->counter_value(own), 0u);
}

std::string text(size_t number, size_t bytes) {
  std::string out = std::to_string(number) + ":";
  while (out.size() < bytes) out.push_back(static_cast<char>((number + out.size() * 3) & 0xff));
  out.resize(std::max<size_t>(bytes, 1));
  return out;
}

TEST_P(Notifications, EverySizeWithAndWithoutATransfer) {
  size_t number = 0;
  for (size_t bytes : {1u, 2u, 100u, 255u, 256u, 257u, 4096u, 60'000u, 65'536u}) {
    for (size_t with : {0u, 1u, 500'000u}) {
      const std::string payload = text(++number, bytes);
      std::memset(a_.data(), static_cast<int>(number), with);
      TransferRequest r = request(Op::kWrite, a_, b_, 0, with);
      r.notify = payload;
      const TransferId id = submit(a_, r);
      Notification got;
      until([&] { return b_.worker->next_notification(got); });
      EXPECT_EQ(got.payload, payload);
      EXPECT_EQ(got.peer, b_.peer);
      ASSERT_TRUE(holds(b_.data(), with, std::byte(number)));  // its bytes came first
      ASSERT_TRUE(finish(a_, id).ok());
      ASSERT_FALSE(b_.worker->next_notification(got));
    }
  }
}

TEST_P(Notifications, TooLongIsRefusedAndEmptyIsNotSent) {
  EXPECT_EQ(a_.worker->notify(a_.peer, std::string(kMaxNotification + 1, 'x')).status().code(),
            absl::StatusCode::kInvalidArgument);
  auto id = a_.worker->notify(a_.peer, "").value();
  EXPECT_TRUE(finish(a_, id).ok());
  settle();
  Notification got;
  EXPECT_FALSE(b_.worker->next_notification(got));
}

TEST_P(Notifications, NoneOfTenThousandIsLostOrRepeatedInEitherDirection) {
  const auto count = static_cast<size_t>(rounds_of(10'000, 2'000));
  std::vector<int> seen(2 * count);
  size_t sent[2] = {0, 0};
  size_t received = 0;
  Notification got;
  Side* sides[2] = {&a_, &b_};
  until([&] {
    for (size_t s = 0; s < 2; ++s) {
      Side& side = *sides[s];
      while (sent[s] < count) {
        const size_t number = s * count + sent[s];
        if (!side.worker->notify_detached(side.peer, text(number, 8 + number % 400)).ok()) break;
        ++sent[s];
      }
      while (side.worker->next_notification(got)) {
        const size_t number = std::stoul(got.payload);
        if (number >= seen.size() || got.payload != text(number, 8 + number % 400)) {
          ADD_FAILURE() << "a garbled notification";
          return true;
        }
        EXPECT_EQ(number / count, 1 - s);
        ++seen[number];
        ++received;
      }
    }
    return received >= 2 * count;
  });
  settle();
  EXPECT_FALSE(a_.worker->next_notification(got));
  EXPECT_FALSE(b_.worker->next_notification(got));
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<ptrdiff_t>(2 * count));
}

INSTANTIATE_TEST_SUITE_P(Conformance, Counters, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Conformance, Notifications, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace baton
