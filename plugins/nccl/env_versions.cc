// ncclEnvPlugin_v1 and v2: NCCL asks here for its settings before it reads any. What the
// environment has counts; where that names no network, this library names itself. So one variable,
// NCCL_ENV_PLUGIN with the path of this library, opens all doors.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "plugins/nccl/plugin.h"

namespace baton::nccl {
namespace {

struct EnvV1 {
  const char* name;
  Result (*init)(uint8_t major, uint8_t minor, uint8_t patch, const char* suffix);
  Result (*finalize)();
  const char* (*get)(const char* name);
};
struct EnvV2 {
  const char* name;
  Result (*init)(uint8_t major, uint8_t minor, uint8_t patch, const char* suffix, Logger log);
  Result (*finalize)();
  const char* (*get)(const char* name);
};
static_assert(sizeof(EnvV1) == 32 && sizeof(EnvV2) == 32 && offsetof(EnvV2, get) == 24);

// Stays for the life of the process, as NCCL wants of what get() returns.
const char* own_path() {
  static const std::string path = [] {
    Dl_info info{};
    const bool found = dladdr(reinterpret_cast<const void*>(&own_path), &info) != 0;
    return std::string(found && info.dli_fname != nullptr ? info.dli_fname : "");
  }();
  return path.empty() ? nullptr : path.c_str();
}

const char* get_env(const char* name) {
  if (name == nullptr) return nullptr;
  const char* const value = std::getenv(name);
  if (value != nullptr) return value;
  return std::strcmp(name, "NCCL_NET_PLUGIN") == 0 ? own_path() : nullptr;
}

Result init_env_v2(uint8_t major, uint8_t minor, uint8_t patch, const char* /*suffix*/,
                   Logger log) {
  Plugin::get().set_logger(log);
  if (log != nullptr) {
    log(LogLevel::kInfo, kInitLog | kEnvLog, __FILE__, __LINE__,
        "ENV/Baton : opened by NCCL %d.%d.%d", major, minor, patch);
  }
  return Result::kSuccess;
}
Result init_env_v1(uint8_t major, uint8_t minor, uint8_t patch, const char* suffix) {
  return init_env_v2(major, minor, patch, suffix, nullptr);
}
Result finalize_env() { return Result::kSuccess; }

}  // namespace

extern "C" const EnvV1 ncclEnvPlugin_v1 = {kPluginName, init_env_v1, finalize_env, get_env};
extern "C" const EnvV2 ncclEnvPlugin_v2 = {kPluginName, init_env_v2, finalize_env, get_env};

}  // namespace baton::nccl
