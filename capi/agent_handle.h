// baton_agent and the other handles of the C interface, defined: what they own, and how a status
// becomes the result that C sees.
#pragma once

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "capi/include/baton/baton.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/agent_kv.h"
#include "kvtransfer/kv_session.h"
#include "transport/worker.h"

struct baton_agent {
  std::unique_ptr<baton::kvtransfer::Agent> agent;
  std::shared_ptr<baton::kvtransfer::KvSession> session;  // is closed before the agent goes
  std::mutex mutex;
  // Taken from the agent and not handed out: there was no memory for that, or it was not asked for.
  std::deque<baton::kvtransfer::AgentMessage> inbox;
  std::deque<baton::kvtransfer::AgentLostMessage> lost;
};

namespace baton::capi {

// The subject of a status, because two codes depend on the call. AlreadyExists: a transfer that
// runs, a port in use, or a name, job or load that is open. Unavailable: the other agent, or
// something on this machine that a new agent needs.
enum class About : uint8_t { kOther, kTransfer, kMaking };

// Fills in the caller's error and returns its number.
int32_t result_of(const absl::Status& status, baton_error* error, About about = About::kOther);
// The other way round: the code that a caller means by the number of a result.
absl::StatusCode code_of(int32_t result);
int32_t invalid(const char* what, baton_error* error);
// A copy for the caller. No memory: ResourceExhausted.
absl::Status give(std::string_view text, baton_bytes* out);
absl::Status give_made(const absl::StatusOr<std::string>& text, baton_bytes* out);
// Several, all or none; those whose place is NULL are not wanted.
struct Gift {
  std::string_view text;
  baton_bytes* out;
};
absl::Status give_all(std::initializer_list<Gift> gifts);

// A struct of the caller's that begins with its size: filled as far as the caller knows it.
template <typename T>
bool write_sized(const T& value, T* out) {
  if (out == nullptr || out->size < sizeof out->size) return false;
  const size_t known = out->size < sizeof value ? out->size : sizeof value;
  T copy = value;
  copy.size = out->size;
  __builtin_memcpy(out, &copy, known);
  return true;
}

// Such a struct of `size` bytes gets its defaults.
template <typename T>
void init_sized(const T& defaults, T* out, size_t size) {
  if (out == nullptr || size < sizeof out->size) return;
  out->size = size;
  write_sized(defaults, out);
}

// The last thing that a call does with one. `wrong`: what to say where it has no size.
template <typename T>
int32_t give_sized(const T& value, T* out, const char* wrong, baton_error* error) {
  return write_sized(value, out) ? result_of(absl::OkStatus(), error) : invalid(wrong, error);
}

// The other way round: what a struct of the caller's says, and `out` for what it does not know. A
// size that no compiler gives a struct would end in the middle of a pointer: it is not believed.
template <typename T>
bool read_sized(const T* from, T& out) {
  if (from == nullptr || from->size < sizeof from->size || from->size % alignof(T) != 0) {
    return false;
  }
  const size_t known = from->size < sizeof out ? from->size : sizeof out;
  __builtin_memcpy(&out, from, known);
  return true;
}

// Not of a parent.
inline bool usable(const baton_agent* agent) {
  return agent != nullptr && agent->agent->usable().ok();
}

// For the time in which an agent or a connector is made: threads that are made meanwhile leave the
// program's signals to the program's threads, but for those that say what the thread itself has
// done, and the profiler's.
class Making {
 public:
  Making() {
    sigset_t most;
    sigfillset(&most);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) {
      sigdelset(&most, own);
    }
    pthread_sigmask(SIG_BLOCK, &most, &before_);
  }
  ~Making() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;

 private:
  sigset_t before_;
};

// A body returns a status, or the number of a result, or nothing: then it has gone well.
inline int32_t result_of(int32_t result, baton_error*) { return result; }

// Nothing that the library throws gets out: C has no use for it.
template <typename Body>
int32_t caught(baton_error* error, Body&& body) {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Body>>) {
      body();
      return result_of(absl::OkStatus(), error);
    } else {
      return result_of(body(), error);
    }
  } catch (const std::bad_alloc&) {
    return result_of(absl::ResourceExhaustedError("no memory is left"), error);
  } catch (...) {
    return result_of(absl::UnknownError("an unexpected exception was thrown"), error);
  }
}

// body(), of a handle that this process has made. The texts: what is wrong where it has not.
template <typename Handle, typename Body>
int32_t with_own(const Handle* handle, const char* missing, const char* forked, baton_error* error,
                 Body&& body) {
  if (handle == nullptr) return invalid(missing, error);
  if (handle->made_here.elsewhere()) return invalid(forked, error);
  return caught(error, body);
}

