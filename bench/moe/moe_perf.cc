// `baton moe_perf`: rounds of experts, timed beside memcpy of as many bytes in the same process.
#include "bench/moe/moe_perf.h"

#include <sys/mman.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <numeric>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/report/child_process.h"
#include "bench/report/report.h"
#include "collectives/experts.h"
#include "collectives/launch.h"
#include "collectives/reduce/reduce.h"
#include "engine/command_line/command_line.h"
#include "transport/base/quantile.h"

namespace baton::bench {
namespace {

// Mixture-of-experts traffic, of which every rank can work out every rank's part.
struct MoeJob {
  int tokens = 1024;  // of each rank
  int hidden = 7168;
  int top_k = 8;
  int experts = 256;
  int ranks = 2;
};

// [tokens][top_k]: different experts for each token, of equal odds, as DeepEP's tests have it.
std::vector<int32_t> choices_of(const MoeJob& job, int rank) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) + 1);
  std::vector<int32_t> all(static_cast<size_t>(job.experts)), chosen;
  std::iota(all.begin(), all.end(), 0);
  for (int token = 0; token < job.tokens; ++token) {
    for (int i = 0; i < job.top_k; ++i) {
      const auto left = static_cast<uint64_t>(job.experts - i);
      std::swap(all[static_cast<size_t>(i)],
                all[static_cast<size_t>(i) + static_cast<size_t>(random() % left)]);
      chosen.push_back(all[static_cast<size_t>(i)]);
    }
  }
  return chosen;
}

// Rows that go from a rank to another one.
size_t rows_of(const MoeJob& job, int from, int to) {
  const std::vector<int32_t> chosen = choices_of(job, from);
  const auto local = static_cast<int32_t>(job.experts / job.ranks);
  size_t rows = 0;
  int last = -1;
  for (size_t i = 0; i < chosen.size(); ++i) {
    const int token = static_cast<int>(i / static_cast<size_t>(job.top_k));
    if (chosen[i] / local != to || token == last) continue;
    last = token;
    ++rows;
  }
  return rows;
}

struct Options {
  MoeJob job;
  ExpertsOptions experts;
  std::string type = "bf16", mode = "auto", provider, json;
  int iterations = 20, warmup = 3;
};

// Rank 0's report to the process that forked it.
struct Result {
  double dispatch_us = 0, combine_us = 0, memcpy_us = 0;  // medians, of all ranks on average
  double dispatch_bytes = 0, combine_bytes = 0;           // likewise
  long long wrong = 0;                                    // tokens, in all
};

double us_since(Time began) { return seconds_of(Clock::steady().now() - began) * 1e6; }

class Rank {
 public:
  Rank(const Options& options, Communicator& comm)
      : options_(options),
        comm_(comm),
        row_bytes_(static_cast<size_t>(options.job.hidden) * size_of(options.experts.type)) {}

  absl::Status run(Result& result) {
    auto made = Experts::create(comm_, options_.experts);
    if (!made.ok()) return made.status();
    experts_ = *std::move(made);
    const auto tokens = static_cast<size_t>(options_.job.tokens);
    auto memory = comm_.allocate(tokens * row_bytes_);
    if (!memory.ok()) return memory.status();
    rows_ = memory->data;
    out_.resize(tokens * row_bytes_);
    chosen_ = choices_of(options_.job, comm_.rank());
    weights_.assign(chosen_.size(), 0.25f);
    fill();
    for (int other = 0; other < options_.job.ranks; ++other) {
      result.dispatch_bytes +=
          static_cast<double>(rows_of(options_.job, other, comm_.rank()) * wire_bytes());
    }
    result.combine_bytes = static_cast<double>(chosen_.size() * row_bytes_);
    if (absl::Status status = time_rounds(result); !status.ok()) return status;
    if (absl::Status status = check(result); !status.ok()) return status;
    double values[] = {result.dispatch_us,    result.combine_us,    result.memcpy_us,
                       result.dispatch_bytes, result.combine_bytes, double(result.wrong)};
    absl::Status status =
        comm_.all_reduce(values, values, std::size(values), DataType::kF64, ReduceOp::kSum);
    const double ranks = options_.job.ranks;
    result = {values[0] / ranks, values[1] / ranks, values[2] / ranks,
              values[3] / ranks, values[4] / ranks, static_cast<long long>(values[5])};
    return status;
  }

