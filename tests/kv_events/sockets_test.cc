// Over ZeroMQ itself: what is published is heard, replayed, and missed where it is lost.
#include <zmq.hpp>
#include <zmq_addon.hpp>

#include "engine/kv_events/batch.h"
#include "engine/kv_events/sockets.h"
#include "engine/kv_events/token_index.h"
#include "tests/no_descriptors.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::engine::kv_events {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

PublisherConfig any_ports() {
  return {.enabled = true,
          .endpoint = "tcp://*:0",
          .replay_endpoint = "tcp://*:0",
          .topic = "kv-events"};
}

// As bound: "tcp://0.0.0.0:1234".
std::string reached(const std::string& endpoint) {
  return absl::StrCat("tcp://127.0.0.1", endpoint.substr(endpoint.rfind(':')));
}

std::unique_ptr<EventPublisher> publisher(const PublisherConfig& config = any_ports()) {
  auto made = EventPublisher::start(config);
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

// Block n of a prompt: 16 tokens n.
BlockStored block(int n) {
  return {.hashes = {absl::StrCat("hash-of-block-", 100'000 + n)},
          .parent = n == 0 ? std::optional<SentHash>()
                           : std::optional<SentHash>(absl::StrCat("hash-of-block-", 99'999 + n)),
          .tokens = std::vector<int32_t>(16, n),
          .block_size = 16,
          .medium = "GPU"};
}

std::string name_of(int n) {
  std::vector<int32_t> prompt;
  for (int i = 0; i <= n; ++i) prompt.insert(prompt.end(), 16, i);
  std::vector<serve::BlockHash> chain;
  serve::extend_chain(prompt, 16, tokens_root(), &chain);
  return serve::block_name(chain.back());
}

// What a listener knows by now.
class Heard {
 public:
  EventFollower::OnNews listener() {
    return [this](const serve::CacheNews* news) {
      const std::lock_guard lock(mutex_);
      known_ = news != nullptr;
      if (news == nullptr || news->snapshot) blocks_.clear();
      if (news == nullptr) {
        ++forgotten_;
      } else {
        for (const serve::BlockHash& hash : news->removed) blocks_.erase(serve::block_name(hash));
        for (const serve::BlockHash& hash : news->stored) blocks_.insert(serve::block_name(hash));
      }
      changed_.notify_all();
    };
  }
  void wait_for(const std::set<std::string>& blocks, CallSite from = CallSite::here()) {
    wait([&] { return known_ && blocks_ == blocks; }, from);
  }
  bool has(const std::set<std::string>& blocks) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, milliseconds(1), [&] { return known_ && blocks_ == blocks; });
  }
  void wait_for(size_t count, CallSite from = CallSite::here()) {
    wait([&] { return known_ && blocks_.size() == count; }, from);
  }
  void wait_forgotten(int times, CallSite from = CallSite::here()) {
    wait([&] { return forgotten_ >= times; }, from);
  }

 private:
  template <typename Fact>
  void wait(Fact fact, CallSite from) {
    std::unique_lock lock(mutex_);
    const auto state = [&] {
      return std::to_string(blocks_.size()) + " blocks are known, forgotten " +
             std::to_string(forgotten_) + " times";
    };
    until(
        fact, [&] { changed_.wait_for(lock, milliseconds(100)); }, state, from);
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool known_ = false;
  int forgotten_ = 0;
  std::set<std::string> blocks_;
};

std::unique_ptr<EventFollower> follower() {
  auto made = EventFollower::start({.check_after = milliseconds(50), .again = milliseconds(10)});
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

EventSource source_of(const EventPublisher& from) {
  return {.endpoint = reached(from.endpoint()),
          .replay_endpoint = reached(from.replay_endpoint()),
          .topic = "kv"};
}

TEST(KvEventSockets, WhatIsPublishedIsHeardWhateverCameBefore) {
  const auto from = publisher();
  from->publish({.events = {block(0), block(1)}});
  Heard heard;  // outlives who tells it
  const auto to = follower();
  const uint64_t id = to->follow("a worker", source_of(*from), heard.listener());
  heard.wait_for({name_of(0), name_of(1)});
  from->publish(
      {.events = {block(2), BlockRemoved{.hashes = {"hash-of-block-100000"}, .medium = "GPU"}}});
  heard.wait_for({name_of(1), name_of(2)});
  const SourceStats stats = to->stats(id);
  EXPECT_EQ(stats.order.forgotten, 0u);
  until([&] { return from->stats().replays >= 1; });
  to->leave(id);
  from->publish({.events = {AllBlocksCleared()}});
}

TEST(KvEventSockets, AnotherProcessAtTheSameEndpointHasAnotherCache) {
  TemporaryFolder folder;
  PublisherConfig config{.enabled = true,
                         .endpoint = "ipc://" + folder.path("events"),
                         .replay_endpoint = "ipc://" + folder.path("replay")};
  auto from = publisher(config);
  for (int i = 0; i < 5; ++i) from->publish({.events = {block(i)}});
  Heard heard;
  const auto to = follower();
  const uint64_t id = to->follow(
      "a worker", {.endpoint = config.endpoint, .replay_endpoint = config.replay_endpoint},
      heard.listener());
  heard.wait_for(5);
  from = nullptr;
  heard.wait_forgotten(1);
  from = publisher(config);
  from->publish({.events = {block(0)}});
  heard.wait_for({name_of(0)});
  // Who is told to begin anew does.
  to->restart(id);
  heard.wait_forgotten(2);
  heard.wait_for({name_of(0)});
}

TEST(KvEventSockets, WithoutReplaysOnlyWhatComesIsKnown) {
  PublisherConfig config = any_ports();
  config.replay_endpoint = "";
  const auto from = publisher(config);
  EXPECT_EQ(from->replay_endpoint(), "");
  Heard heard;
  const auto to = follower();
  to->follow("a worker", {.endpoint = reached(from->endpoint())}, heard.listener());
  // Until the subscription has arrived nothing is sent to it.
  until([&] { return heard.has({name_of(0)}); }, [&] { from->publish({.events = {block(0)}}); });
}

// A subscriber that is given less than there is sees that, and asks for the rest.
TEST(KvEventSockets, WhatASlowSubscriberMissesIsReplayed) {
  PublisherConfig config = any_ports();
  config.hwm = 1;
  const auto from = publisher(config);
  Heard heard;
  const auto to = follower();
  const uint64_t id = to->follow("a worker", source_of(*from), heard.listener());
  heard.wait_for(0u);
  for (int i = 0; i < 2000; ++i) from->publish({.events = {block(i)}});
  heard.wait_for(2000u);
  EXPECT_EQ(to->stats(id).order.forgotten, 0u);
}

// As consumers written for vLLM ask, frame by frame.
TEST(KvEventSockets, ReplaysHaveVllmsFrames) {
  const auto from = publisher();
  for (int i = 0; i < 3; ++i) from->publish({.events = {block(i)}});
  zmq::context_t context;
  zmq::socket_t ask(context, zmq::socket_type::dealer);
  ask.set(zmq::sockopt::linger, 0);
  ask.connect(reached(from->replay_endpoint()));
  const auto replay = [&](uint64_t first) {
    ask.send(zmq::message_t(), zmq::send_flags::sndmore);
    ask.send(zmq::buffer(sequence_frame(first)), zmq::send_flags::none);
    std::vector<std::vector<std::string>> answers;
    while (answers.empty() || !answers.back().back().empty()) {
      std::vector<zmq::message_t> frames;
      EXPECT_TRUE(zmq::recv_multipart(ask, std::back_inserter(frames)));
      answers.emplace_back();
      for (const zmq::message_t& frame : frames) answers.back().push_back(frame.to_string());
    }
    return answers;
  };
  until([&] { return from->stats().batches >= 4; });
  auto answers = replay(2);
  ASSERT_EQ(answers.size(), 3u);
  EXPECT_EQ(answers[0].size(), 4u);
  EXPECT_EQ(answers[0][0], "");
  EXPECT_EQ(answers[0][1], "kv-events");
  EXPECT_EQ(answers[0][2], sequence_frame(2));
  const auto batch = parse_batch(answers[0][3]);
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ(batch->events, std::vector<KvEvent>{block(1)});
  EXPECT_EQ(batch->rank, 0);
  EXPECT_GT(batch->time, 1.5e9);
  EXPECT_EQ(answers[1][2], sequence_frame(3));
  EXPECT_EQ(answers[2], (std::vector<std::string>{"", "", std::string(8, '\xff'), ""}));
  EXPECT_EQ(replay(4).size(), 1u);  // the end alone
  EXPECT_EQ(replay(UINT64_MAX).size(), 1u);
  // Questions that are none have no answer, and do no harm.
  ask.send(zmq::buffer(std::string("x")), zmq::send_flags::none);
  ask.send(zmq::message_t(), zmq::send_flags::sndmore);
  ask.send(zmq::buffer(std::string("short")), zmq::send_flags::none);
  EXPECT_EQ(replay(0).size(), 5u);
  // The first batch says that the cache is empty.
  EXPECT_EQ(parse_batch(replay(0)[0][3])->events, std::vector<KvEvent>{AllBlocksCleared()});
}

TEST(KvEventSockets, TheBufferHasTheNewestBatches) {
  PublisherConfig config = any_ports();
  config.buffer_steps = 2;
  const auto from = publisher(config);
  for (int i = 0; i < 5; ++i) from->publish({.events = {block(i)}});
  until([&] { return from->stats().batches >= 6; });
  Heard heard;
  const auto to = follower();
  const uint64_t id = to->follow("a worker", source_of(*from), heard.listener());
  heard.wait_for(0u);  // blocks 3 and 4 are behind one that is not known
  until([&] { return to->stats(id).left_out == 2; });
}

TEST(KvEventSockets, AnEndpointThatIsTakenOrNoneIsSaid) {
  const auto from = publisher();
  const auto why = [](const std::string& endpoint, const std::string& replay) {
    const absl::Status status =
        EventPublisher::start({.enabled = true, .endpoint = endpoint, .replay_endpoint = replay})
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << endpoint;
    return std::string(status.message());
  };
  const auto port = [](const std::string& endpoint) {
    return absl::StrCat("tcp://*", endpoint.substr(endpoint.rfind(':')));
  };
  EXPECT_THAT(why(port(from->endpoint()), ""), HasSubstr("another process uses it"));
  EXPECT_THAT(why("tcp://*:0", port(from->replay_endpoint())),
              HasSubstr(absl::StrCat("at ", port(from->replay_endpoint()))));
  EXPECT_THAT(why("ipc:///no/such/folder/events", ""), HasSubstr("/no/such/folder/events"));
}

// Whoever publishes something else is heard out, and not believed.
TEST(KvEventSockets, MalformedMessagesAreSkipped) {
  zmq::context_t context;
  zmq::socket_t pub(context, zmq::socket_type::xpub);
  pub.set(zmq::sockopt::linger, 0);
  pub.bind("tcp://127.0.0.1:*");
  zmq::socket_t replay(context, zmq::socket_type::router);
  replay.set(zmq::sockopt::linger, 0);
  replay.bind("tcp://127.0.0.1:*");
  const auto answer = [&](const std::vector<std::vector<std::string>>& messages) {
    std::vector<zmq::message_t> question;
    ASSERT_TRUE(zmq::recv_multipart(replay, std::back_inserter(question)));
    ASSERT_EQ(question.size(), 3u);
    for (const std::vector<std::string>& message : messages) {
      replay.send(zmq::buffer(question[0].to_string()), zmq::send_flags::sndmore);
      for (size_t i = 0; i < message.size(); ++i) {
        replay.send(zmq::buffer(message[i]),
                    i + 1 < message.size() ? zmq::send_flags::sndmore : zmq::send_flags::none);
      }
    }
  };
  const auto send = [&](const std::vector<std::string>& message) {
    for (size_t i = 0; i < message.size(); ++i) {
      pub.send(zmq::buffer(message[i]),
               i + 1 < message.size() ? zmq::send_flags::sndmore : zmq::send_flags::none);
    }
  };
  const auto batch = [](int n) { return encode_batch({.time = n + 1.0, .events = {block(n)}}); };
  Heard heard;
  auto made = EventFollower::start({.check_after = std::chrono::hours(1)});
  ASSERT_TRUE(made.ok());
  const uint64_t id = (*made)->follow("a worker",
                                      {.endpoint = pub.get(zmq::sockopt::last_endpoint),
                                       .replay_endpoint = replay.get(zmq::sockopt::last_endpoint)},
                                      heard.listener());
  // As vLLM answered before 0.32: without the topic.
  answer({{"", sequence_frame(0), batch(0)}, {"", sequence_frame(kEndOfReplay), ""}});
  heard.wait_for({name_of(0)});
  zmq::message_t subscription;
  ASSERT_TRUE(pub.recv(subscription));
  send({"one frame"});
  send({"", "7 bytes", batch(1)});
  send({"", sequence_frame(1), batch(1), "one too many"});
  send({"", sequence_frame(1), batch(1)});
  heard.wait_for({name_of(0), name_of(1)});
  // What cannot be read might have been anything.
  send({"", sequence_frame(2), "garbage"});
  heard.wait_forgotten(1);
  send({"", sequence_frame(3), batch(0)});
  heard.wait_for({name_of(0)});
  // Nor is an answer that is none.
  send({"", sequence_frame(9), batch(1)});
  answer({{"", "what?"}});
  heard.wait_forgotten(2);
  until([&] { return (*made)->stats(id).order.unanswered == 1; });
}

TEST(KvEventSockets, WithoutADescriptorNeitherEndStarts) {
  const NoDescriptors none;
  EXPECT_THAT(std::string(EventPublisher::start(any_ports()).status().message()),
              HasSubstr("ulimit -n"));
  EXPECT_THAT(std::string(EventFollower::start().status().message()), HasSubstr("ulimit -n"));
}

}  // namespace
}  // namespace baton::engine::kv_events
