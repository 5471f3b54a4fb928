// perftest's columns, limits and report.
#include "bench/perftest/perf_output.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

PerfOptions options_of(const char* test) {
  PerfOptions options;
  options.test = *PerfTest::named(test);
  options.sizes = {65536};
  options.provider = "tcp";
  options.depth = 128;
  return options;
}

PerfResult result_of(size_t size) {
  PerfResult result;
  result.size = size;
  result.iterations = 1000;
  result.seconds = 0.5;
  result.bytes_per_s = 2e9;
  result.peak_bytes_per_s = 3e9;
  result.messages_per_s = 2e9 / static_cast<double>(size);
  result.verified = true;
  for (int i = 1; i <= 1000; ++i) result.latencies.record(std::chrono::microseconds(i));
  return result;
}

std::vector<std::string> words(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> out;
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

TEST(PerfOutput, ColumnsOfBandwidth) {
  PerfOptions options = options_of("write_bw");
  EXPECT_EQ(column_text(options),
            " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]\n");
  EXPECT_THAT(words(row_text(options, result_of(65536))),
              ElementsAre("65536", "1000", "2861.02", "1907.35", "0.030518"));
  options.gbits = true;
  EXPECT_EQ(column_text(options),
            " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n");
  EXPECT_THAT(words(row_text(options, result_of(65536))),
              ElementsAre("65536", "1000", "24.00", "16.00", "0.030518"));
  options.cpu = true;
  EXPECT_THAT(column_text(options), HasSubstr("    CPU_Util[%]\n"));
  EXPECT_EQ(words(row_text(options, result_of(65536))).size(), 6u);
}

TEST(PerfOutput, ColumnsOfLatency) {
  const PerfOptions options = options_of("write_lat");
  EXPECT_EQ(column_text(options),
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    "
            "t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] \n");
  const std::vector<std::string> row = words(row_text(options, result_of(2)));
  ASSERT_EQ(row.size(), 9u);
  EXPECT_EQ(row[2], "1.00");
  EXPECT_EQ(row[3], "1000.00");  // the largest, not the one before
  EXPECT_NEAR(std::stod(row[4]), 500, 4);
  EXPECT_EQ(row[5], "500.50");
  EXPECT_EQ(row[6], "288.67");
  EXPECT_NEAR(std::stod(row[7]), 990, 8);
}

TEST(PerfOutput, WideNumbersStayApart) {
  PerfResult result = result_of(8388608);
  result.iterations = 123456789012;
  result.bytes_per_s = result.peak_bytes_per_s = 9e15;
  EXPECT_EQ(words(row_text(options_of("write_bw"), result)).size(), 5u);
  EXPECT_EQ(words(row_text(options_of("write_lat"), result)).size(), 9u);
}

TEST(PerfOutput, HeaderHasPerftestsLines) {
  PerfOptions options = options_of("write_bw");
  options.bidirectional = true;
  options.post_list = 4;
  options.gid_index = 3;
  const std::string text = header_text(options, {.route = "tcp somewhere", .memory = "memfd"});
  EXPECT_EQ(text.substr(0, 88), std::string(87, '-') + "\n");
  for (const char* line : {"                    RDMA_Write Bidirectional Post List BW Test\n",
                           " Dual-port       : OFF\t\tDevice         : tcp\n",
                           " Number of qps   : 1\t\tTransport type : tcp\n",
                           " TX depth        : 128\n", " Route           : tcp somewhere\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  // Only verbs has queue pairs.
  options.provider = "verbs";
  const std::string verbs = header_text(options, {});
  const Json report = perftest_json(options, {}, {result_of(2)})["test_info"];
  options.provider = "tcp";
  for (const char* line :
       {" Connection type : RC\t\tUsing SRQ      : ON\n", " PCIe relax order: ON\n",
        " CQ Moderation   : auto\n", " Mtu             : auto\n", " GID index       : 3\n",
        " Max inline data : auto\n", " rdma_cm QPs\t : OFF\n"}) {
    EXPECT_THAT(verbs, HasSubstr(line));
    EXPECT_THAT(text, testing::Not(HasSubstr(std::string(line).substr(0, 12))));
  }
  const Json plain = perftest_json(options, {}, {result_of(2)})["test_info"];
  for (const char* key :
       {"Connection_type", "Using_SRQ", "PCIe_relax_order", "GID_index", "rdma_cm_QPs"}) {
    EXPECT_TRUE(report.contains(key)) << key;
    EXPECT_FALSE(plain.contains(key)) << key;
  }
  options.device = "mlx5_0";  // of a flag that has no effect here
  EXPECT_THAT(header_text(options, {}), HasSubstr("Device         : tcp\n"));
  options.provider = "verbs";
  EXPECT_THAT(header_text(options, {}), HasSubstr("Device         : mlx5_0\n"));
  EXPECT_THAT(header_text(options_of("read_lat"), {}), HasSubstr("RDMA_Read Latency Test\n"));
  EXPECT_THAT(header_text(options_of("send_lat"), {}), HasSubstr(" Send Latency Test\n"));
}

TEST(PerfOutput, HeaderNamesBothEndsOfEachQueuePair) {
  const std::string text = header_text(
      options_of("write_bw"),
      {.route =
           "verbs rxe0:1 -> 10.0.0.2 (RoCEv2 IPv4, MTU 1024, queue pair 17; local LID 0000 QPN "
           "0x0011 PSN 0x4bfb57 GID 10.0.0.1, remote LID 0000 QPN 0x0012 PSN 0x00abcd GID "
           "fe80::2)",
       .memory = "memfd"});
  EXPECT_THAT(text, HasSubstr(" local address: LID 0000 QPN 0x0011 PSN 0x4bfb57\n"
                              " GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:00:00:01\n"
                              " remote address: LID 0000 QPN 0x0012 PSN 0x00abcd\n"
                              " GID: 254:128:00:00:00:00:00:00:00:00:00:00:00:00:00:02\n" +
                              std::string(87, '-') + "\n"));
  EXPECT_THAT(header_text(options_of("write_bw"), {.route = "tcp", .memory = "memfd"}),
              testing::Not(HasSubstr("address:")));
}

TEST(PerfOutput, TextAndReportAgreeOnSharedReceives) {
  PerfOptions options = options_of("write_bw");
  options.provider = "verbs";
  for (const char* receives : {"", "0", "512"}) {
    options.settings.clear();
    if (*receives != 0) options.settings = {{"verbs.shared_receives", receives}};
    const bool shared = std::string(receives) != "0";
    EXPECT_THAT(header_text(options, {}),
                HasSubstr(shared ? "Using SRQ      : ON" : "Using SRQ      : OFF"));
    EXPECT_EQ(perftest_json(options, {}, {result_of(2)})["test_info"]["Using_SRQ"],
              shared ? "ON" : "OFF");
  }
}

TEST(PerfOutput, LimitsAreInTheUnitsOfTheTable) {
  PerfOptions options = options_of("write_bw");
  options.limit_bw = 1900;
  EXPECT_TRUE(check_limits(options, result_of(65536)).ok());
  options.limit_bw = 1910;
  EXPECT_THAT(std::string(check_limits(options, result_of(65536)).message()), HasSubstr("-w"));
  options.gbits = true;
  options.limit_bw = 15.9;
  EXPECT_TRUE(check_limits(options, result_of(65536)).ok());
  options.limit_msgrate = 0.031;
  EXPECT_THAT(std::string(check_limits(options, result_of(65536)).message()), HasSubstr("-y"));
}

TEST(PerfOutput, OneNumber) {
  PerfOptions options = options_of("write_bw");
  options.output = "bandwidth";
  EXPECT_EQ(single_text(options, result_of(65536)), "1907.348633\n");
  options.output = "message_rate";
  EXPECT_EQ(single_text(options, result_of(65536)), "0.030518\n");
  options.test.latency = true;
  options.output = "latency";
  EXPECT_EQ(single_text(options, result_of(65536)), "500.50\n");
}

TEST(PerfOutput, ReportHasPerftestsKeys) {
  PerfOptions options = options_of("write_bw");
  const Json one = perftest_json(options, {}, {result_of(65536)});
  EXPECT_EQ(one["test_info"]["test"], "RDMA_Write_BW_Test");
  PerfOptions named = options;
  named.bidirectional = true;
  const auto test = [&] { return perftest_json(named, {}, {})["test_info"]["test"]; };
  EXPECT_EQ(test(), "RDMA_Write_Bidirectional_BW_Test");
  named.post_list = 8;
  EXPECT_EQ(test(), "RDMA_Write_Bidirectional_Post_List_BW_Test");
  named.bidirectional = false;
  EXPECT_EQ(test(), "RDMA_Write_Post_List_BW_Test");
  EXPECT_EQ(one["test_info"]["Number_of_qps"], 1);
  EXPECT_EQ(one["results"]["MsgSize"], 65536);
  EXPECT_EQ(one["results"]["n_iterations"], 1000);
  EXPECT_NEAR(one["results"]["BW_average"].get<double>(), 1907.35, 0.01);
  EXPECT_NEAR(one["results"]["BW_peak"].get<double>(), 2861.02, 0.01);
  options.sizes = {2, 4};
  const Json two = perftest_json(options, {}, {result_of(2), result_of(4)});
  ASSERT_EQ(two["results"].size(), 2u);
  EXPECT_EQ(two["results"][1]["MsgSize"], 4);
  const Json lat = perftest_json(options_of("read_lat"), {}, {result_of(2)});
  EXPECT_EQ(lat["test_info"]["test"], "RDMA_Read_Latency_Test");
  for (const char* key :
       {"t_min", "t_max", "t_typical", "t_avg", "t_stdev", "percentile_99", "percentile_99.9"}) {
    EXPECT_TRUE(lat["results"].contains(key)) << key;
  }
  EXPECT_EQ(lat["results"]["t_max"], 1000);
}

TEST(PerfOutput, HouseRow) {
  PerfResult result = result_of(65536);
  result.route = "r";
  const Json row = row_json(options_of("write_bw"), {.route = "at first", .memory = "m"}, result);
  EXPECT_EQ(row["bench"], "write_bw");
  EXPECT_EQ(row["route"], "r");
  EXPECT_EQ(row["bytes"], 65536);
  EXPECT_EQ(row["GB_per_s"], 2.0);
  EXPECT_EQ(row["verified"], true);
  EXPECT_EQ(row["latency_us"]["max"], 1000);
  EXPECT_NEAR(row["seconds"].get<double>() * 2e9, 65536, 1e-6);
  EXPECT_FALSE(row_json(options_of("write_lat"), {}, result_of(2)).contains("GB_per_s"));
}

}  // namespace
}  // namespace baton::bench
