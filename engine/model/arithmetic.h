// In which arithmetic a model computes: part of its identity, since KV and logits differ in it.
#pragma once

namespace baton::engine {

// kFp32: engine/kernels/gemm.h, weights in bf16, all else in fp32. The most exact, and the default.
// kBf16: engine/kernels/bf16_gemm.h, where what is multiplied with a weight is rounded to bf16 too.
// Many times as fast where the processor has AMX, twice where it has AVX-512's bf16, and the same
// bits where it has neither.
// kInt8: fp32 with weights rounded to int8, a scale for every 384 values of an output
// (quantise_weight()): half the bytes to read, which is what a step of few tokens waits for.
// Norms, attention, activations and the residual stream are in fp32 in all, embeddings in bf16.
enum class Arithmetic { kFp32, kBf16, kInt8 };

constexpr const char* arithmetic_name(Arithmetic arithmetic) {
  if (arithmetic == Arithmetic::kInt8) return "int8";
  return arithmetic == Arithmetic::kBf16 ? "bf16" : "fp32";
}

}  // namespace baton::engine
