// A short session over real sockets whose connection ends, or falls silent, after byte k in either
// direction: after the first, the second, and so on to the last, the handshake's included. Nothing
// hangs, lands twice or is told without being there; once the connection was up nothing fails.
//
// Here some of the bytes, and BATON_CASES=all is each of them; BATON_CASES=there:57:cut is one
// case.
#include <iostream>

#include "tests/manual_clock.h"
#include "tests/sanitized.h"
#include "tests/tcp/faulty_network.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/worker.h"

namespace baton::tcp {
namespace {

using std::chrono::milliseconds;
using Direction = FaultyNetwork::Direction;

constexpr size_t kCutBytes = 200;

char source_byte(size_t at) { return static_cast<char>('A' + at % 23); }

struct Case {
  Direction way = FaultyNetwork::kThere;
  size_t bytes = SIZE_MAX;  // how many come through
  bool silent = false;
  std::string text() const {
    return std::string(way == FaultyNetwork::kThere ? "there:" : "back:") + std::to_string(bytes) +
           (silent ? ":silent" : ":cut");
  }
};

class CutSession {
 public:
  explicit CutSession(const Case& what, const std::string& protection) {
    for (TcpSide& side : sides_) {
      side.start({.name = "side",
                  .clock = &clock_,
                  .max_transfers = 16,
                  .settings = {{"tcp.sockets", "1"},
                               {"tcp.integrity", protection},
                               {"tcp.stall_ms", "300"},
                               {"tcp.handshake_ms", "300"}}},
                 std::vector<char>(4 * kCutBytes, 'u'));
    }
    network_ = std::make_unique<FaultyNetwork>(sides_[1].worker->address());
    network_->limit_next(what.way, what.bytes, what.silent);
    time_passes_ = what.bytes != SIZE_MAX;
  }

  void run() {
    Worker& worker = *sides_[0].worker;
    const PeerId peer = *worker.connect(network_->address());
    for (size_t i = 0; i < kCutBytes; ++i) {
      sides_[0].memory[i] = sides_[1].memory[2 * kCutBytes + i] = source_byte(i);
    }
    counter_ = *sides_[1].worker->allocate_counter();
    TransferRequest put = request(peer, 0, 0);
    put.counter = sides_[1].worker->remote_counter(counter_);
    put.notify = "put";
    TransferRequest get = request(peer, kCutBytes, 2 * kCutBytes);
    get.op = Op::kRead;
    const std::array ids = {*worker.submit(put), *worker.notify(peer, "note"), *worker.submit(get)};
    until([&] {
      return std::all_of(ids.begin(), ids.end(),
                         [&](TransferId id) { return ended(*worker.state(id)); });
    });
    for (int quiet = 0; quiet < 20; ++quiet) {
      if (step()) quiet = 0;
    }
    std::array<absl::Status, 3> results;
    for (size_t i = 0; i < ids.size(); ++i) {
      results[i] = worker.status(ids[i]);
      EXPECT_EQ(results[i].ok(), results[i].message().empty());
      if (up_) {
        EXPECT_TRUE(results[i].ok()) << i << " failed though it was connected: " << results[i];
      }
      all_ok_ = all_ok_ && results[i].ok();
    }
    check(results);
  }
  bool all_ok() const { return all_ok_; }
  size_t passed(Direction way) const { return network_->passed(way); }

 private:
  TransferRequest request(PeerId peer, size_t here, size_t there) const {
    return {.peer = peer,
            .local = sides_[0].region,
            .local_layout = Layout::contiguous(here, kCutBytes),
            .remote = sides_[1].remote,
            .remote_layout = Layout::contiguous(there, kCutBytes)};
  }

