// Products of fp32 rows and bf16 weights on a stream, with the rows rounded to bf16: by cuBLASLt
// where it is and keeps what kernels::Gemm promises, else by kernels::gemm_bf16.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpudirect/blas/cublaslt.h"
#include "gpudirect/device.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/launcher.h"
#include "gpudirect/registered_pages.h"

namespace baton::gpudirect {

// Not thread-safe. Device, launcher, stream and `blas` outlive it; when it ends, nothing that it
// queued may still be running. The device's context is current for every call.
class GpuGemm {
 public:
  // `blas` may be missing, or of no use here: then every product is our own kernel's. Of at most
  // `most_rows` rows and `most_k` columns.
  static absl::StatusOr<std::unique_ptr<GpuGemm>> make(const Device& device,
                                                       const Launcher& launcher, Stream stream,
                                                       const absl::StatusOr<const CublasLt*>& blas,
                                                       uint32_t most_rows, uint32_t most_k);
  ~GpuGemm();
  GpuGemm(const GpuGemm&) = delete;
  GpuGemm& operator=(const GpuGemm&) = delete;

  // Chooses what multiplies with weights [n][k], by trying with this one; blocks. A shape that was
  // not pinned is our own kernel's, as is one of which it is not known that rows keep their bits.
  absl::Status pin(uint32_t n, uint32_t k, const uint16_t* w);
  // Puts a product on the stream.
  absl::Status multiply(const kernels::Gemm& product);
  // "cuBLASLt 13.0.2 multiplies 4 of 5 shapes; 1024 x 64: our kernel, because ..."
  std::string explain() const;

 private:
  struct Shape {
    bool by_blas = false;
    BlasAlgorithm algorithm;
    std::string why;  // not by cuBLASLt
  };
  using Size = std::pair<uint32_t, uint32_t>;  // n, k

  GpuGemm(const Device& device, const Launcher& launcher, Stream stream,
          const absl::StatusOr<const CublasLt*>& blas)
      : device_(device),
        launcher_(launcher),
        stream_(stream),
        blas_(blas.ok() ? *blas : nullptr),
        why_not_(blas.status().message()) {}
  absl::Status start(uint32_t most_rows, uint32_t most_k);
  absl::Status open_blas();
  absl::Status check(int result, const char* what) const;
  Shape choose(uint32_t n, uint32_t k, const uint16_t* w);
  absl::StatusOr<BlasAlgorithm> first_algorithm(uint32_t n, uint32_t k);
  absl::Status fits(uint32_t m, uint32_t n, uint32_t k, const BlasAlgorithm& algorithm);
  // Whether rows of one and of many have the same bits.
  absl::Status prove(uint32_t n, uint32_t k, const uint16_t* w, const BlasAlgorithm& algorithm);
  absl::Status by_blas(const kernels::Gemm& product, const BlasAlgorithm& algorithm);
  absl::Status wait() const;

  const Device& device_;
  const Launcher& launcher_;
  const Stream stream_;
  const CublasLt* const blas_;
  bool usable_ = false;
  std::string why_not_;  // is it usable
  BlasHandle handle_ = nullptr;
  BlasDescription description_ = nullptr;  // c = a^T b, as cuBLAS lays matrices out
  uint32_t most_rows_ = 0;
  uint32_t most_k_ = 0;
  std::unique_ptr<DeviceSlab> rounded_;  // [most_rows][most_k] in bf16
  std::map<Size, Shape> shapes_;
};

}  // namespace baton::gpudirect
