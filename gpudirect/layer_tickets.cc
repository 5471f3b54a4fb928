// Words that a stream writes behind each layer, and the host reads.
#include "gpudirect/layer_tickets.h"

#include <atomic>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/limits/memory_left.h"

namespace baton::gpudirect {
namespace {

constexpr uint32_t kAskEvery = 256;  // polls without a layer

}  // namespace

absl::StatusOr<std::unique_ptr<LayerTickets>> LayerTickets::open(const Device& device,
                                                                 const Launcher& launcher,
                                                                 uint32_t layers) {
  if (layers == 0) return absl::InvalidArgumentError("tickets for 0 layers");
  if (!device.facts().has(kCanUseHostPointerForRegisteredMemory)) {
    return absl::UnavailableError(
        "this CUDA device does not know registered host memory by the host's address: wait for "
        "layers by events (TransferRequest::after_event)");
  }
  std::unique_ptr<LayerTickets> out(new LayerTickets(device, launcher, layers));
  if (absl::Status status = out->start(); !status.ok()) return status;
  return out;
}

absl::Status LayerTickets::start() {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  // Asked for both: a vector that finds no memory would throw.
  const size_t words = size_t{layers_} + 1;
  absl::Status fits = base::memory_fits(absl::StrFormat("tickets for %u layers", layers_),
                                        2 * words * sizeof(uint64_t));
  if (!fits.ok()) return fits;
  told_.resize(layers_);
  auto pages = RegisteredPages::make(device_, words * sizeof(uint64_t));
  if (!pages.ok()) return pages.status();
  pages_ = *std::move(pages);
  auto count = DeviceSlab::create(device_, sizeof(uint64_t), {.rdma = false, .shareable = false});
  if (!count.ok()) return count.status();
  count_ = *std::move(count);
  return pages_->copy_to(count_->span().data, sizeof(uint64_t));  // zeros: no step has begun
}

absl::Status LayerTickets::launch(Stream stream, uint32_t word, uint64_t add) const {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const kernels::WriteTicket arguments{pointer_of<uint64_t>(count_->span().data),
                                       pages_->as<uint64_t>() + word, add};
  return launcher_.write_ticket(arguments, 1, stream);
}

absl::Status LayerTickets::begin(Stream stream) const { return launch(stream, 0, 1); }

absl::Status LayerTickets::mark(Stream stream, uint32_t layer) const {
  if (layer >= told_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("layer %u of %u", layer, told_.size()));
  }
  return launch(stream, 1 + layer, 0);
}

void LayerTickets::forget_steps() {
  step_ = std::atomic_ref(pages_->as<uint64_t>()[0]).load(std::memory_order_acquire);
  told_.assign(told_.size(), step_);
}

absl::StatusOr<size_t> LayerTickets::poll(
    absl::FunctionRef<void(uint64_t step, uint32_t layer)> ready) {
  uint64_t* const words = pages_->as<uint64_t>();
  const auto begun = [&] { return std::atomic_ref(words[0]).load(std::memory_order_acquire); };
  if (const uint64_t now = begun(); now != step_) {
    std::string missing;
    for (size_t layer = 0; step_ != 0 && layer < told_.size(); ++layer) {
      if (told_[layer] != step_) absl::StrAppend(&missing, missing.empty() ? "" : ", ", layer);
    }
    const uint64_t last = step_;
    const bool passed_over = now != last + 1;
    step_ = now;
    if (!missing.empty() || passed_over) {
      return absl::DataLossError(absl::StrFormat(
          "step %u has begun, but in step %u %s: launch a step after the transfers of the previous "
          "one have ended",
          now, last,
          missing.empty() ? "no layer was reported"
                          : absl::StrCat("these layers were not reported: ", missing)));
    }
  }
  size_t count = 0;
  for (uint32_t layer = 0; layer < told_.size(); ++layer) {
    if (told_[layer] == step_) continue;
    const uint64_t ticket = std::atomic_ref(words[1 + layer]).load(std::memory_order_acquire);
    // Looked at again: what a step that has begun since may overwrite is not told.
    if (ticket != step_ || begun() != step_) continue;
    told_[layer] = step_;
    ++count;
    ready(step_, layer);
  }
  if (count == 0) {
    if (absl::Status status = look_for_loss(); !status.ok()) return status;
  }
  return count;
}

// A device that is lost writes no words, and only the driver's answers say that it is.
absl::Status LayerTickets::look_for_loss() {
  if (++fruitless_ % kAskEvery != 0) return device_.alive();
  const Device::Current current(device_);
  if (!current.status().ok()) return device_.alive();
  const Result result = device_.driver().cuStreamQuery(device_.stream(Direction::kToHost));
  if (is_loss(result)) device_.check(result, "asking whether a device is lost").IgnoreError();
  return device_.alive();
}

}  // namespace baton::gpudirect
