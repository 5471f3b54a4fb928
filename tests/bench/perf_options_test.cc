// perftest's command lines, and what is said of those that are not here.
#include "bench/perftest/perf_options.h"

#include "tests/bench/parsed.h"
#include "tests/test.h"

namespace baton::bench::perf_line {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

auto parse(const std::string& test, const std::string& line) {
  return parse_line(test, line, [&](int argc, const char* const* argv) {
    return parse_perf(*PerfTest::named(test), argc, argv);
  });
}

TEST(PerfOptions, DefaultsArePerftests) {
  const PerfOptions bw = *parse("write_bw", "");
  EXPECT_TRUE(bw.server());
  EXPECT_EQ(bw.client_provider(), "verbs");
  EXPECT_EQ(bw.port, 18515);
  EXPECT_THAT(bw.sizes, ElementsAre(65536));
  EXPECT_EQ(bw.iterations, 5000u);
  EXPECT_EQ(bw.depth, 128u);
  EXPECT_EQ(bw.receives, 512u);
  EXPECT_FALSE(bw.keep);
  EXPECT_TRUE(bw.verify);
  const PerfOptions lat = *parse("send_lat", "10.0.0.1");
  EXPECT_EQ(lat.host, "10.0.0.1:18515");
  EXPECT_THAT(lat.sizes, ElementsAre(2));
  EXPECT_EQ(lat.iterations, 1000u);
  EXPECT_EQ(lat.depth, 1u);
  EXPECT_EQ((*parse("read_bw", "h")).iterations, 1000u);
}

TEST(PerfOptions, EveryFlagArrives) {
  const PerfOptions o = *parse(
      "write_bw",
      "-d mlx5_0 -i 2 -x 3 -s 4096 -n 500 -q 4 -t 64 -l 8 -Q 16 -I 64 -b -F -p 4000 -m 4096 -S "
      "5 "
      "-T 106 -N -e -u 14 -r 256 -o 8 -w 10 -y 0.5 --report_gbits --cpu_util --out_json "
      "--use_hugepages --write_with_imm --disable_pcie_relaxed --set tcp.slice_kib=64 node7");
  EXPECT_EQ(o.host, "node7:4000");
  EXPECT_THAT(o.sizes, ElementsAre(4096));
  EXPECT_EQ(o.iterations, 500u);
  EXPECT_EQ(o.streams, 4u);
  EXPECT_EQ(o.depth, 64u);
  EXPECT_EQ(o.post_list, 8u);
  EXPECT_EQ(o.receives, 256u);
  EXPECT_TRUE(o.bidirectional && o.events && o.gbits && o.cpu && o.huge_pages && o.immediate);
  EXPECT_FALSE(o.peak);
  EXPECT_EQ(o.limit_bw, 10);
  EXPECT_EQ(o.limit_msgrate, 0.5);
  EXPECT_EQ(o.out_json, "perftest_out.json");
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, std::string>>{{"verbs.devices", "mlx5_0:2"},
                                                        {"verbs.gid_index", "3"},
                                                        {"verbs.qps", "4"},
                                                        {"tcp.sockets", "4"},
                                                        {"verbs.inline_bytes", "64"},
                                                        {"verbs.mtu", "4096"},
                                                        {"verbs.service_level", "5"},
                                                        {"verbs.traffic_class", "106"},
                                                        {"verbs.timeout", "14"},
                                                        {"verbs.receive_depth", "256"},
                                                        {"verbs.rd_atomic", "8"},
                                                        {"verbs.relaxed_ordering", "0"},
                                                        {"tcp.slice_kib", "64"}}) {
    EXPECT_THAT(o.settings, Contains(Pair(key, value)));
  }
}

TEST(PerfOptions, TheLastOfRepeatedFlagsHolds) {
  const PerfOptions options = *parse(
      "write_bw", "-s 8 -n 10 -b --provider shm -b -s 4K -n 20 -I 1 -I 2 --provider tcp host");
  EXPECT_EQ(options.sizes, std::vector<size_t>{4096});
  EXPECT_EQ(options.iterations, 20u);
  EXPECT_EQ(options.inline_size, 2u);
  EXPECT_EQ(options.provider, "tcp");
  EXPECT_TRUE(options.bidirectional);
}