  void check(const std::array<absl::Status, 3>& results) {
    const uint64_t counted = sides_[1].worker->counter_value(counter_);
    EXPECT_LE(counted, 1u);
    EXPECT_LE(puts_, 1);
    EXPECT_LE(notes_, 1);
    if (results[0].ok()) {
      EXPECT_EQ(counted, 1u);
      EXPECT_EQ(puts_, 1);
    }
    if (results[1].ok()) {
      EXPECT_EQ(notes_, 1);
    }
    const std::vector<char>& target = sides_[1].memory;
    // Reused when it was told of, and never written again.
    if (puts_ == 1) {
      EXPECT_EQ(std::count(target.begin(), target.begin() + kCutBytes, 'r'),
                static_cast<ptrdiff_t>(kCutBytes));
    }
    EXPECT_EQ(std::count(target.begin() + kCutBytes, target.begin() + 2 * kCutBytes, 'u'),
              static_cast<ptrdiff_t>(kCutBytes));
    for (size_t i = 0; results[2].ok() && i < kCutBytes; ++i) {
      ASSERT_EQ(sides_[0].memory[kCutBytes + i], source_byte(i));
    }
  }

  bool step() {
    bool any = network_->step();
    for (TcpSide& side : sides_) {
      any |= side.worker->progress();
      while (auto event = side.worker->next_peer_event()) {
        up_ |= event->kind == PeerEvent::Kind::kUp && &side == &sides_[0];
      }
    }
    Notification note;
    while (sides_[1].worker->next_notification(note)) {
      if (note.payload == "note") ++notes_;
      if (note.payload != "put" || ++puts_ != 1) continue;
      for (size_t i = 0; i < kCutBytes; ++i) EXPECT_EQ(sides_[1].memory[i], source_byte(i));
      std::fill_n(sides_[1].memory.begin(), kCutBytes, 'r');
    }
    if (any) {
      quiet_ = 0;
    } else if (time_passes_ && ++quiet_ % 8 == 0) {
      clock_.advance(milliseconds(1));
    }
    return any;
  }
  template <typename Ready>
  void until(const Ready& ready, CallSite from = CallSite::here()) {
    const auto state = [&] { return state_of(sides_[0].worker->stats(), "a"); };
    baton::until(
        ready, [&] { step(); }, state, from);
  }

  ManualClock clock_;
  bool time_passes_ = true;
  uint64_t quiet_ = 0;
  bool up_ = false;
  bool all_ok_ = true;
  int puts_ = 0;
  int notes_ = 0;
  CounterId counter_;
  std::unique_ptr<FaultyNetwork> network_;
  std::array<TcpSide, 2> sides_;
};

class Cuts : public testing::TestWithParam<const char*> {};

// Promise(lost): A connection cut or silenced after any byte, handshake included, hangs nothing and
//   repeats nothing | a handshake that is cut starts over, or fails what waits for it, and the next
//   call starts over; begun sessions resume
TEST_P(Cuts, AfterAnyByteCostNothingThatWasPromised) {
  CutSession whole({}, GetParam());
  whole.run();
  ASSERT_TRUE(whole.all_ok());
  const char* given = std::getenv("BATON_CASES");
  const std::string wanted = given != nullptr ? given : "";
  const bool every = !wanted.empty();
  size_t cases = 0, failed = 0;
  for (const Direction way : {FaultyNetwork::kThere, FaultyNetwork::kBack}) {
    for (const bool silent : {false, true}) {
      // Who waits for what does not come takes longer.
      const size_t step = every ? 1 : (silent ? 61 : 9) * (kSanitized ? 5 : 1);
      for (size_t bytes = 1; bytes <= whole.passed(way); bytes += step) {
        const Case one{way, bytes, silent};
        if (every && wanted != "all" && wanted != one.text()) continue;
        SCOPED_TRACE("BATON_CASES=" + one.text());
        CutSession session(one, GetParam());
        session.run();
        if (HasFailure()) return;
        ++cases;
        failed += session.all_ok() ? 0 : 1;
      }
    }
  }
  std::cout << whole.passed(FaultyNetwork::kThere) << " bytes there, "
            << whole.passed(FaultyNetwork::kBack) << " back; " << cases << " cuts, of which "
            << failed << " came before the connection was up\n";
}

INSTANTIATE_TEST_SUITE_P(Integrity, Cuts, testing::Values("off", "on"),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace baton::tcp
