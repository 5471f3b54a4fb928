// Chooses for each shape what multiplies, proves it, and queues products.
#include "gpudirect/blas/gpu_gemm.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string_view>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gpudirect/blas/cublaslt.h"

namespace baton::gpudirect {
namespace {

constexpr int kMostChoices = 16;
constexpr uint32_t kUsualRows = 64;  // for which algorithms are asked
// A row is compared alone with itself among so many.
constexpr uint32_t kProvedRows[] = {1, 2, 15, 16, 17, 63, 64, 65, 128, 256, 512};

// Layouts of a, b and c, given back when it ends.
class Layouts {
 public:
  Layouts(const CublasLt& blas, uint32_t m, uint32_t n, uint32_t k, uint32_t ldc) : blas_(blas) {
    // Column by column, as cuBLAS has them: a row of ours is a column.
    add(kRealBf16, k, n, k);
    add(kRealBf16, k, m, k);
    add(kRealFloat, n, m, ldc);
  }
  ~Layouts() {
    for (const BlasLayout layout : made_) blas_.cublasLtMatrixLayoutDestroy(layout);
  }
  Layouts(const Layouts&) = delete;
  Layouts& operator=(const Layouts&) = delete;
  int result() const { return result_; }
  BlasLayout w() const { return made_[0]; }
  BlasLayout a() const { return made_[1]; }
  BlasLayout c() const { return made_[2]; }

