// A peer that holds the key says what it likes of a worker's memory of a device, or of room that it
// is asked for: claims of what is not there, words of before once more, answers that no correct
// peer gives. No byte moves for it, its own transfers end, and the next peer is served. Words that
// are cut or broken are tests/fuzz's.
#include "tests/gpudirect/staging/lending_stranger.h"
#include "tests/tcp/raw_peer.h"
#include "tests/test.h"

namespace baton {
namespace {

class RawStrangers : public LendingStrangers {
 protected:
  RawStrangers() {
    there_->shows_files = false;  // nothing of its memory: all goes by words
    fake().write(at_, std::string(kBytes, 'o'));
    again();
  }
  // Once more, as another peer.
  void again() {
    there_->sink->rail_down(*there_->rail, absl::UnavailableError("gone"));
    until([&] { return worker_->stats().peers_up == 0; }, [&] { turn(1); });
    there_->heard.clear();
    call();
  }
  StagingMessage want() {
    return {.kind = Kind::kWant,
            .chunk = {0, ++generation_},
            .region = *worker_->remote_region(region_),
            .bytes = 4096};
  }
  // Room for a page, with `fill` in it.
  StagingMessage room_with(char fill) {
    say(want());
    auto room = hear(Kind::kRoom);
    EXPECT_TRUE(room.has_value());
    std::memset(there_->ring.base + room->offset, fill, 4096);
    return *std::move(room);
  }
  StagingMessage land(const StagingMessage& room, uint64_t offset = 0, uint64_t bytes = 4096) {
    return {.kind = Kind::kLand,
            .chunk = room.chunk,
            .room = room.room,
            .region = *worker_->remote_region(region_),
            .bytes = bytes,
            .runs = {{offset, bytes}}};
  }
  // What a correct peer does works, and nothing else was written.
  void expect_served() {
    const absl::Status status = answered(land(room_with('n'), 8192));
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(fake().read(at_ + 8192, 4096), std::string(4096, 'n'));
    fake().write(at_ + 8192, std::string(4096, 'o'));
    EXPECT_TRUE(fake().read(at_, kBytes) == std::string(kBytes, 'o'));
  }
};

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
  expect_served();
}

// The room was given back when it had landed once: it may be another transfer's by now.
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
  again();
  for (const StagingMessage& old : {room, mine}) say(land(old));
  expect_served();
}

TEST_F(RawStrangers, APeerThatStandsStillLeavesRoomForOthers) {
  StagingMessage all = want();
  all.bytes = kBytes;
  constexpr ptrdiff_t kAsked = 20;  // of 16 MiB
  for (ptrdiff_t i = 0; i < kAsked; ++i, all.chunk = {0, ++generation_}) say(all);
  turn(100);
  const auto rooms = std::count_if(there_->heard.begin(), there_->heard.end(),
                                   [](const auto& said) { return said.kind == Kind::kRoom; });
  EXPECT_GT(rooms, 0);
  EXPECT_LT(rooms, kAsked);
  there_->heard.clear();
  call();
  say(all);
  EXPECT_TRUE(hear(Kind::kRoom).has_value());
}

// The same of the worker's own room: a peer gives room for each write, and ends none.
TEST_F(RawStrangers, APeerThatEndsNothingLeavesRoomForOthers) {
  // Bytes that were sent to the last peer, of what it was asked for.
  const auto sent_in = [&](int rounds) {
    size_t bytes = 0;
    for (int i = 0; i < rounds; ++i, turn(1)) {
      for (; !there_->heard.empty(); there_->heard.pop_front()) {
        const StagingMessage& said = there_->heard.front();
        if (said.region.owner != uid_) continue;
        if (said.kind == Kind::kLand) bytes += said.bytes;
        if (said.kind != Kind::kWant) continue;
        say({.kind = Kind::kRoom,
             .chunk = said.chunk,
             .room = {7, ++generation_},
             .region = theirs(3, kBytes),
             .bytes = said.bytes});
      }
    }
    return bytes;
  };
  constexpr size_t kWrites = 20;  // of 16 MiB
  for (size_t i = 0; i < kWrites; ++i) ASSERT_TRUE(worker_->submit(write(kBytes, 3)).ok());
  const size_t idle = sent_in(200);
  EXPECT_GT(idle, 0u);
  EXPECT_LT(idle, kWrites * kBytes);
  call();
  ASSERT_TRUE(worker_->submit(write(kBytes, 3)).ok());
  EXPECT_GT(sent_in(200), 0u);
}

