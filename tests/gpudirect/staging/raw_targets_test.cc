// Whoever holds the key and is asked for room says what he likes: of memory that he has not, that
// it is all done, or another thing than before. The transfer ends, and no other is concerned.
#include "tests/gpudirect/staging/raw_stranger.h"
#include "tests/test.h"

namespace baton {
namespace {

using internal::StagingMessage;

class RawTargets : public RawStrangers {
 protected:
  // The stranger, as the worker knows him.
  PeerId him() {
    PeerId found;
    while (const auto event = worker_->next_peer_event()) {
      if (event->kind == PeerEvent::Kind::kUp) found = event->peer;
    }
    return found;
  }
  RemoteRegion his(MemoryKind kind = MemoryKind::kDevice) const {
    return {.owner = uid_,
            .key = 5,
            .size = kBytes,
            .index = 3,
            .generation = 2,
            .access = Access::kRemoteReadWrite,
            .kind = kind};
  }
  TransferId move(PeerId peer, Op op, const MemoryRegion& local, size_t bytes = 4096) {
    const auto id = worker_->submit({.op = op,
                                     .peer = peer,
                                     .local = local,
                                     .local_layout = Layout::contiguous(0, bytes),
                                     .remote = his(),
                                     .remote_layout = Layout::contiguous(0, bytes)});
    EXPECT_TRUE(id.ok()) << id.status();
    return *id;
  }
  StagingMessage room(const StagingMessage& asked, uint32_t generation,
                      MemoryKind kind = MemoryKind::kHost) const {
    return {.kind = Kind::kRoom,
            .chunk = asked.chunk,
            .room = {7, generation},
            .region = his(kind),
            .bytes = asked.bytes};
  }
  StagingMessage over(const StagingMessage& asked) const {
    return {.kind = Kind::kEnded, .chunk = asked.chunk};
  }
  // Until all that he said has been heard, and what follows from it has been done.
  void drive_a_while() {
    say(want());
    EXPECT_TRUE(hear(Kind::kRoom).has_value());
    for (int i = 0; i < 300; ++i) {
      worker_->progress();
      fake().run(1);
    }
  }
};

TEST_F(RawTargets, AnswersThatNoCorrectOneGivesEndTheTransferAndNoOther) {
  std::vector<std::byte> host(kBytes);
  const MemoryRegion of_host = *worker_->register_memory(host.data(), kBytes);
  struct Answer {
    const char* name;
    bool refused;  // whatever he says or does later
    std::function<std::vector<StagingMessage>(const StagingMessage&)> says;
  };
  const std::vector<Answer> answers = {
      {"room without a name", true, [&](const auto& m) { return std::vector{room(m, 0)}; }},
      {"room on a device", true,
       [&](const auto& m) { return std::vector{room(m, 1, MemoryKind::kDevice)}; }},
      {"too little room", true,
       [&](const auto& m) {
         std::vector out{room(m, 1)};
         --out[0].bytes;
         return out;
       }},
      {"over without room", true, [&](const auto& m) { return std::vector{over(m)}; }},
      {"over, and room", true,
       [&](const auto& m) {
         return std::vector{over(m), room(m, 1)};
       }},
      {"room, and over", false,
       [&](const auto& m) {
         return std::vector{room(m, 1), over(m)};
       }},
      {"room twice", false,
       [&](const auto& m) {
         return std::vector{room(m, 1), room(m, 2)};
       }},
  };
  for (const Op op : {Op::kWrite, Op::kRead}) {
    for (const MemoryRegion& local : {region_, of_host}) {
      for (const Answer& answer : answers) {
        SCOPED_TRACE(answer.name);
        const TransferId id = move(him(), op, local);
        const auto asked = hear(op == Op::kWrite ? Kind::kWant : Kind::kFetch);
        ASSERT_TRUE(asked.has_value());
        for (const StagingMessage& each : answer.says(*asked)) say(each);
        drive_a_while();
        if (answer.refused) {
          EXPECT_TRUE(absl::IsInvalidArgument(worker_->status(id))) << worker_->status(id);
        }
        hang_up();
        until([&] { return ended(*worker_->state(id)); });
        EXPECT_TRUE(worker_->release(id).ok());
        call();
      }
    }
  }
  expect_served();
  expect_untouched();
}

}  // namespace
}  // namespace baton
