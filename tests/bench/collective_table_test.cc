// Sizes, bandwidths, rows and documents as nccl-tests has them.
#include "bench/nccl_tests/collective_perf_table.h"

#include "bench/nccl_tests/baselines.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

CollectivePerfOptions options_of(Measured collective) {
  CollectivePerfOptions options;
  options.command = "all_reduce_perf";
  options.collective = collective;
  return options;
}

PerfRow measured_row() {
  PerfRow row{.point = point_of(Measured::kAllReduce, 1024, 2, DataType::kF32, ReduceOp::kSum)};
  PerfHalf half{.us = 12.345, .bandwidth = bandwidth_of(Measured::kAllReduce, 1024, 2, 12.345e-6)};
  half.wrong = 0;
  half.slowest_us = {10, 20, 30, 40};
  half.average_us = {9, 19, 29, 39};
  row.halves = {half, half};
  row.halves[1]->us = 1234567.8;
  row.halves[1]->wrong = 3;
  return row;
}

TEST(CollectiveTable, CountsAreThoseOfNcclTests) {
  const auto point = [](Measured collective, size_t bytes, int ranks, DataType type) {
    const CollectivePoint p = point_of(collective, bytes, ranks, type, ReduceOp::kSum);
    return std::vector<size_t>{p.count, p.in_elements, p.out_elements, p.bytes};
  };
  const DataType f32 = DataType::kF32;
  EXPECT_THAT(point(Measured::kAllReduce, 1024, 3, f32), ElementsAre(256, 256, 256, 1024));
  EXPECT_THAT(point(Measured::kAllReduce, 1027, 3, f32), ElementsAre(256, 256, 256, 1024));
  // Parts are multiples of 16 bytes.
  EXPECT_THAT(point(Measured::kAllGather, 1024, 2, f32), ElementsAre(128, 128, 256, 1024));
  EXPECT_THAT(point(Measured::kAllGather, 1024, 3, f32), ElementsAre(84, 84, 252, 1008));
  EXPECT_THAT(point(Measured::kReduceScatter, 1024, 3, f32), ElementsAre(84, 252, 84, 1008));
  EXPECT_THAT(point(Measured::kAllToAll, 1024, 3, DataType::kF64), ElementsAre(42, 126, 126, 1008));
  EXPECT_THAT(point(Measured::kAllToAll, 1024, 3, DataType::kI8),
              ElementsAre(336, 1008, 1008, 1008));
  EXPECT_THAT(point(Measured::kReduceScatter, 8, 2, f32), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(point(Measured::kBroadcast, 8, 2, f32), ElementsAre(2, 2, 2, 8));
  EXPECT_THAT(point(Measured::kGather, 1024, 3, f32), ElementsAre(84, 84, 252, 1008));
  EXPECT_THAT(point(Measured::kScatter, 1024, 3, f32), ElementsAre(84, 252, 84, 1008));
  EXPECT_THAT(point(Measured::kHypercube, 1024, 4, f32), ElementsAre(64, 64, 256, 1024));
}

TEST(CollectiveTable, SweepsByFactorOrByStep) {
  CollectivePerfOptions options = options_of(Measured::kAllReduce);
  options.min_bytes = 8;
  options.max_bytes = 100;
  options.step_factor = 2;
  const auto sizes = [&options] {
    std::vector<size_t> bytes;
    for (const CollectivePoint& point : sweep(options, 2)) bytes.push_back(point.bytes);
    return bytes;
  };
  EXPECT_THAT(sizes(), ElementsAre(8, 16, 32, 64));
  options.step_factor = 1;
  options.step_bytes = 40;
  EXPECT_THAT(sizes(), ElementsAre(8, 48, 88));
  options.types = {DataType::kF32, DataType::kF64};
  options.ops = {ReduceOp::kSum, ReduceOp::kMax};
  EXPECT_EQ(sizes().size(), 12u);
  // From nothing a factor still gets somewhere, and the largest size ends the sweep.
  options.min_bytes = 0;
  options.step_factor = 4;
  options.types.resize(1);
  options.ops.resize(1);
  EXPECT_THAT(sizes(), ElementsAre(0, 4, 16, 64));
  options.min_bytes = SIZE_MAX - 10;
  options.max_bytes = SIZE_MAX;
  EXPECT_EQ(sweep(options, 2).size(), 1u);
}

TEST(CollectiveTable, EveryRootInTurn) {
  const auto roots = [](Measured collective, int root) {
    CollectivePerfOptions options = options_of(collective);
    options.root = root;
    std::vector<int> out;
    for (const CollectivePoint& point : sweep(options, 3)) out.push_back(point.root);
    return out;
  };
  EXPECT_THAT(roots(Measured::kBroadcast, -1), ElementsAre(0, 1, 2));
  EXPECT_THAT(roots(Measured::kGather, -1), ElementsAre(0, 1, 2));
  EXPECT_THAT(roots(Measured::kScatter, 2), ElementsAre(2));
  EXPECT_THAT(roots(Measured::kAllReduce, -1), ElementsAre(0));
}

TEST(CollectiveTable, BusBandwidthFactors) {
  const auto bus = [](Measured collective) {
    return bandwidth_of(collective, 4'000'000'000, 4, 1).bus;
  };
  EXPECT_DOUBLE_EQ(bus(Measured::kAllReduce), 6);
  EXPECT_DOUBLE_EQ(bus(Measured::kReduceScatter), 3);
  EXPECT_DOUBLE_EQ(bus(Measured::kAllGather), 3);
  EXPECT_DOUBLE_EQ(bus(Measured::kAllToAll), 3);
  EXPECT_DOUBLE_EQ(bus(Measured::kBroadcast), 4);
  EXPECT_DOUBLE_EQ(bus(Measured::kReduce), 4);
  EXPECT_DOUBLE_EQ(bus(Measured::kSendReceive), 4);
  EXPECT_DOUBLE_EQ(bus(Measured::kGather), 3);
  EXPECT_DOUBLE_EQ(bus(Measured::kScatter), 3);
  EXPECT_DOUBLE_EQ(bus(Measured::kHypercube), 3);
  EXPECT_DOUBLE_EQ(bandwidth_of(Measured::kHypercube, 4'000'000'000, 4, 1).algorithm, 3);
  EXPECT_EQ(bandwidth_of(Measured::kAllReduce, 8, 2, 0).bus, 0);
}

TEST(CollectiveTable, NumbersShrinkToTheirColumn) {
  EXPECT_EQ(fit(1.234, 7), "   1.23");
  EXPECT_EQ(fit(9999.99, 7), "9999.99");
  EXPECT_EQ(fit(12345.67, 7), "12345.7");
  EXPECT_EQ(fit(1234567.8, 7), "1234568");
  EXPECT_EQ(fit(12345678, 7), "1.2e+07");
  EXPECT_EQ(fit(123456789, 6), " 1e+08");
  EXPECT_EQ(fit(0, 6), "  0.00");
}

TEST(CollectiveTable, RowsHaveNcclTestsColumns) {
  const CollectivePerfOptions options = options_of(Measured::kAllReduce);
  EXPECT_EQ(table_row(options, measured_row(), ""),
            "        1024           256     float     sum      -1"
            "    12.35    0.08    0.08       0  1234568    0.08    0.08       3\n");
  PerfRow only_out = measured_row();
  only_out.halves[1].reset();
  only_out.halves[0]->wrong.reset();
  CollectivePerfOptions all_to_all = options_of(Measured::kAllToAll);
  EXPECT_EQ(table_row(all_to_all, only_out, ""),
            "        1024           256     float    none      -1"
            "    12.35    0.08    0.08    N/A      N/A     N/A     N/A     N/A\n");
  CollectivePerfOptions broadcast = options_of(Measured::kBroadcast);
  PerfRow of_root = measured_row();
  of_root.point.root = 1;
  EXPECT_THAT(table_row(broadcast, of_root, ""), HasSubstr("    none       1  "));
  // The header's columns end where the row's do.
  std::istringstream header(table_header(options));
  std::string line, names;
  while (std::getline(header, line)) {
    if (line.find("algbw") != std::string::npos) names = line;
  }
  names.erase(names.find_last_not_of(' ') + 1);
  EXPECT_EQ(names.size() + 1, table_row(options, measured_row(), "").size());
}

TEST(CollectiveTable, IterationsSpread) {
  CollectivePerfOptions options = options_of(Measured::kAllReduce);
  options.per_iteration = true;
  options.per_iteration_skip = 1;
  EXPECT_THAT(table_header(options), HasSubstr("  i_min    i_max    i_p99    i_cv%"));
  EXPECT_THAT(table_row(options, measured_row(), ""),
              HasSubstr("    20.00    40.00    40.00    27.22"));
  const IterationStats stats = IterationStats::of({4, 1, 3, 2});
  EXPECT_EQ(stats.min, 1);
  EXPECT_EQ(stats.max, 4);
  EXPECT_DOUBLE_EQ(stats.mean, 2.5);
  EXPECT_EQ(IterationStats::of({}).max, 0);
}

TEST(CollectiveTable, FooterJudges) {
  const CollectivePerfOptions options = options_of(Measured::kAllReduce);
  const std::string good = table_footer(options, 0, 1.5, std::nullopt);
  EXPECT_THAT(good, HasSubstr("# Out of bounds values : 0 OK\n"));
  EXPECT_THAT(good, HasSubstr("# Avg bus bandwidth    : 1.5 \n"));
  EXPECT_THAT(table_footer(options, 7, 1.5, std::nullopt), HasSubstr("values : 7 FAILED"));
  EXPECT_THAT(table_footer(options, 0, 1.5, 1.6), HasSubstr("1.5 OK"));
  EXPECT_THAT(table_footer(options, 0, 1.5, 2.0), HasSubstr("1.5 FAILED"));
  EXPECT_FALSE(footer_fails(0, 1.5, 1.6));
  EXPECT_TRUE(footer_fails(0, 1.5, 2.0));
  EXPECT_TRUE(footer_fails(1, 1.5, std::nullopt));
}

TEST(CollectiveJson, HouseRowsHaveTheKeysThatScriptsDependOn) {
  const CollectivePerfOptions options = options_of(Measured::kAllReduce);
  const std::vector<Json> rows = house_rows(options, 2, "shm", measured_row());
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["bench"], "all_reduce_perf");
  EXPECT_EQ(rows[0]["params"]["ranks"], 2);
  EXPECT_EQ(rows[0]["params"]["type"], "f32");
  EXPECT_EQ(rows[0]["params"]["in_place"], false);
  EXPECT_EQ(rows[1]["params"]["in_place"], true);
  EXPECT_EQ(rows[0]["route"], "shm");
  EXPECT_EQ(rows[0]["bytes"], 1024);
  EXPECT_DOUBLE_EQ(rows[0]["seconds"], 12.345e-6);
  EXPECT_EQ(rows[0]["latency_us"]["max"], 39);
  EXPECT_EQ(rows[0]["verified"], true);
  EXPECT_EQ(rows[1]["verified"], false);
  EXPECT_EQ(rows[1]["wrong"], 3);
}

TEST(CollectiveJson, BaselinesJoinTheRowsOutOfPlace) {
  const CollectivePerfOptions options = options_of(Measured::kAllReduce);
  std::vector<Json> rows = house_rows(options, 2, "shm", measured_row());
  const double ours = rows[0]["latency_us"]["p50"];
  BaselineReport report;
  report.baselines = {{"one_copy_loop", {ours}}, {"open_mpi_shm", {3 * ours}}, {"open_mpi_tcp", {0}}};
  report.missing = {"no such thing"};
  const std::string table = join_baselines(report, {256}, rows);
  EXPECT_THAT(table, HasSubstr("3.00x"));
  EXPECT_THAT(table, HasSubstr("# no such thing"));
  EXPECT_EQ(rows[0]["floor"]["name"], "one_copy_loop");
  EXPECT_DOUBLE_EQ(rows[0]["ratio_to_floor"], 1);
  ASSERT_EQ(rows[0]["rivals"].size(), 1u);  // tcp did not do this size
  EXPECT_EQ(rows[0]["rivals"][0]["name"], "open_mpi_shm");
  EXPECT_DOUBLE_EQ(rows[0]["rivals"][0]["ratio"], 3);
  EXPECT_FALSE(rows[1].contains("rivals"));
}

TEST(CollectiveJson, TheDocumentOfNcclTests) {
  CollectivePerfOptions options = options_of(Measured::kAllReduce);
  options.per_iteration = true;
  NcclDocument document{.arguments = {"all_reduce_perf", "-b", "8"},
                        .start_time = "2026-01-01 00:00:00"};
  document.ranks = {{.rank = 0, .pid = 7, .host = "here", .device = "core 0"}};
  PerfRow row = measured_row();
  document.results.push_back(nccl_result(options, row));
  row.halves[1].reset();
  document.results.push_back(nccl_result(options, row));
  document.average_bus = 2.5;
  const Json json = nccl_json(options, document);
  EXPECT_EQ(json["version"], 3);
  EXPECT_EQ(json["args"][2], "8");
  EXPECT_EQ(json["config"]["iterations"], 20);
  EXPECT_EQ(json["config"]["devices"][0]["hostname"], "here");
  const Json& result = json["results"][0];
  EXPECT_EQ(result["size"], 1024);
  EXPECT_EQ(result["type"], "float");
  EXPECT_EQ(result["root"], "    -1");
  EXPECT_EQ(result["out_of_place"]["nwrong"], 0);
  EXPECT_DOUBLE_EQ(result["in_place"]["time"], 1234567.8);
  EXPECT_EQ(result["out_of_place_per_iter"]["times_us"].size(), 4u);
  EXPECT_EQ(result["actual_iterations"], 20);
  EXPECT_TRUE(json["results"][1]["in_place"].is_null());
  EXPECT_EQ(json["out_of_bounds"]["okay"], "true");
  EXPECT_EQ(json["average_bus_bandwidth"]["okay"], "unchecked");
}

TEST(CollectiveJson, NothingIsOverwritten) {
  const TemporaryFolder folder;
  const std::string path = folder.path("table.json");
  const auto first = write_new_file(path, Json::object());
  const auto second = write_new_file(path, Json::object());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(*first, path);
  EXPECT_EQ(*second, path + ".0");
  EXPECT_THAT(std::string(write_new_file("/nonexistent/x", {}).status().message()),
              HasSubstr("/nonexistent/x"));
}

}  // namespace
}  // namespace baton::bench
