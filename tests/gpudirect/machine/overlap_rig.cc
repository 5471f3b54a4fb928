// What transfers between devices cost the kernels that run beside them: a product of matrices by
// cuBLASLt, which needs every multiprocessor, alone and with transfers both ways.
#include "absl/strings/str_format.h"
#include "tests/gpudirect/machine/transfer_pair.h"
#include "tests/gpudirect/machine/transfer_rig.h"
#include "tests/gpudirect/reference/blas_times.h"
#include "tests/std.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kWorkspace = 64 << 20;
constexpr int kQueued = 10;  // products at a time

// Products of square matrices of bf16.
class Products {
 public:
  explicit Products(const Device& device) : device_(device) {}

  absl::Status open(const CublasLt& blas, size_t size) {
    const Device::Current current(device_);
    if (!current.status().ok()) return current.status();
    const size_t matrix = size * size * sizeof(uint16_t), numbers = 2 * matrix;
    auto memory = DeviceSlab::create(device_, numbers + size * size * sizeof(float) + kWorkspace,
                                     {.rdma = false, .shareable = false});
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    const DevicePointer at = memory_->span().data, sums = at + numbers;
    const auto side = static_cast<uint32_t>(size);
    auto queue = product_by_blas(blas,
                                 {.w = pointer_of<const uint16_t>(at),
                                  .c = pointer_of<float>(sums),
                                  .m = side,
                                  .n = side,
                                  .k = side,
                                  .ldc = side,
                                  .rounded = pointer_of<const uint16_t>(at + matrix)},
                                 sums + size * size * sizeof(float), kWorkspace,
                                 device_.stream(Direction::kBetween));
    if (!queue.ok()) return queue.status();
    queue_ = *std::move(queue);
    auto pages = RegisteredPages::make(device_, kRigCopy);
    if (!pages.ok()) return pages.status();
    // Numbers of which no two are alike: zeros need less power.
    std::mt19937 random(side);
    auto* const words = (*pages)->as<uint16_t>();
    for (size_t i = 0; i < kRigCopy / 2; ++i) {
      words[i] = static_cast<uint16_t>((random() & 0x8000u) | (0x3e00u + (random() & 0x1ffu)));
    }
    const Stream stream = device_.stream(Direction::kToDevice);
    for (size_t done = 0; done < numbers; done += kRigCopy) {
      absl::Status status = queue_copy(device_, at + done, (*pages)->address(),
                                       std::min(kRigCopy, numbers - done), stream);
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
    {
      const Device::Current current(device_);
      if (!current.status().ok()) return current.status();
      for (int i = 0; i < kQueued; ++i) {
        if (absl::Status status = queue_(); !status.ok()) return status;
      }
    }
    return wait_for(device_, device_.stream(Direction::kBetween));
  }

 private:
  const Device& device_;
  std::function<absl::Status()> queue_;
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
  Products products(device);
  absl::Status status = products.open(**blas, sizes.product);
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