template <typename Body>
int32_t guarded(const baton_agent* agent, baton_error* error, Body&& body) {
  if (agent == nullptr) return invalid("agent is NULL: pass what baton_agent_create() made", error);
  if (const absl::Status good = agent->agent->usable(); !good.ok()) return result_of(good, error);
  return caught(error, body);
}

// A list that is said to have something and is not there, or more than a process has addresses for
// (47 bits): -1, say.
template <typename T>
bool is_missing(const T* list, size_t count) {
  size_t row = 1;
  if constexpr (!std::is_void_v<T>) row = sizeof(T);
  return (list == nullptr && count > 0) || count > (size_t{1} << 47) / row;
}
inline int32_t missing(baton_error* error) {
  return invalid("a list is NULL although its count is not 0, or it is longer than memory", error);
}
// The first thing that a call does with what is to come out of it: where it fails, that is nothing.
// NULL: it is not wanted.
template <typename... Out>
void give_nothing(Out*... out) {
  ((out == nullptr ? void() : void(*out = Out())), ...);
}

// The same where the call is for nothing else. False: there is no place for it.
template <typename Out>
bool cleared(Out* out) {
  give_nothing(out);
  return out != nullptr;
}
// How long a list is, and as much of it as there is room for. NULL: it is not wanted.
template <typename T>
void give_list(const std::vector<T>& list, T* out, size_t room, size_t* count) {
  if (count != nullptr) *count = list.size();
  if (out != nullptr) std::copy_n(list.begin(), std::min(room, list.size()), out);
}

inline constexpr char kNoHandle[] = "out is NULL: pass the address for the handle";

inline absl::Span<const kvtransfer::Descriptor> descriptors(const baton_descriptor* list,
                                                            size_t count) {
  static_assert(sizeof(baton_descriptor) == sizeof(kvtransfer::Descriptor));
  if (list == nullptr) count = 0;
  return {reinterpret_cast<const kvtransfer::Descriptor*>(list), count};
}
inline absl::Span<const kvtransfer::StridedDescriptor> rows(const baton_strided* list,
                                                            size_t count) {
  static_assert(sizeof(baton_strided) == sizeof(kvtransfer::StridedDescriptor));
  if (list == nullptr) count = 0;
  return {reinterpret_cast<const kvtransfer::StridedDescriptor*>(list), count};
}
inline std::string_view view(const char* text) {
  return text == nullptr ? std::string_view() : std::string_view(text);
}
inline std::string_view view(const void* bytes, size_t size) {
  return bytes == nullptr ? std::string_view()
                          : std::string_view(static_cast<const char*>(bytes), size);
}
inline kvtransfer::MemoryKind kind(int32_t memory) {
  // Numbers that are none are refused by the agent, with their number.
  return static_cast<kvtransfer::MemoryKind>(memory < 0 || memory > 255 ? 255 : memory);
}
inline std::optional<Op> op_of(int32_t op) {
  if (op == BATON_WRITE) return Op::kWrite;
  if (op == BATON_READ) return Op::kRead;
  return std::nullopt;
}
inline int32_t no_such_op(baton_error* error) {
  return invalid("op must be BATON_WRITE or BATON_READ", error);
}
// The number of what `make` makes. Nothing is made that no caller could give back.
template <typename Make>
absl::Status give_id(Make&& make, uint64_t* out) {
  if (out == nullptr) {
    return absl::InvalidArgumentError("out is NULL: pass the address for the number");
  }
  const auto id = make();
  *out = id.ok() ? id->value : 0;
  return id.status();
}
inline Time timeout_of(int64_t nanoseconds) {
  return nanoseconds < 0 ? kNever : Time(std::chrono::nanoseconds(nanoseconds));
}
// One that C leaves at 0 for the default.
inline void set_time(int64_t nanoseconds, Time& out) {
  if (nanoseconds != 0) out = timeout_of(nanoseconds);
}

}  // namespace baton::capi

// baton_kv_layout, defined: a layout and where its buffers lie.

struct baton_kv_layout {
  baton::kvtransfer::KvPlacement cache;
};

// Converts the worker options of agents and connectors from C to C++.

namespace baton::capi {

// NULL or 0: the default.
struct WorkerWords {
  const char* providers;  // with commas between
  const char* require;
  const char* key_file;
  const char* listen_host;
  uint16_t listen_port;
  uint32_t max_transfers;
  const char* settings;  // likewise
  const char* advertise;
};
absl::StatusOr<WorkerOptions> worker_options(const WorkerWords& from);

}  // namespace baton::capi
