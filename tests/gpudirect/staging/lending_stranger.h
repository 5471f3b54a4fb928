// A peer that says whatever a test likes about staging rings, by a rail of its own.
#pragma once

#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/internal/messages/control_message.h"
#include "transport/internal/staging/ring_marks.h"
#include "transport/worker.h"

namespace baton {

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
    bool post(const Slice& slice, EventSink& worker) override {
      if (slice.transfer->counter.index == CounterTable::kStaging) {
        auto message = StagingMessage::decode(slice.transfer->notify);
        EXPECT_TRUE(message.ok()) << message.status();
        all_.said_ring |= message->kind == Kind::kRing;
        all_.heard.push_back(*std::move(message));
      }
      worker.slice_done(*this, slice.transfer->id, slice.index, absl::OkStatus());
      return true;
    }
    void abort(TransferId, EventSink&) override {}
    void close(absl::Status why, EventSink& worker) override {
      all_.closed = true;
      worker.rail_down(*this, std::move(why));
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

// Of a ring that the peer shows.
struct RingMemory {
  explicit RingMemory(size_t bytes) : words(bytes / 8 + 9) {}
  std::byte* data(size_t at = 0) { return reinterpret_cast<std::byte*>(words.data()) + at; }
  std::vector<uint64_t> words;
};

class LendingStrangers : public testing::Test {
 protected:
  static constexpr size_t kBytes = 1 << 20;
  static constexpr uint32_t kTurn = 99;  // of what the worker reads
  // What a correct peer would show: marks behind the room.
  static constexpr size_t kRing = RingMarks::with_room(16 * RingSpace::kPage);

  LendingStrangers() : LendingStrangers(true) {}
  explicit LendingStrangers(bool with_device) {
    worker_ = *Worker::create({.name = "lender",
                               .key = *ClusterKey::from_bytes("a secret of the tests"),
                               .settings = {{"staging.ring_mib", "16"}, {"peer.redial_ms", "0"}},
                               .extra_providers = {[this](const ProviderContext&) {
                                 auto made = std::make_unique<Stranger>();
                                 there_ = made.get();
                                 return made;
                               }}});
    at_ = fake().allocate(kBytes);
    if (with_device) {
      region_ = *worker_->register_memory(gpudirect::pointer_of<void>(at_), kBytes);
    }
    call();
  }
  ~LendingStrangers() override {
    worker_.reset();
    fake().run_all();
    fake().free(at_);
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
    // The thread that pins may wait for a processor long.
    std::optional<StagingMessage> found;
    const auto look = [&] {
      while (!there_->heard.empty() && !found.has_value()) {
        if (there_->heard.front().kind == kind) found = std::move(there_->heard.front());
        there_->heard.pop_front();
      }
      return found.has_value();
    };
    until(look, [&] {
      turn(1);
      std::this_thread::yield();
    });
    return found;
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
  // Of what the worker reads, a page at `offset` of a ring is where it lies.
  void serve_read(uint32_t ring, uint64_t offset, uint32_t generation = 1) {
    const auto fetch = hear(Kind::kFetch);
    ASSERT_TRUE(fetch.has_value());
    RemoteRegion region = theirs(ring);
    region.generation = generation;
    say({.kind = Kind::kRoom,
         .chunk = fetch->chunk,
         .room = {0, kTurn},
         .region = region,
         .offset = offset,
         .bytes = fetch->bytes});
  }
  absl::Status read(uint32_t ring, uint64_t offset) {
    TransferRequest request = write(4096);
    request.op = Op::kRead;
    const TransferId id = *worker_->submit(request);
    serve_read(ring, offset);
    turn();
    EXPECT_TRUE(ended(*worker_->state(id)));
    return worker_->status(id);
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

  gpudirect::CleanFake gpu_;
  Stranger* there_ = nullptr;
  std::unique_ptr<Worker> worker_;
  gpudirect::DevicePointer at_ = 0;
  MemoryRegion region_;
  WorkerUid uid_;
  PeerId peer_;
  uint32_t generation_ = 0;
};

}  // namespace baton
