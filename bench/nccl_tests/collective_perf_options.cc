// Parsing and checking the arguments of the collective benchmarks.
#include "bench/nccl_tests/collective_perf_options.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <string_view>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "bench/report/bench_memory.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/worker_flags.h"

namespace baton::bench {
namespace {

constexpr const char* kFooter = R"(Examples:
  baton all_reduce_perf --ranks 2 -b 8 -e 64M -f 2             shm, the columns of nccl-tests
  baton all_reduce_perf --ranks 2 -b 8 -e 64M -f 8 --baselines  Open MPI beside it
  baton all_gather_perf --ranks 4 --provider tcp -d bfloat16
  mpirun -n 4 baton reduce_scatter_perf -b 1M -e 1M            ranks from mpirun, srun, torchrun
Sizes take K, M and G (powers of 1024). GB/s are 10^9 bytes per second. Exit status 1: a wrong
value, an error, or less than NCCL_TESTS_MIN_BW.)";

constexpr std::pair<std::string_view, Measured> kCommands[] = {
    {"all_reduce_perf", Measured::kAllReduce},
    {"all_gather_perf", Measured::kAllGather},
    {"reduce_scatter_perf", Measured::kReduceScatter},
    {"broadcast_perf", Measured::kBroadcast},
    {"reduce_perf", Measured::kReduce},
    {"alltoall_perf", Measured::kAllToAll},
    {"sendrecv_perf", Measured::kSendReceive},
    {"gather_perf", Measured::kGather},
    {"scatter_perf", Measured::kScatter},
    {"hypercube_perf", Measured::kHypercube}};

// Flags of nccl-tests that need a GPU. Their value 0, nccl-tests' default, is accepted.
struct UnsupportedFlag {
  const char* flags;
  const char* instead;
};
constexpr std::array kUnsupported = {
    UnsupportedFlag{"-y,--stream_null", "there are no streams: see -z for how calls are awaited"},
    UnsupportedFlag{"-G,--cudagraph", "there are no graphs: -m N puts N calls in flight at once"},
    UnsupportedFlag{"-R,--local_register", "buffers are registered unless you say --malloc"},
    UnsupportedFlag{"-x,--cta_policy", "no GPU cores are used: --channels N spreads the load"},
    UnsupportedFlag{"-D,--device_implementation", "choose with --algorithm NAME"},
    UnsupportedFlag{"-V,--device_cta_count", "choose with --channels N"},
    UnsupportedFlag{"-M", "--malloc shows what registered memory gains"},
};

// The text of those options that CLI11 cannot check by itself.
struct UncheckedOptions {
  std::string type = "float";
  std::string op = "sum";
  std::string algorithm;
  std::string memory = "host";
};

absl::Status finish(CollectivePerfOptions& options, const UncheckedOptions& texts) {
  if (texts.type == "all") {
    options.types.clear();
    for (int i = 0; i < kDataTypes; ++i) options.types.push_back(static_cast<DataType>(i));
  } else {
    const auto type = parse_data_type(texts.type);
    if (!type.ok()) return type.status();
    options.types = {*type};
  }
  if (texts.op == "all") {
    options.ops.clear();
    for (int i = 0; i < kReduceOps; ++i) options.ops.push_back(static_cast<ReduceOp>(i));
  } else {
    const auto op = parse_reduce_op(texts.op);
    if (!op.ok()) return op.status();
    options.ops = {*op};
  }
  if (!options.reduces()) options.ops.resize(1);
  const bool any = std::any_of(options.types.begin(), options.types.end(),
                               [&](DataType type) { return combines(type, options.ops.front()); });
  if (options.reduces() && options.ops.size() == 1 && !any) {
    return absl::InvalidArgumentError(
        absl::StrFormat("-o %s does not combine -d %s: and, or and xor need integers or bool; bool "
                        "has no avg and no premulsum",
                        texts.op, texts.type));
  }
  if (!texts.algorithm.empty()) {
    const auto algorithm = parse_algorithm(texts.algorithm);
    if (!algorithm.ok()) return algorithm.status();
    options.call.algorithm = *algorithm;
  }
  if (options.min_bytes > options.max_bytes) {
    return absl::InvalidArgumentError(absl::StrFormat("-b %u is more than -e %u: give both",
                                                      options.min_bytes, options.max_bytes));
  }
  if (options.step_factor == 0 || (options.step_factor == 1 && options.step_bytes == 0)) {
    return absl::InvalidArgumentError("-f and -i must be positive, or the sweep never ends");
  }
  if (options.per_iteration_skip >= options.iterations) {
    return absl::InvalidArgumentError("-K leaves no iteration: it must be less than -n");
  }
  if (options.ranks > 0 && !options.one_each && options.root >= options.ranks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("-r %d: there are ranks 0 to %d", options.root, options.ranks - 1));
  }
  const auto device = parse_memory_kind(texts.memory);
  if (!device.ok()) return device.status();
  options.cuda = *device;
  if (options.cuda && options.plain_memory) {
    return absl::InvalidArgumentError("--malloc uses host memory: leave out --memory");
  }
  if (options.cuda && options.window) {
    return absl::InvalidArgumentError("--window uses host memory: leave out --memory");
  }
  return absl::OkStatus();
}

}  // namespace

