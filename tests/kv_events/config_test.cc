// vLLM's --kv-events-config, and where a worker's events are heard.
#include "engine/kv_events/config.h"
#include "tests/test.h"

namespace baton::engine::kv_events {
namespace {

using testing::HasSubstr;

TEST(KvEventsConfig, IsVllms) {
  auto config = parse_publisher_config(
      R"({"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:6557",)"
      R"("replay_endpoint":"tcp://*:6558","topic":"kv-events","buffer_steps":10,"hwm":20,)"
      R"("max_queue_size":30})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->enabled);
  EXPECT_EQ(config->endpoint, "tcp://*:6557");
  EXPECT_EQ(config->replay_endpoint, "tcp://*:6558");
  EXPECT_EQ(config->topic, "kv-events");
  EXPECT_EQ(config->buffer_steps, 10u);
  EXPECT_EQ(config->hwm, 20u);
  EXPECT_EQ(config->max_queue_size, 30u);
  // Its defaults.
  config = parse_publisher_config(R"({"enable_kv_cache_events":true})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->enabled);
  EXPECT_EQ(config->endpoint, "tcp://*:5557");
  EXPECT_EQ(config->replay_endpoint, "");
  EXPECT_EQ(config->buffer_steps, 10'000u);
  for (const char* off :
       {"{}", R"({"publisher":"zmq"})", R"({"enable_kv_cache_events":true,"publisher":"null"})"}) {
    config = parse_publisher_config(off);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_FALSE(config->enabled) << off;
  }
}

TEST(KvEventsConfig, BindsWhereVllmDoes) {
  const auto binds = [](const char* endpoint) {
    return PublisherConfig{.endpoint = endpoint}.binds();
  };
  EXPECT_TRUE(binds("tcp://*:5557"));
  EXPECT_TRUE(binds("tcp://[::]:5557"));
  EXPECT_TRUE(binds("ipc:///tmp/x"));
  EXPECT_FALSE(binds("tcp://10.0.0.1:5557"));
}

TEST(KvEventsConfig, WrongOnesAreRefusedByName) {
  const struct {
    const char* text;
    const char* reason;
  } cases[] = {
      {"", "JSON"},
      {"[]", "must be a JSON object"},
      {R"({"enable":true})", "\"enable\" is not one of its keys"},
      {R"({"enable_kv_cache_events":"yes"})", "enable_kv_cache_events"},
      {R"({"publisher":"kafka"})", "\"publisher\" is \"kafka\""},
      {R"({"endpoint":5})", "endpoint"},
      {R"({"endpoint":"*:5557"})", "\"endpoint\" is \"*:5557\": it must be tcp://*:PORT"},
      {R"({"endpoint":"tcp://*"})", "tcp://*:PORT"},
      {R"({"endpoint":"tcp://*:65536"})", "tcp://*:PORT"},
      {R"({"endpoint":"inproc://x"})", "tcp://*:PORT"},
      {R"({"replay_endpoint":"udp://*:1"})", "\"replay_endpoint\" is"},
      {R"({"buffer_steps":0})", "buffer_steps"},
      {R"({"hwm":-1})", "hwm"},
      {R"({"max_queue_size":1.5})", "max_queue_size"},
      {R"({"topic":["a"]})", "topic"},
  };
  for (const auto& bad : cases) {
    const absl::Status status = parse_publisher_config(bad.text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.reason));
  }
}

TEST(KvEventsSource, IsMadeOfWords) {
  std::optional<EventSource> source;
  ASSERT_TRUE(read_source_word("kv_events=tcp://h:5557", &source).ok());
  ASSERT_TRUE(read_source_word("replay=tcp://[::1]:5558", &source).ok());
  ASSERT_TRUE(read_source_word("topic=kv@h", &source).ok());
  EXPECT_EQ(source, (EventSource{"tcp://h:5557", "tcp://[::1]:5558", "kv@h"}));
  const struct {
    const char* word;
    const char* reason;
  } cases[] = {
      {"kv_events=tcp://h:1", "given twice"},
      {"events=tcp://h:1", "not one of kv_events=, replay= and topic="},
      {"replay=tcp://*:5558", "replay= is \"tcp://*:5558\": it must be tcp://HOST:PORT"},
      {"replay=tcp://h:0", "tcp://HOST:PORT"},
      {"replay=h:5558", "tcp://HOST:PORT"},
  };
  for (const auto& bad : cases) {
    const absl::Status status = read_source_word(bad.word, &source);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.word;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.reason));
  }
  std::optional<EventSource> none;
  EXPECT_THAT(std::string(read_source_word("replay=tcp://h:1", &none).message()),
              HasSubstr("come after it"));
}

}  // namespace
}  // namespace baton::engine::kv_events
