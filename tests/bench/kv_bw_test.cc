// `baton kv_bw` as a user runs it: rows of every provider, two processes, exit statuses.
#include "tests/bench/command.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/usable_provider.h"
#include "transport/provider.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;

using EveryProvider = OverEveryProvider<std::string>;

TEST_P(EveryProvider, TinyRunsAreVerifiedAndWrittenAsJson) {
  const TemporaryFolder folder;
  const std::string path = folder.path("rows.jsonl");
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
  ChildProcess listener = start("kv_bw --listen 127.0.0.1:0 --once --provider " + GetParam());
  const TemporaryFolder folder;
  const std::string path = folder.path("listen.jsonl");
  const Ended ended = baton("kv_bw " + address_of(listener) + " --provider " + GetParam() +
                            " --op both --pages 8 --iters 2 --json " + path);
  EXPECT_EQ(ended.status, 0) << ended.output;
  const std::vector<Json> rows = rows_in(path);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[1]["verified"], true);
  EXPECT_EQ(end_of(listener).status, 0);
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& [name, factory] : registered_providers()) all.push_back(name);
  return all;
}
INSTANTIATE_TEST_SUITE_P(KvBw, EveryProvider, testing::ValuesIn(names()),
                         [](const auto& provider) { return provider.param; });

TEST(KvBw, TheProvidersAreThere) { EXPECT_THAT(names(), testing::IsSupersetOf({"shm", "tcp"})); }

TEST(Baton, HelpVersionAndSuggestions) {
  const Ended help = baton("--help");
  EXPECT_EQ(help.status, 0);
  EXPECT_THAT(help.output, HasSubstr("kv_bw"));
  EXPECT_LE(std::count(help.output.begin(), help.output.end(), '\n'), 24);
  EXPECT_EQ(baton("--version").status, 0);
  EXPECT_EQ(baton("").status, 2);
  const Ended unknown = baton("kvbw");
  EXPECT_EQ(unknown.status, 2);
  EXPECT_THAT(unknown.output, HasSubstr("did you mean kv_bw?"));
}

}  // namespace
}  // namespace baton::bench
