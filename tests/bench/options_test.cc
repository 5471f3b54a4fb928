// The command line of `baton kv_bw`.
#include "bench/kv/kv_bw.h"
#include "tests/bench/parsed.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;

auto parse(const std::string& line) { return parse_line("kv_bw", line, parse_kv_bw); }

TEST(KvBwOptions, DefaultsAreOneScatteredWriteOverShm) {
  const KvBwOptions options = *parse("");
  EXPECT_EQ(options.provider, "shm");
  EXPECT_EQ(options.ops, std::vector<Op>{Op::kWrite});
  EXPECT_EQ(options.workload.pages, 4096u);
  EXPECT_EQ(options.workload.page_bytes, 16384u);
  EXPECT_TRUE(options.workload.scattered);
  EXPECT_FALSE(options.listen);
}

TEST(KvBwOptions, TakesSizesSettingsAndBothOps) {
  const KvBwOptions options = *parse(
      "--provider tcp --op both --pages 2 --page-bytes 64K --layout contiguous --set "
      "tcp.slice_kib=64 --inflight 4 --no-pin --iters 10");
  EXPECT_EQ(options.ops, (std::vector<Op>{Op::kWrite, Op::kRead}));
  EXPECT_EQ(options.workload.page_bytes, 65536u);
  EXPECT_FALSE(options.workload.scattered);
  EXPECT_EQ(options.setting("tcp.slice_kib", ""), "64");
  EXPECT_EQ(options.setting("tcp.other", "none"), "none");
  EXPECT_EQ(options.inflight, 4u);
  EXPECT_EQ(options.transfers, 10u);
  EXPECT_FALSE(options.pin);
}

TEST(KvBwOptions, ModelWithTensorParallelDegrees) {
  const KvBwOptions parsed = *parse("--model llama3-8b --tokens 100 --tp 2:4");
  EXPECT_EQ(parsed.workload.tokens, 100u);
  EXPECT_EQ(parsed.workload.tp_source, 2u);
  EXPECT_EQ(parsed.workload.tp_target, 4u);
}

TEST(KvBwOptions, AddressesGetTheDefaultPort) {
  const auto host = [](const char* text) {
    const auto parsed = parse(text);
    return parsed.command.options ? (*parsed).host : "refused: " + parsed.err;
  };
  EXPECT_EQ(host("node7"), "node7:18516");
  EXPECT_EQ(host("10.0.0.1:4000"), "10.0.0.1:4000");
  EXPECT_EQ(host("[fe80::1]:4000"), "[fe80::1]:4000");
  EXPECT_EQ(host("fe80::1"), "[fe80::1]:18516");
  EXPECT_EQ(host(":4000"), "127.0.0.1:4000");
  EXPECT_THAT(host("node7:99999"), HasSubstr("port"));
  EXPECT_THAT(host("node7:x"), HasSubstr("port"));
}

TEST(KvBwOptions, ListenAloneOrWithAnAddress) {
  auto parsed = parse("--listen");
  ASSERT_TRUE(parsed.ok()) << parsed.err;
  EXPECT_TRUE((*parsed).listen);
  EXPECT_EQ((*parsed).listen_host, "");
  EXPECT_EQ((*parsed).listen_port, KvBwOptions::kPort);
  parsed = parse("--listen 0.0.0.0:5000 --once");
  ASSERT_TRUE(parsed.ok()) << parsed.err;
  EXPECT_EQ((*parsed).listen_host, "0.0.0.0");
  EXPECT_EQ((*parsed).listen_port, 5000);
  EXPECT_TRUE((*parsed).once);
}

struct Bad {
  const char* line;
  const char* message;
};
class BadArguments : public testing::TestWithParam<Bad> {};

TEST_P(BadArguments, EndWithStatusTwoAndSayWhy) {
  const auto parsed = parse(GetParam().line);
  EXPECT_FALSE(parsed.ok());
  EXPECT_EQ(parsed.command.exit_status, 2);
  EXPECT_THAT(parsed.err, HasSubstr("baton kv_bw: "));
  EXPECT_THAT(parsed.err, HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    KvBwOptions, BadArguments,
    testing::Values(
        Bad{"--bogus", "there is no flag --bogus"},
        Bad{"--porvider tcp", "did you mean --provider?"},
        Bad{"--provider tpc", "did you mean tcp?"},
        Bad{"--set tcp.sokets=4", "did you mean tcp.sockets?"},
        Bad{"--set tcp.sockets=many", "a number from 1 to 64"},
        Bad{"--provider pigeon", "shm, tcp"}, Bad{"--op raed", "did you mean read?"},
        Bad{"--model llama3-9b", "did you mean llama3-8b?"},
        Bad{"--op swap", "is not one of write, read, both"}, Bad{"--pages 0", "pages"},
        Bad{"--pages many", "--pages"}, Bad{"--page-bytes 0", "at least one"},
        Bad{"--pages 4G", "number of pages"}, Bad{"--pages 1G --page-bytes 1G", "1 TiB"},
        Bad{"--layout round", "is not one of scattered, contiguous"},
        Bad{"--model gpt-9", "llama3-8b"}, Bad{"--tp 2:1", "--model"},
        Bad{"--model llama3-8b --tp 2", "SOURCE:TARGET"},
        Bad{"--model llama3-8b --tp 3:1", "8 KV heads"},
        Bad{"--model llama3-8b --tp 0:1", "8 KV heads"}, Bad{"--model kjv --pages 3", "--pages"},
        Bad{"--set tcp.sockets", "KEY=VALUE"}, Bad{"--page-bytes -1", "is not a size"},
        Bad{"--page-bytes 99999999999999999999", "is not a size"},
        Bad{"--baselines=3", "--baselines takes no value"}, Bad{"--pages", "--pages needs a value"},
        Bad{"--once", "--listen"}, Bad{"--listen 1.2.3.4:x", "port"}));

TEST(KvBwOptions, ASettingOfAProviderThatIsNotUsedIsToldAndNoError) {
  const auto shm = parse("--provider shm --set tcp.sockets=2");
  EXPECT_TRUE(shm.ok());
  EXPECT_THAT(shm.err, HasSubstr("--set tcp.sockets=2 has no effect: only shm is used"));
  EXPECT_EQ(parse("--provider tcp --set tcp.sockets=2").err, "");
  EXPECT_EQ(parse("--provider shm --set peer.answer_ms=20").err, "");
}

TEST(KvBwOptions, HelpIsNoError) {
  const auto parsed = parse("--help");
  EXPECT_FALSE(parsed.ok());
  EXPECT_EQ(parsed.command.exit_status, 0);
  EXPECT_THAT(parsed.out, HasSubstr("--page-bytes"));
  EXPECT_EQ(parsed.err, "");
}

}  // namespace
}  // namespace baton::bench
