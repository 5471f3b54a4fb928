// Every slice becomes a span with its exact times, and the timeline is valid JSON whatever it
// holds.
#include <nlohmann/json.hpp>

#include "tests/sim/cluster.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/timeline.h"

namespace baton {
using namespace sim;
namespace {

using nlohmann::json;
using std::chrono::microseconds;
using std::chrono::milliseconds;

struct TracedTest : testing::Test {
  void make(size_t capacity = 1000) {
    cluster.emplace(SimOptions{.link = {.bytes_per_second = 1e9, .latency = microseconds(2)},
                               .slice_bytes = 100'000},
                    2 << 20);
    cluster->stop(0);
    timeline.emplace("decode", capacity);
    auto worker = Worker::create({.key = test_key(),
                                  .clock = &cluster->fabric.clock(),
                                  .timeline = &*timeline,
                                  .extra_providers = {cluster->fabric.provider_factory(0)}});
    ASSERT_TRUE(worker.ok()) << worker.status();
    auto& member = cluster->members[0];
    member.worker = *std::move(worker);
    member.region = *member.worker->register_memory(member.memory.data(), member.memory.size());
    member.remote = *member.worker->remote_region(member.region);
    cluster->fabric.attach(*member.worker, 0);
    peer = cluster->connect(0, 1).first;
    start = cluster->fabric.clock().now();
  }
  TransferId run(Op op, size_t bytes) {
    auto id = cluster->worker(0).submit(cluster->request(op, 0, peer, 1, bytes)).value();
    EXPECT_TRUE(cluster->run_to_end(0, id));
    return id;
  }
  std::optional<Timeline> timeline;
  std::optional<SimCluster> cluster;
  PeerId peer;
  Time start{};
};

TEST_F(TracedTest, ASpanPerSliceFromPostToReport) {
  make();
  run(Op::kWrite, 1'000'000);
  const std::vector<Span> spans = timeline->spans();
  ASSERT_EQ(spans.size(), 10u);
  for (size_t i = 0; i < spans.size(); ++i) {
    EXPECT_EQ(spans[i].track, "tx");
    EXPECT_EQ(spans[i].name, "write");
    EXPECT_EQ(spans[i].bytes, 100'000u);
    EXPECT_EQ(spans[i].begin, start);
    EXPECT_EQ(spans[i].end, start + (i + 1) * microseconds(100) + microseconds(4));
    EXPECT_EQ(spans[i].request, spans[0].request);
  }
  run(Op::kRead, 50'000);
  ASSERT_EQ(timeline->spans().size(), 11u);
  const Span read = timeline->spans().back();
  EXPECT_EQ(read.track, "rx");
  EXPECT_EQ(read.name, "read");
  EXPECT_EQ(read.end - read.begin, microseconds(54));
  EXPECT_NE(read.request, spans[0].request);
}

TEST_F(TracedTest, NamesWhatDidNotEndWell) {
  make();
  RemoteRegion& remote = cluster->members[1].remote;
  remote.key ^= 1;
  run(Op::kRead, 1000);
  EXPECT_EQ(timeline->spans().back().name, "read failed");
  remote.key ^= 1;
  auto id = cluster->worker(0).submit(cluster->request(Op::kWrite, 0, peer, 1, 2'000'000)).value();
  cluster->fabric.run_for(microseconds(10));
  ASSERT_TRUE(cluster->worker(0).cancel(id).ok());
  ASSERT_TRUE(cluster->run_to_end(0, id));
  std::set<std::string> names;
  for (const Span& span : timeline->spans()) names.insert(span.name);
  EXPECT_EQ(names, (std::set<std::string>{"read failed", "write", "write cancelled"}));
}

TEST_F(TracedTest, SpansBeyondTheCapacityAreCounted) {
  make(4);
  run(Op::kWrite, 1'000'000);
  EXPECT_EQ(timeline->spans().size(), 4u);
  EXPECT_EQ(timeline->dropped(), 6u);
}

TEST(Timeline, IsValidJsonForAnyName) {
  Timeline timeline("a \"process\"\n\\");
  constexpr char kAwkward[] = "\"\\\n\t\x01</script>\xff\xfe é ünï\0x";
  const std::string awkward(kAwkward, sizeof kAwkward - 1);
  timeline.add({"tx", awkward, Time(1'500), Time(4'750), 7, 4096});
  timeline.add({"compute", "layer 3", microseconds(10), microseconds(30), 8, 0});
  timeline.add({"tx", "layer 4", milliseconds(1), milliseconds(2), 0, 1});
  const json parsed = json::parse(timeline.to_json());
  const json& events = parsed.at("traceEvents");
  std::vector<json> spans;
  std::map<int, std::string> tracks;
  for (const json& event : events) {
    EXPECT_EQ(event.at("pid"), getpid());
    if (event.at("ph") == "X") spans.push_back(event);
    if (event.at("name") == "thread_name") tracks[event.at("tid")] = event.at("args").at("name");
    if (event.at("name") == "process_name") {
      EXPECT_EQ(event.at("args").at("name"), "a \"process\"\n\\");
    }
  }
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(tracks.size(), 2u);
  EXPECT_EQ(tracks[spans[0].at("tid")], "tx");
  EXPECT_EQ(tracks[spans[1].at("tid")], "compute");
  EXPECT_EQ(spans[2].at("tid"), spans[0].at("tid"));
  EXPECT_EQ(spans[0].at("cat"), "tx");
  EXPECT_DOUBLE_EQ(spans[0].at("ts"), 1.5);
  EXPECT_DOUBLE_EQ(spans[0].at("dur"), 3.25);
  EXPECT_EQ(spans[0].at("args").at("request"), 7);
  EXPECT_EQ(spans[0].at("args").at("bytes"), 4096);
  EXPECT_THAT(spans[0].at("name").get<std::string>(), testing::StartsWith("\"\\\n\t\x01</script>"));
  EXPECT_EQ(spans[1].at("name"), "layer 3");
}

TEST(Timeline, WritesAFileOrSaysWhyNot) {
  Timeline timeline("p");
  timeline.add({"tx", "write", Time(0), Time(1), 1, 2});
  const TemporaryFolder folder;
  const std::string path = folder.path("timeline.json");
  ASSERT_TRUE(timeline.write(path).ok());
  std::ifstream file(path);
  EXPECT_EQ(json::parse(file).at("traceEvents").size(), 3u);
  const absl::Status status = timeline.write("/nonexistent/folder/t.json");
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("/nonexistent/folder/t.json"));
}

}  // namespace
}  // namespace baton
