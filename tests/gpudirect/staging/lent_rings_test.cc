// Staged transfers between workers that map each other's rings: what one has copied off its device
// the other copies to its own from where it lies.
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/gpudirect/staging/lent_pair.h"
#include "tests/test.h"
#include "transport/internal/staging/pinner.h"
#include "transport/internal/staging/ring_marks.h"
#include "transport/worker.h"

namespace baton {
namespace {

using internal::RingMarks;
using internal::RingSpace;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(RingMarks, PagesAreReadByTheirBorrower) {
  std::string memory(RingMarks::with_room(4 * RingSpace::kPage), '\0');
  const RingMarks marks(reinterpret_cast<std::byte*>(memory.data()), memory.size());
  ASSERT_EQ(marks.room(), 4 * RingSpace::kPage);
  const size_t page = 2 * RingSpace::kPage;
  EXPECT_FALSE(marks.borrow(page, 0, 77)) << "it is not lent";
  EXPECT_TRUE(marks.take_back(page)) << "nobody has it";
  marks.lend(page, 5);
  EXPECT_FALSE(marks.borrow(page + RingSpace::kPage, 5, 77)) << "another page";
  EXPECT_FALSE(marks.borrow(page, 4, 77)) << "an earlier turn";
  EXPECT_TRUE(marks.borrow(page, 5, 77));
  EXPECT_FALSE(marks.borrow(page, 5, 78)) << "twice";
  EXPECT_FALSE(marks.take_back(page)) << "it is being read";
  EXPECT_EQ(marks.reader(page), 77u);
  marks.give_back(page);
  EXPECT_TRUE(marks.take_back(page));
  marks.lend(page, 6);
  EXPECT_TRUE(marks.take_back(page));
  EXPECT_FALSE(marks.borrow(page, 6, 77)) << "it was taken back";
}

TEST(RingMarks, LieBehindTheRoom) {
  for (const size_t room :
       {size_t{16} << 20, size_t{64} << 20, size_t{512} << 20, size_t{4} << 30}) {
    const size_t ring = RingMarks::with_room(room);
    EXPECT_GE(ring - RingMarks::bytes_for(ring), room);
    EXPECT_LT(ring, room + room / 1000 + 2 * RingSpace::kPage);
    EXPECT_GE(RingMarks::bytes_for(ring), room / RingSpace::kPage * RingMarks::kMark);
  }
  std::string memory(RingMarks::with_room(4 * RingSpace::kPage), '\0');
  const RingMarks marks(reinterpret_cast<std::byte*>(memory.data()), memory.size());
  EXPECT_TRUE(marks.covers(0, marks.room()));
  EXPECT_FALSE(marks.covers(0, marks.room() + 1));
  EXPECT_FALSE(marks.covers(RingSpace::kPage, marks.room()));
  EXPECT_FALSE(marks.covers(1, 1)) << "within a page";
  EXPECT_FALSE(marks.covers(~uint64_t{0} / RingSpace::kPage * RingSpace::kPage, 1));
  EXPECT_FALSE(marks.covers(0, ~uint64_t{0}));
  EXPECT_EQ(RingMarks(nullptr, 100).room(), 0u);
  EXPECT_EQ(RingMarks(marks.ring(), memory.size() - 1).room(), 0u) << "marks at odd addresses";
  EXPECT_EQ(RingMarks(marks.ring() + 4, memory.size() - RingSpace::kPage).room(), 0u);
}

TEST(Pinner, DoesWhatItIsAskedInOrderAndEndsAfterIt) {
  std::atomic<int> told{0};
  std::string order;
  {
    internal::Pinner pinner([&] { ++told; });
    const auto pin = [&](char name) {
      return std::shared_ptr<void>(&order, [&order, name](void*) { order += name; });
    };
    pinner.pin(1, [&]() -> absl::StatusOr<internal::Pinner::Pin> { return pin('a'); });
    pinner.pin(2, [&]() -> absl::StatusOr<internal::Pinner::Pin> {
      return absl::ResourceExhaustedError("no memory");
    });
    until([&] { return told == 2; });
    auto done = pinner.take();
    ASSERT_EQ(done.size(), 2u);
    EXPECT_EQ(done[0].job, 1u);
    EXPECT_TRUE(done[0].pin.ok());
    EXPECT_TRUE(absl::IsResourceExhausted(done[1].pin.status()));
    EXPECT_TRUE(pinner.take().empty());
    pinner.let_go(*std::move(done[0].pin), pin('b'));
    pinner.let_go(pin('c'), nullptr);
  }
  EXPECT_EQ(order, "abc");
}

TEST_F(Lent, BytesGoFromOneRingToTheOtherDevice) {
  lend();
  const size_t by_peer = bytes_of(a_, kByPeer);
  const size_t from_b = bytes_of(a_, kFromPeer), from_a = bytes_of(b_, kFromPeer);
  const size_t large = 5 * gpudirect::kMiB + 12'345;  // several chunks
  for (const size_t bytes : {size_t{1}, size_t{600'000}, large}) {
    gpu_->write(a_.at, pattern('a', bytes));
    ASSERT_TRUE(run(request(Op::kWrite, true, true, bytes)).ok());
    ASSERT_TRUE(gpu_->read(b_.at, bytes) == pattern('a', bytes));
    gpu_->write(b_.at, pattern('b', bytes));
    ASSERT_TRUE(run(request(Op::kRead, true, true, bytes)).ok());
    ASSERT_TRUE(gpu_->read(a_.at, bytes) == pattern('b', bytes));
  }
  const size_t all = 1 + 600'000 + large;
  EXPECT_EQ(bytes_of(a_, kByPeer), by_peer + all);
  EXPECT_EQ(bytes_of(a_, kFromPeer), from_b + all);
  EXPECT_EQ(bytes_of(b_, kFromPeer), from_a + all);
}

TEST_F(Lent, OnlyBetweenDevices) {
  lend();
  const size_t by_peer = bytes_of(a_, kByPeer), from_b = bytes_of(a_, kFromPeer);
  for (const Op op : {Op::kWrite, Op::kRead}) {
    ASSERT_TRUE(run(request(op, true, false)).ok());
    ASSERT_TRUE(run(request(op, false, true)).ok());
  }
  EXPECT_EQ(bytes_of(a_, kByPeer), by_peer);
  EXPECT_EQ(bytes_of(a_, kFromPeer), from_b);
}

TEST_F(Lent, PagesGoWhereTheyBelong) {
  lend();
  constexpr size_t kPages = 700, kPage = 1024;
  std::vector<uint32_t> pages(kPages);
  for (uint32_t i = 0; i < kPages; ++i) pages[i] = kPages - 1 - i;
  const std::string sent = pattern('p', kPages * kPage);
  for (const Op op : {Op::kWrite, Op::kRead}) {
    gpu_->write(op == Op::kWrite ? a_.at : b_.at, sent);
    gpu_->write(op == Op::kWrite ? b_.at : a_.at, std::string(2 * kPages * kPage, '-'));
    TransferRequest move = request(op, true, true, kPages * kPage);
    (op == Op::kWrite ? move.remote_layout : move.local_layout) =
        Layout::paged(0, pages, 2 * kPage, kPage);
    ASSERT_TRUE(run(move).ok());
    for (size_t i = 0; i < kPages; ++i) {
      ASSERT_EQ(gpu_->read((op == Op::kWrite ? b_.at : a_.at) + pages[i] * 2 * kPage, kPage),
                sent.substr(i * kPage, kPage));
    }
  }
  EXPECT_THAT(a_.worker->explain(a_.peer), Not(HasSubstr(absl::StrCat(kByPeer, "0 bytes"))));
}

// The room of a transfer whose peer is gone is not given to the next one while that peer may still
// copy from it: nothing gets there that was meant for somebody else.
TEST_F(Lent, WhatAPeerThatIsGoneStillCopiesIsNotWrittenOver) {
  for (const Op op : {Op::kWrite, Op::kRead}) {
    size_t late = 0;
    for (size_t rounds = 1; rounds < 40; rounds += 2) {
      SCOPED_TRACE(testing::Message()
                   << rounds << " rounds, " << (op == Op::kWrite ? "written" : "read"));
      lend({.seed = rounds});
      Side& owner = op == Op::kWrite ? a_ : b_;  // of the ring that is lent
      Side& reader = op == Op::kWrite ? b_ : a_;
      gpu_->write(owner.at, pattern('s'));
      gpu_->write(reader.at, std::string(600'000, '-'));
      const TransferId id = *a_.worker->submit(request(op, true, true));
      turn(rounds);
      owner.worker->disconnect(owner.peer, Time::zero()).IgnoreError();
      // Nobody but the owner makes progress, and all its room is wanted for something else.
      gpu_->write(owner.at, std::string(kBytes, '!'));
      auto other = Worker::create({.name = "c",
                                   .providers = {"shm"},
                                   .key = *ClusterKey::from_bytes("a secret of the tests"),
                                   .settings = {{"staging.ring_mib", "16"}}});
      ASSERT_TRUE(other.ok());
      std::vector<std::byte> host(kBytes);
      const MemoryRegion region = *(*other)->register_memory(host.data(), host.size());
      // Of ours, by a write; what is served, by a read of the third worker's.
      Worker& initiator = op == Op::kWrite ? *owner.worker : **other;
      Worker& target = op == Op::kWrite ? **other : *owner.worker;
      TransferRequest next = request(op, true, true, kBytes);
      next.peer = *initiator.connect(target.address());
      next.local = op == Op::kWrite ? owner.device_region : region;
      next.remote = *target.remote_region(op == Op::kWrite ? region : owner.device_region);
      const TransferId busy = *initiator.submit(next);
      const auto alone = [&](const std::function<bool()>& ready) {
        for (int i = 0; i < 100'000 && !ready(); ++i) {
          owner.worker->progress();
          (*other)->progress();
        }
        return ready();
      };
      EXPECT_TRUE(alone([&] { return ended(*initiator.state(busy)); }));
      gpu_->run_all();
      const std::string there = gpu_->read(reader.at, 600'000);
      EXPECT_EQ(there.find('!'), std::string::npos) << "another transfer's bytes";
      late += there.find('s') != std::string::npos ? 1 : 0;
      finish(id).IgnoreError();
      other->reset();
      if (HasFailure()) return;
      TearDown();
    }
    EXPECT_GT(late, 2u) << "none was ever cut off in the middle";
  }
  lend();
}

TEST_F(Lent, ARegistrationThatGoesEndsWhatIsCopiedToIt) {
  for (size_t rounds = 0; rounds < 30; rounds += 2) {
    lend({.seed = rounds + 1});
    const TransferId id = *a_.worker->submit(request(Op::kWrite, true, true, kBytes));
    turn(rounds);
    ASSERT_TRUE(b_.worker->deregister_memory(b_.device_region).ok());
    gpu_->write(b_.at, std::string(kBytes, 'n'));
    const absl::Status status = finish(id);
    gpu_->run_all();
    ASSERT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
    ASSERT_TRUE(gpu_->read(b_.at, kBytes) == std::string(kBytes, 'n')) << rounds;
    ASSERT_TRUE(a_.worker->deregister_memory(a_.device_region).ok());
    TearDown();
  }
  lend();
}

}  // namespace
}  // namespace baton
