// Percentiles, rows as JSON, tables; which bytes two sides take for a message.
#include "bench/report/report.h"

#include "bench/report/dialogue.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

TEST(Dialogue, AMessageIsAnObjectOrNothing) {
  EXPECT_TRUE(parse_message("").is_null());
  EXPECT_TRUE(parse_message("{").is_null());
  EXPECT_TRUE(parse_message("[1]").is_null());
  EXPECT_TRUE(parse_message(std::string(60000, '[')).is_null());
  EXPECT_EQ(text_of(parse_message(R"({"do":"bye"})"), "do"), "bye");
  EXPECT_EQ(text_of(parse_message(R"({"do":1})"), "do"), "");
  EXPECT_EQ(text_of(Json(), "do"), "");
}

TEST(Stats, QuantilesByNearestRank) {
  std::vector<double> samples(1001);
  std::iota(samples.rbegin(), samples.rend(), 0.0);
  const Latency latency = Latency::of(samples);
  EXPECT_EQ(latency.p50, 500);
  EXPECT_EQ(latency.p90, 900);
  EXPECT_EQ(latency.p99, 990);
  EXPECT_EQ(latency.p999, 999);
  EXPECT_EQ(latency.max, 1000);
  EXPECT_EQ(base::quantile({}, 0.5), 0);
  EXPECT_EQ(base::median({3, 1, 2}), 2);
}

TEST(Report, RowHasTheKeysThatScriptsDependOn) {
  Row row;
  row.bench = "kv_bw";
  row.params = {{"pages", 4096}};
  row.route = "shm";
  row.bytes = 1000;
  row.pieces = 10;
  row.seconds = 0.5;
  row.gb_per_s = Rate::of({1, 2, 3});
  row.latency_us = Latency::of({5});
  row.floor = Reference{.name = "memcpy", .gb_per_s = 4};
  row.baselines = {{.name = "ucx_tcp", .gb_per_s = 0.5}};
  row.verified = true;
  const Json json = row.to_json();
  EXPECT_EQ(json["bench"], "kv_bw");
  EXPECT_EQ(json["params"]["pages"], 4096);
  EXPECT_EQ(json["route"], "shm");
  EXPECT_EQ(json["bytes"], 1000);
  EXPECT_EQ(json["seconds"], 0.5);
  EXPECT_EQ(json["GB_per_s"], 2);
  EXPECT_EQ(json["pages_per_s"], 20);
  for (const char* key : {"p50", "p90", "p99", "p999", "max"}) {
    EXPECT_EQ(json["latency_us"][key], 5) << key;
  }
  EXPECT_EQ(json["floor"]["name"], "memcpy");
  EXPECT_EQ(json["floor"]["GB_per_s"], 4);
  EXPECT_EQ(json["ratio_to_floor"], 0.5);
  EXPECT_EQ(json["rivals"][0]["ratio"], 4);
  EXPECT_EQ(json["verified"], true);
}

TEST(Report, KeysThatDoNotApplyAreLeftOut) {
  Row row;
  row.bench = "idle_worker";
  row.cpu_percent = 0.1;
  const Json json = row.to_json();
  EXPECT_TRUE(json.contains("cpu_percent"));
  for (const char* key : {"GB_per_s", "latency_us", "floor", "ratio_to_floor", "rivals", "verified",
                          "route", "bytes"}) {
    EXPECT_FALSE(json.contains(key)) << key;
  }
}

TEST(Report, WritesOneObjectPerLineAndReplacesWhatIsNoText) {
  const TemporaryFolder folder;
  const std::string path = folder.path("rows.jsonl");
  Row row;
  row.bench = "a";
  row.params["setting"] = "\xff\xfe";
  ASSERT_TRUE(write_json(path, {row, row}).ok());
  std::ifstream file(path);
  int lines = 0;
  for (std::string line; std::getline(file, line); ++lines) {
    const Json json = Json::parse(line, nullptr, false);
    ASSERT_TRUE(json.is_object()) << line;
    EXPECT_EQ(json["bench"], "a");
  }
  EXPECT_EQ(lines, 2);
}

TEST(Report, AFileThatCannotBeWrittenIsNamed) {
  const absl::Status status = write_text("/nonexistent/rows.jsonl", "{}", "--out");
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("/nonexistent/rows.jsonl"));
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("--out"));
}

TEST(Report, HumanUnits) {
  EXPECT_EQ(human_bytes(512), "512 B");
  EXPECT_EQ(human_bytes(16384), "16 KiB");
  EXPECT_EQ(human_bytes(size_t{64} << 20), "64 MiB");
  EXPECT_EQ(human_count(2.5e6), "2.5 M");
  EXPECT_EQ(human_count(12.5), "12.5");
}

TEST(Report, TableAlignsItsColumns) {
  Table table({"name", "n"});
  table.add({"a", "100"});
  EXPECT_EQ(table.text(), "name    n\na     100\n");
}

}  // namespace
}  // namespace baton::bench
