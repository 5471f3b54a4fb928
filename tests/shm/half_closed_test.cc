// A connection's socket that is shut down in one direction, or both, while both processes live: a
// loss like any other. The peer is called again, nothing is lost, and no fence ends early.
#include "tests/test.h"
#include "tests/until.h"
#include "transport/pool.h"
#include "transport/worker.h"

namespace baton {
namespace {

// Both ends of the one connection of this process, the same way round each time.
std::vector<int> ends() {
  std::vector<int> found;
  for (int fd = 0; fd < 1024; ++fd) {
    int type = 0;
    socklen_t size = sizeof type;
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET &&
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0) {
      found.push_back(fd);
    }
  }
  return found;
}

class HalfClosed : public testing::TestWithParam<std::tuple<int, size_t, bool>> {
 protected:
  static std::unique_ptr<Worker> make(const char* name) {
    return *Worker::create(
        {.name = name, .providers = {"shm"}, .key = *ClusterKey::from_bytes("0123456789abcdef")});
  }
  template <typename Fact>
  void until(const Fact& fact, CallSite from = CallSite::here()) {
    const auto state = [&] { return state_of(*a_, to_b_, "a") + state_of(b_->stats(), "b"); };
    baton::until(
        fact, [&] { step(); }, state, from);
  }
  void step() {
    a_->progress();
    b_->progress();
    for (Worker* each : {a_.get(), b_.get()}) {
      while (const auto event = each->next_peer_event()) {
        events_.push_back(event->kind);
        if (each == a_.get()) events_of_a_.push_back(event->kind);
      }
    }
    Notification note;
    while (a_->next_notification(note) || b_->next_notification(note))
      heard_.push_back(note.payload);
  }

  std::unique_ptr<Worker> a_ = make("a"), b_ = make("b");
  PeerId to_b_;
  std::vector<PeerEvent::Kind> events_, events_of_a_;
  std::vector<std::string> heard_;
};

TEST_P(HalfClosed, IsALossThatIsResumed) {
  using Kind = PeerEvent::Kind;
  const auto [how, end, said] = GetParam();
  to_b_ = *a_->connect(b_->address());
  until([&] { return events_.size() == 2; });
  ASSERT_EQ(ends().size(), 2u);
  if (said) {
    ASSERT_TRUE(a_->notify_detached(to_b_, "before").ok());
  }
  ASSERT_EQ(shutdown(ends()[end], how), 0);
  until([&] { return std::count(events_.begin(), events_.end(), Kind::kResumed) == 2; });
  ASSERT_TRUE(a_->notify_detached(to_b_, "behind").ok());
  until([&] { return !heard_.empty() && heard_.back() == "behind"; });
  EXPECT_EQ(std::count(heard_.begin(), heard_.end(), "before"), said ? 1 : 0);
  EXPECT_THAT(events_, testing::Not(testing::Contains(Kind::kDown)));
}

// While it comes up one side may have the connection before the other: no session ends there that
// had begun.
TEST_P(HalfClosed, WhileItComesUpEndsNoSession) {
  using Kind = PeerEvent::Kind;
  const auto [how, end, said] = GetParam();
  for (int rounds = 0; rounds < 20; ++rounds) {
    a_ = make("a");
    b_ = make("b");
    events_.clear();
    events_of_a_.clear();
    to_b_ = *a_->connect(b_->address());
    for (int i = 0; i < rounds; ++i) (i % 2 == (said ? 1 : 0) ? a_ : b_)->progress();
    const std::vector<int> sockets = ends();
    if (sockets.size() != 2) continue;  // not yet
    ASSERT_EQ(shutdown(sockets[end], how), 0);
    until([&] { return a_->peer_state(to_b_) != PeerState::kConnecting; });
    const bool was_up = std::count(events_of_a_.begin(), events_of_a_.end(), Kind::kUp) > 0;
    if (!was_up && a_->peer_state(to_b_) == PeerState::kDown)
      continue;  // its first call has failed
    until([&] { return a_->peer_state(to_b_) == PeerState::kUp; });
    ASSERT_TRUE(a_->notify_detached(to_b_, "behind").ok());
    heard_.clear();
    until([&] { return !heard_.empty(); });
    EXPECT_EQ(a_->peer_state(to_b_), PeerState::kUp);
    EXPECT_THAT(events_of_a_, testing::Not(testing::Contains(Kind::kDown))) << rounds;
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, HalfClosed,
                         testing::Combine(testing::Values(SHUT_RD, SHUT_WR, SHUT_RDWR),
                                          testing::Values(0, 1), testing::Bool()));

}  // namespace
}  // namespace baton