bool CollectivePerfOptions::reduces() const {
  return collective == Measured::kAllReduce || collective == Measured::kReduceScatter ||
         collective == Measured::kReduce;
}

bool CollectivePerfOptions::has_root() const {
  return collective == Measured::kBroadcast || collective == Measured::kReduce ||
         collective == Measured::kGather || collective == Measured::kScatter;
}

bool CollectivePerfOptions::can_be_in_place() const {
  return collective != Measured::kAllToAll && collective != Measured::kSendReceive;
}

CollectivePerfCommand parse_collective_perf(int argc, const char* const* argv) {
  CollectivePerfOptions options;
  options.command = argv[0];
  for (const auto& [command, measured] : kCommands) {
    if (command == options.command) options.collective = measured;
  }
  UncheckedOptions texts;

  const std::string name = absl::StrCat("baton ", options.command);
  CLI::App app("Measures a collective among processes, as nccl-tests does among GPUs.");
  app.footer(kFooter);
  using engine::command_line::one_of;
  using engine::command_line::real_number;
  using engine::command_line::whole_number;
  const CLI::Validator size = engine::command_line::byte_size();
  const auto bytes = [&](const char* flag, size_t& value, const char* text) {
    app.add_option(flag, value, text)->transform(size)->type_name("BYTES");
  };
  const auto number = [&](const char* flag, auto& value, int least, int most, const char* text) {
    app.add_option(flag, value, text)->type_name("N")->check(whole_number(least, most));
  };
  constexpr int kMost = 1 << 24;
  bytes("-b,--minbytes", options.min_bytes, "smallest size (default 32M)");
  auto* most_bytes = app.add_option("-e,--maxbytes", options.max_bytes, "largest (default 32M)")
                         ->transform(size)
                         ->type_name("BYTES");
  bytes("-i,--stepbytes", options.step_bytes, "step between sizes (default 1M)");
  number("-f,--stepfactor", options.step_factor, 1, 1 << 20, "multiply instead (default: add -i)");
  number("-n,--iters", options.iterations, 1, kMost, "timed calls (default 20)");
  number("-m,--agg_iters", options.aggregated, 1, 256, "calls in flight at once (default 1)");
  number("-w,--warmup_iters", options.warmup, 0, kMost, "warmup calls before them (default 1)");
  number("-N,--run_cycles", options.cycles, 0, kMost,
         "repetitions of the whole sweep; 0: for ever");
  number("-c,--check", options.checks, 0, kMost, "calls whose every value is checked (default 1)");
  app.add_option("-o,--op", texts.op,
                 "sum, prod, min, max, avg, premulsum (mulsum), and, or, xor or all (default sum)");
  app.add_option(
      "-d,--datatype", texts.type,
      "float, half, bfloat16, double, int8, uint8, int32, uint32, int64, uint64, f8e4m3, "
      "f8e5m2, bool or all");
  number("-r,--root", options.root, CollectivePerfOptions::kEveryRoot, kMost,
         "root of broadcast, reduce, gather and scatter (default 0); -1: every rank in turn");
  number(
      "-z,--blocking", options.blocking, 0, 3,
      "calls are always waited for; 1: a barrier after each -m too, 3: after each -n, not timed");
  int average = static_cast<int>(options.average);
  number("-a,--average", average, 0, 3,
         "which of the ranks' times to report: 0 rank 0, 1 mean (default), 2 min, 3 max");
  const CLI::Validator zero_or_one = one_of({"0", "1"}).description("");
  const auto choice = [&](const char* flag, bool& value, const char* text) {
    app.add_option(flag, value, text)->check(zero_or_one)->type_name("0/1");
  };
  choice("-C,--report_cputime", options.cpu_time, "CPU time instead of elapsed time");
  choice("-S,--report_timestamps", options.timestamps, "print when each row was done");
  choice("-I,--per_iter_timing", options.per_iteration,
         "min, max, p99 and variation of the calls, of the slowest rank of each");
  number("-K,--per_iter_skip", options.per_iteration_skip, 0, kMost,
         "calls that -I leaves out at the start");
  number("-u,--unalign", options.unalign, 0, 1 << 20, "offset into the buffers, in elements");
  app.add_option("-J,--output_file", options.nccl_json, "nccl-tests' JSON")
      ->check(engine::command_line::writable_file())
      ->type_name("FILE");
  app.add_option("-T,--timeout", options.timeout_s,
                 "time limit of each call in seconds (default 60)")
      ->type_name("S")
      ->check(real_number(0.001, 1e6));

  int threads = 1, gpus = 1;
  number("-t,--nthreads", threads, 1, 1024, "ranks to fork, with -g: -t times -g");
  number("-g,--ngpus", gpus, 1, 1024,
         "ranks to fork; 1 (default): one per process that mpirun started");
  number("--ranks", options.ranks, 1, 1024,
         "ranks to fork (default: the ranks that mpirun, srun or torchrun started; else 2)");
  engine::command_line::add_provider(app, options.provider, "the only provider to use");
  engine::command_line::add_settings(app, options.settings);
  engine::command_line::add_link(app, options.link);
  app.add_option("--algorithm", texts.algorithm, "algorithm, instead of the chosen one")
      ->check(engine::command_line::not_empty())
      ->type_name("NAME");
  number("--channels", options.call.channels, 1, 256, "channels, instead of the chosen number");
  bytes("--chunk", options.call.chunk_bytes, "size of one message, instead of the chosen one");
  bool ordered = false;
  app.add_flag("--ordered", ordered, "bit-identical results whatever the algorithm");
  app.add_flag("--malloc", options.plain_memory, "use buffers that peers cannot reach directly");
  if (options.collective == Measured::kSendReceive) {
    app.add_flag("--window", options.window,
                 "put into a window of the next rank, with a signal, instead of a send");
  }
  app.add_option("--memory", texts.memory,
                 "memory of the buffers: host (default), cuda or cuda:N, at every rank")
      ->type_name("KIND");
  app.add_flag("--explain", options.explain, "explain the choices for each size");
  app.add_flag("--baselines,--rivals", options.baselines,
               "measure Open MPI and a one-copy loop too (./run install-deps all)");
  app.add_flag("--pin,!--no-pin", options.pin,
               "pin each rank to its own core (default, given enough cores)");
  app.add_option("--json", options.json, "write one JSON object per row")
      ->check(engine::command_line::writable_file())
      ->type_name("FILE");

  std::vector<CLI::Option*> unsupported;
  std::string ignored, no_effect;
  app.add_option("-p,--parallel_init", no_effect, "no effect: ranks always start in parallel")
      ->type_name("0/1");
  for (const UnsupportedFlag& flag : kUnsupported) {
    unsupported.push_back(app.add_option(flag.flags, ignored)->group(""));
  }

  const int leave = engine::command_line::parse(app, name, argc, argv);
  if (leave >= 0) return {.options = std::nullopt, .exit_status = leave};
  options.average = static_cast<Average>(average);
  if (!options.provider.empty()) {
    engine::command_line::tell_idle_settings(name, options.settings, {options.provider});
  }
  absl::Status status;
  for (size_t i = 0; i < unsupported.size(); ++i) {
    if (unsupported[i]->count() == 0 || unsupported[i]->results().back() == "0") continue;
    status = absl::InvalidArgumentError(absl::StrFormat(
        "%s does not apply here: %s", kUnsupported[i].flags, kUnsupported[i].instead));
  }
  if (most_bytes->count() == 0) options.max_bytes = std::max(options.max_bytes, options.min_bytes);
  if (ordered) options.call.ordered = true;
  if (app.count("-t") + app.count("-g") > 0) {
    const int product = threads * gpus;
    if (app.count("--ranks") > 0 && options.ranks != product) {
      status = absl::InvalidArgumentError(absl::StrFormat(
          "--ranks %d and -t %d -g %d, which are %d ranks, contradict each other: leave one out",
          options.ranks, threads, gpus, product));
    }
    options.one_each = product == 1 && app.count("--ranks") == 0;
    options.ranks = product;
  }
  if (status.ok()) status = finish(options, texts);
  if (!status.ok()) {
    std::cerr << name << ": " << status.message() << " (see " << name << " --help)\n";
    return {.options = std::nullopt, .exit_status = engine::command_line::kUsage};
  }
  return {.options = std::move(options), .exit_status = 0};
}

}  // namespace baton::bench
