// Times of kernels beside the rate of a plain copy on the device.
#include "absl/strings/str_format.h"
#include "tests/gpudirect/kernel_rig.h"
#include "tests/std.h"

namespace baton::gpudirect {
namespace {

// Takes times one after the other, each into a row.
class Times {
 public:
  Times(KernelRig& rig, int repeats) : rig_(rig), repeats_(repeats) {}

  // `moved`: bytes that are read and written. `operations`: multiplies and adds. `floor`: what is
  // to be moved in any case, where that is less.
  void row(std::string name, std::string shape, size_t moved,
           const std::function<absl::Status()>& queue, double operations = 0, double goal = 0,
           size_t floor = 0) {
    const double us = rig_.time(repeats_, queue);
    const double rate = static_cast<double>(moved) / us / 1000;
    if (rows.empty()) copy_rate_ = rate;
    rows.push_back({std::move(name), std::move(shape), us, rate, rate / copy_rate_,
                    operations / us / 1e6, static_cast<double>(floor) / us / 1000 / copy_rate_,
                    goal});
  }
  // Device memory with random bf16 numbers between 1/2 and 2: of any type finite.
  DevicePointer numbers(size_t bytes) {
    const DevicePointer at = rig_.allocate(bytes);
    std::mt19937 random(1);
    std::vector<uint16_t> block(std::min<size_t>(bytes, 1 << 20) / 2);
    for (uint16_t& word : block) word = static_cast<uint16_t>(0x3f00 | (random() & 0x807f));
    for (size_t done = 0; done < bytes; done += block.size() * 2) {
      rig_.upload(at + done, block.data(), std::min(block.size() * 2, bytes - done));
    }
    return at;
  }
  template <class T>
  T* table(const std::vector<T>& rows_of) {
    const DevicePointer at = rig_.allocate(rows_of.size() * sizeof(T));
    rig_.upload(at, rows_of.data(), rows_of.size() * sizeof(T));
    return pointer_of<T>(at);
  }

  std::vector<KernelRow> rows;

