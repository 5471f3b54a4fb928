// Every kernel on the device against the emulation of the same source.
#include "absl/strings/str_format.h"
#include "tests/gpudirect/kernel_rig.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/std.h"

namespace baton::gpudirect {
namespace {

std::vector<uint16_t> bf16(size_t count, uint64_t seed) {
  std::vector<uint16_t> out;
  for (const float value : normal(count, seed)) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    out.push_back(static_cast<uint16_t>(bits >> 16));
  }
  return out;
}

class Comparison {
 public:
  Comparison(KernelRig& rig, const Launcher& launcher) : rig_(rig), launcher_(launcher) {}

  // `build` makes the arguments from places; `Kernels` are launched one after the other with them.
  // `within`, if not 0, is what fp32 numbers may differ by.
  template <class Arguments, class Build>
  void run(
      std::vector<std::string_view> names,
      std::vector<absl::Status (Launcher::*)(const Arguments&, uint64_t, Stream) const> launches,
      const Build& build, float within = 0) {
    rig_.clear();
    try {
      compare<Arguments>(names, launches, build, within);
    } catch (const Failed& failed) {
      differences.push_back(absl::StrFormat("%s: %s", names.back(), failed.what()));
    }
  }

  std::vector<std::string> differences;

 private:
  template <class Arguments, class Names, class Launches, class Build>
  void compare(const Names& names, const Launches& launches, const Build& build, float within) {
    DevicePlaces device(rig_);
    const Arguments there = build(device);
    {
      const Device::Current current(rig_.device());
      for (const auto launch : launches) must((launcher_.*launch)(there, kBlocks, rig_.stream()));
      rig_.wait();
    }
    HostPlaces host;
    const Arguments here = build(host);
    for (const std::string_view name : names) {
      const auto wrong = kernels::run_kernel(name, here, kBlocks, host.memory);
      if (wrong.has_value()) differences.push_back(*wrong);
    }
    std::vector<std::byte> back;
    for (size_t i = 0; i < device.written.size(); ++i) {
      const auto& [at, wanted, bytes] = device.written[i];
      back.resize(bytes);
      rig_.download(back.data(), at, bytes);
      if (within > 0) replace_if_close(back, wanted, within);
      const auto differs = std::mismatch(back.begin(), back.end(), wanted).first - back.begin();
      if (differs != static_cast<ptrdiff_t>(bytes)) {
        differences.push_back(absl::StrFormat("%s: array %u differs from byte %d of %u on",
                                              names.back(), i, differs, bytes));
      }
    }
  }
  static void replace_if_close(std::vector<std::byte>& numbers, const std::byte* wanted,
                               float within) {
    for (size_t at = 0; at + sizeof(float) <= numbers.size(); at += sizeof(float)) {
      float ours = 0, theirs = 0;
      std::memcpy(&ours, numbers.data() + at, sizeof ours);
      std::memcpy(&theirs, wanted + at, sizeof theirs);
      if (std::fabs(ours - theirs) <= within) {
        std::memcpy(numbers.data() + at, wanted + at, sizeof ours);
      }
    }
  }
  static constexpr uint32_t kBlocks = 24;
  KernelRig& rig_;
  const Launcher& launcher_;
};

void compare_copies(Comparison& all) {
  std::vector<uint16_t> from = bf16(40000, 1), to(40000);
  std::vector<kernels::Piece> pieces;
  all.run<kernels::CopyPieces>({"baton_copy_pieces"}, {&Launcher::copy_pieces}, [&](auto& place) {
    const auto* source = reinterpret_cast<const std::byte*>(place(from));
    auto* target = reinterpret_cast<std::byte*>(place(to, true));
    pieces.clear();
    for (size_t i = 0; i < 30; ++i) {  // of every alignment
      pieces.push_back({source + (29 - i) * 2600 + i % 17, target + i * 2600 + i % 5, 2500 + i});
    }
    return kernels::CopyPieces{place(pieces), 30, 2};
  });
}

template <class T>
void compare_sum(Comparison& all, kernels::SumElement element, std::vector<std::vector<T>> sources,
                 kernels::SumOperation operation = kernels::SumOperation::kSum) {
  std::vector<T> target(sources[0].size());
  all.run<kernels::ReduceSum>({"baton_reduce_sum"}, {&Launcher::reduce_sum}, [&](auto& place) {
    kernels::ReduceSum out{.target = place(target, true),
                           .count = target.size(),
                           .source_count = static_cast<uint32_t>(sources.size()),
                           .divide_by = operation == kernels::SumOperation::kSum ? 3u : 1u,
                           .element = element,
                           .operation = operation};
    for (size_t s = 0; s < sources.size(); ++s) out.sources[s] = place(sources[s]);
    return out;
  });
}

// The bytes of bf16 numbers as numbers of another type: all of them finite.
template <class T>
std::vector<T> words(size_t count, uint64_t seed) {
  const std::vector<uint16_t> from = bf16(count * sizeof(T), seed);
  std::vector<T> out(count);
  std::memcpy(out.data(), from.data(), count * sizeof(T));
  return out;
}

void compare_sums(Comparison& all) {
  using kernels::SumElement;
  // Enough for threads that have several vectors at once.
  constexpr size_t kMany = 300001;
  compare_sum<float>(all, SumElement::kF32, {normal(kMany, 1), normal(kMany, 2)});
  compare_sum<uint16_t>(all, SumElement::kBF16, {bf16(kMany, 1), bf16(kMany, 2), bf16(kMany, 3)});
  for (const auto operation : {kernels::SumOperation::kSum, kernels::SumOperation::kProd,
                               kernels::SumOperation::kMin, kernels::SumOperation::kMax}) {
    compare_sum<float>(all, SumElement::kF32, {normal(3001, 1), normal(3001, 2), normal(3001, 3)},
                       operation);
    compare_sum<uint16_t>(all, SumElement::kBF16, {bf16(3001, 1), bf16(3001, 2), bf16(3001, 3)},
                          operation);
    compare_sum<uint16_t>(all, SumElement::kF16, {bf16(3001, 4), bf16(3001, 5), bf16(3001, 6)},
                          operation);
    compare_sum<double>(all, SumElement::kF64,
                        {words<double>(999, 1), words<double>(999, 2), words<double>(999, 3)},
                        operation);
    compare_sum<int8_t>(all, SumElement::kI8, {words<int8_t>(999, 1), words<int8_t>(999, 2)},
                        operation);
    compare_sum<uint8_t>(all, SumElement::kU8, {words<uint8_t>(999, 1), words<uint8_t>(999, 2)},
                         operation);
    compare_sum<int32_t>(all, SumElement::kI32, {words<int32_t>(999, 1), words<int32_t>(999, 2)},
                         operation);
    compare_sum<int64_t>(all, SumElement::kI64, {words<int64_t>(999, 1), words<int64_t>(999, 2)},
                         operation);
  }
}

void compare_elementwise(Comparison& all) {
  // In place at 1024; the last one is longer than what a block reads at once.
  for (const uint32_t size : {512u, 1024u, kernels::kHeldRow + 16}) {
    std::vector<float> x = normal(60 * size, 1), weight = normal(size, 2), y(x.size());
    all.run<kernels::RmsNorm>({"baton_rms_norm"}, {&Launcher::rms_norm}, [&](auto& place) {
      float* const from = place(x, size == 1024);
      return kernels::RmsNorm{from, place(weight), size == 1024 ? from : place(y, true),
                              60,   size,          1e-5f};
    });
  }
  std::vector<float> q = normal(20 * 8 * 64, 3), k = normal(20 * 2 * 64, 4),
                     v = normal(20 * 2 * 64, 5);
  std::vector<float> cosines = normal(20 * 32, 6), sines = normal(20 * 32, 7);
  std::vector<uint32_t> slots(20), positions(20);
  std::iota(slots.begin(), slots.end(), 9u);
  std::iota(positions.rbegin(), positions.rend(), 0u);
  std::vector<uint16_t> cache(2 * 2 * 2 * 64 * 16);
  all.run<kernels::RopeStore>({"baton_rope_store"}, {&Launcher::rope_store}, [&](auto& place) {
    return kernels::RopeStore{.q = place(q, true),
                              .k = place(k, true),
                              .v = place(v),
                              .cos = place(cosines),
                              .sin = place(sines),
                              .slots = place(slots),
                              .cache = {place(cache, true), 2, 64},
                              .tokens = 20,
                              .heads = 8,
                              .positions = place(positions)};
  });
  std::vector<float> p = normal(5000, 8), m = normal(5000, 9), s(5000, 0.5f), g = normal(5000, 10);
  all.run<kernels::AdamW>({"baton_adamw"}, {&Launcher::adamw}, [&](auto& place) {
    return kernels::AdamW{place(p, true), place(m, true), place(s, true), place(g), 5000,  3,
                          0.7f,           0.9f,           0.95f,          0.1f,     0.05f, 1e-8f,
                          1e-3f,          0.9999f};
  });
}

// Contexts of 600 tokens, of one, of 257 and longer ones, over the same few pages: a block has
// several splits.
void compare_splits(Comparison& all, uint32_t group, uint32_t dims, uint32_t window) {
  constexpr uint32_t kStride = 190, kPages = 40;
  const std::vector<uint32_t> positions = {599, 0, 256, 1500, 1023, 3000};
  std::vector<uint32_t> tables(positions.size() * kStride);
  for (size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<uint32_t>(i * 7 % kPages);
  std::vector<uint16_t> cache = bf16(size_t{kPages} * 2 * 2 * dims * 16, 2);
  std::vector<float> q = normal(positions.size() * 2 * group * dims, 3), out(q.size());
  std::vector<kernels::SplitTask> tasks;
  std::vector<kernels::SplitItem> items;
  for (const uint32_t position : positions) {
    const auto row = static_cast<uint32_t>(tasks.size());
    tasks.push_back(
        {{row * kStride, position, row, 0, group}, static_cast<uint32_t>(items.size())});
    for (uint32_t s = 0; s <= position / kernels::kSplitTokens; ++s) items.push_back({row, s});
  }
  std::vector<uint32_t> counts = {static_cast<uint32_t>(items.size()),
                                  static_cast<uint32_t>(tasks.size())};
  std::vector<float> partial(kernels::partial_floats(items.size(), 2, group, dims), 0.0f);
  all.run<kernels::SplitAttention>(
      {group <= kernels::kNarrowGroup ? "baton_attend_splits" : "baton_attend_wide_splits",
       "baton_join_splits"},
      {&Launcher::attend, &Launcher::join_splits}, [&](auto& place) {
        return kernels::SplitAttention{.q = place(q),
                                       .out = place(out, true),
                                       .block_tables = place(tables),
                                       .tasks = place(tasks),
                                       .items = place(items),
                                       .counts = place(counts),
                                       .partial = place(partial, true),
                                       .cache = {place(cache), 2, dims},
                                       .group = group,
                                       .window = window};
      });
}

void compare_serving(Comparison& all) {
  std::vector<float> logits = normal(6 * 3000, 1);
  std::vector<kernels::SampleRow> rows = {{0, 1, 0, 0},     {1, 1, 0.3, 0},   {0.7, 0.9, 0.6, 0},
                                          {1, 1, 0.99, 40}, {2, 0.5, 0.1, 7}, {0.3, 1, 0.5, 1}};
  std::vector<int32_t> tokens(6);
  all.run<kernels::Sample>({"baton_sample"}, {&Launcher::sample}, [&](auto& place) {
    return kernels::Sample{place(logits), place(rows), place(tokens, true), 6, 3000};
  });
  compare_splits(all, 4, 64, 0);
  compare_splits(all, 4, 128, 0);
  compare_splits(all, 8, 128, 0);
  compare_splits(all, 7, 96, 300);
  compare_splits(all, 2, 256, 0);
}

void compare_products(Comparison& all) {
  for (const uint32_t m : {3u, 14u, 70u, 600u}) {
    const uint32_t n = m == 600 ? 4900 : 130;  // large tiles
    const uint32_t k = m == 600 ? 40 : 104;
    std::vector<float> a = normal(size_t{m} * k, 1), bias = normal(n, 2),
                       c = normal(size_t{m} * n, 3);
    std::vector<uint16_t> w = bf16(size_t{n} * k, 4);
    std::vector<uint16_t> rounded = bf16(a.size(), 1);
    const auto build = [&](auto& place) {
      return kernels::Gemm{.a = place(a),
                           .w = place(w),
                           .bias = place(bias),
                           .c = place(c, true),
                           .m = m,
                           .n = n,
                           .k = k,
                           .lda = k,
                           .ldc = n,
                           .accumulate = 1,
                           .rounded = place(rounded)};
    };
    const bool few = m <= kernels::kFewRows;
    // In the order of the tensor cores: some 7 sums, of numbers below 64.
    constexpr float kNear = 7 * 64 * 0x1p-19f;
    if (few) {
      all.run<kernels::Gemm>({"baton_gemm_few"}, {&Launcher::gemm_few}, build);
      all.run<kernels::Gemm>({"baton_gemm_bf16_few"}, {&Launcher::gemm_bf16_few}, build, kNear);
    } else {
      all.run<kernels::Gemm>({"baton_gemm"}, {&Launcher::gemm}, build);
      all.run<kernels::Gemm>({"baton_gemm_bf16"}, {&Launcher::gemm_bf16}, build, kNear);
    }
  }
}

void compare_steps(Comparison& all) {
  std::vector<uint16_t> halves = bf16(30 * 64, 1);
  std::vector<uint32_t> rows = {29, 0, 7, 7};
  std::vector<float> out(4 * 64);
  all.run<kernels::GatherRows>({"baton_gather_rows"}, {&Launcher::gather_rows}, [&](auto& place) {
    return kernels::GatherRows{place(halves),          place(rows), place(out, true), 4, 64,
                               kernels::Element::kBF16};
  });
  std::vector<float> wide = normal(7 * 72, 5);
  std::vector<uint16_t> rounded(7 * 64);
  all.run<kernels::RoundRows>({"baton_round_rows"}, {&Launcher::round_rows}, [&](auto& place) {
    return kernels::RoundRows{place(wide), place(rounded, true), 7, 64, 72};
  });
  std::vector<float> gate_up = normal(9 * 2 * 80, 2), hidden(9 * 80);
  all.run<kernels::SwiGlu>({"baton_swiglu"}, {&Launcher::swiglu}, [&](auto& place) {
    return kernels::SwiGlu{place(gate_up), place(hidden, true), 9, 80};
  });
  std::vector<uint32_t> tables(40);
  std::iota(tables.rbegin(), tables.rend(), 0u);
  std::vector<uint16_t> cache = bf16(tables.size() * 2 * 2 * 64 * 16, 3);
  std::vector<float> q = normal(22 * 2 * 3 * 64, 4), attended(q.size());
  std::vector<kernels::AttentionTask> tasks;
  for (uint32_t first = 0; first < 21 * 3; first += kernels::kPageQueries) {
    // 21 tokens behind 300, in a window.
    tasks.push_back({0, 300, 0, first, std::min(kernels::kPageQueries, 21 * 3 - first)});
  }
  tasks.push_back({25, 200, 21, 0, 3});
  all.run<kernels::PageAttention>(
      {"baton_attend_pages"}, {&Launcher::attend_pages}, [&](auto& place) {
        return kernels::PageAttention{.q = place(q),
                                      .out = place(attended, true),
                                      .block_tables = place(tables),
                                      .tasks = place(tasks),
                                      .cache = {place(cache), 2, 64},
                                      .task_count = static_cast<uint32_t>(tasks.size()),
                                      .group = 3,
                                      .window = 250};
      });
}

// What a training step has that serving has not.
void compare_training(Comparison& all) {
  constexpr uint32_t kM = 75, kN = 70, kK = 85;
  // So many at once that tiles are small, larger and large.
  for (const uint32_t outer : {1u, 32u, 110u}) {
    std::vector<float> a = normal(size_t{kM} * kK, 1), b = normal(size_t{kK} * kN, 2),
                       c = normal(size_t{kM} * kN * outer, 3);
    for (const bool transposed : {false, true}) {
      all.run<kernels::GemmF32>({"baton_gemm_f32"}, {&Launcher::gemm_f32}, [&](auto& place) {
        float* const out = place(c, true);
        return kernels::GemmF32{.a = place(a),
                                .b = place(b),
                                .start = out,
                                .c = out,
                                .m = kM,
                                .n = kN,
                                .k = kK,
                                .a_row = transposed ? 1 : kK,
                                .a_k = transposed ? kM : 1,
                                .b_k = transposed ? 1 : kN,
                                .b_column = transposed ? kK : 1,
                                .ldc = kN,
                                .outer = outer,
                                .c_outer = kM * kN};
      });
    }
  }
  constexpr uint32_t kLength = 80;
  std::vector<float> scores = normal(size_t{2} * kLength * kLength, 4);
  std::vector<float> weights = scores, gradients = normal(scores.size(), 5);
  all.run<kernels::CausalSoftmax>(
      {"baton_causal_softmax"}, {&Launcher::causal_softmax}, [&](auto& place) {
        return kernels::CausalSoftmax{place(scores, true), 2, kLength, 0.25f};
      });
  all.run<kernels::CausalSoftmaxBack>(
      {"baton_causal_softmax_back"}, {&Launcher::causal_softmax_back}, [&](auto& place) {
        return kernels::CausalSoftmaxBack{place(weights), place(gradients, true), 2, kLength,
                                          0.25f};
      });
  constexpr uint32_t kRows = 37, kSize = 80;
  std::vector<float> x = normal(kRows * kSize, 6), weight = normal(kSize, 7),
                     dy = normal(kRows * kSize, 8), factors = normal(kRows, 9), dx = x, dw(kSize);
  all.run<kernels::RmsNormBack>(
      {"baton_rms_norm_back"}, {&Launcher::rms_norm_back}, [&](auto& place) {
        return kernels::RmsNormBack{place(x),        place(weight), place(dy), place(factors),
                                    place(dx, true), kRows,         kSize};
      });
  all.run<kernels::RmsNormWeights>(
      {"baton_rms_norm_weights"}, {&Launcher::rms_norm_weights}, [&](auto& place) {
        return kernels::RmsNormWeights{place(x),        place(dy), place(factors),
                                       place(dw, true), kRows,     kSize};
      });
  std::vector<float> cosines = normal(16 * 12, 10), sines = normal(16 * 12, 11);
  all.run<kernels::RopeRows>({"baton_rope_rows"}, {&Launcher::rope_rows}, [&](auto& place) {
    return kernels::RopeRows{
        place(dx, true), place(cosines), place(sines), kRows, 3, 24, kSize, 16, -1.0f};
  });
  std::vector<float> d_out = normal(kRows * kSize / 2, 12), d_gate_up(x.size());
  all.run<kernels::SwiGluBack>({"baton_swiglu_back"}, {&Launcher::swiglu_back}, [&](auto& place) {
    return kernels::SwiGluBack{place(x), place(d_out), place(d_gate_up, true), kRows, kSize / 2};
  });
  for (const uint32_t vocab : {272u, kernels::kClassifierRow + 48}) {
    std::vector<float> logits = normal(size_t{5} * vocab, 13), sums(5), margins(5);
    std::vector<uint32_t> targets = {0, 9, vocab - 1, 9, 271};
    all.run<kernels::Classifier>({"baton_classifier"}, {&Launcher::classifier}, [&](auto& place) {
      return kernels::Classifier{place(logits, true),
                                 place(targets),
                                 place(sums, true),
                                 place(margins, true),
                                 5,
                                 vocab,
                                 0.1f};
    });
  }
  std::vector<uint32_t> begins = {0, 1, 1, 4, 6}, order = {3, 0, 2, 4, 1, 5};
  std::vector<float> table = normal(4 * kSize, 14);
  all.run<kernels::AddRows>({"baton_add_rows"}, {&Launcher::add_rows}, [&](auto& place) {
    return kernels::AddRows{place(table, true), place(x), place(begins), place(order), 4, kSize};
  });
  std::vector<double> squares(3);
  all.run<kernels::SumSquares>({"baton_sum_squares"}, {&Launcher::sum_squares}, [&](auto& place) {
    return kernels::SumSquares{place(dy), place(squares, true), 2503, 3};
  });
}

}  // namespace

std::vector<std::string> compare_kernels(KernelRig& rig, const Launcher& launcher) {
  Comparison all(rig, launcher);
  compare_copies(all);
  compare_sums(all);
  compare_elementwise(all);
  compare_serving(all);
  compare_products(all);
  compare_steps(all);
  compare_training(all);
  return all.differences;
}

}  // namespace baton::gpudirect
