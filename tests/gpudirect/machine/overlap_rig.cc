// What transfers between devices cost the kernels that run beside them: a product of matrices by
// cuBLASLt, which needs every multiprocessor, alone and with transfers both ways.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/gpudirect/machine/transfer_pair.h"
#include "tests/gpudirect/machine/transfer_rig.h"
#include "tests/std.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kWorkspace = 64 << 20;
constexpr int kQueued = 10;  // products at a time

// c = a^T b of square matrices of bf16.
class Products {
 public:
  Products(const Device& device, const CublasLt& blas, size_t size)
      : device_(device), blas_(blas), size_(size) {}
  ~Products() {
    if (layout_ != nullptr) blas_.cublasLtMatrixLayoutDestroy(layout_);
    if (description_ != nullptr) blas_.cublasLtMatmulDescDestroy(description_);
    if (handle_ != nullptr) blas_.cublasLtDestroy(handle_);
  }
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  absl::Status open() {
    const Device::Current current(device_);
    if (!current.status().ok()) return current.status();
    const int32_t transposed = kTransposed;
    const auto size = static_cast<int64_t>(size_);
    int result = blas_.cublasLtCreate(&handle_);
    if (result == 0) {
      result = blas_.cublasLtMatmulDescCreate(&description_, kComputeFloat, kRealFloat);
    }
    if (result == 0) {
      result = blas_.cublasLtMatmulDescSetAttribute(description_, kTransposeA, &transposed,
                                                    sizeof transposed);
    }
    if (result == 0) {
      result = blas_.cublasLtMatrixLayoutCreate(&layout_, kRealBf16, size_, size_, size);
    }
    if (absl::Status status = said(result); !status.ok()) return status;
    if (absl::Status status = choose(); !status.ok()) return status;
    const size_t bytes = matrix();
    auto memory =
        DeviceSlab::create(device_, 3 * bytes + kWorkspace, {.rdma = false, .shareable = false});
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    auto pages = RegisteredPages::make(device_, kRigCopy);
    if (!pages.ok()) return pages.status();
    // Numbers of which no two are alike: zeros need less power.
    std::mt19937 random(size_);
    auto* const numbers = (*pages)->as<uint16_t>();
    for (size_t i = 0; i < kRigCopy / 2; ++i) {
      numbers[i] = static_cast<uint16_t>((random() & 0x8000u) | (0x3e00u + (random() & 0x1ffu)));
    }
    const Stream stream = device_.stream(Direction::kToDevice);
    for (size_t at = 0; at < 2 * bytes; at += kRigCopy) {
      absl::Status status = queue_copy(device_, memory_->span().data + at, (*pages)->address(),
                                       std::min(kRigCopy, 2 * bytes - at), stream);
      if (!status.ok()) return status;
    }
    return wait_for(device_, stream);
  }

  // Seconds that one takes, of as many as fit into `span` seconds.
  absl::StatusOr<double> time(double span) {
    const double begin = rig_now();
    for (int count = kQueued;; count += kQueued) {
      if (absl::Status status = run(); !status.ok()) return status;
      const double took = rig_now() - begin;
      if (took >= span) return took / count;
    }
  }
  // kQueued of them.
  absl::Status run() {
    const Stream stream = device_.stream(Direction::kBetween);
    {
      const Device::Current current(device_);
      if (!current.status().ok()) return current.status();
      const float one = 1, zero = 0;
      const DevicePointer at = memory_->span().data;
      const auto* const a = pointer_of<const void>(at);
      const auto* const b = pointer_of<const void>(at + matrix());
      auto* const c = pointer_of<void>(at + 2 * matrix());
      auto* const workspace = pointer_of<void>(at + 3 * matrix());
      for (int i = 0; i < kQueued; ++i) {
        absl::Status status = said(
            blas_.cublasLtMatmul(handle_, description_, &one, a, layout_, b, layout_, &zero, c,
                                 layout_, c, layout_, &algorithm_, workspace, kWorkspace, stream));
        if (!status.ok()) return status;
      }
    }
    return wait_for(device_, stream);
  }

