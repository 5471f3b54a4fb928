// Puts a call between whoever calls the driver and the driver, which writes it down.
#include "gpudirect/driver.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <tuple>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kRecordedBoxes = 8;  // of a batch: a line has an end

struct Recording {
  std::mutex mutex;
  std::FILE* file = nullptr;
  int threads = 0;  // that have made a call
  Driver below;
};
Recording& recording() {
  static auto* const the = new Recording;
  return *the;
}

// The calling thread's; a context is current to one of them.
int thread_number(Recording& recording) {
  thread_local int number = 0;
  if (number == 0) number = ++recording.threads;
  return number;
}

template <typename T>
constexpr bool kOpaque =
    std::is_same_v<T, Context> || std::is_same_v<T, Stream> || std::is_same_v<T, Event> ||
    std::is_same_v<T, Module> || std::is_same_v<T, Function>;

template <typename T>
std::string text(const T& value) {
  if constexpr (std::is_same_v<T, unsigned long long>) {
    return absl::StrFormat("%#x", value);
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    return absl::StrCat(static_cast<int64_t>(value));
  } else if constexpr (kOpaque<T> || std::is_same_v<T, void*>) {
    return absl::StrFormat("%#x", reinterpret_cast<uintptr_t>(value));
  } else if constexpr (std::is_same_v<T, const AllocationProperties*>) {
    return absl::StrFormat("{%d,%d,%d}", value->requested_handle_types, value->location.id,
                           value->flags.rdma_capable);
  } else if constexpr (std::is_same_v<T, const AccessDescription*>) {
    return absl::StrFormat("{%d,%d}", value->location.id, value->flags);
  } else if constexpr (std::is_same_v<T, const PlaneCopy*>) {
    return absl::StrFormat("{%#x,%u,%#x,%u,%u,%u}", value->from.device, value->from.pitch,
                           value->to.device, value->to.pitch, value->width, value->height);
  } else {
    return "-";
  }
}

// What a call has left where an argument points.
template <typename T>
std::string answer(T* where, Result result) {
  if (result != kSuccess || where == nullptr) return ">-";
  return absl::StrCat(">", text(*where));
}
template <typename T>
constexpr bool kAnswer = false;
template <typename T>
constexpr bool kAnswer<T*> = !std::is_const_v<T> && !std::is_void_v<T> &&
                             !std::is_same_v<T, char> && (std::is_arithmetic_v<T> || kOpaque<T>);

bool leaves_descriptor(std::string_view name) {
  return name == "cuMemExportToShareableHandle" || name == "cuMemGetHandleForAddressRange";
}

template <auto Entry>
struct Recorded;
template <typename... Args, Result (*Driver::*Entry)(Args...)>
struct Recorded<Entry> {
  static inline const char* name = nullptr;

  static Result call(Args... args) {
    const Result result = (recording().below.*Entry)(args...);
    std::string line = absl::StrCat(name, " ", static_cast<int>(result));
    if constexpr (std::is_same_v<std::tuple<Args...>,
                                 std::tuple<unsigned, PointerAttribute*, void**, DevicePointer>>) {
      pointer(line, result, args...);
    } else if constexpr (std::is_same_v<std::tuple<Args...>,
                                        std::tuple<size_t, BoxCopy*, unsigned long long, Stream>>) {
      boxes(line, args...);
    } else {
      bool first = true;
      const auto one = [&](const auto& arg) {
        using T = std::decay_t<decltype(arg)>;
        if constexpr (kAnswer<T>) {
          absl::StrAppend(&line, " ", answer(arg, result));
        } else if constexpr (std::is_same_v<T, void*>) {
          if (first && leaves_descriptor(name)) {
            absl::StrAppend(&line, " ", answer(static_cast<int*>(arg), result));
          } else {
            absl::StrAppend(&line, " ", text(arg));
          }
        } else {
          absl::StrAppend(&line, " ", text(arg));
        }
        first = false;
      };
      (one(args), ...);
    }
    Recording& to = recording();
    const std::lock_guard lock(to.mutex);
    if (to.file != nullptr) {
      std::fprintf(to.file, "%d %s\n", thread_number(to), line.c_str());
      std::fflush(to.file);
    }
    return result;
  }

  // How many, and the first few of them.
  static void boxes(std::string& line, size_t count, const BoxCopy* boxes, unsigned long long flags,
                    Stream stream) {
    absl::StrAppend(&line, " ", text(count), " ", text(flags), " ", text(stream));
    for (size_t i = 0; i < std::min(count, kRecordedBoxes); ++i) {
      const BoxCopy& box = boxes[i];
      absl::StrAppendFormat(&line, " {%#x,%u,%u,%#x,%u,%u,%u,%u,%u}", box.from.at, box.from.pitch,
                            box.from.height, box.to.at, box.to.pitch, box.to.height, box.width,
                            box.height, box.depth);
    }
  }

  // Each attribute and what was said of it; a boolean may be one byte or four.
  static void pointer(std::string& line, Result result, unsigned count,
                      const PointerAttribute* attributes, void** values, DevicePointer at) {
    absl::StrAppend(&line, " ", text(at));
    for (unsigned i = 0; i < count; ++i) {
      uint64_t value = 0;
      switch (attributes[i]) {
        case kPointerContext:
        case kPointerOfKernels:
        case kPointerBufferId:
        case kPointerMappingBase:
        case kPointerMappingSize:
          std::memcpy(&value, values[i], 8);
          break;
        case kPointerIsManaged:
          std::memcpy(&value, values[i], 1);
          break;
        default: {
          int small = 0;
          std::memcpy(&small, values[i], 4);
          value = static_cast<uint64_t>(small);
        }
      }
      absl::StrAppend(&line, " ", static_cast<int>(attributes[i]), "=",
                      result == kSuccess ? absl::StrFormat("%#x", value) : "-");
    }
  }
};

}  // namespace

absl::StatusOr<Driver> record_calls(const Driver& driver, const std::string& file) {
  Recording& to = recording();
  const std::lock_guard lock(to.mutex);
  if (to.file != nullptr) {
    return absl::FailedPreconditionError("the driver's calls are being recorded already");
  }
  to.file = std::fopen(file.c_str(), "we");
  if (to.file == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the driver's calls cannot be recorded to %s: %s", file, strerror(errno)));
  }
  std::fprintf(to.file, "baton-gpu-trace 2 %d\n", driver.version);
  to.below = driver;
  Driver table = driver;
#define BATON_RECORD(entry, version, parameters)  \
  if (driver.entry != nullptr) {                  \
    Recorded<& Driver::entry>::name = #entry;     \
    table.entry = Recorded<&Driver::entry>::call; \
  }
  BATON_DRIVER_ENTRIES(BATON_RECORD)
  BATON_DRIVER_OPTIONAL(BATON_RECORD)
#undef BATON_RECORD
  // Words of errors are asked for where one is told; they are no part of what was done.
  table.cuGetErrorName = driver.cuGetErrorName;
  table.cuGetErrorString = driver.cuGetErrorString;
  return table;
}

void stop_recording() {
  Recording& to = recording();
  const std::lock_guard lock(to.mutex);
  if (to.file != nullptr) std::fclose(to.file);
  to.file = nullptr;
}

}  // namespace baton::gpudirect
