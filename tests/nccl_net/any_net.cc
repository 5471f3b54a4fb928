// Calls a plugin of any version, as NCCL does.
#include "tests/nccl_net/any_net.h"

#include <dlfcn.h>

#include <cstdarg>

namespace baton::nccl {
namespace {

std::mutex log_mutex;
std::vector<std::pair<LogLevel, std::string>> logged;

void log_line(LogLevel level, unsigned long /*subsystems*/, const char* /*file*/, int /*line*/,
              const char* format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const std::lock_guard lock(log_mutex);
  logged.emplace_back(level, text);
}

template <typename Net>
constexpr bool kSinceV10 = !std::is_same_v<Net, NetV8> && !std::is_same_v<Net, NetV9>;
template <typename Net>
constexpr bool kSinceV11 = std::is_same_v<Net, NetV11> || std::is_same_v<Net, NetV12>;

constexpr size_t kMostV8 = size_t{1} << 30;

template <typename Properties>
void copy_common(const Properties& from, PropertiesV12& to) {
  to.name = from.name;
  to.pci_path = from.pci_path;
  to.guid = from.guid;
  to.pointers = from.pointers;
  to.registered_globally = from.registered_globally;
  to.speed = from.speed;
  to.port = from.port;
  to.latency = from.latency;
  to.max_comms = from.max_comms;
  to.max_receives = from.max_receives;
  to.device_type = from.device_type;
  to.device_version = from.device_version;
}

}  // namespace

void NetLog::forget() {
  const std::lock_guard lock(log_mutex);
  logged.clear();
}

std::vector<std::string> NetLog::lines(LogLevel level) {
  const std::lock_guard lock(log_mutex);
  std::vector<std::string> out;
  for (const auto& [of, line] : logged) {
    if (of == level) out.push_back(line);
  }
  return out;
}

Logger NetLog::logger() { return log_line; }

std::ostream& operator<<(std::ostream& out, Result result) {
  return out << "ncclResult_t " << static_cast<int>(result);
}

absl::StatusOr<AnyNet> AnyNet::load(const std::string& path, int version) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absl::NotFoundError(dlerror());
  std::shared_ptr<void> keep(library, [](void* open) { dlclose(open); });
  for (int v = version == 0 ? 12 : version; v >= (version == 0 ? 8 : version); --v) {
    const void* table = dlsym(library, absl::StrCat("ncclNetPlugin_v", v).c_str());
    if (table != nullptr) return AnyNet(table, v, std::move(keep));
  }
  return absl::NotFoundError(absl::StrCat(path, " has no ncclNetPlugin of that version"));
}

std::string AnyNet::name() const {
  return with([](const auto& net) { return std::string(net.name); });
}

Result AnyNet::init(Logger log) {
  return with([&]<typename Net>(const Net& net) {
    if constexpr (kSinceV11<Net>) {
      NetConfig config{-1};
      return net.init(&context_, 7, &config, log, nullptr);
    } else if constexpr (kSinceV10<Net>) {
      return net.init(log, nullptr);
    } else {
      return net.init(log);
    }
  });
}

Result AnyNet::devices(int* count) const {
  return with([&](const auto& net) { return net.devices(count); });
}

Result AnyNet::properties(int device, PropertiesV12* out) const {
  *out = {};
  return with([&]<typename Net>(const Net& net) {
    if constexpr (std::is_same_v<Net, NetV12>) {
      return net.properties(device, out);
    } else if constexpr (std::is_same_v<Net, NetV11>) {
      PropertiesV11 old{};
      const Result result = net.properties(device, &old);
      copy_common(old.common, *out);
      out->max_p2p_bytes = old.common.max_p2p_bytes;
      return result;
    } else if constexpr (std::is_same_v<Net, NetV8>) {
      PropertiesV8 old{};
      const Result result = net.properties(device, &old);
      copy_common(old, *out);
      out->max_p2p_bytes = kMostV8;
      return result;
    } else {
      PropertiesV9 old{};
      const Result result = net.properties(device, &old);
      copy_common(old, *out);
      out->max_p2p_bytes = old.max_p2p_bytes;
      return result;
    }
  });
}