 private:
  size_t wire_bytes() const {
    const auto hidden = static_cast<size_t>(options_.job.hidden);
    return options_.experts.fp8 ? hidden + collectives::reduce::scales_of(hidden) * sizeof(float)
                                : row_bytes_;
  }
  // Rows differ, and are numbers of any type: small halves.
  void fill() {
    const size_t element = size_of(options_.experts.type);
    for (size_t i = 0; i < out_.size() / element; ++i) {
      const auto value = static_cast<float>((i * 7 + static_cast<size_t>(comm_.rank())) % 17) / 2;
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      if (options_.experts.type == DataType::kBF16) bits >>= 16;
      if (options_.experts.type == DataType::kF16 && bits != 0) bits = (bits >> 13) - (112u << 10);
      std::memcpy(rows_ + i * element, &bits, element);
    }
  }

  // A round and the copies of as many bytes, in turns, so that both see the machine as it is.
  absl::Status time_rounds(Result& result) {
    std::vector<double> dispatch, combine, copies;
    const auto bytes = static_cast<size_t>(result.dispatch_bytes + result.combine_bytes);
    std::vector<std::byte> from(bytes, std::byte{1}), to(bytes, std::byte{2});
    for (int i = -options_.warmup; i < options_.iterations; ++i) {
      if (absl::Status status = comm_.barrier(); !status.ok()) return status;
      Time began = Clock::steady().now();
      auto received = experts_->dispatch(rows_, options_.job.tokens, chosen_);
      if (!received.ok()) return received.status();
      const double dispatched = us_since(began);
      if (i == -options_.warmup) touch(*received);
      if (absl::Status status = comm_.barrier(); !status.ok()) return status;
      began = Clock::steady().now();
      absl::Status status = experts_->combine(*received, weights_, out_.data(), out_.size());
      if (!status.ok()) return status;
      const double combined = us_since(began);
      if (status = comm_.barrier(); !status.ok()) return status;
      began = Clock::steady().now();
      std::memcpy(to.data(), from.data(), bytes);
      if (i < 0) continue;
      copies.push_back(us_since(began));
      dispatch.push_back(dispatched);
      combine.push_back(combined);
    }
    result.dispatch_us = base::median(dispatch);
    result.combine_us = base::median(combine);
    result.memcpy_us = base::median(copies);
    return absl::OkStatus();
  }

  // Experts return their input unchanged. In timed rounds they do not write it again, because an
  // expert's time is not part of the measurement.
  void touch(const ExpertRows& rows) const {
    const auto hidden = static_cast<size_t>(options_.job.hidden);
    for (const ExpertGroup& group : rows.groups) {
      for (int slot = group.first; slot < group.first + group.count; ++slot) {
        if (options_.experts.fp8) {
          std::memset(rows.output(slot), 0, row_bytes_);
          if (options_.experts.type != DataType::kF32) continue;
          Experts::dequantise(rows.row(slot),
                              reinterpret_cast<const float*>(rows.row(slot) + rows.scales_offset),
                              hidden, reinterpret_cast<float*>(rows.output(slot)));
        } else {
          std::memcpy(rows.output(slot), rows.row(slot), row_bytes_);
        }
      }
    }
  }