 private:
  size_t matrix() const { return size_ * size_ * sizeof(uint16_t); }
  static absl::Status said(int result) {
    if (result == 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("cuBLASLt failed with status ", result));
  }
  absl::Status choose() {
    BlasPreference preference = nullptr;
    int result = blas_.cublasLtMatmulPreferenceCreate(&preference);
    if (result != 0) return said(result);
    const uint64_t workspace = kWorkspace;
    BlasChoice choice;
    int found = 0;
    result = blas_.cublasLtMatmulPreferenceSetAttribute(preference, kMostWorkspace, &workspace,
                                                        sizeof workspace);
    if (result == 0) {
      result =
          blas_.cublasLtMatmulAlgoGetHeuristic(handle_, description_, layout_, layout_, layout_,
                                               layout_, preference, 1, &choice, &found);
    }
    blas_.cublasLtMatmulPreferenceDestroy(preference);
    if (result == 0 && (found == 0 || choice.state != 0)) {
      return absl::NotFoundError("cuBLASLt has no algorithm for this product");
    }
    algorithm_ = choice.algorithm;
    return said(result);
  }

  const Device& device_;
  const CublasLt& blas_;
  const size_t size_;
  BlasHandle handle_ = nullptr;
  BlasDescription description_ = nullptr;
  BlasLayout layout_ = nullptr;
  BlasAlgorithm algorithm_;
  std::unique_ptr<DeviceSlab> memory_;
};

// Writes and reads of a pair's memory, one of each at all times, until it ends.
class BothWays {
 public:
  BothWays(TransferPair& pair, size_t bytes)
      : thread_([this, &pair, bytes] {
          while (!stop_.load() && status_.ok()) {
            TransferRequest request = pair.request(0, bytes);
            const auto there = pair.worker().submit(request);
            request.op = Op::kRead;
            const auto back = pair.worker().submit(request);
            for (const auto& id : {there, back}) {
              status_.Update(id.ok() ? pair.worker().wait(*id) : id.status());
            }
            moved_.fetch_add(bytes);
          }
        }) {}
  ~BothWays() { end().IgnoreError(); }
  BothWays(const BothWays&) = delete;
  BothWays& operator=(const BothWays&) = delete;

  size_t moved() const { return moved_.load(); }  // in each direction
  absl::Status end() {
    stop_.store(true);
    if (thread_.joinable()) thread_.join();
    return status_;
  }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<size_t> moved_{0};
  absl::Status status_;
  std::thread thread_;  // the last: it uses the others
};

}  // namespace

absl::StatusOr<std::vector<Figure>> take_overlap_figures(
    const Device& device, const absl::StatusOr<const CublasLt*>& blas, const TransferSizes& sizes) {
  Figure figure{.name = "a product's time under transfers both ways",
                .value = std::numeric_limits<double>::quiet_NaN(),
                .unit = "of its time alone"};
  if (!blas.ok()) {
    figure.shape = std::string(blas.status().message());
    return std::vector<Figure>{figure};
  }
  auto pair = TransferPair::make(device, false, false, sizes.transfer);
  if (!pair.ok()) return pair.status();
  if (absl::Status settled = (*pair)->settle(); !settled.ok()) return settled;
  Products products(device, **blas, sizes.product);
  absl::Status status = products.open();
  if (status.ok()) status = products.run();
  if (!status.ok()) return status;
  const auto before = products.time(sizes.product_seconds);
  if (!before.ok()) return before.status();
  BothWays transfers(**pair, sizes.transfer);
  while (transfers.moved() < 2 * sizes.transfer) {
    if (status = products.run(); !status.ok()) return status;
  }
  const size_t moved = transfers.moved();
  const double begin = rig_now();
  const auto beside = products.time(sizes.product_seconds);
  if (!beside.ok()) return beside.status();
  const double rate = static_cast<double>(transfers.moved() - moved) / (rig_now() - begin);
  if (status = transfers.end(); !status.ok()) return status;
  const auto after = products.time(sizes.product_seconds);
  if (!after.ok()) return after.status();
  const double alone = (*before + *after) / 2;
  figure.shape = absl::StrFormat(
      "%u^3 of bf16 by cuBLASLt, %.3f ms before, %.3f ms after; transfers of %u bytes, %.1f GB/s "
      "there and as much back",
      sizes.product, *before * 1e3, *after * 1e3, sizes.transfer, rate / 1e9);
  figure.value = *beside / alone;
  figure.goal = 1.02;
  figure.at_most = true;
  return std::vector<Figure>{figure};
}

}  // namespace baton::gpudirect
