// The fake as a whole: what its tests see of it, and the calls about devices and contexts.
#include "tests/gpudirect/fake/fake_driver.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/gpudirect/fake/entries.h"

namespace baton::gpudirect {
namespace {

FakeDriver* the_fake = nullptr;
thread_local std::vector<Context> current_contexts;
thread_local int progress_scopes = 0;
thread_local int default_stream_scopes = 0;
thread_local int foreign_stream_scopes = 0;
thread_local int capture_mode = kCaptureGlobal;
std::atomic<uintptr_t> threads{0};  // that used their default stream
// From here on no handles that anybody is given: the queues of default streams.
constexpr uintptr_t kDefaultQueues = uintptr_t{1} << 60;

bool is_default_queue(Stream stream) {
  return reinterpret_cast<uintptr_t>(stream) >= kDefaultQueues;
}

}  // namespace

Attributes h100() {
  Attributes out = {{kComputeCapabilityMajor, 9},
                    {kComputeCapabilityMinor, 0},
                    {kMultiprocessorCount, 132},
                    {kAsyncEngineCount, 3},
                    {kComputeMode, 0},
                    {kRdmaFlushWritesOptions, 1},
                    {kRdmaWritesOrdering, 200},
                    {kHostNumaId, 0},
                    {kMemSyncDomains, 4},
                    {kMpsEnabled, 0},
                    {kHandleTypeFabric, 0},
                    {kHostAllocDmaBuf, 0}};
  for (const DeviceAttribute yes :
       {kDmaBufSupported, kRdmaSupported, kRdmaWithVirtualMemory, kCanFlushRemoteWrites,
        kVirtualMemoryManagement, kHandleTypePosixFd, kIpcEvents, kMemoryPools, kStreamMemOps64,
        kStreamWaitValueNor, kHostRegisterSupported, kCanUseHostPointerForRegisteredMemory}) {
    out[yes] = 1;
  }
  return out;
}
Attributes without_dma_buf() {
  Attributes out = h100();
  out[kDmaBufSupported] = 0;
  return out;
}
Attributes without_virtual_memory() {
  Attributes out = h100();
  out[kVirtualMemoryManagement] = out[kHandleTypePosixFd] = out[kRdmaWithVirtualMemory] = 0;
  return out;
}
Attributes unordered_writes() {
  Attributes out = h100();
  out[kRdmaWritesOrdering] = kOrderedForNobody;
  return out;
}
Attributes one_copy_engine() {
  Attributes out = h100();
  out[kAsyncEngineCount] = 1;
  return out;
}

Attributes wsl() {
  Attributes out = without_dma_buf();
  out[kHandleTypePosixFd] = out[kIpcEvents] = 0;
  return out;
}

FakeDriver::FakeDriver(FakeOptions options)
    : options_(std::move(options)),
      random_(options_.seed),
      retained_(static_cast<size_t>(options_.devices)),
      current_(static_cast<size_t>(options_.devices)) {
  if (the_fake != nullptr) std::abort();  // one at a time: calls would go to the wrong one
  the_fake = this;
  current_contexts.clear();
  capture_mode = kCaptureGlobal;
}

void FakeDriver::forget() { the_fake = nullptr; }

Driver FakeDriver::driver() { return *load_driver(get_proc_address()); }

void FakeDriver::violate(Rule rule, std::string_view call, const std::string& what) {
  violations_.push_back(absl::StrFormat("%s: %s [%s]", call, what, name_of(rule)));
}

bool FakeDriver::has(DeviceAttribute attribute) const {
  const auto found = options_.attributes.find(attribute);
  return found != options_.attributes.end() && found->second != 0;
}

int FakeDriver::current_device() {
  return current_contexts.empty() ? -1 : device_of(current_contexts.back());
}
Context FakeDriver::current_context() {
  return current_contexts.empty() ? nullptr : current_contexts.back();
}
// A primary one is its device's number and one; above that the number of one of the application's.
int FakeDriver::device_of(Context context) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(context) & 0xff) - 1;
}
void FakeDriver::lose() {
  const std::lock_guard lock(mutex_);
  lost_ = true;
  for (auto& [stream, queue] : streams_) queue.clear();  // nothing of it happens any more
}
uint64_t FakeDriver::calls() {
  const std::lock_guard lock(mutex_);
  return calls_;
}
uint64_t FakeDriver::calls_of(std::string_view name) {
  const std::lock_guard lock(mutex_);
  const auto found = calls_by_name_.find(name);
  return found == calls_by_name_.end() ? 0 : found->second;
}
std::vector<std::string> FakeDriver::violations() {
  const std::lock_guard lock(mutex_);
  return violations_;
}