TEST(PerfOptions, MarginsFitIntoTheDuration) {
  EXPECT_EQ((*parse("write_bw", "-D 10 h")).margin, 2);
  EXPECT_EQ((*parse("write_bw", "-D 10 -f 0.5 h")).margin, 0.5);
  EXPECT_EQ((*parse("write_bw", "-D 2 h")).margin, 0.2);
  const auto endless = parse("write_bw", "--run_infinitely h");
  EXPECT_EQ((*endless).duration, 5);
  EXPECT_EQ((*endless).margin, 0);
}

TEST(PerfOptions, Hosts) {
  const auto host = [](const char* text) {
    const auto parsed = parse("write_bw", text);
    return parsed.ok() ? (*parsed).host : "refused: " + parsed.err;
  };
  EXPECT_EQ(host("node7:4000"), "node7:4000");
  EXPECT_EQ(host("-p 77 fe80::1"), "[fe80::1]:77");
  EXPECT_EQ(host("[fe80::1]:5"), "[fe80::1]:5");
  EXPECT_EQ(host("[fe80::1]"), "[fe80::1]:18515");
  EXPECT_THAT(host("node7:x"), HasSubstr("port"));
}

struct Bad {
  const char* test;
  const char* line;
  const char* message;
};
class BadPerfLine : public testing::TestWithParam<Bad> {};
TEST_P(BadPerfLine, EndsWithStatusTwoAndSaysWhy) {
  const auto parsed = parse(GetParam().test, GetParam().line);
  EXPECT_FALSE(parsed.ok());
  EXPECT_EQ(parsed.command.exit_status, 2);
  EXPECT_THAT(parsed.err, HasSubstr(std::string("baton ") + GetParam().test + ": "));
  EXPECT_THAT(parsed.err, HasSubstr(GetParam().message));
}
INSTANTIATE_TEST_SUITE_P(
    PerfOptions, BadPerfLine,
    testing::Values(
        Bad{"write_bw", "-s 0 h", "size"}, Bad{"write_bw", "-s lots h", "--size"},
        Bad{"write_bw", "-D 5 -n 5 h", "--duration"}, Bad{"write_bw", "-D 2 -f 1 h", "margins"},
        Bad{"write_bw", "-t 4 -l 8 h", "raise -t"}, Bad{"write_bw", "-c UD h", "-c RC"},
        Bad{"write_bw", "--output=latency h", "latency"},
        Bad{"write_lat", "--output=bandwidth h", "--output=latency"},
        Bad{"write_lat", "-b h", "both ways"}, Bad{"read_bw", "--write_with_imm h", "write_lat"},
        Bad{"write_bw", "--provider pigeon h", "it has shm, tcp"},
        Bad{"write_bw", "--set tcp h", "KEY=VALUE"}, Bad{"write_bw", "--loopback h", "no HOST"},
        Bad{"write_bw", "-a --run_infinitely h", "-s instead of -a"},
        Bad{"write_bw", "--frobnicate h", "there is no flag --frobnicate"},
        Bad{"write_bw", "--reprot_gbits h", "did you mean --report_gbits?"},
        Bad{"write_bw", "--set verbs.qp=2 h", "did you mean verbs.qps?"},
        Bad{"write_bw", "one two", "too many arguments"},
        Bad{"write_bw", "-s 1Q h", "\"1Q\" is not a size"},
        Bad{"write_bw", "--json /nowhere/x h", "--json: cannot write /nowhere/x"},
        Bad{"write_bw", "--out_json_file / h", "cannot write / (Is a directory)"},
        // perftest's, with the nearest that is here
        Bad{"write_bw", "--odp h", "--use_hugepages"},
        Bad{"write_bw", "--use_cuda=-1 h", "--use_cuda"},
        Bad{"write_bw", "--use_cuda_dmabuf h", "--use_cuda=N"}, Bad{"write_bw", "-O h", "-d DEV"},
        Bad{"write_bw", "-O -d a,b h", "-d DEV"}, Bad{"write_bw", "--rate_limit=5 h", "-t 1"},
        Bad{"write_bw", "--reversed h", "read_bw"}, Bad{"send_bw", "--mcg h", "multicast"}));

