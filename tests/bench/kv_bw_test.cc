// `baton kv_bw` as a user runs it: rows of every provider, two processes, exit statuses.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "bench/child_process.h"
#include "bench/report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/usable_provider.h"
#include "transport/provider.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;

constexpr Time kLimit = std::chrono::seconds(100);

struct Ended {
  int status = -1;
  std::string output;  // both streams
};

std::vector<std::string> shell(const std::string& arguments) {
  return {"sh", "-c", std::string("exec '") + BATON_COMMAND + "' " + arguments + " 2>&1"};
}

Ended baton(const std::string& arguments) {
  Ended ended;
  auto child = ChildProcess::spawn(-1, shell(arguments), {});
  EXPECT_TRUE(child.ok()) << child.status();
  while (true) {
    const auto line = child->read_line(kLimit);
    if (!line.ok()) break;
    ended.output += *line + "\n";
  }
  const auto status = child->wait(kLimit);
  if (status.ok()) ended.status = *status;
  return ended;
}

std::string temporary(const std::string& name) {
  return (std::filesystem::path(testing::TempDir()) / (std::to_string(getpid()) + name)).string();
}

std::vector<Json> rows_in(const std::string& path) {
  std::vector<Json> rows;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    rows.push_back(Json::parse(line, nullptr, false));
  }
  std::filesystem::remove(path);
  return rows;
}

using EveryProvider = OverEveryProvider<std::string>;

TEST_P(EveryProvider, TinyRunsAreVerifiedAndWrittenAsJson) {
  const std::string path = temporary("rows.jsonl");
  for (const std::string work : {"--pages 64 --page-bytes 1000", "--layout contiguous --pages 64",
                                 "--model kjv --tokens 100 --tp 3:1"}) {
    const Ended ended = baton("kv_bw --op both --iters 3 --inflight 2 --provider " + GetParam() +
                              " " + work + " --json " + path);
    ASSERT_EQ(ended.status, 0) << work << "\n" << ended.output;
    EXPECT_THAT(ended.output, HasSubstr("verified"));
    const std::vector<Json> rows = rows_in(path);
    ASSERT_EQ(rows.size(), 2u) << work;
    for (size_t i = 0; i < rows.size(); ++i) {
      const Json& row = rows[i];
      ASSERT_TRUE(row.is_object());
      EXPECT_EQ(row["bench"], "kv_bw");
      EXPECT_EQ(row["params"]["op"], i == 0 ? "write" : "read");
      EXPECT_EQ(row["verified"], true);
      EXPECT_THAT(row["route"].get<std::string>(), HasSubstr(GetParam()));
      EXPECT_GT(row["GB_per_s"].get<double>(), 0);
      EXPECT_GT(row["floor"]["GB_per_s"].get<double>(), 0);
      EXPECT_NEAR(row["ratio_to_floor"].get<double>() * row["floor"]["GB_per_s"].get<double>(),
                  row["GB_per_s"].get<double>(), 1e-6);
      EXPECT_NEAR(row["bytes"].get<double>() * 1e-9 / row["seconds"].get<double>(),
                  row["GB_per_s"].get<double>(), 1e-6);
      EXPECT_LE(row["latency_us"]["p50"].get<double>(), row["latency_us"]["max"].get<double>());
    }
  }
}

TEST_P(EveryProvider, AListenerServesAnInitiatorElsewhere) {
  auto listener = ChildProcess::spawn(-1, shell("kv_bw --listen 127.0.0.1:0 --once"), {});
  ASSERT_TRUE(listener.ok()) << listener.status();
  const auto line = listener->read_line(kLimit);
  ASSERT_TRUE(line.ok()) << line.status();
  const std::string where = line->substr(std::string("listening on ").size());
  ASSERT_THAT(*line, HasSubstr("listening on 127.0.0.1:"));
  const std::string path = temporary("listen.jsonl");
  const Ended ended = baton("kv_bw " + where.substr(0, where.find(": ")) + " --provider " +
                            GetParam() + " --op both --pages 8 --iters 2 --json " + path);
  EXPECT_EQ(ended.status, 0) << ended.output;
  const std::vector<Json> rows = rows_in(path);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[1]["verified"], true);
  const auto status = listener->wait(kLimit);
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(*status, 0);
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& [name, factory] : registered_providers()) all.push_back(name);
  return all;
}
INSTANTIATE_TEST_SUITE_P(KvBw, EveryProvider, testing::ValuesIn(names()),
                         [](const auto& provider) { return provider.param; });

TEST(KvBw, TheProvidersAreThere) { EXPECT_THAT(names(), testing::IsSupersetOf({"shm", "tcp"})); }

TEST(KvBw, BadArgumentsExitWithTwo) {
  EXPECT_EQ(baton("kv_bw --pages 0").status, 2);
  EXPECT_EQ(baton("kv_bw --bogus").status, 2);
  const Ended unknown = baton("kv_bw --provider pigeon");
  EXPECT_EQ(unknown.status, 2);
  EXPECT_THAT(unknown.output, HasSubstr("known are shm, tcp"));
}

TEST(KvBw, ABadProviderSettingIsSaid) {
  const Ended ended = baton("kv_bw --provider tcp --sockets many --iters 1");
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("tcp.sockets=many"));
}

TEST(KvBw, NobodyListeningIsSaid) {
  const Ended ended = baton("kv_bw 127.0.0.1:1 --provider tcp");
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("127.0.0.1:1"));
}

TEST(KvBw, APortInUseIsSaid) {
  auto listener = ChildProcess::spawn(-1, shell("kv_bw --listen 127.0.0.1:0"), {});
  ASSERT_TRUE(listener.ok()) << listener.status();
  const auto line = listener->read_line(kLimit);
  ASSERT_TRUE(line.ok()) << line.status();
  const std::string where = line->substr(std::string("listening on ").size());
  const Ended ended = baton("kv_bw --listen " + where.substr(0, where.find(": ")));
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("in use"));
}

TEST(KvBw, AFileThatCannotBeWrittenIsSaid) {
  const Ended ended = baton("kv_bw --pages 1 --iters 1 --json /nonexistent/rows");
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("/nonexistent/rows"));
}

TEST(Baton, HelpVersionAndSuggestions) {
  const Ended help = baton("--help");
  EXPECT_EQ(help.status, 0);
  EXPECT_THAT(help.output, HasSubstr("kv_bw"));
  EXPECT_LE(std::count(help.output.begin(), help.output.end(), '\n'), 24);
  EXPECT_EQ(baton("--version").status, 0);
  EXPECT_EQ(baton("").status, 2);
  const Ended unknown = baton("kvbw");
  EXPECT_EQ(unknown.status, 2);
  EXPECT_THAT(unknown.output, HasSubstr("did you mean \"kv_bw\"?"));
}

}  // namespace
}  // namespace baton::bench