std::vector<std::string> FakeDriver::finish() {
  const std::lock_guard lock(mutex_);
  for (const int count : current_) {
    if (count > 0) violate(Rule::kContext, "at the end", "a context was left current");
  }
  if (capture_mode != kCaptureGlobal) {
    violate(Rule::kUsers, "at the end", "the thread is left without care for recordings");
  }
  if (lost_) return violations_;  // nothing can be given back to a device that is gone
  for (const int count : retained_) {
    if (count != 0) violate(Rule::kContext, "at the end", "a primary context is still retained");
  }
  for (const auto& [handle, allocation] : allocations_) {
    violate(Rule::kLifetime, "at the end",
            absl::StrFormat("an allocation of %u bytes is left", allocation.size));
  }
  if (foreign_mappings(0) > 0) {
    violate(Rule::kLifetime, "at the end", "device memory is still mapped by somebody");
  }
  if (foreign_descriptors() > 0) {
    violate(Rule::kLifetime, "at the end", "a descriptor of device memory is still open");
  }
  if (!reserved_.empty()) violate(Rule::kLifetime, "at the end", "reserved addresses are left");
  if (!pinned_.empty()) violate(Rule::kLifetime, "at the end", "host memory is still registered");
  const bool waiting = std::any_of(streams_.begin(), streams_.end(),
                                   [](const auto& stream) { return !stream.second.empty(); });
  if (waiting) violate(Rule::kWord, "at the end", "streams still wait: " + heads());
  std::erase_if(streams_, [](const auto& stream) {  // nobody has made them
    return is_default_queue(stream.first) && stream.second.empty();
  });
  if (!streams_.empty()) violate(Rule::kLifetime, "at the end", "a stream is left");
  if (!events_.empty()) violate(Rule::kLifetime, "at the end", "an event is left");
  if (!modules_.empty()) violate(Rule::kLifetime, "at the end", "a module is left");
  if (!captures_.empty()) violate(Rule::kCapture, "at the end", "a stream is still recorded");
  if (!graphs_.empty()) violate(Rule::kCapture, "at the end", "a graph is left");
  if (!executables_.empty()) violate(Rule::kCapture, "at the end", "an executable graph is left");
  return violations_;
}

void FakeDriver::fail_call_in(uint64_t n, Result with) {
  const std::lock_guard lock(mutex_);
  fail_at_ = calls_ + n;
  fail_with_ = with;
}

void FakeDriver::fail_next(std::string_view name, Result with, size_t times, size_t after) {
  const std::lock_guard lock(mutex_);
  fail_name_ = name;
  fail_times_ = times;
  fail_after_ = after;
  fail_with_ = with;
}

void FakeDriver::at_step(uint64_t n, bool ended, std::function<void()> then) {
  const std::lock_guard lock(mutex_);
  then_at_ = n == 0 ? 0 : steps_ + n;
  then_ended_ = ended;
  then_ = std::move(then);
}
uint64_t FakeDriver::steps() {
  const std::lock_guard lock(mutex_);
  return steps_;
}

FakeDriver::UsersDefaultStreams::UsersDefaultStreams() { ++default_stream_scopes; }
FakeDriver::UsersDefaultStreams::~UsersDefaultStreams() { --default_stream_scopes; }

bool FakeDriver::is_default(Stream stream) {
  return stream == nullptr || stream == kLegacyStream || stream == kThreadsStream;
}

Stream FakeDriver::real_stream(Stream stream) {
  if (!is_default(stream)) return stream;
  thread_local const uintptr_t kThread = ++threads;
  const uintptr_t whose = stream == kThreadsStream ? kThread : 0;
  return reinterpret_cast<Stream>(kDefaultQueues + whose * 256 +
                                  static_cast<uintptr_t>(current_device()));
}

FakeDriver::UsersRecording::UsersRecording(FakeDriver& fake, bool on_this_thread) : fake_(fake) {
  const std::lock_guard lock(fake.mutex_);
  stream_ = reinterpret_cast<Stream>(fake.next_object_++);
  fake.streams_[stream_];
  const std::thread::id thread = on_this_thread ? std::this_thread::get_id() : std::thread::id();
  fake.captures_[stream_] = {.thread = thread, .users = true, .operations = {}};
}
FakeDriver::UsersRecording::~UsersRecording() {
  const std::lock_guard lock(fake_.mutex_);
  fake_.captures_.erase(stream_);
  fake_.streams_.erase(stream_);
}
bool FakeDriver::UsersRecording::intact() const {
  const std::lock_guard lock(fake_.mutex_);
  return !fake_.captures_.at(stream_).invalid;
}

