// Sockets that are lost between landing and acknowledgement, targets that sleep, peers that are
// lost and come back: nothing lands twice, nothing late, and nobody else pays.
#include "tests/tcp/faulty_network.h"
#include "tests/tcp/tcp_pair.h"
#include "tests/test.h"
#include "transport/worker.h"

namespace baton::tcp {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

constexpr size_t kSessionBytes = 4 << 20;
constexpr char kReused = 'R';

class Session : public testing::Test, protected FaultyPair {
 protected:
  void SetUp() override {
    start(a_, "a");
    start(b_, "b");
    call();
    until([&] { return b_.peer.generation != 0 && network_->open_lines() == 2; });
    run_out();
  }

  void start(TcpSide& side, const std::string& name) {
    side.start(
        {.name = name,
         .clock = &clock_,
         .settings = {{"tcp.sockets", "2"}, {"tcp.slice_kib", "256"}, {"peer.redial_ms", "5000"}}},
        pattern(kSessionBytes, static_cast<uint64_t>(name[0])));
  }

  TransferId write(CounterId counter, Time timeout = kNever, size_t bytes = kSessionBytes) {
    return a_.worker
        ->submit({.op = Op::kWrite,
                  .peer = a_.peer,
                  .local = a_.region,
                  .local_layout = Layout::contiguous(0, bytes),
                  .remote = b_.remote,
                  .remote_layout = Layout::contiguous(0, bytes),
                  .counter = b_.worker->remote_counter(counter),
                  .timeout = timeout})
        .value();
  }
  // The target has been told that the bytes are there: it uses the memory for something else.
  void reuse() {
    EXPECT_EQ(b_.memory, a_.memory);
    std::fill(b_.memory.begin(), b_.memory.end(), kReused);
  }
  bool reused_is_whole() const {
    return std::count(b_.memory.begin(), b_.memory.end(), kReused) ==
           static_cast<ptrdiff_t>(kSessionBytes);
  }
};

// Promise(lost): A slice that landed is never sent again: once the target was told, the memory is
//   the target's | the target fences the lost rail (`FENCE`, `FENCED`) and reports what arrived
//   before anything is repeated
TEST_F(Session, ASocketLostBetweenLandingAndAcknowledgementRepeatsNothing) {
  const CounterId counter = *b_.worker->allocate_counter();
  network_->hold(FaultyNetwork::kBack, true);
  const TransferId id = write(counter);
  until([&] { return b_.worker->counter_value(counter) == 1; });
  reuse();
  network_->cut(network_->lines()[0]);
  network_->hold(FaultyNetwork::kBack, false);
  until([&] { return ended_at_a(id); });
  EXPECT_TRUE(a_.worker->status(id).ok()) << a_.worker->status(id);
  run_out();
  EXPECT_TRUE(reused_is_whole());
  EXPECT_EQ(b_.worker->counter_value(counter), 1u);
  EXPECT_EQ(a_.worker->stats().rails_lost, 1u);
}

// What still is on its way over a socket that only its sender has lost does not land after all.
TEST_F(Session, ALostSocketIsClosedAtTheTargetBeforeAnythingIsRepeated) {
  const CounterId counter = *b_.worker->allocate_counter();
  FaultyNetwork::Line& line = network_->lines()[0];
  line.held[FaultyNetwork::kThere] = true;
  const TransferId id = write(counter);
  until([&] { return line.under_way[FaultyNetwork::kThere].size() >= 300 << 10; });
  run_out();
  network_->cut_near(line);
  until([&] { return ended_at_a(id); });
  EXPECT_TRUE(a_.worker->status(id).ok()) << a_.worker->status(id);
  EXPECT_EQ(b_.worker->counter_value(counter), 1u);
  reuse();
  line.held[FaultyNetwork::kThere] = false;
  run_out();
  EXPECT_TRUE(reused_is_whole());
}

// One socket is reset at the caller's end only, the question about it is on its way over the other
// when that is reset too. The target takes the first for alive, and would answer over it.
TEST_F(Session, AnAnswerIsNotWaitedForOnASocketThatOnlyTheTargetTakesForAlive) {
  const CounterId counter = *b_.worker->allocate_counter();
  network_->hold(FaultyNetwork::kThere, true);
  const TransferId id = write(counter);
  for (int k = 0; k < 50; ++k) step();  // slices of it are on both
  network_->cut_near(network_->lines()[0]);
  until([&] { return a_.worker->stats().rails_lost == 1; });
  for (int k = 0; k < 50; ++k) step();
  network_->cut(network_->lines()[1]);
  network_->hold(FaultyNetwork::kThere, false);
  until([&] { return ended_at_a(id); });
  EXPECT_TRUE(a_.worker->status(id).ok()) << a_.worker->status(id);
  EXPECT_EQ(b_.worker->counter_value(counter), 1u);
  EXPECT_EQ(b_.memory, a_.memory);
  a_.worker->begin_disconnect(a_.peer);
  until([&] { return a_.worker->peer_state(a_.peer) == PeerState::kDown; });
  EXPECT_TRUE(a_.worker->disconnect(a_.peer).ok()) << a_.worker->disconnect(a_.peer);
}

// Half of the bytes are there, the rest goes over the new connection.
// Promise(lost): When every rail of a peer is lost, both sides redial for `peer.redial_ms`;
//   transfers, counters and notifications continue | sessions outlive their rails
TEST_F(Session, ATransferGoesOnAfterEverythingWasLost) {
  const CounterId counter = *b_.worker->allocate_counter();
  const TransferId id = write(counter);
  until([&] { return b_.memory[0] == a_.memory[0]; });
  for (int i = 0; i < 3; ++i) {
    network_->cut_all();
    const TransferId during = write(counter, kNever, 1000);  // waits for the peer
    until([&] { return ended_at_a(during); });
    EXPECT_TRUE(a_.worker->status(during).ok()) << a_.worker->status(during);
  }
  until([&] { return ended_at_a(id); });
  EXPECT_TRUE(a_.worker->status(id).ok()) << a_.worker->status(id);
  EXPECT_EQ(b_.memory, a_.memory);
  EXPECT_EQ(b_.worker->counter_value(counter), 4u);
}

// One of several sockets is called again while the others carry on, with pauses that grow, and the
// session has all of them in the end.
// Promise(lost): A lost tcp socket is redialled while the others carry on | the dialling side
//   retries after 10 ms, backing off to 10 s
TEST_F(Session, ALostSocketOfSeveralIsCalledAgain) {
  const CounterId counter = *b_.worker->allocate_counter();
  const auto cut_one = [&] {
    for (FaultyNetwork::Line& line : network_->lines()) {
      if (line.open()) return network_->cut(line);
    }
  };
  Time pause = milliseconds(10);
  for (int i = 0; i < 4; ++i, pause *= 2) {
    cut_one();
    until([&] { return a_.worker->stats().rails_lost == size_t(i) + 1; });
    run_out();
    EXPECT_EQ(network_->open_lines(), 1u) << "not before its time";
    clock_.advance(pause);
    until([&] { return network_->open_lines() == 2; });
    run_out();
    EXPECT_EQ(a_.worker->peer_state(a_.peer), PeerState::kUp);
    const TransferId id = write(counter);
    until([&] { return ended_at_a(id); });
    EXPECT_TRUE(a_.worker->status(id).ok()) << a_.worker->status(id);
  }
  EXPECT_EQ(b_.worker->counter_value(counter), 4u);
  EXPECT_EQ(a_.worker->stats().peers_lost, 0u);
  // It is a rail as any other: the first one may go for good, and the session lives on it.
  network_->refuse();
  cut_one();
  const TransferId id = write(counter);
  until([&] { return ended_at_a(id); });
  EXPECT_TRUE(a_.worker->status(id).ok()) << a_.worker->status(id);
  EXPECT_EQ(a_.worker->stats().peers_lost, 0u);
  EXPECT_EQ(b_.memory, a_.memory);
}

// A call for a socket may fail, and is made again; who sleeps is woken for it.
TEST_F(Session, ALostSocketIsCalledUntilSomebodyAnswers) {
  network_->limit_next(FaultyNetwork::kThere, 20, /*silent=*/false);  // the next one is cut early
  const auto until_called_in = [&](Time pause) {
    until([&] {
      return network_->open_lines() == 1 && a_.worker->next_timer() == clock_.now() + pause;
    });
  };
  network_->cut(network_->lines()[0]);
  until_called_in(milliseconds(10));
  clock_.advance(milliseconds(10));
  until_called_in(milliseconds(20));
  EXPECT_EQ(network_->lines().size(), 3u);
  clock_.advance(milliseconds(20));
  until([&] { return network_->open_lines() == 2; });
  run_out();
  // No call for a session that is over.
  network_->cut(network_->lines()[1]);
  run_out();
  a_.worker->disconnect(a_.peer, Time::zero()).IgnoreError();
  run_out();
  const size_t calls = network_->lines().size();
  clock_.advance(seconds(60));
  run_out();
  EXPECT_EQ(network_->lines().size(), calls);
}

// A deadline against a target that is busy costs that transfer, and nobody else.
// Promise(lost): A deadline or cancel towards a busy target costs other transfers nothing | the
//   transfer is `kEnding` until the target answers; only `stall_ms` without a byte loses a rail
TEST_F(Session, ADeadlineAtABusyTargetDelaysNoOtherPeer) {
  const CounterId counter = *b_.worker->allocate_counter();
  const TransferId late = write(counter, milliseconds(100));
  for (int k = 0; k < 20; ++k) step(/*with_b=*/false);  // bytes of it are on their way
  const TransferId other = write(counter);
  for (int i = 0; i < 25; ++i) {
    clock_.advance(milliseconds(100));
    for (int k = 0; k < 20; ++k) step(/*with_b=*/false);
  }
  EXPECT_EQ(*a_.worker->state(late), TransferState::kEnding);
  EXPECT_EQ(*a_.worker->state(other), TransferState::kActive);
  EXPECT_EQ(a_.worker->peer_state(a_.peer), PeerState::kUp);
  EXPECT_EQ(a_.worker->stats().rails_lost, 0u);
  until([&] { return ended_at_a(late) && ended_at_a(other); });
  EXPECT_EQ(*a_.worker->state(late), TransferState::kDeadline);
  EXPECT_TRUE(a_.worker->status(other).ok()) << a_.worker->status(other);
  EXPECT_EQ(a_.worker->peer_state(a_.peer), PeerState::kUp);
}

// Promise(lost): A peer that is gone for good is down at once | it says goodbye, or its address
//   refuses
TEST_F(Session, APeerThatIsGoneIsDownAtOnce) {
  const CounterId counter = *b_.worker->allocate_counter();
  network_->hold(FaultyNetwork::kThere, true);
  const TransferId id = write(counter);
  network_->refuse();
  network_->cut_all();
  until([&] { return ended_at_a(id); });
  EXPECT_TRUE(absl::IsUnavailable(a_.worker->status(id)));
  EXPECT_THAT(std::string(a_.worker->status(id).message()), HasSubstr("no worker listens"));
  EXPECT_EQ(a_.worker->peer_state(a_.peer), PeerState::kDown);
}

// Promise(lost): A peer that stays away past `peer.redial_ms` is down, and its transfers fail | a
//   timer for each peer
TEST_F(Session, APeerThatStaysAwayIsGivenUp) {
  network_->hold(FaultyNetwork::kThere, true);
  network_->hold(FaultyNetwork::kBack, true);
  network_->cut_all();
  const TransferId id = write(*b_.worker->allocate_counter());
  until([&] { return a_.worker->peer_state(a_.peer) == PeerState::kReconnecting; },
        /*with_b=*/false);
  const Time lost = clock_.now();
  while (a_.worker->peer_state(a_.peer) != PeerState::kDown && clock_.now() < lost + seconds(60)) {
    for (int k = 0; k < 20; ++k) step(/*with_b=*/false);
    clock_.advance(milliseconds(100));
  }
  EXPECT_GE(clock_.now() - lost, seconds(5));  // peer.redial_ms
  EXPECT_LE(clock_.now() - lost, seconds(6));
  until([&] { return ended_at_a(id); });
  EXPECT_THAT(std::string(a_.worker->status(id).message()), HasSubstr("peer.redial_ms"));
}

// What is open waits for the peer's word, and so does disconnect(): also one that is called again.
TEST_F(Session, DisconnectWaitsForAPeerThatIsCalledAgain) {
  const CounterId counter = *b_.worker->allocate_counter();
  network_->hold(FaultyNetwork::kBack, true);
  const TransferId id = write(counter);
  for (int k = 0; k < 50; ++k) step();
  network_->cut_all();
  until([&] { return a_.worker->peer_state(a_.peer) == PeerState::kReconnecting; });
  a_.worker->begin_disconnect(a_.peer);
  EXPECT_FALSE(ended_at_a(id)) << "bytes of it may still lie on the way";
  network_->hold(FaultyNetwork::kBack, false);
  for (int k = 0; k < 3000 && a_.worker->peer_state(a_.peer) != PeerState::kDown; ++k) {
    clock_.advance(milliseconds(1));
    for (int i = 0; i < 20; ++i) step();
  }
  ASSERT_EQ(a_.worker->peer_state(a_.peer), PeerState::kDown);
  EXPECT_TRUE(a_.worker->disconnect(a_.peer).ok()) << a_.worker->disconnect(a_.peer);
  EXPECT_TRUE(ended_at_a(id));
  std::fill(b_.memory.begin(), b_.memory.end(), kReused);
  run_out();
  EXPECT_TRUE(reused_is_whole());
}

// The side that was called knows where the other one listens, and finds it gone.
TEST_F(Session, ACallerThatDiedIsFoundOut) {
  a_.worker.reset();
  network_->cut_all();
  a_.worker = nullptr;
  baton::until([&] { return b_.worker->peer_state(b_.peer) == PeerState::kDown; },
               [&] {
                 b_.worker->progress();
                 clock_.advance(milliseconds(1));
               },
               [&] { return state_of(*b_.worker, b_.peer, "b"); });
}

}  // namespace
}  // namespace baton::tcp
