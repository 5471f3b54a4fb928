// The waits between streams and transfers that the transport asks for, by StreamGates.
#pragma once

#include <memory>

#include "gpudirect/stream_gates.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {

// For one thread at a time. The device outlives it.
class CudaGates final : public internal::TransferGates {
 public:
  static absl::StatusOr<std::unique_ptr<CudaGates>> open(const Device& device, size_t gates);

  absl::StatusOr<Gate> after_stream(void* stream, Time deadline) override;
  absl::StatusOr<Gate> after_event(void* event, Time deadline) override;
  absl::StatusOr<Hold> hold(void* stream, Time deadline) override;
  std::optional<absl::Status> passed(Gate gate, Time now) override;
  void end(Gate gate, bool delivered) override;
  void close(Gate gate) override;

 private:
  CudaGates(const Device& device, std::unique_ptr<StreamGates> gates)
      : device_(device), gates_(std::move(gates)) {}

  const Device& device_;
  const std::unique_ptr<StreamGates> gates_;
};

}  // namespace baton::gpudirect
