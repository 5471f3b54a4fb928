// A peer that says whatever it likes about staging rings, by a rail of the test's: of whatever it
// lends, borrows and scribbles nothing comes but the end of its own transfers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpudirect/contract/memory_place.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/gpudirect/staged_pair.h"
#include "transport/internal/messages/staging_message.h"
#include "transport/internal/staging/ring_marks.h"
#include "transport/worker.h"

namespace baton {
namespace {

using internal::Handle;
using internal::RingMarks;
using internal::RingSpace;
using internal::StagingMessage;
using Kind = StagingMessage::Kind;

// What the peer's rail shows of the peer's memory, and what came over it.
class Stranger : public Provider {
 public:
  class Link : public Rail {
   public:
    explicit Link(Stranger& all) : all_(all) {}
    const Properties& properties() const override { return properties_; }
    absl::Status reaches(const RemoteRegion&) const override { return absl::OkStatus(); }
    bool shows_files() const override { return all_.shows_files; }
    absl::StatusOr<RemoteView> view(const RemoteRegion& remote) const override {
      ++all_.looked_at;
      if (remote.index >= all_.shown.size()) return absl::NotFoundError("no such region");
      return all_.shown[remote.index];
    }
    // Words are kept, bytes go where the test says: nowhere.
    bool post(const Slice& slice, EventSink& sink) override {
      if (slice.transfer->counter.index == CounterTable::kStaging) {
        auto message = StagingMessage::decode(slice.transfer->notify);
        EXPECT_TRUE(message.ok()) << message.status();
        all_.said_ring |= message->kind == Kind::kRing;
        all_.heard.push_back(*std::move(message));
      }
      sink.slice_done(*this, slice.transfer->id, slice.index, absl::OkStatus());
      return true;
    }
    void abort(TransferId, EventSink&) override {}
    void close(absl::Status why, EventSink& sink) override {
      all_.closed = true;
      sink.rail_down(*this, std::move(why));
    }

   private:
    Stranger& all_;
    Properties properties_{.provider = "stranger", .route = "stranger"};
  };

  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override { return "here"; }
  absl::Status reachable(const std::string&, std::string_view) const override {
    return absl::OkStatus();
  }
  void connect(const ConnectRequest&) override {}
  absl::Status add_region(const RegionEntry& region) override {
    if (region.file.fd >= 0) ring = region;  // the only one that has a file
    return absl::OkStatus();
  }
  absl::Status remove_region(const RegionEntry&, EventSink&) override { return absl::OkStatus(); }
  bool progress(EventSink& worker) override {
    sink = &worker;
    if (caller.has_value()) {
      auto link = std::make_unique<Link>(*this);
      rail = link.get();
      worker.accepted(*std::exchange(caller, std::nullopt), std::move(link));
    }
    return false;
  }
  int wait_fd() const override { return -1; }
  bool arm() override { return true; }

  EventSink* sink = nullptr;
  Link* rail = nullptr;
  std::optional<HelloInfo> caller;
  bool closed = false;
  bool shows_files = true;
  bool said_ring = false;  // that the worker lends what the peer may map
  mutable size_t looked_at = 0;
  std::vector<RemoteView> shown;  // by the index of the region
  std::deque<StagingMessage> heard;
  RegionEntry ring;  // the worker's

 private:
  const Capabilities capabilities_{.name = "stranger", .available = true};
};

struct Memory {
  explicit Memory(size_t bytes) : words(bytes / 8 + 9) {}
  std::byte* data(size_t at = 0) { return reinterpret_cast<std::byte*>(words.data()) + at; }
  std::vector<uint64_t> words;
};

class LendingStrangers : public testing::Test {
 protected:
  static constexpr size_t kBytes = 1 << 20;
  // What a correct peer would show: marks behind the room.
  static constexpr size_t kRing = RingMarks::with_room(16 * RingSpace::kPage);

