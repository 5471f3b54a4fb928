// The kernels of a training step, to the bit as the trainer's on the CPU and near plain sums in
// f64.
#include "engine/kernels/elementwise.h"
#include "engine/train/backward/train_kernels.h"
#include "tests/engine_model/reference_kernels.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton::gpudirect::kernels {
namespace {

namespace train = engine::train;

// Every form that training has: x W^T, dy W and dy^T x, from zero and added to what is there; so
// many of the same at once that tiles are small, or larger.
void expect_forms(uint32_t depth, uint32_t outer, F32Tile tile) {
  struct Form {
    bool a_transposed, b_transposed;
  };
  constexpr uint32_t kM = 75, kN = 70;
  size_t turn = 0;
  for (const Form form : {Form{false, true}, Form{false, false}, Form{true, false}}) {
    ++turn;
    for (const bool adds : {false, true}) {
      if (!tried_together(turn, adds ? 1 : 0, 2)) continue;
      const std::vector<float> a = normal(kM * depth, 1), b = normal(depth * kN, 2);
      const std::vector<float> start = normal(kM * kN * outer, 3);
      std::vector<float> wanted = start, c(start.size());
      const engine::MatrixView rows{a.data(), depth}, columns{b.data(), kN};
      const engine::MatrixView left =
          form.a_transposed ? engine::MatrixView{a.data(), kM}.transposed() : rows;
      const engine::MatrixView right =
          form.b_transposed ? engine::MatrixView{b.data(), depth}.transposed() : columns;
      for (uint32_t i = 0; i < outer; ++i) {
        engine::reference_gemm(kM, kN, static_cast<int>(depth), left, right,
                               wanted.data() + size_t{i} * kM * kN, kN, adds);
      }
      EmulatedMemory memory;
      const GemmF32 arguments{.a = memory.read(a),
                              .b = memory.read(b),
                              .start = adds ? memory.read(start) : nullptr,
                              .c = memory.write(c),
                              .m = kM,
                              .n = kN,
                              .k = depth,
                              .a_row = static_cast<uint32_t>(left.row_stride),
                              .a_k = static_cast<uint32_t>(left.col_stride),
                              .b_k = static_cast<uint32_t>(right.row_stride),
                              .b_column = static_cast<uint32_t>(right.col_stride),
                              .ldc = kN,
                              .outer = outer,
                              .c_outer = kM * kN};
      EXPECT_EQ(f32_tile(arguments), tile);
      ASSERT_EQ(run_kernel("baton_gemm_f32", arguments, 3, memory), std::nullopt);
      ASSERT_EQ(c, wanted) << form.a_transposed << form.b_transposed << adds;
    }
  }
}
TEST(GemmF32, IsTheEnginesInEveryForm) { expect_forms(85, 1, F32Tile::kSmall); }
TEST(GemmF32, IsTheEnginesInMiddleTiles) { expect_forms(37, 32, F32Tile::kMiddle); }
TEST(GemmF32, IsTheEnginesInLargeTiles) { expect_forms(37, 110, F32Tile::kLarge); }

// Rows side by side that are aligned to 16 bytes are copied by fours, and by fewer at the end.
TEST(GemmF32, TakesAlignedRowsByFours) {
  constexpr uint32_t kM = 70, kN = 45, kK = 40, kStride = 72;
  const std::vector<float> a = normal(kK * kStride, 1), b = normal(kK * kStride, 2);
  std::vector<float> wanted(kM * kN), c(wanted.size());
  engine::reference_gemm(kM, kN, kK, engine::MatrixView{a.data(), kStride}.transposed(),
                         {b.data(), kStride}, wanted.data(), kN, false);
  EmulatedMemory memory;
  const GemmF32 arguments{.a = memory.read(a),
                          .b = memory.read(b),
                          .c = memory.write(c),
                          .m = kM,
                          .n = kN,
                          .k = kK,
                          .a_row = 1,
                          .a_k = kStride,
                          .b_k = kStride,
                          .b_column = 1,
                          .ldc = kN};
  ASSERT_EQ(run_kernel("baton_gemm_f32", arguments, 2, memory), std::nullopt);
  ASSERT_EQ(c, wanted);
}

// Six products at once, each of its own matrices, that see what attention sees.
TEST(GemmF32, MultipliesManyAndSkipsWhatIsNotSeen) {
  constexpr uint32_t kLength = 80, kDim = 16, kOuter = 2, kInner = 3;
  constexpr uint64_t kSquare = uint64_t{kLength} * kLength;
  const std::vector<float> q = normal(kOuter * kLength * kInner * kDim, 1),
                           p = normal(kOuter * kInner * kSquare, 2);
  const auto block_end = [&](uint32_t row) {
    return std::min((row / kCausalRows + 1) * kCausalRows, kLength);
  };
  for (const Causal causal : {Causal::kNone, Causal::kUntil, Causal::kFrom}) {
    std::vector<float> out(q.size()), wanted(q.size());
    const bool from = causal == Causal::kFrom;
    for (uint32_t matrix = 0; matrix < kOuter * kInner; ++matrix) {
      const uint64_t at = matrix / kInner * kLength * kInner * kDim + matrix % kInner * kDim;
      for (uint32_t row = 0; row < kLength; ++row) {
        for (uint32_t d = 0; d < kDim; ++d) {
          float sum = 0;
          const uint32_t first = from ? row / kCausalRows * kCausalRows : 0;
          const uint32_t end = causal == Causal::kUntil ? block_end(row) : kLength;
          for (uint32_t k = first; k < end; ++k) {
            const uint64_t weight = from ? k * kLength + row : row * kLength + k;
            sum = std::fma(p[matrix * kSquare + weight], q[at + k * kInner * kDim + d], sum);
          }
          wanted[at + row * kInner * kDim + d] = sum;
        }
      }
    }
    EmulatedMemory memory;
    const GemmF32 arguments{.a = memory.read(p),
                            .b = memory.read(q),
                            .c = memory.write(out),
                            .m = kLength,
                            .n = kDim,
                            .k = kLength,
                            .a_row = from ? 1 : kLength,
                            .a_k = from ? kLength : 1,
                            .b_k = kInner * kDim,
                            .b_column = 1,
                            .ldc = kInner * kDim,
                            .outer = kOuter,
                            .inner = kInner,
                            .a_outer = kInner * kSquare,
                            .a_inner = kSquare,
                            .b_outer = uint64_t{kLength} * kInner * kDim,
                            .b_inner = kDim,
                            .c_outer = uint64_t{kLength} * kInner * kDim,
                            .c_inner = kDim,
                            .causal = causal};
    ASSERT_EQ(run_kernel("baton_gemm_f32", arguments, 5, memory), std::nullopt);
    ASSERT_EQ(out, wanted) << static_cast<int>(causal);
  }
  // Scores behind the block of their rows are not touched.
  std::vector<float> scores(kSquare, -7.0f);
  EmulatedMemory memory;
  const GemmF32 arguments{.a = memory.read(q),
                          .b = q.data() + kDim,
                          .c = memory.write(scores),
                          .m = kLength,
                          .n = kLength,
                          .k = kDim,
                          .a_row = kInner * kDim,
                          .a_k = 1,
                          .b_k = 1,
                          .b_column = kInner * kDim,
                          .ldc = kLength,
                          .causal = Causal::kBelow};
  ASSERT_EQ(run_kernel("baton_gemm_f32", arguments, 2, memory), std::nullopt);
  for (uint32_t row = 0; row < kLength; ++row) {
    for (uint32_t column = 0; column < kLength; ++column) {
      const bool seen = column < block_end(row);
      ASSERT_EQ(scores[row * kLength + column] != -7.0f, seen) << row << " " << column;
    }
  }
}

TEST(RmsNormBack, IsTheTrainers) {
  constexpr uint32_t kRows = 37, kSize = 80, kShares = 16;
  const std::vector<float> x = normal(kRows * kSize, 1), weight = normal(kSize, 2),
                           dy = normal(kRows * kSize, 3), factors = normal(kRows, 4),
                           before = normal(kRows * kSize, 5);
  for (const bool fresh : {false, true}) {
    std::vector<float> dx = before, dw(kSize), wanted = fresh ? std::vector<float>(dx.size()) : dx;
    std::vector<float> dw_wanted(kSize);
    for (uint32_t share = 0; share < kShares; ++share) {
      std::vector<float> part(kSize);
      for (uint32_t r = share * kRows / kShares; r < (share + 1) * kRows / kShares; ++r) {
        train::rms_norm_backward(x.data() + r * kSize, weight.data(), dy.data() + r * kSize,
                                 factors[r], wanted.data() + r * kSize, part.data(), kSize);
      }
      for (uint32_t i = 0; i < kSize; ++i) dw_wanted[i] += part[i];
    }
    EmulatedMemory memory;
    for (const auto* read : {&x, &weight, &dy, &factors}) memory.allow(*read);
    memory.allow(dw, true);
    const RmsNormBack back{x.data(),         weight.data(), dy.data(), factors.data(),
                           memory.write(dx), kRows,         kSize,     fresh ? 1u : 0u};
    ASSERT_EQ(run_kernel("baton_rms_norm_back", back, 2, memory), std::nullopt);
    EXPECT_EQ(dx, wanted);
    const RmsNormWeights weights{x.data(), dy.data(), factors.data(), dw.data(), kRows, kSize};
    ASSERT_EQ(run_kernel("baton_rms_norm_weights", weights, 3, memory), std::nullopt);
    EXPECT_EQ(dw, dw_wanted);
  }
}

TEST(CausalSoftmax, IsTheTrainersWithItsGradient) {
  constexpr uint32_t kMatrices = 2, kLength = 80;
  constexpr float kScaling = 0.37f;
  std::vector<float> scores = normal(kMatrices * kLength * kLength, 1);
  for (float& score : scores) score *= 9;
  std::vector<float> wanted = scores;
  std::vector<float> gradients = normal(scores.size(), 2), gradients_wanted = gradients;
  for (uint32_t r = 0; r < kMatrices * kLength; ++r) {
    const uint32_t valid = r % kLength + 1;
    const auto handled =
        static_cast<int>(std::min((r % kLength / kCausalRows + 1) * kCausalRows, kLength));
    float* const row = wanted.data() + r * kLength;
    engine::scale(row, kScaling, handled);
    train::softmax_row(row, static_cast<int>(valid), handled);
    double sum = 0;
    for (uint32_t i = 0; i < valid; ++i) sum += row[i];
    ASSERT_NEAR(sum, 1, 1e-5);
    float* const back = gradients_wanted.data() + r * kLength;
    train::softmax_backward_row(row, back, handled);
    engine::scale(back, kScaling, handled);
  }
  EmulatedMemory memory;
  memory.allow(gradients, true);
  const CausalSoftmax forward{memory.write(scores), kMatrices, kLength, kScaling};
  ASSERT_EQ(run_kernel("baton_causal_softmax", forward, 3, memory), std::nullopt);
  EXPECT_EQ(scores, wanted);
  const CausalSoftmaxBack back{scores.data(), gradients.data(), kMatrices, kLength, kScaling};
  ASSERT_EQ(run_kernel("baton_causal_softmax_back", back, 3, memory), std::nullopt);
  EXPECT_EQ(gradients, gradients_wanted);
}

TEST(SwiGluBack, IsTheTrainers) {
  constexpr uint32_t kRows = 7, kSize = 48;
  std::vector<float> gate_up = normal(kRows * 2 * kSize, 1);
  gate_up[0] = 100;
  gate_up[1] = -100;
  gate_up[2] = -87.5f;
  const std::vector<float> d_out = normal(kRows * kSize, 2);
  std::vector<float> out(gate_up.size()), wanted(gate_up.size());
  for (uint32_t r = 0; r < kRows; ++r) {
    const float* const gate = gate_up.data() + r * 2 * kSize;
    float* const back = wanted.data() + r * 2 * kSize;
    train::swiglu_backward(gate, gate + kSize, d_out.data() + r * kSize, back, back + kSize, kSize);
  }
  EmulatedMemory memory;
  const SwiGluBack arguments{memory.read(gate_up), memory.read(d_out), memory.write(out), kRows,
                             kSize};
  ASSERT_EQ(run_kernel("baton_swiglu_back", arguments, 2, memory), std::nullopt);
  EXPECT_EQ(out, wanted);
}

// In one pass where a row fits, and where it does not.
TEST(Classifier, IsTheTrainersCrossEntropy) {
  for (const uint32_t size : {272u, kClassifierRow, kClassifierRow + 48}) {
    constexpr uint32_t kRows = 5;
    constexpr float kScale = 0.1f;
    std::vector<float> logits = normal(kRows * size, size), wanted = logits;
    const std::vector<uint32_t> targets = {5, size - 1, 0, 130, 7};
    std::vector<float> sums(kRows), margins(kRows);
    std::vector<double> plain(kRows);
    for (uint32_t r = 0; r < kRows; ++r) {
      double sum = 0;
      for (uint32_t i = 0; i < size; ++i) sum += std::exp(double{logits[r * size + i]});
      plain[r] = std::log(sum) - logits[r * size + targets[r]];
    }
    EmulatedMemory memory;
    const Classifier arguments{memory.write(logits),
                               memory.read(targets),
                               memory.write(sums),
                               memory.write(margins),
                               kRows,
                               size,
                               kScale};
    ASSERT_EQ(run_kernel("baton_classifier", arguments, 2, memory), std::nullopt);
    for (uint32_t r = 0; r < kRows; ++r) {
      const float loss =
          train::cross_entropy_row(wanted.data() + size_t{r} * size, static_cast<int>(size),
                                   static_cast<int>(targets[r]), kScale);
      ASSERT_EQ(std::log(sums[r]) - margins[r], loss);
      ASSERT_NEAR(loss, plain[r], 1e-4);
    }
    ASSERT_EQ(logits, wanted) << size;
  }
}

}  // namespace
}  // namespace baton::gpudirect::kernels
