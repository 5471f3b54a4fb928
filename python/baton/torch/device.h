// Tensors of CUDA devices, by torch's own interface to devices: no header of CUDA's is needed.
//
// A call waits for the stream that is current when it begins (baton_call.after); wait() has the
// stream that is current then wait for the call, and blocks no thread. Baton touches no memory
// behind a call's end, until which the work has its tensors: no allocator needs to hear of it, but
// for those that torch itself copies from behind a wait.
#pragma once

#include <ATen/core/Tensor.h>
#include <baton/collectives.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <optional>
#include <vector>

namespace baton::c10d_backend {

// The types of devices whose memory and streams are those of CUDA's driver, a bit for each: CUDA,
// where torch is built with that, and what a test has in its place.
inline std::atomic<uint64_t>& types_of_cuda() {
  static std::atomic<uint64_t> types{0};
  return types;
}
inline bool is_of_cuda(c10::Device device) {
  return (types_of_cuda().load() >> static_cast<int>(device.type()) & 1) != 0;
}

// The device of a call's tensors; nullopt: all are on the CPU.
inline std::optional<c10::Device> device_of(const std::vector<at::Tensor>& inputs,
                                            const std::vector<at::Tensor>& outputs) {
  std::optional<c10::Device> found;
  for (const auto* list : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *list) {
      if (!tensor.defined()) continue;
      TORCH_CHECK(!found.has_value() || *found == tensor.device(),
                  "backend baton: a call got tensors on ", *found, " and on ", tensor.device());
      found = tensor.device();
    }
  }
  return found.has_value() && is_of_cuda(*found) ? found : std::nullopt;
}

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}
inline baton_stream stream_of(const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  return {stream.device_index(), guard.getStreamNativeHandle(stream)};
}

}  // namespace baton::c10d_backend