 private:
  KernelRig& rig_;
  const int repeats_;
  double copy_rate_ = 0;
};

void time_pages(Times& times, const Launcher& launcher, Stream stream, DevicePointer from,
                DevicePointer to, size_t bytes) {
  for (const size_t page : {1024u, 4096u, 65536u}) {
    std::vector<size_t> order(bytes / page);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(page));
    std::vector<kernels::Piece> pieces;
    for (size_t i = 0; i < order.size(); ++i) {
      pieces.push_back({pointer_of<const std::byte>(from + order[i] * page),
                        pointer_of<std::byte>(to + i * page), page});
    }
    const auto chunks =
        static_cast<uint32_t>((page + kernels::kChunkBytes - 1) / kernels::kChunkBytes);
    const kernels::CopyPieces arguments{times.table(pieces), static_cast<uint32_t>(pieces.size()),
                                        chunks};
    times.row(
        "gather", absl::StrFormat("%u pages of %u", pieces.size(), page), 2 * bytes,
        [&] { return launcher.copy_pieces(arguments, pieces.size() * chunks / 8 + 1, stream); }, 0,
        page >= 4096 ? 0.90 : 0);
  }
}

void time_sums(Times& times, const Launcher& launcher, Stream stream, DevicePointer from,
               DevicePointer other, DevicePointer to, size_t bytes) {
  kernels::ReduceSum sum{.target = pointer_of<void>(to),
                         .count = bytes / 2,
                         .source_count = 2,
                         .element = kernels::SumElement::kBF16};
  sum.sources[0] = pointer_of<const void>(from);
  sum.sources[1] = pointer_of<const void>(other);
  times.row("reduce bf16", "2 sources", 3 * bytes,
            [&] { return launcher.reduce_sum(sum, UINT32_MAX, stream); });
  const auto rows = static_cast<uint32_t>(bytes / 16384);
  const kernels::RmsNorm norm{pointer_of<const float>(from),
                              pointer_of<const float>(other),
                              pointer_of<float>(to),
                              rows,
                              4096,
                              1e-5f};
  times.row("rms_norm", absl::StrFormat("%u x 4096", rows), 2 * bytes,
            [&] { return launcher.rms_norm(norm, kernels::rms_norm_blocks(rows, 4096), stream); });
  const kernels::AdamW adamw{.parameters = pointer_of<float>(to),
                             .first = pointer_of<float>(to + bytes / 4),
                             .second = pointer_of<float>(to + bytes / 2),
                             .gradients = pointer_of<const float>(from),
                             .count = bytes / 16,
                             .beta1 = 0.9f,
                             .beta2 = 0.95f,
                             .epsilon = 1e-8f,
                             .rate = 1e-9f};
  times.row("adamw", absl::StrFormat("%u parameters", bytes / 16), bytes / 4 * 7,
            [&] { return launcher.adamw(adamw, UINT32_MAX, stream); });
  // A vocabulary of 8192: logits are read and written once, in place.
  const uint32_t vocab = kernels::kClassifierRow;
  const auto tokens = static_cast<uint32_t>(bytes / 4 / vocab);
  const kernels::Classifier classifier{pointer_of<float>(to),
                                       times.table(std::vector<uint32_t>(tokens, 7)),
                                       pointer_of<float>(other),
                                       pointer_of<float>(other) + tokens,
                                       tokens,
                                       vocab,
                                       1e-3f};
  times.row("classifier", absl::StrFormat("%u x %u", tokens, vocab), 2 * bytes,
            [&] { return launcher.classifier(classifier, tokens, stream); });
}

// Decode of sequences of up to 4096 tokens, as many as `bytes` of KV hold, or of a longer one: 8 KV
// heads of 128. The floor is the KV's bytes, each read once.
void time_attention(Times& times, KernelRig& rig, const Launcher& launcher, Stream stream,
                    DevicePointer cache, size_t bytes, uint32_t most_tokens, uint32_t group,
                    double goal) {
  constexpr uint32_t kBlockBytes = 8 * 2 * 128 * 16 * 2;
  const auto blocks = static_cast<uint32_t>(bytes / kBlockBytes);
  const uint32_t length = std::min(most_tokens, blocks * 16), stride = length / 16;
  const uint32_t sequences = most_tokens > 4096 ? 1 : blocks / stride;
  std::vector<uint32_t> tables(blocks);
  std::iota(tables.begin(), tables.end(), 0u);
  std::shuffle(tables.begin(), tables.end(), std::mt19937_64(1));
  std::vector<kernels::SplitTask> tasks;
  std::vector<kernels::SplitItem> items;
  for (uint32_t row = 0; row < sequences; ++row) {
    tasks.push_back(
        {{row * stride, length - 1, row, 0, group}, static_cast<uint32_t>(items.size())});
    for (uint32_t s = 0; s <= (length - 1) / kernels::kSplitTokens; ++s) items.push_back({row, s});
  }
  const size_t q_bytes = size_t{sequences} * 8 * group * 128 * 4;
  const kernels::SplitAttention arguments{
      .q = pointer_of<const float>(times.numbers(q_bytes)),
      .out = pointer_of<float>(rig.allocate(q_bytes)),
      .block_tables = times.table(tables),
      .tasks = times.table(tasks),
      .items = times.table(items),
      .counts = times.table(std::vector{static_cast<uint32_t>(items.size()), sequences}),
      .partial = pointer_of<float>(
          rig.allocate(kernels::partial_floats(items.size(), 8, group, 128) * sizeof(float))),
      .cache = {pointer_of<uint16_t>(cache), 8, 128},
      .group = group};
  times.row(
      "paged decode",
      absl::StrFormat("%u x %u, 8 KV heads x 128, group %u", sequences, length, group),
      size_t{sequences} * stride * kBlockBytes,
      [&] {
        absl::Status status = launcher.attend(arguments, items.size() * 8, stream);
        if (!status.ok()) return status;
        return launcher.join_splits(arguments, uint64_t{sequences} * 8 * group, stream);
      },
      0, goal);
}

// Products with a square weight, of single tokens, of batches and of a prompt. The floor of a few
// rows is the weight's bytes, each read once.
void time_products(Times& times, const Launcher& launcher, Stream stream, DevicePointer from,
                   DevicePointer to, size_t bytes) {
  uint32_t side = 64;
  while (size_t{side} * side * 32 <= bytes) side *= 2;  // so that a prompt's a and c fit too
  const DevicePointer rounded = times.numbers(size_t{side} * side * 2);
  for (const uint32_t m : {1u, 4u, 16u, side / 64, side / 16, side}) {
    const kernels::Gemm product{.a = pointer_of<const float>(from),
                                .w = pointer_of<const uint16_t>(from),
                                .c = pointer_of<float>(to),
                                .m = m,
                                .n = side,
                                .k = side,
                                .lda = side,
                                .ldc = side,
                                .rounded = pointer_of<const uint16_t>(rounded)};
    const size_t moved = size_t{side} * side * 2 + size_t{m} * side * 8;
    const double operations = 2.0 * m * side * side;
    const std::string shape = absl::StrFormat("%u x %u x %u", m, side, side);
    const double goal = m == 1 ? 0.80 : 0;
    times.row(
        "gemm", shape, moved, [&] { return launcher.multiply(product, stream); }, operations, goal);
    times.row(
        "gemm bf16", shape, moved, [&] { return launcher.multiply_bf16(product, stream); },
        operations, goal);
  }
  // Gradients of weights, and a product of activations: of half the side, for the same bytes in
  // each array, and of a small model.
  const uint32_t half = side / 2;
  for (const auto& shape : {std::array{half, half, half}, std::array{side / 16, side / 16, side},
                            std::array{side, side / 16, side / 4}}) {
    const uint32_t m = shape[0], n = shape[1], k = shape[2];
    const kernels::GemmF32 gradient{.a = pointer_of<const float>(from),
                                    .b = pointer_of<const float>(from),
                                    .c = pointer_of<float>(to),
                                    .m = m,
                                    .n = n,
                                    .k = k,
                                    .a_row = 1,
                                    .a_k = m,
                                    .b_k = n,
                                    .b_column = 1,
                                    .ldc = n};
    times.row(
        "gemm f32", absl::StrFormat("%u x %u x %u", m, n, k),
        (size_t{m} * n + size_t{m} * k + size_t{n} * k) * 4,
        [&] { return launcher.gemm_f32(gradient, kernels::gemm_f32_blocks(gradient), stream); },
        2.0 * m * n * k);
  }
}

// A prompt's attention over so much KV.
void time_prefill(Times& times, KernelRig& rig, const Launcher& launcher, Stream stream,
                  DevicePointer from, size_t bytes) {
  constexpr uint32_t kBlockBytes = 8 * 2 * 128 * 16 * 2;
  const uint32_t length = std::min(4096u, static_cast<uint32_t>(bytes / kBlockBytes) * 16);
  const uint32_t tokens = length / 8;
  std::vector<uint32_t> tables(length / 16);
  std::iota(tables.begin(), tables.end(), 0u);
  std::vector<kernels::AttentionTask> tasks;
  for (uint32_t first = 0; first < tokens * 4; first += kernels::kPageQueries) {
    tasks.push_back({0, length - tokens, 0, first, kernels::kPageQueries});
  }
  const size_t q_bytes = size_t{tokens} * 8 * 4 * 128 * 4;
  constexpr uint64_t kBlocks = 512;
  const kernels::PageAttention attention{.q = pointer_of<const float>(times.numbers(q_bytes)),
                                         .out = pointer_of<float>(rig.allocate(q_bytes)),
                                         .block_tables = times.table(tables),
                                         .tasks = times.table(tasks),
                                         .cache = {pointer_of<uint16_t>(from), 8, 128},
                                         .task_count = static_cast<uint32_t>(tasks.size()),
                                         .group = 4};
  times.row(
      "paged prefill",
      absl::StrFormat("%u tokens of %u, 8 KV heads x 128, group 4", tokens, length),
      size_t{length} * 8 * 2 * 128 * 2 + 2 * q_bytes,
      [&] { return launcher.attend_pages(attention, kBlocks, stream); },
      4.0 * 128 * 32 * tokens * (length - tokens / 2.0));
}

// What a step of decoding, and one of a prompt, do beside products and attention: K and V go to
// their pages with q and k rotated, 32 query and 8 KV heads of 128; and a token is drawn for each
// of 64 rows, from a vocabulary of up to 131,072.
void time_steps(Times& times, KernelRig& rig, const Launcher& launcher, Stream stream,
                DevicePointer from, DevicePointer other, DevicePointer to, size_t bytes) {
  constexpr uint32_t kHeads = 32, kKvHeads = 8, kDim = 128;
  constexpr size_t kOfToken = kDim * sizeof(float);
  for (const uint32_t most : {64u, 8192u}) {
    const auto tokens = static_cast<uint32_t>(std::min<size_t>(most, bytes / (kHeads * kOfToken)));
    std::vector<uint32_t> slots(tokens);
    std::iota(slots.begin(), slots.end(), 0u);
    const size_t pages = (tokens + 15) / 16 * 16;
    const kernels::RopeStore arguments{
        .q = pointer_of<float>(to),
        .k = pointer_of<float>(other),
        .v = pointer_of<const float>(from),
        .cos = pointer_of<const float>(from),
        .sin = pointer_of<const float>(from),
        .slots = times.table(slots),
        .cache = {pointer_of<uint16_t>(rig.allocate(pages * kKvHeads * 2 * kDim * 2)), kKvHeads,
                  kDim},
        .tokens = tokens,
        .heads = kHeads,
        .positions = times.table(slots)};
    // q and k there and back, v, and what is stored as bf16.
    const size_t moved = tokens * kOfToken * (2 * kHeads + 2 * kKvHeads + kKvHeads + kKvHeads);
    times.row("rope and store", absl::StrFormat("%u tokens", tokens), moved, [&] {
      return launcher.rope_store(arguments, uint64_t{tokens} * (kHeads + kKvHeads), stream);
    });
  }
  constexpr uint32_t kRows = 64;
  const auto vocabulary =
      static_cast<uint32_t>(std::min<size_t>(131'072, bytes / kRows / sizeof(float)));
  for (const kernels::SampleRow& how : {kernels::SampleRow{}, {0.7, 0.9, 0.6, 40}}) {
    const kernels::Sample draw{
        pointer_of<const float>(from), times.table(std::vector<kernels::SampleRow>(kRows, how)),
        pointer_of<int32_t>(rig.allocate(kRows * sizeof(int32_t))), kRows, vocabulary};
    times.row("sample",
              absl::StrFormat("%u x %u, %s", kRows, vocabulary,
                              how.temperature > 0 ? "the likeliest 40, 0.9 of them" : "greedy"),
              size_t{kRows} * vocabulary * sizeof(float),
              [&] { return launcher.sample(draw, kRows, stream); });
  }
}

}  // namespace

std::vector<KernelRow> time_kernels(KernelRig& rig, const Launcher& launcher, size_t bytes,
                                    int repeats) {
  rig.clear();
  Times times(rig, repeats);
  const Stream stream = rig.stream();
  const DevicePointer from = times.numbers(bytes), other = times.numbers(bytes),
                      to = times.numbers(bytes);
  const Driver& driver = rig.device().driver();
  const Device::Current current(rig.device());
  times.row("copy", absl::StrFormat("%u bytes", bytes), 2 * bytes, [&] {
    return rig.device().check(driver.cuMemcpyAsync(to, from, bytes, stream), "a copy");
  });
  time_pages(times, launcher, stream, from, to, bytes);
  time_sums(times, launcher, stream, from, other, to, bytes);
  // Both arrays together: 64 sequences of 4096 tokens.
  for (const uint32_t group : {4u, 8u}) {
    time_attention(times, rig, launcher, stream, from, 2 * bytes, 4096, group, 0.80);
  }
  time_attention(times, rig, launcher, stream, from, bytes, 32768, 4, 0);
  constexpr size_t kOneContext = 4096 * 8 * 2 * 128 * 2;  // that of one sequence
  time_attention(times, rig, launcher, stream, from, std::min(bytes, kOneContext), 4096, 4, 0);
  time_products(times, launcher, stream, from, to, bytes);
  time_prefill(times, rig, launcher, stream, from, bytes);
  time_steps(times, rig, launcher, stream, from, other, to, bytes);
  return times.rows;
}

}  // namespace baton::gpudirect
