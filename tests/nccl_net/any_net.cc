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

// What the cases look at.
template <typename Properties>
void copy_common(const Properties& from, PropertiesV12& to) {
  to.name = from.name;
  to.pointers = from.pointers;
  to.speed = from.speed;
  to.max_comms = from.max_comms;
  to.max_receives = from.max_receives;
  to.device_type = from.device_type;
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
