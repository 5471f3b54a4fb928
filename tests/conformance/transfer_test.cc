// Bytes get where they should, and nowhere else: every size, alignment and layout, both directions.
#include <poll.h>

#include "tests/conformance/harness.h"

namespace baton {
namespace {

using Transfers = Conformance;

TEST_P(Transfers, EverySizeAndAlignment) {
  constexpr size_t kSizes[] = {
      0,        1,    2,    3,    7,     8,     63,    64,     65,      255,
      1000,     4095, 4096, 4097, 65535, 65536, 65537, 262143, 1 << 20, (1 << 20) + 1,
      3'333'333};
  constexpr size_t kGuard = 64;
  uint64_t seed = 1;
  for (Op op : {Op::kWrite, Op::kRead}) {
    for (size_t bytes : kSizes) {
      for (size_t from_at : {0, 1, 63}) {
        const size_t to_at = kGuard + (bytes + from_at) % 9;
        SCOPED_TRACE(testing::Message()
                     << (op == Op::kWrite ? "write " : "read ") << bytes << " from " << from_at);
        const Side& source = op == Op::kWrite ? a_ : b_;
        const Side& target = op == Op::kWrite ? b_ : a_;
        std::fill_n(target.data(), to_at + bytes + kGuard, kPoison);
        fill(source.data() + from_at, bytes, ++seed);
        TransferRequest r = request(op, a_, b_, 0, bytes);
        r.local_layout = Layout::contiguous(a_.offset(op == Op::kWrite ? from_at : to_at), bytes);
        r.remote_layout = Layout::contiguous(b_.offset(op == Op::kWrite ? to_at : from_at), bytes);
        const absl::Status status = run(a_, r);
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_EQ(memcmp(source.data() + from_at, target.data() + to_at, bytes), 0);
        ASSERT_TRUE(holds(target.data(), to_at, kPoison));
        ASSERT_TRUE(holds(target.data() + to_at + bytes, kGuard, kPoison));
      }
    }
  }
}

TEST_P(Transfers, RandomLayoutsOnBothSidesMatchAByteByByteReference) {
  constexpr size_t kRoom = 256 << 10;
  std::mt19937_64 random(2026);
  for (int round = 0, all = rounds(300); round < all; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    size_t bytes = 1;
    for (int i = 0; i < 12; ++i) {
      const size_t prime = std::array<size_t, 5>{1, 2, 3, 5, 7}[random() % 5];
      if (bytes * prime <= kRoom / 4) bytes *= prime;
    }
    const Op op = random() % 2 == 0 ? Op::kWrite : Op::kRead;
    const Side& source = op == Op::kWrite ? a_ : b_;
    const Side& target = op == Op::kWrite ? b_ : a_;
    RandomBox from;
    RandomBox to;
    make_box(from, random, bytes, 0, kRoom);
    make_box(to, random, bytes, 0, kRoom);
    ASSERT_FALSE(HasFatalFailure());
    fill(source.data(), kRoom, static_cast<uint64_t>(round));
    std::fill_n(target.data(), kRoom, kPoison);
    std::vector<std::byte> expected(kRoom, kPoison);
    ASSERT_EQ(from.offsets.size(), bytes);
    ASSERT_EQ(to.offsets.size(), bytes);
    for (size_t i = 0; i < bytes; ++i) expected[to.offsets[i]] = source.data()[from.offsets[i]];

    // The same layouts, with the block's place in its region as their base.
    const auto moved = [](const Layout& layout, const Side& side) {
      return Layout::box(layout.offset() + side.block.offset, layout.dims(), layout.piece_bytes());
    };
    TransferRequest r = request(op, a_, b_, 0, 0);
    r.local_layout = moved(op == Op::kWrite ? from.layout : to.layout, a_);
    r.remote_layout = moved(op == Op::kWrite ? to.layout : from.layout, b_);
    const absl::Status status = run(a_, r);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(memcmp(target.data(), expected.data(), kRoom), 0) << bytes << " bytes";
  }
}

TEST_P(Transfers, ThousandsOfScatteredPages) {
  constexpr size_t kPage = 1024;
  constexpr size_t kPages = kBlockBytes / kPage / 2;
  std::mt19937_64 random(7);
  std::vector<uint32_t> from(kPages * 2);
  std::iota(from.begin(), from.end(), 0);
  std::vector<uint32_t> to = from;
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  from.resize(kPages);
  to.resize(kPages);
  for (Op op : {Op::kWrite, Op::kRead}) {
    fill(a_.data(), kBlockBytes, 1);
    fill(b_.data(), kBlockBytes, 2);
    TransferRequest r = request(op, a_, b_, 0, 0);
    r.local_layout = Layout::paged(a_.offset(0), from, kPage, kPage);
    r.remote_layout = Layout::paged(b_.offset(0), to, kPage, kPage);
    const absl::Status status = run(a_, r);
    ASSERT_TRUE(status.ok()) << status;
    for (size_t i = 0; i < kPages; ++i) {
      ASSERT_EQ(memcmp(a_.data() + from[i] * kPage, b_.data() + to[i] * kPage, kPage), 0) << i;
    }
  }
}

TEST_P(Transfers, ManyAtOnceInBothDirectionsFromBothSides) {
  constexpr size_t kEach = 40'000;
  constexpr size_t kCount = 48;
  fill(a_.data(), kBlockBytes, 3);
  fill(b_.data(), kBlockBytes, 4);
  std::vector<std::byte> old_a(a_.data(), a_.data() + kBlockBytes);
  std::vector<std::byte> old_b(b_.data(), b_.data() + kBlockBytes);
  std::vector<std::pair<Side*, TransferId>> open;
  // Four lanes: a writes, a reads, b writes, b reads; lane l, transfer i moves piece 4 * i + l.
  for (size_t i = 0; i < kCount; ++i) {
    for (size_t lane = 0; lane < 4; ++lane) {
      Side& from = lane < 2 ? a_ : b_;
      Side& to = lane < 2 ? b_ : a_;
      open.emplace_back(&from, submit(from, request(lane % 2 ? Op::kRead : Op::kWrite, from, to,
                                                    (4 * i + lane) * kEach, kEach)));
    }
  }
  for (auto& [side, id] : open) {
    const absl::Status status = finish(*side, id);
    ASSERT_TRUE(status.ok()) << status;
  }
  for (size_t piece = 0; piece < 4 * kCount; ++piece) {
    const size_t at = piece * kEach;
    const bool from_a = piece % 4 == 0 || piece % 4 == 3;
    const std::byte* expected = (from_a ? old_a : old_b).data() + at;
    ASSERT_EQ(memcmp(a_.data() + at, expected, kEach), 0) << piece;
    ASSERT_EQ(memcmp(b_.data() + at, expected, kEach), 0) << piece;
  }
}

TEST_P(Transfers, TwoConnectionsBetweenTheSameWorkers) {
  const auto ends = connect(a_, b_);
  const PeerId second = ends.first, second_back = ends.second;
  EXPECT_NE(second, a_.peer);
  EXPECT_NE(second_back, b_.peer);
  fill(a_.data(), 2 << 20, 5);
  std::vector<TransferId> ids;
  for (size_t i = 0; i < 16; ++i) {
    TransferRequest r = request(Op::kWrite, a_, b_, i * 131072, 131072);
    if (i % 2) r.peer = second;
    ids.push_back(submit(a_, r));
  }
  for (TransferId id : ids) EXPECT_TRUE(finish(a_, id).ok());
  EXPECT_EQ(memcmp(a_.data(), b_.data(), 2 << 20), 0);
  // One of them goes; the other does not notice.
  a_.worker->disconnect(second, Time::zero()).IgnoreError();
  until([&] { return b_.worker->peer_state(second_back) == PeerState::kDown; });
  EXPECT_TRUE(run(a_, request(Op::kRead, a_, b_, 0, 1 << 20)).ok());
  EXPECT_TRUE(run(b_, request(Op::kWrite, b_, a_, 0, 1 << 20)).ok());
}

INSTANTIATE_TEST_SUITE_P(Conformance, Transfers, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());

// A worker that sleeps on its descriptor is woken by whatever comes, also by what came just before.
class Sleeps : public Conformance {
 protected:
  // Runs progress() of b only when arm() or the descriptor says that there is something to do.
  void drive_a_and_wake_b(const std::function<bool()>& ready, CallSite from = CallSite::here()) {
    const auto turn = [&] {
      a_.worker->progress();
      pollfd poll_b{.fd = b_.worker->wait_fd(), .events = POLLIN, .revents = 0};
      if (!b_.worker->arm() || poll(&poll_b, 1, 1) > 0) b_.worker->progress();
    };
    baton::until(
        ready, turn, [&] { return state(); }, from);
  }
};

TEST_P(Sleeps, AWorkerIsWokenByEveryTransfer) {
  if (sim()) GTEST_SKIP() << "no thread sleeps in virtual time";
  for (int round = 0, all = rounds(50); round < all; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    TransferRequest put = request(Op::kWrite, a_, b_, 0, 100'000);
    put.notify = "look";
    const TransferId id = submit(a_, put);
    if (round % 2 == 0) {  // on its way before b lies down, or after
      for (int i = 0; i < 20; ++i) a_.worker->progress();
    }
    Notification note;
    drive_a_and_wake_b([&] { return b_.worker->next_notification(note); });
    EXPECT_EQ(note.payload, "look");
    drive_a_and_wake_b([&] { return ended(a_, id); });
    EXPECT_TRUE(finish(a_, id).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Conformance, Sleeps, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace baton
