// Descriptions for cuBLASLt, given back with the last copy of the function that uses them.
#include "tests/gpudirect/reference/blas_times.h"

#include <array>
#include <memory>

#include "absl/strings/str_cat.h"

namespace baton::gpudirect {
namespace {

struct Described {
  explicit Described(const CublasLt& of) : blas(of) {}
  ~Described() {
    for (const BlasLayout layout : layouts) {
      if (layout != nullptr) blas.cublasLtMatrixLayoutDestroy(layout);
    }
    if (preference != nullptr) blas.cublasLtMatmulPreferenceDestroy(preference);
    if (description != nullptr) blas.cublasLtMatmulDescDestroy(description);
    if (handle != nullptr) blas.cublasLtDestroy(handle);
  }
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;

  int make(const kernels::Gemm& product, size_t bytes) {
    const int32_t transposed = kTransposed;
    const uint64_t workspace = bytes;
    const std::array<std::array<uint64_t, 3>, 3> shapes = {{{product.k, product.n, product.k},
                                                            {product.k, product.m, product.k},
                                                            {product.n, product.m, product.ldc}}};
    int result = blas.cublasLtCreate(&handle);
    if (result == 0) {
      result = blas.cublasLtMatmulDescCreate(&description, kComputeFloat, kRealFloat);
    }
    if (result == 0) {
      result = blas.cublasLtMatmulDescSetAttribute(description, kTransposeA, &transposed,
                                                   sizeof transposed);
    }
    for (size_t i = 0; i < layouts.size() && result == 0; ++i) {
      result =
          blas.cublasLtMatrixLayoutCreate(&layouts[i], i < 2 ? kRealBf16 : kRealFloat, shapes[i][0],
                                          shapes[i][1], static_cast<int64_t>(shapes[i][2]));
    }
    if (result == 0) result = blas.cublasLtMatmulPreferenceCreate(&preference);
    if (result == 0) {
      result = blas.cublasLtMatmulPreferenceSetAttribute(preference, kMostWorkspace, &workspace,
                                                         sizeof workspace);
    }
    int found = 0;
    if (result == 0) {
      result = blas.cublasLtMatmulAlgoGetHeuristic(handle, description, layouts[0], layouts[1],
                                                   layouts[2], layouts[2], preference, 1, &choice,
                                                   &found);
    }
    return result == 0 && found == 0 ? -1 : result;
  }

  const CublasLt& blas;
  BlasHandle handle = nullptr;
  BlasDescription description = nullptr;
  BlasPreference preference = nullptr;
  std::array<BlasLayout, 3> layouts{};
  BlasChoice choice;
};

}  // namespace

absl::StatusOr<std::function<absl::Status()>> product_by_blas(const CublasLt& blas,
                                                              const kernels::Gemm& product,
                                                              DevicePointer workspace, size_t bytes,
                                                              Stream stream) {
  auto of = std::make_shared<Described>(blas);
  if (const int result = of->make(product, bytes); result != 0) {
    return absl::NotFoundError(absl::StrCat("cuBLASLt has no such product: status ", result));
  }
  return [of, product, workspace, bytes, stream]() -> absl::Status {
    const float one = 1, none = 0;
    const int result = of->blas.cublasLtMatmul(
        of->handle, of->description, &one, product.w, of->layouts[0], product.rounded,
        of->layouts[1], &none, product.c, of->layouts[2], product.c, of->layouts[2],
        &of->choice.algorithm, pointer_of<void>(workspace), bytes, stream);
    if (result == 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("cublasLtMatmul failed with status ", result));
  };
}

}  // namespace baton::gpudirect
