// cuBLASLt's calls as a table of function pointers, loaded at run time; the few types and numbers
// of its interface that are used. tests/gpudirect/toolkit_test.cc compares them with cublasLt.h
// where there is one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "gpudirect/cuda_types.h"

namespace baton::gpudirect {

using BlasHandle = void*;
using BlasDescription = void*;  // of an operation
using BlasLayout = void*;
using BlasPreference = void*;

// cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t
struct BlasAlgorithm {
  std::array<uint64_t, 8> data{};
};
struct BlasChoice {
  BlasAlgorithm algorithm;
  size_t workspace = 0;
  int state = 0;  // 0: it can be done
  float waves = 0;
  std::array<int, 4> reserved{};
};

// cudaDataType, cublasComputeType_t, cublasOperation_t
inline constexpr int kRealFloat = 0;
inline constexpr int kRealBf16 = 14;
inline constexpr int kComputeFloat = 68;
inline constexpr int kTransposed = 1;
// cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t and
// cublasLtMatmulAlgoConfigAttributes_t
inline constexpr int kTransposeA = 3;
inline constexpr int kMostWorkspace = 1;
inline constexpr int kReductionSchemes = 3;
inline constexpr int kSplitCount = 2;

// F(name, result, parameters)
#define BATON_BLAS_ENTRIES(F)                                                                    \
  F(cublasLtGetVersion, size_t, ())                                                              \
  F(cublasLtCreate, int, (BlasHandle * handle))                                                  \
  F(cublasLtDestroy, int, (BlasHandle handle))                                                   \
  F(cublasLtMatmulDescCreate, int, (BlasDescription * description, int compute, int scale))      \
  F(cublasLtMatmulDescDestroy, int, (BlasDescription description))                               \
  F(cublasLtMatmulDescSetAttribute, int,                                                         \
    (BlasDescription description, int attribute, const void* value, size_t bytes))               \
  F(cublasLtMatrixLayoutCreate, int,                                                             \
    (BlasLayout * layout, int type, uint64_t rows, uint64_t columns, int64_t stride))            \
  F(cublasLtMatrixLayoutDestroy, int, (BlasLayout layout))                                       \
  F(cublasLtMatmulPreferenceCreate, int, (BlasPreference * preference))                          \
  F(cublasLtMatmulPreferenceDestroy, int, (BlasPreference preference))                           \
  F(cublasLtMatmulPreferenceSetAttribute, int,                                                   \
    (BlasPreference preference, int attribute, const void* value, size_t bytes))                 \
  F(cublasLtMatmulAlgoGetHeuristic, int,                                                         \
    (BlasHandle handle, BlasDescription description, BlasLayout a, BlasLayout b, BlasLayout c,   \
     BlasLayout d, BlasPreference preference, int wanted, BlasChoice* choices, int* found))      \
  F(cublasLtMatmulAlgoConfigGetAttribute, int,                                                   \
    (const BlasAlgorithm* algorithm, int attribute, void* value, size_t bytes, size_t* written)) \
  F(cublasLtMatmulAlgoCheck, int,                                                                \
    (BlasHandle handle, BlasDescription description, BlasLayout a, BlasLayout b, BlasLayout c,   \
     BlasLayout d, const BlasAlgorithm* algorithm, BlasChoice* choice))                          \
  F(cublasLtMatmul, int,                                                                         \
    (BlasHandle handle, BlasDescription description, const void* alpha, const void* a,           \
     BlasLayout of_a, const void* b, BlasLayout of_b, const void* beta, const void* c,           \
     BlasLayout of_c, void* d, BlasLayout of_d, const BlasAlgorithm* algorithm, void* workspace, \
     size_t workspace_bytes, Stream stream))

// NOLINTNEXTLINE(bugprone-macro-parentheses): a name that is declared takes none.
#define BATON_DECLARE(name, result, parameters) result(*name) parameters = nullptr;
struct CublasLt {
  BATON_BLAS_ENTRIES(BATON_DECLARE)
};
#undef BATON_DECLARE

// Unavailable, in one line: there is no such library, or it lacks a function.
absl::StatusOr<CublasLt> load_cublaslt(const char* library);
// The library that $BATON_CUBLASLT names, else the machine's own of CUDA 13 or 12; loaded once and
// kept for the life of the process. Unavailable if the variable is "none". Thread-safe.
absl::StatusOr<const CublasLt*> machine_cublaslt();

}  // namespace baton::gpudirect
