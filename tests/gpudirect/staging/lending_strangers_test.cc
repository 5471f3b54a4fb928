// Whatever a peer lends, borrows and scribbles, nothing comes of it but the end of its own
// transfers.
#include "tests/gpudirect/staging/lending_stranger.h"
#include "tests/test.h"

namespace baton {
namespace {

TEST_F(LendingStrangers, WhatIsOfferedIsCopiedOnceWhileItIsLent) {
  RingMemory memory(kRing);
  std::fill_n(memory.data(), kRing, std::byte{5});
  const RingMarks marks(memory.data(), kRing);
  std::fill_n(memory.data() + marks.room(), kRing - marks.room(), std::byte{0});
  ASSERT_TRUE(lend(memory.data(), kRing));
  StagingMessage first = offer(0, RingSpace::kPage);
  EXPECT_TRUE(absl::IsCancelled(answered(first))) << "it is not lent";
  marks.lend(RingSpace::kPage, first.chunk.generation + 1);
  EXPECT_TRUE(absl::IsCancelled(answered(first))) << "for another turn";
  EXPECT_NE(marks.reader(RingSpace::kPage), static_cast<uint32_t>(getpid()));
  marks.lend(RingSpace::kPage, first.chunk.generation);
  EXPECT_TRUE(answered(first).ok());
  EXPECT_EQ(fake().read(at_, 4096), std::string(4096, 5));
  EXPECT_TRUE(absl::IsCancelled(answered(first))) << "twice";
  for (const uint64_t outside :
       {uint64_t{1}, marks.room(), ~uint64_t{0}, ~uint64_t{0} - RingSpace::kPage + 1}) {
    EXPECT_TRUE(absl::IsInvalidArgument(answered(offer(0, outside)))) << outside;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(answered(offer(1, 0)))) << "another ring";
  StagingMessage elsewhere = offer(0, 0);
  marks.lend(0, elsewhere.chunk.generation);
  elsewhere.runs = {{kBytes, 4096}};
  EXPECT_TRUE(absl::IsOutOfRange(answered(elsewhere))) << answered(elsewhere);
  call();
  marks.lend(0, generation_ + 1);
  EXPECT_TRUE(absl::IsInvalidArgument(answered(offer(0, 0)))) << "another peer's ring";
  EXPECT_FALSE(there_->closed);
}

TEST_F(LendingStrangers, NoMoreIsCopiedAtATimeThanAPeerMayHaveUnderWay) {
  constexpr size_t kPages = 300, kServed = 256;
  const size_t ring = RingMarks::with_room(kPages * RingSpace::kPage);
  RingMemory memory(ring);
  const RingMarks marks(memory.data(), ring);
  ASSERT_TRUE(lend(memory.data(), ring));
  for (size_t page = 0; page < kPages; ++page) {
    const StagingMessage message = offer(0, page * RingSpace::kPage);
    marks.lend(page * RingSpace::kPage, message.chunk.generation);
    say(message);
  }
  size_t refused = 0;
  for (size_t i = 0; i < kPages; ++i) {
    const auto ended = hear(Kind::kEnded);
    ASSERT_TRUE(ended.has_value()) << i;
    refused += absl::IsResourceExhausted(ended->status) ? 1 : 0;
  }
  EXPECT_EQ(refused, kPages - kServed);
}

TEST_F(LendingStrangers, PagesAreLentOnlyToPeersThatCanUseThem) {
  for (const bool older : {true, false}) {
    SCOPED_TRACE(older);
    there_->shows_files = older;
    call(older ? kLendingProtocol - 1 : kLendingProtocol);
    there_->said_ring = false;
    ASSERT_TRUE(worker_->submit(write(4096)).ok());
    EXPECT_TRUE(hear(Kind::kWant).has_value());
    EXPECT_FALSE(there_->said_ring);
    say({.kind = Kind::kFetch,
         .chunk = {0, ++generation_},
         .region = *worker_->remote_region(region_),
         .bytes = 4096,
         .runs = {{0, 4096}}});
    const auto room = hear(Kind::kRoom);
    ASSERT_TRUE(room.has_value());
    const RingMarks marks(there_->ring.base, there_->ring.size);
    EXPECT_FALSE(marks.borrow(room->offset, room->room.generation, 1));
    EXPECT_TRUE(read(0, 0).ok());
    EXPECT_EQ(there_->looked_at, 0u);
  }
}

TEST_F(LendingStrangers, WhatIsReadIsCopiedFromTheRingOnceThatIsPinned) {
  RingMemory memory(kRing);
  std::fill_n(memory.data(), kRing, std::byte{0});
  const RingMarks marks(memory.data(), kRing);
  std::fill_n(memory.data(), RingSpace::kPage, std::byte{6});
  there_->shown.push_back({memory.data(), kRing, std::make_shared<int>(0)});
  marks.lend(0, kTurn);
  TransferRequest host = write(4096);
  host.op = Op::kRead;
  host.remote.kind = MemoryKind::kHost;
  const TransferId other = *worker_->submit(host);
  turn();
  EXPECT_EQ(*worker_->state(other), TransferState::kDone);
  EXPECT_EQ(there_->looked_at, 0u) << "what is the host's lies in no ring";
  // Until then over the wire, which brings nothing here.
  ASSERT_TRUE(read(0, 0).ok());
  bool copied = false;
  until([&] { return copied; },
        [&] {
          marks.lend(0, kTurn);
          ASSERT_TRUE(read(0, 0).ok());
          copied = fake().read(at_, 4096) == std::string(4096, 6);
          std::this_thread::yield();  // to the one that pins
        });
  EXPECT_TRUE(marks.take_back(0)) << "nobody reads there any more";
  for (const StagingMessage& message : there_->heard) {
    EXPECT_NE(message.kind, Kind::kBorrows) << "no ring was shown";
  }
  // What lies in no ring, or in one that there is no room for, goes over the wire, which takes it
  // or does not.
  for (const uint64_t offset :
       {uint64_t{1}, uint64_t{1} << 40, ~uint64_t{0} / RingSpace::kPage * RingSpace::kPage}) {
    EXPECT_TRUE(read(0, offset).ok());
  }
  for (uint32_t i = 1; i < 100; ++i)
    say({.kind = Kind::kRing, .room = {i, 1}, .region = theirs(i)});
  EXPECT_TRUE(read(200, 0).ok());
  EXPECT_FALSE(there_->closed);
}

TEST_F(LendingStrangers, ARingIsKnownByItsPeerAndItsName) {
  std::vector<RingMemory> memory(4, RingMemory(kRing));
  ASSERT_TRUE(lend(memory[0].data(), kRing));
  EXPECT_EQ(there_->looked_at, 1u);
  const auto show_again = [&](size_t which, const RemoteRegion& region) {
    there_->shown.resize(2);
    there_->shown[region.index] = {memory[which].data(), kRing, std::make_shared<int>(0)};
    say({.kind = Kind::kRing, .room = {region.index, 1}, .region = region});
    turn();
    return there_->looked_at;
  };
  EXPECT_EQ(show_again(0, theirs(0)), 1u) << "the same";
  RemoteRegion anew = theirs(0);
  anew.generation = 2;
  EXPECT_EQ(show_again(1, anew), 2u);
  EXPECT_EQ(show_again(2, theirs(1)), 3u);
  call();
  EXPECT_EQ(show_again(3, theirs(0)), 4u) << "another peer's";
}

TEST_F(LendingStrangers, NothingIsCopiedFromARingThatIsNotPinned) {
  RingMemory memory(kRing);
  fake().fail_next("cuMemHostRegister", gpudirect::kOutOfMemory);
  show(memory.data(), kRing);
  worker_->progress();
  const RingMarks marks(memory.data(), kRing);
  const StagingMessage early = offer(0, 0);
  marks.lend(0, early.chunk.generation);
  EXPECT_TRUE(absl::IsInvalidArgument(answered(early)));
  EXPECT_TRUE(lend(memory.data(), kRing)) << "the next one";
}

TEST_F(LendingStrangers, TheWorkerShowsItsRingOnce) {
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(worker_->submit(write(4096)).ok());
  turn();
  EXPECT_EQ(std::count_if(there_->heard.begin(), there_->heard.end(),
                          [](const auto& message) { return message.kind == Kind::kRing; }),
            1);
  // Nor does it lend what it did not show.
  there_->heard.clear();
  say({.kind = Kind::kBorrows, .room = {7, 1}});
  call();
  say({.kind = Kind::kBorrows, .room = {0, 1}});
  ASSERT_TRUE(worker_->submit(write(4096)).ok());
  EXPECT_TRUE(hear(Kind::kWant).has_value());
}

class LendingStrangersAlone : public LendingStrangers {
 protected:
  LendingStrangersAlone() : LendingStrangers(false) {}
};

TEST_F(LendingStrangersAlone, AWorkerWithoutADeviceBorrowsNothing) {
  RingMemory memory(kRing);
  show(memory.data(), kRing);
  turn();
  EXPECT_FALSE(there_->closed);
}

// Nor is one pinned that is larger than any ring: pages that nobody has touched would be made.
TEST_F(LendingStrangers, NoRingIsOddOrTinyOrHuge) {
  RingMemory memory(kRing);
  for (const auto& [at, size] : {std::pair<size_t, size_t>{0, kRing - 1},
                                 {4, kRing},
                                 {0, 0},
                                 {0, RingSpace::kPage},
                                 {0, size_t{1} << 40}}) {
    show(memory.data(at), size);
    turn();
  }
  EXPECT_TRUE(lend(memory.data(), kRing));
  EXPECT_FALSE(there_->closed);
}

TEST_F(LendingStrangers, TenThousandRingsAreNoMoreThanItsShare) {
  for (uint32_t i = 0; i < 10'000; ++i) {
    say({.kind = Kind::kRing, .room = {i, 1}, .region = theirs(i)});
    if (i % 100 == 0) turn(1);
  }
  turn();
  EXPECT_FALSE(there_->closed);
  EXPECT_LE(there_->looked_at, 64u + 1) << "what is not there is not looked for again";
}

TEST_F(LendingStrangers, MarksWithoutAnOwnerReturnTheirPages) {
  // Until the worker lends what it writes.
  const TransferId first = *worker_->submit(write(4096));
  const auto ring = hear(Kind::kRing);
  ASSERT_TRUE(ring.has_value());
  say({.kind = Kind::kBorrows, .room = ring->room});
  turn();
  EXPECT_TRUE(worker_->cancel(first).ok());
  const RingMarks marks(there_->ring.base, there_->ring.size);
  // A process that is gone, one that has ended, none, and such as cannot be.
  pid_t children[2];
  for (pid_t& child : children) {
    child = fork();
    if (child == 0) _exit(0);
    siginfo_t end;
    waitid(P_PID, static_cast<id_t>(child), &end, WEXITED | WNOWAIT);
  }
  waitpid(children[0], nullptr, 0);
  for (const uint64_t mark : {uint64_t{static_cast<uint32_t>(children[0])} << 8 | 2,
                              uint64_t{static_cast<uint32_t>(children[1])} << 8 | 2, uint64_t{2},
                              uint64_t{0xffffffff} << 8 | 2, ~uint64_t{0}, uint64_t{1} << 63}) {
    SCOPED_TRACE(mark);
    const TransferId id = *worker_->submit(write(4096));
    const auto offered = hear(Kind::kOffer);
    ASSERT_TRUE(offered.has_value());
    uint64_t* const word = reinterpret_cast<uint64_t*>(
        marks.ring() + marks.room() + offered->offset / RingSpace::kPage * RingMarks::kMark);
    *word = mark;
    say({.kind = Kind::kEnded, .chunk = offered->chunk});
    turn();
    EXPECT_EQ(*worker_->state(id), TransferState::kDone);
    until([&] { return *word == 0; }, [&] { turn(1); });  // else the page is out of use
  }
  waitpid(children[1], nullptr, 0);
}

}  // namespace
}  // namespace baton
