// Finds the CUDA driver, and says in words what it answers.
#include "gpudirect/driver.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace baton::gpudirect {
namespace {

// Its cuGetProcAddress; every entry that has no substitute is older.
constexpr int kLeastVersion = 11030;

std::string dotted(int version) {
  return absl::StrFormat("%d.%d", version / 1000, version % 1000 / 10);
}

// An old driver's call, in the shape of today's.
OldGetProcAddress old_get = nullptr;
Result get_by_old(const char* name, void** entry, int version, unsigned long long flags, int*) {
  return old_get(name, entry, version, flags);
}

class Loader {
 public:
  explicit Loader(GetProcAddress get) : get_(get) {}

  template <typename Function>
  void find(Function*& entry, const char* name, int version, bool optional) {
    void* found = nullptr;
    int why = 0;
    if (get_(name, &found, version, 0, &why) != kSuccess) found = nullptr;
    entry = reinterpret_cast<Function*>(found);
    if (found != nullptr || optional) return;
    missing_.push_back(why == kSymbolVersionNotSufficient
                           ? absl::StrCat(name, " as of CUDA ", dotted(version))
                           : std::string(name));
  }
  const std::vector<std::string>& missing() const { return missing_; }

 private:
  GetProcAddress get_;
  std::vector<std::string> missing_;
};

}  // namespace

absl::StatusOr<Driver> load_driver(GetProcAddress get) {
  Driver driver;
  Loader loader(get);
#define BATON_FIND(name, version, parameters) loader.find(driver.name, #name, version, false);
#define BATON_FIND_OPTIONAL(name, version, parameters) \
  loader.find(driver.name, #name, version, true);
  BATON_DRIVER_ENTRIES(BATON_FIND)
  BATON_DRIVER_OPTIONAL(BATON_FIND_OPTIONAL)
#undef BATON_FIND
#undef BATON_FIND_OPTIONAL
  if (driver.cuDriverGetVersion != nullptr) driver.cuDriverGetVersion(&driver.version);
  if (!loader.missing().empty()) {
    return absl::UnavailableError(absl::StrFormat(
        "no GPU memory: the CUDA driver (%s) lacks %s; install one for CUDA %s or newer",
        driver.version > 0 ? dotted(driver.version) : "of unknown version",
        absl::StrJoin(loader.missing(), ", "), dotted(kLeastVersion)));
  }
  if (const Result result = driver.cuInit(0); result != kSuccess) {
    const char* remedy =
        result == kNoDevice ? "this machine has no CUDA device that this process may use (check "
                              "CUDA_VISIBLE_DEVICES and nvidia-smi)"
        : result == kSystemDriverMismatch
            ? "the driver's library and kernel module differ: reboot, or load the matching module"
            : "run nvidia-smi to see whether the driver works at all";
    return absl::UnavailableError(absl::StrCat(
        "no GPU memory: ", driver_status(driver, result, "cuInit").message(), "; ", remedy));
  }
  return driver;
}

absl::StatusOr<Driver> load_driver(const char* library) {
  // Stays loaded: its threads would outlive a dlclose().
  void* const loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) {
    return absl::UnavailableError(absl::StrFormat(
        "no GPU memory: there is no CUDA driver (%s); on a machine with a GPU install NVIDIA's",
        dlerror()));
  }
  if (void* get = dlsym(loaded, "cuGetProcAddress_v2"); get != nullptr) {
    return load_driver(reinterpret_cast<GetProcAddress>(get));
  }
  if (void* get = dlsym(loaded, "cuGetProcAddress"); get != nullptr) {
    old_get = reinterpret_cast<OldGetProcAddress>(get);
    return load_driver(get_by_old);
  }
  return absl::UnavailableError(
      absl::StrFormat("no GPU memory: %s has no cuGetProcAddress; install a driver for CUDA %s or "
                      "newer",
                      library, dotted(kLeastVersion)));
}

absl::StatusOr<const Driver*> machine_driver() {
  static const absl::StatusOr<Driver> driver = load_driver();
  if (!driver.ok()) return driver.status();
  return &*driver;
}

// It is asked of every address, and looking for a library opens files: so only when libraries have
// come since the last look. Twice how many had come then, plus one if the driver's was among them.
bool driver_in_process() {
  static std::atomic<uint64_t> last{UINT64_MAX};
  uint64_t loads = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<uint64_t*>(out) = info->dlpi_adds;
        return 1;
      },
      &loads);
  const uint64_t known = last.load(std::memory_order_relaxed);
  if (known != UINT64_MAX && known / 2 == loads) return known % 2 != 0;
  void* const loaded = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (loaded != nullptr) dlclose(loaded);
  last.store(2 * loads + (loaded != nullptr ? 1 : 0), std::memory_order_relaxed);
  return loaded != nullptr;
}

bool is_loss(Result result) {
  switch (result) {
    case kDeinitialized:
    case kUncorrectableEcc:
    case kUncorrectableNvlink:
    case kContained:
    case kIllegalAddress:
    case kLaunchTimeout:
    case kContextIsDestroyed:
    case kAssert:
    case kHardwareStackError:
    case kIllegalInstruction:
    case kMisalignedAddress:
    case kInvalidAddressSpace:
    case kInvalidPc:
    case kLaunchFailed:
    case kTensorMemoryLeak:
    case kNotInitialized:  // in a process that was forked
      return true;
    default:
      return false;
  }
}

std::string words_of_loss(int device) {
  return absl::StrCat(device < 0 ? std::string("the GPU") : absl::StrCat("CUDA device ", device),
                      " is lost to this process: restart the process");
}

absl::Status driver_status(const Driver& driver, Result result, std::string_view what, int device) {
  if (result == kSuccess) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  const std::string said = absl::StrFormat(
      "%s: %s (%s)", what, text != nullptr ? text : "an error without a description",
      name != nullptr ? name : absl::StrCat(static_cast<int>(result)));
  if (result == kNotInitialized) return absl::FailedPreconditionError(absl::StrCat(said, kForked));
  if (is_loss(result)) {
    return absl::AbortedError(absl::StrCat(said, "; ", words_of_loss(device)));
  }
  switch (result) {
    case kInvalidValue:
    case kInvalidHandle:
      return absl::InvalidArgumentError(said);
    case kOutOfMemory:
      return absl::ResourceExhaustedError(said);
    case kNotSupported:
      return absl::UnimplementedError(said);
    case kNotPermitted:
      return absl::PermissionDeniedError(said);
    case kNoDevice:
    case kInvalidDevice:
      return absl::NotFoundError(said);
    default:
      return absl::InternalError(said);
  }
}

}  // namespace baton::gpudirect