Result AnyNet::listen(int device, void* handle, void** comm) const {
  return with([&]<typename Net>(const Net& net) {
    if constexpr (kSinceV11<Net>) {
      return net.listen(context_, device, handle, comm);
    } else {
      return net.listen(device, handle, comm);
    }
  });
}

Result AnyNet::connect(int device, void* handle, void** comm) const {
  return with([&]<typename Net>(const Net& net) {
    if constexpr (kSinceV11<Net>) {
      return net.connect(context_, device, handle, comm, nullptr);
    } else if constexpr (kSinceV10<Net>) {
      NetConfig config{-1};
      return net.connect(device, &config, handle, comm, nullptr);
    } else {
      return net.connect(device, handle, comm, nullptr);
    }
  });
}

Result AnyNet::accept(void* listener, void** comm) const {
  return with([&](const auto& net) { return net.accept(listener, comm, nullptr); });
}

Result AnyNet::register_memory(void* comm, void* data, size_t size, void** memory, int type) const {
  return with([&](const auto& net) { return net.register_memory(comm, data, size, type, memory); });
}

Result AnyNet::register_dma_buf(void* comm, void* data, size_t size, uint64_t offset, int fd,
                                void** memory) const {
  return with([&](const auto& net) {
    return net.register_dma_buf(comm, data, size, kCudaPointer, offset, fd, memory);
  });
}

Result AnyNet::deregister(void* comm, void* memory) const {
  return with([&](const auto& net) { return net.deregister(comm, memory); });
}

Result AnyNet::send(void* comm, void* data, size_t size, int tag, void* memory,
                    void** request) const {
  return with([&]<typename Net>(const Net& net) {
    if constexpr (kSinceV10<Net>) {
      return net.send(comm, data, size, tag, memory, nullptr, request);
    } else if constexpr (std::is_same_v<Net, NetV8>) {
      return net.send(comm, data, static_cast<int>(size), tag, memory, request);
    } else {
      return net.send(comm, data, size, tag, memory, request);
    }
  });
}

Result AnyNet::receive(void* comm, int count, void** data, size_t* sizes, int* tags, void** memory,
                       void** request, bool optional) const {
  *request = optional && version_ > 8 ? reinterpret_cast<void*>(1) : nullptr;
  return with([&]<typename Net>(const Net& net) {
    if constexpr (kSinceV10<Net>) {
      void* profiled[8] = {};
      return net.receive(comm, count, data, sizes, tags, memory, profiled, request);
    } else if constexpr (std::is_same_v<Net, NetV8>) {
      std::vector<int> ints(sizes, sizes + std::clamp(count, 0, 9));  // callers have no more
      return net.receive(comm, count, data, ints.data(), tags, memory, request);
    } else {
      return net.receive(comm, count, data, sizes, tags, memory, request);
    }
  });
}

Result AnyNet::flush(void* comm, int count, void** data, int* sizes, void** memory,
                     void** request) const {
  return with(
      [&](const auto& net) { return net.flush(comm, count, data, sizes, memory, request); });
}

Result AnyNet::test(void* request, int* done, int* sizes) const {
  return with([&](const auto& net) { return net.test(request, done, sizes); });
}

Result AnyNet::close_send(void* comm) const {
  return with([&](const auto& net) { return net.close_send(comm); });
}

Result AnyNet::close_receive(void* comm) const {
  return with([&](const auto& net) { return net.close_receive(comm); });
}

Result AnyNet::close_listen(void* comm) const {
  return with([&](const auto& net) { return net.close_listen(comm); });
}

Result AnyNet::finalize() const {
  return with([&]<typename Net>(const Net& net) {
    if constexpr (kSinceV11<Net>) {
      return net.finalize(context_);
    } else {
      return Result::kSuccess;
    }
  });
}

}  // namespace baton::nccl
