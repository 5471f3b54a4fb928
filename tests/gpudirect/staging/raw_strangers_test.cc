// Whoever holds the key and speaks tcp by a plain socket says what he likes of a worker's memory of
// a device: words that are cut, that claim what is not there, and those of before once more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/tcp/raw_peer.h"
#include "transport/internal/messages/staging_message.h"
#include "transport/worker.h"

namespace baton {
namespace {

using framed::Frame;
using framed::FrameType;
using internal::StagingMessage;
using tcp::encoded;
using Kind = StagingMessage::Kind;

class RawStrangers : public testing::Test {
 protected:
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
  bool run(const std::function<bool()>& ready) {
    const Time end = Clock::steady().now() + patient(std::chrono::seconds(60));
    while (!ready()) {
      worker_->progress();
      if (Clock::steady().now() > end) return false;
    }
    return true;
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
    socket_ = std::make_unique<tcp::RawPeer>();
    number_ = 0;
    ASSERT_NO_FATAL_FAILURE(socket_->connect(key_, who, address->providers.front().second, run_));
    ASSERT_TRUE(run([&] { return worker_->stats().peers_up == 1; }));
  }
  void hang_up() {
    socket_.reset();
    ASSERT_TRUE(run([&] { return worker_->stats().peers_up == 0; }));
  }
  // A transfer of no bytes, as words travel.
  void say(std::string_view words) {
    const Frame frame{.type = FrameType::kWrite,
                      .flags = framed::kLast,
                      .transfer = {number_, ++number_},
                      .text = static_cast<uint32_t>(words.size()),
                      .counter = CounterTable::kStaging,
                      .counter_generation = 1};
    socket_->send(encoded(frame, {}, words));
  }
  void say(const StagingMessage& message) {
    std::string words;
    message.encode(words);
    say(words);
  }
  // The next thing of this kind that the worker says of a frame, or of a chunk.
  std::optional<Frame> answer(FrameType type) {
    while (auto heard = socket_->receive_words(run_)) {
      if (heard->first.type == type) return heard->first;
    }
    return std::nullopt;
  }
  std::optional<StagingMessage> hear(Kind kind) {
    while (auto heard = socket_->receive_words(run_)) {
      if (heard->first.type != FrameType::kWrite) continue;
      // Taken, so that the worker goes on.
      socket_->send(encoded({.type = FrameType::kWriteAck,
                             .transfer = heard->first.transfer,
                             .slice = heard->first.slice}));
      if (heard->first.counter != CounterTable::kStaging) continue;
      auto message = StagingMessage::decode(heard->second);
      EXPECT_TRUE(message.ok()) << message.status();
      if (message->kind == kind) return *std::move(message);
    }
    return std::nullopt;
  }
  StagingMessage want(uint64_t bytes = 4096) {
    return {.kind = Kind::kWant, .chunk = {0, ++chunk_}, .region = remote_, .bytes = bytes};
  }
  // Room for a page, with `fill` in it.
  StagingMessage room_with(char fill) {
    say(want());
    const auto room = hear(Kind::kRoom);
    EXPECT_TRUE(room.has_value());
    const Frame frame{.type = FrameType::kWrite,
                      .flags = framed::kLast,
                      .transfer = {number_, ++number_},
                      .bytes = 4096,
                      .pieces = 1,
                      .region = room->region.index,
                      .generation = room->region.generation,
                      .key = room->region.key,
                      .slice_bytes = 4096,
                      .total_bytes = 4096};
    socket_->send(encoded(frame, {{room->offset, 4096}}, std::string(4096, fill)));
    return *room;
  }
  StagingMessage land(const StagingMessage& room, uint64_t offset = 0, uint64_t bytes = 4096) {
    return {.kind = Kind::kLand,
            .chunk = room.chunk,
            .room = room.room,
            .region = remote_,
            .bytes = bytes,
            .runs = {{offset, bytes}}};
  }
  absl::Status answered(const StagingMessage& message) {
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
  const tcp::RawPeer::Run run_ = [this](const std::function<bool()>& ready) { return run(ready); };
  std::unique_ptr<Worker> worker_;
  gpudirect::DevicePointer at_ = 0;
  MemoryRegion region_;
  RemoteRegion remote_;
  std::unique_ptr<tcp::RawPeer> socket_;
  uint32_t number_ = 0;  // of his transfers
  uint32_t chunk_ = 0;
};

// As if it was memory of the host's: no processor touches it.
TEST_F(RawStrangers, PlainFramesReachNoMemoryOfADevice) {
  Frame write{.type = FrameType::kWrite,
              .flags = framed::kLast,
              .transfer = {0, 1},
              .bytes = 4,
              .pieces = 1,
              .region = remote_.index,
              .generation = remote_.generation,
              .key = remote_.key,
              .slice_bytes = 4,
              .total_bytes = 4};
  socket_->send(encoded(write, {{0, 4}}, "late"));
  const auto written = answer(FrameType::kWriteAck);
  ASSERT_TRUE(written.has_value());
  EXPECT_NE(written->code, absl::StatusCode::kOk);
  socket_->send(encoded({.type = FrameType::kRead,
                         .transfer = {1, 1},
                         .bytes = 4,
                         .pieces = 1,
                         .region = remote_.index,
                         .generation = remote_.generation,
                         .key = remote_.key},
                        {{0, 4}}));
  const auto read = answer(FrameType::kReadEnd);
  ASSERT_TRUE(read.has_value());
  EXPECT_NE(read->code, absl::StatusCode::kOk);
  expect_untouched();
  number_ = 2;
  expect_served();
}

TEST_F(RawStrangers, ClaimsOfMemoryThatIsNotThereAreRefused) {
  for (int which = 0; which < 6; ++which) {
    StagingMessage bad = want();
    if (which % 2 == 1) {
      bad.kind = Kind::kFetch;
      bad.runs = {{0, 4096}};
    }
    if (which / 2 == 0) ++bad.region.generation;
    if (which / 2 == 1) ++bad.region.key;
    if (which / 2 == 2) bad.region.index = 1u << 30;
    EXPECT_FALSE(answered(bad).ok()) << which;
  }
  for (const uint64_t offset : {kBytes - 4095, kBytes, UINT64_MAX - 4095}) {
    StagingMessage fetch = want();
    fetch.kind = Kind::kFetch;
    fetch.runs = {{offset, 4096}};
    EXPECT_FALSE(answered(fetch).ok()) << offset;
    EXPECT_FALSE(answered(land(room_with('x'), offset)).ok()) << offset;
  }
  // More than there was room for.
  EXPECT_FALSE(answered(land(room_with('x'), 0, 4097)).ok());
  expect_untouched();
  expect_served();
}

// The room was given back when it had landed once: it may be somebody else's by now.
TEST_F(RawStrangers, WordsOfBeforeDoNothingASecondTime) {
  const StagingMessage room = room_with('1');
  EXPECT_TRUE(answered(land(room)).ok());
  EXPECT_EQ(fake().read(at_, 4096), std::string(4096, '1'));
  fake().write(at_, std::string(4096, 'o'));
  const uint64_t copies = fake().copies();
  say(land(room));
  StagingMessage release = land(room);
  release.kind = Kind::kRelease;
  EXPECT_TRUE(answered(release).ok()) << "of what is over, it is over";
  EXPECT_EQ(fake().copies(), copies);
  // Nor when the room, or the whole peer, is another's.
  const StagingMessage mine = room_with('2');
  say(land(room));
  hang_up();
  call();
  for (const StagingMessage& old : {room, mine}) say(land(old));
  expect_served();
  expect_untouched();
}

// Whatever is cut off it: the worker lets the peer go or ignores it, and serves the next one.
TEST_F(RawStrangers, WordsThatAreCutAreNotBelieved) {
  StagingMessage fetch = want();
  fetch.kind = Kind::kFetch;
  fetch.runs = {{0, 4096}};
  for (const StagingMessage& whole : {want(), fetch}) {
    std::string words;
    whole.encode(words);
    for (size_t left = 0; left < words.size(); ++left) {
      say(std::string_view(words).substr(0, left));
      say(words + std::string(left + 1, 'x'));
      hang_up();
      call();
    }
  }
  for (const uint64_t bytes : {uint64_t{0}, StagingMessage::kMaxBytes + 1, UINT64_MAX}) {
    say(want(bytes));
    hang_up();
    call();
  }
  expect_served();
  expect_untouched();
}

}  // namespace
}  // namespace baton