  LendingStrangers() {
    worker_ = *Worker::create({.name = "lender",
                               .key = *ClusterKey::from_bytes("a secret of the tests"),
                               .settings = {{"staging.ring_mib", "16"}, {"peer.redial_ms", "0"}},
                               .extra_providers = {[this](const ProviderContext&) {
                                 auto made = std::make_unique<Stranger>();
                                 there_ = made.get();
                                 return made;
                               }}});
    at_ = fake().allocate(kBytes);
    region_ = *worker_->register_memory(gpudirect::pointer_of<void>(at_), kBytes);
    call();
  }
  ~LendingStrangers() override {
    worker_.reset();
    fake().run_all();
    fake().free(at_);
    gpu_.expect_clean();
  }
  gpudirect::FakeDriver& fake() { return gpu_.fake(); }
  void call(uint16_t protocol = kHighestProtocol) {
    HelloInfo who{.uid = WorkerUid::random(), .name = "stranger", .session = 7, .link = 1 << 20};
    who.protocol = protocol;
    who.address = Address{.uid = who.uid,
                          .name = who.name,
                          .host_id = this_host_id(),
                          .providers = {{"stranger", "there"}}}
                      .encode();
    uid_ = who.uid;
    there_->caller = who;
    there_->closed = false;
    turn();
    while (auto event = worker_->next_peer_event()) {
      if (event->kind == PeerEvent::Kind::kUp) peer_ = event->peer;
    }
  }
  void turn(int rounds = 8) {
    for (int i = 0; i < rounds; ++i) {
      worker_->progress();
      fake().run_all();
    }
  }
  void say(const StagingMessage& message) {
    std::string words;
    message.encode(words);
    there_->sink->arrived(*there_->rail, {.transfer = {0, ++generation_},
                                          .counter_index = CounterTable::kStaging,
                                          .counter_generation = 1,
                                          .notify = words});
  }
  // The next thing of this kind that the worker said.
  std::optional<StagingMessage> hear(Kind kind) {
    for (int i = 0; i < 2000; ++i) {
      while (!there_->heard.empty()) {
        StagingMessage message = std::move(there_->heard.front());
        there_->heard.pop_front();
        if (message.kind == kind) return message;
      }
      turn(1);
      std::this_thread::yield();  // a thread pins
    }
    return std::nullopt;
  }
  RemoteRegion theirs(uint32_t index, uint64_t size = kRing) const {
    return {.owner = uid_,
            .key = 1,
            .size = size,
            .index = index,
            .generation = 1,
            .access = Access::kRemoteReadWrite};
  }
  // Shows the worker a ring, whose number is that of the region.
  uint32_t show(std::byte* data, size_t size) {
    const auto number = static_cast<uint32_t>(there_->shown.size());
    there_->shown.push_back({data, size, std::make_shared<int>(0)});
    say({.kind = Kind::kRing, .room = {number, 1}, .region = theirs(number, size)});
    return number;
  }
  // And it is the next one that the worker has mapped and pinned, which it does in their order.
  bool lend(std::byte* data, size_t size) {
    const uint32_t number = show(data, size);
    const auto borrows = hear(Kind::kBorrows);
    return borrows.has_value() && borrows->room.index == number;
  }
  StagingMessage offer(uint32_t ring, uint64_t offset, uint64_t bytes = 4096) {
    return {.kind = Kind::kOffer,
            .chunk = {0, ++generation_},
            .room = {ring, 1},
            .region = *worker_->remote_region(region_),
            .offset = offset,
            .bytes = bytes,
            .runs = {{0, bytes}}};
  }
  absl::Status answered(const StagingMessage& message) {
    say(message);
    const auto ended = hear(Kind::kEnded);
    return ended.has_value() ? ended->status : absl::InternalError("no answer");
  }
  TransferRequest write(size_t bytes, uint32_t region = 1000) {
    RemoteRegion far = theirs(region, kBytes);
    far.kind = MemoryKind::kDevice;
    return {.op = Op::kWrite,
            .peer = peer_,
            .local = region_,
            .local_layout = Layout::contiguous(0, bytes),
            .remote = far,
            .remote_layout = Layout::contiguous(0, bytes)};
  }

  gpudirect::InstalledFake gpu_;
  Stranger* there_ = nullptr;
  std::unique_ptr<Worker> worker_;
  gpudirect::DevicePointer at_ = 0;
  MemoryRegion region_;
  WorkerUid uid_;
  PeerId peer_;
  uint32_t generation_ = 0;
};

TEST_F(LendingStrangers, WhatIsOfferedIsCopiedOnceWhileItIsLent) {
  Memory memory(kRing);
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
  Memory memory(ring);
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

TEST_F(LendingStrangers, NothingIsLentToWhoCannotUseIt) {
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
  }
}

// Nor is one pinned that is larger than any ring: pages that nobody has touched would be made.
TEST_F(LendingStrangers, NoRingIsOddOrTinyOrHuge) {
  Memory memory(kRing);
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

TEST_F(LendingStrangers, MarksOfNobodyGiveTheirPagesBack) {
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
    const Time end = Clock::steady().now() + patient(std::chrono::seconds(10));
    while (*word != 0 && Clock::steady().now() < end) turn(1);
    EXPECT_EQ(*word, 0u) << "the page is out of use";
  }
  waitpid(children[1], nullptr, 0);
}

}  // namespace
}  // namespace baton