 private:
  void add(int type, uint64_t rows, uint64_t columns, int64_t stride) {
    BlasLayout layout = nullptr;
    if (result_ == 0) {
      result_ = blas_.cublasLtMatrixLayoutCreate(&layout, type, rows, columns, stride);
    }
    if (result_ == 0) made_.push_back(layout);
  }
  const CublasLt& blas_;
  int result_ = 0;
  std::vector<BlasLayout> made_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuGemm>> GpuGemm::make(const Device& device,
                                                       const Launcher& launcher, Stream stream,
                                                       const absl::StatusOr<const CublasLt*>& blas,
                                                       uint32_t most_rows, uint32_t most_k) {
  std::unique_ptr<GpuGemm> gemm(new GpuGemm(device, launcher, stream, blas));
  if (absl::Status status = gemm->start(most_rows, most_k); !status.ok()) return status;
  return gemm;
}

absl::Status GpuGemm::start(uint32_t most_rows, uint32_t most_k) {
  most_rows_ = most_rows;
  most_k_ = most_k;
  const absl::Status opened = open_blas();
  usable_ = opened.ok();
  why_not_ = std::string(opened.message());
  auto memory = DeviceSlab::create(device_, size_t{most_rows} * most_k * sizeof(uint16_t),
                                   {.rdma = false, .shareable = false});
  if (!memory.ok()) return memory.status();
  rounded_ = *std::move(memory);
  return absl::OkStatus();
}

absl::Status GpuGemm::open_blas() {
  if (blas_ == nullptr) return absl::UnavailableError(why_not_);
  absl::Status status = check(blas_->cublasLtCreate(&handle_), "cublasLtCreate");
  if (!status.ok()) {
    handle_ = nullptr;
    return status;
  }
  status = check(blas_->cublasLtMatmulDescCreate(&description_, kComputeFloat, kRealFloat),
                 "cublasLtMatmulDescCreate");
  if (!status.ok()) {
    description_ = nullptr;
    return status;
  }
  const int32_t transposed = kTransposed;
  return check(blas_->cublasLtMatmulDescSetAttribute(description_, kTransposeA, &transposed,
                                                     sizeof transposed),
               "cublasLtMatmulDescSetAttribute");
}

GpuGemm::~GpuGemm() {
  if (description_ != nullptr) blas_->cublasLtMatmulDescDestroy(description_);
  if (handle_ != nullptr) blas_->cublasLtDestroy(handle_);
}

absl::Status GpuGemm::check(int result, const char* what) const {
  if (result == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, " of cuBLASLt failed with status ", result));
}

absl::Status GpuGemm::pin(uint32_t n, uint32_t k, const uint16_t* w) {
  if (shapes_.contains({n, k})) return absl::OkStatus();
  Shape shape;
  if (usable_) shape = choose(n, k, w);
  shapes_[{n, k}] = std::move(shape);
  return device_.alive();
}

GpuGemm::Shape GpuGemm::choose(uint32_t n, uint32_t k, const uint16_t* w) {
  Shape shape;
  const absl::StatusOr<BlasAlgorithm> algorithm = first_algorithm(n, k);
  absl::Status status = algorithm.status();
  if (status.ok()) status = prove(n, k, w, *algorithm);
  shape.by_blas = status.ok();
  if (status.ok()) {
    shape.algorithm = *algorithm;
  } else {
    shape.why = std::string(status.message());
  }
  return shape;
}

absl::StatusOr<BlasAlgorithm> GpuGemm::first_algorithm(uint32_t n, uint32_t k) {
  const Layouts layouts(*blas_, std::min(kUsualRows, most_rows_), n, k, n);
  absl::Status status = check(layouts.result(), "cublasLtMatrixLayoutCreate");
  if (!status.ok()) return status;
  BlasPreference preference = nullptr;
  status =
      check(blas_->cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  if (!status.ok()) return status;
  const uint64_t workspace = 0;
  const uint32_t schemes = 0;  // no sum is split
  std::vector<BlasChoice> choices(kMostChoices);
  int found = 0;
  status = check(blas_->cublasLtMatmulPreferenceSetAttribute(preference, kMostWorkspace, &workspace,
                                                             sizeof workspace),
                 "cublasLtMatmulPreferenceSetAttribute");
  if (status.ok()) {
    status = check(blas_->cublasLtMatmulPreferenceSetAttribute(preference, kReductionSchemes,
                                                               &schemes, sizeof schemes),
                   "cublasLtMatmulPreferenceSetAttribute");
  }
  if (status.ok()) {
    status = check(blas_->cublasLtMatmulAlgoGetHeuristic(
                       handle_, description_, layouts.w(), layouts.a(), layouts.c(), layouts.c(),
                       preference, kMostChoices, choices.data(), &found),
                   "cublasLtMatmulAlgoGetHeuristic");
  }
  blas_->cublasLtMatmulPreferenceDestroy(preference);
  if (!status.ok()) return status;
  for (int i = 0; i < found; ++i) {
    const BlasChoice& choice = choices[static_cast<size_t>(i)];
    int32_t splits = 0;
    size_t written = 0;
    const int read = blas_->cublasLtMatmulAlgoConfigGetAttribute(&choice.algorithm, kSplitCount,
                                                                 &splits, sizeof splits, &written);
    if (choice.state != 0 || choice.workspace != 0 || read != 0 || splits > 1) continue;
    if (fits(1, n, k, choice.algorithm).ok() && fits(most_rows_, n, k, choice.algorithm).ok()) {
      return choice.algorithm;
    }
  }
  return absl::NotFoundError(
      "it has no algorithm for any number of rows that keeps each sum whole");
}

absl::Status GpuGemm::fits(uint32_t m, uint32_t n, uint32_t k, const BlasAlgorithm& algorithm) {
  const Layouts layouts(*blas_, m, n, k, n);
  absl::Status status = check(layouts.result(), "cublasLtMatrixLayoutCreate");
  if (!status.ok()) return status;
  BlasChoice choice;
  status = check(blas_->cublasLtMatmulAlgoCheck(handle_, description_, layouts.w(), layouts.a(),
                                                layouts.c(), layouts.c(), &algorithm, &choice),
                 "cublasLtMatmulAlgoCheck");
  if (status.ok() && choice.workspace != 0) status = absl::NotFoundError("it needs a workspace");
  return status;
}

absl::Status GpuGemm::prove(uint32_t n, uint32_t k, const uint16_t* w,
                            const BlasAlgorithm& algorithm) {
  const uint32_t rows = std::min(*std::rbegin(kProvedRows), most_rows_);
  auto a = RegisteredPages::make(device_, size_t{rows} * k * sizeof(float));
  if (!a.ok()) return a.status();
  const size_t row_bytes = size_t{n} * sizeof(float);
  auto back = RegisteredPages::make(device_, 2 * row_bytes);
  if (!back.ok()) return back.status();
  const size_t a_bytes = (size_t{rows} * k * sizeof(float) + 255) / 256 * 256;
  auto memory = DeviceSlab::create(device_, a_bytes + size_t{rows} * n * sizeof(float),
                                   {.rdma = false, .shareable = false});
  if (!memory.ok()) return memory.status();
  std::mt19937_64 random(n + k);
  // All rows are one, so that each of them shows what it is alone.
  for (size_t i = 0; i < size_t{rows} * k; ++i) {
    float* const at_i = (*a)->as<float>() + i;
    *at_i = i < k ? static_cast<float>(random() >> 40) * 0x1p-23f - 1 : *(at_i - k);
  }
  const DevicePointer at = (*memory)->span().data, c = at + a_bytes;
  const Driver& driver = device_.driver();
  absl::Status status = device_.check(
      driver.cuMemcpyAsync(at, (*a)->address(), size_t{rows} * k * sizeof(float), stream_),
      "a copy");
  std::vector<std::byte> alone;
  for (const uint32_t m : kProvedRows) {
    if (!status.ok() || m > rows) break;
    status = by_blas({.a = pointer_of<const float>(at),
                      .w = w,
                      .c = pointer_of<float>(c),
                      .m = m,
                      .n = n,
                      .k = k,
                      .lda = k,
                      .ldc = n},
                     algorithm);
    // The first row, and the last.
    for (const size_t row : {size_t{0}, size_t{m} - 1}) {
      if (!status.ok()) break;
      status = device_.check(driver.cuMemcpyAsync((*back)->address() + (row == 0 ? 0 : row_bytes),
                                                  c + row * row_bytes, row_bytes, stream_),
                             "a copy");
    }
    const absl::Status ended = wait();
    if (status.ok()) status = ended;
    if (!status.ok()) break;
    const auto* const seen = (*back)->as<const std::byte>();
    if (alone.empty()) alone.assign(seen, seen + row_bytes);
    const bool same = std::memcmp(alone.data(), seen, row_bytes) == 0 &&
                      (m == 1 || std::memcmp(alone.data(), seen + row_bytes, row_bytes) == 0);
    if (same) continue;
    status = absl::FailedPreconditionError(
        absl::StrCat("its rows have different bits among ", m, " than alone"));
  }
  const absl::Status ended = wait();
  return status.ok() ? ended : status;
}

absl::Status GpuGemm::wait() const {
  for (;;) {
    const Result result = device_.driver().cuStreamQuery(stream_);
    if (result != kNotReady) return device_.check(result, "trying a product");
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

absl::Status GpuGemm::by_blas(const kernels::Gemm& product, const BlasAlgorithm& algorithm) {
  auto* const rounded = pointer_of<uint16_t>(rounded_->span().data);
  absl::Status status = launcher_.round_rows({.from = product.a,
                                              .to = rounded,
                                              .rows = product.m,
                                              .size = product.k,
                                              .stride = product.lda},
                                             product.m, stream_);
  if (!status.ok()) return status;
  const Layouts layouts(*blas_, product.m, product.n, product.k, product.ldc);
  if (status = check(layouts.result(), "cublasLtMatrixLayoutCreate"); !status.ok()) return status;
  const float one = 1, beta = product.accumulate != 0 ? 1.0f : 0.0f;
  return check(blas_->cublasLtMatmul(handle_, description_, &one, product.w, layouts.w(), rounded,
                                     layouts.a(), &beta, product.c, layouts.c(), product.c,
                                     layouts.c(), &algorithm, nullptr, 0, stream_),
               "cublasLtMatmul");
}

absl::Status GpuGemm::multiply(const kernels::Gemm& product) {
  if (product.m > most_rows_ || product.k > most_k_) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a product of %u rows and %u columns, but at most %u and %u were declared",
                        product.m, product.k, most_rows_, most_k_));
  }
  const auto found = shapes_.find({product.n, product.k});
  // A bias is added last here, in one place.
  if (found != shapes_.end() && found->second.by_blas && product.bias == nullptr) {
    return by_blas(product, found->second.algorithm);
  }
  kernels::Gemm own = product;
  own.rounded = pointer_of<const uint16_t>(rounded_->span().data);
  return launcher_.multiply_bf16(own, stream_);
}

std::string GpuGemm::explain() const {
  if (!usable_) return absl::StrCat("Baton's own kernel multiplies: ", why_not_);
  const size_t version = blas_->cublasLtGetVersion();
  size_t by = 0;
  std::string others;
  for (const auto& [size, shape] : shapes_) {
    by += shape.by_blas ? 1 : 0;
    if (shape.by_blas) continue;
    absl::StrAppendFormat(&others, "; %u x %u: Baton's own kernel, because %s", size.first,
                          size.second, shape.why);
  }
  return absl::StrFormat("cuBLASLt %u.%u multiplies %u of %u shapes%s", version / 10000,
                         version / 100 % 100, by, shapes_.size(), others);
}

absl::StatusOr<CublasLt> load_cublaslt(const char* library) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();
    return absl::UnavailableError(
        absl::StrCat("no cuBLASLt: ", why != nullptr ? why : "it cannot be loaded"));
  }
  CublasLt table;
  const char* missing = nullptr;
#define BATON_FIND(name, result, parameters)                                 \
  table.name = reinterpret_cast<decltype(table.name)>(dlsym(handle, #name)); \
  if (table.name == nullptr) missing = #name;
  BATON_BLAS_ENTRIES(BATON_FIND)
#undef BATON_FIND
  if (missing != nullptr) {
    dlclose(handle);
    return absl::UnavailableError(absl::StrCat("no cuBLASLt: ", library, " has no ", missing));
  }
  return table;  // the library stays: streams may have kernels of it
}

absl::StatusOr<const CublasLt*> machine_cublaslt() {
  static const absl::StatusOr<CublasLt>* const loaded = [] {
    const char* const named = std::getenv("BATON_CUBLASLT");
    if (named != nullptr && std::string_view(named) == "none") {
      return new absl::StatusOr<CublasLt>(
          absl::UnavailableError("BATON_CUBLASLT=none switches it off"));
    }
    if (named != nullptr && *named != '\0') {
      return new absl::StatusOr<CublasLt>(load_cublaslt(named));
    }
    auto* newest = new absl::StatusOr<CublasLt>(load_cublaslt("libcublasLt.so.13"));
    if (newest->ok()) return newest;
    absl::StatusOr<CublasLt> older = load_cublaslt("libcublasLt.so.12");
    if (older.ok()) *newest = *older;
    return newest;
  }();
  if (!loaded->ok()) return loaded->status();
  return &**loaded;
}

}  // namespace baton::gpudirect