  // One more round, with experts that return their input, so each token's sum is known. With fp8
  // sums are rounded, and are not compared.
  absl::Status check(Result& result) {
    auto received = experts_->dispatch(rows_, options_.job.tokens, chosen_);
    if (!received.ok()) return received.status();
    touch(*received);
    absl::Status status = experts_->combine(*received, weights_, out_.data(), out_.size());
    if (!status.ok() || options_.experts.fp8) return status;
    std::vector<std::byte> wanted(row_bytes_);
    const auto top_k = static_cast<size_t>(options_.job.top_k);
    for (size_t token = 0; token < static_cast<size_t>(options_.job.tokens); ++token) {
      const std::vector<const void*> same(top_k, rows_ + token * row_bytes_);
      collectives::reduce::weighted_sum(options_.experts.type, wanted.data(), same,
                                        absl::MakeSpan(weights_).first(top_k),
                                        static_cast<size_t>(options_.job.hidden));
      const std::byte* const got = out_.data() + token * row_bytes_;
      if (std::memcmp(got, wanted.data(), row_bytes_) != 0) ++result.wrong;
    }
    return status;
  }

  const Options& options_;
  Communicator& comm_;
  const size_t row_bytes_;
  std::unique_ptr<Experts> experts_;
  std::byte* rows_ = nullptr;
  std::vector<std::byte> out_;
  std::vector<int32_t> chosen_;
  std::vector<float> weights_;
};

int run_rank(const Options& options, const launch::Place& place, Result& result) {
  const std::vector<int>& cpus = allowed_cpus();
  if (static_cast<size_t>(place.ranks) <= cpus.size()) {
    pin_to(cpus[static_cast<size_t>(place.local_rank)]);
  }
  CommunicatorOptions group;
  group.rank = place.rank;
  group.ranks = place.ranks;
  group.rendezvous = place.rendezvous;
  if (!options.provider.empty()) {
    group.worker.providers = {options.provider};
    group.worker.require = options.provider;
  }
  absl::Status status;
  Result own;
  auto comm = Communicator::create(std::move(group));
  status = comm.ok() ? Rank(options, **comm).run(own) : comm.status();
  if (!status.ok()) {
    std::fprintf(stderr, "baton moe_perf: rank %d: %s\n", place.rank,
                 std::string(status.message()).c_str());
    return 1;
  }
  if (place.rank == 0) result = own;
  return own.wrong > 0 ? 1 : 0;
}

int report(const Options& options, const Result& result) {
  const auto gb_per_s = [](double bytes, double us) { return us > 0 ? bytes / us / 1e3 : 0; };
  const MoeJob& job = options.job;
  const double total = result.dispatch_us + result.combine_us;
  const double bytes = result.dispatch_bytes + result.combine_bytes;
  Json row = {{"bench", "moe_perf"},
              {"params",
               {{"ranks", job.ranks},
                {"tokens", job.tokens},
                {"hidden", job.hidden},
                {"topk", job.top_k},
                {"experts", job.experts},
                {"type", options.type},
                {"fp8", options.experts.fp8},
                {"mode", options.mode},
                {"provider", options.provider.empty() ? "auto" : options.provider}}},
              {"dispatch_us", result.dispatch_us},
              {"dispatch_gb_per_s", gb_per_s(result.dispatch_bytes, result.dispatch_us)},
              {"combine_us", result.combine_us},
              {"combine_gb_per_s", gb_per_s(result.combine_bytes, result.combine_us)},
              {"memcpy_gb_per_s", gb_per_s(bytes, result.memcpy_us)},
              {"ratio_to_memcpy", total > 0 ? result.memcpy_us / total : 0},
              {"wrong", result.wrong}};
  Table table({"ranks", "tokens", "hidden", "topk", "experts", "type", "dispatch us",
               "dispatch GB/s", "combine us", "combine GB/s", "memcpy GB/s", "of memcpy", "wrong"});
  const auto number = [](double value) { return absl::StrFormat("%.2f", value); };
  table.add({absl::StrCat(job.ranks), absl::StrCat(job.tokens), absl::StrCat(job.hidden),
             absl::StrCat(job.top_k), absl::StrCat(job.experts),
             absl::StrCat(options.type, options.experts.fp8 ? ", fp8" : ""),
             number(result.dispatch_us), number(row["dispatch_gb_per_s"]),
             number(result.combine_us), number(row["combine_gb_per_s"]),
             number(row["memcpy_gb_per_s"]), number(row["ratio_to_memcpy"]),
             options.experts.fp8 ? "N/A" : absl::StrCat(result.wrong)});
  std::cout << table.text();
  if (options.json.empty()) return 0;
  const absl::Status written = write_lines(options.json, {row});
  if (!written.ok()) std::cerr << "baton moe_perf: " << written.message() << "\n";
  return written.ok() ? 0 : 1;
}

