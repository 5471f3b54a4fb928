// NCCL's side of the net interface: any plugin, of any version from 8 to 12,
// called as NCCL's own views of older versions call it.
#pragma once

#include "plugins/nccl/abi_net.h"
#include "tests/test.h"

namespace baton::nccl {

// What the plugins have logged since forget(): by any thread.
class NetLog {
 public:
  static void forget();
  static std::vector<std::string> lines(LogLevel level);
  static Logger logger();
};

class AnyNet {
  template <typename Call>
  auto with(const Call& call) const {
    switch (version_) {
      case 8:
        return call(*static_cast<const NetV8*>(table_));
      case 9:
        return call(*static_cast<const NetV9*>(table_));
      case 10:
        return call(*static_cast<const NetV10*>(table_));
      case 11:
        return call(*static_cast<const NetV11*>(table_));
      default:
        return call(*static_cast<const NetV12*>(table_));
    }
  }

 public:
  // A table of the plugin interface, which `keep` keeps loaded.
  AnyNet(const void* table, int version, std::shared_ptr<void> keep = {})
      : table_(table), version_(version), keep_(std::move(keep)) {}
  // NotFound: there is no such file, or it has no ncclNetPlugin_v<version>. 0: its newest.
  static absl::StatusOr<AnyNet> load(const std::string& path, int version = 0);

  Result init(Logger log = NetLog::logger());
  Result devices(int* count) const {
    return with([&](const auto& net) { return net.devices(count); });
  }
  Result properties(int device, PropertiesV12* out) const;
  Result listen(int device, void* handle, void** comm) const;
  Result connect(int device, void* handle, void** comm) const;
  Result accept(void* listener, void** comm) const {
    return with([&](const auto& net) { return net.accept(listener, comm, nullptr); });
  }
  Result register_memory(void* comm, void* data, size_t size, void** memory,
                         int type = kHostPointer) const {
    return with(
        [&](const auto& net) { return net.register_memory(comm, data, size, type, memory); });
  }
  Result register_dma_buf(void* comm, void* data, size_t size, uint64_t offset, int fd,
                          void** memory) const {
    return with([&](const auto& net) {
      return net.register_dma_buf(comm, data, size, kCudaPointer, offset, fd, memory);
    });
  }
  Result deregister(void* comm, void* memory) const {
    return with([&](const auto& net) { return net.deregister(comm, memory); });
  }
  Result send(void* comm, void* data, size_t size, int tag, void* memory, void** request) const;
  // `optional`: NCCL's word that the receiver looks at the lines itself.
  Result receive(void* comm, int count, void** data, size_t* sizes, int* tags, void** memory,
                 void** request, bool optional = false) const;
  // A receive that is a group of its own.
  Result receive_one(void* comm, void* data, size_t size, int tag, void* memory,
                     void** request) const {
    return receive(comm, 1, &data, &size, &tag, &memory, request);
  }
  Result flush(void* comm, int count, void** data, int* sizes, void** memory,
               void** request) const {
    return with(
        [&](const auto& net) { return net.flush(comm, count, data, sizes, memory, request); });
  }
  Result test(void* request, int* done, int* sizes) const {
    return with([&](const auto& net) { return net.test(request, done, sizes); });
  }
  Result close_send(void* comm) const {
    return with([&](const auto& net) { return net.close_send(comm); });
  }
  Result close_receive(void* comm) const {
    return with([&](const auto& net) { return net.close_receive(comm); });
  }
  Result close_listen(void* comm) const {
    return with([&](const auto& net) { return net.close_listen(comm); });
  }
  Result finalize() const;

 private:
  const void* table_;
  int version_;
  std::shared_ptr<void> keep_;
  void* context_ = nullptr;
};

std::ostream& operator<<(std::ostream& out, Result result);

}  // namespace baton::nccl