FakeDriver::ForeignStreams::ForeignStreams() { ++foreign_stream_scopes; }
FakeDriver::ForeignStreams::~ForeignStreams() { --foreign_stream_scopes; }
bool FakeDriver::ForeignStreams::given() { return foreign_stream_scopes > 0; }

FakeDriver::ProgressThread::ProgressThread() { ++progress_scopes; }
FakeDriver::ProgressThread::~ProgressThread() { --progress_scopes; }

FakeCall::FakeCall(const char* name, Needs needs, bool blocks)
    : fake(*the_fake), lock_(fake.mutex_, std::defer_lock), name_(name) {
  // As CUDA does in a process that was forked; nor is any lock of its parent's threads left there.
  if (const pid_t user = fake.used_in_.load(); user != 0 && user != getpid()) {
    refused_ = kNotInitialized;
    return;
  }
  lock_.lock();
  if (needs != Needs::kNothing) fake.used_in_ = getpid();
  ++fake.calls_;
  ++fake.calls_by_name_[name];
  if (fake.options_.fail_call == fake.calls_) injected_ = fake.options_.fail_with;
  const bool named = fake.fail_name_ == name;
  if (named && fake.fail_after_ > 0) {
    --fake.fail_after_;
  } else if (fake.fail_at_ == fake.calls_ || named) {
    injected_ = fake.fail_with_;
    if (named && --fake.fail_times_ == 0) fake.fail_name_.clear();
  }
  fake.lost_ |= is_loss(injected_);  // and stays so
  static const std::set<std::string_view> kQuestions = {
      "cuEventQuery",         "cuStreamQuery",
      "cuDeviceGetAttribute", "cuDeviceGetName",
      "cuDeviceGetPCIBusId",  "cuDeviceTotalMem",
      "cuStreamIsCapturing",  "cuThreadExchangeStreamCaptureMode"};
  if (!kQuestions.contains(name) && ++fake.steps_ == fake.then_at_) {
    then_ = fake.then_ended_;
    if (!then_) fake.then_();
  }
  if (blocks && progress_scopes > 0)
    violate(Rule::kBlocking, "it blocks, and this is a progress thread");
  if (needs != Needs::kNothing && !fake.initialised_) {
    violate(Rule::kContext, "cuInit was not called");
    refused_ = kNotInitialized;
  } else if (needs == Needs::kContext && current_contexts.empty()) {
    violate(Rule::kContext, "no context is current on this thread");
    refused_ = fake.lost_ ? kLaunchFailed : kInvalidContext;
  } else if (fake.lost_) {
    refused_ = kLaunchFailed;
  } else {
    refused_ = injected_;
    look_at_capture();
  }
}

void FakeCall::look_at_capture() {
  static const std::set<std::string_view> kRecorded = {
      "cuLaunchKernel",      "cuMemcpyAsync",
      "cuMemcpy2DAsync",     "cuStreamBeginCapture",
      "cuStreamEndCapture",  "cuCtxPushCurrent",
      "cuCtxPopCurrent",     "cuDeviceGetAttribute",
      "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode"};
  if (kRecorded.contains(name_)) return;
  // These change no more than a stream's order, or nothing: whoever records is not concerned.
  static const std::set<std::string_view> kConcernNobody = {"cuInit",        "cuMemcpyBatchAsync",
                                                            "cuEventRecord", "cuStreamWaitEvent",
                                                            "cuGraphLaunch", "cuStreamWaitValue64"};
  const std::string_view call = name_;
  const bool question = kConcernNobody.contains(call) || call.starts_with("cuDevice") ||
                        call.starts_with("cuPointerGet") || call == "cuMemGetAllocationGranularity";
  for (auto& [stream, capture] : fake.captures_) {
    const bool here = capture.thread == std::this_thread::get_id();
    if (capture.users ? question || capture_mode == kCaptureRelaxed ||
                            (!here && capture_mode == kCaptureThreadLocal)
                      : !here) {
      continue;
    }
    violate(capture.users ? Rule::kUsers : Rule::kCapture,
            capture.users ? "it spoils what the application records"
                          : "a stream is being recorded by this thread");
    capture.invalid = true;
    refused_ = kCaptureUnsupported;
  }
}

FakeCall::~FakeCall() {
  if (then_) fake.then_();
}

bool FakeCall::at_home(const void* object) const {
  const auto home = fake.homes_.find(object);
  if (home == fake.homes_.end() || home->second == FakeDriver::current_context()) return true;
  const int device = FakeDriver::device_of(home->second);
  violate(Rule::kContext,
          device == FakeDriver::current_device()
              ? absl::StrCat("what another context of device ", device, " has made")
              : absl::StrFormat("what device %d has made, in the context of device %d", device,
                                FakeDriver::current_device()));
  return false;
}

