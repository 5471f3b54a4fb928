// ncclNetPlugin_v8 to v12: what NCCL looks for, newest first. Thin views of the net door.
#include "plugins/nccl/abi_net.h"
#include "plugins/nccl/net.h"
#include "plugins/nccl/plugin.h"

namespace baton::nccl {
namespace {

// NCCL passes this `*request` to irecv if the receiver polls the data itself (LL, LL128) and needs
// no completion.
void* const kOptionalCompletion = reinterpret_cast<void*>(1);  // NOLINT: NCCL's value

Result open(Logger log, int traffic_class = -1) {
  const absl::Status status = Plugin::get().open(log, traffic_class);
  return status.ok() ? Result::kSuccess : fail("init: NCCL will take another network", status);
}

Result init_v8(Logger log) { return open(log); }
Result init_v10(Logger log, ProfilerCallback /*profiler*/) { return open(log); }
Result init_v11(void** context, uint64_t /*communicator*/, NetConfig* config, Logger log,
                ProfilerCallback /*profiler*/) {
  if (context != nullptr) *context = &Plugin::get();
  return open(log, config == nullptr ? -1 : config->traffic_class);
}
Result finalize(void* /*context*/) { return Result::kSuccess; }
Result set_attributes(void* /*context*/, NetAttributes* /*attributes*/) { return Result::kSuccess; }

Result devices(int* count) {
  if (count == nullptr) return Result::kInvalidArgument;
  *count = static_cast<int>(Plugin::get().devices().size());
  return Result::kSuccess;
}

// The properties that all versions have.
template <typename Properties>
Result common(int index, Properties* out) {
  const auto& all = Plugin::get().devices();
  if (out == nullptr || index < 0 || static_cast<size_t>(index) >= all.size()) {
    return fail("getProperties", absl::InvalidArgumentError("there is no such device"));
  }
  const Device& device = all[index];
  *out = {};
  out->name = device.name.c_str();
  out->pci_path = device.pci_path.empty() ? nullptr : device.pci_path.c_str();
  out->guid = device.guid;
  out->pointers = kHostPointer | (device.rdma ? kCudaPointer | kDmaBufPointer : 0);
  out->speed = device.speed;
  out->port = device.port;
  out->max_comms = 65'535;
  out->max_receives = kMostReceives;
  return Result::kSuccess;
}
template <typename Properties>
Result since_v9(int index, Properties* out) {
  const Result result = common(index, out);
  if (result != Result::kSuccess) return result;
  out->virtual_device = {1, {index}};
  out->max_p2p_bytes = kMostBytes;
  out->max_collective_bytes = kMostBytes;
  return result;
}
Result properties_v8(int index, PropertiesV8* out) { return common(index, out); }
Result properties_v9(int index, PropertiesV9* out) { return since_v9(index, out); }
Result properties_v11(int index, PropertiesV11* out) {
  if (out == nullptr) return Result::kInvalidArgument;
  out->max_multi_request = 1;
  return since_v9(index, &out->common);
}
Result properties_v12(int index, PropertiesV12* out) {
  const Result result = since_v9(index, out);
  if (result != Result::kSuccess) return result;
  out->max_multi_request = 1;
  out->rail = out->plane = -1;
  return result;
}

Result listen_v11(void* /*context*/, int device, void* handle, void** comm) {
  return net_door::listen(device, handle, comm);
}
Result connect_v8(int device, void* handle, void** comm, NetDeviceHandle** /*out*/) {
  return net_door::connect(device, handle, comm);
}
Result connect_v10(int device, NetConfig* /*config*/, void* handle, void** comm,
                   NetDeviceHandle** /*out*/) {
  return net_door::connect(device, handle, comm);
}
Result connect_v11(void* /*context*/, int device, void* handle, void** comm,
                   NetDeviceHandle** /*out*/) {
  return net_door::connect(device, handle, comm);
}
Result accept(void* listener, void** comm, NetDeviceHandle** /*out*/) {
  return net_door::accept(listener, comm);
}

Result register_memory(void* comm, void* data, size_t size, int type, void** memory) {
  return net_door::register_memory(comm, data, size, type, 0, -1, memory);
}
Result register_dma_buf(void* comm, void* data, size_t size, int type, uint64_t offset, int fd,
                        void** memory) {
  if (fd < 0) return fail("regMrDmaBuf", absl::InvalidArgumentError("there is no descriptor"));
  return net_door::register_memory(comm, data, size, type, offset, fd, memory);
}

Result send_v8(void* comm, void* data, int size, int tag, void* memory, void** request) {
  if (size < 0) return fail("isend", absl::InvalidArgumentError("a negative size"));
  return net_door::send(comm, data, static_cast<size_t>(size), tag, memory, request);
}
// NCCL does not tell v8 which lines are polled: all may be.
Result receive_v8(void* comm, int count, void** data, int* sizes, int* tags, void** memory,
                  void** request) {
  std::array<size_t, kMostReceives> wide{};
  for (int i = 0; i < std::min(count, kMostReceives); ++i) {
    if (sizes[i] < 0) return fail("irecv", absl::InvalidArgumentError("a negative size"));
    wide[i] = static_cast<size_t>(sizes[i]);
  }
  return net_door::receive(comm, count, data, wide.data(), tags, memory, true, request);
}
Result send_v9(void* comm, void* data, size_t size, int tag, void* memory, void** request) {
  return net_door::send(comm, data, size, tag, memory, request);
}
Result receive_v9(void* comm, int count, void** data, size_t* sizes, int* tags, void** memory,
                  void** request) {
  const bool polled = request != nullptr && *request == kOptionalCompletion;
  return net_door::receive(comm, count, data, sizes, tags, memory, polled, request);
}
Result send_v10(void* comm, void* data, size_t size, int tag, void* memory, void* /*profiled*/,
                void** request) {
  return net_door::send(comm, data, size, tag, memory, request);
}
Result receive_v10(void* comm, int count, void** data, size_t* sizes, int* tags, void** memory,
                   void** /*profiled*/, void** request) {
  return receive_v9(comm, count, data, sizes, tags, memory, request);
}

Result flush(void* comm, int count, void** /*data*/, int* sizes, void** memory, void** request) {
  return net_door::flush(comm, count, sizes, memory, request);
}
Result consumed(void* /*comm*/, int /*count*/, void* /*request*/) { return Result::kSuccess; }

template <typename Net>
constexpr Net with_common(Net net) {
  net.name = kPluginName;
  net.devices = devices;
  net.accept = accept;
  net.register_memory = register_memory;
  net.register_dma_buf = register_dma_buf;
  net.deregister = net_door::deregister;
  net.flush = flush;
  net.test = net_door::test;
  net.close_send = net_door::close_send;
  net.close_receive = net_door::close_receive;
  net.close_listen = net_door::close_listen;
  net.consumed = consumed;
  return net;
}
template <typename Net>
constexpr Net since_v11(Net net) {
  net.init = init_v11;
  net.listen = listen_v11;
  net.connect = connect_v11;
  net.send = send_v10;
  net.receive = receive_v10;
  net.finalize = finalize;
  net.set_attributes = set_attributes;
  return with_common(net);
}

}  // namespace

extern "C" const NetV8 ncclNetPlugin_v8 = with_common(NetV8{.init = init_v8,
                                                            .properties = properties_v8,
                                                            .listen = net_door::listen,
                                                            .connect = connect_v8,
                                                            .send = send_v8,
                                                            .receive = receive_v8});
extern "C" const NetV9 ncclNetPlugin_v9 = with_common(NetV9{.init = init_v8,
                                                            .properties = properties_v9,
                                                            .listen = net_door::listen,
                                                            .connect = connect_v8,
                                                            .send = send_v9,
                                                            .receive = receive_v9});
extern "C" const NetV10 ncclNetPlugin_v10 = with_common(NetV10{.init = init_v10,
                                                               .properties = properties_v9,
                                                               .listen = net_door::listen,
                                                               .connect = connect_v10,
                                                               .send = send_v10,
                                                               .receive = receive_v10});
extern "C" const NetV11 ncclNetPlugin_v11 = since_v11(NetV11{.properties = properties_v11});
extern "C" const NetV12 ncclNetPlugin_v12 = since_v11(NetV12{.properties = properties_v12});

// ncclCollNetPlugin_v8 to v12: a network that reduces has no device here, so NCCL asks for nothing
// more and reduces by itself. NCCL 2.28 and 2.32 take that as an answer, where a missing symbol
// would be a line of the log for each version that is looked for.

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