// Nothing that is measured depends on them.
TEST(PerfOptions, HarmlessFlagsAreTakenAndSaid) {
  for (const char* flag :
       {"-z", "-R", "--rdma_cm", "-H", "-U", "-C", "-W counters/port_rcv_data", "--comm_rdma_cm",
        "--report-histogram", "--report-unsorted", "--report-cycles"}) {
    const PerfOptions parsed = *parse("write_lat", std::string(flag) + " h");
    EXPECT_THAT(parsed.notes, Contains(HasSubstr("has no effect"))) << flag;
  }
  const auto version = parse("write_bw", "-V");
  EXPECT_EQ(version.command.exit_status, 0);
  EXPECT_THAT(version.out, HasSubstr("Version: "));
}

TEST(PerfOptions, AsManyPairsOfPortsAsDevices) {
  const auto pairs = [](const char* line, const char* count) {
    EXPECT_THAT((*parse("write_bw", line)).settings, Contains(Pair("verbs.pairs", count))) << line;
  };
  pairs("h", "1");
  pairs("-d a h", "1");
  pairs("-d a,b h", "2");
  pairs("-d a -O h", "2");
  const auto dual = parse("write_bw", "-d a -O h");
  EXPECT_TRUE((*dual).dual_port);
  EXPECT_THAT((*dual).settings, Contains(Pair("verbs.devices", "a:1,a:2")));
}

TEST(PerfOptions, WhatASendIsIsSaid) {
  EXPECT_THAT((*parse("send_bw", "h")).notes, Contains(HasSubstr("RDMA write with immediate")));
  EXPECT_THAT((*parse("send_lat", "--provider shm h")).notes,
              Contains(HasSubstr("takes a receive of the other side")));
  EXPECT_TRUE((*parse("write_bw", "h")).notes.empty());
  for (const char* test : {"send_bw", "send_lat"}) {
    EXPECT_THAT(parse(test, "--help").out, HasSubstr("write with immediate"));
  }
}

TEST(PerfOptions, APortGoesToEveryDeviceWithoutOne) {
  EXPECT_THAT((*parse("write_bw", "-d a,b:2 -i 3 h")).settings,
              Contains(Pair("verbs.devices", "a:3,b:2")));
  EXPECT_THAT((*parse("write_bw", "-d a h")).settings, Contains(Pair("verbs.devices", "a")));
  EXPECT_TRUE(parse("write_bw", "-i 1 h").ok());
}

TEST(PerfOptions, FlagsOfQueuePairsSayThatTheyDoNothingOnOtherRoutes) {
  const char* line = "-d mlx5_0 -x 3 -m 1024 --tclass 106 ";
  const PerfOptions tcp = *parse("write_bw", absl::StrCat(line, "--provider tcp h"));
  EXPECT_THAT(tcp.notes, Contains(HasSubstr("-d -m --tclass -x have no effect")));
  EXPECT_TRUE((*parse("write_bw", absl::StrCat(line, "h"))).notes.empty());
  EXPECT_TRUE((*parse("write_bw", "-q 4 -s 1M --provider tcp h")).notes.empty());
}

TEST(PerfOptions, ACounterWakesASleeper) {
  EXPECT_TRUE((*parse("write_lat", "-e h")).immediate);
  EXPECT_FALSE((*parse("write_lat", "h")).immediate);
  EXPECT_FALSE((*parse("write_bw", "-e h")).immediate);
}

TEST(PerfOptions, ForeignFlagsAreKnownInEveryForm) {
  EXPECT_NE(instead_of("--use_cuda_bus_id=0000:01:00.0"), "");
  EXPECT_NE(instead_of("-X"), "");
  EXPECT_NE(instead_of("-X3"), "");
  EXPECT_EQ(instead_of("--frobnicate"), "");
  EXPECT_EQ(instead_of("-"), "");
}

}  // namespace
}  // namespace baton::bench::perf_line