std::deque<FakeDriver::Operation>* FakeCall::queue(Stream stream) const {
  if (FakeDriver::is_default(stream)) {
    if (default_stream_scopes > 0) return &fake.streams_[FakeDriver::real_stream(stream)];
    violate(Rule::kCopy, "on the legacy stream, or on the default one of a thread");
    return nullptr;
  }
  const auto found = fake.streams_.find(stream);
  if (found == fake.streams_.end()) {
    violate(Rule::kStale, "no such stream");
    return nullptr;
  }
  if (!at_home(stream)) return nullptr;
  const auto capture = fake.captures_.find(stream);
  if (capture == fake.captures_.end()) return &found->second;
  if (capture->second.users && default_stream_scopes == 0) {
    violate(Rule::kUsers, "put into a graph that the application records");
    return nullptr;
  }
  if (capture->second.users) return &capture->second.operations;
  if (capture->second.thread != std::this_thread::get_id()) {
    violate(Rule::kCapture, "another thread records this stream");
    capture->second.invalid = true;
    return nullptr;
  }
  return &capture->second.operations;
}

struct FakeCalls {
  static bool wrong(const FakeCall& call, int device) {
    if (device >= 0 && device < call.fake.options_.devices) return false;
    call.violate(Rule::kContext, absl::StrCat("there is no device ", device));
    return true;
  }

  static Result init(const FakeCall& call, unsigned flags) {
    if (flags != 0) call.violate(Rule::kContext, "flags must be 0");
    call.fake.initialised_ = call.fake.options_.init == kSuccess;
    return call.fake.options_.init;
  }
  static Result get_version(int* version) {
    *version = the_fake->options_.version;
    return kSuccess;
  }
  static Result error_name(Result result, const char** name) {
    *name = result == kOutOfMemory    ? "CUDA_ERROR_OUT_OF_MEMORY"
            : result == kLaunchFailed ? "CUDA_ERROR_LAUNCH_FAILED"
            : result == kNoDevice     ? "CUDA_ERROR_NO_DEVICE"
                                      : "CUDA_ERROR_OF_THE_FAKE";
    return kSuccess;
  }
  static Result error_string(Result result, const char** text) {
    *text = result == kOutOfMemory ? "out of memory" : "an error of the fake";
    return kSuccess;
  }
  static Result count(const FakeCall& call, int* count) {
    *count = call.fake.options_.devices;
    return kSuccess;
  }
  static Result get(const FakeCall& call, int* device, int ordinal) {
    if (wrong(call, ordinal)) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
  }
  static Result name(const FakeCall& call, char* name, int size, int device) {
    if (wrong(call, device)) return kInvalidDevice;
    absl::SNPrintF(name, static_cast<size_t>(size), "Fake GPU");
    return kSuccess;
  }
  // One fake stands for the devices of all processes.
  static Result uuid(const FakeCall& call, DeviceUuid* uuid, int device) {
    if (wrong(call, device)) return kInvalidDevice;
    uuid->bytes.fill(static_cast<uint8_t>(device + 1));
    return kSuccess;
  }
  static Result pci(const FakeCall& call, char* id, int size, int device) {
    if (wrong(call, device)) return kInvalidDevice;
    absl::SNPrintF(id, static_cast<size_t>(size), "0000:1B:%02X.0", device);
    return kSuccess;
  }
  static Result attribute(const FakeCall& call, int* value, DeviceAttribute attribute, int device) {
    if (wrong(call, device)) return kInvalidDevice;
    const auto found = call.fake.options_.attributes.find(attribute);
    if (found == call.fake.options_.attributes.end()) return kInvalidValue;
    *value = found->second;
    return kSuccess;
  }
  static Result total(const FakeCall& call, size_t* bytes, int device) {
    if (wrong(call, device)) return kInvalidDevice;
    *bytes = call.fake.options_.memory_bytes;
    return kSuccess;
  }
  static Result retain(const FakeCall& call, Context* context, int device) {
    if (wrong(call, device)) return kInvalidDevice;
    ++call.fake.retained_[static_cast<size_t>(device)];
    *context = reinterpret_cast<Context>(static_cast<uintptr_t>(device) + 1);
    return kSuccess;
  }
  static Result release(const FakeCall& call, int device) {
    if (wrong(call, device)) return kInvalidDevice;
    const auto index = static_cast<size_t>(device);
    if (--call.fake.retained_[index] < 0) call.violate(Rule::kContext, "released too often");
    if (call.fake.retained_[index] == 0 && call.fake.current_[index] > 0) {
      call.violate(Rule::kContext, "it is still current on a thread");
    }
    return kSuccess;
  }
  static Result push(const FakeCall& call, Context context) {
    if (call.fake.contexts_.contains(context)) {
      current_contexts.push_back(context);
      return kSuccess;
    }
    const size_t device = reinterpret_cast<uintptr_t>(context) - 1;
    if (device >= call.fake.retained_.size() || call.fake.retained_[device] == 0) {
      call.violate(Rule::kContext, "the context is not retained");
      return kInvalidContext;
    }
    current_contexts.push_back(context);
    ++call.fake.current_[device];
    return kSuccess;
  }
  static Result pop(const FakeCall& call, Context* context) {
    if (current_contexts.empty()) {
      call.violate(Rule::kContext, "no context is current on this thread");
      return kInvalidContext;
    }
    *context = current_contexts.back();
    if (!call.fake.contexts_.contains(*context)) {
      --call.fake.current_[static_cast<size_t>(FakeDriver::current_device())];
    }
    current_contexts.pop_back();
    return call.told();
  }
  // Also when all else fails: it is the thread's own.
  static Result exchange_mode(const FakeCall& call, int* mode) {
    if (call.refused() != kSuccess && !call.fake.lost_) return call.refused();
    if (*mode < kCaptureGlobal || *mode > kCaptureRelaxed) {
      call.violate(Rule::kCapture, "no such mode");
      return kInvalidValue;
    }
    std::swap(*mode, capture_mode);
    return call.told();
  }

