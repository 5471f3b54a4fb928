// The command line of the collective benchmarks.
#include "bench/nccl_tests/collective_perf_options.h"
#include "tests/bench/parsed.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;

auto parse(const std::string& command, const std::string& line) {
  return parse_line(command, line, parse_collective_perf);
}

TEST(CollectiveOptions, DefaultsAreThoseOfNcclTests) {
  const CollectivePerfOptions options = *parse("all_reduce_perf", "");
  EXPECT_EQ(options.min_bytes, size_t{32} << 20);
  EXPECT_EQ(options.max_bytes, size_t{32} << 20);
  EXPECT_EQ(options.iterations, 20);
  EXPECT_EQ(options.warmup, 1);
  EXPECT_EQ(options.checks, 1);
  EXPECT_EQ(options.average, Average::kMean);
  EXPECT_EQ(options.types, std::vector<DataType>{DataType::kF32});
  EXPECT_EQ(options.ranks, 0);
}

TEST(CollectiveOptions, TakesNcclTestsFlagsAndOurs) {
  const CollectivePerfOptions options =
      *parse("reduce_perf",
             "-b 8 -e 1G -f 2 -n 5 -w 0 -c 3 -o avg -d bfloat16 -r 1 -z 3 -a 3 -m 4 -N 2 -C 1 -I 1 "
             "-K 2 -u 1 -J out.json -T 2.5 --ranks 3 --algorithm tree --channels 2 --chunk 64K "
             "--ordered --malloc --explain --no-pin --link 1Gb/s,50us");
  EXPECT_EQ(options.max_bytes, size_t{1} << 30);
  EXPECT_EQ(options.step_factor, 2u);
  EXPECT_EQ(options.types, std::vector<DataType>{DataType::kBF16});
  EXPECT_EQ(options.ops, std::vector<ReduceOp>{ReduceOp::kAvg});
  EXPECT_EQ(options.root, 1);
  EXPECT_EQ(options.blocking, 3);
  EXPECT_EQ(options.average, Average::kMax);
  EXPECT_EQ(options.aggregated, 4);
  EXPECT_EQ(options.cycles, 2);
  EXPECT_TRUE(options.cpu_time && options.per_iteration);
  EXPECT_EQ(options.per_iteration_skip, 2);
  EXPECT_EQ(options.unalign, 1u);
  EXPECT_EQ(options.nccl_json, "out.json");
  EXPECT_EQ(options.timeout_s, 2.5);
  EXPECT_EQ(options.call.algorithm, Algorithm::kTree);
  EXPECT_EQ(options.call.channels, 2u);
  EXPECT_EQ(options.call.chunk_bytes, size_t{64} << 10);
  EXPECT_EQ(options.call.ordered, true);
  EXPECT_TRUE(options.plain_memory && options.explain && !options.pin);
}

TEST(CollectiveOptions, AllTypesAndOperations) {
  const CollectivePerfOptions reduce = *parse("all_reduce_perf", "-d all -o all");
  EXPECT_EQ(reduce.types.size(), size_t{kDataTypes});
  EXPECT_EQ(reduce.ops.size(), size_t{kReduceOps});
  const CollectivePerfOptions gather = *parse("all_gather_perf", "-o all");
  EXPECT_EQ(gather.ops.size(), 1u);
}

TEST(CollectiveOptions, LinesThatPeopleTypeForNcclTests) {
  const struct {
    const char* line;
    int ranks;
    bool one_each;
  } cases[] = {
      {"-b 8 -e 128M -f 2 -g 1", 1, true},
      {"-g 1 -t 1 -p 1 -G 0 -R 0 -y 0", 1, true},
      {"-g 8", 8, false},
      {"-t 2 --ngpus 3 --ranks 6", 6, false},
      {"-g 2 -g 4 -b 1K -b 8", 4, false},  // the last holds
      {"--ranks 1", 1, false},
      {"", 0, false},
  };
  for (const auto& one : cases) {
    const CollectivePerfOptions parsed = *parse("all_reduce_perf", one.line);
    EXPECT_EQ(parsed.ranks, one.ranks);
    EXPECT_EQ(parsed.one_each, one.one_each);
  }
  EXPECT_EQ(parse("reduce_perf", "-r -1").command.options->root, CollectivePerfOptions::kEveryRoot);
}

TEST(CollectiveOptions, WhatMakesNoSenseHereSaysWhatDoes) {
  const struct {
    const char* line;
    const char* says;
  } cases[] = {
      {"-g 2 --ranks 3", "--ranks 3 and -t 1 -g 2, which are 2 ranks"},
      {"-g 2 -r 2", "ranks 0 to 1"},
      {"-G 1", "-m N"},
      {"-R 1", "--malloc"},
      {"-d fp8", "bfloat16"},
      {"-o mulsm", "premulsum"},
      {"-d float -o and", "-o and does not combine -d float"},
      {"-b 2M -e 1M", "-b 2097152 is more than -e 1048576"},
      {"-f 1 -i 0", "must be positive"},
      {"-d flaot", "did you mean float?"},
      {"-o smu", "did you mean sum?"},
      {"--set tcp.encrpt=on", "did you mean tcp.encrypt?"},
      {"-n 3 -K 3", "-K leaves no iteration"},
      {"--ranks 2 -r 2", "ranks 0 to 1"},
      {"--link fast", "fast"},
      {"--provider pigeon", "no provider \"pigeon\""},
      {"--algorithm spiral", "ring"},
  };
  for (const auto& one : cases) {
    const auto parsed = parse("all_reduce_perf", one.line);
    EXPECT_FALSE(parsed.ok()) << one.says;
    EXPECT_EQ(parsed.command.exit_status, 2);
    EXPECT_THAT(parsed.err, HasSubstr(one.says));
  }
  EXPECT_EQ(parse("all_reduce_perf", "--help").command.exit_status, 0);
}

}  // namespace
}  // namespace baton::bench
