// Whoever holds the key and speaks tcp by a plain socket, to a worker that has memory of a device.
#pragma once

#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/tcp/raw_peer.h"
#include "tests/test.h"
#include "transport/internal/messages/staging_message.h"
#include "transport/worker.h"

namespace baton {

class RawStrangers : public testing::Test {
 protected:
  using Kind = internal::StagingMessage::Kind;
  static constexpr size_t kBytes = 1 << 20;

  RawStrangers() {
    worker_ = *Worker::create({.name = "served",
                               .providers = {"tcp"},
                               .key = key_,
                               .settings = {{"staging.ring_mib", "16"}, {"peer.redial_ms", "0"}}});
    at_ = fake().allocate(kBytes);
    fake().write(at_, std::string(kBytes, 'o'));
    region_ = *worker_->register_memory(gpudirect::pointer_of<void>(at_), kBytes);
    remote_ = *worker_->remote_region(region_);
    call();
  }
  ~RawStrangers() override {
    socket_.reset();
    worker_.reset();
    fake().run_all();
    fake().free(at_);
    gpu_.expect_clean();
  }
  gpudirect::FakeDriver& fake() { return gpu_.fake(); }
  void until(const std::function<bool()>& fact, CallSite from = CallSite::here()) {
    baton::until(
        fact, [&] { worker_->progress(); }, [&] { return state_of(worker_->stats(), "worker"); },
        from);
  }
  // Once more, as somebody else.
  void call() {
    const auto address = Address::decode(worker_->address());
    ASSERT_TRUE(address.ok()) << address.status();
    HelloInfo who{.uid = WorkerUid::random(), .name = "raw", .session = 7, .link = link_number()};
    who.address = Address{.uid = who.uid,
                          .name = who.name,
                          .host_id = this_host_id(),
                          .providers = {{"tcp", "127.0.0.1:1"}}}
                      .encode();
    uid_ = who.uid;
    socket_ = std::make_unique<tcp::RawPeer>();
    number_ = 0;
    ASSERT_NO_FATAL_FAILURE(socket_->connect(key_, who, address->providers.front().second, run_));
    until([&] { return worker_->stats().peers_up == 1; });
  }
  void hang_up() {
    socket_.reset();
    until([&] { return worker_->stats().peers_up == 0; });
  }
  // A transfer of no bytes, as words travel.
  void say(std::string_view words) {
    const framed::Frame frame{.type = framed::FrameType::kWrite,
                              .flags = framed::kLast,
                              .transfer = {number_, ++number_},
                              .text = static_cast<uint32_t>(words.size()),
                              .counter = CounterTable::kStaging,
                              .counter_generation = 1};
    socket_->send(tcp::encoded(frame, {}, words));
  }
  void say(const internal::StagingMessage& message) {
    std::string words;
    message.encode(words);
    say(words);
  }
  // The next thing of this kind that the worker says of a frame, or of a chunk.
  std::optional<framed::Frame> answer(framed::FrameType type) {
    while (auto heard = socket_->receive_words(run_)) {
      if (heard->first.type == type) return heard->first;
    }
    return std::nullopt;
  }
  std::optional<internal::StagingMessage> hear(Kind kind) {
    while (auto heard = socket_->receive_words(run_)) {
      if (heard->first.type != framed::FrameType::kWrite) continue;
      // Taken, so that the worker goes on.
      socket_->send(tcp::encoded({.type = framed::FrameType::kWriteAck,
                                  .transfer = heard->first.transfer,
                                  .slice = heard->first.slice}));
      if (heard->first.counter != CounterTable::kStaging) continue;
      auto message = internal::StagingMessage::decode(heard->second);
      EXPECT_TRUE(message.ok()) << message.status();
      if (message->kind == kind) return *std::move(message);
    }
    return std::nullopt;
  }
  internal::StagingMessage want(uint64_t bytes = 4096) {
    return {.kind = Kind::kWant, .chunk = {0, ++chunk_}, .region = remote_, .bytes = bytes};
  }
  // Room for a page, with `fill` in it.
  internal::StagingMessage room_with(char fill) {
    say(want());
    const auto room = hear(Kind::kRoom);
    EXPECT_TRUE(room.has_value());
    const framed::Frame frame{.type = framed::FrameType::kWrite,
                              .flags = framed::kLast,
                              .transfer = {number_, ++number_},
                              .bytes = 4096,
                              .pieces = 1,
                              .region = room->region.index,
                              .generation = room->region.generation,
                              .key = room->region.key,
                              .slice_bytes = 4096,
                              .total_bytes = 4096};
    socket_->send(tcp::encoded(frame, {{room->offset, 4096}}, std::string(4096, fill)));
    return *room;
  }
  internal::StagingMessage land(const internal::StagingMessage& room, uint64_t offset = 0,
                                uint64_t bytes = 4096) {
    return {.kind = Kind::kLand,
            .chunk = room.chunk,
            .room = room.room,
            .region = remote_,
            .bytes = bytes,
            .runs = {{offset, bytes}}};
  }
  absl::Status answered(const internal::StagingMessage& message) {
    say(message);
    const auto ended = hear(Kind::kEnded);
    return ended.has_value() ? ended->status : absl::InternalError("no answer");
  }
  // What a correct peer does works.
  void expect_served() {
    const absl::Status status = answered(land(room_with('n'), 8192));
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(fake().read(at_ + 8192, 4096), std::string(4096, 'n'));
    fake().write(at_ + 8192, std::string(4096, 'o'));
  }
  void expect_untouched() { EXPECT_TRUE(fake().read(at_, kBytes) == std::string(kBytes, 'o')); }

  gpudirect::InstalledFake gpu_;
  const ClusterKey key_ = *ClusterKey::from_bytes("a secret of the tests");
  const tcp::RawPeer::Run run_ = [this](const std::function<bool()>& ready) { until(ready); };
  std::unique_ptr<Worker> worker_;
  gpudirect::DevicePointer at_ = 0;
  MemoryRegion region_;
  RemoteRegion remote_;
  std::unique_ptr<tcp::RawPeer> socket_;
  WorkerUid uid_;
  uint32_t number_ = 0;  // of his transfers
  uint32_t chunk_ = 0;
};

}  // namespace baton
