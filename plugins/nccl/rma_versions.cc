// The symbols that NCCL looks up: ncclRmaPlugin_v13 to v16, and v13 under GIN's name for NCCL
// 2.30.3 and 2.30.4. Each adapts rma.h to one version of the interface.
#include <type_traits>

#include "plugins/nccl/rma.h"

#define BATON_NCCL_DOOR extern "C" __attribute__((visibility("default")))

namespace baton::nccl {
namespace {

// The last arguments of a call: v13 has a request; v14 adds a flag for strong signals before it;
// v15 has flags instead. In v13 all signals are strong.
struct Tail {
  explicit Tail(void** at) : request(at) {}
  Tail(uint32_t what, void** at) : flags(what), request(at) {}
  Tail(bool signal, void** at) : strong(signal), request(at) {}
  Tail(bool signal, uint32_t what, void** at) : strong(signal), flags(what), request(at) {}
  bool strong = true;
  uint32_t flags = 0;
  void** request;
};

template <typename... Rest>
Result put(void* context, int number, uint64_t from_offset, void* from, size_t size,
           uint64_t to_offset, void* to, uint32_t rank, Rest... rest) {
  const Tail tail(rest...);
  return rma::put(context,
                  {.number = number,
                   .local = from,
                   .remote = to,
                   .local_offset = from_offset,
                   .remote_offset = to_offset,
                   .size = size,
                   .rank = rank,
                   .flags = tail.flags},
                  tail.request);
}
template <typename... Rest>
Result get(void* context, int number, uint64_t remote_offset, void* remote, size_t size,
           uint64_t local_offset, void* local, uint32_t rank, Rest... rest) {
  const Tail tail(rest...);
  return rma::get(context,
                  {.number = number,
                   .local = local,
                   .remote = remote,
                   .local_offset = local_offset,
                   .remote_offset = remote_offset,
                   .size = size,
                   .rank = rank,
                   .flags = tail.flags},
                  tail.request);
}
template <typename... Rest>
Result put_signal(void* context, int number, uint64_t from_offset, void* from, size_t size,
                  uint64_t to_offset, void* to, uint32_t rank, uint64_t word_offset, void* words,
                  uint64_t value, uint32_t operation, Rest... rest) {
  const Tail tail(rest...);
  return rma::put_signal(context,
                         {.number = number,
                          .local = from,
                          .remote = to,
                          .local_offset = from_offset,
                          .remote_offset = to_offset,
                          .size = size,
                          .rank = rank,
                          .words = words,
                          .word_offset = word_offset,
                          .value = value,
                          .operation = operation,
                          .strong = tail.strong,
                          .flags = tail.flags},
                         tail.request);
}

// v13 has a second handle, for devices: the same.
template <typename... ForDevice>
Result register_dma_buf(void* comm, void* data, size_t size, int type, uint64_t offset, int fd,
                        uint64_t, void** memory, ForDevice... for_device) {
  const Result result = rma::register_memory(comm, data, size, type, fd, offset, memory);
  if (result == Result::kSuccess)
    ((for_device != nullptr ? void(*for_device = *memory) : void()), ...);
  return result;
}
template <typename... ForDevice>
Result register_memory(void* comm, void* data, size_t size, int type, uint64_t flags, void** memory,
                       ForDevice... for_device) {
  return register_dma_buf(comm, data, size, type, 0, -1, flags, memory, for_device...);
}

// v13's NICs are driven by NCCL's own proxy.
template <int kDeviceType>
Result properties(int device, PropertiesV12* out) {
  return rma::properties(device, kDeviceType, out);
}
template <typename Config>
Result create_context(void* comm, Config* config, void** context) {
  return rma::create_context(comm, config == nullptr ? 1 : config->contexts, context);
}
Result create_context_v13(void* comm, GinConfigV13* config, void** context,
                          NetDeviceHandle** device) {
  static NetDeviceHandle none{.device_type = kGinProxyDevice};
  if (device != nullptr) *device = &none;
  return create_context(comm, config, context);
}

// A signal is seen by a processor that has seen its rank's puts; of other ranks' it knows nothing.
Result rma_properties_v16(void*, RmaPropertiesV16* out) {
  out->any_signal_flushes_all = false;
  return Result::kSuccess;
}

template <typename Table>
constexpr Table view() {
  Table table{};
  table.name = "Baton";
  table.init = rma::init;
  table.devices = rma::devices;
  table.listen = rma::listen;
  table.connect = rma::connect;
  table.register_memory = register_memory;
  table.register_dma_buf = register_dma_buf;
  table.deregister = rma::deregister;
  table.destroy_context = rma::destroy_context;
  table.close_comm = rma::close_comm;
  table.close_listen = rma::close_listen;
  table.put = put;
  table.put_signal = put_signal;
  table.get = get;
  table.flush = rma::flush;
  table.test = rma::test;
  table.progress = rma::progress;
  table.query_last_error = rma::query_last_error;
  table.finalize = rma::finalize;
  if constexpr (std::is_same_v<Table, RmaV13>) {
    table.properties = properties<kGinProxyDevice>;
    table.create_context = create_context_v13;
  } else {
    table.properties = properties<kHostDevice>;
    table.create_context = create_context;
  }
  if constexpr (std::is_same_v<Table, RmaV16>) table.rma_properties = rma_properties_v16;
  return table;
}

}  // namespace

BATON_NCCL_DOOR const RmaV13 ncclRmaPlugin_v13 = view<RmaV13>();
BATON_NCCL_DOOR const RmaV13 ncclGinPlugin_v13 = view<RmaV13>();
BATON_NCCL_DOOR const RmaV14 ncclRmaPlugin_v14 = view<RmaV14>();
BATON_NCCL_DOOR const RmaV15 ncclRmaPlugin_v15 = view<RmaV15>();
BATON_NCCL_DOOR const RmaV16 ncclRmaPlugin_v16 = view<RmaV16>();

}  // namespace baton::nccl