  // As cuGetProcAddress, with the versions whose signatures the fake has.
  static Result get_proc_address(const char* name, void** entry, int version, unsigned long long,
                                 int* found) {
    FakeEntries all;
    add_fake_calls(all);
    add_fake_memory_calls(all);
    add_fake_ipc_calls(all);
    add_fake_stream_calls(all);
    add_fake_launch_calls(all);
    add_fake_copy_calls(all);
    add_fake_order_calls(all);
    add_fake_graph_calls(all);
    const auto at = all.find(name);
    *entry = nullptr;
    if (at == all.end() || the_fake->options_.missing.contains(name)) {
      *found = 1;
      return kNotFound;
    }
    const auto& [function, as_of] = at->second;
    if (the_fake->options_.version < as_of) {
      *found = kSymbolVersionNotSufficient;
      return kNotFound;
    }
    if (version != as_of) {
      the_fake->violate(Rule::kEntry, name,
                        absl::StrFormat("asked for as of %d, and is as of %d", version, as_of));
    }
    *found = 0;
    *entry = function;
    return kSuccess;
  }
};

GetProcAddress FakeDriver::get_proc_address() { return FakeCalls::get_proc_address; }

void add_fake_calls(FakeEntries& out) {
  const auto add = [&](const char* name, auto* function, int version) {
    out[name] = {reinterpret_cast<void*>(function), version};
  };
  add_call<FakeCalls::init, "cuInit", kNothing>(out, 2000);
  add("cuDriverGetVersion", FakeCalls::get_version, 2020);
  add("cuGetErrorName", FakeCalls::error_name, 6000);
  add("cuGetErrorString", FakeCalls::error_string, 6000);
  add_call<FakeCalls::count, "cuDeviceGetCount", kDriver>(out, 2000);
  add_call<FakeCalls::get, "cuDeviceGet", kDriver>(out, 2000);
  add_call<FakeCalls::name, "cuDeviceGetName", kDriver>(out, 2000);
  add_call<FakeCalls::uuid, "cuDeviceGetUuid", kDriver>(out, 11040);
  add_call<FakeCalls::pci, "cuDeviceGetPCIBusId", kDriver>(out, 4010);
  add_call<FakeCalls::attribute, "cuDeviceGetAttribute", kDriver>(out, 2000);
  add_call<FakeCalls::total, "cuDeviceTotalMem", kDriver>(out, 3020);
  add_call<FakeCalls::retain, "cuDevicePrimaryCtxRetain", kDriver | kBlocks>(out, 7000);
  add_call<FakeCalls::release, "cuDevicePrimaryCtxRelease", kDriver | kBlocks | kTakes>(out, 11000);
  add_call<FakeCalls::push, "cuCtxPushCurrent", kDriver>(out, 4000);
  add_call<FakeCalls::pop, "cuCtxPopCurrent", kNothing | kSaysItself>(out, 4000);
  add_call<FakeCalls::exchange_mode, "cuThreadExchangeStreamCaptureMode", kDriver | kSaysItself>(
      out, 10010);
}

}  // namespace baton::gpudirect
