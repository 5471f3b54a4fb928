// The fastest that cuBLASLt knows for a product: what our own kernels are measured against.
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "gpudirect/blas/cublaslt.h"
#include "gpudirect/kernels/arguments.h"

namespace baton::gpudirect {

// Queues c = rounded w^T on the stream, by the algorithm that cuBLASLt takes first for this shape;
// sums may be split, in `bytes` of device memory at `workspace`. NotFound: there is none. `blas`
// outlives it.
absl::StatusOr<std::function<absl::Status()>> product_by_blas(const CublasLt& blas,
                                                              const kernels::Gemm& product,
                                                              DevicePointer workspace, size_t bytes,
                                                              Stream stream);

}  // namespace baton::gpudirect
