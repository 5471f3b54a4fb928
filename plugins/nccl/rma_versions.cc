// What NCCL looks for by name: ncclRmaPlugin_v13 to v16, and v13 under GIN's name, where NCCL
// 2.30.3 and 2.30.4 look. Views of rma.h that add what a version lacks and leave out what it does
// not have.
#include "plugins/nccl/rma.h"

#define BATON_NCCL_DOOR extern "C" __attribute__((visibility("default")))

namespace baton::nccl {
namespace {

RmaMemory* memory_of(void* handle) { return static_cast<RmaMemory*>(handle); }

// --- v15 and v16 ---------------------------------------------------------------------------------

Result put_v15(void* context, int number, uint64_t from_offset, void* from, size_t size,
               uint64_t to_offset, void* to, uint32_t rank, uint32_t flags, void** request) {
  return rma::put(context,
                  {.number = number,
                   .local = memory_of(from),
                   .remote = memory_of(to),
                   .local_offset = from_offset,
                   .remote_offset = to_offset,
                   .size = size,
                   .rank = rank,
                   .flags = flags},
                  request);
}

Result put_signal_v15(void* context, int number, uint64_t from_offset, void* from, size_t size,
                      uint64_t to_offset, void* to, uint32_t rank, uint64_t word_offset,
                      void* words, uint64_t value, uint32_t operation, bool strong, uint32_t flags,
                      void** request) {
  return rma::put_signal(context,
                         {.number = number,
                          .local = memory_of(from),
                          .remote = memory_of(to),
                          .local_offset = from_offset,
                          .remote_offset = to_offset,
                          .size = size,
                          .rank = rank,
                          .words = memory_of(words),
                          .word_offset = word_offset,
                          .value = value,
                          .operation = operation,
                          .strong = strong,
                          .flags = flags},
                         request);
}

Result get_v15(void* context, int number, uint64_t remote_offset, void* remote, size_t size,
               uint64_t local_offset, void* local, uint32_t rank, uint32_t flags, void** request) {
  return rma::get(context,
                  {.number = number,
                   .local = memory_of(local),
                   .remote = memory_of(remote),
                   .local_offset = local_offset,
                   .remote_offset = remote_offset,
                   .size = size,
                   .rank = rank,
                   .flags = flags},
                  request);
}

// --- v14: no flags -------------------------------------------------------------------------------

Result put_v14(void* context, int number, uint64_t from_offset, void* from, size_t size,
               uint64_t to_offset, void* to, uint32_t rank, void** request) {
  return put_v15(context, number, from_offset, from, size, to_offset, to, rank, 0, request);
}
Result put_signal_v14(void* context, int number, uint64_t from_offset, void* from, size_t size,
                      uint64_t to_offset, void* to, uint32_t rank, uint64_t word_offset,
                      void* words, uint64_t value, uint32_t operation, bool strong,
                      void** request) {
  return put_signal_v15(context, number, from_offset, from, size, to_offset, to, rank, word_offset,
                        words, value, operation, strong, 0, request);
}
Result get_v14(void* context, int number, uint64_t remote_offset, void* remote, size_t size,
               uint64_t local_offset, void* local, uint32_t rank, void** request) {
  return get_v15(context, number, remote_offset, remote, size, local_offset, local, rank, 0,
                 request);
}
Result properties_v14(int device, PropertiesV12* out) {
  return rma::properties(device, kHostDevice, out);
}
Result create_context_v14(void* comm, RmaConfigV14* config, void** context) {
  return rma::create_context(comm, config == nullptr ? 1 : config->contexts, context);
}
Result register_v14(void* comm, void* data, size_t size, int type, uint64_t, void** memory) {
  return rma::register_memory(comm, data, size, type, -1, 0, memory);
}
Result register_dma_buf_v14(void* comm, void* data, size_t size, int type, uint64_t offset, int fd,
                            uint64_t, void** memory) {
  return rma::register_memory(comm, data, size, type, fd, offset, memory);
}

// A signal is seen by a processor that has seen its rank's puts; of other ranks' it knows nothing.
Result rma_properties_v16(void*, RmaPropertiesV16* out) {
  out->any_signal_flushes_all = false;
  return Result::kSuccess;
}

// --- v13: every signal is a strong one -----------------------------------------------------------

Result properties_v13(int device, PropertiesV12* out) {
  return rma::properties(device, kGinProxyDevice, out);
}
Result create_context_v13(void* comm, GinConfigV13* config, void** context,
                          NetDeviceHandle** device) {
  static NetDeviceHandle none{.device_type = kGinProxyDevice};  // NCCL's own proxy drives
  if (device != nullptr) *device = &none;
  return rma::create_context(comm, config == nullptr ? 1 : config->contexts, context);
}
Result register_v13(void* comm, void* data, size_t size, int type, uint64_t, void** memory,
                    void** for_device) {
  const Result result = rma::register_memory(comm, data, size, type, -1, 0, memory);
  if (result == Result::kSuccess && for_device != nullptr) *for_device = *memory;
  return result;
}
Result register_dma_buf_v13(void* comm, void* data, size_t size, int type, uint64_t offset, int fd,
                            uint64_t, void** memory, void** for_device) {
  const Result result = rma::register_memory(comm, data, size, type, fd, offset, memory);
  if (result == Result::kSuccess && for_device != nullptr) *for_device = *memory;
  return result;
}
Result put_signal_v13(void* context, int number, uint64_t from_offset, void* from, size_t size,
                      uint64_t to_offset, void* to, uint32_t rank, uint64_t word_offset,
                      void* words, uint64_t value, uint32_t operation, void** request) {
  return put_signal_v15(context, number, from_offset, from, size, to_offset, to, rank, word_offset,
                        words, value, operation, true, 0, request);
}

constexpr RmaV13 kV13{
    .name = "Baton",
    .init = rma::init,
    .devices = rma::devices,
    .properties = properties_v13,
    .listen = rma::listen,
    .connect = rma::connect,
    .create_context = create_context_v13,
    .register_memory = register_v13,
    .register_dma_buf = register_dma_buf_v13,
    .deregister = rma::deregister,
    .destroy_context = rma::destroy_context,
    .close_comm = rma::close_comm,
    .close_listen = rma::close_listen,
    .put = put_v14,
    .put_signal = put_signal_v13,
    .get = get_v14,
    .flush = rma::flush,
    .test = rma::test,
    .progress = rma::progress,
    .query_last_error = rma::query_last_error,
    .finalize = rma::finalize,
};

// What v14, v15 and v16 have in common.
template <typename Table>
constexpr Table since_v14() {
  Table table{};
  table.name = "Baton";
  table.init = rma::init;
  table.devices = rma::devices;
  table.properties = properties_v14;
  table.listen = rma::listen;
  table.connect = rma::connect;
  table.create_context = create_context_v14;
  table.register_memory = register_v14;
  table.register_dma_buf = register_dma_buf_v14;
  table.deregister = rma::deregister;
  table.destroy_context = rma::destroy_context;
  table.close_comm = rma::close_comm;
  table.close_listen = rma::close_listen;
  table.flush = rma::flush;
  table.test = rma::test;
  table.progress = rma::progress;
  table.query_last_error = rma::query_last_error;
  table.finalize = rma::finalize;
  return table;
}
constexpr RmaV14 v14() {
  RmaV14 table = since_v14<RmaV14>();
  table.put = put_v14;
  table.put_signal = put_signal_v14;
  table.get = get_v14;
  return table;
}
template <typename Table>
constexpr Table since_v15() {
  Table table = since_v14<Table>();
  table.put = put_v15;
  table.put_signal = put_signal_v15;
  table.get = get_v15;
  return table;
}
constexpr RmaV16 v16() {
  RmaV16 table = since_v15<RmaV16>();
  table.rma_properties = rma_properties_v16;
  return table;
}

}  // namespace

BATON_NCCL_DOOR const RmaV13 ncclRmaPlugin_v13 = kV13;
BATON_NCCL_DOOR const RmaV13 ncclGinPlugin_v13 = kV13;
BATON_NCCL_DOOR const RmaV14 ncclRmaPlugin_v14 = v14();
BATON_NCCL_DOOR const RmaV15 ncclRmaPlugin_v15 = since_v15<RmaV15>();
BATON_NCCL_DOOR const RmaV16 ncclRmaPlugin_v16 = v16();

}  // namespace baton::nccl
