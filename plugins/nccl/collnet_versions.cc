// ncclCollNetPlugin_v8 to v12: a network that reduces has no device here, so NCCL asks for nothing
// more and reduces by itself. NCCL 2.28 and 2.32 take that as an answer, where a missing symbol
// would be a line of the log for each version that is looked for.
#include "plugins/nccl/abi_collnet.h"
#include "plugins/nccl/plugin.h"

namespace baton::nccl {
namespace {

Result init_reductions(Logger log) {
  Plugin::get().set_logger(log);
  return Result::kSuccess;
}
Result init_reductions_v11(void** context, uint64_t /*communicator*/, Logger log) {
  if (context != nullptr) *context = nullptr;
  return init_reductions(log);
}
Result no_devices(int* count) {
  if (count == nullptr) return Result::kInvalidArgument;
  *count = 0;
  return Result::kSuccess;
}
Result finalize_reductions(void* /*context*/) { return Result::kSuccess; }

constexpr CollNetV9 kV9{.name = kPluginName, .init = init_reductions, .devices = no_devices};
constexpr CollNetV11 kV11{.name = kPluginName,
                          .init = init_reductions_v11,
                          .devices = no_devices,
                          .finalize = finalize_reductions};

}  // namespace

extern "C" const CollNetV8 ncclCollNetPlugin_v8 = {
    .name = kPluginName, .init = init_reductions, .devices = no_devices};
extern "C" const CollNetV9 ncclCollNetPlugin_v9 = kV9;
extern "C" const CollNetV9 ncclCollNetPlugin_v10 = kV9;
extern "C" const CollNetV11 ncclCollNetPlugin_v11 = kV11;
extern "C" const CollNetV11 ncclCollNetPlugin_v12 = kV11;

}  // namespace baton::nccl
