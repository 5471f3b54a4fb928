// `baton kernel_bench`: GEMM against the multiply-add peak, attention against read bandwidth.
#include "engine/commands/serve_cli.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/values.h"
#include "engine/files/files.h"
#include "engine/kernels/aligned.h"
#include "engine/kernels/amx.h"
#include "engine/kernels/attention.h"
#include "engine/kernels/bf16_dot.h"
#include "engine/kernels/bf16_gemm.h"
#include "engine/kernels/compute_pool.h"
#include "engine/kernels/gemm.h"
#include "engine/kernels/peaks.h"
#include "engine/model/config.h"
#include "transport/base/quantile.h"

namespace baton::engine::commands {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string json;
  std::string only;  // rows of one kind
  int threads = 0;
  bool quick = false;

  bool wants(const char* bench) const { return only.empty() || only == bench; }
};

constexpr const char* kBenches[] = {"gemm", "gemm_bf16", "token", "decode_attention"};

// The size of the input for kernels that are bound by memory: twice the last cache, so that little
// is still cached at the next read.
size_t beyond_caches(const Options& options) {
  if (options.quick) return size_t{32} << 20;
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return std::max(size_t{256} << 20, 2 * static_cast<size_t>(std::max(cache, 0L)));
}

template <typename Fn>
double timed(Fn&& fn) {
  const auto start = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Measured {
  double seconds = 0, median = 0;  // of the kernel
  double floor = 0;                // what it works in, per second, at most
};

// Floor and kernel again and again. Runs are short and many: on a shared machine most are
// disturbed, but the best of each are not.
template <typename Floor, typename Kernel>
Measured measure(const Options& options, const Floor& floor, const Kernel& kernel) {
  const double budget = options.quick ? 0.3 : 2.0;
  std::vector<double> floors, times;
  double spent = 0;
  for (int i = 0; i < 5 || spent < budget; ++i) {
    spent += timed([&] {
      floors.push_back(floor());
      times.push_back(timed(kernel));
    });
  }
  return {*std::min_element(times.begin(), times.end()), base::median(times),
          *std::max_element(floors.begin(), floors.end())};
}

struct Rows {
  std::string json;
  bool all_verified = true;

  // `work`: operations, or bytes that are read.
  void add(const char* bench, const std::string& what, Json params, const Measured& measured,
           double work, const char* floor, bool verified) {
    const bool reads = std::string_view(floor).find("read") != std::string_view::npos;
    const char* const unit = reads ? "GB_per_s" : "GFLOP_per_s";
    const double rate = work / measured.seconds, ratio = rate / measured.floor;
    std::printf("%-58s %10.1f us %8.1f %s  %s %8.1f  ratio %.2f  %s\n", what.c_str(),
                measured.seconds * 1e6, rate * 1e-9, reads ? "GB/s" : "GFLOP/s", floor,
                measured.floor * 1e-9, ratio, verified ? "verified" : "WRONG");
    Json row = {{"bench", bench}, {"params", std::move(params)}};
    if (reads) row["bytes"] = static_cast<uint64_t>(work);
    row.update({{"seconds", measured.seconds},
                {"seconds_median", measured.median},
                {unit, rate * 1e-9},
                {"floor", {{"name", floor}, {unit, measured.floor * 1e-9}}},
                {"ratio_to_floor", ratio},
                {"verified", verified}});
    json += row.dump() + "\n";
    all_verified = all_verified && verified;
  }
};

void fill(float* data, size_t count, uint32_t seed) {
  std::minstd_rand random(seed);
  for (size_t i = 0; i < count; ++i) {
    data[i] = static_cast<float>(random() % 2001) * 1e-3f - 1.0f;
  }
}

struct GemmCase {
  int m, n, k;
  bool bf16;  // B as the model stores it
};

struct Bf16Case {
  int m, n, k;
};

void bench_gemm(const GemmCase& c, const Options& options, ComputePool& pool, Rows& rows) {
  const size_t m = size_t(c.m), n = size_t(c.n), k = size_t(c.k);
  AlignedArray<float> a(m * k), b(k * n), out(m * n), packed(packed_elements(c.k, c.n));
  AlignedArray<uint16_t> weight(n * k), packed_bf16(packed_elements(c.k, c.n));
  fill(a.data(), a.size(), 1);
  fill(b.data(), b.size(), 2);
  for (size_t i = 0; i < k * n; ++i) {
    const uint16_t bits = bf16_from_float(b[i]);
    if (c.bf16) b[i] = float_from_bf16(bits);
    weight[(i % n) * k + i / n] = bits;
  }
  pack_b(pool, c.k, c.n, {b.data(), n, 1}, packed.data());
  pack_weight(c.k, c.n, weight.data(), packed_bf16.data());
  PackedB view{.k = c.k, .n = c.n, .panel_rows = k};
  if (c.bf16) {
    view.bf16 = packed_bf16.data();
  } else {
    view.f32 = packed.data();
  }

  GemmScratch scratch(pool.size());
  const Measured measured = measure(
      options, [&] { return measure_fma_peak(pool, 300'000); },
      [&] {
        gemm(pool, scratch, c.m, {a.data(), k, 1}, view, out.data(), n, false);
      });
  // A sample of elements, each of which must be exactly the reference's chain.
  bool verified = true;
  for (size_t s = 0; s < 200; ++s) {
    const size_t i = s * 7919 % m, j = s * 104729 % n;
    float expected = 0;
    reference_gemm(1, 1, c.k, {a.data() + i * k, k, 1}, {b.data() + j, n, 1}, &expected, 1, false);
    verified = verified && std::fabs(out[i * n + j] - expected) <= 1e-4f * std::sqrt(c.k);
  }
  rows.add("gemm",
           absl::StrFormat("gemm %s, %d x %d x %d", c.bf16 ? "bf16" : "fp32", c.m, c.n, c.k),
           {{"m", c.m},
            {"n", c.n},
            {"k", c.k},
            {"b", c.bf16 ? "bf16" : "f32"},
            {"threads", pool.size()}},
           measured, 2.0 * c.m * c.n * c.k, "fma_peak", verified);
}

constexpr Bf16Unit kUnits[] = {Bf16Unit::kTiles, Bf16Unit::kDots, Bf16Unit::kVectors};

// As rows name them.
const char* name_of(Bf16Unit unit) {
  if (unit == Bf16Unit::kTiles) return "amx";
  return unit == Bf16Unit::kDots ? "dots" : "vectors";
}

double measure_peak(Bf16Unit unit, ComputePool& pool) {
  if (unit == Bf16Unit::kTiles) return measure_amx_peak(pool, 20'000);
  return unit == Bf16Unit::kDots ? measure_dot_peak(pool, 300'000)
                                 : measure_fma_peak(pool, 300'000);
}

// Both sides in bf16, against the peak of the unit that multiplies.
void bench_bf16(const Bf16Case& c, Bf16Unit unit, const Options& options, ComputePool& pool,
                Rows& rows) {
  const size_t m = size_t(c.m), n = size_t(c.n), k = size_t(c.k);
  AlignedArray<float> a(m * k), b(k * n), out(m * n);
  AlignedArray<uint16_t> weight(n * k), packed(tiled_elements(c.k, c.n));
  fill(a.data(), a.size(), 1);
  fill(b.data(), b.size(), 2);
  for (size_t i = 0; i < k * n; ++i) weight[i] = bf16_from_float(b[i]);
  pack_tiles(c.k, c.n, weight.data(), packed.data());
  Bf16Scratch scratch(unit, c.m, c.k, pool.size());
  const Measured measured = measure(
      options, [&] { return measure_peak(unit, pool); },
      [&] {
        gemm_bf16(pool, scratch, c.m, a.data(), k, {c.k, c.n, packed.data()}, out.data(), n, false);
      });
  bool verified = true;
  for (size_t s = 0; s < 200; ++s) {
    const size_t i = s * 7919 % m, j = s * 104729 % n;
    float expected = 0;
    reference_gemm_bf16(1, 1, c.k, a.data() + i * k, k, weight.data() + j * k, &expected, 1, false);
    verified = verified && out[i * n + j] == expected;
  }
  const char* name = name_of(unit);
  const char* floor = unit == Bf16Unit::kTiles  ? "amx_peak"
                      : unit == Bf16Unit::kDots ? "dot_peak"
                                                : "fma_peak";
  rows.add("gemm_bf16",
           absl::StrFormat("gemm bf16 x bf16 by %s, %d x %d x %d", name, c.m, c.n, c.k),
           {{"m", c.m}, {"n", c.n}, {"k", c.k}, {"unit", name}, {"threads", pool.size()}}, measured,
           2.0 * c.m * c.n * c.k, floor, verified);
}

// Weights as a model of an arithmetic keeps them; those of bf16 arithmetic by any unit.
struct TokenCase {
  Arithmetic arithmetic;
  Bf16Unit unit = Bf16Unit::kVectors;

  std::string name() const {
    return arithmetic == Arithmetic::kBf16 ? std::string("bf16 x bf16, ") + name_of(unit) : "bf16";
  }
};

// One token times weights that no cache holds, against the rate at which they can be read.
void bench_token(const TokenCase& weights, const Options& options, ComputePool& pool, Rows& rows) {
  constexpr int kK = 4096;
  const bool rounds_a = weights.arithmetic == Arithmetic::kBf16;
  const int columns = static_cast<int>(beyond_caches(options) / (2 * kK));
  const size_t n = size_t(columns), k = kK, count = packed_elements(kK, columns);
  AlignedArray<float> a(k), out(n);
  AlignedArray<uint16_t> weight(n * k);
  AlignedArray<uint16_t> bf16(rounds_a ? tiled_elements(kK, columns) : count);
  fill(a.data(), k, 1);
  std::minstd_rand random(2);
  for (size_t i = 0; i < n * k; ++i) {
    weight[i] = bf16_from_float(static_cast<float>(random() % 2001) * 1e-3f - 1.0f);
  }
  PackedB b{.k = kK, .n = columns, .panel_rows = k};
  const std::span<const std::byte> bytes = std::as_bytes(std::span(bf16.data(), bf16.size()));
  if (rounds_a) {
    pack_tiles(kK, columns, weight.data(), bf16.data());
  } else {
    pack_weight(kK, columns, weight.data(), bf16.data());
    b.bf16 = bf16.data();
  }
  GemmScratch scratch(pool.size());
  Bf16Scratch bf16_scratch(weights.unit, 1, kK, pool.size());
  const Measured measured = measure(
      options, [&] { return measure_read_bandwidth(pool, bytes); },
      [&] {
        if (rounds_a) {
          gemm_bf16(pool, bf16_scratch, 1, a.data(), k, {kK, columns, bf16.data()}, out.data(), n,
                    false);
        } else {
          gemm(pool, scratch, 1, {a.data(), k, 1}, b, out.data(), n, false);
        }
      });
  bool verified = true;
  for (size_t s = 0; s < 200; ++s) {
    const size_t j = s * 104729 % n;
    if (rounds_a) {
      float expected = 0;
      reference_gemm_bf16(1, 1, kK, a.data(), k, weight.data() + j * k, &expected, 1, false);
      verified = verified && out[j] == expected;
      continue;
    }
    double expected = 0;
    for (size_t i = 0; i < k; ++i) expected += double{a[i]} * float_from_bf16(weight[j * k + i]);
    verified = verified && std::fabs(out[j] - expected) <= 3e-4 * std::sqrt(kK);
  }
  const std::string name = weights.name();
  rows.add("token", absl::StrFormat("token x %s, %d x %d", name, columns, kK),
           {{"n", columns}, {"k", kK}, {"b", name}, {"threads", pool.size()}}, measured,
           static_cast<double>(bytes.size()), "read_bandwidth", verified);
}

struct AttentionCase {
  int head_dim, kv_heads, group, context;
};

// Sequences of one length over pages in no order.
struct PagedSequences {
  PagedSequences(const AttentionCase& of, size_t count)
      : c(of),
        per_sequence(geometry.blocks_for(size_t(c.context))),
        memory(geometry.cache_bytes(count * per_sequence) / 2),
        cache(geometry, memory.data(), count * per_sequence),
        table(count * per_sequence),
        width(size_t(c.kv_heads) * c.group * c.head_dim),
        q(count * width),
        out(q.size()) {
    std::minstd_rand random(3);
    for (size_t i = 0; i < memory.size(); ++i) {
      memory[i] = static_cast<uint16_t>(0x3f00 + random() % 128 + (random() % 2 << 15));
    }
    std::iota(table.begin(), table.end(), 0u);
    std::shuffle(table.begin(), table.end(), std::minstd_rand(4));
    fill(q.data(), q.size(), 5);
  }
  // The last token of a sequence.
  AttentionCall call(size_t sequence, int head, float* to) const {
    const size_t at = size_t(head) * c.group * c.head_dim;
    return {.cache = &cache,
            .layer = 0,
            .kv_head = head,
            .block_table = {table.data() + sequence * per_sequence, per_sequence},
            .position = c.context - 1,
            .tokens = 1,
            .group = c.group,
            .q = q.data() + sequence * width + at,
            .q_stride = width,
            .out = to + at,
            .out_stride = width};
  }
  // Whether a sequence's results are near the reference's.
  bool verified(size_t sequence) const {
    AlignedArray<float> expected(width);
    for (int head = 0; head < c.kv_heads; ++head) {
      reference_attention(call(sequence, head, expected.data()));
    }
    bool near = true;
    for (size_t i = 0; i < expected.size(); ++i) {
      near = near && std::fabs(out[sequence * expected.size() + i] - expected[i]) < 1e-3f;
    }
    return near;
  }

  AttentionCase c;
  KvGeometry geometry{.layers = 1, .kv_heads = c.kv_heads, .head_dim = c.head_dim};
  size_t per_sequence;
  AlignedArray<uint16_t> memory;
  KvCache cache;
  std::vector<uint32_t> table;
  size_t width;
  AlignedArray<float> q, out;
};

void bench_attention(const AttentionCase& c, const Options& options, ComputePool& pool,
                     Rows& rows) {
  const KvGeometry geometry{.layers = 1, .kv_heads = c.kv_heads, .head_dim = c.head_dim};
  const size_t one = geometry.blocks_for(size_t(c.context)) * geometry.block_bytes();
  const size_t sequences = std::max<size_t>(1, beyond_caches(options) / one);
  PagedSequences paged(c, sequences);
  AlignedArray<float> scratch(kAttentionScratch * pool.size());
  const auto bytes = std::as_bytes(std::span(paged.memory.data(), paged.memory.size()));
  const Measured measured = measure(
      options, [&] { return measure_read_bandwidth(pool, bytes); },
      [&] {
        pool.parallel_for(int64_t(sequences) * c.kv_heads, [&](int64_t task, int thread) {
          const size_t sequence = size_t(task / c.kv_heads);
          paged_attention(paged.call(sequence, static_cast<int>(task % c.kv_heads),
                                     paged.out.data() + sequence * paged.width),
                          scratch.data() + size_t(thread) * kAttentionScratch);
        });
      });
  rows.add("decode_attention",
           absl::StrFormat("attention, heads of %d, %d KV heads, group %d, context %d x %d",
                           c.head_dim, c.kv_heads, c.group, c.context, sequences),
           {{"head_dim", c.head_dim},
            {"kv_heads", c.kv_heads},
            {"group", c.group},
            {"context", c.context},
            {"sequences", sequences},
            {"threads", pool.size()}},
           measured, static_cast<double>(bytes.size()), "dram_read", paged.verified(0));
}

}  // namespace

int kernel_bench_main(int argc, char** argv) {
  Options options;
  CLI::App app("The CPU kernels against the peaks of this machine, measured in the same run.");
  app.add_option("--json", options.json, "write one JSON object per row")
      ->check(command_line::writable_file())
      ->type_name("FILE");
  app.add_option("--threads", options.threads, "threads; 0: one per CPU")
      ->check(command_line::whole_number(0, 1024))
      ->capture_default_str();
  app.add_flag("--quick", options.quick, "fewer repetitions, smaller buffers");
  app.add_option("--only", options.only, "rows of one kind")
      ->check(command_line::one_of({std::begin(kBenches), std::end(kBenches)}))
      ->type_name("KIND");
  if (const int status = command_line::parse(app, "baton kernel_bench", argc, argv); status >= 0) {
    return status;
  }
  ComputePool pool(options.threads);
  std::printf("# %d threads; best of interleaved runs of kernel and floor\n", pool.size());
  Rows rows;
  const GemmCase gemms[] = {{1024, 1024, 384, false}, {1024, 384, 1024, false},
                            {2048, 1536, 512, false}, {1024, 1024, 384, true},
                            {256, 1024, 1024, true},  {512, 1024, 192, true}};
  for (const GemmCase& c : gemms) {
    if (options.wants("gemm")) bench_gemm(c, options, pool, rows);
  }
  // The products of a layer, for SmolLM-135M and for Llama-3.2-1B and Qwen2.5-1.5B.
  const Bf16Case layers[] = {{512, 960, 576},   {512, 576, 576},   {512, 3072, 576},
                             {512, 576, 1536},  {512, 3072, 2048}, {512, 16384, 2048},
                             {512, 2048, 8192}, {512, 1536, 8960}};
  for (const Bf16Case& c : layers) {
    if (!options.wants("gemm_bf16")) continue;
    for (const Bf16Unit unit : kUnits) {
      if (usable(unit)) bench_bf16(c, unit, options, pool, rows);
    }
  }
  if (!amx_usable()) std::printf("# no AMX: %s\n", std::string(why_no_amx()).c_str());
  if (!dots_usable()) std::printf("# no vdpbf16ps: %s\n", std::string(why_no_dots()).c_str());
  std::vector<TokenCase> tokens = {{Arithmetic::kFp32}};
  for (const Bf16Unit unit : kUnits) {
    if (usable(unit)) tokens.push_back({Arithmetic::kBf16, unit});
  }
  for (const TokenCase& weights : tokens) {
    if (options.wants("token")) bench_token(weights, options, pool, rows);
  }
  const AttentionCase attentions[] = {{64, 4, 4, 2048}, {128, 8, 4, 4096}, {32, 3, 2, 1024}};
  for (const AttentionCase& c : attentions) {
    if (options.wants("decode_attention")) bench_attention(c, options, pool, rows);
  }
  if (!options.json.empty()) {
    if (absl::Status status = write_file_atomically(options.json, rows.json); !status.ok()) {
      std::fprintf(stderr, "baton kernel_bench: %s\n", std::string(status.message()).c_str());
      return 1;
    }
  }
  return rows.all_verified ? 0 : 1;
}

}  // namespace baton::engine::commands