int run(const Options& options) {
  void* const shared =
      mmap(nullptr, sizeof(Result), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    std::cerr << "baton moe_perf: no memory\n";
    return 1;
  }
  auto& result = *new (shared) Result;
  const auto ended = launch::fork_ranks(
      {.ranks = options.job.ranks},
      [&](const launch::Place& place, int) { return run_rank(options, place, result); });
  int status = ended.ok() ? *ended : 1;
  if (!ended.ok()) std::cerr << "baton moe_perf: " << ended.status().message() << "\n";
  if (result.dispatch_us > 0) status = std::max(status, report(options, result));
  munmap(shared, sizeof(Result));
  return status;
}

}  // namespace

int moe_perf_main(int argc, char** argv) {
  using engine::command_line::one_of;
  using engine::command_line::whole_number;
  Options options;
  MoeJob& job = options.job;
  CLI::App app("Times dispatch and combine of mixture-of-experts rows, with DeepEP's flags.");
  const auto number = [&](const char* flag, int& value, int most, const char* text) {
    app.add_option(flag, value, text)->check(whole_number(1, most))->capture_default_str();
  };
  number("--num-processes", job.ranks, 256, "ranks, forked here");
  number("--num-tokens", job.tokens, 1 << 20, "of each rank");
  number("--hidden", job.hidden, 1 << 20, "elements of a row");
  number("--num-topk", job.top_k, 64, "experts of a token");
  number("--num-experts", job.experts, 32767, "of all ranks together, a multiple of these");
  app.add_option("--type", options.type, "of rows: f32, bf16 or f16")
      ->check(one_of({"f32", "bf16", "f16"}))
      ->capture_default_str();
  app.add_flag("--fp8", options.experts.fp8, "dispatched rows travel as e4m3 with scales");
  app.add_option("--mode", options.mode,
                 "low_latency: rows are packed behind their list; throughput: they go from where "
                 "they are; auto: by their bytes")
      ->check(one_of({"auto", "low_latency", "throughput"}))
      ->capture_default_str();
  app.add_option("--provider", options.provider, "shm, tcp, ...; otherwise the best there is");
  number("-n,--num-tests", options.iterations, 1 << 20, "timed rounds");
  number("-w,--num-warmups", options.warmup, 1 << 20, "rounds before them");
  app.add_option("--json", options.json, "write one JSON object")
      ->check(engine::command_line::writable_file())
      ->type_name("FILE");
  if (const int status = engine::command_line::parse(app, "baton moe_perf", argc, argv);
      status >= 0) {
    return status;
  }
  options.experts.experts = job.experts;
  options.experts.top_k = job.top_k;
  options.experts.hidden = job.hidden;
  options.experts.max_tokens = job.tokens;
  options.experts.type = parse_data_type(options.type).value();
  options.experts.mode = options.mode == "low_latency"  ? ExpertsMode::kLowLatency
                         : options.mode == "throughput" ? ExpertsMode::kThroughput
                                                        : ExpertsMode::kAuto;
  if (job.top_k > job.experts || job.experts % job.ranks != 0) {
    std::cerr
        << "baton moe_perf: --num-experts is a multiple of --num-processes, and --num-topk no "
           "more than that\n";
    return 2;
  }
  return run(options);
}

}  // namespace baton::bench