TEST_F(RawStrangers, AnswersThatNoCorrectOneGivesEndTheTransferAndNoOther) {
  std::vector<std::byte> host(kBytes);
  const MemoryRegion of_host = *worker_->register_memory(host.data(), kBytes);
  const auto room = [&](const StagingMessage& asked, uint32_t generation) {
    return StagingMessage{.kind = Kind::kRoom,
                          .chunk = asked.chunk,
                          .room = {7, generation},
                          .region = theirs(3, kBytes),
                          .bytes = asked.bytes};
  };
  const auto over = [&](const StagingMessage& asked) {
    return StagingMessage{.kind = Kind::kEnded, .chunk = asked.chunk};
  };
  using Words = std::vector<StagingMessage>;
  struct Answer {
    const char* name;
    bool refused;  // whatever the peer says or does later
    std::function<Words(const StagingMessage&)> says;
  };
  const Answer answers[] = {
      {"room without a name", true, [&](const auto& asked) { return Words{room(asked, 0)}; }},
      {"room on a device", true,
       [&](const auto& asked) {
         Words out{room(asked, 1)};
         out[0].region.kind = MemoryKind::kDevice;
         return out;
       }},
      {"too little room", true,
       [&](const auto& asked) {
         Words out{room(asked, 1)};
         --out[0].bytes;
         return out;
       }},
      {"over without room", true, [&](const auto& asked) { return Words{over(asked)}; }},
      {"over, and room", true,
       [&](const auto& asked) {
         return Words{over(asked), room(asked, 1)};
       }},
      {"room, and over", false,
       [&](const auto& asked) {
         return Words{room(asked, 1), over(asked)};
       }},
      {"room twice", false,
       [&](const auto& asked) {
         return Words{room(asked, 1), room(asked, 2)};
       }},
  };
  for (const Op op : {Op::kWrite, Op::kRead}) {
    for (const MemoryRegion& local : {region_, of_host}) {
      for (const Answer& answer : answers) {
        SCOPED_TRACE(answer.name);
        TransferRequest move = write(4096, 3);
        move.op = op;
        move.local = local;
        const auto id = worker_->submit(move);
        ASSERT_TRUE(id.ok()) << id.status();
        const auto asked = hear(op == Op::kWrite ? Kind::kWant : Kind::kFetch);
        ASSERT_TRUE(asked.has_value());
        for (const StagingMessage& each : answer.says(*asked)) say(each);
        turn(100);
        if (answer.refused) {
          EXPECT_TRUE(absl::IsInvalidArgument(worker_->status(*id))) << worker_->status(*id);
        }
        again();
        EXPECT_TRUE(ended(*worker_->state(*id)));
        EXPECT_TRUE(worker_->release(*id).ok());
        fake().write(at_, std::string(4096, 'o'));  // what a correct read brought
      }
    }
  }
  expect_served();
}

// As if it was memory of the host's, over a real connection: no processor touches it.
TEST(PlainFrames, ReachNoMemoryOfADevice) {
  constexpr size_t kBytes = 1 << 20;
  gpudirect::CleanFake gpu;
  const ClusterKey key = *ClusterKey::from_bytes("a secret of the tests");
  auto worker = *Worker::create({.name = "served",
                                 .providers = {"tcp"},
                                 .key = key,
                                 .settings = {{"staging.ring_mib", "16"}}});
  const gpudirect::DevicePointer at = gpu.fake().allocate(kBytes);
  gpu.fake().write(at, std::string(kBytes, 'o'));
  const RemoteRegion remote =
      *worker->remote_region(*worker->register_memory(gpudirect::pointer_of<void>(at), kBytes));
  const tcp::RawPeer::Run run = [&](const std::function<bool()>& ready) {
    until(ready, [&] { worker->progress(); });
  };
  HelloInfo who{.uid = WorkerUid::random(), .name = "raw", .session = 7, .link = link_number()};
  who.address = Address{.uid = who.uid,
                        .name = who.name,
                        .host_id = this_host_id(),
                        .providers = {{"tcp", "127.0.0.1:1"}}}
                    .encode();
  {
    tcp::RawPeer socket;
    socket.connect(key, who, Address::decode(worker->address())->providers.front().second, run);
    run([&] { return worker->stats().peers_up == 1; });
    framed::Frame frame{.type = framed::FrameType::kWrite,
                        .flags = framed::kLast,
                        .transfer = {0, 1},
                        .bytes = 4,
                        .pieces = 1,
                        .region = remote.index,
                        .generation = remote.generation,
                        .key = remote.key,
                        .slice_bytes = 4,
                        .total_bytes = 4};
    socket.send(tcp::encoded(frame, {{0, 4}}, "late"));
    frame.type = framed::FrameType::kRead;
    frame.transfer = {1, 1};
    frame.flags = 0;
    frame.slice_bytes = frame.total_bytes = 0;
    socket.send(tcp::encoded(frame, {{0, 4}}));
    std::set<framed::FrameType> refused;
    while (refused.size() < 2) {
      const auto heard = socket.receive_words(run);
      ASSERT_TRUE(heard.has_value());
      const framed::FrameType type = heard->first.type;
      if (type != framed::FrameType::kWriteAck && type != framed::FrameType::kReadEnd) continue;
      EXPECT_NE(heard->first.code, absl::StatusCode::kOk);
      refused.insert(type);
    }
    EXPECT_TRUE(gpu.fake().read(at, kBytes) == std::string(kBytes, 'o'));
  }
  worker.reset();
  gpu.fake().free(at);
}

}  // namespace
}  // namespace baton
