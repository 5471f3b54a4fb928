// Inbox that the application does not read: what was acknowledged is delivered, the rest
// waits at its sender, and nobody is closed for it.
#include <algorithm>
#include <vector>

#include "tests/conformance/harness.h"

namespace baton {
namespace {

// What Baton says a peer's inbox takes from one sender (transport/transfer.h).
constexpr size_t kWindow = 4 << 20;
constexpr size_t kCost = 64;

class Inbox : public Conformance {
 protected:
  // Those of `ids` that ended as done; none may have ended in another way.
  size_t acknowledged(const std::vector<TransferId>& ids) {
    size_t count = 0;
    for (const TransferId id : ids) {
      const TransferState state = *a_.worker->state(id);
      EXPECT_TRUE(state == TransferState::kActive || state == TransferState::kDone)
          << a_.worker->status(id);
      count += state == TransferState::kDone ? 1 : 0;
    }
    return count;
  }
  // Every slot that is free holds a transfer that has ended.
  void use_up(Side& from, Side& to, std::vector<TransferId>& kept) {
    for (size_t before = SIZE_MAX; before != kept.size();) {
      before = kept.size();
      while (true) {
        const auto id = from.worker->submit(request(Op::kWrite, from, to, 0, 1));
        if (!id.ok()) break;
        kept.push_back(*id);
      }
      until([&] {
        return std::all_of(kept.begin(), kept.end(),
                           [&](TransferId id) { return ended(from, id); });
      });
    }
  }
};

// Promise(notifications): An acknowledged notification is in the application's inbox; a reader that
//   is slow loses none | credits: at most 4 MiB unread per sender; the next ones wait at their
//   sender
TEST_P(Inbox, UnreadNotificationsWaitAtTheSender) {
  constexpr size_t kBytes = 60000;
  constexpr size_t kFit = kWindow / (kBytes + kCost);
  std::vector<TransferId> ids;
  for (size_t i = 0; i < 2 * kFit; ++i) {
    ids.push_back(
        *a_.worker->notify(a_.peer, std::string(kBytes, static_cast<char>('a' + i % 26))));
  }
  until([&] { return acknowledged(ids) >= kFit; });
  nudge(200);
  EXPECT_EQ(acknowledged(ids), kFit) << "more than fits was acknowledged";

  // One that waits can be cancelled at once, and the others still come.
  ASSERT_TRUE(a_.worker->cancel(ids.back()).ok());
  until([&] { return ended(a_, ids.back()); });
  EXPECT_EQ(*a_.worker->state(ids.back()), TransferState::kCancelled);
  EXPECT_TRUE(a_.worker->release(ids.back()).ok());
  ids.pop_back();

  // Other work is not held up by those that wait.
  EXPECT_TRUE(run(a_, request(Op::kWrite, a_, b_, 0, 4096)).ok());
  EXPECT_TRUE(run(b_, request(Op::kRead, b_, a_, 0, 4096)).ok());

  size_t got = 0;
  Notification note;
  until([&] {
    while (b_.worker->next_notification(note)) {
      EXPECT_EQ(note.payload.size(), kBytes);
      ++got;
    }
    return got == ids.size() && acknowledged(ids) == ids.size();
  });
  nudge(20);
  EXPECT_FALSE(b_.worker->next_notification(note));
  EXPECT_EQ(a_.worker->peer_state(a_.peer), PeerState::kUp);
  EXPECT_EQ(b_.worker->peer_state(b_.peer), PeerState::kUp);
  for (const TransferId id : ids) EXPECT_TRUE(a_.worker->release(id).ok());
}

// All slots of both workers are in use, by what waits for the other and by what nobody has
// released: their credits still get through.
TEST_P(Inbox, BothWaysWithAllTransfersInUse) {
  const std::string payload(50000, 'x');
  size_t sent_a = 0;
  size_t sent_b = 0;
  while (a_.worker->notify_detached(a_.peer, payload).ok()) ++sent_a;
  while (b_.worker->notify_detached(b_.peer, payload).ok()) ++sent_b;
  EXPECT_EQ(sent_a, max_transfers_ / 3 + 1) << "the share of those with notifications";
  std::vector<TransferId> kept_a, kept_b;
  use_up(a_, b_, kept_a);
  use_up(b_, a_, kept_b);
  size_t got_a = 0;
  size_t got_b = 0;
  Notification note;
  until([&] {
    while (a_.worker->next_notification(note)) ++got_a;
    while (b_.worker->next_notification(note)) ++got_b;
    return got_a == sent_b && got_b == sent_a;
  });
  for (const TransferId id : kept_a) EXPECT_TRUE(a_.worker->release(id).ok());
  for (const TransferId id : kept_b) EXPECT_TRUE(b_.worker->release(id).ok());
}

INSTANTIATE_TEST_SUITE_P(Conformance, Inbox, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace baton
