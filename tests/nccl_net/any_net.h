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
 public:
  // A table of the plugin interface, which `keep` keeps loaded.
  AnyNet(const void* table, int version, std::shared_ptr<void> keep = {})
      : table_(table), version_(version), keep_(std::move(keep)) {}
  // NotFound: there is no such file, or it has no ncclNetPlugin_v<version>. 0: its newest.
  static absl::StatusOr<AnyNet> load(const std::string& path, int version = 0);

  int version() const { return version_; }
  std::string name() const;
  Result init(Logger log = NetLog::logger());
  Result devices(int* count) const;
  Result properties(int device, PropertiesV12* out) const;
  Result listen(int device, void* handle, void** comm) const;
  Result connect(int device, void* handle, void** comm) const;
  Result accept(void* listener, void** comm) const;
  Result register_memory(void* comm, void* data, size_t size, void** memory,
                         int type = kHostPointer) const;
  Result register_dma_buf(void* comm, void* data, size_t size, uint64_t offset, int fd,
                          void** memory) const;
  Result deregister(void* comm, void* memory) const;
  Result send(void* comm, void* data, size_t size, int tag, void* memory, void** request) const;
  // `optional`: NCCL's word that the receiver looks at the lines itself.
  Result receive(void* comm, int count, void** data, size_t* sizes, int* tags, void** memory,
                 void** request, bool optional = false) const;
  // A receive that is a group of its own.
  Result receive_one(void* comm, void* data, size_t size, int tag, void* memory,
                     void** request) const {
    return receive(comm, 1, &data, &size, &tag, &memory, request);
  }
  Result flush(void* comm, int count, void** data, int* sizes, void** memory, void** request) const;
  Result test(void* request, int* done, int* sizes) const;
  Result close_send(void* comm) const;
  Result close_receive(void* comm) const;
  Result close_listen(void* comm) const;
  Result finalize() const;

 private:
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

  const void* table_;
  int version_;
  std::shared_ptr<void> keep_;
  void* context_ = nullptr;
};

std::ostream& operator<<(std::ostream& out, Result result);

}  // namespace baton::nccl
